/* The test double itself: that it does what the rules of CUDA say, and fails where a GPU would. */
#include "dmabuf.h"
#include "double.h"

#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define LEN ((size_t)1 << 20)

static uint32_t *flag_new(CUdeviceptr *ret_device)
{
	uint32_t *flag =
		mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	ASSERT_TRUE(flag != MAP_FAILED);
	CU(cuMemHostRegister(flag, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
	CU(cuMemHostGetDevicePointer(ret_device, flag, 0));
	return flag;
}

static void flag_set(uint32_t *flag, uint32_t value)
{
	__atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

static uint32_t flag_get(const uint32_t *flag)
{
	return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

static void pattern(unsigned char *p, size_t len, unsigned seed)
{
	for (size_t i = 0; i < len; i++)
		p[i] = (unsigned char)(i * 31 + seed);
}

TEST(copies_all_ways)
{
	unsigned char *from, *to, pageable[1000];
	CUdeviceptr a, b;
	CUstream stream;

	start(0);
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemAlloc(&b, LEN));
	from = pinned(LEN);
	to = pinned(LEN);
	pattern(from, LEN, 7);
	CU(cuMemcpyHtoDAsync(a, from, LEN, stream));
	CU(cuMemcpyDtoDAsync(b + 5, a, LEN - 5, stream));
	CU(cuMemcpyDtoHAsync(to, b + 5, LEN - 5, stream));
	CU(cuStreamSynchronize(stream));
	ASSERT_MEM(to, from, LEN - 5);
	/* By addresses alone. */
	CU(cuMemsetD8Async(b, 0x5a, LEN, stream));
	CU(cuMemcpyAsync((uintptr_t)to, b, LEN, stream));
	CU(cuMemcpyAsync(b, (uintptr_t)from, 1000, stream));
	CU(cuMemcpyAsync((uintptr_t)pageable, b, 1000, stream));
	/* Into pageable memory a copy is done when the call returns. */
	ASSERT_MEM(pageable, from, 1000);
	CU(cuStreamSynchronize(stream));
	ASSERT_EQ(to[0], 0x5a);
	ASSERT_EQ(to[LEN - 1], 0x5a);
	CU(cuMemsetD32Async(b, 0x01020304, 16, stream));
	CU(cuMemcpyDtoHAsync(to, b, 64, stream));
	CU(cuStreamSynchronize(stream));
	ASSERT_EQ(to[63], 1);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoDAsync(a, b + 1, LEN, stream));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoHAsync(to, (uintptr_t)pageable, 4, stream));
	CU(cuMemFree(a));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree(a));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree(b + 1));
	CU(cuMemFree(b));
	CU(cuMemFreeHost(from));
	CU(cuMemFreeHost(to));
	CU(cuStreamDestroy(stream));
	CU(cuDevicePrimaryCtxRelease(0));
}

/* What an RDMA device has written is read by nobody for whom it is not in order, until a flush that is for them. */
static void write_and_flush(CUresult of_owner)
{
	const CUflushGPUDirectRDMAWritesTarget current =
		CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
	const CUflushGPUDirectRDMAWritesScope
		to_owner = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
		to_all = CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES;
	CUcontext owner, other = start(1);
	CUdeviceptr a, own, far;
	fake_mark *marks;
	size_t n_marks;
	void *host;
	int fd;

	CU(cuMemAlloc(&far, LEN));
	owner = start(0);
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemAlloc(&own, LEN));
	host = pinned(LEN);
	CU(cuMemGetHandleForAddressRange(&fd, a, LEN, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
	marks = fake_marks_map(fd, &n_marks);
	ASSERT_TRUE(marks);
	CU(cuCtxSetCurrent(other));
	CU(cuCtxEnablePeerAccess(owner, 0));
	CU(cuMemcpyDtoDAsync(far, a, LEN, NULL));

	fake_marks_set(marks, 4096 + 4095, 2);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoDAsync(far, a, LEN, NULL));
	CU(cuMemcpyDtoDAsync(far, a, 4096, NULL));
	CU(cuMemcpyDtoDAsync(far, a + (CUdeviceptr)3 * 4096, 4096, NULL));
	/* Of a context that does not have it. */
	CU(cuFlushGPUDirectRDMAWrites(current, to_all));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoDAsync(far, a + 8192, 1, NULL));
	CU(cuCtxSetCurrent(owner));
	CU_IS(of_owner, cuMemcpyDtoDAsync(own, a, LEN, NULL));
	CU_IS(of_owner, cuMemcpyDtoHAsync(host, a, LEN, NULL));
	CU(cuFlushGPUDirectRDMAWrites(current, to_owner));
	CU(cuMemcpyDtoDAsync(own, a, LEN, NULL));
	CU(cuCtxSetCurrent(other));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoDAsync(far, a, LEN, NULL));
	CU(cuCtxSetCurrent(owner));
	CU(cuFlushGPUDirectRDMAWrites(current, to_all));
	CU(cuCtxSetCurrent(other));
	CU(cuMemcpyDtoDAsync(far, a, LEN, NULL));
	CU(cuCtxSynchronize());

	ASSERT_OK(munmap(marks, n_marks));
	ASSERT_OK(close(fd));
	CU(cuDevicePrimaryCtxRelease(0));
	CU(cuDevicePrimaryCtxRelease(1));
}

