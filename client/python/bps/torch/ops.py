"""Operations on PyTorch tensors.

A tensor on the CPU that is contiguous is read and written where it is. Any other is copied to host memory first and the
result is copied back; for tensors on an accelerator that is said once, as a warning.
"""

import warnings

import torch

from .. import _client, _ops
from .._library import DType, Reduction
from .._ops import Handle, Span, choose_reduction
from .compression import Compression

DTYPES = {
    torch.float64: DType.FLOAT64,
    torch.float32: DType.FLOAT32,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.int64: DType.INT64,
    torch.int32: DType.INT32,
    torch.int16: DType.INT16,
    torch.int8: DType.INT8,
    torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL,
}

_said_staging = False


def check_tensor(tensor, what="the tensor"):
    if tensor.layout != torch.strided:
        raise TypeError(f"{what} is sparse; bps takes dense tensors: call to_dense() on it")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"bps has no element type for {what}, which is of {tensor.dtype}")


def say_staging(device):
    global _said_staging
    if not _said_staging:
        _said_staging = True
        warnings.warn(f"bps moves tensors on {device} through host memory", stacklevel=3)


def span_of(tensor):
    """Of a contiguous tensor on the CPU."""
    return Span(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel(), tensor)


def _on_host(tensor):
    """The tensor itself, without its history, or a contiguous copy of it on the CPU."""
    check_tensor(tensor)
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        say_staging(tensor.device)
        tensor = tensor.cpu()
    return tensor.contiguous()


def _bring_back(result, tensor):
    """The result of an operation on tensor, in its place, or on its device."""
    return result if tensor.device.type == "cpu" else result.to(tensor.device)


def _write_back(result, tensor):
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result)
    return tensor


def _scaled(tensor, factor):
    return tensor if factor == 1.0 else (tensor * factor).to(tensor.dtype)


# -- push_pull, allreduce


def _start_push_pull(tensor, reduction, name, priority, prescale, postscale, in_place):
    host = _on_host(tensor)
    source = _scaled(host, prescale)
    ours = source.data_ptr() != tensor.data_ptr()  # a copy already, which may be overwritten
    target = source if in_place or ours else torch.empty_like(source)
    request = _ops.push_pull(span_of(source), span_of(target), reduction, name, priority)

    def steps():
        yield request
        result = _scaled(target, postscale)
        return _write_back(result, tensor) if in_place else _bring_back(result, tensor)

    return Handle(steps())


def push_pull_async(tensor, average=True, name=None, version=0, priority=0):
    """Starts push_pull(). version is there for programs written for BytePS and has no effect."""
    return _start_push_pull(tensor, choose_reduction(average, None), name, priority, 1.0, 1.0, False)


def push_pull_async_inplace(tensor, average=True, name=None, version=0, priority=0):
    """Starts push_pull_inplace()."""
    return _start_push_pull(tensor, choose_reduction(average, None), name, priority, 1.0, 1.0, True)


def push_pull_inplace(tensor, average=True, name=None, version=0, priority=0):
    """The average (or sum) of tensor over all ranks, written into it."""
    return push_pull_async_inplace(tensor, average, name, version, priority).wait()


def allreduce_async(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, priority=0):
    """Starts allreduce()."""
    reduction = choose_reduction(average, op)
    return _start_push_pull(tensor, reduction, name, priority, prescale_factor, postscale_factor, False)


def allreduce_async_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, priority=0):
    """Starts allreduce_()."""
    reduction = choose_reduction(average, op)
    return _start_push_pull(tensor, reduction, name, priority, prescale_factor, postscale_factor, True)


