"""Callbacks of Keras for training on many ranks. Names of BytePS and Horovod; for every backend of Keras."""

import numpy as np

from .. import _client
from .. import allgather_object as _allgather_object
from ._backend import build, keras, to_numpy, variables_of, velocities_of
from ._functions import broadcast_variables


def _sync(model):
    """Makes the model's variables say what they are: with JAX they are behind during an epoch."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives the model and the optimizer of every rank the values of rank root_rank's, before the first step.

    A model that is built by its first step only gets them after it. Seeds are left alone: ranks
    draw numbers of their own. device has no effect. local_variables: what is not to be given.
    """

    def __init__(self, root_rank=0, device="", local_variables=None):
        super().__init__()
        self.root_rank = root_rank
        self.broadcast_done = False
        local = [] if local_variables is None else local_variables
        self._local = {id(v) for v in (local if isinstance(local, (list, tuple, set)) else [local])}

    def register_local_var(self, variable):
        """variable keeps its values on each rank."""
        self._local.add(id(variable))

    def _broadcast(self):
        _sync(self.model)
        optimizer = getattr(self.model, "optimizer", None)
        variables = [*self.model.weights, *(variables_of(optimizer) if optimizer is not None else ())]
        # Also a model of one's own has a variable in both lists.
        unique = {id(v): v for v in variables if id(v) not in self._local}
        broadcast_variables(unique.values(), self.root_rank)
        self.broadcast_done = True

    def on_train_begin(self, logs=None):
        if not self.broadcast_done and self.model.built:
            optimizer = getattr(self.model, "optimizer", None)
            if optimizer is not None:
                build(optimizer, self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch, logs=None):
        if not self.broadcast_done:
            self._broadcast()


def _metric(value):
    """As a float, or as an array where it has dimensions."""
    array = np.asarray(to_numpy(value), np.float64)
    return array if array.ndim else float(array)


class MetricAverageCallback(keras.callbacks.Callback):
    """Makes the metrics of an epoch their average over the ranks that have them, element by element where they are arrays.

    To stand in the list before callbacks that use metrics. device has no effect.
    """

    def __init__(self, device=""):
        super().__init__()

    def on_epoch_end(self, epoch, logs=None):
        if logs is None:
            logs = {}
        everybody = _allgather_object({k: _metric(v) for k, v in logs.items()}, name="keras.metrics")
        for name in logs:
            values = [metrics[name] for metrics in everybody if name in metrics]
            logs[name] = sum(values) / len(values)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Makes the learning rate initial_lr times multiplier in the epochs from start_epoch to end_epoch (exclusive).

    initial_lr: None is the optimizer's when training begins. multiplier: a function of the epoch, or a number, which is
    then raised to the power of the epochs since start_epoch. With staircase=False it changes with each batch and the
    epoch is a fraction; steps_per_epoch: None is what Keras says. momentum_correction scales the momentum of SGD when
    the learning rate changes (Goyal et al. 2017), and of nothing else.
    """

    def __init__(
        self,
        initial_lr=None,
        multiplier=None,
        start_epoch=0,
        end_epoch=None,
        staircase=True,
        momentum_correction=True,
        steps_per_epoch=None,
    ):
        super().__init__()
        if multiplier is None:
            raise ValueError("multiplier is required: a number or a function of the epoch")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = None

    def _optimizer(self):
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _get_lr(self):
        _sync(self.model)
        return float(to_numpy(self.model.optimizer.learning_rate))

    def _set_lr(self, lr):
        old = self._get_lr()
        if lr == old:
            return
        self.model.optimizer.learning_rate = lr
        # v = m v - lr g: with m (lr / old) v for m v, the momentum is as if it had been gathered at the new rate.
        if self.momentum_correction and old:
            for velocity in velocities_of(self._optimizer()):
                velocity.assign(to_numpy(velocity) * (lr / old))

    def on_train_begin(self, logs=None):
        rates = [getattr(self._optimizer(), name, None) for name in ("_learning_rate", "learning_rate")]
        if any(isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) for rate in rates):
            raise ValueError(f"{type(self).__name__}: the optimizer has a schedule of its own; give it a number")
        if self.initial_lr is None:
            self.initial_lr = self._get_lr()
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: steps_per_epoch is needed; Keras does not say it for this data"
                )

    def on_epoch_begin(self, epoch, logs=None):
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            self._set_lr(self.initial_lr * self.multiplier(self.current_epoch + batch / self.steps_per_epoch))
        elif batch == 0:
            self._set_lr(self.initial_lr * self.multiplier(self.current_epoch))

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["lr"] = self._get_lr()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size() to initial_lr in the first warmup_epochs epochs.

    initial_lr: what training goes on with, usually scaled by size(); None is the optimizer's when training begins.
    """

    def __init__(self, initial_lr=None, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0):
        def multiplier(epoch):
            size = _client.current().size
            epoch += 1.0 / self.steps_per_epoch  # round numbers at the end of each epoch
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose and _client.current().rank == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._get_lr():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """ModelCheckpoint that keeps the whole model that was best, or its weights alone, written by rank 0.

    To stand after MetricAverageCallback. filepath: None is "best.keras", or "best.weights.h5".
    """

    def __init__(
        self, monitor="val_loss", verbose=0, mode="auto", save_freq="epoch", filepath=None, save_weights_only=False
    ):
        if filepath is None:
            filepath = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            filepath=filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def on_train_batch_end(self, batch, logs=None):
        if _client.current().rank == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        if _client.current().rank == 0:
            super().on_epoch_end(epoch, logs)


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
