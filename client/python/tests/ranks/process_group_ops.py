"""torch.distributed over bps: each collective, against what the ranks' inputs say it must give."""

import errno
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from checks import chosen

import bps.torch  # noqa: F401  it registers the backend
from bps import BpsError
from bps.torch import process_group

RANK, SIZE = int(os.environ["BPS_RANK"]), int(os.environ["BPS_SIZE"])
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
EVERY = [*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, *FLOAT8, torch.bool]
Op = dist.ReduceOp


def given(rank, dtype, *shape, seed=0):
    """What a rank gives: any rank can make any other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 8, shape, generator=generator)
    if dtype == torch.bool:
        return values > 3
    if dtype.is_complex:
        return torch.complex(values.double(), values.flip(0).double()).to(dtype)
    return values.to(torch.float32).to(dtype) if dtype in (*FLOAT8, *UNSIGNED) else values.to(dtype)


def inputs(dtype, *shape, seed=0):
    return [given(r, dtype, *shape, seed=seed) for r in range(SIZE)]


def bits(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def equal(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def total(parts, op):
    """In rank order, as bps sums the ranks of one machine: 16-bit floats in float32, rounded once."""
    dtype = parts[0].dtype
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}.get(dtype, dtype)
    if dtype in UNSIGNED:
        wide = torch.int64
    parts = [p.to(wide) for p in parts]
    fold = {
        Op.SUM: torch.logical_or if dtype == torch.bool else torch.add,
        Op.AVG: torch.add,
        Op.MIN: torch.logical_and if dtype == torch.bool else torch.minimum,
        Op.MAX: torch.logical_or if dtype == torch.bool else torch.maximum,
        Op.PRODUCT: torch.logical_and if dtype == torch.bool else torch.mul,
        Op.BAND: torch.bitwise_and,
        Op.BOR: torch.bitwise_or,
        Op.BXOR: torch.bitwise_xor,
    }[op]
    result = parts[0]
    for part in parts[1:]:
        result = fold(result, part)
    if op == Op.AVG and dtype.is_complex:
        return torch.view_as_complex(torch.view_as_real(result) / SIZE)
    if op == Op.AVG:
        result = result / SIZE if dtype.is_floating_point else result.div(SIZE, rounding_mode="floor")
    return result.to(dtype)


def reductions():
    for dtype in [*FLOATS, *INTEGERS]:
        yield from ((dtype, op) for op in (Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT))
    for dtype in [*INTEGERS, torch.bool]:
        yield from ((dtype, op) for op in (Op.BAND, Op.BOR, Op.BXOR))
    yield from ((torch.bool, op) for op in (Op.SUM, Op.MIN, Op.MAX, Op.PRODUCT))
    yield from ((dtype, op) for dtype in COMPLEX for op in (Op.SUM, Op.AVG))
    yield from ((dtype, Op.SUM) for dtype in UNSIGNED)


def refused(error, text, call, *arguments, **more):
    try:
        call(*arguments, **more)
    except error as problem:
        assert text in str(problem), problem
    else:
        raise AssertionError(f"{call.__name__} was not refused: {text}")


def check_all_reduce():
    for dtype, op in reductions():
        expected = total(inputs(dtype, 5, 3), op)
        mine = given(RANK, dtype, 5, 3)
        dist.all_reduce(mine, op=op)
        assert equal(mine, expected), (dtype, op, mine, expected)
        mine = given(RANK, dtype, 5, 3)
        work = dist.all_reduce(mine, op=op, async_op=True)
        assert work.wait() and work.is_completed() and work.is_success() and equal(mine, expected), (dtype, op)
        for out in (work.result(), work.get_future().wait()):
            assert torch.equal(bits(out[0]), bits(expected)), (dtype, op)
    refused(TypeError, "average of torch.bool", dist.all_reduce, torch.ones(2, dtype=torch.bool), op=Op.AVG)
    refused(TypeError, "integers and bool", dist.all_reduce, torch.ones(2), op=Op.BXOR)
    refused(TypeError, "max of torch.uint32", dist.all_reduce, torch.ones(2, dtype=torch.uint32), op=Op.MAX)
    refused(TypeError, "to_dense()", dist.all_reduce, torch.ones(2, 2).to_sparse_csr())


def check_sparse():
    """Rank r has r elements or more, some of them twice, some where others have theirs, and some ranks none."""

    def sparse(rank):
        generator = torch.Generator().manual_seed(rank)
        places = torch.randint(0, 9, (1, 2 * rank), generator=generator)
        return torch.sparse_coo_tensor(places, torch.randn(2 * rank, 3, generator=generator), (9, 3))

    for op in (Op.SUM, Op.AVG):
        expected = total([sparse(r).to_dense() for r in range(SIZE)], op)
        mine = sparse(RANK)
        dist.all_reduce(mine, op=op)
        assert torch.allclose(mine.to_dense(), expected, atol=1e-6), op
        both = [sparse(RANK) for _ in range(20)]
        works = [dist.all_reduce(each, op=op, async_op=True) for each in both]
        works[3].get_future()
        for work in reversed(works):
            work.wait()
        assert all(torch.equal(each.to_dense(), mine.to_dense()) for each in both)
    refused(TypeError, "SUM and AVG", dist.all_reduce, sparse(RANK), op=Op.MAX)
    # One that nobody waits for goes on, as another rank does.
    mine = sparse(RANK)
    work = dist.all_reduce(mine, async_op=True)
    if RANK:
        work.wait()
    token = torch.zeros(1)
    if RANK and RANK == SIZE - 1:
        dist.send(token, 0)
    elif not RANK and SIZE > 1:
        dist.recv(token, SIZE - 1)
    work.wait()
    assert torch.allclose(mine.to_dense(), total([sparse(r).to_dense() for r in range(SIZE)], Op.SUM), atol=1e-6)


def check_factors():
    from torch._C._distributed_c10d import _make_nccl_premul_sum

    expected = sum(given(r, torch.float32, 9) * (r + 1.0) for r in range(SIZE))
    for factor in (RANK + 1.0, torch.tensor([RANK + 1.0])):
        mine = given(RANK, torch.float32, 9)
        dist.all_reduce(mine, op=_make_nccl_premul_sum(factor))
        assert equal(mine, expected)
        for dtype in (torch.int8, torch.int64, torch.bool):
            mine, op = given(RANK, dtype, SIZE), _make_nccl_premul_sum(factor)
            refused(TypeError, f"{dtype}", dist.all_reduce, mine, op=op)
            refused(TypeError, f"{dtype}", dist.reduce, mine, 0, op=op)
            refused(TypeError, f"{dtype}", dist.reduce_scatter_tensor, mine[:1].clone(), mine, op=op)


def check_layouts():
    whole = inputs(torch.float32, 4, 6, 5, 3)
    for view in (
        lambda x: x.transpose(1, 3),
        lambda x: x[::2, 1::3],
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[1, 2, 3, 1],
        lambda x: x[:0],
        lambda x: x[1, 2:4],
    ):
        mine = whole[RANK].clone()
        seen = view(mine)
        dist.all_reduce(seen)
        assert equal(seen, total([view(x) for x in whole], Op.SUM))
        seen = view(mine.clone())
        dist.broadcast(seen, SIZE - 1)
        target = view(torch.zeros(4, 6, 5, 3))
        out = [view(torch.zeros(4, 6, 5, 3)) for _ in range(SIZE)]
        dist.all_gather(out, view(whole[RANK]))
        assert all(equal(out[r], view(whole[r])) for r in range(SIZE))
        if target.dim():
            parts = [view(whole[(RANK + r) % SIZE].clone()) for r in range(SIZE)]
            dist.reduce_scatter(target, parts)
            assert equal(target, total([view(whole[(q + RANK) % SIZE]) for q in range(SIZE)], Op.SUM))
    untouched = torch.zeros(6)
    dist.broadcast(untouched[1::2] if RANK else torch.ones(3), 0)
    assert untouched.tolist() == ([0, 1, 0, 1, 0, 1] if RANK else [0] * 6)
    negative = given(RANK, torch.complex64, 4).conj().imag
    assert negative.is_neg()
    dist.all_reduce(negative)
    assert torch.equal(negative, total([-x.imag for x in inputs(torch.complex64, 4)], Op.SUM))
    parameter = torch.nn.Parameter(given(RANK, torch.float32, 4))
    dist.broadcast(parameter, 0)
    assert equal(parameter, given(0, torch.float32, 4)) and parameter.requires_grad


def check_moves():
    for dtype in EVERY:
        all_of_them = inputs(dtype, 3, 2)
        mine = all_of_them[RANK]
        for root in range(SIZE):
            moved = mine.clone()
            dist.broadcast(moved, root)
            assert equal(moved, all_of_them[root]), dtype
            gathered = [torch.zeros(3, 2).to(dtype) for _ in range(SIZE)] if RANK == root else None
            dist.gather(mine, gathered, root)
            assert RANK != root or all(map(equal, gathered, all_of_them)), dtype
            target = torch.zeros(3, 2).to(dtype)
            dist.scatter(target, all_of_them if RANK == root else None, root)
            assert equal(target, mine), dtype
        gathered = [torch.zeros(3, 2).to(dtype) for _ in range(SIZE)]
        dist.all_gather(gathered, mine)
        assert all(map(equal, gathered, all_of_them)), dtype
        target = torch.zeros(3 * SIZE, 2).to(dtype)
        dist.all_gather_into_tensor(target, mine)
        stacked = torch.stack([bits(x) for x in all_of_them]).view(-1)
        assert torch.equal(bits(target), stacked), dtype
        target[3 * RANK : 3 * RANK + 3] = mine  # in place, as FSDP does
        dist.all_gather_into_tensor(target, target[3 * RANK : 3 * RANK + 3])
        assert torch.equal(bits(target), stacked), dtype
        dist.all_gather_into_tensor(target, target[:3].clone() if RANK else target[:3])


def check_uneven():
    """Rank r gives r + 1 rows, of which rank 0's are none."""
    rows = [3 * r for r in range(SIZE)]
    gathered = [torch.zeros(n, 2) for n in rows]
    dist.all_gather(gathered, given(RANK, torch.float32, rows[RANK], 2))
    assert all(equal(gathered[r], given(r, torch.float32, rows[r], 2)) for r in range(SIZE))
    parts = [given(RANK, torch.float32, n, 2, seed=i) for i, n in enumerate(rows)]
    target = torch.zeros(rows[RANK], 2)
    dist.reduce_scatter(target, parts)
    assert equal(target, total([given(r, torch.float32, rows[RANK], 2, seed=RANK) for r in range(SIZE)], Op.SUM))


