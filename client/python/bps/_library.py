"""libbps_client as ctypes sees it: which one it is, its structures and its functions. Repeats client/bps.h.

ctypes lets go of the interpreter lock for the length of every call, so a thread that waits in the library stops nobody.
"""

import _ctypes
import ctypes
import enum
import errno
import functools
import os
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

from ._errors import BpsUnsupportedError
from ._install import WAY_OUT, bundled, find

SONAME = "libbps_client.so.0"
VARIABLE = 2**64 - 1  # BPS_VARIABLE


class DType(enum.IntEnum):
    FLOAT64 = 1
    FLOAT32 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT64 = 5
    INT32 = 6
    INT16 = 7
    INT8 = 8
    UINT8 = 9
    BOOL = 10


SIZES = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class Operation(enum.IntEnum):
    PUSH_PULL = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_TO_ALL = 5
    BARRIER = 6
    PUSH_PULL_ROWS = 7
    ACCUMULATE = 8
    REFUSE = 9


class Order(enum.IntEnum):
    NONE = 0
    CALLS = 1
    PROGRAMS = 2


class Unavailable:
    """A reduction that other libraries have: programs may name it, and are told a way out when they use it."""

    def __init__(self, name, way_out):
        self.name = name
        self.way_out = way_out

    def __repr__(self):
        return self.name


class Reduction(enum.IntEnum):
    SUM = 1
    AVERAGE = 2
    MIN = 3
    MAX = 4

    @classmethod
    def _missing_(cls, value):
        if isinstance(value, Unavailable):
            raise BpsUnsupportedError(errno.EINVAL, f"op={value.name}: {value.way_out}")


class Memory(enum.IntEnum):
    HOST = 0
    CUDA = 1


class OpenParams(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("socket", c_char_p), ("timeout_ms", c_int64), ("restart_timeout_ms", c_int64)]


class JoinParams(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("job", c_char_p),
        ("secret", c_void_p),
        ("secret_len", c_size_t),
        ("rank", c_uint32),
        ("world_size", c_uint32),
        ("local_rank", c_uint32),
        ("local_size", c_uint32),
        ("node", c_uint32),
        ("n_nodes", c_uint32),
        ("timeout_ms", c_int64),
        ("request_timeout_ms", c_int64),
        ("min_servers", c_uint32),
        ("part_bytes", c_uint32),
        ("force_distributed", c_int),
        ("gpu_reduce", c_int),
        ("quorum", c_uint32),
        ("asynchronous", c_int),
        ("quorum_timeout_ms", c_int64),
        ("staleness", c_uint32),
        ("elastic", c_int),
        ("min_ranks", c_uint32),
        ("max_ranks", c_uint32),
        ("newcomer", c_int),
        ("gpu_roots", c_uint64),
    ]


class Outcome(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("membership", c_uint32),
        ("world_size", c_uint32),
        ("rank", c_uint32),
        ("n_came", c_uint32),
        ("n_waiting", c_uint32),
    ]


class Status(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("run", c_uint64),
        ("n_rounds", c_uint64),
        ("n_bytes", c_uint64),
        ("n_under_way", c_uint64),
        ("world_size", c_uint32),
        ("n_nodes", c_uint32),
        ("n_here", c_uint32),
        ("state", ctypes.c_char * 16),
        ("waiting_for", ctypes.c_char * 160),
        ("node", ctypes.c_char * 64),
        ("cluster", ctypes.c_char * 16),
    ]


class Begun(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", ctypes.c_char * 256),
        ("dtype", c_int),
        ("elements", c_uint64),
        ("round", c_uint64),
        ("operation", c_int),
        ("reduction", c_int),
    ]


class SubmitParams(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("operation", c_int),
        ("reduction", c_int),
        ("input", c_void_p),
        ("output", c_void_p),
        ("input_count", c_uint64),
        ("output_count", c_uint64),
        ("counts", POINTER(c_uint64)),
        ("receive_counts", POINTER(c_uint64)),
        ("root", c_uint32),
        ("priority", c_int32),
        ("timeout_ms", c_int64),
        ("width", c_uint64),
        ("input_rows", c_void_p),
        ("output_rows", c_void_p),
        ("memory", c_int),
        ("stream", c_void_p),
        ("all_ranks", c_int),
        ("ordinal", c_uint64),
        ("order", c_int),
        ("input_dtype", c_uint64),
        ("round", c_uint64),
    ]


