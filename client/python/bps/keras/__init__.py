"""bps for Keras 3 on TensorFlow, PyTorch and JAX, under the names of BytePS and Horovod.

import bps.keras as bps
bps.init()
model.compile(bps.DistributedOptimizer(optimizer), loss)
model.fit(x, y, callbacks=[bps.callbacks.BroadcastGlobalVariablesCallback(0)])

The backend is the one that Keras uses. See bps_tensorflow(7).
"""

from . import _backend  # first: it says what is wrong with Keras, if anything is

# isort: split
from .. import _adapter, allgather_object, barrier, broadcast_object
from .._adapter import *  # noqa: F403
from . import _functions, callbacks, elastic
from ._backend import Compression
from ._functions import *  # noqa: F403
from ._optimizer import DistributedOptimizer, PartialDistributedOptimizer


__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "callbacks",
    "elastic",
]
__all__ += _adapter.__all__
__all__ += _functions.__all__
