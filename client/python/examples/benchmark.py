#!/usr/bin/env python3
"""Images a second of ResNet-50 on made-up images, on all ranks and on one: what communication costs.

    bpslaunch -np 4 python benchmark.py [--batch-size 32] [--json out.json]

Prints each round as it ends and the mean with its 95 % interval, as the synthetic benchmarks of Horovod and BytePS do;
then the same rounds without reducing anything, and the ratio of both: the scaling efficiency.
"""

import argparse
import json
import math
import pathlib
import time

import torch
import torch.nn.functional as F
from train_imagenet import resnet

import bps.torch as bps


def measure(arguments, what, step):
    """Images a second of this rank, round by round; progress on rank 0."""
    for _ in range(arguments.warmup):
        step()
    rates = []
    for i in range(arguments.rounds):
        bps.barrier()
        began = time.monotonic()
        for _ in range(arguments.steps):
            step()
        rates.append(arguments.batch_size * arguments.steps / (time.monotonic() - began))
        if bps.rank() == 0:
            print(f"{what}, round {i + 1} of {arguments.rounds}: {rates[-1]:.1f} images/s a rank", flush=True)
    rates = torch.tensor(rates)
    mean = bps.push_pull(rates.mean(), name=f"{what} mean").item()
    spread = 1.96 * rates.std().item() if len(rates) > 1 else math.nan
    return mean, spread


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--size", type=int, default=224, help="of images, pixels")
    parser.add_argument("--blocks", type=lambda s: tuple(map(int, s.split(","))), default=(3, 4, 6, 3))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=2, help="steps")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--compression", choices=("none", "fp16", "bf16"), default="none")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each rank")
    parser.add_argument("--json", help="file to write the figures to")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    bps.init()
    torch.set_num_threads(arguments.threads)
    images = torch.randn(arguments.batch_size, 3, arguments.size, arguments.size)
    labels = torch.randint(1000, (arguments.batch_size,))

    def make_step(distributed):
        torch.manual_seed(1)
        model = resnet(1000, arguments.blocks, arguments.width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if distributed:
            compression = getattr(bps.Compression, arguments.compression)
            optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)

        def step():
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    together = measure(arguments, "all ranks together", make_step(True))
    alone = measure(arguments, "each rank by itself", make_step(False))
    if bps.rank() == 0:
        print(f"all ranks together: {together[0]:.1f} +- {together[1]:.1f} images/s a rank, x {bps.size()} ranks")
        print(f"each rank by itself: {alone[0]:.1f} +- {alone[1]:.1f} images/s a rank")
        print(f"scaling efficiency: {together[0] / alone[0]:.1%}")
        if arguments.json:
            figures = {"ranks": bps.size(), "together": together, "alone": alone, **vars(arguments)}
            pathlib.Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
