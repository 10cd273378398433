"""Cross-entropy of a linear head over chunks of tokens, in plain XLA, on every platform.

Logits exist for one chunk at a time. Where gradients are wanted, a chunk's are computed from its
logits at once: three matmuls in all, and nothing is recomputed.

Shapes: T tokens, c tokens of a chunk, D model, V vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moelib.core.varying import vary, zeros_like_varying

# Each chunk reads and writes the head's float32 gradient, whatever the number of its tokens. At the
# peak rates of a v6e the matmuls take as long from 750 tokens on; at a vocabulary of 151,936 chunks
# of 216 tokens take 113 Mcycles, of 1,024 tokens 48. Smaller vocabularies have chunks of 128 MiB.
# The logits of few tokens take no more memory than that gradient, which a single chunk does not add
# up: 4,096 tokens, width 4,096 and a vocabulary of 128,256 take 51 Mcycles instead of 77.
_MIN_TOKENS = 1024
_LOGITS_BYTES = 128 * 2**20
# On CPUs fresh pages for logits cost more than sums of the head's gradient: chunks of 512 tokens
# take 0.75 times as long as one of 2,048 with width 256 and a vocabulary of 8,192.
CPU_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of `cross_entropy`."""

    transposed_head: bool
    z_loss: float
    chunk_size: int | None
    vocab_axes: tuple[str, ...] = ()

    def vocab_shards(self) -> int:
        """Returns the number of devices that share the vocabulary."""
        return lax.axis_size(self.vocab_axes) if self.vocab_axes else 1

    def labels_here(self, labels: Array, logits: Array) -> Array:
        """Returns the labels counted from the first token of this device's part."""
        if not self.vocab_axes:
            return labels
        first = lax.axis_index(self.vocab_axes) * logits.shape[1]
        return labels - first.astype(labels.dtype)

    def over_vocab(self, reduce: Callable[..., Array], x: Array) -> Array:
        """Returns x reduced over the devices that share the vocabulary, for each of them."""
        if not self.vocab_axes:
            return x
        return vary(reduce(x, self.vocab_axes), self.vocab_axes)


