"""Operations on TensorFlow's tensors, in eager code and inside tf.function, with gradients."""

import tensorflow as tf

from .. import _client
from .._horovod import Product, global_process_set, process_set_of
from .._library import Reduction
from .._ops import check_differentiable, check_scattered, choose_reduction, group_names
from . import _native
from ._native import over_process_set
from .compression import Compression


def scaled(tensor, factor):
    """Integers are scaled as float64, floats of two bytes as float32: a factor may lie beyond what these can hold."""
    if factor == 1.0:
        return tensor
    wide = tensor.dtype
    if not (wide.is_floating or wide.is_complex):
        wide = tf.float64
    elif wide.size < 4:
        wide = tf.float32
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def _grad_name(name, operation=""):
    return None if name is None else f"{operation}{name}.grad"


# -- push_pull, allreduce


def reduce_all(tensors, reduction, names, priorities=None):
    """Every rank's result depends on every rank's input alike, so gradients are reduced as the values were."""

    @tf.custom_gradient
    def run(*inputs):
        @_client.as_begun
        def gradient(*grads):
            check_differentiable(reduction)
            return reduce_all([tf.convert_to_tensor(g) for g in grads], reduction, [_grad_name(n) for n in names])

        if reduction is Product:
            return [_product(tensor, name) for tensor, name in zip(inputs, names)], gradient
        return _native.push_pull_all(inputs, reduction, names, priorities or [0] * len(inputs)), gradient

    return list(run(*tensors)) if tensors else []


def _product(factor, name):
    """Of factors that all ranks get of all: servers only add."""
    factors, _ = _native.all_gather(factor[tf.newaxis], None if name is None else f"product.{name}")
    return tf.reduce_prod(factors, axis=0)


def _allreduce_dense(tensors, reduction, names, compression, prescale, postscale):
    packed = [compression.compress(scaled(_native.to_tensor(tensor), prescale)) for tensor in tensors]
    reduced = reduce_all([tensor for tensor, _ in packed], reduction, names)
    return [scaled(compression.decompress(tensor, ctx), postscale) for tensor, (_, ctx) in zip(reduced, packed)]


def allreduce_sparse(slices, reduction, name=None):
    """tf.IndexedSlices over all ranks: each row that any rank has, once, ascending, its values added or averaged.

    They are merged where they are summed. Where dense_shape is not known, each rank's rows come one after the other.
    """
    if reduction not in (Reduction.SUM, Reduction.AVERAGE):
        raise NotImplementedError("only sums and averages can be made of tf.IndexedSlices; give sparse_as_dense=True")
    if slices.dense_shape is None:
        of_values, of_indices = (None, None) if name is None else (f"{name}.values", f"{name}.indices")
        values = allgather(slices.values, of_values)
        if reduction == Reduction.AVERAGE:  # of integers it is of floats, as in Horovod
            values = values / tf.cast(_client.current().size, values.dtype)
        return tf.IndexedSlices(values, allgather(slices.indices, of_indices))
    values, numbers = _native.push_pull_rows(
        _native.to_tensor(slices.values),
        tf.cast(slices.indices, tf.int64),
        tf.cast(slices.dense_shape[0], tf.int64),
        reduction,
        name,
    )
    return tf.IndexedSlices(values, tf.cast(numbers, slices.indices.dtype), slices.dense_shape)


def allreduce(
    tensor,
    average=None,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    op=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    name=None,
    process_set=global_process_set,
    ignore_name_scope=False,
):
    """The reduction of tensor over all ranks: op is Average, Sum, Min, Max or Product.

    Sums and averages can be differentiated. tf.IndexedSlices stay what they are: each row that any rank has is there
    once, ascending, added or averaged over all ranks. The devices are there for programs written for Horovod and BytePS
    and have no effect, as has ignore_name_scope.
    """
    names = None if name is None else [name]
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return grouped_allreduce(
        [tensor], average, compression=compression, op=op, process_set=process_set, name=names, **scale
    )[0]


