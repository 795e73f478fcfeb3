"""etcd for tests: Debian's etcd-server with a data directory of its own, on an address of the loopback that is this process's.
Spoken to over its JSON gateway."""
import base64, json, os, shutil, signal, subprocess, urllib.request
from cluster import DEADLINE, Skip, make_folder, wait_for


class Etcd:
    """n members. A with-block."""

    count = 0

    def __init__(self, n=1, election_ms=1000, hosts=None, netns=None, options=()):
        if not shutil.which('etcd'):
            raise Skip('etcd-server is not installed')
        Etcd.count += 1
        self.folder = make_folder('bps-etcd-')
        self.hosts = hosts or [f'127.{os.getpid() >> 8 & 127}.{os.getpid() & 255}.{200 + Etcd.count % 10 * 5 + i}'
                               for i in range(n)]
        self.netns, self.options, self.election_ms = netns, list(options), election_ms
        self.processes = [None] * n
        self.names = [f'etcd{i}' for i in range(n)]
        try:
            for i in range(n):
                self.start(i, wait=False)
            for i in range(n):
                self.ready(i)
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self):
        return ','.join(f'{host}:2379' for host in self.hosts)

    def start(self, i, wait=True, fresh=False):
        """Starts member i (again). fresh: without what it had, as a cluster of one that has lost everything."""
        if fresh:
            shutil.rmtree(os.path.join(self.folder, self.names[i]), ignore_errors=True)
        host, scheme = self.hosts[i], 'https' if any('cert-file' in o for o in self.options) else 'http'
        argv = ['etcd', '--name', self.names[i], '--data-dir', os.path.join(self.folder, self.names[i]),
                '--listen-client-urls', f'{scheme}://{host}:2379', '--advertise-client-urls', f'{scheme}://{host}:2379',
                '--listen-peer-urls', f'http://{host}:2380', '--initial-advertise-peer-urls', f'http://{host}:2380',
                '--initial-cluster', ','.join(f'{n}=http://{h}:2380' for n, h in zip(self.names, self.hosts)),
                '--election-timeout', str(self.election_ms), '--heartbeat-interval', str(self.election_ms // 10),
                '--log-level', 'warn', '--logger', 'zap', *self.options]
        if self.netns:
            argv = ['ip', 'netns', 'exec', self.netns(i)] + argv
        with open(os.path.join(self.folder, self.names[i] + '.log'), 'ab') as log:
            self.processes[i] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if wait:
            self.ready(i)

    def ready(self, i):
        if any('cert-file' in o for o in self.options):
            return  # bps will find out
        wait_for(f'etcd {i}', lambda: self.alive(i) and self.healthy(i), 2 * DEADLINE)

    def alive(self, i):
        if self.processes[i].poll() is not None:
            raise AssertionError(f'etcd {i} has ended:\n{self.text(i)}')
        return True

    def healthy(self, i):
        try:
            self.call('kv/range', {'key': 'aGVhbHRo'}, [i], 1)
            return True
        except (OSError, AssertionError):
            return False

    def text(self, i):
        with open(os.path.join(self.folder, self.names[i] + '.log'), errors='replace') as file:
            return file.read()

    def kill(self, i):
        self.processes[i].kill()
        self.processes[i].wait()

    def signal(self, i, number):
        self.processes[i].send_signal(number)

    def call(self, path, body, members=None, seconds=5):
        """One of the members that live answers."""
        error = None
        for i in members or range(len(self.hosts)):
            if self.processes[i].poll() is not None:
                continue
            argv = ['python3', '-c', CALL, f'http://{self.hosts[i]}:2379/v3/{path}', json.dumps(body), str(seconds)]
            if self.netns:
                out = subprocess.run(['ip', 'netns', 'exec', self.netns(i)] + argv, capture_output=True, text=True)
                if not out.returncode:
                    return json.loads(out.stdout)
                error = out.stderr
                continue
            try:
                return post(argv[3], body, seconds)
            except OSError as e:
                error = e
        raise AssertionError(f'etcd {path}: {error}')

    def put(self, key, value):
        return self.call('kv/put', {'key': b64(key), 'value': b64(value)})

    def remove(self, key, end=None):
        return self.call('kv/deleterange', {'key': b64(key), **({'range_end': b64(end)} if end else {})})

    def get(self, prefix, members=None):
        """{key: (value, mod revision)}"""
        answer = self.call('kv/range', {'key': b64(prefix), 'range_end': b64(prefix[:-1] + chr(ord(prefix[-1]) + 1))},
                           members)
        return {base64.b64decode(kv['key']).decode(): (base64.b64decode(kv.get('value', '')), int(kv['mod_revision']))
                for kv in answer.get('kvs', [])}

    def compact(self):
        revision = self.put('compact', 'x')['header']['revision']
        self.call('kv/compaction', {'revision': revision, 'physical': True})

    def close(self):
        for process in self.processes:
            if process and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind and kind is not Skip:
            for i in range(len(self.processes)):
                print(f'--- {self.names[i]}\n{self.text(i)[-2000:]}')
        self.close()


CALL = '''import json, sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {'Content-Type': 'application/json'})
print(urllib.request.urlopen(request, timeout=float(sys.argv[3])).read().decode())'''


def post(url, body, seconds):
    request = urllib.request.Request(url, json.dumps(body).encode(), {'Content-Type': 'application/json'})
    return json.loads(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=seconds).read())


def b64(text):
    return base64.b64encode(text if isinstance(text, bytes) else text.encode()).decode()
