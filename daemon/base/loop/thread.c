/*
 * Starts threads with signals blocked: loop threads for the pool and transport/, detached ones
 * for unmapping and resolving names.
 */
#include "base/loop/thread.h"

#include "base/error.h"
#include "base/log.h"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>

struct loop_thread {
	struct loop *loop;
	pthread_t thread;
	struct mail stop;
	char name[16]; /* the kernel's limit */
};

static void *loop_thread_main(void *arg)
{
	struct loop_thread *thread = arg;
	int r;

	r = loop_run(thread->loop);
	if (r)
		log_error("thread %s: its event loop failed: %s", thread->name,
			  strerrordesc_np(-r));
	loop_end_chores(thread->loop);
	return NULL;
}

/*
 * The thread inherits the mask: no instant in which it could take a signal meant for the control
 * thread.
 */
static int create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *user),
		  void *user)
{
	sigset_t all, old;
	int r;

	(void)sigfillset(&all);
	/* Of faults, which come to who makes them: holes.h. */
	(void)sigdelset(&all, SIGBUS);
	(void)pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(thread, attributes, run, user);
	(void)pthread_sigmask(SIG_SETMASK, &old, NULL);
	return r ? error_origin(-r) : 0;
}

int thread_detach(void *(*run)(void *user), void *user)
{
	pthread_attr_t attributes;
	pthread_t thread;
	int r;

	r = pthread_attr_init(&attributes);
	if (r)
		return error_origin(-r);
	(void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	r = create(&thread, &attributes, run, user);
	(void)pthread_attr_destroy(&attributes);
	return error_trace(r);
}

int loop_thread_start(const char *name, struct loop_thread **ret_thread)
{
	_cleanup_(freep) struct loop_thread *thread = calloc(1, sizeof(*thread));
	_cleanup_(loop_freep) struct loop *loop = NULL;
	int r;

	if (!thread)
		return error_origin(-ENOMEM);
	r = loop_new(&loop);
	if (r)
		return error_trace(r);
	thread->loop = loop;
	(void)snprintf(thread->name, sizeof(thread->name), "%s", name);

	r = create(&thread->thread, NULL, loop_thread_main, thread);
	if (r)
		return error_trace(r);
	(void)pthread_setname_np(thread->thread, thread->name);

	(void)TAKE_PTR(loop);
	*ret_thread = TAKE_PTR(thread);
	return 0;
}

struct loop *loop_thread_loop(struct loop_thread *thread)
{
	return thread->loop;
}

static void loop_thread_on_stop(struct mail *mail)
{
	struct loop_thread *thread = container_of(mail, struct loop_thread, stop);

	loop_stop(thread->loop);
}

struct loop_thread *loop_thread_stop(struct loop_thread *thread)
{
	if (!thread)
		return NULL;

	thread->stop.run = loop_thread_on_stop;
	loop_post(thread->loop, &thread->stop);
	(void)pthread_join(thread->thread, NULL);
	thread->loop = loop_free(thread->loop);
	free(thread);
	return NULL;
}
