"""Attacks of trainers: users who may join jobs of their own, and say what no library of ours would."""
import os, select, struct, time
import wire
from attack import Refused, attack, odd_descriptor
from wire import pack

ONE_SLOT = struct.Struct('<IiQ')
ROWS = dict(operation=7, width=4, input_count=8, output_count=64, input_offset=4096, output_offset=8192, input_rows_buffer=1,
            output_rows_buffer=1, output_rows_offset=1024)


# -- packets


def valid_request(who, n=1):
    """A request as it should be, most often, of a kind that this attacker has no right to."""
    kind = who.rng.randrange(2, 11)
    body = {wire.HELLO: {1: 1, 2: 1, 3: who.wild()},
            wire.JOIN: {1: who.pick(who.word(), *who.target.victims), 2: who.pick(b'', b'guess'), 3: who.wild(32), 4: who.wild(32),
                        5: who.wild(32), 6: who.wild(32), 7: who.wild(32), 8: who.wild(32)},
            wire.SHARE: {1: who.wild(32), 2: who.wild(), 3: who.pick(0, 1, 2, 3, who.wild(32)), 4: who.rng.randbytes(16),
                         5: who.rng.randbytes(who.pick(0, 64, 63, 4000))},
            wire.UNSHARE: {1: who.wild(32)},
            wire.DECLARE: {1: who.wild(32), 2: who.rng.randbytes(who.rng.randrange(300)), 3: who.wild(32), 4: who.wild(),
                           5: who.wild(), 6: wire.Fixed(who.wild())},
            wire.CANCEL: {1: who.wild(32), 2: who.wild()}, wire.LEAVE: {}, wire.REGROUP: {},
            wire.RESUME: {1: {1: who.pick(who.word(), *who.target.victims), 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1}, 2: who.wild()}}[kind]
    return pack({1: n, kind: pack(body)})


@attack('trainer')
def packets(who):
    """Packets that are no requests: noise, valid ones cut short or with bits changed, twice Hello, 64 KiB of nothing."""
    session = who.session(hello=who.pick(True, True, False))
    for n in range(who.rng.randrange(1, 30)):
        data = bytearray(valid_request(who, n + 1))
        how = who.pick('whole', 'cut', 'bits', 'noise', 'large')
        if how == 'cut':
            data = data[:who.rng.randrange(1, len(data) + 1)]
        elif how == 'bits':
            for _ in range(who.rng.randrange(1, 5)):
                data[who.rng.randrange(len(data))] ^= 1 << who.rng.randrange(8)
        elif how == 'noise':
            data = who.rng.randbytes(who.rng.randrange(1, 200))
        elif how == 'large':
            data = bytes(data) + who.rng.randbytes(60000)
        who.say('packet', how, bytes(data[:24]).hex())
        session.send(bytes(data))


@attack('trainer')
def descriptors(who):
    """Descriptors of every kind beside any packet, one to sixteen at once: sockets that linger, pipes, epolls, directories."""
    session = who.joined() if who.pick(True, False) else who.session()
    for n in range(8):
        odd = [odd_descriptor(who) for _ in range(who.pick(1, 1, 2, 3, 4, 5, 16))]
        who.say('descriptors', *(kind for kind, _ in odd))
        try:
            kind = who.pick(wire.SHARE, wire.UNSHARE, wire.LEAVE, wire.RESUME, wire.DECLARE)
            body = {wire.SHARE: {1: n + 1, 2: who.pick(4096, 1 << 20, 1 << 30)}}.get(kind)
            data = pack({1: 100 + n, kind: pack(body)}) if body else valid_request(who, 100 + n)
            session.send(data, [fd for _, fd in odd])
        finally:
            for _, fd in odd:
                os.close(fd)


@attack('trainer')
def nested(who):
    """Descriptors of sessions sent through sessions: the kernel's own garbage, with the daemon as one of its owners."""
    a, b = who.session(), who.session()
    for _ in range(16):
        who.say('nested')
        a.send(valid_request(who), [b.socket.fileno()])
        b.send(valid_request(who), [a.socket.fileno()])


