"""What bps.keras uses of Keras that tf_keras has otherwise: here as in Keras 3."""

import keras

to_numpy = keras.ops.convert_to_numpy


def from_numpy(array):
    """The result of an operation, as it is: what a tensor is depends on the backend."""
    return array


def variables_of(optimizer):
    """What the optimizer keeps, its learning rate among them."""
    return optimizer.variables


def build(optimizer, variables):
    """Makes the optimizer's variables, if it has none yet."""
    if not optimizer.built:
        optimizer.build(variables)


def velocities_of(optimizer):
    """The variables in which an SGD gathers momentum."""
    has_some = getattr(optimizer, "momentum", 0) and optimizer.built
    return getattr(optimizer, "momentums", ()) if has_some else ()
