"""Operations as work of MXNet's engine: they wait for what they read, and readers of what they write wait for them.

An operation works on a Slot: an NDArray in memory that the daemon reaches. Copies into it and out of it are MXNet's
own, so they know every layout; between them is one piece of asynchronous work that submits to the daemon, on a thread
of the engine, and is completed by the client's completer. An operation that fails makes whoever reads its result fail,
with an MXNetError, and the next call of bps too, with the BpsError.
"""

import ctypes
import os
import threading

import mxnet
from mxnet.base import _LIB, check_call
from mxnet.ndarray.ndarray import DLDataType

import bps

from .. import _client
from .._buffers import Tensor
from .._completer import completer_of
from .._ops import Handle

_client.others_begin()


class _OnComplete(ctypes.Structure):
    """mxnet::engine::CallbackOnComplete. The engine's own is gone once the work has begun: copy its fields."""

    _fields_ = [("function", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("parameter", ctypes.c_void_p)]


class _Context(ctypes.Structure):
    """mxnet::Context"""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int32)]


_Work = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(_OnComplete), ctypes.c_void_p)
_Complete = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_CPU = _Context(1, 0)

DLDataType.TYPE_MAP.setdefault("int8", (0, 8, 1))  # which from_numpy() has forgotten

# An error for the engine is a dmlc::Error, which is a std::runtime_error and nothing more.
_make_error = ctypes.CDLL("libstdc++.so.6")["_ZNSt13runtime_errorC1EPKc"]
_make_error.restype, _make_error.argtypes = None, [ctypes.c_void_p, ctypes.c_char_p]
_destroy_error = ctypes.CDLL("libstdc++.so.6")["_ZNSt13runtime_errorD1Ev"]
_destroy_error.restype, _destroy_error.argtypes = None, [ctypes.c_void_p]


class _Task:
    """One piece of work, from push() until the engine has been told that it is complete."""

    def __init__(self, start, keep):
        self.start = start
        self.keep = keep

    def run(self, on_complete):
        self.function, self.engine, self.parameter = on_complete.function, on_complete.engine, on_complete.parameter
        try:
            completer_of(_client.current()).add(Handle(self.start()), self)
        except Exception as error:  # whoever reads the result has to hear of it
            self.set_result((None, error))

    def set_result(self, outcome):
        """What a completer calls."""
        global _failure
        _, error = outcome
        memory = None
        if error is not None:
            _failure = error
            memory = (ctypes.c_void_p * 8)()
            _make_error(memory, str(error).encode())
        _Complete(self.function)(self.engine, self.parameter, memory)
        if memory is not None:
            _destroy_error(memory)
        with _changed:
            _tasks.pop(id(self), None)
            _changed.notify_all()


_changed = threading.Condition()
_tasks = {}  # under _changed: what the engine has not been told of yet
_slots = {}
_failure = None


@_Work
def _work(_, on_complete, key):
    with _changed:
        task = _tasks[key]
    task.run(on_complete.contents)


def push(slot, start, priority=0):
    """Has the engine call start(), which gives the steps of a Handle, once slot.array may be written."""
    task = _Task(start, slot)
    with _changed:
        _tasks[id(task)] = task
    writes = (ctypes.c_void_p * 1)(slot.array.handle)
    try:
        check_call(
            _LIB.MXEnginePushAsyncND(
                _work,
                ctypes.c_void_p(id(task)),
                None,
                ctypes.byref(_CPU),
                None,
                ctypes.c_int(0),
                writes,
                ctypes.c_int(1),
                None,
                ctypes.c_int(priority),
                b"bps",
                ctypes.c_bool(False),
            )
        )
    except BaseException:
        with _changed:
            _tasks.pop(id(task), None)
        raise


class Slot:
    """Memory that the daemon reaches, as an NDArray. The engine orders those who use it; ranks do so in one order."""

    def __init__(self, size, dtype):
        self.client = _client.current()
        self.memory = bps.zeros(size, dtype)
        self.span = Tensor(self.memory, writable=True).span
        self.array = mxnet.nd.from_numpy(self.memory, zero_copy=True)


def slot_of(name, size, dtype):
    """The slot of a tensor's name, flat: arrays of other shapes under the name have it in turn, in the program's order.

    Another type or size under the same name gets another, which the daemon refuses.
    """
    key = name, size, str(dtype)
    slot = _slots.get(key)
    if slot is None or slot.client is not _client.current():
        slot = _slots[key] = Slot(size, dtype)
    return slot


def raise_failure():
    """Raises the failure of an operation that has come meanwhile, once."""
    global _failure
    error, _failure = _failure, None
    if error is not None:
        raise error


def drain():
    """Returns when the engine has been told of every operation. Each has its deadline."""
    with _changed:
        while _tasks:
            _changed.wait(1.0)


def _forget_after_fork():
    global _changed, _failure
    _changed = threading.Condition()
    _tasks.clear()
    _slots.clear()
    _failure = None


# MXNet stops its engine around a fork, while the forking thread has the interpreter's lock: an operation under way
# would never end.
os.register_at_fork(before=drain, after_in_child=_forget_after_fork)