# -- shared memory of the session


@attack('trainer')
def scribble(who):
    """The ring's indexes, entries, slots and words for sleeping, changed while the daemon reads them."""
    session = who.ready()
    who.say('scribble')
    for i in range(200):
        where = who.pick(64, 128, 192, 196, 200, 256, wire.RING, wire.RING + 128, wire.SLOT, wire.SLOT + 512)
        struct.pack_into('<I', session.memory, where + who.rng.randrange(0, 64, 4), who.wild(32))
        tail = wire.WORD.unpack_from(session.memory, 64)[0]
        at = wire.RING + tail % wire.ENTRIES * 128
        session.memory[at:at + 128] = session.entry(slot=who.rng.randrange(8), round=i + 1)
        session.set_tail(who.pick(tail + 1, tail + 1, tail + 1, tail + 4096, tail - 1, who.wild()) % (1 << 64))
        session.wake()


@attack('trainer')
def entries(who):
    """Entries with the extremes of every field, singly and together."""
    names = dict(tensor=32, operation=8, reduction=8, flags=16, root=32, input_buffer=32, output_buffer=32, counts_buffer=32,
                 input_offset=64, input_count=64, output_offset=64, output_count=64, counts_offset=64, timeout_ms=64, width=64,
                 input_rows_offset=64, output_rows_offset=64, input_rows_buffer=32, output_rows_buffer=32, round=64, ticket=64)
    session = who.ready()
    for slot in range(64):
        change = dict(who.pick({}, ROWS, dict(operation=3, reduction=0), dict(operation=5, reduction=0, counts_buffer=1)))
        for name in who.rng.sample(sorted(names), who.rng.randrange(1, 5)):
            change[name] = who.wild(names[name])
        change.setdefault('round', slot + 1)
        who.say('entry', change)
        session.post(session.entry(slot=slot, priority=who.pick(0, -1 << 31, (1 << 31) - 1), **change), slot=slot)
    select.select([session.socket], [], [], 0.02)


@attack('trainer')
def doorbells(who):
    """Doorbells made to block: descriptions that both share lose O_NONBLOCK, and eventfds are full when the daemon rings."""
    session = who.ready()
    who.say('doorbells')
    for fd in (session.wake_trainer, session.wake_daemon, session.socket.fileno()):
        os.set_blocking(fd, True)
    for fd in (session.wake_trainer, session.wake_daemon):
        try:
            os.write(fd, struct.pack('<Q', (1 << 64) - 2))
        except OSError:
            pass
    for n in range(32):
        struct.pack_into('<I', session.memory, 192, who.pick(1, 1, 2, 3))  # trainer_armed
        struct.pack_into('<II', session.memory, 196, who.pick(0, 1, 4096, 1 << 31), who.wild(32))
        session.post(session.entry(round=n + 1, slot=n), slot=n)
        os.set_blocking(session.wake_trainer, True)


@attack('trainer')
def bells(who):
    """A doorbell rung without end, with nothing in the ring."""
    session = who.state.get('session')
    if not session:
        session = who.state['session'] = who.ready()
    who.say('bells')
    for _ in range(20000):
        session.wake()


# -- what is shared


@attack('trainer')
def holes(who):
    """Memory of a gigabyte with holes, read, written and punched while the daemon uses it; shrinking is refused by the seal."""
    session = who.joined(most=8)
    fd = who.hold(wire.memfd(1 << 30), 8)
    if session.share(fd, 1 << 30)[0] != 0:
        raise Refused('share')
    session.declare(elements=1 << 20)
    who.say('holes')
    for n in range(6):
        at = who.rng.randrange(0, 1 << 29, 4096)
        session.post(session.entry(round=n + 1, slot=n, input_offset=at, output_offset=(1 << 29) + at, input_count=1 << 20,
                                   output_count=1 << 20), slot=n)
        punch(fd, 0, 1 << 30)
    try:
        os.ftruncate(fd, 4096)
    except PermissionError:
        pass
    session.completion(5, timeout=who.TIMEOUT) if who.pick(True, False) else None
    session.close()
    punch(fd, 0, 1 << 30)


