/* Jobs that outlive their daemons' processes: what the agent keeps for servers, and the servers that it asks in. */
#include "agent/round/part.h"
#include "agent/servers/setup.h"
#include "held.h"
#include "world.h"
#include <stdio.h>

static struct agent_job *job_of(struct world *world)
{
	struct agent_job *job = list_first(&world->nodes[0].agent->jobs, struct agent_job, link);

	ASSERT_TRUE(job && job->retention.keeps && job->state == JOB_RUNNING);
	return job;
}

static void form(struct world *world, struct stragglers stragglers)
{
	struct failure failure = { 0 };

	for (uint32_t rank = 0; rank < world->size; rank++) {
		struct agent_join join = world_join_of(world, rank);

		join.stragglers = stragglers;
		if (world_join(world, rank, &join, &failure))
			test_fail(__FILE__, __LINE__, "%s", failure.text);
	}
	for (uint32_t rank = 0; rank < world->size; rank++) {
		WORLD_UNTIL(world, world->ranks[rank].joined || world->ranks[rank].ended);
		ASSERT_STR(world->ranks[rank].failure.text, "");
	}
}

/* Room for more results than at first, by that many. */
static void make_room(struct world *world, uint32_t more)
{
	struct agent_job *job = job_of(world);

	ASSERT_OK(agent_quota_for(job, ledger_results_first(job->resumption.ledger) + more));
	ASSERT_EQ(world->ranks[0].charged,
		  ledger_results_bytes(job->resumption.ledger,
				       ledger_results_allowed(job->resumption.ledger)));
	ASSERT_TRUE(world->ranks[0].charged);
}

/* As if as long had gone by as the job waits before it looks what it needs. */
static void look(struct agent_job *job)
{
	ASSERT_TRUE(job->retention.results_timer.loop);
	loop_timer_cancel(&job->retention.results_timer);
	job->retention.results_timer.expired(&job->retention.results_timer);
}

/* What accumulates stays retained. */
static void accumulate(struct world *world, const char *name, struct asked *ret_asked)
{
	static float input[100], output[100];

	*ret_asked = asked_of(OPERATION_ACCUMULATE, REDUCTION_SUM, input, 100, output, 100);
	asked_submit(ret_asked, world_declare(world, name, DTYPE_FLOAT32, 100), 1);
	WORLD_UNTIL(world, ret_asked->done);
}

TEST(a_round_fails_when_its_results_have_no_room)
{
	enum { PART = 8 << 20 };
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 1,
						   .distributed = true,
						   .resume = true,
						   .part_bytes = PART,
						   .target = UINT64_C(10) * 2 * PART });
	struct asked asked;
	uint32_t first, most, n = 0;
	char name[16];

	form(world, (struct stragglers){ .async = true });
	first = ledger_results_first(job_of(world)->resumption.ledger);
	ASSERT_EQ(ledger_results_allowed(job_of(world)->resumption.ledger), first);
	do {
		(void)snprintf(name, sizeof(name), "t%u", n++);
		accumulate(world, name, &asked);
		ASSERT_INT(n, <, 100);
	} while (!asked.failure.status);
	/* Memory for a result is a little more than two parts. */
	most = ledger_results_allowed(job_of(world)->resumption.ledger);
	ASSERT_TRUE(most > first && most <= first + 10);
	ASSERT_EQ(n, most + 1);
	ASSERT_EQ(asked.failure.status, -EDQUOT);
	ASSERT_TRUE(strstr(asked.failure.text, "session_quota has no room for its result"));
	ASSERT_EQ(job_of(world)->state, JOB_RUNNING);
}

static int on_charge_more_refused(struct agent_member *member, uint64_t bytes)
{
	(void)member;
	(void)bytes;
	return -EDQUOT;
}

TEST(where_one_rank_has_no_room_no_other_is_charged)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 2, .distributed = true, .resume = true });
	struct agent_job *job;
	uint32_t first;

	world_form(world);
	job = job_of(world);
	world->ranks[1].member.charge_more = on_charge_more_refused;
	first = ledger_results_first(job->resumption.ledger);
	ASSERT_EQ(agent_quota_for(job, first + 1), -EDQUOT);
	ASSERT_EQ(world->ranks[0].charged, 0);
	ASSERT_EQ(ledger_results_allowed(job->resumption.ledger), first);
}

