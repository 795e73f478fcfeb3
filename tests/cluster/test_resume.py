#!/usr/bin/env python3
"""Resume spoken by hand: what ranks say of rounds that had ended, and ledgers that are none, are damaged, or lie."""
import mmap, os, random, struct, sys
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
from wire import *

SEED = 20261121
N = 16384 * 3  # float32 elements: three parts of two pieces
PART = 65536
PIECE, PROCESSES, RECORDS, RECORD, HAND = 32768, 4096, 4096 + 16384 * 16, 384, 64
HANDS = RECORDS + 4096 * RECORD
HEADER = struct.Struct('<IIQQIIIIIIQ')
REC = struct.Struct('<IBBBBIIQQQQQ8Q256s')


class Rank(Session):
    """One of the ranks of a job that can be resumed; its memory outlives its sessions."""

    def __init__(self, path, job, rank, size, memory=None):
        super().__init__(path, hello=False, timeout=DEADLINE)
        fields = self.hello(features=FEATURE_RESUME)
        assert unpack(fields[4])[2] & FEATURE_RESUME, 'the daemon does not offer Resume'
        self.name, self.rank, self.size = job, rank, size
        self.memory_fd = memory if memory is not None else memfd(N * 4)
        status, text, _ = self.share(self.memory_fd, N * 4)
        assert status == 0, text
        self.data = mmap.mmap(self.memory_fd, N * 4)

    def body(self):
        return {1: self.name, 3: self.rank, 4: self.size, 5: self.rank, 6: self.size, 7: 0, 8: 1, 9: DEADLINE * 1000,
                13: PART}

    def values(self):
        return struct.unpack(f'<{N}f', self.data[:])

    def fill(self, value):
        self.data[:] = struct.pack('<f', value) * N

    def post_resume(self, number, ledger):
        return self.post_request(RESUME, {1: self.body(), 2: number}, [ledger] if ledger is not None else [])

    def say(self, rounds=0, failed=0, tensor=1, name='x'):
        body = {1: tensor, 2: name, 3: FLOAT32, 4: N}
        if rounds:
            body[5], body[6] = rounds, Fixed(failed)
        return self.post_request(DECLARE, body)

    def submit(self, round, slot=None):
        slot = round if slot is None else slot
        self.post(self.entry(ticket=round, round=round, slot=slot, input_count=N, output_count=N, timeout_ms=DEADLINE * 1000),
                  slot=slot, ticket=round)

    def close(self):
        self.data.close()
        super().close()


def joined(daemon, size=2, name='resumed'):
    """A job, and what it is known by: (ranks, number, ledger)."""
    ranks = [Rank(daemon.socket, name, k, size) for k in range(size)]
    requests = [rank.post_request(JOIN, rank.body()) for rank in ranks]
    fds = []
    for rank, request in zip(ranks, requests):
        status, text, fields = rank.answer(request, fds)
        assert status == 0, text
        number = unpack(fields[5])[1]
    assert len(fds) == size, 'not every rank was given the ledger'
    ledger = os.open(f'/proc/self/fd/{fds[0]}', os.O_RDWR)  # as the daemon's user may
    for fd in fds:
        try:
            os.pwrite(fd, b'x', 0)
            raise AssertionError('a trainer can write the ledger')
        except OSError as error:
            assert error.errno == errno.EBADF, error
        os.close(fd)
    return ranks, number, ledger


def come_back(daemon, ranks, number, ledger, sizes=None):
    """New sessions of the same ranks, with Resume answered well."""
    again = [Rank(daemon.socket, rank.name, rank.rank, rank.size, rank.memory_fd) for rank in ranks]
    requests = [rank.post_resume(number, ledger) for rank in again]
    for rank, request in zip(again, requests):
        status, text, fields = rank.answer(request)
        assert status == 0, text
        assert unpack(fields[5])[1] == number
    return again


def lose(cluster, ranks):
    cluster.daemons[0].kill()
    for rank in ranks:
        rank.close()
    cluster.restart(0)
    return cluster.daemons[0]


def done(cluster, ranks, ledger):
    for rank in ranks:
        rank.close()
        os.close(rank.memory_fd)
    os.close(ledger)


