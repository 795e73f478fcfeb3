/*
 * Links of RDMA: a queue pair with what it takes, from the first packet of a connection until the lane that owns it is gone.
 * link.c, accept.c and dial.c make one, at home; queue_pair.c has what is posted to; send.c,
 * receive.c, window.c and lane.c are the worker's.
 */
#pragma once

#include "base/clock.h"
#include "transport/rdma/rdma.h"

struct lane;

#define RDMA_RECEIVES	   128 /* posted for each lane */
#define RDMA_RECEIVE_BATCH 16  /* posted together */
#define RDMA_SENDS	   128 /* messages posted at once, two work requests each at most */
#define RDMA_WORKS	   32  /* work requests posted together */
/* Completions of answers are seen with the next message that comes, or after this. */
#define RDMA_LATE_NS (10 * NSEC_PER_MSEC)
/* Bytes of payload offered or under way on a lane; more urgent ones overtake the rest. Enough for 200 Gbit/s over 40 us. */
#define RDMA_AHEAD (1u << 20)
/* Of a link: open at once. Rooms leave the last to grants, which someone waits for. */
#define RDMA_WINDOWS	    1024
#define RDMA_TARGET_WINDOWS (RDMA_WINDOWS - 64)
#define RDMA_HEAD_LEN	    (sizeof(struct data_rdma) + sizeof(struct data_header))
#define RDMA_SLOT_LEN	    (RDMA_HEAD_LEN + DATA_RDMA_EAGER)

enum rdma_link_state {
	LINK_RESOLVING, /* connecting: address, then route */
	LINK_CONNECTING,
	LINK_ACCEPTING,
	LINK_UP, /* a lane's */
};

/* Of which completions the channel will tell. */
enum rdma_arming {
	RDMA_ARMED_NOT,
	RDMA_ARMED_MESSAGES, /* of what the other end sends */
	RDMA_ARMED_ALL,	     /* of our sends too */
};

struct rdma_send {
	struct message *message; /* done with when the send is; NULL: nothing waits for it */
	bool is_signaled;	 /* its completion will be told */
	uint64_t posted_ns;	 /* if it will */
};

/* A piece of our memory that is, while open, writable by the other end of the link. */
struct rdma_window {
	struct ibv_mw *mw; /* its rkey is the last that it was opened with */
	struct rdma_window *next_free;
};

struct rdma_grant {
	struct data_rdma head; /* host order */
	struct ibv_mr *mr;
	struct rdma_window **window; /* where whoever gets the payload keeps it */
};

/* A ring. */
struct rdma_sends {
	struct rdma_send slots[RDMA_SENDS];
	unsigned first, n; /* slots that are taken */
	unsigned n_silent; /* of the last of them, whose completion will not be told */
};

/* Prepared: posted together. */
struct rdma_works {
	struct ibv_send_wr list[RDMA_WORKS];
	struct ibv_sge sges[RDMA_WORKS];
	unsigned n;
};

/* To be sent. */
struct rdma_grants {
	struct rdma_grant *list;
	size_t n, capacity;
};

struct rdma_windows {
	struct rdma_window *list; /* RDMA_WINDOWS, of which n have been made */
	unsigned n, n_open;
	struct rdma_window *free;
};

struct rdma_poll {
	enum rdma_arming arming;
	struct loop_timer late; /* looks for completions of sends that no message brought along */
	bool is_late;		/* it has been in vain */
	struct mail again;	/* more to poll */
	bool is_again_posted;
	struct mail rest; /* nothing is left: asks to be woken */
	bool is_resting;
	bool has_lost_completions; /* polling failed: what was sent may have arrived, and been answered */
	unsigned n_events;	   /* of the channel, still to be acknowledged */
};

struct rdma_link {
	struct rdma *rdma;
	struct rdma_port *port;
	struct peer *peer;
	struct list link;
	struct rdma_cm_id *id;
	enum rdma_link_state state;
	bool is_accepting;
	unsigned rail, remote; /* rail: number on the wire; remote: of the offer's rails */
	unsigned mtu;
	struct loop_timer timer;
	struct data_rdma_hello mine; /* wire order */
	struct lane *lane;
	struct mail broken; /* home tells the worker */
	bool is_broken;
	char why[128];

	/* Made by home, then the worker's. */
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *memory; /* slots of receives, then of sends */
	unsigned max_inline;
	unsigned n_theirs; /* receives that they posted at first */

	/* The worker's thread. */
	unsigned credits; /* receives of theirs that we may use up */
	unsigned owed;	  /* receives of ours posted since we last said so */
	uint64_t ahead;	  /* bytes */
	struct rdma_sends sends;
	struct rdma_works works;
	struct rdma_grants grants;
	struct rdma_windows windows;
	struct rdma_poll poll;
	uint64_t now_ns; /* at the last flush, or poll that had something: read once for many */
	uint64_t progress_ns; /* when the last completion of a send was seen */
	struct list awaiting; /* messages, by message.link: offered, no grant yet */
	struct list granted;  /* messages, by message.link: to be written to their target */
};

/* link.c */

/* Starts the timer that ends it if it does not come up. id: whose link it is to be, or NULL. Returns 0 or -errno. */
int rdma_link_new(struct rdma *rdma, struct peer *peer, struct rdma_cm_id *id,
		  struct rdma_link **ret_link);
