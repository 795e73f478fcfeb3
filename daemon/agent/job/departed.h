/*
 * Ranks and nodes that leave a job in good order. Private to agent/.
 */
#pragma once

#include "base/error.h"
#include "base/loop/loop.h"

struct peer;
struct agent_job;

/* Ranks and nodes that leave in good order: departed.c. */
struct agent_departures {
	struct failure
		failure;    /* status not 0: a rank has left, nothing can be submitted any more */
	uint8_t *ranks;	    /* by local number: this rank has left */
	uint32_t n_leaving; /* members that wait for their requests */
	uint32_t n_before;  /* ranks that had left before the job was resumed */
	bool due;	    /* members that leave are looked at: one may have no requests */
	struct chore letting_go; /* what members that leave, or regroup, have declared, */
	bool lets_go;		 /* of which there is more */
	bool unsaid; /* all ranks here have left, and no server was there to be told, or not yet */
	bool *nodes; /* n_nodes: others that have left */
};

/* departed.c: nodes that leave in good order. */
/* Once the layout is known, and before the job attaches. Returns 0 or -ENOMEM. */
int agent_departed_init(struct agent_job *job);
bool agent_departed_has(const struct agent_job *job, uint32_t node);
/* A server says so; node: as it came from outside. */
void agent_departed_heard(struct agent_job *job, uint64_t node);
/* Tells a server whose process may be fresh that the node has left, if it has. Returns whether it has. */
bool agent_departed_again(const struct agent_job *job, size_t server, uint32_t node);
/* A server of a job that nodes have left asks to be told when nothing of the job is under way here. */
void agent_departed_stopping(struct agent_job *job, const struct peer *peer);
/* A round has ended, or failed: tells those that asked, if it was the last. */
void agent_departed_idle(struct agent_job *job);
void agent_departed_tell_idle(struct peer *peer, uint64_t number, uint32_t node);
/* This node leaves: to every server that is still there. */
void agent_departed_say(struct agent_job *job);
/* A server that was asked in answers when the job is over here: nobody else would tell it. */
void agent_departed_asked(const struct agent_job *job, struct peer *peer);
