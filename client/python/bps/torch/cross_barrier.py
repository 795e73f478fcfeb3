"""CrossBarrier: an optimizer whose step() does not wait, so that communication goes on beside the next forward pass.

step() notes what is to be done and returns. Each parameter is stepped when it is used for the first time after that, with
its gradient, which front layers get first. Whether it is used is seen by a TorchFunctionMode, through which every call
of torch in this thread goes: by whatever module, tied to another, or read by hand, no stale parameter is seen.

import bps.torch.cross_barrier as bps     # BytePS's way: all names of bps.torch are here, too
"""

import weakref

import torch
from torch.optim import optimizer as _torch_optimizer
from torch.overrides import TorchFunctionMode

from . import _slot
from .compression import Compression
from .optimizer import DistributedOptimizer, _Distributed

# Optimizers of torch that step each parameter by its own gradient and state alone.
_INDEPENDENT = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD SparseAdam".split()


class _Watch(TorchFunctionMode):
    """Steps the parameters that are about to be used."""

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self._steps.pending:
            self._look(args)
            if kwargs:
                self._look(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look(self, values):
        for value in values:
            if isinstance(value, torch.Tensor):
                if id(value) in self._steps.pending:
                    self._steps.take(value)
            elif isinstance(value, (list, tuple)):
                self._look(value)
            elif isinstance(value, dict):
                self._look(value.values())


class _Steps:
    """Steps of an optimizer that are still to be taken."""

    def __init__(self, optimizer, step):
        self._optimizer = weakref.ref(optimizer)
        self._step = step  # of the optimizer's own class
        self._groups = []  # param_groups as they were at step(), without the parameters
        self._group_of = {}  # id of a parameter: index of its group
        self._watch = None  # while it is on the stack of modes
        self._zero_after = None  # set_to_none of a zero_grad() that has come since step()
        self.is_new = True  # something has come since step()
        self._is_open = False  # a step has begun whose end has not been waited for
        self.pending = {}  # id of a parameter: its bucket; in the order of the model

    def begin(self):
        """What step() does: gradients are under way, or, after synchronize(), there."""
        optimizer, gradients = self._optimizer(), self._optimizer()._bps
        # A scheduler may change them before a parameter is used.
        self._groups = [
            {k: v.clone() if torch.is_tensor(v) else v for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        self._group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._zero_after, self.is_new = None, False
        sent = {id(slot.parameter) for slot in gradients.slots}
        self._apply([p for group in optimizer.param_groups for p in group["params"] if id(p) not in sent])
        if gradients.synchronized:
            self._apply([slot.parameter for slot in gradients.slots])
            gradients.stepped()
            return
        gradients.synchronize_lenders()
        if not gradients.has_begun_to_end():
            gradients.begin()
        gradients.stepped()
        self._is_open = True
        # What the user has put into p.grad by now is of this step, and there already.
        self._apply([slot.parameter for slot in gradients.slots if not slot.is_lent()])
        lent = [slot for bucket in gradients.buckets for slot in bucket.slots if slot.is_lent()]
        self.pending = {id(slot.parameter): slot.bucket for slot in lent}
        if self._watch is None:
            self._watch = _Watch(self)
            self._watch.__enter__()

    def take(self, parameter):
        """Steps a parameter, with those after it whose gradients are there already."""
        self._optimizer()._bps.follow_job()
        if id(parameter) not in self.pending:
            return
        buckets = [self.pending[id(parameter)]]
        behind = False
        for bucket in dict.fromkeys(self.pending.values()):
            if bucket is buckets[0]:
                behind = True
            elif behind:
                if not bucket.request.poll():
                    break
                buckets.append(bucket)
        self._take(buckets)

    def take_all(self):
        """Steps what is left, and ends the watch."""
        self._optimizer()._bps.follow_job()
        self._take(list(dict.fromkeys(self.pending.values())))
        if self._watch is not None and torch.overrides._get_current_function_mode() is self._watch:
            self._watch.__exit__(None, None, None)
            self._watch = None
        self.end()

    def end(self):
        """Where no step is pending."""
        if self._is_open:
            self._is_open = False
            gradients = self._optimizer()._bps
            for bucket in gradients.buckets:
                if bucket.request is not None:
                    gradients.receive(bucket)
            gradients.end()

    def give_up(self):
        """The gradients of what is pending are lost."""
        self.pending, self._is_open = {}, False

    def _take(self, buckets):
        # Not as the caller has it: states that begin now must outlive an inference mode.
        with torch.inference_mode(False), torch.no_grad():
            slots = [slot for bucket in buckets for slot in bucket.slots if id(slot.parameter) in self.pending]
            for slot in slots:
                del self.pending[id(slot.parameter)]
            # What is p.grad by now, if anything, is of the next step.
            later = [(slot, slot.parameter.grad) for slot in slots if not slot.is_lent()]
            for slot, _ in later:
                slot.parameter.grad = slot.lent
            errors = [self._optimizer()._bps.receive(bucket) for bucket in buckets]
            for error in filter(None, errors):
                self._abandon()
                raise error
            self._apply([slot.parameter for slot in slots])
            if self._zero_after is not None:
                for slot in slots:
                    _slot.zero(slot.parameter, self._zero_after)
            for slot, grad in later:
                slot.parameter.grad = grad

    def _abandon(self):
        """Ends a step of which a part has failed. The parameters can be used, as they are; the failure is raised once."""
        left, self.pending = dict.fromkeys(self.pending.values()), {}
        for bucket in left:
            self._optimizer()._bps.receive(bucket)

    def zero_after(self, set_to_none):
        """zero_grad() while steps are pending."""
        self._zero_after = set_to_none
        for group in self._optimizer().param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self.pending:
                    _slot.zero(parameter, set_to_none)

    def _apply(self, parameters):
        """The optimizer's own step, for these parameters: by another of its class, with the same states."""
        if not parameters:
            return
        groups = [{**group, "params": []} for group in self._groups]
        for p in parameters:
            groups[self._group_of[id(p)]]["params"].append(p)
        part = object.__new__(self._optimizer()._bps_base)
        part.__dict__ = {**vars(self._optimizer()), "param_groups": [group for group in groups if group["params"]]}
        self._step(part)


class _CrossBarrier(_Distributed):
    """What CrossBarrier adds to the class of an optimizer."""

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure=None):
        if closure is not None:
            raise ValueError("CrossBarrier's step() takes no closure: it does not wait for the gradients of one")
        self._bps_steps.take_all()
        self._bps_steps.begin()

    def synchronize(self, timeout=None):
        """Takes all pending steps. Unless it comes right after step(), waits for the gradients of the next, too.

        To be called after the last step, to end the watch over calls of torch, and before gradients are clipped: the
        step that follows is then taken at once.
        """
        self._bps_steps.take_all()
        if self._bps_steps.is_new or self._bps.has_begun():
            super().synchronize(timeout)

    def _bps_before_unscale(self):
        self._bps_steps.take_all()
        super()._bps_before_unscale()

    def zero_grad(self, set_to_none=True):
        self._bps_steps.is_new = True
        if self._bps_steps.pending:
            self._bps_steps.zero_after(set_to_none)
            self._bps.zeroed()
        else:
            self._bps_steps.end()
            super().zero_grad(set_to_none)

    def _bps_before_step(self, args, kwargs):
        """Hooks of others see averages, and what they make of these is what the step uses."""
        if self._optimizer_step_pre_hooks or len(_torch_optimizer._global_optimizer_pre_hooks) > 1:
            self._bps_steps.take_all()
            if not self._bps.synchronized:
                super().synchronize()

    def state_dict(self):
        self._bps_steps.take_all()
        return super().state_dict()

    def load_state_dict(self, state_dict):
        self._bps_steps.take_all()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group):
        self._bps_steps.take_all()
        super().add_param_group(param_group)


def _own_step(base, independent):
    """step() of an optimizer's class, without the hooks that the CrossBarrier's step() runs."""
    step = base.step
    known = [getattr(torch.optim, name).step for name in _INDEPENDENT if hasattr(torch.optim, name)]
    plain = step.__wrapped__ if getattr(step, "hooked", False) else step
    if not independent and step not in known:
        raise ValueError(
            f"CrossBarrier steps one parameter after the other, which {base.__name__} may not bear: it is not one of "
            f"{', '.join(_INDEPENDENT)}. Give independent=True if it treats each parameter by itself"
        )
    return plain


def CrossBarrier(
    model,
    optimizer,
    named_parameters=None,
    compression=Compression.none,
    backward_passes_per_step=1,
    num_steps=None,
    *,
    independent=False,
):
    """A DistributedOptimizer whose step() does not wait for gradients: each parameter is stepped when it is used next.

    optimizer: one of torch's, or a DistributedOptimizer already. The result is that of a DistributedOptimizer, bit for
    bit. independent: the optimizer is not one of torch's, and steps each parameter by its own gradient and state alone.
    num_steps is BytePS's and has no effect.

    The model is to be used in the thread that calls step(), by calls of torch. What escapes them: another tensor over a
    parameter's memory (p.data) that was made before, and code that torch.compile or torch.jit has compiled, which is
    refused.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(f"CrossBarrier cannot see the parameters that compiled code uses: {name or 'the model'}")
        if type(module).__name__ == "OptimizedModule":
            raise ValueError(f"CrossBarrier cannot see the parameters that compiled code uses: {name or 'the model'}")
    if isinstance(optimizer, _CrossBarrier):
        raise ValueError("the optimizer has a CrossBarrier already")
    if not isinstance(optimizer, _Distributed):
        named = model.named_parameters() if named_parameters is None else named_parameters
        _own_step(type(optimizer), independent)  # refuses before anything is changed
        optimizer = DistributedOptimizer(optimizer, named, compression, backward_passes_per_step)
    base = optimizer._bps_base
    step = _own_step(base, independent)
    optimizer.__class__ = type(base.__name__, (_CrossBarrier, base), {"__module__": base.__module__})
    optimizer._bps_steps = _Steps(optimizer, step)
    optimizer._bps.settle = weakref.WeakMethod(optimizer._bps_steps.take_all)
    optimizer._bps.give_up = weakref.WeakMethod(optimizer._bps_steps.give_up)
    model.register_forward_pre_hook(_BeforeForward(optimizer._bps_steps))
    if "step" in vars(optimizer):
        _keep_track_for_schedulers(optimizer)
    return optimizer


class _BeforeForward:
    """A hook of the model. A forward pass without gradients has no next step to overlap with; and without the watch,
    modules of torch that take another way through evaluation while a mode is there (attention) give their usual bits.

    Copies of the model are on their own.
    """

    def __init__(self, steps=None):
        self._steps = weakref.ref(steps) if steps is not None else lambda: None

    def __call__(self, module, args):
        steps = self._steps()
        if steps is not None and not torch.is_grad_enabled():
            steps.take_all()

    def __reduce__(self):
        return _BeforeForward, ()


def _keep_track_for_schedulers(optimizer):
    """A scheduler made before has put its own around step() of the optimizer; it wants to know that there was one."""

    def step(*args, **kwargs):
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step


def __getattr__(name):
    from .. import torch as bps_torch

    return getattr(bps_torch, name)
