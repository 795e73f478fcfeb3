/*
 * Elastic jobs: they go on without a rank that dies, leaves or is late. See bps-recovery(7), ELASTIC JOBS.
 *
 * Inside, ranks keep the numbers that they have had since the run began. What a trainer is told, and says, counts only
 * those that are in the job: a number means something together with the membership in which it was counted. Memberships
 * are counted through all runs of the job; each change has its own.
 *
 * Over nodes, who is out stands in placement.moves behind the servers (move.c): whoever knows as much has the same data_epoch, and a
 * result is made by nodes of one data_epoch only, so of one set of ranks. When a rank is out every node attaches again, and
 * pushes again what is not committed: a reduction is committed on a node once all its results are retained there, and only
 * then is an output touched. Who has committed a round offers its results to the others and does not push it, so the round
 * ends with that set on all nodes; if nobody has, all of them do it again without the rank. Nothing has to be decided by one.
 *
 * Here is how a job loses ranks: job.c calls when one goes and when the job is formed, move.c with what other nodes say,
 * expire.c when one is late. rank_map.c counts those that are left, regroup.c takes in newcomers.
 */
#include "agent/round/round.h"
#include "base/log.h"

/* What the servers are told of who is out: in placement.moves, behind them. */
static uint32_t said_of(const struct agent_job *job, uint32_t rank)
{
	return job->placement.moves[job->fleet.n_viewed + rank];
}

/* Goes on without the ranks of this node that are gone. */
static void go_without(struct agent_job *job, const char *why)
{
	size_t n = agent_move_n(job);
	_cleanup_(freep) uint32_t *moves = calloc(n, sizeof(moves[0]));
	struct failure failure;

	if (!moves) {
		(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->owner.name);
		agent_job_fail(job, &failure, NULL);
		return;
	}
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		moves[job->fleet.n_viewed + job->layout.rank_of_local[i]] = job->membership.gone[i];
	agent_move_unite(job, moves, n, why);
}

void agent_elastic_settle(struct agent_job *job)
{
	if (job->distributed && job->membership.n_gone)
		go_without(job, "a rank has left");
}

void agent_elastic_recall(struct agent_job *job)
{
	if (!job->shape.elastic || !job->resumption.resumed)
		return;
	ledger_results_drop(job->resumption.ledger);
	job->membership.first = job->membership.number = ledger_membership(job->resumption.ledger);
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		uint32_t local = job->layout.local_of_rank[rank];

		job->membership.out[rank] = ledger_out(job->resumption.ledger, rank);
		job->membership.number = MAX(job->membership.number, job->membership.out[rank]);
		job->membership.n_out += job->membership.out[rank] != 0;
		/* Who knows better how it went says so. */
		if (job->membership.out[rank])
			job->placement.moves[job->fleet.n_viewed + rank] = DATA_MOVES_LOST;
		if (local == RANK_AWAY)
			continue;
		if (job->membership.out[rank] || ledger_has_departed(job->resumption.ledger, rank))
			job->membership.gone[local] = DATA_MOVES_LOST;
		job->membership.n_gone += job->membership.gone[local] && !job->membership.out[rank];
	}
}

/* Whether any rank of this node is in the job. */
static bool any_here(const struct agent_job *job)
{
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (!job->membership.out[job->layout.rank_of_local[i]])
			return true;
	return false;
}

/* A rank of this node lives, and the others go on without it. */
static void drop_here(struct agent_job *job, uint32_t index, const struct failure *why)
{
	struct agent_member *member = job->members[index];
	uint64_t number = job->number;

	job->membership.gone[index] = (uint8_t)said_of(job, member->rank);
	if (job->resumption.ledger)
		ledger_leave(job->resumption.ledger, member->rank);
	agent_job_detach(member);
	agent_round_exclude(job, index);
	agent_tensor_without(job);
	agent_round_without(job, index, why);
	if (member->leaving)
		member->departed(member);
	else
		member->ended(member, number, why);
}

/* More ranks are out. Returns whether the job goes on, and here. */
static bool goes_on(struct agent_job *job, bool lost, const char *why)
{
	struct failure failure;

	if (!any_here(job)) {
		/* The others go on: they hear no more than that. */
		agent_move_tell_all(job);
		job->membership.goes = true;
		(void)failure_set(&failure, -ESTALE,
				  "job %s goes on without the ranks of this node: %s",
				  job->owner.name, why);
		agent_job_fail(job, &failure, NULL);
		return false;
	}
	if (lost && (job->device || agent_elastic_size(job) < job->shape.min_ranks)) {
		(void)failure_set(&failure, -EPIPE, "job %s: %s, and %s", job->owner.name, why,
				  job->device ? "memory on a device cannot be missed"
					      : "the job has too few ranks left");
		agent_job_fail(job, &failure, NULL);
		return false;
	}
	return true;
}

