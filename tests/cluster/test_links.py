#!/usr/bin/env python3
"""Links that are cut, go down, swallow what is sent, or change bytes, under a job of all operations: no rank sees an error, and
results are the same bits. Between the daemons are relays (links.py); what else happens is by failpoints where there are any."""
import os, random, re, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from links import LinkCluster
import numpy_or_skip  # noqa: F401
from recovery import *

LONG = 'BPS_LONG' in os.environ
QUICK = ['--lost-timeout=10m', '--checksum=on']


def turn(ranks, n, meanwhile=None, layout=(1, 1)):
    """Every operation at once, while something happens."""
    turns(ranks, layout, n, 1, meanwhile)


def said(cluster, text):
    return any(text in daemon.text() for daemon in cluster.daemons)


def changed_bytes_are_seen(cluster, what):
    """A daemon says of each such loss once; of a job's loss it says nothing if the other daemon has called again before."""
    wait_for(f'a changed {what} is seen', lambda: said(cluster, f'a {what} arrived with other bytes than were sent'))
    assert any(daemon.ctl('metrics')['bps_checksum_errors_total'] for daemon in cluster.daemons)


def test_connections_are_cut():
    rng = random.Random(SEED)
    for lanes in (1, 3):
        with LinkCluster(2, 1, colocated=False, options=[*QUICK, f'--lanes={lanes}']) as cluster:
            ranks, link = job(cluster, (1, 1)), cluster.links[2]

            def cut():
                for _ in range(3):
                    time.sleep(rng.random() / 50)
                    link.cut()
            for n in range(6 if LONG else 3):
                turn(ranks, n, cut)
            wait_for('losses are said', lambda: said(cluster, 'waiting for it'))
            each(ranks, 'leave')


def test_rails_of_several_are_cut():
    """One at a time: what was under way on it goes over the others, and mostly nobody is lost for it."""
    rng = random.Random(SEED)
    with LinkCluster(2, 1, colocated=False, options=[*QUICK, '--lanes=4']) as cluster:
        ranks, link = job(cluster, (1, 1)), cluster.links[2]

        def cut():
            for _ in range(12):
                time.sleep(rng.random() / 100)
                link.cut(rng.randrange(10))
        for n in range(10 if LONG else 4):
            turn(ranks, n, cut)
        if not SANITIZED:
            broken = sum(daemon.ctl('metrics')['bps_connections_broken_total'] for daemon in cluster.daemons)
            assert broken >= 10, broken
        each(ranks, 'leave')


def test_nodes_that_are_servers_too():
    with LinkCluster(2, 0, options=QUICK) as cluster:
        ranks = job(cluster, (1, 1))
        for n in range(3):
            turn(ranks, n, lambda: [link.cut() for link in cluster.links.values()])
        each(ranks, 'leave')


def test_a_link_is_down_for_two_seconds():
    with LinkCluster(2, 1, colocated=False, options=QUICK) as cluster:
        ranks, link = job(cluster, (1, 1)), cluster.links[2]

        def outage():
            link.down()
            time.sleep(2)
            link.up()
        for n in range(2):
            turn(ranks, n, outage)
        assert cluster.daemons[2].text().count('waiting for it') >= 2, 'nothing was lost'
        each(ranks, 'leave')


def test_a_black_hole():
    """Nothing passes and nobody says so. Several, close together."""
    with LinkCluster(2, 1, colocated=False, options=[*QUICK, '--peer-timeout=1s']) as cluster:
        ranks, link = job(cluster, (1, 1)), cluster.links[2]

        for n in range(3):
            works, count = every_operation((1, 1), 50 * n), cluster.logs().count('no sign of life')
            declare(ranks, works, 20 * n)
            # Before anything is submitted: where nobody has business nobody is asked for a sign of life.
            link.hold()
            submit(ranks, works, 20 * n)
            wait_for('it is seen', lambda: cluster.logs().count('no sign of life') > count, 60 * SCALE)
            link.up()
            finish(ranks, works, 20 * n)
        each(ranks, 'leave')


def test_wires_that_change_bytes():
    with LinkCluster(2, 1, colocated=False, options=QUICK) as cluster:
        ranks, link = job(cluster, (1, 1)), cluster.links[2]
        for n in range(4):
            turn(ranks, n, lambda: link.corrupt(400000))
            link.corrupt(0)
        assert link.changed, 'nothing was changed'
        if not SANITIZED:
            n_seen = sum(daemon.ctl('metrics')['bps_checksum_errors_total'] for daemon in cluster.daemons)
            assert n_seen, f'{link.changed} bytes were changed, and nobody saw it'
        each(ranks, 'leave')


