/* Bytes that are cut, wrong, too long or too many; on either side. */
#include "transport_pair.h"

#include "transport/lane/lane.h"
#include "transport/peer/peer.h"

#define SERVER_ID 77

static const struct pair_variant variants[] = { { "home", false, 0, 1 },
						{ "thread", false, 1, 1 } };

/* A server (pair->b) whose callers are sockets. */
static struct pair *server_new(const struct pair_variant *variant, uint64_t quota_bytes)
{
	struct pair_config config = { .variant = *variant, .quota_bytes = quota_bytes };

	return pair_new_serving(&config);
}

static int call_server(struct pair *pair)
{
	return raw_shake(pair, transport_port(pair->b.transport), NULL, 5, 0);
}

/* A caller (pair->a) of a server that is a socket. */
static struct pair *caller_new(const struct pair_variant *variant, int *ret_fd)
{
	struct pair_config config = { .variant = *variant };
	struct pair *pair = pair_new_alone(&config);
	_cleanup_(fd_closep) int listener = -1;
	uint16_t port;

	listener = raw_listen(&port);
	(void)snprintf(pair->address, sizeof(pair->address), "127.0.0.1:%u", port);
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, SERVER_ID, &pair->peer));
	*ret_fd = raw_accept(pair, listener);
	raw_shake_accepted(pair, *ret_fd, NULL, SERVER_ID);
	return pair;
}

/* The header of the caller's next message, whose payload of len bytes is thrown away. */
static void receive_call(struct pair *pair, int fd, struct data_header *ret_header)
{
	char rest[4096];

	ASSERT_EQ(raw_receive(pair, fd, ret_header, sizeof(*ret_header)), sizeof(*ret_header));
	for (size_t left = ret_header->len; left > 0;) {
		size_t n = MIN(left, sizeof(rest));

		ASSERT_EQ(raw_receive(pair, fd, rest, n), n);
		left -= n;
	}
}

static void result_header(struct data_header *ret_header, uint32_t cookie, uint32_t len)
{
	raw_push_header(ret_header, cookie, len);
	ret_header->op = DATA_RESULT;
}

/* One whole message, and another cut after each number of bytes: the first arrives, of the second nothing. */
TEST(a_call_cut_at_every_byte)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 0);
		struct {
			struct data_header header;
			char payload[40];
		} message = { 0 };

		raw_push_header(&message.header, 1, sizeof(message.payload));
		for (size_t len = 0; len < sizeof(message); len++) {
			unsigned n_lost = pair->b.n_lost, n_deliveries = pair->b.n_deliveries;
			int fd = call_server(pair);

			raw_send(pair, fd, &message, sizeof(message));
			raw_send(pair, fd, &message, len);
			ASSERT_OK(shutdown(fd, SHUT_WR));
			PAIR_UNTIL(pair, pair->b.n_lost > n_lost);
			fd_close(fd);
			ASSERT_EQ(pair->b.n_deliveries - n_deliveries, 1);
			ASSERT_STR(pair->b.lost_why, len ? "closed the connection inside a message"
							 : "closed the connection");
			pair_echo(pair, pair_take(pair));
		}
		ASSERT_EQ(block_cache_used(pair->blocks), 0);
	}
}

/* The other half: a reset instead of an end. */
TEST(a_reset_inside_a_payload)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 0);
		struct linger linger = { .l_onoff = 1 };
		struct data_header header;
		char some[100000] = "";
		int fd = call_server(pair);

		raw_push_header(&header, 1, 1 << 20);
		raw_send(pair, fd, &header, sizeof(header));
		raw_send(pair, fd, some, sizeof(some));
		ASSERT_OK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
		fd_close(fd);
		PAIR_UNTIL(pair, pair->b.n_lost);
		ASSERT_STR(pair->b.lost_why, "Connection reset by peer");
		ASSERT_EQ(pair->b.n_deliveries, 0);
		ASSERT_EQ(block_cache_used(pair->blocks), 0);
	}
}

