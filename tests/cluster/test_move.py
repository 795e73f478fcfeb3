#!/usr/bin/env python3
"""A job over several nodes that goes on with other servers: one is lost for good, drains, or is back. Trainers see no error,
results are the same bits."""
import os, random, signal, subprocess, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import reference as ref
from recovery import *


@gate_tier
def test_each_server_is_lost_for_good():
    """One of them is the job's home: the tensors that are declared afterwards get their numbers elsewhere."""
    layout = (1, 1, 2)
    for victim in (3, 4):
        with Cluster(3, 2, colocated=False) as cluster:
            ranks = job(cluster, layout)
            turn = turns(ranks, layout, 0)
            turn = turns(ranks, layout, turn, then=cluster.daemons[victim].kill)
            turns(ranks, layout, turn, 2)
            says(cluster, 0, 'goes on with 1 of 2 servers')
            each(ranks, 'leave')


@gate_tier
def test_one_after_another_is_lost_until_one_is_left():
    layout = (1, 1)
    with Cluster(2, 3, colocated=False) as cluster:
        ranks, turn = job(cluster, layout), 0
        for victim in (3, 2):
            turn = turns(ranks, layout, turn, then=cluster.daemons[victim].kill)
        turns(ranks, layout, turn)
        says(cluster, 0, 'goes on with 1 of 3 servers')
        each(ranks, 'leave')


@gate_tier
def test_those_beside_the_ranks_take_over():
    """Of the servers on machines of their own none is left."""
    layout = (1, 1, 1)
    with Cluster(3, 1) as cluster:
        ranks = job(cluster, layout)
        turn = turns(ranks, layout, turns(ranks, layout, 0), then=cluster.daemons[3].kill)
        turns(ranks, layout, turn)
        each(ranks, 'leave')


