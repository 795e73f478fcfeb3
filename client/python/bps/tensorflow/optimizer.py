"""DistributedOptimizer: an optimizer that steps with gradients averaged over all ranks."""

import tensorflow as tf

from .._horovod import global_process_set
from .._library import Reduction
from ._gradients import Reducer
from .compression import Compression


class _DistributedV1:
    """What DistributedOptimizer adds to the class of a tf.compat.v1.train.Optimizer."""

    def compute_gradients(self, *args, **kwargs):
        """As the optimizer's own, reduced over all ranks."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs) if pairs else ((), ())
        return list(zip(self._bps(gradients, variables), variables))


class _DistributedV2:
    """What it adds to an optimizer of tf_keras, the Keras 2 that tf.keras once was."""

    def aggregate_gradients(self, grads_and_vars):
        """Pairs of gradient and variable, the gradients reduced over all ranks."""
        gradients, variables = zip(*grads_and_vars)
        return list(zip(self._bps(gradients, variables), variables))

    _aggregate_gradients = aggregate_gradients  # the legacy ones call it so


class _DistributedV2LossScale:
    """The same for its LossScaleOptimizer, which has to see the sum: an overflow on one rank skips the step on all."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        """As the optimizer's own, of the gradients reduced over all ranks."""
        gradients, variables = zip(*grads_and_vars)
        return super().apply_gradients(list(zip(self._bps(gradients, variables), variables)), *args, **kwargs)


def _scales_loss(optimizer):
    return any(c.__name__ == "BaseLossScaleOptimizer" for c in type(optimizer).__mro__)


def _is_keras_2(optimizer):
    return any(c.__module__.startswith("tf_keras.") for c in type(optimizer).__mro__)


def DistributedOptimizer(
    optimizer,
    name=None,
    use_locking=False,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    sparse_as_dense=False,
    backward_passes_per_step=1,
    op=Reduction.AVERAGE,
    gradient_predivide_factor=1.0,
    average_aggregated_gradients=False,
    num_groups=0,
    groups=None,
    process_set=global_process_set,
    scale_local_gradients=True,
):
    """Makes an optimizer step with gradients that are averaged (op: or summed, ...) over all ranks.

    optimizer: of Keras 3 (see bps.keras.DistributedOptimizer()), of tf_keras, or a tf.compat.v1.train.Optimizer that is
    used in eager code or inside tf.function. It is changed and returned: its state stays. The arguments name,
    use_locking and the devices have no effect.
    """
    groups = num_groups if groups is None and num_groups else groups
    v1 = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    if not v1 and not _is_keras_2(optimizer):
        from .. import keras

        return keras.DistributedOptimizer(
            optimizer,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    if backward_passes_per_step != 1:
        raise ValueError(
            "backward_passes_per_step: an optimizer of TensorFlow 1 or Keras 2 steps with every gradient it is given; "
            "add them up before, or use one of Keras 3"
        )
    mixin = _DistributedV1 if v1 else _DistributedV2LossScale if _scales_loss(optimizer) else _DistributedV2
    base = optimizer.__class__
    if issubclass(base, (_DistributedV1, _DistributedV2, _DistributedV2LossScale)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    reducer = Reducer(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
    )
    # In the class, so that a copy made by from_config() is distributed too.
    members = {"__module__": base.__module__, "_bps": reducer}
    optimizer.__class__ = type(base.__name__, (mixin, base), members)
    return optimizer
