/* Rounds that had ended before a restart, of which there may be thousands: they end in pieces, and others have their turns in between. */
#include "agent/round/round.h"
#include "world.h"

#define MANY 1000

struct scene {
	struct world *world;
	struct declared declared[2];
	struct asked *asked;
	float in[2], out[2];
};

static const struct agent_job *job_of(const struct scene *scene)
{
	return scene->world->ranks[0].member.job;
}

static void declare(struct scene *scene, unsigned rank, uint64_t n_past)
{
	const struct agent_past past = { .rounds = n_past };
	struct failure failure = { 0 };

	if (declared_again(&scene->declared[rank], &scene->world->ranks[rank], "t", DTYPE_FLOAT32,
			   1, &past, &failure))
		test_fail(__FILE__, __LINE__, "rank %u: %s", rank, failure.text);
}

static struct asked *submit(struct scene *scene, unsigned rank, uint64_t round)
{
	struct asked *asked = &scene->asked[rank * (MANY + 2) + round];

	*asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &scene->in[rank], 1,
			  &scene->out[rank], 1);
	asked_submit(asked, &scene->declared[rank], round);
	return asked;
}

/* Two ranks of a node whose daemon was restarted. */
static struct scene *resumed(void)
{
	struct scene *scene = calloc(1, sizeof(*scene));
	struct declared *before;

	ASSERT_TRUE(scene);
	scene->asked = calloc(2 * (MANY + 2), sizeof(scene->asked[0]));
	ASSERT_TRUE(scene->asked);
	scene->in[0] = 1;
	scene->in[1] = 2;
	scene->world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 2, .distributed = true, .resume = true });
	world_form(scene->world);
	before = world_declare(scene->world, "t", DTYPE_FLOAT32, 1);
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(scene->world, before[i].done);
	world_restart(scene->world, 0);
	for (unsigned i = 0; i < 2; i++) {
		struct agent_join join = world_join_of(scene->world, i);
		struct failure failure = { 0 };

		if (world_resume(scene->world, i, &join, &failure))
			test_fail(__FILE__, __LINE__, "rank %u: %s", i, failure.text);
	}
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(scene->world, scene->world->ranks[i].joined);
	return scene;
}

static void scene_freep(struct scene **scene)
{
	(void)world_free((*scene)->world);
	free((*scene)->asked);
	free(*scene);
}

static void expect_sum(struct scene *scene, struct asked *const asked[2])
{
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(scene->world, asked[i]->done);
		ASSERT_STR(asked[i]->failure.text, "");
		ASSERT_TRUE(scene->out[i] == 3);
	}
}

TEST(rounds_that_a_rank_leaves_out)
{
	_cleanup_(scene_freep) struct scene *scene = resumed();
	const struct agent_declaration *declaration = &scene->declared[0].base;
	struct asked *last[2], *asked;
	uint64_t before;

	declare(scene, 0, 0);
	declare(scene, 1, 0);
	do {
		before = declaration->n_rounds;
		ASSERT_INT(job_of(scene)->n_open_rounds, <=, before);
	} while (!agent_leave_out(&scene->declared[0].base, MANY, clock_now_ns()) &&
		 declaration->n_rounds > before && declaration->n_rounds <= before + 16);
	ASSERT_INT(declaration->n_rounds + 1, <, MANY);
	ASSERT_INT(declaration->n_rounds + 17, >=, MANY);
	last[0] = submit(scene, 0, MANY);
	for (uint64_t round = 1; round < MANY; round++) {
		asked = submit(scene, 1, round);
		WORLD_UNTIL(scene->world, asked->done);
		ASSERT_EQ(asked->failure.status, -ECONNRESET);
	}
	ASSERT_TRUE(!last[0]->done);
	last[1] = submit(scene, 1, MANY);
	expect_sum(scene, last);
}

TEST(no_rank_leaves_out_more_than_it_may_have_open)
{
	_cleanup_(scene_freep) struct scene *scene = resumed();
	struct asked *asked;

	declare(scene, 0, 0);
	/* agent_submit() says what is wrong. */
	ASSERT_TRUE(
		agent_leave_out(&scene->declared[0].base, ROUNDS_PER_RANK_MAX + 1, clock_now_ns()));
	ASSERT_EQ(scene->declared[0].base.n_rounds, 0);
	asked = &scene->asked[0];
	*asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &scene->in[0], 1, &scene->out[0], 1);
	asked_submit(asked, &scene->declared[0], ROUNDS_PER_RANK_MAX + 1);
	WORLD_UNTIL(scene->world, asked->done);
	ASSERT_EQ(asked->failure.status, -EPROTO);
}

static unsigned n_done(const struct scene *scene)
{
	unsigned n = 0;

	for (uint64_t round = 1; round <= MANY; round++)
		n += scene->asked[round].done;
	return n;
}

/* The one has them still to come, and the other has seen how they ended. */
TEST(rounds_that_had_ended_for_another_rank)
{
	_cleanup_(scene_freep) struct scene *scene = resumed();
	struct asked *next[2];

	declare(scene, 0, 0);
	for (uint64_t round = 1; round <= MANY; round++)
		(void)submit(scene, 0, round);
	ASSERT_EQ(job_of(scene)->n_open_rounds, MANY);
	declare(scene, 1, MANY);
	ASSERT_EQ(n_done(scene), 0);
	/* What comes behind them waits for no more than that. */
	next[0] = submit(scene, 0, MANY + 1);
	next[1] = submit(scene, 1, MANY + 1);
	ASSERT_TRUE(!next[0]->done);
	expect_sum(scene, next);
	ASSERT_EQ(n_done(scene), MANY);
	/* Of the last, their rank says that it has seen them end well. */
	ASSERT_OK(scene->asked[MANY].failure.status);
	ASSERT_EQ(scene->asked[1].failure.status, -ECONNRESET);
}
