/*
 * The library on the double of the driver, with the fake daemon: what is handed over and how, what streams wait for, and
 * that what a stream may still touch is not used again.
 */
#include "cuda_fixture.h"
#include <poll.h>

TEST(an_allocation_is_handed_over_once_and_used_where_it_is)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	CUuuid uuid;

	CU(cuDeviceGetUuid(&uuid, 0));
	for (unsigned i = 1; i <= 3; i++) {
		_cleanup_(bps_request_freep) struct bps_request *request = NULL;

		fill(&f, ptr + 4096, i);
		request = submit(&f, ptr + 4096, ptr + 64 * i * 4096);
		ASSERT_OK(bps_request_wait_stream(request, f.stream, BPS_FOREVER));
		assert_filled(&f, ptr + 64 * i * 4096, i + 1);
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		ASSERT_EQ(told(f.fake)->n_devices, 1);
		ASSERT_EQ(told(f.fake)->device_kind, MEMORY_CUDA_IPC);
		ASSERT_EQ(told(f.fake)->handle_len, 64);
		ASSERT_MEM(told(f.fake)->device, uuid.bytes, 16);
		ASSERT_EQ(told(f.fake)->entry.input_offset, 4096);
		ASSERT_EQ(told(f.fake)->entry.output_offset, 64 * i * 4096);
		ASSERT_EQ(told(f.fake)->entry.membership, 0);
	}
	ASSERT_TRUE(!bps_client_notice(f.client));
	ASSERT_EQ(told(f.fake)->n_shares, 0);
}

TEST(mapped_memory_is_handed_over_as_a_descriptor)
{
	FIXTURE;
	CUdeviceptr ptr = map_pieces(1);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	fill(&f, ptr + 512, 5);
	request = submit(&f, ptr + 512, ptr + 512);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, BPS_FOREVER));
	assert_filled(&f, ptr + 512, 6);
	ASSERT_EQ(told(f.fake)->device_kind, MEMORY_CUDA_FD);
	ASSERT_EQ(told(f.fake)->handle_len, 0);
	ASSERT_EQ(told(f.fake)->entry.input_offset, 512);
	ASSERT_TRUE(!bps_client_notice(f.client));
}

/* Through the arena, in the order of a stream and by the host, in place and not. */
static void assert_staged(struct fixture *f, CUdeviceptr in, CUdeviceptr out)
{
	for (unsigned i = 0; i < 4; i++) {
		_cleanup_(bps_request_freep) struct bps_request *request = NULL;
		CUdeviceptr to = i & 1 ? in : out;

		fill(f, in, 10 + i);
		request = submit(f, in, to);
		if (i & 2) {
			ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		} else {
			ASSERT_OK(bps_request_wait_stream(request, f->stream, BPS_FOREVER));
			ASSERT_OK(bps_request_wait_stream(request, f->stream, BPS_FOREVER));
		}
		assert_filled(f, to, 11 + i);
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	}
	ASSERT_EQ(told(f->fake)->device_kind, MEMORY_CUDA_FD);
	ASSERT_CONTAINS(bps_client_notice(f->client), "is copied there before");
	ASSERT_TRUE(!bps_client_notice(f->client));
}

TEST(managed_memory_is_staged_on_its_device)
{
	FIXTURE;
	CUdeviceptr in, out;

	in = managed();
	out = managed();
	assert_staged(&f, in, out);
	ASSERT_EQ(told(f.fake)->n_devices, 1);
}

TEST(memory_of_a_pool_is_staged_on_its_device)
{
	FIXTURE;
	CUdeviceptr in, out;

	in = pooled();
	out = pooled();
	assert_staged(&f, in, out);
}

TEST(what_lies_in_several_pieces_is_staged_on_its_device)
{
	FIXTURE;
	CUdeviceptr ptr = map_pieces(3);

	assert_staged(&f, ptr + WIDE - 400, ptr + 2 * WIDE - 400);
	ASSERT_EQ(told(f.fake)->n_devices, 1);
}

TEST(a_piece_of_several_is_handed_over)
{
	FIXTURE;
	CUdeviceptr ptr = map_pieces(3);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	fill(&f, ptr + WIDE, 1);
	request = submit(&f, ptr + WIDE, ptr + 2 * WIDE);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, BPS_FOREVER));
	assert_filled(&f, ptr + 2 * WIDE, 2);
	ASSERT_EQ(told(f.fake)->n_devices, 2);
	ASSERT_TRUE(!bps_client_notice(f.client));
}

