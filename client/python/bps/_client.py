"""The process's connection to its daemon: one Client, made by init(), ended by shutdown() or at exit.

Who locks what. Client.lock is held for every call into the library that does not block, so that shutdown() can know that
nobody is inside. A thread that waits for a request, or submits memory of a device (CUDA blocks while a stream's queue is
full), holds no lock; it is counted in Client.inside instead. Who waits looks up every SLICE_MS, which is also what lets
Ctrl-C through.

A request on memory of a device is not waited for: a stream is made to (DeviceRequest). How it ended is then known later, and
raised by the next call. Until then it is among Client.late, and a thread looks from time to time whether the daemon still lives,
because a stream that waits for a daemon that is gone has to be told, also when everybody else is waiting for that stream.
"""

import atexit
import collections
import contextlib
import ctypes
import errno
import functools
import itertools
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref

from ._errors import (
    BpsCanceledError,
    BpsConnectionError,
    BpsError,
    BpsNotInitializedError,
    BpsValueError,
    error_from,
)
from ._library import (
    VARIABLE,
    Begun,
    DType,
    JoinParams,
    Memory,
    OpenParams,
    Operation,
    Order,
    Outcome,
    SubmitParams,
    last_error,
    library,
)

SLICE_MS = 200  # how long a signal handler of Python waits for its turn, at most
SLICES_BLOCKED = 16  # after which a daemon that has begun anew hears once more in what this process is blocked
CLOSE_TIMEOUT_S = 2.0  # for other threads to notice shutdown(): ten slices
WATCH_NAME = "bps-cuda"  # of the thread that does; it begins nothing
WATCH_S = 0.5  # between two looks at the daemon, while streams wait for it
ALL = object()  # of begun()
MAX_DIMENSIONS = 8  # that the name of a tensor tells one by one
TENSORS_KEPT = 8192  # names of operations that are held at least; those before them the daemon may forget


def shape_text(shape):
    """Of a shape that all ranks are to have alike: 2x3. A number is an array of one."""
    if len(shape) > MAX_DIMENSIONS:
        return f"{len(shape)}d.{math.prod(shape)}"
    return "x".join(map(str, shape)) or "1"


def milliseconds(seconds):
    return 0 if seconds is None else max(1, int(seconds * 1000))


_others_begin = False


def others_begin():
    """For adapters of frameworks that begin operations in threads of which Python does not know."""
    global _others_begin
    _others_begin = True


def _is_alone():
    """Whether nothing begins in this process while this thread waits: no other thread is there, and no signal's handler."""
    if _others_begin or threading.get_ident() != threading.main_thread().ident:
        return False
    if sum(thread.name != WATCH_NAME for thread in threading.enumerate()) > 1:
        return False
    own = (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, None)
    return all(signal.getsignal(number) in own for number in signal.valid_signals())


