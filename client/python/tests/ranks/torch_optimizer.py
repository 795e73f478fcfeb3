"""DistributedOptimizer against one process that takes the whole batch, and state that goes from one rank to all."""

import copy
import sys
import warnings

import torch
import torch.nn.functional as F
from checks import chosen

import bps.torch as bps
from bps.torch.elastic import TorchState

STEPS = 6
SHARE = 8  # examples of one rank in one step


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.full = torch.nn.Linear(3 * 4 * 4, 5)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.full(torch.tanh(self.conv(x)).flatten(1)) * self.scale


def batches(seed=5):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        n = SHARE * bps.size()
        yield torch.randn(n, 2, 6, 6, generator=generator), torch.randint(0, 5, (n,), generator=generator)


def new_net(seed=3):
    torch.manual_seed(seed)
    return Net()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
}


def train_alone(make):
    """The whole batch, in one process."""
    net = new_net()
    optimizer = make(net.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


def share(x, rank=None):
    return x[bps.rank() if rank is None else rank :: bps.size()]


def train_in_turn(make):
    """One process that takes each rank's share in turn and averages as the daemon does: in the order of the ranks."""
    net = new_net()
    optimizer = make(net.parameters())
    for x, y in batches():
        total = None
        for rank in range(bps.size()):
            optimizer.zero_grad()
            F.cross_entropy(net(share(x, rank)), share(y, rank)).backward()
            mine = [p.grad.clone() for p in net.parameters()]
            total = mine if total is None else [a + b for a, b in zip(total, mine)]
        for p, g in zip(net.parameters(), total):
            p.grad = g / bps.size()
        optimizer.step()
    return net


def train_together(make, passes=1, **options):
    net = new_net(3 + bps.rank())  # of different beginnings, which the broadcast ends
    bps.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = make(net.parameters())
    optimizer = bps.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), backward_passes_per_step=passes, **options
    )
    for x, y in batches():
        optimizer.zero_grad()
        for part_x, part_y in zip(share(x).chunk(passes), share(y).chunk(passes)):
            (F.cross_entropy(net(part_x), part_y) / passes).backward()
        optimizer.step()
    return net


def assert_close(one, other, **tolerance):
    for (name, p), q in zip(one.named_parameters(), other.parameters()):
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def assert_alike(net):
    """The same bits on every rank."""
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    everyone = bps.allgather(flat.view(1, -1).view(torch.int32), name=f"alike.{flat.numel()}")
    assert all(torch.equal(row, everyone[0]) for row in everyone)


def check_equals_one_process():
    for name, make in OPTIMIZERS.items():
        net = train_together(make)
        assert_alike(net)
        assert_close(net, train_alone(make), rtol=1e-4, atol=1e-5)


def check_equals_the_shares_in_turn_bit_by_bit():
    for make in OPTIMIZERS.values():
        net, other = train_together(make), train_in_turn(make)
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters()))


def check_two_passes_for_each_step():
    for name in ("sgd", "adam"):
        net = train_together(OPTIMIZERS[name], passes=2)
        assert_alike(net)
        assert_close(net, train_alone(OPTIMIZERS[name]), rtol=1e-4, atol=1e-5)


def check_compression():
    for compression in (bps.Compression.fp16, bps.Compression.bf16):
        net = train_together(OPTIMIZERS["sgd"], compression=compression)
        assert_alike(net)
        # Half precision keeps 11 bits of a gradient, bfloat16 8; six steps of 0.1 move a weight by a few hundredths.
        error = 2e-3 if compression is bps.Compression.bf16 else 3e-4
        assert_close(net, train_alone(OPTIMIZERS["sgd"]), rtol=0, atol=error)
        assert any(
            not torch.equal(p, q) for p, q in zip(net.parameters(), train_together(OPTIMIZERS["sgd"]).parameters())
        )


def check_compression_of_ones_own():
    class Halves(bps.Compression.none):
        @staticmethod
        def compress(tensor):
            return tensor.to(torch.float64) * 0.5, tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return (tensor * 2).to(ctx)

    net = train_together(OPTIMIZERS["sgd"], compression=Halves)
    assert_close(net, train_alone(OPTIMIZERS["sgd"]), rtol=1e-4, atol=1e-5)


