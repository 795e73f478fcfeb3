/*
 * The pool: each task runs once and is done at home; urgent tasks, jobs' turns, shared tasks,
 * workers that are moved.
 */
#include "base/clock.h"
#include "base/loop/pool.h"
#include "test.h"
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>

struct job {
	struct task task;
	unsigned n_runs;
	unsigned n_done;
	unsigned done_as; /* the how-manieth done() */
	bool run_elsewhere;
};

static pthread_t home_thread;
static unsigned n_done;

static void job_run(struct task *task)
{
	struct job *job = container_of(task, struct job, task);

	job->n_runs++;
	job->run_elsewhere = !pthread_equal(pthread_self(), home_thread);
}

static void job_done(struct task *task)
{
	struct job *job = container_of(task, struct job, task);

	if (!pthread_equal(pthread_self(), home_thread))
		test_fail(__FILE__, __LINE__, "done() on a worker");
	job->n_done++;
	job->done_as = n_done++;
}

static sem_t gate, entered;

/* Stands in a worker until the test opens the gate. */
static void job_run_gated(struct task *task)
{
	(void)sem_post(&entered);
	while (sem_wait(&gate) < 0)
		;
	job_run(task);
}

static struct job job_new(void (*run)(struct task *), int32_t priority)
{
	return (struct job){ .task = { .run = run, .done = job_done, .priority = priority } };
}

static void turn_until(struct loop *loop, unsigned n)
{
	while (n_done < n)
		ASSERT_OK(loop_turn(loop, -1));
}

TEST(every_task_runs_once_on_a_worker_and_is_done_at_home)
{
	enum { N = 3000 };
	_cleanup_(freep) struct job *jobs = calloc(N, sizeof(*jobs));
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	home_thread = pthread_self();
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 3, &pool));
	for (size_t i = 0; i < N; i++) {
		jobs[i] = job_new(job_run, (int32_t)(i % 7));
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	ASSERT_EQ(pool_pending(pool), N);
	turn_until(loop, N);
	ASSERT_EQ(pool_pending(pool), 0);
	for (size_t i = 0; i < N; i++) {
		ASSERT_EQ(jobs[i].n_runs, 1);
		ASSERT_EQ(jobs[i].n_done, 1);
		ASSERT_TRUE(jobs[i].run_elsewhere);
	}
}

TEST(without_threads_tasks_run_at_once_and_are_done_later)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;
	struct job job = job_new(job_run, 0);

	home_thread = pthread_self();
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 0, &pool));
	ASSERT_OK(pool_post(pool, &job.task));
	ASSERT_EQ(job.n_runs, 1);
	ASSERT_EQ(job.n_done, 0);
	ASSERT_EQ(pool_pending(pool), 1);
	turn_until(loop, 1);
	ASSERT_EQ(job.n_done, 1);
	ASSERT_EQ(pool_pending(pool), 0);
}

TEST(urgent_tasks_overtake_all_but_two)
{
	static const int32_t priorities[] = { 0, 0, 1, 5, 1, 9, -3, 5 };
	struct job jobs[ARRAY_SIZE(priorities)];
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	/* One worker, held at its first task: it has two, the others wait at home. */
	home_thread = pthread_self();
	ASSERT_OK(sem_init(&gate, 0, 0));
	ASSERT_OK(sem_init(&entered, 0, 0));
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 1, &pool));
	for (size_t i = 0; i < ARRAY_SIZE(jobs); i++) {
		jobs[i] = job_new(i ? job_run : job_run_gated, priorities[i]);
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	(void)sem_post(&gate);
	turn_until(loop, ARRAY_SIZE(jobs));
	ASSERT_EQ(jobs[0].done_as, 0);
	ASSERT_EQ(jobs[1].done_as, 1);
	ASSERT_EQ(jobs[5].done_as, 2); /* 9 */
	ASSERT_EQ(jobs[3].done_as, 3); /* 5, the one posted first */
	ASSERT_EQ(jobs[7].done_as, 4);
	ASSERT_EQ(jobs[2].done_as, 5); /* 1 */
	ASSERT_EQ(jobs[4].done_as, 6);
	ASSERT_EQ(jobs[6].done_as, 7); /* -3 */
}

