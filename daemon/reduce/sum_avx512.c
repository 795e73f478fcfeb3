/*
 * Built with -mavx512f -mavx512bw -mavx512dq -mavx512vl; run only where the CPU has them all. Where it has the bfloat16
 * instructions as well, bfloat16 has kernels of its own.
 */
#define VEC_BYTES 64
#include "reduce/avx512.h"
#include "reduce/avx512_half.h"

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

SIMD_HALF(NATIVE, reduce_bf16_native, bf16, f32_add, native_store_all, DTYPE_BFLOAT16)
/* For processors that shift where they add, and multiply denormals as fast as other numbers. */
SIMD_HALF(NATIVE, reduce_bf16_fma, bf16, f16_add, native_store_all, DTYPE_BFLOAT16)
SIMD_KERNELS(reduce_kernels_avx512_bf16, "avx512_bf16", reduce_bf16_native);
