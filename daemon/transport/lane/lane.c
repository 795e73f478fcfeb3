/*
 * What lanes of TCP and RDMA have in common. Home starts and closes a lane and gives it
 * messages; on the worker's thread messages wait in its queue, are let go when written, and a
 * message that is half here and does not come on fails the lane. The rest is behind lane_ops:
 * tcp.c, rdma/lane.c.
 */
#include "transport/lane/lane.h"
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/cookies.h"
#include "transport/lane/queue.h"
#include "transport/peer/delivery.h"
#include "transport/peer/peer.h"

#include "base/clock.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>

/* Messages of a lane that closes, in a step. */
#define DRAIN_STEP 64

void lane_post_home(struct lane *lane, struct mail *mail)
{
	worker_post_home(lane->worker, &lane->to_home, mail);
}

static void lane_on_start(struct mail *mail);
static void lane_on_close(struct mail *mail);
static void lane_on_lost(struct mail *mail);
static void lane_on_closed(struct mail *mail);
static void lane_on_flush(struct mail *mail);
static bool lane_on_drain(struct chore *chore);
static void lane_on_watch(struct loop_timer *timer);

int lane_new(struct peer *peer, const struct lane_ops *ops, struct lane **ret_lane)
{
	struct lane *lane = calloc(1, sizeof(*lane));

	if (!lane)
		return error_origin(-ENOMEM);
	lane->transport = peer->transport;
	lane->peer = peer;
	lane->ops = ops;
	lane->worker = transport_pick_worker(peer->transport);
	lane->source.fd = -1;
	lane->start.run = lane_on_start;
	lane->close.run = lane_on_close;
	lane->lost.run = lane_on_lost;
	lane->closed.run = lane_on_closed;
	lane->output.drain.step = lane_on_drain;
	lane->output.flush.run = lane_on_flush;
	lane->watch.timer.expired = lane_on_watch;
	list_init(&lane->link);
	*ret_lane = lane;
	return 0;
}

struct lane *lane_free(struct lane *lane)
{
	if (!lane)
		return NULL;
	assert(lane->source.fd < 0);

	if (lane->ops->end)
		lane->ops->end(lane);
	mailbox_done(&lane->to_home);
	fair_done(&lane->output.queue);
	cookies_done(&lane->cookies);
	seal_done(&lane->in);
	seal_done(&lane->out);
	free(lane);
	return NULL;
}

/* One thread alone writes each count: home what is given, the worker what is done. */
static void count_bytes(_Atomic uint64_t *count, const struct message *message)
{
	uint64_t before = atomic_load_explicit(count, memory_order_relaxed);

	atomic_store_explicit(count, before + sizeof(struct data_header) + message->header->len,
			      memory_order_relaxed);
}

uint64_t lane_queued(const struct lane *lane)
{
	return atomic_load_explicit(&lane->given_bytes, memory_order_relaxed) -
	       atomic_load_explicit(&lane->done_bytes, memory_order_relaxed);
}

/* From home */

void lane_start(struct lane *lane)
{
	mailbox_init(&lane->to_home, &lane->worker->to_home);
	if (*lane->peer->source)
		mailbox_share(&lane->to_home, lane->peer->source);
	worker_post(lane->worker, &lane->start);
}

void lane_close(struct lane *lane)
{
	if (lane->is_closing)
		return;
	lane->is_closing = true;
	worker_post(lane->worker, &lane->close);
}

static void message_on_mail(struct mail *mail)
{
	struct message *message = container_of(mail, struct message, mail);

	lane_enqueue(message->lane, message);
}

void lane_send(struct lane *lane, struct message *message)
{
	count_bytes(&lane->given_bytes, message);
	message->lane = lane;
	message->mail.run = message_on_mail;
	worker_post(lane->worker, &message->mail);
}

/* To home: not at once even if we are there, since home frees what is still on our stack. */

static void lane_on_lost(struct mail *mail)
{
	struct lane *lane = container_of(mail, struct lane, lost);

	lane->peer->home->lost(lane);
}

static void lane_on_closed(struct mail *mail)
{
	struct lane *lane = container_of(mail, struct lane, closed);

	lane->peer->home->closed(lane);
}

/* The worker's thread */

static void lane_cut(struct lane *lane)
{
	lane->ops->cut(lane);
	lane->is_failed = true;
}

void lane_fail(struct lane *lane, int status, const char *format, ...)
{
	va_list args;

	if (lane->is_failed)
		return;
	lane->failure.status = status;
	va_start(args, format);
	(void)vsnprintf(lane->failure.text, sizeof(lane->failure.text), format, args);
	va_end(args);
	lane_cut(lane);
	mailbox_post(&lane->to_home, &lane->lost);
}

void lane_heard(struct lane *lane, uint64_t now_ns)
{
	atomic_store_explicit(&lane->heard_ns, now_ns, memory_order_relaxed);
}

static void lane_on_start(struct mail *mail)
{
	struct lane *lane = container_of(mail, struct lane, start);
	int r = lane->ops->start(lane);

	if (r)
		lane_fail(lane, r, "epoll: %s", strerrordesc_np(-r));
}

static void lane_on_flush(struct mail *mail)
{
	struct lane *lane = container_of(mail, struct lane, output.flush);

	lane->output.is_flush_posted = false;
	if (!lane->is_failed)
		lane->ops->flush(lane);
}