TEST(what_was_written_is_in_order_for_its_owner)
{
	write_and_flush(CUDA_SUCCESS);
}

TEST(what_was_written_is_in_order_for_nobody)
{
	ASSERT_OK(setenv("FAKECUDA_RDMA", "unordered", 1));
	write_and_flush(CUDA_ERROR_INVALID_VALUE);
}

/* In a child, since it is killed. */
static int signal_of_child(void (*run)(CUdeviceptr), CUdeviceptr ptr)
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		signal(SIGSEGV, SIG_DFL);
		run(ptr);
		_exit(0);
	}
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void touch(CUdeviceptr ptr)
{
	*(volatile char *)(uintptr_t)ptr = 1;
}

TEST(host_cannot_touch_device_memory)
{
	CUdeviceptr a, managed;

	start(0);
	CU(cuMemAlloc(&a, LEN));
	ASSERT_EQ(signal_of_child(touch, a), SIGSEGV);
	CU(cuMemAllocManaged(&managed, LEN, CU_MEM_ATTACH_GLOBAL));
	ASSERT_EQ(signal_of_child(touch, managed), 0);
	CU(cuMemFree(managed));
	CU(cuMemFree(a));
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(fork_is_the_end)
{
	int status;
	pid_t pid;

	start(0);
	pid = fork();
	if (!pid)
		_exit(cu->cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED &&
				      cu->cuInit(0) == CUDA_ERROR_NOT_INITIALIZED
			      ? 0
			      : 1);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_EQ(status, 0);
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(values_order_streams)
{
	CUdeviceptr flag_device, data;
	unsigned char *host;
	CUstream a, b;
	uint32_t *flag;

	start(0);
	flag = flag_new(&flag_device);
	ASSERT_TRUE(flag_device != (uintptr_t)flag);
	host = pinned(LEN);
	CU(cuMemAlloc(&data, LEN));
	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	/* Waits before the value is written: by the host, by another stream. */
	CU(cuStreamWaitValue32(a, flag_device, 1, CU_STREAM_WAIT_VALUE_GEQ));
	CU(cuMemsetD8Async(data, 1, LEN, a));
	CU(cuStreamWriteValue32(a, flag_device + 4, 9, 0));
	CU(cuStreamWaitValue32(b, flag_device + 4, 9, CU_STREAM_WAIT_VALUE_GEQ));
	CU(cuMemcpyDtoHAsync(host, data, LEN, b));
	CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
	CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
	ASSERT_EQ(flag_get(flag + 1), 0);
	flag_set(flag, 1);
	CU(cuStreamSynchronize(b));
	ASSERT_EQ(host[0], 1);
	ASSERT_EQ(host[LEN - 1], 1);
	CU(cuStreamSynchronize(a));
	CU(cuStreamQuery(a));
	/* Cyclic: what is just behind the end of the numbers is greater. */
	flag_set(flag, UINT32_MAX);
	CU(cuStreamWaitValue32(a, flag_device, UINT32_MAX - 1, CU_STREAM_WAIT_VALUE_GEQ));
	CU(cuStreamSynchronize(a));
	CU(cuStreamWaitValue32(a, flag_device, 3, CU_STREAM_WAIT_VALUE_GEQ));
	CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(a));
	flag_set(flag, 4);
	CU(cuStreamSynchronize(a));
	/* By the device's address only, aligned, and inside. */
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuStreamWaitValue32(a, (uintptr_t)flag, 1, 0));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32(a, flag_device + 2, 1, 0));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuStreamWriteValue32(a, flag_device + 4096, 1, 0));
	CU_IS(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(flag, 8, 0));
	CU(cuMemHostUnregister(flag));
	CU_IS(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(flag));
	munmap(flag, 4096);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(flag, 4096, 0));
	CU(cuStreamDestroy(a));
	CU(cuStreamDestroy(b));
	CU_IS(CUDA_ERROR_INVALID_HANDLE, cuStreamQuery(b));
	CU(cuMemFreeHost(host));
	CU(cuMemFree(data));
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(tests_see_device_memory)
{
	unsigned char *(*fakecuda_host)(CUdeviceptr);
	CUdeviceptr a;
	void *library;

	start(0);
	library = dlopen("libcuda.so.1", RTLD_NOW);
	*(void **)&fakecuda_host = dlsym(library, "fakecuda_host");
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemsetD8Async(a, 9, LEN, NULL));
	CU(cuStreamSynchronize(NULL));
	ASSERT_EQ(fakecuda_host(a)[0], 9);
	ASSERT_EQ(fakecuda_host(a + LEN - 1)[0], 9);
	CU(cuMemFree(a));
	ASSERT_TRUE(!fakecuda_host(a));
	dlclose(library);
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(events)
{
	CUdeviceptr flag_device;
	CUstream a, b;
	uint32_t *flag;
	CUevent event;
	float ms;

	start(0);
	flag = flag_new(&flag_device);
	CU(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	CU(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
	CU(cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC));
	/* Not recorded: done, and waited for by nobody. */
	CU(cuEventQuery(event));
	CU(cuStreamWaitEvent(b, event, 0));
	CU(cuStreamSynchronize(b));
	CU(cuStreamWaitValue32(a, flag_device, 1, 0));
	CU(cuEventRecord(event, a));
	CU(cuStreamWaitEvent(b, event, 0));
	CU_IS(CUDA_ERROR_NOT_READY, cuEventQuery(event));
	CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
	/* The wait was for what was recorded then; a later record is nothing to it. */
	flag_set(flag, 1);
	CU(cuStreamSynchronize(b));
	CU(cuStreamWaitValue32(a, flag_device, 2, 0));
	CU(cuEventRecord(event, a));
	CU(cuStreamSynchronize(b));
	flag_set(flag, 2);
	CU(cuEventSynchronize(event));
	CU(cuEventElapsedTime(&ms, event, event));
	CU(cuEventDestroy(event));
	CU(cuStreamDestroy(a));
	CU(cuStreamDestroy(b));
	CU(cuMemHostUnregister(flag));
	munmap(flag, 4096);
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(default_stream_waits_for_others)
{
	CUdeviceptr flag_device;
	CUstream blocking, free_running;
	uint32_t *flag;

	start(0);
	flag = flag_new(&flag_device);
	CU(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
	CU(cuStreamCreate(&free_running, CU_STREAM_NON_BLOCKING));
	CU(cuStreamWaitValue32(blocking, flag_device, 1, 0));
	CU(cuStreamWriteValue32(NULL, flag_device + 4, 1, 0));
	CU(cuStreamWriteValue32(blocking, flag_device + 8, 1, 0));
	CU(cuStreamWriteValue32(free_running, flag_device + 12, 1, 0));
	CU(cuStreamSynchronize(free_running));
	ASSERT_EQ(flag_get(flag + 1), 0);
	ASSERT_EQ(flag_get(flag + 2), 0);
	ASSERT_EQ(flag_get(flag + 3), 1);
	flag_set(flag, 1);
	CU(cuStreamSynchronize(blocking));
	ASSERT_EQ(flag_get(flag + 1), 1);
	ASSERT_EQ(flag_get(flag + 2), 1);
	CU(cuStreamDestroy(blocking));
	CU(cuStreamDestroy(free_running));
	CU(cuMemHostUnregister(flag));
	munmap(flag, 4096);
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(attributes)
{
	CUpointer_attribute names[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
					CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
					CU_POINTER_ATTRIBUTE_BUFFER_ID };
	unsigned int type = 77, legacy;
	unsigned long long id = 77, id_before;
	int ordinal = 77, on_stack = 0;
	void *values[] = { &type, &ordinal, &id };
	CUdeviceptr a, pool, base;
	CUcontext context, of_pointer;
	size_t len;

	start(0);
	context = start(2);
	CU(cuMemAlloc(&a, 1000));
	CU(cuPointerGetAttributes(3, names, values, a + 999));
	ASSERT_EQ(type, CU_MEMORYTYPE_DEVICE);
	ASSERT_EQ(ordinal, 2);
	ASSERT_TRUE(id != 0);
	id_before = id;
	CU(cuPointerGetAttribute(&of_pointer, CU_POINTER_ATTRIBUTE_CONTEXT, a));
	ASSERT_TRUE(of_pointer == context);
	CU(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, a));
	ASSERT_EQ(legacy, 1);
	CU(cuMemGetAddressRange(&base, &len, a + 5));
	ASSERT_EQ(base, a);
	ASSERT_EQ(len, 1000);
	CU(cuPointerGetAttributes(3, names, values, (uintptr_t)&on_stack));
	ASSERT_EQ(type, 0);
	ASSERT_EQ(ordinal, -2);
	CU_IS(CUDA_ERROR_INVALID_VALUE,
	      cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)&on_stack));
	CU(cuMemFree(a));
	CU_IS(CUDA_ERROR_INVALID_VALUE,
	      cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a));
	CU(cuMemAlloc(&a, 1000));
	CU(cuPointerGetAttributes(3, names, values, a));
	ASSERT_TRUE(id != id_before);
	CU(cuMemFree(a));
	CU(cuMemAllocAsync(&pool, 1000, NULL));
	CU(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pool));
	ASSERT_EQ(legacy, 0);
	CU(cuMemFreeAsync(pool, NULL));
	CU(cuCtxSynchronize());
	CU_IS(CUDA_ERROR_INVALID_VALUE,
	      cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pool));
	CU(cuDevicePrimaryCtxRelease(2));
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(devices_are_named_by_uuid)
{
	CUuuid all[4], one;
	char name[32];
	int n, status;
	pid_t pid;

	start(0);
	CU(cuDeviceGetCount(&n));
	ASSERT_EQ(n, 4);
	for (int i = 0; i < 4; i++)
		CU(cuDeviceGetUuid(&all[i], i));
	CU(cuDeviceGetPCIBusId(name, sizeof(name), 3));
	ASSERT_STR(name, "FFFF:04:00.0");
	CU_IS(CUDA_ERROR_INVALID_DEVICE, cuDeviceGetUuid(&one, 4));
	CU(cuDevicePrimaryCtxRelease(0));
	/* Another process sees others, in another order. */
	pid = fork();
	if (!pid) {
		setenv("CUDA_VISIBLE_DEVICES", "3,1", 1);
		if (!freopen("/dev/null", "w", stdout))
			_exit(3);
		execl("/proc/self/exe", "test", "child_sees_two", NULL);
		_exit(2);
	}
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_EQ(status, 0);
}

