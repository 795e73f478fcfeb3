/*
 * The way through the daemon against the plainest one: the same bytes from the device to pinned host memory and back in the
 * trainer itself. One rank, so that nothing is summed and nothing waits for others.
 */
#include "trainer.h"

#include "gpu/nccl_abi.h"
#include <time.h>

static double now_us(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

#define SAMPLES_MAX 200

/* Half a second's worth of either, but some. */
static int samples_for(size_t len)
{
	return (int)MAX((size_t)7, MIN((size_t)SAMPLES_MAX, ((size_t)4 << 30) / (len + 1)));
}

struct one {
	struct rank *rank;
	struct bps_tensor *tensor;
	CUdeviceptr data;
	void *host;
	size_t len;
};

static void copy_once(struct one *one)
{
	CU(cuMemcpyDtoHAsync(one->host, one->data, one->len, one->rank->stream));
	CU(cuMemcpyHtoDAsync(one->data, one->host, one->len, one->rank->stream));
	CU(cuStreamSynchronize(one->rank->stream));
}

static void bps_once(struct one *one)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.reduction = BPS_SUM,
		.input = (void *)(uintptr_t)one->data,
		.output = (void *)(uintptr_t)one->data,
		.memory = BPS_MEMORY_CUDA,
		.stream = one->rank->stream,
	};
	struct bps_request *request;

	BPS(bps_submit(one->tensor, &params, &request));
	BPS(bps_request_wait_stream(request, one->rank->stream, BPS_FOREVER));
	CU(cuStreamSynchronize(one->rank->stream));
	BPS(bps_request_wait(request, BPS_FOREVER));
	bps_request_free(request);
}

/* The median, in microseconds, after some that do not count. */
static double median(struct one *one, void (*once)(struct one *one))
{
	double samples[SAMPLES_MAX], began;
	int n = samples_for(one->len);

	for (int i = 0; i < 3; i++)
		once(one);
	for (int i = 0; i < n; i++) {
		began = now_us();
		once(one);
		samples[i] = now_us() - began;
	}
	qsort(samples, (size_t)n, sizeof(samples[0]), by_value);
	return samples[n / 2];
}

/* What the hop may cost: " (goal ...: met)", or "" where nothing was promised. */
static const char *verdict(size_t len, double copy, double hop)
{
	static char text[48];
	double percent = len >= (size_t)64 << 20 ? 3 : 15;

	text[0] = 0;
	if (len <= (size_t)64 << 10)
		snprintf(text, sizeof(text), " (goal +60 us: %s)",
			 hop - copy <= 60 ? "met" : "missed");
	else if (len == (size_t)8 << 20 || percent == 3)
		snprintf(text, sizeof(text), " (goal +%.0f %%: %s)", percent,
			 (hop / copy - 1) * 100 <= percent ? "met" : "missed");
	return text;
}

static void see_hop(size_t len)
{
	struct rank rank;
	struct one one = { .rank = &rank, .len = len };
	double copy, hop;
	char job[32];

	snprintf(job, sizeof(job), "gpu-check-%d", (int)getpid());
	rank_open(&rank, job, 0, 1, BPS_GPU_REDUCE_HOST);
	CU(cuMemAlloc(&one.data, len));
	CU(cuMemsetD8Async(one.data, 0, len, rank.stream));
	one.host = pinned(len);
	memset(one.host, 0, len);
	BPS(bps_tensor_declare(rank.client, "hop", BPS_FLOAT32, len / 4, &one.tensor));
	copy = median(&one, copy_once);
	hop = median(&one, bps_once);
	if (bps_client_notice(rank.client))
		seen("was not handed over");
	seen("copies %.1f us, bps %.1f us: %+.1f us, %+.1f %%%s", copy, hop, hop - copy,
	     (hop / copy - 1) * 100, verdict(len, copy, hop));
}

/* -- Two ranks ------------------------------------------------------------------------------------------------- */

static size_t pair_len;

static void second(int fd)
{
	struct note note;
	struct rank rank;
	struct one one = { .rank = &rank, .len = pair_len };

	(void)hear(fd, &note);
	rank_open(&rank, (const char *)note.handle.reserved, 1, 2, BPS_GPU_REDUCE_AUTO);
	CU(cuMemAlloc(&one.data, one.len));
	CU(cuMemsetD8Async(one.data, 0, one.len, rank.stream));
	BPS(bps_tensor_declare(rank.client, "hop", BPS_FLOAT32, one.len / 4, &one.tensor));
	(void)median(&one, bps_once);
	tell(fd, &note, -1);
}

/* All-reduces of two ranks, on two devices where there are two. */
static double pair_median(size_t len)
{
	struct note note = { .number = 0 };
	struct rank rank;
	struct one one = { .rank = &rank, .len = len };
	double hop;
	int fd;

	pair_len = len;
	(void)peer_new(second, &fd);
	snprintf(note.handle.reserved, sizeof(note.handle.reserved), "gpu-check-%d", (int)getpid());
	tell(fd, &note, -1);
	rank_open(&rank, (const char *)note.handle.reserved, 0, 2, BPS_GPU_REDUCE_AUTO);
	CU(cuMemAlloc(&one.data, one.len));
	CU(cuMemsetD8Async(one.data, 0, one.len, rank.stream));
	BPS(bps_tensor_declare(rank.client, "hop", BPS_FLOAT32, one.len / 4, &one.tensor));
	hop = median(&one, bps_once);
	(void)hear(fd, &note);
	return hop;
}

