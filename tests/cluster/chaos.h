/* What the trainers of scripts/chaos share: what a rank gives, and where it lies. */
#pragma once

#include "bps.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHARED	 1 /* memory of the library */
#define IN_PLACE 2

/* Any function of its arguments alone will do; the judge has the same. */
static inline uint32_t noise(uint32_t who, uint32_t round, uint32_t tensor, uint32_t at)
{
	uint32_t x = who * 0x9e3779b9u ^ round * 0x85ebca6bu ^ tensor * 0xc2b2ae35u ^ at;

	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	return x * 0x846ca68bu;
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
