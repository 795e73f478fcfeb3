"""
Other systems as benchmarks run them: each with its best settings. SETTINGS says what can be set, and search() finds what is best for a
size and a number of ranks.
"""
import contextlib, ctypes, functools, math, os, select, signal, statistics, subprocess, sys
from harness import BUILD, HERE, TOP, inside

WARM_UP = 3  # operations before those that are measured, of bps as of every rival
ANSWER_S = 120  # in which a rival has to answer
END_S = 5  # in which a rival has to end by itself


class Refused(Exception):
    """The rival does not start, or does not answer, with these settings."""


class Rival:
    """Ranks of another system, which stay: each reads "BYTES REPEATS" and answers with nanoseconds of each repeat."""

    def __init__(self, prefix, commands, environments):
        self.ranks = [subprocess.Popen(inside(prefix, host, argv), env={**os.environ, **env}, text=True, bufsize=1,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
                      for host, (argv, env) in enumerate(zip(commands, environments))]
        try:
            for rank in self.ranks:
                if self.line(rank) != 'ready':
                    raise Refused(f'did not start: {self.errors(rank)}')
        except BaseException:
            self.close()
            raise

    @staticmethod
    def line(rank):
        if not select.select([rank.stdout], [], [], ANSWER_S)[0]:
            raise Refused(f'did not answer within {ANSWER_S} s')
        return rank.stdout.readline().strip()

    @staticmethod
    def errors(rank):
        """What a rank, which may still run, has written to its standard error so far."""
        os.set_blocking(rank.stderr.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            return os.read(rank.stderr.fileno(), 65536).decode(errors='replace')
        return ''

    def times_ms(self, n_bytes, repeats=1, warm_up=WARM_UP):
        """Of each repeat, by the slowest rank."""
        try:
            for rank in self.ranks:
                rank.stdin.write(f'{n_bytes} {warm_up + repeats}\n')
            times = [list(map(int, self.line(rank).split()))[warm_up:] for rank in self.ranks]
        except (OSError, ValueError) as error:
            raise Refused(f'{error}: {self.errors(self.ranks[0])}') from error
        if not all(times):
            raise Refused(f'ended: {self.errors(self.ranks[0])}')
        return [max(column) / 1e6 for column in zip(*times)]

    def ms(self, *arguments):
        return statistics.median(self.times_ms(*arguments))

    def close(self):
        """A launcher that does not end has ranks that would go on spinning, so its whole session ends."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.stdin.close()
        for rank in self.ranks:
            for how in signal.SIGTERM, signal.SIGKILL:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(END_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, how)
            rank.wait()
            rank.stdout.close()
            rank.stderr.close()

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


def torch_ranks(prefix, n, program, *arguments, settings=None):
    """n ranks of a program on torch.distributed's Gloo, on hosts 0 to n - 1; without namespaces on loopback. None without torch."""
    python = torch_python()
    argv = [python, os.path.join(HERE, program), *arguments]
    return python and Rival(prefix, [argv] * n, [
        {'RANK': str(i), 'WORLD_SIZE': str(n), 'MASTER_ADDR': '10.88.0.1' if prefix else '127.0.0.1', 'MASTER_PORT': '29411',
         'GLOO_SOCKET_IFNAME': 'eth0' if prefix else 'lo', 'OMP_NUM_THREADS': '1', **(settings or {})} for i in range(n)])


def gloo(prefix, n):
    """torch.distributed has no choice of Gloo's algorithm, and all that can be set of it is the network."""
    return torch_ranks(prefix, n, 'rival_gloo.py')


def choices(name, values, **more):
    return [{name: str(value), **more} for value in values]


# What each rival can be told by its environment: one list of choices for each question. The first choice, {}, is its default.
SETTINGS = {
    'Intel MPI': [
        [{}, *choices('I_MPI_ADJUST_ALLREDUCE', range(1, 26))],
        [{}, *choices('I_MPI_PIN', (0,))],
    ],
    'Open MPI': [
        [{}, *choices('OMPI_MCA_coll_tuned_allreduce_algorithm', range(1, 7), OMPI_MCA_coll_tuned_use_dynamic_rules='1'),
         *choices('OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize', (65536, 1 << 20), OMPI_MCA_coll_tuned_allreduce_algorithm='5',
                  OMPI_MCA_coll_tuned_use_dynamic_rules='1'),
         *choices('OMPI_MCA_coll_han_priority', (90,)), *choices('OMPI_MCA_coll_adapt_priority', (90,))],
        [{}, *choices('OMPI_MCA_hwloc_base_binding_policy', ('none', 'core'))],
        [{}, *choices('OMPI_MCA_mpi_yield_when_idle', (1,))],
    ],
    'DDP on Gloo': [[{}, *choices('BUCKET_MB', (5, 10, 50, 100))]],
}
# And of shared memory.
SHARED_MEMORY = {
    'Intel MPI': [
        [{}, *choices('I_MPI_WAIT_MODE', (1,)), *choices('I_MPI_THREAD_YIELD', (2,)), *choices('I_MPI_SHM_SPIN_RATIO', (1,))],
        [{}, *choices('I_MPI_SHM_HEAP', (1,))],
    ],
    'Open MPI': [
        [{}, *choices('OMPI_MCA_coll_sm_priority', (90,))],
        [{}, *choices('OMPI_MCA_btl_vader_single_copy_mechanism', ('cma', 'xpmem', 'none'))],
    ],
}


@functools.cache
def mpi_program(bin_):
    """Compiled by the mpicc there, once in each run."""
    program = os.path.join(BUILD, 'rival_mpi_' + ('intel' if '.venv-mpi' in bin_ else 'open'))
    environment = {**os.environ, 'PATH': bin_ + ':' + os.environ['PATH'], 'I_MPI_ROOT': os.path.dirname(bin_)}
    subprocess.run([os.path.join(bin_, 'mpicc'), '-O2', '-o', program, os.path.join(HERE, 'rival_mpi.c')], check=True,
                   env=environment, capture_output=True)
    return program


def mpi(name, n, transport, settings):
    """
    MPI_Allreduce by n ranks of Open MPI (Debian's) or Intel MPI (PyPI's), over shared memory or loopback TCP. None where it is not
    installed.
    """
    bin_ = os.path.join(TOP, '.venv-mpi', 'bin') if name == 'Intel MPI' else '/usr/bin'
    if not os.path.exists(os.path.join(bin_, 'mpicc')):
        return None
    environment = {'PATH': bin_ + ':' + os.environ['PATH']}
    argv = [os.path.join(bin_, 'mpirun'), '-np', str(n)]
    if name == 'Intel MPI':
        environment.update(I_MPI_ROOT=os.path.dirname(bin_), I_MPI_OFI_PROVIDER='tcp', FI_PROVIDER='tcp',
                           I_MPI_FABRICS='shm' if transport == 'shm' else 'ofi')
    else:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')
        argv += ['--oversubscribe', '--mca', 'btl', 'self,vader' if transport == 'shm' else 'self,tcp']
        argv += ['--mca', 'btl_tcp_if_include', 'lo'] if transport == 'tcp' else []
    return Rival(None, [argv + [mpi_program(bin_)]], [{**environment, **settings}])


def tune(questions, measure):
    """
    The settings of which measure(settings) is least, and that figure: one question after the other, each with the best answers to
    those before.
    """
    best, least = {}, measure({})
    for answers in questions:
        before = best
        for answer in filter(None, answers):
            figure = measure({**before, **answer})
            if figure < least:
                best, least = {**before, **answer}, figure
    return best, least


def search(name, start, n_bytes, questions, repeats=5):
    """
    The settings with which the rival that start(settings) makes is fastest, by the least of several times. None where it is not
    installed.
    """
    def measure(settings):
        try:
            rival = start(settings)
            if rival is None:
                return None
            with rival:
                return min(rival.times_ms(n_bytes, repeats, 1))
        except Refused:
            return math.inf

    if measure({}) is None:
        return None
    best, least = tune(questions, measure)
    if least == math.inf:
        raise SystemExit(f'bench: {name} does not run, with whatever settings')
    return best


def congestion_controls():
    with open('/proc/sys/net/ipv4/tcp_available_congestion_control') as file:
        return file.read().split()


@contextlib.contextmanager
def loopback(congestion):
    """
    This process, and what it starts, in a network namespace whose loopback has that congestion control: the route's comes before what
    a program sets on its socket as it connects. Needs root.
    """
    libc, clone_newnet = ctypes.CDLL(None, use_errno=True), 0x40000000
    with open('/proc/self/ns/net') as before:
        if libc.unshare(clone_newnet):
            raise SystemExit(f'bench: a network namespace: {os.strerror(ctypes.get_errno())}; that needs root')
        try:
            subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)
            for where in '127.0.0.0/8', '127.0.0.1':
                subprocess.run(f'ip route change local {where} dev lo table local proto kernel scope host src 127.0.0.1 '
                               f'congctl {congestion}'.split(), check=True)
            yield
        finally:
            libc.setns(before.fileno(), clone_newnet)
