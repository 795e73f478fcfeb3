"""Parameters that are the same on all ranks, and gradients that are averaged over them: for Module and for Gluon."""

import types

import mxnet
from mxnet.gluon.parameter import DeferredInitializationError, Parameter, ParameterDict

from .._horovod import check_process_set
from . import _engine, ops
from .compression import Compression, from_params


def _after_init(parameter, function, always):
    """Has function(parameter) called when a deferred initialization has been made up for; always: and after every other one."""
    init = parameter._init_impl

    def init_and_call(self, *arguments, **more):
        init(*arguments, **more)
        if not always:
            self._init_impl = init
        function(self)

    parameter._init_impl = types.MethodType(init_and_call, parameter)


def broadcast_parameters(params, root_rank=0, prefix=None):
    """Writes the arrays of rank root_rank into those of every rank.

    params: a dict of arrays (Module's get_params()) or of Gluon's Parameters (Block.collect_params()). A Parameter
    whose initialization is deferred is broadcast when that is made up for. Ranks must have them in the same order;
    prefix tells several models apart.
    """
    _broadcast(params, root_rank, prefix)


def _broadcast(params, root_rank, prefix, always=False):
    """always: Parameters that are initialized anew later are broadcast again."""
    if isinstance(params, ParameterDict) or isinstance(params, dict):
        named = sorted(params.items())
    else:
        raise ValueError(f"params must be a dict of arrays or Parameters, not {type(params).__name__}")
    arrays = []
    # By number: names that Gluon gives count the blocks that a rank has made.
    for i, (_, value) in enumerate(named):
        name = f"{prefix or ''}parameter.{i}"
        if not isinstance(value, Parameter):
            arrays.append(ops.broadcast_(value, root_rank, name))
            continue
        try:
            arrays.append(ops.broadcast_(value.data(), root_rank, name))
            is_there = True
        except DeferredInitializationError:
            is_there = False
        if always or not is_there:
            _after_init(value, lambda p, name=name: ops.broadcast_(p.data(), root_rank, name).wait_to_read(), always)
    for array in arrays:
        array.wait_to_read()


class DistributedOptimizer(mxnet.optimizer.Optimizer):
    """An optimizer, for Module, that averages each gradient over all ranks before it updates with it.

    gradient_predivide_factor divides before and multiplies after the average, against overflow in 16 bits. num_groups
    is there for programs written for Horovod and has no effect: the daemon packs small tensors by itself.
    """

    def __init__(
        self,
        optimizer,
        gradient_predivide_factor=1.0,
        num_groups=0,
        process_set=None,
        *,
        compression=Compression.none,
        prefix=None,
    ):
        check_process_set(process_set)
        self._optimizer = optimizer
        self._factor = float(gradient_predivide_factor)
        self._compression = compression
        self._prefix = prefix or ""

    def __getattr__(self, item):
        if item == "_optimizer":
            raise AttributeError(item)
        return getattr(self._optimizer, item)

    def create_state(self, index, weight):
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index, weight):
        return self._optimizer.create_state_multi_precision(index, weight)

    def _average(self, index, grad):
        indices, grads = (index, grad) if isinstance(index, (tuple, list)) else ([index], [grad])
        for i, g in zip(indices, grads):
            number = -i if isinstance(i, int) else 0
            _average(g, f"{self._prefix}gradient.{i}", number, self._factor, self._compression)

    def update(self, index, weight, grad, state):
        self._average(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index, weight, grad, state):
        self._average(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr):
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult):
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult):
        self._optimizer.set_wd_mult(args_wd_mult)


def _average(grad, name, priority, factor, compression):
    ops.allreduce_(
        grad,
        average=True,
        name=name,
        priority=priority,
        prescale_factor=1.0 / factor,
        postscale_factor=factor,
        compression=compression,
    )


class DistributedTrainer(mxnet.gluon.Trainer):
    """Gluon's Trainer with gradients averaged over all ranks: step(batch_size) takes the size of this rank's share.

    Parameters are those of root_rank from the first step at the latest, those of deferred initialization from that on, and again
    when they are initialized anew (force_reinit), which all ranks have to do.
    First parameters are the most urgent. compression_params: {"fp16": True}, BytePS's other compressors are refused;
    Horovod's compression says the same. prefix tells several trainers of a program apart. num_groups has no effect: the
    daemon packs small tensors by itself.
    """

    def __init__(
        self,
        params,
        optimizer,
        optimizer_params=None,
        root_rank=0,
        compression_params=None,
        *,
        compression=None,
        gradient_predivide_factor=1.0,
        prefix=None,
        num_groups=0,
        process_set=None,
    ):
        check_process_set(process_set)
        if isinstance(root_rank, type):
            raise TypeError("the fourth argument is root_rank: give compression=... by its name")
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._optimizer  # the trainer averages by itself
        self._bps_compression = compression or from_params(compression_params)
        self._bps_factor = float(gradient_predivide_factor)
        self._bps_prefix = prefix or ""
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        if len(self._contexts) > 1:
            raise ValueError(f"parameters are on {len(self._contexts)} devices: start one process for each instead")
        params = {f"{i:08}": parameter for i, parameter in enumerate(self._params)}
        _broadcast(params, root_rank, f"{self._bps_prefix}trainer.", always=True)

    def _init_params(self):
        """What programs written for BytePS may call before the first step: parameters are root_rank's already."""
        self._params_to_init = []

    def _allreduce_grads(self):
        _engine.raise_failure()
        for i, parameter in enumerate(self._params):
            if parameter.grad_req != "null":
                name = f"{self._bps_prefix}gradient.{i}"
                _average(parameter.list_grad()[0], name, -i, self._bps_factor, self._bps_compression)


__all__ = [
    "DistributedOptimizer",
    "DistributedTrainer",
    "broadcast_parameters",
]
