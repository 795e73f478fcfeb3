/* What transport.h promises, held against every transport; with TEST_OVER_RDMA against RDMA alone, which needs devices. */
#include "transport_pair.h"

#include "base/clock.h"
#include <poll.h>

#define N_MANY 300

#if defined(TEST_OVER_RDMA)

#define TEST_FOR_EACH_TRANSPORT(name) TEST_FOR_EACH_TCP(name)

#define TEST_FOR_EACH_TCP(name)                                                       \
	static void name(const struct pair_variant *variant);                         \
	TEST_TIMEOUT(name##_rdma, RDMA_LIMIT_S)                                       \
	{                                                                             \
		name(&(struct pair_variant){ "rdma", false, 0, 1, true });            \
	}                                                                             \
	TEST_TIMEOUT(name##_rdma_thread, RDMA_LIMIT_S)                                \
	{                                                                             \
		name(&(struct pair_variant){ "rdma, thread", false, 1, 1, true });    \
	}                                                                             \
	TEST_TIMEOUT(name##_rdma_2_threads_4_lanes, RDMA_LIMIT_S)                     \
	{                                                                             \
		name(&(struct pair_variant){ "rdma, 2 threads", false, 2, 4, true }); \
	}                                                                             \
	static void name(const struct pair_variant *variant)

/* In a virtual machine whose processor is emulated. */
#define RDMA_LIMIT_S 300
#define IS_SLOW	     1

#else

#define IS_SLOW 0

#define TEST_FOR_EACH_TRANSPORT(name)                                 \
	static void name(const struct pair_variant *variant);         \
	TEST(name##_inproc)                                           \
	{                                                             \
		name(&(struct pair_variant){ "inproc", true, 0, 1 }); \
	}                                                             \
	TEST_FOR_EACH_TCP_(name)                                      \
	static void name(const struct pair_variant *variant)

#define TEST_FOR_EACH_TCP(name)                               \
	static void name(const struct pair_variant *variant); \
	TEST_FOR_EACH_TCP_(name)                              \
	static void name(const struct pair_variant *variant)

#define TEST_FOR_EACH_TCP_(name)                                                        \
	TEST(name##_tcp)                                                                \
	{                                                                               \
		name(&(struct pair_variant){ "tcp", false, 0, 1 });                     \
	}                                                                               \
	TEST(name##_tcp_4_lanes)                                                        \
	{                                                                               \
		name(&(struct pair_variant){ "tcp, 4 lanes", false, 0, 4 });            \
	}                                                                               \
	TEST(name##_tcp_thread)                                                         \
	{                                                                               \
		name(&(struct pair_variant){ "tcp, thread", false, 1, 1 });             \
	}                                                                               \
	TEST(name##_tcp_thread_4_lanes)                                                 \
	{                                                                               \
		name(&(struct pair_variant){ "tcp, thread, 4 lanes", false, 1, 4 });    \
	}                                                                               \
	TEST(name##_tcp_2_threads)                                                      \
	{                                                                               \
		name(&(struct pair_variant){ "tcp, 2 threads", false, 2, 1 });          \
	}                                                                               \
	TEST(name##_tcp_2_threads_4_lanes)                                              \
	{                                                                               \
		name(&(struct pair_variant){ "tcp, 2 threads, 4 lanes", false, 2, 4 }); \
	}

#endif

/* Where the result lies: in the room, or in the block in-process. */
static const void *result_of(const struct pair_call *call)
{
	return call->answer ? call->answer->data : call->call.target;
}

static void call_done(struct pair_call *call)
{
	call->answer = block_unref(call->answer);
}

TEST_FOR_EACH_TRANSPORT(a_call_is_answered)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	char payload[1000], room[1000];
	struct pair_call call;
	struct delivery *delivery;

	pair_fill(payload, sizeof(payload), 1);
	pair_call_init(&call, payload, sizeof(payload), room, sizeof(room));
	call.call.header.priority = -5;
	pair_call_begin(pair, &call);
	ASSERT_EQ(call.n_sent + call.n_done, 0);

	delivery = pair_take(pair);
	ASSERT_EQ(delivery->header.op, DATA_PUSH);
	ASSERT_EQ(delivery->header.len, sizeof(payload));
	ASSERT_EQ(delivery->header.job, 7);
	ASSERT_EQ(delivery->header.priority, -5);
	ASSERT_TRUE(pair_check(delivery->payload, sizeof(payload), 1));
	ASSERT_EQ(call.n_done, 0);
	pair_echo(pair, delivery);
	PAIR_UNTIL(pair, call.n_done);

	ASSERT_OK(call.call.status);
	ASSERT_EQ(call.call.answer.op, DATA_RESULT);
	ASSERT_EQ(call.call.answer.len, sizeof(payload));
	ASSERT_TRUE(pair_check(result_of(&call), sizeof(payload), 1));
	ASSERT_EQ(call.n_sent, 1);
	ASSERT_TRUE(call.was_sent_first);
	call_done(&call);
}

TEST_FOR_EACH_TRANSPORT(a_call_without_payload)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct pair_call call;

	pair->server->on_call = pair_on_call_echo;
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_EQ(call.call.answer.len, 0);
	ASSERT_TRUE(!call.answer);
}

/* However long nothing had come before. */
TEST_FOR_EACH_TRANSPORT(a_delivery_says_when_it_was_read)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	static const size_t lens[] = { 0, 1000, 300000 };
	static char payload[300000];

	for (size_t i = 0; i < 3 * ARRAY_SIZE(lens); i++) {
		size_t len = lens[i % ARRAY_SIZE(lens)];
		struct pair_call call;
		struct delivery *delivery;
		uint64_t before_ns;

		(void)poll(NULL, 0, 20);
		before_ns = clock_now_ns();
		pair_call_init(&call, payload, len, NULL, 0);
		pair_call_begin(pair, &call);
		delivery = pair_take(pair);
		ASSERT_TRUE(delivery->at_ns >= before_ns && delivery->at_ns <= clock_now_ns());
		pair_echo(pair, delivery);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
		call_done(&call);
	}
}

/* A reference moves to the transport, which lets it go in the end. */
TEST_FOR_EACH_TRANSPORT(a_payload_in_a_block)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct pair_call call;
	struct block *block;
	struct delivery *delivery;

	ASSERT_OK(block_new(pair->blocks, 5000, NULL, &block));
	pair_fill(block->data, 5000, 2);
	pair_call_init(&call, block->data, 5000, NULL, 0);
	call.call.payload_block = block;
	pair_call_begin(pair, &call);
	delivery = pair_take(pair);
	ASSERT_TRUE(delivery->payload_block);
	if (variant->is_inproc)
		ASSERT_TRUE(delivery->payload_block == block);
	pair_echo(pair, delivery);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_TRUE(call.answer && pair_check(call.answer->data, 5000, 2));
	if (variant->is_inproc)
		ASSERT_TRUE(call.answer == block);
	call_done(&call);
	/* A thread of the server lets its reference go after the last byte, which we may have had before. */
	PAIR_UNTIL(pair, block_cache_used(pair->blocks) == 0);
}

TEST_FOR_EACH_TRANSPORT(an_answer_is_copied_without_a_block)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct data_header header;
	struct delivery *delivery;
	struct pair_call call;
	char text[] = "of the server's stack", room[64] = "";

	pair_call_init(&call, NULL, 0, room, sizeof(room));
	pair_call_begin(pair, &call);
	delivery = pair_take(pair);
	header = delivery->header;
	header.op = DATA_RESULT;
	header.len = header.part_len = (uint32_t)sizeof(text);
	header.total = sizeof(text);
	delivery_answer(delivery, &header, NULL, text);
	memset(text, 0, sizeof(text));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_STR(room, "of the server's stack");
	ASSERT_TRUE(!call.answer);
}

TEST_FOR_EACH_TRANSPORT(set_up_answers_come_in_a_block)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct data_header header = { .op = DATA_OK, .len = 6 };
	struct pair_call call;
	char room[64] = "untouched";

	pair_call_init(&call, "please", 6, room, sizeof(room));
	call.call.header = (struct data_header){ .op = DATA_JOIN, .len = 6 };
	pair_call_begin(pair, &call);
	delivery_answer(pair_take(pair), &header, NULL, "joined");
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_EQ(call.call.answer.op, DATA_OK);
	ASSERT_TRUE(call.answer);
	ASSERT_MEM(call.answer->data, "joined", 6);
	ASSERT_STR(room, "untouched");
	call_done(&call);
}

TEST_FOR_EACH_TRANSPORT(an_error_has_status_and_text)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct pair_call call;
	char text[1000];

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	delivery_fail(pair_take(pair), -ESTALE, "round 3 is\nover\xc2\x9b");
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ESTALE);
	ASSERT_STR(call.call.text, "round 3 is?over??");
	ASSERT_EQ(call.call.answer.key, 1);

	memset(text, 'x', sizeof(text));
	text[sizeof(text) - 1] = '\0';
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	delivery_fail(pair_take(pair), -EIO, text);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -EIO);
	ASSERT_EQ(strlen(call.call.text), ERROR_TEXT_MAX);

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	delivery_fail(pair_take(pair), -EIO, "");
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_STR(call.call.text, "Input/output error");
}

/* Each finds its own answer, whatever the order of the answers. */
TEST_FOR_EACH_TRANSPORT(many_calls_answered_in_reverse)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	static struct pair_call calls[N_MANY];
	static char *payloads[N_MANY], *rooms[N_MANY];
	size_t lens[N_MANY];
	unsigned n_done = 0;

	for (unsigned i = 0; i < N_MANY; i++) {
		lens[i] = i % 3 ? i * 7 : (size_t)(i % 10) * 70000;
		payloads[i] = malloc(lens[i] + 1);
		rooms[i] = calloc(1, lens[i] + 1);
		pair_fill(payloads[i], lens[i], i);
		pair_call_init(&calls[i], payloads[i], lens[i], rooms[i], lens[i]);
		calls[i].call.header.priority = (int32_t)(i % 5);
		pair_call_begin(pair, &calls[i]);
	}
	PAIR_UNTIL(pair, pair->server->n_deliveries == N_MANY);
	while (!list_empty(&pair->server->deliveries)) {
		struct delivery *delivery =
			list_last(&pair->server->deliveries, struct delivery, link);

		list_remove(&delivery->link);
		pair_echo(pair, delivery);
	}
	for (unsigned i = 0; i < N_MANY; i++)
		PAIR_UNTIL(pair, calls[i].n_done);
	for (unsigned i = 0; i < N_MANY; i++) {
		ASSERT_OK(calls[i].call.status);
		ASSERT_EQ(calls[i].call.answer.len, lens[i]);
		ASSERT_TRUE(!lens[i] || pair_check(result_of(&calls[i]), lens[i], i));
		n_done += calls[i].n_done;
		call_done(&calls[i]);
		free(payloads[i]);
		free(rooms[i]);
	}
	ASSERT_EQ(n_done, N_MANY);
}

