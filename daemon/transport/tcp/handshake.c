/*
 * A data connection until it has proved itself, in either role: hello, hello, proof, and a probe
 * of the link where that is wanted. accept.c and dial.c own a struct handshake for each
 * connection. Home thread.
 */
#include "transport/tcp/handshake.h"
#include "transport/common/address.h"
#include "transport/internal.h"

#include "base/clock.h"
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/random.h>

/*
 *	connecting:  SENDING_HELLO -> READING_HELLO -> SENDING_PROOF [-> SENDING_PROBE -> READING_LAST] -> done
 *	accepting:   READING_HELLO -> SENDING_HELLO -> READING_PROOF [-> READING_PROBE -> SENDING_LAST] -> done
 *	             READING_HELLO -> SENDING_REFUSAL -> LINGERING -> done with an error
 *
 * Nothing is read beyond the handshake: what follows stays in the kernel for the lane. An accepting side that refuses
 * sends its hello first, and reads on until the other side closes, since closing with unread bytes would reset the
 * connection and take the hello away again.
 */
enum handshake_state {
	HANDSHAKE_READING_HELLO,
	HANDSHAKE_SENDING_HELLO,
	HANDSHAKE_READING_PROOF,
	HANDSHAKE_SENDING_PROOF,
	HANDSHAKE_READING_PROBE,
	HANDSHAKE_SENDING_PROBE,
	HANDSHAKE_SENDING_LAST,
	HANDSHAKE_READING_LAST,
	HANDSHAKE_SENDING_REFUSAL,
	HANDSHAKE_LINGERING,
	HANDSHAKE_REFUSING, /* connecting, and the proof sent is one of zeros: the other side shall know too */
	HANDSHAKE_OVER,
};

/*
 * Magic and versions come first in every version's hello: as many bytes tell whether the rest is
 * worth waiting for.
 */
#define HELLO_HEAD_LEN offsetof(struct data_hello, lane)

static const unsigned char no_proof[DATA_PROOF_LEN];
static const unsigned char last_of_probe = DATA_PROBE_LAST;

int handshake_sign(const void *key, size_t key_len, const char *label, const struct iovec *data,
		   size_t n, unsigned char ret_proof[DATA_PROOF_LEN])
{
	unsigned char text[16 + 2 * sizeof(struct data_hello)];
	size_t len = strlen(label), proof_len = 0;

	assert(len <= 16);
	memcpy(text, label, len);
	for (size_t i = 0; i < n; i++) {
		assert(data[i].iov_len <= sizeof(text) - len);
		memcpy(text + len, data[i].iov_base, data[i].iov_len);
		len += data[i].iov_len;
	}
	if (!EVP_Q_mac(NULL, "HMAC", NULL, "SHA256", NULL, key_len ? key : "", key_len, text, len,
		       ret_proof, DATA_PROOF_LEN, &proof_len) ||
	    proof_len != DATA_PROOF_LEN)
		return error_origin(-ENOMEM);
	return 0;
}

bool handshake_proofs_equal(const unsigned char *a, const unsigned char *b)
{
	return CRYPTO_memcmp(a, b, DATA_PROOF_LEN) == 0;
}

int handshake_prove(const void *key, size_t key_len, const char *label,
		    const struct data_hello *connecting, const struct data_hello *accepting,
		    unsigned char ret_proof[DATA_PROOF_LEN])
{
	struct data_hello unproved = *accepting;
	struct iovec data[2] = {
		{ (void *)(uintptr_t)connecting, sizeof(*connecting) },
		{ &unproved, sizeof(unproved) },
	};

	memset(unproved.proof, 0, sizeof(unproved.proof));
	return error_trace(handshake_sign(key, key_len, label, data, 2, ret_proof));
}

static int prove(const struct handshake *h, const char *label, unsigned char *ret_proof)
{
	return handshake_prove(h->transport->key, h->transport->key_len, label, &h->connecting,
			       &h->accepting, ret_proof);
}

int handshake_seals(const struct handshake *h, struct seal *ret_in, struct seal *ret_out)
{
	static const char *const labels[2] = { "bps-tags-client", "bps-tags-server" };
	bool has_key = h->transport->key_len;
	unsigned char keys[2][DATA_PROOF_LEN];
	int r = 0;

	*ret_in = *ret_out = (struct seal){ 0 };
	if (!(h->features & DATA_FEATURE_CHECKSUM))
		return 0;
	for (unsigned i = 0; has_key && i < 2 && !r; i++)
		r = prove(h, labels[i], keys[i]);
	if (!r)
		r = seal_init(ret_in, has_key ? keys[!h->is_accepting] : NULL);
	if (!r)
		r = seal_init(ret_out, has_key ? keys[h->is_accepting] : NULL);
	OPENSSL_cleanse(keys, sizeof(keys));
	return error_trace(r);
}

