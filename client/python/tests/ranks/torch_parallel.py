"""DistributedDataParallel, and the hook for torch's, against one process that takes the ranks' batches in turn."""

import contextlib
import errno
import itertools
import os

import torch
import torch.distributed as dist
from torch_common import (
    Net,
    assert_alike,
    assert_same,
    assert_same_gradients,
    average_in_turn,
    batch,
    expect,
    loss_of,
    new_net,
    run_checks,
)

import bps.torch as bps
from bps.torch import _shared_storage

STEPS = 4


def everyone(step, ranks=None):
    """losses for average_in_turn()"""
    return [
        (lambda net, rank=rank: loss_of(net, step, rank)) if ranks is None or rank in ranks else None
        for rank in range(bps.size())
    ]


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def check_equals_the_shares_in_turn_bit_by_bit():
    for cap, set_to_none in itertools.product((25, 0, 0.0005), (True, False)):
        mine = bps.DistributedDataParallel(new_net(3 + bps.rank()), bucket_cap_mb=cap)
        alone = new_net(3)
        together, apart = adam(mine), adam(alone)
        for step in range(STEPS):
            together.zero_grad(set_to_none=set_to_none)
            loss_of(mine, step, bps.rank()).backward()
            average_in_turn(alone, everyone(step))
            assert_same_gradients(mine, alone, cap)
            together.step()
            apart.step()
        assert_same(mine, alone)


def check_buckets():
    assert len(bps.DistributedDataParallel(Net(), bucket_cap_mb=0)._gradients.buckets) == 7
    ddp = bps.DistributedDataParallel(Net())
    (bucket,) = ddp._gradients.buckets
    assert [slot.parameter.shape for slot in bucket.slots] == [p.shape for p in ddp.parameters()]
    net = Net()
    net.norm.half()
    assert len(bps.DistributedDataParallel(net)._gradients.buckets) == 3  # another type lies in between


def check_state_dict_and_interface():
    net = new_net()
    ddp = bps.DistributedDataParallel(net, None, None, 0, True, None, 25, False, False, True)
    assert list(ddp.state_dict()) == [f"module.{name}" for name in net.state_dict()]
    ddp.load_state_dict({f"module.{k}": v.clone() for k, v in new_net(9).state_dict().items()})
    assert_same(net, new_net(9))
    ddp.synchronize()
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    expect(RuntimeError, "no parameter", lambda: bps.DistributedDataParallel(frozen))
    expect(ValueError, "device_ids", lambda: bps.DistributedDataParallel(Net(), device_ids=[0, 1]))
    expect(TypeError, "broadcast_buffers", lambda: bps.DistributedDataParallel(Net(), ["cpu"], True))  # BytePS's order
    expect(ValueError, "negative", lambda: bps.DistributedDataParallel(Net(), bucket_cap_mb=-1))
    expect(ValueError, "process_set", lambda: bps.DistributedDataParallel(Net(), process_group=object()))
    moved = bps.DistributedDataParallel(Net(), device_ids=["cpu"])
    assert moved(batch(0, 0)[0]).shape == (8, 5)


def check_no_sync():
    mine = bps.DistributedDataParallel(new_net())
    total = None
    for rank in range(bps.size()):
        net = new_net()
        for step in range(3):
            loss_of(net, step, rank).backward()
        grads = [p.grad for p in net.parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads)]
    for step in range(3):
        with mine.no_sync() if step < 2 else contextlib.nullcontext():
            loss = loss_of(mine, step, bps.rank())
        before = [p.grad.clone() if p.grad is not None else None for p in mine.parameters()]
        loss.backward()
        assert not mine._gradients.under_way()
        if step < 2:
            for p, b in zip(mine.parameters(), before):
                assert p.grad.data_ptr() and (b is None or not torch.equal(p.grad, b))
    for p, q in zip(mine.parameters(), total):
        assert torch.equal(p.grad, q / bps.size())


