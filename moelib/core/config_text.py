"""Configs as text and by path: read, write, print, parse back, compare and explain.

A config prints a line a value, `path: literal`. Functions, classes and enum members print as
`module:qualname`; a container that holds configs prints its kind, then its elements:

    klass: moelib.models.causal_lm:CausalLM
    decoder.first_layers: <list>
    decoder.first_layers[0].klass: moelib.layers.transformer:TransformerLayer
    decoder.first_layers[0].hidden_dim: 1368
"""

import ast
import enum
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moelib.core import config_values
from moelib.core.config import (
    REQUIRED,
    ConfigBase,
    Configurable,
    InvalidConfigValueError,
    UnknownFieldError,
    _FunctionConfig,
    config_for_class,
    config_for_function,
    config_origin,
    did_you_mean,
)

Key = str | int
_PLAIN = (type(None), bool, int, float, str, bytes)
_TOKEN = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\['([^']*)'\]|\[\"([^\"]*)\"\]")


# -- Paths ---------------------------------------------------------------------------------------


def split_path(path: str | Sequence[str]) -> list[Key]:
    """Returns the keys of "a.b[0]['c.d']": names as str, indices as int."""
    if not isinstance(path, str):
        return [key for part in path for key in split_path(part)]
    keys: list[Key] = []
    end = 0
    while end < len(path):
        match = _TOKEN.match(path, end)
        if match is None:
            raise UnknownFieldError(f"{path!r} is not a path such as a.b[0].c.")
        name, index, *quoted = match.groups()
        keys.append(int(index) if index is not None else name or quoted[0] or quoted[1] or "")
        end = match.end()
    return keys


def join_path(keys: Sequence[Key]) -> str:
    """Returns the path of the keys, as `split_path` reads it."""
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        elif re.fullmatch(r"[^.\[\]'\"]+", key):
            path += f".{key}" if path else key
        else:
            path += f"[{key!r}]"
    return path


def get(cfg: ConfigBase, path: str | Sequence[str]) -> Any:
    """Returns the value at a path. Raises UnknownFieldError with the nearest names."""
    value: Any = cfg
    keys = split_path(path)
    for depth, key in enumerate(keys):
        value = _child(value, key, keys[:depth])
    return value


def _child(value: Any, key: Key, parents: Sequence[Key]) -> Any:
    children = dict(_children(value))
    if isinstance(value, list | tuple) and isinstance(key, str) and key.isdigit():
        key = int(key)
    if key in children:
        return children[key]
    where = join_path(parents) or "the config"
    if not children:
        raise UnknownFieldError(f"{where} is {value!r}: it has nothing inside; no {key!r} there.")
    raise UnknownFieldError(f"{where} has no {key!r}; {did_you_mean(str(key), map(str, children))}")


