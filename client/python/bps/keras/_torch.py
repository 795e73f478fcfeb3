"""Gradients of Keras on PyTorch, reduced over all ranks."""

import torch

from ..torch import ops
from . import _reducer


def as_bps_errors(func):
    """func: errors are BpsErrors already."""
    return func


class Reducer(_reducer.Reducer):
    @torch.no_grad()
    def _reduce(self, gradients, numbers):
        under_way = []
        for i, gradient in zip(numbers, gradients):
            packed, ctx = self.compression.compress(gradient / self.predivide if self.predivide != 1.0 else gradient)
            shape = "x".join(map(str, packed.shape)) or "scalar"
            name = f"gradient.{i}.{str(packed.dtype)[6:]}.{shape}"
            under_way.append((ctx, ops.allreduce_async(packed, op=self.op, name=name, priority=-i)))
        results = [self.compression.decompress(handle.wait(), ctx) for ctx, handle in under_way]
        return [result * self.predivide for result in results] if self.predivide != 1.0 else results
