/* `bps-daemon --gpu-worker` by itself, with the double as driver: what the daemon says wrongly ends it, with words. */
#include "cu.h"
#include "gpu/internal.h"
#include "proto/frame.h"
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define STAGING ((uint64_t)64 << 10)
#define LEN	((uint64_t)2 << 20)

static const struct cuda *cu;
static CUdeviceptr ptrs[2]; /* 0: none */

struct process {
	pid_t pid;
	int pidfd, socket;
};

static struct gpu_event hear(const struct process *process)
{
	struct pollfd pollfd = { .fd = process->socket, .events = POLLIN };
	struct gpu_event event;
	int fd;

	ASSERT_EQ(poll(&pollfd, 1, (int)test_scale_s(60) * 1000), 1);
	ASSERT_OK(gpu_event_receive(process->socket, &event, &fd));
	ASSERT_EQ(fd, -1);
	return event;
}

static void say(const struct process *process, const struct gpu_command *command, int fd)
{
	ASSERT_OK(frame_send(process->socket, command, sizeof(*command), &fd, fd >= 0));
}

static void pass_on(const struct process *process, enum gpu_op op, uint64_t len)
{
	int fd = memfd_create("test", MFD_CLOEXEC);

	ASSERT_TRUE(fd >= 0 && !ftruncate(fd, (off_t)len));
	say(process, &(struct gpu_command){ .op = op, .len = len }, fd);
	(void)fd_close(fd);
}

/* A worker that has staging and a session. */
static struct process process_start(void)
{
	struct process process;
	struct gpu_event event;

	ASSERT_OK(gpu_process_start(getenv("BPS_DAEMON"), &process.pid, &process.pidfd,
				    &process.socket));
	event = hear(&process);
	ASSERT_EQ(event.kind, GPU_EVENT_READY);
	ASSERT_OK(event.status);
	pass_on(&process, GPU_OP_STAGING, STAGING);
	pass_on(&process, GPU_OP_SESSION, SHM_LEN);
	return process;
}

/* The worker says why, and waits for the daemon: its end, or that the daemon is gone. */
static void expect_end(struct process *process, int status, const char *words)
{
	struct gpu_event event = hear(process);
	siginfo_t info = { 0 };

	ASSERT_EQ(event.kind, GPU_EVENT_FATAL);
	ASSERT_EQ(event.status, status);
	ASSERT_EQ(event.number, 0);
	ASSERT_CONTAINS(event.text, words);
	(void)fd_close(process->socket);
	ASSERT_OK(waitid((idtype_t)P_PIDFD, (id_t)process->pidfd, &info, WEXITED));
	ASSERT_EQ(info.si_code, CLD_EXITED);
	ASSERT_EQ(info.si_status, 0);
	(void)fd_close(process->pidfd);
	for (size_t i = 0; i < ARRAY_SIZE(ptrs); i++) {
		if (ptrs[i])
			CU(cuMemFree(ptrs[i]));
		ptrs[i] = 0;
	}
}

/* Memory of this process's on a device, as OPEN says it. */
static struct gpu_command allocate(int ordinal, uint32_t number)
{
	struct gpu_command command = {
		.op = GPU_OP_OPEN,
		.memory = number,
		.kind = MEMORY_CUDA_IPC,
		.len = LEN,
	};
	CUipcMemHandle handle;
	const char *reason;
	CUcontext context;
	CUuuid uuid;

	if (!cu && cuda_load(&cu, &reason))
		test_fail(__FILE__, __LINE__, "%s", reason);
	CU(cuInit(0));
	CU(cuDevicePrimaryCtxRetain(&context, ordinal));
	CU(cuCtxSetCurrent(context));
	CU(cuMemAlloc(&ptrs[ordinal], LEN));
	CU(cuIpcGetMemHandle(&handle, ptrs[ordinal]));
	CU(cuDeviceGetUuid(&uuid, ordinal));
	memcpy(command.device, uuid.bytes, sizeof(command.device));
	memcpy(command.handle, handle.reserved, sizeof(command.handle));
	return command;
}

