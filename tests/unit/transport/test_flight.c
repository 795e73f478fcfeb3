/* What a connection may have on its way: how much, and that the kernel is told. */
#include "test.h"
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"

#include "base/clock.h"
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#define KIB	    1024ull
#define SNDBUF_LOCK 1 /* SOCK_SNDBUF_LOCK of linux/socket.h */

static uint64_t bytes(uint32_t part_bytes, uint32_t n_nodes, uint64_t bytes_s, uint32_t rtt_us)
{
	return flight_bytes(&(struct flight){ part_bytes, n_nodes, bytes_s, rtt_us, 1448 });
}

TEST(nodes_share_the_link)
{
	ASSERT_EQ(bytes(32 * KIB, 2, 1, 0), 64 * KIB);
	ASSERT_EQ(bytes(32 * KIB, 4, 1, 0), 32 * KIB);
	ASSERT_EQ(bytes(32 * KIB, 1000, 1, 0), 16 * KIB);
}

/*
 * What is urgent waits for all connections of its server. Parts that follow from the link, which are what it carries in 0.3 to
 * 0.6 ms, so leave 1.2 to 2.5 ms of it there: less would not last for a pause of a process, more is no use.
 */
TEST(all_nodes_together_have_two_milliseconds_of_a_link)
{
	for (uint64_t bytes_s = 16 * KIB * 1600; bytes_s < 512 * KIB * 1600; bytes_s += 1000000) {
		uint64_t part_bytes = 16 * KIB;

		while (part_bytes * 2 <= bytes_s / 1600)
			part_bytes *= 2;
		for (uint32_t n = 1; n <= part_bytes / (4 * KIB); n++) {
			uint64_t way = bytes((uint32_t)part_bytes, n, bytes_s, 0);

			/* As the kernel likes: never where queues would be long beside it. */
			if (!way) {
				ASSERT_INT(4 * part_bytes / n, >=, 256 * KIB);
				continue;
			}
			ASSERT_INT(way * n, <=, bytes_s / 400);
			ASSERT_INT((way + 1) * n, >=, bytes_s / 801);
		}
	}
}

/* Else one end would have more on its way than the other, which its acknowledgements would then wait for. */
TEST(what_was_measured_does_not_change_it)
{
	for (uint64_t bytes_s = 1; bytes_s < 200000000; bytes_s += 10000000)
		ASSERT_EQ(bytes(32 * KIB, 4, bytes_s, 0), 32 * KIB);
}

/* Else the other side, which has not two of them, waits with its acknowledgement. */
TEST(some_segments_fit)
{
	struct flight jumbo = { 128 * KIB, 1000, 1, 0, 8948 },
		      loopback = { 128 * KIB, 16, 1, 0, 65483 };

	ASSERT_EQ(flight_bytes(&jumbo), 4 * 8948);
	jumbo.n_nodes = 4;
	ASSERT_EQ(flight_bytes(&jumbo), 128 * KIB);
	ASSERT_EQ(flight_bytes(&loopback), 4 * 65483);
}

TEST(a_long_way_holds_more)
{
	/* Parts of 32 KiB are those of some 52 MB/s: 52 kB for each millisecond, and twice that, whatever the number of nodes. */
	ASSERT_EQ(bytes(32 * KIB, 1000, 1, 1000), 16 * KIB + 2 * 32 * KIB * 1600 / 1000);
	ASSERT_EQ(bytes(32 * KIB, 2000, 1, 1000), 16 * KIB + 2 * 32 * KIB * 1600 / 1000);
}

