/*
 * What a round and a part need of gpu/: the job's worker, imports, streams that have come,
 * groups, and copies between devices and staging. round.c asks whether a round may move; part.c
 * and push.c have parts brought down and up.
 */
#include "agent/round/device.h"
#include "base/failpoint.h"
#include <inttypes.h>
#include <stdio.h>

#define PARTS_OF_ROUND	 8u
#define PART_BYTES_LEAST (512u << 10)
#define PARTS_AT_ONCE	 4u

static struct agent_job *job_of(const struct agent_part *part)
{
	return part->job;
}

/* -- The job's worker -------------------------------------------------------------------------- */

static void on_changed(void *user)
{
	struct agent_device *device = user;
	struct agent_round *round;
	struct list looked_at;

	/* Those that go on waiting are added anew. */
	list_init(&looked_at);
	while ((round = list_first(&device->waiting, struct agent_round, device_link))) {
		list_remove(&round->device_link);
		list_push_back(&looked_at, &round->device_link);
	}
	agent_job_hold(device->job);
	while ((round = list_first(&looked_at, struct agent_round, device_link))) {
		list_remove(&round->device_link);
		agent_round_advance(round->tensor);
	}
	agent_job_release(device->job);
}

static void on_lost(void *user, const struct failure *failure)
{
	struct agent_device *device = user;

	agent_job_fail(device->job, failure, NULL);
}

static void on_gone(void *user)
{
	struct agent_device *device = user;

	device->worker = NULL;
	agent_job_release(device->job);
}

static const struct gpu_worker_ops ops = {
	.changed = on_changed,
	.lost = on_lost,
	.gone = on_gone,
};

static int device_new(struct agent_job *job, struct failure *failure)
{
	struct agent_device *device;
	int r;

	device = calloc(1, sizeof(*device));
	if (!device)
		return failure_set(failure, -ENOMEM, "out of memory");
	device->job = job;
	list_init(&device->waiting);
	device->sessions = calloc(job->layout.n_local, sizeof(device->sessions[0]));
	if (!device->sessions) {
		free(device);
		return failure_set(failure, -ENOMEM, "out of memory");
	}
	r = gpu_worker_start(job->agent->params.gpu, job->owner.name, &ops, device, &device->worker,
			     failure);
	if (r) {
		free(device->sessions);
		free(device);
		return r;
	}
	job->device = device;
	agent_job_hold(job);
	return 0;
}

/* The job's first use of a device. */
static int device_open(struct agent_job *job, struct failure *failure)
{
	struct account *account = job->memory.account;
	int r;

	if (job->device)
		return 0;
	if (!job->agent->params.gpu)
		return failure_set(failure, -EOPNOTSUPP, "this daemon has no GPUs");
	r = account_charge(account, ACCOUNT_GPU_WORKERS, 1, failure);
	if (r)
		return r;
	r = device_new(job, failure);
	if (r)
		account_release(account, ACCOUNT_GPU_WORKERS, 1);
	else
		job->device->is_charged = true;
	return r;
}

/* The worker is charged until it is told to end: the job's next run needs another. */
static void uncharge(struct agent_job *job)
{
	if (job->device->is_charged)
		account_release(job->memory.account, ACCOUNT_GPU_WORKERS, 1);
	job->device->is_charged = false;
}

void agent_device_close(struct agent_job *job)
{
	if (!job->device || !job->device->worker)
		return;
	uncharge(job);
	gpu_worker_close(job->device->worker);
}

void agent_device_free(struct agent_job *job)
{
	if (!job->device)
		return;
	uncharge(job);
	free(job->device->sessions);
	free(job->device->devices);
	free(job->device);
	job->device = NULL;
}

static int open_session(struct agent_device *device, const struct agent_member *member,
			struct failure *failure)
{
	int r;

	if (device->sessions[member->index])
		return 0;
	if (member->shm_fd < 0)
		return failure_set(failure, -EPROTO,
				   "rank %u has memory on a device and did not say that it may",
				   member->rank);
	r = gpu_session_open(device->worker, member->shm_fd, &device->sessions[member->index]);
	if (r)
		return failure_set(failure, r, "rank %u cannot be known to the GPU worker: %s",
				   member->rank, strerror(-r));
	return 0;
}

