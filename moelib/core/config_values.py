"""What may stand in a config field: plain values, checked against the field's annotation."""

import contextlib
import dataclasses
import difflib
import enum
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union

import numpy as np

T = TypeVar("T")


class RequiredFieldValue:
    """The value of a field that must be set before its config is instantiated."""

    _instance: "RequiredFieldValue | None" = None

    def __new__(cls) -> "RequiredFieldValue":
        """Returns the one instance, so that `is REQUIRED` holds after a copy."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __bool__(self) -> bool:
        return False

    def __deepcopy__(self, memo: object) -> "RequiredFieldValue":
        return self

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = RequiredFieldValue()
if typing.TYPE_CHECKING:  # Who reads a built object's config finds a T.
    Required = typing.Annotated[T, "must be set"]
else:
    Required = Union[T, RequiredFieldValue]  # noqa: UP007 (subscripted: Required[int])


class NonConfigFieldError(TypeError):
    """A value that no config may hold: only plain data, functions, classes and configs can."""


class InvalidConfigValueError(TypeError):
    """A value that does not fit its field's annotation."""


class DType(str):
    """The name of an array dtype; a field annotated so takes "bfloat16" or `jnp.bfloat16` alike."""

    __slots__ = ()

    @classmethod
    def __config_convert__(cls, value: Any) -> str:
        """Returns the dtype's name. Raises InvalidConfigValueError if it is none."""
        try:
            return value if _is_dtype_name(value) else np.dtype(value).name
        except TypeError as error:
            raise InvalidConfigValueError(
                f"{value!r} is not a dtype; use a name like 'float32' or 'bfloat16'"
            ) from error


_EXTENDED_DTYPES = re.compile(  # Names that NumPy does not know until ml_dtypes is imported.
    r"bfloat16|float8_e(3m4|4m3(b11fnuz|fn|fnuz)?|5m2(fnuz)?|8m0fnu)|float4_e2m1fn|u?int[24]"
)


def _is_dtype_name(value: Any) -> bool:
    return isinstance(value, str) and bool(_EXTENDED_DTYPES.fullmatch(value))


def dtype(name: str) -> np.dtype:
    """Returns a dtype by its name, those of ml_dtypes too."""
    if not _is_dtype_name(name):
        return np.dtype(name)
    import ml_dtypes  # With JAX; a config without such a dtype does without.

    return np.dtype(getattr(ml_dtypes, name))


def similar_names(name: str, allowed: Iterable[str]) -> list[str]:
    """Returns the allowed names most like `name`, best first, at most three."""
    return difflib.get_close_matches(name, sorted(map(str, allowed)), n=3, cutoff=0.5)


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Returns the end of an error message: the nearest names, or all of them when none is near."""
    allowed = sorted(map(str, allowed))
    near = similar_names(name, allowed)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if not allowed:
        return "there are none."
    more = f", and {len(allowed) - 20} more" if len(allowed) > 20 else ""
    return f"choose one of: {', '.join(allowed[:20])}{more}."


# -- Values ------------------------------------------------------------------------------------

_SCALARS = (type(None), bool, int, float, str, bytes, enum.Enum, RequiredFieldValue)
_validators: list[tuple[Callable[[Any], bool], Callable[[Any], None]]] = []


def register_validator(match_fn: Callable[[Any], bool], validate_fn: Callable[[Any], None]) -> None:
    """Lets configs hold values for which `match_fn` is true; `validate_fn` raises for bad ones."""
    _validators.append((match_fn, validate_fn))


def is_record(value: Any) -> bool:
    """Returns whether a value is a dataclass instance or a named tuple."""
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    )


def record_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance or named tuple, by name: what makes it anew."""
    names = getattr(value, "_fields", None)
    if names is None:
        names = [field.name for field in dataclasses.fields(value) if field.init]
    return {name: getattr(value, name) for name in names}


def validate_value(value: Any, is_config: Callable[[Any], bool]) -> None:
    """Raises NonConfigFieldError if a config may not hold `value`; looks into containers."""
    for match_fn, validate_fn in _validators:
        if match_fn(value):
            validate_fn(value)
            return
    if isinstance(value, _SCALARS) or is_config(value) or has_reference(value):
        return
    if isinstance(value, re.Pattern | np.dtype):
        return
    for element in _elements(value):
        validate_value(element, is_config)


def _elements(value: Any) -> Iterable[Any]:
    """Returns what is in a container or record. Raises NonConfigFieldError for anything else."""
    if is_record(value):
        return record_fields(value).values()
    if type(value) is dict:
        for key in value:
            if type(key) not in (str, int):
                raise NonConfigFieldError(f"{value!r} has the key {key!r}: keys are str or int")
        return value.values()
    if type(value) in (list, tuple, set, frozenset):
        return value
    raise NonConfigFieldError(
        f"a config cannot hold {value!r} of type {type(value).__qualname__}: only plain data, "
        "functions, classes and configs; wrap what it is made of with config_for_function or "
        "config_for_class"
    )


