/*
 * The data plane as bytes. If one of these fails, daemons of two releases no longer understand each other: that needs
 * a new DATA_VERSION, not new bytes here.
 */
#include "proto/data.h"
#include "test.h"

/* Every field has a value of its own, and every byte of the field too. */
static const uint8_t header_bytes[96] = {
	0x42, 0x50, 0x53, 0x31,				/* magic "BPS1" */
	0x03,						/* version */
	0x04,						/* op PUSH */
	0x00, 0x00,					/* flags */
	0x04, 0x03, 0x02, 0x01,				/* len */
	0x14, 0x13, 0x12, 0x11,				/* cookie */
	0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, /* job */
	0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, /* key */
	0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41, /* round */
	0x54, 0x53, 0x52, 0x51,				/* epoch */
	0x64, 0x63, 0x62, 0x61,				/* node */
	0x74, 0x73, 0x72, 0x71,				/* block */
	0x84, 0x83, 0x82, 0x81,				/* part */
	0x02,						/* dtype float32 */
	0x04,						/* operation reduce_scatter */
	0x02,						/* reduction average */
	0x00,						/* pad */
	0x94, 0x93, 0x92, 0x91,				/* status */
	0xa8, 0xa7, 0xa6, 0xa5, 0xa4, 0xa3, 0xa2, 0xa1, /* offset */
	0xb8, 0xb7, 0xb6, 0xb5, 0xb4, 0xb3, 0xb2, 0xb1, /* total */
	0xc4, 0xc3, 0xc2, 0xc1,				/* part_len */
	0xd4, 0xd3, 0xd2, 0xd1,				/* root */
	0xe4, 0xe3, 0xe2, 0xe1,				/* priority */
	0x00, 0x00, 0x00, 0x00,				/* moved */
};

static const struct data_header header_values = {
	.magic = DATA_MAGIC,
	.version = 3,
	.op = DATA_PUSH,
	.len = 0x01020304,
	.cookie = 0x11121314,
	.job = 0x2122232425262728,
	.key = 0x3132333435363738,
	.round = 0x4142434445464748,
	.epoch = 0x51525354,
	.node = 0x61626364,
	.block = 0x71727374,
	.part = 0x81828384,
	.dtype = DTYPE_FLOAT32,
	.operation = OPERATION_REDUCE_SCATTER,
	.reduction = REDUCTION_AVERAGE,
	.status = (int32_t)0x91929394,
	.offset = 0xa1a2a3a4a5a6a7a8,
	.total = 0xb1b2b3b4b5b6b7b8,
	.part_len = 0xc1c2c3c4,
	.root = 0xd1d2d3d4,
	.priority = (int32_t)0xe1e2e3e4,
};

TEST(data_header_is_these_bytes)
{
	struct data_header header = header_values;

	ASSERT_EQ(sizeof(header), sizeof(header_bytes));
	data_header_encode(&header);
	ASSERT_MEM(&header, header_bytes, sizeof(header_bytes));
}

TEST(these_bytes_are_the_data_header)
{
	struct data_header header;

	memcpy(&header, header_bytes, sizeof(header));
	data_header_decode(&header);
	ASSERT_MEM(&header, &header_values, sizeof(header));
	ASSERT_EQ(header.priority, (int32_t)0xe1e2e3e4);
}

TEST(a_piece_of_rows_starts_with_these_bytes)
{
	static const uint8_t bytes[32] = {
		0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, /* rows */
		0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, /* n */
		0x34, 0x33, 0x32, 0x31,				/* width */
		0x44, 0x43, 0x42, 0x41,				/* step */
	};
	struct data_rows rows = {
		.rows = 0x1112131415161718,
		.n = 0x2122232425262728,
		.width = 0x31323334,
		.step = 0x41424344,
	};

	data_rows_encode(&rows);
	ASSERT_EQ(sizeof(rows), sizeof(bytes));
	ASSERT_MEM(&rows, bytes, sizeof(bytes));
	data_rows_decode(&rows);
	ASSERT_EQ(rows.n, 0x2122232425262728);
}