def test_a_round_that_one_rank_saw_end_well_is_done():
    with Cluster(1) as cluster:
        ranks, number, ledger = joined(cluster.daemons[0], 3)
        daemon = lose(cluster, ranks)
        ranks = come_back(daemon, ranks, number, ledger)
        for rank in ranks:
            rank.fill(rank.rank + 1)
        # Rank 2 submits before anybody has told of the round, rank 1 after.
        ranks[2].say()
        ranks[2].submit(1)
        ranks[0].say(rounds=1)
        ranks[1].say()
        ranks[1].submit(1)
        for rank in ranks[1:]:
            assert rank.completion(1, DEADLINE) == (0, ''), 'not told of the good end'
        assert [rank.values()[N - 1] for rank in ranks] == [1, 2, 3], 'it was done again'
        for rank in ranks:
            rank.submit(2)
        for rank in ranks:
            assert rank.completion(2, DEADLINE) == (0, '')
            assert set(rank.values()) == {6.0}
        done(cluster, ranks, ledger)


def test_who_alone_knows_of_a_good_end_does_not_leave_before_it_is_told():
    """Rank 0 has seen round 1 end, and leaves. The daemon dies again: would the next know?"""
    with Cluster(1) as cluster:
        ranks, number, ledger = joined(cluster.daemons[0])
        daemon = lose(cluster, ranks)
        ranks = come_back(daemon, ranks, number, ledger)
        ranks[0].say(rounds=1)
        leave = ranks[0].post_request(LEAVE, {})
        # Behind it on the same channel: when this is answered, the daemon has read Leave.
        behind = ranks[0].post_request(UNSHARE, {1: 77})
        while (answered := ranks[0].receive()[0][1]) != behind:
            assert answered != leave, 'left, though rank 1 has not been told'
        ranks[1].say()
        ranks[1].submit(1)
        assert ranks[1].completion(1, DEADLINE) == (0, '')
        assert ranks[0].answer(leave)[0] == 0
        done(cluster, ranks, ledger)


def test_a_round_that_one_rank_saw_fail_fails():
    """Of 70 that had ended on rank 0, the newest and the 64th newest failed; older ones count as failed."""
    with Cluster(1) as cluster:
        ranks, number, ledger = joined(cluster.daemons[0])
        daemon = lose(cluster, ranks)
        ranks = come_back(daemon, ranks, number, ledger)
        ranks[0].say(rounds=70, failed=1 | 1 << 63)
        ranks[1].say()
        for round in range(1, 71):
            ranks[1].submit(round)
        for round in range(1, 71):
            status, text = ranks[1].completion(round, DEADLINE)
            if 8 <= round <= 69:
                assert status == 0, (round, text)
            else:
                assert status == -errno.ECONNRESET and f'round {round}:' in text, (round, status, text)
        done(cluster, ranks, ledger)


def test_a_round_that_one_rank_leaves_out_had_failed():
    with Cluster(1) as cluster:
        ranks, number, ledger = joined(cluster.daemons[0])
        daemon = lose(cluster, ranks)
        ranks = come_back(daemon, ranks, number, ledger)
        for rank in ranks:
            rank.fill(1)
            rank.say()
        for round in (1, 3):
            ranks[0].submit(round)
        for round in (1, 2, 3):
            ranks[1].submit(round)
        assert ranks[0].completion(1, DEADLINE) == ranks[1].completion(1, DEADLINE) == (0, '')
        status, text = ranks[1].completion(2, DEADLINE)
        assert status == -errno.ECONNRESET and 'rank 0' in text, text
        assert ranks[0].completion(3, DEADLINE) == ranks[1].completion(3, DEADLINE) == (0, '')
        assert set(ranks[0].values()) == {4.0}
        done(cluster, ranks, ledger)