/* A peer that takes nothing of what it is told, of which there is no end. */
TEST(notices_that_are_not_read)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 64 << 10);
		struct data_header header, notice = {
			.op = DATA_FAIL_ROUND, .len = 400, .key = 1, .round = 1, .status = EIO
		};
		const char text[400] = "";
		struct delivery *delivery;
		struct peer *peer;
		int fd = call_server(pair);

		raw_push_header(&header, 1, 0);
		raw_send(pair, fd, &header, sizeof(header));
		delivery = pair_take(pair);
		peer = delivery->peer;
		pair_echo(pair, delivery);
		while (!pair->b.n_lost) {
			ASSERT_OK(peer_notice(peer, &notice, text));
			ASSERT_OK(loop_turn(pair->loop, 0));
		}
		ASSERT_CONTAINS(pair->b.lost_why, "it does not take what it is told");
		fd_close(fd);
	}
}

/* Of what it has not taken when it is lost little goes in a turn, and so others' messages wait for a part of it alone. */
TEST(what_is_not_read_goes_in_pieces)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 1 << 30);
		struct data_header header, notice = {
			.op = DATA_FAIL_ROUND, .len = 100, .key = 1, .round = 1, .status = EIO
		};
		const char text[100] = "";
		struct delivery *delivery;
		unsigned n_turns = 0;
		struct peer *peer;
		int fd = call_server(pair);
		uint64_t held;

		raw_push_header(&header, 1, 0);
		raw_send(pair, fd, &header, sizeof(header));
		delivery = pair_take(pair);
		peer = delivery->peer;
		pair_echo(pair, delivery);
		for (unsigned i = 0; i < 400000; i++)
			ASSERT_OK(peer_notice(peer, &notice, text));
		fd_close(fd);
		/* On a thread it is not over when all ends. */
		held = quota_used(&peer->held);
		while (!v && !pair->b.n_lost) {
			n_turns += quota_used(&peer->held) < held;
			held = quota_used(&peer->held);
			ASSERT_OK(loop_turn(pair->loop, 0));
		}
		ASSERT_TRUE(v || n_turns > 2);
	}
}

static void spoil_magic(struct data_header *h)
{
	h->magic ^= 1;
}

static void spoil_version(struct data_header *h)
{
	h->version = 200;
}

static void spoil_len(struct data_header *h)
{
	h->len = UINT32_MAX;
	h->part_len = UINT32_MAX;
	h->total = UINT64_MAX;
}

static void spoil_setup_len(struct data_header *h)
{
	h->op = DATA_JOIN;
	h->len = DATA_SETUP_MAX + 1;
}

static void spoil_op(struct data_header *h)
{
	h->op = 99;
}

static void spoil_cookie(struct data_header *h)
{
	h->cookie = 0;
}

static void spoil_part(struct data_header *h)
{
	h->offset = h->total + 1;
}

static void spoil_answer(struct data_header *h)
{
	h->op = DATA_RESULT;
}

static const struct {
	const char *why;
	void (*spoil)(struct data_header *header);
} bad_calls[] = {
	{ "protocol error: not a data header", spoil_magic },
	{ "protocol error: a version that is not spoken here", spoil_version },
	{ "protocol error: the part is too long", spoil_len },
	{ "protocol error: the set-up message is too long", spoil_setup_len },
	{ "protocol error", spoil_op },
	{ "protocol error: a call without a cookie, or a notice with one", spoil_cookie },
	{ "protocol error: the part does not lie within its block", spoil_part },
	{ "protocol error: an answer to no call of ours", spoil_answer },
};

