"""Configs that build objects: those of our own classes, and of any function or class."""

import abc
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, Union

from moelib.core import config_values
from moelib.core.config_base import (
    ConfigBase,
    Field,
    InvalidConfigClassError,
    InvalidConfigNameError,
    MissingConfigClassDecoratorError,
    check_field_name,
    config_class,
)
from moelib.core.config_values import REQUIRED, InvalidConfigValueError, Required

T = TypeVar("T")


class RequiredFieldMissingError(ValueError):
    """A config was instantiated while a REQUIRED field was unset."""

    def __init__(self, owner: str, fields: Sequence[str], path: tuple[str | int, ...] = ()) -> None:
        """Names the missing fields of `owner`; `path` leads to it from the root."""
        super().__init__(owner, fields, path)
        self.owner, self.fields, self.path = owner, fields, path
        self._start = owner  # Title of the config at which the path starts.
        self._placed = False  # Whether the path has been completed up to the builder that runs.

    def __str__(self) -> str:
        from moelib.core.config_path import join_path

        names = ", ".join(join_path((*self.path, name)) for name in self.fields)
        return (
            f"{names} must be set before {self.owner} is instantiated: .set({self.fields[0]}=...)."
        )

    def inside(self, name: str | int, holder: ConfigBase | None = None) -> Self:
        """Returns the error as seen from the module whose child is `name`.

        Where the holder's config has the unset field, the path is the field's there: a child need
        not be called as its config is.
        """
        found = None if holder is None else self._place_in(holder)
        self.path, self._placed = (*((name,) if found is None else found), *self.path), True
        return self

    def leaving(self, cfg: ConfigBase) -> None:
        """Completes the path up to `cfg`, whose object could not be built."""
        if not self._placed:
            found = self._place_in(cfg)
            if found is None:
                return
            self.path = (*found, *self.path)
        self._start, self._placed = cfg._title(), False

    def _place_in(self, cfg: ConfigBase) -> tuple[str | int, ...] | None:
        """Returns where the config at which the path starts stands inside `cfg`, if it does."""
        from moelib.core.config_path import children, split_path, sub_configs

        for path, inner in sub_configs(cfg):
            holder: Any = inner
            for key in self.path:
                holder = dict(children(holder)).get(key)
            values = holder._values if isinstance(holder, ConfigBase) else {}
            unset = all(values.get(field) is REQUIRED for field in self.fields)
            if inner._title() == self._start and unset:
                return tuple(split_path(path))
        return None


class InstantiableConfig(ConfigBase, Generic[T]):
    """A config that can build an object."""

    _fields: ClassVar[dict[str, Field]] = {}

    def instantiate(self, **kwargs: Any) -> T:
        """Builds the object that the config describes. The config itself is not changed.

        Raises:
            RequiredFieldMissingError: If a REQUIRED field is unset, here or further inside.
        """
        self._check_required()
        try:
            return self._build(**kwargs)
        except RequiredFieldMissingError as error:
            error.leaving(self)
            raise

    def _mine(self) -> Self:
        """Returns this config, marked as one that the object it builds may keep uncopied."""
        self.__dict__["_fresh"] = True
        return self

    def _check_required(self, given: Collection[str] = ()) -> None:
        missing = [name for name, value in self.items() if value is REQUIRED and name not in given]
        if missing:
            raise RequiredFieldMissingError(self._title(), missing)
        self._check_containers()

    def _build(self, **kwargs: Any) -> T:
        raise TypeError(f"{self._title()} does not say what it builds.")


ConfigOr = Union[T, InstantiableConfig[T]]  # noqa: UP007 (subscripted: ConfigOr[float])


class _FrozenOnceBuilt(abc.ABCMeta):
    """Freezes an object's config once the object is built."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        built = super().__call__(*args, **kwargs)
        built.config.freeze()
        return built


class Configurable(metaclass=_FrozenOnceBuilt):
    """A class whose objects are built from its nested `Config`."""

    @config_class
    class Config(InstantiableConfig[Any]):
        klass: type = REQUIRED  # The class to build.

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "klass" and not isinstance(self, getattr(value, "Config", ())):
                raise InvalidConfigValueError(
                    f"{self._title()}.klass = {value!r}: its own Config has other fields; use its "
                    "default_config()."
                )
            super().__setattr__(name, value)

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
        cfg._check_required()
        self._config = cfg if cfg.__dict__.pop("_fresh", False) else cfg.clone()

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

    @property
    def config(self) -> Any:
        """The object's own config: to be read, and while it is built, to be completed."""
        return self._config


# -- Any function or class -----------------------------------------------------------------------

_RESERVED = ("callee", "cls", "fn", "instantiate", "klass")


class _FunctionConfig(InstantiableConfig[T]):
    """A config whose fields are the parameters of a callable."""

    _fields: ClassVar[dict[str, Field]] = {}

    def __init__(self, callee: Callable[..., T]) -> None:
        self.__dict__.update(_callee=callee, _callee_fields=_signature_fields(callee))
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

    fn = callee

    def _title(self) -> str:
        return f"config of {getattr(self.callee, '__qualname__', self.callee)}"

    def instantiate(self, **kwargs: Any) -> T:
        """Returns what the function returns; `kwargs` take the place of fields of that name."""
        self._check_required(kwargs)
        try:
            values = {name: kwargs.get(name, value) for name, value in self.items()}
            values = maybe_instantiate(values)
        except RequiredFieldMissingError as error:
            error.leaving(self)
            raise
        return self._call(values, {k: v for k, v in kwargs.items() if k not in values})

    def _call(self, values: dict[str, Any], more: dict[str, Any]) -> T:
        """Calls the function; what stands before *args goes by position."""
        parameters = inspect.signature(self.callee).parameters.values()
        takes_args = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        args: list[Any] = []
        keywords = dict(more)
        for p in parameters:
            value = values[p.name]
            if p.kind is p.VAR_POSITIONAL:
                args.extend(value)
            elif p.kind is p.VAR_KEYWORD:
                keywords.update(value)
            elif p.kind is p.POSITIONAL_ONLY or (takes_args and p.kind is not p.KEYWORD_ONLY):
                args.append(value)
            else:
                keywords[p.name] = value
        return self.callee(*args, **keywords)


def _signature_fields(callee: Callable[..., Any]) -> dict[str, Field]:
    """Returns a field for each parameter of a callable."""
    owner = config_values.reference(callee)
    fields = {}
    for parameter in inspect.signature(callee).parameters.values():
        check_field_name(parameter.name, callee)
        if parameter.name in _RESERVED:
            raise InvalidConfigNameError(
                f"{owner}: its parameter {parameter.name!r} has a name that configs of functions "
                "need themselves; wrap it in a function that calls it otherwise."
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
    if default is None or not any(annotation is known for known in (int, float, bool, str)):
        return Any, default  # Others are not ours to check.
    return Required[ConfigOr[annotation]], default


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
    return cfg.set(**{name: value for name, value in values.items() if name in cfg})
