/* Several connections to a peer, of which one breaks; and the one that carries nothing but signs of life. */
#include "transport_pair.h"

#include "base/clock.h"
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"

#define SERVER_ID 77
#define N_LANES	  4
#define N_CALLS	  16
#define LEN	  5000

static struct peer *caller_of(struct pair *pair)
{
	return list_first(&pair->b.transport->peers, struct peer, link);
}

static bool has_lanes(const struct peer *peer)
{
	for (unsigned i = 0; i < N_LANES; i++)
		if (!peer_has_lane(peer, i))
			return false;
	return peer_has_lane(peer, DATA_LANE_BEAT);
}

static struct pair *rails_new(unsigned n_threads)
{
	struct pair_variant variant = { "tcp", false, n_threads, N_LANES };
	struct pair *pair = pair_new(&variant);

	PAIR_UNTIL(pair, has_lanes(pair->peer) && !list_empty(&pair->b.transport->peers) &&
				 has_lanes(caller_of(pair)));
	return pair;
}

struct cut {
	struct mail mail;
	struct lane *lane;
	_Atomic bool is_done;
};

static void on_cut(struct mail *mail)
{
	struct cut *cut = container_of(mail, struct cut, mail);

	(void)shutdown(cut->lane->source.fd, SHUT_RDWR);
	atomic_store(&cut->is_done, true);
}

/* Underneath, on the thread that owns it: both sides see it when they see it. */
static void cut(struct pair *pair, struct peer *peer, unsigned lane)
{
	struct cut cut = { .mail.run = on_cut, .lane = peer_find_lane(peer, lane) };

	worker_post(cut.lane->worker, &cut.mail);
	PAIR_UNTIL(pair, atomic_load(&cut.is_done));
}

static void begin(struct pair *pair, struct pair_call *calls, char payloads[][LEN],
		  char rooms[][LEN])
{
	for (unsigned i = 0; i < N_CALLS; i++) {
		pair_fill(payloads[i], LEN, i);
		pair_call_init(&calls[i], payloads[i], LEN, rooms[i], LEN);
		calls[i].call.is_repeatable = true;
		pair_call_begin(pair, &calls[i]);
	}
}

/* Each lane has calls at the server when it breaks. They end for being made again; all others do not notice. */
TEST(a_rail_is_cut)
{
	static char payloads[N_CALLS][LEN], rooms[N_CALLS][LEN];

	for (unsigned n_threads = 0; n_threads <= 2; n_threads++) {
		_cleanup_(pair_freep) struct pair *pair = rails_new(n_threads);
		struct pair_call calls[N_CALLS];
		unsigned n_again = 0, n_echoed = 0, lane = 1 + n_threads;
		size_t n_there;

		begin(pair, calls, payloads, rooms);
		PAIR_UNTIL(pair, pair->b.n_deliveries == N_CALLS);
		n_there = peer_find_lane(pair->peer, lane)->n_business;
		ASSERT_INT(n_there, >, 0);
		cut(pair, n_threads == 1 ? caller_of(pair) : pair->peer, lane);
		PAIR_UNTIL(pair, metric_get(&pair->a.transport->lanes_broken) &&
					 metric_get(&pair->b.transport->lanes_broken));
		PAIR_UNTIL(pair, has_lanes(pair->peer) && has_lanes(caller_of(pair)));
		for (unsigned i = 0; i < N_CALLS; i++) {
			if (!calls[i].n_done)
				continue;
			ASSERT_EQ(calls[i].call.status, -ENETRESET);
			ASSERT_CONTAINS(calls[i].call.text, "node b");
			memset(&calls[i].call.message, 0, sizeof(calls[i].call.message));
			calls[i].n_done = calls[i].n_sent = 0;
			calls[i].call.is_again = true;
			pair_call_begin(pair, &calls[i]);
			n_again++;
		}
		ASSERT_EQ(n_again, n_there);
		/* Those of the cut lane are answered into nothing. */
		for (; n_echoed < N_CALLS + n_again; n_echoed++) {
			struct delivery *delivery = pair_take(pair);

			ASSERT_EQ(delivery->header.flags, n_echoed < N_CALLS ? 0 : DATA_FLAG_AGAIN);
			pair_echo(pair, delivery);
		}
		for (unsigned i = 0; i < N_CALLS; i++) {
			PAIR_UNTIL(pair, calls[i].n_done);
			ASSERT_OK(calls[i].call.status);
			ASSERT_TRUE(pair_check(rooms[i], LEN, i));
		}
		ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
		/* The thread that wrote the last answer lets go of it in its own time. */
		PAIR_UNTIL(pair, !atomic_load(&caller_of(pair)->quota.used));
	}
}

