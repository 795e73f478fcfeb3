/*
 * Jobs that go on without a rank: who is in a round, what every rank is told, and how newcomers get
 * in.
 */
#include "agent/round/round.h"
#include "proto/ledger.h"
#include "world.h"
#include <stdio.h>

#define N     3000 /* elements: several parts */
#define RANKS 6

static unsigned n_compared; /* names */

int __real_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b);
int __wrap_strcmp(const char *a, const char *b)
{
	n_compared++;
	return __real_strcmp(a, b);
}

struct scene {
	struct world *world;
	struct declared *tensor;
	struct asked asked[RANKS];
	float input[RANKS][N], output[RANKS][RANKS * N];
};

static struct scene *scene_new(const struct world_options *options)
{
	struct scene *scene = calloc(1, sizeof(*scene));

	ASSERT_TRUE(scene);
	scene->world = world_new(options);
	world_form(scene->world);
	scene->tensor = world_declare(scene->world, "grad", DTYPE_FLOAT32, N);
	for (uint32_t i = 0; i < RANKS; i++)
		for (unsigned j = 0; j < N; j++)
			scene->input[i][j] = (float)((1 << i) * 100 + j);
	return scene;
}

static void scene_freep(struct scene **scene)
{
	world_free((*scene)->world);
	free(*scene);
}

static struct scene *four(uint32_t min_ranks)
{
	return scene_new(&(struct world_options){ .n_nodes = 1,
						  .n_local = 4,
						  .no_servers = true,
						  .min_ranks = min_ranks,
						  .max_ranks = RANKS });
}

static struct asked *ask(struct scene *scene, uint32_t rank, unsigned reduction)
{
	struct asked *asked = &scene->asked[rank];

	*asked = asked_of(OPERATION_PUSH_PULL, reduction, scene->input[rank], N,
			  scene->output[rank], N);
	asked->base.membership = 1;
	memset(scene->output[rank], 0xff, sizeof(scene->output[rank]));
	return asked;
}

static void submit(struct scene *scene, uint32_t rank, uint64_t round)
{
	asked_submit(&scene->asked[rank], &scene->tensor[rank], round);
}

static void die(struct scene *scene, uint32_t rank)
{
	agent_abandon(&scene->world->ranks[rank].member, "died");
}

/* The sum over these ranks, by hand: small integers, so in any order. */
static float sum_of(const struct scene *scene, unsigned mask, unsigned j)
{
	float sum = 0;

	for (uint32_t i = 0; i < RANKS; i++)
		sum += mask >> i & 1 ? scene->input[i][j] : 0;
	return sum;
}

/* The outcome that each of these ranks was told, and the sum, or average, over those who came. */
static void expect(struct scene *scene, unsigned told, unsigned came, bool average,
		   uint32_t membership)
{
	uint32_t size = (uint32_t)__builtin_popcount(told), next = 0;

	for (uint32_t i = 0; i < RANKS; i++) {
		const struct agent_outcome *outcome = &scene->asked[i].base.outcome;
		uint32_t n_came = (uint32_t)__builtin_popcount(came);

		if (!(told >> i & 1))
			continue;
		WORLD_UNTIL(scene->world, scene->asked[i].done);
		ASSERT_STR(scene->asked[i].failure.text, "");
		for (unsigned j = 0; j < N; j++)
			ASSERT_TRUE(scene->output[i][j] ==
				    sum_of(scene, came, j) / (float)(average ? n_came : 1));
		ASSERT_EQ(outcome->membership, membership);
		ASSERT_EQ(outcome->size, size);
		ASSERT_EQ(outcome->rank, next++);
		ASSERT_EQ(outcome->n_came, n_came);
	}
}

static void expect_failed(struct scene *scene, uint32_t rank, int status, const char *words)
{
	WORLD_UNTIL(scene->world, scene->asked[rank].done);
	ASSERT_EQ(scene->asked[rank].failure.status, status);
	ASSERT_CONTAINS(scene->asked[rank].failure.text, words);
}

