/*
 * float16 and bfloat16 to float32 and back, in integer and float32 arithmetic alone, without branches so that loops
 * over them vectorise. Rounding is to nearest, ties to even; denormals are kept, overflow gives infinity, and every
 * NaN becomes the canonical one on the way down.
 */
#pragma once

#include "reduce/kernel.h"

static inline float f32_of_bits(uint32_t bits)
{
	float f;

	memcpy(&f, &bits, sizeof(f));
	return f;
}

static inline uint32_t bits_of_f32(float f)
{
	uint32_t bits;

	memcpy(&bits, &f, sizeof(bits));
	return bits;
}

/* One or the other as the condition is 1 or 0, by masks: what compilers vectorise without fail. */
static inline uint32_t either(bool condition, uint32_t yes, uint32_t no)
{
	return no ^ ((yes ^ no) & -(uint32_t)condition);
}

static inline float f32_of_f16(uint16_t half)
{
	uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
	uint32_t shifted = (uint32_t)(half & 0x7fffu) << 13;
	uint32_t exponent = shifted & 0x0f800000u;
	uint32_t normal = shifted + ((127u - 15u) << 23);
	/* All ones: infinity or NaN, whose exponent moves up once more. */
	uint32_t special = normal + ((128u - 16u) << 23);
	/* Zero: the fraction counts units of 2^-24. 2^-14 + fraction is exact, and so is taking 2^-14 off again. */
	float denormal = f32_of_bits(normal + (1u << 23)) - f32_of_bits(113u << 23);
	uint32_t bits = either(exponent == 0x0f800000u, special, normal);

	return f32_of_bits(either(!exponent, bits_of_f32(denormal), bits) | sign);
}

static inline uint16_t f16_of_f32(float f)
{
	uint32_t bits = bits_of_f32(f), sign = bits & 0x80000000u, magnitude = bits ^ sign;
	/* Below 2^-14: adding 0.5 makes the float adder round at 2^-24, the unit of the denormals. */
	uint32_t denormal = bits_of_f32(f32_of_bits(magnitude) + 0.5f) - 0x3f000000u;
	/* Half a unit less one, and the last bit kept: up when over half, to even when at half. */
	uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
	uint32_t half = either(magnitude < (113u << 23), denormal, normal);

	/* 2^16 and more; from 65520 on the carry gets there by itself. */
	half = either(magnitude >= 0x47800000u, 0x7c00, half) | sign >> 16;
	return (uint16_t)either(magnitude > 0x7f800000u, F16_NAN, half);
}

static inline float f32_of_bf16(uint16_t brain)
{
	return f32_of_bits((uint32_t)brain << 16);
}

static inline uint16_t bf16_of_f32(float f)
{
	uint32_t bits = bits_of_f32(f);
	uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;

	return (uint16_t)either((bits & 0x7fffffffu) > 0x7f800000u, BF16_NAN, rounded);
}
