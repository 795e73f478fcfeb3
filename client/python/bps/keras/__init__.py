"""bps for Keras 3 on TensorFlow, PyTorch and JAX, under the names of BytePS and Horovod.

import bps.keras as bps
bps.init()
model.compile(bps.DistributedOptimizer(optimizer), loss)
model.fit(x, y, callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0)])

The backend is the one that Keras uses. See bps_tensorflow(7).
"""

from . import _backend  # first: it says what is wrong with Keras, if anything is

# isort: split
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
    barrier,
    broadcast_object,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .._horovod import *  # noqa: F403
from . import callbacks, elastic
from ._backend import Compression
from ._functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    load_model,
    push_pull,
    reducescatter,
)
from ._optimizer import DistributedOptimizer, PartialDistributedOptimizer


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
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    *_horovod.NAMES,
]
