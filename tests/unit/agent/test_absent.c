/*
 * Ranks that do not come back after a restart are looked at in steps, jobs in turns, whatever a ledger says of how many there are.
 * Those that are there were looked at as each joined, and are not again all at once.
 */
#include "agent/job/job.h"
#include "base/process.h"
#include "ledger/ledger.h"
#include "world.h"
#include <fcntl.h>
#include <sys/wait.h>

#define STEP 64 /* of absent.c */
#define MANY 1000

static unsigned n_looks, n_started;

enum process_state __real_process_look(uint32_t pid, uint64_t started);
enum process_state __wrap_process_look(uint32_t pid, uint64_t started);

enum process_state __wrap_process_look(uint32_t pid, uint64_t started)
{
	n_looks++;
	return __real_process_look(pid, started);
}

uint64_t __real_process_started(uint32_t pid);
uint64_t __wrap_process_started(uint32_t pid);

uint64_t __wrap_process_started(uint32_t pid)
{
	n_started++;
	return __real_process_started(pid);
}

static uint32_t ended_pid(void)
{
	pid_t pid = fork();

	ASSERT_TRUE(pid >= 0);
	if (!pid)
		_exit(0);
	ASSERT_EQ(waitpid(pid, NULL, 0), pid);
	return (uint32_t)pid;
}