static void assert_by_host(struct fixture *f, const char *why)
{
	CUdeviceptr ptr = alloc(f, WIDE);

	for (unsigned i = 0; i < 4; i++) {
		_cleanup_(bps_request_freep) struct bps_request *request = NULL;
		CUdeviceptr out = i & 1 ? ptr : ptr + WIDE / 2;

		fill(f, ptr, i);
		request = submit(f, ptr, out);
		if (i & 2)
			ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		else
			ASSERT_OK(bps_request_wait_stream(request, f->stream, BPS_FOREVER));
		assert_filled(f, out, i + 1);
	}
	ASSERT_CONTAINS(bps_client_notice(f->client), why);
	ASSERT_TRUE(!bps_client_notice(f->client));
	ASSERT_TRUE(told(f->fake)->n_shares > 0);
}

TEST(without_a_driver_of_the_daemon_memory_goes_through_the_host)
{
	FIXTURE_WITH(0);

	assert_by_host(&f, "bps-daemon has no CUDA driver");
	ASSERT_EQ(told(f.fake)->n_devices, 0);
}

TEST(as_the_environment_says_memory_goes_through_the_host)
{
	setenv("BPS_CUDA", "host", 1);
	FIXTURE;

	assert_by_host(&f, "BPS_CUDA=host");
	ASSERT_EQ(told(f.fake)->n_devices, 0);
}

TEST(the_environment_is_checked)
{
	setenv("BPS_CUDA", "off", 1);
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, N * 4);
	struct bps_submit_params params = params_of(&f, ptr, ptr);
	struct bps_request *request;

	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL, "BPS_CUDA is \"off\"");
}

TEST(what_the_daemon_cannot_import_goes_through_the_host)
{
	FIXTURE;

	FAKE_SET(f.fake, device_status, -ENODEV);
	assert_by_host(&f, "no such device here");
	/* An allocation, and an arena in its place; then it is known. */
	ASSERT_EQ(told(f.fake)->n_devices, 3);
}

TEST(rows_go_through_the_host)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	struct bps_submit_params params = params_of(&f, ptr, ptr + WIDE / 2);
	int64_t in_rows[3] = { 4, 1, 7 }, out_rows[5];
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	uint64_t n;

	params.operation = BPS_PUSH_PULL_ROWS;
	params.width = 100;
	params.input_count = 300;
	params.output_count = 500;
	params.input_rows = in_rows;
	params.output_rows = out_rows;
	CU(cuMemsetD8Async(ptr, 8, 1200, f.stream));
	CU(cuMemsetD8Async(ptr + WIDE / 2, 99, 2000, f.stream));
	ASSERT_OK(bps_submit(f.tensor, &params, &request));
	ASSERT_OK(bps_request_wait_stream(request, f.stream, BPS_FOREVER));
	ASSERT_OK(bps_request_rows(request, &n));
	ASSERT_EQ(n, 3);
	ASSERT_MEM(out_rows, in_rows, sizeof(in_rows));
	CU(cuStreamSynchronize(f.stream));
	ASSERT_EQ(((uint8_t *)host_of(ptr + WIDE / 2))[1199], 9);
	ASSERT_EQ(((uint8_t *)host_of(ptr + WIDE / 2))[1200], 99);
	ASSERT_EQ(told(f.fake)->n_devices, 0);
}

TEST(the_input_is_what_the_stream_makes_of_it)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	struct gate gate;

	FAKE_SET(f.fake, hold, true);
	fill(&f, ptr, 1);
	gate = gate_close(&f);
	fill(&f, ptr, 50);
	request = submit(&f, ptr, ptr + WIDE / 2);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, 0));
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	ASSERT_EQ(bps_request_poll(request), 0);
	ASSERT_FAILS(bps_request_wait(request, 0), ETIMEDOUT, "still under way");
	gate_open(&gate);
	fake_complete(f.fake, 0, 0, NULL);
	assert_filled(&f, ptr + WIDE / 2, 51);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
}

TEST(another_stream_waits_too)
{
	FIXTURE;
	CUdeviceptr ptr, out;
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	struct fixture other = f;
	struct gate gate;

	/* Staged: one stream copies, and the other waits for that. */
	ptr = managed();
	out = managed();
	CU(cuStreamCreate(&other.stream, CU_STREAM_NON_BLOCKING));
	FAKE_SET(f.fake, hold, true);
	fill(&f, ptr, 3);
	request = submit(&f, ptr, out);
	gate = gate_close(&f);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, 0));
	ASSERT_OK(bps_request_wait_stream(request, other.stream, 0));
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	fake_complete(f.fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	gate_open(&gate);
	assert_filled(&other, out, 4);
	CU(cuStreamDestroy(other.stream));
}

