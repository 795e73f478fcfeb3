#include "transport/rdma.h"

#include <arpa/inet.h>

/* The way in of a lane. Each function fails the lane when it does not return 0. */

static int grant(struct rdma_link *link, uint32_t cookie, uint32_t immediate, struct block *block,
		 uint32_t len)
{
	struct data_rdma head = {
		.kind = RDMA_GRANT,
		.cookie = cookie,
		.address = (uintptr_t)block->data,
		.len = len,
		.immediate = immediate,
	};
	struct data_rdma *grants;
	uint32_t lkey;

	if (!rdma_memory_find(link->rdma, link->port->device, block->data, len, &lkey, &head.key)) {
		rdma_link_fail(link, "the device does not register the memory of parts");
		return -ENOMEM;
	}
	if (link->n_grants == link->grants_capacity) {
		size_t capacity = link->grants_capacity ? 2 * link->grants_capacity : 16;

		grants = reallocarray(link->grants, capacity, sizeof(*grants));
		if (!grants)
			return lane_out_of_memory(link->lane);
		link->grants = grants;
		link->grants_capacity = capacity;
	}
	link->grants[link->n_grants++] = head;
	link->lane->is_fresh = true;
	return 0;
}

/* The header has come, the payload will: straight to the room, if that was named, else to a block that we grant. */
static int await_answer(struct rdma_link *link, struct call *call)
{
	struct lane *lane = link->lane;
	uint32_t len = call->answer.len;

	if (call->state != CALL_SENT && call->state != CALL_POSTED)
		return lane_protocol_error(lane, "an answer to an answered call");
	call->state = CALL_FILLING;
	if (call->is_room_named && call->answer.op == DATA_RESULT)
		return 0;
	if (!call->answer_block &&
	    block_new(lane->transport->blocks, len, NULL, &call->answer_block))
		return lane_out_of_memory(lane);
	return grant(link, call->header.cookie, call->header.cookie, call->answer_block, len);
}

static int await_call(struct rdma_link *link, struct incoming *incoming)
{
	uint32_t immediate;

	if (cookies_add(&link->lane->cookies, incoming, &immediate)) {
		incoming_free(incoming);
		return lane_out_of_memory(link->lane);
	}
	return grant(link, incoming->delivery.header.cookie, immediate,
		     incoming->delivery.payload_block, incoming->delivery.header.len);
}

static int receive_message(struct rdma_link *link, const struct data_rdma *head,
			   const unsigned char *data, size_t len)
{
	struct lane *lane = link->lane;
	struct incoming *incoming;
	bool is_eager;

	if (len < RDMA_HEAD_LEN)
		return lane_protocol_error(lane, "a message without a header");
	memcpy(&lane->header, data + sizeof(*head), sizeof(lane->header));
	lane->header_len = sizeof(lane->header);
	if (lane_begin_message(lane))
		return -EPROTO;
	is_eager = lane->header.len <= DATA_RDMA_EAGER;
	if (len != RDMA_HEAD_LEN + (is_eager ? lane->header.len : 0))
		return lane_protocol_error(lane, "a message of another length than it says");
	if (lane->incoming && lane->incoming->delivery.header.flags)
		return lane_protocol_error(lane, "a call that was moved to RDMA");
	if (lane->incoming)
		lane->incoming->room = (struct rdma_room){ head->address, head->key, head->len,
							   lane->header.cookie };
	if (is_eager) {
		atomic_fetch_add_explicit(&link->rdma->bytes_moved, lane->header.len,
					  memory_order_relaxed);
		if (lane->room_len) {
			memcpy(lane->room, data + RDMA_HEAD_LEN, lane->header.len);
			atomic_fetch_add_explicit(&link->rdma->bytes_copied, lane->header.len,
						  memory_order_relaxed);
		}
		lane->room_len = 0;
		lane_end_message(lane);
		return 0;
	}
	lane->room_len = 0;
	lane->header_len = 0;
	if (lane->call)
		return await_answer(link, TAKE_PTR(lane->call));
	incoming = TAKE_PTR(lane->incoming);
	if (!incoming)
		return lane_protocol_error(lane, "a payload where none belongs");
	return await_call(link, incoming);
}

static int receive_grant(struct rdma_link *link, const struct data_rdma *head)
{
	struct message *message;

	list_for_each (message, &link->awaiting, link) {
		if (message->header->cookie != head->cookie)
			continue;
		if (message->header->len != head->len)
			break;
		list_remove(&message->link);
		message->room =
			(struct rdma_room){ head->address, head->key, head->len, head->immediate };
		list_push_back(&link->granted, &message->link);
		link->lane->is_fresh = true;
		return 0;
	}
	return lane_protocol_error(link->lane, "room for what was not offered");
}

static int receive_head(struct rdma_link *link, const unsigned char *data, size_t len)
{
	struct data_rdma head;

	if (len < sizeof(head))
		return lane_protocol_error(link->lane, "a message without a head");
	memcpy(&head, data, sizeof(head));
	data_rdma_swap(&head);
	if (head.credits > link->n_theirs - MIN(link->credits, link->n_theirs))
		return lane_protocol_error(link->lane, "more credits than there can be");
	link->credits += head.credits;
	if (head.kind == RDMA_MESSAGE)
		return receive_message(link, &head, data, len);
	if (len != sizeof(head))
		return lane_protocol_error(link->lane, "a head with something behind it");
	if (head.kind == RDMA_GRANT)
		return receive_grant(link, &head);
	if (head.kind == RDMA_CREDIT)
		return 0;
	return lane_protocol_error(link->lane, "no such kind of message");
}

static int receive_answer_payload(struct rdma_link *link, uint32_t cookie, size_t len)
{
	struct lane *lane = link->lane;
	struct call *call = cookies_find(&lane->cookies, cookie);

	if (!call || call->state != CALL_FILLING || call->answer.len != len)
		return lane_protocol_error(lane, "a payload that was not announced");
	if (call->room && call->answer_block && call->answer.op == DATA_RESULT) {
		memcpy(call->room, call->answer_block->data, len);
		atomic_fetch_add_explicit(&link->rdma->bytes_copied, len, memory_order_relaxed);
		call->answer_block = block_unref(call->answer_block);
	}
	lane_end_answer(lane, call);
	return 0;
}

static int receive_payload(struct rdma_link *link, uint32_t immediate, size_t len)
{
	struct lane *lane = link->lane;
	struct incoming *incoming;

	atomic_fetch_add_explicit(&link->rdma->bytes_moved, len, memory_order_relaxed);
	if (lane->makes_calls)
		return receive_answer_payload(link, immediate, len);
	incoming = cookies_find(&lane->cookies, immediate);
	if (!incoming || incoming->delivery.header.len != len)
		return lane_protocol_error(lane, "a payload that was not announced");
	cookies_remove(&lane->cookies, immediate);
	lane_end_incoming(lane, incoming);
	return 0;
}

void rdma_on_received(struct rdma_link *link, const struct ibv_wc *wc)
{
	unsigned i = (uint32_t)wc->wr_id;
	struct lane *lane = link->lane;
	int r;

	atomic_fetch_add_explicit(&lane->bytes_in, wc->byte_len, memory_order_relaxed);
	if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
		r = receive_payload(link, ntohl(wc->imm_data), wc->byte_len);
	else
		r = receive_head(link, rdma_receive_slot(link, i), wc->byte_len);
	if (r || lane->is_failed)
		return;
	r = rdma_post_receive(link, i);
	if (r)
		rdma_link_fail(link, "posting a receive: %s", strerrordesc_np(-r));
	link->owed++;
}
