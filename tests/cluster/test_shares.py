#!/usr/bin/env python3
"""Priority orders within a job. Between jobs, what daemons read, sum and send goes by turns of bytes: what was done is counted, not timed."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from crowd import Crowd
import wire


KIB, MIB = 1 << 10, 1 << 20
GREEDY = 2**31 - 1  # the largest priority there is


class Backlog:
    """A job whose ranks ask for all that they want before any of it is watched: what is done next is for daemons alone to say."""

    def __init__(self, cluster, job, layout, tensors, n_rounds, priority=0):
        """tensors: bytes of each."""
        self.crowd, self.sizes = Crowd(cluster.daemons, layout, job=job, length=max(tensors)), tensors * n_rounds
        # The bytes of which jobs have shares: those that are read for sums, or where there are servers go there.
        self.weight = 1 if len(layout) > 1 else layout[0]
        asked = [{session.declare(tensor, f't{tensor}', elements=size // 4) for tensor, size in enumerate(tensors, 1)}
                 for session in self.crowd.sessions]
        for session, numbers in zip(self.crowd.sessions, asked):
            while numbers:  # in whatever order
                fields, _ = session.receive()
                assert fields and not fields.get(2), fields
                numbers.discard(fields.get(1))
        for number in range(1, n_rounds + 1):
            for rank in range(len(self.crowd.sessions)):
                self.crowd.post(rank, [{'round': number, 'tensor': tensor, 'priority': priority, 'input_count': size // 4,
                                        'output_count': size // 4, 'timeout_ms': 600000} for tensor, size in enumerate(tensors, 1)])
        for session in self.crowd.sessions:  # behind the entries: answered when these were taken
            assert session.request(wire.CANCEL, {1: 0, 2: 77})[0] == 0

    def done(self):
        """Bytes that rank 0 has seen reduced."""
        session = self.crowd.sessions[0]
        return self.weight * sum(size for slot, size in enumerate(self.sizes) if session.is_done(slot))

    def all(self):
        return self.weight * sum(self.sizes)


def has_its_share(layout, greedy_layout, **nodes):
    """
    While the modest job waits for any of its bytes, the greedy one has no more than a quarter as much again, and what was under way
    before. The greedy job is counted first: what is done in between is the modest job's, so a look that comes late accuses nobody.
    """
    if TSAN:
        raise Skip('all tensors have the same memory: sums that are read and written at once are a race, of these trainers')
    started = 16 * MIB * max(greedy_layout)
    with Cluster(**nodes) as cluster:
        for attempt in range(20):  # again where one of the jobs was done before anybody had looked
            greedy = Backlog(cluster, f'greedy{attempt}', greedy_layout, 64 * [MIB] + 32 * [4 * KIB], 32, GREEDY)
            modest = Backlog(cluster, f'modest{attempt}', layout, 32 * [MIB], 16)
            had, its, mine, end = modest.done(), greedy.done(), 0, time.monotonic() + 4 * DEADLINE
            while (more := greedy.done() - its) + its < greedy.all() and (now := modest.done()) < modest.all():
                mine = now - had
                assert more <= 1.25 * mine + started, f'{more} bytes were done beside {mine}'
                assert time.monotonic() < end, f'nothing is done any more: {mine} bytes of the modest job, {more} of the greedy one'
            print(f'  {mine} bytes of the modest job, {more} of the greedy one')
            for job in greedy, modest:
                assert job.crowd.statuses(0, len(job.sizes)) == {0}, job.crowd.statuses(0, len(job.sizes))
                job.crowd.close()
            if mine >= 2 * started and more:
                return
    raise AssertionError('the daemons were done before anybody had looked, again and again')


def test_a_greedy_priority_has_its_share_of_a_machine_and_no_more():
    """Many ranks, many tensors, large and small. What it has more of it waits for itself."""
    has_its_share((2,), (6,), n_nodes=1)


def test_a_greedy_priority_has_its_share_of_a_server_and_no_more():
    has_its_share((1, 1), (3, 3), n_nodes=2, n_spare=1, colocated=False)


run(globals())
