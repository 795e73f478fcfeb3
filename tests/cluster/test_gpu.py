#!/usr/bin/env python3
"""Memory on CUDA devices, on the test double: C trainers and the library, real daemons and their workers. Each result is the
same bits as the reference's, read in the order of a stream that nobody has waited for on the host.
"""
import itertools, os, random, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import reference as ref

ALLOC, MAPPED, MANAGED, POOL, PIECES, PRIVATE = KINDS = range(1, 7)
AUTO, NCCL, SWITCH, HOST, ROOTS = range(5)
N = 3001  # elements: odd, several parts of 4 KiB
SEED = 20261122


def job(cluster, layout, devices=None, env=None, **keys):
    """A job whose rank k has the device devices[k]; by default each of a node another one."""
    ranks = cluster.job(layout, join=False, env=env, **keys)
    for k, rank in enumerate(ranks):
        rank.call('device', devices[k] if devices else rank.keys['local_rank'])
    cluster.join(ranks)
    return ranks


def inputs(dtype, layout, n=N, salt=0):
    return [ref.random(dtype, n, (SEED, dtype, rank, len(layout), salt)) for rank in range(sum(layout))]


def check(what, got, want):
    if got != want:
        got, want = np.frombuffer(got, np.uint8), np.frombuffer(want, np.uint8)
        at = np.flatnonzero(got != want[:len(got)])[:1] if len(got) == len(want) else 'length'
        raise AssertionError(f'{what}: {len(got)} bytes differ from the reference ({len(want)} bytes) at byte {at}')


def finish(what, ranks, request, want):
    """want: for each rank. In the order of the stream, and then whether it was well."""
    for k, rank in enumerate(ranks):
        rank.call('stream', request)
        check(f'{what} rank {k}', rank.result(request), want[k])
        rank.wait(request)
        rank.call('free', request)


def push_pull_all(ranks, layout, rng, kind, inplace=0, n=N, cases=None, base=0):
    """Types and reductions, submitted in a random order by each rank, all under way together."""
    cases = cases or [(d, r) for d in range(FLOAT64, BOOL + 1) for r in (SUM, AVERAGE, MIN, MAX)
                      if not (d == BOOL and r == AVERAGE)]
    data = {(d, r): [ref.fitting(d, r, x) for x in inputs(d, layout, n)] for d, r in cases}
    for rank in ranks:
        for i, (dtype, _) in enumerate(cases):
            rank.call('tensor', base + i, f't.{base + i}', dtype, n)
    posts = [(k, i) for k in range(len(ranks)) for i in range(len(cases))]
    rng.shuffle(posts)
    for k, i in posts:
        dtype, reduction = cases[i]
        ranks[k].submit(base + i, base + i, data[cases[i]][k].tobytes(), op=PUSH_PULL, red=reduction, out=n, device=kind,
                        inplace=inplace, priority=rng.randrange(-5, 5))
    for i, (dtype, reduction) in enumerate(cases):
        want = ref.reduce(dtype, reduction, data[dtype, reduction], layout).tobytes()
        finish(f'{ref.NAMES[dtype]} reduction {reduction} layout {layout} kind {kind}', ranks, base + i,
               [want] * len(ranks))


@gate_tier
def test_every_type_and_reduction_in_every_layout():
    rng = random.Random(SEED)
    with Cluster(2, 1) as cluster:
        for layout in [(1,), (4,), (2, 2)]:
            ranks = job(cluster, layout, part_bytes=4096, gpu_reduce=HOST)
            push_pull_all(ranks, layout, rng, ALLOC)
            for rank in ranks:
                assert rank.call('notice') == '-'
                rank.call('close')


@gate_tier
def test_memory_of_any_kind():
    """Handed over, or copied on its device first, which is said. Sizes of one byte and more than a piece, too."""
    rng = random.Random(SEED + 1)
    cases = [(FLOAT32, SUM), (BFLOAT16, AVERAGE), (UINT8, MAX)]
    with Cluster(2) as cluster:
        for kind, inplace in itertools.product(KINDS, (0, 1)):
            ranks = job(cluster, (2, 1), part_bytes=4096, gpu_reduce=HOST)
            for base, n in enumerate((1, 33, N)):
                push_pull_all(ranks, (2, 1), rng, kind, inplace, n, cases, 10 * base)
            for rank in ranks:
                notice = rank.call('notice')
                assert (notice == '-') == (kind in (ALLOC, MAPPED)), notice
                rank.call('release')
                rank.call('close')


