"""One kind of trouble for each function; run by their names, each with a group of its own. Two ranks, if not said."""

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import bps.torch  # noqa: F401  it registers the backend

RANK, SIZE = int(os.environ["BPS_RANK"]), int(os.environ["BPS_SIZE"])


def init(seconds=60, place=""):
    store = dist.FileStore(f"{sys.argv[1]}.{running}{place}", SIZE)
    timeout = timedelta(seconds=seconds)
    store.set_timeout(timeout)
    dist.init_process_group("bps", store=store, rank=RANK, world_size=SIZE, timeout=timeout)
    return store


def expect(words, function, *arguments, kind=dist.DistBackendError, **more):
    try:
        function(*arguments, **more)
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__} with {words}")


def ranks_disagree_about_the_size():
    store = init()
    words = ["rank 0 has 3 elements, rank 1 4"]
    expect(words, dist.all_reduce, torch.ones(3 + RANK))
    if RANK:
        store.wait(["rank 0 has looked"])
    work = dist.all_reduce(torch.ones(3 + RANK), async_op=True)
    if not RANK:
        assert not work.is_completed() and not work.is_success() and work.exception() is None
        store.set("rank 0 has looked", "")
    expect(words, work.wait)
    assert work.is_completed() and not work.is_success() and words[0] in str(work.exception())
    future = dist.all_reduce(torch.ones(3 + RANK), async_op=True).get_future()
    expect(words, future.wait, kind=RuntimeError)
    mine = torch.ones(5)
    dist.all_reduce(mine)  # the group goes on
    assert mine.tolist() == [2] * 5


def ranks_disagree_about_the_call():
    init()
    target = torch.zeros(4, dtype=torch.uint8)
    call = (lambda: dist.all_reduce(target)) if RANK else (lambda: dist.broadcast(target, 0))
    expect(["rank 0", "rank 1"], call)


def ranks_disagree_about_the_type():
    init()
    words = ["rank 0", "rank 1", "float32", "int64"]
    for _ in range(2):
        expect(words, dist.all_reduce, torch.ones(3, dtype=torch.int64 if RANK else torch.float32))
        mine = torch.ones(5)
        dist.all_reduce(mine)
        assert mine.tolist() == [2] * 5


def one_rank_has_come_to_a_barrier():
    init()
    for _ in range(2):
        expect(["rank 0", "rank 1", "barrier"], dist.barrier if RANK else lambda: dist.all_reduce(torch.ones(3)))
        dist.barrier()


def a_rank_does_not_call():
    store = init()
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    if RANK == 0:
        expect(["Timed out", "rank 1"], dist.all_reduce, torch.ones(1))
        expect(["Timed out", "rank 1"], dist.all_reduce(torch.ones(1), async_op=True).wait)
        expect(["Timed out", "rank 1"], dist.barrier)
        expect(["rank 1"], dist.send, torch.ones(1), 1)
        store.set("over", "")
    store.wait(["over"], timedelta(seconds=300))


def a_wait_of_its_own_length():
    store = init()
    mine = torch.ones(1)
    work = dist.all_reduce(mine, async_op=True) if RANK == 0 else None
    if RANK == 0:
        expect(["Timed out"], work.wait, timedelta(milliseconds=50))
        store.set("waited", "")
    store.wait(["waited"])
    work = work or dist.all_reduce(mine, async_op=True)
    assert work.wait(timedelta(seconds=60)) and mine.item() == 2


def a_rank_does_not_come():
    expect(["Timed out", "rank 1" if RANK == 0 else "rank 0", "not come"], init, 2, f".{RANK}")  # each elsewhere


def a_rank_has_no_daemon():
    before = os.environ["BPS_SOCKET"]
    if RANK == 1:
        os.environ["BPS_SOCKET"] = "/nonexistent/bps.sock"
    expect(["/nonexistent/bps.sock", "bpslaunch"] + ["rank 1"] * (RANK == 0), init)
    os.environ["BPS_SOCKET"] = before


def a_rank_is_killed():
    """Three ranks."""
    init()
    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect(["rank 1"], dist.all_reduce, torch.ones(1))
    expect(["rank 1"], dist.all_reduce, torch.ones(1), async_op=False)
    expect([], dist.barrier)


def an_exception():
    init()
    dist.barrier()
    if RANK == 1:
        raise RuntimeError("out of ideas")
    expect(["rank 1"], dist.all_reduce, torch.ones(1))


def a_peer_is_gone():
    init()
    out = torch.zeros(1)
    work = dist.irecv(out, 1) if RANK == 0 else dist.isend(torch.ones(1), 0)
    work.wait()
    if RANK == 0:
        expect(["rank 1"], dist.irecv(out, 1).wait)  # of the pair


def destroyed_under_way():
    store = init()
    works = []
    if RANK == 0:
        works = [dist.all_reduce(torch.ones(1), async_op=True), dist.irecv(torch.ones(1), 1)]
        works[0].get_future()
    dist.destroy_process_group()
    for work in works:
        expect([], work.wait)
    store.set(f"over{RANK}", "")
    store.wait(["over0", "over1"])


def exit_with_calls_under_way():
    """Without an end of the group either. Whether the process ends well and at once is for the test to see."""
    store = init()
    if RANK == 0:
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(100)]
        works[0].get_future().then(lambda f: None)
        works.append(dist.irecv(torch.ones(1), 1))
        store.set("started", "")
    store.wait(["started"])


def a_fork():
    init()
    mine = torch.ones(1)
    work = dist.all_reduce(mine, async_op=True)
    work.get_future()  # there is a thread now
    held, forked = threading.Event(), threading.Event()

    def hold():
        with dist.group.WORLD._lock:
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(60)  # else a child that waits for a lock would do so for ever
        try:
            expect(["parent"], dist.all_reduce, torch.ones(1))
            expect(["parent"], dist.isend, torch.ones(1), 1 - RANK)
            dist.destroy_process_group()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    forked.set()
    holder.join()
    child = os.fork()
    if child == 0:
        sys.exit(0)  # with all that runs at exit
    assert os.waitpid(child, 0)[1] == 0
    work.wait()
    dist.all_reduce(mine)
    assert mine.item() == 4


def interrupted(call):
    """Ctrl-C comes when the call waits; or before, on a busy machine."""

    def interrupt_and_call():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        call()

    expect([], interrupt_and_call, kind=KeyboardInterrupt)


def ctrl_c():
    store = init()
    if RANK == 0:
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            dist.all_reduce(torch.ones(1), async_op=True).wait,
            dist.irecv(torch.ones(1), 1).wait,
        ):
            interrupted(call)
        store.set("over", "")
    store.wait(["over"])


for running in sys.argv[2:]:
    globals()[running]()
    if dist.is_initialized() and running != "exit_with_calls_under_way":
        dist.destroy_process_group()
print("done")