TEST(calls_that_break_the_protocol)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 0);

		for (unsigned i = 0; i < ARRAY_SIZE(bad_calls); i++) {
			struct data_header header;
			int fd = call_server(pair);

			raw_push_header(&header, 1, 8);
			bad_calls[i].spoil(&header);
			raw_send(pair, fd, &header, sizeof(header));
			raw_send(pair, fd, "payload.", 8);
			PAIR_UNTIL(pair, pair->b.n_lost == i + 1);
			ASSERT_CONTAINS(pair->b.lost_why, bad_calls[i].why);
			fd_close(fd);
		}
		ASSERT_EQ(pair->b.n_deliveries, 0);
		ASSERT_EQ(block_cache_used(pair->blocks), 0);
	}
}

/* Many in one packet, and one in many. */
TEST(messages_do_not_follow_packets)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 0);
		enum { N = 60, LEN = 104 }; /* no padding */
		static struct {
			struct data_header header;
			char payload[LEN];
		} messages[N];
		int fd = call_server(pair);

		for (unsigned i = 0; i < N; i++) {
			raw_push_header(&messages[i].header, i + 1, LEN);
			pair_fill(messages[i].payload, LEN, i);
		}
		raw_send(pair, fd, messages, sizeof(messages));
		for (unsigned i = 0; i < N; i++) {
			struct delivery *delivery = pair_take(pair);

			ASSERT_EQ(delivery->header.cookie, i + 1);
			ASSERT_TRUE(pair_check(delivery->payload, LEN, i));
			pair_echo(pair, delivery);
		}
		for (unsigned i = 0; i < N; i++) {
			ASSERT_EQ(raw_receive(pair, fd, &messages[0], sizeof(messages[0])),
				  sizeof(messages[0]));
			ASSERT_EQ(messages[0].header.cookie, i + 1);
		}
		for (size_t i = 0; i < sizeof(messages[1]); i++) {
			raw_send(pair, fd, (char *)&messages[1] + i, 1);
			ASSERT_OK(loop_turn(pair->loop, 0));
		}
		pair_echo(pair, pair_take(pair));
		fd_close(fd);
		PAIR_UNTIL(pair, pair->b.n_lost);
	}
}

/* Who asks us to hold more than his share is dropped; answering makes room again. */
TEST(the_quota_of_a_peer)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 3 * 21000);
		static char payload[20000 - 2000];
		struct data_header header;
		char answer[sizeof(header) + sizeof(payload)];
		int fd = call_server(pair);

		raw_push_header(&header, 1, sizeof(payload));
		for (unsigned round = 0; round < 5; round++) {
			for (unsigned i = 0; i < 3; i++) {
				raw_send(pair, fd, &header, sizeof(header));
				raw_send(pair, fd, payload, sizeof(payload));
			}
			for (unsigned i = 0; i < 3; i++) {
				pair_echo(pair, pair_take(pair));
				ASSERT_EQ(raw_receive(pair, fd, answer, sizeof(answer)),
					  sizeof(answer));
			}
		}
		for (unsigned i = 0; i < 4; i++) {
			raw_send(pair, fd, &header, sizeof(header));
			raw_send(pair, fd, payload, sizeof(payload));
		}
		PAIR_UNTIL(pair, pair->b.n_lost);
		ASSERT_CONTAINS(pair->b.lost_why, "it would have us hold more than 63000 bytes");
		fd_close(fd);
	}
}

