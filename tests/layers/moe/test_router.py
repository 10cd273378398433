"""The router's scores in all modes, against float64 references; ties, biases and precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.precision import cast_parameters
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import GroupScore, Router, Score
from tests.layers.calling import build, call, call_and_collect, float64, initial, normal

D, E, K = 8, 5, 2
X = normal(2, 6, D)
MASK = jnp.ones((2, 6), bool)


def router(**fields):
    fields = {"input_dim": D, "num_experts": E, "num_experts_per_token": K, **fields}
    return build(Router.default_config(), **fields)


def softmax(x):
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def by_hand(weight, score, renormalize, factor):
    """Returns (ids, weights, probs) from the papers' formulas, one token at a time."""
    tokens = X.astype(np.float64).reshape(-1, D)
    ids, weights, probs = [], [], []
    for logits in tokens @ weight:
        p = 1 / (1 + np.exp(-logits)) if score is Score.SIGMOID else softmax(logits)
        best = sorted(range(E), key=lambda e: -logits[e])[:K]
        w = softmax(logits[best]) if score is Score.SOFTMAX_AFTER_TOP_K else p[best]
        ids.append(best)
        weights.append(factor * (w / w.sum() if renormalize else w))
        probs.append(p / p.sum())
    return tuple(np.reshape(a, (2, 6, -1)) for a in (ids, weights, probs))


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_scores_are_those_of_the_formulas(score, renormalize, factor):
    layer = router(score=score, renormalize=renormalize, scaling_factor=factor)
    params = initial(layer)
    got = call(layer, params, jnp.asarray(X), MASK)
    ids, weights, probs = by_hand(float64(params)["weight"], score, renormalize, factor)
    np.testing.assert_array_equal(got.expert_ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-5)
    np.testing.assert_allclose(got.probs, probs, rtol=1e-5)
    logits = X.astype(np.float64) @ float64(params)["weight"]
    np.testing.assert_allclose(got.logits, logits, rtol=1e-5, atol=1e-6)


def test_softmax_after_top_k_equals_softmax_before_it_renormalized():
    params = initial(router())
    after = call(router(score=Score.SOFTMAX_AFTER_TOP_K), params, jnp.asarray(X), MASK)
    before = call(router(renormalize=True), params, jnp.asarray(X), MASK)
    np.testing.assert_allclose(after.weights, before.weights, rtol=1e-5)


def test_with_all_experts_the_weights_are_the_probabilities():
    layer = router(num_experts_per_token=E)
    got = call(layer, initial(layer), jnp.asarray(X), MASK)
    np.testing.assert_allclose(jnp.sum(got.weights, -1), 1.0, rtol=1e-6)
    at_ids = np.take_along_axis(np.asarray(got.probs), np.asarray(got.expert_ids), -1)
    np.testing.assert_array_equal(got.weights, at_ids)


def test_ties_go_to_the_lower_number():
    layer = router()
    got = call(layer, {"weight": jnp.zeros((D, E))}, jnp.asarray(X), MASK)
    np.testing.assert_array_equal(got.expert_ids, np.broadcast_to([0, 1], (2, 6, 2)))


def test_a_bias_chooses_and_does_not_weigh():
    layer = router(bias_balancing=BiasBalancing.default_config())
    params = initial(layer)
    params["bias_balancing"]["bias"] = jnp.array([0.0, 0, 0, 0, 10.0])
    got = call(layer, params, jnp.asarray(X), MASK)
    np.testing.assert_array_equal(got.expert_ids[..., 0], 4)
    np.testing.assert_array_equal(got.weights[..., 0], got.probs[..., 4])
    assert got.weights.max() < 1


def test_where_tokens_went_is_counted_in_training_only():
    layer = router(bias_balancing=BiasBalancing.default_config())
    params = initial(layer)
    mask = MASK.at[:, 4:].set(False)
    got, outputs = call_and_collect(layer, params, jnp.asarray(X), mask)
    counts = outputs.state_updates["bias_balancing"]["counts"]
    want = np.bincount(np.asarray(got.expert_ids)[:, :4].ravel(), minlength=E)
    np.testing.assert_array_equal(counts, want)
    outputs = call_and_collect(layer, params, jnp.asarray(X), mask, is_training=False)[1]
    assert not outputs.state_updates


