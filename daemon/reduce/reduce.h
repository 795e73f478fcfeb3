/*
 * The sum: n inputs to one output in one pass, for every type and reduction, by the fastest kernel this CPU has,
 * chosen once. Deterministic: the same bits from every kernel, on every machine.
 *
 *   Order	input 0, then 1, ... strictly left to right for each element.
 *   Sum	float64 and float32 add in their own type; float16 and bfloat16 add in float32 and round once at the end
 *		(to nearest, ties to even). Integers wrap modulo 2^bits. bool: or.
 *   Average	the sum, divided by divisor before the final rounding (IEEE division; float64 in float64, the others in
 *		float32). Integers: floor division of the wrapped signed (uint8: unsigned) sum. bool: not allowed.
 *   Min, max	the first of equal values wins (so -0 and +0 keep their order); a NaN wins over all numbers.
 *		bool: and, or.
 *   NaN	every NaN in an output is the canonical quiet one (0x7ff8..., 0x7fc00000, 0x7e00, 0x7fc0).
 *   bool	any non-zero byte counts as true; outputs are 0 or 1.
 *   Denormals	are kept (no flush to zero).
 *
 * Any thread; no allocation; no state beyond the choice of kernels.
 */
#pragma once

#include "proto/types.h"

/* Several outputs are written piece by piece, each while it is in the cache. */
#define REDUCE_PIECE_BYTES (32u << 10)

struct reduce_params {
	unsigned dtype;	    /* enum dtype, valid */
	unsigned reduction; /* enum reduction, valid; AVERAGE needs divisor > 0 */
	size_t n_elements;
	const void *const *inputs; /* n_inputs >= 1, naturally aligned to the element */
	size_t n_inputs;
	/* n_outputs >= 1; each may be equal to any input, but not overlap one otherwise. Naturally aligned too. */
	void *const *outputs;
	size_t n_outputs;
	uint64_t divisor; /* AVERAGE only */
	/*
	 * The inputs' sum is first rounded to the element type and then divided: what two hops (one on a node, one at
	 * the server) would give when there is one node only. Matters for float16 and bfloat16 averages.
	 */
	bool round_before_division;
};

void reduce_run(const struct reduce_params *params);

/* Whether the type can be reduced so (average of bool cannot). */
bool reduce_supported(unsigned dtype, unsigned reduction);

/* Name of the chosen kernels: "scalar", "avx2", "avx512", "neon". */
const char *reduce_kernel_name(void);
/* Chooses by name; for tests and the config option. Returns 0, or -ENOTSUP where this CPU or build has no such. */
int reduce_kernel_select(const char *name);
