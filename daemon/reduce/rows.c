/*
 * Rows by number: a stable radix sort, the check of a sorted list, and the merge of several.
 * rows_work.c of the agent and rows.c of the server call, in the pool.
 */
#include "reduce/reduce.h"

#define DIGIT_BITS 11
#define DIGITS	   (1u << DIGIT_BITS)

/* By the digits of the row, the least first: each pass keeps the order of what is equal in it. */
void reduce_sort_rows(struct reduce_entry *entries, struct reduce_entry *scratch, size_t n,
		      uint64_t n_rows)
{
	struct reduce_entry *from = entries, *to = scratch, *swap;

	for (unsigned shift = 0; shift < 63 && (n_rows - 1) >> shift; shift += DIGIT_BITS) {
		size_t starts[DIGITS] = { 0 }, at = 0, count;

		for (size_t i = 0; i < n; i++)
			starts[(uint64_t)from[i].row >> shift & (DIGITS - 1)]++;
		for (size_t digit = 0; digit < DIGITS; digit++) {
			count = starts[digit];
			starts[digit] = at;
			at += count;
		}
		for (size_t i = 0; i < n; i++)
			to[starts[(uint64_t)from[i].row >> shift & (DIGITS - 1)]++] = from[i];
		swap = from;
		from = to;
		to = swap;
	}
	if (from != entries)
		memcpy(entries, from, n * sizeof(*entries));
}

bool reduce_list_valid(const struct reduce_list *list, uint64_t n_rows)
{
	int64_t last = -1;

	for (size_t i = 0; i < list->n_pieces; i++) {
		const struct reduce_piece *piece = &list->pieces[i];

		for (size_t k = 0; k < piece->n; k++) {
			if (piece->rows[k] <= last)
				return false;
			last = piece->rows[k];
		}
	}
	return last < 0 || (uint64_t)last < n_rows;
}

/* Finds the next row of its list. Returns false at the end. */
static bool cursor_find(struct reduce_cursor *cursor)
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
		heap[merge->n] = (struct reduce_cursor){ .list = &lists[i] };
		merge->n += cursor_find(&heap[merge->n]);
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
		if (!cursor_find(top))
			*top = merge->heap[--merge->n];
		if (merge->n)
			sift(merge, 0);
	}
	*ret_row = row;
	return n_inputs;
}
