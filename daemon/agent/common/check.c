/*
 * Checks requests: a request against its tensor and job, then the requests of one round against
 * each other. Words of an error name both ranks and what differs. submit.c calls for each
 * request and once for each round.
 */
#include "agent/round/round.h"
#include "proto/data.h"
#include "reduce/reduce.h"
#include <inttypes.h>

/* A request under examination. */
struct checked {
	const struct agent_tensor *tensor;
	const struct agent_request *request;
	uint32_t rank, size;
	size_t element_size, input_size; /* bytes of an element of the output, and of the input */
	struct failure *failure;
};

static bool reduces(unsigned operation)
{
	return operation == OPERATION_PUSH_PULL || operation == OPERATION_REDUCE_SCATTER ||
	       operation == OPERATION_PUSH_PULL_ROWS || operation == OPERATION_ACCUMULATE;
}

uint64_t agent_check_elements(const struct agent_tensor *tensor, uint32_t rank,
			      const struct agent_request *request)
{
	switch (request->operation) {
	case OPERATION_BARRIER:
		return 0;
	case OPERATION_BROADCAST:
		if (tensor->elements != ELEMENTS_VARIABLE)
			return tensor->elements;
		return rank == request->root ? request->input_count : request->output_count;
	case OPERATION_REDUCE_SCATTER:
	case OPERATION_ALL_TO_ALL:
		return request->input_count / tensor->job->shape.size;
	default:
		return request->input_count;
	}
}

unsigned agent_check_input_dtype(const struct agent_tensor *tensor,
				 const struct agent_request *request)
{
	return request->input_dtype ?: tensor->dtype;
}

uint64_t agent_check_input_len(const struct agent_tensor *tensor,
			       const struct agent_request *request)
{
	return request->input_count * dtype_size(agent_check_input_dtype(tensor, request));
}

static int check_input(const struct checked *c, uint64_t count)
{
	const struct agent_request *request = c->request;

	if (request->input_count != count)
		return failure_set(c->failure, -EINVAL,
				   "rank %u: the input has %" PRIu64 " elements, %s needs %" PRIu64,
				   c->rank, request->input_count,
				   operation_name(request->operation), count);
	if (count && !request->input)
		return failure_set(c->failure, -EINVAL, "rank %u: %s needs an input", c->rank,
				   operation_name(request->operation));
	return 0;
}

static int check_output(const struct checked *c, uint64_t count)
{
	const struct agent_request *request = c->request;

	if (count && !request->output)
		return failure_set(c->failure, -EINVAL, "rank %u: %s needs an output", c->rank,
				   operation_name(request->operation));
	if (request->output_count < count)
		return failure_set(
			c->failure, -EINVAL,
			"rank %u: the output has room for %" PRIu64 " elements, %s needs %" PRIu64,
			c->rank, request->output_count, operation_name(request->operation), count);
	return 0;
}

/*
 * Input and output may be the same memory only where each part is written no earlier than it was
 * read for the last time: input + input_shift and output + output_shift (elements) must then be one
 * place.
 */
static int check_overlap(const struct checked *c, uint64_t output_count, uint64_t input_shift,
			 uint64_t output_shift)
{
	const struct agent_request *request = c->request;
	const char *input = request->input, *output = request->output;
	uint64_t input_len = request->input_count * c->input_size;
	uint64_t output_len = output_count * c->element_size;

	if (!input || !output || input + input_len <= output || output + output_len <= input)
		return 0;
	/* all_to_all: what one rank reads last another may have written first. Wider results overtake what is read. */
	if (request->operation != OPERATION_ALL_TO_ALL && c->input_size == c->element_size &&
	    input + input_shift * c->element_size == output + output_shift * c->element_size)
		return 0;
	return failure_set(c->failure, -EINVAL,
			   "rank %u: input and output of %s overlap where they must not", c->rank,
			   operation_name(request->operation));
}

/* Sum of n counts. */
static int sum_counts(const struct checked *c, const uint64_t *counts, uint32_t n,
		      uint64_t *ret_sum)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < n; i++)
		if (ADD_OVERFLOW(sum, counts[i], &sum))
			return failure_set(c->failure, -EINVAL, "rank %u: the counts overflow",
					   c->rank);
	*ret_sum = sum;
	return 0;
}

static int check_equal_blocks(const struct checked *c)
{
	if (c->request->input_count % c->size)
		return failure_set(c->failure, -EINVAL,
				   "rank %u: %" PRIu64
				   " elements cannot be cut into %u equal blocks",
				   c->rank, c->request->input_count, c->size);
	return 0;
}

