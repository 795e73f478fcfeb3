#!/usr/bin/env python3
"""Images per second of a convolutional network on made-up images, with TensorFlow and Keras.

    bpslaunch -np 2 python tf_synthetic_benchmark.py --model resnet50

What Horovod's and BytePS's synthetic benchmarks measure, with their options.
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import bps.tensorflow as bps


def small_model(side):
    layers = [keras.layers.Conv2D(n, 3, 2, activation="relu") for n in (16, 32, 64)]
    return keras.Sequential(
        [keras.Input((side, side, 3)), *layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1000)]
    )


MODELS = {
    "small": small_model,
    "mobilenetv2": lambda side: keras.applications.MobileNetV2(
        (side, side, 3), weights=None, classifier_activation=None
    ),
    "resnet50": lambda side: keras.applications.ResNet50(
        input_shape=(side, side, 3), weights=None, classifier_activation=None
    ),
    "vgg16": lambda side: keras.applications.VGG16(
        input_shape=(side, side, 3), weights=None, classifier_activation=None
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images of one step on one rank")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--num-warmup-batches", type=int, default=3)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-pushpull", action="store_true", help="send gradients as float16")
    arguments = parser.parse_args()

    bps.init()
    compression = bps.Compression.fp16 if arguments.fp16_pushpull else bps.Compression.none
    keras.utils.set_random_seed(1 + bps.rank())
    model = MODELS[arguments.model](arguments.image_size)
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    bps.broadcast_variables(model.weights, root_rank=0)
    images = tf.random.uniform([arguments.batch_size, arguments.image_size, arguments.image_size, 3])
    labels = tf.random.uniform([arguments.batch_size], 0, 999, tf.int64)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        tape = bps.DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def say(text):
        if bps.rank() == 0:
            print(text, flush=True)

    parameters = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    say(
        f"{arguments.model}, {parameters / 1e6:.1f} million parameters, "
        f"batches of {arguments.batch_size}, {bps.size()} rank(s)"
    )
    for _ in range(arguments.num_warmup_batches):
        step()
    speeds = []
    for i in range(arguments.num_iters):
        start = time.monotonic()
        for _ in range(arguments.num_batches_per_iter):
            step()
        speeds.append(arguments.batch_size * arguments.num_batches_per_iter / (time.monotonic() - start))
        say(f"{i + 1}/{arguments.num_iters}: {speeds[-1]:.1f} img/s on each rank")
    mean, spread = np.mean(speeds), 1.96 * np.std(speeds)
    say(f"img/s on each rank: {mean:.1f} +- {spread:.1f}")
    say(f"img/s on {bps.size()} rank(s): {bps.size() * mean:.1f} +- {bps.size() * spread:.1f}")


if __name__ == "__main__":
    main()
