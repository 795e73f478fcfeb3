"""What goes wrong under bps.jax: one kind of trouble for each function; run by its name. Two ranks, or four."""

import functools
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import bps.jax as bps
from bps._launch.daemon import find_bpsctl

summed = jax.jit(functools.partial(bps.allreduce, op=bps.Sum, name="x"))
ones = np.ones(1000, np.float32)


def later(name):
    """A program that JAX runs in the background, which it does not do for those that take no time."""
    return jax.jit(lambda x: bps.allreduce(jax.lax.fori_loop(0, 9, lambda i, y: y + 1, x), op=bps.Sum, name=name))


def expect(kind, function, *words):
    try:
        jax.block_until_ready(function())
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def flag(name):
    return os.path.join(os.path.dirname(os.environ["BPS_SOCKET"]), name)


def raise_flag(name="flag"):
    """Tells the other rank without bps."""
    open(flag(name), "w").close()


def await_flag(name="flag"):
    while not os.path.exists(flag(name)):
        time.sleep(0.01)


def await_operation():
    """Until one is under way that lacks rank 1's part: JAX begins it when it likes."""
    ask = [find_bpsctl()[0], "--json", "jobs"]
    while b"rank 1" not in subprocess.check_output(ask):
        time.sleep(0.01)


def a_rank_is_killed():
    bps.init()
    summed(ones).block_until_ready()
    if bps.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect(jax.errors.JaxRuntimeError, lambda: summed(ones), "rank 1")
    expect(jax.errors.JaxRuntimeError, lambda: summed(ones), "rank 1")


def an_exception():
    bps.init()
    summed(ones).block_until_ready()
    if bps.rank() == 1:
        summed(ones * 0)  # what is under way does not hold it up
        raise RuntimeError("out of ideas")
    summed(ones).block_until_ready()
    expect(jax.errors.JaxRuntimeError, lambda: summed(ones), "rank 1")


def a_rank_does_not_come():
    bps.init(request_timeout=3)
    summed(ones).block_until_ready()
    if bps.rank() == 0:
        expect(jax.errors.JaxRuntimeError, lambda: summed(ones), "DEADLINE_EXCEEDED", "rank 1")
        raise_flag("first")
    await_flag("first")
    assert jax.jit(bps.allreduce)(ones)[0] == 1.0  # the job goes on
    if bps.rank() == 1:
        expect(jax.errors.JaxRuntimeError, lambda: summed(ones), "rank 1")  # its part of the round that failed
    bps.barrier()
    assert summed(ones)[0] == 2.0
    # The same in the background, where JAX makes all that comes after fail too.
    if bps.rank() == 0:
        late = later("late")(ones)
        expect(bps.BpsTimeoutError, bps.synchronize, "rank 1")
        expect(jax.errors.JaxRuntimeError, lambda: late, "DEADLINE_EXCEEDED")
        raise_flag("late")
    await_flag("late")
    bps.barrier()
    assert summed(ones)[0] == 2.0


def ranks_disagree():
    bps.init()
    wrong = jax.jit(functools.partial(bps.allreduce, op=bps.Sum, name="wrong"))
    expect(jax.errors.JaxRuntimeError, lambda: wrong(np.ones(10 + bps.rank(), np.float32)), "INVALID_ARGUMENT", "rank")


ALONE = 2  # of four ranks


def differ(alone, others, *words):
    """One rank makes another call without a name. All are told what two of them did, and the job goes on."""

    def call():
        jax.block_until_ready(alone() if bps.rank() == ALONE else others())
        bps.synchronize()

    expect((bps.BpsValueError, jax.errors.JaxRuntimeError), call, f"rank {ALONE} ", *words)
    try:
        bps.synchronize()
    except bps.BpsValueError:
        pass  # the same, which fails what comes after
    goes_on()


def goes_on():
    for n in (3, 4):
        assert (bps.allreduce(np.ones(n, np.float32), op=bps.Sum) == 4).all()
        assert unnamed(np.ones(n, np.float32))[0] == 4
        assert bps.allgather(np.ones(n, np.float32)).size == 4 * n
    bps.barrier()
    assert bps.broadcast_object(bps.rank(), 1) == 1


unnamed = jax.jit(functools.partial(bps.allreduce, op=bps.Sum))