/*
 * Written at the end of the loop's turn, so that what is posted in one leaves in one system call;
 * or after receiving, where what was received is answered at once.
 */
static void lane_post_flush(struct lane *lane)
{
	if (lane->output.is_flush_posted || (lane->source.events & EPOLLOUT))
		return;
	if (lane->output.is_flushed_soon) {
		lane->output.is_fresh = true;
		return;
	}
	lane->output.is_flush_posted = true;
	loop_finish(lane->worker->loop, &lane->output.flush);
}

void lane_enqueue(struct lane *lane, struct message *message)
{
	if (lane->is_failed) {
		lane_message_done(lane, message, false);
		return;
	}
	message->sequence = lane->output.next_sequence++;
	if (queue_push(&lane->output.queue, message)) {
		lane_message_done(lane, message, false);
		lane_fail(lane, -ENOMEM, "out of memory");
		return;
	}
	lane_post_flush(lane);
}

/* One that was moved without its payload has been told before. */
static void lane_call_written(struct lane *lane, struct call *call)
{
	if (call->state != CALL_FILLING && call->state != CALL_ANSWERED)
		call->state = CALL_SENT;
	call->is_written = true;
	call->payload_block = block_unref(call->payload_block);
	if (call->sent && !(call->header.flags & DATA_FLAG_ARRIVED))
		lane_post_home(lane, &call->sent_mail);
	if (call->state == CALL_ANSWERED)
		lane_post_home(lane, &call->message.mail);
}

/*
 * Half a message holds memory, and a peer that owes nothing is asked for no sign of life. So the message has to come on: another
 * message begins, or WATCH_BYTES more are here, in each time limit of a peer. The lane fails after WATCH_STALLS limits in a row
 * without progress; what lies in the socket is read between them, since this process may have been stopped itself.
 */
#define WATCH_BYTES  4096
#define WATCH_STALLS 3

static bool is_inside(const struct lane *lane)
{
	return lane->input.header_len || lane->input.reading != READING_HEADER;
}

void lane_watch(struct lane *lane)
{
	if (lane->watch.timer.loop || lane->is_failed || !is_inside(lane))
		return;
	lane->watch.begun = lane->watch.n_begun;
	lane->watch.bytes = atomic_load_explicit(&lane->bytes_in, memory_order_relaxed);
	if (loop_timer_set(lane->worker->loop, &lane->watch.timer,
			   clock_now_ns() + lane->transport->settings.peer_timeout_ns))
		lane_fail(lane, -ENOMEM, "out of memory");
}

static void lane_on_watch(struct loop_timer *timer)
{
	struct lane *lane = container_of(timer, struct lane, watch.timer);
	uint64_t bytes = atomic_load_explicit(&lane->bytes_in, memory_order_relaxed);
	bool comes_on = lane->watch.n_begun != lane->watch.begun ||
			bytes - lane->watch.bytes >= WATCH_BYTES;

	lane->watch.n_stalls = comes_on || !is_inside(lane) ? 0 : lane->watch.n_stalls + 1;
	if (lane->watch.n_stalls == WATCH_STALLS)
		lane_fail(lane, -ETIMEDOUT,
			  "connection %u: stopped in the middle of a message for %" PRIu64 " ms",
			  lane->index,
			  (uint64_t)(WATCH_STALLS * lane->transport->settings.peer_timeout_ns /
				     NSEC_PER_MSEC));
	else
		lane_watch(lane);
}

/* Calls that are not written stay home's, which ends them. */
void lane_message_done(struct lane *lane, struct message *message, bool is_written)
{
	message->bounce = block_unref(message->bounce);
	if (message->kind != MESSAGE_PONG)
		count_bytes(&lane->done_bytes, message);
	switch ((enum message_kind)message->kind) {
	case MESSAGE_PONG:
		lane->pong.is_queued = false;
		return;
	case MESSAGE_CALL:
		if (is_written)
			lane_call_written(lane, container_of(message, struct call, message));
		return;
	case MESSAGE_ANSWER:
		incoming_written(container_of(message, struct incoming, message), is_written);
		return;
	case MESSAGE_NOTICE:
		notice_free(container_of(message, struct notice, message));
		return;
	}
}

/* What nobody will write any more: a peer that does not read may have millions of messages. */
static bool lane_on_drain(struct chore *chore)
{
	struct lane *lane = container_of(chore, struct lane, output.drain);
	struct message *message;

	for (unsigned i = 0; i < DRAIN_STEP; i++) {
		message = queue_pop(&lane->output.queue);
		if (!message) {
			mailbox_post(&lane->to_home, &lane->closed);
			return false;
		}
		lane_message_done(lane, message, false);
	}
	return true;
}

void lane_drain(struct lane *lane)
{
	if (!list_linked(&lane->output.drain.link))
		return;
	loop_abort(&lane->output.drain);
	while (lane_on_drain(&lane->output.drain))
		;
}

/* What was given to us before still leaves if the kernel takes it: the last answers, mostly. */
static void lane_on_close(struct mail *mail)
{
	struct lane *lane = container_of(mail, struct lane, close);

	if (!lane->is_failed)
		lane->ops->flush(lane);
	if (lane->output.is_flush_posted)
		loop_unpost(lane->worker->loop, &lane->output.flush);
	lane_cut(lane);
	lane->ops->release(lane);
	if (lane_on_drain(&lane->output.drain))
		loop_begin(lane->worker->loop, &lane->output.drain);
}