/* But for what depends on the other side's hello: a probe that is wanted. */
static uint64_t features_of(const struct handshake *h, int fd)
{
	const struct transport *transport = h->transport;
	bool is_checked = transport->settings.checksums == TRANSPORT_CHECKSUMS_ON ||
			  (transport->settings.checksums == TRANSPORT_CHECKSUMS_AUTO &&
			   !address_is_inside(fd));

	return (transport->rdma ? DATA_FEATURE_RDMA : 0) |
	       (is_checked ? DATA_FEATURE_CHECKSUM : 0) | DATA_FEATURE_RAILS | DATA_FEATURE_KEPT |
	       DATA_FEATURE_PACKS | DATA_FEATURE_STOPPING | DATA_FEATURE_ORDINALS |
	       DATA_FEATURE_SCALES | DATA_FEATURE_FORGET | DATA_FEATURE_FOLLOW |
	       DATA_FEATURE_BLOCKED | (h->offers_probe ? DATA_FEATURE_PROBE : 0);
}

static int hello_make(const struct handshake *h, struct data_hello *ret_hello)
{
	struct data_hello hello = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.version_min = DATA_VERSION_MIN,
		.lane = (uint16_t)h->lane,
		.features = h->our_features,
		.sender = h->sender,
	};

	(void)snprintf(hello.name, sizeof(hello.name), "%s", h->transport->node);
	if (getrandom(hello.nonce, sizeof(hello.nonce), 0) != (ssize_t)sizeof(hello.nonce))
		return error_origin(-EIO);
	data_hello_encode(&hello);
	*ret_hello = hello;
	return 0;
}

static void let_others_probe(struct handshake *h)
{
	if (h->is_accepting && h->transport->probing == h)
		h->transport->probing = NULL;
}

/* The end. Nothing of the handshake may be touched after it. */
static void handshake_over(struct handshake *h, int r, bool is_final, const char *why)
{
	loop_remove(&h->source);
	loop_timer_cancel(&h->timer);
	let_others_probe(h);
	h->state = HANDSHAKE_OVER;
	if (r)
		h->source.fd = fd_close(h->source.fd);
	h->done(h, r, is_final, why);
}

static void handshake_fail(struct handshake *h, int status, const char *why)
{
	handshake_over(h, status, true, why);
}

static int want(struct handshake *h, uint32_t events)
{
	return h->source.events == events ? 0 : error_trace(loop_modify(&h->source, events));
}

/* From here on, len bytes of out are sent. */
static void begin_sending(struct handshake *h, enum handshake_state state, const void *out,
			  size_t len)
{
	h->state = state;
	h->out = out;
	h->out_len = len;
	if (want(h, EPOLLOUT))
		handshake_fail(h, -ENOMEM, "out of memory");
}

static void begin_probe(struct handshake *h, enum handshake_state state)
{
	h->state = state;
	probe_begin(h);
	if (want(h, h->is_accepting ? EPOLLIN : EPOLLOUT))
		handshake_fail(h, -ENOMEM, "out of memory");
}

static void begin_reading(struct handshake *h, enum handshake_state state)
{
	h->state = state;
	h->in_len = 0;
	if (want(h, EPOLLIN))
		handshake_fail(h, -ENOMEM, "out of memory");
}

static struct data_hello *their_hello(struct handshake *h)
{
	return h->is_accepting ? &h->connecting : &h->accepting;
}

/* Names both sides' versions when that is what is wrong. */
static int hello_refusal(struct handshake *h, const struct data_hello *hello, const char *why)
{
	if (hello->magic == DATA_MAGIC &&
	    (hello->version < DATA_VERSION_MIN || hello->version_min > DATA_VERSION))
		return failure_set(
			&h->failure, -EPROTONOSUPPORT,
			"speaks versions %u to %u of the data protocol, we speak %u to %u",
			hello->version_min, hello->version, DATA_VERSION_MIN, DATA_VERSION);
	return failure_set(&h->failure, -EPROTO, "%s", why);
}

static void send_accepting_hello(struct handshake *h, enum handshake_state state)
{
	if (hello_make(h, &h->accepting) || prove(h, "bps-server", h->accepting.proof)) {
		handshake_fail(h, -ENOMEM,
			       "cannot make a hello: no random numbers, or out of memory");
		return;
	}
	begin_sending(h, state, &h->accepting, sizeof(h->accepting));
}

