/*
 * Node to node: calls and notices between daemons over TCP, RDMA, or without a connection inside one process. The
 * contract is the same for all transports and tests/contract holds each to it.
 *
 * Owns the data threads and every data connection. Functions and callbacks here run on the control thread (the home
 * loop) unless they say otherwise; payloads are read and written on data threads, straight from and into the memory the caller named.
 *
 * A peer is another daemon's process (or our own: transport_self()). Several connections ("lanes") may lead to one
 * peer; the transport spreads calls over them by bytes queued. Messages waiting for a lane leave in turns, by bytes: each job has its
 * own turn, and what sets up, ends and acknowledges has one together: that is little, so it leaves next. Of a job leaves first what has
 * no payload, then by priority (an answer has that of its call), then in the order posted. At most TRANSPORT_AHEAD bytes, on slow links
 * less, wait unsent inside the kernel, so what has its turn overtakes the rest.
 * Answers return on the lane of their call. Notices to one peer arrive in the order posted.
 *
 * Who connects makes the calls: a peer from transport_connect() takes calls and notices, a peer that connected to us
 * (met in a delivery or a notice) takes answers and notices only. Two daemons that call each other are therefore two
 * peers on either side, which are lost each on its own.
 *
 * Where a lane breaks other than the first, which carries set-up and notices, the peer lives on: what was under way there goes
 * another way (struct call, is_repeatable), and the lane is made anew, after a pause that grows. One more connection, on a thread
 * of its own, carries signs of life alone.
 *
 * RDMA lanes come beside those of TCP where both daemons have devices and calls with parts take them. One that breaks is
 * no loss of its peer: calls that were on it are taken up over another, else over TCP, each once, and the lane is made anew
 * after a while.
 */
#pragma once

#include "base/error.h"
#include "base/loop/loop.h"
#include "base/memory/block.h"
#include "proto/data.h"

#define TRANSPORT_AHEAD	    (256u << 10)
#define TRANSPORT_AHEAD_MIN (32u << 10)

struct transport;
struct peer;
struct lane;
struct rdma_window;

/* Memory of the other side that we may write to by RDMA; len 0: none. */
struct rdma_target {
	uint64_t address;
	uint32_t key, len, place;
	bool is_window;
};

/* Something that waits to be written to a lane. The transport's. */
struct message {
	struct mail mail;
	const struct data_header *header; /* host order */
	const void *payload;
	struct lane *lane;
	struct list link;	   /* RDMA: of those whose payload waits */
	struct rdma_target target; /* RDMA: where it goes */
	struct block
		*bounce; /* RDMA: a copy of a payload in memory that the device does not know */
	uint64_t sequence;
	int32_t priority;
	uint8_t kind;
	bool urgent;
	bool is_checked; /* an answer whose payload's checksum is known */
};

/*
 * A call: a header and payload out, an answer back. Embedded in its user; belongs to the transport from peer_call()
 * until done(), which comes exactly once, also when the peer is lost.
 */
