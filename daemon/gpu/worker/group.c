/*
 * Groups of devices that reduce by NCCL. A plan says which device of the job is in which group:
 * all in one, those behind one PCIe switch, or each alone. A group has two communicators, one
 * for each stream, so that what comes up never waits behind what goes down. The set-up thread
 * makes the plan, main runs collectives, one more thread looks for those that cannot go on.
 */
#include "base/failpoint.h"
#include "gpu/nccl_abi.h"
#include "gpu/topology.h"
#include "gpu/worker/worker.h"
#include <stdio.h>
#include <time.h>

/*
 * A collective that cannot go on stays in its stream; that it is so is found out by looking, while
 * any is under way.
 */
#define LOOK_NS 50000000

struct member {
	struct memory input, output;
	uint64_t input_offset, output_offset;
};

struct group {
	int n, n_roots;
	struct device *devices[GPU_DEVICES_MAX];
	int roots[GPU_DEVICES_MAX]; /* of these; all of them, or some */
	ncclComm_t comms[GPU_STREAMS][GPU_DEVICES_MAX];
};

static struct {
	/* Set-up's. */
	struct device *devices[GPU_DEVICES_MAX]; /* of the plan that is being made */
	unsigned n;
	/* Written by set-up before made, read by main after it. */
	_Atomic bool made;
	const struct nccl *nccl;
	struct group groups[GPU_DEVICES_MAX];
	unsigned n_groups;
	pthread_t look;
	/* Main's: members of the collective to come. */
	struct member members[GPU_DEVICES_MAX];
	unsigned n_members;
} plan;

/* -- Communicators ----------------------------------------------------------------------------- */

static void check_nccl(ncclResult_t result, const char *call)
{
	if (likely(result == ncclSuccess))
		return;
	if (result == ncclUnhandledCudaError || result == ncclRemoteError)
		worker_fatal_if_alive(-EIO, "%s: %s: %s", call,
				      plan.nccl->ncclGetErrorString(result),
				      plan.nccl->ncclGetLastError(NULL));
	worker_fatal(-EIO, "%s: %s: %s", call, plan.nccl->ncclGetErrorString(result),
		     plan.nccl->ncclGetLastError(NULL));
}

static void open_group(struct group *group)
{
	int numbers[GPU_DEVICES_MAX];

	for (int i = 0; i < group->n; i++)
		numbers[i] = group->devices[i]->number;
	for (unsigned i = 0; i < GPU_STREAMS && group->n > 1; i++)
		check_nccl(plan.nccl->ncclCommInitAll(group->comms[i], group->n, numbers),
			   "ncclCommInitAll");
}

static void look_at_group(const struct group *group)
{
	for (unsigned i = 0; i < GPU_STREAMS && group->n > 1; i++) {
		for (int k = 0; k < group->n; k++) {
			ncclResult_t error = ncclSuccess;

			check_nccl(plan.nccl->ncclCommGetAsyncError(group->comms[i][k], &error),
				   "ncclCommGetAsyncError");
			if (error != ncclSuccess && error != ncclInProgress)
				worker_fatal_if_alive(
					-EIO, "NCCL on device %d (%s): %s: %s",
					group->devices[k]->number, group->devices[k]->name,
					plan.nccl->ncclGetErrorString(error),
					plan.nccl->ncclGetLastError(group->comms[i][k]));
		}
	}
}

static void *look_thread(void *unused)
{
	struct timespec pause = { .tv_nsec = LOOK_NS };

	(void)unused;
	for (;;) {
		(void)pthread_mutex_lock(&worker.marks_lock);
		while (!worker.n_marks)
			(void)pthread_cond_wait(&worker.marks_more, &worker.marks_lock);
		(void)pthread_mutex_unlock(&worker.marks_lock);
		(void)nanosleep(&pause, NULL);
		for (unsigned i = 0; i < plan.n_groups; i++)
			look_at_group(&plan.groups[i]);
	}
	return NULL;
}

void worker_plan_device(const struct gpu_command *command)
{
	struct device *device = worker_device(command->device);

	if (!device || !device->context || plan.n == GPU_DEVICES_MAX)
		worker_fatal(-EPROTO, "the daemon plans with a device that it does not use");
	plan.devices[plan.n++] = device;
}

/*
 * What topology is asked about. A device without an address on a bus is connected to none, if NVML
 * is not there either.
 */
