#!/usr/bin/env python3
"""Stragglers: who was last is known. Ranks submit in an order that the test makes: no clock decides what is asserted."""
import errno, os, struct, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *

N = 64


def floats(value, n=N):
    return struct.pack(f'<{n}f', *[value] * n)


def declare(ranks, name='x', dtype=FLOAT32, elements=N):
    for rank in ranks:
        rank.call('tensor', 0, name, dtype, elements)


def pending(daemon, job, who):
    """The daemon has seen that only `who` has not come."""
    wait_for(f'{who} to be waited for', lambda: who + ' (tensor x' in daemon.ctl('job', job)['summary'].get('waiting_for', ''))


def last(daemon, job, who):
    row, = [row for row in daemon.ctl('job', job)['arrivals'] if row['who'] == who]
    return row['rounds'], row['last']


def rounds_in_order(cluster, ranks, daemon, job, late, who, rounds):
    for r in range(rounds):
        for rank in ranks:
            if rank is not ranks[late]:
                rank.submit(r, 0, floats(1), op=PUSH_PULL, out=N)
        pending(daemon, job, who)
        ranks[late].submit(r, 0, floats(2), op=PUSH_PULL, out=N)
        for rank in ranks:
            rank.wait(r)
        for rank in ranks:
            assert rank.result(r) == floats(len(ranks) + 1)


@gate_tier
def test_the_last_rank_of_a_node_is_counted():
    with Cluster(1) as cluster:
        ranks = cluster.job([3])
        declare(ranks)
        daemon, = cluster.daemons
        rounds_in_order(cluster, ranks, daemon, 'job1', 1, 'rank 1', 4)
        rounds_in_order(cluster, ranks, daemon, 'job1', 2, 'rank 2', 1)
        assert last(daemon, 'job1', 'rank 0') == (5, 0)
        assert last(daemon, 'job1', 'rank 1') == (5, 4)
        assert last(daemon, 'job1', 'rank 2') == (5, 1)
        tensor, = daemon.ctl('job', 'job1')['tensors']
        assert tensor['last'] == 'rank 1, 80 %' and tensor['spread_us'] > 0, tensor
        metrics = daemon.ctl('metrics')
        assert metrics['bps_rank_last_total{job="job1",rank="1"}'] == 4
        assert metrics['bps_rank_spread_seconds_count'] == 5
        assert metrics['bps_rank_spread_seconds_sum'] > 0
        assert metrics['bps_rank_held_seconds_total{job="job1",rank="1"}'] > 0


@gate_tier
def test_the_last_node_of_a_job_is_counted():
    with Cluster(3, 1, colocated=False) as cluster:
        ranks = cluster.job([1, 1, 1])
        declare(ranks)
        server = cluster.daemons[3]
        rounds_in_order(cluster, ranks, server, 'job1', 2, 'rank 2', 3)
        assert last(server, 'job1', 'node 2') == (3, 3)
        assert last(server, 'job1', 'node 0') == (3, 0)
        assert server.ctl('metrics')['bps_node_last_total{job="job1",node="2"}'] == 3



# -- accumulate --------------------------------------------------------------------------------------------------------

def ints(*values):
    return struct.pack(f'<{len(values)}q', *values)


def accumulate(rank, request, value, n=N, **keys):
    rank.submit(request, 0, ints(*[value] * n), op=ACCUMULATE, out=n, **keys)


def taken(rank, request, n=N):
    """The one value that all elements of the result have."""
    rank.wait(request)
    values = set(struct.unpack(f'<{n}q', rank.result(request)))
    assert len(values) == 1, sorted(values)[:8]
    return values.pop()


def test_async_waits_for_nobody():
    """Three ranks of one node; one does nothing until the others are done."""
    with Cluster(1) as cluster:
        a, b, slow = ranks = cluster.job([3], **{'async': 1})
        declare(ranks, dtype=INT64)
        for r in range(20):
            accumulate(a, r, 1)
            assert taken(a, r) == (r + 1) * 1
        for r in range(5):
            accumulate(b, r, 100)
            assert taken(b, r) == 20 + (r + 1) * 100
            assert b.call('contributions', r) == str(20 + r + 1)
        accumulate(slow, 0, 10000)
        assert taken(slow, 0) == 10520
        accumulate(a, 20, 0)
        assert taken(a, 20) == 10520


