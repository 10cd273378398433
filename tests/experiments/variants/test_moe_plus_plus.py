"""MoE++ against the paper's equations: routing with residual, experts, losses; two layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.variants.moe_plus_plus import (
    ResidualRouter,
    UseMoEPlusPlus,
    ZeroComputationExperts,
    num_constant_experts,
)
from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.carry import CARRIED
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.recording import RECORDING
from moelib.train.pipeline import stack_of
from tests import tiny
from tests.experiments.variants.compare import assert_equal_to_reference
from tests.layers.calling import build, initial, normal
from tests.oracles.moe import softmax, swiglu

B, S, D, F, E, K = 2, 6, 5, 4, 12, 3
C = 1  # max(12 / 4 - 2, 1) constant experts.
N = E + C + 2
MASK = np.arange(S) < np.array([[6], [4]])
CFG = MoELayer.default_config().set(
    input_dim=D,
    hidden_dim=F,
    num_experts=E,
    num_experts_per_token=K,
    router=ResidualRouter.default_config(),
    local_experts=ZeroComputationExperts.default_config(),
)


def routed(p, x, before):
    """Returns (probabilities, logits) of equations 4 and 6."""
    logits = x @ p["router"]["weight"] + before @ p["router"]["residual"]
    return softmax(logits), logits


def reference(p, x, before):
    """Returns the layer's output, token by token, and the logits for the next layer."""
    probs, logits = routed(p, x, before)
    y = np.zeros_like(x)
    for b, s in zip(*np.nonzero(MASK), strict=True):
        for e in np.argsort(-probs[b, s])[:K]:
            if e < E:
                out = swiglu(x[b, s], p["experts"]["up"][e], p["experts"]["down"][e])
            elif e < E + C:
                of = e - E
                a = softmax(x[b, s] @ p["local_experts"]["mix"][of])
                out = a[0] * x[b, s] + a[1] * p["local_experts"]["constant"][of]
            else:
                out = x[b, s] if e == E + C else 0.0  # The copy, then the zero expert.
            y[b, s] += probs[b, s, e] * out
    return np.concatenate([y, logits], -1)


def operands(seed=0):
    made = build(CFG)
    p = initial(made)
    # Most tokens go to experts that compute nothing.
    p["router"]["weight"] = p["router"]["weight"].at[:, E:].multiply(4)
    return made, {"p": p, "x": normal(B, S, D, seed=seed), "before": normal(B, S, N, seed=seed + 1)}


def run_layer(made, operands, **inherited):
    held = {"router_logits": operands["before"]}
    args = (operands["x"], jnp.asarray(MASK))
    inherited[CARRIED] = held
    y, found = functional(made, None, operands["p"], args, is_training=True, inherited=inherited)
    return y, held["router_logits"], found


def test_values_and_gradients_are_those_of_the_equations():
    made, given = operands()

    def run(operands):
        y, logits, _ = run_layer(made, operands)
        return jnp.concatenate([y, logits], -1)

    probs, _ = routed(jax.device_get(given["p"]), given["x"], given["before"])
    ids = np.argsort(-probs, -1)[..., :K][MASK]
    assert np.isin(np.arange(E, N), ids).all()  # All kinds of experts are used.
    at = lambda operands: reference(operands["p"], operands["x"], operands["before"])
    assert_equal_to_reference(run, at, given)


@pytest.fixture(scope="module")
def recorded():
    """Operands, and what the layer put out, routing included."""
    made, given = operands()
    return given, jax.jit(lambda given: run_layer(made, given, **{RECORDING: True})[2])(given)


def test_the_balance_loss_weighs_experts_that_compute_nothing_less(recorded):
    given, found = recorded
    probs, _ = routed(jax.device_get(given["p"]), given["x"], given["before"])
    ids = np.argsort(-probs, -1)[..., :K][MASK]
    shares = np.bincount(ids.ravel(), minlength=N) / MASK.sum()
    weights = np.array([1.0] * E + [0.75] * (N - E))
    loss = found.aux_losses["router"]["balance_loss"]
    np.testing.assert_allclose(loss.value, weights @ (shares * probs[MASK].mean(0)), rtol=1e-5)
    assert float(loss.weight) == pytest.approx(0.01)
    share = found.summaries["router"]["zero_computation_share"].mean
    np.testing.assert_allclose(share, (ids >= E).mean(), rtol=1e-6)


def test_experts_that_compute_nothing_are_logged_as_no_expert(recorded):
    given, found = recorded
    probs, _ = routed(jax.device_get(given["p"]), given["x"], given["before"])
    ids = np.argsort(-probs, -1)[..., :K]
    expected = np.where(MASK[..., None] & (ids < E), ids, E)
    assert 0 < (expected[MASK] < E).sum() < expected[MASK].size
    np.testing.assert_array_equal(found.module_outputs["routing"].expert_ids, expected)


@pytest.mark.parametrize(("num", "constant"), [(8, 1), (16, 2), (32, 6), (4, 1)])
def test_numbers_of_constant_experts(num, constant):  # The first three: the paper's table 2.
    assert num_constant_experts(num) == constant


def test_logits_reach_the_next_router_through_a_scan():
    cfg = tiny.trainer_config("unused", model=tiny.model_config())
    cfg = UseMoEPlusPlus.default_config().instantiate()(cfg)
    model = cfg.model.instantiate(parent=None)
    _, gradients = tiny.value_and_grad(model, tiny.initial(model), tiny.packed_batch())
    residual = gradients["decoder"]["repeated0"]["feed_forward"]["router"]["residual"]
    assert not np.any(residual[0])  # Before the first router there is none.
    assert np.any(residual[1])


def test_a_pipeline_is_refused_by_the_name_of_the_router():
    cfg = tiny.trainer_config("unused", model=tiny.model_config())
    cfg = UseMoEPlusPlus.default_config().instantiate()(cfg)
    with pytest.raises(UserError, match=r"\(ResidualRouter\) carries router_logits"):
        stack_of(cfg.model.instantiate(parent=None))
