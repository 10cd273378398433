"""Experts: E feed-forward layers whose weights are stacked."""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.param import ParameterSpec
from moelib.core.tree import Nested
from moelib.kernels.gmm import gmm_activated
from moelib.layers.activation import Activation
from moelib.layers.adapter import AdaptedWeight
from moelib.layers.base import BaseLayer, bias_spec, weight_spec
from moelib.layers.quantization import QuantizedWeight, batched_project, grouped_project
from moelib.layers.remat import is_saved, save_activation


class FeedForwardExperts(BaseLayer):
    """E experts, each f(x W_gate) * (x W_up) W_down, with optional biases.

    The layer holds the weights and defines the computation of an expert. The dispatcher decides
    which rows reach which expert, and calls `batched` or `grouped` with the weights, so that they
    need no context.
    """

    # Added to sums over the hidden dimension; of the devices that share it, one adds them.
    added_once: ClassVar[tuple[str, ...]] = ("down_bias",)
    projections: ClassVar[tuple[str, ...]] = ("up", "down")

    @config_class
    class Config(BaseLayer.Config):
        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K, for counting active parameters.
        input_dim: Required[int] = REQUIRED  # D.
        hidden_dim: Required[int] = REQUIRED  # F.
        activation: Activation = Activation.SWIGLU  # Between the two matmuls.
        bias: bool = False  # Whether both matmuls add a learned bias.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: FeedForwardExperts.Config = self.config
        n = cfg.activation.num_projections
        specs = {
            "up": weight_spec(
                (cfg.num_experts, n, cfg.input_dim, cfg.hidden_dim),
                ("experts", None, "expert_embed", "expert_ffn"),
                stacked=(0, 1),
            ),
            "down": weight_spec(
                (cfg.num_experts, cfg.hidden_dim, cfg.input_dim),
                ("experts", "expert_ffn", "expert_embed"),
                stacked=(0,),
                initializer=self._initializer("output_init"),
            ),
        }
        if cfg.bias:
            shape = (cfg.num_experts, n, cfg.hidden_dim)
            specs["up_bias"] = bias_spec(shape, ("experts", None, "expert_ffn"))
            shape = (cfg.num_experts, cfg.input_dim)
            specs["down_bias"] = bias_spec(shape, ("experts", "expert_embed"))
        return specs

    def batched(self, params: Nested, rows: Float[Array, "E C D"]) -> Float[Array, "E C D"]:
        """Returns the experts' outputs for equally many rows per expert."""
        params = {name: x.astype(rows.dtype) for name, x in params.items()}  # Float32 biases too.
        parts = []
        for i in range(self.config.activation.num_projections):
            part = batched_project(rows, params["up"][:, i])
            if self.config.bias:
                part = part + params["up_bias"][:, i, None]
            parts.append(save_activation(part, "experts_up"))
        hidden = self.config.activation.function(*parts)
        y = batched_project(hidden, params["down"])
        if self.config.bias:
            y = y + params["down_bias"][:, None]
        return save_activation(y, "experts_down")

    def grouped(
        self,
        params: Nested,
        rows: Float[Array, "R D"],
        group_sizes: Int[Array, "E"],
        weights: Float[Array, "R"],
    ) -> Float[Array, "R D"]:
        """Returns weight times output, without `down_bias`, for rows sorted by expert.

        The weights multiply the activations, so that their gradient takes no output: the backward
        pass of a recomputed layer omits the last matmul. Rows past the sum of the group sizes
        give zeros.
        """
        params = {name: x.astype(rows.dtype) for name, x in params.items()}  # Float32 biases too.
        if isinstance(params["up"], AdaptedWeight | QuantizedWeight):
            hidden = self._unfused_hidden(params, rows, group_sizes)
        else:
            hidden = gmm_activated(
                rows,
                params["up"],
                group_sizes,
                activation=self.config.activation.function,
                bias=params.get("up_bias"),
                products_name="experts_up" if is_saved("experts_up") else None,
            )
        hidden = (hidden.astype(jnp.float32) * weights[:, None]).astype(rows.dtype)
        (y,) = grouped_project(hidden, params["down"][:, None], group_sizes)
        return save_activation(y, "experts_down")

    def _unfused_hidden(
        self, params: Nested, rows: Float[Array, "R D"], group_sizes: Int[Array, "E"]
    ) -> Float[Array, "R F"]:
        """Returns the activations between the matmuls: zeros for rows of no group."""
        ends, index = jnp.cumsum(group_sizes), jnp.arange(len(rows))
        parts = []
        for i, part in enumerate(grouped_project(rows, params["up"], group_sizes)):
            if self.config.bias:
                group = jnp.searchsorted(ends, index, side="right")
                part = part + params["up_bias"][:, i].at[group].get(mode="clip")
            parts.append(save_activation(part, "experts_up"))

        @jax.checkpoint  # Saves the products as they are.
        def activated(*parts: Array) -> Array:
            hidden = self.config.activation.function(*(x.astype(jnp.float32) for x in parts))
            return jnp.where((index < ends[-1])[:, None], hidden, 0).astype(rows.dtype)

        return activated(*parts)

    def weighted_biases(
        self, params: Nested, ids: Int[Array, "T K"], weights: Float[Array, "T K"]
    ) -> Float[Array, "T D"] | None:
        """Returns each token's weighted sum of `down_bias`, in float32; None without biases."""
        if not self.config.bias:
            return None
        bias = params["down_bias"]  # Float32, as all biases.
        own = ids[..., None] == jnp.arange(bias.shape[0])[None, None]  # [T, K, E]
        weights = jnp.sum(jnp.where(own, weights[..., None], 0.0), 1)  # [T, E]
        return jnp.matmul(weights, bias, precision=jax.lax.Precision.HIGHEST)

    def _own_active_parameters(self) -> int:
        cfg: FeedForwardExperts.Config = self.config
        return super()._own_active_parameters() * cfg.num_experts_per_token // cfg.num_experts

    def _own_matrix_flops_per_token(self, chosen: Callable[[str], bool], path: str = "") -> float:
        cfg: FeedForwardExperts.Config = self.config
        flops = super()._own_matrix_flops_per_token(chosen, path)
        return flops * cfg.num_experts_per_token / cfg.num_experts
