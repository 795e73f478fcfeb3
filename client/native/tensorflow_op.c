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
 * keeps the tensor, also when nobody asks for the result. Clients belong to Python, which attaches each once it is open and
 * detaches it before it is closed: no kernel uses it then, and none will. There is one of all ranks, and one for each process
 * set, whose number is an attribute of the node; a graph that outlives its set finds no client.
 */
#include "client/native/tensorflow_op.h"
#include "client/native/declare.h"
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
#define PROCESS_SET   "process_set: int = 0"
#define ELEMENT_TYPES "T: {double, float, half, bfloat16, int64, int32, int16, int8, uint8, bool}"

/* Called by Python, by ctypes. */
#define API __attribute__((__visibility__("default")))
API const char *bps_tensorflow_failure(void);
API int bps_tensorflow_attach(struct bps_client *client, int32_t set);
API void bps_tensorflow_detach(const struct bps_client *client);

struct operation {
	int64_t self; /* the handle's element: the address of this structure */
	struct bps_client *client;
	int32_t set; /* of the client */
	struct bps_request *request;
	struct tf_tensor *output;
	SLIST_ENTRY(operation) link; /* in module.late */
};

/* A client that is attached. */
struct attachment {
	struct bps_client *client;
	int32_t set;		      /* number of its process set, no later one's; 0: all ranks */
	unsigned n_inside;	      /* kernels that use client; under module.mutex */
	atomic_bool closing;	      /* no kernel comes in */
	SLIST_ENTRY(attachment) link; /* in module.attachments */
};

