/*
 * AVX-512 in registers of 256 bits, for processors that do one of 512 as two halves; bfloat16, of which each register is split and
 * joined, is worth the wide ones there, too. Built with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c; run only where
 * the CPU has them all, and the bfloat16 instructions.
 */
#define VEC_BYTES 32
#include "reduce/avx512.h"
#include "reduce/avx512_half.h"

#include "reduce/simd.h"

SIMD_KERNELS(reduce_kernels_avx512_256, "avx512_256", reduce_bf16_fma);