@gate_tier
def test_nothing_is_lost_or_doubled():
    """Sum over all that was contributed, of two nodes and many parts, at any interleaving; all_ranks gives all the same."""
    n, rounds = 40000, 12
    with Cluster(2, 1) as cluster:
        ranks = cluster.job([2, 1], **{'async': 1, 'part_bytes': 4096})
        declare(ranks, dtype=INT64, elements=n)
        for r in range(rounds):
            for k, rank in enumerate(ranks):
                accumulate(rank, r, 10 ** k, n)
        for rank in ranks:
            rank.submit(rounds, 0, ints(*range(n)), op=ACCUMULATE, out=n, all=1)
        results = []
        for rank in ranks:
            rank.wait(rounds)
            results.append(rank.result(rounds))
            assert rank.call('contributions', rounds) == str(len(ranks) * (rounds + 1))
        assert results[0] == ints(*[rounds * 111 + 3 * i for i in range(n)])
        assert results[1] == results[0] and results[2] == results[0]


def test_a_rank_is_ahead_by_its_staleness_and_no_more():
    with Cluster(1) as cluster:
        fast, slow = ranks = cluster.job([2], **{'async': 1, 'staleness': 3})
        declare(ranks, dtype=INT64)
        for r in range(3):
            accumulate(fast, r, 1)
            assert taken(fast, r) == r + 1
        # Its 4th round waits for the other's 1st, its 5th for the 2nd.
        accumulate(fast, 3, 1)
        for r in range(4):
            try:
                fast.wait(3 + r, 50)
            except BpsError as error:
                assert error.errno == errno.ETIMEDOUT, error
            else:
                raise AssertionError('was answered too early')
            accumulate(slow, r, 100)
            assert taken(slow, r) == 100 * (r + 1) + 4 + r
            assert taken(fast, 3 + r) == 100 * (r + 1) + 4 + r
            accumulate(fast, 4 + r, 1)


@full_tier('deadlines of 300 and 20 ms that something good must meet')
def test_who_waits_for_staleness_hears_for_whom():
    with Cluster(1) as cluster:
        fast, slow = ranks = cluster.job([2], **{'async': 1, 'staleness': 1, 'request_timeout_ms': 300})
        declare(ranks, dtype=INT64)
        accumulate(fast, 0, 1)
        assert taken(fast, 0) == 1
        accumulate(fast, 1, 1)
        error = fast.ended(1)
        assert error.errno == errno.ETIME and 'rank 1 (node 1)' in error.text and 'tensor x' in error.text, error
        # The job goes on; what was contributed counts.
        accumulate(slow, 0, 10)
        assert taken(slow, 0) == 12
        accumulate(fast, 2, 1, timeout=20)
        error = fast.ended(2)
        assert error.errno == errno.ETIME, error
        accumulate(slow, 1, 10)
        assert taken(slow, 1) == 23


def test_who_leaves_is_not_waited_for():
    with Cluster(1) as cluster:
        fast, slow = ranks = cluster.job([2], **{'async': 1, 'staleness': 1})
        declare(ranks, dtype=INT64)
        for rank in ranks:
            rank.call('agreed', 0, DEADLINE * 1000)
        accumulate(fast, 0, 1)
        assert taken(fast, 0) == 1
        accumulate(fast, 1, 1)
        slow.call('leave')
        assert taken(fast, 1) == 2
        fast.call('leave')


def test_a_rank_that_dies_ends_the_job_of_all():
    with Cluster(2) as cluster:
        ranks = cluster.job([2, 1], **{'async': 1, 'staleness': 1})
        declare(ranks, dtype=INT64)
        for rank in ranks:
            accumulate(rank, 0, 1)
        for rank in ranks:
            rank.wait(0)
        accumulate(ranks[0], 1, 1)
        accumulate(ranks[2], 1, 1)
        accumulate(ranks[0], 2, 1)
        accumulate(ranks[2], 2, 1)
        ranks[1].kill()
        for rank in (ranks[0], ranks[2]):
            error = rank.ended(2)
            assert 'rank 1' in error.text and 'died' in error.text, error
        wait_for('the job to be gone', lambda: not any(
            job['state'] == 'running' for daemon in cluster.daemons for job in daemon.ctl('jobs').get('jobs', [])))


@full_tier('a lost-timeout of 1 s')
def test_a_daemon_that_does_not_come_back_ends_the_job_of_all():
    """One that does is tests/cluster/test_straggler_restart.py."""
    with Cluster(2, options=['--lost-timeout=1s']) as cluster:
        ranks = cluster.job([1, 1], **{'async': 1, 'quorum': 1})
        declare(ranks, dtype=INT64)
        for rank in ranks:
            accumulate(rank, 0, 1)
            assert taken(rank, 0) >= 1
        accumulate(ranks[0], 1, 1, all=1)
        cluster.daemons.pop(1).kill()
        error = ranks[0].ended(1)
        assert error.errno == errno.ECONNRESET and 'did not come back' in error.text and 'rank 1' in error.text, error


