#!/usr/bin/env python3
"""3. One script that starts its own processes: torch.multiprocessing.spawn. No launcher.

    python spawn.py --processes 4

Where no bps-daemon runs on the machine, the first process to come starts one, which ends with the last (BPS_START_DAEMON).
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Net, load, parse_arguments, run

import bps.torch  # noqa: F401  registers the backend


def total(tensor):
    dist.all_reduce(tensor)
    return tensor


def train(rank, arguments, address):
    dist.init_process_group("bps", init_method=address, rank=rank, world_size=arguments.processes)
    data, test = load(arguments)
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    run(model, optimizer, arguments, data, test, rank, arguments.processes, total)
    dist.destroy_process_group()


def main():
    arguments = parse_arguments(__doc__, ("--processes", {"type": int, "default": 2}))
    os.environ.setdefault("BPS_START_DAEMON", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "tcp://{}:{}".format(*probe.getsockname())
    mp.spawn(train, args=(arguments, address), nprocs=arguments.processes)


if __name__ == "__main__":
    main()
