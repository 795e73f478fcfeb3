"""DistributedGradientTape: a tf.GradientTape whose gradients are averaged over all ranks."""

import tensorflow as tf

from .._horovod import global_process_set
from .._library import Reduction
from .._ops import form_of
from ._gradients import Reducer, reference
from .compression import Compression


class _Distributed:
    """What DistributedGradientTape adds to the class of a tape."""

    def register_local_source(self, source):
        """The gradient of source stays on its rank; it is divided by the number of ranks (scale_local_gradients)."""
        self._bps.register_local(source)

    def gradient(self, target, sources, output_gradients=None, *args, use_generic_names=False, **kwargs):
        """As tf.GradientTape.gradient(), reduced over all ranks."""
        gradients = super().gradient(target, sources, output_gradients, *args, **kwargs)
        return gradients if self._bps_whole else self._reduced(gradients, sources)

    def get_local_and_global_gradients(self, target, sources, output_gradients=None, use_generic_names=False):
        """The pairs of source and gradient() of those that stay on their rank, and those of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients)))
        local = [reference(source) in self._bps.local for source, _ in pairs]
        return [p for p, mine in zip(pairs, local) if mine], [p for p, mine in zip(pairs, local) if not mine]

    def jacobian(self, target, sources, *args, **kwargs):
        """As tf.GradientTape.jacobian(), reduced over all ranks."""
        return self._reduced(self._as_a_whole(super().jacobian, target, sources, *args, **kwargs), sources)

    def batch_jacobian(self, target, source, *args, **kwargs):
        """As tf.GradientTape.batch_jacobian(), reduced over all ranks."""
        return self._reduced(self._as_a_whole(super().batch_jacobian, target, source, *args, **kwargs), source)

    def _as_a_whole(self, derive, *args, **kwargs):
        """derive() calls gradient() for each row, perhaps as one vectorized program: rows are reduced together, afterwards."""
        self._bps_whole = True
        try:
            return derive(*args, **kwargs)
        finally:
            self._bps_whole = False

    def _reduced(self, gradients, sources):
        return tf.nest.pack_sequence_as(sources, self._bps(_flatten(gradients), _flatten(sources)))


def _flatten(structure):
    return tf.nest.flatten(structure, expand_composites=False)


def PartialDistributedGradientTape(
    gradtape,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    sparse_as_dense=False,
    op=Reduction.AVERAGE,
    gradient_predivide_factor=1.0,
    num_groups=0,
    groups=None,
    process_set=global_process_set,
    local_layers=None,
    scale_local_gradients=True,
):
    """DistributedGradientTape() but for the layers local_layers, whose gradients stay on their rank."""
    groups = num_groups if groups is None and num_groups else groups
    reducer = Reducer(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
    )
    if isinstance(gradtape, _Distributed):
        raise ValueError("the tape is a DistributedGradientTape already")
    base = gradtape.__class__
    gradtape.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    gradtape._bps = reducer
    gradtape._bps_whole = False
    for variable in variables_of(local_layers):
        gradtape.register_local_source(variable)
    return gradtape


@form_of(PartialDistributedGradientTape, without=["local_layers"])
def DistributedGradientTape(gradtape, **asked):
    """Makes a tape's gradients those of all ranks: the average, or what op says. The tape itself is changed and
    returned.

    sparse_as_dense: tf.IndexedSlices become dense tensors before; else they stay sparse. gradient_predivide_factor
    divides before and multiplies after the average, against overflow in 16 bits. The devices have no effect.
    """
    return PartialDistributedGradientTape(gradtape, **asked)


def variables_of(layers):
    """The trainable variables of a layer or of several; None: none."""
    if layers is None:
        return []
    layers = layers if isinstance(layers, (list, tuple, set)) else [layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"{layer!r} is no layer of Keras")
    return [variable for layer in layers for variable in layer.trainable_weights]
