"""CrossBarrier and SyncBatchNorm."""

import copy
import io
import itertools
import types

import torch
import torch.nn.functional as F
from torch_common import assert_alike, expect, new_net, run_checks

import bps.torch as bps
from bps import _ops
from bps.torch import cross_barrier


class Text(torch.nn.Module):
    """Layers whose parameters are used by others than themselves: tied, inside attention, flattened, and never."""

    def __init__(self, sparse=False):
        super().__init__()
        self.sparse = sparse
        self.embedding = torch.nn.Embedding(20, 8, sparse=sparse)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.full = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.unused = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)

    def forward(self, words):
        x = self.embedding(words)
        x, _ = self.attention(x, x, x, need_weights=False)
        x, _ = self.recurrent(x)
        x = self.frozen(self.norm(self.full(x.mean(1))))
        return x if self.sparse else x @ self.embedding.weight.t()


def words(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 20, (4, 6), generator=generator), torch.randint(0, 20, (4,), generator=generator)


def _two_groups(parameters):
    parameters = list(parameters)
    groups = [{"params": parameters[:4], "lr": 0.1}, {"params": parameters[4:]}]
    return torch.optim.Adam(groups, lr=0.01)


OPTIMIZERS = {
    name: lambda p, name=name: getattr(torch.optim, name)(p, lr=0.01)
    for name in "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop".split()
    if hasattr(torch.optim, name)
}
OPTIMIZERS["plain"] = lambda p: torch.optim.SGD(p, lr=0.1)
OPTIMIZERS["momentum"] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)
OPTIMIZERS["foreach"] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)
OPTIMIZERS["fused"] = lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)
OPTIMIZERS["two groups"] = _two_groups


def train(make, crosses, passes=1, clip=False, steps=5, sparse=False):
    net = new_net(1, lambda: Text(sparse))
    optimizer = make(net.parameters())
    early = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    wrap = bps.CrossBarrier if crosses else lambda net, *rest, **more: bps.DistributedOptimizer(*rest, **more)
    optimizer = wrap(net, optimizer, net.named_parameters(), backward_passes_per_step=passes)
    late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = words(step * passes + part, bps.rank())
            loss = F.cross_entropy(net(x), y % 8)
            loss.backward()
            seen.append(loss.item())
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        early.step()
        late.step()
        if step == 2:
            net.eval()
            with torch.inference_mode():
                seen.append(net(x).sum().item())
            net.train()
    assert (optimizer._bps.slots[0].rows is not None) == sparse
    model = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict()["state"])
    if crosses:
        optimizer.synchronize()
        assert torch.overrides._get_current_function_mode() is None
    return seen, model, state


def assert_equal(one, other, what):
    if torch.is_tensor(one):
        assert torch.equal(one, other), what
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), what
        for key in one:
            assert_equal(one[key], other[key], (what, key))
    else:
        assert one == other, (what, one, other)


def check_cross_barrier_changes_no_bit():
    for name, make in OPTIMIZERS.items():
        for one, other in zip(train(make, False), train(make, True)):
            assert_equal(one, other, name)
    for options in ({"passes": 2}, {"clip": True}):
        for one, other in zip(train(OPTIMIZERS["Adam"], False, **options), train(OPTIMIZERS["Adam"], True, **options)):
            assert_equal(one, other, options)
    for one, other in zip(
        train(OPTIMIZERS["plain"], False, sparse=True), train(OPTIMIZERS["plain"], True, sparse=True)
    ):
        assert_equal(one, other, "sparse")


def crossed(make=lambda p: torch.optim.SGD(p, lr=1.0), net=None, **options):
    net = net or torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for p in net.parameters():
        torch.nn.init.ones_(p)
    return net, bps.CrossBarrier(net, make(net.parameters()), net.named_parameters(), **options)


