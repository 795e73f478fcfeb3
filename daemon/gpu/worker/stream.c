/*
 * The streams of a worker: copies, flags that are waited for or stored, and marks. Main puts
 * commands into streams; one waiter thread for each stream that copies tells the daemon when a
 * mark is reached.
 */
#include "base/clock.h"
#include "base/failpoint.h"
#include "gpu/worker/worker.h"
#include <sys/prctl.h>
#include <time.h>

/*
 * How long the end of a copy is looked for without a pause, and between which bounds the pauses are that follow: a share of the
 * time that it has taken so far. A wake-up by the device comes 20 to 40 us late, and the event for it holds up the stream by
 * 2 us (H200, driver 580); 512 KiB take 10 us, 4 MiB 84.
 */
#define LOOK_NS	       (30 * NSEC_PER_USEC)
#define PAUSE_SHARE    8u
#define PAUSE_LEAST_NS (5 * NSEC_PER_USEC)
#define PAUSE_MOST_NS  NSEC_PER_MSEC

struct mark {
	struct mark *next;
	CUevent event;
	uint64_t ticket;
};

/* -- Waiters ----------------------------------------------------------------------------------- */

static bool has_mark(void *context)
{
	const struct waiter *waiter = context;

	return atomic_load_explicit(&waiter->first, memory_order_relaxed);
}

/* The mark that is reached next, once there is one. */
static struct mark *mark_next(struct waiter *waiter, struct allowance *allowance)
{
	struct mark *mark;

	worker_look(allowance, has_mark, waiter);
	(void)pthread_mutex_lock(&waiter->lock);
	while (!waiter->first)
		(void)pthread_cond_wait(&waiter->more, &waiter->lock);
	mark = waiter->first;
	(void)pthread_mutex_unlock(&waiter->lock);
	return mark;
}

/* The first mark was reached. Returns the one behind it, or NULL. */
static struct mark *mark_reached(struct waiter *waiter)
{
	struct mark *mark, *next;

	(void)pthread_mutex_lock(&worker.marks_lock);
	worker.n_marks--;
	(void)pthread_mutex_unlock(&worker.marks_lock);
	(void)pthread_mutex_lock(&waiter->lock);
	mark = waiter->first;
	next = mark->next;
	waiter->first = next;
	mark->next = waiter->spare;
	waiter->spare = mark;
	(void)pthread_mutex_unlock(&waiter->lock);
	return next;
}

static bool is_reached(const struct waiter *waiter, const struct mark *mark)
{
	CUresult r = worker.cuda->cuEventQuery(mark->event);

	if (r == CUDA_ERROR_NOT_READY)
		return false;
	worker_check(r, "cuEventQuery", waiter->device);
	return true;
}

/* Of what comes down a sum waits; nobody does for what goes up, whose stream tells the trainers' itself. */
static void mark_wait(const struct waiter *waiter, const struct mark *mark)
{
	uint64_t look_ns = waiter == &waiter->device->waiters[GPU_DOWN] ? LOOK_NS : 0;
	uint64_t began_ns = clock_now_ns(), waited_ns = 0, pause_ns;

	while (!is_reached(waiter, mark)) {
		if (waited_ns >= look_ns) {
			pause_ns = MAX(waited_ns / PAUSE_SHARE, (uint64_t)PAUSE_LEAST_NS);
			pause_ns = MIN(pause_ns, (uint64_t)PAUSE_MOST_NS);
			(void)nanosleep(&(struct timespec){ .tv_nsec = (long)pause_ns }, NULL);
		}
		waited_ns = clock_now_ns() - began_ns;
	}
}

static void *waiter_thread(void *argument)
{
	struct waiter *waiter = argument;
	struct allowance allowance = { 0 };
	uint64_t tickets[GPU_DONE_MAX];
	struct mark *mark;
	uint32_t n;

	/* Else each pause takes 50 us longer. */
	(void)prctl(PR_SET_TIMERSLACK, 1);
	worker_enter(waiter->device);
	for (;;) {
		mark = mark_next(waiter, &allowance);
		mark_wait(waiter, mark);
		n = 0;
		do {
			tickets[n++] = mark->ticket;
			mark = mark_reached(waiter);
		} while (mark && n < GPU_DONE_MAX && is_reached(waiter, mark));
		worker_say_done(tickets, n);
	}
	return NULL;
}

static void waiter_start(struct waiter *waiter, struct device *device, int priority)
{
	worker_check(worker.cuda->cuStreamCreateWithPriority(&waiter->stream,
							     CU_STREAM_NON_BLOCKING, priority),
		     "cuStreamCreateWithPriority", device);
	waiter->device = device;
	(void)pthread_mutex_init(&waiter->lock, NULL);
	(void)pthread_cond_init(&waiter->more, NULL);
	if (pthread_create(&waiter->thread, NULL, waiter_thread, waiter))
		worker_fatal(-EAGAIN, "no thread can be started");
}

