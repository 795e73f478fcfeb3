/*
 * Ranks of an elastic job, counted: how many are in it, which number means which of them in which membership, and what
 * that makes of a round's requests. submit.c calls as requests come, round.c as they end; agent_place() and
 * agent_n_counts() are agent.h's, for control/.
 */
#include "agent/round/device.h"
#include <inttypes.h>

/* -- Counting ------------------------------------------------------------------------------------------------------ */

static bool was_in(const struct agent_job *job, uint32_t rank, uint32_t membership)
{
	return !job->membership.out[rank] || job->membership.out[rank] > membership;
}

static uint32_t count(const struct agent_job *job, uint32_t n, uint32_t membership)
{
	uint32_t number = 0;

	for (uint32_t rank = 0; rank < n; rank++)
		number += was_in(job, rank, membership);
	return number;
}

/* The rank that has had this number, or RANK_AWAY. */
static uint32_t find(const struct agent_job *job, uint32_t number, uint32_t membership)
{
	for (uint32_t rank = 0; rank < job->shape.size; rank++)
		if (was_in(job, rank, membership) && !number--)
			return rank;
	return RANK_AWAY;
}

/* The membership of this run that has these low bits, the newest if it is none. */
static uint32_t membership_of(const struct agent_job *job, uint16_t low)
{
	uint32_t ago = (uint16_t)(job->membership.number - low);

	return ago > job->membership.number - job->membership.first ? job->membership.number
								    : job->membership.number - ago;
}

uint32_t agent_elastic_size(const struct agent_job *job)
{
	return job->shape.size - job->membership.n_out;
}

bool agent_elastic_is_out(const struct agent_job *job, uint32_t index)
{
	return job->membership.gone[index] || job->membership.out[job->layout.rank_of_local[index]];
}

bool agent_elastic_is_first(const struct agent_job *job)
{
	uint32_t first = job->shape.n_nodes;

	for (uint32_t rank = 0; rank < job->shape.size; rank++)
		if (!job->membership.out[rank] &&
		    !agent_departed_has(job, job->layout.node_of_rank[rank]))
			first = MIN(first, job->layout.node_of_rank[rank]);
	return first == job->shape.node;
}

struct agent_place agent_place(const struct agent_member *member)
{
	const struct agent_job *job = member->job;
	const struct agent_shape *shape;

	if (!job || !job->shape.elastic)
		return (struct agent_place){ 0 };
	shape = &job->shape;
	/* The run's layout, as all are told it, also where ranks were lost before the run was formed here. */
	return (struct agent_place){
		.membership = job->membership.first,
		.rank = member->rank,
		.size = shape->size,
		.local_rank = member->index,
		.local_size = shape->local_size,
		.node = shape->node,
		.n_nodes = shape->n_nodes,
		.terms = {
			.min_servers = shape->min_servers,
			.part_bytes = shape->part_bytes,
			.min_ranks = shape->min_ranks,
			.max_ranks = shape->max_ranks,
			.request_timeout_ms = shape->request_timeout_ms,
			.gpu_roots = shape->gpu_roots,
			.gpu_reduce = shape->gpu_reduce,
		},
	};
}

uint32_t agent_n_counts(const struct agent_member *member, uint16_t membership)
{
	const struct agent_job *job = member->job;

	return count(job, job->shape.size, membership_of(job, membership));
}

void agent_elastic_outcome(const struct agent_round *round, uint32_t index,
			   struct agent_request *request)
{
	const struct agent_job *job = round->job;
	uint32_t rank = job->layout.rank_of_local[index];

