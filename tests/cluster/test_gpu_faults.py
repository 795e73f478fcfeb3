#!/usr/bin/env python3
"""What goes wrong where GPUs are used, on the test double: each call that a worker makes fails, and each process of a job is
killed at each named point. Whoever is left hears of it in words, nothing of the devices' memory stays, the next job runs.
"""
import contextlib, glob, itertools, os, re, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np

TOP = os.path.join(os.path.dirname(__file__), '..', '..')
ALLOC, MAPPED, MANAGED = 1, 2, 3
AUTO, HOST = 0, 3
N = 3001  # elements: odd, so that they do not divide by two; several parts
LONG = bool(os.environ.get('BPS_LONG'))
with open(os.path.join(BUILD, 'daemon', 'bps-daemon'), 'rb') as binary:
    HAS_FAILPOINTS = b'BPS_FAILPOINTS' in binary.read()


def start_cluster(*options, **environment):
    """One daemon, with more in its environment, which its workers inherit."""
    os.environ.update(environment)
    try:
        return Cluster(1, options=options)
    finally:
        for name in environment:
            del os.environ[name]


def workers(daemon):
    return [int(pid) for pid in re.findall(r'GPU worker: pid (\d+)', daemon.text())]


def device_memory(pid):
    """Pieces of the double's memory that a process has: mapped, or as descriptors."""
    found = []
    try:
        with open(f'/proc/{pid}/maps') as file:
            found = re.findall(r'/memfd:fakecuda-gpu\S*', file.read())
        for path in glob.glob(f'/proc/{pid}/fd/*'):
            if 'memfd:fakecuda-gpu' in os.readlink(path):
                found.append(path)
    except (FileNotFoundError, ProcessLookupError):  # it ends, or its descriptor went meanwhile
        pass
    return found


def is_gone(pid):
    """Whether a worker's number is nobody's, or another process's by now; it is still the worker's while that is a zombie."""
    try:
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return line != b'' and b'--gpu-worker' not in line


def make_job(cluster, n_ranks, gpu_reduce, halves=False):
    """halves: averages of float16, through a server."""
    ranks = cluster.job((n_ranks,), join=False, part_bytes=4096, gpu_reduce=gpu_reduce, force_distributed=int(halves))
    for k, rank in enumerate(ranks):
        rank.halves = halves
        rank.call('device', k)
        rank.call('attend')
    cluster.join(ranks)
    for rank in ranks:
        rank.call('tensor', 0, 'x', FLOAT16 if halves else FLOAT32, N)
    return ranks


def data_of(ranks):
    """Whose sums are exact, in whatever order."""
    rng = np.random.default_rng(len(ranks))
    data = [rng.integers(-100, 100, N).astype(np.float16 if ranks[0].halves else np.float32) for _ in ranks]
    return data, (np.mean if ranks[0].halves else np.sum)(data, axis=0, dtype=np.float32).astype(data[0].dtype).tobytes()


def submit_all(ranks, kind, request=0):
    """What each rank was answered: None, or its BpsError."""
    errors, (data, _) = [], data_of(ranks)
    for rank, mine in zip(ranks, data):
        try:
            rank.submit(request, 0, mine.tobytes(), red=AVERAGE if rank.halves else SUM, out=N, device=kind)
            errors.append(None)
        except BpsError as error:
            errors.append(error)
    # Where the library copies through host memory this waits for the others.
    waiting = [k for k, error in enumerate(errors) if not error]
    for k in waiting:
        ranks[k].send('stream', request)
    for k in waiting:
        try:
            ranks[k].answer()
        except BpsError as error:
            errors[k] = error
    return errors


def finish(rank, request=0):
    """Reads the result in the order of the stream, which comes to its end in any case, and asks how it went."""
    got = rank.result(request)
    rank.wait(request)
    return got


