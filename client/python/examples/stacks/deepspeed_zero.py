"""DeepSpeed's ZeRO over bps: bpslaunch -np 2 python deepspeed_zero.py

Stages 1 to 3, one after the other: prints the loss of each step. DeepSpeed uses the process group that is there. Any other
backend: deepspeed_zero.py gloo
"""

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "bps")

import deepspeed  # noqa: E402

for stage in (1, 2, 3):
    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
        },
    )
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(10):
        inputs = torch.randn(8, 16, generator=data)
        loss = (engine(inputs) - inputs[:, :4].sin()).square().mean()
        engine.backward(loss)
        engine.step()
        print(f"loss {loss.item():.9f}", flush=True)
dist.destroy_process_group()
