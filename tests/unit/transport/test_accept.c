/* Strangers, and daemons that do not fit, at the data port. */
#include "transport_pair.h"

#include "transport/internal.h"
#include "transport/peer/peer.h"
#include "transport/tcp/handshake.h"
#include <linux/socket.h>

static struct pair *server_new(struct pair_config config)
{
	struct pair *pair;

	config.variant = (struct pair_variant){ "tcp", false, 0, 1 };
	pair = pair_new_with(&config);
	return pair;
}

static uint16_t port_of(const struct pair *pair)
{
	return transport_port(pair->b.transport);
}

static void expect_closed(struct pair *pair, int fd)
{
	char rest[1000];

	while (raw_receive(pair, fd, rest, sizeof(rest)) == sizeof(rest))
		;
	fd_close(fd);
}

/* Refused at once, not after the time limit, which is longer than the test's. */
TEST(strangers_are_closed_at_once)
{
	static const char *const words[] = {
		"GET / HTTP/1.1\r\n\r\n",
		"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a client hello of TLS",
		"SSH-2.0-OpenSSH_9.2\r\n",
		"BPS0",
	};
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });

	pair_settle(pair);
	for (unsigned i = 0; i < ARRAY_SIZE(words); i++) {
		int fd = raw_connect(pair, port_of(pair));

		raw_send(pair, fd, words[i], strlen(words[i]));
		expect_closed(pair, fd);
	}
	pair_settle(pair);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

TEST(silence_ends_at_the_time_limit)
{
	struct pair_config patient = { 0 }, config = { .handshake_timeout_ms = 8000 };
	_cleanup_(pair_freep) struct pair *pair = pair_new_alone(&patient);
	struct data_hello hello;
	int silent, half, unproved;

	/* Long enough for the caller's handshake on a machine that stands still for a while: a server that refuses it is lost. */
	pair_serve(pair, &config);
	pair_settle(pair);
	raw_hello(&hello, 5, 0);
	silent = raw_connect(pair, port_of(pair));
	half = raw_connect(pair, port_of(pair));
	raw_send(pair, half, &hello, sizeof(hello) / 2);
	unproved = raw_connect(pair, port_of(pair));
	raw_send(pair, unproved, &hello, sizeof(hello));
	expect_closed(pair, silent);
	expect_closed(pair, half);
	expect_closed(pair, unproved);
	pair_settle(pair);
}

/* One that goes in the middle of its handshake, after each number of bytes. */
TEST(handshakes_cut_short)
{
	_cleanup_(pair_freep) struct pair *pair =
		server_new((struct pair_config){ .max_connections = 3 });
	struct data_hello hello;

	pair_settle(pair);
	raw_hello(&hello, 5, 0);
	for (size_t len = 0; len <= sizeof(hello); len++) {
		int fd = raw_connect(pair, port_of(pair));

		raw_send(pair, fd, &hello, len);
		ASSERT_OK(shutdown(fd, SHUT_WR));
		expect_closed(pair, fd);
	}
	pair_settle(pair);
}

/* Byte by byte is slow, not wrong. */
TEST(a_handshake_in_small_pieces)
{
	_cleanup_(pair_freep) struct pair *pair = server_new(
		(struct pair_config){ .key_a = "k", .key_b = "k", .no_checksums = true });
	struct data_hello mine, theirs;
	struct data_header header;
	unsigned char proof[DATA_PROOF_LEN];
	int fd = raw_connect(pair, port_of(pair));

	pair_settle(pair);
	raw_hello(&mine, 5, 0);
	for (size_t i = 0; i < sizeof(mine); i++) {
		raw_send(pair, fd, (char *)&mine + i, 1);
		pair_turn(pair);
	}
	ASSERT_EQ(raw_receive(pair, fd, &theirs, sizeof(theirs)), sizeof(theirs));
	ASSERT_OK(handshake_prove("k", 1, "bps-client", &mine, &theirs, proof));
	for (size_t i = 0; i < sizeof(proof); i++) {
		raw_send(pair, fd, proof + i, 1);
		pair_turn(pair);
	}
	raw_push_header(&header, 1, 0);
	raw_send(pair, fd, &header, sizeof(header));
	pair_echo(pair, pair_take(pair));
	ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
	ASSERT_EQ(header.op, DATA_RESULT);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* It is told our versions, so that it can name both. */
TEST(another_version_gets_our_hello)
{
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });
	struct data_hello hello;
	int fd;

	pair_settle(pair);
	raw_hello(&hello, 5, 0);
	hello.version = 9;
	hello.version_min = 8;
	fd = raw_connect(pair, port_of(pair));
	raw_send(pair, fd, &hello, 8); /* its hello may be shorter than ours */
	ASSERT_EQ(raw_receive(pair, fd, &hello, sizeof(hello)), sizeof(hello));
	ASSERT_EQ(hello.magic, DATA_MAGIC);
	ASSERT_EQ(hello.version, DATA_VERSION);
	ASSERT_EQ(hello.version_min, DATA_VERSION_MIN);
	expect_closed(pair, fd);
	pair_settle(pair);
}

