"""Load balance: how evenly the router spreads tokens over experts, and what keeps it even.

Shapes: B batch, S sequence, E experts, K experts per token. Padding tokens count nowhere.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core import tree
from moelib.core.config import REQUIRED, Configurable, Required, config_class
from moelib.core.config_types import NonNegativeFloat
from moelib.core.errors import UserError
from moelib.core.module import Module, in_context
from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.layers.base import BaseLayer, bias_spec


def expert_counts(
    expert_ids: Int[Array, "B S K"], mask: Bool[Array, "B S"], num_experts: int
) -> Float[Array, "B E"]:
    """Returns the number of each sequence's assignments to each expert."""
    assigned = expert_ids[..., None] == jnp.arange(num_experts)[None, None, None]  # [B, S, K, E]
    assigned = assigned & mask[..., None, None]
    return jnp.sum(assigned, (1, 2), dtype=jnp.float32)


class BalanceScope(enum.Enum):
    """The tokens and layers over which the load is to be even."""

    MICRO_BATCH = "micro_batch"  # All tokens of one forward pass, on all devices, per layer.
    SEQUENCE = "sequence"  # Each sequence, per layer (DeepSeek-V2, arXiv:2405.04434, eq. 23).
    # The optimizer step's micro-batches so far, this one included, per layer (Qiu et al.,
    # arXiv:2501.11873, sec. 3.2); MICRO_BATCH if there is one.
    GLOBAL_BATCH = "global_batch"
    # All tokens of one forward pass in all MoE layers of the outermost stack, as in transformers:
    # an expert's load is that of the experts of its number in all layers.
    ALL_LAYERS = "all_layers"


def load_balance_loss(
    probs: Float[Array, "B S E"],
    expert_ids: Int[Array, "B S K"],
    mask: Bool[Array, "B S"],
    scope: BalanceScope = BalanceScope.MICRO_BATCH,
    earlier_counts: Float[Array, "E"] | None = None,
) -> Float[Array, ""]:
    """Returns the load-balance loss of one layer: 1 for an even load, up to E for a collapsed one.

    Args:
        probs: Router probabilities over all experts.
        expert_ids: The experts of each token.
        mask: False for padding.
        scope: The tokens over which loads are computed.
        earlier_counts: Assignments to each expert in earlier micro-batches, for GLOBAL_BATCH.

    Raises:
        UserError: If there are fewer than two experts.

    Source: Switch Transformer, arXiv:2101.03961, eq. 4, with counts divided by K.
    """
    load = LayerLoad.of(probs, expert_ids, mask)
    if scope is not BalanceScope.SEQUENCE:
        load = load.summed()
    if scope is BalanceScope.GLOBAL_BATCH and earlier_counts is not None:
        load = load._replace(counts=load.counts + earlier_counts[None])
    return load.loss()


class LayerLoad(NamedTuple):
    """The load of a layer's experts, per group of tokens: G = B sequences, or G = 1."""

    counts: Float[Array, "G E"]  # Number of assignments to each expert.
    mass: Float[Array, "G E"]  # Sum of the router's probabilities of each expert.
    tokens: Float[Array, "G"]  # Number of tokens.

    @classmethod
    def of(
        cls,
        probs: Float[Array, "B S E"],
        expert_ids: Int[Array, "B S K"],
        mask: Bool[Array, "B S"],
    ) -> "LayerLoad":
        """Returns the load per sequence."""
        num_experts = probs.shape[-1]
        if num_experts < 2:
            raise UserError(f"num_experts={num_experts}: load balancing needs at least 2 experts.")
        return cls(
            expert_counts(expert_ids, mask, num_experts),
            jnp.sum(jnp.where(mask[..., None], probs, 0.0), 1),
            jnp.sum(mask, 1, dtype=jnp.float32),
        )

    def summed(self) -> "LayerLoad":
        """Returns the load of all groups, G = 1, and of all layers where they are stacked."""
        num_experts = self.counts.shape[-1]
        parts = (
            self.counts.reshape(-1, num_experts),
            self.mass.reshape(-1, num_experts),
            self.tokens.reshape(-1),
        )
        return LayerLoad(*(jnp.sum(part, 0, keepdims=True) for part in parts))

    def loss(self) -> Float[Array, ""]:
        """Returns the loss, averaged over groups by their tokens. Groups of padding have none."""
        fraction = self.counts / jnp.maximum(jnp.sum(self.counts, -1, keepdims=True), 1.0)
        tokens = jnp.maximum(self.tokens, 1.0)[:, None]
        loss = self.counts.shape[-1] * jnp.sum(fraction * self.mass / tokens, -1)  # [G]
        return jnp.sum(loss * self.tokens) / jnp.maximum(jnp.sum(self.tokens), 1.0)


class PooledLoad(NamedTuple):
    """The module output of a layer with scope ALL_LAYERS."""

    load: LayerLoad  # The load of all tokens.
    weight: Float[Array, ""]  # The weight of the loss in the layer's config.


