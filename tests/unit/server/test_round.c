/* Contributions of every operation, what is refused, and how rounds and jobs end. */
#include "base/clock.h"
#include "base/metrics.h"
#include "double.h"

#define FAR _cleanup_(far_freep) struct far *far

static const uint32_t two_each[] = { 2, 2, 2, 2 };

/* One part of float32 elements from a node: all its elements have the value. */
static struct asked *push_as(struct far *far, unsigned end, struct data_header header, float value,
			     uint32_t n)
{
	float values[2048];

	for (uint32_t i = 0; i < n; i++)
		values[i] = value;
	if (!header.total)
		header.total = n * sizeof(float);
	if (!header.part_len)
		header.part_len = n * sizeof(float);
	header.len = n * sizeof(float);
	return far_call(far, end, &header, values);
}

static struct asked *push(struct far *far, const struct layout *layout, uint64_t key,
			  uint64_t round, uint32_t node, float value)
{
	return push_as(far, node, far_push(layout, key, round, node), value, 4);
}

/* A contribution without data of a node that is given the source's. */
static struct asked *push_empty(struct far *far, unsigned end, struct data_header header,
				uint32_t n)
{
	header.total = header.part_len = n * sizeof(float);
	return far_call(far, end, &header, NULL);
}

static void expect_values(struct far *far, struct asked *asked, float value, uint32_t n)
{
	const float *values;

	far_expect(far, asked, 0, NULL);
	ASSERT_EQ(asked->answer.op, DATA_RESULT);
	ASSERT_EQ(asked->answer.len, n * sizeof(float));
	values = asked->data;
	for (uint32_t i = 0; i < n; i++)
		ASSERT_TRUE(values[i] == value);
}

static void expect_no_data(struct far *far, struct asked *asked)
{
	far_expect(far, asked, 0, NULL);
	ASSERT_EQ(asked->answer.op, DATA_RESULT);
	ASSERT_EQ(asked->answer.len, 0);
}

TEST(sum_goes_to_every_node)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *a, *b, *c;
	struct data_header h;

	far_form(far, &layout);
	a = push(far, &layout, 1, 1, 2, 1);
	b = push(far, &layout, 1, 1, 0, 2);
	far_expect_waiting(far, a);
	far_expect_waiting(far, b);
	h = far_push(&layout, 1, 1, 1);
	h.priority = -7;
	c = push_as(far, 1, h, 4, 4);
	expect_values(far, a, 7, 4);
	expect_values(far, b, 7, 4);
	expect_values(far, c, 7, 4);
	/* The answer says what it answers. */
	ASSERT_TRUE(c->answer.job == layout.job && c->answer.key == 1 && c->answer.round == 1);
	ASSERT_EQ(c->answer.node, 1);
	ASSERT_EQ(a->answer.node, 2);
	ASSERT_EQ(c->answer.part_len, 16);
	ASSERT_EQ(c->answer.total, 16);
	ASSERT_EQ(c->answer.operation, OPERATION_PUSH_PULL);
}

TEST(average_is_over_ranks)
{
	FAR = far_new(NULL);
	const uint32_t per_node[] = { 3, 1 };
	struct layout layout = far_layout("job", 2, per_node);
	struct data_header h;
	struct asked *a, *b;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.reduction = REDUCTION_AVERAGE;
	a = push_as(far, 0, h, 9, 4);
	h.node = 1;
	b = push_as(far, 1, h, 1, 4);
	expect_values(far, a, 2.5, 4);
	expect_values(far, b, 2.5, 4);
}

TEST(single_node_gets_its_sum)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 1, two_each);

	far_form(far, &layout);
	expect_values(far, push(far, &layout, 1, 1, 0, 5), 5, 4);
	expect_values(far, push(far, &layout, 1, 2, 0, 6), 6, 4);
}

TEST(barrier_has_no_data)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct data_header h;
	struct asked *a, *b;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.operation = OPERATION_BARRIER;
	h.reduction = 0;
	a = far_call(far, 0, &h, NULL);
	far_expect_waiting(far, a);
	h.node = 1;
	b = far_call(far, 1, &h, NULL);
	expect_no_data(far, a);
	expect_no_data(far, b);
}

TEST(empty_tensor)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct data_header h;
	struct asked *a, *b;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	a = far_call(far, 0, &h, NULL);
	h.node = 1;
	b = far_call(far, 1, &h, NULL);
	expect_no_data(far, a);
	expect_no_data(far, b);
}

