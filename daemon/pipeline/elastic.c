/*
 * Elastic jobs: they go on without a rank that dies, leaves or is late. See bps(7), ELASTIC JOBS.
 *
 * Inside, ranks keep the numbers that they have had since the run began. What a trainer is told, and says, counts only
 * those that are in the job: a number means something together with the membership in which it was counted. Memberships
 * are counted through all runs of the job; each change has its own.
 *
 * Over nodes, who is out stands in job->moves behind the servers (move.c): whoever knows as much has the same data_epoch, and a
 * result is made by nodes of one data_epoch only, so of one set of ranks. When a rank is out every node attaches again, and
 * pushes again what is not committed: a reduction is committed on a node once all its results are in cells there, and only
 * then is an output touched. Who has committed a round offers its results to the others and does not push it, so the round
 * ends with that set on all nodes; if nobody has, all of them do it again without the rank. Nothing has to be decided by one.
 */
#include "base/log.h"
#include "pipeline/device.h"
#include "pipeline/round.h"
#include <inttypes.h>
#include <openssl/crypto.h>
#include <stdio.h>

struct pipeline_newcomer {
	struct list link;
	struct pipeline_member *member;
	char job[JOB_NAME_MAX + 1];
	uint8_t secret_digest[SECRET_DIGEST_LEN];
	uint64_t deadline_ns, timeout_ms;
	uint32_t pid;
	const char *cannot_resume;
};

/* -- Counting ------------------------------------------------------------------------------------------------------ */

static bool was_in(const struct pipeline_job *job, uint32_t rank, uint32_t membership)
{
	return !job->out[rank] || job->out[rank] > membership;
}

static uint32_t count(const struct pipeline_job *job, uint32_t n, uint32_t membership)
{
	uint32_t number = 0;

	for (uint32_t rank = 0; rank < n; rank++)
		number += was_in(job, rank, membership);
	return number;
}

/* The rank that has had this number, or RANK_AWAY. */
static uint32_t find(const struct pipeline_job *job, uint32_t number, uint32_t membership)
{
	for (uint32_t rank = 0; rank < job->shape.size; rank++)
		if (was_in(job, rank, membership) && !number--)
			return rank;
	return RANK_AWAY;
}

/* The membership of this run that has these low bits, the newest if it is none. */
static uint32_t membership_of(const struct pipeline_job *job, uint16_t low)
{
	uint32_t ago = (uint16_t)(job->membership - low);

	return ago > job->membership - job->first_membership ? job->membership
							     : job->membership - ago;
}

uint32_t pipeline_elastic_size(const struct pipeline_job *job)
{
	return job->shape.size - job->n_out;
}

bool pipeline_elastic_is_out(const struct pipeline_job *job, uint32_t index)
{
	return job->gone[index] || job->out[job->layout.rank_of_local[index]];
}

bool pipeline_elastic_is_first(const struct pipeline_job *job)
{
	uint32_t first = job->shape.n_nodes;

	for (uint32_t rank = 0; rank < job->shape.size; rank++)
		if (!job->out[rank])
			first = MIN(first, job->layout.node_of_rank[rank]);
	return first == job->shape.node;
}

struct pipeline_place pipeline_place(const struct pipeline_member *member)
{
	const struct pipeline_job *job = member->job;

	if (!job || !job->shape.elastic)
		return (struct pipeline_place){ 0 };
	return (struct pipeline_place){
		.membership = job->membership,
		.rank = member->rank,
		.size = job->shape.size,
		.local_rank = member->index,
		.local_size = job->shape.local_size,
		.node = job->shape.node,
		.n_nodes = job->shape.n_nodes,
	};
}

uint32_t pipeline_n_counts(const struct pipeline_member *member, uint16_t membership)
{
	const struct pipeline_job *job = member->job;

	return count(job, job->shape.size, membership_of(job, membership));
}

static bool is_for(const struct pipeline_newcomer *newcomer, const struct pipeline_job *job)
{
	return !strcmp(newcomer->job, job->name) &&
	       !CRYPTO_memcmp(newcomer->secret_digest, job->secret_digest, SECRET_DIGEST_LEN);
}

/* Newcomers that the job would take. */
static uint32_t n_waiting(const struct pipeline_job *job)
{
	uint32_t max = job->shape.max_ranks ? job->shape.max_ranks : JOB_RANKS_MAX;
	uint32_t room = max - MIN(max, pipeline_elastic_size(job)), n = 0;
	const struct pipeline_newcomer *newcomer;

	list_for_each (newcomer, &job->pipeline->newcomers, link)
		n += is_for(newcomer, job);
	return MIN(n, room);
}

