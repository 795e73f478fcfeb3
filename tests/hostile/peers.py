"""Attacks of peers: who has the data key, and says what no daemon of ours would."""
import struct
import wire
from attack import attack
from wire import Fixed, pack

OPS = list(range(1, 8)) + list(range(16, 19)) + list(range(32, 48))
WIDTHS = dict(flags=16, job=64, key=64, round=64, epoch=32, node=32, block=32, part=32, dtype=8, operation=8, reduction=8, offset=64,
              total=64, part_len=32, root=32, moved=32)


def jobs_numbers(who):
    """Numbers of jobs that are not its own, and some that nobody has."""
    return who.pick(*who.target.numbers, who.wild()) if who.target.numbers else who.wild()


def listen(peer):
    """Reads what has come, so that answers do not fill the socket."""
    peer.socket.setblocking(False)
    try:
        while peer.socket.recv(1 << 16):
            pass
    except BlockingIOError:
        pass
    finally:
        peer.socket.settimeout(5)


@attack('peer')
def headers(who):
    """Messages with wild fields on a skeleton that is right."""
    peer = who.peer()
    for _ in range(40):
        op = who.pick(*OPS)
        fields = dict(op=op, job=jobs_numbers(who), key=who.pick(1, 2), round=who.pick(1, 2, 1 << 40), epoch=who.pick(0, 1, 2),
                      node=who.pick(0, 1), dtype=2, operation=1, reduction=1, part_len=64, total=64)
        for name in who.rng.sample(sorted(WIDTHS), who.rng.randrange(0, 4)):
            fields[name] = who.wild(WIDTHS[name])
        fields['status'] = who.pick(0, 5, -1, (1 << 31) - 1)
        fields['priority'] = who.pick(0, 1, -1, (1 << 31) - 1)
        payload = who.rng.randbytes(who.pick(0, 0, 4, 64, 64, 65, 4096))
        if op >= 32:
            who.say('notice', op, fields)
            peer.notice(payload=payload, **fields)
        else:
            who.say('call', op, fields)
            peer.post(payload=payload, **fields)
        listen(peer)


@attack('peer')
def endings(who):
    """Notices that end or leave jobs of others, by their numbers."""
    peer = who.peer()
    for _ in range(20):
        op, job = who.pick(wire.D_FAIL_JOB, wire.D_FAIL_ROUND, wire.D_LEAVE, 40, 42, 43, 44, 46, 47, 38, 39), jobs_numbers(who)
        who.say('ending', op, job)
        peer.notice(op, who.pick(b'', b'it is over'), job=job, status=5, key=who.pick(0, 1), round=who.pick(0, 1, who.wild()),
                    node=who.pick(0, 1), epoch=who.pick(0, 1, 2, 3))
        listen(peer)


@attack('peer')
def half_messages(who):
    """Messages that stop in the middle, with the largest lengths, on many connections."""
    peer = who.peer(most=100)
    length = who.pick(1 << 20, 64 << 20, 4 << 20, 4096)
    op = who.pick(wire.D_PUSH, wire.D_JOIN, wire.D_ATTACH, 6, 45, 40)
    who.say('half message', op, length)
    header = peer.header(op, cookie=1, job=jobs_numbers(who), len=length, dtype=2, operation=1, reduction=1, part_len=length & 0xffffffff,
                         total=length, key=1, round=1)
    peer.socket.sendall(header[:who.pick(96, 96, 96, 50)] + bytes(who.pick(0, 1, 65536, 1 << 20)))


def join_body(who, job, n_nodes, more=None):
    body = {1: job, 2: who.rng.randbytes(32), 3: n_nodes, 4: n_nodes, 5: 0, 6: 1, 7: [0], 8: Fixed(who.wild()), 9: 1, 10: Fixed(who.wild()),
            11: who.pick(1, 1000, 600000), 12: 60000, 14: Fixed(who.wild()), 15: who.pick('n1', 'x')}
    body.update(more or {})
    return pack(body)


def attach_body(who, job, n_nodes, more=None):
    body = {1: job, 2: n_nodes, 3: n_nodes, 4: 0, 5: list(range(n_nodes)), 6: 60000, 7: Fixed(who.wild()), 8: who.pick(0, 1)}
    body.update(more or {})
    return pack(body)


@attack('peer')
def set_ups(who):
    """JOINs and ATTACHes of jobs of 16,384 nodes, of others' jobs, of names without end."""
    peer = who.peer()
    for _ in range(4):
        n_nodes = who.pick(1, 2, 64, 1024, 16384)
        job = who.pick(who.word(), *who.target.victims)
        kind = who.pick('join', 'attach', 'attach number')
        who.say('set up', kind, job, n_nodes)
        if kind == 'join':
            peer.post(wire.D_JOIN, join_body(who, job, n_nodes), node=0)
        else:
            peer.post(wire.D_ATTACH, attach_body(who, job, n_nodes), node=0,
                      job=jobs_numbers(who) if kind == 'attach number' else who.wild())
        listen(peer)


@attack('peer')
def set_up_fields(who):
    """The same messages with each field wild, doubled, or of another type."""
    peer = who.peer()
    for _ in range(8):
        more = {}
        for _ in range(who.rng.randrange(1, 4)):
            more[who.rng.randrange(1, 25)] = who.pick(who.wild(), Fixed(who.wild()), who.rng.randbytes(who.rng.randrange(100)),
                                                      [who.wild(32) for _ in range(50)], {1: who.wild(), 2: who.wild()})
        op = who.pick(wire.D_JOIN, wire.D_ATTACH, wire.D_DECLARE)
        body = {wire.D_JOIN: join_body, wire.D_ATTACH: attach_body}.get(op, join_body)(who, who.word(), 2, more)
        who.say('set up field', op, sorted(more))
        peer.post(op, body, job=jobs_numbers(who), node=who.pick(0, 1, who.wild(32)))
        listen(peer)


