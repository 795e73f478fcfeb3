/*
 * Ranks and nodes that leave a job in good order. Private to pipeline/.
 */
#pragma once

#include "base/error.h"

struct peer;
struct pipeline_job;

/* Ranks and nodes that leave in good order: left.c. */
struct pipeline_departures {
	struct failure
		failure;    /* status not 0: a rank has left, nothing can be submitted any more */
	uint8_t *ranks;	    /* by local number: this rank has left */
	uint32_t n_leaving; /* members that wait for their requests */
	uint32_t n_before;  /* ranks that had left before the job was resumed */
	bool due;	    /* members that leave are looked at: one may have no requests */
	bool unsaid;	    /* all ranks here have left, and no server was there to be told */
	bool *nodes;	    /* n_nodes: others that have left */
};

/* left.c: nodes that leave in good order. */
/* Once the layout is known, and before the job attaches. Returns 0 or -ENOMEM. */
int pipeline_left_init(struct pipeline_job *job);
bool pipeline_left_has(const struct pipeline_job *job, uint32_t node);
/* A server says so; node: as it came from outside. */
void pipeline_left_heard(struct pipeline_job *job, uint64_t node);
/* A server has attached: tells it who has left, where it may not know. */
void pipeline_left_attached(struct pipeline_job *job, size_t server);
/* A server of a job that nodes have left asks to be told when nothing of the job is under way here. */
void pipeline_left_stopping(struct pipeline_job *job, const struct peer *peer);
/* A round has ended, or failed: tells those that asked, if it was the last. */
void pipeline_left_idle(struct pipeline_job *job);
void pipeline_left_tell_idle(struct peer *peer, uint64_t number, uint32_t node);
/* This node leaves: to every server that is still there. */
void pipeline_left_say(struct pipeline_job *job);
/* A server that was asked in answers when the job is over here: nobody else would tell it. */
void pipeline_left_asked(const struct pipeline_job *job, struct peer *peer);