bool pipeline_elastic_waits(const struct pipeline_job *job)
{
	return job->shape.elastic && n_waiting(job);
}

void pipeline_elastic_outcome(const struct pipeline_round *round, uint32_t index,
			      struct pipeline_request *request)
{
	const struct pipeline_job *job = round->tensor->job;
	uint32_t rank = job->layout.rank_of_local[index];

	if (!job->shape.elastic || pipeline_elastic_is_out(job, index))
		return;
	if (job->distributed && !round->failure.status) {
		/* As it was when the result was made: all ranks are told the same. */
		uint32_t n_gone = round->n_gone & ~LEDGER_WAITING;

		request->outcome = (struct pipeline_outcome){
			.membership = job->first_membership + n_gone,
			.size = job->shape.size - n_gone,
			.rank = count(job, rank, job->first_membership + n_gone),
			.n_came = job->shape.size - n_gone,
			.n_waiting = round->n_gone != n_gone,
		};
		return;
	}
	request->outcome = (struct pipeline_outcome){
		.membership = job->membership,
		.size = pipeline_elastic_size(job),
		.rank = count(job, rank, job->membership),
		.n_came = round->failure.status ? 0 : round->n_in,
		.n_waiting = n_waiting(job),
	};
}

/* -- Requests ------------------------------------------------------------------------------------------------------ */

static bool is_by_blocks(const struct pipeline_request *request)
{
	return request->operation == OPERATION_ALL_GATHER ||
	       request->operation == OPERATION_REDUCE_SCATTER ||
	       request->operation == OPERATION_ALL_TO_ALL;
}

static bool needs_layout(const struct pipeline_request *request)
{
	return request->operation == OPERATION_REDUCE_SCATTER ||
	       request->operation == OPERATION_ALL_TO_ALL ||
	       (request->operation == OPERATION_ALL_GATHER && request->counts);
}

/* What the servers are told of who is out: in job->moves, behind them. */
static uint32_t said_of(const struct pipeline_job *job, uint32_t rank)
{
	return job->moves[job->n_servers + rank];
}

/* Goes on without ranks of this node: `index` was lost (RANK_AWAY: none), others that are gone have left. */
static void go_without(struct pipeline_job *job, uint32_t index, const char *why)
{
	size_t n = pipeline_move_n(job);
	_cleanup_(freep) uint32_t *moves = calloc(n, sizeof(moves[0]));
	struct failure failure;

	if (!moves) {
		(void)failure_set(&failure, -ENOMEM, "job %s: out of memory", job->name);
		pipeline_job_fail(job, &failure, NULL);
		return;
	}
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->gone[i])
			moves[job->n_servers + job->layout.rank_of_local[i]] =
				i == index ? DATA_MOVES_LOST : DATA_MOVES_LEFT;
	pipeline_move_unite(job, moves, n, why);
}

/* Ranks here that have left are missed only now. */
static void settle(struct pipeline_job *job)
{
	if (job->distributed && job->n_gone)
		go_without(job, RANK_AWAY, "a rank has left");
}

/* Entries for ranks that are in this membership, to which others have none, become entries for all. */
static void spread(const struct pipeline_job *job, uint32_t membership, const uint64_t *counts,
		   uint64_t each, uint64_t *ret_counts)
{
	for (uint32_t rank = 0, next = 0; rank < job->shape.size; rank++) {
		bool in = was_in(job, rank, membership);

		ret_counts[rank] = !in ? 0 : counts ? counts[next] : each;
		next += in;
	}
}

/* Blocks belong to ranks: those that are gone have empty ones. */
static int expand(const struct pipeline_job *job, uint32_t membership,
		  struct pipeline_request *request, struct failure *failure)
{
	uint32_t size = job->shape.size, n = request->n_seats;
	uint64_t each = request->input_count / n;
	const uint64_t *counts = request->counts;

	if (!needs_layout(request) || n == size)
		return 0;
	if (!counts && request->input_count % n)
		return failure_set(failure, -EINVAL,
				   "%" PRIu64 " elements cannot be cut into %u equal blocks",
				   request->input_count, n);
	request->expanded = calloc(2 * (size_t)size, sizeof(request->expanded[0]));
	if (!request->expanded)
		return failure_set(failure, -ENOMEM, "out of memory");
	spread(job, membership, counts, each, request->expanded);
	if (request->operation == OPERATION_ALL_TO_ALL)
		spread(job, membership, counts ? counts + n : NULL, each, request->expanded + size);
	request->counts = request->expanded;
	return 0;
}

