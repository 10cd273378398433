"""Dynamic MoE: as many experts per token as pass a threshold; experts come and go in training.

Source: Guo et al., DynMoE, arXiv:2405.14297, eq. 3 to 8 and algorithm 1, and the released gate.

Shapes: B batch, S sequence, D model, E slots of experts, K experts per token at most.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_modifier import ConfigModifier, replace_layer_config_recursively
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.layers.base import FLOAT32, BaseLayer, bias_spec, weight_spec
from moelib.layers.moe.balance import expert_counts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Routing
from moelib.layers.remat import save_routing

_PRECISE = {"precision": jax.lax.Precision.HIGHEST}


class TopAnyRouter(BaseLayer):
    """Sends a token to each active expert whose similarity to it is above the expert's threshold.

    A gate is 0 or 1, and a 1 has the gradient of sigmoid(similarity) - sigmoid(threshold). Weights
    are gates over their number. In training a token may have no expert; otherwise the most similar
    one takes it. After each window of steps, experts without a token are removed; if some token had
    none, a free slot of the E becomes active, in the direction of the sum of such tokens.
    """

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[PositiveInt] = REQUIRED  # K; further experts are not used.
        num_initial_experts: PositiveInt | None = None  # Active experts at the start; E if None.
        window_steps: PositiveInt = 100  # Steps after which experts are removed and added.
        loss_weight: float = 0.01  # Of the loss for diverse and simple gates, in the objective.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        for name in ("num_initial_experts", "num_experts_per_token"):
            if (number := getattr(cfg, name) or 1) > cfg.num_experts:
                raise UserError(f"{self._title()}: {name}={number}; set {cfg.num_experts} at most.")

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg, orthogonal = self.config, jax.nn.initializers.orthogonal()
        dim, num = cfg.input_dim, cfg.num_experts
        draw = lambda key, spec: orthogonal(key, spec.shape, jnp.float32)
        first = lambda key, spec: jnp.float32(jnp.arange(num) < (cfg.num_initial_experts or num))
        state = lambda *dims, **init: bias_spec(dims, (None,) * len(dims), trainable=False, **init)
        return {
            "weight": weight_spec((dim, num), ("embed", None), initializer=draw, **FLOAT32),
            "threshold": bias_spec((num,), (None,)),
            "active": state(num, initializer=first),  # 1 or 0.
            "num_tokens": state(num),  # Of each expert, in this window.
            "missed": state(dim),  # Sum of the tokens without an expert.
            "step": state(),
        }

    def forward(self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Routing:
        """Returns the routing; the id of an assignment to no expert is E."""
        num, p, x = self.config.num_experts, self.parameters, x.astype(jnp.float32)
        similarity = jnp.einsum("bsd,de->bse", _unit(x, -1), _unit(p["weight"], 0), **_PRECISE)
        scores = jax.nn.sigmoid(similarity) * p["active"][None, None]
        above = jax.nn.relu(scores - jax.nn.sigmoid(p["threshold"])[None, None])
        gates = above + jax.lax.stop_gradient(jnp.sign(above) - above)  # [B, S, E]
        order = jax.lax.stop_gradient(above)
        if not self.is_training:  # Adds one gate for tokens without any.
            best = jax.nn.one_hot(jnp.argmax(scores, -1), num)
            best = jnp.where(jnp.any(order > 0, -1, keepdims=True), 0.0, best)
            gates, order = gates + best, order + best
        best, ids = jax.lax.top_k(order, self.config.num_experts_per_token)
        used = best > 0
        ids = save_routing(jnp.where(used, ids, num))
        chosen = jnp.take_along_axis(gates, jnp.minimum(ids, num - 1), -1)
        k = jnp.maximum(jnp.sum(used, -1, keepdims=True, dtype=jnp.float32), 1.0)
        without = mask & ~jnp.any(used, -1)
        if self.is_training:
            counts = jnp.sum(expert_counts(ids, mask, num), 0)
            self.add_state_update("num_tokens", p["num_tokens"] + counts)
            missed = jnp.sum(jnp.where(without[..., None], jax.lax.stop_gradient(x), 0.0), (0, 1))
            self.add_state_update("missed", p["missed"] + missed)
        self._report(used & mask[..., None], without, jnp.sum(mask, dtype=jnp.float32))
        probs = scores / jnp.maximum(jnp.sum(scores, -1, keepdims=True), 1e-20)
        return Routing(ids, jnp.where(used, chosen, 0.0) / k, probs, similarity, mask)

    def _report(self, used: Array, without: Array, tokens: Float[Array, ""]) -> None:
        """Adds the loss of eq. 7 and 8, and metrics."""
        weight, active = self.parameters["weight"], self.parameters["active"]
        columns = _unit(weight, 0) * active[None]
        away = jnp.einsum("de,df->ef", columns, columns, **_PRECISE) - jnp.diag(active)
        loss = jnp.linalg.norm(weight, axis=0) @ active / jnp.maximum(jnp.sum(active), 1.0)
        # Smooth at 0, where orthogonal columns start: there, gradients would be rounding errors.
        loss = loss + jnp.sqrt(jnp.sum(jnp.square(away)) + 1e-4)
        self.add_aux_loss("gate_loss", loss, weight=self.config.loss_weight)
        for name, found in (("experts_per_token", used), ("tokens_without_expert", without)):
            mean = jnp.sum(found, dtype=jnp.float32) / jnp.maximum(tokens, 1.0)
            self.add_summary(name, weighted(mean, tokens))
        self.add_summary("active_experts", weighted(jnp.sum(active), tokens))

    def _end_step(self, params: Nested) -> Nested:
        """Removes and adds experts at the end of a window (algorithm 1)."""
        counts, missed, step = params["num_tokens"], params["missed"], params["step"] + 1
        ends, norm = step >= self.config.window_steps, jnp.linalg.norm(missed)
        active = jnp.where(jnp.any(counts > 0), params["active"] * (counts > 0), params["active"])
        is_free = (active == 0) & (jnp.arange(len(active)) == jnp.argmin(active))
        is_new = is_free & (norm > 0) & jnp.isfinite(norm)
        new, direction = ends & is_new, missed / jnp.maximum(norm, 1e-20)
        return {
            "weight": jnp.where(new[None], direction[:, None], params["weight"]),
            "threshold": jnp.where(new, 0.0, params["threshold"]),
            "active": jnp.where(ends, jnp.where(is_new, 1.0, active), params["active"]),
            "num_tokens": jnp.where(ends, 0.0, counts),
            "missed": jnp.where(ends, 0.0, missed),
            "step": jnp.where(ends, 0.0, step),
        }


def _unit(x: Array, axis: int) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis, keepdims=True) + 1e-12)


class UseDynamicMoE(ConfigModifier):
    """Routes all MoE layers of a trainer's model by `TopAnyRouter`, without other losses."""

    @config_class
    class Config(ConfigModifier.Config):
        max_experts_per_token: int = 8  # K, at most the number of experts.
        router: TopAnyRouter.Config = TopAnyRouter.default_config()  # Of all layers.

    def __call__(self, cfg):
        """Returns the changed config of a trainer."""
        router, most = self.config.router, self.config.max_experts_per_token

        def changed(moe: MoELayer.Config) -> MoELayer.Config:
            moe = moe.clone(router=router, num_experts_per_token=min(most, moe.num_experts))
            return moe.set(load_balance_loss=None, router_z_loss=None)

        replace_layer_config_recursively(cfg.model, MoELayer, changed)
        return cfg
