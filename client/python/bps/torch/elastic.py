"""Training whose ranks come and go, under the names of horovod.torch.elastic: see bps.elastic."""

import copy
import math
import random

import torch

from .. import _client, shutdown
from .._horovod import init
from ..elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from .functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    load_optimizer_state,
)

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "shutdown",
]


class ElasticSampler(torch.utils.data.Sampler):
    """Shares a dataset among the ranks, and when they change, what is left of it in this epoch.

    record_batch() after each batch says what has been done; what a rank had done since its last commit when it died is done
    again. In every epoch begin with set_epoch(). As with DistributedSampler some samples come twice where they do not divide.
    """

    def __init__(self, dataset, shuffle=True, seed=0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices = set()
        self.indices = []
        self.reset()

    def set_epoch(self, epoch):
        """A new epoch: nothing of it has been done."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx, batch_size):
        """Batch number batch_idx, of batch_size samples (the last may have fewer), is done on this rank."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices):
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx, batch_size):
        """The samples of a batch of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self):
        return {"epoch": self.epoch, "processed_indices": self.processed_indices}

    def load_state_dict(self, state_dict):
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self):
        """Shares out what is left, among the ranks that are there now."""
        here = _client.is_initialized()
        self.num_replicas = _client.current().size if here else 1
        self.rank = _client.current().rank if here else 0
        everything = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(everything)
        self.remaining_indices = [index for index in everything if index not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self):
        indices = list(self.remaining_indices)
        while indices and len(indices) < self.total_size:
            indices += indices[: self.total_size - len(indices)]
        self.indices = indices[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self):
        return self.num_samples


class _Model:
    """A module, in a TorchState."""

    def __init__(self, value):
        self.value = value
        self.save()

    def save(self):
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self):
        self.value.load_state_dict(self._saved)

    def sync(self):
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class _Optimizer(_Model):
    def restore(self):
        load_optimizer_state(self.value, self._saved)

    def sync(self):
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class _Sampler(_Model):
    def sync(self):
        done = set().union(*allgather_object(self.value.processed_indices, name="elastic.sampler"))
        state = {**self.value.state_dict(), "processed_indices": done}
        self.value.load_state_dict(broadcast_object(state, root_rank=0, name="elastic.sampler"))
        self.save()


def _keeper(value):
    """How what is no plain object is kept and shared, or None."""
    if isinstance(value, torch.nn.Module):
        return _Model(value)
    if isinstance(value, ElasticSampler):
        return _Sampler(value)
    if isinstance(value, torch.optim.Optimizer) or all(
        hasattr(value, name) for name in ("state_dict", "load_state_dict", "param_groups")
    ):
        return _Optimizer(value)
    return None


class TorchState(ObjectState):
    """Modules, optimizers, ElasticSamplers and objects that pickle can carry: TorchState(model, optimizer, batch=0)."""

    def __init__(self, model=None, optimizer=None, **kwargs):
        kwargs.update({name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None})
        keepers = {name: _keeper(value) for name, value in kwargs.items()}
        self._keepers = {name: keeper for name, keeper in keepers.items() if keeper is not None}
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._keepers})
        for name, keeper in self._keepers.items():
            setattr(self, name, keeper.value)

    def __setattr__(self, name, value):
        if not name.startswith("_") and name in self._keepers and self._keepers[name].value is not value:
            self._keepers[name] = type(self._keepers[name])(value)
        super().__setattr__(name, value)

    def save(self):
        for keeper in self._keepers.values():
            keeper.save()
        super().save()

    def restore(self):
        for keeper in self._keepers.values():
            keeper.restore()
        super().restore()

    def sync(self):
        for keeper in self._keepers.values():
            keeper.sync()
        super().sync()

    def reset(self):
        for keeper in self._keepers.values():
            if isinstance(keeper, _Sampler):
                keeper.value.reset()
