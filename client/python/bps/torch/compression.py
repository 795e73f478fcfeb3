"""Gradient compression: what a gradient becomes before it is handed over, and back. Names of BytePS and Horovod."""

import torch


class Compressor:
    """compress(tensor) gives (what travels, context); decompress(what came, context) gives a tensor as before.

    wire_dtype: the type that travels, for compressors that only convert; it lets the optimizer convert straight into
    memory that the daemon reads.
    """

    wire_dtype = None

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

    @classmethod
    def applies_to(cls, dtype):
        return dtype.is_floating_point and torch.finfo(dtype).bits > torch.finfo(cls.wire_dtype).bits

    @classmethod
    def compress(cls, tensor):
        if not cls.applies_to(tensor.dtype):
            return tensor, None
        return tensor.to(cls.wire_dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor, ctx):
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    wire_dtype = torch.bfloat16


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