	if (!job->shape.elastic || agent_elastic_is_out(job, index))
		return;
	if (job->distributed && !round->failure.status) {
		/* As it was when the result was made: all ranks are told the same. */
		uint32_t n_gone = round->n_gone & ~LEDGER_WAITING;

		request->outcome = (struct agent_outcome){
			.membership = job->membership.first + n_gone,
			.size = job->shape.size - n_gone,
			.rank = count(job, rank, job->membership.first + n_gone),
			.n_came = job->shape.size - n_gone,
			.n_waiting = round->n_gone != n_gone,
		};
		return;
	}
	request->outcome = (struct agent_outcome){
		.membership = job->membership.number,
		.size = agent_elastic_size(job),
		.rank = count(job, rank, job->membership.number),
		.n_came = round->failure.status ? 0 : round->n_in,
		.n_waiting = agent_elastic_n_waiting(job),
	};
}

/* -- Requests ------------------------------------------------------------------------------------------------------ */

static bool is_by_blocks(const struct agent_request *request)
{
	return request->operation == OPERATION_ALL_GATHER ||
	       request->operation == OPERATION_REDUCE_SCATTER ||
	       request->operation == OPERATION_ALL_TO_ALL;
}

static bool needs_layout(const struct agent_request *request)
{
	return request->operation == OPERATION_REDUCE_SCATTER ||
	       request->operation == OPERATION_ALL_TO_ALL ||
	       (request->operation == OPERATION_ALL_GATHER && request->counts);
}

/* Entries for ranks that are in this membership, to which others have none, become entries for all. */
static void spread(const struct agent_job *job, uint32_t membership, const uint64_t *counts,
		   uint64_t each, uint64_t *ret_counts)
{
	for (uint32_t rank = 0, next = 0; rank < job->shape.size; rank++) {
		bool in = was_in(job, rank, membership);

		ret_counts[rank] = !in ? 0 : counts ? counts[next] : each;
		next += in;
	}
}

/* Blocks belong to ranks: those that are gone have empty ones. */
static int expand(struct agent_job *job, uint32_t membership, struct agent_request *request,
		  struct failure *failure)
{
	uint32_t size = job->shape.size, n = request->submitted_size;
	uint64_t each = request->input_count / n;
	const uint64_t *counts = request->counts;

	if (!needs_layout(request) || n == size)
		return 0;
	if (!counts && request->input_count % n)
		return failure_set(failure, -EINVAL,
				   "%" PRIu64 " elements cannot be cut into %u equal blocks",
				   request->input_count, n);
	request->expanded =
		held_new(&job->memory.held, 2 * (size_t)size * sizeof(request->expanded[0]));
	if (!request->expanded)
		return agent_job_no_memory(job, errno, failure);
	spread(job, membership, counts, each, request->expanded);
	if (request->operation == OPERATION_ALL_TO_ALL)
		spread(job, membership, counts ? counts + n : NULL, each, request->expanded + size);
	request->counts = request->expanded;
	return 0;
}

static bool is_over_nodes(unsigned operation)
{
	return operation == OPERATION_PUSH_PULL || operation == OPERATION_BROADCAST ||
	       operation == OPERATION_ALL_GATHER || operation == OPERATION_REDUCE_SCATTER ||
	       operation == OPERATION_BARRIER;
}

int agent_elastic_submit(struct agent_tensor *tensor, uint32_t index, struct agent_request *request,
			 struct failure *failure)
{
	struct agent_job *job = tensor->job;
	uint32_t membership, root = request->root;

	request->submitted_rank = job->layout.rank_of_local[index];
	request->submitted_size = job->shape.size;
	if (!job->shape.elastic)
		return 0;
	if (job->distributed && !is_over_nodes(request->operation))
		return failure_set(failure, -EOPNOTSUPP,
				   "an elastic job over several nodes has push_pull, broadcast, "
				   "all_gather, reduce_scatter and barrier, and no %s",
				   operation_name(request->operation));
	membership = membership_of(job, request->membership);
	request->submitted_size = count(job, job->shape.size, membership);
	request->submitted_rank = count(job, request->submitted_rank, membership);
	if (request->operation != OPERATION_BROADCAST)
		return expand(job, membership, request, failure);
	request->root = find(job, root, membership);
	if (request->root == RANK_AWAY)
		return failure_set(failure, -EINVAL, "no rank %u of %u to broadcast from", root,
				   request->submitted_size);
	return 0;
}

