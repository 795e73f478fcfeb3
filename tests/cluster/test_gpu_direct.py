#!/usr/bin/env python3
"""Memory of GPUs that RDMA devices read and write themselves, on both test doubles: the bits are those of the way through the
host, no processor touches the bytes (where they are in a daemon there is nothing mapped), and where it cannot be it is said.
"""
import os, re, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import reference as ref

ALLOC, MAPPED, MANAGED = 1, 2, 3
AUTO, HOST = 0, 3
N = 70001  # elements: odd, several parts of 64 KiB
PART = 64 << 10
SEED = 20261122
DOUBLE = os.path.join(BUILD, 'tests', 'fakeverbs')
FAKECUDA = os.path.join(BUILD, 'tests', 'fakecuda')


class DirectCluster(Cluster):
    """Agents n_nodes, one server that is none. env: for agents, whose workers inherit it, or of each."""

    def __init__(self, n_nodes=2, options=(), env=None, transport='rdma', n_spare=1):
        self.env, self.transport = env or {}, transport
        super().__init__(n_nodes, n_spare, colocated=False, options=options)

    def env_of(self, i):
        if i >= self.n_nodes:
            return {}
        return self.env[i] if isinstance(self.env, tuple) else self.env

    double = DOUBLE

    def rdma(self, i):
        env = {'LD_LIBRARY_PATH': f'{self.double}:{FAKECUDA}', 'LD_PRELOAD': preload(os.path.join(self.double, 'librdmacm.so.1')),
               'FAKE_FABRIC': self.folder, **self.env_of(i)}
        return [f'--transport={self.transport}', f'--rdma-devices=fake{i % 2}', '--hello-timeout=60s',
                '--peer-timeout=60s'], env


def job(cluster, layout, devices=None, **keys):
    ranks = cluster.job(layout, join=False, **{'part_bytes': PART, **keys})
    for k, rank in enumerate(ranks):
        rank.call('device', devices[k] if devices else rank.keys['local_rank'])
    cluster.join(ranks)
    rng = np.random.default_rng(SEED)
    # Sums of which are exact, in whatever order.
    data = [rng.integers(-1000, 1000, N).astype(np.float32) for _ in ranks]
    for rank in ranks:
        rank.call('tensor', 0, 'x', FLOAT32, N)
    return ranks, data


def turn(ranks, data, request, kind=ALLOC, inplace=0, n=N):
    """One round, of which all have the sum."""
    for rank, mine in zip(ranks, data):
        rank.submit(request, 0, (mine * (request + 1)).tobytes(), red=SUM, out=n, device=kind, inplace=inplace)
    want = (np.sum(data, axis=0, dtype=np.float32) * (request + 1)).tobytes()
    for k, rank in enumerate(ranks):
        rank.call('stream', request)
        got = rank.result(request)
        assert got == want, f'round {request}, rank {k}: other bits'
        rank.wait(request)
        rank.call('free', request)


def metric(daemon, name):
    return daemon.ctl('metrics').get(name, 0)


def way(cluster, node=0):
    """How bytes go between GPUs and servers, by bpsctl."""
    [job] = [job for job in cluster.daemons[node].ctl('jobs')['jobs'] if job['state'] == 'running' and job['n_local']]
    return job['gpu']


@gate_tier
def test_pushed_and_pulled_without_the_host():
    """Nothing passes through staging, nothing is copied, and memory is registered once."""
    with DirectCluster(options=['--resume=off']) as cluster:
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)
        registered = [metric(daemon, 'bps_rdma_registrations_total') for daemon in cluster.daemons[:2]]
        for r in range(1, 6):
            turn(ranks, data, r, kind=(ALLOC, MAPPED)[r % 2], inplace=r % 3 == 0)
        for node, daemon in enumerate(cluster.daemons[:2]):
            assert way(cluster, node) == 'directly', way(cluster, node)
            assert metric(daemon, 'bps_gpu_direct_bytes_total') == 6 * 2 * 4 * N
            assert metric(daemon, 'bps_gpu_staged_bytes_total') == 0
            # Small messages alone: the last part is longer than they are.
            assert metric(daemon, 'bps_rdma_copied_bytes_total') == 0, metric(daemon, 'bps_rdma_copied_bytes_total')
            assert metric(daemon, 'bps_rdma_registrations_total') == registered[node]
            assert daemon.text().count('GPU memory goes to servers directly') == 1
        for rank in ranks:
            rank.call('close')


