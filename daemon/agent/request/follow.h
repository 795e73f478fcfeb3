/*
 * Ranks that follow the others. Private to agent/.
 */
#pragma once

#include "base/error.h"
#include <stdint.h>

struct data_header;
struct agent_job;
struct agent_member;
struct agent_round;

struct agent_following {
	uint32_t n_here;      /* ranks of this node that follow; */
	uint64_t turn;	      /* the highest that any rank here is in; 0: none has said; */
	uint32_t n_idle;      /* and ranks here that are idle in it */
	uint32_t n_elsewhere; /* ranks of all other nodes that follow, as the home says */
	uint64_t done;	      /* the last turn in which all ranks of the job were idle */
	uint64_t since;	      /* how often a rank here has begun to follow */
	bool tells_open;      /* the sweep that is under way tells of the rounds that are open */
};

/* Whether somebody is to hear of rounds that begin. */
static inline bool agent_follow_any(const struct agent_following *following)
{
	return following->n_here || following->n_elsewhere;
}

/*
 * A member has come to a round, which perhaps begins with it. Ranks here that follow and have not come to it are told, and the home
 * for those of other nodes; unless it was begun by such ranks alone, who have heard of it.
 */
void agent_follow_came(struct agent_round *round, const struct agent_member *member, bool begins);
/* The same of one that is open as somebody begins to follow. */
void agent_follow_open(const struct agent_round *round);
/* DATA_OTHERS_FOLLOW, DATA_OTHERS_BEGUN. how: not NULL: they will not all follow. */
void agent_follow_heard(struct agent_job *job, const struct data_header *header,
			const struct failure *how);
void agent_follow_begun(const struct agent_job *job, const struct data_header *header,
			const void *name);
/* A rank has left the job, perhaps: those that follow hear so. */
void agent_follow_look(struct agent_job *job);
/* The member is in the job no more. */
void agent_follow_gone(struct agent_member *member);