static struct {
	pthread_mutex_t mutex;
	pthread_cond_t changed; /* n_inside of an attachment */
	SLIST_HEAD(, attachment) attachments;
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

/* A kernel that runs. */
struct call {
	const struct kernel *kernel;
	struct attachment *here; /* inside: whose client it uses */
	struct failure failure;
};

/* Why there is no client of a set. */
static int fail_detached(struct call *call, int32_t set, bool was_attached)
{
	if (set)
		return fail(&call->failure, was_attached ? -ECANCELED : -EINVAL,
			    "process set %d is not in use: it was removed%s", (int)set,
			    was_attached ? " before this was complete" : "");
	if (was_attached)
		return fail(&call->failure, -ECANCELED, "bps was shut down before it was complete");
	return fail(&call->failure, -ENOTCONN, "bps is not initialized: call init() first");
}

/*
 * Comes inside the library with a set's client. On success module_leave() is to follow. wanted: the client that it has to be
 * still; NULL: whichever there is.
 */
static int module_enter(struct call *call, int32_t set, const struct bps_client *wanted)
{
	struct attachment *here;

	if (module.pid && module.pid != getpid())
		return fail(&call->failure, -EPERM,
			    "bps belongs to the parent process; a child calls init() for itself");

	(void)pthread_mutex_lock(&module.mutex);
	SLIST_FOREACH(here, &module.attachments, link)
	{
		if (here->set == set && !here->closing && (!wanted || wanted == here->client))
			break;
	}
	if (here)
		here->n_inside++;
	(void)pthread_mutex_unlock(&module.mutex);
	call->here = here;
	return here ? 0 : fail_detached(call, set, wanted);
}

static void module_leave(struct call *call)
{
	(void)pthread_mutex_lock(&module.mutex);
	if (!--call->here->n_inside)
		(void)pthread_cond_broadcast(&module.changed);
	(void)pthread_mutex_unlock(&module.mutex);
	call->here = NULL;
}

/* Who we are, inside. Of an elastic job both change. */
static int own_rank(const struct call *call)
{
	return bps_client_rank(call->here->client);
}

static int job_size(const struct call *call)
{
	return bps_client_size(call->here->client);
}

/* Fails once the client is being detached. Inside. */
static int check_closing(struct call *call)
{
	if (!atomic_load(&call->here->closing))
		return 0;
	return fail(&call->failure, -ECANCELED,
		    call->here->set ? "the process set is being removed" : "bps is shutting down");
}

/* Waits for a request, inside. */
static int wait_for(struct call *call, struct bps_request *request)
{
	for (;;) {
		int r = bps_request_wait(request, WAIT_SLICE_MS);

		if (r != -ETIMEDOUT)
			return r ? fail_bps(&call->failure, r) : 0;
		if (check_closing(call))
			return call->failure.status;
	}
}

/* Waits until a request of the client may have ended, inside: there is no room for another one. */
static int wait_for_any(struct call *call)
{
	struct pollfd fd = { .fd = bps_client_fd(call->here->client), .events = POLLIN };

	if (fd.fd < 0)
		return fail_bps(&call->failure, fd.fd);
	(void)poll(&fd, 1, WAIT_SLICE_MS);
	(void)bps_client_dispatch(call->here->client); /* its failure is the next call's as well */
	return check_closing(call);
}

static struct array array_of(const struct view *view)
{
	return (struct array){
		.dtype = view->dtype,
		.elements = view->count,
		.dims = view->dims,
		.n_dims = view->n_dims,
	};
}

/* Declares and submits, inside. */
static int submit(struct call *call, const char *name, const struct array *array,
		  const struct bps_submit_params *params, struct bps_request **ret_request)
{
	struct bps_tensor *tensor;
	int r = declare(call->here->client, name, array, &tensor);

	if (r)
		return fail_bps(&call->failure, r);
	while ((r = bps_submit(tensor, params, ret_request)) == -EAGAIN && !call->failure.status)
		(void)wait_for_any(call);
	if (r && !call->failure.status)
		(void)fail_bps(&call->failure, r);
	bps_tensor_free(tensor);
	return call->failure.status;
}

/* Submits and waits, inside. ret_outcome may be NULL. */
static int submit_and_wait(struct call *call, const char *name, const struct array *array,
			   const struct bps_submit_params *params, struct bps_outcome *ret_outcome)
{
	struct bps_outcome outcome = { .size = sizeof(outcome) };
	struct bps_request *request;
	int r = submit(call, name, array, params, &request);

	if (r)
		return r;
	r = wait_for(call, request);
	if (!r && ret_outcome) {
		if (bps_request_outcome(request, &outcome))
			r = fail_bps(&call->failure, -EIO);
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
	int32_t process_set; /* the number of the set over whose ranks it is; 0: over all */
	char name[];	     /* "": tensors are named by their type and size */
};

static void kernel_free(void *kernel)
{
	free(kernel);
}

/* ints: whether the node has attributes besides its name, order and set. NULL once the failure was told. */
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
	for (size_t i = ints ? 0 : 4; kernel && i < 6 && tf.GetCode(status) == TF_OK; i++) {
		static const char *const attrs[] = { "operation", "reduction", "root",
						     "priority",  "order",     "process_set" };
		int32_t *const values[] = { &kernel->operation, &kernel->reduction,
					    &kernel->root,	&kernel->priority,
					    &kernel->order,	&kernel->process_set };

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
static int tensor_name(struct call *call, const char *operation, const struct view *view,
		       bool variable, const char *suffix, char name[NAME_MAX_LEN])
{
	const char *noname = call->kernel->order ? "noname" : "noname.tensorflow";
	uint64_t differed = 0;
	struct array array = array_of(view);
	char shape[SHAPE_TEXT_LEN] = "any", after[32] = "";
	int len;

	if (!variable)
		shape_text(&array, shape);
	if (call->kernel->order)
		differed = bps_client_differed(call->here->client, call->kernel->order);
	if (differed)
		(void)snprintf(after, sizeof(after), ".after.%llu", (unsigned long long)differed);
	if (*call->kernel->name)
		len = snprintf(name, NAME_MAX_LEN, "%s.%s%s", operation, call->kernel->name,
			       suffix);
	else
		len = snprintf(name, NAME_MAX_LEN, "%s.%s.%s.%s%s%s", operation, noname,
			       view->dtype_name, shape, after, suffix);
	if (len >= NAME_MAX_LEN)
		return fail(&call->failure, -EINVAL, "a tensor's name has %d bytes", len);
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
	struct call call = { 0 };

	(void)data;
	(void)len;
	if (!module_enter(&call, operation->set, operation->client)) {
		operation_release(operation);
		module_leave(&call);
		return;
	}
	if (call.failure.status == -EPERM)
		return;
	/* Its client may be in the middle of closing: kept until the next one is attached. */
	(void)pthread_mutex_lock(&module.mutex);
	SLIST_INSERT_HEAD(&module.late, operation, link);
	(void)pthread_mutex_unlock(&module.mutex);
}

static int start_reduction(struct call *call, const struct view *input, struct operation *operation)
{
	_cleanup_(freep) uint64_t *counts = NULL;
	bool scatter = call->kernel->operation == BPS_REDUCE_SCATTER;
	uint64_t rows = input->rows, size = (uint64_t)job_size(call),
		 own = (uint64_t)own_rank(call);
	struct array array = array_of(input);
	struct view output;
	char name[NAME_MAX_LEN];

	if (scatter) {
		counts = calloc(size, sizeof(*counts));
		if (!counts)
			return fail(&call->failure, -ENOMEM, "out of memory");
		for (uint64_t rank = 0; rank < size; rank++) {
			uint64_t n = input->rows / size + (rank < input->rows % size);

			counts[rank] = n * input->row;
			if (rank == own)
				rows = n;
		}
		operation->output = tensor_with_rows(input, rows, &output, &call->failure);
	} else {
		output = *input;
		operation->output = tensor_like(input, &call->failure);
		if (operation->output && input->count)
			output.data = tf.TensorData(operation->output);
	}
	if (call->failure.status ||
	    tensor_name(call, scatter ? "reduce_scatter" : "push_pull", input, false, "", name))
		return call->failure.status;

	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = call->kernel->operation,
		.reduction = call->kernel->reduction,
		.input = input->data,
		.output = output.data,
		.input_count = input->count,
		.output_count = output.count,
		.counts = counts,
		.priority = call->kernel->priority,
		.order = call->kernel->order,
	};
	return submit(call, name, &array, &params, &operation->request);
}

/* The root's own result is its input: the caller sees to that. */
static int start_broadcast(struct call *call, const struct view *input, struct operation *operation)
{
	bool root = call->kernel->root == own_rank(call);
	int size = job_size(call);
	struct array array = array_of(input);
	char name[NAME_MAX_LEN];

	if (call->kernel->root < 0 || call->kernel->root >= size)
		return fail(&call->failure, -EINVAL, "root rank %d is not one of the %d ranks",
			    call->kernel->root, size);
	if (tensor_name(call, "broadcast", input, false, "", name))
		return call->failure.status;
	if (!root)
		operation->output = tensor_like(input, &call->failure);
	if (call->failure.status)
		return call->failure.status;

	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_BROADCAST,
		.input = root ? input->data : NULL,
		.output = root || !input->count ? NULL : tf.TensorData(operation->output),
		.input_count = input->count,
		.output_count = input->count,
		.root = (uint32_t)call->kernel->root,
		.priority = call->kernel->priority,
		.order = call->kernel->order,
	};
	return submit(call, name, &array, &params, &operation->request);
}

static void submit_compute(void *data, struct tf_context *context)
{
	struct call call = { .kernel = data };
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *input = NULL, *handle = NULL;
	struct operation *operation;
	struct view view;

	input = input_of(context, 0, &view, status, &call.failure);
	if (call.failure.status || module_enter(&call, call.kernel->process_set, NULL)) {
		report(context, status, &call.failure);
		return;
	}

	operation = aligned_alloc(HANDLE_ALIGN, align_up(sizeof(*operation), HANDLE_ALIGN));
	if (!operation) {
		(void)fail(&call.failure, -ENOMEM, "out of memory");
	} else {
		*operation = (struct operation){ .self = (int64_t)(intptr_t)operation,
						 .client = call.here->client,
						 .set = call.here->set };
		if (call.kernel->operation == BPS_BROADCAST)
			(void)start_broadcast(&call, &view, operation);
		else
			(void)start_reduction(&call, &view, operation);
	}
	if (operation && call.failure.status)
		operation_release(operation);
	else if (operation && !operation->output)
		operation->output = TAKE_PTR(input);
	module_leave(&call);
	if (!call.failure.status) {
		handle = tf.NewTensor(TF_INT64, NULL, 0, &operation->self, sizeof(operation->self),
				      operation_unref, operation);
		tf.SetOutput(context, 0, handle, status);
	}
	report(context, status, &call.failure);
}

static void result_compute(void *data, struct tf_context *context)
{
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *handle = NULL;
	struct operation *operation;
	struct call call = { 0 };
	struct view view;

	(void)data;
	handle = input_of(context, 0, &view, status, &call.failure);
	if (!call.failure.status && (view.count != 1 || view.tf_dtype != TF_INT64 ||
				     *(int64_t *)view.data != (int64_t)(intptr_t)view.data))
		(void)fail(&call.failure, -EINVAL, "this is not a handle of BpsSubmit");
	operation = call.failure.status ? NULL : (struct operation *)view.data;
	if (operation && !module_enter(&call, operation->set, operation->client)) {
		(void)wait_for(&call, operation->request);
		module_leave(&call);
	}
	if (!call.failure.status)
		tf.SetOutput(context, 0, operation->output, status);
	report(context, status, &call.failure);
}

/* -- BpsAllGather, BpsAllToAll ------------------------------------------------------------------------ */

static int check_rows(struct call *call, const int64_t *table, int size, const struct view *input,
		      const char *name)
{
	for (int rank = 0; rank < size; rank++)
		if (table[2 * rank + 1] != (int64_t)input->row)
			return fail(&call->failure, -EINVAL,
				    "%s: rank %d gives rows of %lld elements, rank %d rows of "
				    "%llu: only the "
				    "first dimension may differ",
				    name, rank, (long long)table[2 * rank + 1], own_rank(call),
				    (unsigned long long)input->row);
	return 0;
}

/*
 * What both have in common once each rank knows the others' rows: table holds (rows, elements of a row) of what this
 * rank gets from each of size. Gives the outputs: the rows, one after the other, and how many came from each rank.
 */
static int gather(struct call *call, struct bps_submit_params *params, const char *operation,
		  const struct view *input, const int64_t *table, int size,
		  struct tf_tensor *outputs[2])
{
	_cleanup_(freep) uint64_t *counts = calloc((size_t)size, sizeof(*counts));
	int64_t n_ranks = size;
	const struct array array = { .dtype = input->dtype, .elements = BPS_VARIABLE };
	uint64_t total = 0;
	char name[NAME_MAX_LEN];
	struct view output;

