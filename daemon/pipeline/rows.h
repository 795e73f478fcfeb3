/*
 * Rounds of push_pull_rows. Private to pipeline/.
 *
 *	SORT	in the pool: the local ranks' rows are copied, checked, sorted and reduced; on one node that is the result
 *	PUSH	the rows of each server go there in pieces; the call of the last piece brings the first of the result
 *	PULL	the other pieces of the results
 *	MERGE	in the pool: the servers' results, in the order of rows, go to each local rank that has room
 *
 * A row belongs to a server by its place: rows go to the stripes of the job's placement in groups, so that the rows in
 * use are spread wherever they are in the table.
 */
#pragma once

#include "pipeline/part.h"
#include "reduce/reduce.h"

/* Bytes of neighbouring rows that stay together: a small table costs one message, not one to each server. */
#define ROWS_GROUP_BYTES (64u << 10)

enum pipeline_rows_step { ROWS_NEW, ROWS_SORT, ROWS_PUSH, ROWS_PULL, ROWS_MERGE, ROWS_DONE };

/* Towards one server, and back. */
struct pipeline_rows_server {
	bool in_use;	   /* rows of the table belong to it */
	uint64_t n;	   /* rows that go there */
	uint64_t n_pieces; /* of them */
	struct block **pieces;
	uint64_t n_filled; /* rows that are in them */
	/* Its result. */
	uint64_t n_result, n_result_pieces;
	uint32_t result_step;
	struct block **result_blocks;
	struct reduce_piece *result; /* in the blocks */
};

struct pipeline_rows {
	struct pipeline_round *round;
	enum pipeline_rows_step step;
	struct task task;
	bool working; /* on it */
	uint64_t n_rows, per_group, first_stripe;
	uint32_t width, push_step;
	size_t row_len;
	struct quota *quota; /* the job's */
	uint64_t charged;
	uint64_t n_result; /* rows, once known */
	/* The task's outcome. */
	int status;
	char text[160];
	/* Where the next part comes from. */
	size_t next_server;
	uint64_t next_piece;
	const uint16_t *stripes; /* the job's, as it began */
	size_t n_servers;	 /* 0: on this node alone */
	struct pipeline_rows_server servers[];
};

/* Begins a round that was just set moving. */
void pipeline_rows_start(struct pipeline_round *round);
/* Begins the next step of a moving round that has no parts. Returns false when there is nothing more to do. */
bool pipeline_rows_continue(struct pipeline_round *round);
/* The next piece to be pushed or pulled, as a part. Returns false at the end of the step. */
bool pipeline_rows_next(struct pipeline_rows *rows, struct extent *ret_extent);
/* A part begins: what it pushes, for the part to release; NULL for a pull. */
struct block *pipeline_rows_take(struct pipeline_rows *rows, const struct extent *extent);
/*
 * An answer without an error has come. Returns 0; -EPROTO when it cannot be one to this part; -EDQUOT or -ENOMEM, with
 * words, when the result cannot be held.
 */
int pipeline_rows_answered(struct pipeline_part *part, struct failure *failure);
/* Whether a request that was told of a good end has to be told of none: its result does not fit. */
const struct failure *pipeline_rows_verdict(const struct pipeline_round *round,
					    struct pipeline_request *request,
					    struct failure *ret_failure);
/* The same of a result of so many rows: tells the request of them. Returns whether they fit; else with words. */
bool pipeline_rows_outcome(const struct pipeline_tensor *tensor, struct pipeline_request *request,
			   uint64_t n_rows, struct failure *ret_failure);
/* Rows of the result, once it is there. */
uint64_t pipeline_rows_n(const struct pipeline_rows *rows);
/* Returns NULL; takes NULL. */
struct pipeline_rows *pipeline_rows_free(struct pipeline_rows *rows);