def _children(value: Any) -> list[tuple[Key, Any]]:
    """Returns what is directly inside a value, by key."""
    if isinstance(value, ConfigBase):
        return list(value.items())
    if config_values.is_record(value):
        return list(config_values.record_fields(value).items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return list(value.items()) if isinstance(value, dict) else []


def set_at(cfg: ConfigBase, path: str | Sequence[str], value: Any) -> None:
    """Sets the value at a path; what holds it is checked as on any assignment."""
    keys = split_path(path)
    if not keys:
        raise UnknownFieldError("the path is empty; name a field.")
    holder = get(cfg, [join_path([key]) for key in keys[:-1]])
    key = keys[-1]
    if isinstance(holder, ConfigBase):
        setattr(holder, str(key), value)
    elif isinstance(holder, dict):
        _child(holder, key, keys[:-1])
        set_at(cfg, join_path(keys[:-1]), {**holder, key: value})
    else:
        _child(holder, key, keys[:-1])
        changed = [value if str(k) == str(key) else v for k, v in _children(holder)]
        is_tuple = hasattr(holder, "_fields") or config_values.is_record(holder)
        set_at(cfg, join_path(keys[:-1]), type(holder)(*changed) if is_tuple else type(holder)(changed))


def set_from_text(cfg: ConfigBase, assignment: str, *, flag: str = "--set") -> None:
    """Carries out "path=value", where the value is read as the field's annotation asks.

    Raises:
        UnknownFieldError: If the path leads nowhere.
        InvalidConfigValueError: If the text cannot be read as a value of the field.
    """
    path, equals, text = assignment.partition("=")
    if not equals:
        raise InvalidConfigValueError(f"{flag} {assignment}: expected path=value.")
    path, text = path.strip(), text.strip()
    get(cfg, path)
    keys = split_path(path)
    holder = get(cfg, [join_path([key]) for key in keys[:-1]])
    annotation = holder.annotation(str(keys[-1])) if isinstance(holder, ConfigBase) else Any
    current = _child(holder, keys[-1], keys[:-1])
    with config_origin(f"{flag} {assignment}"):
        set_at(cfg, path, _read_as(text, annotation, current, f"{flag} {assignment}"))


def _read_as(text: str, annotation: Any, current: Any, place: str) -> Any:
    """Returns the first reading of `text` that fits the annotation."""
    for reading in _readings(text, annotation):
        reading = config_values.convert_value(reading, annotation)
        if config_values.fits(reading, annotation):
            same_kind = annotation is not Any or isinstance(current, str) or not _is_word(text)
            if same_kind or not isinstance(reading, str) or current is None or current is REQUIRED:
                return reading
    wanted = config_values.describe_annotation(annotation)
    wanted = f"a value like {current!r}" if wanted in ("Any", "typing.Any") else wanted
    raise InvalidConfigValueError(f"{place}: {text!r} is not {wanted}.")


def _is_word(text: str) -> bool:
    return not text or text[0] not in "'\""


def _readings(text: str, annotation: Any) -> Iterator[Any]:
    """Yields what a text may mean, the likeliest first."""
    if text.lower() in ("true", "false", "none"):
        yield {"true": True, "false": False, "none": None}[text.lower()]
    try:
        value = read_literal(text)
        yield value
        if isinstance(value, float) and value.is_integer():
            yield int(value)
        if isinstance(value, list):
            yield tuple(value)
        if isinstance(value, tuple):
            yield list(value)
    except ValueError:
        pass
    for option in config_values._options(annotation):
        if isinstance(option, type) and issubclass(option, enum.Enum):
            yield from (m for m in option if text.lower() in (m.name.lower(), str(m.value).lower()))
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        value = config_values.resolve_reference(text)
        if isinstance(value, type) and issubclass(value, Configurable):
            yield value.default_config()
        yield value
        if inspect.isfunction(value):
            yield config_for_function(value)
    yield text


# -- Text ----------------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    """Returns whether a value prints as one literal."""
    if config_values.is_record(value):
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(k, _PLAIN) and _is_plain(v) for k, v in value.items())
    return isinstance(value, _PLAIN) and not isinstance(value, enum.Enum)


def _header(value: Any) -> tuple[str, str] | None:
    """Returns (suffix of the path, text) of the line that opens a value with others inside."""
    if isinstance(value, _FunctionConfig):
        return (".cls" if isinstance(value.callee, type) else ".fn"), config_values.reference(
            value.callee
        )
    if isinstance(value, Configurable.Config):
        return ".klass", literal(value.klass)
    if isinstance(value, ConfigBase):
        return ".config_class", config_values.reference(type(value))
    if config_values.is_record(value):
        return "", f"<{config_values.reference(type(value))}>"
    if isinstance(value, list | tuple | dict) and not _is_plain(value):
        return "", f"<{type(value).__name__}>"
    return None


def literal(value: Any) -> str:
    """Returns the text of a leaf; `read_literal` gives the value back."""
    if value is REQUIRED or _is_plain(value):
        return re.sub(r"\b(nan|inf)\b", r"\1", repr(value))
    if isinstance(value, enum.Enum | type) or inspect.isroutine(value):
        return config_values.reference(value)
    if isinstance(value, re.Pattern):
        return repr(value)
    return config_values.reference(value) if hasattr(value, "__qualname__") else repr(value)


def _walk(value: Any, keys: list[Key]) -> Iterator[tuple[list[Key], str, Any]]:
    """Yields (keys, text, value) of every line of a config."""
    header = _header(value)
    if header is None:
        yield keys, literal(value), value
        return
    suffix, text = header
    yield ([*keys, suffix[1:]] if suffix else keys), text, value
    for key, child in _children(value):
        if key == "klass" and isinstance(value, Configurable.Config):
            continue
        if isinstance(value, ConfigBase) and _is_unset_default(value, str(key), child):
            continue
        yield from _walk(child, [*keys, key])


