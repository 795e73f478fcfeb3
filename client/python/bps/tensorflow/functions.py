"""State of a model and objects, from one rank to all."""

import tensorflow as tf

from .. import _ops
from .._horovod import check_process_set, global_process_set
from .._ops import Handle
from . import _native


def variable_of(variable):
    """The tf.Variable in a variable of Keras, or the variable itself."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


_SIGNED = {tf.uint16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def _as_signed(variable):
    """The same bits, of a type that bps has: seeds are uint32."""
    signed = _SIGNED.get(variable.dtype)
    return variable if signed is None else tf.bitcast(variable, signed)


def broadcast_variables(variables, root_rank, process_set=global_process_set, inplace=False, scope=""):
    """Writes the variables of rank root_rank into those of every rank, which are in the same order there.

    They may be tf.Variable or of Keras. Inside tf.function, returns an operation that does it.
    """
    check_process_set(process_set)
    variables = [variable_of(variable) for variable in variables]
    tensors = [_native.to_tensor(_as_signed(v), f"variable {v.name}") for v in variables]
    names = [
        f"{scope}variable.{i}.{t.dtype.name}.{'x'.join(map(str, t.shape)) or 'scalar'}" for i, t in enumerate(tensors)
    ]
    came = _native.broadcast_all(tensors, root_rank, names)
    assigned = [
        variable.assign(value if value.dtype == variable.dtype else tf.bitcast(value, variable.dtype), read_value=False)
        for variable, value in zip(variables, came)
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


def broadcast_object(obj, root_rank=0, session=None, name=None, process_set=global_process_set):
    """Any object that pickle can carry, from rank root_rank to every rank. session is not used."""
    check_process_set(process_set)
    return Handle(_ops.broadcast_object(obj, root_rank, name)).wait()


def broadcast_object_fn(root_rank=0, session=None, name=None, process_set=global_process_set):
    """A function that is broadcast_object() of its argument."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj, session=None, name=None, process_set=global_process_set):
    """The list of every rank's object. session is not used."""
    check_process_set(process_set)
    return Handle(_ops.allgather_object(obj, name)).wait()
