#!/usr/bin/env python3
"""Elastic jobs over several nodes: ranks and whole nodes are lost, and every round has one set of contributors: the same
bits on every rank that is left, those of the reference over this set, and the same word on who came."""
import os, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import reference as ref
from recovery import *
from elastic import *

@gate_tier
def test_a_rank_is_lost():
    with Cluster(2, 1) as cluster:
        group = Group(cluster, (2, 2))
        group.tensors()
        assert group.turn(0) == [0, 1, 2, 3]
        assert group.turn(1, lambda: group.lose(1), {1: 1}) == [0, 2, 3]
        assert group.turn(2) == [0, 2, 3]
        group.turn(3, lambda: group.lose(2))
        assert group.turn(4) == [0, 3]
        group.each('leave')


@gate_tier
def test_a_rank_leaves_with_a_round_under_way():
    """What it has given counts in all parts or in none: those that left before it did, and those that leave after."""
    n = 8 << 20
    data = [np.random.default_rng((SEED, k)).integers(-1000, 1000, n, np.int32) for k in range(3)]
    for who in (1, 2):  # one of two ranks of a node; the only one
        with Cluster(2, 1, colocated=False, options=('--peer-timeout=60s',)) as cluster:
            group = Group(cluster, (2, 1))
            group.each('tensor', 9, 'large', INT32, n)
            # The server takes no more than what its connections hold.
            cluster.daemons[2].signal(signal.SIGSTOP)
            for k in group.live:
                group.ranks[k].submit(0, 9, data[k].tobytes(), op=PUSH_PULL, red=SUM, out=n, inplace=1, shared=1)
            group.ranks[who].send('leave')
            group.live.remove(who)
            daemon, name = cluster.daemons[group.node(who)], group.ranks[who].keys['job']
            wait_for('the daemon has heard of it', lambda: daemon.ctl('job', name)['ranks'][who]['state'] != 'here')
            cluster.daemons[2].signal(signal.SIGCONT)
            group.each('wait', 0, DEADLINE * 2000)
            came = {int(word.split()[3]) for word in group.each('came', 0)}
            assert came in ({2}, {3}), came
            want = sum(data[k] for k in range(3) if came == {3} or k != who).tobytes()
            for k in group.live:
                assert group.ranks[k].result(0) == want, f'rank {who} left, {came} ranks came, on rank {k}'
            group.ranks[who].answer(DEADLINE)
            group.each('leave')


@gate_tier
def test_the_last_rank_of_a_node_is_lost():
    """Its daemon goes on summing."""
    for colocated in (True, False):
        with Cluster(3, 0 if colocated else 1, colocated=colocated) as cluster:
            group = Group(cluster, (1, 2, 1))
            group.tensors()
            assert group.turn(0, lambda: group.lose(0), {0: 2}) == [1, 2, 3]
            assert group.turn(1, lambda: group.lose(3), {3: 0}) == [1, 2]
            assert group.turn(2) == [1, 2]
            group.each('leave')


@full_tier('signs of life: who is silent for 200 or 500 ms is lost')
def test_a_node_is_lost():
    """First the job's home is somewhere, then it is lost: whichever of them it is."""
    for victim in (0, 1, 2):
        with Cluster(3, options=QUICK) as cluster:
            group = Group(cluster, (2, 1, 2))
            group.tensors()
            group.turn(0)
            group.turn(1, lambda: group.lose_node(victim), {k: 1 for k in range(5) if group.node(k) == victim})
            assert group.turn(2) == group.live
            group.each('leave')


@full_tier('signs of life: who is silent for 200 or 500 ms is lost')
def test_nodes_are_lost_one_after_another_beside_spare_servers():
    with Cluster(3, 2, colocated=False, options=QUICK) as cluster:
        group = Group(cluster, (1, 2, 1))
        group.tensors()
        assert group.turn(0, lambda: group.lose_node(1), {1: 2, 2: 0}) == [0, 3]
        assert group.turn(1, lambda: group.lose_node(0), {0: 1}) == [3]
        assert group.turn(2) == [3]
        group.each('leave')


