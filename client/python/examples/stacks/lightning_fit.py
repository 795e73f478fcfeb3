"""Lightning over bps: bpslaunch -np 2 python lightning_fit.py

The strategy names the backend. Prints the loss of each step. Any other backend, and another of the strategies below:
lightning_fit.py gloo fsdp2. Without bpslaunch Lightning starts a second process, and bps a daemon: BPS_START_DAEMON=1 python
lightning_fit.py
"""

import functools
import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def training_step(self, batch, number):
        inputs, target = batch
        loss = (self.layers(inputs) - target).square().mean()
        print(f"[{self.global_rank}] loss {loss.item():.9f}\n", end="", flush=True)  # in one piece: processes share the output
        return loss

    def configure_model(self):
        if self.device_mesh is not None:  # of the ModelParallelStrategy
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


DEVICES = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
STRATEGIES = {
    "ddp": DDPStrategy,
    "ddp_spawn": functools.partial(DDPStrategy, start_method="spawn"),
    "fsdp2": functools.partial(ModelParallelStrategy, DEVICES, tensor_parallel_size=1),  # FSDPStrategy needs a GPU
}


def main(backend="bps", strategy="ddp"):
    lightning.seed_everything(1, verbose=False)
    inputs = torch.randn(160, 16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin()), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy=STRATEGIES[strategy](process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
