/* Each operation as it stands in the ring, and the words for what does not fit. */
#include "fake.h"

static int try_submit(struct bps_tensor *tensor, struct bps_submit_params params)
{
	struct bps_request *request = NULL;
	int r;

	params.size = sizeof(params);
	r = bps_submit(tensor, &params, &request);
	if (!r)
		r = bps_request_wait(request, BPS_FOREVER);
	bps_request_free(request);
	return r;
}
#define TRY(tensor, ...) try_submit(tensor, (struct bps_submit_params){ __VA_ARGS__ })
#define IN_OUT		 .input = input, .output = output
#define COUNTS(...)                  \
	.counts = (const uint64_t[]) \
	{                            \
		__VA_ARGS__          \
	}
#define RECEIVE(...)                         \
	.receive_counts = (const uint64_t[]) \
	{                                    \
		__VA_ARGS__                  \
	}

/* Rank 1 of 3, with a tensor of 12 float32 and one of any number. */
struct fixture {
	struct fake *fake;
	struct bps_client *client;
	struct bps_tensor *fixed, *variable;
};

static void fixture_done(struct fixture *f)
{
	bps_tensor_free(f->fixed);
	bps_tensor_free(f->variable);
	bps_client_close(f->client);
	fake_free(f->fake);
}

static struct fixture fixture_init(void)
{
	struct fixture f = { .fake = fake_new() };

	f.client = fake_join(f.fake, 1, 3);
	ASSERT_OK(bps_tensor_declare(f.client, "fixed", BPS_FLOAT32, 12, &f.fixed));
	ASSERT_OK(bps_tensor_declare(f.client, "variable", BPS_FLOAT32, BPS_VARIABLE, &f.variable));
	return f;
}
#define FIXTURE                                                    \
	_cleanup_(fixture_done) struct fixture f = fixture_init(); \
	_unused_ float input[64] = { 0 }, output[64] = { 0 }

static void assert_entry(struct fake *fake, int operation, uint64_t input_count,
			 uint64_t output_count)
{
	ASSERT_EQ(told(fake)->entry.operation, operation);
	ASSERT_EQ(told(fake)->entry.input_count, input_count);
	ASSERT_EQ(told(fake)->entry.output_count, output_count);
	ASSERT_EQ(told(fake)->entry.membership, 0);
}

TEST(push_pull)
{
	FIXTURE;

	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, IN_OUT));
	assert_entry(f.fake, BPS_PUSH_PULL, 12, 12);
	ASSERT_EQ(told(f.fake)->entry.reduction, BPS_SUM);
	ASSERT_EQ(told(f.fake)->entry.counts_buffer, 0);
	ASSERT_EQ(told(f.fake)->entry.timeout_ms, 0);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, .reduction = BPS_MAX, .priority = -7,
		      .timeout_ms = 99, .input_count = 12, .output_count = 64, IN_OUT));
	assert_entry(f.fake, BPS_PUSH_PULL, 12, 12);
	ASSERT_EQ(told(f.fake)->entry.reduction, BPS_MAX);
	ASSERT_EQ(told(f.fake)->entry.priority, -7);
	ASSERT_EQ(told(f.fake)->entry.timeout_ms, 99);
	ASSERT_EQ(told(f.fake)->entry.round, 2);
	ASSERT_OK(TRY(f.variable, .operation = BPS_PUSH_PULL, .input_count = 5, IN_OUT));
	assert_entry(f.fake, BPS_PUSH_PULL, 5, 5);
	ASSERT_EQ(told(f.fake)->entry.round, 1);
	/* Nothing at all is well too, without memory. */
	ASSERT_OK(TRY(f.variable, .operation = BPS_PUSH_PULL));
	assert_entry(f.fake, BPS_PUSH_PULL, 0, 0);
	ASSERT_EQ(told(f.fake)->entry.input_buffer + told(f.fake)->entry.output_buffer, 0);
	ASSERT_EQ(((uint8_t *)output)[0], 1);
	ASSERT_EQ(((uint8_t *)output)[12 * 4], 0);
}

