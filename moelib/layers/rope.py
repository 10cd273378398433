"""Rotary position embedding, in the half-split form."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import config_class
from moelib.layers.base import BaseLayer


class RotaryEmbedding(BaseLayer):
    """Rotates entries i and i + R/2 of a head, for i < R/2, by position * theta^(-2i/R).

    Source: Su et al., arXiv:2104.09864, eq. 34, with the pairs of GPT-NeoX.
    """

    @config_class
    class Config(BaseLayer.Config):
        """Config of `RotaryEmbedding`."""

        theta: float = 10_000.0
        rotary_dim: int | None = None  # R, even; the whole head if None.

    def forward(
        self, x: Float[Array, "B S H Dh"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H Dh"]:
        """Returns the rotated x, in the dtype of x; angles are computed in float32."""
        cfg: RotaryEmbedding.Config = self.config
        dim = x.shape[-1] if cfg.rotary_dim is None else cfg.rotary_dim
        if dim % 2 or not 0 < dim <= x.shape[-1]:
            raise ValueError(
                f"{self._title()}: rotary_dim is {dim}; it must be even and at most the head's "
                f"{x.shape[-1]}."
            )
        frequency = cfg.theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)  # [R/2]
        angle = positions[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)  # [B, S, 1, R/2]
        first, second = jnp.split(x[..., :dim].astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        ).astype(x.dtype)
        return jnp.concatenate([rotated, x[..., dim:]], axis=-1) if dim < x.shape[-1] else rotated
