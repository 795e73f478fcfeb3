#!/usr/bin/env python3
"""The sums against numpy: random inputs, added in rank order, rounded as reduce.h says; the bits must be equal.

    check_numpy.py REDUCE_PIPE

Skipped (exit status 77) without numpy.
"""
import platform
import subprocess
import sys

try:
    import numpy as np
except ImportError as error:
    print(f"SKIP numpy: {error}")
    sys.exit(77)

SUM, AVERAGE, MIN, MAX = 1, 2, 3, 4
FLOAT16, BFLOAT16, BOOL = 3, 4, 10
TYPES = {1: np.float64, 2: np.float32, 3: np.float16, BFLOAT16: np.uint16, 5: np.int64, 6: np.int32,
         7: np.int16, 8: np.int8, 9: np.uint8, BOOL: np.uint8}
CANONICAL = {1: 0x7FF8000000000000, 2: 0x7FC00000, 3: 0x7E00, BFLOAT16: 0x7FC0}
BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


def is_float(dtype):
    return dtype <= BFLOAT16


def wide(dtype, array):
    """The numbers in the type they are accumulated in."""
    if dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == 3 else array


def narrow(dtype, array):
    """Back to the type in memory, rounded to nearest even."""
    if dtype != BFLOAT16:
        return array.astype(TYPES[dtype])
    low = np.frexp(array.astype(np.float64))
    # 8 bits of significand, fewer below 2^-126; an infinite or NaN stays what it is.
    exponent = np.maximum(low[1] - 8, -133)
    exact = np.where(np.isfinite(array), np.ldexp(np.rint(np.ldexp(array.astype(np.float64), -exponent)), exponent),
                     array)
    return (exact.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def extreme(dtype, reduction, acc, x):
    better = x < acc if reduction == MIN else x > acc
    if is_float(dtype):
        better = (better & ~np.isnan(acc)) | (np.isnan(x) & ~np.isnan(acc))
    return np.where(better, x, acc)


def scale_of(dtype, reduction, divisor):
    """Of averages of float16: the least power of two that is not less."""
    return 1 << (divisor - 1).bit_length() if dtype == FLOAT16 and reduction == AVERAGE else 1


def expected(dtype, reduction, inputs, divisor, before):
    if dtype == BOOL:
        truth = inputs != 0
        return (truth.all(axis=0) if reduction == MIN else truth.any(axis=0)).astype(np.uint8)
    acc = wide(dtype, inputs[0])
    for row in inputs[1:]:
        x = wide(dtype, row)
        acc = acc + x if reduction in (SUM, AVERAGE) else extreme(dtype, reduction, acc, x)
    if reduction == AVERAGE and is_float(dtype):
        scale = scale_of(dtype, reduction, divisor)
        if before:
            acc = wide(dtype, narrow(dtype, acc / acc.dtype.type(scale)))
        acc = acc / acc.dtype.type(divisor / scale)
    elif reduction == AVERAGE:
        acc = sum(row.astype(object) for row in inputs) // divisor
    nan = np.isnan(acc) if is_float(dtype) else np.zeros(acc.shape, bool)
    out = narrow(dtype, acc).copy()
    if nan.any():
        out.view(BITS[out.itemsize])[nan] = CANONICAL[dtype]
    return out


KERNELS = ("scalar", "neon") if platform.machine() == "aarch64" else ("scalar", "avx2", "avx512", "avx512_bf16", "avx512_256")


def make_inputs(rng, dtype, n_inputs, n_elements):
    """Half of them any bits at all, half numbers of like size."""
    size = np.dtype(TYPES[dtype]).itemsize
    raw = rng.integers(0, 256, (n_inputs, n_elements * size), np.uint8).view(TYPES[dtype])
    if is_float(dtype):
        normal = narrow(dtype, rng.standard_normal((n_inputs, n_elements)).astype(
            np.float64 if dtype == 1 else np.float32))
        return np.ascontiguousarray(np.where(rng.random(raw.shape) < 0.5, raw, normal))
    return raw


def check(pipe, kernel, rng, dtype, reduction, n_inputs, before):
    n_elements = int(rng.integers(1000, 3000))
    divisor = int(rng.integers(n_inputs, 100))
    inputs = make_inputs(rng, dtype, n_inputs, n_elements)
    run = subprocess.run([pipe, kernel, str(dtype), str(reduction), str(n_inputs), str(n_elements), str(divisor),
                          str(scale_of(dtype, reduction, divisor)), str(int(before))], input=inputs.tobytes(), stdout=subprocess.PIPE, check=True)
    with np.errstate(all="ignore"):
        want = expected(dtype, reduction, inputs, divisor, before)
    bits = BITS[want.itemsize]
    got, want = np.frombuffer(run.stdout, bits), want.view(bits)
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        i = int(wrong[0])
        print(f"FAIL {kernel} dtype {dtype} reduction {reduction} of {n_inputs} inputs divisor {divisor} before {before}: "
              f"{wrong.size} of {n_elements} differ, the first at {i}: {got[i]:#x} instead of {want[i]:#x}, "
              f"inputs {inputs[:, i]}")
    return not wrong.size


def main():
    pipe = sys.argv[1]
    kernels = subprocess.run([pipe], stdout=subprocess.PIPE, check=True, text=True).stdout.split()
    rng = np.random.default_rng(20240611)
    n = {True: 0, False: 0}
    for kernel in kernels:
        for dtype in TYPES:
            for reduction in (SUM, AVERAGE, MIN, MAX):
                if dtype == BOOL and reduction == AVERAGE:
                    continue
                for n_inputs, before in ((1, False), (2, True), (5, False), (8, True)):
                    n[check(pipe, kernel, rng, dtype, reduction, n_inputs, before)] += 1
    missing = [kernel for kernel in KERNELS if kernel not in kernels]
    for kernel in missing:
        print(f"skip {kernel}: this processor does not have {kernel}")
    print(f"{n[True]} passed, {n[False]} failed, {len(missing)} skipped")
    return 1 if n[False] or not n[True] else 0


if __name__ == "__main__":
    sys.exit(main())
