/*
 * The queue of messages of a lane: most urgent first, equal ones in order of their sequence.
 * Most come in the order in which they leave, or in the reverse: those stand in a line, the
 * others in a heap. lane.c puts messages in, send.c and rdma/send.c take them out. Worker's
 * thread.
 */
#include "transport/lane/queue.h"
#include "transport/lane/lane.h"

#define NO_JOB 0ull

static uint64_t flow_of(const struct message *message)
{
	const struct data_header *header = message->header;

	switch (header->op) {
	case DATA_PUSH:
	case DATA_PULL:
	case DATA_RESULT:
		return header->job;
	default:
		return NO_JOB;
	}
}

static struct order_item item_of(struct message *message)
{
	return (struct order_item){
		.sequence = message->sequence,
		.item = message,
		.also = message->header,
		.priority = message->urgent ? INT32_MAX : MIN(message->priority, INT32_MAX - 1),
		.cost = (uint32_t)sizeof(*message->header) + message->header->len,
	};
}

int queue_push(struct fair *queue, struct message *message)
{
	const struct order_item item = item_of(message);

	return error_trace(fair_push(queue, flow_of(message), &item));
}

void queue_return(struct fair *queue, struct message *message)
{
	const struct order_item item = item_of(message);

	fair_return(queue, flow_of(message), &item);
}

struct message *queue_first(const struct fair *queue)
{
	const struct order_item *item = fair_first(queue);

	return item ? item->item : NULL;
}

struct message *queue_next(const struct fair *queue)
{
	const struct order_item *item = fair_next(queue);

	return item ? item->item : NULL;
}

static _fetches_ void fetch_item(const struct order_item *item)
{
	fetch_to_write(item->item, sizeof(struct message));
	fetch_to_write(item->also, sizeof(struct data_header));
}

/* What a message leads to that was fetched before. */
static _fetches_ void fetch_behind(const struct message *message)
{
	const struct call *call = container_of(message, struct call, message);

	__builtin_prefetch(message->payload);
	if (message->kind == MESSAGE_CALL)
		__builtin_prefetch(&call->soon[0]);
}

#define FETCH_AHEAD 4 /* as many are made ready in the time that memory takes */

/* Fetches what will soon be taken, and what that leads to. */
static void fetch(const struct fair *queue)
{
	const struct order *order = queue->n ? &queue->heap[0]->order : NULL;

	if (!order)
		return;
	if (order->n_line > FETCH_AHEAD)
		fetch_item(order_in_line(order, FETCH_AHEAD));
	if (order->n_line > FETCH_AHEAD / 2)
		fetch_behind(order_in_line(order, FETCH_AHEAD / 2)->item);
	/* Of the heap one of these comes next. */
	for (size_t i = 0; i < MIN(order->n_heap, (size_t)3); i++)
		fetch_item(&order->heap[i]);
}

struct message *queue_pop(struct fair *queue)
{
	struct message *message;

	if (!queue->n)
		return NULL;
	message = fair_pop(queue);
	fetch(queue);
	return message;
}

struct message *queue_pop_next(struct fair *queue)
{
	struct message *message = fair_pop_next(queue);

	fetch(queue);
	return message;
}
