"""One kind of trouble for each function; run by their names, one after the other. Two ranks."""

import sys
import threading

import tensorflow as tf

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
    expect(tf.errors.OpError, lambda: in_a_graph(x), "rank 1")
    expect(bps.BpsError, lambda: bps.allgather(x), "rank 1")
    expect(bps.BpsError, lambda: bps.broadcast(x, 0), "rank 1")


def ranks_disagree():
    x = tf.ones([2 + bps.rank()])
    expect(bps.BpsValueError, lambda: bps.allreduce(x, name="x"), "push_pull.x")
    expect(
        bps.BpsValueError, lambda: bps.allgather(tf.ones([1, 2 + bps.rank()])), "only the first dimension may differ"
    )
    assert bps.broadcast_object(5) == 5


def shutdown_under_a_wait():
    """shutdown() ends what another thread waits for; init() begins anew, and what was left behind is let go of."""
    if bps.rank() == 1:
        bps.broadcast_object(None, 1, name="over")
        bps.shutdown()
    else:
        waits, outcome = threading.Event(), []
        run = tf.function(lambda x: bps.allreduce(x, name="alone"))
        run.get_concrete_function(tf.TensorSpec([3]))

        def wait():
            waits.set()
            try:
                outcome.append(run(tf.ones([3])))
            except tf.errors.OpError as error:
                outcome.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        waits.wait()
        bps.broadcast_object(None, 1, name="over")
        bps.shutdown()
        thread.join(60)
        assert not thread.is_alive() and isinstance(outcome[0], tf.errors.OpError), outcome


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