TEST(a_hello_with_a_bad_name)
{
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });
	struct data_hello hello;
	int fd;

	pair_settle(pair);
	raw_hello(&hello, 5, 0);
	memset(hello.name, 'x', sizeof(hello.name));
	fd = raw_connect(pair, port_of(pair));
	raw_send(pair, fd, &hello, sizeof(hello));
	expect_closed(pair, fd);
	pair_settle(pair);
}

TEST(a_wrong_proof)
{
	_cleanup_(pair_freep) struct pair *pair =
		server_new((struct pair_config){ .key_a = "right", .key_b = "right" });
	struct data_hello mine, theirs;
	unsigned char proof[DATA_PROOF_LEN];
	int fd;

	pair_settle(pair);
	fd = raw_connect(pair, port_of(pair));
	raw_hello(&mine, 5, 0);
	raw_send(pair, fd, &mine, sizeof(mine));
	ASSERT_EQ(raw_receive(pair, fd, &theirs, sizeof(theirs)), sizeof(theirs));
	ASSERT_OK(handshake_prove("wrong", 5, "bps-client", &mine, &theirs, proof));
	raw_send(pair, fd, proof, sizeof(proof));
	expect_closed(pair, fd);

	/* The server's own proof sent back is not one either. */
	fd = raw_connect(pair, port_of(pair));
	raw_send(pair, fd, &mine, sizeof(mine));
	ASSERT_EQ(raw_receive(pair, fd, &theirs, sizeof(theirs)), sizeof(theirs));
	raw_send(pair, fd, theirs.proof, sizeof(theirs.proof));
	expect_closed(pair, fd);
	pair_settle(pair);
	ASSERT_EQ(pair->b.n_lost, 0);
}

/* Our end of a raw connection. */
static int accepted(int raw)
{
	struct sockaddr_in mine, theirs;
	socklen_t len = sizeof(mine);

	ASSERT_OK(getsockname(raw, (struct sockaddr *)&mine, &len));
	for (int fd = 0; fd < 1024; fd++) {
		len = sizeof(theirs);
		if (!getpeername(fd, (struct sockaddr *)&theirs, &len) &&
		    theirs.sin_family == AF_INET && theirs.sin_port == mine.sin_port)
			return fd;
	}
	return -1;
}

static int option_of(int fd, int option)
{
	socklen_t len = sizeof(int);
	int value = -1;

	ASSERT_OK(getsockopt(fd, SOL_SOCKET, option, &value, &len));
	return value;
}

