/*
 * Headers, hellos, packs, moves and lists of rows: what passes the checks, and each thing that must
 * not.
 */
#include "proto/data.h"
#include "test.h"
#include <endian.h>

static struct data_header push(void)
{
	return (struct data_header){
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.op = DATA_PUSH,
		.len = 4096,
		.cookie = 1,
		.job = 99,
		.key = 1,
		.round = 1,
		.dtype = DTYPE_FLOAT32,
		.operation = OPERATION_PUSH_PULL,
		.reduction = REDUCTION_SUM,
		.offset = 4096,
		.total = 8192,
		.part_len = 4096,
	};
}

static void expect_good(const struct data_header *header)
{
	const char *why = NULL;

	if (data_header_check(header, &why))
		test_fail(__FILE__, __LINE__, "refused: %s", why);
	ASSERT_TRUE(!why);
}

static void expect_bad(const struct data_header *header, const char *words)
{
	const char *why = NULL;

	ASSERT_EQ(data_header_check(header, &why), -EPROTO);
	ASSERT_TRUE(why);
	ASSERT_CONTAINS(why, words);
}

/* A good PUSH with one field changed. */
#define EXPECT_GOOD(...)                       \
	do {                                   \
		struct data_header h = push(); \
		__VA_ARGS__;                   \
		expect_good(&h);               \
	} while (0)
#define EXPECT_BAD(words, ...)                 \
	do {                                   \
		struct data_header h = push(); \
		__VA_ARGS__;                   \
		expect_bad(&h, words);         \
	} while (0)

TEST(good_contributions_pass)
{
	EXPECT_GOOD();
	EXPECT_GOOD(h.len = 0);
	EXPECT_GOOD(h.flags = DATA_FLAG_MOVED | 3 << DATA_FLAG_RAIL_SHIFT, h.moved = 77);
	EXPECT_GOOD(h.flags = DATA_FLAG_MOVED | DATA_FLAG_ARRIVED, h.len = 0);
	EXPECT_GOOD(h.operation = OPERATION_BROADCAST, h.reduction = 0, h.root = JOB_RANKS_MAX - 1);
	EXPECT_GOOD(h.operation = OPERATION_ALL_TO_ALL, h.reduction = 0, h.block = UINT32_MAX);
	EXPECT_GOOD(h.operation = OPERATION_BARRIER, h.reduction = h.dtype = 0,
		    h.len = h.part_len = 0, h.offset = h.total = 0);
	EXPECT_GOOD(h.total = UINT64_MAX - 3, h.offset = UINT64_MAX - 3 - 4096);
	EXPECT_GOOD(h.priority = INT32_MIN, h.epoch = UINT32_MAX);
}

TEST(frames_of_another_protocol_are_refused)
{
	EXPECT_BAD("not a data header", h.magic++);
	EXPECT_BAD("version", h.version = 0);
	EXPECT_BAD("version", h.version = DATA_VERSION + 1);
	EXPECT_GOOD(h.flags = DATA_FLAG_AGAIN);
	EXPECT_GOOD(h.flags = DATA_FLAG_AGAIN | DATA_FLAG_MOVED, h.moved = 77);
	EXPECT_BAD("later version", h.flags = DATA_FLAG_AGAIN, h.moved = 77);
	EXPECT_BAD("later version", h.flags = DATA_FLAG_AGAIN | 3 << DATA_FLAG_RAIL_SHIFT);
	EXPECT_BAD("later version", h.op = DATA_RESULT, h.flags = DATA_FLAG_AGAIN);
	EXPECT_GOOD(h.op = DATA_RESULT, h.flags = DATA_FLAG_KEPT);
	EXPECT_BAD("later version", h.flags = DATA_FLAG_KEPT);
	EXPECT_BAD("later version", h.op = DATA_OK, h.flags = DATA_FLAG_KEPT);
	EXPECT_BAD("later version", h.op = DATA_RESULT, h.flags = DATA_FLAG_KEPT, h.moved = 1);
	EXPECT_BAD("later version", h.op = DATA_RESULT, h.flags = DATA_FLAG_KEPT | DATA_FLAG_MOVED,
		   h.moved = 1);
	EXPECT_BAD("later version", h.flags = 8);
	EXPECT_BAD("later version", h.flags = 1 << DATA_FLAG_LAST_SHIFT);
	EXPECT_BAD("later version", h.flags = DATA_FLAG_MOVED | 0x8000);
	EXPECT_BAD("later version", h.flags = DATA_FLAG_ARRIVED);
	EXPECT_BAD("later version", h.flags = DATA_FLAG_MOVED | DATA_FLAG_ARRIVED);
	EXPECT_BAD("later version", h.op = DATA_RESULT, h.flags = DATA_FLAG_MOVED);
	EXPECT_BAD("later version", h.pad = 1);
	EXPECT_BAD("later version", h.moved = 1);
	EXPECT_BAD("no such message", h.op = 0, h.cookie = 1);
	EXPECT_BAD("no such message", h.op = 15);
	EXPECT_BAD("no such message", h.op = 255, h.cookie = 0);
}

