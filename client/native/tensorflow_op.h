/*
 * What the kernels of tensorflow_op.c stand on: TensorFlow's tensors as the library sees them, and failures on their way to
 * TensorFlow. No state but the table of TensorFlow's functions, which is filled once, when we are loaded.
 */
#pragma once

#include "client/native/tensorflow_api.h"
#include "proto/c.h"
#include <bps.h>

#define TEXT_MAX 512
#define DIMS_MAX 254 /* as TensorFlow has it */

extern struct tf_api tf;

/* A failure on its way to TensorFlow. */
struct failure {
	int status;
	char text[TEXT_MAX];
};

/* Returns status. */
_printf_(3, 4) int fail(struct failure *failure, int status, const char *format, ...);

/* Ends a kernel: tells TensorFlow what went wrong, if anything did. */
void report(struct tf_context *context, struct tf_status *status, const struct failure *failure);

/* A tensor as the library sees it: rows of row elements, along the first dimension. */
struct view {
	void *data; /* NULL where there are no elements */
	uint64_t count, rows, row;
	int n_dims;
	int64_t dims[DIMS_MAX];
	int tf_dtype, dtype;
	const char *dtype_name;
};

/* Takes an input of a kernel, which the caller deletes. NULL or not, failure says how it went. */
struct tf_tensor *input_of(struct tf_context *context, int i, struct view *view,
			   struct tf_status *status, struct failure *failure);

/* New tensors, not filled. NULL and a failure when there is no memory. */
struct tf_tensor *tensor_like(const struct view *like, struct failure *failure);

/* As the one seen, but of so many rows; gives its own view too. A scalar becomes a vector. */
struct tf_tensor *tensor_with_rows(const struct view *like, uint64_t rows, struct view *view,
				   struct failure *failure);

static inline void tensor_deletep(struct tf_tensor **tensor)
{
	if (*tensor)
		tf.DeleteTensor(*tensor);
}

static inline void status_deletep(struct tf_status **status)
{
	if (*status)
		tf.DeleteStatus(*status);
}
