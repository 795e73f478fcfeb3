"""A tf.distribute strategy over the ranks of a job, where TensorFlow has MultiWorkerMirroredStrategy."""

from ._strategy import MirroredStrategy

__all__ = ["MirroredStrategy"]
