"""bps.keras.elastic under the name that programs for tf.keras know."""

from ...keras.elastic import *  # noqa: F403
from ...keras.elastic import __all__ as __all__
