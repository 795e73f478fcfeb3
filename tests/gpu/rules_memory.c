/* Memory: what it is, and how another process gets at it. */
#include "rules.h"

#include <signal.h>
#include <sys/wait.h>

#define LEN   ((size_t)8 << 20)
#define CHUNK ((size_t)2 << 20)

/* -- By IPC handle -------------------------------------------------------------------------------------------- */

static void run_interior(void)
{
	CUipcMemHandle handle;
	CUdeviceptr a;

	start(0);
	a = pattern_new(LEN, 1);
	seen("%s", name_of(cu->cuIpcGetMemHandle(&handle, a + 256)));
}

static void run_own(void)
{
	CUipcMemHandle handle;
	CUdeviceptr a, b;

	start(0);
	a = pattern_new(LEN, 1);
	CU(cuIpcGetMemHandle(&handle, a));
	seen("%s", name_of(cu->cuIpcOpenMemHandle(&b, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)));
}

static void run_flags(void)
{
	CUipcMemHandle handle = { { 0 } };
	CUdeviceptr a;

	start(0);
	seen("%s", name_of(cu->cuIpcOpenMemHandle(&a, handle, 0)));
}

/* Exports what its peer asks for: number bytes, seed number2. */
static void exporter(int fd)
{
	CUdeviceptr base, a;
	struct note note;

	start(0);
	for (;;) {
		(void)hear(fd, &note);
		a = pattern_new(note.number, (unsigned)note.number2);
		CU(cuMemGetAddressRange(&base, NULL, a));
		CU(cuIpcGetMemHandle(&note.handle, base));
		note.number = a - base;
		tell(fd, &note, -1);
		(void)hear(fd, &note);
		if (note.number == 1) { /* what the other has written */
			CHECK(pattern_is(a, LEN, 99));
			tell(fd, &note, -1);
		} else if (note.number == 2) { /* free it */
			CU(cuMemFree(a));
			tell(fd, &note, -1);
		}
	}
}

static struct note ask(int fd, size_t len, unsigned seed)
{
	struct note note = { .number = len, .number2 = seed };

	tell(fd, &note, -1);
	(void)hear(fd, &note);
	return note;
}

