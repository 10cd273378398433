"""Cross-entropy of a linear head: what it means, with all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "..."],
    labels: Int[Array, "T"],
    weights: Float[Array, "T"],
    *,
    transposed_head: bool,
    z_loss: float,
    logit_cap: float | None,
) -> tuple[Float[Array, ""], Float[Array, "T"], Float[Array, "T"]]:
    """Returns (loss, nll, lse) as the entry documents them, for plain differentiation."""
    ignored = labels < 0
    table = head.T if transposed_head else head
    hidden = jnp.where(ignored[:, None], 0, hidden)
    logits = jnp.einsum("td,dv->tv", hidden, table, preferred_element_type=jnp.float32)
    if logit_cap is not None:
        logits = logit_cap * jnp.tanh(logits / logit_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    onehot = jax.nn.one_hot(labels, logits.shape[1], dtype=jnp.float32)
    nll = lse - jnp.sum(onehot * logits, axis=-1)
    nll = jnp.where(labels >= logits.shape[1], jnp.nan, nll)
    nll, lse, weights = (jnp.where(ignored, 0.0, x) for x in (nll, lse, weights))
    return jnp.sum(weights * (nll + z_loss * lse**2)), nll, lse
