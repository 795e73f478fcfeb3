/*
 * Figures of RDMA lanes, for scripts/rdma-check: two transports in this process, each on a device of BPS_TEST_RDMA. A part
 * goes from one registered arena to the other side, its result of the same length comes back to another place in it. The
 * same over TCP of the loopback, to compare what does not depend on the wire; and from and to memory of a GPU.
 */
#include "base/clock.h"
#include "device.h"
#include "transport/internal.h"
#include "transport_pair.h"
#include <sys/mman.h>
#ifdef FAKEVERBS
#include "fake.h"
#endif

#define WINDOW 16

static size_t number(const char *name, size_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

/* Where WINDOW parts are. */
struct place {
	char *data;
	bool is_direct;
};

struct run {
	struct pair *pair;
	struct place from, to;
	struct pair_call calls[WINDOW];
	size_t n_departed;
};

static void again(struct pair_call *call)
{
	struct run *run = (struct run *)(uintptr_t)call->call.header.job;

	ASSERT_OK(call->call.status);
	call->answer = block_unref(call->answer);
	if (!run->n_departed)
		return;
	run->n_departed--;
	call->n_done = 0;
	peer_call(call->call.peer, &call->call);
}

/* n calls of len bytes, at most `window` of them at once. Returns nanoseconds. */
static uint64_t run_calls(struct run *run, size_t n, size_t len, size_t window)
{
	uint64_t start_ns = clock_now_ns();

	run->n_departed = n > window ? n - window : 0;
	for (size_t i = 0; i < MIN(window, n); i++) {
		pair_call_init(&run->calls[i], run->from.data + i * len, len,
			       run->to.data + i * len, len);
		run->calls[i].call.is_payload_direct = run->from.is_direct;
		run->calls[i].call.is_target_direct = run->to.is_direct;
		run->calls[i].call.header.job = (uintptr_t)run;
		run->calls[i].on_done = again;
		pair_call_begin(run->pair, &run->calls[i]);
	}
	for (size_t i = 0; i < MIN(window, n); i++)
		PAIR_UNTIL(run->pair, run->calls[i].n_done && !run->n_departed);
	return clock_now_ns() - start_ns;
}

/* By processors of this process: what the kernel copies of a socket, twice each byte, is not counted. */
static void print_copied(const char *name, bool is_rdma, const char *whose,
			 struct transport *transport, uint64_t before, uint64_t moved)
{
	uint64_t copied = metric_get(&transport->copied) - before;
	struct transport_rdma_counters counters;

	transport_rdma_counters(transport, &counters);
	printf("%s bytes_copied_per_byte_%s %.6f\n", name, whose, (double)copied / (double)moved);
	printf("%s regions_%s %" PRIu64 "\n", name, whose, counters.regions);
	ASSERT_EQ(counters.links_broken, 0);
	if (is_rdma)
		ASSERT_EQ(copied, 0);
}

/* What a driver makes of these is its own: writes to its device's memory or, as soft-RoCE's, system calls. */
static void print_work(const char *name)
{
#ifdef FAKEVERBS
	struct fake_work work = fake_work();

	printf("%s posts %" PRIu64 "\n", name, work.posts);
	printf("%s notifies %" PRIu64 "\n", name, work.notifies);
#else
	(void)name;
#endif
}

static char *host_new(struct transport *transport, size_t len)
{
	char *data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	ASSERT_TRUE(data != MAP_FAILED);
	memset(data, 1, len);
	ASSERT_OK(transport_memory_add(transport, NULL, data, len));
	return data;
}

static void host_free(struct transport *transport, char *data, size_t len)
{
	(void)transport_memory_remove(transport, data, NULL);
	(void)munmap(data, len);
}

/* A large one is registered while what is in it is copied. Not by TCP, nor if it is refused. */
static void await_region(struct pair *pair, const char *data)
{
	struct transport *caller = pair->a.transport;
	uint64_t until_ns = clock_now_ns() + 10 * NSEC_PER_SEC;

	while (caller->rdma && !transport_memory_regions(caller, data) && clock_now_ns() < until_ns)
		pair_turn(pair);
}

/* MiB/s of parts, whose results come back at the same time. */
static double goodput(struct run *run, size_t n, size_t len)
{
	uint64_t ns = run_calls(run, n, len, WINDOW);

	return (double)n * (double)len / 1048576.0 / ((double)ns / 1e9);
}

static void measure(const struct pair_variant *v, const char *name)
{
	size_t len = number("BPS_BENCH_PART", 128 << 10), n = number("BPS_BENCH_PARTS", 2000),
	       arena_len = 2 * WINDOW * len;
	_cleanup_(pair_freep) struct pair *pair = pair_new(v);
	struct transport *caller = pair->a.transport, *server = pair->b.transport;
	uint64_t ns, first_ns, of_caller, of_server;
	static struct run run;
	char *arena = host_new(caller, arena_len);

	pair->server->on_call = pair_on_call_echo;
	run.pair = pair;
	run.from.data = arena;
	run.to.data = arena + WINDOW * len;
	(void)run_calls(&run, 1, 64, 1);
	first_ns = run_calls(&run, 1, len, 1);
	await_region(pair, arena);
	ns = run_calls(&run, n / 10 + 1, 64, 1) / (n / 10 + 1);
	printf("%s round_trip_64_us %.1f\n", name, (double)ns / 1e3);
	printf("%s first_part_us %.1f\n", name, (double)first_ns / 1e3);
	of_caller = metric_get(&caller->copied);
	of_server = metric_get(&server->copied);
	printf("%s goodput_mib_s %.1f\n", name, goodput(&run, n, len));
	print_copied(name, v->is_rdma, "caller", caller, of_caller, 2 * n * len);
	print_copied(name, v->is_rdma, "server", server, of_server, 2 * n * len);
	print_work(name);
	(void)fflush(stdout);
	host_free(caller, arena, arena_len);
}

TEST_TIMEOUT(rdma, 3600)
{
	measure(&(struct pair_variant){ "rdma", false, 2, 1, true }, "rdma");
}

TEST_TIMEOUT(tcp, 3600)
{
	measure(&(struct pair_variant){ "tcp", false, 2, 1, false }, "tcp");
}

static uint64_t registration_us(const struct transport *transport)
{
	struct transport_rdma_counters counters;

	transport_rdma_counters(transport, &counters);
	return counters.registration_us;
}

static void run_one(struct pair *pair, char *host, size_t len)
{
	static struct run run;

	run = (struct run){ .pair = pair, .from.data = host, .to.data = host };
	(void)run_calls(&run, 1, len, 1);
}

/* Parts from one of these places, results to the other. The bits are looked at on a GPU, where they have been both ways. */
static void measure_gpu(struct pair *pair, struct device *device, char *host, size_t n, size_t len)
{
	const struct place gpu = { device_data(device), true },
			   gpu_to = { device_data(device) + WINDOW * len, true }, memory = { host },
			   memory_to = { host + WINDOW * len };
	struct transport *caller = pair->a.transport;
	uint64_t copied = metric_get(&caller->copied);
	static struct run run;

	run = (struct run){ .pair = pair, .from = memory, .to = memory_to };
	printf("gpu host_to_host_mib_s %.1f\n", goodput(&run, n, len));
	ASSERT_TRUE(peer_takes_direct(pair->peer, len));
	run.from = gpu;
	printf("gpu gpu_to_host_mib_s %.1f\n", goodput(&run, n, len));
	run = (struct run){ .pair = pair, .from = memory, .to = gpu_to };
	printf("gpu host_to_gpu_mib_s %.1f\n", goodput(&run, n, len));
	device_fill(device, 7);
	run.from = gpu;
	printf("gpu gpu_to_gpu_mib_s %.1f\n", goodput(&run, MAX(n, (size_t)WINDOW), len));
	if (!device_check(device, WINDOW * len, WINDOW * len, 7))
		test_fail(__FILE__, __LINE__, "other bits came back to the GPU");
	ASSERT_EQ(metric_get(&caller->copied), copied);
	printf("gpu bytes_copied_per_byte 0\n");
}

TEST_TIMEOUT(gpu, 3600)
{
	size_t len = number("BPS_BENCH_PART", 128 << 10), n = number("BPS_BENCH_PARTS", 2000),
	       arena_len = align_up(2 * WINDOW * len, (size_t)64 << 10);
	_cleanup_(device_freep) struct device *device = NULL;
	_cleanup_(pair_freep) struct pair *pair = NULL;
	uint64_t before_us, host_us;
	char why[512], *host;

	if (len <= DATA_RDMA_EAGER)
		TEST_SKIP("parts up to %d bytes go by the host", (int)DATA_RDMA_EAGER);
	device = device_new(arena_len);
	pair = pair_new(&(struct pair_variant){ "rdma", false, 2, 1, true });
	pair->server->on_call = pair_on_call_echo;
	host = host_new(pair->a.transport, arena_len);
	/* Connected: all else that is registered is. */
	run_one(pair, host, 64);
	before_us = registration_us(pair->a.transport);
	run_one(pair, host, len);
	await_region(pair, host);
	host_us = registration_us(pair->a.transport) - before_us;
	if (!device_open(device, pair->loop, pair->a.transport, why, sizeof(why)))
		TEST_SKIP("%s", why);
	printf("gpu registration_us %" PRIu64 "\n",
	       registration_us(pair->a.transport) - before_us - host_us);
	printf("gpu host_registration_us %" PRIu64 "\n", host_us);
	measure_gpu(pair, device, host, n, len);
	(void)fflush(stdout);
	host_free(pair->a.transport, host, arena_len);
	device = device_free(device);
}
