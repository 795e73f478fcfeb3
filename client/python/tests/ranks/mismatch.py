"""Operations differ among ranks: all are told at once, and the job goes on. Four ranks; one is alone."""

import signal
import sys
import threading
import time

import checks
import numpy as np

import bps

ALONE = 2


def ones(n, dtype=np.float32):
    return np.ones(n, dtype)


def differ(alone, others, *words):
    """One rank does something else. Were they not told, they would be at the end of request_timeout, and otherwise."""
    try:
        (alone if bps.rank() == ALONE else others)()
    except RuntimeError as error:
        assert isinstance(error, bps.BpsValueError), repr(error)
        for word in (f"rank {ALONE} ", *words):
            assert word in str(error), error
    else:
        raise AssertionError("nobody said that the ranks differ")
    goes_on()


def goes_on():
    for n in (3, 4):
        assert bps.push_pull(ones(n), average=False).tolist() == [4] * n
        assert len(bps.allgather(ones(n))) == 4 * n
        bps.barrier()
        assert bps.broadcast_object(bps.rank(), 1) == 1


def check_sizes():
    differ(lambda: bps.push_pull(ones(4)), lambda: bps.push_pull(ones(3)), "push_pull.noname.float32.4", "float32.3")


SHAPES = [((2, 3), (3, 2)), ((6,), (2, 3)), ((1, 6), (6,)), ((1,) * 9 + (6,), (6,))]
WAYS = {
    "push_pull.": bps.push_pull,
    "broadcast.": lambda x, **more: bps.broadcast(x, 0, **more),
    "reduce_scatter.": bps.reducescatter,
}


def text_of(shape):
    return "x".join(map(str, shape)) if len(shape) <= 8 else f"{len(shape)}d.6"


def check_shapes():
    for kind, way in WAYS.items():
        for one, other in SHAPES:
            words = f"{kind}noname.float32.{text_of(one)}", f"{kind}noname.float32.{text_of(other)}"
            differ(lambda: way(ones(one)), lambda: way(ones(other)), *words)


def check_shapes_of_names():
    for kind, way in WAYS.items():
        for i, (one, other) in enumerate(SHAPES[:3]):
            name = f"{kind}{i}"
            words = f"{kind}{name}", text_of(one), text_of(other)
            differ(lambda: way(ones(one), name=name), lambda: way(ones(other), name=name), *words)


def check_a_number_is_an_array_of_one():
    shape = () if bps.rank() == ALONE else (1,)
    for name in None, "a number":
        for kind in "push_pull.", "broadcast.":
            assert WAYS[kind](ones(shape), name=name) == 1
    goes_on()


def check_a_name_may_have_shapes_in_turn():
    for _ in range(2):
        for shape in (2, 3), (3, 2), (6,), (1, 2, 3), (), (1,), (4,):
            total = bps.push_pull(ones(shape), name="in turn", average=False)
            assert total.shape == shape and (total == 4).all(), total
            given = bps.broadcast(np.full(shape, bps.rank(), np.complex128), 3, name="in turn")
            assert given.shape == shape and (given == 3).all(), given


def check_sizes_that_are_known():
    goes_on()
    differ(lambda: bps.push_pull(ones(4)), lambda: bps.push_pull(ones(3)))


def check_types():
    differ(lambda: bps.push_pull(ones(3, np.int64)), lambda: bps.push_pull(ones(3)), "int64", "float32")


def check_operations():
    ways = {
        "push_pull": lambda: bps.push_pull(ones(4)),
        "broadcast.": lambda: bps.broadcast(ones(4), 0),
        "all_gather": lambda: bps.allgather(ones(4)),
        "all_to_all": lambda: bps.alltoall(ones(4)),
        "reduce_scatter": lambda: bps.reducescatter(ones(4)),
        "barrier": bps.barrier,
        "broadcast_object": lambda: bps.broadcast_object({}, 0),
        "object": lambda: bps.allgather_object({}),
    }
    names = list(ways)
    for one, other in zip(names, names[1:] + names[:1]):
        differ(ways[one], ways[other], one, other)


