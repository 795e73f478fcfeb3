"""Gradients of Keras on JAX, reduced over all ranks, inside the compiled step."""

import functools
import re

import jax

from .. import _reducer
from .._errors import error_from
from .._horovod import check_process_set, global_process_set
from ..jax.gradients import allreduce_gradients


def as_bps_errors(func):
    """func, whose failures inside compiled programs are BpsErrors too if they are of an operation of bps."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        try:
            return func(*args, **kwargs)
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"bps \[errno (\d+)\] (.*)", str(error), re.S)
            if not found:
                raise
            raise error_from(-int(found[1]), found[2]) from error

    return wrapper


class Reducer(_reducer.Reducer):
    def __init__(self, *arguments, process_set=global_process_set, **more):
        check_process_set(process_set)
        super().__init__(*arguments, **more)

    def _reduce(self, gradients, numbers):
        return allreduce_gradients(
            gradients, self.op, compression=self.compression, gradient_predivide_factor=self.predivide
        )
