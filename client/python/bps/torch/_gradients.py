"""Gradients of a set of parameters, born in memory that the daemon reads, and on their way as soon as they are ready.

Each parameter has a Slot. Its gradient (p.grad) is a view into an arena of shared memory, which autograd adds into where
it is; a hook that runs when the gradient is complete submits it at once, so that communication goes on beside the rest
of the backward pass. Parameters that come first in the model are needed first by the next forward pass and get the most
urgent priority, though their gradients are ready last.

Between submission and synchronize() a gradient belongs to the daemon.
"""

import weakref

import torch

from .. import _client, _ops
from .._client import Arena
from . import ops
from .compression import Compression

ALIGNMENT = 64  # of each gradient in its arena: a cache line, and the widest vector register

# The Gradients that each parameter's hook belongs to, by id(parameter): whoever wraps a parameter again takes it over.
_owners = weakref.WeakValueDictionary()


class Slot:
    """One parameter. grad: its gradient in shared memory; None where the gradient lives on an accelerator.

    wire: what the daemon works on, in shared memory; the same tensor as grad if that can be.
    """

    __slots__ = ("parameter", "name", "priority", "grad", "wire", "ctx", "request", "passes_left", "hook", "keep")

    def __init__(self, parameter, name, priority, passes):
        self.parameter = parameter
        self.name = name
        self.priority = priority
        self.passes_left = passes
        self.grad = self.wire = self.ctx = self.request = self.hook = self.keep = None


