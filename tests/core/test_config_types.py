import collections
import dataclasses
import enum
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from experiments import flame_moe
from moelib.core.config import (
    REQUIRED,
    ConfigBase,
    DType,
    InvalidConfigValueError,
    NonConfigFieldError,
    Required,
    config_class,
    did_you_mean,
)
from moelib.core.config_types import (
    Limit,
    NonNegativeFloat,
    PositiveInt,
    advice,
    convert_value,
    describe_annotation,
    fits,
    reference,
    resolve_reference,
    validate_value,
)
from moelib.core.module_names import find_module

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    a: int
    b: Any


@dataclasses.dataclass
class Point:
    x: Any


@config_class
class Holder(ConfigBase):
    held: Any = None


class Speaks(Protocol):
    def speak(self) -> str: ...


type Number = int | float


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (1.0, int, False),
        (1, float, True),
        (True, float, False),
        (1, bool, False),
        (None, int, False),
        (None, int | None, True),
        (None, None, True),
        (REQUIRED, int, True),
        (3, Required[int], True),
        ("a", Required[int], False),
        ("a", str | int, True),
        (1.5, Number, True),
        ("a", Number, False),
        ([1, 2], list[int], True),
        ([1, "a"], list[int], False),
        ((1, 2), list[int], False),
        ((1, 2), tuple[int, ...], True),
        ((), tuple[int, ...], True),
        ((1, "a"), tuple[int, str], True),
        ((1, 2, 3), tuple[int, int], False),
        ({"a": [1]}, dict[str, list[int]], True),
        ({"a": ["b"]}, dict[str, list[int]], False),
        ({"a": 1}, Mapping[str, int], True),
        ([1], Sequence[int], True),
        ("ab", Sequence[str], False),
        (1, PositiveInt, True),
        (0, PositiveInt, False),
        (True, PositiveInt, False),
        (None, NonNegativeFloat | None, True),
        (-0.5, NonNegativeFloat | None, False),
        (math.nan, NonNegativeFloat, False),
        (math.inf, NonNegativeFloat, False),
        ([0.5, 1], list[Annotated[float, Limit("<", 1)]], False),
        (REQUIRED, Required[PositiveInt], True),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        (abs, Callable[[int], int], True),
        (3, Callable[[int], int], False),
        (abs, Callable, True),
        (bool, type[int], True),
        (str, type[int], False),
        (str, type, True),
        (Color.RED, Color, True),
        ("red", Color, False),
        (Pair(1, 2), Pair, True),
        (3, Any, True),
        (3, T, True),
        (3, "ClassNotYetKnown", True),
        (3, Speaks, True),
    ],
)
def test_values_fit_annotations(value, annotation, expected):
    assert fits(value, annotation) is expected


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 1, 1.5, "a", b"a", Color.RED, REQUIRED),
        *([1, (2, [3])], {"a": {1: None}}, Pair(1, [2]), Point(x=(1,))),
        *(abs, len, int, jnp.bfloat16, jax.nn.silu, jax.nn.relu, Point, lambda x: x),
    ],
)
def test_plain_data_functions_and_classes_may_be_held(value):
    refused = object()
    with pytest.raises(NonConfigFieldError, match=f"hold {re.escape(repr(refused))}"):
        validate_value([value, refused])  # Only the last element is refused.
    assert Holder(held=value).held == value


@pytest.mark.parametrize(
    "value",
    [
        *(object(), np.ones(2), functools.partial(abs, 1), iter([1]), 1j),
        *(Pair(1, object()), Point(object()), collections.defaultdict(list), {(1, 2): 3}),
        *(
            "a".join,
            Holder().clone,
            {Color.RED: 1},
            {1},
            re.compile("a"),
            np.dtype("int8"),
        ),
    ],
)
def test_objects_may_not_be_held(value):
    advice = "wrap it in a def" if callable(value) else "config_for_function|key"
    with pytest.raises(NonConfigFieldError, match=advice):
        validate_value(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("bfloat16", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (np.float32, "float32"),
        (np.dtype("int8"), "int8"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float32", "float32"),
        (ml_dtypes.int4, "int4"),
        ("int4", "int4"),
    ],
)
def test_a_dtype_becomes_its_name(value, name):
    assert convert_value(value, DType | None) == name


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("float33", "'float32'"),
        ("bf16", "'bfloat16'"),
        ("fp32", "'float32'"),
        ("BFLOAT16", "'bfloat16'"),
        (3, "choose one of"),
        ("float8_e4m3fnn", "'float8_e4m3fn'"),
    ],
)
def test_an_unknown_dtype_is_refused_with_the_nearest(value, advice):
    with pytest.raises(InvalidConfigValueError, match=rf"{value}.*{advice}"):
        convert_value(value, DType)


