/*
 * A task reaches a worker in one of two ways: the home thread gives each worker up to two tasks
 * of the queue; short tasks are on offer in a ring of slots, from which workers and the home
 * thread take them. The agent and the server post tasks.
 */
#include "base/loop/pool.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/loop/thread.h"
#include "base/order/fair.h"
#include <sched.h>
#include <stdio.h>

/* One runs, one waits beside it, so that the worker need not hear from the home thread between the two. */
#define POOL_TASKS_PER_WORKER 2
/* Shared tasks on offer; those beyond wait for their turn. A power of two. */
#define POOL_OFFERS 16u
/* Slices that a worker runs before its home thread hears of them. */
#define POOL_MORE 15
/* Shared tasks that a worker runs before it looks for what was given to it alone. */
#define POOL_SHARED_AT_ONCE 4
/*
 * To wake a thread on another core takes 2 to 20 us, which is worth while for long tasks only. So the home thread looks for so
 * long for the end of shared ones, and a worker for more of them.
 */
#define POOL_LINGER_NS (100 * NSEC_PER_USEC)
/* A worker is moved to another processor once in so long at most: each time takes four system calls, and its cache. */
#define POOL_MOVE_NS (10 * NSEC_PER_MSEC)

/* The home thread fills tasks[tail % POOL_OFFERS]; whoever moves head has the task there. */
struct pool_offers {
	_Atomic uint32_t tail _cache_aligned_;
	_Atomic uint32_t head _cache_aligned_;
	_Atomic(struct task *) tasks[POOL_OFFERS];
};

struct pool_worker {
	struct pool *pool;
	struct loop_thread *thread;
	unsigned n_tasks;    /* given and not yet done */
	struct mail come;    /* there are offers */
	_Atomic bool coming; /* that is on its way */
	_Atomic pid_t tid;   /* its own; 0: it has not come yet */
	uint64_t moved_ns;   /* by the home thread, the last time */
	cpu_set_t moved_to;  /* what it was given then */
};

struct pool {
	struct loop *home;
	_Atomic bool closing; /* set once; a worker runs no further task */
	/* The home thread's. */
	uint64_t sequence;
	size_t n_pending;
	size_t n_shared;     /* offered, and not yet done */
	struct list given;   /* tasks that a worker has or had, until done() */
	struct fair waiting; /* by job */
	struct mail help;    /* to the home loop: it is to take an offer */
	bool helping;	     /* that is on its way */
	struct mail call;    /* the same behind all that it offers in one go: workers are to come */
	bool calling;
	struct pool_offers offers, away; /* to all; to all but the home thread */
	unsigned n_workers;
	struct pool_worker workers[];
};

static void pool_on_help(struct mail *mail);
static void pool_on_call(struct mail *mail);
static void pool_on_come(struct mail *mail);

int pool_new(struct loop *home, unsigned n_threads, struct pool **ret_pool)
{
	_cleanup_(pool_freep) struct pool *pool = NULL;
	size_t size;
	int r;

	size = align_up(sizeof(*pool) + n_threads * sizeof(pool->workers[0]), (size_t)CACHE_LINE);
	pool = aligned_alloc(CACHE_LINE, size);
	if (!pool)
		return error_origin(-ENOMEM);
	memset(pool, 0, size);
	pool->home = home;
	pool->help.run = pool_on_help;
	pool->call.run = pool_on_call;
	list_init(&pool->given);

	for (unsigned i = 0; i < n_threads; i++) {
		char name[24];

		(void)snprintf(name, sizeof(name), "bps-sum-%u", i);
		pool->workers[i].pool = pool;
		pool->workers[i].come.run = pool_on_come;
		r = loop_thread_start(name, &pool->workers[i].thread);
		if (r)
			return error_trace(r);
		pool->n_workers++;
	}
	*ret_pool = TAKE_PTR(pool);
	return 0;
}

struct pool *pool_free(struct pool *pool)
{
	struct task *task, *next;

	if (!pool)
		return NULL;

