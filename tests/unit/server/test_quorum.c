/* Rounds that go on without all: what comes too late, and what nodes keep. */
#include "far.h"

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

static struct layout quorum_layout(uint32_t n_nodes)
{
	struct layout layout = far_layout("quorum", n_nodes, NULL);

	layout.quorum = 1;
	return layout;
}

static struct asked *push_part(struct far *far, const struct layout *layout, uint32_t part,
			       uint64_t round, uint32_t node, float value)
{
	struct data_header h = far_push(layout, 1, round, node);
	float data[FLOATS];

	h.part = part;
	for (size_t i = 0; i < FLOATS; i++)
		data[i] = value;
	if (layout->resume)
		h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = LEN;
	return far_call(far, node, &h, data);
}

static struct asked *push(struct far *far, const struct layout *layout, uint64_t round,
			  uint32_t node, float value)
{
	return push_part(far, layout, 0, round, node, value);
}

static void expect_result(struct far *far, struct asked *asked, float value)
{
	const float *data;

	far_expect(far, asked, 0, NULL);
	data = asked->data;
	ASSERT_EQ(asked->answer.len, LEN);
	for (size_t i = 0; i < FLOATS; i++)
		ASSERT_TRUE(data[i] == value);
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
