"""Gated DeltaNet and Kimi Delta Attention against their formulas in float64, and properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.layers import initializers
from moelib.layers.mixers.gated_delta_net import GatedDeltaNet
from moelib.layers.mixers.kimi_delta_attention import KimiDeltaAttention
from tests import tiny
from tests.layers.calling import build, call, float64, initial, normal
from tests.oracles.delta_rule import delta_rule

D, H, G, K, V, S = 8, 4, 2, 6, 5, 9
X = normal(2, S, D)
POSITIONS = np.broadcast_to(np.arange(S, dtype=np.int32), (2, S))
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2, 3]], np.int32)


def layer_of(kind=GatedDeltaNet, **fields):
    sizes = {"num_value_heads": H, "num_key_heads": G, "key_head_dim": K, "value_head_dim": V}
    init = config_for_function(initializers.normal).set(std=0.7)
    return build(kind.default_config(), input_dim=D, param_init=init, **{**sizes, **fields})


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def low_rank(x, p, name):
    return np.einsum("bsr,rhk->bshk", x @ p[f"{name}_down"], p[f"{name}_up"])


def convolved(x, weight, segment_ids):
    """Returns silu of the convolution of each document [B, S, ...]."""
    y = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        for ago in range(weight.shape[-1]):
            if t >= ago and segment_ids[b, t - ago] == segment_ids[b, t]:
                y[b, t] += weight[..., -1 - ago] * x[b, t - ago]
    return silu(y)


def by_hand(params, segment_ids):
    """Returns the layer's output in float64."""
    p, x = float64(params), X.astype(np.float64)
    qk = convolved(np.einsum("bsd,dngk->bsngk", x, p["qk"]), p["qk_conv"]["weight"], segment_ids)
    v = convolved(np.einsum("bsd,dhv->bshv", x, p["v"]), p["v_conv"]["weight"], segment_ids)
    qk = qk / np.sqrt(np.sum(qk**2, -1, keepdims=True) + 1e-6)
    qk = qk[:, :, :, np.arange(H) // (H // qk.shape[3])]
    if "decay_up" in p:
        decay, gate = low_rank(x, p, "decay"), sigmoid(low_rank(x, p, "gate"))
    else:
        decay, gate = x @ p["decay"], silu(np.einsum("bsd,dhv->bshv", x, p["gate"]))
    decay = np.log1p(np.exp(decay + p["decay_bias"])).reshape(2, S, H, -1)
    decay = -np.exp(p["log_decay_rate"])[:, None] * decay
    q, k = qk[:, :, 0] / np.sqrt(K), qk[:, :, 1]
    out, _ = delta_rule(q, k, v, decay, sigmoid(x @ p["beta"]), segment_ids)
    out = out / np.sqrt(np.mean(out**2, -1, keepdims=True) + 1e-6) * p["norm"]["scale"]
    return np.einsum("bshv,hvd->bsd", out * gate, p["output"])


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_heads": None, "conv_width": 2},
        {"kind": KimiDeltaAttention, "low_rank_dim": 3},
    ],
    ids=str,
)
def test_the_output_is_that_of_the_formulas(fields, segment_ids):
    layer = layer_of(**fields)
    params = initial(layer)
    got = np.asarray(call(layer, params, X, positions=POSITIONS, segment_ids=segment_ids))
    valid = np.ones((2, S, 1)) if segment_ids is None else segment_ids[..., None] > 0
    want = by_hand(params, np.ones((2, S), int) if segment_ids is None else segment_ids)
    np.testing.assert_allclose(got * valid, want * valid, rtol=1e-5, atol=2e-5)


def check_split_sequences(layer):
    """Checks values and gradients of a layer on a mesh that splits sequences."""

    def total(params, x):
        y = call(layer, params, x, positions=POSITIONS[:, :8], segment_ids=SEGMENTS[:, :8])
        return jnp.sum(jnp.where(SEGMENTS[:, :8, None] > 0, y, 0) ** 2)

    run = jax.value_and_grad(total, (0, 1))
    want = jax.jit(run)(initial(layer), X[:, :8])
    with jax.set_mesh(tiny.mesh(data=2, seq=2)):
        tiny.assert_trees_close(jax.jit(run)(initial(layer), X[:, :8]), want)


@pytest.mark.parametrize("kind", [GatedDeltaNet, KimiDeltaAttention])
def test_a_mesh_that_splits_sequences_gives_the_numbers_of_one_device(kind):
    check_split_sequences(layer_of(kind))


def test_parameters_and_flops_are_counted_by_hand():
    layer = layer_of()
    matrices = 2 * D * G * K + 3 * D * H * V + 2 * D * H
    assert layer.active_parameters() == matrices + 2 * H + V + 4 * (2 * G * K + H * V)
    assert layer.forward_flops_per_token(S) == 2 * matrices + 3 * 2 * H * K * V


def test_parameters_of_kimi_delta_attention_are_counted_by_hand():
    layer = layer_of(KimiDeltaAttention)
    low_rank = 2 * D * V + V * H * (K + V)
    matrices = 2 * D * G * K + 2 * D * H * V + D * H + low_rank
    assert layer.active_parameters() == matrices + H + H * K + V + 4 * (2 * G * K + H * V)
    assert layer.forward_flops_per_token(S) == 2 * matrices + 3 * 2 * H * K * V


def test_decays_start_as_in_mamba():
    params = initial(layer_of(num_value_heads=512, num_key_heads=None))
    rates, steps = np.exp(params["log_decay_rate"]), jax.nn.softplus(params["decay_bias"])
    assert 0.01 < rates.min() < 1
    assert 15 < rates.max() < 16
    assert 0.001 <= steps.min() < 0.0012
    assert 0.09 < steps.max() <= 0.1


def test_bfloat16_is_close_to_float32():
    layer = layer_of()
    params = initial(layer)
    want = call(layer, params, X, positions=POSITIONS)
    got = call(layer, params, jnp.asarray(X, jnp.bfloat16), positions=POSITIONS)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.05 * np.abs(want).max())


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"num_value_heads=4.*num_key_heads=3"):
        layer_of(num_key_heads=3)
