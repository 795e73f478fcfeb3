"""Children that end with us."""

import ctypes
import os
import signal
import socket
import subprocess

from . import LaunchError

PR_SET_PDEATHSIG = 1


def start(command, *, cpus=None, **options):
    """A child that gets SIGTERM when we die, however that happens. In a process group of its own, so that Ctrl-C comes
    to it once, from us. cpus: what it may run on.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def prepare():  # in the child, before exec
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)
        if cpus:
            os.sched_setaffinity(0, cpus)

    try:
        return subprocess.Popen(command, preexec_fn=prepare, **options)
    except OSError as error:
        if error.filename is not None and error.filename == options.get("cwd"):
            raise LaunchError(f"no folder {error.filename} here: {error.strerror}; --wdir names another") from error
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
    except subprocess.SubprocessError as error:  # prepare() failed, and only sched_setaffinity can
        raise LaunchError(f"cannot start {command[0]} on the cores {sorted(cpus or ())}: {error}") from error


def group_runs(group):
    """Whether a process of this group runs. Dead ones that nobody reaps do not count."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"{entry.path}/stat") as file:
                    state, _, its_group = file.read().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def describe_end(status):
    """A status of Popen in words, and as an exit status of our own."""
    if status >= 0:
        return f"exited with status {status}", status
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-status}{name}", 128 - status


def host_name():
    """This machine, as it calls itself."""
    return socket.gethostname()
