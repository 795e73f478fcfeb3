"""What attacks are made of: the table they are entered in, and the attacker, one process that does one of them.

An attack is a function of one attacker, entered by @attack(who); it is called again and again until time is up, and each call
is one action or a few. Whatever it draws it draws from attacker.rng, so a seed makes the same actions again. What it opens it
gives to attacker.hold(), which closes the oldest beyond a number, and the rest at the end. OSError and Refused are what an
attacker has to expect, and end one call; any other exception says that the attack itself is broken, and the run fails.
"""
import ctypes, encodings.idna, fcntl, mmap, os, random, resource, select, signal, socket, struct, time, traceback  # all before it is another user
import wire

ATTACKS = {}  # name: Attack


class Refused(Exception):
    """The daemon has said no where the attack needed a yes."""


class Attack:
    def __init__(self, act, who, stalls=True, share=True, known=None):
        self.act, self.who, self.name, self.doc = act, who, act.__name__, act.__doc__
        self.stalls, self.share, self.known = stalls, share, known


def attack(who, **keys):
    """Enters an attack. who: trainer, peer, stranger or operator. stalls, share: whether the honest job's longest round and its
    share are judged beside it; where they are not, the attack's text says why. known: what it is known to do, in words; it is then
    played only where it is named."""
    def enter(act):
        assert act.__doc__ and act.__name__ not in ATTACKS, act.__name__
        ATTACKS[act.__name__] = Attack(act, who, **keys)
        return act
    return enter


def withstood():
    """Names of all attacks of which nothing is known that they do."""
    return sorted(name for name, one in ATTACKS.items() if not one.known)


class Target:
    """What an attacker knows of the cluster: plain data, made before it was forked."""

    def __init__(self, sockets, admins, addresses, coordinator, key, folder, victims, group):
        self.sockets, self.admins, self.addresses, self.coordinator = sockets, admins, addresses, coordinator
        self.key, self.folder, self.victims, self.group = key, folder, victims, group


class Attacker:
    TIMEOUT = 5

    def __init__(self, target, seed, number, trail):
        self.target, self.rng, self.number, self.trail = target, random.Random(seed), number, trail
        self.held, self.state, self.n_actions, self.n_names = [], {}, 0, 0
        self.name = f'a{seed & 0xffffff:x}-{number}'

    # -- saying what it does

    def say(self, *words):
        """One action, for whoever reads the trail after a failure."""
        self.n_actions += 1
        os.write(self.trail, f'{self.name}: {" ".join(map(str, words))}\n'.encode(errors='replace'))

    def hold(self, thing, most=16):
        self.held.append(thing)
        while len(self.held) > most:
            self.drop(self.held.pop(0))
        return thing

    @staticmethod
    def drop(thing):
        try:
            os.close(thing) if isinstance(thing, int) else thing.close()
        except (OSError, BufferError):
            pass

    def drop_all(self):
        while self.held:
            self.drop(self.held.pop())

    # -- what it draws

    def pick(self, *of):
        return self.rng.choice(of)

    def wild(self, bits=64):
        """A number that checks are wrong about, if they are about any."""
        top = 1 << bits
        return self.pick(0, 1, 2, top - 1, top // 2, top // 2 - 1, top - 4096, 4096, self.rng.getrandbits(bits),
                         self.rng.getrandbits(self.rng.randrange(1, bits + 1))) % top

    def word(self):
        """A name that nobody else has."""
        self.n_names += 1
        return f'{self.name}.{self.n_names}'

    # -- doors

    def node(self):
        return self.rng.randrange(len(self.target.sockets))

    def session(self, hello=True, node=0, most=16, features=0):
        """A trainer's session. node 0 is where the measured job is."""
        session = self.hold(wire.Session(self.target.sockets[node], hello=False, timeout=self.TIMEOUT), most)
        if hello and not session.hello(features=features) or hello and not session.memory:
            raise Refused('hello')
        return session

    def joined(self, node=0, most=16, features=0, **join):
        """A session that is all of a job by itself."""
        session = self.session(node=node, most=most, features=features)
        status, text, _ = session.join(**{'job': self.word(), **join})
        if status != 0:
            raise Refused(text)
        return session

    def memory(self, session, length, buffer=1, seal=True):
        """Memory shared with the daemon, mapped here: session.buffer."""
        fd = wire.memfd(length, seal)
        try:
            status, text, _ = session.share(fd, length, buffer)
            if status != 0:
                raise Refused(text)
            session.buffer = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        return session

    def ready(self, length=1 << 16, elements=1024, **keys):
        """One that can post entries on tensor 1, in buffer 1."""
        session = self.memory(self.joined(**keys), length)
        session.declare(elements=elements)
        return session

    def pair(self, length=1 << 16, elements=1024, node=0, most=16, fields=None):
        """Two sessions that are a job of two ranks, each ready to post."""
        job, ranks = self.word(), [self.session(node=node, most=most) for _ in range(2)]
        body = {4: 2, 6: 2, 7: 0, 8: 1, **(fields or {})}
        asked = [session.post_request(wire.JOIN, {1: job, 3: i, **body, 5: i}) for i, session in enumerate(ranks)]
        for session, number in zip(ranks, asked):
            status, text, _ = session.answer(number)
            if status != 0:
                raise Refused(text)
            self.memory(session, length)
            session.declare(elements=elements)
        return ranks

    def connect(self, address, timeout=None):
        """TCP, not a word said."""
        host, port = address.rsplit(':', 1)
        return socket.create_connection((host, int(port)), timeout or self.TIMEOUT)

    def data_port(self):
        """That of a daemon, most often the one with the measured job."""
        return self.pick(self.target.addresses[0], *self.target.addresses)

    def peer(self, most=16, address=None, **keys):
        """A data connection that has proved the key."""
        return self.hold(wire.Peer(address or self.data_port(), key=self.target.key, timeout=self.TIMEOUT, **keys), most)