bool agent_import(struct agent_member *member, struct buffer *buffer,
		  void (*imported)(void *buffer, const struct failure *why))
{
	struct agent_job *job = member->job;
	struct failure failure;

	if (!job || job->state != JOB_RUNNING)
		return false;
	if (device_open(job, &failure) || open_session(job->device, member, &failure))
		return false;
	gpu_memory_open(buffer->device, job->device->worker, imported, buffer);
	return true;
}

/* -- Rounds ------------------------------------------------------------------------------------ */

static struct buffer *buffer_of(const struct agent_request *request)
{
	return request->input_device ?: request->output_device;
}

/* One buffer of a rank. */
static int look_at_memory(struct agent_device *device, uint32_t rank, struct buffer *buffer,
			  struct failure *failure)
{
	struct failure why;

	if (!buffer)
		return 0;
	switch (gpu_memory_state(buffer->device, device->worker, &why)) {
	case GPU_MEMORY_AWAY:
		gpu_memory_open(buffer->device, device->worker, NULL, NULL);
		return DEVICE_E_WAIT;
	case GPU_MEMORY_OPENING:
		return DEVICE_E_WAIT;
	case GPU_MEMORY_FAILED:
		return failure_set(failure, why.status, "rank %u: %s", rank, why.text);
	case GPU_MEMORY_OPEN:
		break;
	}
	return 0;
}

/* The memory of one rank. */
static int look_at_memories(struct agent_device *device, const struct agent_member *member,
			    struct agent_request *request, struct failure *failure)
{
	int input, output, r;

	r = open_session(device, member, failure);
	if (r)
		return r;
	input = look_at_memory(device, member->rank, request->input_device, failure);
	output = input < 0 ? 0
			   : look_at_memory(device, member->rank, request->output_device, failure);
	return input < 0 || !output ? input : output;
}

/* Whether its stream has come to the submission. */
static int look_at_stream(struct agent_device *device, const struct agent_member *member,
			  struct agent_request *request, struct failure *failure)
{
	struct gpu_session *session = device->sessions[member->index];

	if (gpu_session_is_ready(session, request->slot, request->ticket))
		return 0;
	if (request->watched)
		return DEVICE_E_WAIT;
	if (gpu_session_watch(session, buffer_of(request)->device, request->slot, request->ticket))
		return failure_set(failure, -ENOMEM, "out of memory");
	request->watched = true;
	return DEVICE_E_WAIT;
}

/* -- Groups ------------------------------------------------------------------------------------ */

static bool is_float(unsigned dtype)
{
	return dtype >= DTYPE_FLOAT64 && dtype <= DTYPE_BFLOAT16;
}

/* What is divided before it is added, so that it fits: NCCL does so, but not for sums that are then added to others. */
static bool is_scaled(const struct agent_round *round)
{
	return round->tensor->dtype == DTYPE_FLOAT16 &&
	       agent_round_first(round)->reduction == REDUCTION_AVERAGE;
}

/* Whether NCCL may take a part in this round, if devices are in groups. */
static bool may_be_grouped(const struct agent_round *round)
{
	const struct agent_job *job = round->job;
	const struct agent_request *first = round->ranks[0].request;
	uint32_t n = job->layout.n_local;
	unsigned reduction = first->reduction;

	/* Servers divide, or NCCL does; of integers it would not be the floor, and NCCL does not say that a sum has wrapped. */
	if (reduction == REDUCTION_AVERAGE && is_float(round->tensor->dtype))
		reduction = REDUCTION_SUM;
	if (first->operation != OPERATION_PUSH_PULL || job->shape.gpu_reduce == GPU_REDUCE_HOST ||
	    n < 2 || n > GPU_RANKS_MAX || !gpu_collective_supports(round->tensor->dtype, reduction))
		return false;
	for (uint32_t i = 0; i < n; i++)
		if (!round->ranks[i].request->input_device ||
		    !round->ranks[i].request->output_device)
			return false;
	return true;
}

static const uint8_t *device_of(const struct agent_round *round, uint32_t local)
{
	return gpu_memory_device(buffer_of(round->ranks[local].request)->device);
}

/*
 * Asks once how the ranks' devices are to be grouped, if they are different ones. Before any stream
 * of the worker waits for a trainer, whatever the operation is: while NCCL begins it may wait for
 * all that is in a device's streams.
 */
