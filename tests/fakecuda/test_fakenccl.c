/* The doubles of NCCL and NVML: sums of all types, in and out of groups, threads and processes, and what goes wrong. */
#include "double.h"

#include "gpu/nccl_abi.h"
#include "gpu/nvml_abi.h"
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define RANKS 4
/* More than a few chunks of the double, and no multiple of anything. */
#define N ((size_t)50021)

static const struct nccl *nccl;

#define NCCL(call)                                                                             \
	do {                                                                                   \
		ncclResult_t r_ = nccl->call;                                                  \
		if (r_)                                                                        \
			test_fail(__FILE__, __LINE__, "%s: %s: %s", #call,                     \
				  nccl->ncclGetErrorString(r_), nccl->ncclGetLastError(NULL)); \
	} while (0)
#define NCCL_IS(result, call)                                                                      \
	do {                                                                                       \
		ncclResult_t r_ = nccl->call;                                                      \
		if (r_ != (result))                                                                \
			test_fail(__FILE__, __LINE__, "%s: %s, not %s", #call,                     \
				  nccl->ncclGetErrorString(r_), nccl->ncclGetErrorString(result)); \
	} while (0)

static void load_nccl(void)
{
	const char *reason;

	if (nccl_load(&nccl, &reason))
		test_fail(__FILE__, __LINE__, "%s", reason);
}

struct rank {
	CUcontext context;
	CUstream stream;
	ncclComm_t comm;
	CUdeviceptr in, out;
	void *host;
};

/* One device each, all in this process. */
static void ranks_new(struct rank ranks[RANKS], size_t len)
{
	ncclComm_t comms[RANKS];

	load_nccl();
	for (int i = 0; i < RANKS; i++) {
		struct rank *r = &ranks[i];

		r->context = start(i);
		CU(cuStreamCreate(&r->stream, CU_STREAM_NON_BLOCKING));
		CU(cuMemAlloc(&r->in, len));
		CU(cuMemAlloc(&r->out, len));
		r->host = pinned(len);
	}
	NCCL(ncclCommInitAll(comms, RANKS, NULL));
	for (int i = 0; i < RANKS; i++)
		ranks[i].comm = comms[i];
}

static void ranks_free(struct rank ranks[RANKS])
{
	for (int i = 0; i < RANKS; i++) {
		struct rank *r = &ranks[i];

		if (r->comm)
			NCCL(ncclCommDestroy(r->comm));
		CU(cuCtxSetCurrent(r->context));
		CU(cuStreamDestroy(r->stream));
		CU(cuMemFree(r->in));
		CU(cuMemFree(r->out));
		CU(cuMemFreeHost(r->host));
		CU(cuDevicePrimaryCtxRelease(i));
	}
}

static void upload(struct rank *r, const void *from, size_t len)
{
	CU(cuCtxSetCurrent(r->context));
	memcpy(r->host, from, len);
	CU(cuMemcpyHtoDAsync(r->in, r->host, len, r->stream));
	CU(cuStreamSynchronize(r->stream));
}

static const void *download(struct rank *r, CUdeviceptr from, size_t len)
{
	CU(cuCtxSetCurrent(r->context));
	CU(cuMemcpyDtoHAsync(r->host, from, len, r->stream));
	CU(cuStreamSynchronize(r->stream));
	return r->host;
}

/* -- Types ---------------------------------------------------------------------------------------------------- */