def test_every_operation():
    layout, n = (2, 2), 1000
    rng = np.random.default_rng(SEED)
    with Cluster(2, 1) as cluster:
        ranks = job(cluster, layout, part_bytes=4096, gpu_reduce=HOST)
        size = len(ranks)
        counts = [[int(c) for c in rng.integers(0, n, size)] for _ in range(size)]
        for r in range(size):
            counts[r][r] = max(1, counts[r][r])
        data = [rng.integers(-1000, 1000, n).astype(np.int32) for _ in ranks]
        for rank in ranks:
            for i, (name, elements) in enumerate([('b', n), ('g', -1), ('s', n), ('a', -1), ('f', n)]):
                rank.call('tensor', i, name, INT32, elements)
        for kind in (ALLOC, MAPPED, MANAGED):
            for k, rank in enumerate(ranks):
                more = {'device': kind}
                rank.submit(0, 0, data[k].tobytes() if k == 2 else None, op=BROADCAST, root=2, out=n, **more)
                mine = [counts[r][0] for r in range(size)]
                rank.submit(1, 1, data[k][:mine[k]].tobytes(), op=ALL_GATHER, counts=mine, out=sum(mine), **more)
                rank.submit(2, 2, data[k].tobytes(), op=REDUCE_SCATTER, red=SUM, counts=[1, n - 301, 300, 0],
                            out=[1, n - 301, 300, 0][k], **more)
                sent = np.concatenate([data[k][:c] for c in counts[k]])
                received = [counts[r][k] for r in range(size)]
                rank.submit(3, 3, sent.tobytes(), op=ALL_TO_ALL, counts=counts[k], recv=received, out=sum(received), **more)
            total = np.sum(data, axis=0, dtype=np.int32)
            gathered = np.concatenate([data[r][:counts[r][0]] for r in range(size)]).tobytes()
            ends = np.cumsum([1, n - 301, 300, 0])
            finish('broadcast', ranks, 0, [data[2].tobytes()] * size)
            finish('all_gather', ranks, 1, [gathered] * size)
            finish('reduce_scatter', ranks, 2, [part.tobytes() for part in np.split(total, ends[:-1])])
            finish('all_to_all', ranks, 3,
                   [np.concatenate([data[r][:counts[r][k]] for r in range(size)]).tobytes() for k in range(size)])


def test_rows():
    """By way of the host."""
    layout, width = (2, 1), 7
    rng = np.random.default_rng(SEED + 2)
    with Cluster(2) as cluster:
        ranks = job(cluster, layout)
        given = [(rng.integers(0, 50, n), rng.standard_normal((n, width)).astype(np.float32)) for n in (20, 0, 33)]
        want = ref.reduce_rows(FLOAT32, SUM, given, layout)
        for rank, (rows, values) in zip(ranks, given):
            rank.call('tensor', 0, 'table', FLOAT32, 50 * width)
            rank.submit_rows(0, 0, rows.astype(np.int64).tobytes(), values.tobytes(), width, 50, device=ALLOC)
        for rank in ranks:
            rank.call('stream', 0)
            rows, values = rank.result_rows(0)
            check('rows', rows, want[0].tobytes())
            check('values', values, want[1].tobytes())


def test_devices_are_found_by_what_they_are():
    """Whatever they are called by the trainer and the daemon; and several ranks may have one."""
    rng = random.Random(SEED + 3)
    cases = [(FLOAT32, SUM), (INT64, AVERAGE)]
    with Cluster(1) as cluster:
        for visible in ('3', '2,1'):
            ranks = job(cluster, (2,), devices=[0, 0], env={'CUDA_VISIBLE_DEVICES': visible}, gpu_reduce=HOST)
            push_pull_all(ranks, (2,), rng, ALLOC, cases=cases)
            assert ranks[0].call('notice') == '-'


