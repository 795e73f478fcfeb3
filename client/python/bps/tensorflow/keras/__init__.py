"""bps.keras under the name that programs for tf.keras know."""

from ...keras import *  # noqa: F403
from ...keras import __all__ as __all__
from . import callbacks as callbacks
from . import elastic as elastic
