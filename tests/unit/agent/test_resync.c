/* What a server that has attached may not have heard: it is told in steps, and parts wait for that. */
#include "../base/chores.h"
#include "agent/round/part.h"
#include "agent/servers/setup.h"
#include "world.h"
#include <stdio.h>

/* Each is more than a step. */
enum { TENSORS = 100, LEN = 100 };

struct added {
	struct asked asked;
	float output[LEN];
};

static const float input[LEN] = { 1 };

static struct agent_job *job_at(struct world *world, unsigned node)
{
	struct agent_job *job = list_first(&world->nodes[node].agent->jobs, struct agent_job, link);

	ASSERT_TRUE(job && job->retention.keeps);
	return job;
}

/* The last sums of a job that accumulates are retained. */
static void add(struct added *added, struct declared *tensor, uint64_t round)
{
	added->asked =
		asked_of(OPERATION_ACCUMULATE, REDUCTION_SUM, input, LEN, added->output, LEN);
	asked_submit(&added->asked, tensor, round);
}

static void end_well(struct world *world, const struct added *added, float sum)
{
	WORLD_UNTIL(world, added->asked.done);
	ASSERT_STR(added->asked.failure.text, "");
	ASSERT_TRUE(added->output[0] == sum);
}

static struct world *world_that_accumulates(unsigned n_nodes, struct declared **tensors)
{
	struct world *world = world_new(&(struct world_options){
		.n_nodes = n_nodes, .n_local = 1, .distributed = true, .resume = true });
	struct failure failure = { 0 };
	static struct added added;
	char name[16];

	for (unsigned i = 0; i < n_nodes; i++) {
		struct agent_join join = world_join_of(world, i);

		join.stragglers.async = true;
		ASSERT_OK(world_join(world, i, &join, &failure));
	}
	for (unsigned i = 0; i < n_nodes; i++)
		WORLD_UNTIL(world, world->ranks[i].joined);
	for (unsigned i = 0; i < TENSORS; i++) {
		(void)snprintf(name, sizeof(name), "t%u", i);
		tensors[i] = world_declare(world, name, DTYPE_FLOAT32, LEN);
		add(&added, tensors[i], 1);
		end_well(world, &added, 1);
	}
	return world;
}

/* The server is attached again, and has heard what a step has room for. */
static struct agent_server *attach_again(struct world *world, struct agent_job *job, size_t number)
{
	struct agent_server *server = &job->fleet.servers[number];

	chores_hold();
	agent_keep_again(job, number);
	WORLD_UNTIL(world, server->attached);
	ASSERT_TRUE(server->resync.is_under_way);
	return server;
}

static void until_told(struct world *world, const struct agent_server *server)
{
	const struct agent_fleet *fleet = &server->job->fleet;

	chores_go_on();
	WORLD_UNTIL(world, server->attached && !server->resync.is_under_way);
	ASSERT_EQ(fleet->n_resyncing, 0);
	ASSERT_EQ(fleet->n_attached, fleet->n_servers);
}

TEST(parts_wait_until_all_that_is_kept_is_offered)
{
	struct declared *tensors[TENSORS];
	_cleanup_(world_freep) struct world *world = world_that_accumulates(1, tensors);
	struct agent_job *job = job_at(world, 0);
	struct agent_server *server = attach_again(world, job, 0);
	static struct added added;

	ASSERT_EQ(server->n_offered, 0);
	ASSERT_EQ(job->fleet.n_attached, 0);
	add(&added, tensors[0], 2);
	ASSERT_OK(loop_turn(world->loop, 0));
	ASSERT_TRUE(!list_empty(&server->parked));
	until_told(world, server);
	end_well(world, &added, 2);
	ASSERT_EQ(server->n_offered, TENSORS);
	ASSERT_TRUE(list_empty(&server->parked));
}

/* No more than its cost allows. */
TEST(no_step_says_much)
{
	struct declared *tensors[TENSORS];
	_cleanup_(world_freep) struct world *world = world_that_accumulates(1, tensors);
	struct agent_server *server = attach_again(world, job_at(world, 0), 0);
	struct chore *chore = &server->resync.chore;
	unsigned n = 1;

	for (uint64_t before = 0; chore->step(chore); before = server->n_offered, n++)
		ASSERT_INT(server->n_offered - before, <=, 32);
	chores_forget(chore);
	/* As many tensors are said, as many results offered. */
	ASSERT_INT(n, >=, 2 * TENSORS / 32);
	ASSERT_EQ(server->n_offered, TENSORS);
	chores_go_on();
}

