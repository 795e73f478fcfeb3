"""Ranks that torchrun begins again: torchrun --nproc-per-node 2 --max-restarts 1 restarted.py FOLDER

One rank fails in the middle; then all begin again, from the newest checkpoint in FOLDER. Prints the loss of each step.
Any other backend: restarted.py FOLDER gloo
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

folder = pathlib.Path(sys.argv[1])
dist.init_process_group(sys.argv[2] if len(sys.argv) > 2 else "bps")
rank = dist.get_rank()
torch.manual_seed(1)
layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def state():
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


done = max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)
if done:
    saved = state()
    checkpoint.load(saved, checkpoint_id=folder / str(done))
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
for step in range(done, 10):
    if step == 5 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit("rank 1 fails, to show what follows")
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + rank))
    loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.9f}\n", end="", flush=True)  # in one piece: torchrun lets all ranks write into one pipe
    checkpoint.save(state(), checkpoint_id=folder / str(step + 1))
dist.destroy_process_group()
