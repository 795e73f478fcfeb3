/*
 * The kernels in plain C, for every type and reduction, for processors without others. The sets
 * for wider registers have to yield the same bits.
 */
#include "reduce/convert.h"
#include "reduce/kernel.h"
#include <float.h>

static_assert(FLT_EVAL_METHOD == 0, "float32 sums are rounded to float32 at each step");

/*
 * Elements summed at a time: the accumulators stay in the first-level cache, and the loops over
 * them vectorise.
 */
#define BLOCK 256

/*
 * in_t and out_t are elements in memory, acc_t the type they are accumulated in. The loops are functions of
 * their own: only so does the compiler see that the accumulators, a local array, are neither input
 * nor output, and vectorises.
 */
#define KERNEL_FROM(name, in_t, out_t, acc_t, load, step, finish, store)                          \
	static _noinline_ void name##_begin(acc_t *restrict acc, const in_t *restrict in,         \
					    size_t n)                                             \
	{                                                                                         \
		for (size_t i = 0; i < n; i++)                                                    \
			acc[i] = load(in[i]);                                                     \
	}                                                                                         \
	static _noinline_ void name##_add(acc_t *restrict acc, const in_t *restrict in, size_t n) \
	{                                                                                         \
		for (size_t i = 0; i < n; i++)                                                    \
			acc[i] = step(acc[i], load(in[i]));                                       \
	}                                                                                         \
	static _noinline_ void name##_end(const acc_t *restrict acc, out_t *restrict out,         \
					  size_t n, const struct reduce_span *span)               \
	{                                                                                         \
		for (size_t i = 0; i < n; i++)                                                    \
			out[i] = store(finish(acc[i], span));                                     \
	}                                                                                         \
	static void name(const struct reduce_span *span)                                          \
	{                                                                                         \
		const size_t n_all = span->len / sizeof(out_t),                                   \
			     first = span->offset / sizeof(out_t);                                \
		acc_t acc[BLOCK];                                                                 \
                                                                                                  \
		for (size_t at = 0; at < n_all; at += BLOCK) {                                    \
			size_t n = MIN(n_all - at, (size_t)BLOCK);                                \
                                                                                                  \
			name##_begin(acc, (const in_t *)span->inputs[0] + first + at, n);         \
			for (size_t k = 1; k < span->n_inputs; k++)                               \
				name##_add(acc, (const in_t *)span->inputs[k] + first + at, n);   \
			name##_end(acc, (out_t *)span->output + first + at, n, span);             \
		}                                                                                 \
	}

#define KERNEL(name, mem_t, acc_t, load, step, finish, store)                             \
	KERNEL_FROM(name, mem_t, mem_t, acc_t, load, step, finish, store)                 \
	static void name##_fold_begin(void *acc, const void *input, size_t n)             \
	{                                                                                 \
		name##_begin(acc, input, n);                                              \
	}                                                                                 \
	static void name##_fold_add(void *acc, const void *input, size_t n)               \
	{                                                                                 \
		name##_add(acc, input, n);                                                \
	}                                                                                 \
	static bool name##_fold_end(const void *acc, void *output, size_t n,              \
				    const struct reduce_span *span, uint64_t divisor)     \
	{                                                                                 \
		(void)divisor;                                                            \
		name##_end(acc, output, n, span);                                         \
		return true;                                                              \
	}                                                                                 \
	static const struct reduce_fold name##_fold = { sizeof(acc_t), name##_fold_begin, \
							name##_fold_add, name##_fold_end };

#define SAME(x)		 (x)
#define KEEP(acc, span)	 (acc)
#define ADD(acc, x)	 ((__typeof__(acc))((acc) + (x)))
#define LESSER(acc, x)	 ((x) < (acc) ? (x) : (acc))
#define GREATER(acc, x)	 ((x) > (acc) ? (x) : (acc))
#define TRUTH(acc, span) ((acc) != 0)
#define OR(acc, x)	 ((acc) | (x))

/* Bitwise or: a branch would keep the loops from being vectorised. */
#define FLOAT_EXTREMES(type, float_t)                                \
	static inline float_t type##_lesser(float_t acc, float_t x)  \
	{                                                            \
		return ((x < acc) | (x != x)) ? x : acc;             \
	}                                                            \
	static inline float_t type##_greater(float_t acc, float_t x) \
	{                                                            \
		return ((x > acc) | (x != x)) ? x : acc;             \
	}

