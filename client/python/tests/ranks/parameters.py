"""Runs an example, and says what the parameters of its model have become: the same on all ranks, in every bit.

parameters.py SCRIPT [ARGUMENT...]
"""

import hashlib
import os
import runpy
import sys

import bps.torch as bps

DistributedOptimizer = bps.DistributedOptimizer
optimizers = []


def remembered(*arguments, **options):
    optimizers.append(DistributedOptimizer(*arguments, **options))
    return optimizers[-1]


bps.DistributedOptimizer = remembered
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
(optimizer,) = optimizers
digest = hashlib.sha256()
for group in optimizer.param_groups:
    for parameter in group["params"]:
        digest.update(parameter.detach().numpy().tobytes())
print("parameters", digest.hexdigest())
