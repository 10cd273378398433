"""Dense feed-forward layer: up-projection, activation, down-projection."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.param import FanAxes, ParameterSpec
from moelib.layers.activation import Activation
from moelib.layers.base import BaseLayer
from moelib.layers.remat import save_activation
from moelib.parallel.sharding import constrain


class FeedForward(BaseLayer):
    """y = f(x W_gate) * (x W_up) W_down, or f(x W_up) W_down without a gate."""

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        hidden_dim: Required[int] = REQUIRED  # F.
        activation: Activation = Activation.SWIGLU  # Between the two matmuls.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: FeedForward.Config = self.config
        n = cfg.activation.num_projections
        return {
            "up": ParameterSpec(
                (n, cfg.input_dim, cfg.hidden_dim),
                (None, "embed", "ffn"),
                fan_axes=FanAxes((1,), (2,), (0,)),
            ),
            "down": ParameterSpec(
                (cfg.hidden_dim, cfg.input_dim),
                ("ffn", "embed"),
                fan_axes=FanAxes((0,), (1,)),
                initializer=self._initializer("output_init"),
            ),
        }

    def forward(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B S"] | None = None
    ) -> Float[Array, "B S D"]:
        """Returns the layer's output; the mask of valid tokens is not needed."""
        del mask
        up, down = (self.parameters[name].astype(x.dtype) for name in ("up", "down"))
        parts = [save_activation(jnp.einsum("bsd,df->bsf", x, w), "feed_forward_up") for w in up]
        hidden = self.config.activation.function(*parts)  # [B, S, F]
        hidden = constrain(hidden, ("batch", "sequence", "activation_ffn"))
        return save_activation(jnp.einsum("bsf,fd->bsd", hidden, down), "feed_forward_down")

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        del seq_len
        cfg: FeedForward.Config = self.config
        return 2.0 * cfg.input_dim * cfg.hidden_dim * (cfg.activation.num_projections + 1)
