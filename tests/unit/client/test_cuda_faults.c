/* What the library does where calls of the driver fail: the double lets them. */
#include "cuda_fixture.h"

static void assert_fault(const char *fault, const char *words)
{
	setenv("FAKECUDA_FAIL", fault, 1);
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	struct bps_submit_params params = params_of(&f, ptr, ptr);
	struct bps_request *request;

	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EIO, words);
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
}

/* A process each: faults are read once. */
#define NAMED(name, fault, words)                  \
	TEST(the_fault_##name##_is_named)          \
	{                                          \
		assert_fault(fault ":201", words); \
	}
NAMED(of_a_flag, "cuStreamWriteValue32:1", "cuStreamWriteValue32(): CUDA_ERROR_INVALID_CONTEXT")
NAMED(of_a_lookup, "cuPointerGetAttributes:1", "cuPointerGetAttributes(): CUDA_ERROR_INV")
NAMED(of_the_start, "cuInit:2", "cuInit(): CUDA_ERROR_INVALID_CONTEXT")
NAMED(of_a_device, "cuDeviceGetUuid:1", "cuDeviceGetUuid(): CUDA_ERROR_INVALID_CONTEXT")
NAMED(of_a_context, "cuCtxPushCurrent:3", "cuCtxPushCurrent(): CUDA_ERROR_INVALID_CONTEXT")
NAMED(of_a_context_later, "cuCtxPushCurrent:6", "cuCtxPushCurrent(): CUDA_ERROR_INVALID_CONTEXT")
NAMED(of_a_stream, "cuStreamIsCapturing:1", "cuStreamIsCapturing(): CUDA_ERROR_INVALID_CONTEXT")
#undef NAMED

/* What cannot be handed over for it is copied, which the notice says. */
static void assert_copied(const char *fault, bool is_managed, const char *notice)
{
	setenv("FAKECUDA_FAIL", fault, 1);
	FIXTURE;
	static char arena[16 << 20];
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	CUdeviceptr ptr;

	FAKE_SET(f.fake, device_ipc, is_managed ? arena : NULL);
	ptr = is_managed ? managed() : alloc(&f, WIDE);
	fill(&f, ptr, 1);
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	if (!is_managed)
		assert_filled(&f, ptr, 2);
	ASSERT_CONTAINS(bps_client_notice(f.client), notice);
	if (is_managed)
		ASSERT_EQ(told(f.fake)->device_kind, MEMORY_CUDA_IPC);
}

#define COPIED(name, fault, is_managed, notice)                  \
	TEST(memory_is_copied_for_the_fault_##name)              \
	{                                                        \
		assert_copied(fault ":201", is_managed, notice); \
	}
COPIED(of_its_range, "cuCtxPushCurrent:2", false, "is copied there before")
COPIED(of_flags, "cuCtxPushCurrent:4", false, "through host memory: cuCtxPushCurrent()")
COPIED(of_flags_on_the_device, "cuMemHostGetDevicePointer:1", false, "through host memory: ")
COPIED(of_its_context, "cuCtxPushCurrent:5", false, "CUDA does not export it: CUDA_ERROR_INV")
COPIED(of_its_handle, "cuIpcGetMemHandle:1", false, "CUDA does not export it: CUDA_ERROR_INV")
/* The arena is of cuMemAlloc() then. */
COPIED(of_a_granularity, "cuMemGetAllocationGranularity:1", true, "is copied there before")
COPIED(of_a_descriptor, "cuMemExportToShareableHandle:1", true, "is copied there before")
COPIED(of_an_address, "cuMemAddressReserve:1", true, "is copied there before")
COPIED(of_a_mapping, "cuMemMap:1", true, "is copied there before")
COPIED(of_access, "cuMemSetAccess:1", true, "is copied there before")
#undef COPIED

TEST(a_copy_on_the_device_that_fails_is_named)
{
	setenv("FAKECUDA_FAIL", "cuMemcpyDtoDAsync:1:201,cuCtxPushCurrent:4:201", 1);
	FIXTURE;
	CUdeviceptr ptr = managed();
	struct bps_submit_params params = params_of(&f, ptr, ptr);
	struct bps_request *request;

	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EIO, "cuCtxPushCurrent()");
	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EIO, "cuMemcpyDtoDAsync()");
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
}

static void assert_result_fault(const char *fault, const char *words)
{
	setenv("FAKECUDA_FAIL", fault, 1);
	FIXTURE;
	CUdeviceptr ptr = managed();
	struct bps_request *request = submit(&f, ptr, ptr);

	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), EIO, words);
	bps_request_free(request);
}

TEST(a_result_that_is_not_copied_is_an_error)
{
	assert_result_fault("cuMemcpyDtoDAsync:2:201",
			    "copying the result to its CUDA device: CUDA_ERR");
}

TEST(a_result_without_a_context_is_an_error)
{
	assert_result_fault("cuCtxPushCurrent:5:201",
			    "cuCtxPushCurrent(): CUDA_ERROR_INVALID_CONTEXT");
}

TEST(a_device_that_is_none)
{
	setenv("FAKECUDA_FAIL", "cuDeviceGet:1:101", 1);
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	struct bps_submit_params params = params_of(&f, ptr, ptr);
	struct bps_request *request;

	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL,
		     "on CUDA device 0, which is none");
}

TEST(a_wait_that_the_driver_refuses_can_be_made_again)
{
	setenv("FAKECUDA_FAIL", "cuStreamWaitValue32:1:801", 1);
	FIXTURE;
	CUdeviceptr ptr;
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	ptr = managed();
	FAKE_SET(f.fake, hold, true);
	fill(&f, ptr, 1);
	request = submit(&f, ptr, ptr);
	ASSERT_FAILS(bps_request_wait_stream(request, f.stream, 0), EIO, "making a stream wait");
	ASSERT_OK(bps_request_wait_stream(request, f.stream, 0));
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	fake_complete(f.fake, 0, 0, NULL);
	assert_filled(&f, ptr, 2);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
}

/* What cannot be registered cannot order anything. */
TEST(flags_that_the_driver_does_not_register_leave_the_host)
{
	setenv("FAKECUDA_FAIL", "cuMemHostRegister:1:801", 1);
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	fill(&f, ptr, 1);
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	assert_filled(&f, ptr, 2);
	ASSERT_CONTAINS(bps_client_notice(f.client), "CUDA_ERROR_NOT_SUPPORTED");
}

/* Where nothing can be mapped the arena is of cuMemAlloc(), which the fake cannot find: it is refused. */
TEST(an_arena_by_the_old_way_is_freed_when_the_daemon_has_closed_it)
{
	setenv("FAKECUDA_FAIL", "cuMemCreate:1:801", 1);
	FIXTURE;
	CUdeviceptr ptr;
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	static char arena[16 << 20];
	size_t before, after, total;

	CU(cuMemGetInfo(&before, &total));
	FAKE_SET(f.fake, device_ipc, arena);
	ptr = managed();
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_EQ(told(f.fake)->device_kind, MEMORY_CUDA_IPC);
	bps_request_free(TAKE_PTR(request));
	CU(cuMemGetInfo(&after, &total));
	ASSERT_TRUE(before - after >= sizeof(arena));
	ASSERT_OK(bps_client_leave(f.client));
	do {
		ASSERT_OK(bps_client_dispatch(f.client));
		CU(cuMemGetInfo(&after, &total));
	} while (before - after >= sizeof(arena));
}
