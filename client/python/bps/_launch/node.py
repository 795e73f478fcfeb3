"""A machine of the run as the launcher sees it: call() gives it a command of machine.Machine, on_event() gets what happens."""

import os
import re
import select
import shlex
import subprocess
import sys
import threading
import time

from . import LaunchError, process, wire
from .machine import Machine
from .output import Lines, target_of

BEAT_S = 5.0
SILENCE_S = 60.0  # a machine not heard of for so long is given up, and so are we by its agent
SSH_OPTIONS = ["-T", "-x", "-o", "BatchMode=yes"]
# What is another machine's own, or of a launcher around this one, and does not travel.
STAYS = re.compile(
    r"_|HOME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|HOST|TERM|MAIL|DISPLAY|XAUTHORITY|TMPDIR|LS_COLORS|KRB5CCNAME|"
    r"INVOCATION_ID|JOURNAL_STREAM|NOTIFY_SOCKET|LISTEN_.*|DBUS_.*|SSH_.*|XDG_.*|BASH_FUNC_.*|SLURM_.*|SBATCH_.*|OMPI_.*|PMI_.*|"
    r"PMIX_.*|PRTE_.*|BPS_SOCKET|BPS_ADMIN_SOCKET|CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES"
)


class Node:
    """What both kinds have. ranks is the launcher's plan; facts is what the machine said last, by kind."""

    def __init__(self, name, ranks, on_event):
        self.name = name
        self.ranks = ranks
        self.on_event = on_event
        self.facts = {}
        self.idle = not ranks
        self.over = False  # nothing more will come

    def event(self, kind, data=b"", /, **fields):
        if kind in ("idle", "added"):
            self.idle = kind == "idle"  # that may have been on its way when another rank was asked for
        self.facts[kind] = fields
        self.on_event(self, kind, data, fields)


class Here(Node):
    """This machine, in this process."""

    def __init__(self, loop, ranks, on_event):
        super().__init__("", ranks, on_event)
        self.machine = Machine(loop, self.event)

    def call(self, kind, data=None, /, **fields):
        if data is not None:
            fields["data"] = data
        getattr(self.machine, kind)(**fields)

    def travels(self):
        """What of our environment the ranks there must be told."""
        return {}


class Agent(Node):
    """A machine with an agent, whose standard input and output are the line: reached by ssh, or a child of ours."""

    def __init__(self, loop, host, command, ranks, on_event, starter):
        super().__init__(host.bare, ranks, on_event)
        self.loop = loop
        self.host = host
        self.command = command
        self.starter = starter  # for messages: ssh
        self.out = bytearray()
        self.out_lock = threading.Lock()
        self.reader = wire.Reader(greeting=True)
        self.heard = time.monotonic()
        self.errors = Lines(f"[{self.name}] ", target_of(2))
        self.child = process.start(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            os.set_blocking(pipe.fileno(), False)
        loop.watch(self.child.stdout, self._readable)
        loop.watch(self.child.stderr, self._error_readable)
        self.call("hello", silence_s=SILENCE_S)

    def travels(self):
        if self.host.is_local:
            return {}
        return {name: value for name, value in os.environ.items() if not STAYS.fullmatch(name)}

    # -- The line

    def call(self, kind, data=b"", /, **fields):
        if self.over:
            return
        with self.out_lock:
            self.out += wire.pack(kind, data, **fields)
        self._flush()

    def _flush(self):
        with self.out_lock:
            try:
                while self.out:
                    del self.out[: os.write(self.child.stdin.fileno(), self.out[: 1 << 16])]
            except BlockingIOError:
                pass
            except OSError:
                self.out.clear()  # its end is told by standard output
            rest = bool(self.out)
        if rest:
            self.loop.watch(self.child.stdin, self._flush, events=2)
        else:
            self.loop.forget(self.child.stdin)

    def beat(self):
        """A sign of life, from a thread of its own: this process may be blocked by whoever reads its output."""
        with self.out_lock:
            if not self.out and not self.over:
                try:
                    os.write(self.child.stdin.fileno(), wire.pack("beat"))  # less than PIPE_BUF: all or nothing
                except OSError:
                    pass

    def _readable(self):
        try:
            data = os.read(self.child.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self.heard = time.monotonic()
        if not data:
            return self._lost()
        try:
            for kind, fields, payload in self.reader.feed(data):
                if kind is None:
                    self.errors.feed(payload)
                elif kind != "beat":
                    self.event(kind, payload, **fields)
        except ValueError as error:
            raise LaunchError(f"{self.name}: {error}") from error

    def _error_readable(self):
        try:
            data = os.read(self.child.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        self.errors.feed(data)
        if not data:
            self.loop.forget(self.child.stderr)
        return bool(data)

    def is_silent(self):
        """Nothing was heard for too long. What waits to be read counts: we may have been blocked ourselves."""
        return time.monotonic() - self.heard > SILENCE_S and not select.select([self.child.stdout], [], [], 0)[0]

    def _lost(self):
        """The line ended: well, after bye; else ssh says why, and we with it."""
        self.loop.forget(self.child.stdout)
        if self.over:
            return
        self.over = True
        try:
            status = self.child.wait(5)
        except subprocess.TimeoutExpired:
            status = None
        while self._error_readable():
            pass
        if "bye" in self.facts:
            return
        how = "its agent does not answer" if status is None else f"{self.starter} {process.describe_end(status)[0]}"
        self.event("lost", how=how)

    def close(self):
        """To be called last: nothing is awaited any more."""
        with self.out_lock:  # not under a beat
            self.over = True
            for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
                self.loop.forget(pipe)
                pipe.close()
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()


class Heart(threading.Thread):
    """Sends the beats."""

    def __init__(self, nodes):
        super().__init__(name="bpslaunch-beats", daemon=True)
        self.nodes = nodes
        self.stopped = threading.Event()

    def run(self):
        while not self.stopped.wait(BEAT_S):
            for node in self.nodes:
                node.beat()


def agent_command(host, options, launch_file):
    """How the agent of a host is started, and by what name that is called in messages."""
    if host.is_local:
        return [sys.executable, launch_file, "--agent"], "the agent"
    remote = [options.remote_python or sys.executable, launch_file, "--agent"]
    ssh = shlex.split(options.ssh)
    if os.path.basename(ssh[0]) == "ssh":
        ssh += SSH_OPTIONS + ["-o", f"ConnectTimeout={max(1, int(options.start_timeout))}"]
        if options.ssh_port is not None:
            ssh += ["-p", str(options.ssh_port)]
        if options.ssh_identity_file is not None:
            ssh += ["-i", options.ssh_identity_file]
        ssh += ["--", host.name, "exec " + shlex.join(remote)]
    else:
        ssh += [host.name, *remote]
    return ssh, os.path.basename(ssh[0])