TEST(push_pull_that_does_not_fit)
{
	FIXTURE;
	char *bytes = (char *)input;

	ASSERT_FAILS(TRY(f.fixed, IN_OUT), EINVAL, "0 is no operation");
	ASSERT_FAILS(TRY(f.fixed, .operation = 10), EINVAL, "\"fixed\": 10 is no operation");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_ACCUMULATE, IN_OUT), EINVAL,
		     "the job has no async");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BROADCAST, .all_ranks = 1, IN_OUT), EINVAL,
		     "it always waits for all");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .reduction = 5), EINVAL,
		     "push_pull of tensor \"fixed\": 5 is no reduction");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .reduction = -1), EINVAL, "-1 is no");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .output = output), EINVAL,
		     "input is NULL");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input = input), EINVAL,
		     "output is NULL");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input_count = 11, IN_OUT), EINVAL,
		     "11 elements, but 12 were declared");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .output_count = 11, IN_OUT), EINVAL,
		     "room for 11 elements of 12");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input = bytes + 1, .output = output),
		     EINVAL, "input is not aligned to 4");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input = input, .output = bytes + 2),
		     EINVAL, "output is not aligned");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input = input, .output = input + 11),
		     EINVAL, "overlap");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input = input + 11, .output = input),
		     EINVAL, "overlap");
	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input = input + 12, .output = input));
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, COUNTS(1, 2, 3), IN_OUT), EINVAL,
		     "no counts");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, RECEIVE(1, 2, 3), IN_OUT), EINVAL,
		     "no receive_counts");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .timeout_ms = -1, IN_OUT), EINVAL,
		     "timeout");
	ASSERT_FAILS(
		TRY(f.variable, .operation = BPS_PUSH_PULL, .input_count = UINT64_MAX / 2, IN_OUT),
		EINVAL, "more elements than there can be");
	ASSERT_TRUE(TRY(f.variable, .operation = BPS_PUSH_PULL, .input_count = INT64_MAX / 4,
			.input = (void *)4096, .output = (void *)4096) < 0);
	/* None of them reached the daemon. */
	ASSERT_EQ(told(f.fake)->n_entries, 1);
}

TEST(bool_has_no_average)
{
	FIXTURE;
	_cleanup_(bps_tensor_freep) struct bps_tensor *flags = NULL;

	ASSERT_OK(bps_tensor_declare(f.client, "flags", BPS_BOOL, 4, &flags));
	ASSERT_FAILS(TRY(flags, .operation = BPS_PUSH_PULL, .reduction = BPS_AVERAGE, IN_OUT),
		     EINVAL, "bool has no average");
	ASSERT_OK(TRY(flags, .operation = BPS_PUSH_PULL, .reduction = BPS_MIN, IN_OUT));
}

TEST(broadcast)
{
	FIXTURE;

	/* Not the root: its input does not count. */
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BROADCAST, .root = 2, .output = output));
	assert_entry(f.fake, BPS_BROADCAST, 12, 12);
	ASSERT_EQ(told(f.fake)->entry.root, 2);
	ASSERT_EQ(told(f.fake)->entry.input_buffer, 0);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BROADCAST, .root = 2, .input = output,
		      .output = output));
	ASSERT_EQ(told(f.fake)->entry.input_buffer, 0);
	ASSERT_OK(TRY(f.variable, .operation = BPS_BROADCAST, .output_count = 9, .output = output));
	assert_entry(f.fake, BPS_BROADCAST, 9, 9);
	/* The root. */
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BROADCAST, .root = 1, IN_OUT));
	ASSERT_TRUE(told(f.fake)->entry.input_buffer);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BROADCAST, .root = 1, .input = input,
		      .output = input));
	ASSERT_EQ(told(f.fake)->entry.input_offset, told(f.fake)->entry.output_offset);

	ASSERT_OK(TRY(f.fixed, .operation = BPS_BROADCAST, .root = 1, .input = input));
	ASSERT_EQ(told(f.fake)->entry.output_buffer, 0);

	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BROADCAST, .root = 1, .output = output), EINVAL,
		     "input is NULL");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BROADCAST, .root = 3, IN_OUT), EINVAL,
		     "root is 3");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BROADCAST, .reduction = BPS_SUM, IN_OUT), EINVAL,
		     "reduces nothing, but reduction is sum");
}

TEST(all_gather)
{
	FIXTURE;

	ASSERT_OK(TRY(f.fixed, .operation = BPS_ALL_GATHER, IN_OUT));
	assert_entry(f.fake, BPS_ALL_GATHER, 12, 36);
	ASSERT_OK(TRY(f.variable, .operation = BPS_ALL_GATHER, .input_count = 4, IN_OUT));
	assert_entry(f.fake, BPS_ALL_GATHER, 4, 12);
	ASSERT_EQ(told(f.fake)->entry.counts_buffer, 0);
	ASSERT_OK(TRY(f.variable, .operation = BPS_ALL_GATHER, COUNTS(1, 5, 7), IN_OUT));
	assert_entry(f.fake, BPS_ALL_GATHER, 5, 13);
	ASSERT_TRUE(told(f.fake)->entry.counts_buffer);
	ASSERT_EQ(told(f.fake)->entry.counts_offset % 64, 0);
	ASSERT_MEM(told(f.fake)->counts, ((uint64_t[]){ 1, 5, 7 }), 24);
	/* A rank that gives nothing. */
	ASSERT_OK(TRY(f.variable, .operation = BPS_ALL_GATHER, COUNTS(1, 0, 2), .output = output));
	assert_entry(f.fake, BPS_ALL_GATHER, 0, 3);

	ASSERT_FAILS(TRY(f.variable, .operation = BPS_ALL_GATHER, .input_count = 4, COUNTS(1, 5, 7),
			 IN_OUT),
		     EINVAL, "input_count is 4, but counts say 5");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_ALL_GATHER, COUNTS(1, 5, 7), IN_OUT), EINVAL,
		     "5 elements, but 12 were declared");
	ASSERT_FAILS(TRY(f.variable, .operation = BPS_ALL_GATHER, .output_count = 12,
			 COUNTS(1, 5, 7), IN_OUT),
		     EINVAL, "room for 12 elements of 13");
	ASSERT_FAILS(TRY(f.variable, .operation = BPS_ALL_GATHER, COUNTS(UINT64_MAX, 5, 7), IN_OUT),
		     EINVAL, "counts[1] is out of range");
	ASSERT_FAILS(
		TRY(f.variable, .operation = BPS_ALL_GATHER, .input_count = UINT64_MAX / 2, IN_OUT),
		EINVAL, "out of range");
}

