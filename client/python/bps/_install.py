"""Which of the parts of bps that are no Python are used, the library and the programs, and what is said to who lacks one."""

import glob
import os
import re

from . import __version__

WAY_OUT = (
    "install Debian's packages (scripts/package && apt-get install ./build/packages/*.deb), or a wheel of bps that carries it, "
    "in the source tree by: scripts/deps build && pip install ./client/python"
)
_BUILT_IN = ("client", "daemon", "daemon/admin", "daemon/bench")  # folders of a build
PACKAGE = os.path.dirname(os.path.abspath(__file__))


def bundled(name):
    """The path of a file that came inside the wheel, or None."""
    path = os.path.join(PACKAGE, "_bundled", name)
    return path if os.path.exists(path) else None


def from_build_tree(name):
    """The newest file of that name in a build folder of the source tree that this package lies in, or None."""
    top = os.path.abspath(os.path.join(PACKAGE, "..", "..", ".."))
    if not os.path.exists(os.path.join(top, "client", "bps.h")):
        return None
    found = [path for folder in _BUILT_IN for path in glob.glob(os.path.join(top, "build*", folder, name))]
    # A link is left where a build was removed in part.
    return max(filter(os.path.exists, found), key=os.path.getmtime, default=None)


def _number(version):
    return tuple(map(int, re.findall(r"\d+", version)))


def find(name, variable, ask, package):
    """Where a part lies, and in words why it is this one. LookupError: there is none, and what mends that.

    variable: that of the environment which may name it, or None. ask(name): the system's, as its path, its version if it
    says one, and what is wrong with it, or None where the system has none. package: the one of Debian that has it.
    """
    if chosen := variable and os.environ.get(variable):
        return chosen, f"${variable}"
    why, mends = "the system has none", ""
    if system := ask(name):
        path, version, fault = system
        if version and _number(version) < _number(__version__):
            fault = f"is {version}, older than this package's {__version__}"
        if not fault:
            return path, f"the system's, not older than this package's {__version__}"
        why, mends = f"the system's {path} {fault}", f": apt-get install {package}"
    if path := bundled(name) or from_build_tree(name):
        return path, why + mends
    raise LookupError(f"bps {__version__} carries no {name}, and {why}{mends or f'; {WAY_OUT}'}")
