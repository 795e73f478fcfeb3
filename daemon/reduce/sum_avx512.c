/*
 * Built with -mavx512f -mavx512bw -mavx512dq -mavx512vl; run only where the CPU has them all. Where it has the bfloat16
 * instructions as well, bfloat16 has kernels of its own.
 */
#include "reduce/kernel.h"
#include <immintrin.h>

#define INLINE static inline __attribute__((__always_inline__))

typedef __m512i vec;
#define VEC_BYTES 64
struct simd_pair {
	vec a, b;
};

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

INLINE struct simd_pair f16_load(const void *p)
{
	const __m256i *halves = p;

	return (struct simd_pair){ f16_expand(_mm256_loadu_si256(&halves[0])),
				   f16_expand(_mm256_loadu_si256(&halves[1])) };
}

/* Of what nothing is to be added to. NaNs are rare: they are looked for in all pairs at once. */
INLINE void f16_store(void *p, const struct simd_pair *pairs, size_t n, bool stream)
{
	__m256i *halves = p;
	unsigned nan = 0;

	_Pragma("GCC unroll 4")
	for (size_t i = 0; i < n; i++)
		nan |= _mm512_cmp_ps_mask(f32(pairs[i].a), f32(pairs[i].b), _CMP_UNORD_Q);
	if (unlikely(nan)) {
		for (size_t i = 0; i < n; i++) {
			half_store(&halves[2 * i], f16_round(f32_canonical(pairs[i].a)), stream);
			half_store(&halves[2 * i + 1], f16_round(f32_canonical(pairs[i].b)),
				   stream);
		}
		return;
	}
	_Pragma("GCC unroll 4")
	for (size_t i = 0; i < n; i++) {
		half_store(&halves[2 * i], f16_round(pairs[i].a), stream);
		half_store(&halves[2 * i + 1], f16_round(pairs[i].b), stream);
	}
}

/*
 * x times 1, and acc, rounded once: the sum, to the bit. Conversions take the places where additions are done, and leave those of
 * multiplications free. Sums of float16 are multiples of 2^-24, so no denormal of float32 makes it slow.
 */
INLINE vec f16_add(vec acc, vec x)
{
	return of_f32(_mm512_fmadd_ps(f32(x), _mm512_set1_ps(1), f32(acc)));
}

INLINE vec f16_through(vec v)
{
	return f16_expand(f16_round(v));
}

/* By integers: right for all but NaNs with low bits. What is left of the low half means nothing. */
INLINE vec bf16_round(vec v)
{
	__mmask16 odd = _mm512_test_epi32_mask(v, _mm512_set1_epi32(0x10000));

	v = _mm512_add_epi32(v, _mm512_set1_epi32(0x7fff));
	return _mm512_mask_add_epi32(v, odd, v, _mm512_set1_epi32(1));
}

INLINE vec bf16_high(vec v)
{
	return _mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000));
}

/* The elements at even places and those at odd ones: no element leaves its lane, there and back. */
INLINE struct simd_pair bf16_load(const void *p)
{
	vec v = vec_load(p);

	return (struct simd_pair){ _mm512_slli_epi32(v, 16), bf16_high(v) };
}

INLINE void whole_put(void *p, vec v, bool stream)
{
	if (stream)
		vec_stream(p, v);
	else
		vec_store(p, v);
}

INLINE void bf16_store(void *p, struct simd_pair pair, bool stream)
{
	vec even = _mm512_srli_epi32(bf16_round(pair.a), 16);
	vec v = _mm512_mask_mov_epi16(bf16_round(pair.b), 0x55555555, even);
	__mmask32 nan =
		_mm512_cmpgt_epu16_mask(_mm512_add_epi16(v, v), _mm512_set1_epi16((short)0xff00));

	whole_put(p, _mm512_mask_mov_epi16(v, nan, _mm512_set1_epi16(BF16_NAN)), stream);
}

INLINE vec bf16_through(vec v)
{
	return bf16_high(bf16_round(v));
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

SIMD_KERNELS(reduce_kernels_avx512, "avx512", bf16);

#define NATIVE __attribute__((target("avx512bf16")))
/* Of VFPCLASSPS: quiet and signalling NaNs, denormals. */
#define CLASS_SPECIAL (0x01 | 0x80 | 0x20)

/*
 * VCVTNE2PS2BF16 rounds as we do, but takes denormals for zero and keeps what a NaN carries: where there is one among so
 * many, they are all stored the other way.
 */
NATIVE INLINE void native_store_all(void *p, const struct simd_pair *pairs, size_t n, bool stream)
{
	static const uint16_t places[32] = {
		0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
		8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31,
	};
	vec alternate = vec_load(places);
	unsigned special = 0;

	SIMD_UNROLL for (size_t i = 0; i < n; i++) special |=
		_mm512_fpclass_ps_mask(f32(pairs[i].a), CLASS_SPECIAL) |
		_mm512_fpclass_ps_mask(f32(pairs[i].b), CLASS_SPECIAL);
	if (unlikely(special)) {
		bf16_store_all(p, pairs, n, stream);
		return;
	}
	SIMD_UNROLL for (size_t i = 0; i < n; i++)
	{
		vec v = (vec)_mm512_cvtne2ps_pbh(f32(pairs[i].b), f32(pairs[i].a));

		whole_put((char *)p + i * VEC_BYTES, _mm512_permutexvar_epi16(alternate, v),
			  stream);
	}
}

SIMD_HALF(NATIVE, native, bf16, f32_add, native_store_all, DTYPE_BFLOAT16)
SIMD_KERNELS(reduce_kernels_avx512_bf16, "avx512_bf16", native);
