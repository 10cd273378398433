"""Load balance: how evenly the router spreads tokens over experts, and what keeps it even.

Shapes: B batch, S sequence, E experts, K experts a token. Padding tokens count nowhere.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import REQUIRED, Configurable, Required, config_class
from moelib.core.context import Nested
from moelib.core.param import ParameterSpec
from moelib.layers import initializers
from moelib.layers.base import BaseLayer


def expert_counts(
    expert_ids: Int[Array, "B S K"], mask: Bool[Array, "B S"], num_experts: int
) -> Float[Array, "B E"]:
    """Returns how many times each row's tokens were sent to each expert."""
    chosen = expert_ids[..., None] == jnp.arange(num_experts)[None, None, None]  # [B, S, K, E]
    chosen = chosen & mask[..., None, None]
    return jnp.sum(chosen, (1, 2), dtype=jnp.float32)


class BalanceScope(enum.Enum):
    """Over which tokens the load is to be even."""

    MICRO_BATCH = "micro_batch"  # All tokens of one forward pass, on all devices.
    SEQUENCE = "sequence"  # Each row by itself (DeepSeek-V2, arXiv:2405.04434, eq. 23).
    # Loads of the optimizer step's micro-batches so far, this one included (Qiu et al.,
    # arXiv:2501.11873, sec. 3.2); MICRO_BATCH if there is one.
    GLOBAL_BATCH = "global_batch"


def load_balance_loss(
    probs: Float[Array, "B S E"],
    expert_ids: Int[Array, "B S K"],
    mask: Bool[Array, "B S"],
    scope: BalanceScope = BalanceScope.MICRO_BATCH,
    earlier_counts: Float[Array, "E"] | None = None,
) -> Float[Array, ""]:
    """Returns 1 when tokens are spread evenly over the experts, and up to E when they are not.

    Args:
        probs: Router probabilities over all experts.
        expert_ids: The experts each token was sent to.
        mask: False for padding.
        scope: The tokens over which fractions are taken. Rows of padding only count nowhere.
        earlier_counts: For GLOBAL_BATCH: assignments of each expert in earlier micro-batches.

    Raises:
        ValueError: If there are fewer than two experts.

    Source: Switch Transformer, arXiv:2101.03961, eq. 4, with counts divided by K.
    """
    num_experts = probs.shape[-1]
    if num_experts < 2:
        raise ValueError(f"Nothing to balance: num_experts is {num_experts}; set it to 2 or more.")
    counts = expert_counts(expert_ids, mask, num_experts)  # [B, E]
    mass = jnp.sum(jnp.where(mask[..., None], probs, 0.0), 1)  # [B, E]
    tokens = jnp.sum(mask, 1, dtype=jnp.float32)  # [B]
    if scope is not BalanceScope.SEQUENCE:
        counts, mass, tokens = (jnp.sum(a, 0, keepdims=True) for a in (counts, mass, tokens))
    if scope is BalanceScope.GLOBAL_BATCH and earlier_counts is not None:
        counts = counts + earlier_counts[None]
    fraction = counts / jnp.maximum(jnp.sum(counts, -1, keepdims=True), 1.0)  # Of all assignments.
    loss = num_experts * jnp.sum(fraction * mass / jnp.maximum(tokens, 1.0)[:, None], -1)
    return jnp.sum(loss * tokens) / jnp.maximum(jnp.sum(tokens), 1.0)


def router_z_loss(logits: Float[Array, "B S E"], mask: Bool[Array, "B S"]) -> Float[Array, ""]:
    """Returns the mean over tokens of logsumexp(logits)^2, which keeps logits small.

    Source: ST-MoE, arXiv:2202.08906, eq. 5.
    """
    squares = jnp.square(jax.nn.logsumexp(logits, -1))
    return jnp.sum(jnp.where(mask, squares, 0.0)) / jnp.maximum(
        jnp.sum(mask, dtype=jnp.float32), 1.0
    )


class LoadBalanceLoss(Configurable):
    """The load-balance loss and its weight in the objective."""

    @config_class
    class Config(Configurable.Config):
        weight: Required[float] = REQUIRED
        scope: BalanceScope = BalanceScope.MICRO_BATCH


class RouterZLoss(Configurable):
    """The router z-loss and its weight in the objective."""

    @config_class
    class Config(Configurable.Config):
        weight: Required[float] = REQUIRED


class LoadCounter(BaseLayer):
    """Assignments per expert in the micro-batches of an optimizer step so far, on all devices."""

    @config_class
    class Config(BaseLayer.Config):
        num_experts: Required[int] = REQUIRED

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        return {"counts": _untrained((self.config.num_experts,))}

    def earlier(
        self, expert_ids: Int[Array, "B S K"], mask: Bool[Array, "B S"]
    ) -> Float[Array, "E"]:
        """Returns the counts of earlier micro-batches; adds this one's where training."""
        before = self.parameters["counts"]
        if self.is_training:
            counts = jnp.sum(expert_counts(expert_ids, mask, self.config.num_experts), 0)
            self.add_state_update("counts", before + counts)
        return before

    def _end_step(self, params: Nested) -> Nested:
        return jax.tree.map(jnp.zeros_like, params)


def _untrained(shape: tuple[int, ...]) -> ParameterSpec:
    return ParameterSpec(
        shape,
        (None,) * len(shape),
        dtype="float32",
        initializer=initializers.constant(0.0),
        trainable=False,
        weight_decay_scale=0.0,
    )


class BiasBalancing(BaseLayer):
    """Balance without a loss: a bias, added to scores only to choose, moves against the load.

    Counts of one optimizer step, over all its micro-batches and devices, are kept in the state;
    after the step the bias of each expert goes up by `rate` if it had less than its share, down
    if it had more. Source: Wang et al., arXiv:2408.15664, algorithm 1.
    """

    @config_class
    class Config(BaseLayer.Config):
        num_experts: Required[int] = REQUIRED
        rate: float = 1e-3

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        spec = _untrained((self.config.num_experts,))
        return {"bias": spec, "counts": spec}

    def biased(self, scores: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """Returns the scores by which experts are chosen."""
        bias = self.parameters["bias"]
        self.add_summary("bias_range", jnp.max(bias) - jnp.min(bias))
        return scores + bias[None, None]

    def count(self, expert_ids: Int[Array, "B S K"], mask: Bool[Array, "B S"]) -> None:
        """Adds where the tokens went to the counts of this step."""
        counts = jnp.sum(expert_counts(expert_ids, mask, self.config.num_experts), 0)
        self.add_state_update("counts", self.parameters["counts"] + counts)

    def _end_step(self, params: Nested) -> Nested:
        counts = params["counts"]
        step = self.config.rate * jnp.sign(jnp.mean(counts, -1, keepdims=True) - counts)
        return {"bias": params["bias"] + step, "counts": jnp.zeros_like(counts)}
