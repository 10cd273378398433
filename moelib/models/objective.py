"""Objectives of a language model: losses of the log probabilities of a batch's labels.

A batch with the arrays of an objective has its loss; one without them, such as a batch of text in
an evaluation, has the cross-entropy.

Letters: B sequences, S tokens of each.
"""

from abc import abstractmethod
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moelib.core.config import Configurable, config_class
from moelib.core.config_types import NonNegativeFloat, PositiveFloat
from moelib.core.errors import UserError
from moelib.core.metrics import Metric, WeightedScalar, weighted
from moelib.core.tree import Batch
from moelib.models.preferences import (
    dpo_loss,
    importance_weights,
    mismatch,
    policy_loss,
    policy_ratios,
)

CHOSEN, REJECTED = 1, 2  # Segments of a pair, which is one sequence.


class Objective(Configurable):
    """A loss of the log probabilities of labels."""

    arrays: ClassVar[tuple[str, ...]]  # Arrays of a batch that the loss needs.

    @property
    def counts_tokens(self) -> bool:
        """Whether `num_labels` is a number of tokens, not of sequences."""
        return True

    def applies_to(self, batch: Batch) -> bool:
        """Returns whether a batch is one for this loss.

        Raises:
            UserError: If it has some of the arrays, but not all.
        """
        found = [name for name in self.arrays if name in batch]
        if found and len(found) < len(self.arrays):
            raise UserError(
                f"The batch has {', '.join(found)}, but {type(self).__name__} needs "
                f"{', '.join(self.arrays)}; set an input that makes all of them."
            )
        return bool(found)

    def num_labels(self, batch: Batch) -> Float[Array, ""]:
        """Returns the number that the loss is a mean over."""
        return jnp.sum(batch["target_labels"] >= 0, dtype=jnp.float32)

    @abstractmethod
    def loss(
        self, log_probs: Float[Array, "B S"], batch: Batch
    ) -> tuple[WeightedScalar, dict[str, Metric]]:
        """Returns the loss of a batch, weighted by `num_labels`, and metrics.

        Args:
            log_probs: Log probability of each label in nats; 0 where there is none.
            batch: The batch.
        """


class DirectPreference(Objective):
    """DPO: of two answers to a prompt, one is preferred.

    A sequence holds the prompt with the preferred answer as segment 1, and with the other one as
    segment 2; `reference_log_probs [B, 2]` are the sums over the labels of each under the reference
    model. Source: Rafailov et al., arXiv:2305.18290.
    """

    arrays = ("reference_log_probs",)

    @config_class
    class Config(Objective.Config):
        beta: PositiveFloat = 0.1  # Strength of the tie to the reference model.

    @property
    def counts_tokens(self) -> bool:
        """False: `num_labels` is a number of pairs."""
        return False

    def num_labels(self, batch: Batch) -> Float[Array, ""]:
        """Returns the number of pairs."""
        return jnp.sum(jnp.any(batch["target_labels"] >= 0, axis=1), dtype=jnp.float32)

    def loss(
        self, log_probs: Float[Array, "B S"], batch: Batch
    ) -> tuple[WeightedScalar, dict[str, Metric]]:
        """Returns the loss, `margin` in nats, and `accuracy`, the share of margins above 0.

        The margin is the log ratio to the reference of the preferred answer, less that of the
        other; `log_prob_of_chosen` and `log_prob_of_rejected` are means over the pairs.
        """
        chosen, rejected = pair_log_probs(log_probs, batch).T
        reference, num = batch["reference_log_probs"], self.num_labels(batch)
        is_pair = jnp.any(batch["target_labels"] >= 0, axis=1)
        losses = dpo_loss(chosen, rejected, *reference.T, beta=self.config.beta)
        margin = (chosen - reference[:, 0]) - (rejected - reference[:, 1])

        def mean(x: Array) -> WeightedScalar:
            return weighted(jnp.sum(jnp.where(is_pair, x, 0.0)) / jnp.maximum(num, 1.0), num)

        return mean(losses), {
            "margin": mean(margin),
            "accuracy": mean(margin > 0),
            "log_prob_of_chosen": mean(chosen),
            "log_prob_of_rejected": mean(rejected),
        }


