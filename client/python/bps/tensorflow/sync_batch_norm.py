"""SyncBatchNormalization: batch normalization over the batches of all ranks."""

import tensorflow as tf

from .. import _client
from .._library import Reduction
from ..keras._backend import IS_KERAS_2, keras
from .ops import allreduce


def _mean_and_variance(inputs, mask, axes):
    """Over these axes, which stay with a size of 1, and over all ranks."""
    weights = tf.ones_like(inputs)
    if mask is not None:
        mask = tf.cast(mask, inputs.dtype)
        while mask.shape.rank < inputs.shape.rank:
            mask = mask[..., tf.newaxis]
        weights = weights * mask
    # Sums and numbers travel together; the mean comes from all of them, then the variance around it.
    sums = [tf.reduce_sum(each, axes, keepdims=True) for each in (weights * inputs, weights)]
    total, number = tf.unstack(allreduce(tf.stack(sums), op=Reduction.SUM))
    number = tf.maximum(number, 1)
    mean = total / number
    squares = tf.reduce_sum(weights * tf.math.squared_difference(inputs, mean), axes, keepdims=True)
    return mean, allreduce(squares, op=Reduction.SUM) / number


def _is_of_several_ranks():
    return _client.is_initialized() and _client.current().size > 1


@keras.saving.register_keras_serializable(package="bps")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Keras' BatchNormalization whose statistics in training are those of all ranks' batches together.

    Batches may be of different sizes, and masked. Outside training, and in a job of one rank, it is BatchNormalization.
    """

    def __init__(self, fused=False, **kwargs):
        if fused:
            raise ValueError("fused=True: SyncBatchNormalization has no fused form")
        super().__init__(**kwargs, **({"fused": False} if IS_KERAS_2 else {}))

    if IS_KERAS_2:

        def _calculate_mean_and_var(self, inputs, reduction_axes, keep_dims, mask=None):
            if not _is_of_several_ranks():
                return super()._calculate_mean_and_var(inputs, reduction_axes, keep_dims, mask)
            both = _mean_and_variance(inputs, mask, reduction_axes)
            return both if keep_dims else tuple(tf.squeeze(each, reduction_axes) for each in both)

    else:

        def _moments(self, inputs, mask):
            if not _is_of_several_ranks():
                return super()._moments(inputs, mask)
            both = _mean_and_variance(inputs, mask, self._reduction_axes)
            return tuple(tf.squeeze(each, self._reduction_axes) for each in both)
