/*
 * Inside reduce/: what reduce.c asks of a set of kernels. A kernel reduces one span: it reads each element of every
 * input before it writes that element of the output, so the output may be one of the inputs. All kernels of a type
 * and reduction give the same bits; sum_scalar.c is the plain statement of what those are.
 */
#pragma once

#include "proto/types.h"

#define REDUCE_STREAM_ALIGN 64 /* the widest store */

#define F32_NAN	 0x7fc00000u
#define F64_NAN	 0x7ff8000000000000ull
#define F16_NAN	 0x7e00u
#define BF16_NAN 0x7fc0u

struct reduce_span {
	const void *const *inputs;
	size_t n_inputs;
	void *output;
	size_t offset;	   /* of the span in the output, bytes; in every input so many elements */
	size_t len;	   /* bytes of output, whole elements */
	float divisor_f32; /* over scale */
	float scale_f16; /* by which a sum of float16 is divided before it is rounded; see reduce_params */
	double divisor_f64;
	bool round_before_division;
	/* The output is aligned to REDUCE_STREAM_ALIGN at offset and too large to be found in a cache later. */
	bool stream;
};

typedef void reduce_span_fn(const struct reduce_span *span);

struct reduce_kernels {
	const char *name;
	/* Copies len bytes to two places, which overlap neither each other nor from. */
	void (*copy_two)(void *a, void *b, const void *from, size_t len);
	/* NULL where there is none: averages of integers are reduce_average(). */
	reduce_span_fn *run[DTYPE_MAX_ + 1][REDUCTION_MAX_ + 1];
	/* By the type of all inputs: float16 or bfloat16, of which the output is the reduction in float32. */
	reduce_span_fn *widen[DTYPE_BFLOAT16 + 1][REDUCTION_MAX_ + 1];
};

extern const struct reduce_kernels reduce_kernels_scalar;
extern const struct reduce_kernels reduce_kernels_avx2; /* x86_64 only; needs AVX2 and F16C */
extern const struct reduce_kernels
	reduce_kernels_avx512; /* x86_64 only; needs AVX-512 F, BW, DQ, VL */
extern const struct reduce_kernels
	reduce_kernels_avx512_bf16; /* x86_64 only; needs AVX-512 BF16 as well */
extern const struct reduce_kernels
	reduce_kernels_avx512_256;			/* x86_64 only; needs that, FMA and F16C */
extern const struct reduce_kernels reduce_kernels_neon; /* aarch64 only */

/*
 * The same reduction, input after input: what was accumulated stays in memory, and is of a type that may be wider. n: elements.
 * Returns whether the result is of the type; only an average of integers may not be.
 */
struct reduce_fold {
	size_t size; /* of an accumulated element */
	void (*begin)(void *acc, const void *input, size_t n);
	void (*add)(void *acc, const void *input, size_t n);
	bool (*end)(const void *acc, void *output, size_t n, const struct reduce_span *span,
		    uint64_t divisor);
};

extern const struct reduce_fold *const reduce_folds_scalar[DTYPE_MAX_ + 1][REDUCTION_MAX_ + 1];
/* Averages of integers. */
const struct reduce_fold *reduce_average_fold(unsigned dtype);

/*
 * The average of integers, rounded down: dtype is one of theirs, divisor > 0. Like a kernel, but for `stream`. Whether all are
 * numbers of the type; what is not is written modulo 2^bits.
 */
bool reduce_average(unsigned dtype, const struct reduce_span *span, uint64_t divisor);

/* Those of avx512_bf16 and of avx512_256 for bfloat16. */
reduce_span_fn reduce_bf16_native_run_sum, reduce_bf16_native_run_avg, reduce_bf16_native_run_min,
	reduce_bf16_native_run_max;
reduce_span_fn reduce_bf16_fma_run_sum, reduce_bf16_fma_run_avg, reduce_bf16_fma_run_min,
	reduce_bf16_fma_run_max;
