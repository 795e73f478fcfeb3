"""Attacks on the doors that speak gRPC: the coordinator's port, and the operators' socket from a trainer's user."""
import socket
from attack import attack
from wire import Fixed, pack

PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, 'big') + bytes([kind, flags]) + stream.to_bytes(4, 'big') + payload


def header_block(path):
    """Headers of a gRPC call, in HPACK's plainest form: literals that are not indexed."""
    def literal(name, value):
        return b'\0' + bytes([len(name)]) + name + bytes([len(value)]) + value
    return b''.join(literal(name, value) for name, value in [
        (b':method', b'POST'), (b':scheme', b'http'), (b':path', path.encode()), (b':authority', b'x'), (b'te', b'trailers'),
        (b'content-type', b'application/grpc')])


def call_frames(stream, path, message):
    body = b'\0' + len(message).to_bytes(4, 'big') + message
    return frame(1, 4, stream, header_block(path)) + frame(0, 1, stream, body)


def opened(who):
    one = who.hold(who.connect(who.target.coordinator), 32)
    one.sendall(PREFACE + frame(4, 0, 0, b''))
    return one


@attack('operator')
def grpc_noise(who):
    """What is no HTTP/2, and frames that are wrong, at the coordinator's port."""
    one = who.hold(who.connect(who.target.coordinator), 100)
    data = who.pick(b'', who.rng.randbytes(500), PREFACE, PREFACE + who.rng.randbytes(500), PREFACE + frame(4, 0, 0, b'') * 500,
                    PREFACE + frame(4, 0, 0, b'') + frame(1, 4, 1, who.rng.randbytes(40)),
                    PREFACE + frame(4, 0, 0, b'') + b''.join(frame(3, 0, n, bytes(4)) for n in range(1, 400, 2)),
                    PREFACE + frame(4, 0, 0, b'') + frame(6, 0, 0, bytes(8)) * 500)
    who.say('noise', len(data))
    one.sendall(data)


@attack('operator')
def grpc_connects(who):
    """Connections to the coordinator's port that say nothing."""
    who.say('grpc connect')
    who.hold(who.connect(who.target.coordinator), 500)


@attack('operator')
def grpc_floods(who):
    """Streams opened and reset, headers that never end, messages that never end, settings without end, at the coordinator's port."""
    one = opened(who)
    kind = who.pick('reset', 'continuation', 'data', 'settings', 'pings', 'streams')
    who.say('flood', kind)
    block = header_block('/bps.cluster.Coordinator/Heartbeat')
    if kind == 'reset':
        for n in range(1, 2000, 2):
            one.sendall(frame(1, 4, n, block) + frame(3, 0, n, (8).to_bytes(4, 'big')))
    elif kind == 'continuation':
        one.sendall(frame(1, 0, 1, block))
        for _ in range(500):
            one.sendall(frame(9, 0, 1, b'\0\1x\x7f' + b'y' * 127) * 10)
    elif kind == 'data':
        one.sendall(frame(1, 4, 1, block) + frame(0, 0, 1, b'\0' + (1 << 31).to_bytes(4, 'big')))
        for _ in range(4):
            one.sendall(frame(0, 0, 1, bytes(16000)))
    elif kind == 'settings':
        one.sendall(frame(4, 0, 0, b'') * 20000)
    elif kind == 'pings':
        one.sendall(frame(6, 0, 0, bytes(8)) * 20000)
    else:
        one.sendall(b''.join(frame(1, 4, n, block) for n in range(1, 4000, 2)))


@attack('operator', stalls=False, share=False)
def enrolments(who):
    """Members that enrol and go, by names that are taken and new ones. Whoever may call without certificates may do so, and jobs are
    told of each; times are not judged beside it."""
    one = opened(who)
    for n in range(8):
        who.say('enrol')
        body = {1: who.pick(1, 2, 3), 2: 1, 3: who.wild(), 4: member(who), 6: who.wild(32), 7: who.rng.randbytes(32), 10: who.wild(32)}
        one.sendall(call_frames(2 * n + 1, '/bps.cluster.Coordinator/Enroll', pack(body)))


def member(who):
    return {1: Fixed(who.pick(1, who.wild() | 1)), 2: who.pick('n0', 'n1', 'x', 'x\n\x1b[31m'), 3: who.pick(1, 2, 3),
            4: who.pick('127.0.0.1:1', 'nowhere:9', ''), 5: who.wild(32)}


@attack('operator', stalls=False, share=False)
def coordinator_calls(who):
    """Calls of the coordinator with ids that are not the caller's: Heartbeat, Leave, OpenJob, CloseJob. Whoever may call
    without certificates may register servers, which jobs then wait for; times are not judged beside it."""
    one = opened(who)
    for n in range(30):
        method, body = who.pick(('Heartbeat', {1: Fixed(who.wild()), 2: who.wild(32)}), ('Leave', {1: Fixed(who.wild())}),
                                ('OpenJob', {1: who.pick(who.word(), *who.target.victims), 2: who.wild(32), 3: who.pick(1, 1000, 1 << 62),
                                             4: Fixed(who.wild())}),
                                ('CloseJob', {1: who.pick(*who.target.victims), 2: Fixed(who.wild())}))
        who.say('coordinator', method, body)
        one.sendall(call_frames(2 * n + 1, '/bps.cluster.Coordinator/' + method, pack(body)))


@attack('operator')
def admin_from_outside(who):
    """The operators' socket, from a user who may only train: closed to him, whatever he asks."""
    for path in who.target.admins:
        one = who.hold(socket.socket(socket.AF_UNIX), 32)
        who.say('admin', path)
        try:
            one.connect(path)
        except PermissionError:
            continue
        if who.target.closed:
            raise AssertionError(f'{path} lets in a trainer')
        one.sendall(PREFACE + frame(4, 0, 0, b'') + call_frames(1, '/bps.admin.Admin/' + who.pick('Drain', 'Status', 'Jobs'), pack({1: 'nobody'})))
