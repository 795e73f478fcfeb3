/*
 * What goes wrong, with one node and with several: who is told, in which words, and that the next
 * round or job works.
 */
#include "agent/job/job.h"
#include "world.h"
#include <stdio.h>

#define N 3000 /* elements: several parts */

struct worlds {
	const char *name;
	struct world_options options;
};

static const struct worlds worlds[] = {
	{ "one node", { .n_nodes = 1, .n_local = 4, .no_servers = true } },
	{ "one node, own server", { .n_nodes = 1, .n_local = 4, .distributed = true } },
	{ "two nodes", { .n_nodes = 2, .n_local = 2, .n_threads = 1 } },
	{ "four nodes", { .n_nodes = 4, .n_local = 1, .n_data_threads = 1 } },
};

/* A job of four ranks, with memory for one request of each. */
struct scene {
	struct world *world;
	struct declared *tensor;
	struct declared ours[4], theirs[4]; /* of tensors that not all declare */
	struct asked asked[4];
	float input[4][N], output[4][N];
};

static struct scene *scene_new(const struct world_options *options, uint64_t request_timeout_ms)
{
	struct scene *scene = calloc(1, sizeof(*scene));
	struct world_options chosen = *options;

	ASSERT_TRUE(scene);
	chosen.request_timeout_ms = request_timeout_ms;
	scene->world = world_new(&chosen);
	ASSERT_EQ(scene->world->size, 4);
	world_form(scene->world);
	scene->tensor = world_declare(scene->world, "grad", DTYPE_FLOAT32, N);
	return scene;
}

static struct scene *scene_free(struct scene *scene)
{
	if (!scene)
		return NULL;
	world_free(scene->world);
	free(scene);
	return NULL;
}

/* The body is run in each world, in a job with this request timeout. */
#define FOR_EACH_WORLD_IN(scene, timeout_ms)                                                 \
	for (size_t world_ = 0; world_ < ARRAY_SIZE(worlds); world_++)                       \
		for (struct scene *scene = (fprintf(stderr, "-- %s\n", worlds[world_].name), \
					    scene_new(&worlds[world_].options, timeout_ms)); \
		     scene; scene = scene_free(scene))
#define FOR_EACH_WORLD(scene) FOR_EACH_WORLD_IN(scene, 60000)

static struct asked *ask(struct scene *scene, uint32_t rank)
{
	struct asked *asked = &scene->asked[rank];

	*asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->input[rank], N,
			  scene->output[rank], N);
	return asked;
}

static void submit(struct scene *scene, uint32_t rank, uint64_t round)
{
	asked_submit(&scene->asked[rank], &scene->tensor[rank], round);
}

static void expect_failed(struct scene *scene, uint32_t rank, int status, const char *words)
{
	WORLD_UNTIL(scene->world, scene->asked[rank].done);
	if (scene->asked[rank].failure.status != status ||
	    !strstr(scene->asked[rank].failure.text, words))
		test_fail(__FILE__, __LINE__, "rank %u: %d \"%s\", not %d \"%s\"", rank,
			  scene->asked[rank].failure.status, scene->asked[rank].failure.text,
			  status, words);
}

static void expect_all_failed(struct scene *scene, int status, const char *words)
{
	for (uint32_t i = 0; i < 4; i++)
		expect_failed(scene, i, status, words);
}

static void expect_sum(struct scene *scene, uint64_t round)
{
	for (uint32_t i = 0; i < 4; i++) {
		/* More patient than a job that is there to lose patience. */
		ask(scene, i)->base.timeout_ms = 60000;
		for (unsigned j = 0; j < N; j++)
			scene->input[i][j] = (float)(i * round + j);
		memset(scene->output[i], 0xff, sizeof(scene->output[i]));
		submit(scene, i, round);
	}
	for (uint32_t i = 0; i < 4; i++) {
		WORLD_UNTIL(scene->world, scene->asked[i].done);
		ASSERT_STR(scene->asked[i].failure.text, "");
		for (unsigned j = 0; j < N; j++)
			ASSERT_TRUE(scene->output[i][j] == (float)(6 * round + 4 * j));
	}
}

/* -- Ranks wait for one another ------------------------------------------------------------------------------------- */

/* Rank 2 waits for a tensor to which the others have not come, and they for one to which it has not. */
static void block(struct scene *scene, struct declared *other, uint32_t rank, uint64_t round)
{
	(void)ask(scene, rank);
	asked_submit(&scene->asked[rank], &(rank == 2 ? other : scene->tensor)[rank], round);
	agent_blocked(&scene->asked[rank].base, false);
}

/* A rank's first round of a tensor, beside what it is asked in the scene. */
static void submit_beside(struct scene *scene, struct asked *asked, struct declared *tensor,
			  uint32_t rank)
{
	*asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->input[rank], N,
			  scene->output[rank], N);
	asked_submit(asked, &tensor[rank], 1);
}

/* Said again while it is so, as by libbps_client. */
static void stay_blocked(struct scene *scene)
{
	for (uint32_t i = 0; i < 4;) {
		if (scene->asked[i].done) {
			i++;
			continue;
		}
		ASSERT_OK(loop_turn(scene->world->loop, 20));
		for (uint32_t j = i; j < 4; j++)
			if (!scene->asked[j].done)
				agent_blocked(&scene->asked[j].base, false);
	}
}

