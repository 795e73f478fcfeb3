#!/usr/bin/env python3
"""Servers that come to the cluster while a job runs take their share of it. Trainers see no error, results are the same bits."""
import os, signal, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
from recovery import *
import reference as ref
from etcd import Etcd


def went_on(cluster, n_in, n, nodes=(0, 1)):
    for node in nodes:
        says(cluster, node, f'goes on with {n_in} of {n} servers')


def sums(cluster, i):
    """Bytes that a daemon has summed; where bpsctl cannot be run, nothing is known."""
    return None if TSAN else cluster.daemons[i].ctl('metrics')['bps_server_bytes_summed_total']


def takes_part(cluster, i, ranks, layout, turn):
    """One turn, of which this server sums some."""
    before = sums(cluster, i)
    turn = turns(ranks, layout, turn)
    assert TSAN or sums(cluster, i) > before, f'{cluster.names[i]} sums nothing'
    return turn


def shares(cluster, i, want):
    """What bpsctl says of the job's servers: (name, state, thousandths, whether it was added)."""
    if not TSAN:
        wait_for(f'servers are {want}', lambda: [(s['name'], s['state'], s['share'], s.get('added')) for s in
                                                 cluster.daemons[i].ctl('job', 'job1')['servers']] == want)


def comes_and_goes(cluster, layout, **keys):
    """A server comes, while requests are under way; it is lost; it is back; and at last it is the only one."""
    ranks, grown = job(cluster, layout, **keys), []
    turn = turns(ranks, layout, 0)
    turn = turns(ranks, layout, turn, then=lambda: grown.append(cluster.grow()))
    went_on(cluster, 2, 2)
    turn = takes_part(cluster, grown[0], ranks, layout, turn)
    for node in 0, 1:
        shares(cluster, node, [('s0', 'in', 500, None), (cluster.names[grown[0]], 'in', 500, True)])
    turn = turns(ranks, layout, turn, then=cluster.daemons[grown[0]].kill)
    says(cluster, 0, 'goes on with 1 of 2 servers')
    shares(cluster, 0, [('s0', 'in', 1000, None), (cluster.names[grown[0]], 'out', 0, True)])
    cluster.restart(grown[0])
    for node in 0, 1:
        wait_for('it is in again', lambda: cluster.daemons[node].text().count('goes on with 2 of 2') >= 2, 2 * DEADLINE)
    turn = takes_part(cluster, grown[0], ranks, layout, turn)
    turn = turns(ranks, layout, turn, then=cluster.daemons[2].kill)
    turns(ranks, layout, turn, 2)
    each(ranks, 'leave')


@gate_tier
def test_a_server_comes_to_a_static_list():
    with Cluster(2, 1, colocated=False) as cluster:
        comes_and_goes(cluster, (2, 1))


@full_tier('leases of 1 s, which those that are well must renew')
def test_a_server_comes_to_a_coordinator():
    """Which is not the server that is killed."""
    class Apart(Cluster):
        def roles(self, i):
            return 'agent' if i == self.coordinated_by else super().roles(i)

        def start(self, i, wait=True, options=()):
            return super().start(i, wait, [*options, '--lease=1s'])
    with Apart(2, 1, source='coordinator', colocated=False, start=False) as cluster:
        # n0 and n1, s0, and the coordinator by itself
        cluster.names.append('c')
        cluster.addresses.append(cluster.address(3))
        cluster.coordinated_by = 3
        cluster.daemons = [cluster.start(i, wait=False) for i in range(4)]
        for daemon in cluster.daemons:
            daemon.ready()
        comes_and_goes(cluster, (1, 1), min_servers=1)


@full_tier('leases of 2 s, which those that are well must renew')
def test_a_server_comes_to_etcd():
    with Etcd() as etcd, Cluster(2, 1, source='etcd', colocated=False,
                                 options=['--etcd-endpoints=' + etcd.endpoints, '--lease=2s']) as cluster:
        comes_and_goes(cluster, (1, 1), min_servers=1)


@full_tier('leases of 2 s, which those that are well must renew')
def test_a_server_comes_back_at_another_address():
    """As a pod does. It is another server, and nobody waits for the one that was."""
    layout = (1, 1)
    with Etcd() as etcd, Cluster(2, 2, source='etcd', colocated=False, start=False) as cluster:
        cluster.options = ['--etcd-endpoints=' + etcd.endpoints, '--lease=2s', '--move-timeout=60m', '--lost-timeout=60m']
        cluster.daemons = [cluster.start(i, wait=False) for i in range(4)]
        for daemon in cluster.daemons:
            daemon.ready()
        ranks = job(cluster, layout, min_servers=2)
        turn = turns(ranks, layout, 0)

        def moves():
            cluster.daemons[3].kill()
            cluster.addresses[3] = cluster.address(4)
            cluster.restart(3)
        turn = turns(ranks, layout, turn, then=moves)
        went_on(cluster, 2, 3)
        turn = takes_part(cluster, 3, ranks, layout, turn)
        shares(cluster, 0, [('s0', 'in', 500, None), ('s1', 'out', 0, None), ('s1', 'in', 500, True)])
        each(ranks, 'leave')


