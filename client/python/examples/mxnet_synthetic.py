#!/usr/bin/env python3
"""How fast gradients are averaged, in MXNet: as many operations of its engine as tensors.

bpslaunch -np 4 python mxnet_synthetic.py --tensors 50 --megabytes 1
"""

import argparse
import time

import mxnet as mx

import bps.mxnet as bps


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--megabytes", type=float, default=1, help="of each tensor")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    bps.init()
    n = max(1, int(arguments.megabytes * 1e6) // 4)
    tensors = [mx.nd.ones((n,)) for _ in range(arguments.tensors)]

    def step():
        for i, tensor in enumerate(tensors):
            bps.allreduce_(tensor, name=f"gradient.{i}", priority=-i)
        mx.nd.waitall()

    step()
    bps.barrier()
    begin = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    seconds = (time.perf_counter() - begin) / arguments.steps
    if bps.rank() == 0:
        total = 4 * n * arguments.tensors
        print(f"{bps.size()} rank(s): {seconds * 1e3:.2f} ms a step, {total / seconds / 1e9:.2f} GB/s in each rank")


if __name__ == "__main__":
    main()