def check_sum_and_predivide():
    def make(p):
        return torch.optim.SGD(p, lr=0.1 / bps.size())

    assert_close(train_together(make, op=bps.Sum), train_alone(OPTIMIZERS["sgd"]), rtol=1e-4, atol=1e-5)
    net = train_together(OPTIMIZERS["sgd"], gradient_predivide_factor=4.0)
    assert_close(net, train_alone(OPTIMIZERS["sgd"]), rtol=1e-4, atol=1e-5)


def check_groups():
    """Gradients that travel together are the same, and one tensor."""
    net = new_net()
    lists = [[net.scale, net.conv.weight], [net.full.bias]]
    for groups, buckets in (({"num_groups": 2}, 2), ({"groups": 1}, 1), ({"groups": 20}, 5), ({"groups": lists}, 4)):
        for compression in (bps.Compression.none, bps.Compression.bf16):
            net = new_net()
            for passes in (1, 2):
                own = dict(groups)
                if own.get("groups") is lists:
                    net = new_net()
                    own["groups"] = [[net.scale, net.conv.weight], [net.full.bias]]
                optimizer = bps.DistributedOptimizer(
                    OPTIMIZERS["adam"](net.parameters()),
                    net.named_parameters(),
                    compression=compression,
                    backward_passes_per_step=passes,
                    **own,
                )
                optimizer.zero_grad()  # the optimizer of before is gone by now, and has left its parameters
                assert len(optimizer._bps.buckets) == buckets, (groups, len(optimizer._bps.buckets))
                other = bps.DistributedOptimizer(
                    OPTIMIZERS["adam"]((copied := copy.deepcopy(net)).parameters()),
                    copied.named_parameters(),
                    compression=compression,
                    backward_passes_per_step=passes,
                )
                for each, model in ((optimizer, net), (other, copied)):
                    each.zero_grad()
                    for i in range(passes):
                        one_loss(model, bps.rank() + 10 * i).backward()
                    each.step()
                assert all(torch.equal(p, q) for p, q in zip(net.parameters(), copied.parameters())), groups
    plain = OPTIMIZERS["sgd"](net.parameters())
    for groups, words in (
        ([[net.scale], [net.scale]], "two of the groups"),
        ([[torch.nn.Parameter(torch.ones(1))]], "does not train"),
        (-1, "negative"),
        ([["scale"]], "lists of parameters"),
    ):
        try:
            bps.DistributedOptimizer(plain, net.named_parameters(), groups=groups)
            raise AssertionError(f"taken: {words}")
        except ValueError as error:
            assert words in str(error)


def check_two_optimizers_of_one_parameter():
    """Each steps with the average, in one backward pass for both as in one for each."""
    for together in (True, False):
        net, other = new_net(), new_net()
        wrap = bps.DistributedOptimizer
        both = [
            wrap(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), groups=1),
            wrap(torch.optim.SGD(net.full.parameters(), lr=0.1, momentum=0.9)),
        ]
        assert len(both[0]._bps.slots) == 5 and not both[1]._bps.slots
        alone = [torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(other.full.parameters(), lr=0.1, momentum=0.9)]
        for step in range(3):
            train_both(both, [one_loss_of(net, bps.rank() + 10 * step)], together)
            ranks = [one_loss_of(other, rank + 10 * step) for rank in range(bps.size())]
            train_both(alone, ranks, together)
        assert_alike(net)
        assert_close(net, other, rtol=1e-5, atol=1e-6)
    net = new_net()
    first = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    second = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=bps.Sum)
    try:
        second.step()
        raise AssertionError("taken: an average and a sum of one gradient")
    except ValueError as error:
        assert "wrapped twice" in str(error)
    del first


def one_loss_of(net, seed):
    return lambda: one_loss(net, seed)


def train_both(optimizers, losses, together):
    def backward():
        (sum(loss() for loss in losses) / len(losses)).backward()

    if together:
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward()
    for optimizer in optimizers:
        if not together:
            optimizer.zero_grad()
            backward()
        optimizer.step()


def check_a_wait_that_ends_early():
    net, optimizer = wrapped()
    other = new_net()
    if bps.rank() == 0:
        one_loss(net, 0).backward()
        try:
            optimizer.synchronize(timeout=0.2)
            raise AssertionError("synchronize() did not miss the other ranks")
        except bps.BpsTimeoutError as error:
            assert "not complete after 0.2 s" in str(error)
    bps.barrier()
    if bps.rank() != 0:
        one_loss(net, bps.rank()).backward()
    optimizer.synchronize(timeout=60)
    total = None
    for rank in range(bps.size()):
        for p in other.parameters():
            p.grad = None
        one_loss(other, rank).backward()
        mine = [p.grad.clone() for p in other.parameters()]
        total = mine if total is None else [a + b for a, b in zip(total, mine)]
    assert all(torch.equal(p.grad, g / bps.size()) for p, g in zip(net.parameters(), total))


