"""Names of Horovod and BytePS that have nothing to do with a framework: each adapter exports them all.

What they say about builds is about bps: its own transport stands where Horovod has MPI, Gloo, NCCL, CCL or DDL.
"""

import errno
import functools
import inspect
import os
import secrets

from . import _client, _ops
from ._errors import BpsConnectionError, BpsError, BpsValueError
from ._layout import Layout
from ._library import Unavailable

HorovodInternalError = BpsError  # what a failed collective raises

Adasum = Unavailable("Adasum", "bps adds and averages; use op=Average, with a learning rate for the larger batch")
Product = Unavailable(
    "Product",
    "only allreduce() and grouped_allreduce() of bps.torch and bps.tensorflow have it; elsewhere allgather() the factors and "
    "multiply them",
)


def init(lazy=True, comm=None, process_sets=None, **arguments):
    """As bps.init(), whose arguments go by name here.

    lazy is BytePS's and has no effect. comm is Horovod's and refused. process_sets: those to be added, of which no two have the
    same ranks; or "dynamic", with which they are to be added later.
    """
    if not isinstance(lazy, bool) and lazy is not None:  # what stands first with Horovod, and with bps.init()
        raise BpsValueError(errno.EINVAL, f"init({lazy!r}): arguments go by name, as socket= does, and there is no comm")
    if comm is not None:
        raise BpsValueError(
            errno.EINVAL, f"init(comm={comm!r}): a job has the ranks that its launcher starts, and there is no MPI in it"
        )
    if _client.is_initialized():
        return
    _client.init(**arguments)
    try:
        for process_set in () if process_sets == "dynamic" else process_sets or ():
            add_process_set(process_set)
    except BaseException:
        _client.shutdown()
        raise


# -- Where this process is


def cross_size():
    """Machines of the job."""
    return _client.current().n_nodes


def cross_rank():
    """The number of this machine in the job, from 0."""
    return _client.current().node


def is_homogeneous():
    """Whether every machine has as many of the job's processes as this one."""
    client = _client.current()
    return client.local_size * client.n_nodes == client.size


# -- What it was built with


def mpi_threads_supported():
    """False: there is no MPI in it. Other threads may use MPI as they like."""
    return False


def mpi_enabled():
    """False."""
    return False


def mpi_built():
    """False."""
    return False


def gloo_enabled():
    """False: what Gloo is for, the daemon does."""
    return False


def gloo_built():
    """False."""
    return False


def nccl_built():
    """0: the daemon binds NCCL when it runs, the trainer never does."""
    return 0


def ddl_built():
    """False."""
    return False


def ccl_built():
    """False."""
    return False


def cuda_built():
    """False: CUDA is bound when it runs."""
    return False


def rocm_built():
    """False."""
    return False


# -- Process sets: jobs that some of the ranks form for themselves


class ProcessSet:
    """Ranks that do operations among themselves, once add_process_set() has made them a set. Without ranks: all."""

    def __init__(self, ranks_or_comm=()):
        if ranks_or_comm is None or not hasattr(ranks_or_comm, "__iter__"):
            raise BpsValueError(errno.EINVAL, "ProcessSet() takes a list of ranks; communicators are MPI's")
        self._ranks = sorted({int(rank) for rank in ranks_or_comm}) or None
        self._number = None  # while it is in use
        self._client = None  # of a rank of the set
        self._alone = None  # of another rank: that of a job of its own, for training_client()

    @classmethod
    def of(cls, ranks):
        """ranks, as a ProcessSet if they are none."""
        return ranks if isinstance(ranks, cls) else cls(ranks)

    @property
    def ranks(self):
        """The numbers of its ranks among all ranks."""
        return _all_ranks() if self._ranks is None else self._ranks

    @property
    def process_set_id(self):
        """0 for all ranks; None for a set that was not added, or is removed."""
        return 0 if self._ranks is None or self._ranks == _all_ranks() else self._number

    def size(self):
        """Ranks in the set; None before it was added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self):
        """This process's number in the set; None outside it, and before it was added."""
        rank = _client.of_all_ranks().rank
        return None if self.process_set_id is None or rank not in self.ranks else self.ranks.index(rank)

    def included(self):
        """Whether this process is in it."""
        return _client.of_all_ranks().rank in self.ranks

    def client(self):
        """The client of its operations."""
        if self._client is not None:
            return self._client
        if self.process_set_id is None:
            raise BpsValueError(errno.EINVAL, f"{self!r} is not in use: all ranks call add_process_set() with it first")
        everybody = _client.of_all_ranks()
        if self.process_set_id:
            text = f"rank {everybody.rank} is not in {self!r}: its operations are for its ranks alone"
            raise BpsValueError(errno.EINVAL, text)
        return everybody

    def training_client(self):
        """As client(); outside the set, where there may be the same model, that of a rank that trains by itself."""
        if not self._number or self._client is not None:
            return self.client()
        if self._alone is None:
            rank = _client.of_all_ranks().rank
            layout = Layout(f"alone-{secrets.token_hex(8)}", secrets.token_hex(16), [0])
            self._alone = _client.run_interruptible(lambda: _joined(layout, 0, [rank], self._number))
            _client.open_process_set(self._alone)
        return self._alone

    def _end(self):
        clients = [client for client in (self._client, self._alone) if client is not None]
        self._forget()
        for client in clients:
            _client.close_process_set(client)

    def _forget(self):
        self._client = self._alone = self._number = None

    def __deepcopy__(self, _):
        return self  # the same job, in a copy of what holds it

    def __repr__(self):
        return f"ProcessSet({'all ranks' if self._ranks is None else self._ranks})"