TEST(a_server_that_is_lost_meanwhile_is_told_all_once_more)
{
	struct declared *tensors[TENSORS];
	_cleanup_(world_freep) struct world *world = world_that_accumulates(1, tensors);
	struct agent_job *job = job_at(world, 0);
	struct agent_server *server = attach_again(world, job, 0);
	static struct added added;

	for (unsigned i = 0; i < 4; i++)
		ASSERT_TRUE(server->resync.chore.step(&server->resync.chore));
	ASSERT_TRUE(server->n_offered);
	agent_keep_again(job, 0);
	ASSERT_EQ(job->fleet.n_resyncing, 0);
	ASSERT_EQ(job->fleet.n_attached, 0);
	until_told(world, server);
	ASSERT_EQ(server->n_offered, TENSORS);
	add(&added, tensors[0], 2);
	end_well(world, &added, 2);
}

static unsigned n_kept_of(const struct agent_server *server)
{
	struct ledger *ledger = server->job->resumption.ledger;
	unsigned n = 0;

	for (uint32_t i = 0; i < ledger_results_used(ledger); i++) {
		const struct ledger_kept *kept = ledger_result_kept(ledger, i);

		n += kept->taken && agent_keep_owner(server->job, kept) == server;
	}
	return n;
}

/* Others may wait for what is kept here. */
TEST(a_node_whose_ranks_leave_offers_what_it_keeps_first)
{
	struct declared *tensors[TENSORS];
	_cleanup_(world_freep) struct world *world = world_that_accumulates(2, tensors);
	struct agent_job *job = job_at(world, 0);
	const struct agent_server *server = attach_again(world, job, 1);
	unsigned n = n_kept_of(server);

	ASSERT_TRUE(n);
	ASSERT_EQ(job->fleet.n_attached, 1);
	agent_job_hold(job);
	agent_leave(&world->ranks[0].member);
	chores_go_on();
	WORLD_UNTIL(world, job->state == JOB_OVER);
	ASSERT_EQ(server->n_offered, n);
	agent_job_release(job);
}

/* A server that has been told all is told that they leave, when the one that is not is lost. */
TEST(a_node_whose_ranks_leave_does_not_wait_for_a_lost_server)
{
	struct declared *tensors[TENSORS];
	_cleanup_(world_freep) struct world *world = world_that_accumulates(2, tensors);
	struct agent_job *job = job_at(world, 0);

	(void)attach_again(world, job, 1);
	agent_job_hold(job);
	agent_leave(&world->ranks[0].member);
	WORLD_UNTIL(world, job->departed.unsaid);
	agent_keep_again(job, 1);
	chores_go_on();
	ASSERT_OK(loop_turn(world->loop, 0));
	ASSERT_EQ(job->state, JOB_OVER);
	agent_job_release(job);
}

/* The node whose server the other one is, and the home: or SIZE_MAX. */
static struct agent_job *job_away(struct world *world)
{
	for (unsigned i = 0; i < world->options.n_nodes; i++) {
		struct agent_job *job = job_at(world, i);

		if (!job->fleet.servers[job->fleet.home_number].member.is_self)
			return job;
	}
	return NULL;
}

static unsigned n_declares(const struct agent_job *job, const struct agent_tensor *tensor)
{
	const struct agent_setup *setup;
	unsigned n = 0;

	list_for_each (setup, &job->fleet.setups, link)
		n += setup->tensor == tensor;
	return n;
}

static struct world *world_of_two(void)
{
	struct world *world = world_new(&(struct world_options){
		.n_nodes = 2, .n_local = 1, .resume = true, .max_tensors = 2 * TENSORS });
	const struct declared *tensors[TENSORS];
	char name[16];

	world_form(world);
	for (unsigned i = 0; i < TENSORS; i++) {
		(void)snprintf(name, sizeof(name), "t%u", i);
		tensors[i] = world_declare(world, name, DTYPE_FLOAT32, LEN);
	}
	for (unsigned i = 0; i < TENSORS; i++)
		WORLD_UNTIL(world, tensors[i][0].done && tensors[i][1].done);
	return world;
}

