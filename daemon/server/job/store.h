/*
 * What a job holds here: tensors by key, the parts of each that have been seen, and a slot for each round of a part
 * that is not closed. A part remembers which rounds it has closed, a tensor which rounds have failed. All of it is
 * charged to the job. Control thread only; a slot's sum runs in the pool meanwhile.
 *
 *	slot	collecting: in store.open, waits for its set of nodes
 *		summing:    in store.summing, all have come, nothing more can join or fail it but the end of the job
 *		held:	    in store.held, answered, but not all of the result; push_pull_rows only, see rows.h
 *		late:	    in job->late, answered to those who came, kept for those who have not; see quorum.h
 *		kept:	    in store.kept, answered, but not every node has said that it keeps it; see keep.h
 */
#pragma once

#include "proto/ledger.h"
#include "reduce/reduce.h"
#include "server/job/job.h"

/* So many rounds of a tensor, and slots of a part, are found by walking; those behind them in a map of the job. */
#define STORE_NEAR 8
/* Slots of a round that are looked at in one go; what concerns more goes on in later turns of the loop. */
#define STORE_MANY 1024
/* Failed rounds of a tensor that are remembered apart; one that follows the last of so many is remembered with it. */
#define TENSOR_FAILED 16
/* Rounds behind the newest closed one of a part whose fate is known exactly; older ones count as closed. */
#define PART_WINDOW 64

struct failed_round {
	struct list link; /* in tensor->failed, oldest first */
	uint64_t number,
		last; /* the first, whose text it is, and the last of those that followed */
	int status;
	char text[];
};

struct tensor {
	struct map_entry entry; /* in job->tensors by key */
	struct job *job;
	uint64_t key;
	struct map parts;
	struct tensor *
		next; /* which a node contributed to after it, the last time; or what its memory is used for since */
	struct part *first_part; /* seen here first, or NULL; a small tensor has no other */
	struct list rounds;	 /* that have slots, in the order in which they began */
	size_t n_rounds;
	struct list failed;
	size_t n_failed;
	uint64_t measured;		/* the newest round whose contributions' times were taken */
	struct list in_job;		/* job->all_tensors, mentioned, forgotten or dropping */
	bool is_mentioned;		/* nothing of it is here but `past` */
	struct map_entry *dropped_next; /* of its parts, while it is dropped; or NULL */
	struct given_up *given_up;	/* of one of many parts: accumulate.c's; or NULL */
	uint64_t past[]; /* by node: every round up to this one is over for it; see keep.h */
};

struct part {
	struct map_entry entry;		 /* in tensor->parts by block and part */
	struct accumulator *accumulator; /* job->accumulators', or NULL: accumulate.c */
	struct list slots;		 /* in the order in which they began */
	size_t n_slots;
	struct list carried; /* contributions that were late, for the next round: quorum.h */
	uint64_t n_carried,
		n_behind; /* of these; of a job with a quorum, of nodes in all slots: what `behind` counts */
	uint64_t *
		contributors; /* by node, or NULL: as in data_contributors, of the newest round there is a result of, */
	uint64_t contributors_round; /* which is this one: quorum.h */
	uint64_t newest;	     /* highest round closed, 0: none */
	uint64_t closed;	     /* bit i: round newest - 1 - i is closed */
	struct list in_job;	     /* job->parts */
	uint32_t behind
		[]; /* by node, of a job with a quorum: slots that others have left behind, and it has not come to */
};

/* One round of a tensor while any part of it is held: what all its contributions must have in common. */
struct round {
	struct list link; /* in tensor->rounds */
	struct list slots;
	struct tensor *tensor;
	size_t n_slots;
	bool pinned; /* does not go with its last slot */
	/* While its slots fail, by and by: why, or NULL; in job->failing, and which is next. */
	struct failure *failing;
	struct list failing_link, *failing_at;
	struct map_entry far; /* in job->far_rounds, if is_far */
	bool is_far;
	struct data_header header; /* the first contribution's */
	/* When its nodes came to it here, with their first part; until all have. */
	bool measured; /* they have, or did in an earlier life of the round */
	uint32_t n_arrived;
	uint64_t first_ns, newest_ns;
	uint8_t arrived[]; /* by node */
};

/* Whether enough nodes keep a result. */
struct safety {
	bool is;    /* they do, or there are no data */
	uint32_t n; /* elastic: the nodes before this one do, or have no use for it */
};

/* What makes a slot's result; the pool's while slot->summing. */
struct sum {
	struct task task;
	struct reduce_params reduce;
	const void *copy_from;	  /* moved unchanged instead of reduced */
	const void **inputs;	  /* room for one of each node */
	const void **more_inputs; /* room for these and for slot->carried, or NULL */
	void *output;
	struct delivery *in_place; /* of a node of this process: the result is made in its memory */
};

struct slot {
	struct list in_part, in_round, in_job;
	struct job *job;
	struct part *part;
	struct round *round;
	struct data_header header; /* the first contribution's */
	uint64_t since_ns;	   /* when that came */
	uint64_t charged;
	uint32_t n_here, n_expected;
	uint32_t n_gone; /* elastic: ranks that were, when the result was made | LEDGER_WAITING */
	bool summing, held, is_far;
	bool late; /* of a job with a quorum: quorum.h */
	uint32_t n_carried;
	struct list carried; /* contributions to earlier rounds, in this sum */
	uint8_t *came_late;  /* by node: since the sum began */
	uint8_t *behind;     /* by node: part->behind counts it */
	struct rows *rows;   /* push_pull_rows */

