/*
 * Ranks that follow the others, at the job's home. Control thread only.
 */
#pragma once

#include "base/error.h"
#include "proto/data.h"

struct job;

/* What a node has said of its ranks: how many follow; in which turn the first is, and how many are idle in that turn. */
struct node_following {
	uint32_t n, n_idle;
	uint64_t turn;
};

struct notified_round;

/* The same of all nodes. */
struct job_following {
	uint32_t n;
	uint64_t done;			 /* the last turn in which all ranks were idle */
	uint32_t n_idle;		 /* in the one after it */
	uint64_t since;			 /* how often rounds have had to be passed on anew */
	struct notified_round *notified; /* rounds that were passed on since; or NULL. held_new() */
	struct failure over; /* status not 0: a rank has left the job, so not all will follow */
};

/* What a node says of its ranks. how: not NULL: one has left. */
void follow_heard(struct job *job, uint32_t node, const struct data_header *header,
		  const struct failure *how);
/* A node has begun a round: passed on to nodes with ranks that follow. */
void follow_begun(struct job *job, uint32_t node, const struct data_header *header,
		  const void *payload);
/* A node has attached, perhaps by another process: the node says anew which of its ranks follow, and hears of the others. */
void follow_attached(struct job *job, uint32_t node);
/* A node has left the job: not all ranks will follow any more. */
void follow_departed(struct job *job);
/* A tensor's name is free: its rounds are to count from 1 once more. */
void follow_forgotten(struct job *job);
void follow_free(struct job *job);
