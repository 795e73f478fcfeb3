/* Names without end, most of them in a job without servers: what no rank uses is forgotten, once all ranks say so. */
#include "agent/round/round.h"
#include "world.h"
#include <stdio.h>

#define MAX_TENSORS 64
#define RANKS	    3

/* What the ranks have been asked, and told. */
static struct {
	struct agent_declaration *unused[RANKS][1024];
	unsigned n_unused[RANKS], n_kept[RANKS], n_forgotten;
} heard;

static uint32_t rank_of(const struct agent_declaration *declaration)
{
	return declaration->member->rank;
}

static void on_unused(struct agent_declaration *declaration, const char *name)
{
	uint32_t rank = rank_of(declaration);

	ASSERT_TRUE(*name && heard.n_unused[rank] < ARRAY_SIZE(heard.unused[rank]));
	heard.unused[rank][heard.n_unused[rank]++] = declaration;
}

static void on_released(struct agent_declaration *declaration, bool forgotten)
{
	ASSERT_EQ(agent_is_void(declaration), forgotten);
	if (forgotten)
		heard.n_forgotten++;
	else
		heard.n_kept[rank_of(declaration)]++;
}

static struct world *begin_with(bool can_be_asked, bool distributed, unsigned max_tensors)
{
	struct world *world = world_new(&(struct world_options){ .n_nodes = 1,
								 .n_local = RANKS,
								 .no_servers = !distributed,
								 .distributed = distributed,
								 .max_tensors = max_tensors });

	memset(&heard, 0, sizeof(heard));
	world_form(world);
	for (unsigned i = 0; i < RANKS; i++) {
		world->ranks[i].member.unused = can_be_asked ? on_unused : NULL;
		world->ranks[i].member.released = on_released;
	}
	return world;
}

static struct world *begin(bool can_be_asked)
{
	return begin_with(can_be_asked, false, MAX_TENSORS);
}

static const struct agent_job *job_of_world(const struct world *world)
{
	return list_first(&world->nodes[0].agent->jobs, struct agent_job, link);
}

/* All ranks use it; returns whether it ended well. */
static bool use(struct world *world, struct declared *declared, uint64_t round)
{
	struct asked asked[RANKS];
	float data[RANKS], sum = 0;

	for (unsigned i = 0; i < RANKS; i++) {
		data[i] = (float)(round + i);
		sum += data[i];
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &data[i], 1, &data[i], 1);
		asked_submit(&asked[i], &declared[i], round);
	}
	for (unsigned i = 0; i < RANKS; i++)
		WORLD_UNTIL(world, asked[i].done);
	for (unsigned i = 0; i < RANKS; i++)
		if (asked[i].failure.status || data[i] != sum)
			return false;
	return true;
}

static void release_all(void)
{
	for (unsigned i = 0; i < RANKS; i++) {
		for (unsigned k = 0; k < heard.n_unused[i]; k++)
			ASSERT_OK(agent_release(heard.unused[i][k]));
		heard.n_unused[i] = 0;
	}
}

static struct declared *name_one(struct world *world, unsigned number)
{
	char name[32];

	(void)snprintf(name, sizeof(name), "loss.%u", number);
	return world_declare(world, name, DTYPE_FLOAT32, 1);
}

static void look_anew(const struct agent_job *job)
{
	struct agent_tensor *tensor;

	list_for_each (tensor, &job->tensors.by_age, age_link)
		tensor->seen = false;
}

TEST(names_have_no_end)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	uint64_t used = 0;

	for (unsigned i = 0; i < 10 * MAX_TENSORS; i++) {
		ASSERT_TRUE(use(world, name_one(world, i), 1));
		release_all();
		if (i == 2 * MAX_TENSORS)
			used = job_of_world(world)->memory.bulk.used;
	}
	ASSERT_EQ(job_of_world(world)->memory.bulk.used, used);
	ASSERT_TRUE(job_of_world(world)->tensors.n <= MAX_TENSORS);
	ASSERT_EQ(job_of_world(world)->tensors.n_asked, 0);
	/* The first is as if it had never been: of another type, and its rounds count from 1. */
	ASSERT_TRUE(!agent_tensor_find(job_of_world(world), "loss.0"));
	(void)world_declare(world, "loss.0", DTYPE_INT64, 7);
}

TEST(what_is_used_is_not_asked_about)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *often = world_declare(world, "often", DTYPE_FLOAT32, 1);

	for (unsigned i = 0; i < 5 * MAX_TENSORS; i++) {
		ASSERT_TRUE(use(world, often, i + 1));
		ASSERT_TRUE(use(world, name_one(world, i), 1));
		for (unsigned k = 0; k < heard.n_unused[0]; k++)
			ASSERT_TRUE(heard.unused[0][k] != &often[0].base);
		release_all();
	}
}

