"""Accelerate over bps: bpslaunch -np 2 python accelerated.py

Accelerate uses the process group that is there. Prints the loss of each step. Any other backend: accelerated.py gloo
"""

import sys

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "bps")

from accelerate import Accelerator  # noqa: E402

accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
inputs = torch.randn(160, 16)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin()), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
for batch, target in loader:
    loss = (model(batch) - target).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    print(f"loss {accelerator.gather(loss.detach()).mean():.9f}", flush=True)
accelerator.end_training()