#define CALL_SOON 19
struct call {
	/* Set by the caller. */
	struct data_header
		header; /* host order; magic, version, cookie are the transport's; len: payload bytes */
	const void *payload; /* header.len bytes that stay unchanged until sent() or done() */
	struct block *
		payload_block; /* optional: the block that holds payload; a reference moves to the transport */
	void *target;	   /* where the payload of a DATA_RESULT goes; NULL: into answer_block */
	size_t target_len; /* of target; a longer result is a protocol error of the peer */
	/*
	 * Optional, while target is NULL: memory for a result that has begun to come, of answer.len bytes, or NULL for answer_block.
	 * On whatever thread reads it. Not asked for in-process.
	 */
	void *(*find_target)(struct call *call);
	/* Optional, in-process: delivery_in_place(), delivery_filled(). Home thread. */
	struct block *(*in_place)(struct call *call, uint32_t len);
	bool (*filled)(struct call *call);
	void (*sent)(
		struct
		call *call); /* optional: payload may be reused; before done(); not called after a loss */
	void (*done)(struct call *call);
	/* Optional: memory that done() will look at, fetched when the answer is seen to come; sent(), too, at the first. */
	const void *soon[CALL_SOON];
	/*
	 * A DATA_PUSH that its caller can make again, then with is_again set: where its payload or that of its answer is damaged on
	 * the way, or one of several connections breaks, the call may end with -ENETRESET, and the peer lives on. Another call
	 * would be lost with its peer.
	 */
	bool is_repeatable, is_again;
	/*
	 * A DATA_PUSH that its caller cannot make again, of memory which others may be changing: where its payload or that of its
	 * answer is damaged the call ends with -EBADMSG, alone.
	 */
	bool ends_alone;
	/*
	 * Where payload or target is memory of transport_memory_add_direct(), which no processor can touch. Only where
	 * peer_takes_direct() says so. When no RDMA lane is left the call ends with -ENOLINK, for peer_call_on().
	 */
	bool is_payload_direct, is_target_direct;
	bool payload_stalls; /* in-process: becomes the delivery's stalls */
	/* Valid in done(). */
	int status; /* 0, or a negative errno: from DATA_ERROR, or -ECONNRESET when the peer was lost */
	struct data_header answer; /* when status is 0, or from DATA_ERROR */
	struct block *
		answer_block; /* payload that did not go to target (set-up answers, in-process results), or NULL;
				      * the transport's reference, dropped after done(): ref it to keep it */
	/* The transport's. */
	struct message message;
	struct mail sent_mail;
	struct list link;
	struct peer *peer;
	struct incoming *incoming;  /* in-process: the delivery, until it is answered */
	bool is_target_named;	    /* RDMA: the other side was told where target is */
	struct rdma_window *window; /* RDMA: through which it may write there */
	bool is_written;	    /* payload may be reused */
	unsigned state;
	/* Valid in done(): why, when status is not 0; names the peer when it was lost. */
	char text[ERROR_TEXT_MAX + 1];
};

/*
 * For a call that is made anew and sets but a few of the above: all but the text, which is as much again, and has no meaning
 * before done().
 */
static inline void call_clear(struct call *call)
{
	memset(call, 0, offsetof(struct call, text));
}

/*
 * A call that came from a peer. Belongs to the receiver until delivery_answer() or delivery_fail(), exactly one of
 * which must be called, at any later time, also when the peer is gone by then.
 */
struct delivery {
	struct peer *peer;	   /* whose call; valid until answered */
	struct data_header header; /* host order, checked by data_header_check() */
	const void *payload;	   /* header.len bytes, valid until answered */
	struct block *
		payload_block; /* holds payload, or NULL when in-process and the memory is the caller's */
	struct list link; /* free for the receiver's use */
	uint64_t at_ns;	  /* when it was read, with what came together with it */
	bool stalls; /* payload is a trainer's who can keep who touches it waiting: tensor/tensor.h */
};

struct transport_ops {
	/* A call arrived. */
	void (*call_arrived)(void *user, struct delivery *delivery);
	/* A notice arrived (never PING, PONG). payload is valid during the callback only. */
	void (*notice_arrived)(void *user, struct peer *peer, const struct data_header *header,
			       const void *payload);
	/*
	 * The peer is gone: its first lane broke, or one whose work could not go another way, the peer went silent for
	 * peer_timeout_ms, or broke the protocol. Its unanswered calls to us may still be answered (into nothing). Comes once for a
	 * peer; after our own calls that were under way have ended with -ECONNRESET; after it the pointer is dead unless
	 * somebody or a delivery still holds it.
	 */
	void (*peer_lost)(void *user, struct peer *peer, const char *why);
};

/* Whether parts go by RDMA. AUTO: where both ends have it, else, and when it breaks, by TCP. RDMA: by nothing else. */
enum transport_kind { TRANSPORT_TCP, TRANSPORT_AUTO, TRANSPORT_RDMA };

/* Whether peers write through memory windows. AUTO: where the device has them, but for soft-RoCE, whose are faulty. */
enum transport_windows { TRANSPORT_WINDOWS_AUTO, TRANSPORT_WINDOWS_ON, TRANSPORT_WINDOWS_OFF };

/* Whether messages over TCP are authenticated (with a cluster key) or have checksums. AUTO: except over the loopback. */
enum transport_checksums {
	TRANSPORT_CHECKSUMS_AUTO,
	TRANSPORT_CHECKSUMS_ON,
	TRANSPORT_CHECKSUMS_OFF
};