TEST(after_a_restart_no_more_is_charged_than_holds_something)
{
	enum { PART = 8 << 20 };
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 1,
						   .distributed = true,
						   .resume = true,
						   .part_bytes = PART });
	struct agent_join join = world_join_of(world, 0);
	struct failure failure = { 0 };
	struct asked asked;
	uint32_t first, n, results[5];
	char name[16];

	join.stragglers = (struct stragglers){ .async = true };
	form(world, join.stragglers);
	first = ledger_results_first(job_of(world)->resumption.ledger);
	for (n = 0; n < 2 * first; n++) {
		(void)snprintf(name, sizeof(name), "t%u", n);
		accumulate(world, name, &asked);
		ASSERT_STR(asked.failure.text, "");
	}
	ASSERT_TRUE(ledger_results_allowed(job_of(world)->resumption.ledger) > 2 * first);
	/* Some memory holds nothing any more. */
	for (n = 0; n < ARRAY_SIZE(results); n++)
		results[n] = ledger_result_take(job_of(world)->resumption.ledger, false);
	while (n--)
		ledger_result_free(job_of(world)->resumption.ledger, results[n]);
	world_restart(world, 0);
	if (world_resume(world, 0, &join, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	WORLD_UNTIL(world, world->ranks[0].joined || world->ranks[0].ended);
	ASSERT_STR(world->ranks[0].failure.text, "");
	ASSERT_EQ(ledger_results_allowed(job_of(world)->resumption.ledger), 2 * first);
	ASSERT_EQ(world->ranks[0].charged,
		  ledger_results_bytes(job_of(world)->resumption.ledger, 2 * first));
	/* What the process before has left in memory that holds nothing goes back. */
	for (n = 0; ledger_results_cool(job_of(world)->resumption.ledger, 0); n++) {
		ASSERT_INT(n, <, ARRAY_SIZE(results));
		look(job_of(world));
	}
	/* And is looked at as what came later is. */
	look(job_of(world));
	ASSERT_EQ(ledger_results_allowed(job_of(world)->resumption.ledger), 2 * first);
	ASSERT_TRUE(job_of(world)->retention.results_timer.loop);
}

TEST(room_that_is_not_needed_goes_back_for_all)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 3, .distributed = true, .resume = true });
	struct agent_job *job;
	uint64_t before;

	world_form(world);
	make_room(world, 1000);
	job = job_of(world);
	before = world->ranks[0].charged;
	/* A session that was charged for none, and has no room. */
	world->ranks[0].charged = 0;
	world->options.target = 1;
	while (ledger_results_allowed(job->resumption.ledger) >
	       ledger_results_first(job->resumption.ledger)) {
		uint32_t was = ledger_results_allowed(job->resumption.ledger);

		look(job);
		ASSERT_INT(was - ledger_results_allowed(job->resumption.ledger), <=, 256);
		for (unsigned rank = 1; rank < 3; rank++)
			ASSERT_EQ(world->ranks[rank].charged,
				  ledger_results_bytes(
					  job->resumption.ledger,
					  ledger_results_allowed(job->resumption.ledger)));
	}
	ASSERT_INT(world->ranks[2].charged, <, before);
	ASSERT_EQ(world->ranks[2].charged, 0);
	ASSERT_TRUE(!job->retention.results_timer.loop);
}

TEST(who_regroups_is_charged_for_its_new_ledger)
{
	_cleanup_(world_freep) struct world *world =
		world_new(&(struct world_options){ .n_nodes = 1,
						   .n_local = 2,
						   .distributed = true,
						   .resume = true,
						   .min_ranks = 1,
						   .max_ranks = 4 });

	world_form(world);
	make_room(world, 1000);
	ASSERT_TRUE(world->ranks[1].charged);
	for (unsigned i = 0; i < 2; i++)
		agent_regroup(&world->ranks[i].member);
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, world->ranks[i].n_joined == 2 || world->ranks[i].ended);
		ASSERT_STR(world->ranks[i].failure.text, "");
		ASSERT_EQ(world->ranks[i].charged, 0);
	}
}

/*
 * Nobody keeps an accumulate for others, so it is released before it is stored. A server numbers results without end, and no
 * more than LEDGER_RESULTS_MAX of them may be behind the last that was released.
 */
