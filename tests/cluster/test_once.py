#!/usr/bin/env python3
"""Promise 2: a repeated, late, early or foreign contribution never changes a sum. Nodes that are made here byte by byte
push to a real server and say what no agent would."""
import hashlib, os, re, struct, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from wire import *

N = 64


def view_facts(cluster):
    """(epoch, digest of the servers), as agents tell them: the epoch from the daemon's log, the digest by the rule of
    daemon/cluster/view.c."""
    value, mask = 0xcbf29ce484222325, (1 << 64) - 1
    for name, address in zip(cluster.names, cluster.addresses):
        for byte in f'{name}\0{address}\0'.encode():
            value = (value ^ byte) * 0x100000001b3 & mask
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9 & mask
    value = (value ^ value >> 27) * 0x94d049bb133111eb & mask
    return int(re.search(r'view (\d+) has', cluster.daemons[-1].text())[1]), value ^ value >> 31


def floats(*values):
    return struct.pack(f'<{len(values)}f', *values)


def data(value):
    return floats(*[value] * N)


class Node:
    """An agent by hand with one rank: joined, attached, with one tensor declared."""

    def __init__(self, cluster, node, n_nodes, job='once', instance=None, join=True, stragglers=None):
        self.peer = Peer(cluster.addresses[-1])
        self.epoch, self.digest = view_facts(cluster)
        self.node, self.n_nodes, self.name = node, n_nodes, job
        self.instance = instance or 1000 + node
        self.stragglers = {24: stragglers} if stragglers else {}  # of cluster.proto: 1 quorum, 3 async
        if join:
            self.join_cookie = self.join()

    def secret_digest(self):
        return hashlib.sha256(b'bps-job' + self.name.encode() + b'\0').digest()

    def join(self, **change):
        body = {1: self.name, 2: self.secret_digest(), 3: self.n_nodes,
                4: self.n_nodes, 5: self.node, 6: 1, 7: [self.node], 8: Fixed(self.instance), 9: self.epoch,
                10: Fixed(self.digest), 11: 10000, 12: 5000, 14: Fixed(self.peer.sender)}
        body.update(self.stragglers)
        body.update(change)
        return self.peer.post(D_JOIN, pack(body), epoch=self.epoch, node=self.node)

    def attach(self):
        header, payload = self.peer.answer(self.join_cookie)
        assert header['op'] == D_OK, (header, payload)
        self.job = unpack(payload)[1]
        body = {1: self.name, 2: self.n_nodes, 3: self.n_nodes, 4: self.node, 5: list(range(self.n_nodes)), 6: 5000,
                7: Fixed(self.instance), 20: self.secret_digest(), **self.stragglers}
        header, payload = self.peer.call(D_ATTACH, pack(body), job=self.job, epoch=self.epoch, node=self.node)
        assert header['op'] == D_OK, payload

    def declare(self, name='x'):
        cookie = self.peer.post(D_DECLARE, pack({1: name, 2: FLOAT32, 3: N, 4: self.node}), job=self.job, epoch=self.epoch,
                                node=self.node)
        return lambda: unpack(self.peer.answer(cookie)[1])[1]

    def push(self, payload, round=1, **change):
        fields = dict(job=self.job, key=self.key, round=round, epoch=self.epoch, node=self.node, block=0, part=0, dtype=FLOAT32,
                      operation=PUSH_PULL, reduction=SUM, offset=0, total=4 * N, part_len=4 * N)
        fields.update(change)
        return self.peer.post(D_PUSH, payload, **fields)

    def result(self, cookie):
        header, payload = self.peer.answer(cookie)
        assert header['op'] == D_RESULT, (header, payload)
        return payload

    def refused(self, cookie, number):
        header, payload = self.peer.answer(cookie)
        assert header['op'] == D_ERROR, (header, 'was accepted')
        assert header['status'] in (number if isinstance(number, tuple) else (number,)), (header, payload)
        assert payload, 'an error without words'
        return payload.decode()


def nodes(cluster, n, job='once', **more):
    made = [Node(cluster, k, n, job, **more) for k in range(n)]
    for node in made:
        node.attach()
    keys = [node.declare() for node in made]
    for node, key in zip(made, keys):
        node.key = key()
    assert len({node.key for node in made}) == 1
    return made


def complete(made, values, round):
    """A clean round, to show that the sums are right after what came before."""
    cookies = [node.push(data(v), round) for node, v in zip(made, values)]
    for node, cookie in zip(made, cookies):
        assert node.result(cookie) == data(sum(values)), f'round {round} is wrong'


def server():
    return Cluster(0, 1, source='static')


