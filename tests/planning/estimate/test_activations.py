"""What is kept for the backward pass, against what the layers' shapes say."""

import jax
import jax.numpy as jnp
import pytest

from moelib.core.config import config_for_function
from moelib.layers.feed_forward import FeedForward
from moelib.layers.remat import remat
from moelib.planning.estimate import activations as kept_lib
from moelib.planning.estimate.activations import (
    DOTS,
    FULL,
    NONE,
    OWN,
    read_kept,
    remat_name,
    with_remat,
)
from moelib.planning.estimate.workload import read_workload
from tests import tiny
from tests.planning import tiny_moe

DIM, HIDDEN, LAYERS, HEADS, HEAD_DIM = 24, 40, 3, 2, 12


@pytest.fixture
def cfg():
    """A dense model; its trainer's config."""
    feed_forward = FeedForward.default_config().set(hidden_dim=HIDDEN)
    heads = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": HEAD_DIM}
    layer = tiny.transformer_layer(feed_forward, **heads)
    model = tiny.model_config(tiny.stacked(layer, num_layers=LAYERS), dim=DIM)
    cfg = tiny.trainer_config("unused", model=model, evaler=False)
    return cfg.set(train_dtype="bfloat16")


def _read(cfg):
    model = cfg.model.clone(name="model").instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    return read_kept(cfg, specs, choices=0, num_blocks=LAYERS)


def test_full_recomputation_keeps_the_input_of_each_block(cfg):
    kept, block = _read(cfg)
    assert kept[FULL].split == 2 * DIM * (LAYERS + 2)
    assert kept[FULL].rows == kept[FULL].whole == 0
    assert kept[NONE].split > 3 * kept[FULL].split
    assert block.split == pytest.approx(kept[NONE].split / LAYERS)


def test_dots_are_the_results_of_the_layers_matmuls(cfg):
    kept, _ = _read(cfg)
    attention = HEADS * HEAD_DIM * 3 + DIM  # Queries, keys, values; the output.
    feed_forward = 2 * HIDDEN + DIM
    expected = 2 * LAYERS * (attention + feed_forward)
    assert kept[DOTS].split - kept[FULL].split == expected


def test_named_points_add_to_what_a_block_keeps(cfg):
    cfg.model.decoder.remat = config_for_function(remat).set(keep=["feed_forward_up"])
    kept, _ = _read(cfg)
    assert kept[OWN].split - kept[FULL].split == 2 * LAYERS * 2 * HIDDEN


def test_a_remat_that_is_not_ours_is_traced(cfg):
    def own():
        policy = jax.checkpoint_policies.nothing_saveable
        return lambda fn: jax.checkpoint(fn, policy=policy)

    cfg.model.decoder.remat = config_for_function(own)
    assert remat_name(cfg.model) is None
    kept, _ = _read(cfg)
    assert kept[FULL].split / 3 < kept[OWN].split < kept[NONE].split / 2


def test_the_remat_of_a_config_has_a_name(cfg):
    for policy, name in ((None, FULL), ("nothing_saveable", FULL), (DOTS, DOTS)):
        chosen = config_for_function(remat).set(policy=policy)
        assert remat_name(with_remat(cfg.model, chosen)) == name
    assert remat_name(with_remat(cfg.model, None)) == NONE


def test_parameters_are_no_activations(cfg):
    kept, _ = _read(cfg)
    cfg.model.vocab_size = 4096
    more, _ = _read(cfg)
    assert more[NONE].split == pytest.approx(kept[NONE].split, rel=0.01)
    assert jnp.dtype(cfg.train_dtype).itemsize == 2


def test_sizes_that_look_like_tokens_are_none(monkeypatch):
    cfg = tiny_moe.config().clone()
    found = []
    for tokens in (128, 96):  # A trace of 256 tokens with 2 choices each has 512 rows.
        monkeypatch.setattr(kept_lib, "_TOKENS", tokens)
        cfg.model.dim = 512
        found.append(read_workload(cfg))
    assert found[0].block == found[1].block
    assert [found[0].kept[n] for n in (FULL, NONE)] == [found[1].kept[n] for n in (FULL, NONE)]


def test_a_remat_that_names_what_no_block_has_is_refused(cfg):
    cfg.model.decoder.remat = config_for_function(remat).set(keep=["feed_forward_upp"])
    with pytest.raises(ValueError, match=r"no 'feed_forward_upp'; did you mean 'feed_forward_up'"):
        _read(cfg)