def ranks_differ():
    bps.init()
    three, four = jnp.ones(3), jnp.ones(4)
    ways = {
        "push_pull": lambda: unnamed(four),
        "broadcast.": lambda: bps.broadcast(four, 0),
        "all_gather": lambda: jax.jit(bps.allgather)(four),
        "all_to_all": lambda: bps.alltoall(four),
        "reduce_scatter": lambda: bps.reducescatter(four),
        "barrier": lambda: jax.jit(lambda x: (bps.barrier(), x)[1])(four),
    }
    names = list(ways)
    for one, other in zip(names, names[1:] + names[:1]):
        differ(ways[one], ways[other], one, other)
    host = {
        "all_gather": lambda: bps.allgather(four),
        "barrier": bps.barrier,
        "broadcast_object": lambda: bps.broadcast_object({}, 0),
    }
    names = list(host)
    for one, other in zip(names, names[1:] + names[:1]):
        differ(host[one], host[other], one, other)
    differ(lambda: unnamed(three), lambda: unnamed(four), "push_pull.noname.0.float32.3", "float32.4")
    differ(lambda: unnamed(four), lambda: unnamed(four.astype(jnp.int32)), "int32.4", "float32.4")
    wide, high = jnp.ones((2, 3)), jnp.ones((3, 2))
    differ(lambda: unnamed(wide), lambda: unnamed(high), "float32.2x3", "float32.3x2")
    differ(lambda: bps.broadcast(wide, 0), lambda: bps.broadcast(high, 0), "float32.2x3", "float32.3x2")
    differ(lambda: summed(wide), lambda: summed(high), "2x3", "3x2")
    differ(lambda: unnamed([three, four]), lambda: unnamed([four, three]), "float32.3", "float32.4")


def programs_and_calls_need_no_order():
    """What a program does that JAX runs in the background, and what calls do meanwhile, is compared with its like alone."""
    bps.init()
    program = later(None)
    if bps.rank() == ALONE:
        result = program(ones)
        numbers = bps.allgather_object(bps.rank())
    else:
        numbers = bps.allgather_object(bps.rank())
        result = program(ones)
    assert numbers == [0, 1, 2, 3] and result[0] == 40
    goes_on()


def exit_with_work_under_way():
    """What other ranks wait for is not given up by a rank that ends well."""
    bps.init()
    big = jnp.ones(1 << 20)

    @jax.jit
    def program(x):
        for _ in range(5):
            x = bps.allreduce(jnp.sin(x), op=bps.Sum) * 0.5
        return x

    result = program(big)
    if bps.rank() == 0:
        result.block_until_ready()


def exit_with_work_that_nobody_joins():
    bps.init()
    summed(ones).block_until_ready()
    if bps.rank() == 0:
        later("x")(ones)  # rank 1 leaves instead
        raise_flag()
    await_flag()


def shutdown_and_init_again():
    for turn in range(3):
        bps.init(job=f"{os.environ['BPS_JOB']}.{turn}")
        assert summed(ones)[0] == 2.0
        bps.barrier()
        bps.shutdown()
        expect(jax.errors.JaxRuntimeError, lambda: summed(ones), "FAILED_PRECONDITION", "init()")
        expect(bps.BpsNotInitializedError, lambda: bps.allreduce(ones))


def shutdown_under_way():
    bps.init()
    summed(ones).block_until_ready()
    if bps.rank() == 0:
        late = later("x")(ones)
        await_operation()
        bps.shutdown()
        expect(jax.errors.JaxRuntimeError, lambda: late, "CANCELLED")
        bps.init(job=f"after-{os.getpid()}", rank=0, size=1, local_rank=0, local_size=1, node=0, nodes=1)
        assert summed(ones)[0] == 1.0
        raise_flag()
    await_flag()


def many_operations_wait_at_once():
    """More operations than XLA has threads are started though the other rank is not there yet."""
    bps.init()

    @jax.jit
    def program(x):
        x = jax.lax.fori_loop(0, 9, lambda i, y: y + 1, x)
        return [bps.allreduce(x * i, op=bps.Sum) for i in range(20)]

    bps.barrier()
    if bps.rank() == 0:
        results = program(ones)
        raise_flag()
    else:
        await_flag()
        results = program(ones)
    for i, result in enumerate(results):
        assert result[0] == 20 * i


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        if bps.is_initialized() and len(sys.argv) > 2:
            bps.barrier()
    print("done", flush=True)
