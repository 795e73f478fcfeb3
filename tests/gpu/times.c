/* How fast copies are, alone and beside those of another process. Only ever of a real device. */
#include "rules.h"

#include <time.h>

#define LEN ((size_t)64 << 20)

static double now_s(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

enum work { DOWN, UP, SET };

struct worker {
	CUstream stream;
	CUdeviceptr device;
	void *host;
};

static void worker_init(struct worker *worker)
{
	CU(cuStreamCreate(&worker->stream, CU_STREAM_NON_BLOCKING));
	CU(cuMemAlloc(&worker->device, LEN));
	worker->host = pinned(LEN);
}

static void enqueue(struct worker *worker, enum work work)
{
	if (work == DOWN)
		CU(cuMemcpyDtoHAsync(worker->host, worker->device, LEN, worker->stream));
	else if (work == UP)
		CU(cuMemcpyHtoDAsync(worker->device, worker->host, LEN, worker->stream));
	else
		CU(cuMemsetD8Async(worker->device, 1, LEN, worker->stream));
}

/* Does it for so long, with two in the stream at any time, and returns GB/s. */
static double rate(struct worker *worker, enum work work, double seconds)
{
	double began = now_s(), took;
	CUevent events[2];
	size_t n = 0;

	for (int i = 0; i < 2; i++)
		CU(cuEventCreate(&events[i], CU_EVENT_DISABLE_TIMING));
	do {
		if (n >= 2)
			CU(cuEventSynchronize(events[n % 2]));
		enqueue(worker, work);
		CU(cuEventRecord(events[n % 2], worker->stream));
		n++;
		took = now_s() - began;
	} while (took < seconds);
	CU(cuStreamSynchronize(worker->stream));
	return (double)n * (double)LEN / (now_s() - began) * 1e-9;
}

static void run_alone(enum work work)
{
	struct worker worker;

	start(0);
	worker_init(&worker);
	(void)rate(&worker, work, 0.2);
	seen("%.1f GB/s", rate(&worker, work, 1.0));
}

static void run_down(void)
{
	run_alone(DOWN);
}

static void run_up(void)
{
	run_alone(UP);
}

static void run_set(void)
{
	run_alone(SET);
}

/* Both ways at once in two streams, each as long as the other. */
static void run_streams(void)
{
	struct worker down, up;
	double began;
	int n = 20;

	start(0);
	worker_init(&down);
	worker_init(&up);
	(void)rate(&down, DOWN, 0.2);
	(void)rate(&up, UP, 0.2);
	began = now_s();
	for (int i = 0; i < n; i++) {
		enqueue(&down, DOWN);
		enqueue(&up, UP);
	}
	CU(cuStreamSynchronize(down.stream));
	CU(cuStreamSynchronize(up.stream));
	seen("%.1f GB/s each", (double)n * (double)LEN / (now_s() - began) * 1e-9);
}

/* The other process: works while this one measures, and says how fast it was. */
static void other(int fd)
{
	struct worker worker;
	struct note note;

	start(0);
	worker_init(&worker);
	(void)hear(fd, &note);
	(void)rate(&worker, (enum work)note.number, 0.2);
	tell(fd, &note, -1);
	note.number = (uint64_t)(rate(&worker, (enum work)note.number, 2.0) * 1000);
	tell(fd, &note, -1);
	(void)hear(fd, &note);
}

static void run_beside(enum work here, enum work there)
{
	struct note note = { .number = there };
	struct worker worker;
	double own;
	int fd;

	(void)peer_new(other, &fd);
	start(0);
	worker_init(&worker);
	(void)rate(&worker, here, 0.2);
	tell(fd, &note, -1);
	(void)hear(fd, &note);
	own = rate(&worker, here, 1.5);
	(void)hear(fd, &note);
	seen("%.1f and %.1f GB/s", own, (double)note.number / 1000);
}

static void run_down_up(void)
{
	run_beside(DOWN, UP);
}

static void run_down_down(void)
{
	run_beside(DOWN, DOWN);
}

static void run_down_set(void)
{
	run_beside(DOWN, SET);
}

#define HOPS 1000

static void echo(int fd)
{
	struct note note;
	CUdeviceptr device;
	CUstream stream;

	start(0);
	(void)flags_map(hear(fd, &note), &device);
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	/* A stream holds so much and no more: the other one has to begin meanwhile. */
	tell(fd, &note, -1);
	for (uint32_t i = 1; i <= HOPS; i++) {
		CU(cuStreamWaitValue32(stream, device, i, CU_STREAM_WAIT_VALUE_GEQ));
		CU(cuStreamWriteValue32(stream, device + 64, i, 0));
	}
	(void)hear(fd, &note);
}

static void run_hop(void)
{
	struct note note = { .number = 0 };
	CUdeviceptr device;
	CUstream stream;
	double began;
	int fd, memfd;

	(void)peer_new(echo, &fd);
	start(0);
	(void)flags_new(&device, &memfd);
	tell(fd, &note, memfd);
	(void)hear(fd, &note);
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	began = now_s();
	for (uint32_t i = 1; i <= HOPS; i++) {
		CU(cuStreamWriteValue32(stream, device, i, 0));
		CU(cuStreamWaitValue32(stream, device + 64, i, CU_STREAM_WAIT_VALUE_GEQ));
	}
	if (!comes_to_end(stream))
		seen("does not end");
	seen("%.1f us", (now_s() - began) / (2 * HOPS) * 1e6);
}

/* The host writes a value, and looks for the one that the stream answers with. */
static void run_host_hop(void)
{
	CUdeviceptr device;
	uint32_t *flags;
	CUstream stream;
	double began;

	start(0);
	flags = flags_new(&device, NULL);
	CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
	began = now_s();
	for (uint32_t i = 1; i <= HOPS; i++) {
		CU(cuStreamWaitValue32(stream, device, i, CU_STREAM_WAIT_VALUE_GEQ));
		CU(cuStreamWriteValue32(stream, device + 64, i, 0));
		flag_set(flags, i);
		while (flag_get(flags + 16) != i)
			;
	}
	seen("%.1f us", (now_s() - began) / HOPS * 1e6);
}

const struct rule time_rules[] = {
	{ "down", "device to host", NULL, false, 1, run_down },
	{ "up", "host to device", NULL, false, 1, run_up },
	{ "set", "set on the device, which is a kernel", NULL, false, 1, run_set },
	{ "down+up", "both ways, one process", NULL, false, 1, run_streams },
	{ "down|up", "both ways, two processes", NULL, false, 1, run_down_up },
	{ "down|down", "device to host in two processes", NULL, false, 1, run_down_down },
	{ "down|set", "device to host beside another process's kernels", NULL, false, 1,
	  run_down_set },
	{ "host-hop", "a value from the host, and one back", NULL, false, 1, run_host_hop },
	{ "hop", "a value from a stream to another process's", NULL, false, 1, run_hop },
	{ NULL, NULL, NULL, false, 0, NULL },
};