/* However urgent it says that its tasks are, and however many it has. What costs more has its turn less often. */
TEST(jobs_take_turns)
{
	enum { N = 60, EACH = N / 3 };
	struct job jobs[N + 1];
	unsigned n[3] = { 0 };
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	for (unsigned shared = 0; shared < 2; shared++) {
		n_done = 0;
		memset(n, 0, sizeof(n));
		home_thread = pthread_self();
		pool = pool_free(pool);
		loop = loop_free(loop);
		ASSERT_OK(sem_init(&gate, 0, 0));
		ASSERT_OK(loop_new(&loop));
		ASSERT_OK(pool_new(loop, 1, &pool));
		jobs[N] = job_new(job_run_gated, 0);
		ASSERT_OK(pool_post(pool, &jobs[N].task));
		/* The greedy one has posted all before the others come. */
		for (unsigned i = 0; i < N; i++) {
			unsigned flow = i / EACH;

			jobs[i] = job_new(job_run, flow ? -5 : INT32_MAX);
			jobs[i].task.flow = 1 + flow;
			jobs[i].task.cost = flow == 2 ? 2000 : 1000;
			jobs[i].task.shared = shared;
			ASSERT_OK(pool_post(pool, &jobs[i].task));
		}
		if (!shared)
			(void)sem_post(&gate);
		turn_until(loop, N);
		for (unsigned i = 0; i < N; i++)
			if (jobs[i].done_as >= 20 && jobs[i].done_as < 40)
				n[i / EACH]++;
		ASSERT_INT(n[1], >=, n[0]);
		ASSERT_INT(n[1], >=, 7);
		ASSERT_INT(n[2], >=, 3);
		ASSERT_INT(3 * n[2], <=, 2 * n[1]);
		if (shared)
			(void)sem_post(&gate);
		turn_until(loop, N + 1);
	}
}

enum { SLICES = 1000, SLICE_COST = 1000 };

struct sliced {
	struct job job;
	_Atomic unsigned n_slices;
};

/* The first waits until all are posted. */
static void sliced_run(struct task *task)
{
	struct sliced *sliced = container_of(task, struct sliced, job.task);

	while (!sliced->n_slices && sem_wait(&gate) < 0)
		;
	if (++sliced->n_slices < SLICES) {
		task->again = true;
		task->cost = SLICE_COST;
	} else {
		job_run(task);
	}
}

static struct sliced sliced_new(void)
{
	struct sliced sliced = { .job = job_new(sliced_run, 0) };

	sliced.job.task.cost = SLICE_COST;
	return sliced;
}

TEST(tasks_of_others_come_between_the_slices_of_a_long_one)
{
	enum { FLOWS = 8, EACH = 40, N = FLOWS * EACH };
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;
	struct sliced sliced = sliced_new();
	struct job jobs[N];

	n_done = 0;
	home_thread = pthread_self();
	ASSERT_OK(sem_init(&gate, 0, 0));
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 1, &pool));
	ASSERT_OK(pool_post(pool, &sliced.job.task));
	for (unsigned i = 0; i < N; i++) {
		jobs[i] = job_new(job_run, 0);
		jobs[i].task.flow = 1 + i % FLOWS;
		jobs[i].task.cost = SLICE_COST;
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	(void)sem_post(&gate);
	turn_until(loop, N);
	/* As many as of each other; and what the worker has run before it was given any, which is made good. */
	ASSERT_INT(sliced.n_slices, <, N / 2);
	ASSERT_EQ(sliced.job.n_done, 0);
	ASSERT_EQ(pool_pending(pool), 1);
	turn_until(loop, N + 1);
	ASSERT_EQ(sliced.n_slices, SLICES);
	ASSERT_EQ(sliced.job.n_runs, 1);
	ASSERT_EQ(sliced.job.n_done, 1);
	ASSERT_TRUE(sliced.job.run_elsewhere);
	ASSERT_EQ(pool_pending(pool), 0);
}

static struct sliced *beside;
static unsigned n_before;

static void job_run_beside(struct task *task)
{
	n_before = beside->n_slices;
	job_run(task);
}

