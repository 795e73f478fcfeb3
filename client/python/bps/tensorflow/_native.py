"""The operations of bps as operations of TensorFlow: libbps_tensorflow.so, loaded into TensorFlow.

submit() starts one and gives a handle, result() waits for it. Inside tf.function they become nodes of the graph, which
TensorFlow runs in the order of the program; see client/native/tensorflow_op.c for why nothing can wait in a circle.
"""

import ctypes
import errno
import functools
import re

MINIMUM = (2, 13)
NEEDS = "bps.tensorflow needs TensorFlow {0}.{1} or later ({{}}): pip install 'tensorflow>={0}.{1}'".format(*MINIMUM)

try:
    import tensorflow as tf
except ImportError as error:
    raise ImportError(NEEDS.format(error)) from error

from tensorflow.python.framework.func_graph import FuncGraph

from .. import _client, _horovod
from .._errors import BpsValueError, error_from
from .._install import WAY_OUT
from .._library import Operation, Order, native_path

_LIBRARY = "libbps_tensorflow.so"


def _load():
    if tuple(map(int, re.findall(r"\d+", tf.__version__)[:2])) < MINIMUM:
        raise ImportError(NEEDS.format(f"this is {tf.__version__}"))
    path = native_path(_LIBRARY)
    try:
        operations = tf.load_op_library(path)
        library = ctypes.CDLL(path)
    except (tf.errors.OpError, OSError) as error:
        raise ImportError(f"cannot load {path}: {error}; {WAY_OUT}") from error
    library.bps_tensorflow_failure.restype = ctypes.c_char_p
    library.bps_tensorflow_attach.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.bps_tensorflow_detach.argtypes = [ctypes.c_void_p]
    library.bps_tensorflow_detach.restype = None
    failure = library.bps_tensorflow_failure().decode()
    if failure:
        raise ImportError(f"bps.tensorflow does not work with TensorFlow {tf.__version__}: {failure}")
    return operations, library


_operations, _attached = _load()


def _attach(client):
    status = _attached.bps_tensorflow_attach(client.pointer, client.process_set)
    if status:
        raise error_from(status, "TensorFlow has no memory for a client of bps")


_client.others_begin()
_client.follow(_attach, lambda client: _attached.bps_tensorflow_detach(client.pointer), sets=True)

DTYPES = (
    tf.float64,
    tf.float32,
    tf.float16,
    tf.bfloat16,
    tf.int64,
    tf.int32,
    tf.int16,
    tf.int8,
    tf.uint8,
    tf.bool,
)

_ERRNO = {
    tf.errors.INVALID_ARGUMENT: errno.EINVAL,
    tf.errors.DEADLINE_EXCEEDED: errno.ETIME,
    tf.errors.CANCELLED: errno.ECANCELED,
    tf.errors.UNAVAILABLE: errno.ECONNRESET,
    tf.errors.FAILED_PRECONDITION: errno.ENOTCONN,
    tf.errors.RESOURCE_EXHAUSTED: errno.ENOMEM,
}


class _Failure(tf.errors.OpError):
    """What is both an error of bps and one of TensorFlow. Pickled and copied it is that of bps."""

    def __init__(self, number, text, error):
        OSError.__init__(self, number, text)
        self._node_def = self._op = None
        self._message, self._error_code = text, error.error_code
        self._experimental_payloads = error.experimental_payloads

    def __reduce__(self):
        return error_from, (-self.errno, self.strerror)

    # That of TensorFlow asks its operation, which in eager code there is not.
    __str__ = OSError.__str__


@functools.lru_cache(maxsize=None)
def _failure_class(ours, theirs):
    # What does not fit ranks or the moment is a FailedPreconditionError in Horovod, and in graphs an InvalidArgumentError.
    kinds = dict.fromkeys((theirs, *([tf.errors.FailedPreconditionError] if issubclass(ours, ValueError) else [])))
    return type(ours.__name__, (_Failure, ours, *kinds), {"__module__": ours.__module__, "__doc__": ours.__doc__})


def _failure(error, text):
    ours = error_from(-_ERRNO.get(error.error_code, errno.EIO), text)
    return _failure_class(type(ours), type(error))(ours.errno, ours.strerror, error)


def _call(run, /, **arguments):
    """In eager code a failure is a BpsError, and a tf.errors.OpError as well; in a graph it is only the latter, of whoever
    runs the graph."""
    if tf.executing_eagerly():
        try:
            return run(**arguments)
        except tf.errors.OpError as error:
            text = re.sub(r"^\{\{.*?\}\} | \[Op:.*$", "", error.message, flags=re.S)
            raise _failure(error, text) from None
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, FuncGraph):
        raise RuntimeError(
            "bps.tensorflow works in eager code and inside tf.function; in a graph of TensorFlow 1, whose nodes have "
            "no order, ranks would wait for each other for ever"
        )
    return run(**arguments)