/* Alone it sees what its environment says. */
TEST(child_sees_two)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	CUuuid uuid;
	int n;

	if (!visible || strcmp(visible, "3,1"))
		return;
	start(0);
	CU(cuDeviceGetCount(&n));
	ASSERT_EQ(n, 2);
	CU(cuDeviceGetUuid(&uuid, 0));
	ASSERT_EQ(uuid.bytes[15], 3);
	CU(cuDevicePrimaryCtxRelease(0));
}

/* -- Two processes -------------------------------------------------------------------------------------------- */

struct note {
	CUipcMemHandle handle;
	unsigned long long number;
};

static void tell(int fd, const struct note *note, int passed)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec iov = { (void *)note, sizeof(*note) };
	struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (passed >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
		control.header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						   .cmsg_level = SOL_SOCKET,
						   .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.header), &passed, sizeof(passed));
	}
	ASSERT_EQ(sendmsg(fd, &message, MSG_NOSIGNAL), (ssize_t)sizeof(*note));
}

static int hear(int fd, struct note *ret_note)
{
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec iov = { ret_note, sizeof(*ret_note) };
	struct msghdr message = { .msg_iov = &iov,
				  .msg_iovlen = 1,
				  .msg_control = &control,
				  .msg_controllen = sizeof(control) };
	int passed = -1;

	ASSERT_EQ(recvmsg(fd, &message, MSG_CMSG_CLOEXEC), (ssize_t)sizeof(*ret_note));
	if (message.msg_controllen >= CMSG_LEN(sizeof(int)))
		memcpy(&passed, CMSG_DATA(&control.header), sizeof(passed));
	return passed;
}

