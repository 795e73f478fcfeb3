/*
 * The peers that speak for a job's nodes, one for each that speaks for any. A job holds them (peer_hold()): one that is lost stays
 * until the job has heard so, which jobs do by turns, a few in one go. Each is found at once, whatever the number of nodes.
 * Control thread only.
 */
#pragma once

#include "base/list.h"
#include "base/map.h"

struct job;
struct peer;

struct job_peer {
	struct map_entry entry; /* in job->peers, by address */
	struct peer *peer;
	uint32_t n_nodes; /* that it speaks for, */
	uint32_t node;	  /* and the last that it has begun to speak for */
	bool is_said;	  /* the log has that it is lost */
	uint64_t walk;	  /* the last in which it was met */
};

/* NULL: it speaks for none of the job's nodes. */
struct job_peer *job_peer_find(const struct job *job, const struct peer *peer);
/* A node that peer speaks for, or NODE_NONE. */
uint32_t job_node_of(const struct job *job, const struct peer *peer);
/* From here on peer, also one that is lost, speaks for the node; NULL: nobody does, which never fails. Returns 0, -ENOMEM or -EDQUOT. */
int job_peer_set(struct job *job, uint32_t node, struct peer *peer);
/*
 * A walk over the job's nodes in which each peer is met once, however many of them it speaks for: begins one, and returns its
 * number. Another walk may begin once this one is over.
 */
uint64_t job_peers_walk(const struct job *job);
/* Whether the peer speaks for a node of the job, and is met for the first time in this walk. NULL may be given. */
bool job_peer_meet(const struct job *job, const struct peer *peer, uint64_t walk);
/* For all nodes nobody speaks any more: the job is to be freed. */
void job_peers_done(struct job *job);
/* Peers of the job are lost: it is to hear so, by and by or when it is asked for. */
void job_is_to_hear(struct job *job);
/*
 * A job that was found: it hears of what is lost before anything else is done with it. Returns the job, or NULL where it is over
 * by that, and perhaps gone. NULL may be given.
 */
struct job *job_heard(struct job *job);