TEST(reduce_scatter)
{
	FIXTURE;

	ASSERT_OK(TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, .reduction = BPS_AVERAGE, IN_OUT));
	assert_entry(f.fake, BPS_REDUCE_SCATTER, 12, 4);
	ASSERT_EQ(told(f.fake)->entry.reduction, BPS_AVERAGE);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, COUNTS(2, 1, 9), IN_OUT));
	assert_entry(f.fake, BPS_REDUCE_SCATTER, 12, 1);
	ASSERT_MEM(told(f.fake)->counts, ((uint64_t[]){ 2, 1, 9 }), 24);
	ASSERT_OK(TRY(f.variable, .operation = BPS_REDUCE_SCATTER, COUNTS(2, 3, 4), IN_OUT));
	assert_entry(f.fake, BPS_REDUCE_SCATTER, 9, 3);

	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, COUNTS(2, 1, 8), IN_OUT), EINVAL,
		     "11 elements, but 12 were declared");
	ASSERT_FAILS(TRY(f.variable, .operation = BPS_REDUCE_SCATTER, .input_count = 10, IN_OUT),
		     EINVAL, "10 elements cannot be cut into 3 equal blocks: give counts");
}

/* The result of a block lies elsewhere than its input: in place, it must not overwrite what is still read. */
TEST(in_place_with_blocks)
{
	FIXTURE;
	struct bps_memory *memory;
	uint8_t *bytes;

	ASSERT_OK(bps_memory_alloc(f.client, 4096, &memory));
	bytes = bps_memory_data(memory);
	memset(bytes, 7, 48);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, .input = bytes, .output = bytes));
	ASSERT_TRUE(told(f.fake)->entry.input_buffer != told(f.fake)->entry.output_buffer);
	ASSERT_EQ(bytes[15], 8);
	ASSERT_EQ(bytes[16], 7);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input = bytes, .output = bytes));
	ASSERT_EQ(told(f.fake)->entry.input_buffer, told(f.fake)->entry.output_buffer);
	ASSERT_EQ(told(f.fake)->entry.input_offset, told(f.fake)->entry.output_offset);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_ALL_GATHER, .input = input, .output = input));
	ASSERT_TRUE(told(f.fake)->entry.input_offset != told(f.fake)->entry.output_offset);
	/* Others write where this rank has not been read yet. */
	ASSERT_OK(TRY(f.fixed, .operation = BPS_ALL_TO_ALL, .input = bytes, .output = bytes));
	ASSERT_TRUE(told(f.fake)->entry.input_buffer != told(f.fake)->entry.output_buffer);
	/* Where a block lies in its own place, nothing is copied. */
	ASSERT_OK(TRY(f.fixed, .operation = BPS_ALL_GATHER, .input = bytes + 48, .output = bytes));
	ASSERT_EQ(told(f.fake)->entry.input_buffer, told(f.fake)->entry.output_buffer);
	ASSERT_EQ(told(f.fake)->entry.input_offset, 48);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, .input = bytes,
		      .output = bytes + 16));
	ASSERT_EQ(told(f.fake)->entry.input_buffer, told(f.fake)->entry.output_buffer);
	ASSERT_EQ(told(f.fake)->entry.output_offset, 16);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, COUNTS(5, 3, 4), .input = bytes,
		      .output = bytes + 20));
	ASSERT_OK(TRY(f.variable, .operation = BPS_ALL_GATHER, COUNTS(5, 3, 4), .input = bytes + 20,
		      .output = bytes));
	ASSERT_FAILS(
		TRY(f.fixed, .operation = BPS_ALL_GATHER, .input = bytes + 44, .output = bytes),
		EINVAL, "overlap");
	ASSERT_FAILS(
		TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, .input = bytes, .output = bytes + 32),
		EINVAL, "overlap");
	ASSERT_FAILS(
		TRY(f.fixed, .operation = BPS_ALL_TO_ALL, .input = bytes, .output = bytes + 16),
		EINVAL, "overlap");
	bps_memory_free(memory);
}

