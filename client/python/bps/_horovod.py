"""Names of Horovod and BytePS that have nothing to do with a framework: each adapter exports them all.

What they say about builds is about bps: its own transport stands where Horovod has MPI, Gloo, NCCL, CCL or DDL.
"""

import errno

from . import _client
from ._errors import BpsError, BpsValueError
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

    lazy is BytePS's and has no effect. comm and process_sets are Horovod's: only what stands for all ranks will do.
    """
    if not isinstance(lazy, bool) and lazy is not None:  # what stands first with Horovod, and with bps.init()
        raise BpsValueError(errno.EINVAL, f"init({lazy!r}): arguments go by name, as socket= does, and there is no comm")
    if comm is not None:
        raise BpsValueError(
            errno.EINVAL, f"init(comm={comm!r}): a job has the ranks that its launcher starts, and there is no MPI in it"
        )
    _client.init(**arguments)
    if process_sets != "dynamic":  # with which they are to be added later
        for process_set in process_sets or ():
            add_process_set(process_set)


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


# -- Process sets: all ranks, or none of it


class ProcessSet:
    """Ranks that reduce among themselves. Here it is always all of them: see add_process_set()."""

    def __init__(self, ranks_or_comm=()):
        if ranks_or_comm is None or not hasattr(ranks_or_comm, "__iter__"):
            raise BpsValueError(errno.EINVAL, "ProcessSet() takes a list of ranks; communicators are MPI's")
        self.ranks = sorted({int(rank) for rank in ranks_or_comm}) or None

    @property
    def process_set_id(self):
        return 0

    def size(self):
        """Ranks in the set."""
        return _client.current().size if self.ranks is None else len(self.ranks)

    def rank(self):
        """This process's number in the set, or None outside it."""
        rank = _client.current().rank
        if self.ranks is None:
            return rank
        return self.ranks.index(rank) if rank in self.ranks else None

    def included(self):
        """Whether this process is in it."""
        return self.rank() is not None

    def __repr__(self):
        return f"ProcessSet({'all ranks' if self.ranks is None else self.ranks})"


global_process_set = ProcessSet()


def check_process_set(process_set):
    """For operations: only the set of all ranks will do."""
    if process_set is None or process_set == 0 or process_set is global_process_set:
        return
    ranks = getattr(process_set, "ranks", None)
    if isinstance(process_set, ProcessSet) and (ranks is None or ranks == list(range(_client.current().size))):
        return
    raise BpsValueError(
        errno.EINVAL,
        f"process_set={process_set!r}: an operation is over all ranks of a job. For groups of them use torch.distributed with the "
        'backend "bps" and new_group(), or start each group as a job of its own (BPS_JOB)',
    )


def add_process_set(process_set):
    """The set of all ranks is there already; another is refused with the way out."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    check_process_set(process_set)
    return global_process_set


def remove_process_set(process_set):
    """False: the set of all ranks stays."""
    check_process_set(process_set)
    return False


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
__all__ = [*NAMES, "check_process_set"]