/* A small whole number in each type: sums of a few are exact in all of them. */
static void put(void *to, size_t i, ncclDataType_t type, int value)
{
	uint32_t bits;
	float f = (float)value;

	switch (type) {
	case ncclInt8:
	case ncclUint8:
		((uint8_t *)to)[i] = (uint8_t)value;
		break;
	case ncclInt32:
	case ncclUint32:
		((uint32_t *)to)[i] = (uint32_t)value;
		break;
	case ncclInt64:
	case ncclUint64:
		((uint64_t *)to)[i] = (uint64_t)value;
		break;
	case ncclFloat32:
		((float *)to)[i] = f;
		break;
	case ncclFloat64:
		((double *)to)[i] = value;
		break;
	case ncclBfloat16:
		memcpy(&bits, &f, sizeof(bits));
		((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
		break;
	case ncclFloat16:
		/* Up to 2047 in magnitude: the bits of float32 with another bias. */
		memcpy(&bits, &f, sizeof(bits));
		((uint16_t *)to)[i] = value ? (uint16_t)((bits >> 16 & 0x8000) |
							 ((bits & 0x7fffffff) - 0x38000000) >> 13)
					    : 0;
		break;
	}
}

static size_t size_of(ncclDataType_t type)
{
	static const size_t sizes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2 };

	return sizes[type];
}

static int value_of(int rank, size_t i)
{
	return (int)((i * 7 + (size_t)rank * 3) % 29);
}

static int expected_of(ncclRedOp_t op, size_t i)
{
	int result = value_of(0, i);

	for (int r = 1; r < RANKS; r++) {
		int value = value_of(r, i);

		result = op == ncclMax	 ? MAX(result, value)
			 : op == ncclMin ? MIN(result, value)
					 : result + value;
	}
	return op == ncclAvg ? result / RANKS : result;
}

TEST(all_reduce_of_all_types)
{
	static const ncclRedOp_t ops[] = { ncclSum, ncclMax, ncclMin };
	struct rank ranks[RANKS];
	char *expected = malloc(N * 8), *in = malloc(N * 8);

	ranks_new(ranks, N * 8);
	for (ncclDataType_t type = ncclInt8; type <= ncclBfloat16; type++)
		for (size_t o = 0; o < ARRAY_SIZE(ops); o++) {
			for (int r = 0; r < RANKS; r++) {
				for (size_t i = 0; i < N; i++)
					put(in, i, type, value_of(r, i));
				upload(&ranks[r], in, N * size_of(type));
			}
			for (size_t i = 0; i < N; i++)
				put(expected, i, type, expected_of(ops[o], i));
			NCCL(ncclGroupStart());
			for (int r = 0; r < RANKS; r++)
				NCCL(ncclAllReduce((void *)(uintptr_t)ranks[r].in,
						   (void *)(uintptr_t)ranks[r].out, N, type, ops[o],
						   ranks[r].comm, ranks[r].stream));
			NCCL(ncclGroupEnd());
			for (int r = 0; r < RANKS; r++)
				ASSERT_MEM(download(&ranks[r], ranks[r].out, N * size_of(type)),
					   expected, N * size_of(type));
		}
	ranks_free(ranks);
	free(expected);
	free(in);
}

/* By half, which keeps the sum of the two largest a number; then the operation is gone. */
TEST(elements_are_multiplied_before)
{
	uint16_t half = 0x3800, largest = 0x7bff, nothing = 0;
	struct rank ranks[RANKS];
	ncclRedOp_t ops[RANKS];

	ranks_new(ranks, 64);
	for (int r = 0; r < RANKS; r++) {
		upload(&ranks[r], r < 2 ? &largest : &nothing, 2);
		NCCL(ncclRedOpCreatePreMulSum(&ops[r], &half, ncclFloat16, ncclScalarHostImmediate,
					      ranks[r].comm));
	}
	NCCL(ncclGroupStart());
	for (int r = 0; r < RANKS; r++)
		NCCL(ncclAllReduce((void *)(uintptr_t)ranks[r].in, (void *)(uintptr_t)ranks[r].out,
				   1, ncclFloat16, ops[r], ranks[r].comm, ranks[r].stream));
	NCCL(ncclGroupEnd());
	for (int r = 0; r < RANKS; r++) {
		ASSERT_EQ(*(const uint16_t *)download(&ranks[r], ranks[r].out, 2), largest);
		NCCL(ncclRedOpDestroy(ops[r], ranks[r].comm));
		NCCL_IS(ncclInvalidArgument, ncclRedOpDestroy(ops[r], ranks[r].comm));
	}
	ranks_free(ranks);
}

/* Half types round after each addition: to nearest, ties to even. */
TEST(half_types_round)
{
	static const struct {
		ncclDataType_t type;
		uint16_t in[RANKS], sum;
	} cases[] = {
		{ ncclFloat16, { 0x6800, 0x3c00, 0, 0 }, 0x6800 },	     /* 2048 + 1 = 2048 */
		{ ncclFloat16, { 0x6800, 0x4200, 0, 0 }, 0x6802 },	     /* 2048 + 3 = 2052 */
		{ ncclFloat16, { 0x6800, 0x3c00, 0x3c00, 0x3c00 }, 0x6800 }, /* not 2052 */
		{ ncclFloat16,
		  { 0x0001, 0x0001, 0, 0x8001 },
		  0x0001 },					    /* below the normal numbers */
		{ ncclFloat16, { 0x03ff, 0x0001, 0, 0 }, 0x0400 },  /* up to them */
		{ ncclFloat16, { 0x7bff, 0x4b80, 0, 0 }, 0x7bff },  /* 65504 + 15 */
		{ ncclFloat16, { 0x7bff, 0x4c00, 0, 0 }, 0x7c00 },  /* 65504 + 16 */
		{ ncclFloat16, { 0x7c00, 0xfc00, 0, 0 }, 0x7fff },  /* inf - inf */
		{ ncclBfloat16, { 0x4380, 0x3f80, 0, 0 }, 0x4380 }, /* 256 + 1 = 256 */
		{ ncclBfloat16, { 0x4380, 0x4040, 0, 0 }, 0x4382 }, /* 256 + 3 = 260 */
		{ ncclBfloat16, { 0x7f80, 0xff80, 0, 0 }, 0x7fff },
	};
	struct rank ranks[RANKS];

	ranks_new(ranks, 64);
	for (size_t c = 0; c < ARRAY_SIZE(cases); c++) {
		for (int r = 0; r < RANKS; r++)
			upload(&ranks[r], &cases[c].in[r], 2);
		NCCL(ncclGroupStart());
		for (int r = 0; r < RANKS; r++)
			NCCL(ncclAllReduce((void *)(uintptr_t)ranks[r].in,
					   (void *)(uintptr_t)ranks[r].out, 1, cases[c].type,
					   ncclSum, ranks[r].comm, ranks[r].stream));
		NCCL(ncclGroupEnd());
		for (int r = 0; r < RANKS; r++)
			ASSERT_EQ(*(const uint16_t *)download(&ranks[r], ranks[r].out, 2),
				  cases[c].sum);
	}
	ranks_free(ranks);
}

/* -- Other collectives ---------------------------------------------------------------------------------------- */

static void upload_floats(struct rank *r, int rank, size_t n)
{
	float *in = malloc(n * sizeof(*in));

	for (size_t i = 0; i < n; i++)
		put(in, i, ncclFloat32, value_of(rank, i));
	upload(r, in, n * sizeof(*in));
	free(in);
}

TEST(scattered_and_gathered)
{
	struct rank ranks[RANKS];
	const float *out;
	size_t n = N / RANKS;

	ranks_new(ranks, N * 4);
	for (int r = 0; r < RANKS; r++)
		upload_floats(&ranks[r], r, n * RANKS);
	/* In place: each rank's slice where it lies in the whole. */
	NCCL(ncclGroupStart());
	for (int r = 0; r < RANKS; r++)
		NCCL(ncclReduceScatter((void *)(uintptr_t)ranks[r].in,
				       (void *)(uintptr_t)(ranks[r].in + (size_t)r * n * 4), n,
				       ncclFloat32, ncclSum, ranks[r].comm, ranks[r].stream));
	for (int r = 0; r < RANKS; r++)
		NCCL(ncclAllGather((void *)(uintptr_t)(ranks[r].in + (size_t)r * n * 4),
				   (void *)(uintptr_t)ranks[r].in, n, ncclFloat32, ranks[r].comm,
				   ranks[r].stream));
	NCCL(ncclGroupEnd());
	for (int r = 0; r < RANKS; r++) {
		out = download(&ranks[r], ranks[r].in, n * RANKS * 4);
		for (size_t i = 0; i < n * RANKS; i++)
			ASSERT_EQ(out[i], expected_of(ncclSum, i));
	}
	ranks_free(ranks);
}

TEST(one_root)
{
	struct rank ranks[RANKS];
	const float *out;

	ranks_new(ranks, N * 4);
	for (int r = 0; r < RANKS; r++)
		upload_floats(&ranks[r], r, N);
	NCCL(ncclGroupStart());
	for (int r = 0; r < RANKS; r++)
		NCCL(ncclReduce((void *)(uintptr_t)ranks[r].in,
				(void *)(uintptr_t)(r == 2 ? ranks[r].out : 0), N, ncclFloat32,
				ncclSum, 2, ranks[r].comm, ranks[r].stream));
	NCCL(ncclGroupEnd());
	out = download(&ranks[2], ranks[2].out, N * 4);
	for (size_t i = 0; i < N; i++)
		ASSERT_EQ(out[i], expected_of(ncclSum, i));
	NCCL(ncclGroupStart());
	for (int r = 0; r < RANKS; r++)
		NCCL(ncclBroadcast((void *)(uintptr_t)(r == 1 ? ranks[r].in : 0),
				   (void *)(uintptr_t)ranks[r].out, N, ncclFloat32, 1,
				   ranks[r].comm, ranks[r].stream));
	NCCL(ncclGroupEnd());
	for (int r = 0; r < RANKS; r++) {
		out = download(&ranks[r], ranks[r].out, N * 4);
		for (size_t i = 0; i < N; i++)
			ASSERT_EQ(out[i], value_of(1, i));
	}
	ranks_free(ranks);
}

/* -- Wrong use ------------------------------------------------------------------------------------------------ */

static void all_reduce(struct rank *r, size_t n)
{
	NCCL(ncclAllReduce((void *)(uintptr_t)r->in, (void *)(uintptr_t)r->out, n, ncclFloat32,
			   ncclSum, r->comm, r->stream));
}

/* The first error that is there, looked for as a watchdog would. */
static ncclResult_t async_error(struct rank *r)
{
	ncclResult_t error = ncclSuccess;

	while (!error) {
		NCCL(ncclCommGetAsyncError(r->comm, &error));
		usleep(1000);
	}
	return error;
}

static void abort_all(struct rank ranks[RANKS])
{
	for (int r = 0; r < RANKS; r++) {
		NCCL(ncclCommAbort(ranks[r].comm));
		ranks[r].comm = NULL;
		CU(cuCtxSetCurrent(ranks[r].context));
		CU(cuStreamSynchronize(ranks[r].stream));
	}
}

/* Found out, where the real one would hang or mix up data; and the streams stay blocked until they are let go. */
TEST(ranks_that_do_not_fit)
{
	struct rank ranks[RANKS];

	ranks_new(ranks, N * 4);
	NCCL(ncclGroupStart());
	for (int r = 0; r < RANKS; r++)
		all_reduce(&ranks[r], r == 3 ? 100 : 101);
	NCCL(ncclGroupEnd());
	for (int r = 0; r < RANKS; r++)
		ASSERT_TRUE(async_error(&ranks[r]) == ncclInvalidUsage ||
			    async_error(&ranks[r]) == ncclRemoteError);
	CU(cuCtxSetCurrent(ranks[0].context));
	CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(ranks[0].stream));
	NCCL_IS(ncclInvalidUsage,
		ncclAllReduce((void *)(uintptr_t)ranks[0].in, (void *)(uintptr_t)ranks[0].out, 1,
			      ncclFloat32, ncclSum, ranks[0].comm, ranks[0].stream));
	abort_all(ranks);
	ranks_free(ranks);
}

