/*
 * The way out of an RDMA lane: messages, grants and payloads become work requests, posted
 * together as far as slots and credits reach. lane.c calls to flush, and for each send that
 * is completed. Worker's thread.
 */
#include "transport/lane/queue.h"
#include "transport/rdma/link.h"
#include "transport/rdma/rdma.h"

static bool has_credits(const struct rdma_link *link, unsigned n_receives)
{
	/* The last credit is for giving credits. */
	return link->sends.n < RDMA_SENDS && link->credits > n_receives;
}

/*
 * Slots are a ring, as sends are completed in their order: one completion tells of all before it.
 * So only what a message waits for asks for one, and now and then one of the others, lest the ring
 * fills.
 */
static unsigned take_slot(struct rdma_link *link, struct message *message)
{
	unsigned i = (link->sends.first + link->sends.n++) % RDMA_SENDS;
	struct rdma_send *send = &link->sends.slots[i];

	send->message = message;
	send->is_signaled = message || ++link->sends.n_silent >= RDMA_SENDS / 4;
	if (send->is_signaled) {
		link->sends.n_silent = 0;
		send->posted_ns = link->now_ns;
	}
	return i;
}

/*
 * All that has been prepared goes to the device at once. Returns whether it took it; if not, the
 * lane has failed.
 */
static bool post(struct rdma_link *link)
{
	struct ibv_send_wr *bad;
	unsigned n = link->works.n;
	int r;

	link->works.n = 0;
	if (!n)
		return true;
	link->works.list[n - 1].next = NULL;
	r = ibv_post_send(link->qp, link->works.list, &bad);
	if (r) {
		rdma_link_fail(link, "posting a send: %s", strerrordesc_np(r));
		return false;
	}
	for (unsigned i = 0; i < n; i++)
		if (link->works.list[i].opcode == IBV_WR_BIND_MW)
			rdma_window_bound(&link->works.list[i]);
	return true;
}

/* Prepares a chain of work requests. */
static void add_works(struct rdma_link *link, const struct ibv_send_wr *wr)
{
	for (; wr; wr = wr->next) {
		struct ibv_send_wr *work = &link->works.list[link->works.n];
		struct ibv_sge *sge = &link->works.sges[link->works.n++];

		*work = *wr;
		work->next = work + 1;
		if (wr->num_sge)
			*sge = *wr->sg_list;
		work->sg_list = sge;
	}
}

/* At the end of what goes together. Returns whether the lane lives. */
static bool posted(struct rdma_link *link)
{
	return link->works.n + 2 <= RDMA_WORKS || post(link);
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
		.send_flags = IBV_SEND_SOLICITED |
			      (link->sends.slots[slot].is_signaled ? IBV_SEND_SIGNALED : 0u) |
			      (len <= link->max_inline ? IBV_SEND_INLINE : 0u),
	};
	link->credits--;
}

/* What the other end opened for this is closed by it. */
static void close_target(struct ibv_send_wr *send, const struct rdma_target *target)
{
	if (!target->is_window)
		return;
	send->opcode = IBV_WR_SEND_WITH_INV;
	send->invalidate_rkey = target->key;
}

static void post_head(struct rdma_link *link, const struct data_rdma *head)
{
	unsigned slot = take_slot(link, NULL);
	struct ibv_send_wr wr;
	struct ibv_sge sge;

	put_head(link, slot, head);
	init_send(link, slot, sizeof(*head), &sge, &wr);
	add_works(link, &wr);
}

/*
 * Fills in the key that opens head->address, len of a region: of a window that is opened in front
 * of `send`, if it has to be.
 */
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
	add_works(link, *grant->window ? &bind : &send);
}

/*
 * A payload from where it lies, or from a copy in a block; in front of `send`. Returns 0, or has
 * failed the lane.
 */
