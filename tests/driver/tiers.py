"""What is in each tier. The gate has every test whose verdict is a function of the code; the full tier has everything."""
from .group import N_PROCESSORS, Command, Compile, Fuzz, Install, Programs, Pytest

PYTHON = '/usr/bin/python3'  # Debian's, to which Debian's numpy and pytest belong
T = 'client/python/tests'
# What runs threads of its own beside its callers.
THREADED = ('unit base ', 'unit transport ', 'unit control ', 'unit client ', 'contract ')
# The thread sanitizer can see nothing in what computes much on one thread. BUT_THREADED: programs among these with more threads,
# and which of a program's tests have them; none: all.
ONE_THREAD = ('unit reduce ', 'fuzz ')
BUT_THREADED = {'unit reduce reduce scalar': ['threads_choose_the_same_kernels'], 'fuzz lane': [], 'fuzz ring': []}


# gRPC is not built with the thread sanitizer, which also keeps signals of children from whoever waits for them: the porter.
NOT_THREAD_SANITIZED = {'grpc', 'porter'}


def suites(test):
    return {suite.rpartition(':')[2] for suite in test['suite']}


def is_judged_by_code(test):
    """Not of the suites full-tier, which go by time or take long; vm, in guests; bench, that measure; python, which start an
    interpreter that a sanitizer would have to be loaded into."""
    return not suites(test) & {'full-tier', 'vm', 'bench', 'python'}


def is_threaded(test):
    # The double of RDMA is one thread.
    return (is_judged_by_code(test) and not suites(test) & NOT_THREAD_SANITIZED and test['name'].startswith(THREADED) and
            'rdma' not in test['name'])


def gate():
    """Lists of groups: those of one list run beside each other."""
    return [
        [Programs('C, ASan and UBSan', 'gate', 'build-asan', is_judged_by_code)],
        [Programs('C with threads, TSan', 'gate', 'build-tsan', is_threaded)],
        # Each has times when it only waits.
        [Pytest('Python', 'gate', PYTHON, package_paths(), ['-n', str(2 * N_PROCESSORS)]),
         Pytest('PyTorch', 'gate', 'keras-torch', [f'{T}/test_torch.py', f'{T}/test_torch_process_group.py'],
                ['-n', str(N_PROCESSORS), '--dist', 'loadfile']),
         Command('demo', 'gate', 'scripts/demo', '--small')],
    ]


def package_paths():
    """All that needs no framework."""
    frameworks = ('examples', 'keras', 'stacks', 'tensorflow', 'jax', 'mxnet')
    return ['tests/driver', T, f'--ignore-glob={T}/test_torch*.py', *(f'--ignore={T}/test_{name}.py' for name in frameworks)]


def is_guest(test):
    return 'vm' in suites(test)


def sanitized(test):
    """Tests that start Python cannot run under a sanitizer, nor can guests, whose processor is emulated, and what measures."""
    return not suites(test) & {'python', 'vm', 'bench'}


def thread_sanitized(test):
    return (sanitized(test) and not suites(test) & NOT_THREAD_SANITIZED and
            (not test['name'].startswith(ONE_THREAD) or test['name'] in BUT_THREADED))


def full():
    def some(name, environment, *files):
        return Pytest(name, 'full', environment, [f'{T}/{file}' for file in files])

    return [
        # Each has times when it only waits, or uses one processor. What takes longest begins first.
        [Programs('guests and containers', 'full', 'build', is_guest, 2),
         some('PyTorch and Keras', 'keras-torch', 'test_torch.py', 'test_torch_process_group.py', 'test_examples.py', 'test_keras.py'),
         Programs('C', 'full', 'build', lambda test: not is_guest(test), 2 * N_PROCESSORS),
         some('TensorFlow', 'tensorflow', 'test_tensorflow.py', 'test_keras.py', 'test_names.py'),
         Pytest('Python', 'full', 'keras-torch', package_paths()),
         some('JAX', 'jax', 'test_jax.py', 'test_keras.py'),
         some('stacks on PyTorch', 'stacks', 'test_stacks.py'),
         some('MXNet', 'mxnet', 'test_mxnet.py', 'test_names.py')],
        [Programs('C, ASan and UBSan', 'full', 'build-asan', sanitized, 3 * N_PROCESSORS)],
        [Programs('C, TSan', 'full', 'build-tsan', thread_sanitized, 3 * N_PROCESSORS,
                  {name: tests for name, tests in BUT_THREADED.items() if tests})],
        [Compile('build-clang', 'full'), Install('release and install', 'full'),
         Command('manifests', 'full', 'scripts/check-manifests', 'build'), Command('demo', 'full', 'scripts/demo')],
        [Fuzz('fuzzers', 'full')],
    ]


TIERS = {'gate': gate, 'full': full}