TEST(all_to_all)
{
	FIXTURE;

	ASSERT_OK(TRY(f.fixed, .operation = BPS_ALL_TO_ALL, IN_OUT));
	assert_entry(f.fake, BPS_ALL_TO_ALL, 12, 12);
	ASSERT_EQ(told(f.fake)->entry.counts_buffer, 0);
	ASSERT_OK(TRY(f.variable, .operation = BPS_ALL_TO_ALL, COUNTS(1, 2, 3), RECEIVE(4, 2, 6),
		      IN_OUT));
	assert_entry(f.fake, BPS_ALL_TO_ALL, 6, 12);
	ASSERT_MEM(told(f.fake)->counts, ((uint64_t[]){ 1, 2, 3, 4, 2, 6 }), 48);
	ASSERT_OK(TRY(f.variable, .operation = BPS_ALL_TO_ALL, COUNTS(1, 2, 3), IN_OUT));
	ASSERT_MEM(told(f.fake)->counts, ((uint64_t[]){ 1, 2, 3, 2, 2, 2 }), 48);
	ASSERT_OK(TRY(f.variable, .operation = BPS_ALL_TO_ALL, COUNTS(1, 3, 3), .output_count = 9,
		      IN_OUT));
	ASSERT_MEM(told(f.fake)->counts, ((uint64_t[]){ 1, 3, 3, 3, 3, 3 }), 48);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_ALL_TO_ALL, RECEIVE(0, 4, 1), IN_OUT));
	assert_entry(f.fake, BPS_ALL_TO_ALL, 12, 5);
	ASSERT_MEM(told(f.fake)->counts, ((uint64_t[]){ 4, 4, 4, 0, 4, 1 }), 48);

	ASSERT_FAILS(TRY(f.variable, .operation = BPS_ALL_TO_ALL, COUNTS(1, 2, 3), RECEIVE(4, 5, 6),
			 IN_OUT),
		     EINVAL, "sends itself 2 elements and receives 5");
	ASSERT_FAILS(TRY(f.variable, .operation = BPS_ALL_TO_ALL, .input_count = 4, IN_OUT), EINVAL,
		     "give counts");
	ASSERT_FAILS(TRY(f.variable, .operation = BPS_ALL_TO_ALL, COUNTS(1, 2, 4), IN_OUT), EINVAL,
		     "give receive_counts");
	ASSERT_FAILS(TRY(f.variable, .operation = BPS_ALL_TO_ALL, COUNTS(1, 2, 3),
			 RECEIVE(UINT64_MAX, 2, 6), IN_OUT),
		     EINVAL, "receive_counts[1]");
}

TEST(barrier)
{
	FIXTURE;
	struct bps_request *request;

	ASSERT_OK(bps_barrier(f.client, 1234, &request));
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	assert_entry(f.fake, BPS_BARRIER, 0, 0);
	ASSERT_EQ(told(f.fake)->entry.timeout_ms, 1234);
	bps_request_free(request);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BARRIER));
	ASSERT_EQ(told(f.fake)->entry.input_buffer, 0);
	ASSERT_OK(bps_barrier(f.client, 0, &request));
	ASSERT_EQ(bps_request_wait(request, BPS_FOREVER), 0);
	ASSERT_EQ(told(f.fake)->entry.round, 2);
	bps_request_free(request);
	ASSERT_FAILS(bps_barrier(f.client, -1, &request), EINVAL, "timeout");
	ASSERT_FAILS(bps_barrier(f.client, 0, NULL), EINVAL, "NULL");
}

TEST(bad_calls)
{
	FIXTURE;
	struct bps_submit_params params = { .operation = BPS_BARRIER };
	struct bps_request *request;

	ASSERT_FAILS(bps_submit(f.fixed, NULL, &request), EINVAL, "params is NULL");
	ASSERT_FAILS(bps_submit(f.fixed, &params, &request), EINVAL, "size");
	params.size = sizeof(params);
	ASSERT_FAILS(bps_submit(f.fixed, &params, NULL), EINVAL, "ret_request is NULL");
	ASSERT_FAILS(bps_submit(NULL, &params, &request), EINVAL, "tensor is NULL");
}

/* A tensor of 12 elements: 3 rows of 4. */
#define ROWS .operation = BPS_PUSH_PULL_ROWS, .width = 4
#define ROWS_IN_OUT                                                                   \
	ROWS, .input = input, .input_rows = rows, .input_count = 8, .output = output, \
	      .output_rows = out_rows, .output_count = 12

