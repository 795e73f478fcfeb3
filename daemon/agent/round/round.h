/*
 * Rounds: one operation on one tensor, from the first local rank's submission until its parts are done, or until every
 * local rank has been told that it failed. Private to agent/.
 *
 *	GATHERING	not all local ranks have submitted it
 *	READY		all have, and agree; waits for the tensor's declaration or for the round before
 *	MOVING		parts are under way; failed is set and nothing new starts when one of them fails
 *	FAILED		before it moved: the requests that came were ended, those still to come will be at once
 *
 * Rounds of one tensor move one after the other, rounds of different tensors together.
 */
#pragma once

#include "agent/job/job.h"
#include "base/clock.h"
#include "reduce/reduce.h"

/* Parts of a round that exist at once: bounds memory, and is plenty to keep every server and thread busy. */
#define ROUND_PARTS_MAX 256

/*
 * Open rounds of a job for each of its local ranks. A rank has at most as many requests, so only rounds that failed, and
 * that some rank has not heard of yet, can be more: then that rank is hopelessly behind.
 */
#define ROUNDS_PER_RANK_MAX 4096

enum agent_round_state { ROUND_GATHERING, ROUND_READY, ROUND_MOVING, ROUND_FAILED };

struct agent_rank {
	struct agent_request *request; /* NULL: not yet, or ended */
	const void *input;
	void *output;
	const struct buffer *input_device,
		*output_device; /* that these are in, or NULL: memory of the host */
	bool came;		/* or will never: it is out of the job, or has left the round out */
	bool in;		/* once it moves: contributes */
	uint8_t input_dtype;	/* of input */
};

struct agent_round_turn {
	struct list
		link; /* schedule.scheduled, while parts of it are to be made, and may be, or to be sent; else later.rounds or later.starved */
	uint64_t sequence; /* among those that moved */
	uint64_t unsent;   /* bytes of parts that have yet to leave for a server: scheduler.c's */
	int32_t priority_class; /* once it moves through servers: that of its tensor, or its priority */
	int32_t priority;	/* the most urgent of its requests */
	uint32_t pass;		/* job->n_passes when it began to move through servers */
	bool cut;		/* partition has no more: agent_schedule_cut() */
	bool goes_on; /* agent_round_refill() or agent_round_scatter() does, up the stack or in a later turn */
	bool stalls; /* some request does: the control thread leaves sums and copies to the pool */
	bool heard; /* none but ranks that follow, and had heard of it, have come to it: follow.c */
};

/*
 * A reduction of an elastic job over nodes: its results are retained until all are there, so that it can be done
 * again without a rank that is lost meanwhile. Then it is committed, here and so for all: elastic.c.
 */
struct agent_round_gate {
	bool on, committed, scattering;
	bool uninformed; /* that some result is here may not have been said, or was said on a connection that is gone */
};

struct agent_round_times {
	uint64_t deadline_ns, timeout_ns;
	uint64_t started_ns; /* the first rank came */
	uint64_t came_ns;    /* the newest did */
};

struct agent_round {
	/* What others' turns, and parts of it that have left or come back, look at first: one line of the cache. */
	struct agent_tensor *tensor;
	struct agent_job *job;
	struct agent_round_turn turn;

	/* What an answer to a part of it looks at, too, as far as ledger.low, partition.operation, failure.status and ranks. */
	unsigned n_parts; /* that exist */
	enum agent_round_state state;
	struct list link;	 /* the tensor's */
	struct list job_link;	 /* the job's */
	struct agent_rows *rows; /* push_pull_rows, while it moves */
	uint64_t *
		counts; /* owned; without all ranks: of an all_gather, or of who is not in an all_to_all */
	uint64_t number;
	struct list parts;
	struct list moving_link; /* the job's, while it moves */
	struct agent_round_gate gate;
	bool alone;		  /* no other rank's round has to do with it: accumulate */
	bool counted;		  /* n_contributions is what servers said, */
	bool on_device;		  /* some of its memory is: device.c */
	bool grouped;		  /* and devices reduce among themselves */
	uint32_t n_contributions; /* that are in the result: the least of its parts */
	uint32_t n_came;
	uint32_t n_in; /* once it moves: contributions */
	uint8_t reduction;
	bool widens;	/* once it moves: some input is narrower than the tensor's type */
	uint16_t scale; /* once it moves: agent_round_scale() */
	uint64_t n_cut; /* parts cut so far, but for empty ones: the number of the next */
	unsigned n_made, n_held, n_scattered; /* of its parts; of one that is gated */
	uint32_t n_gone; /* elastic, over nodes: ranks that had gone when its result was made */
	struct ledger_round ledger;
	struct list device_link; /* job->device->waiting */
	struct partition partition;
	const struct shm_slot
		*slot_memory; /* where the newest of its requests will be answered; or NULL */
	uint64_t
		direct; /* bits of local ranks: once such a one is ready, its parts may go by their devices */
	uint64_t inlined; /* bytes worked on at once, for local parts, since it was last refilled */
	struct agent_round_times times;
	unsigned n_up;		   /* parts whose result is being copied to devices */
	uint32_t n_gone_said;	   /* all_gather: when it was submitted */
	struct failure failure;	   /* status not 0: it fails */
	uint64_t unused[4];	   /* ranks begin a line, too */
	struct agent_rank ranks[]; /* n_local entries */
};
static_assert(offsetof(struct agent_round, turn.goes_on) < CACHE_LINE,
	      "what scheduler.c looks at of each round is one line");