def test_other_operations_wait_for_all():
    with Cluster(1) as cluster:
        ranks = cluster.job([3], **{'async': 1})
        declare(ranks, dtype=INT64)
        for k, rank in enumerate(ranks):
            rank.submit(0, 0, ints(*[10 ** k] * N), op=PUSH_PULL, out=N)
        for rank in ranks:
            assert taken(rank, 0) == 111
            assert rank.call('contributions', 0) == '3'
        for k, rank in enumerate(ranks):
            rank.submit(1, 0, ints(*[7] * N) if not k else None, op=BROADCAST, out=N)
        for rank in ranks:
            assert taken(rank, 1) == 7
        job, = cluster.daemons[0].ctl('jobs')['jobs']
        assert job['n_local'] == 3 and job['size'] == 3, job
        states = [rank['state'] for rank in cluster.daemons[0].ctl('job', 'job1')['ranks']]
        assert states == ['here'] * 3, states
        for rank in ranks:
            rank.call('barrier', 2, DEADLINE * 1000)
        for rank in ranks:
            rank.wait(2)


@full_tier('joins are given up after 2 s, and must have been refused by then')
def test_ranks_that_disagree():
    with Cluster(2) as cluster:
        for layout in ([2], [1, 1]):
            for other in ({'async': 0}, {'async': 1, 'staleness': 4}, {'quorum': 2, 'async': 0}):
                ranks = cluster.job(layout, join=False, **{'async': 1})
                ranks[1].keys.update(other)
                texts = []
                for rank in ranks:
                    rank.send('join', *(f'{key}={value}' for key, value in {**rank.keys, 'timeout_ms': 2000}.items()))
                for rank in ranks:
                    try:
                        rank.answer()
                        raise AssertionError(f'joined: {layout} {other}')
                    except BpsError as error:
                        texts.append(error.text)
                assert any(word in text for text in texts for word in ('async', 'staleness', 'quorum')), texts


def test_accumulate_needs_async():
    with Cluster(1) as cluster:
        rank, = ranks = cluster.job([1])
        declare(ranks, dtype=INT64)
        try:
            accumulate(rank, 0, 1)
            raise AssertionError('was taken')
        except BpsError as error:
            assert error.errno == errno.EINVAL and 'async' in error.text, error


# -- A quorum ----------------------------------------------------------------------------------------------------------

def push_pull(rank, request, value, n=N, **keys):
    rank.submit(request, 0, ints(*[value] * n), op=PUSH_PULL, out=n, **keys)


def not_yet(rank, request):
    try:
        rank.wait(request, 50)
    except BpsError as error:
        assert error.errno == errno.ETIMEDOUT, error
    else:
        raise AssertionError(f'{rank.name}: request {request} was answered too early')


def test_a_round_goes_on_without_the_last_and_the_next_has_its_part():
    with Cluster(1) as cluster:
        a, b, late = ranks = cluster.job([3], quorum=2)
        declare(ranks, dtype=INT64)
        push_pull(a, 0, 1)
        not_yet(a, 0)
        push_pull(b, 0, 10)
        assert taken(a, 0) == taken(b, 0) == 11
        assert a.call('contributions', 0) == '2'
        push_pull(late, 0, 100)
        assert taken(late, 0) == 11 and late.call('contributions', 0) == '2'
        push_pull(b, 1, 20)
        push_pull(late, 1, 200)
        assert taken(b, 1) == taken(late, 1) == 320
        assert b.call('contributions', 1) == '3'
        push_pull(a, 1, 2)
        assert taken(a, 1) == 320
        # Who waits for all gets all, of those who were late before.
        for rank in ranks:
            push_pull(rank, 2, 1000, all=1)
        for rank in ranks:
            assert taken(rank, 2) == 3002 and rank.call('contributions', 2) == '4'
        rows = {row['who']: row['last'] for row in cluster.daemons[0].ctl('job', 'job1')['arrivals']}
        assert rows['node 2'] >= 1 and rows['node 0'] >= 1, rows


