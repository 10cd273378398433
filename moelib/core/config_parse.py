"""Parsing of configs: a whole config from its text, and single values from flags."""

import ast
import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moelib.core import config_types, trusted_code
from moelib.core.config import (
    ConfigBase,
    Configurable,
    InvalidConfigClassError,
    config_for_class,
    config_for_function,
    config_origin,
)
from moelib.core.config_paths import (
    Key,
    child_at,
    get,
    join_path,
    set_at,
    split_front,
    split_path,
)
from moelib.core.config_types import REQUIRED, InvalidConfigValueError
from moelib.core.errors import UserError

_REFERENCE = re.compile(r"\w+(?:\.\w+)*:\w+(?:\.\w+)*")


# -- Flags ---------------------------------------------------------------------------------------


def set_from_text(cfg: ConfigBase, assignment: str, *, flag: str = "--set") -> None:
    """Sets a field from "path=value", whose value is parsed according to the field's annotation.

    A new name in a dict of configs is set to a class, as in "evalers.test=module:Class".

    Raises:
        UnknownFieldError: If nothing has the path.
        InvalidConfigValueError: If the text cannot be parsed as a value of the field.
    """
    origin = f"{flag} {config_types.cut(assignment)}"
    path, equals, text = (part.strip() for part in assignment.partition("="))
    if not equals:
        raise InvalidConfigValueError(f"{origin}: expected path=value.")
    *parents, key = split_path(path) or [""]
    holder = get(cfg, parents)
    kind = _class_of_elements(cfg, parents)
    if kind and key not in holder and _REFERENCE.fullmatch(text):
        path, value = join_path(parents), {**holder, key: _read_as(text, kind, None, origin)}
    else:
        current = child_at(holder, key, parents)
        annotation = holder.annotation(str(key)) if isinstance(holder, ConfigBase) else Any
        if config_types.is_secret(annotation):  # No message shows the text.
            origin, value = f"{flag} {path}", None if text == "None" else text
        else:
            value = _read_as(text, annotation, current, origin)
    try:
        with config_origin(origin):
            set_at(cfg, path, value)
    except TypeError as error:
        raise InvalidConfigValueError(f"{origin}: {error}") from None


def _class_of_elements(cfg: ConfigBase, path: list[Key]) -> Any:
    """Returns the class of the configs in the field at `path`, a dict by name; else None."""
    owner = get(cfg, path[:-1])
    if not path or not isinstance(owner, ConfigBase) or not isinstance(get(cfg, path), dict):
        return None
    _, kind, *_ = *typing.get_args(owner.annotation(str(path[-1]))), None, None
    return kind if isinstance(kind, type) and issubclass(kind, ConfigBase) else None


def _read_as(text: str, annotation: Any, current: Any, origin: str) -> Any:
    """Returns the first reading of `text` that fits the annotation.

    Without an annotation, words without quotes are a string only where the current value is one,
    and a function or class becomes a config where the current value is one.
    """
    in_config = annotation is Any and isinstance(current, ConfigBase)
    for reading in _readings(text, annotation):
        if reading is text and annotation is Any and not isinstance(current, str | _UNSET):
            continue
        for value in _variants(reading, annotation):
            if in_config and callable(value):
                continue
            if config_types.fits(value, annotation):
                return value
    if _REFERENCE.fullmatch(text):
        try:
            config_types.resolve_reference(text)
        except ValueError as error:
            raise InvalidConfigValueError(f"{origin}: {error}") from None
    try:
        config_types.convert_value(text, annotation)
    except InvalidConfigValueError as error:  # It names the nearest dtype.
        raise InvalidConfigValueError(f"{origin}: {error}") from None
    wanted = config_types.describe_annotation(annotation)
    wanted = f"a value like {current!r}" if annotation is Any else wanted
    advice = config_types.advice(annotation, text)
    raise InvalidConfigValueError(
        f"{origin}: {config_types.shortened(text)} is not {wanted}{advice}"
    )


_UNSET = type(None) | config_types.RequiredFieldValue


def _readings(text: str, annotation: Any) -> Iterator[Any]:
    """Yields the values that a text may mean, the likeliest first, the text itself last.

    Where an enum has a member NONE, only "None" means None.
    """
    words = {"true": True, "false": False, "none": None}
    if any("NONE" in getattr(x, "__members__", ()) for x in config_types.options(annotation)):
        words = {"none": None} if text == "None" else {}
    if text.lower() in words:
        yield words[text.lower()]
    with contextlib.suppress(ValueError):
        yield read_literal(text)
    if _REFERENCE.fullmatch(text):
        with contextlib.suppress(ValueError):
            yield config_types.resolve_reference(text)
    yield text


def _variants(value: Any, annotation: Any) -> Iterator[Any]:
    """Yields a value and others that it may mean in a field of that annotation."""
    if inspect.isclass(value) and issubclass(value, Configurable):
        yield value.default_config()
    with contextlib.suppress(InvalidConfigValueError):
        yield config_types.convert_value(value, annotation)
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list | tuple):
        yield tuple(value) if isinstance(value, list) else list(value)
    elif isinstance(value, str):
        for option in config_types.options(annotation):
            if isinstance(option, type) and issubclass(option, enum.Enum):
                yield from (m for m in option if value.lower() in (m.name.lower(), str(m.value)))
    elif callable(value):
        with contextlib.suppress(InvalidConfigClassError):  # It has no signature, for example.
            yield config_for_class(value) if inspect.isclass(value) else config_for_function(value)