	if (!counts)
		return fail(&call->failure, -ENOMEM, "out of memory");
	if (tensor_name(call, operation, input, true, "", name) ||
	    check_rows(call, table, size, input, name))
		return call->failure.status;
	outputs[1] = tf.AllocateTensor(TF_INT64, &n_ranks, 1, (size_t)n_ranks * sizeof(int64_t));
	if (!outputs[1])
		return fail(&call->failure, -ENOMEM, "TensorFlow has no memory for the result");
	for (int rank = 0; rank < size; rank++) {
		((int64_t *)tf.TensorData(outputs[1]))[rank] = table[2 * rank];
		counts[rank] = (uint64_t)table[2 * rank] * input->row;
		total += (uint64_t)table[2 * rank];
	}
	outputs[0] = tensor_with_rows(input, total, &output, &call->failure);
	if (!outputs[0])
		return call->failure.status;

	params->size = sizeof(*params);
	params->input = input->data;
	params->output = output.data;
	params->input_count = input->count;
	params->output_count = output.count;
	if (params->operation == BPS_ALL_GATHER)
		params->counts = counts;
	else
		params->receive_counts = counts;
	return submit_and_wait(call, name, &array, params, NULL);
}

static int all_gather(struct call *call, const struct view *input, struct tf_tensor *outputs[2])
{
	int size = job_size(call);
	_cleanup_(freep) int64_t *table = calloc((size_t)size, 2 * sizeof(*table));
	int64_t mine[2] = { (int64_t)input->rows, (int64_t)input->row };
	const struct array array = { .dtype = BPS_INT64, .elements = 2 };
	struct bps_outcome outcome;
	char name[NAME_MAX_LEN];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_ALL_GATHER,
		.input = mine,
		.output = table,
		.input_count = 2,
		.output_count = 2 * (uint64_t)size,
		.order = call->kernel->order,
	};

