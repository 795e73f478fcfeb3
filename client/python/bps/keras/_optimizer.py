"""DistributedOptimizer: an optimizer of Keras 3 or tf_keras that steps with gradients averaged over all ranks."""

import functools
import sys
from urllib.parse import parse_qsl, urlencode

from .._horovod import global_process_set, process_set_of_ranks
from .._library import Reduction
from .._ops import form_of
from ._backend import BACKEND, IS_KERAS_2, Compression, Reducer, keras

_HOOKS = ("_clip_gradients", "_backend_apply_gradients")
_PACKAGE = "bps"  # of registered names
_COMPRESSIONS = ("fp16", "bf16")


class _Local:
    def register_local_var(self, variable):
        """The gradient of variable stays on its rank; it is divided by the number of ranks (scale_local_gradients)."""
        self._bps.register_local(variable)


class _Distributed(_Local):
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


class _DistributedApply(_Local):
    """The same for an optimizer with an apply() of its own, such as a MultiOptimizer: gradients are reduced before that."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(self._bps_reduced(grads, trainable_variables), trainable_variables)

    def _bps_reduced(self, grads, variables=None):
        known = getattr(self, "inner_optimizer", self)._trainable_variables
        return self._bps(list(grads), list(variables or known))


class _DistributedLossScale(_DistributedApply):
    """The same for a LossScaleOptimizer, which has to see the sum: an overflow on one rank skips the step on all."""

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):  # what JAX calls instead
        return super().stateless_apply(optimizer_variables, self._bps_reduced(grads), trainable_variables)


def _is_of_keras_2(cls):
    return any(each.__module__.partition(".")[0] == "tf_keras" for each in cls.__mro__)


def _keras_2():
    """What is added to an optimizer of tf_keras, and its reducer, whatever the Keras is that bps.keras works with."""
    from ..tensorflow._gradients import Reducer
    from ..tensorflow._keras_2 import DistributedKeras2

    return DistributedKeras2, Reducer


def is_distributed(optimizer):
    return hasattr(type(optimizer), "_bps")


def _distributed(
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
    local_layers=None,
    scale_local_gradients=True,
):
    base = optimizer.__class__
    keras_2 = _is_of_keras_2(base)
    if not keras_2 and (IS_KERAS_2 or not isinstance(optimizer, keras.optimizers.Optimizer)):
        raise TypeError(f"{optimizer!r} is no optimizer of Keras {keras.__version__}")
    if is_distributed(optimizer) or is_distributed(getattr(optimizer, "inner_optimizer", None)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    missing = [] if keras_2 else [hook for hook in _HOOKS if not hasattr(base, hook)]
    if missing:
        raise ImportError(f"bps.keras does not know Keras {keras.__version__}: its optimizers have no {missing[0]}()")
    if BACKEND != "tensorflow" and groups and not keras_2:
        raise ValueError(f"groups: gradients of Keras on {BACKEND} are not grouped")
    mixin, reducer_of = _keras_2() if keras_2 else (_mixin(base), Reducer)
    reducer = reducer_of(
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups if groups is None and num_groups else groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    scales = mixin is _DistributedLossScale
    if mixin is _DistributedApply and backward_passes_per_step > 1:
        raise ValueError(f"backward_passes_per_step: give the optimizers in {base.__name__} gradient_accumulation_steps")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}")
    if not keras_2:
        _accumulate(optimizer.inner_optimizer if scales else optimizer, backward_passes_per_step)
    # An optimizer that was made to add up passes takes the mean of them, as without bps.
    averages = average_aggregated_gradients or backward_passes_per_step == 1
    if scales and not averages:
        raise ValueError("a LossScaleOptimizer averages over passes: give average_aggregated_gradients=True")
    passes = backward_passes_per_step if keras_2 else 1  # an optimizer of Keras 3 has them itself
    optimizer.__class__ = _distributed_class(mixin, base, reducer, averages, passes)
    layers = [] if local_layers is None else local_layers
    for layer in layers if isinstance(layers, (list, tuple, set)) else [layers]:
        for variable in layer.trainable_weights:
            optimizer.register_local_var(variable)
    return optimizer


@form_of(_distributed, without=["local_layers"])
def DistributedOptimizer(optimizer, **asked):
    """Makes an optimizer step with gradients that are averaged (op: or summed, ...) over all ranks.

    The optimizer itself is changed and returned: its state stays. Models saved with it load without bps. All ranks must
    train the same variables. With backward_passes_per_step gradients of so many passes are added (averaged with
    average_aggregated_gradients) before they are sent. gradient_predivide_factor divides before and multiplies after
    the average, against overflow in 16 bits. groups (TensorFlow): a number or lists of variables, whose gradients are
    sent together. process_set: the ranks that train together; others train by themselves (not on JAX). The arguments name
    and the devices have no effect.
    """
    return _distributed(optimizer, **asked)


@form_of(_distributed, without=["num_groups"])
def PartialDistributedOptimizer(optimizer, **asked):
    """DistributedOptimizer() but for the (built) layers local_layers, whose gradients stay on their rank."""
    return _distributed(optimizer, **asked)


def _mixin(base):
    if issubclass(base, keras.optimizers.LossScaleOptimizer):
        return _DistributedLossScale
    return _Distributed if base.apply is keras.optimizers.Optimizer.apply else _DistributedApply


def _distributed_class(mixin, base, reducer, averages, passes=1):
    """A class, so that a copy made by from_config() is distributed too, and those that Keras makes of what it has saved or cloned
    in this process: Keras finds it by the name under which it is registered. Other processes find base there. Options are in what
    Keras does not need to find base: of its own classes, which lie in their modules, in the registered name; of others in the module.
    """
    keras_2 = _is_of_keras_2(base)  # with h5 files, that have but one name of a class, by which to find base
    options = "" if keras_2 else urlencode(_options_of(reducer, averages))
    is_keras = base.__module__.partition(".")[0] in ("keras", "tf_keras")
    saving = sys.modules["tf_keras" if keras_2 else "keras"].saving
    members = {
        "__module__": f"{base.__module__}?{options}" if options and not is_keras else base.__module__,
        "_bps": reducer,
        "_bps_variables": None,
        "_bps_averages_passes": averages,
        "_bps_passes": passes,
    }
    made = type(base.__name__, (mixin, base), members)
    package, _, name = saving.get_registered_name(base).rpartition(">")
    if options and is_keras:
        package, name = _PACKAGE, f"{base.__name__}?{options}"
    if package:
        saving.register_keras_serializable(package, name)(made)
    elif not (keras_2 and is_keras):  # of which there are legacy ones of the same name
        saving.get_custom_objects()[name] = made
    return made


def _options_of(reducer, averages):
    """{name: value} of those that differ from what DistributedOptimizer() takes without them."""
    options = {
        "op": "" if reducer.op == Reduction.AVERAGE else reducer.op.name,
        "compression": next((n for n in _COMPRESSIONS if reducer.compression is getattr(Compression, n, None)), ""),
        "gradient_predivide_factor": "" if reducer.predivide == 1.0 else repr(float(reducer.predivide)),
        "sparse_as_dense": "1" if reducer.sparse_as_dense else "",
        "scale_local_gradients": "" if reducer.scale_local_gradients else "0",
        "process_set": ",".join(map(str, reducer.process_set.ranks)) if _is_of_some(reducer.process_set) else "",
        "sums_passes": "" if averages else "1",
    }
    return {name: value for name, value in options.items() if value}


def _is_of_some(process_set):
    return bool(getattr(process_set, "process_set_id", 0))


def _saved_process_set(value):
    process_set = process_set_of_ranks([int(rank) for rank in value.split(",")])
    if process_set is None:
        raise ValueError(f"the optimizer was saved with process_set=[{value}]: call add_process_set([{value}]) first")
    return process_set


def saved_options(registered_name, module):
    """(the arguments of DistributedOptimizer() that these have, whether passes are summed). ValueError: there are no such arguments,
    or no such process set."""
    options = dict(parse_qsl(registered_name.partition("?")[2] or module.partition("?")[2]))
    read = {
        "op": {how.name: how for how in Reduction}.__getitem__,
        "compression": {n: getattr(Compression, n) for n in _COMPRESSIONS if hasattr(Compression, n)}.__getitem__,
        "gradient_predivide_factor": float,
        "sparse_as_dense": lambda value: value == "1",
        "scale_local_gradients": lambda value: value == "1",
    }
    sums_passes = options.pop("sums_passes", None) is not None
    process_set = options.pop("process_set", None)
    try:
        arguments = {name: read[name](value) for name, value in options.items()}
    except (KeyError, ValueError):
        raise ValueError(f"bps does not know these options of a DistributedOptimizer: {options}") from None
    if process_set is not None:
        arguments["process_set"] = _saved_process_set(process_set)
    return arguments, sums_passes


def undistributed(optimizer):
    """Undoes DistributedOptimizer()."""
    optimizer.__class__ = type(optimizer).__bases__[1]
    return optimizer


def _distributes_outermost(init):
    """Of LossScaleOptimizer, which Keras puts around an optimizer where the policy is mixed_float16 by the time of compile(), or users
    do. Inside, ranks would decide on each by itself whether a step is skipped, and wait for each other: so the
    LossScaleOptimizer is distributed in the place of what is inside.
    """

    @functools.wraps(init)
    def __init__(self, inner_optimizer, *arguments, **more):
        init(self, inner_optimizer, *arguments, **more)
        if not isinstance(inner_optimizer, _Distributed):
            return
        reducer, averages = inner_optimizer._bps, inner_optimizer._bps_averages_passes
        if not averages:
            raise ValueError("a LossScaleOptimizer averages over passes: give DistributedOptimizer average_aggregated_gradients=True")
        undistributed(inner_optimizer)
        self.__class__ = _distributed_class(_DistributedLossScale, type(self), reducer, averages)

    return __init__


if not IS_KERAS_2:
    keras.optimizers.LossScaleOptimizer.__init__ = _distributes_outermost(keras.optimizers.LossScaleOptimizer.__init__)


def _accumulate(optimizer, passes):
    if passes == 1:
        return
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