/* Whoever is there may send what it likes: the kernel holds little of that before the proof, and as much as it likes after it. */
TEST(little_is_held_of_strangers)
{
	_cleanup_(pair_freep) struct pair *pair =
		server_new((struct pair_config){ .key_a = "k", .key_b = "k" });
	int plain = socket(AF_INET, SOCK_STREAM, 0), fd, ours;
	struct data_hello mine, theirs;
	unsigned char proof[DATA_PROOF_LEN];

	pair_settle(pair);
	fd = raw_connect(pair, port_of(pair));
	raw_hello(&mine, 5, 0);
	raw_send(pair, fd, &mine, sizeof(mine));
	ASSERT_EQ(raw_receive(pair, fd, &theirs, sizeof(theirs)), sizeof(theirs));
	ours = accepted(fd);
	/* And no less: what comes right behind the proof has its place. */
	ASSERT_TRUE(ours >= 0 && option_of(ours, SO_RCVBUF) == option_of(plain, SO_RCVBUF));
	ASSERT_TRUE(option_of(ours, SO_BUF_LOCK) & SOCK_RCVBUF_LOCK);
	ASSERT_OK(handshake_prove("k", 1, "bps-client", &mine, &theirs, proof));
	raw_send(pair, fd, proof, sizeof(proof));
	PAIR_UNTIL(pair, !(option_of(ours, SO_BUF_LOCK) & SOCK_RCVBUF_LOCK));
	ASSERT_TRUE(option_of(ours, SO_RCVBUF) >= option_of(plain, SO_RCVBUF));
	(void)fd_close(plain);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* Against the text of proto/data.h, worked out by another implementation of HMAC. */
TEST(the_proof_is_the_documented_one)
{
	static const unsigned char expected[DATA_PROOF_LEN] = {
		0x2d, 0x3e, 0x84, 0x8b, 0x57, 0x69, 0xc7, 0xcc, 0x0a, 0x4f, 0x90,
		0xda, 0x80, 0xcb, 0xc2, 0xe3, 0x48, 0xe7, 0x0f, 0x23, 0x97, 0x1a,
		0x11, 0xb4, 0xa0, 0x8c, 0x3d, 0x60, 0xd2, 0x71, 0x35, 0x4c,
	};
	struct data_hello connecting = { 0 }, accepting = { 0 };
	unsigned char proof[DATA_PROOF_LEN];

	memset(&connecting, 0x11, sizeof(connecting));
	memset(&accepting, 0x22, sizeof(accepting));
	ASSERT_OK(handshake_prove("cluster key", 11, "bps-server", &connecting, &accepting, proof));
	ASSERT_MEM(proof, expected, sizeof(proof));
}

/* Of an address, so many that are accepted, and one that is not. */
static void take_all(struct pair *pair, uint32_t from, int *fds, unsigned n)
{
	unsigned before = pair->b.transport->port.n_accepted;

	pair->raw_from = htonl(INADDR_LOOPBACK + from);
	for (unsigned i = 0; i < n; i++)
		fds[i] = raw_shake(pair, port_of(pair), NULL, 100 * (from + 1) + i, 0);
	PAIR_UNTIL(pair, pair->b.transport->port.n_accepted == before + n);
	expect_closed(pair, raw_shake(pair, port_of(pair), NULL, 100 * (from + 1) + n, 0));
	ASSERT_EQ(pair->b.transport->port.n_accepted, before + n);
}

/* Each has three quarters of what the others leave. */
TEST(several_addresses_leave_connections_for_one_more)
{
	_cleanup_(pair_freep) struct pair *pair =
		server_new((struct pair_config){ .max_connections = 64 });
	int fds[64];

	pair_settle(pair);
	/* Two are the pair's. */
	PAIR_UNTIL(pair, pair->b.transport->port.n_accepted == 2);
	take_all(pair, 0, fds, 46);
	take_all(pair, 1, fds + 46, 12);
	take_all(pair, 2, fds + 58, 3);
	pair->raw_from = htonl(INADDR_LOOPBACK + 3);
	fds[61] = raw_shake(pair, port_of(pair), NULL, 400, 0);
	PAIR_UNTIL(pair, pair->b.transport->port.n_accepted == 64);
	for (unsigned i = 0; i < 62; i++)
		fd_close(fds[i]);
}

/* And from one address no more than three quarters of them. */
TEST(no_more_than_max_connections)
{
	_cleanup_(pair_freep) struct pair *pair =
		server_new((struct pair_config){ .max_connections = 6 });
	int fds[4], more;
	char text[192];

	pair_settle(pair);
	for (unsigned i = 0; i < 3; i++)
		fds[i] = raw_shake(pair, port_of(pair), NULL, 10 + i, 0);
	/* Two are the pair's. */
	PAIR_UNTIL(pair, pair->b.transport->port.n_accepted == 5);
	ASSERT_TRUE(accept_has_its_share(pair->b.transport, "127.0.0.1", text, sizeof(text)));
	ASSERT_STR(text, "5 connections are from its TCP address (127.0.0.1) already: three "
			 "quarters of what others leave (max_connections: 6)");
	ASSERT_TRUE(!accept_has_its_share(pair->b.transport, "127.0.0.2", text, sizeof(text)));
	more = raw_shake(pair, port_of(pair), NULL, 20, 0);
	expect_closed(pair, more);
	ASSERT_EQ(pair->b.transport->port.n_accepted, 5);
	pair->raw_from = htonl(INADDR_LOOPBACK + 1);
	fds[3] = raw_shake(pair, port_of(pair), NULL, 21, 0);
	PAIR_UNTIL(pair, pair->b.transport->port.n_accepted == 6);
	more = raw_connect(pair, port_of(pair));
	expect_closed(pair, more);
	pair_settle(pair);
	for (unsigned i = 0; i < ARRAY_SIZE(fds); i++)
		fd_close(fds[i]);
	/* Their places are free again. */
	for (;;) {
		struct data_hello hello;

		raw_hello(&hello, 5, 0);
		more = raw_connect(pair, port_of(pair));
		raw_send(pair, more, &hello, sizeof(hello));
		if (raw_receive(pair, more, &hello, sizeof(hello)) == sizeof(hello))
			break;
		fd_close(more);
	}
	fd_close(more);
}

TEST(who_connects_takes_turns)
{
	enum { N = 8 };
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });
	struct transport *transport = pair->b.transport;
	int fds[N];

	pair_settle(pair);
	PAIR_UNTIL(pair, !transport->port.n_unproved);
	for (unsigned i = 0; i < N; i++)
		fds[i] = raw_connect(pair, port_of(pair));
	for (unsigned i = 0; i < N; i++) {
		unsigned before = transport->port.n_unproved;

		pair_turn(pair);
		ASSERT_INT(transport->port.n_unproved, <=, before + 1);
	}
	PAIR_UNTIL(pair, transport->port.n_unproved == N);
	for (unsigned i = 0; i < N; i++)
		fd_close(fds[i]);
	PAIR_UNTIL(pair, !transport->port.n_unproved);
}

