/*
 * The operations of bps.tensorflow as kernels of TensorFlow, for eager code and inside tf.function.
 *
 *   BpsSubmit    starts a push_pull, a broadcast or a reduce_scatter and gives a handle. It never waits for another rank.
 *   BpsResult    waits for the operation of a handle and gives its result.
 *   BpsAllGather, BpsAllToAll, BpsPushPullRows   wait inside: their result's size is known only after a first exchange.
 *
 * All but BpsResult are stateful, so TensorFlow runs those of one graph in the order of the program, which is the same on
 * all ranks. Nothing can wait in a circle then, however few threads TensorFlow has: of two ranks, what the one behind waits
 * for the one ahead has started already. There is no order between those of a function that uses variables and those
 * around its call, which need names.
 *
 * The kernels are synchronous. TensorFlow's C API has asynchronous ones too, but hands their callback over as a pointer
 * into the caller's stack, which is gone when the kernel returns: it cannot be called later.
 *
 * Ownership. A handle is a tensor whose one element lies in a struct operation; the operation lives as long as TensorFlow
 * keeps the tensor, also when nobody asks for the result. The client belongs to Python, which attaches it once it is open
 * and detaches it before it is closed: no kernel is inside the library then, and none comes in later.
 */
#include "client/native/tensorflow_op.h"
#include "proto/c.h"
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/queue.h>

#define WAIT_SLICE_MS 200 /* how long detaching waits for a kernel that waits, at most */
#define HANDLE_ALIGN  64  /* or TensorFlow copies the handle's element */
#define NAME_MAX_LEN  1024
#define FRAMEWORK     "libtensorflow_framework.so.2"
#define ORDER	      "order: int = 0"
#define ELEMENT_TYPES "T: {double, float, half, bfloat16, int64, int32, int16, int8, uint8, bool}"

/* Called by Python, by ctypes. */
#define API __attribute__((__visibility__("default")))
API const char *bps_tensorflow_failure(void);
API void bps_tensorflow_attach(struct bps_client *client);
API void bps_tensorflow_detach(void);

struct operation {
	int64_t self; /* the handle's element: the address of this structure */
	struct bps_client *client;
	struct bps_request *request;
	struct tf_tensor *output;
	SLIST_ENTRY(operation) link; /* in module.late */
};

static struct {
	pthread_mutex_t mutex;
	pthread_cond_t changed; /* n_inside */
	struct bps_client *client;
	unsigned n_inside; /* kernels that use client */
	atomic_bool closing;
	pid_t pid;		      /* of the process that attached */
	SLIST_HEAD(, operation) late; /* to be freed once their client is closed */
	char failure[TEXT_MAX];	      /* why the operations could not be registered */
} module = {
	.mutex = PTHREAD_MUTEX_INITIALIZER,
	.changed = PTHREAD_COND_INITIALIZER,
};

/* -- The client -------------------------------------------------------------------------------- */

/* Of a call of the library that has just failed. */
static int fail_bps(struct failure *failure, int status)
{
	return fail(failure, status, "%s", bps_error());
}

/* On success module_leave() is to follow. wanted: the client that it has to be still; NULL: whichever there is. */
static int module_enter(const struct bps_client *wanted, struct failure *failure)
{
	if (module.pid && module.pid != getpid())
		return fail(failure, -EPERM,
			    "bps belongs to the parent process; a child calls init() for itself");

	(void)pthread_mutex_lock(&module.mutex);
	if (module.client && !module.closing && (!wanted || wanted == module.client))
		module.n_inside++;
	else if (wanted)
		(void)fail(failure, -ECANCELED, "bps was shut down before it was complete");
	else
		(void)fail(failure, -ENOTCONN, "bps is not initialized: call init() first");
	(void)pthread_mutex_unlock(&module.mutex);
	return failure->status;
}

static void module_leave(void)
{
	(void)pthread_mutex_lock(&module.mutex);
	if (!--module.n_inside)
		(void)pthread_cond_broadcast(&module.changed);
	(void)pthread_mutex_unlock(&module.mutex);
}

/* Who we are, inside. Of an elastic job both change. */
static int own_rank(void)
{
	return bps_client_rank(module.client);
}

