#!/usr/bin/env python3
"""A job over several nodes whose daemons are killed and restarted: servers, agents, and those that are both. Trainers see no
error, results are the same bits. Killed at every failpoint where there are any, and at random moments (seeded, printed)."""
import collections, contextlib, errno, os, random, signal, sys, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import reference as ref
from recovery import *

LONG = 'BPS_LONG' in os.environ  # more passages of each failpoint
N = 6 * PART // 4 + 12345


def nodes_of(layout):
    return [node for node, n in enumerate(layout) for _ in range(n)]


def work(cluster, keeper, layout, turns=1, n_restarts=0):
    ranks = job(cluster, layout)
    for turn in range(turns):
        round_trip(ranks, every_operation(layout, 50 * turn), 20 * turn)
    keeper.expect(n_restarts)
    round_trip(ranks, every_operation(layout, 5000)[:4], 20 * turns)
    each(ranks, 'leave')


def killed(index, armed, layout, n_spare, n_restarts=1, **keys):
    with armed_cluster(layout, n_spare, {index: armed}, **{'options': PATIENT, **keys}) as cluster, \
            Keeper(cluster, {index: armed[1:]}) as keeper:
        work(cluster, keeper, layout, n_restarts=n_restarts)


@gate_tier
def test_nothing_happens():
    for layout, spare, colocated in (((1, 1), 1, False), ((2, 2), 0, True), ((2, 1, 1), 2, True)):
        with Cluster(len(layout), spare, colocated=colocated) as cluster, Keeper(cluster) as keeper:
            work(cluster, keeper, layout)


@gate_tier
def test_a_server_is_killed_and_comes_back():
    for layout in ((1, 1), (1, 1, 2)):
        with Cluster(len(layout), 1, colocated=False) as cluster, Keeper(cluster) as keeper:
            ranks = job(cluster, layout)
            for turn in range(4):
                keeper.expect(turn)  # whom the turn before has killed, perhaps when its results were all there
                works = every_operation(layout, 50 * turn)
                declare(ranks, works, 20 * turn)
                submit(ranks, works, 20 * turn)
                keeper.kill(len(layout))
                finish(ranks, works, 20 * turn)
            keeper.expect(4)
            each(ranks, 'leave')


@gate_tier
def test_an_agent_is_killed_and_comes_back():
    for layout in ((1, 1), (1, 1, 2)):
        with Cluster(len(layout), 1, colocated=False) as cluster, Keeper(cluster) as keeper:
            ranks = job(cluster, layout)
            for turn in range(4):
                keeper.expect(turn)  # whom the turn before has killed, perhaps when its results were all there
                works = every_operation(layout, 50 * turn)
                declare(ranks, works, 20 * turn)
                submit(ranks, works, 20 * turn)
                keeper.kill(turn % len(layout))
                finish(ranks, works, 20 * turn)
            keeper.expect(4)
            each(ranks, 'leave')


def killed_at_random(layout, n_spare, colocated, victims, turns=6, kills=6, seed=0):
    rng = random.Random(SEED + seed)
    with Cluster(len(layout), n_spare, colocated=colocated) as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, layout)
        over = threading.Event()

        def killer():  # at most some times in a turn: on a busy machine a daemon may take longer to come back than to be killed
            killed = collections.Counter()
            while not over.wait(rng.uniform(0.02, 0.4) * SLOW):
                if killed[turn] < 2 * kills:
                    killed[turn] += 1
                    keeper.kill(rng.choice(victims))
        turn = 0
        thread = threading.Thread(target=killer)
        thread.start()
        try:
            while turn < turns or keeper.restarts < kills:
                assert not keeper.error, keeper.error
                works = every_operation(layout, 100 * turn)
                rng.shuffle(works)
                declare(ranks, works, 20 * turn)
                submit(ranks, works, 20 * turn, rng)
                finish(ranks, works, 20 * turn)
                turn += 1
        finally:
            over.set()
            thread.join()
        print(f'{keeper.restarts} restarts in {turn} turns', flush=True)
        round_trip(ranks, every_operation(layout, 100000)[:3], 20 * turn)
        each(ranks, 'leave')


@full_tier('random moments')
def test_servers_are_killed_at_random_moments():
    print(f'seed {SEED} (BPS_SEED)', flush=True)
    killed_at_random((1, 1, 2), 2, False, (3, 4))


@full_tier('random moments')
def test_agents_are_killed_at_random_moments():
    killed_at_random((1, 1, 2), 2, False, (0, 1, 2), seed=1)


@full_tier('random moments')
def test_any_daemon_is_killed_at_random_moments():
    killed_at_random((1, 2), 0, True, (0, 1), seed=2)
    killed_at_random((1, 1, 2), 2, True, (0, 1, 2, 3, 4), seed=3)


