/*
 * What bps.jax has XLA call on the CPU. One operation of bps.jax is two calls in a compiled program:
 *
 *   bps_start   takes a token and the tensors, copies them into memory that the daemon reads, submits them all, and
 *               gives the token on and the number of a "call". It never waits for another rank. The tokens make every
 *               rank start its calls in the order of the program, so a name may be used many times, and what has none is
 *               compared with what other ranks start (enum bps_order).
 *   bps_done    takes the number and gives the results: at once, or later as a future, so that no thread of XLA ever
 *               waits. Calls may be done in any order; XLA computes meanwhile.
 *
 * One thread, the waiter, waits for the calls in the order in which they were started, which is the same on all ranks: what
 * it waits for never depends on what it has not come to yet. It copies results and completes futures.
 *
 * Ownership. A call is in module.calls from the end of bps_start until its results are handed over, or until detach. A
 * block of memory belongs to one call at a time, and is kept for the next of its size. Everything in struct module is
 * guarded by its mutex; a call's requests and memory belong to bps_start, then to the waiter until the call is complete, then
 * to whoever takes the call out of the list.
 */
#include "client/native/declare.h"
#include "client/native/jax_ffi.h"
#include "proto/c.h"
#include <bps.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/queue.h>

#define WAIT_SLICE_MS  200 /* how long detaching waits for the waiter, at most */
#define ALIGNMENT      64  /* of a tensor in a block: what sums are fastest on */
#define BLOCKS_KEPT    32
#define TEXT_MAX       512
#define BARRIER_TENSOR "barrier.noname.jax"

/* Called by Python, by ctypes. */
#define API __attribute__((__visibility__("default")))

struct block {
	TAILQ_ENTRY(block) link; /* in module.blocks */
	struct bps_memory *memory;
	size_t len;
};

/* One tensor of a call. */
struct part {
	struct bps_request *request;
	const void *output; /* in the block */
	size_t output_len;
	void *result; /* XLA's, once bps_done has come */
};

struct call {
	TAILQ_ENTRY(call) link; /* in module.calls, in the order of starting */
	uint64_t number;
	struct block *block;
	bool complete;
	int status; /* of the first part that failed */
	char text[TEXT_MAX];
	const struct ffi_api *api;
	struct ffi_future *future; /* NULL until bps_done has come too early */
	size_t n_parts;
	struct part parts[];
};

static struct {
	pthread_mutex_t mutex;
	pthread_cond_t changed; /* client, n_inside, calls, complete */
	struct bps_client *client;
	pthread_t waiter;
	unsigned n_inside; /* threads of XLA that use client or what is its */
	uint64_t last_number;
	TAILQ_HEAD(, call) calls;
	TAILQ_HEAD(block_list, block) blocks; /* that no call uses; the last used first */
	unsigned n_blocks;
	atomic_bool closing; /* while detaching, and after it */
	pid_t pid;	     /* of the process that attached */
} module = {
	.mutex = PTHREAD_MUTEX_INITIALIZER,
	.changed = PTHREAD_COND_INITIALIZER,
	.calls = TAILQ_HEAD_INITIALIZER(module.calls),
	.blocks = TAILQ_HEAD_INITIALIZER(module.blocks),
};

static void module_lock(void)
{
	(void)pthread_mutex_lock(&module.mutex);
}

static void module_unlock(void)
{
	(void)pthread_mutex_unlock(&module.mutex);
}

/* -- What XLA is told ------------------------------------------------------------------------------------------------ */

static int code_of(int status)
{
	switch (-status) {
	case EINVAL:
	case EEXIST:
	case EILSEQ:
		return FFI_INVALID_ARGUMENT;
	case ETIME:
	case ETIMEDOUT:
		return FFI_DEADLINE_EXCEEDED;
	case ECANCELED:
		return FFI_CANCELLED;
	case ECONNRESET:
	case EPIPE:
	case ESHUTDOWN:
		return FFI_UNAVAILABLE;
	case ENOTCONN:
	case EPERM:
		return FFI_FAILED_PRECONDITION;
	case EAGAIN:
	case EDQUOT:
	case ENOMEM:
		return FFI_RESOURCE_EXHAUSTED;
	default:
		return FFI_INTERNAL;
	}
}