static int job_size(void)
{
	return bps_client_size(module.client);
}

/* Waits for a request, inside. */
static int wait_for(struct bps_request *request, struct failure *failure)
{
	for (;;) {
		int r = bps_request_wait(request, WAIT_SLICE_MS);

		if (r != -ETIMEDOUT)
			return r ? fail_bps(failure, r) : 0;
		if (atomic_load(&module.closing))
			return fail(failure, -ECANCELED, "bps is shutting down");
	}
}

/* Waits until a request of the client may have ended, inside: there is no room for another one. */
static int wait_for_any(struct failure *failure)
{
	struct pollfd fd = { .fd = bps_client_fd(module.client), .events = POLLIN };

	if (fd.fd < 0)
		return fail_bps(failure, fd.fd);
	(void)poll(&fd, 1, WAIT_SLICE_MS);
	(void)bps_client_dispatch(module.client); /* its failure is the next call's as well */
	if (atomic_load(&module.closing))
		return fail(failure, -ECANCELED, "bps is shutting down");
	return 0;
}

/* Declares and submits, inside. elements: of the tensor. */
static int submit(const char *name, int dtype, uint64_t elements,
		  const struct bps_submit_params *params, struct bps_request **ret_request,
		  struct failure *failure)
{
	struct bps_tensor *tensor;
	int r = bps_tensor_declare(module.client, name, dtype, elements, &tensor);

	if (r)
		return fail_bps(failure, r);
	while ((r = bps_submit(tensor, params, ret_request)) == -EAGAIN && !failure->status)
		(void)wait_for_any(failure);
	if (r && !failure->status)
		(void)fail_bps(failure, r);
	bps_tensor_free(tensor);
	return failure->status;
}

/* Submits and waits, inside. ret_outcome may be NULL. */
static int submit_and_wait(const char *name, int dtype, uint64_t elements,
			   const struct bps_submit_params *params, struct bps_outcome *ret_outcome,
			   struct failure *failure)
{
	struct bps_outcome outcome = { .size = sizeof(outcome) };
	struct bps_request *request;
	int r = submit(name, dtype, elements, params, &request, failure);

	if (r)
		return r;
	r = wait_for(request, failure);
	if (!r && ret_outcome) {
		if (bps_request_outcome(request, &outcome))
			r = fail_bps(failure, -EIO);
		else
			*ret_outcome = outcome;
	}
	bps_request_free(request);
	return r;
}

/* -- Kernels: what a node of the graph says ------------------------------------------------------- */

struct kernel {
	int32_t operation, reduction, root, priority;
	int32_t order; /* enum bps_order: of its operations without a name; 0: they are in none */
	char name[];   /* "": tensors are named by their type and size */
};

static void kernel_free(void *kernel)
{
	free(kernel);
}

/* ints: whether the node has attributes besides its name and order. NULL once the failure was told. */
static struct kernel *kernel_new(struct tf_construction *construction, bool ints)
{
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	struct kernel *kernel = NULL;
	int32_t n, len = 0;

	tf.OpKernelConstruction_GetAttrSize(construction, "tensor_name", &n, &len, status);
	if (tf.GetCode(status) == TF_OK) {
		kernel = calloc(1, sizeof(*kernel) + (size_t)len + 1);
		if (!kernel)
			tf.SetStatus(status, TF_RESOURCE_EXHAUSTED, "out of memory");
	}
	if (kernel && len)
		tf.OpKernelConstruction_GetAttrString(construction, "tensor_name", kernel->name,
						      (size_t)len, status);
	for (size_t i = ints ? 0 : 4; kernel && i < 5 && tf.GetCode(status) == TF_OK; i++) {
		static const char *const attrs[] = { "operation", "reduction", "root", "priority",
						     "order" };
		int32_t *const values[] = { &kernel->operation, &kernel->reduction, &kernel->root,
					    &kernel->priority, &kernel->order };

		tf.OpKernelConstruction_GetAttrInt32(construction, attrs[i], values[i], status);
	}
	if (tf.GetCode(status) != TF_OK) {
		tf.OpKernelConstruction_Failure(construction, status);
		free(kernel);
		return NULL;
	}
	return kernel;
}

