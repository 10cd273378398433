"""Configs as text: print, parse back, compare, explain, and set from a flag.

A config prints a line a value, `path: literal`. Functions, classes and enum members print as
`module:qualname`; a container that holds configs prints its kind, then its elements:

    klass: moelib.models.causal_lm:CausalLM
    decoder.first_layers: <list>
    decoder.first_layers[0].klass: moelib.layers.transformer:TransformerLayer
    decoder.first_layers[0].hidden_dim: 1368

Fields that are None, REQUIRED or empty text by default and were left so are not printed.
"""

import ast
import contextlib
import dataclasses
import enum
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moelib.core import config_values
from moelib.core.config_base import ConfigBase, config_origin
from moelib.core.config_build import (
    Configurable,
    _FunctionConfig,
    config_for_class,
    config_for_function,
)
from moelib.core.config_path import (
    Key,
    child_at,
    children,
    get,
    join_path,
    set_at,
    split_front,
    split_path,
)
from moelib.core.config_values import REQUIRED, InvalidConfigValueError

_REFERENCE = re.compile(r"[\w.]+:[\w.]+")


# -- Values from text ----------------------------------------------------------------------------


def set_from_text(cfg: ConfigBase, assignment: str, *, flag: str = "--set") -> None:
    """Carries out "path=value", where the value is read as the field's annotation asks.

    Raises:
        UnknownFieldError: If the path leads nowhere.
        InvalidConfigValueError: If the text cannot be read as a value of the field.
    """
    place = f"{flag} {assignment}"
    path, equals, text = (part.strip() for part in assignment.partition("="))
    if not equals:
        raise InvalidConfigValueError(f"{place}: expected path=value.")
    *parents, key = split_path(path) or [""]
    holder = get(cfg, parents)
    current = child_at(holder, key, parents)
    annotation = holder.annotation(str(key)) if isinstance(holder, ConfigBase) else Any
    value = _read_as(text, annotation, current, place)
    try:
        with config_origin(place):
            set_at(cfg, path, value)
    except TypeError as error:
        raise InvalidConfigValueError(f"{place}: {error}") from None


def _read_as(text: str, annotation: Any, current: Any, place: str) -> Any:
    """Returns the first reading of `text` that fits the annotation.

    Where there is no annotation, words without quotes are a string only in place of another.
    """
    for reading in _readings(text):
        if reading is text and annotation is Any and not isinstance(current, str | _UNSET):
            continue
        for value in _variants(reading, annotation):
            if config_values.fits(value, annotation):
                return value
    if _REFERENCE.fullmatch(text):
        try:
            config_values.resolve_reference(text)
        except ValueError as error:
            raise InvalidConfigValueError(f"{place}: {error}") from None
    wanted = config_values.describe_annotation(annotation)
    wanted = f"a value like {current!r}" if annotation is Any else wanted
    named = config_values.named_values(annotation)
    advice = f"; {config_values.did_you_mean(text, named)}" if named else "."
    raise InvalidConfigValueError(f"{place}: {text!r} is not {wanted}{advice}")


_UNSET = type(None) | config_values.RequiredFieldValue


def _readings(text: str) -> Iterator[Any]:
    """Yields what a text may mean, the likeliest first, itself last."""
    if text.lower() in ("true", "false", "none"):
        yield {"true": True, "false": False, "none": None}[text.lower()]
    with contextlib.suppress(ValueError):
        yield read_literal(text)
    if _REFERENCE.fullmatch(text):
        with contextlib.suppress(ValueError):
            yield config_values.resolve_reference(text)
    yield text


def _variants(value: Any, annotation: Any) -> Iterator[Any]:
    """Yields a value and what else may be meant by it in a field of that annotation."""
    if inspect.isclass(value) and issubclass(value, Configurable):
        yield value.default_config()
    with contextlib.suppress(InvalidConfigValueError):
        yield config_values.convert_value(value, annotation)
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list | tuple):
        yield tuple(value) if isinstance(value, list) else list(value)
    elif isinstance(value, str):
        for option in config_values.options(annotation):
            if isinstance(option, type) and issubclass(option, enum.Enum):
                yield from (m for m in option if value.lower() in (m.name.lower(), str(m.value)))
    elif inspect.isclass(value):
        yield config_for_class(value)
    elif callable(value):
        yield config_for_function(value)


