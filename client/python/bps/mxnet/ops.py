"""Operations on NDArrays.

Those that know the size of their result before are the engine's: they return at once, and who reads the result waits.
allgather, alltoall and reducescatter wait.
"""

import mxnet
import numpy as np
from mxnet import autograd

import bps

from .. import _client, _ops
from .._horovod import check_process_set
from .._library import DType, Reduction
from .._ops import choose_reduction, group_names
from . import _engine
from .compression import from_params, wire_dtype

DTYPES = {t.name.lower() for t in DType} - {"bfloat16", "int16"}  # what an NDArray can be of


def _check(tensor):
    if not isinstance(tensor, mxnet.nd.NDArray):
        raise TypeError(f"bps.mxnet takes NDArrays, not {type(tensor).__name__}")
    if tensor.stype != "default":
        raise TypeError(
            f"bps.mxnet takes dense arrays: call tostype('default') on one of storage type {tensor.stype!r}"
        )
    if not tensor.context.device_type.startswith("cpu"):
        raise TypeError(f"bps.mxnet takes arrays on the CPU: call as_in_context(mx.cpu()) on one on {tensor.context}")
    dtype = np.dtype(tensor.dtype).name
    if dtype not in DTYPES:
        raise TypeError(f"bps.mxnet has no element type for {dtype}; there are: {', '.join(sorted(DTYPES))}")
    return dtype


def _one(request):
    yield request


def _place(name, dtype, shape):
    """(name, place in the order of calls) of a call. The engine submits in an order of its own, so the place is taken
    before.
    """
    if name is not None:
        return name, 0
    client = _client.current()
    name = f"noname.mxnet.{dtype}.{_client.shape_text(shape)}"
    if not client.orders_here():
        return name, 0
    return _ops.tensor_after(client, name), client.take_ordinal()


def _scaled(values, factor):
    """Integers are scaled as float64, floats of two bytes as float32: a factor may lie beyond what these can hold."""
    if factor == 1.0:
        return values
    dtype = np.dtype(values.dtype)
    wide = np.promote_types(dtype, np.float32) if dtype.kind == "f" else np.float64
    return (values.astype(wide) * factor).astype(dtype)


def _move(tensor, target, kind, name, dtype, submit, priority, prescale_factor=1.0, postscale_factor=1.0):
    """Starts an operation on a slot: tensor goes in, submit(span, name, ordinal) gives the request, target gets what
    comes out.
    """
    if not tensor.size:
        return target
    name, ordinal = _place(name, dtype, tensor.shape)
    slot = _engine.slot_of(_ops.tensor_name(kind, name, DType[dtype.upper()], tensor.shape), tensor.size, dtype)
    with autograd.pause():
        wire = slot.array.reshape(tensor.shape)  # the same memory, and the same to the engine
        wire[:] = _scaled(tensor, prescale_factor)
        _engine.push(slot, lambda: _one(submit(slot.span, name, ordinal)), priority)
        target[:] = wire if postscale_factor == 1.0 else _scaled(wire.astype(target.dtype), postscale_factor)
    return target


# -- push_pull, allreduce


def allreduce_(
    tensor,
    average=None,
    name=None,
    priority=0,
    prescale_factor=1.0,
    postscale_factor=1.0,
    process_set=None,
    op=None,
    compression=None,
):
    """Reduces tensor over all ranks, into itself: op is Average, Sum, Min or Max. A larger priority is more urgent."""
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _reduce([tensor], [name], average, op, process_set, compression, priority, **scale)[0]


def _reduce(tensors, names, average=None, op=None, process_set=None, compression=None, priority=0, **scale):
    """Either all begin, or none does. A failure that has come meanwhile, also of one of them, is raised by the next call."""
    check_process_set(process_set)
    _engine.raise_failure()
    reduction = choose_reduction(average, op)
    dtypes = [_check(tensor) for tensor in tensors]
    _ops.check_average(reduction, "bool" in dtypes)
    if compression is not None:
        dtypes = [wire_dtype(compression, dtype) for dtype in dtypes]

    def submit(span, name, ordinal):
        return _ops.push_pull(span, span, reduction, name, priority, ordinal=ordinal)

    return [
        _move(tensor, tensor, "push_pull", name, dtype, submit, priority, **scale)
        for tensor, name, dtype in zip(tensors, names, dtypes)
    ]


@_ops.form_of(allreduce_)
def allreduce(tensor, **asked):
    """As allreduce_(), into a new array."""
    return allreduce_(_copied(tensor), **asked)


