#!/usr/bin/env python3
"""The ranks of a node leave, and then servers are lost, restart, or come: who has not heard of it hears it from the others, and
waits for nobody who is gone."""
import contextlib, errno, os, signal, struct, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
import numpy_or_skip  # noqa: F401
from recovery import armed_cluster, each, HAS_FAILPOINTS, Keeper, says
from recovery import job as make

N, PART = 1500, 4096  # three parts
SERVER = 3


def job(cluster, layout=(1, 1, 1), **keys):
    ranks = make(cluster, layout, part_bytes=PART, **keys)
    for rank in ranks:
        rank.call('tensor', 0, 'x', INT64, N, seconds=2 * DEADLINE)
    return ranks


def push(ranks, request, op=PUSH_PULL, **keys):
    """Rank k contributes 10 ** k; the same number is each element of the result, which is returned."""
    for k, rank in enumerate(ranks):
        rank.submit(request, 0, struct.pack(f'<{N}q', *[10 ** k] * N), op=op, out=N, inplace=1, **keys)


def results(ranks, request, n=N):
    values = []
    for rank in ranks:
        rank.wait(request, 2 * DEADLINE * 1000)
        got = set(struct.unpack(f'<{n}q', rank.result(request)))
        assert len(got) == 1, sorted(got)[:8]
        values.append(got.pop())
        rank.call('free', request)
    return values


def leave(cluster, rank, others=(1, 2)):
    """Returns when the others' daemons have heard of it."""
    rank.call('leave')
    for i in others:
        says(cluster, i, f'node {rank.node} has left')


def without(ranks, request):
    """A round needs a rank that has left: it fails, in words, and not the job."""
    push(ranks, request)
    for rank in ranks:
        try:
            rank.wait(request, 2 * DEADLINE * 1000)
            raise AssertionError('there was a result')
        except BpsError as error:
            assert error.errno == errno.EPIPE and 'rank 0 has left the job' in error.text, error
        rank.call('free', request)


def over(cluster, ranks, server=SERVER):
    """They leave in their turn, and the server has heard of all."""
    each(ranks, 'leave')
    if not TSAN:
        wait_for('the job is over', lambda: not cluster.daemons[server].ctl('jobs')['jobs'])


def go_on(kind, ranks, request):
    """One round of those that are left. Only an elastic job can do without the one that has left."""
    if kind == 'elastic':
        push(ranks, request)
        assert results(ranks, request) == [11, 11]
    else:
        without(ranks, request)


KINDS = {'fixed': {}, 'quorum': {'quorum': 2}, 'elastic': {'elastic': 1}}


def begin(cluster, kind):
    """A job that has had one round: (the rank on node 0, those of the other nodes)."""
    gone, *others = ranks = job(cluster, **KINDS[kind])
    push(ranks, 0, **({'all': 1} if kind == 'quorum' else {}))
    assert results(ranks, 0) == [111] * 3
    return gone, others


@gate_tier
def test_a_server_restarts():
    """Alone; when the daemon of those who left has stopped; and when the others' daemons begin anew with it."""
    for kind in KINDS:
        for also in ([], [0], [1], [1, 2]) if kind == 'quorum' else ([], [0, 1]):
            with Cluster(3, 1, colocated=False) as cluster, Keeper(cluster) as keeper:
                gone, others = begin(cluster, kind)
                leave(cluster, gone)
                if 0 in also:
                    keeper.given_up.add(0)
                    cluster.daemons[0].kill()
                victims = [i for i in also if i] + [SERVER]
                for i in victims:
                    keeper.kill(i)
                keeper.expect(len(victims))
                for request in (1, 2):
                    go_on(kind, others, request)
                over(cluster, others)


@gate_tier
def test_a_server_takes_over_that_came_later():
    """The first node has left: another asks it in."""
    for kind in KINDS:
        with Cluster(3, 1, colocated=False) as cluster:
            gone, others = begin(cluster, kind)
            leave(cluster, gone)
            grown = cluster.grow()
            for i in (1, 2):
                says(cluster, i, 'goes on with 2 of 2 servers')
            cluster.daemons[SERVER].kill()
            for i in (1, 2):
                says(cluster, i, 'goes on with 1 of 2 servers')
            for request in (1, 2):
                go_on(kind, others, request)
            over(cluster, others, grown)


@gate_tier
def test_no_server_is_there_to_hear_it():
    """The rank need not wait for one; its agent does."""
    for kind in ('fixed', 'quorum'):
        with Cluster(3, 1, colocated=False) as cluster:
            gone, others = begin(cluster, kind)
            cluster.daemons[SERVER].kill()
            says(cluster, 0, 'was lost')
            gone.call('leave')
            says(cluster, 0, 'waiting for a server to tell it')
            cluster.restart(SERVER)
            for i in (1, 2):
                says(cluster, i, 'node 0 has left')
            go_on(kind, others, 1)
            over(cluster, others)


