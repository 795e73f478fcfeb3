#include "base/pool.h"

#include "base/error.h"
#include "base/thread.h"
#include <stdio.h>

/* One runs, one waits beside it, so that the worker need not hear from the home thread between the two. */
#define POOL_TASKS_PER_WORKER 2

struct pool_worker {
	struct loop_thread *thread;
	unsigned n_tasks; /* given and not yet done */
};

struct pool {
	struct loop *home;
	_Atomic bool closing; /* set once; a worker runs no further task */
	/* The home thread's. */
	uint64_t sequence;
	size_t n_pending;
	struct list given;  /* tasks that a worker has or had, until done() */
	struct task **heap; /* binary heap of the waiting tasks, the most urgent on top */
	size_t n_heap;
	size_t heap_capacity;
	unsigned n_workers;
	struct pool_worker workers[];
};

int pool_new(struct loop *home, unsigned n_threads, struct pool **ret_pool)
{
	_cleanup_(pool_freep) struct pool *pool = NULL;
	int r;

	pool = calloc(1, sizeof(*pool) + n_threads * sizeof(pool->workers[0]));
	if (!pool)
		return error_origin(-ENOMEM);
	pool->home = home;
	list_init(&pool->given);

	for (unsigned i = 0; i < n_threads; i++) {
		char name[24];

		(void)snprintf(name, sizeof(name), "bps-sum-%u", i);
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
	list_for_each_safe (task, next, &pool->given, link) {
		loop_unpost(pool->home, &task->mail);
		list_remove(&task->link);
	}
	free(pool->heap);
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

/* The heap of waiting tasks */

static bool task_before(const struct task *a, const struct task *b)
{
	if (a->priority != b->priority)
		return a->priority > b->priority;
	return a->sequence < b->sequence;
}

static int pool_heap_push(struct pool *pool, struct task *task)
{
	size_t index = pool->n_heap;

	if (pool->n_heap == pool->heap_capacity) {
		size_t capacity = pool->heap_capacity ? 2 * pool->heap_capacity : 64;
		struct task **heap = reallocarray(pool->heap, capacity, sizeof(*heap));

		if (!heap)
			return error_origin(-ENOMEM);
		pool->heap = heap;
		pool->heap_capacity = capacity;
	}
	pool->n_heap++;
	for (; index > 0 && task_before(task, pool->heap[(index - 1) / 2]); index = (index - 1) / 2)
		pool->heap[index] = pool->heap[(index - 1) / 2];
	pool->heap[index] = task;
	return 0;
}

static struct task *pool_heap_pop(struct pool *pool)
{
	struct task *top, *last;
	size_t index = 0;

	if (!pool->n_heap)
		return NULL;
	top = pool->heap[0];
	last = pool->heap[--pool->n_heap];
	for (;;) {
		size_t child = 2 * index + 1;

		if (child + 1 < pool->n_heap &&
		    task_before(pool->heap[child + 1], pool->heap[child]))
			child++;
		if (child >= pool->n_heap || !task_before(pool->heap[child], last))
			break;
		pool->heap[index] = pool->heap[child];
		index = child;
	}
	pool->heap[index] = last;
	return top;
}

/* The way of a task: given (home), run (worker), done (home) */

static void pool_give(struct pool *pool, size_t worker, struct task *task);

static void pool_on_done(struct mail *mail)
{
	struct task *task = container_of(mail, struct task, mail), *next;
	struct pool *pool = task->pool;
	size_t worker = task->worker;

	list_remove(&task->link);
	pool->n_pending--;
	if (worker < pool->n_workers) {
		pool->workers[worker].n_tasks--;
		next = pool_heap_pop(pool);
		if (next)
			pool_give(pool, worker, next);
	}
	task->done(task);
}

static void pool_on_run(struct mail *mail)
{
	struct task *task = container_of(mail, struct task, mail);
	struct pool *pool = task->pool;

	if (atomic_load_explicit(&pool->closing, memory_order_relaxed))
		return;
	task->run(task);
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

int pool_post(struct pool *pool, struct task *task)
{
	size_t worker = pool_choose(pool);
	int r;

	assert(task->run && task->done);

	task->pool = pool;
	task->sequence = pool->sequence++;
	task->worker = worker;
	list_init(&task->link);
	if (worker < pool->n_workers) {
		/* Nothing can wait while a worker has room: done() fills it. */
		pool_give(pool, worker, task);
	} else if (pool->n_workers) {
		r = pool_heap_push(pool, task);
		if (r)
			return error_trace(r);
	} else {
		list_push_back(&pool->given, &task->link);
		task->run(task);
		task->mail.run = pool_on_done;
		loop_post(pool->home, &task->mail);
	}
	pool->n_pending++;
	return 0;
}
