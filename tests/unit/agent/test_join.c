/* How jobs form, and why they do not. */
#include "agent/round/round.h"
#include "world.h"
#include <stdio.h>

static struct world *new_world(unsigned n_nodes, unsigned n_local)
{
	return world_new(&(struct world_options){
		.n_nodes = n_nodes, .n_local = n_local, .no_servers = n_nodes == 1 });
}

static void expect_refused(struct world *world, uint32_t rank, const struct agent_join *join,
			   int status, const char *words)
{
	struct failure failure = { 0 };

	ASSERT_EQ(world_join(world, rank, join, &failure), status);
	ASSERT_EQ(failure.status, status);
	ASSERT_CONTAINS(failure.text, words);
}

static void expect_join(struct world *world, uint32_t rank)
{
	struct agent_join join = world_join_of(world, rank);
	struct failure failure = { 0 };

	if (world_join(world, rank, &join, &failure))
		test_fail(__FILE__, __LINE__, "rank %u: %s", rank, failure.text);
}

static void expect_ended(struct world *world, uint32_t rank, int status, const char *words)
{
	WORLD_UNTIL(world, world->ranks[rank].ended);
	ASSERT_EQ(world->ranks[rank].failure.status, status);
	ASSERT_CONTAINS(world->ranks[rank].failure.text, words);
}

TEST(impossible_joins_are_refused)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 4);
	struct agent_join good = world_join_of(world, 1), join;
	char secret[JOB_SECRET_MAX + 1] = { 0 };

#define REFUSED(field, value, words)                             \
	do {                                                     \
		join = good;                                     \
		join.field = (value);                            \
		expect_refused(world, 1, &join, -EINVAL, words); \
	} while (0)
	REFUSED(job, "", "name");
	REFUSED(job, "a/b", "name");
	REFUSED(job, "a234567890123456789012345678901234567890123456789012345678901234", "name");
	REFUSED(size, 0, "size 0");
	REFUSED(size, JOB_RANKS_MAX + 1, "size 16385");
	REFUSED(size, UINT32_MAX, "size");
	REFUSED(rank, 4, "rank 4");
	REFUSED(local_rank, 4, "local rank 4");
	REFUSED(local_size, 0, "local size is 0");
	REFUSED(local_size, 3, "does not fit");
	REFUSED(local_size, 5, "does not fit");
	REFUSED(n_nodes, 0, "of 0");
	REFUSED(n_nodes, 5, "of 5");
	REFUSED(n_nodes, 2, "does not fit");
	REFUSED(node, 1, "node 1 of 1");
	REFUSED(part_bytes, 1, "part size 1");
	REFUSED(part_bytes, PART_BYTES_MAX + 1, "part size");
	REFUSED(gpu_reduce, GPU_REDUCE_MAX_ + 1, "no way to reduce GPUs");
	REFUSED(gpu_roots, 0x13, "local rank 4 are to be roots, of 4");
	good.elastic = true;
	good.min_ranks = 1;
	REFUSED(stragglers.quorum, 2, "has no quorum");
	REFUSED(stragglers.async, true, "no async");
	good.elastic = false;
	REFUSED(secret_len, JOB_SECRET_MAX + 1, "secret");
	REFUSED(stragglers.quorum, 5, "a quorum of 5, but size is 4");
	REFUSED(stragglers.quorum_timeout_ms, 1, "in a job that waits for them");
	REFUSED(stragglers.staleness, 1, "in a job that waits for them");
#undef REFUSED
	join = good;
	join.secret = secret;
	join.secret_len = JOB_SECRET_MAX;
	ASSERT_OK(world_join(world, 1, &join, &(struct failure){ 0 }));
	agent_abandon(&world->ranks[1].member, "died");
}

TEST(ranks_of_a_node_must_agree)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 4);
	struct agent_join good = world_join_of(world, 1), join;

	expect_join(world, 0);
#define REFUSED(field, value, status, words)                    \
	do {                                                    \
		join = good;                                    \
		join.field = (value);                           \
		expect_refused(world, 1, &join, status, words); \
	} while (0)
	REFUSED(request_timeout_ms, 1, -EINVAL, "rank 0 says request timeout 60000, rank 1 says 1");
	REFUSED(min_servers, 3, -EINVAL, "rank 0 says servers 0, rank 1 says 3");
	REFUSED(part_bytes, 8192, -EINVAL, "rank 0 says part size 0, rank 1 says 8192");
	REFUSED(force_distributed, true, -EINVAL, "force_distributed");
	REFUSED(gpu_reduce, GPU_REDUCE_HOST, -EINVAL,
		"rank 0 says reduction of GPUs 0, rank 1 says 3");
	REFUSED(gpu_roots, 6, -EINVAL, "rank 0 says roots of GPUs, as bits, 0, rank 1 says 6");
	REFUSED(stragglers.quorum, 2, -EINVAL, "rank 0 says quorum 0, rank 1 says 2");
	REFUSED(stragglers.async, true, -EINVAL, "rank 0 says async 0, rank 1 says 1");
	REFUSED(rank, 0, -EEXIST, "rank 0 is taken already, by pid 1000");
	REFUSED(local_rank, 0, -EEXIST, "rank 0 and rank 1 both say local rank 0");
