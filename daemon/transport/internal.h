/*
 * What the files of transport/ share. Two kinds of state, kept apart by thread:
 *
 *	home	peers, calls and deliveries as objects with names, connections being made, timers
 *	worker	one for each data thread (or one on the home loop): lanes, that is sockets, what waits to be written,
 *		what is being read
 *
 * Home speaks to a lane by mail to its worker's loop, in order. A worker speaks to home through its box. A lane ends in
 * three steps: home posts close (or the lane posts lost, and home answers with close), the lane lets go of everything
 * and posts closed, home frees it. So no call is ended and nothing freed while a data thread can touch it.
 */
#pragma once

#include "base/bulk.h"
#include "base/fair.h"
#include "base/metrics.h"
#include "base/quota.h"
#include "base/source.h"
#include "transport/seal.h"
#include "transport/transport.h"
#include <inttypes.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define TRANSPORT_ADDRESS_MAX  96 /* "host:port" with its NUL; longer ones are refused */
#define ADDRESS_CONGESTION_MAX 16 /* TCP_CA_NAME_MAX of the kernel */
#define RECEIVE_BUFFER \
	(32u << 10) /* headers and small payloads of one read; what fits is copied, so not larger */
#define SEND_MESSAGES 32	 /* gathered into one system call */
#define SEND_BYTES    (1u << 20) /* offered to one system call */
#define CHECKED_BYTES \
	(256u         \
	 << 10) /* the same, sent or received, with checksums: the cache of a core still has them */

/* Boxes: mail to home that transport_close() can still find. A turn of the loop runs no more of it than takes a moment. */

struct box {
	struct loop *loop;
	_Atomic(struct mail *) posted; /* last first */
	struct mail mail;	       /* in the loop while posted is not empty */
	/* Home thread. */
	struct mail *first,
		**last; /* taken out, and still to be run; last: where the next is put */
	struct mail
		more; /* in the loop while goes_on: the rest of these is left to the next turn */
	bool goes_on;
};

void box_init(struct box *box, struct loop *loop);
void box_post(struct box *box, struct mail *mail);
/* Runs what is in it, and what that adds, until it is empty; the loop forgets the box. Home thread. */
void box_drain(struct box *box);

/* The queue of messages of a lane: jobs take turns by bytes; of a job the most urgent first, equal ones in order of their sequence. */

/* NULL when empty. */
struct message *queue_first(const struct fair *queue);
/* Returns 0 or -ENOMEM. */
int queue_push(struct fair *queue, struct message *message);
/* Those that were taken last, the last first, and nothing was pushed since. */
void queue_return(struct fair *queue, struct message *message);
/* NULL when empty. */
struct message *queue_pop(struct fair *queue);
/* The next of the job of what was taken last, or NULL; and takes that, to leave together. */
struct message *queue_next(const struct fair *queue);
struct message *queue_pop_next(struct fair *queue);

/* Cookies: the calls that wait for an answer on a lane; on an RDMA lane that takes calls, those that arrive. */

struct cookie_slot {
	void *user;	     /* NULL: free */
	uint32_t next_free;  /* index + 1 */
	uint32_t generation; /* of the cookie given out last; 1 to 255 */
};

struct cookies {
	struct cookie_slot *slots;
	uint32_t n_slots;
	uint32_t free; /* index + 1 of the first free slot, or 0 */
};

/* Returns 0, -ENOMEM, or -ENOBUFS when 2^24 calls are out. */
int cookies_add(struct cookies *cookies, void *user, uint32_t *ret_cookie);
/* What was added under a cookie from outside, or NULL. */
void *cookies_find(const struct cookies *cookies, uint32_t cookie);
/* Fetches what cookies_find() will look at. */
void cookies_fetch(const struct cookies *cookies, uint32_t cookie);
void cookies_remove(struct cookies *cookies, uint32_t cookie);
void cookies_done(struct cookies *cookies);

/* Workers: a loop and what its lanes use one at a time. */

/* A header as it is sent, with as much of a seal as the lane has. */
struct wire {
	struct data_header header;
	unsigned char seal[SEAL_MAX];
};

