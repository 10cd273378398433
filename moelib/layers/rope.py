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


class LinearRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding that divides positions by `factor`.

    Source: Chen et al., arXiv:2306.15595, eq. 4.
    """

    @config_class
    class Config(RotaryEmbedding.Config):
        factor: Required[float] = REQUIRED  # Context length over the original one.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        if self.config.factor < 1:
            raise ValueError(
                f"{self._title()}: factor is {self.config.factor}; set it to 1 or more."
            )

    @nowrap
    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the radians a position by which each of the dim / 2 pairs is rotated."""
        return super().frequencies(dim) / self.config.factor


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Rotary embedding for contexts `factor` times longer, as in Llama 3.1.

    Pairs that turn more than `high_freq_factor` times within the original context rotate as before,
    those that turn less than `low_freq_factor` times `factor` times slower, those between in
    between, linearly in the number of turns.

    Source: Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783, and its code.
    """

    @config_class
    class Config(RotaryEmbedding.Config):
        factor: Required[float] = REQUIRED
        original_context: Required[int] = REQUIRED  # Tokens.
        low_freq_factor: float = 1.0  # Turns.
        high_freq_factor: float = 4.0  # Turns.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        ends = cfg.high_freq_factor > cfg.low_freq_factor > 0
        if cfg.factor < 1 or cfg.original_context < 1 or not ends:
            raise ValueError(
                f"{self._title()}: factor {cfg.factor} must be at least 1, original_context "
                f"{cfg.original_context} at least 1, and high_freq_factor {cfg.high_freq_factor} "
                f"above low_freq_factor {cfg.low_freq_factor}, above 0."
            )

    @nowrap
    def frequencies(self, dim: int) -> Float[Array, "1 n"]:
        """Returns the radians a position by which each of the dim / 2 pairs is rotated."""
        cfg: Llama3RotaryEmbedding.Config = self.config
        plain = super().frequencies(dim)
        turns = plain * (cfg.original_context / (2 * math.pi))
        low, high = cfg.low_freq_factor, cfg.high_freq_factor
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        return plain * kept + plain / cfg.factor * (1 - kept)


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """Returns 0.1 m ln(factor) + 1: what keeps scores from flattening in a longer context.

    DeepSeek's attention multiplies its scores by the square, with m = mscale_all_dim.

    Args:
        factor: Context length over the original one, at least 1.
        m: How much of the paper's correction is made; 0 for none.

    Raises:
        ValueError: If the factor is below 1.

    Source: Peng et al., arXiv:2309.00071, eq. 22.
    """
    if factor < 1:
        raise ValueError(f"yarn_mscale: factor is {factor}; set it to 1 or more.")
    return 0.1 * m * math.log(factor) + 1


class YarnRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding for contexts `factor` times longer than those first trained on.

    Pairs that turn more than `beta_fast` times within the original context rotate as before, those
    that turn less than `beta_slow` times `factor` times slower, those between in between.

    Source: Peng et al., arXiv:2309.00071, eq. 17 to 23.
    """

    @config_class
    class Config(RotaryEmbedding.Config):
        factor: Required[float] = REQUIRED  # s: context length over the original one.
        original_context: Required[int] = REQUIRED  # Tokens.
        beta_fast: float = 32.0
        beta_slow: float = 1.0
        truncate: bool = True  # Whether the ends of the ramp are whole pairs; GPT-OSS: not.
        attention_factor: float | None = None  # Of queries and of keys; if None,
        mscale: float = 1.0  # yarn_mscale(s, mscale) over
        mscale_all_dim: float = 0.0  # yarn_mscale(s, mscale_all_dim), as in DeepSeek-V2.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        super().__init__(cfg, parent=parent)
        cfg = self.config
        if cfg.factor < 1 or cfg.original_context < 1 or not cfg.beta_fast > cfg.beta_slow > 0:
            raise ValueError(
                f"{self._title()}: factor {cfg.factor} must be at least 1, original_context "
                f"{cfg.original_context} at least 1, and beta_fast {cfg.beta_fast} above beta_slow "
                f"{cfg.beta_slow}, above 0."
            )
        if cfg.attention_factor is not None and (cfg.mscale, cfg.mscale_all_dim) != (1, 0):
            raise ValueError(
                f"{self._title()}: attention_factor is {cfg.attention_factor}, so mscale "
                f"{cfg.mscale} and mscale_all_dim {cfg.mscale_all_dim} would say nothing; leave "
                "out the one or the others."
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
        cfg: YarnRotaryEmbedding.Config = self.config
        if cfg.attention_factor is not None:
            return cfg.attention_factor
        return yarn_mscale(cfg.factor, cfg.mscale) / yarn_mscale(cfg.factor, cfg.mscale_all_dim)
