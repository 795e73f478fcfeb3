#!/usr/bin/env python3
"""Daemon and trainers in containers of their own (runc), which share the socket's folder and nothing else: no PID, IPC, mount or
network namespace, no capability, a read-only root.

The root is this machine's under an overlay, with the build in it; BPS_ROOTFS names one of deploy/container/rootfs instead.
"""
import contextlib, json, os, shutil, subprocess, sys, tempfile
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'lib'))
from cluster import BUILD, Skip, netns, run, wait_for

TOP = os.path.abspath(os.path.join(HERE, '..', '..'))
ROOTFS = os.environ.get('BPS_ROOTFS')
BPS, ALICE = 9690, 4321
LONG = 120

# One rank of two. The sum has to be right, again and again.
JOB = '''
import sys
import numpy as np
import bps
rank, node, n_nodes = map(int, sys.argv[1:])
bps.init(job="containers", rank=rank, size=2, local_rank=rank if n_nodes == 1 else 0, local_size=3 - n_nodes,
         node=node, nodes=n_nodes)
for step in range(20):
    x = np.arange(300007, dtype=np.float32) * (step + 1) + rank
    total = np.asarray(bps.push_pull(x, average=False, name="x"))
    expected = np.arange(300007, dtype=np.float32) * (step + 1)
    assert np.array_equal(total, expected + (expected + 1)), step
bps.shutdown()
print("all sums are right")
'''


