"""fit() of an elastic job, on Keras' backend. Argument: with which batch rank 1 of the launcher dies (0: never).

Every batch is the whole set on every rank, so whoever is there, the average is what one process computes, in every bit: who
came and went cannot be seen in the weights.
"""

import json
import os
import signal
import sys
import time

import numpy as np

import bps.keras as bps
from bps.keras._backend import BACKEND, keras, to_numpy

EPOCHS, STEPS, BATCH = 3, 8, 4
die_at = int(sys.argv[1])
number = os.environ["RANK"]


def data():
    random = np.random.default_rng(4)
    x = random.normal(size=(BATCH, 6)).astype("float32")
    return x, (x.sum(1) > 0).astype("int32")


def new_model(seed):
    random = np.random.default_rng(seed)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(7, activation="tanh")(inputs)))
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape).astype("float32") * 0.4)
    return model


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    jit = False if BACKEND == "tensorflow" else "auto"
    model.compile(optimizer, loss, jit_compile=jit)
    return model


def batches():
    while True:
        yield data()


class Die(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        Die.seen += 1
        if number == "1" and Die.seen == die_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        state.steps += 1


bps.init()
model = compiled(new_model(int(number)), bps.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
state = bps.elastic.KerasState(model, batch=0, epoch=0, steps=0)
resets = []
state.register_reset_callbacks([lambda: resets.append(bps.size())])


@bps.elastic.run
def train(state):
    # The one in the place of the dead has time to come.
    while state.epoch < EPOCHS or state.batch or (die_at and bps.size() < 2):
        time.sleep(0.2 if state.epoch >= EPOCHS else 0)
        callbacks = [
            Count(),
            bps.elastic.UpdateBatchStateCallback(state),
            bps.elastic.UpdateEpochStateCallback(state),
            bps.elastic.CommitStateCallback(state, batches_per_commit=2),
            Die(),
        ]
        steps = STEPS - state.batch
        model.fit(batches(), steps_per_epoch=steps, verbose=0, callbacks=callbacks)


train(state)
alone = compiled(new_model(0), keras.optimizers.SGD(0.1, momentum=0.9))
alone.fit(batches(), steps_per_epoch=STEPS, epochs=state.epoch, verbose=0)
for mine, expected in zip(model.weights, alone.weights):
    np.testing.assert_allclose(to_numpy(mine), to_numpy(expected), rtol=0, atol=0)
print(json.dumps({"epoch": state.epoch, "batch": state.batch, "steps": state.steps, "resets": resets, "size": bps.size()}))
bps.shutdown()
