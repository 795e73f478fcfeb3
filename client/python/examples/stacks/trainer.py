"""Transformers' Trainer over bps: bpslaunch -np 2 python trainer.py

The Trainer uses the process group that is there. Prints the losses. Any other backend: trainer.py gloo
"""

import sys
import tempfile

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "bps")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed  # noqa: E402

set_seed(1)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
words = torch.randint(0, 64, (96, 16))
rows = [{"input_ids": row, "labels": row} for row in words]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=10,
        logging_steps=1,
        learning_rate=0.01,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print(f"loss {float(entry['loss']):.9f}", flush=True)
dist.destroy_process_group()
