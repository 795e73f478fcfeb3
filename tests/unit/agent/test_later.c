/* What goes on in a later turn of the loop, and the daemon's process ends before: it is left to the next one. */
#include "../base/chores.h"
#include "agent/round/round.h"
#include "world.h"
#include <semaphore.h>

/* Sums of the pool wait until they may go on. */
static sem_t may_sum;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

int __wrap_reduce_run(const struct reduce_params *params)
{
	if (gettid() != getpid())
		while (sem_wait(&may_sum))
			;
	return __real_reduce_run(params);
}

/* One that begins while the first is summed, and as many as a turn begins behind it; and one more. */
#define ROUNDS 18

TEST(no_round_begins_in_a_job_that_is_left_to_the_next_process)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 2,
						   .no_servers = true,
						   .n_threads = 1,
						   .inline_bytes = UINT64_MAX });
	struct agent *agent = world->nodes[0].agent;
	struct asked asked[ROUNDS][2];
	static float data[ROUNDS][2][100];
	struct declared *declared;
	const struct agent_round *last;
	const struct agent_job *job;

	ASSERT_OK(sem_init(&may_sum, 0, 0));
	world_form(world);
	declared = world_declare(world, "t", DTYPE_FLOAT32, 100);
	for (unsigned i = 0; i < ROUNDS; i++)
		for (uint32_t rank = 0; rank < 2; rank++) {
			asked[i][rank] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data[i][rank],
						  100, data[i][rank], 100);
			asked[i][rank].base.stalls = !i;
			asked_submit(&asked[i][rank], &declared[rank], i + 1);
		}
	chores_hold();
	ASSERT_OK(sem_post(&may_sum));
	WORLD_UNTIL(world, asked[ROUNDS - 2][1].done);
	ASSERT_EQ(chores_n_held(), 1);
	job = list_first(&agent->jobs, struct agent_job, link);
	last = list_first(&job->rounds, struct agent_round, job_link);
	ASSERT_EQ(job->n_open_rounds, 1);
	agent_suspend(agent);
	chores_go_on();
	for (unsigned i = 0; i < 3; i++)
		ASSERT_OK(loop_turn(world->loop, 0));
	ASSERT_EQ(agent_n_suspended(agent), 0);
	ASSERT_EQ(last->state, ROUND_READY);
	ASSERT_TRUE(!ledger_remembers(job->resumption.ledger, "t", ROUNDS));
}
