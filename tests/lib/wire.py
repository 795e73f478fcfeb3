"""The protocols spoken by hand: a trainer's session (proto/control.proto, proto/shm.h) and a daemon's data connection
(proto/data.h), so that tests can say what no client of ours would. Written from the headers, not from the code."""
import array, ctypes, hashlib, hmac, mmap, os, select, socket, struct, time

# -- protobuf ------------------------------------------------------------------------------------------------------


def varint(value):
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Fixed(int):
    """A fixed64 field."""


def pack(fields):
    """{number: int | Fixed | str | bytes | dict (a message) | list (repeated, packed)} to bytes."""
    out = b''
    for number, value in fields.items():
        if isinstance(value, Fixed):
            out += varint(number << 3 | 1) + struct.pack('<Q', value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            if isinstance(value, dict):
                value = pack(value)
            elif isinstance(value, list):
                value = b''.join(map(varint, value))
            elif isinstance(value, str):
                value = value.encode()
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def unpack(data):
    """Bytes to {number: last value}; nested messages stay bytes."""
    fields, at = {}, 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    while at < len(data):
        tag = number()
        kind = tag & 7
        if kind == 0:
            value = number()
        elif kind == 1:
            value = struct.unpack_from('<Q', data, at)[0]
            at += 8
        elif kind == 2:
            length = number()
            value = data[at:at + length]
            at += length
        else:
            raise ValueError(f'wire type {kind}')
        fields[tag >> 3] = value
    return fields


def zigzag(value):
    return (value >> 1) ^ -(value & 1)


# -- a trainer's session -------------------------------------------------------------------------------------------

HELLO, JOIN, SHARE, UNSHARE, DECLARE, CANCEL, LEAVE, RESUME, REGROUP, STATUS = range(2, 12)
FEATURE_RESUME = 1
ENTRY = struct.Struct('<QQIIBBHiIIIIQQQQQQQQQII')
WORD = struct.Struct('@Q')  # of shared memory: read and written in one piece, as '<Q' is not
RING, ENTRIES, SLOT, SLOTS = 4096, 4096, 4096 + 4096 * 128, 4096


class Session:
    """A trainer by hand. send() any bytes and descriptors; request() a well-formed Request."""

    def __init__(self, path, hello=True, timeout=60):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.socket.connect(path)  # blocking: a full backlog is waited for
        self.socket.settimeout(timeout)
        self.n, self.memory = 0, None
        if hello:
            self.hello()

    def send(self, data, fds=()):
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', fds))] if fds else []
        self.socket.sendmsg([data], extra)

    def receive(self):
        """(fields of Message, descriptors), or (None, []) at the end."""
        try:
            data, extra, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(16))
        except ConnectionResetError:
            return None, []
        fds = []
        for _, kind, payload in extra:
            if kind == socket.SCM_RIGHTS:
                fds += list(array.array('i', payload[:len(payload) // 4 * 4]))
        return (unpack(data) if data else None), fds

    def post_request(self, kind, body, fds=()):
        self.n += 1
        self.send(pack({1: self.n, kind: pack(body)}), fds)
        return self.n

    def request(self, kind, body, fds=()):
        """Sends and waits for the answer: (status, text, fields)."""
        return self.answer(self.post_request(kind, body, fds))

    def answer(self, number, keep=None):
        """Of a request: (status, text, fields). keep: a list for the descriptors beside it, which are closed otherwise."""
        while True:
            fields, got = self.receive()
            if keep is not None and fields and fields[1] == number:
                keep += got
                got = []
            for fd in got:
                os.close(fd)
            if fields is None:
                return None, 'closed', {}
            if fields[1] == number:
                return zigzag(fields.get(2, 0)), fields.get(3, b'').decode(errors='replace'), fields

    def hello(self, version=1, version_min=1, features=0):
        self.n += 1
        self.send(pack({1: self.n, HELLO: {1: version, 2: version_min, 3: features, 4: 'wire.py'}}))
        fields, fds = self.receive()
        if fields is None or fields.get(2):
            for fd in fds:
                os.close(fd)
            return fields
        welcome = unpack(fields[4])
        self.memfd, self.wake_daemon, self.wake_trainer = fds
        self.memory = mmap.mmap(self.memfd, welcome[6])
        return fields

    jobs = 0

    def join(self, job=None, rank=0, size=1, local_rank=0, local_size=1, node=0, n_nodes=1, **more):
        if job is None:  # one that nobody else has: the session before may not be quite gone
            Session.jobs += 1
            job = f'wire{Session.jobs}'
        body = {1: job, 3: rank, 4: size, 5: local_rank, 6: local_size, 7: node, 8: n_nodes}
        body.update(more.get('fields', {}))
        return self.request(JOIN, body)

    def share(self, fd, length, buffer=1):
        return self.request(SHARE, {1: buffer, 2: length}, [fd])

    def declare(self, tensor=1, name='x', dtype=2, elements=1024):
        return self.post_request(DECLARE, {1: tensor, 2: name, 3: dtype, 4: elements})

    def entry(self, ticket=1, round=1, slot=0, tensor=1, operation=1, reduction=1, flags=0, priority=0, root=0,
              input_buffer=1, output_buffer=1, counts_buffer=0, input_offset=0, input_count=1024, output_offset=0,
              output_count=1024, counts_offset=0, timeout_ms=60000, width=0, input_rows_offset=0, output_rows_offset=0,
              input_rows_buffer=0, output_rows_buffer=0):
        return ENTRY.pack(ticket, round, slot, tensor, operation, reduction, flags, priority, root, input_buffer,
                          output_buffer, counts_buffer, input_offset, input_count, output_offset, output_count,
                          counts_offset, timeout_ms, width, input_rows_offset, output_rows_offset, input_rows_buffer,
                          output_rows_buffer)

    def post(self, entry, pending=True, slot=0, ticket=1):
        """Writes an entry (bytes) into the ring as a trainer does."""
        tail = WORD.unpack_from(self.memory, 64)[0]
        if pending:
            struct.pack_into('<IiQ', self.memory, SLOT + 512 * slot, 1, 0, ticket)
        at = RING + tail % ENTRIES * 128
        self.memory[at:at + 128] = entry
        self.set_tail(tail + 1)
        self.wake()

    def set_tail(self, tail):
        """In one piece: struct would clear the place first, and the daemon may look just then."""
        ctypes.c_uint64.from_buffer(self.memory, 64).value = tail

    def arm(self):
        """Wants to be woken by its descriptor for whatever completes."""
        struct.pack_into('<I', self.memory, 192, 1)

    def is_armed(self):
        return struct.unpack_from('<I', self.memory, 192)[0] == 1

    def is_done(self, slot=0):
        return struct.unpack_from('<I', self.memory, SLOT + 512 * slot)[0] == 2

    def wake(self):
        os.write(self.wake_daemon, struct.pack('<Q', 1))

    def completion(self, slot=0, timeout=60):
        """(status, text) of a slot, or None when the session was closed instead. The daemon writes memory; poll it."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            state, status = struct.unpack_from('<Ii', self.memory, SLOT + 512 * slot)
            if state == 2:
                text = bytes(self.memory[SLOT + 512 * slot + 16:SLOT + 512 * slot + 16 + 448]).split(b'\0')[0]
                return status, text.decode(errors='replace')
            if self.closed():
                return None
            select.select([self.socket], [], [], 0.01)
        raise AssertionError(f'slot {slot} has not completed within {timeout} s')

    def silent(self, seconds=0.3):
        """True when nothing comes: the only way to see that a request stays unanswered."""
        return not select.select([self.socket], [], [], seconds)[0]

    def closed(self):
        """Whether the daemon has ended the session; events that came meanwhile are dropped."""
        while select.select([self.socket], [], [], 0)[0]:
            fields, fds = self.receive()
            for fd in fds:
                os.close(fd)
            if fields is None:
                return True
        return False

    def close(self):
        self.socket.close()
        if self.memory:
            self.memory.close()
            for fd in (self.memfd, self.wake_daemon, self.wake_trainer):
                os.close(fd)
            self.memory = None


def memfd(length, seal=True, whole=True):
    import fcntl
    fd = os.memfd_create('test', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length)
    if whole and length:
        os.posix_fallocate(fd, 0, length)  # or the daemon would be charged for its pages, and refuses it
    if seal:
        fcntl.fcntl(fd, 1033, 0x2)  # F_ADD_SEALS, F_SEAL_SHRINK
    return fd


# -- a daemon's data connection ------------------------------------------------------------------------------------

MAGIC, DATA_VERSION = 0x31535042, 3
D_JOIN, D_ATTACH, D_DECLARE, D_PUSH, D_PULL = 1, 2, 3, 4, 5
D_OK, D_RESULT, D_ERROR = 16, 17, 18
D_FAIL_ROUND, D_FAIL_JOB, D_LEAVE, D_PING, D_PONG = range(32, 37)
HEADER = struct.Struct('<IBBHIIQQQIIIIBBBBiQQIIiI')
HEADER_FIELDS = ('magic version op flags len cookie job key round epoch node block part dtype operation reduction pad '
                 'status offset total part_len root priority moved').split()
HELLO_BYTES = struct.Struct('<IBBHQQ64s32s32s')
assert ENTRY.size == 128 and HEADER.size == 96 and HELLO_BYTES.size == 152


class Peer:
    """A daemon by hand: connects to a data port, from an address of its own if that is given, and shakes hands."""

    def __init__(self, address, key=b'', sender=None, name='wire', timeout=60, shake=True, source=None, features=0):
        host, port = address.rsplit(':', 1)
        self.socket = socket.create_connection((host, int(port)), timeout, (source, 0) if source else None)
        self.features = features
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sender = sender or int.from_bytes(os.urandom(7), 'little')
        self.cookie, self.answers, self.notices = 0, {}, []
        if shake:
            self.shake(key, name)

    def hello(self, name, magic=MAGIC, version=DATA_VERSION, version_min=DATA_VERSION):
        return HELLO_BYTES.pack(magic, version, version_min, 0, self.features, self.sender, name.encode(), os.urandom(32), b'')

    def shake(self, key, name):
        mine = self.hello(name)
        self.socket.sendall(mine)
        theirs = self.exactly(HELLO_BYTES.size)
        bare = theirs[:-32] + bytes(32)
        assert theirs[-32:] == hmac.digest(key, b'bps-server' + mine + bare, hashlib.sha256), 'the server has another key'
        self.socket.sendall(hmac.digest(key, b'bps-client' + mine + bare, hashlib.sha256))

    def exactly(self, n):
        data = b''
        while len(data) < n:
            piece = self.socket.recv(n - len(data))
            if not piece:
                raise ConnectionResetError('closed by the daemon')
            data += piece
        return data

    def header(self, op, payload=b'', cookie=0, **fields):
        values = dict.fromkeys(HEADER_FIELDS, 0)
        values.update(magic=MAGIC, version=DATA_VERSION, op=op, len=len(payload), cookie=cookie)
        values.update(fields)
        return HEADER.pack(*(values[name] for name in HEADER_FIELDS))

    def post(self, op, payload=b'', **fields):
        """Sends a call; returns its cookie."""
        self.cookie += 1
        self.socket.sendall(self.header(op, payload, self.cookie, **fields) + payload)
        return self.cookie

    def notice(self, op, payload=b'', **fields):
        self.socket.sendall(self.header(op, payload, 0, **fields) + payload)

    def receive(self):
        """One message: (fields, payload). PING is answered on the way."""
        while True:
            fields = dict(zip(HEADER_FIELDS, HEADER.unpack(self.exactly(96))))
            payload = self.exactly(fields['len'])
            if fields['op'] == D_PING:
                self.notice(D_PONG)
                continue
            if fields['cookie']:
                self.answers[fields['cookie']] = fields, payload
            else:
                self.notices.append((fields, payload))
            return fields, payload

    def answer(self, cookie):
        while cookie not in self.answers:
            self.receive()
        return self.answers.pop(cookie)

    def call(self, op, payload=b'', **fields):
        return self.answer(self.post(op, payload, **fields))

    def silent(self, seconds=0.3):
        """True when nothing comes: the only way to see that a call stays unanswered."""
        return not select.select([self.socket], [], [], seconds)[0]

    def close(self):
        self.socket.close()