TEST(aborted_by_one)
{
	struct rank ranks[RANKS];

	ranks_new(ranks, N * 4);
	NCCL(ncclGroupStart());
	for (int r = 0; r < RANKS - 1; r++)
		all_reduce(&ranks[r], N);
	NCCL(ncclGroupEnd());
	NCCL(ncclCommAbort(ranks[RANKS - 1].comm));
	ranks[RANKS - 1].comm = NULL;
	ASSERT_EQ(async_error(&ranks[0]), ncclRemoteError);
	abort_all(ranks);
	ranks_free(ranks);
}

TEST(context_that_fails)
{
	struct rank ranks[RANKS];

	setenv("FAKECUDA_FAIL", "@copy:1:700", 1);
	ranks_new(ranks, N * 4);
	CU(cuCtxSetCurrent(ranks[1].context));
	CU(cuMemcpyDtoDAsync(ranks[1].in, ranks[1].out, 4, ranks[1].stream));
	CU_IS(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(ranks[1].stream));
	NCCL(ncclGroupStart());
	for (int r = 0; r < RANKS; r++)
		if (r != 1)
			all_reduce(&ranks[r], N);
	NCCL(ncclGroupEnd());
	NCCL_IS(ncclUnhandledCudaError,
		ncclAllReduce((void *)(uintptr_t)ranks[1].in, (void *)(uintptr_t)ranks[1].out, N,
			      ncclFloat32, ncclSum, ranks[1].comm, ranks[1].stream));
	for (int r = 0; r < RANKS; r++) {
		NCCL(ncclCommAbort(ranks[r].comm));
		CU(cuDevicePrimaryCtxRelease(r));
	}
}

