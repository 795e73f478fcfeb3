"""Gradients of Keras on PyTorch, reduced over all ranks."""

import torch

from .. import _client, _reducer
from ..torch import ops


def as_bps_errors(func):
    """func: errors are BpsErrors already."""
    return func


class Reducer(_reducer.Reducer):
    @torch.no_grad()
    def _reduce(self, gradients, numbers):
        under_way = []
        for i, gradient in zip(numbers, gradients):
            packed, ctx = self.compression.compress(gradient / self.predivide if self.predivide != 1.0 else gradient)
            name = f"gradient.{i}.{str(packed.dtype)[6:]}.{_client.shape_text(packed.shape)}"
            under_way.append((ctx, ops.allreduce_async(packed, op=self.op, name=name, priority=-i)))
        results = [self.compression.decompress(handle.wait(), ctx) for ctx, handle in under_way]
        return [result * self.predivide for result in results] if self.predivide != 1.0 else results
