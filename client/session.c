/*
 * The session with the daemon: how it is opened, and how another is opened when the daemon's process ends. Then the
 * client's thread that is inside a call tries to connect every 20 ms, greets, shares all memory again, resumes the job,
 * declares its tensors and posts what was under way: session_advance(), which never waits. What had been asked and not
 * answered is asked again. The order is that of control.proto's Resume.
 */
#include "cuda.h"
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/un.h>

#define RETRY_MS \
	20 /* between two tries while nobody listens: nothing tells when a socket begins to */
/* The same while the listener's queue is full: there is room for a moment, when one of those in it is accepted. */
#define RETRY_FULL_MS 5
#define NS_PER_MS     INT64_C(1000000)
#define NS_PER_S      INT64_C(1000000000)

/* -- One session ------------------------------------------------------------------------------------------------- */

/* The socket exists in the client at once, where a child of fork() finds it to close. */
static int session_socket(struct bps_client *client, int flags)
{
	client_fork_lock();
	client->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0);
	client_fork_unlock();
	return client->socket < 0 ? -errno : 0;
}

static void session_close_fd(struct bps_client *client, int *fd)
{
	if (*fd < 0)
		return;
	/* By hand: a descriptor is watched for as long as any process has it. */
	(void)epoll_ctl(client->epoll, EPOLL_CTL_DEL, *fd, NULL);
	client_fork_lock();
	(void)fd_close(TAKE_FD(*fd));
	client_fork_unlock();
}

void session_drop(struct bps_client *client)
{
	call_forget(client, &client->session.hello);
	call_unsend_all(client);
	session_close_fd(client, &client->socket);
	session_close_fd(client, &client->daemon_event);
	session_close_fd(client, &client->trainer_event);
	session_close_fd(client, &client->timer);
	(void)client_wake_leader(client);
	if (client->shm)
		(void)munmap(client->shm, SHM_LEN);
	client->shm = NULL;
	client->flags = flags_free(client->flags);
	client->session.state = SESSION_LOST;
}

/*
 * One try. left_ns: how long to wait for room in the listener's queue, as its daemon may be about to restart; 0: not at
 * all.
 */
static int session_connect(struct bps_client *client, int64_t left_ns)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct timeval timeout = { left_ns / NS_PER_S, left_ns % NS_PER_S / 1000 };
	int r;

	(void)stpcpy(address.sun_path, client->path);
	r = session_socket(client, left_ns ? 0 : SOCK_NONBLOCK);
	if (r)
		return r;
	if (left_ns)
		(void)setsockopt(client->socket, SOL_SOCKET, SO_SNDTIMEO, &timeout,
				 sizeof(timeout));
	if (connect(client->socket, (const struct sockaddr *)&address, sizeof(address)))
		r = errno == EAGAIN || errno == EINPROGRESS ? -ETIMEDOUT : -errno;
	else if (left_ns && fcntl(client->socket, F_SETFL, O_NONBLOCK))
		r = -errno;
	r = r ?: client_watch(client, client->socket);
	if (r)
		session_close_fd(client, &client->socket);
	return r;
}

/* The daemon's memory: only if it cannot shrink under us, and is of the shape that both sides know. */
static int session_map(struct bps_client *client, int fd, uint64_t len)
{
	const struct shm_header *header;
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);
	void *shm;

	if (len != SHM_LEN || seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) ||
	    st.st_size < (off_t)SHM_LEN)
		return error_set(-EPROTO, "the daemon at %s shares memory of a wrong kind or size",
				 client->path);

	shm = client_map(fd, SHM_LEN, 0);
	if (!shm)
		return error_set(-errno, "cannot map the daemon's memory: %m");
	client->shm = shm;
	client->flags = flags_map(fd);
	if (!client->flags)
		return -ENOMEM;

	header = shm;
	if (header->magic != SHM_MAGIC || header->n_entries != SHM_ENTRIES ||
	    header->n_slots != SHM_SLOTS || header->len != SHM_LEN)
		return error_set(-EPROTO, "the daemon at %s shares memory of a wrong layout",
				 client->path);
	if (header->version != SHM_VERSION)
		return error_set(-EPROTONOSUPPORT,
				 "the daemon at %s has shared memory of version %u, "
				 "libbps_client " BPS_VERSION
				 " of version %u: one of them is to be updated",
				 client->path, header->version, SHM_VERSION);
	return 0;
}

