"""Properties of every variant: no leak, a cache like the whole text, meshes, published shapes."""

import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import qwen, variants
from experiments.variants.dynamic_moe import TopAnyRouter
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.huggingface.families import NoFamilyError, settings_of
from moelib.inference.cache import new_cache, next_logits
from moelib.layers.remat import remat
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.train.pipeline import stack_of
from moelib.verify.outcome import Status
from moelib.verify.run import verify_config
from tests import tiny

# A gate's gradient is not the derivative of what it computes, and the first residual router has no
# logits before it. The load of chosen experts is rounded up: it depends on the batch size.
WITHOUT = {
    "dynamic-moe": ["derivatives"],
    "moe-plus-plus": ["reached"],
    "expert-choice": ["doubled"],
}
NAMES = list(variants.MODIFIERS)


def modifier(name):
    """Returns the modifier of a variant at sizes for short sequences."""
    cfg = variants.MODIFIERS[name].clone()
    if name == "moba":
        cfg.set(block_size=4, num_blocks=2)
    if name == "dynamic-moe":
        cfg.router = TopAnyRouter.default_config()
    return cfg.instantiate()


def trainer(name, **fields):
    """Returns a trainer of two MoE layers in a scan, recomputed, in two micro-batches."""
    model = tiny.model_config(tiny.decoder())
    model.decoder.remat = config_for_function(remat)
    model.decoder.block[0].self_attention.set(num_heads=8, num_kv_heads=4, head_dim=4)
    cfg = tiny.trainer_config("unused", model=model, max_step=4, evaler=False)
    return modifier(name)(cfg.set(num_microbatches=2, **fields))


@functools.cache
def built(name):
    """Returns (model, parameters)."""
    model = trainer(name).model.instantiate(parent=None)
    return model, tiny.initial(model)


@functools.partial(jax.jit, static_argnums=(0, 3))
def logits(model, params, ids, is_training):
    key = jax.random.key(0)
    batch = {"input_ids": ids}
    return functional(model, key, params, (batch,), is_training=is_training, method="logits")[0]


IDS = np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, (2, 12)).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_change_no_earlier_logits(name):
    model, params = built(name)
    other = np.concatenate([IDS[:, :7], (IDS[:, 7:] + 5) % tiny.VOCAB_SIZE], 1)
    for is_training in (False, True):
        if is_training and name == "expert-choice":
            continue  # It leaks, as its docstring and its own test say.
        first, second = (logits(model, params, ids, is_training) for ids in (IDS, other))
        np.testing.assert_allclose(first[:, :7], second[:, :7], atol=1e-5)
        assert np.any(np.abs(first[:, 7:] - second[:, 7:]) > 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tokens_one_by_one_have_the_logits_of_the_whole_text(name):
    model, params = built(name)
    want = logits(model, params, IDS, False)
    cache = new_cache(model, params, len(IDS), IDS.shape[1])
    assert isinstance(cache, dict)  # Every layer keeps its earlier tokens.
    step = jax.jit(functools.partial(next_logits, model))
    at = lambda start, stop: jnp.broadcast_to(jnp.arange(start, stop)[None], (2, stop - start))
    spans = [(0, 6), *((i, i + 1) for i in range(6, 12))]
    for start, stop in spans:
        ids = jnp.asarray(IDS[:, start:stop])
        got, cache = step(params, cache, ids, at(start, stop), jnp.ones_like(ids, bool))
        np.testing.assert_allclose(got, want[:, stop - 1], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_equal_on_every_mesh(name):
    meshes = "expert=4,fsdp=2;expert=2,seq=2,model=2"
    left_out = list(WITHOUT.get(name, ()))
    report = verify_config(trainer(name), meshes=meshes, keep_going=True, without=left_out)
    assert report.status is Status.PASSED, report.lines()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_qwen3_lowers(name, tmp_path):
    cfg = qwen.named_trainer_configs()["qwen3-30b-a3b"]().set(dir=str(tmp_path))
    cfg = variants.MODIFIERS[name].instantiate()(cfg)
    cfg.mesh_shape = mesh_shape_from_axes(fsdp=-1, expert=4)
    made = cfg.instantiate(parent=None, devices=jax.devices())
    with made.on_mesh():
        assert "func.func public @main" in made.trace_train_step().lower().as_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_one_file_below_150_lines(name):
    module = importlib.import_module(type(variants.MODIFIERS[name].instantiate()).__module__)
    assert module is not variants
    assert len(inspect.getsource(module).splitlines()) < 150


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_the_replaced_layer_is_refused(name):
    cfg = tiny.trainer_config("unused", evaler=False)
    with pytest.raises(UserError, match="nothing replaced"):
        modifier(name)(cfg)


@pytest.mark.parametrize("name", ["moba", "dynamic-moe", "expert-choice"])
def test_a_pipeline_may_cut_between_layers_that_carry_nothing(name):
    assert stack_of(trainer(name).model.instantiate(parent=None)).num_blocks == 2


@pytest.mark.parametrize("name", NAMES)
def test_no_hugging_face_family_has_such_layers(name):
    with pytest.raises(NoFamilyError):
        settings_of(trainer(name).model)
