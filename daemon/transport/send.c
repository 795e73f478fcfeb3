#include "transport/internal.h"

#include <sys/epoll.h>

#define SEND_ROUNDS 4 /* system calls before others on this loop have their turn */

/* Adds what is left of a message, of which skip bytes are written already. */
static void batch_add(struct batch *batch, struct message *message, const struct data_header *wire,
		      size_t skip)
{
	size_t header_left = skip < sizeof(*wire) ? sizeof(*wire) - skip : 0;
	size_t payload_skip = skip - (sizeof(*wire) - header_left);
	size_t payload_left = message->header->len - payload_skip;

	batch->messages[batch->n_messages++] = message;
	if (header_left)
		batch->iov[batch->n_iov++] = (struct iovec){
			.iov_base = (char *)(uintptr_t)wire + (sizeof(*wire) - header_left),
			.iov_len = header_left,
		};
	payload_left = MIN(payload_left, SEND_BYTES - MIN(batch->len, (size_t)SEND_BYTES));
	if (payload_left)
		batch->iov[batch->n_iov++] = (struct iovec){
			.iov_base = (char *)(uintptr_t)message->payload + payload_skip,
			.iov_len = payload_left,
		};
	batch->len += header_left + payload_left;
}

int lane_prepare(struct lane *lane, struct message *message)
{
	struct call *call = container_of(message, struct call, message);
	int r;

	if (message->kind != MESSAGE_CALL || call->state == CALL_WRITING)
		return 0;
	r = cookies_add(&lane->cookies, call, &call->header.cookie);
	if (r)
		return error_trace(r);
	call->state = CALL_WRITING;
	return 0;
}

static int lane_fill_batch(struct lane *lane, struct batch *batch)
{
	struct message *message;
	int r;

	batch->n_messages = batch->n_iov = batch->len = 0;
	if (lane->current)
		batch_add(batch, lane->current, &lane->current_wire, lane->current_done);
	while (batch->n_messages < SEND_MESSAGES && batch->len < SEND_BYTES &&
	       (message = queue_pop(&lane->queue))) {
		struct data_header *wire = &batch->wire[batch->n_messages];

		r = lane_prepare(lane, message);
		if (r) {
			(void)queue_push(&lane->queue, message);
			return error_trace(r);
		}
		*wire = *message->header;
		data_header_encode(wire);
		batch_add(batch, message, wire, 0);
	}
	return 0;
}

/*
 * What was written of the batch is done with; what was begun is the lane's current message; the rest goes back into
 * the queue, where more urgent ones may still come before it. In that order from the back, since whoever is told that
 * his call was sent may post the next, and pushing back must not need memory.
 */
static void lane_empty_batch(struct lane *lane, struct batch *batch, size_t written)
{
	size_t n_done = 0, skip = lane->current_done, left = written;
	bool is_current = lane->current != NULL;

	while (n_done < batch->n_messages) {
		size_t len =
			sizeof(struct data_header) + batch->messages[n_done]->header->len - skip;

		if (left < len)
			break;
		left -= len;
		skip = 0;
		is_current = false;
		n_done++;
	}
	lane->current = NULL;
	lane->current_done = 0;
	for (size_t i = batch->n_messages; i-- > n_done;) {
		if (i > n_done || (!left && !is_current)) {
			(void)queue_push(&lane->queue, batch->messages[i]);
			continue;
		}
		if (!is_current)
			lane->current_wire = batch->wire[i];
		lane->current = batch->messages[i];
		lane->current_done = skip + left;
	}
	for (size_t i = 0; i < n_done; i++)
		lane_message_done(lane, batch->messages[i], true);
}

/* Returns whether there may be more to write, and the kernel took all it was offered. */
static bool lane_flush_once(struct lane *lane)
{
	struct batch *batch = &lane->worker->batch;
	struct msghdr message = { .msg_iov = batch->iov };
	ssize_t n;
	int r;

	r = lane_fill_batch(lane, batch);
	message.msg_iovlen = batch->n_iov;
	n = r || !batch->len ? 0 : sendmsg(lane->source.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	if (n < 0)
		r = errno == EAGAIN || errno == EINTR ? 0 : -errno;
	lane_empty_batch(lane, batch, (size_t)MAX(n, 0));
	if (r) {
		lane_fail(lane, r, "sending: %s", strerrordesc_np(-r));
		return false;
	}
	if (n > 0) {
		atomic_fetch_add_explicit(&lane->bytes_out, (uint64_t)n, memory_order_relaxed);
		/* Room came of acknowledged bytes: a long message on a slow link is no silence. */
		if (lane->is_unblocked)
			lane_heard(lane);
	}
	lane->is_unblocked = false;
	if ((size_t)MAX(n, 0) < batch->len) {
		lane_want(lane, EPOLLIN | EPOLLOUT);
		return false;
	}
	return batch->len > 0;
}

void lane_flush(struct lane *lane)
{
	lane->is_fresh = false;
	for (unsigned i = 0; i < SEND_ROUNDS; i++) {
		if (!lane->current && !lane->queue.n) {
			lane_want(lane, EPOLLIN);
			return;
		}
		if (!lane_flush_once(lane))
			return;
	}
	lane_want(lane, lane->current || lane->queue.n ? EPOLLIN | EPOLLOUT : EPOLLIN);
}
