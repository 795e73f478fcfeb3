"""State of a model and an optimizer, from one rank to all."""

import torch

import bps

from .. import _ops
from .._horovod import over_process_set
from .._ops import Handle
from . import ops
from ._gradients import join_all


@over_process_set
def broadcast_object(obj, root_rank=0, name=None, process_set=None, timeout=None):
    """Any object that pickle can carry, from rank root_rank to every rank."""
    return Handle(_ops.broadcast_object(obj, root_rank, name, timeout)).wait()


@over_process_set
def allgather_object(obj, name=None, process_set=None, timeout=None):
    """The list of every rank's object."""
    return Handle(_ops.allgather_object(obj, name, timeout)).wait()


@over_process_set
def barrier(process_set=None, timeout=None):
    """Returns when every rank has called it."""
    bps.barrier(timeout=timeout)


def join(device=None):
    """For ranks that have come to the end of their batches while others train on: adds zeros to the gradients of each
    DistributedOptimizer over all ranks and DistributedDataParallel of this process, and to whatever else the others sum or
    average, step after step, until every rank has called it. Other operations but barriers fail on all ranks meanwhile.

    Returns the highest rank that took part last: what broadcast_parameters() should begin from, since ranks that have joined
    do not step. device is Horovod's and has no effect.
    """
    return join_all()


def broadcast_parameters(params, root_rank, prefix="Parameter."):
    """Writes the tensors of rank root_rank into those of every rank.

    params: a dict (model.state_dict()) or pairs of name and tensor (model.named_parameters()). What is no tensor is left
    alone. Several models of a program may have tensors of one name, of other sizes too.
    """
    named = list(params.items()) if isinstance(params, dict) else list(params)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ValueError("params must be a dict or pairs of name and tensor")
    handles = [
        ops.broadcast_async_(tensor, root_rank, f"{prefix}{name}")
        for name, tensor in named
        if torch.is_tensor(tensor)
    ]
    for handle in handles:
        handle.wait()


class _Hole:
    """Where a tensor was, in a structure that is sent without its tensors."""

    def __init__(self, tensor, number):
        self.shape, self.dtype, self.number = tuple(tensor.shape), tensor.dtype, number


def _take_tensors_out(value, tensors):
    if torch.is_tensor(value):
        tensors.append(value)
        return _Hole(value, len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_tensors_out(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_take_tensors_out(item, tensors) for item in value)
    return value


def _put_tensors_in(value, tensors):
    if isinstance(value, _Hole):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _put_tensors_in(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_tensors_in(item, tensors) for item in value)
    return value


def _holes(value):
    if isinstance(value, _Hole):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _holes(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _holes(item)


def load_optimizer_state(optimizer, state):
    """optimizer.load_state_dict(state) that leaves the types of tensors as they are: that casts to the parameter's type."""
    optimizer.load_state_dict(state)
    given, loaded = [], []
    _take_tensors_out(state, given)
    _take_tensors_out(optimizer.state_dict(), loaded)
    for tensor, wanted in zip(loaded, given):
        if tensor.dtype != wanted.dtype:
            tensor.data = wanted.to(tensor.device)


def broadcast_optimizer_state(optimizer, root_rank, prefix="Parameter.", model=None):
    """Gives the optimizer of every rank the state of rank root_rank's: what its state_dict() holds, tensors and all.

    The state of the other ranks need not exist before. model is there for programs written for Horovod and has no effect;
    it may stand in the place of prefix.
    """
    from .. import rank

    if prefix is None or isinstance(prefix, torch.nn.Module):
        prefix = "Parameter."
    mine = rank() == root_rank
    tensors = []
    skeleton = _take_tensors_out(optimizer.state_dict(), tensors) if mine else None
    tensors = [tensor.detach().cpu() for tensor in tensors]  # the others have none yet, and so no device
    skeleton = broadcast_object(skeleton, root_rank, f"{prefix}optimizer")
    if not mine:
        tensors = [
            torch.empty(hole.shape, dtype=hole.dtype, device="cpu") for hole in sorted(_holes(skeleton), key=lambda h: h.number)
        ]
    handles = [ops.broadcast_async_(tensor, root_rank, f"{prefix}optimizer.{i}") for i, tensor in enumerate(tensors)]
    for handle in handles:
        handle.wait()
    if not mine:
        load_optimizer_state(optimizer, _put_tensors_in(skeleton, tensors))


__all__ = [
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "join",
]
