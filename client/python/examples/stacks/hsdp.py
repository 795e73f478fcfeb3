"""HSDP whose replicas meet over bps, while each is sharded over another backend: bpslaunch -np 4 python hsdp.py

Prints the loss of each step. All over another backend: hsdp.py gloo
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

backend = sys.argv[1] if len(sys.argv) > 1 else "bps"
dist.init_process_group("gloo")
names = ("dp_replicate", "dp_shard")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names, backend_override={"dp_replicate": backend})
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(dist.get_rank())
for step in range(10):
    inputs = torch.randn(8, 16, generator=data)
    loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}", flush=True)
dist.destroy_process_group()
