"""Who the ranks of a process group are to bps: which job they form, and which of them are on one machine.

Nothing is taken from the environment but where the daemon is. The ranks tell each other through the group's store; rank
0 draws the job's name and its secret.
"""

import ctypes
import errno
import json
import os
import secrets

from .._client import open_client
from .._errors import BpsConnectionError, BpsError, BpsTimeoutError
from .._library import JoinParams, OpenParams

CONNECT_TIMEOUT_MS = 3000


def daemon_socket():
    """Where libbps_client looks for the daemon."""
    if chosen := os.environ.get("BPS_SOCKET"):
        return chosen
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = os.path.join(runtime, "bps", "bps.sock") if runtime else None
    return own if own and os.path.exists(own) else "/run/bps/bps.sock"


def connect():
    """A Client of the daemon of this machine, in no job yet."""
    path = daemon_socket()
    try:
        return open_client(OpenParams(ctypes.sizeof(OpenParams), os.fsencode(path), CONNECT_TIMEOUT_MS))
    except BpsConnectionError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror}. Process groups need a bps-daemon on each machine: start it as a service, or start one "
            "for this program alone by running it under bpslaunch, or set BPS_SOCKET to where it listens",
        ) from None


def _machine():
    """The same for two processes if and only if they are served by one daemon, in containers too: its socket is a file,
    and a file is one of one kernel's.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    status = os.stat(daemon_socket())
    return f"{boot} {status.st_dev} {status.st_ino}"


class Layout:
    """A job: its name, its secret, and for each rank the number of its machine. Machines are numbered by their first rank."""

    def __init__(self, job, secret, machines):
        self.job = job
        self.secret = secret
        numbers = {}
        self.nodes = [numbers.setdefault(machine, len(numbers)) for machine in machines]

    def pair(self, low, high):
        """The job that two of the ranks form for themselves; low is its rank 0."""
        return Layout(f"{self.job}.{low}-{high}", self.secret, [self.nodes[low], self.nodes[high]])

    def join(self, client, rank, timeout_ms):
        """Makes a client this rank of the job; returns when all its ranks have come."""
        secret = bytes.fromhex(self.secret)
        kept = ctypes.create_string_buffer(secret, len(secret))  # until the call returns
        client.join(
            JoinParams(
                size=ctypes.sizeof(JoinParams),
                job=self.job.encode(),
                secret=ctypes.addressof(kept),
                secret_len=len(secret),
                rank=rank,
                world_size=len(self.nodes),
                local_rank=self.nodes[:rank].count(self.nodes[rank]),
                local_size=self.nodes.count(self.nodes[rank]),
                node=self.nodes[rank],
                n_nodes=max(self.nodes) + 1,
                timeout_ms=timeout_ms,
                request_timeout_ms=timeout_ms,
                **_from_environment(),
            )
        )


def _from_environment():
    """How jobs run, as libbps_client(3) reads it."""
    fields = {}
    if value := os.environ.get("BPS_FORCE_DISTRIBUTED"):
        fields["force_distributed"] = _number("BPS_FORCE_DISTRIBUTED", value)
    if value := os.environ.get("BPS_MIN_SERVERS"):
        fields["min_servers"] = _number("BPS_MIN_SERVERS", value)
    if value := os.environ.get("BPS_PART_BYTES"):
        unit = {"K": 10, "M": 20, "G": 30}.get(value[-1].upper())
        fields["part_bytes"] = _number("BPS_PART_BYTES", value[:-1] if unit else value) << (unit or 0)
    return fields


def _number(name, text):
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {os.environ[name]!r}, which is not a number") from None


def agree(store, rank, size):
    """Connects, and agrees with the other ranks about the job. Returns (Client, Layout).

    What goes wrong in one rank fails all of them, with a text that names it.
    """
    # A store may be older than the group, and hold what an earlier group of its name left: each is numbered.
    prefix = f"bps/{(store.add('bps/ranks', 1) - 1) // size}/"
    client = problem = None
    try:
        client = connect()
        store.set(f"{prefix}{rank}", json.dumps({"machine": _machine()}))
    except (BpsError, ImportError, OSError) as error:
        problem = error
        store.set(f"{prefix}{rank}", json.dumps({"error": str(error)}))
    try:
        if rank == 0:
            layout = _draw([json.loads(_get(store, prefix, str(r), size)) for r in range(size)])
            store.set(f"{prefix}layout", json.dumps(layout))
        else:
            layout = json.loads(_get(store, prefix, "layout", size))
        if problem is not None:
            raise problem
        if "error" in layout:
            raise BpsConnectionError(errno.ECONNREFUSED, layout["error"])
        return client, Layout(**layout)
    except BaseException:
        if client is not None:
            client.close()
        raise


def _draw(answers):
    failed = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
    if failed:
        return {"error": "; ".join(failed)}
    return {
        "job": f"torch-{secrets.token_hex(8)}",
        "secret": secrets.token_hex(16),
        "machines": [answer["machine"] for answer in answers],
    }


def _get(store, prefix, key, size):
    """Waits as long as the store does, which is the timeout of the group."""
    try:
        return store.get(prefix + key)
    except RuntimeError as error:
        missing = [str(r) for r in range(size) if not store.check([f"{prefix}{r}"])]
        if not missing:
            raise
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(missing)} have"
        raise BpsTimeoutError(errno.ETIMEDOUT, f"{who} not come to the process group") from error
