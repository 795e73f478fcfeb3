"""Gradients of a set of parameters, on their way as soon as they are ready, and waited for when they are used.

Each parameter has a Slot. Slots that travel together are a Bucket, a piece of an arena: of shared memory, or on the parameters'
CUDA device. Most have a bucket of their own. A hook that runs when a backward pass has added to a gradient, behind the user's own,
submits the bucket with the last of its slots, so that communication goes on beside the rest of the backward pass. Parameters
that come first in the model are needed first by the next forward pass and get the most urgent priority, though their gradients
are ready last.

To the user it is as if backward() had averaged the gradients. What p.grad is when a gradient is sent is what counts, wherever that
lies; using it before the average is there waits (UnderWay); a backward pass that adds to a gradient on its way adds to the
average; what the user has put into p.grad meanwhile stays. On a CUDA device, all this means the place in the stream that is current.

Which parameters there are is looked up at the end of each backward pass, where the ranks send notes, too (Notes): who trains still,
which gradients there are, and which of them this rank has. What no rank has stays None. All ranks have to have the same ones.
"""

import errno
import gc
import operator
import os
import threading
import time
import weakref

import torch

from .. import _client, _join, _ops
from .._client import Arena
from .._errors import BpsCanceledError, BpsTimeoutError, BpsValueError
from .._library import SIZES, Reduction
from . import _devices, _notes, _passes, _slot, ops, sparse
from ._slot import Slot
from .compression import Compression

ALIGNMENT = 64  # of each gradient in its arena: a cache line, and the widest vector register

# The slot of each parameter that has one, by id(parameter).
_slots = weakref.WeakValueDictionary()
# All of a client, by the number of each, which is in its tensors' names.
_made = weakref.WeakKeyDictionary()


class Bucket:
    """Slots that are sent as one tensor. wire: all of theirs, with what lies between them."""

    __slots__ = ("slots", "name", "priority", "wire", "missing", "start", "request", "has_come")

    def __init__(self, slots, priority):
        self.slots = slots
        self.name = slots[0].name if len(slots) == 1 else f"{slots[0].name}+{len(slots) - 1}"
        self.priority = priority
        self.missing = len(slots)  # whose gradients are not complete
        self.has_come = False  # in this step, before its end, and no backward pass has added to it since
        self.wire = self.start = self.request = None
        for slot in slots:
            slot.bucket = self


