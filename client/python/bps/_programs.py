"""bps-daemon, bpsctl and bps-bench as commands of an environment into which a wheel that carries them was installed."""

import os
import sys

from ._library import bundled


def run():
    """Becomes the program by whose name this was called."""
    path = bundled(os.path.basename(sys.argv[0]))
    os.execv(path, [path, *sys.argv[1:]])