static_assert(!(offsetof(struct agent_round, n_parts) % CACHE_LINE ||
		offsetof(struct agent_round, parts) % CACHE_LINE ||
		offsetof(struct agent_round, n_made) % CACHE_LINE ||
		offsetof(struct agent_round, partition) % CACHE_LINE ||
		offsetof(struct agent_round, ranks) % CACHE_LINE),
	      "what push.c has fetched of a round begins with lines");

/* It had ended before a restart, for a rank that says so: it is to be settled, and not to move. */
static inline bool agent_round_is_settled(const struct agent_round *round)
{
	return round->number <= round->tensor->past_rounds;
}

/* No part of it is made before another has ended. While it goes on, that counts as one. */
static inline bool agent_round_is_full(const struct agent_round *round)
{
	return round->n_parts - round->turn.goes_on - round->n_held >= ROUND_PARTS_MAX;
}

static inline uint32_t agent_round_n_local(const struct agent_round *round)
{
	return round->job->layout.n_local;
}

/* The first request that is there, or NULL; one is while it moves. */
static inline const struct agent_request *agent_round_first(const struct agent_round *round)
{
	for (uint32_t i = 0; i < agent_round_n_local(round); i++)
		if (round->ranks[i].request)
			return round->ranks[i].request;
	return NULL;
}

/* What servers are told once the round moves: `reduction` of data_header. */
static inline uint8_t agent_round_reduction(const struct agent_round *round)
{
	return data_reduction_scaled(round->reduction, round->scale);
}

/* Once it moves: one contribution is its own sum, as it lies there, unless it is to be widened. */
static inline bool agent_round_takes_one(const struct agent_round *round)
{
	return !round->scale || round->grouped;
}

/* Every local rank has come. */
static inline bool agent_round_is_complete(const struct agent_round *round)
{
	return round->n_came == agent_round_n_local(round);
}

/* Of a request: 0: it is in no order with others. */
static inline uint64_t agent_request_ordinal(const struct agent_request *request)
{
	return request->operation == OPERATION_PUSH_PULL_ROWS ? 0 : request->ordinal;
}

/* Servers are still to hear that it has failed, if it has: declare.c. */
static inline bool agent_round_is_untold(const struct agent_round *round)
{
	return round->tensor->telling && round->number >= round->tensor->untold->number;
}

/* Of the first such one servers have heard, or need not hear. */
static inline void agent_round_told(const struct agent_round *round)
{
	struct agent_tensor *tensor = round->tensor;

	tensor->telling = round->link.next != &tensor->rounds;
	tensor->untold =
		tensor->telling ? container_of(round->link.next, struct agent_round, link) : NULL;
}

/* round.c */
/* Words about a round: "tensor NAME, round N: ...". */
void agent_round_describe(const struct agent_round *round, struct failure *failure, int status,
			  const char *format, ...) _printf_(4, 5);
/*
 * What each node's sum is divided by: of averages of float16 through servers, if some node has several ranks and all servers have
 * DATA_FEATURE_SCALES; else 0. Some request is there.
 */
uint32_t agent_round_scale(const struct agent_round *round);
/*
 * What is done here with the contributions of this node, but for inputs and outputs: all of it, or, of an average, the sum that
 * servers divide. Once the round moves; in the pool, too.
 */