TEST(cookies_belong_to_calls_and_answers)
{
	EXPECT_BAD("cookie", h.cookie = 0);
	EXPECT_BAD("cookie", h.op = DATA_RESULT, h.cookie = 0);
	EXPECT_BAD("cookie", h.op = DATA_LEAVE, h.len = 0);
	EXPECT_GOOD(h.op = DATA_LEAVE, h.len = 0, h.cookie = 0);
}

TEST(numbers_that_are_none_of_ours_are_refused)
{
	EXPECT_BAD("element type", h.dtype = 0);
	EXPECT_BAD("element type", h.dtype = DTYPE_MAX_ + 1);
	EXPECT_BAD("operation", h.operation = 0);
	EXPECT_BAD("operation", h.operation = OPERATION_MAX_ + 1);
	EXPECT_BAD("reduction", h.reduction = 0);
	EXPECT_BAD("reduction", h.reduction = REDUCTION_MAX_ + 1);
	EXPECT_BAD("reduction", h.operation = OPERATION_ALL_GATHER);
	EXPECT_BAD("average", h.dtype = DTYPE_BOOL, h.reduction = REDUCTION_AVERAGE);
	EXPECT_BAD("scale", h.dtype = DTYPE_FLOAT32,
		   h.reduction = data_reduction_scaled(REDUCTION_AVERAGE, 2));
	EXPECT_BAD("scale", h.dtype = DTYPE_FLOAT16,
		   h.reduction = data_reduction_scaled(REDUCTION_SUM, 2));
	EXPECT_BAD("scale", h.dtype = DTYPE_FLOAT16,
		   h.reduction = data_reduction_scaled(REDUCTION_AVERAGE, 2 * JOB_RANKS_MAX));
	EXPECT_GOOD(h.dtype = DTYPE_FLOAT16,
		    h.reduction = data_reduction_scaled(REDUCTION_AVERAGE, JOB_RANKS_MAX));
	EXPECT_BAD("key or round", h.key = 0);
	EXPECT_BAD("key or round", h.round = 0);
	EXPECT_BAD("over the limit", h.node = JOB_RANKS_MAX);
	EXPECT_BAD("over the limit", h.root = JOB_RANKS_MAX);
}

TEST(parts_lie_within_their_blocks)
{
	EXPECT_BAD("within its block", h.offset = 4100);
	EXPECT_BAD("within its block", h.offset = UINT64_MAX - 3); /* the sum would wrap */
	EXPECT_BAD("within its block", h.total = 0);
	EXPECT_BAD("payload", h.len = 4092);
	EXPECT_BAD("payload", h.len = UINT32_MAX);
	EXPECT_BAD("too long", h.part_len = h.len = PART_BYTES_MAX + 4, h.total = UINT64_MAX - 3);
	EXPECT_BAD("whole elements", h.offset = 4094);
	EXPECT_BAD("whole elements", h.part_len = h.len = 4095);
	EXPECT_BAD("whole elements", h.total = 8193);
	EXPECT_BAD("barrier", h.operation = OPERATION_BARRIER, h.reduction = 0);
}

