#!/usr/bin/env python3
"""bpslaunch: starts the ranks of a job on this machine, and a daemon for them if none is there. See bpslaunch(1)."""

import argparse
import ctypes
import errno
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

if __name__ == "__main__":
    sys.path.pop(0)  # run as a file: its folder has a module called torch, which is not the one that programs mean

KILL_AFTER_S = 10.0  # between SIGTERM and SIGKILL
READY_TIMEOUT_S = 30.0
DRAIN_S = 2.0  # for output of what the ranks themselves left running
LINE_MAX = 1 << 16
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
HERE = os.path.dirname(os.path.abspath(__file__))


class LaunchError(Exception):
    """What cannot be started, in words."""


# -- Arguments


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(
        prog="bpslaunch",
        description="Starts the ranks of a job on this machine, and a private bps-daemon if none is there.",
    )
    parser.add_argument("-np", "--ranks", type=int, default=1, metavar="N", help="ranks on this machine (1)")
    parser.add_argument("--node", type=int, default=0, metavar="I", help="number of this machine, from 0 (0)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of the job, N ranks on each (1)")
    parser.add_argument("--socket", metavar="PATH", help="the daemon's socket ($BPS_SOCKET, or where it usually is)")
    parser.add_argument("--job", metavar="NAME", help="name of the job (one that nobody else has)")
    parser.add_argument("--no-daemon", action="store_true", help="never start a daemon; fail if none is there")
    parser.add_argument(
        "--daemon-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="start a daemon in any case, with this option; may be given again",
    )
    parser.add_argument("--timestamp", action="store_true", help="put the time before each line of output")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="...", help="program and its arguments")
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    check_options(parser, options)
    return options


def check_options(parser, options):
    if not options.command:
        parser.error("which program?")
    if options.ranks < 1:
        parser.error("-np must be at least 1")
    if not 0 <= options.node < options.nodes:
        parser.error("--node must be at least 0 and less than --nodes")
    if options.nodes > 1 and not options.job:
        parser.error("--nodes needs --job: the name must be the same on all machines")
    if options.no_daemon and options.daemon_option:
        parser.error("--no-daemon and --daemon-option contradict each other")
    for option in options.daemon_option:
        if "=" not in option:
            parser.error(f"--daemon-option {option}: not KEY=VALUE")


# -- Environment of the ranks


