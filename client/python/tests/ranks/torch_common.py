"""What the scripts for torch share: models, data, and one process that does what all ranks do together."""

import copy
import sys
import warnings

import torch
import torch.nn.functional as F
from checks import chosen

import bps.torch as bps

SHARE = 8  # examples of one rank in one step


class Net(torch.nn.Module):
    """Convolution, batch normalization, a scalar, and two layers that tie a weight."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.full = torch.nn.Linear(64, 5)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.full(torch.tanh(self.norm(self.conv(x))).flatten(1)) * self.scale


def new_net(seed=3, kind=Net):
    torch.manual_seed(seed)
    return kind()


def batch(step, rank, n=SHARE):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, 2, 6, 6, generator=generator), torch.randint(0, 5, (n,), generator=generator)


def loss_of(net, step, rank, n=SHARE):
    x, y = batch(step, rank, n)
    return F.cross_entropy(net(x), y)


def average_in_turn(net, losses):
    """Gradients as bps averages them: one rank after the other, in their order. losses: a function of a net for each
    rank, or None for one that adds nothing. Buffers are those that rank 0's pass leaves behind.
    """
    total, left = None, None
    for rank, loss in enumerate(losses):
        alone = copy.deepcopy(net)
        for p in alone.parameters():
            p.grad = None
        if loss is not None:
            loss(alone).backward()
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
        total = mine if total is None else [a + b for a, b in zip(total, mine)]
        if rank == 0:
            left = alone
    for p, g in zip(net.parameters(), total):
        p.grad = g / len(losses)
    for mine, new in zip(net.buffers(), left.buffers()):
        mine.copy_(new)


def assert_same(one, other, what=""):
    for (name, p), q in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(p, q), f"{what} {name}: {(p - q).abs().max()}"


def assert_same_gradients(one, other, what=""):
    for (name, p), q in zip(one.named_parameters(), other.parameters()):
        assert torch.equal(p.grad, q.grad), f"{what} {name}: {(p.grad - q.grad).abs().max()}"


def assert_alike(net, name=""):
    """The same bits on every rank."""
    flat = torch.cat([p.detach().float().reshape(-1) for p in net.parameters()])
    everyone = bps.allgather(flat.view(1, -1).view(torch.int32), name=f"alike.{name}.{flat.numel()}")
    assert all(torch.equal(row, everyone[0]) for row in everyone)


def expect(kind, words, function):
    try:
        function()
    except kind as error:
        assert words in str(error), error
        return error
    raise AssertionError(f"no {kind.__name__}: {words}")


def run_checks(checks):
    """Those that are named on the command line, or all."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    bps.init()
    for name, check in chosen(checks, sys.argv[1:]):
        check()
        print(f"ok {name[6:]}", flush=True)
    bps.barrier()
    print("done", flush=True)
