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

    optimizer: of Keras 3 or tf_keras (see bps.keras.DistributedOptimizer()), or a tf.compat.v1.train.Optimizer that is
    used in eager code or inside tf.function. It is changed and returned: its state stays. The arguments name,
    use_locking and the devices have no effect.
    """
    groups = num_groups if groups is None and num_groups else groups
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
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
            "backward_passes_per_step: an optimizer of TensorFlow 1 steps with every gradient it is given; add them up "
            "before, or use one of Keras"
        )
    base = optimizer.__class__
    if issubclass(base, _DistributedV1):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    reducer = Reducer(
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients
    )
    # In the class, so that a copy made by from_config() is distributed too.
    members = {"__module__": base.__module__, "_bps": reducer}
    optimizer.__class__ = type(base.__name__, (_DistributedV1, base), members)
    return optimizer
