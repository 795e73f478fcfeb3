"""What may be done between backward() and step(), what is refused, and what goes when a model goes. Two ranks, or four."""

import gc
import os
import weakref

import torch
from torch_common import assert_alike, expect, run_checks

import bps.torch as bps


def linear(value=0.0):
    net = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.constant_(net.weight, value)
    return net


def wrapped(net, passes=1, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    return bps.DistributedOptimizer(optimizer, net.named_parameters(), backward_passes_per_step=passes, **options)


def backward(net, value):
    """A gradient of value in each element."""
    net(torch.full((1, 3), float(value))).sum().backward()


def average(values):
    return sum(values) / bps.size()


def ranks(function):
    return average(function(rank) for rank in range(bps.size()))


def check_a_gradient_is_the_average_when_it_is_used():
    net = linear()
    optimizer = wrapped(net)
    backward(net, bps.rank() + 1)
    assert optimizer._bps.under_way()
    grad = net.weight.grad
    assert grad.shape == (1, 3) and grad.dtype == torch.float32 and not grad.is_sparse and grad.numel() == 3
    assert optimizer._bps.under_way()  # nothing of this waits
    assert grad.tolist() == [[ranks(lambda rank: rank + 1.0)] * 3] == net.weight.grad.tolist()
    assert not optimizer._bps.under_way() and type(net.weight.grad) is torch.Tensor
    optimizer.step()
    assert torch.equal(net.weight.detach(), -net.weight.grad)


def check_a_step_begins_anew_after_zero_grad():
    net = linear()
    optimizer = wrapped(net, passes=2)
    backward(net, 100)
    optimizer.zero_grad()
    backward(net, 1 + bps.rank())
    backward(net, 10 + bps.rank())
    optimizer.step()
    assert net.weight.tolist() == [[-ranks(lambda rank: 11.0 + 2 * rank)] * 3]


def check_hooks_of_a_step_see_averages():
    for first in (True, False):
        net = linear()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

        def clip(*_):
            torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)

        if first:
            optimizer.register_step_pre_hook(clip)
        optimizer = bps.DistributedOptimizer(optimizer, net.named_parameters(), backward_passes_per_step=2)
        if not first:
            optimizer.register_step_pre_hook(clip)
        backward(net, -90 if bps.rank() else 0.5 * bps.size())  # in each step one pass, which is not on its way by itself
        optimizer.step()
        assert net.weight.tolist() == [[1.0 if bps.size() > 1 else -0.5] * 3]


def check_a_gradient_that_is_held_keeps_its_values():
    net = linear()
    optimizer = wrapped(net)
    backward(net, 1 + bps.rank())
    held = net.weight.grad
    first = held.tolist()
    optimizer.zero_grad()
    backward(net, 5)
    optimizer.step()
    assert held.tolist() == first == [[ranks(lambda rank: rank + 1.0)] * 3]
    assert net.weight.grad.tolist() == [[5.0] * 3]


def check_a_forward_pass_in_no_sync():
    net = linear()
    ddp = bps.DistributedDataParallel(net)
    out = ddp(torch.full((1, 3), 1.0 + 2 * bps.rank()))
    with ddp.no_sync():
        target = ddp(torch.ones(1, 3)).detach()
    (out - target).sum().backward()
    assert net.weight.grad.tolist() == [[ranks(lambda rank: 1.0 + 2 * rank)] * 3]


def check_a_layer_that_is_unfrozen():
    net = torch.nn.Sequential(linear(1.0), torch.nn.Linear(1, 1, bias=False))
    bps.broadcast_parameters(net.state_dict(), 0)
    net[0].requires_grad_(False)
    optimizer = wrapped(net)
    for step in range(4):
        if step == 2:
            net[0].requires_grad_(True)
        optimizer.zero_grad()
        backward(net, 0.1 * (1 + bps.rank()))
        optimizer.step()
    assert len(optimizer._bps.slots) == 2 and optimizer._bps.slots[0].name == "Gradient.0.weight".replace(
        "Gradient.", optimizer._bps.prefix
    )
    assert_alike(net)


