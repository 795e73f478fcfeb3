"""bps for PyTorch, under the names of BytePS and Horovod.

import bps.torch as bps
bps.init()
bps.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

from .. import (
    Average,
    BpsCanceledError,
    BpsConnectionError,
    BpsError,
    BpsNotInitializedError,
    BpsTimeoutError,
    BpsValueError,
    Max,
    Min,
    Sum,
    barrier,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .. import init as _init
from .._torch_backend import register as _register
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    declare,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from .optimizer import DistributedOptimizer


_register()


def init(lazy=True, **arguments):
    """As bps.init(). lazy is there for programs written for BytePS and has no effect."""
    _init(**arguments)


__all__ = [
    "Average",
    "BpsCanceledError",
    "BpsConnectionError",
    "BpsError",
    "BpsNotInitializedError",
    "BpsTimeoutError",
    "BpsValueError",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
]
