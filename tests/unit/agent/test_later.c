/*
 * What goes on in later turns of the loop: so much in each, whatever there is; and where the daemon's process ends before, it is
 * left to the next one.
 */
#include "../base/chores.h"
#include "agent/round/round.h"
#include "world.h"
#include <semaphore.h>

/* Sums of the pool wait until they may go on. */
static sem_t may_sum;
static unsigned n_sums_here;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

int __wrap_reduce_run(const struct reduce_params *params)
{
	if (gettid() == getpid())
		n_sums_here++;
	else
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

#define MANY 200

struct crowd {
	struct world *world;
	struct agent *agent;
	struct agent_job *job;
	struct declared *declared;
	struct asked asked[MANY + 1][3];
	float data[MANY + 1][3];
};

/* An elastic job of three ranks, and a tensor that all have declared. */
static struct crowd *crowd_new(const struct world_options *options)
{
	struct crowd *crowd = calloc(1, sizeof(*crowd));

	ASSERT_TRUE(crowd);
	crowd->world = world_new(options);
	crowd->agent = crowd->world->nodes[0].agent;
	world_form(crowd->world);
	crowd->declared = world_declare(crowd->world, "t", DTYPE_FLOAT32, 1);
	crowd->job = crowd->world->ranks[0].member.job;
	return crowd;
}

static struct crowd *three(uint64_t request_timeout_ms)
{
	return crowd_new(&(struct world_options){ .n_nodes = 1,
						  .n_local = 3,
						  .no_servers = true,
						  .min_ranks = 1,
						  .request_timeout_ms = request_timeout_ms });
}

static void crowd_freep(struct crowd **crowd)
{
	world_free((*crowd)->world);
	free(*crowd);
}

static struct asked *crowd_submit(struct crowd *crowd, uint32_t rank, uint64_t round)
{
	struct asked *asked = &crowd->asked[round][rank];
	float *data = &crowd->data[round][rank];

	*asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data, 1, data, 1);
	asked->base.membership = 1;
	asked_submit(asked, &crowd->declared[rank], round);
	return asked;
}

static unsigned n_ended(const struct crowd *crowd)
{
	unsigned n = 0;

	for (uint32_t rank = 0; rank < 3; rank++)
		n += crowd->world->ranks[rank].ended;
	return n;
}

TEST(rounds_without_a_rank_are_left_to_the_sweep_however_often_it_is_lost)
{
	_cleanup_(crowd_freep) struct crowd *crowd = three(0);
	struct failure failure = { 0 };

	for (uint64_t round = 1; round <= MANY; round++)
		for (uint32_t rank = 0; rank < 2; rank++)
			(void)crowd_submit(crowd, rank, round);
	chores_hold();
	agent_abandon(&crowd->world->ranks[2].member, "died");
	ASSERT_EQ(crowd->job->n_open_rounds, MANY);
	(void)failure_set(&failure, -EPIPE, "rank 2 is lost once more");
	agent_round_without(crowd->job, 2, &failure);
	ASSERT_EQ(crowd->job->n_open_rounds, MANY);
	ASSERT_EQ(crowd->job->n_busy, 0);
	chores_go_on();
	WORLD_UNTIL(crowd->world, crowd->asked[MANY][0].done);
	ASSERT_OK(crowd->asked[MANY][0].failure.status);
}

/* Of one tensor, and the sweep has come to none of them. */
TEST(rounds_that_are_over_without_a_rank_are_forgotten_in_steps)
{
	_cleanup_(crowd_freep) struct crowd *crowd = three(0);

	for (uint64_t round = 1; round <= MANY; round++) {
		struct asked *asked = crowd_submit(crowd, 0, round);

		(void)crowd_submit(crowd, 1, round);
		agent_cancel(&asked->base);
		ASSERT_TRUE(asked->done);
	}
	chores_hold();
	agent_abandon(&crowd->world->ranks[2].member, "died");
	ASSERT_EQ(crowd->job->n_open_rounds, MANY);
	agent_round_advance(list_first(&crowd->job->rounds, struct agent_round, job_link)->tensor);
	ASSERT_INT(crowd->job->n_open_rounds, <, MANY);
	ASSERT_INT(crowd->job->n_open_rounds, >, MANY / 2);
	chores_go_on();
	WORLD_UNTIL(crowd->world, !crowd->job->n_open_rounds);
}

