#!/usr/bin/env python3
"""Promise 1: results are the same bits, whatever arrives when, however it is cut, wherever it is summed."""
import itertools, os, random, re, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import reference as ref

LAYOUTS = [(1,), (4,), (2, 2), (1, 1, 1, 1), (2, 2, 2)]
N = 3001  # elements: odd, several parts of 4 KiB
SEED = 20261121


def inputs(dtype, layout, n=N, salt=0):
    return [ref.random(dtype, n, (SEED, dtype, rank, len(layout), salt)) for rank in range(sum(layout))]


def supported(dtype, reduction):
    return not (dtype == BOOL and reduction == AVERAGE)


def check(what, got, want):
    if got != want:
        got, want = np.frombuffer(got, np.uint8), np.frombuffer(want, np.uint8)
        at = np.flatnonzero(got != want[:len(got)])[:1] if len(got) == len(want) else 'length'
        raise AssertionError(f'{what}: {len(got)} bytes differ from the reference ({len(want)} bytes) at byte {at}')


def push_pull_all(ranks, layout, rng, salt=0, shared=1, inplace=0, base=0):
    """Every type and reduction, submitted in a random order by each rank. Returns all results."""
    cases = [(d, r) for d in range(FLOAT64, BOOL + 1) for r in (SUM, AVERAGE, MIN, MAX) if supported(d, r)]
    data = {(d, r): [ref.fitting(d, r, x) for x in inputs(d, layout, salt=salt)] for d, r in cases}
    for rank in ranks:
        for i, (dtype, reduction) in enumerate(cases):
            rank.call('tensor', base + i, f't.{base + i}', dtype, N)
    posts = [(k, i) for k in range(len(ranks)) for i in range(len(cases))]
    rng.shuffle(posts)
    for k, i in posts:
        dtype, reduction = cases[i]
        ranks[k].submit(base + i, base + i, data[cases[i]][k].tobytes(), op=PUSH_PULL, red=reduction, out=N, shared=shared,
                        inplace=inplace, priority=rng.randrange(-5, 5))
    results = {}
    for i, (dtype, reduction) in enumerate(cases):
        want = ref.reduce(dtype, reduction, data[dtype, reduction], layout).tobytes()
        for k, rank in enumerate(ranks):
            rank.wait(base + i)
            got = rank.result(base + i)
            check(f'{ref.NAMES[dtype]} reduction {reduction} layout {layout} rank {k}', got, want)
            rank.call('free', base + i)
        results[dtype, reduction] = want
    return results


@gate_tier
def test_every_type_and_reduction_in_every_layout():
    rng = random.Random(SEED)
    with Cluster(4, 1) as cluster:
        for layout in LAYOUTS:
            ranks = cluster.job(layout, part_bytes=4096)
            push_pull_all(ranks, layout, rng)
            for rank in ranks:
                rank.call('close')


@gate_tier
def test_memory_of_any_kind():
    rng = random.Random(SEED + 1)
    with Cluster(2, 1) as cluster:
        for shared, inplace in itertools.product((0, 1), (0, 1)):
            for layout in [(2,), (2, 1)]:
                ranks = cluster.job(layout, part_bytes=4096)
                push_pull_all(ranks, layout, rng, shared=shared, inplace=inplace)
                for rank in ranks:
                    rank.call('close')


