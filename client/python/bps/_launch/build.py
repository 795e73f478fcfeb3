"""bpslaunch --check-build: what of bps is usable here."""

import importlib.util
import os
import shutil
import sys

from .. import __version__
from .._programs import find_program, version_of
from . import topology
from .daemon import find_bpsctl, somebody_listens, usual_socket

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
    """(whether the library can be loaded, its version and path and why it is this one, or why not)"""
    from .. import _library

    try:
        lib = _library.library()
    except ImportError as error:
        return False, str(error)
    return True, f"{lib.bps_version().decode()}, {lib._name}: {_library.found()[1]}"


def program(find, *arguments):
    """The same of a program."""
    try:
        path, why = find(*arguments)
    except LookupError as error:
        return False, str(error)
    return True, f"{version_of(path) or 'of unknown version'}, {path}: {why}"


def report():
    parts = {
        "libbps_client": library(),
        "bps-daemon": program(find_program, "bps-daemon", "BPS_DAEMON"),
        "bpsctl": program(find_bpsctl),
    }
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
            *(line(have, name, words) for name, (have, words) in parts.items()),
            line(listens, "a daemon that listens", path),
            "",
            "Available to bpslaunch:",
            line(ssh is not None, "other machines, by ssh", ssh or "not found"),
            line(True, "binding to cores", "by hwloc" if hwloc else "by /sys: no libhwloc.so.15"),
        ]
    )
