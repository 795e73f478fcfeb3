#include "transport/internal.h"

#include <stdio.h>

int incoming_new(struct peer *peer, struct lane *lane, const struct data_header *header,
		 struct incoming **ret_incoming)
{
	struct incoming *incoming;
	uint64_t charge = lane ? sizeof(*incoming) + header->len : 0;

	if (quota_charge(&peer->quota, charge))
		return QUOTA_E_FULL;
	incoming = calloc(1, sizeof(*incoming));
	if (!incoming) {
		quota_release(&peer->quota, charge);
		return error_origin(-ENOMEM);
	}
	incoming->delivery.peer = peer;
	incoming->delivery.header = *header;
	incoming->lane = lane;
	incoming->charged = charge;
	incoming->mail.run = incoming_arrive;
	*ret_incoming = incoming;
	return 0;
}

struct incoming *incoming_free(struct incoming *incoming)
{
	if (!incoming)
		return NULL;
	block_unref(incoming->delivery.payload_block);
	block_unref(incoming->answer_block);
	quota_release(&incoming->delivery.peer->quota, incoming->charged);
	free(incoming);
	return NULL;
}

void incoming_arrive(struct mail *mail)
{
	struct incoming *incoming = container_of(mail, struct incoming, mail);
	struct delivery *delivery = &incoming->delivery;
	struct peer *peer = delivery->peer;
	struct transport *transport = peer->transport;

	if (transport->is_closed || peer->state != PEER_UP) {
		incoming_free(incoming);
	} else if (!delivery->header.cookie) {
		transport->ops->notice_arrived(transport->user, peer, &delivery->header,
					       delivery->payload);
		incoming_free(incoming);
	} else {
		peer->n_deliveries++;
		lane_begin_business(incoming->lane);
		transport->ops->call_arrived(transport->user, delivery);
	}
}

/* The answer, with its payload in a block. */
static void incoming_fill(struct incoming *incoming, const struct data_header *header,
			  struct block *block, const void *payload)
{
	struct block_cache *blocks = incoming->delivery.peer->transport->blocks;

	incoming->answer = *header;
	incoming->answer.magic = DATA_MAGIC;
	incoming->answer.version = DATA_VERSION;
	incoming->answer.cookie = incoming->delivery.header.cookie;
	if (!header->len)
		return;
	if (block) {
		assert(header->len <= block->len);
		incoming->answer_block = block_ref(block);
		return;
	}
	if (block_new(blocks, header->len, NULL, &incoming->answer_block)) {
		incoming->answer.op = DATA_ERROR;
		incoming->answer.status = ENOMEM;
		incoming->answer.len = 0;
		return;
	}
	memcpy(incoming->answer_block->data, payload, header->len);
}

/* From now on what counts is the answer, until it is written. Returns 0 or QUOTA_E_FULL. */
static int incoming_recharge(struct incoming *incoming)
{
	struct quota *quota = &incoming->delivery.peer->quota;
	uint64_t charge = sizeof(*incoming) + incoming->answer.len;

	quota_release(quota, incoming->charged);
	incoming->charged = 0;
	if (quota_charge(quota, charge))
		return QUOTA_E_FULL;
	incoming->charged = charge;
	return 0;
}

static void incoming_send(struct incoming *incoming)
{
	incoming->message = (struct message){
		.header = &incoming->answer,
		.payload = incoming->answer_block ? incoming->answer_block->data : NULL,
		.priority = incoming->delivery.header.priority,
		.kind = MESSAGE_ANSWER,
		.urgent = !incoming->answer.len || incoming->answer.op != DATA_RESULT,
	};
	lane_send(incoming->lane, &incoming->message);
}

void delivery_answer(struct delivery *delivery, const struct data_header *header,
		     struct block *block, const void *payload)
{
	struct incoming *incoming = container_of(delivery, struct incoming, delivery);
	struct peer *peer = delivery->peer;

	assert(header->op == DATA_OK || header->op == DATA_RESULT || header->op == DATA_ERROR);
	assert(peer->n_deliveries > 0);
	peer->n_deliveries--;
	if (!incoming->lane) {
		inproc_answer(incoming, header, block, payload);
		return;
	}
	if (peer->state != PEER_UP) {
		incoming_free(incoming);
		peer_free_if_unused(peer);
		return;
	}
	lane_end_business(incoming->lane);
	incoming_fill(incoming, header, block, payload);
	delivery->payload_block = block_unref(delivery->payload_block);
	if (incoming_recharge(incoming)) {
		incoming_free(incoming);
		peer_kill(peer, "it does not take its answers: over the quota of a peer");
		return;
	}
	incoming_send(incoming);
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
