/*
 * A job goes on with another daemon process: bps-recovery(7), RESTART. What is here is about jobs and tensors; parts that were
 * under way are continued where parts begin (round.c, part.c).
 */
#include "agent/round/rows.h"
#include "base/failpoint.h"
#include "base/log.h"
#include <fcntl.h>
#include <inttypes.h>

/* Failures of older rounds are not told one by one. */
#define PAST_BITS 64u
/* Those of the pool, and the control thread. */
static unsigned n_threads(const struct agent *agent)
{
	return pool_n_threads(agent->params.pool) + 1;
}

uint64_t agent_ledger_bytes(const struct agent *agent, bool through_servers, uint64_t *ret_most)
{
	uint64_t bytes = ledger_bytes(n_threads(agent));

	*ret_most = bytes;
	if (!through_servers)
		return bytes;
	if (!agent->params.resume)
		return 0;
	bytes = ledger_far_bytes(n_threads(agent), agent->params.max_tensors);
	*ret_most = bytes + LEDGER_RESULTS_BYTES;
	return bytes;
}

const char *agent_resume_ends(const struct agent_job *job)
{
	if (job->device)
		return "it has handed over memory of a device";
	if (job->resumption.ledger || job->state == JOB_FORMING)
		return NULL;
	return job->resumption.ends ?: "it could not be recorded";
}

bool agent_can_resume(const struct agent_member *member)
{
	const struct agent_job *job = member->job;

	return job && job->state != JOB_OVER && job->resumption.ledger && !job->device;
}

/* -- Jobs --------------------------------------------------------------------------------------------------------- */

static void keep_processes(const struct agent_job *job)
{
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->members[i])
			ledger_set_process(job->resumption.ledger, job->members[i]->rank,
					   &job->members[i]->process);
}

static int charge_ledger(struct agent_job *job)
{
	return error_trace(
		ledger_charge_to(job->resumption.ledger, &job->memory.held,
				 account_quota(job->memory.account, ACCOUNT_DESCRIPTORS)));
}

int agent_resume_prepare(struct agent_job *job)
{
	int r;

	if (job->resumption.resumed) {
		job->part_bytes = ledger_part_bytes(job->resumption.ledger);
		for (uint32_t i = 0; i < job->layout.n_local; i++)
			job->departed.ranks[i] = ledger_has_departed(job->resumption.ledger,
								     job->layout.rank_of_local[i]);
		keep_processes(job);
		return 0;
	}
	if (job->resumption.ends)
		return 0;
	r = ledger_new(job->number, job->shape.size, job->part_bytes, n_threads(job->agent), NULL,
		       &job->resumption.ledger, &job->resumption.ledger_fd);
	if (!r)
		r = charge_ledger(job);
	if (r)
		return error_trace(r);
	keep_processes(job);
	return 0;
}

int agent_resume_prepare_far(struct agent_job *job, const void *record, size_t len)
{
	struct ledger_far far = {
		.record = record,
		.record_len = len,
		.n_tensors = job->agent->params.max_tensors,
		.result_bytes = agent_quota_result_bytes(job),
	};
	int r;

	r = ledger_new(job->number, job->shape.size, job->part_bytes, n_threads(job->agent), &far,
		       &job->resumption.ledger, &job->resumption.ledger_fd);
	if (!r)
		r = charge_ledger(job);
	if (r)
		return error_trace(r);
	keep_processes(job);
	return 0;
}

void agent_resume_form(struct agent_job *job)
{
	struct failure failure;
	int r;

	if (!job->distributed) {
		agent_job_form_here(job);
		return;
	}
	if (job->n_members + job->departed.n_before < job->shape.local_size || job->layout.size)
		return;
	r = layout_init(&job->layout, job->resumption.node_of_rank, job->shape.size,
			job->shape.n_nodes, job->shape.node);
	if (!r)
		r = agent_job_order_members(job);
	if (!r) {
		for (uint32_t i = 0; i < job->layout.n_local; i++)
			job->departed.ranks[i] = ledger_has_departed(job->resumption.ledger,
								     job->layout.rank_of_local[i]);
		keep_processes(job);
		r = job->agent->hooks->attaches_again(job);
	}
	if (!r)
		return;
	(void)failure_set(&failure, r, "job %s: cannot go on after the daemon's restart: %s",
			  job->owner.name, strerror(-r));
	agent_job_fail(job, &failure, NULL);
}

int agent_resume_check_new(const struct agent_job *job, const struct agent_join *join,
			   struct failure *failure)
{
	if (job->state != JOB_FORMING || !job->resumption.resumed ||
	    !ledger_has_begun(job->resumption.ledger))
		return 0;
	return failure_set(
		failure, -EEXIST,
		"job %s: goes on after the daemon's restart as soon as all its ranks are "
		"back, and rank %u cannot begin anew",
		join->job, join->rank);
}

