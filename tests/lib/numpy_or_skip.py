"""numpy, for a test program that does nothing without: its end, with the reason, where there is none."""
import sys

try:
    import numpy as np  # noqa: F401
except ImportError:
    print('skip all: numpy is not installed\n0 passed, 0 failed, 1 skipped')
    sys.exit(77)
