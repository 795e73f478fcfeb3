/*
 * TensorFlow's C API as tensorflow_op.c uses it: the table of its functions, views of tensors,
 * results to be filled, and errors of the library as TensorFlow's. Called inside kernels, on
 * TensorFlow's threads.
 */
#include "client/native/tensorflow_op.h"
#include <stdarg.h>
#include <stdio.h>

struct tf_api tf;

int fail(struct failure *failure, int status, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	failure->status = status;
	(void)vsnprintf(failure->text, sizeof(failure->text), format, args);
	va_end(args);
	return status;
}

static const struct {
	int tf, bps;
	const char *name;
} dtypes[] = {
	{ TF_DOUBLE, BPS_FLOAT64, "float64" }, { TF_FLOAT, BPS_FLOAT32, "float32" },
	{ TF_HALF, BPS_FLOAT16, "float16" },   { TF_BFLOAT16, BPS_BFLOAT16, "bfloat16" },
	{ TF_INT64, BPS_INT64, "int64" },      { TF_INT32, BPS_INT32, "int32" },
	{ TF_INT16, BPS_INT16, "int16" },      { TF_INT8, BPS_INT8, "int8" },
	{ TF_UINT8, BPS_UINT8, "uint8" },      { TF_BOOL, BPS_BOOL, "bool" },
};

static int view_of(const struct tf_tensor *tensor, struct view *view, struct failure *failure)
{
	int dtype = tf.TensorType(tensor);
	size_t i;

	for (i = 0; i < ARRAY_SIZE(dtypes) && dtypes[i].tf != dtype; i++)
		;
	if (i == ARRAY_SIZE(dtypes))
		return fail(failure, -EINVAL, "bps has no element type for TensorFlow's %d", dtype);
	view->tf_dtype = dtype;
	view->dtype = dtypes[i].bps;
	view->dtype_name = dtypes[i].name;
	view->n_dims = tf.NumDims(tensor);
	if (view->n_dims > DIMS_MAX)
		return fail(failure, -EINVAL, "the tensor has %d dimensions", view->n_dims);
	view->row = 1;
	for (int d = 0; d < view->n_dims; d++) {
		view->dims[d] = tf.Dim(tensor, d);
		if (d)
			view->row *= (uint64_t)view->dims[d];
	}
	view->rows = view->n_dims ? (uint64_t)view->dims[0] : 1;
	view->count = view->rows * view->row;
	view->data = view->count ? tf.TensorData(tensor) : NULL;
	return 0;
}

struct tf_tensor *tensor_like(const struct view *like, struct failure *failure)
{
	struct tf_tensor *tensor = tf.AllocateTensor(like->tf_dtype, like->dims, like->n_dims,
						     like->count * bps_dtype_size(like->dtype));

	if (!tensor)
		(void)fail(failure, -ENOMEM, "TensorFlow has no memory for the result");
	return tensor;
}

struct tf_tensor *tensor_with_rows(const struct view *like, uint64_t rows, struct view *view,
				   struct failure *failure)
{
	struct tf_tensor *tensor;

	*view = *like;
	view->n_dims = MAX(like->n_dims, 1);
	view->dims[0] = (int64_t)rows;
	view->rows = rows;
	view->count = rows * like->row;
	tensor = tensor_like(view, failure);
	view->data = tensor && view->count ? tf.TensorData(tensor) : NULL;
	return tensor;
}

static int code_of(int status)
{
	switch (-status) {
	case EINVAL:
	case EILSEQ:
		return TF_INVALID_ARGUMENT;
	case ETIME:
	case ETIMEDOUT:
		return TF_DEADLINE_EXCEEDED;
	case ECANCELED:
		return TF_CANCELLED;
	case ECONNRESET:
	case EPIPE:
	case ESHUTDOWN:
		return TF_UNAVAILABLE;
	case ENOTCONN:
	case EPERM:
		return TF_FAILED_PRECONDITION;
	case EAGAIN:
	case EDQUOT:
	case ENOMEM:
		return TF_RESOURCE_EXHAUSTED;
	default:
		return TF_INTERNAL;
	}
}

void report(struct tf_context *context, struct tf_status *status, const struct failure *failure)
{
	if (failure->status)
		tf.SetStatus(status, code_of(failure->status), failure->text);
	if (tf.GetCode(status) != TF_OK)
		tf.OpKernelContext_Failure(context, status);
}

struct tf_tensor *input_of(struct tf_context *context, int i, struct view *view,
			   struct tf_status *status, struct failure *failure)
{
	struct tf_tensor *tensor = NULL;

	tf.GetInput(context, i, &tensor, status);
	if (tf.GetCode(status) != TF_OK || !tensor)
		(void)fail(failure, -EINVAL, "input %d: %s", i, tf.Message(status));
	else
		(void)view_of(tensor, view, failure);
	return tensor;
}
