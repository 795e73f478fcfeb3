"""DistributedOptimizer of an asynchronous job: no rank waits for another.

Servers keep the parameters. Each step is one of the optimizer alone; how it changed the parameters is added to the servers',
and the parameters become what they have then, with what other ranks added meanwhile.
"""

import contextlib

import torch

from .. import _client, _ops
from . import _devices, ops


class Kept:
    """One parameter, as servers keep it. change: memory that the daemon reaches, once the job has begun."""

    def __init__(self, parameter, name, priority):
        if parameter.dtype not in ops.DTYPES:
            raise TypeError(f"bps has no element type for {name}, which is of {parameter.dtype}")
        self.parameter = parameter
        self.name = name
        self.priority = priority
        self.change = None

    def settle_in(self):
        """In a job of which nothing has been sent yet."""
        parameter = self.parameter
        if parameter.device.type == "cpu":
            nbytes = parameter.numel() * parameter.element_size()
            arena = torch.frombuffer(_client.Arena.buffer(_client.current(), max(nbytes, 1)), dtype=torch.uint8)
            self.change = arena[:nbytes].view(parameter.dtype).view(parameter.shape)
        else:
            self.change = _devices.empty(parameter.shape, parameter.dtype, parameter)

    @torch.no_grad()
    def begin(self, change, all_ranks):
        """Sends a change. In its place comes what servers have then. Returns the Request."""
        self.change.copy_(change)
        span = ops.span_of(self.change)
        return _ops.accumulate(span, span, self.name, self.priority, all_ranks=all_ranks)

    @torch.no_grad()
    def end(self):
        self.parameter.copy_(self.change)


class _Asynchronous:
    """What DistributedOptimizer adds to the class of an optimizer in an asynchronous job."""

    def step(self, closure=None):
        if not self._bps_has_begun():
            self._bps_begin()
        before = [kept.parameter.detach().clone() for kept in self._bps_kept]
        loss = super().step() if closure is None else super().step(closure)
        self._bps_exchange([kept.parameter.detach() - old for kept, old in zip(self._bps_kept, before)], False)
        return loss

    def synchronize_parameters(self):
        """Waits for all ranks, which all call it after the same number of steps: their parameters are then the same."""
        if not self._bps_has_begun():
            self._bps_begin()
        else:
            self._bps_exchange([torch.zeros_like(kept.parameter) for kept in self._bps_kept], True)

    def synchronize(self, timeout=None):
        """Does nothing: gradients are this rank's alone."""

    @contextlib.contextmanager
    def skip_synchronize(self):
        yield

    def _bps_has_begun(self):
        """Whether it is in the job that this process is in now."""
        return self._bps_begun_in is _client.current()

    def _bps_begin(self):
        """All ranks begin with the parameters of rank 0."""
        self._bps_begun_in = _client.current()
        for kept in self._bps_kept:
            kept.settle_in()
        root = self._bps_begun_in.rank == 0
        values = [kept.parameter.detach() for kept in self._bps_kept]
        self._bps_exchange([value if root else torch.zeros_like(value) for value in values], True)

    def _bps_exchange(self, changes, all_ranks):
        under_way = [
            _ops.Handle(_one(kept.begin(change, all_ranks))) for kept, change in zip(self._bps_kept, changes)
        ]
        for kept, handle in zip(self._bps_kept, under_way):
            handle.wait()
            kept.end()

    def add_param_group(self, param_group):
        if self._bps_begun_in is not None:
            raise ValueError("an asynchronous optimizer takes no further parameters after its first step")
        super().add_param_group(param_group)
        group = self.param_groups[-1]["params"]
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        self._bps_kept += [
            Kept(p, f"parameter.noname.{first + i}", -first - i) for i, p in enumerate(group) if p.requires_grad
        ]

    def __reduce__(self):
        raise TypeError("a DistributedOptimizer cannot be pickled: save its state_dict()")


def _one(request):
    yield request


def wrap(optimizer, named):
    """The optimizer itself, changed. named: pairs of name and parameter."""
    if not _client.current().asynchronous:
        raise ValueError("asynchronous training needs a job that is: init(asynchronous=True), or BPS_ASYNC=1 for all ranks")
    optimizer._bps_kept = [Kept(p, f"parameter.{name}", -i) for i, (name, p) in enumerate(named)]
    optimizer._bps_begun_in = None  # the client of the job in which all have begun
    base = optimizer._bps_base = optimizer.__class__
    optimizer.__class__ = type(base.__name__, (_Asynchronous, base), {"__module__": base.__module__})
    return optimizer
