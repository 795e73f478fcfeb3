/*
 * Calls and notices that have come in: delivered, and answered. An RDMA or spare lane may break in
 * between: then the call is known when the other side asks again. delivery_*() are transport.h's,
 * for the server. Home thread.
 */
#include "transport/peer/delivery.h"
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/peer.h"

#include "base/crc32c.h"
#include <stdio.h>

static void incoming_send(struct incoming *incoming);
static void incoming_deliver(struct incoming *incoming);
static void incoming_moved(struct incoming *incoming);

/* Contributions and results are charged by who has them now. */
static void incoming_hand_over(struct incoming *incoming)
{
	const struct data_header *header = &incoming->delivery.header;
	uint64_t len = incoming->held - MIN(incoming->held, (uint64_t)sizeof(*incoming));

	if (header->op != DATA_PUSH && header->op != DATA_OFFER)
		return;
	incoming->held -= len;
	quota_release(&incoming->delivery.peer->held, len);
}

static void incoming_deliver(struct incoming *incoming)
{
	struct peer *peer = incoming->delivery.peer;
	struct transport *transport = peer->transport;

	peer->n_deliveries++;
	if (incoming->lane->rdma || incoming->lane->is_spare)
		list_push_back(&peer->arrived, &incoming->link);
	lane_begin_business(incoming->lane);
	incoming_hand_over(incoming);
	transport->ops->call_arrived(transport->user, &incoming->delivery);
}

/*
 * Calls that came over an RDMA lane and are asked for again over another, since the lane broke
 * before their answers had arrived. What had been delivered is not delivered again: it changes its
 * lane and its cookie, and is known by the first that it had.
 */

static struct incoming *find_moved(const struct peer *peer, const struct data_header *header)
{
	unsigned rail = data_flags_rail(header->flags);
	struct incoming *incoming;

	list_for_each (incoming, &peer->arrived, link)
		if (incoming->rail == rail && !incoming->lane && incoming->cookie == header->moved)
			return incoming;
	return NULL;
}

static void take_over(struct incoming *old, struct incoming *anew)
{
	old->lane = anew->lane;
	old->message.target = anew->message.target;
	old->delivery.header.cookie = anew->delivery.header.cookie;
	if (!old->lane->rdma)
		list_remove(&old->link);
	incoming_free(anew);
	if (!old->is_answered)
		lane_begin_business(old->lane);
	else if (!old->lane->is_closing)
		incoming_send(old);
}

static void incoming_ask(struct incoming *incoming)
{
	struct data_header *header = &incoming->delivery.header;
	struct incoming *old = find_moved(incoming->delivery.peer, header);
	bool is_lost = header->flags & DATA_FLAG_ARRIVED;

	if (old) {
		take_over(old, incoming);
		return;
	}
	if (incoming->lane->rdma) {
		incoming->rail = data_flags_rail(header->flags);
		incoming->cookie = header->moved;
	}
	header->flags &= DATA_FLAG_AGAIN;
	header->moved = 0;
	if (!is_lost) {
		incoming_deliver(incoming);
		return;
	}
	incoming->delivery.peer->n_deliveries++;
	lane_begin_business(incoming->lane);
	delivery_fail(&incoming->delivery, -ENETRESET,
		      "the call or its answer was lost with an RDMA connection");
}

static bool is_of_rail(const struct incoming *incoming, unsigned rail)
{
	unsigned flags = incoming->delivery.header.flags;

	return data_flags_rail(flags) == rail || data_flags_last(flags) == rail;
}

/* Lanes that it was on may not know yet that they broke: then what they hold comes first. */
static void incoming_moved(struct incoming *incoming)
{
	struct peer *peer = incoming->delivery.peer;
	unsigned flags = incoming->delivery.header.flags;
	struct lane *lane = peer_find_rail(peer, data_flags_rail(flags))
				    ?: peer_find_rail(peer, data_flags_last(flags));

	if (!peer->rdma || (incoming->lane->rdma && is_of_rail(incoming, incoming->lane->index))) {
		incoming_free(incoming);
		peer_kill(peer,
			  "protocol error: a call that was moved to or from where it cannot be");
	} else if (lane) {
		list_push_back(&peer->moved, &incoming->link);
		lane_close(lane);
	} else {
		incoming_ask(incoming);
	}
}

