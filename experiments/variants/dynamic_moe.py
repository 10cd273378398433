"""Dynamic MoE: as many experts per token as pass a threshold; experts come and go in training.

Source: Guo et al., DynMoE, arXiv:2405.14297, eq. 3 to 8 and algorithm 1, and the released gate.

Shapes: B batch, S sequence, D model, E slots of experts, K experts per token at most.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_modifier import ConfigModifier, replace_layer_config_recursively
from moelib.core.errors import UserError
from moelib.core.metrics import weighted
from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.layers.base import FLOAT32, BaseLayer, bias_spec, weight_spec
from moelib.layers.moe.balance import expert_counts
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.router import Routing
from moelib.layers.remat import save_routing


class TopAnyRouter(BaseLayer):
    """Sends a token to each active expert whose similarity to it is above the expert's threshold.

    A gate is 1 or 0, and its gradient is that of sigmoid(similarity) - sigmoid(threshold) where it
    is 1. The combine weights are gates over their number. In training a token may have no expert;
    otherwise the most similar one takes it. All E slots of experts exist and are active or not: at
    the end of a window of steps, experts without a token are removed, and if some token had no
    expert, a free slot is activated, whose weight is the direction of the sum of such tokens.
    """

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K; further experts are not used.
        num_initial_experts: int | None = None  # Active experts at the start; E if None.
        window_steps: int = 100  # Steps after which experts are removed and added.
        loss_weight: float = 0.01  # Of the loss for diverse and simple gates, in the objective.

    def __init__(self, cfg: Config, *, parent: BaseLayer | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        self._check_positive("window_steps")
        self._num_initial = cfg.num_initial_experts or cfg.num_experts
        for name, number in (
            ("num_initial_experts", self._num_initial),
            ("num_experts_per_token", cfg.num_experts_per_token),
        ):
            if not 1 <= number <= cfg.num_experts:
                raise UserError(
                    f"{self._title()}: {name}={number}; set it from 1 to num_experts="
                    f"{cfg.num_experts}."
                )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        dim, num = self.config.input_dim, self.config.num_experts
        orthogonal = jax.nn.initializers.orthogonal()
        weight = weight_spec(
            (dim, num),
            ("embed", None),
            initializer=lambda key, spec: orthogonal(key, spec.shape, jnp.float32),
            **FLOAT32,
        )
        first = lambda _, spec: (jnp.arange(num) < self._num_initial).astype(jnp.float32)
        state = functools.partial(bias_spec, trainable=False)
        return {
            "weight": weight,
            "threshold": bias_spec((num,), (None,)),
            "active": state((num,), (None,), initializer=first),  # 1 or 0.
            "num_tokens": state((num,), (None,)),  # Of each expert, in this window.
            "missed": state((dim,), (None,)),  # Sum of the tokens without an expert.
            "step": state((), ()),
        }

    def forward(self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"]) -> Routing:
        """Returns the routing; the id of an assignment to no expert is E."""
        cfg, p, x = self.config, self.parameters, x.astype(jnp.float32)
        similarity = jnp.einsum(
            "bsd,de->bse", _unit(x, -1), _unit(p["weight"], 0), precision=jax.lax.Precision.HIGHEST
        )
        scores = jax.nn.sigmoid(similarity) * p["active"][None, None]
        above = jax.nn.relu(scores - jax.nn.sigmoid(p["threshold"])[None, None])
        gates = above + jax.lax.stop_gradient(jnp.sign(above) - above)  # [B, S, E]
        order = jax.lax.stop_gradient(above)
        if not self.is_training:  # Adds one gate for tokens without any.
            best = jax.nn.one_hot(jnp.argmax(scores, -1), cfg.num_experts)
            best = jnp.where(jnp.any(order > 0, -1, keepdims=True), 0.0, best)
            gates, order = gates + best, order + best
        best, ids = jax.lax.top_k(order, cfg.num_experts_per_token)
        ids = save_routing(jnp.where(best > 0, ids, cfg.num_experts))
        k = jnp.maximum(jnp.sum(best > 0, -1, keepdims=True, dtype=jnp.float32), 1.0)
        chosen = jnp.take_along_axis(gates, jnp.minimum(ids, cfg.num_experts - 1), -1)
        weights = jnp.where(best > 0, chosen, 0.0) / k
        none = mask & ~jnp.any(best > 0, -1)
        if self.is_training:
            counts = jnp.sum(expert_counts(ids, mask, cfg.num_experts), 0)
            self.add_state_update("num_tokens", p["num_tokens"] + counts)
            missed = jnp.sum(jnp.where(none[..., None], jax.lax.stop_gradient(x), 0.0), (0, 1))
            self.add_state_update("missed", p["missed"] + missed)
        self._report(best > 0, none, mask)
        probs = scores / jnp.maximum(jnp.sum(scores, -1, keepdims=True), 1e-20)
        return Routing(ids, weights, probs, similarity, mask)

    def _report(
        self, used: Bool[Array, "B S K"], none: Bool[Array, "B S"], mask: Bool[Array, "B S"]
    ) -> None:
        """Adds the loss of eq. 7 and 8, and metrics."""
        weight, active = self.parameters["weight"], self.parameters["active"]
        columns = _unit(weight, 0) * active[None]
        away = columns.T @ columns - jnp.diag(active)
        norms = jnp.sqrt(jnp.sum(jnp.square(weight), 0) + 1e-12)
        simple = jnp.sum(norms * active) / jnp.maximum(jnp.sum(active), 1.0)
        diverse = jnp.sqrt(jnp.sum(jnp.square(away)) + 1e-12)
        self.add_aux_loss("gate_loss", diverse + simple, weight=self.config.loss_weight)
        tokens = jnp.sum(mask, dtype=jnp.float32)
        mean = lambda x: weighted(jnp.sum(x, dtype=jnp.float32) / jnp.maximum(tokens, 1.0), tokens)
        self.add_summary("experts_per_token", mean(used & mask[..., None]))
        self.add_summary("tokens_without_expert", mean(none))
        self.add_summary("active_experts", weighted(jnp.sum(active), tokens))

    def _end_step(self, params: Nested) -> Nested:
        """Removes and adds experts at the end of a window (algorithm 1)."""
        counts, missed, step = params["num_tokens"], params["missed"], params["step"] + 1
        ends = step >= self.config.window_steps
        active = jnp.where(jnp.any(counts > 0), params["active"] * (counts > 0), params["active"])
        norm = jnp.linalg.norm(missed)
        index = jnp.arange(self.config.num_experts)
        is_new = (index == jnp.argmin(active)) & (active == 0) & (norm > 0) & jnp.isfinite(norm)
        new = ends & is_new
        direction = missed / jnp.maximum(norm, 1e-20)
        zero = lambda x: jnp.where(ends, 0.0, x)
        return {
            "weight": jnp.where(new[None], direction[:, None], params["weight"]),
            "threshold": jnp.where(new, 0.0, params["threshold"]),
            "active": jnp.where(ends, jnp.where(is_new, 1.0, active), params["active"]),
            "num_tokens": zero(counts),
            "missed": zero(missed),
            "step": zero(step),
        }


def _unit(x: Array, axis: int) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis, keepdims=True) + 1e-12)


class UseDynamicMoE(ConfigModifier):
    """Routes all MoE layers of a trainer's model by `TopAnyRouter`, without other losses."""

    @config_class
    class Config(ConfigModifier.Config):
        max_experts_per_token: int = 8  # K, at most the number of experts.
        num_initial_experts: int | None = None  # See `TopAnyRouter`.
        window_steps: int = 100  # See `TopAnyRouter`.

    def __call__(self, cfg):
        """Returns the changed config of a trainer."""
        own = {n: getattr(self.config, n) for n in ("num_initial_experts", "window_steps")}

        def changed(moe: MoELayer.Config) -> MoELayer.Config:
            moe = moe.clone(router=TopAnyRouter.default_config().set(**own))
            moe.num_experts_per_token = min(self.config.max_experts_per_token, moe.num_experts)
            return moe.set(load_balance_loss=None, router_z_loss=None)

        replace_layer_config_recursively(cfg.model, MoELayer, changed)
        return cfg
