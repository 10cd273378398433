"""Configs: typed, nested, mutable descriptions from which objects are built. Plain Python, no JAX.

A class says what it can be told in a nested `Config`; a config is changed freely, printed,
compared and written to text, and only `instantiate()` builds the object.

    class Ffn(Module):
        @config_class
        class Config(Module.Config):
            input_dim: Required[int] = REQUIRED

    ffn = Ffn.default_config().set(name="ffn", input_dim=8).instantiate(parent=None)
"""

import contextlib
import copy
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, Union, dataclass_transform

from moelib.core import config_values
from moelib.core.config_values import (
    REQUIRED,
    DType,
    InvalidConfigValueError,
    NonConfigFieldError,
    Required,
    RequiredFieldValue,
    did_you_mean,
    register_validator,
    similar_names,
)

__all__ = [
    "REQUIRED",
    "ConfigBase",
    "ConfigOr",
    "Configurable",
    "DType",
    "FrozenConfigError",
    "InstantiableConfig",
    "InvalidConfigClassError",
    "InvalidConfigNameError",
    "InvalidConfigValueError",
    "MissingConfigClassDecoratorError",
    "NonConfigFieldError",
    "Required",
    "RequiredFieldMissingError",
    "RequiredFieldValue",
    "TrainerConfigFn",
    "UnknownFieldError",
    "config_class",
    "config_for_class",
    "config_for_function",
    "config_origin",
    "did_you_mean",
    "get_named_trainer_config",
    "maybe_instantiate",
    "maybe_set_config",
    "register_validator",
    "similar_names",
    "with_overrides",
]

T = TypeVar("T")


class RequiredFieldMissingError(ValueError):
    """A config was instantiated while a REQUIRED field was unset."""

    def __init__(self, owner: str, fields: Sequence[str], path: tuple[str, ...] = ()) -> None:
        """Names the missing fields of `owner`; `path` leads to it from the root module."""
        names = ", ".join(".".join((*path, name)) for name in fields)
        super().__init__(
            f"{names} must be set before {owner} is instantiated: .set({fields[0]}=...)."
        )
        self.owner, self.fields, self.path = owner, fields, path

    def inside(self, name: str) -> "RequiredFieldMissingError":
        """Returns the same error as seen from the module whose child is `name`."""
        return RequiredFieldMissingError(self.owner, self.fields, (name, *self.path))


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
_CORE = os.path.dirname(__file__)


@contextlib.contextmanager
def config_origin(origin: str) -> Iterator[None]:
    """Values set inside are said to come from `origin`, for example "--set learner.lr=3"."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def _caller() -> str:
    """Returns where the nearest frame outside the config files is, as file:line."""
    if (origin := _origin.get()) is not None:
        return origin
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(os.path.join(_CORE, "config")):
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
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields.update(base.__dict__.get("_fields", {}))
    for name, value in list(vars(cls).items()):
        if not (name.startswith("_") or name in annotations or callable(value)):
            if not isinstance(value, property | classmethod | staticmethod):
                raise InvalidConfigClassError(
                    f"{cls.__qualname__}.{name} needs an annotation to be a field."
                )
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


def _make_field(cls: type["ConfigBase"], name: str, annotation: Any) -> Field:
    """Returns the field that a class attribute describes, and takes the attribute away."""
    _check_field_name(name, cls.__qualname__)
    if isinstance(annotation, str):
        annotation = _resolve_annotation(annotation, cls)
    default = config_values.convert_value(vars(cls)[name], annotation)
    delattr(cls, name)
    if not config_values.fits(default, annotation):
        raise InvalidConfigClassError(_misfit(f"{cls.__qualname__}.{name}", default, annotation))
    config_values.validate_value(default, _is_config)
    return Field(annotation, default, config_values.reference(cls))


def _resolve_annotation(annotation: str, cls: type) -> Any:
    """Returns what a string annotation means in the class's module, or Any if not known yet."""
    namespace = vars(sys.modules[cls.__module__])
    try:
        return eval(annotation, dict(namespace))  # noqa: S307 (our own source text)
    except NameError:
        return Any


