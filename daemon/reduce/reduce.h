/*
 * The sum: n inputs to one output in one pass, for every type and reduction, by the fastest kernel this CPU has,
 * chosen once. Deterministic: the same bits from every kernel, on every machine.
 *
 *   Order	input 0, then 1, ... strictly left to right for each element.
 *   Sum	float64 and float32 add in their own type; float16 and bfloat16 add in float32 and round once at the end
 *		(to nearest, ties to even). Integers wrap modulo 2^bits. bool: or.
 *   Average	the sum, divided by divisor / scale before the final rounding (IEEE division; float64 in float64, the
 *		others in float32). Integers: floor division of the sum, which does not wrap. bool: not allowed.
 *   Min, max	the first of equal values wins (so -0 and +0 keep their order); a NaN wins over all numbers.
 *		bool: and, or.
 *   NaN	every NaN in an output is the canonical quiet one (0x7ff8..., 0x7fc00000, 0x7e00, 0x7fc0).
 *   bool	any non-zero byte counts as true; outputs are 0 or 1.
 *   Denormals	are kept (no flush to zero).
 *   Widening	inputs of float16 and bfloat16 for an output of float32 are exact numbers of it: the result is that of inputs
 *		that were converted before.
 *
 * Any thread; no allocation; no state beyond the choice of kernels.
 */
#pragma once

#include "proto/types.h"

/* Several outputs are written piece by piece, each while it is in the cache. */
#define REDUCE_PIECE_BYTES (32u << 10)

/*
 * Outputs from this size on are written past the caches. With 32 MiB of last-level cache that is 20 to 30 % faster from
 * 16 MiB on and a draw at 8 MiB (bps-bench sum); and what is smaller is read again soon, by a send or a copy to a
 * trainer.
 */
#define REDUCE_STREAM_BYTES (16u << 20)

struct reduce_params {
	unsigned dtype;		   /* enum dtype, valid */
	unsigned reduction;	   /* enum reduction, valid; AVERAGE needs divisor > 0 */
	size_t first, n_elements;  /* of inputs and outputs; what is before and after stays */
	const void *const *inputs; /* n_inputs >= 1, naturally aligned to the element */
	size_t n_inputs;
	/* Each one's, dtype or, where reduce_widens(), a narrower one; NULL: dtype. */
	const uint8_t *input_dtypes;
	/*
	 * n_outputs >= 1; each may be equal to any input of dtype, but not overlap one otherwise. Naturally aligned too.
	 */
	void *const *outputs;
	size_t n_outputs;
	uint64_t divisor; /* AVERAGE only */
	/*
	 * AVERAGE of float16 only, 0 is 1: the job's reduce_scale(). The inputs are sums of nodes that are divided by it already;
	 * with round_before_division their sum is.
	 */
	uint32_t scale;
	/*
	 * The inputs' sum is first divided by scale, rounded to the element type, and then divided by divisor / scale: what two
	 * hops (one on a node, one at the server) would give when there is one node only. Matters for float16 and bfloat16
	 * averages.
	 */
	bool round_before_division;
};

/*
 * What each node's sum for an average of float16 is divided by before it is rounded, where no node has more than n_local ranks:
 * the least power of two that is no less. So the sum of finite numbers is finite, and no bit but of denormals is lost.
 */
static inline uint32_t reduce_scale(uint32_t n_local)
{
	return n_local > 1 ? 1u << (32 - __builtin_clz(n_local - 1)) : 1;
}

/*
 * Returns 0, or -ERANGE: an average of integers is not a number of their type, which can be where the divisor is less than the
 * number of inputs. It is then written modulo 2^bits.
 */
int reduce_run(const struct reduce_params *params);

/* Of a sum of n elements in slices, those of the next: of all inputs and further outputs they are PART_SUM_MAX bytes, or few. */
size_t reduce_slice_elements(const struct reduce_params *params, size_t n);
/* The next slice, in a run of a task. params->first is 0 before the first. Returns whether there are more. */
bool reduce_slice(struct reduce_params *params, size_t n);
/* Bytes of all inputs in the next slice. */
uint64_t reduce_slice_bytes(const struct reduce_params *params, size_t n);

/*
 * A sum whose inputs come by and by, for few elements: the same bits as reduce_run(), from the plain kernels. What they make stays in
 * acc, aligned as memory of malloc(), between the calls. Not of inputs of several types.
 */
size_t reduce_fold_len(const struct reduce_params *params);
/* The next n_inputs inputs. */
void reduce_fold_add(const struct reduce_params *params, void *acc, bool is_first);
/* To the outputs. Returns what reduce_run() does. */
int reduce_fold_end(const struct reduce_params *params, const void *acc);

/*
 * Copies len bytes that are in the cache to n_outputs places, two in one pass. They overlap neither each other nor the input, at
 * any address.
 */
void reduce_copy(void *const *outputs, size_t n_outputs, const void *input, size_t len);