/* What goes under one header: a message, or several small ones. */
struct parcel {
	struct message **messages;
	const struct wire *wire;
	const struct data_packed *packed; /* of several: as many */
	uint32_t payload_len;		  /* of all payloads, */
	uint32_t sealed;		  /* of which so many bytes are in the seal */
	uint64_t number;		  /* of its header's seal */
	unsigned n;
	unsigned char packed_seal[SEAL_MAX], seal[SEAL_MAX];
};

/* One of which a part was written. */
struct begun {
	struct parcel parcel; /* n 0: none. It leads to what follows */
	size_t done;	      /* bytes of it that are written */
	struct message *messages[DATA_PACK_MAX];
	struct wire wire;
	struct data_packed packed[DATA_PACK_MAX];
};

struct batch {
	struct message *messages[SEND_MESSAGES];
	struct parcel parcels[SEND_MESSAGES +
			      1]; /* the one that was begun is the first, if there is one */
	struct wire wire[SEND_MESSAGES];
	struct data_packed packed[SEND_MESSAGES];
	struct iovec iov[5 * (SEND_MESSAGES + DATA_PACK_MAX)];
	size_t n_messages, n_parcels, n_iov, len;
	bool is_cut;		 /* there is more of the last message */
	unsigned char wrong[16]; /* failpoints: what is sent instead of the start of a payload */
};

/* What comes in, and how fast that is: rate.c. */
struct rate {
	uint64_t since_ns, last_ns, bytes;
	_Atomic uint64_t bytes_s; /* any thread; 0: not known */
	_Atomic uint64_t *sum;	  /* of all rates, which this is one of; or NULL */
	_Atomic uint64_t *probed; /* what a probe has said, or NULL: samples let that fade */
};

void rate_count(struct rate *rate, uint64_t bytes, uint64_t now_ns);

/* When each piece of a probe was here: probe.c. */
struct probe {
	uint64_t at_ns[DATA_PROBE_PIECES];
	unsigned n;
};

/* 0: they do not tell. rtt_ns: there and back on the way that they came. */
uint64_t probe_bytes_s(const struct probe *probe, uint64_t rtt_ns);

/* What bounds a connection's bytes inside the kernel, unsent or unacknowledged: flight.c. */
struct flight {
	uint32_t part_bytes, n_nodes; /* of the newest job with the peer; 0: not known */
	uint64_t bytes_s;	      /* known of the link, or 0 */
	uint32_t rtt_us;	      /* there and back; UINT32_MAX: not known */
	uint32_t segment;	      /* bytes of a full one */
};

/* How many there may be; 0: as many as the kernel likes. */
uint64_t flight_bytes(const struct flight *flight);

struct worker {
	struct loop *loop;
	struct loop_thread *thread; /* NULL: loop is home */
	struct box to_home;
	struct batch batch;
	struct rate rate;
	uint64_t n_copied; /* bytes of payloads, while it receives */
	unsigned char buffer[RECEIVE_BUFFER];
};

/* thread: its name; NULL: on the home loop. Returns 0 or -errno. */
int worker_new(struct loop *home, const char *thread, struct worker **ret_worker);
/* Runs the mail posted before, then ends the thread. */
void worker_stop(struct worker *worker);
/* After stop. */
struct worker *worker_free(struct worker *worker);
/* Mail to a lane of this worker: run at once when that is home, where we are. */
void worker_post(struct worker *worker, struct mail *mail);
/* Mail from a lane of this worker to home: the same. */
void worker_post_home(struct worker *worker, struct mail *mail);

/* The transport. */

/* The data port: accept.c's. */
struct transport_port {
	struct loop_source listener;
	struct loop_timer timer; /* out of descriptors: when to accept again */
	uint16_t number;
	struct list handshakes; /* of accepted connections */
	unsigned n_unproved;	/* of these; the oldest first */
	unsigned n_accepted;	/* accepted connections that have proved themselves, and are open */
	uint64_t complained_ns;
	unsigned n_unsaid; /* complaints since that were not logged */
};

