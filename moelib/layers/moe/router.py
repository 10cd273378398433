"""Router: which experts a token goes to, and with what weights.

Shapes: B batch, S sequence, E experts, K experts a token.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.param import FanAxes, ParameterSpec
from moelib.layers import initializers
from moelib.layers.base import BaseLayer
from moelib.layers.moe.balance import BiasBalancing
from moelib.layers.remat import save_activation, save_routing


class Routing(NamedTuple):
    """Where tokens go. All arrays are float32 but the ids and the mask.

    Attributes:
        expert_ids: The K experts of each token, best first; a number that is no expert's for none.
        weights: What each expert's output is multiplied by.
        probs: Scores over all experts, which sum to 1 a token; for balance losses.
        logits: The router's raw outputs.
        mask: False for padding, which goes to no expert.
    """

    expert_ids: Int[Array, "B S K"]
    weights: Float[Array, "B S K"]
    probs: Float[Array, "B S E"]
    logits: Float[Array, "B S E"]
    mask: Bool[Array, "B S"]


class Score(enum.Enum):
    """How logits become the weights of the chosen experts."""

    SOFTMAX_BEFORE_TOP_K = "softmax_before_top_k"  # Over all experts (Switch, OLMoE).
    SOFTMAX_AFTER_TOP_K = "softmax_after_top_k"  # Over the chosen (Mixtral, GPT-OSS).
    SIGMOID = "sigmoid"  # Each expert by itself (DeepSeek-V3, arXiv:2412.19437, eq. 15).


class GroupScore(enum.Enum):
    """How good a group of experts is for a token, from its experts' scores."""

    MAX = "max"  # The best one's (DeepSeek-V2, arXiv:2405.04434, sec. 2.2.2).
    SUM_OF_TOP_2 = "sum_of_top_2"  # Of the two best (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2).


class Router(BaseLayer):
    """Sends each token to the K experts with the highest scores, computed in float32.

    With groups, experts stand in `num_groups` equal ones in the order of their numbers, and a
    token's come from the `num_groups_per_token` best of them (DeepSeek-V2, arXiv:2405.04434, sec.
    2.2.2). Weights are the scores whatever the groups.
    """

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K.
        score: Score = Score.SOFTMAX_BEFORE_TOP_K
        bias: bool = False  # A learned one of each expert, added to the logits.
        renormalize: bool = False  # Whether the K weights are divided by their sum.
        scaling_factor: float = 1.0  # Multiplies the weights.
        bias_balancing: BiasBalancing.Config | None = None
        num_groups: int | None = None  # None for no groups.
        num_groups_per_token: int | None = None  # The groups that a token's experts may come from.
        group_score: GroupScore = GroupScore.MAX

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if not 1 <= cfg.num_experts_per_token <= cfg.num_experts:
            raise ValueError(
                f"{self._title()}: num_experts_per_token is {cfg.num_experts_per_token}; it must "
                f"be from 1 to num_experts, {cfg.num_experts}."
            )
        self._check_groups()
        if cfg.bias_balancing is not None:
            balancing = cfg.bias_balancing.clone(num_experts=cfg.num_experts)
            self._add_child("bias_balancing", balancing)

    def _check_groups(self) -> None:
        """Raises ValueError unless groups are of one size and the chosen ones hold K experts."""
        cfg: Router.Config = self.config
        num_groups, num_chosen = cfg.num_groups, cfg.num_groups_per_token
        if num_groups is None and num_chosen is None:
            return
        if num_groups is None or num_chosen is None:
            raise ValueError(
                f"{self._title()}: num_groups is {num_groups} and num_groups_per_token "
                f"{num_chosen}; set both, or neither."
            )
        if num_groups < 1 or cfg.num_experts % num_groups:
            raise ValueError(
                f"{self._title()}: {cfg.num_experts} experts do not divide into num_groups "
                f"{num_groups}; change one of them."
            )
        size = cfg.num_experts // num_groups
        if not 1 <= num_chosen <= num_groups or num_chosen * size < cfg.num_experts_per_token:
            raise ValueError(
                f"{self._title()}: num_groups_per_token is {num_chosen}; it must be from 1 to "
                f"num_groups, {num_groups}, and groups of {size} must hold num_experts_per_token, "
                f"{cfg.num_experts_per_token}."
            )
        if cfg.group_score is GroupScore.SUM_OF_TOP_2 and size < 2:
            raise ValueError(
                f"{self._title()}: group_score {cfg.group_score.value!r} takes groups of 2 experts "
                f"or more; num_groups {num_groups} makes groups of {size}."
            )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: Router.Config = self.config
        specs = {
            "weight": ParameterSpec(
                (cfg.input_dim, cfg.num_experts),
                ("embed", None),
                fan_axes=FanAxes((0,), (1,)),
                castable=False,
            )
        }
        if cfg.bias:
            specs["bias"] = ParameterSpec(
                (cfg.num_experts,),
                (None,),
                initializer=initializers.constant(0.0),
                weight_decay_scale=0.0,
                castable=False,
            )
        return specs

    def forward(self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Routing:
        """Returns where each token goes. Ties go to the expert with the lower number."""
        cfg: Router.Config = self.config
        logits = jnp.einsum(
            "bsd,de->bse",
            x.astype(jnp.float32),
            self.parameters["weight"].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        if cfg.bias:
            logits = logits + self.parameters["bias"].astype(jnp.float32)[None, None]
        logits = save_activation(logits, "router_logits")
        if cfg.score is Score.SIGMOID:
            scores = jax.nn.sigmoid(logits)
            probs = scores / jnp.sum(scores, -1, keepdims=True)
        else:
            probs = scores = jax.nn.softmax(logits, -1)
        selection = scores
        if cfg.bias_balancing is not None:
            selection = self.bias_balancing.biased(scores)
        selection = self._in_best_groups(jax.lax.stop_gradient(selection))
        _, expert_ids = jax.lax.top_k(selection, cfg.num_experts_per_token)
        expert_ids = save_routing(expert_ids)
        if cfg.score is Score.SOFTMAX_AFTER_TOP_K:
            weights = jax.nn.softmax(jnp.take_along_axis(logits, expert_ids, -1), -1)
        else:
            weights = jnp.take_along_axis(scores, expert_ids, -1)  # [B, S, K]
        if cfg.renormalize:
            weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
        routing = Routing(expert_ids, weights * cfg.scaling_factor, probs, logits, mask)
        if cfg.bias_balancing is not None and self.is_training:
            self.bias_balancing.count(expert_ids, mask)
        return routing

    def _in_best_groups(self, selection: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
        """Returns what experts are chosen by, -inf outside of each token's best groups.

        DeepSeek-V2 has 0 there, below every score: the same, but for scores that underflow to 0.
        """
        cfg: Router.Config = self.config
        if cfg.num_groups is None or cfg.num_groups_per_token is None:
            return selection
        grouped = selection.reshape(
            *selection.shape[:2], cfg.num_groups, -1
        )  # [B, S, groups, size]
        num_best = 1 if cfg.group_score is GroupScore.MAX else 2
        scores = jnp.sum(jax.lax.top_k(grouped, num_best)[0], -1)  # [B, S, groups]
        _, best = jax.lax.top_k(scores, cfg.num_groups_per_token)
        groups = jnp.arange(cfg.num_groups)[None, None, None]
        kept = jnp.any(best[..., None] == groups, -2)  # [B, S, groups]
        return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(selection.shape)

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        del seq_len
        return 2.0 * self.config.input_dim * self.config.num_experts
