/*
 * The tensor of a name, as Client.declare() of bps/_client.py: what had the name first keeps it. Of another type, size or shape it is
 * another tensor, whose name has both behind. Every rank that uses a name so in the same order comes to the same names.
 */
#pragma once

#include "proto/c.h"
#include <bps.h>
#include <inttypes.h>
#include <stdio.h>

#define MAX_DIMENSIONS 8 /* that the name of a tensor tells one by one */
#define SHAPE_TEXT_LEN (MAX_DIMENSIONS * 21)

/* An array of which a tensor is declared. */
struct array {
	int dtype;
	uint64_t elements;
	const int64_t
		*dims; /* NULL: each rank may have its own; elements may be BPS_VARIABLE then */
	int n_dims;
};

/* A shape in the name of a tensor: as shape_text() of bps/_client.py. A number is an array of one. */
static inline void shape_text(const struct array *array, char text[SHAPE_TEXT_LEN])
{
	size_t len = 0;

	if (array->elements == BPS_VARIABLE) {
		(void)snprintf(text, SHAPE_TEXT_LEN, "any");
		return;
	}
	if (array->n_dims > MAX_DIMENSIONS) {
		(void)snprintf(text, SHAPE_TEXT_LEN, "%dd.%" PRIu64, array->n_dims,
			       array->elements);
		return;
	}
	if (!array->dims || !array->n_dims)
		(void)snprintf(text, SHAPE_TEXT_LEN, "%" PRIu64, array->elements);
	for (int i = 0; array->dims && i < array->n_dims; i++)
		len += (size_t)snprintf(text + len, SHAPE_TEXT_LEN - len, "%s%" PRId64,
					i ? "x" : "", array->dims[i]);
}

/* Inside, as bps_tensor_declare(), whose errors these are. */
static inline int declare(struct bps_client *client, const char *name, const struct array *array,
			  struct bps_tensor **ret_tensor)
{
	static const char *const dtypes[] = {
		[BPS_FLOAT64] = "float64",   [BPS_FLOAT32] = "float32", [BPS_FLOAT16] = "float16",
		[BPS_BFLOAT16] = "bfloat16", [BPS_INT64] = "int64",	[BPS_INT32] = "int32",
		[BPS_INT16] = "int16",	     [BPS_INT8] = "int8",	[BPS_UINT8] = "uint8",
		[BPS_BOOL] = "bool",
	};
	_cleanup_(freep) char *longer = NULL;
	char shape[SHAPE_TEXT_LEN];
	int r;

	shape_text(array, shape);
	for (;;) {
		char *next;

		if (array->dims)
			r = bps_tensor_declare_shaped(client, longer ?: name, array->dtype,
						      (const uint64_t *)array->dims,
						      (unsigned)array->n_dims, ret_tensor);
		else
			r = bps_tensor_declare(client, longer ?: name, array->dtype,
					       array->elements, ret_tensor);
		if (r != -EEXIST)
			return r;
		if (asprintf(&next, "%s.%s.%s", longer ?: name, dtypes[array->dtype], shape) < 0)
			return -ENOMEM;
		free(longer);
		longer = next;
	}
}