static bool is_over_nodes(unsigned operation)
{
	return operation == OPERATION_PUSH_PULL || operation == OPERATION_BROADCAST ||
	       operation == OPERATION_ALL_GATHER || operation == OPERATION_BARRIER;
}

int pipeline_elastic_submit(struct pipeline_tensor *tensor, uint32_t index,
			    struct pipeline_request *request, struct failure *failure)
{
	const struct pipeline_job *job = tensor->job;
	uint32_t membership, root = request->root;

	request->seat = job->layout.rank_of_local[index];
	request->n_seats = job->shape.size;
	if (!job->shape.elastic)
		return 0;
	if (job->distributed && !is_over_nodes(request->operation))
		return failure_set(failure, -EOPNOTSUPP,
				   "an elastic job over several nodes has push_pull, broadcast, "
				   "all_gather and barrier, and no %s",
				   operation_name(request->operation));
	membership = membership_of(job, request->membership);
	request->n_seats = count(job, job->shape.size, membership);
	request->seat = count(job, request->seat, membership);
	if (request->operation != OPERATION_BROADCAST)
		return expand(job, membership, request, failure);
	request->root = find(job, root, membership);
	if (request->root == RANK_AWAY)
		return failure_set(failure, -EINVAL, "no rank %u of %u to broadcast from", root,
				   request->n_seats);
	return 0;
}

static bool is_in_place(const struct pipeline_round *round, const struct pipeline_request *request)
{
	size_t len = request->input_count * dtype_size(round->tensor->dtype);
	const char *input = request->input, *output = request->output;

	return input && output && input < output + len * request->n_seats && output < input + len;
}

/* Who has a block in it, and who is somewhere in its memory, must be the same for all. */
static int check_layout(const struct pipeline_round *round, uint32_t n, struct failure *failure)
{
	const struct pipeline_job *job = round->tensor->job;

	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		const struct pipeline_request *request = round->ranks[i].request;

		/* What ranks of other nodes give is known by the layout alone. */
		if (!request || request->n_seats == n ||
		    !(job->distributed || needs_layout(request) || is_in_place(round, request)))
			continue;
		return failure_set(
			failure, -EREMCHG,
			"the job has %u ranks now, and when rank %u submitted the %s it had %u: "
			"submit it again",
			n, job->layout.rank_of_local[i], operation_name(request->operation),
			request->n_seats);
	}
	return 0;
}

/* Pieces of those who came follow one another. */
static void gather_less(struct pipeline_round *round)
{
	const struct layout *layout = &round->tensor->job->layout;

	for (uint32_t i = 0; i < layout->n_local; i++)
		round->counts[layout->rank_of_local[i]] =
			round->ranks[i].request ? round->ranks[i].request->input_count : 0;
}

/* All that are in the job give as much. */
static void gather_alike(struct pipeline_round *round, uint64_t elements)
{
	const struct pipeline_job *job = round->tensor->job;

	for (uint32_t rank = 0; rank < job->shape.size; rank++)
		round->counts[rank] = job->out[rank] ? 0 : elements;
}

/* The ranks that are in it. */
static uint32_t n_ranks(const struct pipeline_round *round)
{
	const struct pipeline_job *job = round->tensor->job;
	uint32_t n = 0;

	if (job->distributed)
		return pipeline_elastic_size(job);
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		n += round->ranks[i].request != NULL;
	return n;
}

int pipeline_elastic_check(struct pipeline_round *round, struct failure *failure)
{
	const struct pipeline_request *first = pipeline_round_first(round);
	struct pipeline_job *job = round->tensor->job;
	uint32_t n;

	if (!job->shape.elastic)
		return 0;
	settle(job);
	n = n_ranks(round);
	round->n_gone_said = job->n_out;
	if (n == job->shape.size)
		return 0;
	if (pipeline_device_concerns(round))
		return failure_set(
			failure, -EREMCHG,
			"the job has %u of the %u ranks of its last regrouping, and memory on "
			"devices is known by them: regroup, and submit it again",
			n, job->shape.size);
	if (is_by_blocks(first)) {
		int r = check_layout(round, n, failure);

		if (r)
			return r;
		freep(&round->counts);
		round->counts = calloc(2 * (size_t)job->shape.size, sizeof(round->counts[0]));
		if (!round->counts)
			return failure_set(failure, -ENOMEM, "out of memory");
		if (first->operation == OPERATION_ALL_GATHER && !first->counts && job->distributed)
			gather_alike(round, first->input_count);
		else if (first->operation == OPERATION_ALL_GATHER && !first->counts)
			gather_less(round);
		else if (first->operation == OPERATION_ALL_GATHER)
			memcpy(round->counts, first->counts,
			       job->shape.size * sizeof(round->counts[0]));
	}
	if (first->operation == OPERATION_BROADCAST && job->out[first->root])
		return failure_set(
			failure, -EREMCHG,
			"the rank that it comes from is not in the job any more, which has %u "
			"ranks now: submit it again from another",
			pipeline_elastic_size(job));
	return 0;
}