def check_reduce():
    for dtype, op in reductions():
        expected = total(inputs(dtype, 4), op)
        for root in (0, SIZE - 1):
            mine = given(RANK, dtype, 4)
            dist.reduce(mine, root, op=op)
            assert equal(mine, expected if RANK == root else given(RANK, dtype, 4)), (dtype, op)


def check_reduce_scatter():
    for dtype, op in reductions():
        whole = total(inputs(dtype, SIZE * 3, 2), op)
        target = torch.zeros(3, 2).to(dtype)
        dist.reduce_scatter_tensor(target, given(RANK, dtype, SIZE * 3, 2), op=op)
        assert equal(target, whole[3 * RANK : 3 * RANK + 3]), (dtype, op)
        target = torch.zeros(3, 2).to(dtype)
        dist.reduce_scatter(target, list(given(RANK, dtype, SIZE * 3, 2).split(3)), op=op)
        assert equal(target, whole[3 * RANK : 3 * RANK + 3]), (dtype, op)
    whole = given(RANK, torch.float32, SIZE * 3)
    dist.reduce_scatter_tensor(whole[3 * RANK : 3 * RANK + 3], whole)  # in place, as FSDP does
    assert equal(
        whole[3 * RANK : 3 * RANK + 3], total(inputs(torch.float32, SIZE * 3), Op.SUM)[3 * RANK : 3 * RANK + 3]
    )


