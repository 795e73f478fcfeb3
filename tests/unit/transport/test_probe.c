/* How fast a link is, told by bytes that mean nothing: what follows from when they came, and peers that spoil it. */
#include "transport_pair.h"

#include "base/clock.h"
#include "transport/internal.h"
#include "transport/tcp/handshake.h"

#define MS	   NSEC_PER_MSEC
#define US	   (NSEC_PER_MSEC / 1000)
#define SERVER_ID  77 /* of servers made of bytes */
#define MIN_PIECES 32

/* -- When they came -------------------------------------------------------------------------------------------------- */

/* n more pieces, each so long after the one before. */
static void come(struct probe *probe, unsigned n, uint64_t each_ns)
{
	for (unsigned i = 0; i < n; i++) {
		uint64_t before_ns = probe->n ? probe->at_ns[probe->n - 1] : 1000 * MS;

		probe->at_ns[probe->n++] = before_ns + each_ns;
	}
}

TEST(pieces_that_come_evenly)
{
	for (unsigned n = MIN_PIECES; n <= DATA_PROBE_PIECES; n++) {
		struct probe probe = { 0 };

		come(&probe, n, MS);
		ASSERT_EQ(probe_bytes_s(&probe, 10 * US), DATA_PROBE_LEN * 1000);
	}
}

TEST(too_few_tell_nothing)
{
	for (unsigned n = 0; n < MIN_PIECES; n++) {
		struct probe probe = { 0 };

		come(&probe, n, MS);
		ASSERT_EQ(probe_bytes_s(&probe, 0), 0);
	}
}

/* A shaper that was idle lets them through, or the connection has still to get up to speed. */
TEST(the_first_half_does_not_count)
{
	static const uint64_t each_ns[] = { 1, 100 * MS };

	for (unsigned i = 0; i < ARRAY_SIZE(each_ns); i++) {
		struct probe probe = { 0 };

		come(&probe, DATA_PROBE_PIECES / 2, each_ns[i]);
		come(&probe, DATA_PROBE_PIECES / 2, MS);
		ASSERT_EQ(probe_bytes_s(&probe, 0), DATA_PROBE_LEN * 1000);
	}
}

/* In front of any piece nothing comes for a while, and then what the shaper had saved meanwhile. */
TEST(a_pause_does_not_count)
{
	for (unsigned at = 0; at < DATA_PROBE_PIECES - 16; at++) {
		struct probe probe = { 0 };

		come(&probe, at, MS);
		come(&probe, 1, 30 * MS);
		come(&probe, 15, 1);
		come(&probe, DATA_PROBE_PIECES - probe.n, MS);
		ASSERT_EQ(probe_bytes_s(&probe, 0), DATA_PROBE_LEN * 1000);
	}
}

/* Whoever sends could not run, before any piece or between any two that count, and then a shaper lets through what it saved. */
TEST(what_came_at_once_after_a_standstill_is_as_fast_as_with_that)
{
	for (unsigned at = 1; at < MIN_PIECES; at++) {
		struct probe probe = { 0 };

		come(&probe, at, MS);
		come(&probe, 1, 60 * MS);
		come(&probe, MIN_PIECES - probe.n, US);
		ASSERT_INT(probe_bytes_s(&probe, 50 * US), <=, DATA_PROBE_LEN * 1000);
		ASSERT_INT(probe_bytes_s(&probe, 50 * US), >, DATA_PROBE_LEN * 100);
	}
}

/* Four at a time, as systems put packets together. */
TEST(pieces_that_come_together)
{
	struct probe probe = { 0 };

	for (unsigned i = 0; i < DATA_PROBE_PIECES / 4; i++) {
		come(&probe, 1, 4 * MS);
		come(&probe, 3, 0);
	}
	ASSERT_EQ(probe_bytes_s(&probe, 0), DATA_PROBE_LEN * 1000);
}

TEST(what_acknowledgements_hold_up_tells_nothing)
{
	struct probe probe = { 0 };

	come(&probe, DATA_PROBE_PIECES, MS);
	ASSERT_EQ(probe_bytes_s(&probe, 10 * MS), DATA_PROBE_LEN * 1000);
	ASSERT_EQ(probe_bytes_s(&probe, 20 * MS), 0);
	ASSERT_EQ(probe_bytes_s(&probe, UINT32_MAX * UINT64_C(1000)), 0);
	/* But where it is very fast nevertheless. */
	probe.n = 0;
	come(&probe, DATA_PROBE_PIECES, US);
	ASSERT_EQ(probe_bytes_s(&probe, 20 * MS), DATA_PROBE_LEN * UINT64_C(1000000));
}