/* Whether the type can be reduced so (average of bool cannot). */
bool reduce_supported(unsigned dtype, unsigned reduction);

/* Whether inputs of a type are summed into outputs of another, wider one. */
static inline bool reduce_widens(unsigned from, unsigned to)
{
	return to == DTYPE_FLOAT32 && (from == DTYPE_FLOAT16 || from == DTYPE_BFLOAT16);
}

/* Name of the chosen kernels: "scalar", "avx2", "avx512", "avx512_bf16", "avx512_256", "neon". */
const char *reduce_kernel_name(void);
/* Chooses by name; for tests and the config option. Returns 0, or -ENOTSUP where this CPU or build has no such. */
int reduce_kernel_select(const char *name);

/* -- By rows ------------------------------------------------------------------------------------------------------ */

/* Values of one row, wherever they are. */
struct reduce_entry {
	int64_t row;
	const void *values;
};

/* To look at an entry or a row once takes as long as so many bytes that are summed: for who shares the time out. */
#define ROWS_LOOK_COST 256u
/* What a task does before others have their turn. */
#define ROWS_LOOKS (UINT64_C(64) << 10)
/* As many take as long as to make a piece of a list. */
#define ROWS_PIECE_LOOKS 64

/*
 * n were looked at, and so many bytes summed or copied, of *looks that a task may. What it has done more, as of a row that is long, is
 * no part of what it may do in its next runs.
 */
static inline void reduce_looked(int64_t *looks, uint64_t n, uint64_t bytes)
{
	*looks -= (int64_t)(n + bytes / ROWS_LOOK_COST);
}

/*
 * Work that is done in steps, which goes on in each run of its task from where it was. A step looks at *looks rows at most, or does
 * what takes as long. It returns whether it is over, and not when the work has failed, which *status says.
 */
typedef bool reduce_step_fn(void *owner, int64_t *looks);
struct reduce_work {
	reduce_step_fn *const *step; /* the present one, of an array that ends with NULL */
	int64_t debt;		     /* looks that runs have taken beyond what they may */
};

/* One run, of ROWS_LOOKS * ROWS_LOOK_COST. Returns whether there is more to do: of work that has failed, only to make good its debt. */
bool reduce_work_run(struct reduce_work *work, void *owner, const int *status);

/* A sort by row, as far as it has come: those of one row keep their order. The sort's, but for entries. */
#define REDUCE_DIGIT_BITS 11
struct reduce_sort {
	struct reduce_entry *entries, *scratch; /* each pass goes from one to the other */
	size_t n, at;
	uint64_t n_rows;
	unsigned shift;
	bool is_counted;
	size_t starts[1u << REDUCE_DIGIT_BITS];
};

/* Rows are in [0, n_rows); scratch has room for n entries, too. Both stay until the sort is over. */
void reduce_sort_start(struct reduce_sort *sort, struct reduce_entry *entries,
		       struct reduce_entry *scratch, size_t n, uint64_t n_rows);
/*
 * Looks at *looks entries at most, and takes those off that it has looked at. Returns whether all are sorted: sort->entries
 * has them then, whichever it was of the two, and the scratch nothing of use.
 */
bool reduce_sort_step(struct reduce_sort *sort, int64_t *looks);

/* A list of rows with their values, ascending, each row once; it may be in pieces. */
struct reduce_piece {
	const int64_t *rows;
	const char *values; /* n times row_len bytes */
	size_t n;
};

struct reduce_list {
	const struct reduce_piece *pieces;
	size_t n_pieces;
};

/* A place in a list. */
struct reduce_cursor {
	const struct reduce_list *list;
	size_t piece, at;
	int64_t row;
};

/* Before the first row of a list. */
static inline struct reduce_cursor reduce_list_begin(const struct reduce_list *list)
{
	return (struct reduce_cursor){ .list = list, .row = -1 };
}
/*
 * On to the next row of a list from outside, cursor->row. Returns 1; 0 at the end; or -EINVAL, where it is not larger than the
 * one before, or not in [0, n_rows): such a list is none.
 */
int reduce_list_next(struct reduce_cursor *cursor, uint64_t n_rows);

/* Goes through n valid lists at once, row by row. */
struct reduce_merge {
	size_t row_len;
	struct reduce_cursor *heap; /* the next row on top; of equal ones that of the first list */
	size_t n;
	const struct reduce_list *lists;
};

/* heap: room for n_lists cursors. All that is passed must stay until the merge is over. */
void reduce_merge_start(struct reduce_merge *merge, const struct reduce_list *lists, size_t n_lists,
			size_t row_len, struct reduce_cursor *heap);
/*
 * The next row, and its values in the order of the lists that have it: inputs has room for one of each list. Returns
 * their number, 0 at the end.
 */
size_t reduce_merge_next(struct reduce_merge *merge, int64_t *ret_row, const void **inputs);