def check_reduce_scatter_to_float32():
    """As of what is cast before, bit by bit; each rank gives what it likes. FSDP and Megatron reduce so."""
    for number, dtype in enumerate((torch.float16, torch.bfloat16)):
        for op in (Op.SUM, Op.AVG, Op.MIN, Op.MAX, dist._make_nccl_premul_sum(1 / 3)):
            halves = given(RANK, torch.float32, SIZE * 300, seed=number).div(7).to(dtype)
            part, target = torch.zeros(300), torch.zeros(300)
            dist.reduce_scatter_tensor(part, halves.float(), op=op)
            dist.reduce_scatter_tensor(target, halves, op=op)
            assert equal(target, part), (dtype, op)
            target.zero_()
            dist.reduce_scatter_tensor(target, halves if RANK else halves.float(), op=op, async_op=True).wait()
            assert equal(target, part), (dtype, op)
        target = torch.zeros(2, 300)
        with dist._coalescing_manager():
            for row in target:
                dist.reduce_scatter_tensor(row, halves)
        dist.reduce_scatter_tensor(part, halves.float())
        assert equal(target[0], part) and equal(target[1], part)
        # Over itself, where a result is wider than what is still to be read.
        memory = torch.zeros(SIZE * 300)
        over = memory.view(dtype)[: SIZE * 300]
        over.copy_(halves)
        dist.reduce_scatter_tensor(memory[:300], over)
        assert equal(memory[:300], part)
    one_type = (TypeError, "they must have one type", dist.reduce_scatter_tensor)
    refused(*one_type, torch.zeros(3, dtype=torch.bfloat16), torch.ones(3 * SIZE))
    refused(*one_type, torch.zeros(3), torch.ones(3 * SIZE, dtype=torch.int16))
    refused(*one_type, torch.zeros(3), torch.ones(3 * SIZE, dtype=torch.bfloat16), Op.PRODUCT)