/* As a daemon that began anew has looked at none. */
TEST(with_little_room_more_are_looked_at)
{
	_cleanup_(world_freep) struct world *world = begin(true);

	for (unsigned i = 0; i < 10 * MAX_TENSORS; i++) {
		ASSERT_TRUE(use(world, name_one(world, i), 1));
		release_all();
		if (i == MAX_TENSORS - 7 || i == MAX_TENSORS - 4)
			look_anew(job_of_world(world));
	}
}

/* However many could be: members have a packet for each. */
TEST(many_that_nobody_uses_are_asked_about_by_and_by)
{
	enum { MANY = 1024 };
	_cleanup_(world_freep) struct world *world = begin_with(false, false, MANY);
	struct agent_tensor *tensor;
	unsigned asked;

	for (unsigned i = 0; i < MANY - 2; i++)
		(void)name_one(world, i);
	list_for_each (tensor, &job_of_world(world)->tensors.by_age, age_link) {
		tensor->seen = true;
		tensor->seen_rounds = tensor->n_rounds;
	}
	for (unsigned i = 0; i < RANKS; i++)
		world->ranks[i].member.unused = on_unused;
	(void)name_one(world, MANY);
	asked = heard.n_unused[0] + heard.n_unused[1] + heard.n_unused[2];
	ASSERT_INT(asked, >, 0);
	ASSERT_INT(asked, <, 256 + RANKS);
}

/* Fills the job until something is asked about. */
static unsigned fill(struct world *world, struct declared **declared)
{
	unsigned n = 0;

	while (!heard.n_unused[0]) {
		ASSERT_TRUE(n < MAX_TENSORS);
		declared[n] = name_one(world, n);
		ASSERT_TRUE(use(world, declared[n], 1));
		n++;
	}
	for (unsigned i = 1; i < RANKS; i++)
		ASSERT_EQ(heard.n_unused[i], heard.n_unused[0]);
	return n;
}

TEST(one_rank_that_keeps_it_is_enough)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *declared[MAX_TENSORS];

	(void)fill(world, declared);
	ASSERT_TRUE(heard.unused[0][0] == &declared[0][0].base);
	ASSERT_OK(agent_release(&declared[0][0].base));
	ASSERT_OK(agent_release(&declared[0][1].base));
	ASSERT_EQ(agent_release(&declared[0][1].base), -EBUSY);
	agent_keep(&declared[0][2].base);
	ASSERT_EQ(heard.n_kept[0], 1);
	ASSERT_EQ(heard.n_kept[1], 1);
	ASSERT_EQ(heard.n_kept[2], 0);
	/* Too late: nobody is asked any more. */
	ASSERT_EQ(agent_release(&declared[0][2].base), -EBUSY);
	ASSERT_EQ(heard.n_forgotten, 0);
	ASSERT_TRUE(use(world, declared[0], 2));
}

TEST(use_takes_it_back)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *declared[MAX_TENSORS];
	float data[RANKS] = { 1, 2, 3 };
	struct asked asked[RANKS];

	(void)fill(world, declared);
	ASSERT_OK(agent_release(&declared[0][0].base));
	ASSERT_OK(agent_release(&declared[0][1].base));
	for (unsigned i = 0; i < RANKS; i++)
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &data[i], 1, &data[i], 1);
	asked_submit(&asked[2], &declared[0][2], 2);
	ASSERT_EQ(heard.n_kept[0] + heard.n_kept[1], 2);
	ASSERT_EQ(agent_release(&declared[0][2].base), -EBUSY);
	asked_submit(&asked[0], &declared[0][0], 2);
	asked_submit(&asked[1], &declared[0][1], 2);
	for (unsigned i = 0; i < RANKS; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_OK(asked[i].failure.status);
		ASSERT_TRUE(data[i] == 6);
	}
}

TEST(what_ranks_have_not_come_equally_far_in_is_not_asked_about)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *behind = world_declare(world, "behind", DTYPE_FLOAT32, 1);
	struct declared *declared[MAX_TENSORS];
	float data = 1;
	struct asked asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &data, 1, &data, 1);

	/* One has given it up: others have that round still before them. */
	asked_submit(&asked, &behind[0], 1);
	agent_cancel(&asked.base);
	WORLD_UNTIL(world, asked.done);
	(void)fill(world, declared);
	for (unsigned k = 0; k < heard.n_unused[0]; k++)
		ASSERT_TRUE(heard.unused[0][k] != &behind[0].base);
}

TEST(ranks_that_cannot_be_asked_come_to_the_limit)
{
	_cleanup_(world_freep) struct world *world = begin(false);
	struct failure failure = { 0 };
	struct declared one;

	for (unsigned i = 0; i < MAX_TENSORS; i++)
		ASSERT_TRUE(use(world, name_one(world, i), 1));
	ASSERT_EQ(declared_make(&one, &world->ranks[0], "more", DTYPE_FLOAT32, 1, &failure),
		  -EDQUOT);
	ASSERT_CONTAINS(failure.text, "max_tensors");
}

