/*
 * Rows by number: a stable radix sort, the check of a sorted list, and the merge of several; each goes on
 * from where it was. rows_work.c of the agent and rows.c of the server call, in the pool.
 */
#include "reduce/reduce.h"

bool reduce_work_run(struct reduce_work *work, void *owner, const int *status)
{
	int64_t looks = (int64_t)ROWS_LOOKS - work->debt;

	while (!*status && *work->step && looks > 0)
		work->step += (*work->step)(owner, &looks);
	work->debt = MAX(-looks, 0);
	return work->debt || (!*status && *work->step);
}

void reduce_sort_start(struct reduce_sort *sort, struct reduce_entry *entries,
		       struct reduce_entry *scratch, size_t n, uint64_t n_rows)
{
	*sort = (struct reduce_sort){
		.entries = entries, .scratch = scratch, .n = n, .n_rows = n_rows
	};
}

#define DIGITS (1u << REDUCE_DIGIT_BITS)

/* How many have each digit, and then where those with it begin. */
static void count(struct reduce_sort *sort, size_t end)
{
	const struct reduce_entry *entries = sort->entries;
	unsigned shift = sort->shift;
	size_t start = 0, n_here;

	for (size_t i = sort->at; i < end; i++)
		sort->starts[(uint64_t)entries[i].row >> shift & (DIGITS - 1)]++;
	if (end < sort->n)
		return;
	for (size_t digit = 0; digit < DIGITS; digit++) {
		n_here = sort->starts[digit];
		sort->starts[digit] = start;
		start += n_here;
	}
}

static void move(struct reduce_sort *sort, size_t end)
{
	struct reduce_entry *from = sort->entries, *to = sort->scratch;
	unsigned shift = sort->shift;

	for (size_t i = sort->at; i < end; i++)
		to[sort->starts[(uint64_t)from[i].row >> shift & (DIGITS - 1)]++] = from[i];
	if (end < sort->n)
		return;
	sort->scratch = from;
	sort->entries = to;
	sort->shift += REDUCE_DIGIT_BITS;
	memset(sort->starts, 0, sizeof(sort->starts));
}

/* By the digits of the row, the least first: each pass keeps the order of what is equal in it. */
bool reduce_sort_step(struct reduce_sort *sort, int64_t *looks)
{
	while (sort->n && sort->shift < 63 && (sort->n_rows - 1) >> sort->shift) {
		size_t end = sort->at + MIN((size_t)MAX(*looks, 0), sort->n - sort->at);

		if (*looks <= 0)
			return false;
		if (sort->is_counted)
			move(sort, end);
		else
			count(sort, end);
		reduce_looked(looks, end - sort->at, 0);
		sort->is_counted ^= end == sort->n;
		sort->at = end < sort->n ? end : 0;
	}
	return true;
}

/* Finds the next row of its list. Returns false at the end. */
static bool find(struct reduce_cursor *cursor)
{
	const struct reduce_list *list = cursor->list;

	while (cursor->piece < list->n_pieces && cursor->at == list->pieces[cursor->piece].n) {
		cursor->piece++;
		cursor->at = 0;
	}
	if (cursor->piece == list->n_pieces)
		return false;
	cursor->row = list->pieces[cursor->piece].rows[cursor->at];
	return true;
}

int reduce_list_next(struct reduce_cursor *cursor, uint64_t n_rows)
{
	int64_t before = cursor->row;

	if (!find(cursor))
		return 0;
	cursor->at++;
	return cursor->row > before && (uint64_t)cursor->row < n_rows ? 1 : -EINVAL;
}

static bool is_before(const struct reduce_cursor *a, const struct reduce_cursor *b)
{
	return a->row != b->row ? a->row < b->row : a->list < b->list;
}

/* Moves what is at index down to where it belongs. */
static void sift(struct reduce_merge *merge, size_t index)
{
	struct reduce_cursor moved = merge->heap[index];

	for (;;) {
		size_t child = 2 * index + 1;

		if (child + 1 < merge->n && is_before(&merge->heap[child + 1], &merge->heap[child]))
			child++;
		if (child >= merge->n || !is_before(&merge->heap[child], &moved))
			break;
		merge->heap[index] = merge->heap[child];
		index = child;
	}
	merge->heap[index] = moved;
}

void reduce_merge_start(struct reduce_merge *merge, const struct reduce_list *lists, size_t n_lists,
			size_t row_len, struct reduce_cursor *heap)
{
	*merge = (struct reduce_merge){ .row_len = row_len, .heap = heap, .lists = lists };
	for (size_t i = 0; i < n_lists; i++) {
		heap[merge->n] = reduce_list_begin(&lists[i]);
		merge->n += find(&heap[merge->n]);
	}
	for (size_t i = merge->n / 2; i > 0; i--)
		sift(merge, i - 1);
}

size_t reduce_merge_next(struct reduce_merge *merge, int64_t *ret_row, const void **inputs)
{
	int64_t row = merge->n ? merge->heap[0].row : 0;
	size_t n_inputs = 0;

	while (merge->n && merge->heap[0].row == row) {
		struct reduce_cursor *top = &merge->heap[0];
		const struct reduce_piece *piece = &top->list->pieces[top->piece];

		inputs[n_inputs++] = piece->values + top->at * merge->row_len;
		top->at++;
		if (!find(top))
			*top = merge->heap[--merge->n];
		if (merge->n)
			sift(merge, 0);
	}
	*ret_row = row;
	return n_inputs;
}