/*
 * Whether a peer that connects is asked to send bytes that mean nothing, as long as nothing is known of this node's link
 * (transport_bytes_s()). AUTO: not over the loopback, nor where parts go by RDMA.
 */
enum transport_probes { TRANSPORT_PROBES_OFF, TRANSPORT_PROBES_AUTO, TRANSPORT_PROBES_ON };

#define TRANSPORT_GID_AUTO 256u

struct transport_rdma_params {
	enum transport_kind kind;
	const char *devices; /* "mlx5_0 mlx5_1:2": devices, or ports of them; empty or NULL: all */
	unsigned service_level; /* 0 to 15; InfiniBand */
	unsigned traffic_class; /* 0 to 255 */
	unsigned gid_index;	/* of each port, or TRANSPORT_GID_AUTO: that of its address */
	enum transport_windows windows;
};

struct transport_params {
	struct loop *loop; /* home */
	struct block_cache *blocks;
	const struct transport_ops *ops;
	void *user;
	uint64_t id;	    /* this daemon process */
	const char *node;   /* its name */
	const char *listen; /* host:port, "[::]:port"; NULL: no TCP in. Port 0 picks one */
	int listen_fd; /* instead of listen: a listening socket (socket activation), or -1; taken over,
				   * also by a transport_new() that fails */
	const void *key; /* cluster key for the handshake, or NULL */
	size_t key_len;
	unsigned n_threads; /* data threads; 0: lanes live on the home loop */
	unsigned n_lanes;   /* connections we open to a peer */
	unsigned
		max_connections; /* accepted and proved; of one address, three quarters of what others leave */
	uint64_t
		handshake_timeout_ms; /* a connection that has not proved itself by then is closed */
	uint64_t
		peer_timeout_ms; /* silence of a peer we have business with (calls out, or DATA_PING unanswered) */
	uint64_t
		quota_bytes; /* bytes held for one peer: its calls until answered, our answers until written; as many for
				   * notices and copied answers until they are; a peer over it is lost with a clear reason */
	/*
	 * By where peers are, or are called: what comes until it is answered, contributions and results until the receiver has them
	 * and charges whom it likes; notices and copied answers until they are written. A peer over its share is lost, too. NULL:
	 * none.
	 */
	struct accounts *accounts;
	enum transport_checksums
		checksums; /* of what goes by TCP. With a key: if either end asks for them; else if both do */
	enum transport_probes probes;
	/* How TCP controls congestion; NULL or empty: as the system says, over the loopback without pacing. */
	const char *congestion;
	struct transport_rdma_params rdma; /* zero: TCP */
};

int transport_new(const struct transport_params *params, struct transport **ret_transport);
/*
 * Stops listening, closes every lane and ends the data threads; calls end with -ESHUTDOWN before it returns. Answers
 * already given still leave as far as the kernel takes them at once. Waits for no peer, only for what the data threads
 * are in the middle of. Not from inside a callback of the transport. Idempotent.
 */
void transport_close(struct transport *transport);
/* Closes if need be. Deliveries must have been answered. */
struct transport *transport_free(struct transport *transport);
DEFINE_CLEANUP(struct transport *, transport_free)

/* Another cluster key for handshakes from now on; connections that stand are not touched. Returns 0 or -ENOMEM. */
int transport_set_key(struct transport *transport, const void *key, size_t len);

/*
 * Memory that calls will name as payload or target: by RDMA it is then read and written where it lies. Memory that was
 * not told works too, by way of a copy; so does that which the device refuses, which is said. Nothing happens but a note
 * until an RDMA lane first uses it; then it is pinned, as one region for each device. That may take seconds if it is large,
 * and is done elsewhere: until then it is copied. What an owner (a name for whose it is, or NULL: the daemon's) has keeps
 * no other's waiting. Harmless without RDMA. Blocks of params.blocks need not be told. Any thread. Returns 0 or -ENOMEM.
 */
int transport_memory_add(struct transport *transport, const void *owner, void *data, size_t len);
/*
 * No call names it any more: none may when this is called. Returns whether no device knows it any more either. If not, that
 * takes its time, too: gone runs on the control thread when it is so, in transport_close() at the latest. Until then the memory
 * stays pinned, mapped or not, and may be told anew. gone may be NULL. Any thread.
 */
