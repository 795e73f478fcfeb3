/*
 * How threads wait inside the library. One of them, the leader, polls and sleeps for all; it
 * takes what the daemon sent and wakes the others. Every wait is client_wait() or client_spin()
 * around a condition; bps_client_fd() and bps_client_dispatch() let the caller's own event loop
 * do the leader's work. A lost session is noticed here.
 */
#include "client.h"
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>

#define NS_PER_S  INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)
/* Wake-ups taken in one go: a socket of the daemon's holds 6. */
#define QUEUED_MAX 8

int64_t client_now_ns(void)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * NS_PER_S + now.tv_nsec;
}

int64_t client_deadline_ns(int64_t timeout_ms)
{
	int64_t deadline;

	if (timeout_ms < 0 || MUL_OVERFLOW(timeout_ms, NS_PER_MS, &deadline) ||
	    ADD_OVERFLOW(deadline, client_now_ns(), &deadline))
		return CLIENT_FOREVER;
	return deadline;
}

static void event_write(int fd)
{
	uint64_t one = 1;

	/* EAGAIN: it is readable already. */
	(void)!write(fd, &one, sizeof(one));
}

/* An eventfd, of which one read takes all. */
static void event_drain(int fd)
{
	uint64_t value;

	(void)!read(fd, &value, sizeof(value));
}

/* What the daemon gave may be a pipe or a socket, in which wake-ups queue; of a socket, each read takes one. */
static void event_drain_daemon(int fd)
{
	char values[64 * sizeof(uint64_t)];

	for (unsigned i = 0; i < QUEUED_MAX && read(fd, values, sizeof(values)) > 0; i++)
		;
}

void client_arm(struct bps_client *client, enum shm_armed how)
{
	struct shm_header *header = client->shm;

	if (!header)
		return;
	atomic_store_explicit(&header->trainer_slot, 0, memory_order_relaxed);
	atomic_store_explicit(&header->trainer_armed, how, memory_order_release);
	/* Against the daemon's fence between its completion and its look at trainer_armed. */
	shm_fence();
}

/*
 * For a wait on the futex, which is short. Who waits for one of thousands is woken for it, and for a part of them
 * that is worth it: they give back slots. Others who wait are woken by him, so then it is for any.
 */
static void client_arm_for(struct bps_client *client, const struct bps_request *request)
{
	struct shm_header *header = client->shm;
	uint64_t enough = client->ring.harvested + MAX(client->requests.n_posted / 4, (size_t)1);

	if (!request || request->state != REQUEST_POSTED || client->waiting.n_waiting) {
		client_arm(client, SHM_ARMED_FUTEX);
		return;
	}
	atomic_store_explicit(&header->trainer_enough, (uint32_t)enough, memory_order_relaxed);
	atomic_store_explicit(&header->trainer_slot, request->slot + 1, memory_order_relaxed);
	atomic_store_explicit(&header->trainer_armed, SHM_ARMED_FUTEX, memory_order_release);
	shm_fence();
}

/* The leader may sleep for something else than who comes now. True when that has come meanwhile. */
static bool client_join_leader(struct bps_client *client)
{
	struct shm_header *header = client->shm;

	if (!header || !atomic_load_explicit(&header->trainer_slot, memory_order_relaxed))
		return false;
	atomic_store_explicit(&header->trainer_slot, 0, memory_order_relaxed);
	/* As in client_arm(). */
	shm_fence();
	return client_poll_ring(client);
}

bool client_wake_leader(struct bps_client *client)
{
	struct shm_header *header = client->shm;

	return header &&
	       atomic_load_explicit(&header->trainer_armed, memory_order_relaxed) ==
		       SHM_ARMED_FUTEX &&
	       shm_disarm(header) == SHM_ARMED_FUTEX;
}

int client_failed(const struct bps_client *client)
{
	if (client->failure)
		(void)error_set(client->failure, "%s", client->failure_text);
	return client->failure;
}

void client_wake(struct bps_client *client)
{
	if (client->waiting.n_waiting)
		(void)pthread_cond_broadcast(&client->waiting.over);
	if (client->waiting.leading && !client_wake_leader(client))
		event_write(client->wakeup);
}

void client_fail(struct bps_client *client, const char *format, ...)
{
	va_list args;

	if (client->failure)
		return;

	/* What the daemon had completed before it went is complete. */
	(void)client->ops->harvest(client, true);

	va_start(args, format);
	(void)vsnprintf(client->failure_text, sizeof(client->failure_text), format, args);
	va_end(args);
	client->failure = -ESHUTDOWN;

	client->ops->failed(client);
	/* The descriptor stays, so that epoll and poll see it; the daemon sees the end. */
	(void)shutdown(client->socket, SHUT_RDWR);
	event_write(client->attention);
	client_wake(client);
}

