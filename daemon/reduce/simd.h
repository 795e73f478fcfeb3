/*
 * The kernels of one instruction set, made from its primitives. A file that includes this has defined before, for its
 * own registers:
 *
 *	vec, VEC_BYTES			a register seen as bytes, and its size; float16 and bfloat16 fill half of one in
 *					memory and a whole one as float32
 *	vec_load, vec_store, vec_stream	VEC_BYTES from and to any address; to an aligned one past the caches
 *	vec_fence			orders streamed stores before later ones
 *	f16_load f16_store bf16_...	VEC_BYTES / 2 in memory; the store rounds and has `stream` as third argument;
 *					what is stored has canonical NaNs only
 *	f16_through, bf16_through	float32 rounded to that type and back
 *	TYPE_add, TYPE_min, TYPE_max	(acc, x) with the meaning reduce.h gives them, for f64 f32 i64 i32 i16 i8 u8
 *					(no u8_add)
 *	f32_div, f64_div, _canonical	by a scalar; NaNs made canonical
 *	bool_truth			non-zero bytes become 1
 *
 * and defines reduce_kernels_X with SIMD_KERNELS afterwards. Everything is inlined into one loop per kernel.
 */
#pragma once

#include "reduce/kernel.h"

#define SIMD_INLINE static inline __attribute__((__always_inline__))

/* What makes a kernel of the loop below; constant wherever it is used, so the calls are inlined. */
struct simd_lanes {
	size_t bytes; /* of memory that one register takes */
	vec (*load)(const void *p);
	vec (*step)(vec acc, vec x);
	vec (*finish)(vec acc, const struct reduce_span *span);
	void (*store)(void *p, vec v, bool stream);
	unsigned dtype, reduction;
};

/* What is left at the end is less than one register: the scalar kernel gives the same bits. */
static __attribute__((__noinline__)) void simd_tail(const struct reduce_span *whole, size_t done,
						    unsigned dtype, unsigned reduction)
{
	struct reduce_span span = *whole;

	span.offset += done;
	span.len -= done;
	span.stream = false;
	reduce_kernels_scalar.run[dtype][reduction](&span);
}

/*
 * Four registers at a time: enough independent additions to hide their latency, and few enough inputs' lines in
 * flight for the prefetchers to follow.
 */
SIMD_INLINE void simd_run(const struct reduce_span *span, const struct simd_lanes l)
{
	const char *first = (const char *)span->inputs[0] + span->offset;
	char *out = (char *)span->output + span->offset;
	size_t at = 0, n = span->n_inputs, b = l.bytes;

	for (; span->len - at >= 4 * b; at += 4 * b) {
		vec v0 = l.load(first + at), v1 = l.load(first + at + b);
		vec v2 = l.load(first + at + 2 * b), v3 = l.load(first + at + 3 * b);

		for (size_t k = 1; k < n; k++) {
			const char *in = (const char *)span->inputs[k] + span->offset + at;

			v0 = l.step(v0, l.load(in));
			v1 = l.step(v1, l.load(in + b));
			v2 = l.step(v2, l.load(in + 2 * b));
			v3 = l.step(v3, l.load(in + 3 * b));
		}
		l.store(out + at, l.finish(v0, span), span->stream);
		l.store(out + at + b, l.finish(v1, span), span->stream);
		l.store(out + at + 2 * b, l.finish(v2, span), span->stream);
		l.store(out + at + 3 * b, l.finish(v3, span), span->stream);
	}
	for (; span->len - at >= b; at += b) {
		vec v = l.load(first + at);

		for (size_t k = 1; k < n; k++)
			v = l.step(v, l.load((const char *)span->inputs[k] + span->offset + at));
		l.store(out + at, l.finish(v, span), span->stream);
	}
	if (at < span->len)
		simd_tail(span, at, l.dtype, l.reduction);
	if (span->stream)
		vec_fence();
}

SIMD_INLINE void whole_store(void *p, vec v, bool stream)
{
	if (stream)
		vec_stream(p, v);
	else
		vec_store(p, v);
}

SIMD_INLINE vec keep(vec acc, const struct reduce_span *span)
{
	return acc;
}

SIMD_INLINE vec truth(vec acc, const struct reduce_span *span)
{
	return bool_truth(acc);
}

SIMD_INLINE vec f64_finish(vec acc, const struct reduce_span *span)
{
	return f64_canonical(acc);
}

SIMD_INLINE vec f64_average(vec acc, const struct reduce_span *span)
{
	return f64_div(f64_canonical(acc), span->divisor_f64);
}

SIMD_INLINE vec f32_finish(vec acc, const struct reduce_span *span)
{
	return f32_canonical(acc);
}

SIMD_INLINE vec f32_average(vec acc, const struct reduce_span *span)
{
	return f32_div(f32_canonical(acc), span->divisor_f32);
}

SIMD_INLINE vec f16_average(vec acc, const struct reduce_span *span)
{
	acc = f32_canonical(acc);
	if (span->round_before_division)
		acc = f16_through(acc);
	return f32_div(acc, span->divisor_f32);
}

SIMD_INLINE vec bf16_average(vec acc, const struct reduce_span *span)
{
	acc = f32_canonical(acc);
	if (span->round_before_division)
		acc = bf16_through(acc);
	return f32_div(acc, span->divisor_f32);
}

