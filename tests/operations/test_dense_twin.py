"""Dense twins of all named configs: equal FLOPs, no experts, everything else equal."""

import pytest

from experiments import flame_moe
from moelib.core import config_text
from moelib.core.errors import UserError
from moelib.layers.feed_forward import FeedForward
from moelib.layers.moe.layer import MoELayer
from moelib.models.cost import model_cost
from moelib.operations.dense_twin import dense_twin
from tests.experiments.test_named_configs import CONFIGS


# --8<-- [start:twin]
def my_configs():
    """Returns a named config and its dense twin by name."""
    return {"tiny": flame_moe.tiny, "tiny-dense": lambda: dense_twin(flame_moe.tiny()).config}


# --8<-- [end:twin]


def has_moe(cfg):
    return any(isinstance(x, MoELayer.Config) for _, x in config_text.sub_configs(cfg.model))


MODELS = {name: cfg for name, make in CONFIGS.items() if has_moe(cfg := make())}


@pytest.mark.parametrize("name", MODELS)
def test_a_twin_has_the_flops_and_no_expert(name):
    cfg = MODELS[name]
    before = cfg.debug_string()
    twin = dense_twin(cfg)
    assert cfg.debug_string() == before
    assert not has_moe(twin.config)
    assert abs(twin.difference) < 0.004
    cost = model_cost(
        twin.config.model.clone(name="m").instantiate(parent=None), seq_len=cfg.input.seq_len
    )
    assert cost.train_flops_per_token == twin.dense_flops
    assert cost.active_parameters == cost.total_parameters
    changed = {path for path, *_ in config_text.diff(cfg, twin.config)}
    assert all("feed_forward" in path for path in changed)
    assert config_text.parse(twin.config.debug_string()) == twin.config


def test_the_hidden_size_of_the_published_small_model():
    # Router 64, six experts and two shared ones of 176 with three matrices: 64 / 3 + 8 * 176.
    twin = dense_twin(MODELS["flame-moe-38m-100m"], multiple_of=1)
    assert list(twin.hidden_dims.values()) == [round(64 / 3 + 8 * 176)]
    assert abs(twin.difference) < 1e-4
    wide = dense_twin(MODELS["flame-moe-38m-100m"], width=2.0, multiple_of=16)
    assert list(wide.hidden_dims.values()) == [2864]


def test_layers_that_alternate_with_dense_ones_keep_their_places():
    cfg = flame_moe.tiny()
    (moe,) = cfg.model.decoder.block
    dense = moe.clone(feed_forward=FeedForward.default_config().set(hidden_dim=40))
    cfg.model.decoder.set(num_layers=5, block=[moe, dense])
    layers = dense_twin(cfg).config.model.decoder.block
    assert [layer.feed_forward.hidden_dim for layer in layers] == [264, 40]


def test_a_twin_may_be_a_named_config():
    configs = my_configs()
    assert not has_moe(configs["tiny-dense"]())
    assert has_moe(configs["tiny"]())


def test_a_model_without_experts_has_no_twin():
    with pytest.raises(UserError, match="model has no MoE layer"):
        dense_twin(CONFIGS["dense-77m"]())