static int ask_for_plan(const struct agent_round *round, struct failure *failure)
{
	const struct agent_job *job = round->job;
	struct agent_device *device = job->device;
	struct gpu_memory *memories[GPU_RANKS_MAX];
	uint32_t n = job->layout.n_local;

	if (n < 2 || n > GPU_RANKS_MAX || job->shape.gpu_reduce == GPU_REDUCE_HOST)
		return 0;
	for (uint32_t i = 0; i < n; i++) {
		if (!buffer_of(round->ranks[i].request))
			return 0;
		memories[i] = buffer_of(round->ranks[i].request)->device;
		for (uint32_t k = 0; k < i; k++)
			if (!memcmp(device_of(round, i), device_of(round, k), DEVICE_UUID_LEN))
				return 0;
	}
	device->devices = calloc(n, sizeof(device->devices[0]));
	if (!device->devices)
		return failure_set(failure, -ENOMEM, "out of memory");
	for (uint32_t i = 0; i < n; i++)
		memcpy(device->devices[i], device_of(round, i), DEVICE_UUID_LEN);
	gpu_plan_ask(device->worker, job->shape.gpu_reduce, job->shape.gpu_roots, memories, n);
	device->planned = true;
	return DEVICE_E_WAIT;
}

static int look_at_plan(struct agent_round *round, struct failure *failure)
{
	struct agent_device *device = round->job->device;
	uint32_t n = round->job->layout.n_local;
	const struct gpu_plan *plan;

	round->grouped = false;
	if (!device->planned)
		return ask_for_plan(round, failure);
	plan = gpu_plan(device->worker);
	if (!plan)
		return DEVICE_E_WAIT;
	if (!may_be_grouped(round))
		return 0;
	for (uint32_t i = 0; i < n; i++)
		if (memcmp(device->devices[i], device_of(round, i), DEVICE_UUID_LEN))
			return 0;
	device->n_groups = 0;
	for (uint32_t i = 0; i < n; i++)
		device->n_groups = MAX(device->n_groups, plan->group_of[i] + 1u);
	round->grouped = device->n_groups < n && (device->n_groups == 1 || !is_scaled(round));
	return 0;
}

/* -- Readiness --------------------------------------------------------------------------------- */

/* What look says of all ranks that have memory on a device. */
static int look_at_all(struct agent_round *round,
		       int (*look)(struct agent_device *device, const struct agent_member *member,
				   struct agent_request *request, struct failure *failure),
		       struct failure *failure)
{
	struct agent_job *job = round->job;
	bool waits = false;
	int r = 0;

	for (uint32_t i = 0; r >= 0 && i < job->layout.n_local; i++) {
		struct agent_request *request = round->ranks[i].request;

		if (!buffer_of(request))
			continue;
		r = look(job->device, job->members[i], request, failure);
		waits |= r == DEVICE_E_WAIT;
	}
	return r >= 0 && waits ? DEVICE_E_WAIT : r;
}

int agent_device_ready(struct agent_round *round, struct failure *failure)
{
	struct agent_job *job = round->job;
	int r;

	r = device_open(job, failure);
	if (!r)
		r = look_at_all(round, look_at_memories, failure);
	if (!r)
		r = look_at_plan(round, failure);
	if (!r)
		r = agent_direct_ready(round);
	if (!r)
		r = look_at_all(round, look_at_stream, failure);
	if (r == DEVICE_E_WAIT && !list_linked(&round->device_link))
		list_push_back(&job->device->waiting, &round->device_link);
	return r;
}

/*
 * A part on a device costs 30 us of the control thread, whatever is in it, and the way of the last
 * one is what nothing hides: an eighth of the round, within bounds. Of all ranks' inputs several
 * parts have room in staging.
 */
uint32_t agent_device_part_bytes(const struct agent_round *round, uint64_t bytes)
{
	const struct agent_job *job = round->job;
	uint64_t most, part;

	if (job->distributed || job->shape.part_bytes)
		return job->part_bytes;
	most = gpu_staging_len(job->device->worker) / (PARTS_AT_ONCE * job->layout.n_local);
	part = MIN(MAX(bytes / PARTS_OF_ROUND, (uint64_t)PART_BYTES_LEAST), most);
	part = MIN(part, (uint64_t)job->agent->params.device_part_bytes);
	part = MAX(part, (uint64_t)job->part_bytes);
	return (uint32_t)(part - part % PART_ALIGN);
}

