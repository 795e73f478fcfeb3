"""DistributedGradientTape and optimizers of bps.tensorflow against one process that takes the whole batch."""

import sys

import numpy as np
import tensorflow as tf
from checks import chosen

import bps.tensorflow as bps

STEPS = 4
SHARE = 6  # examples of one rank in one step
WORDS = 11


def batches():
    random = np.random.default_rng(5)
    for _ in range(STEPS):
        n = SHARE * bps.size()
        yield random.normal(size=(n, 7)).astype("float32"), random.integers(0, WORDS, n), random.integers(0, 3, n)


class Net(tf.Module):
    """An embedding (sparse gradient), two layers, and a variable that the loss does not use (no gradient)."""

    def __init__(self, seed):
        super().__init__()
        random = np.random.default_rng(seed)

        def new(*shape):
            return tf.Variable(random.normal(size=shape).astype("float32") * 0.3)

        self.words = new(WORDS, 4)
        self.first, self.bias, self.last = new(11, 5), new(5), new(5, 3)
        self.unused = new(2)
        self.all = [self.words, self.first, self.bias, self.last, self.unused]

    def loss(self, x, words, y):
        h = tf.concat([x, tf.nn.embedding_lookup(self.words, words)], 1)
        h = tf.tanh(h @ self.first + self.bias) @ self.last
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, h))


def train(net, step_of, share):
    """One step for each batch. step_of(net) gives the function of a step."""
    step = step_of(net)
    for x, words, y in batches():
        part = slice(bps.rank(), None, bps.size()) if share else slice(None)
        step(tf.constant(x[part]), tf.constant(words[part]), tf.constant(y[part]))
    return [v.numpy() for v in net.all]


def descend(net, gradients, rate=0.3):
    for variable, gradient in zip(net.all, gradients):
        if isinstance(gradient, tf.IndexedSlices):
            variable.scatter_sub(tf.IndexedSlices(gradient.values * rate, gradient.indices))
        elif gradient is not None:
            variable.assign_sub(gradient * rate)


def alone(scale=1.0):
    def step_of(net):
        def step(*batch):
            with tf.GradientTape() as tape:
                loss = net.loss(*batch)
            descend(net, [None if g is None else tf.convert_to_tensor(g) * scale for g in tape.gradient(loss, net.all)])

        return step

    return train(Net(3), step_of, share=False)


def together(in_graph=True, **options):
    def step_of(net):
        def step(*batch):
            with bps.DistributedGradientTape(tf.GradientTape(), **options) as tape:
                loss = net.loss(*batch)
            gradients = tape.gradient(loss, net.all)
            assert gradients[4] is None
            assert isinstance(gradients[0], tf.IndexedSlices) != options.get("sparse_as_dense", False)
            descend(net, gradients)

        return tf.function(step) if in_graph else step

    net = Net(3 + bps.rank())
    bps.broadcast_variables(net.all, root_rank=0)
    values = train(net, step_of, share=True)
    everybody = bps.allgather_object(values)
    for other in everybody:
        for a, b in zip(values, other):
            np.testing.assert_array_equal(a, b)
    return values


def close(values, expected, tolerance=2e-6):
    for a, b in zip(values, expected):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def check_tape():
    expected = alone()
    close(together(), expected)
    close(together(in_graph=False), expected)
    close(together(sparse_as_dense=True, gradient_predivide_factor=2.0), expected)
    close(together(op=bps.Sum), alone(scale=bps.size()), 1e-5)
    close(together(compression=bps.Compression.fp16, sparse_as_dense=True), expected, 5e-3)
    close(together(compression=bps.Compression.bf16, sparse_as_dense=True), expected, 5e-2)
    close(together(groups=2), expected)


def check_groups():
    expected = alone()

    def step_of(net):
        groups = [[net.bias, net.last], [net.first]]

        @tf.function
        def step(*batch):
            with tf.GradientTape() as tape:
                loss = net.loss(*batch)
            tape = bps.DistributedGradientTape(tape, groups=groups)
            descend(net, tape.gradient(loss, net.all))

        return step

    net = Net(3)
    close(train(net, step_of, share=True), expected)


