/*
 * A ledger left by one process and taken over by the next: in-place journals, records, damage, what
 * concerns the job.
 */
#include "ledger/internal.h"
#include "test.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define JOB	   42u
#define SIZE	   2u
#define PART_BYTES 65536u

static const struct ledger_facts facts = {
	.tensor = "w",
	.round = 3,
	.elements = 100,
	.dtype = DTYPE_FLOAT32,
	.operation = OPERATION_PUSH_PULL,
	.reduction = REDUCTION_SUM,
};

static struct ledger *make(unsigned n_threads, int *ret_fd)
{
	struct ledger *ledger;

	ASSERT_OK(ledger_new(JOB, SIZE, PART_BYTES, n_threads, NULL, &ledger, ret_fd));
	return ledger;
}

/* What the next process finds. */
static struct ledger *reopen(int fd, unsigned n_threads)
{
	struct failure failure = { 0 };
	struct ledger *ledger;

	if (ledger_open(fd, JOB, SIZE, n_threads, LEDGER_TENSORS_MAX, &ledger, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	return ledger;
}

static void begin(struct ledger *ledger, struct ledger_round *round)
{
	struct failure failure = { 0 };

	if (ledger_round_begin(ledger, round, &facts, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
}

/* Takes a part and leaves it with so many bytes done and a piece staged. */
static void leave_part(struct ledger_round *round, uint64_t number, unsigned thread, uint32_t done,
		       uint32_t staged)
{
	struct ledger_part part;

	ASSERT_OK(ledger_part_find(round, number, PART_BYTES, &part));
	ledger_part_take(&part, thread);
	ledger_part_staged(&part, done);
	ledger_part_copied(&part);
	memset(ledger_part_scratch(&part), (int)number, LEDGER_PIECE_BYTES);
	ledger_part_staged(&part, staged);
}

static void finish_part(struct ledger_round *round, uint64_t number)
{
	struct ledger_part part;

	ASSERT_OK(ledger_part_find(round, number, 4, &part));
	ledger_part_take(&part, 0);
	ledger_part_staged(&part, 4);
	ledger_part_copied(&part);
	ledger_part_done(&part);
	ledger_round_advance(round, number);
}

TEST(a_part_goes_on_in_the_hand_it_was_left_in)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(2, &fd);
	struct ledger_round round = { 0 };
	struct ledger_part part, fresh;

	begin(ledger, &round);
	finish_part(&round, 0);
	leave_part(&round, 1, 0, 4096, 512);
	leave_part(&round, 2, 1, 8192, 0);
	/* Twice over: what is not touched stays. */
	for (int i = 0; i < 2; i++) {
		ledger_free(ledger);
		ledger = reopen(fd, 2);
	}
	ASSERT_TRUE(ledger_remembers(ledger, "w", 3) && !ledger_remembers(ledger, "w", 2) &&
		    !ledger_remembers(ledger, "v", 3));
	begin(ledger, &round);
	ASSERT_TRUE(ledger_round_has(&round, 0) && !ledger_round_has(&round, 1) &&
		    !ledger_round_has(&round, 2));
	ASSERT_OK(ledger_part_find(&round, 3, PART_BYTES, &fresh));
	ASSERT_TRUE(!fresh.done && !fresh.staged);
	ledger_part_take(&fresh, 0);
	ASSERT_OK(ledger_part_find(&round, 1, PART_BYTES, &part));
	ASSERT_EQ(part.done, 4096);
	ASSERT_EQ(part.staged, 512);
	ledger_part_take(&part, 1);
	ASSERT_TRUE(part.journal != fresh.journal);
	ASSERT_EQ(*(uint8_t *)ledger_part_scratch(&part), 1);
	ledger_part_copied(&part);
	ASSERT_EQ(part.done, 4096 + 512);
	ASSERT_EQ(part.staged, 0);
	ASSERT_OK(ledger_part_find(&round, 2, PART_BYTES, &part));
	ASSERT_EQ(part.done, 8192);
	ASSERT_EQ(part.staged, 0);
	ledger_free(ledger);
}

TEST(each_hand_is_of_its_own_record)
{
	static const char *const tensors[] = { "a", "b", "c", "d", "e" };
	enum { N = ARRAY_SIZE(tensors) };
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(N, &fd);
	struct ledger_round rounds[N] = { 0 };
	struct failure failure = { 0 };
	struct ledger_part part;

	for (unsigned i = 0; i < N; i++) {
		struct ledger_facts of_its_own = facts;

		of_its_own.tensor = tensors[i];
		ASSERT_OK(ledger_round_begin(ledger, &rounds[i], &of_its_own, &failure));
	}
	/* In that of the middle, what others are still at is done. */
	finish_part(&rounds[N / 2], 0);
	for (unsigned i = 0; i < N; i++)
		leave_part(&rounds[i], i == N / 2, i, 512 * (1 + i), 256);
	ledger_free(ledger);
	ledger = reopen(fd, N);
	for (unsigned i = 0; i < N; i++) {
		struct ledger_facts of_its_own = facts;

		of_its_own.tensor = tensors[i];
		ASSERT_OK(ledger_round_begin(ledger, &rounds[i], &of_its_own, &failure));
		ASSERT_OK(ledger_part_find(&rounds[i], i == N / 2, PART_BYTES, &part));
		ASSERT_EQ(part.done, 512 * (1 + i));
		ASSERT_EQ(part.staged, 256);
	}
	ledger_free(ledger);
}

TEST(a_hand_beyond_its_part_is_damage)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(1, &fd);
	struct ledger_round round = { 0 };
	struct ledger_part part;

	begin(ledger, &round);
	leave_part(&round, 0, 0, 4096, 512);
	ledger_free(ledger);
	ledger = reopen(fd, 1);
	begin(ledger, &round);
	ASSERT_EQ(ledger_part_find(&round, 0, 4604, &part), -EPROTO);
	ledger_free(ledger);
}

static void expect_refused(int fd, const char *words)
{
	struct ledger *ledger = NULL;
	struct failure failure = { 0 };

	ASSERT_EQ(ledger_open(fd, JOB, SIZE, 1, LEDGER_TENSORS_MAX, &ledger, &failure), -EPROTO);
	ASSERT_CONTAINS(failure.text, words);
}

TEST(trainers_read_it_and_make_none)
{
	_cleanup_(fd_closep) int fd = -1, other = memfd_create("bps-session", MFD_ALLOW_SEALING);
	struct stat st;

	ledger_free(make(1, &fd));
	ASSERT_TRUE(write(fd, "x", 1) < 0 && errno == EBADF);
	ASSERT_TRUE(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) < 0 &&
		    errno == EBADF);
	ASSERT_TRUE(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
	ASSERT_OK(fstat(fd, &st));
	ASSERT_EQ(st.st_mode & 0777, 0600);
	ASSERT_OK(ftruncate(other, st.st_size));
	expect_refused(other, "is no ledger");
	if (geteuid())
		return;
	ASSERT_OK(fchown(fd, 12345, (gid_t)-1));
	expect_refused(fd, "is of user 12345, and this daemon of user 0");
}

TEST(a_hand_in_the_middle_of_an_element_is_damage)
{
	static const uint32_t at[][2] = { { 4096, 511 }, { 4094, 512 } };

	for (size_t i = 0; i < ARRAY_SIZE(at); i++) {
		_cleanup_(fd_closep) int fd = -1;
		struct ledger *ledger = make(1, &fd);
		struct ledger_round round = { 0 };

		begin(ledger, &round);
		leave_part(&round, 0, 0, at[i][0], at[i][1]);
		ledger_free(ledger);
		expect_refused(fd, "the ledger is damaged: journal 0 is at byte");
	}
}

TEST(a_low_mark_within_a_word_is_damage)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(1, &fd);
	struct ledger_round round = { 0 };
	uint32_t i = 0;

	begin(ledger, &round);
	while (atomic_load(&ledger_record(ledger, i)->state) != LEDGER_MOVING)
		i++;
	atomic_store(&ledger_record(ledger, i)->low, 32);
	ledger_free(ledger);
	expect_refused(fd, "the ledger is damaged: record");
}

/* A round fails that had such parts: the next in its record must not be taken for it. */
TEST(hands_of_a_round_that_fails_mean_nothing)
{
	static const uint32_t lens[] = {
		4604, PART_BYTES
	}; /* of a part that is damaged; that is never worked on */

	for (size_t i = 0; i < ARRAY_SIZE(lens); i++) {
		_cleanup_(fd_closep) int fd = -1;
		struct ledger *ledger = make(1, &fd);
		struct ledger_round round = { 0 };
		struct ledger_part part;

		begin(ledger, &round);
		leave_part(&round, 0, 0, 4096, 512);
		ledger_free(ledger);
		ledger = reopen(fd, 1);
		begin(ledger, &round);
		ASSERT_EQ(ledger_part_find(&round, 0, lens[i], &part), i ? 0 : -EPROTO);
		ledger_round_end(&round);
		begin(ledger, &round);
		ledger_free(ledger);
		ledger = reopen(fd, 1);
		begin(ledger, &round);
		ASSERT_OK(ledger_part_find(&round, 0, PART_BYTES, &part));
		ASSERT_TRUE(!part.done && !part.staged);
		ledger_free(ledger);
	}
}

TEST(the_window_slides_over_any_number_of_parts)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(1, &fd);
	struct ledger_round round = { 0 };
	uint64_t number, straggler = 70;

