"""bps for PyTorch, under the names of BytePS and Horovod.

import bps.torch as bps
bps.init()
bps.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

OLDEST = (2, 0)

try:
    import torch as _torch
except ImportError as error:
    raise ImportError(f"bps.torch needs PyTorch {OLDEST[0]}.{OLDEST[1]} or later (pip install torch): {error}") from error
if tuple(int(n) for n in _torch.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"bps.torch needs PyTorch {OLDEST[0]}.{OLDEST[1]} or later; this is {_torch.__version__}")

from .. import (
    Average,
    BpsCanceledError,
    BpsConnectionError,
    BpsError,
    BpsNotInitializedError,
    BpsTimeoutError,
    BpsUnsupportedError,
    BpsValueError,
    Max,
    Min,
    Sum,
    _horovod,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .._horovod import *  # noqa: F403
from .._torch_backend import register as _register
from . import elastic
from .compression import Compression
from .cross_barrier import CrossBarrier
from .functions import (
    allgather_object,
    barrier,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    join,
)
from .hook import DDPHookState, ddp_hook
from .ops import (
    accumulate,
    accumulate_async,
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
    byteps_push_pull,
    declare,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    push_pull,
    push_pull_async,
    push_pull_async_inplace,
    push_pull_inplace,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from .optimizer import DistributedOptimizer
from .parallel import DistributedDataParallel
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

_register()


__all__ = [
    "Average",
    "BpsCanceledError",
    "BpsConnectionError",
    "BpsError",
    "BpsNotInitializedError",
    "BpsTimeoutError",
    "BpsUnsupportedError",
    "BpsValueError",
    "Compression",
    "CrossBarrier",
    "DDPHookState",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Sum",
    "SyncBatchNorm",
    "accumulate",
    "accumulate_async",
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
    "byteps_push_pull",
    "convert_sync_batchnorm",
    "ddp_hook",
    "declare",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "is_initialized",
    "join",
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
    "sparse_allreduce_async",
    "synchronize",
    *_horovod.NAMES,
]
