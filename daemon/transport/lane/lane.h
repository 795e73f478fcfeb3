/*
 * Lanes: connections that have proved themselves, of TCP or RDMA. lane.c has what both have; send.c and receive.c the two
 * directions of TCP. A lane is its worker's but for what is said to be home's.
 */
#pragma once

#include "base/order/fair.h"
#include "transport/common/worker.h"
#include "transport/lane/cookies.h"
#include "transport/lane/seal.h"

struct handshake;
struct incoming;
struct rdma_link;

enum message_kind { MESSAGE_CALL, MESSAGE_ANSWER, MESSAGE_NOTICE, MESSAGE_PONG };
/* On RDMA lanes the answer can come before our network card knows that its call had arrived: then it waits for that. */
enum call_state {
	CALL_WAITING,
	CALL_QUEUED,
	CALL_WRITING, /* RDMA: the other side has the header, not the payload */
	CALL_POSTED,  /* RDMA: all of it, as far as we know */
	CALL_SENT,
	CALL_FILLING, /* RDMA: the answer's payload is on its way to its target; in a pack: it is there, and waits for its seal */
	CALL_ANSWERED, /* ended once it is written */
	CALL_ENDED,
};

/* What comes next of a message over TCP. */
enum reading {
	READING_HEADER,
	READING_HEADER_SEAL,
	READING_PACKED, /* of a pack */
	READING_PACKED_SEAL,
	READING_PAYLOAD, /* of a pack: of each of its messages */
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
	/* NULL, or gives back what is the transport's own. Home. */
	void (*end)(struct lane *lane);
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
	struct chore drain;   /* while the lane closes: of what is in the queue */
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
	void *target;		      /* where the rest of the payload goes */
	size_t target_len;
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
	/* Each whose payload is where it belongs: all of them wait for the seal of the payloads. */
	struct {
		struct incoming *incoming;
		struct call *call;
	} messages[DATA_PACK_MAX];
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
	struct mailbox to_home;

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
struct lane *lane_free(struct lane *lane);
/* Posted from home. */
void lane_start(struct lane *lane);
void lane_close(struct lane *lane);
/* One that closes where home is its worker: all that is left of it to do, at once. */
void lane_drain(struct lane *lane);
void lane_send(struct lane *lane, struct message *message);
/* Bytes of messages that it was given and has not let go of. Home thread. */
uint64_t lane_queued(const struct lane *lane);

/* The rest on the worker's thread. */
_cold_ void lane_fail(struct lane *lane, int status, const char *format, ...) _printf_(3, 4);
/* Mail from the lane to home: run at once when that is home, where we are. */
void lane_post_home(struct lane *lane, struct mail *mail);
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
 * incoming, target, target_len). Returns 0, or has failed the lane. lane_end_message() when the payload is there, and right.
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

/* What bounds a connection's bytes inside the kernel, unsent or unacknowledged: flight.c. */
struct flight {
	uint32_t part_bytes, n_nodes; /* of the newest job with the peer; 0: not known */
	uint64_t bytes_s;	      /* known of the link, or 0 */
	uint32_t rtt_us;	      /* there and back; UINT32_MAX: not known */
	uint32_t segment;	      /* bytes of a full one */
};

/* How many there may be; 0: as many as the kernel likes. */
uint64_t flight_bytes(const struct flight *flight);