TEST(broadcast_comes_from_the_root)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *a, *b, *c;
	struct data_header h;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.operation = OPERATION_BROADCAST;
	h.reduction = 0;
	h.root = 3; /* on node 1 */
	a = push_empty(far, 0, h, 4);
	h.node = 1;
	b = push_as(far, 1, h, 3.5, 4);
	/* The source waits too: a round is one for all. */
	far_expect_waiting(far, b);
	h.node = 2;
	far_expect(far, push_as(far, 2, h, 9, 4), -EPROTO, "node 2 brings 16 bytes where 0 belong");
	c = push_empty(far, 2, h, 4);
	expect_values(far, a, 3.5, 4);
	expect_values(far, c, 3.5, 4);
	expect_no_data(far, b);
	h.round = 2;
	h.root = 6;
	far_expect(far, push_empty(far, 2, h, 4), -EINVAL, "broadcast from rank 6 of 6");
}

TEST(all_gather_moves_each_ranks_block)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	struct asked *asked[4][2];

	far_form(far, &layout);
	for (uint32_t node = 0; node < 2; node++) {
		for (uint32_t rank = 0; rank < 4; rank++) {
			struct data_header h = far_push(&layout, 1, 1, node);

			h.operation = OPERATION_ALL_GATHER;
			h.reduction = 0;
			h.block = rank;
			/* Blocks may differ in length. */
			asked[rank][node] = layout.node_of_rank[rank] == node
						    ? push_as(far, node, h, (float)rank, rank + 1)
						    : push_empty(far, node, h, rank + 1);
		}
	}
	for (uint32_t rank = 0; rank < 4; rank++) {
		uint32_t from = layout.node_of_rank[rank];

		expect_no_data(far, asked[rank][from]);
		expect_values(far, asked[rank][!from], (float)rank, rank + 1);
	}
}

TEST(reduce_scatter_goes_to_the_target)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	struct data_header h;
	struct asked *a, *b;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.operation = OPERATION_REDUCE_SCATTER;
	h.block = 2; /* a rank of node 1 */
	a = push_as(far, 0, h, 1, 4);
	h.node = 1;
	b = push_as(far, 1, h, 2, 4);
	expect_no_data(far, a);
	expect_values(far, b, 3, 4);
	h.block = 4;
	far_expect(far, push_as(far, 1, h, 2, 4), -EINVAL, "reduce_scatter has no block 4");
}

TEST(all_to_all_concerns_two_nodes)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct data_header h;
	struct asked *a, *b;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 2);
	h.operation = OPERATION_ALL_TO_ALL;
	h.reduction = 0;
	h.block = 1 * 6 + 4; /* rank 1 (node 0) to rank 4 (node 2) */
	a = push_empty(far, 2, h, 4);
	h.node = 1;
	far_expect(far, push_empty(far, 1, h, 4), -EPROTO, "node 1 has no part in block 10");
	far_expect_waiting(far, a);
	h.node = 0;
	b = push_as(far, 0, h, 8, 4);
	expect_values(far, a, 8, 4);
	expect_no_data(far, b);
	h.block = 1 * 6 + 0; /* both on node 0 */
	far_expect(far, push_as(far, 0, h, 8, 4), -EINVAL, "stays on node 0");
	h.block = 36;
	far_expect(far, push_as(far, 0, h, 8, 4), -EINVAL, "has no block 36");
}

/* A repeat of one that is held, and of one whose round is over. */
TEST(repeats_are_not_counted)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 1, 0, 1);
	far_expect(far, push(far, &layout, 1, 1, 0, 100), -EALREADY, "is here already");
	far_expect_waiting(far, a);
	b = push(far, &layout, 1, 1, 1, 2);
	expect_values(far, a, 3, 4);
	expect_values(far, b, 3, 4);
	far_expect(far, push(far, &layout, 1, 1, 0, 1), -ESTALE, "it is over");
	far_expect(far, push(far, &layout, 1, 1, 1, 1), -ESTALE, "round 1, block 0, part 0");
}

/* Round r + 1 waits in its own slot, whichever comes first, and never mixes with r. */
TEST(rounds_do_not_mix)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a1, *a2, *a3, *b1, *b2, *b3;

	far_form(far, &layout);
	a2 = push(far, &layout, 1, 2, 0, 20);
	a1 = push(far, &layout, 1, 1, 0, 10);
	a3 = push(far, &layout, 1, 3, 0, 30);
	/* Round 3 is complete before the others; what it closes is itself alone. */
	b3 = push(far, &layout, 1, 3, 1, 3);
	expect_values(far, a3, 33, 4);
	expect_values(far, b3, 33, 4);
	far_expect_waiting(far, a1);
	b1 = push(far, &layout, 1, 1, 1, 1);
	expect_values(far, a1, 11, 4);
	far_expect_waiting(far, a2);
	b2 = push(far, &layout, 1, 2, 1, 2);
	expect_values(far, a2, 22, 4);
	expect_values(far, b1, 11, 4);
	expect_values(far, b2, 22, 4);
	for (uint64_t round = 1; round <= 3; round++)
		far_expect(far, push(far, &layout, 1, round, 0, 0), -ESTALE, NULL);
	ASSERT_TRUE(!push(far, &layout, 1, 4, 0, 0)->done);
}

