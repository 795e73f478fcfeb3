/* Connecting: servers that are late, wrong, or not there. */
#include "transport_pair.h"

#include "transport/common/address.h"
#include "transport/peer/peer.h"
#include <netinet/tcp.h>

#define SERVER_ID 77 /* of servers made of bytes */

static struct pair *caller_new(struct pair_config config)
{
	return pair_new_alone(&config);
}

static struct peer *connect_to(struct pair *pair, uint16_t port, uint64_t expect_id)
{
	struct peer *peer;
	char address[64];

	(void)snprintf(address, sizeof(address), "127.0.0.1:%u", port);
	ASSERT_OK(transport_connect(pair->a.transport, address, expect_id, &peer));
	pair->peer = peer;
	return peer;
}

TEST_FULL_TIER(nobody_there, "a deadline of 1.5 s, within which the first attempt must have failed")
{
	_cleanup_(pair_freep) struct pair *pair = caller_new(
		(struct pair_config){ .handshake_timeout_ms = 1500, .variant.n_lanes = 3 });
	struct data_header header = { .op = DATA_LEAVE };
	_cleanup_(fd_closep) int reserved = -1;
	struct pair_call calls[2];
	uint16_t port;
	char name[64];

	reserved = raw_reserve(&port);
	(void)snprintf(name, sizeof(name), "%s", peer_name(connect_to(pair, port, 0)));
	for (unsigned i = 0; i < 2; i++) {
		pair_call_init(&calls[i], NULL, 0, NULL, 0);
		pair_call_begin(pair, &calls[i]);
	}
	ASSERT_OK(peer_notice(pair->peer, &header, NULL));
	PAIR_UNTIL(pair, pair->a.n_lost);
	for (unsigned i = 0; i < 2; i++) {
		ASSERT_EQ(calls[i].n_done, 1);
		ASSERT_EQ(calls[i].n_sent, 0);
		ASSERT_EQ(calls[i].call.status, -ECONNREFUSED);
		ASSERT_CONTAINS(calls[i].call.text, name);
		ASSERT_CONTAINS(calls[i].call.text, "Connection refused (tried for 1500 ms)");
	}
	ASSERT_EQ(pair->a.n_lost, 1);
}

static void start_server(struct pair *pair, uint16_t port, const char *key, unsigned n_lanes)
{
	struct pair_config config = { .key_b = key, .variant.n_lanes = n_lanes };
	struct transport_params params;
	char listen_on[64];

	pair_params(pair, &config, &pair->b, &params);
	(void)snprintf(listen_on, sizeof(listen_on), "127.0.0.1:%u", port);
	params.listen = listen_on;
	ASSERT_OK(transport_new(&params, &pair->b.transport));
	pair->server = &pair->b;
}

/* What was asked for meanwhile is not lost. */
TEST(a_server_that_starts_later)
{
	_cleanup_(pair_freep) struct pair *pair =
		caller_new((struct pair_config){ .variant.n_lanes = 4 });
	struct data_header header = { .op = DATA_LEAVE };
	_cleanup_(fd_closep) int reserved = -1;
	struct pair_call call;
	uint16_t port;

	reserved = raw_reserve(&port);
	connect_to(pair, port, 0);
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	ASSERT_OK(peer_notice(pair->peer, &header, NULL));
	for (unsigned i = 0; i < 5; i++)
		pair_turn(pair);
	start_server(pair, port, NULL, 1);
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, call.n_done && pair->b.n_notices);
	ASSERT_OK(call.call.status);
	ASSERT_CONTAINS(peer_name(pair->peer), "node b (127.0.0.1:");
}

TEST(connecting_twice_is_one_peer)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_new(&(struct pair_variant){ "tcp", false, 0, 2 });
	struct pair_call call;
	struct peer *peer;

	ASSERT_OK(transport_connect(pair->a.transport, pair->address, 0, &peer));
	ASSERT_TRUE(peer == pair->peer);
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, peer_id(peer), &peer));
	ASSERT_TRUE(peer == pair->peer);
	/* Another daemon is wanted there: that is another peer, whose connect fails. */
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, 12345, &peer));
	ASSERT_TRUE(peer != pair->peer);
	PAIR_UNTIL(pair, pair->a.n_lost);
	ASSERT_TRUE(pair->a.lost_peer == peer);
	ASSERT_CONTAINS(pair->a.lost_why, "another daemon (node b)");
}

TEST(after_a_loss_it_connects_anew)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_new(&(struct pair_variant){ "tcp", false, 1, 2 });
	struct pair_call call;
	struct peer *killed;

	for (unsigned i = 0; i < 3; i++) {
		ASSERT_OK(transport_connect(pair->a.transport, pair->address, 0, &pair->peer));
		pair_call_init(&call, NULL, 0, NULL, 0);
		pair_call_begin(pair, &call);
		pair_echo(pair, pair_take(pair));
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
		killed = pair->peer;
		peer_kill(killed, "again");
		/* Not the one that is about to be lost. */
		ASSERT_OK(transport_connect(pair->a.transport, pair->address, 0, &pair->peer));
		ASSERT_TRUE(pair->peer != killed);
		PAIR_UNTIL(pair, pair->a.n_lost == i + 1);
	}
	PAIR_UNTIL(pair, pair->b.n_lost == 3);
}