static void *kernel_new_submit(struct tf_construction *construction)
{
	return kernel_new(construction, true);
}

static void *kernel_new_named(struct tf_construction *construction)
{
	return kernel_new(construction, false);
}

/*
 * The name that all ranks give the tensor: as in bps/_ops.py. What has no name and is in no order has tensors of its own,
 * which ranks that differ in the order do not come to. suffix: of a tensor that belongs to another. Inside.
 */
static int tensor_name(const struct kernel *kernel, const char *operation, const struct view *view,
		       bool variable, const char *suffix, char name[NAME_MAX_LEN],
		       struct failure *failure)
{
	const char *noname = kernel->order ? "noname" : "noname.tensorflow";
	uint64_t differed = 0;
	char count[24] = "any", after[32] = "";
	int len;

	if (!variable)
		(void)snprintf(count, sizeof(count), "%llu", (unsigned long long)view->count);
	if (kernel->order)
		differed = bps_client_differed(module.client, kernel->order);
	if (differed)
		(void)snprintf(after, sizeof(after), ".after.%llu", (unsigned long long)differed);
	if (*kernel->name)
		len = snprintf(name, NAME_MAX_LEN, "%s.%s%s", operation, kernel->name, suffix);
	else
		len = snprintf(name, NAME_MAX_LEN, "%s.%s.%s.%s%s%s", operation, noname,
			       view->dtype_name, count, after, suffix);
	if (len >= NAME_MAX_LEN)
		return fail(failure, -EINVAL, "a tensor's name has %d bytes", len);
	return 0;
}

/* -- BpsSubmit, BpsResult --------------------------------------------------------------------------- */

static void operation_release(struct operation *operation)
{
	bps_request_free(operation->request);
	if (operation->output)
		tf.DeleteTensor(operation->output);
	free(operation);
}

/* TensorFlow has no more use for the handle. */
static void operation_unref(void *data, size_t len, void *arg)
{
	struct operation *operation = arg;
	struct failure failure = { 0 };

	(void)data;
	(void)len;
	if (!module_enter(operation->client, &failure)) {
		operation_release(operation);
		module_leave();
		return;
	}
	if (failure.status == -EPERM)
		return;
	/* Its client may be in the middle of closing: kept until the next one is attached. */
	(void)pthread_mutex_lock(&module.mutex);
	SLIST_INSERT_HEAD(&module.late, operation, link);
	(void)pthread_mutex_unlock(&module.mutex);
}

static int start_reduction(const struct kernel *kernel, const struct view *input,
			   struct operation *operation, struct failure *failure)
{
	_cleanup_(freep) uint64_t *counts = NULL;
	bool scatter = kernel->operation == BPS_REDUCE_SCATTER;
	uint64_t rows = input->rows, size = (uint64_t)job_size(), own = (uint64_t)own_rank();
	struct view output;
	char name[NAME_MAX_LEN];

	if (scatter) {
		counts = calloc(size, sizeof(*counts));
		if (!counts)
			return fail(failure, -ENOMEM, "out of memory");
		for (uint64_t rank = 0; rank < size; rank++) {
			uint64_t n = input->rows / size + (rank < input->rows % size);

			counts[rank] = n * input->row;
			if (rank == own)
				rows = n;
		}
		operation->output = tensor_with_rows(input, rows, &output, failure);
	} else {
		output = *input;
		operation->output = tensor_like(input, failure);
		if (operation->output && input->count)
			output.data = tf.TensorData(operation->output);
	}
	if (failure->status || tensor_name(kernel, scatter ? "reduce_scatter" : "push_pull", input,
					   false, "", name, failure))
		return failure->status;

	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = kernel->operation,
		.reduction = kernel->reduction,
		.input = input->data,
		.output = output.data,
		.input_count = input->count,
		.output_count = output.count,
		.counts = counts,
		.priority = kernel->priority,
		.order = kernel->order,
	};
	return submit(name, input->dtype, input->count, &params, &operation->request, failure);
}

/* The root's own result is its input: the caller sees to that. */
static int start_broadcast(const struct kernel *kernel, const struct view *input,
			   struct operation *operation, struct failure *failure)
{
	bool root = kernel->root == own_rank();
	int size = job_size();
	char name[NAME_MAX_LEN];

