/*
 * Protobuf there and back, its limits, and bytes that are broken, cut or made to take much memory.
 */
#include "cluster.pb-c.h"
#include "control.pb-c.h"
#include "proto/pack.h"
#include "proto/types.h"
#include "test.h"

#define REQUEST (&bps__control__request__descriptor)
#define JOINED	(&bps__cluster__job_joined__descriptor)
#define VIEW	(&bps__cluster__view__descriptor)
#define EVENT	(&bps__cluster__register_event__descriptor)

TEST(a_message_survives_the_way_there_and_back)
{
	Bps__Control__Join join = BPS__CONTROL__JOIN__INIT;
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	_cleanup_(unpack_freep) Bps__Control__Request *got = NULL;
	_cleanup_(freep) void *data = NULL;
	size_t len;

	join.job = (char *)"resnet";
	join.has_secret = true;
	join.secret = (ProtobufCBinaryData){ .len = 3, .data = (uint8_t *)"a\0b" };
	join.rank = 7;
	join.size = 8;
	request.id = 42;
	request.body_case = BPS__CONTROL__REQUEST__BODY_JOIN;
	request.join = &join;
	ASSERT_OK(pack(&request.base, 4096, &data, &len));
	ASSERT_OK(unpack(REQUEST, data, len, (ProtobufCMessage **)&got));
	ASSERT_EQ(got->id, 42);
	ASSERT_EQ(got->body_case, BPS__CONTROL__REQUEST__BODY_JOIN);
	ASSERT_STR(got->join->job, "resnet");
	ASSERT_EQ(got->join->secret.len, 3);
	ASSERT_MEM(got->join->secret.data, "a\0b", 3);
	ASSERT_EQ(got->join->rank, 7);
	ASSERT_EQ(got->join->timeout_ms, 60000); /* the default */
}

TEST(the_limit_of_pack_is_exact)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	_cleanup_(freep) void *data = NULL;
	size_t len = protobuf_c_message_get_packed_size(&request.base), got = 0;

	ASSERT_EQ(pack(&request.base, len - 1, &data, &got), -EMSGSIZE);
	ASSERT_TRUE(!data && !got);
	ASSERT_OK(pack(&request.base, len, &data, &got));
	ASSERT_EQ(got, len);
}

TEST(a_message_without_fields_packs_to_nothing)
{
	Bps__Control__Leave leave = BPS__CONTROL__LEAVE__INIT;
	_cleanup_(unpack_freep) Bps__Control__Leave *got = NULL;
	_cleanup_(freep) void *data = NULL;
	size_t len;

	ASSERT_OK(pack(&leave.base, 0, &data, &len));
	ASSERT_TRUE(data);
	ASSERT_EQ(len, 0);
	ASSERT_OK(unpack(&bps__control__leave__descriptor, data, len, (ProtobufCMessage **)&got));
}

static void expect_refused(const ProtobufCMessageDescriptor *descriptor, const void *data,
			   size_t len)
{
	ProtobufCMessage *message = NULL;

	ASSERT_EQ(unpack(descriptor, data, len, &message), -EPROTO);
	ASSERT_TRUE(!message);
}

/* Each field of two bytes would cost as much to take apart as one of a thousand. */
TEST(fields_that_come_too_often_are_refused)
{
	_cleanup_(unpack_freep) ProtobufCMessage *message = NULL;
	static char data[4 * PACK_UNKNOWN_MAX] = "\x08\x01";
	size_t len = 2;

	/* The id twice; also inside of a body, a Leave in it, and numbers that come one by one. */
	expect_refused(REQUEST, "\x08\x01\x08\x01", 4);
	expect_refused(REQUEST, "\x08\x01\x1a\x04\x18\x01\x18\x01", 8);
	expect_refused(JOINED, "\x10\x01\x10\x01", 4);
	/* What a later version may say. */
	for (; (len - 2) / 2 <= PACK_UNKNOWN_MAX + len / 16; len += 2)
		memcpy(data + len, "\x78\x01", 2);
	expect_refused(REQUEST, data, len);
	ASSERT_OK(unpack(REQUEST, data, 2 + 2 * PACK_UNKNOWN_MAX, &message));
}

TEST(broken_bytes_are_refused)
{
	expect_refused(REQUEST, "", 0);			    /* the id is required */
	expect_refused(REQUEST, "\x12\x00", 2);		    /* so it is with a body */
	expect_refused(REQUEST, "\x08", 1);		    /* a tag without its value */
	expect_refused(REQUEST, "\x08\x01\x12\x7f", 4);	    /* a body longer than the bytes */
	expect_refused(REQUEST, "\x0d\x01\x00\x00\x00", 5); /* the id with the wrong wire type */
	expect_refused(REQUEST, "\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", 12);
	expect_refused(REQUEST, "\x12\xff\xff\xff\xff\x0f", 6); /* a length of 4 GiB */
	expect_refused(REQUEST, "\x07\x01", 2); /* a wire type that does not exist */
}

TEST(every_cut_of_a_good_message_is_refused_or_good)
{
	static const uint32_t ranks[] = { 0, 1, 2, 300, 70000 };
	Bps__Cluster__JobJoin join = BPS__CLUSTER__JOB_JOIN__INIT;
	_cleanup_(freep) void *data = NULL;
	size_t len;

	join.job = (char *)"job";
	join.secret_digest = (ProtobufCBinaryData){ .len = 4, .data = (uint8_t *)"1234" };
	join.n_ranks = ARRAY_SIZE(ranks);
	join.ranks = (uint32_t *)ranks;
	ASSERT_OK(pack(&join.base, 4096, &data, &len));
	for (size_t cut = 0; cut < len; cut++) {
		/* In memory of its own, so that a sanitizer sees a read past the end. */
		_cleanup_(freep) void *copy = malloc(MAX(cut, (size_t)1));

		ASSERT_TRUE(copy);
		memcpy(copy, data, cut);
		expect_refused(&bps__cluster__job_join__descriptor, copy, cut);
	}
}