/* Both sides say so, and at once: the time limit is longer than the test's. */
TEST(keys_that_differ)
{
	static const struct {
		const char *a, *b;
	} keys[] = { { "one", "two" }, { NULL, "two" }, { "one", NULL } };

	for (unsigned i = 0; i < ARRAY_SIZE(keys); i++) {
		_cleanup_(pair_freep) struct pair *pair = pair_new_with(&(struct pair_config){
			.key_a = keys[i].a, .key_b = keys[i].b, .variant.n_lanes = 2 });
		struct pair_call call;

		pair_call_init(&call, NULL, 0, NULL, 0);
		pair_call_begin(pair, &call);
		PAIR_UNTIL(pair, pair->a.n_lost);
		ASSERT_EQ(call.call.status, -EKEYREJECTED);
		ASSERT_CONTAINS(call.call.text, "the cluster keys differ");
		ASSERT_EQ(pair->b.n_lost, 0);
	}
}

TEST(the_same_key)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_new_with(&(struct pair_config){ .key_a = "the key", .key_b = "the key" });

	pair_settle(pair);
}

static void begin_call_to(struct pair *pair, struct pair_call *call, uint16_t port)
{
	connect_to(pair, port, 0);
	pair_call_init(call, NULL, 0, NULL, 0);
	pair_call_begin(pair, call);
}

TEST(a_server_of_another_version)
{
	_cleanup_(pair_freep) struct pair *pair = caller_new((struct pair_config){ 0 });
	_cleanup_(fd_closep) int listener = -1, fd = -1;
	struct data_hello hello;
	struct pair_call call;
	uint16_t port;

	listener = raw_listen(&port);
	begin_call_to(pair, &call, port);
	fd = raw_accept(pair, listener);
	raw_hello(&hello, SERVER_ID, 0);
	hello.version = 9;
	hello.version_min = 8;
	raw_send(pair, fd, &hello, sizeof(hello));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -EPROTONOSUPPORT);
	ASSERT_CONTAINS(call.call.text,
			"speaks versions 8 to 9 of the data protocol, we speak 3 to 3");
	PAIR_UNTIL(pair, pair->a.n_lost);
}

TEST(not_a_daemon)
{
	_cleanup_(pair_freep) struct pair *pair = caller_new((struct pair_config){ 0 });
	_cleanup_(fd_closep) int listener = -1, fd = -1;
	struct pair_call call;
	uint16_t port;

	listener = raw_listen(&port);
	begin_call_to(pair, &call, port);
	fd = raw_accept(pair, listener);
	raw_send(pair, fd, "220 smtp.example ESMTP\r\n", 24);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -EPROTO);
	ASSERT_CONTAINS(call.call.text, "does not speak the data protocol");
}

/* It accepts (the kernel does) and says nothing. */
TEST_FULL_TIER(a_server_that_stays_silent,
	       "a deadline of 1.5 s, within which it must have connected")
{
	_cleanup_(pair_freep) struct pair *pair =
		caller_new((struct pair_config){ .handshake_timeout_ms = 1500 });
	_cleanup_(fd_closep) int listener = -1;
	struct pair_call call;
	uint16_t port;

	listener = raw_listen(&port);
	begin_call_to(pair, &call, port);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -ETIMEDOUT);
	ASSERT_CONTAINS(call.call.text, "did not finish the handshake in time");
}

/* It closes each connection (it may be full): tried again until it takes one. */
TEST(a_server_that_closes_is_tried_again)
{
	_cleanup_(pair_freep) struct pair *pair = caller_new((struct pair_config){ 0 });
	_cleanup_(fd_closep) int listener = -1, fd = -1;
	struct pair_call call;
	struct data_header header;
	uint16_t port;

	listener = raw_listen(&port);
	begin_call_to(pair, &call, port);
	for (unsigned i = 0; i < 3; i++)
		fd_close(raw_accept(pair, listener));
	fd = raw_accept(pair, listener);
	raw_shake_accepted(pair, fd, NULL, SERVER_ID);
	ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
	ASSERT_EQ(peer_id(pair->peer), SERVER_ID);
	ASSERT_TRUE(header.cookie != 0);
}

/* Fewer lanes than wished for are better than none. */
TEST_FULL_TIER(a_server_with_room_for_one_lane, "a deadline of 1.5 s that the first lane must meet")
{
	struct pair_config config = {
		.handshake_timeout_ms = 1500,
		.max_connections = 1,
		.variant = { "tcp", false, 0, 3 },
	};
	_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, call.n_done);
	/* Until the other two have given up. */
	PAIR_UNTIL(pair, !pair->peer->dial);
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	ASSERT_EQ(pair->a.n_lost, 0);
}