static void look_at_places(struct gpu_place places[GPU_DEVICES_MAX])
{
	for (unsigned i = 0; i < plan.n; i++) {
		const struct device *device = plan.devices[i];

		memcpy(places[i].uuid, device->uuid.bytes, DEVICE_UUID_LEN);
		if (worker.cuda->cuDeviceGetPCIBusId(places[i].bus_id, sizeof(places[i].bus_id),
						     device->number) != CUDA_SUCCESS)
			places[i].bus_id[0] = 0;
	}
}

/* Fills the groups' numbers and roots, and says in words whose they are. */
static void divide(enum gpu_reduce mode, uint64_t asked, uint8_t group_of[GPU_DEVICES_MAX],
		   bool is_root[GPU_DEVICES_MAX], char *words, size_t size)
{
	struct gpu_place places[GPU_DEVICES_MAX];
	struct gpu_topology topology = { .sysfs = "/sys" };
	const char *reason = NULL;

	if (mode != GPU_REDUCE_NCCL)
		(void)nvml_load(&topology.nvml, &reason);
	look_at_places(places);
	plan.n_groups = gpu_topology_divide(&topology, mode, places, plan.n, group_of);
	gpu_topology_roots(&topology, mode, asked, places, plan.n, group_of, is_root);
	if (mode == GPU_REDUCE_NCCL)
		(void)snprintf(words, size, "as asked for");
	else
		(void)snprintf(words, size, "%s%s%s%s%s", topology.by_nvml ? "by NVML" : "",
			       topology.by_nvml && topology.by_sysfs ? " and " : "",
			       topology.by_sysfs ? "by the PCI bus" : "",
			       reason ? (topology.by_sysfs ? "; " : "not known: ") : "",
			       reason ? reason : "");
}

static void join_group(struct group *group, struct device *device, bool is_root)
{
	if (is_root)
		group->roots[group->n_roots++] = group->n;
	group->devices[group->n++] = device;
}