@gate_tier
def test_a_daemon_that_comes_back_is_no_loss():
    with Cluster(2, 1, options=('--lost-timeout=60s',)) as cluster:
        group = Group(cluster, (2, 1))
        group.tensors()

        def again(i):
            cluster.daemons[i].kill()
            cluster.restart(i)
        for turn, i in enumerate((0, 1, 2)):
            assert group.turn(turn, lambda: again(i)) == [0, 1, 2]
        # It remembers who is gone.
        assert group.turn(3, lambda: group.lose(1), {1: 1}) == [0, 2]
        assert group.turn(4, lambda: again(0)) == [0, 2]
        assert group.turn(5, lambda: again(1)) == [0, 2]
        group.each('leave')


@full_tier('signs of life: who is silent for 200 or 500 ms is lost')
def test_a_node_is_lost_at_any_point():
    """Whatever the others have of a round by then: it has one set."""
    if not HAS_FAILPOINTS:
        raise Skip('no failpoints')
    for point in ('part-answered=kill@2', 'part-held=kill@5', 'round-committed=kill@2', 'part-scattered=kill@4',
                  'round-scattered=kill@3', 'server-summed=kill@3', 'server-result-answered=kill@7'):
        with armed_cluster((1, 1, 1), 0, {1: [point]}, options=QUICK) as cluster:
            group = Group(cluster, (1, 1, 1))
            group.tensors()

            def lost():
                wait_for(f'daemon 1 at {point}', lambda: not cluster.daemons[1].alive())
                group.lose(1)
            try:
                group.turn(0, lost)
                assert group.turn(1) == [0, 2], point
            except Exception as error:
                raise AssertionError(f'{point}: {error}') from error
            group.each('leave')


@gate_tier
def test_daemons_die_and_come_back_while_a_rank_is_lost():
    """At each hand-over of the loss itself, in agents and servers."""
    if not HAS_FAILPOINTS:
        raise Skip('no failpoints')
    for point in ('job-moved=kill', 'server-moved=kill', 'server-attached-again=kill@5', 'round-committed=kill@3',
                  'part-scattered=kill@9', 'round-scattered=kill@3', 'part-held=kill@9'):
        for i in (0, 1):
            with armed_cluster((2, 1), 1, {i: [point]}, options=('--lost-timeout=60s', '--move-timeout=60s')) as cluster:
                group = Group(cluster, (2, 1))
                group.tensors()
                with Keeper(cluster):
                    for turn in range(3):
                        group.turn(turn, turn == 1 and (lambda: group.lose(1)), {1: 1} if turn == 1 else None)
                    assert group.live == [0, 2]
                    group.each('leave')


@gate_tier
def test_a_rank_dies_that_had_come_back_after_a_restart():
    """Before all others of its node have; over nodes, and where the node has all."""
    for layout in ((3, 1), (3,)):
        with Cluster(len(layout), options=('--lost-timeout=60s', '--move-timeout=60s')) as cluster:
            group = Group(cluster, layout)
            group.tensors()
            assert group.turn(0) == group.live
            name = group.ranks[0].keys['job']
            group.ranks[2].signal(signal.SIGSTOP)
            cluster.daemons[0].kill()
            cluster.restart(0)

            def back():
                jobs = [job for job in cluster.daemons[0].ctl('jobs')['jobs'] if job['job'] == name]
                return jobs and sum(rank['state'] == 'here' for rank in cluster.daemons[0].ctl('job', name)['ranks']) == 2
            wait_for('two are back', back, 2 * DEADLINE)
            group.lose(0)
            says(cluster, 0, 'had just come back')
            group.ranks[2].signal(signal.SIGCONT)
            assert group.turn(1) == group.live
            group.each('leave')


