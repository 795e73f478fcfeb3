#include "transport/rdma.h"

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

/* What the other end opened for this is closed by it. */
static void close_room(struct ibv_send_wr *send, const struct rdma_room *room)
{
	if (!room->is_window)
		return;
	send->opcode = IBV_WR_SEND_WITH_INV;
	send->invalidate_rkey = room->key;
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

/* Fills in the key that opens head->address, len of a region: of a window that is opened in front of `send`, if it has to be. */
static struct rdma_window *open_memory(struct rdma_link *link, struct ibv_mr *mr,
				       struct data_rdma *head, struct ibv_send_wr *bind,
				       struct ibv_send_wr *send)
{
	struct rdma_window *window;

	if (!link->port->device->has_windows) {
		head->key = mr->rkey;
		return NULL;
	}
	window = rdma_window_open(link, mr, head->address, head->len, bind);
	head->key = bind->bind_mw.rkey;
	head->flags |= DATA_RDMA_WINDOW;
	bind->next = send;
	return window;
}

/* A SEND, behind the opening of a window if there is one. */
static bool post_opening(struct rdma_link *link, struct rdma_window *window,
			 struct ibv_send_wr *bind, struct ibv_send_wr *send)
{
	if (!post(link, window ? bind : send))
		return false;
	if (window)
		rdma_window_bound(window, bind);
	return true;
}

static bool can_open(struct rdma_link *link, unsigned limit)
{
	return !link->port->device->has_windows || rdma_window_has(link, limit);
}

static void post_grant(struct rdma_link *link, struct rdma_grant *grant)
{
	unsigned slot = take_slot(link, NULL);
	struct ibv_send_wr bind, send;
	struct ibv_sge sge;

	*grant->window = open_memory(link, grant->mr, &grant->head, &bind, &send);
	put_head(link, slot, &grant->head);
	init_send(link, slot, sizeof(grant->head), &sge, &send);
	(void)post_opening(link, *grant->window, &bind, &send);
}

/* A payload from where it lies, or from a copy in a block; in front of `send`. Returns 0, or has failed the lane. */
static int init_write(struct rdma_link *link, struct message *message, struct ibv_sge *sge,
		      struct ibv_send_wr *wr, struct ibv_send_wr *send)
{
	struct rdma *rdma = link->rdma;
	struct rdma_device *device = link->port->device;
	const void *payload = message->payload;
	uint32_t len = message->header->len;
	struct ibv_mr *mr = rdma_memory_find(rdma, device, payload, len);

	if (!mr) {
		if (block_new(rdma->transport->blocks, len, NULL, &message->bounce))
			return lane_out_of_memory(link->lane);
		memcpy(message->bounce->data, payload, len);
		metric_add(&rdma->metrics.bytes_copied, len);
		payload = message->bounce->data;
		mr = rdma_memory_find(rdma, device, payload, len);
		if (!mr) {
			rdma_link_fail(link, "the device does not register the memory of parts");
			return -ENOMEM;
		}
	}
	*sge = (struct ibv_sge){ .addr = (uintptr_t)payload, .length = len, .lkey = mr->lkey };
	*wr = (struct ibv_send_wr){
		.next = send,
		.sg_list = sge,
		.num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { .remote_addr = message->room.address, .rkey = message->room.key },
	};
	return 0;
}

/* What was granted. */
static void post_write(struct rdma_link *link, struct message *message)
{
	unsigned slot = take_slot(link, message);
	struct data_rdma head = {
		.kind = RDMA_PLACED,
		.place = message->room.place,
		.len = message->header->len,
	};
	struct ibv_send_wr write, send;
	struct ibv_sge write_sge, send_sge;

	if (message->kind == MESSAGE_CALL)
		container_of(message, struct call, message)->state = CALL_POSTED;
	put_head(link, slot, &head);
	init_send(link, slot, sizeof(head), &send_sge, &send);
	close_room(&send, &message->room);
	if (!init_write(link, message, &write_sge, &write, &send))
		(void)post(link, &write);
}

/* Where a call's result is to go: told if the device knows that memory. */
static struct rdma_window *name_room(struct rdma_link *link, struct call *call,
				     struct data_rdma *head, struct ibv_send_wr *bind,
				     struct ibv_send_wr *send)
{
	struct ibv_mr *mr;

	if (!call->room || call->room_len <= DATA_RDMA_EAGER || call->room_len > UINT32_MAX ||
	    !can_open(link, RDMA_ROOM_WINDOWS))
		return NULL;
	mr = rdma_memory_find(link->rdma, link->port->device, call->room, call->room_len);
	if (!mr)
		return NULL;
	head->address = (uintptr_t)call->room;
	head->len = (uint32_t)call->room_len;
	call->is_room_named = true;
	return call->window = open_memory(link, mr, head, bind, send);
}

/* The slot of a message is full: head, header, and payload if it goes along. Returns its length. */
static size_t fill_slot(struct rdma_link *link, unsigned slot, const struct message *message,
			const struct data_rdma *head)
{
	struct data_header wire = *message->header;
	unsigned char *at = rdma_send_slot(link, slot);
	size_t len = RDMA_HEAD_LEN;

	put_head(link, slot, head);
	data_header_encode(&wire);
	memcpy(at + sizeof(*head), &wire, sizeof(wire));
	if (message->header->len && message->header->len <= DATA_RDMA_EAGER) {
		memcpy(at + len, message->payload, message->header->len);
		len += message->header->len;
		metric_add(&link->rdma->metrics.bytes_copied, message->header->len);
	}
	return len;
}

static bool fits_room(const struct message *message)
{
	return message->header->len > DATA_RDMA_EAGER && message->header->op == DATA_RESULT &&
	       message->room.len >= message->header->len;
}

static void send_call(struct rdma_link *link, struct message *message)
{
	struct call *call = container_of(message, struct call, message);
	bool is_eager = message->header->len <= DATA_RDMA_EAGER;
	unsigned slot = take_slot(link, is_eager ? message : NULL);
	struct data_rdma head = { .kind = RDMA_MESSAGE };
	struct ibv_send_wr bind, send;
	struct rdma_window *window;
	struct ibv_sge sge;
	size_t n;

	window = name_room(link, call, &head, &bind, &send);
	n = fill_slot(link, slot, message, &head);
	init_send(link, slot, n, &sge, &send);
	if (is_eager)
		call->state = CALL_POSTED;
	else
		list_push_back(&link->awaiting, &message->link);
	(void)post_opening(link, window, &bind, &send);
}

/* An answer closes the room that its call named, whether it fits there or not. */
static void send_answer(struct rdma_link *link, struct message *message)
{
	bool is_eager = message->header->len <= DATA_RDMA_EAGER, is_written = fits_room(message);
	unsigned slot = take_slot(link, is_eager || is_written ? message : NULL);
	struct data_rdma head = { .kind = RDMA_MESSAGE };
	struct ibv_send_wr write, send;
	struct ibv_sge write_sge, send_sge;
	size_t n;

	head.flags = is_written ? DATA_RDMA_WRITTEN : 0;
	n = fill_slot(link, slot, message, &head);
	init_send(link, slot, n, &send_sge, &send);
	close_room(&send, &message->room);
	if (is_written && init_write(link, message, &write_sge, &write, &send))
		return;
	if (!is_eager && !is_written)
		list_push_back(&link->awaiting, &message->link);
	(void)post(link, is_written ? &write : &send);
}

static void send_message(struct rdma_link *link, struct message *message)
{
	uint32_t len = message->header->len;

	if (lane_prepare(link->lane, message)) {
		(void)queue_push(&link->lane->queue, message);
		(void)lane_out_of_memory(link->lane);
		return;
	}
	if (len > DATA_RDMA_EAGER)
		link->ahead += len;
	if (message->kind == MESSAGE_CALL)
		send_call(link, message);
	else
		send_answer(link, message);
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
	for (; n < link->n_grants && !lane->is_failed && has_room(link, 1) &&
	       can_open(link, RDMA_WINDOWS);
	     n++)
		post_grant(link, &link->grants[n]);
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
	metric_add(&link->rdma->metrics.bytes_moved, len);
	lane_message_done(link->lane, message, true);
}