TEST(what_a_worker_has_been_given_waits_for_one_slice)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;
	struct job job = job_new(job_run_beside, 0);
	struct sliced sliced = sliced_new();

	n_done = 0;
	home_thread = pthread_self();
	beside = &sliced;
	ASSERT_OK(sem_init(&gate, 0, 0));
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 1, &pool));
	ASSERT_OK(pool_post(pool, &sliced.job.task));
	ASSERT_OK(pool_post(pool, &job.task));
	(void)sem_post(&gate);
	turn_until(loop, 2);
	ASSERT_EQ(n_before, 1);
}

TEST(without_threads_all_slices_run_at_once)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;
	struct sliced sliced = sliced_new();

	n_done = 0;
	home_thread = pthread_self();
	ASSERT_OK(sem_init(&gate, 0, 1));
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 0, &pool));
	ASSERT_OK(pool_post(pool, &sliced.job.task));
	ASSERT_EQ(sliced.n_slices, SLICES);
	ASSERT_EQ(sliced.job.n_done, 0);
	turn_until(loop, 1);
	ASSERT_EQ(sliced.job.n_done, 1);
}

TEST(idle_worker_is_preferred)
{
	struct job jobs[2] = { job_new(job_run_gated, 0), job_new(job_run_gated, 0) };
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	home_thread = pthread_self();
	ASSERT_OK(sem_init(&gate, 0, 0));
	ASSERT_OK(sem_init(&entered, 0, 0));
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 2, &pool));
	ASSERT_OK(pool_post(pool, &jobs[0].task));
	ASSERT_OK(pool_post(pool, &jobs[1].task));
	/* Both stand at the gate at the same time, or this waits until the time limit. */
	ASSERT_OK(sem_wait(&entered));
	ASSERT_OK(sem_wait(&entered));
	(void)sem_post(&gate);
	(void)sem_post(&gate);
	turn_until(loop, 2);
}

static struct job job_shared(int32_t priority)
{
	struct job job = job_new(job_run, priority);

	job.task.shared = true;
	return job;
}

/* Keeps all workers of a pool at the gate. */
static void hold_workers(struct pool *pool, struct job *jobs, size_t n)
{
	ASSERT_OK(sem_init(&gate, 0, 0));
	ASSERT_OK(sem_init(&entered, 0, 0));
	for (size_t i = 0; i < n; i++) {
		jobs[i] = job_new(job_run_gated, 0);
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	for (size_t i = 0; i < n; i++)
		ASSERT_OK(sem_wait(&entered));
}

TEST(shared_tasks_run_once_each_by_whoever_comes)
{
	enum { N = 3000, ROUNDS = 20 };
	_cleanup_(freep) struct job *jobs = calloc(N, sizeof(*jobs));
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	home_thread = pthread_self();
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 3, &pool));
	for (unsigned round = 0; round < ROUNDS; round++) {
		n_done = 0;
		for (size_t i = 0; i < N; i++) {
			/* Some are not, some only by workers: all kinds go on beside each other. */
			jobs[i] = i % 5 ? job_shared((int32_t)(i % 7)) : job_new(job_run, 3);
			jobs[i].task.away = i % 5 == 1;
			ASSERT_OK(pool_post(pool, &jobs[i].task));
		}
		turn_until(loop, N);
		ASSERT_EQ(pool_pending(pool), 0);
		for (size_t i = 0; i < N; i++) {
			ASSERT_EQ(jobs[i].n_runs, 1);
			ASSERT_EQ(jobs[i].n_done, 1);
			ASSERT_INT(jobs[i].task.worker, <=, 3u);
			if (jobs[i].task.shared && !jobs[i].task.away)
				continue;
			ASSERT_TRUE(jobs[i].run_elsewhere);
			ASSERT_INT(jobs[i].task.worker, <=, 2u);
		}
	}
}

TEST(shared_tasks_wait_for_no_worker)
{
	enum { N = 100, WORKERS = 2 };
	struct job held[WORKERS], jobs[N];
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	home_thread = pthread_self();
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, WORKERS, &pool));
	hold_workers(pool, held, WORKERS);
	for (size_t i = 0; i < N; i++) {
		jobs[i] = job_shared(0);
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	turn_until(loop, N);
	for (size_t i = 0; i < N; i++) {
		ASSERT_TRUE(!jobs[i].run_elsewhere);
		ASSERT_EQ(jobs[i].task.worker, WORKERS);
		ASSERT_EQ(jobs[i].done_as, i);
	}
	for (size_t i = 0; i < WORKERS; i++)
		(void)sem_post(&gate);
	turn_until(loop, N + WORKERS);
}

