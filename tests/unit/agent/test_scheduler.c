/* The order of rounds of which parts are to be made, and how many bytes are made ahead. */
#include "agent/round/round.h"
#include "agent/schedule/scheduler.h"
#include "test.h"
#include <stdlib.h>

/* Were each compared with each, the test would not end in time. */
#define MANY 200000

enum { RANDOM, RISING, FALLING };

static struct agent_tensor tensor;

static uint64_t next_random(void)
{
	static uint64_t state = 1;

	state = state * 6364136223846793005ull + 1442695040888963407ull;
	return state >> 33;
}

static int32_t next_priority(unsigned how, size_t i)
{
	if (how == RANDOM)
		return (int32_t)(next_random() % 1000);
	return how == RISING ? (int32_t)i : -(int32_t)i;
}

/* As they are while the pass goes on: by level, and within it by submission. In a third of them nothing is left to be made. */
static struct agent_round **submit(struct agent_job *job, size_t n, unsigned n_classes,
				   unsigned how)
{
	struct agent_round **rounds = calloc(n, sizeof(*rounds));

	ASSERT_TRUE(rounds);
	list_init(&job->schedule.scheduled);
	for (size_t i = 0; i < n; i++) {
		struct agent_round *round =
			aligned_alloc(CACHE_LINE, align_up(sizeof(*round) + sizeof(round->ranks[0]),
							   (size_t)CACHE_LINE));

		ASSERT_TRUE(round);
		*round = (struct agent_round){
			.tensor = &tensor,
			.job = job,
			.turn.sequence = i,
			.turn.unsent = 1 + next_random() % 100,
			.turn.priority_class = (int32_t)(n_classes - i * n_classes / n),
			.turn.priority = next_priority(how, i),
			.turn.pass = i >= n - n / 8,
			.turn.cut = next_random() % 3 == 0,
		};
		round->ranks[0] = (struct agent_rank){ 0 };
		list_push_back(&job->schedule.scheduled, &round->turn.link);
		rounds[i] = round;
	}
	return rounds;
}

/* The eighth that came last is of a pass that goes on. */
static int by_order(const void *left, const void *right)
{
	const struct agent_round *a = *(struct agent_round *const *)left,
				 *b = *(struct agent_round *const *)right;

	if (a->turn.priority_class != b->turn.priority_class)
		return a->turn.priority_class > b->turn.priority_class ? -1 : 1;
	if (a->turn.pass != b->turn.pass)
		return a->turn.pass < b->turn.pass ? -1 : 1;
	if (!a->turn.pass && a->turn.priority != b->turn.priority)
		return a->turn.priority > b->turn.priority ? -1 : 1;
	return a->turn.sequence < b->turn.sequence ? -1 : 1;
}

static void check(size_t n, unsigned n_classes, unsigned how)
{
	struct agent_job job = { .schedule.n_passes = 1 };
	struct agent_round **rounds = submit(&job, n, n_classes, how), *uncut = NULL;
	const struct list *link = &job.schedule.scheduled;
	uint64_t unsent = 0;

	agent_schedule_sort(&job);
	qsort(rounds, n, sizeof(*rounds), by_order);
	for (size_t i = 0; i < n; i++) {
		ASSERT_TRUE(link->next == &rounds[i]->turn.link);
		ASSERT_TRUE(link->next->prev == link);
		link = link->next;
		if (uncut)
			continue;
		if (rounds[i]->turn.cut)
			unsent += rounds[i]->turn.unsent;
		else
			uncut = rounds[i];
	}
	ASSERT_TRUE(link->next == &job.schedule.scheduled);
	ASSERT_TRUE(job.schedule.scheduled.prev == link);
	ASSERT_TRUE(job.schedule.uncut == uncut);
	ASSERT_EQ(job.schedule.unsent_before, unsent);
	for (size_t i = 0; i < n; i++)
		free(rounds[i]);
	free(rounds);
}

TEST(rounds_of_a_pass_that_is_over_go_by_priority)
{
	for (unsigned how = RANDOM; how <= FALLING; how++)
		for (size_t n = 0; n < 70; n++)
			for (unsigned n_classes = 1; n_classes < 4; n_classes++)
				check(n, n_classes, how);
}

TEST(thousands_are_sorted)
{
	for (unsigned how = RANDOM; how <= FALLING; how++)
		check(MANY, 1, how);
}

