"""libbps_jax: what a compiled program calls on the CPU. See client/native/jax.c."""

import ctypes
import warnings

import jax

from .. import _client
from .._errors import error_from
from .._install import WAY_OUT
from .._library import native_path
from ._order import forget_failure

NAME = "libbps_jax.so"
START, DONE = "bps_start", "bps_done"  # as XLA knows them

_library = None
_looked = False


def _load():
    found = ctypes.CDLL(native_path(NAME))
    found.bps_jax_attach.restype, found.bps_jax_attach.argtypes = ctypes.c_int, [ctypes.c_void_p]
    found.bps_jax_detach.restype, found.bps_jax_detach.argtypes = None, []
    for target, function in ((START, found.bps_jax_start), (DONE, found.bps_jax_done)):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return found


def available():
    """Whether programs for the CPU can call the library. Looks once; that it is not there is said once."""
    global _library, _looked
    if not _looked:
        _looked = True
        try:
            _library = _load()
        except OSError as error:
            warnings.warn(
                f"bps.jax calls Python from compiled programs, which is slower: no {NAME}: {error}; {WAY_OUT}",
                stacklevel=2,
            )
        else:
            _client.follow(_attach, _detach)
    return _library is not None


def _attach(client):
    status = _library.bps_jax_attach(client.pointer)
    if status:
        raise error_from(status, "")


def _detach(client):
    _library.bps_jax_detach()
    forget_failure()  # of what was under way
