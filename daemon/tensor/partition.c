/*
 * Cuts an operation into parts, block by block. The agent's round.c takes one part after the
 * other, as there is room for it.
 */
#include "tensor/tensor.h"

static uint64_t count_of(const struct partition *p, uint32_t rank)
{
	return p->counts ? p->counts[rank] : p->elements;
}

/*
 * push_pull, broadcast, barrier: one block, from the start of the input to the start of the output.
 */
static bool open_whole(struct partition *p)
{
	if (p->source)
		return false;
	p->next = (struct extent){
		.source = p->operation == OPERATION_BROADCAST ? p->root : RANK_ALL,
		.target = RANK_ALL,
		.total = p->operation == OPERATION_BARRIER ? 0 : p->elements * p->element_size,
	};
	p->source = 1;
	return true;
}

static bool open_gathered(struct partition *p)
{
	if (p->source >= p->layout->size)
		return false;
	p->next = (struct extent){
		.block = p->source,
		.source = p->source,
		.target = RANK_ALL,
		.total = count_of(p, p->source) * p->element_size,
		.output_at = p->output_at,
	};
	p->output_at += p->next.total;
	p->source++;
	return true;
}

static bool open_scattered(struct partition *p)
{
	if (p->target >= p->layout->size)
		return false;
	p->next = (struct extent){
		.block = p->target,
		.source = RANK_ALL,
		.target = p->target,
		.total = count_of(p, p->target) * p->element_size,
		.input_at = p->input_at,
	};
	p->input_at += p->next.total;
	p->target++;
	return true;
}

/* Moves source and target to the next pair of which one is on this node. */
static bool find_exchange(struct partition *p)
{
	const struct layout *layout = p->layout;

	for (; p->source < layout->size; p->source++, p->target = 0) {
		if (p->target == 0)
			p->input_at = 0;
		if (layout->local_of_rank[p->source] != RANK_AWAY && p->target < layout->size)
			return true;
		for (; p->target < layout->size; p->target++)
			if (layout->local_of_rank[p->target] != RANK_AWAY)
				return true;
	}
	return false;
}

static bool open_exchange(struct partition *p)
{
	const struct layout *layout = p->layout;
	struct partition_rank *sender, *receiver;
	uint32_t source, target;
	uint64_t elements;

	if (!find_exchange(p))
		return false;
	source = layout->local_of_rank[p->source];
	target = layout->local_of_rank[p->target];
	sender = source == RANK_AWAY ? NULL : &p->ranks[source];
	receiver = target == RANK_AWAY ? NULL : &p->ranks[target];
	if (sender)
		elements = sender->counts ? sender->counts[p->target] : p->elements;
	else
		elements =
			receiver->counts ? receiver->counts[layout->size + p->source] : p->elements;

	p->next = (struct extent){
		.block = p->source * layout->size + p->target,
		.source = p->source,
		.target = p->target,
		.total = elements * p->element_size,
		.input_at = sender ? p->input_at : 0,
		.output_at = receiver ? receiver->received : 0,
	};
	if (sender)
		p->input_at += p->next.total;
	if (receiver)
		receiver->received += p->next.total;
	p->target++;
	return true;
}

static bool open_block(struct partition *p)
{
	switch (p->operation) {
	case OPERATION_ALL_GATHER:
		return open_gathered(p);
	case OPERATION_REDUCE_SCATTER:
		return open_scattered(p);
	case OPERATION_ALL_TO_ALL:
		return open_exchange(p);
	default:
		return open_whole(p);
	}
}

bool partition_next(struct partition *p, struct extent *ret_extent)
{
	struct extent *next = &p->next;

	if (!p->in_block) {
		if (!open_block(p))
			return false;
		p->in_block = true;
	}
	next->len = (uint32_t)MIN(next->total - next->offset, (uint64_t)p->part_bytes);
	*ret_extent = *next;

	next->part++;
	next->offset += next->len;
	next->input_at += next->len;
	next->output_at += next->len;
	p->in_block = next->offset < next->total;
	return true;
}
