/*
 * Chooses the set of kernels once, and runs a sum by them: which bytes are written past the
 * caches, inputs of several types, the division of an integer average, the copies to further
 * outputs. The agent and the server call, in the pool or on the control thread.
 */
#include "reduce/reduce.h"
#include "base/cpu.h"
#include "reduce/kernel.h"
#include <stdatomic.h>

/* Best first, of those that this CPU prefers; see kernels_preferred(). */
static const struct reduce_kernels *const kernel_sets[] = {
#ifdef __x86_64__
	&reduce_kernels_avx512_256, &reduce_kernels_avx512_bf16,
	&reduce_kernels_avx512,	    &reduce_kernels_avx2,
#endif
#ifdef __aarch64__
	&reduce_kernels_neon,
#endif
	&reduce_kernels_scalar,
};

/* Each thread that finds it empty computes the same choice, so the first calls may race. */
static _Atomic(const struct reduce_kernels *) chosen;

#ifdef __x86_64__
/* __builtin_cpu_supports() also asks whether the kernel saves the wide registers. */
static bool kernels_supported(const struct reduce_kernels *kernels)
{
	__builtin_cpu_init();
	if (kernels == &reduce_kernels_avx512_256)
		return __builtin_cpu_supports("fma") && cpu_has_f16c() &&
		       kernels_supported(&reduce_kernels_avx512_bf16);
	if (kernels == &reduce_kernels_avx512_bf16)
		return __builtin_cpu_supports("avx512bf16") &&
		       kernels_supported(&reduce_kernels_avx512);
	if (kernels == &reduce_kernels_avx512)
		return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
		       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
	if (kernels == &reduce_kernels_avx2)
		return __builtin_cpu_supports("avx2") && cpu_has_f16c();
	return true;
}

/*
 * Zen 4 does 512 bits as two halves, conversions of float16 by far more than twice the steps of
 * 256, and reads eight inputs at 256 bits 8 % faster from the second cache, 10 to 15 % from memory
 * (EPYC, family 19h, model 11h).
 */
static bool kernels_preferred(const struct reduce_kernels *kernels)
{
	return kernels != &reduce_kernels_avx512_256 || __builtin_cpu_is("amdfam19h");
}
#else
static bool kernels_preferred(const struct reduce_kernels *kernels)
{
	return true;
}

static bool kernels_supported(const struct reduce_kernels *kernels)
{
	return true;
}
#endif

static const struct reduce_kernels *kernels_get(void)
{
	const struct reduce_kernels *kernels = atomic_load_explicit(&chosen, memory_order_acquire);

	if (likely(kernels))
		return kernels;
	for (size_t i = 0; i < ARRAY_SIZE(kernel_sets); i++) {
		kernels = kernel_sets[i];
		if (kernels_supported(kernels) && kernels_preferred(kernels))
			break;
	}
	atomic_store_explicit(&chosen, kernels, memory_order_release);
	return kernels;
}

const char *reduce_kernel_name(void)
{
	return kernels_get()->name;
}

int reduce_kernel_select(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(kernel_sets); i++) {
		if (strcmp(kernel_sets[i]->name, name) || !kernels_supported(kernel_sets[i]))
			continue;
		atomic_store_explicit(&chosen, kernel_sets[i], memory_order_release);
		return 0;
	}
	return -ENOTSUP;
}

bool reduce_supported(unsigned dtype, unsigned reduction)
{
	return dtype_size(dtype) && reduction >= REDUCTION_SUM && reduction <= REDUCTION_MAX_ &&
	       !(dtype == DTYPE_BOOL && reduction == REDUCTION_AVERAGE);
}

static bool outputs_alias(const struct reduce_params *params)
{
	for (size_t o = 0; o < params->n_outputs; o++)
		for (size_t i = 0; i < params->n_inputs; i++)
			if (params->outputs[o] == params->inputs[i])
				return true;
	return false;
}

/* Runs a kernel; where it streams, the bytes up to the first aligned one go the ordinary way. */
static void span_run(reduce_span_fn *run, const struct reduce_span *whole)
{
	struct reduce_span span = *whole;

	if (span.stream) {
		uintptr_t at = (uintptr_t)span.output + span.offset;
		size_t head = MIN((size_t)(-at % REDUCE_STREAM_ALIGN), span.len);

		if (head) {
			span.len = head;
			span.stream = false;
			run(&span);
			span.offset += head;
			span.len = whole->len - head;
			span.stream = true;
		}
	}
	if (span.len)
		run(&span);
}

/*
 * Copies the span from one output to the others. The sum of one input of bytes is a copy that can
 * stream.
 */
static void span_copy(const struct reduce_kernels *kernels, const struct reduce_params *params,
		      const struct reduce_span *from, bool stream)
{
	const void *input = from->output;
	struct reduce_span span = {
		.inputs = &input,
		.n_inputs = 1,
		.offset = from->offset,
		.len = from->len,
		.stream = stream,
	};

	for (size_t o = 1; o < params->n_outputs; o++) {
		span.output = params->outputs[o];
		if (span.output != input)
			span_run(kernels->run[DTYPE_UINT8][REDUCTION_SUM], &span);
	}
}

/* The type of all inputs, or 0: they differ. */
static unsigned common_dtype(const struct reduce_params *params)
{
	unsigned dtype = params->input_dtypes ? params->input_dtypes[0] : params->dtype;

	for (size_t i = 1; params->input_dtypes && i < params->n_inputs; i++)
		if (params->input_dtypes[i] != dtype)
			return 0;
	return dtype;
}

/* Elements of inputs of several types that are summed at a time: both buffers stay in the first cache. */
#define MIXED_ELEMENTS 1024u

