/*
 * A session from its connection to its end: packets in and out, the trainer's process, its
 * buffers and tensors. listener.c makes sessions, request.c handles their packets, ring.c their
 * entries.
 */
#include "control/session.h"
#include "base/log.h"
#include "proto/pack.h"
#include "tensor/tensor.h"
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>

/* A trainer that was killed hangs up a moment before it is dead; so long we wait to say which of the two it was. */
#define DEATH_WAIT_NS (50 * NSEC_PER_MSEC)

struct packet {
	struct list link;
	int fd; /* goes beside it, or -1 */
	size_t len;
	char data[];
};

/* -- Out ---------------------------------------------------------------------------------------------------------- */

static void packet_free(struct session *session, struct packet *packet)
{
	list_remove(&packet->link);
	session->n_outbox--;
	(void)fd_close(packet->fd);
	free(packet);
}

/* fd: goes beside it, stays the caller's; or -1. */
static void queue_packet(struct session *session, const void *data, size_t len, int fd)
{
	struct packet *packet;
	int kept = -1;

	/* It has hung up, and reads nothing any more. */
	if (!session->socket.loop)
		return;
	if (session->n_outbox >= OUTBOX_MAX) {
		session_fail(session, "does not read its packets");
		return;
	}
	packet = malloc(sizeof(*packet) + len);
	if (packet && fd >= 0)
		kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (!packet || kept < (fd >= 0 ? 0 : -1)) {
		free(packet);
		session_fail(session, "no memory or no descriptor for its packets");
		return;
	}
	packet->fd = kept;
	packet->len = len;
	memcpy(packet->data, data, len);
	list_push_back(&session->outbox, &packet->link);
	if (!session->n_outbox++)
		(void)loop_modify(&session->socket, EPOLLIN | EPOLLOUT);
}

void session_send(struct session *session, const Bps__Control__Message *message, const int *fds,
		  size_t n_fds)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	if (session->state == SESSION_CLOSED)
		return;
	if (pack(&message->base, FRAME_MAX, &data, &len)) {
		session_fail(session, "no memory for its packets");
		return;
	}
	/* A message always has an id: it is never empty. */
	r = session->n_outbox ? FRAME_E_AGAIN
			      : frame_send(session->socket.fd, data, len, fds, n_fds);
	if (r == FRAME_E_AGAIN && n_fds <= 1)
		queue_packet(session, data, len, n_fds ? fds[0] : -1);
	else if (r && r != FRAME_E_EOF) /* the end is seen by reading */
		session_fail(session, "cannot be sent to: %s",
			     r == FRAME_E_AGAIN ? "its socket is full" : strerror(-r));
}

void session_answer(struct session *session, uint64_t id, int status, const char *text)
{
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;

	message.id = id;
	message.has_status = status != 0;
	message.status = status;
	message.text = status ? (char *)text : NULL;
	session_send(session, &message, NULL, 0);
}

static void send_queued(struct session *session)
{
	struct packet *packet;
	int r;

	while ((packet = list_first(&session->outbox, struct packet, link))) {
		r = frame_send(session->socket.fd, packet->data, packet->len, &packet->fd,
			       packet->fd >= 0);
		if (r == FRAME_E_AGAIN)
			return;
		packet_free(session, packet);
		if (r < 0) {
			session_fail(session, "cannot be sent to: %s", strerror(-r));
			return;
		}
	}
	(void)loop_modify(&session->socket, EPOLLIN);
}

/* -- In ----------------------------------------------------------------------------------------------------------- */

/* The trainer has hung up. What it posted before is still taken; who it was is asked of its process. */
static void hung_up(struct session *session)
{
	loop_remove(&session->socket);
	if (session->process.fd < 0 || !session->in_job ||
	    loop_timer_set(session->control->params.loop, &session->timer,
			   clock_now_ns() + DEATH_WAIT_NS))
		session_close(session, "closed its connection");
}

bool session_receive_one(struct session *session)
{
	char *packet = session->control->packet;
	int fds[FRAME_FDS], r;
	size_t len = 0, n_fds = 0;

	if (session->state == SESSION_CLOSED || !session->socket.loop)
		return false;
	r = frame_receive(session->socket.fd, packet, &len, fds, &n_fds);
	if (r == FRAME_E_AGAIN)
		return false;
	if (r == FRAME_E_EOF) {
		hung_up(session);
		return false;
	}
	if (r) {
		session_fail(session, "sent a packet that cannot be read: %s", strerror(-r));
		return false;
	}
	session_take_packet(session, packet, len, fds, n_fds);
	for (size_t i = 0; i < n_fds; i++)
		(void)fd_close(fds[i]);
	return session->state != SESSION_CLOSED;
}

static void on_socket(struct loop_source *source, uint32_t events)
{
	struct session *session = container_of(source, struct session, socket);
	uint64_t until_ns;

	if (events & EPOLLOUT)
		send_queued(session);
	if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
		return;
	until_ns = clock_now_ns() + PACKET_TURN_NS;
	for (size_t i = 0; i < PACKET_BATCH && clock_now_ns() < until_ns; i++)
		if (!session_receive_one(session))
			return;
}

static void on_process(struct loop_source *source, uint32_t events)
{
	(void)events;
	session_close(container_of(source, struct session, process), "died");
}

static void on_timer(struct loop_timer *timer)
{
	struct session *session = container_of(timer, struct session, timer);

	if (session->state == SESSION_GREETING)
		session_fail(session, "did not say Hello in time");
	else
		session_close(session, "closed its connection");
}

