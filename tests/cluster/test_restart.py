#!/usr/bin/env python3
"""A daemon that is killed, restarted or upgraded under a job: trainers see no error, results are the same bits, and what
had completed stays completed. Killed at every failpoint where there are any, and at random moments (seeded, printed)."""
import os, random, shutil, signal, sys, tempfile, threading, time
sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'lib'))
from cluster import *
import numpy_or_skip  # noqa: F401
from recovery import *

N = 6 * PART // 4 + 12345  # float32 elements: seven parts of four pieces, the last no multiple of a piece
TABLE, WIDTH = 3001, 5


def start(armed='', options=()):
    return armed_cluster((1,), 0, {0: [armed]}, options=options)


# -- Tests ---------------------------------------------------------------------------------------------------------------

# Where a daemon is killed, and at which passage. Those of the second row are passed once a job or round.
PIECES = ['ledger-journal-taken', 'ledger-piece-staged', 'part-output-copied', 'ledger-piece-copied', 'ledger-part-copied',
          'ledger-part-done', 'ledger-journal-cleared']
ONCE = ['job-joined', 'ledger-record-half', 'ledger-record-written', 'request-ended', 'ledger-round-told',
        'ledger-record-freed', 'part-copied', 'part-summed']


def killed_at(armed, size, n_restarts=1, options=()):
    """All operations, with the first daemon killed at a failpoint, and those after it where armed says."""
    with start(armed[0], options) as cluster, Keeper(cluster, {0: armed[1:]}) as keeper:
        ranks = job(cluster, (size,))
        round_trip(ranks, every_operation((size,)))
        keeper.expect(n_restarts)
        round_trip(ranks, every_operation((size,), 50)[:3], 20)
        each(ranks, 'leave')


@gate_tier
def test_killed_at_each_failpoint():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for name in PIECES:
        for at in some((1, 5, 22), (5,)):
            killed_at([f'{name}=kill@{at}'], 4)
    for name in ONCE:
        for at in some((1, 2, 3), (2,)):
            killed_at([f'{name}=kill@{at}'], 4)


@gate_tier
def test_killed_again_before_it_has_caught_up():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for name in ('ledger-piece-staged', 'part-output-copied', 'ledger-part-done', 'request-ended'):
        killed_at([f'{name}=kill@3', f'{name}=kill@1', 'resume-accepted=kill@2', f'{name}=kill@2',
                   'ledger-record-continued=kill@2', 'job-joined=kill@1'], 2, 3)


@gate_tier
def test_killed_with_one_and_two_ranks():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for name in ('ledger-piece-staged', 'part-output-copied', 'request-ended', 'ledger-record-freed'):
        killed_at([f'{name}=kill@4'], 2)
    for name in ('part-summed', 'part-copied', 'request-ended', 'job-joined'):
        killed_at([f'{name}=kill@1'], 1)


@gate_tier
def test_killed_with_more_parts_than_a_record_sees_at_once():
    """A window of parts slides through the operation: also when the daemon dies while it moves."""
    n = 2000 * 4096 // 4
    for at in (1, 3, 9):
        armed = f'ledger-low-moved=kill@{at}' if HAS_FAILPOINTS else ''
        with start(armed) as cluster, Keeper(cluster) as keeper:
            ranks = job(cluster, (2,), part_bytes=4096)
            works = [push_pull((2,), FLOAT32, SUM, n, 300 + i, 1, 1) for i in range(2)]
            declare(ranks, works)
            submit(ranks, works)
            if not armed:
                cluster.daemons[0].kill()
            finish(ranks, works)
            keeper.expect(1)


@full_tier('random moments, and no limit to how often')
def test_killed_at_random_moments():
    rng = random.Random(SEED)
    print(f'seed {SEED} (BPS_SEED)', flush=True)
    with start() as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (4,))
        over = threading.Event()

        def killer():
            while not over.wait(rng.uniform(0.02, 0.4) * SLOW):
                with keeper.lock:
                    cluster.daemons[0].signal(signal.SIGKILL)
        thread = threading.Thread(target=killer)
        thread.start()
        try:
            turn = 0
            while turn < 6 or keeper.restarts < 5:
                works = every_operation((4,), 100 * turn)
                rng.shuffle(works)
                declare(ranks, works, 20 * turn)
                submit(ranks, works, 20 * turn, rng)
                finish(ranks, works, 20 * turn)
                turn += 1
        finally:
            over.set()
            thread.join()
        print(f'{keeper.restarts} restarts in {turn} turns', flush=True)
        round_trip(ranks, every_operation((4,), 100000)[:3], 20 * turn)