# Of JoinParams: what a set has as the job of all ranks has it, and what is about that one alone.
_SETTINGS = ("timeout_ms", "request_timeout_ms", "min_servers", "part_bytes", "force_distributed", "gpu_reduce")
_NO_SETTINGS = ("quorum", "quorum_timeout_ms", "asynchronous", "staleness", "gpu_roots")
_NO_SETTINGS += ("elastic", "min_ranks", "max_ranks", "newcomer")

global_process_set = ProcessSet()
_sets = []  # those in use, without that of all ranks
_last_number = 0  # of a set: none is used again, since graphs of TensorFlow may outlive theirs


def _all_ranks():
    return list(range(_client.of_all_ranks().size)) if _client.is_initialized() else None


def _ranks_in_use():
    return [process_set.ranks for process_set in (global_process_set, *_sets)]


def client_of(process_set):
    """The client of the operations of a set that this rank is in."""
    if not isinstance(process_set, ProcessSet):
        raise BpsValueError(errno.EINVAL, f"process_set={process_set!r} is no ProcessSet: add_process_set() gives one")
    return process_set.client()


def over_process_set(function, client_of=client_of):
    """function, over the ranks that its argument process_set says; where that is None, over those of who calls it."""
    place = list(inspect.signature(function).parameters).index("process_set")

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        process_set = args[place] if place < len(args) else kwargs.get("process_set")
        if process_set is None or process_set == 0 or process_set is global_process_set:
            return function(*args, **kwargs)
        with _client.using(client_of(process_set)):
            return function(*args, **kwargs)

    return wrapper


def over_process_set_if_in_it(function):
    """As over_process_set(); a rank outside the set does it by itself."""

    def training_client_of(process_set):
        return process_set.training_client() if isinstance(process_set, ProcessSet) else client_of(process_set)

    return over_process_set(function, training_client_of)


def check_process_set(process_set):
    """For operations that are over all ranks alone."""
    if process_set is None or process_set == 0 or _is_of_all_ranks(process_set):
        return
    raise BpsValueError(
        errno.EINVAL,
        f"process_set={process_set!r}: this is over all ranks of the job. Sets are for operations of bps.torch and of "
        "bps.tensorflow, their optimizers and tapes, and of bps.keras but on JAX; else use torch.distributed with the "
        'backend "bps" and new_group(), or start each group as a job of its own (BPS_JOB)',
    )


def _is_of_all_ranks(process_set):
    return isinstance(process_set, ProcessSet) and process_set.process_set_id == 0


def add_process_set(process_set):
    """Has some of the ranks do operations among themselves. All ranks call it alike. Returns the ProcessSet."""
    global _last_number
    if process_set is global_process_set:
        return process_set
    process_set = ProcessSet.of(process_set)
    client, ranks = _client.of_all_ranks(), process_set.ranks
    if client.elastic:
        raise BpsValueError(
            errno.EINVAL, f"{process_set!r}: the ranks of an elastic job change, and it has the set of all ranks alone"
        )
    # Rank 0 draws the job's name and secret. What is wrong at one of the ranks, all hear of.
    answer = client.node, _last_number, secrets.token_hex(8), secrets.token_hex(16)
    said = _ask_all_alike("add_process_set", ranks, answer)
    if not 0 <= ranks[0] <= ranks[-1] < client.size:
        raise BpsValueError(errno.EINVAL, f"{process_set!r}: the job has {client.size} ranks")
    if ranks in _ranks_in_use():
        raise BpsValueError(errno.EINVAL, f"{process_set!r} is in use already: there is one set of the same ranks")
    number = _last_number = max(last for _, last, _, _ in said) + 1
    mine = error = None
    if client.rank in ranks:
        _, _, job, secret = said[0]
        layout = Layout(f"set-{job}", secret, [said[rank][0] for rank in ranks])
        try:
            mine = _client.run_interruptible(lambda: _joined(layout, ranks.index(client.rank), ranks, number))
            mine.orders = client.orders
        except BpsError as failure:
            error = failure
    for rank, text in enumerate(_ask_all(error and str(error))):
        if text:
            if mine is not None:
                mine.close()
            raise error or BpsConnectionError(errno.ECONNRESET, f"{process_set!r}: rank {rank}: {text}")
    if not _sets:
        _client.at_shutdown(_end_sets)
    process_set._client, process_set._number = mine, number
    _sets.append(process_set)
    if mine is not None:
        _client.open_process_set(mine)
    return process_set