def test_scalars_of_numpy_become_plain():
    @config_class
    class Sizes(ConfigBase):
        num: int = 1
        rate: float = 1.0
        on: bool = False

    cfg = Sizes(num=np.int64(3), rate=np.float32(0.5), on=np.bool_(True))  # pyrefly: ignore
    assert [type(value) for _, value in cfg.items()] == [int, float, bool]


@pytest.mark.parametrize(
    ("name", "names", "text"),
    [
        ("num_expert", ["num_experts", "num_heads", "dim"], "did you mean 'num_experts' "),
        ("zzz", ["num_experts", "num_heads", "dim"], "choose one of: dim, num_experts, num_heads."),
        ("zzz", [], "there are none."),
        ("zzz", [f"layer{i}" for i in range(60)], "choose one of: .* and 40 more."),
        ("DUALPIPE", ["DualPipe_V", "ZB_V", "gpu"], "did you mean 'DualPipe_V'[?]"),
        ("zbv", ["DualPipe_V", "ZB_V", "gpu"], "did you mean 'ZB_V'[?]"),
        ("GPU", ["gpu", "GPU"], "did you mean 'GPU' or 'gpu'"),
    ],
)
def test_near_names_are_proposed_best_first_in_any_case(name, names, text):
    assert re.match(text, did_you_mean(name, names))


@pytest.mark.parametrize(
    ("annotation", "flag", "code"),
    [
        (Required[Color], "; did you mean 'RED'?", "; choose one of: Color.RED."),
        (Literal["no", "red"], "; did you mean 'red'?", "; choose one of: no, red."),
        (bool | None, "; did you mean 'True'?", "; choose one of: False, True."),
        (Required[int], ".", "."),
    ],
)
def test_advice_is_the_values_that_an_annotation_names(annotation, flag, code):
    assert advice(annotation, "Red") == flag
    assert advice(annotation) == code


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Required[PositiveInt], "int >= 1"),
        (Annotated[float, Limit(">=", 0), Limit("<", 1)] | None, "float >= 0 and < 1 | None"),
        (list[DType], "list[moelib.core.config_types.DType]"),
    ],
)
def test_annotations_are_described_as_code(annotation, text):
    assert describe_annotation(annotation) == text


def test_a_number_beyond_the_limits_of_its_field_is_refused():
    @config_class
    class Sizes(ConfigBase):
        num: Required[PositiveInt] = REQUIRED

    with pytest.raises(InvalidConfigValueError, match=r"Sizes.num=0: expected int >= 1"):
        Sizes(num=0)


@pytest.mark.parametrize(
    "value", [Color.RED, Point, abs, jax.nn.silu, jnp.float32, jax.lax.scan, np.exp, Pair]
)
def test_a_reference_names_its_object(value):
    assert resolve_reference(reference(value)) is value


def test_private_modules_are_named_by_their_public_one():
    assert reference(jax.Array) == "jax:Array"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no.such.module:x", r"'no.such.module'"),
        ("moelib.layers" + ".a" * 3_000 + ":x", "there is no module 'moelib.layers.a"),
        ("math:sqrtt", r"'sqrtt'.*'sqrt'"),
        ("math:sqrt.x", "'x'"),
    ],
)
def test_a_reference_to_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        resolve_reference(text)


def test_an_error_inside_a_referenced_module_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_a_user.py").write_text("import no_such_package_of_a_user")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_of_a_user"):
        resolve_reference("broken_module_of_a_user:x")


@pytest.mark.parametrize("package", ["experiments", "moelib_experiments"])
def test_named_configs_are_found_under_the_name_of_repository_and_wheel(package):
    # An editable installation has both names; otherwise one of them stands for the other.
    found = find_module(f"{package}.flame_moe")
    assert found in ("experiments.flame_moe", "moelib_experiments.flame_moe")
    config = resolve_reference(f"{package}.flame_moe:tiny")
    assert inspect.getsourcefile(config) == flame_moe.__file__


@pytest.mark.parametrize("name", ["experiments.nothing", "json.nothing", "json.decoder.nothing"])
def test_a_module_that_does_not_exist_is_not_found(name):
    assert find_module(name) is None