/* Long after, and for jumps of every width around the window of 64. */
TEST(closed_rounds_stay_closed)
{
	for (uint64_t jump = 1; jump < 140; jump += jump < 60 || jump > 68 ? 13 : 1) {
		FAR = far_new(NULL);
		struct layout layout = far_layout("job", 1, NULL);

		far_form(far, &layout);
		expect_values(far, push(far, &layout, 1, 1, 0, 1), 1, 4);
		expect_values(far, push(far, &layout, 1, 1 + jump, 0, 1), 1, 4);
		far_expect(far, push(far, &layout, 1, 1, 0, 1), -ESTALE, NULL);
		far_expect(far, push(far, &layout, 1, 1 + jump, 0, 1), -ESTALE, NULL);
		if (jump > 1)
			expect_values(far, push(far, &layout, 1, jump, 0, 1), 1, 4);
		far_expect(far, push(far, &layout, 1, jump, 0, 1), -ESTALE, NULL);
		/* Within the window what was never there is still new, beyond it all is over. */
		if (jump > 2 && jump < 66)
			expect_values(far, push(far, &layout, 1, 2, 0, 1), 1, 4);
		if (jump > 1)
			far_expect(far, push(far, &layout, 1, 2, 0, 1), -ESTALE, NULL);
		far_expect(far, push(far, &layout, 1, 1, 0, 1), -ESTALE, NULL);
	}
}

TEST(strangers_are_refused)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL), late = layout;
	struct data_header h;
	struct asked *a;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 1);
	far_expect(far, push_as(far, 0, h, 1, 4), -EACCES, "end0 does not speak for node 1");
	far_expect(far, push_as(far, 5, h, 1, 4), -EACCES, "end5 does not speak for node 1");
	h.node = 2;
	far_expect(far, push_as(far, 0, h, 1, 4), -EPROTO, "there is no node 2");
	h.node = 0;
	h.job ^= 1;
	far_expect(far, push_as(far, 0, h, 1, 4), -EPROTO, "no such job");
	h.job = 0;
	far_expect(far, push_as(far, 0, h, 1, 4), -EPROTO, "no such job");
	/* Joined is not attached. */
	late.name = "late";
	a = far_join(far, 0, &late, 0, NULL);
	far_expect(far, far_join(far, 1, &late, 1, NULL), 0, NULL);
	h.job = a->answer.job;
	far_expect(far, push_as(far, 0, h, 1, 4), -EPROTO, "node 0 has not attached");
}

static void expect_mismatch(struct data_header a, struct data_header b, uint32_t n_a, uint32_t n_b,
			    const char *text_a, const char *text_b)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *first, *second, *third, *other;
	struct data_header h;

	far_form(far, &layout);
	(void)far_tensor(far, &layout, "layer1.weight", DTYPE_FLOAT32, 100, NULL);
	a.job = b.job = layout.job;
	a.node = 0;
	b.node = 1;
	/* Another part of the round fails with it, another round and another tensor do not. */
	h = a;
	h.part += 100;
	other = push_as(far, 0, h, 1, n_a);
	h = far_push(&layout, 1, 2, 0);
	(void)push_as(far, 0, h, 1, 4);
	first = push_as(far, 0, a, 1, n_a);
	second = push_as(far, 1, b, 1, n_b);
	for (unsigned i = 0; i < 3; i++) {
		struct asked *asked = (struct asked *[]){ first, second, other }[i];

		far_expect(far, asked, -EINVAL,
			   "tensor layer1.weight, round 1: the ranks disagree");
		ASSERT_CONTAINS(asked->text, text_a);
		ASSERT_CONTAINS(asked->text, text_b);
	}
	/* So does the third node, late. */
	a.node = 2;
	third = a.operation == OPERATION_BROADCAST ? push_empty(far, 2, a, n_a)
						   : push_as(far, 2, a, 1, n_a);
	far_expect(far, third, -EINVAL, "the ranks disagree");
	h.node = 1;
	(void)push_as(far, 1, h, 1, 4);
	h.node = 2;
	expect_values(far, push_as(far, 2, h, 1, 4), 3, 4);
}