# -- Text ----------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a config's text. `opens` says that it is a container, whose elements follow."""

    path: str
    text: str
    value: Any
    origin: str
    opens: bool


def _is_plain(value: Any) -> bool:
    """Returns whether a value prints as one literal."""
    if config_values.is_record(value) or isinstance(value, enum.Enum):
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, type(None) | bool | int | float | str | bytes)


def literal(value: Any) -> str:
    """Returns the text of a leaf; `read_literal` gives the value back."""
    match value:
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case tuple():
            return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
        case set() | frozenset():
            inside = ", ".join(sorted(map(literal, value)))  # Sets have no order of their own.
            return f"{type(value).__name__}([{inside}])"
        case dict():
            return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
        case re.Pattern():
            return f"re.compile({value.pattern!r}, {value.flags})"
    if isinstance(value, np.dtype) and value.fields is None:
        return f"dtype({value.name!r})"  # NumPy prints those of ml_dtypes without quotes.
    if value is REQUIRED or _is_plain(value) or isinstance(value, np.dtype):
        return repr(value)
    return config_values.reference(value)


def _header(value: Any) -> tuple[str, Any] | None:
    """Returns what opens a value with others inside: (name of the line, what is printed there)."""
    if isinstance(value, _FunctionConfig):
        return ("cls" if isinstance(value.callee, type) else "fn"), value.callee
    if isinstance(value, Configurable.Config):
        return "klass", value.klass
    if isinstance(value, ConfigBase):
        return "config_class", type(value)
    if config_values.is_record(value):
        return "", type(value)
    return ("", type(value)) if isinstance(value, list | tuple | dict) else None


def _lines(
    value: Any, keys: tuple[Key, ...] = (), origin: str = "", *, unset: bool = True
) -> Iterator[Line]:
    """Yields the lines of a value that was set at `origin`, with or without unset fields."""
    if _is_plain(value) or (header := _header(value)) is None:
        yield Line(join_path(keys), literal(value), value, origin, False)
        return
    name, shown = header
    if name:
        opens = name == "config_class"
        yield Line(join_path((*keys, name)), literal(shown), shown, origin, opens)
    else:
        builtin = shown in (list, tuple, dict)
        text = shown.__name__ if builtin else config_values.reference(shown)
        yield Line(join_path(keys), f"<{text}>", value, origin, True)
    for key, child in children(value):
        if isinstance(value, ConfigBase):
            if key == name or not (unset or _is_set(value, str(key), child)):
                continue
            origin = value.origin(str(key))
        yield from _lines(child, (*keys, key), origin, unset=unset)


def _is_set(cfg: ConfigBase, name: str, value: Any) -> bool:
    """Returns whether a field must be printed: others get their value again from the class."""
    is_default = cfg._all_fields()[name].default is value
    if isinstance(cfg, _FunctionConfig) and is_default and not _is_plain(value):
        return config_values.has_reference(value)  # Else an object that has no text.
    is_empty = value is None or value is REQUIRED or (isinstance(value, str) and not value)
    return not (is_default and is_empty)


