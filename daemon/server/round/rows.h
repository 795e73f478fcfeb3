/*
 * push_pull_rows at the server: lists of rows come in pieces from every node; when all are there, they are merged and each
 * row is reduced in the order of nodes; the result goes back in pieces. A slot of such a round has a struct rows beside
 * it. Once the first pieces of a longer result have been answered the slot is held, in store.held, until every node has
 * pulled the rest, or given up. Of a job that outlives its daemons' processes every result is held, until every node has it
 * where it outlasts a daemon. Control thread only; the merge runs in the pool.
 *
 * There a node may contribute again: after a loss it does not know what has come. Pieces that are here stay; its last one
 * waits, or is answered from what is held. A node that has the result already contributes for the others, and waits
 * for nothing. A slot in which nobody waits is no round that is open: it ends without a word.
 */
#pragma once

#include "server/job/store.h"

/* What a node has brought. */
struct rows_node {
	uint64_t n_pieces; /* 0: nothing yet */
	uint64_t n;	   /* rows of its list, */
	uint32_t step;	   /* and of each piece but the last */
	uint64_t n_here;
	struct reduce_piece *pieces; /* by number; of those that are here */
	struct block **blocks;
	struct delivery *last; /* the call of the last piece, while others are missing */
	uint64_t charged;      /* to the slot for it */
	uint64_t n_pulled;     /* pieces of the result, beyond the first */
	bool gone;	       /* wants no more, or has all */
	struct list link;      /* in job->nodes[].rows, while it has brought something */
};

struct rows {
	struct slot *slot;
	struct data_rows list; /* the first contribution's: rows, width and step count */
	size_t row_len;
	uint64_t charged;  /* for this and the results' array */
	uint64_t slot_len; /* what the slot is charged with for itself */
	/* The merge's, which goes on from run to run of its task. */
	struct reduce_work work; /* of struct slot */
	struct reduce_list *lists;
	struct reduce_cursor *cursors, cursor;
	struct reduce_merge merge;
	uint32_t n_checked; /* lists, */
	uint64_t n_filled;  /* and rows of the result */
	int status;	    /* 0, QUOTA_E_FULL, -ENOMEM, or -EINVAL: */
	uint32_t bad_node;  /* who brought a list in disorder */
	uint64_t n;	    /* rows of the result, */
	uint64_t n_results;
	struct block **results; /* pieces */
	struct rows_node nodes[];
};

/*
 * Takes a contribution apart, and writes into its header what all contributions to the round have to have in common, so
 * that it can be compared like any other: part 0, the bytes of a row as part_len, those of the table as total. Returns 0,
 * or -EPROTO with failure filled.
 */
int rows_parse(const struct job *job, struct delivery *delivery, struct data_piece *ret_piece,
	       struct failure *failure);
/*
 * A piece of a node that may have contributed before (flags: DATA_ROWS_*). Returns whether that is all there is to do:
 * then it has been answered, or waits.
 */
bool rows_again(struct tensor *tensor, struct delivery *delivery, const struct data_piece *piece,
		uint32_t part, unsigned flags);
/* Whether this piece is here. */
bool rows_has(const struct slot *slot, uint32_t node, uint32_t part);
/*
 * Puts a piece that is new into its slot; it has been charged. Answers it unless it is the last one. Returns 0,
 * QUOTA_E_FULL, -ENOMEM, or -EPROTO when it is of another list than the node's pieces before (then it has not been
 * answered). flags: DATA_ROWS_*. *ret_complete: the node has brought all.
 */
int rows_take(struct slot *slot, struct delivery *delivery, const struct data_piece *piece,
	      uint32_t part, unsigned flags, bool *ret_complete);
/* All nodes have brought all. May end the job. */
void rows_start(struct slot *slot);
/* Whether it is of rows, and nobody waits for its result. */
bool rows_is_idle(const struct slot *slot);
/* A node has attached, perhaps again: what it had brought to open rounds comes again, and may be cut otherwise. */
void rows_attached(struct job *job, uint32_t node);
/* The round is over for this node, so all nodes have its result. */
void rows_past(struct round *round, uint32_t node);
/* A PULL of a node that attach_check() has passed. */
void rows_pull(struct job *job, struct delivery *delivery);
/* For the sweep: a slot in store.held, when nodes may have left. */
void rows_visit(struct job *job, struct list *link, uint64_t now_ns);
/* A node wants nothing of this round any more: it has all, or the round has failed. */
void rows_give_up(struct job *job, uint32_t node, uint64_t key, uint64_t round);
/* Answers what is not in slot->from. */
void rows_fail(struct slot *slot, int status, const char *text);
/* Returns NULL; takes NULL. */
struct rows *rows_free(struct slot *slot);
