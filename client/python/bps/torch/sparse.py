"""Sparse tensors and gradients: what nn.Embedding(sparse=True) and EmbeddingBag make. Only their rows travel.

A sparse tensor here is of layout torch.sparse_coo: its sparse dimensions number the rows of a table. It need not be
coalesced; the result is. Rows that several ranks, or one rank several times, have are summed at the servers.
"""

import torch

from .. import _ops
from .._completer import outcome
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


def _exchange(tensor, reduction, name=None, priority=0, timeout=None, scale=1.0, wire_dtype=None, full=None):
    """Steps. Returns a function that makes the sparse tensor, each value of it times a factor.

    scale: a factor for what is sent. full: the whole name of a tensor that a push_pull() shares.
    """
    from .ops import DTYPES  # which imports this module

    check(tensor, DTYPES)
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        _devices.say_staging(tensor.device)
    shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
    # As they are: repeated rows need not be summed first.
    of_rows = shape[: tensor.sparse_dim()]
    numbers = _numbers(tensor._indices().cpu(), of_rows)
    values = _scaled(tensor._values().cpu(), scale, dtype).to(wire_dtype or dtype).contiguous()

    def make(rows):
        into = torch.empty(rows, dtype=torch.int64, device="cpu")
        target = torch.empty((rows, *values.shape[1:]), dtype=values.dtype, device="cpu")
        return (into, target), _rows(into, target, DTYPES)

    source = _rows(numbers, values, DTYPES)
    result, n = yield from _ops.push_pull_rows(source, of_rows.numel(), make, reduction, name, priority, timeout, full)
    # Its memory is not to stay for the rows that did not come.
    into, target = (part[:n].clone() if n < len(part) else part for part in result)

    def finish(factor):
        indices = _indices(into, of_rows).to(device)
        return _tensor(indices, _scaled(target.to(device, dtype), factor, dtype), shape)._coalesced_(True)

    return finish


def _scaled(values, factor, dtype):
    return values if factor == 1.0 else (values * factor).to(dtype)


class _Callable(Handle):
    """What Horovod gives for a sparse tensor is called to wait."""

    def __call__(self):
        return self.wait()


def start(tensor, how, in_place):
    """A Handle whose result is the reduction of a sparse tensor over all ranks: sparse, and coalesced. how: as ops has it."""
    as_now = _devices.as_now(tensor)

    def steps():
        reduction = Reduction(how.reduction)
        finish = yield from _exchange(tensor, reduction, how.name, how.priority, how.timeout, how.prescale)
        with as_now(), torch.no_grad():
            result = finish(how.postscale)
            return tensor.copy_(result) if in_place else result

    return _Callable(steps())


class SparseGradient:
    """The gradient of a parameter of which only rows travel, from step to step. Itself the request that start() returns."""

    def __init__(self, parameter, reduction, full, priority, predivide, wire_dtype):
        self.parameter = parameter
        self.predivide = predivide
        self._send = {"reduction": reduction, "full": full, "priority": priority, "wire_dtype": wire_dtype}
        self._handle = None

    def start(self):
        """Sends p.grad, or no rows if there is none."""
        grad = self.parameter.grad
        if grad is None:
            values = self.parameter.detach()[:0]
            grad = _tensor(torch.empty((1, 0), dtype=torch.int64, device="cpu"), values, self.parameter.shape)
        elif not is_sparse(grad):
            grad = grad.to_sparse(1)
        self._handle = Handle(_exchange(grad, scale=1.0 / self.predivide, **self._send))
        self._handle.go_on()
        return self

    def poll(self):
        return self._handle.poll()

    def wait(self, timeout=None):
        try:
            self._handle.wait(timeout)
        except Exception:
            return self._handle.poll()
        return True

    def outcome(self):
        return outcome(self._handle)[1]

    def check(self):
        self._handle.wait()

    def finish(self):
        """The result becomes p.grad."""
        handle, self._handle = self._handle, None
        self.parameter.grad = handle.wait()(self.predivide)


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
