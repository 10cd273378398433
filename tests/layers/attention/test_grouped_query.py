"""Grouped-query attention against its formulas in float64, and its properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.layers import initializers
from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.norm import RMSNorm
from tests.layers.calling import build, call, float64, initial, normal

D, H, S = 8, 4, 6
X = normal(2, S, D)
POSITIONS = jnp.broadcast_to(jnp.arange(S)[None], (2, S))


def attention(**fields):
    fields = {"input_dim": D, "num_heads": H, **fields}
    # Larger weights than the default, so that scores differ.
    init = config_for_function(initializers.normal).set(std=0.7)
    return build(GroupedQueryAttention.default_config(), param_init=init, **fields)


def parameters(layer):
    params = initial(layer)
    return {
        name: jnp.asarray(normal(*value.shape, seed=3)) if name.endswith("bias") else value
        for name, value in params.items()
    }


def by_hand(layer, params, x, segment_ids=None, theta=1e4):
    """The layer in float64, one query at a time."""
    p, x = float64(params), x.astype(np.float64)
    q = np.einsum("bsd,dhk->bshk", x, p["q"]) + p.get("q_bias", 0.0)
    kv = np.einsum("bsd,dngk->bsngk", x, p["kv"]) + p.get("kv_bias", 0.0)
    k, v = kv[:, :, 0], kv[:, :, 1]
    if "q_norm" in p:
        axes = (-2, -1) if layer.config.qk_norm_joint else -1

        def normalized(x, scale):
            scale = scale.reshape(-1, x.shape[-1])  # Per head, or for all heads.
            return x / np.sqrt(np.mean(x**2, axes, keepdims=True) + 1e-6) * scale

        q, k = normalized(q, p["q_norm"]["scale"]), normalized(k, p["k_norm"]["scale"])
    if layer.config.qkv_clip is not None:
        q, k, v = (np.clip(x, -layer.config.qkv_clip, layer.config.qkv_clip) for x in (q, k, v))
    dim = q.shape[-1]
    if layer.config.rope is not None:
        turn = np.exp(1j * np.arange(S)[:, None] * theta ** (-2 * np.arange(dim // 2) / dim))
        turned = lambda t: (t[..., : dim // 2] + 1j * t[..., dim // 2 :]) * turn[None, :, None]
        q, k = (np.concatenate([t.real, t.imag], -1) for t in map(turned, (q, k)))
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = np.arange(i + 1)
        if segment_ids is not None:
            seen = seen[segment_ids[b, seen] == segment_ids[b, i]]
        group = h // (q.shape[2] // k.shape[2])
        scores = k[b, seen, group] @ q[b, i, h] / np.sqrt(dim)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, seen, group] / weights.sum()
    return np.einsum("bshk,hkd->bsd", out, p["output"]) + p.get("output_bias", 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": 2},
        {"num_kv_heads": 1, "head_dim": 4},
        {"qkv_bias": True, "output_bias": True},
        {"rope": None},
        {"qk_norm": RMSNorm.default_config(), "num_kv_heads": 2},
        {
            "qk_norm": RMSNorm.default_config(),
            "qk_norm_joint": True,
            "num_kv_heads": 2,
            "qkv_clip": 0.9,
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_output_is_that_of_the_formulas(fields, packed):
    layer = attention(**fields)
    params = parameters(layer)
    ids = np.array([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2]]) if packed else None
    want = by_hand(layer, params, X, ids)
    ids = None if ids is None else jnp.asarray(ids)
    got = call(layer, params, jnp.asarray(X), positions=POSITIONS, segment_ids=ids)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_grouped_heads_equal_full_ones_with_repeated_keys_and_values():
    grouped, full = attention(num_kv_heads=2), attention()
    params = parameters(grouped)
    repeated = {**params, "kv": jnp.repeat(params["kv"], 2, axis=2)}
    got = call(grouped, params, jnp.asarray(X), positions=POSITIONS)
    want = call(full, repeated, jnp.asarray(X), positions=POSITIONS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_two_packed_documents_equal_two_sequences():
    layer = attention(num_kv_heads=2)
    params = parameters(layer)
    first, second = jnp.asarray(X[:1, :4]), jnp.asarray(X[1:, :2])
    packed = call(
        layer,
        params,
        jnp.concatenate([first, second], 1),
        positions=jnp.array([[0, 1, 2, 3, 0, 1]]),
        segment_ids=jnp.array([[1, 1, 1, 1, 2, 2]]),
    )
    for part, alone in ((packed[:, :4], first), (packed[:, 4:], second)):
        positions = jnp.arange(alone.shape[1])[None]
        want = call(layer, params, alone, positions=positions)
        np.testing.assert_allclose(part, want, rtol=1e-5, atol=1e-5)


def test_a_later_token_changes_no_earlier_output():
    layer = attention()
    params = parameters(layer)
    got = call(layer, params, jnp.asarray(X).at[:, 4].set(5.0), positions=POSITIONS)
    want = call(layer, params, jnp.asarray(X), positions=POSITIONS)
    np.testing.assert_array_equal(got[:, :4], want[:, :4])


def test_parameters_may_be_numpy_arrays():
    layer = attention(qk_norm=RMSNorm.default_config())
    params = initial(layer)
    got = call(layer, jax.tree.map(np.asarray, params), jnp.asarray(X), positions=POSITIONS)
    want = call(layer, params, jnp.asarray(X), positions=POSITIONS)
    np.testing.assert_array_equal(got, want)


def test_parameters_and_flops_are_counted_by_hand():
    layer = attention(num_kv_heads=2, head_dim=16)
    queries_and_output, keys_and_values = 2 * D * H * 16, 2 * D * 2 * 16
    assert layer.active_parameters() == queries_and_output + keys_and_values
    # A token sees 1, 2, ... S keys: (S + 1) / 2 on average; scores and weighted values.
    seen = sum(range(1, S + 1)) / S
    want = 2 * (queries_and_output + keys_and_values) + 2 * 2 * seen * H * 16
    assert layer.forward_flops_per_token(S) == want


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "layer: input_dim=8 .*num_heads=3; .*head_dim"),
        ({"num_kv_heads": 3}, "layer: num_heads=4 .*num_kv_heads=3"),
        ({"num_heads": 0}, "layer: num_heads=0"),
        ({"num_kv_heads": 0}, "layer: num_kv_heads=0"),
        ({"head_dim": -4}, "layer: head_dim=-4"),
        ({"window": 0}, "layer: window=0"),
        ({"logit_cap": -1.0}, r"layer: logit_cap=-1\.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        attention(**fields)
