/*
 * What the kernels of AVX-512 are made of, for registers of VEC_BYTES, 64 or 32: the same instructions, masks and number of
 * registers. A file defines that, includes this, then simd.h.
 */
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

INLINE vec f16_expand(half v)
{
	return of_f32(MM(cvtph_ps)(v));
}

INLINE half f16_round(vec v)
{
	return MM(cvtps_ph)(f32(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE struct simd_pair f16_load(const void *p)
{
	const half *halves = p;

	return (struct simd_pair){ f16_expand(HALF(loadu)(&halves[0])),
				   f16_expand(HALF(loadu)(&halves[1])) };
}

/* Of what nothing is to be added to. NaNs are rare: they are looked for in all pairs at once. */
INLINE void f16_store(void *p, const struct simd_pair *pairs, size_t n, bool stream)
{
	half *halves = p;
	unsigned nan = 0;

	_Pragma("GCC unroll 4")
	for (size_t i = 0; i < n; i++)
		nan |= MM(cmp_ps_mask)(f32(pairs[i].a), f32(pairs[i].b), _CMP_UNORD_Q);
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
 * multiplications free. Sums of float16 are multiples of 2^-24, so no denormal of float32 makes it slow. Written as the
 * instruction: compilers make x the result, and then copy all sums once more for each input.
 */
INLINE vec f16_add(vec acc, vec x)
{
	__asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(x), "v"(MM(set1_ps)(1)));
	return acc;
}

INLINE vec f16_through(vec v)
{
	return f16_expand(f16_round(v));
}

/* By integers: right for all but NaNs with low bits. What is left of the low half means nothing. */
INLINE vec bf16_round(vec v)
{
	mask_32 odd = MM(test_epi32_mask)(v, MM(set1_epi32)(0x10000));

	v = MM(add_epi32)(v, MM(set1_epi32)(0x7fff));
	return MM(mask_add_epi32)(v, odd, v, MM(set1_epi32)(1));
}

INLINE vec bf16_high(vec v)
{
	return v & MM(set1_epi32)((int)0xffff0000);
}

/* The elements at even places and those at odd ones: no element leaves its lane, there and back. */
INLINE struct simd_pair bf16_load(const void *p)
{
	vec v = vec_load(p);

	return (struct simd_pair){ MM(slli_epi32)(v, 16), bf16_high(v) };
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
	vec even = MM(srli_epi32)(bf16_round(pair.a), 16);
	vec v = MM(mask_mov_epi16)(bf16_round(pair.b), (mask_16)0x55555555, even);
	mask_16 nan = MM(cmpgt_epu16_mask)(MM(add_epi16)(v, v), MM(set1_epi16)((short)0xff00));

	whole_put(p, MM(mask_mov_epi16)(v, nan, MM(set1_epi16)(BF16_NAN)), stream);
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
