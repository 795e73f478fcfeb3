"""What goes wrong in training, each in ranks of its own; run by its name. Two ranks."""

import os
import signal
import sys

import torch
from torch_common import assert_same, average_in_turn, batch, expect, loss_of, new_net

import bps.torch as bps


def optimizer_of(net):
    return bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())


WAYS = {
    "optimizer": lambda net: (net, optimizer_of(net)),
    "parallel": lambda net: (bps.DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)),
    "cross barrier": lambda net: (net, bps.CrossBarrier(net, torch.optim.SGD(net.parameters(), lr=0.1))),
}


def step(model, optimizer, number=0):
    optimizer.zero_grad()
    loss_of(model, number, bps.rank()).backward()
    optimizer.step()


def an_exception_in_one_rank():
    """Leaves the others an error that names the rank, wherever they wait."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends the others
    net = new_net()
    model, optimizer = WAYS[sys.argv[2]](net)
    step(model, optimizer)
    bps.barrier()  # the step() of a CrossBarrier does not wait for the gradients of the other rank
    if bps.rank() == 1:
        raise ZeroDivisionError("out of ideas")

    def go_on():
        for number in (1, 2):
            step(model, optimizer, number)

    expect(bps.BpsError, "rank 1", go_on)
    # What is left of the model can be saved.
    assert len([p.sum().item() for p in net.state_dict().values()]) == len(net.state_dict())
    print("named", flush=True)


def exit_with_gradients_under_way():
    net = new_net()
    optimizer = optimizer_of(net) if sys.argv[2] == "optimizer" else bps.CrossBarrier(net, optimizer_of(net))
    step(net, optimizer)
    loss_of(net, 1, bps.rank()).backward()
    if sys.argv[2] != "optimizer":
        optimizer.step()
    print("done", flush=True)
    if bps.rank() == 0:
        sys.exit(0)  # and rank 1 comes to its end


def one_rank_does_not_train():
    bps.shutdown()
    bps.init(request_timeout=1)
    net = new_net()
    optimizer = optimizer_of(net)
    if bps.rank() == 0:
        loss_of(net, 0, 0).backward()
        expect(bps.BpsTimeoutError, "rank 1", optimizer.step)
        expect(bps.BpsTimeoutError, "rank 1", optimizer.step)  # another round, as lonely
    assert bps.broadcast_object("the job goes on", 0, timeout=60)
    print("done", flush=True)


def again():
    bps.barrier()  # by then the other rank has what it waits for
    bps.shutdown()
    bps.init()


def shutdown_and_init_again():
    """What was made before trains on, and what was under way is lost."""
    for name, way in WAYS.items():
        alone, net = new_net(), new_net()
        model, optimizer = way(net)

        def step_as_alone(number):
            step(model, optimizer, number)
            average_in_turn(alone, [lambda one, r=r: loss_of(one, number, r) for r in range(bps.size())])
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
            assert_same(net, alone, name)

        step_as_alone(0)
        again()
        step_as_alone(1)
        if name != "parallel":
            loss_of(model, 2, bps.rank()).backward()
            again()
            if name == "optimizer":
                expect(bps.BpsCanceledError, "are lost", optimizer.step)
            step_as_alone(2)
            loss_of(model, 3, bps.rank()).backward()
            if name == "cross barrier":
                optimizer.step()
            again()
        step_as_alone(3)
        again()
        if name == "optimizer":
            join_at_once(net, optimizer, alone)
    rows_again()
    asynchronously_again()
    print("done", flush=True)


def join_at_once(net, optimizer, alone):
    """Also of a rank that has not trained in this job."""
    if bps.rank() == 0:
        step(net, optimizer)
    bps.join()
    if bps.rank() == 0:
        average_in_turn(alone, [lambda one: loss_of(one, 0, 0), None])
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        assert_same(net, alone)
    again()


def rows_again():
    """Beside what the new job has had before it."""

    def trained(table):
        optimizer = bps.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
        return lambda: step_by_rows(table, optimizer)

    def step_by_rows(table, optimizer):
        optimizer.zero_grad()
        table(torch.tensor([bps.rank()])).sum().backward()
        optimizer.step()

    torch.manual_seed(5)
    tables = [torch.nn.Embedding(3, 2, sparse=True) for _ in range(2)]
    before = [table.weight.detach().clone() for table in tables]
    first = trained(tables[0])
    first()
    again()
    second = trained(tables[1])
    second()
    first()
    second()
    for table, was in zip(tables, before):
        assert torch.equal(table.weight.detach(), was - torch.tensor([[1.0], [1.0], [0.0]]))


def asynchronously_again():
    """All begin with rank 0's parameters in the next job, too. Each step of a rank takes 1 from them."""

    def next_job():
        bps.barrier()
        bps.shutdown()
        bps.init(asynchronous=True)

    next_job()
    weight = torch.nn.Parameter(torch.full((3,), 10.0 * (bps.rank() + 1)))
    optimizer = bps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    for left in (8.0, 6.0):
        weight.grad = torch.ones(3)
        optimizer.step()
        optimizer.synchronize_parameters()
        assert weight.tolist() == [left] * 3, weight
        next_job()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        assert not bps.is_initialized()
        return batch(i, 0, 1)[0][0], 0


def loaders_that_fork_while_gradients_are_under_way():
    """In memory that is shared with the daemon, and with a thread that completes futures."""
    net = new_net()
    optimizer = bps.CrossBarrier(net, optimizer_of(net))
    from bps.torch._futures import future_of

    for number in range(3):
        loader = torch.utils.data.DataLoader(Numbers(), 4, num_workers=2, multiprocessing_context="fork")
        future = future_of(bps.push_pull_async(torch.ones(10), average=False, name="aside"))
        for x, _ in loader:
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
        assert future.wait()[0] == bps.size()
    optimizer.synchronize()
    bps.barrier()
    print("done", flush=True)


def shapes_differ():
    """Of as many elements: a matrix is not summed with its transpose."""
    shape = (2, 3) if bps.rank() else (3, 2)
    ways = {
        "push_pull": bps.push_pull,
        "allreduce": bps.allreduce,
        "broadcast": lambda x, **more: bps.broadcast(x, 0, **more),
        "reducescatter": bps.reducescatter,
    }
    for kind, way in ways.items():
        for name in None, kind:
            try:
                way(torch.ones(shape), name=name)
            except RuntimeError as error:
                assert "2x3" in str(error) and "3x2" in str(error), error
            else:
                raise AssertionError(f"{kind}, {name}: nobody said that the ranks differ")
    assert bps.allreduce(torch.ones(2, 3), op=bps.Sum, name="in turn").tolist() == [[2.0] * 3] * 2
    assert bps.allreduce(torch.ones(3, 2), op=bps.Sum, name="in turn").tolist() == [[2.0] * 2] * 3
    print("done", flush=True)


def main():
    torch.set_num_threads(1)
    bps.init()
    assert os.environ.get("BPS_RANK") is not None
    globals()[sys.argv[1]]()


if __name__ == "__main__":
    main()
