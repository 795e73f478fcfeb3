/* A job that outlives its daemons' processes: what is kept, for how long, and that it goes on with other servers. */
#include "double.h"

#define LEN    64u /* of the part that all rounds here have */
#define FLOATS (LEN / sizeof(float))

static struct layout kept_layout(uint32_t n_nodes)
{
	struct layout layout = far_layout("kept", n_nodes, NULL);

	layout.resume = true;
	return layout;
}

/* Node i gives i + 1, so that three nodes' sum is 6. */
static struct asked *contribute(struct far *far, unsigned end, const struct layout *layout,
				struct data_header *h)
{
	float data[FLOATS];

	for (size_t i = 0; i < FLOATS; i++)
		data[i] = (float)(h->node + 1);
	h->epoch = data_moves_epoch(FAR_EPOCH, layout->moves, FAR_SERVERS, NULL);
	h->len = h->part_len = h->total = LEN;
	return far_call(far, end, h, data);
}

static struct asked *push(struct far *far, unsigned end, const struct layout *layout, uint64_t key,
			  uint64_t round, uint32_t node, uint32_t acked)
{
	struct data_header h = far_push(layout, key, round, node);

	h.acked = acked;
	return contribute(far, end, layout, &h);
}

/* It may have come before, on a connection that broke. */
static struct asked *push_again(struct far *far, unsigned end, const struct layout *layout,
				uint64_t key, uint64_t round, uint32_t node)
{
	struct data_header h = far_push(layout, key, round, node);

	h.flags = DATA_FLAG_AGAIN;
	return contribute(far, end, layout, &h);
}

static struct asked *offer(struct far *far, unsigned end, const struct layout *layout, uint64_t key,
			   uint64_t round, uint32_t node, float value)
{
	struct data_header h = far_push(layout, key, round, node);
	float data[FLOATS];

	for (size_t i = 0; i < FLOATS; i++)
		data[i] = value;
	h.op = DATA_OFFER;
	h.epoch = data_moves_epoch(FAR_EPOCH, layout->moves, FAR_SERVERS, NULL);
	h.len = h.part_len = h.total = LEN;
	return far_call(far, end, &h, data);
}

static void ack(struct far *far, unsigned end, const struct layout *layout, uint32_t node,
		uint32_t number, uint32_t epoch)
{
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_ACK,
		.job = layout->job,
		.node = node,
		.round = number,
		.epoch = epoch,
	};

	far->ops->notice(far, end, &h, NULL);
}

static void expect_result(struct far *far, struct asked *asked, float value, uint32_t number)
{
	const float *data;

	far_expect(far, asked, 0, NULL);
	data = asked->data;
	ASSERT_EQ(asked->answer.op, DATA_RESULT);
	ASSERT_EQ(asked->answer.len, LEN);
	ASSERT_EQ(asked->answer.priority, number);
	for (size_t i = 0; i < FLOATS; i++)
		ASSERT_TRUE(data[i] == value);
}

static uint64_t n_summed(struct far *far)
{
	_cleanup_(freep) struct server_job_info *jobs = NULL;
	size_t n = 0;

	ASSERT_OK(server_jobs(far->server, &jobs, &n));
	ASSERT_EQ(n, 1);
	return jobs[0].rounds;
}