class Request:
    """One submitted operation. Keeps what it works on alive until it has ended."""

    # What most have not is of the class: there are thousands in a step.
    __slots__ = ("_client", "_pointer", "_keep", "_ended", "_by_rows", "__dict__", "__weakref__")
    _waiters = 0
    error = None
    rows = None  # of the result of a push_pull_rows, once it has ended
    came = None  # of an elastic job, once it has ended: its Outcome
    turn = None  # of the first of several requests: their name

    def __init__(self, client, pointer, keep, by_rows=False):
        self._client = client
        self._pointer = pointer
        self._keep = keep
        self._ended = False
        self._by_rows = by_rows

    def poll(self):
        """Whether it has ended, well or not."""
        if self._ended:
            return True
        client = self._client
        client.check_process()
        with client.mutex:
            return self._look()

    def wait(self, timeout=None):
        """Waits until it has ended; False when timeout (in seconds) passed before."""
        if self.poll():
            return True
        client = self._client
        with client.lock:
            if self._ended:
                return True
            client.inside += 1
            self._waiters += 1
        status, text = -errno.ETIMEDOUT, ""
        try:
            status, text = self._wait_sliced(None if timeout is None else time.monotonic() + timeout)
        except BaseException:
            client.lib.bps_request_blocked(self._pointer, False)
            raise
        finally:
            with client.lock:
                client.inside -= 1
                self._waiters -= 1
                self._settle(status, text)
                client.lock.notify_all()
        return self._ended

    def check(self):
        """Raises how an ended request failed; nothing if it went well."""
        error = self.outcome()
        if error is not None:
            raise error

    def outcome(self):
        """How an ended request failed, for the one who tells it; None if it went well, or nobody knows yet."""
        return self.error

    def cancel(self):
        """Gives up a request that still waits for other ranks; it then ends with BpsCanceledError."""
        client = self._client
        client.check_process()  # before the lock, which another thread may have held at the fork
        with client.lock:
            if not self._ended:
                client.call(client.lib.bps_request_cancel, self._pointer)

    def _wait_sliced(self, deadline):
        client, lib = self._client, self._client.lib
        tells_at = 0
        for n in itertools.count():
            slice_ms = SLICE_MS
            if deadline is not None:
                slice_ms = min(SLICE_MS, max(0, int((deadline - time.monotonic()) * 1000)))
            status = self._wait_once(lib, slice_ms)
            if status != -errno.ETIMEDOUT:
                return status, last_error(lib) if status else ""
            if client.closing:
                raise BpsCanceledError(errno.ECANCELED, "bps is shutting down")
            if deadline is not None and time.monotonic() >= deadline:
                return status, ""
            if deadline is None and n >= tells_at and _is_alone():
                lib.bps_request_blocked(self._pointer, True)
                tells_at = n + SLICES_BLOCKED

    wait_on_host = wait

    def _wait_once(self, lib, slice_ms):
        return lib.bps_request_wait(self._pointer, slice_ms)

    def _look(self):
        """Under the lock: sees to the end of a request that is complete."""
        if not self._ended and self._client.lib.bps_request_poll(self._pointer) != 0:
            status = self._client.lib.bps_request_wait(self._pointer, 0)
            self._settle(status, last_error(self._client.lib) if status else "")
        return self._ended

    def _settle(self, status, text):
        """Under the lock: takes the outcome, and releases the request unless another thread waits in it."""
        if status != -errno.ETIMEDOUT and not self._ended:
            if status:
                self.error = error_from(status, text)
            if self._by_rows:
                rows = ctypes.c_uint64()
                if self._client.lib.bps_request_rows(self._pointer, ctypes.byref(rows)) == 0:
                    self.rows = rows.value
            if self._client.elastic:
                self.came = self._client.see_outcome(self._pointer)
            self._ended = True
        if self._ended and not self._waiters and self._pointer is not None:
            self._client.lib.bps_request_free(self._pointer)
            self._pointer = self._keep = None
            self._client.outstanding.pop(self, None)


class DeviceRequest(Request):
    """One on memory of a device. wait() makes the stream that is current wait, and returns; how it ends is seen later, by
    Client.settle_late(). Where no stream can wait (the memory is copied through the host's) wait() does.
    """

    __slots__ = ("_device", "_streamed", "_refused")

    def __init__(self, client, pointer, keep, device):
        super().__init__(client, pointer, keep)
        self._device = device
        self._streamed = False  # some stream waits
        self._refused = None  # why the last wait() could not make one

    def wait(self, timeout=None):
        self._refused = None
        ended = super().wait(timeout)
        if self._refused is not None:
            raise self._refused
        return ended or self._streamed

    def wait_on_host(self, timeout=None):
        """Waits until it has ended, as for any other."""
        self._device = None
        return super().wait(timeout)

    def outcome(self):
        """Then no later call raises it."""
        with self._client.lock:
            if self.error is not None:
                self._client.forget_late(self)
            return self.error

    def _wait_once(self, lib, slice_ms):
        if self._device is None:
            return super()._wait_once(lib, slice_ms)
        return lib.bps_request_wait_stream(self._pointer, self._device.stream(), slice_ms)

    def _settle(self, status, text):
        """Also of a wait that only a stream has begun, or that CUDA has refused: then the request is still under way."""
        client = self._client
        under_way = not self._ended and self._pointer is not None and not client.closed
        if under_way and status != -errno.ETIMEDOUT:
            if client.lib.bps_request_poll(self._pointer) == 0:
                if status:
                    self._refused = error_from(status, text)
                elif not self._streamed:
                    self._streamed = True
                    client.add_late(self)
                return
            # It may have ended since the stream was made to wait, which says nothing of how.
            status = client.lib.bps_request_wait(self._pointer, 0)
            text = last_error(client.lib) if status else ""
        super()._settle(status, text)


class _Watch:
    """The thread that looks whether a daemon lives for which streams wait. It sleeps while none does."""

    def __init__(self, client):
        self._client = client
        self._changed = threading.Condition()
        self._stopping = False  # under the condition
        self._thread = threading.Thread(target=self._run, name=WATCH_NAME, daemon=True)
        self._thread.start()

    def wake(self):
        with self._changed:
            self._changed.notify_all()

    def stop(self):
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self):
        client = self._client
        while True:
            with self._changed:
                while not client.late and not self._stopping:
                    self._changed.wait()
                if not self._stopping:
                    self._changed.wait(WATCH_S)
                if self._stopping:
                    return
            client.dispatch()
            with client.lock:
                client.settle_late()


