"""What each collective is on the wire: tensors in, one operation of bps, tensors out.

A Move is one operation of a group's job: memory to read, memory to write, and what remains to be done when it is
complete. Memory is the tensor's own where that is contiguous and on the CPU or a CUDA device, and else a copy. What only moves
travels as bytes, so that tensors of any type can; what is summed travels in the types that bps adds.
"""

import ctypes
import operator

import torch
from torch.distributed import ReduceOp

from .._library import DType, Operation, Reduction
from .._ops import Span
from . import _devices
from .ops import DTYPES

_REDUCTIONS = {
    ReduceOp.SUM: Reduction.SUM,
    ReduceOp.AVG: Reduction.AVERAGE,
    ReduceOp.MIN: Reduction.MIN,
    ReduceOp.MAX: Reduction.MAX,
}
_FOLDS = {
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_COMPLEX = {torch.complex32: DType.FLOAT16, torch.complex64: DType.FLOAT32, torch.complex128: DType.FLOAT64}
# Sums wrap, so they are the same with and without a sign.
_UNSIGNED = {"uint16": DType.INT16, "uint32": DType.INT32, "uint64": DType.INT64}


class Move:
    """One operation. source, target: Spans or None; what is reduced may be narrower than what comes of it. finish() is called
    when it is complete.
    """

    __slots__ = ("operation", "dtype", "source", "target", "finish", "reduction", "counts", "receive_counts", "root")

    def __init__(
        self, operation, source, target, finish=None, *, reduction=0, counts=None, receive_counts=None, root=0
    ):
        self.operation = operation
        self.dtype = (target or source).dtype
        self.source = source
        self.target = target
        self.finish = finish
        self.reduction = reduction
        self.counts = counts
        self.receive_counts = receive_counts
        self.root = root


# -- Memory


def _check(tensor):
    if tensor.layout != torch.strided:
        raise TypeError(
            f"the process group of bps takes dense tensors, this one is {tensor.layout}: call to_dense() on it"
        )


def _source(tensor):
    """tensor, or a copy of it that is contiguous and where the daemon finds it."""
    _check(tensor)
    return _devices.brought(tensor.detach()).resolve_conj().resolve_neg().contiguous()


def _target(tensor):
    """(memory, finish): where the result goes, and what brings it into tensor from there, or None."""
    _check(tensor)
    tensor = tensor.detach()
    known = _devices.is_known(tensor)
    if known and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor, None
    memory = _devices.empty(tensor.shape, tensor.dtype, tensor)
    if known:
        return memory, lambda: tensor.copy_(memory)
    _devices.say_staging(tensor.device)
    before = torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None

    def finish():
        if before is not None:
            before.synchronize()  # what still reads the tensor on the stream of the caller
        tensor.copy_(memory)  # returns when it is done: the memory is not pinned

    return memory, finish


def _bytes(tensor):
    """The bytes of a contiguous tensor."""
    return _span(tensor, DType.UINT8, tensor.element_size())


def _size(tensor):
    return tensor.numel() * tensor.element_size()


def _apart(source, memory, offset):
    """source, or a copy of it if it lies over memory in another way than starting offset bytes after it."""
    a, b = source.data_ptr(), memory.data_ptr()
    overlap = source.numel() and memory.numel() and a < b + _size(memory) and b < a + _size(source)
    return source.clone() if overlap and a - b != offset else source


def _flat(tensors):
    """One contiguous tensor with the elements of all."""
    _check_alike(tensors)
    return torch.cat([_source(t).reshape(-1) for t in tensors])


def _flat_target(tensors):
    """(memory, finish) for tensors that are written one after the other."""
    _check_alike(tensors)
    tensors = [t.detach() for t in tensors]
    memory = _devices.empty([sum(t.numel() for t in tensors)], tensors[0].dtype, tensors[0])

    def finish():
        for tensor, part in zip(tensors, memory.split([t.numel() for t in tensors])):
            tensor.copy_(part.view(tensor.shape))

    return memory, finish


def _check_alike(tensors):
    for tensor in tensors:
        _check(tensor)
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f"the tensors of a list must have one type: there are {tensors[0].dtype} and {tensor.dtype}"
            )