/* A tensor of two nodes, of which both have had the result of round 1. Returns its key. */
static uint64_t have_first(struct far *far, struct layout *layout)
{
	struct asked *a, *b;
	uint64_t key;

	far_form(far, layout);
	key = far_tensor(far, layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	a = push(far, 0, layout, key, 1, 0, 0);
	far_expect_waiting(far, a);
	b = push(far, 1, layout, key, 1, 1, 0);
	expect_result(far, a, 3, 1);
	expect_result(far, b, 3, 1);
	return key;
}

TEST(a_node_that_is_back_gets_the_result_that_is_there)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	uint64_t key = have_first(far, &layout);
	struct asked *a, *b;

	/* Its answer may have been lost with it. */
	far_lose(far, 1);
	far_expect(far, far_attach(far, 2, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	expect_result(far, push(far, 2, &layout, key, 1, 1, 0), 3, 1);
	ASSERT_EQ(n_summed(far), 1);
	/* Both say in the next round's pushes that they keep it; it is over then. */
	a = push(far, 0, &layout, key, 2, 0, 1);
	b = push(far, 2, &layout, key, 2, 1, 1);
	expect_result(far, a, 3, 2);
	expect_result(far, b, 3, 2);
	ASSERT_EQ(a->answer.status, 1);
	far_expect(far, push(far, 2, &layout, key, 1, 1, 1), -ESTALE, "it is over");
	ASSERT_EQ(n_summed(far), 2);
}

/* Its agent has let go of what had come, and the server has not seen that it was away. */
TEST(a_node_that_attaches_again_gets_the_result_that_is_there)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	uint64_t key = have_first(far, &layout);

	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	expect_result(far, push(far, 1, &layout, key, 1, 1, 0), 3, 1);
	ASSERT_EQ(n_summed(far), 1);
}

static struct asked *push_long(struct far *far, const struct layout *layout, uint64_t key,
			       uint32_t node)
{
	struct data_header h = far_push(layout, key, 1, node);
	static const float data[2048];

	h.epoch = data_moves_epoch(FAR_EPOCH, layout->moves, FAR_SERVERS, NULL);
	h.len = h.part_len = h.total = sizeof(data);
	return far_call(far, node, &h, data);
}

/* Of two contributions one is lent; the sum is in the other, and as long as it is kept there is no quota for one more. */
TEST(what_is_kept_is_charged_wherever_it_is)
{
	_cleanup_(far_freep) struct far *far =
		far_new(&(struct far_options){ .quota_bytes = 14000 });
	struct layout layout = kept_layout(2);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push_long(far, &layout, 1, 0);
	b = push_long(far, &layout, 1, 1);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	a = push_long(far, &layout, 2, 0);
	b = push_long(far, &layout, 2, 1);
	far_expect(far, b, -EDQUOT, NULL);
	far_expect(far, a, -EDQUOT, "raise job_quota");
}

TEST(a_contribution_that_comes_again_counts_once)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(3);
	struct asked *a, *b, *c;
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	a = push(far, 0, &layout, key, 1, 0, 0);
	far_lose(far, 0);
	far_expect(far, far_attach(far, 4, &layout, 0, FAR_INSTANCE), 0, NULL);
	b = push(far, 4, &layout, key, 1, 0, 0);
	far_expect(far, a, -ENETRESET, "come again");
	far_expect(far, push(far, 4, &layout, key, 1, 0, 0), -EALREADY, "here already");
	c = push(far, 1, &layout, key, 1, 1, 0);
	far_expect_waiting(far, b);
	expect_result(far, push(far, 2, &layout, key, 1, 2, 0), 6, 1);
	expect_result(far, b, 6, 1);
	expect_result(far, c, 6, 1);
}

/* The node has lost the connection by which the first came, and then another: what it sent by the latter is there before what went by
 * the one between. Only its last is waited for, and it cannot know which that is. */
TEST(a_contribution_that_was_overtaken_is_asked_for_once_more)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	struct asked *first, *between, *last, *more, *other;
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	first = push(far, 0, &layout, key, 1, 0, 0);
	last = push_again(far, 0, &layout, key, 1, 0);
	far_expect(far, first, -ENETRESET, "come again");
	between = push_again(far, 0, &layout, key, 1, 0);
	far_expect(far, last, -ENETRESET, "come again");
	more = push_again(far, 0, &layout, key, 1, 0);
	far_expect(far, between, -ENETRESET, "come again");
	far_expect_waiting(far, more);
	other = push(far, 1, &layout, key, 1, 1, 0);
	expect_result(far, more, 3, 1);
	expect_result(far, other, 3, 1);
	ASSERT_EQ(n_summed(far), 1);
}

TEST(more_is_kept_than_was_sent)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	far_expect(far, push(far, 0, &layout, key, 1, 0, 7), -EPROTO, "it was not sent");
	ack(far, 1, &layout, 1, UINT32_MAX / 2, FAR_EPOCH);
	(void)push(far, 0, &layout, key, 1, 0, 0);
	expect_result(far, push(far, 1, &layout, key, 1, 1, 0), 3, 1);
}

