/*
 * The promises of fair.h: shares of flows that always have items, turns of those that come and go,
 * items that are returned; random pushes and pops against turns that the test keeps itself.
 */
#include "base/order/fair.h"
#include "test.h"

#define FLOWS 8

static uint64_t sequence;
static unsigned state = 1;

static unsigned random_of(unsigned n)
{
	state = state * 1103515245u + 12345;
	return (state >> 16) % n;
}

/* Its item says of whom it is. */
static void push(struct fair *fair, uint64_t flow, int32_t priority, uint32_t cost)
{
	struct order_item item = { .sequence = sequence++,
				   .item = (void *)(uintptr_t)(flow + 1),
				   .priority = priority,
				   .cost = cost };

	ASSERT_OK(fair_push(fair, flow, &item));
}

static uint64_t flow_of(const struct order_item *item)
{
	return (uintptr_t)item->item - 1;
}

static struct order_item take(struct fair *fair)
{
	struct order_item item = *fair_first(fair);

	ASSERT_TRUE(fair_pop(fair) == item.item);
	return item;
}

static uint64_t pop(struct fair *fair)
{
	struct order_item item = take(fair);

	return flow_of(&item);
}

static void drop(struct fair *fair)
{
	while (fair->n)
		(void)fair_pop(fair);
	fair_done(fair);
}

TEST(priority_orders_within_a_flow_only)
{
	struct fair fair = { 0 };

	for (unsigned i = 0; i < 100; i++) {
		push(&fair, 1, INT32_MAX, 10);
		push(&fair, 2, (int32_t)i, 10);
	}
	for (unsigned i = 0; i < 100; i++) {
		struct order_item item;

		ASSERT_EQ(pop(&fair), 1);
		item = take(&fair);
		ASSERT_EQ(flow_of(&item), 2);
		ASSERT_EQ(item.priority, 99 - i);
	}
	drop(&fair);
}

TEST(a_lone_flow_goes_by_its_order)
{
	struct fair fair = { 0 };

	push(&fair, 7, 1, 5);
	push(&fair, 7, 3, 5);
	push(&fair, 7, 2, 5);
	ASSERT_EQ(take(&fair).priority, 3);
	ASSERT_EQ(take(&fair).priority, 2);
	ASSERT_EQ(fair_first(&fair)->priority, 1);
	ASSERT_EQ(take(&fair).priority, 1);
	ASSERT_TRUE(!fair_first(&fair));
	drop(&fair);
}

/* However large its items are: who sends 16 MiB at a time has as much as who sends 4 KiB, and not more for more of them. */
TEST(backlogged_flows_have_the_same_cost)
{
	static const uint32_t costs[] = { 4 << 10, 16 << 20, 96, 300000 };
	uint64_t had[ARRAY_SIZE(costs)] = { 0 };
	struct fair fair = { 0 };

	for (unsigned i = 0; i < 2000000; i++) {
		struct order_item item;

		for (unsigned f = 0; !i && f < ARRAY_SIZE(costs); f++)
			for (unsigned n = 0; n < 1 + f * 50; n++)
				push(&fair, 1 + f, (int32_t)(f * 1000), costs[f]);
		item = take(&fair);
		had[flow_of(&item) - 1] += item.cost;
		push(&fair, flow_of(&item), item.priority, item.cost);
		for (unsigned f = 0; f < ARRAY_SIZE(costs); f++)
			for (unsigned k = 0; k < f; k++)
				ASSERT_INT(llabs((long long)(had[f] - had[k])), <=,
					   costs[f] + costs[k]);
	}
	drop(&fair);
}