def job_environment(options, path):
    """What all ranks get."""
    job = options.job or f"bpslaunch-{os.getpid()}-{secrets.token_hex(4)}"
    environment = {
        "BPS_SOCKET": path,
        "BPS_JOB": job,
        "BPS_SIZE": str(options.ranks * options.nodes),
        "BPS_LOCAL_SIZE": str(options.ranks),
        "BPS_NODE": str(options.node),
        "BPS_NODES": str(options.nodes),
    }
    if options.nodes == 1 and "BPS_SECRET" not in os.environ:
        environment["BPS_SECRET"] = secrets.token_hex(16)
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // options.ranks))
    environment["PYTHONUNBUFFERED"] = os.environ.get("PYTHONUNBUFFERED", "1")
    if not __package__:  # not installed: let the ranks find the package where this file is
        folders = [os.path.dirname(HERE), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return environment


def rank_environment(options, common, local_rank):
    rank = options.node * options.ranks + local_rank
    return {**os.environ, **common, "BPS_RANK": str(rank), "BPS_LOCAL_RANK": str(local_rank)}


# -- The daemon


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


def find_daemon():
    chosen = os.environ.get("BPS_DAEMON")
    if chosen:
        return chosen
    bundled = os.path.join(HERE, "_bundled", "bps-daemon")
    if os.path.exists(bundled):
        return bundled
    if found := shutil.which("bps-daemon"):
        return found
    top = os.path.abspath(os.path.join(HERE, "..", "..", ".."))
    if os.path.exists(os.path.join(top, "client", "bps.h")):
        folders = [entry.path for entry in os.scandir(top) if entry.name.startswith("build")]
        built = [os.path.join(folder, "daemon", "bps-daemon") for folder in folders]
        built = [path for path in built if os.access(path, os.X_OK)]
        if built:
            return max(built, key=os.path.getmtime)
    raise LaunchError("no daemon is running, and there is no bps-daemon to start: install it, or set BPS_DAEMON to it")


def private_folder():
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not base or not os.access(base, os.W_OK):
        base = None
    return tempfile.mkdtemp(prefix="bpslaunch-", dir=base)  # with mode 0700


def start(command, **options):
    """A child that gets SIGTERM when we die, however that happens. In a process group of its own, so that Ctrl-C comes
    to it once, from us.
    """
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def prepare():  # in the child, before exec
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    try:
        return subprocess.Popen(command, preexec_fn=prepare, **options)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error


class Daemon:
    """A private daemon and the folder it has to itself."""

    def __init__(self, options, path):
        self.options = options
        self.folder = private_folder()
        self.path = path or os.path.join(self.folder, "bps.sock")
        self.admin_path = os.path.join(self.folder, "admin.sock")
        self.process = None
        self.ended = False
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(os.path.join(self.folder, "notify.sock"))

    def start(self):
        # Not with the options of the machine's own daemon, which may name a cluster and its ports.
        command = [find_daemon(), "--config="]
        command += ["--socket", self.path, "--admin-socket", self.admin_path]
        for option in ["log_level=warning", *self.options.daemon_option]:
            command += ["--set", option]
        self.process = start(
            command,
            env={**os.environ, "NOTIFY_SOCKET": self.notify.getsockname()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def says_ready(self):
        """To be called when the socket notify is readable."""
        return b"READY=1" in self.notify.recv(4096).split(b"\n")

    def just_ended(self):
        """True once, after it has ended."""
        before, self.ended = self.ended, self.process.poll() is not None
        return self.ended and not before

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.notify.close()
        shutil.rmtree(self.folder, ignore_errors=True)


# -- Output


class Stream:
    """One pipe of a child, whose lines go out with a prefix."""

    def __init__(self, pipe, prefix, target, timestamp):
        self.pipe = pipe
        self.prefix = prefix.encode()
        self.target = target  # a file descriptor
        self.timestamp = timestamp
        self.rest = b""
        os.set_blocking(pipe.fileno(), False)

    def read(self):
        """Passes on what is there. False at the end."""
        try:
            data = os.read(self.pipe.fileno(), LINE_MAX)
        except BlockingIOError:
            return True
        *lines, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) >= LINE_MAX):
            lines.append(self.rest)
            self.rest = b""
        if lines:
            before = self.prefix + self._time()
            write_all(self.target, b"".join(before + line + b"\n" for line in lines))
        return bool(data)

    def _time(self):
        if not self.timestamp:
            return b""
        now = time.time()
        return f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d} ".encode()


def write_all(fd, data):
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select_writable(fd)


def select_writable(fd):
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_WRITE)
        selector.select()


def describe_end(status):
    """In words, and as an exit status of our own."""
    if status >= 0:
        return f"exited with status {status}", status
    try:
        name = f" ({signal.Signals(-status).name})"
    except ValueError:
        name = ""
    return f"was killed by signal {-status}{name}", 128 - status


# -- The run


