"""bps.keras against one process that takes the whole batch: model.fit, callbacks, files. On Keras' backend, or with tf_keras."""

import itertools
import os
import subprocess
import sys
import tempfile

import numpy as np

import bps.keras as bps
from bps.keras._backend import BACKEND, IS_KERAS_2, keras, to_numpy, velocities_of

SHARE = 8  # examples of one rank in one step
STEPS = 5
FLAG = os.environ.get("BPS_TEST_FOLDER") or tempfile.gettempdir()


def data(seed=4):
    random = np.random.default_rng(seed)
    n = SHARE * STEPS * bps.size()
    x = random.normal(size=(n, 6)).astype("float32")
    return x, (x.sum(1) > 0).astype("int32") + (x[:, 0] > 1)


def shares(array, rank):
    """What a rank sees in the order in which it does, so that its batches are its shares of the whole ones."""
    return array[rank :: bps.size()]


def new_model(seed, unused=False):
    random = np.random.default_rng(seed)
    inputs = keras.Input((6,))
    h = keras.layers.Dense(7, activation="tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(h))
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape).astype("float32") * 0.4)
    return model


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False if BACKEND == "tensorflow" else "auto")
    return model


def fit(model, together, callbacks=(), epochs=2, batch=SHARE):
    x, y = data()
    if together:
        x, y = shares(x, bps.rank()), shares(y, bps.rank())
    else:
        batch *= bps.size()
    return model.fit(x, y, batch, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def weights(model):
    return [to_numpy(w) for w in model.weights]


def close(values, expected, tolerance=1e-5):
    for a, b in zip(values, expected):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def agree(model):
    mine = weights(model)
    for other in bps.allgather_object(mine):
        for a, b in zip(mine, other):
            np.testing.assert_array_equal(a, b)


OPTIMIZERS = {
    "sgd": lambda **k: keras.optimizers.SGD(0.3, **k),
    "momentum": lambda **k: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.02, global_clipnorm=0.05, **k),
}
SGDS = [keras.optimizers.SGD]
if IS_KERAS_2:
    OPTIMIZERS["legacy"] = lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9, global_clipnorm=0.05)
    SGDS.append(keras.optimizers.legacy.SGD)


def check_fit(only=None):
    """Models begin differently, which the callback ends; clipping is of the average."""
    for name, make in OPTIMIZERS.items():
        if only not in (None, name):
            continue
        alone = compiled(new_model(1), make())
        expected = fit(alone, together=False).history
        model = compiled(new_model(1 + bps.rank()), bps.DistributedOptimizer(make()))
        callbacks = [bps.callbacks.BroadcastGlobalVariablesCallback(0), bps.callbacks.MetricAverageCallback()]
        history = fit(model, together=True, callbacks=callbacks).history
        agree(model)
        close(weights(model), weights(alone))
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(history["accuracy"], expected["accuracy"], rtol=1e-4)


def check_metrics_that_are_arrays():
    """As those of F1Score, which has a number for each class."""
    rank, average = bps.rank(), (bps.size() - 1) / 2
    logs = {"f1": keras.ops.convert_to_tensor(np.array([rank, 1 + rank], "float32")), "loss": 0.5 + rank}
    bps.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    np.testing.assert_array_equal(logs["f1"], [average, 1 + average])
    assert logs["loss"] == 0.5 + average and isinstance(logs["loss"], float)


def check_options():
    alone = compiled(new_model(1), OPTIMIZERS["sgd"]())
    fit(alone, together=False)
    for options, tolerance in [
        ({"compression": bps.Compression.fp16}, 1e-2),
        ({"gradient_predivide_factor": 2.0}, 1e-5),
        *([({"groups": 2}, 1e-5), ({"sparse_as_dense": True}, 1e-5)] if BACKEND == "tensorflow" else []),
    ]:
        model = compiled(new_model(1), bps.DistributedOptimizer(OPTIMIZERS["sgd"](), **options))
        fit(model, together=True)
        agree(model)
        close(weights(model), weights(alone), tolerance)


