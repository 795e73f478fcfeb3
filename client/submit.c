/*
 * From what the caller wants to one entry of the ring: plan_*() check it against the tensor and the job and say what is
 * wrong in the caller's words; the rest finds or stages the memory and posts.
 */
#include "cuda.h"
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>

#define BARRIER_TENSOR "bps:barrier"

struct plan {
	struct bps_tensor *tensor;
	struct bps_submit_params params;
	uint32_t rank, size, membership;
	size_t element_len, input_element_len;
	uint64_t input_count, output_count; /* elements */
	uint64_t input_len, output_len;	    /* bytes */
	uint64_t send_each, receive_each;   /* ALL_TO_ALL: elements of an equal block */
	/*
	 * Elements in front of this rank's block in input or output. in_place: input and output meet there, so that no
	 * result overwrites what is still to be read. stage_output: they do not, though they are the same.
	 */
	uint64_t input_before, output_before;
	bool in_place, stage_output;
	uint64_t input_rows_len, output_rows_len; /* PUSH_PULL_ROWS, bytes */
	bool cuda;				  /* input and output are on a device */
	struct cuda_place input_place, output_place;
};

static _printf_(2, 3) int plan_refuse(const struct plan *plan, const char *format, ...)
{
	char text[ERROR_TEXT_MAX + 1];
	va_list args;

	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	return error_set(-EINVAL, "%s of tensor \"%s\": %s",
			 operation_name((unsigned)plan->params.operation), plan->tensor->name,
			 text);
}

static int plan_sum(const struct plan *plan, const uint64_t *counts, const char *name,
		    uint64_t *ret_sum)
{
	uint64_t sum = 0;

	for (uint32_t rank = 0; rank < plan->size; rank++)
		if (ADD_OVERFLOW(sum, counts[rank], &sum))
			return plan_refuse(plan, "%s[%u] is out of range", name, rank);
	*ret_sum = sum;
	return 0;
}

static int plan_divide(const struct plan *plan, uint64_t count, const char *counts,
		       uint64_t *ret_each)
{
	if (count % plan->size)
		return plan_refuse(plan,
				   "%llu elements cannot be cut into %u equal blocks: give %s",
				   (unsigned long long)count, plan->size, counts);
	*ret_each = count / plan->size;
	return 0;
}

/* The elements of input, by what was declared, said, and counted. */
static int plan_input(struct plan *plan)
{
	const struct bps_submit_params *p = &plan->params;
	uint64_t declared = plan->tensor->elements;
	uint64_t counted = p->input_count;
	int r = 0;

	if (p->counts && p->operation == BPS_ALL_GATHER)
		counted = p->counts[plan->rank];
	else if (p->counts)
		r = plan_sum(plan, p->counts, "counts", &counted);
	else if (p->operation == BPS_BROADCAST && !counted && declared == BPS_VARIABLE)
		counted = p->output_count;
	if (r)
		return r;

	if (p->input_count)
		plan->input_count = p->input_count;
	else if (p->counts || declared == BPS_VARIABLE)
		plan->input_count = counted;
	else
		plan->input_count = declared;

	if (plan->input_count != counted && p->counts)
		return plan_refuse(plan, "input_count is %llu, but counts say %llu",
				   (unsigned long long)plan->input_count,
				   (unsigned long long)counted);
	if (declared != BPS_VARIABLE && plan->input_count != declared)
		return plan_refuse(plan, "%llu elements, but %llu were declared",
				   (unsigned long long)plan->input_count,
				   (unsigned long long)declared);
	return 0;
}

static int plan_all_to_all(struct plan *plan, uint64_t *ret_needed)
{
	const struct bps_submit_params *p = &plan->params;
	uint64_t received = p->output_count ?: plan->input_count;
	uint64_t send_self, receive_self;
	int r = 0;

	if (!p->counts)
		r = plan_divide(plan, plan->input_count, "counts", &plan->send_each);
	if (!r && p->receive_counts)
		r = plan_sum(plan, p->receive_counts, "receive_counts", &received);
	else if (!r && !p->counts)
		received = plan->input_count, plan->receive_each = plan->send_each;
	else if (!r)
		r = plan_divide(plan, received, "receive_counts", &plan->receive_each);
	if (r)
		return r;

	send_self = p->counts ? p->counts[plan->rank] : plan->send_each;
	receive_self = p->receive_counts ? p->receive_counts[plan->rank] : plan->receive_each;
	if (send_self != receive_self)
		return plan_refuse(plan, "this rank sends itself %llu elements and receives %llu",
				   (unsigned long long)send_self, (unsigned long long)receive_self);
	*ret_needed = received;
	return 0;
}

