import collections
import copy
from typing import Any

import optax
import pytest
import tokenizers

from moelib.core.config import (
    REQUIRED,
    ConfigOr,
    Configurable,
    FrozenConfigError,
    InstantiableConfig,
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    MissingConfigClassDecoratorError,
    Required,
    RequiredFieldMissingError,
    UnknownFieldError,
    config_class,
    config_for_class,
    config_for_function,
    maybe_instantiate,
)
from moelib.core.errors import UserError


class Scale(Configurable):
    @config_class
    class Config(Configurable.Config):
        factor: Required[ConfigOr[float]] = REQUIRED
        inner: InstantiableConfig | None = None

    def __init__(self, cfg: Any):
        super().__init__(cfg)
        self.inner = maybe_instantiate(self.config.inner)


class Shifted(Scale):
    @config_class
    class Config(Scale.Config):
        shift: int = 1


class Renamed(Scale):
    pass


def linear(x: float, slope: float = 2.0, *rest: Any, bias: Any = None, **more: Any) -> Any:
    return x, slope, rest, bias, more


def test_instantiate_builds_the_class_of_the_config_and_copies_it():
    cfg = Scale.default_config().set(factor=2.0)
    built = cfg.instantiate()
    cfg.factor = 3.0
    assert type(built) is Scale
    assert built.config.factor == 2.0


def test_the_config_of_a_built_object_is_frozen_and_the_same_each_time():
    built = Scale.default_config().set(factor=2.0, inner=Scale.default_config().set(factor=1.0))
    built = built.instantiate()
    assert built.config is built.config
    for cfg in (built.config, built.config.inner):
        with pytest.raises(FrozenConfigError, match=r"Scale\.Config\.factor"):
            cfg.factor = 3.0
    assert Scale(Scale.default_config().set(factor=1.0)).config._frozen


def test_an_object_may_complete_its_config_while_it_is_built():
    class Completed(Scale):
        def __init__(self, cfg: Any):
            super().__init__(cfg)
            self.config.factor = 7.0

    cfg = Completed.default_config().set(factor=1.0)
    assert cfg.instantiate().config.factor == 7.0
    assert cfg.factor == 1.0


def test_a_config_knows_its_class_however_it_is_made():
    assert Scale.Config(factor=1.0).klass is Scale
    assert Scale.Config(factor=1.0) == Scale.default_config().set(factor=1.0)
    assert Shifted.default_config().klass is Shifted
    assert Renamed.default_config().klass is Renamed
    assert Scale.default_config().klass is Scale


def test_the_class_may_be_changed_only_to_one_with_the_same_fields():
    assert Scale.default_config().set(klass=Renamed, factor=1.0).instantiate().__class__ is Renamed
    with pytest.raises(InvalidConfigValueError, match=r"Shifted.*default_config\(\)"):
        Scale.default_config().set(klass=Shifted)
    with pytest.raises(InvalidConfigValueError, match="klass"):
        Scale.default_config().set(klass=int)


def test_a_config_without_the_decorator_is_refused_when_its_class_is_made():
    with pytest.raises(MissingConfigClassDecoratorError, match="@config_class"):

        class Bad(Configurable):
            class Config(Configurable.Config):
                pass


LAYER = Scale.default_config()
CHAIN = config_for_function(optax.chain).set(
    args=[config_for_function(optax.clip).set(max_delta=1.0), config_for_function(optax.adamw)]
)


@pytest.mark.parametrize(
    ("cfg", "path"),
    [
        (LAYER, "factor"),
        (LAYER.clone(factor=1.0, inner=LAYER), r"inner\.factor"),
        (
            Shifted.default_config().set(factor=1.0, inner=LAYER.clone(factor=1.0, inner=LAYER)),
            r"inner\.inner\.factor",
        ),
        (CHAIN, r"args\[1\]\.learning_rate"),
        (LAYER.clone(factor=1.0, inner=CHAIN), r"inner\.args\[1\]\.learning_rate"),
    ],
)
def test_an_unset_field_is_named_by_its_whole_path(cfg, path):
    with pytest.raises(RequiredFieldMissingError, match=rf"^{path} ") as error:
        cfg.instantiate()
    assert str(copy.copy(error.value)) == str(error.value)
    assert isinstance(error.value, UserError)