TEST(a_result_may_say_who_is_in_it)
{
#define ROLL 4096 + sizeof(struct data_contributors)
	ASSERT_EQ(data_contributors_at(4090), 4096);
	ASSERT_EQ(data_contributors_end(4096, 3), 4096 + 16 + 3 * 8);
	EXPECT_GOOD(h.op = DATA_RESULT, h.len = ROLL + 8);
	EXPECT_GOOD(h.op = DATA_OFFER, h.len = ROLL + 8 * JOB_RANKS_MAX);
	EXPECT_GOOD(h.op = DATA_OFFER, h.operation = OPERATION_ACCUMULATE, h.len = ROLL + 8);
	EXPECT_BAD("payload", h.len = ROLL + 8);
	EXPECT_BAD("payload", h.op = DATA_RESULT, h.len = ROLL);
	EXPECT_BAD("payload", h.op = DATA_RESULT, h.len = ROLL + 8 * (JOB_RANKS_MAX + 1));
	EXPECT_BAD("payload", h.op = DATA_RESULT, h.operation = OPERATION_BROADCAST,
		   h.reduction = 0, h.len = ROLL + 8);
	/* Of what accumulates there may be more contributions than a job has ranks. */
	EXPECT_GOOD(h.op = DATA_RESULT, h.operation = OPERATION_ACCUMULATE, h.root = UINT32_MAX);
	EXPECT_BAD("over the limit", h.op = DATA_OFFER, h.operation = OPERATION_ACCUMULATE,
		   h.root = JOB_RANKS_MAX);
	EXPECT_BAD("over the limit", h.op = DATA_RESULT, h.root = JOB_RANKS_MAX);
	EXPECT_GOOD(h.op = DATA_OFFERED, h.cookie = h.len = 0);
	EXPECT_BAD("payload", h.op = DATA_OFFERED, h.cookie = 0);
}

#define ROWS h.operation = OPERATION_PUSH_PULL_ROWS

TEST(pulls_are_of_rows_and_carry_nothing)
{
	EXPECT_GOOD(ROWS);
	EXPECT_BAD("reduction", ROWS, h.reduction = 0);
	EXPECT_GOOD(ROWS, h.op = DATA_PULL, h.len = h.part_len = 0);
	EXPECT_BAD("pull", ROWS, h.op = DATA_PULL);
	EXPECT_BAD("pull", h.op = DATA_PULL, h.len = h.part_len = 0);
	EXPECT_BAD("key or round", ROWS, h.op = DATA_PULL, h.len = h.part_len = 0, h.key = 0);
	EXPECT_BAD("cookie", ROWS, h.op = DATA_PULL, h.len = h.part_len = 0, h.cookie = 0);
}

struct rows_payload {
	struct data_rows head;
	int64_t rows[3];
	float values[3][300];
};

/* Two pieces: of 3 rows, and of 2. */
static struct rows_payload rows_payload(void)
{
	return (struct rows_payload){
		.head = { .rows = 1000, .n = 5, .width = 300, .step = 3 },
		.rows = { 1, 7, 999 },
	};
}

static int rows_parse(const struct data_header *h, struct rows_payload *payload,
		      struct data_piece *ret_piece, const char *words)
{
	const char *why = NULL;
	int r;

	data_rows_encode(&payload->head);
	r = data_rows_parse(h, payload, ret_piece, &why);
	data_rows_decode(&payload->head);
	if (r) {
		ASSERT_EQ(r, -EPROTO);
		ASSERT_TRUE(words);
		ASSERT_CONTAINS(why, words);
	} else if (words) {
		test_fail(__FILE__, __LINE__, "passed, without \"%s\"", words);
	}
	return r;
}

