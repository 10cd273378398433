"""Selection of the next token from its logits.

Excluded tokens have the logit -inf. The filters keep all tokens that are as likely as the least
likely one they must keep. Settings are numbers for all sequences, or arrays of one per sequence.

Letters: B batch, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Key


class Sampling(NamedTuple):
    """The steps that select a token, in the order of their application; None skips a step."""

    repetition_penalty: Float32[Array, "*B"] | None = None  # See `penalize_repetition`.
    # Divisor of the logits; None, or 0 for a sequence, selects the most likely token.
    temperature: Float32[Array, "*B"] | None = None
    top_k: Int32[Array, "*B"] | None = None  # See `keep_top_k`.
    top_p: Float32[Array, "*B"] | None = None  # See `keep_top_p`.
    min_p: Float32[Array, "*B"] | None = None  # See `keep_min_p`.


def sample(
    logits: Float32[Array, "B V"],
    keys: Key[Array, "B"],
    seen: Bool[Array, "B V"] | None,
    sampling: Sampling,
) -> Int32[Array, "B"]:
    """Returns the next token of each sequence, of which at least one logit must be finite.

    The tokens already seen in each sequence are needed for a repetition penalty only.
    """
    if sampling.repetition_penalty is not None:
        assert seen is not None
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    best = _most_likely(logits)
    if sampling.temperature is None:
        return best
    is_drawn = sampling.temperature > 0
    logits = logits / _column(jnp.where(is_drawn, sampling.temperature, 1.0))
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return jnp.where(is_drawn, draw(logits, keys), best)


def _column(x: Array) -> Array:
    """Returns a number, or numbers of sequences as a column."""
    return x[:, None] if x.ndim else x


def penalize_repetition(
    logits: Float32[Array, "B V"], seen: Bool[Array, "B V"], penalty: Float32[Array, "*B"]
) -> Float32[Array, "B V"]:
    """Divides the positive logits of seen tokens by the penalty, and multiplies negative ones.

    Source: CTRL, arXiv:1909.05858, section 4.1; negative logits as in Hugging Face transformers.
    """
    penalty = _column(penalty)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Float32[Array, "B V"], k: Int32[Array, "*B"]) -> Float32[Array, "B V"]:
    """Keeps the k most likely tokens; all of them if k is V or more.

    Source: Fan et al., arXiv:1805.04833, section 5.4.
    """
    k = jnp.minimum(k, logits.shape[-1])
    return _cut(logits, lambda kept: jnp.sum(kept, axis=-1) >= k)


def keep_top_p(logits: Float32[Array, "B V"], p: Float32[Array, "*B"]) -> Float32[Array, "B V"]:
    """Keeps the fewest most likely tokens whose total probability is at least p; all if p is 1.

    Source: Holtzman et al., arXiv:1904.09751, section 3.1.
    """
    probs = jax.nn.softmax(logits, axis=-1)
    kept = _cut(logits, lambda kept: jnp.sum(jnp.where(kept, probs, 0.0), axis=-1) >= p)
    # The sum of a few probabilities may round to 1.
    return jnp.where(_column(p) < 1, kept, logits)


def keep_min_p(logits: Float32[Array, "B V"], p: Float32[Array, "*B"]) -> Float32[Array, "B V"]:
    """Keeps tokens that are at least p times as likely as the most likely one.

    Source: Nguyen et al., arXiv:2407.01082, section 3.
    """
    threshold = jnp.max(logits, axis=-1, keepdims=True) + _column(jnp.log(p))
    return jnp.where(logits >= threshold, logits, -jnp.inf)


def _cut(
    logits: Float32[Array, "B V"],
    enough: Callable[[Bool[Array, "B V"]], Bool[Array, "B"]],
) -> Float32[Array, "B V"]:
    """Keeps the tokens above the highest threshold that keeps enough of them.

    The threshold is found bit by bit: on a CPU, sorting a vocabulary takes longer than the model.
    """
    # Unsigned integers in the order of the floats: the sign bit of positive floats is set, and all
    # bits of negative floats are flipped.
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
    """Draws one token per sequence, which depends on the sequence's own logits and key only."""
    probs = jax.nn.softmax(logits, axis=-1)
    until = jnp.cumsum(probs, axis=-1)  # A parallel sum, which may decrease by rounding.
    share = jax.vmap(jax.random.uniform)(keys)[:, None] * until[:, -1:]
    reached = (until > share) & (probs > 0)
    return jnp.where(jnp.any(reached, axis=-1), _first(reached), _most_likely(logits))


def _most_likely(logits: Float32[Array, "B V"]) -> Int32[Array, "B"]:
    """Returns the first of the most likely tokens."""
    return _first(logits == jnp.max(logits, axis=-1, keepdims=True))


def _first(chosen: Bool[Array, "B V"]) -> Int32[Array, "B"]:
    """Returns the first chosen token of each sequence, the last token if none is chosen.

    For 8 sequences and a vocabulary of 8,192 XLA:CPU takes 280 us for `jnp.argmax`, which reduces
    pairs, and 30 us for the maximum and this minimum.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, 1)
    return jnp.min(jnp.where(chosen, index, chosen.shape[1] - 1), axis=-1)
