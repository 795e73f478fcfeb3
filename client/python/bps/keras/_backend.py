"""Which Keras this is, and what differs between its backends: how a list of gradients is reduced, which Compression there is, and
what becomes of errors."""

import os

# As in TensorFlow, whose tf.keras is tf_keras then.
IS_KERAS_2 = (
    os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1")
    and os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
)

try:
    if IS_KERAS_2:
        import tf_keras as keras
    else:
        import keras
except ImportError as error:
    needed = "tf_keras, as TF_USE_LEGACY_KERAS is set" if IS_KERAS_2 else "Keras 3"
    raise ImportError(
        f"bps.keras needs {needed}, which cannot be imported: {error}"
        f"; install it: pip install {'tf-keras' if IS_KERAS_2 else 'keras'}"
    ) from error

if not IS_KERAS_2 and int(keras.__version__.split(".")[0]) < 3:
    raise ImportError(
        f"bps.keras needs Keras 3, and this is {keras.__version__}; install it: pip install 'keras>=3', or set "
        "TF_USE_LEGACY_KERAS=1 for tf_keras, which is Keras 2: pip install tf-keras"
    )

BACKEND = "tensorflow" if IS_KERAS_2 else keras.backend.backend()

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
    raise ImportError(
        f"bps.keras works with Keras on TensorFlow, PyTorch and JAX, and this is Keras on {BACKEND}; choose another: "
        "KERAS_BACKEND=tensorflow"
    )

if IS_KERAS_2:
    from ._keras_2 import build, from_numpy, to_numpy, variables_of, velocities_of
else:
    from ._keras_3 import build, from_numpy, to_numpy, variables_of, velocities_of

__all__ = [
    "BACKEND",
    "Compression",
    "IS_KERAS_2",
    "Reducer",
    "as_bps_errors",
    "build",
    "from_numpy",
    "keras",
    "to_numpy",
    "variables_of",
    "velocities_of",
]
