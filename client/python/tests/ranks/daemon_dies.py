"""Ranks whose daemon is killed in the middle: the launcher's or the keeper's next one takes its place."""

import os
import pathlib
import signal
import sys

import bps

if len(sys.argv) > 2:
    bps.init(rank=int(sys.argv[1]), size=int(sys.argv[2]), job="j", start_daemon=True)
    socket = pathlib.Path(os.environ["XDG_RUNTIME_DIR"]) / f"bps-{os.getuid()}-j" / "bps.sock"
else:
    bps.init()
    socket = pathlib.Path(os.environ["BPS_SOCKET"])


def daemon():
    """The process that has this socket as an argument of --socket."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--socket" in words and words[words.index(b"--socket") + 1] == bytes(socket) and b"bps-daemon" in words[0]:
            return int(path.parent.name)
    raise AssertionError("no daemon")


x = bytearray(1000)
x[:] = bytes([1 + bps.rank()]) * 1000
for step in range(6):
    if step == 3 and bps.rank() == 0:
        os.kill(daemon(), signal.SIGKILL)
    assert bps.push_pull(x, average=False, name="x") == bytes([3]) * 1000, step
os.write(1, b"done\n")
