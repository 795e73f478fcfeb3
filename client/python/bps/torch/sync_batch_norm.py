"""SyncBatchNorm: batch normalization with the statistics of all ranks' batches together."""

import itertools

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .. import _client, _ops
from .._horovod import check_process_set
from .._library import Reduction
from . import _devices, ops

_numbers = itertools.count()  # of the layers of this process, which every rank makes in the same order


def _all_but_channels(x):
    """All dimensions but that of the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _gathered(mine, name):
    """A row for each rank that has come."""
    size = _client.current().size
    table = _devices.empty((size, mine.numel()), mine.dtype, mine)
    request = _ops.all_gather_equal(ops.span_of(mine), ops.span_of(table), name)
    request.wait()
    request.check()
    return table[: _ops.ranks_gathered(request, name, size)]


def _statistics(x, name):
    """(elements of each channel, mean, biased variance) over all ranks, in float64. Ranks may give nothing.

    The first is a tensor too, which on a device nobody has waited for.
    """
    channels = x.shape[1]
    count = x.numel() // channels
    if count:
        variance, mean = torch.var_mean(x.double(), _all_but_channels(x), unbiased=False)
    else:
        variance = mean = torch.zeros(channels, dtype=torch.float64, device=x.device)
    mine = _devices.brought(torch.cat([mean.new_full([1], float(count)), mean, variance]))
    table = _gathered(mine, name).to(x.device)
    counts, means, variances = table[:, :1], table[:, 1 : 1 + channels], table[:, 1 + channels :]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / total
    return total, mean, variance


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, total, mean, variance, eps, name):
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.total, ctx.name = total, name
        # Half precision is normalized with float32 statistics, as torch does.
        kind = x.dtype if x.dtype == torch.float64 else torch.float32
        return F.batch_norm(x, mean.to(kind), variance.to(kind), weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        out = _all_but_channels(x)
        centred = x.double() - mean.view(shape)
        wide = grad.double()
        sum_grad, sum_grad_centred = wide.sum(out), (wide * centred).sum(out)
        grad_weight = grad_bias = grad_x = None
        if weight is not None:
            # Of this rank alone: they are averaged with the gradients of the other parameters.
            grad_weight = (sum_grad_centred * inverse).to(weight.dtype)
            grad_bias = sum_grad.to(weight.dtype)
        if ctx.needs_input_grad[0]:
            sums = _devices.brought(torch.cat([sum_grad, sum_grad_centred]))
            request = _ops.push_pull(ops.span_of(sums), ops.span_of(sums), Reduction.SUM, f"{ctx.name}.grad")
            request.wait()
            request.check()
            mean_grad, mean_grad_centred = (sums.to(x.device) / ctx.total).chunk(2)
            grad_x = wide - mean_grad.view(shape) - centred * (inverse**2 * mean_grad_centred).view(shape)
            scale = inverse if weight is None else inverse * weight
            grad_x = (grad_x * scale.view(shape)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """As torch's BatchNorm1d, 2d and 3d, with statistics over the batches of all ranks, which may differ in size.

    While it trains, every rank must call it, and make its layers, in the same order. A rank whose batch is empty takes
    part with an input of no rows. In eval() nothing is sent. It can be differentiated once. Sums are made in float64. Gradients of weight and bias are
    this rank's, as those of any other layer; DistributedOptimizer and DistributedDataParallel average them.
    """

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        process_set=None,
        device=None,
        dtype=None,
    ):
        check_process_set(process_set)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._name = f"SyncBatchNorm.{next(_numbers)}"

    def _check_input_dim(self, x):
        if x.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes at least 2 dimensions, (batch, channels, ...), not {x.dim()}")

    def forward(self, x):
        self._check_input_dim(x)
        if x.shape[1] != self.num_features:
            raise ValueError(f"an input of {x.shape[1]} channels for a SyncBatchNorm of {self.num_features}")
        # Without running statistics eval() normalizes by the batch, too.
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        with torch.no_grad():
            total, mean, variance = _statistics(x, self._name)
            # Whoever has two of its own need not look at how many there are: on a device that would be waiting for it.
            if self.training and x.numel() // x.shape[1] <= 1 and total <= 1:
                raise ValueError(f"more than {int(total)} value for each channel is needed, over all ranks, to train")
            self._keep(total, mean, variance)
        return _Normalize.apply(x, self.weight, self.bias, total, mean, variance, self.eps, self._name)

    def _keep(self, total, mean, variance):
        if not self.training or not self.track_running_stats or self.running_mean is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (total / (total - 1))
        self.running_mean.copy_((1 - share) * self.running_mean.double() + share * mean)
        self.running_var.copy_((1 - share) * self.running_var.double() + share * unbiased)

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """The module with every BatchNorm in it replaced by a SyncBatchNorm with the same parameters and buffers."""
        check_process_set(process_group)
        result = module
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
                raise ValueError("a lazy BatchNorm must have seen an input before it is converted")
            result = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            for what in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(result, what, getattr(module, what))
            result.training = module.training
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child))
        return result


def convert_sync_batchnorm(module):
    """SyncBatchNorm.convert_sync_batchnorm()"""
    return SyncBatchNorm.convert_sync_batchnorm(module)