/* One may have as much to give back as it could take. */
TEST(ranks_that_are_late_together_are_dropped_one_in_a_step)
{
	_cleanup_(crowd_freep) struct crowd *crowd = three(20);

	(void)crowd_submit(crowd, 0, 1);
	chores_hold();
	WORLD_UNTIL(crowd->world, chores_n_held());
	ASSERT_EQ(n_ended(crowd), 0);
	for (unsigned n = 1; n <= 2; n++) {
		(void)crowd->job->sweep.chore.step(&crowd->job->sweep.chore);
		ASSERT_EQ(n_ended(crowd), n);
	}
	chores_go_on();
	WORLD_UNTIL(crowd->world, crowd->asked[1][0].done);
	ASSERT_OK(crowd->asked[1][0].failure.status);
}

TEST(ranks_that_do_not_regroup_are_dropped_one_in_a_turn)
{
	_cleanup_(crowd_freep) struct crowd *crowd = three(20);
	unsigned n = 0;

	agent_regroup(&crowd->world->ranks[0].member);
	while (n < 2) {
		ASSERT_OK(loop_turn(crowd->world->loop, -1));
		ASSERT_INT(n_ended(crowd), <=, n + 1);
		n = n_ended(crowd);
	}
	WORLD_UNTIL(crowd->world, crowd->world->ranks[0].n_joined == 2);
}

/* Those that have yet to go into the outputs, and all. */
static size_t n_parts_of(const struct agent_round *round)
{
	const struct list *link;
	size_t n = round->n_held;

	for (link = round->parts.next; link != &round->parts; link = link->next)
		n++;
	return n;
}

/* Of an elastic job over nodes: all are held until each has come. */
TEST(parts_of_a_round_that_is_decided_on_go_on_in_steps)
{
	_cleanup_(crowd_freep) struct crowd *crowd =
		crowd_new(&(struct world_options){ .n_nodes = 2,
						   .n_local = 1,
						   .resume = true,
						   .n_threads = 1,
						   .part_bytes = 4096,
						   .inline_bytes = UINT64_MAX,
						   .min_ranks = 1,
						   .max_ranks = 2 });
	static float in[MANY * 1024], out[2][MANY * 1024];
	struct world *world = crowd->world;
	struct declared *declared = world_declare(world, "many", DTYPE_FLOAT32, ARRAY_SIZE(in));
	struct asked *asked = crowd->asked[0];
	const struct agent_round *round;
	size_t before, n;

	for (unsigned i = 0; i < ARRAY_SIZE(in); i++)
		in[i] = (float)i;
	for (uint32_t rank = 0; rank < 2; rank++)
		WORLD_UNTIL(world, declared[rank].done);
	for (uint32_t rank = 0; rank < 2; rank++) {
		asked[rank] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, in, ARRAY_SIZE(in),
				       out[rank], ARRAY_SIZE(in));
		asked[rank].base.membership = 1;
		asked_submit(&asked[rank], &declared[rank], 1);
	}
	round = asked[0].base.in;
	chores_hold();
	WORLD_UNTIL(world, round->gate.committed);
	n = n_parts_of(round);
	ASSERT_INT(n, >, MANY);
	/* Each goes into the outputs, and ends. */
	while (n > MANY / 2) {
		before = n;
		(void)crowd->job->later.chore.step(&crowd->job->later.chore);
		n = n_parts_of(round);
		ASSERT_INT(n, <, before);
		ASSERT_INT(n, >=, before - 64);
	}
	chores_go_on();
	for (uint32_t rank = 0; rank < 2; rank++) {
		WORLD_UNTIL(world, asked[rank].done);
		ASSERT_STR(asked[rank].failure.text, "");
		for (unsigned i = 0; i < ARRAY_SIZE(in); i++)
			ASSERT_TRUE(out[rank][i] == 2 * in[i]);
	}
}

