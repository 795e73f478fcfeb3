#!/usr/bin/env python3
"""What a step of training takes on this machine's GPUs, for scripts/gpu-check: without communication, by PyTorch's own way
(DistributedDataParallel over Gloo, and over NCCL where each rank has a GPU), and by bps. Medians of steps taken in turn.

Started by bpslaunch, any number of ranks: GPUs are taken in turn. `--device cpu` runs the same on the CPU. `--store FILE`: where
the ranks of torch.distributed meet. `--json FILE`: rank 0 writes there, too.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import bps.torch as bps

WARM, STEPS = 3, 15


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--store", required=True)
    parser.add_argument("--json")
    parser.add_argument("--layers", type=int, default=12)
    return parser.parse_args()


class Way:
    """A model of its own, and how its gradients are averaged."""

    def __init__(self, name, layers, device):
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
        self.name, self.seconds = name, []
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
        self.x = torch.randn(4, 128, 768, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        if name == "bps":
            named = self.model.named_parameters()
            self.optimizer = bps.DistributedOptimizer(self.optimizer, named_parameters=named)
            bps.broadcast_parameters(self.model.state_dict(), root_rank=0)
        elif name != "alone":
            self.model = DistributedDataParallel(self.model, process_group=dist.new_group(backend=name))

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


def measure(ways, synchronize):
    for k in range(WARM + STEPS):
        for way in ways:
            dist.barrier()
            began = time.perf_counter()
            way.step()
            synchronize()
            if k >= WARM:
                way.seconds.append(time.perf_counter() - began)


def main():
    options = parse()
    bps.init()
    cuda = options.device == "cuda"
    n_devices = torch.cuda.device_count() if cuda else 0
    device = torch.device("cuda", bps.local_rank() % n_devices) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=bps.rank(), world_size=bps.size())
    # Of NCCL's ranks no two are on one GPU.
    names = ["alone", "gloo", *(["nccl"] if n_devices >= bps.size() else []), "bps"]
    ways = [Way(name, options.layers, device) for name in names]
    measure(ways, torch.cuda.synchronize if cuda else lambda: None)
    if bps.rank() == 0:
        n_bytes = 4 * sum(p.numel() for p in ways[0].model.parameters())
        ms = {way.name: 1000 * statistics.median(way.seconds) for way in ways}
        row = ", ".join(f"{name} {value:.1f} ms" for name, value in ms.items())
        where = f"{n_devices} GPUs" if cuda else "the CPU"
        print(f"a step, {bps.size()} ranks on {where}, gradients of {n_bytes / 1e6:.0f} MB: {row}")
        if options.json:
            with open(options.json, "w") as f:
                f.write(json.dumps({"ranks": bps.size(), "devices": n_devices, "bytes": n_bytes, "ms": ms}) + "\n")
    dist.destroy_process_group()
    bps.shutdown()


main()