class Containers:
    """A with-block: an overlay for their root, and all of them gone at its end."""

    def __enter__(self):
        self.work = tempfile.mkdtemp(prefix='bps-test-containers-')
        self.running = []
        self.stack = contextlib.ExitStack()
        self.stack.callback(shutil.rmtree, self.work)
        try:
            self.prepare()
        except BaseException:
            self.stack.close()
            raise
        return self

    def prepare(self):
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'mode=755', 'tmpfs', self.work], check=True)
        self.stack.callback(subprocess.run, ['umount', '-l', self.work], check=True)
        self.root = self.work + '/root'
        for name in ('files', 'scratch', 'root', 'bundles'):
            os.mkdir(f'{self.work}/{name}')
        subprocess.run(['mount', '-t', 'overlay', 'overlay', '-o', f'lowerdir={ROOTFS or "/"},upperdir={self.work}/files,'
                        f'workdir={self.work}/scratch', self.root], check=True)
        self.stack.callback(subprocess.run, ['umount', '-l', self.root], check=True)
        for name in ('bps', 'job'):
            os.makedirs(f'{self.root}/run/{name}', exist_ok=True)
        with open(self.root + '/run/job/job.py', 'w') as file:
            file.write(JOB)
        self.environment = ['PATH=/usr/bin:/bin']
        if not ROOTFS:
            for path in ('daemon/bps-daemon', 'daemon/admin/bpsctl', 'client/libbps_client.so.0'):
                shutil.copy(f'{BUILD}/{path}', self.root + '/run/job')
            shutil.copytree(f'{TOP}/client/python/bps', self.root + '/run/job/bps')
            self.environment = ['PATH=/run/job:/usr/bin:/bin', 'BPS_LIBRARY=/run/job/libbps_client.so.0']

    def folder(self, name):
        """What containers share, owned by the daemon's user."""
        path = f'{self.work}/{name}'
        os.mkdir(path)
        os.chown(path, BPS, BPS)
        return path

    def start(self, name, args, user, shared, groups=(), namespace=None):
        bundle = f'{self.work}/bundles/{name}'
        os.mkdir(bundle)
        nothing = {kind: [] for kind in ('bounding', 'effective', 'inheritable', 'permitted', 'ambient')}
        network = {'type': 'network', **({'path': '/run/netns/' + namespace} if namespace else {})}
        config = {
            'ociVersion': '1.0.2',
            'process': {'user': {'uid': user, 'gid': user, 'additionalGids': list(groups)}, 'args': args, 'cwd': '/',
                        'env': self.environment + ['OMP_NUM_THREADS=1'], 'capabilities': nothing, 'noNewPrivileges': True},
            'root': {'path': self.root, 'readonly': True},
            'hostname': name,
            'mounts': [{'destination': '/proc', 'type': 'proc', 'source': 'proc'},
                       {'destination': '/dev', 'type': 'tmpfs', 'source': 'tmpfs', 'options': ['nosuid', 'mode=755']},
                       {'destination': '/run/bps', 'type': 'bind', 'source': shared, 'options': ['rbind', 'rw']}],
            'linux': {'namespaces': [{'type': kind} for kind in ('pid', 'ipc', 'uts', 'mount')] + [network]},
        }
        with open(bundle + '/config.json', 'w') as file:
            json.dump(config, file)
        log = open(bundle + '/log', 'w')
        process = subprocess.Popen(['runc', '--root', self.work + '/state', 'run', '--bundle', bundle, self.id(name)],
                                   stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        log.close()
        self.running.append((name, process))
        return process

    def id(self, name):
        return f'bps-{os.getpid()}-{name}'

    def log(self, name):
        with open(f'{self.work}/bundles/{name}/log', errors='replace') as file:
            return file.read()

    def daemon(self, name, shared, *options, namespace=None):
        process = self.start(name, ['bps-daemon', '--config=', '--node=' + name, *options], BPS, shared, namespace=namespace)

        def serves():
            assert process.poll() is None, self.log(name)
            return subprocess.run(['runc', '--root', self.work + '/state', 'exec', self.id(name), 'bpsctl', 'health'],
                                  capture_output=True).returncode == 0
        wait_for(f'{name} is healthy', serves, LONG)

    def trainer(self, rank, node, n_nodes, shared, namespace=None):
        name = f'rank{rank}'
        self.start(name, ['/usr/bin/python3', '/run/job/job.py', str(rank), str(node), str(n_nodes)], ALICE, shared, [BPS],
                   namespace)

    def trainers_end_well(self):
        for name, process in self.running:
            if name.startswith('rank'):
                status = process.wait(LONG)
                assert status == 0 and 'all sums are right' in self.log(name), self.logs()

    def logs(self):
        return '\n'.join(f'--- {name}\n{self.log(name)}' for name, _ in self.running)

    def __exit__(self, kind, *_):
        if kind and kind is not Skip:
            print(self.logs())
        for name, process in self.running:
            subprocess.run(['runc', '--root', self.work + '/state', 'delete', '--force', self.id(name)], capture_output=True)
            process.kill()
            process.wait()
        self.stack.close()


def test_two_trainers_and_a_daemon_of_one_host():
    with Containers() as host:
        shared = host.folder('shared')
        host.daemon('daemon', shared)
        for rank in (0, 1):
            host.trainer(rank, 0, 1, shared)
        host.trainers_end_well()


def test_whoever_is_not_in_the_group_is_refused():
    with Containers() as host:
        shared = host.folder('shared')
        host.daemon('daemon', shared)
        stranger = host.start('stranger', ['/usr/bin/python3', '-c', 'import sys; sys.path.insert(0, "/run/job")\n'
                                           'import bps; bps.init()'], ALICE, shared)
        assert stranger.wait(LONG) == 1 and 'is he in the group bps?' in host.log('stranger'), host.logs()


def test_two_hosts():
    prefix, namespaces = netns(2)
    with namespaces, Containers() as hosts:
        with open(hosts.root + '/run/job/cluster.conf', 'w') as file:
            for i in range(2):
                file.write(f'[node host{i}]\naddress = 10.88.0.{i + 1}:9690\n')
        for i in range(2):
            shared = hosts.folder(f'shared{i}')
            hosts.daemon(f'host{i}', shared, '--cluster=static', '--cluster-file=/run/job/cluster.conf',
                         namespace=f'{prefix}{i}')
            hosts.trainer(i, i, 2, shared)
        hosts.trainers_end_well()


def refuse(reason):
    print(f'skip all: {reason}\n0 passed, 0 failed, 1 skipped')
    sys.exit(77)


if os.geteuid():
    refuse('needs root')
if not shutil.which('runc'):
    refuse('no runc here: run scripts/deps test')
if not os.environ.get('BPS_TEST_OWN_MOUNTS'):  # mounts of ours go with us, whatever happens
    os.environ['BPS_TEST_OWN_MOUNTS'] = '1'
    os.execvp('unshare', ['unshare', '-m', '--propagation', 'private', sys.executable, *sys.argv])
if subprocess.run(['sh', '-c', 'd=$(mktemp -d) && mount -t tmpfs tmpfs $d && umount $d; s=$?; rmdir $d; exit $s'],
                  capture_output=True).returncode:
    refuse('nothing can be mounted here')
run(globals())
