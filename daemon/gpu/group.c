/*
 * Groups of GPUs as the daemon knows them: asks a job's worker for its plan, keeps the answer,
 * and adds collectives of NCCL to a task. The agent's device.c calls; worker/group.c makes the
 * plan and runs the collectives.
 */
#include "base/log.h"
#include "gpu/internal.h"

void gpu_plan_ask(struct gpu_worker *worker, enum gpu_reduce mode, uint64_t roots,
		  struct gpu_memory *const *memories, size_t n)
{
	struct gpu_command command = { .op = GPU_OP_PLAN, .kind = mode, .ticket = roots };

	assert(n <= GPU_DEVICES_MAX);
	for (size_t i = 0; i < n; i++) {
		struct gpu_command device = { .op = GPU_OP_PLAN_DEVICE };

		memcpy(device.device, memories[i]->params.device, sizeof(device.device));
		gpu_worker_send(worker, &device, -1);
	}
	worker->n_planned = n;
	gpu_worker_send(worker, &command, -1);
	gpu_worker_expect_setup(worker);
}

void gpu_plan_event(struct gpu_worker *worker, const struct gpu_event *event)
{
	const char *words = event->text + strcspn(event->text, " ");
	size_t n = worker->n_planned;
	const char *groups = event->text, *roots = groups + n;

	if (worker->has_plan || (size_t)(words - groups) != 2 * n)
		return;
	for (size_t i = 0; i < n; i++) {
		worker->plan.group_of[i] = (uint8_t)MIN((unsigned)(groups[i] - '0'), (unsigned)i);
		worker->plan.is_root[i] = roots[i] == '1';
	}
	worker->has_plan = true;
	if (memchr(roots, '0', n))
		log_info("job %s: its GPUs here are in groups %.*s, with roots %.*s (%s)",
			 worker->name, (int)n, groups, (int)n, roots, *words ? words + 1 : "");
	else
		log_info("job %s: its GPUs here are in groups %.*s (%s)", worker->name, (int)n,
			 groups, *words ? words + 1 : "");
	gpu_worker_changed(worker);
}

const struct gpu_plan *gpu_plan(const struct gpu_worker *worker)
{
	return worker->has_plan ? &worker->plan : NULL;
}

bool gpu_collective_supports(unsigned dtype, unsigned reduction)
{
	return reduction == REDUCTION_SUM && dtype != DTYPE_BOOL && dtype != DTYPE_INT16;
}

void gpu_task_collective(struct gpu_worker *worker, enum gpu_collective what, unsigned group,
			 const struct gpu_member *members, size_t n, unsigned dtype,
			 unsigned reduction, uint32_t scale, uint64_t n_elements)
{
	enum gpu_stream stream = what == GPU_REDUCE_SCATTER ? GPU_DOWN : GPU_UP;
	struct gpu_command *command;

	for (size_t i = 0; i < n; i++) {
		command = gpu_worker_add(worker);
		command->op = GPU_OP_MEMBER;
		command->memory = members[i].input->number;
		command->offset = members[i].input_offset;
		command->session = members[i].output->number;
		command->staging = members[i].output_offset;
		gpu_task_use(worker, members[i].output, stream);
	}
	command = gpu_worker_add(worker);
	command->op = GPU_OP_COLLECTIVE;
	command->kind = what;
	command->stream = stream;
	command->slot = group;
	command->len = n_elements;
	command->ticket = dtype | reduction << 8 | (uint64_t)scale << 16;
}
