"""Random training loops on all ranks, each against one process of plain torch that does the averaged work: loops.py.

    torch_loops.py FRONT FIRST LAST [STORE]     the seeds from FIRST to LAST - 1

FRONT: optimizer, cross, ddp, hook, or group, which is torch's DDP on the process group "bps", whose ranks meet in the file STORE.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from loops import Loops

import bps.torch as bps


class Net(torch.nn.Module):
    """Convolutions, a branch that some batches take, and one that nobody takes unless told."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 3, 3)
        self.first = torch.nn.Linear(12, 6)
        self.branch = torch.nn.Linear(6, 6)
        self.rare = torch.nn.Linear(6, 6)
        self.last = torch.nn.Linear(6, 2)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x, way):
        h = torch.tanh(self.first(torch.tanh(self.conv(x)).flatten(1)))
        if way == 1:
            h = h + torch.tanh(self.branch(h))
        if way == 2:
            h = h + torch.tanh(self.rare(h))
        return self.last(h) * self.scale


def batch(model, seed):
    generator = torch.Generator().manual_seed(seed)
    p = next(model.parameters())
    return torch.randn(3, 2, 4, 4, generator=generator).to(p.dtype)


class World:
    """One side: the model and what trains it, and the ranks whose work it does. A wrapped side does one rank's."""

    def __init__(self, front, seed, size, ranks, kind):
        torch.manual_seed(seed)
        self.model = Net().double()
        self.front, self.size, self.ranks, self.is_wrapped = front, size, ranks, front is not None
        self.run = self.model
        self.optimizer = self.make(kind, self.model.parameters())
        self.more = []  # other optimizers
        self.kept = None
        if front == "optimizer":
            self.optimizer = bps.DistributedOptimizer(self.optimizer, self.model.named_parameters())
        elif front == "cross":
            self.optimizer = bps.CrossBarrier(self.model, self.optimizer)
        elif front == "ddp":
            self.run = bps.DistributedDataParallel(self.model)
        elif front == "hook":
            self.run = torch.nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)
            self.run.register_comm_hook(bps.DDPHookState(f"loop.{seed}"), bps.ddp_hook)
        elif front == "group":
            self.run = torch.nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)

    @staticmethod
    def make(kind, parameters):
        if kind == "adam":
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5 if kind == "momentum" else 0.0, weight_decay=0.01)

    def parameters(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def loss(self, rank, seed, way, factor=1.0):
        ways = way if isinstance(way, tuple) else (way,) * self.size
        out = self.run(batch(self.model, 97 * seed + rank), ways[rank % len(ways)])
        return factor * out.square().mean() * (rank + 1)

    def backward(self, seed, way=0, ranks=None, **options):
        """ranks: those that have a batch."""
        mine = [rank for rank in self.ranks if ranks is None or rank in ranks]
        if mine:
            total = sum(self.loss(rank, seed, way) for rank in mine)
            (total if self.is_wrapped else total / self.size).backward(**options)

    def synchronize(self):
        if self.front in ("optimizer", "cross"):
            self.optimizer.synchronize()

    def close(self):
        if self.front == "cross":
            self.optimizer.synchronize()
        return torch.cat([p.detach().double().reshape(-1) for p in self.model.parameters()])


# -- Actions. Each is called with a world and settings, and does to one side what it does to the other.


def zero(world, how):
    if how == "model":
        world.model.zero_grad()
    elif how == "none by hand":
        for p in world.model.parameters():
            p.grad = None
    else:
        world.optimizer.zero_grad(set_to_none=how != "zeros")


def plain_step(world, s):
    zero(world, s.zero)
    world.backward(s.seed, s.way)
    world.optimizer.step()


def clip_at_once(world, s):
    zero(world, s.zero)
    world.backward(s.seed)
    torch.nn.utils.clip_grad_norm_(world.model.parameters(), 0.05, foreach=s.coin)
    world.optimizer.step()


def clip_after_synchronize(world, s):
    zero(world, s.zero)
    world.backward(s.seed, s.way)
    world.synchronize()
    torch.nn.utils.clip_grad_value_(world.model.parameters(), 0.01)
    world.optimizer.step()


def scale_gradients(world, s):
    zero(world, s.zero)
    world.backward(s.seed, s.way)
    for p in world.model.parameters():
        if p.grad is None:
            continue
        if s.number == 0:
            p.grad.mul_(0.5)
        elif s.number == 1:
            p.grad.data = p.grad.data * 0.5
        elif s.number == 2:
            p.grad = p.grad * 0.5
        else:
            p.grad.copy_(torch.sign(p.grad))
    world.optimizer.step()


def replace_gradients(world, s):
    zero(world, s.zero)
    world.backward(s.seed)
    for p in world.model.parameters():
        p.grad = torch.full_like(p, 0.1)
    world.optimizer.step()


def drop_one_gradient(world, s):
    zero(world, s.zero)
    world.backward(s.seed)
    if s.coin:
        world.synchronize()
    world.model.first.weight.grad = None
    world.optimizer.step()


def add_noise(world, s):
    zero(world, s.zero)
    world.backward(s.seed, s.way)
    generator = torch.Generator().manual_seed(s.seed)
    for p in world.model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if p.grad is not None:
            p.grad.add_(noise.to(p.dtype), alpha=0.01)
    world.optimizer.step()


def freeze(world, s):
    layer = (world.model.conv, world.model.first, world.model.branch)[s.number % 3]
    layer.requires_grad_(not layer.weight.requires_grad)


def freeze_one(world, s):
    world.model.scale.requires_grad_(not world.model.scale.requires_grad)


def move(world, s):
    model = world.run
    if s.number == 0:
        model.float()
    elif s.number == 1:
        model.double()
    elif s.number == 2:
        model.to(memory_format=torch.channels_last)
    else:
        model.float().double()


def other_data(world, s):
    for p in world.model.parameters():
        p.data = p.data.clone()


def accumulate(world, s):
    zero(world, s.zero)
    for i in range(2 + s.coin):
        world.backward(s.seed + i, s.way)
    world.optimizer.step()


def two_losses_of_one_pass(world, s):
    zero(world, s.zero)
    mine = [world.loss(rank, s.seed, 0) for rank in world.ranks]
    total = sum(mine) if world.is_wrapped else sum(mine) / world.size
    total.backward(retain_graph=True)
    total.backward()
    world.optimizer.step()


def no_zeroing(world, s):
    world.backward(s.seed, s.way)
    world.optimizer.step()


def throw_away(world, s):
    world.backward(s.seed, s.way)
    zero(world, s.zero)


def step_twice(world, s):
    zero(world, s.zero)
    world.backward(s.seed)
    world.optimizer.step()
    world.optimizer.step()


def step_without_backward(world, s):
    zero(world, s.zero)
    world.optimizer.step()


def log_norms(world, s):
    zero(world, s.zero)
    world.backward(s.seed, s.way)
    norms = [p.grad.norm().item() for p in world.model.parameters() if p.grad is not None]
    world.optimizer.step()
    world.optimizer.param_groups[0]["lr"] = 0.02 + 0.02 / (1 + sum(norms))


def surgery(world, s):
    """Gradients of two losses, put together by hand."""
    zero(world, s.zero if s.zero not in ("zeros",) else "none")
    world.backward(s.seed)
    first = [p.grad for p in world.model.parameters()]
    if s.coin:
        first = [g.clone() if g is not None else None for g in first]
    for p in world.model.parameters():
        p.grad = None
    world.backward(s.seed + 1)
    for p, g in zip(world.model.parameters(), first):
        if p.grad is not None and g is not None:
            p.grad = p.grad + 0.5 * g
    world.optimizer.step()


def tensor_hook(world, s):
    if world.model.first.weight.requires_grad:
        world.model.first.weight.register_hook(lambda grad: grad * 0.5)


def post_hook(world, s):
    def halve(p):
        p.grad.mul_(0.5)

    world.model.last.weight.register_post_accumulate_grad_hook(halve)


def step_hook(world, s):
    parameters = list(world.model.parameters())

    def clip(*_):
        if any(p.grad is not None for p in parameters):
            torch.nn.utils.clip_grad_value_(parameters, 0.02)

    world.optimizer.register_step_pre_hook(clip)


def learning_rate(world, s):
    for group in world.optimizer.param_groups:
        group["lr"] = 0.01 * (1 + s.number)


def save_and_load(world, s):
    state = copy.deepcopy(world.optimizer.state_dict())
    world.optimizer.load_state_dict(state)


def load_parameters(world, s):
    state = {name: value * 0.9 for name, value in world.model.state_dict().items()}
    world.model.load_state_dict(state)


def evaluate(world, s):
    with torch.no_grad():
        world.model(batch(world.model, s.seed), 0)


def copy_model(world, s):
    copied = copy.deepcopy(world.model)
    copied(batch(copied, s.seed), 0).sum().backward()


def gradients_of_something_else(world, s):
    out = world.model(batch(world.model, s.seed), 0).sum()
    torch.autograd.grad(out, world.model.last.weight)


def clamp(world, s):
    with torch.no_grad():
        for p in world.model.parameters():
            p.clamp_(-0.8, 0.8)


def new_group(world, s):
    if getattr(world, "extra", None) is None:
        world.extra = torch.nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))
        world.optimizer.add_param_group({"params": [world.extra]})
    zero(world, "none")
    world.extra.grad = None
    mine = [(world.extra * (rank + 1.0)).square().sum() for rank in world.ranks]
    (sum(mine) if world.is_wrapped else sum(mine) / world.size).backward()
    world.optimizer.step()


