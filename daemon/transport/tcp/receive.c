/*
 * The way in of a TCP lane: bytes become messages, and their checksums are checked. message.c says
 * where payloads belong and what becomes of a message. Worker's thread.
 */
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/cookies.h"
#include "transport/lane/lane.h"
#include "transport/peer/delivery.h"
#include "transport/peer/peer.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "base/memory/holes.h"
#include <endian.h>
#include <inttypes.h>
#include <sys/epoll.h>

#define BULK_BYTES     (16u << 10) /* of a payload: to copy them costs more than a system call */
#define RECEIVE_ROUNDS 8	   /* system calls before others on this loop have their turn */

/* Bytes of a message over TCP, with its seals */

/* Nothing that came can be trusted any more. */
static void seal_error(struct lane *lane, const char *what)
{
	metric_add(&lane->transport->checksum_errors, 1);
	lane_fail(lane, -EBADMSG, "connection %u: a %s arrived with other bytes than were sent",
		  lane->index, what);
}

/* From here on: what the next seal stands for. */
static void begin_seal(struct lane *lane)
{
	lane->input.seal_len = 0;
	if (lane->in.len)
		seal_begin(&lane->in);
}

/* All that the seal stands for is here, in one piece. */
static bool piece_fits(struct lane *lane, const void *data, size_t len)
{
	seal_begin(&lane->in);
	seal_add(&lane->in, data, len);
	return seal_fits(&lane->in, lane->input.seal);
}

/*
 * The call that this cookie is said to answer, once it is looked up; and what is looked at when its
 * answer is here.
 */
static struct call *call_of(const struct lane *lane, uint32_t cookie)
{
	return lane->makes_calls ? cookies_find(&lane->cookies, le32toh(cookie)) : NULL;
}

static void fetch_soon(const struct call *call)
{
#pragma GCC unroll 32
	for (size_t i = 0; call && i < CALL_SOON; i++)
		__builtin_prefetch(call->soon[i], 1);
}

static void fetch_call(const struct call *call)
{
	if (!call)
		return;
	__builtin_prefetch(&call->header);
	__builtin_prefetch(&call->target);
	for (size_t i = 0; i < CALL_SOON; i += CACHE_LINE / sizeof(call->soon[0]))
		__builtin_prefetch(&call->soon[i]);
	fetch_to_write(&call->answer, sizeof(call->answer));
	__builtin_prefetch(&call->message.lane, 1);
	__builtin_prefetch(&call->link, 1);
	__builtin_prefetch(&call->state);
}

/* What comes behind a message. */
static void next_message(struct lane *lane)
{
	lane->input.header_len = 0;
	lane->input.reading = READING_HEADER;
}

static void end_message(struct lane *lane)
{
	lane_end_message(lane);
	next_message(lane);
}

static void begin_pack(struct lane *lane)
{
	struct lane_pack *pack = &lane->pack;
	const char *why;

	data_header_decode(&lane->input.header);
	if (data_header_check(&lane->input.header, &why)) {
		(void)lane_protocol_error(lane, why);
		return;
	}
	pack->header = lane->input.header;
	pack->n = lane->input.header.part;
	pack->len = pack->next = 0;
	lane->input.seal_len = 0;
	lane->input.reading = READING_PACKED;
}

static void begin_message(struct lane *lane)
{
	if (lane->has_packs && lane->input.header.op == DATA_PACK) {
		lane->input.is_bulk = false;
		begin_pack(lane);
		return;
	}
	if (lane_begin_message(lane))
		return;
	lane->input.is_bulk = lane->input.target_len >= BULK_BYTES;
	if (!lane->input.target_len) {
		end_message(lane);
		return;
	}
	begin_seal(lane);
	lane->input.reading = READING_PAYLOAD;
}

/* Where the message ends is known: of a part it costs no more than that, where both sides know how. */
static bool costs_part_alone(const struct lane *lane)
{
	const struct call *call = lane->input.call;

	if (!call)
		return lane->can_repeat && lane->input.header.op == DATA_PUSH;
	return lane->input.header.op == DATA_RESULT &&
	       ((call->is_repeatable && lane->can_repeat) || call->ends_alone);
}

