/*
 * The lanes of a peer being made. Names are resolved first, once for all lanes; then each lane
 * tries the addresses in turn, and again after a pause that doubles, until the time for it is
 * over: the other daemon may just be starting. A lane that cannot be made is done without, but
 * for the first, which the others wait for. What trying again does not mend (wrong key, version
 * or daemon) loses the peer at once. One that broke later is tried until the peer is lost.
 * transport.c and peer.c start it. Home thread.
 */
#include "transport/tcp/dial.h"
#include "transport/common/address.h"
#include "transport/internal.h"
#include "transport/tcp/handshake.h"

#include "base/clock.h"
#include "base/log.h"
#include <inttypes.h>
#include <stdio.h>
#include <sys/epoll.h>

#define BACKOFF_MIN_NS (10 * NSEC_PER_MSEC)
#define BACKOFF_MAX_NS (500 * NSEC_PER_MSEC)
#define AGAIN_MAX_NS   (5 * NSEC_PER_SEC)
#define AGAIN_SOON_NS  NSEC_PER_SEC

struct attempt {
	struct dial *dial;
	unsigned lane;
	size_t address; /* the one being tried */
	uint64_t backoff_ns;
	struct loop_source source; /* while connect(2) is under way */
	struct loop_timer timer;   /* its end, or the next try */
	struct handshake handshake;
};

struct dial {
	struct peer *peer;
	uint64_t deadline_ns;
	struct resolver *resolver;
	uint64_t backoff_ns; /* of resolving */
	struct loop_timer timer;
	struct addresses addresses;
	struct failure failure; /* the last one */
	unsigned n_attempts, n_over;
	bool is_again; /* a lane that broke: there is no deadline */
	struct attempt attempts[];
};

static void attempt_try(struct attempt *attempt);
static void resolve(struct dial *dial);

static uint64_t next_backoff(uint64_t *backoff_ns, uint64_t max_ns)
{
	uint64_t now = *backoff_ns;

	*backoff_ns = MIN(2 * now, max_ns);
	return now;
}

static uint64_t timeout_ms(const struct dial *dial)
{
	return dial->peer->transport->settings.handshake_timeout_ns / NSEC_PER_MSEC;
}

/* That the time was over says less than what had gone wrong before. */
static void dial_note(struct dial *dial, int status, const char *why)
{
	if (status != -ETIMEDOUT || dial->failure.status == -ETIMEDOUT)
		(void)failure_set(&dial->failure, status, "%s", why);
}

/* No lane at all. */
static void dial_fail(struct dial *dial)
{
	struct failure failure;

	(void)failure_set(&failure, dial->failure.status, "%s (tried for %" PRIu64 " ms)",
			  dial->failure.text, timeout_ms(dial));
	peer_lose(dial->peer, failure.status, failure.text);
}

static unsigned n_made(const struct dial *dial)
{
	unsigned n = 0;

	for (unsigned i = 0; i < dial->peer->transport->settings.n_lanes; i++)
		n += peer_has_lane(dial->peer, dial->attempts[i].lane);
	return n;
}

/* All but the first. */
static int begin_others(struct dial *dial)
{
	struct loop *loop = dial->peer->transport->loop;
	uint64_t now_ns = clock_now_ns();
	int r = 0;

	for (unsigned i = 1; i < dial->n_attempts && !r; i++) {
		struct attempt *attempt = &dial->attempts[i];

		if (attempt->lane == DATA_LANE_BEAT && !(dial->peer->features & DATA_FEATURE_RAILS))
			dial->n_over++;
		else
			r = loop_timer_set(loop, &attempt->timer, now_ns);
	}
	return error_trace(r);
}

/* The attempt made its lane, or gave up. May free the lot. */
static void attempt_over(struct attempt *attempt)
{
	struct dial *dial = attempt->dial;
	struct peer *peer = dial->peer;
	unsigned n_lanes = peer->transport->settings.n_lanes;

	dial->n_over++;
	if (attempt == dial->attempts && (!peer_has_lane(peer, 0) || begin_others(dial))) {
		dial_fail(dial);
		return;
	}
	if (dial->n_over < dial->n_attempts)
		return;
	if (!dial->is_again && n_made(dial) < n_lanes)
		log_warning("%s: only %u of %u lanes could be made: %s", peer->name, n_made(dial),
			    n_lanes, dial->failure.text);
	peer->dial = dial_free(dial);
}

