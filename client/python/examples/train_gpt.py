#!/usr/bin/env python3
"""Trains a small GPT on real text, byte by byte, and lets it write some. The text is the source of Python's own library.

    bpslaunch -np 4 python train_gpt.py
    bpslaunch -np 4 python train_gpt.py --text shakespeare.txt --layers 6 --width 384 --steps 5000

Shows gradient accumulation (--accumulate), clipping, weight decay on matrices alone, and a cosine schedule.
"""

import argparse
import math
import pathlib
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import nn

import bps.torch as bps

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, heads, width, context):
        super().__init__()
        self.context = context
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)  # input and output share their weight

    @torch.no_grad()
    def write(self, prompt, n):
        text = torch.tensor(list(prompt)).unsqueeze(0)
        for _ in range(n):
            chances = F.softmax(self(text[:, -self.context :])[:, -1] / 0.7, dim=-1)
            text = torch.cat([text, torch.multinomial(chances, 1)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def read_text(path):
    paths = [pathlib.Path(path)] if path else sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(p.read_bytes() for p in paths)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batch_of(text, n, context, generator):
    starts = torch.randint(len(text) - context - 1, (n,), generator=generator)
    rows = torch.stack([text[s : s + context + 1] for s in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", help="file to train on; none: the source of Python's library")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank and backward pass")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes of one step")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    bps.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    text = read_text(arguments.text)
    held_out, text = text[: len(text) // 20], text[len(text) // 20 :]
    generator = torch.Generator().manual_seed(bps.rank())  # every rank reads other pieces

    model = GPT(arguments.layers, arguments.heads, arguments.width, arguments.context)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = bps.DistributedOptimizer(
        torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95)),
        model.named_parameters(),
        backward_passes_per_step=arguments.accumulate,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / arguments.steps))
    )

    began = time.monotonic()
    losses = []
    for step in range(arguments.steps):
        optimizer.zero_grad()
        for _ in range(arguments.accumulate):
            loss = loss_of(model, *batch_of(text, arguments.batch_size, arguments.context, generator))
            (loss / arguments.accumulate).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if (step + 1) % 50 == 0 or step + 1 == arguments.steps:
            mean = bps.push_pull(torch.stack(losses).mean(), name="loss").item()
            losses.clear()
            if bps.rank() == 0:
                tokens = (step + 1) * bps.size() * arguments.accumulate * arguments.batch_size * arguments.context
                rate = tokens / (time.monotonic() - began)
                print(f"step {step + 1}: mean loss {mean:.3f}, {rate:.0f} tokens/s", flush=True)

    with torch.no_grad():
        inputs, targets = batch_of(held_out, 64 // bps.size() or 1, arguments.context, generator)
        mean = bps.push_pull(loss_of(model, inputs, targets), name="held out").item()
    if bps.rank() == 0:
        print(f"held-out loss {mean:.3f} ({mean / math.log(2):.2f} bits a byte)")
        print(model.write(b"def ", 120))


if __name__ == "__main__":
    main()
