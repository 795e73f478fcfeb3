#!/usr/bin/env python3
"""Jobs with a quorum and asynchronous ones while their daemons die: trainers see no error, and no contribution is lost or counts
twice. Which round has which contribution nobody promises; so integers are contributed, and what is asserted is that they add
up, and that all ranks get the same of each round."""
import errno, os, random, struct, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
from recovery import Keeper, armed_cluster, each, failpoints, HAS_FAILPOINTS, PATIENT, SEED

N, SMALL_PART = 1500, 4096  # three parts


def job(cluster, layout, dtype=INT64, **keys):
    """Ranks that call the library between commands too, or who waits would wait for who does not."""
    ranks = cluster.job(layout, join=False, **{'part_bytes': SMALL_PART, **keys})
    each(ranks, 'attend')
    cluster.join(ranks)
    for rank in ranks:
        rank.call('tensor', 0, 'x', dtype, N, seconds=2 * DEADLINE)
    return ranks


class Work:
    """Ranks that take their turns at random. The output lies in the input: what is lost is lost."""

    def __init__(self, ranks, seed, op, rounds):
        self.ranks, self.order, self.op, self.rounds = ranks, random.Random(seed), op, rounds
        self.at, self.open = [0] * len(ranks), [False] * len(ranks)
        self.given, self.results = np.zeros(N, np.int64), [[] for _ in ranks]
        self.moved = time.monotonic()  # when anything did last
        self.numbers = np.random.default_rng(seed)

    def submit(self, k, **keys):
        values = self.numbers.integers(0, 1 << 40, N)
        self.given += values
        self.ranks[k].submit(self.at[k], 0, values.tobytes(), op=self.op, out=N, inplace=1, **keys)
        self.open[k] = True

    def take(self, k, timeout_ms=None):
        """Whether its round is done."""
        try:
            self.ranks[k].wait(self.at[k], timeout_ms or 2 * DEADLINE * 1000)
        except BpsError as error:
            if error.errno != errno.ETIMEDOUT or not timeout_ms:
                raise
            return False
        self.results[k].append(np.frombuffer(self.ranks[k].result(self.at[k]), np.int64))
        self.ranks[k].call('free', self.at[k])
        self.at[k] += 1
        self.open[k] = False
        return True

    def step(self):
        """Returns False when all ranks have done all their rounds."""
        left = [k for k in range(len(self.ranks)) if self.at[k] < self.rounds]
        if not left:
            return False
        k = self.order.choice(left)
        if not self.open[k]:
            self.submit(k)
        elif not self.take(k, 20):
            assert time.monotonic() < self.moved + 2 * DEADLINE, f'nothing moves: {self.at}'
            return True
        self.moved = time.monotonic()
        return True

    def finish(self):
        """The last round waits for all, and has what was left over."""
        for k in range(len(self.ranks)):
            self.submit(k, all=1)
        for k in range(len(self.ranks)):
            self.take(k)
        return self

    def check_rounds(self):
        for k, results in enumerate(self.results):
            assert len(results) == self.rounds + 1
            for r, result in enumerate(results):
                assert (result == self.results[0][r]).all(), f'round {r}: rank {k} got another result than rank 0'
        assert (sum(self.results[0]) == self.given).all(), 'something was lost or counted twice'

    def check_sums(self):
        for k, results in enumerate(self.results):
            assert (results[-1] == self.given).all(), f'rank {k}: something was lost or counted twice'
            for before, after in zip(results, results[1:]):
                assert (after >= before).all(), f'rank {k}: a sum without what an earlier one had'


KINDS = [(PUSH_PULL, {'quorum': 2}, Work.check_rounds), (ACCUMULATE, {'async': 1}, Work.check_sums),
         (ACCUMULATE, {'async': 1, 'staleness': 2}, Work.check_sums)]


@gate_tier
def test_they_add_up_whoever_dies():
    """Any daemon, at any time, and several at once."""
    for seed, (op, keys, check) in enumerate(KINDS):
        with Cluster(2, 1) as cluster, Keeper(cluster) as keeper:
            ranks = job(cluster, [2, 1], **keys)
            work = Work(ranks, SEED + seed, op, 12)
            steps = 0
            while work.step():
                steps += 1
                if steps % 12 == 0 and keeper.restarts < 8:
                    expected = keeper.restarts
                    for i in work.order.sample(range(3), work.order.choice([1, 1, 2])):
                        keeper.kill(i)
                        expected += 1
                    keeper.expect(expected)
            check(work.finish())
            assert keeper.restarts, 'nobody has died'
            each(ranks, 'leave')