TEST(data_hello_is_these_bytes)
{
	static const uint8_t start[24] = {
		0x42, 0x50, 0x53, 0x31,				/* magic */
		0x03,						/* version */
		0x03,						/* version_min */
		0x12, 0x11,					/* lane */
		0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, /* features */
		0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, /* sender */
	};
	struct data_hello hello = {
		.magic = DATA_MAGIC,
		.version = 3,
		.version_min = 3,
		.lane = 0x1112,
		.features = 0x2122232425262728,
		.sender = 0x3132333435363738,
		.name = "node-7",
	};
	uint8_t bytes[152];

	memset(hello.nonce, 'n', sizeof(hello.nonce));
	memset(hello.proof, 'p', sizeof(hello.proof));
	ASSERT_EQ(sizeof(hello), sizeof(bytes));
	data_hello_encode(&hello);
	memcpy(bytes, &hello, sizeof(bytes));
	ASSERT_MEM(bytes, start, sizeof(start));
	ASSERT_STR((char *)bytes + 24, "node-7");
	for (size_t i = 0; i < 32; i++) {
		ASSERT_EQ(bytes[88 + i], 'n');
		ASSERT_EQ(bytes[120 + i], 'p');
	}
}

TEST(numbers_of_messages_stay)
{
	static const uint8_t ops[] = { DATA_JOIN,     DATA_ATTACH,	  DATA_DECLARE,
				       DATA_PUSH,     DATA_PULL,	  DATA_OK,
				       DATA_RESULT,   DATA_ERROR,	  DATA_FAIL_ROUND,
				       DATA_FAIL_JOB, DATA_LEAVE,	  DATA_PING,
				       DATA_PONG,     DATA_ORDINAL,	  DATA_FOLLOW,
				       DATA_BEGUN,    DATA_OTHERS_FOLLOW, DATA_OTHERS_BEGUN };

	ASSERT_MEM(ops, "\1\2\3\4\5\20\21\22\40\41\42\43\44\60\64\65\66\67", sizeof(ops));
}

TEST(numbers_of_types_operations_and_reductions_stay)
{
	static const char *const dtypes[] = { "float64", "float32", "float16", "bfloat16", "int64",
					      "int32",	 "int16",   "int8",    "uint8",	   "bool" };
	static const char *const operations[] = { "push_pull",	    "broadcast",  "all_gather",
						  "reduce_scatter", "all_to_all", "barrier",
						  "push_pull_rows", "accumulate" };
	static const char *const reductions[] = { "sum", "average", "min", "max" };

	ASSERT_EQ(DTYPE_MAX_, ARRAY_SIZE(dtypes));
	ASSERT_EQ(OPERATION_MAX_, ARRAY_SIZE(operations));
	ASSERT_EQ(REDUCTION_MAX_, ARRAY_SIZE(reductions));
	for (unsigned i = 0; i < ARRAY_SIZE(dtypes); i++)
		ASSERT_STR(dtype_name(i + 1), dtypes[i]);
	for (unsigned i = 0; i < ARRAY_SIZE(operations); i++)
		ASSERT_STR(operation_name(i + 1), operations[i]);
	for (unsigned i = 0; i < ARRAY_SIZE(reductions); i++)
		ASSERT_STR(reduction_name(i + 1), reductions[i]);
}

