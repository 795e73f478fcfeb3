"""Operations on arrays and on trees of them, inside and outside of jit.

All leaves of a tree go in one call: they are submitted together and travel side by side.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

import bps

from .. import _client, _ops
from .._errors import error_from
from .._library import Operation, Reduction
from .._ops import choose_reduction
from ._order import forget_failure, trace_state_clean
from ._primitive import DTYPES, operation_p
from .compression import Compression

_client.others_begin()


def _leaves(tree):
    """(leaves as arrays, function that makes the tree of others)"""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype not in DTYPES:
            there = ", ".join(t.name.lower() for t in DTYPES.values())
            raise TypeError(f"bps has no element type for {array.dtype}; there are: {there}")
    return arrays, lambda results: jax.tree_util.tree_unflatten(structure, results)


def _as_moved(array):
    """(array, function that makes its like of another such): of a type that bps does not know (unsigned, complex, float8, random keys)
    the same bits as elements that it does know. For operations that only move.
    """
    dtype = array.dtype
    if dtype in DTYPES:
        return array, lambda moved: moved
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        bits, back = _as_moved(jax.random.key_data(array))
        kind = jax.random.key_impl(array)
        return bits, lambda moved: jax.random.wrap_key_data(back(moved), impl=kind)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = jnp.stack([array.real, array.imag], axis=-1)
        return parts, lambda moved: jax.lax.complex(moved[..., 0], moved[..., 1])
    if dtype.name in ("int2", "int4", "uint2", "uint4"):  # not stored as bytes
        return array.astype(jnp.int8), lambda moved: moved.astype(dtype)
    integer = jnp.dtype(f"int{8 * dtype.itemsize}")
    return jax.lax.bitcast_convert_type(array, integer), lambda moved: jax.lax.bitcast_convert_type(moved, dtype)


def _moved_leaves(tree):
    """As _leaves(), of what only moves."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]
    moved, backs = zip(*map(_as_moved, arrays)) if arrays else ((), ())
    return list(moved), lambda results: jax.tree_util.tree_unflatten(
        structure, [back(result) for back, result in zip(backs, results)]
    )


def _leaf_names(tree, name):
    if name is None:
        return [None] * len(jax.tree_util.tree_leaves(tree))
    if "\n" in name:
        raise ValueError(f"a name is one line; {name!r} is not")
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [name + jax.tree_util.keystr(path) for path in paths]


def _bind(arrays, names, operation, reduction=0, root=0, priority=0, rows=None):
    """One call of all arrays that have elements; the others stay as they are. rows(array): how many each rank has."""
    full = [i for i, array in enumerate(arrays) if array.size]
    results = list(arrays)
    if full or operation == Operation.BARRIER:
        moved = operation_p.bind(
            *(arrays[i] for i in full),
            operation=Operation(operation),
            reduction=int(reduction),
            root=int(root),
            priority=int(priority),
            names=tuple(names[i] for i in full),
            rows=tuple(tuple(rows(arrays[i])) for i in full) if rows else (),
        )
        for i, result in zip(full, moved):
            results[i] = result
    return results


def _scaled(array, factor):
    """Floats of two bytes are scaled as float32: a factor may lie beyond what these can hold. Integers are scaled as float64, also
    where the program has none: float32 has room for 24 bits of them.
    """
    if factor == 1.0:
        return array
    if not jnp.issubdtype(array.dtype, jnp.floating):
        with jax.enable_x64(True):
            return (array.astype(jnp.float64) * factor).astype(array.dtype)
    wide = array.astype(jnp.float32) if array.dtype.itemsize < 4 else array
    return (wide * factor).astype(array.dtype)


# -- push_pull, allreduce


def allreduce(
    tree,
    average=None,
    name=None,
    compression=Compression.none,
    op=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    priority=0,
):
    """The reduction of each array of a tree over all ranks: op is Average, Sum, Min or Max.

    Sums and averages can be differentiated. A larger priority is more urgent; inside a tree, earlier leaves are.
    """
    arrays, back = _leaves(tree)
    reduction = choose_reduction(average, op)
    _ops.check_average(reduction, any(array.dtype == jnp.bool_ for array in arrays))
    wires = [compression.compress(_scaled(array, prescale_factor)) for array in arrays]
    moved = _bind(
        [wire for wire, _ in wires], _leaf_names(tree, name), Operation.PUSH_PULL, reduction, priority=priority
    )
    results = [compression.decompress(result, ctx) for result, (_, ctx) in zip(moved, wires)]
    return back([_scaled(result, postscale_factor) for result in results])


def push_pull(tree, average=True, name=None, version=0, priority=0, compression=Compression.none):
    """BytePS's name for allreduce(). version is there for programs written for BytePS and has no effect."""
    return allreduce(tree, average, name, compression, priority=priority)


# -- broadcast


def broadcast(tree, root_rank=0, name=None, priority=0):
    """The arrays of rank root_rank, on every rank. Can be differentiated."""
    _client.current().number_of(root_rank)
    arrays, back = _moved_leaves(tree)
    return back(_bind(arrays, _leaf_names(tree, name), Operation.BROADCAST, root=root_rank, priority=priority))


