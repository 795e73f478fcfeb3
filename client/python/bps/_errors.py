"""What goes wrong, as exceptions. All are OSErrors with an errno and a text that says who and why, and RuntimeErrors, as what
Horovod and PyTorch raise.
"""

import errno
import os


class BpsError(OSError, RuntimeError):
    """An operation of bps failed. errno says how, strerror says why in words."""


class BpsTimeoutError(BpsError, TimeoutError):
    """A deadline passed. The text names the ranks that were missing."""


class BpsConnectionError(BpsError, ConnectionError):
    """A rank, a server or the daemon is gone, or was never there. The text names it."""


class BpsValueError(BpsError, ValueError):
    """Arguments that do not fit, or ranks that disagree about a tensor or the job. The text names both sides."""


class BpsUnsupportedError(BpsValueError, NotImplementedError):
    """bps has no such thing, where others do. The text names a way out."""


class BpsCanceledError(BpsError):
    """The request was given up, by cancel(), by shutdown(), or by another rank."""


class BpsMembershipError(BpsError):
    """The ranks of an elastic job have changed, and the operation depends on which rank is who: it may be done again."""


class BpsDroppedError(BpsError):
    """This rank was late, and its elastic job goes on without it. bps.elastic.run comes again, as a newcomer."""


class BpsNotInitializedError(BpsError):
    """The call needs bps.init() before it."""


_CLASSES = {
    errno.ETIME: BpsTimeoutError,
    errno.ETIMEDOUT: BpsTimeoutError,
    errno.ECONNREFUSED: BpsConnectionError,
    errno.ECONNRESET: BpsConnectionError,
    errno.ENOENT: BpsConnectionError,
    errno.EPIPE: BpsConnectionError,
    errno.ESHUTDOWN: BpsConnectionError,
    errno.EINVAL: BpsValueError,
    errno.EEXIST: BpsValueError,
    errno.ERANGE: BpsValueError,
    errno.EILSEQ: BpsValueError,
    errno.EDEADLK: BpsValueError,
    errno.ECANCELED: BpsCanceledError,
    errno.EREMCHG: BpsMembershipError,
    errno.ESTALE: BpsDroppedError,
    errno.ENOTCONN: BpsNotInitializedError,
}


def error_from(status, text):
    """The exception for a negative errno of the library and its text."""
    number = -status
    return _CLASSES.get(number, BpsError)(number, text or os.strerror(number))