def balance_pool(layer: Module) -> Module | None:
    """Returns the outermost stack around a layer, which adds the loss of scope ALL_LAYERS."""
    found, node = None, layer.parent
    while node is not None:
        if getattr(node, "pools_balance_loss", False):
            found = node
        node = node.parent
    return found


def add_pooled_balance_loss(stack: Module) -> None:
    """Adds the balance loss of the layers with scope ALL_LAYERS that have run inside a stack.

    Its weight is the mean of their weights.

    Raises:
        UserError: If the layers have different numbers of experts.
    """
    outputs = tree.flatten_items(stack.get_module_outputs(), _is_pooled_load)
    found = [value for _, value in outputs if _is_pooled_load(value)]
    if not found:
        return
    loads = [each.load.summed() for each in found]
    if len(sizes := sorted({load.counts.shape[-1] for load in loads})) > 1:
        raise UserError(
            f"{stack._title()}: layers with num_experts {' and '.join(map(str, sizes))} cannot "
            "share a balance loss; set load_balance_loss.scope to 'micro_batch'."
        )
    total = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *loads)
    weight = jnp.mean(jnp.concatenate([each.weight.reshape(-1) for each in found]))
    num_layers = sum(each.weight.size for each in found)
    num_tokens = total.tokens[0] / num_layers
    stack.add_aux_loss("load_balance_loss", total.loss(), weight=weight, num_tokens=num_tokens)


def _is_pooled_load(value: Any) -> bool:
    return isinstance(value, PooledLoad)


def router_z_loss(logits: Float[Array, "B S E"], mask: Bool[Array, "B S"]) -> Float[Array, ""]:
    """Returns the mean over tokens of logsumexp(logits)^2, which keeps logits small.

    Source: ST-MoE, arXiv:2202.08906, eq. 5.
    """
    squares = jnp.square(jax.nn.logsumexp(logits, -1))
    tokens = jnp.sum(mask, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask, squares, 0.0)) / jnp.maximum(tokens, 1.0)


class LoadBalanceLoss(Configurable):
    """The load-balance loss and its weight in the objective.

    The loss is 1 for an even load. The loss of transformers is K times as large and pools all
    layers: its `router_aux_loss_coef` is weight / K with the scope ALL_LAYERS, and is exported so.
    The other scopes add one loss per layer, and have no such coefficient.
    """

    @config_class
    class Config(Configurable.Config):
        weight: Required[NonNegativeFloat] = REQUIRED  # Multiplies the loss in the objective.
        scope: BalanceScope = BalanceScope.MICRO_BATCH  # Tokens and layers that share a loss.


class RouterZLoss(Configurable):
    """The router z-loss and its weight in the objective."""

    @config_class
    class Config(Configurable.Config):
        weight: Required[NonNegativeFloat] = REQUIRED  # Multiplies the loss in the objective.


class LoadCounter(BaseLayer):
    """Assignments per expert in the micro-batches of an optimizer step so far, on all devices."""

    @config_class
    class Config(BaseLayer.Config):
        num_experts: Required[int] = REQUIRED  # E.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        shape = (self.config.num_experts,)
        return {"counts": bias_spec(shape, (None,), trainable=False)}

    @in_context
    def count(self, expert_ids: Int[Array, "B S K"], mask: Bool[Array, "B S"]) -> Float[Array, "E"]:
        """Returns the counts of earlier micro-batches; when training, adds this one's to them."""
        before = self.parameters["counts"]
        if self.is_training:
            counts = jnp.sum(expert_counts(expert_ids, mask, self.config.num_experts), 0)
            self.add_state_update("counts", before + counts)
        return before

    def _end_step(self, params: Nested) -> Nested:
        return jax.tree.map(jnp.zeros_like, params)


class BiasBalancing(LoadCounter):
    """Balance without a loss: a bias on the scores that select experts moves against the load.

    After each optimizer step the bias of an expert rises by `rate` if its load was below the mean,
    and falls if it was above. Combine weights do not see the bias.

    Source: Wang et al., arXiv:2408.15664, algorithm 1.
    """

    @config_class
    class Config(LoadCounter.Config):
        rate: float = 1e-3  # Change of a bias per optimizer step, in units of the scores.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        counts = super()._create_layer_parameter_specs()
        return {"bias": counts["counts"], **counts}

    @in_context
    def biased(self, scores: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """Returns the scores that select experts."""
        bias = self.parameters["bias"]
        self.add_summary("bias_range", jnp.max(bias) - jnp.min(bias))
        return scores + bias[None, None]

    def _end_step(self, params: Nested) -> Nested:
        counts = params["counts"]
        step = self.config.rate * jnp.sign(jnp.mean(counts, -1, keepdims=True) - counts)
        return {"bias": params["bias"] + step, "counts": jnp.zeros_like(counts)}
