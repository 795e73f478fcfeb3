#!/usr/bin/env python3
"""Ranks of elastic jobs over several nodes regroup, and whoever tells the nodes of their next run, or has just heard of it, dies."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
import numpy_or_skip  # noqa: F401
from recovery import *
from elastic import *

PATIENT = ('--lost-timeout=60s', '--move-timeout=60s')
HASTY = ('--lost-timeout=60s', '--move-timeout=200ms')


LONG = os.environ.get('BPS_LONG')


def needs_failpoints():
    if not HAS_FAILPOINTS:
        raise Skip('no failpoints')


def cases(*some, more=()):
    """more: by hand alone, with BPS_LONG=1."""
    return [*some, *(more if LONG else ())]


def told(cluster, words):
    return [i for i, daemon in enumerate(cluster.daemons) if words in daemon.text()]


def goes_on(group, n):
    """All are in one run, and what it sums is theirs."""
    for rank in group.ranks:
        rank.answer(2 * DEADLINE)
    assert [int(word) for word in group.each('rank')] == list(range(n))
    assert group.turn(1) == list(range(n))
    group.each('leave')


def home_dies(cluster, dropped, back):
    """It has told all nodes of the next run but those that are dropped, who are as many as n - told; then it dies."""
    group = Group(cluster, (1, 2, 1))
    group.tensors()
    assert group.turn(0) == [0, 1, 2, 3]
    for k in group.live:
        group.ranks[k].send('regroup')
    wait_for('the home tells nodes', lambda: told(cluster, 'regroups: 4 ranks on 3 nodes\n'), 2 * DEADLINE)
    home, = told(cluster, 'regroups: 4 ranks on 3 nodes\n')
    wait_for('nodes hear', lambda: len(told(cluster, 'regroups: 4 ranks on 3 nodes,')) == 3 - dropped, 2 * DEADLINE)
    cluster.daemons[home].kill()
    if back:
        cluster.restart(home)
    goes_on(group, 4)


@gate_tier
def test_the_home_dies_when_it_has_told_some():
    """One, two, none or all of three nodes; its next process tells the others what these have heard."""
    needs_failpoints()
    for dropped, point in cases((1, '@1'), (1, '@3'), (2, '@2+'), more=((1, '@2'), (3, '@1+'), (0, '@9'))):
        with armed_cluster((1, 2, 1), 2, {k: [f'server-regroup-told=drop{point}'] for k in range(5)}, colocated=False,
                           options=PATIENT) as cluster:
            home_dies(cluster, dropped, True)


@full_tier('signs of life: a server that is silent for 200 ms is lost')
def test_the_home_dies_for_good_when_it_has_told_some():
    """The server in its place hears of the next run from those who know."""
    needs_failpoints()
    for dropped, point in cases((1, '@2'), more=((2, '@2+'),)):
        with armed_cluster((1, 2, 1), 2, {k: [f'server-regroup-told=drop{point}'] for k in range(5)}, colocated=False,
                           options=HASTY) as cluster:
            home_dies(cluster, dropped, False)


@gate_tier
def test_the_home_dies_while_nodes_attach():
    """The first, second or third of three."""
    needs_failpoints()
    for n in cases(4, 6, more=(5,)):
        with armed_cluster((1, 2, 1), 1, {3: [f'server-attached=kill@{n}']}, colocated=False, options=PATIENT) as cluster:
            group = Group(cluster, (1, 2, 1))
            group.tensors()
            with Keeper(cluster) as keeper:
                for k in group.live:
                    group.ranks[k].send('regroup')
                keeper.expect(1)
                goes_on(group, 4)


@gate_tier
def test_a_node_dies_when_it_has_heard():
    """Before its ranks have; that which is the home, too."""
    needs_failpoints()
    for dying in cases((1,), (0, 1), more=((0,),)):
        with armed_cluster((1, 2), 0, {k: ['job-attaching=kill@2'] for k in dying}, options=PATIENT) as cluster:
            group = Group(cluster, (1, 2))
            group.tensors()
            with Keeper(cluster) as keeper:
                for k in group.live:
                    group.ranks[k].send('regroup')
                keeper.expect(len(dying))
                goes_on(group, 3)


@gate_tier
def test_a_newcomer_on_a_new_node_is_not_told():
    """Nor is a node that was there; the home dies, and its next process tells both."""
    needs_failpoints()
    for point in cases('@2+', more=('@3',)):
        with armed_cluster((1, 1, 1), 1, {k: [f'server-regroup-told=drop{point}'] for k in range(4)}, colocated=False,
                           options=PATIENT) as cluster:
            group = Group(cluster, (1, 1))
            group.tensors()
            late = guest(group, 2)
            for k in group.live:
                group.ranks[k].send('regroup')
            n = 2 if point == '@3' else 1
            wait_for('nodes hear', lambda: len(told(cluster, 'regroups: 3 ranks on 3 nodes,')) == n, 2 * DEADLINE)
            cluster.daemons[3].kill()
            cluster.restart(3)
            for k in group.live:
                group.ranks[k].answer(2 * DEADLINE)
            late.answer(2 * DEADLINE)
            group.ranks, group.live, group.nodes = [*group.ranks, late], [0, 1, 2], [0, 1, 2]
            group.numbers = {0: 0, 1: 1, 2: 2}
            for tensor in group.TENSORS:
                late.call('tensor', *tensor)
            assert group.turn(1) == [0, 1, 2]
            group.each('leave')


def dies_amid_its_ranks(layout, newcomers, n, told_first):
    """The daemon of the last node dies when it has told n of its ranks of the next run: the others, and newcomers, are taken
    into it as they come back, after those that were told or before."""
    last = len(layout) - 1
    with armed_cluster(layout, 0, {last: [f'job-joined=kill@{layout[last] + n}']}, options=PATIENT) as cluster:
        group = Group(cluster, layout)
        group.tensors()
        group.turn(0)
        late = [newcomer(group, last) for _ in range(newcomers)]
        here = [rank for rank, node in zip(group.ranks, group.nodes) if node == last] + late
        group.ranks, group.nodes = group.ranks + late, group.nodes + [last] * newcomers
        for k in group.live:
            group.ranks[k].send('regroup')
        wait_for('the daemon dies', lambda: not cluster.daemons[last].alive(), 2 * DEADLINE)
        held = here[n:] if told_first else here[:n]
        for rank in held:
            rank.signal(signal.SIGSTOP)
        cluster.restart(last)
        says(cluster, last, 'is the first to come back' if told_first or n < layout[last] else 'waits to be let in')
        for rank in held:
            rank.signal(signal.SIGCONT)
        for rank in group.ranks:
            rank.answer(2 * DEADLINE)
        group.live = list(range(len(group.ranks)))
        assert [int(word) for word in group.each('rank')] == group.live
        for rank in late:
            for tensor in group.TENSORS:
                rank.send('tensor', *tensor)
        for rank in late:
            for _ in group.TENSORS:
                rank.answer(2 * DEADLINE)
        assert group.turn(1) == group.live
        # And it is the next process's like any other run.
        cluster.daemons[last].kill()
        cluster.restart(last)
        assert group.turn(2) == group.live
        group.each('leave')


@gate_tier
def test_a_node_dies_when_it_has_told_some_of_its_ranks():
    needs_failpoints()
    for case in cases(((1, 3), 0, 1, False), ((1, 2), 1, 1, True),
                      more=(((1, 3), 0, 2, True), ((1, 2), 2, 3, False), ((1, 2), 2, 2, False), ((2, 2), 1, 2, True))):
        dies_amid_its_ranks(*case)


def test_the_only_node_dies_when_it_has_told_some_of_its_ranks():
    needs_failpoints()
    for case in cases(((3,), 1, 2, False), more=(((3,), 0, 1, True), ((3,), 0, 2, False), ((3,), 2, 4, True), ((3,), 2, 3, False))):
        dies_amid_its_ranks(*case)


run(globals())
