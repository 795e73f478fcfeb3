#include "transport/internal.h"

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/failpoint.h"
#include <endian.h>
#include <sys/epoll.h>

#define SEND_ROUNDS 8 /* system calls before others on this loop have their turn */

static size_t send_bytes(const struct lane *lane)
{
	return lane->has_checksums ? CHECKED_BYTES : SEND_BYTES;
}

static size_t head_len(const struct lane *lane)
{
	return sizeof(struct data_header) + (lane->has_checksums ? DATA_CHECK_LEN : 0);
}

static size_t tail_len(const struct lane *lane, const struct message *message)
{
	return lane->has_checksums && message->header->len ? DATA_CHECK_LEN : 0;
}

static size_t wire_len(const struct lane *lane, const struct message *message)
{
	return head_len(lane) + message->header->len + tail_len(lane, message);
}

static void batch_iov(struct batch *batch, const void *data, size_t len)
{
	batch->iov[batch->n_iov++] = (struct iovec){ (void *)(uintptr_t)data, len };
	batch->len += len;
}

/* What a failpoint sends in the place of a payload's first bytes. */
static size_t add_wrong(struct batch *batch, const char *payload, size_t len)
{
	len = MIN(len, sizeof(batch->wrong));
	memcpy(batch->wrong, payload, len);
	batch->wrong[len / 2] ^= 0x10;
	batch_iov(batch, batch->wrong, len);
	return len;
}

/* len bytes of a payload from skip on. Their checksum is made now: right before the kernel copies them. */
static void batch_payload(struct lane *lane, struct batch *batch, struct message *message,
			  size_t skip, size_t len)
{
	const char *payload = message->payload;
	size_t done;

	if (lane->has_checksums && skip + len > message->check_done) {
		message->check = crc32c(message->check, payload + message->check_done,
					skip + len - message->check_done);
		message->check_done = (uint32_t)(skip + len);
	}
	done = !skip && FAILPOINT_CORRUPTS("payload-sent") ? add_wrong(batch, payload, len) : 0;
	if (done < len)
		batch_iov(batch, payload + skip + done, len - done);
}

/* Adds what is left of a message, of which skip bytes are written already; no more than one system call is offered. */
static void batch_add(struct lane *lane, struct batch *batch, struct message *message,
		      const struct wire *wire, size_t skip)
{
	size_t head = head_len(lane), len = message->header->len, tail = tail_len(lane, message);
	uint32_t *check = &batch->checks[batch->n_messages];

	batch->messages[batch->n_messages++] = message;
	if (skip < head)
		batch_iov(batch, (const char *)wire + skip, head - skip);
	skip -= MIN(skip, head);
	if (skip < len) {
		size_t n = MIN(len - skip, send_bytes(lane) - MIN(batch->len, send_bytes(lane)));

		if (n)
			batch_payload(lane, batch, message, skip, n);
		batch->is_cut = n < len - skip;
		if (batch->is_cut)
			return;
	}
	if (!tail)
		return;
	skip -= MIN(skip, len);
	*check = htole32(message->check);
	batch_iov(batch, (const char *)check + skip, tail - skip);
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
	batch->is_cut = false;
	if (lane->current)
		batch_add(lane, batch, lane->current, &lane->current_wire, lane->current_done);
	while (batch->n_messages < SEND_MESSAGES && batch->len < send_bytes(lane) &&
	       (message = queue_pop(&lane->queue))) {
		struct wire *wire = &batch->wire[batch->n_messages];

		queue_fetch(&lane->queue);
		r = lane_prepare(lane, message);
		if (r) {
			(void)queue_push(&lane->queue, message);
			return error_trace(r);
		}
		wire->header = *message->header;
		data_header_encode(&wire->header);
		if (lane->has_checksums)
			wire->check = htole32(crc32c(0, &wire->header, sizeof(wire->header)));
		if (FAILPOINT_CORRUPTS("header-sent"))
			wire->header.round ^= 1;
		batch_add(lane, batch, message, wire, 0);
	}
	return 0;
}

/* Its call is told soon that it was sent. */
static _fetches_ void fetch_done(const struct message *message)
{
	const struct call *call = container_of(message, struct call, message);

	if (message->kind == MESSAGE_CALL)
		__builtin_prefetch(call->soon[0], 1);
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
		size_t len = wire_len(lane, batch->messages[n_done]) - skip;

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
	for (size_t i = 0; i < n_done; i++) {
		if (i + 2 < n_done)
			fetch_done(batch->messages[i + 2]);
		lane_message_done(lane, batch->messages[i], true);
	}
}

/* Returns whether there may be more to write, and the kernel took all it was offered. */
static bool lane_flush_once(struct lane *lane)
{
	struct batch *batch = &lane->worker->batch;
	struct msghdr message = { .msg_iov = batch->iov };
	int flags = MSG_NOSIGNAL | MSG_DONTWAIT, r;
	ssize_t n;

	r = lane_fill_batch(lane, batch);
	message.msg_iovlen = batch->n_iov;
	/* What comes next fills the last segment, which else would be a small one. */
	if (batch->is_cut || lane->queue.n)
		flags |= MSG_MORE;
	n = r || !batch->len ? 0 : sendmsg(lane->source.fd, &message, flags);
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
			lane_heard(lane, clock_now_ns());
	}
	lane->is_unblocked = false;
	if ((size_t)MAX(n, 0) < batch->len) {
		lane_want(lane, EPOLLIN | EPOLLOUT);
		return false;
	}
	return batch->len > 0;
}

/*
 * What is unsent inside the kernel nothing overtakes, and it comes in bursts of that size: nodes that change over to a more
 * urgent tensor at the same moment then have sent different parts of the one before, whose sums have to wait. So all
 * connections together have what the link carries in 2 ms. Up to powers of two, as what is known of the link changes all the time.
 */
static void lane_set_ahead(struct lane *lane)
{
	struct transport *transport = lane->transport;
	uint64_t bytes_s = transport_bytes_s(transport), share;
	unsigned n = atomic_load_explicit(&transport->n_tcp_lanes, memory_order_relaxed);
	unsigned ahead = TRANSPORT_AHEAD;

	share = bytes_s / 512 / MAX(n, 1u);
	while (bytes_s && ahead / 2 >= MAX(share, (uint64_t)TRANSPORT_AHEAD_MIN))
		ahead /= 2;
	if (ahead == lane->ahead)
		return;
	lane->ahead = ahead;
	address_set_ahead(lane->source.fd, ahead);
}

void lane_flush(struct lane *lane)
{
	lane->is_fresh = false;
	lane_set_ahead(lane);
	lane_set_flight(lane, clock_now_ns());
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
