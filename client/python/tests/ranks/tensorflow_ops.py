"""Operations of bps.tensorflow in eager code and inside tf.function, against NumPy. Every rank knows all inputs."""

import sys

import numpy as np
import tensorflow as tf
from checks import chosen

import bps.tensorflow as bps
from bps import _client

DTYPES = [tf.float64, tf.float32, tf.float16, tf.bfloat16]
DTYPES += [tf.int64, tf.int32, tf.int16, tf.int8, tf.uint8, tf.bool]


def given(rank, dtype, *shape):
    values = np.random.default_rng(rank + 1).integers(0, 8, shape)
    return (values > 3) if dtype == tf.bool else values.astype(dtype.as_numpy_dtype)


def stack(dtype, *shape):
    return np.stack([given(r, dtype, *shape) for r in range(bps.size())])


def both(function):
    """The same in eager code and in a graph; so names are told apart by what they are used for, not by where."""
    return function, tf.function(function)


def same(got, expected, what=""):
    got = got.numpy() if hasattr(got, "numpy") else got
    expected = np.asarray(expected)
    assert got.dtype == expected.dtype, (what, got.dtype, expected.dtype)
    np.testing.assert_array_equal(got.astype("float64"), expected.astype("float64"), err_msg=str(what))


def check_types():
    for dtype in DTYPES:
        mine = tf.constant(given(bps.rank(), dtype, 17, 3))
        everybody = stack(dtype, 17, 3)
        wide = everybody.astype("float64")
        total = everybody.any(0) if dtype == tf.bool else wide.sum(0).astype(dtype.as_numpy_dtype)

        def reduce(x, dtype=dtype):
            results = [
                bps.allreduce(x, op=op, name=f"types.{dtype.name}.{op.name}") for op in (bps.Sum, bps.Min, bps.Max)
            ]
            if dtype.is_floating:
                results.append(bps.push_pull(x))
            return results

        for run in both(reduce):
            results = run(mine)
            same(results[0], total, dtype)
            same(results[1], wide.min(0).astype(dtype.as_numpy_dtype), dtype)
            same(results[2], wide.max(0).astype(dtype.as_numpy_dtype), dtype)
            if dtype.is_floating:
                exact = np.float64 if dtype == tf.float64 else np.float32
                average = (wide.sum(0).astype(exact) / exact(bps.size())).astype(dtype.as_numpy_dtype)
                same(results[3], average, dtype)

        def move(x, rows):
            gathered = bps.allgather(x)
            return gathered, bps.broadcast(x, 1 % bps.size()), bps.alltoall(rows, splits=[2] * bps.size())

        rows = tf.constant(given(bps.rank(), dtype, 2 * bps.size(), 3))
        everybodys_rows = stack(dtype, 2 * bps.size(), 3)
        for run in both(move):
            gathered, sent, (exchanged, received) = run(mine, rows)
            same(gathered, everybody.reshape(-1, 3), dtype)
            same(sent, everybody[1 % bps.size()], dtype)
            start = 2 * bps.rank()
            same(exchanged, everybodys_rows[:, start : start + 2].reshape(-1, 3), dtype)
            same(received, np.full(bps.size(), 2, "int32"))
    complex_number = tf.constant([1j])
    for run in both(lambda: bps.allreduce(complex_number)):
        expect(TypeError, run, "complex128")


def expect(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def check_shapes():
    for shape in [(), (1,), (0,), (0, 3), (5, 0), (2, 3, 4, 5)]:
        expected = stack(tf.float32, *shape)
        mine = tf.constant(given(bps.rank(), tf.float32, *shape))
        for run in both(lambda x: (bps.allreduce(x, op=bps.Sum), bps.allgather(x))):
            total, gathered = run(mine)
            same(total, expected.sum(0), shape)
            same(gathered, np.concatenate([np.atleast_1d(x) for x in expected]), shape)
    large = tf.fill([3_000_001], float(bps.rank() + 1))
    for run in both(lambda x: bps.allreduce(x, op=bps.Sum)):
        assert np.unique(run(large)) == [sum(range(bps.size() + 1))]

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.float32)])
    def any_shape(x):
        total = bps.allreduce(x, op=bps.Sum)
        assert total.shape.as_list() == [None, None]
        return total, bps.reducescatter(x, op=bps.Sum)

    for shape in [(3, 4), (7, 2), (0, 5), (1, 1)]:
        expected = stack(tf.float32, *shape).sum(0)
        total, share = any_shape(tf.constant(given(bps.rank(), tf.float32, *shape)))
        same(total, expected, shape)
        same(share, np.array_split(expected, bps.size())[bps.rank()], shape)