@gate_tier
def test_a_further_device_is_no_news():
    """Unless its memory goes another way than that of those before."""
    fault = {'FAKECUDA_FAIL': 'cuMemGetHandleForAddressRange:3:801'}
    with DirectCluster(options=['--resume=off'], env=({}, fault)) as cluster:
        ranks, data = job(cluster, (1, 1))
        for device in range(4):
            for rank in ranks:
                rank.call('device', device)
            turn(ranks, data, device)
        for node, ways in enumerate((['directly'], ['directly', 'directly, by 2 of 3 GPUs: .*'])):
            said = re.findall('GPU memory goes to servers (.*)', cluster.daemons[node].text())
            assert len(said) == len(ways) and all(map(re.fullmatch, ways, said)), said
        for rank in ranks:
            rank.call('close')


@gate_tier
def test_results_that_are_kept_go_by_the_host():
    """With resume: pushed directly, and back by way of the ledger."""
    with DirectCluster() as cluster:
        ranks, data = job(cluster, (1, 1))
        for r in range(4):
            turn(ranks, data, r, inplace=r % 2)
        for daemon in cluster.daemons[:2]:
            assert metric(daemon, 'bps_gpu_direct_bytes_total') == 4 * 4 * N
            assert metric(daemon, 'bps_gpu_staged_bytes_total') == 4 * 4 * N


