#!/usr/bin/env python3
"""Ranks of elastic jobs over several nodes regroup: newcomers come in, nodes and ranks are lost meanwhile, daemons die."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import reference as ref
from recovery import *
from elastic import *


@gate_tier
def test_ranks_regroup():
    with Cluster(2, 1) as cluster:
        group = Group(cluster, (2, 1))
        group.tensors()
        assert group.turn(0, lambda: group.lose(0), {0: 1}) == [1, 2]
        regroup(group)
        assert group.turn(1) == [0, 1]
        regroup(group, [1, 0, 1])
        assert group.turn(2) == [0, 1, 2, 3, 4]
        assert group.turn(3, lambda: group.lose(3), {3: 0}) == [0, 1, 2, 4]
        regroup(group)
        assert group.turn(4) == [0, 1, 2, 3]
        group.each('leave')


@full_tier('a newcomer gives up after 1 s, and all must have heard of it by then')
def test_all_are_told_that_newcomers_wait():
    with Cluster(2) as cluster:
        group = Group(cluster, (1, 1), max_ranks=3)
        group.tensors()

        def barrier(request):
            group.each('barrier', request, DEADLINE * 2000)
            group.each('wait', request, DEADLINE * 2000)
            return [int(word.split()[4]) for word in group.each('came', request)]
        assert barrier(0) == [0, 0]
        rank = newcomer(group, 1)
        assert barrier(1) == [1, 1]
        group.each('regroup')
        rank.answer(2 * DEADLINE)
        assert rank.call('rank').split()[0] == '2'
        # There is no room for another.
        rank.keys, other = {}, cluster.trainer(0)
        other.send('join', f'job={group.ranks[0].keys["job"]}', 'elastic=1', 'newcomer=1', 'timeout_ms=1000', 'min_ranks=1')
        says(cluster, 0, 'waits to be let in')
        group.ranks.append(rank)
        group.live.append(2)
        assert barrier(2) == [0, 0, 0]
        group.each('leave')


@gate_tier
def test_a_daemon_dies_while_ranks_regroup():
    if not HAS_FAILPOINTS:
        raise Skip('no failpoints')
    # One of them is the job's home.
    with armed_cluster((1, 1), 1, {k: ['server-regroups=kill'] for k in range(3)}, options=('--lost-timeout=60s',
                                                                                        '--move-timeout=60s')) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        with Keeper(cluster) as keeper:
            group.turn(0)
            regroup(group)
            assert keeper.restarts == 1
            assert group.turn(1) == [0, 1]
            group.each('leave')


@gate_tier
def test_newcomers_go_by_what_the_job_has_asked_for():
    """Also after a restart, when a rank says again what it said."""
    with Cluster(2, 1, colocated=False) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        group.turn(0)
        regroup(group, [1, 0], part_bytes=2 * PART, min_ranks=2, max_ranks=7, request_timeout_ms=DEADLINE * 1500, min_servers=1)
        group.turn(1)
        for i in range(2):
            cluster.daemons[i].kill()
            cluster.restart(i)
            assert group.turn(2 + i) == [0, 1, 2, 3]
        group.each('leave')


@full_tier('signs of life: who is silent for 200 or 500 ms is lost')
def test_they_regroup_when_a_node_is_lost():
    """What its server has summed, the others go on with in the next run, too."""
    with Cluster(3, options=QUICK) as cluster:
        group = Group(cluster, (1, 2, 1))
        group.tensors()
        assert group.turn(0, lambda: group.lose_node(0), {0: 1}) == [1, 2, 3]
        regroup(group, [2])
        assert group.turn(1) == [0, 1, 2, 3]
        group.each('leave')


@gate_tier
def test_they_regroup_down_to_one_node():
    """Its daemon dies and comes back."""
    with Cluster(2, options=('--lost-timeout=60s',)) as cluster:
        group = Group(cluster, (1, 2))
        group.tensors()
        assert group.turn(0, lambda: group.lose(0), {0: 0}) == [1, 2]
        regroup(group)
        assert group.turn(1) == [0, 1]
        cluster.daemons[1].kill()
        cluster.restart(1)
        assert group.turn(2) == [0, 1]
        group.each('leave')


def test_a_newcomer_that_cannot_be_resumed_is_refused():
    """It is told why, before it waits or when ranks regroup; the job goes on, and lets others in."""
    # A ledger over nodes has room for 8 GiB of results.
    quota = (8 << 30) + (512 << 20)
    with Cluster(2, 1, options=(f'--session-quota={quota}',)) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        # One that has no room for any ledger, and one that has room for that of a job on one node.
        shares = (quota - (1 << 20), 1 << 30)
        for share in shares:
            late = newcomer(group, 1, waits=False, share=share)
            try:
                late.answer(2 * DEADLINE)
                raise AssertionError('it waits')
            except BpsError as error:
                assert error.errno == errno.EOPNOTSUPP and 'session_quota' in error.text, error
            late.kill()
        regroup(group, [1])
        assert group.turn(0) == [0, 1, 2]
        group.each('leave')
        # Here before the job is.
        group.jobs, early = cluster.jobs, []
        for share in shares:
            group.ranks[0].keys['job'] = f'job{cluster.jobs + 1}'
            early.append(newcomer(group, 0, share=share))
        group = Group(cluster, (1, 1))
        group.tensors()
        regroup(group)
        for rank in early:
            try:
                rank.answer(2 * DEADLINE)
                raise AssertionError('it was let in')
            except BpsError as error:
                assert error.errno == errno.EOPNOTSUPP and 'session_quota' in error.text, error
        assert group.turn(1) == [0, 1]
        group.each('leave')


def test_there_need_be_no_room_for_another_job():
    with Cluster(2, 1, options=('--max-jobs=1',)) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        for turn in range(3):
            regroup(group, [1] if turn == 1 else [])
            assert group.turn(turn) == group.live
        group.each('leave')


@full_tier("a coordinator's leases, which those that are well must renew")
def test_after_a_rolling_restart_under_a_coordinator():
    """Nobody is left who knows the view in which the job began, but its nodes."""
    with Cluster(2, 1, source='coordinator', options=('--lost-timeout=60s', '--move-timeout=60s')) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        for turn, i in enumerate((0, 1, 2)):
            cluster.daemons[i].kill()
            cluster.restart(i)
            assert group.turn(turn) == [0, 1]
        regroup(group, [0])
        assert group.turn(3) == [0, 1, 2]
        group.each('leave')


def stopped(daemon):
    with open(f'/proc/{daemon.process.pid}/stat') as file:
        return file.read().rsplit(')', 1)[1].split()[0] == 'T'


@full_tier('signs of life: who is silent for 200 or 500 ms is lost')
def test_the_next_run_has_the_servers_that_came():
    """Also where they are the only ones left."""
    with Cluster(2, 1, colocated=False, options=QUICK) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        cluster.grow()
        for i in (0, 1):
            says(cluster, i, 'goes on with 2 of 2 servers')
        assert group.turn(0) == [0, 1]
        regroup(group, [0])
        assert group.turn(1) == [0, 1, 2]
        cluster.daemons[2].kill()
        assert group.turn(2) == [0, 1, 2]
        regroup(group)
        assert group.turn(3) == [0, 1, 2]
        group.each('leave')


@gate_tier
def test_the_last_rank_of_a_node_dies_while_the_next_run_begins():
    """Before its daemon has heard of that run, and before it is attached everywhere: the others go on."""
    if not HAS_FAILPOINTS:
        raise Skip('no failpoints')
    for point in ('server-regroups=stop', 'server-attached=stop@4'):
        with armed_cluster((1, 1, 1), 1, {3: [point]}, colocated=False, options=('--peer-timeout=60s',)) as cluster:
            group = Group(cluster, (1, 1, 1))
            group.tensors()
            assert group.turn(0) == [0, 1, 2]
            for k in group.live:
                group.ranks[k].send('regroup')
            wait_for(f'the server is stopped: {point}', lambda: stopped(cluster.daemons[3]))
            group.lose(2)
            says(cluster, 2, 'died')
            cluster.daemons[3].signal(signal.SIGCONT)
            for k in group.live:
                group.ranks[k].answer(2 * DEADLINE)
            assert group.turn(1) == [0, 1]
            regroup(group)
            assert group.turn(2) == [0, 1]
            group.each('leave')


def waiting(group, n):
    """Barriers until all ranks hear whether newcomers wait."""
    def heard():
        group.each('barrier', 30, DEADLINE * 2000)
        group.each('wait', 30, DEADLINE * 2000)
        said = {int(word.split()[4]) for word in group.each('came', 30)}
        group.each('free', 30)
        assert len(said) == 1, said
        return said == {n}
    wait_for(f'all ranks hear that {n or "no"} newcomers wait', heard, 2 * DEADLINE)


@gate_tier
def test_newcomers_join_on_new_nodes():
    """On nodes that no rank of the job is on: alone, beside others, and again where all ranks of a node were lost."""
    with Cluster(4, 1) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        assert group.turn(0) == [0, 1]
        regroup(group, [2, 2, 0, 3])
        assert group.turn(1) == [0, 1, 2, 3, 4, 5]
        assert [group.node(k) for k in group.live] == [0, 1, 0, 2, 2, 3]
        # Their daemons die and come back; the first nodes are lost with all their ranks.
        for i in (2, 4):
            cluster.daemons[i].kill()
            cluster.restart(i)
        assert group.turn(2) == group.live
        assert group.turn(3, lambda: group.lose(0, 2), {0: 1, 2: 0}) == [1, 3, 4, 5]
        regroup(group, [0])
        assert group.turn(4) == [0, 1, 2, 3, 4]
        group.each('leave')


@gate_tier
def test_all_are_told_of_newcomers_on_new_nodes():
    """And of one that gives up, and of more than there is room for, who wait for the run after."""
    with Cluster(4, 1) as cluster:
        group = Group(cluster, (1, 1), max_ranks=3)
        group.tensors()
        waiting(group, 0)
        lost = newcomer(group, 2)
        waiting(group, 1)
        lost.kill()
        waiting(group, 0)
        first, second = newcomer(group, 2), newcomer(group, 3)
        waiting(group, 1)
        group.each('regroup')
        wait_for('one of them is in', lambda: any('are let in here' in cluster.daemons[i].text() for i in (2, 3)), 2 * DEADLINE)
        if 'are let in here' in cluster.daemons[3].text():
            first, second = second, first
        first.answer(2 * DEADLINE)
        group.nodes, group.ranks, group.live = [0, 1, first.node], [*group.ranks, first], [0, 1, 2]
        group.numbers = {0: 0, 1: 1, first.node: 2}
        for number, name, dtype, n in group.TENSORS:
            first.call('tensor', number, name, dtype, n)
        assert group.turn(0) == [0, 1, 2]
        # There is no room; when there is, it is told of again, and let in.
        waiting(group, 0)
        assert group.turn(1, lambda: group.lose(1), {1: 0}) == [0, 2]
        waiting(group, 1)
        group.each('regroup')
        second.answer(2 * DEADLINE)
        assert second.call('rank').split()[0] == '2'
        group.each('leave')


@full_tier('a stranger gives up after 3 s, in which the job must be there')
def test_a_newcomer_on_a_new_node_comes_before_the_job():
    """It asks until the job is there; a wrong secret lets nobody in; and it is told of the job's end."""
    with Cluster(3, 1) as cluster:
        group = type('', (), {})
        group.cluster, group.live = cluster, [0]
        group.ranks = [type('', (), {'keys': {'job': f'job{cluster.jobs + 1}'}})]
        early = newcomer(group, 2)
        group = Group(cluster, (1, 1))
        group.tensors()
        waiting(group, 1)
        stranger = cluster.trainer(2)
        stranger.send('join', f'job={group.ranks[0].keys["job"]}', 'elastic=1', 'newcomer=1', 'timeout_ms=3000',
                      'min_ranks=1', 'secret=other')
        group.each('regroup')
        early.answer(2 * DEADLINE)
        assert early.call('rank').split()[0] == '2'
        early.call('leave')
        error = refused_answer(stranger)
        assert error.errno == errno.ETIMEDOUT and 'no elastic job' in error.text, error
        group.turn(0)
        again = newcomer(group, 2)
        waiting(group, 1)
        group.each('leave')
        error = refused_answer(again)
        assert error.errno == errno.ECANCELED and 'has ended' in error.text, error


