#!/usr/bin/env python3
"""Promise 4: nothing waits for ever. Whoever dies, stops, or does not come is named to every survivor within its deadline,
the daemons stay up, and the next job runs."""
import os, signal, struct, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *

ONES = b'\x00\x00\x80\x3f' * 1000
TIMEOUT = 1500  # ms: a request's deadline in these tests


def tensor(ranks, number=0, n=1000):
    for rank in ranks:
        rank.call('tensor', number, f'tensor.{number}', FLOAT32, n)


def submit(rank, request=0, number=0, **keys):
    rank.submit(request, number, ONES, out=1000, **keys)


def next_job_runs(cluster, layout, **keys):
    ranks = cluster.job(layout, **keys)
    tensor(ranks)
    for rank in ranks:
        submit(rank)
    for rank in ranks:
        rank.wait(0)
        assert rank.result(0)[:4] == bytes.fromhex({1: '0000803f', 2: '00000040', 3: '00004040', 4: '00008040'}[len(ranks)])
    for rank in ranks:
        rank.call('close')
    assert all(daemon.alive() for daemon in cluster.daemons)


def fails(rank, request=0, number=0, **keys):
    """How a submission that must fail does, now or when it completes: its BpsError."""
    try:
        submit(rank, request, number, **keys)
    except BpsError as error:
        return error
    return rank.ended(request)


def names(error, *words):
    for word in words:
        assert word in error.text, f'{word!r} is not in {error.text!r}'


def expect(trainer, *words):
    try:
        trainer.answer()
    except BpsError as error:
        names(error, *words)
        return error
    raise AssertionError('completed, but should have failed')


@full_tier('a deadline of 3 s that something good must meet')
def test_a_rank_that_does_not_join_is_named():
    layouts = [((4,), 2), ((2, 2), 3), ((2, 1), 2)]
    with Cluster(2) as cluster:
        jobs = [cluster.job(layout, join=False, timeout_ms=2 * TIMEOUT) for layout, _ in layouts]
        present = [(rank, absent) for ranks, (_, absent) in zip(jobs, layouts) for k, rank in enumerate(ranks) if k != absent]
        for rank, _ in present:
            rank.send('join', *(f'{key}={value}' for key, value in rank.keys.items()))
        for rank, absent in present:
            error = expect(rank, f'rank {absent}')
            assert error.errno == errno.ETIMEDOUT, error
        for layout, _ in layouts:
            next_job_runs(cluster, layout)


@full_tier('joins are given up after 3 s, and must have been refused by then')
def test_ranks_that_disagree_about_the_job_are_named():
    with Cluster(2) as cluster:
        for layout, key, value, words in [((2,), 'world_size', 3, ('2', '3')), ((1, 1), 'world_size', 4, ('2', '4')),
                                          ((1, 1), 'n_nodes', 3, ('2', '3'))]:
            ranks = cluster.job(layout, join=False, timeout_ms=TIMEOUT * 2)
            ranks[1].keys[key] = value
            for rank in ranks:
                rank.send('join', *(f'{k}={v}' for k, v in rank.keys.items()))
                errors = []
            for rank in ranks:
                try:
                    rank.answer()
                    errors.append(None)
                except BpsError as error:
                    errors.append(error)
            assert errors[1], f'{key} {value}: rank 1 was let in'
            told = [e for e in errors if e and e.errno == errno.EINVAL]
            assert told, errors
            for word in words:
                assert any(word in e.text for e in told), (word, errors)
        next_job_runs(cluster, (1, 1))


@full_tier('a join is given up after 1.5 s, and must have been refused by then')
def test_a_wrong_secret_gets_nowhere():
    for layout in [(2,), (1, 1)]:
        with Cluster(len(layout)) as cluster:
            ranks = cluster.job(layout, join=False, secret='right')
            ranks[0].send('join', *(f'{k}={v}' for k, v in ranks[0].keys.items()))
            intruder = cluster.trainer(len(layout) - 1)
            keys = {**ranks[1].keys, 'secret': 'wrong', 'timeout_ms': 300}
            wait_for('the job', lambda: any(j['job'] == 'job1' for j in cluster.daemons[0].ctl('jobs')['jobs']))
            try:
                intruder.call('join', *(f'{k}={v}' for k, v in keys.items()))
                raise AssertionError('joined with a wrong secret')
            except BpsError as error:
                assert error.errno == errno.ETIMEDOUT and 'with another secret' in error.text, error
            ranks[1].call('join', *(f'{k}={v}' for k, v in ranks[1].keys.items()))
            ranks[0].answer()


