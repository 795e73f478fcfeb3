#!/usr/bin/env python3
"""Promise 5: nothing from outside is trusted. Trainers and strangers that say what no client of ours would get a clear error
or are cut off, what they held is freed, and a well-behaved job beside them goes on."""
import errno, mmap, os, random, struct, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
import wire
from wire import Session, Peer, memfd, pack

ONES = b'\x00\x00\x80\x3f' * 1024
SEED = 20261121


class Beside:
    """A job of two ranks that works while the test misbehaves; fails when a step of it does."""

    def __init__(self, cluster):
        self.ranks = cluster.job((2,), job='beside', timeout_ms=60000)
        for rank in self.ranks:
            rank.call('tensor', 0, 'x', FLOAT32, 1024)
        self.n = 0

    def step(self):
        for rank in self.ranks:
            rank.submit(self.n, 0, ONES, out=1024)
        for rank in self.ranks:
            rank.wait(self.n)
            assert rank.result(self.n) == b'\0\0\0\x40' * 1024
            rank.call('free', self.n)
        self.n += 1


def with_daemon(test, *options):
    with Cluster(1, options=options) as cluster:
        daemon = cluster.daemons[0]
        beside = Beside(cluster)
        beside.step()
        fds, maps = daemon.fds(), daemon.maps()
        test(cluster, daemon, beside)
        beside.step()
        assert daemon.alive()
        wait_for('descriptors given back', lambda: daemon.fds() <= fds)
        wait_for('mappings given back', lambda: daemon.maps() <= maps)


def ready(daemon, length=1 << 16, features=0, **join):
    """A session by hand with a buffer and a tensor, ready to post."""
    session = Session(daemon.socket, hello=False)
    session.hello(features=features)
    status, text, _ = session.join(**join)
    assert status == 0, text
    fd = memfd(length)
    status, text, _ = session.share(fd, length)
    session.buffer = mmap.mmap(fd, length)
    os.close(fd)
    assert status == 0, text
    session.declare()
    return session


def test_a_session_by_hand_works():
    """What the other tests vary is right to begin with."""
    def test(cluster, daemon, beside):
        session = ready(daemon)
        session.post(session.entry())
        assert session.completion() == (0, ''), session.completion()
        session.close()
    with_daemon(test)


def test_packets_that_are_no_requests():
    rng = random.Random(SEED)

    def test(cluster, daemon, beside):
        hello = pack({1: 1, 2: {1: 1, 2: 1, 3: 0}})
        packets = [b'\0', b'\xff' * 100, b'GET / HTTP/1.0\r\n\r\n', hello[:-1], hello[:1], b'\x0a' + b'\xff' * 9,
                   rng.randbytes(65536), pack({1: 1}), pack({2: {1: 1, 2: 1, 3: 0}}), pack({1: 0, 2: {1: 1, 2: 1, 3: 0}}),
                   pack({1: 1, 3: {1: 'j', 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1}}), pack({1: 1, 8: {}})]
        for n, packet in enumerate(packets):
            session = Session(daemon.socket, hello=False)
            try:
                session.send(packet)
                fields, fds = session.receive()
                assert not fds, n
                assert fields is None or wire.zigzag(fields.get(2, 0)) < 0, (n, fields)
            except BrokenPipeError:
                pass
            session.close()
            # The same after a proper Hello.
            session = Session(daemon.socket)
            if packet[:2] != hello[:2] or packet != hello:
                try:
                    session.send(packet)
                    fields, fds = session.receive()
                    assert fields is None or wire.zigzag(fields.get(2, 0)) < 0 or n in (10,), (n, fields)
                except BrokenPipeError:
                    pass
            session.close()
            beside.step()
    with_daemon(test)