class Gradients:
    def __init__(self, named_parameters, compression, passes, op, predivide):
        self.compression = compression
        self.passes = passes
        self.op = op
        self.predivide = predivide
        self.slots = []
        self.arenas = []  # uint8 tensors that hold nothing but gradients
        self.synchronized = False  # and no gradient has come since
        self.add(named_parameters)

    # -- Setting up

    def add(self, named_parameters):
        first = len(self.slots)
        slots = [Slot(p, name, -(first + i), self.passes) for i, (name, p) in enumerate(named_parameters)]
        for slot in slots:
            if slot.parameter.dtype not in ops.DTYPES:
                raise TypeError(f"bps has no element type for {slot.name}, which is of {slot.parameter.dtype}")
        self._name(slots)
        self._place_gradients([slot for slot in slots if slot.parameter.device.type == "cpu"])
        self._place_wires(slots)
        for slot in slots:
            self._hook(slot)
        self.slots += slots

    def _wire_dtype(self, slot):
        cast = self.compression.wire_dtype
        return cast if cast is not None and self.compression.applies_to(slot.parameter.dtype) else slot.parameter.dtype

    def _wire_facts(self, slot):
        """Element type and count of what travels. A compressor of the caller's own is asked, with a gradient of zeros."""
        if self.compression.wire_dtype is not None or self.compression is Compression.none:
            return ops.DTYPES[self._wire_dtype(slot)], slot.parameter.numel()
        packed, _ = self.compression.compress(torch.zeros_like(slot.parameter))
        return ops.DTYPES[packed.dtype], packed.numel()

    def _name(self, slots):
        """Chooses a prefix under which no name stands for another tensor already, as with two models in one program, and
        declares the names, so that the daemons agree on them before the first gradient comes.
        """
        client = _client.current()
        wanted = [(slot.name, *self._wire_facts(slot)) for slot in slots]
        number, prefix = 1, "Gradient."
        while any(client.stands_for_another(f"push_pull.{prefix}{name}", *facts) for name, *facts in wanted):
            number += 1
            prefix = f"Gradient{number}."
        for slot, (name, dtype, count) in zip(slots, wanted):
            slot.name = prefix + name
            client.declare(f"push_pull.{slot.name}", dtype, count)

    @staticmethod
    def _allocate(tensors_like):
        """One arena with a zeroed view for each (tensor, dtype). Returns (arena, views)."""
        offsets, end = [], 0
        for like, dtype in tensors_like:
            offsets.append(end)
            length = like.numel() * torch.empty((), dtype=dtype).element_size()
            end += -(-length // ALIGNMENT) * ALIGNMENT
        arena = torch.frombuffer(Arena.buffer(_client.current(), max(end, ALIGNMENT)), dtype=torch.uint8)
        return arena, [_view(arena, offset, like, dtype) for offset, (like, dtype) in zip(offsets, tensors_like)]

    def _place_gradients(self, slots):
        if not slots:
            return
        arena, views = self._allocate([(slot.parameter, slot.parameter.dtype) for slot in slots])
        self.arenas.append(arena)
        for slot, view in zip(slots, views):
            slot.grad = view
            self._restore(slot)

    def _place_wires(self, slots):
        """Memory for what is not sent as it is."""
        apart = []
        for slot in slots:
            if slot.grad is not None and self._wire_dtype(slot) == slot.parameter.dtype:
                slot.wire = slot.grad
            else:
                apart.append(slot)
            if slot.grad is None:
                ops.say_staging(slot.parameter.device)
        if apart:
            _, views = self._allocate([(slot.parameter, self._wire_dtype(slot)) for slot in apart])
            for slot, view in zip(apart, views):
                slot.wire = view

    def _hook(self, slot):
        parameter, mine = slot.parameter, weakref.ref(self)
        before = _owners.get(id(parameter))
        if before is not None:
            before.release(parameter)
        _owners[id(parameter)] = self

        def ready(*_):
            gradients = mine()
            if gradients is not None:
                gradients.ready(slot)

        if hasattr(parameter, "register_post_accumulate_grad_hook"):
            slot.hook = parameter.register_post_accumulate_grad_hook(ready)
        else:
            accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            slot.hook = accumulate.register_hook(ready)
            slot.keep = accumulate  # autograd itself holds it weakly

    def release(self, parameter):
        """Gives up a parameter that another takes over."""
        for slot in [s for s in self.slots if s.parameter is parameter]:
            slot.hook.remove()
            self.slots.remove(slot)

    # -- Each step

    def set_passes(self, passes):
        self.passes = passes
        for slot in self.slots:
            slot.passes_left = passes

    def ready(self, slot):
        """A backward pass has added to the gradient."""
        if slot.request is not None:
            raise RuntimeError(
                f"{slot.name} was computed again before step() or synchronize(): more backward passes than "
                f"backward_passes_per_step={self.passes}"
            )
        self.synchronized = False
        slot.passes_left -= 1
        if slot.passes_left <= 0:
            self._submit(slot)

    @torch.no_grad()
    def _restore(self, slot):
        """Sees to it that p.grad is the view in shared memory, with the values that p.grad has."""
        grad = slot.parameter.grad
        if grad is slot.grad:
            return
        if grad is None:
            slot.grad.zero_()
        elif grad.data_ptr() != slot.grad.data_ptr():
            slot.grad.copy_(grad)
        slot.parameter.grad = slot.grad

    @torch.no_grad()
    def _submit(self, slot):
        if slot.grad is not None:
            self._restore(slot)
        elif slot.parameter.grad is None:
            slot.parameter.grad = torch.zeros_like(slot.parameter)
        grad = slot.parameter.grad
        if self.predivide != 1.0:
            grad.mul_(1.0 / self.predivide)
        if self.compression.wire_dtype is None:
            packed, slot.ctx = self.compression.compress(grad)
        else:
            packed = grad
        wire = slot.wire
        if packed is not grad and (packed.shape != grad.shape or packed.dtype != wire.dtype):
            wire = slot.wire = packed.detach().cpu().contiguous()  # a compressor of the caller's own
        elif packed.data_ptr() != wire.data_ptr():
            wire.copy_(packed)
        # Where the parameter is not laid out in rows, its gradient is not either: the order in memory is what is sent.
        span = ops.Span(wire.data_ptr(), ops.DTYPES[wire.dtype], wire.numel(), wire)
        slot.request = _ops.push_pull(span, span, self.op, slot.name, slot.priority)

    @torch.no_grad()
    def _receive(self, slot):
        grad = slot.parameter.grad
        unpacked = slot.wire
        if self.compression.wire_dtype is None:
            unpacked = self.compression.decompress(slot.wire, slot.ctx)
        if unpacked.data_ptr() != grad.data_ptr():
            grad.copy_(unpacked)
        if self.predivide != 1.0:
            grad.mul_(self.predivide)

    def synchronize(self):
        """Sends what no backward pass has reached, which other ranks may have, and waits for everything."""
        for slot in self.slots:
            if slot.request is None:
                self._submit(slot)
        failed = None
        for slot in self.slots:
            slot.request.wait()
            error, slot.request = slot.request.error, None
            slot.passes_left = self.passes
            if error is None and failed is None:
                self._receive(slot)
            failed = failed or error
        if failed is not None:
            raise failed
        self.synchronized = True

    def under_way(self):
        return any(slot.request is not None for slot in self.slots)

    @torch.no_grad()
    def zero(self):
        if self.under_way():
            raise AssertionError(
                "zero_grad() between backward() and step() or synchronize(): gradients are on their way"
            )
        for arena in self.arenas:
            arena.zero_()
        for slot in self.slots:
            if slot.grad is not None:
                slot.parameter.grad = slot.grad
            elif slot.parameter.grad is not None:
                slot.parameter.grad.zero_()


def _view(arena, offset, like, dtype):
    """like.numel() elements of dtype at offset, laid out in memory as like is."""
    length = like.numel() * torch.empty((), dtype=dtype).element_size()
    flat = arena[offset : offset + length].view(dtype)
    for layout in (torch.channels_last, torch.channels_last_3d):
        if like.dim() in (4, 5) and like.dim() == (4 if layout is torch.channels_last else 5):
            if like.is_contiguous(memory_format=layout) and not like.is_contiguous():
                return flat.as_strided(like.size(), like.stride())
    return flat.view(like.size())