@gate_tier
def test_groups():
    """Which NCCL reduces to their roots, each a slice: one of them, another for each part, has them all for the server."""
    unordered = {'FAKECUDA_RDMA': 'unordered'}
    for n, roots, ordering in some(((2, 2, {}), (2, 0, {}), (4, 0, {}), (4, 0b0110, {}), (2, 0, unordered)),
                                   ((4, 0b0110, {}), (2, 0, unordered))):
        n_roots = bin(roots).count('1') or n
        with DirectCluster(options=['--resume=off'], env={'FAKECUDA_TRACE': '1', **ordering}) as cluster:
            ranks, data = job(cluster, (n, n), gpu_reduce=AUTO, gpu_roots=roots)
            for r in range(3):
                turn(ranks, data, r, kind=(ALLOC, MAPPED)[r % 2], inplace=r % 2)
            for node, daemon in enumerate(cluster.daemons[:2]):
                assert way(cluster, node) == 'directly', way(cluster, node)
                assert metric(daemon, 'bps_gpu_staged_bytes_total') == 0
                assert metric(daemon, 'bps_gpu_direct_bytes_total') == 3 * 2 * 4 * N
                text = daemon.text()
                assert text.count('GPU memory goes to servers directly') == 1, text
                # What is in order for the GPU that has it is not for the others, which read their slices there: once for all.
                n_parts = 3 * -(-4 * N // PART) if ordering or n_roots > 1 else 0
                assert text.count(': cuFlushGPUDirectRDMAWrites') == n_parts
            for rank in ranks:
                rank.call('close')


@gate_tier
def test_groups_have_the_bits_of_the_way_through_the_host():
    """Of sums that go by their order; also where some parts go the one way and some the other."""
    rng = np.random.default_rng(SEED)
    data = [(rng.standard_normal(N) * 10.0 ** rng.integers(-3, 4, N)).astype(np.float32) for _ in range(8)]
    results = []
    for options, expected in ((['--set=gpu_direct=off'], (False, True)), ([], (True, False)),
                              (['--set=gpu_direct_staging=1M'], (True, True))):
        with DirectCluster(options=['--resume=off', *options]) as cluster:
            ranks, _ = job(cluster, (4, 4), gpu_reduce=AUTO, part_bytes=1 << 20)
            for rank in ranks:
                rank.call('tensor', 1, 'large', UINT8, 8 << 20)
            for rank, mine in zip(ranks, data):
                rank.submit(0, 1, bytes(8 << 20), red=SUM, out=8 << 20, device=ALLOC)
                rank.submit(1, 0, mine.tobytes(), red=SUM, out=N, device=ALLOC)
            for rank in ranks:
                for request in range(2):
                    rank.call('stream', request)
                results.append(rank.result(1))
                for request in range(2):
                    rank.wait(request)
            for daemon in cluster.daemons[:2]:
                direct, staged = (metric(daemon, f'bps_gpu_{way}_bytes_total') for way in ('direct', 'staged'))
                assert (direct > 0, staged > 0) == expected, f'{options}: {direct} directly, {staged} by the host'
    assert len(set(results)) == 1


@gate_tier
def test_a_root_that_others_cannot_reach():
    """Parts go by those that can be reached; by the host when there are none, and it is said."""
    for env, staged, words in (
            ({'FAKECUDA_FAIL': 'cuCtxEnablePeerAccess:1:217'}, 0,
             'directly, by 1 of 2 GPUs: .*device 1 .* cannot use its memory: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED'),
            ({'FAKECUDA_FAIL': 'cuCtxEnablePeerAccess:0:217'}, 2 * 2 * 4 * N,
             'by way of the host: .* cannot use its memory'),
            ({'FAKECUDA_FAIL': 'cuDeviceCanAccessPeer:0:1'}, 2 * 2 * 4 * N, 'by way of the host: .* cannot use its memory')):
        with DirectCluster(options=['--resume=off'], env=(env, {})) as cluster:
            ranks, data = job(cluster, (2, 2), gpu_reduce=AUTO)
            for r in range(2):
                turn(ranks, data, r, inplace=r % 2)
            assert re.match(words, way(cluster)), way(cluster)
            # Once, whatever became of which.
            [said] = re.findall('GPU memory goes to servers (.*)', cluster.daemons[0].text())
            assert said == way(cluster), said
            assert metric(cluster.daemons[0], 'bps_gpu_staged_bytes_total') == staged


@gate_tier
def test_where_it_cannot_be_it_is_said():
    """On each node for another reason."""
    for options, envs, words in (
            (['--set=gpu_direct=off'], ({}, {}), ('gpu_direct = off', 'gpu_direct = off')),
            ([], ({'FAKECUDA_RDMA': 'none'}, {'FAKECUDA_FAIL': 'cuMemGetHandleForAddressRange:0:801'}),
             ('the driver has no dma-bufs of its memory', 'cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED')),
            ([], ({'FAKECUDA_FAIL': 'cuMemAlloc:0:2'}, {'FAKE_FAIL': 'ibv_reg_dmabuf_mr:95'}),
             ('cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY', 'its dma-buf cannot be registered: Operation not supported'))):
        with DirectCluster(options=['--resume=off', *options], env=envs) as cluster:
            ranks, data = job(cluster, (1, 1))
            for r in range(2):
                turn(ranks, data, r)
            for node, daemon in enumerate(cluster.daemons[:2]):
                assert re.match('by way of the host: .*' + words[node], way(cluster, node)), way(cluster, node)
                assert metric(daemon, 'bps_gpu_direct_bytes_total') == 0
                assert metric(daemon, 'bps_gpu_staged_bytes_total') == 2 * 2 * 4 * N
                said = daemon.text().count('GPU memory goes to servers by way of the host')
                assert said == (not options), daemon.text()


class OldCluster(DirectCluster):
    """Whose rdma-core has no dma-bufs."""
    double = os.path.join(DOUBLE, 'old')


def test_an_rdma_core_without_dma_bufs():
    """Is known from the start, said once whatever jobs there are, and nothing of a device is taken for it."""
    with OldCluster(options=['--resume=off'], env={'FAKECUDA_TRACE': '1'}) as cluster:
        words = 'by way of the host: the rdma-core here has no ibv_reg_dmabuf_mr, 34 has it'
        for _ in range(2):
            ranks, data = job(cluster, (1, 1))
            turn(ranks, data, 0)
            for node in range(2):
                assert way(cluster, node) == words, way(cluster, node)
            for rank in ranks:
                rank.call('close')
            wait_for('the end of the job', lambda: not any(daemon.ctl('jobs')['jobs'] for daemon in cluster.daemons[:2]))
        for daemon in cluster.daemons[:2]:
            assert metric(daemon, 'bps_gpu_staged_bytes_total') == 2 * 2 * 4 * N
            assert daemon.text().count(words) == 1, daemon.text()
            assert 'cuMemGetHandleForAddressRange' not in daemon.text()
            # Parts go by RDMA all the same, from staging of the host.
            assert metric(daemon, 'bps_rdma_bytes_total') > 0


def test_calls_of_the_worker_that_fail():
    """Those that it makes for this alone, beside the ones above: without them the way is another, or the job ends in words."""
    for call, more, outcome in (
            ('cuDeviceGetAttribute', {}, 'by way of the host: .*the driver has no dma-bufs of its memory'),
            ('cuPointerSetAttribute', {}, 'directly'),
            ('cuMemcpyDtoDAsync', {}, None),
            ('cuFlushGPUDirectRDMAWrites', {'FAKECUDA_RDMA': 'unordered'}, None),
            ('cuMemFree', {'FAKE_FAIL': 'ibv_reg_dmabuf_mr:95'}, None)):
        with DirectCluster(options=['--resume=off'], env=({'FAKECUDA_FAIL': f'{call}:0:1', **more}, {})) as cluster:
            ranks, data = job(cluster, (1, 1))
            if outcome:
                turn(ranks, data, 0)
                assert re.match(outcome, way(cluster)), f'{call}: {way(cluster)}'
                continue
            for rank in ranks:
                rank.call('attend')
            told = []
            for rank, mine in zip(ranks, data):
                # The job may be over by now, as some calls come with the first of them.
                try:
                    rank.submit(0, 0, mine.tobytes(), red=SUM, out=N, device=ALLOC)
                except BpsError as error:
                    told.append(error.text)
            if not told:
                told.append(ranks[0].ended(0).text)
            assert f'{call} on device 0' in told[0], f'{call}: {told}'
            for rank in ranks:
                rank.call('close')


def test_writes_that_are_not_in_order_are_flushed():
    with DirectCluster(options=['--resume=off'], env={'FAKECUDA_RDMA': 'unordered', 'FAKECUDA_TRACE': '1'}) as cluster:
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)
        for daemon in cluster.daemons[:2]:
            assert metric(daemon, 'bps_gpu_staged_bytes_total') == 0
            # Once for each part that comes up.
            n_parts = -(-4 * N // PART)
            assert daemon.text().count(': cuFlushGPUDirectRDMAWrites') == n_parts


def test_more_than_there_is_room_for():
    """What does not fit goes by the host; nobody waits for anybody."""
    with DirectCluster(options=['--resume=off', '--set=gpu_direct_staging=1M']) as cluster:
        ranks = cluster.job((1, 1), join=False, part_bytes=1 << 20)
        for rank in ranks:
            rank.call('device', 0)
        cluster.join(ranks)
        n = 4 << 20
        for rank in ranks:
            rank.call('tensor', 0, 'x', UINT8, n)
        data = [np.full(n, k + 1, np.uint8) for k in range(2)]
        for r in range(2):
            for rank, mine in zip(ranks, data):
                rank.submit(r, 0, mine.tobytes(), red=SUM, out=n, device=ALLOC)
            for rank in ranks:
                rank.call('stream', r)
                assert rank.result(r) == bytes([3]) * n
                rank.wait(r)
        for daemon in cluster.daemons[:2]:
            assert metric(daemon, 'bps_gpu_direct_bytes_total') + metric(daemon, 'bps_gpu_staged_bytes_total') == 2 * 2 * n
            assert metric(daemon, 'bps_gpu_direct_bytes_total') > 0


@gate_tier
def test_a_connection_breaks():
    """At any work request: what was under way is brought to the host, and goes on by TCP, with the same bits."""
    for keep, nth, layout in some((('off', 3, (1, 1)), ('off', 14, (1, 1)), ('on', 9, (1, 1)), ('on', 22, (1, 1)), ('off', 5, (2, 2)),
                                   ('on', 9, (2, 2))), (('off', 3, (1, 1)), ('on', 22, (1, 1)), ('on', 9, (2, 2)))):
        env = {'FAKE_FAIL_WORK': f'12:{nth}'}  # IBV_WC_RETRY_EXC_ERR
        with DirectCluster(options=['--resume=' + keep], env=env, transport='auto') as cluster:
            ranks, data = job(cluster, layout)
            # The first round may be over before there is a connection by RDMA.
            wait_for('rdma', lambda: all('connected to' in daemon.text() for daemon in cluster.daemons[:2]))
            for r in range(4):
                turn(ranks, data, r, inplace=r % 2)
            for daemon in cluster.daemons[:2]:
                assert metric(daemon, 'bps_rdma_connections_broken_total')
                # What was under way; with resume all results.
                assert metric(daemon, 'bps_gpu_staged_bytes_total') >= (4 * 4 * N if keep == 'on' else 1)


def test_the_server_is_killed():
    with DirectCluster() as cluster:
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)
        for r in range(1, 4):
            for rank, mine in zip(ranks, data):
                rank.submit(r, 0, (mine * (r + 1)).tobytes(), red=SUM, out=N, device=ALLOC)
            cluster.daemons[2].kill()
            cluster.restart(2)
            want = (np.sum(data, axis=0, dtype=np.float32) * (r + 1)).tobytes()
            for rank in ranks:
                rank.call('stream', r)
                assert rank.result(r) == want, f'round {r}: other bits'
                rank.wait(r)


