"""DistributedOptimizer: an optimizer of Keras 3 that steps with gradients averaged over all ranks."""

from .._horovod import global_process_set
from .._library import Reduction
from ._backend import BACKEND, Compression, Reducer, keras

_HOOKS = ("_clip_gradients", "_backend_apply_gradients")


class _Distributed:
    """What DistributedOptimizer adds to the class of an optimizer.

    Gradients are reduced where Keras clips them: when those of several passes have been added up, and before they are
    clipped, so that what is clipped is what one process would have clipped.
    """

    def _backend_apply_gradients(self, grads, trainable_variables):
        object.__setattr__(self, "_bps_variables", list(trainable_variables))
        try:
            return super()._backend_apply_gradients(grads, trainable_variables)
        finally:
            object.__setattr__(self, "_bps_variables", None)

    def _clip_gradients(self, grads):
        reduced = self._bps(grads, self._bps_variables)
        passes = self.gradient_accumulation_steps or 1
        if passes > 1 and not self._bps_averages_passes:
            reduced = [None if g is None else g * passes for g in reduced]  # Keras has divided by it
        return super()._clip_gradients(reduced)

    def register_local_var(self, variable):
        """The gradient of variable stays on its rank; it is divided by the number of ranks (scale_local_gradients)."""
        self._bps.register_local(variable)


class _DistributedLossScale:
    """The same for a LossScaleOptimizer, which has to see the sum: an overflow on one rank skips the step on all."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(self._bps_reduced(grads, trainable_variables), trainable_variables)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):  # what JAX calls instead
        return super().stateless_apply(optimizer_variables, self._bps_reduced(grads), trainable_variables)

    def _bps_reduced(self, grads, variables=None):
        return self._bps(list(grads), list(variables or self.inner_optimizer._trainable_variables))

    def register_local_var(self, variable):
        """The gradient of variable stays on its rank; it is divided by the number of ranks (scale_local_gradients)."""
        self._bps.register_local(variable)


def _needs_loss_scale(optimizer):
    """Keras would wrap the optimizer, and then decide on each rank by itself whether there was an overflow."""
    policy = keras.config.dtype_policy()
    return policy.name == "mixed_float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def DistributedOptimizer(
    optimizer,
    name=None,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    sparse_as_dense=False,
    gradient_predivide_factor=1.0,
    op=Reduction.AVERAGE,
    backward_passes_per_step=1,
    average_aggregated_gradients=False,
    num_groups=0,
    groups=None,
    process_set=global_process_set,
    scale_local_gradients=True,
):
    """Makes an optimizer step with gradients that are averaged (op: or summed, ...) over all ranks.

    The optimizer itself is changed and returned: its state stays. Models saved with it load without bps. All ranks must
    train the same variables. With backward_passes_per_step gradients of so many passes are added (averaged with
    average_aggregated_gradients) before they are sent. gradient_predivide_factor divides before and multiplies after
    the average, against overflow in 16 bits. groups (TensorFlow): a number or lists of variables, whose gradients are
    sent together. The arguments name and the devices have no effect.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"{optimizer!r} is no optimizer of Keras {keras.__version__}")
    base = optimizer.__class__
    if issubclass(base, (_Distributed, _DistributedLossScale)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    if _needs_loss_scale(optimizer):
        raise ValueError(
            "with the policy mixed_float16 give DistributedOptimizer a LossScaleOptimizer: "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). What Keras would put around it "
            "decides on each rank by itself whether a step is skipped"
        )
    missing = [hook for hook in _HOOKS if not hasattr(base, hook)]
    if missing:
        raise ImportError(f"bps.keras does not know Keras {keras.__version__}: its optimizers have no {missing[0]}()")
    if BACKEND != "tensorflow" and groups:
        raise ValueError(f"groups: gradients of Keras on {BACKEND} are not grouped")
    reducer = Reducer(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups if groups is None and num_groups else groups,
        process_set,
        scale_local_gradients,
    )
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    _accumulate(optimizer.inner_optimizer if scales else optimizer, backward_passes_per_step)
    if scales and backward_passes_per_step > 1 and not average_aggregated_gradients:
        raise ValueError("a LossScaleOptimizer averages over passes: give average_aggregated_gradients=True")
    # In the class, so that a copy made by from_config() is distributed too.
    members = {
        "__module__": base.__module__,
        "_bps": reducer,
        "_bps_variables": None,
        "_bps_averages_passes": average_aggregated_gradients,
    }
    optimizer.__class__ = type(base.__name__, (_DistributedLossScale if scales else _Distributed, base), members)
    return optimizer


def _accumulate(optimizer, passes):
    if passes == 1:
        return
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}")
    if optimizer.built and optimizer.gradient_accumulation_steps != passes:
        raise ValueError(
            "backward_passes_per_step: the optimizer has its variables already, without those in which gradients are "
            f"added up; make it with gradient_accumulation_steps={passes}"
        )
    if optimizer.gradient_accumulation_steps not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step={passes}, but gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}"
        )
    optimizer.gradient_accumulation_steps = passes


def PartialDistributedOptimizer(
    optimizer,
    name=None,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    sparse_as_dense=False,
    gradient_predivide_factor=1.0,
    op=Reduction.AVERAGE,
    backward_passes_per_step=1,
    average_aggregated_gradients=False,
    groups=None,
    process_set=global_process_set,
    local_layers=None,
    scale_local_gradients=True,
):
    """DistributedOptimizer() but for the (built) layers local_layers, whose gradients stay on their rank."""
    optimizer = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        0,
        groups,
        process_set,
        scale_local_gradients,
    )
    layers = [] if local_layers is None else local_layers
    for layer in layers if isinstance(layers, (list, tuple, set)) else [layers]:
        for variable in layer.trainable_weights:
            optimizer.register_local_var(variable)
    return optimizer