def one_step(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def check_no_stale_parameter_is_seen():
    """However it is read."""
    readers = {
        "a function": lambda net: F.linear(torch.ones(1, 2), net[0].weight),
        "an operator": lambda net: net[0].weight + 0,
        "a keyword": lambda net: torch.add(input=net[0].weight, other=0),
        "a list": lambda net: torch.cat([net[0].weight.new_zeros(0, 2), net[0].weight]),
        "data": lambda net: net[0].weight.data.clone(),
        "numpy": lambda net: torch.from_numpy(net[0].weight.detach().numpy().copy()),
        "tolist": lambda net: torch.tensor(net[0].weight.tolist()),
        "state_dict": lambda net: net.state_dict()["0.weight"].clone(),
        "deepcopy": lambda net: copy.deepcopy(net)[0].weight,
        "pickle": lambda net: _saved(net)[0].weight,
        "vector": lambda net: torch.nn.utils.parameters_to_vector(net.parameters())[:4].clone(),
        "average": lambda net: torch.optim.swa_utils.AveragedModel(net).module[0].weight,
        "bps": lambda net: bps.broadcast(net[0].weight, 0),
        "another model": lambda net: torch.func.functional_call(
            torch.nn.Linear(2, 2), {"weight": net[0].weight, "bias": torch.zeros(2)}, torch.ones(1, 2)
        ),
    }
    for name, read in readers.items():
        net, optimizer = crossed()
        one_step(net, optimizer)
        assert optimizer._bps_steps.pending
        seen = read(net).detach().flatten()
        optimizer.synchronize()
        expected = read(net).detach().flatten()
        assert torch.equal(seen, expected) and not torch.equal(net[0].weight, torch.ones(2, 2)), name


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def check_steps_wait_for_their_use():
    net, optimizer = crossed()
    one_step(net, optimizer)
    first, second = net
    steps = optimizer._bps_steps
    assert len(steps.pending) == 4
    first(torch.ones(1, 2))
    assert id(first.weight) not in steps.pending
    optimizer.zero_grad()
    second(torch.ones(1, 2))
    assert not steps.pending and second.weight.grad is None
    one_step(net, optimizer)
    optimizer.state_dict()
    assert not steps.pending
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    one_step(net, optimizer)
    assert len(steps.pending) == 5
    optimizer.load_state_dict(optimizer.state_dict())
    assert not steps.pending


def check_modes_of_others():
    """The watch stays under a mode that the caller has begun, and goes when it can."""
    net, optimizer = crossed()
    one_step(net, optimizer)
    with torch.device("cpu"):
        optimizer.synchronize()
        assert not optimizer._bps_steps.pending
    one_step(net, optimizer)
    optimizer.synchronize()
    assert torch.overrides._get_current_function_mode() is None


def check_cross_barrier_refuses():
    net = torch.nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(net.parameters())
    expect(ValueError, "independent=True", lambda: bps.CrossBarrier(net, lbfgs))
    assert not hasattr(lbfgs, "_bps")

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    expect(ValueError, "Own", lambda: bps.CrossBarrier(net, Own(net.parameters(), lr=1.0)))
    _, optimizer = crossed(lambda p: Own(p, lr=1.0), net, independent=True)
    one_step(net, optimizer)
    optimizer.synchronize()
    assert torch.equal(net.weight.detach(), torch.zeros(2, 2))
    expect(ValueError, "closure", lambda: optimizer.step(lambda: None))
    expect(ValueError, "already", lambda: bps.CrossBarrier(net, optimizer))
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    expect(ValueError, "compiled", lambda: bps.CrossBarrier(torch.compile(net, backend="eager"), sgd))
    assert cross_barrier.DistributedOptimizer is bps.DistributedOptimizer and cross_barrier.init is bps.init
    wrapped = bps.DistributedOptimizer(sgd, net.named_parameters())
    assert bps.CrossBarrier(net, wrapped, num_steps=100) is wrapped
    one_step(net, wrapped)
    assert_alike(net)


# -- SyncBatchNorm


def data(seed, dtype, shape, n=13):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, *shape, generator=generator) * 3 + 2).to(dtype)