	if (!table)
		return fail(&call->failure, -ENOMEM, "out of memory");
	if (tensor_name(call, "all_gather", input, true, ".rows", name) ||
	    submit_and_wait(call, name, &array, &params, &outcome))
		return call->failure.status;
	/* Of an elastic job fewer may have come. All ranks see the same outcome, so all go on, or none. */
	if (outcome.membership && outcome.n_came != outcome.world_size)
		return fail(&call->failure, -EREMCHG,
			    "%s: the ranks of the job have changed meanwhile: do it again", name);
	if (outcome.membership)
		size = MIN(size, (int)outcome.n_came);
	params = (struct bps_submit_params){ .operation = BPS_ALL_GATHER };
	return gather(call, &params, "all_gather", input, table, size, outputs);
}

static int all_to_all(struct call *call, const struct view *input, const struct view *splits,
		      struct tf_tensor *outputs[2])
{
	uint64_t size = (uint64_t)job_size(call), total = 0;
	_cleanup_(freep) int64_t *sent = calloc(size, 2 * sizeof(*sent));
	_cleanup_(freep) int64_t *received = calloc(size, 2 * sizeof(*received));
	_cleanup_(freep) uint64_t *counts = calloc(size, sizeof(*counts));
	const struct array array = { .dtype = BPS_INT64, .elements = 2 * size };
	const int64_t *split = splits->data;
	char name[NAME_MAX_LEN];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_ALL_TO_ALL,
		.input = sent,
		.output = received,
		.input_count = 2 * size,
		.output_count = 2 * size,
		.order = call->kernel->order,
	};

	if (!sent || !received || !counts)
		return fail(&call->failure, -ENOMEM, "out of memory");
	if (tensor_name(call, "all_to_all", input, true, ".rows", name))
		return call->failure.status;
	if (splits->n_dims != 1 || splits->count != size)
		return fail(&call->failure, -EINVAL,
			    "%s: splits must have one number for each of the %d ranks", name,
			    (int)size);
	for (uint64_t rank = 0; rank < size; rank++) {
		if (split[rank] < 0 || (uint64_t)split[rank] > input->rows - total)
			return fail(&call->failure, -EINVAL,
				    "%s: the splits do not cut %llu rows for %d ranks", name,
				    (unsigned long long)input->rows, (int)size);
		total += (uint64_t)split[rank];
		sent[2 * rank] = split[rank];
		sent[2 * rank + 1] = (int64_t)input->row;
		counts[rank] = (uint64_t)split[rank] * input->row;
	}
	if (total != input->rows)
		return fail(&call->failure, -EINVAL,
			    "%s: the splits do not cut %llu rows for %d ranks: give some that add "
			    "up to that",
			    name, (unsigned long long)input->rows, (int)size);
	if (submit_and_wait(call, name, &array, &params, NULL))
		return call->failure.status;
	params = (struct bps_submit_params){ .operation = BPS_ALL_TO_ALL, .counts = counts };
	return gather(call, &params, "all_to_all", input, received, (int)size, outputs);
}