def test_a_foreign_version_is_told_both():
    def test(cluster, daemon, beside):
        session = Session(daemon.socket, hello=False)
        fields = session.hello(version=99, version_min=98)
        assert wire.zigzag(fields[2]) == -errno.EPROTONOSUPPORT, fields
        assert b'98' in fields[3] and b'1' in fields[3], fields[3]
        session.close()
    with_daemon(test)


def test_joins_that_make_no_sense():
    def test(cluster, daemon, beside):
        for change in [dict(rank=1), dict(size=0), dict(size=1 << 31, n_nodes=1 << 31), dict(local_rank=1), dict(local_size=0),
                       dict(local_size=2), dict(node=1), dict(n_nodes=0), dict(n_nodes=2), dict(job=''), dict(job='a' * 64),
                       dict(job='../../etc'), dict(job='a b'), dict(fields={2: b's' * 256}),
                       dict(fields={13: 1}), dict(fields={13: 1 << 31})]:
            session = Session(daemon.socket)
            status, text, _ = session.join(**change)
            assert status is None or status < 0, (change, status)
            assert text, change
            session.close()
        session = Session(daemon.socket)
        assert session.join()[0] == 0
        status, text, _ = session.join(job='other')
        assert status < 0 and text
        session.close()
    with_daemon(test)


def test_another_trainer_cannot_take_a_rank_or_a_secret_job():
    def test(cluster, daemon, beside):
        session = Session(daemon.socket)
        status, text, _ = session.join(job='beside', rank=1, size=2, local_rank=1, local_size=2)
        assert status in (-errno.EEXIST, -errno.EACCES), (status, text)
        status, text, _ = session.join(job='beside', rank=1, size=2, local_rank=1, local_size=2, fields={2: b'guess', 9: 1})
        assert status == -errno.ETIMEDOUT and 'another secret' in text, (status, text)
        session.close()
    with_daemon(test)


def test_buffers_of_the_wrong_kind():
    need_porter()
    def test(cluster, daemon, beside):
        read_end, write_end = os.pipe()
        unsealed = memfd(4096, seal=False)
        plain = os.open(os.path.join(cluster.folder, 'plain'), os.O_RDWR | os.O_CREAT)
        os.ftruncate(plain, 4096)
        good = memfd(4096)
        read_only = os.open(f'/proc/self/fd/{good}', os.O_RDONLY)
        directory = os.open('/', os.O_RDONLY)
        session = Session(daemon.socket)
        assert session.join()[0] == 0
        for fd, length in [(unsealed, 4096), (plain, 4096), (read_end, 4096), (directory, 4096), (read_only, 4096),
                           (good, 4097), (good, 0), (good, 1 << 63), (good, (1 << 64) - 1), (good, 1 << 50)]:
            status, text, _ = session.share(fd, length)
            assert status is not None and status < 0 and text, (fd, length, status)
        status, text, _ = session.request(wire.SHARE, {1: 1, 2: 4096})
        assert status < 0 and text, 'no descriptor'
        status, text, _ = session.request(wire.SHARE, {1: 1, 2: 4096}, [good, good])
        assert status is None or status < 0, 'two descriptors'
        session.close()
        session = Session(daemon.socket)
        assert session.join()[0] == 0
        assert session.share(good, 4096, buffer=0)[0] < 0
        assert session.share(good, 4096, buffer=5)[0] == 0
        assert session.share(good, 4096, buffer=5)[0] < 0, 'the same number twice'
        assert session.request(wire.UNSHARE, {1: 6})[0] < 0
        assert session.request(wire.UNSHARE, {1: 5})[0] == 0
        session.close()
        for fd in (read_end, write_end, unsealed, plain, good, read_only, directory):
            os.close(fd)
    with_daemon(test)


