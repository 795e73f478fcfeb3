/* Rounds that go on without all: what comes too late, and what nodes keep. */
#include "../base/chores.h"
#include "far.h"
#include "reduce/reduce.h"
#include <pthread.h>

#define LEN    64u /* of the part that all rounds here have */
#define FLOATS (LEN / sizeof(float))

static unsigned n_blocks = UINT_MAX; /* that there is memory for */
static unsigned n_made;

int __real_block_new(struct block_cache *cache, size_t len, struct quota *quota,
		     struct block **ret_block);
int __wrap_block_new(struct block_cache *cache, size_t len, struct quota *quota,
		     struct block **ret_block);

int __wrap_block_new(struct block_cache *cache, size_t len, struct quota *quota,
		     struct block **ret_block)
{
	n_made++;
	return n_blocks-- ? __real_block_new(cache, len, quota, ret_block) : -ENOMEM;
}

/* What was summed in one run of a task, at most, by whom. */
static _Atomic uint64_t most_summed;
static _Atomic unsigned n_summed, n_elsewhere;
static pthread_t home;

int __real_reduce_run(const struct reduce_params *params);
int __wrap_reduce_run(const struct reduce_params *params);

int __wrap_reduce_run(const struct reduce_params *params)
{
	uint64_t bytes = params->n_inputs * params->n_elements * dtype_size(params->dtype);

	most_summed = MAX(most_summed, bytes);
	n_summed++;
	n_elsewhere += !pthread_equal(home, pthread_self());
	return __real_reduce_run(params);
}

static void nothing_summed(void)
{
	home = pthread_self();
	most_summed = 0;
	n_summed = n_elsewhere = 0;
}

static struct layout quorum_layout(uint32_t n_nodes)
{
	struct layout layout = far_layout("quorum", n_nodes, NULL);

	layout.quorum = 1;
	return layout;
}

static struct asked *push_len(struct far *far, const struct layout *layout, uint32_t part,
			      uint64_t round, uint32_t node, float value, uint32_t len)
{
	struct data_header h = far_push(layout, 1, round, node);
	_cleanup_(freep) float *data = malloc(len);

	ASSERT_TRUE(data);
	h.part = part;
	for (size_t i = 0; i < len / sizeof(*data); i++)
		data[i] = value;
	if (layout->resume)
		h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = len;
	return far_call(far, node, &h, data);
}

static struct asked *push_part(struct far *far, const struct layout *layout, uint32_t part,
			       uint64_t round, uint32_t node, float value)
{
	return push_len(far, layout, part, round, node, value, LEN);
}

static struct asked *push(struct far *far, const struct layout *layout, uint64_t round,
			  uint32_t node, float value)
{
	return push_part(far, layout, 0, round, node, value);
}

static void expect_len(struct far *far, struct asked *asked, float value, uint32_t len)
{
	const float *data;

	far_expect(far, asked, 0, NULL);
	data = asked->data;
	ASSERT_EQ(asked->answer.len, len);
	for (size_t i = 0; i < len / sizeof(*data); i++)
		ASSERT_TRUE(data[i] == value);
}

static void expect_result(struct far *far, struct asked *asked, float value)
{
	expect_len(far, asked, value, LEN);
}

TEST(what_came_too_late_outlives_a_round_without_memory)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = quorum_layout(3);
	struct asked *a;

	far_form(far, &layout);
	expect_result(far, push(far, &layout, 1, 0, 1), 1);
	expect_result(far, push(far, &layout, 1, 2, 4), 1);
	expect_result(far, push(far, &layout, 1, 1, 2), 1);
	far->misalign = 4 * sizeof(float); /* what is lent needs no block */
	n_blocks = 0;
	a = push(far, &layout, 2, 0, 8);
	n_blocks = UINT_MAX;
	far_expect(far, a, -ENOMEM, "a result");
	expect_result(far, push(far, &layout, 3, 0, 16), 1 * 0 + 2 + 4 + 16);
	expect_result(far, push(far, &layout, 4, 0, 32), 32);
}

/* A contribution to a sum or, in each second round, to an average. */
static struct asked *push_in_turns(struct far *far, const struct layout *layout, uint64_t round,
				   uint32_t node, float value)
{
	struct data_header h = far_push(layout, 1, round, node);

	h.reduction = round % 2 ? REDUCTION_SUM : REDUCTION_AVERAGE;
	h.len = h.part_len = h.total = sizeof(value);
	return far_call(far, node, &h, &value);
}