def check_buffers():
    for wanted in (True, False):
        mine = bps.DistributedDataParallel(new_net(3 + bps.rank()), broadcast_buffers=wanted)
        alone = new_net(3)
        for step in range(2):
            loss_of(mine, step, bps.rank()).backward()
            average_in_turn(alone, everyone(step))
        mine(batch(9, 0)[0])  # brings those of rank 0, and makes the same of them
        alone(batch(9, 0)[0])
        same = all(torch.equal(a, b) for a, b in zip(mine.module.buffers(), alone.buffers()))
        assert same == (wanted or bps.rank() == 0)
        with torch.no_grad():  # an evaluation by one rank waits for nobody
            if bps.rank() == 0:
                mine(batch(9, 0)[0])
    net = Net()
    net._ddp_params_and_buffers_to_ignore = ["norm.running_mean", "scale"]
    net.norm.running_mean += bps.rank()
    net.scale.data += bps.rank()
    net = bps.DistributedDataParallel(net).module
    assert net.scale.item() == 1.0 + bps.rank() and net.norm.running_mean[0] == bps.rank()


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.nobody = (torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x, way):
        return {"out": [getattr(self, way)(x)]}


def check_unused_parameters():
    for find, set_to_none in itertools.product((True, False), (True, False)):
        mine = bps.DistributedDataParallel(new_net(3, Branches), find_unused_parameters=find)
        alone = new_net(3, Branches)
        together = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
        apart = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)

        def loss(net, rank):
            return net(torch.full((1, 2), rank + 1.0), "a" if rank % 2 else "b")["out"][0].square().sum()

        for step in range(3):
            together.zero_grad(set_to_none=set_to_none)
            loss(mine, bps.rank()).backward()
            average_in_turn(alone, [lambda net, rank=rank: loss(net, rank) for rank in range(bps.size())])
            # Nobody's stays as it is in one process.
            alone.nobody.weight.grad = alone.nobody.bias.grad = None
            if bps.size() == 1:
                alone.a.weight.grad = alone.a.bias.grad = None
            assert mine.module.nobody.weight.grad is None
            together.step()
            apart.step()
        assert_same(mine, alone, find)


def check_gradients_of_something_else():
    """torch.autograd.grad() reaches no parameter's gradient: one rank may call it alone."""
    mine = bps.DistributedDataParallel(new_net(3, Branches))
    out = mine(torch.ones(1, 2), "a")["out"][0]
    if bps.rank():
        torch.autograd.grad(out.sum(), mine.module.a.bias, retain_graph=True)
    assert mine.module.a.bias.grad is None
    out.sum().backward()
    assert mine.module.a.bias.grad[0] == 1.0


def check_several_instances():
    """Two with the same names, whose gradients come from one backward pass in another order on each rank."""
    first, second = (bps.DistributedDataParallel(new_net(seed), broadcast_buffers=False) for seed in (3, 4))
    alone = [new_net(3), new_net(4)]
    for step in range(2):
        order = (first, second) if bps.rank() % 2 else (second, first)
        for net in (first, second):
            net.zero_grad()
        if step == 0:
            sum(loss_of(net, step, bps.rank()) for net in order).backward()
        else:
            for net in (first, second):
                loss_of(net, step, bps.rank()).backward()
        for mine, other in zip((first, second), alone):
            average_in_turn(other, everyone(step))
            assert_same_gradients(mine, other)