/* A hello, whole or its head, that we cannot go on with. */
static void refuse_hello(struct handshake *h, const struct data_hello *hello, const char *why)
{
	int status = hello_refusal(h, hello, why);

	if (h->is_accepting && status == -EPROTONOSUPPORT)
		send_accepting_hello(h, HANDSHAKE_SENDING_REFUSAL);
	else
		handshake_fail(h, status, h->failure.text);
}

static void got_accepting_hello(struct handshake *h)
{
	unsigned char expected[DATA_PROOF_LEN];

	if (prove(h, "bps-server", expected) || prove(h, "bps-client", h->proof)) {
		handshake_fail(h, -ENOMEM, "out of memory");
		return;
	}
	if (!handshake_proofs_equal(expected, h->accepting.proof))
		begin_sending(h, HANDSHAKE_REFUSING, no_proof, sizeof(no_proof));
	else
		begin_sending(h, HANDSHAKE_SENDING_PROOF, h->proof, sizeof(h->proof));
}

static void got_hello(struct handshake *h)
{
	struct data_hello hello = *their_hello(h);
	const char *why = "";

	data_hello_decode(&hello);
	if (data_hello_check(&hello, &why)) {
		refuse_hello(h, &hello, why);
		return;
	}
	h->theirs = hello;
	h->features = h->our_features & hello.features;
	/*
	 * Where there is a key nobody between the two can have one of them think that it is not
	 * needed.
	 */
	if (h->transport->key_len)
		h->features |= (h->our_features | hello.features) & DATA_FEATURE_CHECKSUM;
	if (h->is_accepting && probe_is_wanted(h)) {
		h->transport->probing = h;
		h->our_features |= DATA_FEATURE_PROBE;
		h->features |= DATA_FEATURE_PROBE;
	}
	if (h->is_accepting)
		send_accepting_hello(h, HANDSHAKE_SENDING_HELLO);
	else
		got_accepting_hello(h);
}

/*
 * Not ours, or of another version: no need to wait for the rest. Returns whether the handshake goes
 * on.
 */
static bool check_hello_head(struct handshake *h)
{
	struct data_hello head = { 0 };
	uint32_t magic;

	memcpy(&head, their_hello(h), MIN(h->in_len, sizeof(head)));
	data_hello_decode(&head);
	magic = DATA_MAGIC;
	if (h->in_len < sizeof(magic))
		return true;
	if (head.magic != magic) {
		refuse_hello(h, &head, "does not speak the data protocol");
		return false;
	}
	if (h->in_len < HELLO_HEAD_LEN ||
	    (head.version >= DATA_VERSION_MIN && head.version_min <= DATA_VERSION))
		return true;
	refuse_hello(h, &head, "no common version");
	return false;
}

static void proved(struct handshake *h)
{
	address_lift(h->source.fd);
	if (h->features & DATA_FEATURE_PROBE)
		begin_probe(h, HANDSHAKE_READING_PROBE);
	else
		handshake_over(h, 0, false, "");
}

static void got_proof(struct handshake *h)
{
	unsigned char expected[DATA_PROOF_LEN];

	if (prove(h, "bps-client", expected))
		handshake_fail(h, -ENOMEM, "out of memory");
	else if (!handshake_proofs_equal(expected, h->proof))
		handshake_fail(h, -EKEYREJECTED, "the cluster keys differ");
	else
		proved(h);
}

static void handshake_broken(struct handshake *h, int status)
{
	/* A refused one that is gone has had time to read why. */
	if (h->state == HANDSHAKE_LINGERING || h->state == HANDSHAKE_SENDING_REFUSAL)
		handshake_fail(h, h->failure.status, h->failure.text);
	else if (status)
		handshake_over(h, status, false, strerrordesc_np(-status));
	else
		handshake_over(h, -ECONNRESET, false, "closed the connection during the handshake");
}

static void handshake_read_probe(struct handshake *h)
{
	int r = probe_read(h);

	if (r == -EPROTO)
		handshake_fail(h, r, "sent other bytes than a probe has");
	else if (r < 0)
		handshake_broken(h, r == -ECONNRESET ? 0 : r);
	if (r <= 0)
		return;
	probe_end(h);
	let_others_probe(h);
	begin_sending(h, HANDSHAKE_SENDING_LAST, &last_of_probe, sizeof(last_of_probe));
}

/* From here on the lanes that are made behind this one find its peer. */
static void handshake_read_last(struct handshake *h)
{
	unsigned char byte = 0;
	ssize_t n = recv(h->source.fd, &byte, sizeof(byte), 0);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0)
		handshake_broken(h, n < 0 ? -errno : 0);
	else if (byte != last_of_probe)
		handshake_fail(h, -EPROTO, "answered a probe with another byte than its last");
	else
		handshake_over(h, 0, false, "");
}

