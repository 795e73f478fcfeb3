"""Starts bpslaunch and its ranks in processes that have imported a framework already: an import takes seconds.

    forkserver.py FD MODULE...

The server imports each MODULE, and then answers the requests that come on the socket FD, one after the other. A request
is [arguments of bpslaunch, its environment, the most ranks that it starts], with two descriptors: its standard output
and its standard error. The server answers with the pid of the launcher, and when this has ended with its exit status.

For each request the server forks a launcher. The launcher forks its ranks before it runs bpslaunch, so that no rank has
a file open that bpslaunch opens. Each rank then waits until bpslaunch starts it, which tells it its arguments,
environment, folder and standard streams. Ranks that bpslaunch starts beyond these are executed in the usual way.

A rank has the parent, signals, output, folder and environment that it would have if it had been executed. One thing is
different: the seed of Python's hashes is that of the server.
"""

import ctypes
import gc
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import types

MESSAGE_MAX = 1 << 17
PR_SET_PDEATHSIG = 1
# The variables that may differ between the server and a rank. No module reads them while it is imported.
OWN = re.compile(
    r"BPS_.*|BYTEPS_.*|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|"
    r"PYTHONPATH|PYTHONUNBUFFERED|TEST_.*|PYTEST_.*"
)


def fixed(environment):
    """The variables that a process must have had when it was executed, as modules read them while they are imported."""
    return {name: value for name, value in environment.items() if not OWN.fullmatch(name)}


class Rank(subprocess.Popen):
    """A Popen whose process is not executed: one that has been forked and waits is told what it is to run."""

    def __init__(self, waiting, command, cpus, options):
        self.waiting, self.cpus = waiting, cpus
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        pipes = others[3:9]  # both ends of each standard stream
        self.pid, told = self.waiting
        self._child_created = True
        os.setpgid(self.pid, self.pid)
        if self.cpus:
            os.sched_setaffinity(self.pid, self.cpus)
        what = json.dumps([list(map(str, args[1:])), env, cwd]).encode()
        streams = [number if fd == -1 else fd for number, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        with told:
            socket.send_fds(told, [what], streams)
        self._close_pipe_fds(*pipes)


def fork_ranks(n):
    """Forks n ranks. Returns twice: in the launcher ([(pid, socket)], None), one for each rank that waits; in a rank,
    when it has been told what it is, (None, (arguments, environment, folder)).
    """
    waiting = []
    launcher = os.getpid()
    for _ in range(n):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in waiting:
                other.close()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != launcher:
                os._exit(1)
            return None, be_told(theirs)
        theirs.close()
        waiting.append((pid, ours))
    return waiting, None


def be_told(launcher):
    """Waits until the launcher starts this rank. Its standard streams come with what it is told."""
    with launcher:
        data, streams, _, _ = socket.recv_fds(launcher, MESSAGE_MAX, 3)
    if not data:
        os._exit(0)  # the launcher has ended and has not needed this rank
    take_streams(streams)
    return json.loads(data)


def take_streams(descriptors):
    """Makes descriptors the standard streams of this process: all three, or the last two."""
    for number, descriptor in enumerate(descriptors, 3 - len(descriptors)):
        os.dup2(descriptor, number)
        os.close(descriptor)


def launch_by(waiting, environment):
    """Makes bpslaunch, which is imported here, use the ranks that wait for the scripts that it starts."""
    from bps._launch import process

    execute = process.start

    def start(command, *, cpus=None, **options):
        same = fixed(options.get("env") or {}) == fixed(environment) and not options.get("pass_fds")
        if not waiting or not same or command[0] != sys.executable or not str(command[1]).endswith(".py"):
            return execute(command, cpus=cpus, **options)
        return Rank(waiting.pop(0), command, cpus, options)

    process.start = start


def become(arguments, environment, folder):
    """Makes this process one that Python has started for a script. Returns the script, compiled, and its globals."""
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    sys.argv = arguments
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.dirname(os.path.realpath(arguments[0])), *filter(None, paths)]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    main = types.ModuleType("__main__")
    main.__file__ = arguments[0]
    sys.modules["__main__"] = main
    with open(arguments[0], "rb") as file:
        return compile(file.read(), arguments[0], "exec"), main.__dict__


def serve(requests):
    """Answers requests until the tests end. Returns only in launchers and ranks: (code, globals) for them to run."""
    while True:
        data, streams, _, _ = socket.recv_fds(requests, MESSAGE_MAX, 2)
        if not data:
            sys.exit()  # the tests have ended
        assert len(os.listdir("/proc/self/task")) == 1, f"{sys.argv[2:]} start threads, which a fork does not keep"
        pid = os.fork()
        if pid == 0:
            break
        for stream in streams:
            os.close(stream)
        requests.send(str(pid).encode())
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    requests.close()
    take_streams(streams)
    arguments, environment, n = json.loads(data)
    waiting, rank = fork_ranks(n)
    if rank is not None:
        ready = become(*rank)
        if "torch" in sys.modules:
            # torch looks for backends, such as ours, while it is imported: the server's PYTHONPATH has none.
            sys.modules["torch"]._import_device_backends()
        return ready
    ready = become(arguments, environment, None)
    launch_by(waiting, environment)
    return ready


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    del sys.path[0]
    gc.freeze()
    exec(*serve(socket.socket(fileno=int(sys.argv[1]))))
