"""Configs: typed, nested, mutable descriptions from which objects are built. Plain Python, no JAX.

A class says what it can be told in a nested `Config`; a config is changed freely, printed,
compared and written to text, and only `instantiate()` builds the object.

    class Ffn(Module):
        @config_class
        class Config(Module.Config):
            input_dim: Required[int] = REQUIRED

    ffn = Ffn.default_config().set(name="ffn", input_dim=8).instantiate(parent=None)

This file is what others import; its parts are config_values (what a field may hold), config_base
(what a config is), config_build (how it builds), config_path and config_text.
"""

import importlib
import types
from collections.abc import Callable
from typing import Any

from moelib.core.config_base import (
    ConfigBase,
    FrozenConfigError,
    InvalidConfigClassError,
    InvalidConfigNameError,
    MissingConfigClassDecoratorError,
    UnknownFieldError,
    config_class,
    config_origin,
)
from moelib.core.config_build import (
    ConfigOr,
    Configurable,
    InstantiableConfig,
    RequiredFieldMissingError,
    config_for_class,
    config_for_function,
    maybe_instantiate,
    maybe_set_config,
)
from moelib.core.config_values import (
    REQUIRED,
    DType,
    InvalidConfigValueError,
    NonConfigFieldError,
    Required,
    RequiredFieldValue,
    did_you_mean,
    register_validator,
    similar_names,
)

__all__ = [
    "REQUIRED",
    "ConfigBase",
    "ConfigOr",
    "Configurable",
    "DType",
    "FrozenConfigError",
    "InstantiableConfig",
    "InvalidConfigClassError",
    "InvalidConfigNameError",
    "InvalidConfigValueError",
    "MissingConfigClassDecoratorError",
    "NonConfigFieldError",
    "Required",
    "RequiredFieldMissingError",
    "RequiredFieldValue",
    "TrainerConfigFn",
    "UnknownFieldError",
    "config_class",
    "config_for_class",
    "config_for_function",
    "config_origin",
    "did_you_mean",
    "get_named_trainer_config",
    "maybe_instantiate",
    "maybe_set_config",
    "register_validator",
    "similar_names",
    "with_overrides",
]

# -- Named configs -------------------------------------------------------------------------------

TrainerConfigFn = Callable[[], Any]


def get_named_trainer_config(
    name: str, *, config_module: str | types.ModuleType
) -> TrainerConfigFn:
    """Returns the function of that name from a module's `named_trainer_configs()`.

    Raises:
        InvalidConfigNameError: If there is no such name (the message holds the nearest) or the
            module has no `named_trainer_configs`. An error inside the module is raised as it is.
    """
    module = config_module
    if isinstance(module, str):
        module = importlib.import_module(module)
    if not hasattr(module, "named_trainer_configs"):
        raise InvalidConfigNameError(
            f"module {module.__name__} defines no named_trainer_configs(); it must return a dict "
            "of functions, each of which returns a trainer config."
        )
    configs = module.named_trainer_configs()
    if name not in configs:
        raise InvalidConfigNameError(
            f"{module.__name__} has no config {name!r}; {did_you_mean(name, configs)}"
        )
    return configs[name]


def with_overrides(trainer_config_fn: TrainerConfigFn, **values: Any) -> TrainerConfigFn:
    """Returns a function that makes the same config with some fields set otherwise."""
    return lambda: trainer_config_fn().set(**values)