class Arena:
    """A piece of memory that the daemon reads and writes where it is. buffer is a ctypes array over it and keeps it."""

    def __init__(self, client, size):
        self._client = client
        self._pointer = None
        memory = ctypes.c_void_p()
        with client.lock:
            client.check_open()
            client.free_dropped()
            client.call(client.lib.bps_memory_alloc, client.pointer, max(1, size), ctypes.byref(memory))
        self._pointer = memory.value
        self.address = client.lib.bps_memory_data(self._pointer)

    @classmethod
    def buffer(cls, client, size):
        arena = cls(client, size)
        buffer = (ctypes.c_char * size).from_address(arena.address)
        buffer.arena = arena  # who views the buffer keeps the arena
        return buffer

    def __del__(self):
        if self._pointer is not None:
            self._client.drop(self._client.lib.bps_memory_free, self._pointer)


class Tensor:
    """A tensor that was declared; ctypes passes its pointer. While it is here the daemon does not forget the name."""

    __slots__ = ("_as_parameter_", "_client", "dtype", "elements", "shape")

    def __init__(self, client, pointer, dtype, elements, shape):
        self._as_parameter_ = pointer
        self._client = client
        self.dtype = dtype
        self.elements = elements
        self.shape = shape  # None: it fits all

    def fits(self, dtype, elements, shape):
        alike = shape is None or self.shape is None or self.shape == shape
        return alike and self.elements == elements and self.dtype == dtype

    def __del__(self):
        self._client.drop(self._client.lib.bps_tensor_free, self._as_parameter_)


