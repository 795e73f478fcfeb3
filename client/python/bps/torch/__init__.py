"""bps for PyTorch, under the names of BytePS and Horovod.

import bps.torch as bps
bps.init()
bps.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""

OLDEST = (2, 0)
NEEDS = "bps.torch needs PyTorch {0}.{1} or later ({{}}): pip install 'torch>={0}.{1}'".format(*OLDEST)

try:
    import torch as _torch
except ImportError as error:
    raise ImportError(NEEDS.format(error)) from error
if tuple(int(n) for n in _torch.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(NEEDS.format(f"this is {_torch.__version__}"))

from .. import _adapter
from .._adapter import *  # noqa: F403
from .._torch_backend import register as _register
from . import elastic, functions, ops
from .compression import Compression
from .cross_barrier import CrossBarrier
from .functions import *  # noqa: F403
from .hook import DDPHookState, ddp_hook
from .ops import *  # noqa: F403
from .optimizer import DistributedOptimizer
from .parallel import DistributedDataParallel
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

_register()


__all__ = [
    "Compression",
    "CrossBarrier",
    "DDPHookState",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "ddp_hook",
    "elastic",
]
__all__ += _adapter.__all__
__all__ += ops.__all__
__all__ += functions.__all__