TEST(push_pull_rows)
{
	FIXTURE;
	const int64_t rows[] = { 2, 0 };
	int64_t out_rows[4] = { -1, -1, -1, -1 };

	ASSERT_OK(TRY(f.fixed, ROWS_IN_OUT));
	assert_entry(f.fake, BPS_PUSH_PULL_ROWS, 8, 12);
	ASSERT_EQ(told(f.fake)->entry.width, 4);
	ASSERT_EQ(told(f.fake)->entry.reduction, BPS_SUM);
	ASSERT_TRUE(told(f.fake)->entry.input_rows_buffer &&
		    told(f.fake)->entry.output_rows_buffer);
	/* No more comes back than the rows of the result. */
	ASSERT_TRUE(out_rows[0] == 2 && out_rows[1] == 0 && out_rows[2] == -1);
	ASSERT_EQ(((uint8_t *)output)[8 * 4 - 1], 1);
	ASSERT_EQ(((uint8_t *)output)[8 * 4], 0);

	/* Nothing given; no room. */
	ASSERT_OK(TRY(f.fixed, ROWS, .output = output, .output_rows = out_rows, .output_count = 4));
	assert_entry(f.fake, BPS_PUSH_PULL_ROWS, 0, 4);
	ASSERT_EQ(told(f.fake)->entry.input_rows_buffer, 0);
	ASSERT_OK(TRY(f.fixed, ROWS, .input = input, .input_rows = rows, .input_count = 4));
	assert_entry(f.fake, BPS_PUSH_PULL_ROWS, 4, 0);
	ASSERT_EQ(told(f.fake)->entry.output_rows_buffer, 0);
}

TEST(push_pull_rows_in_memory_of_the_library)
{
	FIXTURE;
	struct bps_memory *memory;
	int64_t *rows, *out_rows;

	ASSERT_OK(bps_memory_alloc(f.client, 4096, &memory));
	rows = bps_memory_data(memory);
	out_rows = rows + 8;
	rows[0] = 1;
	ASSERT_OK(TRY(f.fixed, ROWS, .input = input, .input_rows = rows, .input_count = 4,
		      .output = rows + 16, .output_rows = out_rows, .output_count = 8));
	ASSERT_EQ(told(f.fake)->entry.input_rows_offset, 0);
	ASSERT_EQ(told(f.fake)->entry.output_rows_offset, 64);
	ASSERT_EQ(told(f.fake)->entry.output_offset, 128);
	ASSERT_EQ(told(f.fake)->entry.input_rows_buffer, told(f.fake)->entry.output_buffer);
	ASSERT_TRUE(told(f.fake)->entry.input_buffer != told(f.fake)->entry.output_buffer);
	ASSERT_EQ(out_rows[0], 1);
	bps_memory_free(memory);
}

/* With one thing changed. */
#define TRY_ROWS(change)                                      \
	({                                                    \
		struct bps_submit_params p = { ROWS_IN_OUT }; \
                                                              \
		change;                                       \
		try_submit(f.fixed, p);                       \
	})

TEST(push_pull_rows_that_do_not_fit)
{
	FIXTURE;
	int64_t rows[8] = { 0 }, out_rows[8] = { 0 };
	const uint64_t counts[] = { 1, 2, 3 };

	ASSERT_FAILS(TRY(f.variable, ROWS_IN_OUT), EINVAL, "no fixed size");
	ASSERT_FAILS(TRY_ROWS(p.width = 0), EINVAL, "12 elements are no rows of 0");
	ASSERT_FAILS(TRY_ROWS(p.width = 5), EINVAL, "12 elements are no rows of 5");
	ASSERT_FAILS(TRY_ROWS(p.input_count = 7), EINVAL, "input_count is 7");
	ASSERT_FAILS(TRY_ROWS(p.output_count = 9), EINVAL, "output_count is 9");
	ASSERT_FAILS(TRY_ROWS(p.input = NULL), EINVAL, "input is NULL");
	ASSERT_FAILS(TRY_ROWS(p.input_rows = NULL), EINVAL, "input_rows is NULL");
	ASSERT_FAILS(TRY_ROWS(p.output_rows = NULL), EINVAL, "output_rows is NULL");
	ASSERT_FAILS(TRY_ROWS(p.input_rows = (void *)((char *)rows + 4)), EINVAL, "aligned to 8");
	ASSERT_FAILS(TRY_ROWS(p.output = input), EINVAL, "overlap");
	ASSERT_FAILS(TRY_ROWS(p.output_rows = rows + 1), EINVAL, "overlap");
	ASSERT_FAILS(TRY_ROWS(p.output_rows = (void *)output), EINVAL, "overlap");
	ASSERT_FAILS(TRY_ROWS(p.counts = counts), EINVAL, "no counts");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .width = 4, IN_OUT), EINVAL,
		     "has no rows");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input_rows = rows, IN_OUT), EINVAL,
		     "has no rows");
	/* None of them reached the daemon. */
	ASSERT_EQ(told(f.fake)->n_entries, 0);
}

