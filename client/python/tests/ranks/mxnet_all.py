"""Operations and training of bps.mxnet against NumPy and against one process. Run by name, or all of them."""

import sys
import time

import mxnet as mx
import numpy as np
from checks import chosen
from mxnet import autograd, gluon

import bps as plain
import bps.mxnet as bps
from bps import _client

STEPS = 6
SHARE = 8  # examples of one rank in one step
DTYPES = ("float64", "float32", "float16", "int64", "int32", "int8", "uint8", "bool")


def value(rank, shape, dtype="float32", seed=0):
    generator = np.random.default_rng(1000 * seed + rank)
    if dtype == "bool":
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.startswith("float"):
        return (generator.integers(-8, 8, shape) / 4).astype(dtype)
    return generator.integers(0, 20, shape).astype(dtype)


def mine(shape, dtype="float32", seed=0):
    return mx.nd.array(value(bps.rank(), shape, dtype, seed), dtype=dtype)


def everyone(shape, dtype="float32", seed=0):
    return np.stack([value(r, shape, dtype, seed) for r in range(bps.size())])


def equal(got, wanted):
    got = got.asnumpy()
    assert got.shape == wanted.shape and got.dtype == wanted.dtype, (got.shape, got.dtype, wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(got, wanted)


def raises(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def check_types():
    for dtype in DTYPES:
        x, all_of_them = mine((3, 5), dtype), everyone((3, 5), dtype)
        wide = all_of_them.astype("float64")
        equal(bps.allreduce(x, op=bps.Min), all_of_them.min(0))
        equal(bps.allreduce(x, op=bps.Max), all_of_them.max(0))
        if dtype == "bool":
            equal(bps.allreduce(x, op=bps.Sum), all_of_them.any(0))
            raises(TypeError, lambda: bps.allreduce(x), "no average")
            continue
        equal(bps.allreduce(x, average=False), wide.sum(0).astype(dtype))
        average = wide.sum(0) / bps.size()
        got = bps.allreduce(x).asnumpy()
        np.testing.assert_allclose(got, average if dtype.startswith("float") else np.floor(average), rtol=1e-3)
        equal(x, value(bps.rank(), (3, 5), dtype))
        bps.byteps_push_pull(x, is_average=False, name=f"push.{dtype}")
        equal(x, wide.sum(0).astype(dtype))
        wire, context = bps.Compression.fp16.compress(x)
        assert wire.dtype == (np.float16 if dtype.startswith("float") else x.dtype)
        assert bps.Compression.fp16.decompress(wire, context).dtype == x.dtype
        assert bps.Compression.none.compress(x) == (x, None)
    raises(TypeError, lambda: bps.allreduce(np.ones(3)), "ndarray")
    raises(TypeError, lambda: bps.allreduce(mx.nd.ones((2, 2)).tostype("row_sparse")), "row_sparse", "tostype")
    bps.byteps_declare_tensor("x", byteps_compressor_type=None)
    raises(ValueError, lambda: bps.declare("x", byteps_compressor_type="onebit"), "onebit", "fp16")


def check_moves():
    rank, size = bps.rank(), bps.size()
    x, all_of_them = mine((2 * size, 3)), everyone((2 * size, 3))
    equal(bps.broadcast(x, size - 1), all_of_them[-1])
    equal(bps.broadcast_(x.copy(), 0, name="b"), all_of_them[0])
    raises(ValueError, lambda: bps.broadcast(x, size), f"root rank {size}")
    equal(
        bps.allgather(mx.nd.array(value(rank, (rank + 1, 2)))),
        np.concatenate([value(r, (r + 1, 2)) for r in range(size)]),
    )
    equal(bps.alltoall(x), np.concatenate([a[2 * rank : 2 * rank + 2] for a in all_of_them]))
    rows, received = bps.alltoall(mx.nd.full((size * (rank + 1),), rank), splits=mx.nd.array([rank + 1] * size))
    equal(rows, np.repeat(np.arange(size), np.arange(size) + 1).astype("float32"))
    assert received.asnumpy().tolist() == [r + 1 for r in range(size)]
    equal(bps.reducescatter(x, op=bps.Sum), all_of_them.sum(0)[2 * rank : 2 * rank + 2])
    part = all_of_them.sum(0)[2 * rank : 2 * rank + 2]
    equal(bps.reducescatter(x, bps.Sum, "scaled", 0, None, 0.5, 4.0), 2 * part)
    one, two = bps.grouped_reducescatter([x, x * 2], bps.Sum, "scaled", 0, bps.global_process_set, 0.5, 4.0)
    raises(ValueError, lambda: bps.reducescatter(mx.nd.array(1)), "no rows to be scattered")
    equal(one, 2 * part)
    equal(two, 4 * part)
    for dtype, values, factor in (("float16", [48000 // bps.size(), 100], 1e-8), ("int32", [2**26 + 2, 4], 0.5)):
        large = mx.nd.array(values, dtype=dtype)
        expected = (np.asarray(values, "float64") * factor).astype(dtype)
        equal(bps.allreduce(large, op=bps.Average, prescale_factor=factor), expected)
        equal(bps.allreduce(large, op=bps.Min, postscale_factor=factor), expected)
    scaled = bps.grouped_allreduce([x, x * 2], None, "scaled", 0, 0.5, 4.0, bps.global_process_set, bps.Sum)
    equal(scaled[1], 4 * all_of_them.sum(0))
    raises(ValueError, lambda: bps.allreduce(x, op=bps.Product), "Product", "allgather")
    group = bps.grouped_allreduce([x, x * 2, mx.nd.ones((4,))], average=False, name="group")
    equal(group[1], 2 * all_of_them.sum(0))
    equal(group[2], np.full(4, size, "float32"))
    assert bps.broadcast_object({"rank": rank}, root_rank=0) == {"rank": 0}
    assert bps.allgather_object(rank) == list(range(size))
    bps.barrier()


def check_order():
    """Work of the engine: what is not there yet is waited for by those who read it, and by nobody else."""
    big = mx.nd.ones((300, 300))
    arrays = [mine((400,), seed=i) for i in range(30)]
    for i in range(30) if bps.rank() % 2 else reversed(range(30)):  # in any order among names
        for _ in range(3):
            big = mx.nd.dot(big, big) / 300
        bps.allreduce_(arrays[i], average=False, name=f"order.{i}", priority=-i)
        arrays[i] += big[0, 0]
    for i, array in enumerate(arrays):
        equal(array, everyone((400,), seed=i).sum(0) + np.float32(1))
    x = mx.nd.ones((5,))
    for _ in range(20):  # one after the other on one name
        bps.push_pull(x, name="again", is_average=False)
    equal(x, np.full(5, float(bps.size()) ** 20, "float32"))


def check_no_names():
    """The sizes are the same, and that of one is late on one rank: neither shapes nor NumPy's calls come between."""
    rank, size = bps.rank(), bps.size()
    big = mx.nd.ones((300, 300))
    for i in range(20):
        wide, high = mx.nd.full((8, 500), rank), mx.nd.full((500, 8), 10 + rank)
        if rank == 0:
            for _ in range(3):
                big = mx.nd.dot(big, big) / 300
            wide = wide * big[0, 0]
        wide, high = bps.allreduce(wide, average=False), bps.allreduce(high, average=False)
        host = plain.push_pull(np.full(4000, 20 + rank, "float32"), average=False)
        ranks = size * (size - 1) // 2
        equal(wide, np.full((8, 500), ranks, "float32"))
        equal(high, np.full((500, 8), ranks + 10 * size, "float32"))
        assert (host == ranks + 20 * size).all(), (i, host)


def new_net(seed=3, deferred=False):
    mx.random.seed(seed)
    net = gluon.nn.Sequential()
    net.add(
        gluon.nn.Conv2D(4, 3, in_channels=0 if deferred else 2, activation="tanh"),
        gluon.nn.Dense(16, in_units=0 if deferred else 64, activation="tanh"),
        gluon.nn.Dense(5, in_units=0 if deferred else 16),
    )
    net.initialize(mx.init.Xavier())
    return net


def batches():
    generator = np.random.default_rng(5)
    for _ in range(STEPS):
        n = SHARE * bps.size()
        yield (
            mx.nd.array(generator.standard_normal((n, 2, 6, 6)), dtype="float32"),
            mx.nd.array(generator.integers(0, 5, n)),
        )


def share(x):
    return x[bps.rank() :: bps.size()]


loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


def train(net, trainer, data):
    for x, y in data:
        with autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(len(x))
    return net


def parameters(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def close(got, wanted, rtol=2e-4, atol=1e-5):
    for a, b in zip(parameters(got), parameters(wanted)):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def check_trainer_equals_one_process():
    for turn, (name, options) in enumerate(
        {"sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, "adam": {"learning_rate": 0.01}}.items()
    ):
        alone = new_net()
        train(alone, gluon.Trainer(alone.collect_params(), name, dict(options), kvstore=None), batches())
        shares = [(share(x), share(y)) for x, y in batches()]
        together = new_net(3 + bps.rank())  # of different beginnings; the root's is that of alone
        trainer = bps.DistributedTrainer(together.collect_params(), name, dict(options), prefix=f"{turn}.")
        train(together, trainer, shares)
        close(together, alone)
        theirs = bps.broadcast_object(parameters(together), root_rank=0)
        for a, b in zip(parameters(together), theirs):
            np.testing.assert_array_equal(a, b)
    # Initialization that is made up for at the first forward pass.
    for how in ("trainer", "parameters"):
        together = new_net(3 + bps.rank(), deferred=True)
        if how == "parameters":
            bps.broadcast_parameters(together.collect_params(), root_rank=0, prefix="deferred.")
        bps.DistributedTrainer(
            together.collect_params(), "sgd", prefix=f"deferred.{how}."
        ) if how == "trainer" else None
        together(mx.nd.ones((1, 2, 6, 6)))
        theirs = bps.broadcast_object(parameters(together), root_rank=0)
        for a, b in zip(parameters(together), theirs):
            np.testing.assert_array_equal(a, b)


def check_initialized_anew():
    net = new_net(3 + bps.rank())
    trainer = bps.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, prefix="anew.")
    mx.random.seed(100 + bps.rank())
    net.initialize(mx.init.Normal(1), force_reinit=True)
    train(net, trainer, [(share(x), share(y)) for x, y in batches()])
    theirs = bps.broadcast_object(parameters(net), root_rank=0)
    for a, b in zip(parameters(net), theirs):
        np.testing.assert_array_equal(a, b)


def check_trainer_options():
    x, y = next(batches())
    wanted = train(new_net(), gluon.Trainer((alone := new_net()).collect_params(), "sgd", kvstore=None), [])
    train(alone, gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None), [(x, y)])
    assert wanted is not alone
    for turn, (options, near) in enumerate(
        (
            ({"compression": bps.Compression.fp16}, 2e-3),
            ({"compression_params": {"fp16": True, "compressor": None}}, 2e-3),
            ({"gradient_predivide_factor": 4.0, "num_groups": 2}, 2e-4),
        )
    ):
        net = new_net()
        trainer = bps.DistributedTrainer(
            net.collect_params(), "sgd", {"learning_rate": 0.1}, prefix=f"o{turn}.", **options
        )
        train(net, trainer, [(share(x), share(y))])
        close(net, alone, near, near)
    # A parameter that takes no part, and one that is not trained.
    net, rest = new_net(), gluon.nn.Dense(3, in_units=2)
    rest.initialize()
    rest.weight.grad_req = "null"
    both = net.collect_params()
    both.update(rest.collect_params())
    before = rest.bias.data().asnumpy()
    trainer = bps.DistributedTrainer(both, "sgd", {"learning_rate": 0.1}, prefix="unused.")
    trainer._init_params()  # as BytePS's tests do
    with autograd.record():
        loss = loss_of(net(share(x)), share(y))
    loss.backward()
    trainer.step(len(share(x)), ignore_stale_grad=True)
    close(net, alone)
    np.testing.assert_array_equal(rest.bias.data().asnumpy(), before)
    for wrong in ({"compression_params": {"compressor": "topk", "k": 3}}, {"process_set": bps.ProcessSet([5])}):
        raises(ValueError, lambda: bps.DistributedTrainer(net.collect_params(), "sgd", **wrong))
    raises(
        TypeError,
        lambda: bps.DistributedTrainer(net.collect_params(), "sgd", None, bps.Compression.fp16),
        "by its name",
    )


def check_optimizer_of_module():
    """Module's fit(), whose optimizer updates by index."""

    def fit(optimizer, data, label, batch):
        x = mx.sym.Variable("data")
        x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=12, name="first"), act_type="tanh")
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=5, name="second"), name="softmax")
        module = mx.mod.Module(net, context=mx.cpu())
        iterator = mx.io.NDArrayIter(data, label, batch)
        module.bind(iterator.provide_data, iterator.provide_label)
        mx.random.seed(7)
        module.init_params(mx.init.Xavier())
        module.init_optimizer(kvstore=None, optimizer=optimizer)
        for b in iterator:
            module.forward_backward(b)
            module.update()
        return module.get_params()[0]

    size, rank = bps.size(), bps.rank()
    generator = np.random.default_rng(4)
    data, label = (
        generator.standard_normal((4 * 8 * size, 10)).astype("float32"),
        generator.integers(0, 5, 4 * 8 * size),
    )
    alone = fit(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / (8 * size)), data, label, 8 * size)
    part = np.concatenate([np.arange(i * 8 * size, (i + 1) * 8 * size)[rank::size] for i in range(4)])
    optimizer = bps.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / 8))
    together = fit(optimizer, data[part], label[part], 8)
    for name, wanted in alone.items():
        np.testing.assert_allclose(together[name].asnumpy(), wanted.asnumpy(), rtol=1e-4, atol=1e-5)
    optimizer.set_learning_rate(0.5)
    assert optimizer.learning_rate == 0.5
    weights = {"w": mx.nd.full((3,), rank), "b": mx.nd.full((2,), rank)}
    bps.broadcast_parameters(weights, root_rank=size - 1, prefix="dict.")
    equal(weights["w"], np.full(3, size - 1, "float32"))


def check_fork_by_a_data_loader():
    data = gluon.data.ArrayDataset(np.arange(40, dtype="float32"), np.arange(40))
    x = mx.nd.ones((1000,))
    for turn in range(2):
        bps.allreduce_(x, average=True, name="around the fork")  # under way when the workers are forked
        loader = gluon.data.DataLoader(data, batch_size=10, num_workers=1)
        assert sum(float(batch[0].sum().asscalar()) for batch in loader) == sum(range(40))
        assert bps.allreduce(x, average=False, name="in the parent")[0].asscalar() == bps.size()
    equal(x, np.ones(1000, "float32"))


if __name__ == "__main__":
    bps.init()
    assert not _client._is_alone()  # operations begin in other threads
    for name, check in chosen(globals(), sys.argv[1:]):
        check()
        plain.barrier()
        print(f"{name} {time.process_time():.1f} s", flush=True)
    print("done", flush=True)
