/* What a job that goes through servers keeps: results, tensors, and what is made of them when they come from outside. */
#include "base/memory/handout.h"
#include "ledger/ledger.h"
#include "test.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define JOB	   42u
#define SIZE	   2u
#define PART_BYTES 65536u
#define N_TENSORS  3u
#define RECORD	   "layout, placement, view"

static struct ledger *make(int *ret_fd)
{
	const struct ledger_far far = { RECORD, sizeof(RECORD), N_TENSORS, PART_BYTES };
	struct ledger *ledger;

	ASSERT_OK(ledger_new(JOB, SIZE, PART_BYTES, 1, &far, &ledger, ret_fd));
	return ledger;
}

/* The process ends; what the next one finds, or a status other than 0. */
static int reopen(struct ledger **ledger, int fd, struct failure *failure)
{
	*ledger = ledger_free(*ledger);
	return ledger_open(fd, JOB, SIZE, 1, LEDGER_TENSORS_MAX, ledger, failure);
}

static struct ledger *again(struct ledger *ledger, int fd)
{
	struct failure failure = { 0 };

	if (reopen(&ledger, fd, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	return ledger;
}

/* A result of this part of this round, whole. */
static uint32_t keep(struct ledger *ledger, uint64_t key, uint64_t round, uint32_t part)
{
	uint32_t result = ledger_result_take(ledger, false);
	struct ledger_kept *kept;

	ASSERT_TRUE(result != LEDGER_NO_RESULT);
	kept = ledger_result_kept(ledger, result);
	ASSERT_TRUE(!kept->taken && !kept->whole && !kept->stale && !kept->busy);
	kept->taken = true;
	kept->what = (struct ledger_what){
		.key = key,
		.round = round,
		.part = part,
		.block = 5,
		.len = 100 + part,
		.offset = 4 * part,
		.total = 1000,
		.root = 1,
		.stripe = 9,
		.dtype = DTYPE_FLOAT32,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
		.has_data = true,
	};
	memset(ledger_result_data(ledger, result, PART_BYTES), (int)(key + round + part),
	       PART_BYTES);
	ledger_result_whole(ledger, result);
	return result;
}

/* The memory itself, as the daemon's user has it. */
static char *map(int fd, size_t *ret_len)
{
	_cleanup_(fd_closep) int writable = -1;
	struct ledger_header header;
	char *memory;

	ASSERT_EQ(pread(fd, &header, sizeof(header), 0), sizeof(header));
	*ret_len = header.len;
	writable = handout_open(fd, O_RDWR);
	memory = mmap(NULL, header.len, PROT_READ | PROT_WRITE, MAP_SHARED, writable, 0);
	ASSERT_TRUE(memory != MAP_FAILED);
	return memory;
}

static struct ledger_result *result_at(char *memory, uint32_t result)
{
	const struct ledger_header *header = (struct ledger_header *)memory;

	return (struct ledger_result *)(memory + ledger_result_offset(header->n_journals,
								      header->n_tensors)) +
	       result;
}

static struct ledger_tensor *tensor_at(char *memory, uint32_t tensor)
{
	const struct ledger_header *header = (struct ledger_header *)memory;

	return (struct ledger_tensor *)(memory + ledger_tensor_offset(header->n_journals)) + tensor;
}

TEST(a_whole_result_is_found_by_the_next_process)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t first = keep(ledger, 7, 3, 0), half, found;
	const struct ledger_kept *kept;
	const char *data;

	(void)keep(ledger, 7, 3, 1);
	half = ledger_result_take(ledger, false);
	memset(ledger_result_data(ledger, half, PART_BYTES), 1, PART_BYTES);
	ledger_result_free(ledger, first);
	first = keep(ledger, 8, 4, 2);
	/* To find it among its own is nobody's need. */
	ASSERT_EQ(ledger_result_find(ledger, 8, 4, 5, 2), LEDGER_NO_RESULT);
	ledger = again(again(ledger, fd), fd);

	found = ledger_result_find(ledger, 8, 4, 5, 2);
	ASSERT_EQ(found, first);
	kept = ledger_result_kept(ledger, found);
	ASSERT_TRUE(kept->taken && kept->whole && kept->stale && !kept->busy && !kept->offered);
	ASSERT_EQ(kept->what.len, 102);
	ASSERT_EQ(kept->what.offset, 8);
	ASSERT_EQ(kept->what.total, 1000);
	ASSERT_EQ(kept->what.root, 1);
	ASSERT_EQ(kept->what.stripe, 9);
	ASSERT_TRUE(kept->what.has_data && kept->what.dtype == DTYPE_FLOAT32 &&
		    kept->what.operation == OPERATION_PUSH_PULL &&
		    kept->what.reduction == REDUCTION_SUM);
	data = ledger_result_data(ledger, found, PART_BYTES);
	ASSERT_TRUE(data[0] == 14 && data[PART_BYTES - 1] == 14);

	ASSERT_TRUE(ledger_result_find(ledger, 7, 3, 5, 1) != LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_result_find(ledger, 7, 3, 5, 0), LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_result_find(ledger, 7, 3, 4, 1), LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_result_find(ledger, 7, 4, 5, 1), LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_result_find(ledger, 9, 3, 5, 1), LEDGER_NO_RESULT);
	/* What was half is room again. */
	ASSERT_EQ(ledger_results_used(ledger), 3);
	ASSERT_EQ(ledger_result_take(ledger, true), half);
	ASSERT_EQ(ledger_result_take(ledger, true), 3);
	ledger_free(ledger);
}

TEST(a_result_that_was_freed_is_nothing)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t result = keep(ledger, 7, 3, 0);

