/* Lists of rows: sorted, merged, checked. */
#include "reduce/reduce.h"
#include "test.h"

static uint64_t state = 88172645463325252ull;

static uint64_t rnd(uint64_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state % n;
}

/* Where an entry was before: its values point there. */
static const char places[1 << 16];

/* Each looks at all entries twice, for a digit of the largest row. */
static size_t n_passes_of(uint64_t n_rows)
{
	size_t n = 0;

	for (unsigned shift = 0; shift < 63 && (n_rows - 1) >> shift; shift += REDUCE_DIGIT_BITS)
		n++;
	return n;
}

static void sorts(size_t n, uint64_t n_rows)
{
	_cleanup_(freep) struct reduce_entry *entries = calloc(n + 1, sizeof(*entries));
	_cleanup_(freep) struct reduce_entry *scratch = calloc(n + 1, sizeof(*scratch));
	_cleanup_(freep) int64_t *rows = calloc(n + 1, sizeof(*rows));
	_cleanup_(freep) bool *seen = calloc(n + 1, sizeof(*seen));
	static struct reduce_sort sort;
	const struct reduce_entry *sorted;
	bool is_sorted = false;
	size_t n_looks = 0;

	for (size_t i = 0; i < n; i++) {
		rows[i] = (int64_t)(rnd(4) ? rnd(n_rows) : rnd(MIN(n_rows, UINT64_C(5))));
		entries[i] = (struct reduce_entry){ rows[i], &places[i] };
	}
	entries[n].row = scratch[n].row = 42;
	reduce_sort_start(&sort, entries, scratch, n, n_rows);
	while (!is_sorted) {
		int64_t most = (int64_t)(1 + rnd(2 * n + 1)), looks = most;

		is_sorted = reduce_sort_step(&sort, &looks);
		ASSERT_TRUE(is_sorted || !looks);
		ASSERT_TRUE(looks <= most);
		n_looks += (size_t)(most - looks);
	}
	ASSERT_EQ(n_looks, 2 * n_passes_of(n_rows) * n);
	ASSERT_EQ(entries[n].row, 42);
	ASSERT_EQ(scratch[n].row, 42);
	sorted = sort.entries;
	for (size_t i = 0; i < n; i++) {
		size_t before = (size_t)((const char *)sorted[i].values - places);

		ASSERT_TRUE(before < n && !seen[before]);
		seen[before] = true;
		ASSERT_EQ(sorted[i].row, rows[before]);
		if (i)
			ASSERT_TRUE(sorted[i - 1].row < sorted[i].row ||
				    (sorted[i - 1].row == sorted[i].row &&
				     sorted[i - 1].values < sorted[i].values));
	}
}

TEST(rows_are_sorted_and_equal_ones_keep_their_order)
{
	static const uint64_t tables[] = {
		1, 2, 2047, 2048, 2049, 1 << 22, (1 << 22) + 1, 1ull << 33, (uint64_t)INT64_MAX
	};

	for (size_t i = 0; i < ARRAY_SIZE(tables); i++)
		for (size_t n = 0; n < 5000; n = n * 3 + 1)
			sorts(n, tables[i]);
	sorts(0, 0);
}

static bool is_valid(const struct reduce_list *list, uint64_t n_rows)
{
	struct reduce_cursor cursor = reduce_list_begin(list);
	int r;

	while ((r = reduce_list_next(&cursor, n_rows)) > 0)
		;
	return !r;
}

#define N_ROWS 300
#define LISTS  9

/* Lists of rows in pieces, some of them empty. */
struct made {
	int64_t rows[N_ROWS];
	struct reduce_piece pieces[8];
	struct reduce_list list;
	bool has[N_ROWS];
	char values[N_ROWS][3];
};

static void make(struct made *made, unsigned density)
{
	size_t n = 0, at = 0;

	memset(made, 0, sizeof(*made));
	for (int64_t row = 0; row < N_ROWS; row++) {
		if (rnd(100) >= density)
			continue;
		made->has[row] = true;
		made->rows[n++] = row;
	}
	made->list = (struct reduce_list){ made->pieces, rnd(9) };
	for (size_t i = 0; i < made->list.n_pieces; i++) {
		size_t here = i + 1 == made->list.n_pieces ? n - at : rnd(n - at + 1);

		made->pieces[i] = (struct reduce_piece){ made->rows + at, made->values[at], here };
		at += here;
	}
	if (!made->list.n_pieces)
		memset(made->has, 0, sizeof(made->has));
}

TEST(a_merge_meets_every_row_once_and_its_lists_in_order)
{
	static struct made made[LISTS];
	struct reduce_list lists[LISTS];
	struct reduce_cursor heap[LISTS];
	const void *inputs[LISTS];
	struct reduce_merge merge;
	int64_t row;

	for (unsigned turn = 0; turn < 2000; turn++) {
		size_t n_lists = rnd(LISTS + 1), n;
		size_t at[LISTS] = { 0 };

		for (size_t i = 0; i < n_lists; i++) {
			make(&made[i], (unsigned)rnd(101));
			lists[i] = made[i].list;
			ASSERT_TRUE(is_valid(&lists[i], N_ROWS));
		}
		reduce_merge_start(&merge, lists, n_lists, 3, heap);
		for (int64_t expected = 0; expected < N_ROWS; expected++) {
			size_t n_here = 0;

			for (size_t i = 0; i < n_lists; i++)
				n_here += made[i].has[expected];
			if (!n_here)
				continue;
			n = reduce_merge_next(&merge, &row, inputs);
			ASSERT_EQ(row, expected);
			ASSERT_EQ(n, n_here);
			n = 0;
			for (size_t i = 0; i < n_lists; i++)
				if (made[i].has[expected])
					ASSERT_TRUE(inputs[n++] == made[i].values[at[i]++]);
		}
		ASSERT_EQ(reduce_merge_next(&merge, &row, inputs), 0);
		ASSERT_EQ(reduce_merge_next(&merge, &row, inputs), 0);
	}
}

static bool valid(const int64_t *rows, size_t n, size_t cut, uint64_t n_rows)
{
	struct reduce_piece pieces[] = { { rows, NULL, cut }, { rows + cut, NULL, n - cut } };

	return is_valid(&(struct reduce_list){ pieces, 2 }, n_rows);
}

TEST(lists_that_are_none)
{
	const int64_t good[] = { 0, 3, 4, 9 }, twice[] = { 0, 3, 3, 9 }, back[] = { 0, 3, 2, 9 },
		      negative[] = { -1, 3 }, most[] = { 0, INT64_MAX };

	for (size_t cut = 0; cut <= 4; cut++) {
		ASSERT_TRUE(valid(good, 4, cut, 10));
		ASSERT_TRUE(!valid(good, 4, cut, 9));
		ASSERT_TRUE(!valid(twice, 4, cut, 10));
		ASSERT_TRUE(!valid(back, 4, cut, 10));
	}
	ASSERT_TRUE(!valid(negative, 2, 1, 10));
	ASSERT_TRUE(!valid(most, 2, 1, INT64_MAX));
	ASSERT_TRUE(valid(most, 2, 1, (uint64_t)INT64_MAX + 1));
	ASSERT_TRUE(valid(good, 0, 0, 0));
	ASSERT_TRUE(!valid(good, 1, 0, 0));
}