TEST(what_many_acknowledgements_release_is_told_once)
{
	enum { N = 100 };
	_cleanup_(far_freep) struct far *far = far_new(&(struct far_options){ .max_tensors = N });
	struct layout layout = kept_layout(2);

	far_form(far, &layout);
	for (uint32_t i = 0; i < N; i++) {
		char name[16];
		uint64_t key;

		(void)snprintf(name, sizeof(name), "t%u", i);
		key = far_tensor(far, &layout, name, DTYPE_FLOAT32, FLOATS, NULL);
		(void)push(far, 0, &layout, key, 1, 0, 0);
		expect_result(far, push(far, 1, &layout, key, 1, 1, 0), 3, i + 1);
	}
	for (uint32_t i = 0; i < N; i++) {
		ack(far, 0, &layout, 0, i + 1, FAR_EPOCH);
		ack(far, 1, &layout, 1, i + 1, FAR_EPOCH);
	}
	for (unsigned end = 0; end < 2; end++)
		ASSERT_EQ(far->told[end].n_releases, 0);
	ASSERT_OK(loop_turn(far->loop, 0));
	for (unsigned end = 0; end < 2; end++) {
		ASSERT_EQ(far->told[end].n_releases, 1);
		ASSERT_EQ(far->told[end].released, N);
	}
}

/* The memory of a broadcast's source is the only other place where the data is: it may not be given back before. */
TEST(a_source_waits_until_another_keeps_the_data)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	struct data_header h;
	struct asked *source, *other;
	char data[LEN] = "what the source has";
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_UINT8, LEN, NULL);
	h = far_push(&layout, key, 1, 0);
	h.dtype = DTYPE_UINT8;
	h.operation = OPERATION_BROADCAST;
	h.reduction = 0;
	h.part_len = h.total = h.len = LEN;
	source = far_call(far, 0, &h, data);
	h.node = 1;
	h.len = 0;
	other = far_call(far, 1, &h, NULL);
	far_expect(far, other, 0, NULL);
	ASSERT_MEM(other->data, data, LEN);
	far_expect_waiting(far, source);
	ack(far, 1, &layout, 1, 1, FAR_EPOCH);
	far_expect(far, source, 0, NULL);
	ASSERT_EQ(source->answer.len, 0);
}

/* A process that has not seen the job's beginning makes it from what the nodes bring. */
TEST(a_fresh_server_gives_what_was_offered)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(3);
	struct asked *a, *b, *first, *second;

	layout.job = 4711;
	layout.joined_part_bytes = 65536;
	for (uint32_t i = 0; i < 3; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	/* Node 2 has no result yet; 0 and 1 had. */
	a = push(far, 2, &layout, 1, 9, 2, 0);
	far_expect_waiting(far, a);
	first = offer(far, 0, &layout, 1, 9, 0, 6);
	expect_result(far, a, 6, 1);
	far_expect_waiting(far, first);
	second = offer(far, 1, &layout, 1, 9, 1, 6);
	far_expect_waiting(far, second);
	ack(far, 2, &layout, 2, 1, FAR_EPOCH);
	far_expect(far, first, 0, NULL);
	far_expect(far, second, 0, NULL);
	ASSERT_EQ(n_summed(far), 0);
	/* The same once more is no news, and another result than that which was offered is none. */
	far_expect(far, offer(far, 0, &layout, 1, 9, 0, 6), 0, NULL);
	a = offer(far, 0, &layout, 1, 10, 0, 8);
	b = push(far, 1, &layout, 1, 10, 1, 0);
	expect_result(far, b, 8, 1);
	far_expect_waiting(far, a);
}

/* -- What accumulates --------------------------------------------------------------------------------------------- */

static struct data_header accumulate(const struct layout *layout, uint64_t key, uint64_t round,
				     uint32_t node)
{
	struct data_header h = far_push(layout, key, round, node);

	h.operation = OPERATION_ACCUMULATE;
	h.epoch = far_epoch(layout);
	h.len = h.part_len = h.total = LEN;
	return h;
}