TEST(used_wrongly)
{
	struct rank ranks[RANKS];
	ncclComm_t comms[2];
	ncclUniqueId id;
	int devices[2] = { 1, 1 };
	char on_host[16];

	ranks_new(ranks, N * 4);
	/* By one thread, but not in a group. */
	all_reduce(&ranks[0], 1);
	NCCL_IS(ncclInvalidUsage,
		ncclAllReduce((void *)(uintptr_t)ranks[1].in, (void *)(uintptr_t)ranks[1].out, 1,
			      ncclFloat32, ncclSum, ranks[1].comm, ranks[1].stream));
	/* Memory that no device sees, a stream of another device, more than there is. */
	NCCL_IS(ncclInvalidArgument,
		ncclAllReduce(on_host, (void *)(uintptr_t)ranks[0].out, 1, ncclFloat32, ncclSum,
			      ranks[0].comm, ranks[0].stream));
	NCCL_IS(ncclInvalidArgument,
		ncclAllReduce((void *)(uintptr_t)ranks[0].in, (void *)(uintptr_t)ranks[0].out,
			      N + 1, ncclFloat32, ncclSum, ranks[0].comm, ranks[0].stream));
	NCCL_IS(ncclUnhandledCudaError,
		ncclAllReduce((void *)(uintptr_t)ranks[0].in, (void *)(uintptr_t)ranks[0].out, 1,
			      ncclFloat32, ncclSum, ranks[0].comm, ranks[1].stream));
	abort_all(ranks);
	ranks_free(ranks);

	start(0);
	NCCL_IS(ncclInvalidUsage, ncclCommInitAll(comms, 2, devices));
	ASSERT_CONTAINS(nccl->ncclGetLastError(NULL), "Duplicate GPU detected");
	NCCL(ncclGetUniqueId(&id));
	id.internal[0] ^= 1;
	NCCL_IS(ncclInvalidArgument, ncclCommInitRankConfig(&comms[0], 1, id, 0, NULL));
	NCCL_IS(ncclInvalidUsage, ncclGroupEnd());
	CU(cuDevicePrimaryCtxRelease(0));
	closefrom(3); /* the id's */
}

