/*
 * The memory that results of a job take in its ledger. A session is charged for the first of it when it joins; for more,
 * twice as much each time, when half is in use; and for less again where most has not been used for a while. Where all is in
 * use and a session's quota has no room for more, a round fails: it would wait for nodes that wait for it.
 */
#include "agent/round/part.h"

/* How often the agent looks for memory that is not needed any more. */
#define LOOK_NS (10 * NSEC_PER_SEC)
/* Memory goes back in steps, since parts wait meanwhile: 3 ms each, and some time between them. */
#define STEP_BYTES   (UINT64_C(64) << 20)
#define STEP_RESULTS 256u
#define STEP_NS	     (50 * NSEC_PER_MSEC)

/* No more than before: a session that has no room for what it was charged with all the same keeps no other from what it gets back. */
static void charge_fewer(struct agent_job *job, uint32_t n)
{
	uint64_t bytes = ledger_results_bytes(job->resumption.ledger, n);

	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->members[i])
			(void)job->members[i]->charge_more(job->members[i], bytes);
}

static int charge(struct agent_job *job, uint32_t n, uint32_t before)
{
	uint64_t bytes = ledger_results_bytes(job->resumption.ledger, n);
	uint32_t i;

	for (i = 0; i < job->layout.n_local; i++)
		if (job->members[i] && job->members[i]->charge_more(job->members[i], bytes))
			break;
	if (i == job->layout.n_local)
		return 0;
	bytes = ledger_results_bytes(job->resumption.ledger, before);
	while (i--)
		if (job->members[i])
			(void)job->members[i]->charge_more(job->members[i], bytes);
	return -EDQUOT;
}

static void look_again(struct agent_job *job, uint64_t in_ns)
{
	/* Without memory, what is charged stays so until the job's end. */
	(void)loop_timer_set(job->agent->params.loop, &job->retention.results_timer,
			     clock_now_ns() + in_ns);
}

/* A quarter was enough since the agent looked last: half of the memory goes. */
static void on_look(struct loop_timer *timer)
{
	struct agent_job *job = container_of(timer, struct agent_job, retention.results_timer);
	uint32_t step = (uint32_t)MIN(
		STEP_BYTES / align_up((uint64_t)ledger_result_bytes(job->resumption.ledger), 4096),
		(uint64_t)STEP_RESULTS);
	uint32_t first = ledger_results_first(job->resumption.ledger);
	uint32_t before = ledger_results_allowed(job->resumption.ledger), n = before;

	/* Or it is the next process's now. */
	if (job->state != JOB_RUNNING || job->resumption.suspended)
		return;
	/* First what the process before has left. */
	if (ledger_results_cool(job->resumption.ledger, MAX(step, 1u))) {
		look_again(job, STEP_NS);
		return;
	}
	if (before <= first)
		return;
	if (before <= job->retention.results_target)
		job->retention.results_target =
			ledger_results_peak(job->resumption.ledger) <= before / 4
				? MAX(before / 2, first)
				: before;
	if (before > job->retention.results_target)
		n = ledger_results_trim(
			job->resumption.ledger,
			MAX(before - MIN(MAX(step, 1u), before), job->retention.results_target));
	/* The rest is in use. */
	if (n == before)
		job->retention.results_target = n;
	charge_fewer(job, n);
	if (n > first)
		look_again(job, n > job->retention.results_target ? STEP_NS : LOOK_NS);
}

void agent_quota_init(struct agent_job *job)
{
	job->retention.results_timer.expired = on_look;
}

void agent_quota_done(struct agent_job *job)
{
	loop_timer_cancel(&job->retention.results_timer);
}

void agent_quota_formed(struct agent_job *job)
{
	if (!job->resumption.ledger || !ledger_is_far(job->resumption.ledger))
		return;
	job->retention.results_target = ledger_results_allowed(job->resumption.ledger);
	if (ledger_results_cool(job->resumption.ledger, 0))
		look_again(job, STEP_NS);
	else if (job->retention.results_target > ledger_results_first(job->resumption.ledger))
		look_again(job, LOOK_NS);
}

int agent_quota_join(struct agent_job *job, struct agent_member *member, struct failure *failure)
{
	uint32_t n;

	if (!job->resumption.ledger || !ledger_is_far(job->resumption.ledger))
		return 0;
	n = ledger_results_allowed(job->resumption.ledger);
	if (!member->charge_more(member, ledger_results_bytes(job->resumption.ledger, n)))
		return 0;
	return failure_set(failure, -EDQUOT,
			   "job %s: session_quota has no room for the %u results that its ledger "
			   "may have",
			   job->owner.name, n);
}

int agent_quota_for(struct agent_job *job, uint32_t n)
{
	uint32_t now = ledger_results_allowed(job->resumption.ledger);
	uint32_t more = n > now ? MAX(n, 2 * now) : now;

	more = MIN(more, ledger_n_results(job->resumption.ledger));
	if (more <= now)
		return 0;
	while (charge(job, more, now)) {
		if (more <= n || more <= now + 1)
			return -EDQUOT;
		more = MAX(n, now + (more - now) / 2);
	}
	ledger_results_allow(job->resumption.ledger, more);
	job->retention.results_target = more;
	look_again(job, LOOK_NS);
	return 0;
}

int agent_quota_look(struct agent_job *job)
{
	return ledger_results_scarce(job->resumption.ledger)
		       ? agent_quota_for(job, ledger_results_allowed(job->resumption.ledger) + 1)
		       : 0;
}

uint32_t agent_quota_result_bytes(const struct agent_job *job)
{
	uint64_t at;

	if (!stragglers_any(&job->shape.stragglers))
		return job->part_bytes;
	at = data_contributors_end(job->part_bytes, job->shape.n_nodes);
	return (uint32_t)align_up(at, PART_ALIGN) + job->part_bytes;
}