	begin(ledger, &round);
	/* As far as it goes without one of them. */
	for (number = 0; ledger_round_reaches(&round, number); number++)
		if (number != straggler)
			finish_part(&round, number);
	ASSERT_EQ(number, 64 + LEDGER_AHEAD);
	ledger_free(ledger);
	ledger = reopen(fd, 1);
	begin(ledger, &round);
	for (uint64_t i = 0; i < number; i++)
		ASSERT_EQ(ledger_round_has(&round, i), i != straggler);
	finish_part(&round, straggler);
	for (; number < 5000; number++) {
		ASSERT_TRUE(ledger_round_reaches(&round, number) &&
			    !ledger_round_has(&round, number));
		finish_part(&round, number);
	}
	ledger_free(ledger);
	ledger = reopen(fd, 1);
	begin(ledger, &round);
	for (uint64_t i = 0; i < 5000; i++)
		ASSERT_TRUE(ledger_round_has(&round, i));
	ASSERT_TRUE(!ledger_round_has(&round, 5000));
	ledger_free(ledger);
}

TEST(a_round_that_is_another_now_is_refused)
{
	uint64_t counts[SIZE] = { 60, 40 };
	struct ledger_facts others[6];
	struct ledger_round round;

	for (size_t i = 0; i < ARRAY_SIZE(others); i++)
		others[i] = facts;
	others[0].elements = 101;
	others[1].dtype = DTYPE_INT32;
	others[2].operation = OPERATION_REDUCE_SCATTER;
	others[3].reduction = REDUCTION_MAX;
	others[4].root = 1;
	others[5].counts = counts;
	for (size_t i = 0; i < ARRAY_SIZE(others); i++) {
		_cleanup_(fd_closep) int fd = -1;
		struct ledger *ledger = make(1, &fd);
		struct failure failure = { 0 };

		begin(ledger, &round);
		ledger_free(ledger);
		ledger = reopen(fd, 1);
		ASSERT_EQ(ledger_round_begin(ledger, &round, &others[i], &failure), -EPROTO);
		ASSERT_TRUE(failure.text[0] && !ledger_remembers(ledger, "w", 3));
		ledger_free(ledger);
	}
}

