#include "base/log.h"
#include "gpu/internal.h"

void gpu_plan_ask(struct gpu_worker *worker, enum gpu_reduce mode,
		  struct gpu_memory *const *memories, size_t n)
{
	struct gpu_command command = { .op = GPU_OP_PLAN, .kind = mode };

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
	size_t len = strcspn(event->text, " ");

	if (worker->has_plan || len != worker->n_planned)
		return;
	for (size_t i = 0; i < len; i++)
		worker->plan[i] = (uint8_t)MIN((unsigned)(event->text[i] - '0'), (unsigned)i);
	worker->has_plan = true;
	log_info("job %s: its GPUs here are in groups %.*s (%s)", worker->name, (int)len,
		 event->text, event->text[len] ? event->text + len + 1 : "");
	gpu_worker_changed(worker);
}

const uint8_t *gpu_plan(const struct gpu_worker *worker)
{
	return worker->has_plan ? worker->plan : NULL;
}

bool gpu_collective_supports(unsigned dtype, unsigned reduction)
{
	return reduction == REDUCTION_SUM && dtype != DTYPE_BOOL && dtype != DTYPE_INT16;
}

void gpu_task_collective(struct gpu_worker *worker, enum gpu_collective what, unsigned group,
			 const struct gpu_member *members, size_t n, unsigned dtype,
			 unsigned reduction, uint64_t n_elements)
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
	command->ticket = dtype | reduction << 8;
}
