/* Which message leaves first, and how little waits ahead of an urgent one. */
#include "transport_pair.h"

#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#define SERVER_ID 77

static struct pair *caller_new(unsigned n_threads, int *ret_fd)
{
	struct pair_config config = { .variant.n_threads = n_threads };
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

/* Reads messages until one with the key; returns the bytes that came before it. */
static size_t bytes_before(struct pair *pair, int fd, uint64_t key, struct data_header *ret_header)
{
	static char rest[1 << 20];
	size_t n = 0;

	for (;;) {
		ASSERT_EQ(raw_receive(pair, fd, ret_header, sizeof(*ret_header)),
			  sizeof(*ret_header));
		if (ret_header->key == key)
			return n;
		ASSERT_EQ(raw_receive(pair, fd, rest, ret_header->len), ret_header->len);
		n += ret_header->len;
	}
}

/* In a turn they were posted in: no system call comes between. */
TEST(most_urgent_first)
{
	static const struct {
		uint64_t key;
		int32_t priority;
		uint32_t len;
	} posted[] = { { 1, 0, 10 }, { 2, 9, 10 },  { 3, 9, 10 },
		       { 4, -9, 0 }, { 5, 10, 10 }, { 6, 0, 10 } };
	static const uint64_t expected[] = { 4, 5, 2, 3, 1, 6 };

	for (unsigned n_threads = 0; n_threads < 2; n_threads++) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = caller_new(n_threads, &fd);
		struct pair_call first, calls[ARRAY_SIZE(posted)];
		struct data_header header;
		char payload[10] = "", rest[10], *large = calloc(1, 32 << 20),
		     *sink = malloc(32 << 20);

		/* Something large first, which keeps the lane busy until all are posted; being written, it goes on. */
		pair_call_init(&first, large, 32 << 20, NULL, 0);
		first.call.header.key = 100;
		pair_call_begin(pair, &first);
		ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
		for (unsigned i = 0; i < ARRAY_SIZE(posted); i++) {
			pair_call_init(&calls[i], payload, posted[i].len, NULL, 0);
			calls[i].call.header.key = posted[i].key;
			calls[i].call.header.priority = posted[i].priority;
			pair_call_begin(pair, &calls[i]);
		}
		ASSERT_EQ(raw_receive(pair, fd, sink, 32 << 20), 32 << 20);
		for (unsigned i = 0; i < ARRAY_SIZE(expected); i++) {
			ASSERT_EQ(raw_receive(pair, fd, &header, sizeof(header)), sizeof(header));
			ASSERT_EQ(header.key, expected[i]);
			ASSERT_EQ(raw_receive(pair, fd, rest, header.len), header.len);
		}
		fd_close(fd);
		PAIR_UNTIL(pair, pair->a.n_lost);
		free(large);
		free(sink);
	}
}

/* What the kernel knows of the first lane's socket. */
static struct tcp_info lane_info(const struct pair *pair)
{
	const struct lane *lane = list_first(&pair->peer->lanes, struct lane, link);
	struct tcp_info info = { 0 };
	socklen_t len = sizeof(info);

	ASSERT_OK(getsockopt(lane->source.fd, IPPROTO_TCP, TCP_INFO, &info, &len));
	return info;
}

/*
 * Whether the kernel takes no more before the receiver reads: all that was sent is acknowledged, more waits and does not
 * leave, as the receiver's window is closed, and the socket is not writable. Then the lane has counted what the kernel took.
 */
static bool is_full(const struct pair *pair, uint64_t handshake_len, uint64_t *ret_out)
{
	const struct tcp_info info = lane_info(pair);
	struct pollfd pollfd = { .events = POLLOUT };
	uint64_t in;

	pollfd.fd = list_first(&pair->peer->lanes, struct lane, link)->source.fd;
	if (info.tcpi_unacked || !info.tcpi_notsent_bytes || poll(&pollfd, 1, 0))
		return false;
	peer_counters(pair->peer, &in, ret_out);
	return *ret_out == info.tcpi_bytes_acked + info.tcpi_notsent_bytes - handshake_len;
}

/* Posts so many calls of len bytes each, and turns until the kernel takes no more. */
static void fill(struct pair *pair, struct pair_call *calls, unsigned n, const void *payload,
		 size_t len)
{
	uint64_t in, out;

	PAIR_UNTIL(pair, !lane_info(pair).tcpi_unacked);
	peer_counters(pair->peer, &in, &out);
	const uint64_t handshake_len = lane_info(pair).tcpi_bytes_acked - out;

	for (unsigned i = 0; i < n; i++) {
		pair_call_init(&calls[i], payload, len, NULL, 0);
		pair_call_begin(pair, &calls[i]);
	}
	PAIR_UNTIL(pair, is_full(pair, handshake_len, &out));
}

struct notice_of_turn {
	struct mail there, back;
	struct lane *lane;
	bool is_back;
};

static void on_back(struct mail *mail)
{
	container_of(mail, struct notice_of_turn, back)->is_back = true;
}

static void on_there(struct mail *mail)
{
	struct notice_of_turn *notice = container_of(mail, struct notice_of_turn, there);

	lane_post_home(notice->lane, &notice->back);
}