def punch(fd, at, length):
    import ctypes
    ctypes.CDLL(None, use_errno=True).fallocate(fd, 3, ctypes.c_long(at), ctypes.c_long(length))


@attack('trainer')
def churn(who):
    """Share and Unshare of the same memory, by the thousand, with requests on it under way."""
    session = who.ready(length=1 << 20)
    fd = who.hold(wire.memfd(1 << 20))
    who.say('churn')
    for n in range(100):
        session.post_request(wire.SHARE, {1: 2, 2: 1 << 20}, [fd])
        session.post(session.entry(round=n + 1, slot=n, input_buffer=2, output_buffer=2), slot=n)
        session.answer(session.post_request(wire.UNSHARE, {1: 2}))


@attack('trainer')
def buffers(who):
    """All the buffers that a session may have, in all the sessions that a user may have."""
    session = who.joined(most=64)
    small = wire.memfd(4096)
    try:
        who.say('buffers')
        for buffer in range(1, 1100):
            if session.share(small, 4096, buffer)[0] != 0:
                break
    finally:
        os.close(small)


@attack('trainer')
def devices(who):
    """Memory of devices that are not there, by handles of noise; ledgers of noise, for Resume."""
    session = who.session()
    who.say('devices')
    for n in range(8):
        session.request(wire.SHARE, {1: n + 1, 2: who.pick(4096, 1 << 40), 3: 1, 4: who.rng.randbytes(16), 5: who.rng.randbytes(64)})
        fd = wire.memfd(who.pick(0, 64, 4096, 1 << 20), seal=who.pick(True, False))
        try:
            os.pwrite(fd, who.rng.randbytes(64), 0)
            session.post_request(wire.RESUME, {1: {1: who.word(), 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1}, 2: who.wild()}, [fd])
        finally:
            os.close(fd)


@attack('trainer')
def own_memory(who):
    """The session's own ring and slots, or a job's ledger, given back as a buffer: results are written over them."""
    session = who.joined()
    fd = session.memfd
    who.say('share own memory')
    if session.share(fd, len(session.memory))[0] != 0:
        raise Refused('share')
    session.declare(elements=4096)
    for n in range(32):
        at = who.pick(0, 64, 128, wire.RING, wire.SLOT, wire.SLOT + 512 * n, who.rng.randrange(0, wire.SLOT, 64))
        who.say('own memory', at)
        session.post(session.entry(round=n + 1, slot=n, input_count=4096, output_count=4096, input_offset=who.pick(0, wire.RING, at),
                                   output_offset=at), slot=n)


def with_ledger(who, fields):
    """A session that is all of a job that outlives the daemon, with its ledger."""
    session, kept, job = who.session(features=0xff, most=8), [], who.word()
    number = session.post_request(wire.JOIN, {1: job, 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1, **fields})
    status, text, answer = session.answer(number, keep=kept)
    for fd in kept:
        who.hold(fd, 40)
    if status != 0 or not kept:
        raise Refused(text)
    return session, job, wire.unpack(answer[5])[1], kept[0]


@attack('trainer')
def ledgers(who):
    """A job's ledger, changed by its trainer while the job runs, and given back by Resume: as it was, changed, cut, to others."""
    session, job, number, fd = with_ledger(who, who.pick({}, {11: 1}))
    who.say('ledger', job)
    who.memory(session, 1 << 20)
    session.declare(elements=1 << 16)
    length = os.fstat(fd).st_size
    for n in range(32):
        try:
            os.pwrite(fd, struct.pack('<Q', who.wild()), who.rng.randrange(0, max(8, min(length, 1 << 20) - 8), 8))
        except OSError:
            pass
        session.post(session.entry(round=n + 1, slot=n, input_count=1 << 16, output_count=1 << 16, output_offset=1 << 19), slot=n)
    copy = wire.memfd(length)
    who.hold(copy, 40)
    os.pwrite(copy, os.pread(fd, min(length, 1 << 20), 0), 0)
    session.close()
    for one in (fd, copy):
        again = who.session(features=0xff)
        again.request(wire.RESUME, {1: {1: job, 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1}, 2: who.pick(number, number, who.wild())}, [one])