@full_tier('random moments')
def test_the_same_tensor_round_after_round():
    """Each round's input is the last one's result: one that was done twice, or not on every rank, would show for ever."""
    rng = random.Random(SEED + 5)
    layout, n = (1, 1, 1), N
    with Cluster(3, 1, colocated=True) as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, layout)
        work = push_pull(layout, FLOAT32, SUM, n, 7, 1, 1)
        declare(ranks, [work])
        values = [ref.random(FLOAT32, n, (SEED, 7, k)) for k in range(3)]
        for turn in range(20):
            for k, rank in enumerate(ranks):
                rank.submit(turn, 0, values[k].tobytes(), op=PUSH_PULL, red=SUM, out=n, inplace=1, shared=turn % 2)
            if turn % 2:
                time.sleep(rng.uniform(0, 0.01))  # a moment to be killed at, not one to wait for
                keeper.kill(rng.randrange(4))
            each(ranks, 'wait', turn, DEADLINE * 2000)
            total = ref.reduce(FLOAT32, SUM, values, layout)
            for k, rank in enumerate(ranks):
                assert rank.result(turn) == total.tobytes(), f'round {turn} is wrong on rank {k}'
                rank.call('free', turn)
            with np.errstate(all='ignore'):
                values = [total * np.float32(0.3) + data for data in values]
        keeper.expect(10)


# Where a daemon is killed, by what it is then.
OF_AGENT = ['ledger-tensor-kept', 'ledger-cell-half', 'ledger-cell-whole', 'part-scattered', 'part-marked', 'part-answered',
            'ledger-cell-freed', 'ledger-record-half', 'ledger-record-written', 'request-ended',
            'ledger-round-told', 'ledger-record-freed']
OF_SERVER = ['server-summed', 'server-result-answered', 'server-result-released']


@gate_tier
def test_killed_at_each_failpoint():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for index, names in ((0, OF_AGENT), (3, OF_SERVER)):
        for name in names:
            for at in (1, 2, 7) if LONG else (3,):
                killed(index, [f'{name}=kill@{at}'], (2, 1, 1), 1, colocated=False)


@gate_tier
def test_killed_at_each_failpoint_where_agent_and_server_are_one():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for name in OF_AGENT + OF_SERVER if LONG else some(OF_AGENT[:5] + OF_SERVER, OF_AGENT[:2] + OF_SERVER[:2]):
        killed(0, [f'{name}=kill@5'], (1, 1, 2), 0, colocated=True)


def straight(layout, places, lost, salt):
    """
    In place; daemon 0 ends at a place, then the others that are lost with it, and all come back. With checksums no more than 256 KiB
    are read at once, so larger parts come in pieces.
    """
    half = 'half' in places
    with armed_cluster(layout, 0, {0: [places]}, colocated=True, options=['--checksum=on'] if half else []) as cluster:
        ranks = job(cluster, layout, **{'part_bytes': 1 << 20} if half else {})
        works = [push_pull(layout, INT32, SUM, 1 << 20 if half else 2 * N, salt + i, 1, i) for i in range(2)]
        declare(ranks, works)
        submit(ranks, works)
        wait_for(f'daemon 0 ends at {places}', lambda: not cluster.daemons[0].alive())
        for i in lost:
            cluster.daemons[i].kill()
        for i in (0, *lost):
            cluster.restart(i, wait=False)
        for i in (0, *lost):
            cluster.daemons[i].ready()
        finish(ranks, works)
        round_trip(ranks, every_operation(layout, salt + 10)[:3], 20)
        each(ranks, 'leave')


