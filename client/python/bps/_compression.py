"""Gradient compression, whatever the framework: what a gradient becomes before it is handed over, and back.

Each adapter's compression.py says how its framework converts, and gives the names of BytePS and Horovod.
"""


class Compressor:
    """compress(tensor) gives (what travels, context); decompress(what came, context) gives a tensor as before.

    wire_dtype: the type that travels, for compressors that only convert; it lets the optimizer of PyTorch convert
    straight into memory that the daemon reads.
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


class CastCompressor(Compressor):
    """Sends floats that are wider than two bytes as wire_dtype. The daemon adds in float32 and rounds once per hop."""

    @staticmethod
    def cast(tensor, dtype):
        """tensor as one of dtype."""
        raise NotImplementedError

    @classmethod
    def applies_to(cls, dtype):
        """Whether tensors of dtype are converted."""
        raise NotImplementedError

    @classmethod
    def compress(cls, tensor):
        if not cls.applies_to(tensor.dtype):
            return tensor, None
        return cls.cast(tensor, cls.wire_dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor, ctx):
        return tensor if ctx is None else cls.cast(tensor, ctx)
