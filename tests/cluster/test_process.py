#!/usr/bin/env python3
"""The daemon as a process: socket activation, readiness, watchdog, reload, and what it says of wrong options."""
import errno, os, re, resource, signal, socket, subprocess, sys, tempfile
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *

ONES = b'\x00\x00\x80\x3f' * 1000


def notified(daemon, what):
    """Reads what the daemon tells systemd until `what` is in it."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if select.select([daemon.notify], [], [], 0.1)[0]:
            text = daemon.notify.recv(4096)
            if what in text:
                return text
    raise AssertionError(f'{what} was not told within {DEADLINE} s')


def reduces(cluster):
    ranks = cluster.job((2,))
    for rank in ranks:
        rank.call('tensor', 0, 'x', FLOAT32, 1000)
        rank.submit(0, 0, ONES, out=1000)
    for rank in ranks:
        rank.wait(0)
        assert rank.result(0) == b'\0\0\0\x40' * 1000


class Activated(Cluster):
    """One daemon whose sockets are open before it starts, as systemd does it. extra: environment."""

    def __init__(self, extra, *options):
        super().__init__(1, start=False)
        path = os.path.join(self.folder, 'activated.sock')
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(100)
        self.listener.set_inheritable(True)
        fd = self.listener.fileno()
        # LISTEN_PID must be the daemon's own number: a shell becomes the daemon.
        binary = os.path.join(BUILD, 'daemon', 'bps-daemon')
        script = f'exec 3<&{fd}; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=control exec {binary} "$@"'
        daemon = Daemon.__new__(Daemon)
        daemon.socket, daemon.admin = path, os.path.join(self.folder, 'a.admin')
        notify = os.path.join(self.folder, 'a.notify')
        daemon.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        daemon.notify.bind(notify)
        Process.__init__(daemon, 'activated', ['bash', '-c', script, 'bash', '--config=', '--admin-socket=' + daemon.admin,
                                               '--socket=/nonexistent/never-bound.sock', *options],
                         self.folder, None, {'NOTIFY_SOCKET': notify, **extra}, pass_fds=[fd], stdin=subprocess.DEVNULL)
        self.daemons = [daemon]


def test_socket_activation():
    with Activated({}) as cluster:
        # A trainer may connect before the daemon is ready: the socket is there.
        reduces(cluster)
        notified(cluster.daemons[0], b'STATUS=node ')
        notified(cluster.daemons[0], b'READY=1')
        cluster.daemons[0].signal(signal.SIGTERM)
        told = notified(cluster.daemons[0], b'STOPPING=1')
        assert b'EXTEND_TIMEOUT_USEC=60000000' in told, told  # drain_timeout, and 30 s
        assert cluster.daemons[0].process.wait(DEADLINE) == 0
        assert os.path.exists(cluster.daemons[0].socket), 'the socket is systemd\'s, but was removed'
        cluster.listener.close()


def test_a_server_tells_trainers_what_it_is():
    """Its socket was opened for it: whoever connects is not left to wait."""
    with tempfile.NamedTemporaryFile('w', suffix='.conf') as file, Cluster(1, start=False) as plan:
        file.write(f'[node s0]\naddress = {plan.addresses[0]}\nroles = server\n')
        file.flush()
        server_door(file.name)


def server_door(file):
    with Activated({}, '--cluster=static', '--cluster-file=' + file, '--node=s0') as cluster:
        notified(cluster.daemons[0], b'READY=1')
        trainer = cluster.trainer(open=False)
        try:
            trainer.call('open', cluster.daemons[0].socket, DEADLINE * 1000)
            assert False, 'it was let in'
        except BpsError as error:
            assert error.errno == errno.EOPNOTSUPP and 'role agent' in error.text, error
        cluster.listener.close()


def test_the_table_of_descriptors_does_not_grow():
    """With threads the kernel would keep who opens one waiting meanwhile."""
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65536)
    with Cluster(1) as cluster, open(f'/proc/{cluster.daemons[0].pid}/status') as status:
        room = int(re.search(r'^FDSize:\s+(\d+)', status.read(), re.M)[1])
        assert room >= limit, (room, limit)


def test_a_daemon_may_have_as_many_descriptors_as_the_administrator_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))  # which daemons inherit
    try:
        with Cluster(1) as cluster:
            allowed = resource.prlimit(cluster.daemons[0].pid, resource.RLIMIT_NOFILE)
            assert allowed == (min(hard, 1 << 20), hard), (allowed, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_watchdog():
    with Activated({'WATCHDOG_USEC': '200000'}) as cluster:
        for _ in range(3):
            notified(cluster.daemons[0], b'WATCHDOG=1')
        cluster.listener.close()


def test_reload_takes_what_it_can_and_names_the_rest():
    with Cluster(1, start=False) as cluster:
        path = os.path.join(cluster.folder, 'options')

        def write(text):
            with open(path, 'w') as file:
                file.write(text)
        write('log_level = info\n')
        cluster.daemons = [cluster.start(0, options=['--config=' + path])]
        daemon = cluster.daemons[0]

        def reload(text, expect):
            write(text)
            daemon.signal(signal.SIGHUP)
            notified(daemon, b'RELOADING=1')
            notified(daemon, b'READY=1')
            wait_for(expect, lambda: expect in daemon.text())
        reload('log_level = debug\nlanes = 3\n', 'lanes changed: takes effect at the next start')
        reload('lanez = 3\n', f'{path}:1: lanez: no such option; did you mean lanes?: keeping what was in force')
        reduces(cluster)


def test_a_changed_list_of_nodes_is_read_again():
    with Cluster(2) as cluster:
        reduces(cluster)
        daemon = cluster.daemons[0]
        with open(cluster.file, 'a') as file:
            file.write('[node late]\naddress = 127.0.0.1:9\nroles = agent\n')
        daemon.signal(signal.SIGHUP)
        wait_for('the new view', lambda: 'has 3 members' in daemon.text())
        with open(cluster.file, 'a') as file:
            file.write('[nod bad]\n')
        daemon.signal(signal.SIGHUP)
        wait_for('the complaint', lambda: 'keeping what was in force' in daemon.text())
        assert 'cluster.conf:' in daemon.text()


def run_daemon(*options):
    return subprocess.run([os.path.join(BUILD, 'daemon', 'bps-daemon'), '--config=', *options], capture_output=True,
                          text=True, timeout=DEADLINE, stdin=subprocess.DEVNULL)


def test_wrong_options_say_what_is_wrong():
    for options, words in [(['--part-size=4MB'], ('part_size', '4MB', '64K')), (['--no-such'], ('no-such',)),
                           (['--set', 'lanes=0'], ('lanes', 'between 1 and 64')), (['stray'], ('stray',)),
                           (['--cluster=coordinator'], ('coordinator',)), (['--config=/nonexistent/x'], ('/nonexistent/x',))]:
        out = run_daemon(*options)
        assert out.returncode == 2, (options, out)
        for word in words:
            assert word in out.stderr, (options, out.stderr)


def test_what_cannot_be_had_is_named():
    with Cluster(1, start=False) as cluster:
        taken = socket.socket()
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        for options, word in [(['--socket=/nonexistent/folder/bps.sock'], '/nonexistent/folder/bps.sock'),
                              (['--cluster=static', '--cluster-file=/nonexistent/list'], '/nonexistent/list'),
                              (['--cluster-key-file=/nonexistent/key'], '/nonexistent/key'),
                              (['--address=127.0.0.1:%d' % taken.getsockname()[1]], str(taken.getsockname()[1]))]:
            out = run_daemon('--socket=' + os.path.join(cluster.folder, 's'), '--admin-socket=', *options)
            assert out.returncode == 1, (options, out)
            assert word in out.stderr, (options, out.stderr)
        taken.close()


def test_two_daemons_cannot_have_one_socket():
    with Cluster(1) as cluster:
        out = run_daemon('--socket=' + cluster.daemons[0].socket, '--admin-socket=')
        assert out.returncode == 1 and cluster.daemons[0].socket in out.stderr, out
        reduces(cluster)


def test_help_names_every_option():
    text = run_daemon('--help').stdout
    sample = run_daemon('--print=sample').stdout
    for name in re.findall(r'^#([a-z_]+) = ', sample, re.M):
        assert f'--{name.replace("_", "-")}=' in text, name


run(globals())