@gate_tier
def test_a_mismatched_declaration_is_an_error_on_every_rank():
    for layout in [(2,), (1, 1), (2, 2)]:
        with Cluster(len(layout)) as cluster:
            ranks = cluster.job(layout)
            last = len(ranks) - 1
            for k, rank in enumerate(ranks):
                rank.call('tensor', 0, 'weights', FLOAT32, 1000 if k != last else 999)
            for k, rank in enumerate(ranks):
                n = 1000 if k != last else 999
                try:  # refused at once where the answer is known already
                    rank.submit(0, 0, ONES[:4 * n], out=n)
                    error = rank.ended(0)
                except BpsError as refused:
                    error = refused
                assert error.errno == errno.EINVAL, error
                names(error, 'weights', '1000', '999', f'rank {last}')
            # The job itself goes on.
            tensor(ranks, 1)
            for rank in ranks:
                submit(rank, 1, 1)
            for rank in ranks:
                rank.wait(1)


def test_different_operations_on_one_round_are_an_error():
    for layout in [(2,), (1, 1)]:
        with Cluster(len(layout)) as cluster:
            ranks = cluster.job(layout)
            tensor(ranks)
            submit(ranks[0], red=SUM)
            submit(ranks[1], red=MAX)
            for rank in ranks:
                error = rank.ended(0)
                names(error, 'tensor.0')
                assert error.errno == errno.EINVAL, error


@full_tier('a deadline of 1.5 s that something good must meet')
def test_a_rank_that_does_not_submit_is_named():
    for layout, absent in [((3,), 1), ((2, 2), 3), ((1, 1), 1), ((2, 2), 0)]:
        first = absent - absent % layout[0]
        node = ', '.join(str(rank) for rank in range(first, first + layout[0]))
        of_server = f'ranks {node} have not all contributed within'
        with Cluster(len(layout)) as cluster:
            ranks = cluster.job(layout, request_timeout_ms=TIMEOUT)
            tensor(ranks)
            for k, rank in enumerate(ranks):
                if k != absent:
                    submit(rank)
            for k, rank in enumerate(ranks):
                if k != absent:
                    error = rank.ended(0)
                    assert error.errno == errno.ETIME, error
                    # The absent rank's agent names that rank. A server knows of nodes alone; it waits GRACE_MS longer than the
                    # agent, which may be later still on a busy machine.
                    assert f'rank {absent}' in error.text or len(layout) > 1 and of_server in error.text, error.text
            # The round is over for the late one too, and the job goes on with the next.
            submit(ranks[absent])
            ranks[absent].ended(0)
            for rank in ranks:
                submit(rank, 1)
            for rank in ranks:
                rank.wait(1)


@gate_tier
def test_a_dead_trainer_is_named_to_all():
    for layout, victim in [((3,), 1), ((2, 2), 3), ((1, 1), 0)]:
        with Cluster(len(layout), 1) as cluster:
            # At once, and not when their patience ends, which is longer than the test's.
            ranks = cluster.job(layout, request_timeout_ms=3600000)
            tensor(ranks)
            for k, rank in enumerate(ranks):
                if k != victim:
                    submit(rank)
            ranks[victim].kill()
            for k, rank in enumerate(ranks):
                if k != victim:
                    names(rank.ended(0), f'rank {victim}')
            next_job_runs(cluster, layout)


def dies_in_the_middle(layout, victim, n, meanwhile, armed=None):
    """Each survivor of the victim has the whole sum in every element, or hears whose death it was. meanwhile(cluster): waits until the
    victim is to die. armed: failpoints. Returns how many heard of it."""
    whole = struct.pack('<f', (1 << sum(layout)) - 1) * n
    with Cluster(len(layout), 1, failpoints=armed) as cluster:
        ranks = cluster.job(layout)
        tensor(ranks, 0, n)
        for k, rank in enumerate(ranks):  # so that each set of ranks has a sum of its own
            rank.submit(0, 0, struct.pack('<f', 1 << k) * n, out=n, shared=1)
        meanwhile(cluster)
        ranks[victim].kill()
        for daemon in cluster.daemons:
            daemon.signal(signal.SIGCONT)
        told = 0
        for k, rank in enumerate(ranks):
            if k == victim:
                continue
            try:
                rank.wait(0)
                assert rank.result(0) == whole, f'wrong values: a sum without some on rank {k} of {layout}'
            except BpsError as error:
                names(error, f'rank {victim}')
                told += 1
        next_job_runs(cluster, layout)
        return told


