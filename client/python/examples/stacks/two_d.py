"""Tensor parallelism within data parallelism, both over bps: bpslaunch -np 4 python two_d.py

Prints the loss of each step. Any other backend: two_d.py gloo
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "bps")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
for step in range(10):
    inputs = torch.randn(8, 16, generator=data)
    loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}", flush=True)
dist.destroy_process_group()