/* Hands outputs over, if all went well, and ends the kernel. */
static void set_outputs(struct tf_context *context, struct tf_tensor **outputs, int n,
			struct tf_status *status, const struct call *call)
{
	for (int i = 0; i < n; i++) {
		if (!call->failure.status && tf.GetCode(status) == TF_OK)
			tf.SetOutput(context, i, outputs[i], status);
		tensor_deletep(&outputs[i]);
	}
	report(context, status, &call->failure);
}

static void gather_compute(const struct kernel *kernel, struct tf_context *context,
			   bool with_splits)
{
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *input = NULL, *splits = NULL;
	struct tf_tensor *outputs[2] = { NULL, NULL };
	struct call call = { .kernel = kernel };
	struct view view, splits_view;

	input = input_of(context, 0, &view, status, &call.failure);
	if (with_splits && !call.failure.status)
		splits = input_of(context, 1, &splits_view, status, &call.failure);
	if (!call.failure.status && !module_enter(&call, call.kernel->process_set, NULL)) {
		if (with_splits)
			(void)all_to_all(&call, &view, &splits_view, outputs);
		else
			(void)all_gather(&call, &view, outputs);
		module_leave(&call);
	}
	set_outputs(context, outputs, 2, status, &call);
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
static int rows_capacity(struct call *call, const struct view *values, uint64_t *ret_capacity)
{
	uint64_t size = (uint64_t)job_size(call);
	_cleanup_(freep) int64_t *table = calloc(size, sizeof(*table));
	int64_t mine = (int64_t)values->rows;
	const struct array array = { .dtype = BPS_INT64, .elements = 1 };
	char name[NAME_MAX_LEN];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_ALL_GATHER,
		.input = &mine,
		.output = table,
		.input_count = 1,
		.output_count = size,
		.order = call->kernel->order,
	};

	if (!table)
		return fail(&call->failure, -ENOMEM, "out of memory");
	if (tensor_name(call, "push_pull_rows", values, true, ".rows", name) ||
	    submit_and_wait(call, name, &array, &params, NULL))
		return call->failure.status;
	*ret_capacity = 0;
	for (uint64_t rank = 0; rank < size; rank++)
		*ret_capacity += (uint64_t)table[rank];
	return 0;
}