# -- names


@attack('trainer')
def names(who):
    """As many long names of tensors as a job may have, then gone: each is to be freed, none by a walk over all."""
    session = who.joined(most=2)
    session.socket.settimeout(1)
    who.say('names')
    for tensor in range(1, 65537):
        session.send(pack({1: tensor + 10, wire.DECLARE: {1: tensor, 2: f'{tensor:0>255}', 3: 2, 4: 16}}))
        while tensor % 64 == 0 and select.select([session.socket], [], [], 0)[0]:
            if session.receive()[0] is None:
                return


@attack('trainer')
def weird_names(who):
    """Names of jobs and tensors with control characters, bidi marks, bad UTF-8, escapes of terminals, line breaks."""
    weird = [b'a\nb', b'\x1b[2J\x1b]0;x\x07', '\u202eevil\u2066'.encode(), b'\xff\xfe\xc0\x80', b'\0', b'a\0b', b'%s%n%n', b'../../x',
             b'"},{"job":"x', b'\xf4\x90\x80\x80', '\u0000\u200b'.encode(), b'\r\nERROR: AddressSanitized', b'x' * 255, b'']
    name = who.pick(*weird)
    who.say('name', name)
    session = who.session()
    session.request(wire.JOIN, {1: name[:63], 2: name, 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1})
    session = who.joined()
    for tensor in range(1, 16):
        session.request(wire.DECLARE, {1: tensor, 2: who.pick(*weird), 3: 2, 4: 16})
    session = who.session(hello=False)
    session.send(pack({1: 1, wire.HELLO: {1: 1, 2: 1, 3: 0, 4: name}}))


# -- jobs


@attack('trainer')
def wrong_secret(who):
    """Joins of an honest job by name, with a wrong secret or none, as ranks that it has and has not. What they ask for is another job."""
    session = who.session()
    job = who.pick(*who.target.victims)
    for _ in range(50):
        who.say('wrong secret', job)
        rank = who.rng.randrange(4)
        status, text, _ = session.request(wire.JOIN, {1: job, 2: who.pick(b'', who.name.encode(), who.rng.randbytes(255)), 3: rank, 4: who.pick(2, 4),
                                                      5: rank, 6: who.pick(2, 4), 7: 0, 8: 1, 9: 100, 18: who.pick(0, 0, 1),
                                                      15: who.pick(0, 1)})
        assert status != 0, f'joined {job} without its secret'
        if status is None:
            return


@attack('trainer')
def half_jobs(who):
    """Jobs that are never complete, one name after the other, as many as there may be."""
    session = who.session(most=400)
    who.say('half job')
    session.post_request(wire.JOIN, {1: who.word(), 3: 0, 4: 2, 5: 0, 6: 2, 7: 0, 8: 1, 9: who.pick(1, 100, 600000)})


