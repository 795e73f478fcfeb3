#!/usr/bin/env python3
"""What scripts/chaos judges by: that it sees what it is there to see."""
import argparse, os, signal, subprocess, sys, tempfile, threading
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from numpy_or_skip import np
import script

chaos = script.load('chaos')
import chaos_elastic as elastic  # noqa: E402
from chaos_values import TENSORS, Reference, digest  # noqa: E402

JOBS = {'job': chaos.Job((1, 1, 2), 0, 7)}


def made(n, change=None, order=((7,), (8,), (9, 10))):
    """Logs of a job of three nodes that did n rounds, as they have to be but for the change: of (rank, its lines)."""
    reference, logs = Reference(), {rank: [] for rank in range(4)}
    for r in range(n):
        reference.state = [reference.result(r, t, order) for t in range(len(TENSORS))]
        for lines in logs.values():
            lines += [(r, tensor, digest(value)) for (tensor, *_), value in zip(TENSORS, reference.state)]
    if change:
        change(logs)
    return tuple(map(len, chaos.judge({'job': logs}, JOBS)))


def test_the_judge_sees_it():
    assert made(3) == (0, 0) == made(1)

    def change(rank, at, *lines):
        return lambda logs: logs[rank].__setitem__(slice(at, at + 1), lines)
    for name, what, n_differing, n_wrong in [
            ('one rank has another value', change(2, 4, (1, 'bias', '0' * 16)), 1, 0),
            ('all have another value', lambda logs: [change(k, 4, (1, 'bias', '0' * 16))(logs) for k in range(4)], 1, 0),
            ('a result is lost', change(1, 4), 0, 1),
            ('a result comes twice', change(1, 4, *2 * made_line(1, 1)), 0, 1),
            ('a rank lacks the last round', lambda logs: logs.__setitem__(3, logs[3][:-3]), 0, 3),
            ('a rank lacks a tensor', lambda logs: logs.__setitem__(3, [line for line in logs[3] if line[1] != 'bias']), 0, 3),
            ('a rank has no log', lambda logs: logs.pop(3), 0, 9),
            ('a rank is out of order', lambda logs: logs[0].insert(0, logs[0].pop()), 0, 1),
            ('a tensor that there is not', lambda logs: logs[0].append((0, 'other', '0')), 0, 1)]:
        assert made(3, what) == (n_differing, n_wrong), f'{name}: {made(3, what)}'
    assert made(0)[1] == 1, 'no round at all'
    assert chaos.judge({}, JOBS)[1], 'no job at all'


def made_line(r, t):
    """The result of tensor t in round r, as made() logs it."""
    lines = []
    made(r + 1, lambda logs: lines.append(logs[0][3 * r + t]))
    return lines


def test_the_order_of_additions_shows():
    """Of nodes, and of the ranks of one, in every tensor of floating numbers; and so does a sum that lacks one of them."""
    reference, order = Reference(), [[7], [8], [9, 10]]
    for r in range(40):
        values = [reference.result(r, t, order) for t in range(len(TENSORS))]
        for t, (name, dtype, _, _) in enumerate(TENSORS):
            # The first two may come in any order: a + b is b + a.
            others = [[[7], [9, 10], [8]], [[9, 10], [7], [8]], [[9, 10], [8], [7]], [[8], [9, 10], [7]], [[7], [8], [9], [10]]]
            if dtype == FLOAT32:
                same = [other for other in others if digest(reference.result(r, t, other)) == digest(values[t])]
                assert not same, f'round {r} of {name}: the same for nodes {same}'
                assert np.isfinite(values[t]).all(), f'round {r} of {name} is not finite'
            for less in ([[7], [8]], [[7], [9, 10]], [[7], [8], [10]], [[8], [9, 10]]):
                assert digest(reference.result(r, t, less)) != digest(values[t]), f'round {r} of {name}: the same of {less}'
        reference.state = values


class Counted:
    """As a rank: what it has logged, and whether it has ended."""

    job = 'job'

    def __init__(self, rank):
        self.rank = self.identity = self.node = rank
        self.n, self.status, self.killed, self.process = 0, None, False, self

    def lines(self):
        return [0] * self.n

    def poll(self):
        return self.status


def test_who_stands_still_is_seen_beside_who_does_not():
    watch, ranks = elastic.Watch(0.05), [Counted(i) for i in range(3)]
    ranks[2].status = 0

    def all_get_on_but(still):
        for rank in ranks:
            rank.n += rank is not still
        return watch.standing(ranks)
    assert all_get_on_but(None) == []
    assert wait_for('the one that stands', lambda: all_get_on_but(ranks[1])) == [ranks[1]]
    assert all_get_on_but(None) == []
    assert elastic.longest_round([10 ** 9, 2 * 10 ** 9, 7 * 10 ** 9]) == 5


class Busy(Counted):
    """Has logged more whenever one looks."""

    def lines(self):
        self.n += 1
        return super().lines()


