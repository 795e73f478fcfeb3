"""Gradients of Keras on JAX, reduced over all ranks, inside the compiled step."""

from ..jax.gradients import allreduce_gradients
from . import _reducer


class Reducer(_reducer.Reducer):
    def _reduce(self, gradients, numbers):
        return allreduce_gradients(
            gradients, self.op, compression=self.compression, gradient_predivide_factor=self.predivide
        )