/* Returns whether the message alone is lost. */
static bool end_damaged(struct lane *lane)
{
	struct incoming *incoming = lane->input.incoming;
	struct call *call = lane->input.call;

	if (!costs_part_alone(lane))
		return false;
	metric_add(&lane->transport->checksum_errors, 1);
	if (incoming) {
		incoming->is_damaged = true;
		lane_end_message(lane);
		return true;
	}
	lane->input.call = NULL;
	call_damaged(call);
	lane_end_answer(lane, call);
	return true;
}

/* A message is here, and its seal is right or not. */
static void end_sealed(struct lane *lane, bool fits)
{
	if (fits)
		lane_end_message(lane);
	else if (!end_damaged(lane))
		seal_error(lane, "payload");
}

static bool has_payloads(const struct lane_pack *pack)
{
	return pack->header.len > pack->n * sizeof(pack->packed[0]);
}

/* A pack is here, and its seals looked at: each of its messages is as if it had come by itself. */
static void end_pack(struct lane *lane, bool fits)
{
	struct lane_pack *pack = &lane->pack;

	for (uint32_t i = 0; !lane->is_failed && i < pack->n; i++) {
		lane->input.incoming = TAKE_PTR(pack->messages[i].incoming);
		lane->input.call = TAKE_PTR(pack->messages[i].call);
		end_sealed(lane, fits || !pack->packed[i].len);
	}
	if (lane->is_failed)
		return;
	pack->n = 0;
	next_message(lane);
}

/* The payload of the message that is looked at is where it belongs. */
static void keep_packed(struct lane *lane)
{
	struct lane_pack *pack = &lane->pack;
	uint32_t i = pack->next - 1;

	pack->messages[i].incoming = TAKE_PTR(lane->input.incoming);
	pack->messages[i].call = TAKE_PTR(lane->input.call);
	/* No other message of the pack is its answer. */
	if (pack->messages[i].call)
		pack->messages[i].call->state = CALL_FILLING;
}

/* Goes on with a pack, up to a payload or to the seal of all. */
static void next_packed(struct lane *lane)
{
	struct lane_pack *pack = &lane->pack;

	lane->input.reading = READING_PAYLOAD;
	while (pack->next < pack->n) {
		uint32_t i = pack->next++;

		if (i + 2 < pack->n)
			fetch_call(call_of(lane, pack->packed[i + 2].cookie));
		if (i + 1 < pack->n)
			fetch_soon(call_of(lane, pack->packed[i + 1].cookie));
		data_unpack(&pack->header, &pack->packed[i], &lane->input.header);
		if (lane_begin_decoded(lane) || lane->input.target_len)
			return;
		keep_packed(lane);
	}
	if (lane->in.len && has_payloads(pack))
		lane->input.reading = READING_PAYLOAD_SEAL;
	else
		end_pack(lane, true);
}

/* Of a pack all that is in front of its payloads is here. */
static void took_packed(struct lane *lane)
{
	struct lane_pack *pack = &lane->pack;

	for (uint32_t i = 0; lane->makes_calls && i < pack->n; i++)
		cookies_fetch(&lane->cookies, le32toh(pack->packed[i].cookie));
	if (!data_packed_fit(&pack->header, pack->packed)) {
		(void)lane_protocol_error(lane, "a pack of other messages than its header says");
		return;
	}
	if (has_payloads(pack))
		begin_seal(lane);
	next_packed(lane);
}

static void took_header(struct lane *lane)
{
	if (FAILPOINT_CORRUPTS("header-received"))
		lane->input.header.round ^= 1;
	lane->input.seal_len = 0;
	if (lane->in.len)
		lane->input.reading = READING_HEADER_SEAL;
	else
		begin_message(lane);
}

static void took_seal(struct lane *lane)
{
	const struct lane_pack *pack = &lane->pack;

	if (lane->input.reading == READING_PAYLOAD_SEAL) {
		bool fits = seal_fits(&lane->in, lane->input.seal);

		if (pack->n) {
			end_pack(lane, fits);
		} else {
			end_sealed(lane, fits);
			next_message(lane);
		}
	} else if (lane->input.reading == READING_PACKED_SEAL) {
		if (piece_fits(lane, pack->packed, pack->n * sizeof(pack->packed[0])))
			took_packed(lane);
		else
			seal_error(lane, "header");
	} else if (piece_fits(lane, &lane->input.header, sizeof(lane->input.header))) {
		begin_message(lane);
	} else {
		seal_error(lane, "header");
	}
}

