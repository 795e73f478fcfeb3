#include "transport/rdma.h"

#include <arpa/inet.h>

/* The way out of a lane. */

static bool has_room(const struct rdma_link *link, unsigned n_receives)
{
	/* The last credit is for giving credits. */
	return link->n_free > 0 && link->credits > n_receives;
}

static unsigned take_slot(struct rdma_link *link, struct message *message)
{
	unsigned i = link->first_free;

	link->first_free = link->sends[i].next_free;
	link->n_free--;
	link->sends[i].message = message;
	return i;
}

static struct message *give_slot(struct rdma_link *link, unsigned i)
{
	link->sends[i].next_free = link->first_free;
	link->first_free = (uint16_t)i;
	link->n_free++;
	return TAKE_PTR(link->sends[i].message);
}

static bool post(struct rdma_link *link, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;
	int r = ibv_post_send(link->qp, wr, &bad);

	if (r)
		rdma_link_fail(link, "posting a send: %s", strerrordesc_np(r));
	return !r;
}

/* The head, which carries the credits too, at the start of a slot. */
static void put_head(struct rdma_link *link, unsigned slot, const struct data_rdma *head)
{
	struct data_rdma wire = *head;

	wire.credits = (uint16_t)link->owed;
	link->owed = 0;
	data_rdma_swap(&wire);
	memcpy(rdma_send_slot(link, slot), &wire, sizeof(wire));
}

static void init_send(struct rdma_link *link, unsigned slot, size_t len, struct ibv_sge *sge,
		      struct ibv_send_wr *wr)
{
	*sge = (struct ibv_sge){
		.addr = (uintptr_t)rdma_send_slot(link, slot),
		.length = (uint32_t)len,
		.lkey = link->mr->lkey,
	};
	*wr = (struct ibv_send_wr){
		.wr_id = rdma_wr_id(RDMA_WR_SEND, slot),
		.sg_list = sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED | (len <= link->max_inline ? IBV_SEND_INLINE : 0u),
	};
	link->credits--;
}

static bool post_head(struct rdma_link *link, const struct data_rdma *head)
{
	unsigned slot = take_slot(link, NULL);
	struct ibv_send_wr wr;
	struct ibv_sge sge;

	put_head(link, slot, head);
	init_send(link, slot, sizeof(*head), &sge, &wr);
	return post(link, &wr);
}

/* A payload from where it lies, or from a copy in a block. Returns 0, or has failed the lane. */
static int init_write(struct rdma_link *link, unsigned slot, struct message *message,
		      struct ibv_sge *sge, struct ibv_send_wr *wr)
{
	struct rdma *rdma = link->rdma;
	struct rdma_device *device = link->port->device;
	const void *payload = message->payload;
	uint32_t lkey, rkey, len = message->header->len;

	if (!rdma_memory_find(rdma, device, payload, len, &lkey, &rkey)) {
		if (block_new(rdma->transport->blocks, len, NULL, &message->bounce))
			return lane_out_of_memory(link->lane);
		memcpy(message->bounce->data, payload, len);
		atomic_fetch_add_explicit(&rdma->bytes_copied, len, memory_order_relaxed);
		payload = message->bounce->data;
		if (!rdma_memory_find(rdma, device, payload, len, &lkey, &rkey)) {
			rdma_link_fail(link, "the device does not register the memory of parts");
			return -ENOMEM;
		}
	}
	*sge = (struct ibv_sge){ .addr = (uintptr_t)payload, .length = len, .lkey = lkey };
	*wr = (struct ibv_send_wr){
		.wr_id = rdma_wr_id(RDMA_WR_SEND, slot),
		.sg_list = sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
		.send_flags = IBV_SEND_SIGNALED,
		.imm_data = htonl(message->room.immediate),
		.wr.rdma = { .remote_addr = message->room.address, .rkey = message->room.key },
	};
	link->credits--;
	return 0;
}

static void post_write(struct rdma_link *link, struct message *message)
{
	unsigned slot = take_slot(link, message);
	struct ibv_send_wr wr;
	struct ibv_sge sge;

	if (message->kind == MESSAGE_CALL)
		container_of(message, struct call, message)->state = CALL_POSTED;
	if (!init_write(link, slot, message, &sge, &wr))
		(void)post(link, &wr);
}

/* Where a call's result is to go: told if the device knows that memory. */
static void name_room(struct rdma_link *link, struct call *call, struct data_rdma *head)
{
	uint32_t lkey, rkey;

	if (!call->room || call->room_len <= DATA_RDMA_EAGER || call->room_len > UINT32_MAX ||
	    !rdma_memory_find(link->rdma, link->port->device, call->room, call->room_len, &lkey,
			      &rkey))
		return;
	head->address = (uintptr_t)call->room;
	head->key = rkey;
	head->len = (uint32_t)call->room_len;
	call->is_room_named = true;
}

