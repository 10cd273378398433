"""Dispatchers on one device: against the oracle and a loop over tokens, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
from tests.kernels.comparing import assert_close
from tests.layers.calling import build, initial, normal
from tests.oracles.moe import routed

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
X, GRAD = normal(T, D), normal(T, D, seed=1)
WEIGHTS = np.abs(normal(T, K, seed=2))


def random_ids(experts, seed=0):
    """Returns K different experts for each token."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:K] for _ in range(T)])


IDS = random_ids(np.arange(E))
MASK = np.random.default_rng(3).random(T) < 0.6
ROUTINGS = {
    "no padding": (IDS, np.ones(T, bool)),
    "padding anywhere": (IDS, MASK),
    "padding at the end": (random_ids([0, 4]), np.arange(T) < 25),  # And empty experts.
    "skewed": (np.where(np.arange(T)[:, None] < 36, [[3, 1]], IDS), MASK),
    "all to the same": (np.broadcast_to([[2, 0]], (T, K)), np.ones(T, bool)),
    "all padding": (IDS, np.zeros(T, bool)),
    "some of no expert": (np.where(IDS == 1, -1, np.where(IDS == 2, E + 1, IDS)), MASK),
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


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dispatcher", ALL)
def test_each_equals_dense_in_values_and_all_gradients_whatever_padding_holds(dispatcher, routing):
    ids, mask = ROUTINGS[routing]
    hole = ~mask[:, None]
    x, weights = (np.where(hole, np.float32(np.nan), a) for a in (X, WEIGHTS))
    got = pulled(ALL[dispatcher], PARAMS, x, ids, weights, mask, GRAD)
    want = pulled(DENSE, PARAMS, X, ids, WEIGHTS, mask, GRAD)
    assert_close(got, want, 1e-6)
    by_token = routed(PARAMS, X, np.where(hole, -1, ids), WEIGHTS)
    np.testing.assert_allclose(got[0], by_token, atol=1e-5)


@pytest.mark.parametrize("dispatcher", ALL.values(), ids=ALL)
def test_a_token_with_nan_stays_by_itself(dispatcher):
    mask, x = np.ones(T, bool), X.copy()
    x[7] = np.nan
    want, _ = pulled(dispatcher, PARAMS, X, IDS, WEIGHTS, mask, GRAD)
    got, _ = pulled(dispatcher, PARAMS, x, IDS, WEIGHTS, mask, GRAD)
    assert np.isnan(got[7]).all()
    others = np.arange(T) != 7
    np.testing.assert_allclose(got[others], want[others], atol=1e-6)


def test_bfloat16_rows_are_summed_in_float32():
    x, grad = (a.astype(jnp.bfloat16) for a in (X, GRAD))
    want = routed(PARAMS, x, IDS, WEIGHTS)
    for name in ("sorted", "capacity"):  # On one device the others are sorted ones.
        run = functools.partial(pulled, ALL[name], PARAMS)
        got, (grads, *_) = run(x, IDS, WEIGHTS, np.ones(T, bool), grad)
        assert got.dtype == jnp.bfloat16
        assert grads["up"].dtype == jnp.float32
        np.testing.assert_allclose(np.float32(got), want, atol=2e-2 * np.abs(want).max())


def test_padding_after_a_sequence_drops_the_assignments_that_it_drops_alone():
    cfg = CapacityDispatcher.default_config().set(capacity_factor=0.6)
    num = 7  # Of 10 positions: 2 of 14 assignments per expert, but 3 of 20.
    ids, run = random_ids([0, 1, 2]), functools.partial(pulled, cfg.instantiate())
    cut = lambda a: a.reshape(B, S, -1)[:, :num].reshape(B * num, -1)
    padded = run(PARAMS, X, ids, WEIGHTS, np.tile(np.arange(S) < num, B), GRAD)
    alone = run(PARAMS, *map(cut, (X, ids, WEIGHTS)), np.ones(B * num, bool), cut(GRAD))
    np.testing.assert_allclose(cut(padded[0]), alone[0], atol=1e-5)
    every = run(PARAMS, X, ids, WEIGHTS, np.ones(T, bool), GRAD)
    assert np.abs(cut(every[0]) - alone[0]).max() > 0.1


def test_a_dispatcher_without_dispatch_is_an_error():
    with pytest.raises(TypeError, match=r"Dispatcher.*_dispatch"):
        Dispatcher.default_config().instantiate()