/*
 * n more bytes of the payload. Those of the buffer before they are copied to memory that is far: they
 * are in the cache.
 */
static void seal_payload(struct lane *lane, void *data, size_t n)
{
	if (FAILPOINT_CORRUPTS("payload-received"))
		((unsigned char *)data)[n / 2] ^= 0x10;
	if (lane->in.len)
		seal_add(&lane->in, data, n);
}

/* They are where they belong. */
static void took_payload(struct lane *lane, size_t n)
{
	lane->input.target = (char *)lane->input.target + n;
	lane->input.target_len -= n;
	if (lane->input.target_len && lane->input.call)
		FAILPOINT("answer-half");
	if (lane->input.target_len)
		return;
	if (lane->pack.n) {
		keep_packed(lane);
		next_packed(lane);
	} else if (lane->in.len) {
		lane->input.reading = READING_PAYLOAD_SEAL;
	} else {
		end_message(lane);
	}
}

/* As many bytes as are still missing of a piece of `size` at `at`. Returns how many were taken. */
static size_t take(void *at, size_t size, size_t *have, const unsigned char *data, size_t len)
{
	size_t n = MIN(len, size - *have);

	memcpy((unsigned char *)at + *have, data, n);
	*have += n;
	return n;
}

/*
 * The call that the message at `data` is the answer to; NULL: there is no such call, or no such
 * message here yet.
 */
static struct call *call_ahead(const struct lane *lane, const unsigned char *data, size_t len)
{
	uint32_t cookie;

	if (len < sizeof(struct data_header))
		return NULL;
	memcpy(&cookie, data + offsetof(struct data_header, cookie), sizeof(cookie));
	return call_of(lane, cookie);
}

/*
 * Behind this payload the next messages may be here already: what the call is that the second of
 * them is the answer to is fetched, and what that of the first leads to. Nothing that they say is
 * trusted.
 */
static void fetch_next(const struct lane *lane, const unsigned char *data, size_t len)
{
	size_t check = lane->in.len, at = lane->input.target_len + check;
	uint32_t payload;

	if (!lane->makes_calls || lane->pack.n || len < at + sizeof(struct data_header))
		return;
	fetch_soon(call_ahead(lane, data + at, len - at));
	memcpy(&payload, data + at + offsetof(struct data_header, len), sizeof(payload));
	payload = le32toh(payload);
	at += sizeof(struct data_header) + check + payload + (payload ? check : 0);
	if (at < len)
		fetch_call(call_ahead(lane, data + at, len - at));
}

/* Payload that is here already. Returns how much was taken. The memory of a small one comes into the cache beside its checksum. */
static size_t take_payload(struct lane *lane, unsigned char *data, size_t len)
{
	size_t n = MIN(len, lane->input.target_len);

	fetch_next(lane, data, len);
	if (n <= DATA_PACKED_MAX)
		fetch_to_write(lane->input.target, n);
	seal_payload(lane, data, n);
	memcpy(lane->input.target, data, n);
	lane->worker->n_copied += n;
	took_payload(lane, n);
	return n;
}

/* The next bytes of what is being read. Returns how many. */
static size_t take_some(struct lane *lane, unsigned char *data, size_t len)
{
	size_t n, packed = lane->pack.n * sizeof(lane->pack.packed[0]);

	switch (lane->input.reading) {
	case READING_HEADER:
		lane->watch.n_begun += !lane->input.header_len;
		n = take(&lane->input.header, sizeof(lane->input.header), &lane->input.header_len,
			 data, len);
		if (lane->input.header_len == sizeof(lane->input.header))
			took_header(lane);
		return n;
	case READING_PACKED:
		n = take(lane->pack.packed, packed, &lane->pack.len, data, len);
		if (lane->pack.len < packed)
			return n;
		if (lane->in.len)
			lane->input.reading = READING_PACKED_SEAL;
		else
			took_packed(lane);
		return n;
	case READING_PAYLOAD:
		return take_payload(lane, data, len);
	default:
		n = take(lane->input.seal, lane->in.len, &lane->input.seal_len, data, len);
		if (lane->input.seal_len == lane->in.len)
			took_seal(lane);
		return n;
	}
}

