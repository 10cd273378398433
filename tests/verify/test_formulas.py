"""Formulas equal the layers, with each of their settings."""

import inspect
from typing import Any

import jax
import numpy as np
import pytest

from moelib.layers import rope
from moelib.layers.activation import Activation
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.attention.latent import LatentAttention
from moelib.layers.feed_forward import FeedForward
from moelib.layers.linear import Linear
from moelib.layers.moe.dispatch import DenseDispatcher
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Router, Score
from moelib.layers.norm import LayerNorm, RMSNorm
from moelib.verify import formulas
from tests.layers.calling import build, call, initial

D, S = 12, 20
FEED_FORWARD = FeedForward.default_config().set(input_dim=D, hidden_dim=10)
ATTENTION = GroupedQueryAttention.default_config().set(input_dim=D, num_heads=4, num_kv_heads=2)
ATTENTION.head_dim = 6
LATENT = LatentAttention.default_config().set(
    input_dim=D, num_heads=2, kv_lora_rank=5, nope_head_dim=4, rope_head_dim=6, v_head_dim=3
)
MOE = MoELayer.default_config().set(
    input_dim=D,
    hidden_dim=7,
    num_experts=6,
    num_experts_per_token=2,
    dispatcher=DenseDispatcher.default_config(),
)
SHARED = FeedForward.default_config().set(hidden_dim=5, activation=Activation.GEGLU)
YARN = rope.YarnRotaryEmbedding.default_config().set(factor=4.0, original_context=32, theta=100.0)

LAYERS: dict[str, Any] = {
    "RMSNorm": RMSNorm.default_config().set(dim=D, eps=0.1),
    "LayerNorm": LayerNorm.default_config().set(dim=D, eps=0.1),
    "LayerNorm without bias": LayerNorm.default_config().set(dim=D, bias=False),
    "Linear": Linear.default_config().set(input_dim=D, output_dim=7, bias=True),
    **{f"{x}": FEED_FORWARD.clone(activation=x) for x in Activation},
    "attention with biases and norms": ATTENTION.clone(
        qkv_bias=True, output_bias=True, qk_norm=LayerNorm.default_config(), window=3, sinks=True
    ),
    "attention with one norm": ATTENTION.clone(
        qk_norm=RMSNorm.default_config(), qk_norm_joint=True, qkv_clip=0.5, logit_cap=0.7
    ),
    "attention without positions": ATTENTION.clone(rope=None),
    "a part of a head rotated": ATTENTION.clone(
        rope=rope.RotaryEmbedding.default_config().set(rotary_dim=4, theta=50.0)
    ),
    "interpolated positions": ATTENTION.clone(
        rope=rope.LinearRotaryEmbedding.default_config().set(factor=3.0)
    ),
    "Llama 3 positions": ATTENTION.clone(
        rope=rope.Llama3RotaryEmbedding.default_config().set(
            factor=8.0, original_context=64, theta=100.0
        )
    ),
    "YaRN": ATTENTION.clone(rope=YARN),
    "YaRN of DeepSeek": LATENT.clone(
        rope=YARN.clone(mscale=0.7, mscale_all_dim=0.9, truncate=False), score_factor=1.3
    ),
    "latent queries": LATENT.clone(q_lora_rank=4, rope=None),
    "experts": MOE.clone(
        experts=FeedForwardExperts.default_config().set(
            bias=True, activation=Activation.CLAMPED_SWIGLU
        ),
        router=Router.default_config().set(bias=True, score=Score.SOFTMAX_AFTER_TOP_K),
    ),
    "capacity": MOE.clone(dispatcher=CapacityDispatcher.default_config().set(capacity_factor=0.7)),
    "shared experts": MOE.clone(shared_experts=SHARED, shared_gate=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_formulas_equal_layers(name):
    layer = build(LAYERS[name])
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(np.float32),
        initial(layer),
    )
    segments = np.repeat(np.array([[1, 2, 0]], np.int32), [8, 9, 3], 1)
    inputs = {
        "x": 2 * rng.standard_normal((1, S, D)),
        "positions": np.r_[:8, :9, :3][None].astype(np.int32),
        "segment_ids": segments,
        "mask": segments > 0,
    }
    names = inspect.signature(layer.forward).parameters
    inputs = {name: inputs[name] for name in inputs if name in names}
    want = formulas.output(layer, params, **inputs)
    got = call(layer, params, **{n: np.float32(x) if n == "x" else x for n, x in inputs.items()})
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
