/*
 * Memory of a CUDA device and one stream, by calls of the driver, for trainer.c. A test may load
 * the double (tests/fakecuda) as the driver.
 */
#include "device.h"
#include "proto/cuda_abi.h"
#include <stdio.h>

#define PIECE ((size_t)2 << 20)
#define ASIDE ((size_t)4096)	 /* bytes in front of what a trainer gets */
#define RING  ((size_t)32 << 20) /* more than a test has under way at once */

static const struct cuda *cu;
static CUdevice device;
static CUstream stream;
static char *ring; /* pinned, as CUDA waits for copies from other memory */
static size_t ring_at;

static void check(CUresult result, const char *call)
{
	if (!result)
		return;
	fprintf(stderr, "trainer: %s: %s\n", call, cuda_error_name(cu, result));
	exit(2);
}
#define CU(call) check(cu->call, #call)

void device_open(int ordinal)
{
	const char *reason;
	CUcontext context;

	if (cuda_load(&cu, &reason)) {
		fprintf(stderr, "trainer: %s\n", reason);
		exit(2);
	}
	CU(cuInit(0));
	CU(cuDeviceGet(&device, ordinal));
	CU(cuDevicePrimaryCtxRetain(&context, device));
	CU(cuCtxSetCurrent(context));
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	CU(cuMemHostAlloc((void **)&ring, RING, 0));
}

void *device_stream(void)
{
	return stream;
}

static void map(CUdeviceptr at, size_t len, bool shareable)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = shareable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
						  : CU_MEM_HANDLE_TYPE_NONE,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, device },
	};
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;

	CU(cuMemCreate(&handle, len, &prop, 0));
	CU(cuMemMap(at, len, 0, handle, 0));
	CU(cuMemRelease(handle));
	CU(cuMemSetAccess(at, len, &access, 1));
}

struct device_memory device_alloc(enum device_kind kind, size_t len)
{
	struct device_memory memory = { .kind = kind, .len = align_up(len + 2 * ASIDE, PIECE) };
	CUdeviceptr base = 0;
	size_t at = ASIDE;

	switch (kind) {
	case DEVICE_ALLOC:
		CU(cuMemAlloc(&base, memory.len));
		break;
	case DEVICE_MANAGED:
		CU(cuMemAllocManaged(&base, memory.len, CU_MEM_ATTACH_GLOBAL));
		break;
	case DEVICE_POOL:
		CU(cuMemAllocAsync(&base, memory.len, stream));
		break;
	case DEVICE_MAPPED:
	case DEVICE_PRIVATE:
		CU(cuMemAddressReserve(&base, memory.len, 0, 0, 0));
		map(base, memory.len, kind == DEVICE_MAPPED);
		break;
	case DEVICE_PIECES:
		memory.len += PIECE;
		CU(cuMemAddressReserve(&base, memory.len, 0, 0, 0));
		map(base, PIECE, true);
		map(base + PIECE, memory.len - PIECE, true);
		at = PIECE - align_up(len / 2, 64);
		break;
	}
	if (!base) {
		fprintf(stderr, "trainer: %d is no kind of device memory\n", (int)kind);
		exit(2);
	}
	memory.base = base;
	memory.data = (void *)(uintptr_t)(base + at);
	return memory;
}

void device_free(struct device_memory *memory)
{
	if (!memory->kind)
		return;
	/* What is unmapped does not wait for streams, as cuMemFree() does. */
	CU(cuStreamSynchronize(stream));
	switch (memory->kind) {
	case DEVICE_ALLOC:
	case DEVICE_MANAGED:
		CU(cuMemFree(memory->base));
		break;
	case DEVICE_POOL:
		CU(cuMemFreeAsync(memory->base, stream));
		break;
	case DEVICE_PIECES:
		CU(cuMemUnmap(memory->base, PIECE));
		CU(cuMemUnmap(memory->base + PIECE, memory->len - PIECE));
		CU(cuMemAddressFree(memory->base, memory->len));
		break;
	case DEVICE_MAPPED:
	case DEVICE_PRIVATE:
		CU(cuMemUnmap(memory->base, memory->len));
		CU(cuMemAddressFree(memory->base, memory->len));
		break;
	}
	*memory = (struct device_memory){ 0 };
}

void device_write(void *to, const void *from, size_t len)
{
	if (!len)
		return;
	if (len > RING) {
		fprintf(stderr, "trainer: %zu bytes are too many\n", len);
		exit(2);
	}
	if (len > RING - ring_at)
		ring_at = 0;
	memcpy(ring + ring_at, from, len);
	CU(cuMemcpyHtoDAsync((uintptr_t)to, ring + ring_at, len, stream));
	ring_at += align_up(len, 64);
	ring_at = MIN(ring_at, RING);
}

void device_read(void *to, const void *from, size_t len)
{
	if (len)
		CU(cuMemcpyDtoHAsync(to, (uintptr_t)from, len, stream));
	CU(cuStreamSynchronize(stream));
}