def check_all_to_all():
    def piece(source, target, dtype):
        return given(source, dtype, (source + 2 * target) % 4, 2, seed=target)

    for dtype in EVERY:
        out = [torch.zeros_like(piece(r, RANK, torch.float32)).to(dtype) for r in range(SIZE)]
        dist.all_to_all(out, [piece(RANK, r, dtype) for r in range(SIZE)])
        assert all(equal(out[r], piece(r, RANK, dtype)) for r in range(SIZE)), dtype
    sent = [piece(RANK, r, torch.int64) for r in range(SIZE)]
    received = [piece(r, RANK, torch.int64) for r in range(SIZE)]
    out = torch.zeros(sum(map(len, received)), 2, dtype=torch.int64)
    dist.all_to_all_single(out, torch.cat(sent), [len(x) for x in received], [len(x) for x in sent])
    assert equal(out, torch.cat(received))
    even = given(RANK, torch.float32, SIZE * 2, 3)
    expected = torch.cat([given(r, torch.float32, SIZE * 2, 3)[2 * RANK : 2 * RANK + 2] for r in range(SIZE)])
    out = torch.zeros(SIZE * 2, 3)
    dist.all_to_all_single(out, even)
    assert equal(out, expected)
    dist.all_to_all_single(even, even)  # over itself
    assert equal(even, expected)
    refused(ValueError, "do not cut", dist.all_to_all_single, out, even, [1] * SIZE, [1] * SIZE)
    splits = torch.full((SIZE,), 2).numpy()  # as of MoE layers that count with NumPy
    out = torch.zeros(SIZE * 2, 3)
    dist.all_to_all_single(out, expected, splits, splits)
    assert equal(out, given(RANK, torch.float32, SIZE * 2, 3))


def check_coalesced():
    import torch.distributed._functional_collectives as functional

    shapes = [(3,), (2, 2), (0,), ()]
    mine = [given(RANK, torch.float32, *shape) for shape in shapes]
    dist.all_reduce_coalesced(mine)
    assert all(equal(x, total(inputs(torch.float32, *shape), Op.SUM)) for x, shape in zip(mine, shapes))
    mine = [given(RANK, torch.float32, n) for n in (1, 5)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in mine:
            dist.all_reduce(each)
    manager.wait()
    assert all(equal(x, total(inputs(torch.float32, n), Op.SUM)) for x, n in zip(mine, (1, 5)))
    outs = [torch.zeros(SIZE * n) for n in (1, 5)]
    with dist._coalescing_manager():
        for out, n in zip(outs, (1, 5)):
            dist.all_gather_into_tensor(out, given(RANK, torch.float32, n))
    assert all(equal(out, torch.cat(inputs(torch.float32, n))) for out, n in zip(outs, (1, 5)))
    outs = [torch.zeros(n) for n in (1, 5)]
    with dist._coalescing_manager():
        for out, n in zip(outs, (1, 5)):
            dist.reduce_scatter_tensor(out, given(RANK, torch.float32, SIZE * n))
    for out, n in zip(outs, (1, 5)):
        assert equal(out, total(inputs(torch.float32, SIZE * n), Op.SUM)[n * RANK : n * RANK + n])
    lists = [[torch.zeros(n) for n in (1, 5)] for _ in range(SIZE)]
    dist.all_gather_coalesced(lists, [given(RANK, torch.float32, n) for n in (1, 5)])
    assert all(equal(lists[r][i], given(r, torch.float32, n)) for r in range(SIZE) for i, n in enumerate((1, 5)))

    world = dist.group.WORLD
    x = given(RANK, torch.float32, SIZE * 2)
    assert equal(functional.all_reduce(x, "sum", world) + 0, total(inputs(torch.float32, SIZE * 2), Op.SUM))
    assert equal(functional.all_gather_tensor(x, 0, world) + 0, torch.cat(inputs(torch.float32, SIZE * 2)))
    scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)  # its newer name
    part = scatter(x, "avg", 0, world) + 0
    assert equal(part, total(inputs(torch.float32, SIZE * 2), Op.AVG)[2 * RANK : 2 * RANK + 2])
    expected = torch.cat([y[2 * RANK : 2 * RANK + 2] for y in inputs(torch.float32, SIZE * 2)])
    assert equal(functional.all_to_all_single(x, None, None, world) + 0, expected)
    assert equal(functional.broadcast(x, SIZE - 1, world) + 0, given(SIZE - 1, torch.float32, SIZE * 2))
    both = functional.all_reduce_coalesced([x, x + 1], "max", world)
    assert torch.equal(both[1] - both[0], torch.ones(SIZE * 2))
    assert equal(both[0] + 0, total(inputs(torch.float32, SIZE * 2), Op.MAX))