	ledger = again(ledger, fd);
	ledger_result_free(ledger, result);
	ASSERT_EQ(ledger_result_find(ledger, 7, 3, 5, 0), LEDGER_NO_RESULT);
	ledger = again(ledger, fd);
	ASSERT_EQ(ledger_result_find(ledger, 7, 3, 5, 0), LEDGER_NO_RESULT);
	ledger_free(ledger);
}

/* Its memory is the payload of an offer: another result there, and two parts would share it. */
TEST(memory_of_a_result_that_is_offered_is_nobody_elses)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t result = keep(ledger, 7, 3, 0), others[2];
	struct ledger_kept *kept;

	ledger = again(ledger, fd);
	kept = ledger_result_kept(ledger, result);
	kept->offered = true;
	ledger_result_free(ledger, result);
	ASSERT_EQ(ledger_result_find(ledger, 7, 3, 5, 0), LEDGER_NO_RESULT);
	ASSERT_TRUE(kept->offered && !kept->taken && !kept->whole);
	others[0] = ledger_result_take(ledger, false);
	ASSERT_INT(others[0], !=, result);
	/* Answered. */
	kept->offered = false;
	ledger_result_free(ledger, result);
	ASSERT_EQ(ledger_result_take(ledger, false), result);
	others[1] = ledger_result_take(ledger, false);
	ASSERT_TRUE(others[1] != result && others[1] != others[0]);
	ledger_free(ledger);
}

TEST(results_of_rounds_that_are_over_are_settled)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	unsigned n = 0;
	uint32_t result;

	for (uint64_t round = 1; round <= 4; round++)
		for (uint32_t part = 0; part < 3; part++)
			(void)keep(ledger, 7 + round % 2, round, part);
	/* One of its own is not the daemon's before. */
	ASSERT_EQ(ledger_result_settle(ledger, 7, 10), LEDGER_NO_RESULT);
	ledger = again(ledger, fd);
	while ((result = ledger_result_settle(ledger, 8, 2)) != LEDGER_NO_RESULT) {
		const struct ledger_kept *kept = ledger_result_kept(ledger, result);

		ASSERT_TRUE(!kept->stale && kept->taken && kept->what.key == 8 &&
			    kept->what.round == 1);
		n++;
	}
	ASSERT_EQ(n, 3);
	ASSERT_EQ(ledger_result_find(ledger, 8, 1, 5, 0), LEDGER_NO_RESULT);
	ASSERT_TRUE(ledger_result_find(ledger, 8, 3, 5, 0) != LEDGER_NO_RESULT);
	ASSERT_TRUE(ledger_result_find(ledger, 7, 2, 5, 0) != LEDGER_NO_RESULT);
	ledger_free(ledger);
}

TEST(half_of_the_memory_is_not_spare)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t n = 0, all;
	size_t len;
	char *memory = map(fd, &len);

	all = ((struct ledger_header *)memory)->n_results;
	ASSERT_TRUE(ledger_results_first(ledger) < all);
	ledger_results_allow(ledger, UINT32_MAX);
	ASSERT_EQ(ledger_results_allowed(ledger), all);
	while (ledger_result_take(ledger, true) != LEDGER_NO_RESULT)
		n++;
	ASSERT_EQ(n, all / 2);
	while (ledger_result_take(ledger, false) != LEDGER_NO_RESULT)
		n++;
	ASSERT_EQ(n, all);
	ledger_result_free(ledger, 5);
	ASSERT_EQ(ledger_result_take(ledger, true), LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_result_take(ledger, false), 5);
	(void)munmap(memory, len);
	ledger_free(ledger);
}

