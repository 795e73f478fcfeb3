/*
 * The way out of a TCP lane: what waits in the queue leaves in batches of one system call each,
 * small messages as packs, with checksums. What a system call has not begun to write goes back
 * into the queue. Worker's thread.
 */
#include "transport/common/address.h"
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/cookies.h"
#include "transport/lane/lane.h"
#include "transport/lane/queue.h"
#include "transport/peer/delivery.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/memory/holes.h"
#include <endian.h>
#include <sys/epoll.h>

#define SEND_ROUNDS 8 /* system calls before others on this loop have their turn */

static size_t send_bytes(const struct lane *lane)
{
	return lane->out.len ? CHECKED_BYTES : SEND_BYTES;
}

static size_t head_len(const struct lane *lane)
{
	return sizeof(struct data_header) + lane->out.len;
}

/* What a pack says of its messages, without the seal. */
static size_t packed_len(const struct frame *frame)
{
	return frame->n > 1 ? frame->n * sizeof(frame->packed[0]) : 0;
}

static size_t frame_len(const struct lane *lane, const struct frame *frame)
{
	size_t packed = packed_len(frame);

	return head_len(lane) + packed + (packed ? lane->out.len : 0) + frame->payload_len +
	       (frame->payload_len ? lane->out.len : 0);
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

/*
 * len bytes more of a frame's payloads, those of a message from `at` on: right before the kernel
 * copies them, unless their checksum is known.
 */
static void seal_payload(struct lane *lane, struct frame *frame, struct message *message, size_t at,
			 size_t len)
{
	if (!lane->out.len || !len)
		return;
	if (message->is_checked && len == message->header->len)
		seal_join(&lane->out, container_of(message, struct incoming, message)->check, len);
	else
		seal_add(&lane->out, (const char *)message->payload + at, len);
	frame->sealed += (uint32_t)len;
	if (frame->sealed == frame->payload_len)
		seal_end(&lane->out, frame->seal);
}

/* len bytes of a payload from skip on, which are in their seal. */
static void batch_payload(struct batch *batch, const struct message *message, size_t skip,
			  size_t len)
{
	const char *payload = message->payload;
	size_t done;

	done = !skip && FAILPOINT_CORRUPTS("payload-sent") ? add_wrong(batch, payload, len) : 0;
	if (done < len)
		batch_iov(batch, payload + skip + done, len - done);
}

/* What is left of it when *skip bytes are; these are none of what comes behind it. */
static void batch_rest(struct batch *batch, const void *data, size_t len, size_t *skip)
{
	if (*skip < len)
		batch_iov(batch, (const char *)data + *skip, len - *skip);
	*skip -= MIN(*skip, len);
}

/* The payload of a message alone, as far as one system call takes it. */
static void batch_message(struct lane *lane, struct batch *batch, struct frame *frame, size_t *skip)
{
	struct message *message = frame->messages[0];
	size_t len = message->header->len, n;

	if (*skip < len) {
		n = MIN(len - *skip, send_bytes(lane) - MIN(batch->len, send_bytes(lane)));
		if (*skip + n > frame->sealed)
			seal_payload(lane, frame, message, frame->sealed,
				     *skip + n - frame->sealed);
		if (n)
			batch_payload(batch, message, *skip, n);
		batch->is_cut = n < len - *skip;
	}
	*skip -= MIN(*skip, len);
}

/* The payloads of several: all of them, since they are small. */
static void batch_pack(struct batch *batch, const struct frame *frame, size_t *skip)
{
	for (unsigned i = 0; i < frame->n; i++) {
		size_t len = frame->messages[i]->header->len;

		if (*skip < len)
			batch_payload(batch, frame->messages[i], *skip, len - *skip);
		*skip -= MIN(*skip, len);
	}
}

/*
 * Adds what is left of a frame, of which skip bytes are written already; no more than one system
 * call is offered.
 */
static void batch_add(struct lane *lane, struct batch *batch, struct frame *frame, size_t skip)
{
	batch_rest(batch, frame->wire, head_len(lane), &skip);
	if (frame->n > 1) {
		batch_rest(batch, frame->packed, packed_len(frame), &skip);
		batch_rest(batch, frame->packed_seal, lane->out.len, &skip);
		batch_pack(batch, frame, &skip);
	} else {
		batch_message(lane, batch, frame, &skip);
	}
	if (frame->payload_len && !batch->is_cut)
		batch_rest(batch, frame->seal, lane->out.len, &skip);
}

/* One that has just left the queue. */
static int take(struct lane *lane, struct batch *batch, struct frame *frame,
		struct message *message)
{
	int r;

	r = lane_prepare(lane, message);
	if (r) {
		queue_return(&lane->output.queue, message);
		return error_trace(r);
	}
	batch->messages[batch->n_messages++] = message;
	frame->n++;
	return 0;
}

/*
 * Those of its job next to it that are small like it leave with it; none is waited for, and none
 * overtakes another.
 */
static int take_more(struct lane *lane, struct batch *batch, struct frame *frame)
{
	const struct data_header *first = frame->messages[0]->header;
	const struct message *next;
	uint32_t len = first->len;
	int r = 0;

	if (!lane->has_packs || !data_may_pack(first))
		return 0;
	while (!r && batch->n_messages < SEND_MESSAGES && frame->n < DATA_PACK_MAX &&
	       (next = queue_next(&lane->output.queue)) && data_packs_with(first, next->header) &&
	       len + next->header->len <= DATA_PACKED_LEN) {
		len += next->header->len;
		r = take(lane, batch, frame, queue_pop_next(&lane->output.queue));
	}
	return r;
}

/* What it says of several messages is made, and the seals of that and of their payloads. */
static void seal_pack(struct lane *lane, struct frame *frame, struct data_packed *packed)
{
	for (unsigned i = 0; i < frame->n; i++)
		data_pack(frame->messages[i]->header, &packed[i]);
	frame->packed = packed;
	if (!lane->out.len)
		return;
	seal_make(&lane->out, packed, packed_len(frame), frame->packed_seal);
	if (frame->payload_len)
		seal_begin(&lane->out);
	for (unsigned i = 0; i < frame->n; i++)
		seal_payload(lane, frame, frame->messages[i], 0, frame->messages[i]->header->len);
}

/* Its header is made, and all seals but that of the payload of a message alone, which is begun. */
static void seal(struct lane *lane, struct batch *batch, struct frame *frame)
{
	size_t first = batch->n_messages - frame->n;
	struct wire *wire = &batch->wire[first];

	for (unsigned i = 0; i < frame->n; i++)
		frame->payload_len += frame->messages[i]->header->len;
	wire->header = *frame->messages[0]->header;
	if (frame->n > 1)
		data_pack_header(frame->messages[0]->header, frame->n, frame->payload_len,
				 &wire->header);
	data_header_encode(&wire->header);
	frame->wire = wire;
	frame->number = lane->out.number;
	if (lane->out.len)
		seal_make(&lane->out, &wire->header, sizeof(wire->header), wire->seal);
	if (FAILPOINT_CORRUPTS("header-sent"))
		wire->header.round ^= 1;
	if (frame->n > 1)
		seal_pack(lane, frame, &batch->packed[first]);
	else if (lane->out.len && frame->payload_len)
		seal_begin(&lane->out);
}

static int lane_fill_batch(struct lane *lane, struct batch *batch)
{
	int r = 0;

	batch->n_messages = batch->n_frames = batch->n_iov = batch->len = 0;
	batch->is_cut = false;
	/* It may be cut again: what it has in its seal by then is the batch's frame's to know. */
	if (lane->begun.frame.n) {
		batch->frames[batch->n_frames++] = lane->begun.frame;
		batch_add(lane, batch, &batch->frames[0], lane->begun.done);
	}
	while (!r && batch->n_messages < SEND_MESSAGES && batch->len < send_bytes(lane) &&
	       lane->output.queue.n) {
		struct frame *frame = &batch->frames[batch->n_frames];

		*frame = (struct frame){ .messages = &batch->messages[batch->n_messages] };
		r = take(lane, batch, frame, queue_pop(&lane->output.queue));
		if (!r)
			r = take_more(lane, batch, frame);
		if (!frame->n)
			break;
		batch->n_frames++;
		seal(lane, batch, frame);
		batch_add(lane, batch, frame, 0);
	}
	return !r && lane->out.is_broken ? error_origin(-EIO) : r;
}

/* Its call is told soon that it was sent. */
static _fetches_ void fetch_done(const struct message *message)
{
	const struct call *call = container_of(message, struct call, message);

	if (message->kind == MESSAGE_CALL)
		__builtin_prefetch(call->soon[0], 1);
}

static void done_with(struct lane *lane, struct message **messages, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (i + 2 < n)
			fetch_done(messages[i + 2]);
		lane_message_done(lane, messages[i], true);
	}
}