#define PARSE(words, ...)                                \
	do {                                             \
		struct data_header h = push();           \
		struct rows_payload p = rows_payload();  \
		struct data_piece piece;                 \
		h.len = sizeof(p);                       \
		__VA_ARGS__;                             \
		(void)rows_parse(&h, &p, &piece, words); \
	} while (0)

TEST(pieces_of_rows_are_taken_apart)
{
	struct data_header h = push();
	struct rows_payload p = rows_payload();
	struct data_piece piece;

	h.len = sizeof(p);
	ASSERT_OK(rows_parse(&h, &p, &piece, NULL));
	ASSERT_EQ(piece.list.rows, 1000);
	ASSERT_EQ(piece.list.n, 5);
	ASSERT_EQ(piece.n_pieces, 2);
	ASSERT_EQ(piece.row_len, 1200);
	ASSERT_EQ(piece.n, 3);
	ASSERT_TRUE(piece.rows == p.rows);
	ASSERT_TRUE(piece.values == (const void *)p.values);
	h.part = 1;
	h.len -= 8 + 1200;
	ASSERT_OK(rows_parse(&h, &p, &piece, NULL));
	ASSERT_EQ(piece.n, 2);
	ASSERT_TRUE(piece.values == (const void *)(p.rows + 2));
	PARSE(NULL, p.head.n = 0, h.len = sizeof(p.head));
	PARSE(NULL, p.head.n = 0, p.head.rows = 0, h.len = sizeof(p.head));
}

TEST(pieces_of_rows_that_lie)
{
	PARSE("without its head", h.len = 31);
	PARSE("without its head", h.len = 0);
	PARSE("no elements", p.head.width = 0);
	PARSE("too many", p.head.width = UINT32_MAX);
	PARSE("can be", p.head.rows = UINT64_MAX);
	PARSE("can be", p.head.rows = (uint64_t)INT64_MAX);
	PARSE("later version", p.head.pad = 1);
	PARSE("than the table has", p.head.rows = 4);
	PARSE("too small", p.head.step = 0);
	PARSE("too small", p.head.step = 1);
	PARSE("behind the end", h.part = 2);
	PARSE("behind the end", h.part = UINT32_MAX);
	PARSE("another length", h.len -= 4);
	PARSE("another length", h.len -= 1208);
	PARSE("another length", h.part = 1);
	PARSE("another length", p.head.n = 2);
	PARSE("another length", p.head.step = UINT32_MAX);
}

TEST(full_pieces_of_rows_fit_a_part)
{
	static const uint32_t part_bytes[] = { 4096, 4160, 1 << 20, PART_BYTES_MAX };
	static const size_t row_lens[] = { 1, 2, 8, 256, 2023, 2024, 2025, 4055, 4056, 4057 };

	for (size_t i = 0; i < ARRAY_SIZE(part_bytes); i++) {
		for (size_t k = 0; k < ARRAY_SIZE(row_lens); k++) {
			uint64_t step = data_rows_step(part_bytes[i], row_lens[k]);

			ASSERT_TRUE(step == 1 || data_rows_len(step, row_lens[k]) <= part_bytes[i]);
			ASSERT_TRUE(data_rows_len(step + 1, row_lens[k]) > part_bytes[i]);
			ASSERT_TRUE(step * (8 + row_lens[k]) >= DATA_STEP_MIN);
		}
	}
	ASSERT_EQ(data_rows_step(4096, DATA_ROW_MAX), 1);
	ASSERT_EQ(data_rows_len(1, DATA_ROW_MAX), DATA_PAYLOAD_MAX);
}

