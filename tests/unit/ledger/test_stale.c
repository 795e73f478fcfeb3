/*
 * Results that the daemon before has left, in any number: each is looked at a few times until it is settled or dropped. Work is counted:
 * how often functions are called that look at a result, or compare the name of a record.
 */
#include "ledger/ledger.h"
#include "test.h"
#include <inttypes.h>
#include <stdio.h>

#define JOB	   42u
#define SIZE	   2u
#define PART_BYTES 65536u
#define N	   3000u

static unsigned n_looks;

struct ledger_kept *__real_ledger_result_kept(const struct ledger *ledger, uint32_t result);
struct ledger_kept *__wrap_ledger_result_kept(const struct ledger *ledger, uint32_t result);
struct ledger_kept *__wrap_ledger_result_kept(const struct ledger *ledger, uint32_t result)
{
	n_looks++;
	return __real_ledger_result_kept(ledger, result);
}

struct map_entry *__real_map_next(const struct map *map, const struct map_entry *entry);
struct map_entry *__wrap_map_next(const struct map *map, const struct map_entry *entry);
struct map_entry *__wrap_map_next(const struct map *map, const struct map_entry *entry)
{
	n_looks++;
	return __real_map_next(map, entry);
}

int __real_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b)
{
	n_looks++;
	return __real_strcmp(a, b);
}

static struct ledger *make(int *ret_fd)
{
	const struct ledger_far far = { "", 0, N, PART_BYTES };
	struct ledger *ledger;

	ASSERT_OK(ledger_new(JOB, SIZE, PART_BYTES, 1, &far, &ledger, ret_fd));
	ledger_results_allow(ledger, N);
	return ledger;
}

/* The process ends; what the next one finds. */
static struct ledger *again(struct ledger *ledger, int fd)
{
	struct failure failure = { 0 };

	ledger_free(ledger);
	if (ledger_open(fd, JOB, SIZE, 1, N, &ledger, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	return ledger;
}

static uint32_t keep(struct ledger *ledger, uint64_t key, uint64_t round, uint32_t part,
		     enum reduction reduction)
{
	uint32_t result = ledger_result_take(ledger, false);
	struct ledger_kept *kept;

	ASSERT_TRUE(result != LEDGER_NO_RESULT);
	kept = ledger_result_kept(ledger, result);
	kept->taken = true;
	kept->what = (struct ledger_what){
		.key = key,
		.round = round,
		.part = part,
		.len = 4,
		.total = 4,
		.dtype = DTYPE_FLOAT32,
		.operation = reduction ? OPERATION_PUSH_PULL : OPERATION_BROADCAST,
		.reduction = (uint8_t)reduction,
		.has_data = true,
	};
	ledger_result_whole(ledger, result);
	return result;
}

/* How many are settled, each of this key and of a round up to this one. */
static unsigned settle(struct ledger *ledger, uint64_t key, uint64_t round)
{
	unsigned n = 0;
	uint32_t result;

	for (; (result = ledger_result_settle(ledger, key, round)) != LEDGER_NO_RESULT; n++) {
		const struct ledger_kept *kept = __real_ledger_result_kept(ledger, result);

		ASSERT_TRUE(!kept->stale && kept->taken && kept->whole);
		ASSERT_TRUE(kept->what.key == key && kept->what.round <= round);
	}
	return n;
}

TEST(a_tensor_is_settled_without_a_look_at_the_others)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);

	for (uint32_t i = 0; i < N; i++)
		(void)keep(ledger, 1 + i, 3, 0, REDUCTION_SUM);
	ledger = again(ledger, fd);
	n_looks = 0;
	for (uint32_t i = 0; i < N; i++) {
		/* As when a round begins, and when it ends. */
		ASSERT_EQ(settle(ledger, N - i, 2), 0);
		ASSERT_EQ(settle(ledger, N - i, 3), 1);
	}
	ASSERT_INT(n_looks, <=, 4 * N);
	ledger_free(ledger);
}

TEST(rounds_of_a_tensor_are_settled_without_a_look_at_later_ones)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);

	for (uint32_t i = 0; i < N; i++)
		(void)keep(ledger, 7, 1 + i * 7 % N, 0, REDUCTION_SUM);
	ledger = again(ledger, fd);
	n_looks = 0;
	for (uint32_t round = 1; round < N; round++)
		ASSERT_EQ(settle(ledger, 7, round), 1);
	ASSERT_INT(n_looks, <=, 4 * N);
	ASSERT_TRUE(ledger_result_find(ledger, 7, N, 0, 0) != LEDGER_NO_RESULT);
	ledger_free(ledger);
}