@gate_tier
def test_killed_with_many_tensors_in_flight():
    rng = random.Random(SEED + 2)
    with start() as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (3,))
        works = [push_pull((3,), rng.choice((FLOAT32, FLOAT16, INT32)), rng.choice((SUM, AVERAGE)), rng.randrange(1, 40000), i,
                           rng.randrange(4) > 0, rng.randrange(2)) for i in range(200)]
        declare(ranks, works)
        submit(ranks[:2], works, order=rng)
        for k, work in enumerate(works):
            data, keys = work.give(2)
            ranks[2].submit(k, k, data, **keys)
            if k % 40 == 20:
                with keeper.lock:
                    cluster.daemons[0].signal(signal.SIGKILL)
        finish(ranks, works)
        assert keeper.restarts, 'nothing was killed'


@full_tier('random moments')
def test_the_same_tensor_round_after_round():
    """Each round's input is the last one's result: one that was done twice, or not on every rank, would show for ever."""
    rng = random.Random(SEED + 1)
    with start() as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (3,))
        work = push_pull((3,), INT32, SUM, N, 7, 1, 1)
        declare(ranks, [work])
        values = [ref.random(INT32, N, (SEED, 7, k)) for k in range(3)]
        for turn in range(12):
            for k, rank in enumerate(ranks):
                rank.submit(turn, 0, values[k].tobytes(), op=PUSH_PULL, red=SUM, out=N, inplace=1, shared=turn % 2)
            if turn % 3 == 1:
                time.sleep(rng.uniform(0, 0.02))
                with keeper.lock:
                    cluster.daemons[0].signal(signal.SIGKILL)
            each(ranks, 'wait', turn, DEADLINE * 2000)
            total = ref.reduce(INT32, SUM, values, (3,))
            for k, rank in enumerate(ranks):
                assert rank.result(turn) == total.tobytes(), f'round {turn} on rank {k}'
                rank.call('free', turn)
            values = [total + np.int32(k) for k in range(3)]
        keeper.expect(4)


def some_rows(size, n, salt):
    data = []
    for k in range(size):
        rng = np.random.default_rng((SEED, salt, k))
        rows = rng.integers(0, TABLE, n).astype(np.int64)
        data.append((rows, ref.random(FLOAT32, n * WIDTH, (SEED, salt, k)).reshape(n, WIDTH)))
    return data, ref.reduce_rows(FLOAT32, SUM, data, (size,))


@full_tier('random moments')
def test_killed_while_rows_are_summed():
    rng = random.Random(SEED + 3)
    with start() as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (3,))
        for rank in ranks:
            rank.call('tensor', 0, 'table', FLOAT32, TABLE * WIDTH)
        for turn in range(10):
            data, want = some_rows(3, 20000, 100 + turn)
            for k, rank in enumerate(ranks):
                rows, values = data[k]
                rank.submit_rows(turn, 0, rows.tobytes(), values.tobytes(), WIDTH, TABLE, red=SUM, shared=turn % 2)
            if turn % 2:
                time.sleep(rng.uniform(0, 0.01))
                with keeper.lock:
                    cluster.daemons[0].signal(signal.SIGKILL)
            each(ranks, 'wait', turn, DEADLINE * 2000)
            for k, rank in enumerate(ranks):
                rows, values = rank.result_rows(turn)
                assert rows == want[0].tobytes() and values == want[1].tobytes(), f'round {turn} on rank {k}'
                rank.call('free', turn)
        keeper.expect(5)


