"""Paths of configs such as "model.layers[0].dim": get, set, and print one line per path.

A config prints as lines `path: literal`. Functions, classes and enum members print as
`module:qualname`; a container that holds configs prints its kind, then its elements:

    klass: moelib.models.causal_lm:CausalLM
    decoder.first_layers: <list>
    decoder.first_layers[0].klass: moelib.layers.transformer:TransformerLayer
    decoder.first_layers[0].hidden_dim: 1368
"""

import ast
import enum
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moelib.core import config_types
from moelib.core.config_types import (
    REQUIRED,
    UnknownFieldError,
    did_you_mean,
    is_config,
    is_record,
)

Key = str | int
_NAME = r"[^.\[\]'\":\s\\]+"
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_TOKEN = re.compile(rf"\.?({_NAME})|\[(-?\d+|{_QUOTED})\]")


# -- Paths ---------------------------------------------------------------------------------------


def split_path(path: str | Sequence[Key]) -> list[Key]:
    """Returns the keys of "a.b[0]['c.d']": names as str, indices as int."""
    if not isinstance(path, str):
        return list(path)
    keys, rest = split_front(path)
    if rest:
        raise UnknownFieldError(f"{path!r} is not a path such as a.b[0].c.")
    return keys


def split_front(text: str) -> tuple[list[Key], str]:
    """Returns the keys of the path at the start of a text, and the rest of the text."""
    keys: list[Key] = []
    end = 0
    while match := _TOKEN.match(text, end):
        name, bracket = match.groups()
        try:
            keys.append(name or _index(bracket))
        except (SyntaxError, ValueError) as error:
            raise UnknownFieldError(f"{config_types.cut(text)!r}: {error}") from None
        end = match.end()
    return keys, text[end:]


def _index(text: str) -> Key:
    """Returns the key in the brackets of a path: a number, or a quoted name."""
    if text[0] not in "'\"":
        return int(text)
    with warnings.catch_warnings(action="ignore"):  # Of unknown escapes.
        return ast.literal_eval(text)


def join_path(keys: Sequence[Key]) -> str:
    """Returns the path of the keys, as `split_path` reads it."""
    path = ""
    for key in keys:
        if isinstance(key, str) and key.isprintable() and re.fullmatch(_NAME, key):
            path += f".{key}" if path else key
        else:
            path += f"[{key!r}]"
    return path


def children(value: Any) -> list[tuple[Key, Any]]:
    """Returns the values directly inside a config, record or container, by key."""
    if is_config(value):
        return list(value.items())
    if is_record(value):
        return list(config_types.record_fields(value).items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else []


def map_elements(fn: Callable[[Any], Any], value: Any) -> Any:
    """Returns a list, tuple or dict like `value` of fn(element); other values as they are."""
    if isinstance(value, dict):
        return {key: fn(element) for key, element in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(fn, value))
    return type(value)(map(fn, value)) if isinstance(value, list | tuple) else value


def sub_configs(cfg: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path, config) of every config inside `cfg`, outermost first, without `cfg`."""

    def walk(value: Any, keys: list[Key]) -> Iterator[tuple[str, Any]]:
        for key, child in children(value):
            if is_config(child):
                yield join_path([*keys, key]), child
            yield from walk(child, [*keys, key])

    return walk(cfg, [])


def get(cfg: Any, path: str | Sequence[Key]) -> Any:
    """Returns the value at a path. Raises UnknownFieldError with the nearest names."""
    value: Any = cfg
    for depth, key in enumerate(keys := split_path(path)):
        value = child_at(value, key, keys[:depth])
    return value


def child_at(value: Any, key: Key, parents: Sequence[Key]) -> Any:
    """Returns the value at `key` inside `value`, whose own path, for errors, is `parents`."""
    inside = dict(children(value))
    if isinstance(value, list | tuple) and isinstance(key, str) and key.isdigit():
        key = int(key)
    if key in inside:
        return inside[key]
    where = join_path(parents) or "the config"
    if not inside:
        raise UnknownFieldError(f"{where} is {value!r}: it has nothing inside; no {key!r} there.")
    raise UnknownFieldError(f"{where} has no {key!r}; {did_you_mean(str(key), map(str, inside))}")


def set_at(cfg: Any, path: str | Sequence[Key], value: Any) -> None:
    """Sets the value at a path; the field that holds it is checked as on any assignment."""
    if not (keys := split_path(path)):
        raise UnknownFieldError("the path is empty; name a field.")
    *parents, key = keys
    holder = get(cfg, parents)
    child_at(holder, key, parents)  # Raises if nothing has this path.
    if is_config(holder):
        setattr(holder, str(key), value)
    else:
        set_at(cfg, parents, _replaced(holder, key, value))


def _replaced(holder: Any, key: Key, value: Any) -> Any:
    """Returns a container or record like `holder` with another value at `key`."""
    if isinstance(holder, dict):
        return {**holder, key: value}
    if is_record(holder):
        return type(holder)(**{**config_types.record_fields(holder), str(key): value})
    return type(holder)(value if i == int(key) else v for i, v in enumerate(holder))


# -- Text ----------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a config's text, about one value."""

    path: str
    text: str
    value: Any
    origin: str  # File and line, or flag, that set the value.
    opens: bool  # Whether the value is a container, whose elements follow.
    is_default: bool  # Whether the value is the default of a field.


_HOLDERS = (list, tuple, dict)


def is_plain(value: Any) -> bool:
    """Returns whether a value prints as one literal."""
    if is_record(value) or isinstance(value, enum.Enum):
        return False
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, type(None) | bool | int | float | str | bytes)


