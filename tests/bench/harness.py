"""What the comparing benchmarks share: a shaped cluster, ranks on it, limits of its links, and figures in pairs.

Everything is measured in turns inside one run: limit, bps, rival, limit, bps, rival, ... A figure is the median over the
turns, shown with the lowest and the highest. Nothing here asserts a time.
"""
import argparse, contextlib, json, os, platform, shutil, statistics, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import BUILD, Cluster, netns

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.join(HERE, '..', '..')
BENCH = os.path.join(BUILD, 'daemon', 'bench', 'bps-bench')
LIMITS = os.path.join(BUILD, 'tests', 'bench', 'limits')
MIB = 1 << 20


def inside(prefix, host, argv):
    argv = list(map(str, argv))
    return ['ip', 'netns', 'exec', f'{prefix}{host}', *argv] if prefix else argv


class Report:
    """Figures as they come: printed at once, and written as JSON at the end."""

    def __init__(self, benchmark, options):
        self.data = {'benchmark': benchmark, 'cores': os.cpu_count(), 'machine': platform.machine(), 'rows': []}
        self.path, self.repeats = options.json, options.repeats

    def heading(self, text):
        print(f'\n{text}', flush=True)

    def row(self, name, values, unit, digits=2, **more):
        """values: one of each turn. Returns their median."""
        values = list(values)
        median = statistics.median(values)
        self.data['rows'].append({'name': name, 'unit': unit, 'median': median, 'values': values, **more})
        low, high = f'{min(values):.{digits}f}', f'{max(values):.{digits}f}'
        print(f'  {name:66}{median:10.{digits}f} [{low} ... {high}] {unit}', flush=True)
        return median

    def close(self):
        if self.path:
            with open(self.path, 'w') as file:
                json.dump(self.data, file, indent=1)


def parse_arguments(benchmark, text, **defaults):
    parser = argparse.ArgumentParser(description=text.partition('\n')[0], prog=f'scripts/bench {benchmark}')
    parser.add_argument('--json', help='write the figures to this file too')
    for name, value in {'repeats': 5, **defaults}.items():
        kind = (lambda s: s) if isinstance(value, str) else type(value)
        parser.add_argument('--' + name.replace('_', '-'), type=kind, default=value, help=f'{value} if not given')
    options = parser.parse_args()
    return options, Report(benchmark, options)


def need_root():
    if os.geteuid() or not shutil.which('ip') or not shutil.which('tc'):
        raise SystemExit('bench: a shaped cluster needs root and iproute2, to make network namespaces')


@contextlib.contextmanager
def shaped(n, rate, **more):
    """n hosts whose links have this rate (as tc writes it) each way. Yields the prefix of their namespaces."""
    need_root()
    prefix, network = netns(n, rate, **more)
    with network:  # whatever happens, they go
        yield prefix


def link_bytes_s(prefix, address='10.88.0.2', n_bytes=32 * MIB):
    """Payload that one TCP stream carries from host 0 to host 1, which has this address, bytes a second."""
    listener = subprocess.Popen(inside(prefix, 1, [LIMITS, 'listen', address]), stdout=subprocess.PIPE, text=True)
    port = listener.stdout.readline().strip()
    out = subprocess.run(inside(prefix, 0, [LIMITS, 'send', address, port, n_bytes]), capture_output=True, check=True).stdout
    listener.wait()
    return n_bytes / int(out) * 1e9


jobs = 0


def run_ranks(cluster, layout, argv, **environment):
    """bps-bench argv as a job with layout[k] ranks on node k. Returns rank 0's figures."""
    global jobs
    jobs += 1
    ranks, size = [], sum(layout)
    for node, local_size in enumerate(layout):
        for local_rank in range(local_size):
            env = {k: v for k, v in os.environ.items() if not k.startswith('BPS_')}
            env.update({'BPS_SOCKET': cluster.daemons[node].socket, 'BPS_JOB': f'bench{jobs}'})
            for key, value in {'RANK': len(ranks), 'SIZE': size, 'LOCAL_RANK': local_rank, 'LOCAL_SIZE': local_size,
                               'NODE': node, 'NODES': len(layout), **environment}.items():
                env['BPS_' + key] = str(value)
            more = [] if ranks else ['--json', '/dev/stderr']
            ranks.append(subprocess.Popen(inside(cluster.netns, node, [BENCH, *argv, *more]), env=env, text=True,
                                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    said = [rank.communicate()[1] for rank in ranks]
    for rank, text in zip(ranks, said):
        if rank.returncode:
            raise SystemExit(f'bench: a rank ended with {rank.returncode}: {text}')
    return json.loads(said[0])


def op_ms(cluster, layout, n_bytes, *more, repeats=1, warmup=1, **environment):
    """Milliseconds of one operation (push_pull unless more says otherwise), by the slowest rank."""
    argv = ['op', '--sizes', n_bytes, '--repeats', repeats, '--warmup', warmup, *more]
    return run_ranks(cluster, layout, argv, **environment)['rows'][0]['p50_us'] / 1e3


def optimum_s(n, k, n_bytes, bytes_s):
    """OSDI'20 (Jiang et al.), section 4.1: n nodes with k spare servers, all links alike."""
    if k > n:
        return n_bytes / bytes_s
    d = n * n + k * n - 2 * k
    return 2 * n * (n - 1) * n_bytes / (d * bytes_s)


class Rival:
    """Ranks of another system, which stay: each reads "BYTES REPEATS" and answers with nanoseconds of each repeat."""

    def __init__(self, prefix, commands, environments):
        self.ranks = [subprocess.Popen(inside(prefix, host, argv), env={**os.environ, **env}, text=True, bufsize=1,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                      for host, (argv, env) in enumerate(zip(commands, environments))]
        for rank in self.ranks:
            if rank.stdout.readline().strip() != 'ready':
                self.close()
                raise SystemExit(f'bench: a rival did not start: {rank.stderr.read()}')

    def ms(self, n_bytes, repeats=1):
        for rank in self.ranks:
            rank.stdin.write(f'{n_bytes} {repeats}\n')
        times = [list(map(int, rank.stdout.readline().split())) for rank in self.ranks]
        return statistics.median(max(column) for column in zip(*times)) / 1e6

    def close(self):
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.stdin.close()
        for rank in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(20)
            rank.kill()
            rank.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def torch_python():
    """A Python that has torch: $BPS_PYTHON, the one of .venv, or ours; None without."""
    for python in (os.environ.get('BPS_PYTHON'), os.path.join(TOP, '.venv', 'bin', 'python'), sys.executable):
        if python and os.path.exists(python) and not subprocess.run([python, '-c', 'import torch'], capture_output=True).returncode:
            return python
    return None


def gloo(prefix, n, hosts=None):
    """Gloo by torch.distributed on hosts 0 to n - 1; without namespaces n ranks on loopback."""
    python = torch_python()
    if python is None:
        return None
    address = '10.88.0.1' if prefix else '127.0.0.1'
    device = 'eth0' if prefix else 'lo'
    argv = [python, os.path.join(HERE, 'rival_gloo.py')]
    return Rival(prefix, [argv] * n, [{'RANK': str(i), 'WORLD_SIZE': str(n), 'MASTER_ADDR': address, 'MASTER_PORT': '29411',
                                       'GLOO_SOCKET_IFNAME': device, 'OMP_NUM_THREADS': '1'} for i in range(n)])