def some_ranks_have_no_batch(world, s):
    zero(world, "none")  # which tells a CrossBarrier that synchronize() is for a new step
    world.backward(s.seed, ranks=[0])
    if s.coin:
        world.synchronize()
        torch.nn.utils.clip_grad_value_(world.model.parameters(), 0.01)
    world.optimizer.step()


def flat_parameters(world, s):
    vector = torch.nn.utils.parameters_to_vector(world.model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 0.95, world.model.parameters())


def reset_layer(world, s):
    torch.manual_seed(s.seed)
    world.model.last.reset_parameters()


def detach_gradients(world, s):
    zero(world, s.zero)
    world.backward(s.seed)
    for p in world.model.parameters():
        if p.grad is not None:
            p.grad = p.grad.detach().clone()
    world.optimizer.step()


def second_optimizer(world, s):
    """Another one over a part of the model, in turn with the first."""
    if not world.more:
        other = torch.optim.SGD(world.model.last.parameters(), lr=0.03)
        if world.front in ("optimizer", "cross"):
            names = [(f"last.{name}", p) for name, p in world.model.last.named_parameters()]
            other = bps.DistributedOptimizer(other, names)
        world.more.append(other)
    zero(world, s.zero)
    world.backward(s.seed)
    if s.coin:
        world.optimizer.step()
    world.more[0].step()


