/* The first bytes on a data connection, the header of each message after them, and the payloads of MOVE and of packs. */
#include "fuzz.h"
#include "proto/data.h"

/* What a receiver relies on once a header has passed. */
static void check_header(const struct data_header *h)
{
	bool notice = h->op >= DATA_FAIL_ROUND;

	FUZZ_CHECK(h->magic == DATA_MAGIC && h->version == DATA_VERSION);
	FUZZ_CHECK(h->len <= MAX(DATA_PAYLOAD_MAX, DATA_SETUP_MAX));
	FUZZ_CHECK(notice == !h->cookie);
	FUZZ_CHECK(h->node < JOB_RANKS_MAX);
	/* Of an accumulate's result it counts contributions. */
	FUZZ_CHECK(h->root < JOB_RANKS_MAX ||
		   (h->op == DATA_RESULT && h->operation == OPERATION_ACCUMULATE));
	if (h->op == DATA_PUSH || h->op == DATA_OFFER || h->op == DATA_RESULT) {
		FUZZ_CHECK(!h->len || h->len == h->part_len ||
			   ((h->op == DATA_RESULT || h->op == DATA_OFFER) && h->len > h->part_len &&
			    h->len <= data_contributors_at(h->part_len) + DATA_CONTRIBUTORS_MAX));
		FUZZ_CHECK(h->offset + h->part_len >= h->offset);
		FUZZ_CHECK(h->offset + h->part_len <= h->total);
	}
	if ((h->op == DATA_PUSH || h->op == DATA_OFFER) && h->operation != OPERATION_BARRIER) {
		FUZZ_CHECK(h->key && h->round);
		FUZZ_CHECK(dtype_size(h->dtype) && !(h->part_len % dtype_size(h->dtype)));
		FUZZ_CHECK(h->operation >= 1 && h->operation <= OPERATION_MAX_);
	}
	if (h->op == DATA_HAVE)
		FUZZ_CHECK(h->key && h->round);
	if (h->op == DATA_ORDINAL)
		FUZZ_CHECK(h->round && h->len <= ERROR_TEXT_MAX &&
			   (h->status > 0 ||
			    (!h->status && h->key && h->len && h->len <= TENSOR_NAME_MAX)));
	if (h->op == DATA_FOLLOW || h->op == DATA_OTHERS_FOLLOW)
		FUZZ_CHECK(h->n_following < JOB_RANKS_MAX && h->len <= ERROR_TEXT_MAX &&
			   (h->status > 0 || (!h->status && !h->len)));
	if (h->op == DATA_FOLLOW)
		FUZZ_CHECK(h->n_idle <= h->n_following && h->turn != UINT64_MAX);
	if (h->op == DATA_BEGUN || h->op == DATA_OTHERS_BEGUN)
		FUZZ_CHECK(h->first_round && h->tensor_round >= h->first_round && h->len &&
			   h->len <= TENSOR_NAME_MAX && dtype_size(h->dtype) &&
			   h->operation <= OPERATION_MAX_);
	if (h->op == DATA_MOVE)
		FUZZ_CHECK(h->part <= DATA_ADDED_MAX && !(h->len % 4) && data_moves_n(h) &&
			   data_moves_n(h) <= DATA_MOVES_MAX);
	if (h->op == DATA_ACK || h->op == DATA_RELEASE || h->op == DATA_LEAVE ||
	    h->op == DATA_LEFT || h->op == DATA_DRAIN || h->op == DATA_OFFERED ||
	    h->op == DATA_HAVE || h->op == DATA_STOPPING || h->op == DATA_IDLE)
		FUZZ_CHECK(!h->len);
	if (h->op == DATA_ERROR || h->op == DATA_FAIL_ROUND || h->op == DATA_FAIL_JOB)
		FUZZ_CHECK(h->status > 0 && h->len <= ERROR_TEXT_MAX);
}

#define MOVES 8

