#!/usr/bin/env python3
"""The container image of scripts/image, run by runc: daemon and trainers in containers of their own, which share the socket's folder
and nothing else: no PID, IPC, mount or network namespace, no capability, a read-only root; and no container has a network.

Makes the image, or takes $BPS_IMAGE.
"""
import json, os, shutil, subprocess, sys, tarfile, tempfile
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'lib'))
from cluster import BUILD, Skip, netns, run, wait_for

TOP = os.path.abspath(os.path.join(HERE, '..', '..'))
BPS, ADMIN, ALICE, NOBODY = 9690, 9691, 4321, 4322
# Runs a command as a user who has no more than his own number.
ORDINARY = ['setpriv', f'--reuid={NOBODY}', f'--regid={NOBODY}', '--clear-groups', '--bounding-set=-all', '--no-new-privs']
LONG = 1200

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

# What a process of a container may do.
LIMITS = '''
import os
status = dict(line.rstrip().split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"] == "1", status
assert os.getuid() == 4321, os.getuid()
for path in ("/new", "/usr/new", "/etc/new"):
    try:
        open(path, "w")
        raise SystemExit(path + " can be written")
    except OSError as error:
        assert error.errno in (13, 30), error
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
assert interfaces == ["lo"], interfaces
assert len([name for name in os.listdir("/proc") if name.isdigit()]) == 1
print("it may do nothing more")
'''


class Image:
    """Unpacked: its root, and what it says of the process that it is for."""

    def __init__(self, archive, folder):
        with tarfile.open(archive) as tar:
            def document(name):
                return json.load(tar.extractfile(name))

            def blob(descriptor):
                return 'blobs/' + descriptor['digest'].replace(':', '/')
            manifest = document(blob(document('index.json')['manifests'][0]))
            self.config = document(blob(manifest['config']))['config']
            self.root = folder + '/root'
            os.mkdir(self.root)
            layer = subprocess.Popen(['tar', '-x', '-p', '-C', self.root], stdin=subprocess.PIPE)
            shutil.copyfileobj(tar.extractfile(blob(manifest['layers'][0])), layer.stdin)
            layer.stdin.close()
            assert layer.wait() == 0


class Containers:
    """A with-block: containers of the image, and all of them gone at its end. With rootless, those of an ordinary user."""

    def __init__(self, rootless=False):
        self.rootless = rootless

    def __enter__(self):
        self.work = tempfile.mkdtemp(prefix='bps-test-containers-')
        self.running = []
        os.mkdir(self.work + '/bundles')
        if self.rootless:
            for path in (self.work, self.work + '/bundles'):
                os.chown(path, NOBODY, NOBODY)
        return self

    def folder(self, name):
        """What containers share, owned by the daemon's user."""
        path = f'{self.work}/{name}'
        os.mkdir(path)
        owner = NOBODY if self.rootless else BPS
        os.chown(path, owner, owner)
        return path

    def runc(self, *arguments):
        own = [*ORDINARY, 'env', 'XDG_RUNTIME_DIR=' + self.work] if self.rootless else []
        return [*own, 'runc', '--root', self.work + '/state', *arguments]

    def start(self, name, args, user, shared, groups=(), namespace=None):
        bundle = f'{self.work}/bundles/{name}'
        os.mkdir(bundle)
        nothing = {kind: [] for kind in ('bounding', 'effective', 'inheritable', 'permitted', 'ambient')}
        namespaces = [{'type': kind} for kind in ('pid', 'ipc', 'uts', 'mount')]
        namespaces.append({'type': 'network', **({'path': '/run/netns/' + namespace} if namespace else {})})
        linux = {'namespaces': namespaces}
        if self.rootless:
            namespaces.append({'type': 'user'})
            linux['uidMappings'] = linux['gidMappings'] = [{'containerID': 0, 'hostID': NOBODY, 'size': 1}]
            user, groups = 0, ()
        config = {
            'ociVersion': '1.0.2',
            'process': {'user': {'uid': user, 'gid': user, 'additionalGids': list(groups)}, 'args': args, 'cwd': '/',
                        'env': image.config['Env'] + ['OMP_NUM_THREADS=1'], 'capabilities': nothing, 'noNewPrivileges': True},
            'root': {'path': image.root, 'readonly': True},
            'hostname': name,
            'mounts': [{'destination': '/proc', 'type': 'proc', 'source': 'proc'},
                       {'destination': '/dev', 'type': 'tmpfs', 'source': 'tmpfs', 'options': ['nosuid', 'mode=755']},
                       {'destination': '/run/bps', 'type': 'bind', 'source': shared, 'options': ['rbind', 'rw']}],
            'linux': linux,
        }
        with open(bundle + '/config.json', 'w') as file:
            json.dump(config, file)
        with open(bundle + '/log', 'w') as log:
            process = subprocess.Popen(self.runc('run', '--bundle', bundle, self.id(name)), stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=subprocess.STDOUT)
        self.running.append((name, process))
        return process

    def id(self, name):
        return f'bps-{os.getpid()}-{name}'

    def log(self, name):
        with open(f'{self.work}/bundles/{name}/log', errors='replace') as file:
            return file.read()

    @staticmethod
    def groups_of(user):
        """What a runtime adds for a user whose group the image does not say: those that have him in the image."""
        with open(image.root + '/etc/group') as file:
            lines = [line.strip().split(':') for line in file]
        return [int(number) for _, _, number, members in lines if user in members.split(',')]

    def daemon(self, name, shared, *options, namespace=None):
        """What the image is for: its program, as its user."""
        assert image.config['User'] == str(BPS) and list(image.config['Volumes']) == ['/run/bps'], image.config
        process = self.start(name, [*image.config['Entrypoint'], '--node=' + name, *options], BPS, shared, self.groups_of('bps'),
                             namespace=namespace)

        def serves():
            assert process.poll() is None, self.log(name)
            return subprocess.run(self.runc('exec', self.id(name), 'bpsctl', 'health'), capture_output=True).returncode == 0
        wait_for(f'{name} is healthy', serves, LONG)
        if not self.rootless:
            admin = os.stat(shared + '/admin.sock')
            assert (admin.st_gid, admin.st_mode & 0o777) == (ADMIN, 0o660), (admin, self.log(name))

    def python(self, name, script, shared, groups=(BPS,), namespace=None):
        return self.start(name, ['/usr/bin/python3', '-c', *script], ALICE, shared, groups, namespace)

    def trainer(self, rank, node, n_nodes, shared, namespace=None):
        self.python(f'rank{rank}', [JOB, str(rank), str(node), str(n_nodes)], shared, namespace=namespace)

    def ends_well(self, name, text):
        process = dict(self.running)[name]
        assert process.wait(LONG) == 0 and text in self.log(name), self.logs()

    def trainers_end_well(self):
        for rank in (0, 1):
            self.ends_well(f'rank{rank}', 'all sums are right')

    def logs(self):
        return '\n'.join(f'--- {name}\n{self.log(name)}' for name, _ in self.running)

    def __exit__(self, kind, *_):
        if kind and kind is not Skip:
            print(self.logs())
        for name, process in self.running:
            subprocess.run(self.runc('delete', '--force', self.id(name)), capture_output=True)
            process.kill()
            process.wait()
        shutil.rmtree(self.work)


