"""Groups of tests: each knows what it needs built, runs it, and tells what came of it."""
import concurrent.futures, contextlib, itertools, os, re, select, signal, subprocess, tempfile, threading, time

from .build import TOP, Build, BuildError, environment
from .outcome import Outcome, read_testlog

N_PROCESSORS = os.cpu_count() or 1
AGAIN_S = 1800  # what runs by itself may take so long
GROUP_S = 7200
SANITIZER = {
    'build-asan': {'ASAN_OPTIONS': 'detect_leaks=1:abort_on_error=1', 'UBSAN_OPTIONS': 'halt_on_error=1:print_stacktrace=1'},
    'build-tsan': {'TSAN_OPTIONS': f'halt_on_error=1:suppressions={TOP}/tests/tsan.supp'},
}


_running = set()  # process groups of commands
_starting = threading.RLock()  # between the beginning of a command and its entry there


def kill_running():
    """Ends all commands, and lets no thread begin another: this process is about to end."""
    _starting.acquire()
    for group in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


# So often the main thread looks up from what it waits for: a signal that comes just before the wait begins does not end it.
LOOK_S = 1


def has_ended(pidfd, seconds):
    """Whether a process ends within so many seconds."""
    end = time.monotonic() + seconds
    while not select.select([pidfd], [], [], max(0, min(LOOK_S, end - time.monotonic())))[0]:
        if time.monotonic() >= end:
            return False
    return True