TEST(mismatches_name_both_sides)
{
	struct layout none = far_layout("job", 1, NULL);
	struct data_header a = far_push(&none, 1, 1, 0), b = a;

	b.dtype = DTYPE_INT32;
	expect_mismatch(a, b, 4, 4, "ranks 0, 1 (node 0): push_pull (sum) of float32",
			"ranks 2, 3 (node 1): push_pull (sum) of int32");
	b = a;
	b.reduction = REDUCTION_MAX;
	expect_mismatch(a, b, 4, 4, "(node 0): push_pull (sum) of float32",
			"(node 1): push_pull (max) of float32");
	b = a;
	b.operation = OPERATION_REDUCE_SCATTER;
	expect_mismatch(a, b, 4, 4, "(node 0): push_pull (sum) of float32",
			"(node 1): reduce_scatter (sum) of float32");
	b = a;
	expect_mismatch(a, b, 4, 5, "(node 0): part 0 is 16 bytes at 0 of 16",
			"(node 1): part 0 is 20 bytes at 0 of 20");
	b.total = 32;
	expect_mismatch(a, b, 4, 4, "(node 0): part 0 is 16 bytes at 0 of 16",
			"(node 1): part 0 is 16 bytes at 0 of 32");
	a.total = 32;
	b.part_len = 32;
	expect_mismatch(a, b, 4, 8, "(node 0): part 0 is 16 bytes at 0 of 32",
			"(node 1): part 0 is 32 bytes at 0 of 32");
	b.part_len = 0;
	b.offset = 16;
	expect_mismatch(a, b, 4, 4, "(node 0): part 0 is 16 bytes at 0 of 32",
			"(node 1): part 0 is 16 bytes at 16 of 32");
	a.operation = b.operation = OPERATION_BROADCAST;
	a.reduction = b.reduction = 0;
	b.offset = 0;
	b.root = 2;
	expect_mismatch(a, b, 4, 4, "(node 0): broadcast of float32 from rank 0",
			"(node 1): broadcast of float32 from rank 2");
}

/* Where the operations differ, so do the blocks: the tensor's round knows it all the same. */
TEST(mismatch_across_blocks)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	struct data_header a, b;
	struct asked *first;

	far_form(far, &layout);
	a = far_push(&layout, 9, 1, 0);
	b = far_push(&layout, 9, 1, 1);
	b.operation = OPERATION_ALL_GATHER;
	b.reduction = 0;
	b.block = 3;
	first = push_as(far, 0, a, 1, 4);
	far_expect(
		far, push_as(far, 1, b, 1, 4), -EINVAL,
		"tensor number 9, round 1: the ranks disagree. ranks 2, 3 (node 1): all_gather of "
		"float32; ranks 0, 1 (node 0): push_pull (sum) of float32");
	far_expect(far, first, -EINVAL, NULL);
}

TEST(unaligned_data_is_refused)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 1, NULL);
	struct data_header h;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.dtype = DTYPE_FLOAT64;
	h.len = h.part_len = h.total = 8;
	far_expect(far, far_call(far, 0, &h, (const double[]){ 1 }), 0, NULL);
	h.round = 2;
	far->misalign = 4;
	far_expect(far, far_call(far, 0, &h, (const double[]){ 1 }), -EINVAL, "not aligned");
}

static bool is_overdue;

/* Timers come in their order, however busy the machine is. */
static void on_overdue(struct loop_timer *timer)
{
	(void)timer;
	is_overdue = true;
}

TEST(deadline_names_the_missing)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 4, two_each);
	struct loop_timer overdue = { .expired = on_overdue };
	struct asked *a, *b, *part;
	struct data_header h;
	uint64_t start;

	layout.request_timeout_ms = 100; /* and the second of grace */
	far_form(far, &layout);
	start = clock_now_ns();
	ASSERT_OK(loop_timer_set(far->loop, &overdue, start + 2 * 1100 * NSEC_PER_MSEC));
	ASSERT_EQ(far_tensor(far, &layout, "w", DTYPE_FLOAT32, 100, NULL), 1);
	a = push(far, &layout, 1, 1, 0, 1);
	b = push(far, &layout, 1, 1, 2, 1);
	h = far_push(&layout, 1, 1, 0);
	h.part = 1;
	part = push_as(far, 0, h, 1, 4);
	far_expect(far, a, -ETIMEDOUT,
		   "job job: tensor w, round 1: ranks 2, 3, 6, 7 have not all contributed within "
		   "0.1 s");
	ASSERT_INT(clock_now_ns() - start, >=, 1100 * NSEC_PER_MSEC);
	ASSERT_TRUE(!is_overdue);
	loop_timer_cancel(&overdue);
	far_expect(far, b, -ETIMEDOUT, NULL);
	far_expect(far, part, -ETIMEDOUT, NULL);
	/* The late ones hear it too, and the job goes on. */
	far_expect(far, push(far, &layout, 1, 1, 1, 1), -ETIMEDOUT, "ranks 2, 3, 6, 7 have not");
	for (uint32_t i = 0; i < 3; i++)
		(void)push(far, &layout, 1, 2, i, 1);
	expect_values(far, push(far, &layout, 1, 2, 3, 1), 4, 4);
	ASSERT_EQ(far->failed[0].n, 0);
}

