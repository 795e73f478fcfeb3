/*
 * The summation threads: a pool that runs tasks. Those of a job go most urgent first; jobs take turns, by what their tasks cost
 * (fair.h). Tasks are posted from one thread, the one that runs the home loop, and their done() comes back there. The queue
 * of waiting tasks belongs to the home thread; each worker is given at most two at a time, so a task whose turn it is
 * overtakes all but those. No locks. Idle workers sleep.
 *
 * Short tasks may be shared: they are offered to all, and whoever comes first takes them, the home thread too, which is
 * awake while others still have to be woken. So none waits for a thread that the scheduler does not let run. What may
 * keep whoever runs it waiting is offered to the workers alone.
 */
#pragma once

#include "base/loop/loop.h"

/* What costs no more takes less time than to wake a worker for it. */
#define POOL_LEAST_BYTES ((uint64_t)8 << 10)

struct pool;

/*
 * Whoever comes next waits for those that run: so a task is short, some milliseconds, and what takes longer is done in slices, a
 * run of the task each.
 */
struct task {
	/* Set by the poster. */
	/* On a worker thread; a shared one also from the home loop; inside pool_post() when the pool has no thread. */
	void (*run)(struct task *task);
	void (*done)(struct task *task); /* on the home loop, exactly once, after the last run */
	uint64_t flow;			 /* number of the job that it is for */
	uint64_t cost;	  /* bytes that it reads and copies: about as many as it takes time */
	int32_t priority; /* of this job's, larger first; equal: first posted first */
	bool shared;	  /* may run at home, which waits for it: 0.1 ms at most */
	bool away;	  /* never runs at home, shared or not: the task may stall */
	/* Set by run() of one that is not shared: there is more to do, of which `cost` is next. The task waits for its turn again. */
	bool again;
	/* The pool's; worker may be read by run(). */
	uint8_t n_more; /* runs in a row, beyond the first, of `cost` each */
	struct pool *pool;
	/* The thread that runs it, from 0; 0 when the pool has none; of a shared one the home thread comes after all. */
	size_t worker;
	struct list link; /* tasks that a worker has or had, until done() */
	struct mail mail; /* to the worker's loop, then to the home loop */
};

/* n_threads 0: tasks run inside pool_post(), done() is still called from the loop (never from inside pool_post). */
int pool_new(struct loop *home, unsigned n_threads, struct pool **ret_pool);
/*
 * Waits for running tasks; tasks not yet run are dropped, and so is every done() still on its way: afterwards all tasks
 * are the caller's again. On the home thread, after everything that posts has stopped.
 */
struct pool *pool_free(struct pool *pool);
DEFINE_CLEANUP(struct pool *, pool_free)

/* The task belongs to the pool until done(). Returns 0 or -ENOMEM (then the task is still the caller's). */
int pool_post(struct pool *pool, struct task *task);
/* All of a task that has not been posted, at once. */
static inline void task_run(struct task *task)
{
	do {
		task->again = false;
		task->run(task);
	} while (task->again);
}
unsigned pool_n_threads(const struct pool *pool);
/* Tasks posted and not yet done. */
size_t pool_pending(const struct pool *pool);
