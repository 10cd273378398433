"""The router's scores in all modes, against float64 references; ties, biases and precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.param import cast_parameters
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.moe.router import Router, Score
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
    """One token after the other: (ids, weights, probs), from the papers' formulas."""
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


@pytest.mark.parametrize("choices", [0, 6])
def test_more_choices_than_experts_are_refused(choices):
    message = f"layer: num_experts_per_token is {choices}; it must be from 1 to num_experts, 5"
    with pytest.raises(ValueError, match=message):
        router(num_experts_per_token=choices)


def test_flops_are_those_of_the_logits():
    assert router().forward_flops_per_token(8) == 2 * D * E