def run(command, env, folder=TOP, seconds=AGAIN_S):
    """A command in a session of its own, which is killed after so many seconds, or with us. Returns its exit status, as
    subprocess has it, what it printed, and the CPU seconds of it and of all that it has waited for."""
    with tempfile.TemporaryFile('w+', errors='replace') as output:
        with _starting:
            process = subprocess.Popen(list(map(str, command)), env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            _running.add(process.pid)
        pidfd, is_late = os.pidfd_open(process.pid), True
        try:
            is_late = not has_ended(pidfd, seconds)
        finally:
            if is_late:
                os.killpg(process.pid, signal.SIGKILL)
            os.close(pidfd)
            _running.discard(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read() + (f'\nwas given up after {seconds} s' if is_late else '')
        return process.returncode, text, usage.ru_utime + usage.ru_stime


def make_products(build):
    """Whatever is no test, and the double of CUDA."""
    tests, double = str(TOP / 'tests'), str(TOP / 'tests/fakecuda')
    build.make([build.within(file) for target in build.introspect('targets') if target['type'] in ('executable', 'shared library')
                for file in target['filename'] if not target['defined_in'].startswith(tests) or target['defined_in'].startswith(double)])


class Group:
    """name: as in the table. tier: quick, gate or full: what is marked for a higher one is left out."""

    def __init__(self, name, tier):
        self.name, self.tier = name, tier

    def base(self):
        """Of files' names that are the group's alone: two groups of one build folder may run beside each other."""
        return self.name.replace(' ', '-').replace(',', '')

    def env(self):
        return environment(BPS_TEST_TIER=self.tier)

    def measured(self):
        """Runs it all. Returns its outcome."""
        began = time.monotonic()
        outcome = Outcome(self.name)
        self.run(outcome)
        outcome.seconds = time.monotonic() - began
        return outcome


class Programs(Group):
    """Test programs of a build folder. wanted(test): whether one of them, as meson describes it, is in the group; only: {program:
    names of its tests}, where not all of them run."""

    def __init__(self, name, tier, build, wanted, at_once=4 * N_PROCESSORS, only=None):
        super().__init__(name, tier)
        self.build, self.wanted, self.at_once, self.only = Build(build), wanted, at_once, only or {}

    def env(self):
        return {**super().env(), **SANITIZER.get(self.build.name, {})}

    def make(self):
        self.tests = {name: test for name, test in self.build.tests().items() if self.wanted(test)}
        self.build.make(self.build.files_of(self.tests.values()))

    def run(self, outcome):
        parts = {name: words for name, words in self.only.items() if name in self.tests}
        whole = [name for name in self.tests if name not in parts]
        if whole:
            self.run_programs(outcome, whole, [])
        for name, words in parts.items():
            self.run_programs(outcome, [name], words)

    def run_programs(self, outcome, names, words):
        base = self.base()
        log = self.build.folder / 'meson-logs' / f'{base}.json'
        log.unlink(missing_ok=True)
        slower = 5 if self.build.name in SANITIZER else 2
        command = ['meson', 'test', '-C', self.build.folder, '--no-rebuild', '--logbase', base, '--num-processes', self.at_once,
                   '--timeout-multiplier', slower, *(['--test-args', ' '.join(words)] if words else []), *names]
        _, text, cpu_seconds = run(command, self.env(), seconds=GROUP_S)
        outcome.cpu_seconds += cpu_seconds
        if not log.exists():
            outcome.fail(f'{self.name}: meson test', text, lambda: self.again({'command': command, 'env': {}}, []))
            return
        for test in read_testlog(log):
            outcome.add_program(test, lambda names, test=test: self.again(test, names or words))

    def again(self, test, names):
        status, text, _ = run([*test['command'], *names], {**self.env(), **test['env']}, self.build.folder)
        return status == 0, text if status >= 0 else f'{text}\nsignal {-status}'


class Pytest(Group):
    """Tests of the Python package. python: the interpreter, or the name of an environment of scripts/framework-venvs."""

    count = itertools.count()

    def __init__(self, name, tier, python, paths, options=()):
        super().__init__(name, tier)
        self.build, self.python, self.paths, self.options = Build('build'), python, paths, list(options)

    def make(self):
        make_products(self.build)
        if not os.path.isabs(self.python):
            link = TOP / ('.venv' if self.python == 'keras-torch' else f'.venv-{self.python}')
            subprocess.run([TOP / 'scripts/framework-venvs', self.python, link], check=True)
            self.python = str(link / 'bin/python')

    def env(self):
        return {**super().env(), 'BPS_BUILD_DIR': str(self.build.folder), 'BPS_PYTHON': self.python, 'OMP_NUM_THREADS': '1'}

    def command(self, *arguments):
        # Shorter than pytest's own, as names of sockets lie below it.
        folder = os.path.join(tempfile.gettempdir(), f'p{next(self.count)}')
        return [self.python, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', f'--rootdir={TOP}', f'--basetemp={folder}', *arguments]

    def run(self, outcome):
        junit = self.build.folder / f'pytest-{self.base()}.xml'
        junit.unlink(missing_ok=True)
        command = self.command(f'--junitxml={junit}', *self.options, *self.paths)
        _, text, outcome.cpu_seconds = run(command, self.env(), seconds=GROUP_S)
        if not junit.exists():
            outcome.fail(f'{self.name}: pytest', text, lambda: self.again_all(command))
            return
        outcome.add_suite(junit, self.again)

    def again(self, node):
        return self.again_all(self.command(node))

    def again_all(self, command):
        status, text, _ = run(command, self.env())
        return status == 0, text


class Whole(Group):
    """What succeeds or fails as a whole. again(): whether it did, and its log."""

    def run(self, outcome):
        good, text = self.again()
        if good:
            outcome.count(1, 0, 0)
        else:
            outcome.fail(self.name, text, self.again)


class Command(Whole):
    """A program that uses the products."""

    def __init__(self, name, tier, *command):
        super().__init__(name, tier)
        self.command = command

    def make(self):
        make_products(Build('build'))

    def run(self, outcome):
        self.outcome = outcome
        super().run(outcome)

    def again(self):
        status, text, cpu_seconds = run(self.command, self.env())
        self.outcome.cpu_seconds += cpu_seconds
        return status == 0, text


class Fuzz(Group):
    """Each target of build-fuzz, for a while. BPS_FUZZ_SECONDS: how long; BPS_FUZZ_SEED: always 1, so that a finding is the
    change's, and 0 for longer hunts: a new one each time."""

    def make(self):
        build = Build('build-fuzz')
        build.set_up()
        targets = build.run('ninja', '-C', build.folder, '-t', 'targets', 'all')
        self.targets = re.findall(r'^(tests/fuzz/fuzz_[a-z_]*): ', targets, re.M)
        build.make(self.targets)

    def run(self, outcome):
        with concurrent.futures.ThreadPoolExecutor(N_PROCESSORS) as threads:
            for target, (status, text, cpu_seconds) in zip(self.targets, threads.map(self.fuzz, self.targets)):
                outcome.cpu_seconds += cpu_seconds
                if status == 0 and 'stat::number_of_executed_units' in text:
                    outcome.count(1, 0, 0)
                else:
                    outcome.fail(os.path.basename(target), text, lambda target=target: self.again(target))

    def fuzz(self, target):
        name = os.path.basename(target)
        with tempfile.TemporaryDirectory(prefix='bps-fuzz-') as work:
            return run([TOP / 'build-fuzz' / target, f'-seed={os.environ.get("BPS_FUZZ_SEED", "1")}',
                        f'-max_total_time={os.environ.get("BPS_FUZZ_SECONDS", "10")}', '-timeout=10', '-rss_limit_mb=2048',
                        '-print_final_stats=1', f'-artifact_prefix={TOP}/build-fuzz/', work,
                        TOP / 'tests/fuzz/corpus' / name.removeprefix('fuzz_')], self.env())

    def again(self, target):
        status, text, _ = self.fuzz(target)
        return status == 0, text


class Compile(Whole):
    """A build folder in which everything can be built."""

    def make(self):
        self.build = Build(self.name)

    def again(self):
        try:
            self.build.make()
            return True, ''
        except BuildError as error:
            return False, str(error)


class Install(Whole):
    """What `meson install` of a release puts in place, by scripts/check-install."""

    def make(self):
        self.build = Build('build-release')
        self.build.make()

    def again(self):
        with tempfile.TemporaryDirectory(prefix='bps-install-') as root:
            self.build.run('env', f'DESTDIR={root}', 'meson', 'install', '-C', self.build.folder, '--no-rebuild', '--quiet')
            status, text, _ = run(['scripts/check-install', root], self.env())
            return status == 0, text


def together(groups, at_once=3):
    """Runs groups that wait more than they compute beside each other, in the order given. Returns their outcomes."""
    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        measured = [threads.submit(Group.measured, group) for group in groups]
        while concurrent.futures.wait(measured, LOOK_S).not_done:
            pass
        return [each.result() for each in measured]