/* Many peers of one place, each with half a message: those that are within its share of the memory go on. */
TEST(what_peers_of_one_place_may_have_half)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		struct pair_config config = { .variant = variants[v], .memory = 1 << 20 };
		_cleanup_(pair_freep) struct pair *pair = pair_new_serving(&config);
		const struct quota *memory = &pair->b.accounts.total[ACCOUNT_MESSAGES];
		static char payload[200000];
		struct data_header header;
		char answer[sizeof(header) + sizeof(payload)];
		int fds[3];

		raw_push_header(&header, 1, sizeof(payload));
		for (unsigned i = 0; i < ARRAY_SIZE(fds); i++) {
			fds[i] = raw_shake(pair, transport_port(pair->b.transport), NULL, 5 + i, 0);
			raw_send(pair, fds[i], &header, sizeof(header));
			raw_send(pair, fds[i], payload, sizeof(payload) / 2);
			if (i < 2)
				PAIR_UNTIL(pair, quota_used(memory) > (i + 1) * sizeof(payload));
		}
		PAIR_UNTIL(pair, pair->b.n_lost);
		ASSERT_CONTAINS(pair->b.lost_why, "peers from 127.0.0.1 has ");
		ASSERT_CONTAINS(pair->b.lost_why, "over its share (user_share, 50 %)");
		for (unsigned i = 0; i < 2; i++) {
			raw_send(pair, fds[i], payload, sizeof(payload) / 2);
			pair_echo(pair, pair_take(pair));
			ASSERT_EQ(raw_receive(pair, fds[i], answer, sizeof(answer)),
				  sizeof(answer));
		}
		ASSERT_EQ(pair->b.n_lost, 1);
		/* The payload is charged to whoever has it now: all who are connected have small things alone. */
		ASSERT_INT(quota_used(memory), <, sizeof(payload));
		for (unsigned i = 0; i < ARRAY_SIZE(fds); i++)
			fd_close(fds[i]);
	}
}

/* Also many messages without any payload cost memory. */
TEST(the_quota_counts_empty_calls)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(&variants[0], 60000);
	struct data_header header;
	int fd = call_server(pair);

	raw_push_header(&header, 1, 0);
	for (unsigned i = 0; i < 1000 && !pair->b.n_lost; i++) {
		raw_send(pair, fd, &header, sizeof(header));
		ASSERT_OK(loop_turn(pair->loop, 0));
	}
	PAIR_UNTIL(pair, pair->b.n_lost);
	ASSERT_INT(pair->b.n_deliveries, >, 10);
	fd_close(fd);
}

/* It calls and calls and never reads. */
TEST(answers_that_are_not_read)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		_cleanup_(pair_freep) struct pair *pair = server_new(&variants[v], 8 << 20);
		static char payload[1 << 20];
		struct data_header header;
		int fd = call_server(pair);

		pair->b.on_call = pair_on_call_echo;
		raw_push_header(&header, 1, sizeof(payload));
		while (!pair->b.n_lost) {
			raw_send(pair, fd, &header, sizeof(header));
			raw_send(pair, fd, payload, sizeof(payload));
			ASSERT_OK(loop_turn(pair->loop, 0));
		}
		ASSERT_TRUE(strstr(pair->b.lost_why, "does not take its answers") ||
			    strstr(pair->b.lost_why, "hold more than"));
		ASSERT_EQ(block_cache_used(pair->blocks), 0);
		fd_close(fd);
	}
}

/* PINGs without end that nobody reads the PONGs of cost us nothing. */
TEST(a_flood_of_pings)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(&variants[0], 60000);
	static struct data_header pings[1000];
	struct data_header header;
	int fd = call_server(pair);

	for (unsigned i = 0; i < ARRAY_SIZE(pings); i++)
		pings[i] = (struct data_header){ .magic = DATA_MAGIC,
						 .version = DATA_VERSION,
						 .op = DATA_PING };
	for (unsigned i = 0; i < 30; i++)
		raw_send(pair, fd, pings, sizeof(pings));
	raw_push_header(&header, 1, 0);
	raw_send(pair, fd, &header, sizeof(header));
	pair_echo(pair, pair_take(pair));
	do {
		ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
		ASSERT_TRUE(header.op == DATA_PONG || header.op == DATA_RESULT);
	} while (header.op == DATA_PONG);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* What a server may not answer. Each time two calls are out, and both must end. */

struct bad_answer {
	const char *why;
	void (*make)(struct data_header *answer);
};

static void answer_stranger(struct data_header *h)
{
	h->cookie ^= 1 << 30;
}

static void answer_too_long(struct data_header *h)
{
	h->len = h->part_len = 101;
	h->total = 101;
}

static void answer_ok(struct data_header *h)
{
	h->op = DATA_OK;
}

static void answer_with_call(struct data_header *h)
{
	h->op = DATA_PUSH;
}

