"""All operations on arrays, against NumPy's own answers. Every rank knows every rank's input."""

import array
import errno
import sys
import time

import numpy as np
from checks import chosen

import bps
from bps import _ops

DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
COUNTS = [1, 7, 1000, 300_001]  # the last is more than one part


def given(rank, dtype, shape, seed=0):
    """What a rank contributes: whole numbers, whose sums are exact in every type."""
    random = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return random.random(shape) < 0.5
    low = 0 if dtype.startswith("u") else -20
    return random.integers(low, 21, shape).astype(dtype)


def all_given(dtype, shape, seed=0):
    return [given(rank, dtype, shape, seed) for rank in range(bps.size())]


def expected(inputs, op):
    dtype = inputs[0].dtype
    stack = np.stack(inputs)
    if op == bps.Min:
        return stack.min(0)
    if op == bps.Max or (dtype == bool and op == bps.Sum):
        return stack.max(0)
    if dtype == bool:
        raise ValueError("bool has no average")
    if np.issubdtype(dtype, np.integer):
        total = stack.sum(0, dtype=np.int64)
        return (np.floor_divide(total, len(inputs)) if op == bps.Average else total).astype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    total = stack.astype(wide).sum(0, dtype=wide)
    return (total / wide(len(inputs)) if op == bps.Average else total).astype(dtype)


def check_push_pull():
    for dtype in DTYPES:
        for count in COUNTS:
            for op in (bps.Sum, bps.Average, bps.Min, bps.Max):
                if dtype == "bool" and op == bps.Average:
                    continue
                inputs = all_given(dtype, count)
                mine = inputs[bps.rank()]
                before = mine.copy()
                result = bps.push_pull(mine, op=op, name=f"{dtype}.{count}")
                assert result.dtype == mine.dtype
                np.testing.assert_array_equal(result, expected(inputs, op), err_msg=f"{dtype} {count} {op!r}")
                np.testing.assert_array_equal(mine, before)


def check_push_pull_in_place_and_shared():
    inputs = all_given("float32", (30, 50), 1)
    mine = inputs[bps.rank()].copy()
    assert bps.push_pull(mine, output=mine, name="in place") is mine
    np.testing.assert_array_equal(mine, expected(inputs, bps.Average))
    shared = bps.zeros((30, 50))
    assert not shared.any() and shared.flags.writeable
    shared[:] = inputs[bps.rank()]
    assert bps.push_pull(shared, average=False, output=shared, name="shared") is shared
    np.testing.assert_array_equal(shared, expected(inputs, bps.Sum))


def check_many_at_once_in_any_order():
    inputs = [all_given("float32", 100 + i, 2 + i) for i in range(50)]
    order = np.random.default_rng(bps.rank()).permutation(50)  # names may come in any order, each rank its own
    handles = {i: bps.push_pull_async(inputs[i][bps.rank()], name=f"many.{i}") for i in order}
    for i in range(50):
        np.testing.assert_array_equal(bps.synchronize(handles[i]), expected(inputs[i], bps.Average))
        assert bps.poll(handles[i])


def check_more_than_the_ring_holds():
    shared = bps.zeros((5000, 2))
    shared[:] = bps.rank()
    handles = [bps.push_pull_async(row, average=False, output=row, name=f"ring.{i}") for i, row in enumerate(shared)]
    for handle in handles:
        handle.wait()
    assert (shared == sum(range(bps.size()))).all()


def check_unnamed_in_a_loop():
    before = len(bps._current().tensors)
    for i in range(20):
        assert bps.push_pull(np.full(3, i, "float32"), average=False)[0] == i * bps.size()
    assert len(bps._current().tensors) == before + 1


def check_kinds_of_objects():
    n = bps.size()
    assert bps.push_pull(array.array("d", [1, 2]), op=bps.Sum, name="array") == array.array("d", [n, 2 * n])
    assert bps.push_pull(bytearray(b"\1\2"), op=bps.Sum, name="bytearray") == bytearray([n, 2 * n])
    result = bps.push_pull(memoryview(array.array("i", [bps.rank()])), op=bps.Max, name="view")
    assert (result.format, result.tolist()) == ("i", [n - 1])
    transposed = np.arange(6, dtype="float32").reshape(2, 3).T
    np.testing.assert_array_equal(bps.push_pull(transposed, name="transposed"), transposed)


