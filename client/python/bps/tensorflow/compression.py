"""Gradient compression of TensorFlow's tensors. Names of BytePS and Horovod."""

import tensorflow as tf

from .._compression import CastCompressor, Compressor, NoneCompressor


class _CastCompressor(CastCompressor):
    cast = staticmethod(tf.cast)

    @classmethod
    def applies_to(cls, dtype):
        return dtype.is_floating and dtype.size > cls.wire_dtype.size


class FP16Compressor(_CastCompressor):
    wire_dtype = tf.float16


class BF16Compressor(_CastCompressor):
    wire_dtype = tf.bfloat16


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