TEST(ranks_that_wait_for_one_another_hear_of_it)
{
	static const uint32_t orders[][4] = { { 0, 1, 2, 3 }, { 2, 3, 1, 0 }, { 3, 0, 1, 2 } };

	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);
		uint64_t round = 1;

		for (size_t i = 0; i < ARRAY_SIZE(orders); i++) {
			for (size_t j = 0; j < 4; j++)
				block(scene, other, orders[i][j], round);
			stay_blocked(scene);
			expect_all_failed(scene, -EDEADLK, " in tensor ");
			expect_all_failed(scene, -EDEADLK, "rank 2");
			expect_failed(scene, 2, -EDEADLK, "tensor other, round ");
			expect_failed(scene, 0, -EDEADLK, "tensor grad, round ");
			/* Whoever comes later hears so, too. */
			for (uint32_t j = 0; j < 4; j++) {
				(void)ask(scene, j);
				asked_submit(&scene->asked[j], &(j == 2 ? scene->tensor : other)[j],
					     round);
			}
			expect_all_failed(scene, -EDEADLK, " in tensor ");
			expect_sum(scene, ++round);
			for (uint32_t j = 0; j < 4; j++) {
				(void)ask(scene, j);
				asked_submit(&scene->asked[j], &other[j], round);
			}
			for (uint32_t j = 0; j < 4; j++)
				expect_failed(scene, j, 0, "");
			round++;
		}
	}
}

/* Declared by those alone that use it, so that servers have no number for it. */
static void declare_alone(struct scene *scene, struct declared tensors[4], uint32_t rank,
			  const char *name)
{
	struct failure failure;

	ASSERT_OK(declared_make(&tensors[rank], &scene->world->ranks[rank], name, DTYPE_FLOAT32, N,
				&failure));
}

/* What is under way comes to its end, and nothing else is asked of the loop. */
static void come_to_rest(struct scene *scene)
{
	for (unsigned i = 0; i < 50; i++)
		ASSERT_OK(loop_turn(scene->world->loop, 1));
}

/* Every node has heard of two ranks that wait for one another. */
static bool all_know(const struct scene *scene)
{
	for (unsigned i = 0; i < scene->world->options.n_nodes; i++) {
		const struct agent_job *job =
			list_first(&scene->world->nodes[i].agent->jobs, struct agent_job, link);

		if (job->distributed && !job->deadlock.n_known)
			return false;
	}
	return true;
}

TEST(ranks_that_wait_for_one_another_in_tensors_that_not_all_declare)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *ours = scene->ours, *theirs = scene->theirs, *grad = scene->tensor;

		for (uint32_t i = 0; i < 3; i++)
			declare_alone(scene, i == 2 ? theirs : ours, i, i == 2 ? "theirs" : "ours");
		scene->tensor = ours;
		for (uint32_t i = 0; i < 3; i++)
			block(scene, theirs, i, 1);
		scene->asked[3].done = true; /* it does nothing yet */
		stay_blocked(scene);
		for (uint32_t i = 0; i < 3; i++)
			expect_failed(scene, i, -EDEADLK, "rank 2");
		WORLD_UNTIL(scene->world, all_know(scene));
		come_to_rest(scene);
		/* Rank 3 comes later, when the others have gone on and wait for it in something else. */
		scene->tensor = grad;
		for (uint32_t i = 0; i < 3; i++) {
			(void)ask(scene, i);
			submit(scene, i, 1);
			agent_blocked(&scene->asked[i].base, false);
		}
		declare_alone(scene, ours, 3, "ours");
		(void)ask(scene, 3);
		asked_submit(&scene->asked[3], &ours[3], 1);
		while (!scene->asked[3].done) {
			agent_blocked(&scene->asked[3].base, false);
			ASSERT_OK(loop_turn(scene->world->loop, 20));
		}
		expect_failed(scene, 3, -EDEADLK, "rank 2");
		(void)ask(scene, 3);
		submit(scene, 3, 1);
		for (uint32_t i = 0; i < 4; i++)
			expect_failed(scene, i, 0, "");
	}
}

TEST(nobody_waits_for_who_has_come)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);
		struct asked early[4];

		/* Rank 2 waits for what rank 0 has submitted, and the others will: then it comes to what they wait for. */
		block(scene, other, 2, 1);
		for (uint32_t i = 0; i < 4; i++) {
			if (i == 2)
				continue;
			submit_beside(scene, &early[i], other, i);
			block(scene, other, i, 1);
			come_to_rest(scene);
		}
		expect_failed(scene, 2, 0, "");
		(void)ask(scene, 2);
		submit(scene, 2, 1);
		for (uint32_t i = 0; i < 4; i++) {
			expect_failed(scene, i, 0, "");
			WORLD_UNTIL(scene->world, i == 2 || early[i].done);
		}
	}
}

TEST(who_waits_for_a_time_of_its_own_is_not_blocked)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);

		for (uint32_t i = 0; i < 4; i++) {
			ask(scene, i)->base.timeout_ms = i == 2 ? 200 : 60000;
			asked_submit(&scene->asked[i], &(i == 2 ? other : scene->tensor)[i], 1);
			agent_blocked(&scene->asked[i].base, false);
		}
		expect_failed(scene, 2, -ETIME, "within 200 ms");
		(void)ask(scene, 2);
		submit(scene, 2, 1);
		for (uint32_t i = 0; i < 4; i++)
			expect_failed(scene, i, 0, "");
	}
}

TEST(who_goes_on_is_not_blocked)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);
		struct asked late[4];

		block(scene, other, 2, 1);
		agent_blocked(&scene->asked[2].base, true);
		for (uint32_t i = 0; i < 4; i++)
			if (i != 2)
				block(scene, other, i, 1);
		come_to_rest(scene);
		submit_beside(scene, &late[2], scene->tensor, 2);
		for (uint32_t i = 0; i < 4; i++)
			if (i != 2)
				expect_failed(scene, i, 0, "");
		for (uint32_t i = 0; i < 4; i++)
			if (i != 2)
				submit_beside(scene, &late[i], other, i);
		expect_failed(scene, 2, 0, "");
		for (uint32_t i = 0; i < 4; i++)
			WORLD_UNTIL(scene->world, late[i].done);
	}
}

/* -- Ranks disagree about a round ----------------------------------------------------------------------------------- */

TEST(operations_differ)
{
	FOR_EACH_WORLD(scene)
	{
		expect_sum(scene, 1);
		for (uint32_t i = 0; i < 4; i++)
			(void)ask(scene, i);
		scene->asked[2].base.operation = OPERATION_BROADCAST;
		scene->asked[2].base.reduction = 0;
		for (uint32_t i = 0; i < 4; i++)
			submit(scene, i, 2);
		expect_all_failed(scene, -EINVAL, "broadcast");
		expect_all_failed(scene, -EINVAL, "push_pull");
		expect_sum(scene, 3);
	}
}

