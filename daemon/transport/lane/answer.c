/*
 * What the answer to a call says: its status, and words that come from outside and go into logs.
 * Any thread.
 */
#include "transport/peer/peer.h"

#include "proto/text.h"
#include <stdio.h>

/* What the answer says. The text comes from outside and goes into logs. */
void call_take_answer(struct call *call)
{
	size_t len = MIN(call->answer.len, (uint32_t)ERROR_TEXT_MAX);
	int status = call->answer.status;

	if (call->answer.op != DATA_ERROR)
		return;
	call->status = status > 0 && status < 4096 ? -status : -EREMOTEIO;
	call->text[len] = '\0';
	text_make_plain(call->text, len);
	if (!len)
		(void)snprintf(call->text, sizeof(call->text), "%s",
			       strerrordesc_np(-call->status) ?: "an error without a name");
}

const char call_damaged_text[] = "a payload arrived with other bytes than were sent";

void call_damaged(struct call *call)
{
	call->answer = (struct data_header){ 0 };
	call->answer_block = block_unref(call->answer_block);
	call->status = call->is_repeatable ? -ENETRESET : -EBADMSG;
	(void)snprintf(call->text, sizeof(call->text), "%s", call_damaged_text);
}