def pair_log_probs(log_probs: Float[Array, "B S"], batch: Batch) -> Float[Array, "B 2"]:
    """Returns the sums over the labels of the preferred answer and of the other one."""

    def of(segment: int) -> Float[Array, "B"]:
        inside = (batch["segment_ids"] == segment) & (batch["target_labels"] >= 0)
        return jnp.sum(jnp.where(inside, log_probs, 0.0), axis=1)

    return jnp.stack([of(CHOSEN), of(REJECTED)], axis=1)


class PolicyGradient(Objective):
    """GRPO and GSPO: answers of the model itself, with advantages.

    A sequence holds a prompt and an answer, whose tokens are the labels. `advantages [B]` are those
    of answers, and `sampler_log_probs [B, S]` the log probabilities of labels when they were drawn.
    With `old_log_probs [B, S]`, those of the trainer at that time, an answer may serve several
    steps; without, they are those of this step. See `policy_loss` for fields and sources.
    """

    arrays = ("advantages", "sampler_log_probs")

    @config_class
    class Config(Objective.Config):
        ratio: Literal["token", "sequence"] = "token"  # What is clipped.
        mean: Literal["token", "sequence"] = "token"  # What the loss is a mean over.
        clip_below: NonNegativeFloat = 0.2  # Distance of the ratio below 1 without gradient.
        clip_above: NonNegativeFloat = 0.28  # Distance above 1.
        # Maximum factor of a token by `importance_weights`; None for no such factors.
        max_importance_weight: PositiveFloat | None = 2.0

    @property
    def counts_tokens(self) -> bool:
        """Whether `num_labels` is a number of tokens, not of answers."""
        return self.config.mean == "token"

    def num_labels(self, batch: Batch) -> Float[Array, ""]:
        """Returns the number of tokens or of answers."""
        if self.counts_tokens:
            return super().num_labels(batch)
        return jnp.sum(jnp.any(batch["target_labels"] >= 0, axis=1), dtype=jnp.float32)

    def loss(
        self, log_probs: Float[Array, "B S"], batch: Batch
    ) -> tuple[WeightedScalar, dict[str, Metric]]:
        """Returns the loss and metrics.

        They are `mismatch`, the absolute difference of sampler and trainer in nats per token;
        `clipped`, the share of tokens whose gradient is 0 because of their ratio, not of their
        advantage; and `reward`, if the batch has `rewards`.
        """
        cfg: PolicyGradient.Config = self.config
        mask, sampler = batch["target_labels"] >= 0, batch["sampler_log_probs"]
        now = jax.lax.stop_gradient(log_probs)
        old = batch.get("old_log_probs", now)
        cap, weights = cfg.max_importance_weight, None
        if cap is not None:
            weights = importance_weights(jnp.where(mask, old, 0.0), sampler, cap=cap)
        total, num = policy_loss(
            log_probs,
            old,
            batch["advantages"],
            mask,
            ratio=cfg.ratio,
            mean=cfg.mean,
            clip=(cfg.clip_below, cfg.clip_above),
            weights=weights,
        )
        difference, tokens = mismatch(old, sampler, mask)
        ratio = policy_ratios(now, old, mask, cfg.ratio)
        gain = batch["advantages"][:, None]
        above, below = ratio > 1 + cfg.clip_above, ratio < 1 - cfg.clip_below
        outside = (gain > 0) & above | (gain < 0) & below
        per_token = jnp.maximum(tokens, 1.0)
        metrics: dict[str, Metric] = {
            "mismatch": weighted(difference / per_token, tokens),
            "clipped": weighted(jnp.sum(outside & mask, dtype=jnp.float32) / per_token, tokens),
        }
        if "rewards" in batch:
            metrics["reward"] = weighted(jnp.mean(batch["rewards"]), len(mask))
        return WeightedScalar(total / jnp.maximum(num, 1.0), num), metrics
