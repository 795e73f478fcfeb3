/*
 * A fair queue: what waits for one resource (a connection, the summation threads, the control thread), of many flows. A flow
 * is a job. Within a flow there is order by priority (order.h); between flows there are turns, by cost: bytes, or time.
 * Nobody's priority is compared with another flow's.
 *
 * It is start-time fair queueing, of flows. Each flow has a turn, the virtual time at which its next item begins; the flow with
 * the earliest goes, and its turn moves on by the item's cost. Virtual time is the turn of the item that went last. A flow
 * that was idle begins now, or at its turn where that is later. It follows that
 *
 *	- the queue is work-conserving: while an item waits, there is a first one;
 *	- of two flows that always have items, neither is ahead by more than its largest item and the other's;
 *	- the first item of a flow that was idle waits for one item of each other flow, the largest that it has;
 *	- to have been idle earns nothing, and costs nothing: a flow is one item of its own behind at most, and only until
 *	  virtual time has passed that, or fair_rest().
 *
 * So who needs less than its share is served at once. A flow with a weight would move on by cost / weight: that is move_on()
 * in fair.c.
 *
 * Owns the flows and the memory in which items stand, not the items. Flows are made as they come, and used again for others once
 * they are idle and virtual time has passed them; so they are about as many as jobs have waited at once. Cost: O(log flows), and
 * what order.h says within a flow; a flow that has the queue for itself costs a comparison more than its order. Memory is
 * asked for only when flows or items are more than ever before. One thread at a time. Zeroed memory is an empty queue.
 */
#pragma once

#include "base/list.h"
#include "base/map.h"
#include "base/order/order.h"

struct fair_flow {
	uint64_t id;
	uint64_t turn;	/* virtual time when its next item begins */
	uint64_t stamp; /* of equal turns the smaller goes first */
	size_t at;	/* in the heap, while it has items */
	struct order order;
	struct map_entry entry;
	struct list idle; /* while it has none */
};

struct fair {
	size_t n;     /* items */
	uint64_t now; /* virtual time */
	uint64_t end; /* the latest turn there has been */
	uint64_t n_stamps;
	struct fair_flow **heap; /* flows with items, the one whose turn it is on top */
	size_t n_heap, heap_capacity;
	struct fair_flow *last;	  /* that was looked for last, or NULL */
	struct fair_flow *served; /* of which something was taken last, or NULL */
	struct map flows;	  /* by id */
	struct list idle; /* since when: the longest first. Zero: there has been no flow yet */
};

/* Adds an item to a flow. Returns 0 or -ENOMEM. */
int fair_push(struct fair *fair, uint64_t flow, const struct order_item *item);
/* The item whose turn it is; NULL when empty. Until something is added or taken. */
const struct order_item *fair_first(const struct fair *fair);
/* Takes that. Not empty. Returns what it leads to. */
void *fair_pop(struct fair *fair);
/* The next of the flow that was served last, whose turn it need not be; NULL: it has none. For what goes together as one. */
const struct order_item *fair_next(const struct fair *fair);
/* Takes that. There is one. Returns what it leads to. */
void *fair_pop_next(struct fair *fair);
/*
 * As if it had not been taken. What was taken last comes back first, and nothing was added since: then this needs no memory,
 * and does not fail.
 */
void fair_return(struct fair *fair, uint64_t flow, const struct order_item *item);
/* Takes an item back, which is looked for among those of its flow. Returns whether it was there. */
bool fair_remove(struct fair *fair, uint64_t flow, const void *item);
/* What was taken of a flow has cost so much more, where that is known only afterwards. */
void fair_charge(struct fair *fair, uint64_t flow, uint64_t cost);
/* Nothing waits, and nothing that was taken is under way: who comes next owes nobody anything. */
void fair_rest(struct fair *fair);
void fair_done(struct fair *fair);