static uint64_t memory_of(int fd)
{
	struct stat st;

	ASSERT_OK(fstat(fd, &st));
	return (uint64_t)st.st_blocks * 512;
}

TEST(no_more_results_are_taken_than_are_allowed)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t first = ledger_results_first(ledger), n = 0, result, last = LEDGER_NO_RESULT;

	ASSERT_EQ(ledger_results_allowed(ledger), first);
	ASSERT_EQ(ledger_results_bytes(ledger, first), 0);
	ASSERT_EQ(ledger_results_bytes(ledger, first + 3), 3 * PART_BYTES);
	ASSERT_TRUE(!ledger_results_scarce(ledger));
	while ((result = ledger_result_take(ledger, false)) != LEDGER_NO_RESULT) {
		last = result;
		n++;
	}
	ASSERT_EQ(n, first);
	ASSERT_TRUE(ledger_results_scarce(ledger));
	ledger_results_allow(ledger, first + 1);
	last = ledger_result_take(ledger, false);
	ASSERT_TRUE(last != LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_result_take(ledger, false), LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_results_peak(ledger), first + 1);
	/* What is taken stays allowed. */
	ASSERT_EQ(ledger_results_trim(ledger, 1), first + 1);
	ledger_result_free(ledger, last);
	ASSERT_EQ(ledger_results_trim(ledger, 1), first);
	ASSERT_EQ(ledger_result_take(ledger, false), LEDGER_NO_RESULT);
	ledger_free(ledger);
}

TEST(memory_of_results_that_are_too_many_is_given_back)
{
	enum { N = 40 };
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint64_t before = memory_of(fd);
	uint32_t results[N];

	for (uint32_t i = 0; i < N; i++) {
		results[i] = ledger_result_take(ledger, false);
		memset(ledger_result_data(ledger, results[i], PART_BYTES), 1 + (int)i, PART_BYTES);
	}
	ASSERT_TRUE(memory_of(fd) >= before + (uint64_t)N * PART_BYTES);
	ASSERT_EQ(ledger_results_peak(ledger), N);
	for (uint32_t i = 4; i < N; i++)
		ledger_result_free(ledger, results[i]);
	ASSERT_EQ(ledger_results_trim(ledger, 10), 10);
	ASSERT_TRUE(memory_of(fd) < before + (uint64_t)16 * PART_BYTES);
	ASSERT_EQ(ledger_results_peak(ledger), N);
	ASSERT_EQ(ledger_results_peak(ledger), 4);
	/* Results in use have their memory; the rest is as good as new. */
	for (uint32_t i = 0; i < 4; i++)
		ASSERT_EQ(((unsigned char *)ledger_result_data(ledger, results[i],
							       PART_BYTES))[PART_BYTES - 1],
			  1 + i);
	ledger_results_allow(ledger, N);
	for (uint32_t i = 4; i < N; i++) {
		results[i] = ledger_result_take(ledger, false);
		ASSERT_TRUE(results[i] < N);
		memset(ledger_result_data(ledger, results[i], PART_BYTES), 1 + (int)i, PART_BYTES);
	}
	ASSERT_EQ(ledger_result_take(ledger, false), LEDGER_NO_RESULT);
	for (uint32_t i = 0; i < N; i++)
		ASSERT_EQ(((unsigned char *)ledger_result_data(ledger, results[i], PART_BYTES))[0],
			  1 + i);
	/* The next process may take as many as there are. */
	ledger = again(ledger, fd);
	ASSERT_EQ(ledger_results_allowed(ledger), ledger_results_first(ledger));
	ledger_free(ledger);
}