def worker_pid(daemon):
    return int(re.findall(r'GPU worker: pid (\d+)', daemon.text())[-1])


def test_a_worker_is_killed():
    """In the middle: its job ends in words, nothing stays registered, and the next one goes the same way."""
    with DirectCluster(options=['--resume=off']) as cluster:
        daemon = cluster.daemons[0]
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)
        regions = metric(daemon, 'bps_rdma_regions')
        for rank in ranks:
            rank.call('attend')
        ranks[0].submit(1, 0, data[0].tobytes(), red=SUM, out=N, device=ALLOC)  # alone: the server waits
        os.kill(worker_pid(daemon), signal.SIGKILL)
        error = ranks[0].ended(1)
        assert 'GPU worker' in error.text, error.text
        for rank in ranks:
            rank.call('close')
        wait_for('the end of its memory', lambda: metric(daemon, 'bps_rdma_regions') < regions)
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)
        assert way(cluster) == 'directly', way(cluster)
        assert metric(daemon, 'bps_rdma_regions') == regions


def need_failpoints():
    with open(os.path.join(BUILD, 'daemon', 'bps-daemon'), 'rb') as binary:
        if b'BPS_FAILPOINTS' not in binary.read():
            raise Skip('built without failpoints')


def test_a_worker_is_killed_while_it_brings_parts_to_the_host():
    """The connection has broken, and now the worker goes: its job ends, in words, and the next one goes by TCP."""
    need_failpoints()
    for n in (1, 2):
        spill_and_die(n)


