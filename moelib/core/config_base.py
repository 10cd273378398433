"""What a config is: typed fields that remember where each value was set. Plain Python, no JAX."""

import contextlib
import copy
import dataclasses
import inspect
import os
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

from moelib.core import config_values
from moelib.core.config_values import REQUIRED, InvalidConfigValueError, did_you_mean

T = TypeVar("T")


class UnknownFieldError(AttributeError):
    """A field that the config does not have."""


class InvalidConfigNameError(ValueError):
    """A field or config name that cannot be used."""


class InvalidConfigClassError(TypeError):
    """A config class that is not written as one."""


class MissingConfigClassDecoratorError(TypeError):
    """A subclass of ConfigBase without @config_class."""


class FrozenConfigError(RuntimeError):
    """A change to the config of an object that is already built."""


# -- Where a value was set -----------------------------------------------------------------------

_origin: ContextVar[str | None] = ContextVar("moelib_config_origin", default=None)
_CORE = os.path.dirname(__file__) + os.sep


@contextlib.contextmanager
def config_origin(origin: str) -> Iterator[None]:
    """Values set inside are said to come from `origin`, for example "--set learner.lr=3"."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def _caller() -> str:
    """Returns where the nearest frame outside of moelib.core is, as file:line."""
    if (origin := _origin.get()) is not None:
        return origin
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_CORE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- Config classes ------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of a config class: its annotation, default value and the class that wrote it."""

    annotation: Any
    default: Any
    owner: str


