"""Gradients of a set of parameters, born in memory that the daemon reads, and on their way as soon as they are ready.

Each parameter has a Slot. Its gradient (p.grad) is a view into an arena, of shared memory or on the parameter's CUDA device,
which autograd adds into where it is. Slots that travel together are a Bucket, a piece of the arena; most have a bucket of their own. A hook that runs
when a gradient is complete submits its bucket with the last of them, so that communication goes on beside the rest of
the backward pass. Parameters that come first in the model are needed first by the next forward pass and get the most
urgent priority, though their gradients are ready last.

Between submission and synchronize() a gradient belongs to the daemon. On a CUDA device, both mean the place in the stream
that is current.

Beside the gradients of a step the ranks send a note: who trains still, and which parameters were used. It is what lets
join() find out that all have come to their end. It is waited for at the end of the step; if all gradients are on devices, where
nobody waits on the host, before the next one.
"""

import errno
import gc
import threading
import time
import weakref

import torch

from .. import _client, _ops
from .._client import Arena
from .._errors import BpsTimeoutError
from .._library import SIZES, Reduction
from . import _devices, ops, sparse
from .compression import Compression

ALIGNMENT = 64  # of each gradient in its arena: a cache line, and the widest vector register
FIRST = 2**31 - 1  # the priority of what is small and awaited by all

# The Gradients that each parameter's hook belongs to, by id(parameter): whoever wraps a parameter again takes it over.
_owners = weakref.WeakValueDictionary()
# All of a client, in the order in which they were made. The number of each is in its tensors' names.
_made = weakref.WeakKeyDictionary()


class Slot:
    """One parameter. grad: its gradient where the daemon finds it; None where it lives on another accelerator than CUDA's.

    wire: what the daemon works on; the same tensor as grad if that can be.
    """

    __slots__ = ("parameter", "name", "grad", "wire", "ctx", "bucket", "passes_left", "hook", "watch", "keep", "rows")

    def __init__(self, parameter, name, passes):
        self.parameter = parameter
        self.name = name
        self.passes_left = passes
        self.grad = self.wire = self.ctx = self.bucket = self.hook = self.watch = self.keep = None
        self.rows = None  # a SparseGradient, once one has come


class Bucket:
    """Slots that are sent as one tensor. wire: all of theirs, with what lies between them."""

    __slots__ = ("slots", "name", "priority", "wire", "missing", "start", "request")

    def __init__(self, slots, priority):
        self.slots = slots
        self.name = slots[0].name if len(slots) == 1 else f"{slots[0].name}+{len(slots) - 1}"
        self.priority = priority
        self.missing = len(slots)  # whose gradients are not complete
        self.wire = self.start = self.request = None
        for slot in slots:
            slot.bucket = self