/* The other process; it has not touched CUDA before, as fork() forbids. */
static pid_t peer_new(void (*run)(int fd), int *ret_fd)
{
	int pair[2];
	pid_t pid;

	ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	pid = fork();
	ASSERT_TRUE(pid >= 0);
	if (!pid) {
		close(pair[0]);
		run(pair[1]);
		_exit(0);
	}
	close(pair[1]);
	*ret_fd = pair[0];
	return pid;
}

static void peer_end(pid_t pid, int fd)
{
	int status;

	close(fd);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_EQ(status, 0);
}

/* Exports a pattern, and frees it when it is told so. */
static void exporter(int fd)
{
	unsigned char *host;
	struct note note = { 0 };
	CUdeviceptr a;

	start(1);
	host = pinned(LEN);
	pattern(host, LEN, 3);
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemcpyHtoDAsync(a, host, LEN, NULL));
	CU(cuStreamSynchronize(NULL));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&note.handle, a + 256));
	CU(cuIpcGetMemHandle(&note.handle, a));
	CU_IS(CUDA_ERROR_INVALID_CONTEXT,
	      cuIpcOpenMemHandle(&a, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	tell(fd, &note, -1);
	(void)hear(fd, &note);
	if (note.number == 1) {
		/* What the other has written. */
		CU(cuMemcpyDtoHAsync(host, a, LEN, NULL));
		CU(cuStreamSynchronize(NULL));
		ASSERT_EQ(host[0], 0x77);
		ASSERT_EQ(host[1], (unsigned char)(31 + 3));
	}
	CU(cuMemFree(a));
	tell(fd, &note, -1);
	(void)hear(fd, &note);
}

TEST(memory_by_handle)
{
	unsigned char *host, expected[64];
	CUdeviceptr a, again;
	CUstream stream;
	struct note note;
	size_t len;
	pid_t pid;
	int fd, ordinal;

	pid = peer_new(exporter, &fd);
	start(0);
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	host = pinned(LEN);
	(void)hear(fd, &note);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle(&a, note.handle, 0));
	CU(cuIpcOpenMemHandle(&a, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	CU(cuIpcOpenMemHandle(&again, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	ASSERT_EQ(a, again);
	CU(cuMemGetAddressRange(NULL, &len, a));
	ASSERT_EQ(len, LEN);
	CU(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, a));
	ASSERT_EQ(ordinal, 1);
	CU(cuMemcpyDtoHAsync(host, a, LEN, stream));
	CU(cuStreamSynchronize(stream));
	pattern(expected, sizeof(expected), 3);
	ASSERT_MEM(host, expected, sizeof(expected));
	CU(cuMemsetD8Async(a, 0x77, 1, stream));
	CU(cuStreamSynchronize(stream));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemFree(a));
	CU(cuIpcCloseMemHandle(a));
	CU(cuMemcpyDtoHAsync(host, a, 8, stream));
	CU(cuStreamSynchronize(stream));
	CU(cuIpcCloseMemHandle(a));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoHAsync(host, a, 8, stream));
	note.number = 1;
	tell(fd, &note, -1);
	(void)hear(fd, &note);
	CU_IS(CUDA_ERROR_MAP_FAILED,
	      cuIpcOpenMemHandle(&a, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	tell(fd, &note, -1);
	CU(cuStreamDestroy(stream));
	CU(cuMemFreeHost(host));
	CU(cuDevicePrimaryCtxRelease(0));
	peer_end(pid, fd);
}

/* Freed by its owner while it was imported: the next use faults, and the context is lost. */
TEST(freed_too_early_is_a_sticky_error)
{
	unsigned char *host;
	struct note note;
	CUdeviceptr a;
	pid_t pid;
	int fd;

	pid = peer_new(exporter, &fd);
	start(0);
	host = pinned(LEN);
	(void)hear(fd, &note);
	CU(cuIpcOpenMemHandle(&a, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	note.number = 2;
	tell(fd, &note, -1);
	(void)hear(fd, &note);
	CU(cuMemcpyDtoHAsync(host, a, LEN, NULL));
	CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(NULL));
	CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc(&a, LEN));
	CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
	tell(fd, &note, -1);
	/* The device is well again with a new context. */
	CU(cuDevicePrimaryCtxRelease(0));
	start(0);
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemFree(a));
	CU(cuDevicePrimaryCtxRelease(0));
	peer_end(pid, fd);
}

static void exporter_dies(int fd)
{
	struct note note = { 0 };
	CUdeviceptr a;

	start(0);
	CU(cuMemAlloc(&a, LEN));
	CU(cuIpcGetMemHandle(&note.handle, a));
	tell(fd, &note, -1);
	(void)hear(fd, &note);
	kill(getpid(), SIGKILL);
}

TEST(dead_exporter)
{
	CUdeviceptr a, other;
	struct note note;
	int fd, status;
	pid_t pid;

	pid = peer_new(exporter_dies, &fd);
	start(0);
	(void)hear(fd, &note);
	CU(cuIpcOpenMemHandle(&a, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	CU(cuMemsetD8Async(a, 1, LEN, NULL));
	CU(cuStreamSynchronize(NULL));
	tell(fd, &note, -1);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	CU(cuDevicePrimaryCtxRetain(&(CUcontext){ 0 }, 1));
	CU(cuMemsetD8Async(a, 1, LEN, NULL));
	CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(NULL));
	start(1);
	CU_IS(CUDA_ERROR_INVALID_HANDLE,
	      cuIpcOpenMemHandle(&other, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	close(fd);
	CU(cuDevicePrimaryCtxRelease(1));
	CU(cuDevicePrimaryCtxRelease(1));
	CU(cuDevicePrimaryCtxRelease(0));
}

/* -- Memory by descriptor ------------------------------------------------------------------------------------- */

#define CHUNK ((size_t)2 << 20)

static CUmemAllocationProp prop_of(int device, CUmemAllocationHandleType types)
{
	return (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = types,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device },
	};
}

static void map_at(CUdeviceptr ptr, CUmemGenericAllocationHandle handle, int device)
{
	CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE,
						 .id = device },
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	CU(cuMemMap(ptr, CHUNK, 0, handle, 0));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8Async(ptr, 0, CHUNK, NULL));
	CU(cuMemSetAccess(ptr, CHUNK, &access, 1));
}

/* Two pieces in one range of addresses, as PyTorch's expandable segments have them. */
static void exporter_of_chunks(int fd)
{
	CUmemAllocationProp prop = prop_of(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	CUmemGenericAllocationHandle handles[2], retained;
	unsigned int legacy;
	struct note note = { 0 };
	CUipcMemHandle ipc;
	CUdeviceptr start_ptr;
	int shareable;

	start(0);
	CU(cuMemAddressReserve(&start_ptr, 4 * CHUNK, 0, 0, 0));
	for (int i = 0; i < 2; i++) {
		CU(cuMemCreate(&handles[i], CHUNK, &prop, 0));
		map_at(start_ptr + i * CHUNK, handles[i], 0);
	}
	CU(cuMemsetD8Async(start_ptr, 1, CHUNK + 100, NULL));
	CU(cuMemsetD8Async(start_ptr + CHUNK + 100, 2, CHUNK - 100, NULL));
	CU(cuStreamSynchronize(NULL));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemsetD8Async(start_ptr, 1, 2 * CHUNK + 1, NULL));
	CU(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
				 start_ptr));
	ASSERT_EQ(legacy, 0);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&ipc, start_ptr));
	CU(cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)(start_ptr + CHUNK + 5)));
	ASSERT_EQ(retained, handles[1]);
	CU(cuMemExportToShareableHandle(&shareable, retained,
					CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	CU(cuMemRelease(retained));
	tell(fd, &note, shareable);
	close(shareable);
	(void)hear(fd, &note);
	kill(getpid(), SIGKILL);
}

TEST(memory_by_descriptor)
{
	CUmemAllocationProp prop = prop_of(0, CU_MEM_HANDLE_TYPE_NONE);
	CUmemGenericAllocationHandle handle;
	unsigned char *host;
	CUdeviceptr ptr, legacy;
	struct note note;
	int fd, shareable, status;
	size_t granularity;
	pid_t pid;

	pid = peer_new(exporter_of_chunks, &fd);
	start(0);
	host = pinned(CHUNK);
	shareable = hear(fd, &note);
	ASSERT_INT(shareable, >=, 0);
	/* It outlives its maker. */
	tell(fd, &note, -1);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	CU(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)shareable,
					  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	close(shareable);
	CU(cuMemAddressReserve(&ptr, CHUNK, 0, 0, 0));
	map_at(ptr, handle, 0);
	CU(cuMemRelease(handle));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemRelease(handle));
	CU(cuMemcpyDtoHAsync(host, ptr, CHUNK, NULL));
	CU(cuStreamSynchronize(NULL));
	ASSERT_EQ(host[0], 1);
	ASSERT_EQ(host[99], 1);
	ASSERT_EQ(host[100], 2);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(ptr, CHUNK));
	CU(cuMemUnmap(ptr, CHUNK));
	CU(cuMemAddressFree(ptr, CHUNK));
	/* What was not made for it cannot be exported; what cuMemAlloc() made is nothing of this kind. */
	CU(cuMemGetAllocationGranularity(&granularity, &prop,
					 CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
	ASSERT_EQ(granularity, CHUNK);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&handle, CHUNK - 1, &prop, 0));
	CU(cuMemCreate(&handle, CHUNK, &prop, 0));
	CU_IS(CUDA_ERROR_INVALID_VALUE,
	      cuMemExportToShareableHandle(&shareable, handle,
					   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	CU(cuMemRelease(handle));
	CU(cuMemAlloc(&legacy, CHUNK));
	CU_IS(CUDA_ERROR_INVALID_VALUE,
	      cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)legacy));
	CU(cuMemFree(legacy));
	CU_IS(CUDA_ERROR_INVALID_VALUE,
	      cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
					     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	CU(cuMemFreeHost(host));
	CU(cuDevicePrimaryCtxRelease(0));
	close(fd);
}