/* Both directions full at once: who sends must go on reading. */
TEST_FOR_EACH_TRANSPORT(both_directions_full)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	enum { N = IS_SLOW ? 4 : 24, LEN = 3 << 20 };
	static struct pair_call calls[N];
	char *payload = malloc(LEN), *rooms = malloc((size_t)N * LEN);

	pair->server->on_call = pair_on_call_echo;
	pair_fill(payload, LEN, 3);
	for (unsigned i = 0; i < N; i++) {
		pair_call_init(&calls[i], payload, LEN, rooms + (size_t)i * LEN, LEN);
		pair_call_begin(pair, &calls[i]);
	}
	for (unsigned i = 0; i < N; i++) {
		PAIR_UNTIL(pair, calls[i].n_done);
		ASSERT_OK(calls[i].call.status);
		ASSERT_TRUE(pair_check(result_of(&calls[i]), LEN, 3));
		call_done(&calls[i]);
	}
	free(payload);
	free(rooms);
}

TEST_FOR_EACH_TRANSPORT(the_largest_payload)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	char *payload = malloc(DATA_PAYLOAD_MAX), *room = malloc(DATA_PAYLOAD_MAX);
	struct pair_call call;

	pair->server->on_call = pair_on_call_echo;
	pair_fill(payload, DATA_PAYLOAD_MAX, 4);
	pair_call_init(&call, payload, DATA_PAYLOAD_MAX, room, DATA_PAYLOAD_MAX);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_TRUE(pair_check(result_of(&call), DATA_PAYLOAD_MAX, 4));
	call_done(&call);
	free(payload);
	free(room);
}

