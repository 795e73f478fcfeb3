/*
 * What a peer has of RDMA beside its lanes: offers, and the timer that asks for another when a
 * rail broke, or could not be made. peer/peer.c, tcp/dial.c and tcp/accept.c call, by the table. Home thread.
 */
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"

#include "base/clock.h"
#include "base/log.h"
#include <stdio.h>

#define REDIAL_MAX_NS (120 * NSEC_PER_SEC)

void rdma_send_offer(struct peer *peer, const struct data_rdma_offer *offer)
{
	struct data_header header = { .op = DATA_RDMA, .len = offer ? sizeof(*offer) : 0 };

	/* Out of memory: then there is no RDMA with this peer. */
	(void)peer_notice(peer, &header, offer);
}

/* Without memory for the timer no rail is made until another breaks. */
static void ask_later(struct peer *peer)
{
	struct rdma_peer *state = peer->rdma;

	if (loop_timer_set(peer->transport->loop, &state->timer, clock_now_ns() + state->redial_ns))
		return;
	state->redial_ns = MIN(2 * state->redial_ns, (uint64_t)REDIAL_MAX_NS);
}

void rdma_dial_over(struct peer *peer)
{
	struct rdma_peer *state = peer->rdma;
	struct rdma *rdma = peer->transport->rdma;
	char text[ERROR_TEXT_MAX + 1];

	if (peer->state != PEER_UP || state->n_dialing || !state->has_failed)
		return;
	if (rdma->transport->settings.is_rdma_strict && !peer_n_rails(peer) && !state->is_up) {
		(void)snprintf(text, sizeof(text), "no RDMA, and transport = rdma wants it: %.300s",
			       state->failure.text);
		peer_lose(peer, state->failure.status ?: -ECONNREFUSED, text);
		return;
	}
	/* Beside other rails once, until one breaks or comes up. */
	if (state->failure.status &&
	    (!peer_n_rails(peer) || state->redial_ns == RDMA_REDIAL_MIN_NS))
		log_notice("%s: rdma: %s; parts go by %s", peer->name, state->failure.text,
			   peer_n_rails(peer) ? "other rails" : "TCP");
	ask_later(peer);
}

static void peer_on_timer(struct loop_timer *timer)
{
	struct rdma_peer *state = container_of(timer, struct rdma_peer, timer);
	struct peer *peer = state->peer;

	if (peer->state != PEER_UP)
		return;
	if (peer->transport->settings.is_rdma_strict && !state->is_up) {
		(void)failure_set(&state->failure, -ETIMEDOUT, "it makes no offer");
		state->has_failed = true;
		rdma_dial_over(peer);
		return;
	}
	rdma_send_offer(peer, NULL);
	/* An offer ends that. */
	ask_later(peer);
}

int rdma_begin(struct peer *peer)
{
	struct rdma_peer *state;

	if (peer->rdma)
		return 0;
	state = calloc(1, sizeof(*state));
	if (!state)
		return error_origin(-ENOMEM);
	state->peer = peer;
	state->timer.expired = peer_on_timer;
	state->redial_ns = RDMA_REDIAL_MIN_NS;
	peer->rdma = state;
	if (peer->kind == PEER_CALLING)
		return error_trace(rdma_offer(peer));
	if (!peer->transport->settings.is_rdma_strict)
		return 0;
	return error_trace(
		loop_timer_set(peer->transport->loop, &state->timer,
			       clock_now_ns() + peer->transport->settings.handshake_timeout_ns));
}

void rdma_notice_arrived(struct peer *peer, const struct data_header *header, const void *payload)
{
	bool is_offer = header->len > 0;

	if (!peer->rdma || is_offer == (peer->kind == PEER_CALLING)) {
		peer_kill(peer, "protocol error: RDMA that was not agreed upon");
		return;
	}
	if (is_offer)
		rdma_dial(peer, payload);
	else
		(void)rdma_offer(peer);
}

bool rdma_lane_lost(struct lane *lane, bool is_silent)
{
	struct peer *peer = lane->peer;
	struct rdma *rdma = peer->transport->rdma;
	bool is_wire = is_silent || lane->rdma->is_broken;

	if (!is_wire || peer->state != PEER_UP)
		return false;
	if (lane->is_closing)
		return true;
	if (rdma->transport->settings.is_rdma_strict && lane->makes_calls &&
	    peer_n_rails(peer) == 1)
		return false;
	log_notice("%s: rdma: %s; its calls go another way", peer->name,
		   is_silent ? "no sign of life" : lane->failure.text);
	metric_add(&rdma->metrics.links_broken, 1);
	lane_close(lane);
	return true;
}

void rdma_lane_closed(struct peer *peer, unsigned n_moved)
{
	metric_add(&peer->transport->rdma->metrics.calls_moved, n_moved);
	if (peer->kind != PEER_CALLED || peer->state != PEER_UP)
		return;
	peer->rdma->has_failed = true;
	peer->rdma->redial_ns = RDMA_REDIAL_MIN_NS;
	rdma_dial_over(peer);
}

void rdma_peer_close(struct peer *peer)
{
	if (!peer->rdma)
		return;
	loop_timer_cancel(&peer->rdma->timer);
	rdma_links_drop(peer);
	peer->rdma->n_dialing = 0;
}

struct rdma_peer *rdma_peer_free(struct rdma_peer *state)
{
	if (state)
		loop_timer_cancel(&state->timer);
	free(state);
	return NULL;
}

void rdma_describe(const struct peer *peer, char *text, size_t size)
{
	const struct lane *lane;
	size_t n = 0;

	(void)snprintf(text, size, "tcp");
	list_for_each (lane, &peer->lanes, link) {
		if (!lane->rdma || lane->is_closing)
			continue;
		n += (size_t)snprintf(text + n, size - n, "%s%s", n ? " " : "rdma ",
				      lane->rdma->port->device->name);
		if (n >= size)
			return;
	}
}