static void see_pair(size_t len)
{
	seen("bps %.1f us", pair_median(len));
}

/* -- Two devices: NCCL in the trainer, and the same by bps ----------------------------------------------------- */

static double nccl_median(size_t len)
{
	const struct nccl *nccl;
	double samples[SAMPLES_MAX], began;
	CUdeviceptr data[2];
	CUstream streams[2];
	ncclComm_t comms[2];
	const char *reason;
	int n = samples_for(len);

	if (nccl_load(&nccl, &reason))
		seen("%s", reason);
	for (int i = 0; i < 2; i++) {
		(void)start(i);
		CU(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
		CU(cuMemAlloc(&data[i], len));
		CU(cuMemsetD8Async(data[i], 0, len, streams[i]));
	}
	CHECK(!nccl->ncclCommInitAll(comms, 2, NULL));
	for (int k = -3; k < n; k++) {
		began = now_us();
		CHECK(!nccl->ncclGroupStart());
		for (int i = 0; i < 2; i++)
			CHECK(!nccl->ncclAllReduce((void *)(uintptr_t)data[i],
						   (void *)(uintptr_t)data[i], len / 4, ncclFloat32,
						   ncclSum, comms[i], streams[i]));
		CHECK(!nccl->ncclGroupEnd());
		for (int i = 0; i < 2; i++)
			CU(cuStreamSynchronize(streams[i]));
		if (k >= 0)
			samples[k] = now_us() - began;
	}
	for (int i = 0; i < 2; i++)
		(void)nccl->ncclCommDestroy(comms[i]);
	qsort(samples, (size_t)n, sizeof(samples[0]), by_value);
	return samples[n / 2];
}

static void see_nccl(size_t len)
{
	double hop = pair_median(len);

	seen("NCCL %.1f us, bps %.1f us", nccl_median(len), hop);
}

#define RULE(see, name, bytes)               \
	static void run_##see##_##name(void) \
	{                                    \
		see_##see(bytes);            \
	}

RULE(hop, 1k, 1u << 10)
RULE(hop, 4k, 4u << 10)
RULE(hop, 16k, 16u << 10)
RULE(hop, 64k, 64u << 10)
RULE(hop, 256k, 256u << 10)
RULE(hop, 1m, 1u << 20)
RULE(hop, 4m, 4u << 20)
RULE(hop, 8m, 8u << 20)
RULE(hop, 16m, 16u << 20)
RULE(hop, 64m, 64u << 20)
RULE(hop, 256m, 256u << 20)
RULE(hop, 1g, 1u << 30)

RULE(pair, 64k, 64u << 10)
RULE(pair, 1m, 1u << 20)
RULE(pair, 4m, 4u << 20)
RULE(pair, 8m, 8u << 20)
RULE(pair, 64m, 64u << 20)
RULE(pair, 256m, 256u << 20)

RULE(nccl, 64k, 64u << 10)
RULE(nccl, 1m, 1u << 20)
RULE(nccl, 8m, 8u << 20)
RULE(nccl, 64m, 64u << 20)
RULE(nccl, 256m, 256u << 20)

const struct rule trainer_times[] = {
	{ "1 KiB", "to the host and back", NULL, false, 1, run_hop_1k },
	{ "4 KiB", "to the host and back", NULL, false, 1, run_hop_4k },
	{ "16 KiB", "to the host and back", NULL, false, 1, run_hop_16k },
	{ "64 KiB", "to the host and back", NULL, false, 1, run_hop_64k },
	{ "256 KiB", "to the host and back", NULL, false, 1, run_hop_256k },
	{ "1 MiB", "to the host and back", NULL, false, 1, run_hop_1m },
	{ "4 MiB", "to the host and back", NULL, false, 1, run_hop_4m },
	{ "8 MiB", "to the host and back", NULL, false, 1, run_hop_8m },
	{ "16 MiB", "to the host and back", NULL, false, 1, run_hop_16m },
	{ "64 MiB", "to the host and back", NULL, false, 1, run_hop_64m },
	{ "256 MiB", "to the host and back", NULL, false, 1, run_hop_256m },
	{ "1 GiB", "to the host and back", NULL, false, 1, run_hop_1g },
	{ "pair 64 KiB", "all-reduce of two ranks", NULL, false, 1, run_pair_64k },
	{ "pair 1 MiB", "all-reduce of two ranks", NULL, false, 1, run_pair_1m },
	{ "pair 4 MiB", "all-reduce of two ranks", NULL, false, 1, run_pair_4m },
	{ "pair 8 MiB", "all-reduce of two ranks", NULL, false, 1, run_pair_8m },
	{ "pair 64 MiB", "all-reduce of two ranks", NULL, false, 1, run_pair_64m },
	{ "pair 256 MiB", "all-reduce of two ranks", NULL, false, 1, run_pair_256m },
	{ "nccl 64 KiB", "all-reduce on two devices", NULL, false, 2, run_nccl_64k },
	{ "nccl 1 MiB", "all-reduce on two devices", NULL, false, 2, run_nccl_1m },
	{ "nccl 8 MiB", "all-reduce on two devices", NULL, false, 2, run_nccl_8m },
	{ "nccl 64 MiB", "all-reduce on two devices", NULL, false, 2, run_nccl_64m },
	{ "nccl 256 MiB", "all-reduce on two devices", NULL, false, 2, run_nccl_256m },
	{ NULL, NULL, NULL, false, 0, NULL },
};
