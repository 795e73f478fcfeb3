/*
 * The queue of messages of a lane: most urgent first, equal ones in order of their sequence.
 * Most come in the order in which they leave, or in the reverse: those stand in a line, the
 * others in a heap. lane.c puts messages in, send.c and rdma_send.c take them out. Worker's
 * thread.
 */
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

static struct queue_entry *line_at(const struct queue *queue, size_t i)
{
	return &queue->line[(queue->first + i) & (queue->line_capacity - 1)];
}

static int line_grow(struct queue *queue)
{
	size_t capacity = queue->line_capacity ? 2 * queue->line_capacity : 16;
	struct queue_entry *line = reallocarray(NULL, capacity, sizeof(*line));

	if (!line)
		return error_origin(-ENOMEM);
	for (size_t i = 0; i < queue->n_line; i++)
		line[i] = *line_at(queue, i);
	free(queue->line);
	queue->line = line;
	queue->line_capacity = capacity;
	queue->first = 0;
	return 0;
}

static int line_reserve(struct queue *queue)
{
	return queue->n_line < queue->line_capacity ? 0 : line_grow(queue);
}

static int heap_reserve(struct queue *queue)
{
	size_t capacity = queue->capacity ? 2 * queue->capacity : 16;
	struct queue_entry *heap;

	if (queue->n_heap < queue->capacity)
		return 0;
	heap = reallocarray(queue->heap, capacity, sizeof(*heap));
	if (!heap)
		return error_origin(-ENOMEM);
	queue->heap = heap;
	queue->capacity = capacity;
	return 0;
}

static int heap_push(struct queue *queue, struct queue_entry entry)
{
	size_t i;
	int r;

	r = heap_reserve(queue);
	if (r)
		return error_trace(r);
	for (i = queue->n_heap++; i > 0 && entry_before(&entry, &queue->heap[(i - 1) / 2]);
	     i = (i - 1) / 2)
		queue->heap[i] = queue->heap[(i - 1) / 2];
	queue->heap[i] = entry;
	return 0;
}

static void heap_pop(struct queue *queue)
{
	struct queue_entry *heap = queue->heap, last = heap[--queue->n_heap];
	size_t i = 0;

	for (;;) {
		size_t child = 2 * i + 1;

		if (child + 1 < queue->n_heap && entry_before(&heap[child + 1], &heap[child]))
			child++;
		if (child >= queue->n_heap || !entry_before(&heap[child], &last))
			break;
		heap[i] = heap[child];
		i = child;
	}
	heap[i] = last;
}

/* Behind the last of the line, or in front of its first; what belongs in its midst is the heap's. */
int queue_push(struct queue *queue, struct message *message)
{
	struct queue_entry entry = { rank_of(message), message->sequence, message,
				     message->header };
	bool is_last = !queue->n_line || !entry_before(&entry, line_at(queue, queue->n_line - 1));
	int r;

	if (is_last) {
		r = line_reserve(queue);
		if (r)
			return error_trace(r);
		*line_at(queue, queue->n_line++) = entry;
	} else if (entry_before(&entry, line_at(queue, 0)) && !line_reserve(queue)) {
		queue->first--;
		queue->n_line++;
		*line_at(queue, 0) = entry;
	} else {
		r = heap_push(queue, entry);
		if (r)
			return error_trace(r);
	}
	queue->n++;
	return 0;
}

/* Whether the first of all is the heap's. Not empty. */
static bool heap_is_first(const struct queue *queue)
{
	return queue->n_heap &&
	       (!queue->n_line || entry_before(&queue->heap[0], line_at(queue, 0)));
}

struct message *queue_first(const struct queue *queue)
{
	if (!queue->n)
		return NULL;
	return heap_is_first(queue) ? queue->heap[0].message : line_at(queue, 0)->message;
}

struct message *queue_pop(struct queue *queue)
{
	struct message *message = queue_first(queue);

	if (!message)
		return NULL;
	if (heap_is_first(queue)) {
		heap_pop(queue);
	} else {
		queue->first++;
		queue->n_line--;
	}
	queue->n--;
	return message;
}

static _fetches_ void fetch_entry(const struct queue_entry *entry)
{
	fetch_to_write(entry->message, sizeof(*entry->message));
	fetch_to_write(entry->header, sizeof(*entry->header));
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

void queue_fetch(const struct queue *queue)
{
	if (queue->n_line > FETCH_AHEAD)
		fetch_entry(line_at(queue, FETCH_AHEAD));
	if (queue->n_line > FETCH_AHEAD / 2)
		fetch_behind(line_at(queue, FETCH_AHEAD / 2)->message);
	/* Of the heap one of these comes next. */
	for (size_t i = 0; i < MIN(queue->n_heap, (size_t)3); i++)
		fetch_entry(&queue->heap[i]);
}

void queue_done(struct queue *queue)
{
	assert(!queue->n);
	free(queue->heap);
	free(queue->line);
	*queue = (struct queue){ 0 };
}