/* After this the stream has come to its end, or the test fails by its limit. */
static void assert_goes_on(struct fixture *f)
{
	while (cu->cuStreamQuery(f->stream) == CUDA_ERROR_NOT_READY) {
		(void)bps_client_dispatch(f->client);
		(void)poll(NULL, 0, 1);
	}
	CU(cuStreamSynchronize(f->stream));
}

TEST(a_failure_lets_the_stream_go_on)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	FAKE_SET(f.fake, hold, true);
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, 0));
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	fake_complete(f.fake, 0, -ECONNRESET, "rank 1 died");
	assert_goes_on(&f);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ECONNRESET, "rank 1 died");
	ASSERT_FAILS(bps_request_wait_stream(request, f.stream, 0), ECONNRESET, "rank 1 died");
}

TEST(the_loss_of_the_daemon_lets_the_stream_go_on_and_is_the_end)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	struct bps_submit_params params = params_of(&f, ptr, ptr);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL, *after = NULL;

	FAKE_SET(f.fake, hold, true);
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, 0));
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	fake_die(f.fake, NULL);
	assert_goes_on(&f);
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ESHUTDOWN, "has gone");
	ASSERT_FAILS(bps_submit(f.tensor, &params, &after), ESHUTDOWN, "has gone");
}

/* The job's ledger names no memory of devices: from the first on it ends with the daemon's process. */
TEST(a_job_that_handed_memory_over_does_not_outlive_the_daemon)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	struct bps_join_params join = { .size = sizeof(join), .world_size = 1 };
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	ASSERT_OK(bps_client_leave(f.client));
	FAKE_SET(f.fake, ledger, true);
	ASSERT_OK(bps_client_join(f.client, &join));
	bps_tensor_free(f.tensor);
	ASSERT_OK(bps_tensor_declare(f.client, "tensor", BPS_FLOAT32, N, &f.tensor));
	request = submit(&f, ptr, ptr);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	fake_restart(f.fake);
	while (!bps_client_dispatch(f.client))
		(void)poll(NULL, 0, 1);
	ASSERT_FAILS(bps_client_dispatch(f.client), ESHUTDOWN, "has gone");
	ASSERT_EQ(told(f.fake)->n_resumes, 0);
}

TEST(one_that_copies_through_the_host_does)
{
	FIXTURE_WITH(0);
	CUdeviceptr ptr = alloc(&f, WIDE);
	struct bps_join_params join = { .size = sizeof(join), .world_size = 1 };
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	ASSERT_OK(bps_client_leave(f.client));
	FAKE_SET(f.fake, ledger, true);
	FAKE_SET(f.fake, hold, true);
	ASSERT_OK(bps_client_join(f.client, &join));
	bps_tensor_free(f.tensor);
	ASSERT_OK(bps_tensor_declare(f.client, "tensor", BPS_FLOAT32, N, &f.tensor));
	fill(&f, ptr, 40);
	request = submit(&f, ptr, ptr);
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	FAKE_SET(f.fake, hold, false);
	fake_restart(f.fake);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, BPS_FOREVER));
	ASSERT_EQ(told(f.fake)->n_resumes, 1);
	assert_filled(&f, ptr, 41);
}

TEST(a_slot_is_not_used_again_before_its_stream_has_come_to_it)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	struct bps_request *request;
	struct fixture other = f;
	struct gate gate;
	uint32_t slot;

	CU(cuStreamCreate(&other.stream, CU_STREAM_NON_BLOCKING));
	FAKE_SET(f.fake, hold, true);
	gate = gate_close(&f);
	request = submit(&f, ptr, ptr);
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	slot = told(f.fake)->entry.slot;
	fake_complete(f.fake, 0, -ETIME, "rank 3 is late");
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ETIME, "rank 3");
	bps_request_free(request);
	FAKE_SET(f.fake, hold, false);
	for (unsigned i = 0; i < 3; i++) {
		request = submit(&other, ptr + WIDE / 2, ptr + WIDE / 2);
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		ASSERT_TRUE(told(f.fake)->entry.slot != slot);
		bps_request_free(request);
	}
	gate_open(&gate);
	CU(cuStreamSynchronize(f.stream));
	/* A stack: the one that lingered is the next. */
	request = submit(&other, ptr + WIDE / 2, ptr + WIDE / 2);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_EQ(told(f.fake)->entry.slot, slot);
	bps_request_free(request);
	CU(cuStreamDestroy(other.stream));
}