void worker_streams_open(struct device *device)
{
	int least, greatest;

	worker_check(worker.cuda->cuCtxGetStreamPriorityRange(&least, &greatest),
		     "cuCtxGetStreamPriorityRange", device);
	for (unsigned i = 0; i < GPU_STREAMS; i++)
		waiter_start(&device->waiters[i], device, greatest);
}

static struct mark *mark_new(struct waiter *waiter)
{
	struct mark *mark;

	(void)pthread_mutex_lock(&waiter->lock);
	mark = waiter->spare;
	if (mark)
		waiter->spare = mark->next;
	(void)pthread_mutex_unlock(&waiter->lock);
	if (mark)
		return mark;
	mark = calloc(1, sizeof(*mark));
	if (!mark)
		worker_fatal(-ENOMEM, "out of memory");
	worker_check(worker.cuda->cuEventCreate(&mark->event, CU_EVENT_DISABLE_TIMING),
		     "cuEventCreate", waiter->device);
	return mark;
}

static void mark(struct waiter *waiter, uint64_t ticket)
{
	struct mark *mark = mark_new(waiter);

	mark->next = NULL;
	mark->ticket = ticket;
	(void)pthread_mutex_lock(&worker.marks_lock);
	if (!worker.n_marks++)
		(void)pthread_cond_signal(&worker.marks_more);
	(void)pthread_mutex_unlock(&worker.marks_lock);
	worker_check(worker.cuda->cuEventRecord(mark->event, waiter->stream), "cuEventRecord",
		     waiter->device);
	(void)pthread_mutex_lock(&waiter->lock);
	if (waiter->first)
		waiter->last->next = mark;
	else
		waiter->first = mark;
	waiter->last = mark;
	(void)pthread_cond_signal(&waiter->more);
	(void)pthread_mutex_unlock(&waiter->lock);
}

/* -- Flags ------------------------------------------------------------------------------------- */

/* A flag as devices see it. */
static CUdeviceptr flag_at(const struct gpu_command *command, size_t member, struct session **ret)
{
	struct session *session = NULL;
	CUdeviceptr flags = 0;

	(void)pthread_mutex_lock(&worker.lock);
	if (command->session < worker.n_sessions) {
		session = worker.sessions[command->session];
		flags = session->flags;
	}
	(void)pthread_mutex_unlock(&worker.lock);
	if (!flags || command->slot >= SHM_SLOTS)
		worker_fatal(-EPROTO, "the daemon names flags that it did not hand over");
	*ret = session;
	return flags + command->slot * sizeof(struct shm_flag) + member;
}

/* On a thread of the driver, which may not be called from here. */
static void on_reached(void *argument)
{
	const struct lane *lane = argument;
	struct gpu_event event = {
		.kind = GPU_EVENT_REACHED,
		.number = lane->session,
		.lane = lane->number,
	};

	worker_say(&event);
}

static void watch(const struct gpu_command *command)
{
	struct session *session;
	CUdeviceptr flag = flag_at(command, offsetof(struct shm_flag, ready), &session);
	struct lane *lane = &session->lanes[command->stream % GPU_LANES];

	if (!lane->stream) {
		lane->device = worker_device(command->device);
		if (!lane->device || !lane->device->context)
			worker_fatal(-EPROTO, "the daemon names a device that it does not use");
		worker_enter(lane->device);
		worker_check(worker.cuda->cuStreamCreate(&lane->stream, CU_STREAM_NON_BLOCKING),
			     "cuStreamCreate", lane->device);
	}
	worker_enter(lane->device);
	worker_check(worker.cuda->cuStreamWaitValue32(lane->stream, flag, (uint32_t)command->ticket,
						      CU_STREAM_WAIT_VALUE_GEQ),
		     "cuStreamWaitValue32", lane->device);
	worker_check(worker.cuda->cuLaunchHostFunc(lane->stream, on_reached, lane),
		     "cuLaunchHostFunc", lane->device);
}

/* -- Copies ------------------------------------------------------------------------------------ */

static struct memory memory_at(uint32_t number)
{
	struct memory memory = { 0 };

	(void)pthread_mutex_lock(&worker.lock);
	if (number < worker.n_memories)
		memory = worker.memories[number];
	(void)pthread_mutex_unlock(&worker.lock);
	if (!memory.device)
		worker_fatal(-EPROTO, "the daemon names memory that is not open");
	return memory;
}

static struct memory memory_of(const struct gpu_command *command)
{
	struct memory memory = memory_at(command->memory);

	if (command->len > memory.len || command->offset > memory.len - command->len)
		worker_fatal(-EPROTO, "the daemon names bytes beyond the end of memory");
	return memory;
}

static void *staging_at(const struct gpu_command *command)
{
	if (command->len > worker.staging_len ||
	    command->staging > worker.staging_len - command->len)
		worker_fatal(-EPROTO, "the daemon names bytes beyond the end of staging");
	return worker.staging + command->staging;
}

