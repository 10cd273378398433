"""Cross-entropy of a linear head that never holds the logits of all tokens.

`cross_entropy` is the one entry. Differentiated, it computes its gradients in the forward pass, and
the backward pass only scales them; not differentiated, it computes the loss alone.

Shapes: T tokens, D model, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from moelib.core.varying import align
from moelib.kernels.backend import check_backend
from moelib.kernels.cross_entropy import reference, xla

__all__ = ["CrossEntropyOutput", "cross_entropy"]

_BACKENDS = ("reference", "xla")


class CrossEntropyOutput(NamedTuple):
    """What `cross_entropy` returns, in nats; all float32, and zeros for ignored tokens.

    Attributes:
        loss: Sum over tokens of `weight * (nll + z_loss * lse**2)`. Differentiable.
        nll: Negative log-likelihood of each label. Not differentiable: its gradient is zero.
        lse: Logarithm of the sum of the exponentials of each token's logits. Not differentiable.
    """

    loss: Float32[Array, ""]
    nll: Float32[Array, "T"]
    lse: Float32[Array, "T"]


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "T"],
    *,
    weights: Float[Array, "T"] | None = None,
    z_loss: float = 0.0,
    logit_cap: float | None = None,
    transposed_head: bool = False,
    chunk_size: int | None = None,
    vocab_axes: tuple[str, ...] = (),
    backend: str | None = None,
) -> CrossEntropyOutput:
    """Returns the cross-entropy of `softmax(hidden @ head)` against the labels, a sum over tokens.

    Logits are float32 whatever the inputs. Differentiable once, in reverse mode, in hidden, head
    and weights. The backward pass scales the gradients by the cotangent of `loss`; where that is
    not 1, a caller saves a pass over them by putting the factor, such as one over the number of
    tokens, into `weights`. Under `jax.checkpoint` the whole of it is computed a second time. Inside
    `jax.shard_map` with split tokens, the sums are the shard's own.

    Args:
        hidden: Last hidden state of each token.
        head: The output matrix, [D, V]; the embedding table, [V, D], if `transposed_head`.
        labels: The token to predict; a negative one is ignored, whatever its hidden state and
            weight hold. One of V or more makes its nll, the loss and the gradients NaN.
        weights: Weight of each token in the loss, as float32; 1 by default.
        z_loss: Weight of the squared logsumexp (PaLM, arXiv:2204.02311, sec. 5).
        logit_cap: Bounds logits to `cap * tanh(logits / cap)` (Gemma 2, arXiv:2408.00118, sec. 2).
        transposed_head: Whether head is a table; nothing is copied for it.
        chunk_size: Tokens whose logits are held at once; by default what fits into 128 MiB. Their
            gradients take as much again.
        vocab_axes: Inside `jax.shard_map`: mesh axes over which the vocabulary is split, so that
            head is this device's part. `loss` is then this device's share, an equal one, and the
            gradients in hidden are what its part adds: sum both over the axes.
        backend: "xla" (the default) or "reference", which holds all logits.

    Raises:
        ValueError: If the shapes disagree, the chunk size or cap is not positive, or the backend
            is unknown, or "reference" with a split vocabulary.

    Source: gradients in the forward pass as in Liger Kernel, arXiv:2410.10989, sec. 3.2.
    """
    check_backend("cross_entropy", backend, dict.fromkeys(_BACKENDS))
    _check_shapes(hidden, head, labels, weights, transposed_head)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"cross_entropy: chunk_size is {chunk_size}; set 1 or more, or None.")
    if logit_cap is not None and not logit_cap > 0:
        raise ValueError(f"cross_entropy: logit_cap is {logit_cap}; set it above 0, or to None.")
    if vocab_axes and backend == "reference":
        raise ValueError(
            'cross_entropy: backend="reference" holds the whole vocabulary; set vocab_axes to (), '
            "or the backend to None."
        )
    if weights is None:
        weights = jnp.ones(labels.shape, jnp.float32)
    num_tokens, vocab_size = hidden.shape[0], head.shape[0 if transposed_head else 1]
    size = chunk_size or xla.chunk_size_for(num_tokens, vocab_size)
    options = xla.Options(transposed_head, z_loss, logit_cap, size, vocab_axes)
    arrays = align(hidden, head, labels, weights.astype(jnp.float32))
    run = _reference if backend == "reference" else _chunked
    loss, nll, lse = run(options, *arrays)
    return CrossEntropyOutput(loss, lax.stop_gradient(nll), lax.stop_gradient(lse))


def _check_shapes(
    hidden: Array, head: Array, labels: Array, weights: Array | None, transposed_head: bool
) -> None:
    """Raises ValueError unless the shapes agree."""
    ranks = hidden.ndim == 2 and head.ndim == 2 and labels.ndim == 1
    if not ranks or head.shape[1 if transposed_head else 0] != hidden.shape[1]:
        want = "[V, D]" if transposed_head else "[D, V]"
        raise ValueError(
            f"cross_entropy: hidden {hidden.shape} is not [T, D] to {want} of head {head.shape}; "
            "transposed_head says which of the two the head is."
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"cross_entropy: labels {labels.shape} are not [T] of {hidden.shape}.")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"cross_entropy: weights {weights.shape}, but labels {labels.shape}.")


def _reference(options: xla.Options, *arrays: Array) -> tuple[Array, Array, Array]:
    return reference.cross_entropy(
        *arrays,
        transposed_head=options.transposed_head,
        z_loss=options.z_loss,
        logit_cap=options.logit_cap,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    options: xla.Options, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Array, Array, Array]:
    return xla.forward(hidden, head, labels, weights, options)


def _chunked_forward(
    options: xla.Options, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    return xla.forward_and_gradients(hidden, head, labels, weights, options)


def _chunked_backward(
    options: xla.Options,
    gradients: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array, Array],
) -> tuple[Array, Array, None, Array]:
    del options
    hidden_grad, head_grad, weights_grad = (
        (cotangents[0] * grad.astype(jnp.float32)).astype(grad.dtype) for grad in gradients
    )
    return hidden_grad, head_grad, None, weights_grad


_chunked.defvjp(_chunked_forward, _chunked_backward)
