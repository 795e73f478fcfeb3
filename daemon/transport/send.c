/*
 * The way out of a TCP lane: what waits in the queue leaves in batches of one system call each,
 * small messages as packs, with checksums. What a system call has not begun to write goes back
 * into the queue. lane_prepare() is for RDMA lanes, too. Worker's thread.
 */
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

/* What stands in front of the payloads. */
static size_t parcel_head(const struct lane *lane, const struct parcel *parcel)
{
	if (parcel->n == 1)
		return head_len(lane);
	return head_len(lane) + parcel->n * sizeof(parcel->packed[0]) +
	       (lane->has_checksums ? DATA_CHECK_LEN : 0);
}

static size_t parcel_len(const struct lane *lane, const struct parcel *parcel)
{
	const struct message *message = parcel->messages[0];

	if (parcel->n == 1)
		return head_len(lane) + message->header->len + tail_len(lane, message);
	return head_len(lane) + parcel->wire_len + (lane->has_checksums ? DATA_CHECK_LEN : 0);
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

/* What is left of it when *skip bytes are; these are none of what comes behind it. */
static void batch_rest(struct batch *batch, const void *data, size_t len, size_t *skip)
{
	if (*skip < len)
		batch_iov(batch, (const char *)data + *skip, len - *skip);
	*skip -= MIN(*skip, len);
}

/* Adds what is left of a message, of which skip bytes are written already; no more than one system call is offered. */
static void batch_message(struct lane *lane, struct batch *batch, const struct parcel *parcel,
			  size_t skip, uint32_t *check)
{
	struct message *message = parcel->messages[0];
	size_t len = message->header->len, tail = tail_len(lane, message);

	batch_rest(batch, parcel->wire, head_len(lane), &skip);
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

/* The same of a pack: all of it, since all that it holds is small. The first n_done messages are written, up to byte `at`. */
static void batch_pack(struct lane *lane, struct batch *batch, const struct parcel *parcel,
		       size_t skip, unsigned n_done, size_t at)
{
	at -= parcel_head(lane, parcel);
	batch_rest(batch, parcel->wire, head_len(lane), &skip);
	batch_rest(batch, parcel->packed, parcel->n * sizeof(parcel->packed[0]), &skip);
	if (lane->has_checksums)
		batch_rest(batch, parcel->packed_check, DATA_CHECK_LEN, &skip);
	skip -= MIN(skip, at);
	for (unsigned i = n_done; i < parcel->n; i++) {
		size_t len = parcel->messages[i]->header->len;

		if (skip < len)
			batch_payload(lane, batch, parcel->messages[i], skip, len - skip);
		skip -= MIN(skip, len);
	}
}

static void batch_add(struct lane *lane, struct batch *batch, const struct parcel *parcel,
		      const struct begun *begun)
{
	size_t i = batch->n_parcels++;

	batch->parcels[i] = *parcel;
	if (parcel->n == 1)
		batch_message(lane, batch, parcel, begun ? begun->done : 0, &batch->checks[i]);
	else if (begun)
		batch_pack(lane, batch, parcel, begun->done, begun->n_done, begun->at);
	else
		batch_pack(lane, batch, parcel, 0, 0, parcel_head(lane, parcel));
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

/* The most urgent one that waits. */
static int take(struct lane *lane, struct batch *batch, struct parcel *parcel)
{
	struct message *message = queue_pop(&lane->queue);
	int r;

	queue_fetch(&lane->queue);
	r = lane_prepare(lane, message);
	if (r) {
		(void)queue_push(&lane->queue, message);
		return error_trace(r);
	}
	batch->messages[batch->n_messages++] = message;
	parcel->n++;
	return 0;
}

/* Those next to it that are small like it leave with it; none is waited for, and none overtakes another. */
static int take_more(struct lane *lane, struct batch *batch, struct parcel *parcel)
{
	const struct data_header *first = parcel->messages[0]->header;
	const struct message *next;
	uint32_t len = first->len;
	int r = 0;

	if (!lane->has_packs || !data_may_pack(first))
		return 0;
	while (!r && batch->n_messages < SEND_MESSAGES && parcel->n < DATA_PACK_MAX &&
	       (next = queue_first(&lane->queue)) && data_packs_with(first, next->header) &&
	       len + next->header->len <= DATA_PACKED_LEN) {
		len += next->header->len;
		r = take(lane, batch, parcel);
	}
	return r;
}

/* The checksum of all of its payload, which is about to be copied by the kernel. */
static uint32_t message_check(const struct lane *lane, struct message *message)
{
	uint32_t len = message->header->len;

	if (!lane->has_checksums)
		return 0;
	if (message->check_done < len)
		message->check =
			crc32c(message->check, (const char *)message->payload + message->check_done,
			       len - message->check_done);
	message->check_done = len;
	return len ? message->check : 0;
}

/* Its header is made; for a pack, with what stands for each message. */
static void seal(struct lane *lane, struct batch *batch, struct parcel *parcel)
{
	size_t first = batch->n_messages - parcel->n;
	struct wire *wire = &batch->wire[first];
	struct data_packed *packed = &batch->packed[first];
	uint32_t *check = &batch->checks[batch->n_parcels], len = 0;

	if (parcel->n == 1) {
		wire->header = *parcel->messages[0]->header;
	} else {
		for (unsigned i = 0; i < parcel->n; i++) {
			struct message *message = parcel->messages[i];

			len += message->header->len;
			data_pack(message->header, message_check(lane, message), &packed[i]);
		}
		data_pack_header(parcel->messages[0]->header, parcel->n, len, &wire->header);
		parcel->wire_len = wire->header.len;
		if (lane->has_checksums)
			*check = htole32(crc32c(0, packed, parcel->n * sizeof(*packed)));
	}
	data_header_encode(&wire->header);
	if (lane->has_checksums)
		wire->check = htole32(crc32c(0, &wire->header, sizeof(wire->header)));
	if (FAILPOINT_CORRUPTS("header-sent"))
		wire->header.round ^= 1;
	parcel->wire = wire;
	parcel->packed = packed;
	parcel->packed_check = check;
}

static int lane_fill_batch(struct lane *lane, struct batch *batch)
{
	int r = 0;

	batch->n_messages = batch->n_parcels = batch->n_iov = batch->len = 0;
	batch->is_cut = false;
	if (lane->begun.parcel.n)
		batch_add(lane, batch, &lane->begun.parcel, &lane->begun);
	while (!r && batch->n_messages < SEND_MESSAGES && batch->len < send_bytes(lane) &&
	       lane->queue.n) {
		struct parcel parcel = { .messages = &batch->messages[batch->n_messages] };

		r = take(lane, batch, &parcel);
		if (!r)
			r = take_more(lane, batch, &parcel);
		if (!parcel.n)
			break;
		seal(lane, batch, &parcel);
		batch_add(lane, batch, &parcel, NULL);
	}
	return r;
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
	begun->n_done = 0;
	begun->done = 0;
	begun->at = parcel_head(lane, parcel);
	begun->wire = *parcel->wire;
	memcpy(begun->messages, parcel->messages, parcel->n * sizeof(begun->messages[0]));
	begun->parcel.messages = begun->messages;
	begun->parcel.wire = &begun->wire;
	if (parcel->n == 1)
		return;
	memcpy(begun->packed, parcel->packed, parcel->n * sizeof(begun->packed[0]));
	begun->packed_check = *parcel->packed_check;
	begun->parcel.packed = begun->packed;
	begun->parcel.packed_check = &begun->packed_check;
}

/* So many bytes more of it are written. Of a pack, what is written to its end may be answered at once. */
static void go_on(struct lane *lane, size_t n)
{
	struct begun *begun = &lane->begun;

	begun->done += n;
	while (begun->parcel.n > 1 &&
	       begun->at + begun->messages[begun->n_done]->header->len <= begun->done) {
		struct message *message = begun->messages[begun->n_done++];

		begun->at += message->header->len;
		lane_message_done(lane, message, true);
	}
}

/*
 * What was written of the batch is done with; what was begun is the lane's begun parcel; the rest goes back into
 * the queue, where more urgent ones may still come before it. In that order from the back, since whoever is told that
 * his call was sent may post the next, and pushing back must not need memory.
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
		if ((!i && goes_on) || (i == n_whole && left))
			continue;
		for (unsigned n = batch->parcels[i].n; n-- > 0;)
			(void)queue_push(&lane->queue, batch->parcels[i].messages[n]);
		n_back -= batch->parcels[i].n;
	}
	if (goes_on && n_whole) {
		unsigned n = begun->parcel.n;

		begun->parcel.n = 0;
		done_with(lane, begun->messages + begun->n_done, n - begun->n_done);
	}
	if (left && !(goes_on && !n_whole)) {
		begin(lane, &batch->parcels[n_whole]);
		n_back -= batch->parcels[n_whole].n;
	}
	done_with(lane, batch->messages, n_back);
	if (left)
		go_on(lane, left);
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
		if (!lane->begun.parcel.n && !lane->queue.n) {
			lane_want(lane, EPOLLIN);
			return;
		}
		if (!lane_flush_once(lane))
			return;
	}
	lane_want(lane, lane->begun.parcel.n || lane->queue.n ? EPOLLIN | EPOLLOUT : EPOLLIN);
}