def check_uneven():
    rank, size = bps.rank(), bps.size()
    mine = tf.fill([rank + 2, 3], float(rank))
    expected = np.concatenate([np.full((r + 2, 3), r, "float32") for r in range(size)])
    for run in both(lambda x: bps.grouped_allgather([x, 2 * x], name="uneven")):
        once, twice = run(mine)
        same(once, expected)
        same(twice, 2 * expected)
    # Rank r sends r + s rows to rank s: what comes shows from whom, and which.
    rows = np.array([[rank, s] for s in range(size) for _ in range(rank + s)], "int64").reshape(-1, 2)
    splits = [rank + s for s in range(size)]
    came = np.array([[r, rank] for r in range(size) for _ in range(r + rank)], "int64").reshape(-1, 2)
    for run in both(lambda x: bps.alltoall(x, splits=splits)):
        output, received = run(tf.constant(rows))
        same(output, came)
        same(received, np.array([r + rank for r in range(size)], "int32"))
    for run in both(lambda x: bps.alltoall(x)):
        same(run(tf.range(size) + 10 * rank), np.arange(size, dtype="int32") * 10 + rank)
    for run in both(lambda x: bps.reducescatter(x, op=bps.Sum)):
        whole = stack(tf.float32, 2 * size + 1, 3).sum(0)
        same(run(tf.constant(given(rank, tf.float32, 2 * size + 1, 3))), np.array_split(whole, size)[rank])
    for run in both(lambda x: bps.grouped_reducescatter([x, x], op=bps.Average)):
        whole = stack(tf.float32, size, 2).sum(0) / np.float32(size)
        for share in run(tf.constant(given(rank, tf.float32, size, 2))):
            same(share, whole[rank : rank + 1])
    expect(bps.BpsValueError, lambda: bps.alltoall(tf.zeros([size, 1]), splits=[1] * size + [0]), "one number for each")
    expect(bps.BpsValueError, lambda: bps.alltoall(tf.zeros([size, 1]), splits=[2] * size), "do not cut")


