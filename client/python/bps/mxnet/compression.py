"""Gradient compression of MXNet's arrays. Names of BytePS and Horovod."""

import numpy as np

from .._compression import CastCompressor, NoneCompressor


class FP16Compressor(CastCompressor):
    wire_dtype = "float16"

    @staticmethod
    def cast(tensor, dtype):
        return tensor.astype(dtype)

    @classmethod
    def applies_to(cls, dtype):
        return np.dtype(dtype) in (np.float32, np.float64)


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor


def wire_dtype(compression, dtype):
    """The type that an array of dtype travels as."""
    wire = compression.wire_dtype
    return wire if wire is not None and compression.applies_to(dtype) else dtype


def from_params(compression_params, what="compression_params"):
    """The compression that BytePS's compression_params ask for. bps has fp16; what else BytePS has is refused."""
    asked = {key: value for key, value in (compression_params or {}).items() if value not in (None, False, "", "none")}
    fp16 = asked.pop("fp16", False)
    if asked:
        missing = ", ".join(f"{key}={value!r}" for key, value in sorted(asked.items()))
        raise ValueError(f"{what}: bps has no {missing}; there is fp16=True, or no compression")
    return Compression.fp16 if fp16 else Compression.none