/* Memory that holds no result is of nobody's charge any more, and does not count. */
TEST(the_next_process_is_allowed_what_holds_something)
{
	enum { MORE = 600, KEPT = 3, USED = 16384 };
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t first = ledger_results_first(ledger), n = first + MORE, result, n_steps;
	_cleanup_(freep) uint32_t *results = calloc(n, sizeof(results[0]));
	uint64_t before = memory_of(fd);

	ASSERT_TRUE(results);
	ledger_results_allow(ledger, n);
	for (uint32_t i = 0; i < KEPT; i++)
		(void)keep(ledger, 7, 1 + i, 0);
	for (uint32_t i = KEPT; i < n; i++) {
		results[i] = ledger_result_take(ledger, false);
		ASSERT_TRUE(results[i] != LEDGER_NO_RESULT);
		if (i >= first)
			memset(ledger_result_data(ledger, results[i], PART_BYTES), 1, USED);
	}
	for (uint32_t i = KEPT; i < n; i++)
		ledger_result_free(ledger, results[i]);
	ASSERT_TRUE(memory_of(fd) >= before + (uint64_t)MORE * USED);
	ledger = again(ledger, fd);
	ASSERT_EQ(ledger_results_allowed(ledger), first);
	/* Memory goes back in steps: that takes long. */
	ASSERT_TRUE(memory_of(fd) >= before + (uint64_t)MORE * USED);
	ASSERT_TRUE(ledger_results_cool(ledger, 0));
	for (n_steps = 1; ledger_results_cool(ledger, 100); n_steps++)
		ASSERT_TRUE(memory_of(fd) >= before + (uint64_t)(MORE - n_steps * 100) * USED);
	ASSERT_EQ(n_steps, (MORE + 99) / 100);
	ASSERT_TRUE(memory_of(fd) < before + (uint64_t)MORE * USED / 2);
	ASSERT_EQ(ledger_results_peak(ledger), KEPT);
	for (uint32_t i = 0; i < KEPT; i++) {
		result = ledger_result_find(ledger, 7, 1 + i, 5, 0);
		ASSERT_TRUE(result != LEDGER_NO_RESULT);
		ASSERT_EQ(*(char *)ledger_result_data(ledger, result, PART_BYTES), (char)(8 + i));
	}
	/* As many as are allowed, and each of them once. */
	memset(results, 0, n * sizeof(results[0]));
	for (uint32_t i = KEPT; i < first; i++) {
		result = ledger_result_take(ledger, false);
		ASSERT_TRUE(result < n && !results[result]++);
	}
	ASSERT_EQ(ledger_result_take(ledger, false), LEDGER_NO_RESULT);
	ledger_free(ledger);
}

static void *take_some(void *user)
{
	struct ledger *ledger = user;
	uint32_t n = 0, *results = calloc(1000, sizeof(*results));

	for (unsigned turn = 0; turn < 20; turn++) {
		for (n = 0; n < 1000; n++) {
			results[n] = ledger_result_take(ledger, true);
			*(uint32_t *)ledger_result_data(ledger, results[n], PART_BYTES) = turn + n;
		}
		while (n--) {
			/* Nobody else had it meanwhile. */
			ASSERT_EQ(*(uint32_t *)ledger_result_data(ledger, results[n], PART_BYTES),
				  turn + n);
			ledger_result_free(ledger, results[n]);
		}
	}
	free(results);
	return NULL;
}

/* What is taken before its memory of before has gone back keeps it. */
TEST(warm_memory_that_is_taken_is_not_cooled)
{
	enum { MORE = 40 };
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t first = ledger_results_first(ledger), n = first + MORE, results[MORE];

	ledger_results_allow(ledger, n);
	for (uint32_t i = 0; i < n; i++)
		(void)ledger_result_take(ledger, false);
	for (uint32_t i = 0; i < n; i++)
		ledger_result_free(ledger, i);
	ledger = again(ledger, fd);
	ledger_results_allow(ledger, n);
	for (uint32_t i = 0; i < first; i++)
		ASSERT_TRUE(ledger_result_take(ledger, false) != LEDGER_NO_RESULT);
	ASSERT_TRUE(ledger_results_cool(ledger, 10));
	/* Ten that are cold, and twenty that are warm. */
	for (uint32_t i = 0; i < 30; i++) {
		results[i] = ledger_result_take(ledger, false);
		ASSERT_TRUE(results[i] != LEDGER_NO_RESULT);
		memset(ledger_result_data(ledger, results[i], PART_BYTES), 1 + (int)i, PART_BYTES);
	}
	ASSERT_TRUE(!ledger_results_cool(ledger, MORE));
	for (uint32_t i = 0; i < 30; i++)
		ASSERT_EQ(((unsigned char *)ledger_result_data(ledger, results[i], PART_BYTES))[0],
			  1 + i);
	ledger_free(ledger);
}