TEST(a_rank_leaves_while_they_are_asked)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *declared[MAX_TENSORS];

	(void)fill(world, declared);
	ASSERT_OK(agent_release(&declared[0][0].base));
	agent_leave(&world->ranks[1].member);
	WORLD_UNTIL(world, world->ranks[1].left);
	/* It stays: what the others do with it fails as it would have. */
	ASSERT_EQ(heard.n_kept[0], 1);
	ASSERT_EQ(agent_release(&declared[0][2].base), -EBUSY);
	ASSERT_TRUE(agent_tensor_find(job_of_world(world), "loss.0"));
}

TEST(a_rank_dies_while_they_are_asked)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *declared[MAX_TENSORS];

	(void)fill(world, declared);
	ASSERT_OK(agent_release(&declared[0][0].base));
	agent_abandon(&world->ranks[1].member, "died");
	WORLD_UNTIL(world, world->ranks[0].ended && world->ranks[2].ended);
	ASSERT_TRUE(agent_is_void(&declared[0][0].base));
}

/*
 * The daemon restarts when one rank has heard that a name was forgotten, and another has not. Their rounds are not the
 * same: that is said, and no result is taken for there that is not.
 */
TEST(a_name_that_only_one_rank_has_forgotten)
{
	_cleanup_(world_freep) struct world *world = begin(true);
	struct declared *declared = world_declare(world, "loss", DTYPE_FLOAT32, 1);
	struct agent_past past = { .rounds = 2 }, none = { 0 };
	struct declared again[RANKS];
	struct asked asked[RANKS];
	float data[RANKS] = { 1, 2, 3 };

	ASSERT_TRUE(use(world, declared, 1) && use(world, declared, 2));
	world_restart(world, 0);
	for (unsigned i = 0; i < RANKS; i++) {
		struct agent_join join = world_join_of(world, i);
		struct failure failure = { 0 };

		if (world_resume(world, i, &join, &failure))
			test_fail(__FILE__, __LINE__, "rank %u: %s", i, failure.text);
	}
	for (unsigned i = 0; i < RANKS; i++) {
		struct failure failure = { 0 };

		WORLD_UNTIL(world, world->ranks[i].joined);
		/* The first had it, and posted nothing of which it does not know the end; the second posted its second round. */
		ASSERT_OK(declared_again(&again[i], &world->ranks[i], "loss", DTYPE_FLOAT32, 1,
					 i == 0	  ? &past
					 : i == 1 ? &none
						  : NULL,
					 &failure));
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &data[i], 1, &data[i], 1);
	}
	asked_submit(&asked[1], &again[1], 2);
	WORLD_UNTIL(world, asked[1].done);
	ASSERT_OK(asked[1].failure.status);
	asked_submit(&asked[2], &again[2], 1);
	WORLD_UNTIL(world, asked[2].done);
	ASSERT_EQ(asked[2].failure.status, -ECONNRESET);
	ASSERT_CONTAINS(asked[2].failure.text, "rank 2 names it anew");
}

/* Nor is it known any more that ranks once waited for one another in its rounds. */
TEST(a_name_in_which_ranks_waited_for_one_another)
{
	_cleanup_(world_freep) struct world *world = begin_with(true, true, MAX_TENSORS);
	struct declared *tensors[2] = { world_declare(world, "a", DTYPE_FLOAT32, 1),
					world_declare(world, "b", DTYPE_FLOAT32, 1) };
	struct asked asked[RANKS];
	float data[RANKS] = { 0 };

	for (unsigned turn = 0; turn < 2; turn++) {
		for (unsigned i = 0; i < RANKS; i++) {
			asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &data[i], 1,
					    &data[i], 1);
			asked_submit(&asked[i], &tensors[(i == 2) != turn][i], 1);
			if (!asked[i].done)
				agent_blocked(&asked[i].base, false);
		}
		for (unsigned i = 0; i < RANKS; i++) {
			WORLD_UNTIL(world, asked[i].done);
			ASSERT_EQ(asked[i].failure.status, -EDEADLK);
		}
	}
	for (unsigned i = 0; agent_tensor_find(job_of_world(world), "a"); i++) {
		ASSERT_TRUE(use(world, name_one(world, i), 1));
		release_all();
		ASSERT_OK(loop_turn(world->loop, 0));
	}
	tensors[0] = world_declare(world, "a", DTYPE_FLOAT32, 1);
	for (unsigned i = 0; i < RANKS; i++) {
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &data[i], 1, &data[i], 1);
		asked_submit(&asked[i], &tensors[0][i], 1);
		if (!asked[i].done)
			agent_blocked(&asked[i].base, false);
	}
	for (unsigned i = 0; i < RANKS; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
}
