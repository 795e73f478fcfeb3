/* What is next to leave a lane: order.c and fair.c have tests of their own. */
#include "test.h"
#include "transport/lane/queue.h"

struct sent {
	struct message message;
	struct data_header header;
};

static uint64_t sequence;

static void push(struct fair *queue, struct sent *sent, unsigned op, uint64_t job, int32_t priority,
		 uint32_t len)
{
	sent->header = (struct data_header){ .op = (uint8_t)op, .job = job, .len = len };
	sent->message = (struct message){
		.header = &sent->header,
		.priority = priority,
		.urgent = !len || (op != DATA_PUSH && op != DATA_RESULT),
		.sequence = sequence++,
	};
	ASSERT_OK(queue_push(queue, &sent->message));
}

static void expect(struct fair *queue, const struct sent *sent)
{
	ASSERT_TRUE(queue_first(queue) == &sent->message);
	ASSERT_TRUE(queue_pop(queue) == &sent->message);
}

TEST(of_a_job_urgent_then_priority_then_order)
{
	static const int32_t priorities[] = { 0, 5, 5, -1, INT32_MAX, INT32_MIN };
	static const unsigned expected[] = { 4, 1, 2, 0, 3, 5 };
	struct sent sent[ARRAY_SIZE(priorities)], urgent[2];
	struct fair queue = { 0 };

	for (unsigned i = 0; i < ARRAY_SIZE(sent); i++)
		push(&queue, &sent[i], DATA_PUSH, 1, priorities[i], 4096);
	push(&queue, &urgent[0], DATA_PUSH, 1, -9, 0);
	push(&queue, &urgent[1], DATA_PULL, 1, -8, 0);
	expect(&queue, &urgent[0]);
	expect(&queue, &urgent[1]);
	for (unsigned i = 0; i < ARRAY_SIZE(expected); i++)
		expect(&queue, &sent[expected[i]]);
	ASSERT_TRUE(!queue_pop(&queue));
	fair_done(&queue);
}

/* What a job calls urgent goes before its own, and that without payload too. */
TEST(no_job_is_before_another)
{
	enum { N = 100 };
	static struct sent greedy[N], modest[2], empty[N];
	struct fair queue = { 0 };

	for (unsigned i = 0; i < N; i++)
		push(&queue, &greedy[i], DATA_PUSH, 1, INT32_MAX, 1 << 20);
	for (unsigned i = 0; i < N; i++)
		push(&queue, &empty[i], i % 2 ? DATA_PUSH : DATA_PULL, 1, INT32_MAX, 0);
	for (unsigned i = 0; i < 10; i++)
		expect(&queue, &empty[i]);
	push(&queue, &modest[0], DATA_RESULT, 2, INT32_MIN, 4096);
	push(&queue, &modest[1], DATA_PUSH, 2, INT32_MIN, 4096);
	expect(&queue, &modest[0]);
	for (unsigned i = 10; i < 53; i++)
		expect(&queue, &empty[i]);
	expect(&queue, &modest[1]);
	while (queue_pop(&queue))
		;
	fair_done(&queue);
}

/* Acknowledgements, set-up, signs of life: in order, beside any job's data, and each job's together have one share. */
TEST(what_is_no_data_leaves_next)
{
	enum { N = 100 };
	static struct sent data[N], notices[N];
	struct fair queue = { 0 };
	unsigned n_data = 0;

	for (unsigned i = 0; i < N; i++)
		push(&queue, &data[i], DATA_PUSH, 1, INT32_MAX, 1 << 20);
	for (unsigned i = 0; i < 10; i++) {
		expect(&queue, &data[n_data++]);
		push(&queue, &notices[2 * i], DATA_ACK, 1, 0, 0);
		push(&queue, &notices[2 * i + 1], DATA_JOIN, 0, 0, 4000);
		expect(&queue, &notices[2 * i]);
		expect(&queue, &notices[2 * i + 1]);
	}
	/* As many bytes as a job has: then they take turns. */
	for (unsigned i = 0; i < N; i++)
		push(&queue, &notices[i], DATA_DECLARE, 1, 0, 1 << 20);
	n_data = 0;
	for (unsigned i = 0; i < 20; i++)
		n_data += queue_pop(&queue)->header->op == DATA_PUSH;
	ASSERT_INT(n_data, >=, 9);
	ASSERT_INT(n_data, <=, 11);
	while (queue_pop(&queue))
		;
	fair_done(&queue);
}

TEST(what_leaves_together_is_of_one_job)
{
	struct sent first[3], second[3];
	struct fair queue = { 0 };

	for (unsigned i = 0; i < 3; i++) {
		push(&queue, &first[i], DATA_PUSH, 1, 0, 4096);
		push(&queue, &second[i], DATA_PUSH, 2, 0, 4096);
	}
	expect(&queue, &first[0]);
	ASSERT_TRUE(queue_next(&queue) == &first[1].message);
	ASSERT_TRUE(queue_pop_next(&queue) == &first[1].message);
	expect(&queue, &second[0]);
	ASSERT_TRUE(queue_pop_next(&queue) == &second[1].message);
	/* What the kernel did not take comes back, and goes again. */
	queue_return(&queue, &second[1].message);
	queue_return(&queue, &second[0].message);
	queue_return(&queue, &first[1].message);
	queue_return(&queue, &first[0].message);
	for (unsigned i = 0; i < 6; i++)
		ASSERT_TRUE(queue_pop(&queue));
	ASSERT_TRUE(!queue_pop(&queue));
	fair_done(&queue);
}
