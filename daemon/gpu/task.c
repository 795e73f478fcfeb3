/*
 * A task from its first command to its end: copies and flags are added as commands to the
 * worker's batch, and a mark behind them in each stream in use tells when all is done. The
 * agent's device.c and direct.c make tasks.
 */
#include "gpu/internal.h"

/* The end of a task that copies no more than this is looked for: 1 MiB takes 20 us, and the way to the worker and back 20. */
#define LINGER_BYTES_MAX (1u << 20)
#define LINGER_NS	 (60 * NSEC_PER_USEC)

void gpu_task_begin(struct gpu_worker *worker, struct gpu_task *task)
{
	assert(!worker->work.task);
	worker->work.task = task;
	worker->work.n_marks = 0;
	worker->work.n_bytes = 0;
	task->n_pending = 0;
}

void gpu_task_use(struct gpu_worker *worker, const struct gpu_memory *memory,
		  enum gpu_stream stream)
{
	for (unsigned i = 0; i < worker->work.n_marks; i++)
		if (worker->work.marks[i].stream == stream &&
		    !memcmp(worker->work.marks[i].memory->params.device, memory->params.device,
			    DEVICE_UUID_LEN))
			return;
	assert(worker->work.n_marks < ARRAY_SIZE(worker->work.marks));
	worker->work.marks[worker->work.n_marks].memory = memory;
	worker->work.marks[worker->work.n_marks++].stream = stream;
}

static void copy(struct gpu_worker *worker, enum gpu_op op, enum gpu_stream stream,
		 const struct gpu_memory *memory, uint64_t offset, const void *data, uint64_t len)
{
	const struct gpu_arena *arena;
	struct gpu_command *command;

	if (!len)
		return;
	command = gpu_worker_add(worker);
	command->op = op;
	command->stream = stream;
	command->memory = memory->number;
	command->offset = offset;
	command->len = len;
	arena = gpu_direct_find(worker, data);
	command->kind = arena ? GPU_AT_DEVICE : GPU_AT_HOST;
	command->slot = arena ? arena->number : 0;
	command->staging =
		(uint64_t)((const char *)data - (arena ? arena->data : worker->gpu->staging));
	metric_add(arena ? &worker->gpu->bytes_direct : &worker->gpu->bytes_staged, len);
	worker->work.n_bytes += len;
	gpu_task_use(worker, memory, stream);
}

void gpu_task_down(struct gpu_worker *worker, struct gpu_memory *memory, uint64_t offset,
		   void *data, uint64_t len)
{
	copy(worker, GPU_OP_DOWN, GPU_DOWN, memory, offset, data, len);
}

void gpu_task_up(struct gpu_worker *worker, struct gpu_memory *memory, uint64_t offset,
		 const void *data, uint64_t len)
{
	copy(worker, GPU_OP_UP, GPU_UP, memory, offset, data, len);
}

void gpu_task_spill(struct gpu_worker *worker, struct gpu_memory *memory, const void *from,
		    void *data, uint64_t len)
{
	const struct gpu_arena *arena = gpu_direct_find(worker, from);
	struct gpu_command *command;

	/*
	 * Without one the worker is dead: nothing is copied, and what is marked ends the task as
	 * failed.
	 */
	gpu_task_use(worker, memory, GPU_DOWN);
	if (!arena)
		return;
	command = gpu_worker_add(worker);
	command->op = GPU_OP_SPILL;
	command->stream = GPU_DOWN;
	command->memory = memory->number;
	command->slot = arena->number;
	command->offset = (uint64_t)((const char *)from - arena->data);
	command->staging = (uint64_t)((char *)data - worker->gpu->staging);
	command->len = len;
	metric_add(&worker->gpu->bytes_staged, len);
}

void gpu_task_tell(struct gpu_worker *worker, struct gpu_memory *memory,
		   struct gpu_session *session, uint32_t slot, uint64_t ticket)
{
	struct gpu_command *command = gpu_worker_add(worker);

	command->op = GPU_OP_TELL;
	command->stream = GPU_UP;
	command->memory = memory->number;
	command->session = session->number;
	command->slot = slot;
	command->ticket = ticket;
	gpu_task_use(worker, memory, GPU_UP);
}

static void on_fail(struct mail *mail)
{
	struct gpu_worker *worker = container_of(mail, struct gpu_worker, work.fail);

	worker->work.fail_posted = false;
	gpu_task_worker_died(worker);
}

/* Those that have nothing to wait for: also they end from the loop. */
static void end_later(struct gpu_worker *worker)
{
	if (worker->work.fail_posted)
		return;
	worker->work.fail_posted = true;
	worker->work.fail.run = on_fail;
	loop_post(worker->gpu->params.loop, &worker->work.fail);
}

void gpu_task_end(struct gpu_worker *worker)
{
	struct gpu_task *task = TAKE_PTR(worker->work.task);

	/* Until now nothing was to come of it. */
	if (list_empty(&worker->work.tasks))
		worker->progress_ns = clock_now_ns();
	task->ticket = ++worker->work.n_begun;
	list_push_back(&worker->work.tasks, &task->link);
	task->n_pending = worker->work.n_marks;
	task->is_mapped = !map_add(&worker->work.by_ticket, task->ticket, &task->entry);
	if (!task->is_mapped)
		gpu_worker_die_soon(worker, "no memory for what is under way");
	for (unsigned i = 0; i < worker->work.n_marks; i++) {
		struct gpu_command *command = gpu_worker_add(worker);

		command->op = GPU_OP_MARK;
		command->stream = worker->work.marks[i].stream;
		command->memory = worker->work.marks[i].memory->number;
		command->ticket = task->ticket;
	}
	if (worker->state != WORKER_RUNNING || !task->n_pending)
		end_later(worker);
	gpu_worker_flush_later(worker);
	gpu_worker_expect(worker);
	if (worker->work.n_bytes <= LINGER_BYTES_MAX)
		(void)loop_linger(worker->gpu->params.loop, clock_now_ns(), LINGER_NS);
}

static void task_done(struct gpu_worker *worker, struct gpu_task *task, bool failed)
{
	list_remove(&task->link);
	if (task->is_mapped)
		map_remove(&worker->work.by_ticket, &task->entry);
	task->done(task, failed);
}

void gpu_task_event(struct gpu_worker *worker, uint64_t ticket)
{
	struct map_entry *entry = map_find(&worker->work.by_ticket, ticket);
	struct gpu_task *task = entry ? container_of(entry, struct gpu_task, entry) : NULL;

	if (!task || --task->n_pending)
		return;
	task_done(worker, task, false);
	gpu_worker_idle(worker);
}

void gpu_task_worker_died(struct gpu_worker *worker)
{
	bool dead = worker->state == WORKER_DEAD;
	struct gpu_task *task, *found;

	do {
		found = NULL;
		list_for_each (task, &worker->work.tasks, link) {
			if (!dead && task->n_pending)
				continue;
			found = task;
			break;
		}
		if (found)
			task_done(worker, found, dead && found->n_pending);
	} while (found);
	gpu_worker_idle(worker);
}