/* The sum comes with who is in it; only what is late for a quorum comes without. */
TEST(an_offered_sum_says_who_is_in_it)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	struct {
		float data[FLOATS];
		uint64_t n, round, nodes[2];
	} sum = { .n = htole64(4), .nodes = { htole64(3), htole64(1) } };
	struct data_header h, said;
	struct asked *asked;
	const float *data;

	static_assert(sizeof(sum) == LEN + sizeof(struct data_contributors) + 2 * sizeof(uint64_t),
		      "");
	layout.async = true;
	layout.job = 4711;
	layout.joined_part_bytes = 65536;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	for (size_t i = 0; i < FLOATS; i++)
		sum.data[i] = 7;
	h = accumulate(&layout, 1, 3, 0);
	h.op = DATA_OFFER;
	for (h.is_late = 0; h.is_late < 2; h.is_late++)
		far_expect(far, far_call(far, 0, &h, sum.data), -EPROTO, "offers 64 bytes");
	h.is_late = 0;
	h.len = sizeof(sum);
	far_expect(far, far_call(far, 0, &h, &sum), 0, NULL);
	said = (struct data_header){ .magic = DATA_MAGIC,
				     .version = DATA_VERSION,
				     .op = DATA_OFFERED,
				     .job = layout.job,
				     .epoch = far_epoch(&layout),
				     .status = 1 };
	for (said.node = 0; said.node < 2; said.node++)
		far->ops->notice(far, said.node, &said, NULL);
	h = accumulate(&layout, 1, 2, 1);
	asked = far_call(far, 1, &h, sum.data);
	far_expect(far, asked, 0, NULL);
	data = asked->data;
	ASSERT_EQ(asked->answer.n_contributions, 5);
	for (size_t i = 0; i < FLOATS; i++)
		ASSERT_TRUE(data[i] == 14);
}

/* Of so many sums that the last are looked at in later turns, when all nodes have offered theirs. */
TEST(what_an_offered_sum_has_is_not_added_before_it_is_looked_at)
{
	enum { N_SUMS = 100 };
	_cleanup_(far_freep) struct far *far =
		far_new(&(struct far_options){ .inline_bytes = UINT64_MAX, .max_tensors = N_SUMS });
	struct layout layout = kept_layout(2);
	struct {
		float data[FLOATS];
		uint64_t n, round, nodes[2];
	} sum = { .data = { 7 }, .n = htole64(4), .nodes = { htole64(3), htole64(1) } };
	struct data_header h, said;
	struct asked *again = NULL, *next;

	layout.async = true;
	layout.job = 4711;
	layout.joined_part_bytes = 65536;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	for (uint64_t key = 1; key <= N_SUMS; key++) {
		/* It is in the sum; the answer to it was lost with another server. */
		h = accumulate(&layout, key, 1, 1);
		again = far_call(far, 1, &h, sum.data);
		h = accumulate(&layout, key, 3, 0);
		h.op = DATA_OFFER;
		h.len = sizeof(sum);
		(void)far_call(far, 0, &h, &sum);
	}
	said = (struct data_header){ .magic = DATA_MAGIC,
				     .version = DATA_VERSION,
				     .op = DATA_OFFERED,
				     .job = layout.job,
				     .epoch = far_epoch(&layout) };
	for (said.node = 0; said.node < 2; said.node++)
		far->ops->notice(far, said.node, &said, NULL);
	ASSERT_TRUE(!again->done);
	h = accumulate(&layout, N_SUMS, 4, 0);
	next = far_call(far, 0, &h, sum.data);
	far_expect(far, next, 0, NULL);
	far_expect(far, again, 0, NULL);
	ASSERT_EQ(next->answer.n_contributions, 5);
	ASSERT_TRUE(((const float *)next->data)[0] == 14);
	ASSERT_TRUE(((const float *)again->data)[0] == 14);
}

static void expect_sum(struct far *far, struct asked *asked, float value)
{
	const float *data;

	far_expect(far, asked, 0, NULL);
	data = asked->data;
	for (size_t i = 0; i < FLOATS; i++)
		ASSERT_TRUE(data[i] == value);
}

