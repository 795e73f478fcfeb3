"""Gradient compression of JAX's arrays. Names of BytePS and Horovod."""

import jax.numpy as jnp

from .._compression import CastCompressor, Compressor, NoneCompressor


class _CastCompressor(CastCompressor):
    @staticmethod
    def cast(tensor, dtype):
        return tensor.astype(dtype)

    @classmethod
    def applies_to(cls, dtype):
        return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 2


class FP16Compressor(_CastCompressor):
    wire_dtype = jnp.float16


class BF16Compressor(_CastCompressor):
    wire_dtype = jnp.bfloat16


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