TEST(a_round_ends_without_the_dead)
{
	_cleanup_(scene_freep) struct scene *scene = four(2);

	for (uint32_t i = 0; i < 4; i++) {
		(void)ask(scene, i, REDUCTION_AVERAGE);
		submit(scene, i, 1);
	}
	expect(scene, 0xf, 0xf, true, 1);

	/* Rank 1 had not come. */
	for (uint32_t i = 0; i < 4; i++) {
		(void)ask(scene, i, REDUCTION_AVERAGE);
		if (i != 1)
			submit(scene, i, 2);
	}
	ASSERT_TRUE(!scene->asked[0].done);
	die(scene, 1);
	expect(scene, 0xd, 0xd, true, 2);

	/* Rank 3 had: its contribution is wholly out, as the round had not begun. */
	(void)ask(scene, 3, REDUCTION_SUM);
	(void)ask(scene, 0, REDUCTION_SUM);
	(void)ask(scene, 2, REDUCTION_SUM);
	submit(scene, 3, 3);
	die(scene, 3);
	ASSERT_TRUE(scene->asked[3].done && scene->asked[3].failure.status == -EPIPE);
	submit(scene, 0, 3);
	submit(scene, 2, 3);
	expect(scene, 0x5, 0x5, false, 3);

	/* And so it goes on. */
	for (uint64_t round = 4; round < 20; round++) {
		(void)ask(scene, 0, REDUCTION_AVERAGE);
		(void)ask(scene, 2, REDUCTION_AVERAGE);
		submit(scene, 2, round);
		submit(scene, 0, round);
		expect(scene, 0x5, 0x5, true, 3);
	}
}

#define MANY 1000

static unsigned n_declared(const struct declared *declared)
{
	unsigned n = 0;

	for (unsigned i = 0; i < MANY; i++)
		n += declared[i].done;
	return n;
}

static void declare_many(struct declared *declared, struct rank *rank)
{
	struct failure failure;
	char name[32];

	for (unsigned i = 0; i < MANY; i++) {
		(void)snprintf(name, sizeof(name), "x%u", i);
		ASSERT_OK(declared_make(&declared[i], rank, name, DTYPE_FLOAT32, N, &failure));
	}
}

/* One that is gone was the last that all of them waited for. Each is answered, a few in each turn of the loop. */
TEST(many_tensors_go_on_without_a_rank_in_pieces)
{
	_cleanup_(freep) struct declared *declared = calloc(MANY, sizeof(*declared));
	_cleanup_(scene_freep) struct scene *scene =
		scene_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 4,
						   .no_servers = true,
						   .min_ranks = 1,
						   .max_tensors = MANY + 1 });

	ASSERT_TRUE(declared);
	die(scene, 2);
	die(scene, 3);
	declare_many(declared, &scene->world->ranks[0]);
	ASSERT_EQ(n_declared(declared), 0);
	die(scene, 1);
	ASSERT_INT(n_declared(declared), <, MANY / 8);
	WORLD_UNTIL(scene->world, n_declared(declared) == MANY);
	for (unsigned i = 0; i < MANY; i++)
		ASSERT_EQ(declared[i].failure.status, 0);
}

/* Rounds that wait for ranks may be many; what a lost server has to do with are those that move. */
TEST(a_round_that_waits_for_a_rank_does_not_move)
{
	_cleanup_(scene_freep) struct scene *scene = four(2);
	const struct agent_job *job = scene->world->ranks[0].member.job;

	for (uint32_t i = 0; i < 4; i++) {
		ASSERT_TRUE(list_empty(&job->schedule.moving));
		(void)ask(scene, i, REDUCTION_AVERAGE);
		submit(scene, i, 1);
		ASSERT_TRUE(!list_empty(&job->rounds));
	}
	ASSERT_TRUE(list_empty(&job->schedule.moving) == scene->asked[0].done);
	expect(scene, 0xf, 0xf, true, 1);
	ASSERT_TRUE(list_empty(&job->schedule.moving) && list_empty(&job->rounds));
}

