/* Memory of devices through a daemon: the same bits as memory of the host, in the order of streams, whatever memory it is. */
#include "trainer.h"

#include <signal.h>
#include <stdlib.h>

/* Several parts, and no multiple of anything. */
#define N	   ((size_t)300007)
#define RANKS	   2u
#define SEED(rank) (77u + (rank))

void check_bps(const char *call, int result)
{
	if (result < 0)
		seen("%.40s: %.100s", call, bps_error());
}

void rank_open(struct rank *rank, const char *job, uint32_t number, uint32_t n_ranks,
	       int gpu_reduce)
{
	struct bps_join_params params = {
		.size = sizeof(params),
		.job = job,
		.rank = number,
		.world_size = n_ranks,
		.local_rank = number,
		.local_size = n_ranks,
		.n_nodes = 1,
		.gpu_reduce = gpu_reduce,
	};
	const char *reason;
	int n;

	if (!cu && cuda_load(&cu, &reason))
		seen("%s", reason);
	CU(cuInit(0));
	CU(cuDeviceGetCount(&n));
	rank->device = (int)number % n;
	(void)start(rank->device);
	CU(cuStreamCreate(&rank->stream, CU_STREAM_NON_BLOCKING));
	BPS(bps_client_open(NULL, &rank->client));
	BPS(bps_client_join(rank->client, &params));
}

void rank_close(struct rank *rank)
{
	BPS(bps_client_leave(rank->client));
	bps_client_close(rank->client);
	CU(cuStreamDestroy(rank->stream));
}

/* Not the same for two rules of one run, nor for two runs. */
static const char *job_name(void)
{
	static char name[32];

	if (!name[0])
		snprintf(name, sizeof(name), "gpu-check-%d", (int)getpid());
	return name;
}

static size_t size_of(int dtype)
{
	static const size_t sizes[] = { 0, 8, 4, 2, 2, 8, 4, 2, 1, 1, 1 };

	return sizes[dtype];
}

/* Numbers whose sums depend on the order, finite in every type; halves by their bits. */
static void fill(void *data, size_t n, int dtype, unsigned seed)
{
	uint32_t x = seed;

	for (size_t i = 0; i < n; i++) {
		x = x * 1664525u + 1013904223u;
		switch (dtype) {
		case BPS_FLOAT64:
			((double *)data)[i] = (double)(int32_t)x * 0x1p-20;
			break;
		case BPS_FLOAT32:
			((float *)data)[i] = (float)(int32_t)x * 0x1p-20f;
			break;
		case BPS_FLOAT16: /* sign, exponent 8 to 23 */
			((uint16_t *)data)[i] = (uint16_t)((x >> 16 & 0xbfff) | 0x2000);
			break;
		case BPS_BFLOAT16: /* sign, exponent around 1 */
			((uint16_t *)data)[i] = (uint16_t)((x >> 16 & 0x83ff) | 0x3c00);
			break;
		case BPS_BOOL:
			((uint8_t *)data)[i] = x >> 31;
			break;
		default:
			for (size_t b = 0; b < size_of(dtype); b++)
				((uint8_t *)data)[i * size_of(dtype) + b] =
					(uint8_t)(x >> (8 + 3 * b));
		}
	}
}

/* What one operation takes and gives, in elements. */
struct shape {
	int operation, reduction, dtype;
	size_t n_in, n_out;
};

static void run_operation(struct rank *rank, struct bps_tensor *tensor, const struct shape *shape,
			  const void *in, void *out, bool on_device)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = shape->operation,
		.reduction = shape->reduction,
		.input = in,
		.output = out,
		.input_count = shape->n_in,
		.output_count = shape->n_out,
		.root = 1,
		.memory = on_device ? BPS_MEMORY_CUDA : BPS_MEMORY_HOST,
		.stream = on_device ? rank->stream : NULL,
	};
	struct bps_request *request;

	BPS(bps_submit(tensor, &params, &request));
	if (on_device)
		BPS(bps_request_wait_stream(request, rank->stream, BPS_FOREVER));
	else
		BPS(bps_request_wait(request, BPS_FOREVER));
	if (on_device)
		CU(cuStreamSynchronize(rank->stream));
	BPS(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
}

