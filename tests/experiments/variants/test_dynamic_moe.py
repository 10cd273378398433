"""Dynamic MoE against the paper's equations; experts are removed and added, in a real run too."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.variants.dynamic_moe import TopAnyRouter, UseDynamicMoE
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.moe.layer import MoELayer
from tests import tiny
from tests.experiments.variants.compare import assert_equal_to_reference
from tests.layers.calling import build, call_and_collect, initial, normal
from tests.oracles.moe import sigmoid, swiglu

B, S, D, F, E = 2, 8, 6, 4, 5
MASK = np.arange(S) < np.array([[8], [6]])
ROUTER = TopAnyRouter.default_config().set(num_initial_experts=4, window_steps=3)
CFG = MoELayer.default_config().set(
    input_dim=D, hidden_dim=F, num_experts=E, num_experts_per_token=E, router=ROUTER
)
X = normal(B, S, D)
THRESHOLD = np.array([0.2, -0.1, 0.6, 0.1, 0.0], np.float32)


def similarities(p, x):
    unit = lambda x, axis: x / np.linalg.norm(x, axis=axis, keepdims=True)
    return unit(x, -1) @ unit(p["router"]["weight"], 0)


def margins(p, x):
    """Returns sigmoid(similarity) of active experts minus sigmoid(threshold): above 0 is chosen."""
    scores = sigmoid(similarities(p, x)) * (np.arange(E) < 4)
    return scores - sigmoid(np.float64(p["router"]["threshold"]))


@functools.cache
def parameters():
    p = jax.device_get(initial(build(CFG)))
    return p | {"router": p["router"] | {"threshold": THRESHOLD}}


def split(p):
    """Returns (trained parameters, state of the router)."""
    state = {n: p["router"][n] for n in ("active", "num_tokens", "missed", "step")}
    trained = {n: p["router"][n] for n in ("weight", "threshold")}
    return {**p, "router": trained}, state


def test_values_and_straight_through_gradients_are_those_of_the_equations():
    made, (trained, state) = build(CFG), split(parameters())
    start = margins(jax.tree.map(np.float64, trained), np.float64(X))
    on = (start > 0) & MASK[..., None]
    assert on.sum(-1).max() >= 3
    assert (on.sum(-1) == 0)[MASK].any()

    def reference(operands):
        # The gradient of a gate is that of its margin, where it is 1 (section 3.1).
        gates = on * (1 + margins(operands["p"], operands["x"]) - start)
        experts, y = operands["p"]["experts"], np.zeros((B, S, D))
        for b, s in zip(*np.nonzero(on.any(-1)), strict=True):
            for e in np.flatnonzero(on[b, s]):
                out = swiglu(operands["x"][b, s], experts["up"][e], experts["down"][e])
                y[b, s] += gates[b, s, e] * out / on[b, s].sum()
        return y

    def run(operands):
        p = operands["p"] | {"router": operands["p"]["router"] | state}
        args = (operands["x"], jnp.asarray(MASK))
        return functional(made, None, p, args, is_training=True)[0]

    assert_equal_to_reference(run, reference, {"p": trained, "x": X})


def test_the_loss_is_that_of_diverse_and_simple_gates():
    router = parameters()["router"] | {"weight": normal(D, E, seed=3)}
    _, found = call_and_collect(build(CFG), parameters() | {"router": router}, X, MASK)
    columns = np.float64(router["weight"][:, :4])  # Those of active experts.
    norms = np.linalg.norm(columns, axis=0)
    gram = (columns / norms).T @ (columns / norms)
    away = np.linalg.norm(gram - np.eye(4))
    want = np.hypot(away, 0.01) + norms.mean()  # The norm, smoothed below 0.01.
    np.testing.assert_allclose(found.aux_losses["router"]["gate_loss"].value, want, rtol=1e-5)


def test_state_counts_tokens_of_experts_and_sums_tokens_without_any():
    _, found = call_and_collect(build(CFG), parameters(), X, MASK)
    on = (margins(parameters(), np.float64(X)) > 0) & MASK[..., None]
    state = found.state_updates["router"]
    np.testing.assert_array_equal(state["num_tokens"], on.sum((0, 1)))
    missed = np.float64(X)[MASK & ~on.any(-1)].sum(0)
    np.testing.assert_allclose(state["missed"], missed, rtol=1e-5)


def test_a_token_without_expert_takes_the_most_similar_one_outside_of_training():
    router = build(ROUTER, input_dim=D, num_experts=E, num_experts_per_token=2)
    p = parameters()["router"] | {"threshold": np.full(E, 9, np.float32)}
    training, _ = call_and_collect(router, p, X, MASK)
    assert np.all(training.expert_ids == E)
    assert not np.any(training.weights)
    routing, _ = call_and_collect(router, p, X, MASK, is_training=False)
    best = np.argmax(similarities({"router": p}, X)[..., :4], -1)
    np.testing.assert_array_equal(routing.expert_ids[..., 0], best)
    np.testing.assert_array_equal(routing.weights, np.broadcast_to([1.0, 0.0], (B, S, 2)))


def test_a_limit_keeps_the_experts_furthest_above_their_thresholds():
    router = build(ROUTER, input_dim=D, num_experts=E, num_experts_per_token=2)
    routing, _ = call_and_collect(router, parameters()["router"], X, MASK)
    above = margins(parameters(), np.float64(X))
    want = np.where(np.sort(-above)[..., :2] < 0, np.argsort(-above)[..., :2], E)
    np.testing.assert_array_equal(routing.expert_ids, want)
    number = np.maximum((want < E).sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(routing.weights, (want < E) / number, rtol=1e-6)


def state(**fields):
    p = {
        "weight": normal(D, E),
        "threshold": THRESHOLD,
        "active": np.float32([1, 1, 0, 1, 0]),
        "num_tokens": np.float32([4, 0, 0, 2, 0]),
        "missed": np.float32([0, 3, 0, 4, 0, 0]),
        "step": np.float32(2),
    }
    return jax.tree.map(jnp.asarray, p | fields)


def after_step(p):
    router = build(ROUTER, input_dim=D, num_experts=E, num_experts_per_token=2)
    return jax.device_get(router.end_step_recursively(p))


def test_the_end_of_a_window_removes_idle_experts_and_adds_one_for_missed_tokens():
    new = after_step(state())
    # Expert 1 had no token; its slot, the first that is free, is activated again as a new expert.
    np.testing.assert_array_equal(new["active"], [1, 1, 0, 1, 0])
    np.testing.assert_allclose(new["weight"][:, 1], [0, 0.6, 0, 0.8, 0, 0], rtol=1e-6)
    assert new["threshold"][1] == 0
    others = [0, 2, 3, 4]
    np.testing.assert_array_equal(new["weight"][:, others], state()["weight"][:, others])
    for name in ("num_tokens", "missed", "step"):
        assert not np.any(new[name])


def test_without_missed_tokens_experts_are_only_removed():
    new = after_step(state(missed=np.zeros(D, np.float32)))
    np.testing.assert_array_equal(new["active"], [1, 0, 0, 1, 0])
    np.testing.assert_array_equal(new["weight"], state()["weight"])


def test_a_window_without_tokens_removes_nothing():
    nothing = {"num_tokens": np.zeros(E, np.float32), "missed": np.zeros(D, np.float32)}
    np.testing.assert_array_equal(after_step(state(**nothing))["active"], [1, 1, 0, 1, 0])


def test_with_all_slots_active_none_is_added():
    full = {"active": np.ones(E, np.float32), "num_tokens": np.ones(E, np.float32)}
    new = after_step(state(**full))
    np.testing.assert_array_equal(new["weight"], state()["weight"])


def test_within_a_window_steps_are_counted():
    new = after_step(state(step=np.float32(0)))
    assert new["step"] == 1
    np.testing.assert_array_equal(new["num_tokens"], state()["num_tokens"])
    np.testing.assert_array_equal(new["weight"], state()["weight"])


@pytest.mark.slow
@pytest.mark.parametrize(("num_initial", "window", "sign"), [(3, 2, 1), (8, 4, -1)])
def test_a_run_adds_and_removes_experts(num_initial, window, sign, tmp_path):
    moe = tiny.plain_moe(num_experts=8)
    model = tiny.model_config(tiny.stacked(tiny.transformer_layer(moe), num_layers=2))
    cfg = tiny.trainer_config(tmp_path, model=model, max_step=13, evaler=False)
    modifier = UseDynamicMoE.default_config()
    modifier.router.set(num_initial_experts=num_initial, window_steps=window)
    cfg = modifier.instantiate()(cfg)
    cfg.learner.optimizer.set(learning_rate=0.3)  # Thresholds move by steps of this size.
    cfg.instantiate(parent=None).run()
    with open(tmp_path / "metrics.jsonl", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    name = "decoder/repeated0/feed_forward/router/active_experts"
    counts = np.array([[x[f"{name}/{i}"] for i in (0, 1)] for x in found if f"{name}/0" in x])
    assert np.all(counts[0] == num_initial)
    changes = np.diff(counts, axis=0)
    assert np.any(sign * changes > 0)
    assert not np.any(changes[np.arange(1, 13) % window > 0])  # At ends of windows only.


@pytest.mark.parametrize("field", ["num_initial_experts", "num_experts_per_token"])
def test_more_experts_than_slots_are_refused(field):
    sizes = {"input_dim": D, "num_experts": E, "num_experts_per_token": 2} | {field: E + 1}
    with pytest.raises(UserError, match=f"{field}={E + 1}; set {E} at most"):
        build(ROUTER, **sizes)
