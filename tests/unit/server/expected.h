/* What a reduction must give, element by element, with no code in common with reduce/. */
#pragma once

#include "proto/types.h"

/*
 * Reduces n_inputs arrays of n elements, in order, as a server does for a job of size ranks, and writes the result to
 * output.
 */
void expected_reduce(unsigned dtype, unsigned reduction, uint32_t size, const void *const *inputs,
		     size_t n_inputs, size_t n, void *output);