/* -- Going on without a rank --------------------------------------------------------------------------------------- */

void pipeline_elastic_recall(struct pipeline_job *job)
{
	if (!job->shape.elastic || !job->resumed)
		return;
	ledger_cells_drop(job->ledger);
	job->first_membership = job->membership = ledger_membership(job->ledger);
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		uint32_t local = job->layout.local_of_rank[rank];

		job->out[rank] = ledger_out(job->ledger, rank);
		job->membership = MAX(job->membership, job->out[rank]);
		job->n_out += job->out[rank] != 0;
		/* Who knows better how it went says so. */
		if (job->out[rank])
			job->moves[job->n_servers + rank] = DATA_MOVES_LOST;
		if (local == RANK_AWAY)
			continue;
		job->gone[local] = job->out[rank] || ledger_has_left(job->ledger, rank);
		job->n_gone += job->gone[local] && !job->out[rank];
	}
}

/* Whether any rank of this node is in the job. */
static bool any_here(const struct pipeline_job *job)
{
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (!job->out[job->layout.rank_of_local[i]])
			return true;
	return false;
}

/* A rank of this node lives, and the others go on without it. */
static void drop_here(struct pipeline_job *job, uint32_t index, const struct failure *why)
{
	struct pipeline_member *member = job->members[index];
	uint64_t number = job->number;

	job->gone[index] = true;
	if (job->ledger)
		ledger_leave(job->ledger, member->rank);
	pipeline_job_detach(member);
	pipeline_round_exclude(job, index);
	pipeline_tensor_without(job, index);
	pipeline_round_without(job, index, why);
	if (member->leaving)
		member->left(member);
	else
		member->ended(member, number, why);
}

/* More ranks are out. Returns whether the job goes on, and here. */
static bool goes_on(struct pipeline_job *job, bool lost, const char *why)
{
	struct failure failure;

	if (!any_here(job)) {
		/* The others go on: they hear no more than that. */
		pipeline_move_tell_all(job);
		job->goes = true;
		(void)failure_set(&failure, -ESTALE,
				  "job %s goes on without the ranks of this node: %s", job->name,
				  why);
		pipeline_job_fail(job, &failure, NULL);
		return false;
	}
	if (lost && (job->device || pipeline_elastic_size(job) < job->shape.min_ranks)) {
		(void)failure_set(&failure, -EPIPE, "job %s: %s, and %s", job->name, why,
				  job->device ? "memory on a device cannot be missed"
					      : "the job has too few ranks left");
		pipeline_job_fail(job, &failure, NULL);
		return false;
	}
	return true;
}

void pipeline_elastic_go_on(struct pipeline_job *job, const char *why)
{
	struct failure failure;

	if (!job->shape.elastic || job->state != JOB_RUNNING)
		return;
	(void)failure_set(&failure, -ESTALE, "this rank was dropped from job %s: %s", job->name,
			  why);
	pipeline_job_hold(job);
	for (uint32_t i = 0; i < job->layout.n_local && job->state == JOB_RUNNING; i++)
		if (job->members[i] && job->out[job->layout.rank_of_local[i]])
			drop_here(job, i, &failure);
	pipeline_round_prolong(job);
	pipeline_elastic_try(job);
	pipeline_job_release(job);
}

