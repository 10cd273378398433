"""Router: the experts of each token, and their combine weights.

Shapes: B batch, S sequence, E experts, K experts per token.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core import tree
from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.errors import UserError
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.layers.base import FLOAT32, BaseLayer, bias_spec, weight_spec
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.remat import save_activation, save_routing

# Name, in the state of a router, of the experts of each token [B, S, K]; see
# `moelib.layers.moe.replay`.
REPLAYED = "replayed_experts"


class Routing(NamedTuple):
    """The assignments of tokens to experts. Arrays are float32, except for ids and mask."""

    # The K experts of each token, best first; an id outside 0 to E - 1 for none.
    expert_ids: Int[Array, "B S K"]
    weights: Float[Array, "B S K"]  # Combine weights: factors of the experts' outputs.
    # Scores over all experts, which sum to 1 per token; for balance losses.
    probs: Float[Array, "B S E"]
    logits: Float[Array, "B S E"]  # The router's raw outputs.
    mask: Bool[Array, "B S"]  # False for padding, which goes to no expert.


def check_routing(name: str, routing: Any, x: Float[Array, "B S D"]) -> Routing:
    """Returns what the router `name` gives for `x`. Raises UserError if it is no `Routing`."""
    if not isinstance(routing, Routing):
        raise UserError(f"{name} returned {type(routing).__name__}; return a Routing.")
    tokens = x.shape[:2]
    ids = (*tokens, *getattr(routing.expert_ids, "shape", ())[2:3])
    for field, shape in {"expert_ids": ids, "weights": ids, "mask": tokens}.items():
        if getattr(given := getattr(routing, field), "shape", None) != shape:
            text = tree.array_text(given)
            raise UserError(f"{name} returned {field}={text}; return the shape {list(shape)}.")
    if len(ids) < 3:
        raise UserError(f"{name} returned expert_ids of the shape {list(ids)}; return [B, S, K].")
    return routing


class Score(enum.Enum):
    """The function from logits to scores and combine weights."""

    SOFTMAX_BEFORE_TOP_K = "softmax_before_top_k"  # Over all experts (Switch, OLMoE).
    SOFTMAX_AFTER_TOP_K = "softmax_after_top_k"  # Over the K best (Mixtral, GPT-OSS).
    SIGMOID = "sigmoid"  # Sigmoid of each logit (DeepSeek-V3, arXiv:2412.19437, eq. 15).


class GroupScore(enum.Enum):
    """The score of a group of experts for a token, from its experts' scores."""

    MAX = "max"  # Score of the best expert (DeepSeek-V2, arXiv:2405.04434, sec. 2.2.2).
    SUM_OF_TOP_2 = "sum_of_top_2"  # Sum of the best two (DeepSeek-V3, arXiv:2412.19437, 2.1.2).


# Number of a group's best experts whose scores are summed.
_NUM_SUMMED = {GroupScore.MAX: 1, GroupScore.SUM_OF_TOP_2: 2}