#undef REFUSED
	join = good;
	join.size = join.local_size = 8;
	expect_refused(world, 1, &join, -EINVAL, "rank 0 says size 4, rank 1 says 8");
	/* The others are not disturbed. */
	for (uint32_t i = 1; i < 4; i++)
		expect_join(world, i);
	for (uint32_t i = 0; i < 4; i++)
		ASSERT_TRUE(world->ranks[i].joined);
	expect_refused(world, 4, &good, -EEXIST, "rank 1 is taken already");
}

TEST(a_name_is_its_owners)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 4);
	struct agent_join join[4];

	/* Two jobs of two ranks: of a user without a secret, and of two users who share one. */
	for (uint32_t i = 0; i < 4; i++) {
		join[i] = world_join_of(world, i);
		join[i].rank = join[i].local_rank = i / 2;
		join[i].size = join[i].local_size = 2;
		join[i].uid = i % 2 ? i : 1000;
	}
	join[1].secret = join[3].secret = "sesame";
	join[1].secret_len = join[3].secret_len = 6;
	for (uint32_t i = 0; i < 4; i++)
		ASSERT_OK(world_join(world, i, &join[i], &(struct failure){ 0 }));
	for (uint32_t i = 0; i < 4; i++)
		ASSERT_TRUE(world->ranks[i].joined);
	/* No secret stands for a user: here for number 1000. */
	join[2].secret = "\xe8\x03\0";
	join[2].secret_len = 4;
	join[2].timeout_ms = 30;
	ASSERT_OK(world_join(world, 4, &join[2], &(struct failure){ 0 }));
	/* To the same user, it has been mistyped, most likely; another hears nothing of it. */
	expect_ended(world, 4, -ETIMEDOUT,
		     "rank 0 did not join within 30 ms; this user has a job of that name here with "
		     "another secret");
	join[2].uid = 1001;
	ASSERT_OK(world_join(world, 5, &join[2], &(struct failure){ 0 }));
	expect_ended(world, 5, -ETIMEDOUT, "rank 0 did not join within 30 ms");
	ASSERT_TRUE(!strstr(world->ranks[5].failure.text, "another secret"));
}

TEST(missing_local_ranks_are_named)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 4);

	for (uint32_t i = 1; i < 3; i++) {
		struct agent_join join = world_join_of(world, i);

		join.timeout_ms = 30;
		ASSERT_OK(world_join(world, i, &join, &(struct failure){ 0 }));
	}
	for (uint32_t i = 1; i < 3; i++)
		expect_ended(world, i, -ETIMEDOUT, "ranks 0, 3 did not join within 30 ms");
	world_form(world);
}

/* The first to hear of a job's end finds rank 2 dead, and rank 3 on its way out, before these have heard. */
static void on_ended_before_others(struct agent_member *member, uint64_t number,
				   const struct failure *failure)
{
	struct rank *rank = container_of(member, struct rank, member);

	rank->ended = true;
	rank->failure = *failure;
	agent_abandon(&rank->world->ranks[2].member, "died");
	agent_leave(&rank->world->ranks[3].member);
}

TEST(ranks_go_while_an_elastic_job_that_never_formed_ends)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 4, .no_servers = true, .min_ranks = 1 });

	for (uint32_t i = 1; i < 4; i++) {
		struct agent_join join = world_join_of(world, i);

		join.timeout_ms = 30;
		ASSERT_OK(world_join(world, i, &join, &(struct failure){ 0 }));
	}
	world->ranks[1].member.ended = on_ended_before_others;
	expect_ended(world, 1, -ETIMEDOUT, "rank 0 did not join within 30 ms");
	WORLD_UNTIL(world, world->ranks[3].left);
	ASSERT_TRUE(!world->ranks[2].ended && !world->ranks[2].member.job);
	world_form(world);
}

