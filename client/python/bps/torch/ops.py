"""Operations on PyTorch tensors.

A tensor on the CPU or on a CUDA device that is contiguous is read and written where it is; of any other there is a copy first
and the result is copied back. On CUDA operations take their place in the stream that is current, and synchronize() makes
the stream that is current then wait; nobody waits on the host. Tensors on other accelerators are copied to host memory, which
is said once, as a warning.

timeout (in seconds) is the deadline of an operation: it fails with BpsTimeoutError, which names the ranks that are
missing. None: the job's. process_set: over whose ranks the operation is, as add_process_set() has it; None: over all. A root
is named by its number among all ranks.

output_dtype is torch.float32, for a tensor of float16 or bfloat16: the result has that type and the bits of tensor.float()'s,
without this copy. None: the tensor's. A tensor on a CUDA device is to be converted.
"""

import copy
import time

import torch

from .. import _client, _ops
from .._horovod import Product, over_process_set
from .._library import DType, Reduction
from .._ops import Handle, Span, choose_reduction, group_names
from . import _devices, sparse
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


def check_kind(tensor, what="the tensor"):
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise TypeError(f"bps.torch takes tensors, and {what} is of type {kind}: torch.as_tensor() makes one of it")


def check_tensor(tensor, what="the tensor"):
    check_kind(tensor, what)
    if tensor.layout != torch.strided:
        raise TypeError(f"{what} is sparse, or of another layout than bps takes here: call to_dense() on it")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"bps has no element type for {what}, which is of {tensor.dtype}")


# By the bytes of an element: what those types travel as that bps does not know, where they only move.
_MOVED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_moved(tensor):
    """For operations that only move, which take tensors of any type."""
    check_kind(tensor)
    if tensor.layout != torch.strided or tensor.is_quantized:
        check_tensor(tensor)


def as_moved(tensor):
    """The tensor, without its history; of a type that bps does not know (complex, unsigned, float8) a view with elements that it
    does know, or a copy where the tensor is conjugated or negated on demand. For operations that only move.
    """
    check_moved(tensor)
    tensor = tensor.detach()
    if tensor.dtype in DTYPES:
        return tensor
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        return torch.view_as_real(tensor)
    return tensor.view(_MOVED_AS[tensor.element_size()])


def from_moved(moved, dtype):
    """A view of what as_moved() made of a tensor of this type, as a tensor of this type again."""
    if dtype == torch.complex128:
        return torch.view_as_complex(moved)
    return moved if moved.dtype == dtype else moved.view(dtype)


def span_of(tensor):
    """Of a tensor without holes, where the daemon finds it; its elements in the order in which they lie in memory."""
    device = _devices.device_of(tensor)
    return Span(_devices.address_of(tensor), DTYPES[tensor.dtype], tensor.numel(), tensor, device, tensor.shape)


def _brought(tensor):
    """The tensor itself, without its history, or a contiguous copy of it, where the daemon finds it."""
    check_tensor(tensor)
    return _devices.brought(tensor.detach()).contiguous()


def _like(tensor):
    """A new tensor of the same shape, beside one that was brought."""
    return _devices.empty(tensor.shape, tensor.dtype, tensor)


def _bring_back(result, tensor):
    """The result of an operation on tensor, in its place, or on its device."""
    return result if result.device == tensor.device else result.to(tensor.device)


def _write_back(result, tensor):
    if result.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(result)
    return tensor


def _scaled(tensor, factor):
    """Integers are scaled as float64: torch takes float32, which has room for 24 bits of them."""
    if factor == 1.0:
        return tensor
    wide = tensor if tensor.is_floating_point() else tensor.to(torch.float64)
    return (wide * factor).to(tensor.dtype)


def _grad_names(names, operation=""):
    """What the gradients of an operation's tensors are called."""
    return [None if name is None else f"{operation}{name}.grad" for name in names]


# -- push_pull, allreduce


_WIDENED = (torch.float16, torch.bfloat16)


