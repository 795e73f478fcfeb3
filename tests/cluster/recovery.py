"""What tests of restarts under jobs over several nodes share: operations with their references, and who starts daemons
again."""
import contextlib, os, random, signal, threading
from cluster import *
import numpy as np
import reference as ref

SEED = int(os.environ.get('BPS_SEED', '20261121'))
PART = 65536  # two pieces a part

with open(os.path.join(BUILD, 'daemon', 'bps-daemon'), 'rb') as binary:
    HAS_FAILPOINTS = b'BPS_FAILPOINTS' in binary.read()


# However long a server takes to be back, the job waits for it: else it would not come to where it is killed next.
PATIENT = ['--move-timeout=60m']


@contextlib.contextmanager
def failpoints(value):
    os.environ['BPS_FAILPOINTS'] = value
    try:
        yield
    finally:
        del os.environ['BPS_FAILPOINTS']


class Keeper:
    """Starts each daemon again whenever it has ended, as systemd does; armed[i]: failpoints of its next processes, in turn."""

    def __init__(self, cluster, armed=None):
        self.cluster, self.armed = cluster, {i: list(a) for i, a in (armed or {}).items()}
        self.given_up = set()  # daemons that are not started again
        self.restarts, self.error, self.over = 0, None, threading.Event()
        self.lock = threading.Lock()  # held while one is started

    def watch(self):
        try:
            while not self.over.is_set():
                dead = [i for i, daemon in enumerate(self.cluster.daemons)
                        if not daemon.alive() and i not in self.given_up]
                for i in dead:
                    armed = self.armed.get(i)
                    with self.lock, failpoints(armed.pop(0) if armed else ''):
                        self.cluster.restart(i)
                    self.restarts += 1
                if not dead:
                    self.over.wait(0.005)
        except Exception as error:
            self.error = error

    def kill(self, i, number=signal.SIGKILL):
        with self.lock:
            self.cluster.daemons[i].signal(number)

    def expect(self, n):
        wait_for(f'{n} restarts', lambda: self.error or self.restarts >= n)

    def __enter__(self):
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        if self.error:
            raise self.error


def armed_cluster(layout, n_spare, armed, **keys):
    """A cluster whose daemon i has failpoints armed[i][0]."""
    cluster = Cluster(len(layout), n_spare, start=False, **keys)
    for i in range(len(cluster.names)):
        with failpoints(armed[i][0] if i in armed else ''):
            cluster.daemons.append(cluster.start(i, wait=False))
    for daemon in cluster.daemons:
        daemon.ready()
    return cluster


# -- Work: requests of all ranks, and what each must find ----------------------------------------------------------------


class Work:
    """One request of every rank. give(rank) -> (bytes or None, keys of submit); want(rank) -> bytes or None."""

    def __init__(self, name, dtype, elements, give, want):
        self.name, self.dtype, self.elements, self.give, self.want = name, dtype, elements, give, want


def push_pull(layout, dtype, reduction, n, salt, inplace, shared):
    data = [ref.fitting(dtype, reduction, ref.random(dtype, n, (SEED, salt, k))) for k in range(sum(layout))]
    result = ref.reduce(dtype, reduction, data, layout).tobytes()
    return Work(f'pp.{salt}', dtype, n, lambda k: (data[k].tobytes(), dict(
        op=PUSH_PULL, red=reduction, out=n, inplace=inplace, shared=shared)), lambda k: result)


