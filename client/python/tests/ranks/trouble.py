"""One kind of trouble for each function; run by its name. Two ranks, unless the test says otherwise."""

import array
import errno
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time

import bps
from bps import _ops
from bps._completer import completer_of


def ones():
    return array.array("f", [1.0] * 1000)


def expect(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            assert word in str(error), error
        return error
    raise AssertionError(f"no {kind.__name__}")


FLAG = os.path.join(os.path.dirname(os.environ["BPS_SOCKET"]), "flag")  # in the launcher's own folder


def raise_flag():
    """Tells the other rank without bps."""
    open(FLAG, "w").close()


def await_flag():
    while not os.path.exists(FLAG):
        time.sleep(0.01)


def a_rank_is_killed():
    bps.init()
    bps.barrier()
    if bps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect(bps.BpsError, lambda: bps.push_pull(ones(), name="x"), "rank 1")
    expect(bps.BpsError, lambda: bps.push_pull(ones(), name="x"))


def a_rank_leaves():
    bps.init()
    bps.barrier()
    if bps.rank() == 1:
        bps.shutdown()
    else:
        expect(bps.BpsError, lambda: bps.push_pull(ones(), name="x"), "rank 1")


def a_rank_does_not_come():
    bps.init(request_timeout=1)
    bps.push_pull(ones(), name="x", timeout=60)
    if bps.rank() == 0:
        expect(bps.BpsTimeoutError, lambda: bps.push_pull(ones(), name="x"), "rank 1")
        raise_flag()
    await_flag()
    assert bps.broadcast_object("the job goes on", name="y", timeout=60) == "the job goes on"


def a_rank_does_not_join():
    if os.environ["BPS_RANK"] == "0":
        expect(bps.BpsTimeoutError, lambda: bps.init(timeout=0.5), "rank 1")
        assert not bps.is_initialized()


def an_impatient_wait():
    bps.init()
    bps.push_pull(ones(), name="x")
    if bps.rank() == 0:
        handle = bps.push_pull_async(ones(), average=False, name="x")
        expect(bps.BpsTimeoutError, lambda: bps.synchronize(handle, timeout=0.3))
        assert not bps.poll(handle)
    bps.barrier()
    if bps.rank() == 1:
        handle = bps.push_pull_async(ones(), average=False, name="x")
    assert handle.wait(30)[0] == 2.0


def a_canceled_request():
    bps.init()
    bps.push_pull(ones(), name="x")
    if bps.rank() == 0:
        handle = bps.push_pull_async(ones(), name="x")
        assert not handle.poll()
        handle.cancel()
        expect(bps.BpsCanceledError, handle.wait)
        expect(bps.BpsCanceledError, handle.wait)
    bps.barrier()
    if bps.rank() == 1:
        expect(bps.BpsError, lambda: bps.push_pull(ones(), name="x"), "rank 0")
    bps.barrier()
    assert bps.push_pull(ones(), average=False, name="x")[0] == 2.0


def interrupted(function):
    """Ctrl-C comes when the function waits; or before, on a busy machine."""

    def interrupt_and_call():
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        function()

    expect(KeyboardInterrupt, interrupt_and_call)


def ctrl_c_in_a_wait():
    bps.init()
    bps.push_pull(ones(), name="x")
    if bps.rank() == 0:
        handle = bps.push_pull_async(ones(), average=False, name="x")
        interrupted(handle.wait)
    bps.barrier()
    if bps.rank() == 1:
        handle = bps.push_pull_async(ones(), average=False, name="x")
    assert handle.wait()[0] == 2.0  # nothing was lost


def ctrl_c_in_init():
    if os.environ["BPS_RANK"] == "0":
        interrupted(bps.init)
        assert not bps.is_initialized()


def others_run_meanwhile():
    bps.init()
    bps.push_pull(ones(), name="x")

    def run():
        while not bps._current().inside:
            time.sleep(0.001)
        for _ in range(500):
            time.sleep(0)  # gives up the interpreter's lock, and needs it again
        raise_flag()

    if bps.rank() == 0:
        handle = bps.push_pull_async(ones(), name="x")
        thread = threading.Thread(target=run)
        thread.start()
        handle.wait(60)  # rank 1 takes part when the thread has come to its end: with the lock held, that is minutes
        thread.join()
    else:
        await_flag()
        bps.push_pull(ones(), name="x")


def several_threads():
    bps.init()
    failed = []

    def work(number):
        try:
            for i in range(50):
                assert bps.push_pull(ones(), average=False, name=f"thread.{number}")[0] == bps.size()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def a_fork():
    bps.init()
    mine = bps.alloc(4000)
    handle = bps.push_pull_async(ones(), average=False, name="x")
    child = os.fork()
    if child == 0:
        assert not bps.is_initialized()
        expect(bps.BpsNotInitializedError, lambda: bps.push_pull(ones()))
        if handle._operation._steps is not None:
            assert expect(bps.BpsError, handle.wait).errno == errno.EPERM
        del mine
        bps.init(job=f"child-{os.getpid()}", rank=0, size=1, local_rank=0, local_size=1, node=0, nodes=1)
        assert bps.push_pull(ones(), average=False, name="x")[0] == 1.0
        sys.exit(0)  # with all that runs at exit
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert handle.wait()[0] == 2.0
    memoryview(mine).cast("B")[0] = 1
    assert bps.push_pull(ones(), average=False, name="x")[0] == 2.0


def a_dead_daemon():
    os.environ["BPS_RESTART_TIMEOUT"] = "0"  # bpslaunch starts another
    bps.init()
    if bps.rank() == 1:
        raise_flag()
    await_flag()
    if bps.rank() == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(os.environ["BPS_SOCKET"])
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        os.kill(struct.unpack("3i", credentials)[0], signal.SIGKILL)
        error = expect(bps.BpsConnectionError, lambda: bps.push_pull(ones(), name="x"))
    else:
        error = expect(bps.BpsConnectionError, lambda: bps.push_pull(ones(), name="y"))
    assert error.errno == errno.ESHUTDOWN
    expect(bps.BpsConnectionError, bps.barrier)


def finalizers_wait_for_no_lock():
    """The garbage collector runs them in any thread, also in one that the holder of a lock waits for."""
    bps.init()
    bps.push_pull(ones(), name="x")
    if bps.rank() == 0:
        client = bps._current()
        last = [bps.alloc(4000), client.tensors.pop("push_pull.x"), bps.allgather_async(ones(), name="y")]
        with client.lock, _ops._open._lock:
            while last:
                thread = threading.Thread(target=last.pop)
                thread.start()
                thread.join(20)
                assert not thread.is_alive()
        raise_flag()
        bps.push_pull(ones(), name="x")
        assert not client.dropped
    else:
        await_flag()
        bps.push_pull(ones(), name="x")
        assert len(bps.allgather(ones(), name="y")) == 2000  # of a handle that rank 0 has dropped
    bps.barrier()


def shutdown_in_a_signal_handler():
    """It may come while the thread holds a lock, as here."""
    bps.init()
    client = bps._current()
    signal.alarm(60)  # else a handler that waits for a lock would do so for ever
    signal.signal(signal.SIGUSR1, lambda *_: bps.shutdown())
    with _ops._open._lock, completer_of(client)._lock:
        signal.raise_signal(signal.SIGUSR1)
    assert not bps.is_initialized()
    signal.alarm(0)


def no_more_threads():
    """The one that there is goes on telling outcomes."""
    bps.init()
    completer = completer_of(bps._current())
    told, start = [queue.SimpleQueue() for _ in range(3)], threading.Thread.start

    class Future:
        def __init__(self, told):
            self.set_result = told.put

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse
    try:
        for i, each in enumerate(told):
            completer.add(bps.push_pull_async(ones(), name=f"x.{i}"), Future(each))
        for each in told:
            assert each.get(timeout=60)[1] is None
    finally:
        threading.Thread.start = start


def shutdown_and_init_again():
    for turn in range(3):
        bps.init(job=f"{os.environ['BPS_JOB']}.{turn}")
        assert bps.push_pull(ones(), average=False, name="x")[0] == bps.size()
        late = bps.push_pull_async(ones(), average=False, name="late")
        if bps.size() == 1 or turn:
            late.wait()
        bps.barrier()
        bps.shutdown()
        assert not bps.is_initialized()
        if not late.poll():
            raise AssertionError("a request outlives its client")
        expect(bps.BpsNotInitializedError, bps.barrier)


def shutdown_under_a_wait():
    bps.init()
    bps.push_pull(ones(), name="x")
    outcome = []
    if bps.rank() == 0:
        handle = bps.push_pull_async(ones(), name="x")

        def wait():
            try:
                handle.wait()
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not bps._current().inside:
            time.sleep(0.001)
        bps.shutdown()
        thread.join()
        assert isinstance(outcome[0], bps.BpsCanceledError), outcome
        raise_flag()
    await_flag()


def exit_with_requests_under_way():
    bps.init()
    bps.push_pull(ones(), name="x")
    if bps.rank() == 0:
        for i in range(10):
            bps.push_pull_async(ones(), name=f"never.{i}")


def an_exception():
    bps.init()
    bps.barrier()
    if bps.rank() == 1:
        raise RuntimeError("out of ideas")
    bps.push_pull(ones(), name="x")


def an_exit_after_shutdown():
    bps.init()
    bps.barrier()
    if bps.rank() == 1:
        bps.shutdown()
        time.sleep(0.3)  # others end before it
        sys.exit(3)
    bps.push_pull(ones(), name="x")


def an_exception_is_told():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which the launcher ends the others
    bps.init()
    bps.barrier()
    if bps.rank() == 1:
        under_way = bps.push_pull_async(ones(), name="z")
        assert not under_way.poll()
        raise ZeroDivisionError("out of ideas,\nand of more")
    words = "rank 1", "ended by an error: ZeroDivisionError: out of ideas,"
    for name in "xy":
        error = expect(bps.BpsError, lambda name=name: bps.push_pull(ones(), name=name), *words)
        assert "left" not in str(error), error
    print("told", flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done", flush=True)