/* Whether the library had something to say of how it was done. */
static void see_notice(struct rank *rank, bool want)
{
	const char *notice = bps_client_notice(rank->client);

	if (want != (notice != NULL))
		seen("%.100s", notice ? notice : "no notice");
}

/* By host memory, and by memory of the device; true: the same bits. */
static bool same_bits(struct rank *rank, uint32_t number, const char *name,
		      const struct shape *shape)
{
	size_t size = size_of(shape->dtype), len_in = shape->n_in * size,
	       len_out = shape->n_out * size;
	char *in = pinned(len_in), *want = pinned(len_out), *got = pinned(len_out), tensor_name[64];
	CUdeviceptr in_device, out_device;
	struct bps_tensor *tensor;
	bool same;

	fill(in, shape->n_in, shape->dtype, SEED(number));
	memset(want, 0xee, len_out);
	memset(got, 0xdd, len_out);
	CU(cuMemAlloc(&in_device, len_in));
	CU(cuMemAlloc(&out_device, len_out));
	snprintf(tensor_name, sizeof(tensor_name), "%s-%d", name, shape->dtype);
	BPS(bps_tensor_declare(rank->client, tensor_name, shape->dtype, BPS_VARIABLE, &tensor));
	run_operation(rank, tensor, shape, in, want, false);
	CU(cuMemcpyHtoDAsync(in_device, in, len_in, rank->stream));
	run_operation(rank, tensor, shape, (void *)(uintptr_t)in_device,
		      (void *)(uintptr_t)out_device, true);
	CU(cuMemcpyDtoHAsync(got, out_device, len_out, rank->stream));
	CU(cuStreamSynchronize(rank->stream));
	see_notice(rank, false);
	same = !memcmp(want, got, len_out);
	BPS(bps_cuda_release(rank->client, NULL, 0));
	bps_tensor_free(tensor);
	CU(cuMemFree(in_device));
	CU(cuMemFree(out_device));
	CU(cuMemFreeHost(in));
	CU(cuMemFreeHost(want));
	CU(cuMemFreeHost(got));
	return same;
}

/* -- Both ranks ----------------------------------------------------------------------------------------------- */

/* What each rank does; number and the rank itself. */
static void (*both)(struct rank *rank, uint32_t number);
static int reduce_by;

static void second(int fd)
{
	struct note note = { .number = 0 };
	struct rank rank;

	(void)hear(fd, &note);
	rank_open(&rank, (const char *)note.handle.reserved, 1, RANKS, reduce_by);
	both(&rank, 1);
	rank_close(&rank);
	tell(fd, &note, -1);
}

static void run_both(void (*run)(struct rank *rank, uint32_t number), int gpu_reduce)
{
	struct note note = { .number = 0 };
	struct rank rank;
	int fd;

	both = run;
	reduce_by = gpu_reduce;
	(void)peer_new(second, &fd);
	snprintf(note.handle.reserved, sizeof(note.handle.reserved), "%s", job_name());
	tell(fd, &note, -1);
	rank_open(&rank, job_name(), 0, RANKS, gpu_reduce);
	run(&rank, 0);
	rank_close(&rank);
	(void)hear(fd, &note);
}

static void do_types(struct rank *rank, uint32_t number)
{
	for (int dtype = BPS_FLOAT64; dtype <= BPS_BOOL; dtype++)
		for (int reduction = BPS_SUM; reduction <= BPS_MAX; reduction++) {
			struct shape shape = { BPS_PUSH_PULL, reduction, dtype, N, N };
			char name[16];

			if (dtype == BPS_BOOL && reduction == BPS_AVERAGE)
				continue;
			snprintf(name, sizeof(name), "types-%d", reduction);
			if (!same_bits(rank, number, name, &shape))
				seen("type %d, reduction %d: other bits", dtype, reduction);
		}
}

static void run_types(void)
{
	run_both(do_types, BPS_GPU_REDUCE_HOST);
	seen("the same bits");
}

