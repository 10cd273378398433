"""MoE++: experts that compute nothing, and routers that see the logits of the router before them.

Source: Jin et al., MoE++, arXiv:2410.07348, eq. 3 to 8. Dispatch is dropless, so that the paper's
capacities (eq. 9) have no use.

Shapes: B batch, S sequence, D model, E feed-forward experts, c constant experts, N = E + c + 2.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_modifier import ConfigModifier, replace_layer_config_recursively
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.layers.base import FLOAT32, BaseLayer, weight_spec
from moelib.layers.carry import carried, carry
from moelib.layers.initializers import normal
from moelib.layers.moe.balance import expert_counts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Routing
from moelib.layers.remat import save_activation, save_routing


def num_constant_experts(num_experts: int) -> int:
    """Returns the number c of constant experts next to E feed-forward experts (appendix A)."""
    return max(num_experts // 4 - 2, 1)


class ZeroComputationExperts(BaseLayer):
    """Constant experts, whose ids are E to E + c - 1, then the copy expert, then the zero expert.

    The zero expert returns 0, the copy expert x, and a constant expert a x + b v with a learned
    vector v and (a, b) = softmax(x W). They compute where the tokens are: nothing is dispatched.
    """

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        dim, num = self.config.input_dim, num_constant_experts(self.config.num_experts)
        return {
            "constant": ParameterSpec((num, dim), (None, "norm"), initializer=normal(std=1.0)),
            "mix": weight_spec((num, dim, 2), (None, "embed", None), stacked=(0,)),
        }

    def forward(self, x: Float[Array, "B S D"], routing: Routing) -> Float[Array, "B S D"]:
        """Returns the weighted sum of these experts' outputs."""
        p, first = self.operands(self.parameters, x.dtype), self.config.num_experts
        num = len(p["constant"])
        own = routing.expert_ids[..., None] == first + jnp.arange(num + 1)[None, None, None]
        own = own & routing.mask[..., None, None]  # [B, S, K, c + 1]
        weights = jnp.sum(jnp.where(own, routing.weights[..., None], 0.0), 2)
        weights, copied = weights[..., :num], weights[..., num]
        logits = jnp.einsum("bsd,cdn->bscn", x, p["mix"], preferred_element_type=jnp.float32)
        a, b = jnp.moveaxis(jax.nn.softmax(logits, -1), -1, 0)  # [B, S, c]
        of_x = copied + jnp.sum(weights * a, -1)
        constants = jnp.einsum("bsc,cd->bsd", (weights * b).astype(x.dtype), p["constant"])
        return of_x[..., None].astype(x.dtype) * x + constants


class ResidualRouter(BaseLayer):
    """Top-K of softmax(x W + z V), where z are the logits of the router in the layer before."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K, of all N experts.
        loss_weight: float = 0.01  # Of the heterogeneous balance loss, in the objective.
        # Weight in that loss of experts that compute nothing; below 1 more tokens go to them.
        zero_computation_weight: float = 0.75

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        experts = self.config.num_experts
        self._num = experts + num_constant_experts(experts) + 2

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        return {
            "weight": weight_spec((self.config.input_dim, self._num), ("embed", None), **FLOAT32),
            "residual": weight_spec((self._num, self._num), (None, None), **FLOAT32),
        }

    def _create_layer_carry_specs(self, batch_size: int, seq_len: int) -> dict[str, ParameterSpec]:
        shape = (batch_size, seq_len, self._num)
        return {"router_logits": ParameterSpec(shape, ("batch", "sequence", None), "float32")}

    def forward(self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Routing:
        """Returns the routing; ids of N - 1, the zero expert, add nothing."""
        cfg, p = self.config, self.parameters
        precise = {"precision": jax.lax.Precision.HIGHEST}
        logits = jnp.einsum("bsd,dn->bsn", x.astype(jnp.float32), p["weight"], **precise)
        before = carried(self, "router_logits")
        logits = logits + jnp.einsum("bsm,mn->bsn", before, p["residual"], **precise)
        logits = save_activation(logits, "router_logits")
        carry(self, router_logits=logits)
        probs = jax.nn.softmax(logits, -1)
        _, ids = jax.lax.top_k(jax.lax.stop_gradient(probs), cfg.num_experts_per_token)
        ids = save_routing(ids)
        self._report(probs, ids, mask)
        return Routing(ids, jnp.take_along_axis(probs, ids, -1), probs, logits, mask)

    def _report(self, probs: Array, ids: Array, mask: Array) -> None:
        """Adds the balance loss (eq. 7) and the share of assignments that cost nothing."""
        cfg = self.config
        num_tokens = jnp.sum(mask, dtype=jnp.float32)
        tokens = jnp.maximum(num_tokens, 1.0)
        shares = jnp.sum(expert_counts(ids, mask, self._num), 0) / tokens  # [N]
        means = jnp.sum(jnp.where(mask[..., None], probs, 0.0), (0, 1)) / tokens
        free = jnp.arange(self._num) >= cfg.num_experts
        loss = jnp.sum(jnp.where(free, cfg.zero_computation_weight, 1.0) * shares * means)
        self.add_aux_loss("balance_loss", loss, weight=cfg.loss_weight, num_tokens=num_tokens)
        share = jnp.sum(jnp.where(free, shares, 0.0)) / cfg.num_experts_per_token
        self.add_summary("zero_computation_share", weighted(share, num_tokens))


class UseMoEPlusPlus(ConfigModifier):
    """Adds zero-computation experts and residual routers to all MoE layers of a trainer's model."""

    def __call__(self, cfg):
        """Returns the changed config of a trainer."""

        def changed(moe: MoELayer.Config) -> MoELayer.Config:
            local, router = ZeroComputationExperts.default_config(), ResidualRouter.default_config()
            moe = moe.clone(local_experts=local, router=router)
            return moe.set(load_balance_loss=None, router_z_loss=None)

        replace_layer_config_recursively(cfg.model, MoELayer, changed)
        return cfg
