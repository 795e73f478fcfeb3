/*
 * Allocations of each kind on the double of the driver, a client and its fake daemon, and a gate
 * that holds up a stream. The tests of client/cuda*.c begin from here.
 */
#include "cuda_fixture.h"
#include <dlfcn.h>
#include <sys/mman.h>

const struct cuda *cu;
void *(*host_of)(CUdeviceptr ptr);

static void load(void)
{
	const char *reason;

	if (cuda_load(&cu, &reason))
		test_fail(__FILE__, __LINE__, "%s", reason);
	host_of = (void *(*)(CUdeviceptr))dlsym(RTLD_DEFAULT, "fakecuda_host");
	if (!host_of)
		host_of = (void *(*)(CUdeviceptr))dlsym(dlopen("libcuda.so.1", RTLD_NOW),
							"fakecuda_host");
	ASSERT_TRUE(host_of);
	CU(cuInit(0));
}

/* What the test has allocated, and how it is given back. */
static struct allocation {
	CUdeviceptr ptr;
	unsigned n_pieces; /* 0: not mapped */
	bool pool;
} allocations[64];
static unsigned n_allocations;

static CUdeviceptr keep(CUdeviceptr ptr, unsigned n_pieces, bool pool)
{
	ASSERT_TRUE(n_allocations < ARRAY_SIZE(allocations));
	allocations[n_allocations++] = (struct allocation){ ptr, n_pieces, pool };
	return ptr;
}

void release_last(void)
{
	const struct allocation *a = &allocations[--n_allocations];

	if (a->n_pieces) {
		CU(cuMemUnmap(a->ptr, a->n_pieces * WIDE));
		CU(cuMemAddressFree(a->ptr, a->n_pieces * WIDE));
	} else if (a->pool) {
		CU(cuMemFreeAsync(a->ptr, NULL));
		CU(cuStreamSynchronize(NULL));
	} else {
		CU(cuMemFree(a->ptr));
	}
}

void fixture_done(struct fixture *f)
{
	bps_tensor_free(f->tensor);
	bps_client_close(f->client);
	fake_free(f->fake);
	CU(cuStreamDestroy(f->stream));
	while (n_allocations)
		release_last();
}

struct fixture fixture_init(uint64_t features)
{
	struct fixture f = { .fake = fake_new() };

	load();
	CU(cuDevicePrimaryCtxRetain(&f.context, 0));
	CU(cuCtxSetCurrent(f.context));
	CU(cuStreamCreate(&f.stream, CU_STREAM_NON_BLOCKING));
	FAKE_SET(f.fake, features, features);
	f.client = fake_join(f.fake, 0, 1);
	ASSERT_OK(bps_tensor_declare(f.client, "tensor", BPS_FLOAT32, N, &f.tensor));
	return f;
}
CUdeviceptr alloc(struct fixture *f, size_t len)
{
	CUdeviceptr ptr;

	CU(cuMemAlloc(&ptr, len));
	FAKE_SET(f->fake, device_ipc, host_of(ptr));
	return keep(ptr, 0, false);
}

CUdeviceptr managed(void)
{
	CUdeviceptr ptr;

	CU(cuMemAllocManaged(&ptr, N * 4, CU_MEM_ATTACH_GLOBAL));
	return keep(ptr, 0, false);
}

CUdeviceptr pooled(void)
{
	CUdeviceptr ptr;

	CU(cuMemAllocAsync(&ptr, N * 4, NULL));
	return keep(ptr, 0, true);
}

void map_piece(CUdeviceptr ptr)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 },
	};
	CUmemAccessDesc access = { prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;

	CU(cuMemCreate(&handle, WIDE, &prop, 0));
	CU(cuMemMap(ptr, WIDE, 0, handle, 0));
	CU(cuMemRelease(handle));
	CU(cuMemSetAccess(ptr, WIDE, &access, 1));
}

CUdeviceptr map_pieces(unsigned n)
{
	CUdeviceptr ptr;

	CU(cuMemAddressReserve(&ptr, n * WIDE, 0, 0, 0));
	for (unsigned i = 0; i < n; i++)
		map_piece(ptr + i * WIDE);
	return keep(ptr, n, false);
}

void fill(const struct fixture *f, CUdeviceptr ptr, unsigned value)
{
	CU(cuMemsetD8Async(ptr, (unsigned char)value, N * 4, f->stream));
}

void assert_filled(const struct fixture *f, CUdeviceptr ptr, unsigned value)
{
	unsigned char bytes[N * 4];

	CU(cuMemcpyDtoHAsync(bytes, ptr, sizeof(bytes), f->stream));
	CU(cuStreamSynchronize(f->stream));
	for (size_t i = 0; i < sizeof(bytes); i++)
		if (bytes[i] != (unsigned char)value)
			test_fail(__FILE__, __LINE__, "byte %zu is %u, not %u", i, bytes[i], value);
}

struct bps_submit_params params_of(const struct fixture *f, CUdeviceptr in, CUdeviceptr out)
{
	return (struct bps_submit_params){
		.size = sizeof(struct bps_submit_params),
		.operation = BPS_PUSH_PULL,
		.input = (void *)(uintptr_t)in,
		.output = (void *)(uintptr_t)out,
		.memory = BPS_MEMORY_CUDA,
		.stream = f->stream,
	};
}

struct bps_request *submit(const struct fixture *f, CUdeviceptr in, CUdeviceptr out)
{
	struct bps_submit_params params = params_of(f, in, out);
	struct bps_request *request;

	if (bps_submit(f->tensor, &params, &request))
		test_fail(__FILE__, __LINE__, "submit: %s", bps_error());
	return request;
}

struct gate gate_close(const struct fixture *f)
{
	struct gate gate;

	gate.flag = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(gate.flag != MAP_FAILED);
	CU(cuMemHostRegister((void *)gate.flag, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
	CU(cuMemHostGetDevicePointer(&gate.address, (void *)gate.flag, 0));
	CU(cuStreamWaitValue32(f->stream, gate.address, 1, CU_STREAM_WAIT_VALUE_GEQ));
	return gate;
}

void gate_open(const struct gate *gate)
{
	atomic_store(gate->flag, 1);
}