def has_reference(value: Any) -> bool:
    """Returns whether a value is a class, a function, or a wrapped one such as a jitted function.

    A method of an object is none: the object is not in the name.
    """
    holder = getattr(value, "__self__", None) if inspect.isroutine(value) else None
    if holder is not None and not isinstance(holder, type | types.ModuleType):
        return False
    return isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__"))


# -- Annotations -------------------------------------------------------------------------------


def convert_value(value: Any, annotation: Any) -> Any:
    """Returns the value as the annotation's own converter makes it (DType), or as it is.

    Scalars of NumPy become plain ones.
    """
    if value is None or value is REQUIRED:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    for option in options(annotation):
        convert = getattr(option, "__config_convert__", None)
        if convert is not None:
            return convert(value)
    return value


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a value fits an annotation; containers are looked into.

    An int fits a float; a bool is not an int. What cannot be checked (a type variable, a string
    that names a class not yet known) fits.
    """
    if value is REQUIRED or annotation is Any or isinstance(annotation, TypeVar | str):
        return True
    members = options(annotation)
    if len(members) > 1:
        return any(fits(value, option) for option in members)
    origin = typing.get_origin(annotation)
    if origin is None:
        return _fits_class(value, annotation)
    return _fits_generic(value, origin, typing.get_args(annotation))


def describe_annotation(annotation: Any) -> str:
    """Returns an annotation as a reader writes it."""
    members = [option for option in options(annotation) if option is not RequiredFieldValue]
    if len(members) > 1:
        return " | ".join(map(describe_annotation, members))
    (annotation,) = members
    if annotation is type(None):
        return "None"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def named_values(annotation: Any) -> list[str]:
    """Returns the values that an annotation names one by one: those of its enums and literals."""
    named: list[str] = []
    for option in options(annotation):
        if isinstance(option, type) and issubclass(option, enum.Enum):
            named += [member.name.lower() for member in option]
        elif typing.get_origin(option) is typing.Literal:
            named += map(str, typing.get_args(option))
    return named


def options(annotation: Any) -> list[Any]:
    """Returns the members of a union, or the annotation alone."""
    if isinstance(annotation, typing.TypeAliasType):
        annotation = annotation.__value__
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [o for member in typing.get_args(annotation) for o in options(member)]
    return [annotation]


def _fits_class(value: Any, annotation: Any) -> bool:
    if annotation is None:
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is Callable or annotation is typing.Callable:
        return callable(value)
    if isinstance(annotation, type):
        if hasattr(annotation, "__config_convert__"):
            return isinstance(value, str)
        with contextlib.suppress(TypeError):  # A protocol that says nothing at run time.
            return isinstance(value, annotation)
    return True  # What has no check of its own.


def _fits_generic(value: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    if origin is Literal:
        return value in args
    if origin is type:
        return isinstance(value, type) and (
            not isinstance(args[0], type) or issubclass(value, args[0])
        )
    if origin is Callable:
        return callable(value)
    if origin is typing.Annotated:
        return fits(value, args[0])
    if not isinstance(origin, type) or not isinstance(value, origin):
        return not isinstance(origin, type)
    if issubclass(origin, Mapping):
        return all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if issubclass(origin, tuple) and not (len(args) == 2 and args[1] is Ellipsis):
        return len(value) == len(args) and all(map(fits, value, args))
    if issubclass(origin, Iterable) and not isinstance(value, str | bytes):
        return all(fits(element, args[0]) for element in value)
    return not (isinstance(value, str | bytes) and issubclass(origin, Sequence))


# -- Names of importable objects -----------------------------------------------------------------


def reference(value: Any) -> str:
    """Returns `module:qualname` of a class, function or enum member, by its public name."""
    if isinstance(value, enum.Enum):
        return f"{reference(type(value))}.{value.name}"
    module = getattr(value, "__module__", None) or "builtins"
    name = getattr(value, "__qualname__", None) or repr(value)
    public, private, _ = module.partition("._")
    if private and getattr(sys.modules.get(public), name, None) is value:
        return f"{public}:{name}"
    return f"{module}:{name}"


def resolve_reference(text: str) -> Any:
    """Returns the object that `module:qualname` names. Raises ValueError if there is none."""
    module_name, _, qualname = text.partition(":")
    try:
        value = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ValueError(f"{text!r}: there is no module {module_name!r}.") from None
        raise
    for part in qualname.split("."):
        if not hasattr(value, part):
            near = did_you_mean(part, [name for name in dir(value) if not name.startswith("_")])
            raise ValueError(f"{text!r}: {value!r} has no {part!r}; {near}")
        value = getattr(value, part)
    return value