	atomic_store_explicit(&pool->closing, true, memory_order_relaxed);
	for (unsigned i = 0; i < pool->n_workers; i++)
		(void)loop_thread_stop(pool->workers[i].thread);
	if (pool->helping)
		loop_unpost(pool->home, &pool->help);
	if (pool->calling)
		loop_unpost(pool->home, &pool->call);
	list_for_each_safe (task, next, &pool->given, link) {
		loop_unpost(pool->home, &task->mail);
		list_remove(&task->link);
	}
	while (pool->waiting.n)
		(void)fair_pop(&pool->waiting);
	fair_done(&pool->waiting);
	free(pool);
	return NULL;
}

unsigned pool_n_threads(const struct pool *pool)
{
	return pool->n_workers;
}

size_t pool_pending(const struct pool *pool)
{
	return pool->n_pending;
}

static void pool_refill(struct pool *pool);

/* The way of a task: given (home), run (worker), done (home), or given again */

static void pool_give(struct pool *pool, size_t worker, struct task *task);
static int pool_wait(struct pool *pool, struct task *task, uint64_t sequence);

static void pool_end(struct pool *pool, struct task *task)
{
	list_remove(&task->link);
	if (!--pool->n_pending)
		fair_rest(&pool->waiting);
}

/*
 * Other jobs come first, if it is their turn; without memory for the task to wait it is not. Of its own job's tasks of equal priority
 * the task is the oldest, whenever it was posted: what was begun is done.
 */
static void pool_go_on(struct pool *pool, struct task *task)
{
	assert(!task->shared);
	list_remove(&task->link);
	task->again = false;
	if (pool_wait(pool, task, 0))
		pool_give(pool, task->worker, task);
	pool_refill(pool);
}

static void pool_on_done(struct mail *mail)
{
	struct task *task = container_of(mail, struct task, mail);
	struct pool *pool = task->pool;
	size_t worker = task->worker;

	if (worker < pool->n_workers)
		pool->workers[worker].n_tasks--;
	if (task->n_more)
		fair_charge(&pool->waiting, task->flow, task->n_more * task->cost);
	if (task->again) {
		pool_go_on(pool, task);
		return;
	}
	pool_end(pool, task);
	pool_refill(pool);
	task->done(task);
}

/* A task goes on at once where its worker has no mail: a task that waited at home would have been given to this worker by then. */
static void pool_run(struct task *task, struct loop *loop)
{
	for (task->n_more = 0;; task->n_more++) {
		task->again = false;
		task->run(task);
		if (!task->again || task->n_more == POOL_MORE || loop_has_mail(loop))
			return;
	}
}

static void pool_on_run(struct mail *mail)
{
	struct task *task = container_of(mail, struct task, mail);
	struct pool *pool = task->pool;

	if (atomic_load_explicit(&pool->closing, memory_order_relaxed))
		return;
	pool_run(task, loop_thread_loop(pool->workers[task->worker].thread));
	task->mail.run = pool_on_done;
	loop_post(pool->home, &task->mail);
}

static void pool_give(struct pool *pool, size_t worker, struct task *task)
{
	list_push_back(&pool->given, &task->link);
	task->worker = worker;
	task->mail.run = pool_on_run;
	pool->workers[worker].n_tasks++;
	loop_post(loop_thread_loop(pool->workers[worker].thread), &task->mail);
}

/* The worker with the least to do; n_workers when all have enough. */
static size_t pool_choose(const struct pool *pool)
{
	size_t best = pool->n_workers;
	unsigned least = POOL_TASKS_PER_WORKER;

	for (size_t i = 0; i < pool->n_workers; i++) {
		if (pool->workers[i].n_tasks < least) {
			least = pool->workers[i].n_tasks;
			best = i;
		}
	}
	return best;
}

/*
 * Shared tasks: waiting (home), on offer (home), run by whoever takes it, done (home). A worker is told to come by one
 * mail however many there are, and looks again after it has said that the mail has run: no offer is overlooked.
 */

static struct task *pool_take(struct pool_offers *offers, size_t worker)
{
	uint32_t head = atomic_load(&offers->head);
	struct task *task;