TEST(a_job_may_do_nothing_but_accumulate)
{
	enum { PARTS = 1024, PER_PART = 1024, N = PARTS * PER_PART };
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 1, .distributed = true, .resume = true });
	unsigned n_rounds = LEDGER_RESULTS_MAX / PARTS + 2;
	static float input[N], output[N];
	struct declared *declared;

	form(world, (struct stragglers){ .async = true });
	declared = world_declare(world, "sum", DTYPE_FLOAT32, N);
	for (unsigned i = 0; i < N; i++)
		input[i] = (float)(i % 7);
	for (unsigned round = 1; round <= n_rounds; round++) {
		struct asked asked =
			asked_of(OPERATION_ACCUMULATE, REDUCTION_SUM, input, N, output, N);
		const struct agent_server *server = &job_of(world)->fleet.servers[0];

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

/* -- Memory that is scarce ------------------------------------------------------------------------------------------ */

#define PARTS 8 /* of 4096 bytes, of a tensor that has more than one */

static uint32_t taken[LEDGER_RESULTS_MAX], n_taken;

/* All memory of results, but for so many. */
static void take_results(struct agent_job *job, uint32_t n_departed)
{
	ASSERT_OK(agent_quota_for(job, ledger_n_results(job->resumption.ledger)));
	for (n_taken = 0; n_taken < ledger_n_results(job->resumption.ledger) - n_departed;
	     n_taken++) {
		taken[n_taken] = ledger_result_take(job->resumption.ledger, false);
		ASSERT_INT(taken[n_taken], !=, LEDGER_NO_RESULT);
	}
}

/* So many parts have a result that waits for memory, from that server. */
static size_t n_starved_of(const struct agent_job *job, uint32_t server)
{
	const struct agent_part *part;
	size_t n = 0;

	list_for_each (part, &job->retention.starved, wait)
		n += part->server == server;
	return n;
}

static size_t n_starved(const struct agent_job *job)
{
	size_t n = 0;

	for (uint32_t i = 0; i < job->fleet.n_servers; i++)
		n += n_starved_of(job, i);
	return n;
}

static void fail(struct asked *asked)
{
	agent_round_fail(asked->base.in, &(struct failure){ .status = -EIO, .text = "failed" },
			 false);
}

/* Submits tensors of one rank, of so many elements each, whose results all wait for memory. */
static void starve(struct world *world, struct asked *asked, const uint64_t *n_elements, unsigned n)
{
	static float input[PARTS * 1024], output[3][PARTS * 1024];
	size_t n_parts = 0;
	char name[16];

	world_form(world);
	take_results(job_of(world), 0);
	for (unsigned i = 0; i < n; i++) {
		(void)snprintf(name, sizeof(name), "t%u", i);
		asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, input, n_elements[i],
				    output[i], n_elements[i]);
		asked_submit(&asked[i], world_declare(world, name, DTYPE_FLOAT32, n_elements[i]),
			     1);
		n_parts += (n_elements[i] + 1023) / 1024;
		WORLD_UNTIL(world, n_starved(job_of(world)) == n_parts);
	}
}

static struct world *world_of_one(void)
{
	return world_new(&(struct world_options){ .n_nodes = 1,
						  .n_local = 1,
						  .distributed = true,
						  .resume = true,
						  .part_bytes = 4096 });
}

static void give_results(struct agent_job *job)
{
	while (n_taken)
		agent_keep_free(job, taken[--n_taken]);
}

TEST(a_round_that_fails_waits_for_no_memory)
{
	_cleanup_(world_freep) struct world *world = world_of_one();
	struct agent_job *job;
	struct asked asked[2];

	starve(world, asked, (uint64_t[]){ 100, 100 }, 2);
	job = job_of(world);
	fail(&asked[0]);
	WORLD_UNTIL(world, asked[0].done);
	ASSERT_EQ(asked[0].failure.status, -EIO);
	ASSERT_EQ(n_starved(job), 1);
	/* The next that is free is for the one that goes on. */
	agent_keep_free(job, taken[--n_taken]);
	WORLD_UNTIL(world, asked[1].done);
	ASSERT_STR(asked[1].failure.text, "");
	give_results(job);
}

