"""The whole model: the same on every mesh, in loop, scan and remat; padding and packing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.core.precision import cast_parameters
from moelib.layers.linear import Linear
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import Router
from moelib.models.objective import DirectPreference
from tests import tiny
from tests.layers.calling import call


@functools.cache
def scan_model() -> Any:
    balancing = BiasBalancing.default_config()
    router = Router.default_config().set(bias_balancing=balancing)
    return tiny.model_config(tiny.decoder(router=router)).instantiate(parent=None)


@functools.cache
def on_one_device() -> Any:
    """Returns (parameters, ((objective, outputs), gradients)) of the model and a packed batch."""
    params = tiny.initial(scan_model())
    return params, tiny.value_and_grad(scan_model(), params, tiny.packed_batch())


@functools.partial(jax.jit, static_argnums=0)
def logits(model: Any, params: Any, batch: Any) -> jax.Array:
    return call(model, params, batch, method="logits")


def test_auxiliary_losses_are_in_the_objective_and_not_in_the_loss():
    _, ((total, ((loss, metrics), outputs)), _) = on_one_device()
    num_labels = np.sum(np.asarray(tiny.packed_batch()["target_labels"]) >= 0)
    assert float(loss.weight) == float(metrics["cross_entropy"].weight) == num_labels
    np.testing.assert_allclose(metrics["cross_entropy"].mean, loss.mean, rtol=1e-6)
    assert outputs.total_aux_loss() > 0.5
    np.testing.assert_allclose(total, loss.mean + outputs.total_aux_loss(), rtol=1e-6)


def test_a_divisor_divides_the_logits_of_generation_and_of_the_loss():
    params, batch = on_one_device()[0], tiny.packed_batch()
    whole = logits(scan_model(), params, batch)
    divided = scan_model().config.clone(logit_divisor=3.0).instantiate(parent=None)
    np.testing.assert_allclose(logits(divided, params, batch), whole / 3, rtol=1e-5, atol=1e-6)
    (_, ((loss, _), _)), _ = tiny.value_and_grad(divided, params, batch)
    labels = np.asarray(batch["target_labels"])
    log_probs = np.asarray(jax.nn.log_softmax(whole / 3))[labels >= 0]
    want = -np.mean(log_probs[np.arange(len(log_probs)), labels[labels >= 0]])
    np.testing.assert_allclose(loss.mean, want, rtol=1e-5)


def test_two_documents_in_a_sequence_equal_two_sequences():
    first, second = 5, 3  # Tokens.
    index = np.arange(first + second)
    packed = {
        "input_ids": np.random.default_rng(0).integers(0, tiny.VOCAB_SIZE, (4, first + second)),
        "segment_ids": np.tile(np.where(index < first, 1, 2), (4, 1)),
        "positions": np.tile(np.where(index < first, index, index - first), (4, 1)),
    }
    labels = np.roll(packed["input_ids"], -1, 1)
    labels[:, [first - 1, -1]] = -1
    packed["target_labels"] = labels
    padding = {"input_ids": 7, "segment_ids": 0, "positions": 0, "target_labels": -1}
    rows, alone = {}, {}
    for name, value in padding.items():
        parts = packed[name][:, :first], packed[name][:, first:]
        pads = [((0, 0), (0, len(index) - part.shape[1])) for part in parts]
        padded = [np.pad(x, pad, constant_values=value) for x, pad in zip(parts, pads, strict=True)]
        alone[name] = np.concatenate(padded).astype(np.int32)
        empty = np.full_like(packed[name], value)
        rows[name] = np.concatenate([packed[name], empty]).astype(np.int32)
    params = on_one_device()[0]
    got, want = (tiny.value_and_grad(scan_model(), params, batch) for batch in (rows, alone))
    tiny.assert_trees_close(got, want)


def test_what_padding_holds_changes_no_loss_metric_count_or_gradient():
    params, want = on_one_device()
    batch = tiny.packed_batch()
    hole = batch["segment_ids"] == 0
    assert 5 < int(hole.sum()) < 20
    batch["input_ids"] = jnp.where(hole, 31 - batch["input_ids"], batch["input_ids"])
    batch["positions"] = jnp.where(hole, 99, batch["positions"])
    tiny.assert_trees_close(tiny.value_and_grad(scan_model(), params, batch), want, 1e-6)


def test_the_order_of_sequences_does_not_matter():
    params, want = on_one_device()
    order = np.random.default_rng(1).permutation(tiny.ROWS)
    batch = {name: value[order] for name, value in tiny.packed_batch().items()}
    tiny.assert_trees_close(tiny.value_and_grad(scan_model(), params, batch), want)


def test_an_id_beyond_the_vocabulary_spoils_its_sequence_only():
    params, batch = on_one_device()[0], tiny.packed_batch()
    want = logits(scan_model(), params, batch)
    batch["input_ids"] = batch["input_ids"].at[3, 1].set(tiny.VOCAB_SIZE)
    got = logits(scan_model(), params, batch)
    assert np.isnan(got[3, 1]).all()
    others = np.arange(tiny.ROWS) != 3
    np.testing.assert_allclose(got[others], want[others], rtol=1e-5, atol=1e-6)


def test_without_segments_and_positions_a_sequence_is_one_document():
    params, batch = on_one_device()[0], tiny.packed_batch()
    shape = batch["input_ids"].shape
    whole = {
        "input_ids": batch["input_ids"],
        "segment_ids": jnp.ones(shape, jnp.int32),
        "positions": jnp.broadcast_to(jnp.arange(shape[1])[None], shape),
    }
    got = logits(scan_model(), params, {"input_ids": batch["input_ids"]})
    np.testing.assert_allclose(got, logits(scan_model(), params, whole), rtol=1e-5, atol=1e-6)


def test_a_bfloat16_step_keeps_routers_in_float32_and_the_loss_close():
    params, want = on_one_device()
    specs = scan_model().create_parameter_specs_recursively()
    lower = cast_parameters(params, specs, jnp.bfloat16)
    layer = lower["decoder"]["repeated0"]["feed_forward"]
    assert layer["router"]["weight"].dtype == jnp.float32
    assert layer["router"]["bias_balancing"]["bias"].dtype == jnp.float32
    assert layer["experts"]["up"].dtype == lower["embedding"]["weight"].dtype == jnp.bfloat16
    (total, ((loss, _), outputs)), grads = tiny.value_and_grad(
        scan_model(), lower, tiny.packed_batch()
    )
    assert loss.mean.dtype == total.dtype == jnp.float32
    np.testing.assert_allclose(total, want[0][0], rtol=0.01)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(outputs))
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in jax.tree.leaves(grads))


def test_a_head_with_a_bias_is_refused():
    cfg = tiny.model_config(lm_head=Linear.default_config().set(bias=True))
    with pytest.raises(ValueError, match=r"lm_head\.bias.*True"):
        cfg.instantiate(parent=None)


def test_a_z_loss_with_an_objective_that_has_none_is_refused():
    cfg = tiny.model_config(objective=DirectPreference.default_config(), z_loss=1e-4)
    with pytest.raises(UserError, match=r"z_loss=0\.0001"):
        cfg.instantiate(parent=None)