/* Strangers who say nothing take nobody's place but their own: more of them than there may be connections. */
TEST(the_silent_give_way)
{
	enum { N = 300 };
	_cleanup_(pair_freep) struct pair *pair = server_new(
		(struct pair_config){ .max_connections = 4, .handshake_timeout_ms = 600000 });
	struct transport *transport = pair->b.transport;
	int fds[N], honest;
	unsigned char byte;

	pair_settle(pair);
	PAIR_UNTIL(pair, transport->port.n_accepted == 2); /* the pair's */
	for (unsigned i = 0; i < N; i++)
		fds[i] = raw_connect(pair, port_of(pair));
	PAIR_UNTIL(pair, recv(fds[N - 257], &byte, 1, MSG_DONTWAIT) == 0);
	ASSERT_EQ(transport->port.n_unproved, 256);
	ASSERT_EQ(transport->port.n_accepted, 2);
	honest = raw_shake(pair, port_of(pair), NULL, 5, 0);
	PAIR_UNTIL(pair, transport->port.n_accepted == 3);
	ASSERT_EQ(transport->port.n_unproved, 255);
	/* The oldest are gone, the youngest are not. */
	ASSERT_EQ(recv(fds[0], &byte, 1, MSG_DONTWAIT), 0);
	ASSERT_INT(recv(fds[N - 1], &byte, 1, MSG_DONTWAIT), <, 0);
	for (unsigned i = 0; i < N; i++)
		fd_close(fds[i]);
	PAIR_UNTIL(pair, !transport->port.n_unproved);
	fd_close(honest);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* The connection of signs of life is on a thread of its own, where no messages are: it cannot be a caller's first. */
TEST(signs_of_life_do_not_come_first)
{
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });

	pair_settle(pair);
	expect_closed(pair, raw_shake(pair, port_of(pair), NULL, 5, DATA_LANE_BEAT));
	ASSERT_EQ(pair->b.n_lost, 0);
}

/* Groups of lanes that come round after 256 connects: the old peer ends, the new one lives. */
TEST(the_same_lane_again_is_a_new_peer)
{
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });
	struct data_header header;
	int old, new;

	pair_settle(pair);
	old = raw_shake(pair, port_of(pair), NULL, 5, 0x0300);
	raw_push_header(&header, 1, 0);
	raw_send(pair, old, &header, sizeof(header));
	pair_echo(pair, pair_take(pair));
	new = raw_shake(pair, port_of(pair), NULL, 5, 0x0300);
	raw_send(pair, new, &header, sizeof(header));
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, pair->b.n_lost);
	ASSERT_STR(pair->b.lost_why, "connected anew");
	ASSERT_EQ(raw_receive(pair, new, &header, sizeof(header)), sizeof(header));
	expect_closed(pair, old);
	fd_close(new);
}