@gate_tier
def test_a_dead_trainer_in_the_middle_of_its_data():
    """Killed while 64 MiB are under way: nobody may get a wrong sum, hang, or crash the daemon."""
    for layout, victim in some((((2, 1), 0), ((1, 1, 1), 1), ((1, 1, 1), 2)), (((2, 1), 0), ((1, 1, 1), 1))):
        dies_in_the_middle(layout, victim, 16 << 20, lambda cluster: None)


@gate_tier
def test_a_trainer_dies_when_some_parts_are_done():
    """Its daemon stands still at a part in the middle, so that others are done and others have not begun."""
    need_failpoints()
    n, told = 4 << 20, 0
    for layout, victim, point in (((3,), 1, 'part-summed'), ((1, 1, 1), 1, 'part-straight'), ((2, 1, 1), 0, 'part-answered')):
        node = 0 if len(layout) == 1 else victim
        told += dies_in_the_middle(layout, victim, n, lambda cluster: wait_for(
            f'{point} of {layout}', lambda: cluster.daemons[node].state() == 'T'), {node: f'{point}=stop@3'})
    # A daemon that goes on may end the round before it looks at who has died, though it has much to do: that is no verdict in the gate.
    assert told or GATE, 'all was over before any of them died'


@full_tier('a deadline of 1.5 s that something good must meet')
def test_a_stopped_trainer_is_named_at_the_deadline():
    for layout, victim in [((2,), 1), ((1, 1), 1)]:
        with Cluster(len(layout)) as cluster:
            ranks = cluster.job(layout, request_timeout_ms=TIMEOUT)
            tensor(ranks)
            ranks[victim].signal(signal.SIGSTOP)
            submit(ranks[1 - victim])
            error = ranks[1 - victim].ended(0)
            names(error, f'rank {victim}')
            ranks[victim].signal(signal.SIGCONT)
            next_job_runs(cluster, layout)


@full_tier('a deadline of 6 s that something good must meet')
def test_a_rank_that_leaves_is_named():
    for layout in [(2,), (1, 1)]:
        with Cluster(len(layout)) as cluster:
            ranks = cluster.job(layout, request_timeout_ms=TIMEOUT * 4)
            tensor(ranks)
            ranks[1].call('leave')
            names(fails(ranks[0]), 'rank 1')
            next_job_runs(cluster, layout)


def test_cancel_names_the_canceller():
    for layout in [(2,), (1, 1)]:
        with Cluster(len(layout)) as cluster:
            ranks = cluster.job(layout)
            tensor(ranks)
            if layout == (2,):
                submit(ranks[0])
                ranks[0].call('cancel', 0)
                assert ranks[0].ended(0).errno == errno.ECANCELED
                submit(ranks[1])
                names(ranks[1].ended(0), 'rank 0')
            for rank in ranks:
                submit(rank, 1)
            for rank in ranks:
                rank.wait(1)


@full_tier('a lost-timeout of 1 s')
def test_a_dead_server_is_named():
    for source in ('static', 'coordinator'):
        with Cluster(2, 2, source=source, colocated=False,
                     options=['--lost-timeout=1s', '--move-timeout=60m']) as cluster:
            ranks = cluster.job((1, 1), min_servers=2)
            tensor(ranks)
            submit(ranks[0])
            cluster.daemons[2].kill()
            for rank in ranks:  # whoever gives up first tells the other
                error = ranks[0].ended(0) if rank is ranks[0] else fails(rank)
                assert 's0' in error.text or 'did not come back' in error.text, error
            cluster.restart(2)
            next_job_runs(cluster, (1, 1), min_servers=2)


@full_tier('a lost-timeout of 1 s')
def test_a_dead_agent_is_named():
    # One that does not come back in time, and one that is not waited for.
    for option, name in (('--lost-timeout=1s', 'rank 1'), ('--resume=off', 'n1')):
        a_dead_agent_is_named([option], name)