def check_objects():
    everything = [None] * SIZE
    dist.all_gather_object(everything, {"rank": RANK, "text": "x" * 100 * RANK})
    assert everything == [{"rank": r, "text": "x" * 100 * r} for r in range(SIZE)]
    some = [RANK, {"a": RANK}]
    dist.broadcast_object_list(some, SIZE - 1)
    assert some == [SIZE - 1, {"a": SIZE - 1}]
    gathered = [None] * SIZE if RANK == 0 else None
    dist.gather_object(RANK * 1.5, gathered, 0)
    assert RANK or gathered == [r * 1.5 for r in range(SIZE)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(SIZE)] if RANK == 0 else None, 0)
    assert mine == [f"for {RANK}"]


def check_messages():
    refused(ValueError, "cannot send to itself" if SIZE == 1 else "", dist.isend, torch.ones(1), RANK)
    if SIZE == 1:
        return
    for dtype in EVERY:
        following, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
        out = torch.zeros(2, 3).to(dtype)
        works = [dist.isend(given(RANK, dtype, 2, 3), following), dist.irecv(out, before)]
        for work in works:
            assert work.wait()
        assert equal(out, given(before, dtype, 2, 3)), dtype
    # Each tag is an order of its own; sizes differ; to both sides at once.
    tags = range(4)
    outs = [torch.zeros(3 * tag + 1) for tag in tags]
    receiving = [dist.irecv(outs[tag], before, tag=tag) for tag in tags]
    sending = [
        dist.isend(given(RANK, torch.float32, 3 * tag + 1, seed=tag), following, tag=tag) for tag in reversed(tags)
    ]
    for work in (*sending, *receiving):
        work.wait()
    assert all(equal(outs[tag], given(before, torch.float32, 3 * tag + 1, seed=tag)) for tag in tags)
    outs = [torch.zeros(5) for _ in range(20)]  # of one tag: in order
    receiving = [dist.irecv(out, before) for out in outs]
    sending = [dist.isend(torch.full((5,), float(i + RANK)), following) for i in range(20)]
    for work in (*sending, *receiving):
        work.wait()
    assert [int(out[0]) for out in outs] == [i + before for i in range(20)]
    spread = torch.zeros(6)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(3), following), dist.P2POp(dist.irecv, spread[::2], before)]
    )
    for work in works:
        work.wait()
    assert spread.tolist() == [1, 0, 1, 0, 1, 0]
    refused(NotImplementedError, "give src", dist.recv, torch.zeros(1))
    if RANK < 2:
        work = dist.isend(torch.ones(2), 1) if RANK == 0 else dist.irecv(torch.zeros(3), 0)
        refused(dist.DistBackendError, "elements", work.wait)


def check_a_message_in_a_callback():
    """It is called by the thread that lets two ranks meet, where a message that has waited for them then fails."""
    group = dist.new_group(list(range(SIZE)))
    submit = process_group._submit

    def refuse(*_):
        process_group._submit = submit
        raise BpsError(errno.EIO, "refused")

    if RANK == 0 and SIZE > 1:
        process_group._submit = refuse
        sent = []
        first = dist.isend(torch.zeros(3), 1, group=group)
        called = first.get_future().then(lambda _: sent.append(dist.isend(torch.ones(3), 1, group=group)))
        dist.barrier(group)
        called.wait()
        sent[0].wait()
        refused(dist.DistBackendError, "refused", first.wait)
    elif RANK == 1:
        dist.barrier(group)  # the callback is there by now, and the two ranks have not met
        out = torch.zeros(3)
        dist.recv(out, 0, group=group)
        assert out.tolist() == [1] * 3
    else:
        dist.barrier(group)


