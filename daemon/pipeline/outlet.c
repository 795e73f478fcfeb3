/*
 * The send queue towards one server of a job: parts that wait for their turn, and how many bytes
 * of those that went are still unsent. attach.c makes one when it connects a server, part.c and
 * push.c put parts in and account for them.
 */
#include "pipeline/part.h"

int pipeline_outlet_get(struct pipeline *pipeline, struct peer *peer,
			struct pipeline_outlet **ret_outlet)
{
	struct pipeline_outlet *outlet;

	list_for_each (outlet, &pipeline->outlets, link) {
		if (outlet->peer == peer && !outlet->lost) {
			outlet->refs++;
			*ret_outlet = outlet;
			return 0;
		}
	}
	outlet = calloc(1, sizeof(*outlet));
	if (!outlet)
		return error_origin(-ENOMEM);
	outlet->pipeline = pipeline;
	outlet->peer = peer;
	outlet->refs = 1;
	list_push_back(&pipeline->outlets, &outlet->link);
	*ret_outlet = outlet;
	return 0;
}

void pipeline_outlet_put(struct pipeline_outlet *outlet)
{
	if (!outlet || --outlet->refs)
		return;
	list_remove(&outlet->link);
	free(outlet->heap);
	free(outlet);
}

/* -- The heap: the most urgent part on top ------------------------------------------------------------------------ */

/*
 * Of what is equally urgent each job has its turn by the bytes that it has sent: one that posts more, or earlier, waits for
 * itself. A part's turn is the end of that of its job's part before it, or now, where the job had nothing to send; now is the
 * turn of the part that went last. (That is start-time fair queueing.) Parts of a job come here in the order in which they
 * should leave.
 */
static uint64_t take_turn(const struct pipeline_part *part)
{
	struct pipeline_job *job = part->job;
	uint64_t turn = MAX(job->turn, job->pipeline->turn);

	job->turn = turn + part->unsent;
	return turn;
}

/* What has the same turn: parts that go to our own server, or bring it nothing. */
static bool part_is_before(const struct pipeline_part *a, const struct pipeline_part *b)
{
	if (a->round != b->round)
		return a->round->sequence < b->round->sequence;
	if (a->extent.block != b->extent.block)
		return a->extent.block < b->extent.block;
	return a->extent.part < b->extent.part;
}

static bool is_before(const struct pipeline_waiting *a, const struct pipeline_waiting *b)
{
	if (a->level != b->level)
		return a->level > b->level;
	if (a->turn != b->turn)
		return a->turn < b->turn;
	return part_is_before(a->part, b->part);
}

/* Puts a part at index, or above or below it, where it belongs. */
static void sift(struct pipeline_outlet *outlet, struct pipeline_part *part, uint64_t turn,
		 int32_t level, size_t index)
{
	const struct pipeline_waiting waiting = { part, turn, level };
	struct pipeline_waiting *heap = outlet->heap;

	for (; index && is_before(&waiting, &heap[(index - 1) / 2]); index = (index - 1) / 2)
		heap[index] = heap[(index - 1) / 2];
	for (;;) {
		size_t child = 2 * index + 1;

		if (child + 1 < outlet->n_heap && is_before(&heap[child + 1], &heap[child]))
			child++;
		if (child >= outlet->n_heap || !is_before(&heap[child], &waiting))
			break;
		heap[index] = heap[child];
		index = child;
	}
	heap[index] = waiting;
}

int pipeline_outlet_push(struct pipeline_outlet *outlet, struct pipeline_part *part)
{
	if (outlet->n_heap == outlet->heap_capacity) {
		size_t capacity = outlet->heap_capacity ? 2 * outlet->heap_capacity : 64;
		struct pipeline_waiting *heap = reallocarray(outlet->heap, capacity, sizeof(*heap));

		if (!heap)
			return error_origin(-ENOMEM);
		outlet->heap = heap;
		outlet->heap_capacity = capacity;
	}
	outlet->n_heap++;
	sift(outlet, part, take_turn(part), part->round->level, outlet->n_heap - 1);
	return 0;
}

static void remove_at(struct pipeline_outlet *outlet, size_t index)
{
	const struct pipeline_waiting *last = &outlet->heap[--outlet->n_heap];

	if (index < outlet->n_heap)
		sift(outlet, last->part, last->turn, last->level, index);
}

/* Of a round that has failed: then they are looked for. */
void pipeline_outlet_remove(struct pipeline_outlet *outlet, const struct pipeline_part *part)
{
	for (size_t i = 0; i < outlet->n_heap; i++) {
		if (outlet->heap[i].part == part) {
			remove_at(outlet, i);
			return;
		}
	}
}

/* -- What is under way -------------------------------------------------------------------------------------------- */

void pipeline_outlet_charge(struct pipeline_outlet *outlet, struct pipeline_part *part,
			    uint64_t len)
{
	/*
	 * Our own server takes nothing over a wire and keeps the bytes until the other nodes have sent theirs: there is no
	 * moment of "sent", and to wait for one would be to wait for other ranks' order of tensors.
	 */
	if (peer_is_self(outlet->peer))
		return;
	part->charged = len;
	outlet->ahead += len;
}

void pipeline_outlet_sent(struct pipeline_outlet *outlet, struct pipeline_part *part)
{
	outlet->ahead -= part->charged;
	part->charged = 0;
}

void pipeline_outlet_pump(struct pipeline_outlet *outlet)
{
	if (outlet->pumping)
		return;
	outlet->pumping = true;
	outlet->refs++;
	while (!outlet->lost && outlet->n_heap &&
	       outlet->ahead < pipeline_deal_ahead(outlet->heap[0].part->job)) {
		struct pipeline_part *part = outlet->heap[0].part;

		/* What goes to our own server costs no job its turn. */
		if (part->unsent)
			outlet->pipeline->turn = MAX(outlet->pipeline->turn, outlet->heap[0].turn);
		remove_at(outlet, 0);
		pipeline_part_begin(part);
	}
	outlet->pumping = false;
	pipeline_outlet_put(outlet);
}