/* It is mostly holes: pages that the next process would make of them are its own, whoever keeps the memfd. */
TEST(what_is_not_there_is_not_made_by_looking)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint64_t before = memory_of(fd);
	size_t len;
	void *record;

	ledger = again(ledger, fd);
	ASSERT_OK(ledger_read_record(ledger, &record, &len));
	ASSERT_EQ(len, sizeof(RECORD));
	free(record);
	ASSERT_EQ(memory_of(fd), before);
	ledger_free(ledger);
}

/* Each takes the daemon time and memory before it is known whose they are. */
TEST(a_ledger_with_too_many_tensors_is_refused)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	struct failure failure = { 0 };

	ASSERT_OK(ledger_tensor_add(ledger, "a", DTYPE_FLOAT32, 5, 1, 0));
	ASSERT_OK(ledger_tensor_add(ledger, "b", DTYPE_FLOAT32, 5, 2, 64));
	ledger_free(ledger);
	ASSERT_EQ(ledger_open(fd, JOB, SIZE, 1, 1, &ledger, &failure), -EPROTO);
	ASSERT_CONTAINS(failure.text, "2 tensors in use, and max_tensors is 1");
	ASSERT_OK(ledger_open(fd, JOB, SIZE, 1, 2, &ledger, &failure));
	ledger_free(ledger);
}

TEST(threads_take_results)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	static uint32_t results[10000];
	pthread_t threads[3];

	ledger_results_allow(ledger, UINT32_MAX);
	for (size_t i = 0; i < ARRAY_SIZE(results); i++)
		results[i] = ledger_result_take(ledger, false);
	for (size_t i = 0; i < ARRAY_SIZE(results); i++)
		ledger_result_free(ledger, results[i]);
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ASSERT_OK(pthread_create(&threads[i], NULL, take_some, ledger));
	/* More than twice what they take, and none fewer while memory of others is given back. */
	ASSERT_EQ(ledger_results_trim(ledger, 6100), 6100);
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ASSERT_OK(pthread_join(threads[i], NULL));
	ASSERT_EQ(ledger_results_used(ledger), ARRAY_SIZE(results));
	ledger_free(ledger);
}

TEST(tensors_and_the_job_are_found_by_the_next_process)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	const struct ledger_known *known;
	void *record;
	size_t len;

	ASSERT_OK(ledger_tensor_add(ledger, "w", DTYPE_FLOAT32, 1000, 11, 0));
	ASSERT_OK(ledger_tensor_add(ledger, "b", DTYPE_INT64, 5, 12, 65536));
	ASSERT_OK(ledger_tensor_add(ledger, "w", DTYPE_FLOAT32, 1000, 11, 0));
	known = ledger_tensor_find(ledger, "b");
	ASSERT_TRUE(known && known->key == 12 && known->start == 65536);
	ledger = again(again(ledger, fd), fd);
	known = ledger_tensor_find(ledger, "b");
	ASSERT_TRUE(known && known->dtype == DTYPE_INT64 && known->elements == 5 &&
		    known->key == 12 && known->start == 65536);
	ASSERT_TRUE(!strcmp(ledger_tensor_at(ledger, 0)->name, "w"));
	ASSERT_TRUE(ledger_tensor_at(ledger, 1) == known && !ledger_tensor_at(ledger, 2));
	ASSERT_TRUE(!ledger_tensor_find(ledger, "v"));
	ASSERT_OK(ledger_tensor_add(ledger, "v", DTYPE_INT64, 5, 13, 131072));
	ASSERT_EQ(ledger_tensor_add(ledger, "u", DTYPE_INT64, 5, 14, 131072), -EDQUOT);
	ASSERT_OK(ledger_read_record(ledger, &record, &len));
	ASSERT_EQ(len, sizeof(RECORD));
	ASSERT_TRUE(!memcmp(record, RECORD, len));
	free(record);
	ledger_free(ledger);
}