void agent_device_waiting_for(const struct agent_round *round, char *text, size_t size)
{
	const struct agent_job *job = round->job;
	struct agent_ranks_text late = { 0 };

	text[0] = 0;
	if (!job->device || round->state != ROUND_READY)
		return;
	for (uint32_t i = 0; i < job->layout.n_local; i++) {
		const struct agent_request *request = round->ranks[i].request;
		const struct gpu_session *session = job->device->sessions[i];

		if (request && buffer_of(request) && session &&
		    !gpu_session_is_ready(session, request->slot, request->ticket))
			agent_ranks_add(&late, job->layout.rank_of_local[i]);
	}
	if (late.n)
		(void)snprintf(text, size, "the stream of %s did not come to it",
			       agent_ranks_end(&late));
}

/* -- What a part has on devices ---------------------------------------------------------------- */

static const struct buffer *input_on_device(const struct agent_part *part, uint32_t local)
{
	return part->round->ranks[local].input_device;
}

bool agent_device_has_output(const struct agent_part *part, uint32_t local)
{
	return part->round->ranks[local].output_device && part->round->ranks[local].output;
}

static bool is_source(const struct agent_part *part, uint32_t local)
{
	uint32_t rank = job_of(part)->layout.rank_of_local[local];

	return part->extent.source == RANK_ALL || part->extent.source == rank;
}

static bool is_target(const struct agent_part *part, uint32_t local)
{
	uint32_t rank = job_of(part)->layout.rank_of_local[local];

	return part->extent.target == RANK_ALL || part->extent.target == rank;
}

/* Whether the rank's output is where the only input is. */
static bool is_in_place(const struct agent_part *part, uint32_t local)
{
	const struct agent_rank *rank = &part->round->ranks[local];

	return part->extent.source != RANK_ALL && is_source(part, local) && rank->input &&
	       (const char *)rank->input + part->extent.input_at ==
		       (const char *)rank->output + part->extent.output_at;
}

static bool goes_up(const struct agent_part *part, uint32_t local)
{
	return is_target(part, local) && agent_device_has_output(part, local) &&
	       !is_in_place(part, local);
}

/* -- Collectives ------------------------------------------------------------------------------- */

/* Members of a group, in order. */
struct group {
	unsigned number;
	uint32_t first; /* the local rank that stands for them */
	uint32_t n, n_roots;
	struct gpu_member members[GPU_RANKS_MAX];
	uint8_t roots[GPU_RANKS_MAX]; /* members by way of which the sum goes, a slice each */
};

static void group_fill(struct group *group, const struct agent_part *part, unsigned number)
{
	const struct gpu_plan *plan = gpu_plan(job_of(part)->device->worker);

	group->number = number;
	group->n = group->n_roots = 0;
	for (uint32_t i = 0; i < job_of(part)->layout.n_local; i++) {
		const struct agent_rank *rank = &part->round->ranks[i];

		if (plan->group_of[i] != number)
			continue;
		if (!group->n)
			group->first = i;
		if (plan->is_root[i])
			group->roots[group->n_roots++] = (uint8_t)group->n;
		group->members[group->n++] = (struct gpu_member){
			.input = rank->input_device->device,
			.output = rank->output_device->device,
			.input_offset =
				(uint64_t)((const char *)rank->input - rank->input_device->data) +
				part->extent.input_at,
			.output_offset =
				(uint64_t)((const char *)rank->output - rank->output_device->data) +
				part->extent.output_at,
		};
	}
}

/* Bytes of a part that are the i-th root's. What does not divide is the last one's. */
static uint64_t slice_of(const struct agent_part *part, const struct group *group, uint32_t i,
			 uint64_t *ret_len)
{
	uint64_t size = part->round->partition.element_size, n = group->n_roots;
	uint64_t each = part->extent.len / size / n * size;

	*ret_len = i == n - 1 ? part->extent.len - i * each : each;
	return i * each;
}

static void collective(struct agent_part *part, enum gpu_collective what, const struct group *group)
{
	struct agent_device *device = job_of(part)->device;

	gpu_task_collective(device->worker, what, group->number, group->members, group->n,
			    part->round->tensor->dtype,
			    what == GPU_ALL_REDUCE ? part->round->reduction : REDUCTION_SUM,
			    what == GPU_REDUCE_SCATTER ? part->round->scale : 0,
			    part->extent.len / part->round->partition.element_size);
}

