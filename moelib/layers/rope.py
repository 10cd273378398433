"""Rotary position embeddings, in the half-split form.

Shapes: R rotated entries of a head, Dh head dimension.
"""

import math
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import Limit, PositiveFloat, PositiveInt
from moelib.core.errors import UserError
from moelib.core.module import Module
from moelib.layers.base import BaseLayer

# Context length over the original one.
_Factor = Annotated[float, Limit(">=", 1), Limit("<", math.inf)]


class RotaryEmbedding(BaseLayer):
    """Rotates entries i and i + R/2 of a head, for i < R/2, by position * theta^(-2i/R).

    Source: Su et al., arXiv:2104.09864, eq. 34, with the pairs of GPT-NeoX.
    """

    @config_class
    class Config(BaseLayer.Config):
        theta: PositiveFloat = 10_000.0  # Base of the frequencies.
        rotary_dim: int | None = None  # R, even; the whole head if None.

    def forward(
        self, x: Float[Array, "B S H Dh"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H Dh"]:
        """Returns the rotated x, in the dtype of x; angles are computed in float32."""
        cfg: RotaryEmbedding.Config = self.config
        dim = x.shape[-1] if cfg.rotary_dim is None else cfg.rotary_dim
        if dim % 2 or not 0 < dim <= x.shape[-1]:
            raise UserError(
                f"{self._title()}: rotary_dim={dim}; set an even number from 2 to head_dim="
                f"{x.shape[-1]}."
            )
        angle = positions[:, :, None, None].astype(jnp.float32) * self.frequencies(dim)[None, None]
        cos, sin = jnp.cos(angle) * self._factor, jnp.sin(angle) * self._factor  # [B, S, 1, R/2]
        # Each half is cast by itself: a cast of the whole is written to memory, in float32.
        first, second = (half.astype(jnp.float32) for half in jnp.split(x[..., :dim], 2, axis=-1))
        halves = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate([*(half.astype(x.dtype) for half in halves), x[..., dim:]], axis=-1)

    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the rotation of each of the dim / 2 pairs, in radians per position."""
        return self.config.theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)[None]

    @property
    def _factor(self) -> float:
        """Multiplies the rotated entries."""
        return 1.0


class LinearRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with positions divided by `factor` (position interpolation).

    Source: Chen et al., arXiv:2306.15595, eq. 4.
    """

    @config_class
    class Config(RotaryEmbedding.Config):
        factor: Required[_Factor] = REQUIRED  # Context length over the original one, at least 1.

    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the rotation of each of the dim / 2 pairs, in radians per position."""
        return super().frequencies(dim) / self.config.factor


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Rotary embedding for contexts `factor` times longer, as in Llama 3.1.

    Pairs that turn more than `high_freq_factor` times within the original context keep their
    frequency; those that turn less than `low_freq_factor` times rotate `factor` times slower. In
    between, the frequency is interpolated linearly in the number of turns.

    Source: Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783, and its code.
    """

    @config_class
    class Config(RotaryEmbedding.Config):
        factor: Required[_Factor] = REQUIRED  # Context length over the original one, at least 1.
        original_context: Required[PositiveInt] = REQUIRED  # Original context length, in tokens.
        low_freq_factor: float = 1.0  # Turns below which pairs are slowed by `factor`.
        high_freq_factor: float = 4.0  # Turns above which pairs keep their frequency.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        _check_extension(self, "high_freq_factor", "low_freq_factor")

    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the rotation of each of the dim / 2 pairs, in radians per position."""
        cfg: Llama3RotaryEmbedding.Config = self.config
        plain = super().frequencies(dim)
        turns = plain * (cfg.original_context / (2 * math.pi))
        low, high = cfg.low_freq_factor, cfg.high_freq_factor
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        return plain * kept + plain / cfg.factor * (1 - kept)


def _check_extension(layer: BaseLayer, fast: str, slow: str, *, may_equal: bool = False) -> None:
    """Raises UserError unless the ends of the ramp of a longer context are valid."""
    high, low = getattr(layer.config, fast), getattr(layer.config, slow)
    if not (high > low > 0 or (may_equal and high == low > 0)):
        raise UserError(
            f"{layer._title()}: {fast}={high}, {slow}={low}; set {fast} above {slow}"
            f"{' or equal to it' if may_equal else ''}, and both above 0."
        )


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """Returns 0.1 m ln(factor) + 1, which keeps scores from flattening in a longer context.

    DeepSeek's attention multiplies its scores by the square, with m = mscale_all_dim.

    Args:
        factor: Context length over the original one, at least 1.
        m: Strength of the correction; 1 as in the paper, 0 for none.

    Raises:
        UserError: If the factor is below 1.

    Source: Peng et al., arXiv:2309.00071, eq. 22.
    """
    if factor < 1:
        raise UserError(f"yarn_mscale: factor={factor}; set it to 1 or more.")
    return 0.1 * m * math.log(factor) + 1


class YarnRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding for contexts `factor` times longer than the original one (YaRN).

    Pairs that turn more than `beta_fast` times within the original context keep their frequency;
    those that turn less than `beta_slow` times rotate `factor` times slower. In between, the
    frequency is interpolated linearly in the number of the pair.

    Source: Peng et al., arXiv:2309.00071, eq. 17 to 23.
    """

    @config_class
    class Config(RotaryEmbedding.Config):
        factor: Required[_Factor] = REQUIRED  # s: context length over the original one, at least 1.
        original_context: Required[PositiveInt] = REQUIRED  # Original context length, in tokens.
        beta_fast: float = 32.0  # Turns above which pairs keep their frequency.
        beta_slow: float = 1.0  # Turns below which pairs are slowed by `factor`.
        truncate: bool = True  # Whether the ramp starts and ends at whole pairs (GPT-OSS: False).
        # Multiplies rotated queries and rotated keys. None sets it to
        # yarn_mscale(s, mscale) / yarn_mscale(s, mscale_all_dim), as in DeepSeek-V2.
        attention_factor: float | None = None
        mscale: float = 1.0  # m of the numerator of attention_factor.
        mscale_all_dim: float = 0.0  # m of its denominator; 0 for a denominator of 1.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        _check_extension(self, "beta_fast", "beta_slow", may_equal=True)
        if cfg.theta <= 1:
            raise UserError(f"{self._title()}: theta={cfg.theta}; set it above 1.")
        if cfg.attention_factor is not None and (cfg.mscale, cfg.mscale_all_dim) != (1, 0):
            raise UserError(
                f"{self._title()}: attention_factor={cfg.attention_factor} overrides mscale="
                f"{cfg.mscale} and mscale_all_dim={cfg.mscale_all_dim}; set only one of the two."
            )

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

    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the rotation of each of the dim / 2 pairs, in radians per position."""
        low, high = self.ramp_ends(dim)
        ramp = (np.arange(dim // 2) - low) / max(high - low, 1e-3)
        slowed = jnp.asarray(np.clip(ramp, 0, 1), jnp.float32)[None]
        plain = super().frequencies(dim)
        return plain / self.config.factor * slowed + plain * (1 - slowed)

    @property
    def _factor(self) -> float:
        cfg: YarnRotaryEmbedding.Config = self.config
        if cfg.attention_factor is not None:
            return cfg.attention_factor
        return yarn_mscale(cfg.factor, cfg.mscale) / yarn_mscale(cfg.factor, cfg.mscale_all_dim)