/* -- Threads and processes ------------------------------------------------------------------------------------ */

static void one_of_many(int rank, ncclUniqueId id)
{
	ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
	struct rank r = { .context = start(rank) };
	int n, own, device;
	const float *out;

	CU(cuStreamCreate(&r.stream, CU_STREAM_NON_BLOCKING));
	CU(cuMemAlloc(&r.in, N * 4));
	CU(cuMemAlloc(&r.out, N * 4));
	r.host = pinned(N * 4);
	upload_floats(&r, rank, N);
	NCCL(ncclCommInitRankConfig(&r.comm, RANKS, id, rank, &config));
	NCCL(ncclCommCount(r.comm, &n));
	NCCL(ncclCommUserRank(r.comm, &own));
	NCCL(ncclCommCuDevice(r.comm, &device));
	ASSERT_EQ(n, RANKS);
	ASSERT_EQ(own, rank);
	ASSERT_EQ(device, rank);
	for (int i = 0; i < 3; i++)
		all_reduce(&r, N);
	out = download(&r, r.out, N * 4);
	for (size_t i = 0; i < N; i++)
		ASSERT_EQ(out[i], expected_of(ncclSum, i));
	NCCL(ncclCommFinalize(r.comm));
	NCCL(ncclCommDestroy(r.comm));
	CU(cuStreamDestroy(r.stream));
	CU(cuMemFree(r.in));
	CU(cuMemFree(r.out));
	CU(cuMemFreeHost(r.host));
	CU(cuDevicePrimaryCtxRelease(rank));
}