static void expect_one(struct far *far, struct asked *asked, float value)
{
	expect_len(far, asked, value, sizeof(value));
}

/* Among what fits no sum, and in the order of rounds: float32 has no 1e8 + 1. */
TEST(what_came_too_late_is_put_back_where_it_was)
{
	static const float late[] = { 1, 2, 1e8f, 4, -1e8f, 6 };
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = quorum_layout(2);
	struct asked *a;

	layout.staleness = 2 * ARRAY_SIZE(late);
	far_form(far, &layout);
	for (unsigned i = 0; i < ARRAY_SIZE(late); i++)
		expect_one(far, push_in_turns(far, &layout, i + 1, 0, 0), 0);
	for (unsigned i = 0; i < ARRAY_SIZE(late); i++)
		expect_one(far, push_in_turns(far, &layout, i + 1, 1, late[i]), 0);
	for (unsigned round = 7; round <= 8; round++) {
		far->misalign = sizeof(float); /* what is lent needs no block */
		n_blocks = 0;
		a = push_in_turns(far, &layout, round, 0, 0);
		n_blocks = UINT_MAX;
		far_expect(far, a, -ENOMEM, "a result");
	}
	far->misalign = 0;
	expect_one(far, push_in_turns(far, &layout, 9, 0, 0), 1 + 1e8f - 1e8f);
	expect_one(far, push_in_turns(far, &layout, 10, 0, 0), (2 + 4 + 6) / 2.f);
}

/* Of as many nodes as there are. */
TEST(what_is_lent_while_a_sum_is_made_is_copied_as_it_comes)
{
	_cleanup_(far_freep) struct far *far =
		far_new(&(struct far_options){ .n_threads = 1, .inline_bytes = 1 });
	struct layout layout = quorum_layout(3);
	struct asked *a[3];

	far_form(far, &layout);
	far->misalign = 4 * sizeof(float);
	a[0] = push(far, &layout, 1, 0, 1);
	for (uint32_t node = 1; node < 3; node++) {
		unsigned before = n_made;

		/* The loop has no turn in which the sum may be over. */
		a[node] = push(far, &layout, 1, node, (float)(1 << node));
		ASSERT_EQ(n_made, before + 1);
	}
	n_made = 0;
	for (uint32_t node = 0; node < 3; node++)
		expect_result(far, a[node], 1);
	ASSERT_EQ(n_made, 0);
	expect_result(far, push(far, &layout, 2, 0, 8), 2 + 4 + 8);
}

/* Of two nodes the second is behind: its contributions to n rounds come after the last of them. */
static void fall_behind(struct far *far, const struct layout *layout, unsigned n, uint32_t len)
{
	for (unsigned round = 1; round <= n; round++)
		expect_len(far, push_len(far, layout, 0, round, 0, 1, len), 1, len);
	for (unsigned round = 1; round <= n; round++)
		expect_len(far, push_len(far, layout, 0, round, 1, (float)round, len), 1, len);
}

TEST(much_that_came_too_late_is_summed_in_slices)
{
	enum { LONG = (32u << 20) + 4, N = 4 };
	_cleanup_(far_freep) struct far *far =
		far_new(&(struct far_options){ .n_threads = 1, .quota_bytes = UINT64_C(4) << 30 });
	struct layout layout = quorum_layout(2);

	layout.staleness = N;
	far_form(far, &layout);
	fall_behind(far, &layout, N, LONG);
	nothing_summed();
	expect_len(far, push_len(far, &layout, 0, N + 1, 0, 1, LONG), 1 + N * (N + 1) / 2, LONG);
	ASSERT_INT(n_summed, >, 1);
	ASSERT_INT(most_summed, <=, PART_SUM_MAX);
}

/* What comes while a sum is made is added to it when that is done, all at once. */
TEST(much_that_is_added_to_a_sum_is_summed_in_slices)
{
	enum { LONG = PART_BYTES_MAX };
	_cleanup_(far_freep) struct far *far =
		far_new(&(struct far_options){ .n_threads = 1, .quota_bytes = UINT64_C(4) << 30 });
	struct layout layout = far_layout("async", 3, NULL);
	_cleanup_(freep) float *values = malloc(LONG);
	struct asked *a[3];

	layout.async = true;
	far_form(far, &layout);
	nothing_summed();
	for (uint32_t node = 0; node < 3; node++) {
		struct data_header h = far_push(&layout, 1, 1, node);

		h.operation = OPERATION_ACCUMULATE;
		h.root = 1;
		h.len = h.part_len = h.total = LONG;
		for (size_t i = 0; i < LONG / sizeof(*values); i++)
			values[i] = (float)(1 << node);
		a[node] = far_call(far, node, &h, values);
	}
	for (uint32_t node = 0; node < 3; node++)
		expect_len(far, a[node], 1 + 2 + 4, LONG);
	ASSERT_EQ(n_summed, 3);
	ASSERT_INT(most_summed, <=, PART_SUM_MAX);
}