struct transport {
	struct loop *loop;
	struct block_cache *blocks;
	const struct transport_ops *ops;
	void *user;
	uint64_t id;
	char node[64];
	void *key;
	size_t key_len;
	unsigned n_lanes, max_connections;
	uint64_t handshake_timeout_ns, peer_timeout_ns, quota_bytes;
	enum transport_checksums checksums;
	enum transport_probes probes;
	struct handshake *probing;		 /* the one that wants a probe, or NULL */
	_Atomic uint64_t probed_bytes_s;	 /* any thread; 0: not known */
	_Atomic uint64_t bytes_s;		 /* the same; the workers' together */
	char congestion[ADDRESS_CONGESTION_MAX]; /* empty: by address */
	struct metric checksum_errors, lanes_broken, copied;
	unsigned n_damaged;  /* calls, since the log last spoke of them */
	uint64_t damaged_ns; /* when the log last spoke of them; 0: not yet */

	bool is_closed;
	struct box box; /* home to home: what must not happen inside the caller */
	struct worker **workers;
	unsigned n_workers, next_worker;
	_Atomic unsigned n_tcp_lanes; /* but for those of signs of life */
	struct worker *beat;	/* of the lanes that carry signs of life; NULL until there is one */
	struct list peers;	/* not lost */
	struct list lost_peers; /* peer_lost() was called; calls or deliveries are left */
	struct peer *self;
	struct list spare_incoming; /* of those made and freed on the home thread */
	struct bulk incoming_bulk;  /* which these are from, */
	unsigned n_incoming;	    /* so many, in use or spare */
	unsigned
		next_group; /* tells our connections of one transport_connect() from those of another */

	struct rdma *rdma; /* NULL: none */

	struct transport_port port;
};

/* Logs a stranger's failure to connect, at most once a second. */
void transport_complain(struct transport *transport, const char *format, ...) _printf_(2, 3);
struct worker *transport_pick_worker(struct transport *transport);
/* The one of signs of life. Returns 0 or -errno. */
int transport_beat_worker(struct transport *transport, struct worker **ret_worker);

/* Listening (accept.c) */
int accept_start(struct transport *transport, const char *listen_on, int listen_fd);
/* Closes the listener and every connection that has not proved itself. */
void accept_stop(struct transport *transport);
/* Takes over a connection as if it had been accepted. */
int accept_adopt(struct transport *transport, int fd);

/* How much longer a lane may be silent, or take nothing, while its peer is known to be alive. */
#define BUSY_FACTOR 3

/* Addresses (address.c) */

#define ADDRESSES_MAX 8

struct address {
	socklen_t len;
	union {
		struct sockaddr any;
		struct sockaddr_in in;
		struct sockaddr_in6 in6;
		struct sockaddr_storage storage;
	};
};

struct addresses {
	struct address list[ADDRESSES_MAX];
	size_t n;
};

/*
 * Whether text is "host:port" or "[host]:port"; an empty host means every address. Returns 0 or -EINVAL; ret_host must
 * hold TRANSPORT_ADDRESS_MAX bytes, ret_port points into text.
 */
int address_split(const char *text, char *ret_host, const char **ret_port);
/*
 * Resolves; asks name servers, so it may block, unless numeric. Returns 0, -EINVAL for text that is no address,
 * -EAGAIN when numeric and the host is a name, or -EHOSTUNREACH with *ret_why a static text.
 */
int address_resolve(const char *text, bool numeric, bool passive, struct addresses *ret_addresses,
		    const char **ret_why);
void address_format(const struct address *address, char *text, size_t size);
/* Whether a connected socket's bytes stay inside this machine. */
bool address_is_inside(int fd);
/* What every data connection has. Ignores what the socket's family does not know. */
void address_tune_socket(int fd, uint64_t peer_timeout_ns);
/* So many bytes, and one piece more, the kernel takes ahead of what it can send. */
void address_set_ahead(int fd, unsigned bytes);
/*
 * How a socket that is not connected yet, or the connections of one that listens, control congestion; name: empty: as the
 * system says, unless its address, where it will connect to or listens, is on the loopback. Returns 0 or -errno.
 */
int address_set_congestion(int fd, const struct address *address, const char *name);