def chunk_size_for(num_tokens: int, dim: int, vocab_size: int, most: int | None = None) -> int:
    """Returns the tokens per chunk: equal chunks, a multiple of 8, of about `most` tokens or less.

    By default their logits fill 128 MiB, or are those of 1,024 tokens if that is more, or those of
    all tokens if they are no more than `dim` more.
    """
    if most is None:
        most = max(_MIN_TOKENS, _LOGITS_BYTES // (4 * max(vocab_size, 1)) // 8 * 8)
        most = num_tokens if num_tokens <= most + dim else most
    num_chunks = max(-(-num_tokens // most), 1)
    even = -(-num_tokens // num_chunks)
    return even if num_chunks == 1 else -(-even // 8) * 8


def forward(
    hidden: Float[Array, "T D"],
    head: Float[Array, "_ _"],
    labels: Int[Array, "T"],
    options: Options,
    *,
    with_gradients: bool,
    weights: Float[Array, "T"] | None = None,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array] | None]:
    """Returns ((loss, nll, lse), gradients of the loss in (hidden, head), or None).

    With `weights` the gradients are those of the loss with each token's part times its weight.
    """

    def step(head_grad: Any, chunk: tuple[Array, ...]) -> tuple[Any, tuple[Array, ...]]:
        labels = chunk[1]
        rows, logits = _logits(chunk[0], labels, head, options)
        nll, lse = _nll_and_lse(logits, labels, options)
        if not with_gradients:
            return head_grad, (nll, lse)
        grad = _logits_gradient(logits, lse, labels, options)
        if weights is not None:
            grad = jnp.where(labels[:, None] < 0, 0.0, chunk[2][:, None] * grad)
        grad = grad.astype(hidden.dtype)
        rows_grad = _dot(grad, head, 1, 0 if options.transposed_head else 1).astype(hidden.dtype)
        # The head's gradient comes second, when a gathered head need not be held any more.
        rows, rows_grad = lax.optimization_barrier((rows, rows_grad))
        pair = (grad, rows) if options.transposed_head else (rows, grad)
        return head_grad + _dot(*pair, 0, 0), (nll, lse, rows_grad)

    zeros = zeros_like_varying(head.shape, jnp.float32, head) if with_gradients else None
    tokens = (hidden, labels) if weights is None else (hidden, labels, weights)
    head_grad, (nll, lse, *hidden_grad) = _over_chunks(step, zeros, tokens, options.chunk_size)
    totals = _totals(nll, lse, labels, options)
    return totals, (hidden_grad[0], head_grad.astype(head.dtype)) if with_gradients else None


def _over_chunks(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    tokens: tuple[Array, ...],
    chunk_size: int | None,
) -> tuple[Any, Any]:
    """Scans `step` over chunks of (hidden, labels, ...), and returns outputs of T entries."""
    num_tokens = len(tokens[0])
    if chunk_size is None or num_tokens <= chunk_size:
        return step(carry, tokens)
    num_chunks = -(-num_tokens // chunk_size)
    short = num_chunks * chunk_size - num_tokens

    def split(x: Array, fill: int) -> Array:
        x = jnp.pad(x, ((0, short), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
        return x.reshape(num_chunks, chunk_size, *x.shape[1:])

    chunks = tuple(split(x, -1 if i == 1 else 0) for i, x in enumerate(tokens))
    carry, out = lax.scan(step, carry, chunks)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], out)


def _logits(
    rows: Array, labels: Array, head: Array, options: Options
) -> tuple[Float[Array, "c D"], Float[Array, "c V"]]:
    """Returns (rows, logits), both zeros for ignored tokens, whatever their rows hold."""
    rows = jnp.where(labels[:, None] < 0, 0, rows)
    return rows, _dot(rows, head, 1, 1 if options.transposed_head else 0)


def _nll_and_lse(logits: Array, labels: Array, options: Options) -> tuple[Array, Array]:
    """Returns each token's (negative log-likelihood, logsumexp), [c] each."""
    size = logits.shape[1]
    peak = options.over_vocab(lax.pmax, jnp.max(logits, axis=1))
    total = jnp.sum(jnp.exp(logits - peak[:, None]), axis=1)
    lse = peak + jnp.log(options.over_vocab(lax.psum, total))
    here = options.labels_here(labels, logits)
    logit = jnp.take_along_axis(logits, jnp.clip(here, 0, size - 1)[:, None], axis=1)[:, 0]
    if options.vocab_axes:
        logit = options.over_vocab(lax.psum, jnp.where((here >= 0) & (here < size), logit, 0.0))
    nll = lse - logit
    return jnp.where(labels < size * options.vocab_shards(), nll, jnp.nan), lse


def _logits_gradient(
    logits: Array, lse: Array, labels: Array, options: Options
) -> Float[Array, "c V"]:
    """Returns the gradient of a chunk's loss in its logits."""
    vocab_size = logits.shape[1] * options.vocab_shards()
    counts = jnp.where(labels < 0, 0.0, jnp.where(labels < vocab_size, 1.0, jnp.nan))
    scale = counts * (1 + 2 * options.z_loss * lse)
    here = options.labels_here(labels, logits)
    target = lax.broadcasted_iota(labels.dtype, logits.shape, 1) == here[:, None]
    probs = jnp.exp(logits - lse[:, None])
    return scale[:, None] * probs - jnp.where(target, counts[:, None], 0.0)


def _totals(
    nll: Array, lse: Array, labels: Array, options: Options
) -> tuple[Float[Array, ""], Array, Array]:
    """Returns (loss, nll, lse), zeros where ignored; the loss is this device's share of it."""
    ignored = labels < 0
    nll, lse = jnp.where(ignored, 0.0, nll), jnp.where(ignored, 0.0, lse)
    return jnp.sum(nll + options.z_loss * lse**2) / options.vocab_shards(), nll, lse


def _dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)
