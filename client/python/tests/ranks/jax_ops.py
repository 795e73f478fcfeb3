"""Operations of bps.jax against NumPy, which computes every rank's part by itself. Run by name, or all of them."""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from checks import chosen

import bps as plain
import bps.jax as bps
from bps import _client
from bps.jax.ops import operation_p

jax.config.update("jax_enable_x64", True)

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def value(rank, shape, dtype="float32", seed=0):
    """What a rank contributes."""
    generator = np.random.default_rng(1000 * seed + rank)
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        return generator.integers(0, 50, shape).astype(dtype)
    return generator.integers(-8, 8, shape).astype(jnp.dtype(dtype)) / jnp.dtype(dtype).type(4)


def mine(shape, dtype="float32", seed=0):
    return jnp.asarray(value(bps.rank(), shape, dtype, seed))


def everyone(shape, dtype="float32", seed=0):
    return np.stack([value(r, shape, dtype, seed) for r in range(bps.size())])


def equal(got, wanted):
    wanted = np.asarray(wanted)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, (got.shape, got.dtype, wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(np.asarray(got), wanted)


def raises(kind, function, *words):
    try:
        jax.block_until_ready(function())
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


both_ways = (lambda f: f, jax.jit)


def check_types_and_reductions():
    for how in both_ways:
        for dtype in FLOATS + INTEGERS:
            x, all_of_them = mine((3, 5), dtype), everyone((3, 5), dtype).astype("float64")
            total = all_of_them.sum(0)
            average = np.floor(total / bps.size()) if dtype in INTEGERS else total / bps.size()
            for op, wanted in (
                (bps.Sum, total),
                (bps.Average, average),
                (bps.Min, all_of_them.min(0)),
                (bps.Max, all_of_them.max(0)),
            ):
                got = how(functools.partial(bps.allreduce, op=op))(x)
                if op == bps.Average and dtype in FLOATS:
                    np.testing.assert_allclose(np.asarray(got, "float64"), wanted, rtol=1e-2)
                    assert got.dtype == x.dtype
                else:
                    equal(got, wanted.astype(x.dtype))
        x, all_of_them = mine((7,), "bool"), everyone((7,), "bool")
        equal(how(functools.partial(bps.allreduce, op=bps.Sum))(x), all_of_them.any(0))
        equal(how(functools.partial(bps.allreduce, op=bps.Min))(x), all_of_them.all(0))
    raises(TypeError, lambda: bps.allreduce(jnp.ones(2, bool)), "bool has no average")
    raises(TypeError, lambda: bps.allreduce(jnp.ones(2, "complex64")), "complex64")
    raises(TypeError, lambda: jax.jit(bps.allreduce)(jnp.ones(2, "uint32")), "uint32", "float32")
    equal(bps.push_pull(mine((4,)), average=False, name="p"), everyone((4,)).sum(0))
    equal(bps.allreduce(mine((4,)), op=bps.Sum, prescale_factor=2.0, postscale_factor=0.5), everyone((4,)).sum(0))
    equal(bps.allreduce(3, op=bps.Sum), np.asarray(3 * bps.size()))
    for dtype in (jnp.float16, jnp.bfloat16):
        large, factor = jnp.asarray([48000 // bps.size(), 100], dtype), 1e-8  # the factor is none of float16's
        expected = (large.astype("float32") * factor).astype(dtype)
        for when in ("prescale_factor", "postscale_factor"):
            equal(bps.allreduce(large, op=bps.Average, **{when: factor}), np.asarray(expected))
    for when in ("prescale_factor", "postscale_factor"):
        double = functools.partial(bps.allreduce, op=bps.Max, **{when: 2.0})
        with jax.enable_x64(False):
            for how in both_ways:
                equal(how(double)(jnp.int32([2**24 + 1])), np.int32([2**25 + 2]))  # no float32 is like it


def check_trees():
    """Hundreds of leaves of all sizes in one call, some of them empty, and more calls than one."""
    shapes = [(i % 7, i) if i % 5 else () for i in range(200)] + [(0,), (70000,), (3, 0, 2)]

    def tree(of):
        return {"a": [of(shape, seed=i) for i, shape in enumerate(shapes)], "none": None, "b": (of((2,), seed=999),)}

    @jax.jit
    def reduce(x):
        return bps.allreduce(x, op=bps.Sum, name="tree"), bps.allreduce(x, op=bps.Max)

    sums, largest = reduce(tree(mine))
    wanted = tree(everyone)
    assert sums["none"] is None
    jax.tree.map(lambda got, all_of_them: equal(got, all_of_them.sum(0)), sums, wanted)
    jax.tree.map(lambda got, all_of_them: equal(got, all_of_them.max(0)), largest, wanted)
    assert jax.jit(bps.allreduce)({}) == {}


def check_more_tensors_than_requests():
    """More tensors in one call than a client may have requests outstanding."""
    x = [np.full(1, float(i)) for i in range(4200)]
    sums = jax.jit(functools.partial(bps.allreduce, op=bps.Sum))(x)
    equal(np.concatenate(sums), np.arange(4200.0) * bps.size())


def check_order():
    """Calls that do not depend on one another keep their order on every rank, also under one and the same name."""
    average = jax.jit(functools.partial(bps.allreduce, op=bps.Sum))

    @jax.jit
    def program(x):
        parts = [jnp.sin(x * (i + 1)) * 0 + i + x for i in range(12)]
        if bps.rank() % 2:  # other computations around them than on other ranks
            parts = [p + jnp.sum(jnp.cos(jnp.outer(p, p)) * 0) for p in parts]
        return [average(p) for p in parts], [bps.allreduce(p * 2, op=bps.Sum, name="same") for p in parts]

    for turn in range(10):
        x = mine((300,), seed=turn)
        total = everyone((300,), seed=turn).sum(0)
        first, second = program(x)
        for i in range(12):
            equal(first[i], (total + i * bps.size()).astype("float32"))
            equal(second[i], (2 * (total + i * bps.size())).astype("float32"))
    # Programs under way at the same time, none of which anybody waits for at first.
    results = [program(mine((300,), seed=turn)) for turn in range(5)]
    for turn, (first, _) in enumerate(results):
        equal(first[3], (everyone((300,), seed=turn).sum(0) + 3 * bps.size()).astype("float32"))


def check_moves():
    rank, size = bps.rank(), bps.size()
    for how in both_ways:
        for dtype in ("float32", "bfloat16", "int8", "bool"):
            x, all_of_them = mine((2 * size, 3), dtype), everyone((2 * size, 3), dtype)
            equal(how(bps.allgather)(x), np.concatenate(all_of_them))
            equal(how(functools.partial(bps.broadcast, root_rank=size - 1))(x), all_of_them[-1])
            equal(how(bps.alltoall)(x), np.concatenate([a[2 * rank : 2 * rank + 2] for a in all_of_them]))
        x, total = mine((2 * size + 1, 3)), everyone((2 * size + 1, 3)).sum(0)
        begin = sum(2 + (r < 1) for r in range(rank))
        share = total[begin : begin + 2 + (rank < 1)]
        equal(how(functools.partial(bps.reducescatter, op=bps.Sum))(x), share)
        equal(how(functools.partial(bps.reducescatter, op=bps.Sum, name="s"))([x, x * 2])[1], share * 2)
        equal(how(bps.allgather)({"a": jnp.float32(rank)})["a"], np.arange(size, dtype="float32"))
        equal(how(bps.allgather)(jnp.zeros((2, 0))), np.zeros((2 * size, 0)))
    # As many rows as each rank likes.
    x = jnp.asarray(value(rank, (rank + 1, 2)))
    equal(bps.allgather(x), np.concatenate([value(r, (r + 1, 2)) for r in range(size)]))
    equal(bps.allgather([x, x], name="g")[1], np.concatenate([value(r, (r + 1, 2)) for r in range(size)]))
    rows, received = bps.alltoall(jnp.full(size * (rank + 1), rank), splits=[rank + 1] * size)
    equal(rows, np.repeat(np.arange(size), np.arange(size) + 1))
    assert received.tolist() == [r + 1 for r in range(size)]
    raises(TypeError, lambda: jax.jit(lambda x: bps.alltoall(x, [1] * size))(jnp.ones(size)), "outside of jit")
    raises(
        plain.BpsValueError, lambda: bps.alltoall(jnp.ones(size + 1) if size > 1 else jnp.ones(0) + [1, 2]), "evenly"
    ) if (size > 1) else None
    raises(ValueError, lambda: bps.broadcast(jnp.ones(1), root_rank=size), f"root rank {size}")
    parameters = {"w": np.full(3, rank), "n": None, "name": f"rank {rank}", "s": jnp.float32(rank)}
    got = bps.broadcast_parameters(parameters, root_rank=size - 1)
    equal(got["w"], np.full(3, size - 1))
    assert got["name"] == f"rank {rank}" and got["s"] == size - 1
    assert bps.broadcast_object({"rank": rank}, root_rank=0) == {"rank": 0}
    assert bps.allgather_object(rank) == list(range(size))
    bps.barrier()
    jax.jit(lambda x: (bps.barrier(), x)[1])(1.0)


def check_what_only_moves():
    rank, size = bps.rank(), bps.size()

    def states(r):
        return {
            "key": jax.random.PRNGKey(r),
            "typed key": jax.random.key(r),
            "uint32": jnp.uint32(2**32 - 1 - r),
            "uint64": jnp.asarray(np.arange(3, dtype="uint64") + np.uint64(2**63 + r)),
            "complex": jnp.array([1j, 2 - 1j]) * (1 + r),
            "float8": (jnp.arange(4.0) + r).astype("float8_e4m3fn"),
            "int4": jnp.arange(-4, 4, dtype="int4") + jnp.int4(r),
            "NumPy": {"loss": np.float64(0.1) * (r + 1), "step": np.int64(2**40 + r), "table": np.arange(3, dtype="uint16") + r},
            "others": (3 + r, None, "word"),
        }

    def bits(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()

    got, wanted = bps.broadcast_parameters(states(rank), size - 1), states(size - 1)
    assert got.pop("others") == (3 + rank, None, "word") and wanted.pop("others")
    for (path, a), (_, b) in zip(*(jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (got, wanted))):
        assert type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b), (path, a, b)
    inside = jax.jit(lambda x: bps.broadcast(x, 0))(jnp.arange(3, dtype="uint32") + rank)
    equal(inside, np.arange(3, dtype="uint32"))
    gathered = bps.allgather(jnp.array([1j * (rank + 1)] * (rank + 1)))
    equal(gathered, np.concatenate([[1j * (r + 1)] * (r + 1) for r in range(size)]))
    rows = bps.alltoall(jnp.arange(size, dtype="uint32") + 100 * rank)
    equal(rows, (rank + 100 * np.arange(size)).astype("uint32"))


def check_without_jit():
    with jax.disable_jit():
        equal(jax.jit(bps.allreduce)(jnp.ones(3) * bps.rank()), np.full(3, np.arange(bps.size()).mean()))


def check_derivatives():
    """For every linear operation A: the sum over ranks of <A x, y> is that of <x, A' y>; the tangent is A itself."""
    size = bps.size()

    def inner(a, b):
        part = np.array([np.vdot(np.asarray(a, "float64"), np.asarray(b, "float64"))])
        return plain.push_pull(part, average=False, name="inner")[0]

    operations = {
        "sum": functools.partial(bps.allreduce, op=bps.Sum),
        "average": bps.allreduce,
        "scaled": functools.partial(bps.allreduce, op=bps.Sum, prescale_factor=2.0),
        "broadcast": functools.partial(bps.broadcast, root_rank=size - 1),
        "gather": lambda x: bps.allgather(x * 1),
        "scatter": functools.partial(bps.reducescatter, op=bps.Sum),
        "scatter average": bps.reducescatter,
        "all to all": bps.alltoall,
    }
    for name, operation in operations.items():
        rows = 2 * size + (1 if name.startswith("scatter") else 0)
        x, dx = mine((rows, 3), seed=1), mine((rows, 3), seed=2)
        for how in both_ways:
            y, back = jax.vjp(how(operation), x)
            ct = mine(y.shape, seed=3)
            (moved,) = back(ct)
            np.testing.assert_allclose(inner(y, ct), inner(x, moved), rtol=1e-5, err_msg=name)
            _, tangent = jax.jvp(how(operation), (x,), (dx,))
            np.testing.assert_allclose(tangent, how(lambda dx: jax.jvp(operation, (x,), (dx,))[1])(dx))
            np.testing.assert_allclose(tangent, operation(dx) if name != "gather" else bps.allgather(dx), rtol=1e-6)

    # Second derivatives: of half the square of a sum over ranks.
    def half_square(x):
        return 0.5 * jnp.sum(bps.allreduce(x, op=bps.Sum) ** 2)

    np.testing.assert_allclose(jax.hessian(half_square)(mine((3,))), np.eye(3) * size**2)
    # One leaf whose tangent is zero, one of integers.
    tree = {"a": mine((2,)), "i": jnp.arange(2), "c": mine((2,), seed=4)}
    gradient = jax.grad(lambda a: bps.allreduce({**tree, "a": a}, op=bps.Sum)["a"].sum())(tree["a"])
    equal(gradient, np.full(2, size, "float32"))
    for op in (bps.Min, bps.Max):
        raises(TypeError, lambda: jax.grad(lambda x: bps.allreduce(x, op=op).sum())(jnp.ones(2)), "has no derivative")


def check_transformations():
    size = bps.size()
    x, total = mine((4, 2 * size, 3)), everyone((4, 2 * size, 3)).sum(0)
    summed = functools.partial(bps.allreduce, op=bps.Sum)
    for axis in (0, 1, 2):
        equal(jax.vmap(summed, axis, axis)(x), total)
    equal(jax.jit(jax.vmap(jax.vmap(summed)))(x), total)
    both, same = jax.vmap(lambda a, b: bps.allreduce((a, b), op=bps.Sum), (0, None))(x, x[0])
    equal(both, total)
    equal(same, np.broadcast_to(total[0], (4, *total[0].shape)))
    for operation in (bps.alltoall, bps.reducescatter, lambda v: bps.allgather(v * 1)):
        one_by_one = [jax.jit(operation)(x[i]) for i in range(4)]
        equal(jax.vmap(operation)(x), np.stack(one_by_one))

    def step(carry, x):
        carry = bps.allreduce(carry, name="carry") + x
        return carry, carry

    xs = jnp.arange(6.0, dtype="float32")
    equal(jax.jit(lambda xs: jax.lax.scan(step, jnp.float32(0), xs)[1])(xs), np.cumsum(np.arange(6, dtype="float32")))
    equal(jax.grad(lambda xs: jax.lax.scan(step, jnp.float32(0), xs)[0])(xs), np.ones(6, "float32"))
    equal(jax.lax.fori_loop(0, 3, lambda i, v: bps.allreduce(v, op=bps.Sum), jnp.float32(1)), np.float32(size**3))
    branches = jax.jit(lambda p, v: jax.lax.cond(p, summed, lambda v: v, v))
    equal(branches(True, jnp.float32(2)), np.float32(2 * size))
    equal(branches(False, jnp.float32(2)), np.float32(2))
    remembered = jax.checkpoint(lambda v: jnp.sum(jnp.sin(summed(v))))
    np.testing.assert_allclose(jax.jit(jax.grad(remembered))(x[0]), size * np.cos(total[0]), rtol=1e-4, atol=1e-5)

    @jax.custom_vjp
    def own(v):
        return summed(v)

    own.defvjp(lambda v: (summed(v), None), lambda _, ct: (bps.allreduce(ct),))
    equal(jax.jit(jax.grad(lambda v: own(v).sum()))(x[0]), np.ones(x[0].shape, "float32"))


def check_calls_of_bps_beside_a_program():
    """None has a name. On one rank the program takes longer to come to its operation."""
    size = bps.size()

    @jax.jit
    def program(x, big):
        for _ in range(6 if bps.rank() == 0 else 0):
            big = (big @ big) / 400
        return bps.allreduce(x * big[0, 0], op=bps.Sum)

    big = jnp.ones((400, 400), "float32")
    for i in range(10):
        result = program(mine((1000,), seed=i), big)
        host = plain.push_pull(np.full(1000, i, "float32"), average=False)
        assert (host == i * size).all(), (i, host)
        equal(result, everyone((1000,), seed=i).sum(0).astype("float32"))


def check_a_name_again():
    """With another type or size it is another tensor, in one program and in the next; and with the first it is the first."""
    size = bps.size()
    both = jax.jit(lambda x, y: (bps.allreduce(x, op=bps.Sum, name="again"), bps.allreduce(y, op=bps.Sum, name="again")))
    for dtypes in (("float32", "int32"), ("float32", "float16"), ("float32", "float32")):
        for n in (3, 5, 3):
            for result, dtype in zip(both(*(jnp.ones(n, dtype) for dtype in dtypes)), dtypes):
                equal(result, np.full(n, size, dtype))


def check_names():
    """What the daemon is told does not depend on how often a rank has traced."""
    extra = 3 * bps.rank()
    for i in range(extra):
        jax.jit(lambda x: operation_p and x + i)(1.0)
        jax.make_jaxpr(bps.allreduce)(jnp.ones(3))
    equal(jax.jit(functools.partial(bps.allreduce, op=bps.Sum))(jnp.ones(3)), np.full(3, float(bps.size())))
    raises(ValueError, lambda: bps.allreduce(jnp.ones(3), name="two\nlines"), "one line")
    raises(jax.errors.JaxRuntimeError, lambda: bps.allreduce(jnp.ones(3), name="n" * 300), "255")


if __name__ == "__main__":
    bps.init()
    assert not _client._is_alone()  # operations begin in other threads
    for name, check in chosen(globals(), sys.argv[1:]):
        check()
        print(f"{name} {time.process_time():.1f} s", flush=True)
    print("done", flush=True)
