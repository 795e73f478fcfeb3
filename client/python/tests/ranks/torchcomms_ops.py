"""torchcomms over bps: each call, against what the ranks' inputs say it must give. Of torchcomms, or of its double."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torchcomms
from torch_common import expect
from torchcomms import ReduceOp

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EVERYBODY = range(SIZE)
LAST = SIZE - 1


def ones(rank, *shape):
    return torch.full(shape, rank + 1.0)


def run(call, *arguments):
    """Waits for it, in both ways."""
    for async_op in (False, True):
        work = call(*arguments, async_op=async_op)
        work.wait()
        assert work.is_completed()


def check_reductions(comm):
    total = sum(r + 1.0 for r in EVERYBODY)
    for op, expected in (ReduceOp.SUM, total), (ReduceOp.AVG, total / SIZE), (ReduceOp.MAX, SIZE), (ReduceOp.MIN, 1), (ReduceOp.PRODUCT, 6):
        mine = ones(RANK, 2, 3)
        comm.all_reduce(mine, op, async_op=False)
        assert mine.tolist() == [[expected] * 3] * 2, op.type
        mine = ones(RANK, 3)
        work = comm.reduce(mine, LAST, op, async_op=True)
        work.wait()
        assert mine.tolist() == ([expected] * 3 if RANK == LAST else [RANK + 1.0] * 3)
    output, each = torch.empty(2), [ones(RANK, 2) + r for r in EVERYBODY]
    run(comm.reduce_scatter, output, each, ReduceOp.SUM)
    assert output.tolist() == [total + SIZE * RANK] * 2
    output = torch.empty(RANK + 1)
    run(comm.reduce_scatter_v, output, [ones(RANK, r + 1) for r in EVERYBODY], ReduceOp.SUM)
    assert output.tolist() == [total] * (RANK + 1)
    output = torch.empty(2)
    run(comm.reduce_scatter_single, output, torch.cat(each), ReduceOp.SUM)
    assert output.tolist() == [total + SIZE * RANK] * 2
    expect(TypeError, "factor of PREMUL_SUM", lambda: comm.all_reduce(torch.ones(1), ReduceOp.PREMUL_SUM(0.5), async_op=False))


def check_moves(comm):
    mine = ones(RANK, 4)
    run(comm.broadcast, mine, LAST)
    assert mine.tolist() == [LAST + 1.0] * 4
    outputs = [torch.empty(2) for _ in EVERYBODY]
    run(comm.all_gather, outputs, ones(RANK, 2))
    assert [o.tolist() for o in outputs] == [[r + 1.0] * 2 for r in EVERYBODY]
    outputs = [torch.empty(r + 1) for r in EVERYBODY]
    run(comm.all_gather_v, outputs, ones(RANK, RANK + 1))
    assert [o.tolist() for o in outputs] == [[r + 1.0] * (r + 1) for r in EVERYBODY]
    output = torch.empty(2 * SIZE)
    run(comm.all_gather_single, output, ones(RANK, 2))
    assert output.tolist() == [r + 1.0 for r in EVERYBODY for _ in range(2)]
    outputs = [torch.zeros(2) for _ in EVERYBODY] if RANK == LAST else []
    run(comm.gather, outputs, ones(RANK, 2), LAST)
    assert [o.tolist() for o in outputs] == ([[r + 1.0] * 2 for r in EVERYBODY] if RANK == LAST else [])
    output = torch.empty(2)
    run(comm.scatter, output, [ones(r, 2) for r in EVERYBODY] if RANK == 0 else [], 0)
    assert output.tolist() == [RANK + 1.0] * 2
    output, given = torch.empty(SIZE), torch.arange(SIZE) + 10.0 * RANK
    run(comm.all_to_all_single, output, given)
    assert output.tolist() == [10.0 * r + RANK for r in EVERYBODY]
    outputs = [torch.empty(1) for _ in EVERYBODY]
    run(comm.all_to_all, outputs, list(given.split(1)))
    assert torch.cat(outputs).tolist() == [10.0 * r + RANK for r in EVERYBODY]
    sent, received = [r + 1 for r in EVERYBODY], [RANK + 1] * SIZE
    output = torch.empty(sum(received))
    run(comm.all_to_all_v_single, output, ones(RANK, sum(sent)), received, sent)
    assert output.tolist() == [r + 1.0 for r in EVERYBODY for _ in range(RANK + 1)]
    run(comm.barrier)


def check_messages(comm):
    output = torch.empty(3)
    works = [comm.send(ones(RANK, 3), (RANK + 1) % SIZE, async_op=True), comm.recv(output, (RANK - 1) % SIZE, async_op=True)]
    for work in works:
        work.wait()
    assert output.tolist() == [(RANK - 1) % SIZE + 1.0] * 3


def check_parts(comm):
    part = comm.split([LAST, 0] if RANK in (0, LAST) else [], "ends")
    assert (part is None) == (RANK not in (0, LAST))
    if part is not None:
        assert part.get_rank() == int(RANK == 0) and part.get_size() == 2
        outputs = [torch.empty(1), torch.empty(1)]
        part.all_gather(outputs, ones(RANK, 1), async_op=False)
        assert torch.cat(outputs).tolist() == [LAST + 1.0, 1.0]
        part.finalize()
    for ranks in [r for r in EVERYBODY if r != 1] if RANK != 1 else [1], [*EVERYBODY], [*EVERYBODY]:
        part = comm.split(ranks, "of one name")
        mine = ones(RANK, 1)
        part.all_reduce(mine, ReduceOp.SUM, async_op=False)
        assert mine.item() == sum(r + 1 for r in ranks)
        part.finalize()
    for ranks in [0, 0, *range(1, SIZE)], [r for r in EVERYBODY if r != RANK], [*EVERYBODY, SIZE]:
        expect(RuntimeError, "are not different ranks", lambda: comm.split(ranks, "wrong"))


def check_two_at_a_time(comm):
    """One of the same name comes again once it has gone; another is beside it."""
    for _ in range(2):
        other = torchcomms.new_comm("bps", torch.device("cpu"), name="other")
        mine, works = [ones(RANK, 2), ones(RANK, 2)], []
        for each, tensor in zip((comm, other) if RANK else (other, comm), mine):
            works.append(each.all_reduce(tensor, ReduceOp.MAX, async_op=True))
        for work in works:
            work.wait()
        assert mine[0].tolist() == mine[1].tolist() == [SIZE] * 2
        other.finalize()


def check_deadlines(comm):
    store, _, _ = next(dist.rendezvous("env://", RANK, SIZE))
    other = torchcomms.new_comm("bps", torch.device("cpu"), name="deadlines", store=store)
    other.set_timeout(timedelta(seconds=0.2))
    if RANK == 0:
        expect(RuntimeError, "Timed out", lambda: other.all_reduce(torch.ones(1), ReduceOp.SUM, async_op=False))
    comm.barrier(async_op=False)
    other.finalize()


def main():
    made = torchcomms.new_comm("bps", torch.device("cpu"), name="main")
    assert (made.get_rank(), made.get_size(), made.get_backend(), made.get_name()) == (RANK, SIZE, "bps", "main")
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(made)
    made.finalize()
    print("done", flush=True)


main()