@gate_tier
def test_an_agent_is_killed_when_only_those_that_came_are_left():
    """Its next process knows of them from the ledger: nobody else could tell it."""
    layout = (2, 1)
    with Cluster(2, 1, colocated=False) as cluster:
        ranks = job(cluster, layout)
        turn = turns(ranks, layout, 0)
        cluster.grow()
        went_on(cluster, 2, 2)
        turn = turns(ranks, layout, turn, then=cluster.daemons[2].kill)
        went_on(cluster, 1, 2)

        def again():
            for i in 0, 1:
                cluster.daemons[i].kill()
                cluster.restart(i)
        turn = turns(ranks, layout, turn, then=again)
        turns(ranks, layout, turn)
        each(ranks, 'leave')


@gate_tier
def test_one_that_came_drains():
    layout = (1, 1)
    with Cluster(2, 1, colocated=False) as cluster:
        ranks = job(cluster, layout)
        turn = turns(ranks, layout, 0)
        came = cluster.grow()
        went_on(cluster, 2, 2)
        turn = takes_part(cluster, came, ranks, layout, turn)
        if TSAN:
            raise Skip('bpsctl is not run under the thread sanitizer')
        assert cluster.daemons[came].ctl('drain') == {'moved': 1, 'stay': 0}
        turn = turns(ranks, layout, turn, 2)
        shares(cluster, 1, [('s0', 'in', 1000, None), ('s1', 'out', 0, True)])
        each(ranks, 'leave')


@gate_tier
def test_several_come_one_after_another():
    """More than one under way at a time, and beside the ranks too."""
    layout = (2, 1, 1)
    with Cluster(3, 0) as cluster:
        ranks, turn = job(cluster, layout), 0
        for n in 4, 5, 6:
            turn = turns(ranks, layout, turn, then=cluster.grow)
        went_on(cluster, 6, 6, (0, 1, 2))
        for came in 3, 4, 5:
            turn = takes_part(cluster, came, ranks, layout, turn)
        each(ranks, 'leave')


# Where a daemon is killed while a server comes: by what it is, each of its next processes in turn.
PLACES = ((0, ['server-added=kill', 'job-moved=kill', 'server-attached-again=kill@3']),
          (1, ['job-moved=kill', 'server-attached-again=kill@3']),
          (2, ['server-moved=kill', 'server-attached=kill@3']),
          (3, ['server-attached=kill', 'server-attached=kill@2', 'server-summed=kill@2']))
FEW = ((0, ['server-added=kill', 'server-attached-again=kill@3']), (1, ['job-moved=kill']), (2, ['server-moved=kill']),
       (3, ['server-summed=kill@2']))


@gate_tier
def test_killed_while_a_server_comes():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    layout = (2, 1)
    for victim, places in some(PLACES, FEW):
        for place in places:
            armed = {} if victim == 3 else {victim: [place]}
            with armed_cluster(layout, 1, armed, colocated=False) as cluster:
                ranks = job(cluster, layout)
                turn = turns(ranks, layout, 0)
                with failpoints(place if victim == 3 else ''):
                    cluster.grow()
                with Keeper(cluster) as keeper:
                    # In which round the job goes on with the server is up to the daemons.
                    for _ in range(1000):
                        turn = turns(ranks, layout, turn, 2)
                        if keeper.restarts or keeper.error:
                            break
                    keeper.expect(1)
                    turn = turns(ranks, layout, turn)
                    each(ranks, 'leave')


@gate_tier
def test_another_is_killed_while_one_comes():
    layout = (2, 1)
    for victim in 2, 3:
        with Cluster(2, 2, colocated=False) as cluster:
            ranks = job(cluster, layout)
            turn = turns(ranks, layout, 0)
            turn = turns(ranks, layout, turn, then=lambda: (cluster.grow(), cluster.daemons[victim].kill()))
            turn = turns(ranks, layout, turn)
            went_on(cluster, 2, 3)
            turns(ranks, layout, turn)
            each(ranks, 'leave')


run(globals())
