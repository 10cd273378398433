"""Losses of preferences and rewards: DPO, GRPO, GSPO, and what their batches need.

Log probabilities are those of the tokens of answers, in nats, under temperature 1.

Letters: B answers, S tokens of an answer with padding, P prompts, G answers to each.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from moelib.core.errors import UserError

_EPS = 1e-4  # Added to the standard deviation of a group's rewards.


class Sum(NamedTuple):
    """A sum and its weight; their quotient is a mean, also over micro-batches and devices."""

    total: Float32[Array, ""]
    weight: Float32[Array, ""]


def dpo_loss(
    chosen: Float[Array, "B"],
    rejected: Float[Array, "B"],
    reference_chosen: Float[Array, "B"],
    reference_rejected: Float[Array, "B"],
    *,
    beta: float = 0.1,
) -> Float[Array, "B"]:
    """Returns the loss of each pair: -log sigmoid of beta times the margin of the log ratios.

    Args:
        chosen: Log probability of the preferred answer, a sum over its tokens.
        rejected: That of the other answer.
        reference_chosen: That of the preferred answer under the reference model.
        reference_rejected: That of the other answer under it.
        beta: Strength of the tie to the reference model, above 0.

    Raises:
        UserError: If beta is 0 or less.

    Source: Rafailov et al., arXiv:2305.18290, eq. 7.
    """
    if beta <= 0:
        raise UserError(f"beta={beta}: set it above 0; 0.1 is usual.")
    margin = (chosen - reference_chosen) - (rejected - reference_rejected)
    return -jax.nn.log_sigmoid(beta * margin)


def group_advantages(
    rewards: Float[Array, "P G"], *, scale: bool = True
) -> tuple[Float[Array, "P G"], Bool[Array, "P"]]:
    """Returns (advantages, whether the answers to a prompt differ in their rewards).

    An advantage is the reward less the mean of its group, over the standard deviation of the group
    with `scale`. Groups of equal rewards teach nothing; DAPO (arXiv:2503.14476) leaves them out.

    Args:
        rewards: Reward of each answer; two answers or more per prompt.
        scale: False is the choice of Dr. GRPO (arXiv:2503.20783).

    Raises:
        UserError: If there is one answer per prompt.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """
    if rewards.shape[1] < 2:
        raise UserError(f"rewards has shape {rewards.shape}: set two answers or more per prompt.")
    centred = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    spread = jnp.std(rewards, axis=1, ddof=1, keepdims=True)
    advantages = centred / (spread + _EPS) if scale else centred
    return advantages, jnp.max(rewards, axis=1) > jnp.min(rewards, axis=1)


def policy_loss(
    log_probs: Float[Array, "B S"],
    old_log_probs: Float[Array, "B S"],
    advantages: Float[Array, "B"],
    mask: Bool[Array, "B S"],
    *,
    ratio: Literal["token", "sequence"] = "token",
    mean: Literal["token", "sequence"] = "token",
    clip: tuple[float, float] = (0.2, 0.28),
    weights: Float[Array, "B S"] | None = None,
    reference_log_probs: Float[Array, "B S"] | None = None,
    kl_weight: float = 0.0,
) -> Sum:
    """Returns the clipped loss of answers with advantages.

    GRPO as in DAPO is the default. GSPO is `ratio="sequence", mean="sequence", clip=(3e-4, 4e-4)`:
    its ratio is that of the answer, to the power of one over its number of tokens.

    Args:
        log_probs: Log probabilities of the tokens under the model.
        old_log_probs: Those under the model that made the answers.
        advantages: Advantage of each answer.
        mask: Tokens of answers; False for padding.
        ratio: Whether a token or an answer is clipped.
        mean: Mean over all tokens (DAPO), or over the means of answers (GRPO as published).
        clip: Distances of the ratio below and above 1 beyond which it has no gradient.
        weights: Factors of tokens, such as `importance_weights`; None for 1.
        reference_log_probs: Log probabilities under a reference model, for `kl_weight`.
        kl_weight: Weight of the estimated divergence from the reference model.

    Raises:
        UserError: If a distance of `clip` or `kl_weight` is negative, or `kl_weight` is set without
            `reference_log_probs`.

    Sources: arXiv:2402.03300, eq. 3 and 4; DAPO, arXiv:2503.14476, eq. 8; GSPO, arXiv:2507.18071,
    eq. 5 and 7.
    """
    low, high = clip
    if min(low, high, kl_weight) < 0:
        raise UserError(f"clip={clip}, kl_weight={kl_weight}: set them to 0 or more.")
    if kl_weight > 0 and reference_log_probs is None:
        raise UserError(f"kl_weight={kl_weight}: pass reference_log_probs, or set it to 0.")
    counted = mask.astype(jnp.float32)
    lengths = jnp.maximum(jnp.sum(counted, axis=1, keepdims=True), 1.0)
    old_log_probs = jax.lax.stop_gradient(old_log_probs)
    ratios, gain = policy_ratios(log_probs, old_log_probs, mask, ratio), advantages[:, None]
    losses = -jnp.minimum(ratios * gain, jnp.clip(ratios, 1 - low, 1 + high) * gain)
    losses = losses if weights is None else losses * jnp.where(mask, weights, 0.0)
    if kl_weight > 0:
        assert reference_log_probs is not None
        ahead = jnp.where(mask, reference_log_probs - log_probs, 0.0)
        losses = losses + kl_weight * (jnp.exp(ahead) - ahead - 1)
    if mean == "token":
        return Sum(jnp.sum(losses * counted), jnp.sum(counted))
    used = jnp.any(mask, axis=1).astype(jnp.float32)
    return Sum(jnp.sum(losses * counted / lengths), jnp.sum(used))


def policy_ratios(
    log_probs: Float[Array, "B S"],
    old_log_probs: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
    ratio: Literal["token", "sequence"],
) -> Float[Array, "B _"]:
    """Returns the ratio of new and old probability, of each token or answer; 1 for padding."""
    difference = jnp.where(mask, log_probs - old_log_probs, 0.0)  # Padding may hold anything.
    if ratio == "sequence":
        lengths = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
        difference = jnp.sum(difference, axis=1, keepdims=True) / jnp.maximum(lengths, 1.0)
    return jnp.exp(difference)


def importance_weights(
    log_probs: Float[Array, "B S"], sampler_log_probs: Float[Array, "B S"], *, cap: float = 2.0
) -> Float[Array, "B S"]:
    """Returns min(p / p of the sampler, cap) of each token, without gradient.

    They correct for a sampler that computes other probabilities than the trainer for equal
    parameters, as separate engines do.

    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
    2025.
    """
    difference = jax.lax.stop_gradient(log_probs) - sampler_log_probs
    return jnp.minimum(jnp.exp(difference), cap)


def mismatch(
    log_probs: Float[Array, "B S"],
    sampler_log_probs: Float[Array, "B S"],
    mask: Bool[Array, "B S"],
) -> Sum:
    """Returns the absolute difference of sampler and trainer in nats, over the tokens."""
    difference = jnp.where(mask, jnp.abs(log_probs - sampler_log_probs), 0.0)
    return Sum(jnp.sum(difference), jnp.sum(mask, dtype=jnp.float32))
