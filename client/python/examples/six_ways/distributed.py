#!/usr/bin/env python3
"""2. torch.distributed: the usual script with one word changed, the name of the backend.

    bpslaunch -np 4 python distributed.py
    torchrun --nproc-per-node 4 distributed.py      # where a bps-daemon runs
"""

import torch
import torch.distributed as dist
from common import Net, load, parse_arguments, run

import bps.torch  # noqa: F401  registers the backend


def total(tensor):
    dist.all_reduce(tensor)
    return tensor


def main():
    arguments = parse_arguments(__doc__)
    dist.init_process_group("bps")
    train, test = load(arguments)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    run(model, optimizer, arguments, train, test, dist.get_rank(), dist.get_world_size(), total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