static int plan_all_gather(struct plan *plan, uint64_t *ret_needed)
{
	const uint64_t *counts = plan->params.counts;
	uint64_t needed;

	plan->output_before = plan->input_count * plan->rank;
	if (counts) {
		plan->output_before = 0;
		for (uint32_t rank = 0; rank < plan->rank; rank++)
			plan->output_before += counts[rank];
		return plan_sum(plan, counts, "counts", ret_needed);
	}
	if (MUL_OVERFLOW(plan->input_count, (uint64_t)plan->size, &needed))
		return plan_refuse(plan, "input_count is out of range");
	*ret_needed = needed;
	return 0;
}

static int plan_reduce_scatter(struct plan *plan, uint64_t *ret_needed)
{
	const uint64_t *counts = plan->params.counts;
	int r;

	if (counts) {
		for (uint32_t rank = 0; rank < plan->rank; rank++)
			plan->input_before += counts[rank];
		*ret_needed = counts[plan->rank];
		return 0;
	}
	r = plan_divide(plan, plan->input_count, "counts", ret_needed);
	if (!r)
		plan->input_before = *ret_needed * plan->rank;
	return r;
}

/* Rows are few or many from one time to the next: nothing follows from what was declared but the table. */
static int plan_rows(struct plan *plan)
{
	const struct bps_submit_params *p = &plan->params;
	uint64_t elements = plan->tensor->elements;

	if (elements == BPS_VARIABLE)
		return plan_refuse(plan, "the tensor has no fixed size");
	if (!p->width || elements % p->width)
		return plan_refuse(plan, "%llu elements are no rows of %llu",
				   (unsigned long long)elements, (unsigned long long)p->width);
	if (p->input_count % p->width || p->output_count % p->width)
		return plan_refuse(plan, "%s is %llu elements, which are no whole rows of %llu",
				   p->input_count % p->width ? "input_count" : "output_count",
				   (unsigned long long)(p->input_count % p->width
								? p->input_count
								: p->output_count),
				   (unsigned long long)p->width);
	plan->input_count = p->input_count;
	plan->output_count = p->output_count;
	if (MUL_OVERFLOW(plan->input_count / p->width, sizeof(int64_t), &plan->input_rows_len) ||
	    MUL_OVERFLOW(plan->output_count / p->width, sizeof(int64_t), &plan->output_rows_len))
		return plan_refuse(plan, "more rows than there can be");
	return 0;
}

/* The elements that the operation gives this rank. */
static int plan_output(struct plan *plan)
{
	const struct bps_submit_params *p = &plan->params;
	uint64_t needed = plan->input_count;
	int r = 0;

	if (p->operation == BPS_ALL_GATHER)
		r = plan_all_gather(plan, &needed);
	else if (p->operation == BPS_REDUCE_SCATTER)
		r = plan_reduce_scatter(plan, &needed);
	else if (p->operation == BPS_ALL_TO_ALL)
		r = plan_all_to_all(plan, &needed);
	if (r)
		return r;

	if (p->output_count && p->output_count < needed)
		return plan_refuse(plan, "the output has room for %llu elements of %llu",
				   (unsigned long long)p->output_count, (unsigned long long)needed);
	plan->output_count = needed;
	return 0;
}

static int plan_overlap(struct plan *plan)
{
	const struct bps_submit_params *p = &plan->params;
	uintptr_t input = (uintptr_t)p->input, output = (uintptr_t)p->output;

	if (!plan->input_len || !plan->output_len || input >= output + plan->output_len ||
	    output >= input + plan->input_len)
		return 0;
	plan->in_place = p->operation != BPS_ALL_TO_ALL &&
			 plan->input_element_len == plan->element_len &&
			 input + plan->input_before * plan->element_len ==
				 output + plan->output_before * plan->element_len;
	plan->stage_output = !plan->in_place && input == output;
	if (!plan->in_place && !plan->stage_output)
		return plan_refuse(plan, "input and output overlap: make them the same or apart");
	return 0;
}

