/* What comes by TCP is right wherever a read ends: large behind large, small ones and packs behind large, and back. */
#include "transport_pair.h"

#include <sys/uio.h>

#define LEN_MAX	 300000
#define N_CALLS	 48
#define N_ROUNDS 40

static _Atomic uint32_t seed; /* 0: no read is cut */

/* Near the ends of headers, checksums and payloads. */
static size_t next_cut(void)
{
	uint32_t x = seed;

	x ^= x << 13;
	x ^= x >> 17;
	x ^= x << 5;
	seed = x;
	switch (x % 8) {
	case 0:
		return 1 + (x >> 8) % 8;
	case 1:
	case 2:
		return 88 + (x >> 8) % 24;
	case 3:
		return 180 + (x >> 8) % 40;
	case 4:
		return 4090 + (x >> 8) % 128;
	case 5:
	case 6:
		return (16u << 10) - 110 + (x >> 8) % 320;
	default:
		return SIZE_MAX;
	}
}

ssize_t __real_readv(int fd, const struct iovec *iov, int n);
ssize_t __wrap_readv(int fd, const struct iovec *iov, int n);
ssize_t __wrap_readv(int fd, const struct iovec *iov, int n)
{
	size_t left = seed ? next_cut() : SIZE_MAX;
	struct iovec cut[4];
	int m = 0;

	ASSERT_INT(n, <=, (int)ARRAY_SIZE(cut));
	for (; m < n && left; m++) {
		/* Nothing offered would be taken for the end of the connection. */
		ASSERT_TRUE(iov[m].iov_len > 0);
		cut[m] = iov[m];
		cut[m].iov_len = MIN(cut[m].iov_len, left);
		left -= cut[m].iov_len;
	}
	return __real_readv(fd, cut, m);
}

struct calls {
	struct pair_call call[N_CALLS];
	char payload[N_CALLS][LEN_MAX], target[N_CALLS][LEN_MAX];
};

static void run_calls(struct pair *pair, struct calls *calls, unsigned round)
{
	static const uint32_t lens[] = { 16u << 10, 100, 20000,		  0,	 1,	 4096, 4097,
					 100,	    100, (16u << 10) - 1, 20000, LEN_MAX };
	unsigned n = 1 + round * 7 % N_CALLS;

	for (unsigned i = 0; i < n; i++) {
		uint32_t len = lens[(i * (1 + round % 5) + round) % ARRAY_SIZE(lens)];

		pair_fill(calls->payload[i], len, round * N_CALLS + i);
		pair_call_init(&calls->call[i], calls->payload[i], len, calls->target[i], LEN_MAX);
		calls->call[i].call.header.key = i + 1;
		pair_call_begin(pair, &calls->call[i]);
	}
	for (unsigned i = 0; i < n; i++) {
		struct call *call = &calls->call[i].call;

		PAIR_UNTIL(pair, calls->call[i].n_done);
		ASSERT_OK(call->status);
		ASSERT_TRUE(pair_check(calls->target[i], call->answer.len, round * N_CALLS + i));
	}
}

static void run(unsigned n_threads, bool no_checksums, const char *key)
{
	struct pair_config config = { .variant = { "", false, n_threads, 1 },
				      .key_a = key,
				      .key_b = key,
				      .no_checksums = no_checksums };
	_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);
	_cleanup_(freep) struct calls *calls = calloc(1, sizeof(*calls));

	ASSERT_TRUE(calls);
	pair->server->on_call = pair_on_call_echo;
	for (unsigned round = 0; round < N_ROUNDS; round++) {
		seed = 88172645 + round;
		run_calls(pair, calls, round);
	}
	seed = 0;
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

TEST(with_checksums)
{
	run(0, false, NULL);
}

TEST(with_tags)
{
	run(0, false, "k");
}

TEST(without)
{
	run(0, true, NULL);
}

TEST(on_threads)
{
	run(1, false, NULL);
	run(1, true, NULL);
	run(1, false, "k");
}