def test_a_clean_round():
    with server() as cluster:
        complete(nodes(cluster, 3), (1, 2, 4), 1)


def test_a_repeat_is_refused_while_the_round_is_open():
    with server() as cluster:
        a, b = made = nodes(cluster, 2)
        first = a.push(data(1))
        a.refused(a.push(data(100)), errno.EALREADY)
        second = b.push(data(2))
        assert a.result(first) == data(3) and b.result(second) == data(3)
        complete(made, (5, 6), 2)


def test_a_repeat_of_a_closed_round_is_stale():
    with server() as cluster:
        a, b = made = nodes(cluster, 2)
        complete(made, (1, 2), 1)
        a.refused(a.push(data(100), 1), errno.ESTALE)
        complete(made, (3, 4), 2)
        for late in (1, 2):
            b.refused(b.push(data(100), late), errno.ESTALE)
        complete(made, (5, 6), 3)


@full_tier('that nothing comes is seen for 0.3 s only')
def test_an_early_contribution_waits_for_its_round():
    with server() as cluster:
        a, b = nodes(cluster, 2)
        first = a.push(data(1), 1)
        early = a.push(data(10), 2)
        assert a.peer.silent()
        other = b.push(data(2), 1)
        assert a.result(first) == b.result(other) == data(3)
        other = b.push(data(20), 2)
        assert a.result(early) == b.result(other) == data(30)


def test_results_do_not_show_the_next_round_to_a_slow_reader():
    """Node a does not read its answers while b runs ahead by as far as it may."""
    with server() as cluster:
        a, b = nodes(cluster, 2)
        cookies = []
        for r in range(1, 51):
            cookies.append((a.push(data(r), r), b.push(data(2 * r), r)))
            assert b.result(cookies[-1][1]) == data(3 * r)
        for r in range(1, 51):
            assert a.result(cookies[r - 1][0]) == data(3 * r), f'round {r} is wrong'


def test_a_foreign_contribution_is_refused():
    with server() as cluster:
        a, b = made = nodes(cluster, 2)
        first = a.push(data(1))
        stranger = Node(cluster, 1, 2, join=False)
        stranger.key = a.key
        for job in (a.job, a.job + 1, 0, 2 ** 64 - 1):
            stranger.job = job
            stranger.refused(stranger.push(data(100)), (errno.EACCES, errno.EPROTO, errno.ENOENT, errno.ESTALE))
        # Node a speaks for b.
        a.refused(a.push(data(100), node=1), (errno.EACCES, errno.EPROTO))
        a.refused(a.push(data(100), node=7), (errno.EACCES, errno.EPROTO))
        second = b.push(data(2))
        assert a.result(first) == b.result(second) == data(3)
        complete(made, (5, 6), 2)


@full_tier('a deadline of 5 s that runs out, and must not before')
def test_an_undeclared_key_ends_by_itself():
    """Only the home server knows keys; a server that is not takes it, waits for the other node, and says who is missing."""
    with server() as cluster:
        a, b = made = nodes(cluster, 2)
        text = a.refused(a.push(data(100), key=a.key + 1), (errno.ENOENT, errno.EINVAL, errno.ETIMEDOUT))
        assert 'rank 1' in text, text
        complete(made, (1, 2), 1)


def test_a_stranger_cannot_attach():
    with server() as cluster:
        a, b = made = nodes(cluster, 2)
        stranger = Peer(cluster.addresses[-1])
        body = {1: 'once', 2: 2, 3: 2, 4: 1, 5: [0, 1], 6: 5000, 7: Fixed(77)}
        header, payload = stranger.call(D_ATTACH, pack(body), job=a.job, epoch=a.epoch, node=1)
        assert header['op'] == D_ERROR, 'took the place of node 1'
        complete(made, (1, 2), 1)


def test_contributions_that_do_not_fit_fail_the_round_for_all():
    changes = [dict(dtype=INT32), dict(reduction=MAX), dict(operation=BROADCAST, reduction=0, root=1),
               dict(total=8 * N), dict(part_len=2 * N, payload=data(1)[:2 * N])]
    for change in changes:
        with server() as cluster:
            a, b = made = nodes(cluster, 2)
            first = a.push(data(1))
            change = dict(change)
            payload = change.pop('payload', data(2))
            second = b.push(payload, **change)
            b.refused(second, (errno.EINVAL, errno.EPROTO))
            header, payload = a.peer.answer(first)
            assert header['op'] == D_ERROR and payload, change
            complete(made, (5, 6), 2)