static int check_all_gather(const struct checked *c)
{
	const struct agent_request *request = c->request;
	uint64_t total = 0, before = 0, own = request->input_count;
	int r;

	if (request->counts) {
		r = sum_counts(c, request->counts, c->size, &total);
		if (r)
			return r;
		(void)sum_counts(c, request->counts, c->rank, &before);
		own = request->counts[c->rank];
	} else if (MUL_OVERFLOW(own, (uint64_t)request->submitted_size, &total)) {
		return failure_set(c->failure, -EINVAL, "rank %u: too many elements", c->rank);
	} else {
		before = own * request->submitted_rank;
	}
	r = check_input(c, own);
	if (!r)
		r = check_output(c, total);
	return r ? r : check_overlap(c, total, 0, before);
}

static int check_reduce_scatter(const struct checked *c)
{
	const struct agent_request *request = c->request;
	uint64_t total = request->input_count, own, before = 0;
	int r;

	if (request->counts) {
		r = sum_counts(c, request->counts, c->size, &total);
		if (r)
			return r;
		(void)sum_counts(c, request->counts, c->rank, &before);
		own = request->counts[c->rank];
	} else {
		r = check_equal_blocks(c);
		if (r)
			return r;
		own = total / c->size;
		before = own * c->rank;
	}
	r = check_input(c, total);
	if (!r)
		r = check_output(c, own);
	return r ? r : check_overlap(c, own, before, 0);
}

static int check_all_to_all(const struct checked *c)
{
	const struct agent_request *request = c->request;
	uint64_t sent = request->input_count, received = request->input_count;
	int r;

	if (request->counts) {
		r = sum_counts(c, request->counts, c->size, &sent);
		if (!r)
			r = sum_counts(c, request->counts + c->size, c->size, &received);
	} else {
		r = check_equal_blocks(c);
	}
	if (!r)
		r = check_input(c, sent);
	if (!r)
		r = check_output(c, received);
	return r ? r : check_overlap(c, received, 0, 0);
}

static int check_broadcast(const struct checked *c)
{
	const struct agent_request *request = c->request;
	uint64_t n = agent_check_elements(c->tensor, c->rank, request);
	int r;

	if (request->root >= c->size)
		return failure_set(c->failure, -EINVAL, "rank %u: no rank %u to broadcast from",
				   c->rank, request->root);
	if (c->rank != request->root)
		return check_output(c, n);
	r = check_input(c, n);
	if (r || !request->output)
		return r;
	r = check_output(c, n);
	return r ? r : check_overlap(c, n, 0, 0);
}

static int check_push_pull(const struct checked *c)
{
	uint64_t n = c->request->input_count;
	int r;

	r = check_input(c, n);
	if (!r)
		r = check_output(c, n);
	return r ? r : check_overlap(c, n, 0, 0);
}

static bool overlap(const void *a, uint64_t a_len, const void *b, uint64_t b_len)
{
	return a && b && a_len && b_len && (const char *)a < (const char *)b + b_len &&
	       (const char *)b < (const char *)a + a_len;
}

/* The rows of a result come in another order than those of the input: nothing may be in place. */
static int check_rows_apart(const struct checked *c, uint64_t n_in, uint64_t n_out)
{
	const struct agent_request *r = c->request;
	uint64_t row_len = r->width * c->element_size, number = sizeof(int64_t);

	if (overlap(r->output, n_out * row_len, r->input, n_in * row_len) ||
	    overlap(r->output, n_out * row_len, r->input_rows, n_in * number) ||
	    overlap(r->output_rows, n_out * number, r->input, n_in * row_len) ||
	    overlap(r->output_rows, n_out * number, r->input_rows, n_in * number) ||
	    overlap(r->output_rows, n_out * number, r->output, n_out * row_len))
		return failure_set(c->failure, -EINVAL,
				   "rank %u: input and output of push_pull_rows overlap", c->rank);
	return 0;
}

static int check_rows(const struct checked *c)
{
	const struct agent_request *r = c->request;
	uint64_t elements = c->tensor->elements;
	uint64_t n_in, n_out;

	if (elements == ELEMENTS_VARIABLE)
		return failure_set(c->failure, -EINVAL,
				   "rank %u: push_pull_rows of a tensor without a fixed size",
				   c->rank);
	if (!r->width || r->width > DATA_ROW_MAX / c->element_size || elements % r->width)
		return failure_set(c->failure, -EINVAL,
				   "rank %u: %" PRIu64 " elements are no rows of %" PRIu64
				   " (at most %zu bytes)",
				   c->rank, elements, r->width, (size_t)DATA_ROW_MAX);
	if (r->input_count % r->width || r->output_count % r->width)
		return failure_set(c->failure, -EINVAL,
				   "rank %u: %" PRIu64 " and %" PRIu64
				   " elements are not whole rows of %" PRIu64,
				   c->rank, r->input_count, r->output_count, r->width);
	n_in = r->input_count / r->width;
	n_out = r->output_count / r->width;
	if ((n_in && (!r->input || !r->input_rows)) || (n_out && (!r->output || !r->output_rows)))
		return failure_set(c->failure, -EINVAL,
				   "rank %u: push_pull_rows needs numbers and values of rows",
				   c->rank);
	return check_rows_apart(c, n_in, n_out);
}

