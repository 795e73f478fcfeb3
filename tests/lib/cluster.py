"""Daemons and trainers for the tests that need real ones: starts them, talks to them, and leaves nothing behind.

A test file is a program: its functions named test_* run in order, each in a Cluster of its own making; run(globals())
prints one line each and last "N passed, N failed, N skipped"; with arguments those of them that have such a name, or if none has,
whose names contain one. Unless they are named, it leaves out those that are marked as of a higher tier than BPS_TEST_TIER: quick,
gate or full. No sleep is used to synchronise: daemons say READY=1 by
sd_notify, trainers answer each command.
"""
import errno, fcntl, functools, os, re, select, shutil, signal, socket, subprocess, sys, tempfile, threading, time, traceback

BUILD = os.environ.get('BPS_BUILD_DIR') or os.path.join(os.path.dirname(__file__), '..', '..', 'build')
SCALE = int(os.environ.get('BPS_TEST_SCALE', '1'))  # of deadlines, for sanitizer builds
SANITIZER = os.environ.get('BPS_TEST_SANITIZER', 'none')
TIER = os.environ.get('BPS_TEST_TIER', 'full')
GATE = TIER != 'full'
TSAN, SANITIZED = 'thread' in SANITIZER, SANITIZER != 'none'
DEADLINE = int(os.environ.get('BPS_TEST_DEADLINE', '30')) * SCALE
SLOW = max(1, SCALE // 2)  # of times that are part of a test: as fast under sanitizers; in a guest all takes longer
# Two devices: daemons of a cluster go by RDMA alone. Those of scripts/vm --rdma, or "fake0 fake1" of tests/fakeverbs.
RDMA = os.environ.get('BPS_TEST_RDMA', '').split()

FLOAT64, FLOAT32, FLOAT16, BFLOAT16, INT64, INT32, INT16, INT8, UINT8, BOOL = range(1, 11)
PUSH_PULL, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BARRIER, PUSH_PULL_ROWS, ACCUMULATE = range(1, 9)
SUM, AVERAGE, MIN, MAX = range(1, 5)


@functools.cache
def preload(library):
    """What LD_PRELOAD is for a daemon: of a build with a sanitizer, its library has to come first."""
    used = subprocess.run(['ldd', os.path.join(BUILD, 'daemon', 'bps-daemon')], capture_output=True, text=True, check=True).stdout
    return ' '.join([*re.findall(r'=> (\S*/lib(?:asan|tsan)\.\S+)', used), library])


def make_folder(prefix):
    """In memory, where there is a place for that; of a run of all tests (tests/driver/leftovers.py), with its other folders."""
    places = [os.path.join('/dev/shm', os.path.basename(os.environ.get('TMPDIR', ''))), '/dev/shm']
    return tempfile.mkdtemp(prefix=prefix, dir=next(filter(os.path.isdir, places), None))


# A process that looks for leaks takes as long to end as to start. In the gate only the first process of each kind looks for leaks.
NO_LEAKS_SOUGHT = {'ASAN_OPTIONS': os.environ.get('ASAN_OPTIONS', '') + ':detect_leaks=0'} if GATE else {}


class Skip(Exception):
    pass


def has_failpoints():
    with open(os.path.join(BUILD, 'daemon', 'bps-daemon'), 'rb') as binary:
        return b'BPS_FAILPOINTS' in binary.read()


def need_failpoints():
    if not has_failpoints():
        raise Skip('the daemon was built without failpoints')


def need_porter():
    """Nothing that others hand over is closed while any thread of that process keeps the table of descriptors that it was in."""
    if TSAN:
        raise Skip('the thread sanitizer has a thread of its own in the porter, too')


def full_tier(why):
    """Marks a test that the gate leaves out: its verdict depends on how fast the machine is, or it takes long."""
    def mark(test):
        test.left_out = ('quick', 'gate')
        return test
    return mark


def gate_tier(test):
    """Marks a test that scripts/test --changed leaves out: a daemon depends on nearly all there is, and this takes seconds."""
    test.left_out = ('quick',)
    return test


def some(all, few):
    """What a test goes through: all of them, or in the gate a few, by which it passes the same lines."""
    return few if GATE else all


class BpsError(Exception):
    """What a trainer's command answered instead of ok."""

    def __init__(self, number, text):
        super().__init__(f'{errno.errorcode.get(number, number)}: {text}')
        self.errno, self.text = number, text


def wait_for(what, condition, seconds=DEADLINE, pause=0.005):
    """Polls a condition that nobody signals (a file of /proc, a table of bpsctl); fails when it does not come true."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f'{what}: not within {seconds} s')
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)  # a look may cost a process


class Process:
    """A child whose stdout and stderr go to a file; killed with us."""

    def __init__(self, name, argv, folder, netns=None, env=None, **kwargs):
        self.name, self.log = name, os.path.join(folder, name + '.log')
        if netns:
            argv = ['ip', 'netns', 'exec', netns] + argv
        self.process = subprocess.Popen(argv, stderr=open(self.log, 'ab'), env={**os.environ, **(env or {})},
                                        **kwargs)
        self.pid = self.process.pid

    def text(self):
        with open(self.log, errors='replace') as file:
            return file.read()

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        if self.process.poll() is None:
            try:
                self.process.send_signal(signal.SIGCONT)
            except ProcessLookupError:
                pass
            self.process.kill()
        return self.process.wait()


class Daemon(Process):
    def __init__(self, name, folder, *options, netns=None, wait=True, env=None, binary=None):
        self.socket = os.path.join(folder, name + '.sock')
        self.admin = os.path.join(folder, name + '.admin')
        notify_path = os.path.join(folder, name + '.notify')
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.notify.bind(notify_path)
        argv = [binary or os.path.join(BUILD, 'daemon', 'bps-daemon'), '--config=', '--socket=' + self.socket,
                '--admin-socket=' + self.admin, '--node=' + name, *options]
        super().__init__(name, argv, folder, netns, {**(env or {}), 'NOTIFY_SOCKET': notify_path}, stdin=subprocess.DEVNULL)
        if wait:
            self.ready()

    def ready(self):
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            ended = self.process.poll() is not None  # before we look: it may be ready and end at once
            while select.select([self.notify], [], [], 0.05)[0]:  # all that it has said: something else may come first
                if b'READY=1' in self.notify.recv(4096):
                    return
            if ended:
                raise AssertionError(f'daemon {self.name} ended before it was ready:\n{self.text()}')
        raise AssertionError(f'daemon {self.name} was not ready within {DEADLINE} s:\n{self.text()}')

    def stop(self):
        """SIGTERM; the daemon must end well and by itself, and no sanitizer may have spoken."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            status = self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f'daemon {self.name} did not stop:\n{self.text()}') from None
        self.notify.close()
        if status or re.search(r'ERROR: \w+Sanitizer|runtime error:|WARNING: ThreadSanitizer', self.text()):
            raise AssertionError(f'daemon {self.name} ended with status {status}:\n{self.text()}')

    def alive(self):
        return self.process.poll() is None

    def ctl(self, *arguments):
        if TSAN:  # gRPC is not instrumented, and so slow under it that connections time out
            raise Skip('bpsctl is not run under the thread sanitizer')
        out = subprocess.run([os.path.join(BUILD, 'daemon', 'admin', 'bpsctl'), '--socket', self.admin, '--json',
                              f'--timeout={DEADLINE}', *arguments], capture_output=True, text=True, timeout=DEADLINE,
                             env={**os.environ, **NO_LEAKS_SOUGHT})
        if out.returncode:
            raise AssertionError(f'bpsctl {arguments}: {out.stderr}')
        import json
        return json.loads(out.stdout)

    def fds(self):
        return len(os.listdir(f'/proc/{self.pid}/fd'))

    def threads(self):
        """Their names."""
        names = []
        for task in os.listdir(f'/proc/{self.pid}/task'):
            with open(f'/proc/{self.pid}/task/{task}/comm') as file:
                names.append(file.read().strip())
        return names

    def maps(self):
        """Of memory that others have, too. Its own comes and goes with threads, whose stacks the C library keeps."""
        with open(f'/proc/{self.pid}/maps') as file:
            return sum(line.split()[1].endswith('s') for line in file)

    def state(self):
        """As the kernel calls it: T is stopped."""
        with open(f'/proc/{self.pid}/stat') as file:
            return file.read().rsplit(')', 1)[1].split()[0]

    def alarms(self):
        """Seconds until each timer that is set goes off."""
        left = []
        for fd in os.listdir(f'/proc/{self.pid}/fdinfo'):
            with open(f'/proc/{self.pid}/fdinfo/{fd}') as file:
                left += [int(s) + int(ns) / 1e9 for s, ns in re.findall(r'^it_value: \((\d+), (\d+)\)', file.read(), re.M)]
        return [seconds for seconds in left if seconds]

    def rss(self):
        with open(f'/proc/{self.pid}/status') as file:
            return int(re.search(r'VmRSS:\s+(\d+)', file.read())[1]) * 1024

    def switches(self):
        """Voluntary context switches of all threads: how often any of them went to sleep, so how often it woke."""
        total = 0
        for task in os.listdir(f'/proc/{self.pid}/task'):
            with open(f'/proc/{self.pid}/task/{task}/status') as file:
                total += int(re.search(r'^voluntary_ctxt_switches:\s+(\d+)', file.read(), re.M)[1])
        return total


class Trainer(Process):
    """One rank (tests/cluster/trainer.c). call() sends and waits; send() and answer() apart let ranks overlap."""

    def __init__(self, name, folder, netns=None, env=None):
        super().__init__(name, [os.path.join(BUILD, 'tests', 'cluster', 'trainer')], folder, netns, env,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.folder, self.n, self.buffer = folder, 0, b''

    def send(self, *words):
        self.process.stdin.write((' '.join(map(str, words)) + '\n').encode())

    def answer(self, seconds=DEADLINE):
        end = time.monotonic() + seconds
        while b'\n' not in self.buffer:
            left = end - time.monotonic()
            if left <= 0:
                raise AssertionError(f'{self.name} has not answered within {seconds} s: {self.text()}')
            if not select.select([self.process.stdout], [], [], left)[0]:
                continue
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise AssertionError(f'{self.name} has ended with {self.process.wait()}: {self.text()}')
            self.buffer += data
        line, self.buffer = self.buffer.split(b'\n', 1)
        verb, _, rest = line.decode(errors='replace').partition(' ')
        if verb == 'ok':
            return rest
        number, _, text = rest.partition(' ')
        raise BpsError(int(number), text)

    def call(self, *words, seconds=DEADLINE):
        self.send(*words)
        return self.answer(seconds)

    def submit(self, request, tensor, data=None, **keys):
        """data: bytes of the input, or None for no input."""
        words = ['submit', request, tensor]
        if data is not None:
            self.n += 1
            path = os.path.join(self.folder, f'{self.name}.{self.n}.in')
            with open(path, 'wb') as file:
                file.write(data)
            words.append('in=' + path)
        for key, value in keys.items():
            words.append(f'{key}=' + (','.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)))
        self.call(*words)

    def submit_rows(self, request, tensor, rows, values, width, room, **keys):
        """push_pull_rows. rows: bytes of the row numbers, values: of the rows; room: rows of the result."""
        path = os.path.join(self.folder, f'{self.name}.{self.n}.rows')
        with open(path, 'wb') as file:
            file.write(rows)
        self.submit(request, tensor, values, op=PUSH_PULL_ROWS, rows=path, width=width, out=room * width, **keys)

    def result_rows(self, request):
        """Row numbers and values of a result, as bytes."""
        path = os.path.join(self.folder, f'{self.name}.rows')
        self.call('rows', request, path)
        with open(path, 'rb') as file:
            return file.read(), self.result(request)

    def result(self, request):
        path = os.path.join(self.folder, f'{self.name}.out')
        self.call('result', request, path)
        with open(path, 'rb') as file:
            return file.read()

    def wait(self, request, timeout_ms=None):
        timeout_ms = timeout_ms or DEADLINE * 1000
        return self.call('wait', request, timeout_ms, seconds=timeout_ms / 1000 + DEADLINE)

    def ended(self, request, timeout_ms=None):
        """How a request that must fail did: its BpsError."""
        try:
            self.wait(request, timeout_ms)
        except BpsError as error:
            return error
        raise AssertionError(f'{self.name}: request {request} completed, but should have failed')


# A machine that stands still for seconds is no loss. Tests about losses, leases and silence say what they want instead.
PATIENT = ('--peer-timeout=60s', '--hello-timeout=60s', '--lease=60s')


class Cluster:
    """n_nodes daemons for trainers and n_spare that only sum. source: single, static, coordinator (the last spare
    server, or node 0, is it) or etcd (options say where). options: for every daemon. netns: prefix of namespaces made by scripts/netns."""

    count = 0
    n_rdma = 0  # connections by RDMA that were made
    patience = PATIENT

    def __init__(self, n_nodes=1, n_spare=0, source=None, options=(), colocated=True, netns=None, start=True,
                 bandwidths=None, failpoints=None):
        Cluster.count += 1
        self.folder = make_folder('bps-test-')
        self.n_nodes, self.n_spare, self.netns = n_nodes, n_spare, netns
        self.source = source or ('single' if n_nodes + n_spare == 1 else 'static')
        self.options, self.colocated = list(options), colocated
        self.failpoints = dict(failpoints or {})  # of each daemon's next process
        self.binary = None  # what daemons are started from, if not the build's
        self.daemons, self.trainers, self.jobs = [], [], 0
        self.names = [f'n{i}' for i in range(n_nodes)] + [f's{i}' for i in range(n_spare)]
        self.coordinated_by = len(self.names) - 1
        self.file = os.path.join(self.folder, 'cluster.conf')
        self.bandwidths = bandwidths  # of each daemon's link in Mbit/s, with a static list
        try:
            self.addresses = [self.address(i) for i in range(len(self.names))]
            if self.source == 'static':
                self.write_file()
            if start:
                order = range(len(self.names))
                if self.source == 'coordinator':  # the coordinator first is not needed, but quick
                    order = reversed(order)
                made = {i: self.start(i, wait=False) for i in order}
                self.daemons = [made[i] for i in sorted(made)]
                for daemon in self.daemons:
                    daemon.ready()
        except BaseException:
            self.abandon()
            raise

    def address(self, i):
        if self.netns:
            return f'10.88.0.{i + 1}:9690'
        host = f'127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.{i + 1}'
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f'{host}:{probe.getsockname()[1]}'

    def roles(self, i):
        return 'server' if i >= self.n_nodes else 'agent,server' if self.colocated else 'agent'

    def write_file(self):
        with open(self.file, 'w') as file:
            for i, name in enumerate(self.names):
                file.write(f'[node {name}]\naddress = {self.addresses[i]}\nroles = {self.roles(i)}\n')
                if self.bandwidths:
                    file.write(f'bandwidth = {self.bandwidths[i]:g}Mbit\n')

    def start(self, i, wait=True, options=()):
        """Starts daemon i (again)."""
        rdma, env = self.rdma(i)
        if i in self.failpoints:
            env = {**env, 'BPS_FAILPOINTS': self.failpoints.pop(i)}
        arguments = ['--cluster=' + self.source, *self.patience, *rdma, *self.options, *options]
        if self.source != 'static':
            arguments.append('--roles=' + self.roles(i))
        if self.source == 'static':
            arguments.append('--cluster-file=' + self.file)
        elif self.source == 'etcd':
            arguments.append('--address=' + self.addresses[i])
        elif self.source == 'coordinator':
            host, port = self.addresses[self.coordinated_by].rsplit(':', 1)
            coordinator = f'{host}:{int(port) + 1 if int(port) < 65535 else 1025}'
            arguments += ['--address=' + self.addresses[i], '--coordinator=' + self.way(i, coordinator)]
            if i == self.coordinated_by:
                arguments.append('--coordinator-listen=' + coordinator)
        daemon = Daemon(self.names[i], self.folder, *arguments, wait=False,
                        netns=f'{self.netns}{i}' if self.netns else None,
                        env={**({} if self.is_first_of_its_kind(i) else NO_LEAKS_SOUGHT), **env}, binary=self.binary)
        if wait:
            daemon.ready()
        return daemon

    def is_first_of_its_kind(self, i):
        """Of the nodes with ranks, or of the spare servers."""
        return i in (0, self.n_nodes)

    def way(self, i, coordinator):
        """Where daemon i finds the coordinator."""
        return coordinator

    def grow(self, wait=True):
        """One server more, which all that are there hear of. Returns its number."""
        i = len(self.names)
        self.names.append(f's{i - self.n_nodes}')
        self.n_spare += 1
        self.addresses.append(self.address(i))
        self.announce()
        self.daemons.append(self.start(i, wait))
        return i

    def announce(self):
        """A static list has changed: all read it."""
        if self.source == 'static':
            self.write_file()
            for daemon in self.daemons:
                if daemon.alive():
                    daemon.signal(signal.SIGHUP)

    def rdma(self, i):
        """What lets daemon i go by RDMA alone, if it is to: options, and the environment that brings the double."""
        if not RDMA or self.source == 'single':
            return [], {}
        if self.netns:
            raise Skip('over RDMA: the devices are in the first network namespace')
        options = ['--transport=rdma', '--rdma-devices=' + RDMA[i % 2], '--hello-timeout=60s', '--peer-timeout=10s']
        if not RDMA[0].startswith('fake'):
            return options, {}
        double = os.path.join(BUILD, 'tests', 'fakeverbs')
        return options, {'LD_LIBRARY_PATH': double, 'LD_PRELOAD': preload(os.path.join(double, 'librdmacm.so.1')),
                         'FAKE_FABRIC': self.folder}

    def restart(self, i, options=(), wait=True):
        self.daemons[i].notify.close()
        for path in (self.daemons[i].socket, self.daemons[i].admin, os.path.join(self.folder, self.names[i] + '.notify')):
            if os.path.exists(path):
                os.unlink(path)
        self.daemons[i] = self.start(i, wait, options)

    def trainer(self, node=0, name=None, open=True, env=None):
        name = name or f't{len(self.trainers)}'
        trainer = Trainer(name, self.folder, f'{self.netns}{node}' if self.netns else None,
                          {**(NO_LEAKS_SOUGHT if self.trainers else {}), **(env or {})})
        self.trainers.append(trainer)
        trainer.node = node
        if open:
            trainer.call('open', self.daemons[node].socket, DEADLINE * 1000)
        return trainer

    def job(self, layout, join=True, env=None, **keys):
        """A job with layout[k] ranks on node k, all joined. Returns its trainers in rank order."""
        self.jobs += 1
        ranks, size = [], sum(layout)
        for node, local_size in enumerate(layout):
            for local_rank in range(local_size):
                trainer = self.trainer(node, env=env)
                trainer.keys = {'job': f'job{self.jobs}', 'rank': len(ranks), 'world_size': size, 'node': node,
                                'local_rank': local_rank, 'local_size': local_size, 'n_nodes': len(layout),
                                'timeout_ms': DEADLINE * 1000, **keys}
                ranks.append(trainer)
        if join:
            self.join(ranks)
        return ranks

    def join(self, ranks):
        for trainer in ranks:
            trainer.send('join', *(f'{key}={value}' for key, value in trainer.keys.items()))
        for trainer in ranks:
            trainer.answer()

    def close(self):
        """Ends all; fails when a daemon did not end well."""
        for trainer in self.trainers:
            trainer.kill()
        errors = []
        for daemon in self.daemons:
            try:
                if daemon.alive():
                    daemon.stop()
            except AssertionError as error:
                errors.append(str(error))
        self.abandon()
        if errors:
            raise AssertionError('\n'.join(errors))

    def abandon(self):
        Cluster.n_rdma += sum(len(re.findall(r': rdma: \S+ connected to ', daemon.text())) for daemon in self.daemons)
        for process in [*self.trainers, *self.daemons]:
            process.kill()
        if os.environ.get('BPS_KEEP'):
            print('kept', self.folder)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def logs(self):
        return '\n'.join(f'--- {p.name}\n{p.text()}' for p in [*self.daemons, *self.trainers] if p.text())

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind:
            if kind is not Skip:
                print(self.logs())
            self.abandon()
        else:
            self.close()


def netns(n, rate='', prefix=None, congestion=None):
    """A cluster of namespaces for the length of a with-block; skips without root. congestion: TCP's, if not that of the script."""
    import contextlib
    script = os.path.join(os.path.dirname(__file__), '..', '..', 'scripts', 'netns')
    prefix = prefix or f'b{os.getpid() % 100000}x'

    @contextlib.contextmanager
    def manager():
        if os.geteuid() or not shutil.which('ip'):
            raise Skip('needs root and iproute2 for network namespaces')
        env = {**os.environ, 'BPS_NETNS': prefix, **({'BPS_NETNS_CC': congestion} if congestion else {})}
        subprocess.run([script, 'up', str(n)] + ([rate] if rate else []), env=env, check=True)
        try:
            yield lambda *words: subprocess.run([script, *map(str, words)], env=env, check=True)
        finally:
            subprocess.run([script, 'down'], env=env, check=False)
    manager.prefix = prefix
    return prefix, manager()


def run(names):
    """Runs the test_* functions of a module (or those named as arguments) and exits."""
    wanted = sys.argv[1:]
    tests = {k: v for k, v in names.items() if k.startswith('test_') and callable(v)}
    passed = failed = skipped = 0
    exact = [word for word in wanted if word in tests]
    for name, test in tests.items():
        if wanted and not (name in wanted if exact else any(word in name for word in wanted)):
            continue
        if not wanted and TIER in getattr(test, 'left_out', ()):
            continue
        began, Cluster.n_rdma = time.monotonic(), 0
        try:
            test()
            if RDMA and not Cluster.n_rdma:
                assert not wanted, 'asked for by name over RDMA, and no daemon was called by RDMA'
                raise Skip('over RDMA: no daemon calls another')
            passed += 1
            print(f'ok   {name} ({time.monotonic() - began:.1f} s)', flush=True)
        except Skip as reason:
            skipped += 1
            print(f'skip {name}: {reason}', flush=True)
        except Exception:
            failed += 1
            traceback.print_exc(file=sys.stdout)
            print(f'FAIL {name}', flush=True)
    print(f'{passed} passed, {failed} failed, {skipped} skipped', flush=True)
    sys.exit(1 if failed else 77 if not passed and skipped else 0)