/* What moves has everybody's contribution: the dead one's memory is there until it ends. */
TEST(a_round_that_moves_keeps_the_dead)
{
	_cleanup_(scene_freep) struct scene *scene = scene_new(&(struct world_options){
		.n_nodes = 1, .n_local = 4, .no_servers = true, .n_threads = 2, .min_ranks = 1 });

	for (uint32_t i = 0; i < 4; i++) {
		(void)ask(scene, i, REDUCTION_AVERAGE);
		submit(scene, i, 1);
	}
	ASSERT_TRUE(!scene->asked[0].done);
	die(scene, 2);
	WORLD_UNTIL(scene->world, scene->asked[2].done);
	expect(scene, 0xb, 0xf, true, 2);
}

TEST(too_few_are_left)
{
	_cleanup_(scene_freep) struct scene *scene = four(3);

	(void)ask(scene, 0, REDUCTION_SUM);
	submit(scene, 0, 1);
	die(scene, 1);
	ASSERT_TRUE(!scene->world->ranks[0].ended);
	die(scene, 3);
	expect_failed(scene, 0, -EPIPE,
		      "rank 3 (pid 1003) of job job died, and the job has too few ranks left");
	ASSERT_TRUE(scene->world->ranks[0].ended && scene->world->ranks[2].ended);
}

TEST(who_is_late_is_dropped_and_told)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);

	for (uint32_t i = 0; i < 4; i++) {
		ask(scene, i, REDUCTION_SUM)->base.timeout_ms = 60000;
		if (i == 0)
			scene->asked[0].base.timeout_ms = 20;
		if (i < 2)
			submit(scene, i, 1);
	}
	expect(scene, 0x3, 0x3, false, 3);
	for (uint32_t i = 2; i < 4; i++) {
		ASSERT_TRUE(scene->world->ranks[i].ended);
		ASSERT_EQ(scene->world->ranks[i].failure.status, -ESTALE);
		ASSERT_CONTAINS(scene->world->ranks[i].failure.text, "was dropped");
		ASSERT_CONTAINS(scene->world->ranks[i].failure.text, "tensor grad, round 1");
	}
}

TEST(who_leaves_is_not_missed)
{
	_cleanup_(scene_freep) struct scene *scene = four(4);

	(void)ask(scene, 3, REDUCTION_SUM);
	submit(scene, 3, 1);
	agent_leave(&scene->world->ranks[3].member);
	ASSERT_TRUE(scene->asked[3].done && scene->world->ranks[3].left);
	ASSERT_EQ(scene->asked[3].failure.status, -ECANCELED);
	for (uint32_t i = 0; i < 3; i++) {
		(void)ask(scene, i, REDUCTION_SUM);
		submit(scene, i, 1);
	}
	expect(scene, 0x7, 0x7, false, 2);
	for (uint32_t i = 0; i < 3; i++)
		agent_leave(&scene->world->ranks[i].member);
	ASSERT_TRUE(scene->world->ranks[0].left && scene->world->ranks[2].left);
}

/* A tensor that the dead one had not declared. */
TEST(the_dead_declare_nothing)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);
	struct declared declared[4], later[4];
	struct failure failure;

	for (uint32_t i = 0; i < 3; i++) {
		ASSERT_OK(declared_make(&declared[i], &scene->world->ranks[i], "late",
					DTYPE_FLOAT32, N, &failure));
		(void)ask(scene, i, REDUCTION_SUM);
		asked_submit(&scene->asked[i], &declared[i], 1);
	}
	ASSERT_TRUE(!declared[0].done);
	die(scene, 3);
	expect(scene, 0x7, 0x7, false, 2);
	/* One that nobody had. */
	for (uint32_t i = 0; i < 3; i++) {
		ASSERT_OK(declared_make(&later[i], &scene->world->ranks[i], "later", DTYPE_FLOAT32,
					N, &failure));
		(void)ask(scene, i, REDUCTION_SUM);
		asked_submit(&scene->asked[i], &later[i], 1);
	}
	expect(scene, 0x7, 0x7, false, 2);
}

static void ask_broadcast(struct scene *scene, uint32_t rank, uint32_t membership, uint32_t root,
			  bool is_root)
{
	struct asked *asked = ask(scene, rank, 0);

	asked->base.operation = OPERATION_BROADCAST;
	asked->base.root = root;
	asked->base.membership = (uint16_t)membership;
	if (!is_root)
		asked->base.input = NULL, asked->base.input_count = 0;
}