/* One after the other, and the one of signs of life too: whatever is cut comes back, and no call is lost or done twice. */
TEST(rails_are_cut_again_and_again)
{
	static char payloads[N_CALLS][LEN], rooms[N_CALLS][LEN];

	for (unsigned n_threads = 0; n_threads <= 2; n_threads += 2) {
		_cleanup_(pair_freep) struct pair *pair = rails_new(n_threads);

		pair->server->on_call = pair_on_call_echo;
		for (unsigned n = 0; n < 8; n++) {
			unsigned lane = n % N_LANES ?: DATA_LANE_BEAT;
			struct pair_call calls[N_CALLS];

			memset(rooms, 0, sizeof(rooms));
			begin(pair, calls, payloads, rooms);
			cut(pair, n % 2 ? pair->peer : caller_of(pair), lane);
			for (unsigned i = 0; i < N_CALLS; i++) {
				PAIR_UNTIL(pair, calls[i].n_done);
				ASSERT_EQ(calls[i].n_done, 1);
				if (calls[i].call.status)
					ASSERT_EQ(calls[i].call.status, -ENETRESET);
				else
					ASSERT_TRUE(pair_check(rooms[i], LEN, i));
			}
			PAIR_UNTIL(pair, metric_get(&pair->a.transport->lanes_broken) > n &&
						 metric_get(&pair->b.transport->lanes_broken) > n);
			PAIR_UNTIL(pair, has_lanes(pair->peer) && has_lanes(caller_of(pair)));
		}
		ASSERT_EQ(pair->a.n_lost + pair->b.n_lost, 0);
	}
}

/* The first carries what comes once: without it the peer is lost, on both sides. */
TEST(the_first_is_not_spare)
{
	for (unsigned n_threads = 0; n_threads <= 1; n_threads++) {
		_cleanup_(pair_freep) struct pair *pair = rails_new(n_threads);

		cut(pair, pair->peer, 0);
		PAIR_UNTIL(pair, pair->a.n_lost && pair->b.n_lost);
		ASSERT_EQ(pair->a.n_lost, 1);
	}
}

/* A caller (pair->a) of a server made of two sockets: one for calls, one for signs of life. */
static struct pair *beating_new(uint64_t peer_timeout_ms, int ret_fds[2])
{
	struct pair_config config = { .peer_timeout_ms = peer_timeout_ms };
	struct pair *pair = pair_new_alone(&config);
	_cleanup_(fd_closep) int listener = -1;
	uint16_t port;

	listener = raw_listen(&port);
	(void)snprintf(pair->address, sizeof(pair->address), "127.0.0.1:%u", port);
	ASSERT_OK(transport_connect(pair->a.transport, pair->address, SERVER_ID, &pair->peer));
	for (unsigned i = 0; i < 2; i++) {
		ret_fds[i] = raw_accept(pair, listener);
		raw_shake_accepted_with(pair, ret_fds[i], NULL, SERVER_ID, DATA_FEATURE_RAILS);
	}
	PAIR_UNTIL(pair, peer_has_lane(pair->peer, DATA_LANE_BEAT));
	return pair;
}

static void receive_ping(struct pair *pair, int fd)
{
	struct data_header header;

	ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
	ASSERT_EQ(header.op, DATA_PING);
	ASSERT_EQ(header.cookie, 0);
}

/* Too busy to answer on the connection that has the calls, and not dead: that is what the other one is for. */
TEST(who_is_busy_is_not_dead)
{
	struct data_header asked,
		pong = { .magic = DATA_MAGIC, .version = DATA_VERSION, .op = DATA_PONG };
	int fds[2];
	_cleanup_(pair_freep) struct pair *pair = beating_new(600, fds);
	uint64_t begun_ns = clock_now_ns();
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	ASSERT_EQ(raw_receive(pair, fds[0], &asked, sizeof(asked)), sizeof(asked));
	ASSERT_EQ(asked.op, DATA_PUSH);
	while (clock_now_ns() - begun_ns < 1200 * NSEC_PER_MSEC) {
		receive_ping(pair, fds[1]);
		raw_send(pair, fds[1], &pong, sizeof(pong));
	}
	ASSERT_EQ(pair->a.n_lost, 0);
	asked.op = DATA_RESULT;
	raw_send(pair, fds[0], &asked, sizeof(asked));
	PAIR_UNTIL(pair, call.n_done);
	ASSERT_OK(call.call.status);
	fd_close(fds[0]);
	PAIR_UNTIL(pair, pair->a.n_lost);
	fd_close(fds[1]);
}

/* Their thread is another than that of all other messages. */
TEST(signs_of_life_have_their_connection_for_themselves)
{
	struct data_header notice = { .magic = DATA_MAGIC,
				      .version = DATA_VERSION,
				      .op = DATA_STOPPING };
	int fds[2];
	_cleanup_(pair_freep) struct pair *pair = beating_new(60000, fds);

	raw_send(pair, fds[0], &notice, sizeof(notice));
	PAIR_UNTIL(pair, pair->a.n_notices == 1);
	raw_send(pair, fds[1], &notice, sizeof(notice));
	PAIR_UNTIL(pair, !peer_has_lane(pair->peer, DATA_LANE_BEAT));
	ASSERT_EQ(pair->a.n_notices, 1);
	fd_close(fds[0]);
	PAIR_UNTIL(pair, pair->a.n_lost);
	fd_close(fds[1]);
}

/* And who is dead is, whatever his kernel still takes. */
TEST(who_does_not_beat_is_dead)
{
	int fds[2];
	_cleanup_(pair_freep) struct pair *pair = beating_new(300, fds);
	struct pair_call call;

	pair_call_init(&call, NULL, 0, NULL, 0);
	pair_call_begin(pair, &call);
	receive_ping(pair, fds[1]);
	receive_ping(pair, fds[1]);
	PAIR_UNTIL(pair, pair->a.n_lost);
	ASSERT_STR(pair->a.lost_why, "no sign of life for 300 ms");
	ASSERT_EQ(call.call.status, -ECONNRESET);
	fd_close(fds[0]);
	fd_close(fds[1]);
}
