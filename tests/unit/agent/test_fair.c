/* Several jobs on the same nodes: each has its share of what leaves. */
#include "world.h"
#include <stdio.h>

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
		struct agent_join join = world_join_of(world, i);
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

/* Two ranks on each of two nodes, in job `name`, with one tensor; ranks first to first + 3 of the world. */
static void form_four(struct world *world, const char *name, uint32_t first,
		      struct declared *declared)
{
	struct failure failure = { 0 };

	for (uint32_t i = 0; i < 4; i++) {
		struct agent_join join = world_join_of(world, i);

		join.job = name;
		ASSERT_OK(world_join(world, first + i, &join, &failure));
	}
	for (uint32_t i = 0; i < 4; i++) {
		WORLD_UNTIL(world, world->ranks[first + i].joined);
		ASSERT_OK(declared_make(&declared[i], &world->ranks[first + i], "grad",
					DTYPE_FLOAT32, ELEMENTS, &failure));
	}
	for (uint32_t i = 0; i < 4; i++)
		WORLD_UNTIL(world, declared[i].done);
}

static bool server_has(struct node *node, const char *name)
{
	_cleanup_(freep) struct server_job_info *jobs = NULL;
	size_t n = 0;

	ASSERT_OK(server_jobs(node->server, &jobs, &n));
	while (n && strcmp(jobs[n - 1].name, name))
		n--;
	return n;
}

static bool all_done(const struct asked *asked)
{
	return asked[0].done && asked[1].done && asked[2].done && asked[3].done;
}

/*
 * Both jobs have parts that are being gathered, in the pool, as much as may be under way. Returns whether the one that stays
 * went on before the other had taken the server in again, after a second, which sets it going in any case.
 */
static bool stays(void)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 2, .n_threads = 1, .resume = true, .ahead_bytes = 4096 });
	static struct declared declared[2][4];
	static struct asked asked[2][4];
	static float buffers[2][4][ELEMENTS];
	uint32_t moves[2] = { 0, 1 };
	struct data_header header = { .op = DATA_MOVE, .len = sizeof(moves) };
	bool first = false;

	form_four(world, "goes", 0, declared[0]);
	form_four(world, "stays", 4, declared[1]);
	header.job = world->ranks[0].number;
	for (unsigned job = 0; job < 2; job++)
		for (uint32_t i = 0; i < 4; i++) {
			asked[job][i] =
				asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, buffers[job][i],
					 ELEMENTS, buffers[job][i], ELEMENTS);
			asked_submit(&asked[job][i], &declared[job][i], 1);
		}
	agent_notice_arrived(world->nodes[0].agent, transport_self(world->nodes[0].transport),
			     &header, moves);
	WORLD_UNTIL(world, !server_has(&world->nodes[1], "goes") || all_done(asked[1]));
	WORLD_UNTIL(world, server_has(&world->nodes[1], "goes") || all_done(asked[1]));
	first = all_done(asked[1]);
	for (unsigned job = 0; job < 2; job++)
		for (uint32_t i = 0; i < 4; i++) {
			WORLD_UNTIL(world, asked[job][i].done);
			ASSERT_STR(asked[job][i].failure.text, "");
		}
	return first;
}

/* A job that goes on without a server leaves the queue towards it: what others have in that queue goes on. */
TEST(a_job_that_goes_elsewhere_holds_nobody_up)
{
	unsigned n = 0;

	/* Where the machine is very busy, it may take so long in itself. */
	while (!stays())
		ASSERT_INT(++n, <, 20);
}

/* Pairs of ranks that have nothing for each other are gone past a piece at a time: their number grows with the ranks' square. */
TEST(an_exchange_of_nothing_takes_several_turns)
{
	enum { N = 80 };
	_cleanup_(world_freep) struct world *world = world_new(
		&(struct world_options){ .n_nodes = 1, .n_local = N, .no_servers = true });
	static const uint64_t none[2 * N];
	static struct asked asked[N];
	struct declared *declared;
	bool done = true;

	world_form(world);
	declared = world_declare(world, "t", DTYPE_FLOAT32, ELEMENTS_VARIABLE);
	for (uint32_t i = 0; i < N; i++) {
		asked[i] = asked_of(OPERATION_ALL_TO_ALL, 0, NULL, 0, NULL, 0);
		asked[i].base.counts = none;
		asked_submit(&asked[i], &declared[i], 1);
	}
	for (uint32_t i = 0; i < N; i++)
		done = done && asked[i].done;
	ASSERT_TRUE(!done);
	for (uint32_t i = 0; i < N; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
}

#define SHORT 100

struct backlog {
	struct asked asked[1 + SHORT];
	struct chore chore; /* of others, due since the long one is done */
	unsigned n_before;  /* that were done before it had its turn */
	struct world *world;
};

static unsigned n_over(const struct backlog *backlog)
{
	unsigned n = 0;

	for (unsigned i = 0; i <= SHORT; i++)
		n += backlog->asked[i].done;
	return n;
}

static bool on_turn(struct chore *chore)
{
	struct backlog *backlog = container_of(chore, struct backlog, chore);

	backlog->n_before = n_over(backlog);
	return false;
}

static void (*done_as_ever)(struct agent_request *request, const struct failure *failure);

static void on_long_done(struct agent_request *request, const struct failure *failure)
{
	struct backlog *backlog =
		container_of(container_of(request, struct asked, base), struct backlog, asked[0]);

	done_as_ever(request, failure);
	loop_begin(backlog->world->loop, &backlog->chore);
}

/* Rounds that waited for one in the pool, and take no time: they are not all begun before others have their turn. */
TEST(rounds_behind_a_long_one_take_several_turns)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 1,
						   .no_servers = true,
						   .n_threads = 1,
						   .inline_bytes = 64 });
	static struct backlog backlog;
	static float data[ELEMENTS], result[ELEMENTS];
	struct declared *declared;

	world_form(world);
	backlog.world = world;
	backlog.chore.step = on_turn;
	declared = world_declare(world, "t", DTYPE_FLOAT32, ELEMENTS_VARIABLE);
	for (unsigned i = 0; i <= SHORT; i++) {
		uint64_t count = i ? 1 : ELEMENTS;

		backlog.asked[i] = asked_of(OPERATION_ALL_GATHER, 0, data, count, result, count);
		backlog.asked[i].base.counts = &backlog.asked[i].base.input_count;
		if (!i) {
			done_as_ever = backlog.asked[i].base.done;
			backlog.asked[i].base.done = on_long_done;
		}
		asked_submit(&backlog.asked[i], declared, i + 1);
	}
	WORLD_UNTIL(world, backlog.n_before);
	ASSERT_INT(backlog.n_before, <, SHORT);
	WORLD_UNTIL(world, n_over(&backlog) == 1 + SHORT);
}
