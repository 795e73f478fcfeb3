/* Which tensors go together in the order of submission, and which overtake. */
#include "agent/round/round.h"
#include "agent/schedule/priority_class.h"
#include "world.h"
#include <stdio.h>

static void expect(const int32_t *priorities, const uint64_t *bytes, const int32_t *levels,
		   size_t n)
{
	struct priority_class all[16] = { 0 }, *sorted[16];

	for (size_t i = 0; i < n; i++) {
		all[i] = (struct priority_class){ .priority = priorities[i], .bytes = bytes[i] };
		sorted[n - 1 - i] = &all[i];
	}
	priority_class_make(sorted, n);
	for (size_t i = 0; i < n; i++)
		ASSERT_EQ(all[i].priority_class, levels[i]);
}

TEST(few_tensors_are_levels_of_their_own)
{
	expect((int32_t[]){ 3, 2, 1, 0 }, (uint64_t[]){ 10, 10, 10, 10 }, (int32_t[]){ 3, 2, 1, 0 },
	       4);
	/* However small what is urgent, and however large what is not. */
	expect((int32_t[]){ INT32_MAX, INT32_MIN }, (uint64_t[]){ 1, 1ull << 40 },
	       (int32_t[]){ INT32_MAX, INT32_MIN }, 2);
	expect(NULL, NULL, NULL, 0);
}

TEST(neighbours_share_a_level_up_to_an_eighth)
{
	/* 160 bytes in all: two of 10 fit into 20, and the large one into none. */
	expect((int32_t[]){ 9, 8, 7, 6, 5, 4, 3 }, (uint64_t[]){ 10, 10, 10, 100, 10, 10, 10 },
	       (int32_t[]){ 9, 9, 7, 6, 5, 5, 3 }, 7);
	/* Those of one priority are never torn apart. */
	expect((int32_t[]){ 9, 5, 5, 5, 5, 5, 1 }, (uint64_t[]){ 1, 10, 10, 10, 10, 10, 1 },
	       (int32_t[]){ 9, 5, 5, 5, 5, 5, 1 }, 7);
	/* Empty ones harm nobody. */
	expect((int32_t[]){ 3, 2, 1 }, (uint64_t[]){ 0, 0, 0 }, (int32_t[]){ 3, 3, 3 }, 3);
}

#define TENSORS	 32
#define ELEMENTS 4096 /* four parts each */
#define TOGETHER 4    /* tensors that are an eighth of all */

static struct asked asked[TENSORS + 1][2];

static size_t elements_of(unsigned t)
{
	return t < TENSORS ? ELEMENTS : (size_t)TOGETHER * ELEMENTS;
}

static void submit(struct declared **tensors, unsigned t, uint64_t round)
{
	static float data[2][TOGETHER * ELEMENTS];

	for (unsigned i = 0; i < 2; i++) {
		asked[t][i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data[i], elements_of(t),
				       data[i], elements_of(t));
		asked[t][i].base.priority = t < TENSORS ? -(int32_t)t : 1;
		asked_submit(&asked[t][i], &tensors[t][i], round);
	}
}

static void finish(struct world *world, unsigned t)
{
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, asked[t][i].done);
		ASSERT_OK(asked[t][i].failure.status);
	}
}

static unsigned places[TENSORS +
		       1]; /* among what the first node is to send, from 1; 0: all of it has left */

static void find_places(struct world *world)
{
	const struct agent_job *job =
		list_first(&world->nodes[0].agent->jobs, struct agent_job, link);
	const struct agent_round *round;
	unsigned n = 0;

	memset(places, 0, sizeof(places));
	list_for_each (round, &job->schedule.scheduled, turn.link) {
		n++;
		for (unsigned t = 0; t <= TENSORS; t++)
			if (asked[t][0].base.in == round)
				places[t] = n;
	}
	ASSERT_INT(n, >=, TENSORS - TOGETHER);
}

/*
 * The last of the tensors is born first, as in a backward pass, and the most urgent one, which is a level of its own, ends it: before
 * results of the others come, or not until they are there.
 */
static void step(struct world *world, struct declared **tensors, uint64_t round, bool is_over)
{
	for (unsigned t = TENSORS; t--;)
		submit(tensors, t, round);
	if (is_over)
		submit(tensors, TENSORS, round);
	find_places(world);
	for (unsigned t = 0; t < TENSORS; t++)
		finish(world, t);
	if (!is_over)
		submit(tensors, TENSORS, round);
	finish(world, TENSORS);
}

static bool is_before(unsigned a, unsigned b)
{
	return places[a] < places[b];
}

/* Variables that are broadcast before the first step have a priority, too. */
static void broadcast(struct world *world, const char *name, int32_t priority)
{
	struct declared *tensor = world_declare(world, name, DTYPE_FLOAT32, 1);
	struct asked all[2];
	float data[2];

	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, tensor[i].done);
		all[i] = asked_of(OPERATION_BROADCAST, 0, &data[i], 1, &data[i], 1);
		all[i].base.priority = priority;
		asked_submit(&all[i], &tensor[i], 1);
	}
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, all[i].done);
		ASSERT_OK(all[i].failure.status);
	}
}

