import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.flash_attention import flash_attention

BACKENDS = ["xla", "reference", None]


def operands(seq_len=7, heads=4, groups=2, dim=8, dtype=jnp.float32):
    rng = np.random.default_rng(seq_len)
    shapes = (2, seq_len, heads, dim), (2, seq_len, groups, dim), (2, seq_len, groups, dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def segments(seq_len, seed=0):
    """Returns two rows of segments, the second with padding at its end."""
    rng = np.random.default_rng(seed)
    rows = np.cumsum(rng.random((2, seq_len)) < 0.3, axis=1) + 1
    rows[1, seq_len - seq_len // 4 :] = 0
    return jnp.asarray(rows, jnp.int32)


def by_loop(q, k, v, segment_ids, causal, scale):
    """Each query by itself, in float64, over the keys that it may see."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(*q.shape[:3]):
        seen = np.arange(k.shape[1])
        if causal:
            seen = seen[seen <= i]
        if segment_ids is not None:
            row = np.asarray(segment_ids)[b]
            seen = seen[row[seen] == row[i]]
        group = h // (q.shape[2] // k.shape[2])
        scores = k[b, seen, group] @ q[b, i, h] * scale
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights @ v[b, seen, group] / weights.sum()
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_values_are_those_of_each_query_by_itself(backend, causal, packed, heads, groups):
    q, k, v = operands(heads=heads, groups=groups)
    ids = segments(7) if packed else None
    got = flash_attention(q, k, v, ids, causal=causal, backend=backend)
    want = by_loop(q, k, v, ids, causal, 8**-0.5)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_scale_multiplies_the_scores():
    q, k, v = operands()
    want = by_loop(q, k, v, None, True, 0.7)
    np.testing.assert_allclose(flash_attention(q, k, v, scale=0.7), want, rtol=1e-5, atol=1e-6)


@functools.partial(jax.jit, static_argnames=("causal", "backend"))
def pulled(q, k, v, ids, grad, *, causal, backend):
    value, pull = jax.vjp(
        lambda q, k, v: flash_attention(q, k, v, ids, causal=causal, backend=backend), q, k, v
    )
    return value, pull(grad)


# Blocks of 64 queries: one, one and a bit, three and a bit.
@pytest.mark.parametrize("seq_len", [64, 65, 200])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_give_the_values_and_gradients_of_the_reference(seq_len, causal):
    q, k, v = operands(seq_len, heads=2, groups=1, dim=4)
    ids, grad = segments(seq_len), jnp.flip(q, 1)
    got = pulled(q, k, v, ids, grad, causal=causal, backend="xla")
    want = pulled(q, k, v, ids, grad, causal=causal, backend="reference")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


def test_what_comes_later_and_other_segments_change_nothing():
    q, k, v = operands()
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2]] * 2, jnp.int32)
    before = flash_attention(q, k, v, ids)
    k, v = k.at[:, 6].set(9.0), v.at[:, 6].set(-9.0)
    k, v = k.at[:, 0].set(9.0), v.at[:, 0].set(-9.0)
    after = flash_attention(q, k, v, ids)
    np.testing.assert_array_equal(after[:, 3:6], before[:, 3:6])
    assert not np.allclose(after[:, 6], before[:, 6])


def test_a_first_token_gives_its_own_value():
    q, k, v = operands(heads=2, groups=2)
    np.testing.assert_allclose(flash_attention(q, k, v)[:, 0], v[:, 0], rtol=1e-6)


def test_large_scores_neither_overflow_nor_leave_the_mask():
    q, k, v = operands()
    got = flash_attention(1e4 * q, 1e4 * k, v)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, by_loop(1e4 * q, 1e4 * k, v, None, True, 8**-0.5), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_within_its_rounding_of_float32(backend):
    q, k, v = operands(dtype=jnp.bfloat16)
    got = flash_attention(q, k, v, backend=backend)
    assert got.dtype == jnp.bfloat16
    want = by_loop(q, k, v, None, True, 8**-0.5)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2**-6)


def test_heads_that_do_not_divide_into_groups_are_refused():
    q, k, v = operands(heads=4, groups=3)
    with pytest.raises(ValueError, match="4 query heads do not divide into 3 groups"):
        flash_attention(q, k, v)


def test_an_unknown_backend_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"has no backend 'xlaa'; .*xla"):
        flash_attention(*operands(), backend="xlaa")
