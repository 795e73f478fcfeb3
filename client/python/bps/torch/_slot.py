"""A Slot: one parameter, its gradient, and where that lies.

The daemon reads and writes `home`, a piece of an arena, which nobody else gets. p.grad is `given`, another tensor over the same
memory, or what the user or autograd has put there, whose values are brought to `home` when the gradient is sent. From then until
the result is there p.grad is `lent`, an UnderWay: using a gradient that is under way waits for the average, and uses the average.
"""

import sys
import weakref

import torch

from . import sparse


def _getters(*names):
    return [getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)]


# What tells of a gradient, and not of its values.
_HARMLESS = {
    *_getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_sparse", "is_cuda"),
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
}


class UnderWay(torch.Tensor):
    """A gradient that the daemon has. Calls of torch with it wait for the result and get that in its place."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _HARMLESS:
                args, kwargs = _landed(args), _landed(kwargs)
            return func(*args, **(kwargs or {}))


def _landed(value):
    if isinstance(value, UnderWay):
        slot = value._bps_slot()
        return value if slot is None else slot.landed(value)
    if type(value) in (list, tuple):
        return type(value)([_landed(item) for item in value])
    if type(value) is dict:
        return {key: _landed(item) for key, item in value.items()}
    return value


class Slot:
    """wire: what the daemon works on; the same tensor as home if that can be. home is None where the parameter lives on another
    accelerator than CUDA's. owner: the Gradients that it is one of, weakly.
    """

    __slots__ = (
        "parameter", "name", "owner", "home", "given", "lent", "wire", "ctx", "bucket", "is_complete", "absent", "rows",
        "hook", "watch", "keep", "_kind", "_where", "_address", "_version", "_held", "_stays_none", "__weakref__",
    )  # fmt: skip

    def __init__(self, parameter, name, owner):
        self.parameter = parameter
        self.name = name
        self.owner = weakref.ref(owner)
        self.is_complete = False  # the last backward pass of a step has added to the gradient
        self.absent = False  # p.grad was None when it was sent
        self._stays_none = False  # and the parameter was frozen then: p.grad is None until the result is there
        self.rows = None  # a SparseGradient, once one has come
        self.home = self.given = self.lent = self.wire = self.ctx = self.bucket = None
        self.hook = self.watch = self.keep = None  # of hooks, and the node of autograd that has one
        self._kind, self._where = kind_of(parameter), parameter.data_ptr()

    def has_moved(self):
        """Whether the parameter has other memory than when its gradient was given a place, or was hooked."""
        parameter, (dtype, _, _, stride) = self.parameter, self._kind
        if parameter.data_ptr() != self._where or parameter.dtype is not dtype:
            return True
        return len(stride) > 3 and parameter.stride() != stride  # another layout, where the memory of before was

    def is_current(self):
        """Whether the parameter is of the kind that its gradient's place was made for."""
        return not self.has_moved() or kind_of(self.parameter) == self._kind

    def describe(self):
        """What ranks have to have alike, in words."""
        dtype, _, shape, _ = self._kind
        laid_out = f", {layout_of(self.parameter)}" if layout_of(self.parameter) else ""
        by_rows = ", by rows" if self.rows is not None else ""
        return f"{self.name} ({str(dtype)[6:]} {list(shape)}{laid_out}{by_rows})"

    # -- Memory

    def settle_in(self, home):
        """The gradient has a place from now on, for parameters of the kind that this one now is."""
        self.home = home.data  # with a version of its own, by which was_changed() goes
        self._kind, self._where = kind_of(self.parameter), self.parameter.data_ptr()
        self._address = home.data_ptr()
        self._alias()

    def _alias(self):
        self.given = self.home.detach()
        self._lend_out()
        self._held = sys.getrefcount(self.given), sys.getrefcount(self.lent)

    def _lend_out(self):
        self.lent = torch.Tensor._make_subclass(UnderWay, self.given)  # which does for sparse tensors, too
        self.lent._bps_slot = weakref.ref(self)

    def bring(self):
        """Has the gradient lie where the daemon finds it. Whether there is one."""
        grad = self.parameter.grad
        if grad is None:
            if self.home is not None and self.given.data_ptr() != self._address:
                self._alias()
            return False
        if self.home is None:
            self.given = grad.detach()  # which is copied to where the daemon finds it
            return True
        if grad is self.given and grad.data_ptr() == self._address:
            return True
        if grad.layout is not torch.strided:
            self._leave_to_others()
            self.home.zero_().add_(grad.detach())
        elif grad.data_ptr() != self._address or grad.stride() != self.home.stride():
            self._leave_to_others()
            self.home.copy_(grad.detach() if grad.requires_grad else grad)
        if self.given.data_ptr() != self._address:  # p.grad.data was assigned
            self._alias()
        self.parameter.grad = self.given
        return True

    def _leave_to_others(self):
        """Whoever still has a gradient that is p.grad no more keeps its values, as in one process."""
        if (sys.getrefcount(self.given), sys.getrefcount(self.lent)) == self._held:
            return
        with torch._C.DisableTorchFunctionSubclass():
            if self.given.data_ptr() == self._address:
                self.given.data = self.given.clone()
            self.lent.data = self.given.data
        self._alias()

    # -- Under way

    def lend(self):
        """p.grad is the daemon's, also where only other ranks may have one. What is frozen stays None."""
        self._stays_none = self.absent and not self.parameter.requires_grad
        if self._stays_none:
            return
        if self.home is None:
            self.given = self._nothing() if self.absent else self.parameter.grad
            self._lend_out()
        self._version = self.given._version
        self.parameter.grad = self.lent

    def _nothing(self):
        """Zeros, which the result is copied to unless rows of its own come; then they take no memory of a table's size."""
        if self.rows is None:
            return torch.zeros_like(self.parameter)
        return self.parameter.detach().new_zeros(()).expand(self.parameter.size())

    def is_lent(self):
        """Whether p.grad is to become the result: else the user has put something else there, or nothing."""
        grad = self.parameter.grad
        return grad is self.lent or (grad is None and self._stays_none)

    def was_changed(self):
        """Whether somebody wrote into a gradient that is under way."""
        return not self.absent and self.rows is None and self.given._version != self._version

    def landed(self, lent):
        """What is used in the place of a tensor that lend() gave, once the result is there."""
        owner = self.owner()
        if owner is not None and self.is_lent():
            owner.touched()
        if lent is self.lent and self.rows is None:
            return self.given
        grad = self.parameter.grad
        return grad if lent is self.lent and grad is not None else lent

    def take_back(self):
        """p.grad is the user's again."""
        self.parameter.grad = None if self.absent else self.given

    # -- Hooks

    def listen(self, arriving, ready):
        """Has arriving(slot, gradient) called before a backward pass adds to the gradient, and ready(slot) when it has, after hooks
        of the parameter, whenever these were registered.
        """
        mine, owner = weakref.ref(self), self.owner  # a closure that holds the parameter would keep it for ever

        def before(grad):
            gradients = owner()
            if gradients is not None:
                arriving(gradients, mine(), grad)

        def after(*_):
            gradients = owner()
            if gradients is not None:
                ready(gradients, mine())

        if not self.parameter.requires_grad:
            self._where = None  # to be done when it does
            return
        self.deafen()
        self._where = self.parameter.data_ptr()
        self.watch = self.parameter.register_hook(before)
        with torch.enable_grad():
            self.keep = self.parameter.expand_as(self.parameter).grad_fn.next_functions[0][0]  # autograd holds it weakly
        self.hook = self.keep.register_hook(after)

    def deafen(self):
        for handle in (self.hook, self.watch):
            if handle is not None:
                handle.remove()


def kind_of(parameter):
    return parameter.dtype, parameter.device, parameter.size(), parameter.stride()


def layout_of(tensor):
    """The name of a layout whose order in memory is not that of rows, or None."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dims and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return str(layout)[6:]
    return None


def laid_out(flat, like):
    """flat, in the shape of like and in its order in memory."""
    if layout_of(like):
        return flat.as_strided(like.size(), like.stride())
    return flat.view(like.size())


def zero(parameter, set_to_none):
    if parameter.grad is None:
        return
    if set_to_none or sparse.is_sparse(parameter.grad):
        parameter.grad = None
    else:
        parameter.grad.zero_()