bool pipeline_elastic_moved(struct pipeline_job *job, const char *why)
{
	struct pipeline_ranks_text names = { 0 };
	uint32_t n = 0;
	bool lost = false;

	for (uint32_t rank = 0; job->shape.elastic && rank < job->shape.size; rank++)
		n += said_of(job, rank) & 1 && !job->out[rank];
	if (!n)
		return true;
	/* As many nodes have the same results know the same ranks: so the number is theirs, too. */
	job->membership += n;
	job->n_out += n;
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		uint32_t local = job->layout.local_of_rank[rank];

		if (!(said_of(job, rank) & 1) || job->out[rank])
			continue;
		lost |= said_of(job, rank) == DATA_MOVES_LOST;
		pipeline_ranks_add(&names, rank);
		job->out[rank] = job->membership;
		ledger_set_out(job->ledger, rank, job->membership);
		if (local != RANK_AWAY)
			job->n_gone -= job->gone[local];
	}
	log_notice("job %s: %u of %u ranks from now on, without %s: %s", job->name,
		   pipeline_elastic_size(job), job->shape.size, pipeline_ranks_end(&names), why);
	return goes_on(job, lost && job->state == JOB_RUNNING, why);
}

/* After a restart: some may have died, or others may have gone on without some, meanwhile. */
static void resumed_far(struct pipeline_job *job)
{
	for (uint32_t i = 0; i < job->layout.n_local && job->n_gone; i++)
		if (job->gone[i] && !job->out[job->layout.rank_of_local[i]])
			go_without(job, i, "a rank has died or left");
	pipeline_elastic_go_on(job, "so the others said while this daemon was away");
}

/* The others do not know yet that this rank is gone. */
static void drop_far(struct pipeline_job *job, uint32_t index, const struct failure *failure,
		     bool leaves)
{
	if (job->gone[index])
		return;
	job->gone[index] = true;
	job->n_gone++;
	if (!leaves)
		ledger_leave(job->ledger, job->layout.rank_of_local[index]);
	pipeline_job_hold(job);
	/* One that leaves is missed only when a round is to do without it: most often, all leave. */
	if (!leaves)
		go_without(job, index, failure->text);
	if (job->state == JOB_RUNNING) {
		pipeline_round_exclude(job, index);
		pipeline_tensor_without(job, index);
		pipeline_round_without(job, index, failure);
	}
	pipeline_job_release(job);
}

/* It died while the ranks regrouped. */
static void drop_absent(struct pipeline_job *job, uint32_t index)
{
	struct failure failure;

	(void)failure_set(&failure, -EPIPE, "rank %u of job %s died while the ranks regrouped",
			  job->layout.rank_of_local[index], job->name);
	drop_far(job, index, &failure, false);
}

void pipeline_elastic_formed(struct pipeline_job *job)
{
	if (!job->shape.elastic)
		return;
	if (!job->resumed) {
		if (job->ledger)
			ledger_set_membership(job->ledger, job->membership);
		for (uint32_t i = 0; job->distributed && i < job->layout.n_local; i++)
			if (!job->members[i] && job->state == JOB_RUNNING)
				drop_absent(job, i);
		return;
	}
	if (job->distributed) {
		resumed_far(job);
		return;
	}
	job->first_membership = job->membership = ledger_membership(job->ledger);
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		job->out[rank] = ledger_out(job->ledger, rank);
		/* It died while there was no daemon. */
		if (!job->out[rank] && ledger_has_left(job->ledger, rank))
			job->out[rank] = UINT32_MAX;
		else
			job->membership = MAX(job->membership, job->out[rank]);
		job->n_out += job->out[rank] != 0;
	}
	for (uint32_t rank = 0; rank < job->shape.size; rank++) {
		if (job->out[rank] != UINT32_MAX)
			continue;
		job->out[rank] = ++job->membership;
		ledger_set_out(job->ledger, rank, job->out[rank]);
	}
}

void pipeline_elastic_drop(struct pipeline_job *job, uint32_t index, const struct failure *failure,
			   bool leaves)
{
	uint32_t rank = job->layout.rank_of_local[index];
	struct failure last;

	if (job->state != JOB_RUNNING || job->out[rank])
		return;
	if (job->distributed) {
		drop_far(job, index, failure, leaves);
		return;
	}
	job->out[rank] = ++job->membership;
	job->n_out++;
	if (job->ledger)
		ledger_set_out(job->ledger, rank, job->out[rank]);
	if (job->ledger && !leaves)
		ledger_leave(job->ledger, rank);
	log_notice("job %s: %u of %u ranks from now on: %s", job->name, pipeline_elastic_size(job),
		   job->shape.size, failure->text);
	if (!leaves && (job->device || pipeline_elastic_size(job) < job->shape.min_ranks)) {
		(void)failure_set(&last, failure->status, "%s, and %s", failure->text,
				  job->device ? "its memory on a device cannot be missed"
					      : "the job has too few ranks left");
		pipeline_job_fail(job, &last, NULL);
		return;
	}
	pipeline_job_hold(job);
	pipeline_tensor_without(job, index);
	pipeline_round_without(job, index, failure);
	pipeline_job_release(job);
}

