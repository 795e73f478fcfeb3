"""The operation that JAX sees: many tensors in, as many out, in the order of the program.

Why ordered. All ranks must do the same operations on a name in the same order, and XLA runs what does not depend on
each other in any order. So each operation has an effect that JAX threads through the program as a token. Only the start
of an operation holds the token, which takes no time: operations still overlap with one another and with what XLA
computes.

Derivatives. Sums, averages, broadcasts and moves are linear: the tangent goes the same way as the value, and each has a
transpose that is one of them. So forward and reverse mode, and both on top of each other, need nothing else.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _client, _ops
from .._library import DType, Operation, Order, Reduction
from . import _host, _native
from ._order import ORDER

DTYPES = {jnp.dtype(t.name.lower()): t for t in DType}
LINEAR = (Reduction.SUM, Reduction.AVERAGE)


# Parameters: operation; reduction, or 0 where nothing is reduced; root; priority; names: one for each operand, or None;
# rows: for all_gather and reduce_scatter the rows of each rank, one tuple for each operand, otherwise ().
operation_p = Primitive("bps")
operation_p.multiple_results = True


def row_size(aval):
    return math.prod(aval.shape[1:])


def tensor_names(avals, operation, names, rows):
    """The full name of each operand's tensor."""
    kind = Operation(operation).name.lower()
    full = []
    for i, (aval, name) in enumerate(zip(avals, names)):
        special, shape = "", aval.shape
        if operation == Operation.ALL_GATHER:
            # Tensors of their own kinds to the daemon, neither of which bps.allgather() outside of jit uses.
            even = len(set(rows[i])) == 1
            special, shape = ("_even", shape) if even else ("_uneven", None)
        if name is None:
            # Not what calls of bps itself have without a name: a program goes on beside them, in an order of its own.
            name = f"noname.{i}.{aval.dtype.name}.{'any' if shape is None else _client.shape_text(shape)}"
        full.append(_ops.tensor_name(kind + special, name, DTYPES[aval.dtype], shape))
    return full


def order_of(names):
    """The order in which the tensors of a call are: that of the tokens, if they have no names."""
    return Order.NONE if any(name is not None for name in names) else Order.PROGRAMS


@functools.lru_cache(maxsize=4096)
def _compiled(**params):
    return jax.jit(functools.partial(operation_p.bind, **params))


@operation_p.def_impl
def _run(*operands, **params):
    with jax.disable_jit(False):  # without a program of its own, binding would come back here
        return _compiled(**params)(*operands)


@operation_p.def_effectful_abstract_eval
def _abstract(*avals, operation, rows, **_):
    rank = _client.current().rank
    out = []
    for i, aval in enumerate(avals):
        shape = aval.shape
        if operation == Operation.ALL_GATHER:
            shape = (sum(rows[i]), *shape[1:])
        elif operation == Operation.REDUCE_SCATTER:
            shape = (rows[i][rank], *shape[1:])
        out.append(ShapedArray(shape, aval.dtype))
    return out, {ORDER}


# -- To XLA


def _numbers(avals, operation, reduction, root, priority, names, rows):
    """The attribute "plan" of bps_start."""
    counts = [n * row_size(aval) for aval, ranks in zip(avals, rows) for n in ranks]
    return np.array([operation, reduction, root, priority, order_of(names), *counts], np.int64)


def _lower_native(ctx, *operands, operation, reduction, root, priority, names, rows):
    token = jax.core.abstract_token
    number = ShapedArray((2,), np.uint32)
    start = jax.ffi.ffi_lowering(_native.START, has_side_effect=True)
    done = jax.ffi.ffi_lowering(_native.DONE, has_side_effect=True)
    starting = ctx.replace(avals_in=[token, *ctx.avals_in], avals_out=[token, number])
    after, call = start(
        starting,
        ctx.tokens_in.get(ORDER),
        *operands,
        names="\n".join(tensor_names(ctx.avals_in, operation, names, rows)),
        plan=_numbers(ctx.avals_in, operation, reduction, root, priority, names, rows),
    )
    ctx.set_tokens_out(mlir.TokenSet({ORDER: after}))
    return done(ctx.replace(avals_in=[number]), call)