void agent_elastic_go_on(struct agent_job *job, const char *why)
{
	struct failure failure;

	if (!job->shape.elastic || job->state != JOB_RUNNING)
		return;
	(void)failure_set(&failure, -ESTALE, "this rank was dropped from job %s: %s",
			  job->owner.name, why);
	agent_job_hold(job);
	for (uint32_t i = 0; i < job->layout.n_local && job->state == JOB_RUNNING; i++)
		if (job->members[i] && job->membership.out[job->layout.rank_of_local[i]])
			drop_here(job, i, &failure);
		else if (job->membership.out[job->layout.rank_of_local[i]])
			agent_round_exclude(job, i); /* it had left */
	agent_round_prolong(job);
	agent_elastic_try(job);
	agent_job_release(job);
}

bool agent_elastic_moved(struct agent_job *job, const char *why)
{
	struct agent_ranks_text names = { 0 };
	uint32_t n = 0;
	bool lost = false;

	for (uint32_t rank = 0; job->shape.elastic && rank < job->shape.size; rank++)
		n += said_of(job, rank) & 1 && !job->membership.out[rank];
	if (!n)
		return true;
	/* As many nodes have the same results know the same ranks: so the number is theirs, too. */
	job->membership.number += n;
	job->membership.n_out += n;
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		uint32_t local = job->layout.local_of_rank[rank];

		if (!(said_of(job, rank) & 1) || job->membership.out[rank])
			continue;
		lost |= said_of(job, rank) == DATA_MOVES_LOST;
		agent_ranks_add(&names, rank);
		job->membership.out[rank] = job->membership.number;
		ledger_set_out(job->resumption.ledger, rank, job->membership.number);
		if (local != RANK_AWAY)
			job->membership.n_gone -= job->membership.gone[local] != 0;
	}
	log_notice("job %s: %u of %u ranks from now on, without %s: %s", job->owner.name,
		   agent_elastic_size(job), job->shape.size, agent_ranks_end(&names), why);
	return goes_on(job, lost && job->state == JOB_RUNNING, why);
}

/* After a restart: some may have died, or others may have gone on without some, meanwhile. */
static void resumed_far(struct agent_job *job)
{
	if (job->membership.n_gone)
		go_without(job, "a rank has died or left");
	agent_elastic_go_on(job, "so the others said while this daemon was away");
}

/* The others do not know yet that this rank is gone. */
static void drop_far(struct agent_job *job, uint32_t index, const struct failure *failure,
		     bool leaves)
{
	if (job->membership.gone[index])
		return;
	job->membership.gone[index] = leaves ? DATA_MOVES_LEFT : DATA_MOVES_LOST;
	job->membership.n_gone++;
	if (!leaves)
		ledger_leave(job->resumption.ledger, job->layout.rank_of_local[index]);
	agent_job_hold(job);
	/*
	 * One that leaves is missed only when a round is to do without it: most often, all leave. What it has given to rounds that
	 * are under way counts.
	 */
	if (!leaves) {
		agent_round_exclude(job, index);
		go_without(job, failure->text);
	}
	if (job->state == JOB_RUNNING) {
		agent_tensor_without(job);
		agent_round_without(job, index, failure);
	}
	agent_job_release(job);
}

/* It had come back after a restart, and not all others have; or not all servers. When they are, the job goes on without it. */
static bool drop_resuming(struct agent_job *job, uint32_t index, uint32_t rank,
			  const struct failure *failure)
{
	if (!job->n_members || job->shape.size - job->departed.n_before <= job->shape.min_ranks)
		return false;
	log_notice("job %s: %s, and had just come back after a restart", job->owner.name,
		   failure->text);
	ledger_leave(job->resumption.ledger, rank);
	if (job->layout.size) {
		job->membership.n_gone += !job->membership.gone[index];
		job->membership.gone[index] = DATA_MOVES_LOST;
		return true;
	}
	job->departed.n_before++;
	agent_resume_form(job);
	return true;
}

bool agent_elastic_drop_forming(struct agent_job *job, uint32_t index, uint32_t rank,
				const struct failure *failure)
{
	if (!job->shape.elastic)
		return false;
	if (job->resumption.resumed)
		return drop_resuming(job, index, rank, failure);
	if (!job->placement.moves)
		return false;
	drop_far(job, index, failure, false);
	return true;
}

