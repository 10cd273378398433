"""Language-model loss: cross-entropy that never holds all logits at once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from moelib.core.varying import vary
from moelib.kernels.cross_entropy import cross_entropy, token_nll, xla
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
    split = _split(head, labels, tied)

    def summed(hidden: Array, head: Array, labels: Array, sources: Array | None) -> TokenLoss:
        hidden, head, labels, sources = split.on_device(hidden, head, labels, sources)
        out = _sums(hidden, head, labels, tied, z_loss, split.vocab, chunk_size, sources)
        return jax.tree.map(lambda x: jax.lax.psum(x, split.axes) if split.axes else x, out)

    specs = (split.tokens, split.head, split.tokens, PartitionSpec(*split.tokens[:1]))
    run = jax.shard_map(summed, in_specs=specs, out_specs=PartitionSpec())
    return run(hidden, head, labels, sources)


def token_log_probs(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "B S"],
    *,
    tied: bool,
    chunk_size: int | None = None,
) -> Float[Array, "B S"]:
    """Returns the log probability of each label in nats, 0 where it is ignored; differentiable.

    Arguments and errors are those of `language_model_loss`.
    """

    def log_probs(hidden: Array, head: Array, labels: Array, vocab: tuple[str, ...]) -> Array:
        nll = token_nll(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            labels.reshape(-1),
            transposed_head=tied,
            vocab_axes=vocab,
            chunk_size=chunk_size,
        )
        return -nll.reshape(labels.shape)

    mesh = sharding.current_mesh()
    if mesh is None or mesh.size == 1:
        return log_probs(hidden, head, labels, ())
    split = _split(head, labels, tied)

    def on_each_device(hidden: Array, head: Array, labels: Array) -> Array:
        hidden, head, labels = split.on_device(hidden, head, labels)
        found = log_probs(hidden, head, labels, split.vocab)
        if not split.vocab:
            return found
        return jax.lax.psum(found / jax.lax.axis_size(split.vocab), split.vocab)

    specs = (split.tokens, split.head, split.tokens)
    return jax.shard_map(on_each_device, in_specs=specs, out_specs=split.tokens)(
        hidden, head, labels
    )


class _Split(NamedTuple):
    """How a mesh splits the operands of a loss."""

    tokens: PartitionSpec
    head: PartitionSpec
    axes: tuple[str, ...]  # That split tokens or the vocabulary.
    vocab: tuple[str, ...]  # That split the vocabulary.

    def on_device(self, hidden: Array, head: Array, *others: Any) -> tuple[Any, ...]:
        """Returns the operands of a device, the head whole but for its part of the vocabulary."""
        head = gather(head, self.head, self.axes, keep=self.vocab)
        varying = vary((hidden, *others), self.axes)
        return varying[0], head, *varying[1:]


def _split(head: Array, labels: Array, tied: bool) -> _Split:
    """Returns how the mesh in context splits the operands. Raises UserError."""
    mesh = sharding.current_mesh()
    assert mesh is not None
    shape = dict(mesh.shape)
    tokens = sharding.partition_spec(
        ("batch", "sequence"), shape, shape=labels.shape, array="target_labels"
    )
    sharding.partition_spec(("batch", "sequence", "vocab"), shape, array="the logits")
    batch, sequence, vocab = (
        sharding.mesh_axes(name, mesh_shape=shape) for name in ("batch", "sequence", "vocab")
    )
    axes = (*batch, *sequence, *vocab)
    of_head = ("vocab", "embed") if tied else ("embed", "vocab")
    split = sharding.partition_spec(of_head, shape, shape=head.shape, array="the head")
    # Devices that share tokens share the head.
    return _Split(tokens, sharding.keep_axes(split, axes), axes, vocab)


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
