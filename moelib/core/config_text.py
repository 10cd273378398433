"""Text of configs: paths such as "model.layers[0].dim", and writing and reading of values.

A config prints as lines `path: literal`. Functions, classes and enum members print as
`module:qualname`; a container that holds configs prints its kind, then its elements:

    klass: moelib.models.causal_lm:CausalLM
    decoder.first_layers: <list>
    decoder.first_layers[0].klass: moelib.layers.transformer:TransformerLayer
    decoder.first_layers[0].hidden_dim: 1368

`parse` reads a whole config back; `set_from_text` reads the value of a flag by its annotation.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import math
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moelib.core import config_types, trusted_code
from moelib.core.config_types import (
    REQUIRED,
    InvalidConfigValueError,
    RequiredFieldValue,
    UnknownFieldError,
    children,
    cut,
    did_you_mean,
    is_config,
    is_record,
    shortened,
)
from moelib.core.errors import UserError

Key = str | int
_NAME = r"[^.\[\]'\":\s\\]+"
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_TOKEN = re.compile(rf"\.?({_NAME})|\[(-?\d+|{_QUOTED})\]")


# -- Paths ---------------------------------------------------------------------------------------


def split_path(path: str | Sequence[Key]) -> list[Key]:
    """Returns the keys of `a.b[0]['c.d']`: names as str, indices as int."""
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
            raise UnknownFieldError(f"{cut(text)!r}: {error}") from None
        end = match.end()
    return keys, text[end:]


def _index(text: str) -> Key:
    """Returns the key in the brackets of a path: a number, or a quoted name."""
    if text[0] not in "'\"":
        return int(text)
    with warnings.catch_warnings(action="ignore"):  # Unknown escapes.
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
        whole = f"; set the whole: {where}={{{str(key)!r}: ...}}" if isinstance(value, dict) else ""
        raise UnknownFieldError(
            f"{where} is {value!r}: it has nothing inside; no {key!r} there{whole}."
        )
    raise UnknownFieldError(f"{where} has no {key!r}; {near(value, str(key), parents)}")


def near(value: Any, name: str, parents: Sequence[Key] = ()) -> str:
    """Returns the end of an error about an unknown name: the paths or names like it."""
    if deeper := _deeper(value, name, parents):
        return f"did you mean {' or '.join(map(repr, deeper))}?"
    return did_you_mean(name, (str(key) for key, _ in children(value)))


_LONG_NAMES = {"lr": "learning_rate"}  # Of fields that other tools abbreviate.


def _deeper(value: Any, name: str, parents: Sequence[Key]) -> list[str]:
    """Returns up to three paths below `value` to fields of this name, or whose names end with it.

    Those of the name itself come first, and then the least deep.
    """
    found: list[tuple[bool, int, str]] = []

    def walk(value: Any, keys: list[Key]) -> None:
        for key, child in children(value):
            if key in (name, _LONG_NAMES.get(name)) or str(key).endswith(f"_{name}"):
                found.append((key != name, len(keys), join_path([*keys, key])))
            walk(child, [*keys, key])

    walk(value, [*parents])
    return [path for _, _, path in sorted(found)[:3]]


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


# -- Writing -------------------------------------------------------------------------------------


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
    if isinstance(value, _HOLDERS):
        return all(is_plain(element) for _, element in children(value))
    return isinstance(value, type(None) | bool | int | float | str | bytes)


def literal(value: Any) -> str:
    """Returns the text of a value without configs; `read_literal` reads it back."""
    match value:
        case list():
            return f"[{', '.join(map(literal, value))}]"
        case tuple():
            return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
        case dict():
            return f"{{{', '.join(f'{literal(k)}: {literal(v)}' for k, v in value.items())}}}"
        case np.generic():  # np.float64 is a float whose repr is no literal.
            return literal(value.item())
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


# -- Where a value was set -----------------------------------------------------------------------

_origin: ContextVar[str | None] = ContextVar("moelib_config_origin", default=None)


@contextlib.contextmanager
def config_origin(origin: str) -> Iterator[None]:
    """Records `origin`, such as "--set learner.lr=3", as the origin of values set in the block."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def current_origin() -> str | None:
    """Returns the origin that a block around this call records, if there is one."""
    return _origin.get()


# -- Reading of literals and names ---------------------------------------------------------------

_LITERAL_ERRORS = (SyntaxError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError)
_NAMES = {"REQUIRED": REQUIRED, "nan": math.nan, "inf": math.inf}


