"""Names that users of AXLearn know, for which moelib itself has no use."""

from collections.abc import Callable, Sequence
from typing import Any

from moelib.core.config import ConfigBase
from moelib.core.context import InvocationContext, context_stack

TrainerConfigFn = Callable[[], Any]


def with_overrides(trainer_config_fn: TrainerConfigFn, **values: Any) -> TrainerConfigFn:
    """Returns a function that returns the same config with other values of some fields."""
    return lambda: trainer_config_fn().set(**values)


def maybe_set_config(cfg: ConfigBase, **values: Any) -> ConfigBase:
    """Sets the fields that the config has, ignores the other names, and returns the config."""
    return cfg.set(**{name: value for name, value in values.items() if name in cfg})


def clone_context_stack() -> list[InvocationContext]:
    """Returns a copy of this thread's stack of contexts, to be installed in another thread."""
    return list(context_stack())


def install_context_stack(stack: Sequence[InvocationContext]) -> None:
    """Replaces this thread's stack of contexts."""
    context_stack()[:] = stack