def check_several_passes():
    for sgd, averages in itertools.product(SGDS, (True, False)):
        optimizer = bps.DistributedOptimizer(
            sgd(0.1), backward_passes_per_step=2, average_aggregated_gradients=averages
        )
        model = compiled(new_model(1), optimizer)
        # The batches of two passes, one after the other, are one batch of the reference, but for the last of an epoch.
        x, y = data()
        n = 2 * SHARE * bps.size()
        order = np.concatenate(
            [np.arange(i, i + n).reshape(-1, bps.size())[:, bps.rank()] for i in range(0, len(x) // n * n, n)]
        )
        alone_x, alone_y = x[: len(x) // n * n], y[: len(y) // n * n]
        alone = compiled(new_model(1), sgd(0.1 if averages else 0.2))
        alone.fit(alone_x, alone_y, n, 2, verbose=0, shuffle=False)
        model.fit(x[order], y[order], SHARE, 2, verbose=0, shuffle=False)
        agree(model)
        close(weights(model), weights(alone))


def check_partial():
    model = new_model(1)
    local = model.layers[1]
    optimizer = bps.PartialDistributedOptimizer(keras.optimizers.SGD(0.3), local_layers=local)
    fit(compiled(model, optimizer), together=True)
    everybody = bps.allgather_object(weights(model))
    for other in everybody[1:]:
        np.testing.assert_array_equal(everybody[0][2], other[2])  # of the other layer
        assert np.abs(everybody[0][0] - other[0]).max() > 0


def check_files(kind="momentum"):
    model = compiled(new_model(1 + bps.rank()), bps.DistributedOptimizer(OPTIMIZERS[kind]()))
    callback = bps.callbacks.BroadcastGlobalVariablesCallback(root_rank=bps.size() - 1)
    fit(model, together=True, callbacks=[callback])
    path = os.path.join(FLAG, f"model.{bps.rank()}.{'h5' if kind == 'legacy' else 'keras'}")
    model.save(path)
    code = f"import {keras.__name__.partition('.')[0]} as keras, sys; m = keras.models.load_model(sys.argv[1]); print(type(m.optimizer).__mro__[0], int(m.optimizer.iterations))"
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    plain = subprocess.run([sys.executable, "-c", code, path], env=there, capture_output=True, text=True)
    assert f"SGD'> {int(model.optimizer.iterations)}" in plain.stdout, plain.stderr
    loaded = bps.load_model(path)
    assert isinstance(loaded.optimizer, tuple(SGDS)) and hasattr(loaded.optimizer, "_bps")
    close(weights(loaded), weights(model), 0)
    fit(model, together=True)
    fit(loaded, together=True)  # with the momentum that was saved
    agree(loaded)
    close(weights(loaded), weights(model), 0)
    best = os.path.join(FLAG, f"best.{bps.rank()}.keras")
    fit(model, together=True, callbacks=[bps.callbacks.BestModelCheckpoint(monitor="loss", filepath=best)])
    assert os.path.exists(best) == (bps.rank() == 0)
    best = os.path.join(FLAG, f"best.{bps.rank()}.weights.h5")
    only_weights = bps.callbacks.BestModelCheckpoint(monitor="loss", filepath=best, save_weights_only=True)
    fit(model, together=True, callbacks=[only_weights])
    if bps.rank() == 0:
        model.load_weights(best)
    assert os.path.exists(best) == (bps.rank() == 0)


@keras.saving.register_keras_serializable("tests")
class Own(keras.optimizers.Adam):
    pass


def check_options_that_were_saved():
    """They are in the file, also for another process, and for one that has made others of the class meanwhile."""
    options = {"op": bps.Sum, "compression": bps.Compression.fp16, "backward_passes_per_step": 2}
    known = keras.saving.get_custom_objects()
    for kind in (keras.optimizers.Adam, Own):
        model = compiled(new_model(1), bps.DistributedOptimizer(kind(0.01), **options))
        fit(model, together=True)
        path = os.path.join(FLAG, f"options.{kind.__name__}.{bps.rank()}.keras")
        model.save(path)
        registered = keras.saving.get_registered_name(type(model.optimizer))
        for meanwhile in (
            lambda: None,
            lambda: bps.DistributedOptimizer(kind()),
            lambda: known.update({registered: Own}) if kind is Own else known.pop(registered),
            lambda: known.pop(registered, None),
        ):
            meanwhile()
            loaded = bps.load_model(path, custom_optimizers=[Own]).optimizer
            assert isinstance(loaded, kind) and loaded._bps.op == bps.Sum and loaded._bps.compression is bps.Compression.fp16
            assert loaded.gradient_accumulation_steps == 2 and not loaded._bps_averages_passes
        assert bps.load_model(path, [Own], compression=bps.Compression.none).optimizer._bps.op == bps.Sum


def check_copies():
    """What Keras makes of a distributed optimizer in this process is one."""
    for make in (keras.optimizers.Adam, Own):
        model = compiled(new_model(1), bps.DistributedOptimizer(make(0.01)))
        fit(model, together=True)
        again = type(model.optimizer).from_config(model.optimizer.get_config())
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        for optimizer in (again, getattr(clone, "optimizer", None)):
            if optimizer is not None:
                fit(compiled(clone, optimizer), together=True)
                agree(clone)


def check_several_optimizers():
    """A MultiOptimizer, which has an apply() of its own, and passes that Keras' own optimizers add up."""

    def several():
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05), {".*bias": keras.optimizers.Adam(0.01)})
        )

    for make in (several, lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)):
        alone, model = compiled(new_model(1), make()), compiled(new_model(1), bps.DistributedOptimizer(make()))
        fit(alone, together=False)
        fit(model, together=True)
        agree(model)
        close(weights(model), weights(alone))