TEST(unknown_fields_are_skipped)
{
	_cleanup_(unpack_freep) Bps__Control__Request *got = NULL;

	/* id 5, then field 100 with a varint. */
	ASSERT_OK(unpack(REQUEST, "\x08\x05\xa0\x06\x01", 5, (ProtobufCMessage **)&got));
	ASSERT_EQ(got->id, 5);
	ASSERT_EQ(got->body_case, BPS__CONTROL__REQUEST__BODY__NOT_SET);
}

/* The worst that honest bytes can ask for, per byte: they must fit, for the largest job there can be. */
TEST(the_largest_honest_messages_fit_the_arena)
{
	Bps__Cluster__JobJoined joined = BPS__CLUSTER__JOB_JOINED__INIT;
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *got = NULL;
	_cleanup_(freep) uint32_t *zeros = calloc(JOB_RANKS_MAX, sizeof(*zeros));
	_cleanup_(freep) void *data = NULL;
	size_t len;

	ASSERT_TRUE(zeros);
	joined.n_node_of_rank = joined.n_stripes = JOB_RANKS_MAX;
	joined.node_of_rank = joined.stripes = zeros;
	ASSERT_OK(pack(&joined.base, 4u << 20, &data, &len));
	ASSERT_OK(unpack(JOINED, data, len, (ProtobufCMessage **)&got));
	ASSERT_EQ(got->n_node_of_rank, JOB_RANKS_MAX);
	ASSERT_EQ(got->n_stripes, JOB_RANKS_MAX);
}

TEST(many_small_messages_fit_the_arena)
{
	Bps__Cluster__View view = BPS__CLUSTER__VIEW__INIT;
	Bps__Cluster__Member member = BPS__CLUSTER__MEMBER__INIT, *members[2000];
	_cleanup_(unpack_freep) Bps__Cluster__View *got = NULL;
	_cleanup_(freep) void *data = NULL;
	size_t len;

	member.name = member.address = (char *)"";
	for (size_t i = 0; i < ARRAY_SIZE(members); i++)
		members[i] = &member;
	view.n_members = ARRAY_SIZE(members);
	view.members = members;
	ASSERT_OK(pack(&view.base, 1u << 20, &data, &len));
	ASSERT_OK(unpack(VIEW, data, len, (ProtobufCMessage **)&got));
	ASSERT_EQ(got->n_members, ARRAY_SIZE(members));
	ASSERT_STR(got->members[1999]->name, "");
}

/*
 * A field that is not repeated but comes again would be merged: protobuf-c copies the arrays inside each time, so n copies of
 * a view would take memory (and time) in the square of n.
 */
TEST(a_message_inside_that_comes_again_is_refused)
{
	Bps__Cluster__View view = BPS__CLUSTER__VIEW__INIT;
	Bps__Cluster__RegisterEvent event = BPS__CLUSTER__REGISTER_EVENT__INIT;
	_cleanup_(unpack_freep) ProtobufCMessage *got = NULL;
	_cleanup_(freep) void *one = NULL;
	_cleanup_(freep) char *two = NULL;
	size_t len;

	event.view = &view;
	ASSERT_OK(pack(&event.base, 4096, &one, &len));
	two = malloc(2 * len);
	ASSERT_TRUE(two);
	memcpy(two, one, len);
	memcpy(two + len, one, len);
	ASSERT_OK(unpack(EVENT, two, len, &got));
	expect_refused(EVENT, two, 2 * len);
}

TEST(free_takes_null)
{
	ASSERT_TRUE(!unpack_free(NULL));
}

TEST(fields_are_counted_and_none_is_taken_apart)
{
	static const uint8_t all[] = {
		0x08, 0x96, 0x01,		    /* 1: varint 150 */
		0x11, 1,    2,	  3, 4, 5, 6, 7, 8, /* 2: 64 bits */
		0x1a, 3,    0x08, 1, 8, /* 3: three bytes, which look like a field and a half */
		0x25, 1,    2,	  3, 4, /* 4: 32 bits */
	};
	uint8_t broken[sizeof(all) + 2];

	ASSERT_TRUE(pack_has_at_most(all, sizeof(all), 4));
	ASSERT_TRUE(!pack_has_at_most(all, sizeof(all), 3));
	ASSERT_TRUE(!pack_has_at_most(all, sizeof(all), 0));
	ASSERT_TRUE(pack_has_at_most(NULL, 0, 0));
	/* What comes behind something that is no field is none: 3 counts no more when it is cut. */
	ASSERT_TRUE(pack_has_at_most(all, 16, 2));
	ASSERT_TRUE(!pack_has_at_most(all, 16, 1));
	/* A group, a varint without end, a length beyond the end. */
	for (unsigned i = 0; i < 3; i++) {
		memcpy(broken,
		       (const uint8_t[][2]){ { 0x0b, 0 }, { 0x08, 0x80 }, { 0x0a, 200 } }[i], 2);
		memcpy(broken + 2, all, sizeof(all));
		if (i == 1)
			memset(broken + 1, 0x80, sizeof(broken) - 1);
		ASSERT_TRUE(pack_has_at_most(broken, sizeof(broken), 0));
	}
}