def broadcast_parameters(params, root_rank=0, name="Parameter."):
    """params of rank root_rank, on every rank: a new tree. Arrays and scalars of NumPy stay NumPy's, of the type that they have there.
    Leaves that are no arrays stay as they are.
    """
    _client.current().number_of(root_rank)
    leaves, structure = jax.tree_util.tree_flatten(params)
    moved, back = _moved_leaves([leaf for leaf in leaves if isinstance(leaf, jax.Array)])
    # By type and size as well: a program may have several states.
    names = [f"{name}{i}.{array.dtype.name}.{array.size}" for i, array in enumerate(moved)]
    arrays = iter(back(_bind(moved, names, Operation.BROADCAST, root=root_rank)))
    host = [np.array(leaf) for leaf in leaves if isinstance(leaf, (np.ndarray, np.generic))]
    names = [f"{name}numpy.{i}.{array.dtype.str}.{array.size}" for i, array in enumerate(host)]
    host = iter(_on_host(host, names, lambda array, name: bps.broadcast_async(array, root_rank, name, output=array)))

    def given(leaf):
        if isinstance(leaf, jax.Array):
            return next(arrays)
        if isinstance(leaf, np.ndarray):
            return next(host)
        return next(host)[()] if isinstance(leaf, np.generic) else leaf

    return jax.tree_util.tree_unflatten(structure, [given(leaf) for leaf in leaves])


# -- allgather, alltoall, reducescatter: along the first dimension


def _is_traced(arrays):
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def _with_rows(array):
    array = array if isinstance(array, jax.Array) else jnp.asarray(array)
    return array.reshape(1) if array.ndim == 0 else array


def _on_host(arrays, names, start):
    """For sizes that nobody knows before. start(array, name) gives a handle; all are started before one is awaited."""
    handles = [start(np.asarray(array), name) for array, name in zip(arrays, names)]
    return [handle.wait() for handle in handles]


def _numbered(names):
    """Calls that go on at the same time need names of their own."""
    return [f"noname.tree.{i}" if name is None else name for i, name in enumerate(names)]


def allgather(tree, name=None):
    """Each array of rank 0, rank 1, ... one after the other, along the first dimension.

    Outside of jit, grad and vmap it may differ from rank to rank; inside it has to be the same, because a compiled
    program has to know the size of the result. Can be differentiated.
    """
    tree = jax.tree_util.tree_map(_with_rows, tree)
    arrays, back = _moved_leaves(tree)
    names = _leaf_names(tree, name)
    if not _is_traced(arrays):
        names = _numbered(names) if len(names) > 1 else names
        return back([jnp.asarray(x) for x in _on_host(arrays, names, bps.allgather_async)])
    size = _client.current().size
    # What is empty is empty on all ranks.
    empty = [
        array if array.size else jnp.zeros((array.shape[0] * size, *array.shape[1:]), array.dtype) for array in arrays
    ]
    moved = _bind(arrays, names, Operation.ALL_GATHER, rows=lambda array: [array.shape[0]] * size)
    return back([result if array.size else nothing for result, array, nothing in zip(moved, arrays, empty)])


def alltoall(x, splits=None, name=None):
    """Sends splits[r] rows of x to rank r and returns what came from rank 0, rank 1, ... one after the other.

    Without splits, x is cut evenly, and this works inside of jit, grad and vmap and can be differentiated. With splits,
    it works outside only, and returns (rows, how many came from each rank).
    """
    x = _with_rows(x)
    (array,), back = _moved_leaves([x])
    if splits is not None:
        if _is_traced([array]) or isinstance(splits, jax.core.Tracer):
            raise TypeError(
                "alltoall with splits works outside of jit, grad and vmap only: the size of its result is not known"
            )
        rows, received = bps.alltoall(np.asarray(array), np.asarray(splits).tolist(), name)
        return back([jnp.asarray(rows)])[0], np.asarray(received, np.int32)
    _ops.equal_splits(array.shape[0])
    return back(_bind([array], _leaf_names([x], name), Operation.ALL_TO_ALL))[0]


def reducescatter(tree, op=Reduction.AVERAGE, name=None):
    """This rank's share of the rows of the reduction of each array; the first ranks get one more where it is uneven.

    Sums and averages can be differentiated.
    """
    arrays, back = _leaves(tree)
    arrays = [_with_rows(array) for array in arrays]
    rank = _client.current().rank
    moved = _bind(
        arrays,
        _leaf_names(tree, name),
        Operation.REDUCE_SCATTER,
        Reduction(op),
        rows=lambda array: _ops.scatter_rows(array.shape[0]),
    )
    shares = [_ops.scatter_rows(array.shape[0])[rank] for array in arrays]
    return back([result[:share] for result, share in zip(moved, shares)])


# -- The rest


def synchronize():
    """Returns when every operation of this thread so far is complete. Outside of jit.

    Raises what went wrong in one of them as a BpsError, of the class that says how, and lets later operations go on:
    without it, JAX fails whatever comes after an operation that has failed.
    """
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        forget_failure()
        found = re.search(r"bps \[errno (\d+)\] (.*)", str(error))
        if found is None:
            raise
        raise error_from(-int(found[1]), found[2]) from error


def barrier():
    """Outside of jit, returns when every rank has called it and what came before is complete. Inside, an operation."""
    if trace_state_clean():
        synchronize()
        bps.barrier()
    else:
        _bind([], [], Operation.BARRIER)


def broadcast_object(obj, root_rank=0, name=None):
    """Any object that pickle can carry, from rank root_rank to every rank. Outside of jit."""
    return bps.broadcast_object(obj, root_rank, name)


def allgather_object(obj, name=None):
    """The list of every rank's object. Outside of jit."""
    return bps.allgather_object(obj, name)


__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "push_pull",
    "reducescatter",
    "synchronize",
]
