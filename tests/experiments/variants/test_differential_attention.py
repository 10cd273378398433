"""Differential attention against the paper's equations, per depth, with documents."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.variants.differential_attention import (
    DifferentialAttention,
    UseDifferentialAttention,
)
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.carry import CARRIED
from moelib.train.pipeline import stack_of
from tests import tiny
from tests.experiments.variants.compare import assert_equal_to_reference
from tests.layers.calling import build, initial, normal
from tests.oracles.attention import attention
from tests.oracles.rope import rotated

B, S, D, H, G, Dh = 2, 7, 6, 8, 4, 4
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0]], np.int32)
AT, IN = jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)
CFG = DifferentialAttention.default_config().set(
    input_dim=D, num_heads=H, num_kv_heads=G, head_dim=Dh
)


def reference(p, x, lambda_init):
    """Returns equations 1 to 3: the first heads of pairs less the second ones."""
    q = rotated(np.einsum("bsd,dhk->bshk", x, p["q"]), POSITIONS[..., None])
    kv = np.einsum("bsd,dngk->bsngk", x, p["kv"])
    k = rotated(kv[:, :, 0], POSITIONS[..., None])
    values, scale = kv[:, :, 1].reshape(B, S, G // 2, 2 * Dh), Dh**-0.5
    products = (p[f"lambda_q{i}"] @ p[f"lambda_k{i}"] for i in (1, 2))
    first, second = map(np.exp, products)
    lam = first - second + lambda_init
    heads = attention(*(q[:, :, 0::2], k[:, :, 0::2], values), scale=scale, segment_ids=SEGMENTS)
    other = attention(*(q[:, :, 1::2], k[:, :, 1::2], values), scale=scale, segment_ids=SEGMENTS)
    heads = heads - lam * other  # [B, S, H/2, 2 Dh]
    norm = np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5)
    heads = (1 - lambda_init) * heads / norm * p["head_norm"]["scale"]
    return np.einsum("bshk,hkd->bsd", heads, p["output"].reshape(H // 2, 2 * Dh, D))


def test_values_and_gradients_are_those_of_the_equations():
    made, depth = build(CFG), 3

    def run(operands):
        inputs = {"x": operands["x"], "positions": AT, "segment_ids": IN}
        values = {CARRIED: {"depth": jnp.float32(depth)}}
        p = operands["p"]
        return functional(made, None, p, inputs, is_training=True, inherited=values)[0]

    lambda_init = 0.8 - 0.6 * np.exp(-0.3 * depth)
    operands = {"p": initial(made), "x": normal(B, S, D)}
    at = lambda operands: reference(operands["p"], operands["x"], lambda_init)
    assert_equal_to_reference(run, at, operands)


def test_parameters_are_those_of_grouped_query_attention_and_four_vectors_and_a_norm():
    plain = GroupedQueryAttention.default_config().set(
        input_dim=D, num_heads=H, num_kv_heads=G, head_dim=Dh
    )
    count = lambda cfg: build(cfg).active_parameters()
    assert count(CFG) == count(plain) + 4 * Dh + 2 * Dh


def test_depth_counts_layers_in_a_scan():
    layer = tiny.transformer_layer().set(self_attention=CFG.clone())
    model = tiny.model_config(tiny.stacked(layer, num_layers=3)).instantiate(parent=None)
    params = tiny.initial(model)
    grad = lambda params: tiny.value_and_grad(model, params, tiny.packed_batch())[1]
    vectors = grad(params)["decoder"]["repeated0"]["self_attention"]["lambda_q1"]
    assert vectors.shape == (3, Dh)
    assert np.all(np.any(vectors, -1))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"num_heads": 3, "num_kv_heads": None}, "num_heads=3"),  # Without a pair.
        ({"num_kv_heads": 1}, "num_kv_heads=1"),
        ({"sinks": True}, "sinks=True"),
    ],
)
def test_refused_fields_are_named(fields, names):
    with pytest.raises(UserError, match=names):
        build(CFG, **fields)


def test_a_pipeline_requires_a_number_as_the_initial_lambda():
    cfg = tiny.trainer_config("unused", model=tiny.model_config())
    cfg = UseDifferentialAttention.default_config().instantiate()(cfg)
    with pytest.raises(UserError, match=r"\(DifferentialAttention\) carries depth"):
        stack_of(cfg.model.instantiate(parent=None))
    cfg.model.decoder.block[0].self_attention.lambda_init = 0.8
    assert stack_of(cfg.model.instantiate(parent=None)).num_blocks == 2