/* The number of a daemon's process is in every view: who knows it cannot take the place of its connections, or add to them. */
TEST(another_cannot_call_as_a_daemon)
{
	struct pair_config config = { .variant = { "tcp", false, 0, 2, false } };
	_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);
	unsigned group = pair->peer->group << 8;
	struct data_header header;
	int fds[2];

	pair_settle(pair);
	for (unsigned lane = 0; lane < ARRAY_SIZE(fds); lane++) {
		fds[lane] =
			raw_shake(pair, port_of(pair), NULL, pair->a.transport->id, group | lane);
		raw_push_header(&header, 1, 0);
		raw_send(pair, fds[lane], &header, sizeof(header));
		pair_echo(pair, pair_take(pair));
	}
	pair_settle(pair);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	for (unsigned lane = 0; lane < ARRAY_SIZE(fds); lane++)
		fd_close(fds[lane]);
	PAIR_UNTIL(pair, pair->b.n_lost);
}

/* Lanes of one group are one peer, those of another group another. */
TEST(lanes_are_grouped)
{
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });
	static const unsigned lanes[] = { 0x0000, 0x0001, 0x0100 };
	struct delivery *deliveries[3];
	struct data_header header;
	int fds[3];

	pair_settle(pair);
	raw_push_header(&header, 1, 0);
	for (unsigned i = 0; i < 3; i++) {
		fds[i] = raw_shake(pair, port_of(pair), NULL, 5, lanes[i]);
		raw_send(pair, fds[i], &header, sizeof(header));
		deliveries[i] = pair_take(pair);
		ASSERT_EQ(peer_id(deliveries[i]->peer), 5);
	}
	ASSERT_TRUE(deliveries[0]->peer == deliveries[1]->peer);
	ASSERT_TRUE(deliveries[0]->peer != deliveries[2]->peer);
	for (unsigned i = 0; i < 3; i++)
		pair_echo(pair, deliveries[i]);
	/* One lane of two broken: the peer is lost, and the other lane closed. */
	fd_close(fds[1]);
	PAIR_UNTIL(pair, pair->b.n_lost);
	expect_closed(pair, fds[0]);
	ASSERT_EQ(pair->b.n_lost, 1);
	fd_close(fds[2]);
	PAIR_UNTIL(pair, pair->b.n_lost == 2);
}

static void expect_served(struct pair *pair, const char *host)
{
	struct pair_call call;

	pair->server = &pair->b;
	(void)snprintf(pair->address, sizeof(pair->address), "%s:%u", host, port_of(pair));
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, 0, &pair->peer));
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	pair_echo(pair, pair_take(pair));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
}

/* Both families by one socket. */
TEST(listening_at_every_address)
{
	struct pair_config config = { 0 };
	_cleanup_(pair_freep) struct pair *pair = pair_new_alone(&config);
	_cleanup_(fd_closep) int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct transport_params params;

	if (fd < 0)
		TEST_SKIP("no IPv6 here");
	pair_params(pair, &config, &pair->b, &params);
	params.listen = "[::]:0";
	ASSERT_OK(transport_new(&params, &pair->b.transport));
	expect_served(pair, "127.0.0.1");
	expect_served(pair, "[::1]");
}

TEST(a_listening_socket_handed_over)
{
	struct pair_config config = { 0 };
	_cleanup_(pair_freep) struct pair *pair = pair_new_alone(&config);
	struct transport_params params;
	uint16_t port;

	pair_params(pair, &config, &pair->b, &params);
	params.listen = NULL;
	params.listen_fd = raw_listen(&port);
	ASSERT_OK(transport_new(&params, &pair->b.transport));
	ASSERT_EQ(transport_port(pair->b.transport), port);
	expect_served(pair, "127.0.0.1");
}

TEST(an_address_that_is_taken)
{
	_cleanup_(pair_freep) struct pair *pair = server_new((struct pair_config){ 0 });
	struct pair_config config = { 0 };
	struct transport *transport = NULL;
	struct transport_params params;

	pair_params(pair, &config, &pair->b, &params);
	params.listen = pair->address;
	ASSERT_EQ(transport_new(&params, &transport), -EADDRINUSE);
	params.listen = "no port";
	ASSERT_EQ(transport_new(&params, &transport), -EINVAL);
	ASSERT_TRUE(!transport);
}
