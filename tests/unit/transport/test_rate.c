/* What is known of the link's speed, by a clock of the test's own. */
#include "test.h"
#include "transport/common/worker.h"

#include "base/clock.h"

#define MS NSEC_PER_MSEC

/* bytes each millisecond, for so many. Returns when the last came. */
static uint64_t come(struct rate *rate, uint64_t from_ns, unsigned ms, uint64_t bytes)
{
	for (unsigned i = 1; i <= ms; i++)
		rate_count(rate, bytes, from_ns + i * MS);
	return from_ns + ms * MS;
}

static uint64_t known(struct rate *rate)
{
	return atomic_load(&rate->bytes_s);
}

TEST(work_without_a_break_is_measured)
{
	struct rate rate = { 0 };
	uint64_t now_ns = 1000 * MS;

	now_ns = come(&rate, now_ns, 60, 50000);
	ASSERT_EQ(known(&rate), 0);
	(void)come(&rate, now_ns, 10, 50000);
	ASSERT_EQ(known(&rate), 50000000);
}

TEST(pauses_are_not)
{
	struct rate rate = { 0 };
	uint64_t now_ns = 1000 * MS;

	/* A little at a time, however much in all, and what has come after a while says nothing. */
	for (unsigned i = 0; i < 100; i++)
		now_ns = come(&rate, now_ns, 30, 50000) + 20 * MS;
	ASSERT_EQ(known(&rate), 0);
	rate_count(&rate, 1 << 30, now_ns);
	(void)come(&rate, now_ns, 70, 50000);
	ASSERT_EQ(known(&rate), 50000000);
}

/* A worker has many lanes, and each says when it has heard something: the idle ones, long ago. */
TEST(lanes_that_bring_nothing_are_no_pause)
{
	struct rate rate = { 0 };
	uint64_t now_ns = 1000 * MS;

	for (unsigned i = 0; i < 70; i++) {
		now_ns = come(&rate, now_ns, 1, 50000);
		rate_count(&rate, 0, 900 * MS);
	}
	ASSERT_EQ(known(&rate), 50000000);
}

TEST(more_counts_at_once_and_less_by_and_by)
{
	struct rate rate = { 0 };
	uint64_t now_ns = come(&rate, 1000 * MS, 200, 50000);

	now_ns = come(&rate, now_ns, 200, 90000);
	ASSERT_EQ(known(&rate), 90000000);
	now_ns = come(&rate, now_ns, 200, 10000);
	ASSERT_INT(known(&rate), >, 85000000);
	(void)come(&rate, now_ns, 100000, 10000);
	ASSERT_INT(known(&rate), <, 15000000);
}

/* Each data thread has one, and all come by one link. */
TEST(those_of_all_threads_together_are_the_link)
{
	_Atomic uint64_t sum = 0;
	struct rate a = { .sum = &sum }, b = { .sum = &sum };
	uint64_t now_ns = come(&a, 1000 * MS, 70, 50000);

	ASSERT_EQ(sum, 50000000);
	now_ns = come(&b, now_ns, 70, 30000);
	ASSERT_EQ(sum, 80000000);
	(void)come(&a, now_ns, 20000, 10000);
	ASSERT_INT(known(&a), <, 50000000);
	ASSERT_EQ(sum, known(&a) + known(&b));
}