TEST(names_of_what_ranks_are_blocked_in)
{
	char names[2][TENSOR_NAME_MAX + 1], payload[DATA_BLOCKED_MAX], longest[TENSOR_NAME_MAX + 1];
	struct data_header header = { .missed_round = 1 };

	memset(longest, 'x', TENSOR_NAME_MAX);
	longest[TENSOR_NAME_MAX] = 0;
	header.len = data_blocked_pack(longest, longest, payload);
	ASSERT_EQ(header.len, DATA_BLOCKED_MAX);
	ASSERT_TRUE(data_blocked_unpack(&header, payload, names));
	ASSERT_STR(names[0], longest);
	ASSERT_STR(names[1], longest);
	header.len = data_blocked_pack("a", "bc", payload);
	ASSERT_TRUE(data_blocked_unpack(&header, payload, names));
	ASSERT_STR(names[0], "a");
	ASSERT_STR(names[1], "bc");
	/* Both names, of which neither is empty or cannot be shown, or one alone. */
	header.len = 2;
	ASSERT_TRUE(!data_blocked_unpack(&header, payload, names));
	header.len = 1;
	ASSERT_TRUE(!data_blocked_unpack(&header, payload, names));
	header.len = data_blocked_pack("", "bc", payload);
	ASSERT_TRUE(!data_blocked_unpack(&header, payload, names));
	header.len = data_blocked_pack("a", "b\n", payload);
	ASSERT_TRUE(!data_blocked_unpack(&header, payload, names));
	header.missed_round = 0;
	ASSERT_TRUE(!data_blocked_unpack(&header, payload, names));
	header.len = data_blocked_pack("a", NULL, payload);
	ASSERT_TRUE(data_blocked_unpack(&header, payload, names));
	ASSERT_STR(names[0], "a");
	ASSERT_STR(names[1], "");
}

