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

static unsigned n_looks, n_started, n_compared;

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

bool __real_ledger_may_be(const struct ledger *ledger, uint32_t rank,
			  const struct process_seen *process);
bool __wrap_ledger_may_be(const struct ledger *ledger, uint32_t rank,
			  const struct process_seen *process);

bool __wrap_ledger_may_be(const struct ledger *ledger, uint32_t rank,
			  const struct process_seen *process)
{
	n_compared++;
	return __real_ledger_may_be(ledger, rank, process);
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

#define CROWD WORLD_RANKS
#define KNOWN 50 /* of these, ranks of the next run: */

static bool is_known(uint32_t rank)
{
	return rank % 8 < 5;
}

/* Ranks of a run: those that are known had process `a`, the others process `b`. */
static int ledger_of(uint32_t membership, const struct process_seen *a,
		     const struct process_seen *b)
{
	_cleanup_(ledger_freep) struct ledger *ledger = NULL;
	int fd;

	ASSERT_OK(ledger_new(membership, CROWD, 1 << 16, 1, NULL, &ledger, &fd));
	ledger_set_membership(ledger, membership);
	for (uint32_t i = 0; i < CROWD; i++)
		ledger_set_process(ledger, i, is_known(i) ? a : b);
	return fd;
}

static void come(struct world *world, uint32_t rank, uint32_t membership, int fd)
{
	struct agent_join join = world_join_of(world, rank);
	struct failure failure = { 0 };

	join.pid = (uint32_t)getpid();
	world->ranks[rank].number = membership;
	world->ranks[rank].ledger = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	ASSERT_TRUE(world->ranks[rank].ledger >= 0);
	if (world_resume(world, rank, &join, &failure))
		test_fail(__FILE__, __LINE__, "rank %u: %s", rank, failure.text);
}

/* All are one process, and not all have a place in the next run, where some ranks had a process of the same number before. */
static void crowd_comes(const struct process_seen *last)
{
	const struct process_seen self = process_see((uint32_t)getpid());
	_cleanup_(world_freep) struct world *world = world_new(&(struct world_options){
		.n_nodes = 1, .n_local = CROWD, .no_servers = true, .min_ranks = 1 });
	int before = ledger_of(1, &self, &self), next = ledger_of(2, &self, last);
	uint32_t place = CROWD;

	for (uint32_t rank = 0; rank < CROWD - 1; rank++)
		come(world, rank, 1, before);
	n_compared = 0;
	come(world, CROWD - 1, 2, next);
	ASSERT_INT(n_compared, <=, CROWD);
	/* The first of them has the last place. */
	for (uint32_t rank = 0; rank < KNOWN; rank++) {
		while (!is_known(--place))
			;
		ASSERT_EQ(world->ranks[rank].member.rank, place);
		ASSERT_TRUE(world->ranks[rank].member.job);
	}
	for (uint32_t rank = KNOWN; rank < CROWD - 1; rank++)
		ASSERT_TRUE(world->ranks[rank].ended);
	ASSERT_CONTAINS(world->ranks[KNOWN].failure.text, "have regrouped without this one");
	ASSERT_OK(close(before));
	ASSERT_OK(close(next));
}

TEST(each_place_is_looked_at_once_for_all_that_have_not_heard_of_the_next_run)
{
	struct process_seen other = process_see((uint32_t)getpid());

	other.started++;
	crowd_comes(&other);
	other.pid++;
	crowd_comes(&other);
	other.pid -= 2;
	crowd_comes(&other);
}
