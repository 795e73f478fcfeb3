/*
 * Start-time fair queueing: a heap of flows by turn, and in each flow an order of its items. The
 * pool, the trainers' rings together and each connection have such a queue, with jobs as flows.
 */
#include "base/order/fair.h"

#include "base/error.h"

/* The heap of flows, the one whose turn it is on top */

static bool is_before(const struct fair_flow *a, const struct fair_flow *b)
{
	return a->turn < b->turn || (a->turn == b->turn && a->stamp < b->stamp);
}

static void heap_put(struct fair *fair, struct fair_flow *flow, size_t at)
{
	fair->heap[at] = flow;
	flow->at = at;
}

/* There are others. */
static void heap_move(struct fair *fair, struct fair_flow *flow)
{
	struct fair_flow **heap = fair->heap;
	size_t at = flow->at;

	for (; at > 0 && is_before(flow, heap[(at - 1) / 2]); at = (at - 1) / 2)
		heap_put(fair, heap[(at - 1) / 2], at);
	for (;;) {
		size_t child = 2 * at + 1;

		if (child + 1 < fair->n_heap && is_before(heap[child + 1], heap[child]))
			child++;
		if (child >= fair->n_heap || !is_before(heap[child], flow))
			break;
		heap_put(fair, heap[child], at);
		at = child;
	}
	heap_put(fair, flow, at);
}

/* Goes to where it belongs, from where it is. */
static void heap_sift(struct fair *fair, struct fair_flow *flow)
{
	if (fair->n_heap > 1)
		heap_move(fair, flow);
}

static void heap_remove(struct fair *fair, const struct fair_flow *flow)
{
	struct fair_flow *last = fair->heap[--fair->n_heap];

	if (last == flow)
		return;
	heap_put(fair, last, flow->at);
	heap_sift(fair, last);
}

static int heap_reserve(struct fair *fair)
{
	size_t capacity = fair->heap_capacity ? 2 * fair->heap_capacity : 4;
	struct fair_flow **heap;

	if (fair->n_heap < fair->heap_capacity)
		return 0;
	heap = reallocarray(fair->heap, capacity, sizeof(struct fair_flow *));
	if (!heap)
		return error_origin(-ENOMEM);
	fair->heap = heap;
	fair->heap_capacity = capacity;
	return 0;
}

/* Flows */

static struct fair_flow *find(struct fair *fair, uint64_t id)
{
	struct map_entry *entry;

	if (fair->last && fair->last->id == id)
		return fair->last;
	if (fair->served && fair->served->id == id)
		return fair->served;
	entry = map_find(&fair->flows, id);
	return entry ? container_of(entry, struct fair_flow, entry) : NULL;
}

/* One that is idle, and of which there is nothing to be remembered; or NULL. */
static struct fair_flow *take_idle(struct fair *fair)
{
	struct fair_flow *flow = list_first(&fair->idle, struct fair_flow, idle);

	if (!flow || flow->turn > fair->now)
		return NULL;
	map_remove(&fair->flows, &flow->entry);
	if (fair->last == flow)
		fair->last = NULL;
	if (fair->served == flow)
		fair->served = NULL;
	return flow;
}

/* It is idle, and nothing leads to it. */
static void forget(struct fair_flow *flow)
{
	list_remove(&flow->idle);
	order_done(&flow->order);
	free(flow);
}

static _cold_ int make(struct fair *fair, uint64_t id, struct fair_flow **ret_flow)
{
	struct fair_flow *flow;

	if (!fair->idle.next)
		list_init(&fair->idle);
	flow = take_idle(fair) ?: calloc(1, sizeof(*flow));
	if (!flow)
		return error_origin(-ENOMEM);
	if (!flow->idle.next)
		list_push_back(&fair->idle, &flow->idle);
	flow->id = id;
	flow->turn = 0;
	if (map_add(&fair->flows, id, &flow->entry)) {
		forget(flow);
		return error_origin(-ENOMEM);
	}
	*ret_flow = flow;
	return 0;
}

