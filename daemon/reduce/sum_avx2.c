/* Built with -mavx2 -mf16c; run only where the CPU has both. */
#include "reduce/kernel.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((__always_inline__))

typedef __m256i vec;
#define VEC_BYTES 32
struct simd_pair {
	vec a, b;
};

INLINE vec vec_load(const void *p)
{
	return _mm256_loadu_si256(p);
}

INLINE void vec_store(void *p, vec v)
{
	_mm256_storeu_si256(p, v);
}

INLINE void vec_stream(void *p, vec v)
{
	_mm256_stream_si256(p, v);
}

INLINE void vec_fence(void)
{
	_mm_sfence();
}

INLINE void half_store(void *p, __m128i v, bool stream)
{
	if (stream)
		_mm_stream_si128(p, v);
	else
		_mm_storeu_si128(p, v);
}

INLINE __m256 f32(vec v)
{
	return _mm256_castsi256_ps(v);
}

INLINE vec of_f32(__m256 v)
{
	return _mm256_castps_si256(v);
}

INLINE __m256d f64(vec v)
{
	return _mm256_castsi256_pd(v);
}

INLINE vec of_f64(__m256d v)
{
	return _mm256_castpd_si256(v);
}

INLINE vec f32_add(vec acc, vec x)
{
	return of_f32(_mm256_add_ps(f32(acc), f32(x)));
}

/* MINPS and MAXPS give their second operand when the two are equal or one is NaN. */
INLINE vec f32_min(vec acc, vec x)
{
	__m256 nan = _mm256_cmp_ps(f32(x), f32(x), _CMP_UNORD_Q);

	return of_f32(_mm256_blendv_ps(_mm256_min_ps(f32(x), f32(acc)), f32(x), nan));
}

INLINE vec f32_max(vec acc, vec x)
{
	__m256 nan = _mm256_cmp_ps(f32(x), f32(x), _CMP_UNORD_Q);

	return of_f32(_mm256_blendv_ps(_mm256_max_ps(f32(x), f32(acc)), f32(x), nan));
}

INLINE vec f32_canonical(vec v)
{
	__m256 nan = _mm256_cmp_ps(f32(v), f32(v), _CMP_UNORD_Q);

	return of_f32(_mm256_blendv_ps(f32(v), f32(_mm256_set1_epi32(F32_NAN)), nan));
}

INLINE vec f32_div(vec v, float divisor)
{
	return of_f32(_mm256_div_ps(f32(v), _mm256_set1_ps(divisor)));
}

INLINE vec f64_add(vec acc, vec x)
{
	return of_f64(_mm256_add_pd(f64(acc), f64(x)));
}

INLINE vec f64_min(vec acc, vec x)
{
	__m256d nan = _mm256_cmp_pd(f64(x), f64(x), _CMP_UNORD_Q);

	return of_f64(_mm256_blendv_pd(_mm256_min_pd(f64(x), f64(acc)), f64(x), nan));
}

INLINE vec f64_max(vec acc, vec x)
{
	__m256d nan = _mm256_cmp_pd(f64(x), f64(x), _CMP_UNORD_Q);

	return of_f64(_mm256_blendv_pd(_mm256_max_pd(f64(x), f64(acc)), f64(x), nan));
}

INLINE vec f64_canonical(vec v)
{
	__m256d nan = _mm256_cmp_pd(f64(v), f64(v), _CMP_UNORD_Q);

	return of_f64(_mm256_blendv_pd(f64(v), f64(_mm256_set1_epi64x(F64_NAN)), nan));
}

INLINE vec f64_div(vec v, double divisor)
{
	return of_f64(_mm256_div_pd(f64(v), _mm256_set1_pd(divisor)));
}

INLINE vec f16_expand(__m128i v)
{
	return of_f32(_mm256_cvtph_ps(v));
}