/*
 * How much of the buffer is offered for what comes behind a payload, or in front of one. What is as
 * large as the buffer would all be copied out of it where messages come one by one. So behind a
 * large payload no more is read than tells where the next one is to go.
 */
static size_t buffer_len(const struct lane *lane)
{
	size_t check = lane->in.len;
	size_t head = sizeof(struct data_header) + check;

	if (!lane->input.is_bulk)
		return sizeof(lane->worker->buffer);
	switch (lane->input.reading) {
	case READING_HEADER:
		return head - lane->input.header_len;
	case READING_HEADER_SEAL:
		return check - lane->input.seal_len;
	case READING_PAYLOAD_SEAL:
		return check - lane->input.seal_len + head;
	default:
		return check + head;
	}
}

static ssize_t lane_readv(struct lane *lane, const struct iovec *iov, int n)
{
	ssize_t len = readv(lane->source.fd, iov, n);

	/* A trainer has given back where it goes: it is cut off, and others' messages go on. */
	if (len < 0 && errno == EFAULT && holes_fill(iov, (size_t)n))
		errno = EAGAIN;
	return len;
}

/* What is left of a payload goes straight to its place, what comes behind it into the buffer. */
static ssize_t lane_read(struct lane *lane, size_t *ret_offered)
{
	struct worker *worker = lane->worker;
	size_t behind = buffer_len(lane);
	struct iovec iov[2];
	int n = 0;

	*ret_offered = behind;
	if (lane->input.reading == READING_PAYLOAD) {
		size_t len = lane->input.target_len;

		if (lane->in.len && len > CHECKED_BYTES)
			len = CHECKED_BYTES;
		iov[n++] = (struct iovec){ .iov_base = lane->input.target, .iov_len = len };
		if (len < lane->input.target_len) {
			*ret_offered = len;
			return lane_readv(lane, iov, n);
		}
		*ret_offered += len;
	}
	iov[n++] = (struct iovec){ .iov_base = worker->buffer, .iov_len = behind };
	return lane_readv(lane, iov, n);
}

/* Returns whether there may be more to read. */
static bool lane_receive_once(struct lane *lane)
{
	unsigned char *data = lane->worker->buffer;
	bool is_payload = lane->input.reading == READING_PAYLOAD;
	uint64_t since_ns = is_payload && lane->input.is_bulk ? clock_now_ns() : 0;
	size_t offered, len, direct = 0;
	ssize_t n;

	n = lane_read(lane, &offered);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return false;
	if (n < 0) {
		lane_fail(lane, -errno, "%s", strerrordesc_np(errno));
		return false;
	}
	if (n == 0 || FAILPOINT_FAILS("connection-read")) {
		lane_fail(lane, -ECONNRESET,
			  lane->input.header_len || lane->pack.n
				  ? "closed the connection inside a message"
				  : "closed the connection");
		return false;
	}
	len = (size_t)n;
	lane_heard(lane, clock_now_ns());
	atomic_fetch_add_explicit(&lane->bytes_in, len, memory_order_relaxed);
	if (is_payload) {
		direct = MIN(len, lane->input.target_len);
		seal_payload(lane, lane->input.target, direct);
		if (since_ns)
			worker_copied(lane->worker, clock_now_ns() - since_ns);
		took_payload(lane, direct);
	}
	for (size_t left = len - direct; left > 0 && !lane->is_failed;) {
		size_t taken = take_some(lane, data, left);

		data += taken;
		left -= taken;
	}
	return len == offered && !lane->is_failed;
}

void lane_receive(struct lane *lane)
{
	uint64_t before = atomic_load_explicit(&lane->bytes_in, memory_order_relaxed);
	bool more = true;

	for (unsigned i = 0; more && i < RECEIVE_ROUNDS; i++)
		more = worker_receive(lane->worker, &lane->to_home) && lane_receive_once(lane);
	lane_watch(lane);
	metric_add(&lane->transport->copied, lane->worker->n_copied);
	lane->worker->n_copied = 0;
	rate_count(&lane->worker->rate,
		   atomic_load_explicit(&lane->bytes_in, memory_order_relaxed) - before,
		   atomic_load_explicit(&lane->heard_ns, memory_order_relaxed));
}
