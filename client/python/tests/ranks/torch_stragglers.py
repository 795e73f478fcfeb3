"""Training with one rank that is slow, in jobs that wait for it and in jobs that do not: all learn. Iris, 150 flowers."""

import csv
import pathlib
import time

import torch
import torch.nn.functional as F

import bps.torch as bps

IRIS = pathlib.Path(__file__).resolve().parents[3] / "examples" / "iris.csv"
STEPS = 120
SLOW = 0.004  # seconds of a step of the last rank: what makes it slow, nothing waits for it to have passed


def iris():
    rows = [row for row in csv.reader(IRIS.open()) if row and not row[0].startswith("#")]
    rows = [row for row in rows if row[0].replace(".", "").isdigit()]
    kinds = sorted({row[-1] for row in rows})
    x = torch.tensor([[float(value) for value in row[:-1]] for row in rows])
    y = torch.tensor([kinds.index(row[-1]) for row in rows])
    assert len(y) == 150 and len(kinds) == 3
    return (x - x.mean(0)) / x.std(0), y


def new_net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def train(x, y, net, optimizer):
    mine = torch.arange(bps.rank(), len(y), bps.size())
    generator = torch.Generator().manual_seed(7 + bps.rank())
    for _ in range(STEPS):
        if bps.rank() == bps.size() - 1:
            time.sleep(SLOW)
        batch = mine[torch.randperm(len(mine), generator=generator)[:16]]
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()


def same_everywhere(net):
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    everybody = bps.allgather(flat[None])
    return all(torch.equal(other, everybody[0]) for other in everybody)


def loss_with(job, **settings):
    """The loss over all flowers after training in a job of these settings."""
    bps.init(job=job, **settings)
    x, y = iris()
    asynchronous = settings.get("asynchronous", False)
    net = new_net(bps.rank() if asynchronous else 0)  # an asynchronous job begins with rank 0's
    make = torch.optim.SGD(net.parameters(), lr=0.05 if asynchronous else 0.1)
    optimizer = bps.DistributedOptimizer(make, net.named_parameters())
    before = F.cross_entropy(new_net(0)(x), y).item()
    train(x, y, net, optimizer)
    if asynchronous:
        optimizer.synchronize_parameters()
    assert same_everywhere(net), f"{job}: ranks ended with different parameters"
    with torch.no_grad():
        loss = F.cross_entropy(net(x), y).item()
    assert loss < before / 2, (job, before, loss)
    bps.shutdown()
    return loss


def check_all_learn():
    losses = {
        "wait": loss_with("wait"),
        "quorum": loss_with("quorum", quorum=2, quorum_timeout=0.001),
        "quorum_at_once": loss_with("quorum_at_once", quorum=2, staleness=3),
        "stale": loss_with("stale", asynchronous=True, staleness=3),
        "async": loss_with("async", asynchronous=True),
    }
    if losses["wait"] > 0.3:
        raise AssertionError(f"the one to compare with has not learned: {losses}")
    for name, loss in losses.items():
        assert loss < losses["wait"] + 0.25, f"{name} is far from wait: {losses}"
    print("losses", losses)


def check_quorum_goes_on():
    """The last rank does not begin before the others have ended: whoever waited for it would wait for ever."""
    steps = 3
    bps.init(job="goes_on", quorum=2, staleness=steps, asynchronous=True, request_timeout=120)
    x, y = iris()
    net = new_net(0)
    make = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = bps.DistributedOptimizer(make, net.named_parameters(), asynchronous=False)
    done = torch.zeros(1, dtype=torch.int64)
    last = bps.rank() == bps.size() - 1
    while last and int(bps.accumulate(done, "done")) < bps.size() - 1:
        time.sleep(0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    if not last:
        bps.accumulate(done + 1, "done")
    assert same_everywhere(net)
    try:
        bps.join()
        raise AssertionError("join() was taken")
    except ValueError as error:
        assert "quorum" in str(error)
    bps.barrier()
    bps.shutdown()


def check_operations():
    """accumulate() and push_pull(all_ranks=True) of arrays: nothing is lost."""
    import array

    import bps as plain

    bps.init(job="operations", asynchronous=True, quorum=1)
    n, size = 1000, bps.size()
    total = array.array("q", [0] * n)
    for step in range(5):
        mine = array.array("q", [(step + 1) * 10 ** bps.rank()] * n)
        kept = plain.accumulate(mine, "x")
        assert min(kept) >= (step + 1) * (step + 2) // 2 * 10 ** bps.rank()
        result = plain.push_pull(mine, average=False, name="y")
        total = array.array("q", [a + b for a, b in zip(total, result)])
    everything = sum(15 * 10**rank for rank in range(size))
    kept = plain.accumulate(array.array("q", [0] * n), "x", all_ranks=True)
    assert set(kept) == {everything}, (set(kept), everything)
    kept = bps.accumulate(torch.ones(n, dtype=torch.int64), "x", all_ranks=True)
    assert set(kept.tolist()) == {everything + size}
    rest = plain.push_pull(array.array("q", [0] * n), average=False, name="y", all_ranks=True)
    assert {a + b for a, b in zip(total, rest)} == {everything}
    bps.shutdown()


def check_refusals():
    bps.init(job="refusals")
    net = new_net(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        bps.DistributedOptimizer(optimizer, net.named_parameters(), asynchronous=True)
        raise AssertionError("was taken")
    except ValueError as error:
        assert "BPS_ASYNC" in str(error)
    bps.shutdown()


check_refusals()
check_quorum_goes_on()
check_operations()
check_all_learn()
print("done")