def check_groups():
    """Groups that share ranks, groups of one, and the same ranks in another order."""
    pairs = [dist.new_group([r, (r + 1) % SIZE]) for r in range(SIZE)] if SIZE > 2 else []
    for r, group in enumerate(pairs):
        if RANK in (r, (r + 1) % SIZE):
            mine = given(RANK, torch.float32, 7)
            dist.all_reduce(mine, group=group)
            expected = total([given(q, torch.float32, 7) for q in sorted((r, (r + 1) % SIZE))], Op.SUM)
            assert equal(mine, expected)
            root = dist.get_global_rank(group, 1)
            dist.broadcast(mine, root, group=group)
            works = [dist.all_reduce(mine, group=group, async_op=True) for _ in range(2)]
            for work in works:
                work.wait()
    alone = [dist.new_group([r]) for r in range(SIZE)][RANK]
    mine = given(RANK, torch.float32, 7)
    dist.all_reduce(mine, group=alone)
    assert equal(mine, given(RANK, torch.float32, 7))
    dist.barrier(group=alone)
    dist.destroy_process_group(alone)
    again = dist.new_group()
    works = [
        dist.all_reduce(torch.full((3,), float(i)), group=g, async_op=True) for i in range(40) for g in (None, again)
    ]
    for work in works:
        work.wait()
        assert work.result()[0][0] == (works.index(work) // 2) * SIZE
    refused(ValueError, "not initialized", dist.all_reduce, torch.ones(1), group=alone)


def check_split():
    """The ranks of a part stand in the order that is asked for; who is in none waits for nobody."""
    if not hasattr(dist, "split_group"):
        return
    half = max(1, SIZE // 2)
    parts = [list(range(half))[::-1], list(range(half, 2 * half))]
    for _ in range(2):  # each is a group of its own
        part = dist.split_group(split_ranks=[p for p in parts if p and max(p) < SIZE])
        mine = next((p for p in parts if RANK in p), None)
        if mine is None:
            assert part is dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert (part.size(), part.rank()) == (half, mine.index(RANK))
        x = given(RANK, torch.float32, 5)
        dist.all_reduce(x, group=part)
        assert equal(x, total([given(r, torch.float32, 5) for r in mine], Op.SUM))
        refused(TypeError, "pg_options", part.split_group, [0], opts=object())
        dist.destroy_process_group(part)


def check_barriers():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    if dist.group.WORLD._device_types:  # versions before ask for gloo
        dist.monitored_barrier()


def check_many_at_once():
    """More than the library keeps outstanding."""
    tensors = [torch.full((3,), float(i % 97)) for i in range(5000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    assert all(int(tensor[2]) == i % 97 * SIZE for i, tensor in enumerate(tensors))


def check_threads():
    """Groups are used from threads of their own, at the same time."""
    import threading

    groups = [dist.new_group() for _ in range(3)]
    wrong = []

    def work(number, group):
        for i in range(50):
            mine = torch.full((100 * number + 1,), float(i + RANK))
            dist.all_reduce(mine, group=group, async_op=bool(i % 2)) and None
            dist.barrier(group=group)
            if i % 2 == 0 and not torch.equal(mine, torch.full_like(mine, sum(i + r for r in range(SIZE)))):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=each) for each in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def check_again():
    """The group is destroyed and made once more in the same store."""
    dist.destroy_process_group()
    assert not dist.is_initialized()
    init()
    mine = torch.ones(3)
    dist.all_reduce(mine)
    assert mine.tolist() == [SIZE] * 3


stores = []  # a FileStore whose last user goes removes its file, even while another rank opens that anew


def init():
    stores.append(dist.FileStore(sys.argv[1], SIZE))
    dist.init_process_group("bps", store=stores[-1], rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))
    assert dist.get_backend() == "bps" and dist.get_rank() == RANK and dist.get_world_size() == SIZE


init()
for name, check in chosen(globals(), sys.argv[2:]):
    began = time.monotonic()
    check()
    print(f"{name}: {time.monotonic() - began:.1f} s")
dist.destroy_process_group()
print("done")
