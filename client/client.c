/*
 * A client from bps_client_open() to bps_client_close(), and which files hear of what wait.c and
 * call.c find out. Also asserts that bps.h has the numbers of proto/types.h. client.h says how
 * threads share a client; session.c opens the session with the daemon.
 */
#include "cuda.h"
#include "proto/frame.h"
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/un.h>

#define SOCKET_SYSTEM "/run/bps/bps.sock"
#define SOCKET_USER   "bps/bps.sock" /* below $XDG_RUNTIME_DIR */
#define LEAVE_NS      (10 * INT64_C(1000000000))

/* All of it is memory, and made at once: a rank that stages little pays for no more. */
#define STAGING_ARENA_MIN (UINT64_C(256) << 10)

#define ASSERT_SAME(a, b) static_assert((int)(a) == (int)(b), "bps.h repeats proto/types.h")
ASSERT_SAME(BPS_FLOAT64, DTYPE_FLOAT64);
ASSERT_SAME(BPS_FLOAT32, DTYPE_FLOAT32);
ASSERT_SAME(BPS_FLOAT16, DTYPE_FLOAT16);
ASSERT_SAME(BPS_BFLOAT16, DTYPE_BFLOAT16);
ASSERT_SAME(BPS_INT64, DTYPE_INT64);
ASSERT_SAME(BPS_INT32, DTYPE_INT32);
ASSERT_SAME(BPS_INT16, DTYPE_INT16);
ASSERT_SAME(BPS_INT8, DTYPE_INT8);
ASSERT_SAME(BPS_UINT8, DTYPE_UINT8);
ASSERT_SAME(BPS_BOOL, DTYPE_BOOL);
ASSERT_SAME(BPS_BOOL, DTYPE_MAX_);
ASSERT_SAME(BPS_PUSH_PULL, OPERATION_PUSH_PULL);
ASSERT_SAME(BPS_BROADCAST, OPERATION_BROADCAST);
ASSERT_SAME(BPS_ALL_GATHER, OPERATION_ALL_GATHER);
ASSERT_SAME(BPS_REDUCE_SCATTER, OPERATION_REDUCE_SCATTER);
ASSERT_SAME(BPS_ALL_TO_ALL, OPERATION_ALL_TO_ALL);
ASSERT_SAME(BPS_BARRIER, OPERATION_BARRIER);
ASSERT_SAME(BPS_PUSH_PULL_ROWS, OPERATION_PUSH_PULL_ROWS);
ASSERT_SAME(BPS_PUSH_PULL_ROWS, OPERATION_PUSH_PULL_ROWS);
ASSERT_SAME(BPS_ACCUMULATE, OPERATION_ACCUMULATE);
ASSERT_SAME(BPS_ACCUMULATE, OPERATION_MAX_);
ASSERT_SAME(BPS_REFUSE, OPERATION_REFUSE);
ASSERT_SAME(BPS_SUM, REDUCTION_SUM);
ASSERT_SAME(BPS_AVERAGE, REDUCTION_AVERAGE);
ASSERT_SAME(BPS_MIN, REDUCTION_MIN);
ASSERT_SAME(BPS_MAX, REDUCTION_MAX);
ASSERT_SAME(BPS_MAX, REDUCTION_MAX_);
ASSERT_SAME(BPS_GPU_REDUCE_AUTO, GPU_REDUCE_AUTO);
ASSERT_SAME(BPS_GPU_REDUCE_NCCL, GPU_REDUCE_NCCL);
ASSERT_SAME(BPS_GPU_REDUCE_SWITCH, GPU_REDUCE_SWITCH);
ASSERT_SAME(BPS_GPU_REDUCE_HOST, GPU_REDUCE_HOST);
ASSERT_SAME(BPS_GPU_REDUCE_ROOTS, GPU_REDUCE_ROOTS);
ASSERT_SAME(BPS_GPU_REDUCE_ROOTS, GPU_REDUCE_MAX_);
static_assert(BPS_VARIABLE == ELEMENTS_VARIABLE, "bps.h repeats proto/types.h");

/* Gives back what only an open client needs. The objects of the caller keep the rest in memory. */
static void client_disconnect(struct bps_client *client)
{
	session_drop(client);
	/* Out of the list first: a fork now must not close descriptors that are being closed. */
	client_fork_remove(client);
	client_close_fds(client);
	request_free_spare(client);
	follow_end(&client->follow);
	free(client->frame);
	client->frame = NULL;
	free(client->memory.by_address);
	client->memory.by_address = NULL;
	client->memory.n = client->memory.capacity = 0;
}

static struct bps_client *client_abandon(struct bps_client *client)
{
	client_disconnect(client);
	return client_unref(client);
}
DEFINE_CLEANUP(struct bps_client *, client_abandon)