TEST(a_tensor_that_is_forgotten_gives_its_place)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	char name[] = "x0";

	ASSERT_OK(ledger_tensor_add(ledger, "w", DTYPE_FLOAT32, 1000, 11, 0));
	for (unsigned i = 0; i < 10; i++) {
		name[1] = (char)('0' + i);
		ASSERT_OK(ledger_tensor_add(ledger, name, DTYPE_INT64, 5, 20 + i, 0));
		ASSERT_TRUE(ledger_tensor_has(ledger, 20 + i));
		ledger_tensor_remove(ledger, name);
		ASSERT_TRUE(!ledger_tensor_has(ledger, 20 + i) &&
			    !ledger_tensor_find(ledger, name));
	}
	ASSERT_OK(ledger_tensor_add(ledger, "b", DTYPE_INT64, 5, 13, 65536));
	ledger_tensor_remove(ledger, "nothing");
	ledger = again(ledger, fd);
	ASSERT_TRUE(ledger_tensor_has(ledger, 11) && ledger_tensor_has(ledger, 13));
	ASSERT_TRUE(!ledger_tensor_at(ledger, 2));
	/* Of those that were forgotten, too. */
	ASSERT_EQ(ledger_last_key(ledger), 29);
	ledger_tensor_remove(ledger, "w");
	ledger = again(ledger, fd);
	ASSERT_TRUE(!ledger_tensor_find(ledger, "w") && ledger_tensor_find(ledger, "b"));
	ASSERT_OK(ledger_tensor_add(ledger, "u", DTYPE_INT64, 5, 30, 0));
	ASSERT_OK(ledger_tensor_add(ledger, "v", DTYPE_INT64, 5, 31, 0));
	ASSERT_TRUE(ledger_knows_all(ledger));
	ASSERT_EQ(ledger_tensor_add(ledger, "t", DTYPE_INT64, 5, 32, 0), -EDQUOT);
	ledger = again(ledger, fd);
	ASSERT_TRUE(!ledger_knows_all(ledger));
	/* The one that had no room has its key all the same. */
	ASSERT_EQ(ledger_last_key(ledger), 32);
	ledger_free(ledger);
}

TEST(a_doubt_outlives_the_process)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);

	ASSERT_OK(ledger_tensor_add(ledger, "w", DTYPE_FLOAT32, 1000, 11, 0));
	ASSERT_TRUE(!ledger_tensor_find(ledger, "w")->in_doubt);
	ledger_tensor_doubt(ledger, "w", true);
	ledger = again(ledger, fd);
	ASSERT_TRUE(ledger_tensor_find(ledger, "w")->in_doubt);
	/* The nodes have agreed on it once more. */
	ASSERT_OK(ledger_tensor_add(ledger, "w", DTYPE_FLOAT32, 1000, 11, 0));
	ledger = again(ledger, fd);
	ASSERT_TRUE(!ledger_tensor_find(ledger, "w")->in_doubt);
	ledger_free(ledger);
}

/* What a trainer may have written there. */
enum harm {
	RESULT_KEY,
	RESULT_ROUND,
	RESULT_LEN,
	RESULT_OFFSET,
	RESULT_END,
	RESULT_DTYPE,
	RESULT_OPERATION,
	RESULT_REDUCTION,
	RESULT_ROOT,
	RESULT_DATA,
	RESULT_TWICE,
	RESULTS_USED,
	TENSORS_USED,
	TENSOR_NAME,
	TENSOR_NO_NAME,
	TENSOR_DTYPE,
	TENSOR_KEY,
	TENSOR_TWICE,
	N_HARMS,
};

static void harm(char *memory, enum harm what)
{
	struct ledger_header *header = (struct ledger_header *)memory;
	struct ledger_result *result = result_at(memory, 0);
	struct ledger_tensor *tensor = tensor_at(memory, 0);

	switch (what) {
	case RESULT_KEY:
		result->key = 0;
		break;
	case RESULT_ROUND:
		result->round = 0;
		break;
	case RESULT_LEN:
		result->len = PART_BYTES + 1;
		result->total = UINT64_MAX;
		break;
	case RESULT_OFFSET:
		result->offset = 1001;
		break;
	case RESULT_END:
		result->offset = 901;
		break;
	case RESULT_DTYPE:
		result->dtype = UINT8_MAX;
		break;
	case RESULT_OPERATION:
		result->operation = 0;
		break;
	case RESULT_REDUCTION:
		result->reduction = UINT8_MAX;
		break;
	case RESULT_ROOT:
		result->root = JOB_RANKS_MAX;
		break;
	case RESULT_DATA:
		result->has_data = 2;
		break;
	case RESULT_TWICE:
		*result_at(memory, 1) = *result;
		break;
	case RESULTS_USED:
		header->results_used = header->n_results + 1;
		break;
	case TENSORS_USED:
		header->tensors_used = N_TENSORS + 1;
		break;
	case TENSOR_NAME:
		memset(tensor->name, 'x', sizeof(tensor->name));
		break;
	case TENSOR_NO_NAME:
		tensor->name[0] = 0;
		break;
	case TENSOR_DTYPE:
		tensor->dtype = UINT32_MAX;
		break;
	case TENSOR_KEY:
		tensor->key = 0;
		break;
	default:
		*tensor_at(memory, 1) = *tensor;
	}
}