TEST(ordinals)
{
	FIXTURE;
	int64_t rows[8] = { 0 }, out_rows[8] = { 0 };

	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, .ordinal = 7, IN_OUT));
	ASSERT_EQ(told(f.fake)->entry.ordinal, 7);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, IN_OUT));
	ASSERT_EQ(told(f.fake)->entry.ordinal, 0);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BARRIER, .ordinal = UINT64_MAX));
	ASSERT_EQ(told(f.fake)->entry.ordinal, UINT64_MAX);
	ASSERT_FAILS(TRY_ROWS(p.ordinal = 8), EINVAL, "no ordinal");
	ASSERT_OK(TRY_ROWS((void)p));
	ASSERT_EQ(told(f.fake)->entry.width, 4);
}

#define ASSERT_NEXT(f, in_order, number)                                                \
	do {                                                                            \
		ASSERT_OK(TRY((f).fixed, .operation = BPS_BARRIER, .order = in_order)); \
		ASSERT_EQ(told((f).fake)->entry.ordinal, number);                       \
	} while (0)

TEST(the_next_of_an_order)
{
	FIXTURE;

	ASSERT_NEXT(f, BPS_ORDER_CALLS, 1);
	ASSERT_NEXT(f, BPS_ORDER_CALLS, 3);
	ASSERT_NEXT(f, BPS_ORDER_PROGRAMS, 2);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BARRIER));
	ASSERT_EQ(told(f.fake)->entry.ordinal, 0);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BARRIER, .ordinal = 9));
	ASSERT_NEXT(f, BPS_ORDER_CALLS, 5);
	ASSERT_NEXT(f, BPS_ORDER_PROGRAMS, 4);
}

/* It would be missing, and whatever comes after it would differ from other ranks'. */
TEST(what_is_refused_has_no_place_in_an_order)
{
	FIXTURE;
	int64_t rows[8] = { 0 }, out_rows[8] = { 0 };

	ASSERT_NEXT(f, BPS_ORDER_CALLS, 1);
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .order = BPS_ORDER_CALLS), EINVAL,
		     "input is NULL");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BARRIER, .order = 1, .ordinal = 1), EINVAL,
		     "an order and an ordinal");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BARRIER, .order = 3), EINVAL, "3 is no order");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BARRIER, .order = -1), EINVAL, "-1 is no order");
	ASSERT_FAILS(TRY_ROWS(p.order = 1), EINVAL, "no ordinal");
	ASSERT_NEXT(f, BPS_ORDER_CALLS, 3);
}

TEST(an_ordinal_for_later)
{
	FIXTURE;
	uint64_t ordinal;

	ASSERT_NEXT(f, BPS_ORDER_CALLS, 1);
	ASSERT_OK(bps_client_take_ordinal(f.client, BPS_ORDER_CALLS, &ordinal));
	ASSERT_EQ(ordinal, 3);
	ASSERT_NEXT(f, BPS_ORDER_CALLS, 5);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_BARRIER, .ordinal = ordinal));
	ASSERT_EQ(told(f.fake)->entry.ordinal, 3);
	ASSERT_FAILS(bps_client_take_ordinal(f.client, 0, &ordinal), EINVAL, "0 is no order");
	ASSERT_FAILS(bps_client_take_ordinal(f.client, 3, &ordinal), EINVAL, "3 is no order");
	ASSERT_FAILS(bps_client_take_ordinal(f.client, 1, NULL), EINVAL, "NULL");
}

/* Its last request ends with -EILSEQ, which the caller has not heard yet. */
static struct bps_request *submit_and_differ(struct fixture *f, int order, unsigned n_held)
{
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_BARRIER,
		.order = order,
	};
	struct bps_request *request;

	ASSERT_OK(bps_submit(f->fixed, &params, &request));
	fake_await(f->fake, &f->fake->told.n_entries, n_held + 1);
	fake_complete(f->fake, n_held, -EILSEQ, "they differ");
	return request;
}

TEST(where_ranks_have_differed)
{
	FIXTURE;
	struct bps_request *one, *two, *three;

	FAKE_SET(f.fake, hold, true);
	one = submit_and_differ(&f, BPS_ORDER_CALLS, 0);
	two = submit_and_differ(&f, BPS_ORDER_CALLS, 1);
	three = submit_and_differ(&f, BPS_ORDER_PROGRAMS, 2);
	/* Nobody was told: others may not know either. */
	ASSERT_EQ(bps_client_differed(f.client, BPS_ORDER_CALLS), 0);
	ASSERT_FAILS(bps_request_wait(two, BPS_FOREVER), EILSEQ, "they differ");
	ASSERT_EQ(bps_client_differed(f.client, BPS_ORDER_CALLS), 3);
	while (!bps_request_poll(one))
		;
	ASSERT_EQ(bps_client_differed(f.client, BPS_ORDER_CALLS), 3);
	ASSERT_EQ(bps_client_differed(f.client, BPS_ORDER_PROGRAMS), 0);
	ASSERT_FAILS(bps_request_wait(three, BPS_FOREVER), EILSEQ, "they differ");
	ASSERT_EQ(bps_client_differed(f.client, BPS_ORDER_PROGRAMS), 2);
	ASSERT_EQ(bps_client_differed(f.client, 0), 0);
	bps_request_free(one);
	bps_request_free(two);
	bps_request_free(three);
}

