"""Types of config fields: the values that a config may hold, checked against annotations."""

import contextlib
import dataclasses
import difflib
import enum
import importlib
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from moelib.core.errors import UserError, masked
from moelib.core.module_names import find_module

if TYPE_CHECKING:
    import numpy as np  # Imported where it is used, since `moelib --help` needs none.

T = TypeVar("T")


class UnknownFieldError(UserError, AttributeError):
    """A field that the config does not have."""


class NonConfigFieldError(UserError, TypeError):
    """A value that no config may hold: only plain data, functions, classes and configs."""


class InvalidConfigValueError(UserError, TypeError):
    """A value that does not fit its field's annotation."""


class RequiredFieldValue(enum.Enum):
    """The type of REQUIRED."""

    REQUIRED = enum.auto()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = RequiredFieldValue.REQUIRED  # The value of a field that must be set.
if typing.TYPE_CHECKING:  # A field is set wherever it is read.
    Required = typing.Annotated[T, "must be set"]
else:
    Required = Union[T, RequiredFieldValue]  # noqa: UP007 (subscripted: Required[int])


def is_config(value: Any) -> bool:
    """Returns whether a value is a config, with `items()`, `origin(name)` and `_header()`."""
    return hasattr(type(value), "_header")


def is_config_class(value: Any) -> bool:
    """Returns whether a value is a class of configs."""
    return isinstance(value, type) and hasattr(value, "_header")


# -- Dtypes --------------------------------------------------------------------------------------

_COMMON_DTYPES = (
    "bfloat16", "bool", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int4",
    "int8", "int32", "int64", "uint8",
)  # fmt: skip

if typing.TYPE_CHECKING:
    DType = str | Any  # Set as a name or as a type of NumPy or JAX, read as a name.
else:

    class DType(str):
        """The name of a dtype; a field annotated so takes "bfloat16" or `jnp.bfloat16` alike."""

        __slots__ = ()

        @classmethod
        def __config_convert__(cls, value: Any) -> str:
            """Returns the name of a dtype. Raises InvalidConfigValueError for other values."""
            try:
                return dtype(value).name
            except (SyntaxError, TypeError, ValueError) as error:
                near = did_you_mean(cut(str(value)), _COMMON_DTYPES)
                raise InvalidConfigValueError(
                    f"{shortened(value)} is not a dtype; {near}"
                ) from error


def is_dtype_name(name: str) -> bool:
    """Returns whether a name is that of a dtype of numbers, by which modules export it too."""
    pattern = r"bool_?|u?int\d+|b?float\d+(_e\d+m\d+[a-z\d]*)?|complex\d+"
    return re.fullmatch(pattern, name) is not None


def dtype(name: Any) -> "np.dtype":
    """Returns a dtype by its name, those of ml_dtypes included, or of a scalar type."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # Comes with JAX; configs without such a dtype need none.

        return np.dtype(getattr(ml_dtypes, str(name), name))


# -- Similar names -------------------------------------------------------------------------------


def similar_names(name: str, allowed: Iterable[str]) -> list[str]:
    """Returns the allowed names most like `name` in any case, best first, at most three."""
    names = sorted(map(str, allowed))
    near = difflib.get_close_matches(name.lower(), {x.lower() for x in names}, n=3, cutoff=0.5)
    return [each for lower in near for each in names if each.lower() == lower][:3]


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Returns the end of an error message: the nearest names, or all of them if none is near."""
    allowed = sorted(map(str, allowed))
    near = similar_names(name, allowed)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if not allowed:
        return "there are none."
    more = f", and {len(allowed) - 20} more" if len(allowed) > 20 else ""
    return f"choose one of: {', '.join(allowed[:20])}{more}."


def shortened(value: Any) -> str:
    """Returns a value as code for an error message, its middle omitted if it is long."""
    try:
        return cut(repr(value))
    except ValueError:  # An integer of thousands of digits.
        return f"<{type(value).__name__}>"


def cut(text: str, length: int = 200) -> str:
    """Returns a text without passwords, its middle omitted if it is longer than `length`."""
    text = masked(text)
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-length // 2 :]}"


# -- Values ------------------------------------------------------------------------------------

_SCALARS = (type(None), bool, int, float, str, bytes, enum.Enum)


