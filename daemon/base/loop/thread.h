/*
 * Threads, signals blocked. Those with a name run one loop: start ... stop (asks the loop to stop and waits). Others run a
 * function, and nobody waits for them.
 */
#pragma once

#include "base/loop/loop.h"

struct loop_thread;

/* The name, of which the kernel keeps 15 characters, is copied. Returns 0, -ENOMEM or -EAGAIN. */
int loop_thread_start(const char *name, struct loop_thread **ret_thread);
struct loop *loop_thread_loop(struct loop_thread *thread);
/*
 * Stops the loop, waits for the thread, frees both. Mail posted before by the caller still runs, so it is the place to
 * remove the sources and timers, none of which may be left. Not from the thread itself. Returns NULL; takes NULL.
 */
struct loop_thread *loop_thread_stop(struct loop_thread *thread);
DEFINE_CLEANUP(struct loop_thread *, loop_thread_stop)

/* A thread that nobody waits for. Returns 0, -ENOMEM or -EAGAIN. */
int thread_detach(void *(*run)(void *user), void *user);