def test_a_failed_round_stays_failed():
    with server() as cluster:
        a, b = made = nodes(cluster, 2)
        first = a.push(data(1))
        b.peer.notice(D_FAIL_ROUND, b'rank 1 cancelled it', job=b.job, key=b.key, round=1, epoch=b.epoch, node=1,
                      status=errno.ECANCELED)
        assert 'rank 1 cancelled it' in a.refused(first, errno.ECANCELED)
        a.refused(a.push(data(1)), (errno.ECANCELED, errno.ESTALE, errno.EALREADY))
        complete(made, (5, 6), 2)


def test_a_lost_node_ends_the_job_for_the_others():
    with server() as cluster:
        a, b = nodes(cluster, 2)
        first = a.push(data(1))
        b.peer.close()
        a.refused(first, (errno.ECONNRESET, errno.EPIPE))
        fresh = nodes(cluster, 2)
        complete(fresh, (1, 2), 1)


def test_a_node_that_comes_again_starts_the_job_anew():
    with server() as cluster:
        a, b = nodes(cluster, 2)
        old = a.push(data(1))
        again = Node(cluster, 1, 2, instance=555)
        header, payload = a.peer.answer(old)
        assert header['op'] == D_ERROR, header
        fresh = Node(cluster, 0, 2, instance=556)
        for node in (fresh, again):
            node.attach()
        assert fresh.job != a.job
        keys = [node.declare() for node in (fresh, again)]
        for node, key in zip((fresh, again), keys):
            node.key = key()
        b.refused(b.push(data(100)), (errno.EACCES, errno.EPROTO, errno.ENOENT, errno.ESTALE, errno.ECONNRESET))
        complete([fresh, again], (1, 2), 1)


def test_a_late_contribution_counts_once():
    with server() as cluster:
        a, b, late = made = nodes(cluster, 3, stragglers={1: 2})
        first, second = a.push(data(1), 1), b.push(data(2), 1)
        assert a.result(first) == b.result(second) == data(3)
        a.refused(a.push(data(100), 1), errno.ESTALE)
        assert late.result(late.push(data(4), 1)) == data(3)
        late.refused(late.push(data(100), 1), (errno.ESTALE, errno.EALREADY))
        first, second = a.push(data(10), 2), b.push(data(20), 2)
        assert a.result(first) == b.result(second) == data(34)
        # One that fails takes what was carried by nobody along.
        late.peer.notice(D_FAIL_ROUND, b'rank 2 cancelled it', job=late.job, key=late.key, round=2, epoch=late.epoch, node=2,
                         status=errno.ECANCELED)
        late.refused(late.push(data(100), 2), errno.ECANCELED)
        cookies = [node.push(data(v), 3, root=1) for node, v in zip(made, (1, 2, 4))]
        for node, cookie in zip(made, cookies):
            header, payload = node.peer.answer(cookie)
            assert header['op'] == D_RESULT and header['root'] == 3 and payload == data(7), (header, payload)


def test_nodes_that_disagree_whether_to_wait_for_all():
    with server() as cluster:
        a, b, c = nodes(cluster, 3, stragglers={1: 2})
        first = a.push(data(1), 1)
        text = b.refused(b.push(data(2), 1, root=1), errno.EINVAL)
        assert 'disagree' in text, text
        a.refused(first, errno.EINVAL)


@full_tier('that nothing comes is seen for 0.3 s only')
def test_what_is_accumulated_counts_once():
    with server() as cluster:
        a, b = nodes(cluster, 2, stragglers={3: 1})

        def push(node, value, round, **change):
            return node.push(data(value), round, operation=ACCUMULATE, **change)
        assert a.result(push(a, 1, 1)) == data(1)
        a.refused(push(a, 100, 1), errno.EALREADY)
        assert b.result(push(b, 2, 1)) == data(3)
        # Rounds may be left out: they had failed before anything was sent.
        assert b.result(push(b, 4, 5)) == data(7)
        b.refused(push(b, 100, 4), errno.EALREADY)
        waiting = push(b, 8, 6, root=1)
        assert b.peer.silent()
        b.peer.notice(D_FAIL_ROUND, b'its time was up', job=b.job, key=b.key, round=6, epoch=b.epoch, node=1,
                      status=errno.ETIMEDOUT, operation=ACCUMULATE)
        assert 'its time was up' in b.refused(waiting, errno.ETIMEDOUT)
        a.refused(push(a, 100, 2, total=8 * N), errno.EINVAL)
        assert a.result(push(a, 16, 2)) == data(31)


def test_accumulate_is_refused_where_it_was_not_asked_for():
    with server() as cluster:
        a, b = made = nodes(cluster, 2)
        assert 'async' in a.refused(a.push(data(1), operation=ACCUMULATE), errno.EINVAL)
        complete(made, (1, 2), 2)


run(globals())