def check_tape_forms():
    a, b = tf.Variable(float(bps.rank() + 1)), tf.Variable(2.0)
    mean = sum(range(1, bps.size() + 1)) / bps.size()
    with tf.GradientTape(persistent=True) as tape:
        y = a * b
    tape = bps.DistributedGradientTape(tape)
    assert float(tape.gradient(y, b)) == mean  # one source
    gradients = tape.gradient(y, {"a": a, "b": [b]})
    assert float(gradients["a"]) == 2.0 and float(gradients["b"][0]) == mean
    try:
        bps.DistributedGradientTape(tape)
        raise AssertionError("twice")
    except ValueError as error:
        assert "already" in str(error)
    with tf.GradientTape() as tape:
        y = a * b
    tape = bps.DistributedGradientTape(tape)
    tape.register_local_source(b)
    local = tape.gradient(y, [a, b])[1]
    np.testing.assert_allclose(float(local), (bps.rank() + 1) / bps.size(), rtol=1e-6)
    with tf.GradientTape() as tape:
        y = a * b
    tape = bps.DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(b)
    assert float(tape.gradient(y, [a, b])[1]) == bps.rank() + 1
    with bps.DistributedGradientTape(tf.GradientTape(), scale_local_gradients=False) as tape:
        y = a * b
    tape.register_local_source(b)
    (of_b,), (of_a,) = tape.get_local_and_global_gradients(y, [a, b])
    assert of_a[0] is a and of_b[0] is b and float(of_a[1]) == 2.0 and float(of_b[1]) == bps.rank() + 1
    for options, words in [
        ({"gradient_predivide_factor": 2.0, "op": bps.Sum}, "op=Average"),
        ({"groups": -1}, "groups"),
    ]:
        try:
            bps.DistributedGradientTape(tf.GradientTape(), **options)
            raise AssertionError(options)
        except ValueError as error:
            assert words in str(error)


def check_derivatives_of_gradients():
    xs = [np.array([1.0, 2.0, 3.0], "float32") * (r + 1) - r for r in range(bps.size())]
    x, mean = tf.constant(xs[bps.rank()]), sum(xs) / bps.size()
    w = tf.Variable([0.5, 1.0, -1.0])

    def penalized():
        with bps.DistributedGradientTape(tf.GradientTape()) as outer:
            with bps.DistributedGradientTape(tf.GradientTape()) as inner:
                loss = tf.reduce_sum(w**3 * x)
            total = loss + tf.reduce_sum(inner.gradient(loss, w))
        return outer.gradient(total, w)

    for run in (penalized, tf.function(penalized)):
        np.testing.assert_allclose(run(), (3 * w**2 + 6 * w) * mean, rtol=1e-5)
    for more in ({}, {"experimental_use_pfor": False}):
        with bps.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            y = w**2 * x
        np.testing.assert_allclose(tape.jacobian(y, w, **more), np.diag(2 * w.numpy() * mean), rtol=1e-5)
        np.testing.assert_allclose(tape.gradient(y, w), 2 * w.numpy() * mean, rtol=1e-5)  # not as a whole any more
    rows = tf.Variable(np.arange(6, dtype="float32").reshape(2, 3))
    with bps.DistributedGradientTape(tf.GradientTape()) as tape:
        y = rows**2 * x
    wanted = np.stack([np.diag(2 * row * mean) for row in rows.numpy()])
    np.testing.assert_allclose(tape.batch_jacobian(y, rows), wanted, rtol=1e-5)


def check_optimizer_of_tensorflow_1():
    def step_of(net):
        optimizer = bps.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.3))

        @tf.function
        def step(*batch):
            optimizer.minimize(lambda: net.loss(*batch), var_list=net.all[:4])

        return step

    close(train(Net(3), step_of, share=True), alone())


def check_optimizers_of_keras_2():
    try:
        import tf_keras
    except ImportError:
        print("no tf_keras")
        return
    for make in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):

        def step_of(net, make=make):
            optimizer = bps.DistributedOptimizer(make(0.3))

            @tf.function
            def step(*batch):
                optimizer.minimize(lambda: net.loss(*batch), var_list=net.all[:4])

            def minimize(*batch):
                with tf.GradientTape() as tape:
                    loss = net.loss(*batch)
                optimizer.minimize(loss, net.all[:4], tape=tape)

            return tf.function(minimize)

        close(train(Net(3), step_of, share=True), alone())


