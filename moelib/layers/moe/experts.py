"""Experts: E feed-forward layers whose weights are stacked."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.context import Nested
from moelib.core.module import nowrap
from moelib.core.param import FanAxes, ParameterSpec
from moelib.kernels.gmm import gmm
from moelib.layers.activation import Activation, activate
from moelib.layers.base import BaseLayer
from moelib.layers.remat import keep_point


class FeedForwardExperts(BaseLayer):
    """E experts, each f(x W_gate) * (x W_up) W_down.

    It only holds the weights and says what an expert computes; which rows reach which expert is
    the dispatcher's affair, so these methods take the weights and need no context.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Config of `FeedForwardExperts`."""

        num_experts: Required[int] = REQUIRED  # E.
        num_experts_per_token: Required[int] = REQUIRED  # K, for the counts of active parameters.
        input_dim: Required[int] = REQUIRED  # D.
        hidden_dim: Required[int] = REQUIRED  # F.
        activation: Activation = Activation.SWIGLU

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: FeedForwardExperts.Config = self.config
        n = cfg.activation.num_projections
        return {
            "up": ParameterSpec(
                (cfg.num_experts, cfg.input_dim, n, cfg.hidden_dim),
                ("experts", "expert_embed", None, "expert_ffn"),
                fan_axes=FanAxes((1,), (3,), (0, 2)),
            ),
            "down": ParameterSpec(
                (cfg.num_experts, cfg.hidden_dim, cfg.input_dim),
                ("experts", "expert_ffn", "expert_embed"),
                fan_axes=FanAxes((1,), (2,), (0,)),
                initializer=self._initializer("output_init"),
            ),
        }

    @nowrap
    def batched(self, params: Nested, rows: Float[Array, "E C D"]) -> Float[Array, "E C D"]:
        """Returns what each expert makes of its rows, as many for each."""
        hidden = jnp.einsum("ecd,ednf->ecnf", rows, params["up"].astype(rows.dtype))
        hidden = activate(keep_point(hidden, "experts_up"), self.config.activation)
        y = jnp.einsum("ecf,efd->ecd", hidden, params["down"].astype(rows.dtype))
        return keep_point(y, "experts_down")

    @nowrap
    def grouped(
        self, params: Nested, rows: Float[Array, "R D"], group_sizes: Int[Array, "E"]
    ) -> Float[Array, "R D"]:
        """Returns what each expert makes of its rows, which stand sorted by expert.

        Rows past the sum of the group sizes give zeros.
        """
        num_experts, dim, n, width = params["up"].shape
        up = params["up"].astype(rows.dtype).reshape(num_experts, dim, n * width)
        hidden = gmm(rows, up, group_sizes).reshape(-1, n, width)
        hidden = activate(keep_point(hidden, "experts_up"), self.config.activation)
        y = gmm(hidden, params["down"].astype(rows.dtype), group_sizes)
        return keep_point(y, "experts_down")

    def _own_active_parameters(self) -> int:
        cfg: FeedForwardExperts.Config = self.config
        return super()._own_active_parameters() * cfg.num_experts_per_token // cfg.num_experts

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        del seq_len
        return 2.0 * self._own_active_parameters()
