#include "proto/data.h"
#include "test.h"

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
	EXPECT_BAD("later version", h.flags = 1);
	EXPECT_BAD("later version", h.pad = 1);
	EXPECT_BAD("later version", h.checksum = 1);
	EXPECT_BAD("no such message", h.op = 0, h.cookie = 1);
	EXPECT_BAD("no such message", h.op = 5);
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