static bool overlap(const void *a, uint64_t a_len, const void *b, uint64_t b_len)
{
	return a_len && b_len && (uintptr_t)a < (uintptr_t)b + b_len &&
	       (uintptr_t)b < (uintptr_t)a + a_len;
}

static int plan_rows_memory(struct plan *plan)
{
	const struct bps_submit_params *p = &plan->params;

	if ((plan->input_rows_len && !p->input_rows) || (plan->output_rows_len && !p->output_rows))
		return plan_refuse(plan, "%s is NULL",
				   plan->input_rows_len && !p->input_rows ? "input_rows"
									  : "output_rows");
	if ((uintptr_t)p->input_rows % sizeof(int64_t) ||
	    (uintptr_t)p->output_rows % sizeof(int64_t))
		return plan_refuse(plan, "input_rows or output_rows is not aligned to %zu bytes",
				   sizeof(int64_t));
	if (plan->in_place || plan->stage_output ||
	    overlap(p->output, plan->output_len, p->input_rows, plan->input_rows_len) ||
	    overlap(p->output_rows, plan->output_rows_len, p->input, plan->input_len) ||
	    overlap(p->output_rows, plan->output_rows_len, p->input_rows, plan->input_rows_len) ||
	    overlap(p->output_rows, plan->output_rows_len, p->output, plan->output_len))
		return plan_refuse(plan, "input and output overlap: make them apart");
	return 0;
}

static int plan_memory(struct plan *plan)
{
	struct bps_submit_params *p = &plan->params;
	uintptr_t input, output;

	if (MUL_OVERFLOW(plan->input_count, plan->input_element_len, &plan->input_len) ||
	    MUL_OVERFLOW(plan->output_count, plan->element_len, &plan->output_len) ||
	    plan->input_len > INT64_MAX || plan->output_len > INT64_MAX)
		return plan_refuse(plan, "more elements than there can be");

	/* Elsewhere than on the root a broadcast has no input; its count says what the block has. */
	if (p->operation == BPS_BROADCAST && plan->rank != p->root) {
		p->input = NULL;
		plan->input_len = 0;
	}
	/* On the root the output is only what the input is. */
	if (p->operation == BPS_BROADCAST && plan->rank == p->root && !p->output)
		plan->output_len = 0;
	if (plan->input_len && !p->input)
		return plan_refuse(plan, "input is NULL");
	if (plan->output_len && !p->output)
		return plan_refuse(plan, "output is NULL");

	input = (uintptr_t)p->input;
	output = (uintptr_t)p->output;
	if (plan->input_len && input % plan->input_element_len)
		return plan_refuse(plan, "input is not aligned to %zu bytes",
				   plan->input_element_len);
	if (plan->output_len && output % plan->element_len)
		return plan_refuse(plan, "output is not aligned to %zu bytes", plan->element_len);
	return plan_overlap(plan);
}

static int plan_check_input_dtype(const struct plan *plan)
{
	const struct bps_submit_params *p = &plan->params;
	const struct bps_client *client = plan->tensor->client;
	unsigned from = (unsigned)MIN(p->input_dtype, (uint64_t)UINT_MAX);
	unsigned to = plan->tensor->dtype;

	if (!from || from == to)
		return 0;
	if (p->operation != BPS_PUSH_PULL && p->operation != BPS_REDUCE_SCATTER)
		return plan_refuse(plan, "it takes no input of another type than the tensor's");
	if (to != DTYPE_FLOAT32 || (from != DTYPE_FLOAT16 && from != DTYPE_BFLOAT16))
		return plan_refuse(plan,
				   "the tensor is of %s, the input of %s: only float16 and "
				   "bfloat16 are widened, to float32",
				   dtype_name(to), dtype_name(from));
	if (p->memory == BPS_MEMORY_CUDA)
		return plan_refuse(plan,
				   "the tensor is of %s, the input of %s, on a device: convert it "
				   "there, or give memory of the host",
				   dtype_name(to), dtype_name(from));
	if (!client->ring.widens)
		return error_set(
			-EOPNOTSUPP,
			"%s of tensor \"%s\": the daemon at %s is of a version that takes no "
			"input of another type than the tensor's: convert it before",
			operation_name((unsigned)p->operation), plan->tensor->name, client->path);
	return 0;
}