/* What waits for others to close and came by this lane itself is asked for once more. */
void incoming_lane_closed(struct lane *lane)
{
	struct peer *peer = lane->peer;
	struct list ready = LIST_INIT(ready);
	struct incoming *incoming, *next;

	list_for_each (incoming, &peer->arrived, link)
		if (incoming->lane == lane)
			incoming->lane = NULL;
	list_for_each_safe (incoming, next, &peer->moved, link) {
		if (incoming->lane == lane) {
			list_remove(&incoming->link);
			incoming_free(incoming);
		} else if (lane->rdma && is_of_rail(incoming, lane->index)) {
			list_remove(&incoming->link);
			list_push_back(&ready, &incoming->link);
		}
	}
	/* Who has to wait for another lane is put back. */
	while ((incoming = list_first(&ready, struct incoming, link))) {
		list_remove(&incoming->link);
		incoming_moved(incoming);
	}
}

/* Those that are not answered yet are the receiver's. */
bool incoming_peer_lost(struct peer *peer, unsigned max)
{
	struct incoming *incoming;

	for (; max && (incoming = list_first(&peer->moved, struct incoming, link)); max--) {
		list_remove(&incoming->link);
		incoming_free(incoming);
	}
	for (; max && (incoming = list_first(&peer->arrived, struct incoming, link)); max--) {
		list_remove(&incoming->link);
		if (incoming->is_answered)
			incoming_free(incoming);
	}
	return !list_empty(&peer->moved) || !list_empty(&peer->arrived);
}

void incoming_arrive(struct mail *mail)
{
	struct incoming *incoming = container_of(mail, struct incoming, message.mail);
	struct delivery *delivery = &incoming->delivery;
	struct peer *peer = delivery->peer;
	struct transport *transport = peer->transport;

	if (transport->is_closed || peer->state != PEER_UP) {
		incoming_free(incoming);
	} else if (delivery->header.op == DATA_RDMA) {
		transport->hooks->rdma_said(peer, &delivery->header, delivery->payload);
		incoming_free(incoming);
	} else if (incoming->is_damaged) {
		call_say_damaged(peer);
		peer->n_deliveries++;
		lane_begin_business(incoming->lane);
		delivery_fail(delivery, -EBADMSG, call_damaged_text);
	} else if (delivery->header.flags & DATA_FLAG_MOVED) {
		incoming_moved(incoming);
	} else if (!delivery->header.cookie) {
		transport->ops->notice_arrived(transport->user, peer, &delivery->header,
					       delivery->payload);
		incoming_free(incoming);
	} else {
		if (incoming->lane->rdma) {
			incoming->rail = incoming->lane->index;
			incoming->cookie = delivery->header.cookie;
		}
		incoming_deliver(incoming);
	}
}

/* The answer, with its payload in a block. Returns 0, or QUOTA_E_FULL: it is to be copied, and the peer reads none. */
static int incoming_fill(struct incoming *incoming, const struct data_header *header,
			 struct block *block, const void *payload)
{
	struct transport *transport = incoming->delivery.peer->transport;
	struct block *asked = incoming->delivery.payload_block;
	struct data_header *answer = &incoming->delivery.header;
	uint32_t cookie = answer->cookie;
	int r = 0;

	if (answer != header)
		*answer = *header;
	answer->magic = DATA_MAGIC;
	answer->version = DATA_VERSION;
	answer->cookie = cookie;
	answer->flags &= incoming->delivery.peer->features & DATA_FEATURE_KEPT ? DATA_FLAG_KEPT : 0;
	incoming->delivery.payload_block = NULL;
	if (answer->len && block) {
		assert(answer->len <= block->len);
		incoming->delivery.payload_block = block_ref(block);
	} else if (answer->len) {
		r = block_new(transport->blocks, answer->len, &incoming->delivery.peer->held,
			      &incoming->delivery.payload_block);
		if (!r)
			metric_copy(&transport->copied, incoming->delivery.payload_block->data,
				    payload, answer->len);
	}
	block_unref(asked);
	if (r == -ENOMEM) {
		answer->op = DATA_ERROR;
		answer->status = ENOMEM;
		answer->len = 0;
		return 0;
	}
	return r;
}

/* From now on what counts is the answer, until it is written. Returns 0 or QUOTA_E_FULL. */
static int incoming_recharge(struct incoming *incoming)
{
	struct quota *quota = &incoming->delivery.peer->quota;
	uint64_t charge = sizeof(*incoming) + incoming->delivery.header.len;

	if (charge <= incoming->charged)
		quota_release(quota, incoming->charged - charge);
	else if (quota_charge(quota, charge - incoming->charged))
		return QUOTA_E_FULL;
	incoming->charged = charge;
	return 0;
}