def reduce_scatter(layout, dtype, reduction, n, salt, inplace, shared):
    size = sum(layout)
    counts = [n // size + (7 if k == 0 else -7 if k == size - 1 and size > 1 else 0) for k in range(size)]
    if size == 1:
        counts = [n]
    total = sum(counts)
    data = [ref.random(dtype, total, (SEED, salt, k)) for k in range(size)]
    result = ref.reduce(dtype, reduction, data, layout)
    before = [sum(counts[:k]) for k in range(size)]
    return Work(f'rs.{salt}', dtype, -1, lambda k: (data[k].tobytes(), dict(
        op=REDUCE_SCATTER, red=reduction, out=counts[k], counts=counts, inplace=inplace,
        at=before[k] * ref.SIZE[dtype] if inplace else 0, shared=shared)),
        lambda k: result[before[k]:before[k] + counts[k]].tobytes())


def widened(layout, reduction, n, salt, types, shared):
    """push_pull of float32; types[rank % len(types)]: of its input. Those of float32 are in place."""
    types = [types[k % len(types)] for k in range(sum(layout))]
    data = [ref.random(t, n, (SEED, salt, k)) for k, t in enumerate(types)]
    cast = [ref.widen(t, x).astype(np.float32) for t, x in zip(types, data)]
    result = ref.reduce(FLOAT32, reduction, cast, layout).tobytes()
    return Work(f'wi.{salt}', FLOAT32, n, lambda k: (data[k].tobytes(), dict(
        op=PUSH_PULL, red=reduction, out=n, inplace=int(types[k] == FLOAT32), shared=shared, **{'from': types[k]})),
        lambda k: result)


def all_gather(layout, n, salt, shared):
    size = sum(layout)
    data = [ref.random(INT32, n + k, (SEED, salt, k)).tobytes() for k in range(size)]
    counts = [n + k for k in range(size)]
    return Work(f'ag.{salt}', INT32, -1, lambda k: (data[k], dict(
        op=ALL_GATHER, out=sum(counts), counts=counts, shared=shared)), lambda k: b''.join(data))


def all_to_all(layout, n, salt, shared):
    size = sum(layout)
    data = [ref.random(INT16, n * size, (SEED, salt, k)) for k in range(size)]
    return Work(f'aa.{salt}', INT16, -1, lambda k: (data[k].tobytes(), dict(op=ALL_TO_ALL, out=n * size, shared=shared)),
                lambda k: b''.join(d[k * n:(k + 1) * n].tobytes() for d in data))


def broadcast(layout, n, salt, shared):
    root = salt % sum(layout)
    data = ref.random(UINT8, n, (SEED, salt)).tobytes()
    return Work(f'bc.{salt}', UINT8, n, lambda k: (data if k == root else None, dict(
        op=BROADCAST, root=root, out=n, inplace=int(k == root), shared=shared)), lambda k: data)


def every_operation(layout, salt=0, n=6 * PART // 4 + 12345):
    """In place and not, staged and arena memory; as many tensors in flight."""
    return [push_pull(layout, FLOAT32, SUM, n, salt + 1, 1, 1), push_pull(layout, FLOAT32, SUM, n, salt + 2, 1, 0),
            push_pull(layout, BFLOAT16, AVERAGE, n, salt + 3, 1, 1), push_pull(layout, FLOAT64, MAX, n // 2, salt + 4, 0, 1),
            push_pull(layout, INT64, AVERAGE, 1001, salt + 5, 1, 1), reduce_scatter(layout, FLOAT32, SUM, n, salt + 6, 1, 1),
            reduce_scatter(layout, FLOAT16, SUM, n, salt + 7, 0, 0), all_gather(layout, n // 8, salt + 8, 1),
            all_to_all(layout, n // 8, salt + 9, 1), broadcast(layout, n, salt + 10, 0),
            widened(layout, SUM, n, salt + 11, (BFLOAT16, FLOAT32, FLOAT16), 1)]


def job(cluster, layout, **keys):
    """Ranks that call the library between commands too: after a restart no rank goes on before all have come back."""
    ranks = cluster.job(layout, join=False, **{'part_bytes': PART, **keys})
    each(ranks, 'attend')
    cluster.join(ranks)
    return ranks


def declare(ranks, works, first=0):
    for rank in ranks:
        for i, work in enumerate(works):
            rank.call('tensor', first + i, work.name, work.dtype, work.elements, seconds=2 * DEADLINE)


def submit(ranks, works, first=0, order=None):
    posts = [(k, i) for k in range(len(ranks)) for i in range(len(works))]
    if order:
        order.shuffle(posts)
    for k, i in posts:
        data, keys = works[i].give(k)
        ranks[k].submit(first + i, first + i, data, **keys)


def each(ranks, *words):
    """A command to all ranks at once."""
    for rank in ranks:
        rank.send(*words)
    return [rank.answer(DEADLINE * 2) for rank in ranks]


def finish(ranks, works, first=0):
    for i in range(len(works)):
        each(ranks, 'wait', first + i, DEADLINE * 2000)
    for i, work in enumerate(works):
        for k, rank in enumerate(ranks):
            got, want = rank.result(first + i), work.want(k)
            if got != want:
                a, b = np.frombuffer(got, np.uint8), np.frombuffer(want, np.uint8)
                raise AssertionError(f'{work.name} on rank {k}: {len(a)} bytes, of the reference {len(b)}, differ at '
                                     f'{np.flatnonzero(a[:len(b)] != b[:len(a)])[:5]}')
            rank.call('free', first + i)


def round_trip(ranks, works, first=0, order=None):
    declare(ranks, works, first)
    submit(ranks, works, first, order)
    finish(ranks, works, first)


def turns(ranks, layout, first, n=1, then=None):
    """n turns of every operation from number `first` on, compared with the reference; then(): once all is submitted, in each."""
    for turn in range(first, first + n):
        works = every_operation(layout, 50 * turn)
        declare(ranks, works, 20 * turn)
        submit(ranks, works, 20 * turn)
        if then:
            then()
        finish(ranks, works, 20 * turn)
    return first + n


def says(cluster, i, text):
    wait_for(f'{cluster.names[i]} says "{text}"', lambda: text in cluster.daemons[i].text(), 2 * DEADLINE)