def check_two_backward_passes():
    """Two losses of one pass: gradients add up, as in one process."""
    mine = bps.DistributedDataParallel(new_net().double())
    x = batch(0, bps.rank())[0].double()
    out = mine(x)
    out[:, 0].sum().backward(retain_graph=True)
    out[:, 1].sum().backward()
    alone = new_net().double()
    average_in_turn(alone, [lambda net, r=r: net(batch(0, r)[0].double())[:, :2].sum() for r in range(bps.size())])
    for p, q in zip(mine.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


class Checkpointed(Net):
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = checkpoint(self.conv, x.requires_grad_(), use_reentrant=True)
        x = torch.tanh(self.norm(x)).flatten(1)
        return checkpoint(self.full, x, use_reentrant=True) * self.scale


def check_checkpoints():
    """A backward pass inside another is not the end of it."""
    mine, alone = bps.DistributedDataParallel(new_net(3, Checkpointed), bucket_cap_mb=0), new_net(3, Checkpointed)
    loss_of(mine, 0, bps.rank()).backward()
    average_in_turn(alone, everyone(0))
    assert_same_gradients(mine, alone)


def check_an_exception_in_a_backward_pass():
    mine, alone = bps.DistributedDataParallel(new_net(), bucket_cap_mb=0), new_net()

    def fail(grad):
        raise ZeroDivisionError("in the middle")

    loss = loss_of(mine, 0, bps.rank())
    if bps.rank() == 0:
        mine.module.norm.weight.register_hook(fail)
        expect(ZeroDivisionError, "middle", loss.backward)
        expect(RuntimeError, "synchronize()", lambda: mine(batch(1, 0)[0]))
        mine.synchronize()  # for the others, who wait
    else:
        loss.backward()
    average_in_turn(alone, everyone(0))
    assert torch.equal(mine.module.full.weight.grad, alone.full.weight.grad)
    if bps.rank() == 0:
        mine.module.norm.weight._backward_hooks.clear()
    mine.zero_grad()
    loss_of(mine, 1, bps.rank()).backward()
    assert_alike(mine)


def check_compression_and_types():
    for dtype, compression in itertools.product(
        (torch.float64, torch.float32, torch.bfloat16, torch.float16), (bps.Compression.none, bps.Compression.bf16)
    ):
        mine = bps.DistributedDataParallel(new_net(3, Branches).to(dtype), compression=compression)
        mine(torch.full((1, 2), bps.rank() + 1.0, dtype=dtype), "a")["out"][0].sum().backward()
        assert mine.module.a.weight.grad.dtype == dtype
        assert mine.module.a.weight.grad[0, 0] == sum(range(1, bps.size() + 1)) / bps.size()


def check_uneven_inputs():
    """Rank r has r + 2 batches: those that have ended add zeros; all end with the parameters of the last."""
    for cap in (25, 0):
        mine, alone = bps.DistributedDataParallel(new_net(), bucket_cap_mb=cap), new_net()
        together, apart = adam(mine), adam(alone)
        with mine.join():
            for step in range(bps.rank() + 2):
                together.zero_grad()
                loss_of(mine, step, bps.rank()).backward()
                together.step()
        for step in range(bps.size() + 1):
            average_in_turn(alone, everyone(step, [r for r in range(bps.size()) if step < r + 2]))
            if step == 2 and bps.size() > 1:  # rank 0 has made its last buffers
                kept = [b.clone() for b in alone.buffers()]
            apart.step()
        assert_same(mine, alone)
        assert_alike(mine)
        assert bps.size() == 1 or kept
        loss_of(mine, 9, bps.rank()).backward()
    expect(ValueError, "throw", lambda: mine.join(throw_on_early_termination=True).__enter__())


def check_join_of_optimizers():
    """Two optimizers in one process, which are stepped unequally often."""
    nets = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    for net in nets:
        torch.nn.init.zeros_(net.weight)
    both = [bps.DistributedOptimizer(torch.optim.SGD(n.parameters(), lr=1.0), n.named_parameters()) for n in nets]
    for step in range(3 if bps.rank() == bps.size() - 1 else 1):
        for net, optimizer in list(zip(nets, both))[: 2 if step else 1]:
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert bps.join() == bps.size() - 1
    for number, (net, optimizer) in enumerate(zip(nets, both)):
        if bps.rank() == bps.size() - 1:
            # The first net: once all together, then twice this rank alone. The second: twice this rank alone.
            expected = -(1.0 - number + 2.0 / bps.size())
            torch.testing.assert_close(net.weight.detach(), torch.full((1, 2), expected))
    assert bps.join() == bps.size() - 1  # again, when nobody has trained since
    del both, optimizer
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = bps.CrossBarrier(net, torch.optim.SGD(net.parameters(), lr=1.0))
    for _ in range(1 + bps.rank()):
        optimizer.zero_grad()
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert bps.join() == bps.size() - 1  # takes the step that was put off
    expected = -sum(bps.size() - step for step in range(1 + bps.rank())) / bps.size()
    torch.testing.assert_close(net.weight.detach(), torch.full((1, 1), expected))
    optimizer.synchronize()
    del optimizer
    only_max = bps.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0), op=bps.Max)
    expect(ValueError, "op=Average", bps.join)
    del only_max