def _check_field_name(name: str, owner: str) -> None:
    if name.startswith("_") or hasattr(ConfigBase, name):
        raise InvalidConfigNameError(
            f"{owner}.{name}: a field's name cannot be private or a method of configs; rename it."
        )


def _misfit(place: str, value: Any, annotation: Any) -> str:
    wanted = config_values.describe_annotation(annotation)
    return f"{place} = {value!r}: got {type(value).__qualname__}, expected {wanted}."


def _is_config(value: Any) -> bool:
    return isinstance(value, ConfigBase)


def _copy_value(value: Any) -> Any:
    """Returns a copy of a field's value that shares no config and no container with it."""
    if isinstance(value, ConfigBase):
        return value.clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copy_value, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_copy_value, value))
    if isinstance(value, dict):
        return {key: _copy_value(element) for key, element in value.items()}
    return copy.copy(value) if isinstance(value, set) else value


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
        object.__setattr__(self, "_frozen", False)
        object.__setattr__(self, "_origins", {})
        fields = self._all_fields()
        values = {name: _copy_value(field.default) for name, field in fields.items()}
        object.__setattr__(self, "_values", values)

    def _all_fields(self) -> Mapping[str, Field]:
        return type(self)._fields

    # Reading and writing.

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        raise UnknownFieldError(f"{self._title()} has no field {name!r}; " + did_you_mean(name, values))

    def __setattr__(self, name: str, value: Any) -> None:
        fields = self._all_fields()
        if name not in fields:
            raise UnknownFieldError(
                f"{self._title()} has no field {name!r}; " + did_you_mean(name, fields)
            )
        if self._frozen:
            raise FrozenConfigError(
                f"{self._title()}.{name} belongs to an object that is already built; "
                "change a clone() and instantiate that."
            )
        annotation = fields[name].annotation
        try:
            value = config_values.convert_value(value, annotation)
            config_values.validate_value(value, _is_config)
        except TypeError as error:
            raise type(error)(f"{self._title()}.{name}: {error}.") from None
        if not config_values.fits(value, annotation):
            raise InvalidConfigValueError(_misfit(f"{self._title()}.{name}", value, annotation))
        self._values[name] = value
        self._origins[name] = _caller()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def set(self, **values: Any) -> Self:
        """Sets fields and returns the config itself, so that calls chain."""
        for name, value in values.items():
            setattr(self, name, value)
        return self

    def clone(self, **values: Any) -> Self:
        """Returns an unfrozen deep copy with `values` set."""
        other = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            object.__setattr__(other, name, value)
        object.__setattr__(other, "_frozen", False)
        object.__setattr__(other, "_origins", dict(self._origins))
        copies = {name: _copy_value(value) for name, value in self._values.items()}
        object.__setattr__(other, "_values", copies)
        return other.set(**values)

    def __copy__(self) -> Self:
        return self.clone()

    def __deepcopy__(self, memo: object) -> Self:
        return self.clone()

    def freeze(self) -> Self:
        """Makes this config and those inside it read-only, and returns it."""
        object.__setattr__(self, "_frozen", True)

        def freeze(value: Any) -> None:
            if isinstance(value, ConfigBase):
                value.freeze()
            elif isinstance(value, Mapping):
                list(map(freeze, value.values()))
            elif isinstance(value, list | tuple):
                list(map(freeze, value))

        list(map(freeze, self._values.values()))
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

    # Paths and text (moelib.core.config_text).

    def visit(self, visit_fn: Callable[[str, Any], None]) -> None:
        """Calls `visit_fn(path, value)` on every leaf: values that hold no config."""
        from moelib.core import config_text

        for path, value in config_text.leaves(self):
            visit_fn(path, value)

    def to_flat_dict(self, *, omit_default_values: Collection[Any] = ()) -> dict[str, Any]:
        """Returns {path: value} of every leaf, without leaves that equal one of the given values."""
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

    def get_recursively(self, path: str | Sequence[str]) -> Any:
        """Returns the value at a path such as "model.layers[0].dim" or ("model", "dim")."""
        from moelib.core import config_text

        return config_text.get(self, path)

    def set_recursively(self, path: str | Sequence[str], *, value: Any) -> None:
        """Sets the value at a path; elements of lists, tuples and dicts can be set too."""
        from moelib.core import config_text

        config_text.set_at(self, path, value)


