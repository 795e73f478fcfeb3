"""One kind of trouble for each function; run by their names, one after the other. Two ranks, or four."""

import errno
import pickle
import sys
import threading

import numpy as np
import tensorflow as tf

import bps as calls
import bps.tensorflow as bps


def expect(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


@tf.function
def in_a_graph(x):
    results = bps.grouped_allreduce([x, x + 1.0], name="graph")
    return results[0] + results[1]


def a_rank_leaves():
    """What the other is told names it, in eager code and in a graph, in every kind of operation."""
    x = tf.ones([1000])
    in_a_graph(x)
    bps.barrier()
    if bps.rank() == 1:
        bps.shutdown()
        expect(bps.BpsNotInitializedError, lambda: bps.allreduce(x), "init()")
        expect(tf.errors.FailedPreconditionError, lambda: in_a_graph(x), "init()")
        return
    expect(bps.BpsError, lambda: bps.allreduce(x, name="eager"), "rank 1")
    expect(tf.errors.OpError, lambda: bps.allreduce(x, name="eager"), "rank 1")
    expect(tf.errors.OpError, lambda: in_a_graph(x), "rank 1")
    expect(bps.BpsError, lambda: bps.allgather(x), "rank 1")
    expect(bps.BpsError, lambda: bps.broadcast(x, 0), "rank 1")


def ranks_disagree():
    x = tf.ones([2 + bps.rank()])
    for kind in (bps.BpsValueError, tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError):
        expect(kind, lambda: bps.allreduce(x, name="x"), "push_pull.x")
    try:
        bps.allreduce(x, name="x")
    except bps.BpsError as error:
        assert error.errno == errno.EINVAL and error.message == error.strerror and error.op is None
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is bps.BpsValueError and again.args == error.args
    expect(
        bps.BpsValueError, lambda: bps.allgather(tf.ones([1, 2 + bps.rank()])), "only the first dimension may differ"
    )
    assert bps.broadcast_object(5) == 5


ALONE = 2  # of four ranks


def differ(alone, others, *words):
    """One rank makes another call without a name. All are told what two of them did, and the job goes on."""
    expect(bps.BpsValueError, alone if bps.rank() == ALONE else others, f"rank {ALONE} ", *words)
    goes_on()


def goes_on():
    for n in (3, 4):
        assert bps.allreduce(tf.ones([n]), op=bps.Sum).numpy().tolist() == [4.0] * n
        assert bps.allgather(tf.ones([n])).shape == 4 * n
        assert unnamed_in_a_graph(tf.ones([n])).numpy().tolist() == [4.0] * n
    bps.barrier()
    assert bps.broadcast_object(bps.rank(), 1) == 1


def ranks_differ():
    three, four = tf.ones([3]), tf.ones([4])
    ways = {
        "push_pull": lambda: bps.allreduce(four),
        "broadcast.": lambda: bps.broadcast(four, 0),
        "all_gather": lambda: bps.allgather(four),
        "all_to_all": lambda: bps.alltoall(four),
        "reduce_scatter": lambda: bps.reducescatter(four),
        "rows": lambda: bps.allreduce(tf.IndexedSlices(tf.ones([1, 4]), [0], tf.constant([9, 4]))),
        "broadcast_object": lambda: bps.broadcast_object({}, 0),
        "barrier": bps.barrier,
    }
    names = list(ways)
    for one, other in zip(names, names[1:] + names[:1]):
        differ(ways[one], ways[other], one, other)
    differ(lambda: bps.allreduce(three), lambda: bps.allreduce(four), "push_pull.noname.float32.3", "float32.4")
    wide, high = tf.ones([2, 3]), tf.ones([3, 2])
    for way in bps.allreduce, bps.reducescatter, lambda x, **more: bps.broadcast(x, 0, **more):
        differ(lambda: way(wide), lambda: way(high), "float32.2x3", "float32.3x2")
    differ(lambda: bps.allreduce(wide, name="shaped"), lambda: bps.allreduce(high, name="shaped"), "2x3", "3x2")
    for x in wide, high, tf.reshape(wide, [6]), tf.reshape(wide, [1] * 9 + [6]), tf.ones([]), tf.ones([1]):
        assert tf.reduce_all(bps.allreduce(x, op=bps.Sum, name="in turn") == 4.0)
    differ(lambda: bps.allreduce(four), lambda: bps.allreduce(tf.cast(four, tf.int32), op=bps.Sum), "int32.4", "float32.4")
    differ(
        lambda: bps.grouped_allreduce([three, four]), lambda: bps.grouped_allreduce([four, three]), "float32.3", "float32.4"
    )


def calls_of_bps_have_the_same_order():
    """A rank may make them instead of those of bps.tensorflow."""
    ones = np.ones(4, np.float32)
    alike = calls.push_pull(ones, average=False) if bps.rank() == ALONE else bps.allreduce(tf.ones([4]), op=bps.Sum)
    assert list(alike) == [4.0] * 4
    differ(lambda: calls.broadcast(ones, 0), lambda: bps.allreduce(tf.ones([4])), "broadcast.noname", "push_pull.noname")


def the_order_inside_graphs_is_free():
    """Operations of a graph are in no order with those of eager code."""
    if bps.rank() == ALONE:
        x = bps.broadcast(tf.ones([5]), 0)
        y = unnamed_in_a_graph(tf.ones([6]))
    else:
        thread = threading.Thread(target=lambda: outcome.append(unnamed_in_a_graph(tf.ones([6]))))
        outcome = []
        thread.start()
        x = bps.broadcast(tf.ones([5]), 0)
        thread.join()
        (y,) = outcome
    assert x.numpy().tolist() == [1.0] * 5 and y.numpy().tolist() == [4.0] * 6
    goes_on()


@tf.function
def unnamed_in_a_graph(x):
    return bps.allreduce(x, op=bps.Sum)


def shutdown_under_a_wait():
    """shutdown() ends what another thread waits for; init() begins anew, and what was left behind is let go of."""
    if bps.rank() == 1:
        bps.broadcast_object(None, 1, name="over")
        bps.shutdown()
    else:
        ends = waits_for(lambda x: bps.allreduce(x, name="alone"))
        bps.broadcast_object(None, 1, name="over")
        bps.shutdown()
        ends()


def waits_for(operation):
    """Has a thread wait for what no other rank does. A function that sees it fail."""
    waits, outcome = threading.Event(), []
    run = tf.function(operation)
    run.get_concrete_function(tf.TensorSpec([3]))

    def wait():
        waits.set()
        try:
            outcome.append(run(tf.ones([3])))
        except tf.errors.OpError as error:
            outcome.append(error)

    def ends():
        thread.join(60)
        assert not thread.is_alive() and isinstance(outcome[0], tf.errors.OpError), outcome

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    return ends


def a_process_set_is_removed_under_a_wait():
    """remove_process_set() ends what another thread waits for, and the job goes on."""
    some = bps.add_process_set([0, 1])
    ends = waits_for(lambda x: bps.allreduce(x, name="alone", process_set=some)) if bps.rank() == 0 else lambda: None
    bps.remove_process_set(some)
    ends()
    goes_on()


def ranks_of_a_process_set_differ():
    """They are told of it, by their numbers in the set; who is not in it is not concerned."""
    some = bps.add_process_set([1, 2, 3])
    four = tf.ones([4])
    if some.included():
        alone, others = (bps.broadcast, 2), (bps.allreduce,)
        call, *root = alone if bps.rank() == ALONE else others
        words = ("rank 1 ", "broadcast.noname", "push_pull.noname")
        expect(bps.BpsValueError, lambda: call(four, *root, process_set=some), *words)
        assert bps.allreduce(four, op=bps.Sum, process_set=some).numpy().tolist() == [3.0] * 4
    goes_on()
    bps.remove_process_set(some)


def exit_with_work_in_flight():
    """Handles that are kept, and never waited for, while the interpreter ends."""
    from bps.tensorflow import _native

    if bps.rank() == 0:
        global kept
        kept = [
            _native.submit(tf.ones([100_000]), _native.Operation.PUSH_PULL, f"kept.{i}", bps.Sum) for i in range(20)
        ]
    bps.barrier()


def main():
    for trouble in sys.argv[1:]:
        bps.init()
        globals()[trouble]()
    print("done")


main()
