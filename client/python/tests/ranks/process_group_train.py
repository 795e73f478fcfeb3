"""Training over bps: the same as over gloo, and as one process that sums the ranks' shares in their order."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from checks import chosen
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import bps.torch  # noqa: F401  it registers the backend

RANK, SIZE = int(os.environ["BPS_RANK"]), int(os.environ["BPS_SIZE"])
STEPS = 4
ROWS = 6  # of each rank


class Model(torch.nn.Module):
    """Of several layers, some of which are not divisible by the ranks, with buffers."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(10, 33)
        self.norm = torch.nn.LayerNorm(33)
        self.second = torch.nn.Linear(33, 17, bias=False)
        self.last = torch.nn.Linear(17, 5)

    def forward(self, x):
        return self.last(self.second(self.norm(self.first(x).relu())).tanh())


def model():
    torch.manual_seed(1)
    return Model()


def data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 10, generator=generator), torch.randn(ROWS, 5, generator=generator)


def loss_of(net, step, rank=RANK):
    x, y = data(step, rank)
    return torch.nn.functional.mse_loss(net(x), y)


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


def train(net, optimizer):
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
    return weights(net)


def in_turn(optimizer_of):
    """One process: every rank's gradients, added in rank order, and divided once, as bps does."""
    net = model()
    optimizer = optimizer_of(net.parameters())
    for step in range(STEPS):
        gradients = [torch.autograd.grad(loss_of(net, step, rank), list(net.parameters())) for rank in range(SIZE)]
        for parameter, *shares in zip(net.parameters(), *gradients):
            total = shares[0].clone()
            for share in shares[1:]:
                total += share
            parameter.grad = total / SIZE
        optimizer.step()
    return weights(net)


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a, b, atol=1e-6):
    return all(torch.allclose(x, y, rtol=1e-5, atol=atol) for x, y in zip(a, b, strict=True))


def both(train_with, atol=1e-6):
    """What a training gives over bps and over gloo. atol: of more than two ranks, for sums that gloo rounds differently."""
    over_bps, over_gloo = train_with(None), train_with(GLOO)
    if SIZE == 2:  # the order does not matter
        assert same_bits(over_bps, over_gloo)
    else:
        assert close(over_bps, over_gloo, atol)
    return over_bps


def check_ddp():
    for optimizer_of in (sgd, adam):
        for more in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, {"static_graph": True}):

            def with_group(group):
                net = DistributedDataParallel(model(), process_group=group, **more)
                return train(net, optimizer_of(net.parameters()))

            # DDP divides each rank's gradient before the sum: by a power of two, that changes no bit.
            assert same_bits(both(with_group), in_turn(optimizer_of)), (optimizer_of, more)


def check_ddp_of_unused_parameters():
    class Halves(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.whole, self.left, self.right = (torch.nn.Linear(10, 5) for _ in range(3))

        def forward(self, x):
            return self.whole(x) + (self.left if RANK % 2 else self.right)(x)

    def with_group(group):
        torch.manual_seed(1)
        net = DistributedDataParallel(Halves(), process_group=group, find_unused_parameters=True)
        return train(net, sgd(net.parameters()))

    both(with_group)


def check_ddp_with_join():
    """Ranks that have more data than others."""

    def with_group(group):
        net = DistributedDataParallel(model(), process_group=group)
        optimizer = sgd(net.parameters())
        with net.join():
            for step in range(1 + RANK):
                optimizer.zero_grad()
                loss_of(net, step).backward()
                optimizer.step()
        return weights(net)

    both(with_group)


def check_ddp_of_sparse_gradients():
    def with_group(group):
        torch.manual_seed(1)
        net = DistributedDataParallel(torch.nn.EmbeddingBag(50, 4, sparse=True), process_group=group)
        optimizer = torch.optim.SparseAdam(net.parameters(), 0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            words = torch.randint(0, 50, (3, 4), generator=torch.Generator().manual_seed(10 * step + RANK))
            net(words).square().sum().backward()
            optimizer.step()
        return weights(net)

    both(with_group)


def check_no_sync_and_buffers():
    def with_group(group):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 5))
        net = DistributedDataParallel(net, process_group=group)
        optimizer = sgd(net.parameters())
        for step in range(STEPS):
            with net.no_sync():
                loss_of(net, step).backward()
            loss_of(net, step + 10).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(net) + [b.clone().float() for b in net.buffers()]

    both(with_group)


def check_zero():
    def with_group(group):
        net = DistributedDataParallel(model(), process_group=group)
        group = group or dist.group.WORLD
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        return train(net, optimizer)

    assert same_bits(both(with_group), in_turn(adam))