/* The result of a request that has ended lies in the arena until the stream has fetched it. */
TEST(a_staged_piece_is_not_used_again_before_it_is_copied)
{
	FIXTURE;
	struct fixture other = f;
	CUdeviceptr a, b;
	struct bps_request *request;
	struct gate gate;

	a = managed();
	b = managed();
	CU(cuStreamCreate(&other.stream, CU_STREAM_NON_BLOCKING));
	FAKE_SET(f.fake, hold, true);
	fill(&f, a, 20);
	request = submit(&f, a, a);
	gate = gate_close(&f);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, 0));
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	fake_complete(f.fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	FAKE_SET(f.fake, hold, false);
	fill(&other, b, 70);
	request = submit(&other, b, b);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	gate_open(&gate);
	assert_filled(&f, a, 21);
	assert_filled(&other, b, 71);
	CU(cuStreamDestroy(other.stream));
}

TEST(memory_at_the_address_of_other_memory_is_shared_anew)
{
	FIXTURE;
	CUdeviceptr ptr;

	CU(cuMemAddressReserve(&ptr, WIDE, 0, 0, 0));
	for (unsigned i = 0; i < 4; i++) {
		_cleanup_(bps_request_freep) struct bps_request *request = NULL;

		map_piece(ptr);
		fill(&f, ptr, i);
		request = submit(&f, ptr, ptr);
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		assert_filled(&f, ptr, i + 1);
		CU(cuMemUnmap(ptr, WIDE));
		ASSERT_EQ(told(f.fake)->n_devices, i + 1);
	}
	/* What was freed is let go with the next. */
	ASSERT_EQ(told(f.fake)->n_unshares, 3);
	CU(cuMemAddressFree(ptr, WIDE));
}

TEST(the_daemon_lets_go_before_memory_is_freed)
{
	FIXTURE;
	CUdeviceptr a = alloc(&f, WIDE), b;
	_cleanup_(bps_request_freep) struct bps_request *held = NULL;
	struct bps_request *request;

	ASSERT_OK(bps_cuda_release(f.client, NULL, 0));
	request = submit(&f, a, a);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	b = alloc(&f, WIDE);
	FAKE_SET(f.fake, hold, true);
	held = submit(&f, b, b);
	fake_await(f.fake, &f.fake->told.n_entries, 2);
	ASSERT_FAILS(bps_cuda_release(f.client, (void *)(uintptr_t)(b + 5), 1), EBUSY, "under way");
	ASSERT_OK(bps_cuda_release(f.client, (void *)(uintptr_t)(a + WIDE - 1), 1));
	ASSERT_EQ(told(f.fake)->n_unshares, 1);
	ASSERT_OK(bps_cuda_release(f.client, (void *)(uintptr_t)a, WIDE));
	ASSERT_EQ(told(f.fake)->n_unshares, 1);
	fake_complete(f.fake, 1, 0, NULL);
	ASSERT_OK(bps_request_wait(held, BPS_FOREVER));
	ASSERT_OK(bps_cuda_release(f.client, NULL, 0));
	ASSERT_EQ(told(f.fake)->n_unshares, 2);
	release_last();
	release_last();
}

TEST(nothing_is_shared_beyond_the_job)
{
	FIXTURE;
	CUdeviceptr a = alloc(&f, WIDE), b;
	struct bps_join_params join = { .size = sizeof(join), .world_size = 1 };
	struct bps_request *request;

	for (unsigned i = 1; i <= 2; i++) {
		b = managed();
		fill(&f, a, i);
		request = submit(&f, a, b);
		ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		bps_request_free(request);
		assert_filled(&f, b, i + 1);
		ASSERT_EQ(told(f.fake)->n_devices, 2 * i);
		ASSERT_OK(bps_client_leave(f.client));
		ASSERT_OK(bps_client_join(f.client, &join));
		bps_tensor_free(f.tensor);
		ASSERT_OK(bps_tensor_declare(f.client, "tensor", BPS_FLOAT32, N, &f.tensor));
		ASSERT_EQ(told(f.fake)->n_unshares, 2 * i);
	}
}