/* When an attempt gives up. */
static uint64_t deadline_of(const struct dial *dial)
{
	return dial->is_again
		       ? clock_now_ns() + dial->peer->transport->settings.handshake_timeout_ns
		       : dial->deadline_ns;
}

/* This address did not work: the next one at once, or all of them again later. */
static void attempt_failed(struct attempt *attempt, int status, const char *why)
{
	struct dial *dial = attempt->dial;
	uint64_t now_ns = clock_now_ns(), backoff_ns;

	loop_timer_cancel(&attempt->timer);
	dial_note(dial, status, why);
	attempt->address++;
	if (attempt->address < dial->addresses.n && now_ns < deadline_of(dial)) {
		attempt_try(attempt);
		return;
	}
	attempt->address = 0;
	backoff_ns =
		next_backoff(&attempt->backoff_ns, dial->is_again ? AGAIN_MAX_NS : BACKOFF_MAX_NS);
	if ((!dial->is_again && now_ns + backoff_ns >= dial->deadline_ns) ||
	    loop_timer_set(dial->peer->transport->loop, &attempt->timer, now_ns + backoff_ns))
		attempt_over(attempt);
}

static int check_daemon(const struct peer *peer, const struct data_hello *hello,
			struct failure *failure)
{
	if (peer->expect_id && hello->sender != peer->expect_id)
		return failure_set(failure, -ESTALE,
				   "another daemon (node %s) answers there, restarted or moved",
				   hello->name);
	if (peer->id && hello->sender != peer->id)
		return failure_set(failure, -ESTALE,
				   "two daemons answer at one address, node %s and node %s",
				   peer->node, hello->name);
	return 0;
}

static void on_handshake(struct handshake *h, int r, bool is_final, const char *why)
{
	struct attempt *attempt = container_of(h, struct attempt, handshake);
	struct peer *peer = attempt->dial->peer;
	struct failure failure;

	if (r && !is_final) {
		attempt_failed(attempt, r, why);
		return;
	}
	if (!r)
		r = check_daemon(peer, &h->theirs, &failure);
	else
		(void)failure_set(&failure, r, "%s", why);
	if (r) {
		peer_lose(peer, r, failure.text);
		return;
	}
	if (!peer->id) {
		peer->id = h->theirs.sender;
		peer_set_node(peer, h->theirs.name);
	}
	if (h->features & DATA_FEATURE_RDMA) {
		r = peer->transport->hooks->rdma_agreed(peer);
	} else if (peer->transport->settings.is_rdma_strict) {
		peer_lose(peer, -EPROTONOSUPPORT, "it has no RDMA, and transport = rdma wants it");
		return;
	}
	peer->addresses = attempt->dial->addresses;
	if (!r)
		r = tcp_lane_add(peer, TAKE_FD(h->source.fd), attempt->lane, h);
	if (r)
		peer_lose(peer, r, "out of memory");
	else
		attempt_over(attempt);
}

static void begin_handshake(struct attempt *attempt)
{
	struct handshake *h = &attempt->handshake;
	int r, fd = TAKE_FD(attempt->source.fd);

	loop_timer_cancel(&attempt->timer);
	*h = (struct handshake){
		.transport = attempt->dial->peer->transport,
		.lane = attempt->dial->peer->group << 8 | attempt->lane,
		.sender = attempt->dial->peer->alias,
		.offers_probe = attempt->dial->peer->offers_probe && !attempt->lane,
		.done = on_handshake,
	};
	r = handshake_start(h, fd, deadline_of(attempt->dial));
	if (r)
		attempt_failed(attempt, r, strerrordesc_np(-r));
}

