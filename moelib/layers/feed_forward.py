"""Dense feed-forward layer: up-projection, activation, down-projection."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.param import ParameterSpec
from moelib.layers.activation import Activation
from moelib.layers.base import BaseLayer, weight_spec
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
            "up": weight_spec(
                (n, cfg.input_dim, cfg.hidden_dim), (None, "embed", "ffn"), stacked=(0,)
            ),
            "down": weight_spec(
                (cfg.hidden_dim, cfg.input_dim),
                ("ffn", "embed"),
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