class InstantiableConfig(ConfigBase, Generic[T]):
    """A config that can build an object."""

    _fields: ClassVar[dict[str, Field]] = {}

    def instantiate(self, **kwargs: Any) -> T:
        """Builds the object that the config describes. The config itself is not changed.

        Raises:
            RequiredFieldMissingError: If a REQUIRED field is unset.
        """
        missing = [name for name, value in self.items() if value is REQUIRED]
        if missing:
            raise RequiredFieldMissingError(self._title(), missing)
        return self._build(**kwargs)

    def _build(self, **kwargs: Any) -> T:
        raise TypeError(f"{self._title()} does not say what it builds.")


ConfigOr = Union[T, InstantiableConfig[T]]  # noqa: UP007 (subscripted: ConfigOr[float])


class Configurable:
    """A class whose objects are built from its nested `Config`."""

    @config_class
    class Config(InstantiableConfig["Configurable"]):
        """Config of `Configurable`."""

        klass: type = REQUIRED  # The class to build.

        def _build(self, **kwargs: Any) -> Any:
            return self.klass(self, **kwargs)

    @classmethod
    def default_config(cls) -> Any:
        """Returns a new config of this class with default values."""
        config = cls.Config()
        config._values["klass"] = cls
        return config

    def __init__(self, cfg: Any) -> None:
        """Keeps a copy of `cfg`, which is frozen when the object is built."""
        self._config = cfg.clone()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is not None and "_fields" not in config.__dict__:
            raise MissingConfigClassDecoratorError(
                f"{config.__qualname__} needs the decorator @config_class."
            )

    @property
    def config(self) -> Any:
        """The object's own config: to be read, and while it is built, to be completed."""
        return self._config


class _FunctionConfig(InstantiableConfig[T]):
    """A config whose fields are the parameters of a callable."""

    _fields: ClassVar[dict[str, Field]] = {}

    def __init__(self, callee: Callable[..., T]) -> None:
        object.__setattr__(self, "_callee", callee)
        object.__setattr__(self, "_callee_fields", _signature_fields(callee))
        self._start()

    def _all_fields(self) -> Mapping[str, Field]:
        return self.__dict__["_callee_fields"]

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _FunctionConfig) and self.callee is other.callee
        return same and self._values == other.__dict__["_values"]

    __hash__ = None

    @property
    def callee(self) -> Callable[..., T]:
        """The function or class that is called."""
        return self.__dict__["_callee"]

    def _title(self) -> str:
        return f"config of {getattr(self.callee, '__qualname__', self.callee)}"

    def _build(self, **kwargs: Any) -> T:
        values = {name: maybe_instantiate(value) for name, value in self.items()} | kwargs
        args: list[Any] = []
        for parameter in inspect.signature(self.callee).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                args.extend(values.pop(parameter.name))
            elif parameter.kind is parameter.VAR_KEYWORD:
                values.update(values.pop(parameter.name))
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(values.pop(parameter.name))
        if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(self.callee).parameters.values()):
            return self._call_with_args(values, args)
        return self.callee(*args, **values)

    def _call_with_args(self, values: dict[str, Any], args: list[Any]) -> T:
        """Calls a function that takes *args: what stands before them goes by position too."""
        before = []
        for parameter in inspect.signature(self.callee).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                break
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                before.append(values.pop(parameter.name))
        return self.callee(*before, *args, **values)