/* status 0 is no error: NULL. */
static struct ffi_error *error_new(const struct ffi_api *api, int status, const char *text)
{
	char message[TEXT_MAX + 32];
	struct ffi_error_create args = {
		.struct_size = sizeof(args),
		.message = message,
		.code = code_of(status),
	};

	if (!status)
		return NULL;
	/* The number lets bps.jax make the exception that the other front ends raise. */
	(void)snprintf(message, sizeof(message), "bps [errno %d] %s", -status, text);
	return api->error_create(&args);
}

/* XLA asks, before it runs a handler, which version that was made for. */
static bool answer_metadata(struct ffi_call_frame *frame)
{
	struct ffi_extension *extension = frame->extension_start;
	struct ffi_metadata *metadata;

	if (!extension || extension->type != FFI_EXTENSION_METADATA)
		return false;
	metadata = container_of(extension, struct ffi_metadata_extension, base)->metadata;
	metadata->api_version.major = FFI_MAJOR;
	metadata->api_version.minor = FFI_MINOR;
	metadata->traits = 0;
	return true;
}

/* -- Blocks ----------------------------------------------------------------------------------------------------------- */

static void block_free(struct block *block)
{
	if (!block)
		return;
	bps_memory_free(block->memory);
	free(block);
}

static void block_list_free(struct block_list *list)
{
	struct block *block;

	while ((block = TAILQ_FIRST(list))) {
		TAILQ_REMOVE(list, block, link);
		block_free(block);
	}
}

/* One that is free, or a new one. When there is no room for it, those that are free make it. */
static int block_get(struct bps_client *client, size_t len, struct block **ret_block)
{
	struct block_list given_up = TAILQ_HEAD_INITIALIZER(given_up);
	struct block *block;
	int r;

	module_lock();
	TAILQ_FOREACH(block, &module.blocks, link)
	{
		if (block->len == len)
			break;
	}
	if (block) {
		TAILQ_REMOVE(&module.blocks, block, link);
		module.n_blocks--;
	}
	module_unlock();

	if (!block) {
		block = calloc(1, sizeof(*block));
		if (!block)
			return -ENOMEM;
		block->len = len;
		r = bps_memory_alloc(client, len, &block->memory);
		if (r == -EDQUOT || r == -ENOMEM) {
			module_lock();
			TAILQ_CONCAT(&given_up, &module.blocks, link);
			module.n_blocks = 0;
			module_unlock();
			block_list_free(&given_up);
			r = bps_memory_alloc(client, len, &block->memory);
		}
		if (r) {
			free(block);
			return r;
		}
	}
	*ret_block = block;
	return 0;
}

/* Nothing of it is in the daemon's hands. */
static void block_put(struct block *block)
{
	struct block *oldest = NULL;

	if (!block)
		return;
	module_lock();
	TAILQ_INSERT_HEAD(&module.blocks, block, link);
	if (++module.n_blocks > BLOCKS_KEPT) {
		oldest = TAILQ_LAST(&module.blocks, block_list);
		TAILQ_REMOVE(&module.blocks, oldest, link);
		module.n_blocks--;
	}
	module_unlock();
	block_free(oldest);
}

/* -- Calls ------------------------------------------------------------------------------------------------------------ */

/* Also of one that is not complete: it is then given up, and its memory goes when the daemon has let go of it. */
static void call_free(struct call *call)
{
	bool idle = true;

	if (!call)
		return;
	for (size_t i = 0; i < call->n_parts; i++) {
		struct bps_request *request = call->parts[i].request;

		if (!request)
			continue;
		if (bps_request_poll(request) == 0) {
			idle = false;
			(void)bps_request_cancel(request);
		}
		bps_request_free(request);
	}
	if (idle)
		block_put(call->block);
	else
		block_free(call->block);
	free(call);
}

static void call_freep(struct call **callp)
{
	call_free(*callp);
}

