/*
 * Parts on their way, and the queues in which they wait for a server's turn. Private to agent/.
 *
 *	local:		WORK (one sum or copy, here or in the pool)
 *	distributed:	QUEUED (in the send queue of its server) -> WORK (gather) -> CALL (push, wait, pull) -> WORK (scatter)
 *	gated:		... CALL -> HELD (for all parts of the round) -> WORK (scatter) -> SCATTERED (the same)
 */
#pragma once

#include "agent/round/round.h"
#include "base/order/order.h"
#include "gpu/gpu.h"

enum agent_part_state {
	PART_NEW,
	PART_QUEUED,
	PART_GATHER,
	PART_CALL,
	PART_STARVED, /* its result waits for memory of the ledger, and is charged meanwhile */
	PART_HELD,    /* of a round that is gated: its result is retained, and in no output; */
	PART_SCATTER,
	PART_SCATTERED, /* and in all, and others are not */
};

/* What of a part is on devices, where anything of its round is: device.c. */
struct agent_part_device {
	struct gpu_task task;
	struct gpu_lease lease;
	struct gpu_lease direct; /* what is there goes to the server from the device: direct.c */
	void (*then)(struct agent_part *part);
	bool inputs;
};

/* What a part on its way to a server and back is asked for stands in front of its call, in whole lines of the cache. */
struct agent_part {
	struct list link; /* the round's, or the job's spare ones */
	struct list wait; /* a server's parked ones, or the job's starved ones */
	struct agent_round *round;
	struct agent_job *job; /* the round's, without a look at the round */
	void **outputs;	       /* n_local entries */
	uint64_t moved;	       /* job's n_moved when it was begun */

	struct extent extent;
	enum agent_part_state state;
	bool remote;	  /* needs a server: */
	bool copies;	  /* the work is copies of inputs[0], not a sum */
	bool is_straight; /* another node keeps the result, it comes to an output here */
	bool again; /* pushed before, on a connection that broke; the server has not been lost since */

	size_t server;
	struct agent_send_queue *send_queue; /* NULL: there is none now */
	uint64_t charged;		     /* bytes ahead in the send queue */
	uint64_t unsent;		     /* counted in its round */
	struct block *block;		     /* the gathered sum, then the answer */
	void *target;			     /* where the answer went, if not into the block */
	/* Of a job that outlives its daemons' processes. */
	uint64_t
		attachment; /* since which the result has its number; 0: the part was not sent yet */
	uint32_t number;
	uint32_t retained; /* its result in the ledger, or LEDGER_NO_RESULT */

	struct ledger_part ledger; /* of a round that is recorded */
	uint64_t n_copied;	   /* bytes */
	bool stored;		   /* the result is retained, in the outputs, and marked */
	bool posted;		   /* is in the pool */
	bool out_of_range;	   /* the gathered sum is not a number of its type */
	uint32_t n_inputs, n_outputs;
	const void **inputs; /* n_local entries */

	struct call call;
	struct task task;
	uint64_t attempt; /* of a piece of rows: rows.c */
	struct agent_part_device device;
	uint8_t *input_dtypes; /* n_local entries: of inputs, where its round widens */
	uint64_t unused;

	const void *late;   /* our contribution, which is to be kept beside the result */
	const void **piece; /* n_local entries: inputs of the piece that is being summed */
	void **staged;	    /* n_local entries: a rank's input in staging, or NULL */
	void *result;	    /* in staging: the result for devices, while there is a lease */
	void *pointers[];
};
static_assert(!(offsetof(struct agent_part, extent) % CACHE_LINE ||
		offsetof(struct agent_part, server) % CACHE_LINE ||
		offsetof(struct agent_part, ledger) % CACHE_LINE ||
		offsetof(struct agent_part, late) % CACHE_LINE),
	      "what is fetched of a part begins with lines");

/*
 * Of a job towards one server: parts wait here until so little of the job is under way that an urgent part, once it comes, is the
 * next to leave. Other jobs have send queues of their own; they meet at the connection, where they take turns.
 */
struct agent_send_queue {
	struct list link; /* the agent's */
	struct peer *peer;
	bool lost;	/* peer is dead: only waits to be freed */
	unsigned refs;	/* its job, and who is in the midst of it */
	uint64_t ahead; /* bytes gathered, or being gathered, and not yet sent */
	bool pumping;
	uint64_t sequence;
	struct order waiting; /* parts, by priority class */
};

static inline struct agent_server *agent_part_server(const struct agent_part *part)
{
	return &part->job->fleet.servers[part->server];
}

