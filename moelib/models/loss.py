"""Language-model loss: cross-entropy that never holds all logits at once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from moelib.core.varying import vary
from moelib.kernels.cross_entropy import cross_entropy, xla
from moelib.parallel import sharding
from moelib.parallel.collectives import gather


class TokenLoss(NamedTuple):
    """Sums over the valid tokens of the global batch; divide by `num_tokens` for means."""

    # Sum of cross-entropy + z_loss * logsumexp^2, nats; differentiable.
    objective: Float[Array, ""]
    cross_entropy: Float[Array, ""]  # Sum of cross-entropy, nats; for metrics, not differentiable.
    num_tokens: Float[Array, ""]  # Number of valid tokens.
    # `cross_entropy` and `num_tokens` of each source, if the sequences have sources.
    by_source: Float[Array, "N 2"] | None = None


def language_model_loss(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "B S"],
    *,
    tied: bool,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    sources: Int[Array, "B N"] | None = None,
) -> TokenLoss:
    """Returns the loss of predicting `labels` from the last hidden states.

    Args:
        hidden: Output of the decoder.
        head: The output matrix [D, V]; the embedding table [V, D] if `tied`.
        labels: Next token of each position; negative where ignored.
        tied: Whether the head is the embedding table.
        z_loss: Weight of the squared logsumexp in the objective (PaLM, arXiv:2204.02311, sec. 5).
        chunk_size: Number of tokens whose logits a device holds at once, as for `cross_entropy`.
        sources: 1 for the source of each sequence and 0 for the others, to sum by source; None
            for no such sums.

    Raises:
        UserError: If the mesh does not divide the labels or the head, or an axis splits both tokens
            and the vocabulary.
    """
    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return _sums(hidden, head, labels, tied, z_loss, (), chunk_size, sources)
    shape = dict(mesh.shape)
    names = functools.partial(sharding.mesh_axes, mesh_shape=shape)
    tokens = sharding.partition_spec(
        ("batch", "sequence"), shape, shape=labels.shape, array="target_labels"
    )
    sharding.partition_spec(("batch", "sequence", "vocab"), shape, array="the logits")
    vocab = names("vocab")
    axes = (*names("batch"), *names("sequence"), *vocab)
    of_head = ("vocab", "embed") if tied else ("embed", "vocab")
    split = sharding.partition_spec(of_head, shape, shape=head.shape, array="the head")
    split = sharding.keep_axes(split, axes)  # Devices that share tokens share the head.

    def summed(hidden: Array, head: Array, labels: Array, sources: Array | None) -> TokenLoss:
        head = gather(head, split, axes, keep=vocab)
        hidden, labels, sources = vary((hidden, labels, sources), axes)
        out = _sums(hidden, head, labels, tied, z_loss, vocab, chunk_size, sources)
        return jax.tree.map(lambda x: jax.lax.psum(x, axes) if axes else x, out)

    specs = (tokens, split, tokens, PartitionSpec(*tokens[:1]))
    run = jax.shard_map(summed, in_specs=specs, out_specs=PartitionSpec())
    return run(hidden, head, labels, sources)


def held_logits(num_tokens: int, dim: int, vocab_size: int, chunk_size: int | None) -> int:
    """Returns the number of float32 logits that a device holds at once, of its part of a batch."""
    return xla.chunk_size_for(num_tokens, dim, vocab_size, chunk_size) * vocab_size


def _sums(
    hidden: Float[Array, "B S D"],
    head: Array,
    labels: Int[Array, "B S"],
    tied: bool,
    z_loss: float,
    vocab_axes: tuple[str, ...],
    chunk_size: int | None,
    sources: Int[Array, "B N"] | None,
) -> TokenLoss:
    """Returns the sums over the local tokens, divided among devices that split a vocabulary."""
    out = cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        head,
        labels.reshape(-1),
        z_loss=z_loss,
        transposed_head=tied,
        vocab_axes=vocab_axes,
        chunk_size=chunk_size,
    )
    shards = jax.lax.axis_size(vocab_axes) if vocab_axes else 1
    num_tokens = jnp.sum(labels >= 0, dtype=jnp.float32)
    by_source = None
    if sources is not None:
        counted = jnp.sum(labels >= 0, 1, dtype=jnp.float32)
        of_each = jnp.stack([jnp.sum(out.nll.reshape(labels.shape), 1), counted], 1) / shards
        sources = sources.astype(jnp.float32)
        by_source = jnp.sum(sources[:, :, None] * of_each[:, None], 0)  # [N, 2]
    return TokenLoss(out.loss, jnp.sum(out.nll) / shards, num_tokens / shards, by_source)