/* Also while the first is being added. */
TEST(what_accumulates_and_was_overtaken_is_asked_for_once_more)
{
	for (unsigned in_pool = 0; in_pool < 2; in_pool++) {
		_cleanup_(far_freep) struct far *far = far_new(&(struct far_options){
			.inline_bytes = in_pool ? 0 : UINT64_MAX, .n_threads = in_pool });
		struct layout layout = kept_layout(2);
		struct asked *first, *between, *last, *more, *other;
		struct data_header h;
		uint64_t key;

		layout.async = true;
		far_form(far, &layout);
		key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
		h = accumulate(&layout, key, 1, 0);
		/* It waits for all to come to this round. */
		h.root = 1;
		first = contribute(far, 0, &layout, &h);
		h.flags = DATA_FLAG_AGAIN;
		last = contribute(far, 0, &layout, &h);
		between = contribute(far, 0, &layout, &h);
		ASSERT_EQ(first->done, !in_pool);
		far_expect(far, last, -ENETRESET, "come again");
		far_expect(far, first, -ENETRESET, "come again");
		more = contribute(far, 0, &layout, &h);
		far_expect(far, between, -ENETRESET, "come again");
		far_expect_waiting(far, more);
		h = accumulate(&layout, key, 1, 1);
		other = contribute(far, 1, &layout, &h);
		expect_sum(far, more, 3);
		expect_sum(far, other, 3);
		ASSERT_EQ(more->answer.root, 2);
	}
}

/* Who is meant is one of its own nodes, whatever number it says. */
TEST(a_node_gives_up_what_is_its_own)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	static const float data[FLOATS];
	struct layout layout = kept_layout(2);
	struct data_header h, gives_up;
	struct asked *a, *b;
	uint64_t key;

	layout.async = true;
	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	/* It waits for all to come to this round. */
	h = accumulate(&layout, key, 1, 0);
	h.root = 1;
	a = far_call(far, 0, &h, data);
	far_expect_waiting(far, a);
	gives_up = (struct data_header){ .magic = DATA_MAGIC,
					 .version = DATA_VERSION,
					 .op = DATA_FAIL_ROUND,
					 .operation = OPERATION_ACCUMULATE,
					 .job = layout.job,
					 .key = key,
					 .round = 1,
					 .status = ECANCELED };
	/* Another's is not its to give up, nor is what does not exist. */
	far->ops->notice(far, 1, &gives_up, NULL);
	gives_up.node = JOB_RANKS_MAX - 1;
	far->ops->notice(far, 1, &gives_up, NULL);
	far_expect_waiting(far, a);
	far->ops->notice(far, 0, &gives_up, NULL);
	far_expect(far, a, -ECANCELED, NULL);
	h = accumulate(&layout, key, 1, 1);
	b = far_call(far, 1, &h, data);
	far_expect(far, b, 0, NULL);
}

/* -- Other servers ------------------------------------------------------------------------------------------------ */

static void expect_told(const struct far *far, unsigned end, unsigned n, uint32_t a, uint32_t b)
{
	ASSERT_EQ(far->told[end].n, n);
	ASSERT_EQ(far->told[end].moves[0], a);
	ASSERT_EQ(far->told[end].moves[1], b);
}

