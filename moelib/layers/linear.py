"""Linear: y = x W + b."""

from typing import ClassVar

from jaxtyping import Array, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.param import Axes, ParameterSpec
from moelib.layers.base import BaseLayer, add_bias, bias_spec, weight_spec
from moelib.layers.quantization import project


class Linear(BaseLayer):
    """A linear map of the last dimension, with an optional bias."""

    projections: ClassVar[tuple[str, ...]] = ("weight",)

    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED  # D.
        output_dim: Required[int] = REQUIRED  # F.
        bias: bool = False  # Whether a learned bias is added.
        axes: tuple[str | None, str | None] = ("embed", None)  # Logical axes of the weight.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: Linear.Config = self.config
        axes: Axes = cfg.axes
        specs = {"weight": weight_spec((cfg.input_dim, cfg.output_dim), axes)}
        if cfg.bias:
            specs["bias"] = bias_spec((cfg.output_dim,), axes[1:])
        return specs

    def forward(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        """Returns x W + b."""
        params = self.operands(self.parameters, x.dtype)
        y = project(x, params["weight"])
        if "bias" in params:
            y = add_bias(y, params["bias"])
        return y