def a_dead_agent_is_named(options, name):
    with Cluster(2, 1, colocated=False, options=options) as cluster:
        ranks = cluster.job((1, 1))
        tensor(ranks)
        submit(ranks[0])
        cluster.daemons[1].kill()
        names(ranks[0].ended(0), name)
        if 'off' not in options[0]:
            return
        assert fails(ranks[1]).errno == errno.ESHUTDOWN
        cluster.restart(1)
        next_job_runs(cluster, (1, 1))


@full_tier('signs of life: who is silent for 3 s is lost')
def test_a_stopped_server_is_named():
    with Cluster(2, 1, colocated=False, options=['--peer-timeout=3s', '--lost-timeout=1s']) as cluster:
        ranks = cluster.job((1, 1))
        tensor(ranks)
        cluster.daemons[2].signal(signal.SIGSTOP)
        for rank in ranks:
            submit(rank)
        for rank in ranks:
            names(rank.ended(0), 's0')
        cluster.daemons[2].signal(signal.SIGCONT)
        next_job_runs(cluster, (1, 1))


@full_tier('a hello-timeout of 2 s, which those that are well must meet')
def test_a_server_that_is_not_there_is_named():
    with Cluster(2, 1, colocated=False, options=['--hello-timeout=2s']) as cluster:
        cluster.daemons[2].stop()
        ranks = cluster.job((1, 1), join=False)
        for rank in ranks:
            rank.send('join', *(f'{k}={v}' for k, v in rank.keys.items()))
        for rank in ranks:
            expect(rank, 's0')
        cluster.restart(2)
        next_job_runs(cluster, (1, 1))


@full_tier('joins are given up after 1.5 s, and must have heard why by then')
def test_a_dead_coordinator_stops_new_jobs_only():
    with Cluster(2, 2, source='coordinator', colocated=False) as cluster:
        # The last daemon is the coordinator. A server too, so take its sums away first: the job has one server.
        ranks = cluster.job((2,))
        tensor(ranks)
        cluster.daemons[3].kill()
        for rank in ranks:
            submit(rank)
        for rank in ranks:
            rank.wait(0)
        late = cluster.job((1, 1), join=False, timeout_ms=TIMEOUT)
        for rank in late:
            rank.send('join', *(f'{k}={v}' for k, v in rank.keys.items()))
        for rank in late:
            expect(rank, 'coordinator')
        cluster.restart(3)
        next_job_runs(cluster, (1, 1), min_servers=2)


@full_tier('signs of life: who is silent for 3 s is lost')
def test_a_cut_link_is_noticed():
    prefix, network = netns(3)
    options = ['--peer-timeout=3s', '--lost-timeout=1s']
    with network as control, Cluster(2, 1, colocated=False, netns=prefix, options=options) as cluster:
        for breakage, repair in (('cut', 'join'), ('drop', 'pass')):
            ranks = cluster.job((1, 1))
            tensor(ranks)
            control(breakage, 2)
            for rank in ranks:
                submit(rank)
            for rank in ranks:
                names(rank.ended(0), 's0')
            control(repair, 2)
            next_job_runs(cluster, (1, 1))


def test_sigterm_lets_requests_finish():
    # Of a job that the next daemon process cannot go on with; those are left to it: test_restart.py.
    with Cluster(1, options=['--resume=off']) as cluster:
        ranks = cluster.job((2,), force_distributed=1)
        tensor(ranks)
        submit(ranks[0])
        cluster.daemons[0].signal(signal.SIGTERM)
        wait_for('draining', lambda: 'stop: asked' in cluster.daemons[0].text())
        submit(ranks[1])
        for rank in ranks:
            rank.wait(0)
        assert cluster.daemons[0].process.wait(DEADLINE) == 0


def test_sigterm_does_not_wait_for_ever():
    with Cluster(1, options=['--drain-timeout=200ms', '--resume=off']) as cluster:
        ranks = cluster.job((2,), force_distributed=1)
        tensor(ranks)
        submit(ranks[0])
        cluster.daemons[0].signal(signal.SIGTERM)
        assert ranks[0].ended(0).errno in (errno.ESHUTDOWN, errno.ECANCELED)
        assert cluster.daemons[0].process.wait(DEADLINE) == 0


run(globals())
