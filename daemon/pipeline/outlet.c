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
static void take_turn(struct pipeline_part *part)
{
	struct pipeline_job *job = part->job;

	part->turn = MAX(job->turn, job->pipeline->turn);
	job->turn = part->turn + part->unsent;
}

static bool is_before(const struct pipeline_part *a, const struct pipeline_part *b)
{
	if (a->round->level != b->round->level)
		return a->round->level > b->round->level;
	if (a->turn != b->turn)
		return a->turn < b->turn;
	if (a->round != b->round)
		return a->round->sequence < b->round->sequence;
	if (a->extent.block != b->extent.block)
		return a->extent.block < b->extent.block;
	return a->extent.part < b->extent.part;
}

static void place(struct pipeline_outlet *outlet, struct pipeline_part *part, size_t index)
{
	outlet->heap[index] = part;
	part->heap_index = index;
}

/* Puts a part at index, or above or below it, where it belongs. */
static void sift(struct pipeline_outlet *outlet, struct pipeline_part *part, size_t index)
{
	for (; index && is_before(part, outlet->heap[(index - 1) / 2]); index = (index - 1) / 2)
		place(outlet, outlet->heap[(index - 1) / 2], index);
	for (;;) {
		size_t child = 2 * index + 1;

		if (child + 1 < outlet->n_heap &&
		    is_before(outlet->heap[child + 1], outlet->heap[child]))
			child++;
		if (child >= outlet->n_heap || !is_before(outlet->heap[child], part))
			break;
		place(outlet, outlet->heap[child], index);
		index = child;
	}
	place(outlet, part, index);
}

int pipeline_outlet_push(struct pipeline_outlet *outlet, struct pipeline_part *part)
{
	if (outlet->n_heap == outlet->heap_capacity) {
		size_t capacity = outlet->heap_capacity ? 2 * outlet->heap_capacity : 64;
		struct pipeline_part **heap = reallocarray(outlet->heap, capacity, sizeof(*heap));

		if (!heap)
			return error_origin(-ENOMEM);
		outlet->heap = heap;
		outlet->heap_capacity = capacity;
	}
	take_turn(part);
	outlet->n_heap++;
	sift(outlet, part, outlet->n_heap - 1);
	return 0;
}

void pipeline_outlet_remove(struct pipeline_outlet *outlet, struct pipeline_part *part)
{
	struct pipeline_part *last = outlet->heap[--outlet->n_heap];

	if (last != part)
		sift(outlet, last, part->heap_index);
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
	       outlet->ahead < pipeline_deal_ahead(outlet->heap[0]->job)) {
		struct pipeline_part *part = outlet->heap[0];

		/* What goes to our own server costs no job its turn. */
		if (part->unsent)
			outlet->pipeline->turn = MAX(outlet->pipeline->turn, part->turn);
		pipeline_outlet_remove(outlet, part);
		pipeline_part_begin(part);
	}
	outlet->pumping = false;
	pipeline_outlet_put(outlet);
}
