"""Gradients of Keras on PyTorch, reduced over all ranks. As bps.tensorflow._gradients.Reducer, for dense gradients."""

import torch

from .. import _client
from .._horovod import check_process_set, global_process_set
from .._library import Reduction
from ..torch import ops
from ..torch.compression import Compression


class Reducer:
    def __init__(
        self,
        compression=Compression.none,
        sparse_as_dense=False,
        op=Reduction.AVERAGE,
        gradient_predivide_factor=1.0,
        groups=None,
        process_set=global_process_set,
        scale_local_gradients=True,
    ):
        check_process_set(process_set)
        self.op = Reduction(op)
        if gradient_predivide_factor != 1.0 and self.op != Reduction.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=Average")
        self.compression = compression
        self.predivide = gradient_predivide_factor
        self.scale_local_gradients = scale_local_gradients
        self.local = set()

    def register_local(self, variable):
        self.local.add(id(variable))

    @torch.no_grad()
    def __call__(self, gradients, variables):
        results = list(gradients)
        under_way = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is None:
                continue
            if id(variable) in self.local:
                if self.scale_local_gradients:
                    results[i] = gradient / _client.current().size
                continue
            packed, ctx = self.compression.compress(gradient / self.predivide if self.predivide != 1.0 else gradient)
            shape = "x".join(map(str, packed.shape)) or "scalar"
            name = f"gradient.{i}.{str(packed.dtype)[6:]}.{shape}"
            under_way.append((i, ctx, ops.allreduce_async(packed, op=self.op, name=name, priority=-i)))
        for i, ctx, handle in under_way:
            reduced = self.compression.decompress(handle.wait(), ctx)
            results[i] = reduced * self.predivide if self.predivide != 1.0 else reduced
        return results