TEST(what_does_not_fit)
{
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE), elsewhere;
	float host[N] = { 0 };
	struct bps_submit_params params = params_of(&f, ptr, ptr);
	struct bps_request *request;
	CUcontext other;

	params.output = host;
	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL,
		     "output is not on a CUDA device");
	params.memory = BPS_MEMORY_HOST;
	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL, "a stream, but");
	params.memory = 2;
	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL, "2 is no kind of memory");
	params = params_of(&f, ptr, ptr + 8);
	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL, "overlap");
	params = params_of(&f, ptr, ptr + 2);
	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL, "not aligned");

	CU(cuDevicePrimaryCtxRetain(&other, 1));
	CU(cuCtxPushCurrent(other));
	elsewhere = alloc(&f, WIDE);
	CU(cuCtxPopCurrent(&other));
	params = params_of(&f, ptr, elsewhere);
	ASSERT_FAILS(bps_submit(f.tensor, &params, &request), EINVAL,
		     "input is on CUDA device 0, output on 1");
	/* Nothing was begun. */
	ASSERT_EQ(told(f.fake)->n_entries, 0);
}

/* The default stream of the memory's context, with another one current. */
TEST(the_default_stream_is_that_of_the_memory)
{
	FIXTURE;
	struct fixture on_default = f;
	CUdeviceptr ptr = alloc(&f, WIDE);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;
	CUcontext other, current;

	on_default.stream = NULL;
	fill(&on_default, ptr, 31);
	CU(cuDevicePrimaryCtxRetain(&other, 1));
	CU(cuCtxPushCurrent(other));
	request = submit(&on_default, ptr, ptr);
	ASSERT_OK(bps_request_wait_stream(request, NULL, BPS_FOREVER));
	CU(cuCtxGetCurrent(&current));
	ASSERT_TRUE(current == other);
	CU(cuCtxPopCurrent(&other));
	assert_filled(&on_default, ptr, 32);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
}

TEST(the_host_waits_where_the_environment_says_so)
{
	setenv("BPS_CUDA_BLOCKING", "1", 1);
	FIXTURE;
	CUdeviceptr ptr = alloc(&f, WIDE);
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	FAKE_SET(f.fake, hold, true);
	request = submit(&f, ptr, ptr);
	ASSERT_FAILS(bps_request_wait_stream(request, f.stream, 1), ETIMEDOUT, "under way");
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	fake_complete(f.fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait_stream(request, f.stream, BPS_FOREVER));
	ASSERT_EQ(bps_request_poll(request), 1);
}

TEST(requests_on_the_host_are_waited_for_there)
{
	FIXTURE;
	float host[N] = { 0 };
	struct bps_submit_params params = {
		.size = sizeof(params), .operation = BPS_PUSH_PULL, .input = host, .output = host
	};
	_cleanup_(bps_request_freep) struct bps_request *request = NULL;

	ASSERT_OK(bps_submit(f.tensor, &params, &request));
	ASSERT_OK(bps_request_wait_stream(request, NULL, BPS_FOREVER));
	ASSERT_EQ(((uint8_t *)host)[N], 1);
}

struct worker {
	struct fixture f;
	unsigned number;
	CUdeviceptr ptr;
};

static void *worker_run(void *data)
{
	struct worker *w = data;
	char name[32];

	CU(cuCtxSetCurrent(w->f.context));
	CU(cuStreamCreate(&w->f.stream, CU_STREAM_NON_BLOCKING));
	(void)snprintf(name, sizeof(name), "tensor %u", w->number);
	ASSERT_OK(bps_tensor_declare(w->f.client, name, BPS_FLOAT32, N, &w->f.tensor));
	for (unsigned i = 0; i < 20; i++) {
		struct bps_request *request;

		fill(&w->f, w->ptr, i);
		request = submit(&w->f, w->ptr, w->ptr);
		if (i % 3)
			ASSERT_OK(bps_request_wait_stream(request, w->f.stream, BPS_FOREVER));
		else
			ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
		assert_filled(&w->f, w->ptr, i + 1);
		bps_request_free(request);
	}
	CU(cuStreamDestroy(w->f.stream));
	bps_tensor_free(w->f.tensor);
	return NULL;
}

TEST(threads_do_not_disturb_each_other)
{
	FIXTURE;
	struct worker workers[6];
	pthread_t threads[6];
	CUdeviceptr mapped = map_pieces(2);

	for (unsigned i = 0; i < 6; i++) {
		workers[i] = (struct worker){ .f = f, .number = i, .ptr = mapped + i * 65536 };
		if (i == 4)
			workers[i].ptr = mapped + WIDE - 1200;
		if (i == 5)
			workers[i].ptr = managed();
		ASSERT_OK(pthread_create(&threads[i], NULL, worker_run, &workers[i]));
	}
	for (unsigned i = 0; i < 6; i++)
		ASSERT_OK(pthread_join(threads[i], NULL));
}