/* However little each of them is. */
TEST(many_that_came_too_late_are_summed_elsewhere)
{
	enum { N = 50 };
	_cleanup_(far_freep) struct far *far =
		far_new(&(struct far_options){ .n_threads = 1, .inline_bytes = (N + 1) * LEN - 1 });
	struct layout layout = quorum_layout(2);

	layout.staleness = N;
	far_form(far, &layout);
	nothing_summed();
	fall_behind(far, &layout, N, LEN);
	ASSERT_EQ(n_elsewhere, 0);
	expect_result(far, push(far, &layout, N + 1, 0, 1), 1 + N * (N + 1) / 2);
	ASSERT_EQ(n_elsewhere, 1);
}

/* Where there is no room for what comes next, and is lent or not, more of it goes: spare is how many times a contribution may be had. */
static void expect_pieces(unsigned spare)
{
	enum { N = 40, LONG = 1 << 20 };
	_cleanup_(far_freep) struct far *far =
		far_new(&(struct far_options){ .quota_bytes = (uint64_t)(N + spare) * LONG });
	struct layout layout = quorum_layout(2);
	uint64_t used;

	layout.staleness = N;
	far_form(far, &layout);
	fall_behind(far, &layout, N, LONG);
	used = block_cache_used(far->blocks);
	chores_hold();
	expect_len(far, push_len(far, &layout, 0, N + 1, 0, 1, LONG), 1 + N * (N + 1) / 2, LONG);
	ASSERT_EQ(chores_n_held(), 1);
	ASSERT_INT(block_cache_used(far->blocks), >, used / 2);
	for (unsigned round = N + 2; round <= N + 20; round++)
		expect_len(far, push_len(far, &layout, 0, round, 0, 1, LONG), 1, LONG);
	ASSERT_INT(block_cache_used(far->blocks), <=, used);
	chores_go_on();
	while (block_cache_used(far->blocks) > 22 * (uint64_t)LONG)
		ASSERT_OK(loop_turn(far->loop, 0));
}

TEST(what_came_too_late_goes_in_pieces)
{
	for (unsigned spare = 4; spare < 10; spare++)
		expect_pieces(spare);
}

/* Its parts fail in later turns: that which was to go on is not tried again meanwhile. */
TEST(a_round_of_many_parts_that_cannot_go_on_fails_once)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = quorum_layout(2);
	struct asked *a[200], *late;

	layout.staleness = 1;
	far_form(far, &layout);
	for (uint32_t i = 0; i < ARRAY_SIZE(a); i++)
		expect_result(far, push_part(far, &layout, i, 1, 0, 1), 1);
	far->misalign = 4 * sizeof(float);
	for (uint32_t i = 0; i < ARRAY_SIZE(a); i++)
		a[i] = push_part(far, &layout, i, 2, 0, 1);
	far_expect_waiting(far, a[0]);
	far->misalign = 0;
	far->n_calls |= 1;
	n_blocks = 1; /* what comes late */
	late = push_part(far, &layout, 0, 1, 1, 1);
	n_blocks = UINT_MAX;
	expect_result(far, late, 1);
	for (uint32_t i = 0; i < ARRAY_SIZE(a); i++)
		far_expect(far, a[i], -ENOMEM, "a result");
	expect_result(far, push(far, &layout, 3, 0, 1), 2);
}

/* A job of which this server knows nothing, before its nodes have offered what they keep. */
static struct layout fresh_layout(struct far *far, uint64_t request_timeout_ms)
{
	struct layout layout = quorum_layout(2);

	layout.resume = layout.elsewhere = true;
	layout.job = 77;
	if (request_timeout_ms)
		layout.request_timeout_ms = request_timeout_ms;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	return layout;
}

