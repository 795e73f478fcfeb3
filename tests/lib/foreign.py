"""Descriptors whose close() takes as long as their sender likes: what a tenant may hand over to a daemon."""
import ctypes, os, socket, struct, tempfile, threading
from cluster import Skip

LINGER_S = 30


def lingering():
    """A TCP socket whose close() waits for LINGER_S: of what it has to send its peer takes nothing. Returns (descriptor, what to keep)."""
    listener = socket.create_server(('127.0.0.1', 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    near.setblocking(False)
    try:
        while True:
            near.send(bytes(1 << 16))
    except BlockingIOError:
        pass
    near.setblocking(True)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, LINGER_S))
    return near.detach(), (listener, far)


def give(fd, act):
    """act(fd) hands it over; then our own is closed, in a thread: whoever closes last waits, and that may be us."""
    try:
        return act(fd)
    finally:
        threading.Thread(target=close, args=[fd], daemon=True).start()


def close(fd):
    try:
        os.close(fd)
    except OSError:  # of a file system that has ended
        pass


class Fuse:
    """A file system with one file, "file", that can be opened; whoever asks for more, or closes it, has no answer until end()."""

    ATTRIBUTES = struct.Struct('<6Q10I')

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        try:
            self.device = os.open('/dev/fuse', os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Skip(f'/dev/fuse: {error.strerror}') from None
        self.folder = tempfile.mkdtemp(prefix='bps-fuse-')
        options = f'fd={self.device},rootmode=40000,user_id=0,group_id=0'
        if self.libc.mount(b'bps-test', self.folder.encode(), b'fuse', 0, options.encode()):
            os.close(self.device)
            os.rmdir(self.folder)
            raise Skip(f'mount of a FUSE: {os.strerror(ctypes.get_errno())}')
        self.asked = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def open(self):
        """To be given away at once: a child of ours that closes what it inherited would wait."""
        return os.open(os.path.join(self.folder, 'file'), os.O_RDWR | os.O_CLOEXEC)

    def attributes(self, node):
        mode = 0o40755 if node == 1 else 0o100666
        return self.ATTRIBUTES.pack(node, 4096, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, operation, node):
        if operation == 26:  # INIT
            return struct.pack('<IIIIHHIIHH8I', 7, 31, 65536, 0, 16, 12, 65536, 1, 0, 0, *[0] * 8)
        if operation == 1:  # LOOKUP
            return struct.pack('<QQQQII', 2, 0, 0, 0, 0, 0) + self.attributes(2)
        if operation == 14:  # OPEN
            return struct.pack('<QII', 1, 0, 0)
        if operation == 3 and node == 1:  # GETATTR
            return struct.pack('<QII', 0, 0, 0) + self.attributes(node)
        return None

    def serve(self):
        while True:
            try:
                request = os.read(self.device, 1 << 17)
            except OSError:
                return
            _, operation, unique, node = struct.unpack_from('<IIQQ', request)
            self.asked.append((operation, node))
            data = self.answer(operation, node)
            if data is not None:
                os.write(self.device, struct.pack('<IiQ', 16 + len(data), 0, unique) + data)

    def end(self):
        """All who wait go on, with an error."""
        if self.device < 0:
            return
        self.libc.umount2(self.folder.encode(), 3)  # MNT_FORCE | MNT_DETACH
        self.thread.join()
        os.close(self.device)
        self.device = -1
        os.rmdir(self.folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