static CUdeviceptr opened(const struct note *note)
{
	CUdeviceptr a;

	CU(cuIpcOpenMemHandle(&a, note->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	return a;
}

static void answer(int fd, uint64_t number)
{
	struct note note = { .number = number };

	tell(fd, &note, -1);
}

static int attribute_of(CUdevice_attribute attribute)
{
	int value = -1;

	CU(cuDeviceGetAttribute(&value, attribute, 0));
	return value;
}

static const char *export_range(CUdeviceptr at, size_t len)
{
	int fd = -1;

	if (!cu->cuMemGetHandleForAddressRange)
		return "no such call";
	return name_of(cu->cuMemGetHandleForAddressRange(&fd, at, len,
							 CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
}

static void run_dmabuf(void)
{
	start(0);
	seen("%d, %s", attribute_of(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED),
	     export_range(pattern_new(LEN, 1), LEN));
}

static void run_dmabuf_again(void)
{
	struct note note;
	int fd;

	(void)peer_new(exporter, &fd);
	start(0);
	note = ask(fd, LEN, 7);
	seen("%s", export_range(opened(&note), LEN));
}

static void run_dmabuf_order(void)
{
	int order, options;

	start(0);
	order = attribute_of(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
	options = attribute_of(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
	if (order >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER)
		seen("it is");
	if (!(options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST))
		seen("neither");
	CU(cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
				      CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
	seen("it can");
}

/* Small ones may lie in one block, which is what is exported. */
static void run_small(void)
{
	struct note a, b;
	CUdeviceptr pa, pb;
	int fd;

	(void)peer_new(exporter, &fd);
	start(0);
	a = ask(fd, 1000, 5);
	pa = opened(&a);
	answer(fd, 0);
	b = ask(fd, 1000, 6);
	pb = memcmp(&a.handle, &b.handle, sizeof(a.handle)) ? opened(&b) : pa;
	seen("%s", pattern_is(pa + a.number, 1000, 5) && pattern_is(pb + b.number, 1000, 6)
			   ? "both right"
			   : "wrong bytes");
}

static void run_bytes(void)
{
	struct note note;
	CUdeviceptr a;
	int fd;

	(void)peer_new(exporter, &fd);
	start(0);
	note = ask(fd, LEN, 7);
	a = opened(&note);
	CHECK(pattern_is(a, LEN, 7));
	pattern_put(a, LEN, 99);
	answer(fd, 1);
	(void)hear(fd, &note);
	seen("both ways");
}

static void run_reopen(void)
{
	struct note note;
	CUdeviceptr a, b;
	int fd;

	(void)peer_new(exporter, &fd);
	start(0);
	note = ask(fd, LEN, 7);
	a = opened(&note);
	b = opened(&note);
	CU(cuIpcCloseMemHandle(b));
	seen("%s", a != b		   ? "another address"
		   : pattern_is(a, LEN, 7) ? "the same address, counted"
					   : "wrong bytes");
}

static void run_range(void)
{
	struct note note;
	CUdeviceptr a, base;
	size_t len;
	int fd;

	(void)peer_new(exporter, &fd);
	start(0);
	note = ask(fd, LEN, 7);
	a = opened(&note);
	CU(cuMemGetAddressRange(&base, &len, a + 5));
	seen("%s", base == a && len == LEN ? "base and length" : "others");
}

static void run_freed(void)
{
	struct note note;
	CUdeviceptr a;
	void *host;
	int fd;

	(void)peer_new(exporter, &fd);
	start(0);
	host = pinned(LEN);
	note = ask(fd, LEN, 7);
	a = opened(&note);
	answer(fd, 2);
	(void)hear(fd, &note);
	CU(cuMemcpyDtoHAsync(host, a, LEN, NULL));
	seen("%s", name_of(cu->cuStreamSynchronize(NULL)));
}

static void run_dead(void)
{
	struct note note;
	CUdeviceptr a;
	void *host;
	pid_t pid;
	int fd;

	pid = peer_new(exporter, &fd);
	start(0);
	host = pinned(LEN);
	note = ask(fd, LEN, 7);
	a = opened(&note);
	peer_kill(pid);
	CU(cuMemcpyDtoHAsync(host, a, LEN, NULL));
	seen("%s", name_of(cu->cuStreamSynchronize(NULL)));
}

static void run_open_dead(void)
{
	struct note note;
	CUdeviceptr a;
	pid_t pid;
	int fd;

	pid = peer_new(exporter, &fd);
	start(0);
	note = ask(fd, LEN, 7);
	peer_kill(pid);
	seen("%s",
	     name_of(cu->cuIpcOpenMemHandle(&a, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)));
}

/* Whether a process that sees one device only gets at another's memory. */
static void exporter_of_second(int fd)
{
	struct note note = { .number = 0 };
	CUdeviceptr a;

	start(1);
	a = pattern_new(LEN, 8);
	CU(cuIpcGetMemHandle(&note.handle, a));
	tell(fd, &note, -1);
	(void)hear(fd, &note);
}

static void run_invisible(void)
{
	struct note note;
	CUdeviceptr a;
	CUresult r;
	int fd;

	(void)peer_new(exporter_of_second, &fd);
	CHECK(!setenv("CUDA_VISIBLE_DEVICES", "0", 1));
	start(0);
	(void)hear(fd, &note);
	r = cu->cuIpcOpenMemHandle(&a, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
	seen("%s", r ? name_of(r) : pattern_is(a, LEN, 8) ? "right bytes" : "wrong bytes");
}

static void other_order(int fd)
{
	struct note note = { .number = 0 };
	CUuuid uuid;

	CHECK(!setenv("CUDA_VISIBLE_DEVICES", "1,0", 1));
	start(0);
	CU(cuDeviceGetUuid(&uuid, 1));
	memcpy(note.handle.reserved, uuid.bytes, sizeof(uuid.bytes));
	tell(fd, &note, -1);
}

static void run_uuid(void)
{
	struct note note;
	CUuuid uuid;
	int fd;

	(void)peer_new(other_order, &fd);
	start(0);
	CU(cuDeviceGetUuid(&uuid, 0));
	(void)hear(fd, &note);
	seen("%s",
	     memcmp(uuid.bytes, note.handle.reserved, sizeof(uuid.bytes)) ? "differ" : "the same");
}

/* -- What memory is ------------------------------------------------------------------------------------------- */

/* "legacy capable, what an export gives" */
static void see_capable(CUdeviceptr a)
{
	unsigned int capable = 77;
	CUipcMemHandle handle;

	CU(cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, a));
	seen("%u, %s", capable, name_of(cu->cuIpcGetMemHandle(&handle, a)));
}

static void run_plain_capable(void)
{
	start(0);
	see_capable(pattern_new(LEN, 1));
}

static void run_managed_capable(void)
{
	CUdeviceptr a;

	start(0);
	CHECK(cu->cuMemAllocManaged);
	CU(cuMemAllocManaged(&a, 4096, CU_MEM_ATTACH_GLOBAL));
	see_capable(a);
}

static CUdeviceptr pool_new(void)
{
	CUdeviceptr a;

	CHECK(cu->cuMemAllocAsync);
	CU(cuMemAllocAsync(&a, LEN, NULL));
	CU(cuStreamSynchronize(NULL));
	return a;
}

static void run_pool_capable(void)
{
	start(0);
	see_capable(pool_new());
}

static CUmemAllocationProp prop_of(void)
{
	return (CUmemAllocationProp){
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
	};
}

static void allow(CUdeviceptr ptr, size_t len)
{
	CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0 },
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	CU(cuMemSetAccess(ptr, len, &access, 1));
}

static size_t granularity(void)
{
	CUmemAllocationProp prop = prop_of();
	size_t len;

	CU(cuMemGetAllocationGranularity(&len, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
	return len;
}

/* n pieces side by side, as PyTorch's expandable segments have them; the last one's handle. */
static CUdeviceptr pieces_new(size_t n, CUmemGenericAllocationHandle *ret_handle)
{
	CUmemAllocationProp prop = prop_of();
	size_t len = granularity();
	CUdeviceptr ptr;

	CU(cuMemAddressReserve(&ptr, 4 * len, 0, 0, 0));
	for (size_t i = 0; i < n; i++) {
		CU(cuMemCreate(ret_handle, len, &prop, 0));
		CU(cuMemMap(ptr + i * len, len, 0, *ret_handle, 0));
		allow(ptr + i * len, len);
	}
	return ptr;
}

static void run_mapped_capable(void)
{
	CUmemGenericAllocationHandle handle;

	start(0);
	see_capable(pieces_new(1, &handle));
}

static void run_id(void)
{
	unsigned long long before, after;
	CUdeviceptr a, b = 0;

	start(0);
	for (int i = 0; i < 8; i++) {
		CU(cuMemAlloc(&a, LEN));
		CU(cuPointerGetAttribute(&before, CU_POINTER_ATTRIBUTE_BUFFER_ID, a));
		CU(cuMemFree(a));
		CU(cuMemAlloc(&b, LEN));
		CU(cuPointerGetAttribute(&after, CU_POINTER_ATTRIBUTE_BUFFER_ID, b));
		CHECK(before != after);
		CU(cuMemFree(b));
	}
	seen("another each time");
}

static void run_stack(void)
{
	CUpointer_attribute names[] = { CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
					CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL };
	unsigned int type = 77;
	int ordinal = 77;
	void *values[] = { &type, &ordinal };
	CUresult r;

	start(0);
	r = cu->cuPointerGetAttributes(2, names, values, (uintptr_t)&r);
	seen("%s, type %u, device %d", name_of(r), type, ordinal);
}

static void run_stack_one(void)
{
	unsigned int type;

	start(0);
	seen("%s", name_of(cu->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
						     (uintptr_t)&type)));
}

/* In a thread of a library there may be no context at all. */
static void run_no_context(void)
{
	unsigned int type = 77;
	CUdeviceptr a;
	CUresult r;

	start(0);
	a = pattern_new(LEN, 1);
	CU(cuCtxSetCurrent(NULL));
	r = cu->cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a);
	seen("%s, type %u", name_of(r), type);
}

static void see_context(CUdeviceptr a, CUcontext own)
{
	CUcontext context = own;
	int ordinal = 77;

	CU(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, a));
	CU(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, a));
	seen("%s, device %d", context == own ? "its own" : context ? "another" : "none", ordinal);
}

static void run_context(void)
{
	CUcontext own = start(0);

	see_context(pattern_new(LEN, 1), own);
}

static void run_context_mapped(void)
{
	CUmemGenericAllocationHandle handle;
	CUcontext own = start(0);

	see_context(pieces_new(1, &handle), own);
}

static void run_context_pool(void)
{
	CUcontext own = start(0);

	see_context(pool_new(), own);
}

/* -- By descriptor -------------------------------------------------------------------------------------------- */

static void exporter_of_piece(int fd)
{
	CUmemGenericAllocationHandle handle;
	struct note note = { .number = 0 };
	CUdeviceptr ptr;
	int shareable;

	start(0);
	ptr = pieces_new(2, &handle);
	note.number = granularity();
	pattern_put(ptr + note.number, note.number, 3);
	CU(cuMemExportToShareableHandle(&shareable, handle,
					CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	tell(fd, &note, shareable);
	(void)hear(fd, &note);
}

static CUdeviceptr piece_of(int shareable, size_t len)
{
	CUmemGenericAllocationHandle handle;
	CUdeviceptr ptr;

	CHECK(shareable >= 0);
	CU(cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)shareable,
					  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	close(shareable);
	CU(cuMemAddressReserve(&ptr, len, 0, 0, 0));
	CU(cuMemMap(ptr, len, 0, handle, 0));
	allow(ptr, len);
	CU(cuMemRelease(handle));
	return ptr;
}

static void run_descriptor(void)
{
	struct note note;
	int fd, shareable;

	(void)peer_new(exporter_of_piece, &fd);
	start(0);
	shareable = hear(fd, &note);
	seen("%s", pattern_is(piece_of(shareable, note.number), note.number, 3) ? "right bytes"
										: "wrong bytes");
}

static void run_descriptor_dead(void)
{
	struct note note;
	int fd, shareable;
	pid_t pid;

	pid = peer_new(exporter_of_piece, &fd);
	start(0);
	shareable = hear(fd, &note);
	peer_kill(pid);
	seen("%s", pattern_is(piece_of(shareable, note.number), note.number, 3) ? "right bytes"
										: "wrong bytes");
}

static void run_piece_range(void)
{
	CUmemGenericAllocationHandle handle;
	CUdeviceptr ptr, base;
	size_t len;

	start(0);
	ptr = pieces_new(2, &handle);
	CU(cuMemGetAddressRange(&base, &len, ptr + granularity() + 5));
	seen("%s", base == ptr + granularity() && len == granularity() ? "its piece"
		   : base == ptr && len == 2 * granularity()	       ? "all that is mapped"
		   : base == ptr && len == 4 * granularity()	       ? "all that is reserved"
								       : "something else");
}

static void run_retain(void)
{
	CUmemGenericAllocationHandle first, second;
	CUdeviceptr ptr;

	start(0);
	ptr = pieces_new(2, &first);
	CU(cuMemRetainAllocationHandle(&second, (void *)(uintptr_t)(ptr + granularity() + 5)));
	seen("%s", first == second ? "its handle" : "another handle");
}

static void run_retain_plain(void)
{
	CUmemGenericAllocationHandle handle;
	CUdeviceptr a;

	start(0);
	a = pattern_new(LEN, 1);
	seen("%s", name_of(cu->cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)a)));
}

static void run_no_access(void)
{
	CUmemAllocationProp prop = prop_of();
	CUmemGenericAllocationHandle handle;
	size_t len;
	CUdeviceptr ptr;

	start(0);
	len = granularity();
	CU(cuMemAddressReserve(&ptr, len, 0, 0, 0));
	CU(cuMemCreate(&handle, len, &prop, 0));
	CU(cuMemMap(ptr, len, 0, handle, 0));
	seen("%s", name_of(cu->cuMemsetD8Async(ptr, 0, len, NULL)));
}

/* -- Processes ------------------------------------------------------------------------------------------------ */

static void run_fork(void)
{
	CUdeviceptr a;
	int status;
	pid_t pid;

	start(0);
	pid = fork();
	if (!pid)
		_exit((int)cu->cuMemAlloc(&a, 4096));
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
	seen("%s", name_of((CUresult)WEXITSTATUS(status)));
}

static void run_pageable(void)
{
	unsigned char *host = calloc(1, LEN);
	CUdeviceptr a;

	start(0);
	CHECK(host);
	CU(cuMemAlloc(&a, LEN));
	CU(cuMemsetD8Async(a, 9, LEN, NULL));
	CU(cuMemcpyDtoHAsync(host, a, LEN, NULL));
	seen("%s", host[0] == 9 && host[LEN - 1] == 9 ? "done" : "not done");
}

const struct rule memory_rules[] = {
	{ "ipc-bytes", "memory by IPC handle is read and written", "both ways", true, 1,
	  run_bytes },
	{ "ipc-small", "two small allocations, each by its base's handle and offset", "both right",
	  true, 1, run_small },
	{ "ipc-range", "cuMemGetAddressRange() of what was opened", "base and length", false, 1,
	  run_range },
	{ "ipc-reopen", "a handle opened twice", "the same address, counted", false, 1,
	  run_reopen },
	{ "ipc-interior", "cuIpcGetMemHandle() inside an allocation", "CUDA_ERROR_INVALID_VALUE",
	  false, 1, run_interior, "CUDA_SUCCESS" },
	{ "ipc-own", "a process opens its own handle", "CUDA_ERROR_INVALID_CONTEXT", false, 1,
	  run_own },
	{ "ipc-flags", "cuIpcOpenMemHandle() without its flag", "CUDA_ERROR_INVALID_VALUE", false,
	  1, run_flags },
	{ "ipc-freed", "a copy from what its owner has freed", "CUDA_ERROR_ILLEGAL_ADDRESS", false,
	  1, run_freed, "CUDA_SUCCESS" },
	{ "ipc-dead", "a copy from what a killed process had exported",
	  "CUDA_ERROR_ILLEGAL_ADDRESS", false, 1, run_dead, "CUDA_SUCCESS" },
	{ "ipc-open-dead", "a handle of a process that was killed", "CUDA_ERROR_INVALID_HANDLE",
	  false, 1, run_open_dead },
	{ "ipc-invisible", "memory of a device that is not visible", "right bytes", false, 2,
	  run_invisible },
	{ "uuid", "one device's UUID where devices are counted otherwise", "the same", true, 2,
	  run_uuid },
	{ "plain-capable", "cuMemAlloc(): may be exported, and what that gives", "1, CUDA_SUCCESS",
	  true, 1, run_plain_capable },
	{ "mapped-capable", "cuMemMap(): the same", "0, CUDA_ERROR_INVALID_VALUE", false, 1,
	  run_mapped_capable },
	{ "pool-capable", "cuMemAllocAsync(): the same", "0, CUDA_ERROR_INVALID_VALUE", false, 1,
	  run_pool_capable },
	{ "managed-capable", "cuMemAllocManaged(): the same", "0, CUDA_ERROR_INVALID_VALUE", false,
	  1, run_managed_capable },
	{ "dmabuf", "cuMemGetHandleForAddressRange() of cuMemAlloc(), and the driver's word on it",
	  "1, CUDA_SUCCESS", false, 1, run_dmabuf },
	{ "dmabuf-again", "the same of what another process has exported",
	  "CUDA_ERROR_INVALID_VALUE", false, 1, run_dmabuf_again },
	{ "dmabuf-order", "what other devices write is in order for its owner, or can be flushed",
	  "it is", false, 1, run_dmabuf_order },
	{ "buffer-id", "buffer ids of allocations at one address", "another each time", true, 1,
	  run_id },
	{ "stack", "cuPointerGetAttributes() of memory that is not CUDA's",
	  "CUDA_SUCCESS, type 0, device -2", true, 1, run_stack },
	{ "stack-one", "cuPointerGetAttribute() of memory that is not CUDA's",
	  "CUDA_ERROR_INVALID_VALUE", true, 1, run_stack_one },
	{ "no-context", "cuPointerGetAttribute() without a current context", "CUDA_SUCCESS, type 2",
	  true, 1, run_no_context },
	{ "context", "context and device of cuMemAlloc()", "its own, device 0", true, 1,
	  run_context },
	{ "context-mapped", "context and device of cuMemMap()", "none, device 0", false, 1,
	  run_context_mapped },
	{ "context-pool", "context and device of cuMemAllocAsync()", "none, device 0", false, 1,
	  run_context_pool },
	{ "descriptor", "memory by descriptor is read", "right bytes", true, 1, run_descriptor },
	{ "descriptor-dead", "the same, after its maker was killed", "right bytes", true, 1,
	  run_descriptor_dead },
	{ "piece-range", "cuMemGetAddressRange() of mapped pieces", "its piece", false, 1,
	  run_piece_range },
	{ "retain", "cuMemRetainAllocationHandle() of a piece", "its handle", true, 1, run_retain },
	{ "retain-plain", "cuMemRetainAllocationHandle() of cuMemAlloc()",
	  "CUDA_ERROR_INVALID_VALUE", false, 1, run_retain_plain },
	{ "no-access", "a copy where cuMemSetAccess() is missing", "CUDA_ERROR_INVALID_VALUE",
	  false, 1, run_no_access },
	{ "fork", "a call after fork()", "CUDA_ERROR_NOT_INITIALIZED", false, 1, run_fork },
	{ "pageable", "a copy into pageable memory, when the call returns", "done", false, 1,
	  run_pageable },
	{ NULL, NULL, NULL, false, 0, NULL },
};
