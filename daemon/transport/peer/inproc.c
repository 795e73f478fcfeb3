/*
 * Our own process as a peer: a call is a mail to ourselves, its answer another one. Neither
 * happens at once, so that, as over a wire, callbacks are not called from inside the functions
 * that cause them. Home thread.
 */
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/lane.h"
#include "transport/peer/delivery.h"
#include "transport/peer/peer.h"

#include "base/clock.h"

static void inproc_on_call(struct mail *mail)
{
	struct call *call = container_of(mail, struct call, message.mail);
	struct peer *peer = call->peer;
	struct transport *transport = peer->transport;
	struct incoming *incoming;
	const char *why;

	if (transport->is_closed) {
		call_fail(call, -ESHUTDOWN, "the daemon shuts down");
		return;
	}
	if (data_header_check(&call->header, &why)) {
		call_fail(call, -EPROTO, why);
		return;
	}
	if (incoming_new(peer, NULL, call->header.len, &incoming)) {
		call_fail(call, -ENOMEM, "out of memory");
		return;
	}
	incoming->delivery.header = call->header;
	incoming->delivery.at_ns = clock_now_ns();
	incoming->delivery.payload = call->header.len ? call->payload : NULL;
	incoming->delivery.stalls = call->payload_stalls;
	if (call->payload_block)
		incoming->delivery.payload_block = block_ref(call->payload_block);
	incoming->call = call;
	call->incoming = incoming;
	peer->n_deliveries++;
	transport->ops->call_arrived(transport->user, &incoming->delivery);
}

void inproc_call(struct call *call)
{
	struct peer *peer = call->peer;

	call->header.cookie = 1; /* any that says it is a call */
	call->state = CALL_QUEUED;
	list_push_back(&peer->calls, &call->link);
	call->message.mail.run = inproc_on_call;
	mailbox_post(&peer->transport->mailbox, &call->message.mail);
}

static void inproc_on_answer(struct mail *mail)
{
	struct call *call = container_of(mail, struct call, message.mail);

	if (call->sent)
		call->sent(call);
	call_end(call);
}

/* Moves the payload over: a block by reference, anything else by copying. */
static void inproc_take(struct call *call, struct block *block, const void *payload)
{
	const struct data_header *answer = &call->answer;

	if (answer->op == DATA_RESULT && call->target && answer->len > call->target_len) {
		call->status = -EPROTO;
		(void)strcpy(call->text, "the result is longer than there is room for");
	} else if (block) {
		call->answer_block = block_ref(block);
	} else if (answer->op == DATA_RESULT && call->target) {
		metric_copy(&call->peer->transport->copied, call->target, payload, answer->len);
	} else if (block_new(call->peer->transport->blocks, answer->len, NULL,
			     &call->answer_block)) {
		call->status = -ENOMEM;
		(void)strcpy(call->text, "out of memory");
	} else {
		metric_copy(&call->peer->transport->copied, call->answer_block->data, payload,
			    answer->len);
	}
}

void inproc_answer(struct incoming *incoming, const struct data_header *header, struct block *block,
		   const void *payload)
{
	struct call *call = TAKE_PTR(incoming->call);

	if (call) {
		call->incoming = NULL;
		call->answer = *header;
		call->answer.magic = DATA_MAGIC;
		call->answer.version = DATA_VERSION;
		call->answer.cookie = call->header.cookie;
		if (header->op == DATA_ERROR) {
			memcpy(call->text, payload, MIN(header->len, (uint32_t)ERROR_TEXT_MAX));
			call_take_answer(call);
		} else if (header->len) {
			inproc_take(call, block, payload);
		}
		call->message.mail.run = inproc_on_answer;
		mailbox_post(&call->peer->transport->mailbox, &call->message.mail);
	}
	incoming_free(incoming);
}

static void inproc_on_notice(struct mail *mail)
{
	struct notice *notice = container_of(mail, struct notice, message.mail);
	struct transport *transport = notice->peer->transport;

	if (!transport->is_closed)
		transport->ops->notice_arrived(transport->user, notice->peer, &notice->header,
					       notice->header.len ? notice->message.payload : NULL);
	notice_free(notice);
}

void inproc_notice(struct peer *peer, struct notice *notice)
{
	notice->peer = peer;
	notice->message.mail.run = inproc_on_notice;
	mailbox_post(&peer->transport->mailbox, &notice->message.mail);
}

/* -- Memory of the caller's -------------------------------------------------------------------- */

static struct call *call_of(struct delivery *delivery)
{
	return container_of(delivery, struct incoming, delivery)->call;
}

struct block *delivery_in_place(struct delivery *delivery, uint32_t len)
{
	struct call *call = call_of(delivery);

	return call && call->in_place ? call->in_place(call, len) : NULL;
}

bool delivery_filled(struct delivery *delivery)
{
	struct call *call = call_of(delivery);

	return call && call->filled && call->filled(call);
}
