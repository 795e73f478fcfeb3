/*
 * The send queue towards one server of a job: parts that wait for their turn, and how many bytes
 * of those that went are still unsent. attach.c makes one when it connects a server, part.c and
 * push.c put parts in and account for them.
 */
#include "agent/round/part.h"
#include "agent/schedule/deal.h"

int agent_outlet_new(struct agent *agent, struct peer *peer, struct agent_outlet **ret_outlet)
{
	struct agent_outlet *outlet = calloc(1, sizeof(*outlet));

	if (!outlet)
		return error_origin(-ENOMEM);
	outlet->peer = peer;
	outlet->refs = 1;
	list_push_back(&agent->outlets, &outlet->link);
	*ret_outlet = outlet;
	return 0;
}

void agent_outlet_put(struct agent_outlet *outlet)
{
	if (!outlet || --outlet->refs)
		return;
	list_remove(&outlet->link);
	order_done(&outlet->waiting);
	free(outlet);
}

/* Parts of a level come here in the order in which they should leave. */
int agent_outlet_push(struct agent_outlet *outlet, struct agent_part *part)
{
	const struct order_item item = {
		.sequence = outlet->sequence++,
		.item = part,
		.priority = part->round->turn.level,
	};

	return error_trace(order_push(&outlet->waiting, &item));
}

/* Of a round that has failed: then they are looked for. */
void agent_outlet_remove(struct agent_outlet *outlet, const struct agent_part *part)
{
	(void)order_remove(&outlet->waiting, part);
}

/* -- What is under way ------------------------------------------------------------------------- */

void agent_outlet_charge(struct agent_outlet *outlet, struct agent_part *part, uint64_t len)
{
	/*
	 * Our own server takes nothing over a wire and keeps the bytes until the other nodes have
	 * sent theirs: there is no moment of "sent", and to wait for one would be to wait for other
	 * ranks' order of tensors.
	 */
	if (peer_is_self(outlet->peer))
		return;
	part->charged = len;
	outlet->ahead += len;
}

void agent_outlet_sent(struct agent_outlet *outlet, struct agent_part *part)
{
	outlet->ahead -= part->charged;
	part->charged = 0;
}

static struct agent_part *next_part(const struct agent_outlet *outlet)
{
	const struct order_item *item = order_first(&outlet->waiting);
	struct agent_part *part = item ? item->item : NULL;

	return part && outlet->ahead < agent_deal_ahead(part->job) ? part : NULL;
}

void agent_outlet_pump(struct agent_outlet *outlet)
{
	struct agent_part *part;

	if (outlet->pumping)
		return;
	outlet->pumping = true;
	outlet->refs++;
	while (!outlet->lost && (part = next_part(outlet))) {
		(void)order_pop(&outlet->waiting);
		part->job->agent->hooks->part.turn(part);
	}
	outlet->pumping = false;
	agent_outlet_put(outlet);
}
