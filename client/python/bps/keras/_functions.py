"""Values and state of models, between ranks. They go through NumPy, which all of Keras' backends have in common."""

import json
import zipfile

import numpy as np

from .. import _client
from .. import allgather as _allgather
from .. import broadcast as _broadcast
from .. import broadcast_async, broadcast_object, push_pull_async
from .. import reducescatter as _reducescatter
from .._library import Reduction
from .._ops import choose_reduction
from ._backend import IS_KERAS_2, from_numpy, keras, to_numpy
from ._optimizer import DistributedOptimizer, is_distributed, saved_options, undistributed


def _array(value):
    return np.asarray(to_numpy(value))


def allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=None):
    """The reduction of a value (a number, an array, a tensor) over all ranks, as a NumPy array; with tf_keras a tensor. For metrics.

    compression has no effect: such values are small.
    """
    array = _array(value)
    dtype = array.dtype
    packed = array if prescale_factor == 1.0 else (array * prescale_factor).astype(dtype)
    result = push_pull_async(packed, name=name, op=choose_reduction(average, op)).wait().astype(dtype)
    return from_numpy(result if postscale_factor == 1.0 else (result * postscale_factor).astype(dtype))


def push_pull(value, name=None, average=True):
    """allreduce() under BytePS's name and with its arguments."""
    return allreduce(value, name, average)


def allgather(value, name=None):
    """A value of rank 0, rank 1, ... one after the other, as a NumPy array; with tf_keras a tensor."""
    return from_numpy(_allgather(_array(value), name))


def broadcast(value, root_rank, name=None):
    """A value of rank root_rank, as a NumPy array; with tf_keras a tensor."""
    return from_numpy(_broadcast(_array(value), root_rank, name))


def reducescatter(value, name=None, op=Reduction.AVERAGE):
    """This rank's share of the rows of the reduction over all ranks, as a NumPy array; with tf_keras a tensor."""
    return from_numpy(_reducescatter(_array(value), op, name))


def broadcast_variables(variables, root_rank):
    """Writes Keras variables of rank root_rank into those of every rank, which are in the same order there."""
    variables = list(variables)
    mine = _client.current().rank == root_rank
    arrays = [_array(variable) for variable in variables]
    # Shapes first: an optimizer that was not built on one rank would be waited for until the deadline.
    shapes = [(array.dtype.name, array.shape) for array in arrays]
    of_root = broadcast_object(shapes, root_rank, "keras.shapes")
    if shapes != of_root:
        where = next((i for i, (a, b) in enumerate(zip(shapes, of_root)) if a != b), min(len(shapes), len(of_root)))
        raise ValueError(
            f"variables differ from those of rank {root_rank}: there are {len(shapes)} and {len(of_root)}, and number "
            f"{where} is the first that differs"
        )
    handles = []
    for i, array in enumerate(arrays):
        name = f"keras.{i}.{array.dtype.name}.{_client.shape_text(array.shape)}"
        handles.append(broadcast_async(_as_signed(array), root_rank, name))
    for variable, array, handle in zip(variables, arrays, handles):
        value = handle.wait()
        if not mine:
            variable.assign(value.view(array.dtype).reshape(array.shape))


def _as_signed(array):
    """The same bits, of a type that bps has: seeds are uint32."""
    array = np.ascontiguousarray(array)
    return array.view(f"int{8 * array.itemsize}") if array.dtype.kind == "u" and array.itemsize > 1 else array


def broadcast_global_variables(root_rank):
    """Refused: Keras keeps no list of all variables."""
    raise RuntimeError(
        "Keras keeps no list of global variables: use broadcast_variables(model.variables, root_rank), or "
        "callbacks.BroadcastGlobalVariablesCallback"
    )


def load_model(filepath, custom_optimizers=None, custom_objects=None, compression=None, legacy_opts=False):
    """keras.models.load_model(), with the optimizer, its state too, as a DistributedOptimizer, with the options (but groups) that it
    had when it was saved.

    custom_optimizers: classes of the caller's own among which the optimizer may be. legacy_opts has no effect with tf_keras, whose
    files say it.
    """
    if legacy_opts and not IS_KERAS_2:
        raise ValueError("legacy_opts: there are no legacy optimizers in Keras 3")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects.update(custom_objects or {})
    name, registered, module = _saved_optimizer(filepath)
    if name in objects:
        objects.setdefault(registered, objects[name])
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is None:
        raise ValueError(
            f"{filepath}: the model was saved without an optimizer; compile it with a DistributedOptimizer"
        )
    try:
        options, sums_passes = saved_options(registered, module)
    except ValueError as error:
        raise ValueError(f"{filepath}: {error}") from None
    if compression is not None:
        options["compression"] = compression
    optimizer = model.optimizer
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if is_distributed(each):  # of a class that was distributed in this process, perhaps with other options
            undistributed(each)
    if sums_passes:
        options["backward_passes_per_step"] = optimizer.gradient_accumulation_steps or 1
    DistributedOptimizer(optimizer, **options)
    return model


def _saved_optimizer(filepath):
    """(name of its class, the name under which that is registered, its module) of the optimizer in a file of model.save(); "" for what
    there is none of.
    """
    try:
        if zipfile.is_zipfile(filepath):
            with zipfile.ZipFile(filepath) as file:
                config = json.loads(file.read("config.json"))
            optimizer = (config.get("compile_config") or {}).get("optimizer") or {}
            return [optimizer.get(key) or "" for key in ("class_name", "registered_name", "module")]
        import h5py

        with h5py.File(filepath) as file:
            config = json.loads(file.attrs["training_config"])["optimizer_config"]
        registered = config["class_name"]
        return registered.rpartition(">")[2].partition("?")[0], registered, ""
    except (OSError, KeyError, ValueError, TypeError, ImportError):
        return "", "", ""  # what is wrong with the file Keras says


__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "load_model",
    "push_pull",
    "reducescatter",
]