def check_join_with_other_operations():
    """A loop that averages its loss, too, and ends at another step on each rank."""
    net = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    for step in range(1 + 2 * bps.rank()):
        trains = sum(1 + 2 * rank > step for rank in range(bps.size()))
        optimizer.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        assert bps.push_pull(torch.ones(1), average=False, name="trains") == trains
        optimizer.step()
        assert bps.push_pull(torch.full((3,), 2.0), average=True)[1] == 2.0 * trains / bps.size()
    assert bps.join() == bps.size() - 1
    bps.broadcast_parameters(net.state_dict(), bps.size() - 1)
    steps = range(2 * bps.size() - 1)
    expected = -sum(sum(1 + 2 * rank > step for rank in range(bps.size())) for step in steps) / bps.size()
    torch.testing.assert_close(net.weight.detach(), torch.full((1, 2), expected))
    assert bps.allgather_object(bps.rank()) == list(range(bps.size()))


def check_join_of_a_model_with_buffers():
    """Beside what else the others sum, by the model's own join() and by that of all."""
    for own in (True, False):
        mine = bps.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with mine.join(enable=own):
            for step in range(1 + bps.rank()):
                optimizer.zero_grad()
                loss = mine(torch.randn(4, 2)).square().sum()
                trains = bps.push_pull(torch.ones(1), average=False, name="trains")
                assert trains == bps.size() - step
                loss.backward()
                optimizer.step()
        if own:
            assert_alike(mine)
        else:
            assert bps.join() == bps.size() - 1
        assert bps.push_pull(torch.ones(1), average=False) == bps.size()


def check_join_beside_a_process_set():
    """What a rank has under way in a set goes on, too, while it has joined; that of all ranks with its name is refused."""
    if bps.size() < 3:  # on two ranks, 0 and 1 are the set of all
        return
    both, x = bps.add_process_set([0, 1]), torch.ones(2)
    under_way = bps.allgather_async(x, process_set=both) if bps.rank() == 1 else None
    if bps.rank() != 1:
        expect(bps.BpsError, "rank 1 has joined", lambda: bps.allgather(x))
    if bps.rank() == 0:
        assert len(bps.allgather(x, process_set=both)) == 4
    bps.join()
    if under_way is not None:
        assert len(under_way.wait()) == 4
    bps.remove_process_set(both)


class Scalar(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(40, 40) for _ in range(6)])

    def forward(self, x):
        return self.layers(x)


def hooked(state, net, **options):
    """torch's own, in a group of its own process: the ranks meet in bps alone."""
    ddp = torch.nn.parallel.DistributedDataParallel(net, **options)
    ddp.register_comm_hook(state, bps.ddp_hook)
    return ddp


def is_mapped(address):
    """Whether memory of our making lies there."""
    with open("/proc/self/maps") as maps:
        lines = maps.readlines()
    for line in lines:
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        if low <= address < high:
            return "memfd:bps-bucket" in line
    raise AssertionError("not mapped at all")