def _check_type(output, input):
    if output.dtype != input.dtype:
        raise TypeError(f"output is of {output.dtype}, input of {input.dtype}: they must have one type")


def _widens(output, source):
    """Whether source is of a narrower type than output, and bps reduces it as output's."""
    return output.dtype == torch.float32 and source.dtype in (torch.float16, torch.bfloat16)


def _check_count(what, count, expected):
    if count != expected:
        raise ValueError(f"{what} has {count} elements, but must have {expected}")


# -- Reductions


def _premultiplied(source, op):
    """PREMUL_SUM: a sum of what each rank multiplies by a factor of its own before."""
    if not (source.is_floating_point() or source.is_complex()):
        raise TypeError(f"PREMUL_SUM multiplies floats and complex numbers, not {source.dtype} tensors: convert them before")
    _, factor = op.__getstate__()
    if torch.is_tensor(factor):
        factor = factor.to(device="cpu", dtype=source.dtype).reshape(())
    return source * factor


def _wire(source, op):
    """(source, type on the wire, elements of that for each of source's, Reduction); the type is None for a fold."""
    if op == ReduceOp.PREMUL_SUM:
        source, op = _premultiplied(source, op), ReduceOp.SUM
    reduction = next((r for known, r in _REDUCTIONS.items() if op == known), None)
    dtype = source.dtype
    if reduction is None:
        _fold_of(dtype, op)
        return source, None, 1, None
    if dtype in DTYPES and not (dtype == torch.bool and reduction == Reduction.AVERAGE):
        return source, DTYPES[dtype], 1, reduction
    if dtype in _COMPLEX and reduction in (Reduction.SUM, Reduction.AVERAGE):
        return source, _COMPLEX[dtype], 2, reduction
    name = str(dtype).rpartition(".")[2]
    if name in _UNSIGNED and reduction == Reduction.SUM:
        return source, _UNSIGNED[name], 1, reduction
    raise TypeError(f"bps has no {reduction.name.lower()} of {dtype} tensors")


def _fold_of(dtype, op):
    """How two tensors of the type become one."""
    for known, fold in _FOLDS.items():
        if op == known:
            if known != ReduceOp.PRODUCT and (dtype.is_floating_point or dtype.is_complex):
                raise TypeError(f"{known} is for integers and bool, not for {dtype}")
            if str(dtype).startswith("torch.float8"):
                break
            return torch.logical_and if fold is torch.mul and dtype == torch.bool else fold
    raise TypeError(f"bps has no reduction {op.op} of {dtype} tensors")


def _fold(parts, op):
    """Of all ranks' tensors in rank order. 16-bit floats are multiplied in float32 and rounded once."""
    dtype = parts[0].dtype
    fold = _fold_of(dtype, op)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = fold(total, part.to(wide))
    return total.to(dtype)


def _span(tensor, dtype, factor):
    return Span(_devices.address_of(tensor), dtype, tensor.numel() * factor, tensor, _devices.device_of(tensor))


def allreduce(tensor, op, rank, size):
    source, dtype, factor, reduction = _wire(_source(tensor), op)
    if dtype is None:
        return _folded(source, [source.numel()] * size, op, tensor)
    memory, finish = _target(tensor)
    span = _span(memory, dtype, factor)
    return Move(Operation.PUSH_PULL, _span(_apart(source, memory, 0), dtype, factor), span, finish, reduction=reduction)


