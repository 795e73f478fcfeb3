"""What differs between Keras' backends: how a list of gradients is reduced, which Compression there is, and what becomes of
errors."""

try:
    import keras
except ImportError as error:
    raise ImportError(f"bps.keras needs Keras 3, which cannot be imported: {error}") from error

if int(keras.__version__.split(".")[0]) < 3:
    raise ImportError(
        f"bps.keras needs Keras 3, and this is {keras.__version__}; for tf_keras, which is Keras 2, there is "
        "bps.tensorflow.DistributedOptimizer"
    )

BACKEND = keras.backend.backend()

if BACKEND == "tensorflow":
    from ..tensorflow._gradients import Reducer
    from ..tensorflow._native import as_bps_errors
    from ..tensorflow.compression import Compression
elif BACKEND == "torch":
    from ..torch.compression import Compression
    from ._torch import Reducer, as_bps_errors
elif BACKEND == "jax":
    from ..jax.compression import Compression
    from ._jax import Reducer, as_bps_errors
else:
    raise ImportError(f"bps.keras works with Keras on TensorFlow, PyTorch and JAX, and this is Keras on {BACKEND}")

__all__ = ["BACKEND", "Compression", "Reducer", "as_bps_errors", "keras"]
