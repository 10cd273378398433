"""Multi-token prediction: what it predicts in packed batches, on meshes, and what ignores it.

Losses and gradients are compared with the paper's equations in huggingface/test_multi_token.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import deepseek
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.inference.cache import new_cache, next_logits
from moelib.layers.remat import remat
from moelib.models.cost import model_cost
from moelib.models.multi_token_prediction import MultiTokenModule, MultiTokenPrediction
from moelib.parallel.sharding import named_shardings
from tests import tiny
from tests.models.test_causal_lm import logits
from tests.oracles.losses import multi_token_labels
from tests.train.test_pipeline import moe_model, step_of

NUM_DEPTHS = 2


def with_modules(cfg, **fields):
    """Returns a model with modules whose layers are those of its stack."""
    module = MultiTokenModule.default_config().set(layer=cfg.decoder.block[0], **fields)
    further = MultiTokenPrediction.default_config().set(num_depths=NUM_DEPTHS, module=module)
    return cfg.set(multi_token_prediction=further)


def dense_config(**fields):
    return with_modules(tiny.model_config(tiny.stacked(tiny.transformer_layer())), **fields)


@functools.cache
def dense():
    """Returns (model, parameters)."""
    model = dense_config().instantiate(parent=None)
    return model, tiny.initial(model)


def evaluated(batch):
    """Returns (loss, depths' metrics, objective, gradients)."""
    model, params = dense()
    (total, ((loss, _), found)), grads = tiny.value_and_grad(model, params, batch)
    return loss, found.summaries["multi_token_prediction"], total, grads


def test_each_depth_predicts_the_labels_of_the_same_document():
    batch = jax.tree.map(np.asarray, tiny.packed_batch())
    loss, metrics, total, _ = evaluated(tiny.packed_batch())
    segments, labels = batch["segment_ids"], batch["target_labels"]
    want = 0.0
    for depth in range(1, NUM_DEPTHS + 1):
        counted = (multi_token_labels(labels, segments, depth) >= 0).sum()
        found = metrics[f"depth{depth}_cross_entropy"]
        assert float(found.weight) == counted
        want += 0.3 / NUM_DEPTHS * float(found.mean) * counted / (segments > 0).sum()
    np.testing.assert_allclose(total - loss.mean, want, rtol=1e-5)
    assert float(loss.weight) == (labels >= 0).sum()


def test_neither_padding_nor_another_document_changes_what_a_document_predicts():
    batch = tiny.packed_batch()
    segments = batch["segment_ids"]
    batch["target_labels"] = jnp.where(segments == 1, batch["target_labels"], -1)
    changed = jnp.where(segments == 1, batch["input_ids"], 31 - batch["input_ids"])
    tiny.assert_trees_close(evaluated(batch | {"input_ids": changed})[1:3], evaluated(batch)[1:3])
    batch = tiny.packed_batch()
    changed = jnp.where(segments == 0, 31 - batch["input_ids"], batch["input_ids"])
    got, want = (evaluated(each) for each in (batch | {"input_ids": changed}, batch))
    tiny.assert_trees_close(got, want, 1e-6)


def test_a_batch_of_padding_has_no_loss():
    nothing = {name: jnp.zeros_like(x) for name, x in tiny.packed_batch().items()}
    nothing["target_labels"] -= 1
    _, _, total, grads = evaluated(nothing)
    assert total == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_generation_ignores_the_modules():
    (model, params), ids = dense(), tiny.packed_batch()["input_ids"]
    positions = jnp.broadcast_to(jnp.arange(tiny.SEQ_LEN)[None], ids.shape)
    whole = jnp.ones(ids.shape, bool)

    @jax.jit
    def last(params):
        cache = new_cache(model, params, len(ids), tiny.SEQ_LEN)
        assert cache.keys() == {"decoder"}
        return next_logits(model, params, cache, ids, positions, whole)[0]

    want = logits(model, params, {"input_ids": ids})[:, -1]
    np.testing.assert_allclose(last(params), want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [{"data": 2, "fsdp": 2, "model": 2}, {"expert": 2, "seq": 2, "model": 2}], ids=str
)
def test_every_mesh_gives_the_values_of_one_device(axes):
    model = with_modules(tiny.model_config()).instantiate(parent=None)
    params, batch = tiny.initial(model), tiny.packed_batch()
    want = tiny.value_and_grad(model, params, batch)
    mesh = tiny.mesh(**axes)
    shardings = named_shardings(model.create_parameter_specs_recursively(), mesh)
    with jax.set_mesh(mesh):
        got = tiny.value_and_grad(model, jax.device_put(params, shardings), batch)
    tiny.assert_trees_close(got, want)


@pytest.mark.slow
def test_recomputation_changes_nothing():
    model = dense_config(remat=config_for_function(remat).set(keep=["attention_output"]))
    got = tiny.value_and_grad(model.instantiate(parent=None), dense()[1], tiny.packed_batch())
    tiny.assert_trees_close(got, tiny.value_and_grad(*dense(), tiny.packed_batch()), 1e-6)


@pytest.mark.slow
def test_micro_batches_give_the_step_of_the_whole_batch():
    cfg = with_modules(tiny.model_config(moe_model(1).decoder))
    for layer in (*cfg.decoder.block, cfg.multi_token_prediction.module.layer):
        layer.feed_forward.set(load_balance_loss=None)  # Of the micro-batches so far.
    cfg.multi_token_prediction.module.layer.feed_forward.router_z_loss = None  # Of other tokens.
    _, want, metrics = step_of(cfg, num_microbatches=1)
    _, got, found = step_of(cfg, num_microbatches=4)
    tiny.assert_trees_close(got, want)
    for name, value in metrics.items():
        if name.startswith(("multi_token_prediction/depth1_", "multi_token_prediction/depth2_")):
            assert found[name] == pytest.approx(value, rel=1e-5), name


def test_parameters_and_flops_of_deepseek_v3_are_the_published_ones():
    # README_WEIGHTS of DeepSeek-V3: the module has 11.5 B parameters of its own, 2.4 B active ones
    # with the 0.9 B of embedding and head each; both counts exclude `eh_proj`.
    cfg = deepseek.named_trainer_configs()["deepseek-v3-mtp"]().model
    configs = cfg, cfg.clone(multi_token_prediction=None)
    both = [each.set(name="model").instantiate(parent=None) for each in configs]
    own, without = (model_cost(model, seq_len=4096) for model in both)
    assert without.total_parameters == pytest.approx(671.0e9, abs=0.1e9)
    projection, table = 2 * cfg.dim**2, cfg.vocab_size * cfg.dim
    module = own.total_parameters - without.total_parameters - projection
    assert module == pytest.approx(11.5e9, abs=0.05e9)
    active = own.active_parameters - without.active_parameters - projection
    assert active + 2 * table == pytest.approx(2.4e9, abs=0.05e9)
    layer = both[1].children["decoder"].children["repeated0"].forward_flops_per_token(4096)
    flops = own.train_flops_per_token - without.train_flops_per_token
    assert flops == 3 * (layer + 2 * projection + 2 * table)


def test_wrong_numbers_are_refused():
    for fields, message in (
        ({"num_depths": 0}, "num_depths=0"),
        ({"loss_weight": -1.0}, "loss_weight=-1.0"),
    ):
        with pytest.raises(UserError, match=message):
            dense_config().multi_token_prediction.set(**fields)