@gate_tier
def test_a_result_that_comes_over_its_contribution_is_with_the_server_s_node():
    """It came half, or whole and nobody knows: the agent is lost, alone or with all that knew of it but trainers' memory."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    places = ['part-straight=kill', 'part-straight=kill@4', 'answer-half=kill', 'answer-half=kill@5', 'part-answered=kill@4',
              'part-answered=kill@7', 'part-marked=kill@3', 'part-marked=kill@6']
    for i, place in enumerate(places):
        if not GATE or i // 2 % 2:
            straight((1, 1), place, (1,) if i % 2 else (), 500 * i)
        if not GATE or not i // 2 % 2:
            straight((2, 1), place, () if i % 2 else (1,), 500 * i + 100)
        if LONG:
            straight((1, 2, 1), place, (1, 2), 500 * i + 200)


def held(cluster):
    return sum(cluster.daemons[i].ctl('job', 'job1')['ranks'][i]['bytes_held'] for i in range(2))


def holds_no_more(places, deaths, once):
    """What one node has of a tensor that comes once is not known to the other when their connection is lost, in the middle or after."""
    layout = (1, 1)
    with armed_cluster(layout, 0, {1: places} if places else {}, colocated=True) as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, layout, part_bytes=1 << 20)
        round_trip(ranks, [push_pull(layout, INT32, SUM, once, 7, 1, 1)])
        if not places:
            keeper.kill(1)
        keeper.expect(deaths)
        often = [push_pull(layout, INT32, SUM, 4 << 20, 8, 1, 1)]
        declare(ranks, often, 5)
        before = None
        for n in range(20):
            submit(ranks, often, 5)
            finish(ranks, often, 5)
            before = held(cluster) if n == 5 else before
        assert held(cluster) <= before + (64 << 20), (before, held(cluster), cluster.logs())
        each(ranks, 'leave')


@full_tier('it takes 20 s, and looks at what is held at one moment')
def test_nothing_is_kept_for_who_has_said_that_he_has_it_in_vain():
    holds_no_more([], 1, 1 << 19)
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    holds_no_more(['part-marked=kill@8'], 1, 4 << 20)
    for n in 40, 80:
        holds_no_more([f'connection-read=error@{n}'], 0, 4 << 20)


@gate_tier
def test_killed_before_it_has_attached_everywhere():
    """Its ranks ask to join once more, and the others, who may run already, notice nothing; it may be so on all nodes at once."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    layout = (2, 1)
    for armed in ({0: ['job-attaching=kill']}, {0: ['server-attached-again=kill']}, {0: ['server-attached-again=kill@2']},
                  {1: ['job-attaching=kill', 'server-attached-again=kill']}, {0: ['job-attaching=kill'], 1: ['job-attaching=kill']},
                  {0: ['job-attaching=kill'], 1: ['job-attaching=delay']}):  # its home sees that before anybody has attached
        with armed_cluster(layout, 2, armed, colocated=False, options=PATIENT) as cluster, \
                Keeper(cluster, {i: places[1:] for i, places in armed.items()}) as keeper:
            ranks = job(cluster, layout)
            keeper.expect(sum(place.count('=kill') for places in armed.values() for place in places))
            for turn in range(2):
                round_trip(ranks, every_operation(layout, 50 * turn), 20 * turn)
            each(ranks, 'leave')


@full_tier('a deadline of 100 ms for a request while its server is away')
def test_a_round_that_failed_while_its_server_was_away():
    """The server that comes back has never heard of it: it is told again, and the other node hears why, in those words."""
    layout = (1, 1)
    with Cluster(2, 1, colocated=False) as cluster:
        ranks = job(cluster, layout, request_timeout_ms=20000)
        works = every_operation(layout)[:1]
        round_trip(ranks, works)
        declare(ranks, works, 1)
        cluster.daemons[2].kill()
        says(cluster, 0, 'was lost')
        data, keys = works[0].give(0)
        ranks[0].submit(1, 1, data, timeout=100, **keys)
        mine = ranks[0].ended(1)
        assert mine.errno == errno.ETIME, mine
        cluster.restart(2)
        says(cluster, 0, 'is back, and fresh')
        ranks[1].submit(1, 1, works[0].give(1)[0], **keys)
        other = ranks[1].ended(1)
        assert other.text == mine.text, (mine, other)
        round_trip(ranks, works, 2)
        each(ranks, 'leave')


def held_by(cluster, node=0):
    """Bytes that the rank of a node is charged for."""
    return cluster.daemons[node].ctl('job', 'job1')['ranks'][0]['bytes_held']


@full_tier('memory that is held at one moment')
def test_results_have_the_room_that_they_need():
    """Parts are so large that a ledger begins with memory for few results. More is charged when needed, and again by the next daemon."""
    if TSAN:
        raise Skip('bpsctl is asked')
    large = {'part_bytes': 32 << 20}
    with Cluster(2, 1, colocated=False) as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (1, 1), **large)
        least = held_by(cluster)
        round_trip(ranks, every_operation((1, 1)))
        most = held_by(cluster)
        assert most >= least + (32 << 20), (least, most)
        works = every_operation((1, 1), 50)
        declare(ranks, works, 20)
        submit(ranks, works, 20)
        keeper.kill(0)
        finish(ranks, works, 20)
        round_trip(ranks, every_operation((1, 1), 100), 40)
        assert held_by(cluster) >= least + (32 << 20), (least, held_by(cluster))
        each(ranks, 'leave')
        wait_for('it is given back', lambda: not cluster.daemons[0].ctl('jobs')['jobs'])


@gate_tier
def test_a_job_says_that_it_ends_with_its_daemon():
    """And why; one that does not says nothing."""
    for options, keys, why in ((['--session-quota=1G'], {}, "a trainer's session_quota has no room for a ledger"),
                               (['--resume=off'], {}, 'resume is off'),
                               ([], {'quorum': 1}, None), ([], {}, None)):
        with Cluster(2, 1, colocated=False, options=options) as cluster:
            ranks = cluster.job((1, 1), **keys)
            assert cluster.daemons[0].ctl('job', 'job1')['summary'].get('ends') == why
            assert (f'job job1: it ends with this daemon\'s process: {why}' in cluster.daemons[1].text()) == bool(why)
            each(ranks, 'leave')


run(globals())