static void on_connected(struct loop_source *source, uint32_t events)
{
	struct attempt *attempt = container_of(source, struct attempt, source);
	int error = 0;
	socklen_t len = sizeof(error);

	loop_remove(source);
	if (getsockopt(source->fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0)
		error = errno;
	if (!error) {
		begin_handshake(attempt);
		return;
	}
	source->fd = fd_close(source->fd);
	attempt_failed(attempt, -error, strerrordesc_np(error));
}

static void on_attempt_timer(struct loop_timer *timer)
{
	struct attempt *attempt = container_of(timer, struct attempt, timer);

	if (!attempt->source.loop) { /* after a pause */
		attempt_try(attempt);
		return;
	}
	loop_remove(&attempt->source);
	attempt->source.fd = fd_close(attempt->source.fd);
	attempt_failed(attempt, -ETIMEDOUT, strerrordesc_np(ETIMEDOUT));
}

/* Leaves each address that is still to be tried its share of the time. */
static uint64_t attempt_deadline(const struct attempt *attempt)
{
	const struct dial *dial = attempt->dial;
	uint64_t now_ns = clock_now_ns(), deadline_ns = deadline_of(dial);

	if (now_ns >= deadline_ns)
		return now_ns;
	return now_ns + (deadline_ns - now_ns) / (dial->addresses.n - attempt->address);
}

static int attempt_connect(struct attempt *attempt)
{
	struct dial *dial = attempt->dial;
	struct transport *transport = dial->peer->transport;
	const struct address *address = &dial->addresses.list[attempt->address];
	_cleanup_(fd_closep) int fd = -1;
	int r;

	fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return error_origin(-errno);
	address_tune_socket(fd, transport->settings.peer_timeout_ns);
	r = address_set_congestion(fd, address, transport->congestion);
	if (r)
		return error_trace(r);
	if (connect(fd, &address->any, address->len) < 0 && errno != EINPROGRESS)
		return -errno;
	attempt->source = (struct loop_source){ .fd = fd, .ready = on_connected };
	r = loop_add(transport->loop, &attempt->source, EPOLLOUT);
	if (!r)
		r = loop_timer_set(transport->loop, &attempt->timer, attempt_deadline(attempt));
	if (r) {
		loop_remove(&attempt->source);
		attempt->source.fd = -1;
		return error_trace(r);
	}
	(void)TAKE_FD(fd);
	return 0;
}

static void attempt_try(struct attempt *attempt)
{
	int r = attempt_connect(attempt);

	if (r)
		attempt_failed(attempt, r, strerrordesc_np(-r));
}

static void on_resolved(void *user, int r, const char *why, const struct addresses *addresses)
{
	struct dial *dial = user;
	uint64_t now_ns = clock_now_ns(), backoff_ns;

	loop_timer_cancel(&dial->timer);
	if (!r) {
		dial->addresses = *addresses;
		dial->resolver = resolver_free(dial->resolver);
		attempt_try(dial->attempts);
		return;
	}
	dial->resolver = resolver_free(dial->resolver);
	dial_note(dial, r, why);
	backoff_ns = next_backoff(&dial->backoff_ns, BACKOFF_MAX_NS);
	if (now_ns + backoff_ns >= dial->deadline_ns ||
	    loop_timer_set(dial->peer->transport->loop, &dial->timer, now_ns + backoff_ns))
		dial_fail(dial);
}

/* While a resolver is at work: its time is over. Else the pause is. */
static void on_resolve_timer(struct loop_timer *timer)
{
	struct dial *dial = container_of(timer, struct dial, timer);

	if (dial->resolver) {
		dial_note(dial, -ETIMEDOUT, "the name was not resolved in time");
		dial_fail(dial);
		return;
	}
	resolve(dial);
}

static void resolve(struct dial *dial)
{
	struct transport *transport = dial->peer->transport;
	struct resolver_params params = {
		.address = dial->peer->address,
		.mailbox = &transport->mailbox,
		.done = on_resolved,
		.user = dial,
	};
	int r;

	r = loop_timer_set(transport->loop, &dial->timer, dial->deadline_ns);
	if (!r)
		r = resolver_start(&params, &dial->resolver);
	if (r) {
		(void)failure_set(&dial->failure, r, "%s", strerrordesc_np(-r));
		dial_fail(dial);
	}
}

static void dial_init(struct dial *dial, struct peer *peer)
{
	dial->peer = peer;
	dial->deadline_ns = clock_now_ns() + peer->transport->settings.handshake_timeout_ns;
	dial->backoff_ns = BACKOFF_MIN_NS;
	dial->timer.expired = on_resolve_timer;
	(void)failure_set(&dial->failure, -ETIMEDOUT, "%s", strerrordesc_np(ETIMEDOUT));
	dial->n_attempts = peer->transport->settings.n_lanes + 1;
	for (unsigned i = 0; i < dial->n_attempts; i++) {
		struct attempt *attempt = &dial->attempts[i];

		attempt->dial = dial;
		attempt->lane = i < peer->transport->settings.n_lanes ? i : DATA_LANE_BEAT;
		attempt->backoff_ns = BACKOFF_MIN_NS;
		attempt->source.fd = -1;
		attempt->handshake.source.fd = -1;
		attempt->timer.expired = on_attempt_timer;
	}
}

static int dial_new(struct peer *peer, struct dial **ret_dial)
{
	struct dial *dial = calloc(1, sizeof(*dial) + (peer->transport->settings.n_lanes + 1) *
							      sizeof(struct attempt));

	if (!dial)
		return error_origin(-ENOMEM);
	dial_init(dial, peer);
	*ret_dial = dial;
	return 0;
}

/* Only sets timers: everything else, failure too, happens in the loop. */
int dial_start(struct peer *peer, const struct addresses *addresses)
{
	struct dial *dial;
	int r;

	r = dial_new(peer, &dial);
	if (r)
		return error_trace(r);
	if (addresses)
		dial->addresses = *addresses;
	r = loop_timer_set(peer->transport->loop,
			   addresses ? &dial->attempts[0].timer : &dial->timer, clock_now_ns());
	if (r) {
		dial_free(dial);
		return error_trace(r);
	}
	peer->dial = dial;
	return 0;
}

/* How long to wait first: those that break as soon as they are made are not made in a circle. */
static uint64_t again_pause_ns(struct peer *peer, uint64_t now_ns)
{
	bool is_soon = peer->again.ns && now_ns - peer->again.ns < AGAIN_SOON_NS;

	peer->again.ns = now_ns;
	if (!is_soon)
		peer->again.pause_ns = 0;
	else
		peer->again.pause_ns = MIN(MAX(2 * peer->again.pause_ns, (uint64_t)BACKOFF_MIN_NS),
					   (uint64_t)BACKOFF_MAX_NS);
	return peer->again.pause_ns;
}

int dial_again(struct peer *peer, unsigned lane)
{
	uint64_t now_ns = clock_now_ns();
	struct attempt *attempt;
	int r;

	if (!peer->dial) {
		r = dial_new(peer, &peer->dial);
		if (r)
			return error_trace(r);
		peer->dial->addresses = peer->addresses;
		peer->dial->n_over = peer->dial->n_attempts;
	}
	attempt = &peer->dial->attempts[MIN(lane, peer->transport->settings.n_lanes)];
	peer->dial->is_again = true;
	peer->dial->n_over--;
	attempt->address = 0;
	attempt->backoff_ns = BACKOFF_MIN_NS;
	return error_trace(loop_timer_set(peer->transport->loop, &attempt->timer,
					  now_ns + again_pause_ns(peer, now_ns)));
}

struct dial *dial_free(struct dial *dial)
{
	if (!dial)
		return NULL;
	loop_timer_cancel(&dial->timer);
	resolver_free(dial->resolver);
	for (unsigned i = 0; i < dial->n_attempts; i++) {
		struct attempt *attempt = &dial->attempts[i];

		loop_timer_cancel(&attempt->timer);
		loop_remove(&attempt->source);
		fd_close(attempt->source.fd);
		handshake_done(&attempt->handshake);
	}
	free(dial);
	return NULL;
}
