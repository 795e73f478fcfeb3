/*
 * Calls: put on a lane, moved to another when the lane breaks, ended by an answer or an error.
 * peer_call() and peer_call_on() are transport.h's, for the agent and drain.c. Home thread, but
 * for what peer.h says otherwise.
 */
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/delivery.h"
#include "transport/peer/peer.h"

#include "base/clock.h"
#include "base/log.h"
#include "proto/text.h"
#include <stdio.h>

static void call_message_init(struct call *call)
{
	call->message = (struct message){
		.header = &call->header,
		.payload = call->payload,
		.priority = call->header.priority,
		.kind = MESSAGE_CALL,
		.urgent = !call->header.len || call->header.op != DATA_PUSH,
	};
}

/*
 * Set-up calls stay in the order in which they were made, and notices with them: all on the first
 * lane, which is one of TCP. So does a call that two RDMA lanes have failed. A push takes, of the
 * RDMA lanes if there are any, the lane with the fewest bytes to be written; among equals, the one
 * with the fewest calls. NULL: it has to wait for an RDMA lane.
 */
static struct lane *pick_lane(const struct peer *peer, const struct data_header *header)
{
	bool is_moved = header->flags & DATA_FLAG_MOVED;
	bool is_rdma = peer->rdma && peer_n_rails(peer);
	struct lane *lane, *best = NULL;
	uint64_t bytes, best_bytes = 0;

	if ((header->op != DATA_PUSH && header->op != DATA_PULL) ||
	    data_flags_rail(header->flags) != data_flags_last(header->flags))
		return list_first(&peer->lanes, struct lane, link);
	if (!is_rdma && is_moved)
		return list_first(&peer->lanes, struct lane, link);
	if (!is_rdma && peer->transport->settings.is_rdma_strict)
		return NULL;
	list_for_each (lane, &peer->lanes, link) {
		if (!lane->rdma == is_rdma || lane->is_closing || lane->index == DATA_LANE_BEAT)
			continue;
		bytes = lane_queued(lane);
		if (!best || bytes < best_bytes ||
		    (bytes == best_bytes && lane->n_business < best->n_business)) {
			best = lane;
			best_bytes = bytes;
		}
	}
	return best;
}

/* What no processor can touch goes by RDMA or not at all. */
static bool needs_rdma(const struct call *call)
{
	return (call->is_payload_direct && call->header.len) ||
	       (call->is_target_direct && call->target);
}

void call_send(struct call *call)
{
	struct lane *lane = pick_lane(call->peer, &call->header);

	if (!lane) {
		peer_wait_for_lane(call->peer, call);
		return;
	}
	if (!lane->rdma && needs_rdma(call)) {
		call_fail(call, -ENOLINK, "no connection by RDMA is left");
		return;
	}
	call->state = CALL_QUEUED;
	call->is_target_named = call->is_written = false;
	call->window = NULL;
	list_push_back(&call->peer->calls, &call->link);
	lane_begin_business(lane);
	call->message.lane = lane;
	lane_send(lane, &call->message);
}

/*
 * The lane is gone, and with it whoever could write into the target. What the other side had not
 * heard of is made anew; of the rest the answer is asked for.
 */
static void call_move(struct call *call, unsigned rail)
{
	struct data_header *header = &call->header;
	bool arrived = call->is_written || (header->flags & DATA_FLAG_ARRIVED);
	bool is_moved = header->flags & DATA_FLAG_MOVED;
	unsigned first = is_moved ? data_flags_rail(header->flags) : rail;

	call->answer_block = block_unref(call->answer_block);
	call->answer = (struct data_header){ 0 };
	call->text[0] = '\0';
	if (call->state != CALL_QUEUED) {
		header->moved = is_moved ? header->moved : header->cookie;
		header->flags =
			(uint16_t)((header->flags & DATA_FLAG_AGAIN) | DATA_FLAG_MOVED |
				   (arrived ? DATA_FLAG_ARRIVED : 0) |
				   first << DATA_FLAG_RAIL_SHIFT | rail << DATA_FLAG_LAST_SHIFT);
	}
	if (arrived)
		header->len = 0;
	call_message_init(call);
	call_send(call);
}

/* The calls of a lane, in their order. */
static void take_calls(struct lane *lane, struct list *calls)
{
	struct call *call, *next;

	list_for_each_safe (call, next, &lane->peer->calls, link) {
		if (call->message.lane != lane)
			continue;
		list_remove(&call->link);
		list_push_back(calls, &call->link);
	}
}

unsigned call_move_all(struct lane *lane)
{
	struct list calls = LIST_INIT(calls);
	struct call *call;
	unsigned n = 0;

	take_calls(lane, &calls);
	while ((call = list_first(&calls, struct call, link))) {
		list_remove(&call->link);
		call_move(call, lane->index);
		n++;
	}
	return n;
}