class _Reducing:
    """What a reduction is asked for beside its tensor. process_set is for over_process_set()."""

    def __init__(
        self,
        average=None,
        name=None,
        op=None,
        prescale_factor=1.0,
        postscale_factor=1.0,
        process_set=None,
        priority=0,
        timeout=None,
        output_dtype=None,
    ):
        self.reduction = op if op is Product and average is None else choose_reduction(average, op)
        self.name = name
        self.priority = priority
        self.prescale = prescale_factor
        self.postscale = postscale_factor
        self.timeout = timeout
        self.output_dtype = output_dtype
        if output_dtype is not None and output_dtype not in DTYPES:
            raise TypeError(f"output_dtype={output_dtype} is no type that bps reduces")

    def named(self, name):
        how = copy.copy(self)
        how.name = name
        return how

    def result_like(self, shape, source):
        """New memory for a result, beside what the reduction begins with."""
        return _devices.empty(shape, self.output_dtype or source.dtype, source)

    def scaled(self, tensor):
        """What the reduction begins with. A copy that scales is made in the type of the result."""
        source = _brought(tensor)
        if self.prescale != 1.0 and self.output_dtype == torch.float32 and source.dtype in _WIDENED:
            source = source.to(self.output_dtype)
        return _scaled(source, self.prescale)

    def factor(self):
        """What the gradient of a rank's share of a reduction is multiplied by: as in Horovod, size() times the derivative."""
        _ops.check_differentiable(self.reduction)
        each = 1.0 if self.reduction == Reduction.AVERAGE else _client.current().size
        return self.prescale * self.postscale * each

    def check(self, tensor):
        check_kind(tensor)
        widens = self.output_dtype not in (None, tensor.dtype)
        if widens and (sparse.is_sparse(tensor) or self.reduction is Product):
            raise TypeError("output_dtype is for sums, averages, minima and maxima of tensors that are not sparse")
        if sparse.is_sparse(tensor):
            sparse.check(tensor, DTYPES)
        else:
            check_tensor(tensor)
        _ops.check_average(self.reduction, tensor.dtype == torch.bool)

    def check_rows(self, tensor):
        """For a reduction whose rows are scattered."""
        self.check(tensor)
        check_tensor(tensor)
        _ops.check_scattered(tensor.dim())

    def start(self, tensor, in_place):
        self.check(tensor)
        if sparse.is_sparse(tensor):
            return sparse.start(tensor, self, in_place)
        if self.reduction is Product:
            return self._start_product(tensor, in_place)
        source = self.scaled(tensor)
        ours = source.data_ptr() != tensor.data_ptr()  # a copy already, which may be overwritten
        is_whole = self.output_dtype in (None, source.dtype)
        target = source if in_place or (ours and is_whole) else self.result_like(source.shape, source)
        request = _ops.push_pull(
            span_of(source), span_of(target), self.reduction, self.name, self.priority, self.timeout
        )

        def steps():
            yield request
            result = _scaled(target, self.postscale)
            return _write_back(result, tensor) if in_place else _bring_back(result, tensor)

        return Handle(steps())

    def _start_product(self, tensor, in_place):
        source = _scaled(_brought(tensor), self.prescale)
        size = _client.current().size
        factors = _devices.empty((size, *source.shape), source.dtype, source)

        def steps():
            gathering = _ops.gather_factors(span_of(source), span_of(factors), size, self.name, self.timeout)
            came = yield from gathering
            result = _scaled(factors[:came].prod(0, dtype=source.dtype), self.postscale)
            return _write_back(result, tensor) if in_place else _bring_back(result, tensor)

        return Handle(steps())


class _Reduce(torch.autograd.Function):
    """Of several tensors, all under way together. As of all operations, what backward() does can be differentiated again."""

    @staticmethod
    def forward(ctx, names, how, *tensors):
        _client.remember(ctx)
        ctx.names, ctx.how = names, how
        return tuple(_start_reductions(tensors, names, how, in_place=False).wait())

    @staticmethod
    @_client.as_remembered
    def backward(ctx, *grads):
        """Every rank's result depends on every rank's input alike, so gradients are reduced as the values were."""
        _ops.check_differentiable(ctx.how.reduction)
        return None, None, *_Reduce.apply(_grad_names(ctx.names), ctx.how, *grads)