@attack('trainer')
def large_jobs(who):
    """Jobs of as many ranks and nodes as there may be, of which one comes."""
    session = who.session(most=100)
    size = who.pick(16384, 1024, 65536, 1 << 20)
    n_nodes = who.pick(1, size, 16384)
    who.say('large job', size, n_nodes)
    session.post_request(wire.JOIN, {1: who.word(), 3: 0, 4: size, 5: 0, 6: max(1, size // n_nodes), 7: 0, 8: n_nodes, 9: who.pick(50, 5000)})


@attack('trainer')
def terms(who):
    """Joins with the extremes of every term: parts, deadlines, servers, quorums, staleness, GPUs, least and most ranks."""
    session = who.session(features=0xff)
    for _ in range(8):
        body = {1: who.word(), 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1, 9: 200}
        for field in who.rng.sample((9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 24, 25), who.rng.randrange(1, 5)):
            body[field] = {1: who.wild(32), 2: who.wild(), 3: who.pick(0, 1), 4: who.wild(32)} if field == 24 else \
                who.pick(0, 1) if field in (11, 15, 18) else who.wild(64 if field in (9, 10, 25) else 32)
        who.say('terms', body)
        if session.request(wire.JOIN, body)[0] is None:
            return
        session.request(wire.LEAVE, {})


@attack('trainer')
def asks(who):
    """Cheap requests and their answers, as many as go: what is not there is unshared, cancelled, declared again."""
    session = who.state.get('session')
    if not session:
        session = who.state['session'] = who.joined()
    who.say('asks')
    for _ in range(100):
        for _ in range(20):
            session.post_request(who.pick(wire.UNSHARE, wire.CANCEL, wire.DECLARE),
                                 {1: who.pick(1, 77), 2: who.pick(1, 2)} if who.pick(0, 1) else {1: 1, 2: 'x', 3: 2, 4: 4})
        while select.select([session.socket], [], [], 0)[0]:
            if session.receive()[0] is None:
                del who.state['session']
                return


@attack('trainer')
def conflicts(who):
    """Two ranks that declare every tensor otherwise, with names that fill messages about it."""
    ranks = who.pair()
    who.say('conflicts')
    for tensor in range(2, 300):
        name = f'{tensor}' + who.pick('x', '\u202e', '\x1b[2J', '%n') * 60
        for i, session in enumerate(ranks):
            session.send(pack({1: tensor + 10, wire.DECLARE: {1: tensor, 2: name[:200], 3: 2 + i, 4: who.wild(40)}}))
        for session in ranks:
            while select.select([session.socket], [], [], 0)[0]:
                if session.receive()[0] is None:
                    return


@attack('trainer')
def sessions(who):
    """As many sessions as there may be, of as many users as the seed says."""
    who.say('session')
    who.session(most=1000, hello=who.pick(True, True, False), node=0)


@attack('trainer')
def connects(who):
    """Connects, and hangs up, as often as it can; now and then in the middle of Hello."""
    who.say('connects')
    for _ in range(50):
        session = wire.Session(who.target.sockets[0], hello=False, timeout=who.TIMEOUT)
        if who.rng.randrange(3) == 0:
            session.send(pack({1: 1, 2: {1: 1, 2: 1, 3: 0}}))
        session.close()


@attack('trainer')
def leaves(who):
    """Join, leave, join again, as fast as it goes; with a tensor that is being reduced, or not."""
    session = who.session()
    who.say('leaves')
    for _ in range(30):
        if session.join(job=who.word())[0] is None:
            return
        session.declare(tensor=1)
        session.request(wire.LEAVE, {})


@attack('trainer')
def regroups(who):
    """An elastic job that regroups without end."""
    session = who.session(features=wire.FEATURE_RESUME | 0xff)
    who.say('regroups')
    if session.join(job=who.word(), fields={15: 1})[0] != 0:
        raise Refused('elastic')
    for _ in range(30):
        if session.request(wire.REGROUP, {})[0] is None:
            return


@attack('trainer')
def newcomers(who):
    """Newcomers by the dozen at elastic jobs, those of others and their own."""
    who.say('newcomers')
    for _ in range(8):
        session = who.session(features=0xff, most=64)
        session.post_request(wire.JOIN, {1: who.pick('elastic', who.name), 3: 0, 4: 1, 5: 0, 6: 1, 7: 0, 8: 1, 9: 1000, 15: 1, 18: 1})


# -- requests


@attack('trainer')
def open_rounds(who):
    """Thousands of rounds that wait for a rank which never comes to them, then everybody is gone."""
    first, _ = who.pair(length=1 << 16, most=4)
    who.say('open rounds')
    for n in range(4000):
        first.post(first.entry(round=n + 1, slot=n, priority=who.wild(31)), slot=n)


@attack('trainer')
def cancels(who):
    """Requests posted and cancelled, over and over."""
    first, second = who.pair()
    who.say('cancels')
    for n in range(200):
        first.post(first.entry(round=n + 1, slot=n, ticket=n + 1), slot=n, ticket=n + 1)
        if who.rng.randrange(2):
            second.post(second.entry(round=n + 1, slot=n, ticket=n + 1), slot=n, ticket=n + 1)
        first.post_request(wire.CANCEL, {1: who.pick(n, who.rng.randrange(4096)), 2: n + 1})
        while select.select([first.socket], [], [], 0)[0]:
            if first.receive()[0] is None:
                return


@attack('trainer')
def cancels_behind_full_rings(who):
    """A ring full of sums that are made at once, and a request behind it, which has to wait for all of them."""
    session = who.joined(most=32)
    who.memory(session, 1 << 20)
    session.declare(elements=1 << 14)
    who.say('cancels behind full rings')
    for n in range(40):
        for i in range(4096):
            ticket = 4096 * n + i + 1
            session.post(session.entry(round=ticket, slot=i, ticket=ticket, input_count=1 << 14, output_count=1 << 14), slot=i, ticket=ticket)
        session.post_request(wire.CANCEL, {1: who.rng.randrange(4096), 2: 1})
        session.completion(4095, timeout=who.TIMEOUT)


@attack('trainer')
def deadlines(who):
    """Requests whose time is over in a millisecond, by the thousand: timers without end."""
    first, _ = who.pair(most=4)
    who.say('deadlines')
    for n in range(2000):
        first.post(first.entry(round=n + 1, slot=n, timeout_ms=who.pick(1, 1, 2, 10)), slot=n)
    first.completion(1999, timeout=who.TIMEOUT)


@attack('trainer')
def unread(who):
    """Requests whose answers are never read."""
    session = who.session(most=8)
    session.socket.setblocking(False)
    who.say('unread')
    for n in range(20000):
        session.post_request(who.pick(wire.UNSHARE, wire.CANCEL), {1: 77, 2: 1})


@attack('trainer')
def unread_declared(who):
    """Answers and events that are never read, in a job whose results nobody looks at."""
    first, second = who.pair(most=4)
    first.socket.setblocking(False)
    who.say('unread declared')
    for tensor in range(2, 5000):
        for session in (first, second):
            session.send(pack({1: tensor + 10, wire.DECLARE: {1: tensor, 2: f't{tensor:0>200}', 3: 2, 4: 16}}))
        if tensor % 16 == 0:
            while select.select([second.socket], [], [], 0)[0]:
                second.receive()


@attack('trainer')
def urgent(who):
    """All that a legal job may ask for, at the highest priority: 16 MiB tensors one behind the other."""
    ranks = who.state.get('ranks')
    if not ranks:
        ranks = who.state['ranks'] = who.pair(length=33 << 20, elements=4 << 20)
        who.state['round'] = 0
    who.say('urgent')
    first = who.state['round']
    for n in range(4):
        for session in ranks:
            session.post(session.entry(round=first + n + 1, slot=n, ticket=first + n + 1, priority=(1 << 31) - 1, input_count=4 << 20,
                                       output_count=4 << 20, output_offset=0), slot=n, ticket=first + n + 1)
    for session in ranks:
        for n in range(4):
            session.completion(n, timeout=30)
    who.state['round'] = first + 4


@attack('trainer')
def urgent_over_servers(who):
    """The same through servers, in the smallest parts."""
    ranks = who.state.get('ranks')
    if not ranks:
        ranks = who.state['ranks'] = who.pair(length=17 << 20, elements=2 << 20, fields={11: 1, 13: 4096})
        who.state['round'] = 0
    who.say('urgent over servers')
    first = who.state['round']
    for session in ranks:
        session.post(session.entry(round=first + 1, slot=0, ticket=first + 1, priority=(1 << 31) - 1, input_count=2 << 20,
                                   output_count=2 << 20, output_offset=8 << 20), slot=0, ticket=first + 1)
    for session in ranks:
        session.completion(0, timeout=30)
    who.state['round'] = first + 1


@attack('trainer')
def rows(who):
    """Rows of a huge table: as many as a message holds, all equal, out of range, changed while they are read."""
    n = 1 << 18
    session = who.memory(who.joined(most=2), 64 << 20)
    width = who.pick(1, 4, 16)
    session.declare(elements=width << 30)
    session.buffer[0:8 * n] = b''.join(struct.pack('<q', who.pick(i, i, 7, (1 << 30) - 1 - i)) for i in range(256)) * (n // 256)
    who.say('rows', width)
    session.post(session.entry(operation=7, width=width, input_count=n * width, output_count=n * width, input_offset=4 << 20,
                               output_offset=32 << 20, input_rows_buffer=1, output_rows_buffer=1, output_rows_offset=2 << 20))
    session.buffer[0:8] = struct.pack('<q', who.wild(63))
    session.completion(timeout=30)


@attack('trainer')
def counts(who):
    """Counts of all_gather and all_to_all that change while they are read."""
    session = who.ready()
    who.say('counts')
    for n in range(64):
        struct.pack_into('<QQ', session.buffer, 0, *who.pick((1024, 1024), (512, 512), (who.wild(), who.wild()), (1, (1 << 64) - 1)))
        session.post(session.entry(round=n + 1, slot=n, operation=who.pick(3, 4, 5), reduction=who.pick(0, 1), counts_buffer=1,
                                   input_offset=4096, output_offset=16384), slot=n)
        struct.pack_into('<QQ', session.buffer, 0, who.wild(), who.wild())


@attack('trainer')
def many_parts(who):
    """One tensor in a hundred thousand parts, and everybody gone in the middle of it."""
    ranks = who.pair(length=1 << 20, elements=1 << 27, most=4)
    big = 1 << 29
    for session in ranks:
        fd = wire.memfd(big)
        try:
            if session.share(fd, big, buffer=2)[0] != 0:
                raise Refused('share')
        finally:
            os.close(fd)
    who.say('many parts')
    for session in ranks[:who.pick(1, 2)]:
        session.post(session.entry(input_buffer=2, output_buffer=2, input_count=1 << 27, output_count=1 << 27))
    time.sleep(who.rng.uniform(0, 0.2))
    for session in ranks:
        session.close()


@attack('trainer')
def tiny_parts_over_servers(who):
    """The same through servers, where each part is a message."""
    job, session = who.word(), who.session(most=4)
    if session.join(job=job, fields={11: 1, 13: 4096})[0] != 0:
        raise Refused('join')
    who.memory(session, 64 << 20)
    session.declare(elements=16 << 20)
    who.say('tiny parts over servers')
    for n in range(4):
        session.post(session.entry(round=n + 1, slot=n, input_count=16 << 20, output_count=16 << 20), slot=n)
    time.sleep(who.rng.uniform(0, 0.3))
    session.close()


@attack('trainer')
def accumulates(who):
    """Asynchronous jobs whose sums stay at servers as long as they live."""
    session = who.session(most=8)
    part = who.pick(0, 0, 4096, 65536, 1 << 20)
    if session.join(job=who.word(), fields={24: pack({3: 1}), **({13: part} if part else {})})[0] != 0:
        raise Refused('join')
    who.memory(session, 32 << 20)
    who.say('accumulates', part)
    for tensor in range(1, 9):
        session.request(wire.DECLARE, {1: tensor, 2: f't{tensor}', 3: 2, 4: 4 << 20})
        session.post(session.entry(tensor=tensor, operation=8, input_count=4 << 20, output_count=4 << 20, slot=tensor,
                                   output_offset=16 << 20), slot=tensor)
    session.completion(8, timeout=who.TIMEOUT)