/* The slot of a message is full: head, header, and payload if it goes along. Returns its length. */
static size_t fill_slot(struct rdma_link *link, unsigned slot, struct message *message,
			bool is_eager)
{
	struct data_rdma head = { .kind = RDMA_MESSAGE };
	struct data_header wire = *message->header;
	unsigned char *at = rdma_send_slot(link, slot);
	size_t len = RDMA_HEAD_LEN;

	if (message->kind == MESSAGE_CALL)
		name_room(link, container_of(message, struct call, message), &head);
	put_head(link, slot, &head);
	data_header_encode(&wire);
	memcpy(at + sizeof(head), &wire, sizeof(wire));
	if (is_eager && message->header->len) {
		memcpy(at + len, message->payload, message->header->len);
		len += message->header->len;
		atomic_fetch_add_explicit(&link->rdma->bytes_copied, message->header->len,
					  memory_order_relaxed);
	}
	return len;
}

static bool fits_room(const struct message *message)
{
	return message->kind == MESSAGE_ANSWER && message->header->op == DATA_RESULT &&
	       message->room.len >= message->header->len;
}

static void send_message(struct rdma_link *link, struct message *message)
{
	uint32_t len = message->header->len;
	bool is_eager = len <= DATA_RDMA_EAGER, has_place = !is_eager && fits_room(message);
	struct ibv_send_wr wr, write;
	struct ibv_sge sge, write_sge;
	unsigned slot;
	size_t n;

	if (lane_prepare(link->lane, message)) {
		(void)queue_push(&link->lane->queue, message);
		(void)lane_out_of_memory(link->lane);
		return;
	}
	slot = take_slot(link, is_eager || has_place ? message : NULL);
	n = fill_slot(link, slot, message, is_eager);
	init_send(link, slot, n, &sge, &wr);
	if (!is_eager)
		link->ahead += len;
	if (is_eager && message->kind == MESSAGE_CALL)
		container_of(message, struct call, message)->state = CALL_POSTED;
	if (has_place) {
		if (init_write(link, slot, message, &write_sge, &write))
			return;
		wr.send_flags &= ~(unsigned)IBV_SEND_SIGNALED;
		wr.next = &write;
	} else if (!is_eager) {
		list_push_back(&link->awaiting, &message->link);
	}
	(void)post(link, &wr);
}

static struct message *next_message(const struct rdma_link *link)
{
	const struct queue *queue = &link->lane->queue;
	struct message *message = queue->n ? queue->heap[0].message : NULL;

	if (!message || !has_room(link, 2))
		return NULL;
	if (message->header->len > DATA_RDMA_EAGER && link->ahead &&
	    link->ahead + message->header->len > RDMA_AHEAD)
		return NULL;
	return message;
}

void rdma_flush(struct lane *lane)
{
	struct rdma_link *link = lane->rdma;
	struct message *message;
	size_t n = 0;

	lane->is_fresh = false;
	for (; n < link->n_grants && !lane->is_failed && has_room(link, 1); n++)
		(void)post_head(link, &link->grants[n]);
	link->n_grants -= n;
	memmove(link->grants, link->grants + n, link->n_grants * sizeof(*link->grants));
	while (!lane->is_failed && has_room(link, 1) &&
	       (message = list_first(&link->granted, struct message, link))) {
		list_remove(&message->link);
		post_write(link, message);
	}
	while (!lane->is_failed && next_message(link))
		send_message(link, queue_pop(&lane->queue));
	if (!lane->is_failed && link->owed >= RDMA_RECEIVES / 2 && link->n_free && link->credits)
		(void)post_head(link, &(struct data_rdma){ .kind = RDMA_CREDIT });
}

void rdma_on_sent(struct rdma_link *link, const struct ibv_wc *wc)
{
	struct message *message = give_slot(link, (uint32_t)wc->wr_id);
	uint32_t len;

	if (!message)
		return;
	len = message->header->len;
	if (len > DATA_RDMA_EAGER)
		link->ahead -= len;
	atomic_fetch_add_explicit(&link->lane->bytes_out, RDMA_HEAD_LEN + len,
				  memory_order_relaxed);
	atomic_fetch_add_explicit(&link->rdma->bytes_moved, len, memory_order_relaxed);
	lane_message_done(link->lane, message, true);
}