@gate_tier
def test_what_is_widened_is_what_was_cast_before():
    """Of one job some ranks give float32, others narrower types, and the same ranks the same numbers as float32."""
    def alike(rank):
        return BFLOAT16

    def mixed(rank):
        return (FLOAT16, FLOAT32, BFLOAT16)[rank % 3]

    with Cluster(4, 1) as cluster:
        for layout in LAYOUTS:
            ranks = cluster.job(layout, part_bytes=4096)
            for i, (types, reduction, shared) in enumerate(itertools.product((alike, mixed), (SUM, AVERAGE, MIN, MAX), (0, 1))):
                data = [ref.random(types(k), N, (SEED, 100 + i, k)) for k in range(len(ranks))]
                cast = [ref.widen(types(k), x).astype(np.float32) for k, x in enumerate(data)]
                want = ref.reduce(FLOAT32, reduction, cast, layout).tobytes()
                counts = [N // len(ranks)] * (len(ranks) - 1)
                counts.append(N - sum(counts))
                for k, rank in enumerate(ranks):
                    rank.call('tensor', 2 * i, f'all.{i}', FLOAT32, N)
                    rank.call('tensor', 2 * i + 1, f'scattered.{i}', FLOAT32, N)
                    keys = {'red': reduction, 'shared': shared}
                    rank.submit(1, 2 * i, data[k].tobytes(), op=PUSH_PULL, out=N, **{'from': types(k)}, **keys)
                    rank.submit(2, 2 * i, cast[k].tobytes(), op=PUSH_PULL, out=N, **keys)
                    rank.submit(3, 2 * i + 1, data[k].tobytes(), op=REDUCE_SCATTER, out=counts[k], counts=counts,
                                **{'from': types(k)}, **keys)
                for k, rank in enumerate(ranks):
                    before = 4 * sum(counts[:k])
                    for request, expected in ((1, want), (2, want), (3, want[before:before + 4 * counts[k]])):
                        rank.wait(request)
                        what = f'{types.__name__} reduction {reduction} layout {layout} rank {k} request {request}'
                        check(what, rank.result(request), expected)
                        rank.call('free', request)
            for rank in ranks:
                rank.call('close')


@gate_tier
def test_part_size_does_not_matter():
    rng = random.Random(SEED + 2)
    with Cluster(2, 1) as cluster:
        for part_bytes in (4096, 8192 + 64, 1 << 16, 1 << 20, 64 << 20):
            ranks = cluster.job((2, 2), part_bytes=part_bytes)
            push_pull_all(ranks, (2, 2), rng)
            for rank in ranks:
                rank.call('close')


@gate_tier
def test_servers_lanes_and_transport_do_not_matter():
    rng = random.Random(SEED + 3)
    for n_spare, colocated, lanes, threads, spin_us in [(1, False, 1, 0, 0), (2, False, 4, 0, 200), (5, False, 1, 0, 0),
                                                        (2, True, 4, 2, 200), (0, True, 1, 1, 0)]:
        options = [f'--lanes={lanes}', f'--spin-us={spin_us}'] + ([f'--data-threads={threads}'] if threads else [])
        with Cluster(2, n_spare, colocated=colocated, options=options) as cluster:
            push_pull_all(cluster.job((2, 2), part_bytes=4096), (2, 2), rng)


@gate_tier
def test_in_process_server_gives_the_same_as_none():
    """One node: reduced where it is, or by way of a server in the same process, or over TCP."""
    rng = random.Random(SEED + 4)
    with Cluster(1) as cluster:
        alone = push_pull_all(cluster.job((4,)), (4,), rng)
        inside = push_pull_all(cluster.job((4,), force_distributed=1, part_bytes=4096), (4,), rng)
    with Cluster(1, 1, colocated=False) as cluster:
        over_tcp = push_pull_all(cluster.job((4,), force_distributed=1, part_bytes=4096), (4,), rng)
    assert alone == inside == over_tcp


def kernel_does_not_matter(kernel):
    """Skipped where the processor does not have it."""
    try:
        cluster = Cluster(3, options=['--kernel=' + kernel])
    except AssertionError as error:
        if 'does not have it' in str(error):
            raise Skip(f'this processor does not have {kernel}') from None
        raise
    with cluster:
        assert re.search(rf'sums by {kernel}\b', cluster.daemons[0].text()), 'it sums by another kernel'
        push_pull_all(cluster.job((2, 1, 1), part_bytes=4096), (2, 1, 1), random.Random(SEED + 5))


@gate_tier
def test_kernel_scalar_does_not_matter():
    kernel_does_not_matter('scalar')


@gate_tier
def test_kernel_avx2_does_not_matter():
    kernel_does_not_matter('avx2')


@gate_tier
def test_kernel_avx512_does_not_matter():
    kernel_does_not_matter('avx512')


@gate_tier
def test_kernel_avx512_bf16_does_not_matter():
    kernel_does_not_matter('avx512_bf16')


@gate_tier
def test_kernel_avx512_256_does_not_matter():
    kernel_does_not_matter('avx512_256')


@gate_tier
def test_kernel_neon_does_not_matter():
    kernel_does_not_matter('neon')


def test_averages_of_float16():
    """The largest numbers, which do not add up to a number: on one node, and on nodes of one and of several ranks. """
    n, largest = 5000, np.float16(65504)
    data = np.where(np.arange(n) % 2, largest, -largest)
    with Cluster(3, 1) as cluster:
        for base, layout in enumerate([(4,), (1, 1, 1), (3, 1), (2, 2, 2), (1, 3)]):
            ranks = cluster.job(layout, part_bytes=4096)
            for rank in ranks:
                rank.call('tensor', 0, f'x{base}', FLOAT16, n)
            for rank in ranks:
                rank.submit(0, 0, data.tobytes(), red=AVERAGE, out=n)
            for k, rank in enumerate(ranks):
                rank.wait(0)
                check(f'rank {k} of {layout}', rank.result(0), data.tobytes())
            some = [ref.random(FLOAT16, n, (SEED, k)) for k in range(len(ranks))]
            for k, rank in enumerate(ranks):
                rank.submit(1, 0, some[k].tobytes(), red=AVERAGE, out=n)
            for k, rank in enumerate(ranks):
                rank.wait(1)
                check(f'any numbers, rank {k} of {layout}', rank.result(1),
                      ref.reduce(FLOAT16, AVERAGE, some, layout).tobytes())
                rank.call('close')


def test_averages_of_integers():
    """They do not wrap on one node, nor at servers; what a node cannot tell a server is an error, and the next round goes on."""
    with Cluster(3, 1) as cluster:
        for base, (layout, fails) in enumerate([((4,), False), ((1, 1, 1), False), ((2, 1), True)]):
            ranks = cluster.job(layout, part_bytes=4096)
            for i, dtype in enumerate((INT8, UINT8, INT16, INT32, INT64)):
                largest = np.full(N, np.iinfo(ref.STORAGE[dtype]).max, ref.STORAGE[dtype]).tobytes()
                for rank in ranks:
                    rank.call('tensor', i, f'{base}.{i}', dtype, N)
                    rank.submit(i, i, largest, red=AVERAGE, out=N)
                for k, rank in enumerate(ranks):
                    if fails:
                        error = rank.ended(i)
                        assert str(error).startswith('ERANGE') and f'no {ref.NAMES[dtype]}' in error.text, error
                    else:
                        rank.wait(i)
                        check(f'{ref.NAMES[dtype]}, rank {k} of {layout}', rank.result(i), largest)
                    rank.call('free', i)
            for rank in ranks:
                rank.submit(0, 0, bytes(N), red=AVERAGE, out=N)
            for k, rank in enumerate(ranks):
                rank.wait(0)
                check(f'the next round, rank {k} of {layout}', rank.result(0), bytes(N))
                rank.call('close')


def test_many_rounds_of_free_running_ranks():
    """No barrier between rounds: a late answer of round r must not show data of round r + 1."""
    layout, rounds, n = (1, 1, 1), 60, 5000
    with Cluster(3, 1) as cluster:
        ranks = cluster.job(layout, part_bytes=4096)
        for rank in ranks:
            rank.call('tensor', 0, 'x', FLOAT32, n)
        rng = random.Random(SEED + 6)
        ahead = [0] * len(ranks)  # rounds that each rank has submitted
        done = [0] * len(ranks)
        data = [inputs(FLOAT32, layout, n, salt=r) for r in range(rounds)]
        while min(done) < rounds:
            k = rng.choice([k for k in range(len(ranks)) if done[k] < rounds])
            if ahead[k] < rounds and ahead[k] <= min(ahead) + 3:
                ranks[k].submit(ahead[k], 0, data[ahead[k]][k].tobytes(), red=SUM, out=n)
                ahead[k] += 1
            elif done[k] < min(ahead):
                r = done[k]
                ranks[k].wait(r)
                check(f'round {r} rank {k}', ranks[k].result(r), ref.reduce(FLOAT32, SUM, data[r], layout).tobytes())
                ranks[k].call('free', r)
                done[k] += 1


@gate_tier
def test_broadcast_gather_scatter_all_to_all():
    rng = random.Random(SEED + 7)
    with Cluster(3, 1) as cluster:
        for layout in LAYOUTS[:3] + [(2, 2, 2), (1, 3)]:
            ranks = cluster.job(layout, part_bytes=4096)
            for dtype in (FLOAT32, BFLOAT16, INT8, FLOAT64, BOOL):
                collectives(ranks, layout, dtype, rng, base=dtype * 100)
            for rank in ranks:
                rank.call('close')


def collectives(ranks, layout, dtype, rng, base):
    size = len(ranks)
    pattern = lambda n, *salt: ref.random(dtype, n, (SEED, dtype, *salt))
    order = list(range(size))

    def everywhere(request, submit):
        rng.shuffle(order)
        for k in order:
            submit(k)
        for k in range(size):
            ranks[k].wait(request)
        return [rank.result(request) for rank in ranks]

    for rank in ranks:
        rank.call('tensor', base, f'b{base}', dtype, N)
        for i in range(1, 6):
            rank.call('tensor', base + i, f'v{base + i}', dtype, -1)
        rank.call('tensor', base + 6, f'rs{base}', dtype, N * size)

    for root in {0, size - 1}:
        x = pattern(N, 1, root)
        got = everywhere(base, lambda k: ranks[k].submit(base, base, x.tobytes() if k == root else None, op=BROADCAST,
                                                         root=root, out=N, shared=k % 2))
        for k in range(size):
            check(f'broadcast {dtype} from {root} to {k} {layout}', got[k], x.tobytes())
            ranks[k].call('free', base)

    for i, counts in enumerate([[N] * size, [(k * 1777) % 4099 for k in range(size)], [0] * (size - 1) + [7]]):
        x = [pattern(counts[k], 2, k) for k in range(size)]
        want = b''.join(v.tobytes() for v in x)
        got = everywhere(base, lambda k: ranks[k].submit(base, base + 1 + i, x[k].tobytes(), op=ALL_GATHER,
                                                         counts=counts, out=sum(counts), shared=k % 2))
        for k in range(size):
            check(f'all_gather {dtype} {counts} at {k} {layout}', got[k], want)
            ranks[k].call('free', base)

    x = [pattern(N * size, 3, k) for k in range(size)]
    counts = [N] * size
    if size > 1:
        counts[0], counts[1] = 2 * N - 5, 5
    total = ref.reduce(dtype, SUM, x, layout)
    got = everywhere(base, lambda k: ranks[k].submit(base, base + 6, x[k].tobytes(), op=REDUCE_SCATTER, red=SUM,
                                                     counts=counts, out=counts[k], shared=k % 2))
    for k in range(size):
        at = sum(counts[:k])
        check(f'reduce_scatter {dtype} at {k} {layout}', got[k], total[at:at + counts[k]].tobytes())
        ranks[k].call('free', base)

    matrix = [[(a * 997 + b * 131) % 2500 for b in range(size)] for a in range(size)]
    x = [[pattern(matrix[a][b], 4, a, b) for b in range(size)] for a in range(size)]
    got = everywhere(base, lambda k: ranks[k].submit(
        base, base + 5, b''.join(v.tobytes() for v in x[k]), op=ALL_TO_ALL, counts=matrix[k],
        recv=[matrix[a][k] for a in range(size)], out=sum(matrix[a][k] for a in range(size)), shared=k % 2))
    for k in range(size):
        check(f'all_to_all {dtype} at {k} {layout}', got[k], b''.join(x[a][k].tobytes() for a in range(size)))
        ranks[k].call('free', base)

    for rank in ranks:
        rank.call('barrier', base, 0)
    for rank in ranks:
        rank.wait(base)
        rank.call('free', base)


def test_zero_length_and_one_element():
    with Cluster(2, 1) as cluster:
        for layout in [(1,), (2,), (2, 1)]:
            ranks = cluster.job(layout)
            for n in (0, 1):
                x = [ref.random(FLOAT32, n, (SEED, k)) for k in range(len(ranks))]
                for k, rank in enumerate(ranks):
                    rank.call('tensor', n, f'n{n}', FLOAT32, n)
                    rank.submit(n, n, x[k].tobytes(), out=n)
                for rank in ranks:
                    rank.wait(n)
                    check(f'{n} elements', rank.result(n), ref.reduce(FLOAT32, SUM, x, layout).tobytes())


@gate_tier
def test_coordinator_source():
    rng = random.Random(SEED + 8)
    with Cluster(2, 2, source='coordinator', colocated=False) as cluster:
        push_pull_all(cluster.job((2, 2), part_bytes=4096, min_servers=2), (2, 2), rng)


@full_tier('12 GiB of memory, and over 30 s')
def test_more_than_4_gib():
    """One part more than 2^32 bytes: lengths and offsets must not wrap, here and on the way to a server."""
    with open('/proc/meminfo') as file:
        free = int(re.search(r'MemAvailable:\s+(\d+)', file.read())[1]) >> 20
    if free < 12 or SANITIZED:
        raise Skip(f'needs 12 GiB of free memory, and no sanitizer: {free} GiB are free')
    n = (1 << 32) + (1 << 20) + 1
    with Cluster(1) as cluster:
        for layout, keys in (((1,), {'force_distributed': 1}), ((2,), {})):
            ranks = cluster.job(layout, **keys)
            for rank in ranks:
                rank.call('tensor', 0, 'large', INT8, n)
                rank.send('large', 0, 0)
            for rank in ranks:
                rank.answer(300)
            for rank in ranks:
                rank.wait(0, 300000)
                assert rank.call('verify', 0, len(ranks), seconds=300) == 'same', (layout, keys)
            for rank in ranks:
                rank.call('close')


run(globals())
