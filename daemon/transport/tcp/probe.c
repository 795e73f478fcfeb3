/*
 * How fast this node's link is, for a daemon through which nothing has gone yet: the connecting
 * side sends up to 2 MiB in one go, and how soon one piece came behind another tells. Only one
 * connection does so at a time, as several would share the link. The process that reads may have
 * been late, so the kernel's word counts for when bytes came. The first half does not count, in
 * which the connection gets up to speed, and which a shaper may let through at once as it has
 * been idle. Of the other half counts what is usual: if a process or a packet is late nothing
 * comes for a while, and then much. What came all at once after a standstill counts as fast as it
 * was with that: a shaper may have saved it up while a process could not run. Too little is mended
 * by what goes later. handshake.c calls.
 */
#include "transport/common/address.h"
#include "transport/internal.h"
#include "transport/tcp/handshake.h"

#include "base/clock.h"
#include "base/log.h"
#include <inttypes.h>
#include <linux/errqueue.h>
#include <linux/net_tstamp.h>
#include <linux/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>

/* Unless there are too few pieces by then, as the processor was with others. */
#define ENOUGH_NS   (50 * NSEC_PER_MSEC)
#define TOO_LONG_NS (500 * NSEC_PER_MSEC)
#define MIN_PIECES  32
#define TURN_PIECES 16
/*
 * An eighth of all pieces together is a sample: of 2 MiB, some packets as large as they get on
 * their way through a system.
 */
#define SHARE 8
/*
 * While a connection gets up to speed it is as fast as its acknowledgements come. Nothing depends
 * on how much faster links are.
 */
#define RTTS   4
#define PLENTY 1000000000u

static const unsigned char more[DATA_PROBE_LEN] = { DATA_PROBE_MORE };
static const unsigned char last = DATA_PROBE_LAST;

static int compare(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

/* How long nothing came in front of any of the pieces from `first` up to `end`. */
static uint64_t longest_gap_ns(const struct probe *probe, unsigned first, unsigned end)
{
	uint64_t longest_ns = 0;

	for (unsigned i = first + 1; i < end; i++) {
		if (probe->at_ns[i] > probe->at_ns[i - 1])
			longest_ns = MAX(longest_ns, probe->at_ns[i] - probe->at_ns[i - 1]);
	}
	return longest_ns;
}

/*
 * How fast the pieces from `first` on came at least, if a shaper may have saved them up: when nothing came for longer than they
 * took, and for longer than acknowledgements account for, they need not have come through the link one behind another.
 */
static uint64_t saved_bytes_s(const struct probe *probe, unsigned first, unsigned n,
			      uint64_t rtt_ns)
{
	uint64_t gap_ns = longest_gap_ns(probe, 0, n),
		 took_ns = probe->at_ns[n - 1] - probe->at_ns[first];

	if (!rtt_ns || gap_ns <= RTTS * rtt_ns ||
	    gap_ns <= took_ns - longest_gap_ns(probe, first, n))
		return UINT64_MAX;
	return (n - first) * (uint64_t)DATA_PROBE_LEN * NSEC_PER_SEC / gap_ns;
}

/* The stamps are of the time of day, which may be set forward. */
static bool clock_was_set(const struct probe *probe, unsigned n)
{
	uint64_t first_ns = probe->at_ns[0], last_ns = probe->at_ns[n - 1];

	return probe->lasted_ns && last_ns > first_ns && last_ns - first_ns > 2 * probe->lasted_ns;
}

uint64_t probe_bytes_s(const struct probe *probe, uint64_t rtt_ns)
{
	unsigned n = MIN(probe->n, DATA_PROBE_PIECES), first = n / 2, width = n / SHARE, taken = 0;
	uint64_t took_ns[DATA_PROBE_PIECES], bytes_s;

	if (n < MIN_PIECES || clock_was_set(probe, n))
		return 0;
	for (unsigned i = first; i + width < n; i++) {
		uint64_t from_ns = probe->at_ns[i], to_ns = probe->at_ns[i + width];

		/* The time of day may be set back. */
		took_ns[taken++] = to_ns > from_ns ? to_ns - from_ns : 1;
	}
	qsort(took_ns, taken, sizeof(took_ns[0]), compare);
	bytes_s = width * (uint64_t)DATA_PROBE_LEN * NSEC_PER_SEC / took_ns[taken / 2];
	if (bytes_s < PLENTY && probe->at_ns[n - 1] - probe->at_ns[first] < RTTS * rtt_ns)
		return 0;
	return MIN(bytes_s, saved_bytes_s(probe, first, n, rtt_ns));
}

bool probe_is_wanted(const struct handshake *h)
{
	const struct transport *transport = h->transport;

	if (transport->settings.probes == TRANSPORT_PROBES_OFF || transport->probing ||
	    transport_bytes_s(transport) || h->theirs.lane & 0xff ||
	    h->features & DATA_FEATURE_RDMA || !(h->theirs.features & DATA_FEATURE_PROBE))
		return false;
	return transport->settings.probes == TRANSPORT_PROBES_ON ||
	       !address_is_inside(h->source.fd);
}

void probe_begin(struct handshake *h)
{
	int on = SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE;

	h->probe.n = 0;
	h->in_len = 0;
	h->out = more;
	h->out_len = sizeof(more);
	h->probed_since_ns = clock_now_ns();
	if (h->is_accepting)
		(void)setsockopt(h->source.fd, SOL_SOCKET, SO_TIMESTAMPING, &on, sizeof(on));
}

/* When the last of these bytes came, by the first of three stamps, or now. */
static uint64_t came_ns(struct msghdr *message)
{
	struct timespec at = { 0 };

	for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPING)
			memcpy(&at, CMSG_DATA(c), sizeof(at));
	}
	if (!at.tv_sec)
		(void)clock_gettime(CLOCK_REALTIME, &at);
	return (uint64_t)at.tv_sec * NSEC_PER_SEC + (uint64_t)at.tv_nsec;
}