/* A group's sum, slice by slice, to one piece of staging. */
static void group_down(struct agent_part *part, unsigned number, char *piece)
{
	struct agent_device *device = job_of(part)->device;
	const struct gpu_member *member;
	struct group group;
	uint64_t at, len;

	group_fill(&group, part, number);
	part->staged[group.first] = piece;
	if (group.n == 1) {
		member = &group.members[0];
		gpu_task_down(device->worker, member->input, member->input_offset, piece,
			      part->extent.len);
		return;
	}
	collective(part, GPU_REDUCE_SCATTER, &group);
	for (uint32_t i = 0; i < group.n_roots; i++) {
		member = &group.members[group.roots[i]];
		at = slice_of(part, &group, i, &len);
		gpu_task_down(device->worker, member->output, member->output_offset + at,
			      piece + at, len);
	}
}

static void group_up(struct agent_part *part, unsigned number)
{
	struct agent_device *device = job_of(part)->device;
	const char *result = part->result;
	struct group group;
	uint64_t at, len;

	group_fill(&group, part, number);
	for (uint32_t i = 0; i < group.n_roots; i++) {
		const struct gpu_member *member = &group.members[group.roots[i]];

		at = slice_of(part, &group, i, &len);
		gpu_task_up(device->worker, member->output, member->output_offset + at, result + at,
			    len);
	}
	if (group.n > 1)
		collective(part, GPU_ALL_GATHER, &group);
}

bool agent_device_contributes(const struct agent_part *part, uint32_t local)
{
	return !part->round->grouped || part->staged[local];
}

/* -- Down -------------------------------------------------------------------------------------- */

static void go_on(struct agent_part *part)
{
	if (agent_round_is_failing(part->round))
		agent_part_drop(part);
	else
		part->device.then(part);
}

static void on_down(struct gpu_task *task, bool failed)
{
	struct agent_part *part = container_of(task, struct agent_part, device.task);

	FAILPOINT("part-down");
	/* The job has failed with its worker. */
	if (failed)
		agent_part_drop(part);
	else
		go_on(part);
}

/*
 * Pieces of staging are in order of the local ranks; the result is in the first, where sums may be
 * as well.
 */
static void copy_down(struct agent_part *part)
{
	struct agent_device *device = job_of(part)->device;
	char *piece = part->device.direct.data ?: part->device.lease.data;

	part->result = piece;
	if (!part->device.inputs) {
		go_on(part);
		return;
	}
	gpu_task_begin(device->worker, &part->device.task);
	memset(part->staged, 0, job_of(part)->layout.n_local * sizeof(part->staged[0]));
	for (unsigned i = 0; part->round->grouped && i < device->n_groups; i++) {
		group_down(part, i, piece);
		piece += part->extent.len;
	}
	for (uint32_t i = 0; !part->round->grouped && i < job_of(part)->layout.n_local; i++) {
		const struct buffer *buffer = input_on_device(part, i);
		const char *input = part->round->ranks[i].input;

		if (!buffer || !is_source(part, i))
			continue;
		gpu_task_down(device->worker, buffer->device,
			      (uint64_t)(input - buffer->data) + part->extent.input_at, piece,
			      part->extent.len);
		part->staged[i] = piece;
		piece += part->extent.len;
	}
	part->device.task.done = on_down;
	gpu_task_end(device->worker);
}

static void on_granted(struct gpu_lease *lease)
{
	struct agent_part *part = container_of(lease, struct agent_part, device.lease);

	if (agent_round_is_failing(part->round))
		agent_part_drop(part);
	else
		copy_down(part);
}

/* -- The end of a part ------------------------------------------------------------------------- */

static void on_up(struct gpu_task *task, bool failed)
{
	struct agent_part *part = container_of(task, struct agent_part, device.task);

	(void)failed;
	FAILPOINT("part-up");
	part->round->n_up--;
	agent_part_drop(part);
}

/*
 * What needs nobody but the devices goes up before its round is known to be cut: whether it ends
 * where the whole does.
 */
static bool ends_whole(const struct agent_part *part)
{
	unsigned operation = part->round->partition.operation;

	return (operation == OPERATION_PUSH_PULL || operation == OPERATION_BROADCAST) &&
	       part->extent.input_at + part->extent.len == part->extent.total;
}

/*
 * Whether this is the last part of the round: then the ranks' streams can be told by ours, in
 * order, at once.
 */
static bool is_last(const struct agent_part *part)
{
	const struct agent_round *round = part->round;

	return (round->turn.cut || ends_whole(part)) &&
	       round->n_parts - round->turn.goes_on == round->n_up;
}

static void tell(struct agent_part *part)
{
	struct agent_device *device = job_of(part)->device;

	for (uint32_t i = 0; i < job_of(part)->layout.n_local; i++) {
		const struct agent_request *request = part->round->ranks[i].request;

		if (buffer_of(request))
			gpu_task_tell(device->worker, buffer_of(request)->device,
				      device->sessions[i], request->slot, request->ticket);
	}
}