static void answer_no_status(struct data_header *h)
{
	h->op = DATA_ERROR;
	h->status = 0;
}

static void answer_long_text(struct data_header *h)
{
	h->op = DATA_ERROR;
	h->status = EIO;
	h->len = ERROR_TEXT_MAX + 1;
}

static const struct bad_answer bad_answers[] = {
	{ "an answer to no call of ours", answer_stranger },
	{ "a result longer than was asked for", answer_too_long },
	{ "an answer of the wrong kind", answer_ok },
	{ "a call from the side that answers", answer_with_call },
	{ "a failure without status", answer_no_status },
	{ "the text is too long", answer_long_text },
};

TEST(answers_that_break_the_protocol)
{
	for (unsigned i = 0; i < 2 * ARRAY_SIZE(bad_answers); i++) {
		const struct bad_answer *bad = &bad_answers[i / 2];
		int fd;
		_cleanup_(pair_freep) struct pair *pair = caller_new(&variants[i % 2], &fd);
		struct pair_call calls[2];
		struct data_header asked, answer;
		char target[100], payload[101] = "";

		for (unsigned k = 0; k < 2; k++) {
			pair_call_init(&calls[k], payload, 50, target, sizeof(target));
			pair_call_begin(pair, &calls[k]);
		}
		receive_call(pair, fd, &asked);
		receive_call(pair, fd, &asked);
		result_header(&answer, asked.cookie, 50);
		bad->make(&answer);
		raw_send(pair, fd, &answer, sizeof(answer));
		raw_send(pair, fd, payload, sizeof(payload));
		PAIR_UNTIL(pair, pair->a.n_lost);
		for (unsigned k = 0; k < 2; k++) {
			ASSERT_EQ(calls[k].n_done, 1);
			ASSERT_EQ(calls[k].call.status, -ECONNRESET);
			ASSERT_CONTAINS(calls[k].call.text, "node raw (127.0.0.1:");
			ASSERT_CONTAINS(calls[k].call.text, bad->why);
		}
		fd_close(fd);
	}
}

TEST(an_answer_given_twice)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = caller_new(&variants[v], &fd);
		struct pair_call calls[2];
		struct data_header asked[2], answer;

		for (unsigned k = 0; k < 2; k++) {
			pair_call_init(&calls[k], NULL, 0, NULL, 0);
			pair_call_begin(pair, &calls[k]);
			receive_call(pair, fd, &asked[k]);
		}
		result_header(&answer, asked[0].cookie, 0);
		raw_send(pair, fd, &answer, sizeof(answer));
		raw_send(pair, fd, &answer, sizeof(answer));
		PAIR_UNTIL(pair, pair->a.n_lost);
		ASSERT_EQ(calls[0].n_done, 1);
		ASSERT_OK(calls[0].call.status);
		ASSERT_EQ(calls[1].n_done, 1);
		ASSERT_EQ(calls[1].call.status, -ECONNRESET);
		fd_close(fd);
	}
}

/* Most of a large call is still with us when its answer comes. */
TEST(an_answer_before_the_call_was_sent)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = caller_new(&variants[v], &fd);
		struct data_header asked, answer;
		struct pair_call call;
		char *payload = calloc(1, 60 << 20);

		pair_call_init(&call, payload, 60 << 20, NULL, 0);
		pair_call_begin(pair, &call);
		ASSERT_EQ(raw_receive(pair, fd, &asked, sizeof(asked)), sizeof(asked));
		result_header(&answer, asked.cookie, 0);
		raw_send(pair, fd, &answer, sizeof(answer));
		PAIR_UNTIL(pair, pair->a.n_lost);
		ASSERT_EQ(call.n_done, 1);
		ASSERT_EQ(call.n_sent, 0);
		ASSERT_EQ(call.call.status, -ECONNRESET);
		free(payload);
		fd_close(fd);
	}
}