@full_tier('a deadline of 1500 ms that something good must meet')
def test_a_rank_that_stands_still_is_dropped():
    """After its deadline. When it wakes it is told so."""
    with Cluster(2) as cluster:
        group = Group(cluster, (2, 1), request_timeout_ms=1500)
        group.tensors()
        group.turn(0)
        for k in (1, 2):  # beside another rank, and alone on its node
            first = group.submit(k, {k: 0})
            group.live.remove(k)
            assert group.finish(k, first, group.live) == group.live
            error = refused(group.ranks[k], 'tensor', 9, 'late', INT32, 1)
            assert 'dropped' in error.text or 'without the ranks of this node' in error.text, error
        group.each('leave')


def test_too_few_are_left():
    with Cluster(3) as cluster:
        group = Group(cluster, (1, 1, 1), min_ranks=2)
        group.tensors()
        assert group.turn(0, lambda: group.lose(0), {0: 1}) == [1, 2]
        first = group.submit(1, {2: 1})
        group.lose(2)
        error = refused(group.ranks[1], request=first + 2)
        assert 'too few ranks' in error.text, error
        # The name is free again.
        again = Group(cluster, (1, 1, 1))
        again.tensors()
        assert again.turn(2) == [0, 1, 2]
        again.each('leave')


def test_who_leaves_is_not_waited_for():
    with Cluster(2) as cluster:
        group = Group(cluster, (2, 2), min_ranks=4)
        group.tensors()
        group.turn(0)
        for k in (1, 2, 3):
            group.ranks[k].call('leave')
            group.live.remove(k)
            assert group.turn(k) == group.live
        group.each('leave')


def test_operations_that_move():
    with Cluster(2, 1) as cluster:
        group, n = Group(cluster, (2, 1)), 777
        group.tensors()
        data = [ref.random(INT32, n, (SEED, 50, k)).tobytes() for k in range(3)]

        def gather(request, size):
            for k in group.live:
                group.ranks[k].submit(request, 5, data[k], op=ALL_GATHER, out=n * size)

        def gathered(request):
            group.each('wait', request, DEADLINE * 2000)
            for k in group.live:
                assert group.ranks[k].result(request) == b''.join(data[j] for j in group.live)
        gather(0, 3)
        gathered(0)
        group.lose(1)
        # Not all have heard of the loss: they do it once more.
        gather(1, 3)
        for k in group.live:
            refused(group.ranks[k], request=1, number=errno.EREMCHG)
        # With the result of a barrier all have.
        group.each('barrier', 7, DEADLINE * 2000)
        group.each('wait', 7, DEADLINE * 2000)
        gather(2, 2)
        gathered(2)
        values = ref.random(UINT8, N, (SEED, 51)).tobytes()
        for k in group.live:
            root = int(k == 2)
            group.ranks[k].submit(3, 4, values if root else None, op=BROADCAST, root=1, out=N, inplace=root)
        group.each('wait', 3, DEADLINE * 2000)
        assert all(group.ranks[k].result(3) == values for k in group.live)
        group.each('barrier', 4, DEADLINE * 2000)
        group.each('wait', 4, DEADLINE * 2000)
        # From a rank that is gone.
        for k in group.live:
            group.ranks[k].submit(5, 4, values if k == 2 else None, op=BROADCAST, root=1, out=N, inplace=int(k == 2))
            break
        group.lose(2)
        refused(group.ranks[0], request=5, number=errno.EREMCHG)
        group.ranks[0].submit(6, 5, data[0], op=ALL_TO_ALL, out=n)
        error = refused(group.ranks[0], request=6, number=errno.EOPNOTSUPP)
        assert 'several nodes' in error.text, error
        group.ranks[0].call('free', 6)
        group.each('leave')


