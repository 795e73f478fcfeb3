"""bps.keras.callbacks under the name that programs for tf.keras know."""

from ...keras.callbacks import *  # noqa: F403
from ...keras.callbacks import __all__ as __all__
