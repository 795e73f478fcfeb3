/*
 * The set-up thread of a worker, which makes the calls that may wait for a device: contexts,
 * imports and their end, sessions, staging, arenas and plans, one after the other. Main posts
 * the commands here.
 */
#include "base/failpoint.h"
#include "base/loop/porter.h"
#include "gpu/worker/worker.h"
#include <stdio.h>
#include <sys/mman.h>

/* Imports that may fail on a device before one succeeds: each makes a context, which other processes feel. */
#define FAILED_MAX 64u

struct job {
	struct job *next;
	struct gpu_command command;
	int fd;
};

/* -- Devices and host memory ------------------------------------------------------------------- */

/* What devices are to read and write by themselves. A context has to be current. */
static void register_host(void *data, size_t len, const char *what)
{
	CUresult r = worker.cuda->cuMemHostRegister(
		data, len, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);

	if (r != CUDA_SUCCESS)
		worker_fatal(
			-EIO,
			"cuMemHostRegister of %zu bytes of %s: %s; LimitMEMLOCK may be too low",
			len, what, cuda_error_name(worker.cuda, r));
}

static void register_all(const struct device *device)
{
	if (!worker.registered)
		register_host(worker.staging, worker.staging_len, "staging (gpu_staging)");
	worker.registered = true;
	for (uint32_t i = 0; i < worker.n_sessions; i++) {
		struct session *session = worker.sessions[i];
		CUdeviceptr flags;

		if (session->flags)
			continue;
		register_host(shm_flags(session->shm), SHM_FLAG_LEN, "a trainer's flags");
		worker_check(
			worker.cuda->cuMemHostGetDevicePointer(&flags, shm_flags(session->shm), 0),
			"cuMemHostGetDevicePointer", device);
		(void)pthread_mutex_lock(&worker.lock);
		session->flags = flags;
		(void)pthread_mutex_unlock(&worker.lock);
	}
}

static void open_device(struct device *device)
{
	CUcontext context;

	if (!device->context) {
		worker_check(worker.cuda->cuDevicePrimaryCtxRetain(&context, device->number),
			     "cuDevicePrimaryCtxRetain", device);
		device->context = context;
	}
	worker_enter(device);
}

/* A context takes some hundred MiB of its device: an import that fails leaves none. */
static void close_device(struct device *device)
{
	worker_check(worker.cuda->cuCtxSetCurrent(NULL), "cuCtxSetCurrent", device);
	worker_enter(NULL);
	worker_check(worker.cuda->cuDevicePrimaryCtxRelease(device->number),
		     "cuDevicePrimaryCtxRelease", device);
	device->context = NULL;
}

static void use_device(struct device *device)
{
	if (!device->is_used)
		worker_streams_open(device);
	device->is_used = true;
	register_all(device);
}

/* -- Imports ----------------------------------------------------------------------------------- */

