"""Short causal convolution of each channel, with the last inputs as its state."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.param import Axes, ParameterSpec
from moelib.layers import initializers
from moelib.layers.base import BaseLayer, add_bias, bias_spec
from moelib.layers.mixers.documents import Documents


class CausalConvolution(BaseLayer):
    """y_t = sum_i w_i x_{t-W+1+i} for i < W, over the tokens of t's document.

    Its cache holds the last W - 1 inputs of each sequence.
    """

    @config_class
    class Config(BaseLayer.Config):
        channels: Required[tuple[int, ...]] = REQUIRED  # Dimensions of the inputs after B and S.
        axes: Required[Axes] = REQUIRED  # Their logical axes.
        width: Required[PositiveInt] = REQUIRED  # W, in tokens.
        bias: bool = False  # Whether a learned bias is added.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: CausalConvolution.Config = self.config
        init = initializers.normal(cfg.width**-0.5)
        shape, axes = (*cfg.channels, cfg.width), (*cfg.axes, None)
        specs = {"weight": ParameterSpec(shape, axes, initializer=init)}
        if cfg.bias:
            specs["bias"] = bias_spec(cfg.channels, cfg.axes)
        return specs

    def _create_layer_cache_specs(self, batch_size: int, length: int) -> dict[str, ParameterSpec]:
        del length
        cfg: CausalConvolution.Config = self.config
        shape = (batch_size, cfg.width - 1, *cfg.channels)
        return {"inputs": ParameterSpec(shape, ("batch", None, *cfg.axes))}

    def forward(self, x: Float[Array, "B S *c"], documents: Documents) -> Float[Array, "B S *c"]:
        """Returns the sums, in the dtype of x; padding counts as zeros.

        With a cache in the state, x is whole prompts (S above 1), or the tokens that follow the
        cached inputs (S = 1).
        """
        width, length = self.config.width, x.shape[1]
        params = self.operands(self.own_parameters, x.dtype)
        weight = params["weight"]
        lead = (...,) + (None,) * (x.ndim - 2)
        x = jnp.where(documents.valid[lead], x, 0)
        before = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
        if self.cache is not None and length == 1:
            before = self.cache["inputs"].astype(x.dtype)
        padded = jnp.concatenate([before, x], axis=1)
        if self.cache is not None:
            index = documents.num_tokens[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
            self.put_cache(inputs=jnp.take_along_axis(padded, index[lead], axis=1))
        number = jnp.pad(documents.number, ((0, 0), (width - 1, 0)))  # Cached: the first document.
        terms = []
        for i in range(width):
            same = number[:, i : i + length] == documents.number
            term = padded[:, i : i + length] * weight[..., i][None, None]
            terms.append(jnp.where(same[lead], term, 0))
        y = sum(terms[1:], terms[0])
        return add_bias(y, params["bias"]) if self.config.bias else y
