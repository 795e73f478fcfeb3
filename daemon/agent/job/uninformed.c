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

static bool is_here(const struct agent_job *job, uint32_t rank)
{
	return !job->resumption.node_of_rank ||
	       job->resumption.node_of_rank[rank] == job->shape.node;
}

bool agent_uninformed_place(const struct agent_job *job, struct agent_join *join)
{
	uint32_t local = 0;
	bool found = false;

	if (ledger_has_begun(job->resumption.ledger))
		return false;
	/* They are told in their order: of several in one process it is the last of whom nobody has heard. */
	for (uint32_t rank = 0; rank < job->shape.size && local < job->shape.local_size; rank++) {
		if (!is_here(job, rank))
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

/* -- Many that are told together ----------------------------------------------------------------------------------- */

struct place {
	uint32_t pid, rank, local;
	/* Of the first with this pid: so many of them may still be the process that was looked for last. */
	uint32_t n_left;
	bool looked_for;
	struct process_seen process;
};

/* The ranks of this node, by pid, so that each is looked at once, whatever number of processes are looked for. */
struct places {
	const struct agent_job *job;
	struct place *
		sorted; /* by pid, then by rank; NULL: nobody was looked for, or there is no memory */
	uint32_t n;
};

static int compare(const void *a, const void *b)
{
	const struct place *x = a, *y = b;

	return x->pid != y->pid ? (x->pid > y->pid) - (x->pid < y->pid)
				: (x->rank > y->rank) - (x->rank < y->rank);
}

static void places_sort(struct places *places)
{
	const struct agent_job *job = places->job;
	uint32_t n = 0;

	places->sorted = calloc(job->shape.local_size, sizeof(places->sorted[0]));
	if (!places->sorted)
		return;
	for (uint32_t rank = 0; rank < job->shape.size && n < job->shape.local_size; rank++) {
		if (!is_here(job, rank))
			continue;
		places->sorted[n] = (struct place){
			.pid = ledger_pid(job->resumption.ledger, rank),
			.rank = rank,
			.local = n,
		};
		n++;
	}
	places->n = n;
	qsort(places->sorted, n, sizeof(places->sorted[0]), compare);
}

/* How many have a smaller pid. */
static uint32_t n_below(const struct places *places, uint64_t pid)
{
	uint32_t low = 0, high = places->n;

	while (low < high) {
		uint32_t middle = low + (high - low) / 2;

		if (places->sorted[middle].pid < pid)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static bool is_same(const struct process_seen *a, const struct process_seen *b)
{
	return a->started == b->started && a->state == b->state;
}

/* As agent_uninformed_place(). What is found is taken, or nothing more is looked for. */
static bool places_find(struct places *places, struct agent_join *join)
{
	const struct agent_job *job = places->job;
	struct place *first;
	uint32_t at;

	if (!places->sorted)
		places_sort(places);
	if (!places->sorted || ledger_has_begun(job->resumption.ledger))
		return agent_uninformed_place(job, join);
	at = n_below(places, join->process.pid);
	if (at == places->n || places->sorted[at].pid != join->process.pid)
		return false;
	first = &places->sorted[at];
	if (!first->looked_for || !is_same(&first->process, &join->process)) {
		first->n_left = n_below(places, (uint64_t)join->process.pid + 1) - at;
		first->looked_for = true;
		first->process = join->process;
	}
	while (first->n_left) {
		const struct place *place = &first[--first->n_left];

		if (job->members[place->local] ||
		    !may_be(job->resumption.ledger, place->rank, &join->process))
			continue;
		join->rank = place->rank;
		join->local_rank = place->local;
		return true;
	}
	return false;
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

static void take_members(struct agent_job *job, struct agent_job *before, struct places *places)
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
		else if (places_find(places, &join))
			take(job, member, &join);
		else
			member->ended(member, 0, &failure);
	}
	agent_job_over(before);
}

/* The newcomer takes its place; one that the quota has no room for fails the job. */
static void take_newcomer(struct agent_job *job, struct agent_newcomer *newcomer,
			  struct agent_join *join)
{
	struct agent_member *member = newcomer->member;

	agent_elastic_forget(member);
	join->cannot_resume = member->charge(member, job->distributed);
	take(job, member, join);
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

static void take_newcomers(struct agent_job *job, struct places *places)
{
	struct agent_newcomer *newcomer, *next;

	list_for_each_safe (newcomer, next, &job->agent->newcomers, link) {
		struct agent_join join = { .process = newcomer->process };

		if (!waits_for_ranks(job))
			return;
		/* Its process was a rank of the job. */
		if (agent_newcomer_is_for(newcomer, job->owner.name, job->owner.secret_digest) &&
		    places_find(places, &join))
			take_newcomer(job, newcomer, &join);
	}
}

void agent_uninformed_take(struct agent_job *job)
{
	struct places places = { .job = job };
	struct agent_job *before;

	if (!waits_for_ranks(job))
		return;
	before = find_before(job);
	if (before)
		take_members(job, before, &places);
	take_newcomers(job, &places);
	free(places.sorted);
}

void agent_uninformed_let_in(struct agent_newcomer *newcomer)
{
	struct agent_job *job =
		agent_uninformed_find(newcomer->agent, newcomer->job, newcomer->secret_digest);
	struct agent_join join = { .process = newcomer->process };

	if (!job)
		return;
	if (agent_uninformed_place(job, &join))
		take_newcomer(job, newcomer, &join);
	if (job->state == JOB_FORMING)
		agent_resume_form(job);
}
