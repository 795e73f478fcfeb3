/*
 * Ranks of an elastic job, and how its next run begins. Any of the functions may end the job.
 * Control thread only.
 */
#pragma once

#include "base/clock.h"
#include "base/list.h"

struct delivery;
struct job;
struct job_node;
struct join;
struct peer;
struct server;
struct slot;

/* Ranks of an elastic job: elastic.c, regroup.c, joiner.c. */
struct membership {
	bool elastic;
	uint32_t min_ranks, max_ranks;
	uint32_t first;		/* at the home, of a run that began when ranks regrouped */
	struct list joiners;	/* at the home: struct joiner */
	bool takes_joiners;	/* the run began with some */
	bool succeeded;		/* the next run has its place among the server's jobs */
	uint32_t n_gone, n_out; /* ranks, and nodes without ranks, that are */
	uint64_t
		regroup_by_ns; /* when all must have said that they regroup; CLOCK_NEVER: none has */
	uint64_t regroups;     /* number of the run before, whose ranks regrouped; 0: none */
};

/* A node that has no rank in the job, and newcomers who wait for the next run. */
struct joiner {
	struct list link;  /* membership.joiners, in the order in which they came */
	struct peer *peer; /* held */
	struct join *join;
	struct delivery *joining;
};

/* elastic.c */
/* Takes from placement.moves who is gone: nodes without ranks are as if they had left. */
void elastic_begin(struct job *job);
/*
 * Asks the other nodes of an elastic job to go on without nodes that are lost, or have left. Returns false when the job is not
 * elastic, or no node would be left.
 */
bool elastic_without_lost(struct job *job, uint64_t now);
bool elastic_without_absent(struct job *job);
bool elastic_without_departed(struct job *job);
bool elastic_without_late(struct job *job);
/* A node has left before it had attached: no round is to wait for it. */
void elastic_without_early(struct job *job);
/* The same with nodes that have not contributed in time. */
bool elastic_without_missing(struct job *job, const struct slot *slot);
/* What a node knows of ranks that are gone: others hear of it. May end the job. */
void elastic_notice(struct job *job, const struct peer *from, const uint32_t *moves);
/* A node that has attached hears what was said while it was away. */
void elastic_attached(struct job *job, uint32_t node);
/* Counts the ranks that are not said to be gone of each node, once, when placement.moves are there. */
void elastic_count(struct job *job);
/* Whether all ranks of a node are said to be gone. */
bool elastic_is_gone(const struct job *job, uint32_t node);

/* regroup.c */
void regroup_expired(struct job *job);
/* regroup.c: a JOIN of a node whose ranks regroup; takes the join. May end the job. */
void regroup_join(struct server *server, struct join *join, struct delivery *delivery);

/* rejoin.c: a JOIN for a job that runs. Returns whether it is taken. */
bool rejoin(struct job *job, const struct join *join, struct delivery *delivery);
/* What waits of this node is answered. */
void rejoin_end(struct job_node *node, int status, const char *text);

/* successor.c */
/* The run that has followed that of this number, or NULL. */
struct job *successor_of(struct server *server, uint64_t number);
/* A JOIN of a node that is to be in this run, as far as it knows: tells it. */
void successor_tell(struct job *successor, const struct join *join, struct delivery *delivery);
/* Whether a JOIN is of a node whose newcomers have been let into this run, without having heard of it: it is told. */
bool successor_tell_joiner(struct job *successor, const struct join *join,
			   struct delivery *delivery);
/* A node has attached: those of the run before that wait here are told. */
void successor_attached(struct job *successor);

/* joiner.c */
/* A JOIN of a node whose newcomers are to be in the next run of a job; takes the join. */
void joiner_join(struct server *server, struct join *join, struct delivery *delivery);
void joiner_free(struct joiner *joiner);
/* Tells a node of the job how many newcomers wait at joiners. */
void joiner_tell(const struct job *job, struct peer *peer);
/* Whether newcomers of a peer wait for the job. */
bool joiner_is(const struct job *job, const struct peer *peer);
/* Those of peers that are lost wait no more. */
void joiner_lost(struct job *job);
/* They wait for the job in its place. */
void joiner_go_on(struct job *job, struct job *old);
/* The job is over. */
void joiner_end(struct job *job);