def check_policy_of_later():
    """Keras puts a LossScaleOptimizer around one that is distributed already: a step that one rank skips all skip. tf_keras counts it."""
    optimizer = bps.DistributedOptimizer(keras.optimizers.SGD(0.005))
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = compiled(new_model(1), optimizer)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    x, y = data()
    x, y = shares(x, bps.rank()).copy(), shares(y, bps.rank())
    if bps.rank() == 0:
        x[SHARE + 1] = np.inf
    before = weights(model)
    model.fit(x[: 2 * SHARE], y[: 2 * SHARE], SHARE, 1, verbose=0, shuffle=False)
    agree(model)
    assert int(model.optimizer.iterations) == 1 + IS_KERAS_2 and any((a != b).any() for a, b in zip(before, weights(model)))
    assert not any(np.isnan(w).any() for w in weights(model))


def check_learning_rates():
    class Watch(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.rates = []

        def on_train_batch_begin(self, batch, logs=None):
            self.rates.append(float(to_numpy(self.model.optimizer.learning_rate)))

    size = bps.size()
    watch = Watch()
    model = compiled(new_model(1), bps.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.9)))
    warmup = bps.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1)
    history = fit(model, together=True, callbacks=[warmup, watch], epochs=3).history
    expected = [0.4 / size * ((i + 1) / STEPS * (size - 1) / 2 + 1) for i in range(2 * STEPS)] + [0.4] * STEPS
    np.testing.assert_allclose(watch.rates, expected, rtol=1e-5)
    np.testing.assert_allclose(history["lr"][-1], 0.4, rtol=1e-6)
    agree(model)

    watch = Watch()
    schedule = bps.callbacks.LearningRateScheduleCallback(initial_lr=0.1, multiplier=0.5, start_epoch=1, end_epoch=3)
    model = compiled(new_model(1), bps.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, together=True, callbacks=[schedule, watch], epochs=4)
    np.testing.assert_allclose(watch.rates[::STEPS], [0.1, 0.1, 0.05, 0.05], rtol=1e-6)

    # Momentum correction: as an optimizer whose momentum is multiplied once by the ratio of the rates.
    for sgd in SGDS:
        model = compiled(new_model(1), bps.DistributedOptimizer(sgd(0.1, momentum=0.5)))
        fit(model, together=True, epochs=1)
        before = [to_numpy(v) for v in velocities_of(model.optimizer)]
        assert len(before) == len(model.weights)
        schedule.set_model(model)
        schedule._set_lr(0.3)
        for a, b in zip(velocities_of(model.optimizer), before):
            np.testing.assert_allclose(to_numpy(a), 3 * b, rtol=1e-5)