static int client_init_locks(struct bps_client *client)
{
	pthread_condattr_t attributes;
	int r;

	r = pthread_mutex_init(&client->mutex, NULL);
	if (r)
		return -r;
	r = pthread_condattr_init(&attributes);
	if (!r) {
		(void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
		r = pthread_cond_init(&client->waiting.over, &attributes);
		(void)pthread_condattr_destroy(&attributes);
	}
	if (r)
		(void)pthread_mutex_destroy(&client->mutex);
	return -r;
}

static void end_all(struct bps_client *client)
{
	call_finish_all(client, client->failure, client->failure_text);
	request_end_all(client, client->failure, client->failure_text);
}

static const struct client_ops ops = {
	.send = call_send_queued,
	.receive = call_receive,
	.advance = session_advance,
	.due_ns = session_due_ns,
	.harvest = request_harvest,
	.copy = request_copy_all,
	.failed = end_all,
	.lost = session_lost,
	.job_is_over = job_has_failed,
	.unused = tensor_unused,
	.begun = follow_hear_begun,
	.all_follow = follow_hear_all,
};

static int client_new(struct bps_client **ret_client)
{
	struct bps_client *client;
	int r;

	client = calloc(1, sizeof(*client));
	if (!client)
		return error_set(-ENOMEM, "out of memory");
	r = client_init_locks(client);
	if (r) {
		free(client);
		return error_set(r, "cannot make a lock: %s", strerror(-r));
	}

	client->refs = 1;
	client->ops = &ops;
	client->socket = client->daemon_event = client->trainer_event = client->timer = -1;
	client->wakeup = client->attention = client->epoll = client->job.ledger = -1;
	TAILQ_INIT(&client->calls.list);
	TAILQ_INIT(&client->calls.outbox);
	follow_init(&client->follow);
	TAILQ_INIT(&client->memory.shared);
	staging_init(&client->memory.staging, STAGING_ARENA_MIN, NULL);
	TAILQ_INIT(&client->requests.posted);
	TAILQ_INIT(&client->requests.ended);
	TAILQ_INIT(&client->requests.spare);
	for (uint32_t i = SHM_SLOTS; i--;)
		client->ring.slots_free[client->ring.n_slots_free++] = i;

	client_fork_add(client);
	*ret_client = client;
	return 0;
}

/* $BPS_SOCKET, the user's own daemon if there is one, the system's. To be freed. */
static char *socket_default(void)
{
	const char *path = secure_getenv("BPS_SOCKET");
	const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
	char *user;

	if (path && *path)
		return strdup(path);
	if (runtime && *runtime) {
		if (asprintf(&user, "%s/" SOCKET_USER, runtime) < 0)
			return NULL;
		if (!access(user, F_OK))
			return user;
		free(user);
	}
	return strdup(SOCKET_SYSTEM);
}

/* What lasts as long as the client. */
static int client_prepare(struct bps_client *client, const struct bps_open_params *params)
{
	struct sockaddr_un address;
	int r;

	r = environment_restart_timeout(params->restart_timeout_ms, &client->restart_timeout_ms);
	r = r ?: environment_spin(&client->spin_ns);
	if (r)
		return r;
	client->path = params->socket ? strdup(params->socket) : socket_default();
	client->frame = malloc(FRAME_MAX);
	if (!client->path || !client->frame)
		return error_set(-ENOMEM, "out of memory");
	if (!*client->path || strlen(client->path) >= sizeof(address.sun_path))
		return error_set(-EINVAL, "\"%s\" cannot be a socket: 1 to %zu bytes", client->path,
				 sizeof(address.sun_path) - 1);

	client->wakeup = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	client->attention = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	client->epoll = epoll_create1(EPOLL_CLOEXEC);
	if (client->wakeup < 0 || client->attention < 0 || client->epoll < 0)
		return error_set(-errno, "no descriptors left: %m");
	return client_watch(client, client->attention);
}

_public_ int bps_client_open(const struct bps_open_params *params, struct bps_client **ret_client)
{
	_cleanup_(client_abandonp) struct bps_client *client = NULL;
	struct bps_open_params known = { 0 };
	int r;

	if (!ret_client)
		return error_set(-EINVAL, "ret_client is NULL");
	if (params) {
		r = error_copy_params(&known, sizeof(known), params, "bps_open_params");
		if (r)
			return r;
	}
	r = client_fork_guard(memory_forked);
	if (r)
		return r;
	r = client_new(&client);
	r = r ?: client_prepare(client, &known);
	r = r ?: session_open(client, known.timeout_ms);
	if (r)
		return r;

	*ret_client = TAKE_PTR(client);
	return 0;
}

/* error: of what the process is about to end, or NULL. */
static void client_end(struct bps_client *client, const char *error)
{
	char copy[LEAVE_ERROR_MAX + 1];

	/* In a child there is nothing that could be touched safely. */
	if (!client || client_check(client))
		return;

	client_lock(client);
	if (error) {
		(void)snprintf(copy, sizeof(copy), "%s", error);
		client->job.error = copy;
	}
	(void)job_leave(client, client_now_ns() + LEAVE_NS);
	client->job.error = NULL;
	request_end_all(client, -ECANCELED, "the client was closed");
	request_copy_all(client);
	client_fail(client, "the client was closed");
	tensor_drop_all(client);
	staging_done(&client->memory.staging);
	cuda_close(client);
	client_disconnect(client);
	client_unlock(client);
	client_unref(client);
}

_public_ void bps_client_close(struct bps_client *client)
{
	client_end(client, NULL);
}

_public_ void bps_client_abort(struct bps_client *client, const char *error)
{
	client_end(client, error && *error ? error : "unknown");
}

_public_ const char *bps_client_notice(struct bps_client *client)
{
	if (client_check(client))
		return NULL;

	CLIENT_LOCKED(client);
	for (unsigned i = 0; i < NOTICE_MAX_; i++) {
		if (client->notices[i] && !client->noticed[i]) {
			client->noticed[i] = true;
			return client->notices[i];
		}
	}
	return NULL;
}

_public_ const char *bps_version(void)
{
	return BPS_VERSION;
}

_public_ size_t bps_dtype_size(int dtype)
{
	return dtype > 0 ? dtype_size((unsigned)dtype) : 0;
}