/* Whoever has heard the same, in any order, knows the same; and it is never that no server is in. */
TEST(moves_unite_in_any_order)
{
	static const uint32_t said[][3] = {
		{ 1, 0, 0 }, { 0, 1, 0 }, { 2, 1, 0 }, { 0, 0, 1 }, { 3, 0, 5 },
	};
	static const size_t orders[][5] = {
		{ 0, 1, 2, 3, 4 },
		{ 4, 3, 2, 1, 0 },
		{ 3, 1, 0, 4, 2 },
		{ 1, 3, 0, 2, 4 },
	};

	for (size_t o = 0; o < ARRAY_SIZE(orders); o++) {
		uint32_t a[3] = { 0 }, b[3] = { 0 };

		for (size_t i = 0; i < 5; i++) {
			(void)data_moves_unite(a, said[orders[o][i]], 3, 3, NULL, NULL);
			ASSERT_TRUE(!(a[0] & 1) || !(a[1] & 1) || !(a[2] & 1));
		}
		for (size_t i = 0; i < 5; i++)
			(void)data_moves_unite(b, said[i], 3, 3, NULL, NULL);
		/* Each may have gone further by its own; told of each other they agree. */
		(void)data_moves_unite(a, b, 3, 3, NULL, NULL);
		(void)data_moves_unite(b, a, 3, 3, NULL, NULL);
		ASSERT_MEM(a, b, sizeof(a));
		ASSERT_TRUE(!data_moves_unite(a, b, 3, 3, NULL, NULL));
		ASSERT_EQ(data_moves_epoch(7, a, 3, NULL), data_moves_epoch(7, b, 3, NULL));
	}
}

/* A rank is there, lost, or has left in good order: another word would be believed for ever. */
TEST(ranks_are_gone_in_two_ways)
{
	const uint32_t wild[] = { 2, 4, 5, 7, DATA_MOVES_OFTEN, UINT32_MAX };
	uint32_t moves[3] = { 0 };

	for (size_t i = 0; i < ARRAY_SIZE(wild); i++) {
		const uint32_t said[3] = { 0, wild[i], 0 };

		ASSERT_TRUE(!data_moves_unite(moves, said, 3, 1, NULL, NULL));
		ASSERT_EQ(moves[1], 0);
		ASSERT_TRUE(!data_moves_valid(wild[i], true));
	}
	ASSERT_TRUE(data_moves_unite(moves, (const uint32_t[3]){ 0, DATA_MOVES_LOST, 0 }, 3, 1,
				     NULL, NULL));
	ASSERT_TRUE(data_moves_unite(moves, (const uint32_t[3]){ 0, DATA_MOVES_LEFT, 0 }, 3, 1,
				     NULL, NULL));
	ASSERT_EQ(moves[1], DATA_MOVES_LEFT);
}

TEST(moves_that_cannot_be_are_not_taken)
{
	uint32_t moves[2] = { 0, 2 };
	const uint32_t wild[2] = { UINT32_MAX, DATA_MOVES_OFTEN + 1 };

	ASSERT_TRUE(!data_moves_unite(moves, wild, 2, 2, NULL, NULL));
	ASSERT_EQ(moves[0], 0);
	ASSERT_EQ(moves[1], 2);
	/* None: the epoch is the view's. Any two that differ in one number have different ones. */
	ASSERT_EQ(data_moves_epoch(9, (const uint32_t[2]){ 0, 0 }, 2, NULL), 9);
	ASSERT_TRUE(data_moves_epoch(9, (const uint32_t[2]){ 1, 0 }, 2, NULL) !=
		    data_moves_epoch(9, (const uint32_t[2]){ 0, 1 }, 2, NULL));
}

static struct data_added_set added_set(const char *const *names, const uint32_t *moves, uint32_t n)
{
	struct data_added_set set = { .n = n };

	for (uint32_t i = 0; i < n; i++) {
		(void)snprintf(set.servers[i].name, sizeof(set.servers[i].name), "%s", names[i]);
		(void)snprintf(set.servers[i].address, sizeof(set.servers[i].address), "%s:1",
			       names[i]);
		set.servers[i].moves = moves[i];
		set.servers[i].bandwidth_mbps = 0x01020304;
	}
	return set;
}