def test_what_a_rank_was_told_the_others_are_told():
    """Rows: how many there are, and that there was no room for them, survives between one rank's hearing of it and the
    next one's."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for at in (1, 2):
        with start(f'request-ended=kill@{at}') as cluster, Keeper(cluster) as keeper:
            ranks = job(cluster, (3,))
            data, want = some_rows(3, 500, 9)
            for k, rank in enumerate(ranks):
                rank.call('tensor', 0, 'table', FLOAT32, TABLE * WIDTH)
                rows, values = data[k]
                rank.submit_rows(0, 0, rows.tobytes(), values.tobytes(), WIDTH, 1500 if k != 1 else 3, red=SUM, shared=1)
            for k, rank in enumerate(ranks):
                rank.send('wait', 0, DEADLINE * 2000)
            for k, rank in enumerate(ranks):
                try:
                    rank.answer(DEADLINE * 2)
                    assert k != 1, 'rank 1 had no room, and was not told'
                except BpsError as error:
                    assert k == 1 and error.errno == errno.ENOSPC, (k, error)
            for k in (0, 2):
                rows, values = ranks[k].result_rows(0)
                assert rows == want[0].tobytes() and values == want[1].tobytes(), f'rank {k}'
            keeper.expect(1)


@gate_tier
def test_sigterm_leaves_jobs_as_they_are():
    """Requests that wait for a rank do not keep the daemon, nor do they fail; parts under way stop at their next piece."""
    with start(options=['--drain-timeout=60m']) as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (2,))
        works = every_operation((2,))
        declare(ranks, works)
        submit(ranks[:1], works)
        table, (given, want) = len(works), some_rows(2, 50, 7)
        for rank in ranks:
            rank.call('tensor', table, 'table', FLOAT32, TABLE * WIDTH)

        def submit_rows(k):
            rows, values = given[k]
            ranks[k].submit_rows(table, table, rows.tobytes(), values.tobytes(), WIDTH, TABLE, red=SUM, shared=1)
        submit_rows(0)
        old = cluster.daemons[0]
        old.signal(signal.SIGTERM)
        assert old.process.wait(DEADLINE) == 0
        for k, work in enumerate(works):
            data, keys = work.give(1)
            ranks[1].submit(k, k, data, **keys)
        submit_rows(1)
        finish(ranks, works)
        each(ranks, 'wait', table, DEADLINE * 2000)
        for rank in ranks:
            assert rank.result_rows(table) == tuple(x.tobytes() for x in want)
            rank.call('free', table)
        for turn in range(3):
            works = every_operation((2,), 100 + 100 * turn)
            declare(ranks, works, 20 * turn + 20)
            submit(ranks, works, 20 * turn + 20)
            with keeper.lock:
                cluster.daemons[0].signal(signal.SIGTERM)
            finish(ranks, works, 20 * turn + 20)
        keeper.expect(4)


def test_another_build_takes_over():
    """The next daemon is another file, with another number of threads and another size of parts."""
    # Not in the cluster's folder: nothing may be run from /dev/shm in some containers.
    with tempfile.TemporaryDirectory() as folder, start(options=['--sum-threads=3']) as cluster:
        ranks = job(cluster, (4,))
        works = every_operation((4,))
        declare(ranks, works)
        submit(ranks, works)
        cluster.daemons[0].kill()
        cluster.binary = shutil.copy(os.path.join(BUILD, 'daemon', 'bps-daemon'), folder)
        cluster.options = ['--sum-threads=1', '--part-size=1M', '--kernel=scalar']
        cluster.restart(0)
        assert os.path.samefile(f'/proc/{cluster.daemons[0].pid}/exe', cluster.binary), 'another file runs'
        finish(ranks, works)


@gate_tier
def test_a_socket_that_outlives_the_daemon():
    """As systemd keeps it: connections wait in it until the next daemon is there."""
    with Cluster(1, start=False) as cluster, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        path = os.path.join(cluster.folder, 'n0.sock')
        door.bind(path)
        door.listen(16)

        def activated(turn):
            daemon = Process(f'n0.{turn}', ['sh', '-c', 'LISTEN_PID=$$ exec "$0" "$@"', os.path.join(
                BUILD, 'daemon', 'bps-daemon'), '--config=', '--admin-socket='], cluster.folder, stdin=subprocess.DEVNULL,
                env={'LISTEN_FDS': '1', 'LISTEN_FDNAMES': 'control'}, pass_fds=(3,), preexec_fn=lambda: os.dup2(door.fileno(), 3))
            daemon.socket = path
            return daemon
        daemon = activated(0)
        cluster.daemons.append(daemon)
        try:
            ranks = job(cluster, (2,))
            for turn, number in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
                works = every_operation((2,), 100 * turn)[:4]
                declare(ranks, works, 20 * turn)
                submit(ranks, works, 20 * turn)
                daemon.signal(number)
                daemon.process.wait(DEADLINE)
                daemon = cluster.daemons[0] = activated(turn + 1)
                finish(ranks, works, 20 * turn)
        finally:
            daemon.kill()
            cluster.daemons.clear()


def sockets_of(process):
    """By what the kernel calls them: another connection has another name."""
    folder = f'/proc/{process.pid}/fd'
    links = [os.readlink(os.path.join(folder, fd)) for fd in os.listdir(folder)]
    return sorted(link for link in links if link.startswith('socket:'))


@gate_tier
def test_a_stopped_daemon_is_only_slow():
    """Nothing ends meanwhile, and nobody takes it for dead: each rank keeps its connection."""
    with start() as cluster:
        ranks, daemon = job(cluster, (2,)), cluster.daemons[0]
        works = every_operation((2,))
        declare(ranks, works)
        submit(ranks[:1], works)
        connections = [sockets_of(rank) for rank in ranks]
        daemon.signal(signal.SIGSTOP)
        wait_for('the daemon is stopped', lambda: daemon.state() == 'T')
        error = ranks[0].ended(0, 1500)
        assert error.errno == errno.ETIMEDOUT, error  # the wait's own
        daemon.signal(signal.SIGCONT)
        for k, work in enumerate(works):
            data, keys = work.give(1)
            ranks[1].submit(k, k, data, **keys)
        finish(ranks, works)
        assert all(connections) and connections == [sockets_of(rank) for rank in ranks], 'a rank has connected again'


@gate_tier
def test_a_trainer_that_dies_meanwhile_is_named():
    with start() as cluster:
        ranks = job(cluster, (3,))
        works = every_operation((3,))[:2]
        declare(ranks, works)
        submit(ranks[:2], works[:1])
        cluster.daemons[0].kill()
        ranks[2].kill()
        cluster.restart(0)
        for rank in ranks[:2]:
            error = rank.ended(0, DEADLINE * 2000)
            assert f'rank 2 (pid {ranks[2].pid}) died meanwhile' in error.text and error.errno == errno.EPIPE, error
        again = job(cluster, (2,))
        round_trip(again, every_operation((2,))[:2])


@full_tier('deadlines of 1 to 2 s of which one must run out before the other')
def test_a_trainer_that_does_not_call_is_waited_for():
    """Longer than resume_timeout, as its process is alive; not longer than a request may take."""
    for timeout_ms in (DEADLINE * 1000, 2000):
        with start() as cluster:
            ranks = cluster.job((2,), part_bytes=PART, request_timeout_ms=timeout_ms)
            works = every_operation((2,))[:1]
            declare(ranks, works)
            submit(ranks[:1], works)
            cluster.daemons[0].kill()
            cluster.restart(0, ['--resume-timeout=1s'])
            if timeout_ms > 2000:
                error = ranks[0].ended(0, 1500)
                assert error.errno == errno.ETIMEDOUT, error  # the wait's own
                data, keys = works[0].give(1)
                ranks[1].submit(0, 0, data, **keys)
                each(ranks, 'wait', 0, DEADLINE * 1000)
                assert all(rank.result(0) == works[0].want(k) for k, rank in enumerate(ranks))
            else:
                error = ranks[0].ended(0)
                assert 'rank 1 did not come back within 2 s' in error.text and error.errno == errno.ECONNRESET, error


def test_a_trainer_that_dies_after_it_came_back_is_named_at_once():
    with start() as cluster:
        ranks = job(cluster, (2,))
        works = every_operation((2,))[:1]
        declare(ranks, works)
        submit(ranks[:1], works)
        cluster.daemons[0].kill()
        cluster.restart(0)
        wait_for('all are back', lambda: 'resumed' in cluster.daemons[0].text())
        ranks[1].kill()
        error = ranks[0].ended(0)
        assert 'rank 1' in error.text and error.errno == errno.EPIPE, error


def test_two_jobs_of_which_one_cannot_go_on():
    """A job through servers ends with its daemon where it is not to be resumed; the one beside it goes on."""
    with start(options=['--resume=off']) as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (2,))
        others = job(cluster, (2,), force_distributed=1)
        works = every_operation((2,))
        for group in (ranks, others):
            declare(group, works)
            submit(group[:1], works)
        with keeper.lock:
            cluster.daemons[0].signal(signal.SIGKILL)
        assert others[0].ended(0).errno == errno.ESHUTDOWN
        for k, work in enumerate(works):
            data, keys = work.give(1)
            ranks[1].submit(k, k, data, **keys)
        finish(ranks, works)
        keeper.expect(1)


def test_a_rank_that_had_left_is_not_waited_for():
    with start() as cluster, Keeper(cluster) as keeper:
        ranks = job(cluster, (3,))
        works = every_operation((3,))[:2]
        round_trip(ranks, works)
        ranks[1].call('leave')
        with keeper.lock:
            cluster.daemons[0].signal(signal.SIGKILL)
        wait_for('the others are back', lambda: 'resumed' in cluster.daemons[0].text())
        data, keys = works[0].give(0)
        ranks[0].submit(30, 0, data, **keys)
        error = ranks[0].ended(30)
        assert error.errno == errno.EPIPE and 'rank 1 has left' in error.text, error
        each([ranks[0], ranks[2]], 'leave')


@gate_tier
def test_killed_while_ranks_leave():
    """Before the first is told that it has left, and after; to leave a job that has been left already is no error."""
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    for at in (1, 2, 3):
        with start(f'job-left=kill@{at}') as cluster, Keeper(cluster) as keeper:
            ranks = job(cluster, (3,))
            round_trip(ranks, every_operation((3,))[:2])
            each(ranks, 'leave')
            keeper.expect(1)
            again = job(cluster, (2,))
            round_trip(again, every_operation((2,))[:1])


@full_tier('a measurement, which is printed')
def test_the_first_completion_comes_soon():
    """Printed, not asserted: from the moment the new daemon is ready."""
    with start() as cluster:
        ranks = job(cluster, (4,))
        work = push_pull((4,), FLOAT32, SUM, 1024, 1, 1, 1)
        times = []
        for turn in range(5):
            if not turn:
                declare(ranks, [work])
            submit(ranks[:3], [work])
            data, keys = work.give(3)
            cluster.daemons[0].kill()
            for rank in ranks[:3]:
                rank.send('wait', 0, DEADLINE * 1000)
            cluster.restart(0)
            ready = time.monotonic()
            ranks[3].submit(0, 0, data, **keys)
            ranks[3].send('wait', 0, DEADLINE * 1000)
            for rank in ranks:
                rank.answer()
            times.append(time.monotonic() - ready)
            for rank in ranks:
                assert rank.result(0) == work.want(0)
                rank.call('free', 0)
        print(f'first completion {min(times) * 1000:.1f} to {max(times) * 1000:.1f} ms after the daemon was ready', flush=True)


def test_a_ledger_that_cannot_be_made_is_told():
    if not HAS_FAILPOINTS:
        raise Skip('the daemon was built without failpoints')
    with start('ledger-new=error@1') as cluster:
        ranks = cluster.job((2,), join=False)
        for rank in ranks:
            rank.send('join', *(f'{key}={value}' for key, value in rank.keys.items()))
        for rank in ranks:
            try:
                rank.answer()
            except BpsError as error:
                assert error.errno == errno.ENOMEM and 'job job1: cannot be formed' in error.text, error
            else:
                raise AssertionError('joined')
        cluster.join(ranks)
        round_trip(ranks, every_operation((2,))[:2])


@full_tier('a thousand jobs, and descriptors and mappings of the process')
def test_a_thousand_jobs_leave_nothing_behind():
    with start() as cluster, Keeper(cluster) as keeper:
        trainers = [cluster.trainer() for _ in range(2)]

        def jobs(n, salt):
            for i in range(n):
                for k, trainer in enumerate(trainers):
                    trainer.send('join', f'job=many{salt}.{i}', f'rank={k}', 'world_size=2', f'local_rank={k}', 'local_size=2',
                                 'node=0', 'n_nodes=1', f'timeout_ms={DEADLINE * 1000}')
                for trainer in trainers:
                    trainer.answer()
                each(trainers, 'leave')
        jobs(20, 0)
        daemon = cluster.daemons[0]
        before = daemon.fds(), daemon.maps()
        jobs(1000, 1)
        wait_for('descriptors and maps are given back',
                 lambda: daemon.fds() <= before[0] and daemon.maps() <= before[1])
        assert not keeper.restarts


run(globals())