def check_a_layer_that_is_frozen_once_its_gradient_was_thrown_away():
    """Which other ranks had alone: what comes back of it is nobody's."""
    net = torch.nn.ModuleList([linear(1.0), linear(1.0)])
    optimizer = wrapped(net)
    loss = net[0](torch.ones(1, 3))
    if bps.rank() == 1 or bps.size() == 1:
        loss = loss + net[1](torch.ones(1, 3))
    loss.sum().backward()
    net.zero_grad()
    net[1].requires_grad_(False)
    net[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert net[1].weight.grad is None and net[1].weight.tolist() == [[1.0] * 3]
    assert net[0].weight.tolist() == [[0.0] * 3]


def check_ranks_that_differ_are_told():
    if bps.size() == 1:
        return
    net = torch.nn.Sequential(linear(1.0), torch.nn.Linear(1, 1, bias=False))
    net[0].requires_grad_(False)
    optimizer = wrapped(net)
    backward(net, 1)
    optimizer.step()
    if bps.rank() == 0:
        net[0].requires_grad_(True)
    optimizer.zero_grad()

    def step():
        backward(net, 1)
        optimizer.step()

    error = expect(bps.BpsError, "rank 0 has ", step)
    assert "0.weight (float32 [1, 3]), and rank" in str(error), error
    assert isinstance(error, ValueError)


def check_ranks_that_step_unequally_are_told():
    if bps.size() == 1:
        return
    net = linear()
    optimizer = wrapped(net)
    backward(net, 1)
    optimizer.step()
    backward(net, 1)
    if bps.rank() == 0:
        optimizer.step()
    else:
        optimizer.synchronize()
    backward(net, 1)
    expect(bps.BpsError, "have taken a step since their last backward pass", optimizer.synchronize)


def check_a_change_behind_our_back_is_told():
    net = linear()
    optimizer = wrapped(net)
    backward(net, 1)
    optimizer.step()
    view = net.weight.grad.view(-1)  # of the memory that the next gradient has
    optimizer.zero_grad(set_to_none=False)
    backward(net, 1)
    last = bps.size() - 1
    if bps.rank() == last:
        view.mul_(2.0)
        error = expect(bps.BpsError, "weight was changed while it was under way", optimizer.step)
        assert "call synchronize() between backward() and such a change" in str(error)
    else:
        optimizer.step()
    if bps.rank() == last:
        optimizer._bps.stepped()  # a script that goes on nevertheless
    backward(net, 1)
    expect(bps.BpsError, f"rank {last} has changed a gradient in the step before", optimizer.step)


def check_a_rank_without_a_batch_and_two_optimizers():
    """Each step is one round of what both have, on ranks that have a gradient as on those that have none."""
    net = linear()
    first, second = wrapped(net), wrapped(net)
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        if bps.rank() == 0:
            backward(net, bps.size())
        second.step()
        assert net.weight.grad.tolist() == [[1.0] * 3], step
    assert net.weight.tolist() == [[-3.0] * 3]
    del first


def check_settings_that_differ():
    net = linear()
    first = wrapped(net)
    second = wrapped(net, op=bps.Sum)
    expect(ValueError, "wrapped twice", second.step)
    del first
    second.zero_grad()
    backward(net, 1)
    second.step()
    assert net.weight.tolist() == [[-float(bps.size())] * 3]


def check_what_is_dropped_goes_at_once():
    kinds = {
        "optimizer": lambda net: wrapped(net),
        "cross": lambda net: bps.CrossBarrier(net, torch.optim.SGD(net.parameters(), lr=1.0)),
        "ddp": lambda net: bps.DistributedDataParallel(net),
    }
    gc.collect()
    gc.disable()
    try:
        for kind, wrap in kinds.items():
            net = linear()
            wrapper = wrap(net)
            backward(wrapper if kind == "ddp" else net, 1)
            if kind != "ddp":
                wrapper.step()
                wrapper.synchronize()
            gone = weakref.ref(net.weight), weakref.ref(getattr(wrapper, "_bps", None) or wrapper._gradients)
            arena = weakref.ref((getattr(wrapper, "_bps", None) or wrapper._gradients).slots[0])
            del wrapper
            net.weight.grad = None
            backward(net, 2)
            assert net.weight.grad.tolist() == [[2.0] * 3], kind  # and plain again
            del net
            assert [each() for each in (*gone, arena)] == [None] * 3, kind
    finally:
        gc.enable()


def check_a_forked_child_has_its_own():
    """Whatever it does with the model, it does to a copy, and by itself."""
    net = linear()
    optimizer = wrapped(net)
    backward(net, 1 + bps.rank())
    optimizer.step()
    before = net.weight.grad.clone(), net.weight.detach().clone()
    child = os.fork()
    if not child:
        net.weight.grad.mul_(100)
        optimizer.zero_grad()
        backward(net, 3)
        optimizer.step()
        os._exit(7 if torch.equal(net.weight.detach(), before[1] - 3) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(net.weight.grad, before[0]) and torch.equal(net.weight.detach(), before[1])
    optimizer.zero_grad()
    backward(net, 2)
    optimizer.step()
    assert net.weight.grad.tolist() == [[2.0] * 3]


def check_other_defaults():
    """What is made here is made where the tensors are, whatever the default is."""
    x = torch.ones(3) * (bps.rank() + 1)
    torch.set_default_device("meta")
    try:
        assert bps.allreduce(x, op=bps.Sum).tolist() == [sum(range(1, bps.size() + 1))] * 3
        assert bps.allgather(x).device.type == bps.reducescatter(x, op=bps.Sum).device.type == "cpu"
        net = torch.nn.Linear(3, 1, bias=False, device="cpu")
        optimizer = wrapped(net)
        net(x[None]).sum().backward()
        optimizer.step()
        assert net.weight.grad.tolist() == [[ranks(lambda rank: rank + 1.0)] * 3]
        bps.broadcast_optimizer_state(optimizer, 0)
    finally:
        torch.set_default_device(None)


if __name__ == "__main__":
    run_checks(globals())
