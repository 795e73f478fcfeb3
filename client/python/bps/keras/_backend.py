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
    if IS_KERAS_2:
        needs, package = "tf_keras, as TF_USE_LEGACY_KERAS is set", "tf-keras"
    elif error.name in ("tensorflow", "torch", "jax"):
        needs, package = "a backend of Keras, which KERAS_BACKEND names: tensorflow, torch or jax", error.name
    else:
        needs, package = "Keras 3", "'keras>=3'"
    raise ImportError(f"bps.keras needs {needs} ({error}): pip install {package}") from error

if not IS_KERAS_2 and int(keras.__version__.split(".")[0]) < 3:
    raise ImportError(
        f"bps.keras needs Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1 (this is {keras.__version__}): pip install 'keras>=3'"
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
        f"bps.keras works with Keras on TensorFlow, PyTorch and JAX (set KERAS_BACKEND to tensorflow, torch or jax); this is "
        f"Keras on {BACKEND}"
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