@dataclass_transform(kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """Makes a subclass of ConfigBase a config class: each annotated name becomes a field.

    Raises:
        InvalidConfigClassError: If a field has no default or no annotation, or a wrong default.
        InvalidConfigNameError: If a field's name is private or is a method of configs.
    """
    if not (isinstance(cls, type) and issubclass(cls, ConfigBase)):
        raise InvalidConfigClassError(f"{cls!r} must be a subclass of ConfigBase.")
    annotations = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        if not (name.startswith("_") or name in annotations or _is_method(value, cls)):
            raise InvalidConfigClassError(
                f"{cls.__qualname__}.{name} needs an annotation to be a field."
            )
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields.update(base.__dict__.get("_fields", {}))
    for name, annotation in annotations.items():
        if typing.get_origin(annotation) is ClassVar or annotation is ClassVar:
            continue
        if name not in vars(cls):
            raise InvalidConfigClassError(
                f"{cls.__qualname__}.{name} has no default; write `= REQUIRED` if it must be set."
            )
        fields[name] = _make_field(cls, name, annotation)
    cls._fields = fields
    return cls


def _is_method(value: Any, cls: type) -> bool:
    """Returns whether a class attribute was defined in the class's body, and is no plain value."""
    name = getattr(value, "__qualname__", cls.__qualname__)
    return name.startswith(cls.__qualname__) and (
        isinstance(value, type) or hasattr(type(value), "__get__")
    )


def _make_field(cls: type["ConfigBase"], name: str, annotation: Any) -> Field:
    """Returns the field that a class attribute describes, and takes the attribute away."""
    check_field_name(name, cls)
    if isinstance(annotation, str):
        annotation = _resolve_annotation(annotation, cls)
    place = f"{cls.__qualname__}.{name}"
    try:
        default = _checked(place, vars(cls)[name], annotation)
    except InvalidConfigValueError as error:
        raise InvalidConfigClassError(str(error)) from None
    delattr(cls, name)
    return Field(annotation, default, config_values.reference(cls))


def _resolve_annotation(annotation: str, cls: type) -> Any:
    """Returns what a string annotation means in the class's module, or Any if not known yet."""
    module = sys.modules.get(cls.__module__)
    try:
        return eval(annotation, dict(vars(module)) if module else {})
    except (NameError, AttributeError):
        return Any


def check_field_name(name: str, owner: Any) -> None:
    """Raises InvalidConfigNameError if a field may not be called so."""
    if name.startswith("_") or hasattr(ConfigBase, name):
        owner = getattr(owner, "__qualname__", owner)
        raise InvalidConfigNameError(
            f"{owner}.{name}: a field's name cannot be private or a method of configs; rename it."
        )


def _checked(place: str, value: Any, annotation: Any) -> Any:
    """Returns the value as the field keeps it. Raises TypeError if it may not stand there."""
    try:
        value = config_values.convert_value(value, annotation)
        config_values.validate_value(value, lambda value: isinstance(value, ConfigBase))
    except (InvalidConfigValueError, config_values.NonConfigFieldError) as error:
        raise type(error)(f"{place}: {error}.") from None
    if not config_values.fits(value, annotation):
        wanted = config_values.describe_annotation(annotation)
        got = type(value).__qualname__
        raise InvalidConfigValueError(f"{place} = {value!r}: got {got}, expected {wanted}.")
    return value


_SHARED = frozenset({bool, int, float, str, bytes, type(None), type(config_class), type(REQUIRED)})


def _copy_value(value: Any) -> Any:
    """Returns a copy of a field's value that shares no config and no container with it."""
    kind = type(value)
    if kind in _SHARED or isinstance(value, type):
        return value
    if isinstance(value, ConfigBase):
        return value.clone()
    if kind in (list, tuple):
        return kind(map(_copy_value, value))
    if kind is dict:
        return {key: _copy_value(element) for key, element in value.items()}
    if isinstance(value, tuple):
        return kind(*map(_copy_value, value))  # A named tuple.
    if dataclasses.is_dataclass(kind):
        other = copy.copy(value)
        for name, element in vars(value).items():
            object.__setattr__(other, name, _copy_value(element))
        return other
    return copy.copy(value) if isinstance(value, set) else value


def _freeze(value: Any) -> None:
    if type(value) in _SHARED or isinstance(value, type):
        return
    if isinstance(value, ConfigBase):
        value.freeze()
    elif isinstance(value, dict):
        list(map(_freeze, value.values()))
    elif isinstance(value, list | tuple):
        list(map(_freeze, value))
    elif config_values.is_record(value):
        list(map(_freeze, config_values.record_fields(value).values()))


class ConfigBase:
    """A set of typed fields. Setting an unknown field or a value of another type is an error."""

    _fields: ClassVar[dict[str, Field]] = {}

    def __init__(self, **values: Any) -> None:
        """Makes a config of default values, then sets `values`."""
        if "_fields" not in type(self).__dict__:
            raise MissingConfigClassDecoratorError(
                f"{type(self).__qualname__} needs the decorator @config_class."
            )
        self._start()
        self.set(**values)

    def _start(self) -> None:
        fields = self._all_fields().items()
        values = {name: _copy_value(field.default) for name, field in fields}
        self.__dict__.update(_frozen=False, _origins={}, _values=values)

    def _all_fields(self) -> Mapping[str, Field]:
        return type(self)._fields

    # Reading and writing.

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        raise UnknownFieldError(
            f"{self._title()} has no field {name!r}; {did_you_mean(name, values)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self._all_fields()
        if name not in fields:
            raise UnknownFieldError(
                f"{self._title()} has no field {name!r}; {did_you_mean(name, fields)}"
            )
        if self._frozen:
            raise FrozenConfigError(
                f"{self._title()}.{name} belongs to an object that is already built; "
                "change a clone() and instantiate that."
            )
        self._values[name] = _checked(f"{self._title()}.{name}", value, fields[name].annotation)
        self._origins[name] = _caller()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def set(self, **values: Any) -> Self:
        """Sets fields and returns the config itself, so that calls chain."""
        for name, value in values.items():
            setattr(self, name, value)
        return self

    def clone(self, **values: Any) -> Self:
        """Returns an unfrozen deep copy with `values` set."""
        other = type(self).__new__(type(self))
        copies = {name: _copy_value(value) for name, value in self._values.items()}
        other.__dict__.update(
            self.__dict__, _frozen=False, _origins=self._origins.copy(), _values=copies
        )
        return other.set(**values)

    def __copy__(self) -> Self:
        return self.clone()

    def __deepcopy__(self, memo: object) -> Self:
        return self.clone()

    def _check_containers(self) -> None:
        """Checks what was put into lists and dicts in place, which assignment did not see.

        Raises:
            InvalidConfigValueError: If a value may not stand there.
        """
        for name, value in self._values.items():
            if isinstance(value, list | dict):
                _checked(f"{self._title()}.{name}", value, self.annotation(name))

    def freeze(self) -> Self:
        """Makes this config and those inside it read-only, and returns it."""
        if not self._frozen:
            self.__dict__["_frozen"] = True
            list(map(_freeze, self._values.values()))
        return self

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values == other.__dict__["_values"]

    __hash__ = None  # Mutable.

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return f"{self._title()}({inside})"

    def _title(self) -> str:
        return type(self).__qualname__

    def keys(self) -> Collection[str]:
        """Returns the names of the fields, those of base classes first."""
        return self._values.keys()

    def items(self) -> Collection[tuple[str, Any]]:
        """Returns the names and values of the fields."""
        return self._values.items()

    def annotation(self, name: str) -> Any:
        """Returns the annotation of a field."""
        return self._all_fields()[name].annotation

    def origin(self, name: str) -> str:
        """Returns where the field's value was set: file:line, a flag, or the class default."""
        return self._origins.get(name) or f"default of {self._all_fields()[name].owner}"

    # Paths and text (config_path, config_text).

    def visit(self, visit_fn: Callable[[str, Any], None]) -> None:
        """Calls `visit_fn(path, value)` on every leaf: values that hold no config."""
        for path, value in self.to_flat_dict().items():
            visit_fn(path, value)

    def to_flat_dict(self, *, omit_default_values: Collection[Any] = ()) -> dict[str, Any]:
        """Returns {path: value} of every leaf, without those that equal one of the given values."""
        from moelib.core import config_text

        return {
            path: value
            for path, value in config_text.leaves(self)
            if not any(value is omitted or value == omitted for omitted in omit_default_values)
        }

    def debug_string(self) -> str:
        """Returns the config as text, a line a value; `config_text.parse` reads it back."""
        from moelib.core import config_text

        return config_text.to_text(self)

    def get_recursively(self, path: str | Sequence[str | int]) -> Any:
        """Returns the value at a path such as "model.layers[0].dim" or ("model", "dim")."""
        from moelib.core import config_path

        return config_path.get(self, path)

    def set_recursively(self, path: str | Sequence[str | int], *, value: Any) -> None:
        """Sets the value at a path; elements of lists, tuples and dicts can be set too."""
        from moelib.core import config_path

        config_path.set_at(self, path, value)