def is_record(value: Any) -> bool:
    """Returns whether a value is a dataclass instance or a named tuple."""
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    )


def is_record_class(value: Any) -> bool:
    """Returns whether a value is a dataclass or a class of named tuples."""
    return isinstance(value, type) and (
        dataclasses.is_dataclass(value) or (issubclass(value, tuple) and hasattr(value, "_fields"))
    )


def record_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance or named tuple, by name, that construct it."""
    names = getattr(value, "_fields", None)
    if names is None:
        names = [field.name for field in dataclasses.fields(value) if field.init]
    return {name: getattr(value, name) for name in names}


def children(value: Any) -> list[tuple[str | int, Any]]:
    """Returns the values directly inside a config, record or container, by key."""
    if is_config(value):
        return list(value.items())
    if is_record(value):
        return list(record_fields(value).items())
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


def validate_value(value: Any) -> None:
    """Raises NonConfigFieldError if a config may not hold `value`, or an element of it."""
    if isinstance(value, str) and "://" in value and masked(value) != value:
        raise NonConfigFieldError(
            f"{masked(value)!r} has a password, which the texts of a config would show; set it in "
            "an environment variable of the library that reads the address"
        )
    if isinstance(value, _SCALARS) or is_config(value) or has_reference(value):
        return
    for element in _elements(value):
        validate_value(element)


def _elements(value: Any) -> Iterable[Any]:
    """Returns the elements of a container. Raises NonConfigFieldError for other values."""
    if is_record(value):
        return record_fields(value).values()
    if type(value) is dict:
        for key in value:
            if type(key) not in (str, int):
                raise NonConfigFieldError(f"{value!r} has the key {key!r}: keys are str or int")
        return value.values()
    if type(value) in (list, tuple):
        return value
    wrap = "wrap it in a def, or " if callable(value) else ""
    raise NonConfigFieldError(
        f"a config cannot hold {value!r} of type {type(value).__qualname__}: only numbers, "
        f"strings, lists, tuples, dicts, functions, classes and configs; {wrap}describe it by "
        "config_for_function or config_for_class"
    )


def has_reference(value: Any) -> bool:
    """Returns whether a value is a class or function (jitted, for example) with a name.

    Methods of an object are excluded: their name does not identify the object.
    """
    holder = getattr(value, "__self__", None) if inspect.isroutine(value) else None
    if holder is not None and not isinstance(holder, type | types.ModuleType):
        return False
    return isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__"))


# -- Annotations -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit of a number that an annotation states: `Annotated[float, Limit("<", 1)]`."""

    relation: Literal["<", "<=", ">", ">="]
    value: float

    def __str__(self) -> str:
        return f"{self.relation} {self.value}"

    def allows(self, number: float) -> bool:
        """Returns whether a number is within the limit; NaN never is."""
        return _RELATIONS[self.relation](number, self.value)


_RELATIONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def without_limits(annotation: Any) -> Any:
    """Returns the annotation of numbers that `Annotated` limits, or any other as it is."""
    limited = typing.get_origin(annotation) is Annotated
    return typing.get_args(annotation)[0] if limited else annotation


PositiveInt = Annotated[int, Limit(">=", 1)]
NonNegativeInt = Annotated[int, Limit(">=", 0)]
PositiveFloat = Annotated[float, Limit(">", 0), Limit("<", math.inf)]
NonNegativeFloat = Annotated[float, Limit(">=", 0), Limit("<", math.inf)]


def convert_value(value: Any, annotation: Any) -> Any:
    """Returns the value converted by its annotation (DType); NumPy scalars become plain ones."""
    if value is None or value is REQUIRED:
        return value
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
        value = value.item()
    for option in options(annotation):
        convert = getattr(option, "__config_convert__", None)
        if convert is not None:
            return convert(value)
    return value