/* It has to go on with exactly what it says that it has. */
static void begin(struct lane *lane, const struct frame *frame)
{
	struct begun *begun = &lane->begun;

	begun->frame = *frame;
	begun->done = 0;
	begun->wire = *frame->wire;
	memcpy(begun->messages, frame->messages, frame->n * sizeof(begun->messages[0]));
	begun->frame.messages = begun->messages;
	begun->frame.wire = &begun->wire;
	if (frame->n == 1)
		return;
	memcpy(begun->packed, frame->packed, frame->n * sizeof(begun->packed[0]));
	begun->frame.packed = begun->packed;
}

/* The seal behind the last of a frame's. */
static uint64_t next_number(const struct frame *frame)
{
	return frame->number + 1 + (frame->n > 1) + !!frame->payload_len;
}

/* What was begun is all written, and its messages are done with. */
static void end_begun(struct lane *lane)
{
	unsigned n = lane->begun.frame.n;

	lane->begun.frame.n = 0;
	done_with(lane, lane->begun.messages, n);
}

/*
 * What was written of the batch is done with; what was begun is the lane's begun frame; the rest
 * goes back into the queue, where more urgent ones may still come before it, and its seals are made
 * anew. In that order from the back, since whoever is told that his call was sent may post the
 * next, and pushing back must not need memory.
 */