def check_sync_batch_norm_equals_one_of_the_whole_batch():
    n = 13
    cuts = [0] + [min(n, 2 + 3 * r * r) for r in range(bps.size() - 1)] + [n]
    mine = slice(cuts[bps.rank()], cuts[bps.rank() + 1])
    bounds = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
    kinds = (((5,), torch.nn.BatchNorm1d), ((5, 4), torch.nn.BatchNorm1d), ((5, 4, 4), torch.nn.BatchNorm2d))
    kinds += (((5, 2, 3, 2), torch.nn.BatchNorm3d),)
    for (dtype, bound), (shape, kind), affine, momentum in itertools.product(
        bounds.items(), kinds, (True, False), (0.1, None)
    ):
        whole, weight = data(1, dtype, shape), data(2, dtype, shape)
        torch.manual_seed(0)
        one = kind(5, affine=affine, momentum=momentum)
        if affine:
            torch.nn.init.normal_(one.weight)
            torch.nn.init.normal_(one.bias)
        if dtype == torch.float64:
            one.double()
        ours = bps.convert_sync_batchnorm(torch.nn.Sequential(copy.deepcopy(one)))[0]
        assert isinstance(ours, bps.SyncBatchNorm) and list(ours.state_dict()) == list(one.state_dict())
        for _ in range(2):
            x, part = whole.clone().requires_grad_(), whole[mine].clone().requires_grad_()
            expected, y = one(x), ours(part)
            (expected * weight).sum().backward()
            (y * weight[mine]).sum().backward()
            assert y.dtype == dtype
            torch.testing.assert_close(y, expected[mine], atol=bound, rtol=bound)
            torch.testing.assert_close(part.grad, x.grad[mine], atol=2 * bound, rtol=2 * bound)
        torch.testing.assert_close(ours.running_mean, one.running_mean)
        torch.testing.assert_close(ours.running_var, one.running_var)
        assert ours.num_batches_tracked == 2
        if affine:
            total = bps.allreduce(ours.weight.grad, op=bps.Sum)
            torch.testing.assert_close(total, one.weight.grad, atol=20 * bound, rtol=20 * bound)
        torch.testing.assert_close(ours.eval()(whole), one.eval()(whole), atol=bound, rtol=bound)


def check_sync_batch_norm_with_an_empty_rank():
    layer = bps.SyncBatchNorm(5).double()
    whole = data(1, torch.float64, (5,))
    rows = whole if bps.rank() == 0 else whole[:0]
    x = rows.clone().requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.shape == rows.shape and x.grad.isfinite().all()
    torch.testing.assert_close(layer.running_mean, 0.1 * whole.mean(0))


class OneCame:
    """The request of an elastic job to which one rank has come, as is known when the host has waited."""

    _client, came = types.SimpleNamespace(elastic=True), None

    def wait(self):
        return True

    def check(self):
        pass

    def wait_on_host(self):
        self.came = types.SimpleNamespace(n_came=1, world_size=1)


def check_sync_batch_norm_when_the_others_are_lost():
    """The rows of those that are left stand first; behind them nobody has written."""

    def gather(mine, table, name):
        table.owner.fill_(float("nan"))[0] = mine.owner
        return OneCame()

    whole, gather_all = data(1, torch.float64, (5,)), _ops.all_gather_equal
    _ops.all_gather_equal = gather
    try:
        result = bps.SyncBatchNorm(5).double()(whole)
    finally:
        _ops.all_gather_equal = gather_all
    torch.testing.assert_close(result, torch.nn.BatchNorm1d(5).double()(whole))


def check_sync_batch_norm_in_a_model():
    """With DistributedDataParallel: the same as one process on the whole batch."""

    def make():
        torch.manual_seed(4)
        layers = (torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
        return torch.nn.Sequential(*layers).double()

    one = make()
    ours = bps.DistributedDataParallel(bps.SyncBatchNorm.convert_sync_batchnorm(make()))
    assert isinstance(ours.module[1], bps.SyncBatchNorm)
    apart, together = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (one, ours))
    for step in range(4):
        whole = data(step, torch.float64, (3,), n=4 * bps.size())
        for net, optimizer, x in ((one, apart, whole), (ours, together, whole[bps.rank() :: bps.size()])):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(one.parameters(), ours.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(one[1].running_var, ours.module[1].running_var)


def check_sync_batch_norm_refuses():
    layer = bps.SyncBatchNorm(5)
    expect(ValueError, "2 dimensions", lambda: layer(torch.ones(5)))
    expect(ValueError, "4 channels", lambda: layer(torch.ones(2, 4)))
    expect(ValueError, "process_set", lambda: bps.SyncBatchNorm(5, process_set=object()))
    x = data(1, torch.float32, (5,)).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    expect(RuntimeError, "once_differentiable", lambda: first.sum().backward())
    if bps.size() == 1:
        expect(ValueError, "more than 1 value", lambda: layer(torch.ones(1, 5)))


if __name__ == "__main__":
    run_checks(globals())
