"""Changes to a whole config tree: modifiers, and replacing one kind of layer by another."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from moelib.core.config import ConfigBase, Configurable, InstantiableConfig, config_origin
from moelib.core.config_text import set_at, sub_configs
from moelib.core.errors import UserError


class ConfigModifier(Configurable):
    """A change to a config that is itself a config, for example a mesh rule."""

    @abstractmethod
    def __call__(self, cfg: Any) -> Any:
        """Returns the changed config, `cfg` itself or a new one; callers use the returned one."""


def apply_mesh_rule(cfg: Any, rule: Any) -> Any:
    """Returns a trainer config changed by a mesh rule; `cfg` itself may be changed.

    The rule is a mesh shape, the config of a `ConfigModifier`, or a list of such configs.

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
    """Replaces every config of class `target` inside `cfg`, and returns their number.

    Args:
        cfg: The config to change, in place.
        target: The class whose configs are replaced (not those of subclasses).
        new: The new config. Fields of both configs that the old one sets are carried over, unless
            the new one sets them. Or a function from the old config to the new one.

    Raises:
        UserError: If nothing is replaced.
    """
    count = 0
    skipped: list[str] = []
    for path, old in list(sub_configs(cfg)):
        inside_replaced = any(path.startswith(outer) for outer in skipped)
        if inside_replaced or getattr(old, "klass", None) is not target:
            continue
        if callable(new):
            replacement = new(old)
        else:
            _carry_over(old, None, replacement := new.clone(), None)
        set_at(cfg, path, replacement)
        skipped.append(path + ".")
        count += 1
    if not count:
        raise UserError(
            f"nothing replaced: no config of {target.__qualname__} is inside; remove the modifier, "
            "or apply it to a config with one."
        )
    return count


def _carry_over(
    old: ConfigBase, old_start: ConfigBase | None, new: ConfigBase, new_start: ConfigBase | None
) -> None:
    """Sets those fields of `new` that `old` sets and `new` does not.

    A field is set if it differs from the config that `..._start` was by default; None: from the
    defaults of its class.
    """
    for name, value in list(old.items()):
        if name == "klass" or name not in new:
            continue
        old_default, _, old_is_set = _state(old, old_start, name)
        new_default, assigned, new_is_set = _state(new, new_start, name)
        mine = new._values[name]
        if not new_is_set:
            if old_is_set:
                with config_origin(old.origin(name)):
                    setattr(new, name, value)
        elif not assigned and isinstance(value, ConfigBase) and value._header() == mine._header():
            _carry_over(value, old_default, mine, new_default)


def _state(cfg: ConfigBase, start: ConfigBase | None, name: str) -> tuple[Any, bool, bool]:
    """Returns a field's default, whether the field was assigned, and whether it was set at all."""
    if start is None:
        default, origin = cfg._fields[name].default, None
    else:
        default, origin = start._values[name], start._origins.get(name)
    assigned = cfg._origins.get(name) != origin
    return default, assigned, assigned or cfg._values[name] != default
