"""bps: gradient communication through the daemon of this machine.

    import bps
    bps.init()
    mean = bps.push_pull(gradient)      # over all ranks

The calls here take NumPy arrays, array.array, bytearray and memoryview; bps.torch has the same and more for PyTorch. Start
several ranks with `bpslaunch -np 4 python train.py`. See bps_python(7).
"""

__version__ = "0.1.0"

import ctypes

from . import _join, _ops
from ._buffers import Tensor as _Tensor
from ._client import Arena as _Arena
from ._client import current as _current
from ._client import init, is_initialized, shutdown
from ._errors import (
    BpsCanceledError,
    BpsConnectionError,
    BpsDroppedError,
    BpsError,
    BpsMembershipError,
    BpsNotInitializedError,
    BpsTimeoutError,
    BpsUnsupportedError,
    BpsValueError,
)
from ._library import SIZES, Reduction
from ._ops import Handle

Average = Reduction.AVERAGE
Sum = Reduction.SUM
Min = Reduction.MIN
Max = Reduction.MAX

__all__ = [
    "Average",
    "BpsCanceledError",
    "BpsConnectionError",
    "BpsDroppedError",
    "BpsError",
    "BpsMembershipError",
    "BpsNotInitializedError",
    "BpsTimeoutError",
    "BpsUnsupportedError",
    "BpsValueError",
    "Handle",
    "Max",
    "Min",
    "Sum",
    "accumulate",
    "accumulate_async",
    "allgather",
    "allgather_async",
    "allgather_object",
    "alloc",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "empty",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_rows",
    "push_pull_rows_async",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
    "zeros",
]


def rank():
    """The number of this process in its job, from 0."""
    return _current().rank


def size():
    """Processes of the job."""
    return _current().size


def local_rank():
    """The number of this process among the job's processes on this machine."""
    return _current().local_rank


def local_size():
    """The job's processes on this machine."""
    return _current().local_size


def join():
    """For a rank that has come to the end of its data while others go on: takes part in the operations that they begin, with
    zeros for sums and averages, until every rank has called it. Other operations than push_pull() with op=Sum or Average and
    barrier() fail on all ranks meanwhile. What this rank has begun itself, and not waited for, goes on. Waits as long as the
    others train.

    Returns the highest rank that was the last to call it.
    """
    return _join.join()


# -- Memory


def alloc(nbytes):
    """nbytes of zeroed memory that the daemon reaches without a copy, as an object with the buffer protocol."""
    return _Arena.buffer(_current(), nbytes)


def zeros(shape, dtype="float32"):
    """A NumPy array in memory that the daemon reaches without a copy."""
    import numpy

    dtype = numpy.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = 1
    for extent in shape:
        count *= extent
    buffer = alloc(max(1, count * dtype.itemsize))
    return numpy.frombuffer(buffer, dtype, count).reshape(shape)


empty = zeros  # fresh memory from the kernel is zeroed anyway


# -- Operations. Those that end in _async return a Handle at once. timeout (in seconds) is the deadline of the operation:
# it fails with BpsTimeoutError, which names the ranks that are missing, on all ranks that take part. None: the job's.


def poll(handle):
    """Whether synchronize(handle) would return at once."""
    return handle.poll()


def synchronize(handle, timeout=None):
    """Waits for an operation and returns its result. timeout in seconds: BpsTimeoutError when it passes."""
    return handle.wait(timeout)


def _one(request, result):
    """Steps of an operation that is one request."""
    yield request
    return result


def push_pull_async(
    x, average=None, name=None, *, op=None, output=None, priority=0, timeout=None, all_ranks=False
):
    """Starts push_pull(). Neither x nor output may be touched before the handle is complete."""
    source = _Tensor(x)
    target = source.like() if output is None else _Tensor(output, writable=True)
    if target.dtype != source.dtype or target.span.count != source.span.count:
        raise ValueError("output must have the type and the number of elements of the input")
    reduction = _ops.choose_reduction(average, op)
    request = _ops.push_pull(source.span, target.span, reduction, name, priority, timeout, all_ranks)
    return Handle(_one(request, target.object))


@_ops.waits_for(push_pull_async)
def push_pull():
    """The average of x over all ranks, element by element; average=False or op=bps.Sum, bps.Min, bps.Max for another.

    The result is a new object of x's kind, or output, which may be x itself. all_ranks: in a job with a quorum, this one
    waits for all ranks, and has what came too late for those before.
    """


def accumulate_async(x, name, *, output=None, priority=0, timeout=None, all_ranks=False):
    """Starts accumulate()."""
    source = _Tensor(x)
    target = source.like() if output is None else _Tensor(output, writable=True)
    if target.dtype != source.dtype or target.span.count != source.span.count:
        raise ValueError("output must have the type and the number of elements of the input")
    request = _ops.accumulate(source.span, target.span, name, priority, timeout, all_ranks)
    return Handle(_one(request, target.object))


@_ops.waits_for(accumulate_async)
def accumulate():
    """Adds x to what servers keep under this name, which was 0 at first, and returns that, with what other ranks have
    added until then. For jobs with asynchronous=True (BPS_ASYNC=1).

    Waits for no rank, but for those that are further behind than the job's staleness; all_ranks: for all to come to this
    call.
    """


