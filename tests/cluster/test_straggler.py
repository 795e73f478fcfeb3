#!/usr/bin/env python3
"""Stragglers: who was last is known. Ranks submit in an order that the test makes: no clock decides what is asserted."""
import os, struct, sys
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


def test_the_last_node_of_a_job_is_counted():
    with Cluster(3, 1, colocated=False) as cluster:
        ranks = cluster.job([1, 1, 1])
        declare(ranks)
        server = cluster.daemons[3]
        rounds_in_order(cluster, ranks, server, 'job1', 2, 'rank 2', 3)
        assert last(server, 'job1', 'node 2') == (3, 3)
        assert last(server, 'job1', 'node 0') == (3, 0)
        assert server.ctl('metrics')['bps_node_last_total{job="job1",node="2"}'] == 3


run(globals())
