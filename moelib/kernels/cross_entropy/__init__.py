"""Cross-entropy of a linear head that never holds the logits of all tokens.

`cross_entropy` is a sum over tokens. Differentiated, it computes its gradients in the forward pass,
and the backward pass only scales them; not differentiated, it computes the loss alone. `token_nll`
is each token's, for losses that are other functions of them; its backward pass computes the logits
again.

Shapes: T tokens, D model, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from moelib.core.varying import align
from moelib.kernels.backend import chosen_backend, current_device, run
from moelib.kernels.cross_entropy import reference, xla
from moelib.kernels.operands import check_shapes

__all__ = ["CrossEntropyOutput", "cross_entropy", "token_nll"]


class CrossEntropyOutput(NamedTuple):
    """Loss and its parts, in nats; all float32, and zeros for ignored tokens."""

    loss: Float32[Array, ""]  # Sum over tokens of `nll + z_loss * lse**2`. Differentiable.
    # Negative log-likelihood of each label. Not differentiable: its gradient is zero.
    nll: Float32[Array, "T"]
    # Logarithm of the sum of the exponentials of each token's logits. Not differentiable.
    lse: Float32[Array, "T"]


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "T"],
    *,
    z_loss: float = 0.0,
    transposed_head: bool = False,
    vocab_axes: tuple[str, ...] = (),
    chunk_size: int | None = None,
    backend: str | None = None,
) -> CrossEntropyOutput:
    """Returns the cross-entropy of `softmax(hidden @ head)` and the labels, a sum over tokens.

    Logits are float32 for every dtype of the inputs; those of a chunk of tokens are held at once,
    and their gradients. Differentiable once, in reverse mode, in hidden and head. Under
    `jax.checkpoint` all of it is recomputed. Inside `jax.shard_map` with split tokens, the sums are
    the shard's own.

    Args:
        hidden: Last hidden state of each token.
        head: Output matrix [D, V]; embedding table [V, D] if `transposed_head`.
        labels: Token to predict; a negative one is ignored, and its hidden state may hold anything.
            A label of V or more makes its nll, the loss and the gradients NaN.
        z_loss: Weight of the squared logsumexp (PaLM, arXiv:2204.02311, sec. 5).
        transposed_head: Whether head is a table; it is not copied.
        vocab_axes: Inside `jax.shard_map`: mesh axes over which the vocabulary is split, so that
            head is this device's part. `loss` is then this device's share, an equal one, and the
            gradients in hidden are the contribution of its part: sum both over the axes.
        chunk_size: Maximum number of tokens of a chunk, except that chunks are multiples of 8; None
            for 512 on CPUs, elsewhere for 1,024, or for as many as have 128 MiB of logits if that
            is more; for all tokens if they are no more than D more.
        backend: "xla" (the default) or "reference", which holds all logits. None takes the one
            that `moelib.kernels.backend` names.

    Raises:
        ValueError: If the shapes disagree, or the backend is unknown, or "reference" with a split
            vocabulary.

    Source: gradients in the forward pass as in Liger Kernel, arXiv:2410.10989, sec. 3.2.
    """
    options = xla.Options(transposed_head, z_loss, chunk_size, vocab_axes)
    forms = {"reference": _dense, "xla": _chunked}
    loss, nll, lse = _run(forms, options, backend, hidden, head, labels)
    return CrossEntropyOutput(loss, lax.stop_gradient(nll), lax.stop_gradient(lse))


def token_nll(
    hidden: Float[Array, "T D"],
    head: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Int[Array, "T"],
    *,
    transposed_head: bool = False,
    vocab_axes: tuple[str, ...] = (),
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Float32[Array, "T"]:
    """Returns the negative log-likelihood of each label in nats, 0 for ignored tokens.

    Differentiable once, in reverse mode, in hidden and head. Arguments and errors are those of
    `cross_entropy`. With a split vocabulary each device has the whole value; give it the cotangent
    of its share, an equal one, and sum the gradients in hidden over the axes.
    """
    options = xla.Options(transposed_head, 0.0, chunk_size, vocab_axes)
    forms = {"reference": lambda *args: _dense(*args)[1], "xla": _chunked_nll}
    return _run(forms, options, backend, hidden, head, labels)


def _run(
    forms: Mapping[str, Callable[..., Any]],
    options: xla.Options,
    backend: str | None,
    hidden: Array,
    head: Array,
    labels: Array,
) -> Any:
    """Returns the result of a backend, with the size of chunks chosen."""
    dims = "VD" if options.transposed_head else "DV"
    shapes = {"hidden": (hidden, "TD"), "head": (head, dims), "labels": (labels, "T")}
    check_shapes("cross_entropy", shapes)
    backend = chosen_backend("cross_entropy", backend)
    vocab_size = head.shape[0 if options.transposed_head else 1]
    (num_tokens, dim), size = hidden.shape, options.chunk_size
    if size is None and current_device().platform == "cpu":
        size = xla.CPU_TOKENS
    size = xla.chunk_size_for(num_tokens, dim, vocab_size, size)
    options = dataclasses.replace(options, chunk_size=size)
    reason = f"holds the whole vocabulary; set vocab_axes={options.vocab_axes} to ()."
    reasons = {"reference": reason if options.vocab_axes else None}
    forms = {name: functools.partial(form, options) for name, form in forms.items()}
    return run("cross_entropy", backend, forms, reasons, *align(hidden, head, labels))


def _dense(
    options: xla.Options, hidden: Array, head: Array, labels: Array
) -> tuple[Array, Array, Array]:
    head = head.T if options.transposed_head else head
    return reference.cross_entropy(hidden, head, labels, z_loss=options.z_loss)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    options: xla.Options, hidden: Array, head: Array, labels: Array
) -> tuple[Array, Array, Array]:
    return xla.forward(hidden, head, labels, options, with_gradients=False)[0]


def _chunked_forward(
    options: xla.Options, hidden: Array, head: Array, labels: Array
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array] | None]:
    return xla.forward(hidden, head, labels, options, with_gradients=True)


def _chunked_backward(
    options: xla.Options, gradients: tuple[Array, Array], cotangents: tuple[Array, Array, Array]
) -> tuple[Array, Array, None]:
    del options
    hidden_grad, head_grad = (
        (cotangents[0] * grad.astype(jnp.float32)).astype(grad.dtype) for grad in gradients
    )
    return hidden_grad, head_grad, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_nll(options: xla.Options, hidden: Array, head: Array, labels: Array) -> Array:
    return xla.forward(hidden, head, labels, options, with_gradients=False)[0][1]


def _nll_forward(
    options: xla.Options, hidden: Array, head: Array, labels: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _chunked_nll(options, hidden, head, labels), (hidden, head, labels)


def _nll_backward(
    options: xla.Options, operands: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    weights = cotangent * options.vocab_shards()
    _, gradients = xla.forward(*operands, options, with_gradients=True, weights=weights)
    assert gradients is not None
    return *gradients, None


_chunked_nll.defvjp(_nll_forward, _nll_backward)
