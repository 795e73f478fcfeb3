/* Order: values in host memory, streams, and which calls wait for them. */
#include "rules.h"

#include "daemon/gpu/nccl_abi.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#define LEN ((size_t)4 << 20)

/* Rounds of what must hold always: so many, or as many as a slow machine does in some seconds. */
#define FOR_ROUNDS(i, n)                                    \
	for (uint32_t i = 1, began_ = (uint32_t)time(NULL); \
	     i <= (n) && (i <= 3 || (uint32_t)time(NULL) - began_ < RULE_S / 12); i++)

static CUstream stream_new(void)
{
	CUstream stream;

	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	return stream;
}

static void run_address(void)
{
	CUdeviceptr device;
	uint32_t *flags;

	start(0);
	flags = flags_new(&device, NULL);
	seen("%s", device == (uintptr_t)flags ? "the same address" : "another address");
}

/* A wait that is in the stream before the value is written. */
static void run_host(void)
{
	CUdeviceptr device;
	uint32_t *flags;
	CUstream stream;

	start(0);
	flags = flags_new(&device, NULL);
	stream = stream_new();
	CU(cuStreamWaitValue32(stream, device, 5, CU_STREAM_WAIT_VALUE_GEQ));
	usleep(200000);
	CHECK(cu->cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
	flag_set(flags, 5);
	seen("%s", comes_to_end(stream) ? "waits, then goes on" : "stays");
}

static void run_cyclic(void)
{
	CUdeviceptr device;
	uint32_t *flags;
	CUstream stream;

	start(0);
	flags = flags_new(&device, NULL);
	stream = stream_new();
	flag_set(flags, UINT32_MAX - 1);
	CU(cuStreamWaitValue32(stream, device, 2, CU_STREAM_WAIT_VALUE_GEQ));
	usleep(200000);
	CHECK(cu->cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
	flag_set(flags, 3);
	seen("%s", comes_to_end(stream) ? "waits, then goes on" : "stays");
}

/* Its stream waits, answers, and waits again. */
static void other_process(int fd)
{
	struct note note;
	CUdeviceptr device;
	CUstream stream;

	start(0);
	(void)flags_map(hear(fd, &note), &device);
	stream = stream_new();
	for (uint32_t i = 1; i <= 100; i++) {
		CU(cuStreamWaitValue32(stream, device, i, CU_STREAM_WAIT_VALUE_GEQ));
		CU(cuStreamWriteValue32(stream, device + 64, i, 0));
	}
	tell(fd, &note, -1);
	(void)hear(fd, &note);
}

/* To and fro 100 times between streams of two processes, without a host in between. */
static void run_processes(void)
{
	struct note note = { .number = 0 };
	CUdeviceptr device;
	CUstream stream;
	int fd, memfd;

	(void)peer_new(other_process, &fd);
	start(0);
	(void)flags_new(&device, &memfd);
	tell(fd, &note, memfd);
	(void)hear(fd, &note); /* it waits */
	stream = stream_new();
	for (uint32_t i = 1; i <= 100; i++) {
		CU(cuStreamWriteValue32(stream, device, i, 0));
		CU(cuStreamWaitValue32(stream, device + 64, i, CU_STREAM_WAIT_VALUE_GEQ));
	}
	seen("%s", comes_to_end(stream) ? "100 times" : "stays");
}

/* Who sees the value sees what the stream has copied before. */
static void run_order(void)
{
	CUdeviceptr device, a;
	uint32_t *flags;
	CUstream stream;
	uint32_t *host;

	start(0);
	flags = flags_new(&device, NULL);
	stream = stream_new();
	host = pinned(LEN);
	CU(cuMemAlloc(&a, LEN));
	FOR_ROUNDS(i, 200)
	{
		CU(cuMemsetD32Async(a, i, LEN / 4, stream));
		CU(cuMemcpyDtoHAsync(host, a, LEN, stream));
		CU(cuStreamWriteValue32(stream, device, i, 0));
		while (flag_get(flags) != i)
			(void)sched_yield();
		CHECK(host[0] == i && host[LEN / 8] == i && host[LEN / 4 - 1] == i);
	}
	seen("always");
}

/* And what the host has written before the value, the stream copies after it. */
static void run_order_host(void)
{
	CUdeviceptr device, a;
	uint32_t *flags, *from, *to;
	CUstream stream;

	start(0);
	flags = flags_new(&device, NULL);
	stream = stream_new();
	from = pinned(LEN);
	to = pinned(LEN);
	CU(cuMemAlloc(&a, LEN));
	FOR_ROUNDS(i, 50)
	{
		CU(cuStreamWaitValue32(stream, device, i, CU_STREAM_WAIT_VALUE_GEQ));
		CU(cuMemcpyHtoDAsync(a, from, LEN, stream));
		CU(cuMemcpyDtoHAsync(to, a, LEN, stream));
		for (size_t j = 0; j < LEN / 4; j++)
			from[j] = i;
		flag_set(flags, i);
		CU(cuStreamSynchronize(stream));
		CHECK(to[0] == i && to[LEN / 8] == i && to[LEN / 4 - 1] == i);
	}
	seen("always");
}

/* -- Streams that wait, and the others ------------------------------------------------------------------------ */

static void run_waiting(void)
{
	CUstream waiting[16], copying;
	CUdeviceptr device, a;
	uint32_t *flags;
	void *host;
	bool goes_on;

	CHECK(!setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1));
	start(0);
	flags = flags_new(&device, NULL);
	host = pinned(LEN);
	CU(cuMemAlloc(&a, LEN));
	for (int i = 0; i < 16; i++) {
		waiting[i] = stream_new();
		CU(cuStreamWaitValue32(waiting[i], device, 1, CU_STREAM_WAIT_VALUE_GEQ));
	}
	copying = stream_new();
	CU(cuMemcpyHtoDAsync(a, host, LEN, copying));
	CU(cuMemcpyDtoHAsync(host, a, LEN, copying));
	goes_on = comes_to_end(copying);
	flag_set(flags, 1);
	for (int i = 0; i < 16; i++)
		goes_on = goes_on && comes_to_end(waiting[i]);
	seen("%s", goes_on ? "goes on" : "stays");
}

static void waits_for_ever(int fd)
{
	struct note note = { .number = 0 };
	CUdeviceptr device;
	CUstream stream;

	start(0);
	(void)flags_new(&device, NULL);
	stream = stream_new();
	CU(cuStreamWaitValue32(stream, device, 1, CU_STREAM_WAIT_VALUE_GEQ));
	tell(fd, &note, -1);
	(void)hear(fd, &note);
}

/* A process that dies while its stream waits does not take the device with it. */
static void run_killed(void)
{
	struct note note;
	CUdeviceptr a;
	pid_t pid;
	int fd;

	pid = peer_new(waits_for_ever, &fd);
	start(0);
	(void)hear(fd, &note);
	peer_kill(pid);
	a = pattern_new(LEN, 1);
	seen("%s", pattern_is(a, LEN, 1) ? "go on" : "wrong bytes");
}

static void run_other_waits(void)
{
	struct note note;
	CUdeviceptr a;
	int fd;

	(void)peer_new(waits_for_ever, &fd);
	start(0);
	(void)hear(fd, &note);
	a = pattern_new(LEN, 1);
	seen("%s", pattern_is(a, LEN, 1) ? "go on" : "wrong bytes");
}

/* What a call does while a stream of its context waits for a value. */
struct attempt {
	CUcontext context;
	void (*call)(struct attempt *attempt);
	CUdeviceptr a;
	void *host;
	_Atomic bool done;
};

static void *attempt_thread(void *arg)
{
	struct attempt *attempt = arg;

	CU(cuCtxSetCurrent(attempt->context));
	attempt->call(attempt);
	attempt->done = true;
	return NULL;
}

/* One that is assumed to wait gets less time to show that it does not. */
static void see_while_waiting(void (*call)(struct attempt *), bool assumed_to_wait)
{
	struct attempt attempt = { .call = call };
	CUdeviceptr device;
	pthread_t thread;
	CUstream stream;

	attempt.context = start(0);
	(void)flags_new(&device, NULL);
	stream = stream_new();
	CU(cuMemAlloc(&attempt.a, LEN));
	CHECK(!posix_memalign(&attempt.host, 4096, LEN));
	memset(attempt.host, 1, LEN);
	CU(cuStreamWaitValue32(stream, device, 1, CU_STREAM_WAIT_VALUE_GEQ));
	CHECK(!pthread_create(&thread, NULL, attempt_thread, &attempt));
	for (int i = 0; i < (assumed_to_wait ? 100 : RULE_S * 50) && !attempt.done; i++)
		usleep(10000);
	seen("%s", attempt.done ? "returns" : "waits");
}

#define WHILE_WAITING(name, assumed_to_wait, code)                 \
	static void call_##name(struct attempt *attempt)           \
	{                                                          \
		code;                                              \
	}                                                          \
	static void run_while_##name(void)                         \
	{                                                          \
		see_while_waiting(call_##name, (assumed_to_wait)); \
	}

WHILE_WAITING(free, true, CU(cuMemFree(attempt->a)))
WHILE_WAITING(alloc, false, CU(cuMemAlloc(&attempt->a, LEN)))
WHILE_WAITING(register, false, CU(cuMemHostRegister(attempt->host, LEN, 0)))
WHILE_WAITING(unregister, true, {
	CU(cuMemHostRegister(attempt->host, LEN, 0));
	CU(cuMemHostUnregister(attempt->host));
})
WHILE_WAITING(host_alloc, false, CU(cuMemHostAlloc(&attempt->host, LEN, 0)))
WHILE_WAITING(stream, false, (void)stream_new())
WHILE_WAITING(event, false, {
	CUevent event;
	CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	CU(cuEventDestroy(event));
})
WHILE_WAITING(copy, false, {
	CUstream stream = stream_new();
	CU(cuMemsetD8Async(attempt->a, 1, LEN, stream));
	CU(cuStreamSynchronize(stream));
	CU(cuStreamDestroy(stream));
})
static void map_and_unmap(void)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
	};
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle allocation;
	CUdeviceptr at;

	CU(cuMemCreate(&allocation, LEN, &prop, 0));
	CU(cuMemAddressReserve(&at, LEN, 0, 0, 0));
	CU(cuMemMap(at, LEN, 0, allocation, 0));
	CU(cuMemSetAccess(at, LEN, &access, 1));
	CU(cuMemRelease(allocation));
	CU(cuMemUnmap(at, LEN));
	CU(cuMemAddressFree(at, LEN));
}
WHILE_WAITING(map, false, map_and_unmap())
/* Which may free memory while it begins. */
WHILE_WAITING(nccl, true, {
	const struct nccl *nccl;
	const char *reason;
	ncclComm_t comm;
	CHECK(!setenv("NCCL_SOCKET_IFNAME", "lo", 0));
	if (nccl_load(&nccl, &reason))
		seen("%s", reason);
	CHECK(!nccl->ncclCommInitAll(&comm, 1, NULL));
})