TEST(reductions_differ)
{
	FOR_EACH_WORLD(scene)
	{
		for (uint32_t i = 0; i < 4; i++)
			(void)ask(scene, i);
		scene->asked[3].base.reduction = REDUCTION_MAX;
		for (uint32_t i = 0; i < 4; i++)
			submit(scene, i, 1);
		expect_all_failed(scene, -EINVAL, "max");
		expect_sum(scene, 2);
	}
}

TEST(roots_differ)
{
	FOR_EACH_WORLD(scene)
	{
		for (uint32_t i = 0; i < 4; i++) {
			ask(scene, i)->base.operation = OPERATION_BROADCAST;
			scene->asked[i].base.reduction = 0;
			scene->asked[i].base.root = i == 1 ? 3 : 0;
			submit(scene, i, 1);
		}
		expect_all_failed(scene, -EINVAL, "3");
		expect_sum(scene, 2);
	}
}

TEST(one_request_is_wrong_in_itself)
{
	static const uint64_t counts[] = { N, N, N, UINT64_MAX - 3 * N + 1 };
	struct failure invalid;

	(void)failure_set(&invalid, -EINVAL, "the door did not like it");
	FOR_EACH_WORLD(scene)
	{
		for (uint32_t i = 0; i < 4; i++)
			(void)ask(scene, i);
		scene->asked[1].base.output_count = N - 1;
		for (uint32_t i = 0; i < 4; i++)
			submit(scene, i, 1);
		expect_all_failed(scene, -EINVAL, "rank 1: the output has room for 2999 elements");

		for (uint32_t i = 0; i < 4; i++) {
			ask(scene, i)->base.round = 2;
			agent_submit(&scene->tensor[i].base, &scene->asked[i].base,
				     i == 3 ? &invalid : NULL, clock_now_ns());
		}
		expect_all_failed(scene, -EINVAL,
				  "tensor grad, round 2: rank 3: the door did not like it");

		for (uint32_t i = 0; i < 4; i++)
			(void)ask(scene, i);
		scene->asked[2].base.output = scene->input[2] + 1;
		for (uint32_t i = 0; i < 4; i++)
			submit(scene, i, 3);
		expect_all_failed(scene, -EINVAL, "rank 2: input and output of push_pull overlap");

		for (uint32_t i = 0; i < 4; i++) {
			scene->asked[i] = asked_of(OPERATION_ALL_GATHER, 0, scene->input[i], N,
						   scene->output[i], N);
			scene->asked[i].base.counts = counts;
			submit(scene, i, 4);
		}
		expect_all_failed(scene, -EINVAL, "the counts overflow");
		expect_sum(scene, 5);
	}
}

TEST(inputs_that_are_not_widened)
{
	FOR_EACH_WORLD(scene)
	{
		for (uint32_t i = 0; i < 4; i++)
			ask(scene, i)->base.input_dtype = i == 1 ? DTYPE_FLOAT64 : 0;
		for (uint32_t i = 0; i < 4; i++)
			submit(scene, i, 1);
		expect_all_failed(scene, -EINVAL,
				  "rank 1: an input of float64 for a tensor of float32: only "
				  "float16 and bfloat16 are widened");

		for (uint32_t i = 0; i < 4; i++)
			ask(scene, i)->base.input_dtype = i == 2 ? UINT8_MAX : 0;
		for (uint32_t i = 0; i < 4; i++)
			submit(scene, i, 2);
		expect_all_failed(scene, -EINVAL, "rank 2: an input of invalid");

		for (uint32_t i = 0; i < 4; i++) {
			scene->asked[i] = asked_of(OPERATION_BROADCAST, 0, scene->input[i], N,
						   scene->output[i], N);
			scene->asked[i].base.input_dtype = i ? 0 : DTYPE_BFLOAT16;
			submit(scene, i, 3);
		}
		expect_all_failed(scene, -EINVAL,
				  "rank 0: broadcast takes no input of another type");

		/* Wider results would overtake what is still to be read. */
		for (uint32_t i = 0; i < 4; i++)
			(void)ask(scene, i);
		scene->asked[3].base.input_dtype = DTYPE_BFLOAT16;
		scene->asked[3].base.output = scene->input[3];
		for (uint32_t i = 0; i < 4; i++)
			submit(scene, i, 4);
		expect_all_failed(scene, -EINVAL, "rank 3: input and output of push_pull overlap");
		expect_sum(scene, 5);
	}
}

/* Blocks of a variable tensor: what differs is seen by whoever meets both. */
TEST(sizes_differ)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *tensor =
			world_declare(scene->world, "variable", DTYPE_FLOAT32, ELEMENTS_VARIABLE);

		for (uint32_t i = 0; i < 4; i++) {
			scene->asked[i] =
				asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->input[i],
					 i == 2 ? N : N - 1, scene->output[i], N);
			asked_submit(&scene->asked[i], &tensor[i], 1);
		}
		/* 3000 and 2999 elements, or as many bytes. */
		expect_all_failed(scene, -EINVAL,
				  scene->world->options.n_local == 1 ? "11996" : "2999");
		expect_sum(scene, 1);
	}
}

/* A round that failed before its tensor was known by number to the other nodes. */
TEST(failed_before_it_was_declared)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *tensor = world_declare(scene->world, "new", DTYPE_FLOAT32, N);

		for (uint32_t i = 0; i < 4; i++) {
			ask(scene, i)->base.operation = i == 2 ? 99 : OPERATION_PUSH_PULL;
			asked_submit(&scene->asked[i], &tensor[i], 1);
		}
		expect_all_failed(scene, -EINVAL, "rank 2: no operation 99");
		scene->tensor = tensor;
		expect_sum(scene, 2);
	}
}