def test_a_device_that_the_daemon_does_not_see():
    """Goes through host memory, and says why."""
    rng = random.Random(SEED + 4)
    os.environ['CUDA_VISIBLE_DEVICES'] = '0'
    try:
        cluster = Cluster(1)
    finally:
        del os.environ['CUDA_VISIBLE_DEVICES']
    with cluster:
        ranks = job(cluster, (2,), devices=[0, 3], gpu_reduce=HOST)
        for kind in (ALLOC, MANAGED):
            push_pull_all(ranks, (2,), rng, kind, cases=[(FLOAT32, SUM)], base=10 * kind)
        assert 'through host memory' in ranks[1].call('notice'), ranks[1].call('notice')


def test_a_daemon_without_a_driver():
    rng = random.Random(SEED + 5)
    with Cluster(1, options=['--set=gpu=off']) as cluster:
        ranks = job(cluster, (2,))
        push_pull_all(ranks, (2,), rng, ALLOC, inplace=1, cases=[(FLOAT32, SUM), (INT8, MAX)])
        assert 'has no CUDA driver' in ranks[0].call('notice')


def test_ranks_with_and_without_devices():
    """One job of both."""
    with Cluster(1) as cluster:
        ranks = job(cluster, (3,), gpu_reduce=HOST)
        data = inputs(FLOAT32, (3,))
        for k, rank in enumerate(ranks):
            rank.call('tensor', 0, 'x', FLOAT32, N)
            rank.submit(0, 0, data[k].tobytes(), red=SUM, out=N, **({'device': ALLOC} if k != 1 else {}))
        finish('mixed', ranks, 0, [ref.reduce(FLOAT32, SUM, data, (3,)).tobytes()] * 3)


def test_narrower_inputs_are_the_hosts():
    """A rank on the host may give one, beside ranks on devices; one on a device is told to convert it."""
    layout = (2, 2)
    with Cluster(2, 1) as cluster:
        ranks = job(cluster, layout, part_bytes=4096)
        wide = inputs(FLOAT32, layout)
        narrow = inputs(BFLOAT16, layout, salt=1)
        for kind in (ALLOC, MAPPED):
            data = [narrow[k] if k % 2 else wide[k] for k in range(4)]
            cast = [ref.widen(BFLOAT16, x).astype(np.float32) if k % 2 else x for k, x in enumerate(data)]
            for k, rank in enumerate(ranks):
                rank.call('tensor', 0, 't', FLOAT32, N)
                keys = {'from': BFLOAT16} if k % 2 else {'device': kind}
                rank.submit(0, 0, data[k].tobytes(), op=PUSH_PULL, red=SUM, out=N, **keys)
            finish(f'memory {kind}', ranks, 0, [ref.reduce(FLOAT32, SUM, cast, layout).tobytes()] * 4)
        try:
            ranks[0].submit(0, 0, narrow[0].tobytes(), op=PUSH_PULL, red=SUM, out=N, device=ALLOC, **{'from': BFLOAT16})
        except BpsError as error:
            assert error.errno == errno.EINVAL and 'on a device: convert it there' in str(error), error
        else:
            raise AssertionError('it was taken')


@gate_tier
def test_many_rounds_of_free_running_ranks():
    """In flight by the dozen, and memory that is freed and allocated again, often at an address that was there before."""
    layout, phases, rounds, n = (2, 1), 3, 16, 5000
    rng = random.Random(SEED + 6)
    with Cluster(2) as cluster:
        ranks = job(cluster, layout, part_bytes=4096, gpu_reduce=HOST)
        for rank in ranks:
            rank.call('tensor', 0, 'x', FLOAT32, n)
        for phase in range(phases):
            ahead, done = [0] * len(ranks), [0] * len(ranks)
            data = [inputs(FLOAT32, layout, n, salt=100 * phase + r) for r in range(rounds)]
            while min(done) < rounds:
                k = rng.choice([k for k in range(len(ranks)) if done[k] < rounds])
                if ahead[k] < rounds and ahead[k] <= min(ahead) + 9:
                    kind = rng.choice((ALLOC, MAPPED, MANAGED))
                    ranks[k].submit(ahead[k], 0, data[ahead[k]][k].tobytes(), red=SUM, out=n, device=kind)
                    ranks[k].call('stream', ahead[k])
                    ahead[k] += 1
                elif done[k] < min(ahead):
                    r = done[k]
                    # In the order of the stream, and so only once it has come to the last that was submitted.
                    if min(ahead) >= ahead[k]:
                        check(f'round {r} rank {k}', ranks[k].result(r),
                              ref.reduce(FLOAT32, SUM, data[r], layout).tobytes())
                        ranks[k].wait(r)
                        done[k] += 1
            for rank in ranks:
                for r in range(rounds):
                    rank.call('free', r)


