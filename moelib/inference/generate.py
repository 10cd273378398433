"""Generation by computing the whole sequence again for each token: simple, and slow.

Letters: S the length of the buffer, V vocabulary.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core.context import Nested
from moelib.core.module import functional
from moelib.models.causal_lm import CausalLM


def generate(
    model: CausalLM,
    params: Nested,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yields tokens that follow a prompt, at most `max_new_tokens`; stops after a stop token.

    Args:
        model: A language model.
        params: Its parameters.
        prompt: Token ids, at least one.
        max_new_tokens: How many tokens to yield at most, 1 or more.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Draws among the likeliest tokens whose probabilities reach this sum.
        seed: Decides what is drawn; token n of the text depends on (seed, n).
        stop_ids: Tokens that end the text; they are not yielded.
        vocab_size: Tokens that mean something, if the model's vocabulary is padded beyond them:
            the others are never drawn. None takes all of the model's.

    Raises:
        ValueError: If the prompt is empty or holds an id beyond the vocabulary, a setting is out
            of range, or vocab_size is larger than the model's.
    """
    vocab_size = _checked_vocab_size(vocab_size, model.config.vocab_size)
    if not prompt:
        raise ValueError("The prompt is empty; give it at least one token, such as end of text.")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(f"The prompt holds id {max(prompt)}; the vocabulary is {vocab_size}.")
    if max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"max_new_tokens {max_new_tokens}, temperature {temperature}, top_p {top_p}: set them "
            "to 1 or more, 0 or more, and above 0 to 1."
        )
    key = jax.random.key(seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        size = max(64, 1 << (len(ids) - 1).bit_length())  # Few sizes: each is compiled once.
        buffer = np.zeros((1, size), np.int32)
        buffer[0, : len(ids)] = ids
        draw_key = jax.random.fold_in(key, len(ids))
        token = int(
            _next_token(model, params, buffer, len(ids), vocab_size, draw_key, temperature, top_p)
        )
        if token in stop_ids:
            return
        ids.append(token)
        yield token


def _checked_vocab_size(wanted: int | None, of_model: int) -> int:
    """Returns how many tokens may be drawn. Raises ValueError if the model has not as many."""
    if wanted is None:
        return of_model
    if not 1 <= wanted <= of_model:
        raise ValueError(
            f"vocab_size is {wanted}, and the model has {of_model} tokens; generate with the "
            "tokenizer that the model was trained with."
        )
    return wanted


@functools.partial(jax.jit, static_argnums=(0,))
def _next_token(
    model: CausalLM,
    params: Nested,
    buffer: Any,
    length: Any,
    vocab_size: Any,
    key: jax.Array,
    temperature: Any,
    top_p: Any,
) -> jax.Array:
    """Returns the token below `vocab_size` that follows the first `length` of buffer [1, S]."""
    index = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None]
    batch = {
        "input_ids": buffer,
        "positions": index,
        "segment_ids": (index < length).astype(jnp.int32),
    }
    logits, _ = functional(
        model, prng_key=None, state=params, inputs=(batch,), is_training=False, method="logits"
    )
    logits = jax.lax.dynamic_index_in_dim(logits[0], length - 1, 0, keepdims=False)  # [V]
    known = jnp.arange(logits.shape[0]) < vocab_size
    logits = jnp.where(known, logits.astype(jnp.float32), -jnp.inf)
    return sample_token(logits, key, temperature, top_p)


def sample_token(logits: jax.Array, key: jax.Array, temperature: Any, top_p: Any) -> jax.Array:
    """Returns a token drawn from logits [V]; the likeliest one at temperature 0."""
    order = jnp.argsort(-logits)
    scaled = logits[order] / jnp.maximum(temperature, 1e-6)
    probs = jax.nn.softmax(scaled)
    before = jnp.cumsum(probs) - probs  # The likeliest token always stays.
    drawn = jax.random.categorical(key, jnp.where(before < top_p, scaled, -jnp.inf))
    return jnp.where(temperature == 0, order[0], order[drawn])