/* -- Values across processes ---------------------------------------------------------------------------------- */

/* Waits in its stream for the other's value, and answers from its stream. */
static void waiter(int fd)
{
	struct note note;
	CUdeviceptr device;
	uint32_t *flags;
	int memfd;

	start(1);
	memfd = hear(fd, &note);
	flags = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	ASSERT_TRUE(flags != MAP_FAILED);
	CU(cuMemHostRegister(flags, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
	CU(cuMemHostGetDevicePointer(&device, flags, 0));
	CU(cuStreamWaitValue32(NULL, device, 7, 0));
	CU(cuStreamWriteValue32(NULL, device + 4, 7, 0));
	tell(fd, &note, -1);
	CU(cuStreamSynchronize(NULL));
	CU(cuMemHostUnregister(flags));
	CU(cuDevicePrimaryCtxRelease(1));
	close(memfd);
}

TEST(values_across_processes)
{
	struct note note = { 0 };
	CUdeviceptr device;
	uint32_t *flags;
	int fd, memfd;
	pid_t pid;

	pid = peer_new(waiter, &fd);
	start(0);
	memfd = memfd_create("flags", MFD_CLOEXEC);
	ASSERT_EQ(ftruncate(memfd, 4096), 0);
	flags = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	CU(cuMemHostRegister(flags, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
	CU(cuMemHostGetDevicePointer(&device, flags, 0));
	tell(fd, &note, memfd);
	(void)hear(fd, &note); /* it waits */
	ASSERT_EQ(flag_get(flags + 1), 0);
	CU(cuStreamWaitValue32(NULL, device + 4, 7, 0));
	CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(NULL));
	flag_set(flags, 7);
	CU(cuStreamSynchronize(NULL));
	CU(cuMemHostUnregister(flags));
	munmap(flags, 4096);
	close(memfd);
	CU(cuDevicePrimaryCtxRelease(0));
	peer_end(pid, fd);
}

/* -- Host functions, limits, faults --------------------------------------------------------------------------- */

static void count_up(void *arg)
{
	unsigned *n = arg;

	if (cu->cuCtxSynchronize() == CUDA_ERROR_NOT_PERMITTED)
		__atomic_add_fetch(n, 1, __ATOMIC_RELEASE);
}

TEST(host_functions_may_not_call_cuda)
{
	unsigned n = 0;

	start(0);
	for (int i = 0; i < 10; i++)
		CU(cuLaunchHostFunc(NULL, count_up, &n));
	CU(cuStreamSynchronize(NULL));
	ASSERT_EQ(n, 10);
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(memory_is_limited)
{
	size_t free_before, free_after, total;
	CUdeviceptr a;

	start(0);
	CU(cuMemGetInfo(&free_before, &total));
	CU_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&a, total + 1));
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemGetInfo(&free_after, &total));
	ASSERT_EQ(free_before - free_after, LEN);
	CU(cuMemFree(a));
	CU(cuMemGetInfo(&free_after, &total));
	ASSERT_EQ(free_before, free_after);
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&a, 0));
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(nothing_without_a_context)
{
	CUcontext context;
	CUdeviceptr a;

	start(0);
	CU(cuCtxSetCurrent(NULL));
	CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&a, LEN));
	CU(cuDevicePrimaryCtxRetain(&context, 0));
	CU(cuCtxPushCurrent(context));
	CU(cuMemAlloc(&a, LEN));
	CU(cuCtxPopCurrent(&context));
	CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuMemFree(a));
	CU(cuDevicePrimaryCtxRelease(0));
	CU(cuDevicePrimaryCtxRelease(0));
	CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
	CU(cuCtxSetCurrent(context));
	CU_IS(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuMemAlloc(&a, LEN));
}