def check_values():
    rank, size = bps.rank(), bps.size()
    assert float(bps.allreduce(rank + 1.0)) == (size + 1) / 2
    assert float(bps.allreduce(np.float32(rank), average=False)) == sum(range(size))
    assert float(bps.push_pull(keras.ops.convert_to_tensor(float(rank)), "v", False)) == sum(range(size))
    np.testing.assert_array_equal(
        bps.allgather(np.full(rank + 1, rank)), np.repeat(np.arange(size), np.arange(size) + 1)
    )
    assert bps.broadcast(np.array([rank]), size - 1)[0] == size - 1
    assert bps.reducescatter(np.ones([size, 2], "float32"), op=bps.Sum)[0, 0] == size
    seeds = keras.random.SeedGenerator(rank)
    bps.broadcast_variables([seeds.state], 0)
    assert to_numpy(seeds.state)[0] == 0


def check_gradients_are_reduced_once():
    """With tf_keras: where they are computed, or where they are applied; also those that were clipped in between."""
    if not IS_KERAS_2:
        return
    import tensorflow as tf

    for sgd in SGDS:
        x, y = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = bps.DistributedOptimizer(sgd(1.0), op=bps.Sum)
        optimizer.build([x, y]) if sgd is keras.optimizers.SGD else None

        def loss(x=x, y=y):
            return (bps.rank() + 1) * (x + y)

        total = sum(range(1, bps.size() + 1))
        optimizer.minimize(loss, [x, y])
        assert float(x) == float(y) == -total
        (of_x, _), (of_y, _) = optimizer.compute_gradients(loss, [x, y])
        optimizer.apply_gradients([(tf.clip_by_value(of_x, -1.0, 1.0), x)])
        optimizer.apply_gradients([(of_y, y)])
        assert float(x) == -total - 1 and float(y) == -2 * total
        optimizer.apply_gradients([(tf.constant(1.0), x)])
        assert float(x) == -total - 1 - bps.size()
        try:
            scaled = keras.mixed_precision.LossScaleOptimizer(bps.DistributedOptimizer(sgd(), backward_passes_per_step=2))
            scaled.minimize(loss, [x, y])
            raise AssertionError
        except ValueError as error:
            assert "give DistributedOptimizer the LossScaleOptimizer" in str(error), error


def expect(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__}")


def check_refusals():
    once = bps.DistributedOptimizer(keras.optimizers.SGD())
    expect(ValueError, lambda: bps.DistributedOptimizer(once), "already")
    expect(TypeError, lambda: bps.DistributedOptimizer("sgd"), "no optimizer")
    expect(RuntimeError, lambda: bps.broadcast_global_variables(0), "broadcast_variables")
    built = keras.optimizers.SGD()
    built.build([keras.Variable(1.0)])
    expect(
        ValueError, lambda: bps.DistributedOptimizer(built, backward_passes_per_step=2), "gradient_accumulation_steps"
    )
    sums = bps.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=2)
    expect(ValueError, lambda: keras.optimizers.LossScaleOptimizer(sums), "average_aggregated_gradients=True")
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD()))
    expect(ValueError, lambda: bps.DistributedOptimizer(several, backward_passes_per_step=2), "gradient_accumulation_steps")
    if bps.size() > 1:
        sizes = [keras.Variable(np.zeros(2 + bps.rank()))]
        if bps.rank() > 0:
            expect(ValueError, lambda: bps.broadcast_variables(sizes, 0), "number 0")
        else:
            bps.broadcast_object([("float32", (2,))], 0, "keras.shapes")


