"""State of a model and objects, from one rank to all."""

import tensorflow as tf

from .. import _ops
from .._horovod import global_process_set
from .._ops import Handle
from . import _native
from ._native import over_process_set


def variable_of(variable):
    """The tf.Variable in a variable of Keras, or the variable itself."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


@over_process_set
def broadcast_variables(variables, root_rank, process_set=global_process_set, inplace=False, scope=""):
    """Writes the variables of rank root_rank into those of every rank, which are in the same order there.

    They may be tf.Variable or of Keras. Inside tf.function, returns an operation that does it.
    """
    variables = [variable_of(variable) for variable in variables]
    moved = [_native.to_moved(v, f"variable {v.name}") for v in variables]
    tensors = [tensor for tensor, _ in moved]
    names = [
        f"{scope}variable.{i}.{t.dtype.name}.{'x'.join(map(str, t.shape)) or 'scalar'}" for i, t in enumerate(tensors)
    ]
    came = _native.broadcast_all(tensors, root_rank, names)
    assigned = [
        variable.assign(restored(value), read_value=False)
        for variable, value, (_, restored) in zip(variables, came, moved)
    ]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_global_variables(root_rank):
    """broadcast_variables() of tf.compat.v1.global_variables(), which eager code has none of: refused there."""
    variables = tf.compat.v1.global_variables()
    if not variables:
        raise RuntimeError(
            "there are no global variables: TensorFlow 2 keeps no list of them. Use "
            "broadcast_variables(model.variables, root_rank), or Keras' BroadcastGlobalVariablesCallback"
        )
    return broadcast_variables(variables, root_rank)


@over_process_set
def broadcast_object(obj, root_rank=0, session=None, name=None, process_set=global_process_set):
    """Any object that pickle can carry, from rank root_rank to every rank. session is not used."""
    return Handle(_ops.broadcast_object(obj, root_rank, name)).wait()


def broadcast_object_fn(root_rank=0, session=None, name=None, process_set=global_process_set):
    """A function that is broadcast_object() of its argument."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@over_process_set
def allgather_object(obj, session=None, name=None, process_set=global_process_set):
    """The list of every rank's object. session is not used."""
    return Handle(_ops.allgather_object(obj, name)).wait()


__all__ = [
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]
