"""Routing metrics against counts by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.metrics import WeightedScalar, combine, reading
from moelib.layers.moe import metrics
from moelib.layers.moe.router import Routing
from tests.layers.calling import normal

routing_metrics = jax.jit(metrics.routing_metrics)  # One program per call.


def routing(logits, ids, mask):
    logits = jnp.asarray(logits)
    probs = jax.nn.softmax(logits, -1)
    return Routing(jnp.asarray(ids), jnp.ones(np.shape(ids)), probs, logits, jnp.asarray(mask))


def test_metrics_are_those_of_the_valid_tokens():
    logits = normal(2, 3, 4)
    ids = np.array([[[0, 1], [0, 2], [3, 3]], [[0, 2], [3, 3], [3, 3]]])
    mask = np.array([[True, True, False], [True, False, False]])
    got = routing_metrics(routing(logits, ids, mask), jnp.float32(2))
    valid = logits[mask].astype(np.float64)
    probs = np.exp(valid) / np.exp(valid).sum(-1, keepdims=True)
    want = {
        "load_max_over_mean": 3 / (6 / 4),  # Experts got 3, 1, 2 and 0 of 6 assignments.
        "dead_experts": 1,
        "entropy": -np.sum(probs * np.log(probs), -1).mean(),
        "drop_rate": 2 / 6,
        "logit_rms": np.sqrt(np.mean(valid**2)),
        "expert_counts": [3, 1, 2, 0],
    }
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(reading(got[name]), value, rtol=1e-6, err_msg=name)
        if name != "load_max_over_mean":
            assert np.all(got[name].weight == (6 if name == "drop_rate" else 3))


def test_the_busiest_expert_of_all_micro_batches_is_reported():
    even, uneven = (
        routing_metrics(
            routing(np.zeros((1, 2, 2)), np.array([[[0], [e]]]), np.ones((1, 2), bool)),
            jnp.float32(0),
        )["load_max_over_mean"]
        for e in (1, 0)
    )
    assert float(reading(combine(even, uneven))) == float(reading(combine(uneven, even))) == 2


def test_the_drop_rate_of_micro_batches_is_that_of_their_assignments():
    # 1 of 1 and 1 of 3 assignments: some tokens have one expert, and an id of 4 is none.
    one, three = (
        routing_metrics(routing(np.zeros((1, 2, 4)), ids, np.ones((1, 2), bool)), jnp.float32(1))
        for ids in (np.array([[[0, 4], [4, 4]]]), np.array([[[0, 4], [1, 2]]]))
    )
    assert float(reading(combine(one["drop_rate"], three["drop_rate"]))) == 2 / 4


def test_a_batch_of_padding_has_no_weight_and_finite_metrics():
    got = routing_metrics(
        routing(np.zeros((1, 2, 4)), np.zeros((1, 2, 1), int), np.zeros((1, 2), bool)),
        jnp.float32(0),
    )
    assert all(np.all(np.isfinite(reading(value))) for value in got.values())
    weights = [value.weight for value in got.values() if isinstance(value, WeightedScalar)]
    assert not any(np.any(weight) for weight in weights)