/* -- Operations that all ranks submit in one order --------------------------------------------- */

static void submit_as(struct scene *scene, uint32_t rank, uint64_t ordinal, struct declared *tensor,
		      uint64_t round)
{
	ask(scene, rank)->base.ordinal = ordinal;
	asked_submit(&scene->asked[rank], &tensor[rank], round);
}

static void expect_well(struct scene *scene, uint32_t rank)
{
	WORLD_UNTIL(scene->world, scene->asked[rank].done);
	ASSERT_STR(scene->asked[rank].failure.text, "");
}

/* Nobody waits for anybody after it. */
static void expect_all_well(struct scene *scene, uint64_t ordinal, struct declared *tensor,
			    uint64_t round)
{
	for (uint32_t i = 0; i < 4; i++)
		submit_as(scene, i, ordinal, tensor, round);
	for (uint32_t i = 0; i < 4; i++)
		expect_well(scene, i);
}

TEST(ordinals_differ)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_INT64, N);
		struct declared *next = world_declare(scene->world, "next", DTYPE_FLOAT32, N);

		expect_all_well(scene, 1, scene->tensor, 1);
		for (uint32_t i = 0; i < 4; i++)
			submit_as(scene, i, 2, i == 2 ? other : scene->tensor, i == 2 ? 1 : 2);
		expect_all_failed(scene, -EILSEQ, "as number 2 rank ");
		expect_all_failed(scene, -EILSEQ, "rank 2 ");
		expect_all_failed(scene, -EILSEQ, "other, round 1");
		expect_all_failed(scene, -EILSEQ, "grad, round 2");
		expect_all_well(scene, 3, next, 1);
	}
}

/* Whoever waits is told that ranks differ, and from where on all are to be in one order again. */
TEST(ordinals_differ_where_ranks_are_blocked)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);

		for (uint32_t i = 0; i < 4; i++) {
			submit_as(scene, i, 1, i == 2 ? other : scene->tensor, 1);
			if (!scene->asked[i].done)
				agent_blocked(&scene->asked[i].base, false);
		}
		stay_blocked(scene);
		expect_all_failed(scene, -EILSEQ, "as number 1 rank ");
	}
}

/* Of one tensor, the rounds: a rank has done an operation more. */
TEST(rounds_of_ordinals_differ)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *next = world_declare(scene->world, "next", DTYPE_FLOAT32, N);
		struct asked before = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->input[3],
					       N, scene->output[3], N);

		asked_submit(&before, &scene->tensor[3], 1);
		for (uint32_t i = 0; i < 4; i++)
			submit_as(scene, i, 1, scene->tensor, i == 3 ? 2 : 1);
		for (uint32_t i = 0; i < 4; i++) {
			WORLD_UNTIL(scene->world, scene->asked[i].done);
			/*
			 * Round 1 has all ranks, wherever it was not given up before they had come.
			 */
			if (i == 3)
				expect_failed(scene, i, -EILSEQ, "grad, round 2");
		}
		WORLD_UNTIL(scene->world, before.done);
		expect_all_well(scene, 2, next, 1);
	}
}

/*
 * The tensor of some is one that others never declare: servers have no number for it, and cannot
 * tell.
 */
TEST(ordinals_differ_in_tensors_that_not_all_declare)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared ours[4], theirs[4];
		struct failure failure;

		for (uint32_t i = 0; i < 4; i++) {
			struct declared *mine = i == 2 ? theirs : ours;

			ASSERT_OK(declared_make(&mine[i], &scene->world->ranks[i],
						i == 2 ? "theirs" : "ours", DTYPE_FLOAT32, N,
						&failure));
			submit_as(scene, i, 1, mine, 1);
		}
		expect_all_failed(scene, -EILSEQ, "theirs, round 1");
		expect_all_failed(scene, -EILSEQ, "ours, round 1");
		expect_all_well(scene, 2, scene->tensor, 1);
		/* Void before they go out of scope. */
		for (uint32_t i = 0; i < 4; i++)
			agent_abandon(&scene->world->ranks[i].member, "died");
	}
}

/*
 * Who comes later is told when it comes; and whoever submits a third operation, both of the others
 * and its own.
 */
TEST(ordinals_differ_from_what_is_over)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);
		struct declared *third = world_declare(scene->world, "third", DTYPE_FLOAT32, N);

		submit_as(scene, 0, 1, scene->tensor, 1);
		submit_as(scene, 1, 1, other, 1);
		expect_failed(scene, 0, -EILSEQ, "tensor grad, round 1: ranks submit");
		expect_failed(scene, 1, -EILSEQ, "tensor other, round 1: ranks submit");
		submit_as(scene, 2, 1, third, 1);
		submit_as(scene, 3, 1, scene->tensor, 1);
		expect_failed(scene, 2, -EILSEQ, "tensor third, round 1: ranks submit");
		expect_failed(scene, 2, -EILSEQ, "rank 0 submitted grad");
		expect_failed(scene, 2, -EILSEQ, "rank 1 other");
		expect_failed(scene, 3, -EILSEQ, "rank 1 other");
	}
}

/* The operation that differs is the last that its round waited for, which does not begin then. */
TEST(ordinals_differ_in_the_last_that_comes)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *more = world_declare(scene->world, "more", DTYPE_FLOAT32, N);
		struct declared *next = world_declare(scene->world, "next", DTYPE_FLOAT32, N);
		struct asked extra = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->input[2],
					      N, scene->output[2], N);

		/* On nodes of their own ranks go on until they are told. */
		if (scene->world->options.n_local == 1)
			continue;
		extra.base.ordinal = 1;
		asked_submit(&extra, &more[2], 1);
		/* On one node a barrier would be over at once. */
		for (uint32_t i = 4; i--;) {
			scene->asked[i] = asked_of(OPERATION_BARRIER, 0, NULL, 0, NULL, 0);
			scene->asked[i].base.ordinal = !i;
			submit(scene, i, 1);
		}
		expect_all_failed(scene, -EILSEQ, "rank 2 more, round 1");
		WORLD_UNTIL(scene->world, extra.done);
		ASSERT_CONTAINS(extra.failure.text, "rank 0 submitted grad, round 1");
		expect_all_well(scene, 2, next, 1);
	}
}