/* Its priority and target are set. */
static void incoming_begin(struct incoming *incoming)
{
	const struct data_header *header = &incoming->delivery.header;
	const struct block *block = incoming->delivery.payload_block;
	struct message *message = &incoming->message;

	message->header = header;
	message->payload = block ? block->data : NULL;
	message->link = (struct list){ 0 };
	message->bounce = NULL;
	message->kind = MESSAGE_ANSWER;
	message->urgent = !header->len || header->op != DATA_RESULT;
	message->is_checked = false;
}

/* What is larger is read for it when it leaves, by the thread that sends it. */
static void take_check(struct incoming *incoming, struct answer_check *check)
{
	const struct delivery *delivery = &incoming->delivery;
	uint32_t len = delivery->header.len;

	if (!check || !len || len > DATA_PACKED_MAX || !seal_is_checksum(&incoming->lane->out))
		return;
	if (!check->is_known)
		check->value = crc32c(0, delivery->payload_block->data, len);
	check->is_known = true;
	incoming->check = check->value;
	incoming->message.is_checked = true;
}

static void incoming_send(struct incoming *incoming)
{
	incoming_begin(incoming);
	lane_send(incoming->lane, &incoming->message);
}

/* check: NULL, or of all calls that have the same answer. */
static void answer(struct delivery *delivery, const struct data_header *header, struct block *block,
		   const void *payload, struct answer_check *check)
{
	struct incoming *incoming = container_of(delivery, struct incoming, delivery);
	struct peer *peer = delivery->peer;

	assert(header->op == DATA_OK || header->op == DATA_RESULT || header->op == DATA_ERROR);
	assert(peer->n_deliveries > 0);
	peer->n_deliveries--;
	if (peer->kind == PEER_SELF) {
		inproc_answer(incoming, header, block, payload);
		return;
	}
	if (peer->state != PEER_UP) {
		list_remove(&incoming->link);
		incoming_free(incoming);
		peer_free_if_unused(peer);
		return;
	}
	if (incoming->lane)
		lane_end_business(incoming->lane);
	/* Its lane has broken: it is made again on another, or the peer is lost. */
	if ((incoming->lane && !incoming->lane->rdma && incoming->lane->is_closing) ||
	    (!incoming->lane && incoming->rail == RAIL_TCP)) {
		list_remove(&incoming->link);
		incoming_free(incoming);
		return;
	}
	if (incoming_fill(incoming, header, block, payload) || incoming_recharge(incoming)) {
		list_remove(&incoming->link);
		incoming_free(incoming);
		peer_kill(peer, "it does not take its answers: over peer_quota, or the share of "
				"where it is");
		return;
	}
	incoming->is_answered = true;
	if (incoming->rail == RAIL_TCP)
		list_remove(&incoming->link);
	/* A lane that closes takes nothing: the answer waits to be asked for. */
	if (!incoming->lane || incoming->lane->is_closing)
		return;
	incoming_begin(incoming);
	take_check(incoming, check);
	lane_send(incoming->lane, &incoming->message);
}

void delivery_answer(struct delivery *delivery, const struct data_header *header,
		     struct block *block, const void *payload)
{
	answer(delivery, header, block, payload, NULL);
}

void delivery_answer_also(struct delivery *delivery, const struct data_header *header,
			  struct block *block, struct answer_check *check)
{
	answer(delivery, header, block, NULL, check);
}

bool delivery_is_own(const struct delivery *delivery)
{
	const struct incoming *incoming = container_of(delivery, struct incoming, delivery);

	return delivery->payload_block && incoming->lane && incoming->rail == RAIL_TCP;
}

void delivery_fetch(const struct delivery *delivery)
{
	const struct incoming *incoming = container_of(delivery, struct incoming, delivery);

	fetch_to_write(incoming, sizeof(*incoming));
}

void delivery_fail(struct delivery *delivery, int status, const char *text)
{
	const struct data_header *asked = &delivery->header;
	struct data_header header = {
		.op = DATA_ERROR,
		.len = (uint32_t)strnlen(text, ERROR_TEXT_MAX),
		.job = asked->job,
		.key = asked->key,
		.round = asked->round,
		.epoch = asked->epoch,
		.node = asked->node,
		.block = asked->block,
		.part = asked->part,
		.status = -status,
	};

	assert(status < 0);
	delivery_answer(delivery, &header, NULL, text);
}
