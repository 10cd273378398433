"""What is not finite in one token stays in the rows that may attend to that token.

A masked score is no more than a zero in the matmuls that follow, and zero times NaN is NaN in every
row. So matmuls get finite operands, and NaN travels through the scores, which are masked one by
one: in the forward pass a key stands for its value, in the backward pass the logsumexp of a row
stands for all that the row met.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def poison_scores(
    q: Float[Array, "B Q H Dh"], k: Float[Array, "B K G Dh"], v: Float[Array, "B K G Dh"]
) -> tuple[Float[Array, "B Q H Dh"], Float[Array, "B K G Dh"], Float[Array, "B K G Dh"]]:
    """Returns queries and keys whose scores are NaN where an operand is not finite, finite values.

    Infinities become NaN, and keys stand for their values.
    """
    finite = jnp.all(jnp.isfinite(v), axis=-1, keepdims=True)
    q = jnp.where(jnp.isfinite(q), q, jnp.nan)
    k = jnp.where(jnp.isfinite(k) & finite, k, jnp.nan)
    return q, k, jnp.where(finite, v, 0)


def zero_not_finite(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays with zeros for what is not finite."""
    return tuple(jnp.where(jnp.isfinite(array), array, 0) for array in arrays)


def poison_rows(
    lse: Float32[Array, "B H Q"], delta: Float32[Array, "B H Q"]
) -> tuple[Float32[Array, "B H Q"], Float32[Array, "B H Q"]]:
    """Returns logsumexps that are NaN where a row met NaN, and finite deltas.

    Args:
        lse: The logsumexp of each row's scores: NaN if the query or a key it may see is not finite.
        delta: The sum of output times gradient: not finite if the gradient is not.
    """
    finite = jnp.isfinite(lse) & jnp.isfinite(delta)
    return jnp.where(finite, lse, jnp.nan), jnp.where(finite, delta, 0.0)
