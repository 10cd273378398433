"""Grouped-query attention against its formulas in float64, and its properties."""

import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.layers import initializers
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.norm import RMSNorm
from tests.layers.calling import build, call, float64, initial, normal
from tests.oracles import attention as oracle
from tests.oracles.rope import rotated

D, H, S = 8, 4, 6
X = normal(2, S, D)
POSITIONS = np.broadcast_to(np.arange(S, dtype=np.int32), (2, S))
SEGMENTS = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2]], np.int32)


def attention(**fields):
    fields = {"input_dim": D, "num_heads": H, **fields}
    # Larger weights than the default, so that scores differ.
    init = config_for_function(initializers.normal).set(std=0.7)
    return build(GroupedQueryAttention.default_config(), param_init=init, **fields)


def parameters(layer):
    params = initial(layer)
    return {
        name: normal(*value.shape, seed=3) if name.endswith(("bias", "sinks")) else value
        for name, value in params.items()
    } | {
        name: {"scale": normal(*value["scale"].shape, seed=4) + 1}
        for name, value in params.items()
        if name.endswith("norm")
    }


def by_hand(layer, params, segment_ids):
    """Returns the layer's output in float64."""
    cfg, p, x = layer.config, float64(params), X.astype(np.float64)
    q = np.einsum("bsd,dhk->bshk", x, p["q"]) + p.get("q_bias", 0.0)
    kv = np.einsum("bsd,dngk->bsngk", x, p["kv"]) + p.get("kv_bias", 0.0)
    k, v = kv[:, :, 0], kv[:, :, 1]
    axes = (-2, -1) if cfg.qk_norm_joint else -1

    def normalized(x, scale, axes=axes):
        scale = scale.reshape(-1, x.shape[-1])  # Per head, or for all heads.
        return x / np.sqrt(np.mean(x**2, axes, keepdims=True) + 1e-6) * scale

    if "q_norm" in p:
        q, k = normalized(q, p["q_norm"]["scale"]), normalized(k, p["k_norm"]["scale"])
    if cfg.qkv_clip is not None:
        q, k, v = (np.clip(x, -cfg.qkv_clip, cfg.qkv_clip) for x in (q, k, v))
    if cfg.rope is not None:
        q, k = (rotated(x, POSITIONS[..., None]) for x in (q, k))
    if "rotated_q_norm" in p:
        q = normalized(q, p["rotated_q_norm"]["scale"], -1)
        k = normalized(k, p["rotated_k_norm"]["scale"], -1)
    masks = {"segment_ids": segment_ids, "window": cfg.window}
    scale = q.shape[-1] ** -0.5 if cfg.score_scale is None else cfg.score_scale
    scores = {"scale": scale, "logit_cap": cfg.logit_cap, "sinks": p.get("sinks")}
    out = oracle.attention(q, k, v, **scores, **masks)
    if cfg.output_gate:
        out = out / (1 + np.exp(-np.einsum("bsd,dhk->bshk", x, p["gate"])))
    return np.einsum("bshk,hkd->bsd", out, p["output"]) + p.get("output_bias", 0.0)


NORM = RMSNorm.default_config()


@pytest.mark.parametrize(
    ("fields", "segment_ids"),
    [
        ({}, None),
        ({}, SEGMENTS),
        ({"num_kv_heads": 2, "window": 3, "logit_cap": 0.5}, None),
        ({"num_kv_heads": 1, "head_dim": 4}, SEGMENTS),
        ({"qkv_bias": True, "output_bias": True, "sinks": True}, SEGMENTS),
        ({"rope": None, "output_gate": True}, None),
        ({"qk_norm": NORM, "num_kv_heads": 2}, None),
        ({"qk_norm": NORM, "qk_norm_joint": True, "num_kv_heads": 2, "qkv_clip": 0.9}, SEGMENTS),
        ({"score_scale": 0.3, "num_kv_heads": 2}, SEGMENTS),
        ({"rotated_qk_norm": NORM, "num_kv_heads": 2}, SEGMENTS),
    ],
    ids=str,
)
def test_the_output_is_that_of_the_formulas(fields, segment_ids):
    layer = attention(**fields)
    params = parameters(layer)
    got = call(layer, params, X, positions=POSITIONS, segment_ids=segment_ids)
    np.testing.assert_allclose(got, by_hand(layer, params, segment_ids), rtol=1e-5, atol=2e-5)


def test_parameters_and_flops_are_counted_by_hand():
    layer = attention(num_kv_heads=2, head_dim=16)
    queries_and_output, keys_and_values = 2 * D * H * 16, 2 * D * 2 * 16
    assert layer.active_parameters() == queries_and_output + keys_and_values
    # A token sees 1, 2, ... S keys: (S + 1) / 2 on average; scores and weighted values.
    seen = sum(range(1, S + 1)) / S
    want = 2 * (queries_and_output + keys_and_values) + 2 * 2 * seen * H * 16
    assert layer.forward_flops_per_token(S) == want