/* It has staging; what is there goes to its server from the device. */
static inline bool agent_part_is_staged(const struct agent_part *part)
{
	return part->round->on_device && part->device.lease.data;
}

static inline bool agent_part_is_direct(const struct agent_part *part)
{
	return part->round->on_device && part->device.direct.data;
}

/* part.c */
/*
 * Makes a part and sets it going; it may be done before the call returns. number: among the round's parts that are not
 * empty. Returns 0, -ENOMEM, or -EPROTO (the ledger says what cannot be).
 */
int agent_part_start(struct agent_round *round, const struct extent *extent, uint64_t number);
/* A block of a server in this process is charged there. */
static inline uint64_t agent_part_starved_len(const struct agent_part *part)
{
	return part->block && !part->block->quota ? block_bytes(part->block->len) : 0;
}
/* The result waits no more for memory. Harmless when it did not. */
static inline void agent_part_sate(struct agent_part *part)
{
	if (likely(part->state != PART_STARVED))
		return;
	quota_release(&part->job->memory.held, agent_part_starved_len(part));
	part->state = PART_CALL;
}
/* Drops a round's parts that wait in a send queue. */
void agent_part_drop_queued(struct agent_round *round);
/* It is done with, well or not; its round goes on, or ends with it. */
void agent_part_end(struct agent_part *part);
/* Ends a part in the middle, as its round has failed. */
void agent_part_drop(struct agent_part *part);
/* The same, and is the reason. */
void agent_part_fail(struct agent_part *part, int status, const char *text);
/* Its server is attached (again). */
void agent_part_unpark(struct agent_part *part);
/* Its bytes have left, or are not to be sent any more. */
void agent_part_sent(struct agent_part *part);

/* work.c: one sum, or copies. */
/* Inputs: the local ranks' contributions. Outputs: of the local ranks that the part is for. */
/* What a local rank contributes to it, in memory of the host. */
const void *agent_part_input(const struct agent_part *part, uint32_t local);
void agent_part_set_inputs(struct agent_part *part);
void agent_part_set_outputs(struct agent_part *part);
/* First local output for the answer; the others are copied from it. NULL: no rank here has one. */
void *agent_part_first_output(const struct agent_part *part);
/* Does the work here, or in the pool; then done() goes on. Large or small is decided by bytes touched. */
void agent_part_post(struct agent_part *part, void (*done)(struct task *task));
/* Counted when the part is done with, by one thread for all. */
void agent_part_copy(struct agent_part *part, void *to, const void *from, size_t len);

/* push.c: to a server and back. */
/* Its turn in the send queue has come. */
void agent_part_begin(struct agent_part *part);
/* The server that it goes to, as the job's servers are now. */
void agent_part_choose(struct agent_part *part);
/* Whether it brings the server data of this node. */
bool agent_part_is_from_here(const struct agent_part *part);
/* The daemon before has left its result: whether it goes on from there. */
bool agent_part_start_stale(struct agent_part *part);
/* It is held, and its round committed. */
void agent_part_scatter(struct agent_part *part);
/* It is held, and counts no more, as the server that it has its result from was lost: waits for one. */
void agent_part_unhold(struct agent_part *part);
/* There may be memory for its result. Returns false when there is none, else the part may have ended. */
bool agent_part_feed(struct agent_part *part);

/* Says in the ledger what its retained result is, or is to be. */
void agent_part_name_retained(struct agent_part *part);

/* in_place.c: call.in_place and call.filled of a part whose result is kept, see transport.h. */
struct block *agent_in_place(struct call *call, uint32_t len);
bool agent_in_place_filled(struct call *call);

/* send_queue.c */
int agent_send_queue_new(struct agent *agent, struct peer *peer,
			 struct agent_send_queue **ret_send_queue);
void agent_send_queue_put(struct agent_send_queue *send_queue);
int agent_send_queue_push(struct agent_send_queue *send_queue, struct agent_part *part);
void agent_send_queue_remove(struct agent_send_queue *send_queue, const struct agent_part *part);
/* The first of the parts that wait, which waits no more; or NULL. */
struct agent_part *agent_send_queue_take(struct agent_send_queue *send_queue);
/* Bytes of a part are on their way to the server, or have left. */
void agent_send_queue_charge(struct agent_send_queue *send_queue, struct agent_part *part,
			     uint64_t len);
void agent_send_queue_sent(struct agent_send_queue *send_queue, struct agent_part *part);
/* Begins parts as long as there is room ahead. */
void agent_send_queue_pump(struct agent_send_queue *send_queue);