bool transport_memory_remove(struct transport *transport, void *data, struct mail *gone);
/*
 * The same of memory of another device, len bytes of a dma-buf (whose descriptor stays the caller's): at `data` are addresses
 * which are reserved, and by which calls name it. It is registered with all RDMA devices now, or with none. Its key is its
 * region's, as there are no windows on such. Control thread. Returns 0, or -errno with the reason.
 */
int transport_memory_add_direct(struct transport *transport, void *data, size_t len, int dmabuf,
				struct failure *failure);
/* With how many devices that is registered now. Any thread. */
unsigned transport_memory_regions(const struct transport *transport, const void *data);
/* NULL, or why that is refused whatever the memory is. */
const char *transport_no_direct(const struct transport *transport);
/* For measuring; all 0 without RDMA. */
struct transport_rdma_counters {
	uint64_t bytes_moved; /* payloads sent and received over RDMA lanes */
	uint64_t
		bytes_copied; /* of these, by a processor: small ones, and from or to memory that was not told */
	uint64_t regions;      /* registered now, with each device, those of the lanes included */
	uint64_t bytes_pinned; /* in them */
	uint64_t links;	       /* connections that have been made */
	uint64_t links_broken; /* that broke while their peer was alive */
	uint64_t links_still;  /* of these, whose device neither delivered nor gave up */
	uint64_t calls_moved;  /* to another of them or to TCP, because of that */
	uint64_t registration_us; /* that registering has taken */
};
void transport_rdma_counters(const struct transport *transport,
			     struct transport_rdma_counters *ret_counters);

/*
 * Bytes that this node's link carries in a second, one way, by what has come in over TCP since the start; the more there
 * was to do, the nearer to what it can; before, by a probe. 0: not known.
 */
uint64_t transport_bytes_s(const struct transport *transport);

/* The port we listen on, or 0. */
uint16_t transport_port(const struct transport *transport);

/*
 * The peer at an address (host:port), connecting if there is none yet. Never blocks: calls queue until the lanes are
 * up, and end with -ECONNREFUSED, -ETIMEDOUT, ... and a text when they cannot be. expect_id: the daemon that must
 * answer there, or 0. Returns 0 and a peer that stays valid until peer_lost(), or for as long after it as somebody holds
 * the peer; until transport_free() at most.
 */
int transport_connect(struct transport *transport, const char *address, uint64_t expect_id,
		      struct peer **ret_peer);
/*
 * Our own process as a peer: same contract, nothing copied. A result comes as answer_block, or is copied into target if
 * it was answered without a block. Always the same pointer, never lost. Calls to ourselves must have been answered
 * before transport_close(): it hands their memory back.
 */
struct peer *transport_self(struct transport *transport);
/*
 * What is told this peer next should know of its link: where it does not, and it is not connected yet, it is sent a probe first,
 * if it wants one. To be said at once after transport_connect().
 */
void peer_offer_probe(struct peer *peer);

/* Starts a call on a peer from transport_connect() or transport_self(). Never fails and never calls done() before it
 * returns. */
void peer_call(struct peer *peer, struct call *call);
/* Whether a call with len bytes of payload, and as many of result, may name direct memory now: they would go by RDMA. */
bool peer_takes_direct(const struct peer *peer, uint64_t len);
/*
 * Goes on with a call that ended with -ENOLINK. payload and target are now, and is_*_direct does not say otherwise, memory of
 * the host with the same bytes; nothing else of it has been changed. Its peer has not been lost.
 */
void peer_call_on(struct call *call);
/*
 * Sends a notice; the payload (at most DATA_SETUP_MAX bytes) is copied. Returns 0 or -ENOMEM; lost peers take it too, and one that
 * does not read until its quota is full is lost.
 */
int peer_notice(struct peer *peer, const struct data_header *header, const void *payload);
/* The same of what many are told: nothing is copied, and the peer's quota is charged for the header alone. */
int peer_notice_block(struct peer *peer, const struct data_header *header, struct block *block);
uint64_t peer_id(const struct peer *peer);
/* "node b (10.88.0.2:9690)". */
const char *peer_name(const struct peer *peer);
/* What messages call a peer until it has told its node's name itself: before, they only have its address. */
void peer_call_it(struct peer *peer, const char *node);
bool peer_is_self(const struct peer *peer);
/*
 * Whoever still uses a peer after peer_lost() has held it before: calls on such a peer end with why it was lost, in a later turn.
 * Each hold is released once, before transport_free().
 */