def expect_own_after_fork(ddp):
    """What a child of fork() does to gradients, it does to copies."""
    before = [p.grad.clone() for p in ddp.parameters()]
    child = os.fork()
    if not child:
        for p in ddp.parameters():
            p.grad.fill_(100)
        os._exit(7 if all(bool((p.grad == 100).all()) for p in ddp.parameters()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert all(torch.equal(p.grad, q) for p, q in zip(ddp.parameters(), before))


def check_hook_of_torch():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def loss(net, step, rank):
        generator = torch.Generator().manual_seed(100 * step + rank)
        return net(torch.randn(4, 40, generator=generator)).square().sum()

    for view, cap, own in itertools.product((True, False), (25, 0.01), (True, False)):
        state = bps.DDPHookState(name=f"hook.{view}.{cap}") if own else None
        ddp = hooked(state, new_net(3, Scalar), gradient_as_bucket_view=view, bucket_cap_mb=cap)
        alone = new_net(3, Scalar)
        together, apart = adam(ddp), adam(alone)
        for step in range(STEPS):
            together.zero_grad()
            if step == 2:
                with ddp.no_sync():
                    loss(ddp, step, bps.rank()).backward()
                together.zero_grad()
            loss(ddp, step, bps.rank()).backward()
            average_in_turn(alone, [lambda net, r=r: loss(net, step, r) for r in range(bps.size())])
            assert_same_gradients(ddp, alone, (view, cap, step))
            together.step()
            apart.step()
        assert_same(ddp, alone)
        if view:
            assert all(is_mapped(p.grad.data_ptr()) for p in ddp.parameters())
        expect_own_after_fork(ddp)
        grads = [p.grad for p in ddp.parameters()]
        del ddp, together, state  # the buckets' memory is unmapped with its last view
        assert all(g.isfinite().all() for g in grads)
        del grads

    def full(number):
        raise bps.BpsError(number, "there is no room")

    # Where there is no room, buckets are copied.
    for owner, what, instead, mapped in (
        (_shared_storage, "SHARED_MEMORY", "/dev/null/nothing", False),
        (os, "memfd_create", lambda *_: full(errno.EMFILE), False),
        (_shared_storage, "_imported", lambda *_: full(errno.EDQUOT), True),
    ):
        known = getattr(owner, what)
        setattr(owner, what, instead)
        try:
            ddp, alone = (
                hooked(bps.DDPHookState(f"copied.{what}"), new_net(3, Scalar), gradient_as_bucket_view=True),
                new_net(3, Scalar),
            )
            loss(ddp, 0, bps.rank()).backward()
        finally:
            setattr(owner, what, known)
        average_in_turn(alone, [lambda net, r=r: loss(net, 0, r) for r in range(bps.size())])
        assert_same_gradients(ddp, alone)
        assert all(is_mapped(p.grad.data_ptr()) == mapped for p in ddp.parameters())
        if mapped:
            expect_own_after_fork(ddp)

    for compression, bound in ((bps.Compression.fp16, 2e-3), (bps.Compression.bf16, 2e-2)):
        ddp, alone = (
            hooked(bps.DDPHookState(compression, compression=compression), new_net(3, Scalar)),
            new_net(3, Scalar),
        )
        loss(ddp, 0, bps.rank()).backward()
        average_in_turn(alone, [lambda net, r=r: loss(net, 0, r) for r in range(bps.size())])
        for p, q in zip(ddp.parameters(), alone.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=bound, atol=bound * q.grad.abs().max().item())
            assert not torch.equal(p.grad, q.grad)
    ddp = hooked(bps.DDPHookState("sum", op=bps.Sum), new_net(3, Scalar))
    loss(ddp, 0, 0).backward()
    alone = new_net(3, Scalar)
    loss(alone, 0, 0).backward()
    for p, q in zip(ddp.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad * bps.size())
    own = type("Own", (bps.Compression.none,), {})
    expect(ValueError, "compression", lambda: bps.DDPHookState(compression=own))
    dist.destroy_process_group()


def check_hook_says_who_is_missing():
    """Last but for the end: a rank that does not come is named by the error of backward()."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = hooked(bps.DDPHookState("late", timeout=1.0), new_net(3, Scalar))
    if bps.rank() == 0 and bps.size() > 1:
        expect(RuntimeError, "rank 1" if bps.size() == 2 else "ranks 1", ddp(torch.ones(1, 40)).sum().backward)
    bps.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_checks(globals())
