/*
 * Memory of a device that other devices read and write, by a dma-buf: arenas, one for each
 * device that a job needs one on. The job's worker allocates them; trainers' own memory, which
 * the worker has imported, cannot be exported again. In this process an arena is nothing but
 * addresses: a thread that touches them ends the process. Other devices know the memory by the
 * same addresses.
 *
 * An RDMA device that has registered an arena holds the memory. So a lease that outlives the
 * worker, as that of a part that a server has not answered, is safe. An arena goes with its last
 * lease.
 */
#include "base/failpoint.h"
#include "base/log.h"
#include "gpu/internal.h"
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>

static struct gpu_arena *arena_of(const struct gpu_worker *worker, const uint8_t *device)
{
	struct gpu_arena *arena;

	list_for_each (arena, &worker->gpu->arenas, link)
		if (arena->worker == worker && !memcmp(arena->device, device, DEVICE_UUID_LEN))
			return arena;
	return NULL;
}

static void arena_free(struct gpu_arena *arena)
{
	struct gpu *gpu = arena->gpu;

	if (arena->state == GPU_DIRECT_OPEN)
		gpu->params.staging_ops->closing(gpu->params.user, arena->data);
	if (arena->data)
		(void)munmap(arena->data, arena->pages.n * GPU_PAGE);
	gpu_pages_done(&arena->pages);
	list_remove(&arena->link);
	free(arena);
}

enum gpu_direct_state gpu_direct_state(const struct gpu_worker *worker,
				       const struct gpu_memory *memory)
{
	const struct gpu_arena *arena;

	if (!worker->gpu->params.direct_bytes)
		return GPU_DIRECT_REFUSED;
	arena = arena_of(worker, memory->params.device);
	return arena ? arena->state : GPU_DIRECT_AWAY;
}

void gpu_direct_open(struct gpu_worker *worker, const struct gpu_memory *memory)
{
	struct gpu_command command = { .op = GPU_OP_ARENA, .slot = worker->n_arenas };
	struct gpu *gpu = worker->gpu;
	struct gpu_arena *arena = FAILPOINT_FAILS("gpu-arena") ? NULL : calloc(1, sizeof(*arena));

	if (!arena) {
		gpu_worker_die_soon(worker, "no memory for what is under way");
		return;
	}
	arena->gpu = gpu;
	arena->worker = worker;
	arena->number = worker->n_arenas++;
	arena->pages.n = gpu->params.direct_bytes / GPU_PAGE;
	arena->state = GPU_DIRECT_OPENING;
	memcpy(arena->device, memory->params.device, sizeof(arena->device));
	list_push_back(&gpu->arenas, &arena->link);
	command.len = arena->pages.n * GPU_PAGE;
	memcpy(command.device, arena->device, sizeof(command.device));
	gpu_worker_send(worker, &command, -1);
	gpu_worker_expect_setup(worker);
}

/* Returns 0, or -errno with the reason. */
static int arena_open(struct gpu_arena *arena, int fd, struct failure *failure)
{
	struct gpu *gpu = arena->gpu;
	uint64_t len = arena->pages.n * GPU_PAGE;
	void *data;

	if (gpu_pages_init(&arena->pages, arena->pages.n))
		return failure_set(failure, -ENOMEM, "out of memory");
	data = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (data == MAP_FAILED)
		return failure_set(failure, -errno, "%" PRIu64 " bytes of addresses: %s", len,
				   strerror(errno));
	arena->data = data;
	return gpu->params.staging_ops->exported(gpu->params.user, data, len, fd, failure);
}

static void refuse(struct gpu_arena *arena, const struct failure *why)
{
	struct gpu_command command = { .op = GPU_OP_ARENA_DROP };

	arena->state = GPU_DIRECT_REFUSED;
	arena->why = *why;
	memcpy(command.device, arena->device, sizeof(command.device));
	gpu_worker_send(arena->worker, &command, -1);
}

static bool any_is(const struct gpu_worker *worker, enum gpu_direct_state state)
{
	const struct gpu_arena *arena;

	list_for_each (arena, &worker->gpu->arenas, link)
		if (arena->worker == worker && arena->state == state)
			return true;
	return false;
}

/*
 * Once for all of them: what came of one says nothing of where parts go. One more that goes where
 * others do is no news.
 */
