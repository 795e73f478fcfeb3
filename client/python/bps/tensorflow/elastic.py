"""Training with TensorFlow whose ranks come and go, under the names of horovod.tensorflow.elastic: see bps.elastic.

For models of Keras see bps.keras.elastic, whose KerasState is TensorFlowKerasState here.
"""

import tensorflow as tf

from .. import rank, shutdown
from .._horovod import init
from ..elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, regroup, run_fn
from ._native import as_bps_errors
from .functions import broadcast_object, broadcast_object_fn, broadcast_variables, variable_of

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]


def __getattr__(name):
    if name == "TensorFlowKerasState":  # TensorFlow works without Keras
        from ..keras.elastic import TensorFlowKerasState

        return TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run(func):
    """For a function whose first argument is a State: see bps.elastic.run_fn(). Ranks regroup in between. What fails inside
    tf.function, as a tf.errors.OpError, is a BpsError here if it is of an operation of bps.
    """
    return run_fn(as_bps_errors(func), regroup)


class TensorFlowState(ObjectState):
    """Variables, in the same order on all ranks, and objects that pickle can carry: TensorFlowState(variables, step=0).

    session is of TensorFlow 1 and refused.
    """

    def __init__(self, variables=None, session=None, **kwargs):
        if session is not None:
            raise ValueError("session: bps.tensorflow works in eager code and inside tf.function")
        variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        if not variables:
            raise ValueError("which variables? TensorFlow 2 keeps no list of them: TensorFlowState(model.variables)")
        self.variables = [variable_of(variable) for variable in variables]
        super().__init__(**kwargs)
        self._save_variables()

    def _save_variables(self):
        self._saved_values = [variable.numpy() for variable in self.variables]

    def save(self):
        self._save_variables()
        super().save()

    def restore(self):
        for variable, value in zip(self.variables, self._saved_values):
            variable.assign(value)
        super().restore()

    def sync(self):
        broadcast_variables(self.variables, root_rank=0, scope="elastic.")
        self._save_variables()
        super().sync()
