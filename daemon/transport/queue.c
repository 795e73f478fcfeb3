#include "transport/internal.h"

/* Urgent ones first, then the larger priority. */
static uint64_t rank_of(const struct message *message)
{
	return (uint64_t)message->urgent << 32 |
	       (uint32_t)((int64_t)message->priority - (int64_t)INT32_MIN);
}

static bool entry_before(const struct queue_entry *a, const struct queue_entry *b)
{
	return a->rank > b->rank || (a->rank == b->rank && a->sequence < b->sequence);
}

static int queue_reserve(struct queue *queue)
{
	size_t capacity = queue->capacity ? 2 * queue->capacity : 16;
	struct queue_entry *heap;

	if (queue->n < queue->capacity)
		return 0;
	heap = reallocarray(queue->heap, capacity, sizeof(*heap));
	if (!heap)
		return error_origin(-ENOMEM);
	queue->heap = heap;
	queue->capacity = capacity;
	return 0;
}

int queue_push(struct queue *queue, struct message *message)
{
	struct queue_entry entry = { rank_of(message), message->sequence, message };
	size_t i;
	int r;

	r = queue_reserve(queue);
	if (r)
		return error_trace(r);
	for (i = queue->n++; i > 0 && entry_before(&entry, &queue->heap[(i - 1) / 2]);
	     i = (i - 1) / 2)
		queue->heap[i] = queue->heap[(i - 1) / 2];
	queue->heap[i] = entry;
	return 0;
}

struct message *queue_first(const struct queue *queue)
{
	return queue->n ? queue->heap[0].message : NULL;
}

struct message *queue_pop(struct queue *queue)
{
	struct queue_entry *heap = queue->heap, last;
	struct message *top;
	size_t i = 0;

	if (!queue->n)
		return NULL;
	top = heap[0].message;
	last = heap[--queue->n];
	for (;;) {
		size_t child = 2 * i + 1;

		if (child + 1 < queue->n && entry_before(&heap[child + 1], &heap[child]))
			child++;
		if (child >= queue->n || !entry_before(&heap[child], &last))
			break;
		heap[i] = heap[child];
		i = child;
	}
	heap[i] = last;
	return top;
}

void queue_fetch(const struct queue *queue)
{
	const struct message *next;

	if (!queue->n)
		return;
	next = queue->heap[0].message;
	__builtin_prefetch(next->header);
	__builtin_prefetch((const char *)next->header + CACHE_LINE);
	__builtin_prefetch(next->payload);
	/* One of these is next then. */
	for (size_t i = 1; i < MIN(queue->n, (size_t)3); i++)
		fetch_to_write(queue->heap[i].message, sizeof(*next));
}

void queue_done(struct queue *queue)
{
	assert(!queue->n);
	free(queue->heap);
	*queue = (struct queue){ 0 };
}
