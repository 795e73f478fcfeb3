/*
 * base/pool without threads: a task runs some time after it was posted, at one event, on a worker that the seed
 * chooses, and again if it has more to do; tasks run in any order. Some time later done() comes to the home
 * loop. Without workers a task runs inside pool_post().
 */
#include "sim.h"

#define RUN_NS	(60 * NSEC_PER_USEC)
#define DONE_NS (30 * NSEC_PER_USEC)

struct pool {
	struct loop *home;
	unsigned n_threads;
	size_t n_pending;
	struct list jobs;
};

struct job {
	struct list link;
	struct event event;
	struct input input;
	struct pool *pool;
	struct task *task;
};

int pool_new(struct loop *home, unsigned n_threads, struct pool **ret_pool)
{
	struct pool *pool = calloc(1, sizeof(*pool));

	if (!pool)
		return -ENOMEM;
	pool->home = home;
	pool->n_threads = n_threads;
	list_init(&pool->jobs);
	*ret_pool = pool;
	return 0;
}

struct pool *pool_free(struct pool *pool)
{
	struct job *job;

	if (!pool)
		return NULL;
	while ((job = list_first(&pool->jobs, struct job, link))) {
		list_remove(&job->link);
		list_remove(&job->input.link);
		event_cancel(&job->event);
		free(job);
	}
	free(pool);
	return NULL;
}

static void on_done(struct input *input)
{
	struct job *job = container_of(input, struct job, input);
	struct task *task = job->task;

	if (task->again) {
		task->again = false;
		event_set(&job->event, world->now_ns + 1 + rng_below(&world->work, RUN_NS));
		return;
	}
	list_remove(&job->link);
	job->pool->n_pending--;
	free(job);
	task->done(task);
}

static void run(void *user)
{
	struct job *job = user;

	job->task->run(job->task);
}

static void on_event(struct event *event)
{
	struct job *job = container_of(event, struct job, event);

	if (loop_is_dead(job->pool->home))
		return;
	if (job->task) {
		struct pool *pool = job->pool;

		loop_run_in(pool->home, run, job);
		if (!loop_is_dead(pool->home))
			loop_input(pool->home, &job->input);
	}
}

int pool_post(struct pool *pool, struct task *task)
{
	struct job *job = calloc(1, sizeof(*job));

	if (!job)
		return -ENOMEM;
	*job = (struct job){
		.event.fire = on_event, .input.take = on_done, .pool = pool, .task = task
	};
	list_init(&job->input.link);
	list_push_back(&pool->jobs, &job->link);
	task->pool = pool;
	pool->n_pending++;
	task->worker = 0;
	task->again = false;
	if (!pool->n_threads) {
		task_run(task);
		loop_input(pool->home, &job->input);
		return 0;
	}
	/* A shared task may run on the home thread, which comes after all workers. */
	task->worker = rng_below(&world->work, pool->n_threads + task->shared);
	event_set(&job->event, world->now_ns + 1 + rng_below(&world->work, RUN_NS));
	return 0;
}

unsigned pool_n_threads(const struct pool *pool)
{
	return pool->n_threads;
}

size_t pool_pending(const struct pool *pool)
{
	return pool->n_pending;
}