static bool reach(const struct device *from, const struct device *to, char *text, size_t size)
{
	CUresult r;
	int can = 0;

	(void)worker.cuda->cuDeviceCanAccessPeer(&can, from->number, to->number);
	worker_enter(from);
	r = can ? worker.cuda->cuCtxEnablePeerAccess(to->context, 0)
		: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	worker_enter(to);
	if (r == CUDA_SUCCESS || r == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
		return true;
	(void)snprintf(text, size, "device %d (%s) cannot use its memory: %s", from->number,
		       from->name, cuda_error_name(worker.cuda, r));
	return false;
}

static bool is_root(const struct group *group, const struct device *device)
{
	for (int i = 0; i < group->n_roots; i++)
		if (group->devices[group->roots[i]] == device)
			return true;
	return false;
}

bool worker_reach(const struct device *device, char *text, size_t size, bool *ret_any)
{
	const struct group *group = plan.groups;

	while (group < plan.groups + plan.n_groups && !is_root(group, device))
		group++;
	*ret_any = group < plan.groups + plan.n_groups && group->n_roots > 1;
	for (int i = 0; *ret_any && i < group->n_roots; i++) {
		const struct device *other = group->devices[group->roots[i]];

		if (other != device && !reach(other, device, text, size))
			return false;
	}
	return true;
}

void worker_plan(const struct gpu_command *command)
{
	struct gpu_event event = { .kind = GPU_EVENT_PLANNED };
	uint8_t group_of[GPU_DEVICES_MAX] = { 0 };
	bool is_root[GPU_DEVICES_MAX] = { 0 };
	const char *reason = NULL;
	char words[256] = "";

	if (nccl_load(&plan.nccl, &reason)) {
		for (unsigned i = 0; i < plan.n; i++) {
			group_of[i] = (uint8_t)i;
			is_root[i] = true;
		}
		plan.n_groups = 0;
		(void)snprintf(words, sizeof(words), "%s", reason);
	} else {
		divide(command->kind, command->ticket, group_of, is_root, words, sizeof(words));
	}
	for (unsigned i = 0; i < plan.n; i++) {
		join_group(&plan.groups[group_of[i]], plan.devices[i], is_root[i]);
		event.text[i] = (char)('0' + group_of[i]);
		event.text[plan.n + i] = is_root[i] ? '1' : '0';
	}
	(void)snprintf(event.text + 2 * plan.n, sizeof(event.text) - 2 * plan.n, " %s", words);
	for (unsigned i = 0; i < plan.n_groups; i++)
		open_group(&plan.groups[i]);
	if (plan.n_groups && pthread_create(&plan.look, NULL, look_thread, NULL))
		worker_fatal(-EAGAIN, "no thread can be started");
	atomic_store_explicit(&plan.made, true, memory_order_release);
	FAILPOINT("gpu-planned");
	worker_say(&event);
}

/* -- Collectives ------------------------------------------------------------------------------- */

static ncclDataType_t type_of(unsigned dtype)
{
	switch (dtype) {
	case DTYPE_FLOAT64:
		return ncclFloat64;
	case DTYPE_FLOAT32:
		return ncclFloat32;
	case DTYPE_FLOAT16:
		return ncclFloat16;
	case DTYPE_BFLOAT16:
		return ncclBfloat16;
	case DTYPE_INT64:
		return ncclInt64;
	case DTYPE_INT32:
		return ncclInt32;
	case DTYPE_INT8:
		return ncclInt8;
	case DTYPE_UINT8:
		return ncclUint8;
	default:
		worker_fatal(-EPROTO, "the daemon asks NCCL for type %u", dtype);
	}
}

void worker_member(const struct memory *input, const struct memory *output,
		   const struct gpu_command *command)
{
	if (plan.n_members == GPU_DEVICES_MAX)
		worker_fatal(-EPROTO, "the daemon names too many members");
	plan.members[plan.n_members++] = (struct member){
		.input = *input,
		.output = *output,
		.input_offset = command->offset,
		.output_offset = command->staging,
	};
}

struct collective {
	const struct group *group;
	enum gpu_stream stream;
	ncclDataType_t type;
	ncclRedOp_t ops[GPU_DEVICES_MAX]; /* one for each member's communicator */
	size_t size;			  /* of an element */
	uint64_t n,
		n_each; /* elements in all; of each root's slice, but for what does not divide */
};

/* One member's of it. */
struct share {
	ncclComm_t comm;
	ncclRedOp_t op;
	CUstream stream;
	const char *from;
	char *to;
};

static struct share share_of(const struct collective *c, int i)
{
	const struct member *member = &plan.members[i];

	return (struct share){
		.comm = c->group->comms[c->stream][i],
		.op = c->ops[i],
		.stream = c->group->devices[i]->waiters[c->stream].stream,
		.from = (const char *)(uintptr_t)(member->input.base + member->input_offset),
		.to = (char *)(uintptr_t)(member->output.base + member->output_offset),
	};
}

/*
 * One member's calls where some of the group are roots: a slice for each. What does not divide is
 * the last one's.
 */
static void call_roots(const struct collective *c, enum gpu_collective what, int i)
{
	const struct nccl *nccl = plan.nccl;
	struct share m = share_of(c, i);

	for (int k = 0; k < c->group->n_roots; k++) {
		uint64_t first = c->n_each * (uint64_t)k, at = first * c->size;
		uint64_t n = k == c->group->n_roots - 1 ? c->n - first : c->n_each;

		if (!n)
			continue;
		if (what == GPU_REDUCE_SCATTER)
			check_nccl(nccl->ncclReduce(m.from + at, m.to + at, n, c->type, m.op,
						    c->group->roots[k], m.comm, m.stream),
				   "ncclReduce");
		else
			check_nccl(nccl->ncclBroadcast(m.to + at, m.to + at, n, c->type,
						       c->group->roots[k], m.comm, m.stream),
				   "ncclBroadcast");
	}
}

/* One member's calls where all of the group are. */
static void call(const struct collective *c, enum gpu_collective what, int i)
{
	const struct nccl *nccl = plan.nccl;
	struct share m = share_of(c, i);
	uint64_t slice = c->n_each * c->size, done = slice * (uint64_t)c->group->n;
	uint64_t n_rest = c->n - c->n_each * (uint64_t)c->group->n;
	int last = c->group->n - 1;

	switch (what) {
	case GPU_REDUCE_SCATTER:
		if (c->n_each)
			check_nccl(nccl->ncclReduceScatter(m.from, m.to + slice * (uint64_t)i,
							   c->n_each, c->type, m.op, m.comm,
							   m.stream),
				   "ncclReduceScatter");
		if (n_rest)
			check_nccl(nccl->ncclReduce(m.from + done, m.to + done, n_rest, c->type,
						    m.op, last, m.comm, m.stream),
				   "ncclReduce");
		break;
	case GPU_ALL_GATHER:
		if (c->n_each)
			check_nccl(nccl->ncclAllGather(m.to + slice * (uint64_t)i, m.to, c->n_each,
						       c->type, m.comm, m.stream),
				   "ncclAllGather");
		if (n_rest)
			check_nccl(nccl->ncclBroadcast(m.to + done, m.to + done, n_rest, c->type,
						       last, m.comm, m.stream),
				   "ncclBroadcast");
		break;
	case GPU_ALL_REDUCE:
		check_nccl(nccl->ncclAllReduce(m.from, m.to, c->n, c->type, m.op, m.comm, m.stream),
			   "ncclAllReduce");
		break;
	}
}

/* A power of two up to JOB_RANKS_MAX: what it divides float16 by is a normal number of float16. */
static bool scale_is_valid(unsigned dtype, unsigned reduction, uint64_t scale)
{
	return scale <= 1 || (dtype == DTYPE_FLOAT16 && reduction == REDUCTION_SUM &&
			      scale <= JOB_RANKS_MAX && !(scale & (scale - 1)));
}

static void make_ops(struct collective *c, unsigned reduction, uint64_t scale)
{
	/* 1 / scale: the exponent alone. */
	uint16_t factor = (uint16_t)(scale > 1 ? (15 - __builtin_ctzll(scale)) << 10 : 0);

	for (int i = 0; i < c->group->n; i++) {
		c->ops[i] = reduction == REDUCTION_AVERAGE ? ncclAvg : ncclSum;
		if (factor)
			check_nccl(plan.nccl->ncclRedOpCreatePreMulSum(
					   &c->ops[i], &factor, c->type, ncclScalarHostImmediate,
					   c->group->comms[c->stream][i]),
				   "ncclRedOpCreatePreMulSum");
	}
}

static void drop_ops(const struct collective *c, uint64_t scale)
{
	for (int i = 0; scale > 1 && i < c->group->n; i++)
		check_nccl(plan.nccl->ncclRedOpDestroy(c->ops[i], c->group->comms[c->stream][i]),
			   "ncclRedOpDestroy");
}

void worker_collective(const struct gpu_command *command)
{
	unsigned dtype = command->ticket & 0xff, reduction = command->ticket >> 8 & 0xff;
	uint64_t scale = command->ticket >> 16;
	struct collective c = { .stream = command->stream, .n = command->len };
	uint64_t bytes;

	if (!atomic_load_explicit(&plan.made, memory_order_acquire) ||
	    command->slot >= plan.n_groups || command->stream >= GPU_STREAMS ||
	    !dtype_size(dtype) || !scale_is_valid(dtype, reduction, scale))
		worker_fatal(-EPROTO, "the daemon names a group that there is not");
	c.group = &plan.groups[command->slot];
	c.type = type_of(dtype);
	c.size = dtype_size(dtype);
	c.n_each = c.n / (uint64_t)c.group->n_roots;
	if (plan.n_members != (unsigned)c.group->n || c.group->n < 2 ||
	    MUL_OVERFLOW(c.n, (uint64_t)c.size, &bytes))
		worker_fatal(-EPROTO, "the daemon names %u members of %d", plan.n_members,
			     c.group->n);
	for (unsigned i = 0; i < plan.n_members; i++) {
		const struct member *m = &plan.members[i];

		if (bytes > m->input.len || m->input_offset > m->input.len - bytes ||
		    bytes > m->output.len || m->output_offset > m->output.len - bytes ||
		    m->output.device != c.group->devices[i])
			worker_fatal(-EPROTO, "the daemon names bytes that a member does not have");
	}
	FAILPOINT("gpu-collective");
	make_ops(&c, reduction, scale);
	check_nccl(plan.nccl->ncclGroupStart(), "ncclGroupStart");
	for (int i = 0; i < c.group->n; i++) {
		if (c.group->n_roots < c.group->n && command->kind != GPU_ALL_REDUCE)
			call_roots(&c, (enum gpu_collective)command->kind, i);
		else
			call(&c, (enum gpu_collective)command->kind, i);
	}
	check_nccl(plan.nccl->ncclGroupEnd(), "ncclGroupEnd");
	drop_ops(&c, scale);
	plan.n_members = 0;
	/* NCCL may have made another context this thread's. */
	worker_enter(NULL);
}