/* All have contributed; but one of them has yet to say what was there before this server was. */
TEST(a_round_that_waits_for_what_is_kept_says_so)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = fresh_layout(far, 200);
	struct data_header offered = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_OFFERED,
		.job = layout.job,
		.epoch = far_epoch(&layout),
	};
	struct asked *asked[2];

	far->ops->notice(far, 0, &offered, NULL);
	for (uint32_t i = 0; i < 2; i++)
		asked[i] = push(far, &layout, 1, i, 1);
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, asked[i], -ETIMEDOUT,
			   "round 1: rank 1 has not offered what they keep within 0.2 s");
}

static struct asked *offer(struct far *far, const struct layout *layout, uint64_t round,
			   uint32_t node)
{
	struct {
		float data[FLOATS];
		uint64_t n, round, nodes[2];
	} sum = { .data = { 7 }, .n = htole64(1), .round = htole64(round) };
	struct data_header h = far_push(layout, 1, round, node);

	sum.nodes[0] = htole64(round);
	h.op = DATA_OFFER;
	h.epoch = far_epoch(layout);
	h.len = sizeof(sum);
	h.part_len = h.total = LEN;
	return far_call(far, node, &h, &sum);
}

/* What a node had given to a round that went without it. */
static struct asked *offer_late(struct far *far, const struct layout *layout, uint32_t part,
				uint32_t node, float value)
{
	struct data_header h = far_push(layout, 1, 1, node);
	float data[FLOATS];

	for (size_t i = 0; i < FLOATS; i++)
		data[i] = value;
	h.op = DATA_OFFER;
	h.is_late = 1;
	h.part = part;
	h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = LEN;
	return far_call(far, node, &h, data);
}

static void say_offered(struct far *far, const struct layout *layout, uint32_t node, uint64_t n)
{
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_OFFERED,
		.job = layout->job,
		.node = node,
		.epoch = far_epoch(layout),
		.n_offers = n,
	};

	far->ops->notice(far, node, &h, NULL);
}

static float first_of(struct far *far, struct asked *asked)
{
	far_expect(far, asked, 0, NULL);
	return *(const float *)asked->data;
}

/* No round goes on before, and nothing that is offered meanwhile counts. */
TEST(what_all_have_offered_is_put_together_some_parts_in_a_turn)
{
	enum { PARTS = 600 };
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = fresh_layout(far, 0);
	struct asked *first, *last;

	for (uint32_t i = 0; i < PARTS; i++)
		far_expect(far, offer_late(far, &layout, i, 1, 2), 0, NULL);
	chores_hold();
	say_offered(far, &layout, 0, 0);
	say_offered(far, &layout, 1, PARTS);
	far->ops->settle(far);
	ASSERT_EQ(chores_n_held(), 1);
	first = push_part(far, &layout, 0, 2, 0, 4);
	last = push_part(far, &layout, PARTS - 1, 2, 0, 4);
	far_expect(far, offer_late(far, &layout, PARTS - 1, 0, 100), 0, NULL);
	far_expect_waiting(far, first);
	far_expect_waiting(far, last);
	chores_go_on();
	ASSERT_TRUE(first_of(far, first) == 4 + 2);
	ASSERT_TRUE(first_of(far, last) == 4 + 2);
}

static struct asked *push_again(struct far *far, const struct layout *layout, uint64_t round,
				uint32_t node)
{
	static const float data[FLOATS];
	struct data_header h = far_push(layout, 1, round, node);

	h.flags = DATA_FLAG_AGAIN;
	h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = LEN;
	return far_call(far, node, &h, data);
}

/* One of a node waits at a time, and none longer than the result is kept. */
TEST(what_comes_again_and_again_is_answered)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = fresh_layout(far, 0);
	struct asked *offered = offer(far, &layout, 1, 0), *asked = NULL, *before;

	far_expect_waiting(far, offered);
	for (unsigned i = 0; i < 100; i++) {
		before = asked;
		asked = push_again(far, &layout, 1, 1);
		far_expect_waiting(far, asked);
		if (before)
			far_expect(far, before, -ENETRESET, "it has come again");
	}
	for (uint32_t i = 0; i < 2; i++) {
		struct data_header h = {
			.magic = DATA_MAGIC,
			.version = DATA_VERSION,
			.op = DATA_HAVE,
			.job = layout.job,
			.key = 1,
			.round = 1,
			.is_all = 1,
			.epoch = far_epoch(&layout),
			.node = i,
		};

		far->ops->notice(far, i, &h, NULL);
	}
	far_expect(far, offered, 0, NULL);
	far_expect(far, asked, -EALREADY, "all nodes have the result");
}