static void do_operations(struct rank *rank, uint32_t number)
{
	static const struct {
		const char *name;
		struct shape shape;
	} operations[] = {
		{ "broadcast", { BPS_BROADCAST, 0, BPS_FLOAT32, N, N } },
		{ "all-gather", { BPS_ALL_GATHER, 0, BPS_FLOAT32, N, RANKS * N } },
		{ "reduce-scatter", { BPS_REDUCE_SCATTER, BPS_SUM, BPS_FLOAT32, RANKS * N, N } },
		{ "all-to-all", { BPS_ALL_TO_ALL, 0, BPS_FLOAT32, RANKS * N, RANKS * N } },
	};

	for (size_t i = 0; i < ARRAY_SIZE(operations); i++)
		if (!same_bits(rank, number, operations[i].name, &operations[i].shape))
			seen("%s: other bits", operations[i].name);
}

static void run_operations(void)
{
	run_both(do_operations, BPS_GPU_REDUCE_HOST);
	seen("the same bits");
}

/* Sums of small whole numbers, which are right in any order; many rounds without a host that waits in between. */
static void sum_in_order(struct rank *rank, uint32_t number, CUdeviceptr data, int n_rounds)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.reduction = BPS_SUM,
		.input = (void *)(uintptr_t)data,
		.output = (void *)(uintptr_t)data,
		.memory = BPS_MEMORY_CUDA,
		.stream = rank->stream,
	};
	float *in = pinned(N * 4), *out = pinned(N * 4 * (size_t)n_rounds);
	struct bps_request *requests[32];
	struct bps_tensor *tensor;

	BPS(bps_tensor_declare(rank->client, "ordered", BPS_FLOAT32, N, &tensor));
	for (size_t i = 0; i < N; i++)
		in[i] = (float)(i % 89 + number);
	for (int r = 0; r < n_rounds; r++) {
		CU(cuMemcpyHtoDAsync(data, in, N * 4, rank->stream));
		BPS(bps_submit(tensor, &params, &requests[r]));
		BPS(bps_request_wait_stream(requests[r], rank->stream, BPS_FOREVER));
		CU(cuMemcpyDtoHAsync(out + (size_t)r * N, data, N * 4, rank->stream));
	}
	CU(cuStreamSynchronize(rank->stream));
	for (int r = 0; r < n_rounds; r++) {
		BPS(bps_request_wait(requests[r], BPS_FOREVER));
		bps_request_free(requests[r]);
		for (size_t i = 0; i < N; i++)
			if (out[(size_t)r * N + i] !=
			    (float)(RANKS * (i % 89) + RANKS * (RANKS - 1) / 2))
				seen("round %d, element %zu: %g", r, i,
				     (double)out[(size_t)r * N + i]);
	}
	bps_tensor_free(tensor);
}

static void do_plain(struct rank *rank, uint32_t number)
{
	CUdeviceptr data;

	CU(cuMemAlloc(&data, N * 4));
	sum_in_order(rank, number, data, 16);
	see_notice(rank, false);
	BPS(bps_cuda_release(rank->client, NULL, 0));
	CU(cuMemFree(data));
}

static void run_auto(void)
{
	run_both(do_plain, BPS_GPU_REDUCE_AUTO);
	seen("right sums");
}

static void run_host(void)
{
	run_both(do_plain, BPS_GPU_REDUCE_HOST);
	seen("right sums");
}

static void run_nccl(void)
{
	run_both(do_plain, BPS_GPU_REDUCE_NCCL);
	seen("right sums");
}

