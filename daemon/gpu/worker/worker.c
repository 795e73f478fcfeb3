/*
 * The main thread of a GPU worker: starts the others, reads commands and passes them to set-up
 * or to streams. Also how any thread of a worker sends events, reports an error, and what a
 * worker does when the daemon is gone. main.c starts the program here.
 */
#include "gpu/worker/worker.h"

#include "base/clock.h"
#include "base/failpoint.h"
#include "gpu/nccl_abi.h"
#include "proto/frame.h"
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>

/* A thread that is to do more soon looks for it for so long. */
#define LOOK_NS (50 * NSEC_PER_USEC)

struct worker worker = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.marks_lock = PTHREAD_MUTEX_INITIALIZER,
	.marks_more = PTHREAD_COND_INITIALIZER,
	.mail_lock = PTHREAD_MUTEX_INITIALIZER,
	.mail_more = PTHREAD_COND_INITIALIZER,
};

/* -- What it says ------------------------------------------------------------------------------ */

void worker_say_with(const struct gpu_event *event, int fd)
{
	size_t len = offsetof(struct gpu_event, text) + strlen(event->text) + 1;

	/* That the daemon is gone is seen by who reads. */
	(void)frame_send(GPU_SOCKET_FD, event, len, &fd, fd >= 0);
}

void worker_say(const struct gpu_event *event)
{
	worker_say_with(event, -1);
}

void worker_say_done(const uint64_t *tickets, uint32_t n)
{
	struct gpu_event event = { .kind = GPU_EVENT_DONE, .number = n };

	memcpy(event.done, tickets, n * sizeof(tickets[0]));
	(void)frame_send(GPU_SOCKET_FD, &event,
			 offsetof(struct gpu_event, done) + n * sizeof(tickets[0]), NULL, 0);
}

/*
 * The daemon is gone, and nobody else can tell the streams that wait for it: what was submitted has
 * ended, and the library says so with the next call.
 */
static _Noreturn void release_all(void)
{
	(void)pthread_mutex_lock(&worker.lock);
	for (uint32_t i = 0; i < worker.n_sessions; i++) {
		void *shm = worker.sessions[i]->shm;

		for (uint32_t slot = 0; slot < SHM_SLOTS; slot++) {
			struct shm_slot *s = &shm_slots(shm)[slot];

			if (atomic_load(&s->state) == SHM_PENDING)
				atomic_store(&shm_flags(shm)[slot].done,
					     (uint32_t) * (volatile uint64_t *)&s->ticket);
		}
	}
	_exit(0);
}

/*
 * The daemon ends a worker that has failed, with SIGKILL, once it has read why. A worker that ended
 * by itself could leave words that nobody reads, as the daemon may die first: then the streams of
 * its trainers would wait for ever.
 */
static _Noreturn void await_end(void)
{
	struct pollfd daemon = { .fd = GPU_SOCKET_FD };

	while (poll(&daemon, 1, -1) < 0 && errno == EINTR)
		;
	release_all();
}

static _Noreturn void end(int status, bool if_alive, const char *format, va_list args)
{
	struct gpu_event event = {
		.kind = GPU_EVENT_FATAL,
		.status = status,
		.number = if_alive,
	};

	(void)vsnprintf(event.text, sizeof(event.text), format, args);
	worker_say(&event);
	FAILPOINT("gpu-fatal");
	await_end();
}

void worker_fatal(int status, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	end(status, false, format, args);
}

void worker_fatal_if_alive(int status, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	end(status, true, format, args);
}

/*
 * What sticks to a context: memory or another client's process is gone from under what was at work,
 * for one.
 */
static bool is_sticky(CUresult result)
{
	switch ((int)result) {
	case CUDA_ERROR_ECC_UNCORRECTABLE:
	case CUDA_ERROR_ILLEGAL_ADDRESS:
	case CUDA_ERROR_LAUNCH_FAILED:
	case CUDA_ERROR_CONTEXT_IS_DESTROYED:
	case CUDA_ERROR_MPS_CLIENT_TERMINATED:
	case CUDA_ERROR_UNKNOWN:
		return true;
	default:
		return false;
	}
}

void worker_check(CUresult result, const char *call, const struct device *device)
{
	if (likely(result == CUDA_SUCCESS))
		return;
	if (is_sticky(result))
		worker_fatal_if_alive(-EIO, "%s on device %d (%s): %s", call, device->number,
				      device->name, cuda_error_name(worker.cuda, result));
	worker_fatal(-EIO, "%s on device %d (%s): %s", call, device->number, device->name,
		     cuda_error_name(worker.cuda, result));
}

void worker_enter(const struct device *device)
{
	static _Thread_local const struct device *current;

	if (!device || current == device) {
		current = device;
		return;
	}
	worker_check(worker.cuda->cuCtxSetCurrent(device->context), "cuCtxSetCurrent", device);
	current = device;
}

void worker_look(struct allowance *allowance, bool (*is_there)(void *context), void *context)
{
	uint64_t began_ns = clock_now_ns(), now_ns = began_ns;
	bool found = false;

	if (!allowance_remains(allowance, (int64_t)began_ns))
		return;
	while (!found && now_ns < began_ns + LOOK_NS) {
		found = is_there(context);
		now_ns = clock_now_ns();
	}
	allowance_settle(allowance, (int64_t)now_ns, found, (int64_t)(now_ns - began_ns), 0);
}

struct device *worker_device(const uint8_t uuid[DEVICE_UUID_LEN])
{
	for (int i = 0; i < worker.n_devices; i++)
		if (!memcmp(worker.devices[i].uuid.bytes, uuid, DEVICE_UUID_LEN))
			return &worker.devices[i];
	return NULL;
}

