/* What a reduction must give, element by element, with no code in common with reduce/. */
#pragma once

#include "proto/types.h"

/* By which nodes of n_local ranks divide their sums for an average of float16. */
uint32_t expected_scale(uint32_t n_local);

/*
 * Reduces n_inputs arrays of n elements, in order, as a server does for a job of size ranks, and writes the result to
 * output. scale: by which an average's inputs are divided already.
 */
void expected_reduce(unsigned dtype, unsigned reduction, uint32_t size, uint32_t scale,
		     const void *const *inputs, size_t n_inputs, size_t n, void *output);