def run_job(cluster, n_ranks, gpu_reduce, kinds, halves=False):
    """A job to its end: for each rank the first error that it was told, or None if all was well; and notices."""
    ranks = make_job(cluster, n_ranks, gpu_reduce, halves)
    want, errors = data_of(ranks)[1], [None] * n_ranks

    def note(k, error):
        errors[k] = errors[k] or error

    for kind in kinds:
        for k, error in enumerate(submit_all(ranks, kind)):
            note(k, error)
        for k, rank in enumerate(ranks):
            if not errors[k]:
                try:
                    assert finish(rank) == want or errors[k], f'rank {k}: wrong values'
                except BpsError as error:
                    note(k, error)
            rank.call('free', 0)
            try:
                rank.call('release')
            except BpsError as error:
                note(k, error)
    # What went wrong when the last memory was given back is heard of by whoever comes next.
    for k, error in enumerate(submit_all(ranks, kinds[0])):
        note(k, error)
    for k, rank in enumerate(ranks):
        if not errors[k]:
            try:
                assert finish(rank) == want, f'rank {k}: wrong values'
            except BpsError as error:
                note(k, error)
        rank.call('free', 0)
    notices = [rank.call('notice') for rank in ranks]
    for rank in ranks:
        rank.call('close')
    return errors, notices


def expect_nothing_left(what, cluster):
    daemon = cluster.daemons[0]
    for pid in workers(daemon):
        wait_for(f'{what}: the end of worker {pid}', lambda: is_gone(pid))
    # The daemon hears of the trainers' end in its own time.
    for process in [daemon, *cluster.trainers]:
        if process.process.poll() is None:
            wait_for(f'{what}: {process.name} has no memory of devices', lambda: not device_memory(process.pid))
    for trainer in cluster.trainers:
        trainer.kill()
    cluster.trainers.clear()


def expect_next_job(what, cluster):
    errors, notices = run_job(cluster, 2, AUTO, [ALLOC])
    assert not any(errors) and notices == ['-', '-'], f'{what}: the next job: {errors} {notices}'
    expect_nothing_left(what + ': the next job', cluster)


def ask(ranks, kinds):
    """Leaves the ranks at work; answers_of() says how it went."""
    data, want = data_of(ranks)
    for rank, mine in zip(ranks, data):
        path, rank.want = os.path.join(rank.folder, f'{rank.name}.in'), want
        with open(path, 'wb') as file:
            file.write(mine.tobytes())
        rank.asked = []
        for request, kind in enumerate(kinds):
            for words in (('submit', request, 0, f'in={path}', f'red={SUM}', f'out={N}', f'device={kind}'),
                          ('stream', request), ('result', request, output_of(rank, request)),
                          ('wait', request, DEADLINE * 1000), ('free', request), ('release',)):
                rank.send(*words)
                rank.asked.append((words[0], request))


def output_of(rank, request):
    return os.path.join(rank.folder, f'{rank.name}.{request}.out')


def answers_of(rank):
    """What it was told: words of errors. What was answered well is not among them, and has the right values."""
    told, failed, asked = [], set(), {request for _, request in rank.asked}
    for word, request in rank.asked:
        try:
            rank.answer(2 * DEADLINE)
        except BpsError as error:
            told.append(error.text)
            failed |= {request} if word not in ('free', 'release') else set()
    for request in asked - failed:
        with open(output_of(rank, request), 'rb') as file:
            assert file.read() == rank.want, f'{rank.name}: request {request} ended well with wrong values'
    return told


# -- Calls that fail ---------------------------------------------------------------------------------------------------