	if (kernel->root < 0 || kernel->root >= size)
		return fail(failure, -EINVAL, "root rank %d is not one of the %d ranks",
			    kernel->root, size);
	if (tensor_name(kernel, "broadcast", input, false, "", name, failure))
		return failure->status;
	if (!root)
		operation->output = tensor_like(input, failure);
	if (failure->status)
		return failure->status;

	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_BROADCAST,
		.input = root ? input->data : NULL,
		.output = root || !input->count ? NULL : tf.TensorData(operation->output),
		.input_count = input->count,
		.output_count = input->count,
		.root = (uint32_t)kernel->root,
		.priority = kernel->priority,
		.order = kernel->order,
	};
	return submit(name, input->dtype, input->count, &params, &operation->request, failure);
}

static void submit_compute(void *data, struct tf_context *context)
{
	const struct kernel *kernel = data;
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *input = NULL, *handle = NULL;
	struct operation *operation;
	struct failure failure = { 0 };
	struct view view;

	input = input_of(context, 0, &view, status, &failure);
	if (failure.status || module_enter(NULL, &failure)) {
		report(context, status, &failure);
		return;
	}

	operation = aligned_alloc(HANDLE_ALIGN, align_up(sizeof(*operation), HANDLE_ALIGN));
	if (!operation) {
		(void)fail(&failure, -ENOMEM, "out of memory");
	} else {
		*operation = (struct operation){ .self = (int64_t)(intptr_t)operation,
						 .client = module.client };
		if (kernel->operation == BPS_BROADCAST)
			(void)start_broadcast(kernel, &view, operation, &failure);
		else
			(void)start_reduction(kernel, &view, operation, &failure);
	}
	if (operation && failure.status)
		operation_release(operation);
	else if (operation && !operation->output)
		operation->output = TAKE_PTR(input);
	module_leave();
	if (!failure.status) {
		handle = tf.NewTensor(TF_INT64, NULL, 0, &operation->self, sizeof(operation->self),
				      operation_unref, operation);
		tf.SetOutput(context, 0, handle, status);
	}
	report(context, status, &failure);
}

static void result_compute(void *data, struct tf_context *context)
{
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *handle = NULL;
	struct operation *operation;
	struct failure failure = { 0 };
	struct view view;

	(void)data;
	handle = input_of(context, 0, &view, status, &failure);
	if (!failure.status && (view.count != 1 || view.tf_dtype != TF_INT64 ||
				*(int64_t *)view.data != (int64_t)(intptr_t)view.data))
		(void)fail(&failure, -EINVAL, "this is not a handle of BpsSubmit");
	operation = failure.status ? NULL : (struct operation *)view.data;
	if (operation && !module_enter(operation->client, &failure)) {
		(void)wait_for(operation->request, &failure);
		module_leave();
	}
	if (!failure.status)
		tf.SetOutput(context, 0, operation->output, status);
	report(context, status, &failure);
}

/* -- BpsAllGather, BpsAllToAll ------------------------------------------------------------------------ */

static int check_rows(const int64_t *table, int size, const struct view *input, const char *name,
		      struct failure *failure)
{
	for (int rank = 0; rank < size; rank++)
		if (table[2 * rank + 1] != (int64_t)input->row)
			return fail(failure, -EINVAL,
				    "%s: rank %d gives rows of %lld elements, rank %d rows of "
				    "%llu: only the "
				    "first dimension may differ",
				    name, rank, (long long)table[2 * rank + 1], own_rank(),
				    (unsigned long long)input->row);
	return 0;
}

/*
 * What both have in common once each rank knows the others' rows: table holds (rows, elements of a row) of what this
 * rank gets from each of size. Gives the outputs: the rows, one after the other, and how many came from each rank.
 */
static int gather(const struct kernel *kernel, struct bps_submit_params *params,
		  const char *operation, const struct view *input, const int64_t *table, int size,
		  struct tf_tensor *outputs[2], struct failure *failure)
{
	_cleanup_(freep) uint64_t *counts = calloc((size_t)size, sizeof(*counts));
	int64_t n_ranks = size;
	uint64_t total = 0;
	char name[NAME_MAX_LEN];
	struct view output;

