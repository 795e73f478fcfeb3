/*
 * At the home of a job nodes come, disagree, are late; the job gets its number and placement. Any
 * of the functions may end the job. Control thread only.
 */
#pragma once

#include "base/error.h"

struct block;
struct delivery;
struct job;
struct past;
struct peer;
struct server;

/* At the home: what nodes have said in their JOINs, and the answer. */
struct forming {
	uint32_t epoch, part_bytes;
	uint64_t view_digest;
	uint64_t timeout_ms, since_ns; /* of the first JOIN */
	uint32_t asked_part_bytes;
	struct block *
		answer; /* of a job that outlives its daemons' processes, and of one that regrouped; or NULL */
	struct past *past; /* what the answer says of nodes, once somebody has asked; or NULL */
};

/* A JOIN has come. */
void form_join(struct server *server, struct delivery *delivery);
/* One that has waited for a run to end comes again, behind others from there that wait. */
void form_join_later(struct server *server, struct delivery *delivery);
/* No more are taken: those that wait are answered. One whose peer is lost is so in its turn. */
void form_joins_end(struct server *server, const struct failure *failure);
void form_expired(struct job *job);
/* All nodes are here, and their joins kept: gives the job its number and placement, and answers. Returns 0 or -errno with words. */
int form_finish(struct job *job, struct failure *failure);
/* Nodes of a peer, or of any that is lost (NULL), take no part any more. */
void form_lost(struct job *job, const struct peer *peer);
