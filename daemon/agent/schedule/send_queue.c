/*
 * The send queue towards one server of a job: parts that wait for their turn, and how many bytes
 * of those that went are still unsent. attach.c makes one when it connects a server, part.c and
 * push.c put parts in and account for them.
 */
#include "agent/round/part.h"
#include "agent/schedule/scheduler.h"

int agent_send_queue_new(struct agent *agent, struct peer *peer,
			 struct agent_send_queue **ret_send_queue)
{
	struct agent_send_queue *send_queue = calloc(1, sizeof(*send_queue));

	if (!send_queue)
		return error_origin(-ENOMEM);
	send_queue->peer = peer;
	peer_hold(peer); /* rounds of a job that is over go on until the sweep has come to them */
	send_queue->refs = 1;
	list_push_back(&agent->send_queues, &send_queue->link);
	*ret_send_queue = send_queue;
	return 0;
}

void agent_send_queue_put(struct agent_send_queue *send_queue)
{
	if (!send_queue || --send_queue->refs)
		return;
	list_remove(&send_queue->link);
	peer_release(send_queue->peer);
	order_done(&send_queue->waiting);
	free(send_queue);
}

/* Parts of a priority class come here in the order in which they should leave. */
int agent_send_queue_push(struct agent_send_queue *send_queue, struct agent_part *part)
{
	const struct order_item item = {
		.sequence = send_queue->sequence++,
		.item = part,
		.priority = part->round->turn.priority_class,
	};

	return error_trace(order_push(&send_queue->waiting, &item));
}

/* Of a round that has failed: then they are looked for. */
void agent_send_queue_remove(struct agent_send_queue *send_queue, const struct agent_part *part)
{
	(void)order_remove(&send_queue->waiting, part);
}

struct agent_part *agent_send_queue_take(struct agent_send_queue *send_queue)
{
	return order_first(&send_queue->waiting) ? order_pop(&send_queue->waiting).item : NULL;
}

/* -- What is under way ------------------------------------------------------------------------- */

void agent_send_queue_charge(struct agent_send_queue *send_queue, struct agent_part *part,
			     uint64_t len)
{
	/*
	 * Our own server takes nothing over a wire and keeps the bytes until the other nodes have
	 * sent theirs: there is no moment of "sent", and to wait for one would be to wait for other
	 * ranks' order of tensors.
	 */
	if (peer_is_self(send_queue->peer))
		return;
	part->charged = len;
	send_queue->ahead += len;
}

void agent_send_queue_sent(struct agent_send_queue *send_queue, struct agent_part *part)
{
	send_queue->ahead -= part->charged;
	part->charged = 0;
}

static struct agent_part *next_part(const struct agent_send_queue *send_queue)
{
	const struct order_item *item = order_first(&send_queue->waiting);
	struct agent_part *part = item ? item->item : NULL;

	return part && agent_schedule_has_room(part->job, send_queue->ahead) ? part : NULL;
}

void agent_send_queue_pump(struct agent_send_queue *send_queue)
{
	struct agent_part *part;

	if (send_queue->pumping)
		return;
	send_queue->pumping = true;
	send_queue->refs++;
	while (!send_queue->lost && (part = next_part(send_queue))) {
		(void)order_pop(&send_queue->waiting);
		part->job->agent->hooks->part.turn(part);
	}
	send_queue->pumping = false;
	agent_send_queue_put(send_queue);
}