bool call_reroute_all(struct lane *lane)
{
	struct peer *peer = lane->peer;
	struct list calls = LIST_INIT(calls);
	struct call *call;
	char text[ERROR_TEXT_MAX + 1];

	list_for_each (call, &peer->calls, link)
		if (call->message.lane == lane && call->state != CALL_QUEUED &&
		    !call->is_repeatable)
			return false;
	(void)snprintf(text, sizeof(text), "%.180s: %.250s", peer->name, lane->broke.text);
	take_calls(lane, &calls);
	while ((call = list_first(&calls, struct call, link))) {
		list_remove(&call->link);
		call->message.lane = NULL;
		if (call->state == CALL_QUEUED) {
			call_message_init(call);
			call_send(call);
			continue;
		}
		call->answer_block = block_unref(call->answer_block);
		call->answer = (struct data_header){ 0 };
		call_fail(call, -ENETRESET, text);
	}
	return true;
}

static void call_on_sent(struct mail *mail)
{
	struct call *call = container_of(mail, struct call, sent_mail);

	call->sent(call);
}

void peer_call(struct peer *peer, struct call *call)
{
	assert(peer->kind != PEER_CALLING);
	assert(call->done &&
	       call->header.len <= DATA_PAYLOAD_MAX + DATA_CONTRIBUTORS_MAX + sizeof(uint64_t));

	call->header.magic = DATA_MAGIC;
	call->header.version = DATA_VERSION;
	call->header.flags = call->is_again ? DATA_FLAG_AGAIN : 0;
	call->header.moved = 0;
	call->status = 0;
	call->text[0] = '\0';
	call->answer_block = NULL;
	call->peer = peer;
	call->incoming = NULL;
	call->sent_mail.run = call_on_sent;
	call_message_init(call);
	if (peer->kind == PEER_SELF)
		inproc_call(call);
	else if (peer->state == PEER_UP)
		call_send(call);
	else
		peer_wait_for_lane(peer, call);
}

bool peer_takes_direct(const struct peer *peer, uint64_t len)
{
	return peer->state == PEER_UP && peer->rdma && len > DATA_RDMA_EAGER &&
	       (peer_n_rails(peer) || peer->transport->settings.is_rdma_strict);
}

void peer_call_on(struct call *call)
{
	assert(call->status == -ENOLINK);
	call->status = 0;
	call->text[0] = '\0';
	call_message_init(call);
	if (call->peer->state == PEER_UP)
		call_send(call);
	else
		peer_wait_for_lane(call->peer, call);
}

#define DAMAGED_NS (10 * NSEC_PER_SEC) /* between two lines about damaged payloads */

void call_say_damaged(const struct peer *peer)
{
	struct transport *transport = peer->transport;
	uint64_t now_ns = clock_now_ns();

	transport->damaged.n_calls++;
	if (transport->damaged.said_ns && now_ns - transport->damaged.said_ns < DAMAGED_NS)
		return;
	log_warning("%s: %s, and is sent again, or costs its round (%u since this was last said; "
		    "bps_checksum_errors_total counts all)",
		    peer->name, call_damaged_text, transport->damaged.n_calls);
	transport->damaged.said_ns = now_ns;
	transport->damaged.n_calls = 0;
}

void call_answered(struct mail *mail)
{
	struct call *call = container_of(mail, struct call, message.mail);

	if ((call->status == -ENETRESET || call->status == -EBADMSG) &&
	    call->answer.op != DATA_ERROR)
		call_say_damaged(call->peer);
	/* Lost with an RDMA connection: the word of the other transport, not of a server. */
	if (call->status == -ENETRESET && call->is_repeatable)
		call->answer = (struct data_header){ 0 };
	call_end(call);
}

void call_end(struct call *call)
{
	struct block *answer_block = call->answer_block;

	list_remove(&call->link);
	if (call->message.lane)
		lane_end_business(call->message.lane);
	call->payload_block = block_unref(call->payload_block);
	call->state = CALL_ENDED;
	call->done(call); /* it may be gone after that */
	block_unref(answer_block);
}

void call_fail(struct call *call, int status, const char *text)
{
	call->status = status;
	(void)snprintf(call->text, sizeof(call->text), "%s", text);
	call_end(call);
}

void peer_take_calls(struct peer *peer)
{
	list_append(&peer->ending.calls, &peer->calls);
	list_append(&peer->ending.calls, &peer->waiting);
}

bool peer_end_calls(struct peer *peer, unsigned max, int status, const char *text)
{
	struct call *call;

	for (; max && (call = list_first(&peer->ending.calls, struct call, link)); max--) {
		list_remove(&call->link);
		/* In-process, and its mail is on the way: it ends of itself. */
		if (peer->kind == PEER_SELF && !call->incoming) {
			list_push_back(&peer->calls, &call->link);
			continue;
		}
		if (call->incoming)
			call->incoming->call = NULL;
		call->message.lane = NULL; /* gone by now */
		call->answer_block = block_unref(call->answer_block);
		call_fail(call, status, text);
	}
	return !list_empty(&peer->ending.calls);
}