static void tell_way(struct gpu_worker *worker)
{
	unsigned refused = any_is(worker, GPU_DIRECT_REFUSED);
	unsigned ways = 1 + any_is(worker, GPU_DIRECT_OPEN) + 2 * refused;
	char text[512];

	if (worker->logged_ways == ways)
		return;
	worker->logged_ways = ways;
	gpu_direct_describe(worker, text, sizeof(text));
	log_at(refused ? LOG_LEVEL_NOTICE : LOG_LEVEL_INFO, "job %s: GPU memory goes to servers %s",
	       worker->name, text);
}

void gpu_direct_event(struct gpu_worker *worker, const struct gpu_event *event, int fd)
{
	_cleanup_(fd_closep) int owned = fd;
	struct gpu_arena *arena, *found = NULL;
	struct failure why = { 0 };

	list_for_each (arena, &worker->gpu->arenas, link)
		if (arena->worker == worker && arena->number == event->number)
			found = arena;
	if (!found || found->state != GPU_DIRECT_OPENING)
		return;
	if (event->status)
		(void)failure_set(&why, event->status, "%s", event->text);
	else if (owned < 0)
		(void)failure_set(&why, -EPROTO, "the worker handed over no dma-buf");
	else
		(void)arena_open(found, owned, &why);
	if (why.status)
		refuse(found, &why);
	else
		found->state = GPU_DIRECT_OPEN;
	if (!any_is(worker, GPU_DIRECT_OPENING))
		tell_way(worker);
	gpu_worker_changed(worker);
}

int gpu_lease_take_direct(struct gpu_worker *worker, const struct gpu_memory *memory,
			  struct gpu_lease *lease, uint64_t len)
{
	struct gpu_arena *arena = arena_of(worker, memory->params.device);
	uint64_t page;

	if (!arena || arena->state != GPU_DIRECT_OPEN ||
	    !gpu_pages_take(&arena->pages, gpu_pages_of(len), &page))
		return GPU_E_WAIT;
	lease->gpu = worker->gpu;
	lease->arena = arena;
	lease->worker = NULL;
	lease->len = len;
	lease->is_long = true;
	lease->waits = false;
	lease->offset = page * GPU_PAGE;
	lease->data = arena->data + lease->offset;
	return 0;
}

void gpu_direct_give(struct gpu_lease *lease)
{
	struct gpu_arena *arena = TAKE_PTR(lease->arena);

	lease->data = NULL;
	gpu_pages_give(&arena->pages, lease->offset / GPU_PAGE, gpu_pages_of(lease->len));
	if (arena->pages.n_used)
		return;
	if (arena->worker)
		gpu_worker_idle(arena->worker);
	else
		arena_free(arena);
}

bool gpu_direct_is_used(const struct gpu_worker *worker)
{
	const struct gpu_arena *arena;

	list_for_each (arena, &worker->gpu->arenas, link)
		if (arena->worker == worker && arena->pages.n_used)
			return true;
	return false;
}

void gpu_direct_close(struct gpu_worker *worker)
{
	struct gpu_arena *arena, *next;

	list_for_each_safe (arena, next, &worker->gpu->arenas, link) {
		if (arena->worker != worker)
			continue;
		arena->worker = NULL;
		if (!arena->pages.n_used)
			arena_free(arena);
	}
}

const struct gpu_arena *gpu_direct_find(const struct gpu_worker *worker, const void *data)
{
	const struct gpu_arena *arena;

	list_for_each (arena, &worker->gpu->arenas, link)
		if (arena->worker == worker && arena->state == GPU_DIRECT_OPEN &&
		    (const char *)data >= arena->data &&
		    (const char *)data < arena->data + arena->pages.n * GPU_PAGE)
			return arena;
	return NULL;
}

void gpu_direct_describe(const struct gpu_worker *worker, char *text, size_t size)
{
	const char *no_direct = worker->gpu->params.no_direct;
	const struct gpu_arena *arena, *refused = NULL;
	unsigned n = 0, n_open = 0;

	list_for_each (arena, &worker->gpu->arenas, link) {
		if (arena->worker != worker)
			continue;
		n++;
		n_open += arena->state == GPU_DIRECT_OPEN;
		if (arena->state == GPU_DIRECT_REFUSED)
			refused = arena;
	}
	if (n_open && refused)
		(void)snprintf(text, size, "directly, by %u of %u GPUs: %s", n_open, n,
			       refused->why.text);
	else if (n_open)
		(void)snprintf(text, size, "directly");
	else
		(void)snprintf(text, size, "by way of the host%s%s",
			       refused || no_direct ? ": " : "",
			       refused ? refused->why.text : (no_direct ?: ""));
}