TEST(a_broadcast_comes_from_who_was_meant)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);

	die(scene, 0);
	/* Ranks 1 and 3 have not heard: to them it is rank 2 that they mean. To rank 2 it is rank 1. */
	ask_broadcast(scene, 1, 1, 2, false);
	ask_broadcast(scene, 2, 2, 1, true);
	ask_broadcast(scene, 3, 1, 2, false);
	for (uint32_t i = 1; i < 4; i++)
		submit(scene, i, 1);
	for (uint32_t i = 1; i < 4; i++) {
		WORLD_UNTIL(scene->world, scene->asked[i].done);
		ASSERT_STR(scene->asked[i].failure.text, "");
		ASSERT_EQ(memcmp(scene->output[i], scene->input[2], N * 4), 0);
	}
}

TEST(a_broadcast_needs_its_root)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);

	for (uint32_t i = 0; i < 3; i++) {
		ask_broadcast(scene, i, 1, 3, false);
		submit(scene, i, 1);
	}
	die(scene, 3);
	for (uint32_t i = 0; i < 3; i++)
		expect_failed(scene, i, -EREMCHG, "not in the job any more");
	for (uint32_t i = 0; i < 3; i++) {
		ask_broadcast(scene, i, 2, 3, false);
		submit(scene, i, 2);
	}
	for (uint32_t i = 0; i < 3; i++)
		expect_failed(scene, i, -EINVAL, "no rank 3 of 3 to broadcast from");
}

TEST(an_all_gather_has_fewer_pieces)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);

	for (unsigned in_place = 0; in_place < 2; in_place++) {
		for (uint32_t i = 0; i < 4; i++) {
			struct asked *asked = ask(scene, i, 0);

			asked->base.operation = OPERATION_ALL_GATHER;
			asked->base.output_count = 4 * N;
			if (in_place && i < 3)
				asked->base.input = scene->output[i] + (size_t)i * N;
			if (i != 1 && (in_place ? i != 3 : 1))
				submit(scene, i, 1 + in_place);
		}
		if (in_place)
			break;
		die(scene, 1);
		for (uint32_t i = 0; i < 4; i++) {
			if (i == 1)
				continue;
			WORLD_UNTIL(scene->world, scene->asked[i].done);
			ASSERT_STR(scene->asked[i].failure.text, "");
			ASSERT_EQ(scene->asked[i].base.outcome.n_came, 3);
			ASSERT_EQ(memcmp(scene->output[i], scene->input[0], N * 4), 0);
			ASSERT_EQ(memcmp(scene->output[i] + N, scene->input[2], N * 4), 0);
			ASSERT_EQ(memcmp(scene->output[i] + 2 * N, scene->input[3], N * 4), 0);
		}
	}
	die(scene, 3);
	/* The piece of rank 2 lies where there is no place for it any more. */
	expect_failed(scene, 0, -EREMCHG, "submit it again");
	expect_failed(scene, 2, -EREMCHG, "submit it again");
}

TEST(what_needs_the_layout_is_done_again)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);

	for (unsigned operation = OPERATION_REDUCE_SCATTER; operation <= OPERATION_ALL_TO_ALL;
	     operation++) {
		unsigned reduction = operation == OPERATION_REDUCE_SCATTER ? REDUCTION_SUM : 0;
		uint64_t round = operation == OPERATION_ALL_TO_ALL ? 3 : 1;
		uint32_t n = round == 1 ? 3 : 2;

		/* The last rank dies before it comes, and the others do not know. */
		for (uint32_t i = 0; i < n; i++) {
			struct asked *asked = ask(scene, i, reduction);

			asked->base.operation = operation;
			asked->base.membership = round == 1 ? 1 : 2;
			submit(scene, i, round);
		}
		die(scene, n);
		for (uint32_t i = 0; i < n; i++) {
			struct asked *asked;

			expect_failed(scene, i, -EREMCHG, "submit it again");
			ASSERT_EQ(scene->asked[i].base.outcome.size, n);
			asked = ask(scene, i, reduction);
			asked->base.operation = operation;
			asked->base.membership = round == 1 ? 2 : 3;
			submit(scene, i, round + 1);
		}
		for (uint32_t i = 0; i < n; i++) {
			unsigned each = N / n;

			WORLD_UNTIL(scene->world, scene->asked[i].done);
			ASSERT_STR(scene->asked[i].failure.text, "");
			for (unsigned j = 0; round == 1 && j < each; j++)
				ASSERT_TRUE(scene->output[i][j] == sum_of(scene, 7, i * each + j));
			for (unsigned j = 0; round == 3 && j < N; j++)
				ASSERT_TRUE(scene->output[i][j] ==
					    scene->input[j / each][i * each + j % each]);
		}
	}
}

