from typing import Any

import pytest

from moelib.core.config import REQUIRED, Configurable, Required, config_class
from moelib.core.config_modifier import ConfigModifier, replace_layer_config_recursively


class Dense(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        act: str = "silu"
        inner: Configurable.Config | None = None


class SubDense(Dense):
    pass


class Sparse(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        act: str = "gelu"
        num_experts: int = 8


class Stack(Configurable):
    @config_class
    class Config(Configurable.Config):
        layers: list[Configurable.Config] = []
        last: Configurable.Config | None = None
        anything: Any = None


def stack() -> Any:
    return Stack.default_config().set(
        layers=[Dense.default_config().set(dim=1), SubDense.default_config().set(dim=2)],
        last=Dense.default_config().set(dim=3),
        anything={"k": (Dense.default_config().set(dim=4),)},
    )


def test_every_config_of_the_class_is_replaced_and_counted():
    cfg = stack()
    cfg.last.inner = Dense.default_config()  # Goes with the config that it is inside of.
    assert replace_layer_config_recursively(cfg, Dense, Sparse.default_config()) == 3
    assert [layer.klass for layer in cfg.layers] == [Sparse, SubDense]
    assert cfg.last == Sparse.default_config().set(dim=3)
    assert cfg.anything["k"][0].dim == 4


def test_the_new_config_is_copied_for_each_replacement():
    cfg, new = stack(), Sparse.default_config()
    replace_layer_config_recursively(cfg, Dense, new)
    cfg.last.num_experts = 1
    assert (cfg.layers[0].num_experts, new.num_experts) == (8, 8)


def test_a_function_may_put_the_old_config_into_the_new_one():
    cfg = stack()
    count = replace_layer_config_recursively(
        cfg, Dense, lambda old: SubDense.default_config().set(dim=1, inner=old)
    )
    assert count == 3
    assert cfg.last.inner.dim == 3


def test_nothing_to_replace_is_an_error():
    with pytest.raises(ValueError, match="Sparse"):
        replace_layer_config_recursively(stack(), Sparse, Dense.default_config())


def test_a_modifier_is_a_config_that_changes_configs():
    class SetDim(ConfigModifier):
        @config_class
        class Config(ConfigModifier.Config):
            dim: int = 1

        def __call__(self, cfg: Any) -> Any:
            cfg.last.dim = self.config.dim
            return cfg

    assert SetDim.default_config().set(dim=5).instantiate()(stack()).last.dim == 5
    with pytest.raises(TypeError, match="__call__"):
        ConfigModifier.default_config().instantiate()


class Attention(Configurable):
    @config_class
    class Config(Configurable.Config):
        dim: Required[int] = REQUIRED
        bias: bool = False
        rate: float = 0.1
        inner: Dense.Config = Dense.default_config().set(dim=8)


class Windowed(Attention):
    @config_class
    class Config(Attention.Config):
        rate: float = 0.2
        window: int = 128


def replaced(old: Attention.Config, new: Attention.Config) -> Any:
    cfg: Any = Stack.default_config().set(last=old)
    replace_layer_config_recursively(cfg, Attention, new)
    return cfg.last


def test_fields_that_the_old_config_sets_are_carried_over():
    old = Attention.default_config().set(dim=4, bias=True)
    old.inner.act = "relu"
    new = replaced(old, Windowed.default_config().set(window=4))
    assert (new.dim, new.bias, new.rate, new.window) == (4, True, 0.2, 4)
    assert (new.inner.dim, new.inner.act) == (8, "relu")
    assert new.origin("bias") == old.origin("bias")


def test_fields_that_both_configs_set_are_the_new_ones_own():
    old = Attention.default_config().set(bias=True, rate=0.5)
    old.inner.set(dim=1, act="relu")
    new = Windowed.default_config().set(bias=False, rate=0.2)
    new.inner.dim = 3
    carried = replaced(old, new)
    assert (carried.bias, carried.rate) == (False, 0.2)
    assert (carried.inner.dim, carried.inner.act) == (3, "relu")
    whole = Windowed.default_config().set(inner=Dense.default_config().set(dim=3))
    assert replaced(old, whole).inner.act == "silu"