@gate_tier
def test_the_same_tensors_round_after_round():
    layout, n = (1, 1, 1), 6 * PART // 4 + 12345
    with Cluster(3, 3, colocated=False) as cluster:
        ranks = job(cluster, layout)
        work = push_pull(layout, FLOAT32, SUM, n, 7, 1, 1)
        declare(ranks, [work])
        values = [ref.random(FLOAT32, n, (SEED, 7, k)) for k in range(3)]
        for turn in range(12):
            for k, rank in enumerate(ranks):
                rank.submit(turn, 0, values[k].tobytes(), op=PUSH_PULL, red=SUM, out=n, inplace=1, shared=turn % 2)
            if turn in (3, 7):
                cluster.daemons[3 + turn // 4].kill()
            each(ranks, 'wait', turn, DEADLINE * 2000)
            total = ref.reduce(FLOAT32, SUM, values, layout)
            for k, rank in enumerate(ranks):
                assert rank.result(turn) == total.tobytes(), f'round {turn} is wrong on rank {k}'
                rank.call('free', turn)
            with np.errstate(all='ignore'):
                values = [total * np.float32(0.3) + data for data in values]
        each(ranks, 'leave')


@gate_tier
def test_a_server_that_is_back_takes_its_share_again():
    layout = (1, 1)
    for victim, other in ((2, 3), (3, 2)):  # one of them is the job's home
        with Cluster(2, 2, colocated=False) as cluster:
            ranks = job(cluster, layout)
            turn = turns(ranks, layout, 0, then=cluster.daemons[victim].kill)
            says(cluster, 1, 'goes on with 1 of 2 servers')
            cluster.restart(victim)
            says(cluster, 1, 'goes on with 2 of 2 servers')
            turn = turns(ranks, layout, turn)
            # The other is not needed any more.
            turns(ranks, layout, turn, then=cluster.daemons[other].kill)
            each(ranks, 'leave')


@full_tier('leases of 1 s, which those that are well must renew')
def test_a_server_that_the_cluster_drops():
    """Nobody waits for it for move_timeout: killed, its lease is over; stopped, it leaves."""
    layout = (1, 1)
    for number in (signal.SIGKILL, signal.SIGTERM):
        with Cluster(2, 3, source='coordinator', colocated=False, options=['--move-timeout=60m', '--lost-timeout=60m', '--lease=1s']) as cluster:
            ranks = job(cluster, layout, min_servers=3)
            turn = turns(ranks, layout, 0)
            turn = turns(ranks, layout, turn, then=lambda: cluster.daemons[2].signal(number))
            says(cluster, 0, 'goes on with 2 of 3 servers')
            turns(ranks, layout, turn)
            each(ranks, 'leave')


@gate_tier
def test_a_server_drains():
    """Nothing fails and nothing is lost by it; it may be stopped then."""
    layout = (2, 1)
    with Cluster(2, 2, colocated=False) as cluster:
        ranks, drained = job(cluster, layout), []
        turn = turns(ranks, layout, 0)
        turn = turns(ranks, layout, turn, then=lambda: drained.append(cluster.daemons[2].ctl('drain')))
        assert drained == [{'moved': 1, 'stay': 0}], drained
        says(cluster, 0, 'goes on with 1 of 2 servers')
        turn = turns(ranks, layout, turn)
        assert not cluster.daemons[2].ctl('jobs').get('jobs'), cluster.daemons[2].ctl('jobs')
        # What begins now goes as soon as it is there.
        others = job(cluster, (1, 1))
        turns(others, (1, 1), 0)
        says(cluster, 0, 'job job2: goes on with 1 of 2 servers')
        # The last one stays, also in a job that begins when all of them drain.
        assert cluster.daemons[3].ctl('drain') == {'moved': 0, 'stay': 2}
        turns(ranks, layout, turn)
        turns(others, (1, 1), 1)
        last = job(cluster, (1, 1))
        turns(last, (1, 1), 0, 2)
        for group in ranks, others, last:
            each(group, 'leave')


@gate_tier
def test_servers_beside_ranks_drain_while_results_overwrite_contributions():
    """What a node has half of, over what it gave, it asks the next server for; who keeps it brings it there."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    layout = (1, 1, 2)
    with armed_cluster(layout, 0, {0: ['answer-half=delay@3+']}, colocated=True) as cluster:
        ranks = job(cluster, layout, part_bytes=1 << 18)
        work = push_pull(layout, INT32, SUM, 1 << 19, 1, 1, 0)
        declare(ranks, [work])
        for victim in (None, 2, 1):
            submit(ranks, [work])
            if victim:
                assert cluster.daemons[victim].ctl('drain') == {'moved': 1, 'stay': 0}
            finish(ranks, [work])
        each(ranks, 'leave')


@gate_tier
def test_a_server_drains_by_another_node():
    """Whoever is asked: a node that is connected with the server, or was not until then."""
    layout = (1, 1)
    for asked in (0, 3):
        with Cluster(2, 2, colocated=False) as cluster:
            ranks = job(cluster, layout)
            turn = turns(ranks, layout, 0)
            asked = cluster.daemons[asked]
            assert asked.ctl('drain', 's0') == {'moved': 1, 'stay': 0}
            says(cluster, 0, 'goes on with 1 of 2 servers')
            turns(ranks, layout, turn)
            for node, words in (('n1', 'node n1 is no server'), ('s7', 'the cluster has no node s7')):
                try:
                    asked.ctl('drain', node)
                except AssertionError as error:
                    assert words in str(error), error
                else:
                    raise RuntimeError(f'{node} drains')
            each(ranks, 'leave')


def test_an_agent_is_killed_while_its_job_goes_on_without_a_server():
    layout = (2, 1)
    with Cluster(2, 2, colocated=False) as cluster:
        ranks = job(cluster, layout)
        turn = turns(ranks, layout, 0, then=cluster.daemons[2].kill)
        says(cluster, 1, 'goes on with 1 of 2 servers')

        def again():
            cluster.daemons[0].kill()
            cluster.restart(0)
        turn = turns(ranks, layout, turn, then=again)
        turns(ranks, layout, turn)
        each(ranks, 'leave')


# Where a daemon is killed, by what it is then, when a server is lost for good.
HAND_OVERS = ((0, ('server-lost=kill', 'job-moved=kill', 'server-attached-again=kill@3')),
              (3, ('server-moved=kill', 'server-attached=kill@3')))


@gate_tier
def test_killed_at_each_hand_over():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    layout = (2, 1)
    for index, places in HAND_OVERS:
        for place in places:
            with armed_cluster(layout, 2, {index: [place]}, colocated=False) as cluster, Keeper(cluster) as keeper:
                keeper.given_up.add(2)
                ranks = job(cluster, layout)
                turn = turns(ranks, layout, 0, then=lambda: keeper.kill(2))
                keeper.expect(1)
                turns(ranks, layout, turn)
                each(ranks, 'leave')


@gate_tier
def test_words_that_are_not_heard():
    """Of a server's loss, of results that all have, signs of life: nothing depends on one of them."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    layout = (1, 1)
    armed = {0: ['move-sent=drop@1+,ping-sent=drop'], 3: ['release-sent=drop@1+']}
    with armed_cluster(layout, 2, armed, colocated=False) as cluster:
        ranks = job(cluster, layout)
        turn = turns(ranks, layout, 0)
        turn = turns(ranks, layout, turn, then=lambda: cluster.daemons[2].kill())
        says(cluster, 0, 'goes on with 1 of 2 servers')
        cluster.restart(2)
        says(cluster, 0, 'goes on with 2 of 2 servers')
        turns(ranks, layout, turn)
        each(ranks, 'leave')


run(globals())