/* A result cut after each number of bytes; the room is the caller's again. */
TEST(an_answer_cut_at_every_byte)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		struct {
			struct data_header header;
			char payload[32];
		} answer = { 0 };

		for (size_t len = 0; len < sizeof(answer); len += v ? 7 : 1) {
			int fd;
			_cleanup_(pair_freep) struct pair *pair = caller_new(&variants[v], &fd);
			struct data_header asked;
			struct pair_call call;
			char target[32];

			pair_call_init(&call, NULL, 0, target, sizeof(target));
			pair_call_begin(pair, &call);
			receive_call(pair, fd, &asked);
			result_header(&answer.header, asked.cookie, sizeof(answer.payload));
			raw_send(pair, fd, &answer, len);
			fd_close(fd);
			PAIR_UNTIL(pair, pair->a.n_lost);
			ASSERT_EQ(call.n_done, 1);
			ASSERT_EQ(call.call.status, -ECONNRESET);
		}
	}
}

/* A result without a room comes in a block; cut, the block goes. */
TEST(an_answer_in_a_block_cut_short)
{
	int fd;
	_cleanup_(pair_freep) struct pair *pair = caller_new(&variants[1], &fd);
	struct data_header asked, answer;
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	receive_call(pair, fd, &asked);
	result_header(&answer, asked.cookie, 1000);
	raw_send(pair, fd, &answer, sizeof(answer));
	raw_send(pair, fd, "only this", 9);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->a.n_lost);
	ASSERT_EQ(call.n_done, 1);
	ASSERT_TRUE(!call.answer);
	ASSERT_EQ(block_cache_used(pair->blocks), 0);
}

struct seeker {
	struct pair_call call;
	char target[32];
	unsigned n_asked;
};

static void *find_target(struct call *call)
{
	struct seeker *seeker =
		container_of(container_of(call, struct pair_call, call), struct seeker, call);

	/* There is none the first time. */
	return seeker->n_asked++ ? seeker->target : NULL;
}

/* A caller without a room is asked for one when the result begins to come; one that has none gets a block. */
TEST(room_is_found_when_a_result_comes)
{
	for (unsigned v = 0; v < ARRAY_SIZE(variants); v++) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = caller_new(&variants[v], &fd);
		struct {
			struct data_header header;
			char payload[32];
		} answer = { .payload = "result" };
		struct seeker seeker = { 0 };
		struct data_header asked;

		for (unsigned i = 0; i < 3; i++) {
			unsigned n_asked = seeker.n_asked;

			pair_call_init(&seeker.call, NULL, 0, NULL, sizeof(seeker.target));
			seeker.call.call.find_target = find_target;
			pair_call_begin(pair, &seeker.call);
			receive_call(pair, fd, &asked);
			ASSERT_EQ(seeker.n_asked, n_asked);
			/* The last has nothing to put there. */
			result_header(&answer.header, asked.cookie, i < 2 ? 32 : 0);
			raw_send(pair, fd, &answer, i < 2 ? sizeof(answer) : sizeof(answer.header));
			PAIR_UNTIL(pair, seeker.call.n_done);
			ASSERT_OK(seeker.call.call.status);
			ASSERT_EQ(seeker.n_asked, i < 2 ? i + 1 : 2);
			ASSERT_EQ(!seeker.call.answer, i > 0);
			if (i == 1)
				ASSERT_TRUE(!strcmp(seeker.target, "result"));
			(void)block_unref(seeker.call.answer);
		}
		/* One byte more than the caller has room for. */
		pair_call_init(&seeker.call, NULL, 0, NULL, 31);
		seeker.call.call.find_target = find_target;
		pair_call_begin(pair, &seeker.call);
		receive_call(pair, fd, &asked);
		result_header(&answer.header, asked.cookie, 32);
		raw_send(pair, fd, &answer, sizeof(answer));
		PAIR_UNTIL(pair, pair->a.n_lost);
		ASSERT_EQ(seeker.n_asked, 2);
		ASSERT_EQ(seeker.call.n_done, 1);
		fd_close(fd);
	}
}