/* A round that closed leaves the timer to one that began later. */
TEST_FULL_TIER(deadline_is_each_rounds_own, "a deadline of a second that another round must meet")
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *late;

	layout.request_timeout_ms = 50;
	far_form(far, &layout);
	(void)push(far, &layout, 1, 1, 0, 1);
	ASSERT_OK(loop_turn(far->loop, 30));
	late = push(far, &layout, 2, 1, 0, 1);
	expect_values(far, push(far, &layout, 1, 1, 1, 1), 2, 4);
	far_expect(far, late, -ETIMEDOUT, "tensor number 2, round 1: rank 1 has not contributed");
}

TEST(refused_round_fails_for_all)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL);
	struct asked *a, *part, *next, *b;
	struct data_header h;

	far_form(far, &layout);
	a = push(far, &layout, 1, 1, 0, 1);
	h = far_push(&layout, 1, 1, 0);
	h.part = 7;
	part = push_as(far, 0, h, 1, 4);
	next = push(far, &layout, 1, 2, 0, 1);
	far_notice(far, 5, DATA_FAIL_ROUND, layout.job, 1, 1, 1, EIO, "a stranger");
	far_expect_waiting(far, a);
	far_notice(far, 1, DATA_FAIL_ROUND, layout.job, 1, 1, 1, ECANCELED, "rank 1 cancelled");
	far_expect(far, a, -ECANCELED, "rank 1 cancelled");
	far_expect(far, part, -ECANCELED, "rank 1 cancelled");
	far_expect(far, push(far, &layout, 1, 1, 2, 1), -ECANCELED, "rank 1 cancelled");
	h.node = 2;
	h.part = 99;
	far_expect(far, push_as(far, 2, h, 1, 4), -ECANCELED, "rank 1 cancelled");
	far_expect_waiting(far, next);
	/* It may come before anything of the tensor is here. */
	far_notice(far, 1, DATA_FAIL_ROUND, layout.job, 5, 1, 1, 99999, NULL);
	far_expect(far, push(far, &layout, 5, 1, 0, 1), -EIO, "Input/output error");
	/* Said twice, the first counts. */
	far_notice(far, 2, DATA_FAIL_ROUND, layout.job, 1, 1, 2, EIO, "me too");
	far_expect(far, push(far, &layout, 1, 1, 0, 1), -ECANCELED, "rank 1 cancelled");
	(void)push(far, &layout, 1, 2, 1, 1);
	b = push(far, &layout, 1, 2, 2, 1);
	expect_values(far, b, 3, 4);
	expect_values(far, next, 3, 4);
}

/* Many rounds in flight fail; each is remembered, and the memory is bounded. */
TEST(failed_rounds_are_remembered)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	for (uint64_t round = 1; round <= 1000; round++)
		far_notice(far, 0, DATA_FAIL_ROUND, layout.job, 1, round, 0, ECANCELED, "gone");
	for (uint64_t round = 1; round <= 1000; round++)
		far_expect(far, push(far, &layout, 1, round, 1, 1), -ECANCELED, "gone");
	/* Those that do not follow each other: the newest. */
	for (uint64_t round = 1002; round <= 1100; round += 2)
		far_notice(far, 0, DATA_FAIL_ROUND, layout.job, 1, round, 0, ECANCELED, "gone");
	for (uint64_t round = 1070; round <= 1100; round += 2)
		far_expect(far, push(far, &layout, 1, round, 1, 1), -ECANCELED, "gone");
	ASSERT_TRUE(!push(far, &layout, 1, 1068, 1, 1)->done);
	ASSERT_TRUE(!push(far, &layout, 1, 1071, 1, 1)->done);
}

