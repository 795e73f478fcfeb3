/*
 * The tensor of a name, as Client.declare() of bps/_client.py: what had the name first keeps it. Of another type or size it is
 * another tensor, whose name has both behind. Every rank that uses a name so in the same order comes to the same names.
 */
#pragma once

#include "proto/c.h"
#include <bps.h>
#include <inttypes.h>
#include <stdio.h>

/* Inside, as bps_tensor_declare(), whose errors these are. */
static inline int declare(struct bps_client *client, const char *name, int dtype, uint64_t elements,
			  struct bps_tensor **ret_tensor)
{
	static const char *const dtypes[] = {
		[BPS_FLOAT64] = "float64",   [BPS_FLOAT32] = "float32", [BPS_FLOAT16] = "float16",
		[BPS_BFLOAT16] = "bfloat16", [BPS_INT64] = "int64",	[BPS_INT32] = "int32",
		[BPS_INT16] = "int16",	     [BPS_INT8] = "int8",	[BPS_UINT8] = "uint8",
		[BPS_BOOL] = "bool",
	};
	_cleanup_(freep) char *longer = NULL;
	char count[24] = "any";
	int r;

	if (elements != BPS_VARIABLE)
		(void)snprintf(count, sizeof(count), "%" PRIu64, elements);
	while ((r = bps_tensor_declare(client, longer ?: name, dtype, elements, ret_tensor)) ==
	       -EEXIST) {
		char *next;

		if (asprintf(&next, "%s.%s.%s", longer ?: name, dtypes[dtype], count) < 0)
			return -ENOMEM;
		free(longer);
		longer = next;
	}
	return r;
}