/* outputs: values and numbers of the rows of the result, with room behind them, and how many there are. */
static int push_pull_rows(struct call *call, const struct view *values, const struct view *numbers,
			  const struct view *table, struct tf_tensor *outputs[3])
{
	struct view of_table = *values, result, result_numbers;
	struct array array = { .dtype = values->dtype };
	struct bps_request *request;
	char name[NAME_MAX_LEN];
	uint64_t capacity = 0, n = 0;
	int64_t n_table = -1;
	int r;

	if (table->count == 1 && table->tf_dtype == TF_INT64)
		n_table = *(int64_t *)table->data;
	if (n_table < 0 || MUL_OVERFLOW((uint64_t)n_table, values->row, &of_table.count))
		return fail(&call->failure, -EINVAL,
			    "the number of rows of the table must be one int64 from 0");
	if (numbers->n_dims != 1 || numbers->tf_dtype != TF_INT64 ||
	    numbers->rows != values->rows || !values->n_dims)
		return fail(&call->failure, -EINVAL,
			    "there must be one int64 for each row, its number");
	of_table.dims[0] = n_table;
	array.elements = of_table.count;
	if (rows_capacity(call, values, &capacity) ||
	    tensor_name(call, "push_pull_rows", &of_table, false, "", name))
		return call->failure.status;
	capacity = MIN(capacity, (uint64_t)n_table);
	outputs[0] = tensor_with_rows(values, capacity, &result, &call->failure);
	outputs[1] = call->failure.status
			     ? NULL
			     : tensor_with_rows(numbers, capacity, &result_numbers, &call->failure);
	outputs[2] =
		call->failure.status ? NULL : tf.AllocateTensor(TF_INT64, NULL, 0, sizeof(int64_t));
	if (!outputs[2])
		return fail(&call->failure, -ENOMEM, "TensorFlow has no memory for the result");

	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL_ROWS,
		.reduction = call->kernel->reduction,
		.input = values->data,
		.output = result.data,
		.input_count = values->count,
		.output_count = result.count,
		.priority = call->kernel->priority,
		.width = values->row,
		.input_rows = numbers->data,
		.output_rows = result_numbers.data,
	};
	if (submit(call, name, &array, &params, &request))
		return call->failure.status;
	if (!wait_for(call, request)) {
		r = bps_request_rows(request, &n);
		if (r)
			(void)fail_bps(&call->failure, r);
		else
			*(int64_t *)tf.TensorData(outputs[2]) = (int64_t)n;
	}
	bps_request_free(request);
	return call->failure.status;
}