TEST(what_is_free_already_is_not_settled)
{
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);
	uint32_t results[3], again_taken;

	for (uint32_t part = 0; part < 3; part++)
		results[part] = keep(ledger, 7, 3, part, REDUCTION_SUM);
	ledger = again(ledger, fd);
	ledger_result_free(ledger, results[0]);
	/* Its memory is another result's, of this process. */
	again_taken = keep(ledger, 7, 3, 0, REDUCTION_SUM);
	ASSERT_EQ(again_taken, results[0]);
	ASSERT_EQ(ledger_result_settle(ledger, 7, 3), results[1]);
	ledger_result_free(ledger, results[2]);
	ASSERT_EQ(ledger_result_settle(ledger, 7, 3), LEDGER_NO_RESULT);
	ASSERT_EQ(ledger_result_find(ledger, 7, 3, 0, 0), LEDGER_NO_RESULT);
	ASSERT_TRUE(ledger_result_kept(ledger, again_taken)->whole);
	ledger_free(ledger);
}

/* -- Elastic jobs ------------------------------------------------------------------------------------------------- */

/* A tensor, and a round of it that is recorded. */
static struct ledger_round begin(struct ledger *ledger, uint64_t key, uint64_t number,
				 enum ledger_stage stage)
{
	char name[16];
	struct ledger_facts facts = {
		.tensor = name,
		.round = number,
		.elements = 1,
		.dtype = DTYPE_FLOAT32,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
	};
	struct failure failure = { 0 };
	struct ledger_round round;

	(void)snprintf(name, sizeof(name), "t%" PRIu64, key);
	ASSERT_OK(ledger_tensor_add(ledger, name, DTYPE_FLOAT32, 1, key, key));
	if (ledger_round_begin(ledger, &round, &facts, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	if (stage)
		ledger_round_set_stage(&round, stage, 0);
	return round;
}

TEST(results_of_what_was_gathered_are_dropped)
{
	static const enum ledger_stage stages[] = { LEDGER_COMMITTED, LEDGER_GATHERS,
						    LEDGER_SCATTERED, LEDGER_GATHERS };
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);

	for (uint64_t key = 1; key <= ARRAY_SIZE(stages); key++)
		(void)begin(ledger, key, 5, stages[key - 1]);
	ASSERT_OK(ledger_tensor_add(ledger, "idle", DTYPE_FLOAT32, 1, 9, 9));
	for (uint32_t part = 4; part--;) {
		for (uint64_t key = 1; key <= ARRAY_SIZE(stages); key++)
			for (uint64_t round = 4; round <= 6; round++)
				(void)keep(ledger, key, round, part, REDUCTION_SUM);
		(void)keep(ledger, 9, 5, part, REDUCTION_SUM);
		(void)keep(ledger, 20, 5, part, REDUCTION_SUM);
		(void)keep(ledger, 2, 5, 4 + part, 0);
	}
	ledger = again(ledger, fd);
	ledger_results_drop(ledger);
	/* Twice, by the next process: what was dropped is free. */
	for (unsigned i = 0; i < 2; i++, ledger = again(ledger, fd))
		for (uint32_t part = 0; part < 4; part++) {
			for (uint64_t key = 1; key <= ARRAY_SIZE(stages); key++)
				for (uint64_t round = 4; round <= 6; round++)
					ASSERT_EQ(ledger_result_find(ledger, key, round, 0, part) ==
							  LEDGER_NO_RESULT,
						  round == 5 && stages[key - 1] == LEDGER_GATHERS);
			/* Without a record, of no known tensor, and no reduction. */
			ASSERT_TRUE(ledger_result_find(ledger, 9, 5, 0, part) != LEDGER_NO_RESULT);
			ASSERT_TRUE(ledger_result_find(ledger, 20, 5, 0, part) != LEDGER_NO_RESULT);
			ASSERT_TRUE(ledger_result_find(ledger, 2, 5, 0, 4 + part) !=
				    LEDGER_NO_RESULT);
		}
	ledger_free(ledger);
}

/* The last of them has the records of all others before it. */
TEST(what_is_dropped_is_found_without_a_look_at_all_records)
{
	enum { ROUNDS = N / 2 };
	_cleanup_(fd_closep) int fd = -1;
	struct ledger *ledger = make(&fd);

	for (uint32_t i = 0; i < ROUNDS; i++) {
		(void)begin(ledger, 1 + i, 3, LEDGER_GATHERS);
		for (uint32_t part = 0; part < N / ROUNDS; part++)
			(void)keep(ledger, 1 + i, 3, part, REDUCTION_SUM);
	}
	ledger = again(ledger, fd);
	n_looks = 0;
	ledger_results_drop(ledger);
	ASSERT_INT(n_looks, <=, 4 * N);
	for (uint32_t i = 0; i < ROUNDS; i++)
		ASSERT_EQ(ledger_result_find(ledger, 1 + i, 3, 0, 0), LEDGER_NO_RESULT);
	ledger_free(ledger);
}