@gate_tier
def test_they_add_up_when_servers_change():
    """One drains, and of the other two one is lost for good."""
    for seed, (op, keys, check) in enumerate(KINDS):
        with Cluster(2, 3, colocated=False) as cluster:
            ranks = job(cluster, [2, 1], **keys)
            work = Work(ranks, SEED + seed, op, 8)
            steps = 0
            while work.step():
                steps += 1
                if steps == 12:
                    assert cluster.daemons[4].ctl('drain') == {'moved': 1, 'stay': 0}
                if steps == 24:
                    cluster.daemons[2 + seed % 2].kill()
            assert steps > 24
            check(work.finish())
            each(ranks, 'leave')


@gate_tier
def test_they_add_up_on_one_machine():
    """Each rank of it is a node of its own, with a ledger of its own."""
    for seed, (op, keys, check) in enumerate(KINDS[:2]):
        with Cluster(1) as cluster, Keeper(cluster) as keeper:
            ranks = job(cluster, [3], **keys)
            work = Work(ranks, SEED + seed, op, 8)
            steps = 0
            while work.step():
                steps += 1
                if steps % 15 == 0 and keeper.restarts < 3:
                    expected = keeper.restarts + 1
                    keeper.kill(0)
                    keeper.expect(expected)
            check(work.finish())
            assert keeper.restarts
            each(ranks, 'leave')


AGENT = ['part-answered', 'ledger-cell-half', 'ledger-cell-whole', 'part-scattered', 'part-marked', 'ledger-cell-freed',
         'server-attached-again', 'request-ended']
SERVER = {PUSH_PULL: ['server-summed', 'server-result-answered', 'server-result-released', 'server-quorum-closed',
                      'server-attached'],
          ACCUMULATE: ['server-accumulated', 'server-attached', 'server-accumulated', 'server-accumulated']}


@gate_tier
def test_they_add_up_wherever_one_dies():
    """In each place at which an agent or a server can stand: it dies there, and so does the next process a little later."""
    if not HAS_FAILPOINTS:
        raise Skip('needs the build option failpoints')
    for seed, (op, keys, check) in enumerate(KINDS[:2]):
        for i, places in ((0, AGENT), (2, SERVER[op])):
            armed = {i: [f'{place}=kill@{1 + n % 3}' for n, place in enumerate(places)]}
            with armed_cluster([2, 1], 1, armed, colocated=False, options=PATIENT) as cluster:
                with Keeper(cluster, {i: armed[i][1:]}) as keeper:
                    ranks = job(cluster, [2, 1], **keys)
                    work = Work(ranks, SEED + seed, op, 25)
                    killed = steps = 0
                    while work.step():
                        steps += 1
                        # The others now and then, so that those have something to tell that were armed.
                        if steps % 40 == 0:
                            keeper.kill(2 - i)
                            killed += 1
                            wait_for('it to be back', lambda: keeper.error or cluster.daemons[2 - i].alive())
                    check(work.finish())
                    assert len(keeper.armed[i]) < len(places) - 1, f'of {places} none was passed'
                    each(ranks, 'leave')


def ints(value):
    return struct.pack('<q', value) * N


def value_of(rank, request):
    values = set(struct.unpack(f'<{N}q', rank.result(request)))
    assert len(values) == 1, sorted(values)[:8]
    return values.pop()


def push(rank, request, value, op=PUSH_PULL, **keys):
    rank.submit(request, 0, ints(value), op=op, out=N, inplace=1, **keys)