/* A worker that comes for the first of many may take the processor of the thread that has the others still to post. */
TEST(workers_come_for_shared_tasks_when_all_are_posted)
{
	enum { N = 8 };
	struct job jobs[N];
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	home_thread = pthread_self();
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 2, &pool));
	for (size_t i = 0; i < N; i++) {
		jobs[i] = job_shared(0);
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	/* None has been told to come, however long it takes until the loop's turn. */
	(void)poll(NULL, 0, 20);
	for (size_t i = 0; i < N; i++)
		ASSERT_EQ(jobs[i].n_runs, 0);
	turn_until(loop, N);
}

TEST(urgent_shared_tasks_overtake_all_but_those_on_offer)
{
	enum { N = 40, URGENT = N - 1, ON_OFFER = 16 };
	struct job held, jobs[N];
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;

	home_thread = pthread_self();
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 1, &pool));
	hold_workers(pool, &held, 1);
	for (size_t i = 0; i < N; i++) {
		jobs[i] = job_shared(i == URGENT);
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	turn_until(loop, N);
	ASSERT_EQ(jobs[URGENT].done_as, ON_OFFER);
	ASSERT_EQ(jobs[URGENT - 1].done_as, URGENT);
	(void)sem_post(&gate);
	turn_until(loop, N + 1);
}

static int cpu = -1; /* that the home thread says it is on; -1: the real one */
static unsigned n_leaves, n_returns;
static cpu_set_t homes,
	its; /* where the home thread and the worker say they may be; none: really */

int __real_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *ret);
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *ret);
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *ret)
{
	if (!CPU_COUNT(&homes))
		return __real_sched_getaffinity(pid, size, ret);
	*ret = pid ? its : homes;
	return 0;
}

int __real_sched_getcpu(void);
int __wrap_sched_getcpu(void);
int __wrap_sched_getcpu(void)
{
	return cpu < 0 ? __real_sched_getcpu() : cpu;
}

int __wrap_sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *set);
int __wrap_sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *set)
{
	if (pid == gettid() || pid <= 0 || size != sizeof(*set))
		test_fail(__FILE__, __LINE__, "not the worker");
	if (!CPU_COUNT(set))
		test_fail(__FILE__, __LINE__, "nowhere");
	if (CPU_ISSET((unsigned)cpu, set))
		n_returns++;
	else
		n_leaves++;
	its = *set;
	return 0;
}

/* Returns whether another than the home thread ran one. */
static bool share(struct loop *loop, struct pool *pool)
{
	struct job jobs[8];
	bool elsewhere = false;
	unsigned before = n_done;

	for (size_t i = 0; i < ARRAY_SIZE(jobs); i++) {
		jobs[i] = job_shared(0);
		ASSERT_OK(pool_post(pool, &jobs[i].task));
	}
	turn_until(loop, before + ARRAY_SIZE(jobs));
	/* In which the home thread sees that all is taken. */
	ASSERT_OK(loop_turn(loop, 0));
	for (size_t i = 0; i < ARRAY_SIZE(jobs); i++)
		elsewhere |= jobs[i].run_elsewhere;
	return elsewhere;
}

/* It may be on the processor of the home thread, where it runs only when that does not. */
TEST(worker_that_does_not_come_is_moved)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;
	uint64_t start_ns = clock_now_ns();
	unsigned n_shared;
	struct job held;
	cpu_set_t all;

	home_thread = pthread_self();
	ASSERT_OK(sched_getaffinity(0, sizeof(all), &all));
	if (CPU_COUNT(&all) < 2)
		test_skip("one processor");
	cpu = __real_sched_getcpu();
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 1, &pool));
	while (!share(loop, pool))
		;
	hold_workers(pool, &held, 1);
	/* Until that is seen, and then some more: not each time. */
	for (n_shared = 0; n_shared < 100 || !n_leaves; n_shared++)
		ASSERT_TRUE(!share(loop, pool));
	ASSERT_EQ(n_leaves, n_returns);
	ASSERT_INT(n_leaves, <=, (clock_now_ns() - start_ns) / (10 * NSEC_PER_MSEC) + 1);
	(void)sem_post(&gate);
	while (pool_pending(pool))
		ASSERT_OK(loop_turn(loop, -1));
}