def read_literal(text: str) -> Any:
    """Returns the value of a literal. Raises ValueError if the text is not a literal."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Unknown escapes.
            return _read_node(ast.parse(text.strip(), mode="eval").body)
    except _LITERAL_ERRORS:
        raise ValueError(f"{shortened(text)} is not a literal.") from None


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
    raise ValueError("not a literal")


_config_of: list[Callable[[Any], Any]] = []


def makes_configs(config_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Registers the function that returns the config of a class or function named in a text."""
    _config_of[:] = [config_of]
    return config_of


# -- Reading of flags ----------------------------------------------------------------------------

_REFERENCE = re.compile(r"\w+(?:\.\w+)*:\w+(?:\.\w+)*")
_WORDS = {"true": True, "false": False, "none": None}


def set_from_text(cfg: Any, assignment: str, *, flag: str = "--set") -> None:
    """Sets a field from "path=value", whose value is read by the field's annotation.

    A new name in a dict of configs is set to a class, as in "evalers.test=module:Class".

    Raises:
        UnknownFieldError: If nothing has the path.
        InvalidConfigValueError: If the text cannot be read as a value of the field.
    """
    origin = f"{flag} {cut(assignment)}"
    path, equals, text = (part.strip() for part in assignment.partition("="))
    if not equals:
        raise InvalidConfigValueError(f"{origin}: expected path=value.")
    *parents, key = split_path(path) or [""]
    holder = get(cfg, parents)
    annotation = _annotation_at(cfg, [*parents, key])
    is_new = isinstance(holder, dict) and key not in holder and _REFERENCE.fullmatch(text)
    is_new = is_new and config_types.is_config_class(annotation)
    current = None if is_new else child_at(holder, key, parents)
    if config_types.is_secret(annotation):  # No message shows the text.
        origin = f"{flag} {path}"
    try:
        value = _read(text, annotation, current)
        with config_origin(origin):
            if is_new:
                set_at(cfg, parents, {**holder, key: value})
            else:
                set_at(cfg, path, value)
    except (TypeError, UserError) as error:
        raise InvalidConfigValueError(f"{origin}: {error}") from None


def _annotation_at(cfg: Any, keys: Sequence[Key]) -> Any:
    """Returns the annotation of the field at a path, or of the element of a field."""
    holder, annotation = cfg, Any
    for depth, key in enumerate(keys):
        if is_config(holder):
            annotation = holder.annotation(str(key)) if key in holder else Any
        else:
            annotation = _annotation_of_element(annotation, holder, key)
        if depth < len(keys) - 1:
            holder = child_at(holder, key, keys[:depth])
    return annotation


def _annotation_of_element(annotation: Any, holder: Any, key: Key) -> Any:
    for option in config_types.options(annotation):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if isinstance(origin, type) and isinstance(holder, origin):
            if isinstance(holder, dict):
                return args[1]
            fixed = origin is tuple and args[-1] is not Ellipsis
            return args[int(key)] if fixed and int(key) < len(args) else args[0]
    return Any


def _read(text: str, annotation: Any, current: Any) -> Any:
    """Returns the value of a text, as the first member of the annotation that reads it.

    "None" is None where the annotation allows it. Strings come last, since they take any text.
    """
    kinds = [kind for kind in config_types.options(annotation) if kind is not RequiredFieldValue]
    if Any in kinds or isinstance(annotation, str | TypeVar):
        return _read_without_annotation(text, current)
    if text == "REQUIRED" or (text == "None" and type(None) in kinds):
        return _value(text)
    reasons: list[Exception] = []
    for kind in sorted(kinds, key=lambda kind: kind is str):
        try:
            return _read_as(text, config_types.without_limits(kind))
        except (TypeError, UserError) as error:
            reasons.append(error)
        except ValueError:
            pass
    if reasons:
        raise reasons[0]
    wanted = config_types.describe_annotation(annotation)
    advice = config_types.advice(annotation, text)
    raise InvalidConfigValueError(f"{shortened(text)} is not {wanted}{advice}")