/* What was begun is the part's last: it ends with it. */
static void end_up(struct agent_part *part)
{
	part->round->n_up++;
	if (is_last(part))
		tell(part);
	part->device.task.done = on_up;
	gpu_task_end(job_of(part)->device->worker);
}

/* All ranks are here and in one group: nothing leaves the devices. */
static void all_reduce(struct agent_part *part)
{
	struct group group;

	group_fill(&group, part, 0);
	gpu_task_begin(job_of(part)->device->worker, &part->device.task);
	collective(part, GPU_ALL_REDUCE, &group);
	end_up(part);
}

void agent_device_too_large(struct agent_part *part, uint64_t len)
{
	char text[160];

	(void)snprintf(text, sizeof(text),
		       "its parts need %" PRIu64 " bytes of staging each, and there are %" PRIu64
		       ": raise gpu_staging, or ask for smaller parts",
		       len, gpu_staging_len(job_of(part)->device->worker));
	agent_part_fail(part, -EMSGSIZE, text);
}

void agent_device_down(struct agent_part *part, bool inputs, bool is_long,
		       void (*then)(struct agent_part *part))
{
	uint64_t n_inputs = 0, n, len;
	bool outputs = false;
	int r = GPU_E_WAIT;

	if (part->round->on_device && part->extent.len && !part->device.lease.data &&
	    !part->device.direct.data) {
		for (uint32_t i = 0; i < job_of(part)->layout.n_local; i++) {
			n_inputs += inputs && input_on_device(part, i) && is_source(part, i);
			outputs |= goes_up(part, i);
		}
	}
	/* The worker of a job that is over may be gone. */
	if ((n_inputs || outputs) && agent_round_is_failing(part->round)) {
		agent_part_drop(part);
		return;
	}
	if (n_inputs && part->round->grouped && job_of(part)->device->n_groups == 1 &&
	    !job_of(part)->distributed) {
		all_reduce(part);
		return;
	}
	if (n_inputs && part->round->grouped)
		n_inputs = job_of(part)->device->n_groups;
	n = n_inputs ? n_inputs : outputs;
	if (!n) {
		then(part);
		return;
	}
	/* Sums are aligned as elements are, and a part's length is whole elements. */
	len = n * part->extent.len;
	part->device.then = then;
	part->device.inputs = n_inputs;
	if (is_long && n_inputs == 1 && agent_round_takes_one(part->round) &&
	    agent_direct_take(part)) {
		copy_down(part);
		return;
	}
	part->device.lease.granted = on_granted;
	if (is_long)
		r = gpu_lease_take(job_of(part)->device->worker, &part->device.lease, len, true);
	if (r == GPU_E_WAIT)
		r = gpu_lease_take(job_of(part)->device->worker, &part->device.lease, len, false);
	if (r < 0)
		agent_device_too_large(part, len);
	else if (!r)
		copy_down(part);
}

void agent_device_give(struct agent_part *part)
{
	if (!part->round->on_device)
		return;
	gpu_lease_give(&part->device.lease);
	gpu_lease_give(&part->device.direct);
	part->result = NULL;
	memset(part->staged, 0, job_of(part)->layout.n_local * sizeof(part->staged[0]));
}

/* -- Up ---------------------------------------------------------------------------------------- */

void agent_device_up(struct agent_part *part)
{
	struct agent_device *device = job_of(part)->device;
	bool any = false;

	for (uint32_t i = 0; part->result && i < job_of(part)->layout.n_local; i++)
		any |= goes_up(part, i);
	if (!any || agent_round_is_failing(part->round)) {
		agent_part_drop(part);
		return;
	}
	gpu_task_begin(device->worker, &part->device.task);
	for (unsigned i = 0; part->round->grouped && i < device->n_groups; i++)
		group_up(part, i);
	for (uint32_t i = 0; !part->round->grouped && i < job_of(part)->layout.n_local; i++) {
		const struct agent_rank *rank = &part->round->ranks[i];
		const struct buffer *buffer = rank->output_device;

		if (!goes_up(part, i))
			continue;
		gpu_task_up(device->worker, buffer->device,
			    (uint64_t)((const char *)rank->output - buffer->data) +
				    part->extent.output_at,
			    part->result, part->extent.len);
	}
	end_up(part);
}
