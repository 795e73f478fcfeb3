/*
 * Which servers a job goes on with. Any of the functions may end the job. Control thread only.
 */
#pragma once

#include "base/error.h"
#include "proto/data.h"

struct attach;
struct job;
struct peer;

/* Which servers the job goes on with: move.c. */
struct placement {
	bool fresh; /* the job had begun before this process did, or goes on with other servers */
	uint32_t *
		moves; /* how often each server has gone and come; elastic: behind them, who is gone; NULL: never */
	bool came_back; /* the job had gone on without this server */
	/* Elastic: `moves` with ranks that are said to be gone, which no attach has said yet. */
	uint32_t *notified_moves;
	uint64_t notified_ns; /* when all were told of ranks that are gone */
	size_t n_moves;
	uint32_t own_number; /* of this server among them */
	/* Servers that are not in the job's view; one-based, which of them this is; 0: none. */
	struct data_added_set added;
	uint32_t own_added;
	uint32_t data_epoch; /* data_moves_epoch() */
};

/*
 * An attach that knows of other servers than the job here: the job is made anew, and *ret_job set. Returns 0; or -ESHUTDOWN and
 * other -errno with failure filled, when it is the attach that is behind, or does not fit.
 */
int move_attach(struct job **job, const struct attach *attach, struct peer *peer,
		struct failure *failure);
/* Whether what the header says belongs to the job as it is now. */
bool move_is_current(const struct job *job, const struct data_header *header);
/* A MOVE of a node. May end the job here. */
void move_notice(struct job *job, const struct peer *from, const struct data_header *header,
		 const void *payload);
/* Takes what an attach says of servers and ranks. Returns 0 or -ENOMEM. */
int move_begin(struct job *job, const struct attach *attach);
/* Tells one node, which has attached, of what this server knows, or is to be known. */
void move_tell_node(struct job *job, uint32_t node, const uint32_t *moves, size_t n);
/* Tells all nodes that are here but one of what this server knows, or is to be known. */
void move_tell(struct job *job, const struct peer *except, const uint32_t *moves, size_t n);
/* Of its `moves`, how many are about servers. */
size_t move_n_servers(const struct job *job);
/* Asks all nodes to go on without this server. Returns whether there is another. */
bool move_drain(struct job *job);
