/*
 * The way in of an RDMA lane: heads of messages, grants of targets for payloads, and payloads that
 * lie in their target. lane.c calls for each receive that is completed. Each function fails
 * the lane when it does not return 0. Worker's thread.
 */
#include "transport/peer/delivery.h"
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"

static struct rdma_target target_of(const struct data_rdma *head)
{
	return (struct rdma_target){ head->address, head->key, head->len, head->place,
				     head->flags & DATA_RDMA_WINDOW };
}

/* The target of a payload that was offered: told with the next flush, when there is a window. */
static int grant(struct rdma_link *link, const struct data_rdma *head, struct block *block,
		 struct rdma_window **window)
{
	struct rdma_grant *grants;
	struct ibv_mr *mr =
		rdma_memory_find(link->rdma, link->port->device, block->data, head->len);

	if (!mr) {
		rdma_link_fail(link, "the device does not register the memory of parts");
		return -ENOMEM;
	}
	if (link->grants.n == link->grants.capacity) {
		size_t capacity = link->grants.capacity ? 2 * link->grants.capacity : 16;

		grants = reallocarray(link->grants.list, capacity, sizeof(*grants));
		if (!grants)
			return lane_out_of_memory(link->lane);
		link->grants.list = grants;
		link->grants.capacity = capacity;
	}
	grants = &link->grants.list[link->grants.n++];
	*grants = (struct rdma_grant){ .head = *head, .mr = mr, .window = window };
	grants->head.kind = RDMA_GRANT;
	grants->head.address = (uintptr_t)block->data;
	link->lane->output.is_fresh = true;
	return 0;
}

/* The header has come, the payload will: to a block that we grant. */
static int await_answer(struct rdma_link *link, struct call *call)
{
	struct lane *lane = link->lane;
	uint32_t cookie = call->header.cookie, len = call->answer.len;

	call->state = CALL_FILLING;
	if (!call->answer_block &&
	    block_new(lane->transport->blocks, len, NULL, &call->answer_block))
		return lane_out_of_memory(lane);
	return grant(link, &(struct data_rdma){ .cookie = cookie, .place = cookie, .len = len },
		     call->answer_block, &call->window);
}

static int await_call(struct rdma_link *link, struct incoming *incoming)
{
	struct data_rdma head = {
		.cookie = incoming->delivery.header.cookie,
		.len = incoming->delivery.header.len,
	};

	if (cookies_add(&link->lane->cookies, incoming, &head.place)) {
		incoming_free(incoming);
		return lane_out_of_memory(link->lane);
	}
	return grant(link, &head, incoming->delivery.payload_block, &incoming->window);
}

/* The result lies in the target of its call. */
static int receive_written(struct rdma_link *link)
{
	struct lane *lane = link->lane;
	struct call *call = TAKE_PTR(lane->input.call);

	if (!call || !call->is_target_named || call->answer.op != DATA_RESULT)
		return lane_protocol_error(lane, "a payload that was written nowhere");
	metric_add(&link->rdma->metrics.bytes_moved, call->answer.len);
	atomic_fetch_add_explicit(&lane->bytes_in, call->answer.len, memory_order_relaxed);
	lane_end_answer(lane, call);
	return 0;
}