/* Ranks that are nodes of their own have each its ledger. */
static struct agent_job *find_run(struct agent *agent, const struct agent_join *join,
				  uint64_t number)
{
	struct agent_job *job;

	list_for_each (job, &agent->jobs, link)
		if (job->state != JOB_OVER && job->resumption.resumed && job->number == number &&
		    !strcmp(job->owner.name, join->job) &&
		    (!stragglers_any(&join->stragglers) || job->shape.node == join->node))
			return job;
	return NULL;
}

/* The ranks that had left count as there; the first of them is why nothing new can be submitted. */
static void take_departed(struct agent_job *job)
{
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		if (!ledger_has_departed(job->resumption.ledger, rank))
			continue;
		if (!job->departed.n_before++ && !job->shape.elastic)
			(void)failure_set(&job->departed.failure, -EPIPE, "rank %u has left job %s",
					  rank, job->owner.name);
	}
}

static int check_departed(const struct ledger *ledger, const struct agent_join *join,
			  struct failure *failure)
{
	if (ledger_has_departed(ledger, join->rank))
		return failure_set(failure, -EEXIST, "job %s: rank %u has left it", join->job,
				   join->rank);
	return 0;
}

/*
 * Ranks of an elastic job may come back as of two runs, if the daemon's process died while it told them of the next: uninformed.c. Returns
 * that of the others who wait for it, and whether it is the next.
 */
static struct agent_job *find_other_run(struct agent *agent, const struct agent_join *join,
					const struct ledger *ledger, bool *ret_is_next)
{
	struct agent_job *job;

	if (!join->elastic)
		return NULL;
	job = agent_uninformed_find(agent, join->job, join->secret_digest);
	if (!job || ledger_is_far(job->resumption.ledger) != ledger_is_far(ledger) ||
	    ledger_membership(job->resumption.ledger) == ledger_membership(ledger))
		return NULL;
	*ret_is_next = ledger_membership(job->resumption.ledger) > ledger_membership(ledger);
	return job;
}

static int make_in_place(struct agent *agent, const struct agent_join *join,
			 struct agent_job *other, struct agent_job **ret_job)
{
	int r = agent_job_make(agent, join, ret_job);

	if (r || other->memory.account != join->account)
		return error_trace(r);
	(*ret_job)->memory.counted = other->memory.counted;
	other->memory.counted = false;
	return 0;
}

/*
 * The job of the first rank that comes back: a new one, or one that ranks without a past have begun to form; or the next run, in
 * which join->rank and join->local_rank are others.
 */
static int begin(struct agent *agent, struct agent_join *join, uint64_t number, int fd,
		 struct agent_job **ret_job, struct failure *failure)
{
	struct agent_job *job = agent_job_find(agent, join), *other;
	_cleanup_(ledger_freep) struct ledger *ledger = NULL;
	_cleanup_(fd_closep) int kept = -1;
	struct agent_join through = *join;
	bool through_servers, is_next = false;
	int r;

	r = ledger_open(fd, number, join->size, n_threads(agent), agent->params.max_tensors,
			&ledger, failure);
	through_servers = join->n_nodes > 1 || join->force_distributed;
	if (!r && join->elastic)
		through_servers = ledger_is_far(ledger);
	if (!r && ledger_is_far(ledger) != through_servers)
		r = failure_set(failure, -EPROTO, "job %s: its ledger is of another kind of job",
				join->job);
	if (r)
		return r;
	/* Ranks that have regrouped may be on one node now. */
	through.force_distributed |= join->elastic && through_servers;
	r = check_departed(ledger, join, failure);
	if (r)
		return r;
	other = find_other_run(agent, join, ledger, &is_next);
	if (other && is_next && agent_uninformed_place(other, join)) {
		*ret_job = other;
		return 0;
	}
	if (other && !is_next && job == other)
		job = NULL;
	kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (kept < 0)
		return failure_set(failure, -errno, "cannot keep the ledger: %s", strerror(errno));
	/* Who has the run's ledger goes on with it, whoever has begun a job of that name meanwhile. */
	if (job && (job->state != JOB_FORMING || job->layout.size || job->resumption.resumed ||
		    ledger_has_begun(ledger)))
		job = NULL;
	if (job)
		r = agent_join_compare(job, join, failure);
	else if (other) /* in its place */
		r = make_in_place(agent, &through, other, &job);
	else
		r = agent_job_new(agent, &through, &job, failure);
	if (r && other && !job)
		return failure_set(failure, r, "job %s: %s", join->job, strerror(-r));
	if (r)
		return r;
	/* Ranks that had not heard of its beginning have asked for a new one. */
	job->agent->hooks->join_withdrawn(job);
	job->resumption.resumed = true;
	job->resumption.began_ns = clock_now_ns();
	job->number = number;
	agent->n_changes++;
	job->resumption.ledger = TAKE_PTR(ledger);
	job->resumption.ledger_fd = TAKE_FD(kept);
	if (charge_ledger(job))
		r = agent_job_no_memory(job, EDQUOT, failure);
	if (!r && job->distributed)
		r = job->agent->hooks->servers_recalled(job, failure);
	if (r) {
		struct failure why = *failure;

		agent_job_fail(job, &why, NULL);
		return r;
	}
	take_departed(job);
	log_info("job %s: run %016" PRIx64 ": rank %u is the first to come back after a restart",
		 job->owner.name, job->number, join->rank);
	*ret_job = job;
	return 0;
}

