/* What the trainers of scripts/chaos share: what a rank gives, where it lies, and how a result is named in a log. */
#pragma once

#include "bps.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHARED	 1 /* memory of the library */
#define IN_PLACE 2

/* Any function of its arguments alone will do; the judge (tests/lib/chaos_values.py) has the same. */
static inline uint32_t noise(uint32_t who, uint32_t round, uint32_t tensor, uint32_t at)
{
	uint32_t x = who * 0x9e3779b9u ^ round * 0x85ebca6bu ^ tensor * 0xc2b2ae35u ^ at;

	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	return x * 0x846ca68bu;
}

/*
 * What a rank gives to a round: of the last round's result, so that a wrong bit shows in every round after it, but of sums of 16
 * ranks at most as much as they were, so that none grows for ever; and of noise of 2^-24 to 2^15, whose sum depends on the order of
 * addition. Each product is exact. `input` and `state` may be the same.
 */
static inline void give(int dtype, void *input, const void *state, size_t n, uint32_t who,
			uint32_t round, uint32_t tensor)
{
	for (size_t i = 0; i < n; i++) {
		uint32_t x = noise(who, round, tensor, (uint32_t)i);

		if (dtype == BPS_FLOAT32)
			((float *)input)[i] =
				((const float *)state)[i] * 0.0625f +
				(float)(x >> 8) / 16777216.0f * (float)(1u << (x & 15));
		else
			((int32_t *)input)[i] =
				(int32_t)(((const uint32_t *)state)[i] / 3u + (x & 0xffff));
	}
}

/* Each word times an odd number of its own: one bit that differs shows. */
static inline uint64_t digest(const void *data, size_t n)
{
	const uint32_t *words = data;
	uint64_t sum = 0;

	for (size_t i = 0; i < n; i++)
		sum += words[i] * ((0x9e3779b97f4a7c15u * (i + 1)) | 1);
	return sum;
}

/* Zeros; *ret_memory is set where they are SHARED, and the caller's. NULL without memory. */
static inline void *memory(struct bps_client *client, size_t len, int flags,
			   struct bps_memory **ret_memory)
{
	void *data;

	if (!(flags & SHARED))
		return calloc(1, len);
	if (bps_memory_alloc(client, len, ret_memory))
		return NULL;
	data = bps_memory_data(*ret_memory);
	memset(data, 0, len);
	return data;
}