TEST(a_record_has_the_name_of_its_round_alone)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(1, &fd);
	struct ledger_round round = { 0 };
	struct ledger_facts longer = facts;
	char name[TENSOR_NAME_MAX + 1] = { 0 };

	memset(name, 'w', TENSOR_NAME_MAX);
	longer.tensor = name;
	ASSERT_OK(ledger_round_begin(ledger, &round, &longer, &(struct failure){ 0 }));
	ledger_round_end(&round);
	/* The record that was freed last is taken first. */
	begin(ledger, &round);
	ledger_free(ledger);
	ledger = reopen(fd, 1);
	ASSERT_TRUE(ledger_remembers(ledger, "w", 3) && !ledger_remembers(ledger, name, 3));
	ledger_free(ledger);
}

TEST(records_and_hands_come_back)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(1, &fd);
	struct ledger_round *rounds = calloc(LEDGER_RECORDS + 1, sizeof(*rounds));
	struct ledger_facts other = facts;
	struct failure failure = { 0 };

	ASSERT_TRUE(rounds);
	for (uint32_t i = 0; i < LEDGER_RECORDS; i++) {
		other.round = i + 1;
		ASSERT_OK(ledger_round_begin(ledger, &rounds[i], &other, &failure));
	}
	other.round = LEDGER_RECORDS + 1;
	ASSERT_EQ(ledger_round_begin(ledger, &rounds[LEDGER_RECORDS], &other, &failure), -EDQUOT);
	leave_part(&rounds[7], 0, 0, 4, 4);
	ledger_free(ledger);
	ledger = reopen(fd, 1);
	ledger_forget(ledger, "v", 0, UINT64_MAX);
	ASSERT_TRUE(ledger_remembers(ledger, "w", 8));
	ledger_forget(ledger, "w", 0, UINT64_MAX);
	ASSERT_TRUE(!ledger_remembers(ledger, "w", 8));
	ASSERT_OK(ledger_round_begin(ledger, &rounds[0], &other, &failure));
	ledger_round_end(&rounds[0]);
	ledger_round_end(&rounds[0]);
	ledger_free(ledger);
	/* Nothing is left: as many threads as ever find a journal. */
	ledger = reopen(fd, LEDGER_JOURNALS_MIN);
	ledger_free(ledger);
	free(rounds);
}