/*
 * Parts of neighbours are on their way together, and what is submitted before anything else is has begun. Levels are known from the
 * second step on, and count until the most urgent tensor is there.
 */
static void train(bool after_broadcasts)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 2,
						   .n_local = 1,
						   .n_lanes = 1,
						   .max_tensors = TENSORS + 4,
						   .part_bytes = 4096,
						   .ahead_bytes = 8192 });
	struct declared *tensors[TENSORS + 1];
	char name[16];

	world_form(world);
	for (unsigned t = 0; t <= TENSORS; t++) {
		(void)snprintf(name, sizeof(name), "t%u", t);
		tensors[t] = world_declare(world, name, DTYPE_FLOAT32, elements_of(t));
	}
	for (unsigned t = 0; t <= TENSORS; t++)
		for (unsigned i = 0; i < 2; i++)
			WORLD_UNTIL(world, tensors[t][i].done);
	if (after_broadcasts) {
		broadcast(world, "v0", 1);
		broadcast(world, "v1", 1);
		broadcast(world, "v2", 1);
	}
	for (uint64_t round = 1; round < 8; round++) {
		bool is_over = round % 3 == 0, by_class = round > 1 && !is_over;

		step(world, tensors, round, is_over);
		for (unsigned t = 0; t < TENSORS - TOGETHER; t += TOGETHER) {
			unsigned last = t + TOGETHER - 1;

			for (unsigned i = t; i < last; i++)
				ASSERT_TRUE(is_before(i + 1, i) == by_class);
			if (t)
				ASSERT_TRUE(is_before(t - 1, last) && is_before(t - TOGETHER, t));
		}
	}
}

TEST(a_level_goes_by_submission_until_the_pass_is_over)
{
	train(false);
}

TEST(who_was_as_urgent_once_is_not_waited_for)
{
	train(true);
}

/* -- Which tensors end a pass --------------------------------------------------------------------------------------- */

#define URGENT 4 /* tensors, and as many others */

/* Each of those tensors that are in the mask comes once; returns how many passes each of the urgent ones has ended, a bit each. */
static unsigned come(struct world *world, struct declared **tensors, uint64_t *rounds,
		     unsigned mask)
{
	struct agent_job *job = list_first(&world->nodes[0].agent->jobs, struct agent_job, link);
	static float data[1];
	unsigned ended = 0;

	for (unsigned t = 2 * URGENT; t--;) {
		struct asked one = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data, 1, data, 1);
		uint32_t before = job->schedule.n_passes;

		if (!(mask >> t & 1))
			continue;
		one.base.priority = t < URGENT;
		asked_submit(&one, tensors[t], ++rounds[t]);
		ASSERT_INT(job->schedule.n_passes, <=, before + 1);
		ended |= (job->schedule.n_passes - before) << t;
		WORLD_UNTIL(world, one.done);
		ASSERT_OK(one.failure.status);
	}
	return ended;
}

TEST(who_stays_out_once_is_waited_for_again)
{
	_cleanup_(world_freep) struct world *world = world_new(
		&(struct world_options){ .n_nodes = 1, .n_local = 1, .distributed = true });
	struct declared *tensors[2 * URGENT];
	uint64_t rounds[2 * URGENT] = { 0 };
	const unsigned all = (1u << 2 * URGENT) - 1;
	char name[16];

	world_form(world);
	for (unsigned t = 0; t < 2 * URGENT; t++) {
		(void)snprintf(name, sizeof(name), "t%u", t);
		tensors[t] = world_declare(world, name, DTYPE_FLOAT32, 1);
	}
	for (unsigned step = 0; step < 3; step++)
		(void)come(world, tensors, rounds, all);
	ASSERT_EQ(come(world, tensors, rounds, all), 1);
	/* The last ones, 1 and 0, do not come, which is seen when the first, 3, comes again. With 2 there seem to be all. */
	ASSERT_EQ(come(world, tensors, rounds, all & ~3u), 0);
	ASSERT_EQ(come(world, tensors, rounds, all), 1 << 3 | 1 << 2);
	/* They were late, and are waited for. */
	for (unsigned step = 0; step < 3; step++)
		ASSERT_EQ(come(world, tensors, rounds, all), 1);
	/* One in the middle. */
	ASSERT_EQ(come(world, tensors, rounds, all & ~2u), 0);
	ASSERT_EQ(come(world, tensors, rounds, all), 1 << 3 | 1 << 1);
	for (unsigned step = 0; step < 3; step++)
		ASSERT_EQ(come(world, tensors, rounds, all), 1);
	/* Who comes no more is not waited for. */
	ASSERT_EQ(come(world, tensors, rounds, all & ~1u), 0);
	ASSERT_EQ(come(world, tensors, rounds, all & ~1u), 1 << 3 | 1 << 1);
	ASSERT_EQ(come(world, tensors, rounds, all & ~1u), 1 << 1);
}