/* A job that is formed has its members by their ranks, and not by what they said when they joined. */
TEST(ranks_go_from_where_they_are_by_their_ranks)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 3);

	for (uint32_t i = 0; i < 3; i++) {
		struct agent_join join = world_join_of(world, i);
		struct failure failure = { 0 };

		join.local_rank = 2 - i;
		ASSERT_OK(world_join(world, i, &join, &failure));
	}
	WORLD_UNTIL(world, world->ranks[0].joined);
	agent_abandon(&world->ranks[0].member, "died");
	expect_ended(world, 1, -EPIPE, "rank 0 (pid 1000)");
	expect_ended(world, 2, -EPIPE, "rank 0 (pid 1000)");
	ASSERT_TRUE(!world->ranks[0].ended);
}

/*
 * A rank that has left is missing when the others come back: from when these are enough, they have their places by their ranks,
 * and what another says of its own place counts no more.
 */
TEST(no_rank_comes_back_to_a_place_that_is_taken)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 2, .n_local = 3, .resume = true });
	const struct agent_job *job;
	struct agent_member stranger;
	struct agent_join join;
	struct failure failure = { 0 };
	uint64_t run;

	for (uint32_t i = 0; i < world->size; i++) {
		join = world_join_of(world, i);
		join.local_rank = (join.local_rank + 1) % 3;
		ASSERT_OK(world_join(world, i, &join, &failure));
	}
	for (uint32_t i = 0; i < world->size; i++)
		WORLD_UNTIL(world, world->ranks[i].joined);
	agent_leave(&world->ranks[4].member);
	WORLD_UNTIL(world, world->ranks[4].left);
	run = world->ranks[0].number;
	world_restart(world, 0);
	for (uint32_t i = 0; i < 4; i += 2) {
		join = world_join_of(world, i);
		join.local_rank = (join.local_rank + 1) % 3;
		ASSERT_OK(world_resume(world, i, &join, &failure));
	}
	job = world->ranks[0].member.job;
	ASSERT_TRUE(job->state == JOB_FORMING && job->layout.size);
	stranger = world->ranks[0].member;
	join = world_join_of(world, 5);
	join.node = join.local_rank = 0;
	ASSERT_EQ(agent_resume(world->nodes[0].agent, &stranger, &join, run, world->ranks[0].ledger,
			       &failure),
		  -EEXIST);
	for (uint32_t i = 0; i < 4; i += 2)
		WORLD_UNTIL(world, world->ranks[i].joined);
}

TEST(rank_that_gives_up_makes_room)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 2);

	expect_join(world, 0);
	agent_abandon(&world->ranks[0].member, "died");
	expect_join(world, 1);
	agent_leave(&world->ranks[1].member);
	ASSERT_TRUE(world->ranks[1].left);
	world_form(world);
}

TEST(jobs_and_tensors_are_limited)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 2, .no_servers = true, .max_jobs = 1, .max_tensors = 2 });
	struct declared declared[3];
	struct agent_join join;
	struct failure failure;

	expect_join(world, 0);
	join = world_join_of(world, 1);
	join.job = "other";
	expect_refused(world, 1, &join, -EDQUOT, "1 jobs");
	expect_join(world, 1);
	ASSERT_OK(declared_make(&declared[0], &world->ranks[0], "a", DTYPE_INT8, 1, &failure));
	ASSERT_OK(declared_make(&declared[1], &world->ranks[1], "b", DTYPE_INT8, 1, &failure));
	ASSERT_EQ(declared_make(&declared[2], &world->ranks[0], "c", DTYPE_INT8, 1, &failure),
		  -EDQUOT);
	ASSERT_OK(declared_make(&declared[2], &world->ranks[0], "b", DTYPE_INT8, 1, &failure));
	ASSERT_TRUE(declared[2].done && declared[1].done && !declared[0].done);
	ASSERT_TRUE(declared[2].key == declared[1].key);
	agent_abandon(&world->ranks[0].member, "died");
}