TEST_FOR_EACH_TRANSPORT(notices_arrive_in_order)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct data_header header = { .op = DATA_FAIL_ROUND, .key = 1, .status = EIO };
	char text[16];

	for (unsigned i = 0; i < 50; i++) {
		(void)snprintf(text, sizeof(text), "notice %u", i);
		header.round = i + 1;
		header.priority = (int32_t)i; /* of no account among notices */
		header.len = (uint32_t)strlen(text);
		ASSERT_OK(peer_notice(pair->peer, &header, text));
		ASSERT_EQ(pair->server->n_notices, 0);
	}
	memset(text, 0, sizeof(text));
	PAIR_UNTIL(pair, pair->server->n_notices == 50);
	for (unsigned i = 0; i < 50; i++) {
		(void)snprintf(text, sizeof(text), "notice %u", i);
		ASSERT_EQ(pair->server->notices[i].header.round, i + 1);
		ASSERT_STR(pair->server->notices[i].payload, text);
	}
}

/* Of what many are told there is one block, which goes with the last of them. */
TEST_FOR_EACH_TRANSPORT(notices_share_a_block)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct data_header header = { .op = DATA_MOVE, .key = 1, .len = 12000 };
	struct block *block;

	ASSERT_OK(block_new(pair->blocks, 12000, NULL, &block));
	memset(block->data, 0x5a, 12000);
	for (unsigned i = 0; i < 10; i++) {
		header.round = i + 1;
		ASSERT_OK(i % 3 ? peer_notice_block(pair->peer, &header, block)
				: peer_notice(pair->peer, &header, block->data));
	}
	block_unref(block);
	PAIR_UNTIL(pair, pair->server->n_notices == 10);
	for (unsigned i = 0; i < 10; i++) {
		ASSERT_EQ(pair->server->notices[i].header.round, i + 1);
		ASSERT_EQ(pair->server->notices[i].header.len, 12000);
		ASSERT_EQ(pair->server->notices[i].payload[0], 0x5a);
	}
}

