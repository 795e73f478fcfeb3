#!/usr/bin/env python3
"""Trains ResNet-50 on a folder of images, one folder a class: linear warm-up, checkpoints, evaluation over all ranks.

    bpslaunch -np 8 python train_imagenet.py --train imagenet/train --val imagenet/val
    bpslaunch -H a:8,b:8 python train_imagenet.py --train ... --val ... --checkpoint run.pt

Started again with the same --checkpoint it goes on behind the last epoch that was complete. The recipe is Goyal et al.,
"Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017): the learning rate grows with the number of ranks and
warms up over five epochs; no weight decay on biases and batch normalization.
"""

import argparse
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import bps.torch as bps

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Folder(torch.utils.data.Dataset):
    """root/CLASS/IMAGE: random crops and flips to train with, the middle of the image to test with."""

    def __init__(self, root, size, train):
        self.size, self.train = size, train
        self.classes = sorted(p.name for p in pathlib.Path(root).iterdir() if p.is_dir())
        self.items = [
            (path, label) for label, name in enumerate(self.classes) for path in sorted(pathlib.Path(root, name).iterdir())
        ]
        if not self.items:
            raise SystemExit(f"train_imagenet.py: {root} has no images: it should hold a folder for each class")

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        path, label = self.items[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        scale = self.size * (1.15 if not self.train else float(np.random.uniform(1.0, 1.5))) / min(image.size)
        image = image.resize([max(self.size, round(edge * scale)) for edge in image.size], Image.Resampling.BILINEAR)
        room = [edge - self.size for edge in image.size]
        left, top = [int(np.random.randint(r + 1)) if self.train else r // 2 for r in room]
        pixels = np.asarray(image.crop((left, top, left + self.size, top + self.size)), dtype=np.float32) / 255
        if self.train and np.random.rand() < 0.5:
            pixels = pixels[:, ::-1]
        pixels = (pixels - np.float32(MEAN)) / np.float32(STD)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), label


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.convs = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        nn.init.zeros_(self.convs[-1].weight)  # each block starts as the identity
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        return F.relu(self.convs(x) + self.shortcut(x))


def resnet(n_classes, blocks=(3, 4, 6, 3), width=64):
    """He et al. 2015, with the stride in the 3x3 convolution: 161 tensors and 25.6 million parameters for 1000 classes."""
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = width
    for stage, n in enumerate(blocks):
        for block in range(n):
            layers.append(Bottleneck(inputs, width << stage, 2 if stage and not block else 1))
            inputs = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, n_classes))


class RankSampler(torch.utils.data.Sampler):
    """Every size()-th index. Shuffled, all ranks get equally many and the rest is left out; in order, all are used once."""

    def __init__(self, n, shuffle):
        self.n, self.shuffle, self.epoch = n, shuffle, 0

    def __iter__(self):
        order = torch.arange(self.n)
        if self.shuffle:
            order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))[: self.n - self.n % bps.size()]
        return iter(order[bps.rank() :: bps.size()].tolist())

    def __len__(self):
        return self.n // bps.size() if self.shuffle else (self.n - bps.rank() + bps.size() - 1) // bps.size()


def learning_rate(arguments, progress):
    """progress in epochs. From --lr to --lr times ranks in --warmup epochs, then a tenth each third of the rest."""
    peak = arguments.lr * bps.size()
    if progress < arguments.warmup:
        return arguments.lr + (peak - arguments.lr) * progress / arguments.warmup
    third = (arguments.epochs - arguments.warmup) / 3 or 1
    return peak * 0.1 ** int((progress - arguments.warmup) / third)


def train_epoch(arguments, model, optimizer, loader, epoch):
    model.train()
    losses, began = [], time.monotonic()
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(arguments, epoch + step / len(loader))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if bps.rank() == 0 and (step + 1) % arguments.print_every == 0:
            rate = (step + 1) * arguments.batch_size * bps.size() / (time.monotonic() - began)
            print(f"epoch {epoch + 1}, step {step + 1} of {len(loader)}: loss {loss:.3f}, {rate:.0f} images/s", flush=True)
    return torch.stack(losses).mean()


@torch.no_grad()
def evaluate(model, loader):
    """Loss and accuracy over all images: sums are reduced, since the ranks' shares may differ by one."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for images, labels in loader:
        output = model(images)
        sums += torch.stack(
            [
                F.cross_entropy(output, labels, reduction="sum").double(),
                (output.argmax(1) == labels).sum().double(),
                torch.tensor(len(labels), dtype=torch.float64),
            ]
        )
    loss, right, count = bps.push_pull(sums, average=False, name="evaluation").tolist()
    return loss / count, right / count, int(count)


def save(path, epoch, model, optimizer):
    """Whole or not at all: a job that is killed meanwhile finds the one before."""
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.new")
    os.replace(f"{path}.new", path)


def load(path, model, optimizer):
    """Rank 0 reads, all others get it from there: no shared file system is needed. The number of epochs done."""
    done = 0
    if bps.rank() == 0 and path and os.path.exists(path):
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epoch"]
    done = bps.broadcast_object(done, root_rank=0)
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    bps.broadcast_optimizer_state(optimizer, root_rank=0)
    return done


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--train", required=True, help="folder with a folder of images for each class")
    parser.add_argument("--val", required=True)
    parser.add_argument("--checkpoint", help="file to write after each epoch, and to go on from")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--warmup", type=float, default=5, help="epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.0125, help="of each rank")
    parser.add_argument("--workers", type=int, default=2, help="processes that read images, of each rank")
    parser.add_argument("--size", type=int, default=224, help="of images, pixels")
    parser.add_argument("--blocks", type=lambda s: tuple(map(int, s.split(","))), default=(3, 4, 6, 3))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--print-every", type=int, default=20, help="steps")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    bps.init()
    torch.manual_seed(1)
    np.random.seed(1 + bps.rank())

    train, val = Folder(arguments.train, arguments.size, True), Folder(arguments.val, arguments.size, False)
    sampler = RankSampler(len(train), shuffle=True)
    workers = {"num_workers": arguments.workers, "persistent_workers": arguments.workers > 0}
    loader = torch.utils.data.DataLoader(train, arguments.batch_size, sampler=sampler, drop_last=True, **workers)
    val_loader = torch.utils.data.DataLoader(val, arguments.batch_size, sampler=RankSampler(len(val), shuffle=False), **workers)

    model = resnet(len(train.classes), arguments.blocks, arguments.width)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=arguments.lr, momentum=0.9, nesterov=True)
    done = load(arguments.checkpoint, model, optimizer)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), compression=bps.Compression.fp16)

    for epoch in range(done, arguments.epochs):
        sampler.epoch = epoch
        loss = bps.push_pull(train_epoch(arguments, model, optimizer, loader, epoch), name="loss")
        val_loss, accuracy, count = evaluate(model, val_loader)
        if bps.rank() == 0:
            print(
                f"epoch {epoch + 1}: loss {loss:.4f}, validation loss {val_loss:.4f}, accuracy {accuracy:.2%} "
                f"of {count} images",
                flush=True,
            )
            if arguments.checkpoint:
                save(arguments.checkpoint, epoch + 1, model, optimizer)


if __name__ == "__main__":
    main()
