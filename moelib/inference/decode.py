"""Batches of sequences that grow by a token per step: prompts at once, then one token of each.

Programs are compiled once per batch size, padded prompt length and cache length; lengths are
powers of two, padded to what the mesh divides.

Letters: B batch, S padded prompt length, V vocabulary, n tokens that end a sequence, L MoE layers,
K experts per token.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from moelib.core.errors import UserError
from moelib.core.tree import Nested
from moelib.inference.cache import Cache, arrange_caches, new_cache, next_logits
from moelib.inference.sampling import Sampling, sample
from moelib.models.causal_lm import CausalLM
from moelib.parallel import sharding

_MIN_PROMPT = 16  # Minimum padded length of prompts.
MIN_CACHE = 256  # Minimum length of a cache, if as many tokens may be needed.

# XLA:CPU multiplies a bfloat16 matrix by one vector 5 times slower than by two (17.6 M parameters:
# 40 and 8 ms of CPU time per token).
_MIN_BATCH_CPU = 2

NO_TOKEN = -1  # Token of a sequence that has ended.
NOT_FINITE = -2  # Token of a sequence whose logits are not finite; callers get an error.


# Values that are recorded with drawn tokens; experts come with log probabilities.
Record = Literal["log_probs", "experts"] | None


class Prompt(NamedTuple):
    """The beginning of a sequence."""

    ids: Sequence[int]  # Token ids, at least one.
    limit: int  # Maximum number of tokens to generate, 1 or more.
    seed: int  # Seed of the draws.
    number: int = 0  # Distinguishes prompts with equal seeds.


class Decoding(NamedTuple):
    """Selection of the next token, and the tokens that end a sequence."""

    sampling: Sampling
    stop_ids: Int32[Array, "n"]
    vocab_size: Int32[Array, ""]  # Ids from here on are padding of the vocabulary.


class DecodeState(NamedTuple):
    """The arrays carried from step to step. Sequences that have ended keep theirs."""

    cache: Cache
    token: Int32[Array, "B"]  # Newest token, not yet in the cache.
    position: Int32[Array, "B"]  # Position of that token.
    active: Bool[Array, "B"]
    limit: Int32[Array, "B"]
    seed: UInt32[Array, "B"]
    number: UInt32[Array, "B"]
    num_generated: Int32[Array, "B"]
    seen: Bool[Array, "B V"] | None  # Tokens of the sequence, if repetition is penalized.


class Drawn(NamedTuple):
    """The next token of each sequence, and what is known of it if it is recorded."""

    token: Int32[Array, "B"]  # NO_TOKEN after the end.
    # Log probability under the model, whatever the filters of the sampling, of the drawn token,
    # which may be one that ends the sequence; float32, in nats.
    log_prob: Any = None
    drawn: Any = None  # The drawn token itself.
    # Experts of the tokens of this call in each MoE layer, [B, S, L, K]; of no expert E or more.
    expert_ids: Any = None


def decode(
    model: CausalLM,
    params: Nested,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    *,
    batch_size: int | None = None,
    record: Record = None,
) -> Iterator[Drawn]:
    """Yields the next token of each prompt, NO_TOKEN after its end, up to the largest limit.

    The next token is computed while the caller uses the previous one. With a `batch_size` above the
    number of prompts, they share the programs of a full batch. Arrays are NumPy's.

    Raises:
        UserError: If the logits of an active sequence are not finite.
    """
    longest, steps = max(len(p.ids) for p in prompts), max(p.limit for p in prompts)
    low_precision = params["embedding"]["weight"].dtype != jnp.float32
    least = _MIN_BATCH_CPU if low_precision and jax.default_backend() == "cpu" else 1
    ids, state = padded(prompts, max(batch_size or 0, len(prompts), least), longest)
    room = padded_length(min(max(longest + 1, MIN_CACHE), longest + steps))
    state, drawn = begin(model, params, ids, state, decoding, room, record)
    for step in range(steps):
        ready = drawn
        if step + 1 < steps:
            if longest + step >= room:  # The position of the token that is ready.
                room *= 2
                state = arrange(model, [state], room)
            with unsplit_sequences():
                state, drawn = advance(model, params, state, decoding, record)
        found = jax.tree.map(lambda x: np.asarray(x)[: len(prompts)], ready)
        if np.any(found.token == NOT_FINITE):
            raise UserError(
                f"The logits of generated token {step + 1} are not finite: the parameters are "
                "not finite, or exceed the range of their dtype; set another checkpoint or dtype."
            )
        yield found


def padded_length(num_tokens: int) -> int:
    """Returns the power of two, padded for the mesh, that holds so many tokens."""
    return sharding.padded_batch(1, max(_MIN_PROMPT, 1 << (num_tokens - 1).bit_length()))[1]


def unsplit_sequences() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which sequences, of one token, are not split."""
    if sharding.current_mesh() is None:
        return contextlib.nullcontext()
    return sharding.sharding_rules({"sequence": (), "residual_sequence": ()})


