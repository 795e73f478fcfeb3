"""bpslaunch --check-build: what of bps is usable here."""

import importlib.util
import os
import shutil
import subprocess
import sys

from .. import __version__
from .._install import WAY_OUT
from . import topology
from .daemon import find_bpsctl, find_program, somebody_listens, usual_socket

FRAMEWORKS = (
    ("PyTorch", "torch"),
    ("TensorFlow", "tensorflow"),
    ("Keras", "keras"),
    ("JAX", "jax"),
    ("MXNet", "mxnet"),
)


def available(module):
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def library():
    """(whether the library can be loaded, its version and path or why not)"""
    from .. import _library

    try:
        lib = _library.library()
    except ImportError as error:
        return False, str(error)
    return True, f"{lib.bps_version().decode()}, {lib._name}"


def program(path):
    """The version of a program and its path."""
    try:
        said = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
        version = said.stdout.split()[-1]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        version = "of unknown version"
    return f"{version}, {path}"


def report():
    loaded, words = library()
    daemon = find_program("bps-daemon", "BPS_DAEMON")
    bpsctl = find_bpsctl()
    path = os.environ.get("BPS_SOCKET") or usual_socket()
    listens = somebody_listens(path)
    ssh = shutil.which("ssh")
    hwloc = topology.from_hwloc() is not None

    def line(have, name, more=""):
        return f"    [{'X' if have else ' '}] {name}" + (f"  ({more})" if more else "")

    def adapter(name, module):
        have, installed = available(f"bps.{module}"), available(module)
        why = "" if have and installed else "not installed here" if have else "bps has no adapter for it here"
        return line(have and installed, name, why)

    return "\n".join(
        [
            f"bps {__version__} for Python {sys.version.split()[0]}:",
            "",
            "Available frameworks:",
            line(available("numpy"), "NumPy"),
            *(adapter(name, module) for name, module in FRAMEWORKS),
            "",
            "Available parts:",
            line(loaded, "libbps_client", words),
            line(daemon is not None, "bps-daemon", program(daemon) if daemon else f"not found: no private daemons. {WAY_OUT}"),
            line(bpsctl is not None, "bpsctl", program(bpsctl) if bpsctl else f"not found. {WAY_OUT}"),
            line(listens, "a daemon that listens", path),
            "",
            "Available to bpslaunch:",
            line(ssh is not None, "other machines, by ssh", ssh or "not found"),
            line(True, "binding to cores", "by hwloc" if hwloc else "by /sys: no libhwloc.so.15"),
        ]
    )
