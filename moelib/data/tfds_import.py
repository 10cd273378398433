"""TensorFlow and TFDS, imported when they are needed and no sooner."""

import importlib.resources
import importlib.resources.abc
import sys
from typing import Any


def import_tfds() -> Any:
    """Returns TensorFlow Datasets; TensorFlow itself is not imported."""
    # TFDS 4.9.10 imports a backport without requiring it; the standard library has what it uses.
    sys.modules.setdefault("importlib_resources", importlib.resources)
    import tensorflow_datasets as tfds

    return tfds


def import_tensorflow() -> Any:
    """Returns TensorFlow, kept off accelerators: it would take their memory from JAX."""
    import tensorflow as tf

    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf
