/*
 * A session from its connection to its end: packets in and out, the trainer's process, its
 * buffers and tensors. listener.c makes sessions, request.c handles their packets, ring.c their
 * entries.
 */
#include "control/session.h"
#include "base/log.h"
#include "base/memory/holes.h"
#include "base/pages.h"
#include "control/listener.h"
#include "control/ring.h"
#include "proto/pack.h"
#include "tensor/tensor.h"
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>

/* A trainer that was killed hangs up a moment before it is dead; so long we wait to say which of the two it was. */
#define DEATH_WAIT_NS (50 * NSEC_PER_MSEC)

/* Pages that were given back are taken so many in one go: each may be of another session. */
#define HOLES_BATCH 16
/* So many packets that have waited are sent in one go. */
#define SENT_BATCH 16
/* Buffers given up in one step of a chore: some 50 us. */
#define DROP_STEP 16

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
	session->outbox.n--;
	if (packet->fd >= 0)
		account_release(session->account, ACCOUNT_DESCRIPTORS, 1);
	(void)fd_close(packet->fd);
	held_free(packet);
}

/* Returns a descriptor of its own, which the session is charged for; or negative. */
static int keep_descriptor(struct session *session, int fd)
{
	struct quota *quota = account_quota(session->account, ACCOUNT_DESCRIPTORS);
	int kept;

	if (quota_charge(quota, 1))
		return -EDQUOT;
	kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (kept < 0)
		quota_release(quota, 1);
	return kept;
}

/* While a packet is being looked at, or the ring sealed, or packets wait, nothing is read: not even an end is news then. */
void session_watch_socket(struct session *session)
{
	bool reads = !session->porter.taken && session->ring.state != RING_SEALING &&
		     !list_linked(&session->turn.paced);
	uint32_t events = reads ? EPOLLIN : EPOLLET;

	if (session->socket.loop)
		(void)loop_modify(&session->socket, events | (session->outbox.n ? EPOLLOUT : 0));
}

static void on_fail(struct mail *mail)
{
	struct session *session = container_of(mail, struct session, outbox.fail);

	session_fail(session, "%s", session->outbox.why);
}

void session_fail_later(struct session *session, const char *format, ...)
{
	va_list args;

	if (session->state == SESSION_CLOSED || *session->outbox.why)
		return;
	va_start(args, format);
	(void)vsnprintf(session->outbox.why, sizeof(session->outbox.why), format, args);
	va_end(args);
	session->outbox.fail.run = on_fail;
	loop_post(session->control->params.loop, &session->outbox.fail);
}

/* It ends for another reason, or stays as it is. */
static void forget_failure(struct session *session)
{
	if (*session->outbox.why)
		loop_unpost(session->control->params.loop, &session->outbox.fail);
}

/* fd: goes beside it, stays the caller's; or -1. */
static void queue_packet(struct session *session, const void *data, size_t len, int fd)
{
	struct packet *packet;
	int kept = -1;

	/* It has hung up, and reads nothing any more. */
	if (!session->socket.loop)
		return;
	if (session->outbox.n >= OUTBOX_MAX) {
		session_fail_later(session, "does not read its packets");
		return;
	}
	packet = held_new(&session->held, sizeof(*packet) + len);
	if (packet && fd >= 0)
		kept = keep_descriptor(session, fd);
	if (!packet || kept < (fd >= 0 ? 0 : -1)) {
		held_free(packet);
		session_fail_later(
			session,
			"does not read its packets, and there is no room for more: "
			"no memory or descriptor, or a share (user_share) that is used up");
		return;
	}
	packet->fd = kept;
	packet->len = len;
	memcpy(packet->data, data, len);
	list_push_back(&session->outbox.packets, &packet->link);
	if (!session->outbox.n++)
		session_watch_socket(session);
}

