"""Gradients of a list of variables, reduced over all ranks: what DistributedGradientTape and the optimizers share."""

import tensorflow as tf

from .. import _client, _reducer
from . import _native
from .ops import allreduce_sparse, reduce_all, scaled


class Reducer(_reducer.Reducer):
    """How gradients are reduced. Called with gradients and their variables, it returns the reduced gradients.

    groups: a number or lists of variables whose gradients are to be sent together. Gradients leave as they are ready in
    any case; a group's leave when the last of it is.
    """

    def register_local(self, variable):
        self.local.add(reference(variable))

    @_client.as_remembered
    def __call__(self, gradients, variables):
        gradients = list(gradients)
        variables = list(variables)
        mine = [v is not None and reference(v) in self.local for v in variables]
        if self.sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        dense = [
            i for i, g in enumerate(gradients) if g is not None and not mine[i] and not isinstance(g, tf.IndexedSlices)
        ]
        for i, result in zip(dense, self._reduce_dense(gradients, variables, dense)):
            gradients[i] = result
        for i, gradient in enumerate(gradients):
            if mine[i]:
                gradients[i] = self._local(gradient)
            elif isinstance(gradient, tf.IndexedSlices):
                gradients[i] = allreduce_sparse(gradient, self.op)
        return gradients

    def _reduce_dense(self, gradients, variables, dense):
        packed, names = {}, {}
        for i in dense:
            gradient = scaled(_native.to_tensor(gradients[i], f"gradient {i}"), 1.0 / self.predivide)
            packed[i] = self.compression.compress(gradient)
            names[i] = _name(i, packed[i][0])
        reduced = {}
        for batch in self._batches(dense, variables):
            batch = _in_order_of_computation({i: packed[i][0] for i in batch})
            tensors = [packed[i][0] for i in batch]
            # What comes first in the model is needed first by the next step.
            priorities = [-i for i in batch]
            results = reduce_all(tensors, self.op, [names[i] for i in batch], priorities)
            reduced.update(zip(batch, results))
        return [scaled(self.compression.decompress(reduced[i], packed[i][1]), self.predivide) for i in dense]

    def _batches(self, dense, variables):
        """Without groups one batch, whose members all leave by themselves."""
        if not isinstance(self.groups, (list, tuple)):
            return [dense] if dense else []
        by_reference = {reference(variables[i]): i for i in dense}
        batches = []
        for group in self.groups:
            batch = [by_reference.pop(reference(v)) for v in group if reference(v) in by_reference]
            batches.append(batch)
        batches.append(list(by_reference.values()))
        return [batch for batch in batches if batch]

    def _local(self, gradient):
        """Divided by the number of ranks, as the average over ranks of which only this one has a gradient."""
        if gradient is None or not self.scale_local_gradients:
            return gradient
        factor = 1.0 / _client.current().size
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
        return scaled(gradient, factor)


def reference(variable):
    """Something that stands for a variable of TensorFlow or Keras, or for a tensor, in a set."""
    value = getattr(variable, "value", None)
    if isinstance(value, tf.Variable):
        variable = value
    return variable.ref() if hasattr(variable, "ref") else id(variable)


def _name(i, tensor):
    """By number, type and shape: variables' own names may differ from rank to rank.

    Two models of one program may use a name in turn, in the same order on all ranks; never for different tensors.
    """
    if not tensor.shape.is_fully_defined():
        return None
    return f"gradient.{i}.{tensor.dtype.name}.{_client.shape_text(tensor.shape)}"


def _in_order_of_computation(tensors):
    """The keys of {key: tensor}, the tensor that is computed first in front.

    A graph lists its nodes in the order in which they were made, which is that of the backward pass and the same on all
    ranks. In eager code everything has been computed.
    """
    if tf.executing_eagerly() or not tensors:
        return list(tensors)
    graph = tf.compat.v1.get_default_graph()
    place = {operation.name: n for n, operation in enumerate(graph.get_operations())}
    return sorted(tensors, key=lambda key: place.get(tensors[key].op.name, -1))
