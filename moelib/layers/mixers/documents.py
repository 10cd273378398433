"""The documents of packed sequences, as layers with a state need them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from moelib.parallel.sharding import constrain


class Documents(NamedTuple):
    """The document of each token, and which tokens are not padding."""

    number: Int[Array, "B S"]  # From 0; padding belongs to the document before it.
    valid: Bool[Array, "B S"]

    @property
    def num_tokens(self) -> Int[Array, "B"]:
        """The length of each sequence without the padding at its end."""
        index = jnp.arange(1, self.valid.shape[1] + 1, dtype=jnp.int32)[None]
        return jnp.max(jnp.where(self.valid, index, 0), axis=1)


def documents_of(segment_ids: Int[Array, "B S"] | None, shape: tuple[int, ...]) -> Documents:
    """Returns the documents of sequences; a single one per sequence if there are no segments.

    Args:
        segment_ids: Number of each token's document, above 0; 0 for padding.
        shape: (B, S), for sequences without segments.
    """
    if segment_ids is None:
        return Documents(jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool))
    segment_ids = constrain(segment_ids, ("batch", None))
    valid = segment_ids > 0
    filled = jax.lax.associative_scan(lambda a, b: jnp.where(b > 0, b, a), segment_ids, axis=1)
    before = jnp.pad(filled[:, :-1], ((0, 0), (1, 0)))  # 0 where no token came before.
    begins = (filled != before) & (before > 0)
    return Documents(jnp.cumsum(begins, axis=1, dtype=jnp.int32), valid)