struct reduce_params agent_round_sum(const struct agent_round *round);
/* Fails a round with words; tell: other nodes do not know yet. Does nothing when it failed before. */
void agent_round_fail(struct agent_round *round, const struct failure *failure, bool tell);
/* Whether it fails. It does when its job has failed, also where the sweep has yet to come to it. */
bool agent_round_is_failing(struct agent_round *round);
/* Creates parts as far as they may exist. */
void agent_round_refill(struct agent_round *round);
/* For later.c: with the parts behind those that were empty, with those that are scattered, or with rows for which there is room. */
void agent_round_go_on(struct agent_round *round);
bool agent_round_can_begin_part(const struct agent_round *round);
/* A part has gone; the round ends with its last. */
void agent_round_part_done(struct agent_round *round);
/* A part is held. */
void agent_round_held(struct agent_round *round);
/* Every result is retained, and all parts are made: goes on to the outputs. */
void agent_round_commit(struct agent_round *round);
/* A gated round is committed, or the last of its results is in the outputs: it goes on with its parts. Harmless when it does. */
void agent_round_scatter(struct agent_round *round);
/* This local rank is not in what is done again. */
void agent_round_exclude(struct agent_job *job, uint32_t index);
/* Rounds that are done again have as long as from their beginning. */
void agent_round_prolong(struct agent_job *job);
/* Starts what can start. */
void agent_round_advance(struct agent_tensor *tensor);
/* Takes the request of a local rank, or NULL, out of its round: it is about to end. */
struct agent_request *agent_round_take(struct agent_round *round, uint32_t index);
/* Ends one request, well (failure NULL) or not; and those of a round that are there. */
void agent_request_end(struct agent *agent, struct agent_request *request,
		       const struct failure *failure);
void agent_round_end_requests(struct agent_round *round);
/*
 * A round that failed before it moved is remembered until all local ranks have heard of it, and, so that other nodes
 * hear of it too, until its tensor has a key. Returns whether it is forgotten, and the round gone.
 */
bool agent_round_forget(struct agent_round *round);
/* Nothing refers to it any more: it becomes a spare one. */
void agent_round_recycle(struct agent_round *round);
/* The same at the end of its job, with what it and its parts refer to. */
void agent_round_drop(struct agent_round *round);

/* submit.c */
/* Ends the requests of rounds that had ended before a restart, now or with a sweep: tensor->past_rounds has grown. */
void agent_rounds_settle(struct agent_tensor *tensor);
/* The same of one, if it is such a round: returns whether, and it has gone. */
bool agent_round_settle(struct agent_round *round);
/* This local rank will submit nothing more: it is out of the job, for this reason. Of many rounds, the sweep takes it out. */
void agent_round_without(struct agent_job *job, uint32_t index, const struct failure *failure);
/* Before a round is looked at: takes out of it whom the sweep has yet to. Returns false when it has gone with that. */
bool agent_round_mend(struct agent_round *round);
/* The sweep has been at all: ranks whose requests have ended so may leave. */
void agent_round_mended(struct agent_job *job);

/* expire.c: its deadline is over. Returns whether a rank was dropped for that, which takes as long as many rounds. */
bool agent_round_expire(struct agent_round *round);

/* report.c: who is missing, in words; "" when nobody here is. */
void agent_round_waiting_for(const struct agent_round *round, char *text, size_t size);

/* priority_class.c */
/* A round is about to move through servers: sets its priority class. bytes are those of a contribution. */
void agent_priority_class_set(struct agent_round *round, uint64_t bytes);
/* A tensor is forgotten. */
void agent_priority_class_gone(struct agent_tensor *tensor);

/* acknowledged.c: what a node has, said once more. */
/* Of a push_pull_rows, whose result is recorded: this server need not hold it for us. */
void agent_acknowledged_rows(struct agent_tensor *tensor, uint64_t round, size_t server);
/* A round has ended here. */
void agent_acknowledged_round(struct agent_round *round);
/* A server has attached: what was said of results to the one before may not have arrived, or it is the same process. Returns how many rounds are open. */
unsigned agent_acknowledged_again(struct agent_tensor *tensor, const struct agent_server *server);
/* All ranks have declared a tensor again to a process that is not the job's first: what the one before has said may not have arrived. */
void agent_acknowledged_resumed(struct agent_tensor *tensor);

/*
 * check.c: one request against its tensor; that of the newest rank, by local number, against those before it, where each has to
 * fit each; a round's requests against the first. 0, or -EINVAL with words.
 */
int agent_check_request(const struct agent_tensor *tensor, uint32_t rank,
			const struct agent_request *request, struct failure *failure);
int agent_check_pairs(const struct agent_round *round, uint32_t index, struct failure *failure);
int agent_check_round(const struct agent_round *round, struct failure *failure);
/* The type of a request's input, and its bytes. The second: of a checked request. */
unsigned agent_check_input_dtype(const struct agent_tensor *tensor,
				 const struct agent_request *request);
uint64_t agent_check_input_len(const struct agent_tensor *tensor,
			       const struct agent_request *request);
/* Elements of the operation (push_pull, broadcast), or of each block where they are equal. Of a checked request. */
uint64_t agent_check_elements(const struct agent_tensor *tensor, uint32_t rank,
			      const struct agent_request *request);
