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

struct order {
	size_t n;		 /* in all */
	struct order_item *line; /* a ring */
	size_t first, n_line;
	size_t line_capacity; /* 0 or a power of two */
	struct order_item *heap;
	size_t n_heap, heap_capacity;
};

/* Returns 0 or -ENOMEM. Those that were popped last and are pushed back, the last first, need no memory. */
int order_push(struct order *order, const struct order_item *item);
/* NULL when empty. Until something is pushed or popped. */
const struct order_item *order_first(const struct order *order);
/* Not empty. */
struct order_item order_pop(struct order *order);
/* Looks for it. Returns whether it was there. */
bool order_remove(struct order *order, const void *item);
void order_done(struct order *order);

/* The i-th of those that stand in line, which are n_line. */
static inline struct order_item *order_in_line(const struct order *order, size_t i)
{
	return &order->line[(order->first + i) & (order->line_capacity - 1)];
}
