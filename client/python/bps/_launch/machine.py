"""The part of a run on one machine: a daemon if it needs one, and its ranks. Commands are methods, what happens is told by
emit(kind, data=b"", **fields). The launcher has one in its own process, or talks to one behind ssh; both are the same.

    command         answer
    look            machine     who it is, and whether a daemon listens there
    listen          listening   the port that other daemons will reach
    start_daemon    ready       the daemon's sockets
    start_ranks     started
    add_rank        added, then joined when it is in the job, if its program can tell
    end_rank        ended, in time
    signal, stop, send_input (taken)
    finish          bye

In between: output (of a rank or of the daemon), quiet (no more of a line that has begun comes for a while), ended (a rank),
daemon_ended, and idle: no rank runs, and all has been said.
"""

import fcntl
import os
import signal
import socket
import struct
import subprocess
import threading

from . import LaunchError, bind, process
from .daemon import Daemon, somebody_listens, usual_socket
from .output import LINE_MAX

ASK_S = 5.0  # for an answer of the daemon that listens
GRACE_S = 30.0  # between SIGTERM and SIGKILL, if nobody says otherwise
LEFT_S = 0.1  # how often what ranks have left running is looked at, once they were told to end
# A terminal sends these to all processes of a rank. The others reach the rank alone: workers of a DataLoader that end by a signal
# of which the rank knows would take its last step with them.
TO_ALL = (signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
QUIET_S = 0.2  # until the beginning of a line counts as all that comes of it for a while
QUIET_MAX = 4  # so many times that, while it grows
DRAIN_S = 2.0  # for output of what the ranks themselves left running
SIOCGIFADDR = 0x8915
F_GETPIPE_SZ = 1032  # fcntl knows it from Python 3.10 on
COMMANDS = ("look", "listen", "start_daemon", "start_ranks", "add_rank", "end_rank", "signal", "stop", "send_input", "finish")


def interface_address(names):
    """The IPv4 address of the first of these network interfaces that is here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            return socket.inet_ntoa(answer[20:24])
    here = ", ".join(name for _, name in socket.if_nameindex())
    raise LaunchError(f"no network interface {' or '.join(names)} with an IPv4 address; there are: {here}")


def own_address(interfaces, towards):
    """Where the daemons of other machines find this one, or None: whoever reaches us must know."""
    if interfaces:
        return interface_address(interfaces)
    if connection := os.environ.get("SSH_CONNECTION"):
        return connection.split()[2]
    if towards:
        try:
            found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # sends nothing
                return probe.getsockname()[0]
        except OSError:
            return None
    return None


def stands_alone(path, library=None):
    """Whether the daemon that listens there says that it is in no cluster. LaunchError where it cannot be asked, or is not
    quick. library: the libbps_client to ask with; None: the one that is found here."""
    answers = []

    def ask():
        if library:
            os.environ.setdefault("BPS_LIBRARY", library)
        try:
            from .. import _library  # which may not be here

            answers.append(_library.status(path).cluster)
        except (ImportError, OSError) as error:
            answers.append(error)

    # The library gives who listens half a minute to answer.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ASK_S)
    answer = answers[0] if answers else f"no answer within {ASK_S:g} s"
    if not isinstance(answer, bytes):
        raise LaunchError(f"the daemon at {path} does not say whether it is in a cluster, and is used: {answer}")
    return answer == b"single"


def send(how, pid, number):
    """how: os.kill or os.killpg."""
    try:
        how(pid, number)
    except ProcessLookupError:
        pass  # about to be reaped


class Quiet:
    """Tells when a stream has begun a line and says no more of it: it waits, as for an answer to a prompt."""

    def __init__(self, machine, source, target):
        self.machine, self.source, self.target = machine, source, target
        self.timer = None
        self.is_open = self.grows = False  # a line has begun; more of it has come since the timer was set
        self.waited = 0

    def heard(self, data):
        self.is_open = bool(data) and not data.endswith(b"\n")
        self.grows = True
        if b"\n" in data:
            self.waited = 0
        if self.is_open and self.timer is None:
            self._wait()

    def _wait(self):
        self.grows = False
        self.waited += 1
        self.timer = self.machine.loop.after(QUIET_S, self._over)

    def _over(self):
        self.timer = None
        if self.is_open and (self.machine.paused or self.grows and self.waited < QUIET_MAX):
            self._wait()
        elif self.is_open:
            self.waited = 0
            self.machine.emit("quiet", source=self.source, target=self.target)


class Machine:
    def __init__(self, loop, emit):
        self.loop = loop
        self.emit = emit
        self.daemon = None
        self.ranks = {}  # rank: process, of those that run
        self.pipes = {}  # of ranks: pipe: (callback, source, target)
        self.input = None  # of the rank that gets it
        self.told = {}  # pid of a rank: the last signal that was passed on to it alone, and not to its process group
        self.left = set()  # process groups of ranks that were told to end and have, with others of the group still there
        self.grace = GRACE_S
        self.kill_timer = self.drain_timer = None
        self.paused = self.restarts = False

    # -- The machine

    def look(self, path, interfaces=(), towards=None, cluster=False, library=None):
        """cluster: whether the run has other machines too. library: the libbps_client of the one who runs bpslaunch."""
        path = path or os.environ.get("BPS_SOCKET") or usual_socket()
        listens = somebody_listens(path)
        alone, doubt = False, None
        if listens and cluster:
            try:
                alone = stands_alone(path, library)
            except LaunchError as error:
                doubt = str(error)
        self.emit(
            "machine",
            socket=path,
            listens=listens,
            alone=alone,
            doubt=doubt,
            cores=len(os.sched_getaffinity(0)),
            address=own_address(interfaces, towards) if cluster else None,
        )

    # -- Its daemon

    def listen(self, address):
        self._new_daemon(None)
        port = self.daemon.listen(address)
        self.emit("listening", port=port)
        return port

    def _new_daemon(self, path):
        if self.daemon is None:
            self.daemon = Daemon(path)

    def start_daemon(self, options, path=None, cluster=None, key=None, program=None, restarts=False):
        """cluster: the text of bps-cluster.conf(5). key: what its daemons know. program: the bps-daemon to take. restarts:
        whether a job goes on with the next one, where it ends by itself: if all its ranks are here.
        """
        self.restarts = restarts
        self._new_daemon(path)
        if path:
            self.daemon.path = path
        options = list(options)
        if cluster is not None:
            options += ["cluster=static", "cluster_file=" + self.daemon.write("cluster.conf", cluster)]
        if key is not None:
            options.append("cluster_key_file=" + self.daemon.write("cluster.key", key))
        self.daemon.start(options, program)
        self._watch_pipe(self.daemon.process.stdout, "daemon", 2)
        self.loop.watch(self.daemon.notify, self._notified)

    def _notified(self):
        if self.daemon.says_ready():
            self.loop.forget(self.daemon.notify)
            self.emit("ready", socket=self.daemon.path, admin_socket=self.daemon.admin_path)

    # -- Its ranks

    def start_ranks(self, ranks, command, environment, folder=None, reader=None, inherit=False, rule="none", grace=GRACE_S):
        """ranks: [[rank, its own variables]], by local rank. environment: what all get, over that of this process. reader:
        the rank that send_input() is for, or with inherit the one that has our own standard input. rule: of bind.plan().
        grace: seconds between SIGTERM and SIGKILL.
        """
        self.grace = grace
        cpus = bind.plan(rule, len(ranks))
        for (rank, own), set_of_cpus in zip(ranks, cpus):
            # A child in the background that reads from the terminal is stopped, so a terminal is nobody's input.
            stdin = subprocess.DEVNULL if rank != reader else None if inherit else subprocess.PIPE
            self._start_rank(rank, command, {**os.environ, **environment, **own}, folder, stdin, set_of_cpus)
        self.start_another = lambda rank, own, **options: self._start_rank(
            rank, command, {**os.environ, **environment, **own}, folder, subprocess.DEVNULL, None, **options
        )
        self.emit("started", pids={rank: process.pid for rank, process in self.ranks.items()})

    def add_rank(self, rank, own):
        """Another like those that start_ranks() was told of. It says by a pipe that it is in the job."""
        joined, writer = os.pipe()
        if self.drain_timer is not None:
            self.drain_timer.cancel()
            self.drain_timer = None

        def readable():
            if os.read(joined, 1):
                self.emit("joined", rank=rank)
            self.loop.forget(reader)
            reader.close()

        reader = os.fdopen(joined, "rb", buffering=0)
        try:
            self.start_another(rank, {**own, "BPS_JOINED_FD": str(writer)}, pass_fds=(writer,))
        finally:
            os.close(writer)
        self.loop.watch(reader, readable)
        self.emit("added", rank=rank)

    def end_rank(self, rank):
        """SIGTERM for one."""
        if rank in self.ranks:
            self._tell(self.ranks[rank].pid, signal.SIGTERM)

    def _start_rank(self, rank, command, environment, folder, stdin, cpus, **options):
        child = process.start(
            command,
            cpus=cpus,
            env=environment,
            cwd=folder,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        self.ranks[rank] = child
        if stdin == subprocess.PIPE:
            self.input = child.stdin
            os.set_blocking(self.input.fileno(), False)
        for pipe, target in ((child.stdout, 1), (child.stderr, 2)):
            self._watch_pipe(pipe, rank, target)

    def _watch_pipe(self, pipe, source, target):
        os.set_blocking(pipe.fileno(), False)
        quiet = Quiet(self, source, target)

        def readable():
            try:
                data = os.read(pipe.fileno(), LINE_MAX)
            except BlockingIOError:
                return
            self.emit("output", data, source=source, target=target)
            quiet.heard(data)
            if not data:
                self.loop.forget(pipe)
                self.pipes.pop(pipe, None)
                pipe.close()
                self._look_idle()

        if source != "daemon":
            self.pipes[pipe] = readable, source, target
        if not self.paused or source == "daemon":
            self.loop.watch(pipe, readable)

    def pause(self, paused):
        """Stops reading what the ranks write, so that they wait for whoever reads."""
        if paused == self.paused:
            return
        self.paused = paused
        for pipe, (readable, *_) in self.pipes.items():
            if paused:
                self.loop.forget(pipe)
            else:
                self.loop.watch(pipe, readable)

    def send_input(self, data):
        """data for the reading rank; b"" is the end of it. Answered by taken when the next may come."""
        if self.input is None:
            return
        if data:
            try:
                data = data[os.write(self.input.fileno(), data) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                return self._close_input()
            if data:
                self.loop.watch(self.input, lambda: self._input_writable(data), events=2)
            else:
                self.emit("taken")
        else:
            self._close_input()

    def _input_writable(self, data):
        self.loop.forget(self.input)
        self.send_input(data)

    def _close_input(self):
        if self.input is not None:
            self.loop.forget(self.input)
            self.input.close()
            self.input = None

    def signal(self, number):
        """To every rank, and to what ranks have left."""
        for child in self.ranks.values():
            self._tell(child.pid, number)
        for group in self.left:
            send(os.killpg, group, number)

    def _tell(self, pid, number):
        if number in TO_ALL:
            send(os.killpg, pid, number)
        else:
            self.told[pid] = number
            send(os.kill, pid, number)

    def stop(self):
        """SIGTERM for the ranks that have not had it, and SIGKILL when their time is over."""
        if (self.ranks or self.left) and self.kill_timer is None:
            for child in self.ranks.values():
                if self.told.get(child.pid) != signal.SIGTERM:
                    self._tell(child.pid, signal.SIGTERM)
            self._kill_later()

    def _kill_later(self):
        self.kill_timer = self.loop.after(self.grace, lambda: self.signal(signal.SIGKILL))

    # -- The end

    def reap(self):
        """To be called at SIGCHLD."""
        if self.daemon is not None and self.daemon.process is not None and not self.daemon.ended:
            status = self.daemon.process.poll()
            if status is not None:
                self._daemon_ended(status)
        ended = [(rank, child, child.poll()) for rank, child in self.ranks.items()]
        for rank, child, status in ended:
            if status is not None:
                del self.ranks[rank]
                self._tell_rest(child.pid, status)
                self.emit("ended", rank=rank, pid=child.pid, status=status)
        if not self.ranks and any(status is not None for *_, status in ended):
            self._close_input()
            self._look_left()

    def _tell_rest(self, group, status):
        """A rank has ended after SIGTERM, or by another signal that came to it alone: what it has started gets that signal now, since it
        may be the program behind a shell. What a rank that ends otherwise leaves is its own affair.
        """
        number = self.told.pop(group, None)
        if (number == signal.SIGTERM or number and status == -number) and process.group_runs(group):
            send(os.killpg, group, number)
            self.left.add(group)

    def _look_left(self):
        self.left = {group for group in self.left if process.group_runs(group)}
        if self.left:
            if not self.ranks and self.kill_timer is None:
                self._kill_later()
            self.loop.after(LEFT_S, self._look_left)
        elif not self.ranks:
            if self.kill_timer is not None:
                self.kill_timer.cancel()
                self.kill_timer = None
            # What ranks have started may hold their pipes open for ever.
            self.drain_timer = self.loop.after(DRAIN_S, self._drained)
            self._look_idle()

    def _daemon_ended(self, status):
        if not self.daemon.process.stdout.closed:  # its last words come before the news of its end
            self._read_out(self.daemon.process.stdout, "daemon", 2)
        restarted = self.restarts and self.daemon.ready and bool(self.ranks) and self.daemon.restart()
        if restarted:
            self._watch_pipe(self.daemon.process.stdout, "daemon", 2)
        self.daemon.ended = not restarted
        self.emit("daemon_ended", status=status, ready=self.daemon.ready, ranks=len(self.ranks), restarted=restarted)

    def _read_out(self, pipe, source, target, limit=LINE_MAX):
        """What is in a pipe now, and closes it."""
        data = b"-"
        while data and limit > 0:
            try:
                data = os.read(pipe.fileno(), limit)
            except BlockingIOError:
                data = b""
            limit -= len(data)
            if data:
                self.emit("output", data, source=source, target=target)
        self.emit("output", b"", source=source, target=target)
        self.loop.forget(pipe)
        pipe.close()

    def _look_idle(self):
        if self.drain_timer is not None and not self.pipes:
            self.drain_timer.cancel()
            self._drained()

    def _drained(self):
        """What the ranks themselves wrote is in their pipes at most, whoever holds these open and writes on."""
        self.drain_timer = None
        for pipe in [*self.pipes]:
            self._read_out(pipe, *self.pipes.pop(pipe)[1:], fcntl.fcntl(pipe, F_GETPIPE_SZ))
        self.emit("idle")

    def finish(self):
        """Ends what runs still, at once, and the daemon."""
        self.signal(signal.SIGKILL)
        for child in self.ranks.values():
            child.wait()
        self.ranks.clear()
        if self.daemon is not None:
            self.daemon.ended = True  # as it is asked to
            self.daemon.stop()
        self.emit("bye")