/* Notices that had come when each call did. */
static unsigned notices_before[20], n_calls_in;

static void count_notices(struct pair_side *side, struct delivery *delivery)
{
	notices_before[n_calls_in++] = side->n_notices;
	delivery_fail(delivery, -ECANCELED, "counted");
}

/* Also those that wait for the connection. */
TEST_FOR_EACH_TRANSPORT(notices_stay_in_order_with_calls_that_set_up)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct data_header header = { .op = DATA_FAIL_ROUND, .key = 1, .round = 1, .status = EIO };
	struct pair_call calls[ARRAY_SIZE(notices_before)];

	pair->server->on_call = count_notices;
	n_calls_in = 0;
	for (unsigned i = 0; i < ARRAY_SIZE(calls); i++) {
		pair_call_init(&calls[i], "name", 4, NULL, 0);
		calls[i].call.header.op = DATA_DECLARE;
		pair_call_begin(pair, &calls[i]);
		ASSERT_OK(peer_notice(pair->peer, &header, NULL));
	}
	PAIR_UNTIL(pair, n_calls_in == ARRAY_SIZE(calls) && calls[n_calls_in - 1].n_done);
	for (unsigned i = 0; i < ARRAY_SIZE(calls); i++)
		ASSERT_EQ(notices_before[i], i);
}

/* The called side can speak to whoever called. */
TEST_FOR_EACH_TRANSPORT(notices_go_back_to_the_caller)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct data_header header = {
		.op = DATA_FAIL_JOB, .job = 9, .status = ECANCELED, .len = 4
	};
	struct delivery *delivery;
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	delivery = pair_take(pair);
	ASSERT_OK(peer_notice(delivery->peer, &header, "over"));
	PAIR_UNTIL(pair, pair->a.n_notices);
	ASSERT_TRUE(pair->a.notices[0].peer == pair->peer);
	ASSERT_EQ(pair->a.notices[0].header.job, 9);
	ASSERT_STR(pair->a.notices[0].payload, "over");
	pair_echo(pair, delivery);
	PAIR_UNTIL(pair, call.n_done);
}

static void call_again(struct pair_call *call)
{
	if (call->n_done < 20)
		peer_call(call->call.peer, &call->call);
}

/* The memory of a call is the caller's again in done(). */
TEST_FOR_EACH_TRANSPORT(a_call_may_be_made_again_in_done)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct pair_call call;

	pair->server->on_call = pair_on_call_echo;
	pair_call_init(&call, NULL, 0, NULL, 0);
	call.on_done = call_again;
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done == 20);
	ASSERT_OK(call.call.status);
	ASSERT_EQ(pair->server->n_deliveries, 20);
}