/* -- Beginning and end ------------------------------------------------------------------------- */

static int look_at_device(int ordinal, char *text)
{
	struct device *device = &worker.devices[ordinal];
	const struct cuda *cuda = worker.cuda;
	const char *call = "cuDeviceGet";
	CUresult r;

	r = cuda->cuDeviceGet(&device->number, ordinal);
	if (r == CUDA_SUCCESS) {
		call = "cuDeviceGetUuid";
		r = cuda->cuDeviceGetUuid(&device->uuid, device->number);
	}
	if (r == CUDA_SUCCESS) {
		call = "cuDeviceGetName";
		r = cuda->cuDeviceGetName(device->name, sizeof(device->name), device->number);
	}
	if (r == CUDA_SUCCESS)
		return 0;
	(void)snprintf(text, ERROR_TEXT_MAX, "device %d cannot be looked at: %s: %s", ordinal, call,
		       cuda_error_name(cuda, r));
	return -ENODEV;
}

/* What there is, in one line. Returns 0, or why nothing can be done here. */
static int look_around(char *text)
{
	const char *reason = NULL;
	const char *call = "cuInit";
	const struct nccl *nccl;
	int version = 0, r;
	CUresult result;

	r = cuda_load(&worker.cuda, &reason);
	if (r) {
		(void)snprintf(text, ERROR_TEXT_MAX, "%s", reason);
		return r;
	}
	result = worker.cuda->cuInit(0);
	if (result == CUDA_SUCCESS) {
		call = "cuDeviceGetCount";
		result = worker.cuda->cuDeviceGetCount(&worker.n_devices);
	}
	if (result == CUDA_SUCCESS && !worker.n_devices)
		result = CUDA_ERROR_NO_DEVICE;
	if (result != CUDA_SUCCESS) {
		(void)snprintf(text, ERROR_TEXT_MAX, "the driver does not start: %s: %s", call,
			       cuda_error_name(worker.cuda, result));
		return -ENODEV;
	}
	worker.n_devices = MIN(worker.n_devices, GPU_DEVICES_MAX);
	for (int i = 0; i < worker.n_devices; i++) {
		r = look_at_device(i, text);
		if (r)
			return r;
	}
	(void)worker.cuda->cuDriverGetVersion(&version);
	if (nccl_load(&nccl, &reason))
		(void)snprintf(text, ERROR_TEXT_MAX,
			       "%d GPUs (%s), CUDA %d.%d, reduced by the CPU: %s", worker.n_devices,
			       worker.devices[0].name, version / 1000, version % 1000 / 10, reason);
	else
		(void)snprintf(text, ERROR_TEXT_MAX, "%d GPUs (%s), CUDA %d.%d, NCCL",
			       worker.n_devices, worker.devices[0].name, version / 1000,
			       version % 1000 / 10);
	return 0;
}

static void handle(const struct gpu_command *command, int fd)
{
	switch (command->op) {
	case GPU_OP_STAGING:
	case GPU_OP_SESSION:
	case GPU_OP_OPEN:
	case GPU_OP_CLOSE:
	case GPU_OP_ARENA:
	case GPU_OP_ARENA_DROP:
	case GPU_OP_PLAN_DEVICE:
	case GPU_OP_PLAN:
		worker_setup_post(command, fd);
		break;
	case GPU_OP_END:
		/*
		 * Nothing is under way; the driver takes back what a process leaves, without
		 * waiting for streams that wait.
		 */
		_exit(0);
	default:
		(void)fd_close(fd);
		worker_stream_run(command);
	}
}

static bool has_packet(void *context)
{
	(void)context;
	return recv(GPU_SOCKET_FD, NULL, 0, MSG_PEEK | MSG_DONTWAIT | MSG_TRUNC) >= 0 ||
	       errno != EAGAIN;
}

static void serve(void)
{
	static char packet[FRAME_MAX] __attribute__((__aligned__(8)));
	const struct gpu_command *commands = (const void *)packet;
	struct allowance allowance = { 0 };
	int fds[FRAME_FDS], r;

	for (;;) {
		size_t len = 0, n_fds = 0;

		/* Behind what goes down something goes up. */
		worker_look(&allowance, has_packet, NULL);
		r = frame_receive(GPU_SOCKET_FD, packet, &len, fds, &n_fds);
		if (r == FRAME_E_EOF || r == -ECONNRESET)
			release_all();
		if (r || len % sizeof(*commands) || n_fds > 1)
			worker_fatal(-EPROTO, "what the daemon says cannot be read");
		for (size_t i = 0; i < len / sizeof(*commands); i++)
			handle(&commands[i], n_fds && !i ? fds[0] : -1);
	}
}

int gpu_worker_main(void)
{
	struct gpu_event event = { .kind = GPU_EVENT_READY };

	(void)prctl(PR_SET_NAME, "bps-gpu-worker");
	/*
	 * A stream that waits for a trainer must not share a hardware queue with one that copies.
	 */
	(void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
	/*
	 * One way to sum, so that the same layout gives the same bits; who knows better may say so.
	 */
	(void)setenv("NCCL_ALGO", "Ring", 0);
	(void)setenv("NCCL_PROTO", "Simple", 0);
	(void)setenv("NCCL_MIN_NCHANNELS", "8", 0);
	(void)setenv("NCCL_MAX_NCHANNELS", "8", 0);
	event.status = look_around(event.text);
	worker_say(&event);
	if (event.status)
		return 1;
	worker_setup_start();
	serve();
	return 0;
}