/* Some died while the ranks regrouped: the job goes on without them all at once. It has no rounds yet. */
static void drop_absent(struct agent_job *job)
{
	struct agent_ranks_text names = { 0 };
	size_t n_gone = job->membership.n_gone;
	struct failure failure;

	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		uint32_t rank = job->layout.rank_of_local[i];

		if (job->members[i] || job->membership.gone[i])
			continue;
		job->membership.gone[i] = DATA_MOVES_LOST;
		ledger_leave(job->resumption.ledger, rank);
		if (job->membership.out[rank])
			continue;
		job->membership.n_gone++;
		agent_ranks_add(&names, rank);
	}
	if (job->membership.n_gone == n_gone)
		return;
	(void)failure_set(&failure, -EPIPE, "%s of job %s died while the ranks regrouped",
			  agent_ranks_end(&names), job->owner.name);
	go_without(job, failure.text);
}

/* Some were lost before it had begun. */
static void check_size(struct agent_job *job)
{
	struct failure failure;

	if (job->state != JOB_RUNNING || agent_elastic_size(job) >= job->shape.min_ranks)
		return;
	(void)failure_set(
		&failure, -EPIPE,
		"job %s: %u ranks are left of those that regrouped, fewer than the %u that "
		"it needs",
		job->owner.name, agent_elastic_size(job), job->shape.min_ranks);
	agent_job_fail(job, &failure, NULL);
}

void agent_elastic_formed(struct agent_job *job)
{
	if (!job->shape.elastic)
		return;
	if (!job->resumption.resumed) {
		if (job->resumption.ledger)
			ledger_set_membership(job->resumption.ledger, job->membership.first);
		if (job->distributed)
			drop_absent(job);
		check_size(job);
		return;
	}
	if (job->distributed) {
		resumed_far(job);
		return;
	}
	job->membership.first = job->membership.number = ledger_membership(job->resumption.ledger);
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		job->membership.out[rank] = ledger_out(job->resumption.ledger, rank);
		/* It died while there was no daemon. */
		if (!job->membership.out[rank] && ledger_has_departed(job->resumption.ledger, rank))
			job->membership.out[rank] = UINT32_MAX;
		else
			job->membership.number =
				MAX(job->membership.number, job->membership.out[rank]);
		job->membership.n_out += job->membership.out[rank] != 0;
	}
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		if (job->membership.out[rank] != UINT32_MAX)
			continue;
		job->membership.out[rank] = ++job->membership.number;
		ledger_set_out(job->resumption.ledger, rank, job->membership.out[rank]);
	}
}

void agent_elastic_drop(struct agent_job *job, uint32_t index, const struct failure *failure,
			bool leaves)
{
	struct failure last;
	uint32_t rank;

	/* A job that is over may never have had a layout. */
	if (job->state != JOB_RUNNING)
		return;
	rank = job->layout.rank_of_local[index];
	if (job->membership.out[rank])
		return;
	if (job->distributed) {
		drop_far(job, index, failure, leaves);
		return;
	}
	job->membership.out[rank] = ++job->membership.number;
	job->membership.n_out++;
	if (job->resumption.ledger)
		ledger_set_out(job->resumption.ledger, rank, job->membership.out[rank]);
	if (job->resumption.ledger && !leaves)
		ledger_leave(job->resumption.ledger, rank);
	log_notice("job %s: %u of %u ranks from now on: %s", job->owner.name,
		   agent_elastic_size(job), job->shape.size, failure->text);
	if (!leaves && (job->device || agent_elastic_size(job) < job->shape.min_ranks)) {
		(void)failure_set(&last, failure->status, "%s, and %s", failure->text,
				  job->device ? "its memory on a device cannot be missed"
					      : "the job has too few ranks left");
		agent_job_fail(job, &last, NULL);
		return;
	}
	agent_job_hold(job);
	agent_tensor_without(job);
	agent_round_without(job, index, failure);
	agent_job_release(job);
}

void agent_elastic_drop_late(struct agent_job *job, uint32_t index, const struct failure *failure)
{
	struct agent_member *member = job->members[index];
	uint64_t number = job->number;
	struct failure why;

	(void)failure_set(&why, -ESTALE, "rank %u of job %s was dropped from it: %s",
			  job->layout.rank_of_local[index], job->owner.name, failure->text);
	agent_job_hold(job);
	if (member)
		agent_job_detach(member);
	agent_elastic_drop(job, index, &why, false);
	if (member)
		member->ended(member, number, &why);
	agent_elastic_try(job);
	agent_job_release(job);
}