# What becomes of a job whose worker's call fails, if it is not the end of that job with words that name the call.
STAGED, TOLERATED, OFF = 'memory is staged', 'all is well', 'host memory'
OTHERWISE = {
    'cuIpcOpenMemHandle': STAGED, 'cuMemImportFromShareableHandle': STAGED, 'cuMemAddressReserve': STAGED,
    'cuMemMap': STAGED, 'cuMemSetAccess': STAGED,
    # What the driver does not say is not known; the rest goes on.
    'cuMemGetAddressRange': TOLERATED, 'cuDeviceGetPCIBusId': TOLERATED,
    'cuMemRelease': TOLERATED, 'nvmlInit': TOLERATED, 'nvmlDeviceGetHandleByUUID': TOLERATED,
    'nvmlDeviceGetP2PStatus': TOLERATED, 'nvmlDeviceGetTopologyCommonAncestor': TOLERATED,
}
# Errors that no trainer's death can have brought about, and a driver's one that leaves the context as it is.
CODE = {'nccl': 3, 'nvml': 999, 'cu': 1}
# Ranks, topology, kinds of memory, and halves, that have all of the calls between them.
SCENES = [(3, 'switch:2', AUTO, [ALLOC, MAPPED], False), (2, 'nvlink', AUTO, [ALLOC], False), (2, 'nvlink', AUTO, [ALLOC], True)]


def calls_in_sources():
    """Of the driver's, NCCL's and NVML's functions that a worker calls."""
    found = set()
    for path in glob.glob(os.path.join(TOP, 'daemon', 'gpu', '**', '*.c'), recursive=True):
        with open(path) as file:
            found |= set(re.findall(r'\b(?:cuda|nccl|nvml|table)(?:->|\.)((?:cu|nccl|nvml)[A-Z]\w+)\s*\(', file.read()))
    # Those say versions or words, and do not fail; then those that are made only when a stream is late, or NCCL is stuck,
    # for which there are gates in tests/daemon/test_gpu.c.
    found -= {'ncclGetErrorString', 'ncclGetLastError', 'nvmlErrorString', 'cuDriverGetVersion', 'ncclGetVersion'}
    # Those that are made for RDMA devices alone fail in test_gpu_direct.py.
    found -= {'cuDeviceGetAttribute', 'cuPointerSetAttribute', 'cuMemAlloc', 'cuMemFree', 'cuMemGetHandleForAddressRange',
              'cuMemcpyDtoDAsync', 'cuFlushGPUDirectRDMAWrites', 'cuDeviceCanAccessPeer', 'cuCtxEnablePeerAccess'}
    # Made where no import has succeeded: tests/daemon/test_gpu_worker.c.
    found -= {'cuDevicePrimaryCtxRelease'}
    return found - {'cuStreamCreate', 'cuStreamWaitValue32', 'cuLaunchHostFunc', 'ncclCommGetAsyncError'}


def base_name(call):
    return re.sub(r'_v\d$', '', call)


def count_calls(scene):
    """How often a worker makes each call in a job in which nothing fails."""
    n_ranks, topology, gpu_reduce, kinds, halves = scene
    with start_cluster(FAKECUDA_TRACE='1', FAKECUDA_TOPOLOGY=topology) as cluster:
        errors, notices = run_job(cluster, n_ranks, gpu_reduce, kinds, halves)
        assert not any(errors) and set(notices) == {'-'}, (errors, notices)
        [worker] = workers(cluster.daemons[0])
        wait_for('the end of the worker', lambda: is_gone(worker))
        calls = re.findall(rf'^fakecuda {worker}: (\w+)$', cluster.daemons[0].text(), re.M)
    counts = {}
    for call in calls:
        counts[base_name(call)] = counts.get(base_name(call), 0) + 1
    return counts


def fail_call(cluster, file, scene, call, nth):
    n_ranks, _, gpu_reduce, kinds, halves = scene
    code = next(code for prefix, code in CODE.items() if call.startswith(prefix))
    what = f'{call}, call {nth}'
    with open(file, 'w') as out:
        out.write(f'{call}:{nth}:{code}')
    errors, notices = run_job(cluster, n_ranks, gpu_reduce, kinds, halves)
    assert not os.path.exists(file), f'{what}: was not made'
    outcome = OTHERWISE.get(call)
    if outcome is None:
        for k, error in enumerate(errors):
            # NCCL calls the driver as well.
            assert error and (call in error.text or 'nccl' in error.text), f'{what}: rank {k} was told {error}'
    else:
        assert not any(errors), f'{what}: {errors}'
        said = [notice for notice in notices if notice != '-']
        assert bool(said) == (outcome == STAGED), f'{what}: {notices}'
    expect_nothing_left(what, cluster)
    expect_next_job(what, cluster)


