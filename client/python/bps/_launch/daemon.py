"""A private bps-daemon: started for one run, and ended with it."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile

from .._programs import find_program
from . import LaunchError, process

STOP_S = 40.0  # between SIGTERM and SIGKILL: drain_timeout, and time to end in order
SOCKET_PATH_MAX = 107  # bytes of sun_path, unix(7), but for the one that ends it
SOCKET_LONGEST = "notify.sock"  # of the names of sockets in a folder
RESTARTS_MAX = 3  # of one daemon: what kills it more often is not an accident


def usual_socket():
    """Where libbps_client looks."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = os.path.join(runtime, "bps", "bps.sock") if runtime else None
    return own if own and os.path.exists(own) else "/run/bps/bps.sock"


def somebody_listens(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def find_bpsctl():
    """The path of bpsctl, and why it is this one: the one that was installed or built with the daemon comes first. LookupError:
    there is none."""
    try:
        daemon, why = find_program("bps-daemon", "BPS_DAEMON")
    except LookupError:
        return find_program("bpsctl")
    home = os.path.dirname(daemon)
    for path in (os.path.join(home, "bpsctl"), os.path.join(home, "admin", "bpsctl")):
        if os.access(path, os.X_OK):
            return path, why
    return find_program("bpsctl")


def find_daemon():
    try:
        return find_program("bps-daemon", "BPS_DAEMON")[0]
    except LookupError as error:
        raise LaunchError(f"no daemon is running, and there is none to start: {error}") from None


def folder_for_sockets(name):
    """The folder in which a folder of this name leaves room for the names of sockets in it: batch systems set long ones. It is
    the same for all processes with the same environment.
    """
    folders = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]
    folders = [each for each in folders if each and os.access(each, os.W_OK)]
    for folder in folders:
        if len(os.fsencode(os.path.join(folder, name, SOCKET_LONGEST))) <= SOCKET_PATH_MAX:
            return folder
    raise LaunchError(
        f"no folder for the sockets of a private daemon: {', '.join(folders) or 'none'} can be written, and must be "
        f"shorter; set TMPDIR to one of {SOCKET_PATH_MAX - len(os.fsencode(name)) - len(SOCKET_LONGEST) - 2} characters at most"
    )


def private_folder():
    prefix = "bpslaunch-"
    return tempfile.mkdtemp(prefix=prefix, dir=folder_for_sockets(prefix + "x" * 8))  # with mode 0700


class Daemon:
    """A private daemon and the folder it has to itself."""

    def __init__(self, path=None, folder=None):
        self.folder = folder or private_folder()
        self.path = path or os.path.join(self.folder, "bps.sock")
        self.admin_path = os.path.join(self.folder, "admin.sock")
        self.process = None
        self.restarts = 0
        self.ready = self.ended = False
        self.data = None  # the socket that other daemons connect to
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(os.path.join(self.folder, "notify.sock"))

    def listen(self, address):
        """Opens the data port, for the daemon to take over. Returns its number."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.data = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.data.bind((address, 0))
            self.data.listen(socket.SOMAXCONN)
        except OSError as error:
            raise LaunchError(f"cannot listen on {address}: {error.strerror}") from error
        return self.data.getsockname()[1]

    def write(self, name, text):
        """A file in the daemon's folder. Returns its path."""
        path = os.path.join(self.folder, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        return path

    def start(self, options, program=None, stdout=subprocess.PIPE):
        """options: pairs of bps-daemon.conf(5)."""
        # Not with the options of the machine's own daemon, which may name a cluster and its ports.
        command = [program or find_daemon(), "--config="]
        command += ["--socket", self.path, "--admin-socket", self.admin_path]
        for option in options:
            command += ["--set", option]
        environment = {**os.environ, "NOTIFY_SOCKET": self.notify.getsockname()}
        stdin = subprocess.DEVNULL
        if self.data is not None:
            # sd_listen_fds(3) wants descriptors from 3 on, and a variable with the number of the process.
            environment.update(LISTEN_FDS="1", LISTEN_FDNAMES="data")
            command = ["/bin/sh", "-c", 'exec 3<&0 </dev/null; LISTEN_PID=$$ exec "$@"', "sh", *command]
            stdin = self.data
        self.again = lambda: self.start(options, program, stdout)
        self.process = process.start(command, env=environment, stdin=stdin, stdout=stdout, stderr=subprocess.STDOUT)
        if self.data is not None:
            self.data.close()
            self.data = None

    def restart(self):
        """In the place of one that ended by itself: trainers of jobs on one machine wait for the next. False: too often."""
        self.restarts += 1
        if self.restarts > RESTARTS_MAX:
            return False
        self.again()
        return True

    def says_ready(self):
        """To be called when the socket notify is readable."""
        self.ready = self.ready or b"READY=1" in self.notify.recv(4096).split(b"\n")
        return self.ready

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.data is not None:
            self.data.close()
        self.notify.close()
        shutil.rmtree(self.folder, ignore_errors=True)