/* A rank comes back to a job of n ranks, the last of which had the process pid. Returns the ledger's descriptor. */
static int come_back(struct world *world, uint32_t number, const char *name, uint32_t n,
		     uint32_t pid)
{
	_cleanup_(ledger_freep) struct ledger *ledger = NULL;
	const struct process_seen self = process_see((uint32_t)getpid()), last = process_see(pid);
	struct agent_join join = world_join_of(world, 0);
	struct failure failure = { 0 };
	int fd;

	join.job = name;
	join.size = join.local_size = n;
	ASSERT_OK(ledger_new(number + 1, n, 1 << 16, 1, NULL, &ledger, &fd));
	ledger_begin(ledger);
	for (uint32_t i = 0; i < n; i++)
		ledger_set_process(ledger, i, i < n - 1 ? &self : &last);
	world->ranks[number].number = number + 1;
	world->ranks[number].ledger = fd;
	if (world_resume(world, number, &join, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	return fd;
}

/* Turns the loop once. Returns how many processes were looked at. */
static unsigned turn(struct world *world)
{
	n_looks = 0;
	ASSERT_OK(loop_turn(world->loop, 1000));
	ASSERT_INT(n_looks, <=, STEP);
	return n_looks;
}

static const struct world_options options = { .n_nodes = 1, .n_local = 2, .no_servers = true };

TEST(many_ranks_are_looked_at_in_steps)
{
	_cleanup_(world_freep) struct world *world = world_new(&options);
	int fd = come_back(world, 0, "many", MANY, ended_pid());
	unsigned n = 0;

	while (!world->ranks[0].ended)
		n += turn(world);
	ASSERT_EQ(n, MANY - 1);
	ASSERT_CONTAINS(world->ranks[0].failure.text, "rank 999 (pid ");
	ASSERT_CONTAINS(world->ranks[0].failure.text, "died meanwhile");
	ASSERT_OK(close(fd));
}

/* What was found of the ranks before is of before that. */
TEST(a_rank_that_comes_back_has_all_looked_at_anew)
{
	_cleanup_(world_freep) struct world *world = world_new(&options);
	int fd = come_back(world, 0, "many", MANY, ended_pid());
	struct agent_join join = world_join_of(world, 1);
	struct failure failure = { 0 };
	unsigned n = 0;

	while (!n)
		n += turn(world);
	ASSERT_EQ(n, STEP - 1);
	join.job = "many";
	join.size = join.local_size = MANY;
	world->ranks[1].number = 1; /* the run of come_back() */
	world->ranks[1].ledger = fd;
	if (world_resume(world, 1, &join, &failure))
		test_fail(__FILE__, __LINE__, "%s", failure.text);
	while (!world->ranks[0].ended)
		n += turn(world);
	ASSERT_EQ(n, STEP - 1 + MANY - 2);
	ASSERT_OK(close(fd));
}

TEST(few_ranks_do_not_wait_for_many_of_another_job)
{
	_cleanup_(world_freep) struct world *world = world_new(&options);
	int many = come_back(world, 0, "many", MANY, (uint32_t)getpid()), few;
	unsigned n = 0;

	while (!n)
		n += turn(world);
	few = come_back(world, 1, "few", 2, ended_pid());
	while (!world->ranks[1].ended)
		n += turn(world);
	ASSERT_TRUE(!world->ranks[0].ended);
	ASSERT_CONTAINS(world->ranks[1].failure.text, "rank 1 (pid ");
	ASSERT_OK(close(many));
	ASSERT_OK(close(few));
}

TEST(a_daemon_that_ends_looks_no_more)
{
	_cleanup_(world_freep) struct world *world = world_new(&options);
	int fd = come_back(world, 0, "many", MANY, (uint32_t)getpid());

	while (!turn(world))
		;
	world_restart(world, 0);
	for (unsigned i = 0; i < 100; i++)
		ASSERT_OK(loop_turn(world->loop, 0));
	ASSERT_OK(close(fd));
}

#define FEW 8

static const struct world_options small = { .n_nodes = 1, .n_local = FEW, .no_servers = true };

/* A rank joins, or comes back with its ledger; its process is looked at. */
static void join_one(struct world *world, const struct agent_join *join, bool resumes)
{
	struct failure failure = { 0 };
	uint32_t rank = join->rank;

	n_looks = n_started = 0;
	if (resumes ? world_resume(world, rank, join, &failure)
		    : world_join(world, rank, join, &failure))
		test_fail(__FILE__, __LINE__, "rank %u: %s", rank, failure.text);
	ASSERT_EQ(n_started, 1);
	ASSERT_EQ(n_looks, 1);
}

static void join_all(struct world *world, bool resumes)
{
	for (uint32_t i = 0; i < FEW; i++) {
		struct agent_join join = world_join_of(world, i);

		join.pid = (uint32_t)getpid();
		join_one(world, &join, resumes);
	}
	n_looks = n_started = 0;
	for (uint32_t i = 0; i < FEW; i++)
		WORLD_UNTIL(world, world->ranks[i].joined);
	ASSERT_EQ(n_started + n_looks, 0);
}

/* Also by the last, with which a job begins, or goes on after a restart. */
TEST(each_rank_that_joins_is_looked_at_and_no_other)
{
	_cleanup_(world_freep) struct world *world = world_new(&small);
	const struct process_seen self = process_see((uint32_t)getpid());
	struct process_seen other = self;

	other.started++;
	join_all(world, false);
	world_restart(world, 0);
	join_all(world, true);
	for (uint32_t i = 0; i < FEW; i++) {
		const struct ledger *ledger = world->ranks[i].member.job->resumption.ledger;

		ASSERT_TRUE(ledger_may_be(ledger, i, &self));
		ASSERT_TRUE(!ledger_may_be(ledger, i, &other));
	}
}

static int elastic_ledger(struct world *world, uint32_t membership, uint32_t first, uint32_t n)
{
	const struct process_seen self = process_see((uint32_t)getpid());
	_cleanup_(ledger_freep) struct ledger *ledger = NULL;
	int fd;

	ASSERT_OK(ledger_new(membership, FEW, 1 << 16, 1, NULL, &ledger, &fd));
	ledger_set_membership(ledger, membership);
	for (uint32_t i = 0; i < FEW; i++)
		ledger_set_process(ledger, i, &self);
	for (uint32_t i = first; i < first + n; i++) {
		world->ranks[i].number = membership;
		world->ranks[i].ledger = fcntl(fd, F_DUPFD_CLOEXEC, 0);
		ASSERT_TRUE(world->ranks[i].ledger >= 0);
	}
	return fd;
}

/* All but the last have the ledger of the run before: by their processes they are found to be in that of the last. */
TEST(ranks_that_have_not_heard_of_the_next_run_are_not_looked_at_again)
{
	struct world_options elastic = small;
	_cleanup_(world_freep) struct world *world = NULL;
	int before, next;

	elastic.min_ranks = 1;
	world = world_new(&elastic);
	before = elastic_ledger(world, 1, 0, FEW - 1);
	next = elastic_ledger(world, 2, FEW - 1, 1);
	join_all(world, true);
	for (uint32_t i = 0; i < FEW; i++)
		ASSERT_EQ(agent_place(&world->ranks[i].member).membership, 2);
	ASSERT_OK(close(before));
	ASSERT_OK(close(next));
}