def _folded(source, counts, op, tensor):
    """Where bps has no such reduction: everybody gets everything, and reduces it."""
    memory = _devices.empty([sum(counts)], source.dtype, source)

    def finish():
        tensor.detach().copy_(_fold(memory.split(counts), op).view(tensor.shape))

    sizes = [n * source.element_size() for n in counts]
    return Move(Operation.ALL_GATHER, _bytes(source), _bytes(memory), finish, counts=sizes)


def reduce(tensor, op, root, rank, size):
    """Others than root get nothing, and their tensors stay as they are."""
    source, dtype, factor, reduction = _wire(_source(tensor), op)
    mine = rank == root
    if dtype is None:
        memory = _devices.empty([source.numel() * size if mine else 0], source.dtype, source)

        def finish():
            tensor.detach().copy_(_fold(memory.split(source.numel()), op).view(tensor.shape))

        return _to_one(source, memory, root, [_size(source) if mine else 0] * size, finish if mine else None)
    memory, finish = _target(tensor) if mine else (_devices.empty([0], source.dtype, source), None)
    counts = [source.numel() * factor if r == root else 0 for r in range(size)]
    return Move(
        Operation.REDUCE_SCATTER,
        _span(_apart(source, memory, 0), dtype, factor),
        _span(memory, dtype, factor),
        finish,
        reduction=reduction,
        counts=counts,
    )


def reduce_scatter(output, source, counts, op, rank, size):
    """source: contiguous, with counts[r] elements for rank r."""
    widens = _widens(output, source)
    if not widens:
        _check_type(output, source)
    _check_count("output", output.numel(), counts[rank])
    if sum(counts) != source.numel():
        _check_count("input", source.numel(), sum(counts))
    if widens and op == ReduceOp.PREMUL_SUM:
        source = source.to(output.dtype)  # what is multiplied is a copy anyway
    source, dtype, factor, reduction = _wire(source, op)
    if dtype is None:
        _check_type(output, source)
        memory = _devices.empty([counts[rank] * size], source.dtype, source)

        def finish():
            parts = memory.split(counts[rank]) if counts[rank] else [memory] * size
            output.detach().copy_(_fold(parts, op).view(output.shape))

        width = source.element_size()
        return Move(
            Operation.ALL_TO_ALL,
            _bytes(source),
            _bytes(memory),
            finish,
            counts=[n * width for n in counts],
            receive_counts=[counts[rank] * width] * size,
        )
    memory, finish = _target(output)
    # Nothing that is widened is in place: results would overtake what is still to be read.
    source = _apart(source, memory, None if widens else -sum(counts[:rank]) * source.element_size())
    return Move(
        Operation.REDUCE_SCATTER,
        _span(source, dtype, factor),
        _span(memory, DTYPES[output.dtype] if widens else dtype, factor),
        finish,
        reduction=reduction,
        counts=[n * factor for n in counts],
    )


def reduce_scatter_single(output, input, op, rank, size):
    return reduce_scatter(output, _source(input), [output.numel()] * size, op, rank, size)


def reduce_scatter_list(output, inputs, op, rank, size):
    _check_length("the list of inputs", inputs, size)
    return reduce_scatter(output, _flat(inputs), [t.numel() for t in inputs], op, rank, size)


# -- What only moves


def broadcast(tensor, root, rank):
    if rank == root:
        return Move(Operation.BROADCAST, _bytes(_source(tensor)), None, root=root)
    memory, finish = _target(tensor)
    return Move(Operation.BROADCAST, None, _bytes(memory), finish, root=root)


def all_gather_single(output, input, rank, size):
    _check_type(output, input)
    _check_count("output", output.numel(), input.numel() * size)
    source = _source(input)
    memory, finish = _target(output)
    source = _apart(source, memory, rank * _size(source))
    counts = [_size(source)] * size
    return Move(Operation.ALL_GATHER, _bytes(source), _bytes(memory), finish, counts=counts)