static void call_fail(struct call *call, int status, const char *text)
{
	if (call->status)
		return;
	call->status = status;
	(void)snprintf(call->text, sizeof(call->text), "%s", text);
}

/* Without the mutex. False when detaching came first. */
static bool call_wait(struct call *call)
{
	for (size_t i = 0; i < call->n_parts; i++) {
		struct bps_request *request = call->parts[i].request;
		int r;

		while (request && (r = bps_request_wait(request, WAIT_SLICE_MS)) == -ETIMEDOUT) {
			if (atomic_load(&module.closing))
				return false;
		}
		if (request && r)
			call_fail(call, r, bps_error());
	}
	return true;
}

static void call_copy_results(const struct call *call)
{
	for (size_t i = 0; i < call->n_parts; i++)
		if (call->parts[i].output_len)
			memcpy(call->parts[i].result, call->parts[i].output,
			       call->parts[i].output_len);
}

/* Completes the future of a call that is in no list any more, and frees the call. Without the mutex. */
static void call_finish(struct call *call)
{
	const struct ffi_api *api = call->api;
	struct ffi_future *future = call->future;
	struct ffi_error *error = error_new(api, call->status, call->text);

	if (error) {
		struct ffi_future_set_error args = {
			.struct_size = sizeof(args),
			.future = future,
			.error = error,
		};
		call_free(call);
		(void)api->future_set_error(&args);
	} else {
		struct ffi_future_set_available args = {
			.struct_size = sizeof(args),
			.future = future,
		};
		call_copy_results(call);
		call_free(call);
		(void)api->future_set_available(&args);
	}
}

/* Under the mutex. */
static struct call *first_not_complete(void)
{
	struct call *call;

	TAILQ_FOREACH(call, &module.calls, link)
	{
		if (!call->complete)
			return call;
	}
	return NULL;
}

/*
 * Waits for the oldest call and hands its results over if bps_done has come for them. Under the mutex, which it leaves
 * meanwhile; on the waiter's thread alone. False when there is none to wait for, or detaching came first.
 */
static bool finish_oldest(void)
{
	struct call *call = first_not_complete();
	bool ended;

	if (!call)
		return false;
	module_unlock();
	ended = call_wait(call);
	module_lock();
	if (!ended)
		return false;
	call->complete = true;
	(void)pthread_cond_broadcast(&module.changed);
	if (call->future) {
		TAILQ_REMOVE(&module.calls, call, link);
		module_unlock();
		call_finish(call);
		module_lock();
	}
	return true;
}

static void *waiter_run(void *unused)
{
	module_lock();
	while (!atomic_load(&module.closing))
		if (!finish_oldest() && !atomic_load(&module.closing))
			(void)pthread_cond_wait(&module.changed, &module.mutex);
	module_unlock();
	return NULL;
}

/* -- bps_start -------------------------------------------------------------------------------------------------------- */

/* The attributes of bps_start. */
struct plan {
	struct ffi_span names; /* of the tensors, one a line */
	const int64_t *numbers;
	size_t n_numbers;
};

/*
 * The places in plan.numbers. ORDER: enum bps_order, if the tensors have no names of the program's. From COUNTS on: of
 * each tensor, the elements of each rank's block, or nothing.
 */
enum { OPERATION, REDUCTION, ROOT, PRIORITY, ORDER, COUNTS };

static int plan_read(const struct ffi_attributes *attributes, struct plan *ret_plan)
{
	struct plan plan = {};

	for (int64_t i = 0; i < attributes->size; i++) {
		const struct ffi_span *name = attributes->names[i];

		if (name->len == 5 && !memcmp(name->ptr, "names", 5) &&
		    attributes->types[i] == FFI_ATTR_STRING) {
			plan.names = *(const struct ffi_span *)attributes->items[i];
		} else if (name->len == 4 && !memcmp(name->ptr, "plan", 4) &&
			   attributes->types[i] == FFI_ATTR_ARRAY) {
			const struct ffi_array *array = attributes->items[i];

			if (array->dtype != FFI_S64)
				return -EINVAL;
			plan.numbers = array->data;
			plan.n_numbers = array->size;
		}
	}
	if (plan.n_numbers < COUNTS)
		return -EINVAL;
	*ret_plan = plan;
	return 0;
}