TEST(what_is_not_known_or_much_is_left_to_the_kernel)
{
	ASSERT_EQ(bytes(0, 4, 60000000, 100), 0);
	ASSERT_EQ(bytes(32 * KIB, 0, 60000000, 100), 0);
	ASSERT_EQ(bytes(32 * KIB, 4, 0, 100), 0);
	ASSERT_EQ(bytes(32 * KIB, 4, 60000000, UINT32_MAX), 0);
	ASSERT_EQ(bytes(32 * KIB, 4, 60000000, 9000), 0);
	ASSERT_EQ(bytes(512 * KIB, 2, 1, 10), 0);
	ASSERT_EQ(bytes(512 * KIB, 8, 1, 10), 0);
	ASSERT_EQ(bytes(32 * KIB, 4, 1, 2300), 0);
	ASSERT_INT(bytes(32 * KIB, 4, 1, 2100), >, 0);
	ASSERT_EQ(bytes(UINT32_MAX, 2, 1, 10000), 0);
	/* Parts smaller than the link's. */
	ASSERT_EQ(bytes(4 * KIB, 4, 60000000, 10), 0);
}

/* -- On a socket --------------------------------------------------------------------------------------------------- */

static int option(int fd, int name)
{
	socklen_t len = sizeof(int);
	int value = 0;

	ASSERT_EQ(getsockopt(fd, SOL_SOCKET, name, &value, &len), 0);
	return value;
}

static void connect_pair(int fds[2])
{
	struct sockaddr_in in = { .sin_family = AF_INET,
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(in);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), segment = 1448;

	ASSERT_EQ(bind(listener, (struct sockaddr *)&in, sizeof(in)), 0);
	ASSERT_EQ(listen(listener, 1), 0);
	ASSERT_EQ(getsockname(listener, (struct sockaddr *)&in, &len), 0);
	fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* As on an Ethernet. */
	ASSERT_EQ(setsockopt(fds[0], IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof(segment)), 0);
	ASSERT_EQ(connect(fds[0], (struct sockaddr *)&in, sizeof(in)), 0);
	fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ASSERT_INT(fds[1], >=, 0);
	close(listener);
}

TEST(the_kernel_is_told)
{
	struct worker *worker = calloc(1, sizeof(*worker));
	struct transport *transport = calloc(1, sizeof(*transport));
	struct peer *peer = calloc(1, sizeof(*peer));
	struct lane *lane = calloc(1, sizeof(*lane));
	uint64_t now_ns = clock_now_ns();
	int fds[2], first;

	connect_pair(fds);
	first = option(fds[0], SO_SNDBUF);
	transport->workers = &worker;
	transport->n_workers = 1;
	lane->transport = transport;
	lane->peer = peer;
	lane->source.fd = fds[0];

	/* No job: the kernel's own. */
	lane_set_flight(lane, now_ns);
	ASSERT_EQ(option(fds[0], SO_SNDBUF), first);

	/* So small parts that a slow machine's time there and back does not matter. */
	peer_set_parts(peer, 1024, 4);
	atomic_store(&transport->bytes_s, 1000000);
	lane_set_flight(lane, now_ns);
	ASSERT_INT(lane->output.flight, >=, 16 * KIB);
	ASSERT_EQ((uint64_t)option(fds[0], SO_SNDBUF), lane->output.flight & ~1ull);
	ASSERT_INT(option(fds[0], SO_BUF_LOCK) & SNDBUF_LOCK, !=, 0);

	/* Another job's: looked at by and by. */
	peer_set_parts(peer, 64 << 20, 4);
	lane_set_flight(lane, now_ns);
	ASSERT_INT(lane->output.flight, !=, 0);
	now_ns += NSEC_PER_SEC;
	lane_set_flight(lane, now_ns);
	ASSERT_EQ(lane->output.flight, 0);
	ASSERT_EQ(option(fds[0], SO_BUF_LOCK), 0);

	/* A link that is faster than the parts are for. */
	peer_set_parts(peer, 1024, 4);
	atomic_store(&transport->bytes_s, 12500000000);
	now_ns += NSEC_PER_SEC;
	lane_set_flight(lane, now_ns);
	ASSERT_EQ(lane->output.flight, 0);

	close(fds[0]);
	close(fds[1]);
	free(lane);
	free(peer);
	free(transport);
	free(worker);
}
