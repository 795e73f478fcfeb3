#!/usr/bin/env python3
"""The coordinator dies and comes back: running jobs do not notice, those that form are formed, and no number of a view is
used twice. It is a daemon of its own here, without trainers and sums, so that nothing else is lost with it."""
import contextlib, os, signal, struct, sys, threading
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from links import Relay, split

with open(os.path.join(BUILD, 'daemon', 'bps-daemon'), 'rb') as binary:
    HAS_FAILPOINTS = b'BPS_FAILPOINTS' in binary.read()


class Apart(Cluster):
    """Nodes 0 and 1, each agent and server, and a coordinator by itself."""

    def __init__(self, armed='', lease='3s', **keys):
        self.armed = [armed] if isinstance(armed, str) else list(armed)
        super().__init__(3, 0, source='coordinator', options=[f'--lease={lease}'], **keys)

    def roles(self, i):
        return 'agent' if i == 2 else 'agent,server'

    def start(self, i, wait=True, options=()):
        if i == 2 and self.armed:
            os.environ['BPS_FAILPOINTS'] = self.armed.pop(0)
            wait = False  # it may die before it is ready
        try:
            return super().start(i, wait, options)
        finally:
            os.environ.pop('BPS_FAILPOINTS', None)

    @property
    def coordinator(self):
        return self.daemons[2]

    def settled(self):
        """All three are in one view; its number."""
        def look():
            status = [daemon.ctl('status') for daemon in self.daemons if daemon.alive()]
            nodes = [len(daemon.ctl('nodes')['nodes']) for daemon in self.daemons if daemon.alive()]
            epochs = {s['epoch'] for s in status}
            return epochs.pop() if len(epochs) == 1 and nodes == [3, 3, 3] else None
        return wait_for('one view with all three', look, 4 * DEADLINE)


class ApartByRelay(Apart):
    """Both nodes reach the coordinator through self.relay."""

    relay = None

    def way(self, i, coordinator):
        if i == 2:
            return coordinator
        if not self.relay:
            host = split(coordinator)[0]
            with socket.socket() as probe:
                probe.bind((host, 0))
                address = '%s:%d' % probe.getsockname()
            self.relay = Relay(address, coordinator)
        return '%s:%d' % self.relay.listener.getsockname()

    def abandon(self):
        super().abandon()
        if self.relay:
            self.relay.close()


@contextlib.contextmanager
def kept(cluster):
    """Whatever ends the coordinator, it is started again; yields how often, as a list of one."""
    over, count, errors = threading.Event(), [0], []

    def watch():
        try:
            while not over.wait(0.01):
                if not cluster.coordinator.alive():
                    cluster.restart(2)
                    count[0] += 1
        except Exception as error:
            errors.append(error)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]


def rounds(ranks, n, before=lambda turn: None):
    """n rounds of a sum, each checked; before(turn) runs while its first contribution waits for the others."""
    for turn in range(n):
        for k, rank in enumerate(ranks):
            rank.submit(turn, 0, struct.pack('<1000i', *[turn * 10 + k] * 1000), out=1000)
            if k == 0:
                before(turn)
        want = struct.pack('<1000i', *[sum(turn * 10 + k for k in range(len(ranks)))] * 1000)
        for rank in ranks:
            rank.wait(turn)
            assert rank.result(turn) == want, f'round {turn}'
            rank.call('free', turn)


def declare(ranks):
    for rank in ranks:
        rank.call('tensor', 0, 'sum', INT32, 1000)


def finish(ranks):
    for rank in ranks:
        rank.send('leave')
    for rank in ranks:
        rank.answer()


def test_a_running_job_does_not_notice():
    with Apart() as cluster:
        first = cluster.settled()
        ranks = cluster.job((2, 1))
        declare(ranks)

        def kill(turn):
            if turn == 1:
                cluster.coordinator.kill()
            elif turn == 3:
                cluster.restart(2)
        rounds(ranks, 5, kill)
        assert cluster.settled() > first, 'a number of a view was used twice'
        rounds(ranks, 2, lambda turn: (cluster.coordinator.kill(), cluster.restart(2)))
        second = cluster.settled()
        assert second > first
        # The next job runs beside it.
        others = cluster.job((1, 1))
        declare(others)
        rounds(others, 1)
        rounds(ranks, 1)
        finish(ranks + others)


def test_a_stopped_coordinator_drops_nobody():
    with Apart(lease='2s') as cluster:
        ranks = cluster.job((1, 1))
        declare(ranks)
        cluster.coordinator.signal(signal.SIGSTOP)
        rounds(ranks, 2)
        select.select([], [], [], 3)  # longer than the lease: that is what is tested
        rounds(ranks, 2)
        cluster.coordinator.signal(signal.SIGCONT)
        cluster.settled()
        rounds(ranks, 2)
        finish(ranks)


def test_a_path_that_swallows_what_is_sent():
    """Nobody is told that connections are dead: the members come by new ones before they are dropped, and with them a job
    that was asked for meanwhile."""
    with ApartByRelay(lease='24s') as cluster:
        first = cluster.settled()
        ranks = cluster.job((1, 1))
        declare(ranks)
        cluster.relay.swallow()
        rounds(ranks, 2)
        others = cluster.job((1, 1))
        declare(others)
        rounds(others, 1)
        for daemon in cluster.daemons[:2]:
            assert 'a heartbeat was not answered' in daemon.text(), daemon.text()
        assert 'dropped' not in cluster.coordinator.text(), cluster.coordinator.text()
        assert cluster.settled() == first
        finish(ranks + others)


def test_a_job_that_forms_is_formed():
    """Killed between the joining of two nodes, and while a job waits for its second node's view."""
    with Apart() as cluster:
        cluster.settled()
        ranks = cluster.job((1, 1), join=False)
        ranks[0].send('join', *(f'{k}={v}' for k, v in ranks[0].keys.items()))
        wait_for('the first half', lambda: cluster.daemons[0].ctl('jobs')['jobs'])
        cluster.coordinator.kill()
        ranks[1].send('join', *(f'{k}={v}' for k, v in ranks[1].keys.items()))
        cluster.restart(2)
        for rank in ranks:
            rank.answer(2 * DEADLINE)
        declare(ranks)
        rounds(ranks, 2)
        finish(ranks)


def test_killed_at_each_failpoint():
    """Before and after whatever it does is known to anybody, with a job that runs and one that forms."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    if SANITIZED:
        raise Skip('left to the plain build: it takes long')
    for place in ('coordinator-registered', 'coordinator-view-made', 'coordinator-view-told', 'coordinator-job-opened',
                  'coordinator-job-closed'):
        with Apart() as cluster:
            ranks = cluster.job((1, 1))
            declare(ranks)
            # From here on, each coordinator dies at the place, until one is not told to.
            cluster.armed = [f'{place}=kill@1', f'{place}=kill@{1 if "view" in place else 2}', '']
            cluster.coordinator.kill()
            with kept(cluster) as count:
                for number in range(20):
                    others = cluster.job((1, 1))
                    declare(others)
                    rounds(others, 1)
                    finish(others)
                    for rank in others:
                        rank.call('close')
                    rounds(ranks, 1)
                    if count[0] >= 3:
                        break
                assert count[0] >= 3, f'{place} was passed {count[0]} times'
            cluster.settled()
            finish(ranks)


run(globals())