void session_send(struct session *session, const Bps__Control__Message *message, const int *fds,
		  size_t n_fds)
{
	_cleanup_(freep) void *data = NULL;
	size_t len;
	int r;

	if (session->state == SESSION_CLOSED || *session->outbox.why)
		return;
	if (pack(&message->base, FRAME_MAX, &data, &len)) {
		session_fail_later(session, "no memory for its packets");
		return;
	}
	/* A message always has an id: it is never empty. */
	r = session->outbox.n ? FRAME_E_AGAIN
			      : frame_send(session->socket.fd, data, len, fds, n_fds);
	if (r == FRAME_E_AGAIN && n_fds <= 1)
		queue_packet(session, data, len, n_fds ? fds[0] : -1);
	else if (r && r != FRAME_E_EOF) /* the end is seen by reading */
		session_fail_later(session, "cannot be sent to: %s",
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

/* Some of them: the socket says again that it takes more. */
static void send_queued(struct session *session)
{
	struct packet *packet;
	int r;

	for (unsigned i = 0; i < SENT_BATCH; i++) {
		packet = list_first(&session->outbox.packets, struct packet, link);
		if (!packet)
			break;
		r = frame_send(session->socket.fd, packet->data, packet->len, &packet->fd,
			       packet->fd >= 0);
		if (r == FRAME_E_AGAIN)
			return;
		packet_free(session, packet);
		session_tensors_go_on(session);
		if (r < 0) {
			session_fail(session, "cannot be sent to: %s", strerror(-r));
			return;
		}
	}
	session_watch_socket(session);
}

/* -- Over --------------------------------------------------------------------------------------------------------- */

static bool is_over(const struct session *session)
{
	return session->state == SESSION_CLOSED && !session->n_pending &&
	       !session->memory.next_to_drop && !session->memory.n_releasing &&
	       !session->porter.take.note && !session->porter.end.note &&
	       !session->porter.seal.note;
}

static bool on_reap(struct chore *chore)
{
	struct control *control = container_of(chore, struct control, reap);
	struct session *session = list_first(&control->over, struct session, over_link);

	/* One that could not begin is freed at once. */
	if (session)
		(void)session_free(session);
	return !list_empty(&control->over);
}

void session_reap_if_over(struct session *session)
{
	struct control *control = session->control;

	if (!is_over(session))
		return;
	list_remove(&session->over_link);
	list_push_back(&control->over, &session->over_link);
	control->reap.step = on_reap;
	loop_begin(control->params.loop, &control->reap);
}

static void on_end_over(struct porter_errand *errand)
{
	session_reap_if_over(container_of(errand, struct session, porter.end));
}

/* -- In ----------------------------------------------------------------------------------------------------------- */

/* The trainer has hung up. What it posted before is still taken; who it was is asked of its process. */
static void hung_up(struct session *session)
{
	loop_remove(&session->socket);
	if (session->process.fd < 0 || !session->job.is_in ||
	    loop_timer_set(session->control->params.loop, &session->timer,
			   clock_now_ns() + DEATH_WAIT_NS))
		session_close(session, "closed its connection");
}

void session_charge_pace(struct session *session, uint64_t began_ns)
{
	(void)ring_charge(session->control, session->turn.pace, session->turn.job_flow, began_ns);
}

static bool takes_packets(const struct session *session)
{
	return session->state != SESSION_CLOSED && session->socket.loop && !session->porter.taken &&
	       session->ring.state != RING_SEALING && !session->deferred.request;
}

bool session_receive_one(struct session *session)
{
	char *packet = session->control->packet;
	uint64_t began_ns = clock_now_ns();
	size_t len = 0;
	int r;

	if (!takes_packets(session))
		return false;
	/* It waits in the socket: what it asks for may be about the ring. */
	if (session->state == SESSION_OPEN && session->ring.state == RING_SHOWN) {
		if (frame_is_there(session->socket.fd))
			ring_seal(session);
		return false;
	}
	r = frame_receive_bare(session->socket.fd, packet, &len);
	if (r == FRAME_E_AGAIN)
		return false;
	if (r == FRAME_E_EOF)
		hung_up(session);
	else if (r < 0)
		session_fail(session, "sent a packet that cannot be read: %s", strerror(-r));
	else
		session_take_packet(session, packet, len, r == FRAME_E_FDS);
	session_charge_pace(session, began_ns);
	return takes_packets(session);
}

static void on_socket(struct loop_source *source, uint32_t events)
{
	struct session *session = container_of(source, struct session, socket);
	uint64_t began_ns = events & EPOLLOUT ? clock_now_ns() : 0;

	if (events & EPOLLOUT) {
		send_queued(session);
		session_charge_pace(session, began_ns);
	}
	if (events & (EPOLLIN | EPOLLHUP | EPOLLERR) && session->state != SESSION_CLOSED)
		ring_work(session, SESSION_PACKETS);
}

static void on_taken(struct porter_errand *errand, int status, int fd)
{
	struct session *session = container_of(errand, struct session, porter.take);

	uint64_t began_ns = clock_now_ns();

	session_take_fetched(session, session->porter.taken, status, fd);
	session_charge_pace(session, began_ns);
}

static void on_taken_over(struct porter_errand *errand)
{
	struct session *session = container_of(errand, struct session, porter.take);

	unpack_freep(&session->porter.taken);
	if (session->state == SESSION_CLOSED) {
		session_reap_if_over(session);
		return;
	}
	session_watch_socket(session);
	ring_resume(session);
}

void session_fetch(struct session *session, enum porter_want want, Bps__Control__Request *request)
{
	int r;

	session->porter.taken = request;
	session->porter.take.taken = on_taken;
	session->porter.take.over = on_taken_over;
	r = porter_take(&session->porter.take, want, session->socket.fd);
	if (r)
		session_fail(session, "sent a descriptor that cannot be fetched: %s", strerror(-r));
	else
		session_watch_socket(session);
}

void session_end(struct session *session)
{
	uint64_t began_ns = clock_now_ns();

	session_close(session, session->how);
	session_charge_pace(session, began_ns);
}

/* When it has its turn: many may end at once, and each may have much. */
static void end_soon(struct session *session, const char *how)
{
	session->how = how;
	ring_work(session, SESSION_END);
}

static void on_process(struct loop_source *source, uint32_t events)
{
	struct session *session = container_of(source, struct session, process);

	(void)events;
	loop_remove(&session->process);
	loop_timer_cancel(&session->timer);
	end_soon(session, "died");
}

static void on_timer(struct loop_timer *timer)
{
	struct session *session = container_of(timer, struct session, timer);

	if (session->state == SESSION_GREETING)
		session_fail(session, "did not say Hello in time");
	else
		end_soon(session, "closed its connection");
}

/* -- Lifetime ----------------------------------------------------------------------------------------------------- */

static int watch(struct session *session)
{
	const struct control_params *params = &session->control->params;
	int half = SESSION_PACKET_BYTES / 2, r;

	/* As much as a session is charged for, whatever the system's default. */
	(void)setsockopt(session->socket.fd, SOL_SOCKET, SO_SNDBUF, &half, sizeof(half));
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

static int charge(struct control *control, uint32_t uid, struct account **ret_account,
		  struct failure *failure)
{
	struct account *account;
	char name[32];
	int r;

	if (!control->params.accounts)
		return 0;
	(void)snprintf(name, sizeof(name), "user %u", uid);
	account = account_get(control->params.accounts, NULL, name);
	if (!account)
		return failure_set(failure, -ENOMEM, "out of memory");
	r = account_charge(account, ACCOUNT_MEMORY, SESSION_BYTES, failure);
	if (r) {
		(void)account_put(account);
		return r;
	}
	r = account_charge(account, ACCOUNT_DESCRIPTORS, SESSION_DESCRIPTORS, failure);
	if (r) {
		account_release(account, ACCOUNT_MEMORY, SESSION_BYTES);
		(void)account_put(account);
		return r;
	}
	*ret_account = account;
	return 0;
}

static void release(struct account *account, uint64_t n_bytes, uint64_t n_descriptors)
{
	account_release(account, ACCOUNT_MEMORY, n_bytes);
	account_release(account, ACCOUNT_DESCRIPTORS, n_descriptors);
	(void)account_put(account);
}

int session_new(struct control *control, int socket, const struct ucred *trainer, int pidfd,
		struct failure *failure)
{
	struct account *account = NULL;
	struct session *session;
	int r;

	r = charge(control, trainer->uid, &account, failure);
	if (r) {
		control_refuse(socket, r, failure->text);
		control_end_socket(socket, NULL);
		(void)fd_close(pidfd);
		return r;
	}
	session = calloc(1, sizeof(*session));
	if (session)
		session->turn.pace = pace_get(&control->paces, trainer->uid);
	if (!session || !session->turn.pace) {
		free(session);
		release(account, SESSION_BYTES, SESSION_DESCRIPTORS);
		control_end_socket(socket, NULL);
		(void)fd_close(pidfd);
		return failure_set(failure, -ENOMEM, "out of memory");
	}
	session->control = control;
	session->pid = (uint32_t)trainer->pid;
	session->uid = trainer->uid;
	session->account = account;
	session->n_bytes = SESSION_BYTES;
	session->n_descriptors = SESSION_DESCRIPTORS;
	session->socket.fd = socket;
	session->process.fd = pidfd;
	session->doorbell.fd = -1;
	session->ring.wake_fd = -1;
	session->ring.shm_fd = session->ring.kept_fd = -1;
	list_init(&session->outbox.packets);
	quota_init(&session->held, UINT64_MAX, account_quota(account, ACCOUNT_MEMORY));
	quota_init(&session->memory.quota, control->params.session_quota_bytes,
		   account_quota(account, ACCOUNT_MAPPED));
	session_tensors_init(session);
	session->ring.bulk.quota = session->tensors.bulk.quota = session->tensors.map.quota =
		&session->held;
	list_push_back(&control->sessions, &session->link);
	control->n_sessions++;
	r = watch(session);
	if (r)
		(void)session_free(session);
	return r ? failure_set(failure, r, "%s", strerror(-r)) : 0;
}

void session_leave(struct session *session, enum handout_kind kind, int fd, uint64_t bytes)
{
	if (fd < 0)
		return;
	handout_leave(kind, fd, account_quota(session->account, ACCOUNT_DESCRIPTORS),
		      account_quota(session->account, ACCOUNT_MEMORY), bytes);
	session->n_bytes -= bytes;
	session->n_descriptors--;
}

/* The trainer may have its end for as long as it likes, and not read there what was sent. */
static void leave_unread(struct session *session)
{
	if (!handout_is_unread(session->socket.fd))
		return;
	(void)shutdown(session->socket.fd, SHUT_RDWR);
	session_leave(session, HANDOUT_PACKETS, fcntl(session->socket.fd, F_DUPFD_CLOEXEC, 0),
		      SESSION_PACKET_BYTES);
}

static void close_descriptors(struct session *session)
{
	struct packet *packet;

	loop_remove(&session->socket);
	loop_remove(&session->process);
	loop_timer_cancel(&session->timer);
	forget_failure(session);
	leave_unread(session);
	session->porter.end.over = on_end_over;
	/* The porter is not to be the last who has it before it has looked. */
	if (session->porter.take.note)
		porter_close(&session->porter.end, session->socket.fd);
	else
		control_end_socket(session->socket.fd, &session->porter.end);
	session->socket.fd = -1;
	session->process.fd = fd_close(session->process.fd);
	ring_close(session);
	while ((packet = list_first(&session->outbox.packets, struct packet, link)))
		packet_free(session, packet);
}

void session_freeze(struct session *session)
{
	loop_remove(&session->socket);
	loop_remove(&session->process);
	loop_timer_cancel(&session->timer);
	forget_failure(session);
	ring_freeze(session);
}

/* What is in flight holds its own. To find the first that is left takes as long as there are gone. */
static void drop_next(struct session *session)
{
	struct session_memory *memory = &session->memory;
	struct map_entry *entry = memory->next_to_drop;
	struct buffer *buffer = container_of(entry, struct buffer, entry);

	memory->next_to_drop = map_next(&memory->buffers, entry);
	map_remove(&memory->buffers, entry);
	/* Others that are in use are likely to have holes, too. */
	if (memory->has_holes && buffer->refs > 1 && !buffer->device)
		buffer_bury(buffer, session->control->params.loop);
	session_drop_buffer(session, buffer, 0);
}

static bool on_drop(struct chore *chore)
{
	struct session *session = container_of(chore, struct session, memory.drop);
	uint64_t began_ns = clock_now_ns();

	for (unsigned i = 0; session->memory.next_to_drop && i < DROP_STEP; i++)
		drop_next(session);
	session_charge_pace(session, began_ns);
	if (session->memory.next_to_drop)
		return true;
	session_reap_if_over(session);
	return false;
}

void session_close(struct session *session, const char *how)
{
	if (session->state == SESSION_CLOSED)
		return;
	session->state = SESSION_CLOSED;
	/* It is not over before these are given up. */
	session->memory.next_to_drop = map_first(&session->memory.buffers);
	close_descriptors(session);
	agent_abandon(&session->job.member, how);
	session->job.is_in = false;
	session_release_ledger(session);
	session_forget_tensors(session);
	session->memory.drop.step = on_drop;
	if (session->memory.next_to_drop)
		loop_begin(session->control->params.loop, &session->memory.drop);
	else
		session_reap_if_over(session);
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
	if (session->job.is_in)
		log_warning("session of pid %u (uid %u, rank %u of job %s): closed: %s",
			    session->pid, session->uid, session->job.rank, session->job.name, text);
	else
		log_notice("session of pid %u (uid %u): closed: %s", session->pid, session->uid,
			   text);
	(void)snprintf(how, sizeof(how), "was cut off: %s", text);
	session_close(session, how);
}

void session_request_ended(struct session *session)
{
	session->n_pending--;
	session_reap_if_over(session);
}

static void on_hole(struct control *control, void *page)
{
	struct buffer *buffer = places_find(&control->buffers, page);
	struct session *session;

	if (!buffer)
		return;
	session = buffer->user;
	if (buffer == session->ring.memory) {
		session_fail_later(session, "posted what it has not written: page %zu of its ring",
				   (size_t)((char *)page - buffer->data) / page_size());
		return;
	}
	session->memory.has_holes = true;
	buffer_bury(buffer, control->params.loop);
	buffer_give_back(buffer, page);
	/* Many may have at once, and each ends by itself. */
	session_fail_later(
		buffer->user,
		"gave back memory that it shares, page %zu of buffer %u: it would be the "
		"daemon's",
		((size_t)((char *)page - buffer->data)) / page_size(), buffer->number);
}

static size_t take_some_holes(struct control *control)
{
	void *pages[HOLES_BATCH];
	size_t n = holes_take(pages, ARRAY_SIZE(pages));

	for (size_t i = 0; i < n; i++)
		on_hole(control, pages[i]);
	return n;
}

void session_on_holes(struct loop_source *source, uint32_t events)
{
	(void)events;
	(void)take_some_holes(container_of(source, struct control, holes));
}

void session_take_holes(struct control *control)
{
	while (take_some_holes(control) == HOLES_BATCH)
		;
}

/* Nothing uses it any more. */
static void on_released(struct buffer *buffer)
{
	struct session *session = buffer->user;

	if (buffer->cookie)
		session_answer(session, buffer->cookie, 0, NULL);
	account_release(session->account, ACCOUNT_DESCRIPTORS, buffer->n_descriptors);
	places_remove(&session->control->buffers, buffer);
	session->memory.n_releasing--;
	session_reap_if_over(session);
}

void session_drop_buffer(struct session *session, struct buffer *buffer, uint64_t unshare_id)
{
	session->memory.n_releasing++;
	buffer->released = on_released;
	buffer->user = session;
	buffer->cookie = unshare_id;
	(void)buffer_unref(buffer);
}

/* Requests that nothing will end any more, because what they wait for is gone, give up their memory here. */
static void free_requests(struct session *session)
{
	for (uint32_t i = 0; session->ring.requests && i < SHM_SLOTS; i++) {
		struct session_request *request = session->ring.requests[i];

		if (!request)
			continue;
		(void)buffer_unref(request->input);
		(void)buffer_unref(request->output);
		(void)buffer_unref(request->input_rows);
		(void)buffer_unref(request->output_rows);
		held_free(request->counts);
	}
	bulk_done(&session->ring.bulk);
	free(session->ring.requests);
}

struct session *session_free(struct session *session)
{
	struct control *control = session->control;
	uint64_t began_ns = clock_now_ns();

	session_close(session, "was closed");
	loop_abort(&session->memory.drop);
	while (session->memory.next_to_drop)
		drop_next(session);
	list_remove(&session->link);
	list_remove(&session->over_link);
	control->n_sessions--;
	porter_forget(&session->porter.take);
	porter_forget(&session->porter.end);
	porter_forget(&session->porter.seal);
	unpack_freep(&session->porter.taken);
	unpack_freep(&session->deferred.request);
	free_requests(session);
	map_done(&session->memory.buffers);
	map_done(&session->tensors.map);
	assert(!quota_used(&session->held) && !quota_used(&session->memory.quota));
	release(session->account, session->n_bytes, session->n_descriptors);
	(void)pace_put(session->turn.pace,
		       ring_charge(control, session->turn.pace, session->turn.job_flow, began_ns));
	free(session);
	return NULL;
}