TEST(a_part_that_finds_no_memory_stays_the_first)
{
	_cleanup_(world_freep) struct world *world = world_of_one();
	struct agent_job *job;
	struct asked asked[3];

	starve(world, asked, (uint64_t[]){ 100, 100, 100 }, 3);
	job = job_of(world);
	/* The others are looked at, and there is none for them. */
	fail(&asked[0]);
	for (unsigned i = 1; i < 3; i++) {
		ASSERT_EQ(n_starved(job), 3 - i);
		ASSERT_TRUE(list_first(&job->retention.starved, struct agent_part, wait)->round ==
			    asked[i].base.in);
		agent_keep_free(job, taken[--n_taken]);
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
	give_results(job);
}

/* Memory has become free, and is not given yet to those that wait. */
TEST(a_part_has_its_memory_behind_those_that_came_before)
{
	_cleanup_(world_freep) struct world *world = world_of_one();
	static float input[100], output[100];
	struct agent_job *job;
	struct asked asked[3];

	starve(world, asked, (uint64_t[]){ PARTS * 1024, PARTS * 1024 }, 2);
	job = job_of(world);
	job->retention.feeding = true;
	while (n_taken)
		ledger_result_free(job->resumption.ledger, taken[--n_taken]);
	asked[2] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, input, 100, output, 100);
	asked_submit(&asked[2], world_declare(world, "t2", DTYPE_FLOAT32, 100), 1);
	WORLD_UNTIL(world, asked[2].done || n_starved(job) == 2 * PARTS + 1);
	ASSERT_TRUE(!asked[2].done);
	job->retention.feeding = false;
	agent_keep_feed(job);
	for (unsigned i = 0; i < 3; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
}

/* Each is copied to where it is kept. */
TEST(parts_that_wait_for_memory_have_it_some_in_a_turn)
{
	_cleanup_(world_freep) struct world *world = world_of_one();
	struct agent_job *job;
	struct asked asked[3];

	starve(world, asked, (uint64_t[]){ PARTS * 1024, PARTS * 1024, PARTS * 1024 }, 3);
	job = job_of(world);
	while (n_taken)
		ledger_result_free(job->resumption.ledger, taken[--n_taken]);
	agent_keep_feed(job);
	ASSERT_EQ(n_starved(job), 3 * PARTS - 16);
	for (unsigned i = 0; i < 3; i++) {
		WORLD_UNTIL(world, asked[i].done);
		ASSERT_STR(asked[i].failure.text, "");
	}
}

void __real_agent_round_part_done(struct agent_round *round);
void __wrap_agent_round_part_done(struct agent_round *round);

static bool frees; /* the next time that a part has ended */

void __wrap_agent_round_part_done(struct agent_round *round)
{
	struct agent_job *job = round->job;

	__real_agent_round_part_done(round);
	if (frees) {
		frees = false;
		agent_keep_free(job, taken[--n_taken]);
	}
}

/* The next that waits for memory is the round's very next part, which it is about to end itself. */
TEST(memory_that_becomes_free_while_a_round_fails_is_for_others)
{
	_cleanup_(world_freep) struct world *world = world_of_one();
	struct agent_job *job;
	struct asked asked[2];

	starve(world, asked, (uint64_t[]){ PARTS * 1024, 100 }, 2);
	job = job_of(world);
	frees = true;
	fail(&asked[0]);
	ASSERT_TRUE(!frees);
	ASSERT_EQ(n_starved(job), 0);
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(world, asked[i].done);
	ASSERT_EQ(asked[0].failure.status, -EIO);
	ASSERT_STR(asked[1].failure.text, "");
	give_results(job);
}

/*
 * Of a job whose rounds are decided on by all nodes: what the first has of a result is held until then. Its other parts, and the
 * second tensor's, find no memory.
 */
static struct agent_job *form_held(struct world *world, struct asked (*asked)[2])
{
	static float input[2][PARTS * 1024], output[2][2][PARTS * 1024];
	struct agent_job *job;

	world_form(world);
	job = job_of(world);
	take_results(job, 1);
	for (unsigned i = 0; i < 2; i++) {
		uint64_t n = i ? 100 : PARTS * 1024;
		struct declared *declared = world_declare(world, i ? "b" : "a", DTYPE_FLOAT32, n);

		for (unsigned rank = 0; rank < 2; rank++) {
			asked[i][rank] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, input[rank],
						  n, output[i][rank], n);
			asked[i][rank].base.membership = 1;
			asked_submit(&asked[i][rank], &declared[rank], 1);
		}
		WORLD_UNTIL(world, n_starved(job) == PARTS - 1 + i);
	}
	ASSERT_EQ(asked[0][0].base.in->n_held, 1);
	return job;
}

static struct world *world_of_two(void)
{
	return world_new(&(struct world_options){ .n_nodes = 2,
						  .n_local = 1,
						  .resume = true,
						  .part_bytes = 4096,
						  .min_ranks = 1,
						  .max_ranks = 2 });
}

