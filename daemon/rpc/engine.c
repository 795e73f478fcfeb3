/*
 * gRPC's library while it is in use: started for the first server or channel, stopped after the
 * last, its completions run on the loop for a bounded time each turn. serve.c and channel.c
 * call; struct rpc is made here for daemon.c and bpsctl.
 */
#include "rpc/engine.h"

#include "base/clock.h"
#include <fcntl.h>
#include <grpc/support/time.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

/* What completions may take of one turn of the loop. */
#define TURN_NS (2 * NSEC_PER_MSEC)

void rpc_engine_wake(struct rpc *rpc)
{
	uint64_t one = 1;

	/* Can only fail when the counter is full, and then the loop is awake anyway. */
	while (write(rpc->source.fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static void push_done(struct rpc *rpc, struct rpc_op *op)
{
	bool first;

	op->next = NULL;
	(void)pthread_mutex_lock(&rpc->lock);
	first = !rpc->done;
	*rpc->done_tail = op;
	rpc->done_tail = &op->next;
	(void)pthread_mutex_unlock(&rpc->lock);
	if (first)
		rpc_engine_wake(rpc);
}

static void *engine_main(void *user)
{
	struct rpc *rpc = user;
	grpc_completion_queue *queue;

	grpc_init();
	queue = grpc_completion_queue_create_for_next(NULL);
	(void)pthread_mutex_lock(&rpc->lock);
	rpc->made = queue;
	rpc->up = true;
	(void)pthread_cond_signal(&rpc->changed);
	(void)pthread_mutex_unlock(&rpc->lock);
	rpc_engine_wake(rpc);

	for (;;) {
		struct rpc_op *op;
		grpc_event event =
			grpc_completion_queue_next(queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);

		if (event.type == GRPC_QUEUE_SHUTDOWN)
			break;
		if (event.type != GRPC_OP_COMPLETE)
			continue;
		op = event.tag;
		(void)atomic_load_explicit(&op->handed_over, memory_order_acquire);
		op->ok = event.success;
		push_done(rpc, op);
	}

	grpc_completion_queue_destroy(queue);
	grpc_shutdown_blocking();
	(void)pthread_mutex_lock(&rpc->lock);
	rpc->ended = true;
	(void)pthread_cond_signal(&rpc->changed);
	(void)pthread_mutex_unlock(&rpc->lock);
	rpc_engine_wake(rpc);
	return NULL;
}

int rpc_engine_start(struct rpc *rpc)
{
	sigset_t all, old;
	int r;

	if (rpc->state != ENGINE_STOPPED)
		return 0;
	/* The threads that gRPC starts inherit this mask. */
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&rpc->thread, NULL, engine_main, rpc);
	(void)pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (r)
		return error_origin(-r);
	(void)pthread_setname_np(rpc->thread, "bps-grpc");
	rpc->state = ENGINE_STARTING;
	return 0;
}

/* Takes note of what the thread has reached. */
static void follow_thread(struct rpc *rpc)
{
	bool up, ended;

	(void)pthread_mutex_lock(&rpc->lock);
	up = rpc->up;
	ended = rpc->ended;
	rpc->up = rpc->ended = false;
	rpc->queue = rpc->made;
	(void)pthread_mutex_unlock(&rpc->lock);

	if (up)
		rpc->state = ENGINE_RUNNING;
	if (ended) {
		(void)pthread_join(rpc->thread, NULL);
		rpc->state = ENGINE_STOPPED;
	}
}

static void wait_for_thread(struct rpc *rpc)
{
	(void)pthread_mutex_lock(&rpc->lock);
	while (!rpc->up && !rpc->ended)
		(void)pthread_cond_wait(&rpc->changed, &rpc->lock);
	(void)pthread_mutex_unlock(&rpc->lock);
	follow_thread(rpc);
}

int rpc_engine_acquire(struct rpc *rpc)
{
	int r;

	while (rpc->state != ENGINE_RUNNING) {
		r = rpc_engine_start(rpc);
		if (r)
			return error_trace(r);
		wait_for_thread(rpc);
	}
	rpc->n_users++;
	return 0;
}

static void stop(struct rpc *rpc)
{
	rpc->state = ENGINE_STOPPING;
	grpc_completion_queue_shutdown(rpc->queue);
}

void rpc_engine_release(struct rpc *rpc)
{
	assert(rpc->n_users && rpc->state == ENGINE_RUNNING);
	if (!--rpc->n_users)
		stop(rpc);
}

static struct rpc_op *take_done(struct rpc *rpc)
{
	struct rpc_op *op;

	(void)pthread_mutex_lock(&rpc->lock);
	op = rpc->done;
	if (op)
		rpc->done = op->next;
	if (!rpc->done)
		rpc->done_tail = &rpc->done;
	(void)pthread_mutex_unlock(&rpc->lock);
	return op;
}

/* Others make as many calls as they like: what is done in a turn is bounded, the rest is left to the next. */
static void run_done(struct rpc *rpc)
{
	uint64_t count, end_ns = clock_now_ns() + TURN_NS;
	struct rpc_op *op;

	(void)!read(rpc->source.fd, &count, sizeof(count));
	follow_thread(rpc);
	while ((op = take_done(rpc))) {
		op->complete(op, op->ok);
		if (clock_now_ns() < end_ns)
			continue;
		rpc_engine_wake(rpc);
		break;
	}
	rpc_unix_proceed(rpc);
	/* Started for a client that has hung up meanwhile, or for nobody any more. */
	if (rpc->state == ENGINE_RUNNING && !rpc->n_users)
		stop(rpc);
}

static void on_event(struct loop_source *source, uint32_t events)
{
	struct rpc *rpc = container_of(source, struct rpc, source);

	run_done(rpc);
	rpc_channels_proceed(rpc);
}

void rpc_engine_turn(struct rpc *rpc, int timeout_ms)
{
	struct pollfd pollfd = { .fd = rpc->source.fd, .events = POLLIN };

	if (poll(&pollfd, 1, timeout_ms) > 0)
		on_event(&rpc->source, EPOLLIN);
}

int rpc_new(struct loop *loop, struct rpc **ret_rpc)
{
	_cleanup_(freep) struct rpc *rpc = calloc(1, sizeof(*rpc));
	int r;

	if (!rpc)
		return error_origin(-ENOMEM);
	*rpc = (struct rpc){
		.loop = loop,
		.source = { .fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), .ready = on_event },
		.unix_idle_ms = RPC_UNIX_IDLE_MS,
		.lock = PTHREAD_MUTEX_INITIALIZER,
		.changed = PTHREAD_COND_INITIALIZER,
	};
	if (rpc->source.fd < 0)
		return error_origin(-errno);
	rpc->done_tail = &rpc->done;
	list_init(&rpc->methods);
	list_init(&rpc->servers);
	list_init(&rpc->channels);
	r = loop_add(loop, &rpc->source, EPOLLIN);
	if (r) {
		fd_close(rpc->source.fd);
		return error_trace(r);
	}
	rpc_library_prepare();
	*ret_rpc = TAKE_PTR(rpc);
	return 0;
}

void rpc_close(struct rpc *rpc)
{
	struct rpc_server *server, *next;

	rpc->closed = true;
	rpc_unix_close(rpc);
	list_for_each_safe (server, next, &rpc->servers, link)
		rpc_server_close(server);
}

struct rpc *rpc_free(struct rpc *rpc)
{
	if (!rpc)
		return NULL;
	assert(list_empty(&rpc->channels));
	rpc_close(rpc);
	while (rpc->state != ENGINE_STOPPED)
		rpc_engine_turn(rpc, -1);
	assert(list_empty(&rpc->servers));
	loop_remove(&rpc->source);
	fd_close(rpc->source.fd);
	(void)pthread_mutex_destroy(&rpc->lock);
	(void)pthread_cond_destroy(&rpc->changed);
	free(rpc);
	return NULL;
}

struct loop *rpc_loop(const struct rpc *rpc)
{
	return rpc->loop;
}

bool rpc_running(const struct rpc *rpc)
{
	return rpc->state != ENGINE_STOPPED;
}

void rpc_add_method(struct rpc *rpc, struct rpc_method *method)
{
	assert(list_empty(&rpc->servers) && !rpc->unix_socket);
	list_push_back(&rpc->methods, &method->link);
}

void rpc_set_unix_idle_ms(struct rpc *rpc, unsigned idle_ms)
{
	rpc->unix_idle_ms = idle_ms;
}
