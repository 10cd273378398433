"""Configs: typed, nested, mutable descriptions from which objects are built. Plain Python, no JAX.

A class declares its settings in a nested `Config`; a config is changed freely, printed, compared
and written to text, and only `instantiate()` builds the object.

    class Ffn(Module):
        @config_class
        class Config(Module.Config):
            input_dim: Required[int] = REQUIRED

    ffn = Ffn.default_config().set(name="ffn", input_dim=8).instantiate(parent=None)
"""

import abc
import collections
import copy
import dataclasses
import importlib
import inspect
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import (
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    overload,
)

from moelib.core import config_text, config_types
from moelib.core.config_text import config_origin, current_origin  # noqa: F401 (a public name)
from moelib.core.config_types import (
    REQUIRED,
    DType,
    InvalidConfigValueError,
    NonConfigFieldError,
    Required,
    UnknownFieldError,
    did_you_mean,
)
from moelib.core.errors import UserError, masked

T = TypeVar("T")
C = TypeVar("C")
P = ParamSpec("P")


class InvalidConfigNameError(UserError):
    """A field or config name that cannot be used."""


class InvalidConfigClassError(TypeError):
    """A config class that is not written as one."""


class MissingConfigClassDecoratorError(TypeError):
    """A subclass of ConfigBase without @config_class."""


class FrozenConfigError(RuntimeError):
    """A change to the config of an object that is already built."""


class RequiredFieldMissingError(UserError):
    """A config was instantiated while a REQUIRED field was unset."""

    def __init__(self, owner: str, fields: Sequence[str], path: str | None = None) -> None:
        """Names the unset fields of the config `owner`, and its path below the root."""
        super().__init__(owner, fields, path)

    def __str__(self) -> str:
        owner, fields, path = self.args
        names = ", ".join(f"{path}.{name}" if path else name for name in fields)
        return f"{names} must be set before {owner} is instantiated: .set({fields[0]}=...)."


# -- Where a value was set -----------------------------------------------------------------------

_CORE = os.path.dirname(__file__) + os.sep


