"""Balance losses in closed form and against float64 references; balance by bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.layers.moe import balance
from moelib.layers.moe.balance import BalanceScope, BiasBalancing, LayerLoad, LoadCounter
from tests.layers.calling import build, call, call_and_collect, initial, normal
from tests.oracles import losses
from tests.oracles.moe import sigmoid

# One program per call.
expert_counts = jax.jit(balance.expert_counts, static_argnums=2)
load_balance_loss = jax.jit(balance.load_balance_loss, static_argnums=3)
router_z_loss = jax.jit(balance.router_z_loss)

B, S, E, K = 3, 7, 5, 2


def routing(seed=0):
    """Returns random (probabilities, ids of the best K, mask, logits)."""
    logits = normal(B, S, E, seed=seed, scale=2.0)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-logits, -1)[..., :K]
    mask = np.arange(S) < np.array([[S], [3], [0]])  # No padding, some, and only padding.
    return probs, ids, mask, logits


def test_counts_are_those_of_the_valid_tokens():
    _, ids, mask, _ = routing()
    got = expert_counts(ids, mask, E)
    for b in range(B):
        want = np.bincount(ids[b, mask[b]].ravel(), minlength=E)
        np.testing.assert_array_equal(got[b], want)


def test_the_loss_is_that_of_switch_over_the_valid_tokens():
    probs, ids, mask, _ = routing()
    got, grad = jax.value_and_grad(load_balance_loss)(probs, ids, mask)
    np.testing.assert_allclose(got, losses.load_balance(probs[mask], ids[mask]), rtol=1e-6)
    share = np.bincount(ids[mask].ravel(), minlength=E) / (K * mask.sum())
    want = np.where(mask[..., None], E * share / mask.sum(), 0)
    np.testing.assert_allclose(grad, want, rtol=1e-5)


def test_a_loss_per_sequence_is_averaged_by_tokens():
    probs, ids, mask, _ = routing()
    got = load_balance_loss(probs, ids, mask, BalanceScope.SEQUENCE)
    rows = [losses.load_balance(probs[b, mask[b]], ids[b, mask[b]]) for b in (0, 1)]
    np.testing.assert_allclose(got, (S * rows[0] + 3 * rows[1]) / (S + 3), rtol=1e-6)


def test_a_loss_of_the_global_batch_counts_the_micro_batches_before():
    probs, ids, mask, _ = routing()
    before = np.array([4, 0, 1, 2, 3], np.float32)
    got = load_balance_loss(probs, ids, mask, BalanceScope.GLOBAL_BATCH, before)
    want = losses.load_balance(probs[mask], ids[mask], before)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("scope", BalanceScope)
def test_even_routing_costs_one_and_one_expert_for_all_costs_e(scope):
    mask = np.ones((2, 5), bool)
    even = np.full((2, 5, E), 1 / E, np.float32)
    ids = np.broadcast_to(np.arange(5)[:, None], (2, 5, 1))
    np.testing.assert_allclose(load_balance_loss(even, ids, mask, scope), 1.0, rtol=1e-6)
    all_to_one = np.broadcast_to(np.eye(E, dtype=np.float32)[3], (2, 5, E))
    loss = load_balance_loss(all_to_one, np.full((2, 5, 1), 3), mask, scope)
    np.testing.assert_allclose(loss, E, rtol=1e-6)


def test_a_batch_of_padding_costs_nothing():
    probs, ids, mask, logits = routing()
    for scope in BalanceScope:
        assert float(load_balance_loss(probs, ids, mask & False, scope)) == 0
    assert float(router_z_loss(logits, mask & False)) == 0


def test_the_load_of_layers_sums_to_that_of_one_layer_with_all_their_tokens():
    layers = [routing(seed)[:2] for seed in (0, 1)]
    mask = routing()[2]
    loads = [jax.jit(LayerLoad.of)(probs, ids, mask) for probs, ids in layers]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *loads)
    probs, ids = (np.concatenate(parts) for parts in zip(*layers, strict=True))
    want = load_balance_loss(probs, ids, np.concatenate([mask, mask]))
    np.testing.assert_allclose(stacked.summed().loss(), want, rtol=1e-6)


def test_one_expert_is_refused():
    probs, ids = np.ones((1, 2, 1), np.float32), np.zeros((1, 2, 1), np.int32)
    with pytest.raises(ValueError, match="num_experts=1"):
        load_balance_loss(probs, ids, np.ones((1, 2), bool))


def test_the_z_loss_is_the_mean_square_of_the_logsumexp():
    _, _, mask, logits = routing()
    got = router_z_loss(logits, mask)
    np.testing.assert_allclose(got, losses.router_z(logits[mask]), rtol=1e-6)


BALANCING = build(BiasBalancing.default_config(), num_experts=4, rate=0.01)


def test_biases_go_up_for_idle_experts_and_down_for_busy_ones():
    layer = build(BiasBalancing.default_config(), num_experts=5, rate=0.01)
    state = {"bias": np.float32([1, 0, 0, 0, 0]), "counts": np.float32([8, 0, 5, 3, 4])}
    after = layer.end_step_recursively(state)
    np.testing.assert_allclose(after["bias"], [0.99, 0.01, -0.01, 0.01, 0], rtol=1e-6)
    assert not np.any(after["counts"])


def test_counts_of_micro_batches_add_up():
    state = initial(BALANCING)
    mask, ids = np.ones((1, 2), bool), np.array([[[0, 1], [0, 2]]])
    for _ in range(2):
        _, outputs = call_and_collect(BALANCING, state, ids, mask, method="count")
        state = {**state, **outputs.state_updates}
    np.testing.assert_array_equal(state["counts"], [4, 2, 2, 0])


def test_the_bias_is_added_to_the_scores_and_its_range_reported():
    state = {**initial(BALANCING), "bias": np.float32([0.5, 0, 0, -0.25])}
    scores = np.ones((1, 1, 4), np.float32)
    got, outputs = call_and_collect(BALANCING, state, scores, method="biased")
    np.testing.assert_array_equal(got[0, 0], [1.5, 1, 1, 0.75])
    assert float(outputs.summaries["bias_range"]) == 0.75


def test_a_skewed_router_is_balanced_in_time():
    layer = build(BiasBalancing.default_config(), num_experts=4, rate=0.02)
    scores = np.float32(sigmoid(normal(1, 256, 4) + [1.5, 0, 0, -1.5]))
    mask = np.ones((1, 256), bool)

    @jax.jit
    def step(state):
        _, ids = jax.lax.top_k(call(layer, state, scores, method="biased"), 1)
        _, outputs = call_and_collect(layer, state, ids, mask, method="count")
        counts = outputs.state_updates["counts"]
        return layer.end_step_recursively({**state, **outputs.state_updates}), counts

    state, first = step(initial(layer))
    for _ in range(80):
        state, last = step(state)
    assert float(jnp.max(first)) > 2 * 64
    assert float(jnp.max(last)) < 1.2 * 64


def test_a_load_counter_counts_up_within_a_step_and_starts_again_after_it():
    _, ids, mask, _ = routing()
    made = build(LoadCounter.default_config(), num_experts=E)
    counts, total = initial(made), np.zeros(E)
    for _ in range(2):
        before, outputs = call_and_collect(made, counts, ids, mask, method="count")
        np.testing.assert_array_equal(before, total)
        counts = outputs.state_updates
        total = total + np.sum(expert_counts(ids, mask, E), 0)
        np.testing.assert_array_equal(counts["counts"], total)
    np.testing.assert_array_equal(made.end_step_recursively(counts)["counts"], np.zeros(E))
    _, outputs = call_and_collect(made, counts, ids, mask, method="count", is_training=False)
    assert not outputs.state_updates