/* What comes from another node: what a server in this process has made is charged already. */
TEST(results_that_wait_for_memory_are_charged)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	const struct agent_part *part;
	struct asked asked[2][2];
	struct agent_job *job = form_held(world, asked);
	uint64_t len = 0;

	list_for_each (part, &job->retention.starved, wait) {
		ASSERT_EQ(part->state, PART_STARVED);
		ASSERT_EQ(!part->block->quota, !peer_is_self(part->send_queue->peer));
		len += part->block->quota ? 0 : part->block->len;
	}
	ASSERT_INT(len, >, 0);
	ASSERT_INT(quota_used(&job->memory.held), >=, len);
	/* world_free() sees whether all of it is given back. */
	give_results(job);
	for (unsigned i = 0; i < 2; i++)
		WORLD_UNTIL(world, asked[i][0].done);
}

TEST(memory_of_a_round_that_fails_is_for_others)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct asked asked[2][2];
	struct agent_job *job = form_held(world, asked);

	fail(&asked[0][0]);
	WORLD_UNTIL(world, asked[0][0].done && asked[1][0].done);
	ASSERT_EQ(asked[0][0].failure.status, -EIO);
	ASSERT_STR(asked[1][0].failure.text, "");
	give_results(job);
}

/* Parts of two servers come in any order. From here on those of this one wait in front. */
static void put_first(struct agent_job *job, uint32_t server)
{
	struct agent_part *part, *next;

	list_for_each_safe (part, next, &job->retention.starved, wait) {
		if (part->server != server)
			continue;
		list_remove(&part->wait);
		list_push_front(&job->retention.starved, &part->wait);
	}
}

TEST(what_was_held_of_a_lost_server_is_room_for_others)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	const struct agent_part *part;
	struct asked asked[2][2];
	struct agent_job *job = form_held(world, asked);
	const struct agent_round *round = asked[0][0].base.in;
	uint32_t lost = UINT32_MAX;
	size_t n;

	list_for_each (part, &round->parts, link)
		if (part->state == PART_HELD)
			lost = part->server;
	ASSERT_INT(lost, <, 2);
	n = n_starved_of(job, !lost);
	ASSERT_TRUE(n && n_starved_of(job, lost));
	put_first(job, lost);
	agent_keep_lost(job, lost, "a test cuts it off");
	ASSERT_EQ(n_starved_of(job, lost), 0);
	ASSERT_EQ(n_starved_of(job, !lost), n - 1);
}

static struct task *posted;
static struct pool *posted_to;
static bool holds;

int __real_pool_post(struct pool *pool, struct task *task);
int __wrap_pool_post(struct pool *pool, struct task *task);

int __wrap_pool_post(struct pool *pool, struct task *task)
{
	if (!holds)
		return __real_pool_post(pool, task);
	ASSERT_TRUE(!posted);
	posted = task;
	posted_to = pool;
	return 0;
}

/* Returns the part of a round whose result is being copied to where it is held. */
static const struct agent_part *copy_one(struct agent_job *job, const struct agent_round *round)
{
	const struct agent_part *part;

	holds = true;
	agent_keep_free(job, taken[--n_taken]);
	holds = false;
	part = posted ? container_of(posted, struct agent_part, task) : NULL;
	ASSERT_TRUE(part && part->round == round && part->posted && part->state != PART_HELD);
	ASSERT_EQ(round->n_held, 1);
	return part;
}

/* There is memory for all results. */
static void end_well(struct world *world, struct asked (*asked)[2])
{
	give_results(job_of(world));
	for (unsigned i = 0; i < 2; i++) {
		WORLD_UNTIL(world, asked[i][0].done);
		ASSERT_STR(asked[i][0].failure.text, "");
	}
}

/* However long it is: it is the pool that copies it. */
TEST(what_is_held_is_copied_in_the_pool_and_counts_then)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct asked asked[2][2];
	struct agent_job *job = form_held(world, asked);
	const struct agent_round *round = asked[0][0].base.in;
	const struct agent_part *part = copy_one(job, round);

	ASSERT_OK(__real_pool_post(posted_to, TAKE_PTR(posted)));
	WORLD_UNTIL(world, part->state == PART_HELD);
	ASSERT_EQ(round->n_held, 2);
	end_well(world, asked);
}

