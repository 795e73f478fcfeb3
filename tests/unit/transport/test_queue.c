#include "test.h"
#include "transport/internal.h"

static struct message message(bool urgent, int32_t priority, uint64_t sequence)
{
	return (struct message){ .urgent = urgent, .priority = priority, .sequence = sequence };
}

TEST(urgent_then_priority_then_order)
{
	struct message messages[] = {
		message(false, 0, 0),	      message(false, 5, 1),	    message(true, -9, 2),
		message(false, 5, 3),	      message(false, -1, 4),	    message(true, -9, 5),
		message(false, INT32_MAX, 6), message(false, INT32_MIN, 7),
	};
	static const unsigned expected[] = { 2, 5, 6, 1, 3, 0, 4, 7 };
	struct queue queue = { 0 };

	for (unsigned i = 0; i < ARRAY_SIZE(messages); i++)
		ASSERT_OK(queue_push(&queue, &messages[i]));
	for (unsigned i = 0; i < ARRAY_SIZE(expected); i++)
		ASSERT_TRUE(queue_pop(&queue) == &messages[expected[i]]);
	ASSERT_TRUE(!queue_pop(&queue));
	queue_done(&queue);
}

TEST(what_is_pushed_back_keeps_its_place)
{
	struct message messages[] = { message(false, 1, 0), message(false, 1, 1),
				      message(false, 1, 2) };
	struct queue queue = { 0 };

	for (unsigned i = 0; i < 3; i++)
		ASSERT_OK(queue_push(&queue, &messages[i]));
	ASSERT_TRUE(queue_pop(&queue) == &messages[0]);
	ASSERT_TRUE(queue_pop(&queue) == &messages[1]);
	ASSERT_OK(queue_push(&queue, &messages[1]));
	ASSERT_OK(queue_push(&queue, &messages[0]));
	for (unsigned i = 0; i < 3; i++)
		ASSERT_TRUE(queue_pop(&queue) == &messages[i]);
	queue_done(&queue);
}

/* However many stood in line and how many did not. */
TEST(all_that_was_taken_is_pushed_back)
{
	enum { N = 200 };
	static struct message messages[N];
	struct message *taken[N];
	struct queue queue = { 0 };

	for (unsigned first = 1; first <= N; first += 37) {
		for (unsigned i = 0; i < N; i++) {
			messages[i] = message(false, (int32_t)(i * 7 % 11), i);
			ASSERT_OK(queue_push(&queue, &messages[i]));
		}
		for (unsigned i = 0; i < first; i++)
			taken[i] = queue_pop(&queue);
		for (unsigned i = first; i-- > 0;)
			ASSERT_OK(queue_push(&queue, taken[i]));
		for (unsigned i = 0; i < first; i++)
			ASSERT_TRUE(queue_pop(&queue) == taken[i]);
		for (unsigned i = first; i < N; i++)
			taken[i] = queue_pop(&queue);
		for (unsigned i = 1; i < N; i++)
			ASSERT_TRUE(taken[i - 1]->priority > taken[i]->priority ||
				    (taken[i - 1]->priority == taken[i]->priority &&
				     taken[i - 1]->sequence < taken[i]->sequence));
		ASSERT_TRUE(!queue_pop(&queue));
	}
	queue_done(&queue);
}

/* Against a plain search for the first. */
TEST(random_pushes_and_pops)
{
	enum { N = 3000 };
	static struct message messages[N];
	static bool is_in[N];
	struct queue queue = { 0 };
	unsigned n_pushed = 0, state = 1;

	for (unsigned step = 0; n_pushed < N || queue.n; step++) {
		unsigned best = N;

		state = state * 1103515245u + 12345;
		if (n_pushed < N && (state >> 16) % 5 < 3) {
			messages[n_pushed] = message((state >> 20) % 8 == 0,
						     (int32_t)((state >> 8) % 4), n_pushed);
			is_in[n_pushed] = true;
			ASSERT_OK(queue_push(&queue, &messages[n_pushed++]));
			continue;
		}
		for (unsigned i = 0; i < n_pushed; i++) {
			const struct message *a = &messages[i], *b = &messages[best % N];

			if (is_in[i] && (best == N || a->urgent > b->urgent ||
					 (a->urgent == b->urgent && a->priority > b->priority)))
				best = i;
		}
		if (best == N) {
			ASSERT_TRUE(!queue_pop(&queue));
			continue;
		}
		ASSERT_TRUE(queue_pop(&queue) == &messages[best]);
		is_in[best] = false;
	}
	queue_done(&queue);
}