void pipeline_elastic_drop_late(struct pipeline_job *job, uint32_t index,
				const struct failure *failure)
{
	struct pipeline_member *member = job->members[index];
	uint64_t number = job->number;
	struct failure why;

	(void)failure_set(&why, -ESTALE, "rank %u of job %s was dropped from it: %s",
			  job->layout.rank_of_local[index], job->name, failure->text);
	pipeline_job_hold(job);
	if (member)
		pipeline_job_detach(member);
	pipeline_elastic_drop(job, index, &why, false);
	if (member)
		member->ended(member, number, &why);
	pipeline_elastic_try(job);
	pipeline_job_release(job);
}

/* -- Newcomers ----------------------------------------------------------------------------------------------------- */

void pipeline_elastic_forget(struct pipeline_member *member)
{
	struct pipeline_newcomer *newcomer = TAKE_PTR(member->newcomer);

	list_remove(&newcomer->link);
	free(newcomer);
}

static void newcomer_fail(struct pipeline_newcomer *newcomer, const struct failure *failure)
{
	struct pipeline_member *member = newcomer->member;

	pipeline_elastic_forget(member);
	member->ended(member, 0, failure);
}

void pipeline_elastic_close(struct pipeline *pipeline, const struct failure *failure)
{
	struct pipeline_newcomer *newcomer, *next;

	loop_timer_cancel(&pipeline->newcomers_timer);
	list_for_each_safe (newcomer, next, &pipeline->newcomers, link) {
		if (failure)
			newcomer_fail(newcomer, failure);
		else
			pipeline_elastic_forget(newcomer->member);
	}
}

void pipeline_elastic_end(struct pipeline_job *job)
{
	struct pipeline_newcomer *newcomer, *next;
	struct failure failure;

	(void)failure_set(&failure, -ECANCELED,
			  "job %s has ended, and had not let this newcomer in", job->name);
	list_for_each_safe (newcomer, next, &job->pipeline->newcomers, link)
		if (job->shape.elastic && is_for(newcomer, job))
			newcomer_fail(newcomer, &failure);
}

static void on_newcomers_timer(struct loop_timer *timer)
{
	struct pipeline *pipeline = container_of(timer, struct pipeline, newcomers_timer);
	uint64_t now_ns = clock_now_ns(), next_ns = CLOCK_NEVER;
	struct pipeline_newcomer *newcomer, *next;
	struct failure failure;
	char time[32];

	list_for_each_safe (newcomer, next, &pipeline->newcomers, link) {
		if (newcomer->deadline_ns > now_ns) {
			next_ns = MIN(next_ns, newcomer->deadline_ns);
			continue;
		}
		(void)pipeline_time_text(time, newcomer->timeout_ms * NSEC_PER_MSEC);
		(void)failure_set(&failure, -ETIMEDOUT,
				  "no elastic job %s of this node and secret has let a newcomer in "
				  "within %s: its "
				  "ranks let them in when they regroup",
				  newcomer->job, time);
		newcomer_fail(newcomer, &failure);
	}
	if (next_ns != CLOCK_NEVER)
		(void)loop_timer_set(pipeline->params.loop, timer, next_ns);
}

int pipeline_elastic_wait(struct pipeline *pipeline, struct pipeline_member *member,
			  const struct pipeline_join *join, struct failure *failure)
{
	_cleanup_(freep) struct pipeline_newcomer *newcomer = calloc(1, sizeof(*newcomer));
	struct loop_timer *timer = &pipeline->newcomers_timer;
	int r;

	if (!newcomer)
		return failure_set(failure, -ENOMEM, "job %s: out of memory", join->job);
	r = pipeline_join_digest(join, newcomer->secret_digest);
	newcomer->timeout_ms = join->timeout_ms;
	newcomer->deadline_ns = clock_now_ns() + join->timeout_ms * NSEC_PER_MSEC;
	timer->expired = on_newcomers_timer;
	if (!r && (!timer->loop || timer->at_ns > newcomer->deadline_ns))
		r = loop_timer_set(pipeline->params.loop, timer, newcomer->deadline_ns);
	if (r)
		return failure_set(failure, r, "job %s: %s", join->job, strerror(-r));
	newcomer->member = member;
	newcomer->pid = join->pid;
	newcomer->cannot_resume = join->cannot_resume;
	(void)snprintf(newcomer->job, sizeof(newcomer->job), "%s", join->job);
	member->job = NULL;
	list_init(&member->declarations);
	list_push_back(&pipeline->newcomers, &newcomer->link);
	member->newcomer = TAKE_PTR(newcomer);
	log_info("job %s: pid %u waits to be let in", join->job, join->pid);
	return 0;
}

