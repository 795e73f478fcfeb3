"""What goes wrong under bps.mxnet: one kind of trouble for each function; run by its name. Two ranks, or four."""

import os
import signal
import sys
import time

import mxnet as mx

import bps.mxnet as bps


def ones():
    return mx.nd.ones((1000,))


def expect(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def flag(name):
    return os.path.join(os.path.dirname(os.environ["BPS_SOCKET"]), name)


def raise_flag(name):
    """Tells the other rank without bps."""
    open(flag(name), "w").close()


def await_flag(name):
    while not os.path.exists(flag(name)):
        time.sleep(0.01)


def total(x, name="x"):
    return bps.allreduce(x, average=False, name=name)


def a_rank_is_killed():
    bps.init()
    assert total(ones())[0].asscalar() == 2
    if bps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    result = total(ones()) + 1  # what depends on it fails as it does
    expect(mx.base.MXNetError, result.asnumpy, "rank 1")
    expect(bps.BpsError, lambda: total(ones()), "rank 1")


def an_exception():
    bps.init()
    assert total(ones())[0].asscalar() == 2
    if bps.rank() == 1:
        total(ones(), "never")  # what is under way does not hold it up
        raise RuntimeError("out of ideas")
    result = total(ones())
    expect(mx.base.MXNetError, result.asnumpy, "rank 1")


def a_rank_does_not_come():
    bps.init(request_timeout=3)
    assert total(ones())[0].asscalar() == 2
    if bps.rank() == 0:
        result = total(ones())
        expect(mx.base.MXNetError, result.asnumpy, "rank 1")
        expect(bps.BpsTimeoutError, bps.synchronize, "rank 1")
        raise_flag("late")
    await_flag("late")
    if bps.rank() == 1:
        result = total(ones())  # its part of the round that failed
        expect(mx.base.MXNetError, result.asnumpy, "rank 1")
        expect(bps.BpsError, bps.synchronize)
    bps.barrier()
    assert total(ones())[0].asscalar() == 2  # the job goes on


def ranks_disagree():
    bps.init()
    result = total(mx.nd.ones((10 + bps.rank(),)), "wrong")
    expect(mx.base.MXNetError, result.asnumpy, "rank")
    expect(bps.BpsValueError, bps.synchronize, "rank")
    assert total(mx.nd.ones((3,)), "wrong").asnumpy().tolist() == [2, 2, 2]  # of another size it is another tensor
    bps.barrier()


ALONE = 2  # of four ranks


def differ(alone, others, *words):
    """One rank makes another call without a name. All are told what two of them did, and the job goes on."""

    def call():
        results = (alone if bps.rank() == ALONE else others)()
        for result in results if isinstance(results, list) else [results]:
            if isinstance(result, mx.nd.NDArray):
                result.wait_to_read()

    expect((bps.BpsValueError, mx.base.MXNetError), call, f"rank {ALONE} ", *words)
    try:
        bps.synchronize()
    except bps.BpsValueError:
        pass  # the same, of the engine's work
    goes_on()


def goes_on():
    for n in (3, 4):
        assert bps.allreduce(mx.nd.ones((n,)), average=False).asnumpy().tolist() == [4] * n
        assert bps.allgather(mx.nd.ones((n,))).shape == (4 * n,)
    bps.barrier()
    assert bps.broadcast_object(bps.rank(), 1) == 1


def ranks_differ():
    bps.init()
    three, four = mx.nd.ones((3,)), mx.nd.ones((4,))
    ways = {
        "push_pull": lambda: bps.allreduce(four),
        "broadcast.": lambda: bps.broadcast(four, 0),
        "all_gather": lambda: bps.allgather(four),
        "all_to_all": lambda: bps.alltoall(four),
        "reduce_scatter": lambda: bps.reducescatter(four),
        "broadcast_object": lambda: bps.broadcast_object({}, 0),
        "barrier": bps.barrier,
    }
    names = list(ways)
    for one, other in zip(names, names[1:] + names[:1]):
        differ(ways[one], ways[other], one, other)
    differ(lambda: bps.allreduce(three), lambda: bps.allreduce(four), "push_pull.noname.mxnet.float32.3", "float32.4")
    wide, high = mx.nd.ones((2, 3)), mx.nd.ones((3, 2))
    differ(lambda: bps.allreduce(wide), lambda: bps.allreduce(high), "float32.2x3", "float32.3x2")
    differ(lambda: bps.allreduce(four), lambda: bps.allreduce(four.astype("int32"), False), "int32.4", "float32.4")
    differ(
        lambda: bps.grouped_allreduce([three, four]), lambda: bps.grouped_allreduce([four, three]), "float32.3", "float32.4"
    )


def exit_with_work_under_way():
    """What other ranks wait for is not given up by a rank that ends well."""
    bps.init()
    x = mx.nd.ones((1 << 20,))
    for i in range(5):
        x = total(mx.nd.sin(x), f"e{i}") * 0.5
    if bps.rank() == 0:
        x.wait_to_read()


def exit_with_work_that_nobody_joins():
    bps.init()
    total(ones()).wait_to_read()
    if bps.rank() == 0:
        for i in range(3):
            total(ones(), f"never.{i}")
        raise_flag("out")
    await_flag("out")


def shutdown_and_init_again():
    for turn in range(3):
        bps.init(job=f"{os.environ['BPS_JOB']}.{turn}")
        assert total(ones())[0].asscalar() == 2
        bps.barrier()
        bps.shutdown()
        expect(bps.BpsNotInitializedError, lambda: total(ones()))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        if bps.is_initialized() and len(sys.argv) > 2:
            bps.barrier()
    print("done", flush=True)