TEST(what_is_copied_when_its_server_is_lost_is_held_no_more)
{
	_cleanup_(world_freep) struct world *world = world_of_two();
	struct asked asked[2][2];
	struct agent_job *job = form_held(world, asked);
	const struct agent_round *round = asked[0][0].base.in;
	const struct agent_part *part = copy_one(job, round);

	agent_keep_lost(job, part->server, "a test cuts it off");
	ASSERT_TRUE(part->posted);
	ASSERT_OK(__real_pool_post(posted_to, TAKE_PTR(posted)));
	WORLD_UNTIL(world, !part->posted);
	ASSERT_TRUE(part->state != PART_HELD);
	ASSERT_EQ(part->retained, LEDGER_NO_RESULT);
	end_well(world, asked);
}

/* -- Contributions that overtake one another ---------------------------------------------------------------------- */

/* What went by a connection that broke, and is at the server after what its node sent by another in its place. */
struct late {
	struct call call;
	bool done;
};

static void on_late(struct call *call)
{
	container_of(call, struct late, call)->done = true;
}

/* A part that is at the server of the other node. */
static const struct agent_part *part_away(const struct agent_round *round)
{
	const struct agent_part *part;

	list_for_each (part, &round->parts, link)
		if (part->state == PART_CALL && !peer_is_self(part->send_queue->peer))
			return part;
	return NULL;
}

/* The server has it in the place of the one that is waited for, which is not known to be the last: that one is made once more. */
static void overtake(struct world *world, const struct agent_round *round)
{
	const struct agent_part *part = part_away(round);
	struct late late;

	ASSERT_TRUE(part);
	late = (struct late){ .call = { .header = part->call.header,
					.payload = part->call.payload,
					.is_repeatable = true,
					.is_again = true,
					.done = on_late } };
	peer_call(part->send_queue->peer, &late.call);
	WORLD_UNTIL(world, late.done);
	ASSERT_EQ(late.call.status, -ENETRESET);
	ASSERT_CONTAINS(late.call.text, "come again");
}

static void submit(struct asked *asked, struct declared *declared, unsigned operation,
		   uint64_t round, float *output)
{
	static float input[PARTS * 1024];

	for (unsigned i = 0; i < PARTS * 1024; i++)
		input[i] = (float)(i % 7);
	*asked = asked_of(operation, REDUCTION_SUM, input, PARTS * 1024, output, PARTS * 1024);
	asked_submit(asked, declared, round);
}

static void expect_sum(struct world *world, const struct asked *asked, const float *output,
		       unsigned n)
{
	WORLD_UNTIL(world, asked->done);
	ASSERT_STR(asked->failure.text, "");
	for (unsigned i = 0; i < PARTS * 1024; i++)
		ASSERT_TRUE(output[i] == (float)(n * (i % 7)));
}

TEST(what_was_overtaken_is_pushed_once_more_and_counts_once)
{
	for (unsigned async = 0; async < 2; async++) {
		_cleanup_(world_freep) struct world *world =
			world_new(&(struct world_options){ .n_nodes = 2,
							   .n_local = 1,
							   .n_lanes = 1,
							   .resume = true,
							   .part_bytes = 4096 });
		unsigned operation = async ? OPERATION_ACCUMULATE : OPERATION_PUSH_PULL;
		static float output[2][PARTS * 1024];
		struct declared *declared;
		struct asked asked[2];

		form(world, (struct stragglers){ .async = async, .staleness = async });
		declared = world_declare(world, "t", DTYPE_FLOAT32, PARTS * 1024);
		/* Nobody is waited for in the first round of what accumulates. */
		if (async) {
			submit(&asked[0], &declared[0], operation, 1, output[0]);
			expect_sum(world, &asked[0], output[0], 1);
		}
		submit(&asked[0], &declared[0], operation, 1 + async, output[0]);
		WORLD_UNTIL(world, asked[0].base.in && part_away(asked[0].base.in));
		overtake(world, asked[0].base.in);
		ASSERT_TRUE(!asked[0].done);
		submit(&asked[1], &declared[1], operation, 1, output[1]);
		expect_sum(world, &asked[0], output[0], 2 + async);
		expect_sum(world, &asked[1], output[1], 2 + async);
	}
}

/* -- Servers that come -------------------------------------------------------------------------------------------- */

#define COME 100 /* more than a job may be given: DATA_ADDED_MAX / 2 */

/* Nobody listens there. */
static struct view_member newcomer(unsigned number)
{
	struct view_member member = { .id = 1000 + number, .roles = ROLE_SERVER };