def stored(dtype, values):
    """The bytes of small integers as a type has them, all of which represent them exactly."""
    if dtype == BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype({FLOAT64: np.float64, FLOAT32: np.float32, FLOAT16: np.float16, INT64: np.int64,
                          INT32: np.int32, INT8: np.int8, UINT8: np.uint8}[dtype]).tobytes()


@gate_tier
def test_exact_sums_by_every_plan():
    """Integers, which add up to the same in any order: NCCL where it may be, behind switches, and the CPU."""
    rng = np.random.default_rng(SEED + 7)
    for topology in ('nvlink', 'switch:2', 'nvlink+switch:2', 'system'):
        os.environ['FAKECUDA_TOPOLOGY'] = topology
        try:
            with Cluster(2) as cluster:
                plans, layouts = (AUTO, NCCL, SWITCH, HOST, ROOTS), [(4,), (4, 4)]
                for plan, layout in some(itertools.product(plans, layouts), zip(plans, itertools.cycle(layouts))):
                    # Those of BYTEPS_REDUCE_ROOTS=1,2 with NCCL, and whatever suits the topology with ROOTS.
                    roots = {'gpu_roots': 6} if plan == NCCL else {}
                    ranks = job(cluster, layout, part_bytes=8192, gpu_reduce=plan, **roots)
                    for i, (dtype, n) in enumerate(((FLOAT32, 1), (FLOAT16, 7), (BFLOAT16, 4099), (FLOAT32, 4099))):
                        data = [rng.integers(-30, 30, n).astype(np.float32) for _ in ranks]
                        want = stored(dtype, np.sum(data, axis=0, dtype=np.float32))
                        for k, rank in enumerate(ranks):
                            rank.call('tensor', i, f'x{i}', dtype, n)
                            rank.submit(i, i, stored(dtype, data[k]), red=SUM, out=n, device=ALLOC)
                        finish(f'{topology} plan {plan} {layout} {n}', ranks, i, [want] * len(ranks))
                    largest = np.full(4099, 65504, np.float16).tobytes()
                    for rank in ranks:
                        rank.call('tensor', 9, 'half', FLOAT16, 4099)
                        rank.submit(9, 9, largest, red=AVERAGE, out=4099, device=ALLOC)
                    finish(f'{topology} plan {plan} {layout} average', ranks, 9, [largest] * len(ranks))
                    if plan == HOST:
                        # Any values, by the way that has the bits of memory of the host.
                        push_pull_all(ranks, layout, random.Random(SEED), MAPPED, n=4099, base=10,
                                      cases=[(FLOAT16, SUM), (FLOAT16, AVERAGE), (BFLOAT16, AVERAGE), (FLOAT32, AVERAGE)])
                    for rank in ranks:
                        rank.call('close')
        finally:
            del os.environ['FAKECUDA_TOPOLOGY']


@gate_tier
def test_every_type_that_nccl_adds():
    rng = np.random.default_rng(SEED + 8)
    with Cluster(2) as cluster:
        ranks = job(cluster, (2, 2), part_bytes=4096)
        for i, dtype in enumerate((FLOAT64, FLOAT32, FLOAT16, BFLOAT16, INT64, INT32, INT8, UINT8)):
            data = [rng.integers(0, 30, N).astype(np.float32) for _ in ranks]
            for k, rank in enumerate(ranks):
                rank.call('tensor', i, f'x{i}', dtype, N)
                rank.submit(i, i, stored(dtype, data[k]), red=SUM, out=N, device=ALLOC)
            want = stored(dtype, np.sum(data, axis=0, dtype=np.float32))
            finish(f'type {dtype}', ranks, i, [want] * len(ranks))