static CUresult open_legacy(const struct gpu_command *command, CUdeviceptr *ret_base)
{
	CUipcMemHandle handle;

	memcpy(handle.reserved, command->handle, sizeof(handle.reserved));
	return worker.cuda->cuIpcOpenMemHandle(ret_base, handle,
					       CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static CUresult map_fd(const struct gpu_command *command, const struct device *device,
		       CUmemGenericAllocationHandle handle, CUdeviceptr *ret_base)
{
	CUmemAccessDesc access = {
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device->number },
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	const struct cuda *cuda = worker.cuda;
	size_t len = (size_t)command->len;
	CUdeviceptr base;
	CUresult r;

	r = cuda->cuMemAddressReserve(&base, len, 0, 0, 0);
	if (r != CUDA_SUCCESS)
		return r;
	r = cuda->cuMemMap(base, len, 0, handle, 0);
	if (r == CUDA_SUCCESS) {
		r = cuda->cuMemSetAccess(base, len, &access, 1);
		if (r == CUDA_SUCCESS) {
			*ret_base = base;
			return r;
		}
		(void)cuda->cuMemUnmap(base, len);
	}
	(void)cuda->cuMemAddressFree(base, len);
	return r;
}

static CUresult open_fd(const struct gpu_command *command, const struct device *device, int fd,
			CUdeviceptr *ret_base)
{
	CUmemGenericAllocationHandle handle;
	CUresult r;

	r = worker.cuda->cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
							CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	if (r != CUDA_SUCCESS)
		return r;
	r = map_fd(command, device, handle, ret_base);
	/* The mapping holds it. */
	(void)worker.cuda->cuMemRelease(handle);
	return r;
}

static void close_memory(const struct memory *memory)
{
	const struct cuda *cuda = worker.cuda;

	worker_enter(memory->device);
	if (memory->kind == MEMORY_CUDA_IPC) {
		worker_check(cuda->cuIpcCloseMemHandle(memory->base), "cuIpcCloseMemHandle",
			     memory->device);
		return;
	}
	worker_check(cuda->cuMemUnmap(memory->base, memory->len), "cuMemUnmap", memory->device);
	worker_check(cuda->cuMemAddressFree(memory->base, memory->len), "cuMemAddressFree",
		     memory->device);
}

/*
 * A trainer may say that an allocation is larger than it is. Only what the driver knows of it
 * counts, if it does.
 */
static bool is_too_short(const struct memory *memory, uint64_t *ret_len)
{
	CUdeviceptr base;
	size_t len;

	if (memory->kind != MEMORY_CUDA_IPC ||
	    worker.cuda->cuMemGetAddressRange(&base, &len, memory->base) != CUDA_SUCCESS)
		return false;
	*ret_len = base + len - memory->base;
	return *ret_len < memory->len;
}

/* (worker.lock) */
static struct memory *memory_at(uint32_t number)
{
	if (number >= worker.n_memories) {
		size_t n = MAX((size_t)number + 1, 2 * worker.n_memories);
		struct memory *grown = reallocarray(worker.memories, n, sizeof(*grown));

		if (!grown) {
			(void)pthread_mutex_unlock(&worker.lock);
			worker_fatal(-ENOMEM, "out of memory");
		}
		memset(&grown[worker.n_memories], 0, (n - worker.n_memories) * sizeof(*grown));
		worker.memories = grown;
		worker.n_memories = n;
	}
	return &worker.memories[number];
}

static int open_memory(struct device *device, const struct gpu_command *command, int allocation,
		       char *text, size_t size, struct memory *ret_memory)
{
	bool legacy = command->kind == MEMORY_CUDA_IPC;
	struct memory memory = { .device = device, .len = command->len, .kind = command->kind };
	uint64_t len;
	CUresult r;

	r = legacy ? open_legacy(command, &memory.base)
		   : open_fd(command, device, allocation, &memory.base);
	if (r != CUDA_SUCCESS) {
		(void)snprintf(text, size, "%s on device %d (%s): %s%s",
			       legacy ? "cuIpcOpenMemHandle" : "import of a VMM allocation",
			       device->number, device->name, cuda_error_name(worker.cuda, r),
			       legacy ? "; legacy CUDA IPC needs the trainer's user, and its PID "
					"namespace"
				      : "");
		return -EINVAL;
	}
	if (is_too_short(&memory, &len)) {
		(void)snprintf(text, size,
			       "the allocation has %llu bytes, less than the %llu shared",
			       (unsigned long long)len, (unsigned long long)memory.len);
		close_memory(&memory);
		return -EINVAL;
	}
	*ret_memory = memory;
	return 0;
}

static int import(const struct gpu_command *command, int fd, char *text, size_t size,
		  struct memory *ret_memory)
{
	struct device *device = worker_device(command->device);
	_cleanup_(fd_closep) int allocation = -1;
	int r;

	if (!device) {
		(void)snprintf(
			text, size,
			"the daemon has no device with this UUID: is CUDA_VISIBLE_DEVICES set "
			"for it?");
		return -ENODEV;
	}
	if (device->n_failed == FAILED_MAX) {
		(void)snprintf(
			text, size,
			"%u imports of memory on device %d (%s) have failed, and this job tries "
			"no more",
			FAILED_MAX, device->number, device->name);
		return -EINVAL;
	}
	/* To open the descriptor, or to close it, may wait for its trainer: then only this job waits, and holds no new context. */
	if (command->kind != MEMORY_CUDA_IPC)
		allocation = porter_open_frame(fd);
	open_device(device);
	r = open_memory(device, command, allocation, text, size, ret_memory);
	if (r && !device->is_used) {
		device->n_failed++;
		close_device(device);
	} else {
		use_device(device);
	}
	return r;
}

static void run_open(const struct gpu_command *command, int fd)
{
	struct gpu_event event = { .kind = GPU_EVENT_OPENED, .number = command->memory };
	struct memory memory = { 0 };

	event.status = import(command, fd, event.text, sizeof(event.text), &memory);
	(void)pthread_mutex_lock(&worker.lock);
	*memory_at(command->memory) = memory;
	(void)pthread_mutex_unlock(&worker.lock);
	FAILPOINT("gpu-memory-opened");
	worker_say(&event);
}

static void run_close(const struct gpu_command *command)
{
	struct gpu_event event = { .kind = GPU_EVENT_CLOSED, .number = command->memory };
	struct memory memory;

	(void)pthread_mutex_lock(&worker.lock);
	memory = *memory_at(command->memory);
	*memory_at(command->memory) = (struct memory){ 0 };
	(void)pthread_mutex_unlock(&worker.lock);
	if (memory.device)
		close_memory(&memory);
	FAILPOINT("gpu-memory-closed");
	worker_say(&event);
}

/* -- Sessions and staging ---------------------------------------------------------------------- */

static void *map_shared(int fd, size_t len)
{
	void *data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (data == MAP_FAILED)
		worker_fatal(-ENOMEM, "cannot map %zu bytes of shared memory: %s", len,
			     strerror(errno));
	return data;
}

static void run_session(const struct gpu_command *command, int fd)
{
	struct session *session = calloc(1, sizeof(*session));

	if (!session)
		worker_fatal(-ENOMEM, "out of memory");
	session->shm = map_shared(fd, SHM_LEN);
	for (uint32_t i = 0; i < GPU_LANES; i++)
		session->lanes[i] = (struct lane){ .session = command->session, .number = i };
	(void)pthread_mutex_lock(&worker.lock);
	worker.sessions[worker.n_sessions++] = session;
	(void)pthread_mutex_unlock(&worker.lock);
}

/* -- The thread -------------------------------------------------------------------------------- */

static void run_arena(const struct gpu_command *command)
{
	struct device *device = worker_device(command->device);

	if (!device || !device->context)
		worker_fatal(-EPROTO, "the daemon names a device that it does not use");
	worker_enter(device);
	if (command->op == GPU_OP_ARENA)
		worker_arena_open(device, command);
	else
		worker_arena_drop(device);
}

static void run(const struct gpu_command *command, int fd)
{
	switch (command->op) {
	case GPU_OP_STAGING:
		worker.staging = map_shared(fd, command->len);
		worker.staging_len = command->len;
		break;
	case GPU_OP_SESSION:
		run_session(command, fd);
		break;
	case GPU_OP_OPEN:
		run_open(command, fd);
		break;
	case GPU_OP_CLOSE:
		run_close(command);
		break;
	case GPU_OP_ARENA:
	case GPU_OP_ARENA_DROP:
		run_arena(command);
		break;
	case GPU_OP_PLAN_DEVICE:
		worker_plan_device(command);
		break;
	case GPU_OP_PLAN:
		worker_plan(command);
		worker_enter(NULL);
		break;
	default:
		break;
	}
}

static void *setup_thread(void *unused)
{
	(void)unused;
	for (;;) {
		struct job *job;

		(void)pthread_mutex_lock(&worker.mail_lock);
		while (!worker.first)
			(void)pthread_cond_wait(&worker.mail_more, &worker.mail_lock);
		job = worker.first;
		worker.first = job->next;
		(void)pthread_mutex_unlock(&worker.mail_lock);
		run(&job->command, job->fd);
		(void)fd_close(job->fd);
		free(job);
	}
	return NULL;
}

void worker_setup_start(void)
{
	if (pthread_create(&worker.setup, NULL, setup_thread, NULL))
		worker_fatal(-EAGAIN, "no thread can be started");
}

void worker_setup_post(const struct gpu_command *command, int fd)
{
	struct job *job = malloc(sizeof(*job));

	if (!job)
		worker_fatal(-ENOMEM, "out of memory");
	*job = (struct job){ .command = *command, .fd = fd };
	(void)pthread_mutex_lock(&worker.mail_lock);
	if (worker.first)
		worker.last->next = job;
	else
		worker.first = job;
	worker.last = job;
	(void)pthread_cond_signal(&worker.mail_more);
	(void)pthread_mutex_unlock(&worker.mail_lock);
}