def _compressed(function, tensors, names, how, compression):
    """What _Reduce or _ReduceScatter makes of several tensors."""
    for tensor in tensors:
        check_kind(tensor)
    packed = [compression.compress(tensor) for tensor in tensors]
    results = function.apply(names, how, *[wire for wire, _ in packed])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, packed)]


def push_pull(
    tensor,
    average=True,
    name=None,
    version=0,
    priority=0,
    compression=Compression.none,
    timeout=None,
    output_dtype=None,
):
    """The average (or sum) of tensor over all ranks, as a new tensor. Can be differentiated.

    version is there for programs written for BytePS and has no effect.
    """
    how = _Reducing(average, priority=priority, timeout=timeout, output_dtype=output_dtype)
    return _compressed(_Reduce, [tensor], [name], how, compression)[0]


@_ops.form_of(push_pull, without=["compression"])
def push_pull_async(tensor, version=0, **asked):
    """Starts push_pull()."""
    return _Reducing(**asked).start(tensor, in_place=False)


@_ops.form_of(push_pull, without=["compression", "output_dtype"])
def push_pull_async_inplace(tensor, version=0, **asked):
    """Starts push_pull_inplace()."""
    return _Reducing(**asked).start(tensor, in_place=True)


@_ops.waits_for(push_pull_async_inplace)
def push_pull_inplace():
    """The average (or sum) of tensor over all ranks, written into it."""


byteps_push_pull = push_pull_async_inplace


def accumulate_async(tensor, name, priority=0, timeout=None, all_ranks=False):
    """Starts accumulate()."""
    source = _brought(tensor)
    target = _like(source)
    request = _ops.accumulate(span_of(source), span_of(target), name, priority, timeout, all_ranks)

    def steps():
        yield request
        return _bring_back(target, tensor)

    return Handle(steps())


@_ops.waits_for(accumulate_async)
def accumulate():
    """Adds tensor to what servers keep under this name, and returns that as a new tensor: see bps.accumulate()."""


@over_process_set
def allreduce(
    tensor,
    average=None,
    name=None,
    compression=Compression.none,
    op=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    process_set=None,
    priority=0,
    timeout=None,
    output_dtype=None,
):
    """The reduction of tensor over all ranks: op is Average, Sum, Min, Max or Product.

    Sums and averages can be differentiated.
    """
    how = _Reducing(average, None, op, prescale_factor, postscale_factor, process_set, priority, timeout, output_dtype)
    return _compressed(_Reduce, [tensor], [name], how, compression)[0]


@over_process_set
@_ops.form_of(allreduce, without=["compression"])
def allreduce_async(tensor, **asked):
    """Starts allreduce()."""
    return _Reducing(**asked).start(tensor, in_place=False)


@over_process_set
@_ops.form_of(allreduce, without=["compression", "output_dtype"])
def allreduce_async_(tensor, **asked):
    """Starts allreduce_()."""
    return _Reducing(**asked).start(tensor, in_place=True)


@_ops.waits_for(allreduce_async_)
def allreduce_():
    """As allreduce(), into the tensor itself."""


@over_process_set
def sparse_allreduce_async(tensor, name, op, process_set=None, timeout=None):
    """allreduce_async() of a tensor of layout torch.sparse_coo, which stays sparse: its rows travel. op: Average or Sum.

    The handle is for synchronize(), as any other.
    """
    if not sparse.is_sparse(tensor):
        raise TypeError(f"sparse_allreduce_async() takes a tensor of layout torch.sparse_coo, not {tensor.layout}")
    return allreduce_async(tensor, name=name, op=op, process_set=process_set, timeout=timeout)


# -- Several tensors in one call


class GroupHandle:
    """Several operations under way, as one."""

    def __init__(self, handles):
        self._handles = handles

    def poll(self):
        return all(handle.poll() for handle in self._handles)

    def wait(self, timeout=None):
        """The list of the results, when all are complete; the first failure otherwise. timeout: for all together."""
        end = None if timeout is None else time.monotonic() + timeout
        failed = None
        for handle in self._handles:
            try:
                handle.wait(None if end is None else max(0.0, end - time.monotonic()))
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return [handle.wait(0) for handle in self._handles]

    def cancel(self):
        for handle in self._handles:
            handle.cancel()