TEST(answers_and_failures_are_bounded)
{
	EXPECT_GOOD(h.op = DATA_OK, h.len = DATA_SETUP_MAX);
	EXPECT_BAD("too long", h.op = DATA_OK, h.len = DATA_SETUP_MAX + 1);
	EXPECT_BAD("too long", h.op = DATA_JOIN, h.len = DATA_SETUP_MAX + 1);
	EXPECT_GOOD(h.op = DATA_ERROR, h.status = EIO, h.len = ERROR_TEXT_MAX);
	EXPECT_BAD("too long", h.op = DATA_ERROR, h.status = EIO, h.len = ERROR_TEXT_MAX + 1);
	EXPECT_BAD("status", h.op = DATA_ERROR, h.status = 0, h.len = 0);
	EXPECT_BAD("status", h.op = DATA_FAIL_JOB, h.cookie = 0, h.status = -EIO, h.len = 0);
	EXPECT_BAD("key or round", h.op = DATA_FAIL_ROUND, h.cookie = 0, h.status = EIO, h.len = 0,
		   h.round = 0);
	EXPECT_BAD("payload", h.op = DATA_PING, h.cookie = 0);
	EXPECT_GOOD(h.op = DATA_ORDINAL, h.cookie = 0, h.len = 1);
	EXPECT_GOOD(h.op = DATA_ORDINAL, h.cookie = 0, h.len = TENSOR_NAME_MAX);
	EXPECT_BAD("round or tensor", h.op = DATA_ORDINAL, h.cookie = 0, h.len = 0);
	EXPECT_BAD("round or tensor", h.op = DATA_ORDINAL, h.cookie = 0, h.len = 1, h.key = 0);
	EXPECT_BAD("round or tensor", h.op = DATA_ORDINAL, h.cookie = 0,
		   h.len = TENSOR_NAME_MAX + 1);
	EXPECT_BAD("without ordinal", h.op = DATA_ORDINAL, h.cookie = 0, h.len = 1, h.round = 0);
	EXPECT_GOOD(h.op = DATA_ORDINAL, h.cookie = 0, h.status = EILSEQ, h.len = ERROR_TEXT_MAX);
	EXPECT_BAD("too long", h.op = DATA_ORDINAL, h.cookie = 0, h.status = EILSEQ,
		   h.len = ERROR_TEXT_MAX + 1);
	EXPECT_BAD("status", h.op = DATA_ORDINAL, h.cookie = 0, h.status = -EILSEQ, h.len = 1);
	EXPECT_GOOD(h.op = DATA_FOLLOW, h.cookie = 0, h.len = 0, h.n_following = h.n_idle = 3);
	EXPECT_BAD("follow", h.op = DATA_FOLLOW, h.cookie = 0, h.len = 0, h.n_following = 3,
		   h.n_idle = 4);
	EXPECT_GOOD(h.op = DATA_FOLLOW, h.cookie = 0, h.status = EPIPE, h.len = 1, h.turn = 0);
	EXPECT_BAD("follow", h.op = DATA_FOLLOW, h.cookie = 0, h.len = 0, h.turn = UINT64_MAX);
	EXPECT_BAD("status", h.op = DATA_FOLLOW, h.cookie = 0, h.len = 1);
	EXPECT_GOOD(h.op = DATA_OTHERS_FOLLOW, h.cookie = 0, h.len = 0, h.turn = 0);
	EXPECT_GOOD(h.op = DATA_OTHERS_FOLLOW, h.cookie = 0, h.status = EPIPE, h.len = 1);
	EXPECT_BAD("status", h.op = DATA_OTHERS_FOLLOW, h.cookie = 0, h.len = 1);
	EXPECT_BAD("too long", h.op = DATA_OTHERS_FOLLOW, h.cookie = 0, h.status = EPIPE,
		   h.len = ERROR_TEXT_MAX + 1);
	EXPECT_GOOD(h.op = DATA_BLOCKED, h.cookie = 0, h.round = 0, h.len = TENSOR_NAME_MAX);
	EXPECT_GOOD(h.op = DATA_BLOCKED, h.cookie = 0, h.round = 1, h.len = DATA_BLOCKED_MAX);
	EXPECT_BAD("round or tensor", h.op = DATA_BLOCKED, h.cookie = 0, h.round = 0,
		   h.len = TENSOR_NAME_MAX + 1);
	EXPECT_BAD("round or tensor", h.op = DATA_BLOCKED, h.cookie = 0, h.round = 1,
		   h.len = DATA_BLOCKED_MAX + 1);
	EXPECT_BAD("round or tensor", h.op = DATA_BLOCKED, h.cookie = 0, h.len = 0);
	EXPECT_GOOD(h.op = DATA_BLOCKED, h.cookie = 0, h.len = 3, h.status = EDEADLK);
	EXPECT_BAD("one another", h.op = DATA_BLOCKED, h.cookie = 0, h.len = 3, h.status = EPIPE);
	EXPECT_BAD("one another", h.op = DATA_BLOCKED, h.cookie = 0, h.round = 0, h.len = 3,
		   h.status = EDEADLK);
	EXPECT_BAD("round or tensor", h.op = DATA_BLOCKED, h.cookie = 0, h.len = 1, h.key = 0);
	EXPECT_GOOD(h.op = DATA_BEGUN, h.cookie = 0, h.len = 1);
	EXPECT_BAD("round or tensor", h.op = DATA_OTHERS_BEGUN, h.cookie = 0, h.len = 0);
	EXPECT_GOOD(h.op = DATA_BEGUN, h.cookie = 0, h.len = TENSOR_NAME_MAX, h.operation = 0,
		    h.reduction = 0);
	EXPECT_BAD("round or tensor", h.op = DATA_BEGUN, h.cookie = 0, h.len = 0);
	EXPECT_BAD("round or tensor", h.op = DATA_BEGUN, h.cookie = 0, h.len = 1, h.key = 0);
	EXPECT_BAD("round or tensor", h.op = DATA_BEGUN, h.cookie = 0, h.len = 1, h.round = 2);
	EXPECT_BAD("round or tensor", h.op = DATA_BEGUN, h.cookie = 0, h.len = 1, h.round = 0);
	EXPECT_BAD("round or tensor", h.op = DATA_BEGUN, h.cookie = 0, h.len = TENSOR_NAME_MAX + 1);
	EXPECT_BAD("no such", h.op = DATA_BEGUN, h.cookie = 0, h.len = 1, h.dtype = 0);
	EXPECT_BAD("no such", h.op = DATA_BEGUN, h.cookie = 0, h.len = 1,
		   h.operation = OPERATION_MAX_ + 1);
	EXPECT_BAD("no such", h.op = DATA_BEGUN, h.cookie = 0, h.len = 1,
		   h.reduction = REDUCTION_MAX_ + 1);
	EXPECT_GOOD(h.op = DATA_RESULT, h.dtype = h.operation = h.reduction = 0);
}