@over_process_set
def grouped_allreduce(
    tensors,
    average=None,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    op=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    process_set=global_process_set,
    ignore_name_scope=False,
    name=None,
):
    """allreduce() of each of a list of tensors, all under way at once. name: of the list, or a list of names."""
    reduction = op if op is Product and average is None else choose_reduction(average, op)
    names = _names(name, len(tensors))
    results = [None] * len(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    reduced = _allreduce_dense(
        [tensors[i] for i in dense],
        reduction,
        [names[i] for i in dense],
        compression,
        prescale_factor,
        postscale_factor,
    )
    for i, result in zip(dense, reduced):
        results[i] = result
    for i, tensor in enumerate(tensors):
        if results[i] is None:
            values = scaled(tensor.values, prescale_factor)
            merged = allreduce_sparse(tf.IndexedSlices(values, tensor.indices, tensor.dense_shape), reduction, names[i])
            values = scaled(merged.values, postscale_factor)
            results[i] = tf.IndexedSlices(values, merged.indices, merged.dense_shape)
    return results


def _names(name, count):
    if name is None or isinstance(name, str):
        return group_names(name, count)
    if len(name) != count:
        raise ValueError(f"{len(name)} names for {count} tensors")
    return list(name)


def push_pull(
    tensor,
    scope="",
    average=None,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    op=None,
    enable_async=False,
    name=None,
):
    """allreduce() under BytePS's name and with its arguments. scope goes before the name."""
    if enable_async:
        raise ValueError("enable_async: to train asynchronously, join with BPS_ASYNC=1 and give bps.accumulate() changes of parameters")
    if name is not None:
        name = f"{scope}{name}"
    return allreduce(tensor, average, compression=compression, op=op, name=name)


# -- broadcast


@over_process_set
def broadcast(tensor, root_rank, name=None, ignore_name_scope=False, process_set=global_process_set, **byteps):
    """tensor of rank root_rank, as a new tensor; it has the same shape on all ranks. Can be differentiated.

    The arguments scope and is_variable are there for programs written for BytePS.
    """
    scope = byteps.pop("scope", "")
    byteps.pop("is_variable", None)
    if byteps:
        raise TypeError(f"broadcast() has no argument {next(iter(byteps))!r}")
    if name is not None:
        name = f"{scope}{name}"

    @tf.custom_gradient
    def run(tensor):
        @_client.as_begun
        def gradient(grad):
            (total,) = reduce_all([tf.convert_to_tensor(grad)], Reduction.AVERAGE, [_grad_name(name, "broadcast.")])
            # Zeros with a history: when they are differentiated, every rank takes part.
            return tf.where(_client.of_all_ranks().rank == root_rank, total, tf.zeros_like(total))

        return _native.broadcast_all([tensor], root_rank, [name])[0], gradient

    tensor, restored = _native.to_moved(tensor)
    return restored(run(tensor))


@over_process_set
def broadcast_(variables, root_rank, name=None, process_set=global_process_set):
    """Writes the variables of rank root_rank into those of every rank."""
    moved = [_native.to_moved(variable) for variable in variables]
    came = _native.broadcast_all([tensor for tensor, _ in moved], root_rank, _names(name, len(moved)))
    return [variable.assign(restored(value)) for variable, value, (_, restored) in zip(variables, came, moved)]


# -- allgather, alltoall, reducescatter: along the first dimension


def _all_gather(tensor, name):
    @tf.custom_gradient
    def run(tensor):
        output, rows = _native.all_gather(tensor, name)
        rank = _client.current().rank

        @_client.as_begun
        def gradient(grad):
            (total,) = reduce_all([tf.convert_to_tensor(grad)], Reduction.AVERAGE, [_grad_name(name, "allgather.")])
            first = tf.reduce_sum(rows[:rank])
            return tf.reshape(total[first : first + rows[rank]], tf.shape(tensor))

        return output, gradient

    return run(tensor)


@over_process_set
def allgather(tensor, name=None, ignore_name_scope=False, process_set=global_process_set):
    """tensor of rank 0, rank 1, ... one after the other; the first dimension may differ. Can be differentiated."""
    tensor, restored = _native.to_moved(tensor)
    return restored(_all_gather(tensor, name))


def grouped_allgather(tensors, name=None, ignore_name_scope=False, process_set=global_process_set):
    """allgather() of each of a list of tensors."""
    names = _names(name, len(tensors))
    return [allgather(tensor, n, process_set=process_set) for tensor, n in zip(tensors, names)]


def _all_to_all(tensor, splits, name):
    @tf.custom_gradient
    def run(tensor):
        output, rows = _native.all_to_all(tensor, splits, name)

        @_client.as_begun
        def gradient(grad, _):
            back, _ = _all_to_all(tf.convert_to_tensor(grad), rows, _grad_name(name, "alltoall."))
            return tf.reshape(back, tf.shape(tensor))

        return (output, rows), gradient

    return run(tensor)


@over_process_set
def alltoall(tensor, splits=None, name=None, ignore_name_scope=False, process_set=global_process_set):
    """Sends splits[r] rows to rank r; returns the rows that came from rank 0, rank 1, ... Can be differentiated.

    Without splits, tensor is cut evenly. With splits, returns (tensor, rows from each rank: int32).
    """
    tensor, restored = _native.to_moved(tensor)
    if splits is not None:
        cut = tf.cast(splits, tf.int64)
    else:
        size = _client.current().size
        rows = tf.shape(tensor, tf.int64)[0] if tensor.shape.rank != 0 else 1
        # Where it cannot be cut evenly, the operation says so: the splits do not add up.
        cut = tf.fill([size], tf.cast(rows // size, tf.int64))

    output, rows = _all_to_all(tensor, cut, name)
    output = restored(output)
    return output if splits is None else (output, tf.cast(rows, tf.int32))


@over_process_set
def reducescatter(
    tensor,
    device_dense="",
    compression=Compression.none,
    op=Reduction.AVERAGE,
    name=None,
    process_set=global_process_set,
    ignore_name_scope=False,
    prescale_factor=1.0,
    postscale_factor=1.0,
):
    """This rank's share of the rows of the reduction over all ranks; the first ranks get one more if uneven."""
    reduction = Reduction(op)

    @tf.custom_gradient
    def run(tensor):
        @_client.as_begun
        def gradient(grad):
            check_differentiable(reduction)
            whole = _all_gather(tf.convert_to_tensor(grad), _grad_name(name, "reducescatter."))
            if reduction == Reduction.SUM:
                whole = whole * tf.cast(_client.current().size, whole.dtype)
            return tf.reshape(whole, tf.shape(tensor))

        return _native.reduce_scatter(tensor, reduction, name), gradient

    tensor = _native.to_tensor(tensor)
    check_scattered(tensor.shape.rank != 0)
    packed, ctx = compression.compress(scaled(tensor, prescale_factor))
    return scaled(compression.decompress(run(packed), ctx), postscale_factor)


def grouped_reducescatter(
    tensors,
    device_dense="",
    compression=Compression.none,
    op=Reduction.AVERAGE,
    process_set=global_process_set,
    prescale_factor=1.0,
    postscale_factor=1.0,
    name=None,
):
    """reducescatter() of each of a list of tensors."""
    more = (process_set, False, prescale_factor, postscale_factor)
    return [
        reducescatter(tensor, device_dense, compression, op, n, *more)
        for tensor, n in zip(tensors, _names(name, len(tensors)))
    ]


# -- What a graph may ask: the job does not change while it runs


def size_op(process_set_id=0, name=None):
    """size() as a tensor (int32), or that of a process set."""
    return tf.constant(process_set_of(process_set_id).size(), tf.int32, name=name)


def local_size_op(name=None):
    """local_size() as a tensor (int32)."""
    return tf.constant(_client.current().local_size, tf.int32, name=name)


def rank_op(name=None):
    """rank() as a tensor (int32)."""
    return tf.constant(_client.current().rank, tf.int32, name=name)


def local_rank_op(name=None):
    """local_rank() as a tensor (int32)."""
    return tf.constant(_client.current().local_rank, tf.int32, name=name)


def process_set_included_op(process_set_id=0, name=None):
    """Whether this process is in a process set, as a tensor (int32): 1 or 0."""
    return tf.constant(int(process_set_of(process_set_id).included()), tf.int32, name=name)


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "push_pull",
    "rank_op",
    "reducescatter",
    "size_op",
]