def push_pull_rows_async(rows, values, table, average=None, name=None, *, op=None, room=None, priority=0):
    """Starts push_pull_rows()."""
    import numpy

    values = numpy.asarray(values)
    rows = numpy.asarray(rows)
    if rows.dtype.kind not in "iu":
        raise TypeError(f"row numbers must be integers, not {rows.dtype.name}")
    if rows.ndim != 1 or values.shape[:1] != rows.shape:
        raise ValueError(f"{rows.shape} row numbers do not fit values of shape {values.shape}: one for each row")
    numbers, source = _Tensor(rows.astype(numpy.int64, copy=False)), _Tensor(values)

    def make(n):
        into, target = numbers.like(n), source.like(n)
        return (into.object, target.object), _ops.Rows(into.span, target.span, source.row)

    given = _ops.Rows(numbers.span, source.span, source.row)
    reduction = _ops.choose_reduction(average, op)

    def steps():
        result, n = yield from _ops.push_pull_rows(given, int(table), make, reduction, name, priority, room=room)
        return tuple(array[:n] for array in result)

    return Handle(steps())


@_ops.waits_for(push_pull_rows_async)
def push_pull_rows():
    """The average over all ranks of some rows of a table, as gradients of embeddings are: (rows, values).

    rows: the numbers of this rank's rows, from 0 to table - 1, in any order, repeated as they come; values: as many rows,
    NumPy arrays both. The result has each row that any rank gave, by ascending number; a rank that did not give it counts
    as zero. room: the most rows that the result may have (else it fails with ENOSPC), of which there are never more than all
    ranks gave. average=False or op=bps.Sum, bps.Min, bps.Max for another reduction.
    """


def broadcast_async(x, root_rank=0, name=None, *, output=None, priority=0, timeout=None):
    """Starts broadcast()."""
    source = _Tensor(x, moves=True)
    target = source.like() if output is None else _Tensor(output, writable=True, moves=True)
    if target.dtype != source.dtype or target.span.count != source.span.count:
        raise ValueError("output must have the type and the number of elements of the input")
    if target.object is not source.object and rank() == root_rank and source.span.count:
        ctypes.memmove(target.span.address, source.span.address, source.span.count * SIZES[source.dtype])
    return Handle(_one(_ops.broadcast(target.span, root_rank, name, priority, timeout=timeout), target.object))


@_ops.waits_for(broadcast_async)
def broadcast():
    """x of rank root_rank, on every rank. The result is a new object of x's kind, or output, which may be x itself.

    As allgather() and alltoall() it only moves, and takes arrays of any type but object.
    """


def allgather_async(x, name=None, *, timeout=None):
    """Starts allgather()."""
    source = _Tensor(x, moves=True)

    def steps():
        result, _ = yield from _ops.all_gather(
            source.span, source.rows, source.row, lambda n: _made(source, n), name, timeout
        )
        return result

    return Handle(steps())


@_ops.waits_for(allgather_async)
def allgather():
    """x of rank 0, rank 1, ... one after the other, along the first dimension, which may differ from rank to rank."""


def _made(source, rows):
    target = source.like(rows)
    return target.object, target.span


def alltoall_async(x, splits=None, name=None, *, timeout=None):
    """Starts alltoall()."""
    source = _Tensor(x, moves=True)
    cut = _ops.equal_splits(source.rows) if splits is None else [int(n) for n in splits]

    def steps():
        result, rows = yield from _ops.all_to_all(
            source.span, source.rows, source.row, cut, lambda n: _made(source, n), name, timeout
        )
        return result if splits is None else (result, rows)

    return Handle(steps())


@_ops.waits_for(alltoall_async)
def alltoall():
    """Sends splits[r] rows of x to rank r and returns what came from rank 0, rank 1, ... one after the other.

    Without splits, x is cut evenly. With splits, returns (rows, how many came from each rank).
    """


def reducescatter_async(x, op=Average, name=None, *, timeout=None):
    """Starts reducescatter()."""
    source = _Tensor(x)
    rows = _ops.scatter_rows(source.rows)
    target = source.like(rows[rank()])
    request = _ops.reduce_scatter(source.span, target.span, source.row, rows, Reduction(op), name, timeout)
    return Handle(_one(request, target.object))


@_ops.waits_for(reducescatter_async)
def reducescatter():
    """This rank's share of the rows of the reduction of x over all ranks; the first ranks get one more if uneven."""


def barrier(*, timeout=None):
    """Returns when every rank has called it."""
    Handle(_one(_ops.barrier(timeout), None)).wait()


def broadcast_object(obj, root_rank=0, name=None, *, timeout=None):
    """Any object that pickle can carry, from rank root_rank to every rank."""
    return Handle(_ops.broadcast_object(obj, root_rank, name, timeout)).wait()


def allgather_object(obj, name=None, *, timeout=None):
    """The list of every rank's object."""
    return Handle(_ops.allgather_object(obj, name, timeout)).wait()