def literal(value: Any) -> str:
    """Returns the text of a value without configs; `config_parse.read_literal` reads it back."""
    match value:
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case tuple():
            return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
        case dict():
            return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
        case np.generic():  # np.float64 is a float whose repr is no literal.
            return literal(value.item())
    if isinstance(value, np.dtype):
        return f"dtype({value.name!r})"  # NumPy prints those of ml_dtypes without quotes.
    if value is REQUIRED or is_plain(value):
        return repr(value)
    return config_types.reference(value)


def lines(cfg: Any, *, unset: bool = True) -> Iterator[Line]:
    """Yields the lines of a config's text, by default with fields left at None, REQUIRED or ""."""

    def walk(value: Any, keys: tuple[Key, ...], origin: str, is_default: bool) -> Iterator[Line]:
        if is_config(value):
            name, shown = value._header()
            opens = name == "config_class"
            yield Line(join_path((*keys, name)), literal(shown), shown, origin, opens, False)
            for key, child in value.items():
                if key != name and (unset or not value._is_unset(key)):
                    default = value._is_default(key)
                    yield from walk(child, (*keys, key), value.origin(key), default)
        elif is_plain(value) or (not isinstance(value, _HOLDERS) and not is_record(value)):
            yield Line(join_path(keys), literal(value), value, origin, False, is_default)
        else:
            builtin = type(value) in _HOLDERS
            text = type(value).__name__ if builtin else config_types.reference(type(value))
            yield Line(join_path(keys), f"<{text}>", value, origin, True, is_default)
            for key, child in children(value):
                yield from walk(child, (*keys, key), origin, False)

    return walk(cfg, (), "", False)


def leaves(cfg: Any) -> Iterator[Line]:
    """Yields the line of every value that holds no other."""
    return (line for line in lines(cfg) if not line.opens)


def to_text(cfg: Any) -> str:
    """Returns a config as text: lines `path: literal`, in the order of the fields."""
    return "".join(f"{line.path}: {line.text}\n" for line in lines(cfg, unset=False))


def text_lines(text: str) -> dict[str, str]:
    """Returns {path: literal} of the lines of a text that `to_text` wrote."""
    ends = ((line, split_front(line)[1]) for line in text.splitlines())
    return {line.removesuffix(end): end.removeprefix(": ") for line, end in ends}


def diff(a: Any, b: Any) -> list[tuple[str, str | None, str | None]]:
    """Returns (path, text in a, text in b) of every line that differs; None if it is absent."""
    lines_a, lines_b = ({x.path: x.text for x in lines(c, unset=False)} for c in (a, b))
    paths = [*lines_a, *(path for path in lines_b if path not in lines_a)]
    pairs = ((path, lines_a.get(path), lines_b.get(path)) for path in paths)
    return [(path, in_a, in_b) for path, in_a, in_b in pairs if in_a != in_b]