/* Some of one piece: nothing is read beyond it. Returns recvmsg()'s. */
static ssize_t read_some(struct handshake *h, unsigned char *piece, uint64_t *ret_came_ns)
{
	struct iovec iov = { piece, h->in_len ? DATA_PROBE_LEN - h->in_len : 1 };
	union {
		struct cmsghdr first;
		char space[CMSG_SPACE(sizeof(struct scm_timestamping))];
	} control;
	struct msghdr message = {
		.msg_iov = &iov,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	ssize_t n = recvmsg(h->source.fd, &message, 0);

	if (n > 0)
		*ret_came_ns = came_ns(&message);
	return n;
}

int probe_read(struct handshake *h)
{
	unsigned char piece[DATA_PROBE_LEN];
	uint64_t at_ns = 0;

	for (unsigned i = 0; i < 2 * TURN_PIECES; i++) {
		ssize_t n = read_some(h, piece, &at_ns);

		if (n < 0)
			return errno == EAGAIN || errno == EINTR ? 0 : -errno;
		if (!n)
			return -ECONNRESET;
		if (!h->in_len && piece[0] == DATA_PROBE_LAST)
			return 1;
		if (!h->in_len && (piece[0] != DATA_PROBE_MORE || h->probe.n == DATA_PROBE_PIECES))
			return -EPROTO;
		h->in_len += (size_t)n;
		if (h->in_len < DATA_PROBE_LEN)
			continue;
		h->probe.at_ns[h->probe.n++] = at_ns;
		h->in_len = 0;
	}
	return 0;
}

static bool is_enough(const struct handshake *h)
{
	uint64_t took_ns = clock_now_ns() - h->probed_since_ns;

	return h->probe.n == DATA_PROBE_PIECES ||
	       took_ns >= (h->probe.n < MIN_PIECES ? TOO_LONG_NS : ENOUGH_NS);
}

int probe_write(struct handshake *h)
{
	for (unsigned i = 0; i < TURN_PIECES; i++) {
		ssize_t n = send(h->source.fd, h->out, h->out_len, MSG_NOSIGNAL);

		if (n < 0)
			return errno == EAGAIN || errno == EINTR ? 0 : -errno;
		h->out = (const char *)h->out + n;
		h->out_len -= (size_t)n;
		if (h->out_len)
			continue;
		if (h->out == &last + 1)
			return 1;
		h->probe.n++;
		if (is_enough(h)) {
			h->out = &last;
			h->out_len = sizeof(last);
		} else {
			h->out = more;
			h->out_len = sizeof(more);
		}
	}
	return 0;
}

void probe_end(struct handshake *h)
{
	struct tcp_info info = { 0 };
	socklen_t len = sizeof(info);
	uint64_t bytes_s;
	int off = 0;

	/*
	 * Of all ways to ask for stamps the one that can be let go of: while any socket asks, each
	 * packet of the machine gets one.
	 */
	(void)setsockopt(h->source.fd, SOL_SOCKET, SO_TIMESTAMPING, &off, sizeof(off));
	if (getsockopt(h->source.fd, IPPROTO_TCP, TCP_INFO, &info, &len))
		return;
	h->probe.lasted_ns = clock_now_ns() - h->probed_since_ns;
	bytes_s = probe_bytes_s(&h->probe, info.tcpi_min_rtt * (uint64_t)1000);
	if (!bytes_s)
		return;
	atomic_store_explicit(&h->transport->probed_bytes_s, bytes_s, memory_order_relaxed);
	log_info("link: %" PRIu64 " Mbit/s, as %u KiB from node %s (%s) came", bytes_s / 125000,
		 h->probe.n * (DATA_PROBE_LEN >> 10), h->theirs.name, h->address);
}