def check_nothing():
    assert bps.push_pull(np.empty(0, "float32"), name="nothing").shape == (0,)
    assert bps.allgather(np.empty((0, 3), "float32"), name="nothing").shape == (0, 3)


def check_broadcast():
    for dtype in DTYPES:
        for root in range(bps.size()):
            inputs = all_given(dtype, (5, 7), root)
            result = bps.broadcast(inputs[bps.rank()], root, name=f"{dtype}")
            np.testing.assert_array_equal(result, inputs[root])
    mine = np.full(400_000, bps.rank(), "int64")
    assert bps.broadcast(mine, 1, name="in place", output=mine) is mine
    assert (mine == 1).all()


def check_broadcast_moves_bits():
    bits = np.arange(2**16, dtype="uint16").view("float16")  # every float16 there is, NaNs with payloads too
    mine = bits if bps.rank() == 0 else np.zeros_like(bits)
    result = bps.broadcast(mine, 0, name="bits")
    np.testing.assert_array_equal(result.view("uint16"), bits.view("uint16"))


def check_types_that_only_move():
    for dtype in ("uint16", "uint32", "uint64", "complex64", "complex128", ">f4", "U3", "M8[s]", [("a", "i4"), ("b", "f8")]):
        dtype = np.dtype(dtype)

        def bits(rank, *shape):
            random = np.random.default_rng(rank).integers(65, 91, (*shape, dtype.itemsize // (4 if dtype.kind == "U" else 1)))
            return (random.astype("uint32") if dtype.kind == "U" else random.astype("uint8")).view(dtype).reshape(shape)

        root = bps.size() - 1
        name = "".join(c if c.isalnum() else "." for c in str(dtype))
        got = bps.broadcast(bits(bps.rank(), 4, 3), root, f"moved.{name}")
        assert got.dtype == dtype and got.tobytes() == bits(root, 4, 3).tobytes(), dtype
        got = bps.allgather(bits(bps.rank(), bps.rank() + 1, 2), f"gathered.{name}")
        wanted = b"".join(bits(r, r + 1, 2).tobytes() for r in range(bps.size()))
        assert got.dtype == dtype and got.shape[1:] == (2,) and got.tobytes() == wanted, dtype
        got = bps.alltoall(bits(bps.rank(), bps.size(), 2), name=f"cut.{name}")
        wanted = b"".join(bits(r, bps.size(), 2)[bps.rank()].tobytes() for r in range(bps.size()))
        assert got.dtype == dtype and got.tobytes() == wanted, dtype
    numbers = bps.broadcast(array.array("I", [1 + bps.rank(), 2**32 - 1]), 0, "array of I")
    assert numbers.typecode == "I" and list(numbers) == [1, 2**32 - 1]
    for refused in (lambda: bps.push_pull(np.ones(2, "complex64"), name="c"), lambda: bps.broadcast(np.array([None]), 0, "o")):
        try:
            refused()
            raise AssertionError("was taken")
        except TypeError as error:
            assert "no element type" in str(error)


def check_allgather():
    for dtype in DTYPES:
        for rows in ([2] * bps.size(), list(range(bps.size())), [1000 * (r == 1) for r in range(bps.size())]):
            inputs = [given(r, dtype, (rows[r], 3, 2)) for r in range(bps.size())]
            result = bps.allgather(inputs[bps.rank()], name=dtype)
            np.testing.assert_array_equal(result, np.concatenate(inputs))


def check_alltoall():
    n, rank = bps.size(), bps.rank()
    for dtype in DTYPES:
        even = [given(r, dtype, (2 * n, 3)) for r in range(n)]
        result = bps.alltoall(even[rank], name=dtype)
        np.testing.assert_array_equal(result, np.concatenate([x[2 * rank : 2 * rank + 2] for x in even]))
        splits = [[(r + 2 * to) % 4 for to in range(n)] for r in range(n)]
        inputs = [given(r, dtype, (sum(splits[r]), 5)) for r in range(n)]
        result, received = bps.alltoall(inputs[rank], splits[rank], name=dtype)
        cuts = [np.split(inputs[r], np.cumsum(splits[r])[:-1])[rank] for r in range(n)]
        np.testing.assert_array_equal(result, np.concatenate(cuts))
        assert received == [splits[r][rank] for r in range(n)]


def check_reducescatter():
    n, rank = bps.size(), bps.rank()
    for dtype in DTYPES:
        for rows in (2 * n, 2 * n + 1, 1):
            for op in (bps.Sum, bps.Average, bps.Min, bps.Max):
                if dtype == "bool" and op == bps.Average:
                    continue
                inputs = all_given(dtype, (rows, 4), rows)
                result = bps.reducescatter(inputs[rank], op, name=f"{dtype}.{rows}")
                np.testing.assert_array_equal(result, np.array_split(expected(inputs, op), n)[rank])


def check_push_pull_rows():
    n, rank = bps.size(), bps.rank()
    for dtype in ("float32", "float64", "int32", "float16"):
        for shape in ((), (3,), (2, 4)):
            rows = [np.random.default_rng(r).integers(0, 50, 5 * r) for r in range(n)]
            values = [given(r, dtype, (5 * r, *shape)) for r in range(n)]
            table = np.zeros((50, *shape), dtype)
            for r in range(n):
                np.add.at(table, rows[r], values[r])
            for op, divisor in ((bps.Sum, 1), (bps.Average, n)):
                name = f"{dtype}.{shape}"
                got, result = bps.push_pull_rows(rows[rank], values[rank], 50, op=op, name=name)
                np.testing.assert_array_equal(got, np.unique(np.concatenate(rows)))
                assert result.dtype == dtype and result.shape == (len(got), *shape)
                want = table[got] // divisor if dtype == "int32" else table[got] / np.dtype(dtype).type(divisor)
                np.testing.assert_allclose(result, want, rtol=2e-3 if dtype == "float16" else 1e-6)
    handles = [bps.push_pull_rows_async([7], np.full((1, 2), i, "float32"), 9, op=bps.Sum) for i in range(20)]
    for i, handle in enumerate(handles):
        got, result = bps.synchronize(handle)
        assert got.tolist() == [7] and result.tolist() == [[i * n] * 2]
    try:
        bps.push_pull_rows([rank, n], np.ones((2, 2), "float32"), 9, room=n if rank == 0 else None, name="room")
        assert rank != 0, "more rows than room"
    except bps.BpsError as error:
        assert rank == 0 and error.errno == errno.ENOSPC and f"{n + 1} rows" in str(error), error
    got, result = bps.push_pull_rows([10**10 - 1 - rank], np.ones((1, 2), "float32"), 10**10, op=bps.Sum)  # room for n rows
    assert got.tolist() == [10**10 - n + r for r in range(n)] and result.tolist() == [[1.0, 1.0]] * n
    for rows, values, what in (([0], np.ones((2, 2)), ValueError), ([0.5], np.ones((1, 2)), TypeError)):
        try:
            bps.push_pull_rows(rows, values, 9)
            raise AssertionError("taken")
        except what:
            pass
    try:
        bps.push_pull_rows([9], np.ones((1, 2), "float32"), 9, name="outside")
        raise AssertionError("taken")
    except bps.BpsValueError as error:
        assert "row 9 of a table of 9" in str(error), error


def check_moves_that_are_awaited_in_another_order():
    """Of one name, by waiting and by polling; on each rank another first."""
    rank, n = bps.rank(), bps.size()

    def expected(i):
        return np.repeat(np.arange(n) + 10 * i, 2)

    for polls in (False, True):
        for begin, count in ((bps.allgather_async, 2), (bps.alltoall_async, 2 * n)):
            handles = [begin(np.full(count, rank + 10 * i)) for i in range(8)]
            for i in range(8):
                i = (i + 3 * rank) % 8 if rank % 2 else 7 - i
                while polls and not handles[i].poll():
                    time.sleep(0)  # polling is what is tested
                assert (handles[i].wait() == expected(i)).all(), (rank, i, handles[i].wait())
    # Of several names, some while another operation is awaited.
    handles = [bps.allgather_async(np.full(2, rank + 10 * i), name=f"apart.{i}") for i in range(8)]
    if rank == 0:
        bps.push_pull(np.ones(1), name="between")
        bps.barrier()
    for i in range(8) if rank % 2 else reversed(range(8)):
        assert (handles[i].wait(60) == expected(i)).all()
    if rank != 0:
        bps.push_pull(np.ones(1), name="between")
        bps.barrier()
    handles = [bps.allgather_async(np.full(1, i)) for i in range(1100)]  # more than Python's calls may be deep
    assert handles[-1].wait().tolist() == [1099] * n
    bps.barrier()
    late = [bps.allgather_async(np.ones(1), name="late") for _ in range(2 if rank == 0 else 0)]
    for handle in reversed(late):
        try:
            handle.wait(0.2)
            raise AssertionError("gathered from ranks that have not come")
        except bps.BpsTimeoutError:
            pass
    bps.barrier()
    late += [bps.allgather_async(np.ones(1), name="late") for _ in range(0 if rank == 0 else 2)]
    assert late[1].wait(60).tolist() == late[0].wait(60).tolist() == [1] * n


def check_dropped_handles():
    """Their operations go on: other ranks wait for what these have yet to send."""
    rank, n = bps.rank(), bps.size()
    whole = np.repeat(np.arange(n), 2)
    for begin, count in ((bps.allgather_async, 2), (bps.alltoall_async, 2 * n)):
        first = begin(np.full(count, rank))
        if rank == 1:
            first = None
        second = begin(np.full(count, 10 + rank))
        if first is not None:
            np.testing.assert_array_equal(first.wait(), whole)
        np.testing.assert_array_equal(second.wait(), 10 + whole)
    handle = bps.allgather_async(np.full(2, rank))
    if rank == 1:
        del handle
    else:
        np.testing.assert_array_equal(handle.wait(), whole)
    request = _ops.barrier()  # while a thread waits for a request alone, nobody goes on with handles that are held
    request.wait()
    request.check()


def check_names_with_other_arrays():
    """What had the name first is as it was."""
    for n, dtype in ((4, "float32"), (7, "float32"), (4, "int32"), (4, "float32"), (7, "float32")):
        total = bps.push_pull(np.full(n, bps.rank() + 1, dtype), average=False, name="other")
        assert total.dtype == dtype and total.tolist() == [bps.size() * (bps.size() + 1) // 2] * n
    taken = bps.push_pull(np.ones(5, "int64"), average=False, name="other.int32.4")
    assert taken.dtype == "int64" and taken.tolist() == [bps.size()] * 5


def check_objects():
    obj = {"rank": bps.rank(), "text": "x" * 10000 * bps.rank()}
    for root in range(bps.size()):
        assert bps.broadcast_object(obj, root) == {"rank": root, "text": "x" * 10000 * root}
    everyone = bps.allgather_object([bps.rank()] * bps.rank(), name="lists")
    assert everyone == [[r] * r for r in range(bps.size())]


def check_disagreements():
    """Errors that name what is wrong, after which the job goes on."""
    mine = np.ones((2, 3 + (bps.rank() == 1)), "float32")
    try:
        bps.allgather(mine, name="rows differ")
        raise AssertionError("rows of different length were gathered")
    except bps.BpsValueError as error:
        assert "only the first dimension may differ" in str(error), error
    try:
        bps.push_pull(np.ones(3 + bps.rank(), "float32"), name="sizes differ")
        raise AssertionError("arrays of different size were added")
    except bps.BpsValueError as error:
        assert "sizes differ" in str(error), error
    try:
        bps.broadcast(np.ones(3), bps.size())
        raise AssertionError("a root that does not exist was taken")
    except bps.BpsValueError as error:
        assert "root rank" in str(error), error
    bps.barrier()


def check_averages_of_halves():
    """The largest numbers, whose sum is none."""
    for count in COUNTS:
        largest = np.full(count, 65504, "float16")
        np.testing.assert_array_equal(bps.push_pull(largest, name=f"half.{count}"), largest)
        np.testing.assert_array_equal(bps.push_pull(-largest, name=f"half.{count}"), -largest)
        scattered = bps.reducescatter(np.tile(largest, bps.size()), name=f"half.{count}")
        np.testing.assert_array_equal(scattered, largest)


def main():
    bps.init()
    for name, check in chosen(globals(), sys.argv[1:]):
        check()
        print(f"ok {name[6:]}", flush=True)
    bps.barrier()
    bps.shutdown()
    bps.init(force_distributed=True)  # the same by a server
    check_averages_of_halves()
    bps.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