TEST(the_job_goes_on_with_other_servers)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2), before;
	struct asked *a, *b, *old;
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	old = push(far, 1, &layout, key, 1, 1, 0);
	before = layout;
	layout.moves[1] = 1;
	/* Who does not know the node's number of the run has no say. */
	far_expect(far, far_attach(far, 5, &layout, 0, 99), -EACCES, "does not speak");
	far_expect_waiting(far, old);
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
	far_expect(far, old, -ESHUTDOWN, "other servers");
	expect_told(far, 0, 0, 0, 0);
	expect_told(far, 1, 1, 0, 1);
	/* What node 1 says before it knows is not taken for what it says afterwards. */
	far_expect(far, push(far, 1, &before, key, 1, 1, 0), -ESHUTDOWN, "other servers");
	far_expect(far, offer(far, 1, &before, key, 1, 1, 3), -ESHUTDOWN, "other servers");
	far_expect(far, far_attach(far, 1, &before, 1, FAR_INSTANCE + 1), -ESHUTDOWN, NULL);
	expect_told(far, 1, 2, 0, 1);
	a = push(far, 0, &layout, key, 1, 0, 0);
	far_expect_waiting(far, a);
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	b = push(far, 1, &layout, key, 1, 1, 0);
	expect_result(far, a, 3, 1);
	expect_result(far, b, 3, 1);
	ack(far, 0, &layout, 0, 1, FAR_EPOCH);
	ack(far, 1, &layout, 1, 1, FAR_EPOCH);
	/* Those were of before: it is still kept. */
	far_lose(far, 1);
	far_expect(far, far_attach(far, 2, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	expect_result(far, push(far, 2, &layout, key, 1, 1, 0), 3, 1);
}

TEST(who_has_left_stays_so_when_the_servers_change)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	layout.moves[1] = 3;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
	far_expect(far, push(far, 0, &layout, key, 1, 0, 0), -EPIPE, "left the job");
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(who_asks_for_it_has_the_others_told_that_it_leaves)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(3);

	far_form(far, &layout);
	for (uint32_t i = 0; i < 3; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	far_notice(far, 2, DATA_LEAVE, layout.job, 0, 1, 2, 0, NULL);
	ASSERT_EQ(far->told[0].left, 4);
	ASSERT_EQ(far->told[1].left, 4);
	ASSERT_EQ(far->told[2].left, 0);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	ASSERT_EQ(far->told[0].left, 4);
	/* Who attaches again hears of all. */
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
	ASSERT_EQ(far->told[0].left, 6);
}

TEST(a_server_that_begins_anew_hears_who_has_left)
{
	for (unsigned async = 0; async < 2; async++) {
		_cleanup_(far_freep) struct far *far = far_new(NULL);
		struct layout layout = kept_layout(3);

		layout.elsewhere = true;
		layout.job = 77;
		layout.async = async;
		far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
		far_notice(far, 0, DATA_LEFT, layout.job, 0, 3, 0, 0, NULL);
		far_notice(far, 0, DATA_LEFT, layout.job, 0, UINT64_MAX, 0, 0, NULL);
		ASSERT_EQ(far_n_jobs(far), 1);
		far_notice(far, 0, DATA_LEFT, layout.job, 0, 2, 0, 0, NULL);
		if (async) {
			/* What it had contributed is nowhere. */
			ASSERT_EQ(far->failed[0].n, 1);
			ASSERT_CONTAINS(far->failed[0].text, "a rank has left");
			ASSERT_EQ(far_n_jobs(far), 0);
			continue;
		}
		far_notice(far, 0, DATA_LEFT, layout.job, 0, 2, 0, 0, NULL);
		far_expect(far, push(far, 0, &layout, 1, 1, 0, 0), -EPIPE, "left the job");
		far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
		ASSERT_EQ(far->told[1].left, 4);
		far_expect(far, far_attach(far, 2, &layout, 2, FAR_INSTANCE + 2), -ENOTCONN,
			   "has left");
		far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
		far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
		ASSERT_EQ(far_n_jobs(far), 0);
	}
}

TEST(who_begins_once_more_may_know_of_other_servers)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);

	layout.elsewhere = layout.begins = true;
	layout.job = 77;
	for (uint32_t i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	far_lose(far, 1);
	layout.moves[1] = 1;
	far_expect(far, far_attach(far, 2, &layout, 1, 5000), 0, NULL);
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
	/* Who has contributed cannot begin. */
	(void)push(far, 0, &layout, 1, 1, 0, 0);
	layout.moves[1] = 2;
	far_expect(far, far_attach(far, 5, &layout, 0, 5001), -EACCES, "does not speak");
}

TEST(what_who_has_left_had_accumulated_is_not_lost_unsaid)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(3);

	layout.async = true;
	far_form(far, &layout);
	layout.moves[1] = 1;
	for (uint32_t i = 0; i < 3; i++)
		far_expect(far, far_attach(far, i, &layout, i, FAR_INSTANCE + i), 0, NULL);
	far_notice(far, 2, DATA_LEAVE, layout.job, 0, 0, 2, 0, NULL);
	layout.moves[1] = 2;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), -ECONNRESET,
		   "a rank has left");
	ASSERT_EQ(far->failed[1].n, 1);
	ASSERT_CONTAINS(far->failed[1].text, "a rank has left");
	ASSERT_EQ(far->failed[2].n, 0);
	ASSERT_EQ(far_n_jobs(far), 0);
}

static void notice_moves(struct far *far, unsigned end, const struct layout *layout, uint32_t a,
			 uint32_t b)
{
	uint32_t moves[FAR_SERVERS] = { a, b };
	struct data_header h = {
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_MOVE,
		.job = layout->job,
		.len = sizeof(moves),
	};

	far->ops->notice(far, end, &h, moves);
}

