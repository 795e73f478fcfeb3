"""DistributedOptimizer: an optimizer that steps with gradients averaged over all ranks."""

import contextlib

import torch

from .. import _client
from .._horovod import check_process_set
from .._library import Reduction
from . import amp
from . import asynchronous as _asynchronous
from ._gradients import Gradients
from .compression import Compression


class _Distributed:
    """What DistributedOptimizer adds to the class of an optimizer."""

    def synchronize(self, timeout=None):
        """Waits until every gradient is reduced, for instance to clip them before step().

        timeout in seconds: BpsTimeoutError when it passes; the gradients go on, and it may be called again.
        """
        self._bps.synchronize(timeout)

    @contextlib.contextmanager
    def skip_synchronize(self):
        """Inside, step() does not synchronize(). step() after synchronize() does not either, so few need this."""
        self._bps_skips = True
        try:
            yield
        finally:
            self._bps_skips = False

    def _bps_before_unscale(self):
        """A GradScaler is about to read the gradients."""
        if not self._bps_skips and not self._bps.synchronized:
            self._bps.synchronize()

    def set_backward_passes_per_step(self, passes):
        """How many backward passes add up before gradients are sent."""
        self._bps.set_passes(passes)

    def zero_grad(self, set_to_none=True):
        """Zeroes the gradients. They stay where they are, in shared memory, whatever set_to_none says."""
        self._bps.zero()
        ours = {id(slot.parameter) for slot in self._bps.slots}
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in ours and parameter.grad is not None:
                    parameter.grad = None if set_to_none else parameter.grad.zero_()

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]["params"]
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        self._bps.add([(f"noname.{first + i}", p) for i, p in enumerate(group) if p.requires_grad])

    def __reduce__(self):
        raise TypeError("a DistributedOptimizer cannot be pickled: save its state_dict()")


def _before_step(optimizer, args, kwargs):
    """Runs before step(), however that was wrapped. args starts with the optimizer itself."""
    gradients = optimizer._bps
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        if not optimizer._bps_skips and not gradients.synchronized:
            gradients.synchronize()
        gradients.synchronized = False
        return None
    if gradients.under_way():
        gradients.synchronize()

    def synchronized_closure():
        loss = closure()
        gradients.synchronize()
        return loss

    if len(args) > 1:
        return (args[0], synchronized_closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": synchronized_closure}


def _named(optimizer, named_parameters):
    """(name, parameter) of what the optimizer trains, in the order of named_parameters: the order of priority."""
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return [(f"noname.{i}", p) for i, p in enumerate(trained) if p.requires_grad]
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise ValueError("named_parameters must be pairs of name and parameter, as model.named_parameters() gives them")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"named_parameters has some names twice: {', '.join(twice)}")
    known = {id(p) for _, p in named}
    missing = sum(1 for p in trained if p.requires_grad and id(p) not in known)
    if missing:
        raise ValueError(f"named_parameters lacks {missing} of the parameters that the optimizer trains")
    ours = {id(p) for p in trained}
    return [(name, p) for name, p in named if id(p) in ours and p.requires_grad]


def _groups(named, groups):
    """Lists of parameters, from those lists or the number of them."""
    if not isinstance(groups, int):
        groups = [list(group) for group in groups]
        if any(not torch.is_tensor(p) for group in groups for p in group):
            raise ValueError("groups must be lists of parameters, or their number")
        known = {id(p) for _, p in named}
        members = [id(p) for group in groups for p in group]
        if len(set(members)) < len(members):
            raise ValueError("a parameter is in two of the groups")
        if not known.issuperset(members):
            raise ValueError("groups has parameters that the optimizer does not train")
        return groups
    if groups < 0:
        raise ValueError(f"num_groups={groups} is negative")
    parameters = [p for _, p in named]
    share, more = divmod(len(parameters), groups) if groups else (0, 0)
    cuts = [i * share + min(i, more) for i in range(groups + 1)]
    return [parameters[low:high] for low, high in zip(cuts, cuts[1:])]


def DistributedOptimizer(
    optimizer,
    named_parameters=None,
    compression=Compression.none,
    backward_passes_per_step=1,
    op=Reduction.AVERAGE,
    gradient_predivide_factor=1.0,
    num_groups=0,
    groups=None,
    sparse_as_dense=False,
    process_set=None,
    asynchronous=None,
):
    """Makes an optimizer step with gradients that are averaged (op: or summed, ...) over all ranks.

    The optimizer itself is changed and returned: its state, its parameter groups and schedulers made for it stay. All
    ranks must wrap the same parameters in the same order. A gradient is sent when backward_passes_per_step backward
    passes have added to it; step() waits for all. gradient_predivide_factor divides before and multiplies after the
    average, against overflow in 16 bits.

    groups: lists of parameters that travel together, or their number, as num_groups; each is sent with the last of its
    gradients. process_set: as Horovod's; only global_process_set will do.

    Of a gradient that is sparse, as nn.Embedding(sparse=True) makes it, only rows travel, and it stays sparse; its first
    must come in the same step on every rank. Not so with sparse_as_dense, in groups, and with a compressor of your own.

    asynchronous: no rank waits for another. Servers keep the parameters, each step's change of them is added there, and what
    they have then comes back; all begin with rank 0's. Of the other arguments, named_parameters counts alone. None: as the job
    is (init(asynchronous=True), BPS_ASYNC, BYTEPS_ENABLE_ASYNC).
    """
    check_process_set(process_set)
    op = Reduction(op)
    if gradient_predivide_factor != 1.0 and op != Reduction.AVERAGE:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if isinstance(optimizer, (_Distributed, _asynchronous._Asynchronous)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    named = _named(optimizer, named_parameters)
    if asynchronous is None:
        asynchronous = _client.current().asynchronous
    if asynchronous:
        return _asynchronous.wrap(optimizer, named)
    groups = _groups(named, num_groups if groups is None else groups)
    optimizer._bps = Gradients(
        named,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense=sparse_as_dense,
    )
    if isinstance(optimizer, torch.optim.SparseAdam):  # which takes no other gradients
        for slot in optimizer._bps.slots:
            optimizer._bps.send_rows(slot)
    optimizer._bps_skips = False
    optimizer._bps_hook = optimizer.register_step_pre_hook(_before_step)
    amp.synchronize_first()
    base = optimizer._bps_base = optimizer.__class__
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    return optimizer
