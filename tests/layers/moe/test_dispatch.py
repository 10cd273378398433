"""Dispatchers on one device: against the oracle and a loop over tokens, values and gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.attention.grouped_query import GroupedQueryAttention
from moelib.layers.moe.dispatch import (
    Assignments,
    DenseDispatcher,
    DispatchContext,
    Dispatcher,
    SortedDispatcher,
)
from moelib.layers.moe.dispatch_capacity import CapacityDispatcher
from moelib.layers.moe.dispatch_ragged import RaggedDispatcher, RingDispatcher
from moelib.layers.moe.experts import FeedForwardExperts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.transformer import TransformerLayer
from tests.layers.calling import build, float64, initial, normal

B, S, D, F, E, K = 4, 10, 4, 6, 5, 2
T = B * S
EXPERTS = build(
    FeedForwardExperts.default_config(),
    num_experts=E,
    num_experts_per_token=K,
    input_dim=D,
    hidden_dim=F,
)
PARAMS = initial(EXPERTS)
DENSE = DenseDispatcher.default_config().instantiate()
OTHERS = {
    "sorted": SortedDispatcher.default_config().instantiate(),
    "ragged": RaggedDispatcher.default_config().instantiate(),
    "ring": RingDispatcher.default_config().instantiate(),
    "capacity": CapacityDispatcher.default_config().set(capacity_factor=E / K).instantiate(),
}
ALL = {"dense": DENSE, **OTHERS}
X, GRAD = jnp.asarray(normal(T, D)), jnp.asarray(normal(T, D, seed=1))
WEIGHTS = jnp.asarray(np.abs(normal(T, K, seed=2)))


def random_ids(experts, seed=0):
    """Returns K different experts for each token."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:K] for _ in range(T)])


IDS = {
    "random": random_ids(np.arange(E)),
    "skewed": np.where(np.arange(T)[:, None] < 36, [[3, 1]], random_ids(np.arange(E))),
    "with empty experts": random_ids([0, 4]),
    "all to the same": np.broadcast_to([[2, 0]], (T, K)),
}
MASKS = {
    "no padding": np.ones(T, bool),
    "padding at the end": np.arange(T) < 25,
    "padding anywhere": np.random.default_rng(3).random(T) < 0.6,
    "all padding": np.zeros(T, bool),
}


@functools.partial(jax.jit, static_argnums=0)
def pulled(dispatcher, params, x, ids, weights, mask, grad):
    """Returns (value, gradients in parameters, x and weights)."""

    def run(params, x, weights):
        rows = lambda a: a.reshape(B, -1, *a.shape[1:])
        assignments = Assignments(rows(ids), rows(weights), rows(mask))
        y, _ = dispatcher(EXPERTS, params, rows(x), assignments, DispatchContext(E))
        return y.reshape(-1, D)

    value, pull = jax.vjp(run, params, x, weights)
    return value, pull(grad)


def by_loop(params, x, ids, weights, mask):
    """Returns the output in float64, computed for one token and expert at a time."""
    p, x, weights = float64(params), float64(x), float64(weights)
    out = np.zeros_like(x)
    for t in np.flatnonzero(mask):
        for k, e in enumerate(ids[t]):
            gate, up = np.einsum("d,ndf->nf", x[t], p["up"][e])
            out[t] += weights[t, k] * ((gate / (1 + np.exp(-gate)) * up) @ p["down"][e])
    return out


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dispatcher", OTHERS)
def test_each_equals_dense_in_values_and_all_gradients(dispatcher, ids, mask):
    ids, mask = jnp.asarray(IDS[ids]), jnp.asarray(MASKS[mask])
    got = pulled(ALL[dispatcher], PARAMS, X, ids, WEIGHTS, mask, GRAD)
    want = pulled(DENSE, PARAMS, X, ids, WEIGHTS, mask, GRAD)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * max(scale, 1.0))
    np.testing.assert_allclose(
        got[0], by_loop(PARAMS, X, np.asarray(ids), WEIGHTS, np.asarray(mask)), atol=1e-5
    )
    assert not np.any(np.asarray(got[0])[~np.asarray(mask)])


@pytest.mark.parametrize("dispatcher", ALL.values(), ids=ALL)
def test_permuted_tokens_give_permuted_outputs(dispatcher):
    order = np.random.default_rng(5).permutation(T)
    ids, mask = jnp.asarray(IDS["random"]), jnp.asarray(MASKS["padding anywhere"])
    want, (_, want_x, want_weights) = pulled(dispatcher, PARAMS, X, ids, WEIGHTS, mask, GRAD)
    moved = [a[order] for a in (X, ids, WEIGHTS, mask, GRAD)]
    got, (_, got_x, got_weights) = pulled(dispatcher, PARAMS, *moved)
    for a, b in ((got, want), (got_x, want_x), (got_weights, want_weights)):
        np.testing.assert_allclose(a, b[order], atol=1e-5)