/* Takes over what came with Welcome: the memory, the daemon's eventfd, ours. */
static int session_adopt(struct bps_client *client, int fds[3])
{
	_cleanup_(fd_closep) int memory = fds[0];
	uint32_t version = client->session.hello.answer.version;
	int r;

	client->daemon_event = fds[1];
	client->trainer_event = fds[2];
	client->ring.tail = client->ring.harvested = client->ring.seen = 0;
	client->ring.ordered = client->session.hello.answer.features & CONTROL_FEATURE_ORDER;
	client->ring.widens = client->session.hello.answer.features & CONTROL_FEATURE_WIDEN;
	client->follow.offered = client->session.hello.answer.features & CONTROL_FEATURE_FOLLOW;
	/* Another process made them: a write or read must not block, whatever they are. */
	if (fcntl(client->daemon_event, F_SETFL, O_NONBLOCK) ||
	    fcntl(client->trainer_event, F_SETFL, O_NONBLOCK))
		return error_set(-errno, "cannot use the daemon's descriptors: %m");
	r = session_map(client, memory, client->session.hello.answer.shm_len);
	r = r ?: client_watch(client, client->trainer_event);
	if (r)
		return r;
	if (version < CLIENT_PROTOCOL_MIN || version > CLIENT_PROTOCOL)
		return error_set(-EPROTONOSUPPORT,
				 "the daemon at %s chose version %u of the protocol, "
				 "libbps_client " BPS_VERSION " speaks %u to %u",
				 client->path, version, CLIENT_PROTOCOL_MIN, CLIENT_PROTOCOL);
	client_arm(client, client->waiting.fd_used ? SHM_ARMED : SHM_AWAKE);
	return 0;
}

static int session_greet(struct bps_client *client)
{
	client->session.state = SESSION_GREETING;
	return call_hello(client, &client->session.hello);
}

/* -EAGAIN while the answer to Hello is not there. */
static int session_welcome(struct bps_client *client)
{
	int fds[3];
	int r = call_receive_welcome(client, &client->session.hello, fds);

	if (r == -EAGAIN)
		return r;
	call_forget(client, &client->session.hello);
	return r ?: session_adopt(client, fds);
}

/* -- The first ----------------------------------------------------------------------------------------------------- */

static int session_find(struct bps_client *client, int64_t deadline_ns)
{
	int r;

	for (;;) {
		r = session_connect(client, MAX(deadline_ns - client_now_ns(), NS_PER_MS));
		if (r != -ENOENT && r != -ECONNREFUSED)
			break;
		if (client_now_ns() >= deadline_ns)
			break;
		(void)poll(NULL, 0, RETRY_MS);
	}
	if (r == -ENOENT || r == -ECONNREFUSED)
		return error_set(r, "no bps-daemon listens at %s", client->path);
	if (r == -EACCES)
		return error_set(r, "%s is not for this user: is he in the group bps?",
				 client->path);
	if (r)
		return error_set(r, "cannot connect to %s: %s", client->path, strerror(-r));
	return 0;
}

static int session_begin(struct bps_client *client, int64_t deadline_ns)
{
	int r;

	r = session_find(client, deadline_ns);
	r = r ?: session_greet(client);
	if (r)
		return r;

	deadline_ns = MAX(deadline_ns, client_now_ns() + CLIENT_ANSWER_NS);
	while ((r = session_welcome(client)) == -EAGAIN) {
		struct pollfd readable = { .fd = client->socket, .events = POLLIN };
		int64_t left_ms = (deadline_ns - client_now_ns()) / NS_PER_MS;

		if (left_ms <= 0)
			return error_set(-ETIMEDOUT, "the daemon at %s does not answer",
					 client->path);
		(void)poll(&readable, 1, (int)MIN(left_ms, INT64_C(1000000)));
	}
	return r;
}

int session_open(struct bps_client *client, int64_t timeout_ms)
{
	int64_t deadline_ns = client_deadline_ns(timeout_ms);
	int r;

	/* One that dies before it has answered is about to restart, like one that does not listen. */
	while ((r = session_begin(client, deadline_ns)) == -ECONNRESET &&
	       client_now_ns() < deadline_ns) {
		session_close_fd(client, &client->socket);
		(void)poll(NULL, 0, RETRY_MS);
	}
	if (r)
		return r;
	client->session.daemon = client->session.hello.answer.daemon;
	client->session.state = SESSION_READY;
	return 0;
}

/* -- The next ------------------------------------------------------------------------------------------------------ */

int64_t session_due_ns(const struct bps_client *client)
{
	const struct session *session = &client->session;

	switch (session->state) {
	case SESSION_LOST:
		return MIN(session->retry_ns, session->deadline_ns);
	case SESSION_READY:
		return CLIENT_FOREVER;
	default:
		return session->deadline_ns;
	}
}