class Scatter:
    """reduce_scatters of a group: blocks of many sizes, in place or not."""

    def __init__(self, group):
        self.group = group

    def submit(self, turn, counts, shared=0, inplace=0, known=None):
        """One with these counts, of all who live; known: whom they know to be in the job."""
        group, n = self.group, sum(counts)
        self.data = {k: ref.random(FLOAT32, n, (SEED, 60, turn, k)) for k in range(len(group.ranks))}
        self.counts, self.request, self.came = counts, 100 + turn, list(group.live)
        for k in group.live:
            i = (known or group.live).index(k)
            group.ranks[k].submit(self.request, 6, self.data[k].tobytes(), op=REDUCE_SCATTER, red=AVERAGE, out=counts[i],
                                  counts=counts, shared=shared, inplace=inplace, at=4 * sum(counts[:i]) if inplace else 0)

    def finish(self):
        """It is that of those who had submitted it."""
        group, came = self.group, self.came
        group.each('wait', self.request, DEADLINE * 2000)
        want = ref.reduce(FLOAT32, AVERAGE, [self.data[k] for k in came], group.layout_of(came))
        for i, k in enumerate(came):
            if k in group.live:
                at = sum(self.counts[:i])
                assert group.ranks[k].result(self.request) == want[at:at + self.counts[i]].tobytes(), k
        assert {tuple(word.split()[1::2]) for word in group.each('came', self.request)} == {(str(len(came)),) * 2}

    def fails(self):
        for k in self.group.live:
            refused(self.group.ranks[k], request=self.request, number=errno.EREMCHG)

    def again(self, turn, counts):
        """After a barrier all have heard the same."""
        group = self.group
        group.each('barrier', 400 + turn, DEADLINE * 2000)
        group.each('wait', 400 + turn, DEADLINE * 2000)
        self.submit(turn, counts)
        self.finish()


def test_reduce_scatter():
    """A rank is lost before, and while others wait for it; daemons die and come back."""
    with Cluster(3, 1, options=('--lost-timeout=60s', '--move-timeout=60s')) as cluster:
        group = Group(cluster, (2, 1, 2))
        group.each('tensor', 6, 'blocks', FLOAT32, -1)
        scatter = Scatter(group)
        for turn, keys in enumerate(({}, {'shared': 1}, {'shared': 1, 'inplace': 1})):
            scatter.submit(turn, [N, 0, 301, N // 2, 1], **keys)
            scatter.finish()
        # Not all have heard of a loss.
        group.lose(1)
        scatter.submit(3, [N, 0, 301, N // 2, 1], known=range(5))
        scatter.fails()
        scatter.again(4, [N, 0, 301, N // 2])
        # One does not come to it.
        late = group.live.pop()
        scatter.submit(5, [N, 0, 301, N // 2], known=[0, 2, 3, 4])
        group.ranks[late].kill()
        scatter.fails()
        scatter.again(6, [N, 0, 301])
        for i in range(4):
            cluster.daemons[i].kill()
            cluster.restart(i)
            scatter.submit(7 + i, [N, 7, 301], inplace=1, shared=1)
            scatter.finish()
        group.each('leave')


@full_tier('signs of life: who is silent for 200 or 500 ms is lost')
def test_a_node_is_lost_while_blocks_are_scattered():
    """All others end the round, or none."""
    if not HAS_FAILPOINTS:
        raise Skip('no failpoints')
    for point in ('part-held=kill@3', 'round-committed=kill', 'part-scattered=kill@2', 'round-scattered=kill'):
        with armed_cluster((1, 2, 1), 1, {0: [point]}, colocated=False, options=QUICK) as cluster:
            group = Group(cluster, (1, 2, 1))
            group.each('tensor', 6, 'blocks', FLOAT32, -1)
            scatter = Scatter(group)
            scatter.submit(0, [N, N, N, N], inplace=1)
            wait_for(f'a daemon dies: {point}', lambda: not cluster.daemons[0].alive(), 2 * DEADLINE)
            group.lose(0)
            try:
                group.ranks[1].wait(scatter.request, DEADLINE * 2000)
                scatter.finish()
            except BpsError as error:
                assert error.errno == errno.EREMCHG, error
                scatter.fails()
            scatter.again(1, [N, N, N])
            group.each('leave')


def test_without_resume_it_is_refused():
    with Cluster(2, options=('--resume=off',)) as cluster:
        ranks = cluster.job((1, 1), join=False, elastic=1)
        for rank in ranks:
            rank.send('join', *(f'{key}={value}' for key, value in rank.keys.items()))
        for rank in ranks:
            try:
                rank.answer()
            except BpsError as error:
                assert 'resume' in error.text, error
                continue
            raise AssertionError('joined')


run(globals())
