/*
 * Chooses the set of kernels once, and runs a sum by them: which bytes are written past the
 * caches, the division of an integer average, the copies to further outputs. The agent and the
 * server call, in the pool or on the control thread.
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

int reduce_run(const struct reduce_params *params)
{
	const struct reduce_kernels *kernels = kernels_get();
	size_t size = dtype_size(params->dtype), len = params->n_elements * size;
	bool stream = len >= REDUCE_STREAM_BYTES && !outputs_alias(params);
	reduce_span_fn *run = kernels->run[params->dtype][params->reduction];
	bool fits = true;
	float scale = (float)(params->scale ?: 1);
	struct reduce_span span = {
		.inputs = params->inputs,
		.n_inputs = params->n_inputs,
		.output = params->outputs[0],
		.divisor_f32 = (float)params->divisor / scale,
		.scale_f16 = scale,
		.divisor_f64 = (double)params->divisor,
		.round_before_division = params->round_before_division,
	};

	assert(reduce_supported(params->dtype, params->reduction));
	assert(params->n_inputs && params->n_outputs);
	assert(params->reduction != REDUCTION_AVERAGE || params->divisor);
	assert(params->scale <= 1 || params->dtype == DTYPE_FLOAT16);
	if (params->n_outputs == 1 && run) {
		span.len = len;
		span.stream = stream;
		span_run(run, &span);
		return 0;
	}

	/* What is read again, by the copies, must stay in the cache: the first output never streams. */
	for (; span.offset < len; span.offset += span.len) {
		span.len = MIN(len - span.offset, (size_t)REDUCE_PIECE_BYTES);
		if (run)
			span_run(run, &span);
		else
			fits &= reduce_average(params->dtype, &span, params->divisor);
		span_copy(kernels, params, &span, stream);
	}
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