	do {
		if (head == atomic_load(&offers->tail))
			return NULL;
		/* Another's, if we are late: then head has moved. */
		task = atomic_load_explicit(&offers->tasks[head % POOL_OFFERS],
					    memory_order_relaxed);
	} while (!atomic_compare_exchange_weak(&offers->head, &head, head + 1));
	task->worker = worker;
	return task;
}

static uint32_t pool_n_offers(struct pool_offers *offers)
{
	return atomic_load(&offers->tail) - atomic_load(&offers->head);
}

static struct pool_offers *pool_offers_of(struct pool *pool, const struct task *task)
{
	return task->away ? &pool->away : &pool->offers;
}

/* For a worker: neither kind waits for the end of the other. */
static struct task *pool_take_any(struct pool *pool, size_t worker, unsigned turn)
{
	struct pool_offers *first = turn % 2 ? &pool->away : &pool->offers;
	struct task *task = pool_take(first, worker);

	return task ? task : pool_take(turn % 2 ? &pool->offers : &pool->away, worker);
}

static void pool_on_shared_done(struct mail *mail);

static void pool_on_come(struct mail *mail)
{
	struct pool_worker *worker = container_of(mail, struct pool_worker, come);
	struct pool *pool = worker->pool;
	struct task *task;

	atomic_store(&worker->coming, false);
	if (!atomic_load_explicit(&worker->tid, memory_order_relaxed))
		atomic_store_explicit(&worker->tid, gettid(), memory_order_relaxed);
	for (unsigned n = 0; n < POOL_SHARED_AT_ONCE; n++) {
		if (atomic_load_explicit(&pool->closing, memory_order_relaxed))
			return;
		task = pool_take_any(pool, (size_t)(worker - pool->workers), n);
		if (!task) {
			(void)loop_linger(loop_thread_loop(worker->thread), clock_now_ns(),
					  POOL_LINGER_NS);
			return;
		}
		task->run(task);
		task->mail.run = pool_on_shared_done;
		loop_post(pool->home, &task->mail);
	}
	if (!atomic_exchange(&worker->coming, true))
		loop_post(loop_thread_loop(worker->thread), &worker->come);
}

/*
 * One offer is for the home thread, if it may be; for each other a worker is told, but for one in whose place it is. Not until
 * all are there: a worker that the scheduler puts onto the home thread's core would take that for each one or two of them, and sleep again.
 */
static void pool_call_workers(struct pool *pool)
{
	unsigned most = MAX(pool->n_workers - 1, 1u);
	uint32_t n = pool_n_offers(&pool->offers);

	n = MIN(n ? n - 1 : 0, most) + pool_n_offers(&pool->away);
	for (unsigned i = 0; i < pool->n_workers && i < n; i++)
		if (!atomic_exchange(&pool->workers[i].coming, true))
			loop_post(loop_thread_loop(pool->workers[i].thread),
				  &pool->workers[i].come);
}

static void pool_on_call(struct mail *mail)
{
	struct pool *pool = container_of(mail, struct pool, call);

	pool->calling = false;
	pool_call_workers(pool);
}

static void pool_offer(struct pool *pool, struct task *task)
{
	struct pool_offers *offers = pool_offers_of(pool, task);
	uint32_t tail = atomic_load_explicit(&offers->tail, memory_order_relaxed);

	list_push_back(&pool->given, &task->link);
	pool->n_shared += !task->away;
	atomic_store_explicit(&offers->tasks[tail % POOL_OFFERS], task, memory_order_relaxed);
	atomic_store(&offers->tail, tail + 1);
	if (!pool->calling) {
		pool->calling = true;
		loop_defer(pool->home, &pool->call);
	}
	if (!pool->helping && !task->away) {
		pool->helping = true;
		loop_post(pool->home, &pool->help);
	}
}

/* Those that wait, as long as there is room for the one whose turn it is. */
static void pool_refill(struct pool *pool)
{
	while (pool->waiting.n) {
		struct task *task = fair_first(&pool->waiting)->item;
		size_t worker = pool_choose(pool);

		if (task->shared ? pool_n_offers(pool_offers_of(pool, task)) >= POOL_OFFERS
				 : worker == pool->n_workers)
			return;
		(void)fair_pop(&pool->waiting);
		if (task->shared)
			pool_offer(pool, task);
		else
			pool_give(pool, worker, task);
	}
}