def test_a_part_that_is_larger_than_staging():
    with Cluster(1, options=['--set=gpu_staging=1M']) as cluster:
        [rank] = job(cluster, (1,), part_bytes=4 << 20)
        n = 2 << 20
        rank.call('tensor', 0, 'x', UINT8, n)
        rank.call('attend')
        rank.submit(0, 0, bytes(n), red=SUM, out=n, device=ALLOC)
        assert_named(rank.ended(0), 'raise gpu_staging, or ask for smaller parts')


def assert_named(error, text):
    assert text in error.text, error


def test_a_trainer_is_killed():
    """The others hear of it, their streams go on, and the next job runs."""
    with Cluster(2) as cluster:
        for _ in range(2):
            ranks = job(cluster, (2, 2), gpu_reduce=HOST)
            for rank in ranks:
                rank.call('attend')
                rank.call('tensor', 0, 'x', FLOAT32, N)
            for rank in ranks[:3]:
                rank.submit(0, 0, bytes(4 * N), red=SUM, out=N, device=ALLOC)
                rank.call('stream', 0)
            ranks[3].kill()
            for rank in ranks[:3]:
                rank.result(0)  # the stream has come to its end
                assert_named(rank.ended(0), 'rank 3')
                rank.call('free', 0)
                rank.call('close')
        ranks = job(cluster, (2, 2), gpu_reduce=HOST)
        push_pull_all(ranks, (2, 2), random.Random(SEED), ALLOC, cases=[(FLOAT32, SUM)])


def test_the_daemon_is_killed():
    """Streams that wait for it go on, and the next call says so."""
    with Cluster(1) as cluster:
        ranks = job(cluster, (2,), gpu_reduce=HOST)
        for rank in ranks:
            rank.call('attend')
            rank.call('tensor', 0, 'x', FLOAT32, N)
        ranks[0].submit(0, 0, bytes(4 * N), red=SUM, out=N, device=ALLOC)
        ranks[0].call('stream', 0)
        cluster.daemons[0].kill()
        # The trainer sees it between commands; then its stream goes on, which is what it waits for now.
        wait_for('the end of the request', lambda: ranks[0].call('poll', 0) == '1')
        ranks[0].result(0)
        assert ranks[0].ended(0).errno == errno.ESHUTDOWN
        cluster.daemons.clear()


@gate_tier
def test_jobs_that_do_not_wait_for_all():
    """accumulate and a push_pull with a quorum: what is late, and what is kept, is the same as for memory of the host."""
    n = 3000
    with Cluster(2, 1) as cluster:
        ranks = job(cluster, (2, 1), part_bytes=4096, **{'async': 1, 'quorum': 2})
        a, b, late = ranks
        for rank in ranks:
            for i in range(2):
                rank.call('tensor', i, f't.{i}', INT64, n)

        def begin(rank, request, tensor, value, **keys):
            rank.submit(request, tensor, np.full(n, value, np.int64).tobytes(), out=n, device=ALLOC, **keys)

        def taken(rank, request):
            rank.call('stream', request)
            values = set(np.frombuffer(rank.result(request), np.int64).tolist())
            rank.wait(request)
            assert len(values) == 1, values
            return values.pop()
        for r in range(3):
            begin(a, r, 0, 1, op=ACCUMULATE)
            assert taken(a, r) == r + 1
        for rank in (b, late):
            begin(rank, 0, 0, 10, op=ACCUMULATE)
        assert {taken(b, 0), taken(late, 0)} <= {13, 23}
        for rank in (a, b):
            begin(rank, 10, 1, 1, op=PUSH_PULL)
        assert taken(a, 10) == taken(b, 10) == 2
        begin(late, 10, 1, 100, op=PUSH_PULL)
        assert taken(late, 10) == 2
        # A server of both tensors' parts dies: what was late is kept by the agent of its rank, and so are the sums.
        cluster.daemons[2].kill()
        cluster.restart(2)
        begin(a, 3, 0, 1, op=ACCUMULATE)
        assert taken(a, 3) == 24
        for rank in ranks:
            begin(rank, 11, 1, 1000, op=PUSH_PULL, all=1)
        for rank in ranks:
            assert taken(rank, 11) == 3100


run(globals())
