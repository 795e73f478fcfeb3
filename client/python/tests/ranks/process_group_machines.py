"""Ranks that several daemons serve, numbered across the machines: what is reduced depends on who is where."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import bps.torch  # noqa: F401  it registers the backend

RANK, MACHINES = int(sys.argv[2]), [int(n) for n in sys.argv[3].split(",")]
SIZE = len(MACHINES)
store = dist.FileStore(sys.argv[1], SIZE)
dist.init_process_group("bps", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))


def given(rank):
    return torch.randn(70000, generator=torch.Generator().manual_seed(rank))


def total(ranks):
    """As bps(7) defines it: the ranks of each machine in their order, then the machines in the order of their first."""
    sums = {}
    for rank in ranks:
        machine = MACHINES[rank]
        sums[machine] = sums[machine] + given(rank) if machine in sums else given(rank)
    first, *others = sums.values()
    for other in others:
        first = first + other
    return first


mine = given(RANK)
dist.all_reduce(mine)
assert torch.equal(mine, total(range(SIZE)))
for ranks in ([0, 1, 2], [1, SIZE - 1]):
    group = dist.new_group(ranks)
    if RANK in ranks:
        mine = given(RANK)
        dist.all_reduce(mine, group=group)
        assert torch.equal(mine, total(ranks)), ranks
    dist.barrier()
for _ in range(2):  # machines tell each other, and the group goes on
    try:
        dist.all_reduce(torch.ones(3, dtype=torch.int64 if RANK == SIZE - 1 else torch.float32))
        raise AssertionError("nobody said that the ranks differ")
    except dist.DistBackendError as error:
        for word in (f"rank {SIZE - 1} ", "float32", "int64"):
            assert word in str(error), error
    mine = given(RANK)
    dist.all_reduce(mine)
    assert torch.equal(mine, total(range(SIZE)))
out, peer = torch.zeros(70000), (RANK + 1) % SIZE
works = [dist.isend(given(RANK), peer), dist.irecv(out, (RANK - 1) % SIZE)]
for work in works:
    work.wait()
assert torch.equal(out, given((RANK - 1) % SIZE))
dist.destroy_process_group()
print("done")
