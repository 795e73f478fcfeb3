/* How long polling goes on that finds nothing, and what gives it time again. */
#include "proto/allowance.h"
#include "test.h"

enum { MS = 1000000, US = 1000 };

TEST(at_first_some_looks_may_be_in_vain)
{
	struct allowance a = { 0 };
	unsigned n = 0;

	/* Nothing else goes by than what the looks take. */
	for (int64_t now_ns = MS; allowance_remains(&a, now_ns); n++) {
		now_ns += 100 * US;
		allowance_settle(&a, now_ns, false, 100 * US, 5 * US);
	}
	ASSERT_EQ(n, ALLOWANCE_AT_ONCE_NS / (100 * US) + 1);
}

TEST(then_only_a_share)
{
	struct allowance a = { 0 };
	int64_t wasted_ns = 0, now_ns = MS, step_ns = MS, all_ns = 1000 * (int64_t)MS;

	for (; now_ns < all_ns; now_ns += step_ns) {
		if (!allowance_remains(&a, now_ns))
			continue;
		allowance_settle(&a, now_ns + 100 * US, false, 100 * US, 5 * US);
		wasted_ns += 100 * US;
	}
	ASSERT_INT(wasted_ns, <=, ALLOWANCE_AT_ONCE_NS + 100 * US + all_ns / ALLOWANCE_SHARE);
	ASSERT_INT(wasted_ns, >=, all_ns / ALLOWANCE_SHARE);
}

TEST(what_is_found_makes_good_for_a_wake_up)
{
	struct allowance a = { 0 };
	int64_t now_ns = MS;

	while (allowance_remains(&a, now_ns))
		allowance_settle(&a, now_ns, false, 100 * US, 5 * US);
	/* That which is there at once has saved none. */
	for (unsigned i = 0; i < 100; i++)
		allowance_settle(&a, now_ns, true, 0, 0);
	ASSERT_TRUE(!allowance_remains(&a, now_ns));
	for (unsigned i = 0; i < 5; i++)
		allowance_settle(&a, now_ns, true, 30 * US, 5 * US);
	ASSERT_TRUE(allowance_remains(&a, now_ns));
	/* Who looks well does not save up for worse days. */
	for (unsigned i = 0; i < 1000; i++)
		allowance_settle(&a, now_ns, true, 30 * US, 5 * US);
	ASSERT_EQ(a.debt_ns, 0);
}

TEST(a_processor_that_is_shared_is_given_up_for_a_while)
{
	struct allowance a = { 0 };
	int64_t now_ns = MS;

	/* Others had it while nothing was to be done: no harm. */
	for (unsigned i = 0; i < 10; i++)
		allowance_settle(&a, now_ns, false, 100 * US, 3 * MS);
	ASSERT_TRUE(allowance_remains(&a, now_ns));
	allowance_settle(&a, now_ns, true, 100 * US, 3 * MS);
	ASSERT_TRUE(allowance_remains(&a, now_ns));
	allowance_settle(&a, now_ns, true, 100 * US, 3 * MS);
	ASSERT_TRUE(!allowance_remains(&a, now_ns));
	ASSERT_TRUE(!allowance_remains(&a, now_ns + 3 * MS * INT64_C(255)));
	ASSERT_TRUE(allowance_remains(&a, now_ns + 3 * MS * INT64_C(256)));
	/* However bad it was, a second is enough. */
	for (unsigned i = 0; i < 10; i++)
		allowance_settle(&a, now_ns, true, 100 * US, 1000 * (int64_t)MS);
	ASSERT_TRUE(!allowance_remains(&a, now_ns + 1000 * (int64_t)MS));
	ASSERT_TRUE(allowance_remains(&a, now_ns + 1024 * (int64_t)MS));
}