static void do_mapped(struct rank *rank, uint32_t number)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = rank->device },
	};
	CUmemAccessDesc access = { .location = prop.location,
				   .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
	CUmemGenericAllocationHandle handle;
	CUdeviceptr data;
	size_t len;

	CU(cuMemGetAllocationGranularity(&len, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
	len *= (N * 4 + len - 1) / len;
	CU(cuMemAddressReserve(&data, len, 0, 0, 0));
	CU(cuMemCreate(&handle, len, &prop, 0));
	CU(cuMemMap(data, len, 0, handle, 0));
	CU(cuMemSetAccess(data, len, &access, 1));
	sum_in_order(rank, number, data, 4);
	see_notice(rank, false);
	BPS(bps_cuda_release(rank->client, NULL, 0));
}

static void run_mapped(void)
{
	run_both(do_mapped, BPS_GPU_REDUCE_AUTO);
	seen("right sums, handed over");
}

static void do_pool(struct rank *rank, uint32_t number)
{
	CUdeviceptr data;

	CHECK(cu->cuMemAllocAsync);
	CU(cuMemAllocAsync(&data, N * 4, rank->stream));
	sum_in_order(rank, number, data, 4);
	see_notice(rank, true);
}

static void run_pool(void)
{
	run_both(do_pool, BPS_GPU_REDUCE_AUTO);
	seen("right sums, copied and told");
}

/* -- One dies ------------------------------------------------------------------------------------------------- */

static void second_dies(int fd)
{
	struct note note;
	struct rank rank;
	CUdeviceptr data;

	(void)hear(fd, &note);
	rank_open(&rank, (const char *)note.handle.reserved, 1, RANKS, BPS_GPU_REDUCE_AUTO);
	CU(cuMemAlloc(&data, N * 4));
	sum_in_order(&rank, 1, data, 2);
	(void)hear(fd, &note); /* until the other has all that it needs of the job */
	(void)raise(SIGKILL);
}

/* The other's stream is let go, its request ends with an error, and the next job runs. */
static void run_dies(void)
{
	struct bps_submit_params params = { .size = sizeof(params),
					    .operation = BPS_PUSH_PULL,
					    .reduction = BPS_SUM,
					    .memory = BPS_MEMORY_CUDA };
	struct note note = { .number = 0 };
	struct bps_request *request = NULL;
	struct bps_tensor *tensor;
	struct rank rank;
	CUdeviceptr data;
	int fd, r;

	(void)peer_new(second_dies, &fd);
	snprintf(note.handle.reserved, sizeof(note.handle.reserved), "%s", job_name());
	tell(fd, &note, -1);
	rank_open(&rank, job_name(), 0, RANKS, BPS_GPU_REDUCE_AUTO);
	CU(cuMemAlloc(&data, N * 4));
	sum_in_order(&rank, 0, data, 2);
	params.input = params.output = (void *)(uintptr_t)data;
	params.stream = rank.stream;
	BPS(bps_tensor_declare(rank.client, "ordered", BPS_FLOAT32, N, &tensor));
	tell(fd, &note, -1);
	r = bps_submit(tensor, &params, &request);
	if (!r)
		r = bps_request_wait(request, BPS_FOREVER);
	CHECK(r < 0);
	CHECK(comes_to_end(rank.stream));
	bps_request_free(request);
	bps_tensor_free(tensor);
	bps_client_close(rank.client);
	CU(cuStreamDestroy(rank.stream));

	rank_open(&rank, "gpu-check-next", 0, 1, BPS_GPU_REDUCE_AUTO);
	CHECK(same_bits(&rank, 0, "next",
			&(struct shape){ BPS_PUSH_PULL, BPS_SUM, BPS_FLOAT32, N, N }));
	rank_close(&rank);
	seen("an error, and the next job runs");
}

static const struct rule trainer_rules[] = {
	{ "types", "push_pull of all types and reductions, against host memory", "the same bits",
	  true, 1, run_types },
	{ "operations", "all other operations, against host memory", "the same bits", true, 1,
	  run_operations },
	{ "order-host", "rounds one behind the other in a stream, reduced by the host",
	  "right sums", true, 1, run_host },
	{ "order-auto", "the same, reduced as the topology suggests", "right sums", true, 1,
	  run_auto },
	{ "order-nccl", "the same, reduced by NCCL", "right sums", true, 2, run_nccl },
	{ "mapped", "memory of cuMemMap()", "right sums, handed over", true, 1, run_mapped },
	{ "pool", "memory of cuMemAllocAsync()", "right sums, copied and told", true, 1, run_pool },
	{ "dies", "a rank is killed", "an error, and the next job runs", true, 1, run_dies },
	{ NULL, NULL, NULL, false, 0, NULL },
};

static const struct rule *const rules[] = { trainer_rules, NULL };
static const struct rule *const times[] = { trainer_times, NULL };

const struct check_program check_program = { "gpu-trainer", rules, times };