/* Resolving a name on a thread of its own. */
struct resolver;
struct resolver_params {
	const char *address;
	struct box *box;
	void (*done)(void *user, int r, const char *why, const struct addresses *addresses);
	void *user;
};
int resolver_start(const struct resolver_params *params, struct resolver **ret_resolver);
/* No done() after it; the thread may live on for a while by itself. Called by done()'s owner, also inside done(). */
struct resolver *resolver_free(struct resolver *resolver);

/* Handshake (handshake.c): from a connected socket to one that has proved itself, either role. */

struct handshake {
	/* Set by the owner before handshake_start(). */
	struct transport *transport;
	bool is_accepting;
	unsigned lane;	   /* hello.lane, when connecting */
	uint64_t sender;   /* hello.sender */
	bool offers_probe; /* when connecting */
	/*
	 * Once: r is 0 and the socket is to be taken with TAKE_FD(source.fd), or a negative errno with the reason. is_final:
	 * trying again will not help. May free the handshake.
	 */
	void (*done)(struct handshake *handshake, int r, bool is_final, const char *why);
	void *user;
	struct list link;
	char address[TRANSPORT_ADDRESS_MAX];
	char from[SOURCE_MAX]; /* when accepting: base/source.h */
	/* The handshake's. */
	struct loop_source source;
	struct loop_timer timer;
	unsigned state;
	struct data_hello connecting, accepting; /* wire order */
	struct data_hello theirs;		 /* host order, once checked; zero before */
	uint64_t our_features, features;	 /* DATA_FEATURE_*; what both have, once checked */
	unsigned char proof[DATA_PROOF_LEN];
	const void *out;
	size_t out_len, in_len;
	struct probe probe;
	uint64_t probed_since_ns;
	struct failure failure;
};

/* Takes the socket over. Returns 0 or -errno; then done() is not called, and the socket closed. */
int handshake_start(struct handshake *handshake, int fd, uint64_t deadline_ns);
/* Forgets everything, closes the socket unless taken. Idempotent. */
void handshake_done(struct handshake *handshake);
/* HMAC-SHA256(key, label || data). Returns 0 or -ENOMEM. */
int handshake_sign(const void *key, size_t key_len, const char *label, const struct iovec *data,
		   size_t n, unsigned char ret_proof[DATA_PROOF_LEN]);
/* Accepting: whether it shall have DATA_FEATURE_PROBE, too. */
bool probe_is_wanted(const struct handshake *handshake);
/* After the proof, in either role, if both have DATA_FEATURE_PROBE. */
void probe_begin(struct handshake *handshake);
/* To be called while there is something to read or room. 0: there is more to come; 1: that was all; -errno: it failed. */
int probe_read(struct handshake *handshake);
int probe_write(struct handshake *handshake);
/* Accepting: all has come. Takes what it tells. */
void probe_end(struct handshake *handshake);
/* What a connection that has proved itself seals its two directions with. Returns 0 or -ENOMEM. */
int handshake_seals(const struct handshake *handshake, struct seal *ret_in, struct seal *ret_out);
bool handshake_proofs_equal(const unsigned char *a, const unsigned char *b);
/* HMAC-SHA256(key, label || connecting || accepting with its proof zeroed). Returns 0 or -errno. */
int handshake_prove(const void *key, size_t key_len, const char *label,
		    const struct data_hello *connecting, const struct data_hello *accepting,
		    unsigned char ret_proof[DATA_PROOF_LEN]);

/* Peers (peer.c) */

struct rdma_link;

enum peer_kind { PEER_SELF, PEER_CALLED, PEER_CALLING };
enum peer_state { PEER_STARTING, PEER_UP, PEER_LOSING, PEER_LOST };

