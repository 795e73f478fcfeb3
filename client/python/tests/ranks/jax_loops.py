"""Random training loops of JAX and optax on all ranks, each against one process that takes the ranks' batches together: loops.py.

    jax_loops.py FIRST LAST     the seeds from FIRST to LAST - 1
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from loops import Loops

import bps.jax as bps

BATCH = 4  # examples of one rank


def new_parameters(seed):
    random = np.random.default_rng(seed)
    shapes = {"first": (3, 5), "bias": (5,), "last": (5, 2), "scale": ()}
    return {name: jnp.asarray(random.normal(size=shape) * 0.5, "float32") for name, shape in shapes.items()}


def loss_of(params, x, y):
    h = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((h @ params["last"] * params["scale"] - y) ** 2)


class World:
    """One side: parameters, the optimizer and its state, and the ranks whose batches it takes."""

    def __init__(self, front, seed, size, ranks, kind):
        self.size, self.ranks, self.is_wrapped, self.kind = size, ranks, front is not None, kind
        self.params = new_parameters(seed)
        self.use(kind())

    def use(self, optimizer, wrap=True):
        """Another optimizer, with a state of its own. wrap: False where it is wrapped inside."""
        self.optimizer = bps.DistributedOptimizer(optimizer) if self.is_wrapped and wrap else optimizer
        self.state = self.optimizer.init(self.params)

    def averaging(self):
        """A first link of a chain."""
        return bps.distributed() if self.is_wrapped else optax.identity()

    def batch(self, seed):
        random = np.random.default_rng(seed)
        x = random.normal(size=(self.size, BATCH, 3)).astype("float32")
        x = x[list(self.ranks)].reshape(-1, 3)
        return jnp.asarray(x), jnp.asarray(np.stack([x.sum(1), x[:, 0] * x[:, 1]], 1))

    def apply(self, gradients, **extra):
        updates, self.state = self.optimizer.update(gradients, self.state, self.params, **extra)
        self.params = optax.apply_updates(self.params, updates)

    def close(self):
        return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(self.params)])


# -- Actions


def plain_step(world, s):
    world.apply(jax.grad(loss_of)(world.params, *world.batch(s.seed)))


def compiled_step(world, s):
    optimizer = world.optimizer

    @jax.jit
    def step(params, state, x, y):
        updates, state = optimizer.update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for i in range(1 + s.coin):
        world.params, world.state = step(world.params, world.state, *world.batch(s.seed + i))


def donated_step(world, s):
    optimizer = world.optimizer

    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss_of)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    params, state = jax.tree.map(jnp.array, (world.params, world.state))
    world.params, world.state = jax.jit(step, donate_argnums=(0, 1))(params, state, world.batch(s.seed))


def scanned_steps(world, s):
    optimizer = world.optimizer

    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss_of)(params, *batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    batches = [world.batch(s.seed + i) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    (world.params, world.state), _ = jax.lax.scan(step, (world.params, world.state), stacked)


def reduced_gradients(world, s):
    """By bps.grad() or value_and_grad(), and an optimizer that is not wrapped."""
    optimizer = optax.sgd(0.05)
    if s.coin:
        take = bps.value_and_grad(loss_of) if world.is_wrapped else jax.value_and_grad(loss_of)
        value, gradients = (jax.jit(take) if s.number % 2 else take)(world.params, *world.batch(s.seed))
        gradients = jax.tree.map(lambda g: g * (1 + value), gradients)
    else:
        take = bps.grad(loss_of) if world.is_wrapped else jax.grad(loss_of)
        gradients = take(world.params, *world.batch(s.seed))
    updates, _ = optimizer.update(gradients, optimizer.init(world.params), world.params)
    world.params = optax.apply_updates(world.params, updates)


def reduced_by_hand(world, s):
    gradients = jax.grad(loss_of)(world.params, *world.batch(s.seed))
    if world.is_wrapped:
        gradients = bps.allreduce_gradients(gradients)
    world.params = jax.tree.map(lambda p, g: p - 0.05 * g, world.params, gradients)


def gradient_of_reduced_loss(world, s):
    """The gradient of an average is that of the average, on each rank of its own part: to be averaged once more."""

    def loss(params, x, y):
        value = loss_of(params, x, y)
        return bps.allreduce(value) if world.is_wrapped else value

    gradients = jax.grad(loss)(world.params, *world.batch(s.seed))
    world.apply(gradients)


def clipped(world, s):
    world.use(optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.5)))
    plain_step(world, s)


def averaged_in_a_chain(world, s):
    world.use(optax.chain(world.averaging(), optax.clip(0.01), optax.adam(0.01)), wrap=False)
    compiled_step(world, s)


def several_passes(world, s):
    world.use(optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2))
    for i in range(4):
        world.apply(jax.grad(loss_of)(world.params, *world.batch(s.seed + i)))


def masked(world, s):
    frozen = ("first", "bias", "last", "scale")[s.number]
    labels = {name: "frozen" if name == frozen else "trained" for name in world.params}
    world.use(optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adam(0.01)}, labels))
    plain_step(world, s)


def schedules(world, s):
    world.use(optax.inject_hyperparams(optax.sgd)(optax.cosine_decay_schedule(0.1, 5)))
    for i in range(2):
        world.apply(jax.grad(loss_of)(world.params, *world.batch(s.seed + i)))


def changed_rate(world, s):
    world.use(optax.inject_hyperparams(optax.adamw)(0.01))
    plain_step(world, s)
    world.state.hyperparams["learning_rate"] = jnp.asarray(0.01 * (1 + s.number), "float32")
    plain_step(world, s)


def line_search(world, s):
    world.use(optax.lbfgs())
    x, y = world.batch(s.seed)

    def value_of(params):
        return loss_of(params, x, y)

    for _ in range(2):
        value, gradients = jax.value_and_grad(value_of)(world.params)
        world.apply(gradients, value=value, grad=gradients, value_fn=value_of)
    world.use(world.kind())  # which other steps do not tell the loss


def look_ahead(world, s):
    """What optimizers keep beside the parameters: averages of them."""
    average = optax.ema(0.5)
    state = average.init(world.params)
    plain_step(world, s)
    world.params, _ = average.update(world.params, state)


def rematerialized(world, s):
    world.apply(jax.grad(jax.checkpoint(loss_of))(world.params, *world.batch(s.seed)))


def by_vmap(world, s):
    """Gradients of each example, and their mean."""
    x, y = world.batch(s.seed)
    each = jax.vmap(jax.grad(lambda p, x, y: loss_of(p, x[None], y[None])), (None, 0, 0))(world.params, x, y)
    world.apply(jax.tree.map(lambda g: g.mean(0), each))


def not_compiled(world, s):
    with jax.disable_jit():
        compiled_step(world, s)


def other_parameters(world, s):
    world.params = jax.tree.map(lambda p: p * 0.9, world.params)


def restored_state(world, s):
    kept = jax.tree.map(np.asarray, (world.params, world.state))
    plain_step(world, s)
    if s.coin:
        world.params, world.state = jax.tree.map(jnp.asarray, kept)


ACTIONS = [
    plain_step, compiled_step, donated_step, scanned_steps, reduced_gradients, reduced_by_hand, gradient_of_reduced_loss, clipped,
    averaged_in_a_chain, several_passes, masked, schedules, changed_rate, line_search, look_ahead, rematerialized, by_vmap,
    not_compiled, other_parameters, restored_state,
]  # fmt: skip


def sgd():
    return optax.sgd(0.1, momentum=0.5)


def adam():
    return optax.adamw(0.01, weight_decay=0.05)


def main(first, last):
    bps.init()
    size, rank = bps.size(), bps.rank()

    def world(front, seed, ranks, kind):
        return World(front, seed, size, ranks, kind)

    loops = Loops("jax", world, ACTIONS, plain_step, [sgd, adam], size, rank, bps.allgather_object)
    status = loops.all_of(int(first), int(last))
    bps.shutdown()
    return status


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    print("done" if not status else "failed", flush=True)
    os._exit(status)