TEST(counts_are_of_those_who_are_left)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);
	uint64_t counts[3] = { 10, 20, 30 };
	struct declared *any = world_declare(scene->world, "any", DTYPE_FLOAT32, ELEMENTS_VARIABLE);

	die(scene, 0);
	/* Three ranks, with pieces of 10, 20 and 30. */
	for (uint32_t i = 1; i < 4; i++) {
		struct asked *asked = ask(scene, i, 0);

		asked->base.operation = OPERATION_ALL_GATHER;
		asked->base.membership = 2;
		asked->base.input_count = counts[i - 1];
		asked->base.output_count = 60;
		asked->base.counts = counts;
		asked_submit(asked, &any[i], 1);
	}
	for (uint32_t i = 1; i < 4; i++) {
		WORLD_UNTIL(scene->world, scene->asked[i].done);
		ASSERT_STR(scene->asked[i].failure.text, "");
		ASSERT_EQ(memcmp(scene->output[i], scene->input[1], 10 * 4), 0);
		ASSERT_EQ(memcmp(scene->output[i] + 10, scene->input[2], 20 * 4), 0);
		ASSERT_EQ(memcmp(scene->output[i] + 30, scene->input[3], 30 * 4), 0);
	}
}

static void newcomer(struct scene *scene, uint32_t number)
{
	struct agent_join join = world_join_of(scene->world, 0);
	struct failure failure = { 0 };

	join.newcomer = true;
	join.pid = 1000 + number;
	if (world_join(scene->world, number, &join, &failure))
		test_fail(__FILE__, __LINE__, "newcomer: %s", failure.text);
}

static void expect_place(struct scene *scene, uint32_t number, uint32_t rank, uint32_t size,
			 uint32_t membership)
{
	struct agent_place place = agent_place(&scene->world->ranks[number].member);

	ASSERT_EQ(place.rank, rank);
	ASSERT_EQ(place.size, size);
	ASSERT_EQ(place.membership, membership);
}

TEST(newcomers_get_in_when_all_regroup)
{
	_cleanup_(scene_freep) struct scene *scene = four(2);
	struct world *world = scene->world;
	struct declared declared[RANKS];
	struct failure failure;

	newcomer(scene, 4);
	newcomer(scene, 5);
	die(scene, 1);
	for (uint32_t i = 0; i < 4; i++) {
		if (i == 1)
			continue;
		(void)ask(scene, i, REDUCTION_AVERAGE);
		submit(scene, i, 1);
	}
	expect(scene, 0xd, 0xd, true, 2);
	ASSERT_EQ(scene->asked[0].base.outcome.n_waiting, 2);
	ASSERT_EQ(world->ranks[4].n_joined, 0);

	agent_regroup(&world->ranks[3].member);
	agent_regroup(&world->ranks[0].member);
	ASSERT_EQ(world->ranks[0].n_joined, 1);
	agent_regroup(&world->ranks[2].member);
	expect_place(scene, 0, 0, 5, 3);
	expect_place(scene, 2, 1, 5, 3);
	expect_place(scene, 3, 2, 5, 3);
	expect_place(scene, 4, 3, 5, 3);
	expect_place(scene, 5, 4, 5, 3);
	for (uint32_t i = 0; i < RANKS; i++) {
		if (i == 1)
			continue;
		ASSERT_OK(declared_make(&declared[i], &world->ranks[i], "grad", DTYPE_FLOAT32, N,
					&failure));
		ask(scene, i, REDUCTION_SUM)->base.membership = 3;
		asked_submit(&scene->asked[i], &declared[i], 1);
	}
	expect(scene, 0x3d, 0x3d, false, 3);
}