static int plan_check_kind(struct plan *plan)
{
	struct bps_submit_params *p = &plan->params;
	bool rows = p->operation == BPS_PUSH_PULL_ROWS;
	bool accumulates = p->operation == BPS_ACCUMULATE;
	bool reduces = p->operation == BPS_PUSH_PULL || p->operation == BPS_REDUCE_SCATTER ||
		       rows || accumulates;

	if ((p->operation < 1 || p->operation > OPERATION_MAX_) && p->operation != BPS_REFUSE)
		return error_set(-EINVAL, "tensor \"%s\": %d is no operation", plan->tensor->name,
				 p->operation);
	if (p->reduction < 0 || p->reduction > REDUCTION_MAX_)
		return plan_refuse(plan, "%d is no reduction", p->reduction);
	if (p->reduction && !reduces)
		return plan_refuse(plan, "it reduces nothing, but reduction is %s",
				   reduction_name((unsigned)p->reduction));
	if (reduces && !p->reduction)
		p->reduction = BPS_SUM;
	if (p->reduction == BPS_AVERAGE && plan->tensor->dtype == DTYPE_BOOL)
		return plan_refuse(plan, "bool has no average");
	if (accumulates && !plan->tensor->client->job.params.asynchronous)
		return plan_refuse(plan, "the job has no async, which all ranks join with");
	if (accumulates && (p->reduction != BPS_SUM || plan->tensor->dtype == DTYPE_BOOL))
		return plan_refuse(plan, "it is a sum of numbers");
	if (p->all_ranks && p->operation != BPS_PUSH_PULL && !accumulates)
		return plan_refuse(plan, "all_ranks, but it always waits for all");
	if (p->operation == BPS_BROADCAST && p->root >= plan->size)
		return plan_refuse(plan, "root is %u, but the job has %u ranks", p->root,
				   plan->size);
	if (p->timeout_ms < 0)
		return plan_refuse(plan, "a negative timeout: every request has an end");
	if (p->counts &&
	    (p->operation == BPS_PUSH_PULL || p->operation == BPS_BROADCAST ||
	     p->operation == BPS_BARRIER || p->operation == BPS_REFUSE || rows || accumulates))
		return plan_refuse(plan, "it has no counts");
	if (!rows && (p->width || p->input_rows || p->output_rows))
		return plan_refuse(plan, "it has no rows");
	if (p->order < 0 || p->order > ORDERS)
		return plan_refuse(plan, "%d is no order", p->order);
	if (p->ordinal && p->order)
		return plan_refuse(plan, "an order and an ordinal: one of them says the other");
	if ((p->ordinal || p->order) && rows)
		return plan_refuse(plan, "it has no ordinal");
	if (p->ordinal && plan->tensor->client->job.params.elastic)
		return plan_refuse(plan, "an ordinal, but the job is elastic");
	if (p->receive_counts && p->operation != BPS_ALL_TO_ALL)
		return plan_refuse(plan, "it has no receive_counts");
	if (p->memory != BPS_MEMORY_HOST && p->memory != BPS_MEMORY_CUDA)
		return plan_refuse(plan, "%d is no kind of memory", p->memory);
	if (p->stream && p->memory != BPS_MEMORY_CUDA)
		return plan_refuse(plan, "a stream, but memory is BPS_MEMORY_HOST");
	return plan_check_input_dtype(plan);
}

/* Where on which device, without the mutex. */
static int plan_inspect(struct plan *plan, const struct cuda *api)
{
	const struct bps_submit_params *p = &plan->params;
	int r = 0;

	plan->input_place = plan->output_place = (struct cuda_place){ 0 };
	if (plan->input_len)
		r = cuda_inspect(api, p->input, plan->input_len, "input", p->stream,
				 &plan->input_place);
	if (!r && plan->output_len)
		r = cuda_inspect(api, p->output, plan->output_len, "output", p->stream,
				 &plan->output_place);
	if (r)
		return r;
	if (!plan->input_len)
		plan->input_place = plan->output_place;
	else if (!plan->output_len)
		plan->output_place = plan->input_place;
	if (plan->input_place.device != plan->output_place.device)
		return plan_refuse(plan, "input is on CUDA device %d, output on %d",
				   plan->input_place.device, plan->output_place.device);
	return 0;
}

