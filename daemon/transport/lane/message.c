/*
 * A message of a lane, of TCP or RDMA: where the payload of one that comes belongs, what becomes of
 * it once all is here, and what a call is given before it is written. Worker's thread.
 */
#include "transport/common/worker.h"
#include "transport/internal.h"
#include "transport/lane/cookies.h"
#include "transport/lane/lane.h"
#include "transport/peer/delivery.h"
#include "transport/peer/peer.h"

#include <inttypes.h>

int lane_prepare(struct lane *lane, struct message *message)
{
	struct call *call = container_of(message, struct call, message);
	int r;

	if (message->kind != MESSAGE_CALL || call->state == CALL_WRITING)
		return 0;
	r = cookies_add(&lane->cookies, call, &call->header.cookie);
	if (r)
		return error_trace(r);
	call->state = CALL_WRITING;
	return 0;
}

/* One message, of which the header is known. Each returns 0, or has failed the lane. */

int lane_protocol_error(struct lane *lane, const char *why)
{
	lane_fail(lane, -EPROTO, "protocol error: %s", why);
	return -EPROTO;
}

int lane_out_of_memory(struct lane *lane)
{
	lane_fail(lane, -ENOMEM, "out of memory for what it sends");
	return -ENOMEM;
}

/* A contribution is answered by its result, set-up by OK; anything by an error. */
static bool answer_fits(const struct call *call, const struct data_header *answer)
{
	if (answer->op == DATA_ERROR)
		return true;
	return answer->op == (call->header.op == DATA_PUSH || call->header.op == DATA_PULL
				      ? DATA_RESULT
				      : DATA_OK);
}

/*
 * The header of the message that begins, where it stays. That of a pack is made once more: to copy
 * in large pieces what was written in small ones just now waits for all that was stored before it.
 */
static void put_header(const struct lane *lane, struct data_header *to)
{
	const struct lane_pack *pack = &lane->pack;

	if (pack->n)
		data_unpack(&pack->header, &pack->packed[pack->next - 1], to);
	else
		*to = lane->input.header;
}

static int begin_answer(struct lane *lane)
{
	const struct data_header *header = &lane->input.header;
	struct call *call = lane->makes_calls ? cookies_find(&lane->cookies, header->cookie) : NULL;

	if (!call || (call->state != CALL_SENT && call->state != CALL_POSTED))
		return lane_protocol_error(lane, "an answer to no call of ours");
	if (!answer_fits(call, header))
		return lane_protocol_error(lane, "an answer of the wrong kind");
	if (header->op == DATA_RESULT && (call->target || call->find_target) &&
	    header->len > call->target_len)
		return lane_protocol_error(lane, "a result longer than was asked for");
	put_header(lane, &call->answer);
	if (header->op == DATA_RESULT && header->len && !call->target && call->find_target)
		call->target = call->find_target(call);
	lane->input.call = call;
	lane->input.target_len = header->len;
	if (header->op == DATA_ERROR) {
		lane->input.target = call->text;
	} else if (header->op == DATA_RESULT && call->target) {
		lane->input.target = call->target;
	} else if (header->len) {
		if (block_new(lane->transport->blocks, header->len, NULL, &call->answer_block))
			return lane_out_of_memory(lane);
		lane->input.target = call->answer_block->data;
	}
	return 0;
}

static int begin_incoming(struct lane *lane)
{
	const struct data_header *header = &lane->input.header;
	struct incoming *incoming;
	struct failure failure;
	int r;

	if (header->cookie && lane->makes_calls)
		return lane_protocol_error(lane, "a call from the side that answers");
	if (lane->index == DATA_LANE_BEAT)
		return lane_protocol_error(lane, "more than signs of life where only these belong");
	r = incoming_new(lane->peer, lane, header->len, &incoming);
	if (r == QUOTA_E_FULL) {
		(void)incoming_over_quota(lane->peer, header->len, &failure);
		lane_fail(lane, -EDQUOT, "%s", failure.text);
		return -EDQUOT;
	}
	if (r)
		return lane_out_of_memory(lane);
	put_header(lane, &incoming->delivery.header);
	incoming->delivery.at_ns = atomic_load_explicit(&lane->heard_ns, memory_order_relaxed);
	incoming->message.priority = header->priority;
	lane->input.incoming = incoming;
	if (!header->len)
		return 0;
	if (block_new(lane->transport->blocks, header->len, NULL,
		      &incoming->delivery.payload_block))
		return lane_out_of_memory(lane);
	incoming->delivery.payload = incoming->delivery.payload_block->data;
	lane->input.target = incoming->delivery.payload_block->data;
	lane->input.target_len = header->len;
	return 0;
}

static void queue_pong(struct lane *lane)
{
	if (lane->pong.is_queued)
		return;
	lane->pong.is_queued = true;
	lane->pong.header = (struct data_header){ .magic = DATA_MAGIC,
						  .version = DATA_VERSION,
						  .op = DATA_PONG };
	lane->pong.message = (struct message){ .header = &lane->pong.header,
					       .kind = MESSAGE_PONG,
					       .urgent = true };
	lane_enqueue(lane, &lane->pong.message);
}

int lane_begin_message(struct lane *lane)
{
	data_header_decode(&lane->input.header);
	return lane_begin_decoded(lane);
}

int lane_begin_decoded(struct lane *lane)
{
	const char *why;

	if (data_header_check(&lane->input.header, &why))
		return lane_protocol_error(lane, why);
	lane->input.target = NULL;
	lane->input.target_len = 0;
	switch (lane->input.header.op) {
	case DATA_OK:
	case DATA_RESULT:
	case DATA_ERROR:
		return begin_answer(lane);
	case DATA_PING:
		queue_pong(lane);
		return 0;
	case DATA_PONG:
		return 0;
	case DATA_PACK:
		return lane_protocol_error(lane, "a pack where none belongs");
	default:
		return begin_incoming(lane);
	}
}

void lane_end_answer(struct lane *lane, struct call *call)
{
	bool was_damaged = call->answer.op == DATA_ERROR && call->answer.status == EBADMSG;

	if (was_damaged && !call->is_repeatable && !call->ends_alone) {
		lane_fail(lane, -EBADMSG, "%s", call_damaged_text);
		return;
	}
	cookies_remove(&lane->cookies, call->header.cookie);
	if (was_damaged)
		call_damaged(call);
	else
		call_take_answer(call);
	call->message.mail.run = lane->peer->home->answered;
	call->state = CALL_ANSWERED;
	if (call->is_written)
		lane_post_home(lane, &call->message.mail);
}

void lane_end_incoming(struct lane *lane, struct incoming *incoming)
{
	lane_post_home(lane, &incoming->message.mail);
}

void lane_end_message(struct lane *lane)
{
	struct incoming *incoming = TAKE_PTR(lane->input.incoming);
	struct call *call = TAKE_PTR(lane->input.call);

	lane->input.header_len = 0;
	if (call)
		lane_end_answer(lane, call);
	else if (incoming)
		lane_end_incoming(lane, incoming);
}

void lane_receive_done(struct lane *lane)
{
	lane->input.call = NULL;
	lane->input.incoming = incoming_free(lane->input.incoming);
	for (uint32_t i = 0; i < lane->pack.n; i++)
		incoming_free(TAKE_PTR(lane->pack.messages[i].incoming));
}