def wrapped(make=OPTIMIZERS["sgd"], net=None, **options):
    net = net or new_net()
    return net, bps.DistributedOptimizer(make(net.parameters()), named_parameters=net.named_parameters(), **options)


def one_loss(net, seed=1):
    x = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(seed))
    return net(x).square().mean()


def check_gradients_are_born_in_shared_memory():
    net, optimizer = wrapped(net=new_net().to(memory_format=torch.channels_last))
    assert not net.conv.weight.is_contiguous()
    where = [slot.home.data_ptr() for slot in optimizer._bps.slots]
    assert all(p % 64 == 0 for p in where)
    for forget in (optimizer.zero_grad, net.zero_grad, lambda: optimizer.zero_grad(set_to_none=True)):
        forget()
        one_loss(net).backward()
        assert all(bucket.request is not None for bucket in optimizer._bps.buckets)  # on their way already
        optimizer.step()
        assert [p.grad.data_ptr() for p in net.parameters()] == where
        assert all(p.grad.stride() == p.stride() for p in net.parameters())
        assert any(p.grad.any() for p in net.parameters())
    optimizer.zero_grad(set_to_none=False)
    assert not any(p.grad.any() for p in net.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def check_front_layers_are_urgent():
    net, optimizer = wrapped()
    named = {id(p): name for name, p in net.named_parameters()}
    slots = sorted(optimizer._bps.slots, key=lambda slot: -slot.bucket.priority)
    assert [named[id(slot.parameter)] for slot in slots] == [name for name, _ in net.named_parameters()]
    assert len({slot.bucket.priority for slot in slots}) == len(slots)


def check_parameters_that_one_rank_does_not_use():
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    bps.broadcast_parameters(net.state_dict(), 0)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    before = net["b"].bias.detach().clone()
    optimizer.zero_grad()
    net["a" if bps.rank() else "b"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(net["b"].bias.detach(), before - 1.0 / bps.size())
    assert_alike(net)


def check_clipping():
    net, optimizer = wrapped()
    for skip in (True, False):
        optimizer.zero_grad()
        (one_loss(net, bps.rank()) * 100).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        clipped = [p.grad.clone() for p in net.parameters()]
        if skip:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        assert all(torch.equal(p.grad, c) for p, c in zip(net.parameters(), clipped))
        assert_alike(net)


def check_schedulers():
    net = new_net()
    plain = OPTIMIZERS["sgd"](net.parameters())
    early = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = bps.DistributedOptimizer(plain, net.named_parameters())
    assert optimizer is plain and isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    one_loss(net, bps.rank()).backward()
    optimizer.step()
    assert not optimizer._bps.under_way()
    assert_alike(net)
    early.step()
    late.step()
    assert abs(optimizer.param_groups[0]["lr"] - 0.025) < 1e-9


def check_closures():
    net, optimizer = wrapped(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
    bps.broadcast_parameters(net.state_dict(), 0)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = one_loss(net, bps.rank())
        loss.backward()
        seen.append(loss.item())
        # What LBFGS decides by must be the same on all ranks.
        return bps.push_pull(loss.detach(), name="closure")

    optimizer.step(closure)
    optimizer.step(closure=closure)
    assert len(seen) > 2
    assert_alike(net)


def check_misuse():
    def expect(kind, words, function):
        try:
            function()
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error: {words}")

    net, optimizer = wrapped()
    expect(ValueError, "already", lambda: bps.DistributedOptimizer(optimizer))
    plain = OPTIMIZERS["sgd"](net.parameters())
    expect(ValueError, "lacks 2", lambda: bps.DistributedOptimizer(plain, list(net.named_parameters())[2:]))
    twice = [("x", p) for p in net.parameters()]
    expect(ValueError, "twice: x", lambda: bps.DistributedOptimizer(plain, twice))
    expect(ValueError, "pairs", lambda: bps.DistributedOptimizer(plain, net.parameters()))
    expect(ValueError, "op=Average", lambda: bps.DistributedOptimizer(plain, op=bps.Sum, gradient_predivide_factor=2.0))
    bps.barrier()


def check_wrapping_again():
    """While the first is there it sends; when it is gone, the second does."""
    net, first = wrapped()
    _, optimizer = wrapped(net=net)
    assert first._bps.slots and not optimizer._bps.slots
    del first
    optimizer.zero_grad()
    assert len(optimizer._bps.slots) == 5
    one_loss(net, bps.rank()).backward()
    optimizer.step()
    assert_alike(net)


def check_two_models_with_the_same_names():
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(4, 4)
    both = [
        bps.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=1.0), m.named_parameters()) for m in (small, large)
    ]
    for model, optimizer in zip((small, large), both):
        bps.broadcast_parameters(model.state_dict(), 0)
        optimizer.zero_grad()
        (model(torch.ones(1, model.in_features)) * bps.rank()).sum().backward()
    for model, optimizer in zip((small, large), both):
        optimizer.step()
        assert_alike(model)


def check_parameters_added_later():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    bps.broadcast_parameters([("first." + n, p) for n, p in first.named_parameters()], 0)
    bps.broadcast_parameters([("second." + n, p) for n, p in second.named_parameters()], 0)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(second.parameters())})
    assert len(optimizer._bps.slots) == 4
    parameters = [*first.parameters(), *second.parameters()]
    assert optimizer._parameter_names == {p: f"noname.{i}" for i, p in enumerate(parameters)}  # as with Horovod
    optimizer.zero_grad()
    second(first(torch.full((1, 3), float(bps.rank())))).sum().backward()
    optimizer.step()
    assert_alike(first)
    assert_alike(second)


