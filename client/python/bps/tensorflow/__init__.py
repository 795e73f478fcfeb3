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
from .. import _adapter, barrier, join
from .._adapter import *  # noqa: F403
from . import elastic, functions, ops
from .compression import Compression
from .functions import *  # noqa: F403
from .ops import *  # noqa: F403
from .optimizer import DistributedOptimizer
from .tape import DistributedGradientTape, PartialDistributedGradientTape


def __getattr__(name):
    # What needs Keras is imported when it is asked for: TensorFlow works without it.
    if name == "SyncBatchNormalization":
        from .sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "barrier",
    "elastic",
    "join",
]
__all__ += _adapter.__all__
__all__ += ops.__all__
__all__ += functions.__all__