def _caller() -> str:
    """Returns the file:line of the nearest frame outside of moelib.core."""
    if (origin := current_origin()) is not None:
        return origin
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith(_CORE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- Config classes ------------------------------------------------------------------------------


class Field(NamedTuple):
    """A field of a config class: its annotation, default value and defining class."""

    annotation: Any
    default: Any
    owner: str


@dataclass_transform(kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """Makes a subclass of ConfigBase a config class: each annotated name becomes a field.

    Raises:
        InvalidConfigClassError: If a field has no default, a wrong default or no annotation, or a
            method hides an inherited field.
        InvalidConfigNameError: If a field's name is private or is a method of configs.
    """
    if not (isinstance(cls, type) and issubclass(cls, ConfigBase)):
        raise InvalidConfigClassError(f"{cls!r} must be a subclass of ConfigBase.")
    fields: dict[str, Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields.update(base.__dict__.get("_fields", {}))
    annotations = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        if name.startswith("_") or name in annotations:
            continue
        if name in fields:
            raise InvalidConfigClassError(
                f"{cls.__qualname__}.{name} hides the field of {fields[name].owner}; rename it, or "
                "annotate it to change the default."
            )
        if not _is_method(value, cls):
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


def _is_method(value: Any, cls: type) -> bool:
    """Returns whether a class attribute is a method, property or class of the class's body."""
    name = getattr(value, "__qualname__", cls.__qualname__)
    return name.startswith(cls.__qualname__) and (
        isinstance(value, type) or hasattr(type(value), "__get__")
    )


def _make_field(cls: type["ConfigBase"], name: str, annotation: Any) -> Field:
    """Returns the field that a class attribute describes, and deletes the attribute."""
    _check_field_name(name, cls)
    if isinstance(annotation, str):
        annotation = _resolve_annotation(annotation, cls)
    try:
        default = _checked(f"{cls.__qualname__}.{name}", vars(cls)[name], annotation)
    except InvalidConfigValueError as error:
        raise InvalidConfigClassError(str(error)) from None
    delattr(cls, name)
    return Field(annotation, _copy_value(default), config_types.reference(cls))


def _resolve_annotation(annotation: str, cls: type) -> Any:
    """Returns the value of a string annotation in the class's module, or Any if undefined yet."""
    module = sys.modules.get(cls.__module__)
    try:
        return eval(annotation, dict(vars(module)) if module else {})
    except (NameError, AttributeError):
        return Any


def _check_field_name(name: str, owner: Any) -> None:
    if name.startswith("_") or hasattr(ConfigBase, name):
        owner = getattr(owner, "__qualname__", owner)
        raise InvalidConfigNameError(
            f"{owner}.{name}: a field's name cannot be private or a method of configs; rename it."
        )


def _checked(title: str, value: Any, annotation: Any) -> Any:
    """Returns the value as the field `title` keeps it. Raises TypeError if it does not fit."""
    try:
        value = config_types.convert_value(value, annotation)
        config_types.validate_value(value)
    except (InvalidConfigValueError, NonConfigFieldError) as error:
        end = "" if str(error).endswith(("?", ".")) else "."
        raise type(error)(f"{title}: {error}{end}") from None
    if not config_types.fits(value, annotation):
        wanted = config_types.describe_annotation(annotation)
        kinds = [config_types.without_limits(kind) for kind in config_types.options(annotation)]
        of_the_kind = any(config_types.fits(value, kind) for kind in kinds)
        kind = "a class" if isinstance(value, type) else type(value).__qualname__
        got = "" if of_the_kind else f"got {kind}, "
        advice = config_types.advice(annotation)
        if isinstance(value, type) and any(map(config_types.is_config_class, kinds)):
            of_class = value.__qualname__ if hasattr(value, "default_config") else "a Configurable"
            advice = f"; set the default_config() of {of_class}."
        shown = "***" if config_types.is_secret(annotation) else masked(repr(value))
        raise InvalidConfigValueError(f"{title}={shown}: {got}expected {wanted}{advice}")
    return value


_IMMUTABLE = frozenset({bool, int, float, str, bytes, type(None), type(REQUIRED)})


def _copy_value(value: Any) -> Any:
    """Returns a copy of a field's value that shares no config and no container with it."""
    kind = type(value)
    if kind in _IMMUTABLE or isinstance(value, type):
        return value
    if isinstance(value, ConfigBase):
        return value.clone()
    if dataclasses.is_dataclass(kind):
        other = copy.copy(value)
        for name, element in vars(value).items():
            object.__setattr__(other, name, _copy_value(element))
        return other
    return config_types.map_elements(_copy_value, value)


def _freeze(value: Any) -> None:
    if isinstance(value, ConfigBase):
        value.freeze()
    elif type(value) not in _IMMUTABLE:
        for _, child in config_types.children(value):
            _freeze(child)


class _FieldsMethod(Protocol):
    """The type of a method that takes fields of the config's class by name, and returns a config.

    A type checker takes the parameters of the class's constructor for those of the method.
    """

    @overload
    def __get__(self, obj: None, owner: Any) -> Callable[..., Any]: ...
    @overload
    def __get__(self, obj: C, owner: Callable[P, C]) -> Callable[P, C]: ...


def _takes_fields(method: Callable[..., Any]) -> _FieldsMethod:
    return typing.cast(_FieldsMethod, method)


class _Short(reprlib.Repr):
    """Writes configs in short: the values that are not the default ones, inside of two levels."""

    def repr_instance(self, x: Any, level: int) -> str:
        if not isinstance(x, ConfigBase):
            return super().repr_instance(x, level)
        given = {
            k: value for k, value in x.items() if k != "klass" and value != x._fields[k].default
        }
        inside = ", ".join(f"{k}={self.repr1(value, level - 1)}" for k, value in given.items())
        return f"{x._title()}({inside if level > 0 else '...'})"


_SHORT = _Short(maxlevel=2, maxother=80, maxstring=80, maxlist=3)


class ConfigBase:
    """A set of typed fields. Setting an unknown field or a value of another type is an error.

    Values are copied when they are set, and so are those in lists, tuples and dicts: a config that
    is set in two fields, or twice in a list, gives two configs.
    """

    _fields: ClassVar[dict[str, Field]] = {}

    def __init__(self, **values: Any) -> None:
        """Creates a config with default values, then sets `values`."""
        if "_fields" not in type(self).__dict__:
            raise MissingConfigClassDecoratorError(
                f"{type(self).__qualname__} needs the decorator @config_class."
            )
        self._start()
        self.set(**values)

    def _start(self) -> None:
        values = {name: _copy_value(field.default) for name, field in self._fields.items()}
        self.__dict__.update(_frozen=False, _origins={}, _path="", _values=values)

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
        where = f"{self._path}: " if self._path else ""
        if name not in self._fields:
            near = config_text.near(self, name)
            raise UnknownFieldError(f"{where}{self._title()} has no field {name!r}; {near}")
        if self._frozen:
            raise FrozenConfigError(
                f"{self._title()}.{name} belongs to an object that is already built; "
                "change a clone() and instantiate that."
            )
        value = _checked(f"{where}{self._title()}.{name}", value, self._fields[name].annotation)
        self._values[name] = _copy_value(value)
        self._origins[name] = _caller()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @_takes_fields
    def set(self, **values: Any) -> Self:
        """Sets fields and returns the config itself, so that calls chain."""
        for name, value in values.items():
            setattr(self, name, value)
        return self

    @_takes_fields
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

    def freeze(self) -> Self:
        """Makes this config and those inside it read-only, and returns it."""
        if not self._frozen:
            self.__dict__["_frozen"] = True
            list(map(_freeze, self._values.values()))
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ConfigBase) or type(self) is not type(other):
            return False
        return self._header() == other._header() and self._values == other._values

    __hash__ = None  # Mutable.

    def __repr__(self) -> str:
        return _SHORT.repr(self)

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
        return self._fields[name].annotation

    def origin(self, name: str) -> str:
        """Returns where the field's value was set: file:line, a flag, or the class default."""
        return self._origins.get(name) or f"default of {self._fields[name].owner}"

    # Paths and text.

    def _is_default(self, name: str) -> bool:
        value, default = self._values[name], self._fields[name].default
        return value is default or (type(value) is type(default) and value == default)

    def _is_unset(self, name: str) -> bool:
        value = self._values[name]
        empty = value is None or value is REQUIRED or (isinstance(value, str) and not value)
        return empty and self._is_default(name)

    def _header(self) -> tuple[str, Any]:
        return "config_class", type(self)

    def visit(self, visit_fn: Callable[[str, Any], None]) -> None:
        """Calls `visit_fn(path, value)` on every leaf: values that hold no config."""
        for path, value in self.to_flat_dict().items():
            visit_fn(path, value)

    def to_flat_dict(self, *, omit_default_values: Collection[Any] = ()) -> dict[str, Any]:
        """Returns {path: value} of every leaf.

        Fields left at a default that is one of `omit_default_values`, such as None, are omitted.
        """
        omitted = list(omit_default_values)
        found = config_text.leaves(self)
        return {x.path: x.value for x in found if not (x.is_default and x.value in omitted)}

    def debug_string(self) -> str:
        """Returns the config as text, one line per value; `config_text.parse` reads it back."""
        return config_text.to_text(self)

    def get_recursively(self, path: str | Sequence[str | int]) -> Any:
        """Returns the value at a path such as "model.layers[0].dim" or ("model", "dim")."""
        return config_text.get(self, path)

    def set_recursively(self, path: str | Sequence[str | int], *, value: Any) -> None:
        """Sets the value at a path, elements of lists, tuples and dicts included."""
        config_text.set_at(self, path, value)


# -- Configs that build objects ------------------------------------------------------------------


class InstantiableConfig(ConfigBase, Generic[T]):
    """A config that can build an object."""

    _fields: ClassVar[dict[str, Field]] = {}

    def instantiate(self, **kwargs: Any) -> T:
        """Builds the object that the config describes. The config itself is not changed.

        Raises:
            RequiredFieldMissingError: If a REQUIRED field is unset, here or further inside.
        """
        return self.clone()._locate(self._path)._build(**kwargs)

    def _locate(self, path: str) -> Self:
        """Records the path of this config below the root, and of those inside it, for errors."""
        self.__dict__["_path"] = path
        for inner_path, inner in config_text.sub_configs(self):
            inner.__dict__["_path"] = f"{path}.{inner_path}" if path else inner_path
        return self

    def _check_complete(self, given: Collection[str] = ()) -> None:
        """Checks that REQUIRED fields are set, and what was put into containers in place."""
        missing = [name for name, value in self.items() if value is REQUIRED and name not in given]
        if missing:
            raise RequiredFieldMissingError(self._title(), missing, self._path)
        for name, value in self.items():
            if isinstance(value, list | dict):
                _checked(f"{self._title()}.{name}", value, self.annotation(name))

    def _build(self, **kwargs: Any) -> T:
        """Builds the object, which keeps this config without a copy."""
        raise TypeError(f"{self._title()} builds nothing; define its class's _build.")


ConfigOr = Union[T, InstantiableConfig[T]]  # noqa: UP007 (subscripted: ConfigOr[float])


def _own(value: Any) -> Any:
    """Returns a copy of an argument that is a config, any other argument as it is."""
    return value.clone() if isinstance(value, ConfigBase) else value


class _FrozenOnceBuilt(abc.ABCMeta):
    """Gives each object a config of its own, which is frozen once the object is built."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        named = {name: _own(value) for name, value in kwargs.items()}
        return cls._keep(*map(_own, args), **named)

    def _keep(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns the object of a config that nothing else holds."""
        built = super().__call__(*args, **kwargs)
        built.config.freeze()
        return built


class _HasConfig(Protocol[C]):
    """A class with a nested `Config`, as pyrefly sees it."""

    Config: ClassVar[type[C]]  # pyrefly: ignore[invalid-annotation]


class _HasNestedConfig(Protocol[C]):
    """A class with a nested `Config`, as pyright sees it."""

    Config: type[C]


class _OwnConfig(Protocol):
    """The type of `Configurable.config`: the `Config` of the object's own class."""

    @overload
    def __get__(self, obj: _HasConfig[C], owner: Any) -> C: ...
    @overload
    def __get__(self, obj: _HasNestedConfig[C], owner: Any) -> C: ...


class Configurable(metaclass=_FrozenOnceBuilt):
    """A class whose objects are built from its nested `Config`."""

    def __repr__(self) -> str:
        cfg = self.__dict__.get("_config")  # None in an `__init__` that has not set it.
        return object.__repr__(self) if cfg is None else repr(cfg).replace(".Config(", "(", 1)

    @config_class
    class Config(InstantiableConfig[Any]):
        klass: type = REQUIRED  # The class to build.

        if typing.TYPE_CHECKING:  # A field of this type holds any subclass; its fields may be set.

            def __init__(self, **values: Any) -> None: ...

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "klass" and not isinstance(self, getattr(value, "Config", ())):
                raise InvalidConfigValueError(
                    f"{self._title()}.klass={value!r}: its own Config has other fields; use its "
                    "default_config()."
                )
            super().__setattr__(name, value)

        def _title(self) -> str:
            return f"{getattr(self.klass, '__qualname__', 'Configurable')}.Config"

        def _header(self) -> tuple[str, Any]:
            return "klass", self.klass

        def _build(self, **kwargs: Any) -> Any:
            return self.klass._keep(self, **kwargs)

    @overload
    @classmethod
    def default_config(cls: type[_HasConfig[C]]) -> C: ...
    @overload
    @classmethod
    def default_config(cls: type[_HasNestedConfig[C]]) -> C: ...
    @classmethod
    def default_config(cls: Any) -> Any:
        """Returns a new config of this class with default values."""
        config = cls.Config()
        config._values["klass"] = cls
        return config

    def __init__(self, cfg: Any) -> None:
        """Keeps `cfg`, a copy that is frozen when the object is built."""
        cfg._check_complete()
        self._config = cfg

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        config = cls.__dict__.get("Config")
        if config is None:
            return
        if "_fields" not in config.__dict__:
            raise MissingConfigClassDecoratorError(
                f"{config.__qualname__} needs the decorator @config_class."
            )
        if config.__qualname__ == f"{cls.__qualname__}.Config":  # Not one it borrows.
            config._fields["klass"] = config._fields["klass"]._replace(default=cls)

    if typing.TYPE_CHECKING:
        config: _OwnConfig
    else:

        @property
        def config(self) -> Any:
            """The object's own config; it can be completed until the object is built."""
            return self._config


# -- Any function or class -----------------------------------------------------------------------

_RESERVED = ("cls", "fn", "instantiate", "klass")


class FunctionConfig(InstantiableConfig[T]):
    """A config whose fields are the parameters of a function or class."""

    _fields: ClassVar[dict[str, Field]] = {}
    fn: Callable[..., T]

    def __init__(self, fn: Callable[..., T]) -> None:
        self.__dict__.update(fn=fn, _fields=_signature_fields(fn))
        self._start()

    if typing.TYPE_CHECKING:  # No type says "some of the parameters of fn, by name".

        def set(self, **values: Any) -> Self:
            """Sets parameters."""
            ...

        def clone(self, **values: Any) -> Self:
            """Returns a copy with other values of some parameters."""
            ...

    def _title(self) -> str:
        return f"config of {getattr(self.fn, '__qualname__', self.fn)}"

    def _header(self) -> tuple[str, Any]:
        return ("cls" if isinstance(self.fn, type) else "fn"), self.fn

    def _is_unset(self, name: str) -> bool:
        value, default = self._values[name], self._fields[name].default
        if value is default and not config_text.is_plain(value):
            return not config_types.has_reference(value)  # An object without text.
        return super()._is_unset(name)

    def _build(self, **kwargs: Any) -> T:
        """Calls the function with the fields; `kwargs` replace those of the same name."""
        self._check_complete(kwargs)
        values = {name: kwargs.pop(name, value) for name, value in self.items()}
        values = collections.OrderedDict(maybe_instantiate(values))
        bound = inspect.BoundArguments(inspect.Signature(_parameters(self.fn)), values)
        return self.fn(*bound.args, **{**bound.kwargs, **kwargs})


def _parameters(callee: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a callable."""
    try:
        parameters = list(inspect.signature(callee).parameters.values())
    except ValueError as error:
        raise InvalidConfigClassError(f"{error}; wrap it in a function.") from None
    if isinstance(callee, type) and parameters and parameters[0].name == "self":
        return parameters[1:]  # Signatures of extension types include it.
    return parameters


def _signature_fields(callee: Callable[..., Any]) -> dict[str, Field]:
    """Returns a field for each parameter of a callable."""
    owner = config_types.reference(callee)
    fields = {}
    for parameter in _parameters(callee):
        _check_field_name(parameter.name, callee)
        if parameter.name in _RESERVED:
            raise InvalidConfigNameError(
                f"{owner}: configs of functions reserve the parameter name {parameter.name!r}; "
                "wrap it in a function with another name for it."
            )
        fields[parameter.name] = Field(*_parameter_field(parameter), owner)
    return fields


def _parameter_field(parameter: inspect.Parameter) -> tuple[Any, Any]:
    """Returns the annotation and the default value of a parameter's field."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return Any, []
    if parameter.kind is parameter.VAR_KEYWORD:
        return Any, {}
    default = REQUIRED if parameter.default is parameter.empty else parameter.default
    annotation = parameter.annotation
    checked = any(annotation is kind for kind in (int, float, bool, str, DType))
    if default is None or not (checked or typing.get_origin(annotation) is typing.Literal):
        return Any, default  # Other annotations are those of other libraries.
    return Required[ConfigOr[annotation]], default


def config_for_function(fn: Callable[..., T]) -> FunctionConfig[T]:
    """Returns a config whose fields are the function's parameters; `instantiate()` calls it.

    Parameters without a default are REQUIRED; `*args` is a list field, `**kwargs` a dict field.
    Values that are configs are instantiated first, those inside lists and dicts too.
    """
    if isinstance(fn, type) or not callable(fn):
        raise InvalidConfigClassError(f"{fn!r} is not a function; use config_for_class.")
    return FunctionConfig(fn)


def config_for_class(cls: type[T]) -> FunctionConfig[T]:
    """Returns a config whose fields are the parameters of a class that is not a Configurable."""
    if not isinstance(cls, type):
        raise InvalidConfigClassError(f"{cls!r} is not a class; use config_for_function.")
    if issubclass(cls, Configurable):
        raise InvalidConfigClassError(f"{cls.__qualname__} has a default_config(); use that.")
    return FunctionConfig(cls)


@config_text.makes_configs
def config_of(value: Any) -> ConfigBase:
    """Returns a new config of a config class, a Configurable, or another class or function."""
    if isinstance(value, type):
        if issubclass(value, Configurable):
            return value.default_config()
        return value() if issubclass(value, ConfigBase) else config_for_class(value)
    return config_for_function(value)


def maybe_instantiate(value: Any) -> Any:
    """Returns the value with every instantiable config in it, at any depth, instantiated."""
    if isinstance(value, InstantiableConfig):
        return value.instantiate()
    return config_types.map_elements(maybe_instantiate, value)


# -- Named configs -------------------------------------------------------------------------------


def named_trainer_configs(module: types.ModuleType) -> Mapping[str, Any]:
    """Returns what a module's `named_trainer_configs()` returns.

    Raises:
        InvalidConfigNameError: If there is no such function, or it returns no dict.
    """
    named = getattr(module, "named_trainer_configs", dict[str, Any])()
    if not named or not isinstance(named, Mapping):
        raise InvalidConfigNameError(
            f"module {module.__name__} has no named_trainer_configs() that returns a dict of "
            "functions, each of which returns a trainer config; define it."
        )
    return named


def get_named_trainer_config(
    name: str, *, config_module: str | types.ModuleType
) -> Callable[[], Any]:
    """Returns the function of that name from a module's `named_trainer_configs()`.

    Raises:
        InvalidConfigNameError: If the name is unknown (the message lists the nearest), or the
            module has no dict of functions. An error inside the module is raised as it is.
    """
    module = config_module
    if isinstance(module, str):
        module = importlib.import_module(module)
    configs = named_trainer_configs(module)
    if name not in configs:
        raise InvalidConfigNameError(
            f"{module.__name__} has no config {name!r}; {did_you_mean(name, configs)}"
        )
    if not callable(configs[name]):
        raise InvalidConfigNameError(
            f"{module.__name__}.named_trainer_configs() has {configs[name]!r:.80} as {name!r}; set "
            "it to a function that returns a trainer config."
        )
    return configs[name]