/* How many newcomers a regrouping would let in is told with every request. */
TEST(newcomers_of_other_jobs_are_not_looked_at)
{
	_cleanup_(scene_freep) struct scene *scene = four(2);
	struct world *world = scene->world;
	const struct agent_job *job = world->ranks[0].member.job;

	ASSERT_EQ(agent_elastic_n_waiting(job), 0);
	for (uint32_t i = RANKS; i < WORLD_RANKS; i++) {
		struct agent_join join = world_join_of(world, 0);
		struct failure failure;
		char name[16];

		(void)snprintf(name, sizeof(name), "other%u", i);
		join.job = name;
		join.newcomer = true;
		ASSERT_OK(world_join(world, i, &join, &failure));
	}
	newcomer(scene, 4);
	newcomer(scene, 5);
	n_compared = 0;
	ASSERT_EQ(agent_elastic_n_waiting(job), 2);
	ASSERT_INT(n_compared, <=, 1);
	agent_abandon(&world->ranks[4].member, "died");
	ASSERT_EQ(agent_elastic_n_waiting(job), 1);
	agent_abandon(&world->ranks[5].member, "died");
	ASSERT_EQ(agent_elastic_n_waiting(job), 0);
}

/* Its rank and size count in the membership that it says: roots are understood by that. */
TEST(a_place_is_one_of_the_run_also_when_ranks_are_lost)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);

	expect_place(scene, 2, 2, 4, 1);
	die(scene, 0);
	expect_place(scene, 2, 2, 4, 1);
}

TEST(no_more_newcomers_than_the_job_takes)
{
	_cleanup_(scene_freep) struct scene *scene = scene_new(&(struct world_options){
		.n_nodes = 1, .n_local = 4, .no_servers = true, .min_ranks = 1, .max_ranks = 5 });

	newcomer(scene, 4);
	newcomer(scene, 5);
	for (uint32_t i = 0; i < 4; i++)
		agent_regroup(&scene->world->ranks[i].member);
	expect_place(scene, 4, 4, 5, 2);
	ASSERT_TRUE(!scene->world->ranks[5].joined);
	/* A place is free. */
	die(scene, 0);
	for (uint32_t i = 1; i < 5; i++)
		agent_regroup(&scene->world->ranks[i].member);
	expect_place(scene, 1, 0, 5, 4);
	expect_place(scene, 5, 4, 5, 4);
	/* One that gives up, and one that dies. */
	newcomer(scene, 0);
	agent_leave(&scene->world->ranks[0].member);
	ASSERT_TRUE(scene->world->ranks[0].left);
	newcomer(scene, 0);
	die(scene, 0);
}

static unsigned n_void(const struct declared *declared)
{
	unsigned n = 0;

	for (unsigned i = 0; i < MANY; i++)
		n += agent_is_void(&declared[i].base);
	return n;
}

/* However many ranks have declared them; one dies and another leaves meanwhile. */
TEST(what_many_have_declared_is_void_in_pieces_before_they_regroup)
{
	_cleanup_(freep) struct declared *declared = calloc(2 * MANY, sizeof(*declared));
	_cleanup_(scene_freep) struct scene *scene =
		scene_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 4,
						   .no_servers = true,
						   .min_ranks = 1,
						   .max_tensors = MANY + 1 });
	struct world *world = scene->world;

	ASSERT_TRUE(declared);
	for (unsigned i = 0; i < 2; i++)
		declare_many(declared + i * MANY, &world->ranks[i]);
	for (uint32_t i = 0; i < 4; i++)
		agent_regroup(&world->ranks[i].member);
	ASSERT_INT(n_void(declared), <, MANY / 2);
	ASSERT_EQ(world->ranks[0].n_joined, 1);
	die(scene, 3);
	WORLD_UNTIL(world, world->ranks[0].n_joined == 2);
	ASSERT_EQ(n_void(declared) + n_void(declared + MANY), 2 * MANY);
	expect_place(scene, 2, 2, 3, 3);

	declare_many(declared, &world->ranks[0]);
	agent_leave(&world->ranks[0].member);
	ASSERT_INT(n_void(declared), <, MANY / 2);
	WORLD_UNTIL(world, world->ranks[0].left);
	ASSERT_EQ(n_void(declared), MANY);
}

