/* The order of items against a plain search, with random pushes, pops and removals. */
#include "base/order/order.h"
#include "test.h"

#define N 3000

static struct order_item items[N];
static bool is_in[N];

static void set(unsigned i, int32_t priority)
{
	items[i] = (struct order_item){ .sequence = i, .item = &items[i], .priority = priority };
}

static bool is_before(const struct order_item *a, const struct order_item *b)
{
	return a->priority > b->priority ||
	       (a->priority == b->priority && a->sequence < b->sequence);
}

/* By a plain search; N: there is none. */
static unsigned first_of(unsigned n)
{
	unsigned best = N;

	for (unsigned i = 0; i < n; i++)
		if (is_in[i] && (best == N || is_before(&items[i], &items[best])))
			best = i;
	return best;
}

TEST(priority_then_sequence)
{
	static const int32_t priorities[] = { 0, 5, -9, 5, INT32_MAX, INT32_MIN };
	static const unsigned expected[] = { 4, 1, 3, 0, 2, 5 };
	struct order order = { 0 };

	for (unsigned i = 0; i < ARRAY_SIZE(priorities); i++) {
		set(i, priorities[i]);
		ASSERT_OK(order_push(&order, &items[i]));
	}
	for (unsigned i = 0; i < ARRAY_SIZE(expected); i++)
		ASSERT_TRUE(order_pop(&order).item == &items[expected[i]]);
	ASSERT_TRUE(!order_first(&order));
	order_done(&order);
}

/* However many stood in line and how many did not. */
TEST(all_that_was_taken_is_pushed_back)
{
	enum { MANY = 200 };
	struct order_item taken[MANY];
	struct order order = { 0 };

	for (unsigned first = 1; first <= MANY; first += 37) {
		for (unsigned i = 0; i < MANY; i++) {
			set(i, (int32_t)(i * 7 % 11));
			ASSERT_OK(order_push(&order, &items[i]));
		}
		for (unsigned i = 0; i < first; i++)
			taken[i] = order_pop(&order);
		for (unsigned i = first; i-- > 0;)
			ASSERT_OK(order_push(&order, &taken[i]));
		for (unsigned i = 0; i < first; i++)
			ASSERT_TRUE(order_pop(&order).item == taken[i].item);
		for (unsigned i = first; i < MANY; i++)
			taken[i] = order_pop(&order);
		for (unsigned i = 1; i < MANY; i++)
			ASSERT_TRUE(is_before(&taken[i - 1], &taken[i]));
		ASSERT_TRUE(!order_first(&order));
	}
	order_done(&order);
}

/* Against a plain search for the first; some are taken out of the midst. */
TEST(random_pushes_pops_and_removals)
{
	struct order order = { 0 };
	unsigned n = 0, state = 1;

	while (n < N || order.n) {
		unsigned best, at;

		state = state * 1103515245u + 12345;
		if (n < N && (state >> 16) % 7 < 4) {
			set(n, (int32_t)((state >> 8) % 4));
			is_in[n] = true;
			ASSERT_OK(order_push(&order, &items[n++]));
			continue;
		}
		at = n ? (state >> 4) % n : 0;
		if ((state >> 16) % 7 == 4 && n) {
			ASSERT_TRUE(order_remove(&order, &items[at]) == is_in[at]);
			is_in[at] = false;
			continue;
		}
		best = first_of(n);
		if (best == N) {
			ASSERT_TRUE(!order_first(&order) && !order.n);
			continue;
		}
		ASSERT_TRUE(order_first(&order)->item == &items[best]);
		ASSERT_TRUE(order_pop(&order).item == &items[best]);
		is_in[best] = false;
	}
	order_done(&order);
}
