"""bps for JAX, inside and outside of jit.

import bps.jax as bps
bps.init()
params = bps.broadcast_parameters(params, root_rank=0)
optimizer = bps.DistributedOptimizer(optax.sgd(0.1))            # or:
loss, gradients = bps.value_and_grad(loss_of)(params, batch)    # of the average over all ranks
"""

import atexit
import sys

OLDEST = (0, 10, 0)
NEEDS = "bps.jax needs JAX {0}.{1}.{2} or later ({{}}): pip install 'jax>={0}.{1}.{2}'".format(*OLDEST)

try:
    import jax
except ImportError as error:
    raise ImportError(NEEDS.format(error)) from error
if jax.__version_info__ < OLDEST:
    raise ImportError(NEEDS.format(f"this is {jax.__version__}"))

from .. import _adapter
from .._adapter import *  # noqa: F403
from . import gradients, ops
from .compression import Compression
from .gradients import *  # noqa: F403
from .ops import *  # noqa: F403


@atexit.register  # after JAX's own, so it runs before
def _at_exit():
    """What is under way may be what other ranks wait for: it is waited for, unless this rank has failed."""
    if is_initialized():
        if getattr(sys, "last_value", None) is None:
            try:
                synchronize()
            except Exception as error:
                print(f"bps.jax: what was under way at exit failed: {error}", file=sys.stderr)
        shutdown()


__all__ = ["Compression"]
__all__ += _adapter.__all__
__all__ += ops.__all__
__all__ += gradients.__all__