struct thread {
	pthread_t thread;
	int rank;
	ncclUniqueId id;
};

static void *thread_main(void *arg)
{
	struct thread *thread = arg;

	one_of_many(thread->rank, thread->id);
	return NULL;
}

TEST(ranks_are_threads)
{
	struct thread threads[RANKS];
	ncclUniqueId id;

	load_nccl();
	start(0);
	NCCL(ncclGetUniqueId(&id));
	for (int r = 0; r < RANKS; r++) {
		threads[r].rank = r;
		threads[r].id = id;
		ASSERT_EQ(pthread_create(&threads[r].thread, NULL, thread_main, &threads[r]), 0);
	}
	for (int r = 0; r < RANKS; r++)
		ASSERT_EQ(pthread_join(threads[r].thread, NULL), 0);
	CU(cuDevicePrimaryCtxRelease(0));
}

/* Children of one that has not touched CUDA; the first makes the id, which all are told through the pipes. */
static void children(void (*run)(int rank, ncclUniqueId id), pid_t pids[RANKS])
{
	int pipes[RANKS][2];
	ncclUniqueId id;

	load_nccl();
	for (int r = 0; r < RANKS; r++)
		ASSERT_EQ(pipe(pipes[r]), 0);
	for (int r = 0; r < RANKS; r++) {
		pids[r] = fork();
		ASSERT_TRUE(pids[r] >= 0);
		if (pids[r])
			continue;
		if (r == 0) {
			NCCL(ncclGetUniqueId(&id));
			for (int i = 1; i < RANKS; i++)
				ASSERT_EQ(write(pipes[i][1], &id, sizeof(id)), (ssize_t)sizeof(id));
		} else {
			ASSERT_EQ(read(pipes[r][0], &id, sizeof(id)), (ssize_t)sizeof(id));
		}
		run(r, id);
		_exit(0);
	}
	for (int r = 0; r < RANKS; r++) {
		close(pipes[r][0]);
		close(pipes[r][1]);
	}
}

TEST(ranks_are_processes)
{
	pid_t pids[RANKS];
	int status;

	children(one_of_many, pids);
	for (int r = 0; r < RANKS; r++) {
		ASSERT_EQ(waitpid(pids[r], &status, 0), pids[r]);
		ASSERT_EQ(status, 0);
	}
}

