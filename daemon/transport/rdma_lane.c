#include "transport/rdma.h"

#include "base/log.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#define POLL_BATCH 16
#define POLL_MAX   256 /* completions before others on this loop have their turn */

/*
 * A lane over a reliable connection. A message leaves in a slot of registered memory: its head, header and, when short,
 * payload. A longer payload is only offered; once the other side has said where it goes (with the call, for a result) it
 * is written there from where it lies. A slot is free again when its sending is completed; a message is done with when
 * the sending that carried its payload is. Completions wake the loop by a channel; while they keep coming they are polled.
 */

enum { WR_RECEIVE, WR_SEND };

static uint64_t wr_id(unsigned kind, unsigned index)
{
	return (uint64_t)kind << 32 | index;
}

static size_t memory_len(void)
{
	return (size_t)(RDMA_RECEIVES + RDMA_SENDS) * RDMA_SLOT_LEN;
}

static unsigned char *receive_slot(const struct rdma_link *link, unsigned i)
{
	return link->memory + (size_t)i * RDMA_SLOT_LEN;
}

static unsigned char *send_slot(const struct rdma_link *link, unsigned i)
{
	return link->memory + (size_t)(RDMA_RECEIVES + i) * RDMA_SLOT_LEN;
}

/* Made and unmade (home; unmade also by the worker, whose it is then) */

static int post_receive(struct rdma_link *link, unsigned i)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)receive_slot(link, i),
		.length = RDMA_SLOT_LEN,
		.lkey = link->mr->lkey,
	};
	struct ibv_recv_wr wr = { .wr_id = wr_id(WR_RECEIVE, i), .sg_list = &sge, .num_sge = 1 },
			   *bad;

	return -ibv_post_recv(link->qp, &wr, &bad);
}

static int make_queue_pair(struct rdma_link *link)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = link->cq,
		.recv_cq = link->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {
			.max_send_wr = 2 * RDMA_SENDS,
			.max_recv_wr = RDMA_RECEIVES,
			.max_send_sge = 1,
			.max_recv_sge = 1,
			.max_inline_data = 256,
		},
	};

	link->qp = link->rdma->verbs->create_qp(link->port->device->pd, &attr);
	if (!link->qp) {
		attr.cap.max_inline_data = 0;
		link->qp = link->rdma->verbs->create_qp(link->port->device->pd, &attr);
	}
	if (!link->qp)
		return -errno;
	link->max_inline = attr.cap.max_inline_data;
	return 0;
}

static int init_queue_pair(struct rdma_link *link)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	int mask, r = 0;

	if (link->rdma->verbs->cm_init_qp_attr(link->id, &attr, &mask))
		return -errno;
	attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	if (link->rdma->verbs->modify_qp(link->qp, &attr, mask | IBV_QP_ACCESS_FLAGS))
		return -errno;
	for (unsigned i = 0; i < RDMA_RECEIVES && !r; i++)
		r = post_receive(link, i);
	return r;
}

static int failed_to(const char *what, char *why, size_t size)
{
	int error = errno ?: EIO;

	rdma_explain(error, what, why, size);
	return -error;
}

int rdma_link_make(struct rdma_link *link, char *why, size_t size)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;
	struct rdma_device *device = link->port->device;
	int r;

	link->memory = mmap(NULL, memory_len(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			    -1, 0);
	if (link->memory == MAP_FAILED) {
		link->memory = NULL;
		return failed_to("no memory for the messages of a lane", why, size);
	}
	link->mr = rdma_register(link->rdma, device, link->memory, memory_len(),
				 IBV_ACCESS_LOCAL_WRITE);
	if (!link->mr)
		return failed_to("cannot register the memory of a lane", why, size);
	link->channel = verbs->create_comp_channel(device->context);
	if (!link->channel)
		return failed_to("cannot make a completion channel", why, size);
	if (fcntl(link->channel->fd, F_SETFL, O_NONBLOCK) < 0)
		return failed_to("completion channel", why, size);
	link->cq = verbs->create_cq(device->context, RDMA_RECEIVES + 2 * RDMA_SENDS, NULL,
				    link->channel, 0);
	if (!link->cq)
		return failed_to("cannot make a completion queue", why, size);
	r = make_queue_pair(link);
	if (!r)
		r = init_queue_pair(link);
	if (r) {
		errno = -r;
		return failed_to("cannot make a queue pair", why, size);
	}
	return 0;
}

void rdma_link_unmake(struct rdma_link *link)
{
	const struct rdma_verbs *verbs = link->rdma->verbs;

	if (link->qp)
		(void)verbs->destroy_qp(TAKE_PTR(link->qp));
	if (link->cq)
		(void)verbs->destroy_cq(TAKE_PTR(link->cq));
	if (link->channel)
		(void)verbs->destroy_comp_channel(TAKE_PTR(link->channel));
	rdma_unregister(link->rdma, TAKE_PTR(link->mr));
	if (link->memory)
		(void)munmap(TAKE_PTR(link->memory), memory_len());
	free(TAKE_PTR(link->grants));
}