TEST(clocks_that_are_set)
{
	struct probe probe = { 0 };

	come(&probe, DATA_PROBE_PIECES, 0);
	ASSERT_INT(probe_bytes_s(&probe, 0), >=, DATA_PROBE_LEN * NSEC_PER_SEC);
	for (unsigned i = 0; i < DATA_PROBE_PIECES; i++)
		probe.at_ns[i] = UINT64_MAX - i;
	(void)probe_bytes_s(&probe, 0);
	for (unsigned i = 0; i < DATA_PROBE_PIECES; i++)
		probe.at_ns[i] = i % 2 ? UINT64_MAX : 0;
	(void)probe_bytes_s(&probe, UINT64_MAX);
	probe.n = 0;
	come(&probe, 100, MS);
	probe.at_ns[80] -= 1000 * MS;
	ASSERT_EQ(probe_bytes_s(&probe, 0), DATA_PROBE_LEN * 1000);
	probe.lasted_ns = 100 * MS;
	ASSERT_EQ(probe_bytes_s(&probe, 0), DATA_PROBE_LEN * 1000);
	for (unsigned i = 50; i < 100; i++)
		probe.at_ns[i] += 2000 * MS;
	ASSERT_EQ(probe_bytes_s(&probe, 10 * US), 0);
}

/* -- Two transports --------------------------------------------------------------------------------------------------- */

static void probes_on(struct transport_params *params)
{
	params->probes = TRANSPORT_PROBES_ON;
}

static void probes_auto(struct transport_params *params)
{
	params->probes = TRANSPORT_PROBES_AUTO;
}

static uint64_t known(const struct pair_side *side)
{
	return transport_bytes_s(side->transport);
}

/* While one asks, each packet of the machine is stamped. */
static bool any_asks_for_stamps(void)
{
	for (int fd = 0; fd < 1024; fd++) {
		int asked = 0;
		socklen_t len = sizeof(asked);

		if (!getsockopt(fd, SOL_SOCKET, SO_TIMESTAMPING, &asked, &len) && asked)
			return true;
	}
	return false;
}

/* However many connections: the first is there before the others are. Where this machine is slow, acknowledgements hide it: again. */
TEST(it_is_known_before_anything_is_said)
{
	for (unsigned i = 0; i < 4;) {
		struct pair_config config = {
			.variant = { "tcp", false, i % 2, i / 2 ? 4 : 1 },
			.adjust = probes_on,
		};
		_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);
		struct pair_call call;

		peer_offer_probe(pair->peer);
		pair_call_init(&call, NULL, 0, NULL, 0);
		pair_call_begin(pair, &call);
		pair_echo(pair, pair_take(pair));
		i += known(&pair->b) > 0;
		ASSERT_TRUE(!any_asks_for_stamps());
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
		ASSERT_EQ(known(&pair->a), 0);
		pair_settle(pair);
	}
}

TEST(who_does_not_offer_is_not_asked)
{
	struct pair_config config = { .variant = { "tcp", false, 0, 1 }, .adjust = probes_on };
	_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);

	pair_settle(pair);
	ASSERT_EQ(known(&pair->b), 0);
}

TEST(who_does_not_want_one_gets_none)
{
	void (*const adjust[])(struct transport_params *) = { NULL, probes_auto };

	for (unsigned i = 0; i < ARRAY_SIZE(adjust); i++) {
		struct pair_config config = { .variant = { "tcp", false, 0, 1 },
					      .adjust = adjust[i] };
		_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);

		peer_offer_probe(pair->peer);
		pair_settle(pair);
		ASSERT_EQ(known(&pair->b), 0);
	}
}

/* -- Those that send one, made of bytes -------------------------------------------------------------------------------- */

static const unsigned char last = DATA_PROBE_LAST;

static struct pair *server_new(uint64_t handshake_timeout_ms)
{
	struct pair_config config = {
		.variant = { "tcp", false, 0, 1 },
		.handshake_timeout_ms = handshake_timeout_ms,
		.adjust = probes_on,
	};

	return pair_new_serving(&config);
}

static int shake(struct pair *pair, uint64_t sender)
{
	return raw_shake_with(pair, transport_port(pair->b.transport), NULL, sender, 0,
			      DATA_FEATURE_PROBE);
}

static void send_pieces(struct pair *pair, int fd, unsigned n)
{
	static const unsigned char piece[DATA_PROBE_LEN] = { DATA_PROBE_MORE };

	for (unsigned i = 0; i < n; i++)
		raw_send(pair, fd, piece, sizeof(piece));
}

static void expect_answered(struct pair *pair, int fd)
{
	struct data_header header;

	raw_push_header(&header, 1, 0);
	raw_send(pair, fd, &header, sizeof(header));
	pair_echo(pair, pair_take(pair));
	ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
	ASSERT_EQ(header.op, DATA_RESULT);
}