def _lower_python(ctx, *operands, operation, reduction, root, priority, names, rows):
    full = tensor_names(ctx.avals_in, operation, names, rows)

    def call(*arrays):
        return _host.run(arrays, ctx.avals_out, full, operation, reduction, root, priority, order_of(names), rows)

    token = ctx.tokens_in.get(ORDER)
    results, token, _ = mlir.emit_python_callback(
        ctx, call, token, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(mlir.TokenSet({ORDER: token}))
    return results


def _lower_cpu(ctx, *operands, **params):
    lower = _lower_native if _native.available() else _lower_python
    return lower(ctx, *operands, **params)


mlir.register_lowering(operation_p, _lower_cpu, platform="cpu")
mlir.register_lowering(operation_p, _lower_python)


# -- Derivatives


def _check_linear(operation, reduction):
    if operation in (Operation.PUSH_PULL, Operation.REDUCE_SCATTER) and reduction not in LINEAR:
        raise TypeError(
            f"the {Reduction(reduction).name.lower()} over ranks has no derivative; only sums and averages have one"
        )


def _pick(values, chosen):
    return tuple(values[i] for i in chosen) if values else ()


def _jvp(primals, tangents, *, operation, reduction, names, rows, **params):
    values = operation_p.bind(*primals, operation=operation, reduction=reduction, names=names, rows=rows, **params)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
    results = [ad.Zero(jax.typeof(v).to_tangent_aval()) for v in values]
    if moving:
        _check_linear(operation, reduction)
        moved = operation_p.bind(
            *(tangents[i] for i in moving),
            operation=operation,
            reduction=reduction,
            names=_pick(names, moving),
            rows=_pick(rows, moving),
            **params,
        )
        for i, tangent in zip(moving, moved):
            results[i] = tangent
    return values, results


def _transposed(cotangents, operation, reduction, root, rows, more):
    """The transpose of one call, of the cotangents that are there."""
    bind = functools.partial(operation_p.bind, operation=operation, reduction=reduction, root=root, rows=rows, **more)
    client = _client.current()
    if operation in (Operation.PUSH_PULL, Operation.ALL_TO_ALL):
        return bind(*cotangents)
    if operation == Operation.BROADCAST:
        totals = bind(*cotangents, operation=Operation.PUSH_PULL, reduction=Reduction.SUM, root=0)
        return totals if client.rank == root else [jnp.zeros_like(t) for t in totals]
    if operation == Operation.ALL_GATHER:
        return bind(*cotangents, operation=Operation.REDUCE_SCATTER, reduction=Reduction.SUM)
    gathered = bind(*cotangents, operation=Operation.ALL_GATHER, reduction=0)
    return [g / client.size for g in gathered] if reduction == Reduction.AVERAGE else gathered


def _transpose(cotangents, *operands, operation, reduction, root, names, rows, **params):
    _check_linear(operation, reduction)
    there = [i for i, c in enumerate(cotangents) if not isinstance(c, ad.Zero)]
    results = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    if there:
        more = {"names": _pick(names, there), **params}
        moved = _transposed([cotangents[i] for i in there], operation, reduction, root, _pick(rows, there), more)
        for i, cotangent in zip(there, moved):
            results[i] = cotangent
    return results


ad.primitive_jvps[operation_p] = _jvp
ad.primitive_transposes[operation_p] = _transpose


# -- vmap: the mapped tensors of a call go together, as one tensor each. Rows stay first where they count.


def _batch(operands, dims, *, operation, **params):
    if operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL):
        place = 1
    else:
        place = 0
    moved, out = [], []
    for x, dim in zip(operands, dims):
        mapped = dim is not None
        moved.append(jnp.moveaxis(x, dim, place) if mapped else x)
        out.append(place if mapped else None)
    return operation_p.bind(*moved, operation=operation, **params), out


batching.primitive_batchers[operation_p] = _batch
