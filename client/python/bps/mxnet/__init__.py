"""bps for MXNet: Module and Gluon, under the names of BytePS and Horovod.

import bps.mxnet as bps
bps.init()
trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
"""

import atexit
import sys

try:
    import mxnet
except Exception as error:  # with a NumPy that it does not fit, it fails in other ways than ImportError
    raise ImportError(f"bps.mxnet needs MXNet 1.9 (pip install mxnet==1.9.1 numpy==1.23.5): {error}") from error
if tuple(int(n) for n in mxnet.__version__.split(".")[:2]) != (1, 9):
    raise ImportError(f"bps.mxnet needs MXNet 1.9; this is {mxnet.__version__}")

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
    allgather_object,
    broadcast_object,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .._horovod import *  # noqa: F403
from ._engine import drain as _drain
from .compression import Compression
from .ops import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    byteps_declare_tensor,
    byteps_push_pull,
    declare,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    push_pull,
    reducescatter,
    synchronize,
)
from .training import DistributedOptimizer, DistributedTrainer, broadcast_parameters


@atexit.register  # after MXNet's own, so it runs before
def _at_exit():
    """The engine must not call Python when that is gone. A rank that has failed does not wait for the others."""
    if is_initialized():
        if getattr(sys, "last_value", None) is None:
            try:
                synchronize()
            except BpsError as error:
                print(f"bps.mxnet: what was under way at exit failed: {error}", file=sys.stderr)
        shutdown()
    _drain()


__all__ = [
    *_horovod.NAMES,
    "Average",
    "BpsCanceledError",
    "BpsConnectionError",
    "BpsError",
    "BpsNotInitializedError",
    "BpsTimeoutError",
    "BpsUnsupportedError",
    "BpsValueError",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Max",
    "Min",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "byteps_declare_tensor",
    "byteps_push_pull",
    "declare",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "is_initialized",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "synchronize",
]