def _is_unset_default(cfg: ConfigBase, name: str, value: Any) -> bool:
    """Returns whether a field is None or REQUIRED and would be so anyway."""
    return (value is None or value is REQUIRED) and cfg._all_fields()[name].default is value


def leaves(cfg: ConfigBase) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of every value that holds no config."""

    def walk(value: Any, keys: list[Key]) -> Iterator[tuple[str, Any]]:
        if _header(value) is None:
            yield join_path(keys), value
        else:
            for key, child in _children(value):
                yield from walk(child, [*keys, key])

    return walk(cfg, [])


def to_text(cfg: ConfigBase) -> str:
    """Returns a config as text: lines `path: literal`, in the order of the fields."""
    return "".join(f"{join_path(keys)}: {text}\n" for keys, text, _ in _walk(cfg, []))


def read_literal(text: str) -> Any:
    """Returns the value of a literal. Raises ValueError if it is none."""
    try:
        return _read_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise ValueError(f"{text!r} is not a literal.") from None


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
        case ast.Set(elts=elements):
            return set(map(_read_node, elements))
        case ast.Dict(keys=keys, values=values):
            return {_read_node(k): _read_node(v) for k, v in zip(keys, values, strict=True) if k}
    raise ValueError("not a literal")


def parse(text: str) -> Any:
    """Returns the config that `to_text` printed.

    Raises:
        ValueError: If a line cannot be read; the message holds its number.
    """
    root: dict[Key, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        path, colon, value = line.partition(": ")
        if not colon:
            raise ValueError(f"line {number}: expected 'path: value', got {line!r}.")
        node = root
        for key in split_path(path):
            node = node.setdefault(key, {})
        node[""] = (value, number)
    return _build(root)


_OPENERS: dict[str, Callable[[Any], ConfigBase]] = {
    "klass": lambda value: value.default_config(),
    "fn": config_for_function,
    "cls": config_for_class,
    "config_class": lambda value: value(),
}


def _build(node: dict[Key, Any]) -> Any:
    """Returns the value that a tree of lines describes."""
    for opener, make in _OPENERS.items():
        if opener in node and "" not in node:
            cfg = make(_build(node.pop(opener)))
            for key, child in node.items():
                setattr(cfg, str(key), _build(child))
            return cfg
    if "" not in node:
        raise ValueError(f"no line says what holds {', '.join(map(repr, node))}.")
    text, number = node.pop("")
    children = {key: _build(child) for key, child in node.items()}
    try:
        return _read_line(text, children)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _read_line(text: str, children: dict[Key, Any]) -> Any:
    if text in ("<list>", "<tuple>"):
        return (list if text == "<list>" else tuple)(children.values())
    if text == "<dict>":
        return children
    if text.startswith("<") and text.endswith(">"):
        return config_values.resolve_reference(text[1:-1])(**children)
    if match := re.fullmatch(r"re\.compile\((.*)\)", text):
        return re.compile(read_literal(match[1]))
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return config_values.resolve_reference(text)
    return read_literal(text)


# -- Comparing and explaining --------------------------------------------------------------------


def diff(a: ConfigBase, b: ConfigBase) -> list[tuple[str, str | None, str | None]]:
    """Returns (path, text in a, text in b) of every line that differs; None where it is absent."""
    lines_a = {join_path(keys): text for keys, text, _ in _walk(a, [])}
    lines_b = {join_path(keys): text for keys, text, _ in _walk(b, [])}
    paths = [*lines_a, *(path for path in lines_b if path not in lines_a)]
    return [
        (path, lines_a.get(path), lines_b.get(path))
        for path in paths
        if lines_a.get(path) != lines_b.get(path)
    ]


def origins(cfg: ConfigBase) -> Iterator[tuple[str, str, str]]:
    """Yields (path, text, where it was set) of every leaf."""

    def walk(value: Any, keys: list[Key], origin: str) -> Iterator[tuple[str, str, str]]:
        if _header(value) is None:
            yield join_path(keys), literal(value), origin
            return
        for key, child in _children(value):
            inner = value.origin(str(key)) if isinstance(value, ConfigBase) else origin
            yield from walk(child, [*keys, key], inner)

    return walk(cfg, [], "")