/* (locked, may wait) */
static int plan_places(struct plan *plan)
{
	struct bps_client *client = plan->tensor->client;
	int r;

	if (plan->params.memory != BPS_MEMORY_CUDA || (!plan->input_len && !plan->output_len))
		return 0;
	plan->cuda = true;
	r = cuda_open(client);
	if (r)
		return r;
	client_unlock(client);
	r = plan_inspect(plan, client->cuda->api);
	client_lock(client);
	return r;
}

static int plan_check(struct plan *plan)
{
	int r;

	r = plan_check_kind(plan);
	if (r || plan->params.operation == BPS_BARRIER || plan->params.operation == BPS_REFUSE)
		return r;
	if (plan->params.operation == BPS_PUSH_PULL_ROWS) {
		r = plan_rows(plan);
		r = r ?: plan_memory(plan);
		return r ?: plan_rows_memory(plan);
	}
	r = plan_input(plan);
	r = r ?: plan_output(plan);
	return r ?: plan_memory(plan);
}

/* Of plan->params. (locked, may wait) */
static int plan_new(struct bps_tensor *tensor, struct plan *plan)
{
	struct bps_client *client = tensor->client;
	int r;

	/* By hand: a whole structure would be cleared before, places and all. */
	plan->tensor = tensor;
	plan->rank = client->job.rank;
	plan->size = client->job.size;
	plan->membership = client->job.membership;
	plan->element_len = dtype_size(tensor->dtype);
	plan->input_element_len = plan->params.input_dtype
					  ? dtype_size((unsigned)plan->params.input_dtype)
					  : plan->element_len;
	plan->input_count = plan->output_count = 0;
	plan->input_len = plan->output_len = 0;
	plan->send_each = plan->receive_each = 0;
	plan->input_before = plan->output_before = 0;
	plan->in_place = plan->stage_output = false;
	plan->input_rows_len = plan->output_rows_len = 0;
	plan->cuda = false;

	r = tensor_check(tensor);
	/* Who has to try again is told at once. */
	r = r ?: request_find_slot(client);
	r = r ?: plan_check(plan);
	return r ?: plan_places(plan);
}

/* Memory that the daemon can reach, for one side of the operation on memory of the host. (locked, may wait) */
static int submit_find(struct bps_client *client, const void *data, uint64_t len, bool stage,
		       struct bps_memory **memory, struct staging_range **range)
{
	if (!len)
		return 0;
	*memory = stage ? NULL : memory_find(client, data, len);
	if (!*memory)
		return staging_alloc(client, &client->memory.staging, len, range);
	memory_use(*memory);
	return 0;
}

/* The same for input and output. */
static int submit_find_host(const struct plan *plan, struct bps_request *request, bool one_range)
{
	const struct bps_submit_params *p = &plan->params;
	struct bps_client *client = request->client;
	int r;

	r = submit_find(client, p->output, plan->output_len, plan->stage_output,
			&request->output_memory, &request->output_range);
	if (r || one_range)
		return r;
	return submit_find(client, p->input, plan->input_len, false, &request->input_memory,
			   &request->input_range);
}

/* The same on a device. That the daemon does not take it may turn out with the second: then neither is handed over. */
static int submit_find_cuda(const struct plan *plan, struct bps_request *request, bool one_range)
{
	const struct bps_submit_params *p = &plan->params;
	struct bps_client *client = request->client;
	struct cuda_use *use = request->cuda;
	bool on_device;
	int r = 0;

	do {
		on_device = use->flags;
		request_release_memory(request);
		if (plan->output_len)
			r = cuda_find(client, use, &plan->output_place, p->output, plan->output_len,
				      plan->stage_output, &request->output_memory,
				      &request->output_range);
		if (!r && plan->input_len && !one_range)
			r = cuda_find(client, use, &plan->input_place, p->input, plan->input_len,
				      false, &request->input_memory, &request->input_range);
	} while (!r && on_device && !use->flags);
	return r;
}