# -- Whole configs -------------------------------------------------------------------------------


_LITERAL_ERRORS = (SyntaxError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError)


def read_literal(text: str) -> Any:
    """Returns the value of a literal. Raises ValueError if the text is not a literal."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Of unknown escapes.
            return _read_node(ast.parse(text.strip(), mode="eval").body)
    except _LITERAL_ERRORS:
        raise ValueError(f"{config_types.shortened(text)} is not a literal.") from None


_NAMES = {"REQUIRED": REQUIRED, "nan": math.nan, "inf": math.inf}


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
        case ast.Dict(keys=keys, values=values):
            found = {_read_node(k): _read_node(v) for k, v in zip(keys, values, strict=True) if k}
            if len(found) == len(keys):
                return found
        case ast.Call(func=ast.Name(id="dtype"), args=[name], keywords=[]):
            return config_types.dtype(_read_node(name))
    raise ValueError("not a literal")


@dataclasses.dataclass
class _Node:
    """The lines of a text below one path."""

    origin: str  # File and number of the first line.
    text: str | None = None
    path: str = ""  # Path in a line with a text.
    inside: dict[Key, "_Node"] = dataclasses.field(default_factory=dict)


def parse(
    text: str,
    *,
    source: str = "line ",
    names: Mapping[str, Any] | None = None,
    trusted: bool = False,
) -> Any:
    """Returns the config that `to_text` printed.

    Args:
        text: The text; empty lines and lines that start with # are ignored.
        source: Prefix of the line number in errors and origins, such as "config.txt:".
        names: Classes and functions that it may name besides those of `trusted_code`, by name.
        trusted: Whether it may name all code that can be imported: this user has just written it.

    Raises:
        UntrustedNameError: If it names code that it may not name, which is not imported.
        UserError: If a line cannot be parsed; the message has its number.
    """
    resolve = config_types.resolve_reference
    if not trusted:
        resolve = functools.partial(trusted_code.resolve, names=names or {})
    root = _Node(f"{source}1")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        keys, rest = _at(_Node(f"{source}{number}"), split_front, line)
        if not keys or not rest.startswith(": "):
            raise UserError(
                f"{source}{number}: expected 'path: value', got {config_types.shortened(line)}."
            )
        node = root
        for key in keys:
            node = node.inside.setdefault(key, _Node(f"{source}{number}"))
        if node.text is not None:
            raise UserError(f"{source}{number}: {node.origin} has set this path already; keep one.")
        node.text, node.origin, node.path = rest[2:], f"{source}{number}", join_path(keys)
    try:
        return _build(root, resolve)
    except RecursionError:
        raise UserError(f"{root.origin}: the values are nested too deeply.") from None


def _default_config(value: Any, kind: type) -> Any:
    """Returns the default config of a class, a subclass of `kind`."""
    if not (isinstance(value, type) and issubclass(value, kind)):
        raise TypeError(f"{value!r} is not a {kind.__qualname__}.")
    return value.default_config() if issubclass(value, Configurable) else value()


_OPENERS: dict[str, Callable[[Any], ConfigBase]] = {
    "klass": functools.partial(_default_config, kind=Configurable),
    "config_class": functools.partial(_default_config, kind=ConfigBase),
    "fn": config_for_function,
    "cls": config_for_class,
}


def _build(node: _Node, resolve: Callable[[str], Any]) -> Any:
    """Returns the value that the lines of a node describe."""
    if node.text is not None:
        if node.inside and not node.text.startswith("<"):
            raise UserError(
                f"{next(iter(node.inside.values())).origin}: {node.origin} sets what this line is "
                f"in to {config_types.shortened(node.text)}; keep one of the lines."
            )
        inside = {key: _build(child, resolve) for key, child in node.inside.items()}
        return _at(node, _read_line, node.text, inside, resolve)
    opener = next((name for name in _OPENERS if name in node.inside), None)
    if opener is None:
        raise UserError(f"{node.origin}: no earlier line names the class or container it is in.")
    owner = _build(node.inside.pop(opener), resolve)
    cfg = _at(node, _OPENERS[opener], owner)
    for key, child in node.inside.items():
        _at(child, setattr, cfg, str(key), _build(child, resolve))
    return cfg


def _at(node: _Node, do: Callable[..., Any], *args: Any) -> Any:
    """Returns `do(*args)`; errors and origins of values refer to the node's line."""
    where = f"{node.origin}: {node.path}" if node.path else node.origin
    try:
        with config_origin(node.origin):
            return do(*args)
    except trusted_code.UntrustedNameError as error:
        raise type(error)(f"{where}: {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error


def _read_line(text: str, inside: dict[Key, Any], resolve: Callable[[str], Any]) -> Any:
    if text in ("<list>", "<tuple>"):
        if list(inside) != list(range(len(inside))):
            raise ValueError(f"{text} has the elements {[*inside]}; number them from 0, in order.")
        return (list if text == "<list>" else tuple)(inside.values())
    if text == "<dict>":
        return inside
    if text.startswith("<") and text.endswith(">"):
        record = resolve(text[1:-1])
        if not config_types.is_record_class(record):
            raise ValueError(f"{text}: {record!r} is neither a dataclass nor a named tuple.")
        return record(**inside)
    if re.fullmatch(r"[\w.]+:[\w.<>]+", text):
        return resolve(text)
    return read_literal(text)