static int dtype_of(int ffi_dtype)
{
	switch (ffi_dtype) {
	case FFI_PRED:
		return BPS_BOOL;
	case FFI_S8:
		return BPS_INT8;
	case FFI_S16:
		return BPS_INT16;
	case FFI_S32:
		return BPS_INT32;
	case FFI_S64:
		return BPS_INT64;
	case FFI_U8:
		return BPS_UINT8;
	case FFI_F16:
		return BPS_FLOAT16;
	case FFI_BF16:
		return BPS_BFLOAT16;
	case FFI_F32:
		return BPS_FLOAT32;
	case FFI_F64:
		return BPS_FLOAT64;
	default:
		return 0;
	}
}

static uint64_t count_of(const struct ffi_buffer *buffer)
{
	uint64_t count = 1;

	for (int64_t i = 0; i < buffer->rank; i++)
		count *= (uint64_t)buffer->dims[i];
	return count;
}

/* What a tensor of the call is to the daemon, and where in the block. */
struct layout {
	struct array array; /* as declared */
	const void *source;
	uint64_t input_count, output_count;
	size_t element_len;
	size_t input, output, end; /* offsets in the block */
	const uint64_t *counts;
};

static bool all_equal(const uint64_t *values, size_t n)
{
	for (size_t i = 1; i < n; i++)
		if (values[i] != values[0])
			return false;
	return true;
}

static int layout_tensor(struct bps_client *client, const struct plan *plan,
			 const struct ffi_buffer *buffer, size_t index, size_t begin,
			 struct layout *ret_layout)
{
	size_t size = (size_t)bps_client_size(client), rank = (size_t)bps_client_rank(client);
	size_t n_counts = plan->n_numbers - COUNTS;
	struct layout layout = {
		.array = {
			.dtype = dtype_of(buffer->dtype),
			.elements = count_of(buffer),
			.dims = buffer->dims,
			.n_dims = (int)buffer->rank,
		},
		.source = buffer->data,
		.input_count = count_of(buffer),
	};
	uint64_t before = 0, total = 0;

	if (!layout.array.dtype)
		return -EINVAL;
	layout.element_len = bps_dtype_size(layout.array.dtype);
	layout.output_count = layout.input_count;
	layout.input = layout.output = begin;
	if (n_counts) {
		if (n_counts < (index + 1) * size)
			return -EINVAL;
		layout.counts = (const uint64_t *)plan->numbers + COUNTS + index * size;
		for (size_t i = 0; i < size; i++) {
			before += i < rank ? layout.counts[i] : 0;
			total += layout.counts[i];
		}
	}

	switch (plan->numbers[OPERATION]) {
	case BPS_PUSH_PULL:
	case BPS_BROADCAST:
		layout.end = begin + layout.input_count * layout.element_len;
		break;
	case BPS_ALL_GATHER: /* the input is this rank's block of the output */
		if (!layout.counts || layout.counts[rank] != layout.input_count)
			return -EINVAL;
		if (!all_equal(layout.counts, size)) {
			layout.array.elements = BPS_VARIABLE;
			layout.array.dims = NULL;
		}
		layout.output_count = total;
		layout.input = begin + before * layout.element_len;
		layout.end = begin + total * layout.element_len;
		break;
	case BPS_REDUCE_SCATTER: /* the output is this rank's block of the input */
		if (!layout.counts || total != layout.input_count)
			return -EINVAL;
		layout.output_count = layout.counts[rank];
		layout.output = begin + before * layout.element_len;
		layout.end = begin + total * layout.element_len;
		break;
	case BPS_ALL_TO_ALL:
		layout.output =
			align_up(begin + layout.input_count * layout.element_len, ALIGNMENT);
		layout.end = layout.output + layout.output_count * layout.element_len;
		break;
	default:
		return -EINVAL;
	}
	*ret_layout = layout;
	return 0;
}

