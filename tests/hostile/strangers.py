"""Attacks of strangers: whoever can reach a port, and knows no key."""
import socket, time
import wire
from attack import attack


@attack('stranger')
def silence(who):
    """Connections to the data port that say nothing, by the thousand."""
    who.say('silence')
    who.hold(who.connect(who.data_port()), 1500)


@attack('stranger')
def half_hellos(who):
    """Hellos that stop in the middle, or before the proof, or with a wrong one."""
    one = who.hold(who.connect(who.data_port()), 200)
    hello = wire.HELLO_BYTES.pack(wire.MAGIC, who.pick(wire.DATA_VERSION, wire.DATA_VERSION, who.wild(8)), who.pick(1, 2, who.wild(8)),
                                  who.wild(16), who.wild(), who.wild(), who.rng.randbytes(64), who.rng.randbytes(32), bytes(32))
    data = who.pick(hello, hello[:who.rng.randrange(1, 152)], hello + who.rng.randbytes(32), hello + who.rng.randbytes(5),
                    who.rng.randbytes(300), b'GET / HTTP/1.1\r\n\r\n', hello + bytes(1 << 18))
    who.say('half hello', len(data))
    one.sendall(data)


@attack('stranger')
def trickle(who):
    """A hello that comes byte by byte, on many connections at once."""
    if len(who.held) < 300:
        who.hold(who.connect(who.data_port()), 300)
    who.say('trickle')
    hello = wire.HELLO_BYTES.pack(wire.MAGIC, wire.DATA_VERSION, wire.DATA_VERSION, 0, 0, 7, b'x', bytes(32), bytes(32))
    for one in who.rng.sample(who.held, min(len(who.held), 20)):
        one.send(hello[:1])


@attack('stranger')
def data_connects(who):
    """Connects to data ports, and hangs up or resets, as often as it can."""
    who.say('data connects')
    for _ in range(50):
        one = who.connect(who.data_port())
        if who.rng.randrange(2):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')
        one.close()


@attack('stranger')
def replayed_proofs(who):
    """The proof of one connection on another, and the server's own bytes back to it."""
    one = who.connect(who.data_port())
    hello = wire.HELLO_BYTES.pack(wire.MAGIC, wire.DATA_VERSION, wire.DATA_VERSION, 0, 0, 7, b'n1', bytes(32), bytes(32))
    one.sendall(hello)
    theirs = one.recv(152)
    other = who.hold(who.connect(who.data_port()), 50)
    who.say('replayed proof', len(theirs))
    other.sendall(who.pick(theirs, hello + theirs[-32:], theirs + theirs[-32:]))
    one.close()
    time.sleep(0.001)