@gate_tier
def test_a_server_dies_as_it_hears_it():
    """Either of two; the other tells those that are left."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for victim in (SERVER, SERVER + 1):
        with armed_cluster((1, 1, 1), 2, {victim: ['server-node-left=kill']}, colocated=False) as cluster, \
                Keeper(cluster) as keeper:
            gone, others = begin(cluster, 'quorum')
            leave(cluster, gone)
            keeper.expect(1)
            go_on('quorum', others, 1)
            each(others, 'leave')


def test_what_accumulated_ends_at_once():
    """What the rank had contributed was nowhere but at the server."""
    with Cluster(3, 1, colocated=False) as cluster, Keeper(cluster) as keeper:
        gone, *others = ranks = job(cluster, **{'async': 1})
        push(ranks, 0, op=ACCUMULATE, all=1)
        assert results(ranks, 0) == [111] * 3
        leave(cluster, gone)
        keeper.kill(SERVER)
        keeper.expect(1)
        for rank in others:
            try:
                rank.submit(1, 0, struct.pack(f'<{N}q', *[1] * N), op=ACCUMULATE, out=N, inplace=1)
                rank.wait(1, 2 * DEADLINE * 1000)
                raise AssertionError('the job went on')
            except BpsError as error:
                # ENOTCONN: it was over before this rank submitted.
                assert error.errno in (errno.ECONNRESET, errno.ENOTCONN) and 'a rank has left' in error.text, error


HEADER = 96  # bytes, of a message between daemons
LARGE = 1 << 20  # elements: more than the kernels take of what is not read


@contextlib.contextmanager
def unread(*options):
    """Nodes 0 and 1 have summed, have their results and are told to stop, while node 2 is stopped and has read nothing."""
    with Cluster(3, options=(f'--peer-timeout={DEADLINE}s', *options), start=False) as cluster:
        cluster.roles = lambda i: 'agent' if i == 2 else 'agent,server'
        cluster.write_file()
        cluster.daemons = [cluster.start(i) for i in range(3)]
        servers, ranks = cluster.daemons[:2], make(cluster, (1, 1, 1), part_bytes=65536)
        for rank in ranks:
            rank.call('tensor', 0, 'x', INT64, LARGE, seconds=2 * DEADLINE)
        received = lambda: sum(int(server.ctl('status')['bytes_in']) for server in servers)
        before = received()
        give = lambda k: ranks[k].submit(0, 0, struct.pack('<q', 10 ** k) * LARGE, op=PUSH_PULL, out=LARGE, inplace=1)
        give(2)
        wait_for('all contributions of node 2', lambda: received() >= before + 8 * LARGE + 8 * LARGE // 65536 * HEADER)
        cluster.daemons[2].signal(signal.SIGSTOP)
        for k in 0, 1:
            give(k)
        for rank in ranks[:2]:
            rank.wait(0, DEADLINE * 1000)
        for rank in ranks[:2]:
            rank.call('leave')
        for server in servers:
            server.signal(signal.SIGTERM)
        for server in servers:
            wait_for('a word', lambda: not server.alive() or 'last results first' in server.text())
        yield cluster, ranks[2]


@gate_tier
def test_daemons_that_stop_let_others_have_their_last_results():
    for more in (), ('--resume=off',):
        with unread('--drain-timeout=60m', *more) as (cluster, rank):
            assert all(daemon.alive() for daemon in cluster.daemons)
            cluster.daemons[2].signal(signal.SIGCONT)
            assert results([rank], 0, LARGE) == [111]
            for server in cluster.daemons[:2]:
                wait_for('its end', lambda: not server.alive())


def test_a_daemon_that_stops_does_not_wait_for_who_has_nothing_under_way():
    with Cluster(2, options=['--drain-timeout=60m']) as cluster:
        ranks = job(cluster, (1, 1))
        push(ranks, 0)
        assert results(ranks, 0) == [11, 11]
        ranks[0].call('leave')
        cluster.daemons[0].signal(signal.SIGTERM)
        wait_for('its end', lambda: not cluster.daemons[0].alive())
        ranks[1].call('leave')


@full_tier('a drain-timeout of 300 ms, of which others must have been told')
def test_a_daemon_that_stops_waits_no_longer_than_it_was_told():
    for more in (), ('--resume=off',):
        with unread('--drain-timeout=300ms', *more) as (cluster, rank):
            for server in cluster.daemons[:2]:
                wait_for('its end', lambda: not server.alive())
                assert '1 nodes have not said within drain_timeout' in server.text(), server.text()
            cluster.daemons[2].signal(signal.SIGCONT)
            if more:  # else servers are waited for, as they may come back
                try:
                    rank.wait(0, 2 * DEADLINE * 1000)
                    raise AssertionError('there was a result')
                except BpsError as error:
                    assert error.errno == errno.ECONNRESET, error


if __name__ == '__main__':
    run(globals())
