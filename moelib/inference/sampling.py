"""Choosing the next token from its logits.

What is left out has the logit -inf. The filters keep every token that is as likely as the last one
they keep. Letters: B rows, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key


class Sampling(NamedTuple):
    """How tokens are chosen, in the order in which it is applied. None leaves a step out.

    Attributes:
        repetition_penalty: See `penalize_repetition`.
        temperature: Divides the logits; None takes the likeliest token, whatever follows.
        top_k: See `keep_top_k`.
        top_p: See `keep_top_p`.
        min_p: See `keep_min_p`.
    """

    repetition_penalty: Float32[Array, ""] | None = None
    temperature: Float32[Array, ""] | None = None
    top_k: Int32[Array, ""] | None = None
    top_p: Float32[Array, ""] | None = None
    min_p: Float32[Array, ""] | None = None


def choose(
    logits: Float32[Array, "B V"],
    keys: Key[Array, "B"],
    seen: Bool[Array, "B V"] | None,
    sampling: Sampling,
) -> Int32[Array, "B"]:
    """Returns a token for each row.

    Args:
        logits: At least one of each row is finite.
        keys: The random key of each row's draw.
        seen: The tokens that stand in each row; of use to the repetition penalty alone.
        sampling: How it is chosen.
    """
    if sampling.repetition_penalty is not None:
        assert seen is not None
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return draw(logits, keys)


def penalize_repetition(
    logits: Float32[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float32[Array, ""]
) -> Float32[Array, "B V"]:
    """Returns logits that are divided by the penalty, or multiplied if negative, where seen.

    Source: CTRL, arXiv:1909.05858, section 4.1; for negative logits as Hugging Face transformers.
    """
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Float32[Array, "B V"], k: Int32[Array, ""]) -> Float32[Array, "B V"]:
    """Keeps the k likeliest tokens; all if k is V or more.

    Source: Fan et al., arXiv:1805.04833, section 5.4.
    """
    k = jnp.minimum(k, logits.shape[-1])
    return _cut(logits, lambda kept: jnp.sum(kept, axis=-1) >= k)


def keep_top_p(logits: Float32[Array, "B V"], p: Float32[Array, ""]) -> Float32[Array, "B V"]:
    """Keeps as few of the likeliest tokens as have a probability of at least p together.

    Source: Holtzman et al., arXiv:1904.09751, section 3.1.
    """
    probs = jax.nn.softmax(logits, axis=-1)
    return _cut(logits, lambda kept: jnp.sum(jnp.where(kept, probs, 0.0), axis=-1) >= p)


def keep_min_p(logits: Float32[Array, "B V"], p: Float32[Array, ""]) -> Float32[Array, "B V"]:
    """Keeps the tokens that are at least p times as likely as the likeliest.

    Source: Nguyen et al., arXiv:2407.01082, section 3.
    """
    threshold = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p)
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _cut(
    logits: Float32[Array, "B V"],
    enough: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]],
) -> Float32[Array, "B V"]:
    """Keeps the tokens from the highest threshold on that keeps enough of them.

    The threshold is found bit by bit, for to sort a vocabulary takes a CPU longer than a model.
    """
    # Unsigned integers in the order of the floats: the sign bit of positive ones is set, and all
    # bits of negative ones are flipped.
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    ordered = jnp.where(bits < sign, bits | sign, ~bits)

    def set_bit(i: Array, threshold: Array) -> Array:
        higher = threshold | (sign >> i.astype(jnp.uint32))
        return jnp.where(enough(ordered >= higher[:, None]), higher, threshold)

    start = jnp.zeros(logits.shape[:1], jnp.uint32)
    threshold = jax.lax.fori_loop(0, 32, set_bit, start)
    return jnp.where(ordered >= threshold[:, None], logits, -jnp.inf)


def draw(logits: Float32[Array, "B V"], keys: Key[Array, "B"]) -> Int32[Array, "B"]:
    """Returns a token of each row, drawn by its probability; a row's depends on its key alone."""
    probs = jax.nn.softmax(logits, axis=-1)
    until = jnp.cumsum(probs, axis=-1)  # A parallel sum: it need not grow everywhere.
    share = jax.vmap(jax.random.uniform)(keys)[:, None] * until[:, -1:]
    reached = (until > share) & (probs > 0)
    first = jnp.argmax(reached, axis=-1)
    likeliest = jnp.argmax(logits, axis=-1)
    return jnp.where(jnp.any(reached, axis=-1), first, likeliest).astype(jnp.int32)
