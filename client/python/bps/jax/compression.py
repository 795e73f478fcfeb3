"""Gradient compression: what a gradient travels as. Names of BytePS and Horovod."""

import jax.numpy as jnp


class NoneCompressor:
    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class _CastCompressor:
    """Sends floats that are wider than two bytes as wire_dtype. The daemon adds in float32 and rounds once per hop."""

    wire_dtype = None

    @classmethod
    def compress(cls, tensor):
        if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.dtype.itemsize <= 2:
            return tensor, None
        return tensor.astype(cls.wire_dtype), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor if ctx is None else tensor.astype(ctx)


class FP16Compressor(_CastCompressor):
    wire_dtype = jnp.float16


class BF16Compressor(_CastCompressor):
    wire_dtype = jnp.bfloat16


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
