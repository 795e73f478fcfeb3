"""Training of Keras models whose ranks come and go, under the names of horovod.keras.elastic: see bps.elastic.

    state = bps.elastic.KerasState(model, batch=0, epoch=0)

    @bps.elastic.run
    def train(state):
        callbacks = [
            bps.elastic.UpdateBatchStateCallback(state),
            bps.elastic.UpdateEpochStateCallback(state),
            bps.elastic.CommitStateCallback(state, batches_per_commit=10),
        ]
        model.fit(x, y, epochs=10 - state.epoch, callbacks=callbacks)

    train(state)
"""

import numpy as np

from .. import shutdown
from .._horovod import init
from ..elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, regroup, run_fn
from ._backend import as_bps_errors, build, keras, to_numpy, variables_of
from ._functions import broadcast_variables
from .callbacks import _sync

__all__ = [
    "CommitStateCallback",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "init",
    "run",
    "run_fn",
    "shutdown",
]


def run(func):
    """For a function whose first argument is a State: see bps.elastic.run_fn(). Ranks regroup in between."""
    return run_fn(as_bps_errors(func), regroup)


class KerasState(ObjectState):
    """A built model, its optimizer, and objects that pickle can carry: KerasState(model, batch=0, epoch=0).

    optimizer: None is that of the compiled model. Seeds are left alone: ranks draw numbers of their own. backend is Horovod's
    and has no effect.
    """

    def __init__(self, model, optimizer=None, backend=None, **kwargs):
        if not model.built:
            raise ValueError("the model must be built: model.build(input_shape), or call it once")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        super().__init__(**kwargs)
        self._save_variables()

    def _variables(self):
        """Weights, and what the optimizer keeps, each once."""
        optimizer = self.optimizer
        if optimizer is not None:
            build(optimizer, self.model.trainable_variables)
        variables = [*self.model.weights, *(variables_of(optimizer) if optimizer is not None else ())]
        return list({id(v): v for v in variables}.values())

    def _save_variables(self):
        _sync(self.model)
        self._saved_values = [np.array(to_numpy(v)) for v in self._variables()]

    def save(self):
        self._save_variables()
        super().save()

    def restore(self):
        for variable, value in zip(self._variables(), self._saved_values):
            variable.assign(value)
        super().restore()

    def sync(self):
        _sync(self.model)
        broadcast_variables(self._variables(), root_rank=0)
        self._save_variables()
        super().sync()

    def reset(self):
        reducer = getattr(self.optimizer, "_bps", None)
        if reducer is not None and reducer.local:  # their gradients are divided by a number of ranks that is in the graph
            self.model.make_train_function(force=True)


TensorFlowKerasState = KerasState


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state after every batches_per_commit batches, and at the end of each epoch. To stand behind the callbacks
    that change the state.
    """

    def __init__(self, state, batches_per_commit=1):
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit is {batches_per_commit}")
        self.state = state
        self.batches_per_commit = batches_per_commit

    def on_epoch_begin(self, epoch, logs=None):
        self._last = -1  # batch with which the state was committed

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.params.get("steps"):
            return  # the epoch is not over before its end has been told to all callbacks
        if batch - self._last >= self.batches_per_commit:
            self._last = batch
            self.state.commit()

    def on_epoch_end(self, epoch, logs=None):
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Makes state.batch the number of batches of the epoch that are done, those of the fit() before that was broken off among
    them; 0 when the epoch ends.
    """

    def __init__(self, state):
        super().__init__()
        self.state = state

    def on_epoch_begin(self, epoch, logs=None):
        self._before = self.state.batch

    def on_train_batch_end(self, batch, logs=None):
        self.state.batch = self._before + batch + 1

    def on_epoch_end(self, epoch, logs=None):
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Makes state.epoch the number of epochs that are done, in all runs of fit() together."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch, logs=None):
        self.state.epoch += 1