def test_no_memory_for_a_root():
    """The daemon hears of it while it asks for one after another: the job ends in words, and the next one goes as ever."""
    need_failpoints()
    env = ({'BPS_FAILPOINTS': 'gpu-arena=error'}, {})
    with DirectCluster(options=['--resume=off'], env=env) as cluster:
        ranks, data = job(cluster, (2, 2), gpu_reduce=AUTO)
        for rank in ranks:
            rank.call('attend')
        for k in range(2):
            ranks[k].submit(0, 0, data[k].tobytes(), red=SUM, out=N, device=ALLOC)
        error = ranks[0].ended(0)
        assert 'no memory for what is under way' in error.text, error.text
        for rank in ranks:
            rank.call('close')
        ranks, data = job(cluster, (2, 2), gpu_reduce=AUTO)
        turn(ranks, data, 0)
        assert way(cluster) == 'directly', way(cluster)


def spill_and_die(n):
    env = ({'FAKE_FAIL_WORK': '12:5', 'BPS_FAILPOINTS': 'gpu-spill=kill'}, {})
    with DirectCluster(options=['--resume=off'], env=env, transport='auto') as cluster:
        ranks, data = job(cluster, (n, n))
        wait_for('rdma', lambda: all('connected to' in daemon.text() for daemon in cluster.daemons[:2]))
        for rank in ranks:
            rank.call('attend')
        for k in range(n):
            ranks[k].submit(0, 0, data[k].tobytes(), red=SUM, out=N, device=ALLOC)
        error = ranks[0].ended(0)
        assert 'GPU worker' in error.text, error.text
        for rank in ranks:
            rank.call('close')
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)


