/*
 * The bytes that a TCP connection may have in the kernel, unsent or unacknowledged. send.c has
 * this bound set now and then, on the lane's worker; agent and server say by peer_set_parts()
 * how large a job's parts are.
 */
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"

#include "base/clock.h"
#include <linux/tcp.h>
#include <sys/socket.h>

/*
 * What a connection has on its way nothing overtakes, and it waits in the queues of the network,
 * where one that has more takes more of the link. A server's answers then reach some nodes long
 * before others; these begin their next step earlier, and what they send has no sum before the last
 * has sent his. So each has as much there as keeps links busy, and all the same: four parts among
 * the nodes, which are some 2 ms of a link, for pauses of the processes at both ends, and twice
 * what a link carries while a byte goes there and its acknowledgement comes back. Eight keep links
 * no busier, and all that is urgent comes later.
 *
 * Acknowledgements wait behind what goes the other way. If one end could have more on its way than
 * the other it would fill its own queue, and its peer would be slow for that. So the bound follows
 * from what all nodes of a job know alike, and not from what each has measured. That decides only
 * whether there is one: where much may be on its way queues are short beside it, and parts that are
 * small for the link say nothing about it.
 *
 * Less than two full segments the other side does not acknowledge at once, but some 40 ms later. So
 * there may always be a few: much where they are large, as jumbo frames, or the loopback's of 64
 * KiB.
 */

#define FLIGHT_PARTS	  4
#define FLIGHT_MIN	  (16u << 10)
#define FLIGHT_SEGMENTS	  4
#define FLIGHT_MAX	  (256u << 10) /* below what systems let everybody set */
#define FLIGHT_PARTS_S	  1600 /* parts of a size that follows from the link are so many a second */
#define FLIGHT_FASTER	  4
#define FLIGHT_RTT_MAX_US 10000
#define FLIGHT_NEW_NS	  (100 * NSEC_PER_MSEC)

uint64_t flight_bytes(const struct flight *flight)
{
	uint64_t bytes_s = (uint64_t)flight->part_bytes * FLIGHT_PARTS_S, bytes;

	if (!flight->part_bytes || !flight->n_nodes || !flight->bytes_s ||
	    flight->rtt_us > FLIGHT_RTT_MAX_US || flight->bytes_s > FLIGHT_FASTER * bytes_s)
		return 0;
	bytes = MAX((uint64_t)FLIGHT_PARTS * flight->part_bytes / flight->n_nodes,
		    (uint64_t)FLIGHT_MIN) +
		2 * bytes_s * flight->rtt_us / 1000000;
	bytes = MAX(bytes, (uint64_t)FLIGHT_SEGMENTS * flight->segment);
	return bytes >= FLIGHT_MAX ? 0 : bytes;
}

void peer_set_parts(struct peer *peer, uint32_t part_bytes, uint32_t n_nodes)
{
	atomic_store_explicit(&peer->parts, (uint64_t)part_bytes << 32 | n_nodes,
			      memory_order_relaxed);
}

/* The way: its shortest of the last minutes, and its segments. */
static void look(int fd, struct flight *flight)
{
	struct tcp_info info;
	socklen_t len = sizeof(info);

	if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) ||
	    len < offsetof(struct tcp_info, tcpi_min_rtt) + sizeof(info.tcpi_min_rtt))
		return;
	flight->rtt_us = info.tcpi_min_rtt;
	flight->segment = info.tcpi_snd_mss;
}

/*
 * 0: as the kernel likes, which it may again once the lock is off; before Linux 5.18, as much as
 * there may be.
 */
static void set(int fd, uint64_t bytes)
{
	/* The kernel takes it for half of the memory; payloads are nearly all of it. */
	int half = bytes ? (int)(bytes / 2) : INT_MAX / 2, unlocked = 0;

	(void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &half, sizeof(half));
	if (!bytes)
		(void)setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &unlocked, sizeof(unlocked));
}

void lane_set_flight(struct lane *lane, uint64_t now_ns)
{
	uint64_t parts = atomic_load_explicit(&lane->peer->parts, memory_order_relaxed), bytes;
	struct flight flight = {
		.part_bytes = (uint32_t)(parts >> 32),
		.n_nodes = (uint32_t)parts,
		.bytes_s = transport_bytes_s(lane->transport),
		.rtt_us = UINT32_MAX,
	};

	if (!parts || (lane->output.flight_ns && now_ns - lane->output.flight_ns < FLIGHT_NEW_NS))
		return;
	lane->output.flight_ns = now_ns;
	look(lane->source.fd, &flight);
	bytes = flight_bytes(&flight);
	if (bytes == lane->output.flight)
		return;
	lane->output.flight = bytes;
	set(lane->source.fd, bytes);
}
