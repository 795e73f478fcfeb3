/*
 * Allocations that trainers have shared: kept while shared, given a number and imported by a job's
 * worker when first used, taken back when the worker ends. tensor/buffer.c makes and frees them,
 * the agent's device.c has them opened.
 */
#include "base/loop/porter.h"
#include "gpu/internal.h"
#include <fcntl.h>

static struct gpu_memory *memory_done(struct gpu_memory *memory)
{
	porter_close(NULL, memory->params.fd);
	free(memory);
	return NULL;
}

int gpu_memory_new(const struct gpu_memory_params *params, struct gpu_memory **ret_memory)
{
	struct gpu_memory *memory = calloc(1, sizeof(*memory));

	if (!memory)
		return error_origin(-ENOMEM);
	memory->params = *params;
	if (params->fd >= 0) {
		memory->params.fd = fcntl(params->fd, F_DUPFD_CLOEXEC, 0);
		if (memory->params.fd < 0) {
			int r = error_origin(-errno);

			(void)memory_done(memory);
			return r;
		}
	}
	list_init(&memory->link);
	*ret_memory = memory;
	return 0;
}

/* Takes the lowest number that is free, or a new one. */
static int take_number(struct gpu_worker *worker, struct gpu_memory *memory)
{
	struct gpu_memory **grown;

	for (uint32_t i = 0; i < worker->n_numbers; i++) {
		if (!worker->by_number[i]) {
			worker->by_number[i] = memory;
			memory->number = i;
			return 0;
		}
	}
	grown = reallocarray(worker->by_number, worker->n_numbers + 64, sizeof(grown[0]));
	if (!grown)
		return error_origin(-ENOMEM);
	memset(&grown[worker->n_numbers], 0, 64 * sizeof(grown[0]));
	worker->by_number = grown;
	memory->number = worker->n_numbers;
	worker->n_numbers += 64;
	grown[memory->number] = memory;
	return 0;
}

void gpu_memory_open(struct gpu_memory *memory, struct gpu_worker *worker,
		     void (*opened)(void *user, const struct failure *why), void *user)
{
	struct gpu_command command = {
		.op = GPU_OP_OPEN,
		.kind = memory->params.kind,
		.len = memory->params.len,
	};

	memory->opened = opened;
	memory->opened_user = user;
	memory->worker = worker;
	list_push_back(&worker->memories, &memory->link);
	memory->state = GPU_MEMORY_OPENING;
	if (take_number(worker, memory)) {
		memory->number = UINT32_MAX;
		gpu_worker_die_soon(worker, "no memory for what it imports");
		return;
	}
	command.memory = memory->number;
	memcpy(command.device, memory->params.device, sizeof(command.device));
	memcpy(command.handle, memory->params.handle, sizeof(command.handle));
	gpu_worker_send(worker, &command, memory->params.fd);
	gpu_worker_expect_setup(worker);
}

enum gpu_memory_state gpu_memory_state(const struct gpu_memory *memory,
				       const struct gpu_worker *worker, struct failure *failure)
{
	if (!memory->worker)
		return GPU_MEMORY_AWAY;
	/* The worker of the job before is about to end, and has it until then. */
	if (memory->worker != worker)
		return GPU_MEMORY_OPENING;
	if (memory->state == GPU_MEMORY_FAILED && failure)
		*failure = memory->failure;
	return memory->state;
}

const uint8_t *gpu_memory_device(const struct gpu_memory *memory)
{
	return memory->params.device;
}

/* It is in no worker any more. */
static void memory_away(struct gpu_memory *memory)
{
	void (*freed)(void *user) = memory->freed;
	void *user = memory->freed_user;

	struct gpu_worker *worker = memory->worker;

	if (worker && memory->number < worker->n_numbers &&
	    worker->by_number[memory->number] == memory)
		worker->by_number[memory->number] = NULL;
	list_remove(&memory->link);
	memory->worker = NULL;
	memory->state = GPU_MEMORY_AWAY;
	memory->opened = NULL;
	if (!memory->closing)
		return;
	(void)memory_done(memory);
	if (freed)
		freed(user);
}

void gpu_memory_free(struct gpu_memory *memory, void (*freed)(void *user), void *user)
{
	struct gpu_command command = { .op = GPU_OP_CLOSE, .memory = memory->number };

	memory->closing = true;
	memory->freed = freed;
	memory->freed_user = user;
	memory->opened = NULL;
	if (!memory->worker || memory->state == GPU_MEMORY_FAILED ||
	    memory->worker->state == WORKER_DEAD) {
		memory_away(memory);
		return;
	}
	/* One that is being opened is closed right after. */
	gpu_worker_send(memory->worker, &command, -1);
	gpu_worker_expect_setup(memory->worker);
}

static void opened(struct gpu_memory *memory, const struct gpu_event *event)
{
	struct gpu_worker *worker = memory->worker;
	void (*callback)(void *user, const struct failure *why) = memory->opened;

	struct failure why = { 0 };

	memory->opened = NULL;
	memory->state = GPU_MEMORY_OPEN;
	if (event->status) {
		(void)failure_set(&why, event->status, "%s", event->text);
		memory->state = GPU_MEMORY_FAILED;
		memory->failure = why;
	}
	/* It may be freed from inside. */
	if (callback)
		callback(memory->opened_user, why.status ? &why : NULL);
	gpu_worker_changed(worker);
}

void gpu_memory_event(struct gpu_worker *worker, const struct gpu_event *event)
{
	struct gpu_memory *memory =
		event->number < worker->n_numbers ? worker->by_number[event->number] : NULL;

	if (!memory)
		return;
	if (event->kind == GPU_EVENT_OPENED) {
		/* A failed one keeps its number until it is freed. */
		opened(memory, event);
		return;
	}
	memory_away(memory);
}

void gpu_memory_worker_died(struct gpu_worker *worker)
{
	struct gpu_memory *memory;
	struct gpu_worker *other;

	while ((memory = list_first(&worker->memories, struct gpu_memory, link))) {
		void (*callback)(void *user, const struct failure *why) = memory->opened;
		void *user = memory->opened_user;

		if (memory->state == GPU_MEMORY_OPENING && callback && !memory->closing) {
			memory->state = GPU_MEMORY_FAILED;
			memory->failure = worker->why;
			memory->opened = NULL;
			callback(user, &worker->why);
			/* It may have been freed from inside. */
			continue;
		}
		memory_away(memory);
	}
	/* The next job of the same sessions may wait for it. */
	list_for_each (other, &worker->gpu->workers, link)
		if (other->state == WORKER_RUNNING)
			gpu_worker_changed(other);
}
