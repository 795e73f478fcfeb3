/*
 * Built with -mavx512f -mavx512bw -mavx512dq -mavx512vl; run only where the CPU has them all. The bfloat16 instructions
 * of some (VCVTNEPS2BF16) are of no use: they take denormals for zero.
 */
#include "reduce/kernel.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((__always_inline__))

typedef __m512i vec;
#define VEC_BYTES 64

INLINE vec vec_load(const void *p)
{
	return _mm512_loadu_si512(p);
}

INLINE void vec_store(void *p, vec v)
{
	_mm512_storeu_si512(p, v);
}

INLINE void vec_stream(void *p, vec v)
{
	_mm512_stream_si512(p, v);
}

INLINE void vec_fence(void)
{
	_mm_sfence();
}

INLINE void half_store(void *p, __m256i v, bool stream)
{
	if (stream)
		_mm256_stream_si256(p, v);
	else
		_mm256_storeu_si256(p, v);
}

INLINE __m512 f32(vec v)
{
	return _mm512_castsi512_ps(v);
}

INLINE vec of_f32(__m512 v)
{
	return _mm512_castps_si512(v);
}

INLINE __m512d f64(vec v)
{
	return _mm512_castsi512_pd(v);
}

INLINE vec of_f64(__m512d v)
{
	return _mm512_castpd_si512(v);
}

INLINE vec f32_add(vec acc, vec x)
{
	return of_f32(_mm512_add_ps(f32(acc), f32(x)));
}

/* MINPS and MAXPS give their second operand when the two are equal or one is NaN. */
INLINE vec f32_min(vec acc, vec x)
{
	__mmask16 nan = _mm512_cmp_ps_mask(f32(x), f32(x), _CMP_UNORD_Q);

	return of_f32(_mm512_mask_mov_ps(_mm512_min_ps(f32(x), f32(acc)), nan, f32(x)));
}

INLINE vec f32_max(vec acc, vec x)
{
	__mmask16 nan = _mm512_cmp_ps_mask(f32(x), f32(x), _CMP_UNORD_Q);

	return of_f32(_mm512_mask_mov_ps(_mm512_max_ps(f32(x), f32(acc)), nan, f32(x)));
}

INLINE vec f32_canonical(vec v)
{
	__mmask16 nan = _mm512_cmp_ps_mask(f32(v), f32(v), _CMP_UNORD_Q);

	return _mm512_mask_mov_epi32(v, nan, _mm512_set1_epi32(F32_NAN));
}

INLINE vec f32_div(vec v, float divisor)
{
	return of_f32(_mm512_div_ps(f32(v), _mm512_set1_ps(divisor)));
}

INLINE vec f64_add(vec acc, vec x)
{
	return of_f64(_mm512_add_pd(f64(acc), f64(x)));
}

INLINE vec f64_min(vec acc, vec x)
{
	__mmask8 nan = _mm512_cmp_pd_mask(f64(x), f64(x), _CMP_UNORD_Q);

	return of_f64(_mm512_mask_mov_pd(_mm512_min_pd(f64(x), f64(acc)), nan, f64(x)));
}

INLINE vec f64_max(vec acc, vec x)
{
	__mmask8 nan = _mm512_cmp_pd_mask(f64(x), f64(x), _CMP_UNORD_Q);

	return of_f64(_mm512_mask_mov_pd(_mm512_max_pd(f64(x), f64(acc)), nan, f64(x)));
}

INLINE vec f64_canonical(vec v)
{
	__mmask8 nan = _mm512_cmp_pd_mask(f64(v), f64(v), _CMP_UNORD_Q);

	return _mm512_mask_mov_epi64(v, nan, _mm512_set1_epi64(F64_NAN));
}

INLINE vec f64_div(vec v, double divisor)
{
	return of_f64(_mm512_div_pd(f64(v), _mm512_set1_pd(divisor)));
}

INLINE vec f16_expand(__m256i v)
{
	return of_f32(_mm512_cvtph_ps(v));
}

INLINE __m256i f16_round(vec v)
{
	return _mm512_cvtps_ph(f32(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec f16_load(const void *p)
{
	return f16_expand(_mm256_loadu_si256(p));
}

INLINE void f16_store(void *p, vec v, bool stream)
{
	half_store(p, f16_round(v), stream);
}

INLINE vec f16_through(vec v)
{
	return f16_expand(f16_round(v));
}

/* By integers: right for all but NaNs that are not canonical. */
INLINE vec bf16_round(vec v)
{
	vec odd = _mm512_and_si512(_mm512_srli_epi32(v, 16), _mm512_set1_epi32(1));

	v = _mm512_add_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(0x7fff)), odd);
	return _mm512_srli_epi32(v, 16);
}

INLINE vec bf16_load(const void *p)
{
	return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16);
}

INLINE void bf16_store(void *p, vec v, bool stream)
{
	half_store(p, _mm512_cvtepi32_epi16(bf16_round(v)), stream);
}

INLINE vec bf16_through(vec v)
{
	return _mm512_slli_epi32(bf16_round(v), 16);
}

#define INTEGER_OP(name, intrinsic)       \
	INLINE vec name(vec acc, vec x)   \
	{                                 \
		return intrinsic(acc, x); \
	}

INTEGER_OP(i64_add, _mm512_add_epi64)
INTEGER_OP(i64_min, _mm512_min_epi64)
INTEGER_OP(i64_max, _mm512_max_epi64)
INTEGER_OP(i32_add, _mm512_add_epi32)
INTEGER_OP(i32_min, _mm512_min_epi32)
INTEGER_OP(i32_max, _mm512_max_epi32)
INTEGER_OP(i16_add, _mm512_add_epi16)
INTEGER_OP(i16_min, _mm512_min_epi16)
INTEGER_OP(i16_max, _mm512_max_epi16)
INTEGER_OP(i8_add, _mm512_add_epi8)
INTEGER_OP(i8_min, _mm512_min_epi8)
INTEGER_OP(i8_max, _mm512_max_epi8)
INTEGER_OP(u8_min, _mm512_min_epu8)
INTEGER_OP(u8_max, _mm512_max_epu8)

INLINE vec bool_truth(vec v)
{
	return _mm512_min_epu8(v, _mm512_set1_epi8(1));
}

#include "reduce/simd.h"

SIMD_KERNELS(reduce_kernels_avx512, "avx512");