/* Unsent, under way, held by the server: each ends exactly once. */
TEST_FOR_EACH_TRANSPORT(close_ends_every_call)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	enum { N = 40, LEN = 1 << 20 };
	static struct pair_call calls[N];
	char *payload = calloc(1, LEN);

	for (unsigned i = 0; i < N; i++) {
		pair_call_init(&calls[i], payload, LEN, NULL, 0);
		pair_call_begin(pair, &calls[i]);
	}
	PAIR_UNTIL(pair, pair->server->n_deliveries >= 3);
	transport_close(pair->a.transport);
	for (unsigned i = 0; i < N; i++) {
		ASSERT_EQ(calls[i].n_done, 1);
		ASSERT_EQ(calls[i].call.status, -ESHUTDOWN);
		ASSERT_CONTAINS(calls[i].call.text, "shuts down");
	}
	transport_close(pair->a.transport);
	ASSERT_EQ(pair->a.n_lost, 0);
	free(payload);
}

TEST_FOR_EACH_TRANSPORT(a_call_after_close_ends_too)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct pair_call call;

	transport_close(pair->a.transport);
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	ASSERT_EQ(call.n_done, 0);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ESHUTDOWN);
}

TEST_FOR_EACH_TCP(a_killed_peer_is_lost_once)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct pair_call calls[3];

	for (unsigned i = 0; i < 3; i++) {
		pair_call_init(&calls[i], NULL, 0, NULL, 0);
		pair_call_begin(pair, &calls[i]);
	}
	PAIR_UNTIL(pair, pair->server->n_deliveries == 3);
	peer_kill(pair->peer, "the test says so");
	peer_kill(pair->peer, "and again");
	ASSERT_EQ(pair->a.n_lost, 0);
	PAIR_UNTIL(pair, pair->a.n_lost && pair->b.n_lost);
	for (unsigned i = 0; i < 3; i++) {
		ASSERT_EQ(calls[i].n_done, 1);
		ASSERT_EQ(calls[i].call.status, -ECONNRESET);
		ASSERT_CONTAINS(calls[i].call.text, "node b (127.0.0.1:");
		ASSERT_CONTAINS(calls[i].call.text, "the test says so");
	}
	ASSERT_EQ(pair->a.n_lost, 1);
	ASSERT_EQ(pair->b.n_lost, 1);
	ASSERT_STR(pair->a.lost_why, "the test says so");
}

/* What is asked of a peer after its loss ends, as often as it is asked, and nothing that is said leaves. */
TEST_FOR_EACH_TCP(a_peer_that_is_held_outlives_its_loss)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct data_header notice = { .op = DATA_ACK };
	struct pair_call call;

	peer_hold(pair->peer);
	peer_hold(pair->peer);
	peer_kill(pair->peer, "the test says so");
	PAIR_UNTIL(pair, pair->a.n_lost);
	peer_release(pair->peer);
	for (unsigned i = 0; i < 2; i++) {
		ASSERT_TRUE(!peer_takes_direct(pair->peer, UINT32_MAX));
		ASSERT_OK(peer_notice(pair->peer, &notice, NULL));
		pair_call_init(&call, NULL, 0, NULL, 0);
		pair_call_begin(pair, &call);
		ASSERT_EQ(call.n_done, 0);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_EQ(call.call.status, -ECONNRESET);
		ASSERT_CONTAINS(call.call.text, "the test says so");
	}
	peer_release(pair->peer);
	ASSERT_EQ(pair->a.n_lost, 1);
}

/* Deliveries outlive their peer; answers to it go nowhere. */
TEST_FOR_EACH_TCP(an_answer_to_a_lost_peer)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	char payload[100];
	struct pair_call call;
	struct delivery *delivery;

	pair_fill(payload, sizeof(payload), 5);
	pair_call_init(&call, payload, sizeof(payload), NULL, 0);
	pair_call_begin(pair, &call);
	delivery = pair_take(pair);
	transport_close(pair->a.transport);
	PAIR_UNTIL(pair, pair->b.n_lost);
	ASSERT_TRUE(pair->b.lost_peer == delivery->peer);
	ASSERT_CONTAINS(peer_name(delivery->peer), "node a (127.0.0.1:");
	ASSERT_TRUE(pair_check(delivery->payload, sizeof(payload), 5));
	pair_echo(pair, delivery);
	ASSERT_EQ(block_cache_used(pair->blocks), 0);
}