static int check_kind(const struct checked *c)
{
	const struct agent_request *request = c->request;
	unsigned dtype = c->tensor->dtype;

	if (request->operation == OPERATION_REFUSE)
		return failure_set(c->failure, -EOPNOTSUPP,
				   "rank %u has joined, and adds zeros to sums and averages alone: "
				   "let other operations be over on all ranks before join()",
				   c->rank);
	if (!request->operation || request->operation > OPERATION_MAX_)
		return failure_set(c->failure, -EINVAL, "rank %u: no operation %u", c->rank,
				   request->operation);
	if (!reduces(request->operation) && request->reduction)
		return failure_set(c->failure, -EINVAL, "rank %u: %s has no reduction", c->rank,
				   operation_name(request->operation));
	if (reduces(request->operation) &&
	    (!request->reduction || request->reduction > REDUCTION_MAX_ ||
	     !reduce_supported(dtype, request->reduction)))
		return failure_set(c->failure, -EINVAL, "rank %u: no reduction %u (%s) of %s",
				   c->rank, request->reduction, reduction_name(request->reduction),
				   dtype_name(dtype));
	if (request->operation != OPERATION_ACCUMULATE)
		return 0;
	if (!c->tensor->job->shape.stragglers.async)
		return failure_set(c->failure, -EINVAL,
				   "rank %u: accumulate in a job without async", c->rank);
	if (request->reduction != REDUCTION_SUM || dtype == DTYPE_BOOL)
		return failure_set(c->failure, -EINVAL, "rank %u: accumulate is a sum of numbers",
				   c->rank);
	return 0;
}

/* What is widened is read by the sum, and by no device. */
static int check_widening(const struct checked *c)
{
	const struct agent_request *request = c->request;
	unsigned from = agent_check_input_dtype(c->tensor, request), to = c->tensor->dtype;

	if (from == to)
		return 0;
	if (request->operation != OPERATION_PUSH_PULL &&
	    request->operation != OPERATION_REDUCE_SCATTER)
		return failure_set(c->failure, -EINVAL,
				   "rank %u: %s takes no input of another type than the tensor's",
				   c->rank, operation_name(request->operation));
	if (!reduce_widens(from, to))
		return failure_set(c->failure, -EINVAL,
				   "rank %u: an input of %s for a tensor of %s: only float16 and "
				   "bfloat16 are widened, to float32",
				   c->rank, dtype_name(from), dtype_name(to));
	if (request->input_device || request->output_device)
		return failure_set(c->failure, -EOPNOTSUPP,
				   "rank %u: an input of %s for a tensor of %s needs memory of "
				   "the host: convert it on its device",
				   c->rank, dtype_name(from), dtype_name(to));
	return 0;
}

int agent_check_request(const struct agent_tensor *tensor, uint32_t rank,
			const struct agent_request *request, struct failure *failure)
{
	struct checked c = {
		.tensor = tensor,
		.request = request,
		.rank = rank,
		.size = tensor->job->shape.size,
		.element_size = dtype_size(tensor->dtype),
		.input_size = dtype_size(agent_check_input_dtype(tensor, request)),
		.failure = failure,
	};
	int r;

	r = check_kind(&c);
	r = r ?: check_widening(&c);
	if (r)
		return r;
	if (request->operation == OPERATION_BARRIER)
		return 0;
	if (request->operation == OPERATION_BROADCAST)
		return check_broadcast(&c);
	if (request->operation == OPERATION_PUSH_PULL_ROWS)
		return check_rows(&c);
	if (tensor->elements != ELEMENTS_VARIABLE && request->input_count != tensor->elements)
		return check_input(&c, tensor->elements);
	switch (request->operation) {
	case OPERATION_PUSH_PULL:
	case OPERATION_ACCUMULATE:
		return check_push_pull(&c);
	case OPERATION_ALL_GATHER:
		return check_all_gather(&c);
	case OPERATION_REDUCE_SCATTER:
		return check_reduce_scatter(&c);
	default:
		return check_all_to_all(&c);
	}
}

/* Two ranks' requests of one round, both checked. */
struct pair {
	const struct agent_tensor *tensor;
	uint32_t rank[2];
	const struct agent_request *request[2];
	struct failure *failure;
};