/* -- Regrouping ---------------------------------------------------------------------------------------------------- */

void pipeline_regroup(struct pipeline_member *member)
{
	struct pipeline_job *job = member->job;
	struct failure failure = { 0 };

	if (!job->shape.elastic)
		(void)failure_set(&failure, -EINVAL, "job %s is not elastic", job->name);
	else if (member->leaving || member->regrouping)
		(void)failure_set(&failure, -EALREADY, "rank %u %s already", member->rank,
				  member->leaving ? "leaves" : "regroups");
	else if (pipeline_round_pending(job, member->index))
		(void)failure_set(&failure, -EBUSY,
				  "rank %u of job %s has operations under way: wait for them first",
				  member->rank, job->name);
	if (failure.status) {
		member->refused(member, &failure);
		return;
	}
	member->regrouping = true;
	if (!job->n_regrouping++) {
		job->regroup_by_ns = clock_now_ns() + job->request_timeout_ns;
		pipeline_job_watch(job, job->regroup_by_ns);
	}
	pipeline_elastic_try(job);
}

uint64_t pipeline_elastic_expire(struct pipeline_job *job, uint64_t now_ns)
{
	struct pipeline_ranks_text late = { 0 };
	struct failure failure;
	char time[32];

	if (job->state != JOB_RUNNING || !job->n_regrouping)
		return CLOCK_NEVER;
	if (job->regroup_by_ns > now_ns)
		return job->regroup_by_ns;
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->members[i] && !job->members[i]->regrouping)
			pipeline_ranks_add(&late, job->members[i]->rank);
	(void)failure_set(&failure, -ETIME, "%s did not regroup with the others within %s",
			  pipeline_ranks_end(&late),
			  pipeline_time_text(time, job->request_timeout_ns));
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		if (job->state == JOB_RUNNING && job->members[i] && !job->members[i]->regrouping)
			pipeline_elastic_drop_late(job, i, &failure);
	return CLOCK_NEVER;
}

/* The next run, without members. */
static int next_run(struct pipeline_job *job, uint32_t size, uint32_t local_size, uint32_t node,
		    uint32_t n_nodes, struct pipeline_job **ret_next)
{
	struct pipeline_join join = {
		.job = job->name,
		.size = size,
		.local_size = local_size,
		.node = node,
		.n_nodes = n_nodes,
		.force_distributed = job->distributed,
		.min_servers = job->shape.min_servers,
		.part_bytes = job->shape.part_bytes,
		.request_timeout_ms = job->shape.request_timeout_ms,
		.gpu_reduce = job->shape.gpu_reduce,
		.gpu_roots = job->shape.gpu_roots,
		.elastic = true,
		.min_ranks = job->shape.min_ranks,
		.max_ranks = job->shape.max_ranks,
	};
	int r;

	r = pipeline_job_make(job->pipeline, &join, ret_next);
	if (r)
		return error_trace(r);
	memcpy((*ret_next)->secret_digest, job->secret_digest, SECRET_DIGEST_LEN);
	(*ret_next)->first_membership = (*ret_next)->membership = job->membership + 1;
	return 0;
}

static void take(struct pipeline_job *job, struct pipeline_member *member, uint32_t rank,
		 uint32_t local_rank, uint32_t pid, const char *cannot_resume)
{
	struct pipeline_join join = {
		.rank = rank,
		.local_rank = local_rank,
		.pid = pid,
		.cannot_resume = cannot_resume,
	};

	pipeline_job_add(job, member, &join, job->request_timeout_ns);
}