static int init_write(struct rdma_link *link, struct message *message, struct ibv_sge *sge,
		      struct ibv_send_wr *wr, struct ibv_send_wr *send)
{
	struct rdma *rdma = link->rdma;
	struct rdma_device *device = link->port->device;
	const void *payload = message->payload;
	uint32_t len = message->header->len;
	struct ibv_mr *mr = rdma_memory_find(rdma, device, payload, len);

	if (!mr) {
		assert(message->kind != MESSAGE_CALL ||
		       !container_of(message, struct call, message)->is_payload_direct);
		if (block_new(rdma->transport->blocks, len, NULL, &message->bounce))
			return lane_out_of_memory(link->lane);
		rdma_copy(rdma, message->bounce->data, payload, len);
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
		.wr.rdma = { .remote_addr = message->target.address, .rkey = message->target.key },
	};
	return 0;
}

/* What was granted. */
static void post_write(struct rdma_link *link, struct message *message)
{
	unsigned slot = take_slot(link, message);
	struct data_rdma head = {
		.kind = RDMA_PLACED,
		.place = message->target.place,
		.len = message->header->len,
	};
	struct ibv_send_wr write, send;
	struct ibv_sge write_sge, send_sge;

	if (message->kind == MESSAGE_CALL)
		container_of(message, struct call, message)->state = CALL_POSTED;
	put_head(link, slot, &head);
	init_send(link, slot, sizeof(head), &send_sge, &send);
	close_target(&send, &message->target);
	if (!init_write(link, message, &write_sge, &write, &send))
		add_works(link, &write);
}

/* Where a call's result is to go: told if the device knows that memory. */
static struct rdma_window *name_target(struct rdma_link *link, struct call *call,
				       struct data_rdma *head, struct ibv_send_wr *bind,
				       struct ibv_send_wr *send)
{
	struct ibv_mr *mr;

	if (!call->target || call->target_len <= DATA_RDMA_EAGER || call->target_len > UINT32_MAX ||
	    (!call->is_target_direct && !can_open(link, RDMA_TARGET_WINDOWS)))
		return NULL;
	mr = rdma_memory_find(link->rdma, link->port->device, call->target, call->target_len);
	if (!mr)
		return NULL;
	head->address = (uintptr_t)call->target;
	head->len = (uint32_t)call->target_len;
	call->is_target_named = true;
	if (call->is_target_direct) {
		head->key = mr->rkey;
		return NULL;
	}
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
		rdma_copy(link->rdma, at + len, message->payload, message->header->len);
		len += message->header->len;
	}
	return len;
}

static bool fits_target(const struct message *message)
{
	return message->header->len > DATA_RDMA_EAGER && message->header->op == DATA_RESULT &&
	       message->target.len >= message->header->len;
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

	window = name_target(link, call, &head, &bind, &send);
	n = fill_slot(link, slot, message, &head);
	init_send(link, slot, n, &sge, &send);
	if (is_eager)
		call->state = CALL_POSTED;
	else
		list_push_back(&link->awaiting, &message->link);
	add_works(link, window ? &bind : &send);
}

/* An answer closes the target that its call named, whether it fits there or not. */
static void send_answer(struct rdma_link *link, struct message *message)
{
	bool is_eager = message->header->len <= DATA_RDMA_EAGER, is_written = fits_target(message);
	unsigned slot = take_slot(link, is_eager || is_written ? message : NULL);
	struct data_rdma head = { .kind = RDMA_MESSAGE };
	struct ibv_send_wr write, send;
	struct ibv_sge write_sge, send_sge;
	size_t n;

	head.flags = is_written ? DATA_RDMA_WRITTEN : 0;
	n = fill_slot(link, slot, message, &head);
	init_send(link, slot, n, &send_sge, &send);
	close_target(&send, &message->target);
	if (is_written && init_write(link, message, &write_sge, &write, &send))
		return;
	if (!is_eager && !is_written)
		list_push_back(&link->awaiting, &message->link);
	add_works(link, is_written ? &write : &send);
}