TEST(encoding_and_decoding_undo_each_other)
{
	struct data_header before = push(), after = before;
	struct data_hello hello = { .magic = DATA_MAGIC, .lane = 3, .sender = 4 }, same = hello;

	data_header_encode(&after);
	data_header_decode(&after);
	ASSERT_MEM(&before, &after, sizeof(before));
	data_hello_encode(&same);
	data_hello_decode(&same);
	ASSERT_MEM(&hello, &same, sizeof(hello));
}

static struct data_hello greeting(void)
{
	return (struct data_hello){
		.magic = DATA_MAGIC,
		.version = DATA_VERSION,
		.version_min = DATA_VERSION_MIN,
		.sender = 1,
		.name = "node-7",
	};
}

#define EXPECT_HELLO(result, ...)                              \
	do {                                                   \
		struct data_hello h = greeting();              \
		const char *why = NULL;                        \
		__VA_ARGS__;                                   \
		ASSERT_EQ(data_hello_check(&h, &why), result); \
		ASSERT_EQ(!!why, (result) != 0);               \
	} while (0)

TEST(hellos_need_a_common_version_and_a_name)
{
	EXPECT_HELLO(0);
	EXPECT_HELLO(0, h.version = 255);
	EXPECT_HELLO(0, memset(h.name, 'a', sizeof(h.name) - 1));
	EXPECT_HELLO(0, h.features = UINT64_MAX);
	EXPECT_HELLO(-EPROTO, h.magic = 0);
	EXPECT_HELLO(-EPROTO, h.version = h.version_min = DATA_VERSION_MIN - 1);
	EXPECT_HELLO(-EPROTO, h.version = h.version_min = DATA_VERSION + 1);
	EXPECT_HELLO(-EPROTO, h.version_min = 9);
	EXPECT_HELLO(-EPROTO, memset(h.name, 'a', sizeof(h.name)));
	EXPECT_HELLO(-EPROTO, h.name[0] = '\0');
	EXPECT_HELLO(-EPROTO, h.name[2] = '\n');
	EXPECT_HELLO(-EPROTO, h.name[2] = '\x1b');
	EXPECT_HELLO(-EPROTO, h.name[2] = (char)0xff);
}

/* -- Packs -------------------------------------------------------------------------------------------------------- */

static struct data_header small(void)
{
	struct data_header h = push();

	h.offset = 0;
	h.total = h.part_len = h.len;
	return h;
}

TEST(what_is_packed_comes_out_as_it_was)
{
	struct data_header h = small(), pack, out;
	struct data_packed packed;

	h.cookie = 0x1234567;
	h.round = UINT64_C(1) << 40;
	h.epoch = 17;
	h.node = 3;
	h.root = 5;
	h.status = -7;
	h.priority = INT32_MIN;
	h.flags = DATA_FLAG_AGAIN;
	data_pack_header(&h, 2, 2 * h.len, &pack);
	expect_good(&pack);
	data_pack(&h, &packed);
	data_unpack(&pack, &packed, &out);
	ASSERT_MEM(&out, &h, sizeof(h));
	expect_good(&out);
	h.op = DATA_RESULT;
	h.flags = DATA_FLAG_KEPT;
	ASSERT_TRUE(data_may_pack(&h));
	data_pack_header(&h, 2, 2 * h.len, &pack);
	data_pack(&h, &packed);
	data_unpack(&pack, &packed, &out);
	ASSERT_MEM(&out, &h, sizeof(h));
	expect_good(&out);
}

#define EXPECT_ALONE(...)                        \
	do {                                     \
		struct data_header h = small();  \
		ASSERT_TRUE(data_may_pack(&h));  \
		__VA_ARGS__;                     \
		ASSERT_TRUE(!data_may_pack(&h)); \
	} while (0)

