/* aarch64: NEON and its float16 conversions belong to every such CPU. No streaming stores: the type has none. */
#include "reduce/kernel.h"
#include <arm_neon.h>

#define INLINE static inline __attribute__((__always_inline__))

typedef uint8x16_t vec;
#define VEC_BYTES 16
struct simd_pair {
	vec a, b;
};

INLINE vec vec_load(const void *p)
{
	return vld1q_u8(p);
}

INLINE void vec_store(void *p, vec v)
{
	vst1q_u8(p, v);
}

INLINE void vec_stream(void *p, vec v)
{
	vst1q_u8(p, v);
}

INLINE void vec_fence(void)
{
}

INLINE float32x4_t f32(vec v)
{
	return vreinterpretq_f32_u8(v);
}

INLINE vec of_f32(float32x4_t v)
{
	return vreinterpretq_u8_f32(v);
}

INLINE uint32x4_t u32(vec v)
{
	return vreinterpretq_u32_u8(v);
}

INLINE float64x2_t f64(vec v)
{
	return vreinterpretq_f64_u8(v);
}

INLINE vec of_f64(float64x2_t v)
{
	return vreinterpretq_u8_f64(v);
}

INLINE vec f32_add(vec acc, vec x)
{
	return of_f32(vaddq_f32(f32(acc), f32(x)));
}

/* FMIN orders the zeros, so: keep acc unless x is less, or is NaN. */
INLINE vec f32_min(vec acc, vec x)
{
	uint32x4_t take = vornq_u32(vcltq_f32(f32(x), f32(acc)), vceqq_f32(f32(x), f32(x)));

	return of_f32(vbslq_f32(take, f32(x), f32(acc)));
}

INLINE vec f32_max(vec acc, vec x)
{
	uint32x4_t take = vornq_u32(vcgtq_f32(f32(x), f32(acc)), vceqq_f32(f32(x), f32(x)));

	return of_f32(vbslq_f32(take, f32(x), f32(acc)));
}

INLINE vec f32_canonical(vec v)
{
	uint32x4_t number = vceqq_f32(f32(v), f32(v));

	return vreinterpretq_u8_u32(vbslq_u32(number, u32(v), vdupq_n_u32(F32_NAN)));
}

INLINE vec f32_div(vec v, float divisor)
{
	return of_f32(vdivq_f32(f32(v), vdupq_n_f32(divisor)));
}

INLINE vec f64_add(vec acc, vec x)
{
	return of_f64(vaddq_f64(f64(acc), f64(x)));
}

INLINE uint64x2_t f64_is_nan(vec v)
{
	uint32x4_t number = vreinterpretq_u32_u64(vceqq_f64(f64(v), f64(v)));

	return vreinterpretq_u64_u32(vmvnq_u32(number));
}

INLINE vec f64_min(vec acc, vec x)
{
	uint64x2_t take = vorrq_u64(vcltq_f64(f64(x), f64(acc)), f64_is_nan(x));

	return of_f64(vbslq_f64(take, f64(x), f64(acc)));
}

INLINE vec f64_max(vec acc, vec x)
{
	uint64x2_t take = vorrq_u64(vcgtq_f64(f64(x), f64(acc)), f64_is_nan(x));

	return of_f64(vbslq_f64(take, f64(x), f64(acc)));
}

INLINE vec f64_canonical(vec v)
{
	uint64x2_t bits = vreinterpretq_u64_u8(v);

	return vreinterpretq_u8_u64(vbslq_u64(f64_is_nan(v), vdupq_n_u64(F64_NAN), bits));
}

INLINE vec f64_div(vec v, double divisor)
{
	return of_f64(vdivq_f64(f64(v), vdupq_n_f64(divisor)));
}

INLINE float16x4_t f16_round(vec v)
{
	return vcvt_f16_f32(f32(v));
}

INLINE vec f16_expand(uint8x8_t v)
{
	return of_f32(vcvt_f32_f16(vreinterpret_f16_u8(v)));
}

INLINE struct simd_pair f16_load(const void *p)
{
	vec v = vec_load(p);

	return (struct simd_pair){ f16_expand(vget_low_u8(v)), f16_expand(vget_high_u8(v)) };
}

INLINE void f16_store(void *p, const struct simd_pair *pairs, size_t n, bool stream)
{
	for (size_t i = 0; i < n; i++)
		vec_store((char *)p + i * VEC_BYTES,
			  vcombine_u8(vreinterpret_u8_f16(f16_round(f32_canonical(pairs[i].a))),
				      vreinterpret_u8_f16(f16_round(f32_canonical(pairs[i].b)))));
}