/* Takes all that the request will hold. What fails is given back with the request. (locked, may wait) */
static int submit_acquire(const struct plan *plan, struct bps_request *request)
{
	const struct bps_submit_params *p = &plan->params;
	struct bps_client *client = request->client;
	bool one_range =
		plan->in_place && (p->operation == BPS_PUSH_PULL || p->operation == BPS_BROADCAST ||
				   p->operation == BPS_ACCUMULATE);
	int r = 0;

	request->output = p->output;
	request->output_len = plan->output_len;
	request->output_rows = p->output_rows;
	request->row_len = p->width * plan->element_len;
	request->counted = p->operation == BPS_PUSH_PULL || p->operation == BPS_ACCUMULATE;
	if (plan->cuda)
		r = cuda_use_new(request, &plan->input_place, p->stream,
				 p->operation == BPS_PUSH_PULL_ROWS);
	r = r ?: request_take_slot(request);
	if (!r)
		r = plan->cuda ? submit_find_cuda(plan, request, one_range)
			       : submit_find_host(plan, request, one_range);
	if (!r && one_range && request->output_memory) {
		request->input_memory = request->output_memory;
		memory_use(request->input_memory);
	}
	if (!r && (p->counts || p->receive_counts))
		r = staging_alloc(client, &client->memory.staging,
				  2 * (uint64_t)plan->size * sizeof(uint64_t),
				  &request->counts_range);
	r = r
		    ?: submit_find(client, p->input_rows, plan->input_rows_len, false,
				   &request->input_rows_memory, &request->input_rows_range);
	r = r
		    ?: submit_find(client, p->output_rows, plan->output_rows_len, false,
				   &request->output_rows_memory, &request->output_rows_range);
	if (!r && plan->cuda)
		cuda_use_slot(request);
	return r;
}

static void submit_copy_counts(const struct plan *plan, uint64_t *counts)
{
	const struct bps_submit_params *p = &plan->params;

	for (uint32_t rank = 0; rank < plan->size; rank++) {
		counts[rank] = p->counts ? p->counts[rank] : plan->send_each;
		counts[plan->size + rank] =
			p->receive_counts ? p->receive_counts[rank] : plan->receive_each;
	}
}

/* Copies what is staged, and puts what is on a device into its stream, without the mutex. */
static int submit_copy(const struct plan *plan, struct bps_request *request)
{
	const struct bps_submit_params *p = &plan->params;
	void *input = NULL;

	if (request->input_range)
		input = staging_data(request->input_range);
	else if (plan->input_len && !request->input_memory) /* in place */
		input = staging_data(request->output_range);
	if (input && !plan->cuda)
		memcpy(input, p->input, plan->input_len);
	if (request->input_rows_range)
		memcpy(staging_data(request->input_rows_range), p->input_rows,
		       plan->input_rows_len);
	if (request->counts_range)
		submit_copy_counts(plan, staging_data(request->counts_range));
	if (!plan->cuda)
		return 0;
	return cuda_begin(request, p->input, input, plan->input_len);
}

/* As the daemon calls it. */
struct location {
	uint32_t buffer;
	uint64_t offset;
};

static struct location submit_locate(const struct bps_memory *memory,
				     const struct staging_range *range, const void *data)
{
	if (memory)
		return (struct location){ memory->number,
					  (uint64_t)((const char *)data - memory->data) };
	if (range)
		return (struct location){ range->arena->memory->number, range->offset };
	return (struct location){ 0, 0 };
}