TEST(servers_that_were_added_are_found_by_the_next_process)
{
	_cleanup_(fd_closep) int fd = -1;
	struct data_added added = {
		.name = "s1", .address = "a:1", .bandwidth_mbps = 7, .moves = 3
	};
	struct ledger *ledger = make(&fd);
	struct ledger_header *header;
	struct data_added_set set;
	size_t len;

	ASSERT_OK(ledger_added_read(ledger, &set));
	ASSERT_EQ(set.n, 0);
	ledger_added_keep(ledger, &added);
	memcpy(added.name, "s2", 3);
	ledger_added_keep(ledger, &added);
	ledger = again(again(ledger, fd), fd);
	ASSERT_OK(ledger_added_read(ledger, &set));
	ASSERT_EQ(set.n, 2);
	ASSERT_STR(set.servers[0].name, "s1");
	ASSERT_STR(set.servers[1].name, "s2");
	ASSERT_EQ(set.servers[1].bandwidth_mbps, 7);
	/* How often it has gone and come others know. */
	ASSERT_EQ(set.servers[0].moves, 0);

	header = (struct ledger_header *)map(fd, &len);
	header->n_added = DATA_ADDED_MAX + 1;
	ASSERT_EQ(ledger_added_read(ledger, &set), -EPROTO);
	header->n_added = 3; /* the third is empty */
	ASSERT_EQ(ledger_added_read(ledger, &set), -EPROTO);
	ASSERT_EQ(munmap(header, len), 0);
	ledger_free(ledger);
}

TEST(damage_is_refused_with_words)
{
	for (enum harm what = 0; what < N_HARMS; what++) {
		_cleanup_(fd_closep) int fd = -1;
		struct ledger *ledger = make(&fd);
		struct failure failure = { 0 };
		size_t len;
		char *memory = map(fd, &len);

		(void)keep(ledger, 7, 3, 0);
		(void)keep(ledger, 7, 3, 1);
		ASSERT_OK(ledger_tensor_add(ledger, "w", DTYPE_FLOAT32, 1000, 11, 0));
		ASSERT_OK(ledger_tensor_add(ledger, "b", DTYPE_INT64, 5, 12, 65536));
		/* As many as there is room for, so that one more is not merely empty. */
		ASSERT_OK(ledger_tensor_add(ledger, "v", DTYPE_INT64, 5, 13, 131072));
		harm(memory, what);
		ASSERT_EQ(reopen(&ledger, fd, &failure), -EPROTO);
		ASSERT_TRUE(strstr(failure.text, "the ledger is damaged"));
		(void)munmap(memory, len);
	}
}

/* As small ones they are close together; neither overwrites the other's, nor what is beside them. */
TEST(small_results_have_a_place_of_their_own)
{
	enum { N = 3 };
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);

	for (uint32_t i = 0; i < N; i++)
		ASSERT_EQ(keep(ledger, 7, 1, i), i);
	for (uint32_t i = 0; i < N; i++)
		memset(ledger_result_data(ledger, i, LEDGER_SMALL_BYTES), 100 + (int)i,
		       LEDGER_SMALL_BYTES);
	ledger = again(ledger, fd);
	for (uint32_t i = 0; i < N; i++) {
		const char *small = ledger_result_data(ledger, i, 1);
		const char *whole = ledger_result_data(ledger, i, LEDGER_SMALL_BYTES + 1);

		ASSERT_TRUE(small == ledger_result_data(ledger, i, LEDGER_SMALL_BYTES));
		ASSERT_TRUE(whole == ledger_result_data(ledger, i, PART_BYTES));
		for (uint32_t at = 0; at < LEDGER_SMALL_BYTES; at++)
			ASSERT_EQ(small[at], 100 + i);
		for (uint32_t at = 0; at < PART_BYTES; at++)
			ASSERT_EQ(whole[at], 8 + i);
		ASSERT_EQ(small - (char *)ledger_result_data(ledger, 0, 1), i * LEDGER_SMALL_BYTES);
	}
	(void)ledger_free(ledger);
}

