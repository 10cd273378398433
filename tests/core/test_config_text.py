import dataclasses
import enum
import math
import random
from typing import Any, NamedTuple

import jax
import optax
import pytest

from moelib.core import config_text
from moelib.core.config import (
    REQUIRED,
    ConfigBase,
    ConfigOr,
    Configurable,
    DType,
    InstantiableConfig,
    InvalidConfigValueError,
    Required,
    UnknownFieldError,
    config_class,
    config_for_class,
    config_for_function,
)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Shade(enum.Enum):
    NONE = "none"
    DARK = "dark"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0
    size: int = dataclasses.field(init=False, default=2)


class Pair(NamedTuple):
    a: Any
    b: Any


class Layer(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        rate: float = 0.5
        anything: Any = None
        dtype: DType | None = None
        bias: bool = False


class Wide(Layer):
    @config_class
    class Config(Layer.Config):
        factor: int = 4


class Model(Configurable):
    @config_class
    class Config(Configurable.Config):
        layers: list[Layer.Config] = []
        by_name: dict[str, InstantiableConfig] = {}
        layer: Layer.Config = Layer.default_config().set(dim=8)
        color: Color = Color.RED
        shade: Shade | None = None
        sizes: tuple[int, ...] = (1, 2)
        names: list[str] = []
        optimizer: InstantiableConfig | None = None
        lr: ConfigOr[float] = 0.1
        max_step: int | None = None
        title: str = "t"


@config_class
class Plain(ConfigBase):
    fn: int = 3  # A field by the name of an opening line.
    inner: Layer.Config = Layer.default_config()


def schedule(peak: float, steps: int = 10) -> tuple[float, int]:
    return peak, steps


STRINGS = ["", "a", "a: b", "x\ny\x0b\u2028", "'\"\\", "mod:name", "<list>", "#", " a ", "é"]
STRINGS += ["REQUIRED"]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Returns any value that a config may hold."""
    leaves = [
        lambda: rng.choice(STRINGS),
        lambda: rng.choice([None, True, False, REQUIRED, b"\x00a", math.inf, -math.inf]),
        lambda: rng.randint(-(10**18), 10**18),
        lambda: rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300),
        lambda: rng.choice([Color.RED, Level.LOW, Color, schedule, jax.nn.silu, optax.adamw, len]),
    ]
    if depth > 3 or rng.random() < 0.3:
        return rng.choice(leaves)()

    def inside() -> Any:
        return random_value(rng, depth + 1)

    def times() -> range:
        return range(rng.randint(0, 3))

    return rng.choice(
        [
            lambda: [inside() for _ in times()],
            lambda: tuple(inside() for _ in times()),
            lambda: {rng.choice([*STRINGS, 0, 12, -3]): inside() for _ in times()},
            lambda: Pair(inside(), inside()),
            lambda: Point(inside(), y=inside()),
            lambda: Layer.default_config().set(anything=inside(), dim=rng.randint(0, 9)),
            lambda: Wide.default_config().set(anything=inside(), rate=rng.random()),
            lambda: Plain(inner=Wide.default_config().set(anything=inside())),
            lambda: config_for_function(optax.chain).set(args=[inside() for _ in times()]),
            lambda: config_for_function(optax.adamw).set(learning_rate=inside(), mask=inside()),
            lambda: config_for_class(Point).set(x=inside()),
        ]
    )()


@pytest.mark.parametrize("seed", range(150))
def test_any_config_is_read_back_from_its_text(seed):
    cfg = Layer.default_config().set(anything=random_value(random.Random(seed)))
    text = cfg.debug_string()
    again = config_text.parse(text, trusted=True)
    assert again == cfg
    assert again.debug_string() == text
    assert cfg.clone().debug_string() == text
    assert config_text.diff(cfg, again) == []
    for path, value in cfg.to_flat_dict().items():
        if not callable(value):  # Functions and classes open the lines of their configs.
            assert cfg.get_recursively(path) is value


def test_the_text_has_a_line_a_value():
    cfg = Model.default_config().set(
        layers=[Wide.default_config().set(dim=1, dtype="bfloat16")],
        optimizer=config_for_function(optax.sgd).set(learning_rate=0.1),
        color=Color.BLUE,
    )
    expected = f"""\
klass: {__name__}:Model
layers: <list>
layers[0].klass: {__name__}:Wide
layers[0].dim: 1
layers[0].rate: 0.5
layers[0].dtype: 'bfloat16'
layers[0].bias: False
layers[0].factor: 4
by_name: {{}}
layer.klass: {__name__}:Layer
layer.dim: 8
layer.rate: 0.5
layer.bias: False
color: {__name__}:Color.BLUE
sizes: (1, 2)
names: []
optimizer.fn: optax:sgd
optimizer.learning_rate: 0.1
optimizer.nesterov: False
lr: 0.1
title: 't'
"""
    assert cfg.debug_string() == expected


def test_a_value_that_was_reset_to_none_stays_none():
    cfg = Layer.default_config().set(dim=1, dtype="int8")
    model = Model.default_config().set(layer=cfg, optimizer=config_for_function(schedule))
    model.optimizer.steps = REQUIRED  # pyrefly: ignore[missing-attribute]
    model.layer.dtype = None
    assert config_text.parse(model.debug_string()) == model


def test_comments_and_empty_lines_are_ignored():
    text = f"# A layer.\n\nklass: {__name__}:Layer\n  # dim:\ndim: 3\n"
    assert config_text.parse(text) == Layer.default_config().set(dim=3)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("dim 3", r"line 2:.*'path: value'.*'dim 3'"),
        ("dim: 3 +", r"line 2: dim: '3 \+'"),
        ("dim: print(3)", r"line 2: dim: 'print\(3\)'"),
        ("dim: 'a'", r"line 2:.*dim='a':.*str.*int"),
        ("dim: 3\ndim: 4", r"line 3: line 2 has set this path"),
        ("dim: 3\ndim.foo: 4", r"line 3: line 2 sets .* to '3'"),
        ("dim.foo: 4\ndim: 3", r"line 2: line 3 sets .* to '3'"),
        ("anything: <list>\nanything[1]: 4", r"line 2: .*<list> .*\[1\]"),
        ("anything: <tuple>\nanything[0]: 3\nanything.x: 4", r"line 2: .*<tuple> .*'x'"),
        ("anything: {'a': 1, 'a': 2}", "line 2"),
        ("anything: {**{'a': 1}}", "line 2"),
        ("anything: re.compile('a', flags=2)", "line 2"),
        ("dim['\\x']: 3", "line 2"),
        ("dims: 3", r"line 2:.*'dims'.*'dim'"),
        ("anything: jax.nn:sillu", r"line 2: .*'jax.nn:sillu':.*'silu'"),
        ("anything: m:f.<locals>.g", "line 2"),
        ("anything[0].dim: 3", "line 2"),
        ("\n".join(f"anything{'[0]' * n}: <list>" for n in range(600)), "line 1: .*deeply"),
        ("anything: " + "-" * 10_000, r"line 2: .*'--.*--' is not a literal"),
        ("anything: no_such_module_at_all:x", r"line 2:.*'no_such_module_at_all'"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(lines, message):
    with pytest.raises(ValueError, match=message):
        config_text.parse(f"klass: {__name__}:Layer\n{lines}\n")


def test_values_read_from_text_know_their_line():
    text = Layer.default_config().set(dim=3).debug_string()
    assert config_text.parse(text, source="config.txt:").origin("dim") == "config.txt:2"
    with pytest.raises(ValueError, match=r"config.txt:1: expected 'path: value'"):
        config_text.parse("a", source="config.txt:")


def config_with_flags() -> Model.Config:
    return Model.default_config().set(
        layers=[Layer.default_config()],
        by_name={"x.y": Layer.default_config(), "b": Layer.default_config()},
        optimizer=config_for_function(schedule),
    )


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("layer.dim=3", "layer.dim", 3),
        ("layer.dim = 1e3", "layer.dim", 1000),
        ("layer.rate=1e-3", "layer.rate", 0.001),
        ("layer.rate=2", "layer.rate", 2),
        ("layer.bias=true", "layer.bias", True),
        ("layer.dtype=bfloat16", "layer.dtype", "bfloat16"),
        ("layer.dtype=none", "layer.dtype", None),
        ("color=blue", "color", Color.BLUE),
        ("color=BLUE", "color", Color.BLUE),
        ("shade=DARK", "shade", Shade.DARK),
        ("shade=NONE", "shade", Shade.NONE),
        ("shade=none", "shade", Shade.NONE),
        ("shade=None", "shade", None),
        ("sizes=3,4", "sizes", (3, 4)),
        ("sizes=[3]", "sizes", (3,)),
        ("sizes[1]=7", "sizes", (1, 7)),
        ("names=('a', 'b')", "names", ["a", "b"]),
        ("title=none", "title", "none"),
        ("title=3", "title", "3"),
        ("title='3'", "title", "3"),
        ("title=gs://bucket:x", "title", "gs://bucket:x"),
        ("title=a:b", "title", "a:b"),
        ("title=a=b", "title", "a=b"),
        ("title=", "title", ""),
        ("lr=3", "lr", 3),
        ("max_step=10", "max_step", 10),
        ("max_step=None", "max_step", None),
        ("layer.anything=word", "layer.anything", "word"),
        ("layer.anything=jax.nn:silu", "layer.anything", jax.nn.silu),
        ("layers[0].dim=5", "layers[0].dim", 5),
        ("by_name['x.y'].dim=6", "by_name['x.y'].dim", 6),
        ("by_name.b.dim=6", "by_name.b.dim", 6),
        ("optimizer.steps=3", "optimizer.steps", 3),
    ],
)
def test_a_flag_is_read_as_its_field_asks(assignment, path, value):
    cfg = config_with_flags()
    config_text.set_from_text(cfg, assignment)
    assert cfg.get_recursively(path) == value
    assert type(cfg.get_recursively(path)) is type(value)


def test_a_flag_can_put_in_another_class_or_function():
    cfg = Model.default_config()
    config_text.set_from_text(cfg, f"layer={__name__}:Wide")
    assert cfg.layer == Wide.default_config()
    config_text.set_from_text(cfg, f"lr={__name__}:schedule")
    assert cfg.lr == config_for_function(schedule)
    config_text.set_from_text(cfg, f"optimizer={__name__}:Point")
    assert cfg.optimizer == config_for_class(Point)
    cfg.optimizer = config_for_function(schedule).set(steps=config_for_function(schedule))
    config_text.set_from_text(cfg, f"optimizer.steps={__name__}:Point")
    assert cfg.optimizer.steps == config_for_class(Point)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("layer.dim", "--set layer.dim: expected path=value"),
        ("layer.dim=x", r"--set layer.dim=x: 'x' is not int\.$"),
        ("layer.bias=on", r"--set layer.bias=on: 'on' is not bool; choose one of: False, True"),
        ("color=Blu", r"--set color=Blu: 'Blu' is not Color; did you mean 'BLUE'"),
        ("layer.bias=1", r"'1'.*bool"),
        ("color=green", r"--set color=green: 'green'.*Color"),
        ("shade=light", r"'light'.* Shade \| None"),
        ("sizes=1,a", r"'1,a'.*tuple\[int, ...\]"),
        ("sizes[0]=1.5", r"--set sizes\[0\]=1.5: '1.5' is not int"),
        ("layer.dtype=float33", r"layer\.dtype=float33: 'float33'.*'float32'"),
        ("layer.dtype=bf16", r"layer\.dtype=bf16: 'bf16'.*'bfloat16'.*\?$"),
        ("layer.anything=jax.nn:sillu", r"'sillu'.*'silu'"),
        ("max_step=soon", r"'soon'.*int \| None"),
        ("layer.anything=.jax.nn:silu", r"'.jax.nn:silu'"),
        ("optimizer.decay=fast", r"'fast'.*like 0.5"),
        ("optimizer=0,1", r"'0,1' is not .*; write the module and the name of a class"),
        ("optimizer=adamw", r"'adamw' is not .*as in module:name"),
        ("max_step=" + "-" * 10_000, r"'--.*--' is not int"),
        ("max_step=" + "[" * 10_000, r"'\[\[.*\[\[' is not int"),
        ("max_step=" + "9" * 5000, r"'99.*99' is not int"),
        (f"max_step={__name__}:Layer", "is not int"),
        ("layer.dtype=" + "9" * 5000, "is not a dtype"),
    ],
)
def test_a_flag_of_another_type_is_refused(assignment, message):
    def decaying(decay=0.5):
        return decay

    cfg = config_with_flags().set(optimizer=config_for_function(decaying))
    cfg.layer.anything = jax.nn.relu
    with pytest.raises(InvalidConfigValueError, match=message):
        config_text.set_from_text(cfg, assignment)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("layr.dim=3", r"'layr'.*'layer'"),
        ("layer.dims=3", r"'dims'.*'dim'"),
        ("layers[3].dim=3", "layers has no '?3'?"),
        ("title.x=3", r"'t':.*'x'"),
        ("layer..dim=3", r"layer\.\.dim"),
        (r"by_name['\x']=3", r"by_name.*x"),
        ("layers[" + "9" * 5000 + "]=3", r"layers\[999.*digits"),
        ("by_name.c=3", r"by_name.*'c'"),
    ],
)
def test_a_flag_that_leads_nowhere_is_refused(assignment, message):
    with pytest.raises(UnknownFieldError, match=message):
        config_text.set_from_text(config_with_flags(), assignment)


def test_a_difference_names_paths_and_both_texts():
    a = Model.default_config()
    b = a.clone(color=Color.BLUE, optimizer=config_for_function(schedule))
    b.layer.rate = 0.25
    assert config_text.diff(a, b) == [
        ("layer.rate", "0.5", "0.25"),
        ("color", f"{__name__}:Color.RED", f"{__name__}:Color.BLUE"),
        ("optimizer.fn", None, f"{__name__}:schedule"),
        ("optimizer.steps", None, "10"),
    ]


def test_every_value_is_explained():
    cfg = Model.default_config().set(layers=[Layer.default_config()])
    config_text.set_from_text(cfg, "layers[0].dim=3")
    origins = {x.path: (x.text, x.origin) for x in config_text.leaves(cfg)}
    assert origins["layers[0].dim"] == ("3", "--set layers[0].dim=3")
    assert origins["layers[0].rate"] == ("0.5", f"default of {__name__}:Layer.Config")
    assert origins["layer.dim"][1].startswith(f"{__file__}:")
    assert origins["color"][1] == f"default of {__name__}:Model.Config"
    assert origins.keys() == cfg.to_flat_dict().keys()


def test_a_default_without_text_is_not_printed():
    marker = object()

    def with_marker(x: int = 1, default: Any = marker) -> Any:
        return x, default

    cfg = config_for_function(with_marker)
    assert "default:" not in cfg.debug_string()
    assert cfg.instantiate() == (1, marker)


def test_a_flag_adds_a_config_to_a_dict_of_configs():
    class Holder(Configurable):
        @config_class
        class Config(Configurable.Config):
            by_name: dict[str, Configurable.Config] = {}
            sizes: dict[str, int] = {}

    cfg = Holder.default_config()
    config_text.set_from_text(cfg, "by_name.new=moelib.learner.learner:Learner")
    config_text.set_from_text(cfg, "by_name.new.update_rules=()")
    assert cfg.by_name["new"].update_rules == ()
    for text in ("by_name.other=3", "by_name.other=moelib.learner.learner:param_ema", "sizes.a=3"):
        with pytest.raises((UnknownFieldError, InvalidConfigValueError), match=r"other|sizes"):
            config_text.set_from_text(cfg, text)
