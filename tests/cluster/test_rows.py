#!/usr/bin/env python3
"""push_pull_rows: the same bits as the reference in every layout, however the rows are cut and wherever they are summed; what
does not fit together is refused with words; nothing is lost when one rank has too little room."""
import errno, hashlib, hmac, os, random, socket, struct, sys, threading
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
import wire
from numpy_or_skip import np
import reference as ref

SEED = 20261122
TABLE, WIDTH = 30011, 5  # rows; several groups of rows, so that every server has some


def cases():
    return [(d, r) for d in range(FLOAT64, BOOL + 1) for r in (SUM, AVERAGE, MIN, MAX) if not (d == BOOL and r == AVERAGE)]


def give(dtype, rank, n, salt=0, table=TABLE, width=WIDTH):
    """Any order, repeated rows within a rank and across ranks, some at both ends of the table."""
    rng = np.random.default_rng((SEED, dtype, rank, n, salt))
    hot = rng.integers(0, max(table // 50, 1), n)
    rows = np.where(rng.random(n) < 0.6, hot, rng.integers(0, table, n)).astype(np.int64)
    if n > 2:
        rows[0], rows[n - 1] = table - 1, 0
    return rows, ref.random(dtype, n * width, (SEED, dtype, rank, salt)).reshape(n, width)


def check(what, got, want):
    rows, values = np.frombuffer(got[0], np.int64), got[1]
    assert np.array_equal(rows, want[0]), f'{what}: {len(rows)} rows, not the {len(want[0])} of the reference'
    if values != want[1].tobytes():
        a, b = np.frombuffer(values, np.uint8), np.frombuffer(want[1].tobytes(), np.uint8)
        raise AssertionError(f'{what}: {len(a)} bytes, of the reference {len(b)}, differ at {np.flatnonzero(a != b)[:1]}')


def rows_all(ranks, layout, rng, wanted=None, sizes=(700, 0, 401, 90, 1, 333), salt=0, table=TABLE, width=WIDTH):
    wanted = wanted or cases()
    data = {(d, r): [give(d, k, sizes[(k + salt) % len(sizes)], salt, table, width) for k in range(len(ranks))]
            for d, r in wanted}
    data = {case: [(rows, ref.fitting(*case, values, 6)) for rows, values in given] for case, given in data.items()}
    for rank in ranks:
        for i, (dtype, _) in enumerate(wanted):
            rank.call('tensor', i, f'{salt}.{i}', dtype, table * width)
    posts = [(k, i) for k in range(len(ranks)) for i in range(len(wanted))]
    rng.shuffle(posts)
    room = sum(len(rows) for rows, _ in data[wanted[0]])
    for k, i in posts:
        rows, values = data[wanted[i]][k]
        ranks[k].submit_rows(i, i, rows.tobytes(), values.tobytes(), width, room + rng.randrange(3), red=wanted[i][1],
                             shared=rng.randrange(2), priority=rng.randrange(-5, 5))
    results = {}
    for i, (dtype, reduction) in enumerate(wanted):
        want = ref.reduce_rows(dtype, reduction, data[dtype, reduction], layout)
        for k, rank in enumerate(ranks):
            rank.wait(i)
            check(f'{ref.NAMES[dtype]} reduction {reduction} layout {layout} rank {k}', rank.result_rows(i), want)
            rank.call('free', i)
        results[dtype, reduction] = want[1].tobytes()
    return results


@gate_tier
def test_every_type_and_reduction_in_every_layout():
    rng = random.Random(SEED)
    with Cluster(4, 1) as cluster:
        for layout in [(1,), (4,), (2, 2), (1, 1, 1, 1), (2, 2, 2)]:
            ranks = cluster.job(layout, part_bytes=4096)
            rows_all(ranks, layout, rng)
            for rank in ranks:
                rank.call('close')


@gate_tier
def test_servers_lanes_and_transport_do_not_matter():
    rng = random.Random(SEED + 1)
    some = [(FLOAT32, SUM), (BFLOAT16, AVERAGE), (FLOAT16, AVERAGE), (INT32, AVERAGE), (FLOAT64, MAX)]
    got = []
    for n_spare, colocated, lanes, threads in [(1, False, 1, 0), (2, False, 4, 2), (5, False, 1, 0), (2, True, 4, 2)]:
        options = [f'--lanes={lanes}'] + ([f'--data-threads={threads}'] if threads else [])
        with Cluster(2, n_spare, colocated=colocated, options=options) as cluster:
            for part_bytes in (4096, 1 << 20):
                ranks = cluster.job((2, 2), part_bytes=part_bytes)
                got.append(rows_all(ranks, (2, 2), rng, some))
                for rank in ranks:
                    rank.call('close')
    assert all(one == got[0] for one in got)


@gate_tier
def test_in_process_server_gives_the_same_as_none():
    rng = random.Random(SEED + 2)
    with Cluster(1) as cluster:
        alone = rows_all(cluster.job((4,)), (4,), rng)
        inside = rows_all(cluster.job((4,), force_distributed=1, part_bytes=4096), (4,), rng)
    with Cluster(1, 1, colocated=False) as cluster:
        over_tcp = rows_all(cluster.job((4,), force_distributed=1, part_bytes=4096), (4,), rng)
    assert alone == inside == over_tcp


def test_sums_in_the_pool_and_at_once_are_the_same():
    rng = random.Random(SEED + 3)
    some = [(FLOAT32, SUM), (BFLOAT16, AVERAGE)]
    got = []
    for size in ('0', '1G'):
        with Cluster(2, options=['--inline-size=' + size]) as cluster:
            got.append(rows_all(cluster.job((2, 1), part_bytes=4096), (2, 1), rng, some))
    assert got[0] == got[1]


def test_rows_wider_than_a_part():
    rng = random.Random(SEED + 4)
    with Cluster(2, 2, colocated=False) as cluster:
        ranks = cluster.job((2, 1), part_bytes=4096)
        for salt, width in enumerate((1, 1014, 1015, 1016, 5000)):
            rows_all(ranks, (2, 1), rng, [(FLOAT32, SUM), (INT8, MIN)], sizes=(40, 33, 7), salt=salt, table=101, width=width)


@gate_tier
def test_more_pieces_than_may_be_under_way():
    """Each node has more than 256 pieces for one server, and so has the result."""
    rng = random.Random(SEED + 5)
    with Cluster(2, 1, colocated=False) as cluster:
        ranks = cluster.job((1, 1), part_bytes=4096)
        rows_all(ranks, (1, 1), rng, [(FLOAT32, SUM)], sizes=(6000, 5000), width=100)


def test_nothing_and_everything():
    with Cluster(2, 1) as cluster:
        for layout in [(1,), (2,), (1, 1)]:
            ranks = cluster.job(layout)
            every = np.arange(50, dtype=np.int64)
            for n, rows in enumerate((every[:0], every)):
                values = [ref.random(FLOAT32, len(rows) * 3, (SEED, n, k)).reshape(-1, 3) for k in range(len(ranks))]
                want = ref.reduce_rows(FLOAT32, SUM, [(rows, v) for v in values], layout)
                for k, rank in enumerate(ranks):
                    rank.call('tensor', n, f'n{n}', FLOAT32, 150)
                    rank.submit_rows(n, n, rows.tobytes(), values[k].tobytes(), 3, 50)
                for rank in ranks:
                    rank.wait(n)
                    check('nothing or everything', rank.result_rows(n), want)


def test_a_table_without_rows():
    with Cluster(2) as cluster:
        ranks = cluster.job((1, 1))
        for rank in ranks:
            rank.call('tensor', 0, 'empty', FLOAT32, 0)
            rank.submit_rows(0, 0, b'', b'', 4, 0)
        for rank in ranks:
            rank.wait(0)
            assert rank.result_rows(0) == (b'', b'')


def test_too_little_room_fails_where_it_is_and_says_how_much_it_takes():
    with Cluster(2, 1, colocated=False) as cluster:
        for layout in [(3,), (2, 1)]:
            ranks = cluster.job(layout, part_bytes=4096)
            data = [give(FLOAT32, k, 900) for k in range(3)]
            want = ref.reduce_rows(FLOAT32, SUM, data, layout)
            needed = len(want[0])
            for round, rooms in enumerate([(needed - 1, needed, needed + 9), (0, 1, needed - 1), (needed,) * 3]):
                for k, rank in enumerate(ranks):
                    rank.call('tensor', 0, 'x', FLOAT32, TABLE * WIDTH)
                    rank.submit_rows(0, 0, data[k][0].tobytes(), data[k][1].tobytes(), WIDTH, rooms[k], shared=k % 2)
                for k, rank in enumerate(ranks):
                    if rooms[k] < needed:
                        error = rank.ended(0)
                        assert error.errno == errno.ENOSPC, error
                        assert f'{needed} rows' in error.text and f'room for {rooms[k]}' in error.text, error
                        assert int(rank.call('rows', 0, '/dev/null')) == needed
                    else:
                        rank.wait(0)
                        check(f'round {round} rank {k}', rank.result_rows(0), want)
                    rank.call('free', 0)


def test_too_little_room_often():
    """A server keeps a long result for a node until it has come for it: also for one that has no room for it."""
    with Cluster(2, 1, colocated=False, options=['--job-quota=1M']) as cluster:
        ranks = cluster.job((1, 1), part_bytes=4096)
        data = [give(FLOAT32, k, 900) for k in range(2)]
        want = ref.reduce_rows(FLOAT32, SUM, data, (1, 1))
        for rank in ranks:
            rank.call('tensor', 0, 'x', FLOAT32, TABLE * WIDTH)
        for room in [(0, 1), (5, len(want[0]))] * 40 + [(len(want[0]),) * 2]:
            for k, rank in enumerate(ranks):
                rank.submit_rows(0, 0, data[k][0].tobytes(), data[k][1].tobytes(), WIDTH, room[k])
            for k, rank in enumerate(ranks):
                if room[k] < len(want[0]):
                    assert rank.ended(0).errno == errno.ENOSPC
                else:
                    rank.wait(0)
                    check(f'rank {k}', rank.result_rows(0), want)
                rank.call('free', 0)


def test_dense_and_by_rows_on_one_tensor():
    with Cluster(2, 1) as cluster:
        ranks = cluster.job((1, 1), part_bytes=4096)
        dense = [ref.random(FLOAT32, 4000, (SEED, k)) for k in range(2)]
        data = [give(FLOAT32, k, 300, table=1000, width=4) for k in range(2)]
        for k, rank in enumerate(ranks):
            rank.call('tensor', 0, 'x', FLOAT32, 4000)
            rank.submit(0, 0, dense[k].tobytes(), out=4000)
            rank.submit_rows(1, 0, data[k][0].tobytes(), data[k][1].tobytes(), 4, 1000, red=AVERAGE)
            rank.submit(2, 0, dense[k].tobytes(), out=4000)
        for rank in ranks:
            for request in range(3):
                rank.wait(request)
            assert rank.result(0) == rank.result(2) == ref.reduce(FLOAT32, SUM, dense, (1, 1)).tobytes()
            check('between', rank.result_rows(1), ref.reduce_rows(FLOAT32, AVERAGE, data, (1, 1)))


@gate_tier
def test_many_rounds_of_free_running_ranks():
    layout, rounds = (1, 1, 1), 40
    rng = random.Random(SEED + 6)
    with Cluster(3, 1) as cluster:
        ranks = cluster.job(layout, part_bytes=4096)
        for rank in ranks:
            rank.call('tensor', 0, 'x', FLOAT32, TABLE * WIDTH)
        data = [[give(FLOAT32, k, 50 + 200 * ((k + r) % 5), r) for k in range(3)] for r in range(rounds)]
        ahead, done = [0] * 3, [0] * 3
        while min(done) < rounds:
            k = rng.choice([k for k in range(3) if done[k] < rounds])
            if ahead[k] < rounds and ahead[k] <= min(ahead) + 3:
                rows, values = data[ahead[k]][k]
                ranks[k].submit_rows(ahead[k], 0, rows.tobytes(), values.tobytes(), WIDTH, 3000)
                ahead[k] += 1
            elif done[k] < min(ahead):
                r = done[k]
                ranks[k].wait(r)
                check(f'round {r} rank {k}', ranks[k].result_rows(r), ref.reduce_rows(FLOAT32, SUM, data[r], layout))
                ranks[k].call('free', r)
                done[k] += 1


def disagree(cluster, layout, submit, *words, number=errno.EINVAL):
    """All ranks' requests end with an error that says all the words; the next round is as if nothing had been."""
    ranks = cluster.job(layout, part_bytes=4096)
    for rank in ranks:
        rank.call('tensor', 0, 'x', FLOAT32, 1200)
    for k, rank in enumerate(ranks):
        submit(k, rank)
    for rank in ranks:
        error = rank.ended(0)
        assert error.errno == number and all(word in error.text for word in words), error
        rank.call('free', 0)
    one = np.array([5], np.int64)
    for k, rank in enumerate(ranks):
        rank.submit_rows(0, 0, one.tobytes(), np.full(4, k + 1, np.float32).tobytes(), 4, 9)
    for rank in ranks:
        rank.wait(0)
        check('afterwards', rank.result_rows(0), (one, np.full(4, sum(range(len(ranks) + 1)), np.float32)))
        rank.call('close')


def test_ranks_that_disagree():
    one, two = np.array([5], np.int64).tobytes(), np.array([5, 300], np.int64).tobytes()
    floats = lambda n: np.ones(n, np.float32).tobytes()
    with Cluster(2, 1, colocated=False) as cluster:
        for layout in [(2,), (1, 1)]:
            disagree(cluster, layout, lambda k, rank: rank.submit_rows(0, 0, one, floats(4 + 2 * k), 4 + 2 * k, 9), 'rows of')
            disagree(cluster, layout, lambda k, rank: rank.submit_rows(0, 0, two, floats(8), 4, 9) if k else
                     rank.submit_rows(0, 0, one, floats(4), 4, 9), 'rank 1', 'row 300 of a table of 300')
            disagree(cluster, layout, lambda k, rank: rank.submit_rows(0, 0, np.array([-1 - k]).tobytes(), floats(4), 4, 9),
                     'of a table of 300')
            disagree(cluster, layout, lambda k, rank: rank.submit_rows(0, 0, one, floats(4), 4, 9) if k else
                     rank.submit(0, 0, floats(1200), out=1200), 'push_pull', 'push_pull_rows')
            disagree(cluster, layout, lambda k, rank: rank.submit_rows(0, 0, one, floats(4), 4, 9, red=SUM + k), 'sum',
                     'average')


@full_tier('a deadline of 700 ms that something good must meet')
def test_a_missing_rank_is_named():
    with Cluster(2, 1, colocated=False) as cluster:
        for layout in [(2,), (1, 1)]:
            ranks = cluster.job(layout, request_timeout_ms=700)
            for rank in ranks:
                rank.call('tensor', 0, 'x', FLOAT32, 400)
            ranks[0].submit_rows(0, 0, np.array([7]).tobytes(), bytes(16), 4, 9)
            error = ranks[0].ended(0)
            assert error.errno == errno.ETIME and 'rank 1' in error.text, error
            for rank in ranks:
                rank.call('close')


def test_a_trainer_that_dies_in_the_middle():
    with Cluster(2, 1, colocated=False) as cluster:
        ranks = cluster.job((2, 1), part_bytes=4096)
        for rank in ranks:
            rank.call('tensor', 0, 'x', FLOAT32, TABLE * 100)
        for k in (0, 2):
            rows, values = give(FLOAT32, k, 3000, width=100)
            ranks[k].submit_rows(0, 0, rows.tobytes(), values.tobytes(), 100, TABLE)
        ranks[1].kill()
        for k in (0, 2):
            assert 'rank 1' in ranks[k].ended(0).text


class Server(threading.Thread):
    """A server by hand, of jobs on one node. answer(header, payload) gives what a PUSH or PULL is answered with: fields of
    the header, and a payload."""

    def __init__(self, address, answer):
        super().__init__(daemon=True)
        host, port = address.rsplit(':', 1)
        self.listener = socket.create_server((host, int(port)))
        self.answer = answer
        self.start()

    def run(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        peer = wire.Peer.__new__(wire.Peer)
        peer.socket, peer.sender, peer.answers, peer.notices, peer.features = connection, 7, {}, [], 0
        theirs = peer.exactly(wire.HELLO_BYTES.size)
        bare = peer.hello('s0')
        proof = hmac.digest(b'', b'bps-server' + theirs + bare, hashlib.sha256)
        connection.sendall(bare[:-32] + proof)
        peer.exactly(32)
        say = {wire.D_JOIN: wire.pack({1: 99, 2: [0], 3: 4096, 4: [0], 5: 60000}), wire.D_ATTACH: b'',
               wire.D_DECLARE: wire.pack({1: 1, 2: 0})}
        try:
            while True:
                asked, payload = peer.receive()
                if asked['op'] in say:
                    fields, payload = dict(op=wire.D_OK), say[asked['op']]
                elif asked['cookie']:
                    fields, payload = self.answer(asked, payload)
                    fields = {'op': wire.D_RESULT, 'part': 0, 'part_len': len(payload), 'total': len(payload), **fields}
                else:
                    continue
                connection.sendall(peer.header(**{**asked, 'len': len(payload), **fields}) + payload)
        except (OSError, ConnectionResetError):
            pass


def test_a_server_that_answers_wildly():
    """What a server says is looked at like what a trainer says: the job fails and names it, the daemon goes on."""
    def piece(rows=(5, 7), n=None, table=3000, width=4, step=300, length=None):
        head = struct.pack('<QQIIQ', table, len(rows) if n is None else n, width, step, 0)
        return (head + struct.pack(f'<{len(rows)}q', *rows) + bytes(16 * len(rows)))[:length]

    def in_two(second):
        """A result of 301 rows: the first piece is good."""
        return lambda asked: ({}, piece(range(300), 301)) if asked['op'] == wire.D_PUSH else second

    wild = [({}, b''), ({}, piece(length=31)), ({}, piece(length=-4)), ({}, piece((7, 5))), ({}, piece((5, 5))),
            ({}, piece((-1, 5))), ({}, piece((5, 3000))), ({}, piece((1 << 62,))), ({}, piece(n=3)), ({}, piece(n=3001)),
            ({}, piece(table=2999)), ({}, piece(width=3)), ({}, piece(step=1)), (dict(dtype=INT32), piece()),
            (dict(part=1), piece()), (dict(op=wire.D_OK), b''), in_two(({}, piece((300,), 301))), in_two((dict(part=1), b'')),
            in_two((dict(part=1), piece((299,), 301))), in_two((dict(part=1), piece((300,), 302, step=301))),
            in_two((dict(part=1), piece(range(300, 450), 301, step=151))), in_two((dict(part=1), piece((300, 301), 301, step=299)))]
    good = [({}, piece()), ({}, piece(())), in_two((dict(part=1), piece((2999,), 301)))]
    with Cluster(1, 1, colocated=False, start=False) as cluster:
        cluster.daemons = [cluster.start(0, options=['--transport=auto'])]  # also where the rest is RDMA
        now = [None]
        server = Server(cluster.addresses[1], lambda asked, payload: now[0](asked) if callable(now[0]) else now[0])
        for n, said in enumerate(good + wild):
            now[0] = said
            rank, = cluster.job((1,), force_distributed=1)
            rank.call('tensor', 0, 'x', FLOAT32, 3000 * 4)
            rank.submit_rows(0, 0, struct.pack('<q', 5), bytes(16), 4, 3000)
            if n < len(good):
                rank.wait(0)
                assert rank.call('rows', 0, '/dev/null') == ('2', '0', '301')[n]
            else:
                error = rank.ended(0)
                assert error.errno in (errno.EPROTO, errno.ECONNRESET), (n - len(good), error)
                assert 'answered' in error.text or 'protocol error' in error.text, (n - len(good), error)
            rank.call('close')
            assert cluster.daemons[0].alive()
        server.listener.close()


@gate_tier
def test_bytes_on_the_wire_follow_the_rows():
    """1 % of the rows of a table, against all of it."""
    table, width = 20000, 64
    with Cluster(2, 1, colocated=False) as cluster:
        ranks = cluster.job((1, 1))
        server = cluster.daemons[-1]
        sent = lambda: sum(int(server.ctl('status')[key]) for key in ('bytes_in', 'bytes_out'))
        used = []
        for request, n in ((0, 200), (1, None)):
            before = sent()
            for k, rank in enumerate(ranks):
                rank.call('tensor', 0, 'x', FLOAT32, table * width)
                if n is None:
                    rank.submit(request, 0, bytes(table * width * 4), out=table * width)
                else:
                    rows = np.arange(n, dtype=np.int64) * 97 % table
                    rank.submit_rows(request, 0, rows.tobytes(), bytes(n * width * 4), width, table)
            for rank in ranks:
                rank.wait(request)
            used.append(sent() - before)
        print(f'     {used[0]} bytes through the server by rows, {used[1]} dense')
        assert 0 < used[0] < used[1] / 50, used


run(globals())
