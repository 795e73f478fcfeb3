#!/usr/bin/env python3
"""Ranks that follow the others: each hears of what others begin, on its node and on others, whoever has declared it and
whenever it began to follow; sums have the bits that zeros give; what it cannot take part in fails on all ranks; and a
daemon that is killed meanwhile changes nothing."""
import errno, itertools, os, signal, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from recovery import HAS_FAILPOINTS, SEED, Keeper, each, job
import numpy as np
import reference as ref

REFUSE = 9


class Job:
    """The ranks of a job over these nodes, some of which follow. Operations have numbers, of requests and of their tensors."""

    def __init__(self, cluster, layout, **keys):
        self.ranks, self.layout = job(cluster, layout, **keys), layout
        self.tensors = [{} for _ in self.ranks]  # of each rank, by name: its number, and rounds that were submitted
        self.n = 0

    def tensor(self, rank, name, dtype, elements):
        known = self.tensors[rank]
        if name not in known:
            known[name] = [len(known), 0]
            self.ranks[rank].call('tensor', known[name][0], name, dtype, elements, seconds=2 * DEADLINE)
        known[name][1] += 1
        return known[name][0]

    def submit(self, rank, name, dtype, elements, data=None, **keys):
        """Returns the request's number."""
        tensor = self.tensor(rank, name, dtype, elements)
        self.n += 1
        self.ranks[rank].submit(self.n, tensor, data, **keys)
        return self.n

    def follow(self, *ranks, idle=0):
        for rank in ranks:
            self.ranks[rank].call('follow', 1, idle, seconds=2 * DEADLINE)

    def begun(self, rank):
        """What others have begun, as the rank hears of it; None: all follow."""
        said = self.ranks[rank].call('begun', DEADLINE * 1000, seconds=2 * DEADLINE).split()
        return None if said == ['all'] else [said[0], *map(int, said[1:])]

    def serve(self, rank):
        """Takes part in what comes next. Returns its name, and the request."""
        name, dtype, elements, number, operation, reduction = self.begun(rank)
        keys = {'op': operation, 'red': reduction, 'out': elements}
        zeros = bytes(ref.SIZE[dtype] * max(elements, 0))
        if operation == BARRIER or operation != PUSH_PULL or reduction not in (SUM, AVERAGE):
            keys, zeros = {'op': operation if operation == BARRIER else REFUSE}, None
        request = self.submit(rank, name, dtype, elements, zeros, **keys)
        assert self.tensors[rank][name][1] == number, f'{name}: round {number} for {self.tensors[rank][name]}'
        return name, request

    def end(self, request, *ranks):
        for rank in ranks:
            self.ranks[rank].wait(request[rank])


def sum_of(layout, n, salt, followers, reduction=SUM):
    """What each rank gives, and what comes of it."""
    given = [ref.random(FLOAT32, n, (SEED, salt, k)) for k in range(sum(layout))]
    for rank in followers:
        given[rank] = np.zeros_like(given[rank])
    return given, ref.reduce(FLOAT32, reduction, given, layout).tobytes()


def train(world, name, salt, followers, n=5000, reduction=SUM, serve=None):
    """One sum of the others, in which followers take part; the result is right bit for bit."""
    others = [k for k in range(len(world.ranks)) if k not in followers]
    given, want = sum_of(world.layout, n, salt, followers, reduction)
    requests = {k: world.submit(k, name, FLOAT32, n, given[k].tobytes(), op=PUSH_PULL, red=reduction, out=n) for k in others}
    for rank in followers:
        heard, requests[rank] = (serve or world.serve)(rank)
        assert heard == name, heard
    world.end(requests, *requests)
    for rank in requests:
        assert world.ranks[rank].result(requests[rank]) == want, f'{name}: rank {rank} has another result'
        world.ranks[rank].call('free', requests[rank])