/* Waits until an earlier call has ended. False when there is none, or detaching came first. */
static bool await_a_call(void)
{
	bool waits;

	module_lock();
	waits = first_not_complete() && !atomic_load(&module.closing);
	/* XLA goes on with a program on the thread that completed its future, which is the waiter. */
	if (waits && pthread_equal(pthread_self(), module.waiter))
		waits = finish_oldest();
	else if (waits)
		(void)pthread_cond_wait(&module.changed, &module.mutex);
	module_unlock();
	return waits;
}

/* Submits; when too many requests are outstanding, one of this call or else of an earlier one has to end first. */
static int submit(struct call *call, size_t index, struct bps_tensor *tensor,
		  const struct bps_submit_params *params)
{
	int r;

	while ((r = bps_submit(tensor, params, &call->parts[index].request)) == -EAGAIN) {
		struct bps_request *oldest = NULL;

		for (size_t i = 0; i < index && !oldest; i++)
			if (!bps_request_poll(call->parts[i].request))
				oldest = call->parts[i].request;
		if (!oldest && !await_a_call())
			break;
		if (oldest && bps_request_wait(oldest, WAIT_SLICE_MS) == -ETIMEDOUT &&
		    atomic_load(&module.closing))
			break;
	}
	return r;
}

/*
 * Declares and submits. Once ranks have differed in the order they have come to a tensor differently often, and go on with
 * others: as in bps/_ops.py.
 */
static int submit_to(struct bps_client *client, struct call *call, size_t index, const char *name,
		     const struct layout *layout, const struct bps_submit_params *params)
{
	_cleanup_(freep) char *after = NULL;
	struct bps_tensor *tensor = NULL;
	uint64_t differed = 0;
	int r;

	if (params->order)
		differed = bps_client_differed(client, params->order);
	if (differed && asprintf(&after, "%s.after.%llu", name, (unsigned long long)differed) < 0)
		return -ENOMEM;
	r = declare(client, after ?: name, &layout->array, &tensor);
	if (r)
		return r;
	r = submit(call, index, tensor, params);
	bps_tensor_free(tensor);
	return r;
}

static int start_tensor(struct bps_client *client, struct call *call, const struct plan *plan,
			size_t index, const char *name, const struct layout *layout)
{
	bool is_root = plan->numbers[ROOT] == bps_client_rank(client);
	bool gives = plan->numbers[OPERATION] != BPS_BROADCAST || is_root;
	char *base = bps_memory_data(call->block->memory);
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = (int)plan->numbers[OPERATION],
		.reduction = (int)plan->numbers[REDUCTION],
		.input = gives ? base + layout->input : NULL,
		.output = base + layout->output,
		.input_count = layout->input_count,
		.output_count = layout->output_count,
		.counts = layout->counts,
		.root = (uint32_t)plan->numbers[ROOT],
		.priority = (int32_t)plan->numbers[PRIORITY] - (int32_t)index,
		.order = (int)plan->numbers[ORDER],
	};

	if (gives)
		memcpy(base + layout->input, layout->source,
		       layout->input_count * layout->element_len);
	call->parts[index].output = base + layout->output;
	call->parts[index].output_len = layout->output_count * layout->element_len;
	return submit_to(client, call, index, name, layout, &params);
}

static int start_barrier(struct bps_client *client, struct call *call, const struct plan *plan)
{
	static const struct layout layout = { .array.dtype = BPS_UINT8 };
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_BARRIER,
		.order = (int)plan->numbers[ORDER],
	};

	return submit_to(client, call, 0, BARRIER_TENSOR, &layout, &params);
}