static void expect_last(struct pair *pair, int fd)
{
	unsigned char byte = 0;

	ASSERT_EQ(raw_receive(pair, fd, &byte, 1), 1);
	ASSERT_EQ(byte, DATA_PROBE_LAST);
}

static void expect_closed(struct pair *pair, int fd)
{
	char byte;

	ASSERT_EQ(raw_receive(pair, fd, &byte, 1), 0);
	fd_close(fd);
}

static void expect_asked(struct pair *pair)
{
	PAIR_UNTIL(pair, pair->b.transport->probing);
}

/* Too few tell nothing: the next is asked, too. */
TEST(any_number_of_pieces)
{
	static const unsigned too_few[] = { 0, 1, MIN_PIECES - 1 };
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	unsigned n;

	for (n = 0; !known(&pair->b); n++) {
		int fd = shake(pair, 10 + n);

		send_pieces(pair, fd, n < ARRAY_SIZE(too_few) ? too_few[n] : MIN_PIECES);
		raw_send(pair, fd, &last, 1);
		expect_last(pair, fd);
		expect_answered(pair, fd);
		fd_close(fd);
		PAIR_UNTIL(pair, pair->b.n_lost == n + 1);
	}
	ASSERT_INT(n, >, ARRAY_SIZE(too_few));
	ASSERT_TRUE(!pair->b.transport->probing);
}

TEST(pieces_that_come_in_small_ones)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	static unsigned char bytes[MIN_PIECES * DATA_PROBE_LEN + 1];

	for (unsigned i = 0; i < MIN_PIECES; i++)
		bytes[i * DATA_PROBE_LEN] = DATA_PROBE_MORE;
	bytes[sizeof(bytes) - 1] = DATA_PROBE_LAST;
	for (unsigned n = 0; !known(&pair->b); n++) {
		int fd = shake(pair, 10 + n);

		for (size_t at = 0; at < sizeof(bytes); at += 4999) {
			raw_send(pair, fd, bytes + at, MIN(sizeof(bytes) - at, 4999u));
			pair_turn(pair);
		}
		expect_last(pair, fd);
		expect_answered(pair, fd);
		fd_close(fd);
		PAIR_UNTIL(pair, pair->b.n_lost == n + 1);
	}
}

TEST(more_than_there_may_be)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	int fd = shake(pair, 10);

	send_pieces(pair, fd, DATA_PROBE_PIECES + 1);
	expect_closed(pair, fd);
	ASSERT_EQ(known(&pair->b), 0);
	ASSERT_TRUE(!pair->b.transport->probing);
}

TEST(other_bytes)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	struct data_header header;
	int fd = shake(pair, 10);

	send_pieces(pair, fd, 3);
	raw_push_header(&header, 1, 0);
	raw_send(pair, fd, &header, sizeof(header));
	expect_closed(pair, fd);
	ASSERT_EQ(known(&pair->b), 0);
}

/* One at a time, as they would share the link. The others are not asked meanwhile, nor do they wait. */
TEST(others_go_on_without)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	int asked = shake(pair, 10), other;
	unsigned n;

	expect_asked(pair);
	other = shake(pair, 11);
	expect_answered(pair, other);
	send_pieces(pair, asked, DATA_PROBE_PIECES / 2);
	fd_close(asked);
	PAIR_UNTIL(pair, !pair->b.transport->probing);
	ASSERT_EQ(known(&pair->b), 0);
	/* The one that was asked has died. The next is, and then nobody any more. */
	asked = -1;
	for (n = 0; !known(&pair->b); n++) {
		fd_close(asked);
		asked = shake(pair, 20 + n);
		send_pieces(pair, asked, DATA_PROBE_PIECES);
		raw_send(pair, asked, &last, 1);
		expect_last(pair, asked);
	}
	fd_close(other);
	other = shake(pair, 13);
	expect_answered(pair, other);
	fd_close(asked);
	fd_close(other);
	PAIR_UNTIL(pair, pair->b.n_lost == n + 2);
}

TEST_FULL_TIER(silence_ends_at_the_time_limit, "a deadline of 100 ms that a handshake must meet")
{
	_cleanup_(pair_freep) struct pair *pair = server_new(100);
	int fd = shake(pair, 10);

	send_pieces(pair, fd, 1);
	expect_closed(pair, fd);
	ASSERT_TRUE(!pair->b.transport->probing);
}

TEST(closing_in_the_middle)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(0);
	int fd = shake(pair, 10);

	send_pieces(pair, fd, 1);
	expect_asked(pair);
	transport_close(pair->b.transport);
	fd_close(fd);
}

/* -- Those that want one, made of bytes -------------------------------------------------------------------------------- */