/* By way of the host it would be said by nobody: here it fails. */
TEST(memory_of_another_device)
{
	CUcontext first, second;
	CUdeviceptr a, b;

	start(0);
	CU(cuMemAlloc(&a, LEN));
	CU(cuCtxGetCurrent(&first));
	CU(cuDevicePrimaryCtxRetain(&second, 1));
	CU_IS(CUDA_ERROR_INVALID_CONTEXT, cuCtxEnablePeerAccess(first, 0));
	CU(cuCtxSetCurrent(second));
	CU(cuMemAlloc(&b, LEN));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoDAsync(b, a, LEN, NULL));
	CU(cuCtxEnablePeerAccess(first, 0));
	CU_IS(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(first, 0));
	CU(cuMemcpyDtoDAsync(b, a, LEN, NULL));
	CU(cuMemcpyDtoDAsync(a, b, LEN, NULL));
	CU(cuStreamSynchronize(NULL));
	/* Which is so one way. */
	CU(cuCtxSetCurrent(first));
	CU_IS(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoDAsync(b, a, LEN, NULL));
	CU(cuDevicePrimaryCtxRelease(1));
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(faults_are_injected)
{
	CUdeviceptr a;

	setenv("FAKECUDA_FAIL", "cuMemAlloc:2:2,@copy:1:700", 1);
	start(0);
	CU(cuMemAlloc(&a, LEN));
	CU_IS(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&a, LEN));
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemcpyDtoDAsync(a, a + 4, 4, NULL));
	CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(NULL));
	CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemFree(a));
	CU(cuDevicePrimaryCtxRelease(0));
}

static void *store_later(void *flag)
{
	(void)poll(NULL, 0, 20);
	atomic_store((_Atomic uint32_t *)flag, 1);
	return NULL;
}

/* A context ends when its streams have: one that waits is waited for. */
TEST(a_released_context_waits_for_its_streams)
{
	CUdeviceptr device, a;
	pthread_t thread;
	uint32_t *flag;
	uint8_t *to;

	start(0);
	flag = flag_new(&device);
	to = pinned(LEN);
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemsetD8Async(a, 7, LEN, NULL));
	CU(cuStreamWaitValue32(NULL, device, 1, 0));
	CU(cuMemcpyDtoHAsync(to, a, LEN, NULL));
	ASSERT_OK(pthread_create(&thread, NULL, store_later, flag));
	CU(cuDevicePrimaryCtxRelease(0));
	ASSERT_EQ(atomic_load((_Atomic uint32_t *)flag), 1);
	ASSERT_OK(pthread_join(thread, NULL));
	munmap(flag, 4096);
}
