"""bps-daemon, bpsctl and bps-bench: where they are, and they as commands of an environment with a wheel that carries them."""

import os
import shutil
import subprocess
import sys

from ._install import find


def version_of(path):
    """What a program says to --version, or None."""
    try:
        said = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
        return said.stdout.split()[-1]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None


def _is_script(path):
    """So are the commands that pip makes, of this environment and of others in $PATH, and what wraps them: asked for its version,
    one that becomes the system's program would ask itself."""
    try:
        with open(path, "rb") as file:
            return file.read(4) != b"\x7fELF"
    except OSError:  # may be executed and not be read
        return True


def _ask(name):
    found = (shutil.which(name, path=folder) for folder in os.get_exec_path())
    path = next((path for path in found if path and not _is_script(path)), None)
    if path is None:
        return None
    version = version_of(path)
    return path, version, None if version else "does not say its version"


def find_program(name, variable=None):
    """The path of bps-daemon, bpsctl or bps-bench, and why it is this one. LookupError: there is none."""
    return find(name, variable, _ask, "bps-daemon")


def run():
    """Becomes the program by whose name this was called."""
    try:
        path, _ = find_program(os.path.basename(sys.argv[0]))
    except LookupError as error:
        sys.exit(str(error))
    os.execv(path, [path, *sys.argv[1:]])