static bool is_in_place(const struct agent_round *round, const struct agent_request *request)
{
	uint64_t len = agent_check_input_len(round->tensor, request);
	const char *input = request->input, *output = request->output;

	return input && output && input < output + len * request->submitted_size &&
	       output < input + len;
}

/* Who has a block in it, and who is somewhere in its memory, must be the same for all. */
static int check_layout(const struct agent_round *round, uint32_t n, struct failure *failure)
{
	const struct agent_job *job = round->job;

	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		const struct agent_request *request = round->ranks[i].request;

		/* What ranks of other nodes give is known by the layout alone. */
		if (!request || request->submitted_size == n ||
		    !(job->distributed || needs_layout(request) || is_in_place(round, request)))
			continue;
		return failure_set(
			failure, -EREMCHG,
			"the job has %u ranks now, and when rank %u submitted the %s it had %u: "
			"submit it again",
			n, job->layout.rank_of_local[i], operation_name(request->operation),
			request->submitted_size);
	}
	return 0;
}

/* Pieces of those who came follow one another. */
static void gather_less(struct agent_round *round)
{
	const struct layout *layout = &round->job->layout;

	for (uint32_t i = 0; i < layout->n_local; i++)
		round->counts[layout->rank_of_local[i]] =
			round->ranks[i].request ? round->ranks[i].request->input_count : 0;
}

/* All that are in the job give as much. */
static void gather_alike(struct agent_round *round, uint64_t elements)
{
	const struct agent_job *job = round->job;

	for (uint32_t rank = 0; rank < job->shape.size; rank++)
		round->counts[rank] = job->membership.out[rank] ? 0 : elements;
}

/* The ranks that are in it. */
static uint32_t n_ranks(const struct agent_round *round)
{
	const struct agent_job *job = round->job;
	uint32_t n = 0;

	if (job->distributed)
		return agent_elastic_size(job);
	for (uint32_t i = 0; i < job->layout.n_local; i++)
		n += round->ranks[i].request != NULL;
	return n;
}

int agent_elastic_check(struct agent_round *round, struct failure *failure)
{
	const struct agent_request *first = agent_round_first(round);
	struct agent_job *job = round->job;
	uint32_t n;

	if (!job->shape.elastic)
		return 0;
	job->agent->hooks->ranks_settle(job);
	n = n_ranks(round);
	round->n_gone_said = job->membership.n_out;
	if (n == job->shape.size)
		return 0;
	if (agent_round_concerns_device(round))
		return failure_set(
			failure, -EREMCHG,
			"the job has %u of the %u ranks of its last regrouping, and memory on "
			"devices is known by them: regroup, and submit it again",
			n, job->shape.size);
	if (is_by_blocks(first)) {
		int r = check_layout(round, n, failure);

		if (r)
			return r;
		held_free(round->counts);
		round->counts = held_new(&job->memory.held,
					 2 * (size_t)job->shape.size * sizeof(round->counts[0]));
		if (!round->counts)
			return agent_job_no_memory(job, errno, failure);
		if (first->operation == OPERATION_ALL_GATHER && !first->counts && job->distributed)
			gather_alike(round, first->input_count);
		else if (first->operation == OPERATION_ALL_GATHER && !first->counts)
			gather_less(round);
		else if (first->operation == OPERATION_ALL_GATHER)
			memcpy(round->counts, first->counts,
			       job->shape.size * sizeof(round->counts[0]));
	}
	if (first->operation == OPERATION_BROADCAST && job->membership.out[first->root])
		return failure_set(
			failure, -EREMCHG,
			"the rank that it comes from is not in the job any more, which has %u "
			"ranks now: submit it again from another",
			agent_elastic_size(job));
	return 0;
}
