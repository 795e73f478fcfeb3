"""Ray Train over bps: bpslaunch -np 1 -- python ray_train.py

Ray starts two workers and their process group. Prints the first worker's losses. Any other backend: ray_train.py gloo
"""

import sys

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train():
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(1)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(10):
        inputs = torch.randn(8, 16, generator=data)
        loss = (model(inputs) - inputs[:, :4].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
trainer = TorchTrainer(
    train,
    torch_config=TorchConfig(backend=sys.argv[1] if len(sys.argv) > 1 else "bps"),
    scaling_config=ScalingConfig(num_workers=2),
)
for loss in trainer.fit().return_value:
    print(f"loss {loss:.9f}", flush=True)