/* inputs: n buffers. On failure says why in text, which is bps_error() unless something else was written into it. */
static int call_start(struct bps_client *client, const struct plan *plan, void *const *inputs,
		      size_t n, char *text, struct call **ret_call)
{
	_cleanup_(call_freep) struct call *call = NULL;
	_cleanup_(freep) struct layout *layouts = NULL;
	_cleanup_(freep) char *names = NULL;
	bool barrier = plan->numbers[OPERATION] == BPS_BARRIER;
	char *rest, *name;
	size_t end = 0;
	int r;

	call = calloc(1, sizeof(*call) + MAX(n, 1u) * sizeof(call->parts[0]));
	layouts = calloc(MAX(n, 1u), sizeof(*layouts));
	names = strndup(plan->names.ptr ?: "", plan->names.len);
	if (!call || !layouts || !names)
		return -ENOMEM;
	call->n_parts = barrier ? 1 : n;

	for (size_t i = 0; i < n; i++) {
		r = layout_tensor(client, plan, inputs[i], i, align_up(end, ALIGNMENT),
				  &layouts[i]);
		if (r) {
			(void)snprintf(
				text, TEXT_MAX,
				"the program was compiled for another job than this, or is not of "
				"this version of bps: compile it after init()");
			return r;
		}
		end = layouts[i].end;
	}
	if (barrier) {
		r = start_barrier(client, call, plan);
	} else {
		r = block_get(client, MAX(end, 1u), &call->block);
		rest = names;
		for (size_t i = 0; i < n && !r; i++) {
			name = strsep(&rest, "\n");
			r = name ? start_tensor(client, call, plan, i, name, &layouts[i]) : -EINVAL;
		}
	}
	if (r) {
		(void)snprintf(text, TEXT_MAX, "%s", bps_error());
		return r;
	}
	*ret_call = TAKE_PTR(call);
	return 0;
}

static struct bps_client *starting_begin(void)
{
	struct bps_client *client;

	module_lock();
	client = atomic_load(&module.closing) ? NULL : module.client;
	if (client)
		module.n_inside++;
	module_unlock();
	return client;
}

/* Under the mutex. */
static void module_leave(void)
{
	module.n_inside--;
	(void)pthread_cond_broadcast(&module.changed);
}

static void starting_end(struct call *call, uint64_t *ret_number)
{
	module_lock();
	if (call) {
		*ret_number = call->number = ++module.last_number;
		TAILQ_INSERT_TAIL(&module.calls, call, link);
	}
	module_leave();
	module_unlock();
}

/* XLA: (token, tensors...) -> (token, number of the call as two uint32). Attributes: see struct plan. */
API struct ffi_error *bps_jax_start(struct ffi_call_frame *frame);
API struct ffi_error *bps_jax_start(struct ffi_call_frame *frame)
{
	const struct ffi_buffer *result;
	struct bps_client *client;
	struct call *call = NULL;
	struct plan plan;
	char text[TEXT_MAX] = "";
	uint64_t number;
	int r;

	if (answer_metadata(frame))
		return NULL;
	if (frame->arguments.size < 1 || frame->results.size != 2 ||
	    plan_read(&frame->attributes, &plan))
		return error_new(frame->api, -EINVAL, "bps_start: not as bps.jax calls it");
	client = starting_begin();
	if (!client)
		return error_new(frame->api, -ENOTCONN,
				 "bps is not initialized: call init() first");
	r = call_start(client, &plan, frame->arguments.items + 1, (size_t)frame->arguments.size - 1,
		       text, &call);
	starting_end(call, &number);
	if (r)
		return error_new(frame->api, r, *text ? text : strerror(-r));
	result = frame->results.items[1];
	memcpy(result->data, &number, sizeof(number));
	return NULL;
}

/* -- bps_done ---------------------------------------------------------------------------------------------------------- */

/* Under the mutex. */
static struct call *call_find(uint64_t number)
{
	struct call *call;

	TAILQ_FOREACH(call, &module.calls, link)
	{
		if (call->number == number)
			return call;
	}
	return NULL;
}

static bool results_fit(const struct call *call, const struct ffi_arguments *results)
{
	for (int64_t i = 0; i < results->size; i++) {
		const struct ffi_buffer *buffer = results->items[i];
		size_t len = count_of(buffer) * bps_dtype_size(dtype_of(buffer->dtype));

		if ((size_t)i >= call->n_parts || len != call->parts[i].output_len)
			return false;
	}
	return true;
}

