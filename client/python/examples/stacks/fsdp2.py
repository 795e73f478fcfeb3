"""fully_shard() over bps: bpslaunch -np 2 python fsdp2.py

Prints the loss of each step. Any other backend: fsdp2.py gloo
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

backend = sys.argv[1] if len(sys.argv) > 1 else "bps"
dist.init_process_group(backend)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
fully_shard(model)
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