def refused_answer(rank):
    try:
        rank.answer(2 * DEADLINE)
    except BpsError as error:
        return error
    raise AssertionError('let in')


@full_tier("a coordinator's leases, which those that are well must renew")
def test_a_new_node_under_a_coordinator():
    """A daemon that starts when the job runs: it is in no view that the job knows."""
    with Cluster(3, 1, source='coordinator', start=False) as cluster:
        daemons = {i: cluster.start(i, wait=False) for i in (3, 1, 0)}
        for i in (3, 1, 0):
            daemons[i].ready()
        cluster.daemons = [daemons[0], daemons[1], daemons[3]]
        group = Group(cluster, (1, 1))
        group.tensors()
        assert group.turn(0) == [0, 1]
        cluster.daemons.insert(2, cluster.start(2))
        regroup(group, [2])
        assert group.turn(1) == [0, 1, 2]
        cluster.daemons[2].kill()
        cluster.restart(2)
        assert group.turn(2) == [0, 1, 2]
        regroup(group)
        assert group.turn(3) == [0, 1, 2]
        group.each('leave')


@gate_tier
def test_a_daemon_dies_while_a_new_node_is_let_in():
    """One of them is the job's home: the newcomer asks the next process, and is in this run or the one after it."""
    if not HAS_FAILPOINTS:
        raise Skip('no failpoints')
    with armed_cluster((1, 1, 1), 1, {k: ['server-regroups=kill'] for k in range(4)}, options=('--lost-timeout=60s',
                                                                                        '--move-timeout=60s')) as cluster:
        group = Group(cluster, (1, 1))
        group.tensors()
        with Keeper(cluster) as keeper:
            group.turn(0)
            late = guest(group, 2)
            group.each('regroup')
            assert keeper.restarts == 1
            if 'regroups: 3 ranks on 3 nodes, 1 here' not in cluster.daemons[0].text():
                waiting(group, 1)
                group.each('regroup')
            late.answer(2 * DEADLINE)
            group.ranks, group.live, group.nodes = [*group.ranks, late], [0, 1, 2], [0, 1, 2]
            group.numbers = {0: 0, 1: 1, 2: 2}
            for number, name, dtype, n in group.TENSORS:
                late.call('tensor', number, name, dtype, n)
            assert group.turn(1) == [0, 1, 2]
            group.each('leave')


run(globals())
