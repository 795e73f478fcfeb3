"""Training whose ranks come and go, under Horovod's names; bps.torch.elastic has the part for PyTorch.

    @bps.elastic.run
    def train(state):
        while state.batch < 1000:
            ...
            state.batch += 1
            state.commit()

    train(bps.elastic.ObjectState(batch=0))

The job has to be elastic: bpslaunch --min-np, or init(elastic=True). A rank that dies is not an error there: operations
have those who are left, and train() begins again at the next commit(), where the ranks regroup and let newcomers in. What
they share is the state, which sync() brings from rank 0 to all.
"""

import copy
import functools

from . import _client, _ops
from ._errors import BpsDroppedError, BpsError, BpsValueError
from ._ops import Handle

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run", "run_fn"]

HorovodInternalError = BpsError  # an operation failed


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks are gone, or wait to be let in. Raised on every rank at the same place: by commit() and check_host_updates()."""

    def __init__(self, skip_sync=False):
        super().__init__("the ranks of the job have changed")
        self.skip_sync = skip_sync


class State:
    """What ranks share. A subclass says how it is kept (save, restore) and brought to all ranks from rank 0 (sync)."""

    def __init__(self, **kwargs):
        self._reset_callbacks = []
        self._size = None  # of the job when it was last synchronized

    def register_reset_callbacks(self, callbacks):
        """To be called, in order, whenever ranks have changed: to adapt a learning rate, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self):
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self):
        """Keeps the state as it is now, for restore(), and then is check_host_updates(). All ranks call it together."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self):
        """Raises HostsUpdatedInterrupt if ranks are gone or newcomers wait. All ranks call it together; all of them raise."""
        client = _client.current()
        if not client.elastic:
            return
        request = client.barrier()
        request.wait()
        request.check()
        came = request.came
        if came is not None and (came.n_waiting or came.world_size != client.layout_size):
            raise HostsUpdatedInterrupt()

    def save(self):
        raise NotImplementedError

    def restore(self):
        raise NotImplementedError

    def sync(self):
        raise NotImplementedError

    def reset(self):
        """After ranks have changed, before sync()."""


class ObjectState(State):
    """Attributes that pickle can carry: ObjectState(batch=0, epoch=0).

    bcast_object and get_rank are Horovod's, and need not be given.
    """

    def __init__(self, bcast_object=None, get_rank=None, **kwargs):
        self._bcast_object = bcast_object or _broadcast_object
        self._rank = get_rank or (lambda: _client.current().rank)
        self._saved_state = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        super().__init__()

    def save(self):
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self):
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self):
        if self._saved_state:
            self.save()
            mine = self._rank() == 0  # now: it may be another afterwards
            state = self._bcast_object(self._saved_state)
            if not mine:
                self._saved_state = state
                self.restore()


def _broadcast_object(obj, root_rank=0, name=None):
    return Handle(_ops.broadcast_object(obj, root_rank, name or "elastic", None)).wait()


def regroup():
    """Every rank of the job calls it at one place: ranks are numbered anew, and newcomers are in. One that was dropped because
    it was late comes back as a newcomer.
    """
    client = _client.current()
    try:
        _client.run_interruptible(client.regroup)
    except BpsDroppedError:
        arguments = _client.arguments_of_init()
        _client.shutdown()
        _client.init(**{**arguments, "newcomer": True})


def _sync(state):
    """state.sync(), again where ranks were lost meanwhile: whoever is rank 0 since may have sent what it had none of."""
    while True:
        size = _client.current().size if _client.is_initialized() else 0
        state.sync()
        # All ranks have the same operations behind them, and so have heard of the same ranks.
        if not _client.is_initialized() or _client.current().size == size:
            return


def run_fn(func, reset):
    """func(state, ...), begun again from the last commit() when an operation fails, and from where it was when ranks change;
    before that reset() is called.
    """

    @functools.wraps(func)
    def wrapper(state, *args, **kwargs):
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    _sync(state)
                return func(state, *args, **kwargs)
            except BpsValueError:
                raise  # the program's own fault: it would come again
            except HorovodInternalError:
                if not _client.is_initialized() or not _client.current().elastic:
                    raise
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper


def run(func):
    """For a function whose first argument is a State: see run_fn(). Ranks regroup in between."""
    return run_fn(func, regroup)
