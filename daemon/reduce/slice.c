/*
 * A long sum in slices. engine.c, accumulate.c and rows.c of the server and rows_work.c of the agent call, in the pool.
 */
#include "reduce/reduce.h"

/* Each input's slice begins so: the kernels' vectors stay whole. */
#define SLICE_ALIGN 128u

size_t reduce_slice_elements(const struct reduce_params *params, size_t n)
{
	size_t size = dtype_size(params->dtype), left = n - params->first, bytes;
	size_t n_passes = params->n_inputs + params->n_outputs - 1;

	if (n_passes * left * size <= PART_SUM_MAX)
		return left;
	bytes = PART_SUM_MAX / n_passes / SLICE_ALIGN * SLICE_ALIGN;
	return MIN(MAX(bytes, (size_t)SLICE_ALIGN) / size, left);
}

uint64_t reduce_slice_bytes(const struct reduce_params *params, size_t n)
{
	return (uint64_t)params->n_inputs * reduce_slice_elements(params, n) *
	       dtype_size(params->dtype);
}

bool reduce_slice(struct reduce_params *params, size_t n)
{
	params->n_elements = reduce_slice_elements(params, n);
	(void)reduce_run(params);
	params->first += params->n_elements;
	return params->first < n;
}
