"""bps for TensorFlow 2, under the names of BytePS and Horovod.

import bps.tensorflow as bps
bps.init()
with tf.GradientTape() as tape:
    loss = ...
tape = bps.DistributedGradientTape(tape)
optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

For Keras see bps.keras. Everything works in eager code and inside tf.function. See bps_tensorflow(7).
"""

from . import _native  # first: it says what is wrong with TensorFlow, if anything is

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
    barrier,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .._horovod import *  # noqa: F403
from . import elastic
from .compression import Compression
from .functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from .ops import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    push_pull,
    rank_op,
    reducescatter,
    size_op,
)
from .optimizer import DistributedOptimizer
from .tape import DistributedGradientTape, PartialDistributedGradientTape


def __getattr__(name):
    # What needs Keras is imported when it is asked for: TensorFlow works without it.
    if name == "SyncBatchNormalization":
        from .sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "Sum",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "is_initialized",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "process_set_included_op",
    "push_pull",
    "rank",
    "rank_op",
    "reducescatter",
    "shutdown",
    "size",
    "size_op",
    *_horovod.NAMES,
]
