"""Who the ranks of a process group are to bps: which job they form, and which of them are on one machine.

Nothing of that is taken from the environment. The ranks tell each other through the group's store; rank 0 draws the
job's name and its secret.
"""

import ctypes
import errno
import json
import os
import secrets

from .. import _private_daemon
from .._client import no_daemon, open_client, wants_daemon
from .._errors import BpsConnectionError, BpsError, BpsTimeoutError
from .._launch.daemon import somebody_listens, usual_socket
from .._layout import Layout
from .._library import OpenParams

CONNECT_TIMEOUT_MS = 3000


_private = None  # the socket of a daemon that the ranks started for themselves


def _daemon_socket():
    return _private or os.environ.get("BPS_SOCKET") or usual_socket()


def _find_daemon(job):
    """Where none listens and one is wanted, the ranks of the machine start one that ends with the last of them."""
    global _private
    if wants_daemon(None) and not somebody_listens(_daemon_socket()):
        _private = _private_daemon.join(job)


def connect():
    """A Client of the daemon of this machine, in no job yet."""
    path = os.fsencode(_daemon_socket())
    try:
        return open_client(OpenParams(ctypes.sizeof(OpenParams), path, CONNECT_TIMEOUT_MS))
    except BpsConnectionError as error:
        raise no_daemon(error) from None


def _machine():
    """The same for two processes if and only if one daemon serves them, in containers too: its socket is a file, and a
    file is one of one kernel's.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    status = os.stat(_daemon_socket())
    return f"{boot} {status.st_dev} {status.st_ino}"


def agree(store, rank, size):
    """Connects, and agrees with the other ranks about the job. Returns (Client, Layout).

    What goes wrong in one rank fails all of them, with a text that names it.
    """
    # A store may be older than the group, and hold what an earlier group of its name left: each is numbered.
    prefix = f"bps/{(store.add('bps/ranks', 1) - 1) // size}/"
    client = problem = None
    if rank == 0:
        store.set(f"{prefix}job", f"torch-{secrets.token_hex(8)}")
    job = _get(store, prefix, "job", rank, size).decode()
    try:
        _find_daemon(job)
        client = connect()
        store.set(f"{prefix}{rank}", json.dumps({"machine": _machine(), "private": _private is not None}))
    except (BpsError, ImportError, OSError) as error:
        problem = error
        store.set(f"{prefix}{rank}", json.dumps({"error": str(error)}))
    try:
        if rank == 0:
            layout = _draw(job, [json.loads(_get(store, prefix, str(r), rank, size)) for r in range(size)])
            store.set(f"{prefix}layout", json.dumps(layout))
        else:
            layout = json.loads(_get(store, prefix, "layout", rank, size))
        if problem is not None:
            raise problem
        if "error" in layout:
            raise BpsConnectionError(errno.ECONNREFUSED, layout["error"])
        return client, Layout(**layout)
    except BaseException:
        if client is not None:
            client.close()
        raise


def _draw(job, answers):
    failed = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        return {"error": "; ".join(failed)}
    machines = [answer["machine"] for answer in answers]
    if len(set(machines)) > 1 and any(answer["private"] for answer in answers):
        return {"error": "daemons that are started for a job serve one machine: run daemons as a cluster"}
    return {"job": job, "secret": secrets.token_hex(16), "machines": machines}


def _get(store, prefix, key, rank, size):
    """Waits as long as the store does, which is the timeout of the group."""
    try:
        return store.get(prefix + key)
    except RuntimeError as error:
        missing = [str(r) for r in range(size) if r != rank and not store.check([f"{prefix}{r}"])]
        if not missing:
            raise
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(missing)} have"
        raise BpsTimeoutError(errno.ETIMEDOUT, f"{who} not come to the process group") from error
