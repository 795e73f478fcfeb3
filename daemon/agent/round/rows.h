/*
 * Rounds of push_pull_rows. Private to agent/.
 *
 *	SORT	in the pool: the local ranks' rows are copied, checked, sorted and reduced; on one node that is the result
 *	PUSH	the rows of each server go there in pieces; the call of the last piece brings the first of the result
 *	PULL	the other pieces of the results
 *	MERGE	in the pool: the servers' results, in the order of rows, go to each local rank that has room
 *	AGREE	of a job that outlives its daemons' processes: all nodes have the result
 *
 * Inputs are as they were until all nodes agree. So until then all can be done again: when a server was lost its rows are
 * sorted and pushed once more, when servers have changed all rows are, to where they belong now. A node that has the
 * result already does it for the others alone. That it has, the ledger says, for the next process.
 *
 * A row belongs to a server by its place: rows go to the stripes of the job's placement in groups, so that the rows in
 * use are spread wherever they are in the table.
 */
#pragma once

#include "agent/round/part.h"
#include "reduce/reduce.h"

/* Bytes of neighbouring rows that stay together: a small table costs one message, not one to each server. */
#define ROWS_GROUP_BYTES (64u << 10)

enum agent_rows_step { ROWS_NEW, ROWS_SORT, ROWS_PUSH, ROWS_PULL, ROWS_MERGE, ROWS_AGREE };

/* Towards one server, and back. */
struct agent_rows_server {
	bool in_use;	   /* rows of the table belong to it */
	bool due;	   /* its rows are to be pushed, and its result to be had */
	bool lost;	   /* what it had is gone: once more */
	uint64_t attempt;  /* the newest of the round's in which it is due; 0: none */
	uint64_t n;	   /* rows that go there */
	uint64_t n_pieces; /* of them */
	struct block **pieces;
	uint64_t n_filled; /* rows that are in them */
	/* Its result. */
	uint64_t n_result, n_result_pieces;
	uint32_t result_step;
	uint64_t charged; /* for it */
	struct block **result_blocks;
	struct reduce_piece *result; /* in the blocks */
};

struct agent_rows {
	struct agent_round *round;
	enum agent_rows_step step;
	struct task task;
	bool working;		      /* on it */
	struct agent_rows_work *work; /* the task's, between its runs */
	uint64_t n_rows, per_group, first_stripe;
	uint32_t width, push_step;
	size_t row_len;
	struct quota *quota; /* the job's */
	uint64_t charged;
	uint64_t n_result;  /* rows, once known */
	bool repeats;	    /* some may be at servers from before */
	struct list jolted; /* to be looked at, as a server was lost */
	uint64_t attempt;   /* counts, from 1 on */
	bool has_result;    /* in the outputs, and the ledger says so */
	bool agreeing;	    /* there is a part that says so; it is not a piece of rows */
	bool agreed;
	struct ledger_round ledger;
	/* The task's outcome. */
	int status;
	char text[160];
	/* Where the next part comes from. */
	size_t next_server;
	uint64_t next_piece;
	/* The job's, as rows were cut. A server that knows of another placement refuses them. */
	uint16_t *stripes; /* a reference */
	uint32_t epoch;
	size_t n_servers; /* 0: on this node alone */
	struct agent_rows_server *servers;
};

/* Whether it is a piece of rows: of such a round, but not the part by which nodes agree. */
static inline bool agent_part_is_rows(const struct agent_part *part)
{
	return part->round->rows && part->extent.block != DATA_ROWS_DONE;
}

/* A job that is made: what its rounds hold goes by and by. */
void agent_rows_init(struct agent_job *job);
/* Begins a round that was just set moving. */
void agent_rows_start(struct agent_round *round);
/* One that had no room while others' memory was on its way out: that is gone. */
void agent_rows_go_on(struct agent_round *round);
/* The round fails: it waits for room no more. */
void agent_rows_give_up(struct agent_round *round);
/* A part or a task of a moving round is done with: begins the next step, if it is time. Returns false when there is nothing to do. */
bool agent_rows_continue(struct agent_round *round);
/* What these n servers had of the job's rounds is gone, or is to go elsewhere. */
void agent_rows_lost(struct agent_job *job, size_t first, size_t n);
/* A piece was lost with its connection. */
void agent_rows_part_lost(struct agent_part *part);
/* Whether what is said of a piece that has been pushed counts no more. */
bool agent_rows_is_past(const struct agent_part *part);
/* A part of such a round is about to be freed. */
void agent_rows_part_end(const struct agent_part *part);
/* DATA_ROWS_* for its pieces. */
uint32_t agent_rows_flags(const struct agent_rows *rows);
/* The next piece to be pushed or pulled, as a part. Returns false at the end of the step. */
bool agent_rows_next(struct agent_rows *rows, struct extent *ret_extent);
/* A part begins: sets what it pushes, for the part to release; NULL for a pull. */
void agent_rows_begin(struct agent_part *part);
/*
 * An answer without an error has come. Returns 0; -EPROTO when it cannot be one to this part; -EDQUOT or -ENOMEM, with
 * words, when the result cannot be held.
 */
int agent_rows_answered(struct agent_part *part, struct failure *failure);
/* Whether a request that was told of a good end has to be told of none: its result does not fit. */
const struct failure *agent_rows_verdict(const struct agent_round *round,
					 struct agent_request *request,
					 struct failure *ret_failure);
/* The same of a result of so many rows: tells the request of them. Returns whether they fit; else with words. */
bool agent_rows_outcome(const struct agent_tensor *tensor, struct agent_request *request,
			uint64_t n_rows, struct failure *ret_failure);

/* rows_work.c, in the pool: runs until all is done, and sets rows->status, and words. */
void agent_rows_sort(struct task *task);
void agent_rows_merge(struct task *task);
/* What is left when the pool has gone before the last run. Returns NULL; takes NULL. */
struct agent_rows_work *agent_rows_work_free(struct agent_rows_work *work);
/* Rows that the local ranks gave, repeats counted. Control thread, too. */
uint64_t agent_rows_n_given(const struct agent_rows *rows);

/* Returns NULL; takes NULL. */
struct agent_rows *agent_rows_free(struct agent_rows *rows);