def check_arguments():
    mine = tf.constant(given(bps.rank(), tf.float32, 10))
    total = stack(tf.float32, 10).sum(0)
    for run in both(
        lambda x: (
            bps.allreduce(x, average=False),
            bps.allreduce(x, op=bps.Sum, prescale_factor=2.0, postscale_factor=0.25),
            bps.allreduce(x, op=bps.Sum, compression=bps.Compression.fp16),
            bps.allreduce(x, op=bps.Sum, compression=bps.Compression.bf16, process_set=bps.global_process_set),
            bps.push_pull(x, scope="s", average=False, name="n"),
            *bps.grouped_allreduce([x, x[:5]], op=bps.Sum, name="group"),
        )
    ):
        plain, scaled, half, brain, byteps, whole, part = run(mine)
        for result in (plain, half, brain, byteps, whole):
            same(result, total)
        same(scaled, total * np.float32(0.5))
        same(part, total[:5])
    scaled = bps.allreduce(tf.constant([3, 5]), op=bps.Sum, prescale_factor=0.5)
    same(scaled, np.array([1, 2], "int32") * bps.size())
    for dtype in (tf.float16, tf.bfloat16):
        large, factor = tf.constant([48000.0 // bps.size(), 100.0], dtype), 1e-8  # the factor is none of float16's
        expected = tf.cast(tf.cast(large, tf.float32) * factor, dtype)
        same(bps.allreduce(large, op=bps.Average, prescale_factor=factor), expected.numpy())
        same(bps.allreduce(large, op=bps.Average, postscale_factor=factor), expected.numpy())
    expect(ValueError, lambda: bps.reducescatter(tf.constant(1.0)), "no rows")
    expect(ValueError, lambda: bps.allreduce(mine, average=True, op=bps.Sum), "not both")
    expect(ValueError, lambda: bps.push_pull(mine, enable_async=True), "asynchronous")
    expect(bps.BpsValueError, lambda: bps.broadcast(mine, bps.size()), "root rank")
    for run in both(lambda: (bps.rank_op(), bps.size_op(), bps.local_rank_op(), bps.local_size_op())):
        assert [int(x) for x in run()] == [bps.rank(), bps.size(), bps.local_rank(), bps.local_size()]
    assert int(bps.process_set_included_op()) == 1


def check_product():
    mine = tf.constant(given(bps.rank(), tf.float32, 10))
    for run in both(lambda x: bps.allreduce(x, op=bps.Product, postscale_factor=2.0)):
        same(run(mine), 2 * stack(tf.float32, 10).prod(0))
    integers = bps.grouped_allreduce([tf.constant([2, 3]), tf.constant(bps.rank() + 1)], op=bps.Product, name="factors")
    same(integers[0], np.array([2, 3], "int32") ** bps.size())
    same(integers[1], np.arange(1, bps.size() + 1, dtype="int32").prod(dtype="int32"))
    with tf.GradientTape() as tape:
        tape.watch(mine)
        loss = tf.reduce_sum(bps.allreduce(mine, op=bps.Product))
    expect(RuntimeError, lambda: tape.gradient(loss, mine), "sums and averages")


def check_unsigned_integers_that_move():
    for dtype in (tf.uint16, tf.uint32, tf.uint64):
        top = tf.constant([dtype.max - bps.rank(), bps.rank()], dtype)

        def moved(x):
            return bps.broadcast(x, 0), bps.allgather(x), bps.alltoall(x, [2] + [0] * (bps.size() - 1))

        for run in both(moved):
            of_first, gathered, (sent, _) = run(top)
            assert of_first.dtype == gathered.dtype == sent.dtype == dtype
            assert of_first.numpy().tolist() == [dtype.max, 0]
            rows = [value for rank in range(bps.size()) for value in (dtype.max - rank, rank)]
            assert gathered.numpy().tolist() == rows
            assert sent.numpy().tolist() == (rows if bps.rank() == 0 else [])
        variable = tf.Variable(top)
        bps.broadcast_([variable], bps.size() - 1)
        assert variable.numpy().tolist() == [dtype.max - bps.size() + 1, bps.size() - 1]
        expect(TypeError, lambda: bps.allreduce(top), "element type")
    expect(TypeError, lambda: bps.allgather(tf.sparse.from_dense([[1.0]])), "SparseTensor")


def check_gradients():
    rank, size = bps.rank(), bps.size()
    x = tf.Variable(given(rank, tf.float32, size, 2))
    weights = tf.constant(stack(tf.float32, size, 2)[rank] + 1)  # of this rank's loss
    everybodys = stack(tf.float32, size, 2) + 1
    op_of = {
        "sum": (lambda v: bps.allreduce(v, op=bps.Sum, name="g"), lambda w: everybodys.sum(0)),
        "average": (lambda v: bps.allreduce(v), lambda w: everybodys.sum(0) / np.float32(size)),
        "broadcast": (
            lambda v: bps.broadcast(v, 0),
            lambda w: everybodys.sum(0) / np.float32(size) if rank == 0 else np.zeros_like(everybodys[0]),
        ),
    }
    for name, (function, expected) in op_of.items():

        def gradient(function=function):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(function(x) * weights)
            return tape.gradient(loss, x)

        for run in both(gradient):
            same(run(), expected(weights), name)

    mine = tf.Variable(tf.ones([rank + 1, 2]))
    rows = size * (size + 1) // 2

    def gathered():
        with tf.GradientTape() as tape:
            scale = tf.reshape(tf.range(rows, dtype=tf.float32), [-1, 1]) * (rank + 1.0)
            loss = tf.reduce_sum(bps.allgather(mine) * scale)
        return tape.gradient(loss, mine)

    first = rank * (rank + 1) // 2
    scale = np.arange(first, first + rank + 1, dtype="float32") * rows / np.float32(size)
    for run in both(gathered):
        same(run(), np.stack([scale, scale], 1))

    def exchanged():
        with tf.GradientTape() as tape:
            output, _ = bps.alltoall(x, splits=[1] * size)
            loss = tf.reduce_sum(output) * (rank + 1.0)
        return tape.gradient(loss, x)

    for run in both(exchanged):
        column = np.arange(1, size + 1, dtype="float32")
        same(run(), np.stack([column, column], 1))

    def first(operation, weights):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(operation(x) * weights)
        return tape.gradient(loss, x)

    def second(operation, v):
        """Of half the square of the result, as a product with v."""
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(operation(x) ** 2) / 2
            product = tf.reduce_sum(inner.gradient(loss, x) * v)
        return outer.gradient(product, x)

    v = tf.constant(given(rank, tf.float32, size, 2) + 1)
    for operation, factor in (
        (lambda x: bps.allreduce(x, op=bps.Sum, name="g"), 1),
        (lambda x: bps.broadcast(x, 0, name="g"), 1 / size),
        (lambda x: bps.allgather(x, name="g"), 1 / size),
        (lambda x: bps.alltoall(x, name="g"), 1),
        (lambda x: bps.reducescatter(x, op=bps.Sum), 1),
    ):
        expected = first(operation, factor * operation(v))
        for run in both(lambda operation=operation: second(operation, v)):
            np.testing.assert_allclose(run(), expected, rtol=1e-5)

    def scattered():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(bps.reducescatter(x, op=bps.Sum)) * (rank + 1.0)
        return tape.gradient(loss, x)

    for run in both(scattered):
        column = np.arange(1, size + 1, dtype="float32") * size
        same(run(), np.stack([column, column], 1))

    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(bps.allreduce(x, op=bps.Max))
    expect(RuntimeError, lambda: tape.gradient(loss, x), "sums and averages")


def check_graphs():
    """Branches, loops, calls of functions and results that nobody uses: the order stays that of the program."""
    rank, size = bps.rank(), bps.size()
    ranks = float(sum(range(size)))

    @tf.function
    def inner(x):
        return bps.allreduce(x, op=bps.Sum)

    @tf.function
    def outer(x, n):
        total = tf.zeros([2])
        bps.allreduce(x + 100.0, op=bps.Sum)  # unused
        for i in tf.range(n):
            total += inner(x + tf.cast(i, tf.float32))
            if i % 2 == 0:
                total += bps.allreduce(x, op=bps.Sum)
            else:
                total -= bps.allreduce(x * 2.0, op=bps.Sum)
        return total + inner(x), bps.allgather(x)

    for n in (0, 1, 6):
        total, gathered = outer(tf.fill([2], float(rank)), tf.constant(n))
        expected = sum(ranks + i * size + (ranks if i % 2 == 0 else -2 * ranks) for i in range(n)) + ranks
        same(total, np.full(2, expected, "float32"))
        same(gathered, np.repeat(np.arange(size, dtype="float32"), 2))

    # Loops whose steps do not depend on one another: TensorFlow would run several at once.
    def independent(x):
        return tf.map_fn(lambda row: bps.allreduce(row, op=bps.Sum), x, parallel_iterations=10)

    rows = tf.constant(np.arange(40, dtype="float32").reshape(20, 2)) * (rank + 1)
    expected = np.arange(40, dtype="float32").reshape(20, 2) * sum(range(1, size + 1))
    for _ in range(5):
        same(tf.function(independent)(rows), expected)

    # More tensors than TensorFlow has threads, of which each rank is given the first ones at another time.
    @tf.function
    def many(x):
        results = bps.grouped_allreduce([x + i for i in range(100)], op=bps.Sum)
        return [bps.allreduce(r, op=bps.Sum, name=f"many.{i}") for i, r in enumerate(results)]

    for _ in range(3):
        for i, r in enumerate(many(tf.fill([4], float(rank)))):
            same(r, np.full(4, (ranks + i * size) * size, "float32"))

    # Handles that nobody waits for are let go of: there are 4096 at a time.
    @tf.function
    def forget(x):
        for i in range(50):
            bps.allreduce(x, op=bps.Sum, name=f"forgotten.{i}")
        return x

    for _ in range(100):
        forget(tf.zeros([3]))

    with tf.Graph().as_default():
        expect(RuntimeError, lambda: bps.allreduce(tf.zeros([3])), "TensorFlow 1")
        expect(RuntimeError, lambda: bps.broadcast_global_variables(0), "broadcast_variables")

    @tf.function(jit_compile=True)
    def compiled(x):
        return bps.allreduce(x)

    expect(tf.errors.InvalidArgumentError, lambda: compiled(tf.zeros([3])), "BpsSubmit")


def check_sparse():
    rank, size = bps.rank(), bps.size()
    # Rows 0, 2, 4, ... of rank 0; 1, 3, 5, ... of rank 1: some are shared, some twice on one rank.
    indices = np.array([rank, rank + 2, rank, 7], "int64")
    values = given(rank, tf.float32, 4, 3)
    dense = np.zeros((size, 10, 3), "float32")
    for r in range(size):
        for index, row in zip([r, r + 2, r, 7], given(r, tf.float32, 4, 3)):
            dense[r, index] += row

    def reduce(values, indices, op):
        return bps.allreduce(tf.IndexedSlices(values, indices, tf.constant([10, 3], tf.int64)), op=op)

    for run in both(reduce):
        for op in (bps.Sum, bps.Average):
            merged = run(tf.constant(values), tf.constant(indices), op)
            assert isinstance(merged, tf.IndexedSlices)
            listed = merged.indices.numpy()
            assert listed.tolist() == sorted(set(listed))
            expected = dense.sum(0) if op == bps.Sum else dense.sum(0) / np.float32(size)
            same(tf.convert_to_tensor(merged), expected)
    expect(NotImplementedError, lambda: reduce(values, indices, bps.Max), "sparse_as_dense")
    unmerged = bps.allreduce(tf.IndexedSlices(values, indices))  # of a whole of unknown shape
    same(unmerged.indices, bps.allgather(indices))
    same(unmerged.values, bps.allgather(values).numpy() / np.float32(size))
    unmerged = bps.allreduce(tf.IndexedSlices(values, indices), op=bps.Sum, name="unmerged")
    same(unmerged.values, bps.allgather(values))
    expect(bps.BpsValueError, lambda: reduce(values, indices + 10, bps.Sum), "row")
    # One rank has nothing, the others all of it, with numbers of 32 bits.
    n = 10 if rank else 0
    for run in both(lambda v, i: bps.allreduce(tf.IndexedSlices(v, i, tf.constant([10, 2])), op=bps.Sum)):
        merged = run(tf.ones([n, 2], tf.float16), tf.range(n))
        assert merged.indices.dtype == tf.int32
        same(merged.values, np.full([10 if size > 1 else 0, 2], size - 1, "float16"))


def check_state():
    rank, size = bps.rank(), bps.size()
    made = [
        tf.Variable(given(rank, dtype, 3, 2) if dtype.size else 0, dtype=dtype) for dtype in DTYPES if dtype != tf.bool
    ]
    made.append(tf.Variable(tf.cast(given(rank, tf.int32, 5), tf.uint32)))
    bps.broadcast_variables(made, root_rank=size - 1)
    for variable in made:
        shape = variable.shape
        expected = given(size - 1, tf.int32 if variable.dtype == tf.uint32 else variable.dtype, *shape)
        same(tf.cast(variable, tf.float64), expected.astype("float64"), variable.dtype)

    variables = [tf.Variable(tf.fill([2], float(rank))) for _ in range(3)]

    @tf.function
    def in_a_graph():
        bps.broadcast_variables(variables[:2], 0)
        variables[2].assign_add([1.0, 1.0])

    in_a_graph()
    same(variables[1], np.zeros(2, "float32"))
    same(variables[2], np.full(2, rank + 1, "float32"))
    bps.broadcast_(variables[2:], size - 1)
    same(variables[2], np.full(2, size, "float32"))

    assert bps.broadcast_object({"rank": rank, "x": [1, "two"]}, 0) == {"rank": 0, "x": [1, "two"]}
    assert bps.broadcast_object_fn(size - 1)(rank) == size - 1
    assert bps.allgather_object("x" * rank) == ["x" * r for r in range(size)]
    expect(RuntimeError, lambda: bps.broadcast_global_variables(0), "broadcast_variables")
    bps.barrier()


def two_sets():
    """(the set that this rank is in, the other, ranks of the first): the ends, and what is between them."""
    rank, size = bps.rank(), bps.size()
    outer, inner = [0, size - 1], list(range(1, size - 1))
    ends, middle = bps.add_process_set(outer), bps.add_process_set(inner)
    return (ends, middle, outer) if rank in outer else (middle, ends, inner)


def check_process_sets():
    """Two sets do different things at one time; a root is named by its number among all ranks."""
    rank, size = bps.rank(), bps.size()
    mine, other, ranks = two_sets()
    n, number = len(ranks), mine.process_set_id
    x = tf.fill([n, 2], float(rank))
    total = np.full((n, 2), sum(ranks), "float32")
    in_turn = np.repeat(np.array(ranks, "float32"), 2).reshape(-1, 2)

    def operations(x):
        return (
            bps.allreduce(x, op=bps.Sum, process_set=mine),
            bps.allreduce(x, name="of the set", process_set=mine),
            *bps.grouped_allreduce([x, tf.ones(3)], name="group", op=bps.Sum, process_set=mine),
            bps.allreduce(1 + x, op=bps.Product, process_set=mine),
            bps.broadcast(x, ranks[-1], process_set=mine),
            bps.allgather(x[:1], name="rows", process_set=mine),
            bps.grouped_allgather([x[:1]], process_set=mine)[0],
            bps.alltoall(x, process_set=mine),
            *bps.alltoall(x, splits=[1] * n, process_set=mine),
            bps.reducescatter(x, op=bps.Sum, process_set=mine),
            bps.grouped_reducescatter([x], op=bps.Sum, process_set=mine)[0],
            bps.allreduce(tf.ones(1), op=bps.Sum),
        )

    expected = [total, total / np.float32(n), total, np.full(3, n, "float32")]
    expected += [np.full((n, 2), np.prod([r + 1.0 for r in ranks]), "float32"), np.full((n, 2), ranks[-1], "float32")]
    expected += [in_turn] * 4 + [np.ones(n, "int32"), total[:1], total[:1], np.full(1, size, "float32")]
    for run in both(operations):
        for got, wanted in zip(run(x), expected, strict=True):
            same(got, wanted)
    for slices in (tf.IndexedSlices(x, tf.range(n), tf.constant([9, 2])), tf.IndexedSlices(x, tf.range(n))):
        merged = bps.allreduce(slices, op=bps.Sum, process_set=mine)
        same(merged.values, total if slices.dense_shape is not None else np.repeat(in_turn, n, 0))
    variables = [tf.Variable(x), tf.Variable(x)]
    bps.broadcast_variables(variables[:1], ranks[-1], process_set=mine)
    bps.broadcast_(variables[1:], ranks[-1], process_set=mine)
    for variable in variables:
        same(variable, np.full((n, 2), ranks[-1], "float32"))
    assert bps.broadcast_object({"from": rank}, ranks[-1], process_set=mine) == {"from": ranks[-1]}
    assert bps.allgather_object(rank, process_set=mine) == ranks
    for run in both(lambda: (bps.size_op(number), bps.process_set_included_op(number))):
        assert [int(x) for x in run()] == [n, 1]
    outside = next(r for r in range(size) if r not in ranks)
    expect(bps.BpsValueError, lambda: bps.size_op(-1), "no such set")
    for kind in (bps.BpsValueError, tf.errors.InvalidArgumentError):
        expect(kind, lambda: bps.allreduce(x, process_set=other), f"rank {rank} is not in ProcessSet")
    expect(bps.BpsValueError, lambda: bps.broadcast(x, outside, process_set=mine), f"root rank {outside} is not one of")
    expect(bps.BpsValueError, lambda: bps.allreduce(x, process_set="mine"), "no ProcessSet")
    expect(Exception, tf.function(lambda: bps.allreduce(x, process_set=other)), f"rank {rank} is not in ProcessSet")
    assert all([bps.remove_process_set(each) for each in sorted((mine, other), key=lambda each: each.ranks)])


def check_gradients_of_process_sets():
    """They are over the set too, and are asked for when the call is over."""
    rank = bps.rank()
    mine, other, ranks = two_sets()
    n, place = len(ranks), ranks.index(rank)
    weights = [r + 1.0 for r in ranks]
    x = tf.Variable(tf.fill([n, 2], float(rank)))
    of_mean = np.full((n, 2), np.mean(weights), "float32")
    scattered = np.repeat(np.array(weights, "float32") * n, 2).reshape(n, 2)
    operations = {
        "sum": (lambda v: bps.allreduce(v, op=bps.Sum, name="g", process_set=mine), of_mean * n),
        "average": (lambda v: bps.allreduce(v, process_set=mine), of_mean),
        "broadcast": (lambda v: bps.broadcast(v, ranks[-1], process_set=mine), of_mean * (rank == ranks[-1])),
        "allgather": (lambda v: bps.allgather(v, process_set=mine), of_mean),
        "alltoall": (lambda v: bps.alltoall(v, process_set=mine), scattered / n),
        "reducescatter": (lambda v: bps.reducescatter(v, op=bps.Sum, process_set=mine), scattered),
    }
    for what, (operation, expected) in operations.items():

        def gradient(operation=operation):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(operation(x) * weights[place])
            return tape.gradient(loss, x)

        for run in both(gradient):
            same(run(), expected, what)
    with tf.GradientTape() as late:
        total = bps.allreduce(x, process_set=mine)
    for each in sorted((mine, other), key=lambda each: each.ranks):
        bps.remove_process_set(each)
    expect(bps.BpsValueError, lambda: late.gradient(total, x), "process set", "was removed")


def check_a_process_set_that_is_removed():
    """No later set is taken for it by what was traced for it."""
    mine, other, ranks = two_sets()
    both_sets = sorted((mine, other), key=lambda each: each.ranks)

    @tf.function
    def traced(x):
        return bps.allreduce(x, op=bps.Sum, process_set=mine), bps.allgather(x, process_set=mine)

    same(traced(tf.ones(1))[0], np.full(1, len(ranks), "float32"))
    numbers = [each.process_set_id for each in both_sets]
    for each in both_sets:
        bps.remove_process_set(each)
    words = (f"process set {numbers[both_sets.index(mine)]} is not in use", "removed")
    expect(bps.BpsValueError, lambda: bps.allreduce(tf.ones(1), process_set=mine), "not in use")
    expect(tf.errors.InvalidArgumentError, lambda: traced(tf.ones(1)), *words)
    for each in both_sets:
        bps.add_process_set(each)
    assert min(each.process_set_id for each in both_sets) > max(numbers)
    expect(tf.errors.InvalidArgumentError, lambda: traced(tf.ones(1)), *words)
    same(bps.allreduce(tf.ones(1), op=bps.Sum, process_set=mine), np.full(1, len(ranks), "float32"))
    for each in both_sets:
        bps.remove_process_set(each)


def check_a_name_again():
    """With another type or size it is another tensor, in eager code and in graphs; and with the first it is the first."""
    rank, size = bps.rank(), bps.size()
    graph = tf.function(lambda x: bps.allreduce(x, op=bps.Sum, name="again"))
    for dtype, n in ((tf.float32, 3), (tf.int64, 3), (tf.float32, 5), (tf.float32, 3)):
        x = tf.cast(tf.fill([n], rank), dtype)
        for call in (lambda x: bps.allreduce(x, op=bps.Sum, name="again"), graph):
            same(call(x), np.full(n, size * (size - 1) // 2, dtype.as_numpy_dtype))
        same(bps.allgather(x, name="again"), np.repeat(np.arange(size, dtype=dtype.as_numpy_dtype), n))
        same(bps.broadcast(x, 1, name="again"), np.ones(n, dtype.as_numpy_dtype))


def check_join():
    """Ranks that take more steps, in eager code and in a graph, have zeros from those that have ended."""
    rank, size = bps.rank(), bps.size()
    variable = tf.Variable([1.0, 2.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * variable)
        return bps.DistributedGradientTape(tape).gradient(loss, [variable])[0], bps.allreduce(tf.ones(2), op=bps.Sum)

    for call in (step, tf.function(step)):
        for at in range(1 + rank):
            gradient, total = call()
            same(gradient, np.array([2.0, 4.0], "float32") * np.float32(size - at) / np.float32(size))
            same(total, np.full(2, size - at, "float32"))
        assert bps.join() == size - 1
    same(bps.allreduce(tf.constant(rank), op=bps.Sum), np.int32(size * (size - 1) // 2))


def main():
    tf.get_logger().setLevel("ERROR")  # the same function is traced for many types on purpose
    bps.init()
    assert not _client._is_alone()  # operations begin in other threads
    for _, check in chosen(globals(), sys.argv[1:]):
        check()
    print("done")


main()