def test_an_unset_field_is_named_to_a_constructor():
    with pytest.raises(RequiredFieldMissingError, match=r"before Scale.Config .*\.set\(factor="):
        Scale(Scale.default_config())


def test_a_function_is_called_with_its_fields():
    cfg = config_for_function(linear).set(x=1.0, rest=[3, 4], bias="b", more={"k": 5})
    assert cfg.instantiate() == (1.0, 2.0, (3, 4), "b", {"k": 5})
    assert cfg.fn is linear


def test_arguments_of_instantiate_override_fields():
    cfg = config_for_function(linear).set(more={"k": 1, "j": 1})
    assert cfg.instantiate(x=1.0, k=2) == (1.0, 2.0, (), None, {"k": 2, "j": 1})


def test_configs_in_parameters_are_instantiated_at_any_depth():
    inner = config_for_function(linear).set(x=1.0)
    built = config_for_function(linear).set(
        x=inner, slope=inner, rest=[[inner]], more={"k": {"j": inner}}
    )
    value = inner.instantiate()
    assert built.instantiate() == (value, value, ([value],), None, {"k": {"j": value}})


def test_positional_only_parameters_are_passed_by_position():
    def positional(a: Any, /, b: Any) -> Any:
        return a, b

    assert config_for_function(positional).set(a=1, b=2).instantiate() == (1, 2)


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (
            lambda: config_for_function(linear).set(slope="a"),
            InvalidConfigValueError,
            r"linear.slope='a':.*str",
        ),
        (lambda: config_for_function(linear).set(slop=1.0), UnknownFieldError, "'slop'"),
        (lambda: config_for_function(lambda fn: fn), InvalidConfigNameError, "'fn'"),
        (lambda: config_for_function(lambda clone: clone), InvalidConfigNameError, "clone"),
        (lambda: config_for_function(int), InvalidConfigClassError, "config_for_class"),
        (lambda: config_for_class(linear), InvalidConfigClassError, "config_for_function"),
        (lambda: config_for_class(Scale), InvalidConfigClassError, r"Scale.*default_config\(\)"),
        (lambda: config_for_class(collections.deque), InvalidConfigClassError, "deque"),
    ],
)
def test_what_cannot_be_a_config_is_refused(make, error, named):
    with pytest.raises(error, match=named):
        make()


def test_a_third_party_class_becomes_a_config():
    class Point:
        def __init__(self, x: int, y: int = 2):
            self.point = x, y

    assert config_for_class(Point).set(x=1).instantiate().point == (1, 2)


def test_a_class_of_an_extension_module_becomes_a_config():
    cfg = config_for_class(tokenizers.pre_tokenizers.ByteLevel).set(add_prefix_space=False)
    assert "self" not in cfg
    assert cfg.instantiate().add_prefix_space is False


def test_a_config_that_builds_nothing_is_refused():
    @config_class
    class Nothing(InstantiableConfig):
        pass

    with pytest.raises(TypeError, match="Nothing"):
        Nothing().instantiate()


def test_an_error_of_a_constructor_reaches_the_caller_unchanged():
    class Failing(Scale):
        def __init__(self, cfg: Any):
            super().__init__(cfg)
            raise KeyError("mine") from ValueError("its cause")

    with pytest.raises(KeyError, match="mine") as error:
        Failing.default_config().set(factor=1.0).instantiate()
    assert isinstance(error.value.__cause__, ValueError)


def test_elements_added_in_place_are_checked_when_the_config_is_instantiated():
    class Holder(Configurable):
        @config_class
        class Config(Configurable.Config):
            sizes: list[int] = []
            parts: dict[str, InstantiableConfig] = {}

    cfg = Holder.default_config()
    cfg.sizes.append(3)
    cfg.parts["a"] = Scale.default_config().set(factor=1.0)
    assert cfg.instantiate().config.sizes == [3]
    cfg.sizes.append("x")
    with pytest.raises(InvalidConfigValueError, match=r"Holder.Config.sizes=\[3, 'x'\]"):
        cfg.instantiate()
    cfg.sizes.pop()
    cfg.parts["b"] = "nonsense"
    with pytest.raises(InvalidConfigValueError, match=r"Holder.Config.parts=.*'nonsense'"):
        cfg.instantiate()
