"""Operations on host arrays from inside a compiled program: where there is no library for its device."""

import numpy as np

from .. import _client, _ops
from .._buffers import Tensor
from .._library import VARIABLE, Operation
from .._ops import Span


def _submit(source, target, name, operation, reduction, root, priority, order, rows):
    """One tensor. rows: what each rank has of it, if that matters."""
    client = _client.current()
    row = source.row
    counts = _ops._counts([n * row for n in rows]) if rows else None
    even = len(set(rows)) <= 1
    alike = operation != Operation.ALL_GATHER or even
    given = source.span
    if operation == Operation.BROADCAST and client.rank != root:
        given = Span(None, given.dtype, given.count)
    return _ops.submit(
        client,
        _ops.tensor_after(client, name, order) if order else name,
        source.span.count if alike else VARIABLE,
        given,
        target.span,
        operation,
        reduction=reduction,
        root=root,
        priority=priority,
        order=order,
        counts=counts,
        shape=source.span.shape if alike else None,
    )


def run(arrays, avals_out, names, operation, reduction, root, priority, order, rows):
    """Runs one call to its end: all tensors are submitted first. Returns NumPy arrays."""
    if operation == Operation.BARRIER:
        client = _client.current()
        name = _ops.tensor_after(client, "barrier.noname.jax", order)
        requests, results = [_ops.named_barrier(client, name, None, order)], []
    else:
        sources = [Tensor(np.asarray(a)) for a in arrays]
        results = [np.empty(a.shape, a.dtype) for a in avals_out]
        requests = [
            _submit(
                source,
                Tensor(result, True),
                name,
                operation,
                reduction,
                root,
                priority - i,
                order,
                rows[i] if rows else (),
            )
            for i, (source, result, name) in enumerate(zip(sources, results, names))
        ]
    for request in requests:
        request.wait()
    for request in requests:
        request.check()
    return tuple(results)
