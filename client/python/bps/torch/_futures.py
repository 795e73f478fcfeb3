"""A handle of bps as a torch.futures.Future, which C++ can wait for: DistributedDataParallel, process groups."""

import torch

from .. import _client
from .._completer import completer_of, outcome
from . import _devices


def future_of(handle, client=None, of=None):
    """A Future of handle.wait(). The handle is the future's from now on: nobody else may poll it or wait for it.

    client: whose handle it is, where it is not that of init(). of: a tensor; if it is on a CUDA device, who waits for the
    future waits in the order of streams, and a failure is raised by a later call.

    The future fails as the operation does, for C++ as for Python: with a RuntimeError whose text holds the BpsError's.
    (A Future on which Python calls set_exception() looks complete and well to C++, so that is not what is done here.)
    Callbacks run in the thread that completes it, and may wait for other futures of bps.
    """
    if of is not None and _devices.device_of(of):
        return _devices.platform.future_of(handle, of.device)
    promise, future = promised()
    fulfil(promise, handle, client or _client.current())
    return future


def promised():
    """(promise, future): the future completes as future_of()'s does once fulfil() or fail() is called on the promise."""
    promise = torch.futures.Future()
    return promise, promise.then(_unwrap)


def fulfil(promise, handle, client):
    """Completes a promise as handle.wait() does."""
    if handle.poll():
        promise.set_result(outcome(handle))
    else:
        completer_of(client).add(handle, promise)


def fail(promise, error):
    promise.set_result((None, error))


def _unwrap(future):
    result, error = future.value()
    if error is not None:
        raise error
    return result