def become(number, target, nice):
    """In the child: another user, who may train and no more."""
    os.nice(nice)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 1 << 16), limit))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(target.group, target.group, target.group)
        os.setresuid(20000 + number, 20000 + number, 20000 + number)


def attacker_main(one, target, seed, number, seconds, nice, trail_path, leave):
    """A process of an attack, from its fork to its end. leave: 'close', or 'hold': everything is kept until it is killed."""
    trail = os.open(trail_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    status = 0
    try:
        become(number, target, nice)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which another user's has not: no attacker without a runner
        who, end = Attacker(target, seed, number, trail), time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                one.act(who)
            except (OSError, Refused, EOFError) as error:
                os.write(trail, f'{who.name}: {one.name} ended by {error!r}\n'.encode(errors='replace'))
                time.sleep(0.001)  # one that is refused all the time is not to fill the trail alone
        os.write(trail, f'{who.name}: {one.name} did {who.n_actions} actions\n'.encode())
        if leave == 'hold':
            signal.pause()
        who.drop_all()
        status = 0 if who.n_actions else 4
    except BaseException:  # pylint: disable=broad-except; nothing may get back into the runner's code
        os.write(trail, traceback.format_exc().encode())
        status = 3
    finally:
        os._exit(status)


def start(one, target, seed, number, seconds, nice, trail_path, leave):
    pid = os.fork()
    if not pid:
        attacker_main(one, target, seed, number, seconds, nice, trail_path, leave)
    return pid


def compute(nice):
    """A process that has nothing to do with the daemon, and all the time that it gets."""
    pid = os.fork()
    if not pid:
        os.nice(nice)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        while True:
            pass
    return pid


# -- descriptors that nobody expects


def odd_descriptor(who):
    """(what it is, descriptor)."""
    kind = who.pick('pipe', 'full pipe', 'socket', 'linger', 'epoll', 'eventfd', 'full eventfd', 'directory', 'memfd', 'sealed',
                    'hugetlb', 'proc', 'null', 'zero', 'timerfd', 'opath', 'inotify', 'file', 'self', 'udp', 'listener', 'pidfd')
    if kind in ('pipe', 'full pipe'):
        read, write = os.pipe()
        if kind == 'full pipe':
            os.set_blocking(write, False)
            os.write(write, bytes(65536))
        keep, gone = who.pick((read, write), (write, read))
        os.close(gone)
        return kind, keep
    if kind == 'linger':
        return kind, lingering(who)
    if kind in ('socket', 'udp', 'listener'):
        one = {'socket': lambda: socket.socketpair()[0], 'udp': lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
               'listener': lambda: socket.create_server(('127.0.0.1', 0))}[kind]()
        return kind, one.detach()
    if kind == 'epoll':
        epoll = select.epoll()
        fd = os.dup(epoll.fileno())
        epoll.close()
        return kind, fd
    if kind in ('eventfd', 'full eventfd'):
        return kind, os.eventfd((1 << 32) - 1 if kind == 'full eventfd' else 0) if hasattr(os, 'eventfd') else os.memfd_create('e')
    if kind in ('memfd', 'sealed', 'hugetlb'):
        return kind, odd_memfd(who, kind)
    if kind in ('timerfd', 'inotify'):
        libc = ctypes.CDLL(None)
        return kind, libc.timerfd_create(1, 0) if kind == 'timerfd' else libc.inotify_init1(0)
    if kind == 'pidfd':
        return kind, os.pidfd_open(os.getpid())
    path, flags = {'directory': ('/', os.O_RDONLY), 'proc': (who.pick('/proc/self/maps', '/proc/self/mem', '/proc/kmsg', '/proc/stat'),
                                                             os.O_RDONLY),
                   'null': ('/dev/null', os.O_RDWR), 'zero': ('/dev/zero', os.O_RDWR), 'opath': ('/etc/passwd', os.O_PATH),
                   'file': ('/etc/passwd', os.O_RDONLY), 'self': ('/proc/self/exe', os.O_RDONLY)}[kind]
    try:
        return kind, os.open(path, flags)
    except OSError:
        return 'null', os.open('/dev/null', os.O_RDWR)


def odd_memfd(who, kind):
    fd = os.memfd_create('odd', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if kind == 'hugetlb' else 0))
    try:
        os.ftruncate(fd, who.pick(0, 4096, 1 << 21, 1 << 30))
        if kind == 'sealed':
            fcntl.fcntl(fd, 1033, who.pick(0, 1, 2, 4, 8, 2 | 4, 2 | 8, 15))  # F_ADD_SEALS
    except OSError:
        pass
    return fd


LISTENERS = []


def lingering(who):
    """A TCP socket with bytes that its other end never reads, and SO_LINGER: who closes it last waits."""
    if not LISTENERS:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(('127.0.0.1', 0))
        listener.listen(4096)
        LISTENERS.append(listener)
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, who.pick(1, 10, 100)))
    one.connect(LISTENERS[0].getsockname())
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(65536))
    except BlockingIOError:
        pass
    return one.detach()