/*
 * The operation that the others have submitted has ended well, as the rank has submitted it, too,
 * only later.
 */
TEST(ordinals_differ_in_order)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *more = world_declare(scene->world, "more", DTYPE_FLOAT32, N);
		struct asked extra = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->input[2],
					      N, scene->output[2], N);

		/*
		 * Without a number: the others may come to its round before anybody sees its order.
		 */
		for (uint32_t i = 0; i < 4; i++)
			submit_as(scene, i, i == 2 ? 0 : 1, scene->tensor, 1);
		for (uint32_t i = 0; i < 4; i++)
			expect_well(scene, i);
		extra.base.ordinal = 1;
		asked_submit(&extra, &more[2], 1);
		WORLD_UNTIL(scene->world, extra.done);
		ASSERT_EQ(extra.failure.status, -EILSEQ);
		ASSERT_CONTAINS(extra.failure.text, "grad, round 1");
		ASSERT_CONTAINS(extra.failure.text, "rank 2 ");
		ASSERT_CONTAINS(extra.failure.text, "more, round 1");
		expect_all_well(scene, 2, scene->tensor, 2);
	}
}

/* A rank has left because of it: the others hear why, and not that it has left. */
TEST(ordinals_differ_and_a_rank_has_left)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);

		submit_as(scene, 0, 1, scene->tensor, 1);
		submit_as(scene, 2, 1, other, 1);
		expect_failed(scene, 0, -EILSEQ, "rank 2 other");
		expect_failed(scene, 2, -EILSEQ, "rank 2 other");
		agent_leave(&scene->world->ranks[2].member);
		WORLD_UNTIL(scene->world, scene->world->ranks[2].left);
		if (scene->world->options.n_local == 1)
			continue; /* nodes may have the job's end before */
		submit_as(scene, 0, 2, scene->tensor, 2);
		expect_failed(scene, 0, -EPIPE, "rank 2 has left");
		for (uint32_t i = 1; i < 4; i += 2)
			if (scene->world->options.n_local == 4)
				submit_as(scene, i, 1, scene->tensor, 1);
		for (uint32_t i = 1; i < 4; i += 2)
			if (scene->world->options.n_local == 4)
				expect_failed(scene, i, -EILSEQ, "rank 2 other");
	}
}

/* What has no ordinal is in no order, and neither are rows. */
TEST(without_ordinals_order_is_free)
{
	FOR_EACH_WORLD(scene)
	{
		struct declared *other = world_declare(scene->world, "other", DTYPE_FLOAT32, N);
		static float outputs[4][N]; /* both are under way at once */
		struct asked others[4];

		for (uint32_t i = 0; i < 4; i++) {
			others[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, scene->input[i], N,
					     outputs[i], N);
			if (i % 2)
				asked_submit(&others[i], &other[i], 1);
			submit_as(scene, i, 0, scene->tensor, 1);
			if (!(i % 2))
				asked_submit(&others[i], &other[i], 1);
		}
		for (uint32_t i = 0; i < 4; i++) {
			expect_well(scene, i);
			WORLD_UNTIL(scene->world, others[i].done);
			ASSERT_STR(others[i].failure.text, "");
		}
	}
}

/* -- Somebody does not come ----------------------------------------------------------------------------------------- */

TEST_FULL_TIER(late_rank_is_named, "a deadline of 500 ms that declarations must meet")
{
	FOR_EACH_WORLD_IN(scene, 500)
	{
		expect_sum(scene, 1);
		for (uint32_t i = 0; i < 3; i++) {
			(void)ask(scene, i);
			submit(scene, i, 2);
		}
		for (uint32_t i = 0; i < 3; i++) {
			expect_failed(scene, i, -ETIME, "rank 3");
			expect_failed(scene, i, -ETIME, "round 2");
		}
		/* Its request finds out, whenever it comes. */
		(void)ask(scene, 3);
		submit(scene, 3, 2);
		expect_failed(scene, 3, -ETIME, "rank 3");
		expect_sum(scene, 3);
	}
}

TEST(request_may_be_less_patient_than_its_job)
{
	FOR_EACH_WORLD(scene)
	{
		for (uint32_t i = 0; i < 3; i++) {
			ask(scene, i)->base.timeout_ms = i == 1 ? 50 : 0;
			submit(scene, i, 1);
		}
		for (uint32_t i = 0; i < 3; i++)
			expect_failed(scene, i, -ETIME, "within 50 ms");
		(void)ask(scene, 3);
		submit(scene, 3, 1);
		expect_failed(scene, 3, -ETIME, "within 50 ms");
		expect_sum(scene, 2);
	}
}

TEST_FULL_TIER(rank_that_has_not_declared_is_named,
	       "a deadline of 500 ms that other declarations must meet")
{
	FOR_EACH_WORLD_IN(scene, 500)
	{
		struct declared declared[4];
		struct failure failure;

		for (uint32_t i = 0; i < 3; i++) {
			ASSERT_OK(declared_make(&declared[i], &scene->world->ranks[i], "half",
						DTYPE_FLOAT32, N, &failure));
			(void)ask(scene, i);
			asked_submit(&scene->asked[i], &declared[i], 1);
		}
		for (uint32_t i = 0; i < 3; i++)
			expect_failed(scene, i, -ETIME,
				      scene->world->options.n_local == 4
					      ? "rank 3 did not declare the tensor"
					      : "tensor half");
		expect_sum(scene, 1);
		/* Void before they go out of scope. */
		for (uint32_t i = 0; i < 4; i++)
			agent_abandon(&scene->world->ranks[i].member, "died");
	}
}