/* Memories 0 and 1 on devices 0 and 1. */
static void open_memories(const struct process *process)
{
	for (int i = 0; i < 2; i++) {
		struct gpu_command command = allocate(i, (uint32_t)i);
		struct gpu_event event;

		say(process, &command, -1);
		event = hear(process);
		ASSERT_EQ(event.kind, GPU_EVENT_OPENED);
		if (event.status)
			test_fail(__FILE__, __LINE__, "%s", event.text);
	}
}

static void plan(const struct process *process, uint32_t n)
{
	struct gpu_event event;

	for (uint32_t i = 0; i < n; i++) {
		struct gpu_command device = { .op = GPU_OP_PLAN_DEVICE };
		CUuuid uuid;

		CU(cuDeviceGetUuid(&uuid, (int)i));
		memcpy(device.device, uuid.bytes, sizeof(device.device));
		say(process, &device, -1);
	}
	say(process, &(struct gpu_command){ .op = GPU_OP_PLAN, .kind = GPU_REDUCE_NCCL }, -1);
	event = hear(process);
	ASSERT_EQ(event.kind, GPU_EVENT_PLANNED);
}

TEST(what_cannot_be_read)
{
	struct process process = process_start();

	ASSERT_OK(frame_send(process.socket, "what", 4, NULL, 0));
	expect_end(&process, -EPROTO, "what the daemon says cannot be read");
}