def fits(value: Any, annotation: Any) -> bool:
    """Returns whether a value and its elements fit an annotation.

    An int fits float; a bool does not fit int. Annotations that cannot be checked (a type variable,
    a string that names a class not yet defined) fit everything.
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
    """Returns an annotation as written in code."""
    members = [option for option in options(annotation) if option is not RequiredFieldValue]
    if len(members) > 1:
        return " | ".join(map(describe_annotation, members))
    (annotation,) = members
    if annotation is type(None):
        return "None"
    if typing.get_origin(annotation) is Annotated:
        kind, *limits = typing.get_args(annotation)
        return " ".join([describe_annotation(kind), " and ".join(map(str, limits))])
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def named_values(annotation: Any) -> dict[str, Any]:
    """Returns the values that a Literal or an enum names, by name; none for another annotation."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return dict(annotation.__members__)
    if typing.get_origin(annotation) is Literal:
        return {str(value): value for value in typing.get_args(annotation)}
    return {}


def check_parameters(name: str, function: Callable[..., Any], *given: str, **named: Any) -> None:
    """Raises UserError if a function does not take what it is called with.

    Args:
        name: Its name in messages.
        function: The function.
        *given: Names of its positional arguments.
        **named: Its arguments by name, whose values are not read.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # Of a function in C.
        return
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        wanted, has = (", ".join(names) for names in ((*given, *named), signature.parameters))
        raise UserError(
            f"{name} has the parameters ({has:.80}): {error}; make it take ({wanted})."
        ) from None


def refuse_unknown(function: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises UserError if an argument is none of a function's."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            near = did_you_mean(name, allowed)
            raise UserError(f"{function} has no argument {name!r}; {near}")


def advice(annotation: Any, text: str | None = None) -> str:
    """Returns the end of an error message: the values that an annotation names, if it does.

    `text` is the wrong value of a flag, where a member of an enum has its bare name.
    """
    names: list[str] = []
    for option in options(annotation):
        if option is not RequiredFieldValue:
            is_member = text is None and isinstance(option, enum.EnumType)
            owner = f"{option.__name__}." if is_member else ""
            found = ("False", "True") if option is bool else named_values(option)
            names += [f"{owner}{name}" for name in found]
    if not names and text is not None and any(map(_is_built, options(annotation))):
        return "; write the module and the name of a class or a function, as in module:name."
    return f"; {did_you_mean(text or '', names)}" if names else "."


def _is_built(annotation: Any) -> bool:
    """Returns whether an annotation is of configs that build something."""
    kind = typing.get_origin(annotation) or annotation
    return is_config_class(kind) or getattr(kind, "__name__", "") == "InstantiableConfig"


def is_secret(annotation: Any) -> bool:
    """Returns whether an annotation is of a secret, whose wrong values no message shows."""
    return any(
        hasattr(option, "__config_secret__") or any(map(is_secret, typing.get_args(option)))
        for option in options(annotation)
    )


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
    if annotation is int or annotation is float:
        return isinstance(value, int | annotation) and not isinstance(value, bool)
    if annotation is Callable or annotation is typing.Callable:
        return callable(value)
    if isinstance(annotation, type):
        if hasattr(annotation, "__config_convert__"):
            return isinstance(value, annotation if is_secret(annotation) else str)
        with contextlib.suppress(TypeError):  # A protocol that is not runtime_checkable.
            return isinstance(value, annotation)
    return True


def _fits_generic(value: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    if origin is Literal:
        return value in args
    if origin is type:
        return isinstance(value, type) and (
            not isinstance(args[0], type) or issubclass(value, args[0])
        )
    if origin is Callable:
        return callable(value)
    if origin is Annotated:
        limits = (limit for limit in args[1:] if isinstance(limit, Limit))
        return fits(value, args[0]) and all(limit.allows(value) for limit in limits)
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
    """Returns the object that `module:qualname` names.

    Raises:
        UserError: If there is none.
    """
    if "<" in text:
        raise UserError(f"{text} was defined inside a function; text cannot name it.")
    module_name, _, qualname = text.partition(":")
    if (found := find_module(module_name)) is None:
        raise UserError(f"{shortened(text)}: there is no module {shortened(module_name)}.")
    value = importlib.import_module(found)
    for part in qualname.split("."):
        if not hasattr(value, part):
            near = did_you_mean(part, [name for name in dir(value) if not name.startswith("_")])
            owner = getattr(value, "__name__", type(value).__name__)
            raise UserError(f"{text!r}: {owner} has no {part!r}; {near}")
        value = getattr(value, part)
    return value
