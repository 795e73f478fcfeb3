/*
 * Items by priority: those that come in order stand in a line, others in a heap. fair.c has one
 * such order for each flow, the agent one for each of its send queues.
 */
#include "base/order/order.h"

#include "base/error.h"

/* The line */

static _cold_ int line_grow(struct order *order)
{
	size_t capacity = order->line_capacity ? 2 * order->line_capacity : 16;
	struct order_item *line = reallocarray(NULL, capacity, sizeof(*line));

	if (!line)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < order->n_line; i++)
		line[i] = *order_in_line(order, i);
	free(order->line);
	order->line = line;
	order->line_capacity = capacity;
	order->first = 0;
	return 0;
}

static int line_reserve(struct order *order)
{
	return order->n_line < order->line_capacity ? 0 : line_grow(order);
}

/* The heap */

static int heap_reserve(struct order *order)
{
	size_t capacity = order->heap_capacity ? 2 * order->heap_capacity : 16;
	struct order_item *heap;

	if (order->n_heap < order->heap_capacity)
		return 0;
	heap = reallocarray(order->heap, capacity, sizeof(*heap));
	if (!heap)
		return error_origin(-ENOMEM);
	order->heap = heap;
	order->heap_capacity = capacity;
	return 0;
}

/* Puts an item at i, or above or below it, where it belongs. */
static void heap_sift(struct order *order, struct order_item item, size_t i)
{
	struct order_item *heap = order->heap;

	for (; i > 0 && order_is_before(&item, &heap[(i - 1) / 2]); i = (i - 1) / 2)
		heap[i] = heap[(i - 1) / 2];
	for (;;) {
		size_t child = 2 * i + 1;

		if (child + 1 < order->n_heap && order_is_before(&heap[child + 1], &heap[child]))
			child++;
		if (child >= order->n_heap || !order_is_before(&heap[child], &item))
			break;
		heap[i] = heap[child];
		i = child;
	}
	heap[i] = item;
}

static void heap_remove_at(struct order *order, size_t i)
{
	struct order_item last = order->heap[--order->n_heap];

	if (i < order->n_heap)
		heap_sift(order, last, i);
}

/* Both */

/*
 * Behind the last of the line, or in front of its first; what belongs in its midst is the heap's.
 */
int order_insert(struct order *order, const struct order_item *item)
{
	int r;

	if (!order->n_line || !order_is_before(item, order_in_line(order, order->n_line - 1))) {
		r = line_reserve(order);
		if (r)
			return error_trace(r);
		*order_in_line(order, order->n_line++) = *item;
	} else if (order_is_before(item, order_in_line(order, 0)) && !line_reserve(order)) {
		order->first--;
		order->n_line++;
		*order_in_line(order, 0) = *item;
	} else {
		r = heap_reserve(order);
		if (r)
			return error_trace(r);
		heap_sift(order, *item, order->n_heap++);
	}
	order->n++;
	return 0;
}

struct order_item order_take(struct order *order)
{
	const struct order_item *first = order_first(order), item = *first;

	if (first == order->heap) {
		heap_remove_at(order, 0);
	} else {
		order->first++;
		order->n_line--;
	}
	order->n--;
	return item;
}

bool order_remove(struct order *order, const void *item)
{
	size_t i;

	for (i = 0; i < order->n_line && order_in_line(order, i)->item != item; i++)
		;
	if (i < order->n_line) {
		for (order->n_line--; i < order->n_line; i++)
			*order_in_line(order, i) = *order_in_line(order, i + 1);
		order->n--;
		return true;
	}
	for (i = 0; i < order->n_heap && order->heap[i].item != item; i++)
		;
	if (i == order->n_heap)
		return false;
	heap_remove_at(order, i);
	order->n--;
	return true;
}

void order_done(struct order *order)
{
	free(order->heap);
	free(order->line);
	*order = (struct order){ 0 };
}
