"""Rows of assignments, some without a row, against gathers and sums in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.kernels.backend import Device
from moelib.layers.moe import rows as rows_module
from moelib.layers.moe.rows import (
    combine_rows,
    sort_assignments,
    sum_in_token_order,
    sum_rows,
    take_rows,
    take_weights,
)
from tests.layers.calling import normal

T, K, G, R, D = 9, 3, 4, 25, 5
KEYS = np.random.default_rng(0).integers(0, G + 1, (T, K)).astype(np.int32)  # G: no row.
ROW_MAP, SIZES = sort_assignments(jnp.asarray(KEYS), G, R)
X, WEIGHTS, ROWS = (jnp.asarray(normal(*shape)) for shape in ((T, D), (T, K), (R, D)))
NUM_ROWS = int((KEYS < G).sum())


def test_rows_stand_sorted_by_group_and_by_token_within_one():
    want = sorted((KEYS[t, k], t, k) for t, k in np.ndindex(T, K) if KEYS[t, k] < G)
    got = np.asarray(ROW_MAP.assignments)
    np.testing.assert_array_equal(got[:NUM_ROWS], [t * K + k for _, t, k in want])
    assert (got[NUM_ROWS:] >= T * K).all()
    np.testing.assert_array_equal(SIZES, np.bincount(KEYS.ravel(), minlength=G + 1)[:G])
    for row, (_, t, k) in enumerate(want):
        assert ROW_MAP.rows[t, k] == row
    assert (np.asarray(ROW_MAP.rows)[KEYS == G] >= R).all()


def plain_matrix():
    """Returns [R, T], 1 where a row holds a token."""
    held = np.zeros((R, T), np.float32)
    for t, k in np.ndindex(T, K):
        if KEYS[t, k] < G:
            held[ROW_MAP.rows[t, k], t] = 1
    return held


def test_tokens_are_copied_to_their_rows_and_summed_back():
    held = plain_matrix()
    some = held.any(1)
    np.testing.assert_allclose(take_rows(X, ROW_MAP)[some], (held @ X)[some], rtol=1e-6)
    np.testing.assert_allclose(sum_rows(ROWS, ROW_MAP), held.T @ ROWS, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [300, 256])
def test_sums_in_token_order_are_those_of_gathers_for_few_rows(num_tokens, monkeypatch):
    rng = np.random.default_rng(num_tokens)
    keys = np.where(rng.random((num_tokens, 8)) < 0.2, rng.integers(0, G, (num_tokens, 8)), G)
    row_map, sizes = jax.jit(sort_assignments, static_argnums=(1, 2))(keys, G, num_tokens * 3)
    held = np.arange(num_tokens * 3) < np.asarray(sizes).sum()
    assert num_tokens < held.sum() < held.size
    rows = jnp.where(held[:, None], normal(num_tokens * 3, D), jnp.nan).astype(jnp.bfloat16)
    want = np.asarray(jax.jit(sum_rows)(rows, row_map), np.float32)
    got = jax.jit(sum_in_token_order)(rows, row_map)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2**-7, atol=2**-8)
    calls = []
    monkeypatch.setattr(rows_module, "sum_in_token_order", lambda *args: calls.append(args) or got)
    monkeypatch.setattr(rows_module, "current_device", lambda: Device("tpu", "TPU v5", None))
    sum_rows(rows, row_map)
    sum_rows(jnp.zeros((num_tokens * 8, D), jnp.bfloat16), row_map)  # Most have a row.
    sum_rows(rows.astype(jnp.float32), row_map)  # A product would round it.
    assert [args[0].shape for args in calls] == [(num_tokens * 3, D)]


def test_scanned_layers_hold_no_zeros_for_rows_that_do_not_exist():
    def layer(vector, _):
        tokens = X[:, :1] * vector[None]
        return jnp.sin(jnp.sum(sum_rows(take_rows(tokens, ROW_MAP), ROW_MAP), 0)), None

    run = lambda vector: jnp.sum(jax.lax.scan(layer, vector, length=2)[0])
    eqns = jax.make_jaxpr(jax.grad(run))(X[0]).eqns
    shapes = [[x.aval.shape for x in eqn.invars] for eqn in eqns if eqn.primitive.name == "scan"]
    assert len(shapes) == 2
    for operands in shapes:
        assert (T, K) in operands
        assert (T, D) not in operands


def test_the_gradients_are_those_of_plain_matrices():
    held = plain_matrix()
    (grad,) = jax.vjp(lambda x: take_rows(x, ROW_MAP), X)[1](ROWS)
    np.testing.assert_allclose(grad, held.T @ ROWS, rtol=1e-5, atol=1e-6)
    (grad,) = jax.vjp(lambda rows: sum_rows(rows, ROW_MAP), ROWS)[1](X)
    some = held.any(1)
    np.testing.assert_allclose(grad[some], (held @ X)[some], rtol=1e-6)
    index = jnp.minimum(ROW_MAP.rows, R - 1)
    has = jnp.asarray(KEYS < G)[..., None]

    def plain(rows, weights):
        return jnp.sum(jnp.where(has, rows[index] * weights[..., None], 0.0), 1)

    got, pull = jax.vjp(lambda rows, w: combine_rows(rows, w, ROW_MAP), ROWS, WEIGHTS)
    want, plain_pull = jax.vjp(plain, ROWS, WEIGHTS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(pull(X), plain_pull(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_rows_without_an_assignment_and_assignments_without_a_row_may_have_any_value():
    rows = ROWS.at[NUM_ROWS:].set(jnp.nan)
    weights = jnp.where(jnp.asarray(KEYS == G), jnp.nan, WEIGHTS)
    got, pull = jax.vjp(lambda rows, w: combine_rows(rows, w, ROW_MAP), rows, weights)
    want, plain = jax.vjp(lambda rows, w: combine_rows(rows, w, ROW_MAP), ROWS, WEIGHTS)
    np.testing.assert_array_equal(got, want)
    for a, b in zip(pull(X), plain(X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_follow_their_assignments():
    got, pull = jax.vjp(lambda w: take_weights(w, ROW_MAP), WEIGHTS)
    want = np.zeros(R, np.float32)
    back = np.zeros((T, K), np.float32)
    for t, k in np.ndindex(T, K):
        if KEYS[t, k] < G:
            want[ROW_MAP.rows[t, k]] = WEIGHTS[t, k]
            back[t, k] = ROWS[ROW_MAP.rows[t, k], 0]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(pull(ROWS[:, 0])[0], back)
