"""A double of torchcomms: what a backend in Python is called with, and what becomes of what it returns.

After TorchCommBackendPy.cpp and TorchComm.cpp of torchcomms, whose package on PyPI is empty.
"""

import enum
import importlib.metadata
from datetime import timedelta

_backends = {}


class RedOpType(enum.Enum):
    SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM, AVG = range(9)


class ReduceOp:
    def __init__(self, type):
        self._type = type

    @property
    def type(self):
        return self._type

    @staticmethod
    def PREMUL_SUM(factor):
        return ReduceOp(RedOpType.PREMUL_SUM)


for each in RedOpType:
    if each is not RedOpType.PREMUL_SUM:
        setattr(ReduceOp, each.name, ReduceOp(each))


class CommOptions:
    def __init__(self):
        self.timeout = timedelta(seconds=600)
        self.store = None


class TorchCommBackend:
    pass


class TorchWork:
    def __init__(self, work):
        self._work = work
        self._completed = work is None

    def wait(self):
        if not self._completed:
            self._work.wait()
            self._completed = True

    def is_completed(self):
        return self._completed


class TorchComm:
    def __init__(self, backend):
        self._backend = backend

    def split(self, ranks, name):
        part = self._backend.split(ranks, name, CommOptions())
        return None if part is None else TorchComm(part)

    def get_backend(self):
        return self._backend.get_backend_name()

    def get_name(self):
        return self._backend.get_comm_name()


def _passed_on(name):
    return lambda self, *arguments: getattr(self._backend, name)(*arguments)


def _collective(name):
    return lambda self, *arguments, async_op: TorchWork(getattr(self._backend, name)(*arguments, async_op))


for name in ("finalize", "get_rank", "get_size", "set_timeout"):
    setattr(TorchComm, name, _passed_on(name))
for name in (
    "send", "recv", "broadcast", "all_reduce", "reduce", "all_gather", "all_gather_v", "all_gather_single", "reduce_scatter",
    "reduce_scatter_v", "reduce_scatter_single", "all_to_all_single", "all_to_all_v_single", "all_to_all", "barrier", "scatter", "gather",
):  # fmt: skip
    setattr(TorchComm, name, _collective(name))


def register_backend(name, backend_class):
    _backends[name] = backend_class


def new_comm(backend, device, name, store=None):
    if backend not in _backends:
        next(iter(importlib.metadata.entry_points(group="torchcomms.backends", name=backend))).load()
    options = CommOptions()
    options.store = store
    made = _backends[backend]()
    made.init(device, name, options)
    return TorchComm(made)