static void submit_post(const struct plan *plan, struct bps_request *request)
{
	const struct bps_submit_params *p = &plan->params;
	const struct staging_range *input_range = request->input_range;
	const struct bps_join_params *job = &request->client->job.params;
	bool waits_not = job->quorum || job->asynchronous;
	uint32_t input_dtype = p->input_dtype == plan->tensor->dtype ? 0 : (uint32_t)p->input_dtype;
	uint64_t ordinal = p->ordinal;
	struct location input, output, counts, input_rows = { 0, 0 }, output_rows = { 0, 0 };

	if (plan->input_len && !request->input_memory && !input_range)
		input_range = request->output_range; /* in place */
	input = submit_locate(request->input_memory, input_range, p->input);
	output = submit_locate(request->output_memory, request->output_range, p->output);
	counts = submit_locate(NULL, request->counts_range, NULL);
	if (request->row_len) {
		input_rows = submit_locate(request->input_rows_memory, request->input_rows_range,
					   p->input_rows);
		output_rows = submit_locate(request->output_rows_memory, request->output_rows_range,
					    p->output_rows);
	}
	if (p->order)
		ordinal = order_take(request->client, p->order);
	/* All of it: what is left out would have to be cleared before. */
	request->entry = (struct shm_entry){
		.ticket = 0,
		.round = ++plan->tensor->rounds,
		.slot = 0,
		.tensor = plan->tensor->number,
		.operation = (uint8_t)p->operation,
		.reduction = (uint8_t)p->reduction,
		.membership = (uint16_t)plan->membership,
		.priority = p->priority,
		.root = p->operation == BPS_BROADCAST ? p->root
						      : (uint32_t)(p->all_ranks && waits_not),
		.input_buffer = input.buffer,
		.output_buffer = output.buffer,
		.counts_buffer = counts.buffer,
		.input_offset = input.offset,
		.input_count = plan->input_count,
		.output_offset = output.offset,
		.output_count = plan->output_count,
		.counts_offset = counts.offset,
		.timeout_ms = (uint64_t)p->timeout_ms,
		.ordinal = p->operation == BPS_PUSH_PULL_ROWS ? p->width : ordinal,
		.input_rows_offset = input_rows.offset,
		.output_rows_offset = output_rows.offset,
		.input_rows_buffer =
			p->operation == BPS_PUSH_PULL_ROWS ? input_rows.buffer : input_dtype,
		.output_rows_buffer = output_rows.buffer,
	};
	request_post(request, plan->tensor);
}

/* Whether there is anything to do without the mutex. */
static bool submit_is_staged(const struct plan *plan, const struct bps_request *request)
{
	return plan->cuda || request->input_range || request->output_range ||
	       request->counts_range || request->row_len;
}

/* (locked, may wait) */
static int submit(struct bps_tensor *tensor, struct plan *plan, struct bps_request **ret_request)
{
	struct bps_client *client = tensor->client;
	struct bps_request *request;
	int r;

	r = plan_new(tensor, plan);
	r = r ?: request_new(client, &request);
	if (r)
		return r;

	r = submit_acquire(plan, request);
	if (!r && submit_is_staged(plan, request)) {
		client_unlock(client);
		r = submit_copy(plan, request);
		client_lock(client);
	}
	/* The job may have ended in all this. */
	r = r ?: tensor_check(tensor);
	if (!r && plan->params.round && plan->params.round != tensor->rounds + 1)
		r = error_set(-EALREADY, "round %llu of tensor \"%s\": the next is %llu",
			      (unsigned long long)plan->params.round, tensor->name,
			      (unsigned long long)tensor->rounds + 1);
	if (r) {
		request_free(request);
		return r;
	}
	submit_post(plan, request);
	*ret_request = request;
	return 0;
}

_public_ int bps_submit(struct bps_tensor *tensor, const struct bps_submit_params *params,
			struct bps_request **ret_request)
{
	struct bps_client *client;
	struct plan plan;
	int r;

	if (!tensor || !params || !ret_request)
		return error_set(-EINVAL, "%s is NULL",
				 !tensor   ? "tensor"
				 : !params ? "params"
					   : "ret_request");
	client = tensor->client;
	r = client_check(client);
	r = r ?: error_copy_params(&plan.params, sizeof(plan.params), params, "bps_submit_params");
	if (r)
		return r;

	client_lock(client);
	r = submit(tensor, &plan, ret_request);
	client_unlock(client);
	return r;
}

_public_ int bps_barrier(struct bps_client *client, int64_t timeout_ms,
			 struct bps_request **ret_request)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_BARRIER,
		.timeout_ms = timeout_ms,
	};
	const struct tensor_facts facts = { .name = BARRIER_TENSOR, .dtype = DTYPE_UINT8 };
	struct bps_tensor *tensor;
	int r;

	r = client_check(client);
	if (r)
		return r;
	client_lock(client);
	r = tensor_get(client, &facts, &tensor);
	client_unlock(client);
	if (r)
		return r;

	r = bps_submit(tensor, &params, ret_request);
	bps_tensor_free(tensor);
	return r;
}