static void *bare_run(void *data)
{
	struct worker *w = data;
	struct bps_request *request;
	CUcontext current = NULL;

	CU(cuCtxSetCurrent(NULL));
	request = submit(&w->f, w->ptr, w->ptr);
	ASSERT_OK(bps_request_wait_stream(request, w->f.stream, BPS_FOREVER));
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
	CU(cuCtxGetCurrent(&current));
	ASSERT_TRUE(!current);
	return NULL;
}

TEST(a_thread_without_a_context_of_its_own)
{
	FIXTURE;
	struct worker worker = { .f = f, .ptr = alloc(&f, WIDE) };
	pthread_t thread;

	for (unsigned i = 0; i < 2; i++) {
		fill(&f, worker.ptr, 6);
		ASSERT_OK(pthread_create(&thread, NULL, bare_run, &worker));
		ASSERT_OK(pthread_join(thread, NULL));
		assert_filled(&f, worker.ptr, 7);
		ASSERT_TRUE(!bps_client_notice(f.client));
		/* Mapped memory has no context that it could be. */
		worker.ptr = map_pieces(1);
	}
}

TEST(the_plan_of_the_node_is_told_to_join)
{
	struct fake *fake = fake_new();
	struct bps_join_params join = { .size = sizeof(join) };
	struct bps_client *client = fake_open(fake);

	setenv("BPS_GPU_REDUCE", "switch", 1);
	ASSERT_OK(bps_join_params_from_settings(&join));
	ASSERT_EQ(join.gpu_reduce, BPS_GPU_REDUCE_SWITCH);
	ASSERT_OK(bps_client_join(client, &join));
	ASSERT_EQ(told(fake)->gpu_reduce, GPU_REDUCE_SWITCH);
	setenv("BPS_GPU_REDUCE", "tree", 1);
	ASSERT_FAILS(bps_join_params_from_settings(&join), EINVAL, "BPS_GPU_REDUCE is \"tree\"");
	setenv("BPS_GPU_REDUCE", "roots", 1);
	ASSERT_OK(bps_join_params_from_settings(&join));
	ASSERT_EQ(join.gpu_reduce, BPS_GPU_REDUCE_ROOTS);
	ASSERT_OK(bps_client_leave(client));
	join.gpu_reduce = 5;
	ASSERT_FAILS(bps_client_join(client, &join), EINVAL, "gpu_reduce is 5");
	bps_client_close(client);
	fake_free(fake);
}

TEST(roots_are_told_to_join)
{
	static const char *const bad[] = { "x", "1,", ",1", "1 2", "-1", "64", "1,,2", "+1" };
	struct fake *fake = fake_new();
	struct bps_join_params join = { .size = sizeof(join) };
	struct bps_client *client = fake_open(fake);

	setenv("BYTEPS_REDUCE_ROOTS", "2,3", 1);
	ASSERT_OK(bps_join_params_from_settings(&join));
	ASSERT_EQ(join.gpu_roots, 0xc);
	setenv("BPS_GPU_ROOTS", "0,63", 1);
	ASSERT_OK(bps_join_params_from_settings(&join));
	ASSERT_TRUE(join.gpu_roots == (UINT64_C(1) << 63 | 1));
	for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
		setenv("BPS_GPU_ROOTS", bad[i], 1);
		ASSERT_FAILS(bps_join_params_from_settings(&join), EINVAL, "BPS_GPU_ROOTS is \"");
	}
	unsetenv("BPS_GPU_ROOTS");
	setenv("BYTEPS_REDUCE_ROOTS", "one", 1);
	ASSERT_FAILS(bps_join_params_from_settings(&join), EINVAL, "BYTEPS_REDUCE_ROOTS is \"one");
	unsetenv("BYTEPS_REDUCE_ROOTS");
	ASSERT_OK(bps_join_params_from_settings(&join));
	ASSERT_EQ(join.gpu_roots, 0);
	join.gpu_roots = 3;
	ASSERT_FAILS(bps_client_join(client, &join), EINVAL,
		     "has local rank 1, but local_size is 1");
	join.gpu_roots = 1;
	ASSERT_OK(bps_client_join(client, &join));
	ASSERT_EQ(told(fake)->gpu_roots, 1);
	ASSERT_OK(bps_client_leave(client));
	bps_client_close(client);
	fake_free(fake);
}