/* What has failed is remembered for those who have not heard of it, but not for ever. */
TEST(rank_that_is_far_ahead)
{
	FOR_EACH_WORLD(scene)
	{
		struct world *world = scene->world;
		uint64_t round = 0;

		if (world->options.n_local == 1)
			continue;
		do {
			ASSERT_TRUE(round < 100000);
			ask(scene, 0)->base.operation = 99;
			submit(scene, 0, ++round);
			ASSERT_TRUE(scene->asked[0].done);
		} while (scene->asked[0].failure.status != -EDQUOT);
		WORLD_UNTIL(world, world->ranks[0].ended);
		ASSERT_EQ(world->ranks[0].failure.status, -EDQUOT);
		ASSERT_CONTAINS(world->ranks[0].failure.text,
				world->options.n_local == 4 ? "ranks 1, 2, 3 did not submit"
							    : "rank 2 did not submit");
		for (uint32_t i = 1; i < 4; i++)
			WORLD_UNTIL(world, world->ranks[i].ended);
	}
}

/* -- Declarations ---------------------------------------------------------------------------------------------------- */

TEST(declarations_differ)
{
	static const struct {
		unsigned dtype;
		uint64_t elements;
		const char *words, *shape, *others;
	} cases[] = {
		{ DTYPE_FLOAT16, N, "float16", NULL, NULL },
		{ DTYPE_FLOAT32, N + 1, "3001", NULL, NULL },
		{ DTYPE_FLOAT32, ELEMENTS_VARIABLE, "variable", NULL, NULL },
		{ DTYPE_FLOAT32, N, "2x1500", "2x1500", "1500x2" },
		{ DTYPE_FLOAT32, N, "1500x2", "1x3000", "1500x2" },
		{ DTYPE_FLOAT32, N + 1, "3001", NULL, "3x1000" },
	};

	FOR_EACH_WORLD(scene)
	{
		struct declared declared[ARRAY_SIZE(cases)][4];

		for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
			for (uint32_t i = 0; i < 4; i++) {
				bool odd = i == 2;
				struct failure failure;

				char name[8] = { 'c', (char)('0' + c) };
				struct agent_facts facts = {
					.name = name,
					.dtype = odd ? cases[c].dtype : DTYPE_FLOAT32,
					.elements = odd ? cases[c].elements : N,
					.shape = odd ? cases[c].shape : cases[c].others,
				};

				ASSERT_OK(declared_shaped(&declared[c][i], &scene->world->ranks[i],
							  &facts, &failure));
				(void)ask(scene, i);
				asked_submit(&scene->asked[i], &declared[c][i], 1);
			}
			expect_all_failed(scene, -EINVAL, cases[c].words);
			expect_all_failed(scene, -EINVAL, "rank 2");
			for (uint32_t i = 0; i < 4; i++) {
				WORLD_UNTIL(scene->world, declared[c][i].done);
				/* Who agrees with what a node said first is told with the first request. */
				if (declared[c][i].failure.status) {
					ASSERT_EQ(declared[c][i].failure.status, -EINVAL);
					ASSERT_CONTAINS(declared[c][i].failure.text, "rank 2");
				}
				/* For good. */
				(void)ask(scene, i);
				asked_submit(&scene->asked[i], &declared[c][i], 2);
			}
			expect_all_failed(scene, -EINVAL, cases[c].words);
		}
		expect_sum(scene, 1);
		for (uint32_t i = 0; i < 4; i++)
			agent_abandon(&scene->world->ranks[i].member, "died");
	}
}

/* Each rank declares a tensor of its shape, or of none, and submits its first round. */
static void submit_shaped(struct scene *scene, struct declared declared[4], const char *name,
			  const char *const shapes[4])
{
	for (uint32_t i = 0; i < 4; i++) {
		struct agent_facts facts = { name, DTYPE_FLOAT32, N, shapes[i] };
		struct failure failure;

		ASSERT_OK(declared_shaped(&declared[i], &scene->world->ranks[i], &facts, &failure));
		(void)ask(scene, i);
		asked_submit(&scene->asked[i], &declared[i], 1);
	}
}

/* Who says nothing of a shape agrees with all, and is not taken for who has said something. */
TEST(shapes_that_only_some_say)
{
	static const char *const alike[] = { NULL, "30x100", NULL, "30x100" };
	static const char *const other[] = { NULL, "30x100", NULL, "100x30" };

	FOR_EACH_WORLD(scene)
	{
		struct declared declared[2][4];

		submit_shaped(scene, declared[0], "alike", alike);
		for (uint32_t i = 0; i < 4; i++)
			expect_well(scene, i);
		submit_shaped(scene, declared[1], "other", other);
		expect_all_failed(scene, -EINVAL, "rank 1 ");
		expect_all_failed(scene, -EINVAL, "rank 3 ");
		expect_all_failed(scene, -EINVAL, "100x30");
		expect_sum(scene, 1);
		for (uint32_t i = 0; i < 4; i++)
			agent_abandon(&scene->world->ranks[i].member, "died");
	}
}

TEST(shapes_that_are_none)
{
	FOR_EACH_WORLD(scene)
	{
		struct agent_facts facts = { "t", DTYPE_FLOAT32, N, "" };
		struct failure failure = { 0 };
		struct declared declared;
		char shape[TENSOR_SHAPE_MAX + 2];

		ASSERT_EQ(declared_shaped(&declared, &scene->world->ranks[0], &facts, &failure),
			  -EINVAL);
		ASSERT_CONTAINS(failure.text, "tensor t: a shape is 1 to 63 bytes");
		facts.shape = "2\nx3";
		ASSERT_EQ(declared_shaped(&declared, &scene->world->ranks[0], &facts, &failure),
			  -EINVAL);
		memset(shape, '1', sizeof(shape));
		shape[sizeof(shape) - 1] = 0;
		facts.shape = shape;
		ASSERT_EQ(declared_shaped(&declared, &scene->world->ranks[0], &facts, &failure),
			  -EINVAL);
	}
}

/* -- Cancelled, left, dead --------------------------------------------------------------------------------------------- */

