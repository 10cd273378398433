"""Rotary position embeddings, in the half-split form."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.module import Module, nowrap
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
        angle = positions[:, :, None, None].astype(jnp.float32) * self.frequencies(dim)[None, None]
        cos, sin = jnp.cos(angle) * self._factor, jnp.sin(angle) * self._factor  # [B, S, 1, R/2]
        first, second = jnp.split(x[..., :dim].astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate(
            [first * cos - second * sin, second * cos + first * sin], axis=-1
        ).astype(x.dtype)
        return jnp.concatenate([rotated, x[..., dim:]], axis=-1) if dim < x.shape[-1] else rotated

    @nowrap
    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the radians a position by which each of the dim / 2 pairs is rotated."""
        return self.config.theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)[None]

    @property
    def _factor(self) -> float:
        """What rotated entries are multiplied by."""
        return 1.0


class YarnRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding for contexts `factor` times longer than those first trained on.

    Pairs that turn more than `beta_fast` times within the original context rotate as before, those
    that turn less than `beta_slow` times `factor` times slower, those between in between.

    Source: Peng et al., arXiv:2309.00071, eq. 17 to 23.
    """

    @config_class
    class Config(RotaryEmbedding.Config):
        """Config of `YarnRotaryEmbedding`."""

        factor: Required[float] = REQUIRED  # s: context length over the original one.
        original_context: Required[int] = REQUIRED  # Tokens.
        beta_fast: float = 32.0
        beta_slow: float = 1.0
        truncate: bool = True  # Whether the ends of the ramp are whole pairs; GPT-OSS: not.
        attention_factor: float | None = None  # Of queries and of keys; 0.1 ln s + 1 if None.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.factor < 1 or cfg.original_context < 1 or not cfg.beta_fast > cfg.beta_slow > 0:
            raise ValueError(
                f"{self._title()}: factor {cfg.factor} must be at least 1, original_context "
                f"{cfg.original_context} at least 1, and beta_fast {cfg.beta_fast} above beta_slow "
                f"{cfg.beta_slow}, above 0."
            )

    @nowrap
    def ramp_ends(self, dim: int) -> tuple[float, float]:
        """Returns the pairs that turn `beta_fast` and `beta_slow` times in the original context."""
        cfg: YarnRotaryEmbedding.Config = self.config

        def pair(turns: float) -> float:
            per_radian = cfg.original_context / (2 * math.pi * turns)
            return dim * math.log(per_radian) / (2 * math.log(cfg.theta))

        low, high = pair(cfg.beta_fast), pair(cfg.beta_slow)
        if cfg.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)

    @nowrap
    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the radians a position by which each of the dim / 2 pairs is rotated."""
        low, high = self.ramp_ends(dim)
        ramp = (np.arange(dim // 2) - low) / max(high - low, 1e-3)
        slowed = jnp.asarray(np.clip(ramp, 0, 1), jnp.float32)[None]
        plain = super().frequencies(dim)
        return plain / self.config.factor * slowed + plain * (1 - slowed)

    @property
    def _factor(self) -> float:
        factor = self.config.attention_factor
        return 0.1 * math.log(self.config.factor) + 1 if factor is None else factor
