"""Rows of tokens that grow: prompts are computed at once, and then one token of each row at a time.

Each program is compiled once for a number of rows, a padded length of prompts and a length of the
cache; lengths are powers of two, and multiples of what a mesh splits sequences into.

Letters: B rows, S tokens of the longest prompt and padding, V vocabulary, n tokens that end a text.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from moelib.core.context import Nested
from moelib.inference.cache import Cache, grow_cache, new_cache, next_logits
from moelib.inference.sampling import Sampling, choose
from moelib.models.causal_lm import CausalLM
from moelib.parallel import sharding

_MIN_PROMPT = 16  # What prompts are padded to at least,
_MIN_CACHE = 256  # and what a cache has room for if so much may be needed.

NO_TOKEN = -1  # Of a row that has ended.
_NOT_FINITE = -2  # Of a row whose logits are not numbers; no caller sees it.


class Prompt(NamedTuple):
    """What a row begins with.

    Attributes:
        ids: Its tokens, at least one.
        limit: The most tokens that follow, 1 or more.
        seed: Decides with `number` what is drawn.
        number: Tells prompts of one seed apart.
    """

    ids: Sequence[int]
    limit: int
    seed: int
    number: int = 0


class Choice(NamedTuple):
    """How tokens are chosen, and which end a row."""

    sampling: Sampling
    stop_ids: Int32[Array, "n"]
    vocab_size: Int32[Array, ""]  # Tokens from here on are never chosen.


class _Rows(NamedTuple):
    """What is carried from token to token. Rows that have ended stay as they are."""

    cache: Cache
    token: Int32[Array, "B"]  # The newest one, not yet in the cache.
    position: Int32[Array, "B"]  # Its position.
    active: Bool[Array, "B"]
    limit: Int32[Array, "B"]
    seed: UInt32[Array, "B"]
    number: UInt32[Array, "B"]
    num_chosen: Int32[Array, ""]
    seen: Bool[Array, "B V"] | None  # Tokens that stand in the row, if there is a penalty for them.


def tokens_of_rows(
    model: CausalLM,
    params: Nested,
    prompts: Sequence[Prompt],
    choice: Choice,
    *,
    num_rows: int | None = None,
) -> Iterator[Int32[npt.NDArray, "B"]]:
    """Yields the next token of each prompt, NO_TOKEN where it has ended, up to the largest limit.

    The next token is computed while the caller looks at the one before.

    Args:
        model: A language model.
        params: Its parameters.
        prompts: B of them, at least one.
        choice: How tokens are chosen.
        num_rows: Rows to compute, so that fewer prompts need no program of their own; B if None.

    Raises:
        ValueError: If the logits of a row that goes on are not finite.
    """
    inputs = _padded(prompts, _num_rows(max(num_rows or 0, len(prompts))))
    longest, steps = max(len(p.ids) for p in prompts), max(p.limit for p in prompts)
    room = _length(min(max(longest + 1, _MIN_CACHE), longest + steps))
    rows, token = _begin(model, params, inputs, choice, room)
    for step in range(steps):
        ready = token
        if step + 1 < steps:
            if longest + step >= room:  # Where the token that is ready comes to stand.
                room *= 2
                rows = rows._replace(cache=_grow(model, rows.cache, len(inputs.ids), room))
            with _one_token_each():
                rows, token = _advance(model, params, rows, choice)
        tokens = np.asarray(ready)[: len(prompts)]
        if np.any(tokens == _NOT_FINITE):
            raise ValueError(
                f"The logits of token {step + 1} after a prompt are not finite: the parameters are "
                "not, it seems; take another checkpoint, or a dtype of a larger range."
            )
        yield tokens


def _num_rows(wanted: int) -> int:
    """Returns a number of rows, as many as wanted or more, that the mesh divides."""
    return _round_up(wanted, _parts("batch"))


def _length(wanted: int) -> int:
    """Returns a length of rows, as many tokens as wanted or more, that the mesh divides."""
    ring = _parts("sequence")
    pieces = 2 * ring if ring > 1 else 1  # Attention takes two of each device.
    parts = math.lcm(pieces, _parts("residual_sequence"))
    return _round_up(max(_MIN_PROMPT, 1 << (wanted - 1).bit_length()), parts)


def _parts(axis: str) -> int:
    """Returns into how many parts the mesh splits a logical axis."""
    mesh = sharding.current_mesh()
    shape = {} if mesh is None else dict(mesh.shape)
    return math.prod(shape[name] for name in sharding.mesh_axes(axis, shape))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _one_token_each() -> Any:
    """Returns a context in which sequences, of one token, are not split."""
    if sharding.current_mesh() is None:
        return contextlib.nullcontext()
    return sharding.sharding_rules({"sequence": (), "residual_sequence": ()})


class _Inputs(NamedTuple):
    ids: Int32[Array, "B S"]
    num_ids: Int32[Array, "B"]
    limit: Int32[Array, "B"]
    seed: UInt32[Array, "B"]
    number: UInt32[Array, "B"]


def _padded(prompts: Sequence[Prompt], num_rows: int) -> _Inputs:
    """Returns prompts with padding after them, and rows that have ended below them."""
    size = _length(max(len(p.ids) for p in prompts))
    ids = np.zeros((num_rows, size), np.int32)
    numbers = np.zeros((4, num_rows), np.uint32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.ids)] = prompt.ids
        seed = prompt.seed % (1 << 32)
        numbers[:, row] = len(prompt.ids), prompt.limit, seed, prompt.number
    num_ids, limit = (jnp.asarray(x, jnp.int32) for x in numbers[:2])
    return _Inputs(jnp.asarray(ids), num_ids, limit, *map(jnp.asarray, numbers[2:]))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _begin(
    model: CausalLM, params: Nested, inputs: _Inputs, choice: Choice, room: int
) -> tuple[_Rows, Array]:
    """Returns the rows with their prompts in the cache, and the first token of each."""
    ids, num_ids = inputs.ids, inputs.num_ids
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
    mask = positions < num_ids[:, None]
    cache = new_cache(model, params, len(ids), room)
    logits, cache = next_logits(model, params, cache, ids, positions, mask)
    seen = None
    if choice.sampling.repetition_penalty is not None:
        index = jnp.arange(len(ids))[:, None]
        seen = jnp.zeros(logits.shape, bool).at[index, ids].max(mask)
    rows = _Rows(
        cache=cache,
        token=num_ids,
        position=num_ids - 1,
        active=inputs.limit > 0,
        limit=inputs.limit,
        seed=inputs.seed,
        number=inputs.number,
        num_chosen=jnp.zeros((), jnp.int32),
        seen=seen,
    )
    return _with_next(rows, logits, choice)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(model: CausalLM, params: Nested, rows: _Rows, choice: Choice) -> tuple[_Rows, Array]:
    """Returns the rows with their newest token in the cache, and the next token of each."""
    one = rows.token[:, None], rows.position[:, None], rows.active[:, None]
    logits, cache = next_logits(model, params, rows.cache, *one)
    return _with_next(rows._replace(cache=cache), logits, choice)


def _with_next(
    rows: _Rows, logits: Float32[Array, "B V"], choice: Choice
) -> tuple[_Rows, Int32[Array, "B"]]:
    """Returns the rows with a token chosen, and that token; NO_TOKEN where a row has ended."""
    known = jnp.arange(logits.shape[1], dtype=jnp.int32) < choice.vocab_size
    logits = jnp.where(known[None], logits, -jnp.inf)
    finite = jnp.isfinite(jnp.max(logits, axis=1))  # One NaN makes the maximum NaN.
    token = choose(logits, _keys(rows), rows.seen, choice.sampling)
    stops = jnp.any(token[:, None] == choice.stop_ids[None], axis=1)
    shown = jnp.where(rows.active & ~stops, token, NO_TOKEN)
    shown = jnp.where(rows.active & ~finite, _NOT_FINITE, shown)
    num_chosen = rows.num_chosen + 1
    active = rows.active & ~stops & (num_chosen < rows.limit)
    seen = rows.seen
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    rows = rows._replace(
        token=jnp.where(active, token, 0),
        position=rows.position + active.astype(jnp.int32),
        active=active,
        num_chosen=num_chosen,
        seen=seen,
    )
    # The same on all devices: what a program returns is then what it was compiled for.
    small = jax.tree.map(_whole, rows._replace(cache=None))
    return small._replace(cache=rows.cache), _whole(shown)


def _keys(rows: _Rows) -> Key[Array, "B"]:
    """Returns the key of each row's next token."""
    keys = jax.vmap(jax.random.key)(rows.seed)
    for number in (rows.number, jnp.broadcast_to(rows.num_chosen, rows.number.shape)):
        keys = jax.vmap(jax.random.fold_in)(keys, number)
    return keys


def _whole(x: Array) -> Array:
    return sharding.constrain(x, (None,) * x.ndim)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _grow(model: CausalLM, cache: Cache, num_rows: int, room: int) -> Cache:
    return grow_cache(model, cache, num_rows, room)