/* Until the first lane's thread has seen all that was posted to it before. Returns the bytes that the kernel has taken by then. */
static uint64_t until_seen(struct pair *pair)
{
	struct lane *lane = list_first(&pair->peer->lanes, struct lane, link);
	struct notice_of_turn notice = { { .run = on_there }, { .run = on_back }, lane, false };
	uint64_t in, out;

	worker_post(lane->worker, &notice.there);
	PAIR_UNTIL(pair, notice.is_back);
	peer_counters(pair->peer, &in, &out);
	return out;
}

/*
 * 64 MiB of parts are posted and the receiver's and the sender's buffers are full. Then something urgent: behind what
 * the kernel had already sent on (which nobody can take back) come at most TRANSPORT_AHEAD and the message begun.
 */
TEST(an_urgent_message_overtakes)
{
	enum { N = 256, LEN = 256 << 10 };
	static struct pair_call calls[N];

	for (unsigned what = 0; what < 2; what++) {
		int fd;
		_cleanup_(pair_freep) struct pair *pair = caller_new(1, &fd);
		struct data_header header,
			notice = { .op = DATA_FAIL_ROUND, .key = 999, .round = 1, .status = EIO };
		char *payload = calloc(1, LEN);
		struct pair_call urgent;
		uint64_t out;
		size_t ahead;

		fill(pair, calls, N, payload, LEN);
		pair_call_init(&urgent, payload, LEN, NULL, 0);
		urgent.call.header.key = 999;
		urgent.call.header.priority = 1;
		if (what)
			pair_call_begin(pair, &urgent);
		else
			ASSERT_OK(peer_notice(pair->peer, &notice, NULL));
		/* More, if the receiver's kernel has found room since then. */
		out = until_seen(pair);
		ASSERT_INT(out, <, N * (uint64_t)LEN / 2);
		ahead = bytes_before(pair, fd, 999, &header);
		ASSERT_EQ(header.op, what ? DATA_PUSH : DATA_FAIL_ROUND);
		/* What had left, the rest of the message begun, and one more that was begun when room came. */
		ASSERT_INT(ahead, <=, out + 2 * LEN);
		fd_close(fd);
		PAIR_UNTIL(pair, pair->a.n_lost);
		free(payload);
	}
}

/* Posts 64 MiB, and returns what has been written and not sent when the kernel takes no more. */
static int unsent_when_full(uint64_t link_bytes_s)
{
	enum { N = 64, LEN = 1 << 20 };
	static struct pair_call calls[N];
	int fd, unsent = -1;
	_cleanup_(pair_freep) struct pair *pair = caller_new(0, &fd);
	char *payload = calloc(1, LEN);
	struct lane *lane;

	atomic_store(&pair->a.transport->bytes_s, link_bytes_s);
	fill(pair, calls, N, payload, LEN);
	lane = list_first(&pair->peer->lanes, struct lane, link);
	ASSERT_OK(ioctl(lane->source.fd, SIOCOUTQNSD, &unsent));
	fd_close(fd);
	PAIR_UNTIL(pair, pair->a.n_lost);
	free(payload);
	return unsent;
}

/* Whatever the kernel's buffers would take; the slower the link the less, down to a least. */
TEST(little_waits_in_the_kernel)
{
	/* The kernel looks before it takes a piece, so up to one more than the mark. */
	const int piece = 64 << 10;

	ASSERT_INT(unsent_when_full(0), <=, (int)TRANSPORT_AHEAD + piece);
	ASSERT_INT(unsent_when_full(100ull << 30), <=, (int)TRANSPORT_AHEAD + piece);
	ASSERT_INT(unsent_when_full(30 << 20), <=, (64 << 10) + piece);
	ASSERT_INT(unsent_when_full(1 << 20), <=, (int)TRANSPORT_AHEAD_MIN + piece);
}

/* Calls are spread by the bytes that wait. */
TEST(lanes_share_the_load)
{
	struct pair_variant variant = { "tcp", false, 0, 4 };
	_cleanup_(pair_freep) struct pair *pair = pair_new(&variant);
	enum { N = 64, LEN = 1 << 20 };
	static struct pair_call calls[N];
	char *payload = calloc(1, LEN);

	pair->server->on_call = pair_on_call_echo;
	PAIR_UNTIL(pair, peer_has_lane(pair->peer, 0) && peer_has_lane(pair->peer, 1) &&
				 peer_has_lane(pair->peer, 2) && peer_has_lane(pair->peer, 3));
	for (unsigned i = 0; i < N; i++) {
		pair_call_init(&calls[i], payload, LEN, NULL, 0);
		pair_call_begin(pair, &calls[i]);
	}
	for (unsigned i = 0; i < N; i++) {
		PAIR_UNTIL(pair, calls[i].n_done);
		calls[i].answer = block_unref(calls[i].answer);
	}
	for (unsigned i = 0; i < 4; i++)
		ASSERT_EQ(atomic_load(&peer_find_lane(pair->peer, i)->bytes_out),
			  N / 4 * (LEN + sizeof(struct data_header) + 2 * DATA_CHECK_LEN));
	free(payload);
}
