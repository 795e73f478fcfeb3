#include "world.h"
#include <stdio.h>

/* Several jobs on the same nodes: each has its share of what leaves. */

#define TENSORS	 200
#define ELEMENTS 4096 /* four parts each */

static float data[2][ELEMENTS];

struct crowd {
	struct declared declared[2][TENSORS];
	struct asked asked[2][TENSORS];
};

/* Ranks first and first + 1 of the world, on a node each. */
static void form(struct world *world, struct crowd *crowd, const char *name, uint32_t first)
{
	for (uint32_t i = 0; i < 2; i++) {
		struct pipeline_join join = world_join_of(world, i);
		struct failure failure = { 0 };

		join.job = name;
		if (world_join(world, first + i, &join, &failure))
			test_fail(__FILE__, __LINE__, "rank %u: %s", i, failure.text);
	}
	for (uint32_t i = 0; i < 2; i++)
		WORLD_UNTIL(world, world->ranks[first + i].joined);
	for (unsigned t = 0; t < TENSORS; t++)
		for (uint32_t i = 0; i < 2; i++) {
			struct failure failure = { 0 };
			char tensor[16];

			(void)snprintf(tensor, sizeof(tensor), "t%u", t);
			ASSERT_OK(declared_make(&crowd->declared[i][t], &world->ranks[first + i],
						tensor, DTYPE_FLOAT32, ELEMENTS, &failure));
		}
	for (unsigned t = 0; t < TENSORS; t++)
		for (uint32_t i = 0; i < 2; i++)
			WORLD_UNTIL(world, crowd->declared[i][t].done);
}

static void submit(struct crowd *crowd)
{
	for (unsigned t = 0; t < TENSORS; t++)
		for (uint32_t i = 0; i < 2; i++) {
			crowd->asked[i][t] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data[i],
						      ELEMENTS, data[i], ELEMENTS);
			asked_submit(&crowd->asked[i][t], &crowd->declared[i][t], 1);
		}
}

static unsigned n_done(const struct crowd *crowd)
{
	unsigned n = 0;

	for (unsigned t = 0; t < TENSORS; t++)
		n += crowd->asked[0][t].done && crowd->asked[1][t].done;
	return n;
}

static void expect_success(const struct crowd *crowd)
{
	for (unsigned t = 0; t < TENSORS; t++)
		for (uint32_t i = 0; i < 2; i++)
			ASSERT_OK(crowd->asked[i][t].failure.status);
}

/* Whoever came first does not go first: both have as much when one has all. */
TEST(a_job_does_not_wait_for_all_of_another)
{
	_cleanup_(world_freep) struct world *world = world_new(
		&(struct world_options){ .n_nodes = 2, .n_local = 1, .max_tensors = TENSORS });
	static struct crowd crowds[2]; /* the world lets go of them after us */
	struct crowd *first = &crowds[0], *second = &crowds[1];

	form(world, first, "first", 0);
	form(world, second, "second", 2);
	submit(first);
	submit(second);
	WORLD_UNTIL(world, n_done(first) == TENSORS);
	ASSERT_INT(n_done(second), >=, TENSORS * 3 / 4);
	WORLD_UNTIL(world, n_done(second) == TENSORS);
	expect_success(first);
	expect_success(second);
}
