"""What the tests share: where the library and the daemon are, and how ranks are started."""

import concurrent.futures
import glob
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

PYTHON = pathlib.Path(__file__).resolve().parent.parent
TOP = PYTHON.parent.parent
RANKS = PYTHON / "tests" / "ranks"
DOUBLES = PYTHON / "tests" / "doubles"
LAUNCH = PYTHON / "bps" / "launch.py"

sys.path.insert(0, str(PYTHON))

import forkserver  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "full_tier(why): a test that the gate leaves out, and why")


def is_named(item, config):
    """Whether the command line names this very test, or this function of several tests, by its node id."""
    for argument in config.args:
        path, _, name = argument.partition("::")
        same_file = name and (config.invocation_params.dir / path).resolve() == item.path
        if same_file and name in (item.nodeid.partition("::")[2], item.originalname):
            return True
    return False


def pytest_collection_modifyitems(config, items):
    """With a BPS_TEST_TIER other than full, leaves out the tests that are marked full_tier, except those that are named."""
    if os.environ.get("BPS_TEST_TIER", "full") == "full":
        return
    left_out = [item for item in items if item.get_closest_marker("full_tier") and not is_named(item, config)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def build_folder():
    """$BPS_BUILD_DIR, or the newest build folder that has both the library and the daemon."""
    chosen = os.environ.get("BPS_BUILD_DIR")
    folders = [chosen] if chosen else glob.glob(str(TOP / "build*"))
    complete = [
        pathlib.Path(folder)
        for folder in folders
        if all((pathlib.Path(folder) / path).exists() for path in ("client/libbps_client.so.0", "daemon/bps-daemon"))
    ]
    return max(complete, key=lambda f: (f / "daemon/bps-daemon").stat().st_mtime, default=None)


BUILD = build_folder()
if BUILD is not None:
    os.environ.setdefault("BPS_LIBRARY", str(BUILD / "client/libbps_client.so.0"))
    os.environ.setdefault("BPS_DAEMON", str(BUILD / "daemon/bps-daemon"))

needs_build = pytest.mark.skipif(
    not (os.environ.get("BPS_LIBRARY") and os.environ.get("BPS_DAEMON")), reason="no build folder with bps in it"
)

# XLA's cache of compiled programs. The ranks of all tests share it, as they compile mostly the same.
COMPILED = tempfile.TemporaryDirectory(prefix="bps-compiled-")


def clean_environment(**more):
    """Without what a launcher around the tests may have set, and with a socket that nobody listens on."""
    kept = ("BPS_LIBRARY", "BPS_DAEMON")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BPS_") or k in kept}
    environment.update(BPS_SOCKET="/nonexistent/bps.sock", OMP_NUM_THREADS="1", PYTHONPATH=str(PYTHON))
    environment.update(
        JAX_COMPILATION_CACHE_DIR=COMPILED.name,
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    environment.update({k: str(v) for k, v in more.items()})
    return environment


class ForkServer:
    """A process of forkserver.py that has imported these modules."""

    def __init__(self, modules, environment):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**environment, "PYTHONUNBUFFERED": "1"}
        del environment["PYTHONPATH"]
        command = [sys.executable, forkserver.__file__, str(theirs.fileno()), *modules]
        with theirs:
            self.process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )

    def run(self, arguments, environment, timeout):
        """As subprocess.run() of bpslaunch with these arguments, which name the number of ranks as -np N."""
        n = int(arguments[arguments.index("-np") + 1])
        pipes = [os.pipe(), os.pipe()]
        request = json.dumps([[str(LAUNCH), *arguments], environment, n]).encode()
        socket.send_fds(self.socket, [request], [writer for _, writer in pipes])
        for _, writer in pipes:
            os.close(writer)
        with concurrent.futures.ThreadPoolExecutor() as readers:
            output = [readers.submit(open(reader).read) for reader, _ in pipes]
            pid = int(self.socket.recv(64))
            self.socket.settimeout(timeout)
            try:
                status = int(self.socket.recv(64))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self.socket.settimeout(None)
                self.socket.recv(64)
                raise subprocess.TimeoutExpired(arguments, timeout, *(each.result() for each in output)) from None
            return subprocess.CompletedProcess(arguments, status, *(each.result() for each in output))

    def end(self):
        self.socket.close()
        assert self.process.wait(1200) == 0


@pytest.fixture(scope="module")
def fork_servers():
    """The fork servers of a module of tests, by their fixed environment. They import its PRELOADED."""
    servers = {}
    yield servers
    for server in servers.values():
        server.end()


@pytest.fixture
def run_launch(request, fork_servers):
    """Runs bpslaunch with these arguments to its end.

    In a module of tests with a variable PRELOADED, ranks are forked from a process that has imported what it names.
    """
    preloaded = getattr(request.module, "PRELOADED", None)

    def run(*arguments, timeout=1200, input=None, **environment):
        arguments, environment = [str(argument) for argument in arguments], clean_environment(**environment)
        if preloaded and input is None:
            key = tuple(sorted(forkserver.fixed(environment).items()))
            if key not in fork_servers:
                fork_servers[key] = ForkServer(preloaded, environment)
            return fork_servers[key].run(arguments, environment, timeout)
        return subprocess.run(
            [sys.executable, str(LAUNCH), *arguments],
            env=environment,
            input=input,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def run_ranks(run_launch):
    """Runs a script of tests/ranks in so many ranks; all must end well, and each must have said "done"."""

    def run(script, n, *arguments, options=(), **environment):
        done = run_launch("-np", n, *options, sys.executable, RANKS / script, *arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        ended = sorted(line for line in done.stdout.splitlines() if line.endswith("] done"))
        assert ended == [f"[{rank}] done" for rank in range(n)], done.stdout + done.stderr
        return done

    return run