@gate_tier
def test_every_call_of_the_worker_fails():
    """By name, the first and one later on (BPS_LONG: those between, too)."""
    seen = set()
    for scene in SCENES:
        counts = count_calls(scene)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, 'fail')
            with start_cluster(FAKECUDA_FAIL_FILE=file, FAKECUDA_TOPOLOGY=scene[1]) as cluster:
                before = None
                for call, n in sorted(counts.items()):
                    if call in seen or call not in CALLS:
                        continue
                    # Their number is not the same in each run, and the last ones come when all has been told.
                    later = min((n + 1) // 2, 10)
                    for nth in range(1, later + 1) if LONG else some(sorted({1, later}), (later,)):
                        fail_call(cluster, file, scene, call, nth)
                    # A moment after its ranks have gone the daemon has let go of all that was theirs.
                    before = before or cluster.daemons[0].fds()
                    wait_for(f'{call}: as many descriptors of the daemon as before, {before}', lambda: cluster.daemons[0].fds() <= before)
        seen |= set(counts)
    # Whoever adds a call to the worker finds it here.
    assert CALLS <= seen, f'in none of the scenes: {CALLS - seen}'


def test_the_driver_fails_when_the_daemon_looks_for_it():
    """Then there are no GPUs for it, which the log says, and the library goes through host memory."""
    for call in ('cuInit', 'cuDeviceGetCount', 'cuDeviceGetUuid'):
        with start_cluster(FAKECUDA_FAIL=f'{call}:1:999') as cluster:
            assert re.search('GPUs: not used', cluster.daemons[0].text()), cluster.daemons[0].text()
            errors, notices = run_job(cluster, 2, AUTO, [ALLOC])
            assert not any(errors), errors
            assert all('has no CUDA driver' in notice for notice in notices), notices


@gate_tier
def test_libraries_that_are_too_old_or_missing():
    """Are named, with what is lost by it."""
    def groups(said, **environment):
        with start_cluster(**environment) as cluster:
            errors, notices = run_job(cluster, 2, AUTO, [ALLOC])
            assert not any(errors), errors
            text = cluster.daemons[0].text()
            assert re.search(said, text), text
            return notices

    assert groups(r'CUDA 13\.0, reduced by the CPU: NCCL is 2\.13, and 2\.14 is the oldest(?s:.*)groups 01 \(NCCL is 2\.13',
                  FAKENCCL_VERSION='21304') == ['-', '-']
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, 'libnccl.so.2'), 'w') as file:
            file.write('This is no library.\n' * 10)
        before = os.environ['LD_LIBRARY_PATH']
        os.environ['LD_LIBRARY_PATH'] = f'{folder}:{before}'
        try:
            assert groups(r'reduced by the CPU: .*libnccl\.so\.2(?s:.*)groups 01 \(.*libnccl\.so\.2') == ['-', '-']
        finally:
            os.environ['LD_LIBRARY_PATH'] = before
    notices = groups(r'GPUs: not used.* CUDA is 11\.2, and', FAKECUDA_VERSION='11020')
    assert all('has no CUDA driver' in notice for notice in notices), notices


# -- Calls that never return -------------------------------------------------------------------------------------------

