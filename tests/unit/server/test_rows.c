/*
 * push_pull_rows at the server: pieces in any order, the union, refusals, what is held and charged.
 */
#include "double.h"

#define FAR   _cleanup_(far_freep) struct far *far
#define TABLE 100000
#define WIDTH 2

/* A piece of a list of rows of two floats; what a row's values are follows from its number and the node. */
struct piece {
	uint64_t table, n; /* 0: TABLE; of the whole list, 0: here */
	uint32_t step, part, width;
	uint64_t pad;
	const int64_t *rows;
	uint32_t here;
};

static float value_of(int64_t row, uint32_t node, unsigned column)
{
	/* Rows that are refused may be any number. */
	return (float)row * 10 + (float)(column + node * 1000);
}

static struct data_header header_of(const struct layout *layout, uint64_t round, uint32_t node)
{
	struct data_header header = far_push(layout, 1, round, node);

	header.operation = OPERATION_PUSH_PULL_ROWS;
	return header;
}

static struct asked *push_as(struct far *far, unsigned end, struct data_header header,
			     const struct piece *piece)
{
	size_t len = data_rows_len(piece->here, WIDTH * sizeof(float));
	_cleanup_(freep) char *payload = calloc(1, len);
	struct data_rows head = {
		.rows = piece->table ?: TABLE,
		.n = piece->n ?: piece->here,
		.width = piece->width ?: WIDTH,
		.step = piece->step ?: 1000,
		.pad = piece->pad,
	};
	int64_t *rows = (int64_t *)(payload + sizeof(head));
	float *values = (float *)(rows + piece->here);

	data_rows_encode(&head);
	memcpy(payload, &head, sizeof(head));
	for (uint32_t i = 0; i < piece->here; i++) {
		rows[i] = piece->rows[i];
		for (unsigned k = 0; k < WIDTH; k++)
			values[i * WIDTH + k] = value_of(rows[i], header.node, k);
	}
	header.part = piece->part;
	header.len = header.part_len = (uint32_t)len;
	header.total = len;
	return far_call(far, end, &header, payload);
}

static struct asked *push(struct far *far, const struct layout *layout, uint64_t round,
			  uint32_t node, const int64_t *rows, uint32_t n)
{
	return push_as(far, node, header_of(layout, round, node),
		       &(struct piece){ .rows = rows, .here = n });
}

static struct asked *pull(struct far *far, const struct layout *layout, uint64_t round,
			  uint32_t node, uint32_t part)
{
	struct data_header header = header_of(layout, round, node);

	header.op = DATA_PULL;
	header.part = part;
	return far_call(far, node, &header, NULL);
}

static void expect_empty(struct far *far, struct asked *asked)
{
	far_expect(far, asked, 0, NULL);
	ASSERT_EQ(asked->answer.op, DATA_RESULT);
	ASSERT_EQ(asked->answer.len, 0);
}

/* A piece of a result, taken apart. */
static struct data_piece piece_of(struct far *far, struct asked *asked)
{
	struct data_piece piece;
	const char *why = NULL;

	far_expect(far, asked, 0, NULL);
	ASSERT_EQ(asked->answer.op, DATA_RESULT);
	ASSERT_OK(data_header_check(&asked->answer, &why));
	if (data_rows_parse(&asked->answer, asked->data, &piece, &why))
		test_fail(__FILE__, __LINE__, "the result: %s", why);
	ASSERT_EQ(piece.list.rows, TABLE);
	ASSERT_EQ(piece.list.width, WIDTH);
	return piece;
}

/* The union of what nodes 0 and 1 gave, all in one piece. */
static void expect_sum(struct far *far, struct asked *asked, const int64_t *rows,
		       const unsigned *nodes, uint32_t n)
{
	struct data_piece piece = piece_of(far, asked);
	const float *values = piece.values;

	ASSERT_EQ(piece.list.n, n);
	ASSERT_EQ(piece.n, n);
	for (uint32_t i = 0; i < n; i++) {
		ASSERT_EQ(piece.rows[i], rows[i]);
		for (unsigned k = 0; k < WIDTH; k++) {
			float sum = 0;

			for (uint32_t node = 0; node < 8; node++)
				if (nodes[i] >> node & 1)
					sum += value_of(rows[i], node, k);
			ASSERT_TRUE(values[i * WIDTH + k] == sum);
		}
	}
}