	(void)snprintf(member.name, sizeof(member.name), "new%u", number);
	(void)snprintf(member.address, sizeof(member.address), "127.0.0.1:1");
	return member;
}

static bool is_asked(const struct agent_job *job, unsigned number)
{
	struct view_member member = newcomer(number);
	const struct agent_setup *setup;

	list_for_each (setup, &job->fleet.setups, link)
		if (setup->asks_back && setup->added && !strcmp(setup->added->name, member.name))
			return true;
	return false;
}

/* COME servers beside the one that there is. */
static void servers_come(struct world *world)
{
	static struct view_member members[1 + COME];

	members[0] = cluster_view(world->nodes[0].cluster)->members[0];
	for (unsigned i = 0; i < COME; i++)
		members[1 + i] = newcomer(i);
	world_view(world, 0, members, 1 + COME);
}

static size_t n_asked(const struct agent_job *job)
{
	const struct agent_setup *setup;
	size_t n = 0;

	list_for_each (setup, &job->fleet.setups, link)
		n += setup->asks_back;
	return n;
}

TEST(of_servers_that_come_at_once_no_more_are_asked_than_there_is_room_for)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 1, .distributed = true, .resume = true });

	form(world, (struct stragglers){ 0 });
	servers_come(world);
	agent_view_changed(world->nodes[0].agent);
	ASSERT_EQ(n_asked(job_of(world)), DATA_ADDED_MAX / 2);
}

/* All that were asked may decline, so others are next. */
TEST(servers_that_decline_do_not_stand_in_the_way_of_others)
{
	enum { AT_ONCE = DATA_ADDED_MAX / 2 };
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 1, .distributed = true, .resume = true });

	form(world, (struct stragglers){ 0 });
	servers_come(world);
	/* None is asked twice before all were. */
	for (unsigned look = 1, n_seen = 0; n_seen < COME; look++) {
		n_seen = 0;
		agent_add_look(job_of(world));
		ASSERT_EQ(n_asked(job_of(world)), look * AT_ONCE);
		for (unsigned i = 0; i < COME; i++)
			n_seen += is_asked(job_of(world), i);
		ASSERT_EQ(n_seen, MIN(look * AT_ONCE, (unsigned)COME));
	}
}

TEST(a_job_takes_no_more_servers_than_there_is_room_for)
{
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = 1, .distributed = true, .resume = true });

	form(world, (struct stragglers){ 0 });
	for (unsigned i = 0; i < COME; i++) {
		struct view_member member = newcomer(i);
		struct data_added added = { .bandwidth_mbps = 1 };

		memcpy(added.name, member.name, sizeof(added.name));
		memcpy(added.address, member.address, sizeof(added.address));
		agent_add_take(job_of(world), &added);
		ASSERT_EQ(job_of(world)->placement.added.n, MIN(i + 1, DATA_ADDED_MAX / 2u));
	}
}

enum { TWO_PART = 32 << 10, TWO = 4 * TWO_PART / sizeof(float) };

/* Two nodes that sum for each other; each is the server of half of the parts. */
static struct world *two_new(unsigned n_data_threads)
{
	struct world *world =
		world_new(&(struct world_options){ .n_nodes = 2,
						   .n_local = 1,
						   .resume = true,
						   .part_bytes = TWO_PART,
						   .n_data_threads = n_data_threads });

	world_form(world);
	return world;
}

/* One push_pull in place. */
struct two {
	float data[2][TWO];
	struct asked asked[2];
};

static void two_submit(struct two *two, struct declared *tensor, uint64_t round)
{
	for (unsigned i = 0; i < 2; i++) {
		float *data = two->data[i];

		for (unsigned k = 0; k < TWO; k++)
			data[k] = (float)((i + 1) * (k + round));
		two->asked[i] = asked_of(OPERATION_PUSH_PULL, REDUCTION_SUM, data, TWO, data, TWO);
		asked_submit(&two->asked[i], &tensor[i], round);
	}
}

static bool two_done(const struct two *two)
{
	return two->asked[0].done && two->asked[1].done;
}

static void two_check(const struct two *two, uint64_t round)
{
	for (unsigned i = 0; i < 2; i++) {
		ASSERT_STR(two->asked[i].failure.text, "");
		for (unsigned k = 0; k < TWO; k++)
			ASSERT_TRUE(two->data[i][k] == (float)(3 * (k + round)));
	}
}