static cpu_set_t first_cpus(unsigned n)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	for (unsigned i = 0; i < n; i++)
		CPU_SET(i, &set);
	return set;
}

/* With a control group's processors the kernel takes some from all threads; it gives them back to those that nobody moved. */
TEST(worker_that_was_moved_may_be_wherever_the_home_thread_may)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	_cleanup_(pool_freep) struct pool *pool = NULL;
	cpu_set_t few = first_cpus(2), many = first_cpus(4);
	uint64_t start_ns;
	struct job held;
	unsigned leaves;

	home_thread = pthread_self();
	cpu = 0;
	homes = its = many;
	ASSERT_OK(loop_new(&loop));
	ASSERT_OK(pool_new(loop, 1, &pool));
	while (!share(loop, pool))
		;
	hold_workers(pool, &held, 1);
	while (!n_returns)
		(void)share(loop, pool);
	homes = its = few;
	for (leaves = n_returns; n_returns == leaves;)
		(void)share(loop, pool);
	ASSERT_TRUE(CPU_EQUAL(&its, &few));
	homes = many;
	for (leaves = n_returns; n_returns == leaves;)
		(void)share(loop, pool);
	ASSERT_TRUE(CPU_EQUAL(&its, &many));
	/* Who puts it elsewhere has his will. */
	its = first_cpus(3);
	start_ns = clock_now_ns();
	for (leaves = n_leaves; clock_now_ns() < start_ns + 50 * NSEC_PER_MSEC;)
		(void)share(loop, pool);
	ASSERT_EQ(n_leaves, leaves);
	(void)sem_post(&gate);
	while (pool_pending(pool))
		ASSERT_OK(loop_turn(loop, -1));
}

static struct pool *chain_pool;
static unsigned chain_left;

static void chain_done(struct task *task)
{
	job_done(task);
	if (chain_left && chain_left--)
		ASSERT_OK(pool_post(chain_pool, task));
}

TEST(done_may_post_the_task_again)
{
	for (unsigned i = 0; i < 6; i++) {
		unsigned n_threads = i / 2;
		_cleanup_(loop_freep) struct loop *loop = NULL;
		_cleanup_(pool_freep) struct pool *pool = NULL;
		struct job job = job_new(job_run, 0);

		home_thread = pthread_self();
		n_done = 0;
		chain_left = 500;
		job.task.shared = i % 2;
		job.task.done = chain_done;
		ASSERT_OK(loop_new(&loop));
		ASSERT_OK(pool_new(loop, n_threads, &pool));
		chain_pool = pool;
		ASSERT_OK(pool_post(pool, &job.task));
		turn_until(loop, 501);
		ASSERT_EQ(job.n_runs, 501);
	}
}

/* Whatever the tasks were at: memory that the loop touched after this is found by the address sanitizer. */
TEST(free_takes_every_task_back)
{
	for (unsigned n_threads = 0; n_threads < 3; n_threads++) {
		enum { N = 100 };
		struct job *jobs = calloc(N, sizeof(*jobs));
		_cleanup_(loop_freep) struct loop *loop = NULL;
		struct pool *pool;
		unsigned n_runs = 0;

		home_thread = pthread_self();
		n_done = 0;
		ASSERT_TRUE(jobs);
		ASSERT_OK(loop_new(&loop));
		ASSERT_OK(pool_new(loop, n_threads, &pool));
		for (size_t i = 0; i < N; i++) {
			jobs[i] = i % 3 ? job_shared(0) : job_new(job_run, 0);
			ASSERT_OK(pool_post(pool, &jobs[i].task));
		}
		ASSERT_OK(loop_turn(loop, 0));
		ASSERT_TRUE(!pool_free(pool));
		for (size_t i = 0; i < N; i++) {
			ASSERT_INT(jobs[i].n_done, <=, jobs[i].n_runs);
			n_runs += jobs[i].task.shared ? 0 : jobs[i].n_runs;
		}
		ASSERT_INT(n_runs, <=, n_threads ? n_done + 2 * n_threads : N);
		free(jobs);
		ASSERT_OK(loop_turn(loop, 0));
	}
	ASSERT_TRUE(!pool_free(NULL));
}