static int receive_message(struct rdma_link *link, const struct data_rdma *head,
			   const unsigned char *data, const struct ibv_wc *wc)
{
	struct lane *lane = link->lane;
	size_t len = wc->byte_len;
	struct incoming *incoming;
	bool is_eager;

	if (len < RDMA_HEAD_LEN)
		return lane_protocol_error(lane, "a message without a header");
	memcpy(&lane->input.header, data + sizeof(*head), sizeof(lane->input.header));
	lane->input.header_len = sizeof(lane->input.header);
	if (lane_begin_message(lane))
		return -EPROTO;
	if (lane->input.call && rdma_window_close(link, TAKE_PTR(lane->input.call->window), wc))
		return -EPROTO;
	is_eager = lane->input.header.len <= DATA_RDMA_EAGER;
	/* We could not bring it there. */
	if (lane->input.call && lane->input.call->is_target_direct &&
	    lane->input.header.op == DATA_RESULT &&
	    (is_eager || !(head->flags & DATA_RDMA_WRITTEN)))
		return lane_protocol_error(lane, "a result that was not written to its room");
	if (len != RDMA_HEAD_LEN + (is_eager ? lane->input.header.len : 0))
		return lane_protocol_error(lane, "a message of another length than it says");
	if (lane->input.incoming)
		lane->input.incoming->message.target = target_of(head);
	if (is_eager) {
		metric_add(&link->rdma->metrics.bytes_moved, lane->input.header.len);
		if (lane->input.target_len)
			rdma_copy(link->rdma, lane->input.target, data + RDMA_HEAD_LEN,
				  lane->input.header.len);
		lane->input.target_len = 0;
		lane_end_message(lane);
		return 0;
	}
	lane->input.target_len = 0;
	lane->input.header_len = 0;
	if (head->flags & DATA_RDMA_WRITTEN)
		return receive_written(link);
	if (lane->input.call)
		return await_answer(link, TAKE_PTR(lane->input.call));
	incoming = TAKE_PTR(lane->input.incoming);
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
		message->target = target_of(head);
		list_push_back(&link->granted, &message->link);
		link->lane->output.is_fresh = true;
		return 0;
	}
	return lane_protocol_error(link->lane, "room for what was not offered");
}

static int receive_answer_payload(struct rdma_link *link, const struct data_rdma *head,
				  const struct ibv_wc *wc)
{
	struct lane *lane = link->lane;
	struct call *call = cookies_find(&lane->cookies, head->place);

	if (!call || call->state != CALL_FILLING || call->answer.len != head->len)
		return lane_protocol_error(lane, "a payload that was not announced");
	if (rdma_window_close(link, TAKE_PTR(call->window), wc))
		return -EPROTO;
	if (call->target && call->answer_block && call->answer.op == DATA_RESULT) {
		rdma_copy(link->rdma, call->target, call->answer_block->data, head->len);
		call->answer_block = block_unref(call->answer_block);
	}
	lane_end_answer(lane, call);
	return 0;
}

static int receive_placed(struct rdma_link *link, const struct data_rdma *head,
			  const struct ibv_wc *wc)
{
	struct lane *lane = link->lane;
	struct incoming *incoming;

	metric_add(&link->rdma->metrics.bytes_moved, head->len);
	atomic_fetch_add_explicit(&lane->bytes_in, head->len, memory_order_relaxed);
	if (lane->makes_calls)
		return receive_answer_payload(link, head, wc);
	incoming = cookies_find(&lane->cookies, head->place);
	if (!incoming || incoming->delivery.header.len != head->len)
		return lane_protocol_error(lane, "a payload that was not announced");
	if (rdma_window_close(link, TAKE_PTR(incoming->window), wc))
		return -EPROTO;
	cookies_remove(&lane->cookies, head->place);
	lane_end_incoming(lane, incoming);
	return 0;
}

static int receive_head(struct rdma_link *link, const unsigned char *data, const struct ibv_wc *wc)
{
	size_t len = wc->byte_len;
	struct data_rdma head;

	if (len < sizeof(head))
		return lane_protocol_error(link->lane, "a message without a head");
	memcpy(&head, data, sizeof(head));
	data_rdma_swap(&head);
	if (head.credits > link->n_theirs - MIN(link->credits, link->n_theirs))
		return lane_protocol_error(link->lane, "more credits than there can be");
	link->credits += head.credits;
	if (head.kind == RDMA_MESSAGE)
		return receive_message(link, &head, data, wc);
	if (len != sizeof(head))
		return lane_protocol_error(link->lane, "a head with something behind it");
	if (head.kind == RDMA_GRANT)
		return receive_grant(link, &head);
	if (head.kind == RDMA_PLACED)
		return receive_placed(link, &head, wc);
	if (head.kind == RDMA_CREDIT)
		return 0;
	return lane_protocol_error(link->lane, "no such kind of message");
}

void rdma_on_received(struct rdma_link *link, const struct ibv_wc *wc)
{
	struct lane *lane = link->lane;

	atomic_fetch_add_explicit(&lane->bytes_in, wc->byte_len, memory_order_relaxed);
	if (wc->opcode == IBV_WC_RECV)
		(void)receive_head(link, rdma_receive_slot(link, (uint32_t)wc->wr_id), wc);
	else
		(void)lane_protocol_error(lane, "an immediate");
}
