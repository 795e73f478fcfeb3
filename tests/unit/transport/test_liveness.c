/* Silence, and the absence of questions where nothing is wanted. */
#include "transport_pair.h"

#include "base/clock.h"
#include "transport/internal.h"
#include "transport/peer/peer.h"

#define SERVER_ID 77

static struct pair *caller_new(unsigned n_threads, uint64_t peer_timeout_ms, int *ret_fd)
{
	struct pair_config config = { .variant.n_threads = n_threads,
				      .peer_timeout_ms = peer_timeout_ms };
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

static void receive_header(struct pair *pair, int fd, struct data_header *ret_header)
{
	ASSERT_EQ(raw_receive(pair, fd, ret_header, sizeof(*ret_header)), sizeof(*ret_header));
}

/* It takes the call and the questions, and says nothing. */
TEST(a_silent_server_is_lost)
{
	for (unsigned n_threads = 0; n_threads < 2; n_threads++) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = caller_new(n_threads, 300, &fd);
		uint64_t begun_ns = clock_now_ns();
		struct data_header header;
		struct pair_call call;

		pair_call_init(&call, NULL, 0, NULL, 0);
		pair_call_begin(pair, &call);
		receive_header(pair, fd, &header);
		ASSERT_EQ(header.op, DATA_PUSH);
		receive_header(pair, fd, &header);
		ASSERT_EQ(header.op, DATA_PING);
		PAIR_UNTIL(pair, pair->a.n_lost);
		ASSERT_INT(clock_now_ns() - begun_ns, >=, 300 * NSEC_PER_MSEC);
		ASSERT_EQ(call.n_done, 1);
		ASSERT_EQ(call.call.status, -ECONNRESET);
		ASSERT_CONTAINS(call.call.text, "no sign of life for 300 ms");
		fd_close(fd);
	}
}

/* As long as it answers the questions, the call may take its time. */
TEST(a_slow_server_is_not)
{
	int fd;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, 90, &fd);
	struct data_header header,
		pong = { .magic = DATA_MAGIC, .version = DATA_VERSION, .op = DATA_PONG };
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	receive_header(pair, fd, &header);
	for (unsigned i = 0; i < 10; i++) {
		struct data_header ping;

		receive_header(pair, fd, &ping);
		ASSERT_EQ(ping.op, DATA_PING);
		raw_send(pair, fd, &pong, sizeof(pong));
	}
	header.op = DATA_RESULT;
	raw_send(pair, fd, &header, sizeof(header));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->a.n_lost);
}

/* The same between two of us: neither is lost while a call is held for several time limits. */
TEST(a_call_held_for_long)
{
	for (unsigned n_threads = 0; n_threads < 2; n_threads++) {
		struct pair_config config = { .variant = { "tcp", false, n_threads, 2 },
					      .peer_timeout_ms = 400 };
		_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);
		uint64_t begun_ns = clock_now_ns();
		struct delivery *delivery;
		struct pair_call call;

		pair_call_init(&call, NULL, 0, NULL, 0);
		pair_call_begin(pair, &call);
		delivery = pair_take(pair);
		PAIR_UNTIL(pair, clock_now_ns() - begun_ns > 1300 * NSEC_PER_MSEC);
		pair_echo(pair, delivery);
		PAIR_UNTIL(pair, call.n_done);
		ASSERT_OK(call.call.status);
		ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	}
}

/* We were stopped for longer than the limit: the peer is not to blame, its answer lies in the socket. */
TEST(our_own_silence_is_not_the_peers)
{
	int fd;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, 60, &fd);
	struct data_header header;
	struct pair_call call;
	uint64_t stopped_ns;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	receive_header(pair, fd, &header);
	header.op = DATA_RESULT;
	raw_send(pair, fd, &header, sizeof(header));
	stopped_ns = clock_now_ns();
	while (clock_now_ns() - stopped_ns < 100 * NSEC_PER_MSEC)
		;
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->a.n_lost);
}

/* The server, too, asks after a caller that waits for its answer. */
TEST(a_silent_caller_is_lost)
{
	struct pair_config config = { .peer_timeout_ms = 150 };
	_cleanup_(pair_freep) struct pair *pair = pair_new_serving(&config);
	struct data_header header;
	int fd;

	fd = raw_shake(pair, transport_port(pair->b.transport), NULL, 5, 0);
	raw_push_header(&header, 1, 0);
	raw_send(pair, fd, &header, sizeof(header));
	PAIR_UNTIL(pair, pair->b.n_lost);
	ASSERT_STR(pair->b.lost_why, "no sign of life for 150 ms");
	receive_header(pair, fd, &header);
	ASSERT_EQ(header.op, DATA_PING);
	fd_close(fd);
}

/* Without business there is no timer after one last look, so the loop sleeps. */
TEST(idle_peers_have_no_timers)
{
	struct pair_config config = { .variant = { "tcp", false, 0, 4 }, .peer_timeout_ms = 60 };
	_cleanup_(pair_freep) struct pair *pair = pair_new_with(&config);
	struct pair_call call;
	uint64_t wakeups, begun_ns;

	pair->server->on_call = pair_on_call_echo;
	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	PAIR_UNTIL(pair, call.n_done && !pair->peer->timer.loop && !pair->peer->dial);
	PAIR_UNTIL(pair, !list_first(&pair->b.transport->peers, struct peer, link)->timer.loop);
	PAIR_UNTIL(pair, list_empty(&pair->b.transport->port.handshakes));
	/* Several time limits long; what is still under way may wake it twice. */
	begun_ns = clock_now_ns();
	wakeups = loop_wakeups(pair->loop);
	while (clock_now_ns() - begun_ns < 300 * NSEC_PER_MSEC)
		ASSERT_OK(loop_turn(pair->loop, 300));
	ASSERT_INT(loop_wakeups(pair->loop), <=, wakeups + 3);
	ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
}