/* len bytes, at offset, of one input as float32, which it may be. */
static const void *widened(const struct reduce_kernels *kernels, const struct reduce_params *params,
			   size_t i, size_t offset, size_t len, float *buffer)
{
	unsigned dtype = params->input_dtypes[i];
	const void *input = params->inputs[i];
	struct reduce_span span = { .n_inputs = 1, .output = buffer, .len = len };

	if (dtype == params->dtype)
		return (const char *)input + offset;
	input = (const char *)input + offset / sizeof(float) * dtype_size(dtype);
	span.inputs = &input;
	kernels->widen[dtype][REDUCTION_SUM](&span);
	return buffer;
}

/*
 * Inputs of several types: as ever the first two, then the next to their sum, in pieces. Only the last step writes the output, which
 * may be any of the inputs.
 */
static void span_mixed(const struct reduce_kernels *kernels, const struct reduce_params *params,
		       const struct reduce_span *whole)
{
	unsigned reduction = params->reduction;
	unsigned step = reduction == REDUCTION_AVERAGE ? REDUCTION_SUM : reduction;
	float sum[MIXED_ELEMENTS], next[MIXED_ELEMENTS];
	const size_t end = whole->offset + whole->len, last = params->n_inputs - 1;

	for (size_t at = whole->offset, len; at < end; at += len) {
		struct reduce_span span = *whole;
		const void *inputs[2];

		len = MIN(end - at, sizeof(sum));
		inputs[0] = widened(kernels, params, 0, at, len, sum);
		span.inputs = inputs;
		span.n_inputs = 2;
		span.offset = 0;
		span.len = len;
		span.stream = false;
		for (size_t i = 1; i <= last; i++) {
			inputs[1] = widened(kernels, params, i, at, len, next);
			span.output = i == last ? (char *)whole->output + at : (char *)sum;
			kernels->run[params->dtype][i == last ? reduction : step](&span);
			inputs[0] = sum;
		}
	}
}

/* How a sum is divided and rounded. */
static struct reduce_span rounding_of(const struct reduce_params *params)
{
	float scale = (float)(params->scale ?: 1);

	return (struct reduce_span){
		.divisor_f32 = (float)params->divisor / scale,
		.scale_f16 = scale,
		.divisor_f64 = (double)params->divisor,
		.round_before_division = params->round_before_division,
	};
}

int reduce_run(const struct reduce_params *params)
{
	const struct reduce_kernels *kernels = kernels_get();
	size_t size = dtype_size(params->dtype), len = params->n_elements * size;
	size_t end = params->first * size + len;
	bool stream = len >= REDUCE_STREAM_BYTES && !outputs_alias(params);
	unsigned from = common_dtype(params);
	reduce_span_fn *run = from == params->dtype ? kernels->run[from][params->reduction]
			      : from		    ? kernels->widen[from][params->reduction]
						    : NULL;
	bool fits = true;
	struct reduce_span span = rounding_of(params);

	span.inputs = params->inputs;
	span.n_inputs = params->n_inputs;
	span.output = params->outputs[0];
	span.offset = params->first * size;
	assert(reduce_supported(params->dtype, params->reduction));
	assert(params->n_inputs && params->n_outputs);
	assert(params->reduction != REDUCTION_AVERAGE || params->divisor);
	assert(params->scale <= 1 || params->dtype == DTYPE_FLOAT16);
	for (size_t i = 0; params->input_dtypes && i < params->n_inputs; i++)
		assert(params->input_dtypes[i] == params->dtype ||
		       reduce_widens(params->input_dtypes[i], params->dtype));
	if (params->n_outputs == 1 && run) {
		span.len = len;
		span.stream = stream;
		span_run(run, &span);
		return 0;
	}

	/* What is read again, by the copies, must stay in the cache: the first output never streams. */
	for (; span.offset < end; span.offset += span.len) {
		span.len = MIN(end - span.offset, (size_t)REDUCE_PIECE_BYTES);
		if (run)
			span_run(run, &span);
		else if (!from)
			span_mixed(kernels, params, &span);
		else
			fits &= reduce_average(params->dtype, &span, params->divisor);
		span_copy(kernels, params, &span, stream);
	}
	return fits ? 0 : -ERANGE;
}

/* -- Input after input -------------------------------------------------------------------------------- */

static const struct reduce_fold *fold_of(const struct reduce_params *params)
{
	return reduce_folds_scalar[params->dtype][params->reduction]
		       ?: reduce_average_fold(params->dtype);
}

size_t reduce_fold_len(const struct reduce_params *params)
{
	return params->n_elements * fold_of(params)->size;
}

void reduce_fold_add(const struct reduce_params *params, void *acc, bool is_first)
{
	const struct reduce_fold *fold = fold_of(params);
	size_t i = 0;

	if (is_first)
		fold->begin(acc, params->inputs[i++], params->n_elements);
	for (; i < params->n_inputs; i++)
		fold->add(acc, params->inputs[i], params->n_elements);
}

int reduce_fold_end(const struct reduce_params *params, const void *acc)
{
	struct reduce_span span = rounding_of(params);
	bool fits = fold_of(params)->end(acc, params->outputs[0], params->n_elements, &span,
					 params->divisor);

	reduce_copy(&params->outputs[1], params->n_outputs - 1, params->outputs[0],
		    params->n_elements * dtype_size(params->dtype));
	return fits ? 0 : -ERANGE;
}

void reduce_copy(void *const *outputs, size_t n_outputs, const void *input, size_t len)
{
	size_t i = 0;

	for (; i + 2 <= n_outputs; i += 2)
		kernels_get()->copy_two(outputs[i], outputs[i + 1], input, len);
	if (i < n_outputs)
		memcpy(outputs[i], input, len);
}