/* Of the result that was left with it: what this node had contributed. */
TEST(what_came_late_is_found_by_its_part_until_it_is_used)
{
	_cleanup_(fd_closep) int fd = -1;
	const struct ledger_far far = { RECORD, sizeof(RECORD), N_TENSORS, 2 * PART_BYTES + 64 };
	struct ledger *ledger;
	struct ledger_kept *kept;
	uint32_t late, plain;

	ASSERT_OK(ledger_new(JOB, SIZE, PART_BYTES, 1, &far, &ledger, &fd));
	ASSERT_EQ(ledger_result_bytes(ledger), 2 * PART_BYTES + 64);
	/* What stands behind its result is found from there, however short it is. */
	ASSERT_TRUE(ledger_result_data(ledger, 0, 8) == ledger_result_data(ledger, 0, PART_BYTES));
	late = ledger_result_take(ledger, false);
	kept = ledger_result_kept(ledger, late);
	kept->taken = kept->late = true;
	kept->what = (struct ledger_what){
		.key = 7,
		.round = 3,
		.len = 8,
		.total = 8,
		.dtype = DTYPE_INT64,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
		.has_data = true,
	};
	memcpy(ledger_result_data(ledger, late, PART_BYTES), "a result", 8);
	memcpy(ledger_result_late(ledger, late), "our part", 8);
	ledger_result_whole(ledger, late);
	plain = keep(ledger, 7, 4, 0);
	ASSERT_OK(ledger_result_index(ledger, plain));

	ledger = again(ledger, fd);
	kept = ledger_result_next(ledger, &ledger_result_kept(ledger, late)->what, NULL);
	/* The other was no accumulate, and has nothing beside it: nobody looks for it. */
	ASSERT_TRUE(kept && ledger_result_number(ledger, kept) == late && kept->late);
	ASSERT_TRUE(!ledger_result_next(ledger, &kept->what, kept));
	ASSERT_TRUE(!memcmp(ledger_result_data(ledger, late, PART_BYTES), "a result", 8));
	ASSERT_TRUE(!memcmp(ledger_result_late(ledger, late), "our part", 8));
	ledger_result_used(ledger, late);

	ledger = again(ledger, fd);
	ASSERT_TRUE(ledger_result_kept(ledger, late)->whole &&
		    !ledger_result_kept(ledger, late)->late);
	ASSERT_TRUE(!ledger_result_next(ledger, &ledger_result_kept(ledger, late)->what, NULL));
	(void)ledger_free(ledger);
}

/* Whoever ranks are, they can keep it: their user goes on being charged for the ledger and the memory of its results. */
TEST(what_ranks_keep_of_it_stays_charged)
{
	static struct quota user, descriptors; /* a thread may release what is charged to them */
	struct failure failure = { 0 };
	struct ledger *ledger;
	struct quota job, none;
	struct loop *loop;
	int fd;

	quota_init(&user, UINT64_MAX, NULL);
	quota_init(&job, UINT64_MAX, &user);
	quota_init(&descriptors, 1, NULL);
	quota_init(&none, 0, NULL);
	ASSERT_OK(loop_new(&loop));
	handouts_attach(loop);
	ledger = make(&fd);
	/* The next process has it of a rank. */
	for (unsigned i = 0; i < 2; i++) {
		uint64_t charged;

		ASSERT_OK(ledger_charge_to(ledger, &job, &descriptors));
		(void)keep(ledger, 7, i + 1, 0);
		charged = quota_used(&job);
		ASSERT_TRUE(charged > ledger_bytes(1) + PART_BYTES);
		ASSERT_EQ(quota_used(&user), charged);
		ledger = ledger_free(ledger);
		ASSERT_EQ(quota_used(&job), 0);
		ASSERT_EQ(quota_used(&user), charged);
		ASSERT_EQ(quota_used(&descriptors), 1);
		if (i)
			break;
		handouts_done();
		ASSERT_EQ(quota_used(&user), 0);
		handouts_attach(loop);
		if (ledger_open(fd, JOB, SIZE, 1, LEDGER_TENSORS_MAX, &ledger, &failure))
			test_fail(__FILE__, __LINE__, "%s", failure.text);
	}
	(void)fd_close(fd);
	while (handouts_kept())
		ASSERT_OK(loop_turn(loop, 1000));
	while (quota_used(&user) || quota_used(&descriptors))
		(void)sched_yield();
	/* One that nobody has a descriptor for is refused. */
	ledger = make(&fd);
	ASSERT_EQ(ledger_charge_to(ledger, &job, &none), -EDQUOT);
	(void)fd_close(fd);
	ledger = ledger_free(ledger);
	ASSERT_EQ(quota_used(&user), 0);
	handouts_done();
	loop_free(loop);
}