TEST(cancel_names_who_did_it)
{
	FOR_EACH_WORLD(scene)
	{
		/* Its node waits for others, or it is alone there and it is too late. */
		uint32_t n_local = scene->world->options.n_local;

		if (n_local == 1)
			continue;
		for (uint32_t i = 0; i < 4; i++)
			(void)ask(scene, i);
		submit(scene, 0, 1);
		submit(scene, 1, 1);
		submit(scene, 2, 1);
		agent_cancel(&scene->asked[1].base);
		submit(scene, 3, 1);
		expect_all_failed(scene, -ECANCELED, "tensor grad, round 1: rank 1 cancelled it");
		/* What has ended cannot be cancelled. */
		agent_cancel(&scene->asked[1].base);
		expect_sum(scene, 2);
	}
}

TEST(rank_that_leaves_ends_what_needs_it)
{
	FOR_EACH_WORLD(scene)
	{
		struct world *world = scene->world;

		expect_sum(scene, 1);
		for (uint32_t i = 0; i < 3; i++) {
			(void)ask(scene, i);
			submit(scene, i, 2);
		}
		agent_leave(&world->ranks[3].member);
		for (uint32_t i = 0; i < 3; i++) {
			WORLD_UNTIL(world, scene->asked[i].done);
			ASSERT_TRUE(scene->asked[i].failure.status);
			ASSERT_CONTAINS(scene->asked[i].failure.text, "rank 3");
		}
		WORLD_UNTIL(world, world->ranks[3].left);
		for (uint32_t i = 0; i < 3; i++) {
			(void)ask(scene, i);
			submit(scene, i, 3);
		}
		for (uint32_t i = 0; i < 3; i++) {
			WORLD_UNTIL(world, scene->asked[i].done);
			ASSERT_CONTAINS(scene->asked[i].failure.text, "rank 3");
		}
		for (uint32_t i = 0; i < 3; i++) {
			agent_leave(&world->ranks[i].member);
			WORLD_UNTIL(world, world->ranks[i].left);
		}
		/* In good order: nobody was told of a failure, and the next run begins. */
		for (uint32_t i = 0; i < 4; i++)
			ASSERT_TRUE(!world->ranks[i].ended);
		world_form(world);
		scene->tensor = world_declare(world, "grad", DTYPE_FLOAT32, N);
		expect_sum(scene, 1);
	}
}

TEST(dead_rank_fails_its_job_and_the_next_one_runs)
{
	FOR_EACH_WORLD(scene)
	{
		struct world *world = scene->world;

		expect_sum(scene, 1);
		for (uint32_t i = 0; i < 4; i++) {
			(void)ask(scene, i);
			if (i != 3)
				submit(scene, i, 2);
		}
		agent_abandon(&world->ranks[3].member, "died");
		for (uint32_t i = 0; i < 3; i++) {
			expect_failed(scene, i, -EPIPE, "rank 3 (pid 1003) of job job died");
			WORLD_UNTIL(world, world->ranks[i].ended);
			ASSERT_EQ(world->ranks[i].failure.status, -EPIPE);
			ASSERT_CONTAINS(world->ranks[i].failure.text,
					"rank 3 (pid 1003) of job job died");
		}
		ASSERT_TRUE(!world->ranks[3].ended);
		world_form(world);
		scene->tensor = world_declare(world, "grad", DTYPE_FLOAT32, N);
		expect_sum(scene, 1);
	}
}

/* All are in the middle of it: their memory is given back exactly once, when nothing touches it any more. */
TEST(death_while_data_moves)
{
	FOR_EACH_WORLD(scene)
	{
		struct world *world = scene->world;

		for (uint32_t i = 0; i < 4; i++) {
			(void)ask(scene, i);
			submit(scene, i, 1);
		}
		agent_abandon(&world->ranks[0].member, "died");
		for (uint32_t i = 0; i < 4; i++)
			WORLD_UNTIL(world, scene->asked[i].done);
		for (uint32_t i = 1; i < 4; i++)
			WORLD_UNTIL(world, world->ranks[i].ended);
	}
}

TEST(dead_node_fails_the_job_of_the_others)
{
	_cleanup_(freep) struct scene *scene = scene_new(&worlds[3].options, 60000);
	struct world *world = scene->world;

	expect_sum(scene, 1);
	for (uint32_t i = 0; i < 3; i++) {
		(void)ask(scene, i);
		submit(scene, i, 2);
	}
	world_kill(world, 3);
	for (uint32_t i = 0; i < 3; i++) {
		WORLD_UNTIL(world, scene->asked[i].done && world->ranks[i].ended);
		ASSERT_TRUE(scene->asked[i].failure.status);
		ASSERT_TRUE(strstr(world->ranks[i].failure.text, "node3") ||
			    strstr(world->ranks[i].failure.text, "rank 3"));
	}
	world_free(world);
}

TEST(shutdown_ends_everything)
{
	FOR_EACH_WORLD(scene)
	{
		for (uint32_t i = 0; i < 3; i++) {
			(void)ask(scene, i);
			submit(scene, i, 1);
		}
		for (unsigned i = 0; i < scene->world->options.n_nodes; i++)
			agent_close(scene->world->nodes[i].agent);
		for (uint32_t i = 0; i < 4; i++) {
			WORLD_UNTIL(scene->world, scene->world->ranks[i].ended);
			if (i < 3)
				WORLD_UNTIL(scene->world, scene->asked[i].done);
		}
		ASSERT_EQ(scene->world->ranks[0].failure.status, -ESHUTDOWN);
	}
}

