"""Gradient compression of PyTorch's tensors. Names of BytePS and Horovod."""

import torch

from .._compression import CastCompressor, Compressor, NoneCompressor


class _CastCompressor(CastCompressor):
    cast = staticmethod(torch.Tensor.to)

    @classmethod
    def applies_to(cls, dtype):
        return dtype.is_floating_point and torch.finfo(dtype).bits > torch.finfo(cls.wire_dtype).bits


class FP16Compressor(_CastCompressor):
    wire_dtype = torch.float16


class BF16Compressor(_CastCompressor):
    wire_dtype = torch.bfloat16


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
