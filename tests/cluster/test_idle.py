#!/usr/bin/env python3
"""Idle costs nothing, and nothing leaks."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *

ONES = b'\x00\x00\x80\x3f' * 1000
JOBS = int(os.environ.get('BPS_TEST_JOBS', '200' if SANITIZED else '1000'))


# Longer than any timer that somebody could set again and again, with the peers' timeout of OPTIONS.
QUIET = 12
OPTIONS = ['--peer-timeout=10s']


def expect_no_wake_ups(daemons):
    """While nobody asks for anything, no daemon wakes: from when what was asked before has settled, with timers that were set for it
    and go off once. One that wakes every now and then never gets there."""
    if TSAN:
        raise Skip('the thread sanitizer has a thread of its own that wakes')

    def quiet():
        soon = [seconds for daemon in daemons for seconds in daemon.alarms() if seconds < QUIET + 1]
        time.sleep(max(soon, default=0) + 0.1)
        before = [daemon.switches() for daemon in daemons]
        time.sleep(QUIET)
        return [daemon.switches() for daemon in daemons] == before
    wait_for(f'{QUIET} seconds without a wake-up', quiet, 10 * QUIET)


def at_rest(cluster, layout):
    """A job that has done a round."""
    ranks = cluster.job(layout)
    for rank in ranks:
        rank.call('tensor', 0, 'x', FLOAT32, 1000)
        rank.submit(0, 0, ONES, out=1000)
    for rank in ranks:
        rank.wait(0)


def test_idle_sessions_and_peers_cause_no_wake_ups():
    """Nor does a daemon that looks for more before it sleeps, once it does. All at once, as it takes its time."""
    with Cluster(1) as one, Cluster(1, options=['--spin-us=1000']) as spinning, Cluster(2, 1, options=OPTIONS) as several:
        at_rest(one, (4,))
        at_rest(spinning, (4,))
        at_rest(several, (1, 1))
        expect_no_wake_ups([*one.daemons, *spinning.daemons, *several.daemons])


def round_trip(cluster, layout, trainers, number):
    """One whole job with trainers that stay: connect, join, declare, reduce, close."""
    size = sum(layout)
    for k, trainer in enumerate(trainers):
        trainer.call('open', cluster.daemons[trainer.node].socket, DEADLINE * 1000)
    for k, trainer in enumerate(trainers):
        trainer.send('join', f'job=j{number}', f'rank={k}', f'world_size={size}', f'node={trainer.node}',
                     f'local_rank={k - sum(layout[:trainer.node])}', f'local_size={layout[trainer.node]}',
                     f'n_nodes={len(layout)}')
    for trainer in trainers:
        trainer.answer()
    for trainer in trainers:
        trainer.call('tensor', 0, 'x', FLOAT32, 1000)
        trainer.submit(0, 0, ONES, out=1000, shared=number % 2)
    for trainer in trainers:
        trainer.wait(0)
        os.unlink(os.path.join(trainer.folder, f'{trainer.name}.{trainer.n}.in'))
    for trainer in trainers:
        trainer.call('close')


def gives_back(daemon, maps, rss=sys.maxsize):
    """A thread of the daemon's does so. A sanitizer keeps freed memory for a while; it reports leaks itself when the daemon ends."""
    wait_for(f'no more than {maps} mappings', lambda: daemon.maps() <= maps)
    wait_for(f'no more than {rss} bytes', lambda: SANITIZED or daemon.rss() <= rss)


def no_leaks(cluster, layout, jobs):
    trainers = [cluster.trainer(node, open=False) for node, n in enumerate(layout) for _ in range(n)]
    for i in range(max(jobs // 4, 20)):
        round_trip(cluster, layout, trainers, i)

    def settled():
        return all(not d.ctl('jobs')['jobs'] and d.ctl('status')['n_sessions'] == 0 for d in cluster.daemons)
    wait_for('no job left', settled)
    # bpsctl has started gRPC, which goes again by itself; look at what remains after the same question both times.
    before = [(d.fds(), d.maps(), d.rss()) for d in cluster.daemons]
    for i in range(jobs):
        round_trip(cluster, layout, trainers, i)
    wait_for('no job left', settled)
    for daemon, (fds, maps, rss) in zip(cluster.daemons, before):
        wait_for(f'{daemon.name}: no more than {fds} descriptors', lambda: daemon.fds() <= fds + 2)
        # Others grow by a tenth of this.
        gives_back(daemon, maps + 24, rss + (1 << 20) + 1024 * jobs)


def test_a_thousand_jobs_leave_nothing():
    with Cluster(1) as cluster:
        no_leaks(cluster, (2,), JOBS)


def test_jobs_over_servers_leave_nothing():
    with Cluster(2, 1) as cluster:
        no_leaks(cluster, (1, 1), JOBS // 4)


def test_a_thousand_dead_trainers_leave_nothing():
    """Trainers that are killed instead of leaving."""
    with Cluster(1) as cluster:
        daemon, n = cluster.daemons[0], JOBS // 20
        before = None
        for i in range(n):
            ranks = cluster.job((2,))
            ranks[0].call('tensor', 0, 'x', FLOAT32, 1000)
            ranks[0].submit(0, 0, ONES, out=1000)
            for rank in ranks:
                rank.kill()
            cluster.trainers.clear()
            if i == n // 4:
                wait_for('no session left', lambda: daemon.ctl('status')['n_sessions'] == 0)
                before = daemon.fds(), daemon.maps()
        wait_for('no session left', lambda: daemon.ctl('status')['n_sessions'] == 0)
        # Those of a session are closed a little after it is over.
        wait_for(f'no more than {before[0]} descriptors', lambda: daemon.fds() <= before[0] + 2)
        gives_back(daemon, before[1] + 24)


run(globals())