def same(a, b):
    if torch.is_tensor(a):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_state(optimizer):
    """Whether the state is that of rank 0, of which every rank gets a copy."""
    mine = optimizer.state_dict()
    return same(mine, bps.broadcast_object(mine, 0, name="state"))


class Wide(torch.optim.SGD):
    """Its state is of a wider type than its parameters."""

    def step(self, closure):
        closure()
        for p in self.param_groups[0]["params"]:
            past = self.state[p].setdefault("past", [torch.zeros_like(p, dtype=torch.float64)])[0]
            past.mul_(0.9).add_(p.grad, alpha=0.1)
            p.data.sub_(past)


def check_broadcast_of_optimizer_state():
    makers = dict(
        OPTIMIZERS,
        lbfgs=lambda p: torch.optim.LBFGS(p),
        rmsprop=lambda p: torch.optim.RMSprop(p, centered=True),
        wide=lambda p: Wide(p, lr=0.1),
    )
    for name, make in makers.items():
        net = new_net()
        optimizer = make(net.parameters())
        if bps.rank() == 0:  # as after a checkpoint, which one rank has read
            optimizer.param_groups[0]["lr"] = 0.123

            def closure():
                optimizer.zero_grad()
                loss = one_loss(net)
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.step(closure)
        bps.broadcast_parameters(net.state_dict(), 0, prefix=f"{name}.")
        bps.broadcast_optimizer_state(optimizer, root_rank=0, prefix=f"{name}.")
        assert optimizer.param_groups[0]["lr"] == 0.123
        assert same_state(optimizer), name
        saved = copy.deepcopy(optimizer.state_dict())
        TorchState(optimizer=optimizer).restore()
        assert same(saved, optimizer.state_dict()), name
        optimizer = bps.DistributedOptimizer(optimizer, net.named_parameters())
        bps.broadcast_optimizer_state(optimizer, root_rank=bps.size() - 1, prefix=f"{name}.again.")
        bps.broadcast_optimizer_state(optimizer, 0, net)  # Horovod's third argument is the model
        bps.broadcast_optimizer_state(optimizer, 0, model=net)
        assert same_state(optimizer), name


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        assert not bps.is_initialized()
        return torch.full((3,), float(i)), torch.tensor(float(i * i))


def check_workers_of_a_loader():
    net = torch.nn.Linear(3, 1)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1e-5), net.named_parameters())
    for epoch in range(2):
        loader = torch.utils.data.DataLoader(Squares(), batch_size=10, num_workers=2, multiprocessing_context="fork")
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(net(x).squeeze(1), y).backward()
            optimizer.step()
    assert bps.is_initialized()


def main():
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    bps.init()
    for name, check in chosen(globals(), sys.argv[1:]):
        check()
        print(f"ok {name[6:]}", flush=True)
    bps.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