def test_what_cannot_be_resumed_is_told_why():
    with Cluster(1) as cluster:
        ranks, number, ledger = joined(cluster.daemons[0])
        status, text, _ = ranks[0].answer(ranks[0].post_resume(number, ledger))
        assert status == -errno.EISCONN, text
        daemon = lose(cluster, ranks)
        again = [Rank(daemon.socket, 'resumed', k, 2, ranks[k].memory_fd) for k in range(2)]
        other = memfd(os.fstat(ledger).st_size)

        def refused(rank, status, *words, number=number, ledger=ledger):
            got, text, _ = rank.answer(rank.post_resume(number, ledger))
            assert got == -status and all(word in text for word in words), (got, text)
        refused(again[0], errno.EPROTO, 'no ledger', ledger=None)
        refused(again[0], errno.EPROTO, 'no ledger', ledger=other)
        refused(again[0], errno.EPROTO, 'no ledger', ledger=again[0].memory_fd)
        refused(again[0], errno.EPROTO, 'no ledger', ledger=os.open('/dev/null', os.O_RDWR))
        refused(again[0], errno.EPROTO, f'{number:016x}', number=number + 1)
        with mmap.mmap(ledger, 4096) as header:
            version, = struct.unpack('<I', header[4:8])
            header[4:8] = struct.pack('<I', version + 1)
            refused(again[0], errno.ESTALE, f'version {version + 1}', f'version {version}')
            header[4:8] = struct.pack('<I', version)
        without = Session(daemon.socket)
        status, text, _ = without.request(RESUME, {1: again[0].body(), 2: number}, [ledger])
        assert status == -errno.EPROTO, text
        without.close()
        # One is back; the other brings another ledger, or other facts, or begins anew.
        waiting = again[0].post_resume(number, ledger)
        wait_for('rank 0 is back', lambda: 'is the first to come back' in daemon.text())
        os.pwrite(other, os.pread(ledger, 4096, 0), 0)
        refused(again[1], errno.EPROTO, 'another ledger', ledger=other)
        again[1].size = 3
        refused(again[1], errno.EINVAL)
        again[1].size = 2
        again[1].rank = 0
        refused(again[1], errno.EEXIST, 'rank 0')
        again[1].rank = 1
        status, text, _ = again[1].answer(again[1].post_resume(number, ledger))
        assert status == 0, text
        status, text, _ = again[0].answer(waiting)
        assert status == 0, text
        done(cluster, again, ledger)
        os.close(other)


def test_a_past_without_a_run_is_refused():
    with Cluster(1) as cluster:
        ranks, number, ledger = joined(cluster.daemons[0])
        status, text, _ = ranks[0].answer(ranks[0].say(rounds=3))
        assert status == -errno.EPROTO and '3 rounds' in text, text
        done(cluster, ranks, ledger)


def test_a_rank_without_a_past_joins_only_what_has_not_begun():
    for begun in (0, 1):
        with Cluster(1) as cluster:
            ranks, number, ledger = joined(cluster.daemons[0])
            if begun:
                for rank in ranks:
                    rank.say()
                    rank.submit(1)
                for rank in ranks:
                    assert rank.completion(1, DEADLINE) == (0, '')
            daemon = lose(cluster, ranks)
            again = [Rank(daemon.socket, 'resumed', k, 2, ranks[k].memory_fd) for k in range(2)]
            waiting = again[0].post_resume(number, ledger)
            wait_for('rank 0 is back', lambda: 'is the first to come back' in daemon.text())
            if not TSAN:
                assert [j['state'] for j in daemon.ctl('jobs')['jobs']] == ['resuming']
            fds = []
            status, text, fields = again[1].answer(again[1].post_request(JOIN, again[1].body()), fds)
            if begun:
                assert status == -errno.EEXIST and 'cannot begin anew' in text, text
            else:
                assert status == 0 and unpack(fields[5])[1] == number and len(fds) == 1, (status, text)
                assert again[0].answer(waiting)[0] == 0
            for fd in fds:
                os.close(fd)
            done(cluster, again, ledger)