class Gradients:
    """named_parameters: pairs. parameters(): all that there are now, of which those that require a gradient have one here;
    name_of(parameter): the name of one that has come since. groups: lists of parameters that travel together.
    sparse_as_dense: gradients that are sparse are added to dense ones and travel whole.
    """

    def __init__(
        self,
        named_parameters,
        parameters,
        name_of,
        compression,
        passes,
        op,
        predivide,
        groups=(),
        sparse_as_dense=False,
    ):
        self.compression = compression
        self.passes = self.passes_left = passes
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.slots = []
        self.buckets = []
        self.synchronized = False  # and no gradient has come since
        self.listening = True  # False: backward passes add up and nothing is sent
        self.in_pass = self._was_reached = False  # a backward pass runs that adds to gradients; and these are to be sent
        self.last_active = None  # the highest rank that took part in the last step
        self.n_joined = 0  # steps of others that this rank has added zeros to, in join()
        self.has_let_go = False
        self.settle = None  # a weakref.WeakMethod: ends what its owner has put off
        self.give_up = None  # likewise: forgets that
        self.each_step = None  # likewise: what its owner has all ranks do in a step, before their gradients
        self._parameters, self.name_of = parameters, name_of
        self._groups = groups
        self._digest = None  # of what the ranks have to have alike; None: to be made anew
        self._seen = []  # those that required a gradient when they were last looked at
        self._lenders = []  # other Gradients, weakly, which have gradients of some of these parameters
        self._ending = False  # from begin() until synchronize() has ended well
        self._sent, self._steps = 0, _notes.ANY  # buckets sent and steps taken, since the last note
        self._was_changed = False  # a gradient that was under way, since the last note
        self._note = None  # this rank's, meanwhile
        self._answer = None  # what was heard in this step
        self._put_off = None  # the note of the last step, which is to be read before the next
        self._failure = None  # the first of those that it has met
        _client.remember(self)
        self._joined = _client.current()  # whose memory and tensors these are
        self._enrol(self._joined)
        _passes.watch()
        self.look(named_parameters)

    def _enrol(self, client, number=0):
        """Its number among those of the client is this, unless another has it. 0: a new one."""
        made = _made.setdefault(client, {})
        if not number or (number in made and made[number]() is not self):
            number = max(made, default=0) + 1
        made[number] = weakref.ref(self)
        self.number = client.process_set, number
        self.prefix = "Gradient." if number == 1 else f"Gradient{number}."
        self._notes = _notes.Notes(self.prefix)

    def follow_job(self):
        """Where this process has left its job and joined another since, makes anew what was of the client of before.
        Whether gradients were under way there, which are lost.
        """
        if self.client is not None or self.has_let_go or not _client.is_initialized():
            return False
        client, before = _client.of_all_ranks(), self.prefix
        if client is self._joined:
            return False
        lost = self.under_way()
        self._abandon()
        self._enrol(client, self.number[1])
        self._digest = None
        for slot in self.slots:
            slot.name = self.prefix + slot.name.removeprefix(before)
        self.buckets = [Bucket(bucket.slots, bucket.priority) for bucket in self.buckets]
        self._expect_all()
        for slot in self.slots:
            if slot.rows is not None:
                slot.rows = self._by_rows(slot)
        # look() gives those others a place whose parameters have moved.
        self._furnish([b for b in self.buckets if all(slot.rows is None and slot.is_current() for slot in b.slots)])
        self._joined = client
        return lost

    def _abandon(self):
        """Gives up the step that has begun."""
        give_up = self.give_up and self.give_up()
        if give_up:
            give_up()
        self.passes_left = self.passes
        self.last_active, self.n_joined = None, 0
        self._ending = self._was_changed = False
        self._sent, self._steps = 0, _notes.ANY
        self._note = self._answer = self._put_off = self._failure = None
        for slot in self.slots:
            if slot.is_lent():
                slot.parameter.grad = None

    def let_go(self):
        """In a child of fork(), which has copies of gradients and no job: what it does is its own."""
        for slot in self.slots:
            slot.deafen()
            if slot.is_lent():
                slot.take_back()
        self.slots, self.buckets, self._lenders = [], [], []
        self._parameters = list
        self._seen = []
        self._ending, self._note, self._put_off, self.has_let_go = False, None, None, True

    def __del__(self):
        for slot in getattr(self, "slots", ()):
            slot.deafen()
            slot.bucket = None  # ends the cycle, so that parameters and memory go at once

    # -- Which there are

    def look(self, named=None):
        """Parameters that have come get slots, those that are gone lose theirs, and what has changed moves."""
        self.follow_job()
        parameters = self._parameters()
        now = [p for p in parameters if p.requires_grad]
        gone = any(lender() is None for lender in self._lenders)
        if gone or len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            self._seen = now
            self._meet(parameters, now, named)
        for bucket in self.buckets[:]:
            if bucket.request is None:
                self._follow(bucket)

    def _meet(self, parameters, now, named):
        self._digest = None
        there = set(map(id, parameters))
        for slot in self.slots[:]:
            if id(slot.parameter) not in there:
                self._release(slot)
        new = []
        self._lenders = []
        for p in now:
            slot = _slots.get(id(p))
            if slot is None or slot.parameter is not p or slot.owner() is None:
                new.append(p)
            elif slot.owner() is not self and slot.owner not in self._lenders:
                self._lenders.append(slot.owner)
        if new:
            wanted = set(map(id, new))
            known = {id(p): name for name, p in named or ()}
            order = [p for _, p in named if id(p) in wanted] if named else new
            self._add([(known[id(p)] if named else self.name_of(p), p) for p in order])
        order = {id(p): i for i, p in enumerate(parameters)}
        self.slots.sort(key=lambda slot: order[id(slot.parameter)])

    def lenders(self):
        """Those that send gradients of parameters that are wrapped twice, which both have to want alike."""
        found = [lender for lender in (each() for each in self._lenders) if lender is not None]
        for lender in found:
            mine, others = self._settings(), lender._settings()
            if mine != others:
                raise ValueError(f"a parameter is wrapped twice, here with {mine} and before with {others}: wrap it alike")
        return found

    def _settings(self):
        over = f", process_set={self.client.process_set}" if self.client else ""
        return f"op={self.op.name}, compression={self.compression.__name__}, predivide={self.predivide}{over}"

    def _add(self, named_parameters):
        slots = [Slot(p, self.prefix + name, self) for name, p in named_parameters]
        for slot in slots:
            if slot.parameter.dtype not in ops.DTYPES:
                raise TypeError(f"bps has no element type for {slot.name}, which is of {slot.parameter.dtype}")
        first = len(self.slots)
        buckets = [
            Bucket(members, -(first + position))
            for position, members in _grouped(slots, self._groups, self._compresses())
        ]
        self._furnish(buckets)
        for slot in slots:
            _slots[id(slot.parameter)] = slot
        self.slots += slots
        self.buckets += buckets

    def _furnish(self, buckets):
        """Memory, names and hooks."""
        self._place([b for b in buckets if _devices.is_known(b.slots[0].parameter)], Slot.settle_in, lambda p: p.dtype)
        self._place_wires(buckets)
        for bucket in buckets:
            self._declare(bucket)
            for slot in bucket.slots:
                slot.listen(type(self).arriving, type(self).ready)

    def _follow(self, bucket):
        """Of a bucket at rest, parameters may have moved: autograd may have forgotten the hooks, and another type needs other memory."""
        moved = [slot for slot in bucket.slots if slot.has_moved()]
        if not all(slot.is_current() for slot in moved):
            self._renew(bucket)
            return
        for slot in moved:
            slot.listen(type(self).arriving, type(self).ready)

    def _renew(self, bucket):
        """Of a bucket at rest, parameters have moved to another type, device or layout."""
        self._digest = None
        at = self.buckets.index(bucket)
        slots = bucket.slots
        for slot in slots:
            slot.home = slot.wire = slot.rows = None
        group = [[slot.parameter for slot in slots]]
        anew = [Bucket(members, bucket.priority) for _, members in _grouped(slots, group, self._compresses())]
        self._furnish(anew)
        for each in anew:
            each.missing = sum(not slot.is_complete for slot in each.slots)
        self.buckets[at : at + 1] = anew

    def _release(self, slot):
        """Gives up a parameter. Those that travelled with it travel alone from now on."""
        self._digest = None
        self.buckets.remove(slot.bucket)
        for other in slot.bucket.slots:
            if other is slot:
                slot.deafen()
                self.slots.remove(slot)
            else:
                self.buckets.append(Bucket([other], slot.bucket.priority))
                other.bucket.wire = other.wire
                self._declare(other.bucket)

    # -- Memory

    def _compresses(self):
        """Whether a compressor of the caller's own makes of a gradient what it likes."""
        return self.compression.wire_dtype is None and self.compression is not Compression.none

    def _wire_dtype(self, parameter):
        cast = self.compression.wire_dtype
        return cast if cast is not None and self.compression.applies_to(parameter.dtype) else parameter.dtype

    def _place(self, buckets, give, dtype_of):
        """give(slot, memory): a zeroed view into an arena of the slot's device, where buckets lie side by side."""
        by_device = {}
        for bucket in buckets:
            by_device.setdefault(_devices.device_of(bucket.slots[0].parameter), []).append(bucket)
        for device, members in by_device.items():
            self._place_beside(members, give, dtype_of, device)

    @_client.as_remembered
    def _place_beside(self, buckets, give, dtype_of, device):
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
        ends = {}
        for slot, dtype, offset, length in places:
            give(slot, _slot.laid_out(arena[offset : offset + length].view(dtype), slot.parameter))
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
                    slot.wire = slot.home
                continue
            apart.append(bucket)
        self._place(apart, lambda slot, memory: setattr(slot, "wire", memory), self._wire_dtype)

    @_client.as_remembered
    def _declare(self, bucket):
        """So that the daemons agree on it before the first gradient comes."""
        if self._compresses():
            # A compressor of the caller's own is asked what it makes of a gradient of zeros.
            packed, _ = self.compression.compress(torch.zeros_like(bucket.slots[0].parameter))
            dtype, count = ops.DTYPES[packed.dtype], packed.numel()
            _client.current().declare(_ops.tensor_name("push_pull", bucket.name, dtype, (count,)), dtype, count)
        else:
            bucket.start = self._prepared(bucket)

    @_client.as_remembered
    def _prepared(self, bucket):
        return _ops.prepared_push_pull(ops.span_of(bucket.wire), self.op, bucket.name, bucket.priority)

    # -- Backward passes

    def arriving(self, slot, grad):
        """A backward pass is about to add to a gradient."""
        if not self.in_pass:
            if not _passes.accumulates():
                return
            self._enter_pass()
        if slot.bucket.request is not None:
            self._receive_early(slot.bucket)
        if slot.has_moved():
            self._follow(slot.bucket)
        if sparse.travels_by_rows(grad):
            self.send_rows(slot)

    def _enter_pass(self):
        """What a pass before has sent is waited for, by all ranks: this one adds to the average."""
        self.follow_job()
        self.in_pass = True
        self._was_reached = self.listening
        _passes.enter(self.number, self)
        self.settle_now()

    def ready(self, slot):
        """A backward pass has added to a gradient."""
        if not self.listening:
            return
        self.synchronized = False
        bucket = slot.bucket
        bucket.has_come = False
        if self.passes_left == 1 and not slot.is_complete:
            slot.is_complete = True
            bucket.missing -= 1
            if not bucket.missing:
                self._submit(bucket)

    def leave_pass(self, ended_well):
        """The outermost backward pass has come to its end. With the last of a step's, all that it has not reached is sent."""
        self.in_pass = False
        if self._was_reached and ended_well:
            self.passes_left -= 1
            if not self.passes_left:
                self.begin()

    def pass_has_ended(self, ended_well):
        """All that the pass has reached have left it."""

    def send_rows(self, slot):
        """A gradient that is about to be added is the first that is sparse: of this one only rows travel from now on."""
        alone = len(slot.bucket.slots) == 1 and self.passes_left == self.passes
        if slot.rows is not None or self.sparse_as_dense or self._compresses() or not alone:
            return
        self._digest = None
        slot.rows = self._by_rows(slot)
        if slot.parameter.grad is slot.given:
            slot.parameter.grad = None
        slot.home = slot.wire = slot.bucket.wire = None

    def _by_rows(self, slot):
        """How a gradient of which only rows travel is sent."""
        dtype = self._wire_dtype(slot.parameter)
        full = _ops.tensor_name("push_pull", slot.bucket.name, ops.DTYPES[dtype], slot.parameter.shape)
        return sparse.SparseGradient(slot.parameter, self.op, full, slot.bucket.priority, self.predivide, dtype)

    def set_passes(self, passes):
        self.passes = self.passes_left = passes
        self._expect_all()

    def _expect_all(self):
        for bucket in self.buckets:
            self._expect(bucket)

    def _expect(self, bucket):
        bucket.missing = len(bucket.slots)
        for slot in bucket.slots:
            slot.is_complete = False

    # -- Buckets

    @_client.as_remembered
    def _submit(self, bucket):
        """Decides how a bucket's gradients are sent, and sends them."""
        if bucket.slots[0].rows is not None:
            bucket.slots[0].absent = bucket.slots[0].parameter.grad is None
            with torch.no_grad():
                bucket.request = bucket.slots[0].rows.start()
        else:
            for slot in bucket.slots:
                self._pack(slot)
            if self._compresses():
                bucket.wire = bucket.slots[0].wire
                bucket.start = self._prepared(bucket)
            bucket.request = bucket.start()
        for slot in bucket.slots:
            slot.lend()
        self._sent += 1

    def _pack(self, slot):
        """Brings a gradient to where it is sent from."""
        slot.absent = not slot.bring()
        grad = torch.zeros_like(slot.parameter) if slot.absent and self._compresses() else slot.given
        if self.predivide != 1.0 and not slot.absent:
            grad.mul_(1.0 / self.predivide)
        if self._compresses():
            packed, slot.ctx = self.compression.compress(grad)
            # Of the caller's own making, and perhaps the caller's: what the daemon writes into is not.
            packed = _devices.brought(packed.detach())
            slot.wire = _devices.empty(packed.shape, packed.dtype, packed).copy_(packed)
        elif slot.absent:
            slot.wire.zero_()
        elif slot.wire is not slot.home:
            # Where a parameter is not laid out in rows, its gradient is not either: the order in memory is what is sent.
            slot.wire.copy_(grad)

    def _unpack(self, slot):
        """The result becomes p.grad."""
        if slot.rows is not None:
            with torch.no_grad():
                slot.rows.finish()
            return
        if slot.wire is not slot.home:
            slot.given.copy_(self.compression.decompress(slot.wire, slot.ctx) if self._compresses() else slot.wire)
        if self.predivide != 1.0:
            slot.given.mul_(self.predivide)
        slot.parameter.grad = slot.given

    def receive(self, bucket, deadline=None, timeout=None):
        """Waits for a bucket that is under way. How it failed, or None: then its gradients are there."""
        request = bucket.request
        if not request.wait(_left(deadline)):
            raise _late(bucket.name, timeout)
        error, bucket.request = request.outcome(), None
        self._expect(bucket)
        for slot in bucket.slots:
            if slot.was_changed():
                self._was_changed = True
                error = error or _changed(f"{slot.name} was changed")
            if not slot.is_lent():
                continue
            if error is None and (not slot.absent or self._is_used(slot)):
                self._unpack(slot)
            else:
                slot.take_back()
        return error

    def _receive_early(self, bucket):
        self._failure = self.receive(bucket) or self._failure
        bucket.has_come = True

    def touched(self):
        """A gradient that is under way is used."""
        if _passes.is_running():  # in the middle of a backward pass, which has not come to its end
            for bucket in self.buckets:
                if bucket.request is not None:
                    self._receive_early(bucket)
            return
        self.settle_now()

    def take_put_off(self):
        """Ends what the owner has put off."""
        settle = self.settle and self.settle()
        if settle:
            settle()

    def settle_now(self):
        """Has nothing under way."""
        self.follow_job()
        self.take_put_off()
        if self.under_way():
            self.synchronize()

    def has_begun_to_end(self):
        """Whether all is on its way that is to be averaged."""
        return self._ending

    def has_begun(self):
        """Whether a backward pass has added to gradients of the next step."""
        return self.passes_left != self.passes or self.under_way()

    def under_way(self):
        return self._ending or any(bucket.request is not None for bucket in self.buckets)

    def zeroed(self):
        """Gradients have been zeroed, or dropped: a step begins anew."""
        if any(lender() is None for lender in self._lenders):
            self.look()  # so that hooks are there for the next backward pass
        self.synchronized = False
        self.passes_left = self.passes
        for bucket in self.buckets:
            bucket.has_come = False
        self._expect_all()

    # -- The end of a step

    def stepped(self):
        """A step has been taken with the averages."""
        self.synchronized = False
        if self._steps != _notes.ANY:
            self._steps += 1

    @_client.as_remembered
    def begin(self):
        """Sends what backward passes have not reached, which other ranks may have, and a note."""
        self.passes_left = self.passes
        self._read_put_off()
        self.look()
        self._agree()
        for bucket in self.buckets[:]:
            if bucket.request is None and not bucket.has_come:
                self._submit(bucket)
        self._answer = None
        if self._sends_notes():
            absent = any(slot.absent for slot in self.slots)
            used = [int(not slot.absent) for slot in self.slots] if absent else 1
            self._note = self._notes.send(True, self._sent, self._steps, changed=self._was_changed, used=used)
            self._steps, self._was_changed = 0, False
        self._sent = 0
        self._ending = True

    def synchronize(self, timeout=None):
        """Waits until all gradients are reduced. BpsTimeoutError after timeout s: they go on, and it may be called again.

        When some fail, all are waited for, and the first failure is raised.
        """
        if self.has_let_go:
            return
        if self.follow_job():
            raise BpsCanceledError(
                errno.ECANCELED,
                f"{self.prefix.rstrip('.')}: gradients were on their way when bps was shut down, and are lost: begin the step anew",
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        self.synchronize_lenders(timeout)
        if not self._ending:
            self.begin()
        if not self._may_put_off():
            self._hear(deadline, timeout)
        for bucket in self.buckets:
            if bucket.request is not None:
                error = self.receive(bucket, deadline, timeout)
                self._failure = self._failure or error
        self.end(deadline, timeout)
        self.synchronized = True

    def synchronize_lenders(self, timeout=None):
        """One round of each, on all ranks, whether it has begun by a backward pass here or not."""
        for lender in self.lenders():
            lender.take_put_off()
            if not lender.synchronized:
                lender.synchronize(timeout)

    @_client.as_remembered
    def end(self, deadline=None, timeout=None):
        """The end of a step whose gradients have been received: waits for the ranks' notes. Raises its first failure."""
        if not self._ending:
            return
        for bucket in self.buckets:
            bucket.has_come = False
        if self._note is not None and self._failure is None and self._may_put_off():
            self._ending = False
            self._put_off, self._note = self._note, None
            client = _client.current()
            with client.lock:
                client.add_late(self._put_off)
            return
        heard = self._hear(deadline, timeout)
        self._ending = False
        failure, self._failure = self._failure or heard, None
        if failure is not None:
            raise failure

    def _hear(self, deadline=None, timeout=None):
        """Waits for the ranks' notes, and raises what they say of all. How the notes failed, or None."""
        if self._note is None:
            return None
        if not self._note.wait(_left(deadline)):
            raise _late(self._first_under_way(), timeout)
        note, self._note = self._note, None
        if note.error is None:
            self._take_answer()
        return note.error

    def _first_under_way(self):
        """The name of what has been awaited longest."""
        return next((b.name for b in self.buckets if b.request and not b.request.poll()), self._notes.name)

    def _take_answer(self):
        self._answer = answer = self._notes.read()
        if answer.last is not None:
            self.last_active = answer.last
        if not answer.same_slots:
            self._give_up(self._difference())
        if answer.changed is not None and self._failure is None:
            self._failure = _changed(f"rank {answer.changed} has changed a gradient in the step before this")
        if not answer.same_steps:
            self._give_up("some ranks have taken a step since their last backward pass, and others have not")
        if not answer.same_sent:
            self._give_up("the ranks' backward passes do not match: in this step they have sent different numbers of gradients")

    def _give_up(self, words):
        self._ending = False
        raise BpsValueError(errno.EINVAL, f"{self.prefix.rstrip('.')}: {words}")

    @_client.as_remembered
    def _difference(self):
        return _notes.difference(_ops.Handle(_ops.allgather_object(self._describe(), f"{self.prefix}slots")).wait())

    def _describe(self):
        return [self._settings(), *(slot.describe() for slot in self.slots)]

    def _agree(self):
        """Where slots have changed, the ranks have to say so before anything of the new ones is waited for."""
        if self._digest is not None:
            return
        self._digest = digest = _notes.digest_of(self._describe())
        if digest == self._notes.digest:
            return
        if self._notes.digest is not None and self._sends_notes():
            self._note = self._notes.send(True, 0, digest=digest)
            error = self._hear()
            if error is not None:
                raise error
        self._notes.agree_on(digest, len(self.slots))

    @_client.as_remembered
    def _sends_notes(self):
        """With a quorum nobody waits for all ranks, as notes do."""
        return not _client.current().quorum

    def _may_put_off(self):
        """Whether nobody is to wait on the host, nor wants to know the note's answer now."""
        return all(
            bucket.slots[0].rows is None
            and bucket.wire is not None
            and _devices.device_of(bucket.wire)
            and not any(slot.absent for slot in bucket.slots)
            for bucket in self.buckets
        )

    def _read_put_off(self):
        """By now the others have most likely sent theirs."""
        note, self._put_off = self._put_off, None
        if note is not None:
            note.wait()
            note.check()
            self._take_answer()

    def _is_used(self, slot):
        """Whether some rank has this gradient, which this one has not."""
        self._hear()
        return self._answer is None or bool(self._answer.used[self.slots.index(slot)])

    # -- The end of training

    @_client.as_remembered
    def join(self):
        """Adds nothing to the others' steps, until no rank trains any more."""
        if self.op not in (Reduction.SUM, Reduction.AVERAGE):
            raise ValueError(f"join() would add zeros to a {self.op.name.lower()}: it needs op=Average or op=Sum")
        if not self._sends_notes():
            raise ValueError("join() waits for all ranks, and this job goes on with a quorum of them")
        if self.under_way():
            raise AssertionError("join() between backward() and step(): gradients are on their way")
        self._read_put_off()
        for slot in self.slots:
            slot.parameter.grad = None
        self.zeroed()
        self.look()
        self._agree()
        while True:
            each_step = self.each_step and self.each_step()
            if each_step is not None:
                each_step()
            if self._contribute_nothing().last is None:
                break
            self.n_joined += 1

    def last_to_train(self):
        """After join(): the highest rank that took part in the last step, which all ranks know alike."""
        return _client.current().size - 1 if self.last_active is None else self.last_active

    @torch.no_grad()
    def _contribute_nothing(self):
        """A step of a rank that has joined. Returns the answer."""
        for bucket in self.buckets:
            self._submit(bucket)
        note, self._sent = self._notes.send(False, self._sent), 0
        requests = [bucket.request for bucket in self.buckets] + [note]
        for bucket in self.buckets:
            bucket.request = None
        for slot in self.slots:
            slot.take_back()
        for request in requests:
            request.wait()
        for request in requests:
            request.check()
        self._take_answer()
        return self._answer


def _let_go_after_fork():
    for gradients in _live():
        gradients.let_go()


os.register_at_fork(after_in_child=_let_go_after_fork)


def _live():
    """Of all clients, those that are there."""
    return [gradients for made in list(_made.values()) for gradients in _live_of(made)]


def _live_of(made):
    """In an order that all ranks have alike."""
    return [gradients for gradients in (made[number]() for number in sorted(made)) if gradients]


def _changed(what):
    return BpsValueError(
        errno.EINVAL,
        f"{what} while it was under way, by a tensor over its memory: call synchronize() between backward() and such a change",
    )


def _left(deadline):
    """Seconds until then; None: there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _late(name, timeout):
    return BpsTimeoutError(errno.ETIMEDOUT, f"{name}: not complete after {timeout} s")


def join_all():
    """join() of everything that this process trains with, side by side: others may step them in any order. Beside, that of all
    other operations.

    Returns the highest rank that took part last.
    """
    if _made:
        gc.collect()  # so that all ranks find the same ones; it takes its time
    for gradients in _live():
        gradients.follow_job()
    live = [gradients for gradients in _live_of(_made.get(_client.current(), {})) if gradients.buckets]
    for gradients in live:
        gradients.take_put_off()
    errors, threads = [], []
    before = sum(gradients.n_joined for gradients in live)

    def run(gradients):
        try:
            gradients.join()
        except Exception as error:  # is raised by the thread that asked
            errors.append(error)

    def start():
        threads.extend(threading.Thread(target=run, args=(gradients,), daemon=True) for gradients in live)
        for thread in threads:
            thread.start()

    def is_busy():
        alive = any(thread.is_alive() for thread in threads)
        if errors:
            raise errors[0]
        return alive

    if _client.current().elastic:  # in which no rank follows the others
        start()
        for thread in threads:
            thread.join()
        is_busy()
        return max((gradients.last_to_train() for gradients in live), default=_client.current().size - 1)
    own = [f".{gradients.prefix}" for gradients in live]
    return _join.join(start, is_busy, own, lambda: sum(gradients.n_joined for gradients in live) - before)


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
