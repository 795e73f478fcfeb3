/*
 * Figures of RDMA lanes, for scripts/rdma-check: two transports in this process, each on a device of BPS_TEST_RDMA. A part
 * goes from one registered arena to the other side, its result of the same length comes back to another place in it. The
 * same over TCP of the loopback, to compare what does not depend on the wire.
 */
#include "base/clock.h"
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

static void measure(const struct pair_variant *v, const char *name)
{
	size_t len = number("BPS_BENCH_PART", 128 << 10), n = number("BPS_BENCH_PARTS", 2000),
	       arena_len = 2 * WINDOW * len;
	_cleanup_(pair_freep) struct pair *pair = pair_new(v);
	struct transport *caller = pair->a.transport, *server = pair->b.transport;
	uint64_t ns, first_ns, of_caller, of_server;
	static struct run run;
	char *arena;

	arena = mmap(NULL, arena_len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	ASSERT_TRUE(arena != MAP_FAILED);
	memset(arena, 1, arena_len);
	ASSERT_OK(transport_memory_add(caller, arena, arena_len));
	pair->server->on_call = pair_on_call_echo;
	run.pair = pair;
	(void)run_calls(&run, arena, 1, 64, 1);
	first_ns = run_calls(&run, arena, 1, len, 1);
	ns = run_calls(&run, arena, n / 10 + 1, 64, 1) / (n / 10 + 1);
	printf("%s round_trip_64_us %.1f\n", name, (double)ns / 1e3);
	printf("%s first_part_us %.1f\n", name, (double)first_ns / 1e3);
	of_caller = metric_get(&caller->copied);
	of_server = metric_get(&server->copied);
	ns = run_calls(&run, arena, n, len, WINDOW);
	printf("%s goodput_mib_s %.1f\n", name,
	       (double)n * (double)len / 1048576.0 / ((double)ns / 1e9));
	print_copied(name, v->is_rdma, "caller", caller, of_caller, 2 * n * len);
	print_copied(name, v->is_rdma, "server", server, of_server, 2 * n * len);
	print_work(name);
	(void)fflush(stdout);
	transport_memory_remove(caller, arena);
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
