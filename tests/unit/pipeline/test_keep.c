/* Jobs that outlive their daemons' processes: what the agent keeps for servers. */
#include "pipeline/part.h"
#include "world.h"
#include <stdio.h>

static struct pipeline_job *job_of(struct world *world)
{
	struct pipeline_job *job =
		list_first(&world->nodes[0].pipeline->jobs, struct pipeline_job, link);

	ASSERT_TRUE(job && job->keep && job->state == JOB_RUNNING);
	return job;
}

static void form(struct world *world, struct stragglers stragglers)
{
	struct pipeline_join join = world_join_of(world, 0);
	struct failure failure = { 0 };

	join.stragglers = stragglers;
	if (world_join(world, 0, &join, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	WORLD_UNTIL(world, world->ranks[0].joined || world->ranks[0].ended);
	ASSERT_STR(world->ranks[0].failure.text, "");
}

/*
 * Nobody keeps an accumulate for others, so it is released before it is stored. A server numbers results without end, and no
 * more than LEDGER_CELLS_MAX of them may be behind the last that was released.
 */
TEST(a_job_may_do_nothing_but_accumulate)
{
	enum { PARTS = 1024, PER_PART = 1024, N = PARTS * PER_PART };
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 1, .distributed = true, .resume = true });
	unsigned n_rounds = LEDGER_CELLS_MAX / PARTS + 2;
	static float input[N], output[N];
	struct declared *declared;

	form(world, (struct stragglers){ .async = true });
	declared = world_declare(world, "sum", DTYPE_FLOAT32, N);
	for (unsigned i = 0; i < N; i++)
		input[i] = (float)(i % 7);
	for (unsigned round = 1; round <= n_rounds; round++) {
		struct asked asked =
			asked_of(OPERATION_ACCUMULATE, REDUCTION_SUM, input, N, output, N);
		const struct pipeline_server *server = &job_of(world)->servers[0];

		asked_submit(&asked, declared, round);
		WORLD_UNTIL(world, asked.done);
		ASSERT_STR(asked.failure.text, "");
		for (unsigned i = round; i < N; i += PER_PART)
			ASSERT_TRUE(output[i] == input[i] * (float)round);
		/* No more than those of this round are not: there is room for the next. */
		ASSERT_EQ(server->acked, round * PARTS);
		ASSERT_INT(server->acked - server->released, <=, PARTS);
	}
}
