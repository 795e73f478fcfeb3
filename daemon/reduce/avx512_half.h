/* float16 and bfloat16 by AVX-512, in registers of either size: what simd.h wants of them, after avx512.h. */
#pragma once

#include "reduce/avx512.h"

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

INLINE vec bf16_expand(half v)
{
	return MM(slli_epi32)(MM(cvtepu16_epi32)(v), 16);
}

INLINE struct simd_pair bf16_widen(const void *p)
{
	const half *halves = p;

	return (struct simd_pair){ bf16_expand(HALF(loadu)(&halves[0])),
				   bf16_expand(HALF(loadu)(&halves[1])) };
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
