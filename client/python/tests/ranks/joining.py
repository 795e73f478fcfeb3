"""Ranks that come to the end of their data at different times, join(), and go on together: epochs of random operations, in which a
rank does so many of the first, and what it has joined in, it gives zeros for.
"""

import os
import random
import sys

import numpy as np
from checks import chosen
from numpy_ops import expected, given

import bps

SEED = int(os.environ.get("BPS_SEED", "28"))
DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8"]


class Step:
    """One operation of an epoch. Names come again with other types and sizes."""

    def __init__(self, rng, number):
        self.dtype, self.count = rng.choice(DTYPES), rng.choice([1, 5, 700, 100_003])
        self.op = rng.choice([bps.Sum, bps.Average])
        self.name = rng.choice([None, f"epoch.{number % 3}", "again"])
        self.waits = rng.random() < 0.3
        self.is_barrier = rng.random() < 0.1
        self.seed = rng.randrange(10**6)

    def begin(self):
        if self.is_barrier:
            bps.barrier()
            return None
        return bps.push_pull_async(given(bps.rank(), self.dtype, self.count, self.seed), op=self.op, name=self.name)

    def check(self, handle, trains):
        """trains: of each rank, whether it does this step."""
        if handle is None:
            return
        inputs = [given(rank, self.dtype, self.count, self.seed) * does for rank, does in enumerate(trains)]
        np.testing.assert_array_equal(handle.wait(), expected([each.astype(self.dtype) for each in inputs], self.op))


def epoch(rng, number):
    steps = [Step(rng, number) for _ in range(12)]
    ends = [rng.choice([0, 3, len(steps)]) for _ in range(bps.size())]
    under_way = []
    for at, step in enumerate(steps[: ends[bps.rank()]]):
        under_way.append((step, step.begin(), [at < end for end in ends]))
        if step.waits:
            while under_way:
                each, *how = under_way.pop(0)
                each.check(*how)
    last = bps.join()
    assert last == max(rank for rank, end in enumerate(ends) if end == max(ends)), (last, ends)
    for each, *how in under_way:
        each.check(*how)  # what was begun before has ended well
    # All are where they would be without: what has no names goes on alike.
    assert bps.allgather_object(last) == [last] * bps.size()
    bps.barrier()


def check_epochs():
    rng = random.Random(SEED)
    for number in range(12):
        epoch(rng, number)


def refused(call):
    try:
        call()
    except bps.BpsError as error:
        assert "rank 0 has joined" in str(error) and isinstance(error, RuntimeError), error
    else:
        raise AssertionError("a rank that had joined took part")


def check_what_is_no_sum():
    for _ in range(2):
        if bps.rank() > 0:
            ones = np.ones(3, "float32")
            refused(lambda: bps.allgather(ones))
            refused(lambda: bps.broadcast(ones, 1, name="sent"))
            refused(lambda: bps.alltoall(np.ones(bps.size(), "float32")))
            refused(lambda: bps.reducescatter(np.ones(bps.size(), "float32")))
            refused(lambda: bps.push_pull(ones, op=bps.Max))
            refused(lambda: bps.push_pull_rows([1], np.ones((1, 2), "float32"), 4))
            refused(lambda: bps.broadcast_object("sent", 1))
            np.testing.assert_array_equal(bps.push_pull(ones, op=bps.Sum), ones * (bps.size() - 1))
        assert bps.join() == bps.size() - 1
        assert len(bps.allgather(np.ones(1))) == bps.size()
        assert bps.broadcast_object(bps.rank(), 1) == 1


def check_what_nobody_waits_for():
    """Each rank has begun something that the others do not begin: those who have joined take part in it."""
    size = bps.size()
    mine = bps.push_pull_async(np.full(4, size, "float32"), name=f"of.{bps.rank()}")
    gathered = bps.allgather_async(np.ones(2)) if bps.rank() else None
    if gathered is None:
        bps.allgather(np.ones(2))
    bps.join()
    np.testing.assert_array_equal(mine.wait(), np.ones(4, "float32"))
    if gathered is not None:
        assert len(gathered.wait()) == 2 * size


def check_operations_of_several_requests():
    """What a rank has begun before goes on, request by request, however late the others begin it."""
    for _ in range(5):
        if bps.rank() == 0:
            assert len(bps.allgather(np.ones(3), name="late")) == 3 * bps.size()
            assert len(bps.alltoall(np.ones(bps.size()), name="late")) == bps.size()
            bps.join()
        else:
            handles = [bps.allgather_async(np.ones(3), name="late"), bps.alltoall_async(np.ones(bps.size()), name="late")]
            bps.join()
            assert [len(handle.wait()) for handle in handles] == [3 * bps.size(), bps.size()]


def main():
    bps.init()
    for _, check in chosen(globals(), sys.argv[1:]):
        check()
    print("done", flush=True)


if __name__ == "__main__":
    main()
