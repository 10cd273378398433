"""The loss of a language model: cross-entropy without ever holding all logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from moelib.kernels.cross_entropy import cross_entropy
from moelib.parallel import sharding
from moelib.parallel.collectives import vary


class TokenLoss(NamedTuple):
    """Sums over the valid tokens of the global batch; divide by `num_tokens` for means.

    Attributes:
        objective: Sum of cross-entropy + z_loss * logsumexp^2, nats; differentiable.
        cross_entropy: Sum of cross-entropy, nats; for metrics, not differentiable.
        num_tokens: How many tokens count.
    """

    objective: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    num_tokens: Float[Array, ""]


def language_model_loss(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "B S"],
    *,
    tied: bool,
    z_loss: float = 0.0,
) -> TokenLoss:
    """Returns the loss of predicting `labels` from the last hidden states.

    Args:
        hidden: Output of the decoder.
        head: The output matrix [D, V]; the embedding table [V, D] if `tied`.
        labels: The token that follows each one; negative where none counts.
        tied: Whether the head is the embedding table.
        z_loss: Weight of the squared logsumexp in the objective (PaLM, arXiv:2204.02311, sec. 5).
    """

    def local(hidden: Array, head: Array, labels: Array) -> TokenLoss:
        out = cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            labels.reshape(-1),
            z_loss=z_loss,
            transposed_head=tied,
        )
        num_tokens = jnp.sum(labels >= 0, dtype=jnp.float32)
        return TokenLoss(out.loss, jnp.sum(out.nll), num_tokens)

    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return local(hidden, head, labels)
    shape = dict(mesh.shape)
    tokens = sharding.partition_spec(
        ("batch", "sequence"), shape, shape=labels.shape, place="target_labels"
    )
    axes = sharding.mesh_axes("batch", shape) + sharding.mesh_axes("sequence", shape)

    def summed(hidden: Array, head: Array, labels: Array) -> TokenLoss:
        out = local(*vary((hidden, head, labels), axes))
        return jax.tree.map(lambda x: jax.lax.psum(x, axes) if axes else x, out)

    specs = (tokens, PartitionSpec(), tokens)
    run = jax.shard_map(summed, in_specs=specs, out_specs=PartitionSpec())
    return run(hidden, head, labels)