static int pool_wait(struct pool *pool, struct task *task, uint64_t sequence)
{
	const struct order_item item = {
		.sequence = sequence,
		.item = task,
		.priority = task->priority,
		.cost = (uint32_t)MIN(task->cost, UINT32_MAX),
	};

	return error_trace(fair_push(&pool->waiting, task->flow, &item));
}

static void pool_shared_done(struct pool *pool, struct task *task)
{
	pool_end(pool, task);
	pool->n_shared -= !task->away;
	pool_refill(pool);
	task->done(task);
}

static void pool_on_shared_done(struct mail *mail)
{
	struct task *task = container_of(mail, struct task, mail);

	pool_shared_done(task->pool, task);
}

/*
 * Whether the worker may be where the home thread may, but for what has changed for all threads since it was moved: the kernel
 * remembers what a thread was given, and when its control group has more processors again it does not have them, as the
 * home thread does. Where somebody else has put it, it stays.
 */
static bool pool_may_move(const struct pool_worker *worker, const cpu_set_t *its,
			  const cpu_set_t *homes)
{
	cpu_set_t left;

	CPU_AND(&left, &worker->moved_to, homes);
	return CPU_EQUAL(its, homes) || CPU_EQUAL(its, &left);
}

/*
 * All is taken, and the worker that was called has not come. Should it be on this processor, it is moved to another that it
 * may be on: here it runs only when this thread does not, and comes too late each time. The scheduler sees to that only
 * where a processor is idle, and none is where trainers look for their results.
 */
static void pool_move(struct pool_worker *worker, uint64_t now_ns)
{
	pid_t tid = atomic_load_explicit(&worker->tid, memory_order_relaxed);
	int cpu = sched_getcpu();
	cpu_set_t its, homes, others;

	if (cpu < 0 || !tid || now_ns < worker->moved_ns + POOL_MOVE_NS)
		return;
	worker->moved_ns = now_ns;
	if (sched_getaffinity(tid, sizeof(its), &its) ||
	    sched_getaffinity(0, sizeof(homes), &homes) || !pool_may_move(worker, &its, &homes))
		return;
	others = homes;
	CPU_CLR((unsigned)cpu, &others);
	if (!CPU_COUNT(&others) || sched_setaffinity(tid, sizeof(others), &others))
		return;
	worker->moved_to = others;
	if (!sched_setaffinity(tid, sizeof(homes), &homes))
		worker->moved_to = homes;
}

/* One in a turn: the loop has others to serve. */
static void pool_on_help(struct mail *mail)
{
	struct pool *pool = container_of(mail, struct pool, help);
	struct task *task;
	uint64_t now_ns;

	/* They are not to wait for what this thread takes upon itself. */
	if (pool->calling)
		pool_call_workers(pool);
	task = pool_take(&pool->offers, pool->n_workers);
	pool->helping = task;
	if (!task) {
		now_ns = clock_now_ns();
		if (pool->n_shared)
			(void)loop_linger(pool->home, now_ns, POOL_LINGER_NS);
		for (unsigned i = 0; i < pool->n_workers; i++)
			if (atomic_load_explicit(&pool->workers[i].coming, memory_order_relaxed))
				pool_move(&pool->workers[i], now_ns);
		return;
	}
	loop_post(pool->home, &pool->help);
	task->run(task);
	pool_shared_done(pool, task);
}

int pool_post(struct pool *pool, struct task *task)
{
	int r;

	assert(task->run && task->done);

	task->pool = pool;
	task->worker = 0;
	task->n_more = 0;
	task->again = false;
	list_init(&task->link);
	if (pool->n_workers) {
		r = pool_wait(pool, task, ++pool->sequence);
		if (r)
			return error_trace(r);
		/* Nothing can wait while there is room: done() fills it. */
		pool_refill(pool);
	} else {
		list_push_back(&pool->given, &task->link);
		task_run(task);
		task->mail.run = pool_on_done;
		loop_post(pool->home, &task->mail);
	}
	pool->n_pending++;
	return 0;
}
