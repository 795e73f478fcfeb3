"""What the comparing benchmarks share: a shaped cluster, ranks on it, limits of its links, and figures in pairs.

Everything is measured in turns inside one run: limit, bps, rival, rival, bps, limit, ... A figure is the median over the
turns, shown with the lowest and the highest. Nothing here asserts a time.
"""
import argparse, contextlib, heapq, json, os, platform, re, resource, shutil, statistics, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import BUILD, FLOAT32, Cluster, netns, wait_for

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.join(HERE, '..', '..')
BENCH = os.path.join(BUILD, 'daemon', 'bench', 'bps-bench')
LIMITS = os.path.join(BUILD, 'tests', 'bench', 'limits')
MIB = 1 << 20


def inside(prefix, host, argv):
    argv = list(map(str, argv))
    return ['ip', 'netns', 'exec', f'{prefix}{host}', *argv] if prefix else argv


def machine():
    """The processor, its cores, the memory and the kernel, in a line."""
    with open('/proc/cpuinfo') as file:
        model = next((line.partition(':')[2].strip() for line in file if line.startswith('model name')), platform.machine())
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30
    return f'{model}, {os.cpu_count()} cores, {memory} GiB, Linux {platform.release()}'


def commit():
    """The commit that is measured, and whether files other than results differ from it."""
    def git(*words):
        return subprocess.run(['git', '-C', TOP, *words], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.exists(os.path.join(TOP, '.git')):
        return 'not a clone'
    changes = git('status', '--porcelain', '-uno', '--', ':!tests/bench/results')
    return git('rev-parse', '--short=12', 'HEAD') + (' with changes' if changes else '')


class Report:
    """Figures as they come: printed at once, and written as JSON at the end, with the machine, the commit and the command."""

    def __init__(self, benchmark, options):
        words = re.sub(r'--(json|png)[ =]\S+ ?', '', ' '.join(sys.argv[1:]))
        self.data = {'benchmark': benchmark, 'command': f'scripts/bench {benchmark} {words}'.strip(), 'commit': commit(),
                     'machine': machine(), 'load_at_start': os.getloadavg()[0], 'rows': []}
        self.path, self.png, self.repeats, self.where, self.settings = options.json, options.png, options.repeats, '', {}

    def heading(self, text, **settings):
        """What the next rows measure, and the settings of the rival in them."""
        self.where, self.settings = text, {'settings': settings} if settings else {}
        print(f'\n{text}', flush=True)
        if settings:
            print('  settings: ' + ', '.join(f'{key} {value}' for key, value in settings.items()), flush=True)

    def row(self, name, values, unit, digits=2, **more):
        """values: one of each turn. Returns their median."""
        values = list(values)
        median = statistics.median(values)
        self.data['rows'].append({'where': self.where, 'name': name, 'unit': unit, 'median': median, 'values': values,
                                  **self.settings, **more})
        low, high = f'{min(values):.{digits}f}', f'{max(values):.{digits}f}'
        print(f'  {name:66}{median:10.{digits}f} [{low} ... {high}] {unit}', flush=True)
        return median

    def against(self, name, values, target, at_most=False, bound=None, unit='times', digits=2, **more):
        """
        A figure whose target was declared before anything was measured. bound: the best that the links allow, where a formula says
        it. Tells whether the median reaches the target; asserts nothing.
        """
        median = self.row(name, values, unit, digits, target=target, at_most=at_most, bound=bound, **more)
        reached = median <= target if at_most else median >= target
        self.data['rows'][-1]['reached'] = reached
        best = '' if bound is None else f'; at best {bound:.{digits}f}'
        print(f'  {"":66}target {"<=" if at_most else ">="} {target:g}: {"reached" if reached else "missed"}{best}', flush=True)
        return median

    def close(self):
        if self.path:
            with open(self.path, 'w') as file:
                json.dump(self.data, file, indent=1)
                file.write('\n')
        if self.png:
            self.draw()

    def draw(self):
        """The figures that have a target, as bars: how far each median is from it."""
        try:
            import matplotlib
        except ImportError:
            raise SystemExit('bench: --png needs matplotlib: apt-get install python3-matplotlib') from None
        matplotlib.use('Agg')
        import matplotlib.pyplot as plt
        rows = [row for row in self.data['rows'] if 'target' in row][::-1]
        if not rows:
            raise SystemExit('bench: --png: this benchmark has no figures with a target')
        shares = [row['target'] / row['median'] if row['at_most'] else row['median'] / row['target'] for row in rows]
        figure, axes = plt.subplots(figsize=(10, 1 + 0.4 * len(rows)))
        axes.barh([row['name'] for row in rows], shares, color=['tab:green' if row['reached'] else 'tab:red' for row in rows])
        axes.axvline(1, color='black', linewidth=1)
        axes.set_xlabel('share of the target (1: reached)')
        axes.set_title(f"scripts/bench {self.data['benchmark']}")
        figure.tight_layout()
        figure.savefig(self.png)


def parse_arguments(benchmark, text, **defaults):
    parser = argparse.ArgumentParser(description=text.partition('\n')[0], prog=f'scripts/bench {benchmark}')
    parser.add_argument('--json', help='write the figures to this file too')
    parser.add_argument('--png', help='draw the figures that have a target into this file')
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
    """n hosts whose links have this rate (as tc writes it) each way, and one congestion control. Yields their namespaces' prefix."""
    need_root()
    prefix, network = netns(n, rate, **more)
    with network:  # whatever happens, they go
        yield prefix


def stream(prefix, address='10.88.0.2', n_bytes=32 * MIB, host=1, congestion=None):
    """
    One TCP stream from host 0 to another, which has this address: bytes a second after its first 4 MiB, and the CPU seconds of both
    ends for each byte. congestion: its congestion control, if not the system's.
    """
    listener = subprocess.Popen(inside(prefix, host, [LIMITS, 'listen', address]), stdout=subprocess.PIPE, text=True)
    port = listener.stdout.readline().strip()
    sent = subprocess.run(inside(prefix, 0, [LIMITS, 'send', address, port, n_bytes] + ([congestion] if congestion else [])),
                          capture_output=True, check=True).stdout
    warm_bytes, warm_ns, cpu = map(int, listener.communicate()[0].split())
    return warm_bytes / (warm_ns / 1e9), (cpu + int(sent)) / 1e9 / n_bytes


def link_bytes_s(prefix, address='10.88.0.2', n_bytes=16 * MIB, host=1, streams=3):
    """Payload that a link from host 0 to another carries, in bytes a second: the median of several streams, one after the other."""
    return statistics.median(stream(prefix, address, n_bytes, host)[0] for _ in range(streams))


def message_ns(n_bytes, address='127.0.0.1'):
    """A TCP message of n_bytes one way over loopback to a process that sleeps."""
    echo = subprocess.Popen([LIMITS, 'echo', address, str(n_bytes)], stdout=subprocess.PIPE, text=True)
    out = subprocess.run([LIMITS, 'bounce', address, echo.stdout.readline().strip(), str(n_bytes)], capture_output=True, check=True)
    echo.wait()
    return int(out.stdout)


def limit_ns(*what):
    """
    futex: waking a thread that sleeps on another core. spin: there and back between two that spin. meet, sleep or spin, halves, bytes, and relay, bytes:
    what two ranks and their daemons hand over, by processes that do nothing else (limits.c).
    """
    return int(subprocess.run([LIMITS, *map(str, what)], capture_output=True, check=True).stdout)


def in_turns(repeats, *turns):
    """Calls each, again and again, every other time in the opposite order."""
    for i in range(repeats):
        for turn in turns if i % 2 else turns[::-1]:
            turn()


jobs = 0


def run_ranks(cluster, layout, argv, program=(BENCH,), **environment):
    """bps-bench argv, or another program's, as a job with layout[k] ranks on node k. Returns rank 0's figures, its --json."""
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
            ranks.append(subprocess.Popen(inside(cluster.netns, node, [*program, *argv, *more]), env=env, text=True,
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


def optimum_of_links_s(nodes, spares, n_bytes):
    """
    The same for unequal links: payload rates in bytes/s of the nodes' links and of the spare servers' (bps-internals(7), PLACEMENT).

    A node that sums x of the M bytes receives M - x of results, and x from each of n - 1 others: M + (n - 2) x in all. It sends as
    much. A spare server that sums y receives n y. So in time t a link of B lets a node sum (t B - M) / (n - 2), or with n = 2 any
    number, and a spare server t B / n. t is M / B of the slowest node at least, and the least in which all of M is summed.
    """
    n, slowest = len(nodes), n_bytes / min(nodes)
    if n <= 2:
        return slowest if n == 2 else 0

    def summed(t):
        return sum((t * b - n_bytes) / (n - 2) for b in nodes) + sum(t * b / n for b in spares)

    slope = sum(nodes) / (n - 2) + sum(spares) / n
    return max(slowest, (n_bytes - summed(0)) / slope)


def replay_ms(cluster, layout, model, *more, repeats=3, warmup=1, **environment):
    """Milliseconds of a step of a model, and of computing alone."""
    figures = run_ranks(cluster, layout, ['replay', '--model', model, '--repeats', repeats, '--warmup', warmup, *more], **environment)
    return figures['step_p50_ms'], figures['compute_ms']


# What the daemon lets be on a part's way at links below some Gbit/s, in ms of a link (bps-internals(7), ORDER OF WORK): unsent, 2.5 of
# the daemon's and 2 in the kernel; 2 to the server; 2 back.
WAY_MS = 8.5
LEVELS = 8


def levels_of(layers):
    """The level of each layer: neighbours, which are a LEVELS-th of all bytes at most."""
    levels, here = [], 0
    for i, (n_bytes, _) in enumerate(layers):
        here += n_bytes
        if not i or here > sum(b for b, _ in layers) / LEVELS:
            level, here = i, n_bytes
        levels.append(level)
    return levels


def ideal_step_ms(layers, bytes_s, forward_ms, backward_ms, update_ms=0, latency_ms=0, by_priority=True, part_bytes=32 << 10,
                  levels=None):
    """
    A step of layers (bytes, share of the work), in forward order, on links that lose nothing: nodes work in step, parts leave
    most urgent first, or first come, first served, come back in that order, and layers wait for theirs. With levels, what is of
    one leaves first come, first served until the backward pass is over.
    """
    levels = levels or (range(len(layers)) if by_priority else [0] * len(layers))
    births, done = [], 0
    for layer in reversed(range(len(layers))):
        done += layers[layer][1]
        births.append((backward_ms * done, layer))
    births.reverse()  # the first at the end
    waiting, now, there = [], 0, [0.0] * len(layers)
    while births or waiting:
        if not waiting:
            now = max(now, births[-1][0])
        while births and births[-1][0] <= now:
            birth, layer = births.pop()
            heapq.heappush(waiting, (levels[layer], birth, -layer, layer, layers[layer][0]))
            if not births and by_priority:
                waiting = sorted((level, 0, layer, layer, left) for level, _, _, layer, left in waiting)
        *order, layer, left = waiting[0]
        now += 1e3 * min(left, part_bytes) / bytes_s
        there[layer] = now + 1e3 * min(layers[layer][0], part_bytes) / bytes_s + latency_ms  # a result's part has to come back whole
        if left <= part_bytes:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (*order, layer, left - part_bytes))
    clock = backward_ms + update_ms
    for arrival, (_, work) in zip(there, layers):
        clock = max(clock, arrival) + forward_ms * work
    return clock


def cpu_s(daemons):
    """CPU seconds that processes have used so far."""
    ticks = 0
    for daemon in daemons:
        with open(f'/proc/{daemon.pid}/stat') as file:
            ticks += sum(map(int, file.read().rpartition(')')[2].split()[11:13]))
    return ticks / os.sysconf('SC_CLK_TCK')


def spent_s(cluster):
    """CPU seconds so far: of the daemons, and of ranks that have ended."""
    ranks = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu_s(cluster.daemons), ranks.ru_utime + ranks.ru_stime


def busy_s():
    """
    Seconds in which processors of this machine had something to do, since some time: for whomever, links that the kernel emulates
    included. Idleness is measured, the rest only sampled.
    """
    with open('/proc/stat') as file:
        idle, waiting = map(int, file.readline().split()[4:6])
    return os.cpu_count() * time.monotonic() - (idle + waiting) / os.sysconf('SC_CLK_TCK')


def switched(option, options, nets=(None, None), n_bytes=None, both=(), **more):
    """
    Pairs of turns with a daemon's option on and off, in turns: two nodes of one rank and a spare server. Yields ((seconds of
    an operation, CPU seconds of the daemons for each) with it on, the same with it off). Both clusters stand all the time.
    both: options of each daemon.
    """
    def run(cluster, steps):
        before = cpu_s(cluster.daemons)
        took = op_ms(cluster, (1, 1), n_bytes or options.bytes, repeats=steps, warmup=4) / 1e3
        return took, cpu_s(cluster.daemons) - before

    def turn(cluster):
        """Without what a job's beginning takes, and its first steps, which find no memory warm."""
        _, beginning = run(cluster, 1)
        took, cpu = run(cluster, 1 + options.steps)
        return took, (cpu - beginning) / options.steps

    with Cluster(2, 1, colocated=False, options=[f'--{option}=on', *both], netns=nets[0], **more) as on, \
            Cluster(2, 1, colocated=False, options=[f'--{option}=off', *both], netns=nets[1], **more) as off:
        for i in range(options.repeats):
            figures = {cluster: turn(cluster) for cluster in ((on, off) if i % 2 else (off, on))}
            yield figures[on], figures[off]