struct peer {
	struct transport *transport;
	struct list link;
	enum peer_kind kind;
	enum peer_state state;
	uint64_t id, expect_id; /* the sender of the other side's hello */
	/*
	 * PEER_CALLED: the sender of our hellos, a random number that the other side alone hears: who does not know it cannot
	 * add a connection to those of this peer, or take their place.
	 */
	uint64_t alias;
	unsigned group; /* high byte of hello.lane */
	char node[64];
	char address[TRANSPORT_ADDRESS_MAX];
	char source[SOURCE_MAX]; /* where it connects from; "": not known, or it does not */
	char name[192];
	struct list lanes;
	struct list arrived;	/* incoming by RDMA lanes, until their answers are written */
	struct list moved;	/* incoming that were moved off a lane that is being closed */
	struct list calls;	/* on a lane, or with ourselves delivered */
	struct list waiting;	/* calls for which there is no lane yet, or never will be */
	struct list notices;	/* the same */
	uint64_t next_sequence; /* of what waits for a lane, calls and notices */
	size_t n_deliveries;
	struct dial *dial;	      /* lanes being made, or NULL */
	struct addresses addresses;   /* where the last lane was made */
	uint64_t bytes_in, bytes_out; /* of lanes that are gone */
	uint64_t again_ns,
		again_pause_ns;	 /* when a lane was last to be made anew, after what pause */
	bool offers_probe;	 /* peer_offer_probe() */
	uint64_t features;	 /* DATA_FEATURE_* of both sides */
	struct rdma_peer *rdma;	 /* NULL: not both sides have it */
	struct loop_timer timer; /* armed while there is business, and one turn longer */
	struct quota quota;	 /* any thread */
	_Atomic uint64_t parts;	 /* any thread: part_bytes << 32 | n_nodes of its newest job */
	struct mail mail;
	bool is_posted;
	struct failure failure; /* why it is lost */
};

int peer_new(struct transport *transport, enum peer_kind kind, const char *address,
	     struct peer **ret_peer);
/* Frees a peer that is lost and held by nobody; else does nothing. */
void peer_free_if_unused(struct peer *peer);
struct peer *peer_free(struct peer *peer);
/* A node's name is known: from here on it is part of the peer's. */
void peer_set_node(struct peer *peer, const char *node);
/* A socket that has proved itself becomes a lane, as its handshake says. Takes the socket over, also on failure. Returns 0 or -errno. */
int peer_add_lane(struct peer *peer, int fd, unsigned index, const struct handshake *handshake);
/* A link of an RDMA port that has proved itself becomes a lane, which owns it then. Returns 0 or -errno. */
int peer_add_rdma_lane(struct peer *peer, struct rdma_link *link, unsigned rail, bool is_accepted);
/* Of TCP, not being closed; or NULL. */
struct lane *peer_find_lane(const struct peer *peer, unsigned index);
bool peer_has_lane(const struct peer *peer, unsigned index);
/* A lane that the peer can do without broke, or is silent: closes it. Returns false when the peer cannot. */
bool peer_lane_broke(struct lane *lane, int status, const char *why);
/* An RDMA lane by its number, closing ones too; or NULL. */
struct lane *peer_find_rail(const struct peer *peer, unsigned rail);
unsigned peer_n_rails(const struct peer *peer); /* RDMA lanes that take calls */
/* Sends what waits for a lane. */
void peer_send_waiting(struct peer *peer);
/* The beginning of the end; from a callback of the loop, never from inside a function of transport.h. */
void peer_lose(struct peer *peer, int status, const char *why);
/* What a lane tells home. */
void peer_lane_lost(struct lane *lane);
void peer_lane_closed(struct lane *lane);
/* A call for which there is no lane, or never will be. */
void peer_wait_for_lane(struct peer *peer, struct call *call);
/* Whether there is business with a lane's peer: arms the timer that looks after its silence. */
void lane_begin_business(struct lane *lane);
void lane_end_business(struct lane *lane);

/* Calls (call.c) */

/* Puts a call on a lane of its peer, which is up. */
void call_send(struct call *call);
/* Status and text of an answer whose payload is in place. Any thread. */
void call_take_answer(struct call *call);
/* Its payload, or that of its answer, was damaged on the way: it is to be made again. Any thread. */
void call_damaged(struct call *call);
extern const char call_damaged_text[];
/* Now and then. Home thread. */
void call_say_damaged(const struct peer *peer);
/* A call has ended, its status and answer filled in. */
void call_end(struct call *call);
void call_fail(struct call *call, int status, const char *text);
/* Sends the calls of an RDMA lane that is gone anew, over another, else over TCP. Returns how many. */
unsigned call_move_all(struct lane *lane);
/*
 * The calls of a lane that is gone, while its peer is not: those that nobody has seen go another way, others end with -ENETRESET.
 * Returns false, and does nothing, when there is one that can do neither.
 */