@full_tier('calls that never return are given up after 6 s, in which all others must return')
def test_calls_that_never_return():
    """The worker is killed when nothing has come of its work for gpu_timeout, at whatever it is. All at once, as it takes a
    while: the time must be enough for workers that are well on a busy machine."""
    cases = [('cuIpcOpenMemHandle', 2), ('cuIpcCloseMemHandle', 1), ('ncclCommInitAll', 1), ('ncclGroupEnd', 2), ('@copy', 3)]
    n_ranks, topology, gpu_reduce, kinds, _ = SCENES[0]
    with contextlib.ExitStack() as stack:
        folder, begun = stack.enter_context(tempfile.TemporaryDirectory()), []
        for call, nth in cases:
            file = os.path.join(folder, call)
            with open(file, 'w') as out:
                out.write(f'{call}:{nth}:hang')
            cluster = stack.enter_context(start_cluster('--set=gpu_timeout=6s', FAKECUDA_FAIL_FILE=file,
                                                        FAKECUDA_TOPOLOGY=topology))
            ranks = make_job(cluster, n_ranks, gpu_reduce)
            ask(ranks, kinds)
            begun.append((call, cluster, ranks))
        for call, cluster, ranks in begun:
            told = [answers_of(rank) for rank in ranks]
            assert any('nothing came of its work' in text for words in told for text in words), f'{call}: {told}'
            for rank in ranks:
                rank.call('close')
            expect_nothing_left(call, cluster)
            expect_next_job(call, cluster)


# -- Deaths ------------------------------------------------------------------------------------------------------------

