"""What each adapter exports beside its own: the names of bps that are the same for all frameworks, and those of Horovod."""

from . import (
    Average,
    BpsCanceledError,
    BpsConnectionError,
    BpsError,
    BpsNotInitializedError,
    BpsTimeoutError,
    BpsUnsupportedError,
    BpsValueError,
    Max,
    Min,
    Sum,
    _horovod,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ._horovod import *  # noqa: F403

__all__ = [
    "Average",
    "BpsCanceledError",
    "BpsConnectionError",
    "BpsError",
    "BpsNotInitializedError",
    "BpsTimeoutError",
    "BpsUnsupportedError",
    "BpsValueError",
    "Max",
    "Min",
    "Sum",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    *_horovod.NAMES,
]