static CUdeviceptr arena_at(uint32_t number, uint64_t at, uint64_t len,
			    const struct device **ret_owner)
{
	const struct device *owner = NULL;
	CUdeviceptr arena = 0;
	uint64_t arena_len = 0;

	(void)pthread_mutex_lock(&worker.lock);
	if (number < ARRAY_SIZE(worker.arenas))
		owner = worker.arenas[number];
	if (owner) {
		arena = owner->arena;
		arena_len = owner->arena_len;
	}
	(void)pthread_mutex_unlock(&worker.lock);
	if (!owner || len > arena_len || at > arena_len - len)
		worker_fatal(-EPROTO, "the daemon names bytes beyond the end of an arena");
	*ret_owner = owner;
	return arena + at;
}

/*
 * What a RDMA device has written to the owner's arena is there for what is put into streams from
 * here on: of the owner, or of all that read there. The reader's context is the current one.
 */
static void flush(const struct device *owner, const struct device *reader, bool for_others)
{
	if (owner->order >= (for_others ? CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES
					: CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER))
		return;
	worker_enter(owner);
	worker_check(worker.cuda->cuFlushGPUDirectRDMAWrites(
			     CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
			     for_others ? CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
					: CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
		     "cuFlushGPUDirectRDMAWrites", owner);
	worker_enter(reader);
}

/*
 * Whose arena a task has been flushed of: all that it copies from there had come before it was
 * begun. With its first mark it has no more.
 */
static const struct device *flushed;

/* Between memory and staging, or an arena on its device, or on another that it reaches. */
static void copy(const struct gpu_command *command, const struct memory *memory, CUstream stream)
{
	const struct device *device = memory->device, *owner;
	CUdeviceptr at = memory->base + command->offset, arena;
	bool is_down = command->op == GPU_OP_DOWN;
	const struct cuda *cuda = worker.cuda;

	if (command->kind == GPU_AT_HOST && is_down) {
		worker_check(cuda->cuMemcpyDtoHAsync(staging_at(command), at, command->len, stream),
			     "cuMemcpyDtoHAsync", device);
		return;
	}
	if (command->kind == GPU_AT_HOST) {
		worker_check(cuda->cuMemcpyHtoDAsync(at, staging_at(command), command->len, stream),
			     "cuMemcpyHtoDAsync", device);
		return;
	}
	arena = arena_at(command->slot, command->staging, command->len, &owner);
	if (!is_down && flushed != owner) {
		flush(owner, device, owner->has_others);
		flushed = owner;
	}
	worker_check(cuda->cuMemcpyDtoDAsync(is_down ? arena : at, is_down ? at : arena,
					     command->len, stream),
		     "cuMemcpyDtoDAsync", device);
}

static void spill(const struct gpu_command *command, const struct device *device, CUstream stream)
{
	const struct device *owner;
	CUdeviceptr from = arena_at(command->slot, command->offset, command->len, &owner);

	flush(owner, device, false);
	worker_check(
		worker.cuda->cuMemcpyDtoHAsync(staging_at(command), from, command->len, stream),
		"cuMemcpyDtoHAsync", device);
}

void worker_stream_run(const struct gpu_command *command)
{
	const struct cuda *cuda = worker.cuda;
	struct session *session;
	struct memory memory;
	struct waiter *waiter;
	CUdeviceptr flag;

	if (command->op == GPU_OP_WATCH) {
		watch(command);
		return;
	}
	if (command->op == GPU_OP_MEMBER) {
		struct memory output = memory_at(command->session);

		memory = memory_at(command->memory);
		worker_member(&memory, &output, command);
		return;
	}
	if (command->op == GPU_OP_COLLECTIVE) {
		worker_collective(command);
		return;
	}
	/* Of what spills it says the device. */
	memory = command->op == GPU_OP_SPILL ? memory_at(command->memory) : memory_of(command);
	if (command->stream >= GPU_STREAMS)
		worker_fatal(-EPROTO, "the daemon names a stream that there is not");
	waiter = &memory.device->waiters[command->stream];
	worker_enter(memory.device);
	switch (command->op) {
	case GPU_OP_DOWN:
		FAILPOINT("gpu-down");
		copy(command, &memory, waiter->stream);
		break;
	case GPU_OP_UP:
		FAILPOINT("gpu-up");
		copy(command, &memory, waiter->stream);
		break;
	case GPU_OP_SPILL:
		FAILPOINT("gpu-spill");
		spill(command, memory.device, waiter->stream);
		break;
	case GPU_OP_TELL:
		FAILPOINT("gpu-tell");
		flag = flag_at(command, offsetof(struct shm_flag, done), &session);
		worker_check(cuda->cuStreamWriteValue32(waiter->stream, flag,
							(uint32_t)command->ticket,
							CU_STREAM_WRITE_VALUE_DEFAULT),
			     "cuStreamWriteValue32", memory.device);
		break;
	case GPU_OP_MARK:
		flushed = NULL;
		mark(waiter, command->ticket);
		break;
	default:
		worker_fatal(-EPROTO, "the daemon asks for what there is not");
	}
}
