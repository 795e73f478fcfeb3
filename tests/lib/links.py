"""Links between daemons that do what links do: each daemon is reached through a relay which cuts its connections, holds what
passes, refuses new ones, or changes bytes. No root is needed, and no namespace."""
import os, random, selectors, socket, struct, threading
from cluster import Cluster

CHUNK = 65536


class Connection:
    def __init__(self, near, far):
        self.ends, self.waiting, self.open = (near, far), {near: b'', far: b''}, {near: True, far: True}
        self.held = False

    def other(self, end):
        return self.ends[end is self.ends[0]]


class Relay:
    """Between whoever connects to `address` and `target`, both "host:port". All methods may be called from any thread."""

    def __init__(self, address, target, seed=0):
        self.target, self.rng, self.lock = split(target), random.Random(seed), threading.Lock()
        self.connections, self.holding, self.refusing, self.every = [], False, False, 0
        self.left, self.changed, self.made, self.over = 0, 0, 0, False
        self.listener = socket.create_server(split(address), backlog=64)
        self.listener.setblocking(False)
        self.wake, self.woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    # What tests ask for.

    def cut(self, which=None):
        """Resets all connections, or one by its place in the order of arrival. Returns how many there were."""
        with self.lock:
            gone = self.connections[:] if which is None else self.connections[which:which + 1]
            for connection in gone:
                self.reset(connection)
            return len(gone)

    def down(self):
        """Cut, and refused from now on."""
        self.refusing = True
        self.cut()

    def hold(self):
        """A black hole: nothing passes, and nobody is told. New connections are made and find the same."""
        self.holding = True

    def swallow(self):
        """A black hole for the connections there are, as where a translator of addresses forgets them; new ones pass."""
        with self.lock:
            for connection in self.connections:
                connection.held = True

    def up(self):
        """What was held is dropped with its connections, as a path that has changed does."""
        if self.holding:
            self.cut()
        self.holding = self.refusing = False
        os.write(self.woken, b'.')

    def corrupt(self, every):
        """Changes a bit of one byte in so many, on average; 0: none."""
        with self.lock:
            self.every, self.left = every, self.next()

    def close(self):
        self.over = True
        os.write(self.woken, b'.')
        self.thread.join()
        self.cut()
        self.listener.close()
        os.close(self.wake)
        os.close(self.woken)

    # The rest with the lock held, or before the thread runs.

    def next(self):
        return int(self.rng.expovariate(1 / self.every)) if self.every else 0

    def reset(self, connection):
        self.connections.remove(connection)
        for end in connection.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            end.close()

    def accept(self):
        try:
            near, _ = self.listener.accept()
        except OSError:
            return
        try:
            if self.refusing:
                raise ConnectionError
            far = socket.create_connection(self.target, timeout=10)
        except OSError:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            near.close()
            return
        for end in near, far:
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections.append(Connection(near, far))
        self.made += 1

    def passing(self):
        return [] if self.holding else [connection for connection in self.connections if not connection.held]

    def spoil(self, data):
        if not self.every:
            return data
        data, at = bytearray(data), self.left
        while at < len(data):
            data[at] ^= 1 << self.rng.randrange(8)
            self.changed += 1
            at += 1 + self.next()
        self.left = at - len(data)
        return bytes(data)

    def turn(self, connection):
        """What can be read and written now. Raises OSError when an end is gone."""
        for end in connection.ends:
            other = connection.other(end)
            if connection.open[end] and not connection.waiting[other]:
                try:
                    data = end.recv(CHUNK)
                    connection.open[end] = bool(data)
                    connection.waiting[other] = self.spoil(data)
                except BlockingIOError:
                    pass
            if connection.waiting[other]:
                try:
                    connection.waiting[other] = connection.waiting[other][other.send(connection.waiting[other]):]
                except BlockingIOError:
                    pass
            if not connection.open[end] and not connection.waiting[other]:
                raise ConnectionResetError  # one side's end is that of both: daemons know no half

    def work(self):
        while not self.over:
            with self.lock:
                with selectors.DefaultSelector() as selector:
                    selector.register(self.listener, selectors.EVENT_READ)
                    selector.register(self.wake, selectors.EVENT_READ)
                    for connection in self.passing():
                        for end in connection.ends:
                            other = connection.other(end)
                            events = (selectors.EVENT_READ if connection.open[end] and not connection.waiting[other] else 0) | \
                                     (selectors.EVENT_WRITE if connection.waiting[end] else 0)
                            if events:
                                selector.register(end, events)
                    ready = selector.select(0)
                    if not ready:
                        self.lock.release()
                        try:
                            selector.select(0.02)  # short: connections are cut by others meanwhile
                        except OSError:
                            pass
                        finally:
                            self.lock.acquire()
                try:
                    os.read(self.wake, 64)
                except BlockingIOError:
                    pass
                self.accept()
                for connection in self.passing():
                    try:
                        self.turn(connection)
                    except OSError:
                        self.reset(connection)