def whole(tensors):
    return [t.full_tensor().detach() if isinstance(t, DTensor) else t for t in tensors]


def check_fsdp2():
    """fully_shard(): all_gather and reduce_scatter of flat buffers, padded where they do not divide."""
    mesh = init_device_mesh("cpu", (SIZE,))
    for optimizer_of in (sgd, adam):
        net = model()
        for layer in (net.first, net.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        result = whole(train(net, optimizer_of(net.parameters())))
        assert close(result, in_turn(optimizer_of)), optimizer_of
        if SIZE in (2, 4):  # a power of two: the average is exact whenever it is taken
            assert same_bits(result, in_turn(optimizer_of)), optimizer_of


def check_fsdp2_in_two_dimensions():
    if SIZE != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = model()
    fully_shard(net.first, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert close(whole(train(net, adam(net.parameters()))), in_turn(adam))


def check_fsdp1():
    def with_group(group):
        net = FullyShardedDataParallel(
            model(), process_group=group, device_id=torch.device("cpu"), use_orig_params=True
        )
        result = train(net, sgd(net.parameters()))
        with FullyShardedDataParallel.summon_full_params(net):
            return weights(net) + [torch.tensor(float(len(result)))]

    both(with_group)


def check_dtensor():
    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(3)
    left, right = torch.randn(4 * SIZE, 7), torch.randn(7, 3 * SIZE)
    rows = distribute_tensor(left, mesh, [Shard(0)])
    columns = distribute_tensor(right, mesh, [Shard(1)])
    assert torch.allclose((rows @ columns).full_tensor(), left @ right, atol=1e-6)
    assert torch.equal(rows.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local(), left)
    inner = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    assert torch.allclose(inner.full_tensor(), left @ right, atol=1e-5)
    uneven = distribute_tensor(torch.arange(SIZE * 3.0 + 1), mesh, [Shard(0)])
    assert torch.equal(uneven.full_tensor(), torch.arange(SIZE * 3.0 + 1))
    assert uneven.sum().full_tensor().item() == sum(range(SIZE * 3 + 1))


def check_checkpoint():
    """A sharded state goes to disk and comes back in another process group."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    net, copied = (fully_shard(model(), mesh=init_device_mesh("cpu", (SIZE,))) for _ in range(2))
    train(net, sgd(net.parameters()))
    folder = sys.argv[1] + ".checkpoint"
    checkpoint.save(get_model_state_dict(net), checkpoint_id=folder)
    state = get_model_state_dict(copied)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(copied, state)
    assert same_bits(whole(weights(copied)), whole(weights(net)))


def check_ddp_hooks():
    """torch's own communication hooks: their callbacks submit further calls and wait for them."""
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook

    for hook, state_of, atol in (
        (default_hooks.allreduce_hook, lambda group: group, 1e-6),
        (default_hooks.fp16_compress_hook, lambda group: group, 1e-3),  # gloo rounds each sum of two
        (default_hooks.bf16_compress_hook, lambda group: group, 1e-2),
        (debugging_hooks.noop_hook, lambda group: group, 1e-6),
        (powerSGD_hook.powerSGD_hook, power_sgd, 1e-5),
        (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd, 1e-3),
    ):

        def with_group(group):
            net = DistributedDataParallel(model(), process_group=group)
            net.register_comm_hook(state_of(group), hook)
            return train(net, sgd(net.parameters()))

        both(with_group, atol)


def power_sgd(group):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)


def check_compiled():
    """torch.compile traces what the model does, and not what bps does for it."""

    def ddp(group):
        net = torch.compile(DistributedDataParallel(model(), process_group=group), backend="aot_eager")
        return train(net, sgd(net.parameters()))

    both(ddp)
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (SIZE,)))
    net.compile(backend="aot_eager")
    assert close(whole(train(net, sgd(net.parameters()))), in_turn(sgd))


def check_workers_of_a_data_loader():
    """Children made by fork, while the group is used."""
    source = torch.utils.data.TensorDataset(torch.arange(40.0))
    sampler = torch.utils.data.distributed.DistributedSampler(source, shuffle=False)
    loader = torch.utils.data.DataLoader(source, 5, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    total = torch.zeros(1)
    for (batch,) in loader:
        part = batch.sum().reshape(1)
        dist.all_reduce(part)
        total += part
    assert total.item() == sum(range(40)), total


torch.set_num_threads(1)
store = dist.FileStore(sys.argv[1], SIZE)
dist.init_process_group("bps", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=100))
GLOO = dist.new_group(backend="gloo")
for name, check in chosen(globals(), sys.argv[2:]):
    check()
    print(name)
dist.destroy_process_group()
print("done")
