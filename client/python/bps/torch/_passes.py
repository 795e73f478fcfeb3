"""Where backward passes begin and end.

PyTorch tells a hook neither whether the pass that it runs in is one inside another (as of a checkpoint) nor when the outermost has
come to its end, also by an exception. So its engine, a Python object, is replaced by one of a class that says so.
"""

import os
import threading

import torch
from torch.autograd import Variable

_lock = threading.Lock()
_depth = 0  # under the lock: passes that run, of all threads
_apart = 0  # under the lock: passes that run and add to no gradient
_entered = {}  # under the lock: what the passes have reached, by its number


class _Engine(type(Variable._execution_engine)):
    def run_backward(self, *args, accumulate_grad=True, **kwargs):
        global _depth
        if not accumulate_grad:  # torch.autograd.grad()
            return self._run_apart(*args, **kwargs)
        with _lock:
            _depth += 1
        ended_well = False
        try:
            result = super().run_backward(*args, accumulate_grad=True, **kwargs)
            ended_well = True
        finally:
            with _lock:
                _depth -= 1
                reached = []
                if not _depth:
                    reached = [_entered[number] for number in sorted(_entered)]
                    _entered.clear()
            # In an order that all ranks have alike; and all begin before any waits.
            for each in reached:
                each.leave_pass(ended_well)
            for each in reached:
                each.pass_has_ended(ended_well)
        return result

    def _run_apart(self, *args, **kwargs):
        global _apart
        with _lock:
            _apart += 1
        try:
            return super().run_backward(*args, accumulate_grad=False, **kwargs)
        finally:
            with _lock:
                _apart -= 1


def _forget_after_fork():
    """Passes of the parent's other threads do not end here."""
    global _lock, _depth, _apart
    _lock, _depth, _apart = threading.Lock(), 0, 0
    _entered.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def watch():
    """From now on, enter() may be called by hooks."""
    if not isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _Engine()


def enter(number, gradients):
    """The backward pass that runs has reached gradients, whose leave_pass() and then pass_has_ended() are called at its end."""
    with _lock:
        _entered[number, id(gradients)] = gradients


def accumulates():
    """Whether the pass that runs adds to gradients."""
    return not _apart


def is_running():
    return torch._C._current_graph_task_id() != -1