def break_rdma(cluster):
    """The next work request of node 0, whose environment names the file, fails: IBV_WC_RETRY_EXC_ERR."""
    file = os.path.join(cluster.folder, 'fail-work')
    with open(file + '.new', 'w') as out:
        out.write('12:1')
    os.rename(file + '.new', file)


class BreakableCluster(DirectCluster):
    """break_rdma() has an effect, and so have faults of workers in fail-cuda."""

    def env_of(self, i):
        return {} if i else {'FAKE_FAIL_WORK_FILE': os.path.join(self.folder, 'fail-work'),
                             'FAKECUDA_FAIL_FILE': os.path.join(self.folder, 'fail-cuda')}


def expect_that_all_goes_on(cluster, ranks):
    """Their job ends, and nothing of it stays; the next one goes by TCP."""
    for rank in ranks:
        rank.call('close')
    wait_for('the end of the job', lambda: not cluster.daemons[0].ctl('jobs')['jobs'])
    ranks, data = job(cluster, (1, 1))
    turn(ranks, data, 0)


def test_a_worker_is_killed_and_then_the_connection_breaks():
    """What is at the server has no worker any more that could bring it to the host."""
    with BreakableCluster(options=['--resume=off'], transport='auto') as cluster:
        daemon, server = cluster.daemons[0], cluster.daemons[2]
        ranks, data = job(cluster, (1, 1))
        others = cluster.job((1, 1), part_bytes=PART)
        for rank in others:
            rank.call('tensor', 0, 'y', FLOAT32, N)
        wait_for('rdma', lambda: all('connected to' in each.text() for each in cluster.daemons[:2]))
        turn(ranks, data, 0)
        copied = metric(daemon, 'bps_gpu_direct_bytes_total')
        for rank in ranks:
            rank.call('attend')
        ranks[0].submit(1, 0, data[0].tobytes(), red=SUM, out=N, device=ALLOC)  # alone: the server waits
        wait_for('all on its way', lambda: metric(daemon, 'bps_gpu_direct_bytes_total') == copied + 4 * N)
        # What the job's end would make of it does not come back.
        server.signal(signal.SIGSTOP)
        pid = worker_pid(daemon)
        os.kill(pid, signal.SIGKILL)
        wait_for('the end of the worker', lambda: not os.path.exists(f'/proc/{pid}'))
        # And what follows from it, in the daemon's own time.
        daemon.ctl('metrics')
        break_rdma(cluster)
        for rank, mine in zip(others, data):
            rank.submit(0, 0, mine.tobytes(), red=SUM, out=N)
        wait_for('the break', lambda: not os.path.exists(os.path.join(cluster.folder, 'fail-work')))
        daemon.ctl('metrics')
        server.signal(signal.SIGCONT)
        want = np.sum(data, axis=0, dtype=np.float32).tobytes()
        for rank in others:
            rank.wait(0)
            assert rank.result(0) == want
            rank.call('close')
        assert metric(daemon, 'bps_rdma_connections_broken_total')
        error = ranks[0].ended(1)
        assert 'GPU worker' in error.text, error.text
        expect_that_all_goes_on(cluster, ranks)