/* What a poll reads beside the shared memory, by its place among what client_sleep() sleeps on. */
enum { POLL_SOCKET = 1, POLL_DAEMON = 2, POLL_THREADS = 4 };
#define POLL_WAKEUPS (POLL_DAEMON | POLL_THREADS)

/*
 * As client_progress(). Arms before the poll, so that what comes after the poll wakes the sleep; -1
 * leaves that as it is. Who takes the wake-ups is who was to be woken: while there is a leader they
 * are for him alone; it may be another thread that wakes him.
 */
static bool client_poll_once(struct bps_client *client, int arm, unsigned what)
{
	bool changed = false;

	if (client->failure)
		return true;

	if (what & POLL_THREADS)
		event_drain(client->wakeup);
	if (what & POLL_DAEMON)
		event_drain_daemon(client->trainer_event);
	while (client->ops->advance(client))
		changed = true;
	if (arm >= 0)
		client_arm(client, (enum shm_armed)arm);
	client->ops->send(client);
	if (what & POLL_SOCKET)
		changed |= client->ops->receive(client);
	while (client->ops->advance(client))
		changed = true;
	if (client->ops->harvest(client, false)) {
		client->waiting.slept_in_vain = false;
		changed = true;
	}
	if (client->wild)
		client_fail(client, "the daemon at %s wrote nonsense into the shared memory",
			    client->path);
	return changed || client->failure;
}

/*
 * For a poll by a thread that is not the leader. The leader has armed as it likes, and may sleep already: that stays.
 */
static int arm_of_others(const struct bps_client *client)
{
	if (client->waiting.fd_used)
		return SHM_ARMED;
	return client->waiting.leading ? -1 : SHM_AWAKE;
}

void client_tell(struct bps_client *client)
{
	if (client->waiting.fd_used)
		event_write(client->attention);
}

static bool client_progress_by(struct bps_client *client, unsigned what)
{
	bool changed;

	changed = client_poll_once(client, arm_of_others(client), what);
	if (changed) {
		client_tell(client);
		client_wake(client);
	}
	return changed;
}

bool client_progress(struct bps_client *client)
{
	return client_progress_by(client,
				  POLL_SOCKET | (client->waiting.leading ? 0 : POLL_WAKEUPS));
}

bool client_poll_ring(struct bps_client *client)
{
	return client_progress_by(client, 0);
}

/*
 * Before a sleep nothing need be read that would end it: only what that is for, if somebody waits
 * for a packet.
 */
static unsigned poll_before_sleep(const struct bps_client *client)
{
	if (client->session.state != SESSION_READY)
		return POLL_SOCKET | POLL_WAKEUPS;
	return TAILQ_EMPTY(&client->calls.list) ? 0 : POLL_SOCKET;
}

/*
 * Whether the leader may sleep on trainer_armed: only for what the daemon says there. Who waits for
 * longer is to hear his socket as well, and sleeps on descriptors.
 */
static bool may_wait_on_futex(const struct bps_client *client)
{
	return client->session.state == SESSION_READY && client->requests.n_posted &&
	       !client->waiting.slept_in_vain && !client->waiting.fd_used &&
	       TAILQ_EMPTY(&client->calls.list) && TAILQ_EMPTY(&client->calls.outbox) &&
	       !client->follow.said.on &&
	       client->session.hello.answer.features & CONTROL_FEATURE_FUTEX;
}

/* Returns what there is to look at. */
static unsigned client_futex_wait(struct bps_client *client, int64_t deadline_ns)
{
	/*
	 * It may be unmapped meanwhile: the word is left alone then, and the sleep ends at once or
	 * as it would.
	 */
	struct shm_header *header = client->shm;
	struct timespec timeout = { .tv_nsec = CLIENT_FUTEX_WAIT_NS };
	int r;

	if (deadline_ns != CLIENT_FOREVER) {
		int64_t left = MAX(deadline_ns - client_now_ns(), INT64_C(0));

		timeout.tv_nsec = MIN(left, CLIENT_FUTEX_WAIT_NS);
	}
	client_unlock(client);
	r = (int)syscall(SYS_futex, &header->trainer_armed, FUTEX_WAIT, SHM_ARMED_FUTEX, &timeout,
			 NULL, 0);
	/* Who is always interrupted by signals hears the socket, too. */
	r = r ? errno : 0;
	client_lock(client);
	client->waiting.slept_in_vain = r == ETIMEDOUT || r == EINTR;
	/* Answers that nobody waits for must not fill the socket. */
	return ++client->waiting.n_futex_waits % CLIENT_FUTEX_WAITS_POLL ? 0 : POLL_SOCKET;
}

