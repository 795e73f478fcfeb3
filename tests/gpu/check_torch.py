#!/usr/bin/env python3
"""PyTorch on this machine's GPUs through the daemon, for scripts/gpu-check: bits against the CPU's, and some training.

Started by bpslaunch, any number of ranks: GPUs are taken in turn. `--device cpu` runs the same on the CPU, which shows
that the program itself is right.
"""

import os
import sys
import warnings

import torch

import bps.torch as bps

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]


def device_of(local_rank):
    if "--device" in sys.argv:
        return torch.device(sys.argv[sys.argv.index("--device") + 1])
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def values(dtype, count, rank):
    """Whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank + 1)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, (count,), generator=generator).to(dtype)


def check_bits(device):
    for dtype in DTYPES:
        for count in (1, 1000, 300007):
            mine = values(dtype, count, bps.rank())
            want = bps.push_pull(mine, average=False, name=f"cpu.{dtype}.{count}")
            got = bps.push_pull(mine.to(device), average=False, name=f"device.{dtype}.{count}")
            assert got.device == device, got.device
            if dtype.is_floating_point and os.environ.get("BPS_GPU_REDUCE") != "host":
                torch.testing.assert_close(got.cpu(), want)
            else:
                assert torch.equal(got.cpu(), want), (dtype, count)


def train(device, steps):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(bps.rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(128, 64, generator=generator).to(device)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


def check_training(device):
    model, losses = train(device, 50)
    assert losses[-1] < losses[0] / 2, losses
    # The same weights on all ranks.
    mine = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    for r, theirs in enumerate(bps.allgather(mine[None], name="weights")):
        assert torch.equal(mine, theirs), f"other weights on rank {r}"


def main():
    # What is copied through the host's memory is a warning, and here a failure.
    warnings.simplefilter("error", UserWarning)
    bps.init()
    device = device_of(bps.local_rank())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check_bits(device)
    check_training(device)
    if bps.rank() == 0:
        print(f"PyTorch {torch.__version__} on {device.type}, {bps.size()} ranks: bits and training are right")
    bps.shutdown()


main()
