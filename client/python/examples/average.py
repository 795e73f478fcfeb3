#!/usr/bin/env python3
"""The smallest program: every rank gives an array, every rank gets the average.

bpslaunch -np 4 python average.py
"""

import numpy as np

import bps

bps.init()
gradient = np.full(1000, float(bps.rank()), dtype=np.float32)
mean = bps.push_pull(gradient, name="gradient")
print(f"rank {bps.rank()} of {bps.size()}: gave {gradient[0]}, the average over all ranks is {mean[0]}")
assert (mean == (bps.size() - 1) / 2).all()