static void handshake_write_probe(struct handshake *h)
{
	int r = probe_write(h);

	if (r < 0)
		handshake_broken(h, r);
	else if (r)
		begin_reading(h, HANDSHAKE_READING_LAST);
}

static void handshake_read(struct handshake *h)
{
	bool is_hello = h->state == HANDSHAKE_READING_HELLO;
	unsigned char *in = is_hello ? (unsigned char *)their_hello(h) : h->proof;
	size_t len = is_hello ? sizeof(struct data_hello) : sizeof(h->proof);
	unsigned char rest[512];
	ssize_t n;

	if (h->state == HANDSHAKE_LINGERING)
		n = recv(h->source.fd, rest, sizeof(rest), 0);
	else
		n = recv(h->source.fd, in + h->in_len, len - h->in_len, 0);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		handshake_broken(h, n < 0 ? -errno : 0);
		return;
	}
	if (h->state == HANDSHAKE_LINGERING)
		return;
	h->in_len += (size_t)n;
	if (is_hello && !check_hello_head(h))
		return;
	if (h->in_len < len)
		return;
	if (is_hello)
		got_hello(h);
	else
		got_proof(h);
}

static void handshake_sent(struct handshake *h)
{
	switch (h->state) {
	case HANDSHAKE_SENDING_HELLO:
		begin_reading(h,
			      h->is_accepting ? HANDSHAKE_READING_PROOF : HANDSHAKE_READING_HELLO);
		return;
	case HANDSHAKE_SENDING_REFUSAL:
		(void)shutdown(h->source.fd, SHUT_WR);
		begin_reading(h, HANDSHAKE_LINGERING);
		return;
	case HANDSHAKE_REFUSING:
		handshake_fail(h, -EKEYREJECTED, "the cluster keys differ");
		return;
	case HANDSHAKE_SENDING_PROOF:
		if (h->features & DATA_FEATURE_PROBE)
			begin_probe(h, HANDSHAKE_SENDING_PROBE);
		else
			handshake_over(h, 0, false, "");
		return;
	default:
		handshake_over(h, 0, false, "");
		return;
	}
}

static void handshake_write(struct handshake *h)
{
	ssize_t n = send(h->source.fd, h->out, h->out_len, MSG_NOSIGNAL);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n < 0) {
		handshake_broken(h, -errno);
		return;
	}
	h->out = (const char *)h->out + n;
	h->out_len -= (size_t)n;
	if (!h->out_len)
		handshake_sent(h);
}

static void handshake_on_ready(struct loop_source *source, uint32_t events)
{
	struct handshake *h = container_of(source, struct handshake, source);

	switch (h->state) {
	case HANDSHAKE_READING_PROBE:
		handshake_read_probe(h);
		return;
	case HANDSHAKE_SENDING_PROBE:
		handshake_write_probe(h);
		return;
	case HANDSHAKE_READING_LAST:
		handshake_read_last(h);
		return;
	default:
		if (h->source.events & EPOLLOUT)
			handshake_write(h);
		else
			handshake_read(h);
		return;
	}
}

static void handshake_on_timeout(struct loop_timer *timer)
{
	struct handshake *h = container_of(timer, struct handshake, timer);

	if (h->failure.status)
		handshake_fail(h, h->failure.status, h->failure.text);
	else
		handshake_over(h, -ETIMEDOUT, false, "did not finish the handshake in time");
}

int handshake_start(struct handshake *h, int fd, uint64_t deadline_ns)
{
	struct loop *loop = h->transport->loop;
	int r;

	h->source = (struct loop_source){ .fd = fd, .ready = handshake_on_ready };
	h->timer.expired = handshake_on_timeout;
	h->state = HANDSHAKE_READING_HELLO;
	h->in_len = 0;
	h->our_features = features_of(h, fd);
	if (!h->is_accepting) {
		h->state = HANDSHAKE_SENDING_HELLO;
		h->out = &h->connecting;
		h->out_len = sizeof(h->connecting);
	}
	r = h->is_accepting ? 0 : hello_make(h, &h->connecting);
	if (!r)
		r = loop_add(loop, &h->source, h->is_accepting ? EPOLLIN : EPOLLOUT);
	if (!r)
		r = loop_timer_set(loop, &h->timer, deadline_ns);
	if (r)
		handshake_done(h);
	return error_trace(r);
}

void handshake_done(struct handshake *h)
{
	let_others_probe(h);
	loop_remove(&h->source);
	loop_timer_cancel(&h->timer);
	if (h->source.fd >= 0)
		h->source.fd = fd_close(h->source.fd);
}