def leaves(cfg: ConfigBase) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of every value that holds no other; of lists, each element."""
    return ((line.path, line.value) for line in _lines(cfg) if not line.opens)


def origins(cfg: ConfigBase) -> Iterator[tuple[str, str, str]]:
    """Yields (path, text, where it was set) of every leaf."""
    return ((line.path, line.text, line.origin) for line in _lines(cfg) if not line.opens)


def to_text(cfg: ConfigBase) -> str:
    """Returns a config as text: lines `path: literal`, in the order of the fields."""
    return "".join(f"{line.path}: {line.text}\n" for line in _lines(cfg, unset=False))


def diff(a: ConfigBase, b: ConfigBase) -> list[tuple[str, str | None, str | None]]:
    """Returns (path, text in a, text in b) of every line that differs; None where it is absent."""
    lines_a, lines_b = ({x.path: x.text for x in _lines(c, unset=False)} for c in (a, b))
    paths = [*lines_a, *(path for path in lines_b if path not in lines_a)]
    pairs = ((path, lines_a.get(path), lines_b.get(path)) for path in paths)
    return [(path, in_a, in_b) for path, in_a, in_b in pairs if in_a != in_b]


# -- Reading text --------------------------------------------------------------------------------


def read_literal(text: str) -> Any:
    """Returns the value of a literal. Raises ValueError if it is none."""
    try:
        return _read_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        raise ValueError(f"{text!r} is not a literal.") from None


_NAMES = {"REQUIRED": REQUIRED, "nan": math.nan, "inf": math.inf}
_CALLS = {
    "set": set,
    "frozenset": frozenset,
    "dtype": config_values.dtype,
    "re.compile": re.compile,
}


def _read_node(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_read_node(operand)
        case ast.List(elts=elements):
            return list(map(_read_node, elements))
        case ast.Tuple(elts=elements):
            return tuple(map(_read_node, elements))
        case ast.Set(elts=elements):
            return set(map(_read_node, elements))
        case ast.Dict(keys=keys, values=values):
            return {_read_node(k): _read_node(v) for k, v in zip(keys, values, strict=True) if k}
        case ast.Call(func=func, args=args) if (name := ast.unparse(func)) in _CALLS:
            return _CALLS[name](*map(_read_node, args))
    raise ValueError("not a literal")


@dataclasses.dataclass
class _Node:
    """The lines of a text below one path."""

    place: str  # Of the first line.
    text: str | None = None
    inside: dict[Key, "_Node"] = dataclasses.field(default_factory=dict)


def parse(text: str, *, place: str = "line ") -> Any:
    """Returns the config that `to_text` printed.

    Args:
        text: What it printed; empty lines and those that start with # are left out.
        place: Where it stands, for errors and origins, such as "config.txt:"; the number of
            the line comes after it.

    Raises:
        ValueError: If a line cannot be read; the message holds its number.
    """
    root = _Node(f"{place}1")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        keys, rest = split_front(line)
        if not keys or not rest.startswith(": "):
            raise ValueError(f"{place}{number}: expected 'path: value', got {line!r}.")
        node = root
        for key in keys:
            node = node.inside.setdefault(key, _Node(f"{place}{number}"))
        node.text = rest[2:]
    return _build(root)


_OPENERS: dict[str, Callable[[Any], ConfigBase]] = {
    "klass": lambda value: value.default_config(),
    "config_class": lambda value: value(),
    "fn": config_for_function,
    "cls": config_for_class,
}


def _build(node: _Node) -> Any:
    """Returns the value that the lines of a node describe."""
    if node.text is not None:
        inside = {key: _build(child) for key, child in node.inside.items()}
        return _at(node, _read_line, node.text, inside)
    opener = next((name for name in _OPENERS if name in node.inside), None)
    if opener is None:
        raise ValueError(f"{node.place}: no line before it says what holds this value.")
    cfg = _at(node, _OPENERS[opener], _build(node.inside.pop(opener)))
    for key, child in node.inside.items():
        _at(child, setattr, cfg, str(key), _build(child))
    return cfg


def _at(node: _Node, do: Callable[..., Any], *args: Any) -> Any:
    """Returns `do(*args)`; an error says which line it comes from, and so do values set."""
    try:
        with config_origin(node.place):
            return do(*args)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{node.place}: {error}") from error


def _read_line(text: str, inside: dict[Key, Any]) -> Any:
    if text in ("<list>", "<tuple>"):
        return (list if text == "<list>" else tuple)(inside.values())
    if text == "<dict>":
        return inside
    if text.startswith("<") and text.endswith(">"):
        return config_values.resolve_reference(text[1:-1])(**inside)
    if _REFERENCE.fullmatch(text):
        return config_values.resolve_reference(text)
    if re.fullmatch(r"[\w.]+:[\w.<>]+", text):
        raise ValueError(f"{text} was defined inside a function; text cannot name it.")
    return read_literal(text)