	if (!counts)
		return fail(failure, -ENOMEM, "out of memory");
	if (tensor_name(kernel, operation, input, true, "", name, failure) ||
	    check_rows(table, size, input, name, failure))
		return failure->status;
	outputs[1] = tf.AllocateTensor(TF_INT64, &n_ranks, 1, (size_t)n_ranks * sizeof(int64_t));
	if (!outputs[1])
		return fail(failure, -ENOMEM, "TensorFlow has no memory for the result");
	for (int rank = 0; rank < size; rank++) {
		((int64_t *)tf.TensorData(outputs[1]))[rank] = table[2 * rank];
		counts[rank] = (uint64_t)table[2 * rank] * input->row;
		total += (uint64_t)table[2 * rank];
	}
	outputs[0] = tensor_with_rows(input, total, &output, failure);
	if (!outputs[0])
		return failure->status;

	params->size = sizeof(*params);
	params->input = input->data;
	params->output = output.data;
	params->input_count = input->count;
	params->output_count = output.count;
	if (params->operation == BPS_ALL_GATHER)
		params->counts = counts;
	else
		params->receive_counts = counts;
	return submit_and_wait(name, input->dtype, BPS_VARIABLE, params, NULL, failure);
}

static int all_gather(const struct kernel *kernel, const struct view *input,
		      struct tf_tensor *outputs[2], struct failure *failure)
{
	int size = job_size();
	_cleanup_(freep) int64_t *table = calloc((size_t)size, 2 * sizeof(*table));
	int64_t mine[2] = { (int64_t)input->rows, (int64_t)input->row };
	struct bps_outcome outcome;
	char name[NAME_MAX_LEN];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_ALL_GATHER,
		.input = mine,
		.output = table,
		.input_count = 2,
		.output_count = 2 * (uint64_t)size,
		.order = kernel->order,
	};

	if (!table)
		return fail(failure, -ENOMEM, "out of memory");
	if (tensor_name(kernel, "all_gather", input, true, ".rows", name, failure) ||
	    submit_and_wait(name, BPS_INT64, 2, &params, &outcome, failure))
		return failure->status;
	/* Of an elastic job fewer may have come. All ranks see the same outcome, so all go on, or none. */
	if (outcome.membership && outcome.n_came != outcome.world_size)
		return fail(failure, -EREMCHG,
			    "%s: the ranks of the job have changed meanwhile: do it again", name);
	if (outcome.membership)
		size = MIN(size, (int)outcome.n_came);
	params = (struct bps_submit_params){ .operation = BPS_ALL_GATHER };
	return gather(kernel, &params, "all_gather", input, table, size, outputs, failure);
}

static int all_to_all(const struct kernel *kernel, const struct view *input,
		      const struct view *splits, struct tf_tensor *outputs[2],
		      struct failure *failure)
{
	uint64_t size = (uint64_t)job_size(), total = 0;
	_cleanup_(freep) int64_t *sent = calloc(size, 2 * sizeof(*sent));
	_cleanup_(freep) int64_t *received = calloc(size, 2 * sizeof(*received));
	_cleanup_(freep) uint64_t *counts = calloc(size, sizeof(*counts));
	const int64_t *split = splits->data;
	char name[NAME_MAX_LEN];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_ALL_TO_ALL,
		.input = sent,
		.output = received,
		.input_count = 2 * size,
		.output_count = 2 * size,
		.order = kernel->order,
	};

	if (!sent || !received || !counts)
		return fail(failure, -ENOMEM, "out of memory");
	if (tensor_name(kernel, "all_to_all", input, true, ".rows", name, failure))
		return failure->status;
	if (splits->n_dims != 1 || splits->count != size)
		return fail(failure, -EINVAL,
			    "%s: splits must have one number for each of the %d ranks", name,
			    (int)size);
	for (uint64_t rank = 0; rank < size; rank++) {
		if (split[rank] < 0 || (uint64_t)split[rank] > input->rows - total)
			return fail(failure, -EINVAL,
				    "%s: the splits do not cut %llu rows for %d ranks", name,
				    (unsigned long long)input->rows, (int)size);
		total += (uint64_t)split[rank];
		sent[2 * rank] = split[rank];
		sent[2 * rank + 1] = (int64_t)input->row;
		counts[rank] = (uint64_t)split[rank] * input->row;
	}
	if (total != input->rows)
		return fail(failure, -EINVAL, "%s: the splits do not cut %llu rows for %d ranks",
			    name, (unsigned long long)input->rows, (int)size);
	if (submit_and_wait(name, BPS_INT64, 2 * size, &params, NULL, failure))
		return failure->status;
	params = (struct bps_submit_params){ .operation = BPS_ALL_TO_ALL, .counts = counts };
	return gather(kernel, &params, "all_to_all", input, received, (int)size, outputs, failure);
}

