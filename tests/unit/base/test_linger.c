/* A loop that lingers, by a clock that goes on only when it gives its processor away. */
#include "base/clock.h"
#include "base/loop/loop.h"
#include "test.h"
#include <sched.h>
#include <sys/epoll.h>

static uint64_t now_ns; /* 0: the real one */
static uint64_t away_ns;
static unsigned n_yields;
static struct loop *gift_loop; /* what is to come comes while it is away */
static struct mail gift;
static unsigned n_gifts;

int __real_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
	if (!now_ns)
		return __real_clock_gettime(clock, ret);
	*ret = (struct timespec){ (time_t)(now_ns / NSEC_PER_SEC), (long)(now_ns % NSEC_PER_SEC) };
	return 0;
}

int __wrap_sched_yield(void);
int __wrap_sched_yield(void)
{
	n_yields++;
	now_ns += away_ns;
	if (gift_loop)
		loop_post(gift_loop, &gift);
	return 0;
}

static unsigned n_asks; /* of the kernel, for descriptors */

int __real_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout_ms);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout_ms);
int __wrap_epoll_wait(int epoll, struct epoll_event *events, int n, int timeout_ms)
{
	n_asks += !timeout_ms;
	return __real_epoll_wait(epoll, events, n, timeout_ms);
}

static void on_gift(struct mail *mail)
{
	(void)mail;
	n_gifts++;
}

static struct loop *start(void)
{
	struct loop *loop;

	ASSERT_OK(loop_new(&loop));
	now_ns = NSEC_PER_SEC;
	gift.run = on_gift;
	return loop;
}

enum { LINGER_NS = 100000 };

/* How often it gives its processor away before it sleeps. */
static unsigned linger(struct loop *loop)
{
	n_yields = 0;
	(void)loop_linger(loop, now_ns, LINGER_NS);
	while (loop_lingers(loop))
		ASSERT_OK(loop_turn(loop, 1));
	return n_yields;
}

TEST(in_vain_it_lingers_for_a_share_of_the_time)
{
	_cleanup_(loop_freep) struct loop *loop = start();
	const uint64_t start_ns = now_ns;
	uint64_t looked_ns = 0;

	away_ns = 10 * NSEC_PER_USEC;
	for (unsigned round = 0; round < 300; round++) {
		uint64_t here_ns = linger(loop) * away_ns;

		/* Not less in a job's first rounds. */
		ASSERT_TRUE(here_ns == LINGER_NS || (!here_ns && round >= 40));
		looked_ns += here_ns;
		now_ns += NSEC_PER_MSEC;
	}
	ASSERT_INT(looked_ns, <=, 4100 * NSEC_PER_USEC + (now_ns - start_ns) / 256);
}

TEST(who_shares_his_processor_lingers_no_more_for_a_while)
{
	_cleanup_(loop_freep) struct loop *loop = start();

	away_ns = 3 * NSEC_PER_MSEC;
	/* Nothing was to be done meanwhile: nobody waited for it. */
	for (unsigned i = 0; i < 10; i++)
		ASSERT_EQ(linger(loop), 1);
	now_ns += NSEC_PER_SEC;
	gift_loop = loop;
	for (unsigned i = 1; i <= 2; i++) {
		ASSERT_EQ(linger(loop), 1);
		ASSERT_EQ(n_gifts, i);
	}
	now_ns += 500 * NSEC_PER_MSEC;
	ASSERT_EQ(linger(loop), 0);
	now_ns += 20 * NSEC_PER_MSEC;
	ASSERT_EQ(linger(loop), 1);
	ASSERT_EQ(n_gifts, 3);
}

TEST(what_it_finds_makes_good_for_what_it_did_not)
{
	_cleanup_(loop_freep) struct loop *loop = start();

	away_ns = 10 * NSEC_PER_USEC;
	while (linger(loop))
		;
	/* It lingers on from the last that is granted: nothing is found there. */
	now_ns += 256 * LINGER_NS;
	(void)loop_linger(loop, now_ns, LINGER_NS);
	gift_loop = loop;
	for (unsigned i = 0; i < 9; i++)
		ASSERT_OK(loop_turn(loop, 1));
	gift_loop = NULL;
	ASSERT_EQ(n_gifts, 9);
	ASSERT_EQ(linger(loop), 10);
}

TEST(who_always_looks_need_not_ask_for_descriptors_each_time)
{
	_cleanup_(loop_freep) struct loop *loop = start();

	away_ns = NSEC_PER_USEC;
	ASSERT_EQ(linger(loop), 100);
	ASSERT_EQ(n_asks, 101);
	n_asks = 0;
	loop_spin(loop, NSEC_PER_USEC, NULL);
	ASSERT_EQ(linger(loop), 100);
	ASSERT_INT(n_asks, >=, 12);
	ASSERT_INT(n_asks, <=, 13);
}
