/*
 * Ranks that do not come back after a restart are looked at in steps, jobs in turns, whatever a ledger says of how many there are.
 */
#include "base/process.h"
#include "ledger/ledger.h"
#include "world.h"
#include <sys/wait.h>

#define STEP 64 /* of absent.c */
#define MANY 1000

static unsigned n_looks;

enum process_state __real_process_look(uint32_t pid, uint64_t started);
enum process_state __wrap_process_look(uint32_t pid, uint64_t started);

enum process_state __wrap_process_look(uint32_t pid, uint64_t started)
{
	n_looks++;
	return __real_process_look(pid, started);
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
	struct agent_join join = world_join_of(world, 0);
	struct failure failure = { 0 };
	int fd;

	join.job = name;
	join.size = join.local_size = n;
	ASSERT_OK(ledger_new(number + 1, n, 1 << 16, 1, NULL, &ledger, &fd));
	ledger_begin(ledger);
	for (uint32_t i = 0; i < n; i++)
		ledger_set_process(ledger, i, i < n - 1 ? (uint32_t)getpid() : pid);
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