/* Hands outputs over, if all went well, and ends the kernel. */
static void set_outputs(struct tf_context *context, struct tf_tensor **outputs, int n,
			struct tf_status *status, const struct failure *failure)
{
	for (int i = 0; i < n; i++) {
		if (!failure->status && tf.GetCode(status) == TF_OK)
			tf.SetOutput(context, i, outputs[i], status);
		tensor_deletep(&outputs[i]);
	}
	report(context, status, failure);
}

static void gather_compute(struct kernel *kernel, struct tf_context *context, bool with_splits)
{
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *input = NULL, *splits = NULL;
	struct tf_tensor *outputs[2] = { NULL, NULL };
	struct failure failure = { 0 };
	struct view view, splits_view;

	input = input_of(context, 0, &view, status, &failure);
	if (with_splits && !failure.status)
		splits = input_of(context, 1, &splits_view, status, &failure);
	if (!failure.status && !module_enter(NULL, &failure)) {
		if (with_splits)
			(void)all_to_all(kernel, &view, &splits_view, outputs, &failure);
		else
			(void)all_gather(kernel, &view, outputs, &failure);
		module_leave();
	}
	set_outputs(context, outputs, 2, status, &failure);
}

static void all_gather_compute(void *kernel, struct tf_context *context)
{
	gather_compute(kernel, context, false);
}

static void all_to_all_compute(void *kernel, struct tf_context *context)
{
	gather_compute(kernel, context, true);
}

/* -- BpsPushPullRows ------------------------------------------------------------------------------------- */

/* How many rows the result can have at most: those of all ranks, if they are all different. */
static int rows_room(const struct kernel *kernel, const struct view *values, uint64_t *ret_room,
		     struct failure *failure)
{
	uint64_t size = (uint64_t)job_size();
	_cleanup_(freep) int64_t *table = calloc(size, sizeof(*table));
	int64_t mine = (int64_t)values->rows;
	char name[NAME_MAX_LEN];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_ALL_GATHER,
		.input = &mine,
		.output = table,
		.input_count = 1,
		.output_count = size,
		.order = kernel->order,
	};

	if (!table)
		return fail(failure, -ENOMEM, "out of memory");
	if (tensor_name(kernel, "push_pull_rows", values, true, ".rows", name, failure) ||
	    submit_and_wait(name, BPS_INT64, 1, &params, NULL, failure))
		return failure->status;
	*ret_room = 0;
	for (uint64_t rank = 0; rank < size; rank++)
		*ret_room += (uint64_t)table[rank];
	return 0;
}

/* outputs: values and numbers of the rows of the result, with room behind them, and how many there are. */
static int push_pull_rows(const struct kernel *kernel, const struct view *values,
			  const struct view *numbers, const struct view *table,
			  struct tf_tensor *outputs[3], struct failure *failure)
{
	struct view of_table = *values, result, result_numbers;
	struct bps_request *request;
	char name[NAME_MAX_LEN];
	uint64_t room = 0, n = 0;
	int64_t n_table = -1;
	int r;