class Client:
    """A rank of a job."""

    def __init__(self, lib, pointer):
        self.lib = lib
        self.pointer = pointer
        self.mutex = threading.RLock()  # the same lock, for where nobody is told: to take it takes a fifth of the time
        self.lock = threading.Condition(self.mutex)
        self.inside = 0  # threads that wait in the library
        self.closing = False
        self.forked = False  # this process is a child of the one that the client belongs to
        self.tensors = {}  # name: Tensor, of those used last
        self._older_tensors = {}  # likewise, of those before
        self.dropped = collections.deque()  # (function of the library, pointer): what is to be freed
        self.turns = {}  # name: the last operation of more than one request that has not ended; it keeps those before
        self.orders = None  # the thread whose operations without names all ranks submit in one order: init()'s
        self.outstanding = {}  # requests in the order of their submission; the values are of no use
        self.completer = None  # under the lock: who watches requests for others; has a stop(), called at the end
        self.closed = False  # the library's client is gone
        self.late = {}  # under the lock: requests that a stream waits for, in order; the values are of no use
        self.late_error = None  # under the lock: the first failure of those that nobody has been told
        self._watch = None  # under the lock
        self._rank = self._size = self.local_rank = self.local_size = self.node = 0
        self.n_nodes = 1
        self.elastic = False
        self.layout_size = 0  # of an elastic job: ranks when they last regrouped
        self.asynchronous = False  # the job has accumulate()
        self.quorum = 0  # ranks that push_pull goes on with; 0: all
        self.opening = self.joining = None  # the OpenParams with which it was connected, the JoinParams of its job
        self.process_set = 0  # whose client it is, by its number; 0: that of all ranks
        self.ranks = None  # of a process set: its ranks' numbers among all ranks
        _clients.add(self)

    # -- Calls

    def join(self, params):
        """Becomes a rank of a job; blocks until all its ranks have come."""
        self.call(self.lib.bps_client_join, self.pointer, ctypes.byref(params))
        self.joining = params
        self.elastic = bool(params.elastic)
        self._learn_place()
        if params.newcomer:
            _tell_launcher()
        # As libbps_client fills in what was not given.
        self.n_nodes = params.n_nodes or max(1, self.size // (params.local_size or self.size))
        self.asynchronous = bool(params.asynchronous)
        self.quorum = params.quorum

    def _learn_place(self):
        for what in ("local_rank", "local_size", "node"):
            setattr(self, what, self.call(getattr(self.lib, f"bps_client_{what}"), self.pointer))
        self._learn_membership()
        self.layout_size = self._size

    def _learn_membership(self):
        self._rank = self.call(self.lib.bps_client_rank, self.pointer)
        self._size = self.call(self.lib.bps_client_size, self.pointer)

    @property
    def rank(self):
        self._follow()
        return self._rank

    @property
    def size(self):
        self._follow()
        return self._size

    def number_of(self, root):
        """The number here of a rank that is named as root: in a process set, by its number among all ranks."""
        ranks = range(self.size) if self.ranks is None else self.ranks
        if root not in ranks:
            which = f"{self.size} ranks" if self.ranks is None else f"ranks {self.ranks} of the process set"
            raise BpsValueError(errno.EINVAL, f"root rank {root} is not one of the {which}")
        return ranks.index(root)

    def _follow(self):
        """Of an elastic job rank and size change with any operation that is seen complete, also by an adapter's native code."""
        if self.elastic and not self.forked:
            with self.lock:
                if not self.closing:
                    self._learn_membership()

    def see_outcome(self, request):
        """Under the lock: who came to an operation of an elastic job. rank and size are then what it says, or later."""
        outcome = Outcome(ctypes.sizeof(Outcome))
        if self.lib.bps_request_outcome(request, ctypes.byref(outcome)) or not outcome.membership:
            return None
        return outcome

    def regroup(self):
        """Of an elastic job: every rank calls it at one place of the program. Newcomers are in the job then. What is under
        way of an operation that has failed is given up before.
        """
        with self.lock:
            left = list(self.outstanding)
        for request in left:
            request.cancel()
        for request in left:
            request.wait_on_host()
        with self.lock:
            self.check_open()
            self.inside += 1
        status, text = self._call_inside(self.lib.bps_client_regroup, self.pointer)
        if status:
            raise error_from(status, text)
        with self.lock:
            self._learn_place()

    def call(self, function, *arguments):
        status = function(*arguments)
        if status < 0:
            raise error_from(status, last_error(self.lib))
        return status

    def check_process(self):
        if self.forked:
            raise BpsError(errno.EPERM, "this belongs to the parent process; a child calls init() for itself")

    def check_open(self):
        self.check_process()
        if self.closing:
            raise BpsNotInitializedError(errno.ENOTCONN, "bps was shut down")

    def declare(self, name, dtype, elements, shape=None):
        """What had the name first keeps it; of another type, size or shape it is another tensor. All ranks decide alike: what
        one of them still has is forgotten on none. shape: None: that of others.
        """
        while True:
            tensor = self.tensors.get(name) or self._declare(name, dtype, elements, shape)
            if tensor is not None and tensor.fits(dtype, elements, shape):
                return tensor
            text = "any" if elements == VARIABLE else shape_text((elements,) if shape is None else shape)
            name = f"{name}.{DType(dtype).name.lower()}.{text}"

    def _declare(self, name, dtype, elements, shape):
        """None: the library has the name with another type, size or shape."""
        with self.lock:
            tensor = self._older_tensors.pop(name, None)
            if tensor is None:
                self.check_open()
                pointer = ctypes.c_void_p()
                named = self.pointer, name.encode(), dtype
                try:
                    if shape is None:
                        self.call(self.lib.bps_tensor_declare, *named, elements, ctypes.byref(pointer))
                    else:
                        dims = (ctypes.c_uint64 * len(shape))(*shape)
                        self.call(self.lib.bps_tensor_declare_shaped, *named, dims, len(shape), ctypes.byref(pointer))
                except BpsError as error:
                    if error.errno != errno.EEXIST:
                        raise
                    return None
                tensor = Tensor(self, pointer.value, dtype, elements, shape)
            if len(self.tensors) >= TENSORS_KEPT:
                self._older_tensors, self.tensors = self.tensors, {}
            self.tensors[name] = tensor
        return tensor

    def orders_here(self):
        """Whether operations that this thread begins without names have one order on all ranks, Order.CALLS."""
        return self.orders == threading.get_ident()

    def take_ordinal(self, order=Order.CALLS):
        """The place in an order of what is submitted later, by another thread. 0 in an elastic job."""
        ordinal = ctypes.c_uint64()
        with self.mutex:
            self.check_open()
            self.call(self.lib.bps_client_take_ordinal, self.pointer, order, ctypes.byref(ordinal))
        return ordinal.value

    def skip_ordinals(self, order, place, last):
        """What comes next in an order, of which place was taken here, has a place behind last."""
        while place < last:
            place = self.take_ordinal(order)

    def differed(self, order=Order.CALLS):
        """The last place in an order at which ranks have differed; 0: none."""
        self.check_process()  # before the lock, which another thread may have held at the fork
        with self.mutex:
            self.check_open()
            return self.lib.bps_client_differed(self.pointer, order)

    # -- Memory

    def drop(self, free, pointer):
        """Frees what belonged to an object that is gone, now or in a later call. For finalizers: the garbage collector runs them in
        whichever thread asks for memory, which may be one that the holder of the lock waits for. So they wait for no lock.
        """
        if self.forked:
            return
        self.dropped.append((free, pointer))
        if self.mutex.acquire(blocking=False):
            try:
                self.free_dropped()
            finally:
                self.mutex.release()

    def free_dropped(self):
        """Under the lock."""
        with contextlib.suppress(IndexError):  # a finalizer in the middle may have been faster
            while self.dropped:
                free, pointer = self.dropped.popleft()
                free(pointer)

    # -- Following the other ranks

    def follow(self, follows, idle=False):
        """bps_client_follow()."""
        with self.lock:
            self.check_open()
            self.inside += 1
        status, text = self._call_inside(self.lib.bps_client_follow, self.pointer, follows, idle)
        if status:
            raise error_from(status, text)

    def begun(self, timeout_ms):
        """bps_client_begun(): a Begun; ALL: nothing will come, as all ranks follow; None: nothing has come."""
        begun = Begun(ctypes.sizeof(Begun))
        with self.lock:
            self.check_open()
            self.inside += 1
        status, text = self._call_inside(self.lib.bps_client_begun, self.pointer, timeout_ms, ctypes.byref(begun))
        if status == -errno.ETIMEDOUT:
            return None
        if status < 0:
            raise error_from(status, text)
        return begun if status else ALL

    def is_busy(self):
        """Whether something is under way that was submitted from here."""
        with self.lock:
            self.sweep()
            return bool(self.outstanding)

    def submit(self, tensor, params, keep, device=None, stream=None):
        """device: whose memory input and output are, which has stream(): the handle of the one that is current there."""
        params.size = ctypes.sizeof(SubmitParams)
        if device is not None:
            params.memory, params.stream = Memory.CUDA, device.stream() if stream is None else stream
        by_rows = params.operation == Operation.PUSH_PULL_ROWS
        arguments = (self.lib.bps_submit, tensor, ctypes.byref(params))
        request = self._start(keep, *arguments, by_rows=by_rows, device=device)
        if device is not None:
            self.warn()
        return request

    def prepared(self, tensor, params, keep):
        """A function that submits the same, in memory of the host, each time that it is called."""
        params.size = ctypes.sizeof(SubmitParams)
        start, submit, reference = self._start, self.lib.bps_submit, ctypes.byref(params)
        return lambda: start(keep, submit, tensor, reference)

    def warn(self):
        """Says what the library does otherwise than one may expect, which it tells once."""
        while (notice := self.lib.bps_client_notice(self.pointer)) is not None:
            warnings.warn(f"bps: {notice.decode(errors='replace')}", stacklevel=4)

    def barrier(self, timeout=None):
        return self._start(None, self.lib.bps_barrier, self.pointer, milliseconds(timeout))

    def _start(self, keep, function, *arguments, by_rows=False, device=None):
        pointer = ctypes.c_void_p()
        while True:
            with self.mutex:
                self.check_open()
                if self.dropped:
                    self.free_dropped()
                if self.late or self.late_error is not None:
                    self.raise_late()
                if device is None:
                    status = function(*arguments, ctypes.byref(pointer))
                    if status == 0:
                        return self._started(Request(self, pointer.value, keep, by_rows))
                    text = last_error(self.lib)
                else:
                    self.inside += 1
            if device is not None:
                status, text = self._call_inside(function, *arguments, ctypes.byref(pointer))
            with self.mutex:
                if status == 0:
                    if by_rows:
                        return self._started(Request(self, pointer.value, keep, by_rows))
                    return self._started(DeviceRequest(self, pointer.value, keep, device))
                error = error_from(status, text)
                oldest = next(iter(self.outstanding), None)
                swept = self.sweep() if status == -errno.EAGAIN else 0
            if status != -errno.EAGAIN or oldest is None:
                raise error
            if not swept:
                oldest.wait_on_host()

    def _started(self, request):
        """Under the lock."""
        self.outstanding[request] = None
        return request

    def _call_inside(self, function, *arguments):
        """Of one that is counted in inside already, which ends with it. (status, why)"""
        try:
            status = function(*arguments)
            return status, last_error(self.lib) if status else ""
        finally:
            with self.lock:
                self.inside -= 1
                self.lock.notify_all()

    def dispatch(self):
        """Sees to what has come; a lost daemon ends the requests, which say so."""
        with self.lock:
            if self.closing or self.pointer is None:
                return
            self.free_dropped()
            self.inside += 1
        self._call_inside(self.lib.bps_client_dispatch, self.pointer)

    # -- Requests that a stream waits for

    def add_late(self, request):
        """Under the lock. Also one that nobody waits for now, but other ranks do."""
        self.late[request] = None
        if self._watch is None:
            self._watch = _Watch(self)
        elif len(self.late) == 1:
            self._watch.wake()

    def settle_late(self):
        """Under the lock: releases those that have ended, from the oldest on, and keeps the first failure."""
        while self.late:
            request = next(iter(self.late))
            if not request._look():
                return
            del self.late[request]
            self.late_error = self.late_error or request.error

    def forget_late(self, request):
        """Under the lock: its failure has been told."""
        self.late.pop(request, None)
        if self.late_error is request.error:
            self.late_error = None

    def raise_late(self):
        """Under the lock: raises how a request failed for which a stream has waited, and nobody else; once."""
        self.settle_late()
        error, self.late_error = self.late_error, None
        if error is not None:
            raise error

    def _await_late(self):
        """Before the end. What other ranks wait for as well must not be given up; each has its own deadline."""
        while True:
            with self.lock:
                self.settle_late()
                request = next(iter(self.late), None)
            if request is None:
                return
            request.wait_on_host(SLICE_MS / 1000)

    def sweep(self):
        """Under the lock: releases requests that have ended, among them those that nobody waits for. How many."""
        before = len(self.outstanding)
        for request in list(self.outstanding):
            request._look()
        return before - len(self.outstanding)

    # -- End

    def close(self):
        if not self.closing:
            self._await_late()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with self.lock:
            if self.closing:
                return
            self.closing = True
            self.free_dropped()
            self.sweep()
            watch, late_error = self._watch, self.late_error
        if watch is not None:
            watch.stop()  # without the lock, which its thread takes
        if late_error is not None:
            warnings.warn(f"bps: an operation failed that a stream had waited for: {late_error}", stacklevel=3)
        if self.completer is not None:
            self.completer.stop()  # without the lock, which its thread takes
        with self.lock:
            while self.inside and time.monotonic() < deadline:
                self.lock.wait(SLICE_MS / 1000)
            if self.inside:
                return  # a thread is stuck in the library: closing under its feet would crash, exiting will not
            error = _what_ends_the_process()
            if error:
                self.lib.bps_client_abort(self.pointer, error.encode())
            else:
                self.lib.bps_client_close(self.pointer)
            self.closed = True
            for request in list(self.outstanding):
                request._settle(-errno.ECANCELED, "bps was shut down before it was complete")
            self.turns.clear()
            self.tensors.clear()
            self._older_tensors.clear()
            self.free_dropped()
            self.pointer = None


def _what_ends_the_process():
    """The exception, in a line, that the interpreter has shown, having run the program to its end; or ""."""
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1") or threading.main_thread().is_alive():
        return ""
    text = traceback.format_exception_only(type(error), error)[-1].splitlines()[0]
    return "".join(c if c.isprintable() else " " for c in text)


_clients = weakref.WeakSet()
_current = None
_chosen = threading.local()  # client: of the process set over whose ranks this thread begins operations; see using()
_of_sets = []  # clients of process sets
_at_shutdown = []  # what is to be called after the client is closed
_init_lock = threading.RLock()  # a signal handler may call shutdown()


def _forget_after_fork():
    global _current, _init_lock
    _current = _chosen.client = None
    _of_sets.clear()
    _init_lock = threading.RLock()
    for client in list(_clients):
        client.forked = True


os.register_at_fork(after_in_child=_forget_after_fork)


def current():
    """The client of this process, or of the process set over whose ranks this thread begins operations."""
    client = getattr(_chosen, "client", None) or _current
    if client is None:
        raise BpsNotInitializedError(errno.ENOTCONN, "bps is not initialized: call init() first")
    return client


def of_all_ranks():
    """The client of this process."""
    with using(None):
        return current()


@contextlib.contextmanager
def using(client):
    """What this thread begins meanwhile is over the ranks of this client; None: over all ranks."""
    before = getattr(_chosen, "client", None)
    _chosen.client = None if client is _current else client
    try:
        yield
    finally:
        _chosen.client = before


def process_set_here():
    """The client of the process set over whose ranks this thread begins operations; None: it does over all ranks."""
    return getattr(_chosen, "client", None)


def as_begun(function):
    """function, also later and in another thread, over the ranks over which this thread begins operations now."""
    client = process_set_here()

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with using(client):
            return function(*args, **kwargs)

    return wrapper


def remember(owner):
    """Notes over which ranks this thread begins operations now, for methods of owner that are as_remembered()."""
    owner.client = process_set_here()


def as_remembered(method):
    """method, over the ranks that remember() has noted of its first argument, in whatever thread."""

    @functools.wraps(method)
    def wrapper(owner, *args, **kwargs):
        if owner.client is None:
            return method(owner, *args, **kwargs)
        with using(owner.client):
            return method(owner, *args, **kwargs)

    return wrapper


def at_shutdown(function):
    """Calls function once when the process's client has been closed."""
    _at_shutdown.append(function)


def is_initialized():
    """Whether init() was called in this process, and shutdown() was not since."""
    return _current is not None


def _tell_launcher():
    """That a newcomer is in: by the descriptor that bpslaunch has opened for that."""
    text = os.environ.pop("BPS_JOINED_FD", "")
    if text.isdecimal():
        try:
            os.write(int(text), b"1")
            os.close(int(text))
        except OSError:
            pass  # of a parent, which has closed it


def open_client(params):
    """A Client that is connected to a daemon, but in no job."""
    lib, pointer = library(), ctypes.c_void_p()
    status = lib.bps_client_open(ctypes.byref(params), ctypes.byref(pointer))
    if status < 0:
        raise error_from(status, last_error(lib))
    client = Client(lib, pointer.value)
    client.opening = params
    return client


def run_interruptible(function):
    """Runs a call that blocks for long in a thread of its own, so that Ctrl-C ends the waiting for it."""
    outcome = []

    def run():
        try:
            outcome.append((function(), None))
        except BaseException as error:  # handed over to the thread that asked
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="bps-join", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(SLICE_MS / 1000)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


_JOIN_FIELDS = {
    "job": "job",
    "rank": "rank",
    "size": "world_size",
    "local_rank": "local_rank",
    "local_size": "local_size",
    "node": "node",
    "nodes": "n_nodes",
    "min_servers": "min_servers",
    "part_bytes": "part_bytes",
    "force_distributed": "force_distributed",
    "elastic": "elastic",
    "min_ranks": "min_ranks",
    "max_ranks": "max_ranks",
    "newcomer": "newcomer",
    "quorum": "quorum",
    "asynchronous": "asynchronous",
    "staleness": "staleness",
}


def _join_params(lib, secret, timeout, request_timeout, quorum_timeout, shape):
    params = JoinParams(size=ctypes.sizeof(JoinParams))
    # Who says which rank of how many it is does not ask a launcher, which may have started its parent.
    knows = shape.get("rank") is not None and shape.get("size") is not None
    read = lib.bps_join_params_from_settings if knows else lib.bps_join_params_from_environment
    status = read(ctypes.byref(params))
    if status < 0:
        raise error_from(status, last_error(lib))
    for name, value in shape.items():
        if name not in _JOIN_FIELDS:
            raise TypeError(f"init() has no argument {name!r}; there are: {', '.join(_JOIN_FIELDS)}")
        if value is not None:
            setattr(params, _JOIN_FIELDS[name], value.encode() if isinstance(value, str) else int(value))
    if secret is not None:
        secret = secret.encode() if isinstance(secret, str) else bytes(secret)
        params.secret = ctypes.cast(ctypes.c_char_p(secret), ctypes.c_void_p)
        params.secret_len = len(secret)
    if timeout is not None:
        params.timeout_ms = milliseconds(timeout)
    if request_timeout is not None:
        params.request_timeout_ms = milliseconds(request_timeout)
    if quorum_timeout is not None:
        params.quorum_timeout_ms = milliseconds(quorum_timeout)
    return params, secret


def _private_socket(params, where):
    """The socket of a daemon that the job's ranks start for themselves, or None: the usual one listens."""
    from . import _private_daemon  # only here, since few need it
    from ._launch.daemon import somebody_listens, usual_socket

    usual = os.fsdecode(where) if where is not None else os.environ.get("BPS_SOCKET") or usual_socket()
    if somebody_listens(usual):
        return None
    if params.n_nodes > 1 or 0 < params.local_size < params.world_size:
        raise BpsValueError(
            errno.EINVAL,
            f"no bps-daemon listens at {usual}, and one that is started for the job (start_daemon, BPS_START_DAEMON) serves one "
            f"machine; these are {params.n_nodes or 'several'}: run daemons as a cluster, or start the job with bpslaunch -H",
        )
    if not params.job and params.world_size <= 1:
        params.job = f"single-{os.getpid()}".encode()
    path = _private_daemon.join((params.job or b"default").decode())
    _at_shutdown.append(_private_daemon.leave)
    return os.fsencode(path)


def wants_daemon(start_daemon):
    if start_daemon is not None:
        return start_daemon
    text = os.environ.get("BPS_START_DAEMON") or "0"
    if text not in ("0", "1"):
        raise BpsValueError(errno.EINVAL, f'BPS_START_DAEMON is "{text}": 1 starts a daemon where none listens, 0 does not')
    return text == "1"


def no_daemon(error):
    """The same error, with what can be done."""
    if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
        return error
    ways = "set BPS_START_DAEMON=1, start the ranks by bpslaunch, or start one: systemctl start bps-daemon.socket"
    return type(error)(error.errno, f"{error.strerror}: {ways}")


_followers = []  # (opened, closing, whether for process sets too)
_init_arguments = {}  # of the last init()


def arguments_of_init():
    """What init() was last given."""
    return dict(_init_arguments)


def follow(opened, closing, sets=False):
    """Calls opened(client) when this process has a client, now or later, and closing(client) before one is closed.

    sets: also of the clients of process sets.
    For libraries that use the client from threads of their own: after closing() they must not.
    """
    with _init_lock:
        _followers.append((opened, closing, sets))
        for client in [_current, *(_of_sets if sets else ())]:
            if client is not None:
                opened(client)


def open_process_set(client):
    """Tells those that follow sets of the client of one."""
    with _init_lock:
        _of_sets.append(client)
        for opened, _, sets in _followers:
            if sets:
                opened(client)


def close_process_set(client):
    """Closes the client of a process set, which nobody uses any more."""
    with _init_lock:
        if client in _of_sets:
            _of_sets.remove(client)
            for _, closing, sets in _followers:
                if sets:
                    closing(client)
        client.close()


def init(
    socket=None,
    *,
    secret=None,
    timeout=None,
    request_timeout=None,
    connect_timeout=3.0,
    start_daemon=None,
    quorum_timeout=None,
    **shape,
):
    """Connects to the daemon of this machine and becomes a rank of a job; returns when all its ranks have come.

    Everything comes from the environment unless it is given: see libbps_client(3) for the variables. Times are in
    seconds. shape: job, rank, size, local_rank, local_size, node, nodes, min_servers, part_bytes, force_distributed, elastic,
    min_ranks, max_ranks, newcomer; with both rank and size, what a launcher has set is not read. start_daemon (or BPS_START_DAEMON=1): where no daemon listens,
    the first of a job's ranks starts one, which ends with the last; for jobs on one machine.
    quorum, quorum_timeout, asynchronous, staleness: what the job does about ranks that are late; see bps_python(7).
    Does nothing when it was called before.
    """
    global _current
    with _init_lock:
        if _current is not None:
            return
        _init_arguments.clear()
        _init_arguments.update(
            socket=socket,
            secret=secret,
            timeout=timeout,
            request_timeout=request_timeout,
            connect_timeout=connect_timeout,
            start_daemon=start_daemon,
            quorum_timeout=quorum_timeout,
            **shape,
        )
        lib = library()
        params, kept = _join_params(lib, secret, timeout, request_timeout, quorum_timeout, shape)
        where = os.fsencode(socket) if socket is not None else None
        if wants_daemon(start_daemon):
            where = _private_socket(params, where) or where
        opening = OpenParams(ctypes.sizeof(OpenParams), where, int(connect_timeout * 1000))

        def open_and_join():
            try:
                client = open_client(opening)
            except BpsConnectionError as error:
                raise no_daemon(error) from None
            try:
                client.join(params)
            except BaseException:
                client.close()
                raise
            return client

        client = run_interruptible(open_and_join)
        client.orders = threading.get_ident()
        del kept  # what params.secret pointed to
        try:
            for opened, _, _ in _followers:
                opened(client)
        except BaseException:
            client.close()
            raise
        _current = client


def shutdown():
    """Leaves the job and the daemon. What is not complete ends with BpsCanceledError. Happens by itself at exit."""
    global _current
    client, _current = _current, None
    if client is not None:
        for _, closing, _ in _followers:
            closing(client)
        client.close()
    while _at_shutdown:
        _at_shutdown.pop()()


atexit.register(shutdown)