static const int64_t some[] = { 0, 7, 9, 500, TABLE - 1 };
static const int64_t others[] = { 3, 7, 500, 501 };
static const int64_t both[] = { 0, 3, 7, 9, 500, 501, TABLE - 1 };
static const unsigned both_nodes[] = { 1, 2, 3, 1, 3, 2, 1 };

TEST(the_union_goes_to_every_node)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 0, some, 5);
	far_expect_waiting(far, a);
	b = push(far, &layout, 1, 1, others, 4);
	expect_sum(far, a, both, both_nodes, 7);
	expect_sum(far, b, both, both_nodes, 7);
	/* Nothing is something, too. */
	a = push(far, &layout, 2, 0, NULL, 0);
	far_expect_waiting(far, a);
	b = push(far, &layout, 2, 1, NULL, 0);
	expect_sum(far, a, NULL, NULL, 0);
	expect_sum(far, b, NULL, NULL, 0);
	a = push(far, &layout, 3, 0, NULL, 0);
	b = push(far, &layout, 3, 1, others, 4);
	expect_sum(far, a, others, (const unsigned[]){ 2, 2, 2, 2 }, 4);
	expect_sum(far, b, others, (const unsigned[]){ 2, 2, 2, 2 }, 4);
}

TEST(sums_run_in_the_pool)
{
	FAR = far_new(&(struct far_options){ .n_threads = 2, .inline_bytes = 1 });
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	for (uint64_t round = 1; round < 50; round++) {
		a = push(far, &layout, round, 0, some, 5);
		b = push(far, &layout, round, 1, others, 4);
		expect_sum(far, a, both, both_nodes, 7);
		expect_sum(far, b, both, both_nodes, 7);
	}
}

#define STEP 128 /* just long enough */

struct many {
	int64_t rows[5 * STEP];
};

static struct many many_rows(void)
{
	struct many many;

	for (size_t i = 0; i < ARRAY_SIZE(many.rows); i++)
		many.rows[i] = (int64_t)i * 3;
	return many;
}

static struct asked *push_part(struct far *far, const struct layout *layout, uint64_t round,
			       uint32_t node, uint32_t part, const struct many *many, uint32_t n)
{
	uint32_t before = part * STEP;

	return push_as(far, node, header_of(layout, round, node),
		       &(struct piece){ .rows = many->rows + before,
					.n = n,
					.step = STEP,
					.part = part,
					.here = MIN(n - before, (uint32_t)STEP) });
}

TEST(pieces_come_in_any_order_and_the_result_is_pulled)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();
	struct asked *last, *other;
	uint64_t at = 0;

	far_form(far, &layout);
	last = push_part(far, &layout, 1, 0, 4, &many, 5 * STEP - 7);
	far_expect_waiting(far, last);
	expect_empty(far, push_part(far, &layout, 1, 0, 2, &many, 5 * STEP - 7));
	far_expect(far, push_part(far, &layout, 1, 0, 2, &many, 5 * STEP - 7), -EALREADY,
		   "here already");
	far_expect(far, push_part(far, &layout, 1, 0, 4, &many, 5 * STEP - 7), -EALREADY,
		   "here already");
	expect_empty(far, push_part(far, &layout, 1, 0, 0, &many, 5 * STEP - 7));
	other = push(far, &layout, 1, 1, others, 4);
	far_expect_waiting(far, other);
	expect_empty(far, push_part(far, &layout, 1, 0, 3, &many, 5 * STEP - 7));
	far_expect_waiting(far, last);
	far_expect(far, pull(far, &layout, 1, 0, 1), -ESTALE, "not held");
	expect_empty(far, push_part(far, &layout, 1, 0, 1, &many, 5 * STEP - 7));
	/* Steps of node 0, which was the first. 3, 501 are multiples of 3; 7 and 500 are not. */
	ASSERT_EQ(piece_of(far, last).list.n, 5 * STEP - 7 + 2);
	ASSERT_EQ(piece_of(far, other).n_pieces, 5);
	for (uint32_t part = 0; part < 5; part++) {
		struct asked *asked = part ? pull(far, &layout, 1, 0, part) : last;
		struct data_piece piece = piece_of(far, asked);

		ASSERT_EQ(asked->answer.part, part);
		for (size_t i = 1; i < piece.n; i++)
			ASSERT_TRUE(piece.rows[i - 1] < piece.rows[i]);
		at += piece.n;
	}
	ASSERT_EQ(at, 5 * STEP - 7 + 2);
	far_expect(far, pull(far, &layout, 1, 0, 1), -ESTALE, "not held");
	far_expect(far, push(far, &layout, 1, 1, others, 4), -ESTALE, "over");
	/* The other still has all of it to pull. */
	far_expect(far, pull(far, &layout, 1, 1, 5), -EPROTO, "no piece 5");
	for (uint32_t part = 4; part; part--)
		(void)piece_of(far, pull(far, &layout, 1, 1, part));
	far_expect(far, pull(far, &layout, 1, 1, 1), -ESTALE, "not held");
}