TEST(a_server_that_is_left_out_lets_go_and_may_come_back)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	struct asked *a;
	uint64_t key;

	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	a = push(far, 0, &layout, key, 1, 0, 0);
	notice_moves(far, 1, &layout, 0, 1);
	notice_moves(far, 6, &layout, 1, 0); /* of nobody in the job */
	far_expect_waiting(far, a);
	notice_moves(far, 1, &layout, 1, 0);
	far_expect(far, a, -ESHUTDOWN, "other servers");
	expect_told(far, 0, 1, 1, 0);
	expect_told(far, 1, 0, 0, 0);
	ASSERT_EQ(far_n_jobs(far), 0);
	far_expect(far, push(far, 0, &layout, key, 1, 0, 0), -ESHUTDOWN, "other servers");
	layout.moves[0] = 1;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), -EINVAL, "cannot be");
	layout.moves[0] = 2;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
	far_expect(far, far_attach(far, 1, &layout, 1, FAR_INSTANCE + 1), 0, NULL);
	a = push(far, 0, &layout, key, 1, 0, 0);
	expect_result(far, push(far, 1, &layout, key, 1, 1, 0), 3, 1);
	expect_result(far, a, 3, 1);
}

TEST(a_server_that_drains_is_left_by_the_jobs_that_can)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2), other = far_layout("other", 1, NULL),
		      later = kept_layout(1), back;
	uint32_t moved, stay;
	struct asked *a;

	far_form(far, &layout);
	far_form(far, &other);
	a = push(far, 0, &layout, 1, 1, 0, 0);
	server_drain(far->server, &moved, &stay);
	ASSERT_EQ(moved, 1);
	ASSERT_EQ(stay, 1);
	far_expect(far, a, -ESHUTDOWN, "other servers");
	expect_told(far, 0, 1, 1, 0);
	expect_told(far, 1, 1, 1, 0);
	back = layout;
	back.moves[0] = 2;
	back.asks_back = true;
	far_expect(far, far_attach(far, 0, &back, 0, FAR_INSTANCE), -ESHUTDOWN, "other servers");
	later.name = "later";
	far_form(far, &later);
	expect_told(far, 0, 2, 1, 0);
	ASSERT_EQ(far_n_jobs(far), 1);
	/* The other one has gone as well: then both are in again, and this one stays. */
	back.asks_back = false;
	back.moves[1] = 2;
	far_expect(far, far_attach(far, 0, &back, 0, FAR_INSTANCE), 0, NULL);
	far_expect(far, far_attach(far, 1, &back, 1, FAR_INSTANCE + 1), 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 2);
	a = push(far, 0, &back, 1, 1, 0, 0);
	expect_result(far, push(far, 1, &back, 1, 1, 1, 0), 3, 1);
	expect_result(far, a, 3, 1);
}

TEST(a_result_is_made_where_a_node_of_this_process_keeps_it)
{
	_cleanup_(far_freep) struct far *far = far_new(NULL);
	struct layout layout = kept_layout(2);
	_cleanup_(block_unrefp) struct block *block = NULL;
	struct asked *a, *b;
	uint64_t key;

	ASSERT_OK(block_new(far->blocks, LEN, NULL, &block));
	far_form(far, &layout);
	key = far_tensor(far, &layout, "t", DTYPE_FLOAT32, FLOATS, NULL);
	far_lend(far, 1, block, true);
	a = push(far, 0, &layout, key, 1, 0, 0);
	ASSERT_EQ(block->refs, 1);
	b = push(far, 1, &layout, key, 1, 1, 0);
	expect_result(far, a, 3, 1);
	expect_result(far, b, 3, 1);
	for (size_t i = 0; i < FLOATS; i++)
		ASSERT_TRUE(((float *)block->data)[i] == 3);
	/* Not before all keep it, nobody is sent it any more. */
	ASSERT_EQ(far_filled(far, 1), 1);
	ASSERT_EQ(block->refs, 2);
	ack(far, 1, &layout, 1, 1, FAR_EPOCH);
	ASSERT_EQ(block->refs, 2);
	ack(far, 0, &layout, 0, 1, FAR_EPOCH);
	ASSERT_EQ(block->refs, 1);
	/* One that has none, or another length, does without. */
	far_lend(far, 1, NULL, true);
	a = push(far, 0, &layout, key, 2, 0, 1);
	b = push(far, 1, &layout, key, 2, 1, 1);
	expect_result(far, a, 3, 2);
	expect_result(far, b, 3, 2);
	ASSERT_EQ(far_filled(far, 1), 1);
}
