#!/usr/bin/env python3
"""push_pull_rows whose daemons die in the middle of it: it ends well on every rank, with the bits of the reference,
wherever they die, and whether or not they come back. Servers come and go meanwhile. BPS_LONG=N: N minutes of kills."""
import os, random, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
from recovery import *
import reference as ref

WIDTH, TABLE, TENSOR = 8, 20011, 900  # several groups of rows, so that every server has some
PIECES = dict(part_bytes=4096)  # and several pieces of a list


class Rows:
    """One push_pull_rows of all ranks, compared with the reference."""

    def __init__(self, ranks, layout, turn, n=900, tensor=TENSOR, reduction=SUM):
        self.ranks, self.turn, self.tensor, self.reduction = ranks, turn, tensor, reduction
        rng = np.random.default_rng((SEED, turn))
        self.given = [(rng.integers(0, TABLE, n).astype(np.int64),
                       ref.random(FLOAT32, n * WIDTH, (SEED, turn, k)).reshape(n, WIDTH)) for k in range(len(ranks))]
        rows, values = ref.reduce_rows(FLOAT32, reduction, self.given, layout)
        self.want = rows.tobytes(), values.tobytes()
        self.room = len(rows)

    def submit(self, which=None):
        for k, rank in enumerate(self.ranks):
            if which is None or k in which:
                rows, values = self.given[k]
                rank.submit_rows(self.turn, self.tensor, rows.tobytes(), values.tobytes(), WIDTH, self.room,
                                 red=self.reduction, shared=1)

    def finish(self):
        each(self.ranks, 'wait', self.turn, DEADLINE * 2000)
        for k, rank in enumerate(self.ranks):
            assert rank.result_rows(self.turn) == self.want, f'round {self.turn} on rank {k}'
            rank.call('free', self.turn)


def table(ranks, tensor=TENSOR):
    for rank in ranks:
        rank.call('tensor', tensor, f'table.{tensor}', FLOAT32, TABLE * WIDTH, seconds=2 * DEADLINE)


def rounds(ranks, layout, first, n, then=None, **keys):
    """then(): once all but the last rank have submitted, in each."""
    for turn in range(first, first + n):
        rows = Rows(ranks, layout, turn, **keys)
        rows.submit(range(len(ranks) - 1))
        if then:
            then()
        rows.submit([len(ranks) - 1])
        rows.finish()
    return first + n


@gate_tier
def test_a_server_is_lost_for_good():
    """And the servers that are left sum what it had."""
    layout = (2, 1)
    with Cluster(2, 3, colocated=False) as cluster:
        ranks = job(cluster, layout, **PIECES)
        table(ranks)
        turn = rounds(ranks, layout, 0, 1)
        for n, victim in (2, 3), (1, 2):
            turn = rounds(ranks, layout, turn, 1, cluster.daemons[victim].kill)
            says(cluster, 0, f'goes on with {n} of 3 servers')
            turn = rounds(ranks, layout, turn, 2)
        turns(ranks, layout, 1)
        each(ranks, 'leave')


@gate_tier
def test_a_server_comes_and_goes():
    """Also between two pieces of a list; requests that are under way end on the servers that there are."""
    layout = (1, 2)
    with Cluster(2, 2, colocated=False) as cluster:
        ranks = job(cluster, layout, **PIECES)
        table(ranks)
        turn = rounds(ranks, layout, 0, 1)
        turn = rounds(ranks, layout, turn, 1, cluster.grow)
        says(cluster, 0, 'goes on with 3 of 3 servers')
        turn = rounds(ranks, layout, turn, 2, reduction=AVERAGE)
        turn = rounds(ranks, layout, turn, 1, cluster.daemons[3].kill)
        says(cluster, 0, 'goes on with 2 of 3 servers')
        turn = rounds(ranks, layout, turn, 1, lambda: cluster.restart(3))
        wait_for('it is in again', lambda: cluster.daemons[0].text().count('goes on with 3 of 3') >= 2, 2 * DEADLINE)
        rounds(ranks, layout, turn, 2)
        each(ranks, 'leave')


