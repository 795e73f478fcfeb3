"""Lines of ranks and daemons: a prefix before each on the terminal, and as they are into files."""

import os
import re
import selectors
import time

LINE_MAX = 1 << 16
PIECES = re.compile(rb"[^\r\n]+|[\r\n]")


class Target:
    """A file descriptor that lines of many streams go to. open_line: of those Lines whose last line has no end there yet, or None."""

    def __init__(self, fd):
        self.fd = fd
        self.open_line = None

    def write(self, data):
        write_all(self.fd, data)

    def say(self, text):
        """A line of our own."""
        end = b"\n" if self.open_line else b""
        self.open_line = None
        self.write(end + os.fsencode(text) + b"\n")


_targets = {}


def target_of(fd):
    """The Target of standard output or error. Both are one where they lead to one place."""
    found = os.fstat(fd)
    return _targets.setdefault((found.st_dev, found.st_ino), Target(fd))


class Lines:
    """One stream of one process. Passes lines on when they have ended, by \\n, or by \\r, after which they are written over; what has not
    ended by show(). Where another stream has written meanwhile, the rest is a line of its own, with the prefix again.
    """

    def __init__(self, prefix, target, timestamp=False, file=None):
        self.prefix = prefix.encode()
        self.target = target
        self.timestamp = timestamp
        self.file = file  # a binary file that gets the same bytes, or None
        self.rest = b""  # not shown yet
        self.returns = False  # what comes next is written over the line

    def feed(self, data):
        """data is b"" at the end of the stream."""
        if self.file is not None:
            self.file.write(data)
            self.file.flush()
        out = []
        for piece in PIECES.findall(data):
            if piece == b"\n":
                out += self._end()
            elif piece == b"\r":
                out += self._shown()
                self.returns = True
            else:
                self.rest += piece
        if len(self.rest) >= LINE_MAX or not data and (self.rest or self.target.open_line is self):
            out += self._end()
        if out:
            self.target.write(b"".join(out))

    def show(self):
        """The beginning of a line: a prompt, or a bar that goes on."""
        if out := self._shown():
            self.target.write(b"".join(out))

    def _shown(self):
        """What there is of the line."""
        return [*self._begin(), self._taken()] if self.rest else []

    def _end(self):
        """The same, and its end."""
        begin = self._begin() if self.rest or self.target.open_line is not self else ()
        self.target.open_line = None
        self.returns = False
        return [*begin, self._taken(), b"\n"]

    def _taken(self):
        rest, self.rest = self.rest, b""
        return rest

    def _begin(self):
        """What comes before text: nothing where the line goes on."""
        target = self.target
        if target.open_line is self:
            before = b"\r" if self.returns else None
        else:
            before = b"\n" if target.open_line else b""
        self.returns = False
        target.open_line = self
        return () if before is None else (before + self.prefix + self._time(),)

    def _time(self):
        if not self.timestamp:
            return b""
        now = time.time()
        return f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d} ".encode()


def write_all(fd, data):
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            with selectors.DefaultSelector() as selector:
                selector.register(fd, selectors.EVENT_WRITE)
                selector.select()


def rank_file(folder, rank, size, name):
    """folder/rank.N/name, N padded so that names sort as numbers do, as horovodrun --output-filename does."""
    path = os.path.join(folder, f"rank.{rank:0{len(str(size - 1))}d}")
    os.makedirs(path, exist_ok=True)
    return open(os.path.join(path, name), "wb")