TEST(operators_see_who_is_missing)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 3);
	_cleanup_(freep) struct agent_job_info *jobs = NULL;
	_cleanup_(freep) struct agent_rank_info *ranks = NULL;
	_cleanup_(freep) struct agent_tensor_info *tensors = NULL;
	struct declared *declared;
	struct asked asked[2];
	uint64_t total;
	size_t n;

	expect_join(world, 2);
	ASSERT_OK(agent_jobs(world->nodes[0].agent, &jobs, &n));
	ASSERT_EQ(n, 1);
	ASSERT_STR(jobs[0].name, "job");
	ASSERT_STR(jobs[0].state, "forming");
	ASSERT_STR(jobs[0].waiting_for, "local ranks 0, 1");
	ASSERT_OK(agent_ranks(world->nodes[0].agent, "job", &ranks, &n));
	ASSERT_EQ(n, 3);
	ASSERT_STR(ranks[0].state, "missing");
	ASSERT_STR(ranks[2].state, "here");
	ASSERT_EQ(agent_ranks(world->nodes[0].agent, "none", &ranks, &n), -ENOENT);
	expect_join(world, 1);
	expect_join(world, 0);

	declared = world_declare(world, "layer1.weight", DTYPE_FLOAT32, 1);
	for (uint32_t i = 0; i < 2; i++) {
		asked[i] = asked_of(OPERATION_BARRIER, 0, NULL, 0, NULL, 0);
		asked_submit(&asked[i], &declared[i], 1);
	}
	freep(&jobs);
	ASSERT_OK(agent_jobs(world->nodes[0].agent, &jobs, &n));
	ASSERT_STR(jobs[0].state, "running");
	ASSERT_EQ(jobs[0].n_local, 3);
	ASSERT_CONTAINS(jobs[0].waiting_for, "rank 2 (tensor layer1.weight, round 1) for ");
	ASSERT_OK(agent_tensors(world->nodes[0].agent, "job", 0, &tensors, &n, &total));
	ASSERT_EQ(n, 0);
	ASSERT_EQ(total, 1);
	freep(&tensors);
	ASSERT_OK(agent_tensors(world->nodes[0].agent, "job", 10, &tensors, &n, &total));
	ASSERT_EQ(n, 1);
	ASSERT_STR(tensors[0].name, "layer1.weight");
	ASSERT_CONTAINS(tensors[0].waiting_for, "rank 2");
	agent_abandon(&world->ranks[2].member, "died");
	WORLD_UNTIL(world, asked[0].done && asked[1].done);
}

/* A job may have any number of open rounds: what it waits for is told by the first of them. */
TEST(what_a_job_waits_for_is_told_by_a_few_of_its_rounds)
{
	_cleanup_(world_freep) struct world *world = new_world(1, 2);
	struct agent_job_info info;
	struct declared *declared;
	struct asked asked[1000];

	world_form(world);
	declared = world_declare(world, "a", DTYPE_FLOAT32, 1);
	for (unsigned i = 0; i < ARRAY_SIZE(asked); i++) {
		asked[i] = asked_of(OPERATION_BARRIER, 0, NULL, 0, NULL, 0);
		asked_submit(&asked[i], &declared[0], i + 1);
	}
	/* Were it looked at, it would be the oldest. */
	list_last(&world->ranks[0].member.job->rounds, struct agent_round, job_link)
		->times.started_ns = 1;
	ASSERT_TRUE(agent_member_job(&world->ranks[0].member, &info));
	ASSERT_CONTAINS(info.waiting_for, "rank 1 (tensor a, round 1) for ");
	agent_abandon(&world->ranks[1].member, "died");
	for (unsigned i = 0; i < ARRAY_SIZE(asked); i++)
		WORLD_UNTIL(world, asked[i].done);
}

/* -- Several nodes ----------------------------------------------------------------------------------------------------- */

TEST_FULL_TIER(missing_ranks_of_other_nodes_are_named,
	       "a deadline of 1 s, within which all nodes must have spoken")
{
	_cleanup_(world_freep) struct world *world = new_world(2, 2);

	for (uint32_t i = 0; i < 4; i++) {
		struct agent_join join = world_join_of(world, i);

		join.timeout_ms = 1000;
		if (i != 3)
			ASSERT_OK(world_join(world, i, &join, &(struct failure){ 0 }));
	}
	for (uint32_t i = 0; i < 3; i++) {
		WORLD_UNTIL(world, world->ranks[i].ended);
		ASSERT_EQ(world->ranks[i].failure.status, -ETIMEDOUT);
	}
	/* Told by the home server, also those of node 1, who know that they lack one. */
	for (uint32_t i = 0; i < 3; i++)
		ASSERT_CONTAINS(world->ranks[i].failure.text, "rank 3 has not joined within");
	world_form(world);
}

TEST(nodes_must_agree)
{
	_cleanup_(world_freep) struct world *world = new_world(2, 1);
	struct agent_join join = world_join_of(world, 1);

	expect_join(world, 0);
	join.size = 3;
	join.local_size = 2;
	ASSERT_OK(world_join(world, 1, &join, &(struct failure){ 0 }));
	for (uint32_t i = 0; i < 2; i++) {
		expect_ended(world, i, -EINVAL, "size 3");
		expect_ended(world, i, -EINVAL, "size 2");
	}
	world_form(world);
}

