"""Activations saved for the backward pass, compared with the shapes of layers."""

import re

import jax
import pytest

from moelib.core.config import config_for_function
from moelib.layers.feed_forward import FeedForward
from moelib.layers.remat import remat
from moelib.models.multi_token_prediction import MultiTokenPrediction
from moelib.planning.estimate import activations
from moelib.planning.estimate.activations import (
    DOTS,
    FULL,
    NONE,
    OWN,
    read_saved,
    remat_name,
    with_remat,
)
from moelib.planning.estimate.workload import read_workload
from tests import tiny
from tests.planning import tiny_moe

DIM, HIDDEN, LAYERS, HEADS, HEAD_DIM = 24, 40, 3, 2, 12


def _dense():
    """Returns the trainer config of a dense model."""
    feed_forward = FeedForward.default_config().set(hidden_dim=HIDDEN)
    heads = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": HEAD_DIM}
    layer = tiny.transformer_layer(feed_forward, **heads)
    model = tiny.model_config(tiny.stacked(layer, num_layers=LAYERS), dim=DIM)
    cfg = tiny.trainer_config("unused", model=model, evaler=False)
    return cfg.set(train_dtype="bfloat16")


@pytest.fixture
def cfg():
    return _dense()


def _read(cfg, is_trained=lambda path: True):
    model = cfg.model.clone(name="model").instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    return read_saved(cfg, specs, is_trained=is_trained, num_recomputed=LAYERS)


@pytest.fixture(scope="module")
def dense():
    """What the dense model saves."""
    return _read(_dense())


def test_frozen_matrices_save_no_inputs(cfg, dense):
    """Gradients of inputs need the matrices alone; those of the activation need its inputs."""
    of_others = lambda path: not re.search(r"feed_forward/(up|down)$", path)
    saved = _read(cfg, of_others)
    assert dense[NONE].split - saved[NONE].split == 2 * LAYERS * (DIM + HIDDEN)


def test_full_recomputation_saves_the_input_of_each_block_and_dots_the_results_of_matmuls(dense):
    saved = dense
    assert saved[FULL].split == 2 * DIM * (LAYERS + 2)
    assert saved[FULL].routed == saved[FULL].whole == 0
    assert saved[NONE].split > 3 * saved[FULL].split
    attention = HEADS * HEAD_DIM * 3 + DIM  # Queries, keys, values; the output.
    feed_forward = 2 * HIDDEN + DIM
    assert saved[DOTS].split - saved[FULL].split == 2 * LAYERS * (attention + feed_forward)


def test_named_activations_are_saved_too(cfg):
    cfg.model.decoder.remat = config_for_function(remat).set(keep=["feed_forward_up"])
    saved = _read(cfg)
    assert saved[OWN].split - saved[FULL].split == 2 * LAYERS * 2 * HIDDEN


def test_layers_of_multi_token_prediction_without_a_remat_save_all(cfg, dense):
    cfg.model.decoder.remat = config_for_function(remat).set(policy=DOTS)
    prediction = MultiTokenPrediction.default_config()
    prediction.module.layer = cfg.model.decoder.block[0].clone()
    cfg.model.multi_token_prediction = prediction
    work = read_workload(cfg)
    assert work.dim == DIM  # The input of a depth's projection is twice as wide.
    assert work.saved[FULL].split == 2 * DIM * (LAYERS + 2)
    # Those of the depth alone, which the decoder's remat does not recompute.
    assert work.saved[OWN].split > work.saved[NONE].split - dense[NONE].split


def test_a_remat_that_is_not_ours_is_traced(cfg):
    def own():
        policy = jax.checkpoint_policies.nothing_saveable
        return lambda fn: jax.checkpoint(fn, policy=policy)

    cfg.model.decoder.remat = config_for_function(own)
    assert remat_name(cfg.model) is None
    saved = _read(cfg)
    assert saved[FULL].split / 3 < saved[OWN].split < saved[NONE].split / 2


def test_the_remat_of_a_config_has_a_name(cfg):
    for policy, name in ((None, FULL), ("nothing_saveable", FULL), (DOTS, DOTS)):
        chosen = config_for_function(remat).set(policy=policy)
        assert remat_name(with_remat(cfg.model, chosen)) == name
    assert remat_name(with_remat(cfg.model, None)) == NONE


def test_parameters_are_no_activations(cfg, dense):
    cfg.model.vocab_size = 4096
    more = _read(cfg)
    assert more[NONE].split == pytest.approx(dense[NONE].split, rel=0.01)


def test_first_layers_are_recomputed_one_by_one(cfg):
    decoder = cfg.model.decoder
    decoder.set(first_layers=[decoder.block[0].clone() for _ in range(4)], num_layers=8)
    decoder.block.append(decoder.block[0].clone())
    work = read_workload(cfg)
    assert (work.num_first_layers, work.block_size, work.num_blocks) == (4, 2, 2)
    assert work.saved[FULL].split == 2 * DIM * (4 + 2 + 2)
    assert work.block.split == work.saved[NONE].split / 4
    decoder.set(num_layers=4)
    work = read_workload(cfg)
    assert (work.num_first_layers, work.block_size, work.num_blocks) == (0, 1, 4)


@pytest.mark.slow
def test_sizes_that_look_like_tokens_are_none(monkeypatch):
    cfg = tiny_moe.config().clone()
    found = []
    for tokens in (128, 96):  # A trace of 256 tokens with 2 choices each has 512 rows.
        monkeypatch.setattr(activations, "_SEQ_LEN", tokens)
        cfg.model.dim = 512
        found.append(read_workload(cfg))
    assert found[0].block == found[1].block
    assert [found[0].saved[n] for n in (FULL, NONE)] == [found[1].saved[n] for n in (FULL, NONE)]


def test_a_backend_of_the_environment_is_not_run_by_this_machine(cfg, dense, monkeypatch, caplog):
    monkeypatch.setenv("MOELIB_KERNEL_BACKEND", "flash_attention=tpu")
    assert _read(cfg) == dense
    assert not caplog.records


def test_a_remat_with_an_unknown_name_is_refused(cfg):
    cfg.model.decoder.remat = config_for_function(remat).set(keep=["feed_forward_upp"])
    with pytest.raises(ValueError, match=r"'feed_forward_upp'.*'feed_forward_up'"):
        _read(cfg)
