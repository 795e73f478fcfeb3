/*
 * The sweep of a job: takes to its rounds what has happened to all of them. job.h says what holds before it has come to one.
 * job.c begins it when the job fails, a rank leaves or its timer expires, declare.c when a tensor fails.
 *
 * Rounds are looked at from the head of the job's list and put behind its end, so that any of them may go, and others come,
 * between two of them; what has happened once more makes it go round once more from where it is. A sweep for deadlines has to
 * look at all rounds to find the next: it is put off so far that it takes but a small share of the thread, however many
 * deadlines there are.
 */
#include "agent/round/round.h"

/* A step is so many, of a job of few ranks; more of them cost little. */
#define SWEEP_STEP 16
/* As many ranks here, whose requests may end and who may hear of a round, take as long as a round. */
#define SWEEP_RANKS 64
/* Each round that was looked at in vain puts the next sweep for a deadline off: about ten times as long as the look takes. */
#define SWEEP_REST_NS NSEC_PER_USEC

/* What moves on this node alone is over in a moment, and well. */
static bool can_be_abandoned(const struct agent_round *round)
{
	return (round->state != ROUND_MOVING || round->job->distributed) &&
	       !agent_resume_moves(round->tensor, round->number);
}

/* Sums and copies on this node need no deadline. */
static bool has_deadline(const struct agent_round *round)
{
	return round->state != ROUND_MOVING || (round->job->distributed && !round->gate.scattering);
}

/* Returns whether that was enough for a step: a rank was dropped, which may have much to give back. */
static bool visit(struct agent_round *round, uint64_t now_ns)
{
	const struct failure *tensor_failure = &round->tensor->failure;
	struct agent_job *job = round->job;

	job->sweep.n_vain++;
	if (agent_round_settle(round))
		return false;
	if (job->following.tells_open && !job->end.failure.status)
		agent_follow_open(round);
	if (!job->end.failure.status && !agent_round_mend(round))
		return false;
	if (round->failure.status)
		return false;
	if (job->end.failure.status)
		agent_round_fail(round, &job->end.failure, false);
	else if (tensor_failure->status)
		agent_round_fail(round, tensor_failure, false);
	else if (job->sweep.leaves.status && can_be_abandoned(round))
		agent_round_fail(round, &job->sweep.leaves, true);
	else if (has_deadline(round) && round->times.deadline_ns <= now_ns)
		return agent_round_expire(round);
	else if (has_deadline(round))
		job->sweep.next_ns = MIN(job->sweep.next_ns, round->times.deadline_ns);
	return false;
}

static bool step(struct agent_job *job)
{
	uint64_t now_ns = clock_now_ns();

	if (job->resumption.suspended)
		return false;
	/* One may have a hundred thousand tensors. */
	if (job->end.failure.status && agent_job_dismiss(job))
		return true;
	for (size_t i = 0; i < SWEEP_STEP && job->sweep.n_to_come;
	     i += 1 + job->layout.n_local / SWEEP_RANKS) {
		struct agent_round *round = list_first(&job->rounds, struct agent_round, job_link);

		if (!round) {
			job->sweep.n_to_come = 0;
			break;
		}
		list_remove(&round->job_link);
		list_push_back(&job->rounds, &round->job_link);
		job->sweep.n_to_come--;
		if (visit(round, now_ns))
			break;
	}
	return job->sweep.n_to_come;
}

static void finish(struct agent_job *job)
{
	job->sweep.is_under_way = job->following.tells_open = false;
	job->sweep.not_before_ns = clock_now_ns() + SWEEP_REST_NS * job->sweep.n_vain;
	agent_job_watch(job, job->sweep.next_ns);
	agent_round_mended(job);
	agent_job_release(job);
}

static bool on_step(struct chore *chore)
{
	struct agent_job *job = container_of(chore, struct agent_job, sweep.chore);

	if (step(job))
		return true;
	finish(job);
	return false;
}

void agent_sweep(struct agent_job *job)
{
	job->sweep.n_to_come = job->n_open_rounds;
	job->sweep.next_ns = CLOCK_NEVER;
	job->sweep.n_vain = 0;
	if (job->sweep.is_under_way || (!job->sweep.n_to_come && !job->end.failure.status))
		return;
	job->sweep.is_under_way = true;
	job->sweep.chore.step = on_step;
	agent_job_hold(job);
	loop_begin(job->agent->params.loop, &job->sweep.chore);
}

void agent_sweep_finish(struct agent_job *job)
{
	if (!job->sweep.is_under_way)
		return;
	while (step(job))
		;
	loop_abort(&job->sweep.chore);
	finish(job);
}