@pytest.mark.parametrize("dispatcher", ALL.values(), ids=ALL)
def test_permuted_experts_give_the_same_output(dispatcher):
    order = np.array([3, 0, 4, 1, 2])
    ids, mask = jnp.asarray(IDS["random"]), jnp.asarray(MASKS["padding at the end"])
    want, _ = pulled(dispatcher, PARAMS, X, ids, WEIGHTS, mask, GRAD)
    moved = jax.tree.map(lambda p: p[order], PARAMS)
    renamed = jnp.asarray(np.argsort(order))[ids]
    got, _ = pulled(dispatcher, moved, X, renamed, WEIGHTS, mask, GRAD)
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("dispatcher", ALL.values(), ids=ALL)
def test_a_token_with_nan_stays_by_itself(dispatcher):
    ids, mask = jnp.asarray(IDS["random"]), jnp.asarray(MASKS["no padding"])
    want, _ = pulled(dispatcher, PARAMS, X, ids, WEIGHTS, mask, GRAD)
    got, _ = pulled(dispatcher, PARAMS, X.at[7].set(jnp.nan), ids, WEIGHTS, mask, GRAD)
    assert np.isnan(got[7]).all()
    others = np.arange(T) != 7
    np.testing.assert_allclose(got[others], want[others], atol=1e-6)


@pytest.mark.parametrize("dispatcher", ALL.values(), ids=ALL)
def test_padding_may_have_any_value(dispatcher):
    ids, mask = jnp.asarray(IDS["random"]), jnp.asarray(MASKS["padding anywhere"])
    want = pulled(dispatcher, PARAMS, X, ids, WEIGHTS, mask, GRAD)
    hole = ~mask[:, None]
    x, weights = jnp.where(hole, jnp.nan, X), jnp.where(hole, jnp.nan, WEIGHTS)
    got = pulled(dispatcher, PARAMS, x, ids, weights, mask, GRAD)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), got, want)


def test_padding_after_a_sequence_drops_the_assignments_that_it_drops_alone():
    cfg = CapacityDispatcher.default_config().set(capacity_factor=0.6)
    num = 7  # Of 10 positions: 2 of 14 assignments per expert, but 3 of 20.
    ids, run = jnp.asarray(random_ids([0, 1, 2])), functools.partial(pulled, cfg.instantiate())
    cut = lambda a: a.reshape(B, S, -1)[:, :num].reshape(B * num, -1)
    padded = run(PARAMS, X, ids, WEIGHTS, jnp.asarray(np.tile(np.arange(S) < num, B)), GRAD)
    alone = run(PARAMS, *map(cut, (X, ids, WEIGHTS)), jnp.ones(B * num, bool), cut(GRAD))
    np.testing.assert_allclose(cut(padded[0]), alone[0], atol=1e-5)
    every = run(PARAMS, X, ids, WEIGHTS, jnp.ones(T, bool), GRAD)
    assert np.abs(cut(every[0]) - alone[0]).max() > 0.1


def test_bfloat16_rows_are_summed_in_float32():
    ids, mask = jnp.asarray(IDS["random"]), jnp.asarray(MASKS["no padding"])
    x = X.astype(jnp.bfloat16)
    want = by_loop(PARAMS, x, IDS["random"], WEIGHTS, MASKS["no padding"])
    for name in ("sorted", "capacity"):  # On one device the others are sorted ones.
        got, (grads, *_) = pulled(
            ALL[name], PARAMS, x, ids, WEIGHTS, mask, GRAD.astype(jnp.bfloat16)
        )
        assert got.dtype == jnp.bfloat16
        assert grads["up"].dtype == jnp.float32
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2 * np.abs(want).max())


def test_a_dispatcher_without_dispatch_is_an_error():
    with pytest.raises(TypeError, match=r"Dispatcher.*_dispatch"):
        Dispatcher.default_config().instantiate()


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    ("dispatcher", "field"),
    [
        (CapacityDispatcher, "capacity_factor"),
        (RaggedDispatcher, "round_factor"),
    ],
)
def test_factors_that_are_not_finite_and_above_zero_are_refused(dispatcher, field, factor):
    cfg = dispatcher.default_config().set(**{field: factor})
    match = f"^{dispatcher.__name__}.{field} is {factor};"
    with pytest.raises(ValueError, match=match):
        cfg.instantiate()
    moe = MoELayer.default_config().set(
        num_experts=E, num_experts_per_token=K, hidden_dim=F, dispatcher=cfg
    )
    attention = GroupedQueryAttention.default_config().set(num_heads=1)
    with pytest.raises(ValueError, match=match) as caught:
        build(
            TransformerLayer.default_config(),
            input_dim=D,
            self_attention=attention,
            feed_forward=moe,
        )
    assert "feed_forward" in caught.value.__notes__[0]