def test_changed_bytes_by_failpoints():
    if RDMA:
        raise Skip('over RDMA: what goes by TCP, where these points are, is set-up, which is not repeated')
    if not HAS_FAILPOINTS:
        raise Skip('the build has no failpoints')
    for who in (0, 2):
        places = ['header-sent=corrupt@9', 'payload-sent=corrupt@5', 'header-received=corrupt@17', 'payload-received=corrupt@20',
                  'connection-read=error@25']
        with armed_cluster((1, 1), 1, {who: [','.join(places)]}, colocated=False, options=QUICK) as cluster:
            ranks = job(cluster, (1, 1))
            for n in range(3):
                turn(ranks, n)
            for what in 'header', 'payload':
                changed_bytes_are_seen(cluster, what)
            each(ranks, 'leave')


def test_a_changed_part_that_cannot_come_again_costs_its_round_alone():
    """Of jobs that do not outlive a daemon: the bytes may be those of a trainer that writes to its memory meanwhile."""
    if RDMA:
        raise Skip('over RDMA: nothing is checked but set-up')
    if not HAS_FAILPOINTS:
        raise Skip('the build has no failpoints')
    n = 50000
    for who in (0, 2):  # where the result comes, and where the contribution does
        with armed_cluster((1, 1), 1, {who: ['payload-received=corrupt@30']}, colocated=False,
                           options=[*QUICK, '--resume=off', '--peer-timeout=60s']) as cluster:
            jobs = [cluster.job((1, 1)) for _ in range(2)]
            for ranks in jobs:
                each(ranks, 'tensor', 0, 'x', FLOAT32, n)
            failed = 0
            for turn in range(30):
                for ranks in jobs:
                    for rank in ranks:
                        rank.submit(turn, 0, bytes(4 * n), out=n)
                for ranks in jobs:
                    errors = []
                    for rank in ranks:
                        try:
                            rank.wait(turn)
                        except BpsError as error:
                            errors.append(error)
                    failed += bool(errors)
                    assert all('other bytes than were sent' in error.text for error in errors), errors
            assert failed == 1, failed
            assert not said(cluster, 'was lost') and not said(cluster, ' lost: '), cluster.logs()
            for ranks in jobs:
                each(ranks, 'leave')


def test_machines_check_what_they_send_each_other():
    """Without being told to."""
    if RDMA:
        raise Skip('over RDMA: what goes by TCP is set-up, which is not repeated')
    if not HAS_FAILPOINTS:
        raise Skip('the build has no failpoints')
    prefix, network = netns(3)
    with network, armed_cluster((1, 1), 1, {2: ['payload-received=corrupt@20']}, colocated=False, netns=prefix,
                                options=['--lost-timeout=10m']) as cluster:
        ranks = job(cluster, (1, 1))
        turn(ranks, 0)
        changed_bytes_are_seen(cluster, 'payload')
        each(ranks, 'leave')


def test_the_first_job_knows_how_fast_links_are():
    """
    What the parts of later jobs will be, its own are: nothing has been sent before it. A probe says nothing when a process had
    to wait for a processor meanwhile: then another cluster has its first job.
    """
    if RDMA:
        raise Skip('over RDMA: nothing goes by TCP that would tell')
    prefix, network = netns(4, '100mbit')
    with network:
        for bandwidths, size in (None, 16 << 10), ([1000] * 4, 64 << 10):
            for more in reversed(range(20)):
                with Cluster(2, 2, colocated=False, netns=prefix, bandwidths=bandwidths) as cluster:
                    each(cluster.job((1, 1)), 'leave')
                    measured = [int(mbit) for mbit in re.findall(r'link: (\d+) Mbit/s', cluster.logs())]
                    assert all(mbit < 200 for mbit in measured), cluster.logs()
                    assert not (bandwidths and measured), cluster.logs()
                    if said(cluster, f'part size {size}') and (bandwidths or measured):
                        break
                    assert more and not bandwidths, cluster.logs()


def test_a_wire_that_is_never_right():
    """Given up at last, with words that say why."""
    if not HAS_FAILPOINTS:
        raise Skip('the build has no failpoints')
    with armed_cluster((1, 1), 1, {2: ['payload-received=corrupt@12+']}, colocated=False, options=QUICK) as cluster:
        ranks = job(cluster, (1, 1))
        works = every_operation((1, 1))
        declare(ranks, works)
        submit(ranks, works)
        error = ranks[0].ended(0, 120000)
        assert 'was lost 101 times' in error.text and 'other bytes than were sent' in cluster.logs(), error.text


run(globals())
