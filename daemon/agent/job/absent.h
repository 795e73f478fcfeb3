/*
 * Ranks that are not back after a restart of the daemon, and whether their processes still live: absent.c. Private to agent/.
 */
#pragma once

#include "agent/job/report.h"
#include "base/loop/loop.h"
#include "tensor/tensor.h"

struct agent;
struct agent_job;

/* How often a job is looked at. */
#define AGENT_ABSENT_NS NSEC_PER_SEC

/* The look at a job that is under way. */
struct agent_absence {
	struct list link;		      /* absences.waiting */
	uint32_t next;			      /* ranks below have been looked at */
	uint32_t gone;			      /* the first whose process has ended, or RANK_AWAY */
	uint32_t gone_pid;		      /* that process */
	struct agent_ranks_text all, unknown; /* unknown: those whose process may have ended */
};

/* What was found counts no more: the look begins with the first rank, also where it is under way. */
static inline void agent_absence_begin(struct agent_absence *absence)
{
	absence->next = 0;
	absence->gone = RANK_AWAY;
	absence->all = absence->unknown = (struct agent_ranks_text){ 0 };
}

/* Jobs that want to be looked at, in turns. */
struct agent_absences {
	struct loop_timer timer; /* armed while some wait */
	struct list waiting;
	uint64_t not_before_ns; /* nobody is looked at */
};

/*
 * The timer of a job that waits for ranks to come back calls this; the look sets the timer again. A job goes on without a rank
 * whose process has ended, if it may; else, or when the other ranks are late, the job fails in words.
 */
void agent_absent_look(struct agent_job *job);
void agent_absent_close(struct agent *agent);
