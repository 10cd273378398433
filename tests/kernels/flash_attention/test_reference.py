import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import MaskSpec, flash_attention

attend = jax.jit(flash_attention, static_argnames=("spec", "backend"))  # One program per call.


def _operands(seq_len, heads=4, groups=2, dim=8):
    rng = np.random.default_rng(0)
    shapes = (2, seq_len, heads, dim), (2, seq_len, groups, dim), (2, seq_len, groups, dim)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_a_window_is_that_of_jax(window):
    """JAX counts the tokens before the query, we count the query too."""
    q, k, v = _operands(24)
    local = None if window is None else (window - 1, 0)
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local)
    got = attend(q, k, v, MaskSpec(8**-0.5, window=window), backend="reference")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_window_of_two_sees_a_token_and_the_one_before_it():
    q, k, v = _operands(6)
    got = attend(0 * q, k, v, MaskSpec(1.0, window=2), backend="reference")
    want = jnp.repeat((v[:, 1:] + v[:, :-1]) / 2, 2, axis=2)
    np.testing.assert_allclose(got[:, 1:], want, rtol=1e-5, atol=1e-6)


def test_a_sink_takes_its_share_of_a_uniform_softmax():
    """Equal scores: token i gives (v_0 + ... + v_i) / (i + 1 + exp(sink))."""
    q, k, v = _operands(5, groups=4)
    sinks = jnp.asarray([-2.0, 0.0, 1.0, 3.0])
    got = attend(0 * q, k, v, MaskSpec(1.0), sinks=sinks, backend="reference")
    share = (jnp.arange(5.0) + 1)[:, None] + jnp.exp(sinks)[None]
    np.testing.assert_allclose(
        got, jnp.cumsum(v, 1) / share[None, :, :, None], rtol=1e-5, atol=1e-6
    )


def test_a_sink_below_all_scores_changes_nothing():
    q, k, v = _operands(5)
    run = functools.partial(attend, q, k, v, MaskSpec(1.0), backend="reference")
    np.testing.assert_allclose(run(sinks=jnp.full(4, -100.0)), run(), atol=1e-6)


def test_a_cap_bounds_the_scores_smoothly():
    q, k, v = _operands(5, groups=4)
    got = attend(q, k, v, MaskSpec(1.0, logit_cap=0.5), backend="reference")
    scores = 0.5 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 0.5)
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool))[None, None], scores, -jnp.inf)
    want = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