def no_sync(world, s):
    zero(world, s.zero)
    if world.front in ("ddp", "hook", "group"):
        with world.run.no_sync():
            world.backward(s.seed)
    else:
        world.backward(s.seed)
    world.backward(s.seed + 1)
    world.optimizer.step()


COMMON = [
    plain_step, clip_at_once, clip_after_synchronize, scale_gradients, replace_gradients, drop_one_gradient, add_noise, freeze,
    freeze_one, move, other_data, accumulate, two_losses_of_one_pass, no_zeroing, throw_away, step_twice, step_without_backward,
    log_norms, surgery, tensor_hook, post_hook, step_hook, learning_rate, save_and_load, load_parameters, evaluate, copy_model,
    gradients_of_something_else, clamp, flat_parameters, reset_layer, detach_gradients, second_optimizer, no_sync,
]  # fmt: skip
ACTIONS = {
    "optimizer": [*COMMON, new_group, some_ranks_have_no_batch],
    "cross": [*COMMON, new_group, some_ranks_have_no_batch],
    "ddp": COMMON,
    # What torch's own refuses, or gets wrong by itself, on gloo as well.
    "hook": [a for a in COMMON if a not in (move, freeze, freeze_one, two_losses_of_one_pass, second_optimizer)],
}
ACTIONS["group"] = ACTIONS["hook"]


ZEROS = ["none", "none", "zeros", "model", "none by hand"]
WAYS = [0, 0, 0, 1, (0, 1), (1, 0), (2, 0)]


def gather_in_group(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def begin(front, store):
    """Size, rank, and how an object of all ranks is had."""
    if front == "group":
        rank, size = int(os.environ["BPS_RANK"]), int(os.environ["BPS_SIZE"])
        dist.init_process_group("bps", store=dist.FileStore(store, size), rank=rank, world_size=size)
        return size, rank, gather_in_group
    bps.init()
    if front == "hook":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return bps.size(), bps.rank(), lambda mine: bps.allgather_object(mine, name="outcome")


def main(front, first, last, store=None):
    torch.set_num_threads(1)
    size, rank, gather = begin(front, store)
    kinds = ["sgd", "momentum", "adam"]

    def world(front, seed, ranks, kind):
        return World(front, seed, size, ranks, kind)

    loops = Loops(front, world, ACTIONS[front], plain_step, kinds, size, rank, gather, zeros=ZEROS, ways=WAYS)
    status = loops.all_of(int(first), int(last))
    if front == "group":
        dist.barrier()
        dist.destroy_process_group()
    else:
        bps.barrier()
        bps.shutdown()
    return status


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    print("done" if not status else "failed", flush=True)
    os._exit(status)
