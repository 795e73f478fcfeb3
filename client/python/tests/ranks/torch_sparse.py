"""Sparse tensors and gradients, against dense ones and against one process that takes the whole batch."""

import sys

import torch
import torch.nn.functional as F
from checks import chosen

import bps.torch as bps

ROWS, WIDTH, SHARE, STEPS = 40, 6, 5, 6


def given(rank, dtype=torch.float32, n=None, shape=(WIDTH,)):
    """A sparse tensor, not coalesced: whole numbers, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    n = 7 * rank if n is None else n
    numbers = torch.randint(0, ROWS, (1, n), generator=generator)
    values = torch.randint(-9, 10, (n, *shape), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(numbers, values, (ROWS, *shape))


def check_allreduce():
    size, rank = bps.size(), bps.rank()
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32):
        for shape in ((WIDTH,), (2, 3), ()):
            tensors = [given(r, dtype, shape=shape) for r in range(size)]
            dense = sum(t.to_dense().double() for t in tensors)
            touched = torch.cat([t._indices()[0] for t in tensors]).unique()
            for op, divisor in ((bps.Sum, 1), (bps.Average, size)):
                if dtype == torch.int32 and op == bps.Average:
                    continue
                result = bps.allreduce(tensors[rank], op=op, name=f"{dtype}.{shape}")
                assert result.layout == torch.sparse_coo and result.is_coalesced() and result.dtype == dtype
                assert result.shape == tensors[rank].shape
                assert torch.equal(result.indices()[0], touched)
                torch.testing.assert_close(result.to_dense().double(), dense / divisor, rtol=1e-2, atol=1e-2)
                if op == bps.Sum:
                    assert torch.equal(result.to_dense().double(), dense)


def check_several_sparse_dimensions():
    size, rank = bps.size(), bps.rank()
    for shape, sparse_dim in (((5, 4), 2), ((5, 4, 3), 2), ((2, 3, 4), 3)):
        tensors = []
        for r in range(size):
            generator = torch.Generator().manual_seed(r)
            dense = torch.randint(-9, 10, shape, generator=generator).float()
            tensors.append((dense * (torch.rand(shape, generator=generator) < 0.3)).to_sparse(sparse_dim))
        result = bps.allreduce(tensors[rank], op=bps.Sum, name=f"of {sparse_dim} of {shape}")
        assert result.sparse_dim() == sparse_dim and result.is_coalesced()
        assert torch.equal(result.coalesce().to_dense(), sum(t.to_dense() for t in tensors))
        mine = torch.sparse_coo_tensor(result.indices(), result.values(), shape, check_invariants=True)
        assert torch.equal(mine.coalesce().to_dense(), result.to_dense())


def check_push_pull_names():
    size, rank = bps.size(), bps.rank()
    dense = sum(given(r).to_dense() for r in range(size))
    torch.testing.assert_close(bps.push_pull(given(rank), name="a").to_dense(), dense / size)
    handle = bps.push_pull_async(given(rank), average=False, name="b")
    assert torch.equal(bps.synchronize(handle).to_dense(), dense)
    tensor = given(rank)
    assert bps.push_pull_inplace(tensor, average=False, name="c") is tensor
    assert torch.equal(tensor.to_dense(), dense)
    handle = bps.sparse_allreduce_async(given(rank), "b.sparse", bps.Sum)
    assert torch.equal(bps.synchronize(handle).to_dense(), dense)
    handle = bps.sparse_allreduce_async(given(rank), name="b.average", op=bps.Average)
    torch.testing.assert_close(bps.synchronize(handle).to_dense(), dense / size)
    assert torch.equal(bps.sparse_allreduce_async(given(rank), "b.called", bps.Sum)().to_dense(), dense)  # Horovod's way
    try:
        bps.sparse_allreduce_async(torch.ones(3), "b.dense", bps.Sum)
        raise AssertionError("a dense tensor was taken for a sparse one")
    except TypeError as error:
        assert "sparse_coo" in str(error)
    scaled = bps.allreduce(given(rank), op=bps.Sum, prescale_factor=0.5, postscale_factor=4.0, name="d")
    assert torch.equal(scaled.to_dense(), 2 * dense)
    half = bps.allreduce(given(rank), op=bps.Sum, compression=bps.Compression.fp16, name="e")
    assert half.dtype == torch.float32 and torch.equal(half.to_dense(), dense)


def check_nothing():
    empty = given(0, n=0)
    result = bps.allreduce(empty, name="nothing")
    assert result._nnz() == 0 and result.shape == empty.shape
    mine = given(1, n=3 if bps.rank() == 0 else 0)
    result = bps.allreduce(mine, op=bps.Sum, name="one rank")
    assert torch.equal(result.to_dense(), given(1, n=3).to_dense())


def check_a_table_beyond_memory():
    size, rank = bps.size(), bps.rank()
    places, shape = torch.tensor([[0, 99_999], [7 + rank, 99_999]]), (100_000, 100_000)
    mine = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), shape)
    wanted = [1.0] * size + [2.0 * size]
    for result in (
        bps.allreduce(mine, op=bps.Sum, name="beyond"),
        bps.allreduce_(mine.clone(), op=bps.Sum, name="beyond"),
        bps.synchronize(bps.allreduce_async(mine, op=bps.Sum, name="beyond")),
    ):
        assert result.coalesce().indices().tolist() == [[0] * size + [99_999], [*range(7, 7 + size), 99_999]]
        assert result.coalesce().values().tolist() == wanted


def check_wrong_tensors():
    try:
        bps.allreduce(torch.eye(4).to_sparse_csr(), name="wrong")
        raise AssertionError("taken")
    except TypeError as error:
        assert "sparse" in str(error), error
    bps.barrier()


class Net(torch.nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        self.one = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.bag = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)

    def forward(self, x):
        return self.one(x[:, 0]) + self.bag(x[:, 1:])


class Mixed(torch.nn.Module):
    """Sparse and dense parameters side by side."""

    def __init__(self, sparse=True):
        super().__init__()
        self.net = Net(sparse)
        self.full = torch.nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.full(torch.tanh(self.net(x)))


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        n = SHARE * bps.size()
        yield torch.randint(0, ROWS, (n, 4), generator=generator), torch.randint(0, 3, (n,), generator=generator)


def train_alone(kind, make, **options):
    torch.manual_seed(3)
    net = kind(**options)
    optimizer = make(net.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        F.cross_entropy(net(x)[:, :3], y).backward()
        optimizer.step()
    return net


def train(kind, make, passes=1, sparse=True, look=lambda net: None, **options):
    torch.manual_seed(3)
    net = kind(sparse=sparse)
    bps.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = make(net.parameters())
    optimizer = bps.DistributedOptimizer(optimizer, net.named_parameters(), backward_passes_per_step=passes, **options)
    for x, y in batches():
        x, y = x[bps.rank() :: bps.size()], y[bps.rank() :: bps.size()]
        optimizer.zero_grad()
        for part in range(passes):
            F.cross_entropy(net(x[part::passes])[:, :3], y[part::passes], reduction="sum").div(len(x)).backward()
        optimizer.synchronize()
        look(net)
        with optimizer.skip_synchronize():
            optimizer.step()
    return net


def same(a, b, **tolerance):
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(p, q, msg=lambda text: f"{name}: {text}", **tolerance)


MAKERS = {
    "sgd": (Mixed, lambda p: torch.optim.SGD(p, lr=0.2)),
    "sparse adam": (Net, lambda p: torch.optim.SparseAdam(list(p), lr=0.05)),
    "adagrad": (Mixed, lambda p: torch.optim.Adagrad(p, lr=0.05)),
}


def gradients_are_sparse(net):
    for module in net.modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            assert module.weight.grad.is_sparse and module.weight.grad.is_coalesced()
            assert 0 < module.weight.grad._nnz() <= ROWS


def check_optimizers_equal_one_process():
    for name, (kind, make) in MAKERS.items():
        for passes in (1, 2):
            net = train(kind, make, passes, look=gradients_are_sparse)
            same(net, train_alone(kind, make))
            print(f"ok {name}, {passes} passes", flush=True)


def check_every_rank_has_the_same_bits():
    net = train(*MAKERS["sgd"])
    for name, parameter in net.named_parameters():
        everyone = bps.allgather(parameter.detach().unsqueeze(0), name=f"bits.{name}")
        assert all(torch.equal(everyone[0], other) for other in everyone), name


def gradients_are_dense(net):
    assert all(p.grad.layout == torch.strided for p in net.parameters())


def check_sparse_as_dense():
    make = MAKERS["sgd"][1]
    net = train(Mixed, make, look=gradients_are_dense, sparse_as_dense=True)
    same(net, train_alone(Mixed, make))
    net = train(*MAKERS["sparse adam"], look=gradients_are_sparse, sparse_as_dense=True)  # it takes no other
    same(net, train_alone(*MAKERS["sparse adam"]))


def check_compression_and_predivide():
    make = MAKERS["sgd"][1]
    net = train(Mixed, make, compression=bps.Compression.fp16)
    # A table whose gradients are not summed is off by 0.01 or more, those that travel in 16 bits by 0.00005.
    same(net, train_alone(Mixed, make), rtol=1e-3, atol=1e-3)
    net = train(Mixed, make, gradient_predivide_factor=4.0)
    same(net, train_alone(Mixed, make))


def check_a_rank_that_does_not_use_it():
    """After a step in which all did: its gradient is nothing there, and the others' arrive."""
    torch.manual_seed(3)
    net = Net()
    bps.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step == 0 or bps.rank() == 0:
            net(torch.tensor([[1, 2, 3]])).sum().backward()
        before = net.one.weight.detach().clone()
        optimizer.step()
        change = (before - net.one.weight.detach())[1]
        torch.testing.assert_close(change, torch.full((WIDTH,), 1.0 if step == 0 else 1.0 / bps.size()))


def check_a_rank_whose_first_comes_later():
    """Last: what the ranks have sent of that step waits for the others for good."""
    net = Net()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    if bps.rank() == 0:
        net(torch.tensor([[1, 2, 3]])).sum().backward()
    try:
        optimizer.step()
        raise AssertionError("a table of which rank 0 alone sends rows was stepped")
    except bps.BpsValueError as error:
        assert "rank 0 has" in str(error) and "by rows" in str(error), error


def main():
    bps.init()
    for name, check in chosen(globals(), sys.argv[1:]):
        check()
        print(f"ok {name[6:]}", flush=True)
    bps.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
