/*
 * A piece of a list of rows, as a peer sends it. The input: one byte for the element type, four for the number of the piece,
 * then the payload.
 */
#include "fuzz.h"
#include "proto/data.h"
#include "reduce/reduce.h"

/* What passed is merged with itself: each row comes twice, ascending, with values inside the payload. */
static void merge(const struct data_piece *piece, const uint8_t *payload, size_t len)
{
	const struct reduce_piece one = { piece->rows, piece->values, piece->n };
	const struct reduce_list lists[] = { { &one, 1 }, { &one, 1 } };
	struct reduce_cursor heap[2], cursor = reduce_list_begin(&lists[0]);
	struct reduce_merge merge;
	const void *inputs[2];
	int64_t row, last = -1;
	size_t n = 0;
	int r;

	while ((r = reduce_list_next(&cursor, piece->list.rows)) > 0)
		;
	if (r)
		return;
	reduce_merge_start(&merge, lists, 2, piece->row_len, heap);
	for (; reduce_merge_next(&merge, &row, inputs); n++) {
		FUZZ_CHECK(row > last && (uint64_t)row < piece->list.rows);
		FUZZ_CHECK(inputs[0] == inputs[1]);
		FUZZ_CHECK((const uint8_t *)inputs[0] + piece->row_len <= payload + len);
		last = row;
	}
	FUZZ_CHECK(n == piece->n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct data_header header = { .op = DATA_PUSH, .operation = OPERATION_PUSH_PULL_ROWS };
	_cleanup_(freep) uint8_t *payload = NULL;
	struct data_piece piece;
	const char *why = NULL;

	if (size < 5)
		return 0;
	header.dtype = data[0] % (DTYPE_MAX_ + 1);
	memcpy(&header.part, data + 1, sizeof(header.part));
	header.len = header.part_len = (uint32_t)(size - 5);
	/* Aligned as blocks are, and of exactly this size. */
	payload = malloc(MAX(size - 5, (size_t)1));
	FUZZ_CHECK(payload);
	memcpy(payload, data + 5, size - 5);
	if (data_rows_parse(&header, payload, &piece, &why)) {
		FUZZ_CHECK(why && *why);
		return 0;
	}
	FUZZ_CHECK(piece.n <= piece.list.n && piece.list.n <= piece.list.rows);
	FUZZ_CHECK(header.part < piece.n_pieces && piece.row_len);
	FUZZ_CHECK(data_rows_len(piece.n, piece.row_len) == header.len);
	FUZZ_CHECK((const uint8_t *)piece.rows == payload + sizeof(struct data_rows));
	merge(&piece, payload, header.len);
	return 0;
}
