/*
 * The daemon's process may die when it has told some of its ranks of the run that has begun when they regrouped, and not
 * others: bps-recovery(7), ELASTIC JOBS. Those bring the ledger of the run before, and newcomers none; the run that was told
 * has them by their processes, and they are told now. No round of it can have completed: each needs every rank. Called by
 * resume.c, and by regroup.c when a newcomer has come. Control thread only.
 */
#include "agent/job/job.h"
#include "base/log.h"

static bool waits_for_ranks(const struct agent_job *job)
{
	return job->state == JOB_FORMING && job->resumption.resumed && job->shape.elastic &&
	       !job->layout.size;
}

struct agent_job *agent_uninformed_find(struct agent *agent, const char *name,
					const uint8_t *secret_digest)
{
	struct agent_job *job;

	list_for_each (job, &agent->jobs, link)
		if (waits_for_ranks(job) && agent_job_is(job, name, secret_digest))
			return job;
	return NULL;
}

static bool may_be(const struct ledger *ledger, uint32_t rank, const struct process_seen *process)
{
	return ledger_may_be(ledger, rank, process) && !ledger_has_departed(ledger, rank) &&
	       !ledger_out(ledger, rank);
}

bool agent_uninformed_place(const struct agent_job *job, struct agent_join *join)
{
	uint32_t local = 0;
	bool found = false;

	if (ledger_has_begun(job->resumption.ledger))
		return false;
	/* They are told in their order: of several in one process it is the last of whom nobody has heard. */
	for (uint32_t rank = 0; rank < job->shape.size && local < job->shape.local_size; rank++) {
		if (job->resumption.node_of_rank &&
		    job->resumption.node_of_rank[rank] != job->shape.node)
			continue;
		if (!job->members[local] && may_be(job->resumption.ledger, rank, &join->process)) {
			join->rank = rank;
			join->local_rank = local;
			found = true;
		}
		local++;
	}
	return found;
}

/* It is in no job, and found to be in this one. */
static void take(struct agent_job *job, struct agent_member *member, const struct agent_join *join)
{
	struct failure failure;

	if (agent_quota_join(job, member, &failure)) {
		member->ended(member, 0, &failure);
		agent_job_fail(job, &failure, NULL);
		return;
	}
	log_notice("job %s: rank %u had not heard that ranks have regrouped", job->owner.name,
		   join->rank);
	agent_job_add(job, member, join, job->forming_timeout_ns);
}

static void take_members(struct agent_job *job, struct agent_job *before)
{
	struct failure failure;

	(void)failure_set(&failure, -ESTALE, "job %s: its ranks have regrouped without this one",
			  job->owner.name);
	for (uint32_t i = 0; i < before->shape.local_size; i++) {
		struct agent_member *member = before->members[i];
		struct agent_join join = { .cannot_resume = before->resumption.ends };

		if (!member)
			continue;
		join.process = member->process;
		agent_job_detach(member);
		if (job->state != JOB_FORMING)
			member->ended(member, 0, &job->end.failure);
		else if (agent_uninformed_place(job, &join))
			take(job, member, &join);
		else
			member->ended(member, 0, &failure);
	}
	agent_job_over(before);
}

/* The newcomer takes its place, if its process was a rank of the job; a place that the quota has no room for fails the job. */
static void take_newcomer(struct agent_job *job, struct agent_newcomer *newcomer)
{
	struct agent_join join = { .process = newcomer->process };
	struct agent_member *member = newcomer->member;

	if (!agent_uninformed_place(job, &join))
		return;
	agent_elastic_forget(member);
	join.cannot_resume = member->charge(member, job->distributed);
	take(job, member, &join);
}

static struct agent_job *find_before(const struct agent_job *job)
{
	struct agent_job *before;

	list_for_each (before, &job->agent->jobs, link)
		if (before != job && waits_for_ranks(before) &&
		    agent_job_is(before, job->owner.name, job->owner.secret_digest))
			return before;
	return NULL;
}

void agent_uninformed_take(struct agent_job *job)
{
	struct agent_newcomer *newcomer, *next;
	struct agent_job *before;

	if (!waits_for_ranks(job))
		return;
	before = find_before(job);
	if (before)
		take_members(job, before);
	if (!waits_for_ranks(job))
		return;
	list_for_each_safe (newcomer, next, &job->agent->newcomers, link) {
		if (!agent_newcomer_is_for(newcomer, job->owner.name, job->owner.secret_digest))
			continue;
		take_newcomer(job, newcomer);
		if (!waits_for_ranks(job))
			return;
	}
}

void agent_uninformed_let_in(struct agent_newcomer *newcomer)
{
	struct agent_job *job =
		agent_uninformed_find(newcomer->agent, newcomer->job, newcomer->secret_digest);

	if (!job)
		return;
	take_newcomer(job, newcomer);
	if (job->state == JOB_FORMING)
		agent_resume_form(job);
}
