"""bps.tensorflow.distribute.MirroredStrategy: loops of one's own and Keras, against one process."""

import keras
import numpy as np
import tensorflow as tf

import bps.tensorflow as bps
from bps.tensorflow.distribute import MirroredStrategy

GLOBAL = 12  # a batch of all ranks


def data():
    random = np.random.default_rng(4)
    x = random.normal(size=(5 * GLOBAL, 6)).astype("float32")
    return x, (x.sum(1) > 0).astype("int64")


def new_model(seed):
    random = np.random.default_rng(seed)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape).astype("float32") * 0.4)
    return model


def check_values(strategy):
    rank, size = bps.rank(), bps.size()
    assert strategy.num_replicas_in_sync == size
    with strategy.scope():
        variable = tf.Variable(tf.fill([2], float(rank + 5)))
        made_late = tf.Variable(lambda: tf.fill([2], float(rank + 7)))
    assert variable.numpy().tolist() == [5.0, 5.0] and made_late.numpy().tolist() == [7.0, 7.0]

    @tf.function
    def step():
        context = tf.distribute.get_replica_context()
        x = tf.cast(context.replica_id_in_sync_group, tf.float32)
        return x, context.all_reduce("sum", [x, 2 * x]), context.all_reduce("mean", x)

    x, sums, mean = strategy.run(step)
    assert float(x) == rank and [float(s) for s in sums] == [sum(range(size)), 2 * sum(range(size))]
    assert float(mean) == (size - 1) / 2
    assert float(strategy.reduce("SUM", x, axis=None)) == sum(range(size))
    assert float(strategy.reduce("MEAN", tf.constant([rank + 1.0, rank]), axis=0)) == size / 2
    assert strategy.gather(tf.fill([1, 2], rank), axis=0).numpy().tolist() == [[r, r] for r in range(size)]
    assert strategy.gather(tf.fill([1, 2], rank), axis=1).numpy().tolist() == [[r for r in range(size) for _ in (0, 1)]]
    values = strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    assert values == rank
    function = strategy.distribute_datasets_from_function(
        lambda c: tf.data.Dataset.range(8).shard(c.num_input_pipelines, c.input_pipeline_id)
    )
    assert [int(strategy.experimental_local_results(n)[0]) for n in function] == list(range(rank, 8, size))


def check_loop(strategy):
    x, y = data()
    alone = new_model(1)
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    for i in range(0, len(x), GLOBAL):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y[i : i + GLOBAL], alone(x[i : i + GLOBAL]), True)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, alone.trainable_weights), alone.trainable_weights)

    with strategy.scope():
        model = new_model(1)
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL))

    @tf.function
    def train(batch):
        def step(x, y):
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(y, model(x), True)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            return loss

        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    for batch in batches:
        assert len(strategy.experimental_local_results(batch[0])[0]) == GLOBAL // bps.size()
        loss_of_all = train(batch)
    np.testing.assert_allclose(float(loss_of_all), float(loss), rtol=1e-5)
    for a, b in zip(model.weights, alone.weights):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-6)


def check_keras(strategy):
    x, y = data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    alone = new_model(1)
    alone.compile(keras.optimizers.Adam(0.05), loss)
    alone.fit(x, y, GLOBAL, epochs=2, shuffle=False, verbose=0)
    with strategy.scope():
        model = new_model(1)
        model.compile(keras.optimizers.Adam(0.05), loss, jit_compile=False)
    model.fit(x, y, GLOBAL, epochs=2, shuffle=False, verbose=0)
    for a, b in zip(model.weights, alone.weights):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=1e-5)
    for other in bps.allgather_object([w.numpy() for w in model.weights]):
        for a, b in zip(model.weights, other):
            np.testing.assert_array_equal(a.numpy(), b)


def main():
    bps.init()
    strategy = MirroredStrategy()
    try:
        MirroredStrategy(["/device:CPU:0", "/device:CPU:1"])
        raise AssertionError("two devices")
    except ValueError as error:
        assert "a rank for each" in str(error)
    check_values(strategy)
    check_loop(strategy)
    check_keras(strategy)
    print("done")


main()
