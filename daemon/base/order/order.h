/*
 * Items in order: the larger priority first, and of equal ones who has the smaller sequence. Owns the memory in which they stand, not
 * what they lead to. O(1) for those that come in the order in which they leave, or in the reverse: they stand in line; else
 * O(log n). Memory is asked for only when there are more than ever before. One thread at a time. Zeroed memory is empty.
 */
#pragma once

#include "proto/c.h"

struct order_item {
	uint64_t sequence;
	void *item;
	const void *also; /* the user's: to be fetched without a look at the item */
	int32_t priority;
	uint32_t cost; /* the user's, or fair.h's */
};

/*
 * What is counted for each item stands apart: two counts side by side are read as one, and a processor that has just written one of them
 * would wait until that is in the cache.
 */
struct order {
	size_t n;		 /* in all */
	struct order_item *line; /* a ring */
	size_t first;
	size_t line_capacity; /* 0 or a power of two */
	size_t n_line;
	struct order_item *heap;
	size_t n_heap, heap_capacity;
};

/* Looks for it. Returns whether it was there. */
bool order_remove(struct order *order, const void *item);
void order_done(struct order *order);

/* The i-th of those that stand in line, which are n_line. */
static inline struct order_item *order_in_line(const struct order *order, size_t i)
{
	return &order->line[(order->first + i) & (order->line_capacity - 1)];
}

static inline bool order_is_before(const struct order_item *a, const struct order_item *b)
{
	return a->priority > b->priority ||
	       (a->priority == b->priority && a->sequence < b->sequence);
}

/* What order_push() and order_pop() do where an item does not come, or leave, in line. */
int order_insert(struct order *order, const struct order_item *item);
struct order_item order_take(struct order *order);

/*
 * Returns 0 or -ENOMEM. Those that were popped last and are pushed back, the last first, need no memory. Inline, and by members: so
 * an item goes from registers into the line. Written by members and then read as a whole, it would make the processor wait until all
 * that was written before is in the cache.
 */
static inline int order_push(struct order *order, const struct order_item *item)
{
	struct order_item *at;

	if (order->n_line == order->line_capacity ||
	    (order->n_line && order_is_before(item, order_in_line(order, order->n_line - 1))))
		return order_insert(order, item);
	at = order_in_line(order, order->n_line++);
	at->sequence = item->sequence;
	at->item = item->item;
	at->also = item->also;
	at->priority = item->priority;
	at->cost = item->cost;
	order->n++;
	return 0;
}

/* NULL when empty. Until something is pushed or popped. */
static inline const struct order_item *order_first(const struct order *order)
{
	if (!order->n_line)
		return order->n_heap ? &order->heap[0] : NULL;
	return order->n_heap && order_is_before(&order->heap[0], order_in_line(order, 0))
		       ? &order->heap[0]
		       : order_in_line(order, 0);
}

/* Not empty. */
static inline struct order_item order_pop(struct order *order)
{
	if (order->n_heap)
		return order_take(order);
	order->n--;
	order->n_line--;
	return order->line[order->first++ & (order->line_capacity - 1)];
}
