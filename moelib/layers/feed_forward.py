"""Dense feed-forward layer: up-projection, activation, down-projection."""

from typing import ClassVar

from jaxtyping import Array, Bool, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.param import ParameterSpec
from moelib.layers.activation import Activation
from moelib.layers.base import BaseLayer, weight_spec
from moelib.layers.quantization import project
from moelib.layers.remat import save_activation
from moelib.parallel.sharding import constrain


class FeedForward(BaseLayer):
    """y = f(x W_gate) * (x W_up) W_down, or f(x W_up) W_down without a gate."""

    projections: ClassVar[tuple[str, ...]] = ("up", "down")

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        hidden_dim: Required[PositiveInt] = REQUIRED  # F.
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
        params, activation = self.operands(self.parameters, x.dtype), self.config.activation
        weights = [params["up"][i] for i in range(activation.num_projections)]
        parts = [save_activation(project(x, w), "feed_forward_up") for w in weights]
        hidden = activation.function(*parts)  # [B, S, F]
        hidden = constrain(hidden, ("batch", "sequence", "activation_ffn"))
        return save_activation(project(hidden, params["down"]), "feed_forward_down")