/* A long message that the other side takes slowly is no silence, although nothing comes back meanwhile. */
TEST(a_slow_reader_is_alive)
{
	enum { LEN = 24 << 20, STEP = 256 << 10 };
	int fd;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, 800, &fd);
	char *payload = calloc(1, LEN), *rest = malloc(STEP);
	uint64_t begun_ns = clock_now_ns();
	struct data_header asked;
	struct pair_call call;

	pair_call_init(&call, payload, LEN, NULL, 0);
	pair_call_begin(pair, &call);
	receive_header(pair, fd, &asked);
	for (size_t done = 0; done < LEN; done += STEP) {
		uint64_t until_ns = begun_ns + (done / STEP) * 25 * NSEC_PER_MSEC;

		ASSERT_EQ(raw_receive(pair, fd, rest, STEP), STEP);
		while (clock_now_ns() < until_ns)
			pair_turn(pair);
	}
	ASSERT_INT(clock_now_ns() - begun_ns, >, 2000 * NSEC_PER_MSEC);
	ASSERT_EQ(pair->a.n_lost, 0);
	asked.op = DATA_RESULT;
	asked.len = 0;
	raw_send(pair, fd, &asked, sizeof(asked));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->a.n_lost);
	free(payload);
	free(rest);
}

/* -- Half a message ----------------------------------------------------------------------------------------------- */

/* A peer that has proved itself begins a message and goes no further: what was made for the message is given up, and the peer with it. */
static void stop_at(unsigned n_threads, size_t n)
{
	struct pair_config config = { .variant.n_threads = n_threads,
				      .peer_timeout_ms = 100,
				      .no_checksums = true };
	_cleanup_(pair_freep) struct pair *pair = pair_new_serving(&config);
	struct {
		struct data_header header;
		unsigned char payload[1 << 20];
	} *push = calloc(1, sizeof(*push));
	int fd = raw_shake(pair, transport_port(pair->b.transport), NULL, 5, 0);

	ASSERT_TRUE(push);
	raw_push_header(&push->header, 1, sizeof(push->payload));
	data_header_encode(&push->header);
	raw_send(pair, fd, push, n);
	PAIR_UNTIL(pair, pair->b.n_lost);
	ASSERT_CONTAINS(pair->b.lost_why, "stopped in the middle of a message for 300 ms");
	ASSERT_EQ(pair->b.n_deliveries, 0);
	ASSERT_EQ(block_cache_used(pair->blocks), 0);
	fd_close(fd);
	free(push);
}

TEST(half_a_message_ends_its_connection)
{
	static const size_t at[] = { 1, sizeof(struct data_header), 1 << 18 };

	for (size_t i = 0; i < ARRAY_SIZE(at); i++)
		stop_at(i % 2, at[i]);
}

/* So does one that comes a byte at a time. */
TEST(a_message_that_drips_ends_its_connection)
{
	struct pair_config config = { .peer_timeout_ms = 100, .no_checksums = true };
	_cleanup_(pair_freep) struct pair *pair = pair_new_serving(&config);
	int fd = raw_shake(pair, transport_port(pair->b.transport), NULL, 5, 0);
	struct data_header header;
	uint64_t next_ns = 0;

	raw_push_header(&header, 1, 1 << 20);
	data_header_encode(&header);
	raw_send(pair, fd, &header, sizeof(header));
	while (!pair->b.n_lost) {
		ASSERT_OK(loop_turn(pair->loop, 10));
		if (clock_now_ns() < next_ns)
			continue;
		(void)send(fd, "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
		next_ns = clock_now_ns() + 5 * NSEC_PER_MSEC;
	}
	ASSERT_CONTAINS(pair->b.lost_why, "stopped in the middle of a message");
	fd_close(fd);
}

/* Between two messages there is nothing to wait for. */
TEST(silence_between_messages_is_none)
{
	struct pair_config config = { .peer_timeout_ms = 60, .no_checksums = true };
	_cleanup_(pair_freep) struct pair *pair = pair_new_serving(&config);
	int fd = raw_shake(pair, transport_port(pair->b.transport), NULL, 5, 0);
	struct data_header header;
	uint64_t begun_ns;

	raw_push_header(&header, 1, 0);
	data_header_encode(&header);
	for (size_t i = 0; i < sizeof(header); i += 48) {
		raw_send(pair, fd, (char *)&header + i, 48);
		pair_turn(pair);
	}
	pair_echo(pair, pair_take(pair));
	begun_ns = clock_now_ns();
	PAIR_UNTIL(pair, clock_now_ns() - begun_ns > 500 * NSEC_PER_MSEC);
	ASSERT_EQ(pair->b.n_lost, 0);
	fd_close(fd);
	PAIR_UNTIL(pair, pair->b.n_lost);
}