TEST(what_a_pack_cannot_say_goes_alone)
{
	EXPECT_ALONE(h.op = DATA_OFFER);
	EXPECT_ALONE(h.op = DATA_ERROR);
	EXPECT_ALONE(h.op = DATA_PULL);
	EXPECT_ALONE(h.len = DATA_PACKED_MAX + 1);
	EXPECT_ALONE(h.block = 1);
	EXPECT_ALONE(h.part = 1);
	EXPECT_ALONE(h.offset = 4);
	EXPECT_ALONE(h.total++);
	EXPECT_ALONE(h.flags = DATA_FLAG_MOVED);
}

#define EXPECT_APART(...)                              \
	do {                                           \
		struct data_header a = small(), h = a; \
		ASSERT_TRUE(data_packs_with(&a, &h));  \
		__VA_ARGS__;                           \
		ASSERT_TRUE(!data_packs_with(&a, &h)); \
	} while (0)

TEST(a_pack_is_of_one_sender_about_one_job)
{
	EXPECT_APART(h.op = DATA_RESULT);
	EXPECT_APART(h.job++);
	EXPECT_APART(h.epoch++);
	EXPECT_APART(h.node++);
	EXPECT_APART(h.part = 1);
}

#define EXPECT_BAD_PACK(words, ...)                             \
	do {                                                    \
		struct data_header first = small(), h;          \
		data_pack_header(&first, 3, 3 * first.len, &h); \
		expect_good(&h);                                \
		__VA_ARGS__;                                    \
		expect_bad(&h, words);                          \
	} while (0)

TEST(bad_packs_are_refused)
{
	EXPECT_BAD_PACK("with one", h.cookie = 1);
	EXPECT_BAD_PACK("later version", h.flags = DATA_FLAG_AGAIN);
	EXPECT_BAD_PACK("node or rank", h.node = JOB_RANKS_MAX);
	EXPECT_BAD_PACK("not packed", h.block = DATA_ERROR);
	EXPECT_BAD_PACK("not packed", h.block = DATA_PUSH + 256);
	EXPECT_BAD_PACK("too few", h.part = 1);
	EXPECT_BAD_PACK("too few", h.part = DATA_PACK_MAX + 1);
	EXPECT_BAD_PACK("another length", h.len = 3 * sizeof(struct data_packed) - 1);
	EXPECT_BAD_PACK("another length",
			h.len = 3 * sizeof(struct data_packed) + DATA_PACKED_LEN + 1);
}

TEST(lengths_of_a_pack_come_to_its_own)
{
	struct data_header first = small(), pack;
	struct data_packed packed[2];

	data_pack_header(&first, 2, 100, &pack);
	data_pack(&first, &packed[0]);
	data_pack(&first, &packed[1]);
	packed[0].len = htole16(40);
	packed[1].len = htole16(60);
	ASSERT_TRUE(data_packed_fit(&pack, packed));
	packed[1].len = htole16(59);
	ASSERT_TRUE(!data_packed_fit(&pack, packed));
	packed[1].len = htole16(61);
	ASSERT_TRUE(!data_packed_fit(&pack, packed));
	packed[0].len = htole16(UINT16_MAX);
	packed[1].len = htole16(101);
	ASSERT_TRUE(!data_packed_fit(&pack, packed));
	pack.len += UINT16_MAX + 1;
	ASSERT_TRUE(!data_packed_fit(&pack, packed));
	pack.len -= UINT16_MAX + 1;
	packed[0].len = htole16(40);
	packed[1].len = htole16(60);
	ASSERT_TRUE(data_packed_fit(&pack, packed));
	packed[1].flags = htole16(DATA_FLAG_MOVED);
	ASSERT_TRUE(!data_packed_fit(&pack, packed));
	packed[1].flags = 0;
	packed[1].pad[4] = 1;
	ASSERT_TRUE(!data_packed_fit(&pack, packed));
}
