/*
 * The sweep of a job takes to all that it holds what has happened to the job: a node has left, all have offered what they keep, time
 * has passed, it is over. The first few are looked at at once; others in steps, in later turns of the loop, and other jobs have their
 * turns meanwhile. What it has not come to goes on as before. Control thread only.
 *
 * It goes along the job's lists one after the other. What has happened meanwhile makes it begin once more when it has ended; where it
 * has looked at many it rests before that, so that it takes but a small share of the thread, however often something happens.
 */
#pragma once

#include "base/loop/loop.h"
#include "proto/c.h"

struct job;

struct sweep {
	struct chore chore;
	bool going, ends; /* between begin and end; the job is over: all goes */
	bool asked; /* of an elastic job: nodes have been asked to go on without those that left */
	unsigned why, again;
	size_t stage;		/* the list that it goes along, */
	struct list *at;	/* and what it comes to next, or the list's head */
	size_t n;		/* that it has looked at, each as much as it may take */
	uint64_t next_ns;	/* the soonest deadline that it has seen */
	uint64_t not_before_ns; /* it does not begin, unless the job is over; 0: it may */
};

/* What has happened, as bits. */
enum sweep_why {
	SWEEP_TIME = 1, /* a deadline is over, or a round may go on without all */
	SWEEP_NEWS =
		2, /* a node has left, or is past a round; or all nodes have offered what they keep */
};

/* The job is held meanwhile. May end it; frees it, when it is over, with the last that it holds. */
void sweep(struct job *job, unsigned why);
/* The same, with no step now: ends nothing under the caller's feet. */
void sweep_later(struct job *job, unsigned why);
/* Of a job that is over: all of it now. Nobody else is served any more. May free it. */
void sweep_finish(struct job *job);
/* Something is about to go from one of the job's lists. */
void sweep_leave(struct job *job, const struct list *link);
/* What has been looked at has such a deadline. */
void sweep_until(struct job *job, uint64_t at_ns);