static void send_message(struct rdma_link *link, struct message *message)
{
	uint32_t len = message->header->len;

	if (lane_prepare(link->lane, message)) {
		queue_return(&link->lane->output.queue, message);
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
	struct message *message = queue_first(&link->lane->output.queue);

	if (!message || !has_credits(link, 2))
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

	link->now_ns = clock_now_ns();
	lane->output.is_fresh = false;
	for (; n < link->grants.n && posted(link) && has_credits(link, 1) &&
	       can_open(link, RDMA_WINDOWS);
	     n++)
		post_grant(link, &link->grants.list[n]);
	link->grants.n -= n;
	if (n && link->grants.n)
		memmove(link->grants.list, link->grants.list + n,
			link->grants.n * sizeof(*link->grants.list));
	while (!lane->is_failed && posted(link) && has_credits(link, 1) &&
	       (message = list_first(&link->granted, struct message, link))) {
		list_remove(&message->link);
		post_write(link, message);
	}
	while (!lane->is_failed && posted(link) && next_message(link))
		send_message(link, queue_pop(&lane->output.queue));
	if (!lane->is_failed && posted(link) && link->owed >= RDMA_RECEIVES / 2 &&
	    link->sends.n < RDMA_SENDS && link->credits)
		post_head(link, &(struct data_rdma){ .kind = RDMA_CREDIT });
	if (!lane->is_failed && post(link)) {
		/* Who was to be woken by messages alone may have to know more now. */
		if (rdma_is_still(link) || (link->poll.arming == RDMA_ARMED_MESSAGES &&
					    rdma_arming_wanted(link) == RDMA_ARMED_ALL))
			rdma_poll_again(link);
		rdma_watch_sends(link);
	}
	link->works.n = 0;
}

static void on_message_sent(struct rdma_link *link, struct message *message)
{
	uint32_t len = message->header->len;

	if (len > DATA_RDMA_EAGER)
		link->ahead -= len;
	if (!link->ahead && !link->lane->output.queue.n)
		fair_rest(&link->lane->output.queue);
	atomic_fetch_add_explicit(&link->lane->bytes_out, RDMA_HEAD_LEN + len,
				  memory_order_relaxed);
	metric_add(&link->rdma->metrics.bytes_moved, len);
	lane_message_done(link->lane, message, true);
}

void rdma_on_sent(struct rdma_link *link, const struct ibv_wc *wc)
{
	unsigned last = (uint32_t)wc->wr_id, i;
	struct message *message;

	link->progress_ns = link->now_ns;
	while (link->sends.n) {
		i = link->sends.first;
		link->sends.first = (i + 1) % RDMA_SENDS;
		link->sends.n--;
		message = TAKE_PTR(link->sends.slots[i].message);
		if (message)
			on_message_sent(link, message);
		if (i == last)
			break;
	}
}

/* What a device is given for a message at least, whatever its length: 1 MiB/s. */
static uint64_t patience_ns(const struct rdma_link *link, const struct message *message)
{
	uint64_t bytes = message ? message->header->len : 0;

	return link->rdma->transport->settings.peer_timeout_ns / 4 * 3 + bytes * 1000;
}

bool rdma_awaits_sends(const struct rdma_link *link)
{
	/* Those behind the last that is signaled are silent. */
	return link->sends.n > link->sends.n_silent;
}

bool rdma_is_held_up(const struct rdma_link *link)
{
	return rdma_awaits_sends(link) &&
	       (link->lane->output.queue.n || link->grants.n || !list_empty(&link->granted));
}

bool rdma_is_still(const struct rdma_link *link)
{
	uint64_t since_ns;

	for (unsigned n = 0; n < link->sends.n; n++) {
		const struct rdma_send *send =
			&link->sends.slots[(link->sends.first + n) % RDMA_SENDS];

		if (!send->is_signaled)
			continue;
		since_ns = MAX(send->posted_ns, link->progress_ns);
		return link->now_ns > since_ns &&
		       link->now_ns - since_ns > patience_ns(link, send->message);
	}
	return false;
}