/*
 * Answers given before the server closes reach the caller; on one lane. Of several the caller sees one close first, and
 * then has no use for the others.
 */
#if !defined(TEST_OVER_RDMA)
static void the_last_answers_leave(unsigned n_threads)
{
	struct pair_variant variant = { "tcp", false, n_threads, 1 };
	_cleanup_(pair_freep) struct pair *pair = pair_new(&variant);
	struct pair_call calls[5];

	for (unsigned i = 0; i < 5; i++) {
		pair_call_init(&calls[i], NULL, 0, NULL, 0);
		pair_call_begin(pair, &calls[i]);
	}
	PAIR_UNTIL(pair, pair->b.n_deliveries == 5);
	while (!list_empty(&pair->b.deliveries))
		delivery_fail(pair_take(pair), -ESHUTDOWN, "the server closes");
	transport_close(pair->b.transport);
	for (unsigned i = 0; i < 5; i++) {
		PAIR_UNTIL(pair, calls[i].n_done);
		ASSERT_EQ(calls[i].call.status, -ESHUTDOWN);
		ASSERT_STR(calls[i].call.text, "the server closes");
	}
	PAIR_UNTIL(pair, pair->a.n_lost);
	ASSERT_STR(pair->a.lost_why, "closed the connection");
}

TEST(the_last_answers_leave_tcp)
{
	the_last_answers_leave(0);
}

TEST(the_last_answers_leave_tcp_thread)
{
	the_last_answers_leave(1);
}
#endif

TEST_FOR_EACH_TCP(who_is_connected)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct transport_peer_info *infos;
	char payload[5000] = "";
	struct pair_call call;
	size_t n;

	pair->server->on_call = pair_on_call_echo;
	pair_call_init(&call, payload, sizeof(payload), payload, sizeof(payload));
	pair_call_begin(pair, &call);
	ASSERT_OK(transport_peers(pair->a.transport, &infos, &n));
	ASSERT_EQ(n, 1);
	ASSERT_TRUE(!infos[0].is_up && !infos[0].id);
	ASSERT_STR(infos[0].address, pair->address);
	free(infos);

	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(transport_peers(pair->a.transport, &infos, &n));
	ASSERT_EQ(n, 1);
	ASSERT_TRUE(infos[0].is_up);
	ASSERT_EQ(infos[0].id, peer_id(pair->peer));
	ASSERT_STR(infos[0].node, "b");
	ASSERT_INT(infos[0].bytes_out, >=, sizeof(payload) + sizeof(struct data_header));
	ASSERT_INT(infos[0].bytes_in, >=, sizeof(payload) + sizeof(struct data_header));
	free(infos);
	ASSERT_OK(transport_peers(pair->b.transport, &infos, &n));
	ASSERT_EQ(n, 1);
	ASSERT_STR(infos[0].node, "a");
	free(infos);
}

/* Of what was delivered before, in the same memory, nothing is left. */
TEST_FOR_EACH_TRANSPORT(only_what_the_caller_says_stalls)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct delivery *delivery;
	struct pair_call call;

	for (unsigned i = 0; i < 3; i++) {
		pair_call_init(&call, "please", 6, NULL, 0);
		call.call.payload_stalls = true;
		peer_call(transport_self(pair->server->transport), &call.call);
		delivery = pair_take(pair);
		ASSERT_TRUE(delivery->stalls);
		pair_echo(pair, delivery);
		PAIR_UNTIL(pair, call.n_done);
		(void)block_unref(call.answer);

		pair_call_init(&call, "please", 6, NULL, 0);
		pair_call_begin(pair, &call);
		delivery = pair_take(pair);
		ASSERT_TRUE(!delivery->stalls);
		pair_echo(pair, delivery);
		PAIR_UNTIL(pair, call.n_done);
		(void)block_unref(call.answer);
	}
}

TEST_FOR_EACH_TRANSPORT(ourselves)
{
	_cleanup_(pair_freep) struct pair *pair = pair_new(variant);
	struct peer *self = transport_self(pair->a.transport);

	ASSERT_TRUE(self == transport_self(pair->a.transport));
	ASSERT_TRUE(peer_is_self(self));
	ASSERT_EQ(peer_is_self(pair->peer), variant->is_inproc);
	peer_kill(self, "which it survives");
	ASSERT_STR(peer_name(self), "node a (this daemon)");
}
