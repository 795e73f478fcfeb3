/*
 * What a job through servers keeps, as a trainer may give it back: the daemon must refuse it with words, or go on with it
 * inside its own memory. The input lies over a ledger that was just made: counts in the header, two tensors (their names'
 * starts), three results. Then it is used as the agent does: results are found, settled, freed and kept anew.
 */
#include "base/log.h"
#include "base/memory/handout.h"
#include "fuzz.h"
#include "ledger/ledger.h"
#include <fcntl.h>
#include <sys/mman.h>

#define JOB	   7u
#define SIZE	   3u
#define PART_BYTES 65536u
#define N_TENSORS  2u
#define N_RESULTS  3u
#define TENSOR_LEN (offsetof(struct ledger_tensor, name) + 8) /* the rest of the name is 0 */

static void lay(char *at, size_t len, const uint8_t **data, size_t *size)
{
	size_t n = MIN(len, *size);

	memcpy(at, *data, n);
	*data += n;
	*size -= n;
}

static void lay_over(char *memory, const uint8_t *data, size_t size)
{
	const struct ledger_header *header = (const struct ledger_header *)memory;
	char *results = memory + ledger_result_offset(header->n_journals, N_TENSORS);
	char *tensors = memory + ledger_tensor_offset(header->n_journals);

	lay(memory + offsetof(struct ledger_header, n_results),
	    sizeof(*header) - offsetof(struct ledger_header, n_results), &data, &size);
	for (size_t i = 0; i < N_TENSORS; i++)
		lay(tensors + i * sizeof(struct ledger_tensor), TENSOR_LEN, &data, &size);
	for (size_t i = 0; i < N_RESULTS; i++)
		lay(results + i * sizeof(struct ledger_result), sizeof(struct ledger_result), &data,
		    &size);
}

static void use_tensors(struct ledger *ledger)
{
	const struct ledger_known *known;
	size_t n = 0;

	while ((known = ledger_tensor_at(ledger, n))) {
		FUZZ_CHECK(ledger_tensor_find(ledger, known->name) == known);
		FUZZ_CHECK(dtype_size(known->dtype) && known->key);
		n++;
	}
	FUZZ_CHECK(n <= N_TENSORS);
	FUZZ_CHECK(ledger_tensor_add(ledger, "another", DTYPE_FLOAT32, 1, 9, 0) ==
			   (n < N_TENSORS ? 0 : -EDQUOT) ||
		   ledger_tensor_find(ledger, "another"));
}

static void use_results(struct ledger *ledger)
{
	uint32_t n = ledger_results_used(ledger), result;

	for (uint32_t i = 0; i < n; i++) {
		const struct ledger_kept *kept = ledger_result_kept(ledger, i);
		const struct ledger_what *what = &kept->what;

		FUZZ_CHECK(kept->taken == kept->stale && kept->taken == kept->whole);
		if (!kept->taken)
			continue;
		FUZZ_CHECK(what->len <= PART_BYTES && what->offset <= what->total &&
			   what->len <= what->total - what->offset);
		FUZZ_CHECK(ledger_result_find(ledger, what->key, what->round, what->block,
					      what->part) == i);
	}
	/* Not more than there is: another process would have taken it over as it is. */
	for (uint32_t i = 0; i < MIN(n, 4 * N_RESULTS); i++) {
		struct ledger_kept *kept = ledger_result_kept(ledger, i);

		if (!kept->taken)
			continue;
		result = ledger_result_settle(ledger, kept->what.key, kept->what.round);
		FUZZ_CHECK(result < n && !ledger_result_kept(ledger, result)->stale);
		((char *)ledger_result_data(ledger, result, PART_BYTES))[PART_BYTES - 1] = 1;
		ledger_result_free(ledger, result);
	}
	result = ledger_result_take(ledger, true);
	if (result == LEDGER_NO_RESULT)
		return;
	ledger_result_kept(ledger, result)->what.key = 1;
	ledger_result_whole(ledger, result);
	ledger_result_free(ledger, result);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const struct ledger_far far = { "record", 6, N_TENSORS, PART_BYTES };
	_cleanup_(ledger_freep) struct ledger *made = NULL, *ledger = NULL;
	_cleanup_(freep) void *record = NULL;
	_cleanup_(fd_closep) int fd = -1, writable = -1;
	struct ledger_header header;
	struct failure failure = { 0 };
	size_t len;
	char *memory;
	int r;

	log_init(LOG_LEVEL_ERROR);
	FUZZ_CHECK(!ledger_new(JOB, SIZE, PART_BYTES, 1, &far, &made, &fd));
	FUZZ_CHECK(pread(fd, &header, sizeof(header), 0) == sizeof(header));
	writable = handout_open(fd, O_RDWR);
	memory = mmap(NULL, header.len, PROT_READ | PROT_WRITE, MAP_SHARED, writable, 0);
	FUZZ_CHECK(memory != MAP_FAILED);
	lay_over(memory, data, size);
	r = ledger_open(fd, JOB, SIZE, 1, LEDGER_TENSORS_MAX, &ledger, &failure);
	if (r) {
		FUZZ_CHECK(r == failure.status && failure.text[0] && r == -EPROTO);
	} else if (ledger_is_far(ledger)) {
		FUZZ_CHECK(!ledger_read_record(ledger, &record, &len) && len <= LEDGER_JOB_MAX);
		use_tensors(ledger);
		use_results(ledger);
	}
	(void)munmap(memory, header.len);
	return 0;
}