def _read_as(text: str, kind: Any) -> Any:
    """Returns the value of a text as one kind, no union. Raises ValueError if it has none."""
    origin = typing.get_origin(kind) or kind
    named = config_types.named_values(kind)
    if isinstance(kind, enum.EnumType):  # Members by name in any case, or by value.
        by_value = {str(member.value): member for member in kind}
        named = by_value | {name.lower(): member for name, member in named.items()}
    word = _unquoted(text) if named else text
    if (found := named.get(word, named.get(word.lower(), named))) is not named:
        return found
    if origin is str:
        return _unquoted(text)
    if convert := getattr(origin, "__config_convert__", None):
        is_name = _REFERENCE.fullmatch(text) and not config_types.is_secret(kind)
        return convert(config_types.resolve_reference(text) if is_name else _unquoted(text))
    value = _value(text)
    if config_types.is_config_class(origin) and callable(value):
        value = _config_of[0](value)
    elif origin is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        value = origin(value)
    elif origin is Callable and hasattr(value, "default_config"):
        raise ValueError("A class with a config is set as its config.")
    if not config_types.fits(value, kind):
        raise ValueError("The text is a value of another kind.")
    return value


def _read_without_annotation(text: str, current: Any) -> Any:
    """Returns the value of a text in a field of any type, by the kind of its current value.

    Words without quotes are a string only where the current value is one, or unset; a function or
    class becomes a config where the current value is one.
    """
    try:
        value = _value(text)
    except ValueError as error:
        if isinstance(current, str | None) or current is REQUIRED:
            return text
        if isinstance(error, UserError):
            raise
        wanted = f"a value like {current!r}"
        raise InvalidConfigValueError(f"{shortened(text)} is not {wanted}.") from None
    if hasattr(value, "default_config") or (is_config(current) and callable(value)):
        return _config_of[0](value)
    return value


def _value(text: str) -> Any:
    """Returns the value of a text that is True, False, None, a literal or a name."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    return (
        config_types.resolve_reference(text) if _REFERENCE.fullmatch(text) else read_literal(text)
    )


def _unquoted(text: str) -> str:
    """Returns the string whose literal a text is, otherwise the text itself."""
    with contextlib.suppress(ValueError):
        value = read_literal(text)
        return value if isinstance(value, str) else text
    return text


# -- Reading of whole configs --------------------------------------------------------------------


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
        _check_names(text, source, resolve)
    root = _Node(f"{source}1")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        keys, rest = _at(_Node(f"{source}{number}"), split_front, line)
        if not keys or not rest.startswith(": "):
            raise UserError(f"{source}{number}: expected 'path: value', got {shortened(line)}.")
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


def _check_names(text: str, source: str, resolve: Callable[[str], Any]) -> None:
    """Raises UntrustedNameError for the first name of a text that it may not have.

    Other errors, also in lines before, are raised when the text is read.
    """
    for number, line in enumerate(text.splitlines(), 1):
        with contextlib.suppress(UnknownFieldError):
            keys, rest = split_front(line)
            if not (name := _named(rest.removeprefix(": "))):
                continue
            try:
                _at(_Node(f"{source}{number}", path=join_path(keys)), resolve, name)
            except UserError as error:
                if type(error) is trusted_code.UntrustedNameError:  # The module exists.
                    raise


def _named(text: str) -> str:
    """Returns the name of a class, function or enum member that a line's text is; "" if none."""
    if text in ("<list>", "<tuple>", "<dict>"):
        return ""
    found = re.fullmatch(r"<(.*)>|[\w.]+:[\w.<>]+", text)
    return "" if found is None else found[1] or text


_HEADERS = ("klass", "config_class", "fn", "cls")


def _config_from(header: str, value: Any) -> Any:
    """Returns a new config of the class or function that its first line names."""
    cfg = _config_of[0](value)
    if cfg._header()[0] != header:
        raise TypeError(f"{value!r} is described by {cfg._header()[0]!r}, not by {header!r}.")
    return cfg


def _build(node: _Node, resolve: Callable[[str], Any]) -> Any:
    """Returns the value that the lines of a node describe."""
    if node.text is not None:
        if node.inside and not node.text.startswith("<"):
            raise UserError(
                f"{next(iter(node.inside.values())).origin}: {node.origin} sets what this line is "
                f"in to {shortened(node.text)}; keep one of the lines."
            )
        inside = {key: _build(child, resolve) for key, child in node.inside.items()}
        return _at(node, _read_line, node.text, inside, resolve)
    header = next((name for name in _HEADERS if name in node.inside), None)
    if header is None:
        raise UserError(f"{node.origin}: no earlier line names the class or container it is in.")
    value = _build(node.inside.pop(header), resolve)
    cfg = _at(node, _config_from, header, value)
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
    if not (name := _named(text)):
        return read_literal(text)
    value = resolve(name)
    if name == text:
        return value
    if not config_types.is_record_class(value):
        raise ValueError(f"{text}: {value!r} is neither a dataclass nor a named tuple.")
    return value(**inside)