/* Who comes when others have much goes after one item of each, and then not again before they have had as much. */
TEST(who_comes_waits_for_one_item_of_each)
{
	for (unsigned round = 0; round < 500; round++) {
		bool seen[FLOWS] = { false };
		struct fair fair = { 0 };
		uint64_t flow;

		for (unsigned i = 0; i < 400; i++)
			push(&fair, 1 + random_of(FLOWS - 2), (int32_t)random_of(1000),
			     random_of(2) ? random_of(1 << 24) : random_of(1000));
		for (unsigned i = random_of(300); i > 0; i--)
			(void)fair_pop(&fair);
		push(&fair, FLOWS - 1, INT32_MIN, 100);
		while ((flow = pop(&fair)) != FLOWS - 1) {
			ASSERT_TRUE(!seen[flow]);
			seen[flow] = true;
		}
		drop(&fair);
	}
}

/* One that always has one item only, with pauses shorter than its turn, has no more than another that waits all the time. */
TEST(to_come_and_go_earns_nothing)
{
	struct fair fair = { 0 };
	uint64_t had[3] = { 0 };

	push(&fair, 1, 0, 1 << 20);
	for (unsigned i = 0; i < 10; i++)
		push(&fair, 2, 0, 1000);
	for (unsigned i = 0; i < 100000; i++) {
		struct order_item item = take(&fair);

		had[flow_of(&item)] += item.cost;
		push(&fair, flow_of(&item), 0, item.cost);
	}
	ASSERT_INT(had[1], <=, had[2] + (2 << 20));
	ASSERT_INT(had[2], <=, had[1] + (2 << 20));
	drop(&fair);
}

TEST(to_have_been_idle_earns_nothing)
{
	struct fair fair = { 0 };
	unsigned n[3] = { 0 };

	push(&fair, 2, 0, 100);
	(void)fair_pop(&fair);
	for (unsigned i = 0; i < 1000; i++)
		push(&fair, 1, 0, 100);
	for (unsigned i = 0; i < 500; i++)
		ASSERT_EQ(pop(&fair), 1);
	for (unsigned i = 0; i < 200; i++)
		push(&fair, 2, 0, 100);
	for (unsigned i = 0; i < 200; i++)
		n[pop(&fair)]++;
	ASSERT_INT(n[1], >=, 99);
	ASSERT_INT(n[2], >=, 99);
	drop(&fair);
}

/* A debt ends with the rest, else with virtual time. */
TEST(after_a_rest_nobody_owes_anything)
{
	for (unsigned rests = 0; rests < 2; rests++) {
		struct fair fair = { 0 };

		push(&fair, 1, 0, 1000000);
		ASSERT_EQ(pop(&fair), 1);
		if (rests)
			fair_rest(&fair);
		for (unsigned i = 0; i < 5; i++)
			push(&fair, 2, 0, 10);
		push(&fair, 1, 0, 10);
		ASSERT_EQ(pop(&fair), 2);
		ASSERT_EQ(pop(&fair), rests ? 1 : 2);
		drop(&fair);
	}
}

/* As an acknowledgement beside bulk data. */
TEST(who_needs_less_than_its_share_is_served_at_once)
{
	struct fair fair = { 0 };

	for (unsigned i = 0; i < 100; i++)
		push(&fair, 1, INT32_MAX, 1 << 20);
	for (unsigned i = 0; i < 50; i++) {
		ASSERT_EQ(pop(&fair), 1);
		push(&fair, 2, INT32_MIN, 1 << 19);
		ASSERT_EQ(pop(&fair), 2);
	}
	drop(&fair);
}

TEST(what_goes_together_is_charged_together)
{
	struct fair fair = { 0 };

	for (unsigned i = 0; i < 10; i++) {
		push(&fair, 1, 0, 10);
		push(&fair, 2, 0, 10);
	}
	ASSERT_EQ(pop(&fair), 1);
	for (unsigned i = 0; i < 4; i++) {
		struct order_item item;

		ASSERT_EQ(flow_of(fair_next(&fair)), 1);
		item = *fair_next(&fair);
		ASSERT_TRUE(fair_pop_next(&fair) == item.item);
		ASSERT_EQ(flow_of(&item), 1);
	}
	for (unsigned i = 0; i < 5; i++)
		ASSERT_EQ(pop(&fair), 2);
	ASSERT_EQ(pop(&fair), 1);
	ASSERT_EQ(pop(&fair), 2);
	fair_charge(&fair, 2, 40);
	for (unsigned i = 0; i < 4; i++)
		ASSERT_EQ(pop(&fair), 1);
	ASSERT_TRUE(!fair_next(&fair));
	ASSERT_EQ(pop(&fair), 2);
	drop(&fair);
}

