"""Lines of ranks and daemons: a prefix before each on the terminal, and as they are into files."""

import os
import selectors
import time

LINE_MAX = 1 << 16


class Lines:
    """One stream of one process. Cuts what comes into lines."""

    def __init__(self, prefix, target, timestamp=False, file=None):
        self.prefix = prefix.encode()
        self.target = target  # a file descriptor
        self.timestamp = timestamp
        self.file = file  # a binary file that gets the same bytes, or None
        self.rest = b""

    def feed(self, data):
        """data is b"" at the end of the stream."""
        if self.file is not None:
            self.file.write(data)
            self.file.flush()
        *lines, self.rest = (self.rest + data).split(b"\n")
        if self.rest and (not data or len(self.rest) >= LINE_MAX):
            lines.append(self.rest)
            self.rest = b""
        if lines:
            before = self.prefix + self._time()
            write_all(self.target, b"".join(before + line + b"\n" for line in lines))

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