/* Memory of another process. */
static CUipcMemHandle handle;
static CUdeviceptr opened;

static void exports(int fd)
{
	struct note note = { .number = 0 };
	CUdeviceptr a;

	start(0);
	CU(cuMemAlloc(&a, LEN));
	CU(cuIpcGetMemHandle(&note.handle, a));
	tell(fd, &note, -1);
	(void)hear(fd, &note);
}

static void open_handle(struct attempt *attempt)
{
	(void)attempt;
	CU(cuIpcOpenMemHandle(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}

static void close_handle(struct attempt *attempt)
{
	(void)attempt;
	CU(cuIpcCloseMemHandle(opened));
}

static void run_while_open(void)
{
	struct note note;
	int fd;

	(void)peer_new(exports, &fd);
	(void)hear(fd, &note);
	handle = note.handle;
	see_while_waiting(open_handle, false);
}

static void run_while_close(void)
{
	struct note note;
	int fd;

	(void)peer_new(exports, &fd);
	(void)hear(fd, &note);
	handle = note.handle;
	start(0);
	open_handle(NULL);
	see_while_waiting(close_handle, true);
}
WHILE_WAITING(release, true, CU(cuDevicePrimaryCtxRelease(0)))

static void run_default(void)
{
	CUstream blocking, other;
	CUdeviceptr device;
	uint32_t *flags;

	start(0);
	flags = flags_new(&device, NULL);
	CU(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
	other = stream_new();
	CU(cuStreamWaitValue32(NULL, device, 1, CU_STREAM_WAIT_VALUE_GEQ));
	CU(cuStreamWriteValue32(blocking, device + 4, 1, 0));
	CU(cuStreamWriteValue32(other, device + 8, 1, 0));
	CHECK(comes_to_end(other));
	usleep(200000);
	CHECK(flag_get(flags + 1) == 0);
	flag_set(flags, 1);
	CHECK(comes_to_end(blocking));
	seen("blocking streams wait");
}

static void run_unrecorded(void)
{
	CUstream stream;
	CUevent event;

	start(0);
	stream = stream_new();
	CU(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
	CU(cuStreamWaitEvent(stream, event, 0));
	seen("%s", comes_to_end(stream) ? "nothing" : "waits");
}

static _Atomic int in_host_function = -1;

static void host_function(void *arg)
{
	CUdeviceptr a;

	in_host_function = (int)cu->cuMemAlloc(&a, 4096);
}

static void run_host_function(void)
{
	start(0);
	CU(cuLaunchHostFunc(NULL, host_function, NULL));
	CU(cuStreamSynchronize(NULL));
	seen("%s", name_of((CUresult)in_host_function));
}

static void run_mode(void)
{
	int mode;

	start(0);
	CU(cuDeviceGetAttribute(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0));
	seen("%s", mode == 0 ? "default" : mode == 3 ? "exclusive process" : "prohibited");
}

const struct rule flag_rules[] = {
	{ "value-host", "a wait that came before the host wrote its value", "waits, then goes on",
	  true, 1, run_host },
	{ "value-cyclic", "a wait across the end of 32 bits", "waits, then goes on", true, 1,
	  run_cyclic },
	{ "value-processes", "values between streams of two processes", "100 times", true, 1,
	  run_processes },
	{ "value-order", "who sees a value sees the copies before it", "always", true, 1,
	  run_order },
	{ "value-order-host", "a stream sees what the host wrote before the value", "always", true,
	  1, run_order_host },
	{ "value-address", "the device's address of registered memory", "another address", false, 1,
	  run_address, "the same address" },
	{ "waiting-streams", "a copy while 16 streams of the process wait", "goes on", true, 1,
	  run_waiting },
	{ "waiting-other", "copies while another process's stream waits", "go on", true, 1,
	  run_other_waits },
	{ "waiting-killed", "copies after a process with a waiting stream was killed", "go on",
	  true, 1, run_killed },
	{ "while-copy", "a copy in another stream while a stream waits", "returns", true, 1,
	  run_while_copy },
	{ "while-stream", "cuStreamCreate() while a stream waits", "returns", true, 1,
	  run_while_stream },
	{ "while-event", "cuEventCreate() while a stream waits", "returns", true, 1,
	  run_while_event },
	{ "while-alloc", "cuMemAlloc() while a stream waits", "returns", false, 1,
	  run_while_alloc },
	{ "while-register", "cuMemHostRegister() while a stream waits", "returns", false, 1,
	  run_while_register },
	{ "while-unregister", "cuMemHostUnregister() while a stream waits", "waits", false, 1,
	  run_while_unregister },
	{ "while-host-alloc", "cuMemHostAlloc() while a stream waits", "returns", false, 1,
	  run_while_host_alloc },
	{ "while-open", "cuIpcOpenMemHandle() while a stream waits", "returns", false, 1,
	  run_while_open },
	{ "while-close", "cuIpcCloseMemHandle() while a stream waits", "waits", false, 1,
	  run_while_close },
	{ "while-map", "mapping and unmapping while a stream waits", "returns", false, 1,
	  run_while_map },
	{ "while-nccl", "ncclCommInitAll() while a stream waits", "waits", false, 1,
	  run_while_nccl },
	{ "while-free", "cuMemFree() while a stream waits", "waits", false, 1, run_while_free },
	{ "while-release", "cuDevicePrimaryCtxRelease() while a stream waits", "waits", false, 1,
	  run_while_release },
	{ "default-stream", "a wait in the default stream", "blocking streams wait", false, 1,
	  run_default },
	{ "unrecorded", "cuStreamWaitEvent() for an event never recorded", "nothing", false, 1,
	  run_unrecorded },
	{ "host-function", "a CUDA call in a host function", "CUDA_ERROR_NOT_PERMITTED", false, 1,
	  run_host_function },
	{ "mode", "the device's compute mode (without MPS)", "default", true, 1, run_mode },
	{ NULL, NULL, NULL, false, 0, NULL },
};
