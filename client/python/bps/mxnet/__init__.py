"""bps for MXNet: Module and Gluon, under the names of BytePS and Horovod.

import bps.mxnet as bps
bps.init()
trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
"""

import atexit
import sys

NEEDS = "bps.mxnet needs MXNet 1.9 ({}): pip install mxnet==1.9.1 numpy==1.23.5"

try:
    import mxnet
except Exception as error:  # with a NumPy that it does not fit, it fails in other ways than ImportError
    raise ImportError(NEEDS.format(error)) from error
if tuple(int(n) for n in mxnet.__version__.split(".")[:2]) != (1, 9):
    raise ImportError(NEEDS.format(f"this is {mxnet.__version__}"))

from .. import _adapter, allgather_object, broadcast_object
from .._adapter import *  # noqa: F403
from . import ops, training
from ._engine import drain as _drain
from .compression import Compression
from .ops import *  # noqa: F403
from .training import *  # noqa: F403


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


__all__ = ["Compression", "allgather_object", "broadcast_object"]
__all__ += _adapter.__all__
__all__ += ops.__all__
__all__ += training.__all__
