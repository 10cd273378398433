"""Places inside configs: what stands at "model.layers[0].dim", and putting something else there."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from moelib.core import config_values
from moelib.core.config_base import ConfigBase, UnknownFieldError
from moelib.core.config_values import did_you_mean

Key = str | int
_NAME = r"[^.\[\]'\":\s\\]+"
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_TOKEN = re.compile(rf"\.?({_NAME})|\[(-?\d+|{_QUOTED})\]")


def split_path(path: str | Sequence[Key]) -> list[Key]:
    """Returns the keys of "a.b[0]['c.d']": names as str, indices as int."""
    if not isinstance(path, str):
        return list(path)
    keys, rest = split_front(path)
    if rest:
        raise UnknownFieldError(f"{path!r} is not a path such as a.b[0].c.")
    return keys


def split_front(text: str) -> tuple[list[Key], str]:
    """Returns the keys of the path that a text starts with, and the rest of the text."""
    keys: list[Key] = []
    end = 0
    while match := _TOKEN.match(text, end):
        name, bracket = match.groups()
        index = bracket or ""
        keys.append(name or (int(index) if index.isdigit() else ast.literal_eval(index)))
        end = match.end()
    return keys, text[end:]


def join_path(keys: Sequence[Key]) -> str:
    """Returns the path of the keys, as `split_path` reads it."""
    path = ""
    for key in keys:
        if isinstance(key, str) and re.fullmatch(_NAME, key):
            path += f".{key}" if path else key
        else:
            path += f"[{key!r}]"
    return path


def get(cfg: ConfigBase, path: str | Sequence[Key]) -> Any:
    """Returns the value at a path. Raises UnknownFieldError with the nearest names."""
    value: Any = cfg
    keys = split_path(path)
    for depth, key in enumerate(keys):
        value = child_at(value, key, keys[:depth])
    return value


def child_at(value: Any, key: Key, parents: Sequence[Key]) -> Any:
    """Returns what is inside `value` at `key`; `parents` say where we are, for the error."""
    inside = dict(children(value))
    if isinstance(value, list | tuple) and isinstance(key, str) and key.isdigit():
        key = int(key)
    if key in inside:
        return inside[key]
    where = join_path(parents) or "the config"
    if not inside:
        raise UnknownFieldError(f"{where} is {value!r}: it has nothing inside; no {key!r} there.")
    raise UnknownFieldError(f"{where} has no {key!r}; {did_you_mean(str(key), map(str, inside))}")


def children(value: Any) -> list[tuple[Key, Any]]:
    """Returns what is directly inside a value, by key."""
    if isinstance(value, ConfigBase):
        return list(value.items())
    if config_values.is_record(value):
        return list(config_values.record_fields(value).items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else []


def sub_configs(cfg: ConfigBase) -> Iterator[tuple[str, ConfigBase]]:
    """Yields (path, config) of every config inside `cfg`, outermost first, `cfg` not included."""

    def walk(value: Any, keys: list[Key]) -> Iterator[tuple[str, ConfigBase]]:
        for key, child in children(value):
            if isinstance(child, ConfigBase):
                yield join_path([*keys, key]), child
            yield from walk(child, [*keys, key])

    return walk(cfg, [])


def set_at(cfg: ConfigBase, path: str | Sequence[Key], value: Any) -> None:
    """Sets the value at a path; what holds it is checked as on any assignment."""
    if not (keys := split_path(path)):
        raise UnknownFieldError("the path is empty; name a field.")
    *parents, key = keys
    holder = get(cfg, parents)
    child_at(holder, key, parents)  # Raises if there is no such place.
    if isinstance(holder, ConfigBase):
        setattr(holder, str(key), value)
    else:
        set_at(cfg, parents, _replaced(holder, key, value))


def _replaced(holder: Any, key: Key, value: Any) -> Any:
    """Returns a container or record like `holder` with another value at `key`."""
    if isinstance(holder, dict):
        return {**holder, key: value}
    if config_values.is_record(holder):
        return type(holder)(**{**config_values.record_fields(holder), str(key): value})
    return type(holder)(value if i == int(key) else v for i, v in enumerate(holder))
