#!/usr/bin/env python3
"""A classifier of digits in JAX, on one process or on many: the same losses either way.

    bpslaunch -np 4 python jax_mnist.py

Lines marked "bps" are what a program for one process gains.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import mnist

import bps.jax as bps


def new_params(key, sizes=(784, 128, 10)):
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": jax.random.normal(k, (n, m)) * (1 / n) ** 0.5, "b": jnp.zeros(m)}
        for k, n, m in zip(keys, sizes, sizes[1:])
    ]


def predict(params, images):
    x = images.reshape(len(images), -1)
    for layer in params[:-1]:
        x = jax.nn.silu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_of(params, images, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(predict(params, images)), labels[:, None], 1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=80, help="images of one step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()

    bps.init()  # bps
    rank, size = bps.rank(), bps.size()  # bps
    if arguments.batch % size:
        sys.exit(f"jax_mnist.py: a batch of {arguments.batch} cannot be shared evenly by {size} ranks")
    train, test = mnist.load()
    params = bps.broadcast_parameters(new_params(jax.random.key(rank)), root_rank=0)  # bps
    velocity = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def step(params, velocity, images, labels):
        loss, gradients = bps.value_and_grad(loss_of)(params, images, labels)  # bps: for jax.value_and_grad
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        return jax.tree.map(lambda p, v: p - arguments.lr * v, params, velocity), velocity, loss

    for epoch in range(arguments.epochs):
        for images, labels in mnist.shares(train, arguments.batch, rank, size, epoch):
            params, velocity, loss = step(params, velocity, images, labels)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.5f}", flush=True)
    if rank == 0:
        accuracy = jnp.mean(predict(params, test[0]).argmax(1) == test[1])
        print(f"{size} rank(s), test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
