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
static size_t packed_len(const struct parcel *parcel)
{
	return parcel->n > 1 ? parcel->n * sizeof(parcel->packed[0]) : 0;
}

static size_t parcel_len(const struct lane *lane, const struct parcel *parcel)
{
	size_t packed = packed_len(parcel);

	return head_len(lane) + packed + (packed ? lane->out.len : 0) + parcel->payload_len +
	       (parcel->payload_len ? lane->out.len : 0);
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

/* So many bytes more of a parcel's payloads, right before the kernel copies them. */
static void seal_payload(struct lane *lane, struct parcel *parcel, const void *data, size_t len)
{
	if (!lane->out.len || !len)
		return;
	seal_add(&lane->out, data, len);
	parcel->sealed += (uint32_t)len;
	if (parcel->sealed == parcel->payload_len)
		seal_end(&lane->out, parcel->seal);
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
static void batch_message(struct lane *lane, struct batch *batch, struct parcel *parcel,
			  size_t *skip)
{
	const struct message *message = parcel->messages[0];
	size_t len = message->header->len, n;

	if (*skip < len) {
		n = MIN(len - *skip, send_bytes(lane) - MIN(batch->len, send_bytes(lane)));
		if (*skip + n > parcel->sealed)
			seal_payload(lane, parcel, (const char *)message->payload + parcel->sealed,
				     *skip + n - parcel->sealed);
		if (n)
			batch_payload(batch, message, *skip, n);
		batch->is_cut = n < len - *skip;
	}
	*skip -= MIN(*skip, len);
}

/* The payloads of several: all of them, since they are small. */
static void batch_pack(struct batch *batch, const struct parcel *parcel, size_t *skip)
{
	for (unsigned i = 0; i < parcel->n; i++) {
		size_t len = parcel->messages[i]->header->len;

		if (*skip < len)
			batch_payload(batch, parcel->messages[i], *skip, len - *skip);
		*skip -= MIN(*skip, len);
	}
}

/*
 * Adds what is left of a parcel, of which skip bytes are written already; no more than one system
 * call is offered.
 */
static void batch_add(struct lane *lane, struct batch *batch, struct parcel *parcel, size_t skip)
{
	batch_rest(batch, parcel->wire, head_len(lane), &skip);
	if (parcel->n > 1) {
		batch_rest(batch, parcel->packed, packed_len(parcel), &skip);
		batch_rest(batch, parcel->packed_seal, lane->out.len, &skip);
		batch_pack(batch, parcel, &skip);
	} else {
		batch_message(lane, batch, parcel, &skip);
	}
	if (parcel->payload_len && !batch->is_cut)
		batch_rest(batch, parcel->seal, lane->out.len, &skip);
}

/* One that has just left the queue. */
static int take(struct lane *lane, struct batch *batch, struct parcel *parcel,
		struct message *message)
{
	int r;

	r = lane_prepare(lane, message);
	if (r) {
		queue_return(&lane->output.queue, message);
		return error_trace(r);
	}
	batch->messages[batch->n_messages++] = message;
	parcel->n++;
	return 0;
}

/*
 * Those of its job next to it that are small like it leave with it; none is waited for, and none
 * overtakes another.
 */
static int take_more(struct lane *lane, struct batch *batch, struct parcel *parcel)
{
	const struct data_header *first = parcel->messages[0]->header;
	const struct message *next;
	uint32_t len = first->len;
	int r = 0;

	if (!lane->has_packs || !data_may_pack(first))
		return 0;
	while (!r && batch->n_messages < SEND_MESSAGES && parcel->n < DATA_PACK_MAX &&
	       (next = queue_next(&lane->output.queue)) && data_packs_with(first, next->header) &&
	       len + next->header->len <= DATA_PACKED_LEN) {
		len += next->header->len;
		r = take(lane, batch, parcel, queue_pop_next(&lane->output.queue));
	}
	return r;
}

/* What it says of several messages is made, and the seals of that and of their payloads. */
static void seal_pack(struct lane *lane, struct parcel *parcel, struct data_packed *packed)
{
	for (unsigned i = 0; i < parcel->n; i++)
		data_pack(parcel->messages[i]->header, &packed[i]);
	parcel->packed = packed;
	if (!lane->out.len)
		return;
	seal_make(&lane->out, packed, packed_len(parcel), parcel->packed_seal);
	if (parcel->payload_len)
		seal_begin(&lane->out);
	for (unsigned i = 0; i < parcel->n; i++)
		seal_payload(lane, parcel, parcel->messages[i]->payload,
			     parcel->messages[i]->header->len);
}

/* Its header is made, and all seals but that of the payload of a message alone, which is begun. */
static void seal(struct lane *lane, struct batch *batch, struct parcel *parcel)
{
	size_t first = batch->n_messages - parcel->n;
	struct wire *wire = &batch->wire[first];

	for (unsigned i = 0; i < parcel->n; i++)
		parcel->payload_len += parcel->messages[i]->header->len;
	wire->header = *parcel->messages[0]->header;
	if (parcel->n > 1)
		data_pack_header(parcel->messages[0]->header, parcel->n, parcel->payload_len,
				 &wire->header);
	data_header_encode(&wire->header);
	parcel->wire = wire;
	parcel->number = lane->out.number;
	if (lane->out.len)
		seal_make(&lane->out, &wire->header, sizeof(wire->header), wire->seal);
	if (FAILPOINT_CORRUPTS("header-sent"))
		wire->header.round ^= 1;
	if (parcel->n > 1)
		seal_pack(lane, parcel, &batch->packed[first]);
	else if (lane->out.len && parcel->payload_len)
		seal_begin(&lane->out);
}

static int lane_fill_batch(struct lane *lane, struct batch *batch)
{
	int r = 0;

	batch->n_messages = batch->n_parcels = batch->n_iov = batch->len = 0;
	batch->is_cut = false;
	/* It may be cut again: what it has in its seal by then is the batch's parcel's to know. */
	if (lane->begun.parcel.n) {
		batch->parcels[batch->n_parcels++] = lane->begun.parcel;
		batch_add(lane, batch, &batch->parcels[0], lane->begun.done);
	}
	while (!r && batch->n_messages < SEND_MESSAGES && batch->len < send_bytes(lane) &&
	       lane->output.queue.n) {
		struct parcel *parcel = &batch->parcels[batch->n_parcels];

		*parcel = (struct parcel){ .messages = &batch->messages[batch->n_messages] };
		r = take(lane, batch, parcel, queue_pop(&lane->output.queue));
		if (!r)
			r = take_more(lane, batch, parcel);
		if (!parcel->n)
			break;
		batch->n_parcels++;
		seal(lane, batch, parcel);
		batch_add(lane, batch, parcel, 0);
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
static void begin(struct lane *lane, const struct parcel *parcel)
{
	struct begun *begun = &lane->begun;

	begun->parcel = *parcel;
	begun->done = 0;
	begun->wire = *parcel->wire;
	memcpy(begun->messages, parcel->messages, parcel->n * sizeof(begun->messages[0]));
	begun->parcel.messages = begun->messages;
	begun->parcel.wire = &begun->wire;
	if (parcel->n == 1)
		return;
	memcpy(begun->packed, parcel->packed, parcel->n * sizeof(begun->packed[0]));
	begun->parcel.packed = begun->packed;
}

/* The seal behind the last of a parcel's. */
static uint64_t next_number(const struct parcel *parcel)
{
	return parcel->number + 1 + (parcel->n > 1) + !!parcel->payload_len;
}

/* What was begun is all written, and its messages are done with. */
static void end_begun(struct lane *lane)
{
	unsigned n = lane->begun.parcel.n;

	lane->begun.parcel.n = 0;
	done_with(lane, lane->begun.messages, n);
}

/*
 * What was written of the batch is done with; what was begun is the lane's begun parcel; the rest
 * goes back into the queue, where more urgent ones may still come before it, and its seals are made
 * anew. In that order from the back, since whoever is told that his call was sent may post the
 * next, and pushing back must not need memory.
 */
static void lane_empty_batch(struct lane *lane, struct batch *batch, size_t written)
{
	size_t n_whole = 0, n_back = batch->n_messages, left = written;
	struct begun *begun = &lane->begun;
	bool goes_on = begun->parcel.n;

	for (; n_whole < batch->n_parcels; n_whole++) {
		size_t len = parcel_len(lane, &batch->parcels[n_whole]);

		if (!n_whole && goes_on)
			len -= begun->done;
		if (left < len)
			break;
		left -= len;
	}
	for (size_t i = batch->n_parcels; i-- > n_whole;) {
		struct parcel *parcel = &batch->parcels[i];

		lane->out.number = parcel->number;
		if ((!i && goes_on) || (i == n_whole && left)) {
			lane->out.number = next_number(parcel);
			continue;
		}
		for (unsigned n = parcel->n; n-- > 0;)
			queue_return(&lane->output.queue, parcel->messages[n]);
		n_back -= parcel->n;
	}
	if (goes_on && n_whole) {
		end_begun(lane);
	} else if (goes_on) {
		begun->done += left;
		begun->parcel.sealed = batch->parcels[0].sealed;
		memcpy(begun->parcel.seal, batch->parcels[0].seal, sizeof(begun->parcel.seal));
	}
	if (left && !(goes_on && !n_whole)) {
		begin(lane, &batch->parcels[n_whole]);
		begun->done = left;
		n_back -= batch->parcels[n_whole].n;
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
		if (!lane->begun.parcel.n && !lane->output.queue.n) {
			fair_rest(&lane->output.queue);
			lane_want(lane, EPOLLIN);
			return;
		}
		if (!lane_flush_once(lane))
			return;
	}
	lane_want(lane,
		  lane->begun.parcel.n || lane->output.queue.n ? EPOLLIN | EPOLLOUT : EPOLLIN);
}