/* Parts so small that each is worked on at once are not all worked on at once: other jobs have their turns between. */
TEST(small_parts_of_a_large_tensor_let_others_in)
{
	enum { LARGE = 1 << 20 };
	struct world_options options = {
		.n_nodes = 1,
		.n_local = 1,
		.no_servers = true,
		.n_threads = 1,
		.inline_bytes = 65536,
	};
	_cleanup_(world_freep) struct world *world = world_new(&options);
	_cleanup_(freep) float *input = calloc(LARGE, sizeof(float));
	_cleanup_(freep) float *output = calloc(LARGE, sizeof(float));
	struct declared *large, *small;
	struct asked first, second;

	ASSERT_TRUE(input && output);
	input[LARGE - 1] = 3;
	world_form(world);
	large = world_declare(world, "large", DTYPE_FLOAT32, LARGE);
	small = world_declare(world, "small", DTYPE_FLOAT32, 1);
	first = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, input, LARGE, output, LARGE);
	asked_submit(&first, large, 1);
	ASSERT_TRUE(!first.done);
	second = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, input, 1, output, 1);
	asked_submit(&second, small, 1);
	ASSERT_TRUE(second.done);
	WORLD_UNTIL(world, first.done);
	ASSERT_TRUE(!first.failure.status && output[LARGE - 1] == 3);
}

static uint64_t in_flight(struct world *world)
{
	_cleanup_(freep) struct agent_job_info *jobs = NULL;
	size_t n;

	ASSERT_OK(agent_jobs(world->nodes[0].agent, &jobs, &n));
	return n ? jobs[0].in_flight : 0;
}

/*
 * A node that is far ahead of the other sends as many parts as may be unanswered, then has nothing to do; a more urgent
 * tensor still gets through, and in the end all is summed.
 */
TEST(more_parts_than_may_be_under_way)
{
	enum { LARGE = 700 * 4096 / sizeof(float) };
	struct world_options options = {
		.n_nodes = 2,
		.n_local = 1,
		.part_bytes = 4096,
		.inline_bytes = 65536,
		.ahead_bytes = 16384,
	};
	_cleanup_(world_freep) struct world *world = world_new(&options);
	_cleanup_(freep) float *input = calloc(LARGE, sizeof(float));
	_cleanup_(freep) float *outputs = calloc(2 * LARGE, sizeof(float));
	struct declared *large, *small;
	struct asked slow[2], quick[2];
	float results[2] = { 0 };

	ASSERT_TRUE(input && outputs);
	for (size_t i = 0; i < LARGE; i++)
		input[i] = (float)i;
	world_form(world);
	large = world_declare(world, "large", DTYPE_FLOAT32, LARGE);
	small = world_declare(world, "small", DTYPE_FLOAT32, 1);
	slow[0] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, input, LARGE, outputs, LARGE);
	asked_submit(&slow[0], &large[0], 1);
	WORLD_UNTIL(world, in_flight(world) == 256);
	for (unsigned i = 0; i < 2; i++) {
		quick[i] =
			asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &input[1], 1, &results[i], 1);
		quick[i].base.priority = 1;
		asked_submit(&quick[i], &small[i], 1);
	}
	WORLD_UNTIL(world, quick[0].done && quick[1].done);
	ASSERT_TRUE(results[0] == 2 && results[1] == 2 && !slow[0].done);
	slow[1] =
		asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, input, LARGE, outputs + LARGE, LARGE);
	asked_submit(&slow[1], &large[1], 1);
	WORLD_UNTIL(world, slow[0].done && slow[1].done);
	ASSERT_TRUE(!slow[0].failure.status && !slow[1].failure.status);
	for (size_t i = 0; i < LARGE; i++)
		ASSERT_TRUE(outputs[i] == 2 * input[i] && outputs[LARGE + i] == 2 * input[i]);
}

/* Failed rounds are kept until the slower ranks have heard of them: a rank that fails alone cannot make that endless. */
TEST(rounds_that_fail_alone_are_limited)
{
	struct world_options options = { .n_nodes = 1, .n_local = 2, .no_servers = true };
	_cleanup_(world_freep) struct world *world = world_new(&options);
	struct declared *tensor;
	struct asked asked;
	uint64_t round = 0;
	float value = 1;

	world_form(world);
	tensor = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	do {
		asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &value, 7, &value, 7);
		asked_submit(&asked, tensor, ++round);
		ASSERT_TRUE(asked.done && asked.failure.status);
	} while (asked.failure.status != -EDQUOT && round < 1000000);
	WORLD_UNTIL(world, world->ranks[0].ended && world->ranks[1].ended);
	ASSERT_EQ(world->ranks[1].failure.status, -EDQUOT);
	ASSERT_TRUE(strstr(world->ranks[1].failure.text, "rank 1"));
	ASSERT_TRUE(round > 4096);
}

/* However many rounds one node has given up, the others hear of each. */
TEST(many_cancelled_rounds_fail_on_the_other_node)
{
	enum { ROUNDS = 100 };
	struct world_options options = { .n_nodes = 2, .n_local = 1 };
	_cleanup_(world_freep) struct world *world = world_new(&options);
	struct asked mine[ROUNDS], theirs[ROUNDS];
	float input = 1, output[2];
	struct declared *tensor;

	world_form(world);
	tensor = world_declare(world, "grad", DTYPE_FLOAT32, 1);
	for (uint32_t i = 0; i < 2; i++)
		WORLD_UNTIL(world, tensor[i].done);
	for (uint64_t i = 0; i < ROUNDS; i++) {
		mine[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &input, 1, &output[0], 1);
		asked_submit(&mine[i], &tensor[0], i + 1);
	}
	for (uint64_t i = 1; i < ROUNDS; i++) {
		agent_cancel(&mine[i].base);
		ASSERT_EQ(mine[i].failure.status, -ECANCELED);
	}
	for (uint64_t i = 0; i < ROUNDS; i++) {
		theirs[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &input, 1, &output[1], 1);
		asked_submit(&theirs[i], &tensor[1], i + 1);
	}
	for (uint64_t i = 0; i < ROUNDS; i++) {
		WORLD_UNTIL(world, mine[i].done && theirs[i].done);
		ASSERT_EQ(theirs[i].failure.status, i ? -ECANCELED : 0);
		ASSERT_TRUE(!i || strstr(theirs[i].failure.text, "rank 0 cancelled it"));
	}
	ASSERT_EQ(mine[0].failure.status, 0);
}
