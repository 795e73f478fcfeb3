"""What bps.keras uses of Keras that tf_keras has otherwise: here as in tf_keras, which is Keras 2."""

import numpy as np
import tensorflow as tf
import tf_keras as keras


def to_numpy(value):
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


from_numpy = tf.convert_to_tensor  # as what programs for tf.keras expect of operations


def variables_of(optimizer):
    """What the optimizer keeps, its learning rate and its loss scale among them."""
    variables = [*optimizer.variables(), optimizer.learning_rate]
    if getattr(optimizer, "dynamic", False):  # a LossScaleOptimizer
        variables += [optimizer._loss_scale.current_loss_scale, optimizer._loss_scale.counter]
    return [variable for variable in variables if isinstance(variable, tf.Variable)]  # a schedule is none


def build(optimizer, variables):
    """Makes the optimizer's variables, if it has none yet."""
    make = optimizer._create_all_weights if _is_legacy(optimizer) else optimizer.build
    make(variables)


def velocities_of(optimizer):
    """The variables in which an SGD gathers momentum."""
    if not _is_legacy(optimizer):
        return getattr(optimizer, "momentums", ())
    return optimizer.weights[1:] if isinstance(optimizer, keras.optimizers.legacy.SGD) else ()  # behind iterations


def _is_legacy(optimizer):
    return isinstance(optimizer, keras.optimizers.legacy.Optimizer)
