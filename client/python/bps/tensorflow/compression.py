"""Gradient compression: what a gradient becomes before it is handed over, and back. Names of BytePS and Horovod."""

import tensorflow as tf


class Compressor:
    """compress(tensor) gives (what travels, context); decompress(what came, context) gives a tensor as before."""

    @staticmethod
    def compress(tensor):
        raise NotImplementedError

    @staticmethod
    def decompress(tensor, ctx):
        raise NotImplementedError


class NoneCompressor(Compressor):
    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class _CastCompressor(Compressor):
    """Sends floats that are wider than two bytes as wire_dtype. The daemon adds in float32 and rounds once per hop."""

    wire_dtype = None

    @classmethod
    def compress(cls, tensor):
        if not tensor.dtype.is_floating or tensor.dtype.size <= cls.wire_dtype.size:
            return tensor, None
        return tf.cast(tensor, cls.wire_dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor, ctx):
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    wire_dtype = tf.float16


class BF16Compressor(_CastCompressor):
    wire_dtype = tf.bfloat16


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
