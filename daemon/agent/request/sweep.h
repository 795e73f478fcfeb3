/*
 * How what has happened to a job is taken to its rounds. Private to agent/.
 */
#pragma once

#include "base/error.h"
#include "base/loop/loop.h"

struct agent_job;

/* How what has happened to the job is taken to its rounds: sweep.c. */
struct agent_sweep {
	struct chore chore;
	struct loop_timer timer;
	bool is_under_way;
	size_t n_to_come;	/* rounds that the sweep has yet to come to */
	size_t n_vain;		/* at which the sweep has looked */
	uint64_t next_ns;	/* the soonest deadline that the sweep has seen */
	uint64_t not_before_ns; /* the sweep does not begin for a deadline */
	struct failure leaves;	/* status not 0: the first that left, and what rounds fail with */
	struct failure **
		without; /* by local number, or NULL: why the sweep takes the rank out of rounds; */
	uint32_t n_without; /* there are so many */
	bool tells_idle;    /* servers that stop, when nothing is under way */
};

/*
 * Something has happened to the job that rounds end by: it is over, a rank has left it, a tensor of it has failed, time has
 * passed. Or a rank begins to follow the others, and is told of open rounds (following.tells_open). Each open round is brought in line
 * with that, once from now on, in steps in later turns of the loop; the job is held meanwhile. Members of a job that has failed are
 * told first, one in a step. A round that the sweep has not come to goes on as before: between what has happened and that nothing new
 * is submitted to a job that is over or left, and a round of a job that is over does not end well.
 */
void agent_sweep(struct agent_job *job);
/* All of it now: nobody else is served any more. */
void agent_sweep_finish(struct agent_job *job);