	/* Of a job with resume; see keep.h. */
	bool kept;
	struct safety safe;
	uint32_t n_acked; /* nodes */
	uint32_t *
		number; /* by node: under which it was sent; 0: it was not, since the node attached */
	uint8_t *acked; /* by node; when late: has been answered */
	struct list again,
		offers; /* deliveries: repeated while it is summed; to be answered when all have it */
	struct map_entry far; /* in job->far_slots, if is_far */

	struct sum sum;
	struct block *result;	   /* NULL: none has data */
	struct answer_check check; /* of it */
	bool is_kept_here; /* a node of this process keeps it until all have it, whatever becomes of the process */

	struct delivery
		*from[]; /* by node; then the inputs, numbers, acked, came_late, behind, calls */
};

/*
 * The tensor, made if need be. node: who contributes to it, or NULL: what comes next from a node is most often what came next before.
 * Returns 0, -EDQUOT at max_tensors, -ESTALE when it is forgotten, -ENOMEM; failure filled.
 */
int tensor_get(struct job *job, struct job_node *node, uint64_t key, struct tensor **ret_tensor,
	       struct failure *failure);
/*
 * The tensor, of which a node says what it has; made if need be. Until something else of it comes it is not one of
 * max_tensors: it may have been forgotten before that was heard. There are as many beside those, and the oldest goes.
 * NULL: there is no memory.
 */
struct tensor *tensor_mention(struct job *job, uint64_t key);
/* The tensor, or NULL. */
struct tensor *tensor_of(const struct job *job, uint64_t key);
/* No node uses it any more: it goes with its last round. */
void tensor_forget(struct tensor *tensor);
static inline bool tensor_is_forgotten(const struct tensor *tensor)
{
	return tensor->past[0] == DATA_ROUND_NEVER;
}
/* For the sweep: of one that was forgotten the rounds may be over. */
void tensor_visit(struct job *job, struct list *link, uint64_t now_ns);
struct failed_round *tensor_failed(const struct tensor *tensor, uint64_t number);
/* Remembers a failed round as well as memory allows. */
void tensor_failed_add(struct tensor *tensor, uint64_t number, const struct failure *failure);
/* Frees a round that has no slots and is not pinned. */
void round_put(struct round *round);
struct round *round_find(const struct tensor *tensor, uint64_t number);

/* The part, made if need be. Returns 0, QUOTA_E_FULL, -ENOMEM. */
int part_get(struct tensor *tensor, const struct data_header *header, struct part **ret_part);
struct part *part_find(const struct tensor *tensor, const struct data_header *header);
bool part_is_closed(const struct part *part, uint64_t number);
void part_close(struct part *part, uint64_t number);

/* The slot for a contribution, or NULL. */
struct slot *slot_find(const struct part *part, uint64_t number);
/*
 * A slot for the first contribution to a part's round, with part and round made if need be; charged for itself, and for len bytes
 * that came. Returns 0, QUOTA_E_FULL, or -ENOMEM.
 */
int slot_new(struct tensor *tensor, const struct delivery *delivery, uint64_t len,
	     struct slot **ret_slot);
/* Charges job->memory.quota; where there is no room, what it needs no more goes before. Returns 0 or QUOTA_E_FULL. */
int store_charge(struct job *job, uint64_t bytes);
/* The same for a block, which is charged. Returns what block_new() does. */
int store_block_new(struct job *job, size_t len, struct block **ret_block);
/* Charges it for len bytes more. Returns 0 or QUOTA_E_FULL. */
int slot_charge(struct slot *slot, uint64_t len);
/* Into another list of its job. */
void slot_move(struct slot *slot, struct list *to);
/* All have come. */
void slot_sum(struct slot *slot);
/* What a slot of the job is charged with for itself. */
size_t slot_len(const struct job *job);
/* All has been answered, but not all pulled. */
void slot_hold(struct slot *slot);
/* Puts a call into slot->again or slot->offers, in the place of one of that node which came before. */
void slot_put_call(struct slot *slot, struct list *list, struct delivery *delivery);
/* Its deliveries have been answered. The round goes with its last slot. */
void slot_free(struct slot *slot);
/* Answers all that it holds with an error, and frees it. */
void slot_fail(struct slot *slot, int status, const char *text);
/*
 * The same for all collecting slots of a round: those of many in later turns of the loop. Until then nothing can join the round:
 * round->failing.
 */
void round_fail_slots(struct round *round, const struct failure *failure);

/* For the sweep of a job that is over: what round, part and tensor refer to goes. */
void round_failing_end(struct job *job, struct list *link);
void part_end(struct job *job, struct list *link);
void tensor_end(struct job *job, struct list *link);
/* Nothing is left but what is being summed. */
void store_end(struct job *job);
/* The job is over: what waits for a slot fails, or has been answered. */
void slot_end(struct job *job, struct list *link);
void slot_end_answered(struct job *job, struct list *link);
/* The rest, also what a pool that was freed has dropped. */
void store_free(struct job *job);