# Objects of the library are plain addresses here (None for NULL).
_OUT = POINTER(c_void_p)
_PROTOTYPES = {
    "bps_error": (c_char_p, []),
    "bps_version": (c_char_p, []),
    "bps_client_open": (c_int, [POINTER(OpenParams), _OUT]),
    "bps_client_abort": (None, [c_void_p, c_char_p]),
    "bps_client_close": (None, [c_void_p]),
    "bps_client_fd": (c_int, [c_void_p]),
    "bps_client_dispatch": (c_int, [c_void_p]),
    "bps_client_notice": (c_char_p, [c_void_p]),
    "bps_join_params_from_environment": (c_int, [POINTER(JoinParams)]),
    "bps_join_params_from_settings": (c_int, [POINTER(JoinParams)]),
    "bps_client_join": (c_int, [c_void_p, POINTER(JoinParams)]),
    "bps_client_leave": (c_int, [c_void_p]),
    "bps_client_regroup": (c_int, [c_void_p]),
    "bps_client_status": (c_int, [c_void_p, POINTER(Status)]),
    "bps_client_follow": (c_int, [c_void_p, c_int, c_int]),
    "bps_client_begun": (c_int, [c_void_p, c_int64, POINTER(Begun)]),
    "bps_client_rank": (c_int, [c_void_p]),
    "bps_client_size": (c_int, [c_void_p]),
    "bps_client_local_rank": (c_int, [c_void_p]),
    "bps_client_local_size": (c_int, [c_void_p]),
    "bps_client_node": (c_int, [c_void_p]),
    "bps_memory_alloc": (c_int, [c_void_p, c_size_t, _OUT]),
    "bps_memory_import": (c_int, [c_void_p, c_int, c_void_p, c_size_t, _OUT]),
    "bps_memory_data": (c_void_p, [c_void_p]),
    "bps_memory_len": (c_size_t, [c_void_p]),
    "bps_memory_free": (None, [c_void_p]),
    "bps_cuda_release": (c_int, [c_void_p, c_void_p, c_size_t]),
    "bps_tensor_declare": (c_int, [c_void_p, c_char_p, c_int, c_uint64, _OUT]),
    "bps_tensor_declare_shaped": (c_int, [c_void_p, c_char_p, c_int, POINTER(c_uint64), c_uint, _OUT]),
    "bps_tensor_wait": (c_int, [c_void_p, c_int64]),
    "bps_tensor_free": (None, [c_void_p]),
    "bps_submit": (c_int, [c_void_p, POINTER(SubmitParams), _OUT]),
    "bps_barrier": (c_int, [c_void_p, c_int64, _OUT]),
    "bps_client_take_ordinal": (c_int, [c_void_p, c_int, POINTER(c_uint64)]),
    "bps_client_differed": (c_uint64, [c_void_p, c_int]),
    "bps_request_poll": (c_int, [c_void_p]),
    "bps_request_outcome": (c_int, [c_void_p, POINTER(Outcome)]),
    "bps_request_rows": (c_int, [c_void_p, POINTER(c_uint64)]),
    "bps_request_contributions": (c_int, [c_void_p, POINTER(c_uint64)]),
    "bps_request_wait": (c_int, [c_void_p, c_int64]),
    "bps_request_wait_stream": (c_int, [c_void_p, c_void_p, c_int64]),
    "bps_request_error": (c_char_p, [c_void_p]),
    "bps_request_blocked": (c_int, [c_void_p, c_int]),
    "bps_request_cancel": (c_int, [c_void_p]),
    "bps_request_free": (None, [c_void_p]),
}


class _Symbol(ctypes.Structure):
    """Dl_info, dladdr(3)."""

    _fields_ = [("file", c_char_p), ("base", c_void_p), ("name", c_char_p), ("address", c_void_p)]


def _ask(name):
    """The library that the system's loader finds, for find()."""
    try:
        lib = ctypes.CDLL(name)
    except OSError as error:
        return None if str(error).startswith(f"{name}: cannot open") else (name, None, f"cannot be loaded: {error}")
    # What frameworks load needs a libbps_client by its soname, and the loader gives it the first that this process has loaded
    # under that, whoever loaded it: a library that is passed over must not stay. Nothing of this one does, as it starts
    # no thread, and registers what fork() calls only when a client is opened.
    try:
        missing = [function for function in _PROTOTYPES if not hasattr(lib, function)]
        symbol = _Symbol()
        ctypes.CDLL(None).dladdr(lib.bps_version, ctypes.byref(symbol))
        lib.bps_version.restype = c_char_p
        version = lib.bps_version().decode()
        return os.fsdecode(symbol.file), version, f"is {version} and has no {missing[0]}" if missing else None
    finally:
        _ctypes.dlclose(lib._handle)


@functools.lru_cache(maxsize=None)  # what is loaded then is found by its soname from then on
def found():
    """The path of the library, and why it is this one. LookupError: there is none."""
    return find(SONAME, "BPS_LIBRARY", _ask, "libbps-client0")


def _open():
    try:
        path, why = found()
    except LookupError as error:
        raise ImportError(str(error)) from None
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"cannot load {SONAME}, the library of bps: {why}: {error}; {WAY_OUT}") from None


def native_path(name):
    """Where a library is that a framework loads and that needs libbps_client. For dlopen().

    It belongs to this package, whose Python calls it, and works with each libbps_client that is not older: the package has
    it, where it was not built or installed with the library alone. library() has to have been called: both use one and
    the same libbps_client.
    """
    folder = os.path.dirname(library()._name)
    inside = os.path.join(folder, "native", name)  # of a build folder
    if os.path.exists(inside):
        return inside
    return bundled(name) or os.path.join(folder, name)


_loaded = None


def library():
    """The library, loaded at the first call."""
    global _loaded
    if _loaded is None:
        lib = _open()
        for name, (result, arguments) in _PROTOTYPES.items():
            try:
                function = getattr(lib, name)
            except AttributeError:
                raise ImportError(f"{lib._name} has no {name}: it is not the {SONAME} of this version") from None
            function.restype, function.argtypes = result, arguments
        _loaded = lib
    return _loaded


def last_error(lib):
    """Why the last call of this thread failed."""
    return (lib.bps_error() or b"").decode(errors="replace")


def status(path):
    """What the daemon that listens at path says to whoever may train. OSError where it cannot be asked."""
    lib, client = library(), c_void_p()
    params = OpenParams(size=ctypes.sizeof(OpenParams), socket=os.fsencode(path), restart_timeout_ms=-1)
    said = Status(size=ctypes.sizeof(Status))
    result = lib.bps_client_open(ctypes.byref(params), ctypes.byref(client))
    if not result:
        result = lib.bps_client_status(client, ctypes.byref(said))
        lib.bps_client_close(client)
    if result:
        raise OSError(-result, lib.bps_error().decode(errors="replace"))
    return said