/* The worker's thread */

static void link_fail(struct rdma_link *link, const char *format, ...) _printf_(2, 3);

/* The wire, not the peer: what it held may go another way. */
static void link_fail(struct rdma_link *link, const char *format, ...)
{
	char text[256];
	va_list args;

	if (link->lane->is_failed)
		return;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	link->is_broken = true;
	lane_fail(link->lane, -ECONNRESET, "%s", text);
}

/* Sending */

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
		link_fail(link, "posting a send: %s", strerrordesc_np(r));
	return !r;
}

/* The head, which carries the credits too, at the start of a slot. */
static void put_head(struct rdma_link *link, unsigned slot, const struct data_rdma *head)
{
	struct data_rdma wire = *head;

	wire.credits = (uint16_t)link->owed;
	link->owed = 0;
	data_rdma_swap(&wire);
	memcpy(send_slot(link, slot), &wire, sizeof(wire));
}

static void init_send(struct rdma_link *link, unsigned slot, size_t len, struct ibv_sge *sge,
		      struct ibv_send_wr *wr)
{
	*sge = (struct ibv_sge){
		.addr = (uintptr_t)send_slot(link, slot),
		.length = (uint32_t)len,
		.lkey = link->mr->lkey,
	};
	*wr = (struct ibv_send_wr){
		.wr_id = wr_id(WR_SEND, slot),
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
			link_fail(link, "the device does not register the memory of parts");
			return -ENOMEM;
		}
	}
	*sge = (struct ibv_sge){ .addr = (uintptr_t)payload, .length = len, .lkey = lkey };
	*wr = (struct ibv_send_wr){
		.wr_id = wr_id(WR_SEND, slot),
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
	unsigned char *at = send_slot(link, slot);
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

static void rdma_flush(struct lane *lane)
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

/* Receiving. Each fails the lane when it does not return 0. */

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
		link_fail(link, "the device does not register the memory of parts");
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

static void on_received(struct rdma_link *link, const struct ibv_wc *wc)
{
	unsigned i = (uint32_t)wc->wr_id;
	struct lane *lane = link->lane;
	int r;

	atomic_fetch_add_explicit(&lane->bytes_in, wc->byte_len, memory_order_relaxed);
	if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
		r = receive_payload(link, ntohl(wc->imm_data), wc->byte_len);
	else
		r = receive_head(link, receive_slot(link, i), wc->byte_len);
	if (r || lane->is_failed)
		return;
	r = post_receive(link, i);
	if (r)
		link_fail(link, "posting a receive: %s", strerrordesc_np(-r));
	link->owed++;
}

static void on_sent(struct rdma_link *link, const struct ibv_wc *wc)
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

static void on_error(struct rdma_link *link, const struct ibv_wc *wc)
{
	const char *device = link->port->device->name;

	switch (wc->status) {
	case IBV_WC_WR_FLUSH_ERR: /* something else went before, or the other side went */
		link_fail(link, "%s: the connection was closed", device);
		return;
	case IBV_WC_RETRY_EXC_ERR:
		link_fail(link,
			  "%s: no answer on the wire: the link or the peer is down, or packets of "
			  "%u bytes do not pass (MTU)",
			  device, link->mtu);
		return;
	case IBV_WC_RNR_RETRY_EXC_ERR:
		link_fail(link, "%s: the peer posts no receives", device);
		return;
	default:
		link_fail(link, "%s: %s (vendor error 0x%x)", device,
			  link->rdma->verbs->wc_status_str(wc->status), wc->vendor_err);
		return;
	}
}

/* Returns how many there were. */
static int poll_once(struct rdma_link *link)
{
	struct ibv_wc wcs[POLL_BATCH];
	bool has_heard = false;
	int n = ibv_poll_cq(link->cq, POLL_BATCH, wcs);

	for (int i = 0; i < n; i++) {
		if (wcs[i].status != IBV_WC_SUCCESS) {
			on_error(link, &wcs[i]);
		} else if (wcs[i].wr_id >> 32 == WR_SEND) {
			on_sent(link, &wcs[i]);
		} else {
			has_heard = true;
			on_received(link, &wcs[i]);
		}
	}
	if (has_heard)
		lane_heard(link->lane);
	if (n < 0)
		link_fail(link, "polling completions failed");
	return n;
}

static void poll_some(struct rdma_link *link)
{
	struct lane *lane = link->lane;
	int n, total = 0;

	lane->is_flushed_soon = true;
	do {
		n = poll_once(link);
		total += MAX(n, 0);
	} while (n > 0 && total < POLL_MAX && !lane->is_failed);
	lane->is_flushed_soon = false;
	if (lane->is_failed)
		return;
	rdma_flush(lane);
	if (n > 0 && !lane->is_failed && !link->is_again_posted) {
		link->is_again_posted = true;
		loop_post(lane->worker->loop, &link->again);
	}
}

static void on_again(struct mail *mail)
{
	struct rdma_link *link = container_of(mail, struct rdma_link, again);

	link->is_again_posted = false;
	if (!link->lane->is_failed)
		poll_some(link);
}

static void rdma_on_ready(struct loop_source *source, uint32_t events)
{
	struct rdma_link *link = container_of(source, struct lane, source)->rdma;
	const struct rdma_verbs *verbs = link->rdma->verbs;
	struct ibv_cq *cq;
	void *context;

	if (verbs->get_cq_event(link->channel, &cq, &context))
		return;
	verbs->ack_cq_events(cq, 1);
	if (ibv_req_notify_cq(link->cq, 0)) {
		link_fail(link, "completion events cannot be asked for");
		return;
	}
	poll_some(link);
}

static int rdma_start(struct lane *lane)
{
	struct rdma_link *link = lane->rdma;
	int r;

	lane->source = (struct loop_source){ .fd = link->channel->fd, .ready = rdma_on_ready };
	r = loop_add(lane->worker->loop, &lane->source, EPOLLIN);
	if (r) {
		lane->source.fd = -1;
		return error_trace(r);
	}
	if (ibv_req_notify_cq(link->cq, 0))
		return error_origin(-EIO);
	poll_some(link); /* what came before */
	return 0;
}

static void rdma_cut(struct lane *lane)
{
	struct rdma_link *link = lane->rdma;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

	loop_remove(&lane->source);
	lane->source.fd = -1;
	if (link->qp)
		(void)link->rdma->verbs->modify_qp(link->qp, &attr, IBV_QP_STATE);
}

/* What had come before the end counts, so that as little as possible is asked for again. */
static void drain(struct rdma_link *link)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(link->cq, 1, &wc) > 0) {
		if (wc.status != IBV_WC_SUCCESS)
			continue;
		if (wc.wr_id >> 32 == WR_SEND)
			on_sent(link, &wc);
		else
			on_received(link, &wc);
	}
}