def all_gather_list(outputs, input, rank, size):
    """The tensors of outputs may differ in size."""
    _check_length("the list of outputs", outputs, size)
    _check_type(outputs[0], input)
    _check_count("input", input.numel(), outputs[rank].numel())
    memory, finish = _flat_target(outputs)
    counts = [_size(t) for t in outputs]
    return Move(Operation.ALL_GATHER, _bytes(_source(input)), _bytes(memory), finish, counts=counts)


def _check_length(what, tensors, size):
    if len(tensors) != size:
        raise ValueError(f"{what} has {len(tensors)} tensors, but the group has {size} ranks")


def _to_one(source, memory, root, receive, finish):
    counts = [_size(source) if r == root else 0 for r in range(len(receive))]
    return Move(Operation.ALL_TO_ALL, _bytes(source), _bytes(memory), finish, counts=counts, receive_counts=receive)


def gather_list(outputs, input, root, rank, size):
    """outputs counts on root alone."""
    source = _source(input)
    if rank != root:
        return _to_one(source, _devices.empty([0], source.dtype, source), root, [0] * size, None)
    _check_length("the list of outputs", outputs, size)
    _check_type(outputs[0], input)
    _check_count("input", input.numel(), outputs[rank].numel())
    memory, finish = _flat_target(outputs)
    return _to_one(source, memory, root, [_size(t) for t in outputs], finish)


def gather_single(output, input, root, rank, size):
    source = _source(input)
    if rank != root:
        return _to_one(source, _devices.empty([0], source.dtype, source), root, [0] * size, None)
    _check_type(output, input)
    _check_count("output", output.numel(), input.numel() * size)
    memory, finish = _target(output)
    return _to_one(_apart(source, memory, None), memory, root, [_size(source)] * size, finish)


def scatter_list(output, inputs, root, rank, size):
    """inputs counts on root alone."""
    if rank == root:
        _check_length("the list of inputs", inputs, size)
        _check_type(output, inputs[0])
        _check_count("output", output.numel(), inputs[rank].numel())
        source, counts = _flat(inputs), [_size(t) for t in inputs]
    else:
        source, counts = _devices.empty([0], output.dtype, output), [0] * size
    memory, finish = _target(output)
    receive = [_size(memory) if r == root else 0 for r in range(size)]
    return Move(Operation.ALL_TO_ALL, _bytes(source), _bytes(memory), finish, counts=counts, receive_counts=receive)


def all_to_all_list(outputs, inputs, rank, size):
    _check_length("the list of outputs", outputs, size)
    _check_length("the list of inputs", inputs, size)
    source = _flat(inputs)
    memory, finish = _flat_target(outputs)
    _check_type(memory, source)
    return Move(
        Operation.ALL_TO_ALL,
        _bytes(source),
        _bytes(memory),
        finish,
        counts=[_size(t) for t in inputs],
        receive_counts=[_size(t) for t in outputs],
    )


def _row_bytes(what, tensor, splits, size):
    """Bytes for each rank: splits, a sequence of any kind, count rows, and empty means equal parts."""
    rows = tensor.shape[0] if tensor.dim() else 1
    splits = [operator.index(n) for n in splits] if splits is not None else []
    if not splits:
        if rows % size:
            raise ValueError(f"{what} has {rows} rows, which cannot be cut evenly for {size} ranks: give split sizes")
        splits = [rows // size] * size
    if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(f"the split sizes {splits} do not cut the {rows} rows of {what} for {size} ranks")
    row = _size(tensor) // rows if rows else 0
    return [n * row for n in splits]


def all_to_all_single(output, input, output_splits, input_splits, rank, size):
    _check_type(output, input)
    counts = _row_bytes("input", input, input_splits, size)
    receive = _row_bytes("output", output, output_splits, size)
    memory, finish = _target(output)
    source = _apart(_source(input), memory, None)
    return Move(Operation.ALL_TO_ALL, _bytes(source), _bytes(memory), finish, counts=counts, receive_counts=receive)


def counts_array(values):
    return None if values is None else (ctypes.c_uint64 * len(values))(*values)