def test_a_worker_is_killed_while_its_parts_wait_for_staging():
    """On their way to the host, when all staging is another job's; they leave no more when it is theirs."""
    staging = 1 << 20
    with BreakableCluster(options=['--resume=off', '--set=gpu_staging=1M', '--set=gpu_timeout=600s'],
                          transport='auto') as cluster:
        daemon = cluster.daemons[0]
        ranks, data = job(cluster, (1, 1))
        wait_for('rdma', lambda: all('connected to' in each.text() for each in cluster.daemons[:2]))
        turn(ranks, data, 0)
        pid = worker_pid(daemon)
        # On node 0 alone, by the host; its worker comes to its first copy and no further.
        with open(os.path.join(cluster.folder, 'fail-cuda'), 'w') as out:
            out.write('@copy:1:hang')
        others = cluster.job((2,), join=False, part_bytes=PART, gpu_reduce=HOST)
        for rank in others:
            rank.call('device', rank.keys['local_rank'])
            rank.call('attend')
        cluster.join(others)
        for rank in others:
            rank.call('tensor', 0, 'y', UINT8, 2 * staging)
        staged = metric(daemon, 'bps_gpu_staged_bytes_total')
        for rank in others:
            rank.submit(0, 0, bytes(2 * staging), red=SUM, out=2 * staging, device=ALLOC)
        wait_for('no staging left', lambda: metric(daemon, 'bps_gpu_staged_bytes_total') == staged + staging)
        sent = daemon.ctl('status')['bytes_out']
        for rank in ranks:
            rank.call('attend')
        break_rdma(cluster)
        ranks[0].submit(1, 0, data[0].tobytes(), red=SUM, out=N, device=ALLOC)
        wait_for('the break', lambda: metric(daemon, 'bps_rdma_connections_broken_total'))
        os.kill(pid, signal.SIGKILL)
        wait_for('the end of the worker', lambda: not os.path.exists(f'/proc/{pid}'))
        os.kill(worker_pid(daemon), signal.SIGKILL)
        for rank in others:
            error = rank.ended(0)
            assert 'GPU worker' in error.text, error.text
            rank.call('close')
        error = ranks[0].ended(1)
        assert 'GPU worker' in error.text, error.text
        # Words, and no part.
        sent = daemon.ctl('status')['bytes_out'] - sent
        assert sent < PART, f'{sent} bytes of a job that had failed left the node'
        expect_that_all_goes_on(cluster, ranks)


def test_the_server_is_killed_of_a_job_that_does_not_outlive_it():
    """Results would have come to the GPU: what is under way ends, in words, and its memory can be used again."""
    with DirectCluster(options=['--resume=off']) as cluster:
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)
        for rank in ranks:
            rank.call('attend')
        ranks[0].submit(1, 0, data[0].tobytes(), red=SUM, out=N, device=ALLOC)  # alone: the server waits
        cluster.daemons[2].kill()
        error = ranks[0].ended(1)
        assert 's0' in error.text, error.text
        for rank in ranks:
            rank.call('close')
        cluster.restart(2)
        ranks, data = job(cluster, (1, 1))
        turn(ranks, data, 0)
        assert way(cluster) == 'directly', way(cluster)


def test_a_job_ends_and_its_memory_with_it():
    with DirectCluster(options=['--resume=off']) as cluster:
        daemon = cluster.daemons[0]
        for _ in range(2):
            ranks, data = job(cluster, (1, 1))
            turn(ranks, data, 0)
            regions, pid = metric(daemon, 'bps_rdma_regions'), worker_pid(daemon)
            for rank in ranks:
                rank.call('close')
            wait_for('the end of its memory', lambda: metric(daemon, 'bps_rdma_regions') == regions - 1)
            wait_for('the end of its worker', lambda: not os.path.exists(f'/proc/{pid}'))


run(globals())