INLINE vec f16_add(vec acc, vec x)
{
	return f32_add(acc, x);
}

INLINE vec f16_through(vec v)
{
	return of_f32(vcvt_f32_f16(f16_round(v)));
}

/* By integers: right for all but NaNs with low bits. What is left of the low half means nothing. */
INLINE uint32x4_t bf16_round(vec v)
{
	uint32x4_t odd = vandq_u32(vshrq_n_u32(u32(v), 16), vdupq_n_u32(1));

	return vaddq_u32(vaddq_u32(u32(v), vdupq_n_u32(0x7fff)), odd);
}

INLINE vec bf16_high(uint32x4_t v)
{
	return vreinterpretq_u8_u32(vandq_u32(v, vdupq_n_u32(0xffff0000)));
}

/* The elements at even places and those at odd ones: no element leaves its lane, there and back. */
INLINE struct simd_pair bf16_load(const void *p)
{
	vec v = vec_load(p);

	return (struct simd_pair){ vreinterpretq_u8_u32(vshlq_n_u32(u32(v), 16)),
				   bf16_high(u32(v)) };
}

INLINE vec bf16_expand(uint8x8_t v)
{
	return vreinterpretq_u8_u32(vshll_n_u16(vreinterpret_u16_u8(v), 16));
}

INLINE struct simd_pair bf16_widen(const void *p)
{
	vec v = vec_load(p);

	return (struct simd_pair){ bf16_expand(vget_low_u8(v)), bf16_expand(vget_high_u8(v)) };
}

INLINE void bf16_store(void *p, struct simd_pair pair, bool stream)
{
	uint32x4_t bits = vsriq_n_u32(bf16_round(pair.b), bf16_round(pair.a), 16);
	uint16x8_t v = vreinterpretq_u16_u32(bits);
	uint16x8_t nan = vcgtq_u16(vandq_u16(v, vdupq_n_u16(0x7fff)), vdupq_n_u16(0x7f80));

	vec_store(p, vreinterpretq_u8_u16(vbslq_u16(nan, vdupq_n_u16(BF16_NAN), v)));
}

INLINE vec bf16_through(vec v)
{
	return bf16_high(bf16_round(v));
}

INLINE vec i64_add(vec acc, vec x)
{
	return vreinterpretq_u8_s64(vaddq_s64(vreinterpretq_s64_u8(acc), vreinterpretq_s64_u8(x)));
}

INLINE vec i64_min(vec acc, vec x)
{
	return vbslq_u8(
		vreinterpretq_u8_u64(vcltq_s64(vreinterpretq_s64_u8(x), vreinterpretq_s64_u8(acc))),
		x, acc);
}

INLINE vec i64_max(vec acc, vec x)
{
	return vbslq_u8(
		vreinterpretq_u8_u64(vcgtq_s64(vreinterpretq_s64_u8(x), vreinterpretq_s64_u8(acc))),
		x, acc);
}

#define INTEGER_OP(name, intrinsic, lane)                                                         \
	INLINE vec name(vec acc, vec x)                                                           \
	{                                                                                         \
		return vreinterpretq_u8_##lane(intrinsic##_##lane(vreinterpretq_##lane##_u8(acc), \
								  vreinterpretq_##lane##_u8(x))); \
	}

INTEGER_OP(i32_add, vaddq, s32)
INTEGER_OP(i32_min, vminq, s32)
INTEGER_OP(i32_max, vmaxq, s32)
INTEGER_OP(i16_add, vaddq, s16)
INTEGER_OP(i16_min, vminq, s16)
INTEGER_OP(i16_max, vmaxq, s16)
INTEGER_OP(i8_add, vaddq, s8)
INTEGER_OP(i8_min, vminq, s8)
INTEGER_OP(i8_max, vmaxq, s8)

INLINE vec u8_min(vec acc, vec x)
{
	return vminq_u8(acc, x);
}

INLINE vec u8_max(vec acc, vec x)
{
	return vmaxq_u8(acc, x);
}

INLINE vec bool_truth(vec v)
{
	return vminq_u8(v, vdupq_n_u8(1));
}

#include "reduce/simd.h"

SIMD_KERNELS(reduce_kernels_neon, "neon", bf16);