class Router(BaseLayer):
    """Sends each token to the K experts with the highest scores, computed in float32.

    With groups, experts form `num_groups` equal groups in the order of their ids, and a token's
    experts come from its `num_groups_per_token` best groups (DeepSeek-V2, arXiv:2405.04434, sec.
    2.2.2). Groups do not change the weights.
    """

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K.
        score: Score = Score.SOFTMAX_BEFORE_TOP_K  # Function from logits to scores and weights.
        bias: bool = False  # Whether a learned bias per expert is added to the logits.
        renormalize: bool = False  # Whether the K weights are divided by their sum.
        scaling_factor: float = 1.0  # Multiplies the weights.
        bias_balancing: BiasBalancing.Config | None = None  # Balance without a loss; None for none.
        num_groups: int | None = None  # Groups of experts; None for no groups.
        num_groups_per_token: int | None = None  # Best groups, which a token's experts come from.
        group_score: GroupScore = GroupScore.MAX  # Function from experts' scores to a group's.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if not 1 <= cfg.num_experts_per_token <= cfg.num_experts:
            raise UserError(
                f"{self._title()}: num_experts_per_token={cfg.num_experts_per_token}; set it from "
                f"1 to num_experts={cfg.num_experts}."
            )
        self._check_groups()
        if cfg.bias_balancing is not None:
            balancing = cfg.bias_balancing.clone(num_experts=cfg.num_experts)
            self._add_child("bias_balancing", balancing)

    def _check_groups(self) -> None:
        """Raises UserError unless groups have one size and a token's groups hold K experts."""
        cfg: Router.Config = self.config
        num_groups, num_best = cfg.num_groups, cfg.num_groups_per_token
        if num_groups is None and num_best is None:
            return
        if num_groups is None or num_best is None:
            raise UserError(
                f"{self._title()}: num_groups={num_groups} and num_groups_per_token={num_best}; "
                "set both, or neither."
            )
        divides = num_groups > 0 and cfg.num_experts % num_groups == 0
        size = cfg.num_experts // num_groups if divides else 0
        fits = 1 <= num_best <= num_groups and num_best * size >= cfg.num_experts_per_token
        if not fits or size < _NUM_SUMMED[cfg.group_score]:
            raise UserError(
                f"{self._title()}: num_groups={num_groups} must divide num_experts="
                f"{cfg.num_experts}, num_groups_per_token={num_best} of these groups must hold "
                f"num_experts_per_token={cfg.num_experts_per_token}, and a group at least "
                f"{_NUM_SUMMED[cfg.group_score]} for group_score={cfg.group_score.value!r}; change "
                "one of them."
            )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: Router.Config = self.config
        specs = {
            "weight": weight_spec((cfg.input_dim, cfg.num_experts), ("embed", None), **FLOAT32)
        }
        if cfg.bias:
            specs["bias"] = bias_spec((cfg.num_experts,), (None,))
        return specs

    def forward(self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Routing:
        """Returns the routing. Ties go to the expert with the lower id."""
        cfg: Router.Config = self.config
        logits = jnp.einsum(
            "bsd,de->bse",
            x.astype(jnp.float32),
            self.parameters["weight"],
            precision=jax.lax.Precision.HIGHEST,
        )
        if cfg.bias:
            logits = logits + self.parameters["bias"][None, None]
        logits = save_activation(logits, "router_logits")
        if cfg.score is Score.SIGMOID:
            scores = jax.nn.sigmoid(logits)
            # The scores over their sum, also where all of them underflow to 0.
            probs = jax.nn.softmax(jax.nn.log_sigmoid(logits), -1)
        else:
            probs = scores = jax.nn.softmax(logits, -1)
        selection = scores
        if cfg.bias_balancing is not None:
            selection = self.bias_balancing.biased(scores)
        selection = self._in_best_groups(jax.lax.stop_gradient(selection))
        _, expert_ids = jax.lax.top_k(selection, cfg.num_experts_per_token)
        expert_ids = self._replayed(save_routing(expert_ids), mask)
        if cfg.score is Score.SOFTMAX_AFTER_TOP_K:
            weights = jax.nn.softmax(jnp.take_along_axis(logits, expert_ids, -1), -1)
        else:
            weights = jnp.take_along_axis(scores, expert_ids, -1)  # [B, S, K]
        if cfg.renormalize:
            weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
        if cfg.bias_balancing is not None:
            self.bias_balancing.count(expert_ids, mask)
        return Routing(expert_ids, weights * cfg.scaling_factor, probs, logits, mask)

    def _replayed(self, own: Int[Array, "B S K"], mask: Bool[Array, "B S"]) -> Int[Array, "B S K"]:
        """Returns the given experts of tokens that have some, and the router's own of others.

        The summary `replaced` is the share of given experts that the router did not choose.
        """
        if REPLAYED not in self.state:
            return own
        given = self.state[REPLAYED].astype(own.dtype)
        is_given = mask & jnp.all((given >= 0) & (given < self.config.num_experts), axis=-1)
        is_own = jnp.any(given[..., None] == own[..., None, :], axis=-1)  # [B, S, K]
        num_given = jnp.sum(is_given, dtype=jnp.float32)
        replaced = jnp.sum(jnp.where(is_given, jnp.mean(~is_own, -1, dtype=jnp.float32), 0.0))
        self.add_summary("replaced", weighted(replaced / jnp.maximum(num_given, 1.0), num_given))
        return jnp.where(is_given[..., None], given, own)

    def _in_best_groups(self, selection: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """Returns the scores that select experts, -inf outside each token's best groups.

        DeepSeek-V2 sets 0 there, below every score: the same, except where scores underflow to 0.
        """
        cfg: Router.Config = self.config
        if cfg.num_groups is None or cfg.num_groups_per_token is None:
            return selection
        shape = *selection.shape[:2], cfg.num_groups, -1
        grouped = selection.reshape(shape)  # [B, S, groups, size]
        best_scores, _ = jax.lax.top_k(grouped, _NUM_SUMMED[cfg.group_score])
        scores = jnp.sum(best_scores, -1)  # [B, S, groups]
        _, best = jax.lax.top_k(scores, cfg.num_groups_per_token)
        groups = jnp.arange(cfg.num_groups)[None, None, None]
        kept = jnp.any(best[..., None] == groups, -2)  # [B, S, groups]
        return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(selection.shape)