def test_two_trainers_and_a_daemon_of_one_host():
    with Containers() as host:
        shared = host.folder('shared')
        host.daemon('daemon', shared)
        for rank in (0, 1):
            host.trainer(rank, 0, 1, shared)
        host.trainers_end_well()


def test_all_of_it_without_root():
    """An ordinary user's: in each container, whose one user he is, he has the number 0 and no capability."""
    out = subprocess.run([*ORDINARY, 'unshare', '--user', '--map-root-user', '--mount', 'true'], capture_output=True, text=True)
    if out.returncode:
        raise Skip('ordinary users may have no namespaces here: ' + out.stderr.strip())
    with Containers(rootless=True) as host:
        shared = host.folder('shared')
        host.daemon('daemon', shared)
        for rank in (0, 1):
            host.trainer(rank, 0, 1, shared)
        host.trainers_end_well()


def test_a_container_may_do_nothing_more():
    with Containers() as host:
        host.python('limits', [LIMITS], host.folder('shared'))
        host.ends_well('limits', 'it may do nothing more')


def test_whoever_is_not_in_the_group_is_refused():
    with Containers() as host:
        shared = host.folder('shared')
        host.daemon('daemon', shared)
        stranger = host.python('stranger', ['import bps; bps.init()'], shared, groups=())
        assert stranger.wait(LONG) == 1 and 'is he in the group bps?' in host.log('stranger'), host.logs()


def test_two_hosts():
    prefix, namespaces = netns(2)
    with namespaces, Containers() as hosts:
        for i in range(2):
            shared = hosts.folder(f'shared{i}')
            with open(shared + '/cluster.conf', 'w') as file:
                for k in range(2):
                    file.write(f'[node host{k}]\naddress = 10.88.0.{k + 1}:9690\n')
            hosts.daemon(f'host{i}', shared, '--cluster=static', '--cluster-file=/run/bps/cluster.conf', namespace=f'{prefix}{i}')
            hosts.trainer(i, i, 2, shared)
        hosts.trainers_end_well()


def refuse(reason):
    print(f'skip all: {reason}\n0 passed, 0 failed, 1 skipped')
    sys.exit(77)


if os.geteuid():
    refuse('needs root')
for program in ('runc', 'mmdebstrap'):
    if not shutil.which(program):
        refuse(f'no {program} here: run scripts/deps full')
if subprocess.run(['unshare', '--mount', '--propagation', 'private', 'mount', '-t', 'tmpfs', 'tmpfs', '/mnt'],
                  capture_output=True).returncode:
    refuse('nothing can be mounted here')
with tempfile.TemporaryDirectory(prefix='bps-test-image-') as folder:
    os.chmod(folder, 0o755)
    archive = os.environ.get('BPS_IMAGE')
    if not archive:
        archive = folder + '/bps.oci'
        made = subprocess.run([TOP + '/scripts/image', archive, os.path.abspath(BUILD) + '/packages'], capture_output=True, text=True)
        if made.returncode == 75:
            refuse("Debian's packages cannot be had: " + made.stderr.strip().splitlines()[-1])
        assert made.returncode == 0, made.stderr
    image = Image(archive, folder)
    run(globals())
