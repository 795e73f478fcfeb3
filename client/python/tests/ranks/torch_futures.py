"""Handles as futures of torch; run by name, or all that begin with check_. Two ranks."""

import os
import signal
import sys
import threading

import torch
from checks import chosen

import bps.torch as bps
from bps.torch._futures import future_of


def expect(words, future):
    """A future that fails must fail for C++ too, which is what then() sees."""
    for wait in (future.wait, future.then(lambda f: f.value()).wait):
        try:
            wait()
        except RuntimeError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"no error: {words}")


def ones(n=1000):
    return torch.ones(n)


def check_results_and_callbacks():
    futures = [future_of(bps.push_pull_async(ones(n) * bps.rank(), average=False, name=f"r.{n}")) for n in range(1, 60)]
    seen = [f.then(lambda f: f.value().sum().item()) for f in futures]
    total = sum(range(bps.size()))
    for n, (future, sums) in enumerate(zip(futures, seen), 1):
        assert torch.equal(future.wait(), ones(n) * total)
        assert sums.wait() == n * total
    assert torch.futures.wait_all(futures)[-1].numel() == 59


def check_callbacks_that_wait():
    """As deep as they like: each in turn starts an operation and waits for it."""

    def deeper(name, depth):
        def then(future):
            x = future.value() / bps.size()
            if depth == 0:
                return x
            name_of_this = f"{name}.{depth}"
            inner = future_of(bps.push_pull_async(x, average=False, name=name_of_this)).then(deeper(name, depth - 1))
            return inner.wait()

        return then

    started = [future_of(bps.push_pull_async(ones(n), average=False, name=f"w.{n}")) for n in range(1, 9)]
    ended = [f.then(deeper(f"w.{n}", 3)) for n, f in enumerate(started, 1)]
    for n, future in enumerate(ended, 1):
        assert torch.equal(future.wait(), ones(n))


def check_operations_of_several_steps():
    mine = torch.full((bps.rank() + 1, 2), float(bps.rank()))
    gathered = future_of(bps.allgather_async(mine, name="steps"))
    rows = gathered.wait()
    assert [len(rows[rows[:, 0] == r]) for r in range(bps.size())] == [r + 1 for r in range(bps.size())]


def check_beside_threads_that_wait():
    """A wait in one thread takes in what a future waits for, and the other way round."""
    for i in range(50):
        future = future_of(bps.push_pull_async(ones(), average=False, name="beside.a"))
        bps.push_pull(ones(), name="beside.b")
        assert future.wait()[0] == bps.size()


def check_errors():
    mine = ones(7).double() if bps.rank() else ones(7)
    expect("rank", future_of(bps.push_pull_async(mine, name="wrong")))


def check_a_canceled_request():
    bps.push_pull(ones(), name="canceled")
    if bps.rank() == 0:
        handle = bps.push_pull_async(ones(), name="canceled")
        future = future_of(handle)
        handle.cancel()
        expect("BpsCanceledError", future)
    bps.barrier()
    if bps.rank() != 0:
        expect("rank 0", future_of(bps.push_pull_async(ones(), name="canceled")))


def check_a_fork():
    future = future_of(bps.push_pull_async(ones(), average=False, name="fork"))
    child = os.fork()
    if child == 0:
        os._exit(0 if not bps.is_initialized() and threading.active_count() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert future.wait()[0] == bps.size()


def under_way():
    """A future that no other rank lets come to an end."""
    bps.barrier()
    return future_of(bps.push_pull_async(ones(), name=f"of rank {bps.rank()} alone"))


def check_shutdown():
    """Last: what is under way fails, and another job may begin."""
    if bps.rank() == 0:
        future = under_way()
        bps.shutdown()
        expect("BpsCanceledError", future)
        assert not [t for t in threading.enumerate() if t.name == "bps-futures"]
    else:
        expect("rank 0", under_way())
        bps.shutdown()
    bps.init(job="another")
    assert future_of(bps.push_pull_async(ones(), average=False, name="x")).wait()[0] == bps.size()


def exit_with_work_under_way():
    if bps.rank() == 0:
        future = under_way()
        future.add_done_callback(lambda f: None)
        print("done", flush=True)
        sys.exit(0)
    expect("rank 0", under_way())
    print("done", flush=True)


def a_rank_is_killed():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends the others
    bps.push_pull(ones(), name="x")
    if bps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect("rank 1", future_of(bps.push_pull_async(ones(), name="x")))
    print("named", flush=True)


def main():
    bps.init()
    if len(sys.argv) > 1:
        return globals()[sys.argv[1]]()
    for name, check in chosen(globals(), ()):
        check()
        print(f"ok {name[6:]}", flush=True)
    bps.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
