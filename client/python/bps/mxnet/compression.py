"""Gradient compression: what a gradient travels as. Names of BytePS and Horovod."""


class NoneCompressor:
    wire_dtype = None


class FP16Compressor:
    """Sends float32 and float64 as float16. The daemon adds in float32 and rounds once per hop."""

    wire_dtype = "float16"


class Compression:
    """What the argument compression takes."""

    none = NoneCompressor
    fp16 = FP16Compressor


def wire_dtype(compression, dtype):
    """The type that an array of dtype travels as."""
    wire = compression.wire_dtype
    return wire if wire is not None and dtype in ("float32", "float64") else dtype


def from_params(compression_params, what="compression_params"):
    """The compression that BytePS's compression_params ask for. bps has fp16; what else BytePS has is refused."""
    asked = {key: value for key, value in (compression_params or {}).items() if value not in (None, False, "", "none")}
    fp16 = asked.pop("fp16", False)
    if asked:
        missing = ", ".join(f"{key}={value!r}" for key, value in sorted(asked.items()))
        raise ValueError(f"{what}: bps has no {missing}; there is fp16=True, or no compression")
    return Compression.fp16 if fp16 else Compression.none
