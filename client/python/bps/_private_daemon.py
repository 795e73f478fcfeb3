"""A bps-daemon for the ranks of one job on one machine, where none listens: the first rank starts it, it ends with the last.

The ranks of a job meet in a folder that is theirs by user and job. Its file `lock` has two bytes that are locked by
fcntl(2), whose locks end with the process, however that happens, and are not inherited by fork:

byte 0      whoever looks after the daemon, or starts it; held for a moment
byte 1      shared by every rank; the keeper, which is the daemon's parent, waits to have it alone: then no rank is left

The keeper then ends the daemon and removes the folder. A rank that comes meanwhile finds byte 1 taken, or that its file is no
longer the one of that name, and begins again.
"""

import fcntl
import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time

from ._errors import BpsConnectionError, BpsError, BpsTimeoutError

TIMEOUT_S = 30.0
RETRY_S = 0.02
NAME_MAX = 64  # of a folder, in bytes: sockets in it have paths of 107 at most
MUTEX, RANKS = 0, 1
PACKAGE = os.path.dirname(os.path.abspath(__file__))

_held = {}  # folder: the descriptor of its lock


def folder_of(job):
    from ._launch.daemon import folder_for_sockets

    name = f"bps-{os.getuid()}-{job}"
    if len(os.fsencode(name)) > NAME_MAX or "/" in job:
        name = f"bps-{os.getuid()}-{hashlib.sha256(os.fsencode(job)).hexdigest()[:40]}"
    return os.path.join(folder_for_sockets(name), name)


def _own_folder(path):
    """Makes it, or makes sure that nobody else has."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise BpsError(
                1, f"{path}: is not a folder of this user alone; remove it, or give the job another name"
            ) from None


def _try_lock(fd, byte, kind):
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _enter(folder, deadline):
    """The descriptor of the lock, with both bytes held."""
    path = os.path.join(folder, "lock")
    while True:
        try:
            _own_folder(folder)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # removed by its keeper in between
        try:
            if _try_lock(fd, MUTEX, fcntl.LOCK_EX) and _try_lock(fd, RANKS, fcntl.LOCK_SH) and _is_at(fd, path):
                taken, fd = fd, None
                return taken
        finally:
            if fd is not None:
                os.close(fd)  # and with it what is locked of it
        if time.monotonic() >= deadline:
            raise BpsTimeoutError(110, f"{folder}: another rank starts or ends the daemon there and does not finish")
        time.sleep(RETRY_S)  # a lock tells nobody that it is free


def _is_at(fd, path):
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (found.st_ino, found.st_dev) == (ours.st_ino, ours.st_dev)


def join(job):
    """Makes sure that the job's daemon runs, and goes on while this process does or until leave(). Returns its socket."""
    from ._launch import LaunchError
    from ._launch.daemon import somebody_listens

    try:
        folder = folder_of(job)
    except LaunchError as error:
        raise BpsConnectionError(111, f"no daemon listens, and one could not be started: {error}") from None
    path = os.path.join(folder, "bps.sock")
    if folder in _held:
        return path
    fd = _enter(folder, time.monotonic() + TIMEOUT_S)
    try:
        if not somebody_listens(path):
            _start_keeper(folder)
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, MUTEX)
    except BaseException:
        os.close(fd)
        raise
    _held[folder] = fd
    return path


def leave():
    """This process needs no private daemon any more."""
    while _held:
        os.close(_held.popitem()[1])


def _forget_after_fork():
    """The parent's locks are not ours, and closing its descriptor here does not release them."""
    leave()


os.register_at_fork(after_in_child=_forget_after_fork)


def _start_keeper(folder):
    """The keeper is nobody's child: no rank has to wait for it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.path.dirname(PACKAGE), os.environ.get("PYTHONPATH")])),
    }
    keeper = [sys.executable, "-m", "bps._private_daemon", folder]
    answer, answer_writer = os.pipe()
    try:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" <&0 &', "sh", *keeper],
            stdin=subprocess.DEVNULL,
            stdout=answer_writer,
            env=environment,
            cwd="/",
            start_new_session=True,
            check=True,
        )
    finally:
        os.close(answer_writer)
    with open(answer, "rb", buffering=0) as pipe:
        words = _read_answer(pipe, time.monotonic() + TIMEOUT_S)
    if words != "ready":
        raise BpsConnectionError(111, f"no daemon listens, and one could not be started: {words}")


def _read_answer(pipe, deadline):
    import select

    words = b""
    while not words.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return f"it was not ready within {TIMEOUT_S:.0f} s"
        data = pipe.read(4096)
        if not data:
            break
        words += data
    return words.decode(errors="replace").strip() or "its keeper ended; what it said is on standard error"


# -- The keeper


def _keep(folder):
    """Starts the daemon, says so on standard output, waits until no rank is left, and clears up."""
    from ._launch import LaunchError
    from ._launch.daemon import Daemon

    fd = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CLOEXEC)
    for name in ("bps.sock", "admin.sock", "notify.sock"):  # of a keeper that was killed
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            pass
    daemon = Daemon(folder=folder)
    try:
        answer = "ready"
        try:
            daemon.start(["log_level=warning"], stdout=2)
            daemon.notify.settimeout(0.2)
            deadline = time.monotonic() + TIMEOUT_S
            while not _is_ready(daemon):
                if daemon.process.poll() is not None:
                    raise LaunchError(f"bps-daemon exited with status {daemon.process.returncode} before it was ready")
                if time.monotonic() >= deadline:
                    raise LaunchError(f"bps-daemon was not ready within {TIMEOUT_S:.0f} s")
        except LaunchError as error:
            answer = str(error)
        os.write(1, f"{answer}\n".encode())
        os.dup2(2, 1)  # who reads the answer sees its end
        if answer == "ready":
            # Trainers wait for the daemon that takes the place of one that died. lockf() goes on after a handler.
            signal.signal(signal.SIGCHLD, lambda *_: daemon.process.poll() is None or daemon.restart())
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, RANKS)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    finally:
        daemon.stop()  # and removes the folder, with the lock in our hands
        os.close(fd)


def _is_ready(daemon):
    try:
        return daemon.says_ready()
    except socket.timeout:  # TimeoutError from Python 3.10 on
        return False


if __name__ == "__main__":
    _keep(sys.argv[1])
