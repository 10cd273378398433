"""Reference of the cross-entropy of a linear head, with all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"],
    labels: Int[Array, "T"],
    *,
    z_loss: float,
) -> tuple[Float[Array, ""], Float[Array, "T"], Float[Array, "T"]]:
    """Returns (loss, nll, lse) as the entry documents them, for plain differentiation."""
    ignored = labels < 0
    hidden = jnp.where(ignored[:, None], 0, hidden)
    logits = jnp.einsum("td,dv->tv", hidden, head, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    onehot = jax.nn.one_hot(labels, logits.shape[1], dtype=jnp.float32)
    nll = lse - jnp.sum(onehot * logits, axis=-1)
    nll *= jnp.where(labels >= logits.shape[1], jnp.nan, 1.0)  # NaN in gradients, too.
    nll, lse = (jnp.where(ignored, 0.0, x) for x in (nll, lse))
    return jnp.sum(nll + z_loss * lse**2), nll, lse