static void lane_empty_batch(struct lane *lane, struct batch *batch, size_t written)
{
	size_t n_whole = 0, n_back = batch->n_messages, left = written;
	struct begun *begun = &lane->begun;
	bool goes_on = begun->frame.n;

	for (; n_whole < batch->n_frames; n_whole++) {
		size_t len = frame_len(lane, &batch->frames[n_whole]);

		if (!n_whole && goes_on)
			len -= begun->done;
		if (left < len)
			break;
		left -= len;
	}
	for (size_t i = batch->n_frames; i-- > n_whole;) {
		struct frame *frame = &batch->frames[i];

		lane->out.number = frame->number;
		if ((!i && goes_on) || (i == n_whole && left)) {
			lane->out.number = next_number(frame);
			continue;
		}
		for (unsigned n = frame->n; n-- > 0;)
			queue_return(&lane->output.queue, frame->messages[n]);
		n_back -= frame->n;
	}
	if (goes_on && n_whole) {
		end_begun(lane);
	} else if (goes_on) {
		begun->done += left;
		begun->frame.sealed = batch->frames[0].sealed;
		memcpy(begun->frame.seal, batch->frames[0].seal, sizeof(begun->frame.seal));
	}
	if (left && !(goes_on && !n_whole)) {
		begin(lane, &batch->frames[n_whole]);
		begun->done = left;
		n_back -= batch->frames[n_whole].n;
	}
	done_with(lane, batch->messages, n_back);
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
	if (batch->is_cut || lane->output.queue.n)
		flags |= MSG_MORE;
	n = r || !batch->len ? 0 : sendmsg(lane->source.fd, &message, flags);
	/*
	 * A trainer has given back what is sent of its memory: it is cut off, and others' messages
	 * go on.
	 */
	if (n < 0 && errno == EFAULT && holes_fill(batch->iov, batch->n_iov))
		errno = EAGAIN;
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
		if (lane->output.is_unblocked)
			lane_heard(lane, clock_now_ns());
	}
	lane->output.is_unblocked = false;
	if ((size_t)MAX(n, 0) < batch->len) {
		lane_want(lane, EPOLLIN | EPOLLOUT);
		return false;
	}
	return batch->len > 0;
}

/*
 * What is unsent inside the kernel nothing overtakes, and it comes in bursts of that size: nodes
 * that change over to a more urgent tensor at the same moment then have sent different parts of the
 * one before, whose sums have to wait. So all connections together have what the link carries in 2
 * ms. Up to powers of two, as what is known of the link changes all the time.
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
	if (ahead == lane->output.ahead)
		return;
	lane->output.ahead = ahead;
	address_set_ahead(lane->source.fd, ahead);
}

void lane_flush(struct lane *lane)
{
	lane->output.is_fresh = false;
	lane_set_ahead(lane);
	lane_set_flight(lane, clock_now_ns());
	for (unsigned i = 0; i < SEND_ROUNDS; i++) {
		if (!lane->begun.frame.n && !lane->output.queue.n) {
			fair_rest(&lane->output.queue);
			lane_want(lane, EPOLLIN);
			return;
		}
		if (!lane_flush_once(lane))
			return;
	}
	lane_want(lane, lane->begun.frame.n || lane->output.queue.n ? EPOLLIN | EPOLLOUT : EPOLLIN);
}