def _signature_fields(callee: Callable[..., Any]) -> dict[str, Field]:
    """Returns a field for each parameter of a callable."""
    name = getattr(callee, "__qualname__", repr(callee))
    owner = config_values.reference(callee)
    fields = {}
    for parameter in inspect.signature(callee).parameters.values():
        _check_field_name(parameter.name, name)
        annotation = parameter.annotation
        if parameter.kind is parameter.VAR_POSITIONAL:
            annotation, default = Any, []
        elif parameter.kind is parameter.VAR_KEYWORD:
            annotation, default = Any, {}
        else:
            default = REQUIRED if parameter.default is parameter.empty else parameter.default
        if annotation in (int, float, bool, str):  # Others are not ours to check.
            annotation = Required[ConfigOr[annotation]] if default is not None else Any
        else:
            annotation = Any
        fields[parameter.name] = Field(annotation, default, owner)
    return fields


def config_for_function(fn: Callable[..., T]) -> Any:
    """Returns a config whose fields are the function's parameters; `instantiate()` calls it.

    Parameters without a default are REQUIRED; `*args` is a list field, `**kwargs` a dict field.
    Values that are configs are instantiated first, inside lists and dicts too.
    """
    if isinstance(fn, type) or not callable(fn):
        raise InvalidConfigClassError(f"{fn!r} is not a function; use config_for_class.")
    return _FunctionConfig(fn)


def config_for_class(cls: type[T]) -> Any:
    """Returns a config whose fields are the parameters of a class that knows no configs."""
    if not isinstance(cls, type):
        raise InvalidConfigClassError(f"{cls!r} is not a class; use config_for_function.")
    if issubclass(cls, Configurable):
        raise InvalidConfigClassError(f"{cls.__qualname__} has a default_config(); use that.")
    return _FunctionConfig(cls)


def maybe_instantiate(value: Any) -> Any:
    """Returns the value with every instantiable config in it, at any depth, instantiated."""
    if isinstance(value, InstantiableConfig):
        return value.instantiate()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(maybe_instantiate, value))
    if isinstance(value, list | tuple):
        return type(value)(map(maybe_instantiate, value))
    if type(value) is dict:
        return {key: maybe_instantiate(element) for key, element in value.items()}
    return value


def maybe_set_config(cfg: ConfigBase, **values: Any) -> ConfigBase:
    """Sets those of the fields that the config has, leaves the others out, and returns it."""
    return cfg.set(**{name: value for name, value in values.items() if name in cfg.keys()})


# -- Named configs -------------------------------------------------------------------------------

TrainerConfigFn = Callable[[], Any]


def get_named_trainer_config(
    name: str, *, config_module: str | types.ModuleType
) -> TrainerConfigFn:
    """Returns the function of that name from a module's `named_trainer_configs()`.

    Raises:
        InvalidConfigNameError: If there is no such name (the message holds the nearest) or the
            module has no `named_trainer_configs`. An error inside the module is raised as it is.
    """
    import importlib

    module = importlib.import_module(config_module) if isinstance(config_module, str) else config_module
    if not hasattr(module, "named_trainer_configs"):
        raise InvalidConfigNameError(
            f"module {module.__name__} defines no named_trainer_configs(); it must return a dict "
            "of functions, each of which returns a trainer config."
        )
    configs = module.named_trainer_configs()
    if name not in configs:
        raise InvalidConfigNameError(
            f"{module.__name__} has no config {name!r}; {did_you_mean(name, configs)}"
        )
    return configs[name]


def with_overrides(trainer_config_fn: TrainerConfigFn, **values: Any) -> TrainerConfigFn:
    """Returns a function that makes the same config with some fields set otherwise."""
    return lambda: trainer_config_fn().set(**values)