def split(address):
    host, port = address.rsplit(':', 1)
    return host, int(port)


class LinkCluster(Cluster):
    """A cluster by a static list, whose daemons with the server role are reached through self.links[i]."""

    def __init__(self, n_nodes=1, n_spare=0, **keys):
        self.links = {}
        super().__init__(n_nodes, n_spare, source='static', **keys)

    def start(self, i, wait=True, options=()):
        if 'server' not in self.roles(i):
            return super().start(i, wait, options)
        host, port = split(self.addresses[i])
        if i not in self.links:
            with socket.socket() as probe:
                probe.bind((host, 0))
                self.links[i] = self.relay(self.addresses[i], '%s:%d' % probe.getsockname(), i)
        return super().start(i, wait, ['--listen=%s:%d' % self.links[i].target, *options])

    def relay(self, address, target, seed):
        return Relay(address, target, seed)

    def abandon(self):
        super().abandon()
        while self.links:
            self.links.popitem()[1].close()


def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xffffffff


def crc_of(byte):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82f63b78 if byte & 1 else 0)
    return byte


CRC_TABLE = [crc_of(byte) for byte in range(256)]


class Forger:
    """
    In the path, and knows the protocol, but no key: takes what a server sends apart, and does wrong to every `every`th RESULT with
    data, as `wrong` says. What anybody can make good afterwards, a checksum, it makes good.
    """

    def __init__(self, address, target, seal, wrong, every):
        self.target, self.seal, self.wrong, self.every = split(target), seal, wrong, every
        self.n, self.done, self.seen = 0, 0, b''
        self.listener, self.sockets = socket.create_server(split(address), backlog=64), []
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target, timeout=60)
            except OSError:
                return
            for end in near, far:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets += near, far
            threading.Thread(target=self.ended, args=(self.pass_on, near, far), daemon=True).start()
            threading.Thread(target=self.ended, args=(self.forge, far, near), daemon=True).start()

    def ended(self, run, source, to):
        try:
            run(source, to)
        except (OSError, EOFError):
            pass
        for end in source, to:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def pass_on(self, source, to):
        while data := source.recv(CHUNK):
            to.sendall(data)

    def exactly(self, source, n):
        data = b''
        while len(data) < n:
            piece = source.recv(n - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def forge(self, source, to):
        to.sendall(self.exactly(source, 152))  # hello
        while True:
            head = self.exactly(source, 1)
            if head == b'\2':  # a probe is over
                to.sendall(head)
                continue
            head += self.exactly(source, 95 + self.seal)
            op, length, block, part = head[5], *struct.unpack_from('<I', head, 8), *struct.unpack_from('<II', head, 48)
            parts = [head]
            if op == 45:  # several, which begin with 48 bytes for each
                parts.append(self.exactly(source, 48 * part + self.seal))
                length, op = length - 48 * part, block
            if length:
                parts.append(self.exactly(source, length + self.seal))
            if op == 17 and length:
                self.n += 1
                if self.n % self.every == 0:
                    parts = self.do_wrong(parts)
            to.sendall(b''.join(parts))

    def do_wrong(self, parts):
        self.done += 1
        if self.wrong == 'change':
            payload = bytearray(parts[-1])
            payload[len(payload) // 3] ^= 0x40
            if self.seal == 4:
                payload[-4:] = struct.pack('<I', crc32c(payload[:-4]))
            return parts[:-1] + [bytes(payload)]
        if self.wrong == 'repeat':
            return parts + parts
        if self.wrong == 'leave out':
            return []
        # Splice: what another connection had, or this one a while ago.
        seen, self.seen = self.seen, b''.join(parts)
        return [seen or self.seen]

    def close(self):
        self.listener.close()
        for end in self.sockets:
            end.close()


class ForgedCluster(LinkCluster):
    """Where somebody who has no key is in the path of each server, and does wrong to every so many results."""

    def __init__(self, *sizes, seal, wrong, every, **keys):
        self.forger = lambda address, target: Forger(address, target, seal, wrong, every)
        super().__init__(*sizes, **keys)

    def relay(self, address, target, seed):
        return self.forger(address, target)