class Launcher:
    """Everything happens in one loop, turn(): output to pass on, signals, children that end."""

    def __init__(self, options):
        self.options = options
        self.selector = selectors.DefaultSelector()
        self.daemon = None
        self.ranks = {}  # rank: process, of those that run
        self.open_streams = 0  # of ranks
        self.failed = None  # (rank, pid, status) of the first
        self.kill_at = None
        self.wakeup, self.wakeup_writer = socket.socketpair()
        self.wakeup.setblocking(False)
        self.wakeup_writer.setblocking(False)
        self.selector.register(self.wakeup, selectors.EVENT_READ, self.on_signal)
        signal.set_wakeup_fd(self.wakeup_writer.fileno(), warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the wakeup socket tells the loop

    def run(self):
        try:
            common = job_environment(self.options, self.find_socket())
            if self.daemon is not None:
                common["BPS_ADMIN_SOCKET"] = self.daemon.admin_path
            for local_rank in range(self.options.ranks):
                self.start_rank(common, local_rank)
            while self.ranks:
                self.turn()
            self.drain()
        finally:
            self.kill_ranks()
            if self.daemon is not None:
                self.daemon.stop()
        return self.report()

    # -- Starting

    def find_socket(self):
        options = self.options
        path = options.socket or os.environ.get("BPS_SOCKET") or usual_socket()
        if not options.daemon_option and somebody_listens(path):
            return path
        if options.no_daemon:
            raise LaunchError(f"no daemon listens at {path}")
        self.daemon = Daemon(options, options.socket)
        self.daemon.start()
        self.add_stream(self.daemon.process.stdout, "[daemon] ", 2)
        self.await_daemon()
        return self.daemon.path

    def await_daemon(self):
        daemon, ready = self.daemon, []
        self.selector.register(daemon.notify, selectors.EVENT_READ, lambda: ready.append(daemon.says_ready()))
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True not in ready:
            if daemon.process.poll() is not None:
                self.turn(time.monotonic())  # passes on its last words
                raise LaunchError(f"bps-daemon {describe_end(daemon.process.returncode)[0]} before it was ready")
            if time.monotonic() >= deadline:
                raise LaunchError(f"bps-daemon was not ready after {READY_TIMEOUT_S:.0f} s")
            self.turn(deadline)
        self.selector.unregister(daemon.notify)

    def start_rank(self, common, local_rank):
        environment = rank_environment(self.options, common, local_rank)
        rank = int(environment["BPS_RANK"])
        # A child in the background that reads from the terminal is stopped, so a terminal is nobody's input.
        reads = rank == 0 and not os.isatty(0)
        process = start(
            self.options.command,
            env=environment,
            stdin=None if reads else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.ranks[rank] = process
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            self.open_streams += 1
            self.add_stream(pipe, f"[{rank}] ", target, self.stream_ended)

    def add_stream(self, pipe, prefix, target, ended=None):
        stream = Stream(pipe, prefix, target, self.options.timestamp)

        def readable():
            if not stream.read():
                self.selector.unregister(pipe)
                pipe.close()
                if ended is not None:
                    ended()

        self.selector.register(pipe, selectors.EVENT_READ, readable)

    def stream_ended(self):
        self.open_streams -= 1

    # -- Running

    def turn(self, deadline=None):
        """Waits until something happens, and handles it."""
        until = [t for t in (deadline, self.kill_at) if t is not None]
        timeout = max(0.0, min(until) - time.monotonic()) if until else None
        for key, _ in self.selector.select(timeout):
            key.data()
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.kill_at = None
            self.send(signal.SIGKILL)

    def on_signal(self):
        for number in self.wakeup.recv(4096):
            if number == signal.SIGCHLD:
                self.reap()
            elif self.ranks:
                self.send(number)
            else:
                raise LaunchError(f"ended by {signal.Signals(number).name} while no rank was running")

    def reap(self):
        if self.ranks and self.daemon is not None and self.daemon.just_ended():
            words = describe_end(self.daemon.process.returncode)[0]
            print(f"bpslaunch: bps-daemon {words} while ranks were running", file=sys.stderr, flush=True)
        for rank, process in list(self.ranks.items()):
            status = process.poll()
            if status is None:
                continue
            del self.ranks[rank]
            if status and self.failed is None:
                self.failed = (rank, process.pid, status)
                self.send(signal.SIGTERM)
                self.kill_at = time.monotonic() + KILL_AFTER_S

    def send(self, number):
        """To every rank and what it has started."""
        for process in self.ranks.values():
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass  # about to be reaped

    # -- Ending

    def drain(self):
        """Passes on what ranks have left in their pipes. What they started may hold these open for ever."""
        deadline = time.monotonic() + DRAIN_S
        while self.open_streams and time.monotonic() < deadline:
            self.turn(deadline)

    def kill_ranks(self):
        """Where we leave with an error of our own; else there are none."""
        self.send(signal.SIGKILL)
        for process in self.ranks.values():
            process.wait()

    def report(self):
        if self.failed is None:
            return 0
        rank, pid, status = self.failed
        words, code = describe_end(status)
        print(f"rank {rank} (pid {pid}) {words}", file=sys.stderr, flush=True)
        return code


def main(arguments=None):
    options = parse_arguments(arguments)
    try:
        return Launcher(options).run()
    except LaunchError as error:
        print(f"bpslaunch: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        return 128 + signal.SIGPIPE  # nobody reads our output any more; the ranks are ended by then


if __name__ == "__main__":
    sys.exit(main())