	if (table->count == 1 && table->tf_dtype == TF_INT64)
		n_table = *(int64_t *)table->data;
	if (n_table < 0 || MUL_OVERFLOW((uint64_t)n_table, values->row, &of_table.count))
		return fail(failure, -EINVAL,
			    "the number of rows of the table must be one int64 from 0");
	if (numbers->n_dims != 1 || numbers->tf_dtype != TF_INT64 ||
	    numbers->rows != values->rows || !values->n_dims)
		return fail(failure, -EINVAL, "there must be one int64 for each row, its number");
	if (rows_room(kernel, values, &room, failure) ||
	    tensor_name(kernel, "push_pull_rows", &of_table, false, "", name, failure))
		return failure->status;
	room = MIN(room, (uint64_t)n_table);
	outputs[0] = tensor_with_rows(values, room, &result, failure);
	outputs[1] =
		failure->status ? NULL : tensor_with_rows(numbers, room, &result_numbers, failure);
	outputs[2] = failure->status ? NULL : tf.AllocateTensor(TF_INT64, NULL, 0, sizeof(int64_t));
	if (!outputs[2])
		return fail(failure, -ENOMEM, "TensorFlow has no memory for the result");

	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL_ROWS,
		.reduction = kernel->reduction,
		.input = values->data,
		.output = result.data,
		.input_count = values->count,
		.output_count = result.count,
		.priority = kernel->priority,
		.width = values->row,
		.input_rows = numbers->data,
		.output_rows = result_numbers.data,
	};
	if (submit(name, values->dtype, of_table.count, &params, &request, failure))
		return failure->status;
	if (!wait_for(request, failure)) {
		r = bps_request_rows(request, &n);
		if (r)
			(void)fail_bps(failure, r);
		else
			*(int64_t *)tf.TensorData(outputs[2]) = (int64_t)n;
	}
	bps_request_free(request);
	return failure->status;
}

static void push_pull_rows_compute(void *kernel, struct tf_context *context)
{
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *values = NULL, *numbers = NULL, *table = NULL;
	struct tf_tensor *outputs[3] = { NULL, NULL, NULL };
	struct failure failure = { 0 };
	struct view views[3];

	values = input_of(context, 0, &views[0], status, &failure);
	numbers = failure.status ? NULL : input_of(context, 1, &views[1], status, &failure);
	table = failure.status ? NULL : input_of(context, 2, &views[2], status, &failure);
	if (!failure.status && !module_enter(NULL, &failure)) {
		(void)push_pull_rows(kernel, &views[0], &views[1], &views[2], outputs, &failure);
		module_leave();
	}
	set_outputs(context, outputs, 3, status, &failure);
}

/* -- Registration -------------------------------------------------------------------------------------- */

static void shape_scalar(struct tf_shape_context *context, struct tf_status *status)
{
	struct tf_shape *scalar = tf.ShapeInferenceContextScalar(context);

	tf.ShapeInferenceContextSetOutput(context, 0, scalar, status);
	tf.DeleteShapeHandle(scalar);
}

/* Python says more where it knows more. */
static void shape_unknown(struct tf_shape_context *context, struct tf_status *status)
{
	tf.ShapeInferenceContextSetUnknownShape(context, status);
}

static const struct op {
	const char *name;
	const char *inputs[3], *outputs[3], *attrs[7];
	bool stateful;
	void (*shape)(struct tf_shape_context *, struct tf_status *);
	void *(*create)(struct tf_construction *);
	void (*compute)(void *, struct tf_context *);
} ops[] = {
	{ .name = "BpsSubmit",
	  .inputs = { "input: T" },
	  .outputs = { "handle: int64" },
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", "operation: int", "reduction: int",
		     "root: int", "priority: int", ORDER },
	  .stateful = true,
	  .shape = shape_scalar,
	  .create = kernel_new_submit,
	  .compute = submit_compute },
	{ .name = "BpsResult",
	  .inputs = { "handle: int64" },
	  .outputs = { "output: T" },
	  .attrs = { ELEMENT_TYPES },
	  .shape = shape_unknown,
	  .compute = result_compute },
	{ .name = "BpsAllGather",
	  .inputs = { "input: T" },
	  .outputs = { "output: T", "rows: int64" },
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", ORDER },
	  .stateful = true,
	  .shape = shape_unknown,
	  .create = kernel_new_named,
	  .compute = all_gather_compute },
	{ .name = "BpsAllToAll",
	  .inputs = { "input: T", "splits: int64" },
	  .outputs = { "output: T", "rows: int64" },
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", ORDER },
	  .stateful = true,
	  .shape = shape_unknown,
	  .create = kernel_new_named,
	  .compute = all_to_all_compute },
	{ .name = "BpsPushPullRows",
	  .inputs = { "values: T", "numbers: int64", "table: int64" },
	  .outputs = { "output: T", "rows: int64", "count: int64" },
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", "operation: int", "reduction: int",
		     "root: int", "priority: int", ORDER },
	  .stateful = true,
	  .shape = shape_unknown,
	  .create = kernel_new_submit,
	  .compute = push_pull_rows_compute },
};