def _start_group(tensors, names, check, start):
    """Either all begin, or none does. start(tensor, name) gives a handle."""
    for tensor in tensors:
        check(tensor)
    return GroupHandle([start(tensor, name) for tensor, name in zip(tensors, names)])


def _start_reductions(tensors, names, how, in_place):
    return _start_group(tensors, names, how.check, lambda x, name: how.named(name).start(x, in_place))


@over_process_set
@_ops.form_of(allreduce)
def grouped_allreduce(tensors, name=None, compression=Compression.none, **asked):
    """The list of what allreduce() makes of each tensor, all under way together. Can be differentiated."""
    return _compressed(_Reduce, tensors, group_names(name, len(tensors)), _Reducing(**asked), compression)


@over_process_set
@_ops.form_of(allreduce_async)
def grouped_allreduce_async(tensors, name=None, **asked):
    """Starts grouped_allreduce(). One handle for all; its result is the list."""
    return _start_reductions(tensors, group_names(name, len(tensors)), _Reducing(**asked), in_place=False)


@over_process_set
@_ops.form_of(allreduce_async_)
def grouped_allreduce_async_(tensors, name=None, **asked):
    """Starts grouped_allreduce_()."""
    return _start_reductions(tensors, group_names(name, len(tensors)), _Reducing(**asked), in_place=True)


@_ops.waits_for(grouped_allreduce_async_)
def grouped_allreduce_():
    """As grouped_allreduce(), into the tensors themselves."""


# -- broadcast


def _start_broadcast(tensor, root_rank, name, priority, in_place, timeout=None):
    target = _brought(as_moved(tensor))
    if not in_place and target.data_ptr() == tensor.data_ptr():
        target = _like(target).copy_(target)
    request = _ops.broadcast(span_of(target), root_rank, name, priority, timeout=timeout)

    def steps():
        yield request
        result = from_moved(target, tensor.dtype)
        return _write_back(result, tensor) if in_place else _bring_back(result, tensor)

    return Handle(steps())


@over_process_set
def broadcast_async(tensor, root_rank, name=None, process_set=None, priority=0, timeout=None):
    """Starts broadcast()."""
    return _start_broadcast(tensor, root_rank, name, priority, False, timeout)


@over_process_set
def broadcast_async_(tensor, root_rank, name=None, process_set=None, priority=0, timeout=None):
    """Starts broadcast_()."""
    return _start_broadcast(tensor, root_rank, name, priority, True, timeout)


@_ops.waits_for(broadcast_async_)
def broadcast_():
    """Writes tensor of rank root_rank into tensor of every rank."""


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, root_rank, name, timeout):
        _client.remember(ctx)
        ctx.arguments = (root_rank, name, timeout)
        return broadcast_async(tensor, root_rank, name, timeout=timeout).wait()

    @staticmethod
    @_client.as_remembered
    def backward(ctx, grad):
        root_rank, name, timeout = ctx.arguments
        how = _Reducing(timeout=timeout)
        (total,) = _Reduce.apply(_grad_names([name], "broadcast."), how, grad)
        client = _client.current()
        if client.rank != client.number_of(root_rank):
            # Zeros with a history: when they are differentiated, this rank takes part as the root does.
            total = total.masked_fill(torch.ones((), dtype=torch.bool, device=total.device), 0)
        return total, None, None, None


@over_process_set
def broadcast(tensor, root_rank, name=None, process_set=None, timeout=None):
    """tensor of rank root_rank, as a new tensor. Can be differentiated."""
    return _Broadcast.apply(tensor, root_rank, name, timeout)


# -- allgather, alltoall, reducescatter: along the first dimension


def _with_rows(tensor):
    """A tensor without dimensions is one row."""
    check_kind(tensor)
    return tensor if tensor.dim() else tensor.reshape(1)


def _rows(tensor):
    """(rows, elements of one row)"""
    rows, row = tensor.shape[0], 1
    for extent in tensor.shape[1:]:
        row *= extent
    return rows, row