TEST(what_there_is_not)
{
	static const struct {
		struct gpu_command command;
		const char *words;
	} cases[] = {
		{ { .op = GPU_OP_DOWN, .len = 1 }, "memory that is not open" },
		{ { .op = GPU_OP_DOWN, .memory = 7, .len = 1 }, "memory that is not open" },
		{ { .op = GPU_OP_WATCH, .session = 1 }, "flags that it did not hand over" },
		{ { .op = GPU_OP_COLLECTIVE, .ticket = DTYPE_FLOAT32 },
		  "a group that there is not" },
		{ { .op = GPU_OP_PLAN_DEVICE }, "plans with a device that it does not use" },
		{ { .op = GPU_OP_MEMBER }, "memory that is not open" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct process process = process_start();

		say(&process, &cases[i].command, -1);
		expect_end(&process, -EPROTO, cases[i].words);
	}
}

TEST(what_is_beyond_memory)
{
	static const struct {
		struct gpu_command command;
		const char *words;
	} cases[] = {
		{ { .op = GPU_OP_DOWN, .len = LEN + 1 }, "beyond the end of memory" },
		{ { .op = GPU_OP_UP, .offset = LEN, .len = 1 }, "beyond the end of memory" },
		{ { .op = GPU_OP_UP, .offset = UINT64_MAX, .len = 2 }, "beyond the end of memory" },
		{ { .op = GPU_OP_DOWN, .len = STAGING + 1 }, "beyond the end of staging" },
		{ { .op = GPU_OP_UP, .staging = STAGING, .len = 1 }, "beyond the end of staging" },
		{ { .op = GPU_OP_DOWN, .kind = GPU_AT_DEVICE, .len = 1 },
		  "beyond the end of an arena" },
		{ { .op = GPU_OP_UP, .kind = GPU_AT_DEVICE, .slot = GPU_DEVICES_MAX, .len = 1 },
		  "beyond the end of an arena" },
		{ { .op = GPU_OP_DOWN, .stream = GPU_STREAMS, .len = 1 },
		  "a stream that there is not" },
		{ { .op = 99 }, "asks for what there is not" },
		{ { .op = GPU_OP_TELL, .session = 3 }, "flags that it did not hand over" },
		{ { .op = GPU_OP_TELL, .slot = SHM_SLOTS }, "flags that it did not hand over" },
		{ { .op = GPU_OP_WATCH, .device = { 1 } }, "a device that it does not use" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct process process = process_start();

		open_memories(&process);
		say(&process, &cases[i].command, -1);
		expect_end(&process, -EPROTO, cases[i].words);
	}
}

TEST(collectives_of_others)
{
	static const struct {
		struct gpu_command members[2], collective;
		uint32_t n_members;
		const char *words;
	} cases[] = {
		{ .collective = { .ticket = DTYPE_INT16 }, .words = "asks NCCL for type" },
		{ .collective = { .ticket = DTYPE_FLOAT32, .slot = 1 },
		  .words = "a group that there is not" },
		{ .collective = { .ticket = DTYPE_FLOAT32, .stream = GPU_STREAMS },
		  .words = "a group that there is not" },
		{ .collective = { .ticket = 255 }, .words = "a group that there is not" },
		{ .collective = { .ticket = DTYPE_FLOAT32 }, .words = "names 0 members of 2" },
		{ { { .memory = 0, .session = 0 }, { .memory = 1, .session = 1 } },
		  { .ticket = DTYPE_FLOAT32, .len = LEN },
		  2,
		  "bytes that a member does not have" },
		{ { { .memory = 0, .session = 0 }, { .memory = 1, .session = 1, .staging = LEN } },
		  { .ticket = DTYPE_FLOAT32, .len = 1 },
		  2,
		  "bytes that a member does not have" },
		/* On each other's devices. */
		{ { { .memory = 1, .session = 1 }, { .memory = 0, .session = 0 } },
		  { .ticket = DTYPE_FLOAT32, .len = 1 },
		  2,
		  "bytes that a member does not have" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct process process = process_start();
		struct gpu_command command;

		open_memories(&process);
		plan(&process, 2);
		for (uint32_t k = 0; k < cases[i].n_members; k++) {
			command = cases[i].members[k];
			command.op = GPU_OP_MEMBER;
			say(&process, &command, -1);
		}
		command = cases[i].collective;
		command.op = GPU_OP_COLLECTIVE;
		say(&process, &command, -1);
		expect_end(&process, -EPROTO, cases[i].words);
	}
}

TEST(more_members_than_devices)
{
	struct process process = process_start();

	open_memories(&process);
	for (uint32_t i = 0; i <= GPU_DEVICES_MAX; i++)
		say(&process, &(struct gpu_command){ .op = GPU_OP_MEMBER }, -1);
	expect_end(&process, -EPROTO, "names too many members");
}

TEST(shared_memory_that_is_none)
{
	struct process process = process_start();
	int fd = open("/dev/null", O_RDWR | O_CLOEXEC);

	say(&process, &(struct gpu_command){ .op = GPU_OP_SESSION }, fd);
	expect_end(&process, -ENOMEM, "of shared memory");
	(void)fd_close(fd);
}

/* How often the driver was called so in what was written to this file. */
static unsigned n_calls(int fd, const char *function)
{
	char text[16384], line[80];
	ssize_t len = pread(fd, text, sizeof(text) - 1, 0);
	unsigned n = 0;

	ASSERT_INT(len, >=, 0);
	ASSERT_INT(len, <, sizeof(text) - 1);
	text[len] = 0;
	(void)snprintf(line, sizeof(line), ": %s\n", function);
	for (const char *at = text; (at = strstr(at, line)); at++)
		n++;
	return n;
}

static struct process process_start_traced(int trace)
{
	struct process process;
	int kept = dup(2);

	ASSERT_INT(dup2(trace, 2), ==, 2);
	ASSERT_OK(setenv("FAKECUDA_TRACE", "1", 1));
	process = process_start();
	ASSERT_OK(unsetenv("FAKECUDA_TRACE"));
	ASSERT_INT(dup2(kept, 2), ==, 2);
	(void)fd_close(kept);
	return process;
}

static int import(const struct process *process, const struct gpu_command *command)
{
	struct gpu_event event;

	say(process, command, -1);
	event = hear(process);
	ASSERT_EQ(event.kind, GPU_EVENT_OPENED);
	ASSERT_EQ(event.number, command->memory);
	return event.status;
}

/* Whoever has no memory on a device has no context there for its asking. */
TEST(a_handle_that_is_none_leaves_no_context)
{
	struct gpu_command good = allocate(0, 1), none = good, too_long = good;
	int trace = memfd_create("trace", MFD_CLOEXEC);
	struct process process = process_start_traced(trace);

	memset(none.handle, 0xee, sizeof(none.handle));
	none.memory = 0;
	too_long.memory = 2;
	too_long.len = 2 * LEN;
	for (unsigned i = 1; i <= 3; i++) {
		ASSERT_EQ(import(&process, i < 3 ? &none : &too_long), -EINVAL);
		ASSERT_EQ(n_calls(trace, "cuDevicePrimaryCtxRetain"), i);
		ASSERT_EQ(n_calls(trace, "cuDevicePrimaryCtxRelease_v2"), i);
		ASSERT_EQ(n_calls(trace, "cuStreamCreateWithPriority"), 0);
		ASSERT_EQ(n_calls(trace, "cuMemHostRegister_v2"), 0);
	}
	/* Memory that is there is used as ever, and stays whatever else comes. */
	ASSERT_OK(import(&process, &good));
	ASSERT_EQ(import(&process, &none), -EINVAL);
	ASSERT_EQ(n_calls(trace, "cuDevicePrimaryCtxRetain"), 4);
	ASSERT_EQ(n_calls(trace, "cuDevicePrimaryCtxRelease_v2"), 3);
	say(&process, &(struct gpu_command){ .op = GPU_OP_UP, .memory = 1, .len = 4096 }, -1);
	say(&process, &(struct gpu_command){ .op = GPU_OP_MARK, .memory = 1, .ticket = 7 }, -1);
	ASSERT_EQ(hear(&process).kind, GPU_EVENT_DONE);
	say(&process, &(struct gpu_command){ .op = 99, .memory = 1 }, -1);
	expect_end(&process, -EPROTO, "asks for what there is not");
	(void)fd_close(trace);
}

/* Imports that fail make no contexts without end. */
TEST(after_many_failures_no_context_is_made)
{
	struct gpu_command good = allocate(0, 1), none = good;
	int trace = memfd_create("trace", MFD_CLOEXEC);
	struct process process = process_start_traced(trace);
	struct gpu_event event;

	memset(none.handle, 0xee, sizeof(none.handle));
	none.memory = 0;
	for (unsigned i = 0; i < 64; i++)
		ASSERT_EQ(import(&process, &none), -EINVAL);
	say(&process, &good, -1);
	event = hear(&process);
	ASSERT_EQ(event.status, -EINVAL);
	ASSERT_CONTAINS(event.text, "64 imports of memory on device 0");
	ASSERT_CONTAINS(event.text, "have failed, and this job tries no more");
	ASSERT_EQ(n_calls(trace, "cuDevicePrimaryCtxRetain"), 64);
	say(&process, &(struct gpu_command){ .op = 99 }, -1);
	expect_end(&process, -EPROTO, "memory that is not open");
	(void)fd_close(trace);
}

TEST(a_context_that_cannot_be_released)
{
	struct gpu_command none = allocate(0, 0);
	struct process process;

	memset(none.handle, 0xee, sizeof(none.handle));
	ASSERT_OK(setenv("FAKECUDA_FAIL", "cuDevicePrimaryCtxRelease:1:201", 1));
	process = process_start();
	ASSERT_OK(unsetenv("FAKECUDA_FAIL"));
	say(&process, &none, -1);
	expect_end(&process, -EIO, "cuDevicePrimaryCtxRelease");
}
