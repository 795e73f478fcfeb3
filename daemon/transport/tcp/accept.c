/*
 * The data port: connections accepted, bounded while they have not proved themselves, and made
 * lanes of the peer that they belong to. transport.c starts and stops the port. Home thread.
 */
#include "transport/common/address.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"
#include "transport/tcp/handshake.h"

#include "base/clock.h"
#include "base/log.h"
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>

#define ACCEPT_PAUSE_NS (200 * NSEC_PER_MSEC) /* when there are no descriptors left; a guess */
/*
 * Connections that have not proved themselves, in all and from one address: as many as the nodes of
 * a large job make at once from behind one translator of addresses.
 */
#define UNPROVED_MAX	1024
#define UNPROVED_OF_ONE 256

/* The peer that a connection belongs to: one sender's, of one of its transport_connect()s. */
static struct peer *find_caller(struct transport *transport, uint64_t id, unsigned group)
{
	struct peer *peer;

	list_for_each (peer, &transport->peers, link)
		if (peer->kind == PEER_CALLING && peer->state == PEER_UP && peer->id == id &&
		    peer->group == group)
			return peer;
	return NULL;
}

static int make_caller(struct transport *transport, const struct handshake *h,
		       struct peer **ret_peer)
{
	struct peer *peer;
	int r;

	r = peer_new(transport, PEER_CALLING, h->address, h->from, &peer);
	if (r)
		return error_trace(r);
	peer->id = h->theirs.sender;
	peer->group = h->theirs.lane >> 8;
	peer->state = PEER_UP;
	peer_set_node(peer, h->theirs.name);
	list_push_back(&transport->peers, &peer->link);
	*ret_peer = peer;
	return 0;
}

static int adopt_lane(struct handshake *h)
{
	struct transport *transport = h->transport;
	unsigned group = h->theirs.lane >> 8, index = h->theirs.lane & 0xff;
	struct peer *peer = find_caller(transport, h->theirs.sender, group);
	int r;

	bool is_spare = index && (h->features & DATA_FEATURE_RAILS);

	/* It would be the first, with messages; where signs of life are apart, the other side has the feature. */
	if (index == DATA_LANE_BEAT && !is_spare)
		return -EPROTO;
	if (peer && is_spare) {
		struct lane *lane = peer_find_lane(peer, index);

		if (lane)
			(void)peer_lane_broke(lane, -ECONNRESET, "made anew");
	} else if (is_spare) {
		/* Its first connection has broken: the other side will see that. */
		return -ECONNRESET;
	} else if (peer && peer_has_lane(peer, index)) {
		/*
		 * Groups have come round: what is left of the old one is dead, the other side just
		 * has not said so.
		 */
		peer_lose(peer, -ECONNRESET, "connected anew");
		peer = NULL;
	}
	if (!peer) {
		r = make_caller(transport, h, &peer);
		if (r)
			return error_trace(r);
	}
	r = tcp_lane_add(peer, TAKE_FD(h->source.fd), index, h);
	if (!r && (h->features & DATA_FEATURE_RDMA))
		r = peer->transport->hooks->rdma_agreed(peer);
	if (r && list_empty(&peer->lanes))
		peer_lose(peer, r, "out of memory");
	return error_trace(r);
}

static void complain_full(struct transport *transport)
{
	transport_complain(transport, "data port %u: %u connections, no more are accepted",
			   transport->port.number, transport->port.n_accepted);
}

/* It is the one that has waited longest, and its place is another's now. */
static void give_way(struct handshake *h)
{
	struct transport *transport = h->transport;

	transport_complain(
		transport,
		"connection from %s closed: it had not proved itself while %u others came",
		h->address, transport->port.n_unproved);
	transport->port.n_unproved--;
	list_remove(&h->link);
	handshake_done(h);
	free(h);
}

/*
 * Nobody who has proved himself, and nobody from elsewhere, waits for strangers: the oldest of one
 * address, or of all, gives way.
 */
static void make_place(struct transport *transport, const char *source)
{
	struct handshake *h, *oldest = NULL;
	unsigned n = 0;

	list_for_each (h, &transport->port.handshakes, link) {
		if (strcmp(h->from, source))
			continue;
		oldest = oldest ?: h;
		n++;
	}
	if (n >= UNPROVED_OF_ONE)
		give_way(oldest);
	else if (transport->port.n_unproved >= UNPROVED_MAX)
		give_way(list_first(&transport->port.handshakes, struct handshake, link));
}

bool accept_has_its_share(const struct transport *transport, const char *source, char *text,
			  size_t size)
{
	unsigned n = 0, left = transport->settings.max_connections - transport->port.n_accepted;
	const struct peer *peer;
	const struct lane *lane;

	list_for_each (peer, &transport->peers, link) {
		if (peer->kind != PEER_CALLING || strcmp(peer->source, source))
			continue;
		n += peer->n_accepting;
		list_for_each (lane, &peer->lanes, link)
			n += lane->is_accepted;
	}
	if (n < 3 * left)
		return false;
	(void)snprintf(text, size,
		       "%u connections are from its TCP address (%s) already: three quarters of "
		       "what others leave (max_connections: %u)",
		       n, source, transport->settings.max_connections);
	return true;
}