/* Each time it is back at once. */
TEST(a_server_that_is_lost_again_and_again_is_given_up)
{
	_cleanup_(world_freep) struct world *world = two_new(0);
	struct agent_job *job = job_of(world);
	size_t server = job->fleet.servers[0].member.is_self;
	unsigned n = 0;

	while (job->state == JOB_RUNNING && agent_placement_has(job, server)) {
		ASSERT_INT(n++, <, 200);
		WORLD_UNTIL(world, job->fleet.servers[server].attached);
		agent_keep_lost(job, server, "a test");
	}
	ASSERT_EQ(n, 101);
}

static uint64_t copied(struct world *world)
{
	uint64_t n = 0;

	for (unsigned i = 0; i < 2; i++)
		n += metric_get(&world->nodes[i].agent->copied);
	return n;
}

TEST(a_result_is_copied_where_it_is_summed_alone)
{
	for (unsigned n_data_threads = 0; n_data_threads < 3; n_data_threads += 2) {
		_cleanup_(world_freep) struct world *world = two_new(n_data_threads);
		struct declared *tensor = world_declare(world, "t", DTYPE_FLOAT32, TWO);

		for (uint64_t round = 1; round < 4; round++) {
			static struct two two;

			two_submit(&two, tensor, round);
			WORLD_UNTIL(world, two_done(&two));
			two_check(&two, round);
		}
		/* There from the retained result to the output; the other node's comes to its output. */
		ASSERT_EQ(copied(world), 3 * sizeof(float) * TWO);
	}
}

/* A part of node 0 whose result is retained, and which has not heard so. */
static struct agent_part *told_others(struct world *world)
{
	struct agent_job *job = job_of(world);
	struct agent_round *round;
	struct agent_part *part;

	list_for_each (round, &job->rounds, job_link)
		list_for_each (part, &round->parts, link)
			if (part->state == PART_CALL && part->retained != LEDGER_NO_RESULT &&
			    ledger_result_kept(job->resumption.ledger, part->retained)->whole)
				return part;
	return NULL;
}

/* The other node may have it over its contribution already: so no server may be asked to sum it once more. */
TEST(what_others_may_have_is_kept_although_its_server_is_lost)
{
	static struct two two;
	_cleanup_(world_freep) struct world *world = two_new(0);
	struct declared *tensor = world_declare(world, "t", DTYPE_FLOAT32, TWO);
	const struct ledger_kept *kept;
	struct agent_part *part;

	two_submit(&two, tensor, 1);
	WORLD_UNTIL(world, (part = told_others(world)) || two_done(&two));
	ASSERT_TRUE(part);
	kept = ledger_result_kept(job_of(world)->resumption.ledger, part->retained);
	agent_keep_again(job_of(world), part->server);
	WORLD_UNTIL(world, part->state != PART_CALL);
	/* Nobody has been told that node 0 has it, so it stays for now. */
	ASSERT_EQ(part->state, PART_SCATTER);
	ASSERT_TRUE(kept->whole && kept->what.round == 1);
	WORLD_UNTIL(world, two_done(&two));
	two_check(&two, 1);
}

static const struct ledger_kept *kept_by(const struct agent_job *job)
{
	struct ledger *ledger = job->resumption.ledger;

	for (uint32_t i = 0; i < ledger_results_used(ledger); i++)
		if (ledger_result_kept(ledger, i)->taken)
			return ledger_result_kept(ledger, i);
	return NULL;
}

/* The process before had forgotten the tensor, and was killed before it could tell servers that: they may have its results. */
TEST(servers_hear_of_a_tensor_that_the_process_before_has_forgotten)
{
	static struct two two;
	_cleanup_(world_freep) struct world *world = two_new(0);
	struct declared *tensor = world_declare(world, "t", DTYPE_FLOAT32, TWO);
	struct agent_job *job = job_of(world);
	const struct ledger_kept *kept;
	size_t server;

	two_submit(&two, tensor, 1);
	WORLD_UNTIL(world, two_done(&two));
	ledger_tensor_remove(job->resumption.ledger, "t");
	kept = kept_by(job);
	ASSERT_TRUE(kept);
	server = (size_t)(agent_keep_owner(job, kept) - job->fleet.servers);
	ASSERT_EQ(held_tensors_at(world->nodes[server].server), 1);
	agent_keep_again(job, server);
	WORLD_UNTIL(world, !held_tensors_at(world->nodes[server].server));
	ASSERT_TRUE(!kept_by(job));
}
