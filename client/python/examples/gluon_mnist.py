#!/usr/bin/env python3
"""A classifier of digits in MXNet's Gluon, on one process or on many.

    bpslaunch -np 4 python gluon_mnist.py

Lines marked "bps" are what a program for one process gains.
"""

import argparse
import sys

import mnist
import mxnet as mx
from mxnet import autograd, gluon

import bps.mxnet as bps


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=80, help="images of one step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16", action="store_true", help="gradients travel as float16")
    arguments = parser.parse_args()

    bps.init()  # bps
    rank, size = bps.rank(), bps.size()  # bps
    if arguments.batch % size:
        sys.exit(f"gluon_mnist.py: a batch of {arguments.batch} cannot be shared evenly by {size} ranks")
    train, test = mnist.load()
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 5, strides=2, activation="tanh"),
        gluon.nn.Conv2D(16, 5, strides=2, activation="tanh"),
        gluon.nn.Dense(64, activation="tanh"),
        gluon.nn.Dense(10),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = bps.DistributedTrainer(  # bps: for gluon.Trainer
        net.collect_params(),
        "sgd",
        {"learning_rate": arguments.lr, "momentum": 0.9},
        compression_params={"fp16": arguments.fp16},
    )
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(arguments.epochs):
        for images, labels in mnist.shares(train, arguments.batch, rank, size, epoch):
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images[:, None])), mx.nd.array(labels))
            loss.backward()
            trainer.step(len(images))
        whole = bps.allreduce(loss.mean(), name="loss").asscalar()  # bps
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {whole:.5f}", flush=True)
    if rank == 0:
        right = net(mx.nd.array(test[0][:, None])).argmax(1).asnumpy() == test[1]
        print(f"{size} rank(s), test accuracy {right.mean():.1%}")


if __name__ == "__main__":
    main()