/* The caller of bps_client_fd() has to come back then. */
static void session_set_timer(const struct bps_client *client)
{
	int64_t due_ns = session_due_ns(client);
	struct itimerspec due = { .it_value = { due_ns / NS_PER_S, due_ns % NS_PER_S } };

	if (client->timer < 0)
		return;
	if (due_ns == CLIENT_FOREVER)
		due = (struct itimerspec){ 0 };
	else if (due_ns <= 0)
		due.it_value = (struct timespec){ 0, 1 };
	(void)timerfd_settime(client->timer, TFD_TIMER_ABSTIME, &due, NULL);
}

static int session_make_timer(struct bps_client *client)
{
	client_fork_lock();
	client->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	client_fork_unlock();
	if (client->timer < 0)
		return error_set(-errno, "no descriptor for a timer: %m");
	return client_watch(client, client->timer);
}

void session_lost(struct bps_client *client)
{
	struct session *session = &client->session;
	bool was_ready = session->state == SESSION_READY;

	/* What the daemon had completed before it went is complete. */
	(void)request_harvest(client, true);
	if (client->wild || client->restart_timeout_ms < 0 || cuda_is_sharing(client) ||
	    !job_survives(client) || client->job.error) {
		client_fail(client, "the daemon at %s has gone%s", client->path, client->farewell);
		return;
	}
	/* Of a job that is over. */
	cuda_leave(client);
	/* One that comes and goes is not back. */
	if (was_ready)
		session->give_up_ns = client_deadline_ns(client->restart_timeout_ms);
	session_drop(client);
	session->deadline_ns = session->give_up_ns;
	session->retry_ns = 0;
	session->error = 0;
	if (session_make_timer(client))
		client_fail(client, "the daemon at %s has gone: %s", client->path, bps_error());
	session_set_timer(client);
}

static void session_retry(struct bps_client *client, int error)
{
	struct session *session = &client->session;

	session_close_fd(client, &client->socket);
	session->state = SESSION_LOST;
	session->deadline_ns = session->give_up_ns;
	session->retry_ns =
		client_now_ns() + (error == -ETIMEDOUT ? RETRY_FULL_MS : RETRY_MS) * NS_PER_MS;
	session->error = error == -ENOENT || error == -ECONNREFUSED ? 0 : error;
}

/* The next daemon does not let the rank follow the others. */
static void session_follow_refused(struct bps_client *client, struct client_call *call)
{
	struct client_follow *follow = &client->follow;

	if (!call->status || !follow->said.on)
		return;
	follow->said.status = call->status;
	(void)snprintf(follow->text, sizeof(follow->text), "%s", call->text);
}

/* Tells it whether the rank follows, and in which turn, and asks it for the answer that the one before owed. */
static int session_follow(struct bps_client *client)
{
	struct client_follow *follow = &client->follow;

	if (follow->call.pending)
		return call_follow(client, &follow->call);
	if ((!follow->said.on && !follow->n_all) || !follow->offered || !job_is_held(client))
		return 0;
	call_forget(client, &follow->again);
	follow->again = (struct client_call){ .answered = session_follow_refused };
	return call_follow(client, &follow->again);
}

/* The job is as it was, and all that was declared and submitted is known to the daemon. */
static int session_ready(struct bps_client *client)
{
	int r;

	client->session.state = SESSION_READY;
	session_close_fd(client, &client->timer);
	r = request_post_all(client);
	if (!r && client->job.state == JOB_LEAVING && job_is_held(client))
		r = call_leave(client);
	if (!r && client->job.regroup.pending && job_is_held(client))
		r = call_regroup(client);
	r = r ?: session_follow(client);
	if (!r && client->calls.asked.pending)
		r = call_status(client, client->calls.asked.answer.status);
	return r;
}

/*
 * The daemon waits for the other ranks, and knows who is missing; beyond that, it is the daemon that is. A rank that
 * computes has as long as for a request.
 */
static int64_t session_resume_deadline_ns(const struct bps_client *client)
{
	uint64_t timeout_ms = client->session.hello.answer.resume_timeout_ms;
	int64_t deadline_ns;

	timeout_ms = MAX(timeout_ms, (uint64_t)client->job.params.request_timeout_ms);
	deadline_ns = client_deadline_ns((int64_t)MIN(timeout_ms, (uint64_t)INT64_MAX));
	if (ADD_OVERFLOW(deadline_ns, CLIENT_ANSWER_NS, &deadline_ns))
		return CLIENT_FOREVER;
	return deadline_ns;
}

