"""The causal convolution against a loop over documents."""

import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.mixers.convolution import CausalConvolution
from moelib.layers.mixers.documents import documents_of
from tests.layers.calling import build, call, call_and_collect, initial, normal

SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1, 0, 0]], np.int32)


def by_hand(x, weight, segment_ids):
    """Returns the convolution of each document alone, 0 at padding."""
    y = np.zeros(x.shape)
    for b, t in np.argwhere(segment_ids > 0):
        for ago in range(weight.shape[-1]):
            if t >= ago and segment_ids[b, t - ago] == segment_ids[b, t]:
                y[b, t] += weight[..., -1 - ago] * x[b, t - ago]
    return y


@pytest.mark.parametrize(("channels", "width"), [((5,), 4), ((2, 3), 2), ((3,), 1)])
def test_each_document_is_convolved_alone(channels, width):
    cfg = CausalConvolution.default_config().set(channels=channels, width=width)
    layer = build(cfg, axes=(None,) * len(channels))
    params = initial(layer)
    x = normal(2, 10, *channels)
    want = by_hand(x, np.asarray(params["weight"], np.float64), SEGMENTS)
    got = call(layer, params, x, documents=documents_of(jnp.asarray(SEGMENTS), SEGMENTS.shape))
    got = np.where(SEGMENTS.reshape(2, 10, *(1,) * len(channels)) > 0, got, 0)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_cache_continues_prompts_of_any_length():
    layer = build(CausalConvolution.default_config().set(channels=(3,), width=4), axes=(None,))
    params, x = initial(layer), normal(3, 9, 3)
    whole = call(layer, params, x, documents=documents_of(None, (3, 9)))
    lengths = np.array([1, 6, 2])
    mask = jnp.asarray(np.arange(6)[None] < lengths[:, None], jnp.int32)
    state = {**params, "cache": {"inputs": normal(3, 3, 3, seed=5)}}  # Of earlier sequences.
    for step in range(4):
        rows = x[:, :6] if step == 0 else x[np.arange(3), lengths + step - 1][:, None]
        documents = documents_of(mask if step == 0 else None, rows.shape[:2])
        got, outputs = call_and_collect(layer, state, rows, documents=documents)
        last = got[np.arange(3), lengths - 1] if step == 0 else got[:, 0]
        want = whole[np.arange(3), lengths + step - 1]
        np.testing.assert_allclose(last, want, atol=1e-6)
        state = {**params, "cache": outputs.state_updates["cache"]}


def test_a_bias_is_added_to_each_channel():
    layer = build(
        CausalConvolution.default_config(), channels=(5,), axes=(None,), width=3, bias=True
    )
    params = initial(layer)
    params["bias"] = jnp.arange(5.0)
    x, documents = normal(*SEGMENTS.shape, 5), documents_of(jnp.asarray(SEGMENTS), SEGMENTS.shape)
    got = call(layer, params, x, documents)
    want = by_hand(x, params["weight"], SEGMENTS) + np.arange(5.0)
    np.testing.assert_allclose(np.where(SEGMENTS[..., None] > 0, got - want, 0), 0, atol=1e-6)
