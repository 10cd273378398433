"""Changes to a whole config tree: modifiers, and replacing one kind of layer by another."""

from collections.abc import Callable
from typing import Any

from moelib.core.config import REQUIRED, ConfigBase, Configurable, InstantiableConfig
from moelib.core.config_paths import set_at, sub_configs
from moelib.core.errors import UserError

__all__ = [
    "ConfigModifier",
    "apply_mesh_rule",
    "replace_layer_config_recursively",
    "sub_configs",
]


class ConfigModifier(Configurable):
    """A change to a config that is itself a config, for example a mesh rule."""

    def __call__(self, cfg: Any) -> Any:
        """Returns the changed config, `cfg` itself or a new one; callers use what is returned."""
        raise NotImplementedError(f"{type(self).__qualname__} must define __call__.")


def apply_mesh_rule(cfg: Any, rule: Any) -> Any:
    """Returns a trainer config changed by a mesh rule; `cfg` itself may be changed.

    Args:
        cfg: A trainer config.
        rule: A mesh shape, the config of a `ConfigModifier`, or a list of such configs.

    Raises:
        UserError: If a modifier returns None.
    """
    if isinstance(rule, ConfigBase):
        rule = [rule]
    elif not (isinstance(rule, list | tuple) and any(isinstance(r, ConfigBase) for r in rule)):
        return cfg.set(mesh_shape=rule)
    for modifier in rule:
        cfg = modifier.instantiate()(cfg)
        if cfg is None:
            name = getattr(modifier, "klass", type(modifier)).__qualname__
            raise UserError(f"the mesh rule {name} returned None; return the changed config.")
    return cfg


def replace_layer_config_recursively(
    cfg: ConfigBase,
    target: type[Configurable],
    new: InstantiableConfig | Callable[[Any], InstantiableConfig],
) -> int:
    """Replaces every config of class `target` inside `cfg`, and returns how many there were.

    Args:
        cfg: The config to change, in place.
        target: The class whose configs are replaced (subclasses are not).
        new: The config to put there, into which fields that both have and that `new` leaves
            unset are copied; or a function from the old config to the new one.

    Raises:
        ValueError: If nothing is replaced.
    """
    count = 0
    skipped: list[str] = []
    for path, old in list(sub_configs(cfg)):
        inside_replaced = any(path.startswith(outer) for outer in skipped)
        if inside_replaced or getattr(old, "klass", None) is not target:
            continue
        set_at(cfg, path, new(old) if callable(new) else _take_over(new.clone(), old))
        skipped.append(path + ".")
        count += 1
    if not count:
        raise ValueError(f"nothing replaced: no config of {target.__qualname__} is inside.")
    return count


def _take_over(new: InstantiableConfig, old: ConfigBase) -> InstantiableConfig:
    """Copies into `new` those fields of `old` that it also has and leaves at None or REQUIRED."""
    for name, value in old.items():
        if name in new and name != "klass" and getattr(new, name) in (None, REQUIRED):
            setattr(new, name, value)
    return new