TEST(leaving_fails_what_needs_it)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *a, *has, *b, *c, *without;
	struct data_header h;

	far_form(far, &layout);
	a = push(far, &layout, 1, 1, 0, 1);
	h = far_push(&layout, 1, 1, 0);
	h.part = 1;
	(void)push_as(far, 0, h, 1, 4);
	has = push(far, &layout, 2, 1, 1, 1);
	h = far_push(&layout, 3, 1, 0);
	h.operation = OPERATION_ALL_TO_ALL;
	h.reduction = 0;
	h.block = 0 * 6 + 4; /* node 0 to node 2 */
	without = push_as(far, 0, h, 6, 4);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	far_expect(far, a, -EPIPE, "round 1: ranks 2, 3 have left the job");
	/* What it gave before counts. */
	b = push(far, &layout, 2, 1, 0, 1);
	far_expect_waiting(far, has);
	c = push(far, &layout, 2, 1, 2, 1);
	expect_values(far, has, 3, 4);
	expect_values(far, b, 3, 4);
	expect_values(far, c, 3, 4);
	/* What does not concern it goes on. */
	h.node = 2;
	expect_values(far, push_empty(far, 2, h, 4), 6, 4);
	expect_no_data(far, without);
	far_expect(far, push(far, &layout, 1, 2, 0, 1), -EPIPE,
		   "tensor number 1, round 2: ranks 2, 3 have left the job");
	far_expect(far, push(far, &layout, 1, 2, 2, 1), -EPIPE, "have left the job");
	far_expect(far, push(far, &layout, 1, 2, 1, 1), -ENOTCONN, "node 1 has left");
}

TEST(lost_peer_fails_all_that_is_held)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 1, 0, 1);
	b = push(far, &layout, 1, 2, 1, 1);
	far_lose(far, 1);
	far_expect(far, a, -ECONNRESET, "rank 1 (node 1): end1 was lost: connection reset");
	far_expect(far, b, -ECONNRESET, NULL);
	far_expect(far, push(far, &layout, 1, 3, 0, 1), -ECONNRESET, "end1 was lost");
}

/* Contributions, and the memory of parts, are charged; over it the job ends, and another does not feel it. */
TEST(quota_ends_the_job)
{
	FAR = far_new(&(struct far_options){ .quota_bytes = 20000 });
	struct layout layout = far_layout("job", 2, NULL), other = far_layout("other", 2, NULL);
	struct asked *first, *asked, *b;
	unsigned n = 1;

	far_form(far, &layout);
	far_form(far, &other);
	b = push(far, &other, 1, 1, 0, 1);
	first = push(far, &layout, 1, 1, 0, 1);
	do {
		asked = push(far, &layout, 1, ++n, 0, 1);
		ASSERT_INT(n, <, 1000);
	} while (!asked->done);
	far_expect(far, asked, -EDQUOT,
		   "job job: a server may hold 20000 bytes for it, its job_quota, and that is not "
		   "enough: raise job_quota");
	far_expect(far, first, -EDQUOT, "raise job_quota");
	ASSERT_EQ(far->failed[0].n, 1);
	ASSERT_EQ(far->failed[1].n, 1);
	ASSERT_EQ(far->failed[1].status, -EDQUOT);
	(void)push(far, &other, 1, 1, 1, 1);
	expect_values(far, b, 2, 4);
	/* All of it was given back: the same quota serves the next run for long. */
	layout.job = 0;
	far_form(far, &layout);
	for (uint64_t round = 1; round < 500; round++) {
		(void)push(far, &layout, 1, round, 0, 1);
		expect_values(far, push(far, &layout, 1, round, 1, 1), 2, 4);
	}
}

/* Before a peer is over its quota, and all of its jobs with it, the one that holds the most ends, whoever contributes just then. */
TEST(of_a_crowded_peer_the_largest_job_ends)
{
	FAR = far_new(NULL);
	struct layout small = far_layout("small", 2, NULL), large = far_layout("large", 2, NULL);
	struct layout apart = far_layout("apart", 2, NULL);
	struct asked *a, *held;

	far_form(far, &small);
	far_form(far, &large);
	far_form_from(far, 2, &apart);
	for (uint64_t round = 1; round <= 20; round++)
		(void)push_as(far, 2, far_push(&apart, 1, round, 0), 1, 4);
	for (uint64_t round = 1; round < 10; round++)
		(void)push(far, &large, 1, round, 0, 1);
	held = push(far, &large, 1, 10, 0, 1);
	far_crowd(far, 0, true);
	a = push(far, &small, 1, 1, 0, 1);
	far_expect(far, held, -EDQUOT, "job large: of what end0");
	far_expect_waiting(far, a);
	/* Others do not end for what the first has not given back yet. */
	a = push(far, &small, 1, 2, 0, 1);
	far_expect_waiting(far, a);
	far_crowd(far, 0, false);
	(void)push(far, &small, 1, 2, 1, 1);
	expect_values(far, a, 2, 4);
}