/* All members are at one place, and nothing is under way. */
static void regroup(struct pipeline_job *job)
{
	uint32_t n_new = n_waiting(job), size = job->n_members + n_new, rank = 0;
	struct pipeline_newcomer *newcomer, *following;
	struct pipeline_job *next;
	struct failure failure;
	int r;

	if (size < job->shape.min_ranks) {
		(void)failure_set(&failure, -EPIPE,
				  "job %s: %u ranks regroup, fewer than the %u that it needs",
				  job->name, size, job->shape.min_ranks);
		pipeline_job_fail(job, &failure, NULL);
		return;
	}
	r = next_run(job, size, size, 0, 1, &next);
	if (r) {
		(void)failure_set(&failure, r, "job %s cannot regroup: %s", job->name,
				  strerror(-r));
		pipeline_job_fail(job, &failure, NULL);
		return;
	}
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		struct pipeline_member *member = job->members[i];

		if (!member)
			continue;
		pipeline_job_detach(member);
		take(next, member, rank, rank, member->pid, job->ends);
		rank++;
	}
	list_for_each_safe (newcomer, following, &job->pipeline->newcomers, link) {
		struct pipeline_member *member = newcomer->member;
		struct pipeline_newcomer facts = *newcomer;

		if (rank == size || !is_for(newcomer, job))
			continue;
		pipeline_elastic_forget(member);
		take(next, member, rank, rank, facts.pid, facts.cannot_resume);
		rank++;
	}
	log_info("job %s: regroups: %u ranks, %u of them new", job->name, size, n_new);
	pipeline_job_over(job);
	pipeline_job_form_here(next);
}

/* The same where ranks are on several nodes: their home puts the next run together. */
static void regroup_far(struct pipeline_job *job)
{
	_cleanup_(freep) uint32_t *ranks = calloc(job->layout.n_local, sizeof(ranks[0]));
	const struct pipeline_newcomer *newcomer;
	bool resumable = true;
	struct failure failure;
	uint32_t n = 0;
	int r = ranks ? 0 : -ENOMEM;

	/* It is told when it is there. */
	if (!job->servers[job->home_number].attached)
		return;
	for (uint32_t i = 0; ranks && i < job->layout.n_local; i++)
		if (job->members[i])
			ranks[n++] = job->layout.rank_of_local[i];
	list_for_each (newcomer, &job->pipeline->newcomers, link)
		resumable &= !is_for(newcomer, job) || !newcomer->cannot_resume;
	if (!r)
		r = pipeline_setup_regroup(job, ranks, n, n_waiting(job), resumable);
	if (!r)
		return;
	(void)failure_set(&failure, r, "job %s cannot regroup: %s", job->name, strerror(-r));
	pipeline_job_fail(job, &failure, NULL);
}

void pipeline_elastic_try(struct pipeline_job *job)
{
	if (job->state != JOB_RUNNING || !job->n_regrouping || job->n_regrouping != job->n_members)
		return;
	if (job->distributed)
		regroup_far(job);
	else
		regroup(job);
}

void pipeline_elastic_regroup_again(struct pipeline_job *job)
{
	if (job->shape.elastic)
		pipeline_elastic_try(job);
}

/* Members that died since they asked have left gaps: they are lost in the next run. */
static void take_members(struct pipeline_job *job, const struct pipeline_regrouped *regrouped,
			 struct pipeline_job *next)
{
	for (uint32_t i = 0; i < regrouped->n && i < regrouped->n_local; i++) {
		uint32_t local = job->layout.local_of_rank[regrouped->old_ranks[i]];
		struct pipeline_member *member = job->members[local];

		if (!member)
			continue;
		pipeline_job_detach(member);
		take(next, member, regrouped->ranks[i], i, member->pid, NULL);
	}
}

int pipeline_elastic_next(struct pipeline_job *job, const struct pipeline_regrouped *regrouped,
			  struct pipeline_job **ret_next)
{
	struct pipeline_newcomer *newcomer, *following;
	uint32_t i = regrouped->n;
	struct pipeline_job *next;
	int r;

	r = next_run(job, regrouped->size, regrouped->n_local, regrouped->node, regrouped->n_nodes,
		     &next);
	if (r)
		return error_trace(r);
	next->instance = regrouped->instance;
	take_members(job, regrouped, next);
	list_for_each_safe (newcomer, following, &job->pipeline->newcomers, link) {
		struct pipeline_member *member = newcomer->member;
		struct pipeline_newcomer facts = *newcomer;

		if (i >= regrouped->n_local || !is_for(newcomer, job))
			continue;
		pipeline_elastic_forget(member);
		take(next, member, regrouped->ranks[i], i, facts.pid, facts.cannot_resume);
		i++;
	}
	next->n_left = next->shape.local_size - next->n_members;
	log_info("job %s: regroups: %u ranks on %u nodes, %u here", job->name, regrouped->size,
		 regrouped->n_nodes, next->n_members);
	*ret_next = next;
	return 0;
}