#define SIMD_KERNEL(name, fraction_, load_, step_, finish_, store_, dtype_, reduction_) \
	static void name(const struct reduce_span *span)                                \
	{                                                                               \
		simd_run(span, (struct simd_lanes){                                     \
				       .bytes = VEC_BYTES / (fraction_),                \
				       .load = load_,                                   \
				       .step = step_,                                   \
				       .finish = finish_,                               \
				       .store = store_,                                 \
				       .dtype = dtype_,                                 \
				       .reduction = reduction_,                         \
			       });                                                      \
	}

#define SIMD_WHOLE(name, step, finish, dtype, reduction) \
	SIMD_KERNEL(name, 1, vec_load, step, finish, whole_store, dtype, reduction)

#define SIMD_FLOAT(type, dtype)                                                          \
	SIMD_WHOLE(type##_run_sum, type##_add, type##_finish, dtype, REDUCTION_SUM)      \
	SIMD_WHOLE(type##_run_avg, type##_add, type##_average, dtype, REDUCTION_AVERAGE) \
	SIMD_WHOLE(type##_run_min, type##_min, type##_finish, dtype, REDUCTION_MIN)      \
	SIMD_WHOLE(type##_run_max, type##_max, type##_finish, dtype, REDUCTION_MAX)

#define SIMD_HALF(type, dtype)                                                                    \
	SIMD_KERNEL(type##_run_sum, 2, type##_load, f32_add, f32_finish, type##_store, dtype,     \
		    REDUCTION_SUM)                                                                \
	SIMD_KERNEL(type##_run_avg, 2, type##_load, f32_add, type##_average, type##_store, dtype, \
		    REDUCTION_AVERAGE)                                                            \
	SIMD_KERNEL(type##_run_min, 2, type##_load, f32_min, f32_finish, type##_store, dtype,     \
		    REDUCTION_MIN)                                                                \
	SIMD_KERNEL(type##_run_max, 2, type##_load, f32_max, f32_finish, type##_store, dtype,     \
		    REDUCTION_MAX)

#define SIMD_INTEGER(type, add, dtype)                                     \
	SIMD_WHOLE(type##_run_sum, add, keep, dtype, REDUCTION_SUM)        \
	SIMD_WHOLE(type##_run_min, type##_min, keep, dtype, REDUCTION_MIN) \
	SIMD_WHOLE(type##_run_max, type##_max, keep, dtype, REDUCTION_MAX)

SIMD_FLOAT(f64, DTYPE_FLOAT64)
SIMD_FLOAT(f32, DTYPE_FLOAT32)
SIMD_HALF(f16, DTYPE_FLOAT16)
SIMD_HALF(bf16, DTYPE_BFLOAT16)
SIMD_INTEGER(i64, i64_add, DTYPE_INT64)
SIMD_INTEGER(i32, i32_add, DTYPE_INT32)
SIMD_INTEGER(i16, i16_add, DTYPE_INT16)
SIMD_INTEGER(i8, i8_add, DTYPE_INT8)
SIMD_INTEGER(u8, i8_add, DTYPE_UINT8)

/* True is any non-zero byte: "and" is the lesser of the bytes, "or" the greater. */
SIMD_WHOLE(bool_run_sum, u8_max, truth, DTYPE_BOOL, REDUCTION_SUM)
SIMD_WHOLE(bool_run_min, u8_min, truth, DTYPE_BOOL, REDUCTION_MIN)
SIMD_WHOLE(bool_run_max, u8_max, truth, DTYPE_BOOL, REDUCTION_MAX)

#define SIMD_FLOAT_ROW(type)                                                            \
	{                                                                               \
		[REDUCTION_SUM] = type##_run_sum, [REDUCTION_AVERAGE] = type##_run_avg, \
		[REDUCTION_MIN] = type##_run_min, [REDUCTION_MAX] = type##_run_max,     \
	}
#define SIMD_INTEGER_ROW(type)                                                      \
	{                                                                           \
		[REDUCTION_SUM] = type##_run_sum, [REDUCTION_MIN] = type##_run_min, \
		[REDUCTION_MAX] = type##_run_max,                                   \
	}

#define SIMD_KERNELS(set, set_name) \
	const struct reduce_kernels set = {                                                        \
		.name = set_name,                                                                  \
		.run = {                                                                           \
			[DTYPE_FLOAT64] = SIMD_FLOAT_ROW(f64),                                     \
			[DTYPE_FLOAT32] = SIMD_FLOAT_ROW(f32),                                     \
			[DTYPE_FLOAT16] = SIMD_FLOAT_ROW(f16),                                     \
			[DTYPE_BFLOAT16] = SIMD_FLOAT_ROW(bf16),                                   \
			[DTYPE_INT64] = SIMD_INTEGER_ROW(i64),                                     \
			[DTYPE_INT32] = SIMD_INTEGER_ROW(i32),                                     \
			[DTYPE_INT16] = SIMD_INTEGER_ROW(i16),                                     \
			[DTYPE_INT8] = SIMD_INTEGER_ROW(i8),                                       \
			[DTYPE_UINT8] = SIMD_INTEGER_ROW(u8),                                      \
			[DTYPE_BOOL] = SIMD_INTEGER_ROW(bool),                                     \
		},                                                                                 \
	}