def _maker(source):
    as_now = _devices.as_now(source)

    def make(rows):
        with as_now():
            result = _devices.empty((rows, *source.shape[1:]), source.dtype, source)
        return result, span_of(result)

    return make


def _start_allgather(tensor, name, finish, timeout):
    """A Handle whose result is finish(tensor, rows of each rank)."""
    source = _brought(as_moved(_with_rows(tensor)))

    def steps():
        result, rows = yield from _ops.all_gather(span_of(source), *_rows(source), _maker(source), name, timeout)
        return finish(_bring_back(from_moved(result, tensor.dtype), tensor), rows)

    return Handle(steps())


def _start_gathers(tensors, names, finish, timeout):
    return _start_group(tensors, names, check_moved, lambda x, name: _start_allgather(x, name, finish, timeout))


@over_process_set
def allgather_async(tensor, name=None, process_set=None, timeout=None):
    """Starts allgather()."""
    return _start_allgather(tensor, name, lambda result, _: result, timeout)


@over_process_set
def grouped_allgather_async(tensors, name=None, process_set=None, timeout=None):
    """Starts grouped_allgather(). One handle for all; its result is the list."""
    return _start_gathers(tensors, group_names(name, len(tensors)), lambda result, _: result, timeout)


class _AllGather(torch.autograd.Function):
    """Of several tensors, all under way together."""

    @staticmethod
    def forward(ctx, names, timeout, *tensors):
        _client.remember(ctx)
        results, rows = zip(*_start_gathers(tensors, names, lambda *both: both, timeout).wait())
        ctx.arguments = (names, timeout, rows, [x.shape for x in tensors])
        return results

    @staticmethod
    @_client.as_remembered
    def backward(ctx, *grads):
        names, timeout, rows, shapes = ctx.arguments
        how = _Reducing(timeout=timeout)
        totals = _Reduce.apply(_grad_names(names, "allgather."), how, *grads)
        rank = _client.current().rank
        mine = [
            total.narrow(0, sum(n[:rank]), n[rank]).reshape(shape)
            for total, n, shape in zip(totals, rows, shapes)
        ]
        return None, None, *mine


@over_process_set
def allgather(tensor, name=None, process_set=None, timeout=None):
    """tensor of rank 0, rank 1, ... one after the other; the first dimension may differ. Can be differentiated."""
    return _AllGather.apply([name], timeout, tensor)[0]


@over_process_set
def grouped_allgather(tensors, name=None, process_set=None, timeout=None):
    """The list of what allgather() makes of each tensor, all under way together. Can be differentiated."""
    return list(_AllGather.apply(group_names(name, len(tensors)), timeout, *tensors)) if tensors else []


def _start_alltoall(tensor, splits, name, timeout):
    """A Handle whose result is (tensor, rows from each rank)."""
    source = _brought(as_moved(_with_rows(tensor)))
    rows, row = _rows(source)
    cut = _ops.equal_splits(rows) if splits is None else [int(n) for n in splits]

    def steps():
        make = _maker(source)
        result, received = yield from _ops.all_to_all(span_of(source), rows, row, cut, make, name, timeout)
        return _bring_back(from_moved(result, tensor.dtype), tensor), torch.tensor(received, dtype=torch.int32, device="cpu")

    return Handle(steps())


@over_process_set
def alltoall_async(tensor, splits=None, name=None, process_set=None, timeout=None):
    """Starts alltoall(). The result is always (tensor, rows from each rank)."""
    return _start_alltoall(tensor, splits, name, timeout)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, splits, name, timeout):
        _client.remember(ctx)
        result, received = _start_alltoall(tensor, splits, name, timeout).wait()
        ctx.arguments = (received, name, timeout)
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    @_client.as_remembered
    def backward(ctx, grad, _):
        received, name, timeout = ctx.arguments
        back, _ = _AllToAll.apply(grad, received.tolist(), *_grad_names([name], "alltoall."), timeout)
        return back, None, None, None