def check_an_operation_more():
    def once_more():
        bps.push_pull(ones(3))
        bps.broadcast(ones(3), 0)

    differ(once_more, lambda: (bps.push_pull(ones(3)), bps.barrier()), "barrier", "broadcast")


def check_the_order():
    def start(*sizes):
        handles = [bps.push_pull_async(ones(n)) for n in sizes]
        for handle in reversed(handles):
            try:
                handle.wait()
            except bps.BpsError as error:
                first = error
        raise first

    differ(lambda: start(4, 3), lambda: start(3, 4), "float32.3", "float32.4")


def named(name, shape=3):
    return lambda: bps.push_pull(ones(shape), name=name)


def check_names_differ():
    differ(named("alone"), named("others"), "push_pull.alone", "push_pull.others")


def check_operations_of_a_name():
    differ(lambda: bps.broadcast(ones(3), 0, name="ways"), named("ways"), "broadcast.ways", "push_pull.ways")


def check_shapes_of_a_name_in_use():
    for _ in range(2):
        named("in use", (2, 3))()
    differ(named("in use", (3, 2)), named("in use", (2, 3)), "push_pull.in use", "push_pull.in use.float32.3x2")


def check_the_order_of_calls_with_names():
    def one_after_the_other(*names):
        for name in names:
            named(name)()

    names = "one", "another"
    differ(lambda: one_after_the_other(*reversed(names)), lambda: one_after_the_other(*names), *names)


def check_what_is_under_way():
    """Each rank has begun more than it waits for."""

    def wait_for_both(name):
        handles = [bps.push_pull_async(ones(3), name=each) for each in ("of all", name)]
        for handle in handles:
            handle.wait()

    differ(lambda: wait_for_both("of one"), lambda: wait_for_both("of three"), "push_pull.of one", "push_pull.of three")


MOMENT_S = 0.5  # in which the other ranks would be told that this one is blocked


def check_who_is_late_is_not_blocked():
    if bps.rank() == ALONE:
        time.sleep(MOMENT_S)
    named("late")()


def check_another_thread_may_begin_it():
    def later(name):
        time.sleep(MOMENT_S)
        named(name)()

    if bps.rank() == ALONE:
        thread = threading.Thread(target=later, args=("of a thread",))
        thread.start()
        named("of all threads")()
        thread.join()
    else:
        named("of a thread")()
        named("of all threads")()


def check_a_handler_may_begin_it():
    if bps.rank() == ALONE:
        before = signal.signal(signal.SIGALRM, lambda *_: named("of a handler")())
        signal.setitimer(signal.ITIMER_REAL, MOMENT_S)
        named("of the program")()
        signal.signal(signal.SIGALRM, before)
    else:
        named("of a handler")()
        named("of the program")()


def check_names_need_no_order():
    sizes = (3, 4) if bps.rank() == ALONE else (4, 3)
    handles = [bps.push_pull_async(ones(n), average=False, name=f"of {n}") for n in sizes]
    assert [len(handle.wait()) for handle in handles] == list(sizes)
    goes_on()


def check_other_threads_need_no_order():
    """What they begin is in no order with what the thread does that has called init()."""
    handles = {}

    def begin(n):
        handles[n] = bps.push_pull_async(ones(n), average=False)

    def begin_in_another_thread(n):
        thread = threading.Thread(target=begin, args=(n,))
        thread.start()
        thread.join()

    steps = [(begin, 5), (begin_in_another_thread, 6)]  # of sizes on which ranks have not differed
    for step, n in reversed(steps) if bps.rank() == ALONE else steps:
        step(n)
    assert [handles[n].wait().tolist() for n in (5, 6)] == [[4] * 5, [4] * 6]
    goes_on()


def check_what_is_refused_is_none():
    if bps.rank() == ALONE:
        try:
            bps.push_pull(ones(3, bool))
            raise AssertionError("bool has an average")
        except bps.BpsValueError as error:
            assert "bool" in str(error), error
    goes_on()


def main():
    bps.init(request_timeout=60)
    for _, check in checks.chosen(globals(), sys.argv[1:]):
        check()
    bps.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