@gate_tier
def test_a_late_contribution_that_is_narrower_is_kept_as_it_counts():
    def push_narrow(rank, request, value, **keys):
        halves = (np.full(N, value, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        rank.submit(request, 0, halves.tobytes(), op=PUSH_PULL, out=N, **{'from': BFLOAT16}, **keys)

    def check(rank, request, value):
        rank.wait(request, 2 * DEADLINE * 1000)
        got = np.frombuffer(rank.result(request), np.float32)
        assert (got == value).all(), f'{rank.name}, round {request}: {got[:4]}, not {value}'

    with Cluster(2, 1, colocated=False) as cluster, Keeper(cluster) as keeper:
        late, a, b = ranks = job(cluster, [1, 2], FLOAT32, quorum=2)
        for rank in (a, b):
            push_narrow(rank, 0, 1)
        for rank in (a, b):
            check(rank, 0, 2)
        push_narrow(late, 0, 100)
        check(late, 0, 2)
        # Of the late one nothing is left but what its agent keeps.
        keeper.kill(2)
        keeper.expect(1)
        for rank in (a, b):
            push_narrow(rank, 1, 10)
        for rank in (a, b):
            check(rank, 1, 120)
        push_narrow(late, 1, 1000)
        check(late, 1, 120)
        for rank in ranks:
            push_narrow(rank, 2, 0, all=1)
        for rank in ranks:
            check(rank, 2, 1000)
        each(ranks, 'leave')


@gate_tier
def test_a_late_contribution_outlives_its_server_and_its_agent():
    """It is answered, so its rank has overwritten it; and in no result yet."""
    for victims in ([2], [0], [0, 2], [0, 1, 2]):
        with Cluster(2, 1, colocated=False) as cluster, Keeper(cluster) as keeper:
            late, a, b = ranks = job(cluster, [1, 2], quorum=2)
            for rank in (a, b):
                push(rank, 0, 1)
            for rank in (a, b):
                rank.wait(0)
            push(late, 0, 100)
            late.wait(0)
            assert value_of(late, 0) == 2
            for i in victims:
                keeper.kill(i)
            keeper.expect(len(victims))
            for rank in (a, b):
                push(rank, 1, 10)
            for rank in (a, b):
                rank.wait(1, 2 * DEADLINE * 1000)
                assert value_of(rank, 1) == 120
            # Now it is in a result that its own node has not seen.
            expected = keeper.restarts + len(victims)
            for i in victims:
                keeper.kill(i)
            keeper.expect(expected)
            push(late, 1, 1000)
            late.wait(1, 2 * DEADLINE * 1000)
            assert value_of(late, 1) == 120
            for rank in ranks:
                push(rank, 2, 0, all=1)
            for rank in ranks:
                rank.wait(2, 2 * DEADLINE * 1000)
                assert value_of(rank, 2) == 1000, victims
            each(ranks, 'leave')


@gate_tier
def test_what_one_alone_has_seen_outlives_the_server():
    """Of a sum that accumulates: the rank that has the newest is the one who knows."""
    with Cluster(2, 1, colocated=False) as cluster, Keeper(cluster) as keeper:
        a, b = ranks = job(cluster, [1, 1], **{'async': 1})
        for r in range(5):
            push(a, r, 1, ACCUMULATE)
            a.wait(r)
        push(b, 0, 100, ACCUMULATE)
        b.wait(0)
        assert value_of(b, 0) == 105
        for r in range(5, 8):
            push(a, r, 1, ACCUMULATE)
            a.wait(r)
        for victims in ([2], [1], [0, 1, 2]):
            expected = keeper.restarts + len(victims)
            for i in victims:
                keeper.kill(i)
            keeper.expect(expected)
        push(b, 1, 1000, ACCUMULATE)
        b.wait(1, 2 * DEADLINE * 1000)
        assert value_of(b, 1) == 1108
        assert b.call('contributions', 1) == '10'
        each(ranks, 'leave')


def test_what_a_rank_that_has_left_gave_is_not_lost_unsaid():
    """Nobody else could bring it when servers change."""
    with Cluster(2, 3, colocated=False) as cluster:
        *others, gone = ranks = job(cluster, [2, 1], **{'async': 1})
        for rank in ranks:
            push(rank, 0, 100, ACCUMULATE)
            rank.wait(0)
        gone.call('leave')
        cluster.daemons[2].kill()
        for rank in others:
            try:
                push(rank, 1, 1, ACCUMULATE)
                rank.wait(1, 2 * DEADLINE * 1000)
                raise AssertionError('the job went on')
            except BpsError as error:
                # ENOTCONN: it was over before this rank submitted.
                assert error.errno in (errno.ECONNRESET, errno.ENOTCONN) and 'a rank has left' in error.text, error


if __name__ == '__main__':
    run(globals())
