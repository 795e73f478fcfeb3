/*
 * Figures of RDMA lanes, for scripts/rdma-check: two transports in this process, each on a device of BPS_TEST_RDMA. A part
 * goes from one registered arena to the other side, its result of the same length comes back to another place in it. The
 * same over TCP of the loopback, to compare what does not depend on the wire.
 */
#include "base/clock.h"
#include "transport_pair.h"
#include <sys/mman.h>

#define WINDOW 16

static size_t number(const char *name, size_t otherwise)
{
	const char *text = getenv(name);

	return text ? strtoull(text, NULL, 10) : otherwise;
}

struct run {
	struct pair *pair;
	struct pair_call calls[WINDOW];
	size_t n_left;
};

static void again(struct pair_call *call)
{
	struct run *run = (struct run *)(uintptr_t)call->call.header.job;

	ASSERT_OK(call->call.status);
	call->answer = block_unref(call->answer);
	if (!run->n_left)
		return;
	run->n_left--;
	call->n_done = 0;
	peer_call(call->call.peer, &call->call);
}

/* n calls of len bytes, at most `window` of them at once. Returns nanoseconds. */
static uint64_t run_calls(struct run *run, char *arena, size_t n, size_t len, size_t window)
{
	uint64_t start_ns = clock_now_ns();

	run->n_left = n > window ? n - window : 0;
	for (size_t i = 0; i < MIN(window, n); i++) {
		pair_call_init(&run->calls[i], arena + i * len, len, arena + (WINDOW + i) * len,
			       len);
		run->calls[i].call.header.job = (uintptr_t)run;
		run->calls[i].on_done = again;
		pair_call_begin(run->pair, &run->calls[i]);
	}
	for (size_t i = 0; i < MIN(window, n); i++)
		PAIR_UNTIL(run->pair, run->calls[i].n_done && !run->n_left);
	return clock_now_ns() - start_ns;
}

static void measure(const struct pair_variant *v, const char *name)
{
	size_t len = number("BPS_BENCH_PART", 128 << 10), n = number("BPS_BENCH_PARTS", 2000),
	       arena_len = 2 * WINDOW * len;
	_cleanup_(pair_freep) struct pair *pair = pair_new(v);
	static struct run run;
	struct transport_rdma_counters a, b;
	uint64_t ns, first_ns;
	char *arena;

	arena = mmap(NULL, arena_len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(arena != MAP_FAILED);
	memset(arena, 1, arena_len);
	ASSERT_OK(transport_memory_add(pair->a.transport, arena, arena_len));
	pair->server->on_call = pair_on_call_echo;
	run.pair = pair;
	(void)run_calls(&run, arena, 1, 64, 1);
	first_ns = run_calls(&run, arena, 1, len, 1);
	ns = run_calls(&run, arena, n / 10 + 1, 64, 1) / (n / 10 + 1);
	printf("%s round_trip_64_us %.1f\n", name, (double)ns / 1e3);
	transport_rdma_counters(pair->a.transport, &a);
	transport_rdma_counters(pair->b.transport, &b);
	printf("%s first_part_us %.1f\n", name, (double)first_ns / 1e3);
	ns = run_calls(&run, arena, n, len, WINDOW);
	printf("%s goodput_mib_s %.1f\n", name,
	       (double)n * (double)len / 1048576.0 / ((double)ns / 1e9));
	if (v->is_rdma) {
		struct transport_rdma_counters a2, b2;

		transport_rdma_counters(pair->a.transport, &a2);
		transport_rdma_counters(pair->b.transport, &b2);
		printf("%s bytes_copied_per_byte_caller %.6f\n", name,
		       (double)(a2.bytes_copied - a.bytes_copied) /
			       (double)(a2.bytes_moved - a.bytes_moved));
		printf("%s bytes_copied_per_byte_server %.6f\n", name,
		       (double)(b2.bytes_copied - b.bytes_copied) /
			       (double)(b2.bytes_moved - b.bytes_moved));
		printf("%s regions_caller %" PRIu64 "\n", name, a2.regions);
		printf("%s regions_server %" PRIu64 "\n", name, b2.regions);
		ASSERT_EQ(a2.bytes_copied, a.bytes_copied);
		ASSERT_EQ(b2.bytes_copied, b.bytes_copied);
		ASSERT_EQ(a2.links_broken, 0);
	}
	(void)fflush(stdout);
	transport_memory_remove(pair->a.transport, arena);
	(void)munmap(arena, arena_len);
}

TEST_TIMEOUT(rdma, 3600)
{
	measure(&(struct pair_variant){ "rdma", false, 2, 1, true }, "rdma");
}

TEST_TIMEOUT(tcp, 3600)
{
	measure(&(struct pair_variant){ "tcp", false, 2, 1, false }, "tcp");
}