TEST(a_tensor_that_is_new_meanwhile_is_declared_once)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct agent_job *job = job_away(world);
	struct agent_server *server;
	const struct agent_tensor *tensor;
	const struct declared *declared;

	ASSERT_TRUE(job);
	server = attach_again(world, job, job->fleet.home_number);
	declared = world_declare(world, "new", DTYPE_FLOAT32, LEN);
	tensor = agent_tensor_find(job, "new");
	ASSERT_EQ(n_declares(job, tensor), 1);
	while (server->resync.chore.step(&server->resync.chore))
		ASSERT_INT(n_declares(job, tensor), <=, 1);
	chores_forget(&server->resync.chore);
	ASSERT_EQ(n_declares(job, tensor), 1);
	chores_go_on();
	WORLD_UNTIL(world, declared[0].done && declared[1].done);
	ASSERT_STR(declared[0].failure.text, "");
	ASSERT_EQ(declared[0].key, declared[1].key);
}

/* The home is attached again, as if it were fresh, and is still to hear which tensors there are. */
static struct agent_server *attach_fresh(struct world *world, struct agent_job *job)
{
	struct agent_server *server = attach_again(world, job, job->fleet.home_number);

	server->resync.stage = 0;
	server->resync.next = 0;
	server->resync.holds_names = true;
	return server;
}

/* Its ranks would wait for others, which have no part in that. */
TEST(a_fresh_home_hears_at_once_of_a_tensor_on_which_ranks_disagree)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct agent_job *job = job_away(world);
	const struct agent_server *server;
	struct agent_tensor *tensor;
	struct failure conflict;

	ASSERT_TRUE(job);
	server = attach_fresh(world, job);
	(void)world_declare(world, "new", DTYPE_FLOAT32, LEN);
	tensor = agent_tensor_find(job, "new");
	ASSERT_EQ(n_declares(job, tensor), 0);
	(void)failure_set(&conflict, -EINVAL, "ranks disagree");
	agent_setup_declare(tensor, &conflict);
	ASSERT_EQ(n_declares(job, tensor), 1);
	until_told(world, server);
}

/* Or the home would give it a key that another tensor has. */
TEST(a_tensor_that_is_new_waits_until_a_fresh_home_knows_the_others)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct agent_job *job = job_away(world);
	struct agent_server *server;
	const struct agent_tensor *tensor;

	ASSERT_TRUE(job);
	server = attach_fresh(world, job);
	(void)world_declare(world, "new", DTYPE_FLOAT32, LEN);
	tensor = agent_tensor_find(job, "new");
	while (server->resync.holds_names) {
		ASSERT_EQ(n_declares(job, tensor), 0);
		ASSERT_TRUE(server->resync.chore.step(&server->resync.chore));
	}
	while (server->resync.chore.step(&server->resync.chore))
		;
	chores_forget(&server->resync.chore);
	ASSERT_EQ(n_declares(job, tensor), 1);
	chores_go_on();
}

/* Its memory may be another's. */
TEST(what_the_home_says_of_a_tensor_that_is_gone_is_of_no_interest)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct agent_job *job = job_away(world);
	struct agent_tensor *tensor;

	ASSERT_TRUE(job);
	(void)world_declare(world, "new", DTYPE_FLOAT32, LEN);
	tensor = agent_tensor_find(job, "new");
	ASSERT_EQ(n_declares(job, tensor), 1);
	tensor->setup.serial = 0;
	WORLD_UNTIL(world, !n_declares(job, tensor));
	ASSERT_EQ(tensor->key, 0);
}

TEST(a_tensor_that_goes_meanwhile_is_passed_over)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct agent_job *job = job_away(world);
	struct agent_server *server;
	struct agent_tensor *tensor;

	ASSERT_TRUE(job);
	server = attach_again(world, job, job->fleet.home_number);
	ASSERT_TRUE(server->resync.at != &job->tensors.all);
	tensor = container_of(server->resync.at, struct agent_tensor, all_link);
	agent_resync_leave(tensor);
	ASSERT_TRUE(server->resync.at == tensor->all_link.next);
	until_told(world, server);
}