static struct pair *caller_new(uint64_t handshake_timeout_ms, int *ret_listener)
{
	struct pair_config config = { .handshake_timeout_ms = handshake_timeout_ms };
	struct pair *pair = pair_new_alone(&config);
	char address[64];
	uint16_t port;

	*ret_listener = raw_listen(&port);
	(void)snprintf(address, sizeof(address), "127.0.0.1:%u", port);
	ASSERT_OK(transport_connect(pair->a.transport, address, 0, &pair->peer));
	peer_offer_probe(pair->peer);
	return pair;
}

static int accept_from(struct pair *pair, int listener, uint64_t features)
{
	int fd = raw_accept(pair, listener);

	raw_shake_accepted_with(pair, fd, NULL, SERVER_ID, features);
	return fd;
}

/* Returns how many pieces it has. */
static unsigned read_probe(struct pair *pair, int fd)
{
	static unsigned char rest[DATA_PROBE_LEN - 1];
	unsigned char byte;
	unsigned n = 0;

	for (;;) {
		ASSERT_EQ(raw_receive(pair, fd, &byte, 1), 1);
		if (byte == DATA_PROBE_LAST)
			return n;
		ASSERT_EQ(byte, DATA_PROBE_MORE);
		ASSERT_EQ(raw_receive(pair, fd, rest, sizeof(rest)), sizeof(rest));
		n++;
	}
}

static void expect_call(struct pair *pair, int fd)
{
	struct data_header header;

	ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
	ASSERT_EQ(header.op, DATA_PUSH);
}

TEST(an_old_server_is_sent_none)
{
	int listener;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, &listener);
	struct pair_call call;
	int fd = accept_from(pair, listener, DATA_FEATURE_NONE);

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	expect_call(pair, fd);
	fd_close(fd);
	fd_close(listener);
	PAIR_UNTIL(pair, call.n_done);
}

TEST(a_probe_is_bounded)
{
	int listener;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, &listener);
	struct pair_call call;
	int fd = accept_from(pair, listener, DATA_FEATURE_PROBE);
	unsigned n;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	n = read_probe(pair, fd);
	ASSERT_TRUE(n > 0 && n <= DATA_PROBE_PIECES);
	raw_send(pair, fd, &last, 1);
	expect_call(pair, fd);
	fd_close(fd);
	fd_close(listener);
	PAIR_UNTIL(pair, call.n_done);
}

/* It has its time, however little has gone then: what fits next is the last. */
TEST(on_a_slow_link_it_is_short)
{
	int listener, fd, small = 4096;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, &listener);
	uint64_t until_ns;
	char first;

	ASSERT_OK(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)));
	fd = accept_from(pair, listener, DATA_FEATURE_PROBE);
	/* It has begun. */
	PAIR_UNTIL(pair, recv(fd, &first, 1, MSG_PEEK) == 1);
	until_ns = clock_now_ns() + 600 * MS;
	while (clock_now_ns() < until_ns)
		pair_turn(pair);
	ASSERT_INT(read_probe(pair, fd), <, DATA_PROBE_PIECES);
	raw_send(pair, fd, &last, 1);
	fd_close(fd);
	fd_close(listener);
	PAIR_UNTIL(pair, pair->a.n_lost);
}

TEST(a_server_that_dies_is_tried_again)
{
	int listener;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, &listener);
	struct pair_call call;
	int fd = accept_from(pair, listener, DATA_FEATURE_PROBE);

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	fd_close(fd);
	fd = accept_from(pair, listener, DATA_FEATURE_PROBE);
	(void)read_probe(pair, fd);
	fd_close(fd);
	fd = accept_from(pair, listener, DATA_FEATURE_NONE);
	expect_call(pair, fd);
	fd_close(fd);
	fd_close(listener);
	PAIR_UNTIL(pair, call.n_done);
}

TEST_FULL_TIER(a_server_that_says_nothing, "a deadline of 300 ms that a handshake must meet")
{
	int listener;
	_cleanup_(pair_freep) struct pair *pair = caller_new(300, &listener);
	struct pair_call call;
	int fd;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	fd = accept_from(pair, listener, DATA_FEATURE_PROBE);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ETIMEDOUT);
	fd_close(fd);
	fd_close(listener);
}

TEST(a_server_that_answers_with_another_byte)
{
	int listener;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, &listener);
	struct pair_call call;
	int fd = accept_from(pair, listener, DATA_FEATURE_PROBE);

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	(void)read_probe(pair, fd);
	raw_send(pair, fd, "x", 1);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -EPROTO);
	ASSERT_CONTAINS(call.call.text, "answered a probe with another byte");
	fd_close(fd);
	fd_close(listener);
}