/* All memory is given back: far_free() looks at the blocks. */
TEST(a_result_is_held_no_longer_than_somebody_wants_it)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();

	far_form(far, &layout);
	for (uint64_t round = 1; round <= 3; round++) {
		for (uint32_t node = 0; node < 2; node++) {
			for (uint32_t part = 0; part < 3; part++)
				(void)push_part(far, &layout, round, node, part, &many, 3 * STEP);
		}
	}
	/* Node 0 gives up its first round, in the middle of the sum; node 1 still gets it. */
	far_notice(far, 0, DATA_FAIL_ROUND, layout.job, 1, 1, 0, EIO, "no room");
	far->ops->settle(far);
	far_expect(far, pull(far, &layout, 1, 0, 1), -ESTALE, "not held");
	(void)piece_of(far, pull(far, &layout, 1, 1, 1));
	(void)piece_of(far, pull(far, &layout, 1, 1, 2));
	ASSERT_TRUE(block_cache_used(far->blocks));
	/* Node 1 takes the second and leaves before the third; then only node 0 is left, and goes. */
	(void)piece_of(far, pull(far, &layout, 2, 1, 1));
	(void)piece_of(far, pull(far, &layout, 2, 1, 2));
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	(void)piece_of(far, pull(far, &layout, 3, 0, 1));
	(void)piece_of(far, pull(far, &layout, 3, 0, 2));
	far_expect(far, pull(far, &layout, 3, 0, 2), -ESTALE, "not held");
	(void)piece_of(far, pull(far, &layout, 2, 0, 2));
	far_lose(far, 0);
	ASSERT_EQ(block_cache_used(far->blocks), 0);
}

/* What one node says wrong ends the round for both. */
static void fails_for_all(const int64_t *rows, uint32_t n, int status, const char *text)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 0, some, 5);
	b = push(far, &layout, 1, 1, rows, n);
	far_expect(far, a, status, text);
	far_expect(far, b, status, text);
	a = push(far, &layout, 2, 0, some, 5);
	b = push(far, &layout, 2, 1, others, 4);
	expect_sum(far, a, both, both_nodes, 7);
	expect_sum(far, b, both, both_nodes, 7);
}

TEST(lists_in_disorder_are_refused_and_their_node_is_named)
{
	fails_for_all((const int64_t[]){ 5, 4 }, 2, -EINVAL, "rank 1 (node 1) are not in order");
	fails_for_all((const int64_t[]){ 5, 5 }, 2, -EINVAL, "rank 1 (node 1)");
	fails_for_all((const int64_t[]){ -1, 5 }, 2, -EINVAL, "rank 1 (node 1)");
	fails_for_all((const int64_t[]){ 5, TABLE }, 2, -EINVAL, "not of the table");
	fails_for_all((const int64_t[]){ INT64_MIN }, 1, -EINVAL, "rank 1 (node 1)");
	fails_for_all((const int64_t[]){ 1, INT64_MAX }, 2, -EINVAL, "rank 1 (node 1)");
}

