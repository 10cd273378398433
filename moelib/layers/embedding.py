"""Token embedding, and its use as a tied output head."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.param import FanAxes, ParameterSpec
from moelib.layers.base import BaseLayer


class Embedding(BaseLayer):
    """A table of V vectors of size D."""

    @config_class
    class Config(BaseLayer.Config):
        num_embeddings: Required[int] = REQUIRED  # V.
        dim: Required[int] = REQUIRED  # D.

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: Embedding.Config = self.config
        # Fan-in is that of a tied output head, D; a lookup alone has no sum.
        return {
            "weight": ParameterSpec(
                (cfg.num_embeddings, cfg.dim), ("vocab", "embed"), fan_axes=FanAxes((1,), (0,))
            )
        }

    def forward(self, ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Returns the vectors of the ids; NaN for ids outside the table."""
        rows = self.parameters["weight"].at[ids]
        return rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)

    def _own_forward_flops_per_token(self, seq_len: int) -> float:
        del seq_len
        return 0.0  # A lookup; a model counts a tied head itself.

    def attend(self, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Returns the inner products with all vectors: the logits of a tied head."""
        return jnp.einsum("bsd,vd->bsv", x, self.parameters["weight"].astype(x.dtype))
