/*
 * Parts that go between a device and a server without the host's memory: RDMA devices read and write staging on the device
 * itself. That takes a sum of one rank, or of a group that reduces to its roots, and a server on another node that is reached by
 * RDMA; whatever else there is goes by way of the host, as does what has begun when RDMA is gone.
 */
#include "agent/round/device.h"

static struct agent_job *job_of(const struct agent_part *part)
{
	return part->job;
}

/* -- Whether it can be -------------------------------------------------------------------------------------------- */

static bool same_device(const struct buffer *a, const struct buffer *b)
{
	return a && b &&
	       !memcmp(gpu_memory_device(a->device), gpu_memory_device(b->device), DEVICE_UUID_LEN);
}

static struct gpu_memory *memory_of(const struct agent_round *round, uint32_t local)
{
	return round->ranks[local].request->output_device->device;
}

/* Local ranks on whose devices sums of the round begin and end, as bits; 0: it has to do with more than these. */
static uint64_t roots_of(const struct agent_round *round)
{
	const struct agent_job *job = round->job;
	const struct agent_request *request = round->ranks[0].request;
	const struct gpu_plan *plan;
	uint64_t roots = 0;

	if (!request || !job->distributed || request->operation != OPERATION_PUSH_PULL ||
	    stragglers_any(&job->shape.stragglers))
		return 0;
	if (!round->grouped)
		return job->layout.n_local == 1 &&
		       same_device(request->input_device, request->output_device);
	plan = gpu_plan(job->device->worker);
	for (uint32_t i = 0; job->device->n_groups == 1 && i < job->layout.n_local; i++)
		roots |= (uint64_t)plan->is_root[i] << i;
	return roots;
}

int agent_direct_ready(struct agent_round *round)
{
	struct gpu_worker *worker = round->job->device->worker;
	bool waits = false;

	round->direct = 0;
	for (uint64_t left = roots_of(round); left; left &= left - 1) {
		uint32_t local = (uint32_t)__builtin_ctzll(left);
		struct gpu_memory *memory = memory_of(round, local);

		switch (gpu_direct_state(worker, memory)) {
		case GPU_DIRECT_AWAY:
			gpu_direct_open(worker, memory);
			waits = true;
			break;
		case GPU_DIRECT_OPENING:
			waits = true;
			break;
		case GPU_DIRECT_OPEN:
			round->direct |= UINT64_C(1) << local;
			break;
		case GPU_DIRECT_REFUSED:
			break;
		}
	}
	return waits ? DEVICE_E_WAIT : 0;
}

/*
 * Roots bring their slices of a part to one of them, as it goes to its server in one piece, and get their slices of the
 * result from there: a part to this, the next to that, so that all have the same to do. The sums are made as ever, so it is
 * the same bits by whichever.
 */
static struct gpu_memory *memory_for(const struct agent_part *part)
{
	uint64_t left = part->round->direct, n = (uint64_t)__builtin_popcountll(left);

	for (n = (part->round->tensor->key + part->extent.part) % n; n; n--)
		left &= left - 1;
	return memory_of(part->round, (uint32_t)__builtin_ctzll(left));
}

bool agent_direct_goes(const struct agent_part *part)
{
	return part->send_queue && peer_takes_direct(part->send_queue->peer, part->extent.len);
}

bool agent_direct_take(struct agent_part *part)
{
	return part->round->direct && agent_direct_goes(part) &&
	       !gpu_lease_take_direct(job_of(part)->device->worker, memory_for(part),
				      &part->device.direct, part->extent.len);
}

/* -- The way back to the host ------------------------------------------------------------------------------------- */

/* Staging is not held while other nodes are waited for, unless there is plenty. */
static bool move_to_block(struct agent_part *part)
{
	if (block_new(job_of(part)->agent->params.blocks, part->extent.len, NULL, &part->block))
		return false;
	agent_part_copy(part, part->block->data, part->device.lease.data, part->extent.len);
	agent_device_give(part);
	return true;
}

static void on_spilled(struct gpu_task *task, bool failed)
{
	struct agent_part *part = container_of(task, struct agent_part, device.task);

	/* Whatever failed the round, its worker among others: nothing more of it leaves this node. */
	if (failed || agent_round_is_failing(part->round)) {
		agent_part_drop(part);
		return;
	}
	gpu_lease_give(&part->device.direct);
	part->result = part->device.lease.data;
	for (uint32_t i = 0; i < job_of(part)->layout.n_local; i++)
		if (part->staged[i])
			part->staged[i] = part->result;
	if (!part->device.lease.is_long && !move_to_block(part)) {
		agent_part_fail(part, -ENOMEM, "out of memory");
		return;
	}
	part->device.then(part);
}

static void spill(struct agent_part *part)
{
	struct gpu_worker *worker = job_of(part)->device->worker;

	gpu_task_begin(worker, &part->device.task);
	gpu_task_spill(worker, memory_for(part), part->device.direct.data, part->device.lease.data,
		       part->extent.len);
	part->device.task.done = on_spilled;
	gpu_task_end(worker);
}

static void on_granted(struct gpu_lease *lease)
{
	struct agent_part *part = container_of(lease, struct agent_part, device.lease);

	/* Its worker may have died while it waited. */
	if (agent_round_is_failing(part->round))
		agent_part_drop(part);
	else
		spill(part);
}

void agent_direct_spill(struct agent_part *part, void (*then)(struct agent_part *part))
{
	struct gpu_worker *worker = job_of(part)->device->worker;
	int r;

	/* What was at a server when its worker died may come back when there is none any more. */
	if (agent_round_is_failing(part->round) || !worker) {
		agent_part_drop(part);
		return;
	}
	part->device.then = then;
	part->device.lease.granted = on_granted;
	r = gpu_lease_take(worker, &part->device.lease, part->extent.len, true);
	if (r == GPU_E_WAIT)
		r = gpu_lease_take(worker, &part->device.lease, part->extent.len, false);
	if (r < 0)
		agent_device_too_large(part, part->extent.len);
	else if (!r)
		spill(part);
}

void agent_direct_describe(const struct agent_job *job, char *text, size_t size)
{
	*text = '\0';
	if (job->device && job->device->worker && job->distributed)
		gpu_direct_describe(job->device->worker, text, size);
}