/* Each of which has had a job of its own. */
TEST(jobs_that_are_over_are_freed_one_in_a_step)
{
	_cleanup_(crowd_freep) struct crowd *crowd = crowd_new(&(struct world_options){
		.n_nodes = 1, .n_local = 3, .no_servers = true, .max_jobs = 1 });
	struct world *world = crowd->world;
	unsigned n = 0, before;

	for (uint32_t rank = 0; rank < 3; rank++)
		agent_leave(&world->ranks[rank].member);
	while (!list_empty(&crowd->agent->jobs))
		ASSERT_OK(loop_turn(world->loop, 0));
	chores_hold();
	for (uint32_t rank = 0; rank < 3; rank++) {
		struct agent_join join = world_join_of(world, rank);
		struct failure failure;
		char name[16];

		(void)snprintf(name, sizeof(name), "alone%u", rank);
		join.job = name;
		join.rank = join.local_rank = 0;
		join.size = join.local_size = 1;
		ASSERT_OK(world_join(world, rank, &join, &failure));
		agent_leave(&world->ranks[rank].member);
	}
	for (before = 3; before; before--) {
		struct agent_job *job;

		n = 0;
		list_for_each (job, &crowd->agent->jobs, link)
			n++;
		ASSERT_EQ(n, before);
		(void)crowd->agent->reap.step(&crowd->agent->reap);
	}
	ASSERT_TRUE(list_empty(&crowd->agent->jobs));
	chores_go_on();
}

/* Where it comes from is where it is to go: nothing is to be done for any of its parts. */
TEST(parts_that_are_over_at_once_are_made_some_in_a_turn)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 1,
						   .no_servers = true,
						   .n_threads = 1,
						   .part_bytes = 4096 });
	static float data[10000 * 1024];
	struct declared *declared;
	struct asked asked;

	world_form(world);
	declared = world_declare(world, "t", DTYPE_FLOAT32, ARRAY_SIZE(data));
	asked = asked_of(OPERATION_BROADCAST, 0, data, ARRAY_SIZE(data), NULL, 0);
	chores_hold();
	asked_submit(&asked, &declared[0], 1);
	ASSERT_TRUE(!asked.done);
	ASSERT_EQ(chores_n_held(), 1);
	chores_go_on();
	WORLD_UNTIL(world, asked.done);
	ASSERT_STR(asked.failure.text, "");
}

/* Of few bytes, and each of as many ranks as there are. */
TEST(of_tiny_parts_no_more_are_summed_at_once_than_of_others)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = WORLD_RANKS,
						   .no_servers = true,
						   .n_threads = 1,
						   .inline_bytes = 64 << 10 });
	static struct asked asked[WORLD_RANKS];
	static float in[WORLD_RANKS], out[WORLD_RANKS];
	struct declared *declared;

	ASSERT_OK(sem_init(&may_sum, 0, 0));
	world_form(world);
	declared = world_declare(world, "t", DTYPE_FLOAT32, WORLD_RANKS);
	n_sums_here = 0;
	for (uint32_t rank = 0; rank < WORLD_RANKS; rank++) {
		asked[rank] = asked_of(OPERATION_REDUCE_SCATTER, REDUCTION_SUM, in, WORLD_RANKS,
				       &out[rank], 1);
		asked_submit(&asked[rank], &declared[rank], 1);
	}
	ASSERT_INT(n_sums_here, >, 0);
	ASSERT_INT(n_sums_here, <, 8);
	for (unsigned i = 0; i < WORLD_RANKS; i++)
		ASSERT_OK(sem_post(&may_sum));
	for (uint32_t rank = 0; rank < WORLD_RANKS; rank++)
		WORLD_UNTIL(world, asked[rank].done);
}

/*
 * Two nodes; the first has given up many rounds of a tensor, but for one (0: none) and the last, before it had a number, by which servers
 * hear of them.
 */
struct unknown {
	struct world *world;
	struct declared *declared;
	struct agent_job *job;
	struct asked mine[MANY + 2], theirs[MANY + 2];
	float mine_data, theirs_data;
};

static struct unknown *unknown_new(uint64_t kept)
{
	struct unknown *unknown = calloc(1, sizeof(*unknown));