def check_process_set():
    """All ranks but the last train together, and that one by itself: with fit(), from a file, under loss scaling."""
    ranks, rank = list(range(bps.size() - 1)), bps.rank()
    mine = ranks if rank in ranks else [rank]
    together = bps.add_process_set(ranks)
    if BACKEND == "jax":
        expect(ValueError, lambda: bps.DistributedOptimizer(keras.optimizers.SGD(), process_set=together), "but on JAX")
        bps.remove_process_set(together)
        return

    def agree_in_set(model):
        everybody = bps.allgather_object(weights(model))
        for other in mine:
            close(everybody[rank], everybody[other], 0)
        return everybody

    model = compiled(new_model(1), bps.DistributedOptimizer(keras.optimizers.SGD(0.3), process_set=together))
    x, y = data()
    model.fit(shares(x, rank), shares(y, rank), SHARE, 2, verbose=0, shuffle=False)
    everybody = agree_in_set(model)
    assert np.abs(everybody[0][0] - everybody[-1][0]).max() > 0
    alone = compiled(new_model(1), keras.optimizers.SGD(0.3))
    order = [i for i in range(len(x)) if i % bps.size() in mine]
    alone.fit(x[order], y[order], SHARE * len(mine), 2, verbose=0, shuffle=False)
    close(everybody[rank], weights(alone))

    path = os.path.join(FLAG, f"set.{rank}.keras")
    model.save(path)
    loaded = bps.load_model(path)
    assert loaded.optimizer._bps.process_set is together
    loaded.fit(shares(x, rank), shares(y, rank), SHARE, 1, verbose=0, shuffle=False)
    agree_in_set(loaded)

    scaled = bps.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)), process_set=together)
    variable = keras.Variable(np.ones(3, "float32"))
    scaled.build([variable])
    scale = float(to_numpy(scaled.dynamic_scale))
    scaled.apply([keras.ops.convert_to_tensor(np.full(3, scale * rank, "float32"))], [variable])
    close([to_numpy(variable)], [np.full(3, 1 - np.mean(mine), "float32")])
    bps.remove_process_set(together)
    expect(ValueError, lambda: bps.load_model(path), "add_process_set([")


def check_loss_scale():
    """An overflow on one rank: all skip the step, and go on alike."""
    optimizer = bps.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
    )
    variable = keras.Variable(np.ones(3, "float32"))
    optimizer.build([variable])

    def step(*values):
        gradient = keras.ops.convert_to_tensor(np.array(values, "float32"))
        if BACKEND != "jax":
            optimizer.apply([gradient], [variable])
            return
        values, state = optimizer.stateless_apply([v.value for v in optimizer.variables], [gradient], [variable.value])
        variable.assign(values[0])
        for v, value in zip(optimizer.variables, state):
            v.assign(value)

    step(4, np.inf if bps.rank() == bps.size() - 1 else 4, 4)
    np.testing.assert_array_equal(to_numpy(variable), np.ones(3))
    step(4, 8 * bps.rank(), 4)  # at a scale of 2 now
    average = np.mean([8 * r for r in range(bps.size())])
    np.testing.assert_allclose(to_numpy(variable), 1 - 0.05 * np.array([4, average, 4]), rtol=1e-6)


def main():
    bps.init()
    wanted = sys.argv[1:] or [name for name in globals() if name.startswith("check_")]
    for name, _, argument in (check.partition("=") for check in wanted):
        globals()[name](*[argument] if argument else [])
    print("done")


main()
