"""A rank that starts its own daemon if it must: by its environment, or as rank and size of its arguments."""

import os
import sys

import bps

if len(sys.argv) > 2:
    bps.init(rank=int(sys.argv[1]), size=int(sys.argv[2]), job=sys.argv[3], start_daemon=True)
else:
    bps.init()
x = bytearray(8)
x[0] = 1 + bps.rank()
assert bps.push_pull(x, average=False)[0] == bps.size() * (bps.size() + 1) // 2
line = f"rank {bps.rank()} of {bps.size()} local {bps.local_rank()} {bps.local_size()}\n"
os.write(1, line.encode())  # in one piece: torchrun lets all ranks write into one pipe
if "BPS_TEST_WAIT" in os.environ:
    os.write(1, f"pid {os.getpid()}\n".encode())
    sys.stdin.read()