def padded(
    prompts: Sequence[Prompt], batch_size: int, longest: int
) -> tuple[Int32[Array, "B S"], DecodeState]:
    """Returns the ids of the prompts, padded on the right, and the state before they are read.

    Sequences that fill up the batch are inactive.
    """
    batch_size, _ = sharding.padded_batch(batch_size, 1)
    ids = np.zeros((batch_size, padded_length(longest)), np.int32)
    num_ids, limit = np.zeros((2, batch_size), np.int32)
    seed, number = np.zeros((2, batch_size), np.uint32)
    for i, prompt in enumerate(prompts):
        num_ids[i], limit[i] = len(prompt.ids), prompt.limit
        seed[i], number[i] = prompt.seed % (1 << 32), prompt.number
        ids[i, : num_ids[i]] = prompt.ids
    state = DecodeState(
        cache=None,
        token=jnp.asarray(num_ids),
        position=jnp.asarray(num_ids - 1),
        active=jnp.asarray(limit > 0),
        limit=jnp.asarray(limit),
        seed=jnp.asarray(seed),
        number=jnp.asarray(number),
        num_generated=jnp.zeros(batch_size, jnp.int32),
        seen=None,
    )
    return jnp.asarray(ids), state


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def begin(
    model: CausalLM,
    params: Nested,
    ids: Int32[Array, "B S"],
    state: DecodeState,
    decoding: Decoding,
    room: int,
    record: Record = None,
) -> tuple[DecodeState, Drawn]:
    """Returns the state with the prompts in the cache, and the first token of each sequence."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    mask = positions <= state.position[:, None]
    cache = new_cache(model, params, len(ids), room)
    logits, cache, experts = next_logits(
        model, params, cache, ids, positions, mask, record == "experts"
    )
    seen = None
    if decoding.sampling.repetition_penalty is not None:
        index = jnp.arange(len(ids))[:, None]
        seen = jnp.zeros(logits.shape, bool).at[index, ids].max(mask)
    state, drawn = _with_next(state._replace(cache=cache, seen=seen), logits, decoding, record)
    return state, drawn._replace(expert_ids=jax.tree.map(_replicated, experts))


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def advance(
    model: CausalLM,
    params: Nested,
    state: DecodeState,
    decoding: Decoding,
    record: Record = None,
) -> tuple[DecodeState, Drawn]:
    """Returns the state with the newest tokens in the cache, and the next token of each."""
    one = state.token[:, None], state.position[:, None], state.active[:, None]
    logits, cache, experts = next_logits(model, params, state.cache, *one, record == "experts")
    state, drawn = _with_next(state._replace(cache=cache), logits, decoding, record)
    return state, drawn._replace(expert_ids=jax.tree.map(_replicated, experts))


def _with_next(
    state: DecodeState, logits: Float32[Array, "B V"], decoding: Decoding, record: Record
) -> tuple[DecodeState, Drawn]:
    """Returns the state with the next tokens, and these tokens, NO_TOKEN after an end."""
    of_model = logits
    known = jnp.arange(logits.shape[1], dtype=jnp.int32) < decoding.vocab_size
    logits = jnp.where(known[None], logits, -jnp.inf)
    # Tested apart, because the maximum of XLA:CPU drops a NaN.
    finite = jnp.isfinite(jnp.max(logits, axis=1)) & ~jnp.any(jnp.isnan(logits), axis=1)
    token = sample(logits, _keys(state), state.seen, decoding.sampling)
    stops = jnp.any(token[:, None] == decoding.stop_ids[None], axis=1)
    shown = jnp.where(state.active & ~stops, token, NO_TOKEN)
    shown = jnp.where(state.active & ~finite, NOT_FINITE, shown)
    num_generated = state.num_generated + 1
    active = state.active & ~stops & (num_generated < state.limit)
    seen = state.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    state = state._replace(
        token=jnp.where(active, token, 0),
        position=state.position + active.astype(jnp.int32),
        active=active,
        num_generated=num_generated,
        seen=seen,
    )
    # Replicated, so that the outputs have the shardings that the program was compiled for, and each
    # process can read what was drawn.
    found = Drawn(shown)
    if record is not None:
        log_probs = jax.nn.log_softmax(of_model)
        log_prob = jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
        found = Drawn(shown, log_prob, token)
    small, found = jax.tree.map(_replicated, (state._replace(cache=None), found))
    return small._replace(cache=state.cache), found


def _keys(state: DecodeState) -> Key[Array, "B"]:
    """Returns the key of each sequence's next draw."""
    keys = jax.vmap(jax.random.key)(state.seed)
    for number in (state.number, state.num_generated):
        keys = jax.vmap(jax.random.fold_in)(keys, number)
    return keys


def _replicated(x: Array) -> Array:
    return sharding.constrain(x, (None,) * x.ndim)


@functools.partial(jax.jit, static_argnums=(0, 2))
def arrange(
    model: CausalLM, states: Sequence[DecodeState], room: int, rows: Int32[Array, "B"] | None = None
) -> DecodeState:
    """Returns the state of some sequences of states, with room for so many tokens of each.

    Args:
        model: The model.
        states: States of any numbers of sequences; one without `rows`.
        room: Number of tokens that the cache has room for, no less than that of the states.
        rows: Index of each sequence in the joined sequences of the states, -1 for one that is
            inactive; None for all.
    """
    index = None if rows is None else jnp.maximum(rows, 0)
    cache = arrange_caches(model, [state.cache for state in states], room, index)
    if rows is None:
        return states[0]._replace(cache=cache)
    small = [state._replace(cache=None) for state in states]
    joined = jax.tree.map(lambda *x: _replicated(jnp.concatenate(x)[index]), *small)
    return joined._replace(cache=cache, active=joined.active & (rows >= 0))
