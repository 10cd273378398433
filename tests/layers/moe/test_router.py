"""The router's scores in all modes, against float64 references; ties, biases and precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.precision import cast_parameters
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import GroupScore, Router, Score
from tests.layers.calling import build, call, call_and_collect, initial, normal
from tests.oracles.moe import sigmoid, softmax

D, E, K = 8, 5, 2
X = normal(2, 6, D)
MASK = np.ones((2, 6), bool)


def router(**fields):
    fields = {"input_dim": D, "num_experts": E, "num_experts_per_token": K, **fields}
    return build(Router.default_config(), **fields)


def test_ties_go_to_the_lower_number():
    got = call(router(), {"weight": np.zeros((D, E), np.float32)}, X, MASK)
    np.testing.assert_array_equal(got.expert_ids, np.broadcast_to([0, 1], (2, 6, 2)))


def test_a_token_may_have_all_experts():
    layer = router(num_experts_per_token=E)
    np.testing.assert_allclose(np.sum(call(layer, initial(layer), X, MASK).weights, -1), 1, 1e-6)


def test_where_tokens_went_is_counted_in_training_only():
    layer = router(bias_balancing=BiasBalancing.default_config())
    params = initial(layer)
    mask = np.arange(6) < MASK * 4
    got, outputs = call_and_collect(layer, params, X, mask)
    counts = outputs.state_updates["bias_balancing"]["counts"]
    want = np.bincount(np.asarray(got.expert_ids)[:, :4].ravel(), minlength=E)
    np.testing.assert_array_equal(counts, want)
    outputs = call_and_collect(layer, params, X, mask, is_training=False)[1]
    assert not outputs.state_updates


def test_sigmoids_that_all_underflow_have_the_probabilities_of_their_exponentials():
    # sigmoid(l) is exp(l) to 87 digits at l = -200, and 0 in float32.
    layer = router(score=Score.SIGMOID, bias=True)
    bias = -200.0 - jnp.arange(E, dtype=jnp.float32)
    params = {"weight": jnp.zeros((D, E)), "bias": bias}
    run = lambda params: call(layer, params, X, MASK).probs
    want = np.broadcast_to(softmax(np.arange(0.0, -E, -1)), (2, 6, E))
    np.testing.assert_allclose(run(params), want, rtol=1e-5)
    gradients = jax.grad(lambda params: jnp.sum(jnp.square(run(params))))(params)
    assert np.all(np.isfinite(gradients["bias"]))


def test_gradients_reach_the_weights_through_the_scores():
    for score in Score:
        layer = router(score=score)
        params = initial(layer)
        grad = jax.grad(lambda p, f=layer: jnp.sum(call(f, p, X, MASK).weights ** 2))
        assert float(jnp.max(jnp.abs(grad(params)["weight"]))) > 1e-3


def test_a_bfloat16_step_routes_from_full_weights_in_float32():
    layer = router()
    params, specs = initial(layer), layer.create_parameter_specs_recursively()
    kept = cast_parameters(params, specs, jnp.bfloat16)
    assert kept["weight"].dtype == jnp.float32
    x = jnp.asarray(X, jnp.bfloat16)
    got = call(layer, kept, x, MASK)
    want = call(layer, params, x.astype(jnp.float32), MASK)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got.logits.dtype == got.probs.dtype == got.weights.dtype == jnp.float32


GROUPS = {"num_experts": 12, "num_experts_per_token": 3}
V2_GROUPS = {**GROUPS, "num_groups": 4, "num_groups_per_token": 2, "group_score": GroupScore.MAX}
V3_GROUPS = {**V2_GROUPS, "group_score": GroupScore.SUM_OF_TOP_2}


def best(scores, k):
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


def mixtral(logits, bias):
    p = softmax(logits)
    ids = best(p, 3)
    return ids, p[ids] / p[ids].sum()


def qwen(logits, bias):
    p = softmax(logits)
    ids = best(p, 3)
    return ids, p[ids]


def deepseek_v2(logits, bias):
    p = softmax(logits)
    groups = best([max(p[3 * g : 3 * g + 3]) for g in range(4)], 2)
    ids = best([p[e] if e // 3 in groups else 0.0 for e in range(12)], 3)
    return ids, 16.0 * p[ids]


def deepseek_v3(logits, bias):
    p = sigmoid(logits)
    score = p + bias
    groups = best([sum(sorted(score[3 * g : 3 * g + 3])[1:]) for g in range(4)], 2)
    ids = best([score[e] if e // 3 in groups else -np.inf for e in range(12)], 3)
    return ids, 2.5 * p[ids] / (p[ids].sum() + 1e-20)


def gpt_oss(logits, bias):
    logits = logits + bias
    ids = best(logits, 3)
    return ids, softmax(logits[ids])


BALANCED = {"bias_balancing": BiasBalancing.default_config()}
FAMILIES = {
    mixtral: {"score": Score.SOFTMAX_AFTER_TOP_K},
    qwen: {},
    deepseek_v2: {**V2_GROUPS, "scaling_factor": 16.0},
    deepseek_v3: {
        **V3_GROUPS,
        **BALANCED,
        "score": Score.SIGMOID,
        "renormalize": True,
        "scaling_factor": 2.5,
    },
    gpt_oss: {"score": Score.SOFTMAX_AFTER_TOP_K, "bias": True},
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_each_family_routes_as_published(family):
    layer = router(**{**GROUPS, **FAMILIES[family]})
    # Biases as large as the scores make some of them negative, and change the selected groups.
    weight, bias = normal(D, 12, seed=4), normal(12, seed=5)
    balancing = {"bias": bias, "counts": np.zeros(12, np.float32)}
    params = {"weight": weight, "bias": bias, "bias_balancing": balancing}
    x = normal(2, 50, D, seed=6)
    got = call(layer, params, x, np.ones((2, 50), bool))
    logits = x.astype(np.float64).reshape(-1, D) @ weight.astype(np.float64)
    ids, weights = zip(*(family(row, bias.astype(np.float64)) for row in logits), strict=True)
    np.testing.assert_array_equal(got.expert_ids.reshape(100, 3), ids)
    np.testing.assert_allclose(got.weights.reshape(100, 3), weights, rtol=2e-5)
    of_all = logits + bias if layer.config.bias else logits
    np.testing.assert_allclose(got.logits.reshape(100, 12), of_all, rtol=1e-5, atol=1e-5)
    probs = softmax(of_all)
    if layer.config.score is Score.SIGMOID:
        probs = sigmoid(of_all) / sigmoid(of_all).sum(-1, keepdims=True)
    np.testing.assert_allclose(got.probs.reshape(100, 12), probs, rtol=2e-5)
    if layer.config.num_groups is not None:  # Groups change the selection.
        free = np.argsort(-(logits + bias * (family is deepseek_v3)))[:, :3]
        assert (np.sort(free) != np.sort(ids)).any(-1).sum() > 10
    if family is qwen:  # With norm_topk_prob.
        normed = call(router(**GROUPS, renormalize=True), params, x, got.mask)
        want = [w / w.sum() for w in weights]
        np.testing.assert_allclose(normed.weights.reshape(100, 3), want, rtol=2e-5)


def test_renormalizing_adds_nothing_to_what_softmax_leaves():
    """DeepSeek-V3's 1e-20 is rounded off a sum of weights of at least 1 / E."""
    layer, plain = router(renormalize=True), router()
    params = initial(layer)
    raw = call(plain, params, X, MASK).weights
    got = call(layer, params, X, MASK).weights
    np.testing.assert_array_equal(got, raw / jnp.sum(raw, -1, keepdims=True))


def test_scores_that_underflow_are_of_the_best_groups_all_the_same():
    layer = router(**V2_GROUPS)
    weight = jnp.zeros((D, 12)).at[0, 4].set(200.0).at[0, 8].set(150.0)  # Groups 1 and 2.
    x = jnp.zeros((1, 1, D)).at[0, 0, 0].set(1.0)
    got = call(layer, {"weight": weight}, x, jnp.ones((1, 1), bool))
    assert set(np.asarray(got.expert_ids).ravel() // 3) <= {1, 2}
    np.testing.assert_array_equal(got.weights, [[[1.0, np.exp(np.float32(-50.0)), 0.0]]])


def test_flops_are_those_of_the_logits():
    assert router().forward_flops_per_token(8) == 2 * D * E