bool call_reroute_all(struct lane *lane);
/* Ends every call with a status. The peer's lanes are gone. */
void peer_end_calls(struct peer *peer, int status, const char *text);

/* Connecting (dial.c) */

/* Starts to make the lanes of a peer; its address is resolved first unless that was done. Returns 0 or -ENOMEM. */
int dial_start(struct peer *peer, const struct addresses *addresses);
/* Makes one of its lanes anew, trying until the peer is lost. Returns 0 or -ENOMEM. */
int dial_again(struct peer *peer, unsigned lane);
struct dial *dial_free(struct dial *dial);

/* Lanes (lane.c; send.c and receive.c hold their two directions) */

enum message_kind { MESSAGE_CALL, MESSAGE_ANSWER, MESSAGE_NOTICE, MESSAGE_PONG };
/* On RDMA lanes the answer can come before our network card knows that its call had arrived: then it waits for that. */
enum call_state {
	CALL_WAITING,
	CALL_QUEUED,
	CALL_WRITING, /* RDMA: the other side has the header, not the payload */
	CALL_POSTED,  /* RDMA: all of it, as far as we know */
	CALL_SENT,
	CALL_FILLING,  /* RDMA: the answer's payload is on its way to the room */
	CALL_ANSWERED, /* ended once it is written */
	CALL_ENDED,
};

/* What comes next of a message over TCP. */
enum reading {
	READING_HEADER,
	READING_HEADER_SEAL,
	READING_PACKED, /* of a pack */
	READING_PACKED_SEAL,
	READING_PAYLOAD, /* of a pack: all its payloads */
	READING_PAYLOAD_SEAL,
};

/* The worker's thread. */
struct lane_ops {
	/* Begins to receive. Returns 0 or -errno. */
	int (*start)(struct lane *lane);
	/* Writes what is queued, as far as there is room. */
	void (*flush)(struct lane *lane);
	/* Nothing comes in or goes out any more. Idempotent. */
	void (*cut)(struct lane *lane);
	/* After cut: lets go of messages half written, and of what is half read. */
	void (*release)(struct lane *lane);
};

/* What is to be written. */
struct lane_output {
	struct fair queue;
	uint64_t next_sequence;
	struct mail flush;
	bool is_flush_posted;
	unsigned ahead;	      /* bytes that may wait unsent inside the kernel; 0: not set yet */
	uint64_t flight;      /* and be on their way as well; 0: as the kernel likes */
	uint64_t flight_ns;   /* when that was last looked at */
	bool is_unblocked;    /* the socket had no room and has some now */
	bool is_flushed_soon; /* in the middle of receiving */
	bool is_fresh;	      /* something was queued in the middle of receiving */
};

struct lane_pong {
	struct message message;
	struct data_header header;
	bool is_queued;
};

/* The message that is being read. */
struct lane_input {
	struct data_header
		header; /* being read; then of the message whose payload is being read, in host order */
	enum reading reading;
	bool is_bulk;	   /* the last message that began has much payload, so the next may */
	size_t header_len; /* of it that is here */
	unsigned char seal[SEAL_MAX]; /* that is being read */
	size_t seal_len;	      /* of it that is here */
	void *room; /* where the rest of the payload goes; NULL of a pack: it may all be here at once */
	size_t room_len;
	struct call *call;	   /* whose answer it is */
	struct incoming *incoming; /* the call or notice that it is */
};

/* Of a message that is not all here: how far it was when that was last looked at. lane_watch(). */
struct lane_watch {
	struct loop_timer timer;
	uint64_t n_begun, begun; /* headers, which tell one message from the next */
	uint64_t bytes;
	unsigned n_stalls;
};

/* The pack that is being read. */
struct lane_pack {
	struct data_header header;
	struct data_packed packed[DATA_PACK_MAX];
	size_t len;    /* of these that is here */
	uint32_t n;    /* 0: nothing is being read of one */
	uint32_t next; /* comes after the message that is looked at */
	/* All payloads: they wait for their seal. NULL: none is here */
	const unsigned char *payloads;
	unsigned char *
		room; /* that they are put together in, DATA_PACKED_LEN bytes, once it was needed */
};

