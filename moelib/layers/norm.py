"""RMSNorm and LayerNorm, computed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.module import Module
from moelib.core.param import ParameterSpec
from moelib.layers import initializers
from moelib.layers.base import BaseLayer, bias_spec


class BaseNorm(BaseLayer):
    """A normalization of the last dimension with a learned scale."""

    @config_class
    class Config(BaseLayer.Config):
        dim: Required[int] = REQUIRED  # D.
        eps: PositiveFloat = 1e-6  # Added to the mean square before the square root.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        ones = initializers.constant(1.0)
        shape = (self.config.dim,)
        return {"scale": bias_spec(shape, ("norm",), initializer=ones)}

    def _scaled(self, x: Float[Array, "... D"], name: str = "scale") -> Float[Array, "..."]:
        """Returns a parameter, broadcast to the rank of x."""
        return self.parameters[name][(None,) * (x.ndim - 1)]


class RMSNorm(BaseNorm):
    """x / rms(x) * scale. Source: Zhang and Sennrich, arXiv:1910.07467, eq. 4."""

    @config_class
    class Config(BaseNorm.Config):
        zero_centered: bool = False  # Whether the parameter is the scale minus 1, from 0.
        num_groups: PositiveInt = 1  # Equal parts of D, each divided by its own rms (Mamba-2).

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.dim % cfg.num_groups:
            raise UserError(
                f"{self._title()}: num_groups={cfg.num_groups} does not divide dim={cfg.dim}; set "
                "it to a divisor."
            )

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        if not self.config.zero_centered:
            return super()._create_layer_parameter_specs()
        return {"scale": bias_spec((self.config.dim,), ("norm",))}

    def forward(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns the normalized x, in the dtype of x."""
        cfg: RMSNorm.Config = self.config
        x32 = x.astype(jnp.float32)
        if cfg.num_groups > 1:
            x32 = x32.reshape(*x.shape[:-1], cfg.num_groups, -1)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), -1, keepdims=True) + cfg.eps)
        scale = self._scaled(x) + 1.0 if cfg.zero_centered else self._scaled(x)
        return ((x32 * inverse).reshape(x.shape) * scale).astype(x.dtype)


class LayerNorm(BaseNorm):
    """(x - mean) / std * scale + bias. Source: Ba et al., arXiv:1607.06450."""

    @config_class
    class Config(BaseNorm.Config):
        eps: PositiveFloat = 1e-5  # Added to the variance before the square root.
        bias: bool = True  # Whether a learned bias is added.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        specs = super()._create_layer_parameter_specs()
        if self.config.bias:
            specs["bias"] = bias_spec((self.config.dim,), ("norm",))
        return specs

    def forward(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns the normalized x, in the dtype of x."""
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, -1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centered), -1, keepdims=True) + self.config.eps)
        y = centered * inverse * self._scaled(x)
        if self.config.bias:
            y = y + self._scaled(x, "bias")
        return y.astype(x.dtype)
