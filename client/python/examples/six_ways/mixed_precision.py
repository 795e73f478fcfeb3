#!/usr/bin/env python3
"""4. Mixed precision, for which one used to install apex: autocast and GradScaler are torch's own by now.

    bpslaunch -np 4 python mixed_precision.py [--precision fp16]

Parameters stay in float32, the forward pass runs in 16 bits, and gradients travel in 16 bits too. float16 needs its loss
scaled; a step whose gradients overflow on any rank is skipped on all.
"""

import torch
from common import Net, load, parse_arguments, run

import bps.torch as bps


def main():
    choice = {"choices": ("bf16", "fp16"), "default": "bf16"}
    arguments = parse_arguments(__doc__, ("--precision", choice))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[arguments.precision]
    bps.init()
    train, test = load(arguments)
    model = Net()
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    optimizer = bps.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=getattr(bps.Compression, arguments.precision)
    )
    autocast = torch.autocast("cpu", half)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024) if arguments.precision == "fp16" else None
    total = lambda tensor: bps.push_pull(tensor, average=False, name="total")  # noqa: E731
    run(model, optimizer, arguments, train, test, bps.rank(), bps.size(), total, autocast, scaler)


if __name__ == "__main__":
    main()
