"""A loop of an elastic job: each step adds to a variable how many ranks came, in a graph that fails when they change. Rank 1 dies
in the middle of it.
"""

import os
import signal

import tensorflow as tf

import bps.tensorflow as bps

STEPS, DIE_AT = 8, 4
total = tf.Variable(tf.zeros([1000]))


@tf.function
def step(x):
    total.assign_add(bps.allreduce(x, op=bps.Sum, name="x"))
    ranks = bps.allgather(x[:1], name="who")
    with tf.control_dependencies([ranks]):
        return tf.shape(ranks)[0], bps.allreduce(x, op=bps.Sum, name="y")


bps.init()
state = bps.elastic.TensorFlowState([total], step=0)
begun = []


@bps.elastic.run
def train(state):
    begun.append((state.step, bps.size()))
    while state.step < STEPS:
        if state.step == DIE_AT and bps.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        n, y = step(tf.ones([1000]))
        assert n == bps.size() == y[0], (n, y, bps.size())
        state.step += 1
        state.commit()


train(state)
# What the step that failed had added is gone.
assert (total.numpy() == 2 * DIE_AT + (STEPS - DIE_AT)).all(), (total.numpy()[:5], begun)
assert begun[0] == (0, 2) and begun[1][0] in (DIE_AT, DIE_AT + 1) and begun[1][1] == 1, begun
print(begun)
print("done")
bps.shutdown()