def test_an_average_is_over_all_ranks():
    with Cluster(1) as cluster:
        a, b, late = ranks = cluster.job([3], quorum=2)
        declare(ranks, dtype=FLOAT32)
        for r in range(2):
            for rank in (a, b):
                rank.submit(r, 0, floats(3.0), op=PUSH_PULL, red=AVERAGE, out=N)
            for rank in (a, b):
                rank.wait(r)
                assert rank.result(r) == floats(2.0 if not r else 3.0)
            late.submit(r, 0, floats(3.0), op=PUSH_PULL, red=AVERAGE, out=N)
            late.wait(r)


def test_nobody_falls_behind_further_than_allowed():
    with Cluster(1) as cluster:
        a, b, late = ranks = cluster.job([3], quorum=2, staleness=2)
        declare(ranks, dtype=INT64)
        for r in range(2):
            for rank in (a, b):
                push_pull(rank, r, 1)
            assert taken(a, r) == taken(b, r) == 2
        for rank in (a, b):
            push_pull(rank, 2, 1)
        not_yet(a, 2)
        push_pull(late, 0, 10)
        assert taken(late, 0) == 2
        assert taken(a, 2) == taken(b, 2) == 12
        push_pull(late, 1, 100)
        assert taken(late, 1) == 2
        push_pull(late, 2, 1000)
        assert taken(late, 2) == 12
        for rank in ranks:
            push_pull(rank, 3, 0, all=1)
        for rank in ranks:
            assert taken(rank, 3) == 1100


def test_after_a_time():
    with Cluster(1) as cluster:
        a, b, late = ranks = cluster.job([3], quorum=1, quorum_timeout_ms=100)
        declare(ranks, dtype=INT64)
        push_pull(a, 0, 1)
        assert taken(a, 0) == 1
        for rank in (b, late):
            push_pull(rank, 0, 10)
            assert taken(rank, 0) == 1
        for rank in ranks:
            push_pull(rank, 1, 1, all=1)
        for rank in ranks:
            assert taken(rank, 1) == 23
    with Cluster(1) as cluster:
        a, b, late = ranks = cluster.job([3], quorum=1, quorum_timeout_ms=600000)
        declare(ranks, dtype=INT64)
        for rank in (a, b):
            push_pull(rank, 0, 1)
        not_yet(a, 0)
        push_pull(late, 0, 1)
        for rank in ranks:
            assert taken(rank, 0) == 3


def test_a_minimum_waits_for_all():
    with Cluster(1) as cluster:
        a, b, late = ranks = cluster.job([3], quorum=2)
        declare(ranks, dtype=INT64)
        for rank in (a, b):
            push_pull(rank, 0, 5, red=MIN)
        not_yet(a, 0)
        push_pull(late, 0, 4, red=MIN)
        for rank in ranks:
            assert taken(rank, 0) == 4


@full_tier('random orders, in waits of 20 ms: it takes long on a busy machine')
def test_whatever_is_late_is_in_some_round_once():
    """Two nodes, two servers, many parts, ranks in a random order: all get the same of each round, and all that was given
    is in the sum over the rounds."""
    import random
    n, rounds = 2000, 20
    for seed in range(3):
        order = random.Random(seed)
        with Cluster(2, 1) as cluster:
            ranks = cluster.job([2, 2], quorum=2 + seed % 2, part_bytes=4096)
            declare(ranks, dtype=INT64, elements=n)
            given, got = [0] * n, [[] for _ in ranks]
            at, open_ = [0] * len(ranks), [False] * len(ranks)
            while min(at) < rounds:
                k = order.choice([k for k in range(len(ranks)) if at[k] < rounds])
                if open_[k]:
                    try:
                        ranks[k].wait(at[k], 20)
                    except BpsError as error:
                        assert error.errno == errno.ETIMEDOUT, error
                        continue
                    got[k].append(ranks[k].result(at[k]))
                    at[k] += 1
                    open_[k] = False
                else:
                    values = [order.randrange(1 << 40) for _ in range(n)]
                    given = [a + b for a, b in zip(given, values)]
                    ranks[k].submit(at[k], 0, ints(*values), op=PUSH_PULL, out=n)
                    open_[k] = True
            for rank in ranks:
                push_pull(rank, rounds, 0, n, all=1)
            for k, rank in enumerate(ranks):
                rank.wait(rounds)
                got[k].append(rank.result(rounds))
            assert all(other == got[0] for other in got), f'seed {seed}: ranks got different results'
            total = [0] * n
            for result in got[0]:
                total = [a + b for a, b in zip(total, struct.unpack(f'<{n}q', result))]
            assert total == given, f'seed {seed}: something was lost or counted twice'


run(globals())