/* Whatever is taken and returned, what each has had is as if that had not been. */
TEST(what_is_returned_was_not_taken)
{
	uint64_t had[FLOWS] = { 0 }, largest = 1 << 20;
	struct order_item taken[64];
	struct fair fair = { 0 };

	for (unsigned f = 1; f < FLOWS; f++)
		for (unsigned i = 0; i < 100; i++)
			push(&fair, f, (int32_t)random_of(5), 1 + random_of(1 << 20));
	for (unsigned round = 0; round < 5000; round++) {
		unsigned n = 1 + random_of(ARRAY_SIZE(taken)), keep = random_of(3);

		for (unsigned i = 0; i < n; i++)
			taken[i] = take(&fair);
		for (unsigned i = n; i-- > keep;)
			fair_return(&fair, flow_of(&taken[i]), &taken[i]);
		for (unsigned i = 0; i < MIN(keep, n); i++) {
			had[flow_of(&taken[i])] += taken[i].cost;
			push(&fair, flow_of(&taken[i]), (int32_t)random_of(5),
			     1 + random_of(1 << 20));
		}
		for (unsigned f = 2; f < FLOWS; f++)
			ASSERT_INT(llabs((long long)(had[f] - had[1])), <=, 2 * largest);
	}
	drop(&fair);
}

/* Jobs come and go. */
/* Not one more of the flow that has the queue for itself, as when the kernel takes no more of what was offered to it. */
TEST(who_comes_after_a_return_goes_next)
{
	struct fair fair = { 0 };
	struct order_item taken;

	push(&fair, 1, 0, 100);
	push(&fair, 1, 0, 100);
	(void)fair_pop(&fair);
	taken = take(&fair);
	fair_return(&fair, 1, &taken);
	push(&fair, 2, 0, 1);
	push(&fair, 3, 0, 1);
	ASSERT_EQ(pop(&fair), 2);
	ASSERT_EQ(pop(&fair), 3);
	ASSERT_EQ(pop(&fair), 1);
	drop(&fair);
}

TEST(flows_are_used_again)
{
	struct fair fair = { 0 };

	for (uint64_t flow = 1; flow < 100000; flow++) {
		push(&fair, flow, 0, 1000);
		push(&fair, flow + 1000000, 0, 10);
		(void)fair_pop(&fair);
		(void)fair_pop(&fair);
		/* What they owe is soon past. */
		push(&fair, 2000000, 0, 1000);
		(void)fair_pop(&fair);
	}
	ASSERT_INT(fair.flows.n_entries, <=, 8);
	drop(&fair);
}

/* Against virtual time as its definition says, flow by flow. */
TEST(random_pushes_and_pops_are_in_turn)
{
	uint64_t turns[FLOWS] = { 0 }, now = 0;
	unsigned n[FLOWS] = { 0 };
	struct fair fair = { 0 };

	for (unsigned i = 0; i < 200000; i++) {
		struct order_item item;
		uint64_t f;

		if (random_of(2) && fair.n < 200) {
			f = 1 + random_of(FLOWS - 1);
			if (!n[f]++)
				turns[f] = MAX(turns[f], now);
			push(&fair, f, (int32_t)random_of(9), random_of(1 << 16));
			continue;
		}
		if (!fair.n) {
			ASSERT_TRUE(!fair_first(&fair));
			continue;
		}
		item = take(&fair);
		f = flow_of(&item);
		for (unsigned k = 1; k < FLOWS; k++)
			ASSERT_TRUE(!n[k] || turns[f] <= turns[k]);
		now = MAX(now, turns[f]);
		turns[f] += item.cost;
		n[f]--;
	}
	drop(&fair);
}
