/*
 * Ranks that wait for one another. Private to agent/.
 */
#pragma once

#include "proto/types.h"
#include <stddef.h>
#include <stdint.h>

struct agent_job;
struct agent_request;
struct data_header;

/* A local rank. */
struct agent_blocked {
	struct agent_request *request; /* that it is blocked in, or NULL */
	uint64_t told_ns;	       /* when the home was told of it last; 0: never */
};

/* The newest pairs of ranks that are known. A rank that comes to one of their rounds later has no other to tell it: not all need have the tensor. */
#define AGENT_DEADLOCKS_KNOWN 16

/* Two ranks of the job that have waited for one another, and in which rounds; a round of 0 is none. */
struct agent_deadlock_known {
	char tensors[2][TENSOR_NAME_MAX + 1];
	uint64_t rounds[2];
	uint32_t ranks[2];
};

/* What ranks here are blocked in: deadlock.c. */
struct agent_deadlock {
	struct agent_blocked *ranks; /* by local number; NULL: none was ever blocked */
	uint32_t n_blocked;
	struct agent_deadlock_known
		*known;	  /* a ring, of those over several nodes; NULL: there was none */
	uint64_t n_known; /* ever */
};

/* A local rank is blocked in nothing any more. */
static inline void agent_deadlock_over(struct agent_deadlock *deadlock, uint32_t index)
{
	deadlock->n_blocked -= deadlock->ranks[index].request != NULL;
	deadlock->ranks[index].request = NULL;
}

/* The tensor is forgotten, and its rounds count from 1 again. */
static inline void agent_deadlock_forget(struct agent_deadlock *deadlock, const char *tensor)
{
	for (uint64_t i = 0; i < MIN(deadlock->n_known, (uint64_t)AGENT_DEADLOCKS_KNOWN); i++)
		for (unsigned j = 0; j < 2; j++)
			if (!strcmp(deadlock->known[i].tensors[j], tensor))
				deadlock->known[i].rounds[j] = 0;
}

/* The home says what a rank of another node is blocked in, or that two ranks wait for one another. */
void agent_deadlock_heard(struct agent_job *job, const struct data_header *header,
			  const void *payload);