static void release_message(struct rdma_link *link, struct message *message)
{
	const struct call *call = container_of(message, struct call, message);

	lane_message_done(link->lane, message,
			  message->kind == MESSAGE_CALL && call->state == CALL_ANSWERED);
}

static void release_list(struct rdma_link *link, struct list *list)
{
	struct message *message;

	while ((message = list_first(list, struct message, link))) {
		list_remove(&message->link);
		release_message(link, message);
	}
}

/* The queue pair goes first: from then on nobody writes into our memory. */
static void rdma_release(struct lane *lane)
{
	struct rdma_link *link = lane->rdma;
	struct cookies *cookies = &lane->cookies;

	if (link->is_again_posted)
		loop_unpost(lane->worker->loop, &link->again);
	drain(link);
	rdma_link_unmake(link);
	lane_receive_done(lane);
	for (unsigned i = 0; i < RDMA_SENDS; i++) {
		struct message *message = TAKE_PTR(link->sends[i].message);

		if (message)
			release_message(link, message);
	}
	release_list(link, &link->awaiting);
	release_list(link, &link->granted);
	for (uint32_t i = 0; !lane->makes_calls && i < cookies->n_slots; i++)
		cookies->slots[i].user = incoming_free(cookies->slots[i].user);
}

static void on_broken(struct mail *mail)
{
	struct rdma_link *link = container_of(mail, struct rdma_link, broken);

	if (link->lane->is_failed)
		return;
	while (poll_once(link) > 0 && !link->lane->is_failed)
		;
	link_fail(link, "%s: %s", link->port->device->name, link->why);
}

void rdma_link_break(struct rdma_link *link, const char *why)
{
	if (*link->why)
		return;
	(void)snprintf(link->why, sizeof(link->why), "%s", why);
	worker_post(link->lane->worker, &link->broken);
}

static const struct lane_ops rdma_ops = {
	.start = rdma_start,
	.flush = rdma_flush,
	.cut = rdma_cut,
	.release = rdma_release,
};

int rdma_lane_new(struct peer *peer, struct rdma_link *link, struct lane **ret_lane)
{
	struct lane *lane;
	int r;

	r = lane_new(peer, &rdma_ops, &lane);
	if (r)
		return error_trace(r);
	lane->rdma = link;
	link->lane = lane;
	link->credits = link->n_theirs;
	list_init(&link->awaiting);
	list_init(&link->granted);
	link->again.run = on_again;
	link->broken.run = on_broken;
	link->n_free = RDMA_SENDS;
	for (unsigned i = 0; i < RDMA_SENDS; i++)
		link->sends[i].next_free = (uint16_t)(i + 1);
	*ret_lane = lane;
	return 0;
}