static int compare_kind(const struct pair *p)
{
	const struct agent_request *a = p->request[0], *b = p->request[1];

	if (a->operation != b->operation)
		return failure_set(p->failure, -EINVAL, "rank %u submitted %s, rank %u %s",
				   p->rank[0], operation_name(a->operation), p->rank[1],
				   operation_name(b->operation));
	if (a->reduction != b->reduction)
		return failure_set(p->failure, -EINVAL, "rank %u wants the %s, rank %u the %s",
				   p->rank[0], reduction_name(a->reduction), p->rank[1],
				   reduction_name(b->reduction));
	if (a->operation == OPERATION_BROADCAST && a->root != b->root)
		return failure_set(p->failure, -EINVAL,
				   "rank %u broadcasts from rank %u, rank %u from rank %u",
				   p->rank[0], a->root, p->rank[1], b->root);
	return 0;
}

static int compare_elements(const struct pair *p)
{
	uint64_t a = agent_check_elements(p->tensor, p->rank[0], p->request[0]);
	uint64_t b = agent_check_elements(p->tensor, p->rank[1], p->request[1]);

	if (a != b)
		return failure_set(p->failure, -EINVAL,
				   "rank %u has %" PRIu64 " elements, rank %u %" PRIu64, p->rank[0],
				   a, p->rank[1], b);
	return 0;
}

static int compare_shared_counts(const struct pair *p)
{
	const uint64_t *a = p->request[0]->counts, *b = p->request[1]->counts;

	if (!a != !b)
		return failure_set(p->failure, -EINVAL, "rank %u has counts, rank %u has none",
				   p->rank[!a], p->rank[!!a]);
	if (!a)
		return compare_elements(p);
	for (uint32_t i = 0; i < p->tensor->job->shape.size; i++) {
		if (a[i] != b[i])
			return failure_set(p->failure, -EINVAL,
					   "rank %u counts %" PRIu64
					   " elements for rank %u, rank %u %" PRIu64,
					   p->rank[0], a[i], i, p->rank[1], b[i]);
	}
	return 0;
}

/* What one of the two sends to the other, the other must expect. */
static int compare_exchange(const struct pair *p, unsigned from)
{
	uint32_t size = p->tensor->job->shape.size;
	const struct agent_request *sender = p->request[from], *receiver = p->request[!from];
	uint64_t sends, expects;

	sends = sender->counts ? sender->counts[p->rank[!from]] : sender->input_count / size;
	expects = receiver->counts ? receiver->counts[size + p->rank[from]]
				   : receiver->input_count / size;
	if (sends != expects)
		return failure_set(p->failure, -EINVAL,
				   "rank %u sends %" PRIu64
				   " elements to rank %u, which expects %" PRIu64,
				   p->rank[from], sends, p->rank[!from], expects);
	return 0;
}

static int compare_rows(const struct pair *p)
{
	uint64_t a = p->request[0]->width, b = p->request[1]->width;

	if (a != b)
		return failure_set(p->failure, -EINVAL,
				   "rank %u has rows of %" PRIu64 " elements, rank %u of %" PRIu64,
				   p->rank[0], a, p->rank[1], b);
	return 0;
}

static int compare(const struct pair *p)
{
	int r;

	r = compare_kind(p);
	if (r)
		return r;
	switch (p->request[0]->operation) {
	case OPERATION_ALL_GATHER:
	case OPERATION_REDUCE_SCATTER:
		return compare_shared_counts(p);
	case OPERATION_ALL_TO_ALL:
		r = compare_exchange(p, 0);
		return r ? r : compare_exchange(p, 1);
	case OPERATION_PUSH_PULL_ROWS:
		return compare_rows(p);
	default:
		return compare_elements(p);
	}
}

/* Those of two ranks, by local number, that have both come; the lower is told first. */
static int compare_ranks(const struct agent_round *round, uint32_t i, uint32_t j,
			 struct failure *failure)
{
	const struct layout *layout = &round->job->layout;
	const struct pair pair = {
		.tensor = round->tensor,
		.rank = { layout->rank_of_local[MIN(i, j)], layout->rank_of_local[MAX(i, j)] },
		.request = { round->ranks[MIN(i, j)].request, round->ranks[MAX(i, j)].request },
		.failure = failure,
	};

	return pair.request[0] && pair.request[1] ? compare(&pair) : 0;
}

int agent_check_pairs(const struct agent_round *round, uint32_t index, struct failure *failure)
{
	int r = 0;

	for (uint32_t i = 0; i < round->job->layout.n_local && !r; i++)
		r = compare_ranks(round, i, index, failure);
	return r;
}

int agent_check_round(const struct agent_round *round, struct failure *failure)
{
	uint32_t first = 0;
	int r = 0;

	while (!round->ranks[first].request)
		first++;
	for (uint32_t i = first + 1; i < round->job->layout.n_local && !r; i++)
		r = compare_ranks(round, first, i, failure);
	return r;
}