/*
 * Of flows whose turn is the same, one that was idle goes first, and then the one that has waited
 * longest.
 */
#define SERVED (UINT64_C(1) << 63)

static void move_on(struct fair *fair, struct fair_flow *flow, uint64_t cost)
{
	flow->turn += cost;
	flow->stamp = (cost ? SERVED : 0) | ++fair->n_stamps;
	fair->end = MAX(fair->end, flow->turn);
}

/* It has an item, and had none. There is room. */
static void begin(struct fair *fair, struct fair_flow *flow)
{
	list_remove(&flow->idle);
	heap_put(fair, flow, fair->n_heap++);
	heap_sift(fair, flow);
}

/* Items */

int fair_push(struct fair *fair, uint64_t id, const struct order_item *item)
{
	struct fair_flow *flow = find(fair, id);
	int r;

	if (!flow) {
		r = make(fair, id, &flow);
		if (r)
			return error_trace(r);
	}
	fair->last = flow;
	r = flow->order.n ? 0 : heap_reserve(fair);
	if (!r)
		r = order_push(&flow->order, item);
	if (r)
		return error_trace(r);
	fair->n++;
	if (flow->order.n > 1)
		return 0;
	flow->turn = MAX(flow->turn, fair->now);
	move_on(fair, flow, 0);
	begin(fair, flow);
	return 0;
}

const struct order_item *fair_first(const struct fair *fair)
{
	return fair->n ? order_first(&fair->heap[0]->order) : NULL;
}

/* It has an item less, or its turn has changed. */
static void go_on(struct fair *fair, struct fair_flow *flow)
{
	if (flow->order.n) {
		heap_sift(fair, flow);
	} else {
		heap_remove(fair, flow);
		list_push_back(&fair->idle, &flow->idle);
	}
}

static void *pop(struct fair *fair, struct fair_flow *flow)
{
	struct order_item item = order_pop(&flow->order);

	fair->served = flow;
	fair->n--;
	move_on(fair, flow, item.cost);
	go_on(fair, flow);
	return item.item;
}

void *fair_pop(struct fair *fair)
{
	struct fair_flow *flow = fair->heap[0];

	fair->now = MAX(fair->now, flow->turn);
	return pop(fair, flow);
}

const struct order_item *fair_next(const struct fair *fair)
{
	return fair->served ? order_first(&fair->served->order) : NULL;
}

void *fair_pop_next(struct fair *fair)
{
	return pop(fair, fair->served);
}

void fair_return(struct fair *fair, uint64_t id, const struct order_item *item)
{
	struct fair_flow *flow = find(fair, id);

	assert(flow);
	(void)order_push(&flow->order, item);
	fair->n++;
	flow->turn -= item->cost;
	fair->now = MIN(fair->now, flow->turn);
	if (flow->order.n > 1)
		heap_sift(fair, flow);
	else
		begin(fair, flow);
}

bool fair_remove(struct fair *fair, uint64_t id, const void *item)
{
	struct fair_flow *flow = find(fair, id);

	if (!flow || !order_remove(&flow->order, item))
		return false;
	fair->n--;
	go_on(fair, flow);
	return true;
}

void fair_charge(struct fair *fair, uint64_t id, uint64_t cost)
{
	struct fair_flow *flow = find(fair, id);

	/* Gone: others have come since, of whom nobody waits for what it has had. */
	if (!flow)
		return;
	move_on(fair, flow, cost);
	if (flow->order.n)
		heap_sift(fair, flow);
}

void fair_rest(struct fair *fair)
{
	fair->now = fair->end;
}

void fair_done(struct fair *fair)
{
	struct map_entry *entry;

	assert(!fair->n);
	while ((entry = map_first(&fair->flows))) {
		map_remove(&fair->flows, entry);
		forget(container_of(entry, struct fair_flow, entry));
	}
	map_done(&fair->flows);
	free(fair->heap);
	*fair = (struct fair){ 0 };
}