/* However many jobs a user has them in: others' jobs, one of which is the largest, go on. */
TEST(of_a_crowded_peer_jobs_of_the_user_that_has_most_end)
{
	FAR = far_new(NULL);
	struct layout other = far_layout("other", 2, NULL);
	struct layout greedy[4] = { far_layout("g0", 2, NULL), far_layout("g1", 2, NULL),
				    far_layout("g2", 2, NULL), far_layout("g3", 2, NULL) };
	struct asked *a, *last[ARRAY_SIZE(greedy)];

	other.user = 2000;
	far_form(far, &other);
	for (unsigned i = 0; i < ARRAY_SIZE(greedy); i++) {
		far_form(far, &greedy[i]);
		for (uint64_t round = 1; round < 6 + i; round++)
			last[i] = push(far, &greedy[i], 1, round, 0, 1);
	}
	for (uint64_t round = 1; round < 15; round++)
		a = push(far, &other, 1, round, 0, 1);
	far_crowd(far, 0, true);
	(void)push(far, &other, 1, 15, 0, 1);
	/* 8 and 7 rounds, of 26: the last two jobs. */
	for (unsigned i = 2; i < ARRAY_SIZE(greedy); i++)
		far_expect(far, last[i], -EDQUOT, "its user has most");
	for (unsigned i = 0; i < 2; i++)
		far_expect_waiting(far, last[i]);
	far_expect_waiting(far, a);
}

/* 8 KiB that came in a block, for a round that waits for the other node. */
static struct asked *push_block(struct far *far, unsigned end, const struct layout *layout,
				uint64_t round)
{
	far->n_calls |= 1;
	return push_as(far, end, far_push(layout, 1, round, 0), 1, 2048);
}

/* Before three quarters of the memory are in use, by however many jobs: others' go on, and what they need is there. */
TEST(where_memory_runs_short_jobs_of_the_user_that_has_most_end)
{
	FAR = far_new(&(struct far_options){ .memory = 1 << 20 });
	const struct quota *memory = &far->accounts.total[ACCOUNT_MEMORY];
	struct layout modest = far_layout("modest", 2, NULL);
	struct layout greedy[2] = { far_layout("g0", 2, NULL), far_layout("g1", 2, NULL) };
	struct asked *a = NULL, *last[ARRAY_SIZE(greedy)] = { 0 };
	bool ended = false;

	modest.user = 2000;
	far_form(far, &modest);
	for (unsigned i = 0; i < ARRAY_SIZE(greedy); i++)
		far_form(far, &greedy[i]);
	/* More than either job of the other has when one ends. */
	for (uint64_t round = 1; round <= 30; round++)
		a = push_block(far, 0, &modest, round);
	for (uint64_t round = 1; !ended; round++) {
		ASSERT_INT(round, <, 40);
		for (unsigned i = 0; i < ARRAY_SIZE(greedy); i++) {
			last[i] = push_block(far, 0, &greedy[i], round);
			ended = ended || last[i]->done;
		}
		ASSERT_INT(quota_used(memory), <, 1 << 20);
	}
	far_expect(far, last[0], -EDQUOT, "(memory) its user has most");
	far_expect_waiting(far, last[1]);
	far_expect_waiting(far, a);
	far->n_calls |= 1;
	(void)push_as(far, 1, far_push(&modest, 1, 30, 1), 1, 2048);
	expect_values(far, a, 2, 2048);
}

/* Whose a job is, is the word of peers: of jobs of one user, those end that come from where the most is held. */
TEST(where_memory_runs_short_none_ends_anothers_job_by_his_number)
{
	FAR = far_new(&(struct far_options){ .memory = 1 << 20 });
	struct layout honest = far_layout("honest", 2, NULL);
	struct layout claimed[4] = { far_layout("c0", 2, NULL), far_layout("c1", 2, NULL),
				     far_layout("c2", 2, NULL), far_layout("c3", 2, NULL) };
	struct asked *a = NULL, *last = NULL;

	far_form(far, &honest);
	for (unsigned i = 0; i < ARRAY_SIZE(claimed); i++)
		far_form_from(far, 2, &claimed[i]);
	/* The largest job of all. */
	for (uint64_t round = 1; round <= 30; round++)
		a = push_block(far, 0, &honest, round);
	for (uint64_t round = 1; !last || !last->done; round++) {
		ASSERT_INT(round, <, 30);
		for (unsigned i = 0; i < ARRAY_SIZE(claimed) && (!last || !last->done); i++)
			last = push_block(far, 2, &claimed[i], round);
	}
	far_expect(far, last, -EDQUOT, "(memory) its user has most");
	far_expect_waiting(far, a);
}