def check_loss_scales_of_keras_2():
    """Averaged as any other; what overflows on one rank is a step of none."""
    try:
        import tf_keras
    except ImportError:
        print("no tf_keras")
        return
    for inner in (tf_keras.optimizers.SGD(0.05), tf_keras.optimizers.legacy.SGD(0.05)):
        w = tf.Variable([1.0, 2.0])
        optimizer = bps.DistributedOptimizer(tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=8.0))

        @tf.function
        def step(x, w=w, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = optimizer.get_scaled_loss(tf.reduce_sum(w * x))
            gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [w]))
            optimizer.apply_gradients(zip(gradients, [w]))

        step(tf.constant([1.0, 2.0]) * (bps.rank() + 1))
        mean = np.array([1.0, 2.0]) * (1 + bps.size()) / 2
        np.testing.assert_allclose(w.numpy(), [1, 2] - 0.05 * mean, rtol=1e-6)
        before = w.numpy()
        step(tf.constant([1.0, np.inf if bps.rank() == 0 else 1.0]))
        np.testing.assert_array_equal(w.numpy(), before)
        assert float(optimizer.loss_scale) == 4.0


def check_optimizer_of_keras():
    def step_of(net):
        import keras

        optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(0.3))
        optimizer.build(net.all[:4])

        @tf.function
        def step(*batch):
            with tf.GradientTape() as tape:
                loss = net.loss(*batch)
            optimizer.apply(tape.gradient(loss, net.all[:4]), net.all[:4])

        return step

    close(train(Net(3), step_of, share=True), alone())


def check_process_sets():
    """Those of a set average over its ranks; a rank outside has the same program and trains by itself."""
    import keras

    rank, ranks = bps.rank(), list(range(1, bps.size()))
    some = bps.add_process_set(ranks)
    mean = np.mean([r + 1.0 for r in ranks], dtype="float32") if rank else 1.0
    n = len(ranks) if rank else 1
    x, own, table = tf.Variable(3.0), tf.Variable(3.0), tf.Variable(tf.ones([9, 2]))

    def gradients():
        tape = bps.DistributedGradientTape(tf.GradientTape(), process_set=some)
        tape.register_local_source(own)
        with tape:
            loss = (rank + 1) * (x + own + tf.reduce_sum(tf.gather(table, [rank])))
        return tape.gradient(loss, [x, own, table])

    for run in (gradients, tf.function(gradients)):
        of_x, of_own, of_table = run()
        assert float(of_x) == mean and float(of_own) == np.float32((rank + 1) / n)
        assert of_table.indices.numpy().tolist() == (ranks if rank else [0])
        close([of_table.values], [np.repeat([[(r + 1) / n] for r in (ranks if rank else [0])], 2, axis=1)])
    optimizers = [tf.compat.v1.train.GradientDescentOptimizer(1.0) for _ in range(2)]
    for optimizer, options in zip(optimizers, ({"process_set": some}, {})):
        optimizer = bps.DistributedOptimizer(optimizer, **options)
        optimizer.apply_gradients(optimizer.compute_gradients(lambda: (rank + 1) * x, [x]))
    close([float(x)], [3.0 - mean - (bps.size() + 1) / 2])
    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=some)
    optimizer.apply_gradients([(tf.constant(rank + 1.0), x)])
    close([float(x)], [3.0 - 2 * mean - (bps.size() + 1) / 2])
    bps.remove_process_set(some)


def check_sync_batch_norm():
    random = np.random.default_rng(8)
    whole = random.normal(2.0, 3.0, (5 * bps.size(), 4, 3)).astype("float32")
    uneven = np.split(whole, [5 * r + r % 2 for r in range(1, bps.size())])[bps.rank()]
    from bps.keras._backend import keras

    layer = bps.SyncBatchNormalization()
    reference = keras.layers.BatchNormalization()
    reference.build(whole.shape)
    layer.build(uneven.shape)

    def run(layer, x):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.sin(y))
        return y, tape.gradient(loss, x)

    start = sum(len(x) for x in np.split(whole, [5 * r + r % 2 for r in range(1, bps.size())])[: bps.rank()])
    mine = slice(start, start + len(uneven))
    expected, gradient = run(reference, whole)
    for step in (run, tf.function(run)):
        y, g = step(layer, uneven)
        np.testing.assert_allclose(y, expected[mine], atol=2e-5)
        np.testing.assert_allclose(g, gradient[mine], atol=2e-5)
    reference(whole, training=True)
    for a, b in zip(layer.weights, reference.weights):
        np.testing.assert_allclose(a, b, atol=1e-4)
    np.testing.assert_allclose(layer(uneven, training=False), reference(uneven, training=False), atol=1e-4)


def main():
    tf.get_logger().setLevel("ERROR")
    bps.init()
    for _, check in chosen(globals(), sys.argv[1:]):
        check()
    print("done")


main()