/* Wrong in itself: refused to its sender, and the round goes on without it. */
static void refused(struct piece piece, const char *text)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 0, some, 5);
	far_expect(far, push_as(far, 1, header_of(&layout, 1, 1), &piece), -EPROTO, text);
	far_expect_waiting(far, a);
	b = push(far, &layout, 1, 1, others, 4);
	expect_sum(far, a, both, both_nodes, 7);
	expect_sum(far, b, both, both_nodes, 7);
}

TEST(lengths_that_lie_are_refused)
{
	refused((struct piece){ .rows = some, .here = 5, .n = 4 }, "another length");
	refused((struct piece){ .rows = some, .here = 5, .n = 6 }, "another length");
	refused((struct piece){ .rows = some, .here = 5, .n = UINT64_MAX }, "more rows than");
	refused((struct piece){ .rows = some, .here = 5, .table = 3 }, "more rows than");
	refused((struct piece){ .rows = some, .here = 5, .table = UINT64_MAX }, "can be");
	refused((struct piece){ .rows = some, .here = 5, .table = INT64_MAX }, "can be");
	refused((struct piece){ .rows = some, .here = 5, .step = 1 }, "too small");
	refused((struct piece){ .rows = some, .here = 5, .part = 1 }, "behind the end");
	refused((struct piece){ .rows = some, .here = 5, .part = UINT32_MAX }, "behind");
	refused((struct piece){ .rows = some, .here = 5, .width = UINT32_MAX }, "too many");
	refused((struct piece){ .rows = some, .here = 5, .width = 3 }, "another length");
	refused((struct piece){ .rows = some, .here = 5, .pad = 1 }, "later version");
}

TEST(a_list_stays_what_it_was_from_piece_to_piece)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();
	struct asked *a, *b;

	far_form(far, &layout);
	expect_empty(far, push_part(far, &layout, 1, 0, 0, &many, 2 * STEP));
	far_expect(far, push_part(far, &layout, 1, 0, 2, &many, 5 * STEP), -EPROTO,
		   "a piece of another list");
	far_expect(far, push_part(far, &layout, 1, 0, 1, &many, 2 * STEP - 1), -EPROTO,
		   "a piece of another list");
	a = push_part(far, &layout, 1, 0, 1, &many, 2 * STEP);
	b = push(far, &layout, 1, 1, NULL, 0);
	ASSERT_EQ(piece_of(far, a).list.n, 2 * STEP);
	ASSERT_EQ(piece_of(far, b).list.n, 2 * STEP);
	(void)pull(far, &layout, 1, 0, 1);
	(void)pull(far, &layout, 1, 1, 1);
}

TEST(nodes_that_disagree_about_the_table)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct data_header h;
	struct asked *a, *b;

	far_form(far, &layout);
	a = push(far, &layout, 1, 0, some, 5);
	b = push_as(far, 1, header_of(&layout, 1, 1),
		    &(struct piece){ .rows = others, .here = 4, .table = TABLE + 1 });
	far_expect(far, a, -EINVAL, "disagree");
	far_expect(far, b, -EINVAL, "rows of 8 bytes of a table of 800008");

	a = push(far, &layout, 2, 0, some, 5);
	h = header_of(&layout, 2, 1);
	h.reduction = REDUCTION_MAX;
	b = push_as(far, 1, h, &(struct piece){ .rows = others, .here = 4 });
	far_expect(far, a, -EINVAL, "push_pull_rows (sum) of float32");
	far_expect(far, b, -EINVAL, "push_pull_rows (max) of float32");

	a = push(far, &layout, 3, 0, some, 5);
	h = far_push(&layout, 1, 3, 1);
	h.len = h.part_len = 8;
	h.total = 8;
	b = far_call(far, 1, &h, (const float[]){ 1, 2 });
	far_expect(far, a, -EINVAL, "disagree");
	far_expect(far, b, -EINVAL, "push_pull (sum) of float32");
}