def whole(layout, n_spare, followers, **keys):
    with Cluster(len(layout), n_spare) as cluster:
        world = Job(cluster, layout, **keys)
        train(world, 'known', 0, [])
        world.follow(*followers)
        for step in range(3):
            train(world, 'known', 1 + step, followers)
            train(world, f'new.{step}', 10 + step, followers, 3 + 4000 * step, AVERAGE)
        # All of these before any of the followers has taken part in one: rounds of a tensor come in order.
        others = [k for k in range(len(world.ranks)) if k not in followers]
        given, want = sum_of(layout, 100, 20, followers)
        some = [{k: world.submit(k, name, FLOAT32, 100, given[k].tobytes(), op=PUSH_PULL, red=SUM, out=100) for k in others}
                for name in ('known.too', 'known.too', 'new.too', 'known.too')]
        served = [{rank: world.serve(rank) for rank in followers} for _ in some]
        for rank in followers:
            assert sorted(one[rank][0] for one in served) == ['known.too'] * 3 + ['new.too'], served
            for one in served:
                world.ranks[rank].wait(one[rank][1])
        for requests in some:
            world.end(requests, *others)
            assert all(world.ranks[k].result(requests[k]) == want for k in others)
        # Barriers have no data; what is no sum is refused, with words, on all ranks; and the job goes on.
        barrier = {k: world.submit(k, 'barrier', UINT8, 0, op=BARRIER) for k in others}
        for rank in followers:
            barrier[rank] = world.serve(rank)[1]
        world.end(barrier, *barrier)
        for step, (name, dtype, elements, data, more) in enumerate([
                ('gathered', INT32, -1, bytes(8), {'op': ALL_GATHER, 'out': 2 * len(world.ranks)}),
                ('largest', FLOAT32, 2, bytes(8), {'op': PUSH_PULL, 'red': MAX, 'out': 2})]):
            requests = {k: world.submit(k, name, dtype, elements, data, **more) for k in others}
            for rank in followers:
                requests[rank] = world.serve(rank)[1]
            for rank, request in requests.items():
                error = world.ranks[rank].ended(request)
                assert error.errno == errno.EOPNOTSUPP, error
                assert any(f'rank {k} has joined' in error.text for k in followers), error
        train(world, 'known', 30, followers)
        for rank in followers:
            try:
                raise AssertionError(world.ranks[rank].call('begun', 0))
            except BpsError as error:
                assert error.errno == errno.ETIMEDOUT, error
        together(world)


def together(world):
    """All ranks follow in the end, and are told so when the last is idle; then they go on as before."""
    every = range(len(world.ranks))
    for rank in every:
        world.follow(rank, idle=rank % 2)
    for rank in every:
        if rank % 2 == 0:
            world.follow(rank, idle=1)
    assert [world.begun(rank) for rank in every] == [None] * len(every)
    for rank in every:
        world.ranks[rank].call('follow', 0, 0)
    train(world, 'known', 40, [])


def test_on_one_node():
    whole((3,), 0, [1])
    whole((4,), 0, [0, 3])


def test_over_nodes():
    whole((1, 1), 0, [1])
    whole((2, 1, 1), 1, [1, 2], part_bytes=4096)


@gate_tier
def test_over_nodes_of_which_one_follows_alone():
    whole((1, 2), 0, [1, 2])
    whole((1, 1, 2), 0, [0, 1], force_distributed=1)


def test_what_had_begun_before():
    """By others, and by a rank that follows since."""
    for layout in ((3,), (2, 1), (1, 1, 1)):
        with Cluster(len(layout)) as cluster:
            world = Job(cluster, layout)
            requests = [{k: world.submit(k, f'of.{k}', FLOAT32, 2, bytes(8), op=PUSH_PULL, red=SUM, out=2)} for k in range(3)]
            world.follow(0, 1, 2)
            for rank in range(3):
                for _ in range(2):
                    name, request = world.serve(rank)
                    requests[int(name[3:])][rank] = request
            for request in requests:
                world.end(request, *range(3))
            together(world)


@gate_tier
def test_many_rounds_are_told_once():
    n = 500
    with Cluster(2) as cluster:
        world = Job(cluster, (1, 2))
        world.follow(1)
        for i in range(n):
            for rank in (0, 2):
                world.submit(rank, f't{i % 3}', FLOAT32, 2, bytes(8), op=PUSH_PULL, red=SUM, out=2)
        # One that begins to follow has all that is open told again.
        world.follow(2)
        for _ in range(n):
            world.serve(1)
        for rank in range(3):
            world.follow(rank, idle=1)
        assert world.begun(1) is None


SUM_OF_2 = {'op': PUSH_PULL, 'red': SUM, 'out': 2}


def test_what_had_failed_before():
    """The rank takes its turn at it, and what follows is right."""
    for layout in ((2,), (1, 1)):
        with Cluster(len(layout)) as cluster:
            world = Job(cluster, layout)
            train(world, 'known', 0, [])
            for _ in range(3):
                given_up = world.submit(0, 'known', FLOAT32, 5000, bytes(20000), op=PUSH_PULL, red=SUM, out=5000, timeout=1)
                assert world.ranks[0].ended(given_up).errno == errno.ETIME
            world.follow(1)

            def serve(rank):
                for _ in range(3):
                    _, request = world.serve(rank)
                    assert world.ranks[rank].ended(request).errno in (errno.ETIME, errno.EOPNOTSUPP)
                return world.serve(rank)
            train(world, 'known', 1, [1], serve=serve)


