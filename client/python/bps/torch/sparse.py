"""Sparse tensors and gradients: what nn.Embedding(sparse=True) and EmbeddingBag make. Only their rows travel.

A sparse tensor here is of layout torch.sparse_coo: its sparse dimensions number the rows of a table. It need not be
coalesced; the result is. Rows that several ranks, or one rank several times, have are summed at the servers.
"""

import torch

from .. import _ops
from .._library import DType, Reduction
from .._ops import Handle, Rows, Span
from . import _devices


def is_sparse(tensor):
    return tensor.layout == torch.sparse_coo


def travels_by_rows(tensor):
    """Whether it is sparse in the way that bps sends."""
    return is_sparse(tensor) and tensor.sparse_dim() == 1


def _tensor(numbers, values, shape):
    # The daemon has looked at the numbers.
    return torch.sparse_coo_tensor(numbers, values, shape, device=values.device, check_invariants=False)


def check(tensor, dtypes):
    if not tensor.sparse_dim():
        raise TypeError("the tensor has no sparse dimension: call to_dense() on it")
    if tensor.dtype not in dtypes:
        raise TypeError(f"bps has no element type for the tensor, which is of {tensor.dtype}")


def _rows(numbers, values, dtypes):
    """Of contiguous tensors on the CPU."""
    return Rows(
        Span(numbers.data_ptr(), DType.INT64, numbers.numel(), numbers),
        Span(values.data_ptr(), dtypes[values.dtype], values.numel(), values),
        values.shape[1:].numel(),
    )


def _numbers(indices, shape):
    """Of rows that have an index in each of several dimensions, one number each, as if the dimensions were one."""
    numbers = indices[0]
    for extent, index in zip(shape[1:], indices[1:]):
        numbers = numbers * extent + index
    return numbers.contiguous()


def _indices(numbers, shape):
    indices = []
    for extent in reversed(shape[1:]):
        indices.append(numbers % extent)
        numbers = numbers.div(extent, rounding_mode="floor")
    return torch.stack([numbers, *reversed(indices)])


class Exchange:
    """One sparse tensor on its way. request: what to wait for; result(): the sparse tensor, when that has ended well.

    scale: a factor for what is sent. full: the whole name of a tensor that a push_pull() shares.
    """

    def __init__(self, tensor, reduction, name=None, priority=0, timeout=None, scale=1.0, wire_dtype=None, full=None):
        from .ops import DTYPES  # which imports this module

        check(tensor, DTYPES)
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            _devices.say_staging(tensor.device)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        # As they are: repeated rows need not be summed first.
        self.of_rows = self.shape[: tensor.sparse_dim()]
        numbers = _numbers(tensor._indices().cpu(), self.of_rows)
        values = tensor._values().cpu()
        if scale != 1.0:
            values = (values * scale).to(self.dtype)
        values = values.to(wire_dtype or self.dtype).contiguous()
        table = self.of_rows.numel()
        # What the result does not fill costs address space alone.
        self.numbers = torch.empty(table, dtype=torch.int64, device="cpu")
        self.values = torch.empty((table, *self.shape[tensor.sparse_dim() :]), dtype=values.dtype, device="cpu")
        source, target = _rows(numbers, values, DTYPES), _rows(self.numbers, self.values, DTYPES)
        self.request = _ops.push_pull_rows(source, table, target, reduction, name, priority, timeout, full)

    def result(self, scale=1.0):
        n = self.request.rows
        numbers = _indices(self.numbers[:n], self.of_rows).to(self.device)
        values = self.values[:n].to(self.device, self.dtype)
        if scale != 1.0:
            values = (values * scale).to(self.dtype)
        return _tensor(numbers, values, self.shape)._coalesced_(True)


class _Callable(Handle):
    """What Horovod gives for a sparse tensor is called to wait."""

    def __call__(self):
        return self.wait()


def start(tensor, how, in_place):
    """A Handle whose result is the reduction of a sparse tensor over all ranks: sparse, and coalesced. how: as ops has it."""
    exchange = Exchange(tensor, Reduction(how.reduction), how.name, how.priority, how.timeout, how.prescale)

    def steps():
        yield exchange.request
        result = exchange.result(how.postscale)
        if not in_place:
            return result
        with torch.no_grad():
            return tensor.copy_(result)

    return _Callable(steps())


class SparseGradient:
    """The gradient of a parameter of which only rows travel, from step to step."""

    def __init__(self, parameter, reduction, full, priority, predivide, wire_dtype):
        self.parameter = parameter
        self.predivide = predivide
        self._send = {"reduction": reduction, "full": full, "priority": priority, "wire_dtype": wire_dtype}
        self._exchange = None

    def start(self):
        """Sends p.grad, or no rows if there is none. Returns the Request."""
        grad = self.parameter.grad
        if grad is None:
            values = self.parameter.detach()[:0]
            grad = _tensor(torch.empty((1, 0), dtype=torch.int64, device="cpu"), values, self.parameter.shape)
        elif not is_sparse(grad):
            grad = grad.to_sparse(1)
        self._exchange = Exchange(grad, scale=1.0 / self.predivide, **self._send)
        return self._exchange.request

    def finish(self):
        """The result becomes p.grad."""
        exchange, self._exchange = self._exchange, None
        self.parameter.grad = exchange.result(self.predivide)


def without(arenas, tensor):
    """arenas, less the bytes of a tensor that lies in one of them."""
    start, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    left = []
    for arena in arenas:
        at = start - arena.data_ptr()
        if 0 <= at < arena.numel():
            left += [piece for piece in (arena[:at], arena[at + length :]) if piece.numel()]
        else:
            left.append(arena)
    return left
