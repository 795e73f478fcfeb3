"""torch.amp.GradScaler and optimizers that send gradients."""

import functools

import torch


def _scaler_classes():
    """GradScaler and, where torch (2.0 to 2.2) has it apart, the one for CUDA."""
    found = [getattr(torch.amp, "GradScaler", None), torch.cuda.amp.GradScaler]
    return [cls for cls in found if cls is not None]


def synchronize_first():
    """Sees to it that scalers look at reduced gradients, which are the same on all ranks: whether one of them is infinite,
    and so whether to step, every rank then decides alike. unscale_() and step() of a GradScaler read gradients and offer
    no hook, so they are wrapped, once; for optimizers that are not bps's they do what they did.
    """
    for cls in _scaler_classes():
        for name in ("unscale_", "step"):
            if name in vars(cls) and not hasattr(vars(cls)[name], "_bps"):
                setattr(cls, name, _wrapped(vars(cls)[name]))


def _wrapped(method):
    @functools.wraps(method)
    def wrapper(self, optimizer, *args, **kwargs):
        if self.is_enabled() and hasattr(optimizer, "_bps_before_unscale"):
            optimizer._bps_before_unscale()
        return method(self, optimizer, *args, **kwargs)

    wrapper._bps = True
    return wrapper
