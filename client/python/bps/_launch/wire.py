"""Messages between the launcher and an agent, over the pipes of ssh: a kind, fields, and bytes.

Each message: two little-endian u32, the lengths of the JSON object and of the bytes, then both. The agent begins with the
line GREETING; what the shell of the other machine printed before that is not ours. Secrets travel here and are never
arguments of a program.
"""

import json
import struct

GREETING = b"bps-agent 1\n"
HEADER = struct.Struct("<II")
LIMIT = 1 << 24


def pack(kind, data=b"", /, **fields):
    text = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    return HEADER.pack(len(text), len(data)) + text + data


class Reader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, greeting=False):
        self.buffer = bytearray()
        self.greeted = not greeting

    def feed(self, data):
        """Yields (kind, fields, data); first (None, {}, bytes) for what came before the greeting. ValueError: not ours."""
        self.buffer += data
        if not self.greeted:
            before, found, rest = bytes(self.buffer).partition(GREETING)
            if not found:
                if len(self.buffer) > LIMIT:
                    raise ValueError("no agent answered")
                return
            self.greeted = True
            self.buffer = bytearray(rest)
            if before:
                yield None, {}, before
        while len(self.buffer) >= HEADER.size:
            n_text, n_data = HEADER.unpack_from(self.buffer)
            if n_text > LIMIT or n_data > LIMIT:
                raise ValueError("the agent's messages cannot be read")
            end = HEADER.size + n_text + n_data
            if len(self.buffer) < end:
                return
            fields = json.loads(bytes(self.buffer[HEADER.size : HEADER.size + n_text]))
            payload = bytes(self.buffer[HEADER.size + n_text : end])
            del self.buffer[:end]
            yield fields.pop("kind"), fields, payload