/* Returns NULL. */
struct rdma_link *rdma_link_free(struct rdma_link *link);
/* One that was being made has failed: says so, and goes. */
void rdma_link_lost(struct rdma_link *link, int status, const char *why);
/* Those of a peer that are being made. */
void rdma_links_drop(struct peer *peer);
void rdma_link_on_event(struct rdma_link *link, const struct rdma_cm_event *event);
/* To RTR and RTS, with what librdmacm found out and what the settings say. Returns 0 or -errno. */
int rdma_link_ready(struct rdma_link *link);
void rdma_link_set_tos(struct rdma_link *link);
/* The proof of a hello; of the connecting side's where accepting is NULL. Both in wire order. Returns 0 or -ENOMEM. */
int rdma_link_prove(const struct rdma_link *link, const struct data_rdma_hello *connecting,
		    const struct data_rdma_hello *accepting, unsigned char *ret_proof);
void rdma_hello_make(struct rdma_link *link, unsigned group);
/* Out of private data, which comes padded; in wire order and in ours. */
bool rdma_hello_take(const struct rdma_conn_param *param, struct data_rdma_hello *ret_wire,
		     struct data_rdma_hello *ret_hello);
/* Returns NULL, or what is wrong. */
const char *rdma_hello_check(const struct data_rdma_hello *hello);

/* dial.c */

/* The route is found: asks. Returns 0, or -errno with why. */
int rdma_link_connect(struct rdma_link *link, char *why, size_t size);
/* The other side accepted. Returns 0, or -errno with why. */
int rdma_link_establish(struct rdma_link *link, const struct rdma_conn_param *param, char *why,
			size_t size);

/* queue_pair.c */

enum rdma_work { RDMA_WR_RECEIVE, RDMA_WR_SEND };

static inline uint64_t rdma_wr_id(enum rdma_work work, unsigned index)
{
	return (uint64_t)work << 32 | index;
}

/* Queue pair and memory; receives are posted. Returns 0, or a negative errno with why. Home. */
int rdma_link_make(struct rdma_link *link, char *why, size_t size);
/* Lets go of all that rdma_link_make() made. Idempotent. */
void rdma_link_unmake(struct rdma_link *link);
unsigned char *rdma_receive_slot(const struct rdma_link *link, unsigned i);
unsigned char *rdma_send_slot(const struct rdma_link *link, unsigned i);
/* n of 1 to RDMA_RECEIVE_BATCH. Returns 0 or -errno. */
int rdma_post_receives(struct rdma_link *link, const unsigned *slots, unsigned n);

/* send.c, receive.c */

void rdma_flush(struct lane *lane);
void rdma_on_sent(struct rdma_link *link, const struct ibv_wc *wc);
/* Whether a completion will be told of a send. */
bool rdma_awaits_sends(const struct rdma_link *link);
/* Whether something cannot leave before one is. */
bool rdma_is_held_up(const struct rdma_link *link);
/*
 * Whether a send has not been completed for so long that its device ought to have given up: cards answer cards, however
 * busy the processors are. To be asked when all completions have been seen.
 */
bool rdma_is_still(const struct rdma_link *link);
void rdma_on_received(struct rdma_link *link, const struct ibv_wc *wc);

/*
 * window.c; the worker's thread
 *
 * soft-RoCE hands on the kernel's flag, where 4 is what 8 is here; what 4 is here does not exist on reliable connections.
 */
#define RDMA_WC_WITH_INV (IBV_WC_WITH_INV | IBV_WC_IP_CSUM_OK)

/* Whether one can be opened. */
bool rdma_window_has(struct rdma_link *link, unsigned limit);
/*
 * Opens a window on some memory of a region, when there is one: *ret_bind is to be posted, in front of the SEND that tells
 * the key, and rdma_window_bound() called when it has been: until then the window has its old key, by which providers know it.
 */
struct rdma_window *rdma_window_open(struct rdma_link *link, struct ibv_mr *mr, uint64_t address,
				     uint32_t len, struct ibv_send_wr *ret_bind);
void rdma_window_bound(const struct ibv_send_wr *bind);
/* What arrived has to have closed it. Takes NULL. Returns 0, or has failed the lane. */
int rdma_window_close(struct rdma_link *link, struct rdma_window *window, const struct ibv_wc *wc);
/* Closes and frees all. Anywhere. */
void rdma_windows_done(struct rdma_link *link);

/* lane.c */

/* The wire, not the peer: what the lane held may go another way. The worker's thread. */
void rdma_link_fail(struct rdma_link *link, const char *format, ...) _printf_(2, 3);
/* Of which completions the worker has to be told, as things are. */
enum rdma_arming rdma_arming_wanted(const struct rdma_link *link);
/* Looks for completions in the loop's next turn. The worker's thread. */
void rdma_poll_again(struct rdma_link *link);
/* Looks for completions that nobody is woken for, after RDMA_LATE_NS. The worker's thread. */
void rdma_watch_sends(struct rdma_link *link);
/* The wire broke: the worker is told. Home; not when the lane is closing. */
void rdma_link_break(struct rdma_link *link, const char *why);

/* lane.c: a link that has proved itself becomes a lane of the peer, which owns the link then. Returns 0 or -errno. */
int rdma_lane_add(struct peer *peer, struct rdma_link *link, unsigned rail, bool is_accepted);