/* The last rank dies after all have met, the others see it. */
static void one_of_many_dies(int rank, ncclUniqueId id)
{
	struct rank r = { .context = start(rank) };

	CU(cuStreamCreate(&r.stream, CU_STREAM_NON_BLOCKING));
	CU(cuMemAlloc(&r.in, N * 4));
	CU(cuMemAlloc(&r.out, N * 4));
	NCCL(ncclCommInitRankConfig(&r.comm, RANKS, id, rank, NULL));
	all_reduce(&r, N);
	CU(cuStreamSynchronize(r.stream));
	if (rank == RANKS - 1)
		(void)raise(SIGKILL);
	all_reduce(&r, N);
	ASSERT_EQ(async_error(&r), ncclRemoteError);
	CU_IS(CUDA_ERROR_NOT_READY, cuStreamQuery(r.stream));
	NCCL(ncclCommAbort(r.comm));
	CU(cuStreamSynchronize(r.stream));
	CU(cuDevicePrimaryCtxRelease(rank));
}

TEST(a_rank_dies)
{
	pid_t pids[RANKS];
	int status;

	children(one_of_many_dies, pids);
	for (int r = 0; r < RANKS; r++) {
		ASSERT_EQ(waitpid(pids[r], &status, 0), pids[r]);
		ASSERT_EQ(WIFSIGNALED(status) ? WTERMSIG(status) : status,
			  r == RANKS - 1 ? SIGKILL : 0);
	}
}

/* -- How devices are connected -------------------------------------------------------------------------------- */

static nvmlDevice_t nvml_device(const struct nvml *nvml, int device)
{
	char text[48], *p = text;
	nvmlDevice_t found;
	CUuuid uuid;

	CU(cuDeviceGetUuid(&uuid, device));
	p += sprintf(p, "GPU-");
	for (int i = 0; i < 16; i++)
		p += sprintf(p, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
			     (unsigned char)uuid.bytes[i]);
	ASSERT_EQ(nvml->nvmlDeviceGetHandleByUUID(text, &found), NVML_SUCCESS);
	return found;
}

static void look(const char *topology, int device, nvmlGpuTopologyLevel_t want_level,
		 bool want_nvlink)
{
	nvmlGpuTopologyLevel_t level;
	nvmlGpuP2PStatus_t status;
	const struct nvml *nvml;
	const char *reason;

	setenv("FAKECUDA_TOPOLOGY", topology, 1);
	start(0);
	if (nvml_load(&nvml, &reason))
		test_fail(__FILE__, __LINE__, "%s", reason);
	ASSERT_EQ(nvml->nvmlDeviceGetTopologyCommonAncestor(nvml_device(nvml, 0),
							    nvml_device(nvml, device), &level),
		  NVML_SUCCESS);
	ASSERT_EQ(level, want_level);
	ASSERT_EQ(nvml->nvmlDeviceGetP2PStatus(nvml_device(nvml, 0), nvml_device(nvml, device),
					       NVML_P2P_CAPS_INDEX_NVLINK, &status),
		  NVML_SUCCESS);
	ASSERT_EQ(status == NVML_P2P_STATUS_OK, want_nvlink);
	CU(cuDevicePrimaryCtxRelease(0));
}

TEST(connected_by_nvlink)
{
	look("nvlink", 3, NVML_TOPOLOGY_SYSTEM, true);
}

TEST(on_one_switch)
{
	look("switch:2", 1, NVML_TOPOLOGY_SINGLE, false);
}

TEST(on_two_switches)
{
	look("switch:2", 2, NVML_TOPOLOGY_SYSTEM, false);
}

TEST(connected_by_nvlink_and_on_one_switch)
{
	look("nvlink+switch:2", 1, NVML_TOPOLOGY_SINGLE, true);
}

TEST(connected_by_nvlink_from_switch_to_switch)
{
	look("nvlink+switch:2", 2, NVML_TOPOLOGY_SYSTEM, true);
}