FLOAT_EXTREMES(f32, float)
FLOAT_EXTREMES(f64, double)

/* Division keeps a canonical NaN as it is, so all is well if NaNs are made canonical first. */
static inline float f32_canonical(float f)
{
	return f != f ? f32_of_bits(F32_NAN) : f;
}

static inline float f32_finish(float acc, const struct reduce_span *span)
{
	return f32_canonical(acc);
}

static inline float f32_average(float acc, const struct reduce_span *span)
{
	return f32_canonical(acc) / span->divisor_f32;
}

static inline float f16_average(float acc, const struct reduce_span *span)
{
	acc = span->round_before_division ? f32_of_f16(f16_of_f32(acc / span->scale_f16))
					  : f32_canonical(acc);
	return acc / span->divisor_f32;
}

static inline float bf16_average(float acc, const struct reduce_span *span)
{
	acc = span->round_before_division ? f32_of_bf16(bf16_of_f32(acc)) : f32_canonical(acc);
	return acc / span->divisor_f32;
}

static inline double f64_finish(double acc, const struct reduce_span *span)
{
	uint64_t bits = F64_NAN;
	double canonical;

	memcpy(&canonical, &bits, sizeof(canonical));
	return acc != acc ? canonical : acc;
}

static inline double f64_average(double acc, const struct reduce_span *span)
{
	return f64_finish(acc, span) / span->divisor_f64;
}

KERNEL(f64_sum, double, double, SAME, ADD, f64_finish, SAME)
KERNEL(f64_avg, double, double, SAME, ADD, f64_average, SAME)
KERNEL(f64_min, double, double, SAME, f64_lesser, f64_finish, SAME)
KERNEL(f64_max, double, double, SAME, f64_greater, f64_finish, SAME)

KERNEL(f32_sum, float, float, SAME, ADD, f32_finish, SAME)
KERNEL(f32_avg, float, float, SAME, ADD, f32_average, SAME)
KERNEL(f32_min, float, float, SAME, f32_lesser, f32_finish, SAME)
KERNEL(f32_max, float, float, SAME, f32_greater, f32_finish, SAME)

KERNEL(f16_sum, uint16_t, float, f32_of_f16, ADD, KEEP, f16_of_f32)
KERNEL(f16_avg, uint16_t, float, f32_of_f16, ADD, f16_average, f16_of_f32)
KERNEL(f16_min, uint16_t, float, f32_of_f16, f32_lesser, KEEP, f16_of_f32)
KERNEL(f16_max, uint16_t, float, f32_of_f16, f32_greater, KEEP, f16_of_f32)

KERNEL(bf16_sum, uint16_t, float, f32_of_bf16, ADD, KEEP, bf16_of_f32)
KERNEL(bf16_avg, uint16_t, float, f32_of_bf16, ADD, bf16_average, bf16_of_f32)
KERNEL(bf16_min, uint16_t, float, f32_of_bf16, f32_lesser, KEEP, bf16_of_f32)
KERNEL(bf16_max, uint16_t, float, f32_of_bf16, f32_greater, KEEP, bf16_of_f32)