/* -- Lifetime ----------------------------------------------------------------------------------------------------- */

static int watch(struct session *session)
{
	const struct control_params *params = &session->control->params;
	int r;

	session->socket.ready = on_socket;
	session->process.ready = on_process;
	session->timer.expired = on_timer;
	r = loop_add(params->loop, &session->socket, EPOLLIN);
	if (!r && session->process.fd >= 0)
		r = loop_add(params->loop, &session->process, EPOLLIN);
	if (!r)
		r = loop_timer_set(params->loop, &session->timer,
				   clock_now_ns() + params->hello_timeout_ms * NSEC_PER_MSEC);
	return error_trace(r);
}

int session_new(struct control *control, int socket, uint32_t pid, uint32_t uid, int pidfd)
{
	struct session *session = calloc(1, sizeof(*session));
	int r;

	if (!session) {
		(void)fd_close(socket);
		(void)fd_close(pidfd);
		return error_origin(-ENOMEM);
	}
	session->control = control;
	session->pid = pid;
	session->uid = uid;
	session->socket.fd = socket;
	session->process.fd = pidfd;
	session->doorbell.fd = -1;
	session->wake_fd = -1;
	session->shm_fd = -1;
	list_init(&session->outbox);
	quota_init(&session->quota, control->params.session_quota_bytes, NULL);
	list_push_back(&control->sessions, &session->link);
	control->n_sessions++;
	r = watch(session);
	if (r)
		(void)session_free(session);
	return error_trace(r);
}

static void close_descriptors(struct session *session)
{
	struct packet *packet;

	loop_remove(&session->socket);
	loop_remove(&session->process);
	loop_timer_cancel(&session->timer);
	session->socket.fd = fd_close(session->socket.fd);
	session->process.fd = fd_close(session->process.fd);
	ring_close(session);
	while ((packet = list_first(&session->outbox, struct packet, link)))
		packet_free(session, packet);
}

void session_freeze(struct session *session)
{
	loop_remove(&session->socket);
	loop_remove(&session->process);
	loop_timer_cancel(&session->timer);
	ring_freeze(session);
}

static void on_reap(struct mail *mail)
{
	struct control *control = container_of(mail, struct control, reap);
	struct session *session, *next;

	control->reaping = false;
	list_for_each_safe (session, next, &control->sessions, link)
		if (session->state == SESSION_CLOSED && !session->n_pending &&
		    !session->n_releasing)
			(void)session_free(session);
}

static void reap_later(struct control *control)
{
	if (control->reaping)
		return;
	control->reaping = true;
	control->reap.run = on_reap;
	loop_post(control->params.loop, &control->reap);
}

void session_close(struct session *session, const char *how)
{
	struct map_entry *entry, *next;

	if (session->state == SESSION_CLOSED)
		return;
	session->state = SESSION_CLOSED;
	close_descriptors(session);
	pipeline_abandon(&session->member, how);
	session->in_job = false;
	session_drop_tensors(session, NULL);
	/* What is in flight holds its own. All go at once: to find the first that is left takes as long as there are gone. */
	for (entry = map_first(&session->buffers); entry; entry = next) {
		next = map_next(&session->buffers, entry);
		session_drop_buffer(session, container_of(entry, struct buffer, entry), 0);
	}
	map_done(&session->buffers);
	if (!session->n_pending && !session->n_releasing)
		reap_later(session->control);
}

void session_fail(struct session *session, const char *format, ...)
{
	char text[256], how[300];
	va_list args;

	if (session->state == SESSION_CLOSED)
		return;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (session->in_job)
		log_warning("session of pid %u (uid %u, rank %u of job %s): closed: %s",
			    session->pid, session->uid, session->rank, session->job, text);
	else
		log_notice("session of pid %u (uid %u): closed: %s", session->pid, session->uid,
			   text);
	(void)snprintf(how, sizeof(how), "was cut off: %s", text);
	session_close(session, how);
}

void session_request_ended(struct session *session)
{
	session->n_pending--;
	if (session->state == SESSION_CLOSED && !session->n_pending && !session->n_releasing)
		reap_later(session->control);
}

/* Nothing uses it any more. */
static void on_released(struct buffer *buffer)
{
	struct session *session = buffer->user;

	if (buffer->cookie)
		session_answer(session, buffer->cookie, 0, NULL);
	session->n_releasing--;
	if (session->state == SESSION_CLOSED && !session->n_pending && !session->n_releasing)
		reap_later(session->control);
}

void session_drop_buffer(struct session *session, struct buffer *buffer, uint64_t unshare_id)
{
	session->n_releasing++;
	buffer->released = on_released;
	buffer->user = session;
	buffer->cookie = unshare_id;
	(void)buffer_unref(buffer);
}

/* Requests that nothing will end any more, because what they wait for is gone, give up their memory here. */
static void free_requests(struct session *session)
{
	for (uint32_t i = 0; session->requests && i < SHM_SLOTS; i++) {
		struct session_request *request = session->requests[i];

		if (!request)
			continue;
		(void)buffer_unref(request->input);
		(void)buffer_unref(request->output);
		(void)buffer_unref(request->input_rows);
		(void)buffer_unref(request->output_rows);
		free(request->counts);
	}
	bulk_done(&session->bulk);
	free(session->requests);
}

struct session *session_free(struct session *session)
{
	struct control *control = session->control;

	session_close(session, "was closed");
	list_remove(&session->link);
	control->n_sessions--;
	free_requests(session);
	map_done(&session->buffers);
	map_done(&session->tensors);
	free(session);
	return NULL;
}