def test_a_round_that_a_follower_begins():
    """Its own, as of optimizers: others who follow hear of it, and do when one who does not follow is second to come to it."""
    for layout in ((3,), (2, 1), (1, 1, 1)):
        with Cluster(len(layout)) as cluster:
            world = Job(cluster, layout)
            world.follow(1, 2)
            requests = {1: world.submit(1, 'own', FLOAT32, 2, bytes(8), **SUM_OF_2)}
            requests[0] = world.submit(0, 'own', FLOAT32, 2, bytes(8), **SUM_OF_2)
            _, requests[2] = world.serve(2)
            world.end(requests, *range(3))
            together(world)


def test_a_rank_that_leaves():
    for layout in ((2,), (1, 1), (2, 1)):
        with Cluster(len(layout)) as cluster:
            world = Job(cluster, layout)
            followers = range(1, sum(layout))
            world.follow(*followers, idle=1)
            world.ranks[0].call('leave')
            for rank, again in itertools.product(followers, range(2)):
                try:
                    if again:  # over nodes the home knows, which says so
                        world.follow(rank)
                    raise AssertionError(world.begun(rank))
                except BpsError as error:
                    assert error.errno == errno.EPIPE and 'rank 0 has left' in error.text, error


def test_that_all_have_followed_once_does_not_count_the_next_time():
    """Though the home has not heard that another rank follows no more, or has not said so."""
    with Cluster(2, 1, colocated=False) as cluster:
        world = Job(cluster, (1, 1))
        for _ in range(2):
            world.follow(0, 1, idle=1)
            assert world.begun(0) is None and world.begun(1) is None
            cluster.daemons[2].signal(signal.SIGSTOP)
            for rank in (1, 0):
                world.ranks[rank].call('follow', 0, 0)
            world.follow(0, idle=1)
            try:
                raise AssertionError(world.ranks[0].call('begun', 100))
            except BpsError as error:
                assert error.errno == errno.ETIMEDOUT, error
            cluster.daemons[2].signal(signal.SIGCONT)
            train(world, 'between', 0, [0])
        together(world)


def test_a_job_that_does_not_wait_for_all():
    with Cluster(1) as cluster:
        for keys in ({'elastic': 1}, {'quorum': 1}, {'async': 1}):
            world = Job(cluster, (2,), **keys)
            try:
                world.follow(0)
            except BpsError as error:
                assert error.errno == errno.EINVAL and 'wait for one another' in error.text, error
            else:
                raise AssertionError(f'{keys}: it follows')
            each(world.ranks, 'leave')


def test_a_rank_that_does_not_follow():
    with Cluster(1) as cluster:
        world = Job(cluster, (2,))
        for number, words in ((errno.ECANCELED, ('begun', 0)), (errno.ENOTCONN, ('begun', 0)), (errno.ENOTCONN, ('follow', 1, 0))):
            if number == errno.ENOTCONN:
                try:
                    world.ranks[0].call('leave')
                except BpsError:
                    pass
            try:
                world.ranks[0].call(*words)
            except BpsError as error:
                assert error.errno == number, error
            else:
                raise AssertionError(f'{words}: it follows')


# -- Daemons that are killed ---------------------------------------------------------------------------------------------


def killed(layout, n_spare, victim, followers):
    """The daemon is killed with rounds begun of which followers have not heard, have heard, and have taken part in."""
    with Cluster(len(layout), n_spare) as cluster, Keeper(cluster) as keeper:
        world = Job(cluster, layout)
        world.follow(*followers)
        train(world, 'before', 0, followers)
        for step in range(some(4, 2)):
            def kill_and_serve(rank, step=step):
                if rank == followers[step % len(followers)]:
                    keeper.kill(victim)
                    keeper.expect(step + 1)
                return world.serve(rank)
            train(world, f'killed.{step % 2}', 1 + step, followers, serve=kill_and_serve)
            train(world, 'before', 10 + step, followers)
        together(world)


@gate_tier
def test_the_daemon_of_a_follower_is_killed():
    killed((2,), 0, 0, [1])
    killed((1, 1), 1, 1, [1])


@gate_tier
def test_the_daemon_of_the_others_is_killed():
    killed((1, 1), 1, 0, [1])


@gate_tier
def test_a_server_is_killed():
    """Each of two, of which one is the job's home."""
    for victim in (2, 3):
        killed((1, 1), 2, victim, [1])


if __name__ == '__main__':
    run(globals())