struct lane {
	/* Fixed. */
	struct transport *transport;
	struct peer *peer;
	struct worker *worker;
	const struct lane_ops *ops;
	struct rdma_link *rdma; /* NULL: TCP */
	unsigned index;
	bool is_accepted; /* counts as such */
	bool makes_calls; /* we connected */
	bool is_spare;	  /* the peer can do without */
	bool can_repeat;  /* the other side knows what to do about a payload that was damaged */
	bool has_packs;

	/* Home. */
	struct list link;
	size_t n_business;
	uint64_t business_ns; /* since when there is some */
	uint64_t checked_ns; /* the sign of life that was the last when it was last asked for one */
	unsigned n_pings;    /* without a sign of life since */
	bool is_closing;
	struct failure broke; /* why, where the peer lives on */
	struct mail start, close;

	/* Any thread. */
	_Atomic uint64_t given_bytes,
		done_bytes;	   /* to be written, in all; written, or never to be */
	_Atomic uint64_t heard_ns; /* last sign of life */
	_Atomic uint64_t bytes_in, bytes_out;

	/* The worker's thread. */
	struct loop_source source;
	bool is_failed; /* the socket is closed */
	struct failure failure;
	struct mail lost, closed;

	struct lane_output output;
	struct cookies cookies;
	struct seal in, out;
	struct begun begun;
	struct lane_pong pong;
	struct lane_input input;
	struct lane_watch watch;
	struct lane_pack pack;
};

int lane_new(struct peer *peer, const struct lane_ops *ops, struct lane **ret_lane);
/* Takes the socket over, also on failure. */
int tcp_lane_new(struct peer *peer, int fd, const struct handshake *handshake,
		 struct lane **ret_lane);
/* One that was not started. */
void tcp_lane_drop(struct lane *lane);
struct lane *lane_free(struct lane *lane);
/* Posted from home. */
void lane_start(struct lane *lane);
void lane_close(struct lane *lane);
void lane_send(struct lane *lane, struct message *message);
/* Bytes of messages that it was given and has not let go of. Home thread. */
uint64_t lane_queued(const struct lane *lane);

/* The rest on the worker's thread. */
_cold_ void lane_fail(struct lane *lane, int status, const char *format, ...) _printf_(3, 4);
/* Lets go of a message: written, or never to be. */
void lane_message_done(struct lane *lane, struct message *message, bool is_written);
void lane_enqueue(struct lane *lane, struct message *message);
void lane_heard(struct lane *lane, uint64_t now_ns);
/* A call is given its cookie when it is about to be written. Returns 0 or -errno. */
int lane_prepare(struct lane *lane, struct message *message);
/* Something the peer must not do. Fails the lane, and with it the peer; returns -EPROTO. */
_cold_ int lane_protocol_error(struct lane *lane, const char *why);
_cold_ int lane_out_of_memory(struct lane *lane);
/*
 * A message whose header, in wire order, is in lane->input.header: checks it and finds where its payload goes (call or
 * incoming, room, room_len). Returns 0, or has failed the lane. lane_end_message() when the payload is there.
 */
int lane_begin_message(struct lane *lane);
/* The same when it is in host order. */
int lane_begin_decoded(struct lane *lane);
void lane_end_message(struct lane *lane);
void lane_end_answer(struct lane *lane, struct call *call);
void lane_end_incoming(struct lane *lane, struct incoming *incoming);
/* TCP only */
void lane_flush(struct lane *lane);
/* Now and then: bounds what it may have on its way. flight.c. */
void lane_set_flight(struct lane *lane, uint64_t now_ns);
void lane_want(struct lane *lane, uint32_t events);
void lane_receive(struct lane *lane);
/* A message has begun and is not all here: from now on it has to come on, until it is. */
void lane_watch(struct lane *lane);
/* Lets go of what is half read. */
void lane_receive_done(struct lane *lane);

/* RDMA (rdma.c) */

struct rdma;
struct rdma_peer;