/* The next daemon is not to wait for a rank that has left; and nothing goes on of what waits for ranks that regroup. */
TEST(what_is_void_in_pieces_ends_with_the_daemon)
{
	for (unsigned way = 0; way < 2; way++) {
		_cleanup_(freep) struct declared *declared = calloc(MANY, sizeof(*declared));
		_cleanup_(world_freep) struct world *world =
			world_new(&(struct world_options){ .n_nodes = 1,
							   .n_local = 2,
							   .distributed = true,
							   .resume = true,
							   .min_ranks = 1,
							   .max_tensors = MANY + 1 });

		ASSERT_TRUE(declared);
		world_form(world);
		declare_many(declared, &world->ranks[0]);
		if (way)
			agent_leave(&world->ranks[0].member);
		for (uint32_t i = 0; !way && i < 2; i++)
			agent_regroup(&world->ranks[i].member);
		ASSERT_INT(n_void(declared), <, MANY / 2);
		ASSERT_TRUE(!world->ranks[0].left);
		world_restart(world, 0);
		ASSERT_EQ(world->ranks[0].left, way);
		for (unsigned i = 0; i < 100; i++)
			ASSERT_OK(loop_turn(world->loop, 0));
		ASSERT_TRUE(way || n_void(declared) < MANY / 2);
	}
}

TEST(who_dies_is_not_waited_for_in_a_regrouping)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);
	struct world *world = scene->world;

	for (uint32_t i = 0; i < 3; i++)
		agent_regroup(&world->ranks[i].member);
	die(scene, 0);
	ASSERT_EQ(world->ranks[1].n_joined, 1);
	die(scene, 3);
	expect_place(scene, 1, 0, 2, 4);
	expect_place(scene, 2, 1, 2, 4);
}

TEST(who_does_not_regroup_is_dropped)
{
	_cleanup_(scene_freep) struct scene *scene =
		scene_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 4,
						   .no_servers = true,
						   .min_ranks = 1,
						   .request_timeout_ms = 30 });
	struct world *world = scene->world;

	for (uint32_t i = 0; i < 3; i++)
		agent_regroup(&world->ranks[i].member);
	WORLD_UNTIL(world, world->ranks[0].n_joined == 2);
	expect_place(scene, 2, 2, 3, 3);
	ASSERT_TRUE(world->ranks[3].ended);
	ASSERT_CONTAINS(world->ranks[3].failure.text, "did not regroup");
}

TEST(a_regrouping_is_refused)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);
	struct rank *rank = &scene->world->ranks[0];

	(void)ask(scene, 0, REDUCTION_SUM);
	submit(scene, 0, 1);
	agent_regroup(&rank->member);
	ASSERT_TRUE(rank->refused);
	ASSERT_EQ(rank->failure.status, -EBUSY);
	for (uint32_t i = 1; i < 4; i++) {
		(void)ask(scene, i, REDUCTION_SUM);
		submit(scene, i, 1);
	}
	expect(scene, 0xf, 0xf, false, 1);
}

TEST(nobody_lets_a_newcomer_in)
{
	_cleanup_(scene_freep) struct scene *scene = four(1);
	struct agent_join join = world_join_of(scene->world, 0);
	struct failure failure = { 0 };

	join.newcomer = true;
	join.timeout_ms = 10;
	ASSERT_OK(world_join(scene->world, 4, &join, &failure));
	WORLD_UNTIL(scene->world, scene->world->ranks[4].ended);
	ASSERT_EQ(scene->world->ranks[4].failure.status, -ETIMEDOUT);
	join.elastic = false;
	ASSERT_EQ(world_join(scene->world, 4, &join, &failure), -EINVAL);
}