/* A daemon is there, and it is another: tells it of the memory and of the job. */
static int session_return(struct bps_client *client)
{
	const struct client_call *hello = &client->session.hello;
	struct bps_memory *memory;
	int r = 0;

	client->session.daemon = hello->answer.daemon;
	client->session.state = SESSION_OPEN;
	client->farewell[0] = 0;
	TAILQ_FOREACH(memory, &client->memory.shared, link)
	if (!memory->cuda)
		r = r ?: call_share(client, memory);
	if (r)
		return r;

	if (job_is_held(client) && !(hello->answer.features & CONTROL_FEATURE_RESUME))
		job_discontinue(client, -ECONNRESET,
				"the daemon that came after another is of a version that cannot "
				"go on with the job");
	if (job_is_held(client) && !client->ring.widens && request_any_widens(client))
		job_discontinue(client, -ECONNRESET,
				"the daemon that came after another is of a version that takes no "
				"input of another type than its tensor's, as one under way has");
	if (job_is_held(client) && client->follow.said.on && !client->follow.offered)
		job_discontinue(client, -ECONNRESET,
				"the daemon that came after another is of a version that knows no "
				"rank that follows the others, as this one does");
	if (job_is_held(client)) {
		client->session.deadline_ns = session_resume_deadline_ns(client);
		return call_resume(client);
	}
	if (client->job.state == JOB_JOINING)
		r = call_join(client);
	return r ?: session_ready(client);
}

void session_resumed(struct bps_client *client)
{
	struct session *session = &client->session;
	int r;

	session->state = SESSION_DECLARING;
	session->deadline_ns = client_now_ns() + CLIENT_ANSWER_NS;
	r = job_is_held(client) ? tensor_declare_all(client) : 0;
	session->declared = client->calls.n_packets;
	if (r)
		client_fail(client, "cannot resume the job: %s", bps_error());
}

/* Looks for the answer to Hello. */
static bool session_poll_welcome(struct bps_client *client)
{
	struct client_call *hello = &client->session.hello;
	int r = session_welcome(client);

	if (r == -EAGAIN)
		return false;
	/* It went again, or has no room yet. */
	if (r == -ECONNRESET || (hello->done && hello->status && r != -EPROTONOSUPPORT)) {
		session_retry(client, r);
		return true;
	}
	if (!r && hello->answer.daemon == client->session.daemon) {
		client_fail(client, "the daemon at %s has ended the session%s", client->path,
			    client->farewell);
		return true;
	}
	r = r ?: session_return(client);
	if (r)
		client_fail(client, "the daemon at %s has gone, and with the next: %s",
			    client->path, bps_error());
	return true;
}

static bool session_step(struct bps_client *client)
{
	struct session *session = &client->session;
	int r;

	switch (session->state) {
	case SESSION_LOST:
		if (client_now_ns() < session->retry_ns)
			return false;
		r = session_connect(client, 0);
		r = r ?: session_greet(client);
		if (r)
			session_retry(client, r);
		return !r;
	case SESSION_GREETING:
		return session_poll_welcome(client);
	case SESSION_DECLARING:
		/* Entries behind the declarations: the daemon must not see one without its tensor. */
		if (client->calls.n_packets_sent < session->declared)
			return false;
		if (session_ready(client))
			client_fail(client, "cannot resume the job: %s", bps_error());
		return true;
	default:
		return false;
	}
}

static void session_expire(struct bps_client *client)
{
	int64_t waited_ms = client->restart_timeout_ms;
	int error = client->session.error;

	if (client->session.state >= SESSION_OPEN)
		client_fail(client, "the daemon at %s came back, but does not %s", client->path,
			    client->session.state == SESSION_OPEN ? "resume the job" : "read");
	else
		client_fail(client,
			    "the daemon at %s has gone%s, and did not come back within %lld %s%s%s",
			    client->path, client->farewell,
			    (long long)(waited_ms % 1000 ? waited_ms : waited_ms / 1000),
			    waited_ms % 1000 ? "ms" : "s", error ? ": " : "",
			    error ? strerror(-error) : "");
}

bool session_advance(struct bps_client *client)
{
	bool changed;

	if (likely(client->session.state == SESSION_READY) || client->failure)
		return false;
	changed = session_step(client);
	if (!client->failure && client->session.state != SESSION_READY &&
	    client_now_ns() >= client->session.deadline_ns) {
		session_expire(client);
		changed = true;
	}
	session_set_timer(client);
	return changed && !client->failure;
}