TEST(a_node_with_another_secret_is_not_of_the_job)
{
	_cleanup_(world_freep) struct world *world = new_world(2, 1);
	struct agent_join join = world_join_of(world, 0);
	struct agent_join wrong = world_join_of(world, 1);

	join.secret = "sesame";
	join.secret_len = 6;
	wrong.secret = "sesamo";
	wrong.secret_len = 6;
	wrong.timeout_ms = 300;
	ASSERT_OK(world_join(world, 0, &join, &(struct failure){ 0 }));
	/* Has arrived at the home before the other. */
	for (int i = 0; i < 20; i++)
		ASSERT_OK(loop_turn(world->loop, 10));
	ASSERT_OK(world_join(world, 1, &wrong, &(struct failure){ 0 }));
	expect_ended(world, 1, -ETIMEDOUT, "this user has a job of that name with another secret");
	ASSERT_TRUE(!world->ranks[0].ended);
	join.rank = join.node = 1;
	ASSERT_OK(world_join(world, 1, &join, &(struct failure){ 0 }));
	WORLD_UNTIL(world, world->ranks[0].joined && world->ranks[1].joined);
}

TEST(too_few_servers)
{
	_cleanup_(world_freep) struct world *world = new_world(2, 1);
	struct agent_join join = world_join_of(world, 0);

	join.min_servers = 3;
	ASSERT_OK(world_join(world, 0, &join, &(struct failure){ 0 }));
	expect_ended(world, 0, -ETIMEDOUT, "3 servers wanted, 2 there");
	world_form(world);
}

TEST(rank_dies_while_other_nodes_are_awaited)
{
	_cleanup_(world_freep) struct world *world = new_world(2, 2);

	expect_join(world, 0);
	expect_join(world, 2);
	for (int i = 0; i < 20; i++)
		ASSERT_OK(loop_turn(world->loop, 10));
	agent_abandon(&world->ranks[2].member, "died");
	expect_join(world, 1);
	expect_join(world, 3);
	for (int i = 0; i < 20; i++)
		ASSERT_OK(loop_turn(world->loop, 10));
	ASSERT_TRUE(!world->ranks[0].joined && !world->ranks[0].ended && !world->ranks[1].joined);
	/* It comes back, and the job is complete. */
	expect_join(world, 2);
	for (uint32_t i = 0; i < 4; i++)
		WORLD_UNTIL(world, world->ranks[i].joined);
}

/* In every state of the forming job, one rank dies: the others go on or are told, and the name is good again. */
TEST(rank_dies_at_any_moment)
{
	_cleanup_(world_freep) struct world *world = new_world(2, 2);

	for (int n_turns = 0; n_turns < 12; n_turns++) {
		for (uint32_t i = 0; i < 4; i++)
			expect_join(world, i);
		for (int i = 0; i < n_turns; i++)
			ASSERT_OK(loop_turn(world->loop, 1));
		for (uint32_t i = 0; i < 4; i++)
			agent_abandon(&world->ranks[i].member, "died");
		world_form(world);
		for (uint32_t i = 0; i < 4; i++)
			agent_leave(&world->ranks[i].member);
		for (uint32_t i = 0; i < 4; i++)
			WORLD_UNTIL(world, world->ranks[i].left);
	}
}

/* Whoever says that thousands are to come keeps nobody busy with looking for them. */
TEST_TIMEOUT(many_missing_ranks_are_named_quickly, 20)
{
	struct world_options options = { .n_nodes = 1, .n_local = 1, .no_servers = true };
	_cleanup_(world_freep) struct world *world = world_new(&options);
	struct agent_join join = world_join_of(world, 0);
	struct failure failure;

	join.size = join.local_size = JOB_RANKS_MAX;
	join.rank = join.local_rank = 2;
	join.timeout_ms = 1;
	for (unsigned i = 0; i < 200; i++) {
		ASSERT_OK(world_join(world, 0, &join, &failure));
		WORLD_UNTIL(world, world->ranks[0].ended);
		ASSERT_CONTAINS(world->ranks[0].failure.text, "ranks 0, 1, 3, 4");
	}
}

/* What one sum reads of all ranks here is bounded, and others wait no longer for it. */
TEST(parts_of_many_ranks_are_smaller)
{
	for (unsigned n_local = 2; n_local <= 64; n_local *= 4) {
		_cleanup_(world_freep) struct world *world =
			world_new(&(struct world_options){ .n_nodes = 1,
							   .n_local = n_local,
							   .no_servers = true,
							   .part_bytes = PART_BYTES_MAX });

		world_form(world);
		ASSERT_EQ(list_first(&world->nodes[0].agent->jobs, struct agent_job, link)
				  ->part_bytes,
			  PART_SUM_MAX / n_local);
	}
}