def test_a_buffer_cannot_shrink_under_the_daemon():
    def test(cluster, daemon, beside):
        session = ready(daemon)
        # What is taken cannot shrink; what can shrink is not taken, whatever other seals it has.
        for number, seals in enumerate((0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK,
                                        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)):
            fd = os.memfd_create('some', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, 1 << 16)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            taken = session.share(fd, 1 << 16, buffer=100 + number)[0] == 0
            try:
                os.ftruncate(fd, 0)
                assert not taken, f'a buffer with seals {seals} shrank under the daemon'
            except PermissionError:
                assert taken, f'a buffer with seals {seals} was refused'
            os.close(fd)
        try:
            os.ftruncate(session.memfd, 0)
            raise AssertionError("the session's own memory can shrink")
        except PermissionError:
            pass
        session.close()
    with_daemon(test)


def test_declarations_that_make_no_sense():
    def test(cluster, daemon, beside):
        for change in [dict(name=''), dict(name='n' * 256), dict(dtype=0), dict(dtype=11), dict(dtype=1 << 31),
                       dict(elements=1 << 63), dict(tensor=0)]:
            session = Session(daemon.socket)
            assert session.join()[0] == 0
            body = dict(tensor=1, name='x', dtype=2, elements=10)
            body.update(change)
            status, text, _ = session.request(wire.DECLARE, {1: body['tensor'], 2: body['name'], 3: body['dtype'],
                                                             4: body['elements']})
            assert status is None or (status < 0 and text), (change, status)
            session.close()
    with_daemon(test)


def test_names_cannot_hurt_who_reads_them():
    """Neither in what is said of them nor in the log: U+009B drives a terminal, U+202E turns the line, U+200B is not seen, the
    last is no UTF-8."""
    def test(cluster, daemon, beside):
        session = Session(daemon.socket)
        assert session.join()[0] == 0
        for tensor, name in enumerate((b'a\xc2\x9b31m', b'a\xe2\x80\xaeb', b'a\xe2\x80\x8b', b'\xff'), 1):
            status, text, _ = session.request(wire.DECLARE, {1: tensor, 2: name, 3: FLOAT32, 4: 1024})
            assert status == -errno.EINVAL and 'a name is UTF-8 of printable characters' in text, text
            assert text.isprintable(), text
        assert session.answer(session.declare(9, 'Gewicht \u00fc'))[0] == 0
        session.close()
        assert all(line.isprintable() for line in daemon.text().splitlines())
    with_daemon(test)


def test_why_a_rank_was_cut_off_is_a_sentence():
    def test(cluster, daemon, beside):
        session = ready(daemon)
        struct.pack_into('<Q', session.memory, 64, 1 << 40)
        session.wake()
        wait_for('cut off', session.closed)
        session.close()
        wait_for('said', lambda: 'was cut off: its ring says that' in daemon.text())
    with_daemon(test)


@full_tier('sessions must come faster than 20 a second')
def test_the_log_is_not_one_tenants():
    """Who breaks the protocol again and again is in it 200 times, then 20 times a second; how often besides, is said."""
    def test(cluster, daemon, beside):
        def break_it():
            session = Session(daemon.socket, hello=False)
            session.send(b'?')
            assert session.receive()[0] is None, 'goes on'
            session.close()

        began = time.monotonic()
        for _ in range(800):
            break_it()
        n = daemon.text().count('closed: ')
        assert 200 <= n <= 200 + 20 * (time.monotonic() - began) + 1, n
        wait_for('the others are counted', lambda: break_it() or ' lines like the next' in daemon.text())
    with_daemon(test)


