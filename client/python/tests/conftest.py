"""What the tests share: where the library and the daemon are, and how ranks are started."""

import glob
import os
import pathlib
import subprocess
import sys

import pytest

PYTHON = pathlib.Path(__file__).resolve().parent.parent
TOP = PYTHON.parent.parent
RANKS = PYTHON / "tests" / "ranks"
LAUNCH = PYTHON / "bps" / "launch.py"

sys.path.insert(0, str(PYTHON))


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


def clean_environment(**more):
    """Without what a launcher around the tests may have set, and with a socket that nobody listens on."""
    kept = ("BPS_LIBRARY", "BPS_DAEMON")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BPS_") or k in kept}
    environment.update(BPS_SOCKET="/nonexistent/bps.sock", OMP_NUM_THREADS="1", PYTHONPATH=str(PYTHON))
    environment.update({k: str(v) for k, v in more.items()})
    return environment


@pytest.fixture
def run_launch():
    """Runs bpslaunch with these arguments to its end."""

    def run(*arguments, timeout=400, input=None, **environment):
        return subprocess.run(
            [sys.executable, str(LAUNCH), *map(str, arguments)],
            env=clean_environment(**environment),
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
