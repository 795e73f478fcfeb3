#!/usr/bin/env python3
"""How fast gradients are averaged, in JAX: all tensors in one call, inside of jit.

bpslaunch -np 4 python jax_synthetic.py --tensors 50 --megabytes 1
"""

import argparse
import time

import jax
import jax.numpy as jnp

import bps.jax as bps


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=50)
    parser.add_argument("--megabytes", type=float, default=1, help="of each tensor")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    bps.init()
    n = max(1, int(arguments.megabytes * 1e6) // 4)
    tensors = [jnp.full(n, 1.0, jnp.float32) for _ in range(arguments.tensors)]
    reduce = jax.jit(bps.allreduce)

    def step():
        jax.block_until_ready(reduce(tensors))

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
