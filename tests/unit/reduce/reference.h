/*
 * What reduce.h promises, written for one element in the most pedestrian way: numbers as float64 or 128-bit integers,
 * float16 and bfloat16 taken apart and put together with ldexp() and nearbyint(). It shares no line with the kernels.
 * Elements are given and returned as their bits, in the low bytes of 64.
 */
#pragma once

#include "proto/types.h"

/* A number of float16 or bfloat16 as float32. */
uint64_t reference_widen(unsigned dtype, uint64_t bits);
uint64_t reference_reduce(unsigned dtype, unsigned reduction, const uint64_t *bits, size_t n_inputs,
			  uint64_t divisor, uint32_t scale, bool round_before_division);