/* As those of float32, of what is widened. */
#define WIDENING(type, load)                                                                    \
	KERNEL_FROM(type##_f32_sum, uint16_t, float, float, load, ADD, f32_finish, SAME)        \
	KERNEL_FROM(type##_f32_avg, uint16_t, float, float, load, ADD, f32_average, SAME)       \
	KERNEL_FROM(type##_f32_min, uint16_t, float, float, load, f32_lesser, f32_finish, SAME) \
	KERNEL_FROM(type##_f32_max, uint16_t, float, float, load, f32_greater, f32_finish, SAME)

WIDENING(f16, f32_of_f16)
WIDENING(bf16, f32_of_bf16)

/* Sums wrap, so they are sums of unsigned numbers. */
KERNEL(i64_sum, uint64_t, uint64_t, SAME, ADD, KEEP, SAME)
KERNEL(i64_min, int64_t, int64_t, SAME, LESSER, KEEP, SAME)
KERNEL(i64_max, int64_t, int64_t, SAME, GREATER, KEEP, SAME)
KERNEL(i32_sum, uint32_t, uint32_t, SAME, ADD, KEEP, SAME)
KERNEL(i32_min, int32_t, int32_t, SAME, LESSER, KEEP, SAME)
KERNEL(i32_max, int32_t, int32_t, SAME, GREATER, KEEP, SAME)
KERNEL(i16_sum, uint16_t, uint16_t, SAME, ADD, KEEP, SAME)
KERNEL(i16_min, int16_t, int16_t, SAME, LESSER, KEEP, SAME)
KERNEL(i16_max, int16_t, int16_t, SAME, GREATER, KEEP, SAME)
KERNEL(i8_sum, uint8_t, uint8_t, SAME, ADD, KEEP, SAME)
KERNEL(i8_min, int8_t, int8_t, SAME, LESSER, KEEP, SAME)
KERNEL(i8_max, int8_t, int8_t, SAME, GREATER, KEEP, SAME)
KERNEL(u8_min, uint8_t, uint8_t, SAME, LESSER, KEEP, SAME)
KERNEL(u8_max, uint8_t, uint8_t, SAME, GREATER, KEEP, SAME)

/* The lesser of two truths is their "and", whatever non-zero bytes stand for true. */
KERNEL(bool_or, uint8_t, uint8_t, SAME, OR, TRUTH, SAME)
KERNEL(bool_and, uint8_t, uint8_t, SAME, LESSER, TRUTH, SAME)

/* Of each type and reduction a kernel, or the fold beside it. */
#define AS_KERNEL(name) name
#define AS_FOLD(name)	&name##_fold
#define FLOAT_ROW(as, type)                                                             \
	{                                                                               \
		[REDUCTION_SUM] = as(type##_sum), [REDUCTION_AVERAGE] = as(type##_avg), \
		[REDUCTION_MIN] = as(type##_min), [REDUCTION_MAX] = as(type##_max),     \
	}
#define INTEGER_ROW(as, type, sum)                                           \
	{                                                                    \
		[REDUCTION_SUM] = as(sum), [REDUCTION_MIN] = as(type##_min), \
		[REDUCTION_MAX] = as(type##_max),                            \
	}
#define BOOL_ROW(as)                                                           \
	{                                                                      \
		[REDUCTION_SUM] = as(bool_or), [REDUCTION_MIN] = as(bool_and), \
		[REDUCTION_MAX] = as(bool_or),                                 \
	}
#define ALL_ROWS(as)                                                                          \
	{                                                                                     \
		[DTYPE_FLOAT64] = FLOAT_ROW(as, f64), [DTYPE_FLOAT32] = FLOAT_ROW(as, f32),   \
		[DTYPE_FLOAT16] = FLOAT_ROW(as, f16), [DTYPE_BFLOAT16] = FLOAT_ROW(as, bf16), \
		[DTYPE_INT64] = INTEGER_ROW(as, i64, i64_sum),                                \
		[DTYPE_INT32] = INTEGER_ROW(as, i32, i32_sum),                                \
		[DTYPE_INT16] = INTEGER_ROW(as, i16, i16_sum),                                \
		[DTYPE_INT8] = INTEGER_ROW(as, i8, i8_sum),                                   \
		[DTYPE_UINT8] = INTEGER_ROW(as, u8, i8_sum), [DTYPE_BOOL] = BOOL_ROW(as),     \
	}

static void copy_two(void *a, void *b, const void *from, size_t len)
{
	memcpy(a, from, len);
	memcpy(b, from, len);
}

const struct reduce_kernels reduce_kernels_scalar = {
	.name = "scalar",
	.copy_two = copy_two,
	.run = ALL_ROWS(AS_KERNEL),
	.widen = {
		[DTYPE_FLOAT16] = FLOAT_ROW(AS_KERNEL, f16_f32),
		[DTYPE_BFLOAT16] = FLOAT_ROW(AS_KERNEL, bf16_f32),
	},
};

const struct reduce_fold *const reduce_folds_scalar[DTYPE_MAX_ + 1][REDUCTION_MAX_ + 1] =
	ALL_ROWS(AS_FOLD);