/* The job of another rank that came back before. */
static int compare(const struct agent_job *job, const struct agent_join *join, int fd,
		   struct failure *failure)
{
	int r;

	r = agent_join_compare(job, join, failure);
	if (r)
		return r;
	if (!ledger_is(job->resumption.ledger, fd))
		return failure_set(failure, -EPROTO,
				   "job %s: rank %u brings another ledger than the rank before it",
				   join->job, join->rank);
	/* From when they are, its members are in the order of their ranks. */
	if (job->state != JOB_FORMING || job->layout.size)
		return failure_set(failure, -EEXIST, "job %s: all its ranks are back already",
				   join->job);
	return check_departed(job->resumption.ledger, join, failure);
}

int agent_resume(struct agent *agent, struct agent_member *member, const struct agent_join *given,
		 uint64_t number, int ledger, struct failure *failure)
{
	struct agent_job *job;
	struct agent_join join;
	bool is_first;
	int r;

	r = agent_join_take(agent, given, &join, failure);
	if (r)
		return r;
	if (!number)
		return failure_set(failure, -EPROTO,
				   "job %s: not one that can be resumed: it has no ledger",
				   join.job);
	job = find_run(agent, &join, number);
	is_first = !job;
	if (job)
		r = compare(job, &join, ledger, failure);
	else
		r = begin(agent, &join, number, ledger, &job, failure);
	if (r)
		return r;

	r = agent_quota_join(job, member, failure);
	if (r) {
		struct failure why = *failure;

		/* It cannot go on without that rank. */
		agent_job_fail(job, &why, NULL);
		return r;
	}
	FAILPOINT("resume-accepted");
	if (job->number != number)
		log_notice("job %s: rank %u had not heard that ranks have regrouped",
			   job->owner.name, join.rank);
	agent_job_add(job, member, &join, AGENT_ABSENT_NS);
	member->resumed = job->number == number;
	if (is_first)
		agent_uninformed_take(job);
	if (job->state == JOB_FORMING)
		agent_resume_form(job);
	return 0;
}

void agent_suspend(struct agent *agent)
{
	struct agent_job *job;

	agent_elastic_close(agent, NULL);

	list_for_each (job, &agent->jobs, link) {
		agent_job_leave_now(job);
		/* A ledger knows nothing of devices. */
		if (job->state == JOB_OVER || !job->resumption.ledger || job->device)
			continue;
		log_info("job %s: run %016" PRIx64 ": left to the next daemon process",
			 job->owner.name, job->number);
		job->resumption.suspended = true;
		job->state = JOB_OVER;
		loop_timer_cancel(&job->sweep.timer);
		ledger_stop(job->resumption.ledger);
	}
}

/* What waits for servers ends with the connections to them. */
static size_t n_working(const struct agent_round *round)
{
	const struct agent_part *part;
	size_t n = round->rows && round->rows->working;

	list_for_each (part, &round->parts, link)
		n += part->posted;
	return n;
}

size_t agent_n_suspended(const struct agent *agent)
{
	const struct agent_round *round;
	const struct agent_job *job;
	size_t n = 0;

	list_for_each (job, &agent->jobs, link) {
		if (!job->resumption.suspended)
			continue;
		list_for_each (round, &job->schedule.moving, moving_link)
			n += job->distributed ? n_working(round) : round->n_parts;
	}
	return n;
}

/* -- Tensors ------------------------------------------------------------------------------------------------------ */

