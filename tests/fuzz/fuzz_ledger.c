/*
 * A ledger as a trainer may give it back: the daemon must refuse it with words, or go on with it inside its own memory. The
 * input lies over one that was just made: the header's start, one process, two records, two journals. Then a round of its tensor is moved
 * to its end, as the agent does.
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
#define N_PARTS	   700u
#define LAST_LEN   1000u
#define N_THREADS  2u
#define RECORD_LEN (offsetof(struct ledger_record, tensor) + 8) /* the rest of the name is 0 */
#define HEADER_LEN offsetof(struct ledger_header, departed)
/* Made for N_THREADS: the least that there are. */
#define N_JOURNALS LEDGER_JOURNALS_MIN

static void lay_over(char *memory, const uint8_t *data, size_t size)
{
	const struct {
		uint64_t at;
		size_t len;
	} spans[] = {
		{ 0, HEADER_LEN },
		{ offsetof(struct ledger_header, departed), 8 },
		{ LEDGER_PROCESS_OFFSET, sizeof(struct ledger_process) },
		{ LEDGER_RECORD_OFFSET, RECORD_LEN },
		{ LEDGER_RECORD_OFFSET + sizeof(struct ledger_record), RECORD_LEN },
		{ ledger_journal_offset(), 2 * sizeof(struct ledger_journal) },
	};

	for (size_t i = 0; i < ARRAY_SIZE(spans); i++) {
		size_t len = MIN(spans[i].len, size);

		memcpy(memory + spans[i].at, data, len);
		data += len;
		size -= len;
	}
}

static void copy_ends(uint8_t *to, const uint8_t *from, uint32_t len)
{
	to[0] = from[0];
	to[len - 1] = from[len - 1];
}

/* What a summation thread does with a part, without the sum; of each piece it touches both ends. */
static void work(struct ledger_part *part, uint32_t len)
{
	static uint8_t output[PART_BYTES];

	ledger_part_take(part, N_THREADS - 1);
	for (unsigned i = 0; part->done < len; i++) {
		FUZZ_CHECK(i <= PART_BYTES);
		if (!part->staged) {
			uint32_t piece = MIN(len - part->done, LEDGER_PIECE_BYTES);
			uint8_t *scratch = ledger_part_scratch(part);

			scratch[0] = scratch[piece - 1] = 1;
			ledger_part_staged(part, piece);
		}
		FUZZ_CHECK(part->staged <= LEDGER_PIECE_BYTES && part->staged <= len - part->done);
		copy_ends(output + part->done, ledger_part_scratch(part), part->staged);
		ledger_part_copied(part);
	}
	FUZZ_CHECK(part->done == len);
	ledger_part_done(part);
}

static void move(struct ledger *ledger, struct ledger_round *round)
{
	for (uint64_t number = 0; number < N_PARTS; number++) {
		uint32_t len = number + 1 < N_PARTS ? PART_BYTES : LAST_LEN;
		struct ledger_part part;

		/* One after the other: the one before is done. */
		FUZZ_CHECK(ledger_round_reaches(round, number));
		if (ledger_round_has(round, number))
			continue;
		if (ledger_part_find(round, number, len, &part))
			return;
		work(&part, len);
		ledger_round_advance(round, number);
		FUZZ_CHECK(ledger_round_has(round, number));
	}
}

static void use(struct ledger *ledger)
{
	struct ledger_facts facts = {
		.tensor = "w",
		.round = 5,
		.elements = 1000,
		.dtype = DTYPE_FLOAT32,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
	};
	struct ledger_round round = { 0 }, other = { 0 };
	struct failure failure = { 0 };
	uint64_t n_rows;
	uint32_t pid;

	(void)ledger_has_departed(ledger, SIZE - 1);
	(void)ledger_look(ledger, 0, &pid);
	(void)ledger_find_rows(ledger, "w", 5, &n_rows);
	if (ledger_round_begin(ledger, &round, &facts, &failure)) {
		FUZZ_CHECK(failure.status == -EPROTO && failure.text[0]);
		FUZZ_CHECK(!ledger_round_begin(ledger, &round, &facts, &failure));
	}
	move(ledger, &round);
	facts.tensor = "v";
	FUZZ_CHECK(!ledger_round_begin(ledger, &other, &facts, &failure) ||
		   failure.status == -EPROTO);
	ledger_round_end(&other);
	ledger_round_end(&round);
	ledger_forget(ledger, "w", 0, UINT64_MAX);
	FUZZ_CHECK(!ledger_remembers(ledger, "w", 5));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	_cleanup_(ledger_freep) struct ledger *made = NULL, *ledger = NULL;
	_cleanup_(fd_closep) int fd = -1, writable = -1;
	struct failure failure = { 0 };
	char *memory;
	int r;

	log_init(LOG_LEVEL_ERROR);
	FUZZ_CHECK(!ledger_new(JOB, SIZE, PART_BYTES, N_THREADS, NULL, &made, &fd));
	writable = handout_open(fd, O_RDWR);
	memory =
		mmap(NULL, ledger_len(N_JOURNALS), PROT_READ | PROT_WRITE, MAP_SHARED, writable, 0);
	FUZZ_CHECK(memory != MAP_FAILED);
	lay_over(memory, data, size);
	r = ledger_open(fd, JOB, SIZE, N_THREADS, LEDGER_TENSORS_MAX, &ledger, &failure);
	if (r)
		FUZZ_CHECK(r == failure.status && failure.text[0] &&
			   (r == -EPROTO || r == -ESTALE || r == -ECONNRESET));
	else
		use(ledger);
	(void)munmap(memory, ledger_len(N_JOURNALS));
	return 0;
}