	ASSERT_TRUE(unknown);
	unknown->world =
		world_new(&(struct world_options){ .n_nodes = 2, .n_local = 1, .resume = true });
	world_form(unknown->world);
	unknown->job = unknown->world->ranks[0].member.job;
	unknown->declared = world_declare(unknown->world, "t", DTYPE_FLOAT32, 1);
	for (uint64_t round = 1; round <= MANY + 1; round++) {
		struct asked *asked = &unknown->mine[round];

		*asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &unknown->mine_data, 1,
				  &unknown->mine_data, 1);
		asked_submit(asked, &unknown->declared[0], round);
		if (round == kept || round > MANY)
			continue;
		agent_cancel(&asked->base);
		ASSERT_EQ(asked->failure.status, -ECANCELED);
	}
	chores_hold();
	WORLD_UNTIL(unknown->world, unknown->declared[0].done);
	ASSERT_INT(unknown->job->retention.n_failed, >, 0);
	ASSERT_INT(unknown->job->retention.n_failed, <, MANY / 2);
	return unknown;
}

static void unknown_freep(struct unknown **unknown)
{
	world_free((*unknown)->world);
	free(*unknown);
}

/* No other moves before. */
TEST(rounds_that_failed_before_their_tensor_had_a_number_are_told_in_steps)
{
	_cleanup_(unknown_freep) struct unknown *unknown = unknown_new(2);

	for (uint64_t round = 1; round <= MANY + 1; round++) {
		struct asked *asked = &unknown->theirs[round];

		*asked = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, &unknown->theirs_data, 1,
				  &unknown->theirs_data, 1);
		asked_submit(asked, &unknown->declared[1], round);
	}
	ASSERT_TRUE(list_empty(&unknown->job->schedule.moving));
	chores_go_on();
	for (uint64_t round = 1; round <= MANY + 1; round++) {
		WORLD_UNTIL(unknown->world,
			    unknown->mine[round].done && unknown->theirs[round].done);
		ASSERT_EQ(unknown->theirs[round].failure.status,
			  round == 2 || round > MANY ? 0 : -ECANCELED);
	}
	ASSERT_EQ(unknown->mine[2].failure.status, 0);
	ASSERT_EQ(unknown->mine[MANY + 1].failure.status, 0);
	ASSERT_EQ(unknown->job->retention.n_failed, MANY - 1);
	ASSERT_EQ(unknown->job->n_open_rounds, 0);
}

/* One that fails meanwhile is told behind them; some are found to have ended before a restart. */
TEST(rounds_may_fail_and_go_while_others_are_told)
{
	enum { SETTLED = 100 };
	_cleanup_(unknown_freep) struct unknown *unknown = unknown_new(0);
	struct agent_job *job = unknown->job;
	struct agent_round *round = list_first(&job->rounds, struct agent_round, job_link);
	struct agent_tensor *tensor = round->tensor;
	size_t before = job->retention.n_failed;

	agent_cancel(&unknown->mine[MANY + 1].base);
	ASSERT_EQ(unknown->mine[MANY + 1].failure.status, -ECANCELED);
	ASSERT_EQ(job->retention.n_failed, before);
	ASSERT_EQ(job->n_open_rounds, MANY + 1);
	tensor->past_rounds = SETTLED;
	while ((round = list_first(&tensor->rounds, struct agent_round, link)) &&
	       agent_round_settle(round))
		;
	ASSERT_EQ(job->n_open_rounds, MANY + 1 - SETTLED);
	chores_go_on();
	WORLD_UNTIL(unknown->world, !job->n_open_rounds);
	ASSERT_EQ(job->retention.n_failed, before + MANY + 1 - SETTLED);
}

/* All servers hear of the job's end. */
TEST(nothing_is_told_of_rounds_of_a_job_that_has_failed)
{
	_cleanup_(unknown_freep) struct unknown *unknown = unknown_new(0);
	struct agent_job *job = unknown->job;
	size_t before = job->retention.n_failed;
	struct failure failure;

	(void)failure_set(&failure, -EIO, "it fails");
	agent_job_hold(job);
	agent_job_fail(job, &failure, NULL);
	chores_go_on();
	WORLD_UNTIL(unknown->world, !job->later.is_under_way);
	ASSERT_EQ(job->retention.n_failed, before);
	agent_job_release(job);
}