def test_a_run_ends_when_one_rank_hangs_beside_others():
    ranks = [Busy(0), Counted(1), Busy(2)]
    run_of_all = chaos.Run(argparse.Namespace(longest=0.05))
    run_of_all.ranks = ranks
    assert run_of_all.progress(lambda: True)
    assert not run_of_all.progress(lambda: False) and run_of_all.hangs == ['job.1 after 0 results']
    elastic_run = elastic.Run(1, None, 0.05)
    elastic_run.world = argparse.Namespace(everybody=ranks, live=lambda: ranks)
    try:
        elastic_run.until('the end', lambda: False)
    except elastic.Hang:
        assert len(elastic_run.errors) == 1 and elastic_run.errors[0].startswith('rank 1 on node 1 hangs'), elastic_run.errors
    else:
        assert False, 'it waits in vain'


def test_a_run_ends_when_a_rank_ends_badly():
    ranks = [Busy(0), Busy(1)]
    run_of_all = chaos.Run(argparse.Namespace(longest=DEADLINE))
    run_of_all.ranks, ranks[1].status = ranks, 1
    assert not run_of_all.progress(lambda: False) and not run_of_all.hangs


def test_a_build_without_failpoints_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, 'daemon'))
        open(os.path.join(folder, 'daemon', 'bps-daemon'), 'w').close()
        for mode in ([], ['--elastic']):
            out = subprocess.run([sys.executable, chaos.__file__, '--print', '--kills', '1', *mode], capture_output=True, text=True,
                                 env={**os.environ, 'BPS_BUILD_DIR': folder})
            assert out.returncode == 2 and 'without failpoints' in out.stderr, out
            out = subprocess.run([sys.executable, chaos.__file__, '--print', '--kills', '1', '--without-failpoints', *mode],
                                 capture_output=True, text=True, env={**os.environ, 'BPS_BUILD_DIR': folder})
            assert out.returncode == 0, out


def test_failpoints_that_are_not_met_are_counted():
    need_failpoints()
    with elastic.chaos_world.World(1) as world:
        over = threading.Event()
        keeper = threading.Thread(target=world.keep, args=(over,))
        keeper.start()
        try:
            for spec in ('job-joined=delay@1', 'job-joined=delay@99', 'no-such-place=kill'):
                n = len(world.deaths)
                with world.lock:
                    world.arm(0, spec)
                    world.daemons[0].signal(signal.SIGKILL)
                wait_for('its end', lambda: len(world.deaths) > n)
                with world.lock:
                    world.daemons[0].ready()
                for rank in world.job((1,)):
                    rank.call('close')
                if spec.endswith('@1'):
                    wait_for('it is met', lambda: world.met(world.points[-1]))
            world.arm(0, 'job-joined=stop')
            assert world.unmet() == ['n0: job-joined=delay@99', 'n0: no-such-place=kill', 'n0: job-joined=stop'], world.points
        finally:
            over.set()
            keeper.join()


def test_a_seed_makes_the_same_schedule():
    kinds = list(chaos.KINDS)
    first = chaos.schedule(7, 100, kinds, True, False)
    assert first == chaos.schedule(7, 100, kinds, True, False) != chaos.schedule(8, 100, kinds, True, False)
    assert {fault['kind'] for fault in first} == set(kinds)
    assert any('point' in fault for fault in first) and not any('point' in f for f in chaos.schedule(7, 100, kinds, False, True))


def elastic_logs(change=lambda logs: None):
    """Of two ranks on two nodes that do three rounds, of which the second is without rank 1 after it has died."""
    ref, logs = Reference(elastic.SLOTS), {0: [['begin', '0', '0', '0', '2', '0']], 1: [['begin', '0', '0', '1', '2', '1']]}
    for r, who in enumerate(([0, 1], [0], [0])):
        for t, tensor in enumerate(elastic.TENSORS):
            value = ref.result(r, t, [[identity] for identity in who])
            for identity in who:
                logs[identity].append(['result', str(r), tensor, digest(value), ','.join(map(str, who)), str(3 - len(who)),
                                       str(len(who)), str(identity), str(len(who)), '1'])
            ref.next = [*getattr(ref, 'next', [])[:t], value]
        ref.state = ref.next
        for identity in who:
            logs[identity].append(['done', str(r)])
    change(logs)
    found = elastic.Judge(logs).judge()
    return len(found.differing), len(found.wrong), found.rounds


def test_the_judge_of_elastic_jobs_sees_it():
    assert elastic_logs() == (0, 0, 3)

    def change(identity, line, word, value):
        return lambda logs: logs[identity][line].__setitem__(word, value)
    assert elastic_logs(change(0, 1, 3, '0' * 16))[0] == 1, 'ranks have other values'
    assert elastic_logs(change(0, 5, 3, '0' * 16))[0] == 1, 'a value is wrong'
    assert elastic_logs(change(0, 1, 4, '0'))[1] > 0, 'ranks differ about who came'
    assert elastic_logs(change(0, 5, 4, '0,1'))[0] + elastic_logs(change(0, 5, 4, '0,1'))[1] > 0, 'another set'
    assert elastic_logs(change(0, 5, 8, '2'))[1] > 0, 'another number came than is in it'
    assert elastic_logs(change(0, 1, 7, '1'))[1] > 0, 'it is another rank'
    assert elastic_logs(lambda logs: logs[0].pop(4))[1] > 0, 'a round is not done'
    assert elastic_logs(lambda logs: logs[0].insert(5, logs[0][3]))[1] > 0, 'a result comes twice'
    assert elastic_logs(lambda logs: logs[0].clear() or logs[1].clear())[1] > 0, 'no round at all'


run(globals())