TEST(a_name_is_resolved)
{
	_cleanup_(pair_freep) struct pair *pair = caller_new((struct pair_config){ 0 });
	struct pair_call call;
	char address[64];

	start_server(pair, 0, NULL, 1);
	(void)snprintf(address, sizeof(address), "localhost:%u", transport_port(pair->b.transport));
	ASSERT_OK(transport_connect(pair->a.transport, address, 0, &pair->peer));
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
}

/* A label of a name has 63 characters at most: no name server needs to be asked about this one. */
TEST_FULL_TIER(a_name_that_cannot_exist,
	       "a deadline of 1.5 s, within which the resolver must have answered")
{
	_cleanup_(pair_freep) struct pair *pair =
		caller_new((struct pair_config){ .handshake_timeout_ms = 1500 });
	struct pair_call call;
	char address[80];

	memset(address, 'x', 70);
	(void)strcpy(address + 70, ".test:1");
	ASSERT_OK(transport_connect(pair->a.transport, address, 0, &pair->peer));
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_EQ(call.call.status, -EHOSTUNREACH);
	ASSERT_CONTAINS(call.call.text, address);
	ASSERT_CONTAINS(call.call.text, "(tried for 1500 ms)");
}

TEST(what_is_no_address)
{
	_cleanup_(pair_freep) struct pair *pair = caller_new((struct pair_config){ 0 });
	struct peer *peer = NULL;

	ASSERT_EQ(transport_connect(pair->a.transport, "no-port", 0, &peer), -EINVAL);
	ASSERT_EQ(transport_connect(pair->a.transport, "fd00::1:99", 0, &peer), -EINVAL);
	ASSERT_TRUE(!peer);
}

/* In the middle of connecting, resolving, shaking hands. */
TEST(closing_while_connecting)
{
	_cleanup_(fd_closep) int listener = -1;
	uint16_t port;

	listener = raw_listen(&port);
	for (unsigned n_turns = 0; n_turns < 6; n_turns++) {
		_cleanup_(pair_freep) struct pair *pair =
			caller_new((struct pair_config){ .variant.n_lanes = 2 });
		struct pair_call call[3];
		struct peer *peers[3];
		char address[64];

		(void)snprintf(address, sizeof(address), "127.0.0.1:%u", port);
		ASSERT_OK(transport_connect(pair->a.transport, address, 0, &peers[0]));
		ASSERT_OK(transport_connect(pair->a.transport, "localhost:9", 0, &peers[1]));
		ASSERT_OK(transport_connect(pair->a.transport, "127.0.0.1:1", 0, &peers[2]));
		for (unsigned i = 0; i < 3; i++) {
			pair_call_init(&call[i], NULL, 0, NULL, 0);
			peer_call(peers[i], &call[i].call);
		}
		for (unsigned i = 0; i < n_turns; i++)
			ASSERT_OK(loop_turn(pair->loop, 0));
		transport_close(pair->a.transport);
		for (unsigned i = 0; i < 3; i++) {
			ASSERT_EQ(call[i].n_done, 1);
			ASSERT_EQ(call[i].call.status, -ESHUTDOWN);
		}
	}
}

TEST(killed_while_connecting)
{
	_cleanup_(pair_freep) struct pair *pair = caller_new((struct pair_config){ 0 });
	_cleanup_(fd_closep) int reserved = -1;
	struct pair_call call;
	uint16_t port;

	reserved = raw_reserve(&port);
	begin_call_to(pair, &call, port);
	peer_kill(pair->peer, "never mind");
	PAIR_UNTIL(pair, pair->a.n_lost);
	ASSERT_EQ(call.n_done, 1);
	ASSERT_EQ(call.call.status, -ECONNRESET);
	ASSERT_CONTAINS(call.call.text, "never mind");
}

/* Both ends of what stands: connected TCP sockets among our descriptors. */
static unsigned count_connections(const char *congestion)
{
	unsigned n = 0;

	for (int fd = 3; fd < 1024; fd++) {
		struct address address = { .len = sizeof(address.storage) };
		socklen_t len = 64;
		char name[64];

		if (getpeername(fd, &address.any, &address.len) < 0 ||
		    getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len) < 0)
			continue;
		ASSERT_STR(name, congestion);
		n++;
	}
	return n;
}

TEST(connections_over_the_loopback_are_not_paced)
{
	_cleanup_(pair_freep) struct pair *pair =
		pair_new(&(struct pair_variant){ .name = "tcp", .n_lanes = 3 });
	struct pair_call call;
	char target[1];

	pair->server->on_call = pair_on_call_echo;
	pair_call_init(&call, "x", 1, target, 1);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done && count_connections("reno") >= 6);
}

TEST(a_congestion_control_that_the_kernel_does_not_have)
{
	_cleanup_(pair_freep) struct pair *pair = caller_new((struct pair_config){ 0 });
	struct pair_config config = { .variant.n_lanes = 1 };
	struct transport_params params;

	pair_params(pair, &config, &pair->b, &params);
	params.congestion = "no-such-one";
	ASSERT_EQ(transport_new(&params, &pair->b.transport), -ENOENT);
}