def test_entries_with_wild_numbers():
    wild = (1 << 32) - 1
    changes = [dict(tensor=7), dict(tensor=wild), dict(tensor=0), dict(operation=0), dict(operation=8), dict(operation=255),
               dict(reduction=0), dict(reduction=5), dict(reduction=255), dict(flags=1), dict(input_buffer=9),
               dict(output_buffer=wild), dict(input_offset=1 << 16), dict(input_offset=(1 << 64) - 4096),
               dict(input_offset=1), dict(output_offset=2), dict(output_offset=(1 << 16) - 4), dict(input_count=1 << 62),
               dict(output_count=(1 << 64) - 1), dict(input_count=1023), dict(output_count=1023), dict(round=0),
               dict(round=2), dict(round=(1 << 64) - 1), dict(operation=2, root=1, reduction=0),
               dict(operation=3, reduction=0, counts_buffer=1, counts_offset=1 << 16),
               dict(operation=4, counts_buffer=1, counts_offset=(1 << 64) - 8), dict(operation=5, reduction=0, counts_buffer=77),
               dict(operation=4, counts_buffer=1, counts_offset=4)]

    def test(cluster, daemon, beside):
        for change in changes:
            session = ready(daemon)
            session.post(session.entry(**change))
            done = session.completion()
            assert done is None or (done[0] < 0 and done[1]), (change, done)
            session.close()
            beside.step()
        # A wild slot: there is nowhere to complete it, so the session ends.
        session = ready(daemon)
        session.post(session.entry(slot=4096), pending=False)
        wait_for('the session to end', session.closed)
        session.close()
    with_daemon(test)


def rows_entry(**change):
    """push_pull_rows of two rows out of 256, of 4 elements each: a good entry, and what is changed about it."""
    return dict(operation=7, width=4, input_count=8, output_count=64, input_offset=4096, output_offset=8192,
                input_rows_buffer=1, input_rows_offset=0, output_rows_buffer=1, output_rows_offset=1024, **change)


def test_what_is_posted_while_ranks_regroup():
    """What was declared is of the run before then, and nobody knows of the next."""
    with Cluster(1, 2, colocated=False) as cluster:
        daemon, servers = cluster.daemons[0], cluster.daemons[1:]
        session = ready(daemon, features=wire.FEATURE_RESUME, job='regroups', fields={11: 1, 15: 1})
        session.post(session.entry())
        assert session.completion() == (0, ''), session.completion()
        # Its home puts the next run together, and the other server lets it wait.
        wait_for('its home is known', lambda: any('part size' in server.text() for server in servers))
        _, other = sorted(servers, key=lambda server: 'part size' not in server.text())
        other.signal(signal.SIGSTOP)
        session.post_request(wire.REGROUP, {})
        wait_for('the run before is over', lambda: 'job regroups: regroups' in daemon.text())
        slots = range(1, 41)
        for n in slots:
            session.post(session.entry(ticket=1 + n, round=1 + n, slot=n), slot=n, ticket=1 + n)
        said = [session.completion(n) for n in slots]
        assert all(one and one[0] == -errno.ENOTCONN and 'regroup' in one[1] for one in said), said
        assert daemon.alive()
        other.signal(signal.SIGCONT)
        session.close()


def test_rows_with_wild_numbers():
    changes = [dict(width=0), dict(width=3), dict(width=1 << 62), dict(width=(1 << 64) - 1), dict(width=1 << 32),
               dict(input_count=7), dict(input_count=(1 << 64) - 4), dict(input_count=1 << 20), dict(output_count=6),
               dict(output_count=(1 << 64) - 4), dict(input_rows_buffer=0), dict(input_rows_buffer=9),
               dict(output_rows_buffer=0), dict(output_rows_buffer=77), dict(input_rows_offset=4),
               dict(input_rows_offset=(1 << 16) - 8), dict(output_rows_offset=(1 << 64) - 64), dict(output_offset=4096),
               dict(output_rows_offset=0), dict(output_rows_offset=8192), dict(output_rows_offset=4096), dict(reduction=0),
               dict(reduction=9), dict(input_buffer=0), dict(output_buffer=0)]

    def test(cluster, daemon, beside):
        session = ready(daemon)
        session.buffer[0:16] = struct.pack('<qq', 255, 7)
        session.post(session.entry(**rows_entry()))
        assert session.completion() == (0, ''), session.completion()
        assert struct.unpack_from('<Q', session.memory, wire.SLOT + 464) == (2,)
        assert bytes(session.buffer[1024:1040]) == struct.pack('<qq', 7, 255)
        session.close()
        for change in changes:
            session = ready(daemon)
            session.post(session.entry(**{**rows_entry(), **change}))
            done = session.completion()
            assert done is None or (done[0] < 0 and done[1]), (change, done)
            session.close()
            beside.step()
        for numbers in [(256, 0), (-1, 0), (0, 1 << 62), (-1 << 63, 0)]:
            session = ready(daemon)
            session.buffer[0:16] = struct.pack('<qq', *numbers)
            session.post(session.entry(**rows_entry()))
            status, text = session.completion()
            assert status == -errno.EINVAL and 'of a table of 256' in text, (status, text)
            session.close()
        beside.step()
    with_daemon(test)