def process_set_of_ranks(ranks):
    """The set in use that has these ranks; None: there is none."""
    return next((process_set for process_set in _sets if process_set.ranks == ranks), None)


def process_set_of(number):
    """The set in use with a process_set_id."""
    for process_set in (global_process_set, *_sets):
        if process_set.process_set_id == number:
            return process_set
    raise BpsValueError(errno.EINVAL, f"process_set_id={number!r}: there is no such set in use")


def _ask_all(answer):
    """What each of all ranks answers."""
    with _client.using(None):
        return _ops.Handle(_ops.allgather_object(answer)).wait()


def _ask_all_alike(function, ranks, answer=None):
    """The same, where all are to give the same ranks to a function."""
    said = _ask_all((ranks, answer))
    for rank, (others, _) in enumerate(said):
        if others != said[0][0]:
            raise BpsValueError(
                errno.EINVAL, f"{function}(): rank {rank} gives the ranks {others}, rank 0 the ranks {said[0][0]}"
            )
    return [answer for _, answer in said]


def _joined(layout, rank, ranks, number):
    """The client of a rank of such a job, which runs as the job of all ranks does, but waits for all of its own."""
    client = _client.of_all_ranks()
    settings = {name: getattr(client.joining, name) for name in _SETTINGS}
    settings.update(dict.fromkeys(_NO_SETTINGS, 0))
    mine = _client.open_client(client.opening)
    try:
        layout.join(mine, rank, **settings)
    except BaseException:
        mine.close()
        raise
    mine.ranks, mine.process_set = ranks, number
    return mine


def remove_process_set(process_set):
    """Ends a process set. All ranks call it; returns when all have, and whether there was something to end."""
    if process_set not in _sets:
        return False
    _ask_all_alike("remove_process_set", process_set.ranks)
    _sets.remove(process_set)
    process_set._end()
    return True


def _end_sets():
    while _sets:
        _sets.pop()._end()


def _forget_after_fork():
    """They are the parent's."""
    while _sets:
        _sets.pop()._forget()


os.register_at_fork(after_in_child=_forget_after_fork)


# -- Tracing


def start_timeline(file_path, mark_cycles=False):
    """Refused: nothing runs inside the trainer that could be traced. The daemon's view is `bpsctl job`."""
    raise BpsError(
        errno.EOPNOTSUPP,
        f"no timeline is written to {file_path}: communication runs in the daemon. Its rounds, bytes and who is waited "
        "for are shown by `bpsctl job`, its counters by its metrics",
    )


def stop_timeline():
    """There is none."""


# -- BytePS: a job that changes its size


_suspended = None  # local rank, local size and machine of the process when it was suspended


def suspend():
    """Leaves the job, as shutdown() does, until resume()."""
    global _suspended
    client = _client.current()
    _suspended = client.local_rank, client.local_size, client.node
    _client.shutdown()


def resume(num_workers, num_servers, global_rank=-1):
    """Joins again, the job now being on num_workers machines with at least num_servers summation servers.

    global_rank is this machine's new number; -1 leaves it as it was. As with BytePS, all processes call suspend() before,
    and every machine has as many of them as it had.
    """
    if _suspended is None:
        raise BpsError(errno.EINVAL, "resume() without suspend() before it: the first time it is init()")
    local_rank, local_size, node = _suspended
    node = node if global_rank < 0 else global_rank
    if num_workers < 1 or num_servers < 0 or node >= num_workers:
        raise BpsValueError(
            errno.EINVAL, f"resume(): machine {node} of {num_workers} with {num_servers} servers is not possible"
        )
    _client.init(
        rank=node * local_size + local_rank,
        size=num_workers * local_size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        nodes=num_workers,
        min_servers=num_servers,
    )


NAMES = [
    "Adasum",
    "HorovodInternalError",
    "ProcessSet",
    "Product",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "remove_process_set",
    "resume",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
    "suspend",
]
__all__ = [*NAMES, "check_process_set", "over_process_set", "over_process_set_if_in_it", "process_set_of", "process_set_of_ranks"]