static void on_handshake(struct handshake *h, int r, bool is_final, const char *why)
{
	struct transport *transport = h->transport;
	char text[192];

	(void)is_final;
	transport->port.n_unproved--;
	if (!r && transport->port.n_accepted >= transport->settings.max_connections) {
		complain_full(transport);
	} else if (!r && accept_has_its_share(transport, h->from, text, sizeof(text))) {
		transport_complain(transport, "connection from %s refused: node %s: %s", h->address,
				   h->theirs.name, text);
	} else if (!r) {
		transport->port.n_accepted++;
		r = adopt_lane(h);
		if (r)
			transport->port.n_accepted--;
	} else if (why) {
		transport_complain(transport, "connection from %s refused: %s%s%s%s", h->address,
				   *h->theirs.name ? "node " : "", h->theirs.name,
				   *h->theirs.name ? ": " : "", why);
	}
	list_remove(&h->link);
	handshake_done(h);
	free(h);
}

/* Takes over a connection; counts it. */
int accept_adopt(struct transport *transport, int fd)
{
	struct address address = { .len = sizeof(address.storage) };
	struct handshake *h = calloc(1, sizeof(*h));
	int r;

	if (!h) {
		fd_close(fd);
		return error_origin(-ENOMEM);
	}
	h->transport = transport;
	h->is_accepting = true;
	h->sender = transport->id;
	h->done = on_handshake;
	if (getpeername(fd, &address.any, &address.len) < 0)
		address.any.sa_family = AF_UNSPEC;
	address_format(&address, h->address, sizeof(h->address));
	source_text(&address.storage, h->from);
	make_place(transport, h->from);
	address_tune_socket(fd, transport->settings.peer_timeout_ns);
	address_limit(fd);
	r = handshake_start(h, fd, clock_now_ns() + transport->settings.handshake_timeout_ns);
	if (r) {
		free(h);
		return error_trace(r);
	}
	list_push_back(&transport->port.handshakes, &h->link);
	transport->port.n_unproved++;
	return 0;
}

/*
 * A full table leaves the connection in the backlog, and the listener readable for ever: look away
 * for a while.
 */
static void accept_pause(struct transport *transport, int why)
{
	transport_complain(transport, "data port %u: accept: %s", transport->port.number,
			   strerrordesc_np(why));
	if (loop_timer_set(transport->loop, &transport->port.timer,
			   clock_now_ns() + ACCEPT_PAUSE_NS))
		return;
	(void)loop_modify(&transport->port.listener, 0);
}

static void on_pause_over(struct loop_timer *timer)
{
	struct transport *transport = container_of(timer, struct transport, port.timer);

	(void)loop_modify(&transport->port.listener, EPOLLIN);
}

/* One connection a turn: who does nothing but connect takes turns with all else that the loop has. */
static void on_listener_ready(struct loop_source *source, uint32_t events)
{
	struct transport *transport = container_of(source, struct transport, port.listener);
	int fd = accept4(source->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	(void)events;
	if (fd < 0) {
		/* Others are troubles of the one connection that was to be accepted. */
		if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
			accept_pause(transport, errno);
	} else if (transport->port.n_accepted >= transport->settings.max_connections) {
		fd_close(fd);
		complain_full(transport);
	} else {
		(void)accept_adopt(transport, fd);
	}
}

static int listen_at(const struct address *address)
{
	_cleanup_(fd_closep) int fd = -1;
	int on = 1, off = 0;

	fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return error_origin(-errno);
	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (address->any.sa_family == AF_INET6)
		(void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
	if (bind(fd, &address->any, address->len) < 0 || listen(fd, SOMAXCONN) < 0)
		return error_origin(-errno);
	return TAKE_FD(fd);
}

/*
 * The first address that can be listened at. The name is our own: asking for it may block, at
 * start.
 */
static int listen_on_any(const char *text)
{
	struct addresses addresses;
	const char *why;
	int r;

	r = address_resolve(text, false, true, &addresses, &why);
	if (r)
		return error_trace(r);
	r = error_origin(-EADDRNOTAVAIL);
	for (size_t i = 0; i < addresses.n && r < 0; i++)
		r = listen_at(&addresses.list[i]);
	return r;
}

int accept_start(struct transport *transport, const char *listen_on, int listen_fd)
{
	_cleanup_(fd_closep) int fd = listen_fd;
	struct address address = { .len = sizeof(address.storage) };
	int r;

	if (fd < 0 && !listen_on)
		return 0;
	if (fd < 0) {
		fd = listen_on_any(listen_on);
		if (fd < 0)
			return error_trace(TAKE_FD(fd));
	}
	if (getsockname(fd, &address.any, &address.len) < 0)
		return error_origin(-errno);
	if (address.any.sa_family == AF_INET)
		transport->port.number = ntohs(address.in.sin_port);
	else if (address.any.sa_family == AF_INET6)
		transport->port.number = ntohs(address.in6.sin6_port);
	if (fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
		return error_origin(-errno);
	r = address_set_congestion(fd, &address, transport->congestion);
	if (r)
		return error_trace(r);

	transport->port.listener = (struct loop_source){ .fd = fd, .ready = on_listener_ready };
	transport->port.timer.expired = on_pause_over;
	r = loop_add(transport->loop, &transport->port.listener, EPOLLIN);
	if (r) {
		transport->port.listener.fd = -1;
		return error_trace(r);
	}
	(void)TAKE_FD(fd);
	return 0;
}

void accept_stop(struct transport *transport)
{
	struct handshake *h;

	loop_timer_cancel(&transport->port.timer);
	loop_remove(&transport->port.listener);
	transport->port.listener.fd = fd_close(transport->port.listener.fd);
	while ((h = list_first(&transport->port.handshakes, struct handshake, link))) {
		list_remove(&h->link);
		handshake_done(h);
		free(h);
		transport->port.n_unproved--;
	}
}
