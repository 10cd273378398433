"""TFDS and TensorFlow: optional packages, imported on use."""

import functools
import importlib
import importlib.resources
import importlib.resources.abc
import sys
from typing import Any

from moelib.core.errors import UserError

_FEATURES = "tensorflow_datasets.core.features."  # Modules of TFDS's own features.


class MissingPackageError(UserError, ModuleNotFoundError):
    """An optional package is not installed."""


def _import(module: str, use: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{use} needs {module}, which is not installed ({error}); install it with "
            f"`pip install 'moelib[tfds]'`."
        ) from error


@functools.cache
def import_tfds() -> Any:
    """Returns TensorFlow Datasets, without importing TensorFlow.

    A data set's features.json names the classes of its features, whose modules TFDS would import.
    Only those of TFDS itself, and modules that are imported already, are allowed.
    """
    # TFDS 4.9.10 imports this backport without requiring it; the standard library suffices.
    sys.modules.setdefault("importlib_resources", importlib.resources)
    tfds = _import("tensorflow_datasets", "A TFDS data set")
    if not hasattr(tfds, "builder"):  # TFDS logs an error in its own imports and goes on.
        raise MissingPackageError(
            "tensorflow_datasets lacks a package, named in the log above; install it with "
            "`pip install 'moelib[tfds]'`."
        )
    find_class = tfds.features.FeatureConnector.cls_from_name

    def find_allowed_class(name: str) -> Any:
        module = name.rpartition(".")[0]
        if not name.startswith(_FEATURES) and module not in sys.modules:
            raise UserError(
                f"features.json may not name {name!r}; if you trust this code, import {module!r} "
                "in your script first."
            )
        return find_class(name)

    tfds.features.FeatureConnector.cls_from_name = staticmethod(find_allowed_class)
    return tfds


def check_array_record() -> None:
    """Raises MissingPackageError if ArrayRecord files cannot be read."""
    _import("array_record", "A data set stored as ArrayRecord")


def import_tensorflow() -> Any:
    """Returns TensorFlow, kept off accelerators, whose memory it would take from JAX."""
    tf = _import("tensorflow", "Reading TFRecord files")
    for kind in ("GPU", "TPU"):
        tf.config.set_visible_devices([], kind)
    return tf
