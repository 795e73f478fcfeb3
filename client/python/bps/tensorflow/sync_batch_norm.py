"""SyncBatchNormalization: batch normalization over the batches of all ranks."""

import keras
import tensorflow as tf

from .. import _client
from .._library import Reduction
from .ops import allreduce


@keras.saving.register_keras_serializable(package="bps")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Keras' BatchNormalization whose statistics in training are those of all ranks' batches together.

    Batches may be of different sizes, and masked. Outside training, and in a job of one rank, it is BatchNormalization.
    """

    def __init__(self, fused=False, **kwargs):
        if fused:
            raise ValueError("fused=True: SyncBatchNormalization has no fused form")
        super().__init__(**kwargs)

    def _moments(self, inputs, mask):
        if not _client.is_initialized() or _client.current().size == 1:
            return super()._moments(inputs, mask)
        weights = tf.ones_like(inputs)
        if mask is not None:
            mask = tf.cast(mask, inputs.dtype)
            while mask.shape.rank < inputs.shape.rank:
                mask = mask[..., tf.newaxis]
            weights = weights * mask
        # Sums and numbers travel together; the mean comes from all of them, then the variance around it.
        sums = tf.stack(
            [tf.reduce_sum(weights * inputs, self._reduction_axes), tf.reduce_sum(weights, self._reduction_axes)]
        )
        total, number = tf.unstack(allreduce(sums, op=Reduction.SUM))
        number = tf.maximum(number, 1)
        mean = total / number
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        squares = tf.reduce_sum(
            weights * tf.math.squared_difference(inputs, tf.reshape(mean, shape)), self._reduction_axes
        )
        return mean, allreduce(squares, op=Reduction.SUM) / number