def write_middle(ledger, memory):
    """As a daemon leaves it that is killed when a piece of part 1 is half copied: part 0 is done, of part 1 the first piece
    too, the second is in the scratch, and rank 0 has it already."""
    size = os.fstat(ledger).st_size
    with mmap.mmap(ledger, size) as m:
        n_hands = HEADER.unpack_from(m)[7]
        scratch = (HANDS + n_hands * HAND + 4095) // 4096 * 4096
        REC.pack_into(m, RECORDS, 1, FLOAT32, PUSH_PULL, SUM, 0, 0, 0, 1, N, 0, 0, 0, 1, *[0] * 7, b'x')
        struct.pack_into('<IIQQ', m, HANDS, 1, 0, 1, PIECE | PIECE << 32)
        m[scratch:scratch + PIECE] = struct.pack('<f', 3.0) * (PIECE // 4)
        m[44:48] = struct.pack('<I', 1)
    one, two, three = (struct.pack('<f', v) for v in (1.0, 2.0, 3.0))
    for k, own in enumerate((one, two)):
        data = three * ((PART + PIECE) // 4) + (three if k == 0 else own) * (PIECE // 4) + own * (PART // 4)
        os.pwrite(memory[k], data, 0)


def test_a_ledger_from_the_middle_is_continued():
    with Cluster(1) as cluster:
        ranks, number, ledger = joined(cluster.daemons[0])
        daemon = lose(cluster, ranks)
        write_middle(ledger, [rank.memory_fd for rank in ranks])
        ranks = come_back(daemon, ranks, number, ledger)
        for rank in ranks:
            rank.say()
            rank.submit(1)
        for rank in ranks:
            assert rank.completion(1, DEADLINE) == (0, '')
            assert set(rank.values()) == {3.0}, 'summed twice, or not at all'
        done(cluster, ranks, ledger)


def attempt(daemon, memory, number, ledger, fds):
    """Two ranks come back with a ledger that may say anything: each must be answered, each request end. Returns how.
    fds: of the daemon without sessions."""
    ranks = [Rank(daemon.socket, 'resumed', k, 2, memory[k]) for k in range(2)]
    answers = []
    for rank, request in [(rank, rank.post_resume(number, ledger)) for rank in ranks]:
        status, text, _ = rank.answer(request)
        assert status is not None and (not status or text), (status, text)
        answers.append(status)
    if not any(answers):
        for rank in ranks:
            rank.say()
            rank.submit(1)
        for rank in ranks:
            status, text = rank.completion(1, DEADLINE)
            assert not status or text
            answers.append(status)
    for rank in ranks:
        rank.close()
    wait_for('the sessions are gone', lambda: daemon.fds() <= fds + 1)  # the ledger is kept here: so the daemon has it, too
    return tuple(answers)


@full_tier('hundreds of attempts, of which some wait until 3 s are over')
def test_a_ledger_with_any_field_wrong():
    """Every byte of the header, of a record and of a journal turned over, and bits at random: a clear error, or a result of
    its own job; never a crash, never a wait without end."""
    rng = random.Random(SEED)
    with Cluster(1, options=['--resume-timeout=3s']) as cluster:
        daemon = cluster.daemons[0]
        fds = daemon.fds()
        ranks, number, ledger = joined(daemon)
        memory = [rank.memory_fd for rank in ranks]
        for rank in ranks:
            rank.request(LEAVE, {})
            rank.close()
        write_middle(ledger, memory)
        with mmap.mmap(ledger, os.fstat(ledger).st_size) as m:
            m[HEADER.size:HEADER.size + 8] = bytes(8)  # nobody has left, in this one
            good = m[:]
            spans = [(0, HEADER.size + 1), (PROCESSES, 16), (RECORDS, 124), (HANDS, 24)]
            places = [at + i for at, length in spans for i in range(length)]
            seen = set()
            for turn, at in enumerate(places + [rng.choice(places) for _ in range(60)]):
                m[at] ^= 0xff if turn < len(places) else 1 << rng.randrange(8)
                seen.add(attempt(daemon, memory, number, ledger, fds))
                assert daemon.alive(), f'byte {at}'
                m[:] = good
                write_middle(ledger, memory)
            assert attempt(daemon, memory, number, ledger, fds) == (0, 0, 0, 0), 'the good one no longer works'
        assert len(seen) > 3, seen
        for fd in (*memory, ledger):
            os.close(fd)


run(globals())