/* An errno from outside is not believed blindly. */
TEST(an_error_number_out_of_range)
{
	int fd;
	_cleanup_(pair_freep) struct pair *pair = caller_new(&variants[0], &fd);
	struct data_header asked, answer;
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	receive_call(pair, fd, &asked);
	result_header(&answer, asked.cookie, 0);
	answer.op = DATA_ERROR;
	answer.status = INT32_MAX;
	raw_send(pair, fd, &answer, sizeof(answer));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -EREMOTEIO);
	ASSERT_TRUE(*call.call.text);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->a.n_lost);
}

/* One lane of several breaks, with a call that nobody can make again: all calls of the peer end, those on other lanes too. */
TEST(one_lane_of_four_breaks)
{
	for (unsigned n_threads = 0; n_threads <= 2; n_threads++) {
		struct pair_variant variant = { "tcp", false, n_threads, 4 };
		_cleanup_(pair_freep) struct pair *pair = pair_new(&variant);
		struct pair_call calls[16];
		struct lane *lane;
		int fd;

		/* Each lane has a call at the server, then one is cut underneath. */
		PAIR_UNTIL(pair, peer_has_lane(pair->peer, 0) && peer_has_lane(pair->peer, 1) &&
					 peer_has_lane(pair->peer, 2) &&
					 peer_has_lane(pair->peer, 3));
		lane = peer_find_lane(pair->peer, 3);
		fd = lane->source.fd; /* its thread's; which gets its calls after we have looked */
		for (unsigned i = 0; i < ARRAY_SIZE(calls); i++) {
			pair_call_init(&calls[i], NULL, 0, NULL, 0);
			pair_call_begin(pair, &calls[i]);
		}
		PAIR_UNTIL(pair, pair->b.n_deliveries == ARRAY_SIZE(calls));
		for (unsigned i = 0; i < 4; i++)
			ASSERT_INT(peer_find_lane(pair->peer, i)->n_business, >, 0);
		ASSERT_OK(shutdown(fd, SHUT_RDWR));
		PAIR_UNTIL(pair, pair->a.n_lost && pair->b.n_lost);
		for (unsigned i = 0; i < ARRAY_SIZE(calls); i++) {
			ASSERT_EQ(calls[i].n_done, 1);
			ASSERT_EQ(calls[i].call.status, -ECONNRESET);
		}
		ASSERT_EQ(pair->a.n_lost, 1);
		ASSERT_EQ(pair->b.n_lost, 1);
	}
}

/* What the other side has not said that it knows is not said to it; what is of calls, to nobody. */
TEST(answers_have_the_flags_that_both_sides_know)
{
	static const uint64_t features[] = { DATA_FEATURE_NONE, DATA_FEATURE_KEPT };

	for (size_t i = 0; i < ARRAY_SIZE(features); i++) {
		_cleanup_(pair_freep) struct pair *pair =
			server_new(&(struct pair_variant){ 0 }, 0);
		struct data_header header, answer;
		struct delivery *delivery;
		int fd = raw_shake_with(pair, transport_port(pair->b.transport), NULL, 5, 0,
					features[i]);

		raw_push_header(&header, 1, 0);
		data_header_encode(&header);
		raw_send(pair, fd, &header, sizeof(header));
		delivery = pair_take(pair);
		answer = delivery->header;
		answer.op = DATA_RESULT;
		answer.flags = DATA_FLAG_KEPT | DATA_FLAG_AGAIN;
		delivery_answer(delivery, &answer, NULL, NULL);
		ASSERT_EQ(raw_receive(pair, fd, &answer, sizeof(answer)), sizeof(answer));
		data_header_decode(&answer);
		ASSERT_EQ(answer.op, DATA_RESULT);
		ASSERT_EQ(answer.flags, features[i] ? DATA_FLAG_KEPT : 0);
		fd_close(fd);
		PAIR_UNTIL(pair, pair->b.n_lost);
	}
}
