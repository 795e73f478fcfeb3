/*
 * A lane over a TCP connection; send.c and receive.c hold its two directions. peer.c makes the
 * lane, the rest runs on the worker's thread.
 */
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"
#include "transport/tcp/handshake.h"

#include <stdio.h>
#include <sys/epoll.h>

static void tcp_on_ready(struct loop_source *source, uint32_t events)
{
	struct lane *lane = container_of(source, struct lane, source);

	lane->output.is_unblocked = events & EPOLLOUT;
	lane->output.is_flushed_soon = true;
	if (events & (EPOLLIN | EPOLLERR | EPOLLHUP))
		lane_receive(lane);
	lane->output.is_flushed_soon = false;
	if (!lane->is_failed && (lane->output.is_unblocked || lane->output.is_fresh))
		lane_flush(lane);
}

static int tcp_start(struct lane *lane)
{
	if (lane->index != DATA_LANE_BEAT)
		atomic_fetch_add_explicit(&lane->transport->n_tcp_lanes, 1, memory_order_relaxed);
	return error_trace(loop_add(lane->worker->loop, &lane->source, EPOLLIN));
}

static void tcp_cut(struct lane *lane)
{
	loop_timer_cancel(&lane->watch.timer);
	loop_remove(&lane->source);
	lane->source.fd = fd_close(lane->source.fd);
}

static void tcp_release(struct lane *lane)
{
	if (lane->index != DATA_LANE_BEAT)
		atomic_fetch_sub_explicit(&lane->transport->n_tcp_lanes, 1, memory_order_relaxed);
	for (unsigned i = 0; i < lane->begun.frame.n; i++)
		lane_message_done(lane, lane->begun.messages[i], false);
	lane->begun.frame.n = 0;
	lane_receive_done(lane);
}

static const struct lane_ops tcp_ops = {
	.start = tcp_start,
	.flush = lane_flush,
	.cut = tcp_cut,
	.release = tcp_release,
};

static void tcp_lane_drop(struct lane *lane)
{
	tcp_cut(lane);
	lane_free(lane);
}

static int tcp_lane_new(struct peer *peer, int fd, const struct handshake *handshake,
			struct lane **ret_lane)
{
	struct lane *lane;
	int r;

	r = lane_new(peer, &tcp_ops, &lane);
	if (r) {
		fd_close(fd);
		return error_trace(r);
	}
	lane->source = (struct loop_source){ .fd = fd, .ready = tcp_on_ready };
	r = handshake_seals(handshake, &lane->in, &lane->out);
	if (r) {
		tcp_lane_drop(lane);
		return error_trace(r);
	}
	*ret_lane = lane;
	return 0;
}

void lane_want(struct lane *lane, uint32_t events)
{
	int r;

	if (lane->source.events == events)
		return;
	r = loop_modify(&lane->source, events);
	if (r)
		lane_fail(lane, r, "epoll: %s", strerrordesc_np(-r));
}

int tcp_lane_add(struct peer *peer, int fd, unsigned index, const struct handshake *handshake)
{
	uint64_t features = handshake->features;
	struct lane *lane = NULL;
	int r;

	r = tcp_lane_new(peer, fd, handshake, &lane);
	if (r)
		return error_trace(r);
	lane->can_repeat = features & DATA_FEATURE_RAILS;
	lane->has_packs = features & DATA_FEATURE_PACKS;
	lane->is_spare = index && (features & DATA_FEATURE_RAILS);
	peer->features = features;
	if (index == DATA_LANE_BEAT) {
		r = transport_beat_worker(peer->transport, &lane->worker);
		if (r) {
			tcp_lane_drop(lane);
			return error_trace(r);
		}
	}
	peer_take_lane(peer, lane, index, handshake->is_accepting);
	return 0;
}