@attack('peer')
def served(who):
    """A job of its own at a server, all of it legal: tensors and rounds of its own without end, answers never read."""
    peer = who.peer(most=4)
    number = who.rng.getrandbits(60) | 1
    peer.post(wire.D_ATTACH, attach_body(who, who.word(), who.pick(1, 2, 1024)), job=number, node=0, epoch=1)
    who.say('served', number)
    part = 1 << 16
    for n in range(200):
        peer.post(wire.D_PUSH, bytes(part), job=number, key=n % 50 + 1, round=n // 50 + 1, epoch=1, dtype=2, operation=1, reduction=1,
                  total=part, part_len=part)


@attack('peer')
def offers(who):
    """OFFER, OFFERED, HAVE, MOVE, PACK for jobs of its own and of others, with counts that are wrong."""
    peer = who.peer()
    number = who.rng.getrandbits(60) | 1
    peer.post(wire.D_ATTACH, attach_body(who, who.word(), 2, {8: 1}), job=number, node=0, epoch=1)
    for _ in range(20):
        job, op = who.pick(number, number, jobs_numbers(who)), who.pick(6, 41, 43, 40, 45, 5, 7)
        payload = who.pick(b'', bytes(64), struct.pack('<16I', *(who.wild(32) for _ in range(16))), who.rng.randbytes(168))
        who.say('offer', op, job)
        keys = dict(job=job, key=who.pick(1, who.wild()), round=who.pick(1, who.wild()), part=who.pick(0, 1, 32), block=who.pick(0, 4, 65536),
                    epoch=who.pick(1, who.wild(32)), dtype=2, operation=who.pick(1, 7, 8), reduction=1, part_len=64, total=64)
        if op < 16:
            peer.post(op, payload, **keys)
        else:
            peer.notice(op, payload, **keys)
        listen(peer)


@attack('peer')
def errors(who):
    """Cheap calls that are refused, as many as go, all answers read."""
    peer = who.state.get('peer')
    if not peer or who.state.pop('broken', False):
        peer = who.state['peer'] = who.peer(address=who.target.addresses[0])
    who.state['broken'] = True
    who.say('errors')
    for _ in range(50):
        peer.socket.sendall(b''.join(peer.header(wire.D_PUSH, cookie=n + 1, job=7, key=1, round=1, dtype=2, operation=1, reduction=1)
                                     for n in range(100)))
        listen(peer)
    who.state['broken'] = False


@attack('peer')
def taken_ids(who):
    """Peers with the ids of members that live, as further connections of theirs, as ones that only beat, as new processes."""
    name, number = who.pick(*who.target.members)
    who.say('taken id', name, number)
    peer = wire.Peer(who.data_port(), timeout=who.TIMEOUT, sender=number, shake=False)
    who.hold(peer)
    lane, plain = who.pick(0, 1, 2, 255, 256, 511, 65535), peer.hello
    peer.hello = lambda name: wire.HELLO_BYTES.pack(*wire.HELLO_BYTES.unpack(plain(name))[:3], lane,
                                                    *wire.HELLO_BYTES.unpack(plain(name))[4:])
    peer.shake(who.target.key, who.pick(name, 'wire'))
    for _ in range(8):
        peer.notice(who.pick(*OPS), job=jobs_numbers(who), status=5, node=who.pick(0, 1))
    listen(peer)


@attack('peer')
def declarations(who):
    """Tensors of a job of its own, at a server that is its home, with long names, as many as go."""
    peer, job = who.peer(most=4), who.word()
    body = join_body(who, job, 1, {15: 'n0'})
    peer.post(wire.D_JOIN, body, node=0)
    answer, payload = peer.receive()
    number = wire.unpack(payload).get(1, 0) if answer['op'] == wire.D_OK else who.wild()
    peer.post(wire.D_ATTACH, attach_body(who, job, 1), job=number, node=0, epoch=answer['epoch'])
    who.say('declarations', number)
    for n in range(2000):
        peer.post(wire.D_DECLARE, pack({1: f'{n:0>250}', 2: 2, 3: 1 << 40, 4: 0}), job=number, node=0, epoch=answer['epoch'])
        if n % 50 == 0:
            listen(peer)


@attack('peer')
def pings(who):
    """PINGs without end, PONGs never read."""
    peer = who.peer(most=4)
    who.say('pings')
    for _ in range(500):
        peer.socket.sendall(peer.header(wire.D_PING) * 64)


@attack('peer')
def many_peers(who):
    """Peers with a new number each, as many connections as there may be."""
    who.say('many peers')
    who.peer(most=600, name=who.word()[:60])


@attack('peer')
def names_of_peers(who):
    """Peers that say they are others: a name that is taken, a number that is taken, the connection that only beats."""
    address = who.data_port()
    who.say('name of a peer')
    peer = who.peer(address=address, name=who.pick('n0', 'n1', 's0', 'x\n\x1b[31m', 'x' * 63), sender=who.pick(1, 2, who.wild() | 1))
    for _ in range(4):
        peer.notice(who.pick(*OPS), job=jobs_numbers(who))
    listen(peer)
