/*
 * The daemon's process may die when it has told some of its ranks of the run that has begun when they regrouped, and not
 * others: bps-recovery(7), ELASTIC JOBS. Those bring the ledger of the run before, and newcomers none; the run that was told
 * has them by their processes, and they are told now. No round of it can have completed: each needs every rank. Called by
 * resume.c, and by regroup.c when a newcomer has come. Control thread only.
 */
#include "base/log.h"
#include "pipeline/job.h"

static bool waits_for_ranks(const struct pipeline_job *job)
{
	return job->state == JOB_FORMING && job->resumption.resumed && job->shape.elastic &&
	       !job->layout.size;
}

struct pipeline_job *pipeline_untold_find(struct pipeline *pipeline, const char *name,
					  const uint8_t *secret_digest)
{
	struct pipeline_job *job;

	list_for_each (job, &pipeline->jobs, link)
		if (waits_for_ranks(job) && pipeline_job_is(job, name, secret_digest))
			return job;
	return NULL;
}

/* One that no process is seen of, as of another container, is as good as any other such. */
static bool may_be(const struct ledger *ledger, uint32_t rank, uint32_t pid)
{
	uint32_t was;
	enum process_state state = ledger_look(ledger, rank, &was);

	return was == pid && (state == PROCESS_ALIVE || (state == PROCESS_UNKNOWN && !pid)) &&
	       !ledger_has_left(ledger, rank) && !ledger_out(ledger, rank);
}

bool pipeline_untold_place(const struct pipeline_job *job, struct pipeline_join *join)
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
		if (!job->members[local] && may_be(job->resumption.ledger, rank, join->pid)) {
			join->rank = rank;
			join->local_rank = local;
			found = true;
		}
		local++;
	}
	return found;
}

/* It is in no job, and found to be in this one. */
static void take(struct pipeline_job *job, struct pipeline_member *member,
		 const struct pipeline_join *join)
{
	struct failure failure;

	if (pipeline_room_join(job, member, &failure)) {
		member->ended(member, 0, &failure);
		pipeline_job_fail(job, &failure, NULL);
		return;
	}
	log_notice("job %s: rank %u had not heard that ranks have regrouped", job->owner.name,
		   join->rank);
	pipeline_job_add(job, member, join, job->forming_timeout_ns);
}

static void take_members(struct pipeline_job *job, struct pipeline_job *before)
{
	struct failure failure;

	(void)failure_set(&failure, -ESTALE, "job %s: its ranks have regrouped without this one",
			  job->owner.name);
	for (uint32_t i = 0; i < before->shape.local_size; i++) {
		struct pipeline_member *member = before->members[i];
		struct pipeline_join join = { .cannot_resume = before->resumption.ends };

		if (!member)
			continue;
		join.pid = member->pid;
		pipeline_job_detach(member);
		if (job->state != JOB_FORMING)
			member->ended(member, 0, &job->end.failure);
		else if (pipeline_untold_place(job, &join))
			take(job, member, &join);
		else
			member->ended(member, 0, &failure);
	}
	pipeline_job_over(before);
}

/* One of those who wait to be let in, and were. Ends what else waits for the job if that cannot be. */
static bool take_newcomer(struct pipeline_job *job)
{
	struct pipeline_newcomer *newcomer;

	list_for_each (newcomer, &job->pipeline->newcomers, link) {
		struct pipeline_join join = { .pid = newcomer->pid };
		struct pipeline_member *member = newcomer->member;

		if (!pipeline_newcomer_is_for(newcomer, job->owner.name,
					      job->owner.secret_digest) ||
		    !pipeline_untold_place(job, &join))
			continue;
		pipeline_elastic_forget(member);
		join.cannot_resume = member->charge(member, job->distributed);
		take(job, member, &join);
		return true;
	}
	return false;
}

static struct pipeline_job *find_before(const struct pipeline_job *job)
{
	struct pipeline_job *before;

	list_for_each (before, &job->pipeline->jobs, link)
		if (before != job && waits_for_ranks(before) &&
		    pipeline_job_is(before, job->owner.name, job->owner.secret_digest))
			return before;
	return NULL;
}

void pipeline_untold_take(struct pipeline_job *job)
{
	struct pipeline_job *before;

	if (!waits_for_ranks(job))
		return;
	before = find_before(job);
	if (before)
		take_members(job, before);
	while (waits_for_ranks(job) && take_newcomer(job))
		;
}

void pipeline_untold_let_in(struct pipeline *pipeline, const char *name,
			    const uint8_t *secret_digest)
{
	struct pipeline_job *job = pipeline_untold_find(pipeline, name, secret_digest);

	if (!job)
		return;
	pipeline_untold_take(job);
	if (job->state == JOB_FORMING)
		pipeline_resume_form(job);
}