def all_say(cluster, text, times):
    for daemon in cluster.daemons[:2]:
        wait_for(f'both agents say "{text}"', lambda: daemon.text().count(text) >= times, 2 * DEADLINE)


@gate_tier
def test_a_server_leaves_a_request_and_returns_to_it():
    """What it says as it goes is of the rows it had: it gets none that were cut for others, and in the end its own."""
    layout = (1, 1)
    with Cluster(2, 3, colocated=False) as cluster:
        ranks, server = job(cluster, layout, **PIECES), 2
        table(ranks)
        # With lists of one piece, and of several.
        for times, n in enumerate((60, 900), 1):
            rows = Rows(ranks, layout, times, n=n)
            rows.submit([0])
            wait_for('the server has rows', lambda: any(
                j['in_flight'] for j in cluster.daemons[server].ctl('jobs').get('jobs', ())), DEADLINE)
            cluster.daemons[server].ctl('drain')
            all_say(cluster, 'goes on with 2 of 3 servers', times)
            cluster.daemons[server].kill()
            cluster.restart(server)
            all_say(cluster, 'goes on with 3 of 3 servers', times)
            rows.submit([1])
            rows.finish()
        each(ranks, 'leave')


# Where a server is killed, and an agent: each of its next processes in turn. That all have it one server of a table
# is told.
SERVER = ['server-rows-taken=kill', 'server-rows-taken=kill@7', 'server-rows-merged=kill', 'server-rows-answered=kill',
          'server-rows-pulled=kill@3', 'server-attached=kill@2']
ONE = ['server-result-answered=kill', 'server-result-answered=kill@2']
AGENT = ['rows-merged=kill', 'rows-recorded=kill', 'rows-agreed=kill', 'ledger-cell-whole=kill', 'request-ended=kill',
         'server-attached-again=kill']
PLACES = (((2, 1), 2, False, {2: SERVER, 3: SERVER[2:]}), ((1, 2), 1, False, {1: AGENT, 2: ONE}),
          ((2, 1), 0, True, {0: SERVER + AGENT}))


@gate_tier
def test_killed_at_every_step():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for layout, n_spare, colocated, armed in PLACES:
        first = {i: [places[0]] for i, places in armed.items()}
        with armed_cluster(layout, n_spare, first, colocated=colocated, options=PATIENT) as cluster:
            ranks = job(cluster, layout, **PIECES)
            table(ranks)
            with Keeper(cluster, {i: places[1:] for i, places in armed.items()}) as keeper:
                turn, n = 0, sum(len(places) for places in armed.values())
                while keeper.restarts < n and turn < 8 * n:
                    turn = rounds(ranks, layout, turn, 1)
                rounds(ranks, layout, turn, 2)
                keeper.expect(n)
                each(ranks, 'leave')


@gate_tier
def test_each_step_is_the_end_of_a_server():
    """It does not come back: the others do what is left, and who has the result gives its rows once more."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    layout = (2, 1)
    for place in SERVER[:5]:
        with armed_cluster(layout, 2, {2: [place]}, colocated=False) as cluster:
            ranks = job(cluster, layout, **PIECES)
            table(ranks)
            turn = rounds(ranks, layout, 0, 3)
            says(cluster, 0, 'goes on with 1 of 2 servers')
            rounds(ranks, layout, turn, 1)
            each(ranks, 'leave')


def random_kills(seconds, seed):
    layout, rng = (2, 1, 1), random.Random(seed)
    with Cluster(3, 2) as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, layout, **PIECES)
        table(ranks)
        turn, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            turn = rounds(ranks, layout, turn, 1, lambda: keeper.kill(rng.randrange(5)) if rng.random() < 0.7 else None)
        rounds(ranks, layout, turn, 1)
        each(ranks, 'leave')
        print(f'     seed {seed}: {turn} rounds, {keeper.restarts} daemons were killed')


@full_tier('random moments, and as many as 6 s have')
def test_random_kills():
    random_kills(float(os.environ.get('BPS_LONG', 0)) * 60 or 6, SEED)


run(globals())