@over_process_set
def alltoall(tensor, splits=None, name=None, process_set=None, timeout=None):
    """Sends splits[r] rows to rank r; returns the rows that came from rank 0, rank 1, ... Can be differentiated.

    Without splits, tensor is cut evenly. With splits, returns (tensor, rows from each rank).
    """
    result, received = _AllToAll.apply(tensor, splits, name, timeout)
    return result if splits is None else (result, received)


def _start_reducescatter(tensor, how):
    how.check_rows(tensor)
    source = how.scaled(tensor)
    count, row = _rows(source)
    rows = _ops.scatter_rows(count)
    result = how.result_like((rows[_client.current().rank], *source.shape[1:]), source)
    request = _ops.reduce_scatter(span_of(source), span_of(result), row, rows, how.reduction, how.name, how.timeout)

    def steps():
        yield request
        return _bring_back(_scaled(result, how.postscale), tensor)

    return Handle(steps())


def _start_scatters(tensors, names, how):
    return _start_group(tensors, names, how.check_rows, lambda x, name: _start_reducescatter(x, how.named(name)))


class _ReduceScatter(torch.autograd.Function):
    """Of several tensors, all under way together."""

    @staticmethod
    def forward(ctx, names, how, *tensors):
        _client.remember(ctx)
        ctx.names, ctx.how = names, how
        return tuple(_start_scatters(tensors, names, how).wait())

    @staticmethod
    @_client.as_remembered
    def backward(ctx, *grads):
        factor = ctx.how.factor()
        wholes = _AllGather.apply(_grad_names(ctx.names, "reducescatter."), ctx.how.timeout, *grads)
        return None, None, *(_scaled(whole, factor) for whole in wholes)


def _scattering(op=Reduction.AVERAGE, **asked):
    """Of a reducescatter, which has no products."""
    return _Reducing(op=Reduction(op), **asked)


@over_process_set
def reducescatter(
    tensor,
    name=None,
    compression=Compression.none,
    op=Reduction.AVERAGE,
    process_set=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    timeout=None,
    output_dtype=None,
):
    """This rank's share of the rows of the reduction over all ranks; the first ranks get one more if uneven.

    Sums and averages can be differentiated.
    """
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    how = _scattering(op, timeout=timeout, output_dtype=output_dtype, **scale)
    return _compressed(_ReduceScatter, [tensor], [name], how, compression)[0]


@over_process_set
@_ops.form_of(reducescatter, without=["compression"])
def reducescatter_async(tensor, **asked):
    """Starts reducescatter()."""
    return _start_reducescatter(tensor, _scattering(**asked))


@over_process_set
@_ops.form_of(reducescatter)
def grouped_reducescatter(tensors, name=None, compression=Compression.none, **asked):
    """The list of what reducescatter() makes of each tensor, all under way together."""
    return _compressed(_ReduceScatter, tensors, group_names(name, len(tensors)), _scattering(**asked), compression)


@over_process_set
@_ops.form_of(reducescatter_async)
def grouped_reducescatter_async(tensors, name=None, **asked):
    """Starts grouped_reducescatter(). One handle for all; its result is the list."""
    return _start_scatters(tensors, group_names(name, len(tensors)), _scattering(**asked))


# -- The rest


def poll(handle):
    """Whether synchronize(handle) would return at once; of a CUDA tensor, whether the result is there."""
    return handle.poll()


def synchronize(handle, timeout=None):
    """Waits for an operation and returns its result. timeout in seconds: BpsTimeoutError when it passes.

    For one on a CUDA tensor the stream waits that is current; how it ended is raised by the next call that waits or submits.
    """
    return handle.wait(timeout)


def declare(name, tensor=None):
    """Names a tensor ahead of its first push_pull. Names alone need no declaring: they are the same on all ranks.

    With a tensor, the daemons agree on it now instead of at its first use.
    """
    if tensor is not None:
        check_tensor(tensor)
        dtype = DTYPES[tensor.dtype]
        full = _ops.tensor_name("push_pull", name, dtype, tensor.shape)
        _client.current().declare(full, dtype, tensor.numel(), tensor.shape or (1,))


__all__ = [
    "accumulate",
    "accumulate_async",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "byteps_push_pull",
    "declare",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