/* What two daemons know, the first byte says of how many servers: one hears the other, then both know as much. */
static void unite_moves(const uint8_t *data, size_t size)
{
	uint32_t a[MOVES] = { 0 }, b[MOVES] = { 0 }, before[MOVES];
	size_t n_servers = size ? data[0] % (MOVES + 1) : 0;
	bool more, in = false;

	if (!size)
		return;
	memcpy(a, data + 1, MIN(size - 1, sizeof(a)));
	if (size - 1 > sizeof(a))
		memcpy(b, data + 1 + sizeof(a), MIN(size - 1 - sizeof(a), sizeof(b)));
	/* What it knows itself it was never told to be more than that. */
	for (size_t i = 0; i < MOVES; i++)
		a[i] %= DATA_MOVES_OFTEN;
	data_moves_swap(b, MOVES);
	memcpy(before, a, sizeof(a));
	more = data_moves_unite(a, b, MOVES, n_servers, NULL, NULL);
	FUZZ_CHECK(more == !!memcmp(a, before, sizeof(a)));
	for (size_t i = 0; i < MOVES; i++) {
		FUZZ_CHECK(a[i] >= before[i] && a[i] <= DATA_MOVES_OFTEN);
		FUZZ_CHECK(a[i] >= b[i] || !data_moves_valid(b[i], i >= n_servers));
		in |= i < n_servers && !(a[i] & 1);
	}
	/* However it came to be: a job has a server. */
	FUZZ_CHECK(in == (n_servers > 0));
	FUZZ_CHECK(!data_moves_unite(a, b, MOVES, n_servers, NULL, NULL));
	FUZZ_CHECK(!data_moves_unite(b, b, MOVES, 0, NULL, NULL));
	FUZZ_CHECK(data_moves_epoch(7, a, 0, NULL) == 7);
}

/* The payload of a MOVE with as many servers that were added as fit into it, behind one number. */
static void decode_moves(const uint8_t *data, size_t size)
{
	static struct data_added_set set, empty, own;
	struct data_header header = { .op = DATA_MOVE };
	bool more = false, less = false, any = false;
	uint32_t moves[1], none[1] = { 0 };

	if (size < sizeof(moves))
		return;
	header.part = (uint32_t)MIN((size - sizeof(moves)) / sizeof(set.servers[0]),
				    (size_t)DATA_ADDED_MAX);
	header.len = (uint32_t)(sizeof(moves) + header.part * sizeof(set.servers[0]));
	if (!data_moves_decode(&header, data, moves, &set))
		return;
	own = empty;
	FUZZ_CHECK(set.n == header.part);
	FUZZ_CHECK(data_moves_unite(none, none, 1, 0, &own, &set) == !!set.n && own.n == set.n);
	FUZZ_CHECK(!data_moves_unite(none, none, 1, 0, &own, &set));
	data_added_compare(&own, &set, &more, &less);
	for (uint32_t i = 0; i < set.n; i++)
		any |= !(set.servers[i].moves & 1);
	/* Where all are gone, as they may be on neither side alone, they come back: that is news. */
	FUZZ_CHECK(!more && less == (set.n && !any));
}

/* A header as it has to be, and behind it what stands for each message: what fits comes out as it went in. */
static void unpack(const struct data_header *pack, const uint8_t *data, size_t size)
{
	struct data_packed packed[DATA_PACK_MAX] = { 0 }, again;
	uint32_t len = 0;

	memcpy(packed, data, MIN(size, sizeof(packed)));
	if (!data_packed_fit(pack, packed))
		return;
	for (uint32_t i = 0; i < pack->part; i++) {
		struct data_header h;
		const char *why;

		data_unpack(pack, &packed[i], &h);
		len += h.len;
		FUZZ_CHECK(h.len <= DATA_PACKED_MAX && len <= DATA_PACKED_LEN);
		if (data_header_check(&h, &why))
			continue;
		check_header(&h);
		FUZZ_CHECK(data_may_pack(&h) && data_packs_with(&h, &h));
		data_pack(&h, &again);
		FUZZ_CHECK(!memcmp(&again, &packed[i], sizeof(again)));
	}
	FUZZ_CHECK(len == pack->len - pack->part * sizeof(packed[0]));
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
		if (!data_header_check(&header, &why) && header.op == DATA_PACK)
			unpack(&header, data + sizeof(header), size - sizeof(header));
	}
	if (size >= sizeof(hello)) {
		memcpy(&hello, data, sizeof(hello));
		data_hello_decode(&hello);
		if (data_hello_check(&hello, &why))
			FUZZ_CHECK(why && *why);
		else
			FUZZ_CHECK(memchr(hello.name, 0, sizeof(hello.name)));
	}
	decode_moves(data, size);
	unite_moves(data, size);
	return 0;
}