def test_sigmoids_that_all_underflow_have_the_probabilities_of_their_exponentials():
    # sigmoid(l) is exp(l) to 87 digits at l = -200, and 0 in float32.
    layer = router(score=Score.SIGMOID, bias=True)
    bias = -200.0 - jnp.arange(E, dtype=jnp.float32)
    params = {"weight": jnp.zeros((D, E)), "bias": bias}
    run = lambda params: call(layer, params, jnp.asarray(X), MASK).probs
    want = np.broadcast_to(softmax(np.arange(0.0, -E, -1)), (2, 6, E))
    np.testing.assert_allclose(run(params), want, rtol=1e-5)
    gradients = jax.grad(lambda params: jnp.sum(jnp.square(run(params))))(params)
    assert np.all(np.isfinite(gradients["bias"]))


def test_gradients_reach_the_weights_through_the_scores():
    for score in Score:
        layer = router(score=score)
        params = initial(layer)
        grad = jax.grad(lambda p, f=layer: jnp.sum(call(f, p, jnp.asarray(X), MASK).weights ** 2))
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
    p = 1 / (1 + np.exp(-logits))
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
    params: dict[str, Any] = {"weight": jnp.asarray(weight)}
    if layer.config.bias:
        params["bias"] = jnp.asarray(bias)
    if layer.config.bias_balancing is not None:
        params["bias_balancing"] = {"bias": jnp.asarray(bias), "counts": jnp.zeros(12)}
    x = normal(2, 50, D, seed=6)
    got = call(layer, params, jnp.asarray(x), jnp.ones((2, 50), bool))
    logits = x.astype(np.float64).reshape(-1, D) @ weight.astype(np.float64)
    ids, weights = zip(*(family(row, bias.astype(np.float64)) for row in logits), strict=True)
    np.testing.assert_array_equal(got.expert_ids.reshape(100, 3), ids)
    np.testing.assert_allclose(got.weights.reshape(100, 3), weights, rtol=2e-5)
    if layer.config.num_groups is not None:  # Groups change the selection.
        free = np.argsort(-(logits + bias * (family is deepseek_v3)))[:, :3]
        assert (np.sort(free) != np.sort(ids)).any(-1).sum() > 10
    if family is qwen:  # With norm_topk_prob.
        normed = call(router(**GROUPS, renormalize=True), params, jnp.asarray(x), got.mask)
        want = [w / w.sum() for w in weights]
        np.testing.assert_allclose(normed.weights.reshape(100, 3), want, rtol=2e-5)


def test_renormalizing_adds_nothing_to_what_softmax_leaves():
    """DeepSeek-V3's 1e-20 is rounded off a sum of weights of at least 1 / E."""
    layer, plain = router(renormalize=True), router()
    params = initial(layer)
    raw = call(plain, params, jnp.asarray(X), MASK).weights
    got = call(layer, params, jnp.asarray(X), MASK).weights
    np.testing.assert_array_equal(got, raw / jnp.sum(raw, -1, keepdims=True))


def test_scores_that_underflow_are_of_the_best_groups_all_the_same():
    layer = router(**V2_GROUPS)
    weight = jnp.zeros((D, 12)).at[0, 4].set(200.0).at[0, 8].set(150.0)  # Groups 1 and 2.
    x = jnp.zeros((1, 1, D)).at[0, 0, 0].set(1.0)
    got = call(layer, {"weight": weight}, x, jnp.ones((1, 1), bool))
    assert set(np.asarray(got.expert_ids).ravel() // 3) <= {1, 2}
    np.testing.assert_array_equal(got.weights, [[[1.0, np.exp(np.float32(-50.0)), 0.0]]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_groups": None}, "num_groups=None and num_groups_per_token=2"),
        ({"num_groups_per_token": None}, "num_groups=4 and num_groups_per_token=None"),
        ({"num_groups": 5}, "num_groups=5 .* num_experts=12"),
        ({"num_groups": 0}, "num_groups=0 .* num_experts=12"),
        ({"num_groups_per_token": 5}, "num_groups=4 .* num_groups_per_token=5"),
        ({"num_groups_per_token": 0}, "num_groups=4 .* num_groups_per_token=0"),
        ({"num_experts_per_token": 7}, "num_experts_per_token=7"),
        (
            {"num_groups": 12, "num_groups_per_token": 4},
            "num_groups=12 .*group_score='sum_of_top_2'",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"layer: .*{message}"):
        router(**{**V3_GROUPS, **fields})


@pytest.mark.parametrize("top_k", [0, 6])
def test_more_assignments_than_experts_are_refused(top_k):
    message = f"layer: num_experts_per_token={top_k}.*num_experts=5"
    with pytest.raises(ValueError, match=message):
        router(num_experts_per_token=top_k)


def test_flops_are_those_of_the_logits():
    assert router().forward_flops_per_token(8) == 2 * D * E
