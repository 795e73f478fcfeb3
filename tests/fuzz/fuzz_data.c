/* The first bytes on a data connection, and the header of each message after them. */
#include "fuzz.h"
#include "proto/data.h"

/* What a receiver relies on once a header has passed. */
static void check_header(const struct data_header *h)
{
	bool notice = h->op >= DATA_FAIL_ROUND;

	FUZZ_CHECK(h->magic == DATA_MAGIC && h->version == DATA_VERSION);
	FUZZ_CHECK(h->len <= MAX(DATA_PAYLOAD_MAX, DATA_SETUP_MAX));
	FUZZ_CHECK(notice == !h->cookie);
	FUZZ_CHECK(h->node < JOB_RANKS_MAX && h->root < JOB_RANKS_MAX);
	if (h->op == DATA_PUSH || h->op == DATA_OFFER || h->op == DATA_RESULT) {
		FUZZ_CHECK(!h->len || h->len == h->part_len);
		FUZZ_CHECK(h->offset + h->part_len >= h->offset);
		FUZZ_CHECK(h->offset + h->part_len <= h->total);
	}
	if ((h->op == DATA_PUSH || h->op == DATA_OFFER) && h->operation != OPERATION_BARRIER) {
		FUZZ_CHECK(h->key && h->round);
		FUZZ_CHECK(dtype_size(h->dtype) && !(h->part_len % dtype_size(h->dtype)));
		FUZZ_CHECK(h->operation >= 1 && h->operation <= OPERATION_MAX_);
	}
	if (h->op == DATA_ERROR || h->op == DATA_FAIL_ROUND || h->op == DATA_FAIL_JOB)
		FUZZ_CHECK(h->status > 0 && h->len <= ERROR_TEXT_MAX);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct data_header header;
	struct data_hello hello;
	const char *why = NULL;

	if (size >= sizeof(header)) {
		memcpy(&header, data, sizeof(header));
		data_header_decode(&header);
		if (data_header_check(&header, &why))
			FUZZ_CHECK(why && *why);
		else
			check_header(&header);
	}
	if (size >= sizeof(hello)) {
		memcpy(&hello, data, sizeof(hello));
		data_hello_decode(&hello);
		if (data_hello_check(&hello, &why))
			FUZZ_CHECK(why && *why);
		else
			FUZZ_CHECK(memchr(hello.name, 0, sizeof(hello.name)));
	}
	return 0;
}
