#!/usr/bin/env python3
"""As much of a daemon as bpslaunch sees: listens, says that it is ready, ends at SIGTERM."""

import os
import signal
import socket
import sys

arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("bps-daemon 0.0")
    sys.exit()
path = arguments[arguments.index("--socket") + 1]
print("arguments " + " ".join(arguments[5:]), flush=True)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
listener.listen()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
    notify.connect(os.environ["NOTIFY_SOCKET"])
    notify.send(b"STATUS=at your service\n")
    notify.send(b"READY=1\n")
while True:
    signal.pause()
