"""Token embedding, and its use as a tied output head."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moelib.core.config import REQUIRED, Required, config_class
from moelib.core.config_types import PositiveFloat
from moelib.core.module import in_context
from moelib.core.param import Cast, FanAxes, ParameterSpec
from moelib.core.precision import CastAtUse
from moelib.layers.base import BaseLayer
from moelib.parallel.sharding import constrain

_AXES = ("vocab", "embed")


class Embedding(BaseLayer):
    """A table of V vectors of size D."""

    @config_class
    class Config(BaseLayer.Config):
        num_embeddings: Required[int] = REQUIRED  # V.
        dim: Required[int] = REQUIRED  # D.
        # Factor of the vectors of the ids, not of a tied head, as in muP (arXiv:2203.03466) and
        # Granite; None for 1.
        scale: PositiveFloat | None = None

    def _create_layer_parameter_specs(self) -> dict[str, ParameterSpec]:
        cfg: Embedding.Config = self.config
        # The fan-in is D, as in a tied output head; a lookup alone has no sum.
        return {
            "weight": ParameterSpec(
                (cfg.num_embeddings, cfg.dim),
                _AXES,
                fan_axes=FanAxes((1,), (0,)),
                cast=Cast.READ,
            )
        }

    def forward(self, ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """Returns the vectors of the ids, times `scale`; NaN for ids outside the table."""
        table = (self.get_invocation_context().state or {})["weight"]
        if not isinstance(table, CastAtUse):
            table = CastAtUse(table, table, table.dtype)
        at = table.gradient_of
        # The gradient of a row is summed over its uses in float32: in bfloat16 the sum of many uses
        # stays far below its value, 4,096 ones add up to 256.
        exact = at.astype(jnp.float32) if jnp.finfo(at.dtype).bits < 32 else at
        unread = _rows(constrain(exact, _AXES), ids)
        x = CastAtUse(_rows(lax.stop_gradient(table.value), ids), unread, table.dtype).cast()
        return x if self.config.scale is None else x * self.config.scale

    def _own_matrix_flops_per_token(self, chosen: Callable[[str], bool], path: str = "") -> float:
        del chosen, path
        return 0.0  # A lookup; a model counts a tied head itself.

    @in_context
    def attend(self, x: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """Returns the inner products with all vectors: the logits of a tied head."""
        table = self.parameters["weight"].astype(x.dtype)  # As in `operands`.
        return jnp.einsum("bsd,vd->bsv", x, table)


def _rows(table: Float[Array, "V D"], ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    if jax.sharding.get_abstract_mesh().manual_axes:  # A pipeline.
        # XLA's partitioner aborts if a mesh axis there shards both the vectors and the ids.
        table = constrain(table, ("vocab", None))
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