def state_of(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rsplit(')', 1)[1].split()[0]
    except FileNotFoundError:
        return None


# Where a worker, or the daemon, is stopped; which pass; which scene comes there. Then somebody is killed, and it goes on.
POINTS = [
    ('gpu-memory-opened', 1, 0), ('gpu-planned', 1, 0), ('gpu-collective', 2, 0),
    ('gpu-down', 3, 0), ('gpu-up', 2, 0), ('gpu-tell', 2, 0), ('gpu-memory-closed', 1, 0), ('gpu-collective', 1, 1),
    ('part-down', 2, 0), ('part-up', 1, 0), ('part-up', 2, 1),
]


def kill_at(point, nth, scene, victim, what):
    n_ranks, topology, gpu_reduce, kinds, _ = SCENES[scene]
    with start_cluster(BPS_FAILPOINTS=f'{point}=stop@{nth}', FAKECUDA_TOPOLOGY=topology) as cluster:
        daemon = cluster.daemons[0]
        ranks = make_job(cluster, n_ranks, gpu_reduce)
        ask(ranks, kinds)
        [worker] = wait_for(f'{what}: the worker', lambda: workers(daemon))
        stopped = daemon.pid if point.startswith('part-') else worker
        wait_for(f'{what}: it is there', lambda: state_of(stopped) == 'T')
        dead = None
        if victim == 'worker':
            os.kill(worker, signal.SIGKILL)
        elif victim == 'daemon':
            daemon.process.kill()
            daemon.process.wait()
            cluster.restart(0)
        else:
            dead = ranks.pop()
            dead.process.kill()
        if stopped != {'worker': worker, 'daemon': daemon.pid}.get(victim):
            os.kill(stopped, signal.SIGCONT)
        for rank in ranks:
            told = answers_of(rank)
            # What a trainer's death makes of its memory may be met before the death itself, and is not what is told.
            words = {'worker': ('killed by signal 9',), 'daemon': ('has gone', 'come back'),
                     'trainer': (f'rank {len(ranks)}',)}[victim]
            # Of what was over but for a word to us, nobody needs to hear; nor of the death of one that had given all it had to.
            given = victim == 'trainer' and len(kinds) == 1
            assert told or given or point in ('gpu-memory-closed', 'gpu-tell', 'part-up'), f'{what}: nothing was told'
            assert not told or any(word in text for text in told for word in words), f'{what}: {told}'
            rank.call('close')
        wait_for(f'{what}: the end of the worker', lambda: is_gone(worker))
        if victim == 'daemon':
            for rank in ranks:
                assert not device_memory(rank.pid), f'{what}: {rank.name} has {device_memory(rank.pid)}'
                rank.kill()
            cluster.trainers.clear()
        else:
            expect_nothing_left(what, cluster)
        # The next worker comes to the point as well, and has passed it as often before it stops for good.
        if victim == 'daemon' or point.startswith('part-'):
            expect_next_job(what, cluster)


@gate_tier
def test_deaths_at_every_named_point():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    victims = ('trainer', 'worker', 'daemon')
    for (point, nth, scene), victim in some(itertools.product(POINTS, victims), zip(POINTS, itertools.cycle(victims))):
        what = f'{victim} killed when {point} is passed for the {nth}. time, scene {scene}'
        try:
            kill_at(point, nth, scene, victim, what)
        except AssertionError as error:
            raise AssertionError(what) from error


@contextlib.contextmanager
def before_a_failure():
    """A job at work: the worker is stopped before a copy that will fail, and the daemon is, too."""
    with start_cluster(BPS_FAILPOINTS='gpu-down=stop@1,gpu-fatal=stop', FAKECUDA_FAIL='@copy:1:700') as cluster:
        daemon, ranks = cluster.daemons[0], make_job(cluster, 2, HOST)
        ask(ranks, [ALLOC])
        [worker] = wait_for('the worker', lambda: workers(daemon))
        wait_for('it is there', lambda: state_of(worker) == 'T')
        os.kill(daemon.pid, signal.SIGSTOP)
        wait_for('the daemon stands still', lambda: state_of(daemon.pid) == 'T')
        yield cluster, daemon, ranks, worker


def test_whose_death_it_was():
    """Is told, when the worker has failed of it, in either way, before the death itself was known."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for death in ('an illegal address', 'an abort'):
        with before_a_failure() as (cluster, daemon, ranks, worker):
            # All of it has happened when the daemon looks.
            if death == 'an abort':
                os.kill(worker, signal.SIGABRT)
            os.kill(worker, signal.SIGCONT)
            wait_for('the worker has told it, or has ended', lambda: 'failpoint gpu-fatal met' in daemon.text()
                     or state_of(worker) == 'Z')
            ranks[1].kill()
            os.kill(daemon.pid, signal.SIGCONT)
            told = answers_of(ranks[0])
            assert told and all('rank 1' in text for text in told), f'{death}: {told}'
            ranks[0].call('close')
            expect_nothing_left(death, cluster)


def test_a_daemon_that_dies_before_it_hears_of_a_failure():
    """Its worker, which has told it, lets go of the streams that wait for them both."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    with before_a_failure() as (cluster, daemon, ranks, worker):
        os.kill(worker, signal.SIGCONT)
        wait_for('the worker has told it', lambda: 'failpoint gpu-fatal met' in daemon.text() and state_of(worker) == 'T')
        daemon.process.kill()
        daemon.process.wait()
        os.kill(worker, signal.SIGCONT)
        cluster.restart(0)
        for rank in ranks:
            told = answers_of(rank)
            assert any('has gone' in text or 'come back' in text for text in told), told
            rank.call('close')
        wait_for('the end of the worker', lambda: is_gone(worker))
        cluster.trainers.clear()


# -- A daemon that stands still ----------------------------------------------------------------------------------------

def test_streams_are_told_by_devices():
    """In their order, once the last part has been begun: what a trainer's stream waits for does not wait for the daemon."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    # On the devices alone, of several parts and of one; by way of the host.
    for gpu_reduce, n in ((AUTO, N), (AUTO, 100), (HOST, 100)):
        with start_cluster(BPS_FAILPOINTS='part-up=stop@1') as cluster:
            daemon, ranks = cluster.daemons[0], make_job(cluster, 2, gpu_reduce)
            data = [mine[:n] for mine in data_of(ranks)[0]]
            for rank, mine in zip(ranks, data):
                rank.call('tensor', 1, 'y', FLOAT32, n)
                rank.submit(1, 1, mine.tobytes(), red=SUM, out=n, device=ALLOC)
                rank.call('stream', 1)
            wait_for('the daemon stands still', lambda: state_of(daemon.pid) == 'T')
            for rank in ranks:
                assert rank.result(1) == np.sum(data, axis=0, dtype=np.float32).tobytes(), 'wrong values'
            assert state_of(daemon.pid) == 'T'
            os.kill(daemon.pid, signal.SIGCONT)
            for rank in ranks:
                rank.wait(1)
                rank.call('close')


CALLS = calls_in_sources()
run(globals())
