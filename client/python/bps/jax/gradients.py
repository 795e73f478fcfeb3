"""Gradients averaged over ranks, in the forms in which JAX programs have them."""

import functools
from typing import NamedTuple

import jax

from .._library import Reduction
from .._ops import check_predivide
from .compression import Compression
from .ops import allreduce


def allreduce_gradients(
    gradients, op=Reduction.AVERAGE, name=None, compression=Compression.none, gradient_predivide_factor=1.0
):
    """A tree of gradients, averaged (op: or summed, ...) over all ranks. All leaves travel side by side.

    gradient_predivide_factor divides before and multiplies after the average, against overflow in 16 bits.
    """
    op = Reduction(op)
    check_predivide(gradient_predivide_factor, op)
    return allreduce(
        gradients,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=1.0 / gradient_predivide_factor,
        postscale_factor=gradient_predivide_factor,
    )


def value_and_grad(
    fun, argnums=0, has_aux=False, *, op=Reduction.AVERAGE, name=None, compression=Compression.none, **more
):
    """As jax.value_and_grad(), of the average (or sum) of fun over all ranks: both value and gradient are reduced.

    What has_aux brings stays this rank's own. more: what else jax.value_and_grad() takes.
    """
    inner = jax.value_and_grad(fun, argnums, has_aux, **more)

    @functools.wraps(fun)
    def reduced(*args, **kwargs):
        value, gradients = inner(*args, **kwargs)
        value, aux = value if has_aux else (value, None)
        value = allreduce(value, op=op, name=None if name is None else f"{name}.value")
        gradients = allreduce_gradients(gradients, op, name, compression)
        return ((value, aux) if has_aux else value), gradients

    return reduced


def grad(fun, argnums=0, has_aux=False, **more):
    """As jax.grad(), of the average over all ranks. more: as of value_and_grad()."""
    both = value_and_grad(fun, argnums, has_aux, **more)

    @functools.wraps(fun)
    def reduced(*args, **kwargs):
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return reduced


class GradientTransformation(NamedTuple):
    """As optax's: state = init(params); updates, state = update(updates, state, params). For where optax is not."""

    init: object
    update: object


def _transformation(init, update):
    try:
        import optax
    except ImportError:
        return GradientTransformation(init, update)
    return optax.GradientTransformation(init, update)


def _with_mean_gradient(op):
    """A function that returns its tree, whose gradient is what the op of all ranks' is."""

    @jax.custom_vjp
    def same(tree):
        return tree

    same.defvjp(lambda tree: (tree, None), lambda _, gradients: (allreduce(gradients, op=op),))
    return same


def _of_all_ranks(extra, reduce, op):
    """What optax's line searches and schedules take beside the gradients, of all ranks: the loss, its gradients, and the function itself."""
    extra = dict(extra)
    if extra.get("value") is not None:
        extra["value"] = allreduce(extra["value"], op=op)
    if extra.get("grad") is not None:
        extra["grad"] = reduce(extra["grad"])
    if extra.get("value_fn") is not None:
        local, same = extra["value_fn"], _with_mean_gradient(op)
        extra["value_fn"] = lambda params, *args, **more: allreduce(local(same(params), *args, **more), op=op)
    return extra


def distributed(optimizer=None, *, op=Reduction.AVERAGE, name=None, compression=Compression.none, **more):
    """A gradient transformation whose update() averages the gradients over all ranks first.

    optimizer: one of optax, or whatever else has init(params) and update(gradients, state, params). Its own class is
    kept where it is a named tuple, as optax's are. Without one, it only averages: a first link for optax.chain(). The
    state is the optimizer's. more: gradient_predivide_factor. update()'s value, grad and value_fn, of line searches (optax.lbfgs) and
    of optax.contrib.reduce_on_plateau, are each rank's own as well, and averaged.
    """

    op = Reduction(op)

    def reduce(gradients):
        return allreduce_gradients(gradients, op, name, compression, **more)

    if optimizer is None:
        return _transformation(lambda params: (), lambda updates, state, params=None: (reduce(updates), state))

    def update(updates, state, params=None, **extra):
        return optimizer.update(reduce(updates), state, params, **_of_all_ranks(extra, reduce, op))

    if hasattr(optimizer, "_replace"):
        return optimizer._replace(update=update)
    if not hasattr(optimizer, "init") or not hasattr(optimizer, "update"):
        raise TypeError(
            f"a {type(optimizer).__name__} is no optimizer: it has no init(params) and update(gradients, ...)"
        )
    return _transformation(optimizer.init, update)


DistributedOptimizer = distributed


__all__ = [
    "DistributedOptimizer",
    "allreduce_gradients",
    "distributed",
    "grad",
    "value_and_grad",
]
