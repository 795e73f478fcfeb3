#!/usr/bin/env python3
"""5. A script written for Horovod: only the import is another.

    bpslaunch -np 4 python horovod_style.py
"""

import torch
from common import Net, load, parse_arguments, run

import bps.torch as hvd


def main():
    arguments = parse_arguments(__doc__)
    hvd.init()
    train, test = load(arguments)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
    total = lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="total")  # noqa: E731
    run(model, optimizer, arguments, train, test, hvd.rank(), hvd.size(), total)


if __name__ == "__main__":
    main()
