"""Lightning over bps: bpslaunch -np 2 python lightning_ddp.py

The strategy names the backend. Prints the loss of each step. Any other backend: lightning_ddp.py gloo
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def training_step(self, batch, number):
        inputs, target = batch
        loss = (self.layers(inputs) - target).square().mean()
        print(f"loss {loss.item():.9f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


lightning.seed_everything(1, verbose=False)
inputs = torch.randn(160, 16)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs[:, :4].sin()), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=DDPStrategy(process_group_backend=sys.argv[1] if len(sys.argv) > 1 else "bps"),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), loader)
