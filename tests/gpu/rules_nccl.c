/* NCCL, in one process as the worker has it. */
#include "rules.h"

#include "daemon/gpu/nccl_abi.h"
#include "daemon/gpu/nvml_abi.h"

#define N	 ((size_t)1000003)
#define GPUS_MAX 16

static const struct nccl *nccl;

struct gpu {
	CUcontext context;
	CUstream stream;
	ncclComm_t comm;
	CUdeviceptr in, out;
	float *host;
};

static struct gpu gpus[GPUS_MAX];
static int n_gpus;

static void nccl_call(const char *call, ncclResult_t result)
{
	if (result)
		seen("%.40s: %s, %.80s", call, nccl->ncclGetErrorString(result),
		     nccl->ncclGetLastError(NULL));
}
#define NCCL(call) nccl_call(#call, nccl->call)

static void gpus_start(int n_max)
{
	ncclComm_t comms[GPUS_MAX];
	const char *reason;

	CHECK(!setenv("NCCL_ALGO", "Ring", 1) && !setenv("NCCL_PROTO", "Simple", 1));
	CHECK(!setenv("NCCL_SOCKET_IFNAME", "lo", 0));
	if (nccl_load(&nccl, &reason))
		seen("%s", reason);
	start(0);
	CU(cuDeviceGetCount(&n_gpus));
	n_gpus = MIN(n_gpus, n_max);
	for (int i = 0; i < n_gpus; i++) {
		struct gpu *gpu = &gpus[i];

		gpu->context = start(i);
		CU(cuStreamCreate(&gpu->stream, CU_STREAM_NON_BLOCKING));
		CU(cuMemAlloc(&gpu->in, N * sizeof(float)));
		CU(cuMemAlloc(&gpu->out, N * sizeof(float)));
		gpu->host = pinned(N * sizeof(float));
	}
	NCCL(ncclCommInitAll(comms, n_gpus, NULL));
	for (int i = 0; i < n_gpus; i++)
		gpus[i].comm = comms[i];
}

static void *ptr(CUdeviceptr p)
{
	return (void *)(uintptr_t)p;
}

/* Small whole numbers, or numbers whose sum depends on the order. */
static void fill(bool whole)
{
	uint32_t x = 1;

	for (int g = 0; g < n_gpus; g++) {
		for (size_t i = 0; i < N; i++) {
			x = x * 1664525u + 1013904223u;
			gpus[g].host[i] = whole ? (float)((i + (size_t)g) % 97)
						: (float)(int32_t)x * 0x1p-20f;
		}
		CU(cuCtxSetCurrent(gpus[g].context));
		CU(cuMemcpyHtoDAsync(gpus[g].in, gpus[g].host, N * sizeof(float), gpus[g].stream));
		CU(cuStreamSynchronize(gpus[g].stream));
	}
}

static void fetch(void)
{
	for (int g = 0; g < n_gpus; g++) {
		CU(cuCtxSetCurrent(gpus[g].context));
		CU(cuMemcpyDtoHAsync(gpus[g].host, gpus[g].out, N * sizeof(float), gpus[g].stream));
		CU(cuStreamSynchronize(gpus[g].stream));
	}
}

static void all_reduce(void)
{
	NCCL(ncclGroupStart());
	for (int g = 0; g < n_gpus; g++)
		NCCL(ncclAllReduce(ptr(gpus[g].in), ptr(gpus[g].out), N, ncclFloat32, ncclSum,
				   gpus[g].comm, gpus[g].stream));
	NCCL(ncclGroupEnd());
	fetch();
}

static void run_one(void)
{
	gpus_start(1);
	fill(true);
	all_reduce();
	for (size_t i = 0; i < N; i++)
		CHECK(gpus[0].host[i] == (float)(i % 97));
	seen("the same");
}

static void run_duplicate(void)
{
	int devices[2] = { 0, 0 };
	ncclComm_t comms[2];
	const char *reason;

	if (nccl_load(&nccl, &reason))
		seen("%s", reason);
	start(0);
	seen("%s",
	     nccl->ncclCommInitAll(comms, 2, devices) == ncclInvalidUsage ? "refused" : "allowed");
}

/* A remainder goes by itself: what divides is scattered and gathered. */
static void run_scatter(void)
{
	size_t slice, rest;

	gpus_start(GPUS_MAX);
	slice = N / (size_t)n_gpus;
	rest = N - slice * (size_t)n_gpus;
	fill(true);
	NCCL(ncclGroupStart());
	for (int g = 0; g < n_gpus; g++) {
		CUdeviceptr own = gpus[g].out + (size_t)g * slice * sizeof(float);

		NCCL(ncclReduceScatter(ptr(gpus[g].in), ptr(own), slice, ncclFloat32, ncclSum,
				       gpus[g].comm, gpus[g].stream));
	}
	NCCL(ncclGroupEnd());
	NCCL(ncclGroupStart());
	for (int g = 0; g < n_gpus; g++) {
		CUdeviceptr own = gpus[g].out + (size_t)g * slice * sizeof(float);

		NCCL(ncclAllGather(ptr(own), ptr(gpus[g].out), slice, ncclFloat32, gpus[g].comm,
				   gpus[g].stream));
	}
	NCCL(ncclGroupEnd());
	NCCL(ncclGroupStart());
	for (int g = 0; g < n_gpus && rest; g++) {
		size_t offset = slice * (size_t)n_gpus * sizeof(float);

		NCCL(ncclAllReduce(ptr(gpus[g].in + offset), ptr(gpus[g].out + offset), rest,
				   ncclFloat32, ncclSum, gpus[g].comm, gpus[g].stream));
	}
	NCCL(ncclGroupEnd());
	fetch();
	for (int g = 0; g < n_gpus; g++)
		for (size_t i = 0; i < N; i++) {
			float sum = 0;

			for (int h = 0; h < n_gpus; h++)
				sum += (float)((i + (size_t)h) % 97);
			CHECK(gpus[g].host[i] == sum);
		}
	seen("right sums");
}

static void run_repeat(void)
{
	float *first = malloc(N * sizeof(float));

	CHECK(first);
	gpus_start(GPUS_MAX);
	fill(false);
	for (int i = 0; i < 5; i++) {
		all_reduce();
		if (!i)
			memcpy(first, gpus[0].host, N * sizeof(float));
		for (int g = 0; g < n_gpus; g++)
			CHECK(!memcmp(first, gpus[g].host, N * sizeof(float)));
	}
	seen("the same bits");
}

static void run_nvml(void)
{
	const struct nvml *nvml;
	const char *reason;

	seen("%s", nvml_load(&nvml, &reason) ? reason : "there");
}

const struct rule nccl_rules[] = {
	{ "nvml", "NVML, which tells how devices are connected", "there", false, 1, run_nvml },
	{ "nccl-one", "an all-reduce of one GPU", "the same", false, 1, run_one },
	{ "nccl-duplicate", "two ranks on one GPU", "refused", false, 1, run_duplicate },
	{ "nccl-scatter", "reduce-scatter, all-gather, and what does not divide", "right sums",
	  false, 2, run_scatter },
	{ "nccl-repeat", "pinned to Ring and Simple, five times", "the same bits", false, 2,
	  run_repeat },
	{ NULL, NULL, NULL, false, 0, NULL },
};