#define BFLOAT16 .input_dtype = BPS_BFLOAT16

/* Half as many bytes are staged, and half as many are read. */
TEST(narrower_input)
{
	FIXTURE;
	_cleanup_(bps_memory_freep) struct bps_memory *memory = NULL;
	char *data;

	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, BFLOAT16, IN_OUT));
	assert_entry(f.fake, BPS_PUSH_PULL, 12, 12);
	ASSERT_EQ(told(f.fake)->entry.input_dtype, DTYPE_BFLOAT16);
	ASSERT_OK(
		TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, .input_dtype = BPS_FLOAT16, IN_OUT));
	assert_entry(f.fake, BPS_REDUCE_SCATTER, 12, 4);
	ASSERT_EQ(told(f.fake)->entry.input_dtype, DTYPE_FLOAT16);
	/* The tensor's own is as none. */
	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input_dtype = BPS_FLOAT32, IN_OUT));
	ASSERT_EQ(told(f.fake)->entry.input_dtype, 0);

	/* Aligned as its own type is; up to the end of its memory. */
	ASSERT_OK(bps_memory_alloc(f.client, 4096, &memory));
	data = bps_memory_data(memory);
	memset(data, 7, 4096);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, BFLOAT16, .input = data + 4096 - 24,
		      .output = data + 4));
	ASSERT_EQ(told(f.fake)->entry.input_offset, 4096 - 24);
	ASSERT_EQ(data[4], 8);
	ASSERT_OK(TRY(f.fixed, .operation = BPS_PUSH_PULL, BFLOAT16, .input = data + 2,
		      .output = data + 2048));
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, BFLOAT16, .input = data + 1,
			 .output = data + 2048),
		     EINVAL, "input is not aligned to 2");
	/* Results are wider, so they would overtake what is read. */
	memset(data, 7, 4096);
	ASSERT_OK(
		TRY(f.fixed, .operation = BPS_PUSH_PULL, BFLOAT16, .input = data, .output = data));
	ASSERT_TRUE(told(f.fake)->entry.input_buffer != told(f.fake)->entry.output_buffer);
	ASSERT_EQ(data[47], 8);
	ASSERT_EQ(data[48], 7);
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, BFLOAT16, .input = data + 24,
			 .output = data),
		     EINVAL, "overlap");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_REDUCE_SCATTER, BFLOAT16, .input = data,
			 .output = data + 8),
		     EINVAL, "overlap");
}

TEST(inputs_that_are_not_widened)
{
	FIXTURE;
	_cleanup_(bps_tensor_freep) struct bps_tensor *wide = NULL, *whole = NULL;
	const int64_t rows[] = { 2, 0 };
	int64_t out_rows[4];

	ASSERT_OK(bps_tensor_declare(f.client, "wide", BPS_FLOAT64, 12, &wide));
	ASSERT_OK(bps_tensor_declare(f.client, "whole", BPS_INT32, 12, &whole));
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_ALL_GATHER, BFLOAT16, IN_OUT), EINVAL,
		     "all_gather of tensor \"fixed\": it takes no input of another type");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_ALL_TO_ALL, BFLOAT16, IN_OUT), EINVAL,
		     "no input");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BROADCAST, BFLOAT16, IN_OUT), EINVAL,
		     "no input");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_BARRIER, BFLOAT16), EINVAL, "no input");
	ASSERT_FAILS(TRY_ROWS(p.input_dtype = BPS_BFLOAT16), EINVAL, "no input");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input_dtype = BPS_FLOAT64, IN_OUT),
		     EINVAL, "the tensor is of float32, the input of float64: only float16 and");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input_dtype = BPS_INT16, IN_OUT),
		     EINVAL, "the input of int16");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, .input_dtype = 99, IN_OUT), EINVAL,
		     "the input of invalid");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL,
			 .input_dtype = UINT64_C(0x100000000) + BPS_BFLOAT16, IN_OUT),
		     EINVAL, "the input of invalid");
	ASSERT_FAILS(TRY(wide, .operation = BPS_PUSH_PULL, BFLOAT16, IN_OUT), EINVAL,
		     "the tensor is of float64");
	ASSERT_FAILS(TRY(whole, .operation = BPS_PUSH_PULL, BFLOAT16, IN_OUT), EINVAL,
		     "the tensor is of int32");
	ASSERT_FAILS(TRY(f.fixed, .operation = BPS_PUSH_PULL, BFLOAT16, .memory = BPS_MEMORY_CUDA,
			 IN_OUT),
		     EINVAL, "on a device: convert it there");
	ASSERT_EQ(told(f.fake)->n_entries, 0);
}

