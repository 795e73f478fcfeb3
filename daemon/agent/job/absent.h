/*
 * Ranks that are not back after a restart of the daemon, and whether their processes still live: absent.c. Private to agent/.
 */
#pragma once

#include "agent/job/report.h"
#include "base/loop/loop.h"

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

/* Jobs that want to be looked at, in turns. */
struct agent_absences {
	struct loop_timer timer; /* armed while some wait */
	struct list waiting;
	uint64_t not_before_ns; /* nobody is looked at */
};

/*
 * By the timer of a job that waits for ranks to come back, which is set again at the end. The job goes on without a rank whose process
 * has ended, if it may; else, or when the rest is late, it fails in words.
 */
void agent_absent_look(struct agent_job *job);
void agent_absent_close(struct agent *agent);
