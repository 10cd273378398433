"""Expert choice against the paper's equations: loads, groups, limits, and no leak in evaluation."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.variants import expert_choice
from experiments.variants.expert_choice import ChoiceGroup, ExpertChoiceRouter
from moelib.core.module import functional
from moelib.layers.moe.layer import MoELayer
from tests.experiments.variants.compare import assert_equal_to_reference
from tests.layers.calling import build, call, call_and_collect, initial, normal
from tests.oracles.moe import softmax, swiglu

B, S, D, F, E, C = 2, 7, 6, 4, 4, 2
MASK = np.arange(S) < np.array([[7], [4]])
X = normal(B, S, D)
CFG = MoELayer.default_config().set(
    input_dim=D,
    hidden_dim=F,
    num_experts=E,
    num_experts_per_token=C,
    router=ExpertChoiceRouter.default_config(),
)


def chosen(probs, groups):
    """Returns whether each expert takes each token: its best ceil(n C / E) of each group's n."""
    taken = np.zeros((B, S, E), bool)
    for group in groups:
        tokens = np.argwhere(group & MASK)
        for e in range(E):
            order = np.argsort([-probs[b, s, e] for b, s in tokens])
            for b, s in tokens[order[: -(-len(tokens) * C // E)]]:
                taken[b, s, e] = True
    return taken


GROUPS = {
    ChoiceGroup.BATCH: [np.ones((B, S), bool)],
    ChoiceGroup.SEQUENCE: [np.arange(B)[:, None] == np.full((B, S), i) for i in range(B)],
}


@pytest.mark.parametrize("group", ChoiceGroup)
def test_values_and_gradients_are_those_of_the_equations(group):
    made = build(CFG, router=CFG.router.clone(group=group))
    p = jax.device_get(initial(made))
    threshold = p["router"].pop("threshold")

    def reference(operands):
        p, x = operands["p"], operands["x"]
        probs = softmax(x @ p["router"]["weight"])
        taken, y = chosen(probs, GROUPS[group]), np.zeros((B, S, D))
        for b, s, e in np.argwhere(taken):
            up, down = (p["experts"][name][e] for name in ("up", "down"))
            y[b, s] += probs[b, s, e] * swiglu(x[b, s], up, down)
        return y

    def run(operands):
        router = operands["p"]["router"] | {"threshold": threshold}
        args = (operands["x"], jnp.asarray(MASK))
        return functional(made, None, operands["p"] | {"router": router}, args, is_training=True)[0]

    assert_equal_to_reference(run, reference, {"p": p, "x": X})


def router(**fields):
    sizes = {"input_dim": D, "num_experts": E, "num_experts_per_token": C}
    return build(ExpertChoiceRouter.default_config().set(**sizes), **fields)


def test_every_expert_has_the_same_load_even_where_tokens_tie():
    same = np.broadcast_to(X[:1, :1], X.shape)
    for x in (X, same):
        made = router()
        routing = call(made, initial(made), x, MASK)
        counts = np.bincount(np.ravel(routing.expert_ids), minlength=E + 1)[:E]
        np.testing.assert_array_equal(counts, [-(-MASK.sum() * C // E)] * E)


def test_a_limit_drops_the_lowest_scores_of_a_token_and_counts_them():
    made, limited = router(), router(max_experts_per_token=1)
    params = initial(made)
    (every, _), (few, found) = (call_and_collect(m, params, X, MASK) for m in (made, limited))
    np.testing.assert_array_equal(few.expert_ids, every.expert_ids[..., :1])
    lost = np.sum(every.expert_ids[..., 1:] < E)
    over = found.summaries["over_limit"]
    assert lost > 0
    np.testing.assert_allclose(over.mean * over.weight, lost, rtol=1e-5)


def test_the_threshold_is_a_mean_of_the_lowest_scores_taken():
    made = router(threshold_decay=0.75)
    params = initial(made)
    np.testing.assert_allclose(params["threshold"], [1 / E] * E)
    _, found = call_and_collect(made, params, X, MASK)
    probs = softmax(np.float64(X) @ np.float64(params["weight"]))
    taken = chosen(probs, GROUPS[ChoiceGroup.BATCH])
    lowest = np.where(taken, probs, np.inf).min((0, 1))
    want = 0.75 / E + 0.25 * lowest
    np.testing.assert_allclose(found.state_updates["threshold"], want, rtol=1e-5)
    _, found = call_and_collect(made, params, X, np.zeros_like(MASK))  # Padding only.
    np.testing.assert_array_equal(found.state_updates["threshold"], params["threshold"])


@pytest.mark.parametrize("is_training", [True, False])
def test_later_tokens_leak_into_earlier_ones_in_training_only(is_training):
    made = router()
    params = initial(made)
    mask = np.ones_like(MASK)
    run = lambda x: call(made, params, x, mask, is_training=is_training).expert_ids[:, :3]
    other = np.concatenate([X[:, :3], 20 * X[:, 3:]], 1)
    assert np.array_equal(run(X), run(other)) != is_training


def test_the_leak_is_warned_of_once(caplog):
    expert_choice._warn_of_leak.cache_clear()
    with caplog.at_level(logging.WARNING):
        router()
        router()
    assert caplog.text.count("experts choose among all tokens in training") == 1
