"""Operations on tensors: types, layouts, handles, names of BytePS and Horovod, gradients."""

import sys
import warnings

import torch
from checks import chosen

import bps.torch as bps
from bps import _ops

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def given(rank, dtype, *shape):
    generator = torch.Generator().manual_seed(rank + 1)
    values = torch.randint(0, 8, shape, generator=generator)
    return (values > 3) if dtype == torch.bool else values.to(dtype)


def total(dtype, *shape):
    inputs = [given(r, dtype, *shape) for r in range(bps.size())]
    if dtype == torch.bool:
        return torch.stack(inputs).any(0)
    return sum(x.to(torch.float64) for x in inputs).to(dtype)


def check_types():
    for dtype in DTYPES:
        mine = given(bps.rank(), dtype, 17, 3)
        result = bps.allreduce(mine, op=bps.Sum, name=f"sum.{dtype}")
        assert result.dtype == dtype and torch.equal(result, total(dtype, 17, 3)), dtype
        stack = torch.stack([given(r, dtype, 17, 3).to(torch.float64) for r in range(bps.size())])
        assert torch.equal(bps.allreduce(mine, op=bps.Min, name=f"min.{dtype}"), stack.amin(0).to(dtype))
        assert torch.equal(bps.allreduce(mine, op=bps.Max, name=f"max.{dtype}"), stack.amax(0).to(dtype))
        if dtype.is_floating_point:
            average = bps.push_pull(mine, name=f"average.{dtype}")
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            assert torch.equal(average, (stack.sum(0).to(wide) / bps.size()).to(dtype)), dtype


def check_layouts():
    whole = given(bps.rank(), torch.float32, 4, 6, 5, 3)
    expected = total(torch.float32, 4, 6, 5, 3)
    for name, view in {
        "transposed": lambda x: x.transpose(1, 3),
        "strided": lambda x: x[::2, 1::3],
        "channels_last": lambda x: x.to(memory_format=torch.channels_last),
        "one": lambda x: x[1, 2, 3, 1],
        "nothing": lambda x: x[:0],
    }.items():
        mine = whole.clone()
        before = mine.clone()
        assert torch.equal(bps.push_pull(view(mine), average=False, name=f"layout.{name}"), view(expected)), name
        assert torch.equal(mine, before), name
        if name != "channels_last":  # that one is a copy already
            bps.push_pull_inplace(view(mine), average=False, name=f"in place.{name}")
            assert torch.equal(view(mine), view(expected)), name


def check_names_of_byteps():
    mine = given(bps.rank(), torch.float32, 10)
    sum_ = total(torch.float32, 10)
    bps.declare("byteps")
    handle = bps.push_pull_async(mine, average=False, name="byteps", version=0, priority=3)
    assert torch.equal(bps.synchronize(handle), sum_) and bps.poll(handle)
    copy = mine.clone()
    handle = bps.push_pull_async_inplace(copy, average=False, name="byteps.inplace")
    assert bps.synchronize(handle) is copy and torch.equal(copy, sum_)
    assert torch.equal(bps.push_pull(mine, name="byteps.average"), sum_ / bps.size())
    handle = bps.byteps_push_pull(copy, False, "byteps.inplace", 0, 1)
    assert bps.synchronize(handle) is copy and torch.equal(copy, sum_ * bps.size())
    bps.declare("byteps.ahead", mine)
    assert torch.equal(bps.push_pull(mine, False, "byteps.ahead"), sum_)