def as_bps_errors(func):
    """func, whose failures inside graphs are BpsErrors too if they are of an operation of bps."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        try:
            return func(*args, **kwargs)
        except tf.errors.OpError as error:
            if not re.search(r"\bBps(Submit|Result|AllGather|AllToAll|PushPullRows)\b", error.message):
                raise
            raise _failure(error, error.message) from error

    return wrapper


def _client_of(process_set):
    try:
        return _horovod.client_of(process_set)
    except BpsValueError as error:
        raise _failure(tf.errors.InvalidArgumentError(None, None, error.strerror), error.strerror) from None


def over_process_set(function):
    """That of all front ends; a set that the rank is not in is an error of TensorFlow as well."""
    return _horovod.over_process_set(function, _client_of)


def to_tensor(value, what="the tensor"):
    """value as a dense tensor that bps can take."""
    if isinstance(value, tf.SparseTensor):
        raise TypeError(f"{what} is a SparseTensor; bps takes dense tensors and tf.IndexedSlices")
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"bps has no element type for {what}, which is of {tensor.dtype.name}")
    return tensor


_SIGNED = {tf.uint16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}


def to_moved(value, what="the tensor"):
    """For operations that only move elements, of unsigned types too: (tensor, what gives a result its type again)."""
    tensor = value if isinstance(value, tf.SparseTensor) else tf.convert_to_tensor(value)
    dtype = tensor.dtype
    if dtype not in _SIGNED:
        return to_tensor(tensor, what), lambda result: result
    return tf.bitcast(tensor, _SIGNED[dtype]), lambda result: tf.bitcast(result, dtype)


def _order(name):
    """The order of a call: the same as that of bps's own calls. Nodes of graphs are in none: functions that use
    variables may run beside what comes after them in the program, and no node knows which thread has called its graph.
    """
    if name is not None or not tf.executing_eagerly():
        return int(Order.NONE)
    return int(Order.CALLS if _client.current().orders_here() else Order.NONE)


def _process_set():
    """The number of the set over whose ranks a call is. A node keeps it: who runs it may be another thread."""
    client = _client.process_set_here()
    return 0 if client is None else client.process_set


def submit(tensor, operation, name=None, reduction=0, root=0, priority=0):
    """Starts a push_pull, broadcast or reduce_scatter of a tensor; result() takes what it returns.

    name: the same on all ranks; None: that of the tensor's type and size, for which the order of the program must be
    the same on all ranks.
    """
    return _call(
        _operations.bps_submit,
        input=tensor,
        tensor_name=name or "",
        operation=int(operation),
        reduction=int(reduction),
        root=root,
        priority=priority,
        order=_order(name),
        process_set=_process_set(),
    )


def result(handle, dtype, shape=None):
    """The outcome of submit(), which waits. shape: what is known of it."""
    output = _call(_operations.bps_result, handle=handle, T=dtype)
    if shape is not None and not tf.executing_eagerly():
        output.set_shape(shape)
    return output


def push_pull_all(tensors, reduction, names, priorities):
    """All at once: what is reduced first is under way while the rest is computed."""
    handles = [
        submit(tensor, Operation.PUSH_PULL, name, reduction, priority=priority)
        for tensor, name, priority in zip(tensors, names, priorities)
    ]
    # A thread of TensorFlow that waits computes nothing: none shall wait before everything is under way.
    with tf.control_dependencies([] if tf.executing_eagerly() else handles):
        return [result(handle, tensor.dtype, tensor.shape) for handle, tensor in zip(handles, tensors)]


def broadcast_all(tensors, root, names):
    """root: its number among all ranks, also in a process set."""
    client = _client.process_set_here()
    if client is not None:
        root = client.number_of(root)
    handles = [submit(tensor, Operation.BROADCAST, name, root=root) for tensor, name in zip(tensors, names)]
    with tf.control_dependencies([] if tf.executing_eagerly() else handles):
        return [result(handle, tensor.dtype, tensor.shape) for handle, tensor in zip(handles, tensors)]


def reduce_scatter(tensor, reduction, name=None):
    handle = submit(tensor, Operation.REDUCE_SCATTER, name, reduction)
    shape = tensor.shape
    if shape.rank is not None:
        rows = tf.compat.dimension_value(shape[0]) if shape.rank else 1
        client = _client.current()
        share = None if rows is None else rows // client.size + (client.rank < rows % client.size)
        shape = tf.TensorShape([share]).concatenate(shape[1:])
    return result(handle, tensor.dtype, shape)


def all_gather(tensor, name=None):
    """(rows of all ranks, how many came from each: int64)"""
    output, rows = _call(
        _operations.bps_all_gather,
        input=tensor,
        tensor_name=name or "",
        order=_order(name),
        process_set=_process_set(),
    )
    return _shaped(tensor, output, rows)


def all_to_all(tensor, splits, name=None):
    """(rows that came from all ranks, how many came from each: int64). splits: int64, rows for each rank."""
    output, rows = _call(
        _operations.bps_all_to_all,
        input=tensor,
        splits=splits,
        tensor_name=name or "",
        order=_order(name),
        process_set=_process_set(),
    )
    return _shaped(tensor, output, rows)


def push_pull_rows(values, numbers, table, reduction, name=None, priority=0):
    """Rows of a table of so many rows that any rank gives, added by their numbers (int64) where they are summed.

    Gives (values, numbers) of the result: each row once, ascending.
    """
    output, rows, count = _call(
        _operations.bps_push_pull_rows,
        values=values,
        numbers=numbers,
        table=table,
        tensor_name=name or "",
        operation=0,
        reduction=int(reduction),
        root=0,
        priority=priority,
        order=_order(name),
        process_set=_process_set(),
    )
    if not tf.executing_eagerly():
        output.set_shape(tf.TensorShape([None]).concatenate(values.shape[1:]))
        rows.set_shape([None])
        count.set_shape([])
    return output[:count], rows[:count]


def _shaped(tensor, output, rows):
    if not tf.executing_eagerly():
        output.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
        rows.set_shape([None])
    return output, rows