TEST(result_over_quota_ends_the_job)
{
	FAR = far_new(&(struct far_options){ .quota_bytes = 6000 });
	struct layout layout = far_layout("job", 1, NULL);
	_cleanup_(freep) char *data = calloc(1, 8192);
	struct data_header h;

	far_form(far, &layout);
	h = far_push(&layout, 1, 1, 0);
	h.len = h.part_len = h.total = 8192;
	far_expect(far, far_call(far, 0, &h, data), -EDQUOT, "raise job_quota");
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* Of two contributions one is lent, and the other has room for the sum. */
TEST(sum_takes_no_memory_of_its_own)
{
	FAR = far_new(&(struct far_options){ .quota_bytes = 12000 });
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a;

	far_form(far, &layout);
	for (uint64_t round = 1; round < 10; round++) {
		a = push_as(far, 0, far_push(&layout, 1, round, 0), 1, 2048);
		expect_values(far, push_as(far, 1, far_push(&layout, 1, round, 1), 2, 2048), 3,
			      2048);
		expect_values(far, a, 3, 2048);
	}
}

TEST(tensors_are_limited)
{
	FAR = far_new(&(struct far_options){ .max_tensors = 2 });
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	(void)push(far, &layout, 1, 1, 0, 1);
	(void)push(far, &layout, 77, 1, 0, 1);
	far_expect(far, push(far, &layout, 3, 1, 0, 1), -EDQUOT, "max_tensors");
	far_notice(far, 0, DATA_FAIL_ROUND, layout.job, 3, 1, 0, EIO, "no room for it either");
	expect_values(far, push(far, &layout, 1, 1, 1, 1), 2, 4);
}

/* While the pool sums: repeats are repeats, and the end of the job waits for the sum before it answers. */
TEST(job_ends_during_the_sum)
{
	FAR = far_new(&(struct far_options){ .n_threads = 1 });
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 1, 0, 1);
	b = push(far, &layout, 1, 1, 1, 1);
	ASSERT_TRUE(!a->done && !b->done);
	far_expect(far, push(far, &layout, 1, 1, 1, 1), -EALREADY, NULL);
	far_notice(far, 0, DATA_FAIL_ROUND, layout.job, 1, 1, 0, ECANCELED, "too late");
	ASSERT_TRUE(!a->done);
	ASSERT_TRUE(!push(far, &layout, 2, 1, 0, 1)->done);
	far_cut(far, 1);
	/* It hears so now, and not with a turn, in which the sum might be there. */
	far_expect(far, push(far, &layout, 3, 1, 0, 1), -ECONNRESET, "end1 was lost");
	ASSERT_TRUE(!a->done && !b->done);
	ASSERT_EQ(far_n_jobs(far), 1);
	far_expect(far, a, -ECONNRESET, "end1 was lost");
	far_expect(far, b, -ECONNRESET, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* The daemon's own end: the pool is gone with the sums it had not begun, and the server answers for them. */
TEST(server_outlives_the_pool)
{
	FAR = far_new(&(struct far_options){ .n_threads = 1 });
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 1, 0, 1);
	b = push(far, &layout, 1, 1, 1, 1);
	server_close(far->server);
	far->pool = pool_free(far->pool);
	ASSERT_TRUE(!a->done && !b->done);
	far->server = server_free(far->server);
	far_expect(far, a, -ESHUTDOWN, NULL);
	far_expect(far, b, -ESHUTDOWN, NULL);
}

TEST(numbers_for_operators)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	_cleanup_(freep) struct server_job_info *jobs = NULL;
	_cleanup_(freep) char *text = NULL;
	size_t n;

	far_form(far, &layout);
	ASSERT_EQ(far_tensor(far, &layout, "w", DTYPE_FLOAT32, 100, NULL), 1);
	(void)push(far, &layout, 1, 1, 0, 1);
	expect_values(far, push(far, &layout, 1, 1, 1, 1), 2, 4);
	(void)push(far, &layout, 1, 1, 1, 1);
	(void)push(far, &layout, 1, 2, 0, 1);
	far_notice(far, 0, DATA_FAIL_ROUND, layout.job, 9, 1, 0, EIO, NULL);
	ASSERT_OK(server_jobs(far->server, &jobs, &n));
	ASSERT_EQ(n, 1);
	ASSERT_EQ(jobs[0].rounds, 1);
	ASSERT_EQ(jobs[0].bytes, 16);
	ASSERT_EQ(jobs[0].in_flight, 1);
	ASSERT_CONTAINS(jobs[0].waiting_for, "ranks 2, 3 (tensor w, round 2) for 0.");
	ASSERT_OK(metrics_text(&text));
	ASSERT_CONTAINS(text, "bps_server_bytes_summed_total 32");
	ASSERT_CONTAINS(text, "bps_server_part_rounds_total 1");
	ASSERT_CONTAINS(text, "bps_server_rounds_failed_total 1");
	ASSERT_CONTAINS(text, "bps_server_contributions_late_total 1");
}
