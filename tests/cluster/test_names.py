#!/usr/bin/env python3
"""A job through servers whose program names tensors anew in each step, many times as many as max_tensors (names.c): what no
rank uses is forgotten at every node and server, what one rank has use of is kept, sums are right bit for bit, and no daemon
that is killed meanwhile changes that."""
import os, random, subprocess, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from recovery import HAS_FAILPOINTS, SEED, Keeper, armed_cluster

MAX_TENSORS = 64
FEW = 24
MORE = 256  # so that an eighth is made in more steps than there are between two restarts


def few(n):
    return (f'--max-tensors={n}',)


NAMES = os.path.join(BUILD, 'tests', 'cluster', 'names')


class Names:
    """The ranks of a job, layout[k] of them on node k."""

    def __init__(self, cluster, layout, steps, cycle, other=1, keeper=1, pause_us=0, **settings):
        self.ranks, size = [], sum(layout)
        for node, local_size in enumerate(layout):
            for local_rank in range(local_size):
                env = {k: v for k, v in os.environ.items() if not k.startswith('BPS_')}
                env.update({'BPS_SOCKET': cluster.daemons[node].socket, 'BPS_JOB': 'names', 'BPS_TIMEOUT': '60',
                            'BPS_REQUEST_TIMEOUT': str(DEADLINE), **settings})
                for key, value in {'RANK': len(self.ranks), 'SIZE': size, 'LOCAL_RANK': local_rank,
                                   'LOCAL_SIZE': local_size, 'NODE': node, 'NODES': len(layout)}.items():
                    env['BPS_' + key] = str(value)
                self.ranks.append(subprocess.Popen([NAMES, *map(str, (steps, cycle, other, keeper, pause_us))], env=env,
                                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        # A job that has not begun does not outlive its home. One that ended instead says why at its end.
        for rank in self.ranks:
            assert os.read(rank.stdout.fileno(), 7) in (b'joined\n', b'')

    def alive(self):
        return any(rank.poll() is None for rank in self.ranks)

    def ends(self, seconds):
        """What each has said: its output and its errors."""
        try:
            return [rank.communicate(timeout=seconds) for rank in self.ranks]
        except subprocess.TimeoutExpired:
            for rank in self.ranks:
                rank.kill()
            raise AssertionError(f'ranks hang: {[rank.communicate() for rank in self.ranks]}') from None

    def end_well(self, steps, seconds=4 * DEADLINE):
        said = self.ends(seconds)
        assert all(out.startswith(f'ok {steps} ') for out, _ in said), said
        return sum(int(out.split()[2]) for out, _ in said)


def names(layout, n_spare, steps, cycle=5 * MAX_TENSORS, **keys):
    with Cluster(len(layout), n_spare, options=few(MAX_TENSORS), **keys) as cluster:
        Names(cluster, layout, steps, cycle).end_well(steps)


@gate_tier
def test_names_have_no_end():
    names((1, 1), 1, 8 * MAX_TENSORS, colocated=False)


@gate_tier
def test_of_several_ranks_and_servers():
    names((2, 1), 2, 6 * MAX_TENSORS, colocated=False)
    names((1, 2, 1), 0, 6 * MAX_TENSORS, colocated=True)


@gate_tier
def test_an_elastic_job_is_refused_in_words():
    with Cluster(2, 1, colocated=False, options=few(MAX_TENSORS)) as cluster:
        said = Names(cluster, (1, 1), 3 * MAX_TENSORS, 3 * MAX_TENSORS, BPS_ELASTIC='1').ends(2 * DEADLINE)
        # Who is refused first leaves, and the job goes on without its part of the sums, which this program does not look for.
        refused = [err for _, err in said if 'max_tensors' in err]
        assert refused and all(err in refused or 'element 0 is' in err for _, err in said), said


# After a restart names come in no order: some old ones stay. So they are of one shape, and some are named again soon.
def killed(layout, n_spare, victims, colocated, steps=12 * MORE, kills=16, armed=None, seed=0, more=MORE):
    rng = random.Random(SEED + seed)
    with armed_cluster(layout, n_spare, armed or {}, colocated=colocated, options=few(more)) as cluster, \
            Keeper(cluster, {i: a[1:] for i, a in (armed or {}).items()}) as keeper:
        job = Names(cluster, layout, steps, more + 40, other=0, pause_us=0 if armed else 1000)
        n_killed = 0
        while job.alive() and not armed:
            time.sleep(rng.uniform(0.1, 0.5) * SLOW)  # a moment to be killed at, not one to wait for
            if n_killed < kills:
                keeper.kill(rng.choice(victims))
                n_killed += 1
                keeper.expect(n_killed)
        n_anew = job.end_well(steps)
        print(f'{keeper.restarts} restarts, {n_anew} names anew', flush=True)
        assert keeper.restarts, 'nobody was killed'


# In doubt, and nobody knows; forgotten, and only the home knows; out of the ledger, too; one of several nodes is answered.
OF_AGENT, OF_HOME = ('tensor-in-doubt', 'tensor-settled', 'tensor-forgotten'), ('server-tensor-decided',)


@full_tier('10 s and more')
def test_killed_at_each_failpoint():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for name, victims in [(name, (0,)) for name in OF_AGENT] + [(name, (2,)) for name in OF_HOME]:
        for at in (1, 2, 7):
            for victim in victims:
                armed = {victim: [f'{name}=kill@{at}'] * 3}
                killed((2, 1), 1, victims, False, steps=3 * MORE, armed=armed)


# What a killed node had no time to say is not kept for it: with more kills than there are places to spare.
@full_tier('10 s and more')
def test_killed_more_often_than_there_is_room():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for name in ('tensor-settled', 'tensor-forgotten'):
        killed((2, 1), 1, (0,), False, steps=20 * FEW, armed={0: [f'{name}=kill@1'] * 12}, more=FEW)


@full_tier('random moments')
def test_any_daemon_is_killed_at_random_moments():
    print(f'seed {SEED} (BPS_SEED)', flush=True)
    killed((1, 1), 1, (2,), False)
    killed((1, 1), 1, (0, 1), False, seed=1)
    killed((1, 2, 1), 0, (0, 1, 2), True, seed=2)
    killed((1, 1), 2, (0, 1, 2, 3), True, seed=3)


run(globals())