def test_rows_that_change_while_they_are_read():
    """Numbers that were good when they were looked at: none may lead out of the table, or of the memory."""
    def test(cluster, daemon, beside):
        session = ready(daemon, 1 << 20)
        stop = threading.Event()
        n = 8000

        def scribble():
            at = 0
            while not stop.is_set():
                at = (at + 8 * 811) % (8 * n)
                struct.pack_into('<q', session.buffer, at, (1 << 62, 3, -5, 0)[at // 8 % 4])
                struct.pack_into('<q', session.buffer, at, 3)
        thread = threading.Thread(target=scribble)
        thread.start()
        for i in range(60):
            session.post(session.entry(round=i + 1, slot=i, ticket=i + 1, operation=7, width=4, input_count=4 * n,
                                       input_offset=131072, output_offset=524288, output_count=1024, input_rows_buffer=1,
                                       output_rows_buffer=1, output_rows_offset=262144), slot=i, ticket=i + 1)
            status, text = session.completion(i)
            assert status == 0 or 'of a table of 256' in text, (status, text)
        stop.set()
        thread.join()
        session.close()
        beside.step()
    with_daemon(test)


def test_a_ring_with_wild_indexes():
    def test(cluster, daemon, beside):
        for tail in (4097, 1 << 32, 1 << 63, (1 << 64) - 1):
            session = ready(daemon)
            session.set_tail(tail)
            session.wake()
            wait_for('the session to end', session.closed)
            session.close()
            beside.step()
        # Backwards.
        session = ready(daemon)
        session.post(session.entry())
        session.completion()
        struct.pack_into('<Q', session.memory, 64, 0)
        session.wake()
        wait_for('the session to end', session.closed)
        session.close()
    with_daemon(test)


@full_tier('random moments: a thread changes what the daemon reads')
def test_memory_that_changes_while_it_is_read():
    """One thread scribbles over ring, slots and data while entries are posted: any outcome but harm to others."""
    def test(cluster, daemon, beside):
        rng = random.Random(SEED)
        for _ in range(10):
            session = ready(daemon)
            stop = threading.Event()

            def scribble():
                while not stop.is_set():
                    at = rng.choice([64, wire.RING, wire.RING + 128, wire.SLOT, 192, 256]) + rng.randrange(0, 128, 4)
                    struct.pack_into('<I', session.memory, at, rng.choice([0, 1, 2, 3, 4096, rng.getrandbits(32)]))
            thread = threading.Thread(target=scribble)
            thread.start()
            for i in range(50):
                tail = wire.WORD.unpack_from(session.memory, 64)[0]
                at = wire.RING + tail % wire.ENTRIES * 128
                session.memory[at:at + 128] = session.entry(slot=rng.randrange(8), round=i + 1)
                session.set_tail((tail + 1) & ((1 << 64) - 1))
                session.wake()
            stop.set()
            thread.join()
            session.close()
            beside.step()
    with_daemon(test)


def test_a_trainer_that_does_not_read_its_answers():
    def test(cluster, daemon, beside):
        session = Session(daemon.socket)
        session.socket.setblocking(False)
        try:
            for i in range(100000):
                session.post_request(wire.UNSHARE, {1: 77})
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass
        beside.step()
        session.close()
    with_daemon(test)


@full_tier('a hello-timeout of 2 s, which those that are well must meet')
def test_connections_that_say_nothing():
    def test(cluster, daemon, beside):
        silent = [Session(daemon.socket, hello=False) for _ in range(20)]
        for session in silent:
            wait_for('the silent one to be cut off', session.closed)
            session.close()
    with_daemon(test, '--hello-timeout=2s')


@full_tier('ten thousand sessions: it takes long')
def test_ten_thousand_sessions():
    def test(cluster, daemon, beside):
        sessions, refused = [], 0
        try:
            for i in range(10000):
                if len(sessions) >= 600:
                    sessions.pop(0).close()
                session = Session(daemon.socket, hello=False)
                sessions.append(session)
                if i % 500 == 0:
                    beside.step()
        finally:
            beside.step()
            for session in sessions:
                fields, fds = session.receive() if session.socket in select.select([session.socket], [], [], 0)[0] else ({}, [])
                if fields and wire.zigzag(fields.get(2, 0)) < 0:
                    assert fields[3], 'refused without words'
                    refused += 1
                session.close()
        assert refused, 'nobody was refused beyond the limit'
    with_daemon(test, '--max-sessions=200', '--max-sessions-per-user=150', '--hello-timeout=60s')


def test_quotas_are_kept():
    def test(cluster, daemon, beside):
        session = Session(daemon.socket)
        assert session.join()[0] == 0
        fd = memfd(3 << 20)
        status, text, _ = session.share(fd, 3 << 20, buffer=1)
        assert status == -errno.EDQUOT and 'session_quota' in text, (status, text)
        small = memfd(4096)
        for i in range(1, 9):
            assert session.share(small, 4096, buffer=i)[0] == 0
        status, text, _ = session.share(small, 4096, buffer=9)
        assert status == -errno.EDQUOT and 'max_buffers' in text, (status, text)
        session.close()
        os.close(fd)
        os.close(small)
    with_daemon(test, '--session-quota=2M', '--max-buffers=8')


@full_tier('strangers are cut off after 500 ms, before which they must have spoken')
def test_strangers_at_the_data_port():
    """A port scanner, a browser, TLS, half a hello, a foreign version, a wrong key: closed, and no more."""
    with Cluster(1, 1, start=False) as cluster:
        # The agent itself is patient, however busy the machine.
        cluster.daemons = [cluster.start(0), cluster.start(1, options=['--hello-timeout=500ms'])]
        ranks = cluster.job((1,), force_distributed=1)
        server = cluster.daemons[1]
        wait_for('the last connection of the agent', lambda: any('beat' in name for name in server.threads()))
        wait_for('its rail', lambda: not RDMA or 'connected from' in server.text())
        fds = server.fds()

        def raw(data, close=False):
            peer = Peer(cluster.addresses[1], shake=False)
            peer.socket.sendall(data)
            if not close:
                try:
                    while peer.socket.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
            peer.close()
        good = Peer(cluster.addresses[1], shake=False)
        hello = good.hello('x')
        good.close()
        for data in [b'', b'GET / HTTP/1.1\r\nHost: x\r\n\r\n', bytes([22, 3, 1, 2, 0, 1, 0, 1, 252]), os.urandom(4096), hello[:40],
                     hello, hello + bytes(32), good.hello('x', magic=1), good.hello('x' * 64)]:
            raw(data)
        raw(b'', close=True)
        # A foreign version is answered with the server's own hello, which names what it speaks.
        peer = Peer(cluster.addresses[1], shake=False)
        peer.socket.sendall(peer.hello('x', version=9, version_min=8))
        theirs = wire.HELLO_BYTES.unpack(peer.exactly(152))
        assert theirs[0] == wire.MAGIC and theirs[1] == theirs[2] == wire.DATA_VERSION
        peer.close()
        wait_for('descriptors given back', lambda: server.fds() <= fds)
        ranks[0].call('tensor', 0, 'x', FLOAT32, 1024)
        ranks[0].submit(0, 0, ONES, out=1024)
        ranks[0].wait(0)


def test_messages_that_break_the_protocol():
    rng = random.Random(SEED)
    with Cluster(1, 1) as cluster:
        ranks = cluster.job((1,), force_distributed=1)
        ranks[0].call('tensor', 0, 'x', FLOAT32, 1024)
        headers = [dict(magic=1), dict(version=wire.DATA_VERSION + 1), dict(op=0), dict(op=99), dict(op=wire.D_RESULT), dict(flags=1),
                   dict(len=(64 << 20) + 1), dict(len=(1 << 32) - 1), dict(op=wire.D_JOIN, len=(4 << 20) + 1),
                   dict(op=wire.D_PUSH, dtype=77, part_len=4, total=4), dict(op=wire.D_PUSH, dtype=2, operation=99),
                   dict(op=wire.D_PUSH, dtype=2, operation=1, reduction=1, offset=(1 << 64) - 1, part_len=64, total=64),
                   dict(op=wire.D_PUSH, cookie=0, dtype=2, operation=1, reduction=1), dict(op=wire.D_PULL),
                   dict(op=wire.D_PULL, key=1, round=1, dtype=2, operation=7, reduction=1),
                   dict(op=wire.D_PULL, key=1, round=1, dtype=2, operation=7, reduction=1, part_len=4, total=4)]
        for n, change in enumerate(headers):
            peer = Peer(cluster.addresses[1])
            fields = dict(op=wire.D_PUSH, cookie=1)
            fields.update(change)
            peer.socket.sendall(peer.header(**fields))
            try:
                answer, payload = peer.receive()
                assert answer['op'] == wire.D_ERROR, (change, answer)
            except (ConnectionResetError, ConnectionAbortedError):
                pass
            peer.close()
            ranks[0].submit(n, 0, ONES, out=1024)
            ranks[0].wait(n)
        for op in (wire.D_JOIN, wire.D_ATTACH, wire.D_DECLARE):
            for payload in [b'', b'\xff' * 64, os.urandom(1000), b'\x0a\xff\xff\xff\xff\x7f', pack({1: 'x' * 100000})]:
                peer = Peer(cluster.addresses[1])
                answer, text = peer.call(op, payload)
                assert answer['op'] == wire.D_ERROR and text, (op, payload[:20])
                peer.close()
        for _ in range(30):
            peer = Peer(cluster.addresses[1])
            try:
                peer.socket.sendall(rng.randbytes(rng.randrange(1, 4000)))
            except (BrokenPipeError, ConnectionResetError):
                pass
            peer.close()
        ranks[0].submit(100, 0, ONES, out=1024)
        ranks[0].wait(100)
        assert all(daemon.alive() for daemon in cluster.daemons)


@full_tier('joins are given up after 3 s, and must have heard of the key by then')
def test_a_wrong_key_keeps_a_daemon_out():
    with Cluster(2, start=False) as cluster:
        keys = []
        for i in range(2):
            keys.append(os.path.join(cluster.folder, f'key{i}'))
            with open(keys[i], 'w') as file:
                file.write(f'{i}' * 32)
        cluster.daemons = [cluster.start(i, options=['--cluster-key-file=' + keys[i], '--hello-timeout=1s']) for i in range(2)]
        ranks = cluster.job((1, 1), join=False, timeout_ms=3000)
        for rank in ranks:
            rank.send('join', *(f'{k}={v}' for k, v in rank.keys.items()))
        texts = []
        for rank in ranks:
            try:
                rank.answer()
            except BpsError as error:
                texts.append(error.text)
        assert len(texts) == 2 and any('key' in text for text in texts), texts


run(globals())