/* Two nodes number them in different orders, and agree nevertheless. */
TEST(servers_that_were_added_unite)
{
	struct data_added_set a = added_set((const char *[]){ "x", "y" }, (uint32_t[]){ 1, 4 }, 2);
	struct data_added_set b =
		added_set((const char *[]){ "z", "y", "x" }, (uint32_t[]){ 0, 3, 2 }, 3);
	uint32_t own[2] = { 1, 0 }, other[2] = { 1, 0 };
	bool more = false, less = false;

	data_added_compare(&a, &b, &more, &less);
	ASSERT_TRUE(more && less);
	ASSERT_TRUE(data_moves_epoch(7, own, 2, &a) != data_moves_epoch(7, own, 2, &b));
	ASSERT_TRUE(data_moves_unite(own, other, 2, 2, &a, &b));
	ASSERT_TRUE(data_moves_unite(other, own, 2, 2, &b, &a));
	ASSERT_TRUE(!data_moves_unite(own, other, 2, 2, &a, &b));
	ASSERT_EQ(a.n, 3);
	ASSERT_EQ(a.servers[data_added_find(&a, "x", "x:1")].moves, 2);
	ASSERT_EQ(a.servers[data_added_find(&a, "y", "y:1")].moves, 4);
	ASSERT_EQ(a.servers[data_added_find(&a, "z", "z:1")].moves, 0);
	ASSERT_EQ(data_added_find(&a, "x", "y:1"), 3);
	ASSERT_EQ(data_moves_epoch(7, own, 2, &a), data_moves_epoch(7, other, 2, &b));
	more = less = false;
	data_added_compare(&a, &b, &more, &less);
	ASSERT_TRUE(!more && !less);
	/* While one of them is in, those of the view may all be out; if none is, all are in again. */
	ASSERT_TRUE(data_moves_unite(own, (uint32_t[]){ 1, 1 }, 2, 2, &a, NULL));
	ASSERT_TRUE(own[0] == 1 && own[1] == 1);
	b = added_set((const char *[]){ "x", "y", "z" }, (uint32_t[]){ 3, 5, 1 }, 3);
	ASSERT_TRUE(data_moves_unite(own, (uint32_t[]){ 1, 1 }, 2, 2, &a, &b));
	ASSERT_TRUE(own[0] == 2 && own[1] == 2);
	ASSERT_EQ(a.servers[data_added_find(&a, "z", "z:1")].moves, 2);
}

TEST(moves_with_added_servers_are_these_bytes)
{
	struct data_added_set set = added_set((const char *[]){ "ab" }, (uint32_t[]){ 5 }, 1), got;
	struct data_header header = { .op = DATA_MOVE, .part = 1 };
	uint8_t bytes[8 + sizeof(struct data_added)] = { 0 };
	uint32_t moves[2] = { 3, 4 };

	header.len = (uint32_t)data_moves_len(2, &set);
	ASSERT_EQ(header.len, sizeof(bytes));
	data_moves_encode(bytes, moves, 2, &set);
	ASSERT_MEM(bytes, "\3\0\0\0\4\0\0\0ab\0", 11);
	ASSERT_MEM(bytes + 8 + 64, "ab:1\0", 5);
	ASSERT_MEM(bytes + 8 + 160, "\4\3\2\1\5\0\0\0", 8);
	memset(moves, 0, sizeof(moves));
	ASSERT_EQ(data_moves_n(&header), 2);
	ASSERT_TRUE(data_moves_decode(&header, bytes, moves, &got));
	ASSERT_TRUE(moves[0] == 3 && moves[1] == 4 && got.n == 1);
	ASSERT_MEM(&got.servers[0], &set.servers[0], sizeof(got.servers[0]));
	/* Names that do not end, are empty, have something behind their end, may not be shown, or come twice. */
	memset(bytes + 8, 'a', 64);
	ASSERT_TRUE(!data_moves_decode(&header, bytes, moves, &got));
	memset(bytes + 8, 0, 64);
	ASSERT_TRUE(!data_moves_decode(&header, bytes, moves, &got));
	memcpy(bytes + 8, "a\0b", 3);
	ASSERT_TRUE(!data_moves_decode(&header, bytes, moves, &got));
	memcpy(bytes + 8, "\xc2\x9b", 3);
	ASSERT_TRUE(!data_moves_decode(&header, bytes, moves, &got));
	set.servers[1] = set.servers[0];
	set.n = 2;
	ASSERT_TRUE(!data_added_set_valid(&set));
	set.n = DATA_ADDED_MAX + 1;
	ASSERT_TRUE(!data_added_set_valid(&set));
}