INLINE __m128i f16_round(vec v)
{
	return _mm256_cvtps_ph(f32(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE struct simd_pair f16_load(const void *p)
{
	const __m128i *halves = p;

	return (struct simd_pair){ f16_expand(_mm_loadu_si128(&halves[0])),
				   f16_expand(_mm_loadu_si128(&halves[1])) };
}

INLINE void f16_store(void *p, const struct simd_pair *pairs, size_t n, bool stream)
{
	__m128i *halves = p;

	_Pragma("GCC unroll 4")
	for (size_t i = 0; i < n; i++) {
		half_store(&halves[2 * i], f16_round(f32_canonical(pairs[i].a)), stream);
		half_store(&halves[2 * i + 1], f16_round(f32_canonical(pairs[i].b)), stream);
	}
}

INLINE vec f16_add(vec acc, vec x)
{
	return f32_add(acc, x);
}

INLINE vec f16_through(vec v)
{
	return f16_expand(f16_round(v));
}

/* By integers: right for all but NaNs with low bits. What is left of the low half means nothing. */
INLINE vec bf16_round(vec v)
{
	vec odd = _mm256_and_si256(_mm256_srli_epi32(v, 16), _mm256_set1_epi32(1));

	return _mm256_add_epi32(_mm256_add_epi32(v, _mm256_set1_epi32(0x7fff)), odd);
}

INLINE vec bf16_high(vec v)
{
	return _mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000));
}

/* The elements at even places and those at odd ones: no element leaves its lane, there and back. */
INLINE struct simd_pair bf16_load(const void *p)
{
	vec v = vec_load(p);

	return (struct simd_pair){ _mm256_slli_epi32(v, 16), bf16_high(v) };
}

INLINE vec bf16_expand(__m128i v)
{
	return _mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16);
}

INLINE struct simd_pair bf16_widen(const void *p)
{
	const __m128i *halves = p;

	return (struct simd_pair){ bf16_expand(_mm_loadu_si128(&halves[0])),
				   bf16_expand(_mm_loadu_si128(&halves[1])) };
}

INLINE void bf16_store(void *p, struct simd_pair pair, bool stream)
{
	vec even = _mm256_srli_epi32(bf16_round(pair.a), 16);
	vec v = _mm256_blend_epi16(bf16_round(pair.b), even, 0x55);
	vec nan = _mm256_cmpgt_epi16(_mm256_and_si256(v, _mm256_set1_epi16(0x7fff)),
				     _mm256_set1_epi16(0x7f80));

	v = _mm256_blendv_epi8(v, _mm256_set1_epi16(BF16_NAN), nan);
	if (stream)
		vec_stream(p, v);
	else
		vec_store(p, v);
}

INLINE vec bf16_through(vec v)
{
	return bf16_high(bf16_round(v));
}

INLINE vec i64_add(vec acc, vec x)
{
	return _mm256_add_epi64(acc, x);
}

INLINE vec i64_min(vec acc, vec x)
{
	return _mm256_blendv_epi8(acc, x, _mm256_cmpgt_epi64(acc, x));
}

INLINE vec i64_max(vec acc, vec x)
{
	return _mm256_blendv_epi8(acc, x, _mm256_cmpgt_epi64(x, acc));
}

#define INTEGER_OP(name, intrinsic)       \
	INLINE vec name(vec acc, vec x)   \
	{                                 \
		return intrinsic(acc, x); \
	}

INTEGER_OP(i32_add, _mm256_add_epi32)
INTEGER_OP(i32_min, _mm256_min_epi32)
INTEGER_OP(i32_max, _mm256_max_epi32)
INTEGER_OP(i16_add, _mm256_add_epi16)
INTEGER_OP(i16_min, _mm256_min_epi16)
INTEGER_OP(i16_max, _mm256_max_epi16)
INTEGER_OP(i8_add, _mm256_add_epi8)
INTEGER_OP(i8_min, _mm256_min_epi8)
INTEGER_OP(i8_max, _mm256_max_epi8)
INTEGER_OP(u8_min, _mm256_min_epu8)
INTEGER_OP(u8_max, _mm256_max_epu8)

INLINE vec bool_truth(vec v)
{
	return _mm256_min_epu8(v, _mm256_set1_epi8(1));
}

#include "reduce/simd.h"

SIMD_KERNELS(reduce_kernels_avx2, "avx2", bf16);
