/*
 * What the kernels of AVX-512 are made of, for registers of VEC_BYTES, 64 or 32: the same instructions, masks and number of
 * registers. A file defines that, includes this, then avx512_half.h and simd.h.
 */
#pragma once

#include "reduce/kernel.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((__always_inline__))

#if VEC_BYTES == 64

typedef __m512i vec;
typedef __m512 vec_f32;
typedef __m512d vec_f64;
typedef __m256i half;
/* A bit for each element of so many bits. */
typedef __mmask8 mask_64;
typedef __mmask16 mask_32;
typedef __mmask32 mask_16;
#define MM(name)    _mm512_##name
#define MM_SI(name) _mm512_##name##_si512
#define HALF(name)  _mm256_##name##_si256
#define SET1_64(x)  _mm512_set1_epi64(x)

#else

typedef __m256i vec;
typedef __m256 vec_f32;
typedef __m256d vec_f64;
typedef __m128i half;
typedef __mmask8 mask_64;
typedef __mmask8 mask_32;
typedef __mmask16 mask_16;
#define MM(name)    _mm256_##name
#define MM_SI(name) _mm256_##name##_si256
#define HALF(name)  _mm_##name##_si128
#define SET1_64(x)  _mm256_set1_epi64x(x)

#endif

struct simd_pair {
	vec a, b;
};

INLINE vec vec_load(const void *p)
{
	return MM_SI(loadu)(p);
}

INLINE void vec_store(void *p, vec v)
{
	MM_SI(storeu)(p, v);
}

INLINE void vec_stream(void *p, vec v)
{
	MM_SI(stream)(p, v);
}

INLINE void vec_fence(void)
{
	_mm_sfence();
}

INLINE void half_store(void *p, half v, bool stream)
{
	if (stream)
		HALF(stream)(p, v);
	else
		HALF(storeu)(p, v);
}

INLINE vec_f32 f32(vec v)
{
	return (vec_f32)v;
}

INLINE vec of_f32(vec_f32 v)
{
	return (vec)v;
}

INLINE vec_f64 f64(vec v)
{
	return (vec_f64)v;
}

INLINE vec of_f64(vec_f64 v)
{
	return (vec)v;
}

INLINE vec f32_add(vec acc, vec x)
{
	return of_f32(MM(add_ps)(f32(acc), f32(x)));
}

/* MINPS and MAXPS give their second operand when the two are equal or one is NaN. */
INLINE vec f32_min(vec acc, vec x)
{
	mask_32 nan = MM(cmp_ps_mask)(f32(x), f32(x), _CMP_UNORD_Q);

	return of_f32(MM(mask_mov_ps)(MM(min_ps)(f32(x), f32(acc)), nan, f32(x)));
}

INLINE vec f32_max(vec acc, vec x)
{
	mask_32 nan = MM(cmp_ps_mask)(f32(x), f32(x), _CMP_UNORD_Q);

	return of_f32(MM(mask_mov_ps)(MM(max_ps)(f32(x), f32(acc)), nan, f32(x)));
}

INLINE vec f32_canonical(vec v)
{
	mask_32 nan = MM(cmp_ps_mask)(f32(v), f32(v), _CMP_UNORD_Q);

	return MM(mask_mov_epi32)(v, nan, MM(set1_epi32)(F32_NAN));
}

INLINE vec f32_div(vec v, float divisor)
{
	return of_f32(MM(div_ps)(f32(v), MM(set1_ps)(divisor)));
}

INLINE vec f64_add(vec acc, vec x)
{
	return of_f64(MM(add_pd)(f64(acc), f64(x)));
}

INLINE vec f64_min(vec acc, vec x)
{
	mask_64 nan = MM(cmp_pd_mask)(f64(x), f64(x), _CMP_UNORD_Q);

	return of_f64(MM(mask_mov_pd)(MM(min_pd)(f64(x), f64(acc)), nan, f64(x)));
}

INLINE vec f64_max(vec acc, vec x)
{
	mask_64 nan = MM(cmp_pd_mask)(f64(x), f64(x), _CMP_UNORD_Q);

	return of_f64(MM(mask_mov_pd)(MM(max_pd)(f64(x), f64(acc)), nan, f64(x)));
}

INLINE vec f64_canonical(vec v)
{
	mask_64 nan = MM(cmp_pd_mask)(f64(v), f64(v), _CMP_UNORD_Q);

	return MM(mask_mov_epi64)(v, nan, SET1_64(F64_NAN));
}

INLINE vec f64_div(vec v, double divisor)
{
	return of_f64(MM(div_pd)(f64(v), MM(set1_pd)(divisor)));
}

#define INTEGER_OP(name, intrinsic)       \
	INLINE vec name(vec acc, vec x)   \
	{                                 \
		return intrinsic(acc, x); \
	}

INTEGER_OP(i64_add, MM(add_epi64))
INTEGER_OP(i64_min, MM(min_epi64))
INTEGER_OP(i64_max, MM(max_epi64))
INTEGER_OP(i32_add, MM(add_epi32))
INTEGER_OP(i32_min, MM(min_epi32))
INTEGER_OP(i32_max, MM(max_epi32))
INTEGER_OP(i16_add, MM(add_epi16))
INTEGER_OP(i16_min, MM(min_epi16))
INTEGER_OP(i16_max, MM(max_epi16))
INTEGER_OP(i8_add, MM(add_epi8))
INTEGER_OP(i8_min, MM(min_epi8))
INTEGER_OP(i8_max, MM(max_epi8))
INTEGER_OP(u8_min, MM(min_epu8))
INTEGER_OP(u8_max, MM(max_epu8))

INLINE vec bool_truth(vec v)
{
	return MM(min_epu8)(v, MM(set1_epi8)(1));
}