class Gradients:
    """named_parameters: pairs. groups: lists of parameters that travel together. track_use: the ranks tell one another
    which parameters they used; those that nobody did are in unused() after synchronize(). sparse_as_dense: gradients that
    are sparse are added to dense ones and travel whole.
    """

    attaches = True  # p.grad is in shared memory before the first backward pass, not from then on

    def __init__(
        self,
        named_parameters,
        compression,
        passes,
        op,
        predivide,
        groups=(),
        track_use=False,
        sparse_as_dense=False,
    ):
        self.compression = compression
        self.passes = passes
        self.op = op
        self.predivide = predivide
        self.track_use = track_use
        self.sparse_as_dense = sparse_as_dense
        self.slots = []
        self.buckets = []
        self.arenas = []  # uint8 tensors that hold nothing but gradients
        self.synchronized = False  # and no gradient has come since
        self.listening = True  # False: backward passes add up and nothing is sent
        self.last_active = None  # the highest rank that took part in the last step
        self.settle = None  # a weakref.WeakMethod: ends what its owner has put off
        self._notes = self._notes_start = None
        self._ending = False  # from the beginning of synchronize() until it has ended well, from one call to the next
        self._note = None  # this rank's, meanwhile
        self._put_off = None  # that of the last step, which is to be read before the next
        self._failure = None  # the first of those that it has met
        made = _made.setdefault(_client.current(), [])
        made.append(weakref.ref(self))
        self.prefix = "Gradient." if len(made) == 1 else f"Gradient{len(made)}."
        self.add(named_parameters, groups)

    # -- Setting up

    def add(self, named_parameters, groups=()):
        first = len(self.slots)
        slots = [Slot(p, self.prefix + name, self.passes) for name, p in named_parameters]
        for slot in slots:
            if slot.parameter.dtype not in ops.DTYPES:
                raise TypeError(f"bps has no element type for {slot.name}, which is of {slot.parameter.dtype}")
        buckets = [
            Bucket(members, -(first + position)) for position, members in _grouped(slots, groups, self._compresses())
        ]
        self._place([b for b in buckets if _devices.is_known(b.slots[0].parameter)], "grad", lambda p: p.dtype)
        for slot in slots:
            if slot.grad is not None and self.attaches:
                self._restore(slot)
        self._place_wires(buckets)
        for bucket in buckets:
            self._declare(bucket)
        for slot in slots:
            self._hook(slot)
        self.slots += slots
        self.buckets += buckets

    def _compresses(self):
        """Whether a compressor of the caller's own makes of a gradient what it likes."""
        return self.compression.wire_dtype is None and self.compression is not Compression.none

    def _wire_dtype(self, parameter):
        cast = self.compression.wire_dtype
        return cast if cast is not None and self.compression.applies_to(parameter.dtype) else parameter.dtype

    def _place(self, buckets, what, dtype_of):
        """Gives each slot its attribute `what`: a zeroed view into an arena of its device, where buckets lie side by side."""
        by_device = {}
        for bucket in buckets:
            by_device.setdefault(_devices.device_of(bucket.slots[0].parameter), []).append(bucket)
        for device, members in by_device.items():
            self._place_beside(members, what, dtype_of, device)

    def _place_beside(self, buckets, what, dtype_of, device):
        places, end = [], 0
        for slot in (slot for bucket in buckets for slot in bucket.slots):
            dtype = dtype_of(slot.parameter)
            length = slot.parameter.numel() * SIZES[ops.DTYPES[dtype]]
            places.append((slot, dtype, end, length))
            end += -(-length // ALIGNMENT) * ALIGNMENT
        if device is None:
            arena = torch.frombuffer(Arena.buffer(_client.current(), max(end, ALIGNMENT)), dtype=torch.uint8)
        else:
            arena = _devices.empty([max(end, ALIGNMENT)], torch.uint8, buckets[0].slots[0].parameter).zero_()
        if what == "grad":
            self.arenas.append(arena)
        ends = {}
        for slot, dtype, offset, length in places:
            setattr(slot, what, _view(arena[offset : offset + length].view(dtype), slot.parameter))
            low, _, _ = ends.get(slot.bucket, (offset, 0, None))
            ends[slot.bucket] = low, offset + length, dtype
        for bucket, (low, high, dtype) in ends.items():
            bucket.wire = arena[low:high].view(dtype)

    def _place_wires(self, buckets):
        """Memory for what is not sent as it is."""
        apart = []
        for bucket in buckets:
            parameter = bucket.slots[0].parameter
            if not _devices.is_known(parameter):
                _devices.say_staging(parameter.device)
            elif self._wire_dtype(parameter) == parameter.dtype:
                for slot in bucket.slots:
                    slot.wire = slot.grad
                continue
            apart.append(bucket)
        self._place(apart, "wire", self._wire_dtype)

    def _declare(self, bucket):
        """So that the daemons agree on it before the first gradient comes."""
        if self._compresses():
            # A compressor of the caller's own is asked what it makes of a gradient of zeros.
            packed, _ = self.compression.compress(torch.zeros_like(bucket.slots[0].parameter))
            name = f"push_pull.{bucket.name}"
            _client.current().declare(name, ops.DTYPES[packed.dtype], packed.numel())
        else:
            bucket.start = self._prepared(bucket)

    def _prepared(self, bucket):
        return _ops.prepared_push_pull(ops.span_of(bucket.wire), self.op, bucket.name, bucket.priority)

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

        def before_ready(grad):
            gradients = mine()
            if gradients is not None and sparse.travels_by_rows(grad):
                gradients.send_rows(slot)

        slot.watch = parameter.register_hook(before_ready)
        if hasattr(parameter, "register_post_accumulate_grad_hook"):
            slot.hook = parameter.register_post_accumulate_grad_hook(ready)
        else:
            accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            slot.hook = accumulate.register_hook(ready)
            slot.keep = accumulate  # autograd itself holds it weakly

    def release(self, parameter):
        """Gives up a parameter that another takes over. Those that travelled with it travel alone from now on."""
        given_up = next((s.bucket for s in self.slots if s.parameter is parameter), None)
        if given_up is None:
            return
        self.buckets.remove(given_up)
        for slot in given_up.slots:
            if slot.parameter is parameter:
                slot.hook.remove()
                slot.watch.remove()
                self.slots.remove(slot)
            else:
                self.buckets.append(Bucket([slot], given_up.priority))
                slot.bucket.wire = slot.wire
                self._declare(slot.bucket)

    def send_rows(self, slot):
        """A gradient that is about to be added is the first that is sparse: of this one only rows travel from now on."""
        alone = len(slot.bucket.slots) == 1 and slot.passes_left == self.passes
        if slot.rows is not None or self.sparse_as_dense or self._compresses() or not alone:
            return
        dtype = self._wire_dtype(slot.parameter)
        full = _ops.tensor_name("push_pull", slot.bucket.name, ops.DTYPES[dtype], slot.parameter.numel())
        slot.rows = sparse.SparseGradient(slot.parameter, self.op, full, slot.bucket.priority, self.predivide, dtype)
        if slot.grad is not None:
            self.arenas = sparse.without(self.arenas, slot.grad)
        if slot.parameter.grad is slot.grad:
            slot.parameter.grad = None

    # -- Each step

    def set_passes(self, passes):
        self.passes = passes
        self._expect_all()

    def _expect_all(self):
        for bucket in self.buckets:
            self._expect(bucket)

    def _expect(self, bucket):
        bucket.missing = len(bucket.slots)
        for slot in bucket.slots:
            slot.passes_left = self.passes

    def ready(self, slot):
        """A backward pass has added to the gradient."""
        if not self.listening:
            return
        if slot.passes_left <= 0 or slot.bucket.request is not None:
            raise RuntimeError(
                f"{slot.name} was computed again before step() or synchronize(): more backward passes than "
                f"backward_passes_per_step={self.passes}"
            )
        self.synchronized = False
        slot.passes_left -= 1
        if slot.passes_left == 0:
            slot.bucket.missing -= 1
            if slot.bucket.missing == 0:
                self._submit(slot.bucket)

    @torch.no_grad()
    def _restore(self, slot):
        """Sees to it that p.grad is the view in shared memory, with the values that p.grad has."""
        grad = slot.parameter.grad
        if grad is slot.grad:
            return
        if grad is None:
            slot.grad.zero_()
        elif grad.layout is not torch.strided:
            slot.grad.zero_().add_(grad)
        elif grad.data_ptr() != slot.grad.data_ptr():
            slot.grad.copy_(grad)
        slot.parameter.grad = slot.grad

    @torch.no_grad()
    def _submit(self, bucket):
        """Decides how a bucket's gradients are sent, and sends them."""
        if bucket.slots[0].rows is not None:
            bucket.request = bucket.slots[0].rows.start()
            return
        for slot in bucket.slots:
            self._pack(slot)
        if self._compresses():
            bucket.wire = bucket.slots[0].wire
            bucket.start = self._prepared(bucket)
        bucket.request = bucket.start()

    def _pack(self, slot):
        """Brings a gradient to where it is sent from."""
        if slot.grad is not None:
            self._restore(slot)
        elif slot.parameter.grad is None:
            slot.parameter.grad = torch.zeros_like(slot.parameter)
        grad = slot.parameter.grad
        if self.predivide != 1.0:
            grad.mul_(1.0 / self.predivide)
        if self._compresses():
            packed, slot.ctx = self.compression.compress(grad)
            # Of the caller's own making, and perhaps the caller's: what the daemon writes into is not.
            packed = _devices.brought(packed.detach())
            slot.wire = _devices.empty(packed.shape, packed.dtype, packed).copy_(packed)
        elif slot.wire is not grad:
            # Where a parameter is not laid out in rows, its gradient is not either: the order in memory is what is sent.
            slot.wire.copy_(grad)

    @torch.no_grad()
    def _unpack(self, slot):
        if slot.rows is not None:
            slot.rows.finish()
            return
        grad = slot.parameter.grad
        result = self.compression.decompress(slot.wire, slot.ctx) if self._compresses() else slot.wire
        if result is not grad:
            grad.copy_(result)
        if self.predivide != 1.0:
            grad.mul_(self.predivide)

    def receive(self, bucket, deadline=None, timeout=None):
        """Waits for a bucket that is under way. How it failed, or None: then its gradients are there."""
        _await(bucket.request, bucket.name, deadline, timeout)
        error, bucket.request = bucket.request.outcome(), None
        self._expect(bucket)
        if error is None:
            for slot in bucket.slots:
                self._unpack(slot)
        return error

    def begin(self):
        """Begins the end of a step: sends what no backward pass has reached, which other ranks may have, and a note."""
        self._read_put_off()
        used = [slot.passes_left < self.passes for slot in self.slots] if self.track_use else ()
        for bucket in self.buckets:
            if bucket.request is None:
                self._submit(bucket)
        if self._sends_notes():
            self._note = self._submit_note(_client.current().rank + 1, used)
        self._ending = True

    def synchronize(self, timeout=None):
        """Waits until all gradients are reduced. BpsTimeoutError after timeout s: they go on, and it may be called again.

        When some fail, all are waited for, and the first failure is raised.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._ending:
            self.begin()
        for bucket in self.buckets:
            if bucket.request is not None:
                error = self.receive(bucket, deadline, timeout)
                self._failure = self._failure or error
        self.end(deadline, timeout)
        self.synchronized = True

    def end(self, deadline=None, timeout=None):
        """The end of a step whose gradients have been received: waits for the ranks' notes. Raises its first failure."""
        if not self._ending:
            return
        if self._note is not None and self._failure is None and self._may_put_off():
            self._ending = False
            self._put_off, self._note = self._note, None
            client = _client.current()
            with client.lock:
                client.add_late(self._put_off)
            return
        if self._note is not None:
            _await(self._note, f"{self.prefix}notes", deadline, timeout)
        note, self._note, self._ending = self._note, None, False
        failure, self._failure = self._failure or (note and note.error), None
        if failure is not None:
            raise failure
        if note is not None:
            self._read_note()

    def _sends_notes(self):
        """With a quorum nobody waits for all ranks, as notes do; but who tracks use has to know."""
        return self.track_use or not _client.current().quorum

    def _may_put_off(self):
        """Whether nobody is to wait on the host, nor wants to know the note's answer now."""
        return not self.track_use and all(
            bucket.slots[0].rows is None and bucket.wire is not None and _devices.device_of(bucket.wire)
            for bucket in self.buckets
        )

    def _read_put_off(self):
        """By now the others have most likely sent theirs."""
        note, self._put_off = self._put_off, None
        if note is not None:
            note.wait()
            note.check()
            self._read_note()

    def under_way(self):
        return self._ending or any(bucket.request is not None for bucket in self.buckets)

    @torch.no_grad()
    def zero(self):
        if self.under_way():
            raise AssertionError(
                "zero_grad() between backward() and step() or synchronize(): gradients are on their way"
            )
        self.synchronized = False
        for arena in self.arenas:
            arena.zero_()
        for slot in self.slots:
            if slot.rows is None and slot.grad is not None:
                slot.parameter.grad = slot.grad
            else:
                zero_one(slot.parameter)

    # -- Notes: [1 + this rank while it trains, else 0; and 1 for each parameter that it used]. Their maximum is known to all.

    def _submit_note(self, who, used=()):
        count = 1 + (len(self.slots) if self.track_use else 0)
        if self._notes is None or self._notes.numel() != count:
            buffer = Arena.buffer(_client.current(), 4 * count)
            self._notes = torch.frombuffer(buffer, dtype=torch.int32)
            name = f"{self.prefix}notes.{count}"
            self._notes_start = _ops.prepared_push_pull(ops.span_of(self._notes), Reduction.MAX, name, FIRST)
        self._notes[0] = who
        if self.track_use:
            self._notes[1:] = torch.tensor(used, dtype=torch.int32) if used else 0
        return self._notes_start()

    def _read_note(self):
        highest = int(self._notes[0])
        if highest:
            self.last_active = highest - 1
        return highest

    def unused(self):
        """The slots that no rank used in the last step. With track_use only."""
        return [slot for slot, used in zip(self.slots, self._notes[1:].tolist()) if not used]

    def join(self, each_step=None):
        """Adds nothing to the others' steps, until no rank trains any more. The highest rank that took part last.

        each_step: what else all ranks do in a step, before their gradients.
        """
        if self.op not in (Reduction.SUM, Reduction.AVERAGE):
            raise ValueError(f"join() would add zeros to a {self.op.name.lower()}: it needs op=Average or op=Sum")
        if not self._sends_notes():
            raise ValueError("join() waits for all ranks, and this job goes on with a quorum of them")
        if self.under_way():
            raise AssertionError("join() between backward() and step(): gradients are on their way")
        self._read_put_off()
        self.zero()
        while True:
            if each_step is not None:
                each_step()
            self._contribute_nothing()
            if not self._read_note():
                break
        self.zero()
        return _client.current().size - 1 if self.last_active is None else self.last_active

    @torch.no_grad()
    def _contribute_nothing(self):
        """A step of a rank that has joined."""
        for bucket in self.buckets:
            if self._compresses() or bucket.slots[0].rows is not None:
                self._submit(bucket)  # of gradients that join() has zeroed
                continue
            bucket.wire.zero_()
            bucket.request = bucket.start()
        requests = [bucket.request for bucket in self.buckets] + [self._submit_note(0)]
        for bucket in self.buckets:
            bucket.request = None
        for request in requests:
            request.wait()
        for request in requests:
            request.check()


def zero_one(parameter):
    if parameter.grad is None:
        return
    if sparse.is_sparse(parameter.grad):
        parameter.grad = None
    else:
        parameter.grad.zero_()


def _await(request, name, deadline, timeout):
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not request.wait(left):
        raise BpsTimeoutError(errno.ETIMEDOUT, f"{name}: not complete after {timeout} s")


def join_all():
    """join() of everything that this process trains with, side by side: others may step them in any order.

    Returns the highest rank that took part in the last step.
    """
    gc.collect()  # so that all ranks find the same ones
    live = [gradients for gradients in (made() for made in _made.get(_client.current(), ())) if gradients]
    live = [gradients for gradients in live if gradients.buckets]
    for gradients in live:
        settle = gradients.settle and gradients.settle()
        if settle:
            settle()
    outcomes = []

    def run(gradients):
        try:
            outcomes.append((gradients.join(), None))
        except Exception as error:  # is raised by the thread that asked
            outcomes.append((None, error))

    threads = [threading.Thread(target=run, args=(gradients,), daemon=True) for gradients in live]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in outcomes:
        if error is not None:
            raise error
    return max((last for last, _ in outcomes), default=_client.current().size - 1)


def _grouped(slots, groups, each_alone):
    """(position of the first, slots) of each bucket. What is in no group is alone, as is what differs in type or device."""
    group_of = {id(p): number for number, group in enumerate(groups) for p in group}
    members = {}
    for position, slot in enumerate(slots):
        p = slot.parameter
        group = group_of.get(id(p))
        key = position if group is None or each_alone else (group, p.dtype, p.device)
        members.setdefault(key, (position, []))[1].append(slot)
    return list(members.values())


def _view(flat, like):
    """flat, laid out in memory as like is."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if like.dim() in (4, 5) and like.dim() == (4 if layout is torch.channels_last else 5):
            if like.is_contiguous(memory_format=layout) and not like.is_contiguous():
                return flat.as_strided(like.size(), like.stride())
    return flat.view(like.size())
