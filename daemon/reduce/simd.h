/*
 * The kernels of one instruction set: each is a loop of simd_loops.h for one type and reduction. A file includes this after
 * its primitives, which simd_loops.h names, and defines reduce_kernels_X with SIMD_KERNELS afterwards.
 */
#pragma once

#include "reduce/simd_loops.h"

#define SIMD_KERNEL_FROM(name, input_bytes_, bytes_, load_, step_, finish_, store_, dtype_, \
			 reduction_)                                                        \
	void name(const struct reduce_span *span)                                           \
	{                                                                                   \
		simd_run(span, (struct simd_lanes){                                         \
				       .bytes = bytes_,                                     \
				       .input_bytes = input_bytes_,                         \
				       .load = load_,                                       \
				       .step = step_,                                       \
				       .finish = finish_,                                   \
				       .store = store_,                                     \
				       .dtype = dtype_,                                     \
				       .reduction = reduction_,                             \
			       });                                                          \
	}

#define SIMD_KERNEL(name, bytes, load, step, finish, store, dtype, reduction) \
	SIMD_KERNEL_FROM(name, bytes, bytes, load, step, finish, store, dtype, reduction)

#define SIMD_WHOLE(name, step, finish, dtype, reduction)                                      \
	static SIMD_KERNEL(name, 2 * VEC_BYTES, whole_load, step, finish, whole_store, dtype, \
			   reduction)

#define SIMD_FLOAT(type, dtype)                                                          \
	SIMD_WHOLE(type##_run_sum, type##_add, type##_finish, dtype, REDUCTION_SUM)      \
	SIMD_WHOLE(type##_run_avg, type##_add, type##_average, dtype, REDUCTION_AVERAGE) \
	SIMD_WHOLE(type##_run_min, type##_min, type##_finish, dtype, REDUCTION_MIN)      \
	SIMD_WHOLE(type##_run_max, type##_max, type##_finish, dtype, REDUCTION_MAX)

/* ATTRIBUTE (static or not) of its functions; TYPE, ADD and ALL say how it is loaded and averaged, added, and stored. */
#define SIMD_HALF(attribute, name, type, add, all, dtype)                                        \
	attribute SIMD_KERNEL(name##_run_sum, VEC_BYTES, type##_load, add, keep, all, dtype,     \
			      REDUCTION_SUM)                                                     \
	attribute SIMD_KERNEL(name##_run_avg, VEC_BYTES, type##_load, add, type##_average, all,  \
			      dtype, REDUCTION_AVERAGE)                                          \
	attribute SIMD_KERNEL(name##_run_min, VEC_BYTES, type##_load, f32_min, keep, all, dtype, \
			      REDUCTION_MIN)                                                     \
	attribute SIMD_KERNEL(name##_run_max, VEC_BYTES, type##_load, f32_max, keep, all, dtype, \
			      REDUCTION_MAX)

/* To float32, as its own sums are. DTYPE: of the inputs. */
#define SIMD_WIDENING_KERNEL(name, load, step, finish, dtype, reduction)                         \
	static SIMD_KERNEL_FROM(name, VEC_BYTES, 2 * VEC_BYTES, load, step, finish, whole_store, \
				dtype, reduction)

#define SIMD_WIDENING(name, load, add, dtype)                                                  \
	SIMD_WIDENING_KERNEL(name##_run_sum, load, add, f32_finish, dtype, REDUCTION_SUM)      \
	SIMD_WIDENING_KERNEL(name##_run_avg, load, add, f32_average, dtype, REDUCTION_AVERAGE) \
	SIMD_WIDENING_KERNEL(name##_run_min, load, f32_min, f32_finish, dtype, REDUCTION_MIN)  \
	SIMD_WIDENING_KERNEL(name##_run_max, load, f32_max, f32_finish, dtype, REDUCTION_MAX)

#define SIMD_INTEGER(type, add, dtype)                                     \
	SIMD_WHOLE(type##_run_sum, add, keep, dtype, REDUCTION_SUM)        \
	SIMD_WHOLE(type##_run_min, type##_min, keep, dtype, REDUCTION_MIN) \
	SIMD_WHOLE(type##_run_max, type##_max, keep, dtype, REDUCTION_MAX)

SIMD_FLOAT(f64, DTYPE_FLOAT64)
SIMD_FLOAT(f32, DTYPE_FLOAT32)
SIMD_HALF(static, f16, f16, f16_add, f16_store, DTYPE_FLOAT16)
SIMD_HALF(static __attribute__((__unused__)), bf16, bf16, f32_add, bf16_store_all, DTYPE_BFLOAT16)
SIMD_WIDENING(f16_f32, f16_load, f16_add, DTYPE_FLOAT16)
SIMD_WIDENING(bf16_f32, bf16_widen, f32_add, DTYPE_BFLOAT16)
SIMD_INTEGER(i64, i64_add, DTYPE_INT64)
SIMD_INTEGER(i32, i32_add, DTYPE_INT32)
SIMD_INTEGER(i16, i16_add, DTYPE_INT16)
SIMD_INTEGER(i8, i8_add, DTYPE_INT8)
SIMD_INTEGER(u8, i8_add, DTYPE_UINT8)

/* True is any non-zero byte: "and" is the lesser of the bytes, "or" the greater. */
SIMD_WHOLE(bool_run_sum, u8_max, truth, DTYPE_BOOL, REDUCTION_SUM)
SIMD_WHOLE(bool_run_min, u8_min, truth, DTYPE_BOOL, REDUCTION_MIN)
SIMD_WHOLE(bool_run_max, u8_max, truth, DTYPE_BOOL, REDUCTION_MAX)

/* Each register is loaded once for both; four at a time. */
static void copy_two(void *a, void *b, const void *from, size_t len)
{
	const size_t step = 4 * VEC_BYTES;
	size_t at = 0;

	for (; len - at >= step; at += step) {
		const char *p = (const char *)from + at;
		vec v0 = vec_load(p), v1 = vec_load(p + VEC_BYTES);
		vec v2 = vec_load(p + 2 * VEC_BYTES), v3 = vec_load(p + 3 * VEC_BYTES);
		char *to[2] = { (char *)a + at, (char *)b + at };

		SIMD_UNROLL for (unsigned i = 0; i < 2; i++)
		{
			vec_store(to[i], v0);
			vec_store(to[i] + VEC_BYTES, v1);
			vec_store(to[i] + 2 * VEC_BYTES, v2);
			vec_store(to[i] + 3 * VEC_BYTES, v3);
		}
	}
	memcpy((char *)a + at, (const char *)from + at, len - at);
	memcpy((char *)b + at, (const char *)from + at, len - at);
}

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

/* bf16: what it has for bfloat16, bf16 if nothing better. */
#define SIMD_KERNELS(set, set_name, bf16) \
	const struct reduce_kernels set = {                                                        \
		.name = set_name,                                                                  \
		.copy_two = copy_two,                                                              \
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
		.widen = {                                                                         \
			[DTYPE_FLOAT16] = SIMD_FLOAT_ROW(f16_f32),                                 \
			[DTYPE_BFLOAT16] = SIMD_FLOAT_ROW(bf16_f32),                               \
		},                                                                                 \
	}
