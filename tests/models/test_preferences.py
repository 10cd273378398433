"""Losses of preferences and rewards: those of TRL, and closed forms."""

import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.models.objective import PolicyGradient
from moelib.models.preferences import (
    dpo_loss,
    group_advantages,
    importance_weights,
    mismatch,
    policy_loss,
)

FILE = pathlib.Path(__file__).with_name("trl_losses.json")
FOUND = json.loads(FILE.read_text("utf-8"))
INPUTS = {name: jnp.asarray(value, jnp.float32) for name, value in FOUND["inputs"].items()}
MASK = INPUTS["mask"] > 0
SETTINGS = {
    "dapo": {},
    "grpo": {"mean": "sequence", "clip": (0.2, 0.2)},
    "grpo_kl": {"mean": "sequence", "clip": (0.2, 0.2), "kl_weight": 0.04},
    "gspo": {"ratio": "sequence", "mean": "sequence", "clip": (3e-4, 4e-4)},
}


def policy(log_probs, **settings):
    """Returns the mean loss of the inputs."""
    if "kl_weight" in settings:
        settings = {"reference_log_probs": INPUTS["reference"]} | settings
    rest = INPUTS["old"], INPUTS["advantages"], MASK
    total, weight = policy_loss(log_probs, *rest, **settings)
    return total / weight


def dpo(log_probs):
    """Returns the mean loss of pairs, the first half of the answers being the preferred ones."""
    sums = (
        jnp.sum(jnp.where(MASK, log_probs, 0), 1),
        jnp.sum(jnp.where(MASK, INPUTS["reference"], 0), 1),
    )
    (chosen, rejected), (of_chosen, of_rejected) = (jnp.split(x, 2) for x in sums)
    return jnp.mean(dpo_loss(chosen, rejected, of_chosen, of_rejected))


@pytest.mark.parametrize("name", FOUND["results"])
def test_losses_and_gradients_are_those_of_trl(name):
    settings = SETTINGS.get(name, {})
    fn = dpo if name == "dpo" else lambda x: policy(x, **settings)
    loss, gradient = jax.jit(jax.value_and_grad(fn))(INPUTS["log_probs"])
    expected = FOUND["results"][name]
    assert float(loss) == pytest.approx(expected["loss"], rel=1e-5)
    np.testing.assert_allclose(gradient, np.where(MASK, expected["gradient"], 0), atol=1e-6)


@pytest.mark.hf
def test_trl_gives_what_the_file_says():
    python = os.environ.get("MOELIB_HF_PYTHON") or pytest.skip("MOELIB_HF_PYTHON is not set")
    command = [python, "-m", "tests.models.make_trl_losses"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    assert json.loads(done.stdout) == FOUND


@pytest.mark.parametrize("settings", SETTINGS.values())
def test_padding_has_no_influence(settings):
    padded = jnp.where(MASK, INPUTS["log_probs"], jnp.nan)
    loss, gradient = jax.value_and_grad(lambda x: policy(x, **settings))(padded)
    assert float(loss) == float(policy(INPUTS["log_probs"], **settings))
    assert np.all(np.isfinite(gradient))


def test_sums_over_micro_batches_give_the_loss_of_the_batch():
    names = ("log_probs", "old", "advantages", "mask")
    parts = [
        policy_loss(*(jnp.asarray(INPUTS[name])[half] for name in names[:3]), mask=MASK[half])
        for half in (slice(0, 2), slice(2, None))
    ]
    total, weight = (sum(x) for x in zip(*parts, strict=True))
    assert float(total / weight) == pytest.approx(float(policy(INPUTS["log_probs"])), rel=1e-6)


def test_advantages_of_a_group():
    rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    advantages, differ = group_advantages(rewards)
    np.testing.assert_allclose(advantages[0], [1.5, -0.5, -0.5, -0.5], rtol=1e-3)
    np.testing.assert_array_equal(advantages[1], 0)
    assert differ.tolist() == [True, False]
    np.testing.assert_allclose(group_advantages(rewards, scale=False)[0][0], [0.75, *[-0.25] * 3])


def test_a_token_beyond_the_clip_has_no_gradient():
    ratios = jnp.log(jnp.array([[1.5, 0.5, 1.0]]))
    old, mask = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)

    def loss(x, advantage):
        return policy_loss(x, old, jnp.array([advantage]), mask).total

    up, down = (jax.grad(loss)(ratios, advantage)[0] for advantage in (1.0, -1.0))
    np.testing.assert_allclose(up, [0, -0.5, -1], rtol=1e-6)
    np.testing.assert_allclose(down, [1.5, 0, 1], rtol=1e-6)


def test_weights_of_another_sampler_are_cut_and_have_no_gradient():
    log_probs, sampler = jnp.zeros((1, 3)), -jnp.log(jnp.array([[0.5, 1.0, 8.0]]))
    np.testing.assert_allclose(importance_weights(log_probs, sampler), [[0.5, 1, 2]], rtol=1e-6)
    gradient = jax.grad(lambda x: importance_weights(x, sampler).sum())(log_probs)
    np.testing.assert_array_equal(gradient, 0)
    total, weight = mismatch(log_probs, sampler, jnp.array([[True, True, False]]))
    assert (float(total), float(weight)) == (pytest.approx(np.log(2)), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: dpo_loss(x, x, x, x, beta=0.0), "beta=0.0"),
        (lambda x: group_advantages(x[:, None]), r"rewards has shape \(3, 1\)"),
        (lambda x: policy(INPUTS["log_probs"], clip=(-1.0, 0.2)), r"clip=\(-1.0, 0.2\)"),
        (
            lambda x: policy(INPUTS["old"], kl_weight=0.1, reference_log_probs=None),
            "kl_weight=0.1",
        ),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call(jnp.zeros(3))


def test_tokens_are_clipped_by_the_sign_of_the_advantage():
    """As `clip_ratio` of TRL: an answer with advantage 0 has no clipped token."""
    ratios = jnp.tile(jnp.array([0.5, 1.5]), (3, 1))
    batch = {
        "target_labels": jnp.ones((3, 2), jnp.int32),
        "advantages": jnp.array([1.0, -1.0, 0.0]),
        "sampler_log_probs": jnp.zeros((3, 2)),
        "old_log_probs": jnp.zeros((3, 2)),
    }
    _, metrics = PolicyGradient.default_config().instantiate().loss(jnp.log(ratios), batch)
    np.testing.assert_allclose(metrics["clipped"].mean, 2 / 6, rtol=1e-6)
