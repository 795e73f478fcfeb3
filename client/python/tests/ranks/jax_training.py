"""Training through bps.jax against one process that takes the whole batch. Run by name, or all of it."""

import functools
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from checks import chosen

import bps.jax as bps

STEPS = 6
SHARE = 8  # examples of one rank in one step


def new_params(seed=3):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "first": {"w": jax.random.normal(keys[0], (6, 16)) * 0.4, "b": jnp.zeros(16)},
        "second": {"w": jax.random.normal(keys[1], (16, 5)) * 0.4, "b": jnp.zeros(5)},
        "unused": jnp.ones(7),
        "scale": jnp.float32(1.0),
    }


def loss_of(params, batch):
    x, y = batch
    x = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    x = (x @ params["second"]["w"] + params["second"]["b"]) * params["scale"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1))


def batches():
    generator = np.random.default_rng(5)
    for _ in range(STEPS):
        n = SHARE * bps.size()
        yield generator.standard_normal((n, 6)).astype("float32"), generator.integers(0, 5, n)


def share(batch, rank=None):
    return tuple(x[bps.rank() if rank is None else rank :: bps.size()] for x in batch)


class Momentum(NamedTuple):
    """An optimizer in optax's form that is not optax's."""

    init: object
    update: object


def momentum(rate=0.1, decay=0.9):
    def update(gradients, state, params=None):
        state = jax.tree.map(lambda s, g: decay * s + g, state, gradients)
        return jax.tree.map(lambda s: -rate * s, state), state

    return Momentum(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def optimizers():
    yield "momentum", momentum()
    try:
        import optax
    except ImportError:
        return
    yield "adam", optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))


def train(optimizer, params, gradients_of, data):
    state = optimizer.init(params)
    losses = []

    @jax.jit
    def step(params, state, batch):
        loss, gradients = gradients_of(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p + u, params, updates), state, loss

    for batch in data:
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return params, np.array(losses)


def close(got, wanted, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, wanted)


def same_on_all_ranks(params):
    theirs = bps.broadcast_object(jax.tree.map(np.asarray, params), root_rank=0)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), params, theirs)


def check_equals_one_process():
    for name, optimizer in optimizers():
        alone, losses = train(optimizer, new_params(), jax.value_and_grad(loss_of), batches())
        shares = [share(batch) for batch in batches()]
        begin = bps.broadcast_parameters(new_params(3 + bps.rank()), root_rank=0)
        close(begin, new_params(), 0, 0)
        # The optimizer averages, or the gradient is averaged already.
        wrapped = bps.DistributedOptimizer(optimizer)
        assert type(wrapped) is type(optimizer)
        together, _ = train(wrapped, begin, jax.value_and_grad(loss_of), shares)
        close(together, alone)
        same_on_all_ranks(together)
        together, whole = train(optimizer, begin, bps.value_and_grad(loss_of), shares)
        close(together, alone)
        close(whole, losses)
        assert (np.asarray(together["unused"]) == 1).all()


def check_equals_the_shares_in_turn_bit_by_bit():
    """One process that takes each rank's share in turn and averages as the daemon does, in the order of the ranks."""
    optimizer = momentum()
    gradient_of = jax.jit(jax.grad(loss_of))

    def in_turn(params, batch):
        each = [jax.tree.map(np.asarray, gradient_of(params, share(batch, rank))) for rank in range(bps.size())]
        total = each[0]
        for other in each[1:]:
            total = jax.tree.map(np.add, total, other)
        return jax.tree.map(lambda t: t / np.float32(bps.size()), total)

    def together(params, batch):
        return bps.allreduce_gradients(gradient_of(params, share(batch)))

    ends = []
    for gradients in (in_turn, together):
        params = new_params()
        state = optimizer.init(params)
        for batch in batches():
            updates, state = optimizer.update(gradients(params, batch), state)
            params = jax.tree.map(lambda p, u: p + u, params, updates)
        ends.append(params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *ends)


def check_options():
    params, batch = new_params(), next(batches())
    whole = jax.grad(loss_of)(params, batch)
    mine = share(batch)
    for compression, near in ((bps.Compression.fp16, 2e-3), (bps.Compression.bf16, 2e-2)):
        got = jax.jit(bps.grad(loss_of, compression=compression))(params, mine)
        assert got["scale"].dtype == jnp.float32
        close(got, whole, near, near)
    summed = jax.jit(bps.grad(loss_of, op=bps.Sum))(params, mine)
    close(summed, jax.tree.map(lambda g: g * bps.size(), whole))
    gradients = jax.grad(loss_of)(params, mine)
    close(bps.allreduce_gradients(gradients, gradient_predivide_factor=4.0), whole)
    (loss, aux), got = bps.value_and_grad(lambda p, b: (loss_of(p, b), bps.rank()), has_aux=True)(params, mine)
    close(loss, loss_of(params, batch))
    close(got, whole)
    assert aux == bps.rank()
    only = bps.distributed()  # a transformation that averages and does nothing else
    close(only.update(gradients, only.init(params))[0], whole)
    for wrong in (
        lambda: bps.DistributedOptimizer(3),
        lambda: bps.allreduce_gradients(gradients, bps.Sum, gradient_predivide_factor=2.0),
    ):
        try:
            wrong()
        except (TypeError, ValueError):
            continue
        raise AssertionError("not refused")


def check_line_searches():
    """They take the loss, its gradient and the function, which are each rank's own, and have to go on alike on all ranks."""
    try:
        import optax
    except ImportError:
        return

    def search(optimizer, batch, params):
        loss = functools.partial(loss_of, batch=batch)

        @jax.jit
        def step(params, state):
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params, value=value, grad=gradients, value_fn=loss)
            return optax.apply_updates(params, updates), state

        state = optimizer.init(params)
        for _ in range(4):
            params, state = step(params, state)
        return params

    batch = next(batches())
    for make in (optax.lbfgs, lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=8))):
        got = search(bps.DistributedOptimizer(make()), share(batch), new_params())
        same_on_all_ranks(got)
        close(got, search(make(), batch, new_params()), 1e-3, 1e-4)


def check_uneven_data():
    """Shares of different sizes: each rank compiles programs of its own and weighs its gradient by its examples."""
    x, y = next(batches())
    n = len(x)
    cut = [0, *sorted(np.random.default_rng(1).choice(np.arange(1, n), bps.size() - 1, replace=False)), n]
    params = new_params()
    for shift in range(3):
        mine = tuple(np.roll(v, shift, 0)[cut[bps.rank()] : cut[bps.rank() + 1]] for v in (x, y))
        weight = len(mine[0]) / n
        got = jax.jit(bps.grad(lambda p, b: loss_of(p, b) * weight, op=bps.Sum))(params, mine)
        close(got, jax.grad(loss_of)(params, (x, y)))


if __name__ == "__main__":
    bps.init()
    for name, check in chosen(globals(), sys.argv[1:]):
        check()
        print(f"{name} {time.process_time():.1f} s", flush=True)
    print("done", flush=True)
