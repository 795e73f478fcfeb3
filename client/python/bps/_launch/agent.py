"""The other end of ssh: does what the launcher's messages say, and ends everything when the launcher is gone."""

import os
import signal
import time

from . import LaunchError, wire
from .loop import Loop
from .machine import COMMANDS, Machine

OUT_HIGH = 1 << 20  # bytes not yet read by the launcher, beyond which ranks wait


class Agent:
    def __init__(self):
        self.loop = Loop()
        self.machine = Machine(self.loop, self.emit)
        self.reader = wire.Reader()
        self.out = bytearray()
        self.heard = time.monotonic()
        self.done = False
        # The ranks' output is not to mix with ours: descriptors 0 and 1 are the line from here on.
        self.line_in = os.fdopen(os.dup(0), "rb", buffering=0)
        self.line_out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
        os.dup2(2, 1)

    def run(self):
        for line in (self.line_in, self.line_out):
            os.set_blocking(line.fileno(), False)
        # A terminal's or a session's signals are for the launcher to pass on, but for SIGTERM: that is our own end. They are
        # caught and not ignored, since what is ignored stays so in the ranks.
        self.loop.on_signals((signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self.on_signal)
        self.loop.watch(self.line_in, self.readable)
        self.write(wire.GREETING)
        try:
            while not self.done:
                self.loop.turn()
            self.flush_last()
        finally:
            self.machine.emit = lambda *_, **__: None
            self.machine.finish()
        return 0

    def on_signal(self, number):
        if number == signal.SIGCHLD:
            self.machine.reap()
        elif number == signal.SIGTERM:
            self.leave()

    def leave(self):
        """The launcher is gone: the ranks get their SIGTERM, and some time."""
        if not self.machine.ranks:
            self.done = True
            return
        self.machine.emit = self.emit_alone
        self.loop.forget(self.line_in)
        self.loop.forget(self.line_out)
        self.machine.pause(False)
        self.machine.stop()

    def emit_alone(self, kind, data=b"", /, **fields):
        if kind == "idle":
            self.done = True

    # -- The line

    def emit(self, kind, data=b"", /, **fields):
        self.write(wire.pack(kind, data, **fields))
        if kind == "bye":
            self.done = True

    def write(self, data):
        self.out += data
        self.flush()

    def flush(self):
        try:
            while self.out:
                del self.out[: os.write(self.line_out.fileno(), self.out[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self.out.clear()
            self.leave()
            return
        if self.out:
            self.loop.watch(self.line_out, self.flush, events=2)
        else:
            self.loop.forget(self.line_out)
        self.machine.pause(len(self.out) > OUT_HIGH)

    def flush_last(self):
        os.set_blocking(self.line_out.fileno(), True)
        try:
            while self.out:
                del self.out[: os.write(self.line_out.fileno(), self.out)]
        except OSError:
            pass

    def readable(self):
        try:
            data = os.read(self.line_in.fileno(), 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.heard = time.monotonic()
        if not data:
            self.leave()
            return
        for kind, fields, payload in self.reader.feed(data):
            self.obey(kind, fields, payload)

    def obey(self, kind, fields, payload):
        if kind == "beat":
            self.write(wire.pack("beat"))
        elif kind == "hello":
            self.silence_s = fields["silence_s"]
            self.loop.after(self.silence_s, self.listen_for_beats)
        elif kind in COMMANDS:
            if kind == "send_input":
                fields["data"] = payload
            try:
                getattr(self.machine, kind)(**fields)
            except LaunchError as error:
                self.emit("error", text=str(error))
        else:
            self.emit("error", text=f"the agent does not know {kind!r}: is bps here of another version?")

    def listen_for_beats(self):
        left = self.heard + self.silence_s - time.monotonic()
        if left <= 0:
            self.leave()
        else:
            self.loop.after(left, self.listen_for_beats)


def main():
    return Agent().run()