TEST(too_few_hands_are_told)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(LEDGER_JOURNALS_MIN / 4, &fd);
	struct ledger_round round = { 0 };
	struct failure failure = { 0 };

	begin(ledger, &round);
	leave_part(&round, 0, 0, 4, 4);
	ledger_free(ledger);
	ASSERT_EQ(ledger_open(fd, JOB, SIZE, LEDGER_JOURNALS_MIN, LEDGER_TENSORS_MAX, &ledger,
			      &failure),
		  -ECONNRESET);
	ASSERT_TRUE(strstr(failure.text, "64 journals, 1 of them full"));
	ledger = reopen(fd, LEDGER_JOURNALS_MIN - 1);
	ledger_free(ledger);
}

TEST(another_jobs_is_refused)
{
	_cleanup_(fd_closep) int fd = -1;
	struct failure failure = { 0 };
	struct ledger *ledger;

	ledger_free(make(1, &fd));
	ASSERT_EQ(ledger_open(fd, JOB + 1, SIZE, 1, LEDGER_TENSORS_MAX, &ledger, &failure),
		  -EPROTO);
	ASSERT_TRUE(strstr(failure.text, "the ledger is of run"));
	ASSERT_EQ(ledger_open(fd, JOB, SIZE + 1, 1, LEDGER_TENSORS_MAX, &ledger, &failure),
		  -EPROTO);
	ASSERT_TRUE(strstr(failure.text, "the ledger is of run"));
	ledger_free(reopen(fd, 1));
}

TEST(what_concerns_the_job_is_kept)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(1, &fd);
	const struct process_seen self = process_see((uint32_t)getpid());
	struct process_seen other = self;
	uint32_t pid;

	ASSERT_TRUE(!ledger_has_begun(ledger) && ledger_is(ledger, fd) && !ledger_is(ledger, 0));
	ledger_begin(ledger);
	ledger_leave(ledger, 1);
	ledger_set_process(ledger, 0, &self);
	ledger_free(ledger);
	ledger = reopen(fd, 1);
	ASSERT_TRUE(ledger_has_begun(ledger));
	ASSERT_TRUE(ledger_has_departed(ledger, 1) && !ledger_has_departed(ledger, 0));
	ASSERT_EQ(ledger_part_bytes(ledger), PART_BYTES);
	ASSERT_EQ(ledger_look(ledger, 0, &pid), PROCESS_ALIVE);
	ASSERT_EQ(pid, (uint32_t)getpid());
	ASSERT_EQ(ledger_pid(ledger, 0), pid);
	ASSERT_EQ(ledger_look(ledger, 1, &pid), PROCESS_UNKNOWN);
	other.started++;
	ASSERT_TRUE(ledger_may_be(ledger, 0, &self) && !ledger_may_be(ledger, 0, &other));
	ledger_free(ledger);
}