static bool op_register(const struct op *op, struct tf_status *status)
{
	struct tf_op_builder *builder = tf.NewOpDefinitionBuilder(op->name);

	for (size_t i = 0; i < ARRAY_SIZE(op->attrs) && op->attrs[i]; i++)
		tf.OpDefinitionBuilderAddAttr(builder, op->attrs[i]);
	for (size_t i = 0; i < 3 && op->inputs[i]; i++)
		tf.OpDefinitionBuilderAddInput(builder, op->inputs[i]);
	for (size_t i = 0; i < 3 && op->outputs[i]; i++)
		tf.OpDefinitionBuilderAddOutput(builder, op->outputs[i]);
	tf.OpDefinitionBuilderSetIsStateful(builder, op->stateful);
	tf.OpDefinitionBuilderSetShapeInferenceFunction(builder, op->shape);
	tf.RegisterOpDefinition(builder, status);
	if (tf.GetCode(status) == TF_OK)
		tf.RegisterKernelBuilder(op->name,
					 tf.NewKernelBuilder(op->name, "CPU", op->create,
							     op->compute,
							     op->create ? kernel_free : NULL),
					 status);
	if (tf.GetCode(status) != TF_OK)
		(void)snprintf(module.failure, sizeof(module.failure), "%s: %s", op->name,
			       tf.Message(status));
	return tf.GetCode(status) == TF_OK;
}

/* TensorFlow wants operations to be registered while the library is loaded. */
__attribute__((__constructor__)) static void module_register(void)
{
	void *framework = dlopen(FRAMEWORK, RTLD_LAZY | RTLD_NOLOAD);

	if (!framework) {
		(void)snprintf(module.failure, sizeof(module.failure),
			       "%s is not in this process: import tensorflow first", FRAMEWORK);
		return;
	}
#define TF_LOOK_UP(result, function, arguments)                                           \
	*(void **)&tf.function = dlsym(framework, "TF_" #function);                       \
	if (!tf.function) {                                                               \
		(void)snprintf(module.failure, sizeof(module.failure),                    \
			       "this TensorFlow has no TF_" #function ": it is too old"); \
		return;                                                                   \
	}
	TF_FUNCTIONS(TF_LOOK_UP)
#undef TF_LOOK_UP

	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	for (size_t i = 0; i < ARRAY_SIZE(ops) && op_register(&ops[i], status); i++)
		;
}

/* Why the operations are not there; "" when they are. */
const char *bps_tensorflow_failure(void)
{
	return module.failure;
}

/* The client that kernels use from now on: open, in a job, and no other attached in this process. */
void bps_tensorflow_attach(struct bps_client *client)
{
	struct operation *operation;

	if (module.pid && module.pid != getpid()) {
		/* A child: what the parent had is not ours, and its threads are not here to let go of the mutex. */
		module.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
		module.n_inside = 0;
		SLIST_INIT(&module.late);
	}
	(void)pthread_mutex_lock(&module.mutex);
	while ((operation = SLIST_FIRST(&module.late))) {
		SLIST_REMOVE_HEAD(&module.late, link);
		operation_release(operation);
	}
	module.pid = getpid();
	module.client = client;
	atomic_store(&module.closing, false);
	(void)pthread_mutex_unlock(&module.mutex);
}

/* Returns when no kernel uses the client; it may be closed then. What waits fails. */
void bps_tensorflow_detach(void)
{
	if (module.pid != getpid())
		return;
	(void)pthread_mutex_lock(&module.mutex);
	atomic_store(&module.closing, true);
	while (module.n_inside)
		(void)pthread_cond_wait(&module.changed, &module.mutex);
	module.client = NULL;
	(void)pthread_mutex_unlock(&module.mutex);
}
