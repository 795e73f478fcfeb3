"""Random training loops of Keras on all ranks, each against one process that takes the ranks' batches together: loops.py.

    keras_loops.py FIRST LAST     the seeds from FIRST to LAST - 1
"""

import os
import sys
import tempfile

import numpy as np
from loops import Loops

import bps.keras as bps
import keras

BACKEND = keras.backend.backend()
BATCH = 4  # examples of one rank


class World:
    """One side: the model, compiled, and the ranks whose batches it takes."""

    def __init__(self, front, seed, size, ranks, kind):
        keras.utils.set_random_seed(seed)
        self.size, self.ranks, self.is_wrapped, self.kind = size, ranks, front is not None, kind
        self.model = keras.Sequential(
            [keras.Input((3,)), *(keras.layers.Dense(n, activation="tanh") for n in (5, 4)), keras.layers.Dense(2)]
        )
        self.compile()

    def compile(self, **options):
        optimizer = self.kind(**options)
        if self.is_wrapped:
            optimizer = bps.DistributedOptimizer(optimizer)
        self.recompile(optimizer)

    def recompile(self, optimizer):
        self.model.compile(optimizer, "mse", jit_compile=False)

    def batches(self, seed, n=1):
        """x and y of this side, n batches."""
        random = np.random.default_rng(seed)
        x = random.normal(size=(n, self.size, BATCH, 3)).astype("float32")
        x = x[:, list(self.ranks)].reshape(-1, 3)
        return x, np.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)

    def batch(self):
        return BATCH * len(self.ranks)

    def close(self):
        return np.concatenate([keras.ops.convert_to_numpy(w).reshape(-1) for w in self.model.weights])


# -- Actions


def train_on_batch(world, s):
    for i in range(1 + s.coin):
        world.model.train_on_batch(*world.batches(s.seed + i))


def fit(world, s):
    x, y = world.batches(s.seed, 3)
    world.model.fit(x, y, world.batch(), epochs=1 + s.coin, verbose=0, shuffle=False)


def evaluate_and_predict(world, s):
    x, y = world.batches(s.seed, 2)
    world.model.evaluate(x, y, world.batch(), verbose=0)
    world.model.predict(x, verbose=0)


def learning_rate(world, s):
    world.model.optimizer.learning_rate = 0.01 * (1 + s.number)


def freeze(world, s):
    """It counts from the next compile() on, as Keras says."""
    layer = world.model.layers[s.number % 3]
    layer.trainable = not layer.trainable
    if any(layer.trainable for layer in world.model.layers):
        world.compile()
    else:
        layer.trainable = True


def compile_anew(world, s):
    options = ({}, {"clipnorm": 0.05}, {"clipvalue": 0.01}, {"global_clipnorm": 0.1})[s.number]
    world.compile(**options)


def accumulate(world, s):
    world.compile(gradient_accumulation_steps=2)
    train_on_batch(world, s)


def averages_of_weights(world, s):
    world.compile(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    fit(world, s)
    world.model.optimizer.finalize_variable_values(world.model.trainable_variables)


def set_weights(world, s):
    world.model.set_weights([w * 0.9 for w in world.model.get_weights()])


def save_and_load_weights(world, s):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.weights.h5")
        world.model.save_weights(path)
        world.model.set_weights([w * 0 for w in world.model.get_weights()])
        world.model.load_weights(path)


def save_and_load(world, s):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        world.model.save(path)
        world.model = bps.load_model(path) if s.coin and world.is_wrapped else keras.models.load_model(path)


def copied_optimizer(world, s):
    """A copy by its configuration, without its state."""
    optimizer = world.model.optimizer
    world.recompile(type(optimizer).from_config(optimizer.get_config()))


def cloned_model(world, s):
    clone = keras.models.clone_model(world.model)
    clone.set_weights(world.model.get_weights())
    world.model = clone
    world.compile()


def callback(world, s):
    def change(epoch, logs):
        world.model.optimizer.learning_rate = 0.02 / (1 + epoch)

    x, y = world.batches(s.seed, 2)
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=change)]
    world.model.fit(x, y, world.batch(), epochs=2, verbose=0, shuffle=False, callbacks=callbacks)


def state_of_the_optimizer(world, s):
    values = [keras.ops.convert_to_numpy(v) for v in world.model.optimizer.variables]
    train_on_batch(world, s)
    for variable, value in zip(world.model.optimizer.variables, values):
        variable.assign(value)


ACTIONS = [
    train_on_batch, fit, evaluate_and_predict, learning_rate, freeze, compile_anew, accumulate, averages_of_weights, set_weights,
    save_and_load_weights, save_and_load, copied_optimizer, cloned_model, callback, state_of_the_optimizer,
]  # fmt: skip


def sgd(**options):
    return keras.optimizers.SGD(0.05, momentum=0.5, **options)


def adam(**options):
    return keras.optimizers.AdamW(0.01, weight_decay=0.05, **options)


def rmsprop(**options):
    return keras.optimizers.RMSprop(0.01, **options)


def main(first, last):
    bps.init()
    size, rank = bps.size(), bps.rank()

    def world(front, seed, ranks, kind):
        return World(front, seed, size, ranks, kind)

    loops = Loops("keras", world, ACTIONS, train_on_batch, [sgd, adam, rmsprop], size, rank, bps.allgather_object)
    status = loops.all_of(int(first), int(last))
    bps.shutdown()
    return status


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    print("done" if not status else "failed", flush=True)
    os._exit(status)
