"""A run is refused before its first step if no later process could read its config."""

import dataclasses
import enum
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.checkpoint.contents import list_checkpoints
from moelib.core.config import config_for_function
from moelib.core.config_text import parse
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec
from moelib.learner.optimizers import adamw_optimizer
from moelib.tasks.fit import fit
from moelib.train.readable import check_readable
from tests import tiny

HALF = np.float64(0.5)


def hold(value: Any, default: Any = HALF) -> None:
    """Has a config that holds any value."""


def plain() -> None:
    """Has a name of its own."""


@functools.wraps(plain)
def wrapper() -> None:
    """Has the name of another function."""


class Kind(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Base:
    @classmethod
    def make(cls) -> None:
        """Returns nothing."""


class Derived(Base):
    pass


@dataclasses.dataclass(frozen=True)
class Total:
    total: int
    more: dataclasses.InitVar[int] = 1

    def __post_init__(self, more: int) -> None:
        object.__setattr__(self, "total", self.total + more)


class Renamed:
    pass


Renamed.__qualname__ = "Earlier"


def of_notebook() -> None:
    """Is defined in a notebook."""


of_notebook.__module__ = "__main__"


def config_of(value: Any) -> Any:
    cfg = tiny.trainer_config("unused", evaler=False)
    cfg.learner.optimizer = config_for_function(hold).set(value=value)
    return cfg


def specs_of(cfg: Any) -> Any:
    model = cfg.model.clone(name="model").instantiate(parent=None)
    return model.create_parameter_specs_recursively()


@pytest.mark.parametrize(
    "value",
    [
        [math.nan, -math.inf, -0.0, 10**30],
        {"a": [np.float64(0.1), (np.str_("b"),)]},
        ["a\nb # c: d\r\u2028\x85\x00\ud800\ufeff", b"\x00\n"],
        {
            key: [Kind.A]
            for key in ("", "#", "a.b: c", "é\u200b", "\ud800", "a\x00", "0", 0, "'\"\\")
        },
        [Kind.B, jnp.bfloat16, Base.make, optax.adamw, jax.nn.gelu],
        {"a": {"b": (config_for_function(plain),)}},
    ],
)
def test_a_value_is_read_back_as_it_was(value):
    cfg = config_of(value)
    check_readable(cfg, specs_of(cfg))
    back = parse(cfg.debug_string().encode().decode())
    expected = re.sub(r"np\.\w+\(([^)]*)\)", r"\1", repr(value))  # Scalars of NumPy become plain.
    assert repr(back.learner.optimizer.value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: None, "<lambda>.*into a file of its own"),
        (config_for_function(lambda: None), r"\.fn is .*<lambda>.*into a file of its own"),
        (optax.sgd(1.0).init, r"<locals>.*config_for_function\(optax"),
        (optax.sgd(1.0), r"\.init is .*<locals>.*config_for_function\(optax"),
        (of_notebook, "__main__:of_notebook.*into a file of its own"),
        (config_for_function(functools.partial(plain)), r"\.fn is .*partial"),
        (Renamed, "'Earlier'"),
        (wrapper, "test_readable:plain, but this name stands for"),
        (jax.jit(plain), "test_readable:plain, but this name stands for"),
        (list[int], "builtins"),
        (math.exp, "math:exp"),
        ([{"a": Derived.make}], r"\[0\]\.a is .*Base\.make, but"),
        (Kind.A | Kind.B, r"A\|B"),
        (Total(1), "total is 2, but config.txt would read .*total: 3"),
    ],
)
def test_a_value_that_cannot_be_read_back_is_named(value, message):
    cfg = config_of(value)
    with pytest.raises(UserError, match=rf"learner\.optimizer\.value.*{message}"):
        check_readable(cfg, specs_of(cfg))


def test_a_model_that_would_have_other_parameters_is_refused():
    cfg = config_of(1)
    specs = specs_of(cfg) | {"more": ParameterSpec((2,), (None,), dtype="float32")}
    with pytest.raises(UserError, match=r"'more' is missing instead of float32\[2\]"):
        check_readable(cfg, specs)


def test_a_run_is_refused_before_its_first_step_unless_it_saves_nothing(tmp_path):
    cfg = tiny.trainer_config(tmp_path, evaler=False, max_step=1)
    cfg.learner.optimizer = config_for_function(adamw_optimizer).set(learning_rate=lambda step: 0.1)
    with pytest.raises(UserError, match=r"learner\.optimizer\.learning_rate is .*<lambda>"):
        fit(cfg)
    assert not list_checkpoints(str(tmp_path / "checkpoints"))
    assert not (tmp_path / "config.txt").exists()
    assert fit(cfg.set(checkpointer=None)).step == 1