TEST(older_daemon_gets_no_narrower_input)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	_cleanup_(bps_client_closep) struct bps_client *client = NULL;
	_cleanup_(bps_tensor_freep) struct bps_tensor *tensor = NULL;
	float input[12] = { 0 }, output[12];

	FAKE_SET(fake, features, CONTROL_FEATURE_RESUME | CONTROL_FEATURE_ORDER);
	client = fake_join(fake, 0, 1);
	ASSERT_OK(bps_tensor_declare(client, "tensor", BPS_FLOAT32, 12, &tensor));
	ASSERT_FAILS(TRY(tensor, .operation = BPS_PUSH_PULL, BFLOAT16, IN_OUT), EOPNOTSUPP,
		     "takes no input of another type than the tensor's: convert it before");
	ASSERT_OK(TRY(tensor, .operation = BPS_PUSH_PULL, .input_dtype = BPS_FLOAT32, IN_OUT));
	ASSERT_EQ(told(fake)->n_entries, 1);
}

/* Ranks that are lost are in no order with the others. */
TEST(elastic_jobs_have_no_ordinals)
{
	_cleanup_(fake_freep) struct fake *fake = fake_new();
	struct bps_join_params join = { .size = sizeof(join), .world_size = 1, .elastic = 1 };
	struct bps_client *client;
	struct bps_tensor *tensor;
	uint64_t ordinal = 1;

	FAKE_SET(fake, features, CONTROL_FEATURE_ELASTIC);
	client = fake_open(fake);
	ASSERT_OK(bps_client_join(client, &join));
	ASSERT_OK(bps_tensor_declare(client, "tensor", BPS_FLOAT32, 1, &tensor));
	ASSERT_FAILS(TRY(tensor, .operation = BPS_BARRIER, .ordinal = 1), EINVAL,
		     "the job is elastic");
	ASSERT_OK(TRY(tensor, .operation = BPS_BARRIER));
	ASSERT_OK(TRY(tensor, .operation = BPS_BARRIER, .order = BPS_ORDER_CALLS));
	ASSERT_EQ(told(fake)->entry.ordinal, 0);
	ASSERT_OK(bps_client_take_ordinal(client, BPS_ORDER_CALLS, &ordinal));
	ASSERT_EQ(ordinal, 0);
	bps_tensor_free(tensor);
	bps_client_close(client);
}

TEST(rows_of_a_result)
{
	FIXTURE;
	const int64_t rows[] = { 2, 0 };
	int64_t out_rows[4];
	struct bps_submit_params params = { .size = sizeof(params), ROWS_IN_OUT };
	struct bps_request *request;
	uint64_t n = 99;

	FAKE_SET(f.fake, hold, true);
	ASSERT_OK(bps_submit(f.fixed, &params, &request));
	ASSERT_FAILS(bps_request_rows(request, &n), EBUSY, "under way");
	fake_await(f.fake, &f.fake->told.n_entries, 1);
	fake_complete(f.fake, 0, 0, NULL);
	ASSERT_OK(bps_request_wait(request, BPS_FOREVER));
	ASSERT_OK(bps_request_rows(request, &n));
	ASSERT_EQ(n, 2);
	ASSERT_FAILS(bps_request_rows(request, NULL), EINVAL, "NULL");
	bps_request_free(request);

	FAKE_SET(f.fake, hold, false);
	FAKE_SET(f.fake, n_rows, 4);
	FAKE_SET(f.fake, status, -ENOSPC);
	FAKE_SET(f.fake, text, "the result has 4 rows");
	ASSERT_OK(bps_submit(f.fixed, &params, &request));
	ASSERT_FAILS(bps_request_wait(request, BPS_FOREVER), ENOSPC, "4 rows");
	ASSERT_OK(bps_request_rows(request, &n));
	ASSERT_EQ(n, 4);
	bps_request_free(request);

	/* The daemon is not to be trusted with more than there is room for. */
	FAKE_SET(f.fake, status, 0);
	ASSERT_FAILS(TRY(f.fixed, ROWS_IN_OUT), EPROTO, "more rows than");

	FAKE_SET(f.fake, n_rows, 0);
	params = (struct bps_submit_params){ .size = sizeof(params),
					     .operation = BPS_PUSH_PULL,
					     IN_OUT };
	ASSERT_OK(bps_submit(f.fixed, &params, &request));
	ASSERT_FAILS(bps_request_rows(request, &n), EINVAL, "no push_pull_rows");
	bps_request_free(request);
}