def allreduce_(tensor, average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, priority=0):
    """As allreduce(), into the tensor itself."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, priority).wait()


class _Reduce(torch.autograd.Function):
    """Every rank's result depends on every rank's input alike, so the gradient is reduced as the values were."""

    @staticmethod
    def forward(ctx, tensor, reduction, name, priority, prescale, postscale):
        ctx.arguments = (reduction, name, priority, prescale, postscale)
        return _start_push_pull(tensor, reduction, name, priority, prescale, postscale, False).wait()

    @staticmethod
    def backward(ctx, grad):
        reduction, name, priority, prescale, postscale = ctx.arguments
        if reduction not in (Reduction.SUM, Reduction.AVERAGE):
            raise RuntimeError("only sums and averages over ranks can be differentiated")
        if name is not None:
            name = f"{name}.grad"
        return _Reduce.apply(grad, reduction, name, priority, prescale, postscale), None, None, None, None, None


def push_pull(tensor, average=True, name=None, version=0, priority=0, compression=Compression.none):
    """The average (or sum) of tensor over all ranks, as a new tensor. Can be differentiated."""
    wire, ctx = compression.compress(tensor)
    result = _Reduce.apply(wire, choose_reduction(average, None), name, priority, 1.0, 1.0)
    return compression.decompress(result, ctx)


def allreduce(
    tensor,
    average=None,
    name=None,
    compression=Compression.none,
    op=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    priority=0,
):
    """The reduction of tensor over all ranks: op is Average, Sum, Min or Max. Sums and averages can be differentiated."""
    wire, ctx = compression.compress(tensor)
    reduction = choose_reduction(average, op)
    result = _Reduce.apply(wire, reduction, name, priority, prescale_factor, postscale_factor)
    return compression.decompress(result, ctx)


# -- broadcast


def _start_broadcast(tensor, root_rank, name, priority, in_place):
    host = _on_host(tensor)
    target = host if in_place or host.data_ptr() != tensor.data_ptr() else host.clone()
    request = _ops.broadcast(span_of(target), root_rank, name, priority)

    def steps():
        yield request
        return _write_back(target, tensor) if in_place else _bring_back(target, tensor)

    return Handle(steps())


def broadcast_async(tensor, root_rank, name=None, priority=0):
    """Starts broadcast()."""
    return _start_broadcast(tensor, root_rank, name, priority, False)


def broadcast_async_(tensor, root_rank, name=None, priority=0):
    """Starts broadcast_()."""
    return _start_broadcast(tensor, root_rank, name, priority, True)


def broadcast_(tensor, root_rank, name=None, priority=0):
    """Writes tensor of rank root_rank into tensor of every rank."""
    return broadcast_async_(tensor, root_rank, name, priority).wait()


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, root_rank, name):
        ctx.arguments = (root_rank, name)
        return broadcast_async(tensor, root_rank, name).wait()

    @staticmethod
    def backward(ctx, grad):
        root_rank, name = ctx.arguments
        total = _start_push_pull(grad, Reduction.SUM, _grad_name("broadcast", name), 0, 1.0, 1.0, False).wait()
        return total if _client.current().rank == root_rank else torch.zeros_like(total), None, None


def _grad_name(operation, name):
    return None if name is None else f"{operation}.{name}.grad"


def broadcast(tensor, root_rank, name=None):
    """tensor of rank root_rank, as a new tensor. Can be differentiated."""
    return _Broadcast.apply(tensor, root_rank, name)


# -- allgather, alltoall, reducescatter: along the first dimension


def _rows(tensor):
    """(rows, elements of one row)"""
    rows = tensor.shape[0] if tensor.dim() else 1
    row = 1
    for extent in tensor.shape[1:]:
        row *= extent
    return rows, row


def _maker(host):
    def make(rows):
        result = torch.empty((rows, *host.shape[1:]), dtype=host.dtype)
        return result, span_of(result)

    return make


def _start_allgather(tensor, name, finish):
    """A Handle whose result is finish(tensor, rows of each rank)."""
    host = _on_host(tensor)

    def steps():
        result, rows = yield from _ops.all_gather(span_of(host), *_rows(host), _maker(host), name)
        return finish(_bring_back(result, tensor), rows)

    return Handle(steps())


def allgather_async(tensor, name=None):
    """Starts allgather()."""
    return _start_allgather(tensor, name, lambda result, _: result)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, name):
        result, rows = _start_allgather(tensor, name, lambda *both: both).wait()
        ctx.arguments = (rows, name, tensor.shape)
        return result

    @staticmethod
    def backward(ctx, grad):
        rows, name, shape = ctx.arguments
        total = _start_push_pull(grad, Reduction.SUM, _grad_name("allgather", name), 0, 1.0, 1.0, False).wait()
        rank = _client.current().rank
        return total.narrow(0, sum(rows[:rank]), rows[rank]).reshape(shape), None


def allgather(tensor, name=None):
    """tensor of rank 0, rank 1, ... one after the other; the first dimension may differ. Can be differentiated."""
    return _AllGather.apply(tensor, name)


def _start_alltoall(tensor, splits, name):
    """A Handle whose result is (tensor, rows from each rank)."""
    host = _on_host(tensor)
    rows, row = _rows(host)
    cut = _ops.equal_splits(rows) if splits is None else [int(n) for n in splits]

    def steps():
        result, received = yield from _ops.all_to_all(span_of(host), rows, row, cut, _maker(host), name)
        return _bring_back(result, tensor), torch.tensor(received, dtype=torch.int32)

    return Handle(steps())


def alltoall_async(tensor, splits=None, name=None):
    """Starts alltoall(). The result is always (tensor, rows from each rank)."""
    return _start_alltoall(tensor, splits, name)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, splits, name):
        result, received = _start_alltoall(tensor, splits, name).wait()
        ctx.arguments = (received, name)
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx, grad, _):
        received, name = ctx.arguments
        back, _ = _start_alltoall(grad, received.tolist(), _grad_name("alltoall", name)).wait()
        return back, None, None


def alltoall(tensor, splits=None, name=None):
    """Sends splits[r] rows to rank r; returns the rows that came from rank 0, rank 1, ... Can be differentiated.

    Without splits, tensor is cut evenly. With splits, returns (tensor, rows from each rank).
    """
    result, received = _AllToAll.apply(tensor, splits, name)
    return result if splits is None else (result, received)


def reducescatter_async(tensor, op=Reduction.AVERAGE, name=None):
    """Starts reducescatter()."""
    host = _on_host(tensor)
    count, row = _rows(host)
    rows = _ops.scatter_rows(count)
    result, target = _maker(host)(rows[_client.current().rank])
    request = _ops.reduce_scatter(span_of(host), target, row, rows, Reduction(op), name)

    def steps():
        yield request
        return _bring_back(result, tensor)

    return Handle(steps())


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, op, name):
        ctx.arguments = (op, name)
        return reducescatter_async(tensor, op, name).wait()

    @staticmethod
    def backward(ctx, grad):
        op, name = ctx.arguments
        if op not in (Reduction.SUM, Reduction.AVERAGE):
            raise RuntimeError("only sums and averages over ranks can be differentiated")
        whole = allgather_async(grad, _grad_name("reducescatter", name)).wait()
        return whole / _client.current().size if op == Reduction.AVERAGE else whole, None, None


def reducescatter(tensor, op=Reduction.AVERAGE, name=None):
    """This rank's share of the rows of the reduction over all ranks; the first ranks get one more if uneven."""
    return _ReduceScatter.apply(tensor, Reduction(op), name)


# -- The rest


def poll(handle):
    """Whether synchronize(handle) would return at once."""
    return handle.poll()


def synchronize(handle, timeout=None):
    """Waits for an operation and returns its result. timeout in seconds: BpsTimeoutError when it passes."""
    return handle.wait(timeout)


def declare(name, tensor=None):
    """Names a tensor ahead of its first push_pull. Names alone need no declaring: they are the same on all ranks.

    With a tensor, the daemons agree on it now instead of at its first use.
    """
    if tensor is not None:
        check_tensor(tensor)
        dtype = DTYPES[tensor.dtype]
        full = _ops.tensor_name("push_pull", name, dtype, tensor.numel())
        _client.current().declare(full, dtype, tensor.numel())