@_ops.form_of(allreduce_)
def grouped_allreduce_(tensors, name=None, **asked):
    """allreduce_() of each of a list. They travel side by side, as all operations do."""
    return _reduce(tensors, group_names(name, len(tensors)), **asked)


@_ops.form_of(allreduce_)
def grouped_allreduce(tensors, **asked):
    """allreduce() of each of a list."""
    return grouped_allreduce_([_copied(t) for t in tensors], **asked)


def _copied(tensor):
    _check(tensor)
    with autograd.pause():
        return tensor.copy()


def push_pull(tensor, version=0, priority=0, name=None, is_average=True):
    """BytePS's: the average (or sum) over all ranks, into tensor itself. version has no effect."""
    return allreduce_(tensor, average=bool(is_average), name=name, priority=priority)


byteps_push_pull = push_pull


def declare(name, **compression):
    """BytePS's: names a tensor ahead. Names need no declaring: they are the same on all ranks. byteps_... are
    refused."""
    from_params(
        {key[7:]: value for key, value in compression.items() if key.startswith("byteps_")}, f"declare({name!r})"
    )


byteps_declare_tensor = declare


# -- broadcast


def broadcast_(tensor, root_rank, name=None, priority=0, process_set=None):
    """Writes tensor of rank root_rank into tensor of every rank."""
    check_process_set(process_set)
    _engine.raise_failure()
    dtype = _check(tensor)
    _client.current().number_of(root_rank)
    return _move(
        tensor,
        tensor,
        "broadcast",
        name,
        dtype,
        lambda span, name, ordinal: _ops.broadcast(span, root_rank, name, priority, ordinal=ordinal),
        priority,
    )


def broadcast(tensor, root_rank, name=None, priority=0, process_set=None):
    """tensor of rank root_rank, as a new array."""
    return broadcast_(_copied(tensor), root_rank, name, priority, process_set)


# -- allgather, alltoall, reducescatter: along the first dimension. They wait, for their sizes are the ranks' own.


def _on_host(tensor):
    _engine.raise_failure()
    _check(tensor)
    return tensor.asnumpy()


def _array(values):
    return (
        mxnet.nd.array(values, dtype=values.dtype) if values.size else mxnet.nd.zeros(values.shape, dtype=values.dtype)
    )


def allgather(tensor, name=None, priority=0, process_set=None):
    """tensor of rank 0, rank 1, ... one after the other; the first dimension may differ."""
    check_process_set(process_set)
    return _array(bps.allgather(_on_host(tensor), name))


def grouped_allgather(tensors, name=None, priority=0, process_set=None):
    """allgather() of each of a list."""
    return [allgather(t, n, priority, process_set) for t, n in zip(tensors, group_names(name, len(tensors)))]


def alltoall(tensor, splits=None, name=None, priority=0, process_set=None):
    """Sends splits[r] rows to rank r; returns the rows that came from rank 0, rank 1, ...

    Without splits, tensor is cut evenly. With splits, returns (tensor, rows from each rank).
    """
    check_process_set(process_set)
    if splits is None:
        return _array(bps.alltoall(_on_host(tensor), None, name))
    cut = splits.asnumpy() if isinstance(splits, mxnet.nd.NDArray) else splits
    rows, received = bps.alltoall(_on_host(tensor), [int(n) for n in cut], name)
    return _array(rows), mxnet.nd.array(received, dtype="int32")


def reducescatter(
    tensor,
    op=Reduction.AVERAGE,
    name=None,
    priority=0,
    process_set=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
):
    """This rank's share of the rows of the reduction; the first ranks get one more if uneven."""
    check_process_set(process_set)
    values = _scaled(_on_host(tensor), prescale_factor)
    _ops.check_scattered(values.ndim)
    return _array(_scaled(bps.reducescatter(values, op, name), postscale_factor))


@_ops.form_of(reducescatter)
def grouped_reducescatter(tensors, name=None, **asked):
    """reducescatter() of each of a list."""
    return [reducescatter(t, name=n, **asked) for t, n in zip(tensors, group_names(name, len(tensors)))]


def synchronize():
    """Returns when every operation so far is complete. Raises the failure of one, if it has not been raised before."""
    _engine.drain()
    _engine.raise_failure()


def barrier():
    """Returns when every rank has called it, after all operations before it."""
    synchronize()
    bps.barrier()


__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "declare",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "push_pull",
    "reducescatter",
    "synchronize",
]
