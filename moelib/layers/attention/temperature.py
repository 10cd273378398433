"""Attention temperature: a scale of queries that grows with their position."""

from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import Limit, PositiveInt
from moelib.layers.base import BaseLayer


class AttentionTemperature(BaseLayer):
    """Multiplies queries by 1 + beta ln(1 + floor(position / context)).

    It keeps the scores over a long context from flattening, and is 1 within the first `context`
    positions.

    Source: Nakanishi, arXiv:2501.19399, in the form of Mistral Small 4.
    """

    @config_class
    class Config(BaseLayer.Config):
        beta: Required[Annotated[float, Limit(">=", 0)]] = REQUIRED  # Growth per e-fold of length.
        context: Required[PositiveInt] = REQUIRED  # Tokens of a step of the scale.

    def forward(
        self, q: Float[Array, "B S H Dh"], positions: Int[Array, "B S"]
    ) -> Float[Array, "B S H Dh"]:
        """Returns the scaled queries, in the dtype of q."""
        cfg: AttentionTemperature.Config = self.config
        steps = (positions // cfg.context).astype(jnp.float32)
        scale = 1 + cfg.beta * jnp.log1p(steps)
        return q * scale[:, :, None, None].astype(q.dtype)
