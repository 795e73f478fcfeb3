/* Peers: the objects that calls name, their lanes being made, calls on them, and what RDMA is asked for. Home thread. */
#pragma once

#include "base/memory/account.h"
#include "base/quota.h"
#include "base/source.h"
#include "transport/common/address.h"
#include "transport/transport.h"

struct handshake;
struct lane;
struct rdma_link;

/* What the connections of peers tell home, each by a mail or about a connection. */
struct lane_home {
	void (*answered)(struct mail *mail); /* message.mail of a call */
	void (*arrived)(struct mail *mail);  /* message.mail of an incoming */
	void (*lost)(struct lane *lane);     /* it has failed, and waits to be closed */
	void (*closed)(struct lane *lane);
};

enum peer_kind { PEER_SELF, PEER_CALLED, PEER_CALLING };
enum peer_state { PEER_STARTING, PEER_UP, PEER_LOSING, PEER_LOST };

/* The end of a peer that is lost. */
struct peer_ending {
	struct list calls;  /* of its calls and waiting */
	struct chore chore; /* ends them, then says that the peer is lost */
};

struct peer {
	struct transport *transport;
	const struct lane_home *home;
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
	struct list arrived; /* incoming by RDMA lanes, until their answers are written */
	struct list moved;   /* incoming that were moved off a lane that is being closed */
	struct list calls;   /* on a lane, or with ourselves delivered */
	struct list waiting; /* calls for which there is no lane yet, or never will be */
	struct peer_ending ending;
	struct list notices;	/* the same */
	uint64_t next_sequence; /* of what waits for a lane, calls and notices */
	size_t n_deliveries;
	size_t n_holds;		      /* peer_hold() */
	struct dial *dial;	      /* lanes being made, or NULL */
	struct addresses addresses;   /* where the last lane was made */
	uint64_t bytes_in, bytes_out; /* of lanes that are gone */
	struct {
		uint64_t ns, pause_ns;
	} again;		 /* when a lane was last to be made anew, after what pause */
	bool offers_probe;	 /* peer_offer_probe() */
	uint64_t features;	 /* DATA_FEATURE_* of both sides */
	struct rdma_peer *rdma;	 /* NULL: not both sides have it */
	unsigned n_accepting;	 /* connections by RDMA that are no lane yet */
	struct loop_timer timer; /* armed while there is business, and one turn longer */
	struct quota
		quota; /* its calls, and our answers; any thread, where there are data threads */
	struct quota held; /* of that, what nobody else is charged for; notices; the same threads */
	struct account *account; /* whose that is; NULL: nobody's */
	_Atomic uint64_t parts;	 /* any thread: part_bytes << 32 | n_nodes of its newest job */
	struct mail mail;
	bool is_posted;
	struct failure failure; /* why it is lost */
};

int peer_new(struct transport *transport, enum peer_kind kind, const char *address,
	     const char *source, struct peer **ret_peer);
/* The transport is closed: what the chore of a lost peer has left is done at once. Returns false when there is no such peer. */
bool peer_end_now(struct transport *transport);
/* Frees a peer that is lost and held by nobody; else does nothing. */
void peer_free_if_unused(struct peer *peer);
struct peer *peer_free(struct peer *peer);
/* A node's name is known: from here on it is part of the peer's. */
void peer_set_node(struct peer *peer, const char *node);
/* A lane of the peer that is ready: it is up, and what has waited leaves. */
void peer_take_lane(struct peer *peer, struct lane *lane, unsigned index, bool is_accepted);
/* Of TCP, not being closed; or NULL. */
struct lane *peer_find_lane(const struct peer *peer, unsigned index);
bool peer_has_lane(const struct peer *peer, unsigned index);
/* A lane that the peer can do without broke, or is silent: closes it. Returns false when the peer cannot. */
bool peer_lane_broke(struct lane *lane, int status, const char *why);
/* An RDMA lane by its number, closing ones too; or NULL. */
struct lane *peer_find_rail(const struct peer *peer, unsigned rail);
unsigned peer_n_rails(const struct peer *peer); /* RDMA lanes that take calls */
/* The beginning of the end; from a callback of the loop, never from inside a function of transport.h. */
void peer_lose(struct peer *peer, int status, const char *why);
/* A call for which there is no lane, or never will be. */
void peer_wait_for_lane(struct peer *peer, struct call *call);
/* Whether there is business with a lane's peer: arms the timer that looks after its silence. */
void lane_begin_business(struct lane *lane);
void lane_end_business(struct lane *lane);

/* Calls (call.c) */

/* Puts a call on a lane of its peer, which is up. */
void call_send(struct call *call);
/* Mail: a call has been answered, and is written. */
void call_answered(struct mail *mail);
/* answer.c: status and text of an answer whose payload is in place. Any thread. */
void call_take_answer(struct call *call);
/* answer.c: its payload, or that of its answer, was damaged on the way: it is to be made again, or ends alone. Any thread. */
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
/* All calls are to end: peer_end_calls() does it. The peer's lanes are gone. */
void peer_take_calls(struct peer *peer);
/* Ends so many with a status. Returns whether more are left; those that its callbacks begin are others. */
bool peer_end_calls(struct peer *peer, unsigned max, int status, const char *text);