/* -- Rounds that wait for answers ---------------------------------------------------------------------------------- */

static unsigned n_looks, n_turns;

static bool may_begin(const struct agent_round *round)
{
	n_looks++;
	return !agent_round_is_full(round);
}

static void turn(struct agent_round *round)
{
	n_turns++;
	agent_schedule_cut(round);
}

/* They have all the parts that they may have at once, and are more urgent than what else there is. */
TEST(nobody_goes_past_rounds_that_wait_again_and_again)
{
	static const struct agent_hooks hooks = { .round_may_begin = may_begin,
						  .round_turn = turn };
	struct agent agent = { .params.ahead_bytes = 1 << 20, .hooks = &hooks };
	struct agent_job job = { .agent = &agent, .distributed = true };
	struct agent_round **rounds = submit(&job, 1000, 1, RISING);

	list_init(&job.schedule.scheduled);
	for (unsigned i = 0; i < 1000; i++) {
		rounds[i]->n_parts = i == 999 ? 1 : ROUND_PARTS_MAX;
		rounds[i]->turn.unsent = 0;
		rounds[i]->turn.cut = false;
		list_init(&rounds[i]->turn.link);
		agent_schedule_add(rounds[i]);
	}
	agent_schedule_run(&job);
	ASSERT_EQ(n_turns, 1);
	ASSERT_EQ(n_looks, 1000);
	agent_schedule_run(&job);
	ASSERT_EQ(n_looks, 1000);
	/* Answers have come: it has its turn again. */
	rounds[500]->n_parts /= 2;
	agent_schedule_add(rounds[500]);
	agent_schedule_run(&job);
	ASSERT_EQ(n_turns, 2);
	ASSERT_TRUE(rounds[500]->turn.cut && list_empty(&job.schedule.scheduled));
	for (unsigned i = 0; i < 1000; i++)
		free(rounds[i]);
	free(rounds);
}

/* -- How many bytes wait to be sent -------------------------------------------------------------------------------- */

static uint64_t link_bytes_s;

uint64_t __wrap_transport_bytes_s(const struct transport *transport);
uint64_t __wrap_transport_bytes_s(const struct transport *transport)
{
	return link_bytes_s;
}

static uint64_t ahead(uint64_t bytes_s, uint32_t part_bytes, uint64_t as_set)
{
	struct agent agent = { .params.ahead_bytes = as_set };
	struct agent_job job = { .agent = &agent, .part_bytes = part_bytes };

	link_bytes_s = bytes_s;
	return agent_schedule_ahead(&job);
}

TEST(what_waits_follows_from_the_link)
{
	ASSERT_EQ(ahead(60000000, 16 << 10, 0), 60000000 / 400);
	for (uint64_t bytes_s = 1000000; bytes_s < 100000000000; bytes_s *= 3) {
		uint64_t bytes = ahead(bytes_s, 4096, 0);

		/* What is urgent does not wait longer than this, and there is work for pauses of 2 ms. */
		ASSERT_INT(bytes, <=, MAX(bytes_s / 400, 4 * 4096ull));
		ASSERT_INT(bytes, >=, MIN(bytes_s / 500, 8ull << 20));
	}
	ASSERT_EQ(ahead(UINT64_MAX, 4096, 0), 8 << 20);
}

TEST(four_parts_wait_however_slow_the_link)
{
	ASSERT_EQ(ahead(1, 16 << 10, 0), 64 << 10);
	ASSERT_EQ(ahead(60000000, 1 << 20, 0), 4 << 20);
	ASSERT_EQ(ahead(UINT64_MAX, 64 << 20, 0), 256ull << 20);
	/* Parts of a size that follows from the link say no more than the link does. */
	for (uint64_t part_bytes = 16 << 10; part_bytes <= 512 << 10; part_bytes *= 2)
		ASSERT_EQ(ahead(part_bytes * 1600, (uint32_t)part_bytes, 0), part_bytes * 4);
}

TEST(what_waits_on_a_link_that_is_not_known)
{
	ASSERT_EQ(ahead(0, 16 << 10, 0), 512 << 10);
	ASSERT_EQ(ahead(0, 1 << 20, 0), 4 << 20);
}

TEST(what_waits_as_the_operator_says)
{
	ASSERT_EQ(ahead(60000000, 1 << 20, 4096), 4096);
	ASSERT_EQ(ahead(0, 4096, 1 << 30), 1 << 30);
}