int agent_resume_past(struct agent_member *member, struct agent_tensor *tensor,
		      const struct agent_past *past, struct failure *failure)
{
	struct agent_job *job = tensor->job;

	if (!past || !past->rounds)
		return 0;
	if (!member->resumed)
		return failure_set(failure, -EPROTO,
				   "tensor %s: rank %u cannot have seen %" PRIu64
				   " rounds in a job that has just begun",
				   tensor->name, member->rank, past->rounds);
	if (!tensor->pasts)
		tensor->pasts =
			held_new(&job->memory.held, job->layout.n_local * sizeof(tensor->pasts[0]));
	if (!tensor->pasts)
		return agent_job_no_memory(job, errno, failure);
	tensor->pasts[member->index] = *past;
	tensor->reached[member->index] = past->rounds;
	tensor->seen = true; /* by the process before: forget.c */
	if (!list_linked(&tensor->behind))
		list_push_back(&job->resumption.behind, &tensor->behind);
	if (past->rounds > tensor->past_rounds) {
		tensor->past_rounds = past->rounds;
		job->agent->hooks->rounds_known(tensor);
	} else {
		agent_job_let_leave(job);
	}
	return 0;
}

uint64_t agent_resume_newest(const struct agent_tensor *tensor)
{
	uint64_t newest = 0;

	for (uint32_t i = 0; tensor->pasts && i < tensor->job->layout.n_local; i++) {
		const struct agent_past *past = &tensor->pasts[i];
		unsigned age = past->failed == UINT64_MAX
				       ? PAST_BITS
				       : (unsigned)__builtin_ctzll(~past->failed);

		if (past->rounds > age && age < PAST_BITS)
			newest = MAX(newest, past->rounds - age);
	}
	return newest;
}

static bool is_behind(const struct agent_tensor *tensor)
{
	const struct agent_job *job = tensor->job;
	uint64_t newest = agent_resume_newest(tensor);

	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->members[i] && tensor->reached[i] < newest)
			return true;
	return false;
}

bool agent_resume_caught_up(struct agent_job *job)
{
	struct agent_tensor *tensor;

	/* One that is not behind stays so, unless a rank says more of its past. */
	while ((tensor = list_first(&job->resumption.behind, struct agent_tensor, behind))) {
		if (is_behind(tensor))
			return false;
		list_remove(&tensor->behind);
	}
	return true;
}

/* Whether some rank had seen it end well; then it is done on every rank. */
static bool ended_well(const struct agent_tensor *tensor, uint64_t round)
{
	for (uint32_t i = 0; i < tensor->job->layout.n_local; i++) {
		const struct agent_past *past = &tensor->pasts[i];
		uint64_t age = past->rounds - round;

		if (round <= past->rounds && age < PAST_BITS && !(past->failed >> age & 1))
			return true;
	}
	return false;
}

void agent_resume_outcome(const struct agent_tensor *tensor, struct agent_request *request,
			  struct failure *ret_failure)
{
	uint64_t round = request->round, n_rows;

	if (request->operation == OPERATION_PUSH_PULL_ROWS && request->width &&
	    ledger_find_rows(tensor->job->resumption.ledger, tensor->name, round, &n_rows))
		(void)tensor->job->agent->hooks->rows_ended(tensor, request, n_rows, ret_failure);
	else if (!ended_well(tensor, round))
		(void)failure_set(ret_failure, -ECONNRESET,
				  "tensor %s, round %" PRIu64
				  ": it had failed before the daemon restarted",
				  tensor->name, round);
}

/*
 * Of push_pull_rows, which is otherwise done again from the start, ranks are told how many rows there are, and some that
 * they had no room: what the first has heard, the others must hear after a restart. Through servers other nodes are told that this
 * one has the result.
 */
int agent_resume_record_rows(struct agent_round *round, struct failure *failure)
{
	const struct agent_tensor *tensor = round->tensor;
	struct ledger *ledger = tensor->job->resumption.ledger;
	struct ledger_facts facts = {
		.tensor = tensor->name,
		.round = round->number,
		.dtype = tensor->dtype,
		.operation = OPERATION_PUSH_PULL_ROWS,
		.reduction = round->reduction,
	};

	if (!ledger)
		return 0;
	facts.elements = round->rows->n_result;
	return ledger_round_begin(ledger, &round->rows->ledger, &facts, failure);
}

void agent_resume_finish_rows(struct agent_round *round)
{
	/* Nobody is to hear of a good end. */
	if (round->failure.status)
		ledger_round_end(&round->rows->ledger);
	else if (!round->rows->ledger.ledger)
		(void)agent_resume_record_rows(round, &round->failure);
}

bool agent_resume_moves(const struct agent_tensor *tensor, uint64_t round)
{
	return tensor->job->resumption.ledger &&
	       ledger_remembers(tensor->job->resumption.ledger, tensor->name, round);
}
