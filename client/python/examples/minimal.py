#!/usr/bin/env python3
"""The smallest program that trains: lines 1 to 3 are what makes it distributed.

bpslaunch -np 4 python minimal.py
"""

import torch
import torch.nn.functional as F

import bps.torch as bps

bps.init()  # 1
model = torch.nn.Linear(10, 1)
bps.broadcast_parameters(model.state_dict(), root_rank=0)  # 2
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = bps.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # 3

for step in range(100):
    x = torch.randn(32, 10)
    loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()  # gradients leave as they are ready, while the rest is computed
    optimizer.step()  # waits for them

mean = bps.push_pull(loss.detach(), name="loss")
if bps.rank() == 0:
    print(f"loss over {bps.size()} rank(s) after 100 steps: {mean.item():.6f}")