TEST(newcomers_are_told_of_the_end)
{
	for (unsigned dies = 0; dies < 2; dies++) {
		_cleanup_(scene_freep) struct scene *scene = four(4);

		newcomer(scene, 4);
		for (uint32_t i = 0; i < 4; i++) {
			if (dies)
				die(scene, i);
			else
				agent_leave(&scene->world->ranks[i].member);
			ASSERT_EQ(scene->world->ranks[4].ended, dies || i == 3);
		}
		ASSERT_EQ(scene->world->ranks[4].failure.status, -ECANCELED);
		ASSERT_CONTAINS(scene->world->ranks[4].failure.text, "has ended");
	}
}

/* Over nodes a push_pull is done as a whole, which takes a place for each of its parts. */
TEST(a_push_pull_of_too_many_parts_is_refused)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 1, .resume = true, .min_ranks = 1 });
	uint64_t n = (uint64_t)(LEDGER_RESULTS_MAX + 1) * 1024;
	/* Nobody touches it. */
	_cleanup_(freep) float *memory = malloc(n * sizeof(float));
	struct declared *large, *small;
	static float few[2][N];
	struct asked asked[2];

	ASSERT_TRUE(memory);
	world_form(world);
	large = world_declare(world, "large", DTYPE_FLOAT32, n);
	small = world_declare(world, "small", DTYPE_FLOAT32, N);
	for (uint32_t i = 0; i < 2; i++) {
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, memory, n, memory, n);
		asked[i].base.membership = 1;
		asked_submit(&asked[i], &large[i], 1);
	}
	for (uint32_t i = 0; i < 2; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_EQ(asked[i].failure.status, -EMSGSIZE);
		ASSERT_CONTAINS(asked[i].failure.text, "65537 parts of 4096 bytes");
		ASSERT_CONTAINS(asked[i].failure.text, "part_size");
	}
	for (uint32_t i = 0; i < 2; i++) {
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, few[i], N, few[i], N);
		asked[i].base.membership = 1;
		asked_submit(&asked[i], &small[i], 1);
	}
	for (uint32_t i = 0; i < 2; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
}

/* Any order of deaths and submissions: survivors agree on who came, and on every bit. */
TEST(any_order_of_deaths)
{
	uint32_t seed = 7;

	for (unsigned run = 0; run < 40; run++) {
		_cleanup_(scene_freep) struct scene *scene =
			scene_new(&(struct world_options){ .n_nodes = 1,
							   .n_local = 6,
							   .no_servers = true,
							   .n_threads = run % 2,
							   .min_ranks = 1 });
		unsigned alive = 0x3f;

		for (uint64_t round = 1; round < 6; round++) {
			const struct agent_outcome *first = NULL;
			unsigned came = alive;

			for (uint32_t i = 0; i < RANKS; i++) {
				if (!(alive >> i & 1))
					continue;
				(void)ask(scene, i, REDUCTION_SUM);
				submit(scene, i, round);
				seed = seed * 1103515245 + 12345;
				if (__builtin_popcount(alive) > 1 && seed >> 16 & 1) {
					uint32_t victim = seed >> 20 & 7;

					if (victim < RANKS && alive >> victim & 1 && victim != i) {
						die(scene, victim);
						alive &= ~(1u << victim);
					}
				}
			}
			for (uint32_t i = 0; i < RANKS; i++) {
				if (!(alive >> i & 1))
					continue;
				WORLD_UNTIL(scene->world, scene->asked[i].done);
				ASSERT_STR(scene->asked[i].failure.text, "");
				if (!first)
					first = &scene->asked[i].base.outcome;
				ASSERT_EQ(first->n_came, scene->asked[i].base.outcome.n_came);
				/* In or out as a whole: some set between those at the beginning and those at the end. */
				if (first->n_came == (uint32_t)__builtin_popcount(alive))
					came = alive;
				for (unsigned j = 0; j < N && came == alive; j++)
					ASSERT_TRUE(scene->output[i][j] == sum_of(scene, came, j));
			}
		}
	}
}