/* XLA: number of the call -> results. */
API struct ffi_error *bps_jax_done(struct ffi_call_frame *frame);
API struct ffi_error *bps_jax_done(struct ffi_call_frame *frame)
{
	const struct ffi_buffer *argument;
	struct ffi_future_create future = { .struct_size = sizeof(future) };
	struct ffi_error *error = NULL;
	struct call *call, *complete = NULL;
	uint64_t number;

	if (answer_metadata(frame))
		return NULL;
	argument = frame->arguments.items[0];
	memcpy(&number, argument->data, sizeof(number));

	module_lock();
	call = call_find(number);
	if (!call) {
		error = error_new(frame->api, -ECANCELED,
				  "bps was shut down before it was complete");
	} else if (!results_fit(call, &frame->results)) {
		error = error_new(frame->api, -EINVAL, "bps_done: not as bps.jax calls it");
	} else {
		for (int64_t i = 0; i < frame->results.size; i++)
			call->parts[i].result =
				((struct ffi_buffer *)frame->results.items[i])->data;
		if (call->complete) {
			TAILQ_REMOVE(&module.calls, call, link);
			complete = call;
			module.n_inside++;
		} else {
			error = frame->api->future_create(&future);
			if (!error) {
				call->api = frame->api;
				call->future = frame->future = future.future;
			}
		}
	}
	module_unlock();

	if (complete) {
		error = error_new(frame->api, complete->status, complete->text);
		if (!error)
			call_copy_results(complete);
		call_free(complete);
		module_lock();
		module_leave();
		module_unlock();
	}
	return error;
}

/* -- Coming and going ------------------------------------------------------------------------------------------------ */

static int waiter_start(void)
{
	sigset_t all, old;
	int r;

	/* Signals are for the threads of the program. */
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &old);
	r = pthread_create(&module.waiter, NULL, waiter_run, NULL);
	(void)pthread_sigmask(SIG_SETMASK, &old, NULL);
	return -r;
}

/*
 * From now on operations go through this client, which stays the caller's and must be detached before it is closed.
 * -EISCONN when another is attached; -EAGAIN when there can be no thread more. A child made by fork() begins anew.
 */
API int bps_jax_attach(struct bps_client *client);
API int bps_jax_attach(struct bps_client *client)
{
	int r;

	if (module.pid != getpid()) {
		/* What the parent had under way is the parent's, and so may be the mutex. */
		(void)pthread_mutex_init(&module.mutex, NULL);
		(void)pthread_cond_init(&module.changed, NULL);
		TAILQ_INIT(&module.calls);
		TAILQ_INIT(&module.blocks);
		module.n_blocks = module.n_inside = 0;
		module.client = NULL;
		module.pid = getpid();
	}
	module_lock();
	if (module.client) {
		r = -EISCONN;
	} else {
		atomic_store(&module.closing, false);
		r = waiter_start();
		if (!r)
			module.client = client;
	}
	module_unlock();
	return r;
}

/* Under the mutex, which it leaves meanwhile. */
static void await_threads(void)
{
	while (module.n_inside)
		(void)pthread_cond_wait(&module.changed, &module.mutex);
}

/* Ends what is under way with ECANCELED. After it, nobody uses the client. Does nothing when none is attached. */
API void bps_jax_detach(void);
API void bps_jax_detach(void)
{
	struct call *call;

	if (module.pid != getpid())
		return;
	module_lock();
	if (!module.client) {
		module_unlock();
		return;
	}
	atomic_store(&module.closing, true);
	(void)pthread_cond_broadcast(&module.changed);
	await_threads();
	module_unlock();
	(void)pthread_join(module.waiter, NULL);

	module_lock();
	module.client = NULL;
	while ((call = TAILQ_FIRST(&module.calls))) {
		TAILQ_REMOVE(&module.calls, call, link);
		module_unlock();
		if (!call->complete)
			call_fail(call, -ECANCELED, "bps was shut down before it was complete");
		if (call->future)
			call_finish(call);
		else
			call_free(call);
		module_lock();
	}
	await_threads();
	block_list_free(&module.blocks);
	module.n_blocks = 0;
	module_unlock();
}