int rdma_new(struct transport *transport, const struct transport_rdma_params *params,
	     struct rdma **ret_rdma);
/* Every lane is gone. */
struct rdma *rdma_free(struct rdma *rdma);
/* Both sides of a peer that is coming up have RDMA: the accepting one makes its offer, the other expects it. */
int rdma_begin(struct peer *peer);
/* A DATA_RDMA arrived. */
void rdma_notice_arrived(struct peer *peer, const struct data_header *header, const void *payload);
/* The wire of a lane broke, or is silent: closes it and moves its calls. Returns false when the peer cannot do without. */
bool rdma_lane_lost(struct lane *lane, bool is_silent);
/* A rail is gone, and so many calls with it: makes it anew after a while. */
void rdma_lane_closed(struct peer *peer, unsigned n_moved);
/* The peer is being lost: drops what is being made. */
struct rdma_peer *rdma_peer_free(struct rdma_peer *rdma_peer);
void rdma_peer_close(struct peer *peer);
/* Parts may not go by TCP. */
bool rdma_is_strict(const struct rdma *rdma);
/* "rdma mlx5_0", "rdma mlx5_0 mlx5_1", "tcp". */
void rdma_describe(const struct peer *peer, char *text, size_t size);
struct rdma_link *rdma_link_free(struct rdma_link *link);
/* A lane on a link, which it owns then (rdma_lane.c). */
int rdma_lane_new(struct peer *peer, struct rdma_link *link, struct lane **ret_lane);

/* Deliveries (delivery.c) */

/* Thousands wait for an answer at once: what is done with when the answer is made gives its place to that. */
struct incoming {
	/* Once answered its header and block are the answer's. */
	struct delivery delivery;
	struct message
		message; /* the answer. Before, its mail goes home, and its room and priority are as asked for */
	struct lane *lane; /* NULL: from ourselves */
	struct call *call; /* in-process: who waits; NULL once it was ended without us */
	uint64_t charged;
	/* Of calls that came over an RDMA lane, or a spare one; home but for room and window. */
	struct rdma_window *window; /* the worker's: through which the payload comes */
	struct list
		link; /* of the peer's arrived ones until its answer is written; or moved ones */
	/* Of the lane that it first came by, which may be gone; RAIL_TCP of those over TCP. */
	unsigned rail;
	uint32_t cookie; /* that it had there */
	bool is_answered, is_written;
	bool is_damaged; /* its payload is not what was sent: it is to come again */
	bool is_home;	 /* made and freed on the home thread */
	bool is_kept;	 /* spare when it is free; others are memory of their own */
};

#define RAIL_TCP UINT_MAX

/* With room for a header, which the caller writes. Charges the peer's quota. Returns 0, QUOTA_E_FULL, or -ENOMEM. */
int incoming_new(struct peer *peer, struct lane *lane, uint32_t payload_len,
		 struct incoming **ret_incoming);
struct incoming *incoming_free(struct incoming *incoming);
/* Complete: hands it to the receiver. Home thread. */
void incoming_arrive(struct mail *mail);
/* The lane lets its answer go: written, or never to be on this lane. The lane's thread. */
void incoming_written(struct incoming *incoming, bool is_written);
/* An RDMA lane of the peer has closed: its calls wait to be asked for on another lane. */
void incoming_lane_closed(struct lane *lane);
/* The peer is lost: nobody will ask. */
void incoming_peer_lost(struct peer *peer);

/* A notice on its way out. */
struct notice {
	struct message message;
	struct data_header header;
	struct peer *peer; /* in-process: ourselves */
	struct list link;
	unsigned char payload[];
};

/* Copies the payload, header->len bytes unless NULL; to be freed by held_free(). Returns 0, -ENOMEM, or -EDQUOT: the peer holds too much. */
int notice_new(struct peer *peer, const struct data_header *header, const void *payload,
	       struct notice **ret_notice);

/* In one process (inproc.c) */
void inproc_call(struct call *call);
void inproc_answer(struct incoming *incoming, const struct data_header *header, struct block *block,
		   const void *payload);
void inproc_notice(struct peer *peer, struct notice *notice);
