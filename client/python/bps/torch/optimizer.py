"""DistributedOptimizer: an optimizer that steps with gradients averaged over all ranks."""

import contextlib
import weakref

import torch
from torch.optim import optimizer as _torch_optimizer

from .. import _client, _ops
from .._horovod import over_process_set_if_in_it
from .._library import Reduction
from . import amp
from . import asynchronous as _asynchronous
from ._gradients import Gradients
from .compression import Compression


class _Distributed:
    """What DistributedOptimizer adds to the class of an optimizer."""

    @property
    def _parameter_names(self):
        """{parameter: name}, as Horovod's: of named_parameters, else noname.N."""
        return {p: self._bps.name_of(p) for p in _trained(self)}

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
        """As the optimizer's own. Gradients that are on their way are waited for, as other ranks may use them."""
        for gradients in (*self._bps.lenders(), self._bps):
            gradients.settle_now()
        super().zero_grad(set_to_none)
        self._bps.zeroed()

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self._bps.look()

    def _bps_before_step(self, args, kwargs):
        gradients = self._bps
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not self._bps_skips and not gradients.synchronized:
                gradients.synchronize()
            gradients.stepped()
            return None
        gradients.settle_now()

        def synchronized_closure():
            loss = closure()
            gradients.synchronize()
            gradients.stepped()
            return loss

        if len(args) > 1:
            return (args[0], synchronized_closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": synchronized_closure}

    def __reduce__(self):
        raise TypeError("a DistributedOptimizer cannot be pickled: save its state_dict()")


def _before_step(optimizer, args, kwargs):
    """Runs before step() of any optimizer, however that was wrapped, and before other hooks. args starts with the optimizer."""
    if isinstance(optimizer, _Distributed):
        return optimizer._bps_before_step(args, kwargs)
    return None


_hook = None


def _come_first():
    """Has _before_step() run before all hooks that there are by now."""
    global _hook
    if _hook is None:
        _hook = _torch_optimizer.register_optimizer_step_pre_hook(_before_step)
    _torch_optimizer._global_optimizer_pre_hooks.move_to_end(_hook.id, last=False)


def _trained(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def _named(optimizer, named_parameters):
    """(name, parameter) of what the optimizer trains, in the order of named_parameters: the order of priority."""
    trained = _trained(optimizer)
    if named_parameters is None:
        return [(f"noname.{i}", p) for i, p in enumerate(trained)]
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
    return [(name, p) for name, p in named if id(p) in ours]


class _Names:
    """Of the parameters that an optimizer has, and may have later."""

    def __init__(self, named, optimizer):
        self._known = {id(p): (name, p) for name, p in named}
        self._optimizer = weakref.ref(optimizer)

    def parameters(self):
        optimizer = self._optimizer()
        return _trained(optimizer) if optimizer is not None else []

    def name_of(self, parameter):
        if id(parameter) in self._known:
            return self._known[id(parameter)][0]
        taken = {name for name, _ in self._known.values()}
        at = next(i for i, p in enumerate(self.parameters()) if p is parameter)
        name = f"noname.{at}"
        while name in taken:
            name += "'"  # the parameter that was there is another's
        self._known[id(parameter)] = name, parameter
        return name


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


@over_process_set_if_in_it
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
    gradients. process_set: over whose ranks; optimizers of other ranks step with their own gradients.

    Of a gradient that is sparse, as nn.Embedding(sparse=True) makes it, only rows travel, and it stays sparse; its first
    must come in the same step on every rank. Not so with sparse_as_dense (but for SparseAdam), in groups, and with a compressor
    of your own.

    asynchronous: no rank waits for another. Servers keep the parameters, each step's change of them is added there, and what
    they have then comes back; all begin with rank 0's. Of the other arguments, named_parameters counts alone. None: as the job
    is (init(asynchronous=True), BPS_ASYNC, BYTEPS_ENABLE_ASYNC).
    """
    op = Reduction(op)
    _ops.check_predivide(gradient_predivide_factor, op)
    if isinstance(optimizer, (_Distributed, _asynchronous._Asynchronous)):
        raise ValueError("the optimizer is a DistributedOptimizer already")
    known = _named(optimizer, named_parameters)
    named = [(name, p) for name, p in known if p.requires_grad]
    if asynchronous is None:
        asynchronous = _client.of_all_ranks().asynchronous
    if asynchronous:
        if _client.current().process_set:
            raise ValueError("asynchronous training is over all ranks of the job, not over those of a process set")
        return _asynchronous.wrap(optimizer, named)
    groups = _groups(named, num_groups if groups is None else groups)
    names = _Names(known, optimizer)
    takes_rows = isinstance(optimizer, torch.optim.SparseAdam)  # and no other gradients
    optimizer._bps = Gradients(
        named,
        names.parameters,
        names.name_of,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense=sparse_as_dense and not takes_rows,
    )
    if takes_rows:
        for slot in optimizer._bps.slots:
            optimizer._bps.send_rows(slot)
    optimizer._bps_skips = False
    _come_first()
    amp.synchronize_first()
    base = optimizer._bps_base = optimizer.__class__
    optimizer.__class__ = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    return optimizer