static void push_pull_rows_compute(void *kernel, struct tf_context *context)
{
	_cleanup_(status_deletep) struct tf_status *status = tf.NewStatus();
	_cleanup_(tensor_deletep) struct tf_tensor *values = NULL, *numbers = NULL, *table = NULL;
	struct tf_tensor *outputs[3] = { NULL, NULL, NULL };
	struct call call = { .kernel = kernel };
	struct view views[3];

	values = input_of(context, 0, &views[0], status, &call.failure);
	numbers =
		call.failure.status ? NULL : input_of(context, 1, &views[1], status, &call.failure);
	table = call.failure.status ? NULL : input_of(context, 2, &views[2], status, &call.failure);
	if (!call.failure.status && !module_enter(&call, call.kernel->process_set, NULL)) {
		(void)push_pull_rows(&call, &views[0], &views[1], &views[2], outputs);
		module_leave(&call);
	}
	set_outputs(context, outputs, 3, status, &call);
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
	const char *inputs[3], *outputs[3], *attrs[8];
	bool stateful;
	void (*shape)(struct tf_shape_context *, struct tf_status *);
	void *(*create)(struct tf_construction *);
	void (*compute)(void *, struct tf_context *);
} ops[] = {
	{ .name = "BpsSubmit",
	  .inputs = { "input: T" },
	  .outputs = { "handle: int64" },
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", "operation: int", "reduction: int",
		     "root: int", "priority: int", ORDER, PROCESS_SET },
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
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", ORDER, PROCESS_SET },
	  .stateful = true,
	  .shape = shape_unknown,
	  .create = kernel_new_named,
	  .compute = all_gather_compute },
	{ .name = "BpsAllToAll",
	  .inputs = { "input: T", "splits: int64" },
	  .outputs = { "output: T", "rows: int64" },
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", ORDER, PROCESS_SET },
	  .stateful = true,
	  .shape = shape_unknown,
	  .create = kernel_new_named,
	  .compute = all_to_all_compute },
	{ .name = "BpsPushPullRows",
	  .inputs = { "values: T", "numbers: int64", "table: int64" },
	  .outputs = { "output: T", "rows: int64", "count: int64" },
	  .attrs = { ELEMENT_TYPES, "tensor_name: string", "operation: int", "reduction: int",
		     "root: int", "priority: int", ORDER, PROCESS_SET },
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

/*
 * Kernels of a process set use the client from now on: open, in a job, and no other of the set attached in this process. 0 or
 * -ENOMEM.
 */
int bps_tensorflow_attach(struct bps_client *client, int32_t set)
{
	struct attachment *here = malloc(sizeof(*here));
	struct operation *operation, *next;

	if (!here)
		return -ENOMEM;
	*here = (struct attachment){ .client = client, .set = set };
	if (module.pid && module.pid != getpid()) {
		/* A child: what the parent had is not ours, and its threads are not here to let go of the mutex. */
		module.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
		SLIST_INIT(&module.attachments);
		SLIST_INIT(&module.late);
	}
	(void)pthread_mutex_lock(&module.mutex);
	next = SLIST_FIRST(&module.late);
	SLIST_INIT(&module.late);
	module.pid = getpid();
	SLIST_INSERT_HEAD(&module.attachments, here, link);
	(void)pthread_mutex_unlock(&module.mutex);
	/* Their tensors may wait for the interpreter, whose lock another thread may hold that waits for the mutex. */
	while ((operation = next)) {
		next = SLIST_NEXT(operation, link);
		operation_release(operation);
	}
	return 0;
}

/* Returns when no kernel uses the client; it may be closed then. What waits fails. */
void bps_tensorflow_detach(const struct bps_client *client)
{
	struct attachment *here;

	if (module.pid != getpid())
		return;
	(void)pthread_mutex_lock(&module.mutex);
	SLIST_FOREACH(here, &module.attachments, link)
	{
		if (here->client == client)
			break;
	}
	if (here) {
		atomic_store(&here->closing, true);
		while (here->n_inside)
			(void)pthread_cond_wait(&module.changed, &module.mutex);
		SLIST_REMOVE(&module.attachments, here, attachment, link);
	}
	(void)pthread_mutex_unlock(&module.mutex);
	free(here);
}