def check_names_of_horovod():
    mine = given(bps.rank(), torch.float32, 10)
    sum_ = total(torch.float32, 10)
    assert torch.equal(bps.allreduce(mine), sum_ / bps.size())
    assert torch.equal(bps.allreduce(mine, average=False), sum_)
    assert torch.equal(bps.synchronize(bps.allreduce_async(mine, op=bps.Sum, name="horovod.async")), sum_)
    copy = mine.clone()
    assert bps.allreduce_(copy, op=bps.Sum, name="horovod.inplace") is copy and torch.equal(copy, sum_)
    scaled = bps.allreduce(mine, op=bps.Sum, prescale_factor=0.5, postscale_factor=4.0, name="horovod.scaled")
    assert torch.equal(scaled, 2 * sum_) and torch.equal(mine, given(bps.rank(), torch.float32, 10))
    copy = mine.clone()
    bps.allreduce_(copy, op=bps.Sum, prescale_factor=0.5, postscale_factor=2.0, name="horovod.scaled.inplace")
    assert torch.equal(copy, sum_)
    large = torch.tensor([2**40 + 2])  # no float32 is like it
    for when in ("prescale_factor", "postscale_factor"):
        halves = bps.allreduce(large, op=bps.Sum, name="horovod.scaled.integers", **{when: 0.5})
        assert torch.equal(halves, (large // 2) * bps.size()), halves
    for compression in (bps.Compression.fp16, bps.Compression.bf16):
        result = bps.allreduce(mine, op=bps.Sum, compression=compression, name=f"horovod.{compression.__name__}")
        assert result.dtype == torch.float32 and torch.equal(result, sum_)
    try:
        bps.allreduce(mine, average=True, op=bps.Sum)
        raise AssertionError("average and op were taken together")
    except ValueError:
        pass


def check_groups():
    for dtype in DTYPES:
        mine = [given(bps.rank(), dtype, 3, n) for n in range(4)]
        sums = [total(dtype, 3, n) for n in range(4)]
        name = f"group.{dtype}"
        assert all(map(torch.equal, bps.grouped_allreduce(mine, op=bps.Sum, name=name), sums))
        handle = bps.grouped_allreduce_async(mine, op=bps.Sum, name=name)
        assert all(map(torch.equal, bps.synchronize(handle), sums)) and bps.poll(handle)
        copies = [x.clone() for x in mine]
        results = bps.grouped_allreduce_(copies, op=bps.Sum, name=name)
        assert all(a is b and torch.equal(a, c) for a, b, c in zip(results, copies, sums))
        copies = [x.clone() for x in mine]
        bps.synchronize(bps.grouped_allreduce_async_(copies, op=bps.Sum, name=name))
        assert all(map(torch.equal, copies, sums))
    mine = [given(bps.rank(), torch.float32, 5) for _ in range(3)]
    halves = bps.grouped_allreduce(mine, op=bps.Sum, compression=bps.Compression.fp16, prescale_factor=0.5)
    assert all(torch.equal(h, total(torch.float32, 5) / 2) for h in halves)
    assert bps.grouped_allreduce([]) == []
    inputs = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    one, two = bps.grouped_allreduce(inputs, op=bps.Sum, name="group.grad")
    ((bps.rank() + 1) * one.sum() + 5 * two.sum()).backward()
    assert (inputs[0].grad == bps.size() * (bps.size() + 1) / 2).all() and (inputs[1].grad == 5 * bps.size()).all()


def check_groups_of_which_one_is_refused():
    """None of them has begun."""
    mine, begun, submit = torch.ones(bps.size()), [], _ops.submit
    _ops.submit = lambda *arguments, **more: begun.append(arguments) or submit(*arguments, **more)
    try:
        for start, wrong, words in (
            (bps.grouped_allreduce_async_, torch.ones(2, dtype=torch.complex64), "complex64"),
            (bps.grouped_allreduce_async_, torch.ones(2, dtype=torch.bool), "no average"),
            (bps.grouped_allreduce_async, [1.0], "of type list"),
            (bps.grouped_allgather_async, torch.ones(2, 2).to_sparse(), "to_dense"),
            (bps.grouped_reducescatter_async, torch.tensor(1.0), "no rows"),
        ):
            try:
                start([mine, wrong])
                raise AssertionError(f"{start.__name__} took it: {words}")
            except (TypeError, bps.BpsValueError) as error:
                assert words in str(error) and not begun, (error, begun)
    finally:
        _ops.submit = submit


def check_groups_that_gather_and_scatter():
    size, rank = bps.size(), bps.rank()
    mine = [given(rank, torch.float32, rank + 1, n) for n in range(3)]
    gathered = [torch.cat([given(r, torch.float32, r + 1, n) for r in range(size)]) for n in range(3)]
    assert all(map(torch.equal, bps.grouped_allgather(mine, "gathered"), gathered))
    handle = bps.grouped_allgather_async(mine, "gathered", bps.global_process_set)
    assert all(map(torch.equal, bps.synchronize(handle), gathered)) and bps.poll(handle)
    assert bps.grouped_allgather([]) == [] and bps.grouped_reducescatter([]) == []

    mine = [given(rank, torch.float32, 2 * size + 1, n) for n in (1, 3)]
    cuts = [0] + [2 * (r + 1) + 1 for r in range(size)]  # the first rank gets the row that is left over
    sums = [total(torch.float32, 2 * size + 1, n)[cuts[rank] : cuts[rank + 1]] for n in (1, 3)]
    none = bps.Compression.none
    parts = bps.grouped_reducescatter(mine, "scattered", none, bps.Sum, bps.global_process_set, 0.5, 4.0)
    assert all(torch.equal(part, 2 * s) for part, s in zip(parts, sums))
    parts = bps.grouped_reducescatter(mine, op=bps.Sum, compression=bps.Compression.fp16)
    assert all(map(torch.equal, parts, sums))
    handle = bps.grouped_reducescatter_async(mine, "scattered", bps.Sum, None, 0.5, 4.0)
    assert all(torch.equal(part, 2 * s) for part, s in zip(bps.synchronize(handle), sums))

    # What comes back from a rank's rows is what all ranks made of them.
    inputs = [torch.ones(rank + 1, 2, requires_grad=True), torch.ones(1, requires_grad=True)]
    one, two = bps.grouped_allgather(inputs, "gathered.grad")
    weights = torch.arange(float(one.numel())).reshape(one.shape)
    ((one * weights).sum() + 3 * (rank + 1) * two.sum()).backward()
    assert torch.equal(inputs[0].grad, weights.split([r + 1 for r in range(size)])[rank])
    assert (inputs[1].grad == 3 * (size + 1) / 2).all()
    inputs = [torch.ones(2 * size, requires_grad=True), torch.ones(size, 3, requires_grad=True)]
    one, two = bps.grouped_reducescatter(inputs, "scattered.grad", op=bps.Average, prescale_factor=2.0)
    ((rank + 1) * one.sum() + 5 * two.sum()).backward()
    assert torch.allclose(inputs[0].grad, 2.0 * torch.arange(1.0, size + 1).repeat_interleave(2))
    assert torch.allclose(inputs[1].grad, torch.full((size, 3), 10.0))


def given_halves(rank, dtype, *shape):
    """Numbers whose sums are none of the type."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def check_wider_outputs():
    """The same bits as of what is cast before. Ranks need not agree on what they give."""
    rank, size = bps.rank(), bps.size()
    started = bps.grouped_allreduce_async, bps.grouped_reducescatter_async
    for dtype in (torch.float16, torch.bfloat16):
        mine = given_halves(rank, dtype, 2 * size + 1, 300)
        for op in (bps.Sum, bps.Average, bps.Min, bps.Max):
            whole = bps.allreduce(mine.float(), op=op)
            part = bps.reducescatter(mine.float(), op=op)
            wider = bps.allreduce(mine, op=op, output_dtype=torch.float32)
            assert wider.dtype == torch.float32 and torch.equal(wider, whole), (dtype, op)
            wider = bps.reducescatter(mine, op=op, output_dtype=torch.float32)
            assert wider.dtype == torch.float32 and torch.equal(wider, part), (dtype, op)
            some = mine if rank % 2 else mine.float()
            handle = bps.allreduce_async(some, op=op, output_dtype=torch.float32, name="some")
            assert torch.equal(bps.synchronize(handle), whole), (dtype, op)
            handle = bps.reducescatter_async(some, op=op, output_dtype=torch.float32, name="some")
            assert torch.equal(bps.synchronize(handle), part), (dtype, op)
            wider, other = bps.grouped_allreduce([mine, some], op=op, output_dtype=torch.float32, name="both")
            assert torch.equal(wider, whole) and torch.equal(other, whole), (dtype, op)
            wider, other = bps.grouped_reducescatter([mine, some], op=op, output_dtype=torch.float32, name="both")
            assert torch.equal(wider, part) and torch.equal(other, part), (dtype, op)
            handles = [f([mine], op=op, output_dtype=torch.float32) for f in started]
            assert torch.equal(bps.synchronize(handles[0])[0], whole), (dtype, op)
            assert torch.equal(bps.synchronize(handles[1])[0], part), (dtype, op)
        assert torch.equal(bps.push_pull(mine, output_dtype=torch.float32), bps.push_pull(mine.float()))
        handle = bps.push_pull_async(mine.t(), average=False, name="turned", output_dtype=torch.float32)
        assert torch.equal(bps.synchronize(handle), bps.allreduce(mine.t().float(), op=bps.Sum))
        # What is multiplied is not rounded before it is added.
        factors = {"prescale_factor": 1 / 3, "postscale_factor": 0.7}
        wider = bps.allreduce(mine, op=bps.Sum, output_dtype=torch.float32, **factors)
        assert torch.equal(wider, bps.allreduce(mine.float(), op=bps.Sum, **factors))
        assert torch.equal(bps.allreduce(mine, op=bps.Sum, output_dtype=dtype), bps.allreduce(mine, op=bps.Sum))
        assert torch.equal(mine, given_halves(rank, dtype, 2 * size + 1, 300))

    leaf = torch.ones(2 * size, dtype=torch.bfloat16, requires_grad=True)
    one = bps.allreduce(leaf, op=bps.Sum, name="wider.grad", output_dtype=torch.float32)
    two = bps.reducescatter(leaf, op=bps.Sum, name="wider.grad", output_dtype=torch.float32)
    ((rank + 1) * one.sum() + two.sum()).backward()
    assert leaf.grad.dtype == torch.bfloat16 and (leaf.grad == size * (size + 1) / 2 + size).all(), leaf.grad


def check_outputs_that_there_are_not():
    wide, half, whole = torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int16)
    for call, kind, words in (
        (lambda: bps.allreduce(wide, output_dtype=torch.bfloat16), bps.BpsValueError, "only float16 and bfloat16"),
        (lambda: bps.allreduce(wide, prescale_factor=2.0, output_dtype=torch.float16), bps.BpsValueError, "are widened"),
        (lambda: bps.allreduce(half, output_dtype=torch.float64), bps.BpsValueError, "of float64, the input of bfloat16"),
        (lambda: bps.reducescatter(whole, output_dtype=torch.float32), bps.BpsValueError, "the input of int16"),
        (lambda: bps.allreduce(half, output_dtype=torch.complex64), TypeError, "no type that bps reduces"),
        (lambda: bps.allreduce(half, op=bps.Product, output_dtype=torch.float32), TypeError, "output_dtype is for"),
        (lambda: bps.allreduce(half.to_sparse(), output_dtype=torch.float32), TypeError, "output_dtype is for"),
    ):
        try:
            call()
            raise AssertionError(f"it was taken, and not refused: {words}")
        except kind as error:
            assert words in str(error), error
    assert torch.equal(bps.allreduce(half, op=bps.Sum, output_dtype=torch.float32), torch.full((2,), float(bps.size())))


def check_product():
    mine = torch.arange(4, dtype=torch.float32) + bps.rank()
    expected = torch.stack([torch.arange(4, dtype=torch.float32) + rank for rank in range(bps.size())]).prod(0)
    assert torch.equal(bps.allreduce(mine, op=bps.Product, postscale_factor=0.5), 0.5 * expected)
    handle = bps.grouped_allreduce_async_([mine, mine.to(torch.int32)], name="factors", op=bps.Product)
    whole, integers = bps.synchronize(handle)
    assert whole is mine and torch.equal(mine, expected) and torch.equal(integers, expected.to(torch.int32))
    factor = torch.full((2,), 2.0, requires_grad=True)
    try:
        bps.allreduce(factor, op=bps.Product).sum().backward()
        raise AssertionError("a product was differentiated")
    except RuntimeError as error:
        assert "sums and averages" in str(error), error


def check_reductions_that_there_are_not():
    mine = torch.ones(2)
    adapted = [
        lambda op: bps.reducescatter(mine, op=op),
        lambda op: bps.allreduce(mine.to_sparse(), op=op),
        lambda op: bps.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(mine)], 0.1), op=op),
    ]
    reducing = [lambda op: bps.allreduce(mine, op=op), lambda op: bps.grouped_allreduce_async_([mine], op=op)]
    for op, way_out, calls in ((bps.Adasum, "Average", adapted + reducing), (bps.Product, "allgather", adapted)):
        for call in calls:
            try:
                call(op)
                raise AssertionError(f"{op} was taken")
            except bps.BpsUnsupportedError as error:
                assert str(op) in str(error) and way_out in str(error)
                assert isinstance(error, bps.BpsValueError) and isinstance(error, NotImplementedError)


def check_process_sets():
    """Two sets do different things at one time; a root is named by its number among all ranks."""
    rank, size = bps.rank(), bps.size()
    outer, inner = [0, size - 1], list(range(1, size - 1))
    sets = [bps.add_process_set(outer), bps.add_process_set(bps.ProcessSet(inner))]
    mine, other, ranks = (*sets, outer) if rank in outer else (*reversed(sets), inner)
    assert mine.included() and mine.size() == len(ranks) and ranks[mine.rank()] == rank
    assert not other.included() and other.rank() is None
    assert [each.process_set_id for each in sets] == [1, 2]
    n, total = len(ranks), float(sum(ranks))
    x = torch.full((n, 2), float(rank), requires_grad=True)
    in_turn = torch.tensor(ranks, dtype=torch.float32).repeat_interleave(2).reshape(-1, 2)
    summed = bps.allreduce(x, op=bps.Sum, process_set=mine)
    assert torch.equal(summed, torch.full((n, 2), total))
    (summed * (rank + 1)).sum().backward()  # whose gradients are over the set too, in autograd's thread
    assert torch.equal(x.grad, torch.full((n, 2), total + n))
    assert torch.equal(bps.allreduce(x.detach(), process_set=mine), torch.full((n, 2), total / n))
    both = bps.grouped_allreduce([x.detach(), torch.ones(3)], name="of the set", op=bps.Sum, process_set=mine)
    assert torch.equal(both[0], torch.full((n, 2), total)) and torch.equal(both[1], torch.full((3,), float(n)))
    assert torch.equal(bps.allgather(x[:1], process_set=mine), in_turn)
    assert torch.equal(bps.alltoall(x.detach(), process_set=mine), in_turn)
    assert torch.equal(bps.reducescatter(x.detach(), op=bps.Sum, process_set=mine), torch.full((1, 2), total))
    x.grad = None
    (bps.broadcast(x, ranks[-1], process_set=mine) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((n, 2), (total + n) / n if rank == ranks[-1] else 0.0))
    sparse = bps.allreduce(torch.eye(3).to_sparse(), name="sparse", op=bps.Sum, process_set=mine)
    assert torch.equal(sparse.to_dense(), n * torch.eye(3))
    assert bps.broadcast_object({"from": rank}, ranks[-1], process_set=mine) == {"from": ranks[-1]}
    assert bps.allgather_object(rank, process_set=mine) == ranks
    handle = bps.allgather_async(x.detach()[:1], name="later", process_set=mine)
    assert bps.allreduce(torch.ones(1), op=bps.Sum).item() == size  # of all ranks, beside it
    assert torch.equal(bps.synchronize(handle), in_turn)
    if rank in outer:
        bps.barrier(process_set=mine)
    for wrong, words in (
        (lambda: bps.allreduce(x, process_set=other), "not in ProcessSet"),
        (lambda: bps.broadcast(x, (set(range(size)) - set(ranks)).pop(), process_set=mine), "root rank"),
        (lambda: bps.allreduce(x, process_set="mine"), "no ProcessSet"),
        (lambda: bps.add_process_set([0, size - 1]), "in use already"),
        (lambda: bps.add_process_set(range(size)), "in use already"),
        (lambda: bps.add_process_set([0, size]), f"has {size} ranks"),
        (lambda: bps.add_process_set([rank]), "gives the ranks"),
        (lambda: bps.remove_process_set(mine), "gives the ranks"),
        (lambda: bps.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=mine), "all ranks"),
    ):
        try:
            wrong()
            raise AssertionError(f"no error: {words}")
        except ValueError as error:
            assert words in str(error), error
    assert all([bps.remove_process_set(each) for each in sets])
    assert mine.process_set_id is mine.size() is None and not bps.remove_process_set(mine)
    try:
        bps.allreduce(x, process_set=mine)
        raise AssertionError("a set that was removed is in use")
    except ValueError as error:
        assert "not in use" in str(error), error
    assert bps.add_process_set(range(size - 1)).process_set_id == 3  # which shutdown() ends


def check_optimizers_of_process_sets():
    """Those of a set average over its ranks; a rank outside has the same program and trains by itself."""
    rank, size = bps.rank(), bps.size()
    outer = [0, size - 1]
    pair = bps.add_process_set(outer)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    optimizers = []
    for layer, over in zip(model, (pair, None)):
        layer.weight.data.fill_(1.0)
        optimizer = torch.optim.SGD(layer.parameters(), 1.0)
        optimizers.append(bps.DistributedOptimizer(optimizer, layer.named_parameters(), process_set=over))
    (model(torch.ones(1, 1)) * (1 + rank)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    of_pair = 1 + (size - 1) / 2 if rank in outer else 1 + rank
    torch.testing.assert_close(model[0].weight.item(), 1.0 - of_pair)
    torch.testing.assert_close(model[1].weight.item(), 1.0 - (size + 1) / 2)
    try:
        bps.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], 1.0), process_set=pair, asynchronous=True)
        raise AssertionError("a process set trains asynchronously")
    except ValueError as error:
        assert "process set" in str(error), error
    bps.remove_process_set(pair)


def check_names_with_other_tensors():
    """What had the name first is as it was."""
    for n, dtype in ((4, torch.float32), (7, torch.float32), (4, torch.int32), (4, torch.float32)):
        mine = torch.full((n,), bps.rank() + 1).to(dtype)
        total = torch.full((n,), bps.size() * (bps.size() + 1) // 2).to(dtype)
        assert torch.equal(bps.allreduce(mine, name="other", op=bps.Sum), total)


def check_arguments_of_horovod():
    """In Horovod's order, by position; and what bps has not is refused by name."""
    mine, here = given(bps.rank(), torch.float32, 2 * bps.size()), bps.global_process_set
    sum_ = total(torch.float32, 2 * bps.size())
    part = sum_.reshape(bps.size(), 2)[bps.rank()]
    assert torch.equal(bps.allreduce(mine, None, "h", bps.Compression.none, bps.Sum, 0.5, 2.0, here), sum_)
    assert torch.equal(bps.allreduce_async(mine, None, "h", bps.Sum, 0.5, 2.0, here).wait(), sum_)
    assert torch.equal(bps.allreduce_(mine.clone(), None, "h", bps.Sum, 0.5, 2.0, here), sum_)
    assert torch.equal(bps.allgather(part, "h", here), sum_)
    assert torch.equal(bps.broadcast(mine, 0, "h", here), given(0, torch.float32, 2 * bps.size()))
    bps.alltoall(mine, None, "h", here)
    assert torch.equal(bps.reducescatter(mine, "h", bps.Compression.fp16, bps.Sum, here, 0.5, 2.0), part)
    assert torch.equal(bps.reducescatter_async(mine, "h.async", bps.Sum, here).wait(), part)
    bps.barrier(here)
    assert bps.broadcast_object(7, 0, "h", here) == 7
    other = bps.ProcessSet([0])
    for call in (
        lambda: bps.allreduce(mine, process_set=other),
        lambda: bps.allreduce_async_(mine, process_set=other),
        lambda: bps.grouped_allreduce([mine], process_set=other),
        lambda: bps.allgather(mine, process_set=other),
        lambda: bps.broadcast_(mine, 0, process_set=other),
        lambda: bps.alltoall(mine, process_set=other),
        lambda: bps.reducescatter(mine, process_set=other),
        lambda: bps.grouped_allgather([mine], process_set=other),
        lambda: bps.grouped_allgather_async([mine], process_set=other),
        lambda: bps.grouped_reducescatter([mine], process_set=other),
        lambda: bps.grouped_reducescatter_async([mine], process_set=other),
        lambda: bps.sparse_allreduce_async(mine.to_sparse(), "h", bps.Sum, other),
        lambda: bps.barrier(process_set=other),
    ):
        try:
            call()
            raise AssertionError("a set of some ranks was taken")
        except ValueError as error:
            assert "ProcessSet([0])" in str(error)


def check_timeouts():
    """Those of the call, which name who is missing; the job goes on."""
    mine = torch.ones(bps.size())
    calls = {
        "push_pull": lambda **more: bps.push_pull(mine, **more),
        "inplace": lambda **more: bps.push_pull_inplace(mine.clone(), **more),
        "allreduce": lambda **more: bps.allreduce(mine, **more),
        "group": lambda **more: bps.grouped_allreduce([mine, mine], **more),
        "broadcast": lambda **more: bps.broadcast(mine, 0, **more),
        "allgather": lambda **more: bps.allgather(mine, **more),
        "alltoall": lambda **more: bps.alltoall(mine, **more),
        "reducescatter": lambda **more: bps.reducescatter(mine, **more),
        "object": lambda **more: bps.allgather_object(7, **more),
    }
    if bps.rank() == 0 and bps.size() > 1:
        for name, call in calls.items():
            try:
                call(name=f"late.{name}", timeout=0.2)
                raise AssertionError(f"{name} did not miss the other ranks")
            except bps.BpsTimeoutError as error:
                assert "rank" in str(error), error
    bps.barrier()
    for name, call in calls.items():
        call(name=f"timely.{name}", timeout=60)


def check_timeouts_of_groups():
    """One for all together; what has not ended goes on."""
    timeouts, wait = [], _ops.Handle.wait

    def recorded(handle, timeout=None):
        timeouts.append(timeout)
        return wait(handle, timeout)

    group = bps.grouped_allreduce_async([torch.ones(2)] * 3, name="group.in time") if bps.rank() == 0 else None
    if group and bps.size() > 1:
        _ops.Handle.wait = recorded
        try:
            bps.synchronize(group, timeout=0.1)
            raise AssertionError("it did not miss the other ranks")
        except bps.BpsTimeoutError:
            pass
        finally:
            _ops.Handle.wait = wait
        assert timeouts[0] <= 0.1 and timeouts[1:] == [0, 0], timeouts
    bps.barrier()
    group = group or bps.grouped_allreduce_async([torch.ones(2)] * 3, name="group.in time")
    assert all(torch.equal(result, torch.ones(2)) for result in bps.synchronize(group, timeout=60))


def check_broadcast():
    for dtype in DTYPES:
        for root in range(bps.size()):
            mine = given(bps.rank(), dtype, 6, 5)
            assert torch.equal(bps.broadcast(mine, root, name=str(dtype)), given(root, dtype, 6, 5))
            assert torch.equal(mine, given(bps.rank(), dtype, 6, 5))
            assert bps.broadcast_(mine, root, name=str(dtype)) is mine
            assert torch.equal(mine, given(root, dtype, 6, 5))
    columns = given(bps.rank(), torch.float32, 6, 5)
    bps.broadcast_(columns[:, 1:3], 0, name="columns")
    assert torch.equal(columns[:, 1:3], given(0, torch.float32, 6, 5)[:, 1:3])
    assert torch.equal(columns[:, 3:], given(bps.rank(), torch.float32, 6, 5)[:, 3:])


def moving(dtype, rank, *shape):
    """Bits of any kind, of a type that bps sums or not."""
    generator = torch.Generator().manual_seed(rank + 1)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def check_types_that_only_move():
    names = ("complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    for dtype in [getattr(torch, name) for name in names if hasattr(torch, name)]:
        root = bps.size() - 1
        mine, wanted = moving(dtype, bps.rank(), 5, 3), moving(dtype, root, 5, 3)
        assert same_bits(bps.broadcast(mine, root, name=f"moved.{dtype}"), wanted), dtype
        assert same_bits(bps.broadcast_(mine.clone(), root, name=f"moved in place.{dtype}"), wanted), dtype
        across = mine.clone().t()
        bps.broadcast_(across, root, name=f"moved across.{dtype}")
        assert same_bits(across, wanted.t()), dtype
        one = moving(dtype, bps.rank())
        assert same_bits(bps.broadcast(one, root, name=f"one moved.{dtype}"), moving(dtype, root)), dtype
        rows = torch.cat([bytes_of(moving(dtype, r, r + 1, 2)) for r in range(bps.size())]).view(dtype).view(-1, 2)
        assert same_bits(bps.allgather(moving(dtype, bps.rank(), bps.rank() + 1, 2), name=f"rows.{dtype}"), rows), dtype
        ones = torch.cat([bytes_of(moving(dtype, r)) for r in range(bps.size())]).view(dtype)
        assert same_bits(bps.allgather(one, name=f"ones.{dtype}"), ones), dtype
        cut = [moving(dtype, r, bps.size(), 2)[bps.rank()] for r in range(bps.size())]
        cut = torch.cat(list(map(bytes_of, cut))).view(dtype).view(-1, 2)
        assert same_bits(bps.alltoall(moving(dtype, bps.rank(), bps.size(), 2), name=f"cut.{dtype}"), cut), dtype
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj() * (1 + bps.rank())
    target = conjugated.conj()  # on demand
    bps.broadcast_(target, 0, name="conjugated")
    assert torch.equal(target, torch.tensor([1 + 2j, 3 - 1j]))


def check_gather_and_scatter():
    n, rank = bps.size(), bps.rank()
    for dtype in DTYPES:
        inputs = [given(r, dtype, r + 1, 3) for r in range(n)]
        assert torch.equal(bps.allgather(inputs[rank], name=str(dtype)), torch.cat(inputs))
        assert torch.equal(bps.synchronize(bps.allgather_async(inputs[rank], name=str(dtype))), torch.cat(inputs))
        inputs = [given(r, dtype, n, 3) for r in range(n)]
        expected = torch.stack([x[rank] for x in inputs])
        assert torch.equal(bps.alltoall(inputs[rank], name=str(dtype)), expected)
        inputs = [given(r, dtype, n + r, 2) for r in range(n)]
        splits = [[1 + r * (to == 0) for to in range(n)] for r in range(n)]
        result, received = bps.alltoall(inputs[rank], torch.tensor(splits[rank]), name=str(dtype))
        assert torch.equal(result, torch.cat([inputs[r].split(splits[r])[rank] for r in range(n)]))
        assert received.tolist() == [splits[r][rank] for r in range(n)]
        result = bps.reducescatter(given(rank, dtype, 2 * n + 1, 3), op=bps.Sum, name=str(dtype))
        assert torch.equal(result, torch.tensor_split(total(dtype, 2 * n + 1, 3), n)[rank])
    assert torch.equal(bps.allgather(torch.tensor(rank), name="scalar"), torch.arange(n))


def check_gradients():
    """Of sum over ranks of (result * weights of the rank), by Horovod's factors."""
    n, rank = bps.size(), bps.rank()
    weights = [torch.arange(12.0).reshape(6, 2) * (r + 1) for r in range(n)]
    of_all = sum(weights)

    def grad(operation, weight, rows=6):
        x = torch.ones(rows, 2, requires_grad=True)
        (operation(x) * weight).sum().backward()
        return x.grad

    assert torch.equal(grad(lambda x: bps.push_pull(x, average=False, name="d"), weights[rank]), of_all)
    torch.testing.assert_close(grad(lambda x: bps.push_pull(x, name="d"), weights[rank]), of_all / n)
    sent = grad(lambda x: bps.broadcast(x, 1), weights[rank])
    torch.testing.assert_close(sent, of_all / n if rank == 1 else torch.zeros(6, 2))
    rows = rank + 1
    total_rows = n * (n + 1) // 2
    long = [torch.arange(2.0 * total_rows).reshape(-1, 2) * (r + 1) for r in range(n)]
    start = rank * (rank + 1) // 2
    torch.testing.assert_close(grad(bps.allgather, long[rank], rows), sum(long)[start : start + rows] / n)
    square = [torch.arange(2.0 * n).reshape(-1, 2) * (r + 1) for r in range(n)]
    assert torch.equal(grad(bps.alltoall, square[rank], n), torch.stack([square[r][rank] for r in range(n)]))
    part = [torch.full((1, 2), r + 1.0) for r in range(n)]
    assert torch.equal(grad(lambda x: bps.reducescatter(x, op=bps.Sum), part[rank], n), n * torch.cat(part))
    assert torch.equal(grad(bps.reducescatter, part[rank], n), torch.cat(part))

    def second(operation, weight, v):
        """Of half the weighted square of the result, as a product with v."""
        x = torch.ones(v.shape, requires_grad=True)
        (first,) = torch.autograd.grad((operation(x).square() * weight).sum() / 2, x, create_graph=True)
        return torch.autograd.grad((first * v).sum(), x)[0]

    for operation, weight, rows, factor in (
        (lambda x: bps.push_pull(x, average=False, name="d"), weights[rank], 6, 1),
        (lambda x: bps.allreduce(x, name="d"), weights[rank], 6, 1),
        (lambda x: bps.grouped_allreduce([x])[0], weights[rank], 6, 1),
        (lambda x: bps.broadcast(x, 1), weights[rank], 6, 1 / n),
        (lambda x: bps.allgather(x, name="d"), long[rank], rank + 1, 1 / n),
        (lambda x: bps.alltoall(x, name="d"), square[rank], n, 1),
        (lambda x: bps.reducescatter(x, op=bps.Sum, name="d"), part[rank], n, 1),
        (bps.reducescatter, part[rank], n, 1),
    ):
        v = given(rank, torch.float32, rows, 2)
        expected = grad(operation, factor * weight * operation(v), rows)
        torch.testing.assert_close(second(operation, weight, v), expected)


def check_what_cannot_be_scattered():
    for start in (bps.reducescatter, lambda x: bps.grouped_reducescatter([torch.ones(bps.size()), x])):
        try:
            start(torch.tensor(1.0))
            raise AssertionError("a number was scattered")
        except RuntimeError as error:
            assert "no rows" in str(error), error


def check_handles_keep_tensors():
    handles = []
    for i in range(20):
        handles.append(bps.push_pull_async(torch.full((1000,), float(i)), average=False, name=f"kept.{i}"))
    for i, handle in enumerate(handles):
        assert (bps.synchronize(handle) == i * bps.size()).all()


def check_forgotten_handles():
    for i in range(5):
        bps.push_pull_async(torch.ones(100), name=f"forgotten.{i}")
    gathered = torch.arange(bps.size()).repeat_interleave(2)
    first = bps.grouped_allgather_async([torch.full((2,), bps.rank())])
    if bps.rank() == 1:
        first = None
    second = bps.grouped_allgather_async([torch.full((2,), 10 + bps.rank())])
    assert first is None or torch.equal(first.wait()[0], gathered)
    assert torch.equal(second.wait()[0], 10 + gathered)
    bps.barrier()


def check_what_is_not_taken():
    try:
        bps.push_pull(torch.zeros(2, dtype=torch.complex64))
        raise AssertionError("complex numbers were taken")
    except TypeError as error:
        assert "complex64" in str(error)
    for thing in ([1.0, 2.0], 1.0, torch.ones(2).numpy()):
        for call in (bps.push_pull, bps.allreduce, bps.allreduce_, bps.allgather, bps.broadcast_, bps.alltoall):
            try:
                call(thing, root_rank=0) if call is bps.broadcast_ else call(thing)
                raise AssertionError(f"{call.__name__} took {thing}")
            except TypeError as error:
                assert f"type {type(thing).__name__}" in str(error) and "as_tensor" in str(error), (call, error)


def main():
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    bps.init(lazy=True)
    for name, check in chosen(globals(), sys.argv[1:]):
        check()
        print(f"ok {name[6:]}", flush=True)
    bps.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