void peer_hold(struct peer *peer);
void peer_release(struct peer *peer);
/* Why it was lost, from peer_lost() on; before, NULL. */
const char *peer_loss(const struct peer *peer);
/* Where its connections come from: base/source.h. "": not known, or our own process. */
const char *peer_source(const struct peer *peer);
/*
 * Whether what we hold for the peer is more than three quarters of its quota. Over the whole the peer is lost, and all that it is
 * there for.
 */
bool peer_is_crowded(const struct peer *peer);
/* Where transport_connect() has sought the peer; NULL: the peer has connected to us, under whatever name, or is our own process. */
const char *peer_called_at(const struct peer *peer);
/* Whether the other side has a DATA_FEATURE_*, too. */
bool peer_has(const struct peer *peer, uint64_t feature);
/*
 * A job of n_nodes nodes has been attached that exchanges parts of so many bytes with the peer: TCP connections then have no more
 * on their way than that needs. To be said at both ends: what one may have there the other may.
 */
void peer_set_parts(struct peer *peer, uint32_t part_bytes, uint32_t n_nodes);
void peer_counters(const struct peer *peer, uint64_t *ret_bytes_in, uint64_t *ret_bytes_out);

/*
 * Every daemon that is connected or being connected, for operators: peers of one id are one entry. Array to be freed.
 * Returns 0 or -ENOMEM.
 */
struct transport_peer_info {
	uint64_t id;   /* 0: not known yet */
	char node[64]; /* its name, from the handshake; empty: not known yet */
	char address[96];
	bool is_up;
	char transport[64]; /* "tcp", "rdma mlx5_0 mlx5_1" */
	uint64_t bytes_in, bytes_out;
};
int transport_peers(const struct transport *transport, struct transport_peer_info **ret_peers,
		    size_t *ret_n);

/* Drops a peer that broke the rules; peer_lost() follows from the loop. A peer that is lost already takes it too,
 * and our own process is not dropped. */
_cold_ void peer_kill(struct peer *peer, const char *why);
/* A notice without which the peer would wait, or go on as if nothing were: one that cannot be sent, without memory, costs the peer. */
static inline void peer_tell(struct peer *peer, const struct data_header *header,
			     const void *payload)
{
	if (peer_notice(peer, header, payload))
		peer_kill(peer, "out of memory");
}

/*
 * Answers a call. header: op, status and the echo fields that matter (cookie, magic, version are the transport's);
 * header->len bytes of payload, either in block (a reference is taken) or, with block NULL, copied. header may be the delivery's own.
 */
void delivery_answer(struct delivery *delivery, const struct data_header *header,
		     struct block *block, const void *payload);
/*
 * The same of one of several calls that have one answer, which nobody changes: where one is needed and the payload is small, its
 * checksum is made once. check: of the answer, zero before the first; NULL: each has its own.
 */
struct answer_check {
	uint32_t value;
	bool is_known;
};
void delivery_answer_also(struct delivery *delivery, const struct data_header *header,
			  struct block *block, struct answer_check *check);
/*
 * Whether the memory of its payload is the receiver's alone, to write to, and to keep by a reference to payload_block: neither the
 * caller's nor open to its RDMA device.
 */
bool delivery_is_own(const struct delivery *delivery);
/* What its payload takes of our memory: nothing where that is the caller's own. */
static inline uint64_t delivery_bytes(const struct delivery *delivery)
{
	return delivery->payload_block ? block_bytes(delivery->header.len) : 0;
}
/* Fetches what answering it will look at. */
void delivery_fetch(const struct delivery *delivery);
/* Answers with DATA_ERROR: status is a negative errno. */
_cold_ void delivery_fail(struct delivery *delivery, int status, const char *text);
/*
 * A block of len bytes for the result of a call from this process, in memory of its caller's, who gets the result there and
 * outlives it; the reference is the receiver's. NULL: there is none. No quota is charged.
 */
struct block *delivery_in_place(struct delivery *delivery, uint32_t len);
/*
 * The result is in the block that delivery_in_place() gave, before anybody is answered. Returns whether the caller keeps the result
 * from now on.
 */
bool delivery_filled(struct delivery *delivery);