TEST(what_is_held_is_charged_and_refused_over_the_quota)
{
	/* A list that claims to be long costs as much as the array of its pieces. */
	FAR = far_new(&(struct far_options){ .quota_bytes = 64 << 10 });
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();

	far_form(far, &layout);
	far_expect(far,
		   push_as(far, 0, header_of(&layout, 1, 0),
			   &(struct piece){ .rows = many.rows,
					    .table = 1ull << 62,
					    .n = 1ull << 59,
					    .step = STEP,
					    .here = STEP }),
		   -EPROTO, "can be");
	far_expect(far,
		   push_as(far, 0, header_of(&layout, 1, 0),
			   &(struct piece){ .rows = many.rows,
					    .table = 1ull << 50,
					    .n = 1ull << 40,
					    .step = STEP,
					    .here = STEP }),
		   -EDQUOT, "job_quota");
	ASSERT_EQ(far->failed[1].n, 1);
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(a_result_that_does_not_fit_ends_the_job)
{
	FAR = far_new(&(struct far_options){ .quota_bytes = 16 << 10 });
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();
	struct asked *a, *b;

	far_form(far, &layout);
	expect_empty(far, push_part(far, &layout, 1, 0, 0, &many, 4 * STEP));
	expect_empty(far, push_part(far, &layout, 1, 0, 1, &many, 4 * STEP));
	expect_empty(far, push_part(far, &layout, 1, 0, 2, &many, 4 * STEP));
	a = push_part(far, &layout, 1, 0, 3, &many, 4 * STEP);
	b = push(far, &layout, 1, 1, NULL, 0);
	far_expect(far, a, -EDQUOT, "raise job_quota");
	far_expect(far, b, -EDQUOT, "raise job_quota");
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(a_job_that_ends_in_the_middle_gives_all_back)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();
	struct asked *last, *held;

	far_form(far, &layout);
	for (uint32_t node = 0; node < 2; node++)
		for (uint32_t part = 0; part < 2; part++)
			held = push_part(far, &layout, 1, node, part, &many, 2 * STEP);
	(void)piece_of(far, held);
	last = push_part(far, &layout, 2, 0, 4, &many, 5 * STEP);
	expect_empty(far, push_part(far, &layout, 2, 0, 1, &many, 5 * STEP));
	far_lose(far, 1);
	far_expect(far, last, -ECONNRESET, NULL);
	far_expect(far, pull(far, &layout, 1, 0, 1), -ECONNRESET, NULL);
	ASSERT_EQ(block_cache_used(far->blocks), 0);
}

TEST(a_failed_round_answers_the_last_piece_too)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();
	struct asked *last;

	far_form(far, &layout);
	last = push_part(far, &layout, 1, 0, 4, &many, 5 * STEP);
	expect_empty(far, push_part(far, &layout, 1, 0, 1, &many, 5 * STEP));
	far_notice(far, 1, DATA_FAIL_ROUND, layout.job, 1, 1, 1, EINVAL, "rank 1: row -3");
	far_expect(far, last, -EINVAL, "row -3");
	far_expect(far, push_part(far, &layout, 1, 0, 2, &many, 5 * STEP), -EINVAL, "row -3");
}

TEST(whoever_left_is_missed)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct many many = many_rows();
	struct asked *a;

	far_form(far, &layout);
	a = push(far, &layout, 1, 0, some, 5);
	/* Begun is not done. */
	expect_empty(far, push_part(far, &layout, 1, 1, 0, &many, 2 * STEP));
	far_expect_waiting(far, a);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	far_expect(far, a, -EPIPE, "rank 1 has left");
}

/* One that had the result and has left, while the server that had heard so is gone: no word is wanted of it. */
TEST(whoever_left_has_agreed)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL);
	struct data_header done;
	struct asked *a, *b;

	layout.resume = true;
	far_form(far, &layout);
	for (uint32_t node = 0; node < 2; node++)
		far_expect(far, far_attach(far, node, &layout, node, FAR_INSTANCE + node), 0, NULL);
	done = header_of(&layout, 1, 0);
	done.block = DATA_ROWS_DONE;
	done.epoch = far_epoch(&layout);
	far_notice(far, 2, DATA_LEAVE, layout.job, 0, 0, 2, 0, NULL);
	a = far_call(far, 0, &done, NULL);
	far_expect_waiting(far, a);
	done.node = 1;
	b = far_call(far, 1, &done, NULL);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
}