/* Returns what there is to look at. */
static unsigned client_sleep(struct bps_client *client, int64_t deadline_ns)
{
	struct timespec timeout, *timeoutp = NULL;
	unsigned what = 0;
	int r;
	/*
	 * Another thread may lose the daemon meanwhile and close the first two: it wakes us by the
	 * third.
	 */
	struct pollfd fds[3] = {
		{ .fd = client->socket, .events = POLLIN },
		{ .fd = client->trainer_event, .events = POLLIN },
		{ .fd = client->wakeup, .events = POLLIN },
	};

	deadline_ns = MIN(deadline_ns, client->ops->due_ns(client));
	if (!TAILQ_EMPTY(&client->calls.outbox))
		fds[0].events |= POLLOUT;
	if (deadline_ns != CLIENT_FOREVER) {
		int64_t left = MAX(deadline_ns - client_now_ns(), INT64_C(0));

		timeout = (struct timespec){ left / NS_PER_S, left % NS_PER_S };
		timeoutp = &timeout;
	}

	client_unlock(client);
	r = ppoll(fds, ARRAY_SIZE(fds), timeoutp, NULL);
	client_lock(client);
	/* EINTR and what it may be else: the poll finds out. */
	if (r < 0)
		return POLL_SOCKET | POLL_WAKEUPS;
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++)
		what |= fds[i].revents ? 1u << i : 0;
	return what;
}

void client_wait_for_leader(struct bps_client *client, int64_t deadline_ns)
{
	struct timespec deadline = { deadline_ns / NS_PER_S, deadline_ns % NS_PER_S };

	client->waiting.n_waiting++;
	if (deadline_ns == CLIENT_FOREVER)
		(void)pthread_cond_wait(&client->waiting.over, &client->mutex);
	else
		(void)pthread_cond_timedwait(&client->waiting.over, &client->mutex, &deadline);
	client->waiting.n_waiting--;
}

static bool spin_pays(const struct bps_client *client, int64_t now_ns)
{
	/* With a leader it is his to look; the daemon rings for him. */
	return client->spin_ns && !client->waiting.leading &&
	       client->session.state == SESSION_READY &&
	       allowance_remains(&client->waiting.allowance, now_ns);
}

bool client_spin(struct bps_client *client, struct bps_request *request,
		 bool (*done)(struct bps_request *request), int64_t deadline_ns)
{
	int64_t start_ns = client_now_ns(), now_ns = start_ns, before_ns = start_ns;
	int64_t until_ns = MIN(start_ns + client->spin_ns, deadline_ns);
	bool paid = false;

	if (until_ns <= start_ns || !spin_pays(client, start_ns))
		return false;
	while (!paid && now_ns < until_ns) {
		before_ns = now_ns;
		client_unlock(client);
		/* The daemon's threads, and who else has work, come first. */
		(void)sched_yield();
		client_lock(client);
		/*
		 * Not behind done(), which may copy a result: that is no time in which others had
		 * the processor.
		 */
		now_ns = client_now_ns();
		paid = done(request);
	}
	allowance_settle(&client->waiting.allowance, now_ns, paid, MIN(now_ns, until_ns) - start_ns,
			 now_ns - before_ns);
	return paid;
}

void client_wait(struct bps_client *client, int64_t deadline_ns)
{
	client_wait_for(client, NULL, deadline_ns);
}

void client_wait_for(struct bps_client *client, const struct bps_request *request,
		     int64_t deadline_ns)
{
	unsigned what = 0;
	bool changed, on_futex;

	if (client->waiting.leading) {
		if (!client_join_leader(client))
			client_wait_for_leader(client, deadline_ns);
		return;
	}

	client->waiting.leading = true;
	on_futex = may_wait_on_futex(client);
	if (on_futex)
		client_arm_for(client, request);
	changed = client_poll_once(client, on_futex ? -1 : SHM_ARMED, poll_before_sleep(client));
	if (!changed) {
		what = on_futex ? client_futex_wait(client, deadline_ns)
				: client_sleep(client, deadline_ns);
		changed = client_poll_once(client, client->waiting.fd_used ? SHM_ARMED : SHM_AWAKE,
					   what);
	}
	client->waiting.leading = false;

	/* Also without a change: one of the others has to lead now. */
	if (client->waiting.n_waiting)
		(void)pthread_cond_broadcast(&client->waiting.over);
	if (changed)
		client_tell(client);
}

_public_ int bps_client_fd(struct bps_client *client)
{
	int r = client_check(client);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	if (!client->waiting.fd_used) {
		client->waiting.fd_used = true;
		/*
		 * What came before nobody was told of. The leader sleeps on descriptors from now
		 * on.
		 */
		(void)client_wake_leader(client);
		if (!client->failure)
			client_arm(client, SHM_ARMED);
		event_write(client->attention);
	}
	return client->epoll;
}

_public_ int bps_client_dispatch(struct bps_client *client)
{
	int r = client_check(client);
	if (r)
		return r;

	CLIENT_LOCKED(client);
	if (!client->failure)
		event_drain(client->attention);
	if (client_poll_once(client, arm_of_others(client),
			     POLL_SOCKET | (client->waiting.leading ? 0 : POLL_WAKEUPS)))
		client_wake(client);
	client->ops->copy(client);
	return client_failed(client);
}
